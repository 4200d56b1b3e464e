"""Measurements: a model trained one way beside eager, in this process, steps interleaved.

In: names and amounts. Out: :class:`Row` objects of plain numbers.

NOTE [What is measured]

1. The step is fxmem's own definition (NOTE [The training step] in fxmem/step.py) with plain SGD: forward, loss, backward,
   update, gradients set to None. Peaks count parameters, buffers, gradients and batch.
2. ``peak_bytes``: live storages seen by the dispatcher (CPU), or what the caching allocator counts as allocated for the
   step's own tensors, cuBLAS's workspaces and what the step adds at most (CUDA; ``allocator_peak_bytes`` is of reserved
   bytes).
   On the CPU ``allocator_peak_bytes`` is the same step seen by torch's profiler at the CPU allocator, scratch inside
   kernels included: an independent second opinion. The tracker stays on inside code that the partitioner alone compiled;
   inductor's kernels bypass the dispatcher, there the profiler's figure is the only one and stands in both places.
3. Time is CPU time of the process on CPU, so that neighbours on the machine count little, and wall time between
   synchronizations on CUDA. Ratios are taken turn by turn, in alternating order; median and quartiles are kept. A
   compiled way takes its turns with the same compiler's way that recomputes nothing too.
4. Gradients and buffers after one step from equal states and equal seeds are compared with eager's bit by bit. A
   compiled way draws other random numbers than eager, so where the model has dropout it is compared with itself
   without recomputation; inductor with layouts left as they are, as what it changes them to can make its own gradients
   wrong (NOTE [Scatters before convolutions] in fxmem/compiled/levers.py). Where more than the first step is needed to
   begin with, gradients are those of the last of them, which no update has been between.
"""

from __future__ import annotations

import copy
import functools
import gc
import math
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch._inductor import config as inductor_config
from torch.utils._pytree import tree_map_only

import fxmem
from benchmarks import models
from benchmarks.models import Batch, BenchModel
from benchmarks.ways import EAGER, Contender, NotApplicable, Way, apply, without_recompute
from fxmem.profiling.device_memory import DeviceMemory
from fxmem.profiling.roofline import flops_of
from fxmem.profiling.storage_tracker import StorageTracker, tensors_of
from fxmem.profiling.training_step import run_step

SEED = 7
R = TypeVar("R")
LEARNING_RATE = 1e-4


@dataclass
class Row:
    """One model trained one way; fields that were not measured are None, and ``problem`` says why."""

    model: str
    way: str
    kind: str
    amount: float | None = None
    problem: str | None = None
    peak_bytes: int | None = None
    allocator_peak_bytes: int | None = None
    predicted_peak_bytes: int | None = None
    eager_peak_bytes: int | None = None
    floor_bytes: int | None = None
    """The least peak fxmem reaches (fxmem's rows only)."""
    time_ratio: float | None = None
    """Median over interleaved pairs of the step's time over eager's."""
    time_ratio_low: float | None = None
    time_ratio_high: float | None = None
    own_ratio: float | None = None
    """Median of a compiled way's time over that of the same compiler without recomputation, measured in turn with it."""
    estimated_ratio: float | None = None
    num_pairs: int | None = None
    eager_seconds: float | None = None
    flops_ratio: float | None = None
    """Counted FLOPs (matrix products, convolutions) over eager's."""
    prepare_seconds: float | None = None
    """Planning or compiling, with the first steps in which something is compiled or written down."""
    num_nodes: int | None = None
    """Nodes of the captured graph (fxmem's rows only)."""
    runtime: str | None = None
    """How fxmem's steps ran, and why; of older rows, on the tape, it was not noted."""
    gradients: str | None = None
    """``bitwise``, or the largest relative error over the parameters."""
    gradient_error: float | None = None
    buffers: str | None = None
    """``equal``, or the first buffer that differs."""
    commit: str | None = None
    cpu: str | None = None
    date: str | None = None
    """Of older rows neither was noted."""

    @property
    def exact(self) -> bool:
        """Whether gradients and buffers are eager's bits and the peak is the predicted one."""
        same_bits = self.gradients == "bitwise" and self.buffers == "equal"
        return same_bits and self.peak_bytes == self.predicted_peak_bytes


def measure(model_name: str, scale: str, ways: Sequence[Way], seconds: float, device: str = "cpu") -> Iterator[Row]:
    """Yield the row of each of ``ways`` on ``model_name``; at most about ``seconds`` each are spent on timed pairs."""
    bench = models.get(model_name)
    torch.manual_seed(SEED)
    initial = bench.build(scale).to(device)
    batch = tree_map_only(Tensor, lambda t: t.to(device), bench.batch(scale))
    eager = Racer(EAGER, initial, bench, batch)
    eager_peak = peak_of(eager)

    @functools.cache
    def gradients_of(own: Way) -> dict[str, Tensor]:
        """Return what compiled ways are compared with (NOTE [What is measured], rule 4): once for all."""
        with inductor_config.patch(layout_optimization=False):
            return Racer(own, initial, bench, batch).gradients

    for way in ways:
        torch._dynamo.reset()  # code of earlier ways counts against its limit
        row = Row(model_name, way.name, way.kind, way.amount)
        row.eager_peak_bytes = eager_peak.tracked_bytes
        try:
            _measure(row, way, initial, eager, eager_peak, seconds, gradients_of)
        except NotApplicable as reason:
            row.problem = f"not applicable: {reason}"
        except fxmem.InfeasibleBudgetError as error:
            row.problem = f"not reachable: least peak {error.least_bytes / 1e6:.1f} MB"
            row.floor_bytes = error.least_bytes
        except Exception as error:
            row.problem = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        yield row


