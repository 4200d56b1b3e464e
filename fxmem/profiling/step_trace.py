"""Running a captured graph's training step on fakes, node by node, and writing down all that happens.

In: a captured graph, its inputs and step. Out: a :class:`StepTrace`: per node what it reads, makes, writes
and saves, and the stream of allocations, frees, unpacks and releases of the whole step. What an op does is seen from
autograd and from dispatch; what these do not show is taken from :mod:`fxmem.op_facts`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import fx
from torch.autograd.graph import saved_tensors_hooks

from fxmem.capture.graph import CaptureGraph, Inputs, attribute_of, source_of
from fxmem.errors import ProfileError
from fxmem.fake.fake_tensors import FakeWorld, ScalarReads, gradients_untouched
from fxmem.ir import Phase, StaticBytes
from fxmem.op_facts.lookup import may_draw
from fxmem.profiling.device_memory import DeviceMemory
from fxmem.profiling.op_effects import UPDATES, why_not_again, work_of, written_by
from fxmem.profiling.optimizer_step import RecordedStep, SteadyOptimizer, steady_state
from fxmem.profiling.storage_tracker import FakesTracker, parts_of, tensors_of
from fxmem.profiling.trace_records import Event, NodeTrace, StepTrace, allocations
from fxmem.profiling.training_step import (
    Gradients,
    TrainingStep,
    clear_before_backward,
    gradients_of,
    loss_of,
    run_step,
)
from fxmem.runtime.layout import View
from fxmem.runtime.scoped_ops import op_of
from fxmem.torch_private import DisableTorchFunction, device_behind, is_view, leaves_of, tree_flatten, version_of


def trace_step(
    captured: CaptureGraph, inputs: Inputs, world: FakeWorld, step: TrainingStep, seen: RecordedStep | None = None
) -> StepTrace:
    """Run the step on fakes and return what was seen. ``seen``: what an earlier run tells of it.

    Errors: ``ProfileError`` naming the node that cannot run on fakes.
    """
    trace = _Tracer(captured, inputs, world).run(step, seen)
    if captured.autocast is not None or captured.autocast_device is not None:
        _note_cached(trace, _Tracer(captured, inputs, FakeWorld(inputs.leaves), discard=True), step)
    return trace


def _note_cached(trace: StepTrace, dry: _Tracer, step: TrainingStep) -> None:
    """Find internals that outlive their node though autograd holds nothing: those lie in autocast's cache.

    ``dry`` runs forward and loss with saved tensors discarded; its allocations are those of ``trace`` in order.
    """
    dry.run_forward(step)
    died_in: dict[int, int] = {}
    window = -1
    for event in dry.events:
        if event.kind == "begin":
            window = event.key
        elif event.kind == "phase":
            window = len(trace.nodes) if event.phase is not Phase.FORWARD else window
        elif event.kind == "free":
            died_in[event.key] = window
    for seen, again in zip(allocations(trace.events), allocations(dry.events), strict=True):
        for serial, twin in zip(seen, again, strict=True):
            trace.cached_until[serial] = died_in.get(twin, len(trace.nodes))


class _Saved:
    """What autograd holds in place of a saved tensor; tells when it lets go."""

    __slots__ = ("observer", "serial", "tensor")

    def __init__(self, observer: _Tracer, tensor: torch.Tensor) -> None:
        self.observer = observer
        self.serial = observer.tracker.serial(tensor)
        self.tensor = tensor.detach()

    def __del__(self) -> None:
        self.observer.events.append(Event("release", self.serial))


class _Tracer:
    def __init__(self, captured: CaptureGraph, inputs: Inputs, world: FakeWorld, *, discard: bool = False) -> None:
        self.captured, self.inputs, self.world, self.discard = captured, inputs, world, discard
        self.graph_module = captured.graph_module
        self.events: list[Event] = []
        self.memory = DeviceMemory.of(device_behind(world.fake(p)) for p in captured.parameters)
        self.tracker = FakesTracker(self._note_storage, self._note_op, self.memory)
        self.nodes: list[NodeTrace] = []
        self.current: NodeTrace | None = None
        self.statics: dict[int, str] = {}
        self.devices: dict[int, torch.device] = {}
        self.versions: dict[int, int] = {}
        self.gradients: set[int] = set()
        self.leaves_with_grad: list[torch.Tensor] = []
        self.left: Gradients | None = None
        self.optimizer: SteadyOptimizer | None = None
        self.backward_work = [0, 0]
        self.in_backward = False
        self.written: set[int] = set()
        """What the current node's ops write by what is known of them: not every kernel raises a version."""

    # -- listening ----------------------------------------------------------------------------------------------------

    def _note_storage(self, kind: str, serial: int, nbytes: int) -> None:
        self.events.append(Event(kind, serial, nbytes))

    def _note_op(self, func: Any, args: Any, kwargs: Any, output: Any) -> None:
        if self.current is None and not self.in_backward:
            return
        flops, moved_bytes = work_of(func, args, kwargs, output)
        if self.current is not None:
            self.written.update(map(self.tracker.serial, written_by(func, args, kwargs)))
            self.current.flops += flops
            self.current.moved_bytes += moved_bytes
            if may_draw(func):
                drawn = [t for t in leaves_of((args, kwargs, output)) if isinstance(t, torch.Tensor)]
                self.current.draws_on.update(t.device for t in drawn)
            self.current.effects = why_not_again(func, args, kwargs) or self.current.effects
        else:
            self.backward_work[0] += flops
            self.backward_work[1] += moved_bytes

    def _pack(self, tensor: torch.Tensor) -> _Saved | None:
        if self.discard:
            return None
        saved = _Saved(self, tensor)
        if self.current is not None:
            self.current.saves.append(saved.serial)
        return saved

    def _unpack(self, saved: _Saved) -> torch.Tensor:
        self.events.append(Event("unpack", saved.serial))
        return saved.tensor

    def _phase(self, phase: Phase) -> None:
        self.events.append(Event("phase", -1, phase=phase))
        self.in_backward = phase is Phase.BACKWARD
        if phase is Phase.OPTIMIZER:
            self.gradients.update(self._gradient_serials())
            # A buffer that requires grad has a gradient left too.
            if not any(buffer.requires_grad and buffer.is_leaf for buffer in self.graph_module.buffers()):
                parameters = [self.world.fake(p) for p in self.captured.parameters]
                left = gradients_of if self.optimizer is None else self.optimizer.left
                self.left = left(parameters)

    # -- running ------------------------------------------------------------------------------------------------------

    def run(self, step: TrainingStep, seen: RecordedStep | None) -> StepTrace:
        fakes = [self.world.fake_all(leaf) for leaf in self.inputs.leaves]
        parameters = [self.world.fake(p) for p in self.captured.parameters]

        with (
            gradients_untouched(self.captured.parameters),
            self.world.active(self.graph_module),
            self.captured.effects.undone(),
        ):
            pairs = list(zip(self.captured.parameters, parameters, strict=True))
            leaves = [leaf for leaf in fakes if isinstance(leaf, torch.Tensor) and leaf.is_leaf]
            buffers = [self.world.fake(b) for b in self.graph_module.buffers() if b.requires_grad and b.is_leaf]
            self.leaves_with_grad = parameters + buffers + leaves
            micro_batch = partial(self._micro_batch, step, fakes, parameters)
            optimizer, scaler = steady_state(step, pairs, micro_batch, self.tracker, seen)
            self.optimizer = optimizer
            targets = step.targets.blank((*parameters, *fakes))
            static = self._hold_statics([*fakes, *targets], optimizer, scaler)
            earlier = self._gradient_serials()
            if step.loop.zero_grad_before_backward:  # they are not there for the whole step
                static, self.gradients, earlier = replace(static, gradients_bytes=0), earlier, set()
            cached_until: dict[int, int] = {}
            outputs, loss_fn = list[int](), step.loss_on(targets)

            def forward() -> Any:
                with self.captured.scope():
                    leaves = self._forward(fakes)
                outputs.extend(self.tracker.serial(t) for t in leaves if isinstance(t, torch.Tensor))
                return self.captured.unflatten(leaves)

            def on_phase(phase: Phase) -> None:
                clear_before_backward(step, phase, optimizer, parameters)
                self._phase(phase)

            with ExitStack() as stack:
                stack.enter_context(self.tracker)
                stack.enter_context(ScalarReads())
                region, loop = self.captured.autocast, step.loop.as_profiled()
                run_step(forward, loss_fn, optimizer, region, on_phase, scaler, loop=loop)
        static = replace(static, library_bytes=self._hold_libraries())
        return StepTrace(
            self.nodes,
            self.events,
            self.statics,
            self.versions,
            frozenset(outputs),
            static,
            cached_until,
            self.devices,
            frozenset(self.gradients - earlier),
            None if self.left is None else RecordedStep(self.left, optimizer.seen(parameters) if optimizer else None),
            self.backward_work[0],
            self.backward_work[1],
        )

    def _micro_batch(self, step: TrainingStep, fakes: list[Any], parameters: list[torch.Tensor]) -> None:
        """Run forward, loss and backward on inputs like ``fakes``."""
        leaves = FakeWorld(fakes).fake_all(fakes)
        scout = _Tracer(self.captured, self.inputs, self.world)

        def forward() -> Any:
            with self.captured.scope():
                return self.captured.unflatten(scout._forward(leaves))

        loss_fn = step.loss_on(step.targets.blank((*parameters, *fakes)))
        run_step(forward, loss_fn, autocast=self.captured.autocast, keep_casts=False)

    def _hold_libraries(self) -> int:
        """Count the workspaces that libraries keep as there from the start, as an earlier step has left them, each for all
        threads: what runs again in a backward uses them there."""
        start, self.events = self.events, []
        threads = {thread for thread, _ in self.tracker.workspaces}
        libraries = {library: nbytes for (_, library), nbytes in self.tracker.workspaces.items()}
        held = self.tracker.hold_bytes([nbytes for nbytes in libraries.values() for _ in threads])
        self.events += start
        return held

    def run_forward(self, step: TrainingStep) -> None:
        """Run forward and loss only."""
        fakes = [self.world.fake_all(leaf) for leaf in self.inputs.leaves]
        with self.world.active(self.graph_module), self.captured.effects.undone():
            targets = step.targets.blank((*map(self.world.fake, self.captured.parameters), *fakes))
            self._hold_statics([*fakes, *targets])
            context = self.captured.autocast.enter() if self.captured.autocast else nullcontext()
            with self.tracker, context:
                self._phase(Phase.FORWARD)
                with self.captured.scope():
                    output = self.captured.unflatten(self._forward(fakes))
                self._phase(Phase.LOSS)
                loss_of([output], step.loss_on(targets))

    def _gradient_serials(self) -> set[int]:
        grads = [leaf.grad for leaf in self.leaves_with_grad if leaf.grad is not None]
        return {self.tracker.serial(part) for grad in grads for part in parts_of(grad)}

    def _hold_statics(
        self,
        fakes: list[Any],
        optimizer: SteadyOptimizer | None = None,
        scaler: torch.amp.GradScaler | None = None,
    ) -> StaticBytes:
        hold, fake = self.tracker.hold, self.world.fake
        return StaticBytes(
            parameters_bytes=hold(fake(p) for p in self.graph_module.parameters()),
            buffers_bytes=hold(fake(b) for b in self.graph_module.buffers()),
            inputs_bytes=hold(t for t in fakes if isinstance(t, torch.Tensor)),
            gradients_bytes=hold(leaf.grad for leaf in self.leaves_with_grad if leaf.grad is not None),
            optimizer_state_bytes=(optimizer.hold() if optimizer else 0) + hold(tensors_of([scaler])),
        )

    def _forward(self, fakes: list[Any]) -> tuple[Any, ...]:
        """Run the graph as its generated code would: a value goes right after the node that uses it last."""
        last_uses = _last_uses(self.graph_module.graph)
        env: dict[fx.Node, Any] = {}
        storages: dict[fx.Node, set[int]] = {}
        references: Counter[int] = Counter()
        inputs = iter(fakes)
        for node in self.graph_module.graph.nodes:
            if node.op == "placeholder":
                env[node] = next(inputs)
                self._note_static(node, env[node])
            elif node.op == "get_attr":
                env[node] = self._attribute(str(node.target))
                self._note_static(node, env[node])
            elif node.op == "output":
                return tuple(fx.map_arg(node.args[0], lambda n: env[n]))
            else:
                with self._noting(node, env):
                    env[node] = self._call(node, env)
                    self._note_results(env[node])
            with DisableTorchFunction():
                storages[node] = set(self._storages(env[node]))
            references.update(storages[node])
            for dead in last_uses[node]:
                del env[dead]
                references.subtract(storages[dead])
                if self.nodes:
                    self.nodes[-1].last_used += sorted(s for s in storages[dead] if references[s] == 0)
        raise ProfileError("the captured graph has no output")

    def _attribute(self, target: str) -> Any:
        value = attribute_of(self.graph_module, target)
        return self.world.fake(value) if isinstance(value, torch.Tensor) else value

    def _note_static(self, node: fx.Node, value: Any) -> None:
        if isinstance(value, torch.Tensor):
            serial = self.tracker.serial(value)
            self.statics.setdefault(serial, node.name)

    def _storages(self, value: Any) -> Iterator[int]:
        for leaf in leaves_of(value):
            if isinstance(leaf, torch.Tensor):
                yield self.tracker.serial(leaf)

    @contextmanager
    def _noting(self, node: fx.Node, env: dict[fx.Node, Any]) -> Iterator[None]:
        """Open a record for ``node``; whatever happens meanwhile belongs to it."""
        with DisableTorchFunction():
            record, tensors, before, start = self._begun(node, env)
        yield
        with DisableTorchFunction():
            self._ended(record, tensors, before, start)

    def _begun(
        self, node: fx.Node, env: dict[fx.Node, Any]
    ) -> tuple[NodeTrace, list[tuple[int, torch.Tensor]], list[int], int]:
        """Return a new record, its tensor arguments by place, their versions, and the number of events before it."""
        leaves, spec = tree_flatten(fx.map_arg((node.args, node.kwargs), lambda n: env[n]))
        record = NodeTrace(len(self.nodes), node, tuple(leaves), spec)
        record.effects = getattr(op_of(node.target), "effect", "")
        tensors = [(place, t) for place, t in enumerate(leaves) if isinstance(t, torch.Tensor)]
        for place, tensor in tensors:
            serial = self.tracker.serial(tensor)
            record.reads.append((place, View.of(tensor, serial), self.versions.get(serial, 0)))
            self.devices[serial] = device_behind(tensor)
        first: dict[int, int] = {}
        for number, (_, tensor) in enumerate(tensors):
            kept = tensor.requires_grad and tensor.is_leaf and not is_view(tensor)
            record.identities.append((first.setdefault(id(tensor), number), kept))
        before = [version_of(tensor) for _, tensor in tensors]
        self.nodes.append(record)
        self.current = record
        self.written.clear()
        start = len(self.events)
        self.events.append(Event("begin", record.index))
        return record, tensors, before, start

    def _ended(self, record: NodeTrace, tensors: list[tuple[int, torch.Tensor]], before: list[int], start: int) -> None:
        """Write down what was seen since :meth:`_begun`."""
        self.events.append(Event("end", record.index))
        self.current = None
        made = {e.key for e in self.events[start:] if e.kind == "alloc"}
        if not self.written <= made | {self.tracker.serial(tensor) for _, tensor in tensors}:
            record.effects = record.effects or "writes to a tensor that is none of its arguments"
        updates = UPDATES.get(op_of(record.node.target))
        if updates is not None and record.leaves[updates.flag]:
            record.updates = tuple(place for place, _ in tensors if place in updates.places)
        updated: list[int] = []
        for (place, tensor), version in zip(tensors, before, strict=True):
            serial = self.tracker.serial(tensor)
            if version_of(tensor) != version or serial in self.written:
                (updated if place in record.updates else record.writes).append(serial)
        record.writes = list(dict.fromkeys(record.writes))
        for serial in dict.fromkeys((*record.writes, *updated)):
            self.versions[serial] = self.versions.get(serial, 0) + 1
        freed = {e.key for e in self.events[start:] if e.kind == "free"}
        record.creates = [e.key for e in self.events[start:] if e.kind == "alloc" and e.key not in freed]
        record.leaves = tuple(None if isinstance(leaf, torch.Tensor) else leaf for leaf in record.leaves)

    def _call(self, node: fx.Node, env: dict[fx.Node, Any]) -> Any:
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: env[n])
        if node.op != "call_function":
            raise ProfileError(f"{node.format_node()}: only call_function nodes can be profiled")
        try:
            with saved_tensors_hooks(self._pack, self._unpack):
                return node.target(*args, **kwargs)  # type: ignore[operator]
        except Exception as error:
            raise ProfileError(f"{node.name} ({source_of(node)}) could not run on fake tensors: {error}") from error

    def _note_results(self, output: Any) -> None:
        assert self.current is not None
        leaves = [output] if isinstance(output, torch.Tensor) else leaves_of(output)
        with DisableTorchFunction():
            for place, leaf in enumerate(leaves):
                if isinstance(leaf, torch.Tensor):
                    self.current.outputs.append((place, View.of(leaf, self.tracker.serial(leaf))))


def _last_uses(graph: fx.Graph) -> dict[fx.Node, list[fx.Node]]:
    """For each node, the nodes whose value is used by it last (a value nobody uses ends at its own node)."""
    seen: set[fx.Node] = set()
    result: dict[fx.Node, list[fx.Node]] = {}
    for node in reversed(graph.nodes):
        result[node] = []
        for used in (*node.all_input_nodes, *([] if node.users or node.op == "output" else [node])):
            if used not in seen:
                seen.add(used)
                result[node].append(used)
    return result
