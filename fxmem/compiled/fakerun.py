"""A compiled step on fakes: the wrappers that Inductor generates, run without kernels, and all memory they ask for counted.

In: forward and backward as partitioned, of each call of a compiled graph in the step, and what is around them. Out: a
:class:`StepRun`: the peak in bytes, and what it costs.
A wrapper allocates, reuses and frees as the compiled step will, so the peak is that step's, to the byte, where the ops that
are no generated kernels take no scratch of their own below the dispatcher; for those that do see
:mod:`fxmem.compiled.scratch`.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import fx

from fxmem.compiled.emit import Partitioned
from fxmem.compiled.joint import is_tangent, outputs_of
from fxmem.compiled.levers import LAID_OUT, NO_LEVERS, Levers
from fxmem.compiled.lower import function_of, lowered_backward, lowered_forward
from fxmem.compiled.scratch import copy_seconds, op_seconds, scratch_bytes
from fxmem.compiled.step_run import TIGHT, StepRun
from fxmem.compiled.strides import laid_out_as, lies_alike, transposed
from fxmem.compiled.surroundings import Surroundings
from fxmem.compiled.wrapper import Wrapper
from fxmem.errors import FxMemError, ProfileError, first_lines
from fxmem.fake.attention import torch_release
from fxmem.fake.meta_fixups import MetaFixups
from fxmem.ir import Phase
from fxmem.profiling.allocator_state import MOST_UNSPLIT_BYTES
from fxmem.profiling.caching_allocator import Allocation
from fxmem.profiling.roofline import Hardware, flops_of
from fxmem.profiling.step_events import StepLog
from fxmem.profiling.storage_tracker import StorageTracker
from fxmem.runtime.autocast import no_autocast
from fxmem.torch_private import FakeTensorMode, OpOverload, storage_key, tree_leaves

HOLDS_TANGENTS = torch_release() < (2, 13)
"""Whether AOTAutograd keeps the gradients that a backward is given until its code has run."""
ROOM_BYTES = 4 * MOST_UNSPLIT_BYTES
"""An H200 took up to 2.7 MB more than was told (``benchmarks/results/gpu_compiled_h200.json``); no bound is known."""


class Source(NamedTuple):
    """What made an input of a graph: an earlier call's output."""

    call: int
    output: int


@dataclass(frozen=True, slots=True)
class GraphCall:
    """One call of a compiled graph in a step."""

    inputs: tuple[Source | int, ...] = ()
    """By place: what made it, or a number that the same tensor has in other calls too. Empty: all were there before."""
    outputs_stay: bool = True
    """Whether its outputs are held until the step is over; else until all forwards are."""
    added_to: frozenset[int] = frozenset()
    """The places of inputs whose gradients are there before: the backward's are added to them, and freed."""

    def sources(self, graph: LoweredGraph) -> Sequence[Source | int]:
        return self.inputs or range(len(graph.inputs) - graph.num_tokens)


