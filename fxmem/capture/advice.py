"""Which parts of a model can be captured where the whole cannot: what a refusal advises.

The model is run once on fakes, on which every number reads as 1, so that it takes one of its ways; the calls of its
submodules are noted. From the largest part down, each that was called is captured by itself.
"""

from __future__ import annotations

import re
import time
from contextlib import ExitStack, nullcontext, suppress
from typing import Any

import torch

from fxmem.capture.export import capture
from fxmem.capture.graph import CaptureGraph, Inputs
from fxmem.errors import CaptureError, FxMemError
from fxmem.fake.fake_tensors import FakeWorld, ScalarReads
from fxmem.fake.modes import FewLooks, TooManyLooks
from fxmem.fake.python_state import tensors_restored
from fxmem.runtime.autocast import Autocast
from fxmem.torch_patches import quiet

MOST_PARTS = 3
"""As many are named."""
SEARCH_SECONDS = 20.0
MOST_LOOKS = 1_000
"""At values, by a model that is run on fakes to see what its parts are called with."""


def capture_or_advise(model: torch.nn.Module, inputs: Inputs, autocast: Autocast | None) -> CaptureGraph:
    """Return the graph of ``model``. Errors: as :func:`capture`, with the parts that could be optimized instead."""
    try:
        return capture(model, inputs, autocast)
    except CaptureError as error:
        strided = all(tensor.layout is torch.strided for tensor in inputs.tensors)
        parts = capturable_parts(model, inputs, autocast) if strided else ()
        if not parts:
            raise
        lines = "; ".join(f"{path} = fxmem.optimize({path}, ...)" for path in map(_as_code, parts))
        share = _num_elements(*map(model.get_submodule, parts)) / _num_elements(model)
        raise CaptureError(
            f"{error} Or optimize the largest parts of it that can be captured, with {share:.0%} of its parameters, and "
            f"let the rest run as it is: {lines}. Each budget then bounds a step of that part alone."
        ) from error


def capturable_parts(model: torch.nn.Module, inputs: Inputs, autocast: Autocast | None = None) -> tuple[str, ...]:
    """Return the paths of the largest submodules that can be captured by themselves, none inside another."""
    deadline = time.monotonic() + SEARCH_SECONDS
    world = FakeWorld(inputs.leaves)
    found: list[str] = []
    with tensors_restored(model), world.state_of(model):
        calls = _calls(model, world, inputs, autocast)
        candidates = list(model.named_children())
        while candidates and len(found) < MOST_PARTS and time.monotonic() < deadline:
            path, part = max(candidates, key=lambda candidate: _num_elements(candidate[1]))
            candidates.remove((path, part))
            if _num_elements(part, *map(model.get_submodule, found)) == _num_elements(*map(model.get_submodule, found)):
                continue  # another name for what is there, or for a part of it
            if path in calls and _is_capturable(part, calls[path], autocast):
                found.append(path)
            else:
                candidates += [(f"{path}.{name}", child) for name, child in part.named_children()]
    return tuple(found)


def _calls(model: torch.nn.Module, world: FakeWorld, inputs: Inputs, autocast: Autocast | None) -> dict[str, Inputs]:
    """Return the arguments of the first call of each submodule, as far as a run on fakes comes."""
    calls: dict[str, Inputs] = {}

    def noting(path: str) -> Any:
        def note(part: torch.nn.Module, args: Any, kwargs: Any) -> None:
            with suppress(FxMemError):
                given = Inputs.of(args, kwargs, part)
                calls.setdefault(path, Inputs(tuple(map(_as_leaf, given.leaves)), given.spec))

        return note

    fakes = Inputs(tuple(world.fake_all(leaf) for leaf in inputs.leaves), inputs.spec)
    args, kwargs = fakes.call()
    with ExitStack() as stack:
        for path, module in model.named_modules():
            hook = module.register_forward_pre_hook(noting(path), with_kwargs=True)
            stack.callback(hook.remove)
        stack.enter_context(world.active(model))
        stack.enter_context(ScalarReads())
        stack.enter_context(quiet())
        stack.enter_context(autocast.enter() if autocast else nullcontext())
        stack.enter_context(suppress(Exception, TooManyLooks))  # what cannot run on fakes either ends the search there
        stack.enter_context(FewLooks(MOST_LOOKS))
        model(*args, **kwargs)
    return calls


def _as_leaf(value: Any) -> Any:
    return value.detach().requires_grad_(value.requires_grad) if isinstance(value, torch.Tensor) else value


def _is_capturable(module: torch.nn.Module, inputs: Inputs, autocast: Autocast | None) -> bool:
    if not any(p.requires_grad for p in module.parameters()):
        return False
    try:
        capture(module, inputs, autocast)
    except Exception:  # whatever it is, it is no reason to hide the error that is being explained
        return False
    return True


def _num_elements(*modules: torch.nn.Module) -> int:
    """Return the number of elements of their parameters, each counted once."""
    return sum(p.numel() for p in dict.fromkeys(p for module in modules for p in module.parameters()))


def _as_code(path: str) -> str:
    """Return a submodule's path as an expression: ``model.blocks[3].norm``."""
    return re.sub(r"\.(\d+)(?=\.|$)", r"[\1]", f"model.{path}")
