"""Seconds per node, measured on the device the model will train on.

In: a :class:`Profiled`. Out: the same with measured times: every op that may be recomputed runs alone on tensors of the
recorded geometry, each op and geometry once, warm, median of a few runs, with caches emptied in between since what a
step recomputes was last touched long ago. No plan runs a backward again, so one is measured for each op only, on the
geometry that weighs most; on others it takes as many times their forward. What is not measured (ops that never run
again, what has no room in the time or the memory, what fails on made-up values) has its roofline time scaled by the
median of measured over roofline, of its op if any was measured. On the tape, on CPU, a recipe costs
:data:`TAPE_SECONDS` more, or half of it: there the tape's own Python adds to the step, while a GPU works on meanwhile.
Times, and what was not to be measured, are remembered and kept on disk by device, torch version, op and geometry
(:mod:`fxmem.disk_cache`), so that a second call plans with the same ones. ``FXMEM_MEASURE=0`` in the environment keeps
``cost="auto"`` from measuring. Not modelled: the values in tensors, which few kernels' times depend on, but for the
sizes of groups in grouped matmuls: there all are equal.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch

from fxmem import disk_cache as disk
from fxmem.ir import GraphProfile, Launches, NodeProfile, Recipe
from fxmem.op_facts.kinds import TimeDependsOnValues
from fxmem.op_facts.lookup import by_op
from fxmem.profiling.profile import NodeTimer, Profiled
from fxmem.runtime.autocast import Autocast, autocast_as_in_forward
from fxmem.runtime.layout import View
from fxmem.runtime.recompute import NodeRecompute, SavedInRerun
from fxmem.runtime.scoped_ops import Scoped, op_of
from fxmem.runtime.tape_table import HOOKED_SECONDS, RERUN_SECONDS
from fxmem.torch_private import OpOverload, leaves_of

KIND = "times"
MOST_RUNS = 5
"""Of which the median is taken, after a first one."""
MOST_SECONDS = 1.5
"""Of measuring in all."""
LONG_SECONDS = 0.02
"""An op that takes longer is run once only, as what a first run has to set up is little beside it; shorter ones the
oftener, the shorter they are."""
MOST_SHARE = 0.5
"""Of the free memory that one op's tensors may take."""
TAPE_SECONDS = 2 * HOOKED_SECONDS + RERUN_SECONDS
"""Of the tape's Python for one recipe on CPU: two nodes run under hooks for it. A recipe whose products nobody saves needs
no hooks, and takes half as long."""
EVICTING_BYTES = {"cpu": 4 << 20, "cuda": 64 << 20}
"""What is written between runs: more than a core's own cache, or a GPU's."""
WAITING_CYCLES = 1_000_000
"""Of a GPU's clock, about half a millisecond: longer than Python takes to launch an op's kernels."""
_BY_VALUES = by_op(TimeDependsOnValues)


class Seconds(NamedTuple):
    """Of one op."""

    forward: float
    backward: float | None
    """None: it was not measured."""


def may_measure() -> bool:
    """Whether op times are measured where the user does not say."""
    return os.environ.get("FXMEM_MEASURE", "1").lower() not in ("0", "off", "no", "false")


def with_measured_times(profiled: Profiled, *, cache: bool = True, on_tape: bool = True) -> Profiled:
    """Return ``profiled`` with the times of its own device; unchanged where that device cannot be measured on. ``on_tape``:
    steps stay on the tape."""
    device = device_measured(profiled)
    if device is None:
        return profiled
    measured = _measure_all(profiled, device, cache=cache)
    return _with_seconds(profiled, measured, on_tape=on_tape) if measured else profiled


def device_measured(profiled: Profiled) -> torch.device | None:
    """Return the one device that does the work, None where it cannot be measured on; beside one that is not the CPU, a few
    tensors on the CPU do not count."""
    beside_cpu = [device for device in profiled.devices if device.type != "cpu"]
    devices = beside_cpu or profiled.devices
    return devices[0] if len(devices) == 1 and devices[0].type in EVICTING_BYTES else None


