"""A recorded step as two straight-line Python functions, in which each value goes right after its last use.

In: a :class:`~.instructions.Recording`. Out: a :class:`Program`. Operators are bound, numbers and dtypes are
looked up when it is made; running it is calls of ATen and nothing else.

NOTE [Liveness]

1. A value made in the forward and read in the backward is *saved*: handed over in a list that the backward empties, or, if
   the graph is retained, leaves as it is. All else dies where it is read last.
2. What nobody reads is not made, but for ops that write or draw random numbers.
3. Sums, and what autograd's formulas do in place where nothing watches, are done in place where the memory was made here
   and nobody reads it again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import FunctionType
from typing import Any

import torch

from fxmem.runtime.layout import View
from fxmem.runtime.op_bindings import bound
from fxmem.runtime.programs.fused_calls import FusedCall
from fxmem.runtime.programs.gradient_parts import Gradient, in_parts, made_by, replayed_blocks
from fxmem.runtime.programs.in_place import InPlace
from fxmem.runtime.programs.instructions import Instruction, Recording, Ref
from fxmem.runtime.programs.joined_calls import joined
from fxmem.runtime.programs.program_memory import START, Line, excess_bytes, moments_of
from fxmem.runtime.recompute import replayed, stash_random_states
from fxmem.torch_private import without_modes


@dataclass(frozen=True, slots=True)
class Program:
    """A step as functions: ``forward(*arguments) -> (outputs, saved)``, and ``backward(saved, arguments, tangents,
    gradients)``, a generator: it empties ``saved`` and ``tangents``, and each time it stops, the gradients of one part have
    been put into ``gradients``, which whoever drives it empties."""

    forward: Callable[..., tuple[list[Any], list[Any]]]
    backward: Callable[
        [list[Any], Sequence[torch.Tensor], list[torch.Tensor | None], list[torch.Tensor]], Iterator[None]
    ]
    source: str
    tangents: tuple[View | None, ...]
    """By output leaf: how its gradient lies, None where there is none."""
    strides: tuple[tuple[int, ...], ...]
    """By argument."""
    offsets: tuple[int, ...]
    """By argument: its own in its storage."""
    checked: tuple[int, ...]
    """Arguments that the backward reads: they must be as the forward left them."""
    shared: tuple[int, ...]
    """Output leaves whose memory the backward reads: so must they."""
    not_differentiable: tuple[int, ...]
    """Output leaves that are tensors without a gradient."""
    constants: tuple[torch.Tensor, ...]
    """What else must be as the forward left it."""
    draws_on: tuple[torch.device, ...]
    """Devices whose random numbers the forward draws."""
    parts: tuple[tuple[int, ...], ...]
    """By part of the backward: the arguments that it gives gradients of, which may be several of one, to be summed in this
    order."""
    token: torch.Tensor
    """Without elements, on the device where the backward begins."""
    excess_bytes: int
    """What it takes at its peak above that of the tape."""

    @property
    def is_fused(self) -> bool:
        """Whether chains of its calls are one."""
        return any(isinstance(value, FusedCall) for value in self.forward.__globals__.values())

    def is_for(self, arguments: Sequence[torch.Tensor]) -> bool:
        """Whether these lie as those that it was written for. Asked in every step: nothing of Python runs for each."""
        strides, offsets = map(torch.Tensor.stride, arguments), map(torch.Tensor.storage_offset, arguments)
        return tuple(strides) == self.strides and tuple(offsets) == self.offsets

    def on_others(self, stands_for: Callable[[Any], Any]) -> Program:
        """Return the program with what stands for its constants in their place."""

        def rebound(function: Any) -> Any:
            scope = {name: stands_for(value) for name, value in function.__globals__.items()}
            return FunctionType(function.__code__, scope)

        forward, backward, constants = rebound(self.forward), rebound(self.backward), map(stands_for, self.constants)
        token = torch.empty(0, device=self.token.device)
        return replace(self, forward=forward, backward=backward, constants=tuple(constants), token=token)


def programs_of(recording: Recording, *, at_once: bool, quicker: Iterable[Recording] = ()) -> Iterator[Program]:
    """Yield what runs ``recording`` again, the quickest first. ``at_once``: gradients that it gives go at once
    (:mod:`fxmem.runtime.programs.gradient_parts`). ``quicker``: the same step by fewer calls."""
    by_calls = joined(recording)
    for form in (*quicker, *([] if by_calls is recording else [by_calls]), recording):
        yield _written(recording, form, at_once=at_once)


def _written(tape: Recording, recording: Recording, *, at_once: bool) -> Program:
    with without_modes():
        writer = _Writer(tape, recording, at_once=at_once)
        if writer.excess_bytes > 0:
            writer = _Writer(tape, recording, at_once=at_once, early=True)
        return writer.program()


class _Writer:
    def __init__(self, tape: Recording, recording: Recording, *, at_once: bool, early: bool = False) -> None:
        """``tape``: what was recorded. ``recording``: what is to be written of it. ``early``: no gradient waits that takes
        memory by waiting."""
        needed = {value for value in recording.gradients if value is not None}
        self.recorded, self.at_once = tape, at_once
        self.recording = recording = replace(recording, backward=_alive(recording, recording.backward, needed))
        self.scope: dict[str, Any] = {"stash": _stash, "replayed": replayed}
        self.names: dict[int, str] = {}
        self.arguments = {value: i for i, value in enumerate(recording.arguments)}
        parts = in_parts(recording, at_once=at_once, early=early)
        self.parts, self.gradients = parts.parts, parts.values()
        self.results = {leaf.value for leaf in recording.outputs if isinstance(leaf, Ref)}
        self.backward, self.ends = parts.backward, parts.ends
        made = {value for instruction in self.backward for value in made_by(instruction)}
        tangents = {value for value in recording.tangents if value is not None}
        read = {v for i in self.backward for v in i.reads} | self.gradients
        self.stashes = {i.replays[0] for i in self.backward if i.replays is not None and i.random}
        self._bound: dict[int, str] = {}
        self.saved = sorted(read - made - tangents - set(self.arguments) - set(recording.constants))
        self.forward = _alive(recording, recording.forward, self.results | set(self.saved), self.stashes)
        self.read_in_backward = read
        self.forward_lines = self._lines(self.forward, self.results | set(self.saved), (), {})
        by_end = dict(zip(self.ends, self.parts, strict=True))
        self.backward_lines = self._lines(self.backward, set(), self._given(), by_end)
        self.excess_bytes = self._excess_bytes()
        for number, value in enumerate(recording.constants):
            self.scope[f"k{number}"] = recording.constants[value]
            self.names[value] = f"k{number}"

    def program(self) -> Program:
        recording = self.recording
        source = self._forward() + "\n" + self._backward()
        exec(compile(source, "<fxmem step>", "exec"), self.scope)
        on_storage = {recording.views[v].storage for v in self.read_in_backward}
        outputs = [(i, o.value) for i, o in enumerate(recording.outputs) if isinstance(o, Ref)]
        return Program(
            self.scope["forward"],
            self.scope["backward"],
            source,
            tuple(None if v is None else recording.views[v] for v in recording.tangents),
            tuple(tuple(recording.views[v].stride) for v in recording.arguments),
            tuple(recording.views[v].offset for v in recording.arguments),
            tuple(i for i, v in enumerate(recording.arguments) if recording.views[v].storage in on_storage),
            tuple(i for i, v in outputs if recording.views[v].storage in on_storage),
            tuple(i for i, _ in outputs if not recording.differentiable[i]),
            tuple(t for v, t in recording.constants.items() if recording.views[v].storage in on_storage),
            self._draws_on(),
            tuple(tuple(gradient.argument for gradient in part) for part in self.parts),
            torch.empty(0, device=next(recording.devices[v] for v in recording.tangents if v is not None)),
            self.excess_bytes,
        )

    def _draws_on(self) -> tuple[torch.device, ...]:
        devices = self.recording.devices
        drawing = [i for i in self.forward if i.random]
        return tuple(dict.fromkeys(devices[v] for i in drawing for v in (*i.reads, *i.outputs) if v is not None))

    # -- the two functions ------------------------------------------------------------------------------------------

    def _given(self) -> list[int]:
        """Return what a backward is handed."""
        tangents = [value for value in self.recording.tangents if value is not None]
        return [*self.saved, *tangents, *(v for v in self.arguments if v in self.read_in_backward)]

    def _forward(self) -> str:
        recording = self.recording
        names = [f"a{i}" for i in range(len(recording.arguments))]
        self.names.update({value: f"a{i}" for value, i in self.arguments.items()})
        outputs = ", ".join(self._text(leaf) for leaf in recording.outputs)
        body = [*self._body(self.forward_lines), f"return [{outputs}], [{self._saved()}]"]
        return _function("forward", names, body)

    def _backward(self) -> str:
        saved = self._saved()
        texts = [f"[{saved}] = saved", "saved.clear()"] if saved else []
        texts += [f"a{i} = arguments[{i}]" for v, i in self.arguments.items() if v in self.read_in_backward]
        for i, value in enumerate(self.recording.tangents):
            texts += [f"{self._name(value)} = tangents[{i}]"] if value is not None else []
        texts += ["del arguments", "tangents.clear()", *self._body(self.backward_lines)]
        return _function("backward", ["saved", "arguments", "tangents", "gradients"], texts)

    def _saved(self) -> str:
        return ", ".join([*(self._name(v) for v in self.saved), *(f"r{s}" for s in sorted(self.stashes))])

    def _body(self, lines: Sequence[Line]) -> list[str]:
        """Return the texts of ``lines``."""
        texts: list[str] = []
        blocks = replayed_blocks([line.instruction for line in lines])
        for place, line in enumerate(lines):
            instruction = line.instruction
            begins, is_inside = blocks.get(place, (False, False))
            if begins and instruction.replays is not None:
                texts.append(f"with r{instruction.replays[0]}:")
            inside = "    " * is_inside
            if instruction is not START:
                call, extra = self._line(instruction)
                texts += [f"{inside}{text}" for text in (call, *_deleted(extra))]
            texts += self._handing_over(line, "" if line.given else inside)
        return texts

    def _lines(
        self,
        instructions: list[Instruction],
        kept: set[int],
        given: Sequence[int],
        parts: Mapping[int, Sequence[Gradient]],
    ) -> list[Line]:
        """Return ``instructions`` as they are run; ``kept`` lives to the end. ``given``, of a backward: what it is handed,
        which dies after its last use. ``parts``: what is handed over, by the instruction after which it is."""
        ends, last = self._ends(instructions, kept, given, parts)
        in_place = InPlace(self.recording, last, kept | self.gradients, given, self.arguments)
        lines = [Line(START, tuple(ends[-1]), _values(parts.get(-1, ())))] if -1 in ends or -1 in parts else []
        for place, instruction in enumerate(instructions):
            run = in_place.changed(instruction, place)
            lines.append(Line(run, tuple(ends.get(place, ())), _values(parts.get(place, ()))))
        return lines

    def _ends(
        self,
        instructions: list[Instruction],
        kept: set[int],
        given: Sequence[int],
        parts: Mapping[int, Sequence[Gradient]],
    ) -> tuple[dict[int, list[int]], dict[int, int]]:
        """Return which values die by the instruction after which they do, and by value where it is used last."""
        last: dict[int, int] = dict.fromkeys(given, -1)
        for place, instruction in enumerate(instructions):
            last.update(dict.fromkeys(instruction.reads, place))
            last.update(dict.fromkeys(made_by(instruction), place))
        for place, part in parts.items():
            last.update((g.value, max(place, last.get(g.value, -1))) for g in part)
        ends: dict[int, list[int]] = {}
        for value, place in last.items():
            is_ours = value not in self.arguments or value in given
            if is_ours and value not in kept and value not in self.recording.constants:
                ends.setdefault(place, []).append(value)
        return ends, last

    def _handing_over(self, line: Line, inside: str) -> list[str]:
        """Return the texts that hand over gradients and let go of what dies."""
        dead = [inside + text for text in _deleted([self._name(value) for value in line.dying])]
        given = ", ".join(map(self._name, line.given))
        return [f"gradients += [{given}]", *dead, "yield"] if given else dead

    def _excess_bytes(self) -> int:
        """Return by how much more it takes than the tape, in forward, backward or between (NOTE [A program's peak])."""
        recording, recorded = self.recording, self.recorded
        held = [value for value in {*self.results, *self.saved} if value not in self.arguments]
        given, staying = [value for value in self._given() if value not in self.arguments], set[int]()
        if not self.at_once:
            first = {g.argument: g.value for part in reversed(self.parts) for g in reversed(part)}
            staying = set(first.values())
        between = moments_of(recording, [Line(START)], held, staying)
        excess = [
            excess_bytes(
                moments_of(recording, self.forward_lines, (), staying), recorded.forward, lambda i: i.live_bytes
            ),
            max(nbytes for _, nbytes in between) - recorded.held_bytes,
        ]
        for outputs in (set[int](), self.results):  # let go of before the backward, and after it

            def tape(call: Instruction, is_held: bool = bool(outputs)) -> int:
                came_bytes = 0 if self.at_once else call.came_bytes
                return call.live_bytes + came_bytes - (call.output_bytes if is_held else 0)

            ours = moments_of(recording, self.backward_lines, given, staying, outputs)
            excess.append(excess_bytes(ours, recorded.backward, tape))
        return max(excess)

    # -- one line ---------------------------------------------------------------------------------------------------

    def _line(self, instruction: Instruction) -> tuple[str, list[str]]:
        """Return the line of a call, and names that are none of a value and go at once."""
        if instruction.target is None:
            return f"r{instruction.outputs[0]} = stash({self._constant(instruction.devices)})", []
        args = [self._text(a) for a in instruction.args]
        args += [f"{name}={self._text(a)}" for name, a in instruction.kwargs.items()]
        call = f"{self._function(instruction)}({', '.join(args)})"
        if all(value is None for value in instruction.outputs):
            return call, []
        if instruction.is_single:
            return f"{self._text_of_made(instruction.outputs[0], 0)} = {call}", []
        names = [self._text_of_made(value, place) for place, value in enumerate(instruction.outputs)]
        extra = [name for name, value in zip(names, instruction.outputs, strict=True) if value is None]
        return f"[{', '.join(names)}] = {call}", extra

    def _text_of_made(self, value: int | None, place: int) -> str:
        return f"x{place}" if value is None else self._name(value)

    def _function(self, instruction: Instruction) -> str:
        assert instruction.target is not None
        views, devices = self.recording.views, self.recording.devices
        function = bound(instruction.target, instruction.args, instruction.kwargs, _lies(views, devices))
        if id(function) not in self._bound:
            name = f"{instruction.target.__name__.replace('.', '_')}_{len(self.scope)}"
            self._bound[id(function)], self.scope[name] = name, function
        return self._bound[id(function)]

    def _name(self, value: int) -> str:
        return self.names.setdefault(value, f"v{value}")

    def _text(self, argument: Any) -> str:
        if isinstance(argument, Ref):
            return self._name(argument.value)
        if argument is None or type(argument) in (bool, int, str):
            return repr(argument)
        if type(argument) is float and math.isfinite(argument):
            return repr(argument)
        if type(argument) in (list, tuple) and any(isinstance(part, Ref) for part in argument):
            return f"[{', '.join(self._text(part) for part in argument)}]"
        return self._constant(argument)

    def _constant(self, value: Any) -> str:
        name = f"c{len(self.scope)}"
        self.scope[name] = value
        return name


def _lies(views: list[View], devices: list[torch.device]) -> Callable[[Any], tuple[View, torch.device] | None]:
    return lambda leaf: (views[leaf.value], devices[leaf.value]) if isinstance(leaf, Ref) else None


def _alive(
    recording: Recording, instructions: list[Instruction], read: set[int], stashes: set[int] | None = None
) -> list[Instruction]:
    """Leave out what makes nothing that is read (NOTE [Liveness], rule 2)."""
    read, alive = set(read), []
    for instruction in reversed(instructions):
        if instruction.target is None:
            keep = stashes is None or instruction.outputs[0] in stashes
        else:
            keep = instruction.writes or instruction.random or not read.isdisjoint(instruction.outputs)
            keep = keep or any(recording.views[v].storage in recording.written for v in instruction.reads)
        if keep:
            read.update(instruction.reads)
            alive.append(instruction)
    return alive[::-1]


def _values(gradients: Iterable[Gradient]) -> tuple[int, ...]:
    return tuple(gradient.value for gradient in gradients)


def _stash(devices: Sequence[torch.device]) -> replayed:
    return replayed(stash_random_states(devices))


def _deleted(names: list[str]) -> list[str]:
    return [f"del {', '.join(dict.fromkeys(names))}"] if names else []


def _function(name: str, arguments: list[str], lines: list[str]) -> str:
    return f"def {name}({', '.join(arguments)}):\n" + "".join(f"    {line}\n" for line in lines)
