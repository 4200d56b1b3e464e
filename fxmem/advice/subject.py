"""What advice is about: a model, one call of it, and its training step. Changes return another one, and change none."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from fxmem.errors import InputError, first_lines
from fxmem.profiling.training_step import TrainingStep
from fxmem.torch_private import storage_key, tree_leaves, tree_map_only


class NotApplicable(Exception):
    """A change cannot be made to a subject; the message says why."""


@dataclass(frozen=True, slots=True)
class Subject:
    """A model, the arguments of one call, and the step. Functions that change it work on real tensors as on others."""

    model: torch.nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)
    step: TrainingStep = field(default_factory=TrainingStep)
    device: torch.device | str | None = None
    """Where the step is counted, if not where the model is."""

    @property
    def on_cuda(self) -> bool:
        """Whether the step is one on CUDA."""
        return str(self.device or "").startswith("cuda") or any(
            tensor.is_cuda for tensor in (*self.model.parameters(), *self.tensors)
        )

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The tensors among the arguments."""
        return [leaf for leaf in tree_leaves((self.args, self.kwargs)) if isinstance(leaf, torch.Tensor)]

    @property
    def batch(self) -> int:
        """The batch size: the first dimension of the first tensor. Errors: ``NotApplicable``."""
        sizes = [tensor.shape[0] for tensor in self.tensors if tensor.dim()]
        if not sizes:
            raise NotApplicable("no argument has a batch dimension")
        return sizes[0]

    def with_call(self, change: Callable[[torch.Tensor], torch.Tensor]) -> Subject:
        """Return the subject with each tensor among its arguments changed."""
        args, kwargs = tree_map_only(torch.Tensor, change, (self.args, self.kwargs))
        return replace(self, args=args, kwargs=kwargs)

    def with_step(self, **changes: Any) -> Subject:
        """Return the subject with another step."""
        return replace(self, step=replace(self.step, **changes))

    def with_model(self) -> Subject:
        """Return the subject with a copy of its model, which may be changed; an optimizer given goes along."""
        return self._copied({})

    def as_ghost(self) -> Subject:
        """Return the subject with a copy of its model that has no bytes."""
        return self._copied(_ghosts(self.model))

    def _copied(self, memo: dict[int, Any]) -> Subject:
        try:
            model = copy.deepcopy(self.model, memo)
        except Exception as error:
            raise InputError(
                f"{type(self.model).__name__} cannot be copied, and advice changes copies of it only: {first_lines(error)}"
            ) from error
        optimizer = self.step.optimizer
        if not isinstance(optimizer, torch.optim.Optimizer):
            return replace(self, model=model)
        moved: dict[int, torch.Tensor] = {
            id(old): new for old, new in zip(self.model.parameters(), model.parameters(), strict=True)
        }
        return replace(self, model=model).with_step(optimizer=_rebuilt(optimizer, moved))


def _ghosts(model: torch.nn.Module) -> dict[int, Any]:
    """Return, by id of each parameter and buffer, one like it on the meta device; those of one storage share one."""
    storages: dict[int, torch.Tensor] = {}
    ghosts: dict[int, Any] = {}
    for tensor in _state(model):
        if tensor.is_meta or tensor.layout is not torch.strided:
            continue
        key, nbytes = storage_key(tensor), tensor.untyped_storage().nbytes()
        whole = storages.setdefault(key, torch.empty(nbytes, dtype=torch.uint8, device="meta"))
        usable = whole[: nbytes - nbytes % tensor.itemsize].view(tensor.dtype)
        ghost = usable.as_strided(tensor.size(), tensor.stride(), tensor.storage_offset()).detach()
        if isinstance(tensor, torch.nn.Parameter):
            ghost = torch.nn.Parameter(ghost, requires_grad=tensor.requires_grad)
        ghosts[id(tensor)] = ghost
    return ghosts


def _state(model: torch.nn.Module) -> Iterator[torch.Tensor]:
    yield from model.parameters()
    yield from model.buffers()


def _rebuilt(optimizer: torch.optim.Optimizer, moved: dict[int, torch.Tensor]) -> torch.optim.Optimizer:
    """Return an optimizer like this one over other parameters, before its first step."""
    groups = [
        {**group, "params": [moved[id(p)] for p in group["params"] if id(p) in moved]}
        for group in optimizer.param_groups
    ]
    cls: Callable[..., torch.optim.Optimizer] = type(optimizer)
    try:
        return cls(groups)
    except TypeError:
        return cls(groups, **optimizer.defaults)


def floating(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return ``change`` for floating tensors, and no change for others."""
    return lambda tensor: change(tensor) if tensor.is_floating_point() else tensor


def cut(tensor: torch.Tensor, dim: int, size: int) -> torch.Tensor:
    """Return the first ``size`` entries along ``dim``, on memory of their own."""
    part = tensor.detach().narrow(dim, 0, size).clone(memory_format=torch.contiguous_format)
    return part.requires_grad_(tensor.requires_grad)


def sized(tensor: torch.Tensor, dim: int, size: int) -> torch.Tensor:
    """Return ``size`` entries along ``dim``, on memory of their own: the first, and all again where they are too few."""
    times = -(-size // tensor.shape[dim])
    return cut(torch.cat([tensor.detach()] * times, dim).requires_grad_(tensor.requires_grad), dim, size)