def with_times_like(
    profiled: Profiled, other: GraphProfile, counterparts: Mapping[int, int], timer: NodeTimer
) -> Profiled:
    """Return ``profiled`` with times that are to ``timer``'s as those of ``other`` are, another size of the same graph.

    ``counterparts``: the node of ``other`` by node; others have the times they have.
    """
    launched = other.launches is not None and other.launches.bound_by_host  # which takes as long for any size

    def seconds(node: NodeProfile) -> float:
        like = other.nodes[counterparts[node.index]]
        if launched:
            return like.seconds
        usual = timer(like.flops, like.moved_bytes)
        return timer(node.flops, node.moved_bytes) * (like.seconds / usual if usual else 1.0)

    graph = profiled.profile
    usual = 2 * sum(timer(node.flops, node.moved_bytes) for node in other.nodes)
    backward_seconds = graph.backward_seconds * (other.backward_seconds / usual if usual else 1.0)
    if launched:
        backward_seconds = other.backward_seconds
    forward = [seconds(node) if node.index in counterparts else node.seconds for node in graph.nodes]
    return _timed(profiled, forward, backward_seconds, _tape_seconds(other), other.launches)


def _with_seconds(profiled: Profiled, measured: dict[int, Seconds], *, on_tape: bool) -> Profiled:
    graph = profiled.profile
    scale, backward_share = _scales(graph.nodes, measured), _backward_shares(graph.nodes, measured)
    forward, backward_seconds = [], 0.0
    for node in graph.nodes:
        seconds = measured.get(node.index) or Seconds(scale(node.op) * node.seconds, None)
        forward.append(seconds.forward)
        own = seconds.backward
        backward_seconds += backward_share(node.op) * seconds.forward if own is None else own
    on_tape = on_tape and all(device.type == "cpu" for device in profiled.devices)
    tape_seconds = {True: TAPE_SECONDS, False: TAPE_SECONDS / 2} if on_tape else {}
    return _timed(profiled, forward, backward_seconds, tape_seconds)


def _timed(
    profiled: Profiled,
    forward: list[float],
    backward_seconds: float,
    tape_seconds: Mapping[bool, float],
    launches: Launches | None = None,
) -> Profiled:
    """``tape_seconds``: of a recipe, by whether what it makes is saved; 0 where it does not say."""
    graph = profiled.profile
    nodes = tuple(dataclasses.replace(n, seconds=s) for n, s in zip(graph.nodes, forward, strict=True))
    recipes = tuple(
        dataclasses.replace(
            r, seconds=tape_seconds.get(_is_saved(graph, r), 0.0) + sum(nodes[k].seconds for k in r.nodes)
        )
        for r in graph.recipes
    )
    timed = dataclasses.replace(
        graph, nodes=nodes, recipes=recipes, backward_seconds=backward_seconds, launches=launches
    )
    return dataclasses.replace(profiled, profile=timed)


def _tape_seconds(graph: GraphProfile) -> dict[bool, float]:
    """Return what every recipe costs beside its nodes, by whether what it makes is saved."""
    seconds: dict[bool, float] = {}
    for r in graph.recipes:
        is_saved, beside = _is_saved(graph, r), r.seconds - sum(graph.nodes[k].seconds for k in r.nodes)
        seconds[is_saved] = min(beside, seconds.get(is_saved, beside))
    return seconds


def _is_saved(graph: GraphProfile, recipe: Recipe) -> bool:
    return any(graph.storages[s].num_saves for s in recipe.products)


def _scales(nodes: tuple[NodeProfile, ...], measured: dict[int, Seconds]) -> Callable[[str], float]:
    """Return the function from an op to the median of measured over roofline time, of all ops where it has none."""
    ratios: dict[str, list[float]] = {}
    for k, seconds in measured.items():
        if nodes[k].seconds > 0.0:
            ratios.setdefault(nodes[k].op, []).append(seconds.forward / nodes[k].seconds)
    overall = statistics.median(r for of_op in ratios.values() for r in of_op) if ratios else 1.0
    return lambda op: statistics.median(ratios[op]) if op in ratios else overall


def _backward_shares(nodes: tuple[NodeProfile, ...], measured: dict[int, Seconds]) -> Callable[[str], float]:
    """Return the function from an op to how many times its forward its backward takes; 2 where none was measured."""
    shares: dict[str, float] = {}
    for k, (forward, backward) in measured.items():
        if backward is not None and forward > 0.0:
            shares[nodes[k].op] = backward / forward
    return lambda op: shares.get(op, 2.0)


# -- what to measure, and what is known -----------------------------------------------------------------------------------


