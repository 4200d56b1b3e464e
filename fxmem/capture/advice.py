"""Which parts of a model can be captured where the whole cannot.

The model is run on fakes, the way that the call takes (:mod:`fxmem.capture.ways`); the calls of its submodules are noted.
From the largest part down, each that was called is captured by itself.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack, nullcontext, suppress
from dataclasses import dataclass, replace
from typing import Any

import torch

from fxmem.capture.export import capture
from fxmem.capture.graph import CaptureGraph, Inputs
from fxmem.capture.ways import Way, is_of_integers, ways_of
from fxmem.errors import FxMemError
from fxmem.fake.fake_tensors import FakeWorld, ScalarReads
from fxmem.fake.modes import FewLooks, TooManyLooks
from fxmem.fake.python_state import tensors_restored
from fxmem.runtime.autocast import Autocast
from fxmem.torch_patches import quiet
from fxmem.torch_private import FakeTensor, without_modes

MOST_PARTS = 64
SEARCH_SECONDS = 60.0
"""Of this thread's own CPU time, so that a busy machine finds the same."""
MOST_KINDS = 4
"""Of a part's calls, each of which has a graph of its own; others run as they are, or are planned for when they come."""
MOST_LOOKS = 1_000
"""At values, by a model that is run on fakes to see what its parts are called with."""


@dataclass(slots=True)
class _Kind:
    """Calls of a submodule that are alike but for values."""

    inputs: Inputs
    count: int = 0


Calls = dict[str, dict[tuple[Any, ...], _Kind]]
"""By the path of a submodule and the kind of its calls."""


def kind_of_call(inputs: Inputs) -> tuple[Any, ...]:
    """Return what calls with arguments like these have in common on fakes."""
    leaves = (
        (leaf.shape, leaf.stride(), leaf.dtype, leaf.requires_grad) if isinstance(leaf, torch.Tensor) else repr(leaf)
        for leaf in inputs.leaves
    )
    return inputs.spec, *leaves


@dataclass(frozen=True, slots=True)
class Part:
    """A submodule that is captured by itself."""

    path: str
    module: torch.nn.Module
    inputs: Inputs
    """Arguments like those of its calls of one kind: integers as they were, where they are known, else zeros."""
    captured: CaptureGraph
    num_calls: int
    """Of this kind, in one forward of the model."""


def capturable_parts(
    model: torch.nn.Module, inputs: Inputs, autocast: Autocast | None = None
) -> tuple[tuple[Part, ...], Way | None]:
    """Return the largest submodules that can be captured by themselves, none inside another, in the order of their size;
    with it, a way on which the model runs on fakes to its end, or None if it does not."""
    deadline = time.thread_time() + SEARCH_SECONDS
    found: list[Part] = []
    calls: Calls = {}
    for way in ways_of(model, inputs, autocast):
        world = FakeWorld(inputs.leaves)
        with quiet(), tensors_restored(model), world.state_of(model):
            seen, to_the_end = _calls(model, world, inputs, autocast, way)
        calls = seen if to_the_end else seen | calls
        if to_the_end:
            break
    candidates = list(model.named_children())
    while candidates and len(found) < MOST_PARTS and time.thread_time() < deadline:
        path, part = max(candidates, key=lambda candidate: num_elements(candidate[1]))
        candidates.remove((path, part))
        modules = [other.module for other in found]
        if num_elements(part, *modules) == num_elements(*modules):
            continue  # another name for what is there, or for a part of it
        kinds = [
            Part(path, part, kind.inputs, captured, kind.count)
            for kind in list(calls.get(path, {}).values())[:MOST_KINDS]
            if (captured := _captured(part, kind.inputs, autocast)) is not None
        ]
        if kinds:
            found += kinds
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

    def along_it(part: Part) -> Part:
        kind = calls.get(part.path, {}).get(kind_of_call(part.inputs))
        return replace(part, num_calls=0 if kind is None else kind.count)

    return tuple(map(along_it, parts)), way


def _calls(
    model: torch.nn.Module, world: FakeWorld, inputs: Inputs, autocast: Autocast | None, way: Way
) -> tuple[Calls, bool]:
    """Return the calls of each submodule, as far as a run on fakes comes, and whether that is the end."""
    calls: Calls = {}
    numbers: Counter[str] = Counter()
    to_the_end = False

    def noting(path: str) -> Any:
        def note(part: torch.nn.Module, args: Any, kwargs: Any) -> None:
            with suppress(FxMemError):
                given = Inputs.of(args, kwargs, part)
                kinds, kind = calls.setdefault(path, {}), kind_of_call(given)
                if kind not in kinds:
                    kinds[kind] = _Kind(real_like(given, way.given_to(path, numbers[path])))
                kinds[kind].count += 1
                numbers[path] += 1

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
    alike = [(fake, real) if real is not None and real.shape == fake.shape else (fake, None) for fake, real in pairs]
    return Inputs(tuple(_zeros_like(fake) if real is None else real for fake, real in alike), fakes.spec)


def light(inputs: Inputs) -> Inputs:
    """Return arguments like ``inputs`` that take no memory: fakes, but for integers and flags, which are kept."""
    world = FakeWorld(inputs.leaves)
    return Inputs(tuple(leaf if is_of_integers(leaf) else world.fake_all(leaf) for leaf in inputs.leaves), inputs.spec)


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
        captured = capture(module, inputs, autocast)
        return None if captured.effects.reads else captured  # a step on fakes has no call before
    except Exception:  # whatever it is, the parts of this part may do
        return None


def num_elements(*modules: torch.nn.Module) -> int:
    """Return the number of elements of their parameters, each counted once."""
    return sum(p.numel() for p in dict.fromkeys(p for module in modules for p in module.parameters()))
