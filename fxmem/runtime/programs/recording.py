"""Writing down what a step of an emitted graph does, op by op, below autograd.

In: a forward and a backward that run while a :class:`Recorder` is active. Out: a :class:`Recording`: plain calls of ATen's
operators, from parameters and inputs to outputs, and from the outputs' gradients to those of parameters and inputs.

NOTE [What a recording is]

1. It is made of real tensors in a real step, so it has the very kernels' calls that eager makes, in the engine's order of
   sums, with the recomputation of the plan where the tape ran it.
2. A value is a geometry on a storage. Whatever tensor has that geometry on that storage is that value: what autograd
   saves, a view made anew and a detached copy are not told apart, as they are the same memory.
3. What the recorder cannot follow makes it give up (``failure`` says why): memory of unknown origin, numbers or sizes read
   from tensors. Such steps stay on the tape.
4. Sums of gradients and some formulas are in place only where no mode is on. So that the step takes no more memory for
   being written down, the recorder does them in place, and writes down that they make what is new: a program does as much
   in place by itself.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from fxmem.op_facts.kinds import RecordedRole
from fxmem.op_facts.lookup import may_draw, with_role
from fxmem.runtime.layout import View
from fxmem.runtime.programs.instructions import IN_PLACE, Instruction, Recording, Ref, device_bytes
from fxmem.runtime.recompute import RandomStates, replayed
from fxmem.runtime.unwatched_writes import UnwatchedWrites
from fxmem.torch_private import (
    TorchDispatchMode,
    schema_of,
    storage_key,
    topmost_mode,
    tree_leaves,
    tree_map,
    without_modes,
)

aten = torch.ops.aten
READ_VALUES = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)
INDEXING = with_role(RecordedRole, "indexing")
MASKS = (torch.bool, torch.uint8)
MOVING = with_role(RecordedRole, "moving")

Inside = Callable[[Any, Any, Any], int]
"""Says of a call, by operator, arguments and keywords, how many bytes its kernel takes beside them and its results."""


def nothing_inside(func: Any, args: Any, kwargs: Any) -> int:
    """Of devices where kernels take nothing that counts."""
    return 0


class Recorder(TorchDispatchMode):
    """Writes ops into ``recording``. Errors: none; ``failure`` says why a recording is of no use."""

    def __init__(self, inside: Inside = nothing_inside) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.recording, self.failure = Recording(), ""
        self.in_backward = False
        self._inside = inside
        self._storages: dict[int, tuple[weakref.ref[Any], int]] = {}
        self._known: dict[View, int] = {}
        self._num_storages = self._num_stashes = 0
        self._replays: tuple[int, int] | None = None
        self._op = "the step"
        self._num_replays = 0
        self._unwatched, self._live_bytes, self._came_bytes = UnwatchedWrites(), 0, 0
        self._of_outputs: dict[int, int] = {}
        """In a backward, the bytes of outputs that are alive, by storage."""

    # -- values -----------------------------------------------------------------------------------------------------

    def root(self, tensor: torch.Tensor) -> int:
        """Return the value of a tensor that is there before."""
        return self._value(tensor, self._storage(tensor) or self._new_storage(tensor))

    def given(self, tensor: torch.Tensor) -> int:
        """Return the value of a tensor that is there before, and goes within the step."""
        return self._value(tensor, self._storage(tensor) or self._new_storage(tensor, counted=True))

    def begin_backward(self, outputs: Sequence[Any]) -> None:
        """What comes from now on is the backward from ``outputs``."""
        self.in_backward, self.recording.held_bytes = True, self._live_bytes
        self._unwatched.show(outputs)
        storages = {self._storage(o) for o in outputs if isinstance(o, torch.Tensor)} - {None}
        self._of_outputs = {s: self.recording.nbytes[s] for s in storages if s is not None}

    def came(self, gradient: torch.Tensor) -> int:
        """Return the value of a gradient that an argument is given."""
        self._came_bytes += device_bytes(gradient.numel() * gradient.itemsize, gradient.device)
        return self.find(gradient)

    def constant(self, tensor: torch.Tensor) -> None:
        """Know ``tensor`` as one that every step finds in the same place."""
        if self._storage(tensor) is None or self._view(tensor, self._storage(tensor) or 0) not in self._known:
            self.recording.constants[self.root(tensor)] = tensor

    def find(self, tensor: torch.Tensor) -> int:
        """Return the value of a tensor that the step has made, by which name ever."""
        storage = self._storage(tensor)
        if storage is None:
            self._give_up(f"{self._op} reads memory that comes from elsewhere")
            return 0
        view = self._view(tensor, storage)
        if view not in self._known:
            self._derive(tensor, view)
        return self._known.get(view, 0)

    def _derive(self, tensor: torch.Tensor, view: View) -> None:
        """Write down how to come by another geometry on known memory."""
        base = next((v for k, v in self._known.items() if k.storage == view.storage and _alike(k, view)), None)
        if base is None:
            self._give_up("it reads memory as another dtype")
            return
        value = self._value(tensor, view.storage)
        args = (Ref(base), list(view.size), list(view.stride), view.offset)
        self._append(Instruction(aten.as_strided.default, args, {}, (value,), True, False, False))

    def _storage(self, tensor: torch.Tensor) -> int | None:
        known = self._storages.get(storage_key(tensor))
        return None if known is None or known[0]() is None else known[1]

    def _new_storage(self, tensor: torch.Tensor, *, counted: bool = False) -> int:
        """Number a storage. ``counted``: it is one of the step's own."""
        self._num_storages += 1
        storage = tensor.untyped_storage()
        nbytes = self.recording.nbytes[self._num_storages] = device_bytes(storage.nbytes(), tensor.device)
        died = partial(self._died, self._num_storages, nbytes) if counted else None
        self._storages[storage_key(tensor)] = weakref.ref(storage, died), self._num_storages
        self._live_bytes += nbytes if counted else 0
        return self._num_storages

    def _died(self, storage: int, nbytes: int, _: object) -> None:
        self._live_bytes -= nbytes
        self._of_outputs.pop(storage, None)

    def _renamed(self, tensor: torch.Tensor) -> None:
        """Take the storage of ``tensor``, which an op has written over, for one that it has made."""
        reference, old = self._storages[storage_key(tensor)]
        self._num_storages += 1
        self.recording.nbytes[self._num_storages] = self.recording.nbytes[old]
        self._storages[storage_key(tensor)] = reference, self._num_storages

    def _view(self, tensor: torch.Tensor, storage: int) -> View:
        return View.of(tensor, storage)._replace(requires_grad=False)

    def _value(self, tensor: torch.Tensor, storage: int) -> int:
        view = self._view(tensor, storage)
        if view not in self._known:
            self._known[view] = len(self.recording.views)
            self.recording.views.append(view)
            self.recording.devices.append(tensor.device)
        return self._known[view]

    # -- ops --------------------------------------------------------------------------------------------------------

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.failure:
            return func(*args, **kwargs)
        self._op = str(func)
        self._check(func, args, kwargs)
        named_args, named_kwargs = tree_map(self._named, args), tree_map(self._named, kwargs)
        inside_bytes = self._inside(func, args, kwargs)
        output = self._run(func, args, kwargs)
        is_single = isinstance(output, torch.Tensor)
        leaves = [output] if is_single else list(output) if isinstance(output, tuple | list) else [output]
        made = [self._made(leaf) for leaf in leaves]
        writes = bool(schema_of(func).is_mutable)
        random = may_draw(func)
        if writes or random or any(value is not None for value in made):
            instruction = Instruction(
                func, tuple(named_args), named_kwargs, tuple(made), is_single, writes, random, self._replays
            )
            self._append(replace(instruction, inside_bytes=inside_bytes))
        return output

    def _run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Call ``func`` as it is called where nothing is written down, in place (NOTE [What a recording is], rule 4)."""
        in_place = func in IN_PLACE and self._unwatched.includes(func, args)
        output = (IN_PLACE[func] if in_place else func)(*args, **kwargs)
        self._unwatched.ran(func, output)
        if in_place and self._storage(output) is not None:
            self._renamed(output)
        return output

    def _check(self, func: Any, args: Any, kwargs: Any) -> None:
        if func in INDEXING:
            indices = [leaf for leaf in tree_leaves((args[1:], kwargs)) if isinstance(leaf, torch.Tensor)]
            if any(leaf.dtype in MASKS for leaf in indices):
                self._give_up(f"{func} looks at as many elements as its mask says")
        elif any(tag in func.tags for tag in READ_VALUES):
            self._give_up(f"{func} reads numbers from the device")
        elif func in MOVING:
            self._give_up(f"{func} gives a tensor other memory")

    def call(self, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
        """Call ``function``, which reads and writes its arguments and returns nothing, and write it down as one call."""
        self._op = function.__name__
        named = tuple(self._named(arg) for arg in args)
        with without_modes():
            function(*args)
        self._append(Instruction(function, named, {}, (None,), True, True, False, self._replays))

    def _named(self, leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        if type(leaf) not in (torch.Tensor, torch.nn.Parameter):
            self._give_up(f"it works on a {type(leaf).__name__}")
            return leaf
        return Ref(self.find(leaf))

    def _made(self, leaf: Any) -> int | None:
        """Return the value of what an op returned, None if it was known before."""
        if not isinstance(leaf, torch.Tensor):
            if isinstance(leaf, tuple | list):
                self._give_up("it returns lists in lists")
            return None
        count = len(self.recording.views)
        value = self._value(leaf, self._storage(leaf) or self._new_storage(leaf, counted=True))
        return value if value == count else None

    def _append(self, instruction: Instruction) -> None:
        instruction = replace(
            instruction,
            live_bytes=self._live_bytes,
            came_bytes=self._came_bytes,
            output_bytes=sum(self._of_outputs.values()),
        )
        (self.recording.backward if self.in_backward else self.recording.forward).append(instruction)

    def _give_up(self, why: str) -> None:
        self.failure = self.failure or why

    # -- random states ----------------------------------------------------------------------------------------------

    def stash(self, states: RandomStates) -> replayed:
        """Note that random states are stashed; return what replays them."""
        number, self._num_stashes = self._num_stashes, self._num_stashes + 1
        devices = tuple(device for device, _ in states)
        self._append(Instruction(None, (), {}, (number,), True, False, False, devices=devices))
        return _NotedReplay(states, self, number)

    def replay(self, number: int | None) -> None:
        """Note that what follows runs from the states of this stash; None: no more."""
        self._num_replays += 1
        self._replays = None if number is None else (number, self._num_replays)


class _NotedReplay(replayed):
    def __init__(self, states: RandomStates, recorder: Recorder, number: int) -> None:
        super().__init__(states)
        self._recorder, self._number = recorder, number

    def __enter__(self) -> None:
        super().__enter__()
        self._recorder.replay(self._number)

    def __exit__(self, *exc: object) -> None:
        self._recorder.replay(None)
        super().__exit__(*exc)


def _alike(one: View, other: View) -> bool:
    return (one.dtype, one.conj, one.neg) == (other.dtype, other.conj, other.neg)


# -- which recorder is at work -------------------------------------------------------------------------------------------

_AT_WORK: ContextVar[Recorder | None] = ContextVar("recorder", default=None)


@contextmanager
def recording_with(recorder: Recorder) -> Iterator[None]:
    """In the body, tapes are opened that tell ``recorder`` of random states, and ops are written down."""
    token = _AT_WORK.set(recorder)
    try:
        with recorder:
            yield
    finally:
        _AT_WORK.reset(token)


def as_one_call(function: Callable[..., Any], *args: Any) -> None:
    """Call ``function``, which reads and writes its arguments and returns nothing. It may look at values: a recorder takes
    it for one call."""
    mode = topmost_mode()
    if isinstance(mode, Recorder) and not mode.failure:
        mode.call(function, args)
    else:
        function(*args)


def at_work() -> Recorder | None:
    """Return the recorder of the forward that runs in this thread, if there is one."""
    return _AT_WORK.get()
