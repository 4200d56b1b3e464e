"""Planning once for all the sizes that a training run will bring: :func:`prepare`.

In: an optimized module, and its batches or their lengths, of which only shapes and small integers are looked at. Out: plans
for the worst of them, under which all others run (NOTE [One plan, many sizes] in :mod:`fxmem.runtime.other_sizes`), and a
:class:`Prepared` that says what peaks to expect.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from tabulate import tabulate

from fxmem.api.arguments import example_of, region_of_step
from fxmem.api.compile_cache import CompileCache
from fxmem.capture.dynamic_batch import Shapes, largest_of, reshaped, shapes_of
from fxmem.capture.graph import Inputs, device_of
from fxmem.errors import InputError, unit_of
from fxmem.fake.fake_tensors import FakeWorld
from fxmem.passes.context import Settings
from fxmem.runtime.autocast import Autocast
from fxmem.runtime.recompute import generators_kept

MOST_KEPT = 64
"""Batches whose integers are kept while planning, for each kind of call: a model may look at values."""
MOST_PLANS = 8
"""For each kind of call: ways that the model takes by its inputs' values, or sizes that its code is tied to."""
QUANTILES = ((0.5, "p50"), (0.95, "p95"), (1.0, "max"))


@dataclass(frozen=True, slots=True)
class PreparedSize:
    """One size out of all batches."""

    quantile: str
    """``"p50"``, ``"p95"`` or ``"max"`` of the batches' numbers of elements."""
    shapes: tuple[tuple[int, ...], ...]
    """Of the batch's tensors."""
    peak_bytes: int
    """Peak of its training step, verified on fakes."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """What was prepared for."""

    num_batches: int
    num_sizes: int
    num_plans: int
    worst: tuple[tuple[int, ...], ...]
    """Shapes planned for: in each dimension the largest of all batches."""
    sizes: tuple[PreparedSize, ...]

    def __str__(self) -> str:
        unit, scale = unit_of(max(size.peak_bytes for size in self.sizes))
        rows = [(size.quantile, str(size.shapes[0]), f"{size.peak_bytes / scale:.4f}") for size in self.sizes]
        table = tabulate(rows, headers=("batch", "first input", f"peak, {unit}"), disable_numparse=True)
        return f"{table}\n{self.num_batches} batches of {self.num_sizes} sizes, {self.num_plans} plans"


def prepare(
    model: torch.nn.Module,
    batches: Any,
    example_args: Any = None,
    example_kwargs: dict[str, Any] | None = None,
    *,
    arguments: Callable[[Any], Any] | None = None,
) -> Prepared:
    """Plan for all sizes of ``batches`` at once, for the worst of them first; print the peaks and return them.

    - ``model``: an optimized module, in training mode.
    - ``batches``: a dataloader or other iterable of batches; a ``Trainer`` of transformers, whose training batches are
      taken; or lengths (ints), with an example of a call, whose sequences are given each length.
    - ``arguments``: from a batch to what the model is called with: a dict of keyword arguments, a tuple of positional
      ones, or a tensor. By default a dict is passed by the names that ``forward`` takes, of a tuple as many as it needs.

    The batches are read once; random states are put back. Of them only shapes and integers are looked at, nothing is run.
    Errors: ``InputError`` for what cannot be prepared for, and those of :func:`fxmem.optimize`.
    """
    namespace = getattr(model, "fxmem", None)
    plans = getattr(getattr(namespace, "plans", None), "asked", None)
    if namespace is not None and plans is None:
        raise InputError('prepare is for eager steps; with backend="inductor" each size is planned as it comes')
    if namespace is None or not isinstance(plans, CompileCache):
        raise InputError("prepare needs an optimized module: fxmem.prepare(fxmem.optimize(model, ...), batches)")
    prepared = _prepare(namespace.original, plans, namespace.settings, batches, example_args, example_kwargs, arguments)
    print(prepared)
    return prepared


def _prepare(
    model: torch.nn.Module,
    plans: CompileCache,
    settings: Settings,
    batches: Any,
    example_args: Any,
    example_kwargs: dict[str, Any] | None,
    arguments: Callable[[Any], Any] | None,
) -> Prepared:
    calls: dict[Any, list[Inputs]] = {}
    shapes: dict[Any, list[Shapes]] = {}
    region = region_of_step(model, settings.step)
    with generators_kept():
        for inputs in _calls(model, batches, example_args, example_kwargs, arguments):
            kind = plans.kind_of(inputs, region)
            shapes.setdefault(kind, []).append(shapes_of(inputs))
            _keep(calls.setdefault(kind, []), inputs)
    if not calls:
        raise InputError("there are no batches to prepare for")
    for kind, kept in calls.items():
        plans.expect(kept[0], region, shapes[kind])
        _plan(plans, kept, region)
    kind = max(shapes, key=lambda kind: len(shapes[kind]))
    return _prepared(plans, calls[kind], shapes[kind], region, sum(map(len, shapes.values())))


def _plan(plans: CompileCache, kept: list[Inputs], region: Autocast | None) -> None:
    """Plan until every one of ``kept`` is served, the largest first."""
    left = sorted(kept, key=lambda inputs: -sum(t.numel() for t in inputs.tensors))
    for _ in range(MOST_PLANS):
        left = [inputs for inputs in left if plans.find(inputs, region) is None]
        if not left:
            return
        plans.make(left[0], region)


def _prepared(
    plans: CompileCache, kept: list[Inputs], shapes: list[Shapes], region: Autocast | None, num_batches: int
) -> Prepared:
    ordered = sorted(shapes, key=_num_elements)
    example = max(kept, key=lambda inputs: _num_elements(shapes_of(inputs)))
    sizes, known = [], {}
    for share, name in QUANTILES:
        at = largest_of(shapes) if share == 1.0 else ordered[round(share * (len(ordered) - 1))]
        if at not in known:
            inputs = reshaped(example, at)
            compiled = plans.find(inputs, region) or plans.make(inputs, region)
            known[at] = plans.peak_bytes(compiled)
        sizes.append(PreparedSize(name, _plain(at), known[at]))
    return Prepared(num_batches, len(set(shapes)), plans.num_planned, _plain(largest_of(shapes)), tuple(sizes))


def _plain(shapes: Shapes) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(shape) for shape in shapes if shape is not None)


def _num_elements(shapes: Shapes) -> int:
    return sum(shape.numel() for shape in shapes if shape is not None)


def _keep(kept: list[Inputs], inputs: Inputs) -> None:
    """Keep the largest inputs, and the first of each size."""
    if len(kept) < MOST_KEPT:
        kept.append(inputs)
        return
    smallest = min(range(len(kept)), key=lambda k: _num_elements(shapes_of(kept[k])))
    if _num_elements(shapes_of(kept[smallest])) < _num_elements(shapes_of(inputs)):
        kept[smallest] = inputs


# -- from batches to calls -----------------------------------------------------------------------------------------------


def _calls(
    model: torch.nn.Module,
    batches: Any,
    example_args: Any,
    example_kwargs: dict[str, Any] | None,
    arguments: Callable[[Any], Any] | None,
) -> Iterator[Inputs]:
    if hasattr(batches, "get_train_dataloader"):  # a Trainer of transformers
        batches, arguments = batches.get_train_dataloader(), arguments or _arguments_of_trainer(batches)
    if not isinstance(batches, Iterable):
        raise InputError(f"batches must be a dataloader, batches or lengths, not {type(batches).__name__}")
    device = device_of(model)
    for batch in batches:
        if isinstance(batch, int):
            yield _of_length(example_of(model, example_args, example_kwargs), batch)
            continue
        call = _arguments_of(model, batch) if arguments is None else arguments(batch)
        args, kwargs = ((), dict(call)) if isinstance(call, Mapping) else (call, None)
        inputs = example_of(model, None if isinstance(args, tuple) and not args else args, kwargs)
        yield _without_floats(inputs, device)


def _arguments_of_trainer(trainer: Any) -> Callable[[Any], Any]:
    """Return what a Trainer passes of its batches, and beside them."""

    def arguments(batch: Any) -> Any:
        num_items = trainer.get_batch_samples(iter([batch]), 1, trainer.args.device)[1]
        counted = num_items is not None and trainer.model_accepts_loss_kwargs
        return {**batch, **({"num_items_in_batch": num_items} if counted else {})}

    return arguments


def _arguments_of(model: torch.nn.Module, batch: Any) -> Any:
    """Return a batch as a call's arguments: of a dict what forward names, of a tuple as many as forward must have."""
    parameters = inspect.signature(model.forward).parameters.values()
    if isinstance(batch, Mapping):
        any_name = any(p.kind is p.VAR_KEYWORD for p in parameters)
        named = {p.name for p in parameters if p.kind is not p.VAR_KEYWORD}
        return {name: value for name, value in batch.items() if any_name or name in named}
    if isinstance(batch, tuple | list):
        needed = [
            p for p in parameters if p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
        ]
        return tuple(batch[: max(1, len(needed))])
    return batch


