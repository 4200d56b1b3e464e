"""Backwards that were recorded as two calls, so as to hold less, as one where there is room: less for the host to launch.

In: a recording whose step has split convolutions (:mod:`fxmem.runtime.lean_backwards`). Out: one in which a call gives the
gradients of input and weight together, as eager's does, wherever that is alive which was alive at the recorded peak, and no
more. The kernels are the same, and so are the bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import product

from fxmem.op_facts.kinds import GradientsByMask
from fxmem.op_facts.lookup import by_op
from fxmem.runtime.programs.instructions import Instruction, Recording
from fxmem.torch_private import contiguous_strides

_BY_MASK = by_op(GradientsByMask)


def joined(recording: Recording) -> Recording:
    """Return the recording with such calls as one; the very same object if there are none."""
    backward: list[Instruction | None] = list(recording.backward)
    has_room = room_in(recording.backward)
    before: int | None = None
    """Where the call of this kind is that came last, if nothing was written since."""
    for place, call in enumerate(recording.backward):
        if call.target in _BY_MASK:
            both = None if before is None else _both(recording, recording.backward[before], call)
            if before is not None and both is not None and has_room(both):
                backward[before], backward[place], before = both, None, None
            else:
                before = place
        elif call.writes or call.random:
            before = None
    if None not in backward:
        return recording
    return replace(recording, backward=[call for call in backward if call is not None])


def _both(recording: Recording, one: Instruction, other: Instruction) -> Instruction | None:
    """Return the call that gives what ``one`` and ``other`` do; None unless ``other`` gives the first gradient, of an input
    that it does not look at, and ``one`` the rest."""
    unread, (result, *_) = _BY_MASK[one.target].unread, other.outputs
    (*args, mask), (*other_args, other_mask) = one.args, other.args
    x = args.pop(unread)
    like_x = other_args.pop(unread)
    view, like = recording.views[x.value], recording.views[like_x.value]
    is_split = not mask[0] and any(mask) and other_mask[0] and not any(other_mask[1:])
    is_alike = one.target is other.target and args == other_args and view.size == like.size and view.dtype == like.dtype
    lies_well = view.stride == contiguous_strides(view.size)  # else which kernel runs may depend on it
    is_plain = not (one.kwargs or other.kwargs or one.replays or other.replays)
    if result is None or not (is_split and is_alike and lies_well and is_plain):
        return None
    return replace(
        one,
        args=(*one.args[:-1], [True, *mask[1:]]),
        outputs=(result, *one.outputs[1:]),
        live_bytes=one.live_bytes + recording.nbytes[recording.views[result].storage],
        inside_bytes=max(one.inside_bytes, other.inside_bytes),
    )


def room_in(calls: Sequence[Instruction]) -> Callable[[Instruction], bool]:
    """Return what tells if a call holds no more than the most that is alive in ``calls``: with and without outputs and
    gradients that are there, whichever stay."""

    def alive(call: Instruction) -> list[int]:
        both = product((0, call.came_bytes), (0, call.output_bytes))
        return [call.live_bytes + call.inside_bytes + came - outputs for came, outputs in both]

    peaks = list(map(max, zip(*map(alive, calls), strict=True)))
    return lambda call: all(nbytes <= peak for nbytes, peak in zip(alive(call), peaks, strict=True))