class _Job(NamedTuple):
    """One op on one geometry."""

    name: str
    node: NodeRecompute
    autocast: Autocast | None
    roofline_seconds: float
    """Of all nodes that run it, one run each."""
    heaviest: bool = False
    """Whether no geometry of its op weighs more."""


def _measure_all(profiled: Profiled, device: torch.device, *, cache: bool) -> dict[int, Seconds]:
    """Return seconds by node, for nodes of recipes."""
    key = disk.digest(_source(), _device_name(device), torch.__version__, str(torch.get_num_threads()))
    known = _remembered.setdefault(key, {})
    if cache:
        known.update(_load(key))
    num_known, end = len(known), time.monotonic() + MOST_SECONDS
    names = {
        node.index: _name(node, recompute.autocast)
        for recompute in profiled.recomputes
        if recompute
        for node in recompute.nodes
    }
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        for job in _jobs(profiled, names):
            if job.name not in known:
                in_time = time.monotonic() + _expected_seconds(job, profiled) < end
                known[job.name] = _measure(job, device) if in_time else None
    if cache and len(known) > num_known:
        disk.write(KIND, key, json.dumps(_load(key) | known))
    return {k: seconds for k, name in names.items() if (seconds := known.get(name)) is not None}


@functools.cache
def _source() -> str:
    """Return a digest of the code that decides what a time is."""
    return disk.digest_of_source("fxmem.profiling.op_benchmark", "fxmem.runtime.recompute", "fxmem.op_facts.costs")


_remembered: dict[str, dict[str, Seconds | None]] = {}
"""What this process knows, by device and op; None: it was not to be measured."""


def _jobs(profiled: Profiled, names: dict[int, str]) -> Iterator[_Job]:
    """Yield what to measure: for each op first the geometry that weighs most, then the next ones; heavy ops first."""
    jobs: dict[str, _Job] = {}
    for recompute in profiled.recomputes:
        for node in recompute.nodes if recompute is not None else ():
            seconds = profiled.profile.nodes[node.index].seconds
            before = jobs.get(names[node.index])
            total = seconds + (before.roofline_seconds if before else 0.0)
            jobs[names[node.index]] = _Job(names[node.index], node, recompute.autocast if recompute else None, total)
    by_op: dict[str, list[_Job]] = {}
    for job in sorted(jobs.values(), key=lambda job: -job.roofline_seconds):
        by_op.setdefault(str(job.node.target), []).append(job)
    for rank in range(max(map(len, by_op.values()), default=0)):
        yield from (of_op[rank]._replace(heaviest=rank == 0) for of_op in by_op.values() if rank < len(of_op))


def _expected_seconds(job: _Job, profiled: Profiled) -> float:
    """Return about how long measuring takes: one or two forwards and a backward, half as fast as the roofline."""
    return 2 * (4 if job.heaviest else 1) * profiled.profile.nodes[job.node.index].seconds


def _load(key: str) -> dict[str, Seconds | None]:
    try:
        known = json.loads(disk.read(KIND, key) or "{}")
        return {str(name): None if pair is None else _seconds_of(*pair) for name, pair in known.items()}
    except (ValueError, TypeError, AttributeError):
        return {}


def _seconds_of(forward: Any, backward: Any) -> Seconds:
    return Seconds(float(forward), None if backward is None else float(backward))


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine()


def _name(node: NodeRecompute, autocast: Autocast | None) -> str:
    """Equal for nodes that run the same op on the same geometry."""
    places = {place for place, _ in node.refs}
    constants = [repr(leaf) for place, leaf in enumerate(node.leaves) if place not in places]
    views = [(place, str(v.dtype), v.size, v.stride, v.offset, v.requires_grad) for place, v in node.refs]
    return f"{autocast} {_target_name(node.target)} {constants} {views}"


def _target_name(target: Callable[..., Any]) -> str:
    """Return a name that is the same in every process, where there is one."""
    if isinstance(target, Scoped):
        return f"{target.region} {_target_name(target.op)}"
    if isinstance(target, OpOverload) or not hasattr(target, "__qualname__"):
        return str(target)
    return f"{getattr(target, '__module__', None)}.{target.__qualname__}"


# -- one op ---------------------------------------------------------------------------------------------------------------


