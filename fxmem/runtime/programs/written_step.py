"""A step of an emitted graph, run for nothing and written down.

In: the steps of a graph, a call's arguments, how gradients of its outputs lay in an earlier step. Out: a
:class:`~fxmem.runtime.programs.instructions.Recording`, and numbers that tell the bits of what the step made.

NOTE [Writing down]

A step that is written down takes no more memory than the tape's, but for copies of buffers that the model writes and for
sums of gradients, which are not made in place under a mode: its gradients are looked at and let go of as they come. It is
no part of the training, so where it fails, for whatever reason, steps stay on the tape.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import torch
from torch.autograd.graph import get_gradient_edge

from fxmem.op_facts.kinds import RecordedRole
from fxmem.op_facts.lookup import with_role
from fxmem.runtime.autocast import autocast_as_in_forward, casts_kept
from fxmem.runtime.layout import View
from fxmem.runtime.programs import program_call
from fxmem.runtime.programs.instructions import Recording, Ref, written_by
from fxmem.runtime.programs.program import Program
from fxmem.runtime.programs.program_call import backward_through
from fxmem.runtime.programs.recording import Inside, Recorder, recording_with
from fxmem.torch_private import graph_nodes, storage_key, without_autocast, without_modes

CASTS = with_role(RecordedRole, "cast")
CAST_NODES = {f"{op.__name__.partition('.')[0].title().replace('_', '')}Backward0" for op in CASTS}
"""What autograd calls them."""
NUM_AT_A_TIME = 1 << 16
"""Elements whose bits are looked at in one go."""

Seen = dict[int, tuple[View, torch.device]]
"""By output, how its gradient lay."""


class Steps(program_call.Steps, Protocol):
    """What is needed of the steps of a graph."""

    constants: tuple[torch.Tensor, ...]
    is_cast: bool
    """Some of its ops are under autocast."""
    inside: Inside


def written_down(
    steps: Steps, leaves: Sequence[Any], arguments: tuple[torch.Tensor, ...], seen: Seen, *, is_tried: bool
) -> tuple[Recording, list[int | None], str]:
    """Return what was written down of a step, the bits of what it made if it ``is_tried``, and why it is of no use."""
    recorder = Recorder(steps.inside)
    recording = recorder.recording
    recording.arguments = [recorder.root(argument) for argument in arguments]
    copies = {name: buffer.clone() for name, buffer in steps.written.items()}
    for name, copy in copies.items():
        recording.constants[recorder.root(copy)] = steps.written[name]
    recording.written = frozenset(recording.views[v].storage for v in recording.constants)
    for constant in steps.constants:
        recorder.constant(constant)
    gradients, bits = _Gradients(recorder, is_tried=is_tried), list[int | None]()
    with recording_with(recorder), casts_kept(False):
        made, aliases = steps.on_tape(leaves, gradients.stand_in, copies)
    outputs = list(made)
    del made
    if is_tried:
        bits = bits_of(outputs)
    recording.outputs = [Ref(recorder.find(o)) if isinstance(o, torch.Tensor) else o for o in outputs]
    recording.differentiable = [isinstance(o, torch.Tensor) and o.requires_grad for o in outputs]
    uses = iter(_num_uses(outputs, aliases))
    aliases.clear()
    recording.num_uses = [next(uses) if argument.requires_grad else 0 for argument in arguments]
    recorder.begin_backward(outputs)
    given = _drawn(seen, len(outputs))
    recording.tangents = [None if t is None else recorder.given(t) for t in given]
    with torch.no_grad(), autocast_as_in_forward(None, steps.devices), recorder:
        backward_through(outputs, given)
    found = iter(gradients.found)
    recording.gradients = [next(found) if argument.requires_grad else None for argument in arguments]
    refusal = recorder.failure or _cannot_run(recording)
    if steps.is_cast and _casts_twice(recording):
        refusal = refusal or "it casts a parameter twice"
    return recording, [*bits, *gradients.bits], refusal


def bits_by(
    program: Program,
    arguments: tuple[torch.Tensor, ...],
    seen: Seen,
    written: dict[str, torch.Tensor],
    *,
    in_place: bool,
) -> list[int | None]:
    """Return the bits of a step by a program, on the gradients that were drawn for the one written down. ``written``:
    buffers that it writes, which are put back. ``in_place``: sum gradients of one argument as autograd does; where the
    program reads one later, that gives other bits."""
    left = Counter(argument for part in program.parts for argument in part)
    bits: dict[int, int | None] = {}
    sums: dict[int, torch.Tensor] = {}
    before = {name: buffer.clone() for name, buffer in written.items()}
    try:
        with torch.no_grad(), without_autocast():
            outputs, saved = program.forward(*arguments)
            bits_of_outputs, given = bits_of(outputs), _drawn(seen, len(outputs))
            del outputs
            found: list[torch.Tensor] = []
            driver = program.backward(saved, arguments, given, found)
            for part in program.parts:
                next(driver, None)
                for argument, gradient in zip(part, found, strict=True):
                    left[argument] -= 1
                    total = gradient
                    if argument in sums:
                        total, others = sums.pop(argument), (*arguments, *given, *program.constants, *sums.values())
                        may_write = in_place and _is_alone(total, others, found)
                        total = total.add_(gradient) if may_write else total + gradient
                    if left[argument]:
                        sums[argument] = total
                    else:
                        (bits[argument],) = bits_of([total])
                    del total, gradient
                found.clear()
    finally:
        with torch.no_grad():
            for name, buffer in written.items():
                buffer.copy_(before[name])
    with_grad = [i for i, argument in enumerate(arguments) if argument.requires_grad]
    return [*bits_of_outputs, *[bits.get(i) for i in with_grad]]


def _is_alone(tensor: torch.Tensor, others: Sequence[Any], found: Sequence[torch.Tensor]) -> bool:
    """Whether ``tensor`` is a whole storage that none of the ``others`` has, nor another tensor of ``found``."""
    key = storage_key(tensor)
    is_shared = any(isinstance(t, torch.Tensor) and storage_key(t) == key for t in others)
    is_shared |= any(t is not tensor and storage_key(t) == key for t in found)
    return not is_shared and tensor.untyped_storage().nbytes() == tensor.nbytes


class _Gradients:
    """The gradients of a step that is written down, in the order of what stands for the arguments."""

    def __init__(self, recorder: Recorder, *, is_tried: bool) -> None:
        """``is_tried``: whether their bits are looked at."""
        self.found: list[int | None] = []
        self.bits: list[int | None] = []
        self._recorder, self._is_tried = recorder, is_tried

    def stand_in(self, argument: torch.Tensor) -> torch.Tensor:
        """Return what stands for ``argument``."""
        place = len(self.found)
        self.found.append(None)
        self.bits.append(None)

        def put(gradient: torch.Tensor) -> None:
            self.found[place] = self._recorder.came(gradient)
            if self._is_tried:
                (self.bits[place],) = bits_of([gradient])

        leaf = argument.detach().requires_grad_()
        leaf.register_hook(put)
        leaf.register_post_accumulate_grad_hook(_let_go)
        return leaf


def _let_go(leaf: torch.Tensor) -> None:
    leaf.grad = None


def _num_uses(outputs: Sequence[Any], aliases: Sequence[torch.Tensor]) -> list[int]:
    """Return how many edges of the graph of ``outputs`` lead to each alias."""
    tensors = [o for o in outputs if isinstance(o, torch.Tensor)]
    edges: Counter[tuple[Any, int]] = Counter((o.grad_fn, o.output_nr) for o in tensors)
    for node in graph_nodes(tensors):
        edges.update(node.next_functions)
    ends = map(get_gradient_edge, aliases)
    return [edges[end.node, end.output_nr] for end in ends]


def _cannot_run(recording: Recording) -> str:
    """Say why a step cannot be run from what was written of it; nothing if it can."""
    views = recording.views

    def storages(values: Iterable[int | None]) -> set[int]:
        return {views[value].storage for value in values if value is not None}

    others = storages((*recording.arguments, *recording.constants)) - recording.written
    for instruction in recording.forward:
        if not others.isdisjoint(storages(written_by(instruction))):
            return "it writes to an input or a parameter"
        touched = not recording.written.isdisjoint(storages(instruction.reads))
        if touched and not ("batch_norm" in str(instruction.target) or _counts(views, instruction.reads)):
            return "it reads a buffer that it writes"
    made = storages(value for i in recording.forward if i.target is not None for value in i.outputs)
    handed = made | others | recording.written | storages(recording.tangents)
    if any(not handed.isdisjoint(storages(written_by(i))) for i in recording.backward):
        return "its backward writes to what its forward made, or to the gradient of an output"
    return ""


def _casts_twice(recording: Recording) -> bool:
    """True if a forward casts an argument that requires grad more than once."""
    cast = Counter(v for i in recording.forward if i.target in CASTS for v in i.reads)
    return any(cast[v] > 1 for v, uses in zip(recording.arguments, recording.num_uses, strict=True) if uses)


def shares_casts(outputs: Sequence[Any]) -> bool:
    """True if the graph of ``outputs``, made under autocast, reads one cast of a leaf several times."""
    edges: Counter[Any] = Counter()
    tensors = [o for o in outputs if isinstance(o, torch.Tensor)]
    for node in graph_nodes(tensors):
        edges.update(following for following, _ in node.next_functions)
    return any(uses > 1 and node is not None and _casts_a_leaf(node) for node, uses in edges.items())


def _casts_a_leaf(node: Any) -> bool:
    return node.name() in CAST_NODES and all(hasattr(following, "variable") for following, _ in node.next_functions)


def _counts(views: Sequence[View], reads: Sequence[int]) -> bool:
    """True if what is read is a whole number, as BatchNorm's counter of batches."""
    return all(not views[v].dtype.is_floating_point and not views[v].size for v in reads)


