"""Seconds per node, measured on the device the model will train on.

In: a :class:`Profiled`. Out: the same with measured times: every op that may be recomputed runs alone on tensors of the
recorded geometry, each op and geometry once, warm, median of a few runs. Ops that are never re-run keep their roofline
time, scaled by the median of measured over roofline, since they only matter for the step's total. Known times are kept
on disk by device, torch version, op and geometry (:mod:`fxmem.cache`). Not modelled: caches warmed by the op before, and
the values in tensors, which few kernels' times depend on.
"""

from __future__ import annotations

import dataclasses
import json
import os
import platform
import statistics
import time
from collections.abc import Callable

import torch

from fxmem import cache as disk
from fxmem.profile import Profiled
from fxmem.replay import Autocast, NodeReplay, View, rerunning
from fxmem.types import NodeProfile

KIND = "times"
NUM_RUNS = 5
MOST_SECONDS = 20.0
"""Of measuring in all; what is not measured by then keeps its roofline time."""
LONG_SECONDS = 0.05
"""An op that takes longer is run once more only."""
MOST_SHARE = 0.5
"""Of the free memory that one op's tensors may take."""


def with_measured_times(profiled: Profiled, *, cache: bool = True) -> Profiled:
    """Return ``profiled`` with the times of its own device; unchanged where that device cannot be measured on."""
    if len(profiled.devices) != 1 or profiled.devices[0].type == "meta":
        return profiled
    device = profiled.devices[0]
    measured = _measure_all(profiled, device, cache=cache)
    nodes = profiled.profile.nodes
    ratios = [measured[k] / nodes[k].seconds for k in measured if nodes[k].seconds > 0.0]
    scale = statistics.median(ratios) if ratios else 1.0
    return _with_seconds(profiled, lambda node: measured.get(node.index, scale * node.seconds))


def _with_seconds(profiled: Profiled, seconds: Callable[[NodeProfile], float]) -> Profiled:
    graph = profiled.profile
    nodes = tuple(dataclasses.replace(node, seconds=seconds(node)) for node in graph.nodes)
    recipes = tuple(dataclasses.replace(r, seconds=sum(nodes[k].seconds for k in r.nodes)) for r in graph.recipes)
    backward_seconds = 2 * sum(node.seconds for node in nodes)
    timed = dataclasses.replace(graph, nodes=nodes, recipes=recipes, backward_seconds=backward_seconds)
    return dataclasses.replace(profiled, profile=timed)


def _measure_all(profiled: Profiled, device: torch.device, *, cache: bool) -> dict[int, float]:
    """Return seconds by node, for the nodes of recipes."""
    key = disk.digest(_device_name(device), torch.__version__, str(torch.get_num_threads()))
    known = _load(key) if cache else {}
    num_known, end = len(known), time.monotonic() + MOST_SECONDS
    found = {}
    cuda = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(cuda), torch.enable_grad():
        for replay in profiled.replays:
            if replay is None:
                continue
            for node in replay.nodes:
                name = f"{replay.autocast} {_name(node)}"
                if name not in known and time.monotonic() < end:
                    seconds = _measure(node, device, replay.autocast)
                    if seconds is not None:
                        known[name] = seconds
                if name in known:
                    found[node.index] = known[name]
    if cache and len(known) > num_known:
        disk.write(KIND, key, json.dumps(_load(key) | known))
    return found


def _load(key: str) -> dict[str, float]:
    try:
        return {str(name): float(seconds) for name, seconds in json.loads(disk.read(KIND, key) or "{}").items()}
    except (ValueError, TypeError, AttributeError):
        return {}


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine()


def _name(node: NodeReplay) -> str:
    """Equal for nodes that run the same op on the same geometry."""
    places = {place for place, _ in node.refs}
    constants = [repr(leaf) for place, leaf in enumerate(node.leaves) if place not in places]
    views = [(place, str(v.dtype), v.size, v.stride, v.offset, v.requires_grad) for place, v in node.refs]
    return f"{node.target} {constants} {views}"


def _measure(node: NodeReplay, device: torch.device, autocast: Autocast | None) -> float | None:
    """Return the median time of ``node``; None if it does not run on made-up values or has no room."""
    needed_bytes = 3 * sum(_num_elements(view) * view.dtype.itemsize for _, view in node.refs)
    if needed_bytes > MOST_SHARE * _free_bytes(device):
        return None
    try:
        bases = {view.storage: _made_up(view, device) for _, view in node.refs}
        with rerunning(autocast, (device,)) as saved:
            return _median_seconds(lambda: node.run(dict(bases), saved), device)
    except Exception:  # whatever an op may say of made-up values: its roofline time stands
        return None


def _num_elements(view: View) -> int:
    return view.offset + 1 + sum((n - 1) * stride for n, stride in zip(view.size, view.stride, strict=True) if n > 1)


def _made_up(view: View, device: torch.device) -> torch.Tensor:
    """Small numbers, and zeros where numbers may be indices."""
    count = _num_elements(view)
    if view.dtype.is_floating_point or view.dtype.is_complex:
        return torch.rand(count, device=device).to(view.dtype)
    return torch.zeros(count, dtype=view.dtype, device=device)


def _free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError, AttributeError):
        return 1 << 30


def _median_seconds(run: Callable[[], None], device: torch.device) -> float:
    first = _seconds(run, device)
    if first > LONG_SECONDS:
        return min(first, _seconds(run, device))
    return statistics.median(_seconds(run, device) for _ in range(NUM_RUNS))


def _seconds(run: Callable[[], None], device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start = time.perf_counter()
    run()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start
