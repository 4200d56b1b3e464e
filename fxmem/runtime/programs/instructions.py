"""What is written down of a step: calls of operators on values, and what memory they took.

A value is a geometry on a storage (NOTE [What a recording is] in :mod:`fxmem.runtime.programs.recording`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, cast

import torch

from fxmem.devices import rounded
from fxmem.op_facts.kinds import InPlaceInBackward, RecordedRole
from fxmem.op_facts.lookup import by_op, with_role
from fxmem.runtime.layout import View
from fxmem.torch_private import OpOverload, leaves_of, schema_of, tree_leaves

aten = torch.ops.aten
(SUM,) = with_role(RecordedRole, "sum")
SUMS = {SUM} | with_role(RecordedRole, "sum in place")


def _in_place(op: OpOverload) -> OpOverload:
    name, _, overload = op.__name__.partition(".")
    return cast(OpOverload, getattr(getattr(aten, f"{name}_"), overload))


IN_PLACE: dict[Any, OpOverload] = {op: _in_place(op) for op in (SUM, *by_op(InPlaceInBackward))}


@dataclass(frozen=True, slots=True)
class Ref:
    """Stands for a value of the recording."""

    value: int


@dataclass(frozen=True, slots=True)
class Instruction:
    """One call, or the stashing of random states (``target`` None, its one output the number of the stash)."""

    target: Callable[..., Any] | None
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outputs: tuple[int | None, ...]
    """By place among the leaves of what it returns: the value, None where it is no tensor or known before."""
    is_single: bool
    """It returns one tensor, not several."""
    writes: bool
    random: bool
    replays: tuple[int, int] | None = None
    """The stash whose random states it runs from, and a number of that run."""
    devices: tuple[torch.device, ...] = ()
    """Of a stash."""
    live_bytes: int = field(default=0, compare=False)
    """What of the step's own was alive once it had run, as it was written down."""
    came_bytes: int = field(default=0, compare=False)
    """Of gradients of arguments that had come by then, and were let go of."""
    output_bytes: int = field(default=0, compare=False)
    """In a backward, of outputs among what was alive."""
    inside_bytes: int = field(default=0, compare=False)
    """What its kernel takes beside what it is given and returns."""
    reads: tuple[int, ...] = field(init=False, repr=False, compare=False)
    """The values among its arguments."""

    def __post_init__(self) -> None:
        values = tuple(leaf.value for leaf in leaves_of((self.args, self.kwargs)) if isinstance(leaf, Ref))
        object.__setattr__(self, "reads", values)


def written_by(instruction: Instruction) -> list[int]:
    """Return the values that a call writes, as its operator says."""
    if not isinstance(instruction.target, OpOverload) or not instruction.writes:
        return []
    written = []
    for place, argument in enumerate(schema_of(instruction.target).arguments):
        if argument.is_write:
            given = instruction.args[place] if place < len(instruction.args) else instruction.kwargs.get(argument.name)
            written += [leaf.value for leaf in tree_leaves(given) if isinstance(leaf, Ref)]
    return written


@dataclass(slots=True)
class Recording:
    """A step, written down. ``views``: by value, where it lies; storages are numbered."""

    views: list[View] = field(default_factory=list)
    devices: list[torch.device] = field(default_factory=list)
    """By value."""
    forward: list[Instruction] = field(default_factory=list)
    backward: list[Instruction] = field(default_factory=list)
    arguments: list[int] = field(default_factory=list)
    """Values of the parameters and inputs that the forward is given."""
    constants: dict[int, torch.Tensor] = field(default_factory=dict)
    """By value: tensors that every step finds in the same place."""
    outputs: list[Any] = field(default_factory=list)
    """Leaves of the output: refs, and what is no tensor."""
    differentiable: list[bool] = field(default_factory=list)
    """By leaf of the output."""
    tangents: list[int | None] = field(default_factory=list)
    """By leaf of the output: the value of its gradient, None where none came."""
    gradients: list[int | None] = field(default_factory=list)
    """By argument."""
    num_uses: list[int] = field(default_factory=list)
    """By argument: how many gradients its one is the sum of."""
    nbytes: dict[int, int] = field(default_factory=dict)
    """By storage."""
    held_bytes: int = 0
    """What of the step's own was alive between forward and backward."""
    written: frozenset[int] = frozenset()
    """Storages of constants that the forward writes, by ops too that do not say so."""


def device_bytes(nbytes: int, device: torch.device) -> int:
    """Return what storages of so many bytes take of their device."""
    return rounded(nbytes) if nbytes and device.type == "cuda" else nbytes
