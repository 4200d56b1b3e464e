"""From one observed training step to the plain :class:`GraphProfile` that planners work on, and its recipes' replays.

In: a :class:`StepTrace`. Out: a :class:`Profiled`. Bytes are exact: the curve of what no plan changes is read from
the observed allocations, and each recipe is run once more on fakes to see the peak of its re-run
(:mod:`fxmem.profiling.recompute_peaks`). Not modelled: scratch that a kernel allocates below the dispatcher.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import torch

from fxmem.capture.graph import CaptureGraph, Inputs, count_of_batches, source_of
from fxmem.fake.fake_tensors import FakeWorld
from fxmem.ir import GraphProfile, NodeProfile, Recipe, Storage
from fxmem.op_facts.kinds import Elementwise
from fxmem.op_facts.lookup import by_op
from fxmem.profiling.op_effects import UPDATES
from fxmem.profiling.optimizer_on_meta import usual_step
from fxmem.profiling.optimizer_step import RecordedStep
from fxmem.profiling.recompute_peaks import RecomputePeaks, rerun
from fxmem.profiling.step_trace import trace_step
from fxmem.profiling.ticks import managed_storages, ticks_of
from fxmem.profiling.trace_records import NodeTrace, StepTrace
from fxmem.profiling.training_step import BARE, TrainingStep
from fxmem.runtime.layout import View
from fxmem.runtime.op_bindings import callable_of
from fxmem.runtime.recompute import NodeRecompute, Recompute
from fxmem.runtime.scoped_ops import op_of, op_text
from fxmem.torch_private import OpOverload, is_composite

NodeTimer = Callable[[int, int], float]
"""Seconds of a node, from its FLOPs and the bytes it moves."""


@dataclass(frozen=True, slots=True)
class Profiled:
    """A profile with what the rewriter needs beside it."""

    profile: GraphProfile
    captured: CaptureGraph
    recomputes: tuple[Recompute | None, ...]
    """By recipe."""
    arguments: tuple[tuple[tuple[int, View], ...], ...]
    """By node: (place, geometry) of tensor arguments; ``View.storage`` is a managed index or ``~j``."""
    outputs: tuple[tuple[tuple[int, View], ...], ...]
    """By node: (place, geometry) of tensor outputs."""
    internals: tuple[tuple[int, ...], ...]
    """By node: managed storages that autograd saves beside arguments and outputs, by first appearance."""
    static_names: tuple[str, ...]
    """By static tensor ``j``: the placeholder or get_attr node that provides it."""
    last_writer: tuple[int, ...]
    """By managed storage: the node that writes it last."""
    devices: tuple[torch.device, ...]
    """Devices the graph's tensors lie on."""
    draws_on: tuple[tuple[torch.device, ...], ...]
    """By node: devices from whose generators it draws."""
    seen: RecordedStep | None
    """What other runs of the step may rely on; None if what the backward leaves cannot be told one by one."""
    reruns: dict[object, RecomputePeaks | None]
    """What was seen of re-runs, by what is run on what geometry; None: it saves other tensors than the forward."""


def profile(
    captured: CaptureGraph,
    inputs: Inputs,
    timer: NodeTimer,
    step: TrainingStep = BARE,
    earlier: Profiled | None = None,
) -> Profiled:
    """Return the profile of the training step of ``captured`` at the signature of ``inputs``.

    ``timer`` gives seconds for (FLOPs, bytes moved). ``earlier``: a profile of another graph of the same model, of which
    what the backward leaves, what the optimizer does and the peaks of equal re-runs are taken. Errors: ``ProfileError``.
    """
    trace, world = _observed(captured, inputs, step, None if earlier is None else earlier.seen)
    return _Builder(captured, trace, timer, world, {} if earlier is None else dict(earlier.reruns)).build()


def _observed(
    captured: CaptureGraph, inputs: Inputs, step: TrainingStep, seen: RecordedStep | None
) -> tuple[StepTrace, FakeWorld]:
    """Run the step. Where nothing was ``seen``, the usual step is supposed, which spares a micro-batch and the optimizer's
    runs if its gradients are what the backward leaves; else the step is run again."""
    world = FakeWorld(inputs.leaves)
    seen = seen or usual_step(step, captured.parameters)
    if seen is not None:
        left = None
        try:
            trace = trace_step(captured, inputs, world, step, seen)
            if trace.seen is not None and trace.seen.gradients == seen.gradients:
                return trace, world
            left = trace.seen
        except Exception:  # an optimizer may not take such gradients; whatever else is wrong shows below
            left = None
        world, seen = FakeWorld(inputs.leaves), left and RecordedStep(left.gradients)
    return trace_step(captured, inputs, world, step, seen), world


