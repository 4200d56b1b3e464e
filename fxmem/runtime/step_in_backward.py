"""Optimizers that step each parameter within the backward, once its gradient is complete, and let go of the gradient.

NOTE [Steps in the backward]

1. A hook on each parameter runs the optimizer's own ``step`` for that parameter alone: on a twin of the optimizer whose one
   group has the settings of the parameter's group. State and settings stay the optimizer's, so schedulers and
   ``load_state_dict`` work as ever. Bits are those of one step over all parameters where a step treats each by itself;
   :func:`check_steps_alone` finds optimizers that do not.
2. What needs all gradients at once cannot be: clipping by norm, gradient accumulation, a scaler that may skip the step,
   averages over processes. It is refused where it is seen.
3. A parameter that no group holds keeps its gradient, as ever. Hooks on ``step`` run for each parameter.
"""

from __future__ import annotations

import functools
import types
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from typing import Any

import torch

from fxmem.errors import InputError
from fxmem.torch_patches import clipping_refused
from fxmem.user_frames import level_of_user

Optimizer = torch.optim.Optimizer
NAME = "optimizer_in_backward"
WITHOUT = f'take "{NAME}" out of allow='


class StepInBackward:
    """The hook on parameters that steps them (NOTE [Steps in the backward])."""

    def __init__(
        self, optimizer: Optimizer, on_gradient: Callable[[torch.Tensor], None] = lambda parameter: None
    ) -> None:
        """``on_gradient`` is told of each parameter before it is stepped."""
        self.optimizer = optimizer
        self._on_gradient = on_gradient
        self._groups: dict[int, int] = {}
        self._handles: list[Any] = []

    def attach(self, parameters: Iterable[torch.Tensor]) -> None:
        """Step ``parameters`` in backwards from now on."""
        self._handles += [p.register_post_accumulate_grad_hook(self) for p in parameters if p.requires_grad]

    def detach(self) -> None:
        """Leave the parameters alone again."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def __call__(self, parameter: torch.Tensor) -> None:
        self._on_gradient(parameter)
        group = self._group_of(parameter)
        if group is None:
            return
        optimizer = self.optimizer
        alone = {**group, "params": [parameter]}
        twin = _twin(optimizer, [alone])
        before = dict(vars(twin))
        type(optimizer).step(twin)
        if not (_same(before, vars(twin)) and _same(group, {**alone, "params": group["params"]})):
            raise InputError(
                f"{type(optimizer).__name__} keeps something of its own from step to step, beside the state of each "
                f"parameter, so it cannot step them one by one: {WITHOUT}"
            )
        parameter.grad = None

    def _group_of(self, parameter: torch.Tensor) -> dict[str, Any] | None:
        groups = self.optimizer.param_groups
        if id(parameter) not in self._groups:
            self._groups = {id(p): place for place, group in enumerate(groups) for p in group["params"]}
        place = self._groups.get(id(parameter))
        return None if place is None else groups[place]


def _twin(optimizer: Optimizer, groups: list[dict[str, Any]]) -> Optimizer:
    """Return an optimizer that has everything in common with ``optimizer``, but for its groups."""
    twin = object.__new__(type(optimizer))
    vars(twin).update(vars(optimizer))
    vars(twin).pop("step", None)  # a scheduler's, which counts calls
    twin.param_groups = groups
    return twin


def _same(before: dict[str, Any], after: dict[str, Any]) -> bool:
    return before.keys() == after.keys() and all(value is after[name] for name, value in before.items())


def check_steps_alone(optimizer: Optimizer) -> None:
    """Errors: ``InputError`` if two small parameters stepped together come out otherwise than one by one, in any bit."""
    for group in optimizer.param_groups:
        if not group["params"] or not group["params"][0].is_floating_point():
            continue
        together, alone = _stepped(optimizer, group, apart=False), _stepped(optimizer, group, apart=True)
        if not all(torch.equal(a, b) for a, b in zip(together, alone, strict=True)):
            raise InputError(
                f"{type(optimizer).__name__} steps a parameter otherwise when others are there (a norm over all of "
                f"them?), so it cannot step them one by one: {WITHOUT}"
            )


def _stepped(optimizer: Optimizer, group: dict[str, Any], *, apart: bool) -> list[torch.Tensor]:
    """Return two small parameters and their state after two steps with the settings of ``group``."""
    like, generator = group["params"][0], torch.Generator().manual_seed(0)

    def drawn(*size: int) -> torch.Tensor:
        return (100 * torch.randn(*size, generator=generator)).to(like.device, like.dtype)

    parameters = [drawn(4, 3).requires_grad_(), drawn(2, 5).requires_grad_()]
    twin = _twin(optimizer, [{**group, "params": parameters}])
    twin.state = defaultdict(dict)
    hook = StepInBackward(twin)
    for _ in range(2):
        for parameter in parameters:
            parameter.grad = drawn(*parameter.shape)
        if apart:
            for parameter in reversed(parameters):
                hook(parameter)
        else:
            type(twin).step(twin)
    states = [value for p in parameters for value in twin.state[p].values() if isinstance(value, torch.Tensor)]
    return [t.detach() for t in (*parameters, *states)]


# -- what a training loop holds ----------------------------------------------------------------------------------------


class InBackward:
    """Of the class of an optimizer whose ``step`` has been done already by the time a training loop calls it."""

    _fxmem_steps: LoopWatch

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Do nothing, but run ``closure`` where there is one; say so once. Errors: ``InputError`` if several backwards came
        before it."""
        loss = None if closure is None else torch.enable_grad()(closure)()
        self._fxmem_steps.end()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Do nothing: a gradient is let go of once its parameter is stepped."""

    def __reduce__(self) -> Any:
        kind = type(self).__mro__[2]
        return object.__new__, (kind,), vars(self)


class LoopWatch:
    """How a training loop's backwards and calls of ``step`` alternate."""

    def __init__(self) -> None:
        self._stepped: set[int] = set()
        self._again = False
        self._known = False
        """``step`` has been called before."""

    def note(self, parameter: torch.Tensor) -> None:
        """Note that a gradient is complete. Errors: ``InputError`` if that is one more without a call of ``step``."""
        if not self._stepped and num_processes() > 1:
            raise InputError(
                f"{num_processes()} processes train together, and the parameters would be stepped before gradients are "
                f"averaged over them: {WITHOUT}"
            )
        if id(parameter) in self._stepped:
            self._again = True
            if self._known:
                self._refuse()
        self._stepped.add(id(parameter))

    def end(self) -> None:
        """Note a call of ``step``."""
        if self._again:
            self._refuse()
        self._stepped.clear()
        if not self._known:
            self._known = True
            warnings.warn(
                "optimizer.step() and zero_grad() do nothing: each parameter is stepped within the backward, and its "
                f"gradient let go of ({NAME}); they may stay where they are",
                stacklevel=level_of_user(),
            )

    def _refuse(self) -> None:
        self._stepped.clear()
        self._again = False
        raise InputError(
            "a second backward came before optimizer.step(): gradients accumulate over micro-batches, but with "
            f"{NAME} each backward steps the parameters. Train on the whole batch in one call, or {WITHOUT}"
        )


