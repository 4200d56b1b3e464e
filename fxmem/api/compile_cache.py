"""What is compiled for one model, by the signature of its calls.

In: the inputs of a call, the autocast region it is in. Out: a :class:`Compiled`. A model that looks at its inputs'
values has one for each way it takes; calls that differ in sizes only share a graph where the model's code allows.
"""

from __future__ import annotations

import gc
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

from fxmem.capture.advice import capture_or_advise
from fxmem.capture.dynamic_batch import largest_batch, resized, varying_dims, without_values
from fxmem.capture.export import capture, fitting
from fxmem.capture.graph import CaptureGraph, Dims, Inputs
from fxmem.capture.guards import ModelStates, arguments_of, constants_of
from fxmem.errors import CaptureError, InfeasibleBudgetError, InputError
from fxmem.ir import Plan
from fxmem.passes.context import CompileContext, Settings
from fxmem.pipeline import Compiled, compile_model, least_bytes_within, profile_for_short_memory
from fxmem.planners.plan_transfer import Planned
from fxmem.profiling.training_step import TrainingStep
from fxmem.progress import CAPTURE_SECONDS, told
from fxmem.report.text import Report
from fxmem.runtime.autocast import Autocast
from fxmem.runtime.backend_flags import present
from fxmem.torch_patches import as_in_training

MANY_SPECIALIZATIONS = MANY_STATES = MANY_CONSTANTS = 8
"""Of one signature, by the values of inputs, of a model, by its attributes, or of its arguments that are no tensors: here
the user hears that planning each takes time."""
TO_THE_CALL = 10
"""Frames from a warning to the line that calls the model: ours, those of ``torch.compiler.disable`` and ``nn.Module``."""


@dataclass(frozen=True, slots=True)
class _Family:
    """Signatures that differ in sizes only."""

    captured: CaptureGraph
    """The graph of the latest."""
    example: Inputs
    """Its arguments, without values."""
    planned: list[Planned]
    """Sizes that were planned for."""


