"""``python -m benchmarks.optimality``: the default planner against the integer program that knows the optimum.

Prints, for every graph and budget, the recompute time of ``auto``'s plan, the optimum (or the bound proved when HiGHS ran
out of time) and their difference in points of step time; then the worst and the median, and of budgets it did not close
the worst difference to the bound. Graphs of at most ``BRUTE_FORCE_RECIPES`` recipes are also tried out completely. Results
go to ``benchmarks/results/optimality.json`` after every budget; a second run with the same planners goes on where the
first stopped, and with more seconds a solve it takes up what HiGHS had not closed, from the roomiest budget down. What was
proved of a graph's budget stays proved: with other planners only the plans are made anew.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import scipy
import torch
from tabulate import tabulate
from torch import nn

import fxmem
from benchmarks.libraries import import_torchvision
from benchmarks.results_file import RESULTS, machine
from fxmem.capture.export import capture
from fxmem.capture.graph import Inputs
from fxmem.ir import KEEP, GraphProfile, Plan
from fxmem.planners.bound import Relaxation
from fxmem.planners.ilp import optimum
from fxmem.planners.pareto import Clock, cheapest_within
from fxmem.planners.registry import PLANNERS
from fxmem.planners.simulate import simulate, tables_of
from fxmem.profiling.profile import profile
from fxmem.profiling.roofline import PRESETS
from tests.synthetic import chain, random_dag

PATH = RESULTS / "optimality.json"
PACKAGE = Path(fxmem.__file__).parent
BRUTE_FORCE_RECIPES = 8
FULL_BRUTE_FORCE_RECIPES = 11
SHARES = (0.0, 0.1, 0.25, 0.5, 0.75)
FULL_SHARES = tuple(k / 20 for k in range(20))


@dataclass(frozen=True)
class Row:
    """One budget of one graph; percentages of the step's time."""

    graph: str
    digest: str
    """Of the profile."""
    planners: str
    """Digest of what decides about a plan."""
    num_recipes: int
    share: float
    """Of the way from the least peak found to that of keeping everything."""
    budget_bytes: int
    auto_percent: float
    bound_percent: float
    lagrangian_percent: float
    brute_force_percent: float | None
    solved: bool
    seconds: float
    limit_seconds: float
    """What HiGHS was given."""

    @property
    def difference(self) -> float:
        return self.auto_percent - self.bound_percent


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--full", action="store_true", help="every chain to 32, 20 budgets, 600 s a solve")
    parser.add_argument("--limit", type=float, default=None, help="seconds for one solve (default 5; 600 with --full)")
    parser.add_argument("--only", default="", help="graphs whose name holds this")
    options = parser.parse_args()
    torch.set_num_threads(1)
    limit = options.limit or (600.0 if options.full else 5.0)
    shares = FULL_SHARES if options.full else SHARES
    rows = _known()
    planners = _planners()
    for name, make in graphs(full=options.full):
        if options.only not in name:
            continue
        known = {share: rows.get((name, share)) for share in reversed(shares)}
        todo = {s: row for s, row in known.items() if not (_settled(row, limit) and row and row.planners == planners)}
        for row in _measure(name, make(), todo, limit, full=options.full) if todo else ():
            rows[name, row.share] = row
            _save(list(rows.values()))
        _print([rows[name, share] for share in shares])
    _summary(list(rows.values()))
    return 0


def _settled(row: Row | None, limit: float) -> bool:
    return row is not None and (row.solved or row.limit_seconds >= limit)


def _known() -> dict[tuple[str, float], Row]:
    """Return the rows, by graph and share, of earlier runs."""
    body = json.loads(PATH.read_text(encoding="utf-8")) if PATH.exists() else {"rows": []}
    return {(row["graph"], row["share"]): Row(**row) for row in body["rows"]}


def _planners() -> str:
    """Return a digest of what decides about a plan."""
    sources = [*sorted((PACKAGE / "planners").glob("*.py")), PACKAGE / "simulate.py"]
    return hashlib.sha256(b"".join(source.read_bytes() for source in sources)).hexdigest()[:12]


