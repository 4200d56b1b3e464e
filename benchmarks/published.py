"""The papers' own tables beside fxmem: the same models, batches and budgets, by exact fake execution.

``python -m benchmarks.published``. No GPU and no big memory is needed: models lie on the meta device, the whole training
step is followed allocation by allocation, and extra time is the roofline estimate for the paper's card. Theirs are
measured times as published; ours are estimates, so a ratio says what to expect, not what was timed. Peaks count
parameters, gradients, batch and all activations, without optimizer state (the papers' scripts take SGD or time forward and
backward only) and without the CUDA context and library workspaces, which the papers' figures may include: where their
keep-all figure differs from ours, both are printed.

Sources: MONeT (Shah et al. 2021, arXiv:2010.14501, V100); Checkmate (Jain et al. 2020, arXiv:1910.02653, 16 GB V100, at
most one extra forward pass); Chen et al. 2016 (arXiv:1604.06174); pytorch-memonger (github.com/Lyken17/pytorch-memonger);
ColossalAI's automatic checkpointing (its documentation of the rotor solver).
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass

import torch
from torch import Tensor, nn

from benchmarks.keeping_seconds import keeping_seconds
from benchmarks.losses import cross_entropy
from benchmarks.published_models import (
    CheckmateFCN8,
    CheckmateSegNet,
    CheckmateUNet,
    MonetUNet,
    from_torchvision,
    mobilenet_v1,
    resnet1000,
)
from benchmarks.published_table import Result, table
from benchmarks.results_file import RESULTS, machine
from fxmem.capture.export import capture
from fxmem.capture.graph import Inputs
from fxmem.frontiers import at_budget, recomputing_frontier
from fxmem.ir import FrontierPoint, GraphProfile
from fxmem.passes.context import CompileContext, Settings
from fxmem.passes.contract import run_passes
from fxmem.pipeline import PASSES, profile_for_short_memory
from fxmem.planners.bound import lower_bound
from fxmem.planners.pareto import cheapest_within
from fxmem.profiling.roofline import PRESETS
from fxmem.profiling.training_step import TrainingStep
from fxmem.profiling.verify import eager_step

Points = tuple[FrontierPoint, ...]

GB = 10**9
GIB_IN_GB = 2**30 / 10**9
PATH = RESULTS / "published.json"
BOUND_SECONDS = 20.0
"""For the lower bound at one point."""


# -- one network at one batch size ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Network:
    """A paper's network: how to build it, the size of its images, the card whose roofline counts."""

    name: str
    build: Callable[[], nn.Module]
    image: tuple[int, int] = (224, 224)
    card: str = "v100"
    loss: Callable[[Tensor], Tensor] = cross_entropy
    plan_seconds: float = 30.0


@dataclass(frozen=True)
class Planned:
    """What fxmem can do with a network at one batch size."""

    profile: GraphProfile
    points: Points
    eager_bytes: int
    eager_seconds: float
    """Of a step that saves what autograd does."""
    forms_seconds: float
    """What the step takes longer, or less, than such a one, for what is saved and held in other forms."""
    seconds: float

    @property
    def floor_bytes(self) -> int:
        return self.points[-1].peak_bytes

    @property
    def weights_bytes(self) -> int:
        """Parameters and their gradients, which no plan makes smaller."""
        return 2 * self.profile.static.parameters_bytes

    def overhead(self, point: FrontierPoint) -> float:
        """Return what the step takes longer under ``point`` than eager's, forms that save less included, over eager's."""
        return self._share(point.recompute_seconds)

    def least_overhead(self, point: FrontierPoint) -> float:
        """Return a share of the eager step's time that every plan of at most the peak of ``point`` costs."""
        seconds = lower_bound(self.profile, point.peak_bytes, point.recompute_seconds, seconds=BOUND_SECONDS)
        return self._share(seconds)

    def _share(self, seconds: float) -> float:
        """Return the share of the eager step's time that recomputing for ``seconds``, and other forms, are."""
        return (self.forms_seconds + seconds) / self.eager_seconds

    def least_bytes_within_one_forward(self) -> int:
        """Return the least peak at the cost of at most one more forward pass, Checkmate's rule."""
        limit = self.profile.forward_seconds
        return min(p.peak_bytes for p in self.points if p.recompute_seconds <= limit)


