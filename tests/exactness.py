"""One oracle for all tests: a training step under a plan is the eager step, bit for bit and byte for byte.

What goes in: a function that builds a model (the same one each time), its inputs, optionally a loss and the plans to
force. What is checked, for each plan, against eager on another build of the model: loss, outputs, every gradient
(parameters and inputs), every buffer, inputs written in place, the generator's state after the step; simulated =
verified = measured peak; and that after the step nothing lives that eager would not keep. Bits, not values: a NaN
equals a NaN, and 0.0 differs from -0.0.
"""

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from fxmem.capture.export import capture
from fxmem.capture.graph import CaptureGraph, Inputs
from fxmem.capture.joint_steps import joint_steps
from fxmem.ir import KEEP, GraphProfile, Plan
from fxmem.passes.compress_saved import with_compressed_saves
from fxmem.passes.emit import rewrite
from fxmem.planners.registry import PLANNERS
from fxmem.planners.simulate import drop_all, keep_all, simulate
from fxmem.profiling.profile import Profiled, profile
from fxmem.profiling.roofline import PRESETS
from fxmem.profiling.storage_tracker import StorageTracker
from fxmem.profiling.training_step import TrainingStep, default_loss, run_step
from fxmem.profiling.verify import emitted_step, verify
from fxmem.runtime.autocast import Autocast
from fxmem.torch_patches import as_in_training

Loss = Callable[[Any], Tensor]
Forward = Callable[..., Any]
MakePlan = Callable[[GraphProfile], Plan]


# -- plans to force ----------------------------------------------------------------------------------------------------


def passing(graph_profile: GraphProfile) -> Plan:
    """Drop whatever may be dropped; once recomputed, a storage is held until its last use."""
    last = len(graph_profile.recipes)
    return Plan("passing", tuple(KEEP if s.recipe is None else last for s in graph_profile.storages))


def random_limits(seed: int) -> MakePlan:
    """Each storage kept, late, on the way, or anything between."""

    def plan(graph_profile: GraphProfile) -> Plan:
        draw, last = random.Random(seed), len(graph_profile.recipes)
        limits = [
            KEEP if s.recipe is None or draw.random() < 0.4 else draw.randint(s.recipe, last)
            for s in graph_profile.storages
        ]
        return Plan(f"random_{seed}", tuple(limits))

    return plan


def tightest(graph_profile: GraphProfile) -> Plan:
    """The plan of the least peak that the default planner finds."""
    points = PLANNERS["auto"](graph_profile, seconds=2.0)
    return min(points, key=lambda point: point.peak_bytes).plan


NUM_LEAN_PLANS = 2
"""Of the plans, the last ones are checked with calls that save less too, where the model has any."""

NUM_PROGRAMS = [0]
"""How many plans were checked as programs too."""

PLANS: tuple[MakePlan, ...] = (keep_all, drop_all, passing, random_limits(1), tightest)


# -- what a step computes ----------------------------------------------------------------------------------------------


@dataclass
class Step:
    """All that a training step leaves behind. Tensors are copies."""

    values: dict[str, Tensor | None]
    """``loss``, ``output[i]``, ``grad of name``, ``grad of input[i]``, ``input[i]``, ``name`` of buffers, ``generator``."""
    structure: Any
    """The output's tree, with the non-tensor leaves."""
    peak_bytes: int
    left_bytes: int
    """Alive after the step, once its outputs and loss are gone: parameters, gradients, buffers, inputs, leaks."""


def run(
    forward: Forward,
    model: nn.Module,
    inputs: Inputs,
    loss: Loss | None = None,
    autocast: Autocast | None = None,
    seed: int = 7,
    constants: Sequence[Tensor] = (),
) -> Step:
    """Run one step of ``forward(*args, **kwargs)``, whose state is in ``model``, on copies of ``inputs``.

    ``constants``: tensors of the emitted graph that eager makes anew each time; they count for the peak only.
    """
    mine = Inputs(tuple(_copied(leaf) for leaf in inputs.leaves), inputs.spec)
    args, kwargs = mine.call()
    for parameter in model.parameters():
        parameter.grad = None
    kept: list[Any] = []

    def noted_forward() -> Any:
        kept.append(forward(*args, **kwargs))
        return kept[0]

    def noted_loss(output: Any) -> Tensor:
        kept.append((loss or default_loss)(output))
        return kept[1]

    tracker = StorageTracker()
    tracker.hold(t for t in (*model.parameters(), *model.buffers(), *mine.leaves) if _is_strided(t))
    constant_bytes = tracker.hold(constants)
    torch.manual_seed(seed)
    with tracker:
        run_step(noted_forward, noted_loss, None, autocast)
    generator = torch.get_rng_state()
    output_leaves, spec = tree_flatten(kept[0])
    values: dict[str, Tensor | None] = {"loss": kept[1].detach(), "generator": generator}
    values.update((f"output[{i}]", t.detach()) for i, t in enumerate(output_leaves) if isinstance(t, Tensor))
    values.update((f"grad of {name}", p.grad) for name, p in model.named_parameters())
    values.update((name, b) for name, b in model.named_buffers())
    for i, leaf in enumerate(mine.leaves):
        if isinstance(leaf, Tensor):
            values[f"input[{i}]"] = leaf.detach()
            values[f"grad of input[{i}]"] = leaf.grad if leaf.is_leaf else None
    structure = (spec, [None if isinstance(leaf, Tensor) else leaf for leaf in output_leaves])
    values = {name: None if t is None else t.clone() for name, t in values.items()}
    peak_bytes = tracker.peak_bytes
    del output_leaves
    kept.clear()
    return Step(values, structure, peak_bytes, tracker.live_bytes - constant_bytes)