def _save(rows: list[Row]) -> None:
    facts = machine() | {"scipy": scipy.__version__}
    body = {"machine": facts, "summary": _figures(rows), "rows": [asdict(row) for row in rows]}
    RESULTS.mkdir(exist_ok=True)
    PATH.write_text(json.dumps(body, indent=1) + "\n", encoding="utf-8")


# -- graphs --------------------------------------------------------------------------------------------------------------


def graphs(*, full: bool) -> Iterator[tuple[str, Callable[[], GraphProfile]]]:
    for n in range(2, 33) if full else (2, 4, 8, 12, 16, 24, 32):
        yield f"chain {n}", lambda n=n: chain(n, nbytes=3, grad_bytes=1)  # type: ignore[misc]
    for n, seed in itertools.product((8, 12, 16, 20, 24, 28), range(4 if full else 2)):
        yield f"random {n}.{seed}", lambda n=n, seed=seed: random_dag(seed, n)  # type: ignore[misc]
    yield "MLP, 8 layers", lambda: _real(_mlp(), (torch.randn(64, 32),))
    yield "GPT, 1 layer", lambda: _gpt(1)
    if full:
        yield "GPT, 2 layers", lambda: _gpt(2)
        yield "GPT, 6 layers", lambda: _gpt(6)
    image = (torch.randn(4, 3, 64, 64),)
    yield "ResNet-18", lambda: _real(import_torchvision().models.resnet18(), image)
    yield "VGG-16", lambda: _real(import_torchvision().models.vgg16_bn(), image)
    yield "UNet", lambda: _real(_UNet(), image)


def _real(
    model: nn.Module, args: tuple[torch.Tensor, ...], kwargs: dict[str, torch.Tensor] | None = None
) -> GraphProfile:
    """Return the profile at the level of ops: no optimizer, the times of an A100."""
    inputs = Inputs.of(args, kwargs or {})
    return profile(capture(model.train(), inputs), inputs, PRESETS["a100"].seconds).profile


def _mlp() -> nn.Module:
    layers = [layer for _ in range(8) for layer in (nn.Linear(32, 32), nn.GELU())]
    return nn.Sequential(*layers)


def _gpt(num_layers: int) -> GraphProfile:
    import_torchvision()  # transformers imports it
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(n_layer=num_layers, n_embd=64, n_head=2, vocab_size=128, n_positions=64, use_cache=False)
    ids = torch.randint(0, 128, (4, 64))
    return _real(GPT2LMHeadModel(config), (), {"input_ids": ids, "labels": ids})


