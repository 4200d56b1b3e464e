"""One call of a program: autograd Functions, and what their backward needs.

In: the steps of a graph, a call's arguments, their program. Out: outputs behind gates, and gradients in a backward.

NOTE [Nodes]

Each part of the backward is a node of autograd's, so that gradients go where they belong when they are complete. The node
of the first part, which returns the outputs, depends on that of the second through a tensor without elements, and so on:
autograd runs them in this order, and none that it does not need. All of them drive one generator.

NOTE [Gates]

A node's gradients are held by the engine as long as it runs, here for the whole backward. So each output goes through a
:class:`_Gate`, which puts its gradient into a box, by the backward's number, from which the step takes it and lets go of
it. :class:`_Taken` takes it out again for the tape's own graph.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NoReturn, Protocol

import torch

from fxmem.errors import SavedTensorModifiedError
from fxmem.runtime.autocast import NOTHING, Autocast, autocast_as_in_forward
from fxmem.runtime.backend_flags import present, under
from fxmem.runtime.out_of_memory import explainer
from fxmem.runtime.programs.program import Program
from fxmem.runtime.recompute import replayed, stash_random_states
from fxmem.torch_patches import in_batched_backward, outside_of_batch
from fxmem.torch_private import (
    at_end_of_backward,
    current_backward,
    keeps_graph,
    version_of,
    without_autocast,
    without_modes,
)


class Steps(Protocol):
    """What a call needs to know of the steps of its graph."""

    refusal: str
    devices: tuple[torch.device, ...]
    autocast: Autocast | None
    written: dict[str, torch.Tensor]

    def on_tape(
        self,
        leaves: Sequence[Any],
        stands_for: Callable[[torch.Tensor], torch.Tensor],
        buffers: dict[str, torch.Tensor],
    ) -> tuple[Sequence[Any], list[torch.Tensor]]:
        """Run the graph on the tape; return its outputs and what stands for the arguments that require grad."""


class OtherBackwardError(Exception):
    """A backward on fakes came that no program is for."""


@dataclass
class OnFakes:
    """Steps that are run on fakes, to tell what a program takes: there is no tape for another backward."""

    devices: tuple[torch.device, ...]
    autocast: Autocast | None
    refusal: str = ""
    written: dict[str, torch.Tensor] = field(default_factory=dict)

    def on_tape(self, *_: Any, **__: Any) -> NoReturn:
        raise OtherBackwardError


class ProgramCall:
    """One training call by a program: what its backward needs."""

    def __init__(
        self, steps: Steps, leaves: Sequence[Any], arguments: tuple[torch.Tensor, ...], program: Program
    ) -> None:
        self.steps, self.program = steps, program
        self.leaves: Sequence[Any] | None = leaves
        self.arguments = arguments
        self.switches = present()
        self.states = replayed(stash_random_states(program.draws_on)) if program.draws_on else None
        self.saved: list[Any] = []
        self.watched: list[torch.Tensor] = []
        """Outputs on whose memory saved values lie, without their graph."""
        self.versions: list[int] = []
        self._explain = explainer()
        self._box: dict[tuple[int, int], torch.Tensor] = {}
        self._going: dict[int, tuple[Iterator[None], list[Any]]] = {}
        """By backward: what its parts drive, and where they find their gradients."""

    def run(self) -> list[Any]:
        """Return the outputs (NOTE [Nodes])."""
        arguments, parts, token = self.arguments, self.program.parts, None
        for part in range(len(parts) - 1, -1, -1):
            outputs = ProgramPart.apply(self, part, token, *[arguments[i] for i in parts[part]])  # type: ignore[no-untyped-call]
            token = outputs
        return gated(self.put, outputs)

    def forward(self) -> list[Any]:
        """Return the outputs, without gates."""
        program = self.program
        with NOTHING if self.steps.autocast is None else without_autocast():
            outputs, self.saved = program.forward(*self.arguments)
        self.watched = [outputs[place].detach() for place in program.shared]
        self.versions = self._versions()
        return outputs

    def _versions(self) -> list[int]:
        arguments, program = self.arguments, self.program
        return [
            *[version_of(arguments[i]) for i in program.checked],
            *map(version_of, program.constants),
            *map(version_of, self.watched),
        ]

    def put(self, place: int, tangent: torch.Tensor) -> None:
        """Take the gradient of an output (NOTE [Gates])."""
        self._box[current_backward(), place] = tangent

    def backward(self, part: int) -> Sequence[torch.Tensor | None]:
        """Return the gradients that ``part`` gives in the backward that runs."""
        number = current_backward()
        if part == 0:
            self._going[number] = self._begun(number)
            if len(self.program.parts) > 1:  # the backward may fail, or need not all of them
                at_end_of_backward(partial(_forget, self._going, number))
        driver, found = self._going.pop(number)
        try:
            next(driver, None)
        except torch.OutOfMemoryError as error:
            self._explain(error)
            raise
        if part < len(self.program.parts) - 1:
            self._going[number] = driver, found
        gradients = tuple(found)
        found.clear()
        return gradients

    def _begun(self, number: int) -> tuple[Iterator[None], list[Any]]:
        program, keep = self.program, keeps_graph()
        tangents = [self._box.pop((number, place), None) for place in range(len(program.tangents))]
        self._box.clear()  # of backwards that failed
        if self.leaves is None:
            raise RuntimeError(
                "Trying to backward through the graph a second time (or directly access saved tensors after they have "
                "already been freed). Specify retain_graph=True if you need to backward through the graph a second time."
            )
        if self._versions() != self.versions:
            raise SavedTensorModifiedError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: a "
                "parameter, buffer, input or output of the model was written since its forward. Do the in-place write "
                "after the backward, or on a clone."
            )
        saved = list(self.saved) if keep else self.saved
        found: list[Any] = []
        if self._is_other(tangents):
            saved.clear()
            driver = self._given(self._again(tangents), found)
        else:
            driver = program.backward(saved, self.arguments, tangents, found)
        if not keep:
            self.leaves, self.arguments, self.watched, self.saved = None, (), [], []
        return driver, found

    def _given(self, gradients: Sequence[torch.Tensor | None], found: list[Any]) -> Iterator[None]:
        """Hand over the gradients of the arguments in parts."""
        last = {argument: part for part, given in enumerate(self.program.parts) for argument in given}
        for part, given in enumerate(self.program.parts):
            found += [gradients[i] if last.pop(i, -1) == part else None for i in given]
            yield

    def _is_other(self, tangents: list[torch.Tensor | None]) -> bool:
        """True if the program is not for this backward (NOTE [What stays on the tape], rule 3)."""
        if torch.is_grad_enabled() or in_batched_backward() or present() != self.switches:
            return True
        if any(torch.is_autocast_enabled(device.type) for device in self.steps.devices):
            return True
        return any(
            (tangent is None) != (view is None)
            or (tangent is not None and view is not None and not view.is_of(tangent))
            for tangent, view in zip(tangents, self.program.tangents, strict=True)
        )

    def _again(self, tangents: list[torch.Tensor | None]) -> Sequence[torch.Tensor | None]:
        """Run the forward again on the tape, and go backward through that."""
        steps, arguments = self.steps, self.arguments
        if torch.is_grad_enabled():
            warnings.warn(
                "gradients are differentiated for the first time, in a step that had begun as a program: what comes of "
                "them may equal eager's but for rounding; from the next step on it is bitwise. "
                'runtime="tape" keeps to the tape from the start.',
                stacklevel=2,
            )
        steps.refusal = "a backward came that no program is for"
        assert self.leaves is not None
        with ExitStack() as stack:
            stack.enter_context(outside_of_batch())
            stack.enter_context(torch.enable_grad())
            stack.enter_context(under(self.switches))
            stack.enter_context(autocast_as_in_forward(steps.autocast, steps.devices))
            if self.states is not None:
                stack.enter_context(self.states)
            copies = {name: buffer.clone() for name, buffer in steps.written.items()}
            outputs, aliases = steps.on_tape(self.leaves, lambda argument: argument.view_as(argument), copies)
        found = iter(through(outputs, aliases, tangents))
        return [next(found) if argument.requires_grad else None for argument in arguments]


def _forget(going: dict[int, tuple[Iterator[None], list[Any]]], number: int) -> None:
    going.pop(number, None)


def through(
    outputs: Sequence[Any], aliases: list[torch.Tensor], tangents: list[torch.Tensor | None]
) -> Sequence[torch.Tensor | None]:
    """Return the gradients of ``aliases`` through the graph of ``outputs``; empties ``tangents``."""
    create = torch.is_grad_enabled()
    roots, ones = _roots(outputs, tangents)
    return torch.autograd.grad(roots, aliases, ones, create_graph=create, allow_unused=True)


def backward_through(outputs: list[Any], tangents: list[torch.Tensor | None]) -> None:
    """Go backward from ``outputs``; empties both."""
    roots, ones = _roots(outputs, tangents)
    outputs.clear()
    torch.autograd.backward(roots, ones)


def _roots(
    outputs: Sequence[Any], tangents: list[torch.Tensor | None]
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return what to begin a backward with, whose gradients are ``tangents``, which are emptied (NOTE [Gates])."""
    box = {place: tangent for place, tangent in enumerate(tangents) if tangent is not None}
    tangents.clear()
    with without_modes(), torch.enable_grad():
        roots = [_Taken.apply(box, place, outputs[place]) for place in box]  # type: ignore[no-untyped-call]
        return roots, [torch.ones_like(root) for root in roots]


