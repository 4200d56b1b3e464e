"""The profile of a compiled step that planners plan on: its nodes are would-be kernels.

In: :class:`Kernels`, what is around the graph. Out: a :class:`GraphProfile`. What the backward makes itself, and no plan
changes, is :mod:`fxmem.compiled.backward_values`'.
"""

from __future__ import annotations

from torch import fx

from fxmem.capture.graph import source_of
from fxmem.compiled.backward_values import Places, bytes_in_backward, places_in_backward
from fxmem.compiled.joint import is_tangent, nbytes_of
from fxmem.compiled.kernels import Kernels
from fxmem.compiled.op_kinds import seconds_of, work_of
from fxmem.compiled.surroundings import Surroundings
from fxmem.ir import GraphProfile, NodeProfile, Phase, Recipe, StaticBytes, Storage, Tick
from fxmem.profiling.roofline import Hardware


def profile_of(kernels: Kernels, around: Surroundings, hardware: Hardware) -> GraphProfile:
    """Return the profile of the step: forward, what comes between, backward."""
    values, joint = kernels.values, kernels.joint
    index = {value: i for i, value in enumerate(values)}
    runs_at = places_in_backward(joint)
    first, last = _uses_in_backward(kernels, runs_at)
    nodes: list[NodeProfile] = []
    recipes: list[Recipe] = []
    recipe_of: dict[fx.Node, int] = {}
    for i, kernel in enumerate(kernels.kernels):
        reads, creates = tuple(index[s] for s in kernel.sources), tuple(index[v] for v in kernel.values)
        flops, moved_bytes, seconds = work_of(kernel.op, kernel.inner, kernel.sources, kernel.values, hardware)
        nodes.append(
            NodeProfile(
                i, kernel.op.name, str(kernel.op.target), reads, creates, (), (), seconds, flops, moved_bytes, False,
                kernel.why_not, source_of(kernel.op),
            )
        )  # fmt: skip
        if not kernel.why_not:
            nbytes = sum(nbytes_of(v) for v in kernel.values)
            recipe_of.update(dict.fromkeys(kernel.values, len(recipes)))
            recipes.append(Recipe(len(recipes), (i,), reads, creates, seconds, nbytes, nbytes))
    storages = [
        Storage(
            index[v], v.name, nbytes_of(v), i, False, recipe_of.get(v), kernel.why_not, 1 if v in first else 0
        )
        for i, kernel in enumerate(kernels.kernels)
        for v in kernel.values
    ]  # fmt: skip
    ticks = (*_forward_ticks(kernels, index, around), *_backward_ticks(kernels, index, first, last, runs_at, around))
    backward_seconds = sum(seconds_of(n, hardware) for n in joint.backward)
    static = StaticBytes(inputs_bytes=around.fixed_bytes)
    return GraphProfile(tuple(nodes), tuple(storages), tuple(recipes), ticks, static, backward_seconds)


def _uses_in_backward(kernels: Kernels, runs_at: Places) -> tuple[Places, Places]:
    """Return by value the place in the backward of its first and its last use."""
    first: Places = {}
    last: Places = {}
    for place, (node, needs) in enumerate(zip(kernels.joint.backward, kernels.needs, strict=True)):
        for value in needs:
            first.setdefault(value, place)
            last[value] = max(last.get(value, 0), runs_at[node])
    end = max(0, len(kernels.needs) - 1)
    for gradient in kernels.joint.gradients:
        for value in kernels.sources.get(gradient, ()):
            first.setdefault(value, end)
            last[value] = end
    return first, last


def _forward_ticks(kernels: Kernels, index: Places, around: Surroundings) -> list[Tick]:
    last: dict[fx.Node, int] = {value: i for i, k in enumerate(kernels.kernels) for value in k.values}
    for i, kernel in enumerate(kernels.kernels):
        last.update(dict.fromkeys(kernel.sources, i))
    outputs = [v for k in kernels.kernels if k.why_not == "an output" for v in k.values]
    fixed, ticks = around.fixed_bytes + sum(around.in_forwards), []
    for i, kernel in enumerate(kernels.kernels):
        creates = tuple(index[v] for v in kernel.values)
        gone = tuple(index[v] for v, place in last.items() if place == i and v not in outputs)
        made = sum(nbytes_of(v) for v in kernel.values)
        ticks.append(Tick(Phase.FORWARD, i, (), fixed, fixed + made, creates, gone, ()))
    between = around.loss_peak_bytes
    gone = tuple(index[v] for v in outputs)
    return [*ticks, Tick(Phase.LOSS, None, (), fixed, fixed + between, (), gone, (), loss_bytes=between)]


def _backward_ticks(
    kernels: Kernels,
    index: Places,
    first: Places,
    last: Places,
    runs_at: Places,
    around: Surroundings,
) -> list[Tick]:
    """A tick begins where a value is asked for, or where one before it was let go of."""
    asked: dict[int, list[int]] = {}
    gone: dict[int, list[int]] = {}
    for value, place in first.items():
        asked.setdefault(place, []).append(index[value])
    for value, place in last.items():
        gone.setdefault(place, []).append(index[value])
    tangents = sum(nbytes_of(n) for n in kernels.joint.inputs if is_tangent(n))
    base = around.fixed_bytes + around.held_in_backward_bytes + tangents
    made, freed = bytes_in_backward(kernels, runs_at)
    live, ticks = base, []
    start, peak, unpacks = live, live, tuple(sorted(asked.get(0, ())))
    for place in range(len(kernels.needs)):
        if place in asked and place > 0:
            ticks.append(Tick(Phase.BACKWARD, None, unpacks, start, peak, (), (), ()))
            start, peak, unpacks = live, live, tuple(sorted(asked[place]))
        live += made[place]
        peak = max(peak, live)
        live -= freed[place]
        if place in gone:
            released = tuple(sorted(gone[place]))
            ticks.append(Tick(Phase.BACKWARD, None, unpacks, start, peak, (), (), released))
            start, peak, unpacks = live, live, ()
    return [*ticks, Tick(Phase.BACKWARD, None, unpacks, start, peak, (), (), ())]
