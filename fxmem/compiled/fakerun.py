"""A compiled step on fakes: the wrappers that Inductor generates, run without kernels, and all memory they ask for counted.

In: forward and backward as partitioned, what is around them. Out: a :class:`StepRun`: the peak in bytes, and what it costs.
A wrapper allocates, reuses and frees as the compiled step will, so the peak is that step's, to the byte, where the ops that
are no generated kernels take no scratch of their own below the dispatcher; for those that do see
:mod:`fxmem.compiled.scratch`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from fxmem.compiled.emit import Partitioned
from fxmem.compiled.joint import is_tangent, outputs_of
from fxmem.compiled.lower import function_of, lowered_backward, lowered_forward
from fxmem.compiled.scratch import scratch_bytes
from fxmem.compiled.surroundings import Surroundings
from fxmem.errors import FxMemError, ProfileError, first_lines
from fxmem.fake.attention import torch_release
from fxmem.ir import Phase
from fxmem.profiling.allocator_state import MOST_UNSPLIT_BYTES
from fxmem.profiling.roofline import Hardware, flops_of
from fxmem.profiling.step_events import StepLog
from fxmem.profiling.storage_tracker import StorageTracker
from fxmem.torch_private import FakeTensorMode, OpOverload, storage_key, tree_leaves

HOLDS_TANGENTS = torch_release() < (2, 13)
"""Whether AOTAutograd keeps the gradients that a backward is given until its code has run."""
ROOM_BYTES = 4 * MOST_UNSPLIT_BYTES
"""On an H200 steps took up to 2.7 MB more than what was told of them (``benchmarks/results/gpu_compiled_h200.json``); no
bound is known."""


@dataclass(frozen=True, slots=True)
class StepRun:
    """A compiled step that ran on fakes; bytes are sums over storages, all of the step included."""

    peak_bytes: int
    forward_peak_bytes: int
    saved_bytes: int
    """Alive between forward and backward, outputs included."""
    backward_peak_bytes: int
    end_bytes: int
    """Alive after the backward: gradients, outputs, and all that is there for the whole step."""
    seconds: float
    """Estimated from bytes that kernels move and FLOPs of other ops."""
    most_bytes: int = 0
    """The most that a step takes on CUDA: in the first one Inductor may try each kernel (:meth:`_Run._first_peak`), and
    what the allocator leaves unsplit depends on what compiling left it."""
    floor_bytes: int = 0
    """What the end of the step takes, gradients and the optimizer's step: no plan changes that."""


def run_step(parts: Partitioned, num_outputs: int, around: Surroundings, hardware: Hardware) -> StepRun:
    """Lower both parts and run them. Strides of saved tensors are those that the forward's code gives them.

    Errors: ``ProfileError`` if the generated code calls what is not known, which is never counted as nothing.
    """
    try:
        return _Run(parts, num_outputs, around, hardware).step()
    except FxMemError:
        raise
    except Exception as error:
        raise ProfileError(
            f"the code that Inductor generates for the step could not be run on fake tensors: {first_lines(error)}. What a "
            'call in it allocates is then not known; leave out backend="inductor"'
        ) from error