class LoweredGraph:
    """The code of one graph's forward and backward under a plan. Errors: as :func:`run_step`."""

    def __init__(self, parts: Partitioned, num_outputs: int, levers: Levers = NO_LEVERS) -> None:
        self._forward, self._backward = parts
        self.num_outputs, self.levers = num_outputs, levers
        with unknown_code_told(), no_autocast(), levers.pulled(is_backward=False):
            self.forward = lowered_forward(self._forward, num_outputs)
        self._backward_code: Wrapper | None = None

    @property
    def loses_writes(self) -> bool:
        """As :attr:`Wrapper.loses_writes`, of all code that was generated."""
        codes = (self.forward, self._backward_code)
        return any(code.loses_writes for code in codes if code is not None)

    def tight(self, tightness: int = TIGHT) -> LoweredGraph:
        """Return the same with a tight backward (:data:`~fxmem.compiled.step_run.TIGHTNESSES`)."""
        other = copy.copy(self)
        other.levers, other._backward_code = self.levers._replace(tightness=tightness), None
        return other

    @property
    def inputs(self) -> list[Any]:
        """Fakes like the forward's inputs, and what is no tensor."""
        return [n.meta["val"] for n in _placeholders(self._forward)]

    @property
    def num_tokens(self) -> int:
        """Return how many inputs, and outputs, come before the others and are tokens of effects, such as a check that a
        matrix has an inverse: AOTAutograd gives and takes them, the call has none."""
        return len(self.inputs) - len(outputs_of(self._backward))

    @property
    def tangents(self) -> list[Any]:
        """Fakes like the gradients that the backward is given."""
        return [n.meta["val"] for n in _placeholders(self._backward) if is_tangent(n)]

    def tangent_places(self) -> list[int | None]:
        """Return the outputs that these are gradients of: in order, the next one of the same shape and type."""
        outputs = enumerate(_vals(outputs_of(self._forward))[self.num_tokens : self.num_outputs])
        return [next((place for place, t in outputs if _alike(t, tangent)), None) for tangent in self.tangents]

    def backward(self, saved: Sequence[Any]) -> Wrapper:
        """Return the backward's code. ``saved``: what the forward's code saves, whose strides it is given."""
        if self._backward_code is None:
            given = [n for n in _placeholders(self._backward) if not is_tangent(n)]
            assert len(given) == len(saved), "a value is saved that is no tensor"
            for node, tensor in zip(given, saved, strict=True):
                like = node.meta.get("val")
                if isinstance(like, torch.Tensor) and like.stride() != tensor.stride():
                    val = like.as_strided(like.shape, tensor.stride())
                    node.meta = {**node.meta, "val": val}  # its own: the forward's input of that name has the same dict
            with self.levers.pulled(is_backward=True):
                self._backward_code = lowered_backward(self._backward, len(saved), self._donated())
        return self._backward_code

    def _donated(self) -> list[int]:
        """Return the places of saved tensors that share no memory with inputs, outputs or gradients: AOTAutograd lets the
        backward write over them."""
        outputs = _vals(outputs_of(self._forward))
        others = [*self.inputs, *outputs[: self.num_outputs], *_vals(outputs_of(self._backward))]
        held = {storage_key(t) for t in others if isinstance(t, torch.Tensor)}
        saved = outputs[self.num_outputs :]
        return [i for i, t in enumerate(saved) if isinstance(t, torch.Tensor) and storage_key(t) not in held]


def run_step(
    graphs: Sequence[LoweredGraph],
    calls: Sequence[GraphCall],
    around: Surroundings,
    hardware: Hardware,
    *,
    measures: bool = False,
) -> StepRun:
    """Run the forwards of ``graphs`` in order, then their backwards, the last one first. Strides of saved tensors are those
    that a forward's code gives them. ``measures``: convolutions are timed.

    Errors: ``ProfileError`` if the generated code calls what is not known, which is never counted as nothing.
    """
    with unknown_code_told(), no_autocast():
        return _Run(graphs, calls, around, hardware, measures).step()


@contextmanager
def unknown_code_told() -> Iterator[None]:
    """Errors: ``ProfileError`` for what is raised where generated code is made or run, and is no error of fxmem's."""
    try:
        yield
    except FxMemError:
        raise
    except Exception as error:
        raise ProfileError(
            f"the code that Inductor generates for the step could not be run on fake tensors: {first_lines(error)}. What a "
            'call in it allocates is then not known; leave out backend="inductor"'
        ) from error


