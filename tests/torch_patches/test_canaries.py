"""Canaries: each patch of torch has its effect still, and without it the thing still goes wrong."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode

from fxmem import torch_patches as patches
from fxmem.torch_private import OpOverload
from tests.torch_patches import canaries_of_autograd, canaries_of_fakes  # noqa: F401  (their canaries)
from tests.torch_patches.canaries import CANARIES, canary, exported, outcome


@pytest.fixture(autouse=True, scope="module")
def _no_model_of_an_earlier_test() -> None:
    """Lets go of garbage that was put out of the collections' way: a model's watch for its loss would see calls, too."""
    gc.unfreeze()
    gc.collect()


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(patches.PATCHES))
def test_a_patch_has_its_effect_and_is_needed(name: str) -> None:
    assert name in CANARIES, f"the patch {name} has no canary in {Path(__file__).name}"
    function, patched, plain = CANARIES[name]
    seen = function(True)
    assert seen == patched, f"{name} has no effect on this torch: with it {seen!r} is seen, expected {patched!r}"
    seen = function(False)
    assert seen == plain, f"{name} is not needed on this torch, or torch fails otherwise: without it {seen!r} is seen"


def test_no_canary_is_left_over() -> None:
    assert CANARIES.keys() == patches.PATCHES.keys()


class _Calls(nn.Module):
    """A module whose forward is ``function``."""

    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x)


# -- dynamo, graphs, batches ---------------------------------------------------------------------------------------------


@canary(patched=("ran", "imported", "raises"), plain=("raises", "raises", "raises"))
def without_dynamo(on: bool) -> object:
    """Whether a function that torch.compile is to leave alone runs where its tracer cannot be imported, and whether what
    torchvision takes from it can be had, and called."""
    function = torch._disable_dynamo(lambda: "ran")
    taken: dict[str, Any] = {}

    def library() -> str:
        exec("from torch._dynamo.utils import is_compile_supported", taken)
        return "imported"

    with pytest.MonkeyPatch.context() as change:
        for name in ("torch._dynamo", "torch._dynamo.utils"):
            change.setitem(sys.modules, name, None)  # type: ignore[arg-type]
        with patches.without_dynamo() if on else nullcontext():
            found = outcome(function), outcome(library)
        return *found, outcome(lambda: taken["is_compile_supported"]("cpu"))


@canary(patched="ran", plain="raises")
def outside_of_batch(on: bool) -> object:
    """Whether dropout runs inside a batched backward."""

    class Drops(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            with patches.outside_of_batch() if on else nullcontext():
                nn.functional.dropout(torch.ones(4), 0.5)
            return grad

    x = torch.ones(2, requires_grad=True)
    y = Drops.apply(x)
    return outcome(lambda: torch.autograd.grad(y, x, torch.eye(2), is_grads_batched=True) and "ran")


# -- torch.export --------------------------------------------------------------------------------------------------------


@canary(patched=(True, True, [True]), plain=(False, False, []))
def regions_left(on: bool) -> object:
    """Whether grad mode and autocast are nodes of the flat graph, and what the region says of the cache."""

    def forward(x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            y = x.sin()
        with torch.autocast("cpu", torch.bfloat16):
            return x @ y

    with patches.regions_left() if on else nullcontext():
        nodes = list(exported(_Calls(forward), torch.ones(2, 2)).graph.nodes)
    names = [getattr(node.target, "__name__", "") for node in nodes]
    caches = [node.args[3] for node, name in zip(nodes, names, strict=True) if name == "_enter_autocast"]
    return "_set_grad_enabled" in names, "_enter_autocast" in names, caches


@canary(patched=["sin", "sin"], plain=["cos", "cos"])
def compiler_says_eager(on: bool) -> object:
    """Which way a model goes that asks torch.compiler, and one that has the function by another name."""
    by_name = torch.compiler.is_compiling
    ways = []
    for asks in (lambda: torch.compiler.is_compiling(), by_name):
        model = _Calls(lambda x, asks=asks: x.cos() if asks() else x.sin())
        with patches.compiler_says_eager() if on else nullcontext(lambda: None) as begin:
            model.register_forward_pre_hook(lambda *_, begin=begin: begin())
            graph = exported(model, torch.ones(2)).graph
        ways += [node.target.overloadpacket.__name__ for node in graph.nodes if isinstance(node.target, OpOverload)]
    return ways


@canary(patched=False, plain=True)
def tracing_answered_by(on: bool) -> object:
    """Whether transformers takes a fake whose values are known for one that is being traced."""
    masking = pytest.importorskip("transformers.masking_utils")
    with FakeTensorMode():
        fake = torch.ones(2)
    with patches.tracing_answered_by(lambda tensor: tensor is not fake) if on else nullcontext():
        return masking.is_tracing(fake)


@canary(patched=[False, True], plain=[])
def nodes_shown_to(on: bool) -> object:
    """What is set when a node for ``sin`` is made, without and with cuDNN's benchmark mode around."""

    def forward(x: torch.Tensor) -> torch.Tensor:
        y = x.sin()
        with torch.backends.cudnn.flags(benchmark=True):
            return y.sin()

    seen: list[bool] = []

    def look(node: fx.Node) -> None:
        if node.target is torch.ops.aten.sin.default and len(seen) < 2:
            seen.append(torch.backends.cudnn.benchmark)

    with patches.nodes_shown_to(look) if on else nullcontext():
        exported(_Calls(forward), torch.ones(2))
    return seen


