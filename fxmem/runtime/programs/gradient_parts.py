"""In how many parts a program's backward gives the gradients of its arguments, and which when.

In: a :class:`~.instructions.Recording`. Out: its :class:`Parts`: the backward without the sums that autograd
makes of what it is given, and after which instruction which gradients are handed over.

NOTE [Parts]

1. Autograd adds up what it is given for one argument in the order in which it comes: those of one call after the other
   where a backward goes through several, and a sum made beforehand has other bits. So the sums of an argument that is used
   several times are taken out, and each of its gradients is given by itself, in the order in which the engine added them.
2. A gradient that is handed over is added to the one that is there, or to those handed over before, and its memory is free;
   one that waits for the others takes memory that no plan counted. Each part costs the host an autograd node. So a gradient
   waits for the next one as long as the peak stays that of handing over each at once.
3. Where gradients are there before, all that is handed over goes at once; else the first gradient of an argument stays.
4. Autograd adds in the memory of one of two gradients, but not if both are views: then the sum is there beside them.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate

from fxmem.runtime.programs.instructions import SUM, SUMS, Instruction, Recording, Ref, written_by
from fxmem.torch_private import OpOverload


@dataclass(frozen=True, slots=True)
class Gradient:
    """One of an argument's gradients. ``place``: the instruction of the backward after which it is complete; -1: before
    all."""

    place: int
    argument: int
    value: int


@dataclass(frozen=True, slots=True)
class Parts:
    """``ends``: by part, the instruction after which it is handed over, in order; -1: before all."""

    backward: list[Instruction]
    parts: tuple[tuple[Gradient, ...], ...]
    ends: tuple[int, ...]

    def values(self) -> set[int]:
        """Return all gradients."""
        return {gradient.value for part in self.parts for gradient in part}


def in_parts(recording: Recording, *, at_once: bool, early: bool = False) -> Parts:
    """Return the gradients in as few parts as reach the least peak (NOTE [Parts]). ``at_once``: gradients that are handed
    over go at once. ``early``: none of them waits that does."""
    backward, gradients = _unsummed(recording)
    inside = _inside_of_replays(backward)
    places = [place for place in range(-1, len(backward)) if place not in inside]
    ends = [places[bisect_left(places, gradient.place)] for gradient in gradients]
    stays = _staying(gradients) if not at_once else set()
    sums = _sum_bytes(recording, backward, gradients)
    live = _live_bytes(recording, backward, gradients, ends, stays, sums)
    groups: dict[int, list[Gradient]] = {}
    waiting, start, waiting_bytes, sum_bytes, peak_bytes = list[Gradient](), -1, 0, 0, max(live)
    for gradient, end in zip(gradients, ends, strict=True):
        allowed = 0 if early and waiting_bytes else peak_bytes
        if waiting and max([live[end + 1] + sum_bytes, *live[start + 2 : end + 2]]) + waiting_bytes > allowed:
            groups.setdefault(start, []).extend(waiting)
            waiting, waiting_bytes, sum_bytes = [], 0, 0
        waiting.append(gradient)
        start, sum_bytes = end, max(sum_bytes, sums[gradient])
        waiting_bytes += 0 if gradient in stays else recording.nbytes[recording.views[gradient.value].storage]
    groups.setdefault(start, []).extend(waiting)
    return Parts(backward, tuple(map(tuple, groups.values())), tuple(groups))


def _staying(gradients: Sequence[Gradient]) -> set[Gradient]:
    """Return the first gradient of each argument."""
    return set({gradient.argument: gradient for gradient in reversed(gradients)}.values())


# -- gradients that are summed ---------------------------------------------------------------------------------------------


def _unsummed(recording: Recording) -> tuple[list[Instruction], list[Gradient]]:
    """Return the backward without autograd's sums, and all gradients in the order in which they are complete."""
    found: list[tuple[int, int]] = []
    sums: set[int] = set()
    for argument, (values, its_sums) in _summed(recording).items():
        found += [(argument, value) for value in values]
        sums |= its_sums
    backward = [instruction for place, instruction in enumerate(recording.backward) if place not in sums]
    complete = _complete(recording, backward)
    gradients = [
        Gradient(complete.get(recording.views[value].storage, -1), argument, value) for argument, value in found
    ]
    return backward, sorted(gradients, key=lambda gradient: gradient.place)


def sums_of_arguments(recording: Recording) -> set[int]:
    """Return the places in the backward of the sums that are taken out of it."""
    return set().union(*(sums for _, sums in _summed(recording).values()))


def _summed(recording: Recording) -> dict[int, tuple[list[int], set[int]]]:
    """Return by argument that has gradients what :func:`_summands` tells of them."""
    given = zip(recording.gradients, recording.num_uses, strict=True)
    return {
        argument: _summands(recording.backward, value, uses)
        for argument, (value, uses) in enumerate(given)
        if value is not None
    }


