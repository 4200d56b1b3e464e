"""From a command line to an estimate: the model is made, its inputs and step too, and what was assumed is written down."""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch

import fxmem
from fxmem.api.budget import CONTEXT_BYTES, margin_bytes, parse_bytes
from fxmem.cli.assumptions import Assumed
from fxmem.cli.models import LoadedModel, load_model
from fxmem.cli.options import OF_MEMORY, OF_MODEL, OF_PLANNING, OF_STEP, Option, given
from fxmem.cli.values import (
    LOSSES,
    InputSpec,
    floating_named,
    input_named,
    optimizer_named,
    positive,
    settings_named,
)
from fxmem.devices import device_named
from fxmem.errors import CaptureError, FxMemError, InputError, ProfileError
from fxmem.profiling.training_step import LossFn

Asked = TypeVar("Asked")


@dataclass(slots=True)
class Session:
    """One question about a model."""

    arguments: argparse.Namespace
    assumed: list[Assumed] = field(default_factory=list)
    limit: tuple[int, str] | None = None
    """What the step may take, in bytes, and where that is from."""
    model: LoadedModel | None = None

    def estimate(self) -> fxmem.Estimate:
        """Return the estimate. A model that cannot be made or followed on the meta device is made on the CPU.

        Errors: ``InputError`` for what is written wrongly, else those of :func:`fxmem.estimate`.
        """
        return self._asked(fxmem.estimate)

    def advise(self) -> fxmem.Advice:
        """Return advice on the step within the limit. Errors: as :meth:`estimate`."""

        def within_limit(*args: Any, **options: Any) -> fxmem.Advice:
            return fxmem.advise(*args, budget=None if self.limit is None else self.limit[0], **options)

        return self._asked(within_limit)

    def _asked(self, ask: Callable[..., Asked]) -> Asked:
        try:
            return self._ask(ask, on_meta=True)
        except Exception as error:
            own = isinstance(error, FxMemError) and not isinstance(error, CaptureError | ProfileError)
            if own and "meta" not in str(error):
                raise
            self.assumed.clear()
            answer = self._ask(ask, on_meta=False)
        self.assumed.append(Assumed("model made on", "cpu", "it cannot be made or followed on the meta device"))
        return answer

    def _ask(self, ask: Callable[..., Asked], on_meta: bool) -> Asked:
        options = self._options()
        dtype = floating_named(self._text(OF_MODEL[3]))
        loaded = load_model(self.arguments.model, settings_named(self._texts(OF_MODEL[0])), on_meta)
        self.model = loaded
        model = loaded.module if dtype is torch.float32 else loaded.module.to(dtype)
        args, kwargs = self._call(loaded, dtype, "meta" if on_meta else "cpu")
        return ask(model, args, kwargs, device=self._device(), **options)

    def _options(self) -> dict[str, Any]:
        loss, optimizer, autocast, accumulate = OF_STEP
        region = self._text(autocast, assume=False)
        seconds = self._text(OF_PLANNING[0], assume=False)
        micro_batches = positive("--accumulate", self._text(accumulate, assume=False))
        return {
            "optimizer": optimizer_named(self._text(optimizer)),
            "loss_fn": self._loss(self._text(loss, assume=False)),
            "autocast": floating_named(region) if region else None,
            "accumulate": micro_batches > 1,
            "plan_seconds": float(seconds) if seconds.replace(".", "", 1).isdigit() else seconds,
        }

    def _loss(self, name: str) -> LossFn | None:
        if name in LOSSES:
            self._assume("loss", name, LOSSES[name][1])
            return LOSSES[name][0]
        module, colon, attribute = name.partition(":")
        try:
            found: LossFn | None = getattr(importlib.import_module(module), attribute) if colon else None
        except (ImportError, AttributeError):
            found = None
        if found is None:
            raise InputError(f"no loss is called {name!r}; known are {', '.join(LOSSES)} and module:function")
        return found

    def _call(self, loaded: LoadedModel, dtype: torch.dtype, device: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
        texts = self._texts(OF_MODEL[1])
        if not texts:
            self.assumed += loaded.assumed
            texts = list(loaded.inputs)
        else:
            self.assumed += [each for each in loaded.assumed if each.what != "input"]
        if not texts:
            raise InputError(
                f"say what {loaded.name} is called with: --input 32x3x224x224, or --input name=4x512:int64"
            )
        specs = [input_named(text) for text in texts]
        batch = self._text(OF_MODEL[2], assume=False)
        if batch:
            specs = [spec.with_batch(positive("--batch", batch)) for spec in specs]
        named = {spec.name: spec.make(dtype, _place(spec, device)) for spec in specs if spec.name}
        return tuple(spec.make(dtype, _place(spec, device)) for spec in specs if not spec.name), named

    def _device(self) -> str | None:
        device, memory, budget = OF_MEMORY
        name = self._text(device)
        limit = self._text(budget, assume=False) or self._text(memory, assume=False)
        gpu = None if name == "cpu" or name.isdigit() or name.startswith("cuda") else device_named(name)
        if limit:
            self.limit = (parse_bytes(limit), "--budget" if self._text(budget, assume=False) else "--memory")
        elif gpu is not None:
            usable = gpu.memory_bytes - CONTEXT_BYTES - margin_bytes(gpu.memory_bytes)
            self.limit = (usable, f"what {gpu.name} has, less CUDA's context and a margin")
            self._assume("memory", f"{usable / 1e9:.1f} GB", self.limit[1])
        if name == "cpu":
            return None
        return f"cuda:{gpu.name}" if gpu is not None else name

    # -- what was given ----------------------------------------------------------------------------------------------------

    def _text(self, option: Option, assume: bool = True) -> str:
        found = given(option, self.arguments)
        if assume or found.source.startswith("environment"):
            self._note(option, found.value, found.source)
        return str(found.value) if found.value is not None else ""

    def _texts(self, option: Option) -> list[str]:
        found = given(option, self.arguments)
        if found.source.startswith("environment"):
            self._note(option, found.value, found.source)
        return list(found.value or ())

    def _note(self, option: Option, value: Any, source: str) -> None:
        if source and value:
            self._assume(option.name.replace("_", " "), " ".join(value) if isinstance(value, list) else value, source)

    def _assume(self, what: str, value: str, source: str) -> None:
        assumed = Assumed(what, value, source)
        if assumed not in self.assumed:
            self.assumed.append(assumed)


def _place(spec: InputSpec, device: str) -> str:
    """Integers have values, which models look at; they are small."""
    return "cpu" if spec.dtype is not None and not spec.dtype.is_floating_point else device
