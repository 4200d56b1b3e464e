"""Fake stand-ins for a model's tensors: sizes, strides and autograd, but no bytes and no arithmetic.

In: real (or meta) parameters, buffers and inputs. Out: fake tensors, one per storage and tensor, so that ties and
aliases are kept. Real tensors are never touched.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, cast

import torch
from torch.overrides import TorchFunctionMode

from fxmem.errors import CaptureError, InputError
from fxmem.fake.meta_fixups import MetaFixups
from fxmem.fake.python_state import PythonState, modules_held
from fxmem.fake.stand_in import stand_in, stands_for
from fxmem.op_facts.kinds import ReadsScalar
from fxmem.op_facts.lookup import by_op
from fxmem.torch_patches import (
    ctc_losses,
    fakes_for_each,
    grouped_matmuls,
    no_value_checks,
    without_optimizer_hooks,
)
from fxmem.torch_private import FakeTensor, FakeTensorMode, storage_key, tree_leaves, tree_map_only, without_modes


class FakeWorld:
    """A :class:`FakeTensorMode` and the fakes made in it, remembered by identity.

    ``tensors``: if one of them is fake, its mode is used. ``device``: where tensors of the meta device are taken to be;
    if ``moved``, those of the CPU too.
    """

    def __init__(self, tensors: Any = (), device: torch.device | str = "cpu", *, moved: bool = False) -> None:
        self._device, self._moved = torch.device(device), moved
        given = next((t.fake_mode for t in tensors if isinstance(t, FakeTensor)), None)
        self.mode = given or FakeTensorMode(allow_non_fake_inputs=True)
        self._shared = given is not None
        """Whether another world's fakes of the same tensors, and casts of them, are known to the mode."""
        self._fakes: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._storages: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        """By storage of the CPU: a tensor on it, and all of it on the device that stands in."""

    def fake(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the one fake of ``tensor``, without gradient, requiring grad as the original does."""
        known = self._fakes.get(id(tensor))
        if known is not None:
            return known[1]
        fake = self._new_fake(tensor) if tensor.is_leaf else made_outside(self._new_fake(_detached(tensor)))
        if isinstance(tensor, torch.nn.Parameter) and not isinstance(fake, torch.nn.Parameter):
            fake = torch.nn.Parameter(fake, requires_grad=tensor.requires_grad)
        if fake.is_leaf:
            fake.grad = None
            if tensor.is_leaf and fake.grad_dtype != tensor.grad_dtype:
                fake.grad_dtype = tensor.grad_dtype
        self._fakes[id(tensor)] = (tensor, fake)
        if self._moved or tensor.is_meta:
            stands_for(fake, tensor)
        return fake

    def _new_fake(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.is_cuda:  # an op without a fake kernel would run on the device
            self.mode.allow_fallback_kernels = False
        if self._moved and tensor.device.type == "cpu" and not isinstance(tensor, FakeTensor):
            return self._moved_fake(tensor)
        if (
            isinstance(tensor, FakeTensor) and tensor.fake_mode is self.mode
        ):  # an alias, so that its gradient is its own
            return tensor.detach().requires_grad_(tensor.requires_grad)
        if not (tensor.is_meta or isinstance(tensor, FakeTensor)):
            fake = self.mode.from_tensor(tensor, static_shapes=True)
            return fake.detach().requires_grad_(tensor.requires_grad) if self._shared else fake
        with self.mode:
            return torch.empty_strided(
                tensor.size(),
                tensor.stride(),
                dtype=tensor.dtype,
                device=self._device if tensor.is_meta else tensor.device,
                requires_grad=tensor.requires_grad,
            )

    def _moved_fake(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a fake like ``tensor`` on the device; tensors of one storage stay so."""
        key, nbytes = storage_key(tensor), tensor.untyped_storage().nbytes()
        with self.mode, torch.no_grad():
            if key not in self._storages:
                whole = torch.empty(nbytes // tensor.itemsize, dtype=tensor.dtype, device=self._device)
                self._storages[key] = (tensor, whole)
            whole = self._storages[key][1].view(tensor.dtype)
            moved = whole.as_strided(tensor.size(), tensor.stride(), tensor.storage_offset())
            return moved.detach().requires_grad_(tensor.requires_grad)

    def fake_all(self, tree: Any) -> Any:
        """Return ``tree`` with every tensor in it replaced by its fake."""
        return tree_map_only(torch.Tensor, self.fake, tree)

    @contextmanager
    def state_of(self, module: torch.nn.Module) -> Iterator[None]:
        """Give ``module``, and the modules that its calls hold, fake parameters and buffers while the body runs."""
        with self.states_of([module, *(held for m in module.modules() for held in modules_held(m))]):
            yield

    def states_held_by(self, module: torch.nn.Module) -> AbstractContextManager[None]:
        """Give the modules that the calls of ``module`` hold fake parameters and buffers while the body runs."""
        return self.states_of(list(modules_held(module)))

    @contextmanager
    def states_of(self, modules: Sequence[torch.nn.Module]) -> Iterator[None]:
        """Give ``modules`` fake parameters and buffers while the body runs."""
        each = dict.fromkeys(
            m for module in modules for m in module.modules() if not isinstance(m, torch.jit.ScriptModule)
        )
        registries = [r for m in each for r in (m._parameters, m._buffers)]
        saved = [dict(registry) for registry in registries]
        try:
            with ExitStack() as stack:
                for module in modules:  # before there are fakes: a buffer that the body replaces is held by nobody
                    stack.enter_context(attributes_restored(module))
                for module in each:
                    vars(module).update(self._of_graphs(vars(module)))
                for registry in registries:
                    registry.update((name, self.fake(t)) for name, t in registry.items() if t is not None)  # type: ignore[misc]
                yield
        finally:
            for registry, before in zip(registries, saved, strict=True):
                registry.clear()
                registry.update(before)  # type: ignore[arg-type]

    def _of_graphs(self, attributes: dict[str, Any]) -> dict[str, Any]:
        """Return fakes of those attributes that an earlier call left with its autograd graph behind them."""
        held = [(name, value) for name, value in attributes.items() if isinstance(value, torch.Tensor | list | tuple)]
        return {name: self.fake_all(value) for name, value in held if any(map(_has_graph, tree_leaves(value)))}

    def forget(self, tensors: Iterable[torch.Tensor]) -> None:
        """Let go of the fakes of ``tensors``, which live on where else they are held."""
        for tensor in tensors:
            self._fakes.pop(id(tensor), None)

    @contextmanager
    def active(self, *modules: torch.nn.Module) -> Iterator[None]:
        """Run the body on fakes: factory calls make fakes, scalars read as 1. What it does to ``modules`` is undone.

        Optimizers take fakes for what they are, tensors that multi-tensor kernels work on where the device has such; a
        backward on several devices goes one way, by one thread.
        """
        with ExitStack() as stack:
            for module in modules:
                stack.enter_context(attributes_restored(module))
                stack.enter_context(self.states_held_by(module))
            stack.enter_context(self.mode)
            stack.enter_context(MetaFixups())  # type: ignore[no-untyped-call]
            stack.enter_context(no_value_checks())
            stack.enter_context(grouped_matmuls())
            stack.enter_context(ctc_losses())
            stack.enter_context(fakes_for_each())
            stack.enter_context(without_optimizer_hooks())
            stack.enter_context(torch.autograd.set_multithreading_enabled(False))
            yield


class _Outside(torch.autograd.Function):
    """Stands for what made a tensor, and takes its gradient."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, anchor: torch.Tensor) -> torch.Tensor:
        ctx.mark_dirty(tensor)
        return tensor

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[None, None]:
        return None, None


def made_outside(fake: torch.Tensor) -> torch.Tensor:
    """Return ``fake`` as a part of an autograd graph that goes on outside: no leaf, but no view of one either."""
    made = _Outside.apply(fake, torch.empty(0, requires_grad=True))  # type: ignore[no-untyped-call]
    return cast(torch.Tensor, made)


def _detached(tensor: torch.Tensor) -> torch.Tensor:
    """Return ``tensor`` without its graph. Under a mode of fakes, writes to the result would count as the tensor's."""
    with nullcontext() if isinstance(tensor, FakeTensor) else without_modes():
        return tensor.detach()


def _has_graph(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and not value.is_leaf


def check_device(device: torch.device) -> torch.device:
    """Return ``device``. Errors: ``InputError`` if it is CUDA, there is none and no GPU stands in: autograd would end the
    process."""
    if device.type == "cuda" and not torch.cuda.is_available() and stand_in() is None:
        raise InputError(
            f"a tensor is on {device}, but torch {torch.__version__} finds no CUDA device. Make model and batch on the CPU "
            "or the meta device and say which GPU is meant: fxmem.estimate(..., device='cuda:h100'), "
            "fxmem.optimize(..., plan_for='h100')"
        )
    return device


@contextmanager
def attributes_restored(module: torch.nn.Module) -> Iterator[None]:
    """Undo what the body does to Python values ``module`` can reach: a forward that caches a tensor on ``self``, or a
    hook that appends one to a list, would leave a fake one there."""
    state = PythonState(module)
    try:
        yield
    finally:
        state.restore()


@contextmanager
def gradients_untouched(parameters: Sequence[torch.Tensor]) -> Iterator[None]:
    """Errors: ``CaptureError`` if the body, a step on fakes, leaves gradients on the real ``parameters``: a backward then
    reached them by a way of its own. They are put back as they were."""
    before = [parameter.grad for parameter in parameters]
    try:
        yield
    finally:
        touched = [p for p, grad in zip(parameters, before, strict=True) if p.grad is not grad]
        for parameter, grad in zip(parameters, before, strict=True):
            if parameter.grad is not grad:
                parameter.grad = grad
    if touched:
        raise CaptureError(
            f"a backward writes to the gradients of {len(touched)} parameters by itself, which planning cannot follow: a "
            "custom autograd.Function holds a module in a way that hides it. Give it the module as an argument of apply."
        )


class ScalarReads(TorchFunctionMode):
    """Lets an optimizer or a BatchNorm read its step counter from a fake: every scalar reads as 1, or as 1/2."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _ANSWERED and isinstance(args[0], FakeTensor):
            # NAdam divides by 1 less a product that it reads.
            return 0.5 if args[0].dtype.is_floating_point or func is torch.Tensor.__float__ else 1
        return func(*args, **(kwargs or {}))


class BranchReads(TorchFunctionMode):
    """Lets a model on fakes decide by values that only a run can tell: every condition has one answer."""

    def __init__(self, answer: bool) -> None:
        super().__init__()
        self._answer = answer

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _BRANCHES and isinstance(args[0], FakeTensor):
            return self._answer
        return func(*args, **(kwargs or {}))


_BRANCHES = {function for function, fact in by_op(ReadsScalar).items() if fact.what == "branch"}
_ANSWERED = {function for function, fact in by_op(ReadsScalar).items() if fact.what == "number" and fact.stand_in}