class _Run:
    def __init__(self, parts: Partitioned, num_outputs: int, around: Surroundings, hardware: Hardware) -> None:
        self._forward, self._backward = parts
        self._num_outputs, self._around, self._hardware = num_outputs, around, hardware
        self._seconds, self._scratch_peak, self._trial_peak = 0.0, 0, 0
        self._log = log = StepLog()
        self._tracker = StorageTracker(log.note, self._note_op, around.memory, log.note_library, log.note_workspace)
        self._mode = FakeTensorMode(allow_non_fake_inputs=True)

    def step(self) -> StepRun:
        tracker, around = self._tracker, self._around
        self._hold_present()
        forward = function_of(lowered_forward(self._forward, self._num_outputs), self._note_kernel)
        with torch.no_grad(), self._mode:
            inputs = [self._blank(n.meta["val"]) for n in _placeholders(self._forward)]
            with tracker:
                results = list(forward(list(inputs)))
        forward_peak, saved = self._peak_since(), tracker.live_bytes
        outputs, kept = results[: self._num_outputs], results[self._num_outputs :]
        del results
        free_loss = tracker.repeat(around.loss)
        tracker.keep_workspaces(around.libraries)
        loss_peak = self._peak_since()
        tangents = _restride(self._backward, kept)
        backward = function_of(lowered_backward(self._backward, len(kept), self._donated()), self._note_kernel)
        tracker.thread = "autograd"
        with torch.no_grad(), self._mode:
            args = [*kept, *(self._blank(n.meta["val"]) for n in tangents)]
            given = [t for t in args[len(kept) :] if isinstance(t, torch.Tensor)]
            tracker.hold(given)
            held = [t for t in given if t.numel() == 1 or HOLDS_TANGENTS]  # a loss's the engine holds, see surroundings
            del kept, given  # and nobody else holds tangents: the code lets go of them when it has read them
            with tracker:
                gradients = list(backward(args))
                assert len(gradients) == len(inputs)
                for place, parameter in enumerate(inputs):
                    gradients[place] = _laid_out_as(parameter, gradients[place])
        backward_peak = self._peak_since()
        free_loss()
        tracker.hold_bytes(around.loss_left)
        del held
        end = tracker.live_bytes
        self._log.phase_starts(Phase.OPTIMIZER)
        tracker.repeat(around.optimizer)
        floor = self._peak_since()
        peak = max(forward_peak, loss_peak, backward_peak, floor)
        del outputs, gradients, inputs
        allocated = self._allocated(peak)
        most = 0 if around.memory.model is None else max(allocated + ROOM_BYTES, self._first_peak(allocated - peak))
        return StepRun(allocated, forward_peak, saved, backward_peak, end, self._seconds, most, floor)

    def _hold_present(self) -> None:
        self._tracker.hold_bytes(self._around.present)
        self._log.state_starts()
        self._tracker.hold_bytes(self._around.state)
        self._log.scaler_starts()
        self._log.step_starts()

    def _peak_since(self) -> int:
        """Return the most bytes that were alive since this was asked last."""
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

    def _donated(self) -> list[int]:
        """Return the places of saved tensors that share no memory with inputs, outputs or gradients: AOTAutograd lets the
        backward write over them."""
        outputs = _vals(outputs_of(self._forward))
        others = [
            *_vals(_placeholders(self._forward)),
            *outputs[: self._num_outputs],
            *_vals(outputs_of(self._backward)),
        ]
        held = {storage_key(t) for t in others if isinstance(t, torch.Tensor)}
        saved = outputs[self._num_outputs :]
        return [i for i, t in enumerate(saved) if isinstance(t, torch.Tensor) and storage_key(t) not in held]

    def _blank(self, like: Any) -> Any:
        if not isinstance(like, torch.Tensor):
            return like
        return torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=like.device)

    def _note_kernel(self, args: Sequence[Any], changed: Sequence[Any]) -> None:
        copied = sum(self._around.memory.weight(t.device.type, t.untyped_storage().nbytes()) for t in changed)
        self._trial_peak = max(self._trial_peak, self._tracker.live_bytes + copied)
        moved = sum(a.numel() * a.element_size() for a in args if isinstance(a, torch.Tensor))
        self._seconds += self._hardware.seconds(0, moved)

    def _note_op(self, func: Any, args: Any, kwargs: Any, output: Any) -> None:
        if not isinstance(func, OpOverload) or func.is_view or "empty" in func.overloadpacket.__name__:
            return
        inside = scratch_bytes(func, args, kwargs)
        self._scratch_peak = max(self._scratch_peak, self._tracker.live_bytes + inside)
        tensors = [t for t in tree_leaves((args, kwargs, output)) if isinstance(t, torch.Tensor)]
        moved = sum(t.numel() * t.element_size() for t in {id(t): t for t in tensors}.values())
        kwargs = {name: value for name, value in kwargs.items() if name != "out"}
        self._seconds += self._hardware.seconds(flops_of(func, args, kwargs, output), moved)


def _laid_out_as(parameter: Any, gradient: Any) -> Any:
    """Return the gradient as autograd keeps it: a new one where it is not laid out as its parameter is."""
    if not isinstance(gradient, torch.Tensor) or not isinstance(parameter, torch.Tensor):
        return gradient
    layouts = zip(gradient.shape, gradient.stride(), parameter.stride(), strict=True)
    same = all(mine == its for size, mine, its in layouts if size != 1)
    return gradient if same else torch.empty_like(parameter, dtype=gradient.dtype)


def _placeholders(graph_module: fx.GraphModule) -> list[fx.Node]:
    return [n for n in graph_module.graph.nodes if n.op == "placeholder"]


def _vals(nodes: Sequence[Any]) -> list[Any]:
    return [n.meta.get("val") if isinstance(n, fx.Node) else None for n in nodes]


def _restride(backward: fx.GraphModule, saved: Sequence[Any]) -> list[fx.Node]:
    """Give the backward's inputs the strides of the tensors that the forward saves; return its tangents."""
    inputs = _placeholders(backward)
    tangents = [n for n in inputs if is_tangent(n)]
    given = [n for n in inputs if not is_tangent(n)]
    assert len(given) == len(saved), "a value is saved that is no tensor"
    assert inputs[len(given) :] == tangents
    for node, tensor in zip(given, saved, strict=True):
        like = node.meta.get("val")
        if isinstance(like, torch.Tensor) and like.stride() != tensor.stride():
            node.meta["val"] = like.as_strided(like.shape, tensor.stride())
    return tangents