def _measure(job: _Job, device: torch.device) -> Seconds | None:
    """Return the median times of ``job``; None if it does not run on made-up values or has no room."""
    node, autocast = job.node, job.autocast
    needed_bytes = 4 * sum(_num_elements(view) * view.dtype.itemsize for _, view in node.refs)
    if needed_bytes > MOST_SHARE * _free_bytes(device):
        return None
    try:
        bases = {view.storage: made_up(view, device) for _, view in node.refs}
        if op_of(node.target) in _BY_VALUES:
            _make_groups_equal([view for _, view in node.refs], bases)
        saved = SavedInRerun()
        with saved, autocast_as_in_forward(autocast, (device,)):
            forward = median_seconds(lambda: node.run(dict(bases), saved), device)
        if node.writes or not job.heaviest:  # what it writes is its output: no gradient can be asked for
            return Seconds(forward, None)
        return Seconds(forward, _backward_seconds(node, bases, device, autocast))
    except Exception:  # whatever an op may say of made-up values: its roofline time stands
        return None


def _backward_seconds(
    node: NodeRecompute, bases: dict[int, torch.Tensor], device: torch.device, autocast: Autocast | None
) -> float:
    """Return the median time of the backward of ``node``; 0 if it has none."""
    with torch.enable_grad(), autocast_as_in_forward(autocast, (device,)):
        arguments = [node.argument(view, bases) for _, view in node.refs]
        outputs = [t for t in leaves_of(node.call(arguments)) if isinstance(t, torch.Tensor) and t.requires_grad]
    inputs = [t for t in arguments if t.requires_grad]
    if not outputs or not inputs:
        return 0.0
    gradients = [torch.ones_like(t) for t in outputs]
    return median_seconds(
        lambda: torch.autograd.grad(outputs, inputs, gradients, retain_graph=True, allow_unused=True), device
    )


def _num_elements(view: View) -> int:
    return view.offset + 1 + sum((n - 1) * stride for n, stride in zip(view.size, view.stride, strict=True) if n > 1)


def made_up(view: View, device: torch.device) -> torch.Tensor:
    """Return a base for a tensor of this geometry: random numbers below 1, the same again and again where it is large, and
    zeros where numbers may be indices."""
    count = _num_elements(view)
    if not (view.dtype.is_floating_point or view.dtype.is_complex):
        return torch.zeros(count, dtype=view.dtype, device=device)
    few = torch.rand(min(count, 1 << 16), device=device).to(view.dtype)
    return few.repeat(-(-count // len(few)))


def _make_groups_equal(views: list[View], bases: dict[int, torch.Tensor]) -> None:
    """Write where groups of equal size end: of rows of the first operand, of columns of the second or of what is summed."""
    a, b, *ends = views
    total = b.size[-1] if len(a.size) == 3 else a.size[-1] if len(b.size) == 2 else a.size[0]
    for view in (view for view in ends if len(view.size) == 1 and view.dtype == torch.int32):
        place = bases[view.storage].as_strided(view.size, view.stride, view.offset)
        place.copy_(torch.arange(1, len(place) + 1) * total // len(place))


def _free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError, AttributeError):
        return 1 << 30


def median_seconds(run: Callable[[], object], device: torch.device) -> float:
    """Return the seconds of ``run``, whose arguments are in no cache."""
    evicting = torch.zeros(EVICTING_BYTES[device.type], dtype=torch.uint8, device=device)
    first = _seconds(run, evicting)
    num_runs = min(MOST_RUNS, int(LONG_SECONDS / max(1e-9, first)))
    return statistics.median(_seconds(run, evicting) for _ in range(num_runs)) if num_runs else first


def _seconds(run: Callable[[], object], evicting: torch.Tensor) -> float:
    if evicting.is_cuda:
        return _device_seconds(run, evicting)
    evicting.add_(1)
    return cpu_seconds(run)


def cpu_seconds(run: Callable[[], object]) -> float:
    """Return the seconds of ``run`` on the CPU. One thread's own clock does not count what other processes use of its
    core."""
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    start = clock()
    run()
    return clock() - start


def _device_seconds(run: Callable[[], object], evicting: torch.Tensor) -> float:
    """Return the seconds of ``run`` on evicting's device, which is kept waiting until all its kernels are enqueued."""
    with torch.cuda.device(evicting.device):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        evicting.add_(1)
        torch.cuda._sleep(WAITING_CYCLES)
        start.record()
        run()
        end.record()
        end.synchronize()
    return float(start.elapsed_time(end)) / 1e3
