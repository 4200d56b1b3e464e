"""Every torch.nn module with torch's own sample inputs, trained under plans: passed, refused and why, or wrong.

What goes in: ``torch.testing._internal.common_modules.module_db``. What comes out: an `Outcome` per module that eager can
train on CPU. `python -m tests.module_table` prints the table.
"""

import contextlib
import json
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.testing._internal.common_modules import ModuleInfo, module_db
from torch.utils._pytree import tree_leaves, tree_map_only

import fxmem
from fxmem.planners.simulate import drop_all
from tests.exactness import check, passing, tightest

NUM_SAMPLES = 2
NUMBERS_ONLY = {
    "nn.LSTM": "numbers only: the biases share a gradient, whose copies the simulation counts too late",
}
"""Modules whose peak on CPU cannot be foretold, and why; their bits are compared all the same."""


PLANS = (drop_all, passing, tightest)


@dataclass(frozen=True)
class Outcome:
    """``verdict``: passed, refused, wrong, or untrainable (eager itself cannot, or has nothing to train)."""

    name: str
    verdict: str
    why: str = ""


class Wrapped(nn.Module):
    """A scale, the module under test, a nonlinear op: values on both sides of it may be dropped."""

    def __init__(self, module: nn.Module, *, scaled: bool) -> None:
        super().__init__()
        self.module, self.scaled = module, scaled
        self.scale = nn.Parameter(torch.tensor(1.25))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output = self.module(*(self._before(a) for a in args), **kwargs)
        return tree_map_only(Tensor, lambda t: t.sin() if t.is_floating_point() or t.is_complex() else t, output)

    def _before(self, value: Any) -> Any:
        plain = isinstance(value, Tensor) and value.is_floating_point() and value.layout == torch.strided
        return (value * self.scale).cos() + value if plain and self.scaled else value


def infos() -> dict[str, ModuleInfo]:
    """The modules of torch's database by name, one entry for each class."""
    return {info.name: info for info in module_db}


Sample = tuple[Callable[[], nn.Module], tuple[Any, ...], dict[str, Any]]


def samples(info: ModuleInfo) -> Iterator[Sample]:
    """Yield (build, args, kwargs) of the samples that eager can train, an op before the module where it allows one."""
    inputs = info.module_inputs_func(info, device="cpu", dtype=torch.float32, requires_grad=True, training=True)
    for sample in inputs:
        if sample.forward_input is None:
            continue
        call = (tuple(sample.forward_input.args), dict(sample.forward_input.kwargs))
        args, kwargs = tree_map_only(Tensor, _leaf, call)
        builds = (_builder(info, sample.constructor_input, args, kwargs, scaled=scaled) for scaled in (True, False))
        build = next((build for build in builds if _trains(build, args, kwargs)), None)
        if build is not None:
            yield build, args, kwargs


def _builder(info: ModuleInfo, made: Any, args: Any, kwargs: Any, *, scaled: bool) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        module = info.module_cls(*made.args, **made.kwargs)
        if info.is_lazy:  # as its documentation asks: a first forward, before anything else
            module(*args, **kwargs)
        return Wrapped(module, scaled=scaled).train()

    return build


def _trains(build: Callable[[], nn.Module], args: Any, kwargs: Any) -> bool:
    with contextlib.suppress(Exception), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(0)
        _loss(build()(*tree_map_only(Tensor, _leaf, args), **kwargs)).backward()
        return True
    return False


def _leaf(tensor: Tensor) -> Tensor:
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


def _loss(output: Any) -> Tensor:
    """The sum of all there is to differentiate, real and imaginary parts alike."""
    parts = [t for t in tree_leaves(output) if isinstance(t, Tensor) and t.requires_grad]
    return torch.stack([(torch.view_as_real(t) if t.is_complex() else t).sum() for t in parts]).sum()


def outcome(info: ModuleInfo) -> Outcome:
    """Train the first samples of one module under the tightest and other plans."""
    num_samples = 0
    for build, args, kwargs in samples(info):
        try:
            check(build, *args, kwargs=kwargs, loss=_loss, plans=PLANS, exact_peak=info.name not in NUMBERS_ONLY)
        except fxmem.FxMemError as error:
            return Outcome(info.name, "refused", " ".join(f"{type(error).__name__}: {error}".split()))
        except Exception as error:
            return Outcome(info.name, "wrong", " ".join(f"{type(error).__name__}: {error}".split()))
        num_samples += 1
        if num_samples == NUM_SAMPLES:
            break
    return Outcome(info.name, "passed" if num_samples else "untrainable", NUMBERS_ONLY.get(info.name, ""))


RESULTS = Path(__file__).resolve().parent.parent / "benchmarks" / "results" / "module_table.json"


def save(outcomes: list[Outcome]) -> None:
    """Write the counts and every outcome that is not a plain pass, with torch's version and the date."""
    counts = Counter(o.verdict for o in outcomes)
    facts = {"torch": torch.__version__, "date": datetime.now(UTC).date().isoformat(), "modules": len(outcomes)}
    others = [
        {"name": o.name, "verdict": o.verdict, "why": o.why[:300]} for o in outcomes if o.verdict != "passed" or o.why
    ]
    RESULTS.write_text(json.dumps({**facts, **dict(sorted(counts.items())), "others": others}, indent=1) + "\n")


def main() -> None:
    """Print the table, and save it."""
    torch.set_num_threads(1)
    outcomes = []
    for name, info in infos().items():
        outcomes.append(outcome(info))
        print(f"{name:40} {outcomes[-1].verdict:12} {outcomes[-1].why[:400]}", flush=True)
    save(outcomes)
    counts = Counter(o.verdict for o in outcomes)
    print(", ".join(f"{n} {verdict}" for verdict, n in sorted(counts.items())))


if __name__ == "__main__":
    sys.exit(main())