class CompileCache:
    """What is compiled for ``model`` under ``settings``."""

    def __init__(self, model: torch.nn.Module, settings: Settings) -> None:
        self.latest: Compiled | None = None
        """That of the signature used last."""
        self._model, self._settings = model, settings
        self._states = ModelStates(model)
        self._compiled: dict[tuple[Any, ...], list[Compiled]] = {}
        self._families: dict[tuple[Any, ...], _Family] = {}
        self._constants: set[Any] = set()

    def for_step(self, step: TrainingStep) -> CompileCache:
        """Return a cache for another step of the same model, which shares captured graphs and targets with this one."""
        other = CompileCache(self._model, replace(self._settings, step=self.with_targets(step)))
        other._families = dict(self._families)
        return other

    def with_targets(self, step: TrainingStep) -> TrainingStep:
        """Return ``step`` with this cache's targets, and the inputs that they are an example for."""
        return replace(step, targets=self._settings.step.targets)

    def raise_budget(self, budget_bytes: int) -> None:
        """Plan within this budget from now on."""
        self._settings = replace(self._settings, budget_bytes=budget_bytes)

    @property
    def specializations(self) -> list[int]:
        """By signature: how many ways through the model are compiled."""
        return [len(specializations) for specializations in self._compiled.values()]

    def find(self, inputs: Inputs, autocast: Autocast | None) -> Compiled | None:
        """Return what is compiled for the signature of ``inputs`` and serves them, if anything is."""
        compiled = _serving(self._compiled.get(self._signature(inputs, autocast), []), inputs)
        self.latest = compiled or self.latest
        return compiled

    def make(self, inputs: Inputs, autocast: Autocast | None) -> Compiled:
        """Compile for the signature of ``inputs``, where nothing was found. Errors: as :func:`fxmem.optimize` tells."""
        signature = self._signature(inputs, autocast)
        most = CAPTURE_SECONDS + self._settings.plan_seconds
        with (
            told(f"planning a training step of {type(self._model).__name__}", most),
            as_in_training(),
            _collected_afterwards(),
        ):
            compiled = self.find(inputs, autocast)
            if compiled is not None:  # another thread was faster
                return compiled
            self._forget_replaced()
            self.latest = compiled = self._compile(inputs, autocast)
            specializations = self._compiled.setdefault(signature, [])
            specializations.append(compiled)
            after = self._signature(inputs, autocast)
            if after != signature:  # a first forward may leave something in the model's configs that later ones find
                self._compiled.setdefault(after, []).append(compiled)
        self._warn_of_many(inputs, specializations)
        return compiled

    def plan_elsewhere(self, inputs: Inputs, autocast: Autocast | None) -> tuple[Plan, Report]:
        """Plan for fakes of the model and ``inputs`` where fakes lie now, for its floor too: what is found serves no call,
        and the fakes do not stay."""
        most = CAPTURE_SECONDS + self._settings.plan_seconds
        settings = replace(self._settings, measure=False)
        with (
            told(f"planning a training step of {type(self._model).__name__}", most),
            as_in_training(),
            _collected_afterwards(),
        ):
            compiled = compile_model(CompileContext(self._model, inputs, settings, autocast))
            return compiled.plan, replace(compiled.report, _least_bytes=compiled.report.floor_bytes)

    def _forget_replaced(self) -> None:
        """Let go of what is compiled for parameters that the model has no longer: nothing else may hold them."""
        present_ids = set(map(id, self._model.parameters()))

        def holds(captured: CaptureGraph) -> bool:
            return all(id(parameter) in present_ids for parameter in captured.parameters)

        for specializations in self._compiled.values():
            specializations[:] = [compiled for compiled in specializations if holds(compiled.captured)]
        for key in [key for key, family in self._families.items() if not holds(family.captured)]:
            del self._families[key]

    def _warn_of_many(self, inputs: Inputs, specializations: list[Compiled]) -> None:
        """Warn where what is planned for anew again and again could be told apart by tensors."""
        name = type(self._model).__name__
        if len(specializations) == 1 and self._states.count == MANY_STATES:
            warnings.warn(
                f"{name} was called with its attributes in {MANY_STATES} different states (the values of a counter or of a "
                "schedule, perhaps); each is captured and planned anew. Keep counters out of the model, and what changes "
                "from step to step in a buffer or an argument that is a tensor.",
                stacklevel=TO_THE_CALL,
            )
        constants = constants_of(inputs)
        if constants not in self._constants:
            self._constants.add(constants)
            if len(self._constants) == MANY_CONSTANTS:
                warnings.warn(
                    f"{name} was called with {MANY_CONSTANTS} different values of arguments that are no tensors; each is "
                    "captured and planned anew. Pass what changes from step to step as a tensor.",
                    stacklevel=TO_THE_CALL,
                )
        if len(specializations) == MANY_SPECIALIZATIONS:
            warnings.warn(
                f"{name} looks at values of its inputs and took {MANY_SPECIALIZATIONS} different ways for calls of one "
                "signature; each is planned anew. Move what looks at values out of the model.",
                stacklevel=TO_THE_CALL,
            )

    def _signature(self, inputs: Inputs, autocast: Autocast | None, *, with_sizes: bool = True) -> tuple[Any, ...]:
        """Return what a plan depends on; without ``with_sizes``, what a graph with symbolic dimensions does."""
        others = [kind for kind in ("cpu", "cuda") if autocast is None or autocast.device_type != kind]
        dtypes = torch.get_default_dtype(), *((kind, torch.get_autocast_dtype(kind)) for kind in others)
        state = self._states.number(), self._states.among(inputs.tensors)
        return (arguments_of(inputs, with_sizes=with_sizes), autocast, dtypes, present(), *state)

    def _compile(self, inputs: Inputs, autocast: Autocast | None) -> Compiled:
        """Compile a new signature; one that differs from an earlier one in sizes only re-uses that one's graph."""
        self._settings = self._settings.seen_with(inputs.leaves)
        key = self._signature(inputs, autocast, with_sizes=False)
        family: _Family | None = self._families.get(key)
        captured: CaptureGraph | None = None
        if family is not None:
            captured = family.captured
            dims = varying_dims(family.example, inputs)
            if not dims <= captured.dynamic:
                captured = _captured_dynamic(self._model, inputs, autocast, dims | captured.dynamic)
            elif not (captured.serves(inputs) and captured.fits(inputs)):
                captured = None
        if captured is None:
            captured = capture_or_advise(self._model, inputs, autocast)
        planned = family.planned if family is not None else []
        self._families[key] = _Family(captured, without_values(inputs), planned)
        try:
            compiled = compile_model(CompileContext(self._model, inputs, self._settings, autocast), captured, planned)
        except InfeasibleBudgetError as error:
            if not captured.dynamic:
                raise
            try:
                largest = self._largest_batch(captured, inputs)
            except InputError:  # what varies is no batch, and the model does not take every size of it
                raise error from None
            raise InfeasibleBudgetError(
                error.budget_bytes,
                error.least_bytes,
                error.breakdown,
                error.place,
                f"The largest batch that fits is {largest}.",
            ) from None
        if compiled.planned is not None:
            planned.append(compiled.planned)
        return compiled

    def _largest_batch(self, captured: CaptureGraph, inputs: Inputs) -> int:
        """Return the largest size of the dynamic dimensions at which some plan fits."""
        settings = replace(self._settings, measure=False)
        budget_bytes = settings.budget_bytes
        assert budget_bytes is not None
        planned: list[Planned] = []

        def floor_bytes(size: int) -> int:
            other = resized(inputs, captured.dynamic, size)
            graph = fitting(captured, self._model, other)
            context = CompileContext(self._model, other, settings, graph.autocast)
            return least_bytes_within(profile_for_short_memory(graph, context), context, planned, budget_bytes)

        return largest_batch(floor_bytes, budget_bytes)


@contextmanager
def _collected_afterwards() -> Iterator[None]:
    """Put off collecting cycles to the end of the body, which makes many objects and little garbage; but what cycles it
    leaves hold the batch planned for, which would be there beside the next one."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
        gc.collect()


def _serving(specializations: list[Compiled], inputs: Inputs) -> Compiled | None:
    """Return that of ``specializations`` which the model goes with these inputs."""
    return next((one for one in specializations if one.captured.serves(inputs)), None)


def _captured_dynamic(
    model: torch.nn.Module, inputs: Inputs, autocast: Autocast | None, dims: Dims
) -> CaptureGraph | None:
    """Return a graph that serves other sizes of ``dims``, or None where the model's code is tied to one size."""
    try:
        return capture(model, inputs, autocast, dims)
    except CaptureError:
        return None