@canary(patched=False, plain=True)
def quiet(on: bool) -> object:
    """Whether torch.export says something by itself where a model decides by a tensor's value."""
    import io
    from contextlib import redirect_stderr

    said = io.StringIO()
    with redirect_stderr(said), patches.quiet() if on else nullcontext():
        outcome(lambda: exported(_Calls(lambda x: x if x.sum() > 0 else -x), torch.ones(2)))
    return bool(said.getvalue())


@canary(patched=[1, 1], plain=[])
def graphs_shown_to(on: bool) -> object:
    """How many roots the backwards have that are shown."""
    seen: list[int] = []
    with patches.graphs_shown_to(lambda roots: seen.append(len(roots))) if on else nullcontext():
        x = torch.ones(2, requires_grad=True)
        x.sum().backward()
        torch.autograd.grad(x.sum(), x)
    return seen


class _Names(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(func.__name__)
        return func(*args, **(kwargs or {}))


@canary(patched=["add", "mul"], plain=[])
def calls_shown_to(on: bool) -> object:
    """What a mode below one that ends before it sees."""
    mode = _Names()
    with torch.device("cpu"):
        body = patches.calls_shown_to(mode) if on else nullcontext()
        body.__enter__()
        torch.add(torch.ones(1), 1)
    torch.mul(torch.ones(1), 2)
    body.__exit__(None, None, None)
    torch.sub(torch.ones(1), 2)
    return [name for name in mode.seen if name in ("add", "mul", "sub")]


def test_a_mode_that_ends_while_it_sees_a_call_sees_none_after_the_next_collection() -> None:
    seen: list[str] = []

    class Ends(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(func.__name__)
            body.close()
            return func(*args, **(kwargs or {}))

    body, before = ExitStack(), list(gc.callbacks)
    body.enter_context(patches.calls_shown_to(Ends()))
    torch.add(torch.ones(1), 1)
    gc.collect()
    torch.mul(torch.ones(1), 2)
    assert "ones" in seen
    assert "mul" not in seen
    assert gc.callbacks == before


@canary(patched=[1, 1, 2, 1, 1], plain=[])
def calls_of_backward_shown_to(on: bool) -> object:
    """How many roots calls have: a tensor's ``backward`` calls that of torch.autograd."""
    seen: list[int] = []
    with patches.calls_of_backward_shown_to(lambda roots: seen.append(len(roots))) if on else nullcontext():
        x = torch.ones(2, requires_grad=True)
        x.sum().backward()
        torch.autograd.backward([x.sum(), x.prod()])
        torch.autograd.grad(x.sum(), x)
        torch.autograd.backward(x.sum())
    return seen


# -- calls ---------------------------------------------------------------------------------------------------------------


def _told(context: Callable[[Callable[..., Any]], Any], run: Callable[[], object]) -> list[str]:
    """Return the names of what went by ``context`` while ``run`` ran; the originals are called."""
    told: list[str] = []

    def instead(subject: Any, given: Any, original: Callable[..., Any]) -> Any:
        told.append(getattr(subject, "__name__", type(subject).__name__))
        return original() if isinstance(subject, type) else original(subject, given)

    with context(instead):
        run()
    return told


def _nothing(*_: object) -> Any:
    return nullcontext()


@canary(patched=[3.0, 1.0], plain=[1.0])
def calls_run_by(on: bool) -> object:
    """What a call of a module gives, and what the call made instead of it sees of the module's own."""
    module, seen = torch.nn.Identity(), []

    def instead(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        seen.append(float(module(*args, **kwargs)))
        return args[0] * 3

    with patches.calls_run_by(module, instead) if on else nullcontext():
        outcome = float(module(torch.ones(())))
    assert "_call_impl" not in vars(module)
    return [outcome, *seen]


@canary(patched=(["Doubling"], 6.0), plain=([], 6.0))
def function_applies_by(on: bool) -> object:
    """Which Functions are told of, and the gradient."""

    class Doubling(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            return grad * 6

    x = torch.ones((), requires_grad=True)
    told = _told(patches.function_applies_by if on else _nothing, lambda: Doubling.apply(x).backward())
    return told, x.grad.item() if x.grad is not None else None


@canary(patched=(["Tensor"], 3.0), plain=([], 3.0))
def tensor_hooks_set_by(on: bool) -> object:
    """Which tensors are told of, and the gradient that the hook made."""
    x = torch.ones((), requires_grad=True)
    told = _told(patches.tensor_hooks_set_by if on else _nothing, lambda: x.register_hook(lambda grad: grad * 3))
    (x * 1).backward()
    return told, x.grad.item() if x.grad is not None else None


@canary(patched=(["BatchNorm1d"], 1), plain=([], 1))
def batch_norms_by(on: bool) -> object:
    """Which BatchNorms are told of, and how many batches they have seen."""
    norm = nn.BatchNorm1d(2)
    told = _told(patches.batch_norms_by if on else _nothing, lambda: norm(torch.ones(3, 2)))
    assert norm.num_batches_tracked is not None
    return told, int(norm.num_batches_tracked)


@canary(patched=(["BackwardHook", "BackwardHook"], 1), plain=([], 1))
def backward_hooks_made_by(on: bool) -> object:
    """What is told of a module with a full backward hook, and how often the hook ran."""
    layer, ran = nn.Linear(2, 2), []
    layer.register_full_backward_hook(lambda *_: ran.append(0))

    def both(instead: Callable[..., Any]) -> Any:
        return patches.backward_hooks_made_by(instead, instead)

    x = torch.ones(1, 2, requires_grad=True)
    return _told(both if on else _nothing, lambda: layer(x).sum().backward()), len(ran)


@canary(patched=["other", "hook"], plain=["hook", "hook"])
def forward_hooks_exchanged(on: bool) -> object:
    """Which hook runs inside, and which afterwards."""
    layer, ran = nn.Linear(2, 2), []
    layer.register_forward_hook(lambda *_: ran.append("hook"))
    with patches.forward_hooks_exchanged(layer, lambda _: lambda *_: ran.append("other")) if on else nullcontext():
        layer(torch.ones(1, 2))
    layer(torch.ones(1, 2))
    return ran


@canary(patched=["torch.manual_seed", "torch.inference_mode", "Tensor.register_hook"], plain=[])
def calls_told_to(on: bool) -> object:
    """Which calls are told of."""
    told: list[str] = []
    state = torch.get_rng_state()
    with patches.calls_told_to(told.append) if on else nullcontext():
        torch.manual_seed(0)
        with torch.inference_mode():
            pass
        torch.ones(2, requires_grad=True).register_hook(lambda grad: grad)
    torch.set_rng_state(state)
    return told
