"""Canaries of the patches of fakes, optimizers and of a GPU that is not there."""

from __future__ import annotations

from contextlib import nullcontext
from unittest import mock

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from fxmem import torch_patches as patches
from fxmem.fake.fake_tensors import ScalarReads
from tests.torch_patches.canaries import canary, ops_of, outcome


@canary(patched=[(2, 5, 7), (5, 2, 4), ()], plain="raises")
def ctc_losses(on: bool) -> object:
    """Shapes of what a fake CTC loss saves, of its gradient, and of a mean over lengths that are numbers."""

    def run() -> object:
        with FakeTensorMode(), patches.ctc_losses() if on else nullcontext():
            log_probs = torch.empty(5, 2, 4, requires_grad=True)
            lengths = torch.full((2,), 5), torch.full((2,), 3)
            loss, table = torch.ops.aten._ctc_loss(log_probs, torch.ones(2, 3, dtype=torch.int64), *lengths)
            (gradient,) = torch.autograd.grad(loss.sum(), log_probs)
            mean = torch.nn.functional.ctc_loss(log_probs, torch.ones(2, 3, dtype=torch.int64), (5, 5), (3, 2))
            return [tuple(table.shape), tuple(gradient.shape), tuple(mean.shape)]

    return outcome(run)


@canary(patched=torch.float32, plain="raises")
def grouped_matmuls(on: bool) -> object:
    """Dtype of a fake grouped matmul in float32."""

    def run() -> object:
        with FakeTensorMode(), patches.grouped_matmuls() if on else nullcontext():
            ends, width = torch.empty(2, dtype=torch.int32), 16 if on else 32  # fakes remember what they made
            return torch.ops.aten._grouped_mm(torch.empty(8, width), torch.empty(2, width, 16), ends).dtype

    return outcome(run)


@canary(patched="made", plain="raises")
def no_value_checks(on: bool) -> object:
    """Whether a distribution can be made of fakes, and a Gaussian loss of them."""

    def run() -> object:
        with FakeTensorMode(), patches.no_value_checks() if on else nullcontext():
            torch.distributions.Normal(torch.zeros(2), torch.ones(2))
            torch.nn.functional.gaussian_nll_loss(torch.zeros(2), torch.zeros(2), torch.ones(2))
        return "made"

    with mock.patch.object(torch.distributions.Distribution, "_validate_args", True):  # dynamo sets it for good
        return outcome(run)


def _for_each(parameter: torch.Tensor) -> bool:
    parameter.grad = torch.empty_like(parameter)
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    return any(name.startswith("_foreach") for name in ops_of(optimizer.step))


@canary(patched=True, plain=False)
def fakes_for_each(on: bool) -> object:
    """Whether SGD takes multi-tensor kernels for fakes, where it does for real parameters."""
    with patches.cuda_for_fakes(), FakeTensorMode(), patches.fakes_for_each() if on else nullcontext():
        return _for_each(torch.ones(2, device="cuda", requires_grad=True))


@canary(patched=[], plain=["before", "after"])
def without_optimizer_hooks(on: bool) -> object:
    """What hooks on all optimizers see of a step."""
    seen: list[str] = []
    hooks = (
        register_optimizer_step_pre_hook(lambda *_: seen.append("before")),
        register_optimizer_step_post_hook(lambda *_: seen.append("after")),
    )
    with patches.without_optimizer_hooks() if on else nullcontext():
        torch.optim.SGD([torch.ones(2, requires_grad=True)], lr=0.1).step()
    for hook in hooks:
        hook.remove()
    return seen


@canary(patched=("cuda", 2), plain=("", 0))
def cuda_for_fakes(on: bool) -> object:
    """Which accelerator autograd finds, and the size of a gradient there. (Unpatched, a backward ends the process.)"""
    with patches.cuda_for_fakes() if on else nullcontext():
        device = torch.accelerator.current_accelerator(check_available=not on and torch.version.cuda is not None)
        if device is None:
            return "", 0
        with FakeTensorMode(), torch.autograd.set_multithreading_enabled(False):
            x = torch.ones(2, device="cuda", requires_grad=True)
            (x * x).sum().backward()
        assert x.grad is not None
        return device.type, x.grad.numel()


@canary(patched=((9, 0), torch.float16), plain="raises")
def cuda_asked(on: bool) -> object:
    """What a model hears of a device that is not there, and the dtype of a product in an autocast region of CUDA."""

    def run() -> object:
        with patches.cuda_asked("h100", (9, 0)) if on else nullcontext():
            capability = torch.cuda.get_device_capability()
            with FakeTensorMode(), torch.autocast("cuda", torch.float16):
                x = torch.ones(2, 2, device="cuda")
                return capability, (x @ x).dtype

    return outcome(run)


@canary(patched=(True, True), plain=(False, "raises"))
def steady_scaler(on: bool) -> object:
    """Whether the scaler's tensors are fake, and whether it steps."""
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(()))

    class Watched:
        def __init__(self, optimizer: torch.optim.Optimizer) -> None:
            self.optimizer = optimizer

    with FakeTensorMode(allow_non_fake_inputs=True), ScalarReads():
        parameter = torch.ones(2, requires_grad=True)
        parameter.grad = torch.ones(2)
        optimizer = torch.optim.SGD([parameter], lr=0.1)
        given = patches.steady_scaler(scaler, torch.device("cpu")) if on else scaler
        given.scale(torch.ones(()))
        stepped: list[object] = []
        optimizer.register_step_pre_hook(lambda *_: stepped.append(0))
        result = outcome(lambda: given.step(Watched(optimizer)))
    tensors = [value for value in vars(given).values() if isinstance(value, torch.Tensor)]
    return all(isinstance(t, FakeTensor) for t in tensors), result if result == "raises" else bool(stepped)


@canary(patched="given", plain="raises")
def kernels_on_cuda(on: bool) -> object:
    """Which kernel a fake on CUDA runs for an op that is put together from others."""

    def given(x: torch.Tensor, groups: int) -> torch.Tensor:
        raise KeyError("given")

    def run() -> object:
        with (
            patches.cuda_for_fakes(),
            patches.kernels_on_cuda({"channel_shuffle": given}, with_autograd=True) if on else nullcontext(),
            FakeTensorMode(),
        ):
            try:
                torch.ops.aten.channel_shuffle(torch.ones(1, 4, 2, 2, device="cuda"), 2)
            except KeyError as error:
                return error.args[0]
            raise LookupError

    return outcome(run)


@canary(patched=[1], plain=[])
def clipping_refused(on: bool) -> object:
    """How many parameters without gradients clipping by norm is seen to be for."""
    seen: list[int] = []
    with patches.clipping_refused(lambda parameters: seen.append(len(parameters))) if on else nullcontext():
        torch.nn.utils.clip_grad_norm_(iter([torch.ones(2, requires_grad=True)]), 1.0)
    return seen