def _of_length(example: Inputs, length: int) -> Inputs:
    """Return the example with ``length`` where it has the length of its first sequence.

    Errors: ``InputError`` if there is none.
    """
    first = next((t for t in example.tensors if t.dim() > 1), None)
    if first is None:
        raise InputError(
            "lengths need an example with a tensor of two or more dimensions: example_args, example_kwargs"
        )

    def sized(shape: torch.Size | None) -> torch.Size | None:
        if not shape:
            return shape
        return torch.Size((shape[0], *(length if n == first.shape[1] else n for n in shape[1:])))

    return reshaped(example, tuple(map(sized, shapes_of(example))))


def _without_floats(inputs: Inputs, device: torch.device) -> Inputs:
    """Return ``inputs`` on ``device``, floats as fakes: no model is looked at with their values."""
    world = FakeWorld(inputs.leaves, device)
    leaves = list(inputs.leaves)
    for i, leaf in enumerate(leaves):
        if isinstance(leaf, torch.Tensor):
            if leaf.is_floating_point() or leaf.is_complex():
                with world.mode:
                    leaves[i] = torch.empty_strided(
                        leaf.shape, leaf.stride(), dtype=leaf.dtype, device=device, requires_grad=leaf.requires_grad
                    )
            else:
                leaves[i] = leaf.to(device)
    return Inputs(tuple(leaves), inputs.spec)
