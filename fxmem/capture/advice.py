"""Which parts of a model can be captured where the whole cannot.

The model is run on fakes, the way that the call takes (:mod:`fxmem.capture.ways`); the calls of its submodules are noted.
From the largest part down, each that was called is captured by itself.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack, nullcontext, suppress
from dataclasses import dataclass, replace
from typing import Any

import torch

from fxmem.capture.export import capture
from fxmem.capture.graph import CaptureGraph, Inputs
from fxmem.capture.ways import Way, ways_of
from fxmem.errors import FxMemError
from fxmem.fake.fake_tensors import FakeWorld, ScalarReads
from fxmem.fake.modes import FewLooks, TooManyLooks
from fxmem.fake.python_state import tensors_restored
from fxmem.runtime.autocast import Autocast
from fxmem.torch_patches import quiet
from fxmem.torch_private import FakeTensor, without_modes

MOST_PARTS = 64
SEARCH_SECONDS = 60.0
MOST_LOOKS = 1_000
"""At values, by a model that is run on fakes to see what its parts are called with."""


@dataclass(frozen=True, slots=True)
class Part:
    """A submodule that is captured by itself."""

    path: str
    module: torch.nn.Module
    inputs: Inputs
    """Arguments like those of its first call: integers as they were, where they are known, else zeros."""
    captured: CaptureGraph
    num_calls: int
    """In one forward of the model."""


def capturable_parts(
    model: torch.nn.Module, inputs: Inputs, autocast: Autocast | None = None
) -> tuple[tuple[Part, ...], Way | None]:
    """Return the largest submodules that can be captured by themselves, none inside another, in the order of their size;
    with it, a way on which the model runs on fakes to its end, or None if it does not."""
    deadline = time.monotonic() + SEARCH_SECONDS
    found: list[Part] = []
    calls: dict[str, list[Inputs]] = {}
    for way in ways_of(model, inputs, autocast):
        world = FakeWorld(inputs.leaves)
        with quiet(), tensors_restored(model), world.state_of(model):
            seen, to_the_end = _calls(model, world, inputs, autocast, way)
        calls = seen if to_the_end else seen | calls
        if to_the_end:
            break
    candidates = list(model.named_children())
    while candidates and len(found) < MOST_PARTS and time.monotonic() < deadline:
        path, part = max(candidates, key=lambda candidate: num_elements(candidate[1]))
        candidates.remove((path, part))
        modules = [other.module for other in found]
        if num_elements(part, *modules) == num_elements(*modules):
            continue  # another name for what is there, or for a part of it
        captured = _captured(part, calls[path][0], autocast) if path in calls else None
        if captured is not None:
            found.append(Part(path, part, calls[path][0], captured, len(calls[path])))
        else:
            candidates += [(f"{path}.{name}", child) for name, child in part.named_children()]
    return tuple(found), way if to_the_end else None


def followed(
    model: torch.nn.Module, inputs: Inputs, autocast: Autocast | None, parts: Sequence[Part]
) -> tuple[tuple[Part, ...], Way] | None:
    """Return ``parts`` with their calls along the way that a call of ``model`` takes, and that way; None where it cannot
    be told."""
    way, world = ways_of(model, inputs, autocast)[0], FakeWorld(inputs.leaves)
    if way.looks is None:
        return None
    with quiet(), tensors_restored(model), world.state_of(model):
        calls, to_the_end = _calls(model, world, inputs, autocast, way)
    if not to_the_end:
        return None
    return tuple(replace(part, num_calls=len(calls.get(part.path, ()))) for part in parts), way


def _calls(
    model: torch.nn.Module, world: FakeWorld, inputs: Inputs, autocast: Autocast | None, way: Way
) -> tuple[dict[str, list[Inputs]], bool]:
    """Return the arguments of the calls of each submodule, as far as a run on fakes comes, and whether that is the end."""
    calls: dict[str, list[Inputs]] = {}
    to_the_end = False

    def noting(path: str) -> Any:
        def note(part: torch.nn.Module, args: Any, kwargs: Any) -> None:
            with suppress(FxMemError):
                given = Inputs.of(args, kwargs, part)
                known = calls.setdefault(path, [])
                known.append(known[0] if known else real_like(given, way.given.get(path, ())))

        return note

    fakes = Inputs(tuple(world.fake_all(leaf) for leaf in inputs.leaves), inputs.spec)
    args, kwargs = fakes.call()
    with ExitStack() as stack:
        for path, module in model.named_modules():
            if isinstance(module, torch.jit.ScriptModule):
                continue
            hook = module.register_forward_pre_hook(noting(path), with_kwargs=True)
            stack.callback(hook.remove)
        stack.enter_context(world.active(model))
        stack.enter_context(ScalarReads())
        stack.enter_context(way.taken(inputs.leaves, fakes.leaves))
        stack.enter_context(autocast.enter() if autocast else nullcontext())
        stack.enter_context(suppress(Exception, TooManyLooks))  # what cannot run on fakes either ends the search there
        stack.enter_context(FewLooks(MOST_LOOKS if way.looks is None else len(way.looks)))
        model(*args, **kwargs)
        to_the_end = True
    return calls, to_the_end


def real_like(fakes: Inputs, known: tuple[Any, ...] = ()) -> Inputs:
    """Return real arguments like ``fakes``; ``known``: their integers and flags, if they were seen."""
    if len(known) != len(fakes.leaves):
        known = (None,) * len(fakes.leaves)
    pairs = zip(fakes.leaves, known, strict=True)
    return Inputs(tuple(_zeros_like(fake) if real is None else real for fake, real in pairs), fakes.spec)


def light(inputs: Inputs) -> Inputs:
    """Return arguments like ``inputs`` that take no memory: fakes, but for integers and flags, which are kept."""
    world = FakeWorld(inputs.leaves)
    return Inputs(tuple(leaf if _is_of_integers(leaf) else world.fake_all(leaf) for leaf in inputs.leaves), inputs.spec)


def _is_of_integers(leaf: object) -> bool:
    return isinstance(leaf, torch.Tensor) and not (leaf.is_floating_point() or leaf.is_complex())


def _zeros_like(value: Any) -> Any:
    """Return a real tensor like a fake one: a part is captured as its calls in training are."""
    if not isinstance(value, FakeTensor):
        return value
    with without_modes(), torch.no_grad():
        zeros = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device).zero_()
    if not value.requires_grad:
        return zeros
    zeros.requires_grad_()
    with without_modes(), torch.enable_grad():
        return zeros if value.is_leaf else zeros * 1


def _captured(module: torch.nn.Module, inputs: Inputs, autocast: Autocast | None) -> CaptureGraph | None:
    if not any(p.requires_grad for p in module.parameters()):
        return None
    try:
        return capture(module, inputs, autocast)
    except Exception:  # whatever it is, the parts of this part may do
        return None


def num_elements(*modules: torch.nn.Module) -> int:
    """Return the number of elements of their parameters, each counted once."""
    return sum(p.numel() for p in dict.fromkeys(p for module in modules for p in module.parameters()))