class _UNet(nn.Module):
    """Three levels, two convolutions each, skips by concatenation."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        sizes = [width, 2 * width, 4 * width]
        self.down = nn.ModuleList(_convs(i, o) for i, o in zip([3, *sizes], sizes, strict=False))
        self.up = nn.ModuleList(_convs(2 * o, o // 2 if o > width else o) for o in reversed(sizes[:-1]))
        self.lift = nn.ModuleList(nn.ConvTranspose2d(2 * o, o, 2, 2) for o in reversed(sizes[:-1]))
        self.lift[1] = nn.ConvTranspose2d(width, width, 2, 2)
        self.last = nn.Conv2d(width, 2, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        skips = []
        for level, block in enumerate(self.down):
            x = block(nn.functional.max_pool2d(x, 2) if level else x)
            skips.append(x)
        for block, lift, skip in zip(self.up, self.lift, reversed(skips[:-1]), strict=True):
            x = block(torch.cat([lift(x), skip], 1))
        return self.last(x)


def _convs(inputs: int, outputs: int) -> nn.Module:
    layers: list[nn.Module] = []
    for channels in (inputs, outputs):
        layers += [nn.Conv2d(channels, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU()]
    return nn.Sequential(*layers)


# -- measuring and printing ----------------------------------------------------------------------------------------------


def _measure(
    name: str, graph: GraphProfile, known: dict[float, Row | None], limit: float, *, full: bool
) -> Iterator[Row]:
    points = PLANNERS["auto"](graph, seconds=60.0)
    low, high = points[-1].peak_bytes, points[0].peak_bytes
    relaxation, percent = Relaxation(tables_of(graph)), 100 / graph.step_seconds
    digest, planners = hashlib.sha256(repr(graph).encode()).hexdigest()[:12], _planners()
    most = FULL_BRUTE_FORCE_RECIPES if full else BRUTE_FORCE_RECIPES
    everything = _brute_force(graph) if len(graph.recipes) <= most else None
    for share, row in known.items():
        budget_bytes = round(low + share * (high - low))
        point = cheapest_within(points, budget_bytes)
        assert point is not None
        cost = percent * point.recompute_seconds
        if row and _settled(row, limit) and (row.digest, row.budget_bytes) == (digest, budget_bytes):
            assert cost >= row.bound_percent * (1 - 1e-3), f"{name} at {share:.0%}: a plan below what was proved"
            bound = min(cost, row.bound_percent)
            solved = row.solved or bound >= cost * (1 - 1e-4)
            yield replace(row, planners=planners, auto_percent=cost, bound_percent=bound, solved=solved)
            continue
        start, upper = time.perf_counter(), point.recompute_seconds
        lower = relaxation.bound(budget_bytes, upper_seconds=upper, num_steps=80, clock=Clock(5.0))
        best = optimum(graph, budget_bytes, seconds=limit, lower_seconds=lower, upper_seconds=upper)
        bound = min(upper, max(lower, best.bound_seconds))
        brute = None if everything is None else percent * min(s for peak, s in everything if peak <= budget_bytes)
        solved = best.bound_seconds >= min(upper, best.recompute_seconds) * (1 - 1e-4)
        yield Row(
            name, digest, planners, len(graph.recipes), share, budget_bytes, cost, percent * bound, percent * lower, brute,
            solved, time.perf_counter() - start, limit,
        )  # fmt: skip


def _brute_force(graph: GraphProfile) -> list[tuple[int, float]]:
    """Return peak and cost of every combination of keeping, refilling late and refilling on the way."""
    last = len(graph.recipes) - 1
    choices = [(KEEP,) if s.recipe is None else tuple(dict.fromkeys((KEEP, s.recipe, last))) for s in graph.storages]
    timelines = (simulate(graph, Plan("brute force", limits)) for limits in itertools.product(*choices))
    return list({(t.peak_bytes, t.recompute_seconds) for t in timelines})


def _print(rows: list[Row]) -> None:
    for r in rows:
        how = "optimum" if r.solved else "bound  "
        brute = "" if r.brute_force_percent is None else f"  brute force {r.brute_force_percent:6.2f}"
        print(
            f"{r.graph:16s} {r.num_recipes:3d} recipes  {r.share:4.0%}  auto {r.auto_percent:6.2f}  "
            f"{how} {r.bound_percent:6.2f}  gap {r.difference:5.2f}  Lagrangian {r.lagrangian_percent:6.2f}{brute}  "
            f"{r.seconds:5.1f} of {r.limit_seconds:g} s",
            flush=True,
        )


def _figures(rows: list[Row]) -> dict[str, float]:
    solved = [r.difference for r in rows if r.solved]
    chains = [r.difference for r in rows if r.solved and r.graph.startswith("chain")]
    real = [r.difference for r in rows if r.solved and not r.graph.startswith(("chain", "random"))]
    return {
        "budgets": len(rows),
        "solved": len(solved),
        "worst_points": max(solved, default=0.0),
        "median_points": statistics.median(solved) if solved else 0.0,
        "worst_points_chains": max(chains, default=0.0),
        "worst_points_models": max(real, default=0.0),
        "worst_points_to_bound_unsolved": max((r.difference for r in rows if not r.solved), default=0.0),
    }


def _summary(rows: list[Row]) -> None:
    print(tabulate(_figures(rows).items(), floatfmt=".3f"))


if __name__ == "__main__":
    raise SystemExit(main())