def _measure(
    row: Row,
    way: Way,
    initial: nn.Module,
    eager: Racer,
    eager_peak: Peak,
    seconds: float,
    gradients_of: Callable[[Way], dict[str, Tensor]],
) -> None:
    against_itself = way.compiled and _has_dropout(initial)
    own = without_recompute(way)
    free = Racer(own, initial, eager.bench, eager.batch) if own else None
    reference = gradients_of(own or way) if against_itself else eager.gradients
    racer = Racer(way, initial, eager.bench, eager.batch)
    row.prepare_seconds = racer.prepare_seconds
    row.predicted_peak_bytes = racer.contender.told_peak_bytes() if racer.contender.told_peak_bytes else None
    row.estimated_ratio = racer.contender.estimated_ratio
    if way.is_fxmem:
        optimized: Any = racer.contender.module
        row.floor_bytes = optimized.report.floor_bytes
        row.num_nodes = len(optimized.graph_module.graph.nodes)
        row.runtime = getattr(optimized.fxmem, "runtime", None)
    _compare_numbers(row, racer, reference, eager.buffers, " against itself" if against_itself else "")
    if way.kind == "autocast":
        row.buffers = "other precision"
    _measure_peak(row, way, racer, eager_peak)
    _measure_times(row, eager, racer, free if own else None, seconds)