class _Builder:
    """Turns serials into managed indices and events into ticks."""

    def __init__(
        self,
        captured: CaptureGraph,
        seen: StepTrace,
        timer: NodeTimer,
        world: FakeWorld,
        reruns: dict[object, RecomputePeaks | None],
    ) -> None:
        self.captured, self.seen, self.timer, self.world = captured, seen, timer, world
        self.reruns = reruns
        self.nbytes = {e.key: e.nbytes for e in seen.events if e.kind == "alloc"}
        self.managed = managed_storages(seen)
        self.index = {serial: i for i, serial in enumerate(self.managed)}
        self.static_index = {serial: ~j for j, serial in enumerate(seen.statics)}
        self.attributes = {node.name for node in captured.graph_module.graph.nodes if node.op == "get_attr"}
        self.devices = tuple(sorted(set(seen.devices.values()), key=str))
        self.creator = {s: node.index for node in seen.nodes for s in node.creates}
        self.writers: dict[int, list[int]] = {s: [self.creator[s]] for s in self.managed}
        for node in seen.nodes:
            for s in node.writes:
                if s in self.writers and node.index not in self.writers[s]:
                    self.writers[s].append(node.index)

    def build(self) -> Profiled:
        ticks, held_elsewhere = ticks_of(self.seen, self.index)
        never_made_anew = self._never_made_anew()
        reasons = dict.fromkeys(held_elsewhere, "held by something other than autograd") | never_made_anew
        groups = self._recipes(reasons)
        replayed = [self._recompute(nodes, never_made_anew) for nodes in groups]
        found = rerun(replayed, self.reruns, self.captured, self.world, self.devices, self._memory)
        for group, one in zip(groups, found, strict=True):
            if one is None:
                why = f"a re-run of {self.seen.nodes[group[-1]].node.name} saves other tensors than its forward"
                reasons |= {s: reasons.get(s, why) for s in self._made(group)}
        good = [(group, *one) for group, one in zip(groups, found, strict=True) if one is not None]
        recomputes = [recompute for _, recompute, _ in good]
        storages = self._storages(recomputes, reasons)
        nodes = tuple(self._node(node) for node in self.seen.nodes)
        recipes = tuple(
            Recipe(
                index=r,
                nodes=nodes_of,
                inputs=self._inputs(nodes_of),
                products=recompute.products,
                seconds=sum(nodes[k].seconds for k in nodes_of),
                peak_bytes=run.peak_bytes,
                capture_peak_bytes=run.capture_peak_bytes,
            )
            for r, (nodes_of, recompute, run) in enumerate(good)
        )
        graph_profile = GraphProfile(
            nodes,
            storages,
            recipes,
            ticks,
            self.seen.static,
            backward_seconds=2 * sum(node.seconds for node in nodes),
        )
        return Profiled(
            profile=graph_profile,
            captured=self.captured,
            recomputes=tuple(recomputes),
            arguments=tuple(tuple((p, self._view(v)) for p, v, _ in n.reads) for n in self.seen.nodes),
            outputs=tuple(tuple((p, self._view(v)) for p, v in n.outputs) for n in self.seen.nodes),
            internals=tuple(self._internals(n) for n in self.seen.nodes),
            static_names=tuple(self.seen.statics.values()),
            last_writer=tuple(self.writers[serial][-1] for serial in self.managed),
            devices=self.devices,
            draws_on=tuple(tuple(sorted(n.draws_on, key=str)) for n in self.seen.nodes),
            seen=self.seen.seen,
            reruns=self.reruns,
        )

    def _storages(self, recomputes: list[Recompute], reasons: dict[int, str]) -> tuple[Storage, ...]:
        """Describe the managed storages. ``reasons``: by serial, why one is no product of a recipe."""
        recipe_of = {p: r for r, recompute in enumerate(recomputes) for p in recompute.products}
        saves = Counter(s for node in self.seen.nodes for s in node.saves)
        return tuple(
            Storage(
                index=i,
                name=self._name(serial),
                nbytes=self.nbytes[serial],
                creator=self.creator[serial],
                internal=self._is_internal(serial),
                recipe=recipe_of.get(i),
                why_kept="" if i in recipe_of else reasons.get(serial) or self._node_reason(self.creator[serial]),
                num_saves=saves[serial],
            )
            for i, serial in enumerate(self.managed)
        )

    # -- naming ---------------------------------------------------------------------------------------------------------

    def _memory(self, place: int) -> tuple[int, torch.device]:
        """Return the bytes and the device of storage ``place``."""
        serial = self.managed[place] if place >= 0 else list(self.seen.statics)[~place]
        return self.nbytes[serial], self.seen.devices[serial]

    def _place(self, serial: int) -> int | None:
        """Managed index, ``~j`` of a static tensor, or None for storages that are neither."""
        return self.index.get(serial, self.static_index.get(serial))

    def _view(self, view: View) -> View:
        place = self._place(view.storage)
        assert place is not None, "a tensor of the graph lies on a storage of unknown origin"
        return view._replace(storage=place)

    def _is_internal(self, serial: int) -> bool:
        return all(view.storage != serial for _, view in self.seen.nodes[self.creator[serial]].outputs)

    def _name(self, serial: int) -> str:
        node = self.seen.nodes[self.creator[serial]]
        peers = [s for s in node.creates if s in self.index and self._is_internal(s) == self._is_internal(serial)]
        if self._is_internal(serial):
            return f"{node.node.name}.internal{peers.index(serial)}"
        return node.node.name if len(peers) == 1 else f"{node.node.name}.{peers.index(serial)}"

    def _internals(self, node: NodeTrace) -> tuple[int, ...]:
        """Saved storages of ``node`` that are neither its arguments nor its outputs, by first appearance."""
        known = {view.storage for _, view, _ in node.reads} | {view.storage for _, view in node.outputs}
        return tuple(self.index.get(s, -1) for s in dict.fromkeys(node.saves) if s not in known)

    def _node(self, node: NodeTrace) -> NodeProfile:
        managed = self.index
        return NodeProfile(
            index=node.index,
            name=node.node.name,
            op=op_text(node.node.target),
            reads=tuple(dict.fromkeys(managed[v.storage] for _, v, _ in node.reads if v.storage in managed)),
            creates=tuple(managed[s] for s in node.creates if s in managed),
            writes=tuple(managed[s] for s in node.writes if s in managed),
            saves=tuple(managed[s] for s in node.saves if s in managed),
            seconds=self.timer(node.flops, node.moved_bytes),
            flops=node.flops,
            moved_bytes=node.moved_bytes,
            random=bool(node.draws_on),
            why_not=self._node_reason(node.index),
            source=source_of(node.node),
        )

    # -- recipes --------------------------------------------------------------------------------------------------------

    def _node_reason(self, k: int) -> str:
        """Why node ``k`` may never run again; empty if it may."""
        node = self.seen.nodes[k]
        if node.effects:
            return f"{node.node.name} {node.effects}"
        for s in node.writes:
            if s not in self.index:
                return f"{node.node.name} writes {self.seen.statics.get(s, 'memory from outside the graph')}"
        updates = UPDATES.get(op_of(node.node.target))
        for place, view, version in node.reads:
            s = view.storage
            if place in node.updates:
                continue
            if updates is not None and place in updates.places and not self._is_counted(s):
                return f"{node.node.name} reads running statistics, whose updates no count of batches tells"
            final = self.seen.versions.get(s, 0)
            if self._place(s) is None:
                return f"{node.node.name} reads memory of unknown origin"
            if version != final and k not in self.writers.get(s, ()):
                return f"{node.node.name} reads a value that is overwritten later"
            if final and self.seen.statics.get(s) in self.attributes:
                return f"{node.node.name} reads {self.seen.statics[s]}, which every forward writes"
        return ""

    def _is_counted(self, s: int) -> bool:
        """True if running statistics come with a count that every update of them raises; it raises no version of theirs."""
        graph_module = self.captured.graph_module
        name = self.seen.statics.get(s)
        return any(n.name == name and count_of_batches(graph_module, n) is not None for n in graph_module.graph.nodes)

    def _never_made_anew(self) -> dict[int, str]:
        """Why storages, by serial, are no products of a recipe."""
        reasons = dict.fromkeys((s for s in self.seen.outputs if s in self.index), "an output of the model")
        for s in self.managed:  # only from autocast's cache do nodes save what an earlier one made inside
            if self._is_internal(s) and s not in self.seen.nodes[self.creator[s]].saves:
                reasons[s] = "a parameter's cast, saved only by later nodes than the one that makes it"
        return reasons

    def _recipes(self, reasons: dict[int, str]) -> list[tuple[int, ...]]:
        """Group nodes by the storages several of them write; return the groups that may run again, in position order."""
        parent = list(range(len(self.seen.nodes)))

        def find(k: int) -> int:
            while parent[k] != k:
                parent[k] = parent[parent[k]]
                k = parent[k]
            return k

        for writers in self.writers.values():
            for k in writers[1:]:
                parent[find(k)] = find(writers[0])
        groups: dict[int, list[int]] = {}
        for node in self.seen.nodes:
            if any(s in self.index for s in node.creates) or any(s in self.index for s in node.writes):
                groups.setdefault(find(node.index), []).append(node.index)
        good = [tuple(nodes) for nodes in groups.values() if not any(self._node_reason(k) for k in nodes)]
        good = [g for g in good if not all(s in reasons for s in self._made(g))]
        return self._without_cycles(sorted(good, key=lambda g: g[-1]), reasons)

    def _without_cycles(self, groups: list[tuple[int, ...]], reasons: dict[int, str]) -> list[tuple[int, ...]]:
        """Leave out groups whose storages are read by a group of an earlier position (an interleaved in-place chain)."""
        last = {self.index[s]: g[-1] for g in groups for s in self._made(g)}
        bad = {last[i] for g in groups for i in self._inputs(g) if i in last and last[i] >= g[-1]}
        for g in groups:
            if g[-1] in bad:
                reasons.update(dict.fromkeys(self._made(g), "overwritten in turns with storages that depend on it"))
        return [g for g in groups if g[-1] not in bad]

    def _made(self, nodes: tuple[int, ...]) -> list[int]:
        """Serials of the managed storages that ``nodes`` create."""
        return [s for k in nodes for s in self.seen.nodes[k].creates if s in self.index]

    def _inputs(self, nodes: tuple[int, ...]) -> tuple[int, ...]:
        own = set(self._made(nodes))
        reads = [v.storage for k in nodes for _, v, _ in self.seen.nodes[k].reads]
        return tuple(dict.fromkeys(self.index[s] for s in reads if s in self.index and s not in own))

    def _recompute(self, nodes: tuple[int, ...], never_made_anew: dict[int, str]) -> Recompute:
        products = tuple(self.index[s] for s in self._made(nodes) if s not in never_made_anew)
        own = {self.index[s] for s in self._made(nodes)}
        return Recompute(tuple(self._node_recompute(k, own) for k in nodes), products, self.captured.autocast)

    def _node_recompute(self, k: int, own: set[int]) -> NodeRecompute:
        node = self.seen.nodes[k]
        leaves = list(node.leaves)
        refs = [(place, self._view(view)) for place, view, _ in node.reads]
        identities, scratch = node.identities, []
        if node.updates:
            given = next(view.dtype for _, view in refs)
            scratch = [(place, view) for place, view in refs if place in node.updates and view.dtype != given]
            refs = [(place, view) for place, view in refs if place not in node.updates]
            identities = [(number, False) for number in range(len(refs))]
        outputs: list[tuple[int, View]] = []
        for place, view in node.outputs:
            if self._place(view.storage) in own and view.storage not in [v.storage for _, v in outputs]:
                outputs.append((place, view))
        created = {self.index[s] for s in node.creates if s in self.index}
        internals = tuple(i if i in created else -1 for i in self._internals(node))
        return NodeRecompute(
            index=k,
            name=node.node.name,
            target=callable_of(node.node),
            leaves=tuple(leaves),
            refs=tuple(refs),
            spec=node.spec,
            writes=frozenset(i for s in node.writes if (i := self._place(s)) is not None),
            outputs=tuple((place, self._view(view)) for place, view in outputs),
            internals=internals,
            random=bool(node.draws_on),
            elementwise=not node.draws_on and not internals and _is_elementwise(op_of(node.node.target)),
            identities=tuple(identities),
            scratch=tuple(scratch),
        )


_UNTAGGED = by_op(Elementwise)


def _is_elementwise(op: object) -> bool:
    """True of ATen's ops with one kernel, which does not look at whether autograd is on."""
    if isinstance(op, OpOverload):
        own = op.namespace == "aten" and not is_composite(op)
        return own and (torch.Tag.pointwise in op.tags or op in _UNTAGGED)
    return op in _UNTAGGED