def planned(
    network: Network, batch: int, budget_bytes: int | None = None, known: dict[GraphProfile, Points] | None = None
) -> Planned:
    """Return the frontier of ``network``'s training step at ``batch``; nothing is allocated.

    ``budget_bytes``: what the forms of ops are chosen for; None: for the least memory. ``known``: frontiers found before,
    to which this one is added.
    """
    start = time.perf_counter()
    known = {} if known is None else known
    with torch.device("meta"):
        model = network.build().train()
        inputs = Inputs.of((torch.empty(batch, 3, *network.image),), {})
    settings = Settings(
        budget_bytes=budget_bytes,
        step=TrainingStep(loss_fn=network.loss, optimizer=None),
        planner="auto",
        plan_seconds=network.plan_seconds,
        hardware=PRESETS[network.card],
        cache=False,
    )
    captured = capture(model, inputs)
    context = CompileContext(model, inputs, settings)
    plain = context.profile_of(run_passes(captured, PASSES, context))
    profiled = profile_for_short_memory(captured, context)
    eager_bytes = eager_step(model, captured, inputs, settings.step, profiled.seen).peak_bytes
    if profiled.profile not in known:
        known[profiled.profile] = recomputing_frontier(profiled.profile, settings)
    points = at_budget(profiled.profile, settings, known[profiled.profile])
    lean, usual = (keeping_seconds(p.captured, inputs, network.loss, context.hardware) for p in (profiled, plain))
    seconds = time.perf_counter() - start
    return Planned(profiled.profile, points, eager_bytes, plain.profile.step_seconds, lean - usual, seconds)


# -- the tables --------------------------------------------------------------------------------------------------------


def _sum(output: Tensor) -> Tensor:
    return output.sum()


def _monet(name: str, build: Callable[[], nn.Module], image: tuple[int, int] = (224, 224)) -> Network:
    """A network as MONeT's scripts run it: the sum of the output is the loss."""
    return Network(name, build, image, loss=_sum)


# Batches, models, image sizes and loss are those of MONeT's scripts (github.com/utsaslab/MONeT, examples, models, monet).
# Its figures are in GiB, as its solver's budgets are. Its eager figure is read after 100 steps with gradients left in
# place and with cuDNN free to choose algorithms by speed, so convolution workspaces are in it.
MONET = (
    (_monet("resnet50", from_torchvision("resnet50")), 184, 15.06, ((10.01, 0.032), (6.99, 0.073), (4.99, 0.1195)), ""),
    (
        _monet("googlenet", from_torchvision("googlenet", aux_logits=False, init_weights=False)),
        320,
        14.93,
        ((9.98, 0.071), (4.99, 0.158)),
        "their eager figure has the auxiliary classifiers",
    ),
    (
        _monet("unet", MonetUNet, (416, 608)),
        11,
        14.32,
        ((10.01, -0.041), (7.00, 0.0139), (6.01, 0.0495), (5.01, 0.115)),
        "theirs also chooses convolution kernels, ours keeps eager's",
    ),
    (
        _monet("mobilenet_v2", from_torchvision("mobilenet_v2")),
        272,
        14.46,
        ((10.02, 0.024), (7.01, 0.0553), (5.01, 0.087)),
        "relu6_ of today's torch saves a copy of its input, a third of eager's bytes, which fxmem spares",
    ),
    (
        _monet("vgg16", from_torchvision("vgg16")),
        176,
        14.12,
        ((9.71, -0.053), (6.82, 0.0199), (5.51, 0.091)),
        "",
    ),
)
# Checkmate's largest batches are its integer program's: 16e9 bytes less parameters and gradients, outputs of Keras layers
# only (an activation inside a convolution's layer, and all else a kernel or a backward holds, costs nothing), no more than
# one forward pass again (github.com/parasj/checkmate, branch mlsys20_artifact; models of keras_segmentation at 416x608).
CHECKMATE = (
    (Network("vgg19", from_torchvision("vgg19")), 289),
    (Network("unet", CheckmateUNet, (416, 608)), 57),
    (Network("fcn8", CheckmateFCN8, (416, 608)), 60),
    (Network("segnet", CheckmateSegNet, (416, 608)), 62),
    (Network("resnet50", from_torchvision("resnet50")), 193),
    (Network("mobilenet", mobilenet_v1), 1105),
)
OTHERS = (
    ("Chen 2016", Network("resnet1000", resnet1000, plan_seconds=120.0), 32, 48.0, 7.0, 0.30, "batch is our guess"),
    (
        "memonger",
        Network("resnet152", from_torchvision("resnet152")),
        16,
        5459 / 1024 * GIB_IN_GB,
        2455 / 1024 * GIB_IN_GB,
        0.11,
        "10 % less speed; reserved memory by their script",
    ),
    (
        "ColossalAI",
        Network("resnet18", from_torchvision("resnet18"), card="a100"),
        128,
        2818.7 / 1024 * GIB_IN_GB,
        1838.2 / 1024 * GIB_IN_GB,
        0.2136,
        "theirs is infeasible below 1620 MB; batch is our guess",
    ),
)


