"""What a loop is: one training, run without fxmem and with it, that tells what came out.

A loop is a function of a :class:`Run`. It passes its model through :meth:`Run.optimize` (or takes callbacks of
:meth:`Run.callbacks`), notes losses, and saves in ``run.folder``. Peaks are measured on the CPU from the second step of an
optimizer to the last one, so what a loop shows in its first step is planned for by then.
"""

from __future__ import annotations

import json
import random
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

import fxmem
from fxmem.profiling.storage_tracker import StorageTracker, tensors_of

OPTIONS: dict[str, Any] = {"planner": "chen", "cost": "cpu"}
"""Beside the budget: how plans are looked for, quickly and for estimated times. Nothing else depends on it."""
WARM_STEPS = 2
"""Steps before peaks are measured: one shows the loop, the next is planned for."""


@dataclass(slots=True)
class Run:
    """One training. ``budget_bytes``: None without fxmem."""

    folder: Path
    budget_bytes: int | None = None
    model: nn.Module | None = None
    values: list[Any] = field(default_factory=list)
    """Losses and whatever else has to be equal."""
    peak_bytes: int = 0
    num_steps: int = 0
    said: list[str] = field(default_factory=list)
    _tracker: StorageTracker | None = None

    def begin(self, model: nn.Module) -> None:
        """Train ``model`` from here on."""
        self._stop()
        self.model, self.num_steps = model, 0

    def optimize(self, model: nn.Module, *example: Any, **options: Any) -> Any:
        """Return ``model``, optimized by the one line if this run is fxmem's."""
        self.begin(model)
        if self.budget_bytes is None:
            return model
        self.model = fxmem.optimize(model, *example, budget=self.budget_bytes, **OPTIONS, **options)
        return self.model

    def optimize_(self, model: nn.Module, **options: Any) -> None:
        """As :meth:`optimize`, in place."""
        self.begin(model)
        if self.budget_bytes is not None:
            fxmem.optimize_(model, budget=self.budget_bytes, **OPTIONS, **options)

    def callbacks(self, kind: Callable[..., Any], model: nn.Module, **options: Any) -> list[Any]:
        """Return the callback of ``kind`` for ``model``, if this run is fxmem's."""
        self.begin(model)
        return [] if self.budget_bytes is None else [kind(budget=self.budget_bytes, **OPTIONS, **options)]

    def note(self, *values: Any) -> None:
        """Note losses, or other values."""
        self.values += [value.detach().clone() if isinstance(value, torch.Tensor) else value for value in values]

    @contextmanager
    def measuring(self) -> Iterator[None]:
        """Measure peaks in the body, from the step :data:`WARM_STEPS` on."""
        hook = register_optimizer_step_post_hook(self._after_step)
        try:
            yield
        finally:
            hook.remove()
            self._stop()

    def _stop(self) -> None:
        if self._tracker is not None:
            self._tracker.__exit__(None, None, None)
            self._tracker = None

    def _after_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        self.num_steps += 1
        if self._tracker is not None:
            self.peak_bytes = max(self.peak_bytes, self._tracker.peak_bytes)
        elif self.num_steps == WARM_STEPS:
            self._tracker = StorageTracker()
            self._tracker.hold(tensors_of((self.model, optimizer)))
            self._tracker.__enter__()

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the trained model's parameters, buffers and gradients."""
        assert self.model is not None
        named = {**dict(self.model.named_parameters()), **dict(self.model.named_buffers())}
        return {name: tensor.detach() for name, tensor in named.items()} | {
            f"{name}.grad": p.grad for name, p in self.model.named_parameters() if p.grad is not None
        }


Train = Callable[[Run], None]


@dataclass(frozen=True, slots=True)
class Loop:
    """A framework, what is done with it, and how. ``share``: the budget, of eager's measured peak."""

    framework: str
    name: str
    train: Train
    share: float
    remedy: Train | None
    """For what is refused: the same, done as the refusal says."""


LOOPS: list[Loop] = []


def loop(framework: str, name: str, *, share: float = 0.7, remedy: Train | None = None) -> Callable[[Train], Train]:
    """Return a decorator that enters a function in :data:`LOOPS`."""

    def enter(train: Train) -> Train:
        LOOPS.append(Loop(framework, name, train, share, remedy))
        return train

    return enter


def run(train: Train, folder: Path, budget_bytes: int | None) -> Run:
    """Return the run of ``train``, from one seed, with the warnings of fxmem that it heard."""
    made = Run(folder, budget_bytes)
    for seed in (torch.manual_seed, random.seed, np.random.seed):
        seed(0)
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        with made.measuring():
            train(made)
    texts = dict.fromkeys(str(each.message) for each in heard)
    made.said = [text for text in texts if budget_bytes is not None and _is_ours(text)]
    return made


def _is_ours(text: str) -> bool:
    return any(word in text for word in ("fxmem", "the budget", "planned in parts"))


# -- comparing -----------------------------------------------------------------------------------------------------------


def differing(eager: Run, ours: Run) -> list[str]:
    """Return what of two runs is not the same to the bit."""
    names = [f"value {k}" for k, (a, b) in enumerate(zip(eager.values, ours.values, strict=True)) if not same(a, b)]
    expected, found = eager.tensors(), ours.tensors()
    if expected.keys() != found.keys():
        return [*names, f"names {sorted(expected.keys() ^ found.keys())[:3]}"]
    return names + [name for name, tensor in expected.items() if not same(tensor, found[name])]


def same(a: Any, b: Any) -> bool:
    """Return whether two values are equal to the bit, tensors within dicts and lists too."""
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and bool(torch.equal(a.nan_to_num(), b.nan_to_num()))
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, int | float | str):
        return bool(a == b) or (a != a and b != b)
    return bool(np.array_equal(a, b)) if isinstance(a, np.ndarray) else type(a) is type(b)


def unequal_files(eager: Path, ours: Path) -> list[str] | None:
    """Return which files two runs saved that are not equal in name, keys and contents; None if none was saved."""
    files = [
        {path.relative_to(folder): path for path in folder.rglob("*") if path.is_file()} for folder in (eager, ours)
    ]
    if not files[0] and not files[1]:
        return None
    names = [str(name) for name in files[0].keys() ^ files[1].keys()]
    both = sorted(files[0].keys() & files[1].keys())
    return names + [str(name) for name in both if not _same_contents((eager, ours), name)]


def _same_contents(folders: tuple[Path, Path], name: Path) -> bool:
    files = [folder / name for folder in folders]
    if name.suffix == ".safetensors":
        return files[0].read_bytes() == files[1].read_bytes()
    if name.suffix in (".pt", ".ckpt", ".bin", ".pth"):
        read = [torch.load(path, weights_only=False) for path in files]
    elif name.suffix == ".json":
        read = [json.loads(path.read_text()) for path in files]
    else:
        return True
    return same(*(_without_place_and_time(values, str(folder)) for values, folder in zip(read, folders, strict=True)))


def _without_place_and_time(values: Any, folder: str) -> Any:
    if isinstance(values, dict):
        named = {str(key).replace(folder, ""): _without_place_and_time(each, folder) for key, each in values.items()}
        moving = ("runtime", "per_second", "time", "date", "version")
        return {key: each for key, each in named.items() if not any(word in key for word in moving)}
    if isinstance(values, list | tuple):
        return [_without_place_and_time(each, folder) for each in values]
    return values.replace(folder, "") if isinstance(values, str) else values
