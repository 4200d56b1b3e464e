"""Changes of the method: another model, another batch, fewer parameters that learn."""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
from torch import nn

from fxmem.advice.changes import blocks_of
from fxmem.advice.subject import NotApplicable, Subject, cut
from fxmem.errors import first_lines

RANK = 8
"""Of the low-rank updates."""


BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


def half_batch(subject: Subject) -> Subject:
    """Train on half the batch."""
    batch = subject.batch
    if batch < 2:
        raise NotApplicable("the batch is of one")
    return subject.with_call(lambda t: cut(t, 0, batch // 2) if t.dim() and t.shape[0] == batch else t)


def half_length(subject: Subject) -> Subject:
    """Train on sequences of half the length: the second dimension of integer inputs, and of what is as long."""
    length = next((t.shape[1] for t in subject.tensors if t.dim() == 2 and not t.is_floating_point()), 0)
    if length < 2:
        raise NotApplicable("no argument is a batch of sequences of integers")
    return subject.with_call(lambda t: cut(t, 1, length // 2) if t.dim() > 1 and t.shape[1] == length else t)


def images_of(subject: Subject) -> list[torch.Tensor]:
    """Return the batches of images among the arguments."""
    return [t for t in subject.tensors if t.dim() == 4 and t.is_floating_point()]


def half_resolution(subject: Subject) -> Subject:
    """Train on images of half the width and height."""
    images = images_of(subject)
    if not images:
        raise NotApplicable("no argument is a batch of images")
    sizes = {tuple(t.shape[-2:]) for t in images}

    def change(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.dim() < 3 or tuple(tensor.shape[-2:]) not in sizes:
            return tensor
        for dim in (-1, -2):
            tensor = cut(tensor, dim, max(1, tensor.shape[dim] // 2))
        return tensor

    return subject.with_call(change)


def early_downsampling(subject: Subject) -> Subject:
    """Let the first convolution take strides of twice the length: all that follows is of half the width and height."""
    changed = subject.with_model()
    conv = next((m for m in changed.model.modules() if isinstance(m, nn.Conv1d | nn.Conv2d | nn.Conv3d)), None)
    if conv is None:
        raise NotApplicable("it has no convolution")
    conv.stride = tuple(2 * each for each in conv.stride)
    return changed


def frozen_norms(subject: Subject) -> Subject:
    """Let BatchNorm use its running statistics, and learn nothing."""
    changed = subject.with_model()
    norms = [m for m in changed.model.modules() if isinstance(m, BATCH_NORMS) and m.training]
    if not norms:
        raise NotApplicable("no BatchNorm is in training mode")
    for norm in norms:
        norm.eval().requires_grad_(False)
    return changed


def frozen_half(subject: Subject) -> Subject:
    """Let all that comes before the second half of the blocks learn nothing."""
    changed = subject.with_model()
    blocks = blocks_of(changed.model)
    if len(blocks) < 2:
        raise NotApplicable("no repeated blocks were found: no container holds two like ones")
    first_kept = next(blocks[len(blocks) // 2].parameters(), None)
    for parameter in changed.model.parameters():
        if parameter is first_kept:
            return changed
        parameter.requires_grad_(False)
    raise NotApplicable("the blocks of the second half have no parameters")


class LowRank(nn.Module):
    """A frozen linear layer and a low-rank update of it that learns."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Parameter(base.weight.detach().new_empty(RANK, base.in_features))
        self.up = nn.Parameter(base.weight.detach().new_zeros(base.out_features, RANK))
        nn.init.kaiming_uniform_(self.down, a=math.sqrt(5))

    def forward(self, x: torch.Tensor) -> Any:
        return self.base(x) + nn.functional.linear(nn.functional.linear(x, self.down), self.up)


def lora(subject: Subject) -> Subject:
    """Freeze the model, and let low-rank updates of its linear layers learn, the last layer's not."""
    changed = subject.with_model()
    linear = [
        (parent, name, child)
        for parent in changed.model.modules()
        for name, child in parent.named_children()
        if type(child) is nn.Linear and min(child.in_features, child.out_features) > RANK
    ]
    if len(linear) < 2:
        raise NotApplicable("it has less than two linear layers of a size that low-rank updates are for")
    changed.model.requires_grad_(False)
    for parent, name, child in linear[:-1]:
        setattr(parent, name, LowRank(child))
    if isinstance(changed.step.optimizer, torch.optim.Optimizer):
        raise NotApplicable("an optimizer that exists holds none of the new parameters; pass its class or name")
    return changed


def global_pooling(subject: Subject) -> Subject:
    """Pool to one pixel before the first linear layer that takes more of them: the layer gets narrower."""
    changed = subject.with_model()
    modules = list(changed.model.modules())
    for place, pool in enumerate(modules):
        size = getattr(pool, "output_size", None)
        pixels = math.prod(size) if isinstance(size, tuple) and all(size) else 1
        if not isinstance(pool, nn.AdaptiveAvgPool2d) or pixels < 2:
            continue
        for parent in modules[place:]:
            for name, child in parent.named_children():
                if type(child) is nn.Linear and child.in_features % pixels == 0:
                    pool.output_size = (1, 1)
                    setattr(parent, name, _narrower(child, child.in_features // pixels))
                    return changed
    name, channels = _fully_connected(subject)
    linear = changed.model.get_submodule(name)
    assert isinstance(linear, nn.Linear)
    changed.model.set_submodule(name, Pooled(channels, _narrower(linear, channels)))
    return changed


class Pooled(nn.Module):
    """A linear layer on the mean over pixels of what was flattened."""

    def __init__(self, channels: int, linear: nn.Linear) -> None:
        super().__init__()
        self.channels, self.linear = channels, linear

    def forward(self, x: torch.Tensor) -> Any:
        return self.linear(x.unflatten(-1, (self.channels, -1)).mean(-1))


def _narrower(linear: nn.Linear, in_features: int) -> nn.Linear:
    weight = linear.weight
    return nn.Linear(
        in_features, linear.out_features, linear.bias is not None, device=weight.device, dtype=weight.dtype
    )


def _fully_connected(subject: Subject) -> tuple[str, int]:
    """Return the path of the first linear layer on flattened images, and their channels. Errors: ``NotApplicable``."""
    if not images_of(subject):
        raise NotApplicable("no argument is a batch of images")
    ghost = subject.as_ghost().with_call(lambda tensor: tensor.detach().to("meta"))
    images: list[torch.Size] = []
    found: list[tuple[str, int]] = []

    def note(module: nn.Module, args: Any, output: Any, name: str) -> None:
        if isinstance(module, nn.Linear) and images and math.prod(images[-1][2:]) > 1:
            found.extend([(name, images[-1][1])] * (module.in_features == math.prod(images[-1][1:])))
        if isinstance(output, torch.Tensor) and output.dim() == 4:
            images.append(output.shape)

    for name, module in ghost.model.named_modules():
        module.register_forward_hook(functools.partial(note, name=name))
    try:
        with torch.no_grad():
            ghost.model(*ghost.args, **ghost.kwargs)
    except Exception as error:
        raise NotApplicable(
            f"where images are flattened does not show on the meta device: {first_lines(error)}"
        ) from error
    if not found:
        raise NotApplicable("no linear layer takes more than one pixel of images")
    return found[0]