def at_budgets(
    paper: str,
    network: Network,
    batch: int,
    their_eager_gb: float,
    theirs: Sequence[tuple[float, float]],
    note: str = "",
) -> Iterator[Result]:
    """Yield our cheapest plan at each of their peaks, which is the budget."""
    known: dict[GraphProfile, Points] = {}
    floor_bytes = planned(network, batch, None, known).floor_bytes
    for their_gb, their_overhead in theirs:
        ours = planned(network, batch, int(their_gb * GB), known)
        point = cheapest_within(ours.points, int(their_gb * GB))
        yield Result(
            paper=paper,
            network=network.name,
            batch=batch,
            their_eager_gb=their_eager_gb,
            our_eager_gb=ours.eager_bytes / GB,
            their_gb=their_gb,
            their_overhead=their_overhead,
            our_gb=None if point is None else point.peak_bytes / GB,
            our_overhead=None if point is None else ours.overhead(point),
            floor_gb=floor_bytes / GB,
            weights_gb=ours.weights_bytes / GB,
            least_overhead=None if point is None else ours.least_overhead(point),
            plan_seconds=ours.seconds,
            note=note,
        )


def max_batch(network: Network, their_max: int, budget_bytes: int = 16 * GB) -> Result:
    """Return the largest batch within ``budget_bytes`` and one more forward pass.

    The least peak is all but affine in the batch, so a few secant steps find where it crosses the budget.
    """
    start = time.perf_counter()
    needs: dict[int, int] = {}
    plans: dict[int, Planned] = {}

    def need(batch: int) -> int:
        if batch not in needs:
            plans[batch] = planned(network, batch)
            needs[batch] = plans[batch].least_bytes_within_one_forward()
        return needs[batch]

    low, high = max(2, their_max // 4), their_max
    need(low)
    while True:
        slope = (need(high) - needs[low]) / (high - low)
        guess = high + int((budget_bytes - needs[high]) / slope)
        fitting = [b for b, n in needs.items() if n <= budget_bytes]
        failing = [b for b, n in needs.items() if n > budget_bytes]
        guess = min(max(guess, max(fitting, default=1) + 1), min(failing, default=10**9) - 1)
        if guess in needs or (fitting and failing and max(fitting) + 1 == min(failing)):
            break
        low, high = high, guess
    best = max(fitting)
    ours = plans[best]
    keep_all = int(best * budget_bytes / ours.eager_bytes)
    return Result(
        paper="Checkmate",
        network=network.name,
        batch=best,
        their_eager_gb=None,
        our_eager_gb=ours.eager_bytes / GB,
        their_gb=budget_bytes / GB,
        their_overhead=None,
        our_gb=needs[best] / GB,
        our_overhead=ours.overhead(next(p for p in ours.points if p.peak_bytes == needs[best])),
        floor_gb=ours.floor_bytes / GB,
        their_max_batch=their_max,
        our_max_batch=best,
        weights_gb=ours.weights_bytes / GB,
        plan_seconds=time.perf_counter() - start,
        note=f"without recomputation about {keep_all}",
    )


def all_results(papers: Sequence[str]) -> Iterator[Result]:
    """Yield every published point of ``papers``."""
    if "monet" in papers:
        for network, batch, eager_gib, gibs, note in MONET:
            theirs = [(gib * GIB_IN_GB, overhead) for gib, overhead in gibs]
            yield from at_budgets("MONeT", network, batch, eager_gib * GIB_IN_GB, theirs, note)
    if "others" in papers:
        for paper, network, batch, eager_gb, their_gb, overhead, note in OTHERS:
            yield from at_budgets(paper, network, batch, eager_gb, ((their_gb, overhead),), note)
    if "checkmate" in papers:
        for network, their_max in CHECKMATE:
            yield max_batch(network, their_max)


def main(argv: Sequence[str] | None = None) -> int:
    """Plan every point, print the table, write the JSON."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.published", description=__doc__.split("\n")[0])
    parser.add_argument("--papers", nargs="+", choices=("monet", "others", "checkmate"))
    papers = parser.parse_args(argv).papers or ("monet", "others", "checkmate")
    torch.set_num_threads(1)
    results = _kept(papers)
    for result in all_results(papers):
        results.append(result)
        print(table([result]).splitlines()[-1], flush=True)
        body = [{k: v for k, v in asdict(r).items() if v not in (None, "")} for r in results]
        PATH.write_text(json.dumps({"machine": machine(), "results": body}, indent=1) + "\n", encoding="utf-8")
    print(table(results))
    return 0


_PAPERS = {"monet": {"MONeT"}, "checkmate": {"Checkmate"}, "others": {paper for paper, *_ in OTHERS}}


def _kept(papers: Sequence[str]) -> list[Result]:
    """Return the results of other papers from an earlier run."""
    redone = set().union(*(_PAPERS[p] for p in papers))
    return [result for result in load_results() if result.paper not in redone]


def load_results() -> list[Result]:
    """Return the committed results; empty if there are none."""
    if not PATH.exists():
        return []
    fields = dict.fromkeys(Result.__dataclass_fields__) | {"plan_seconds": 0.0, "note": ""}
    rows = json.loads(PATH.read_text(encoding="utf-8"))["results"]
    return [Result(**{**fields, **row}) for row in rows]


if __name__ == "__main__":
    raise SystemExit(main())