def gated(put: Callable[[int, torch.Tensor], torch.Tensor | None], outputs: Sequence[Any]) -> list[Any]:
    """Return ``outputs`` behind gates: ``put`` is given each gradient, and returns what goes on."""
    return [
        _Gate.apply(put, place, o) if isinstance(o, torch.Tensor) and o.requires_grad else o  # type: ignore[no-untyped-call]
        for place, o in enumerate(outputs)
    ]


class _Gate(torch.autograd.Function):
    """An output."""

    @staticmethod
    def forward(ctx: Any, put: Any, place: int, output: torch.Tensor) -> torch.Tensor:
        ctx.put, ctx.place = put, place
        ctx.set_materialize_grads(False)
        return output.detach()

    @staticmethod
    def backward(ctx: Any, tangent: torch.Tensor | None) -> Any:
        return None, None, None if tangent is None else ctx.put(ctx.place, tangent)


class _Taken(torch.autograd.Function):
    """A number that stands for an output; its gradient is what lies in the box."""

    @staticmethod
    def forward(ctx: Any, box: dict[int, torch.Tensor], place: int, output: torch.Tensor) -> torch.Tensor:
        ctx.box, ctx.place = box, place
        return torch.zeros(())

    @staticmethod
    def backward(ctx: Any, _: torch.Tensor) -> Any:
        return None, None, ctx.box.pop(ctx.place)


class ProgramPart(torch.autograd.Function):
    """A part of a call's backward (NOTE [Nodes])."""

    @staticmethod
    def forward(ctx: Any, call: ProgramCall, part: int, token: torch.Tensor | None, *_: torch.Tensor) -> Any:
        ctx.call, ctx.part = call, part
        ctx.set_materialize_grads(False)
        if part > 0:
            return call.program.token.detach()
        outputs = call.forward()
        ctx.mark_non_differentiable(*[outputs[place] for place in call.program.not_differentiable])
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor | None) -> Any:
        call, part = ctx.call, ctx.part
        token = call.program.token if part < len(call.program.parts) - 1 else None
        return None, None, token, *call.backward(part)