def num_processes() -> int:
    """Return how many processes train together."""
    distributed = torch.distributed
    return distributed.get_world_size() if distributed.is_available() and distributed.is_initialized() else 1


def optimizer_for(given: Any, parameters: Sequence[torch.Tensor]) -> Optimizer:
    """Return the optimizer ``given``, or made by the class or function given. Errors: ``InputError`` for a mere name."""
    if isinstance(given, Optimizer):
        return given
    if not callable(given):
        raise InputError(
            f"{NAME} needs the optimizer that is to step the parameters, not {given!r}: pass the instance, or a function "
            "that makes it, as in optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=3e-4)"
        )
    made = given(parameters)
    if not isinstance(made, Optimizer):
        raise InputError(f"the function given as optimizer must make a torch.optim.Optimizer, not {made!r}")
    return made


class SteppedInBackward:
    """An optimizer that steps the parameters of a model in its backwards, from now on until :meth:`detach`.

    ``optimizer``: what the training loop holds: of the given one's class, with the same ``__dict__``.
    """

    def __init__(self, given: Optimizer, parameters: Sequence[torch.Tensor]) -> None:
        """Errors: ``InputError`` if ``given`` cannot step parameters one by one, or another does so already."""
        check_steps_alone(given)
        if any(map(steps_in_backward, parameters)):
            raise InputError(
                "parameters are stepped within the backward already, by the optimizer of a module optimized before: call "
                "fxmem.restore on that module first"
            )
        watch, kind = LoopWatch(), type(given)
        made = types.new_class(kind.__name__, (InBackward, kind), {}, lambda own: own.update(_fxmem_steps=watch))
        self.optimizer: Optimizer = object.__new__(made)
        object.__setattr__(self.optimizer, "__dict__", vars(given))
        self._hook = StepInBackward(given, watch.note)
        self._hook.attach(parameters)
        _refuse_clipping()

    def detach(self) -> None:
        """Step no longer."""
        self._hook.detach()


def steps_in_backward(parameter: torch.Tensor) -> bool:
    """True if a hook of this module steps ``parameter``."""
    return any(isinstance(hook, StepInBackward) for hook in (parameter._post_accumulate_grad_hooks or {}).values())


def has_foreign_hooks(parameter: torch.Tensor) -> bool:
    """True if a hook that is none of this module runs on the gradient of ``parameter``."""
    after = (parameter._post_accumulate_grad_hooks or {}).values()
    return bool(parameter._backward_hooks) or any(not isinstance(hook, StepInBackward) for hook in after)


@functools.cache
def _refuse_clipping() -> ExitStack:
    """Refuse from now on to clip what is stepped in backwards."""
    stack = ExitStack()
    stack.enter_context(clipping_refused(_check_clipped))
    return stack


def _check_clipped(parameters: Sequence[torch.Tensor]) -> None:
    if any(steps_in_backward(parameter) for parameter in parameters):
        raise InputError(
            "gradients cannot be clipped by norm: each parameter has been stepped within the backward, and its gradient is "
            f"gone. Leave out clip_grad_norm_ (in trainers, max_grad_norm=0), or {WITHOUT}"
        )