def _copied(leaf: Any) -> Any:
    if not isinstance(leaf, Tensor):
        return leaf
    base = torch.empty_strided(leaf.size(), leaf.stride(), dtype=leaf.dtype, device=leaf.device)
    return base.copy_(leaf.detach()).requires_grad_(leaf.requires_grad)


def _is_strided(tensor: object) -> bool:
    return isinstance(tensor, Tensor) and tensor.layout == torch.strided


def differences(expected: Step, actual: Step) -> list[str]:
    """Say what differs between two steps; empty if nothing does."""
    found = [] if expected.structure == actual.structure else ["the structure of the output"]
    for name in sorted(expected.values.keys() | actual.values.keys()):
        ours, theirs = actual.values.get(name), expected.values.get(name)
        if not same_bits(theirs, ours):
            found.append(f"{name}: {_short(ours)}, eager has {_short(theirs)}")
    return found


def same_bits(a: Tensor | None, b: Tensor | None) -> bool:
    """True if both are None, or equal in dtype, shape, layout and every bit (all NaNs are one)."""
    if a is None or b is None:
        return a is b
    if a.dtype != b.dtype or a.shape != b.shape or a.layout != b.layout:
        return False
    if a.layout != torch.strided:
        a, b = a.coalesce(), b.coalesce()
        return torch.equal(a.indices(), b.indices()) and same_bits(a.values(), b.values())
    if a.is_complex():
        return same_bits(torch.view_as_real(a.resolve_conj()), torch.view_as_real(b.resolve_conj()))
    if not a.is_floating_point():
        return torch.equal(a, b)
    same = (a == b) & (a.signbit() == b.signbit()) | (a.isnan() & b.isnan())
    return bool(same.all())


def _short(tensor: Tensor | None) -> str:
    if tensor is None:
        return "none"
    return f"{tensor.dtype} {tuple(tensor.shape)} {tensor.flatten()[:3].tolist() if tensor.numel() else []}"


# -- the check ---------------------------------------------------------------------------------------------------------


@dataclass
class Checked:
    """What was checked, for tests that want to look further."""

    profiled: Profiled
    captured: CaptureGraph
    eager: Step
    peaks: dict[str, int]
    """Peak bytes by plan."""