def _summands(backward: Sequence[Instruction], value: int, num_uses: int) -> tuple[list[int], set[int]]:
    """Return the gradients that ``value`` is the sum of, in the order in which they were added, and the places of the
    sums. A sum that others read is none of an argument's."""
    later: list[int] = []
    sums: set[int] = set()
    for place in range(len(backward) - 1, -1, -1):
        instruction = backward[place]
        if len(later) == num_uses - 1:
            break
        if instruction.target in SUMS and len(instruction.args) == 2 and not instruction.kwargs:
            first, second = instruction.args
            result = instruction.outputs[0] if instruction.target is SUM else getattr(first, "value", None)
            if result == value and isinstance(first, Ref) and isinstance(second, Ref):
                later.append(second.value)
                sums.add(place)
                value = first.value
                continue
        if value in instruction.reads:
            break
    return [value, *reversed(later)], sums


def _complete(recording: Recording, backward: Iterable[Instruction]) -> dict[int, int]:
    """Return by storage the instruction that writes to it last."""
    complete: dict[int, int] = {}
    for place, instruction in enumerate(backward):
        written = written_by(instruction) if isinstance(instruction.target, OpOverload) else instruction.reads
        for value in (*made_by(instruction), *written):
            complete[recording.views[value].storage] = place
    return complete


# -- places ----------------------------------------------------------------------------------------------------------------


def _inside_of_replays(instructions: Sequence[Instruction]) -> set[int]:
    """Return the places after which a run from stashed random states goes on."""
    blocks = replayed_blocks(instructions)
    return {p for p in blocks if p + 1 in blocks and not blocks[p + 1][0]}


def replayed_blocks(instructions: Sequence[Instruction]) -> dict[int, tuple[bool, bool]]:
    """Return, by place, whether a run from stashed random states begins there, and whether it is in one: from the first
    random op of the run to its last."""
    ends: dict[tuple[int, int], tuple[int, int]] = {}
    for place, instruction in enumerate(instructions):
        if instruction.replays is not None and instruction.random:
            ends[instruction.replays] = ends.get(instruction.replays, (place, place))[0], place
    return {p: (p == first, True) for first, last in ends.values() for p in range(first, last + 1)}


# -- memory ----------------------------------------------------------------------------------------------------------------


def _live_bytes(
    recording: Recording,
    backward: Sequence[Instruction],
    gradients: Sequence[Gradient],
    ends: Sequence[int],
    stays: set[Gradient],
    sums: dict[Gradient, int],
) -> list[int]:
    """Return the bytes alive before a backward and at each of its instructions, of what was saved for it, what it makes and
    what kernels take, if each gradient goes at its end, but for what ``stays``. ``sums``: what adding it takes."""
    views = recording.views
    lasting = {views[v].storage for v in (*recording.arguments, *recording.constants)}
    born: dict[int, int] = {}
    dies: dict[int, int] = {}
    for place, instruction in enumerate(backward):
        for value in instruction.reads:
            born.setdefault(views[value].storage, -1)
            dies[views[value].storage] = place
        for value in made_by(instruction):
            born.setdefault(views[value].storage, place)
            dies[views[value].storage] = place
    for gradient, end in zip(gradients, ends, strict=True):
        storage = views[gradient.value].storage
        born.setdefault(storage, -1)
        dies[storage] = max(dies.get(storage, -1), len(backward) if gradient in stays else end)
    changes = [0] * (len(backward) + 3)
    for storage in born.keys() - lasting:
        end = dies[storage]
        in_place = 0 <= end < len(backward) and backward[end].target in SUMS and born[storage] < end
        changes[born[storage] + 1] += recording.nbytes[storage]
        changes[end + (1 if in_place else 2)] -= recording.nbytes[storage]
    for gradient, end in zip(gradients, ends, strict=True):
        changes[end + 1] += sums[gradient]
        changes[end + 2] -= sums[gradient]
    live = list(accumulate(changes))
    for place, instruction in enumerate(backward):
        live[place + 1] += instruction.inside_bytes
    return live


def _sum_bytes(
    recording: Recording, backward: Iterable[Instruction], gradients: Sequence[Gradient]
) -> dict[Gradient, int]:
    """Return by gradient what adding it to its argument's earlier ones takes (NOTE [Parts], rule 4)."""
    views, owners = recording.views, dict[int, int]()
    for instruction in backward:
        for value in made_by(instruction):
            owners.setdefault(views[value].storage, value)
    is_first, sums = _staying(gradients), dict[Gradient, int]()
    for gradient in gradients:
        storage = views[gradient.value].storage
        is_view = owners.get(storage, gradient.value) != gradient.value
        sums[gradient] = recording.nbytes[storage] if is_view and gradient not in is_first else 0
    return sums


def made_by(instruction: Instruction) -> list[int]:
    """Return the values that a call makes."""
    return [] if instruction.target is None else [v for v in instruction.outputs if v is not None]
