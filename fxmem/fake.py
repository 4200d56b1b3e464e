"""Fake stand-ins for a model's tensors: sizes, strides and autograd, but no bytes and no arithmetic.

In: real (or meta) parameters, buffers and inputs. Out: fake tensors, one per storage and tensor, so that ties and
aliases are kept. Real tensors are never touched.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn.utils.stateless import _reparametrize_module
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only


class FakeWorld:
    """A :class:`FakeTensorMode` and the fakes made in it, remembered by identity."""

    def __init__(self, tensors: Any = ()) -> None:
        self.mode = next((t.fake_mode for t in tensors if isinstance(t, FakeTensor)), None) or FakeTensorMode(
            allow_non_fake_inputs=True
        )
        self._fakes: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def fake(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the one fake of ``tensor``, without gradient, requiring grad as the original does."""
        known = self._fakes.get(id(tensor))
        if known is not None:
            return known[1]
        fake: torch.Tensor = (
            tensor if isinstance(tensor, FakeTensor) else self.mode.from_tensor(tensor, static_shapes=True)
        )
        if isinstance(tensor, torch.nn.Parameter) and not isinstance(fake, torch.nn.Parameter):
            fake = torch.nn.Parameter(fake, requires_grad=tensor.requires_grad)
        if fake.is_leaf and not isinstance(tensor, FakeTensor):
            fake.grad = None
        self._fakes[id(tensor)] = (tensor, fake)
        return fake

    def fake_all(self, tree: Any) -> Any:
        """Return ``tree`` with every tensor in it replaced by its fake."""
        return tree_map_only(torch.Tensor, self.fake, tree)

    @contextmanager
    def state_of(self, module: torch.nn.Module) -> Iterator[None]:
        """Give ``module`` fake parameters and buffers while the body runs."""
        named = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
        with _reparametrize_module(module, {name: self.fake(t) for name, t in named}):
            yield

    @contextmanager
    def active(self) -> Iterator[None]:
        """Run the body on fakes: factory calls make fakes, data-dependent scalars read as 1."""
        with ExitStack() as stack:
            stack.enter_context(self.mode)
            yield


class ScalarReads(TorchFunctionMode):
    """Lets an optimizer read its step counter from a fake: every scalar reads as 1."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.item and isinstance(args[0], FakeTensor):
            return 1.0 if args[0].dtype.is_floating_point else 1
        return func(*args, **(kwargs or {}))