def check(
    build: Callable[[], nn.Module],
    *args: Any,
    kwargs: dict[str, Any] | None = None,
    loss: Loss | None = None,
    plans: Iterable[MakePlan] = PLANS,
    autocast: torch.dtype | None = None,
    seed: int = 7,
    exact_peak: bool = True,
    also: Callable[[Profiled], CaptureGraph] | None = None,
) -> Checked:
    """Assert that the model's step under each plan is eager's step; see the module's docstring.

    ``exact_peak=False``: do not compare peaks, where a real kernel makes other tensors than its fake does. ``also``: a
    rewrite of the graph under which each plan is eager's step, too.
    """
    model, reference = _built(build), _built(build)
    region = None if autocast is None else Autocast("cpu", autocast)
    inputs = Inputs.of(args, kwargs or {})
    eager = run(reference, reference, inputs, loss, region, seed)
    random_state = torch.get_rng_state()
    state = {name: t.detach().clone() for name, t in _state(model)}
    example = Inputs(tuple(_copied(leaf) for leaf in inputs.leaves), inputs.spec)
    captured = capture(model, example, region)
    profiled = profile(captured, example, PRESETS["cpu"].seconds, TrainingStep(loss_fn=loss, optimizer=None))
    assert torch.equal(random_state, torch.get_rng_state()), "planning drew random numbers"
    changed = [name for name, t in _state(model) if not same_bits(state[name], t.detach())]
    assert not changed, f"planning changed {changed}"
    plans, peaks, found = tuple(plans), {}, []
    graphs = [("", profiled, plans)]
    lean = with_compressed_saves(profiled, lambda node: False, least_share=0.0)
    if lean is not captured:
        leaner = profile(lean, example, PRESETS["cpu"].seconds, TrainingStep(loss_fn=loss, optimizer=None))
        graphs.append((" saving less", leaner, plans[-NUM_LEAN_PLANS:]))
    if also is not None:
        other = profile(also(profiled), example, PRESETS["cpu"].seconds, TrainingStep(loss_fn=loss, optimizer=None))
        graphs.append((" rewritten", other, plans))
    for what, graph, its_plans in graphs:
        for make_plan in its_plans:
            plan = make_plan(graph.profile)
            for name, buffer in model.named_buffers():
                buffer.detach().copy_(state[name])
            peak_bytes, wrong = _compare(graph, example, plan, model, inputs, eager, loss, region, seed, exact_peak)
            peaks[plan.planner + what] = peak_bytes
            found += [f"under {plan.planner}{what}: {problem}" for problem in wrong]
    assert not found, "\n".join(found)
    return Checked(profiled, captured, eager, peaks)


def _compare(
    profiled: Profiled,
    example: Inputs,
    plan: Plan,
    model: nn.Module,
    inputs: Inputs,
    eager: Step,
    loss: Loss | None,
    region: Autocast | None,
    seed: int,
    exact_peak: bool,
) -> tuple[int, list[str]]:
    """Run a step under ``plan``; return its peak and all that differs from what was promised."""
    own = {id(t) for _, t in _state(model)}
    timeline = simulate(profiled.profile, plan)
    emitted = rewrite(profiled, plan)
    constants = [t for t in (*emitted.buffers(), *emitted.parameters()) if id(t) not in own]
    training_step = TrainingStep(loss_fn=loss, optimizer=None)
    verification, _ = verify(emitted, profiled.captured, example, timeline, training_step)
    told: list[int] = []

    def judged(run_on_fakes: Callable[[Sequence[Any]], Sequence[Any]], _: Sequence[Any]) -> int:
        def call(leaves: Sequence[Any]) -> Any:
            return profiled.captured.unflatten(run_on_fakes(leaves))

        with as_in_training():
            ran = emitted_step(emitted, profiled.captured, example, training_step, None, call)
        told.append(ran.peak_bytes)
        return 0

    joint = joint_steps(profiled.captured, emitted, example, judge=judged)  # None, unless FXMEM_RUNTIME=program

    def forward(*args: Any, **kwargs: Any) -> Any:
        leaves = Inputs.of(args, kwargs).leaves
        if joint is None:
            return profiled.captured.call(emitted, leaves)
        return profiled.captured.unflatten(joint.run(leaves))

    buffers = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    step = run(forward, model, inputs, loss, region, seed, constants)
    found = differences(eager, step)
    peaks = {"simulated": timeline.peak_bytes, "verified": verification.verified_bytes, "measured": step.peak_bytes}
    if exact_peak and len(set(peaks.values())) > 1:
        found.append(f"peaks differ: {peaks}")
    for what in ("written down", "as a program") if joint is not None and not joint.refusal else ():
        for buffer, before in buffers:
            buffer.detach().copy_(before)
        step = run(forward, model, inputs, loss, region, seed, constants)
        found += [f"{what}: {problem}" for problem in differences(eager, step)]
        copied_bytes = sum(t.nbytes for t in joint.written.values()) if what == "written down" else 0
        if exact_peak and step.peak_bytes > timeline.peak_bytes + copied_bytes:
            found.append(f"{what}: its peak is {step.peak_bytes} bytes, planned are {timeline.peak_bytes}")
        if exact_peak and what == "as a program" and told and told[-1] != step.peak_bytes:
            found.append(f"{what}: its peak is {step.peak_bytes} bytes, told were {told[-1]}")
        NUM_PROGRAMS[0] += joint.program is not None and what == "as a program"
    if step.left_bytes > eager.left_bytes:
        found.append(f"{step.left_bytes} bytes are alive after the step, {eager.left_bytes} under eager")
    return step.peak_bytes, found


def _built(build: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return build()


def _state(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from model.named_parameters()
    yield from model.named_buffers()


__all__ = ["PLANS", "Checked", "Step", "check", "differences", "passing", "random_limits", "run", "tightest"]
