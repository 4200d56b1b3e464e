"""Values as the command line writes them: shapes and dtypes of inputs, settings, sizes, losses, optimizers.

Errors: ``InputError``, in one sentence with what is known.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fxmem.errors import InputError
from fxmem.profiling.training_step import OptimizerLike, optimizer_class
from fxmem.torch_private import tree_leaves

DTYPES = {
    "fp32": torch.float32,
    "float32": torch.float32,
    "bf16": torch.bfloat16,
    "bfloat16": torch.bfloat16,
    "fp16": torch.float16,
    "float16": torch.float16,
    "fp64": torch.float64,
    "float64": torch.float64,
    "int64": torch.int64,
    "int32": torch.int32,
    "uint8": torch.uint8,
    "bool": torch.bool,
}
_FLOATING = ("fp32", "bf16", "fp16", "fp64")


def dtype_named(name: str) -> torch.dtype:
    """Return the dtype of that name."""
    if name.lower() not in DTYPES:
        raise InputError(f"no dtype is called {name!r}; known are {', '.join(DTYPES)}")
    return DTYPES[name.lower()]


def floating_named(name: str) -> torch.dtype:
    """Return the floating dtype of that name."""
    if name.lower() not in DTYPES or not DTYPES[name.lower()].is_floating_point:
        raise InputError(f"no floating dtype is called {name!r}; known are {', '.join(_FLOATING)}")
    return DTYPES[name.lower()]


def settings_named(texts: Sequence[str]) -> dict[str, Any]:
    """Return ``name=value`` texts by name; a value is what it is in Python, else a text."""
    found = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not name.isidentifier():
            raise InputError(f"{text!r} sets nothing: write name=value, such as num_classes=10")
        found[name] = plain_value(value)
    return found


def plain_value(text: str) -> Any:
    """Return the number, bool, None, list or text that ``text`` writes."""
    words = {"true": True, "false": False, "none": None, "null": None}
    if text.lower() in words:
        return words[text.lower()]
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


# -- inputs --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class InputSpec:
    """One argument of a call: a tensor, or a plain value where ``shape`` is None."""

    name: str
    """Empty: positional."""
    shape: tuple[int, ...] | None
    dtype: torch.dtype | None = None
    """None: the model's."""
    below: int | None = None
    """Of integers: all are less."""
    value: Any = None

    def with_batch(self, size: int) -> InputSpec:
        """Return the argument of a call with this batch size, its first dimension."""
        if not self.shape:
            return self
        return InputSpec(self.name, (size, *self.shape[1:]), self.dtype, self.below)

    def make(self, dtype: torch.dtype, device: str) -> Any:
        """Return the argument; integers are zeros, which every table has."""
        if self.shape is None:
            return self.value
        return torch.zeros(self.shape, dtype=self.dtype or dtype, device=device)


_INPUT = re.compile(r"(?:([A-Za-z_]\w*)=)?(\d+(?:x\d+)*)(?::(\w+))?(?:<(\d+))?")


def input_named(text: str) -> InputSpec:
    """Return the argument that ``[name=]SHAPE[:dtype][<below]`` or ``name=value`` writes."""
    match = _INPUT.fullmatch(text.strip())
    if match is not None:
        name, sizes, dtype, below = match.groups()
        shape = tuple(int(size) for size in sizes.split("x"))
        if 0 in shape:
            raise InputError(f"input {text!r} has a dimension of size 0")
        known = dtype_named(dtype) if dtype else torch.int64 if below else None
        return InputSpec(name or "", shape, known, int(below) if below else None)
    name, equals, value = text.partition("=")
    if equals and name.isidentifier() and not re.match(r"[\dx]", value):
        return InputSpec(name, None, value=plain_value(value))
    raise InputError(
        f"input {text!r} is no shape; write 32x3x224x224, input_ids=4x512:int64<50257, or name=value for what is no tensor"
    )


# -- the step ------------------------------------------------------------------------------------------------------------


def optimizer_named(text: str) -> OptimizerLike:
    """Return the optimizer that ``name``, or ``name:key=value,key=value``, writes; None for "none"."""
    name, colon, rest = text.partition(":")
    if name.lower() == "none":
        return None
    cls = optimizer_class(name)
    if not colon:
        return name
    given = settings_named(rest.split(","))
    known = [key for key in inspect.signature(cls).parameters if key != "params"]
    if wrong := next((key for key in given if key not in known), None):
        raise InputError(f"{cls.__name__} has no option {wrong!r}; known are {', '.join(known)}")

    def __init__(self: Any, params: Any, **others: Any) -> None:
        cls.__init__(self, params, **{**others, **given})

    body = {"__init__": __init__, "__module__": cls.__module__}
    made: type[torch.optim.Optimizer] = type(cls.__name__, (cls,), body)
    return made


def cross_entropy(output: Any) -> torch.Tensor:
    """Return the cross entropy of the output's classes, its second dimension, with targets of class 0."""
    logits = main_output(output)
    targets = logits.new_zeros((logits.shape[0], *logits.shape[2:]), dtype=torch.int64)
    return torch.nn.functional.cross_entropy(logits, targets)


def mean_square(output: Any) -> torch.Tensor:
    """Return the mean square of the output, as with targets of 0."""
    logits = main_output(output)
    return torch.nn.functional.mse_loss(logits, torch.zeros_like(logits))


def main_output(output: Any) -> torch.Tensor:
    """Return the first floating tensor of a model's output."""
    return floating_outputs(output)[0]


def floating_outputs(output: Any) -> list[torch.Tensor]:
    """Return the floating tensors of a model's output."""
    found = [t for t in tree_leaves(output) if isinstance(t, torch.Tensor) and t.is_floating_point()]
    if not found:
        raise InputError("the model's output holds no floating tensor to take a loss of; pass --loss module:function")
    return found


def total(output: Any) -> torch.Tensor:
    """Return the sum of all floating tensors of a model's output."""
    first, *others = (tensor.sum() for tensor in floating_outputs(output))
    for each in others:
        first = first + each
    return first


LOSSES: dict[str, tuple[Callable[[Any], torch.Tensor] | None, str]] = {
    "own": (None, "the output's loss, else the sum of its floating tensors"),
    "cross_entropy": (cross_entropy, "of class 0 by dimension 1; the targets count as made by the loss"),
    "mse": (mean_square, "to 0; the targets count as made by the loss"),
    "sum": (total, "the sum of all floating outputs"),
}
"""By name, the loss and what it is."""


def positive(name: str, text: str) -> int:
    """Return a whole number above 0."""
    if not text.isdigit() or int(text) < 1:
        raise InputError(f"{name} must be a whole number above 0, not {text!r}")
    return int(text)