class Racer:
    """A copy of the model, trained one way, with its optimizer and the numbers of its first step."""

    def __init__(self, way: Way, initial: nn.Module, bench: BenchModel, batch: Batch) -> None:
        self.bench, self.batch = bench, batch
        model = copy.deepcopy(initial)
        self.optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
        start = time.perf_counter()
        self.contender: Contender = apply(way, model, bench, batch, self.optimizer)
        self.prepare_seconds = time.perf_counter() - start
        start = time.perf_counter()
        self.gradients, self.buffers = self._first_step()
        for _ in range(1, self.contender.num_first_steps):
            self.gradients.clear()
            self.gradients, _ = self._first_step()
        if self.contender.num_first_steps:
            self.prepare_seconds += time.perf_counter() - start

    def _first_step(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        torch.manual_seed(SEED)
        run_step(self.forward, self.bench.loss)
        module = self.contender.module
        gradients = {n: p.grad for n, p in module.named_parameters() if p.grad is not None}
        self.optimizer.zero_grad(set_to_none=True)
        return gradients, {n: b.detach().clone() for n, b in module.named_buffers()}

    def forward(self) -> Any:
        args, kwargs = self.batch
        return self.contender.forward(*args, **kwargs)

    def step(self) -> None:
        """Run one whole training step."""
        run_step(self.forward, self.bench.loss, self.optimizer)


# -- numbers -----------------------------------------------------------------------------------------------------------


def _has_dropout(model: nn.Module) -> bool:
    rates = (value for module in model.modules() for name, value in vars(module).items() if _is_rate(module, name))
    return any(isinstance(rate, float) and rate > 0 for rate in rates)


def _is_rate(module: nn.Module, name: str) -> bool:
    return (name == "p" and "drop" in type(module).__name__.lower()) or "dropout" in name or name == "drop_prob"


def _compare_numbers(
    row: Row, racer: Racer, gradients: dict[str, Tensor], buffers: dict[str, Tensor], note: str
) -> None:
    row.gradient_error = largest_relative_error(gradients, racer.gradients)
    row.gradients = ("bitwise" if row.gradient_error == 0 else f"{row.gradient_error:.1e}") + note
    wrong = [n for n, b in buffers.items() if not _close(b, racer.buffers.get(n))]
    row.buffers = "equal" if not wrong else f"{len(wrong)} of {len(buffers)} wrong, {wrong[0]} first"
    racer.gradients, racer.buffers = {}, {}


def _close(expected: Tensor, actual: Tensor | None) -> bool:
    return actual is not None and torch.allclose(expected.double(), actual.double(), rtol=1e-2, atol=1e-5)


def largest_relative_error(expected: dict[str, Tensor], actual: dict[str, Tensor]) -> float:
    """Return max over parameters of |a - e| / |e| (Frobenius), 0 only if all bits agree; a lost gradient counts 1, and so
    does one where all that are expected are zero."""
    worst = 0.0
    largest = max((float(e.norm()) for e in expected.values()), default=0.0)
    for name, e in expected.items():
        a = actual.get(name)
        if a is None:
            worst = max(worst, 1.0)
        elif not torch.equal(e, a):
            # A bias before a normalization has a gradient of rounding errors only; compare those with the largest.
            scale = max(float(e.norm()), 1e-4 * largest)
            difference = float((a - e).norm())
            difference = math.inf if math.isnan(difference) else difference
            worst = max(worst, difference / scale if scale else float(difference > 0), 1e-30)
    return worst


# -- peaks -------------------------------------------------------------------------------------------------------------


class CompiledTracker(StorageTracker):
    """A tracker under which code that dynamo compiled runs as compiled: other modes make dynamo run the original."""

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True


@dataclass(frozen=True)
class Peak:
    """Bytes of one tracked step."""

    tracked_bytes: int
    allocator_bytes: int | None
    flops: int


def _measure_peak(row: Row, way: Way, racer: Racer, eager: Peak) -> None:
    peak = peak_of(racer)
    row.allocator_peak_bytes = peak.allocator_bytes
    row.peak_bytes = peak.allocator_bytes if way.of_inductor else peak.tracked_bytes
    if eager.flops and not way.of_inductor:
        row.flops_ratio = peak.flops / eager.flops


def peak_of(racer: Racer) -> Peak:
    """Return the peak of one step, seen by the tracker and by the allocator (NOTE [What is measured], rule 2)."""
    racer.step()
    gc.collect()
    holders = (racer.contender.module, racer.optimizer, racer.batch)
    device = next(racer.contender.module.parameters()).device
    if device.type == "cuda":
        held_bytes = StorageTracker(memory=DeviceMemory.of([device])).hold(tensors_of(holders))
        torch.cuda.synchronize()
        torch._C._cuda_clearCublasWorkspaces()  # the step makes them again where it uses them
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        start = torch.cuda.memory_stats()
        racer.step()
        torch.cuda.synchronize()
        end = torch.cuda.memory_stats()
        allocated, reserved = (
            held_bytes + end[f"{name}.all.peak"] - start[f"{name}.all.current"]
            for name in ("allocated_bytes", "reserved_bytes")
        )
        return Peak(allocated, reserved, 0)
    flops = 0

    def count(func: Any, args: Any, kwargs: Any, output: Any) -> None:
        nonlocal flops
        flops += flops_of(func, args, kwargs, output)

    tracker = CompiledTracker(on_op=count)
    static_bytes = tracker.hold(tensors_of(holders))
    with tracker:
        racer.step()
    return Peak(tracker.peak_bytes, static_bytes + allocator_rise_bytes(racer.step), flops)


def allocator_rise_bytes(step: Callable[[], None]) -> int:
    """Return the largest growth of the CPU allocator's bytes during ``step``, from the profiler's memory events."""
    with torch.profiler.profile(profile_memory=True, activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        step()
    results: Any = profiler.profiler.kineto_results  # type: ignore[union-attr]
    events = sorted((e for e in results.events() if e.name() == "[memory]"), key=lambda e: e.start_ns())
    live = peak = 0
    for event in events:
        live += event.nbytes()
        peak = max(peak, live)
    return peak


# -- times -------------------------------------------------------------------------------------------------------------


def _measure_times(row: Row, eager: Racer, racer: Racer, free: Racer | None, seconds: float) -> None:
    """``free``: the same compiler's way without recomputation."""
    racers = [eager, racer] if free is None else [eager, racer, free]
    taken_in = turns(racers, seconds_of, seconds)
    row.num_pairs = len(taken_in)
    row.time_ratio_low, row.time_ratio, row.time_ratio_high = quartiles(
        taken[racer] / taken[eager] for taken in taken_in
    )
    row.eager_seconds = statistics.median(taken[eager] for taken in taken_in)
    if free is not None:
        row.own_ratio = statistics.median(taken[racer] / taken[free] for taken in taken_in)


def turns(
    racers: Sequence[R], seconds_of: Callable[[R], float], seconds: float, *, least: int = 5, most: int = 25
) -> list[dict[R, float]]:
    """Return the seconds of a step of each, turn by turn, every other one in the reverse order. ``seconds``: what all turns
    may take, but for the ``least`` number of them."""
    num_turns = int(min(most, max(least, seconds / sum(map(seconds_of, racers)))))
    return [{each: seconds_of(each) for each in (racers if i % 2 else racers[::-1])} for i in range(num_turns)]


def seconds_of(racer: Racer) -> float:
    if not next(racer.contender.module.parameters()).is_cuda:
        start = time.process_time()
        racer.step()
        return time.process_time() - start
    torch.cuda.synchronize()
    start = time.perf_counter()
    racer.step()
    torch.cuda.synchronize()
    return time.perf_counter() - start


def quartiles(values: Iterable[float]) -> tuple[float, float, float]:
    """Return the first quartile, the median and the third quartile."""
    low, middle, high = statistics.quantiles(list(values), n=4, method="inclusive")
    return low, middle, high