def _drawn(seen: Seen, num_outputs: int) -> list[torch.Tensor | None]:
    """Return random gradients of outputs that lie as those ``seen``."""
    drawn: list[torch.Tensor | None] = [None] * num_outputs
    for place, (view, device) in sorted(seen.items()):
        end = view.offset + 1 + sum((n - 1) * k for n, k in zip(view.size, view.stride, strict=True))
        values = torch.randn(end, dtype=view.dtype, device=device)
        drawn[place] = values.as_strided(view.size, view.stride, view.offset).detach()  # no base that holds its memory
    return drawn


def bits_of(values: Iterable[Any]) -> list[int | None]:
    """Return a number for each tensor that another bit in it would change, in all likelihood."""
    with without_modes():
        return [_bits(value.detach()) if isinstance(value, torch.Tensor) else None for value in values]


def _bits(tensor: torch.Tensor) -> int:
    """As :func:`bits_of`, a piece at a time: what sums and copies take beside the tensor stays small."""
    tensor = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
    tensor = tensor.permute(sorted(range(tensor.dim()), key=tensor.stride, reverse=True))
    if tensor.is_contiguous():
        return sum(_bits_of_piece(piece) for piece in tensor.flatten().split(NUM_AT_A_TIME))
    if tensor.numel() > NUM_AT_A_TIME:
        dim = max(range(tensor.dim()), key=tensor.size)
        half = tensor.shape[dim] // 2
        return _bits(tensor.narrow(dim, 0, half)) + _bits(tensor.narrow(dim, half, tensor.shape[dim] - half))
    return _bits_of_piece(tensor)


def _bits_of_piece(tensor: torch.Tensor) -> int:
    whole = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.itemsize]
    return int(tensor.contiguous().view(whole).sum(dtype=torch.int64))
