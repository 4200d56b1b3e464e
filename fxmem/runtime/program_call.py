"""One call of a program: an autograd Function, and what its backward needs.

In: the steps of a graph, a call's arguments, their program. Out: outputs behind gates, and gradients in a backward.

NOTE [Gates]

A node's gradients are held by the engine as long as it runs, here for the whole backward. So each output goes through a
:class:`_Gate`, which puts its gradient into a box, by the backward's number, from which the step takes it and lets go of
it. :class:`_Taken` takes it out again for the tape's own graph.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any, Protocol

import torch
from torch import fx

from fxmem.errors import SavedTensorModifiedError
from fxmem.runtime.autocast import autocast_as_in_forward
from fxmem.runtime.backend_flags import present, under
from fxmem.runtime.program import Program
from fxmem.runtime.recompute import replayed, stash_random_states
from fxmem.torch_patches import in_batched_backward, outside_of_batch
from fxmem.torch_private import current_backward, keeps_graph, version_of, without_modes


class Steps(Protocol):
    """What a call needs to know of the steps of its graph."""

    graph_module: fx.GraphModule
    refusal: str
    devices: tuple[torch.device, ...]
    written: dict[str, torch.Tensor]

    def on_tape(
        self, leaves: Sequence[Any], graph_module: fx.GraphModule, buffers: dict[str, torch.Tensor]
    ) -> tuple[Sequence[Any], list[torch.Tensor]]:
        """Run the graph on the tape; return its outputs and what stands for the arguments that require grad."""


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
        self._box: dict[tuple[int, int], torch.Tensor] = {}

    def forward(self, arguments: tuple[torch.Tensor, ...]) -> list[Any]:
        program = self.program
        outputs, self.saved = program.forward(*arguments)
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

    def gated(self, outputs: Sequence[Any]) -> list[Any]:
        """Return ``outputs`` behind gates, which put their gradients here."""
        return gated(self.put, outputs)

    def backward(self) -> Sequence[torch.Tensor | None]:
        """Return the gradients of the arguments, in the backward that runs."""
        program, keep, number = self.program, keeps_graph(), current_backward()
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
        if self._is_other(tangents):
            found = self._again(tangents)
        else:
            found = program.backward(list(self.saved) if keep else self.saved, self.arguments, tangents)
        if not keep:
            self.leaves, self.arguments, self.watched, self.saved = None, (), [], []
        return found

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
                "them may equal eager's but for rounding; from the next step on it is bitwise. FXMEM_RUNTIME=tape keeps to "
                "the tape from the start.",
                stacklevel=2,
            )
        steps.refusal = "a backward came that no program is for"
        assert self.leaves is not None
        with ExitStack() as stack:
            stack.enter_context(outside_of_batch())
            stack.enter_context(torch.enable_grad())
            stack.enter_context(under(self.switches))
            stack.enter_context(autocast_as_in_forward(None, steps.devices))
            if self.states is not None:
                stack.enter_context(self.states)
            copies = {name: buffer.clone() for name, buffer in steps.written.items()}
            outputs, aliases = steps.on_tape(self.leaves, steps.graph_module, copies)
        found = iter(through(outputs, aliases, tangents))
        gradients = [next(found) if argument.requires_grad else None for argument in arguments]
        return [*gradients, *[None] * len(self.program.twice)]


def through(
    outputs: Sequence[Any], aliases: list[torch.Tensor], tangents: list[torch.Tensor | None]
) -> Sequence[torch.Tensor | None]:
    """Return the gradients of ``aliases`` through the graph of ``outputs``; empties ``tangents``."""
    box = {place: tangent for place, tangent in enumerate(tangents) if tangent is not None}
    tangents.clear()
    create = torch.is_grad_enabled()
    with without_modes(), torch.enable_grad():
        roots = [_Taken.apply(box, place, outputs[place]) for place in box]  # type: ignore[no-untyped-call]
        ones = [torch.ones_like(root) for root in roots]
    return torch.autograd.grad(roots, aliases, ones, create_graph=create, allow_unused=True)


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


class ProgramStep(torch.autograd.Function):
    """A step by its program."""

    @staticmethod
    def forward(ctx: Any, call: ProgramCall, *arguments: torch.Tensor) -> Any:
        ctx.call = call
        ctx.set_materialize_grads(False)
        outputs = call.forward(call.arguments)
        ctx.mark_non_differentiable(*[outputs[place] for place in call.program.not_differentiable])
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor | None) -> Any:
        return None, *ctx.call.backward()