class _Run:
    def __init__(
        self,
        graphs: Sequence[LoweredGraph],
        calls: Sequence[GraphCall],
        around: Surroundings,
        hardware: Hardware,
        measures: bool,
    ) -> None:
        self._graphs, self._calls, self._around = graphs, calls, around
        self._hardware, self._measures = hardware, measures
        self._seconds = self._laid_out_seconds = self._measured_seconds = 0.0
        self._scratch_peak = self._trial_peak = self._outside_peak = 0
        self._log = log = StepLog()
        self._tracker = StorageTracker(log.note, self._note_op, around.memory, log.note_library, log.note_workspace)
        self._mode = FakeTensorMode(allow_non_fake_inputs=True)
        self._outputs: list[list[Any]] = []
        """By call, while they are held."""
        self._first_readers: dict[Any, int] = {}
        """By number of an input, the first call that is given it: whose backward comes last."""
        for number, (graph, call) in enumerate(zip(graphs, calls, strict=True)):
            for source in call.sources(graph):
                self._first_readers.setdefault(source, number)
        self._gradients: dict[Any, torch.Tensor] = {}
        """Of what was there before, by its number, and of outputs of a call whose backward is still to come."""

    def step(self) -> StepRun:
        tracker, around = self._tracker, self._around
        self._hold_present()
        let_go = tracker.repeat(("alloc", i, nbytes) for i, nbytes in enumerate(around.in_forwards))
        saved = [self._run_forward(graph, call) for graph, call in zip(self._graphs, self._calls, strict=True)]
        for call, outputs in zip(self._calls, self._outputs, strict=True):
            if not call.outputs_stay:
                outputs.clear()
        saved_bytes, peaks = tracker.live_bytes, list[int]()

        def no_event() -> Iterator[Allocation]:
            """Between a loss outside of the graphs and its backward."""
            peaks.append(self._peak_since())
            let_go()
            tracker.peak_bytes = tracker.live_bytes
            yield from ()

        free_loss = tracker.repeat(chain(around.loss, no_event(), around.loss_backward))
        tracker.keep_workspaces(around.libraries)
        for number in reversed(range(len(saved))):
            self._run_backward(number, saved.pop())
        backward_peak = self._peak_since()
        free_loss()
        tracker.hold_bytes(around.loss_left)
        self._log.phase_starts(Phase.OPTIMIZER)
        tracker.repeat(around.optimizer)
        floor = self._peak_since()
        (forward_peak,) = peaks
        peak = max(forward_peak, backward_peak, floor)
        self._outputs.clear()
        self._gradients.clear()
        allocated = self._allocated(peak)
        most = 0 if around.memory.model is None else max(allocated + ROOM_BYTES, self._first_peak(allocated - peak))
        return StepRun(
            allocated, forward_peak, saved_bytes, backward_peak, self._seconds, most, floor, peak - self._outside_peak,
            self._laid_out_seconds, self._measured_seconds,
        )  # fmt: skip

    def _run_forward(self, graph: LoweredGraph, call: GraphCall) -> list[Any]:
        """Return what a call saves."""
        forward = function_of(graph.forward, self._note_kernel)
        with torch.no_grad(), self._mode, MetaFixups():  # type: ignore[no-untyped-call]
            tokens, likes = graph.inputs[: graph.num_tokens], graph.inputs[graph.num_tokens :]
            inputs = [self._blank(token) for token in tokens]
            inputs += [
                self._made(s, like) if isinstance(s, Source) else self._blank(like)
                for like, s in zip(likes, call.sources(graph), strict=True)
            ]
            with self._tracker:
                results = list(forward(inputs))
        self._outputs.append(results[graph.num_tokens : graph.num_outputs])
        return results[graph.num_outputs :]

    def _run_backward(self, number: int, saved: list[Any]) -> None:
        """``saved``: what the call of this number saved, which is emptied."""
        graph, call, tracker = self._graphs[number], self._calls[number], self._tracker
        backward, num_saved = function_of(graph.backward(saved), self._note_kernel), len(saved)
        tracker.thread = "autograd"
        with torch.no_grad(), self._mode, MetaFixups():  # type: ignore[no-untyped-call]
            saved += self._tangents(number, graph)
            given = [t for t in saved[num_saved:] if isinstance(t, torch.Tensor)]
            held = [t for t in given if t.numel() == 1 or HOLDS_TANGENTS]  # a loss's the engine holds, see surroundings
            del given  # and nobody else holds tangents: the code lets go of them when it has read them
            inputs = [self._blank(like) for like in graph.inputs[graph.num_tokens :]]
            with tracker:
                gradients = list(backward(saved))
                for place, source in enumerate(call.sources(graph)):
                    gradient, gradients[place] = gradients[place], None
                    is_first = source not in self._gradients  # a further one is added in place
                    is_added = place in call.added_to  # to what is there, when all of them are summed
                    if isinstance(gradient, torch.Tensor) and is_first:
                        as_it_is = isinstance(source, Source) or is_added
                        self._gradients[source] = gradient if as_it_is else self._kept(inputs[place], gradient)
                    if is_added and self._first_readers[source] == number:
                        self._gradients.pop(source, None)
                    del gradient
        del held

    def _kept(self, parameter: Any, gradient: Any) -> Any:
        """Return the gradient as autograd keeps it, and count what copying it takes."""
        kept = laid_out_as(parameter, gradient)
        if kept is not gradient:
            self._seconds += self._copied_seconds(kept)
            if self._measures:
                self._time_copy(kept, gradient)
        return kept

    def _tangents(self, number: int, graph: LoweredGraph) -> list[Any]:
        """Return gradients of a call's outputs: what later calls gave them, else what is made outside of the graphs."""
        found = []
        for like, place in zip(graph.tangents, graph.tangent_places(), strict=True):
            tangent = self._gradients.pop(Source(number, place), None) if place is not None else None
            if tangent is None or not lies_alike(tangent, like):
                tangent = self._blank(like)
                self._tracker.hold([tangent] if isinstance(tangent, torch.Tensor) else [])
            found.append(tangent)
        return found

    def _hold_present(self) -> None:
        self._tracker.hold_bytes(self._around.present)
        self._log.state_starts()
        self._tracker.hold_bytes(self._around.state)
        self._log.scaler_starts()
        self._log.step_starts()

    def _peak_since(self) -> int:
        """Return the most bytes that were alive since this was asked last."""
        self._outside_peak = max(self._outside_peak, self._tracker.peak_bytes)
        peak = max(self._tracker.peak_bytes, self._scratch_peak)
        self._tracker.peak_bytes, self._scratch_peak = self._tracker.live_bytes, 0
        return peak

    def _allocated(self, peak_bytes: int) -> int:
        """Return what the step's allocator counts where ``peak_bytes`` are alive at the most."""
        if self._around.memory.model is None:
            return peak_bytes
        events = self._log.events(tuple(self._tracker.workspaces.values()))
        return events.peaks(self._around.now).most_allocated_bytes

    def _first_peak(self, beside_bytes: int) -> int:
        """Return what the first step takes at most while it tries kernels: beside copies of what these change, a buffer as
        large as the device's cache, which is to be empty at each trial. There is no state of the optimizer yet.
        ``beside_bytes``: what the allocator counts beside what is alive. Source: Inductor's ``benchmark_gpu``."""
        if not torch.cuda.is_available():
            return 0
        cache_bytes = self._around.memory.weight("cuda", torch.cuda.get_device_properties().L2_cache_size)
        return self._trial_peak + cache_bytes + beside_bytes - sum(self._around.state)

    def _made(self, source: Source, like: Any) -> Any:
        """Return what an earlier call made. Code hands on what is a view of its input as that input; who called it is given
        the view."""
        made = self._outputs[source.call][source.output]
        if lies_alike(made, like):
            return made
        is_inside = made.dtype == like.dtype and like.untyped_storage().nbytes() <= made.untyped_storage().nbytes()
        return made.as_strided(like.shape, like.stride(), 0) if is_inside else self._blank(like)

    def _blank(self, like: Any) -> Any:
        if not isinstance(like, torch.Tensor):
            return like
        return torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=like.device)

    def _note_kernel(self, args: Sequence[Any], changed: Sequence[Any]) -> None:
        copied = sum(self._around.memory.weight(t.device.type, t.untyped_storage().nbytes()) for t in changed)
        self._trial_peak = max(self._trial_peak, self._tracker.live_bytes + copied)
        moved = sum(a.numel() * a.element_size() for a in args if isinstance(a, torch.Tensor))
        self._seconds += self._hardware.seconds(0, moved)
        for target, source in transposed(args, changed) if self._measures else ():
            self._time_copy(target, source)

    def _time_copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        self._laid_out_seconds += self._copied_seconds(target)
        self._measured_seconds += copy_seconds(target, source)

    def _copied_seconds(self, target: torch.Tensor) -> float:
        return self._hardware.seconds(0, 2 * target.numel() * target.element_size())

    def _note_op(self, func: Any, args: Any, kwargs: Any, output: Any) -> None:
        if not isinstance(func, OpOverload) or func.is_view or "empty" in func.overloadpacket.__name__:
            return
        inside = scratch_bytes(func, args, kwargs)
        self._scratch_peak = max(self._scratch_peak, self._tracker.live_bytes + inside)
        tensors = [t for t in tree_leaves((args, kwargs, output)) if isinstance(t, torch.Tensor)]
        moved = sum(t.numel() * t.element_size() for t in {id(t): t for t in tensors}.values())
        kwargs = {name: value for name, value in kwargs.items() if name != "out"}
        seconds = self._hardware.seconds(flops_of(func, args, kwargs, output), moved)
        self._seconds += seconds
        if self._measures and func in LAID_OUT:
            self._laid_out_seconds += seconds
            self._measured_seconds += op_seconds(func, args, kwargs)


def _placeholders(graph_module: fx.GraphModule) -> list[fx.Node]:
    return [n for n in graph_module.graph.nodes if n.op == "placeholder"]


def _vals(nodes: Sequence[Any]) -> list[Any]:
    return [n.meta.get("val") if isinstance(n, fx.Node) else None for n in nodes]


def _alike(output: Any, tangent: Any) -> bool:
    both = isinstance(output, torch.Tensor) and isinstance(tangent, torch.Tensor)
    return both and (output.shape, output.dtype) == (tangent.shape, tangent.dtype)
