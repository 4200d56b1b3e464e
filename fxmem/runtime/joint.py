"""A step as one autograd Function that runs straight-line code: what the host must do, and no more.

In: the emitted graph of a call. Out: the same outputs, and gradients of the same bits. The first step runs the graph as it
is, on the tape, and shows which outputs have a gradient. Before the next one a step on the same arguments is run for
nothing and written down (:mod:`fxmem.runtime.recording`); from then on steps run what was written
(:mod:`fxmem.runtime.program`).

NOTE [What stays on the tape]

1. Calls that a program is not for: under autocast or saved-tensor hooks, in anomaly mode, with hooks that wait for a
   parameter's gradient and may take memory that was planned for another moment, among several processes, which wait for
   each gradient; with inputs that lie otherwise in their storage.
2. Graphs whose calls the recorder cannot follow, that write to parameters or inputs, that return an input, or two outputs
   on one storage; that read a buffer which they write, whose old value rule 3 would need.
3. A backward that a program is not for (``create_graph``, gradients of other outputs than were recorded, or laid out
   otherwise, switches of kernels that were changed since) runs the forward again on the tape, from the random states that
   it began with and on copies of the buffers that it writes, and goes backward through that. It takes longer, and no
   budget is kept. From then on calls stay on the tape. Gradients that are differentiated have two graphs in such a step,
   where eager has one: what flows through both is added later, so it equals eager's but for rounding, and a warning says
   so. A loop that differentiates gradients from its first step on never comes to programs.
4. ``retain_graph`` needs no tape: what is saved stays, what is recomputed goes each time.

NOTE [Writing down]

A step that is written down takes no more memory than the tape's, but for copies of buffers that the model writes: its
gradients are looked at and let go of as they come. It is no part of the training, so where it fails, for whatever reason,
steps stay on the tape.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import fx
from torch.func import functional_call

from fxmem.runtime.layout import View
from fxmem.runtime.program import Program, program_of
from fxmem.runtime.program_call import GradientTaken, ProgramCall, backward_through, gated
from fxmem.runtime.recompute import replayed, stash_random_states
from fxmem.runtime.recording import Recorder, Recording, Ref, recording_with, written_by
from fxmem.runtime.step_in_backward import num_processes
from fxmem.torch_private import current_backward, graph_nodes, has_saved_tensor_hooks, storage_key, without_modes

NUM_LOOKED_AT = 4
"""Parameters that are asked whether they have a gradient."""

NUM_AT_A_TIME = 1 << 16
"""Elements whose bits are looked at in one go."""

Run = Callable[[Callable[..., Any], Sequence[Any]], Sequence[Any]]
"""Calls a graph with leaves, as calls of it are made; returns the leaves of its output."""

_Seen = dict[int, tuple[View, torch.device]]
"""By output, how its gradient lay."""
_late_hooks_of = attrgetter("_post_accumulate_grad_hooks")


def some_of(parameters: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Return those that are asked whether they have a gradient, spread over the model."""
    return tuple(parameters[:: max(1, len(parameters) // NUM_LOOKED_AT)])


class JointSteps:
    """The steps of one emitted graph, at one size."""

    def __init__(
        self,
        graph_module: fx.GraphModule,
        run: Run,
        written: Sequence[torch.Tensor],
        devices: Sequence[torch.device],
        refusal: str = "",
    ) -> None:
        """``written``: tensors that the graph writes. ``devices``: those it works on. ``refusal``: why it stays on the
        tape."""
        self.graph_module, self.refusal, self.devices = graph_module, refusal, tuple(devices)
        self._run = run
        named = dict(graph_module.named_parameters())
        self.names = tuple(name for name, parameter in named.items() if parameter.requires_grad)
        self.parameters = tuple(named[name] for name in self.names)
        constants = [*named.values(), *graph_module.buffers(), *_attributes(graph_module)]
        self.constants = tuple(t for t in constants if not t.requires_grad)
        ids = {id(tensor) for tensor in written}
        self.written = {name: b for name, b in graph_module.named_buffers() if id(b) in ids}
        if len({id(b) for b in self.written.values()}) < len(ids):
            self.refusal = self.refusal or "it writes to what is no buffer"
        if any(b.requires_grad for b in graph_module.buffers()):
            self.refusal = self.refusal or "a buffer requires grad"
        self.looked_at = some_of(self.parameters)
        self.program: Program | None = None
        """The one used last."""
        self._recording: Recording | None = None
        self._programs: dict[bool, Program] = {}
        """By whether gradients are there before."""
        self._is_tried = all(device.type == "cpu" for device in self.devices)
        """Whether a program's bits are compared with the tape's: a kernel may ask whether autograd is on."""
        self.seen: dict[int, _Seen] = {}
        """By backward and output, how its gradient lay."""

    def run(self, leaves: Sequence[Any]) -> Sequence[Any]:
        """Return the output leaves of a call."""
        if self.refusal:
            return self._run(self.graph_module, leaves)
        arguments = (*self.parameters, *[leaf for leaf in leaves if isinstance(leaf, torch.Tensor)])
        if self._is_for_tape(arguments):
            return self._run(self.graph_module, leaves)
        if self._recording is None:
            if not self.seen or len({tuple(sorted(seen)) for seen in self.seen.values()}) > 1:
                return self._watched(leaves, arguments)
            self._recording = self._recorded(leaves, arguments)
        program = self._program()
        if program is None or any(a.storage_offset() != o for a, o in zip(arguments, program.offsets, strict=True)):
            return self._run(self.graph_module, leaves)
        return ProgramCall(self, leaves, arguments, program).run()

    def _program(self) -> Program | None:
        """Return the program for a call, as things are; None if there is none."""
        if self._recording is None:
            return None
        at_once = any(parameter.grad is not None for parameter in self.looked_at)
        if at_once not in self._programs:
            self._programs[at_once] = program_of(self._recording, at_once=at_once)
        self.program = self._programs[at_once]
        return self.program

    def _is_for_tape(self, arguments: tuple[torch.Tensor, ...]) -> bool:
        return (
            any(torch.is_autocast_enabled(device.type) for device in self.devices)
            or has_saved_tensor_hooks()
            or torch.is_anomaly_enabled()
            or any(map(_late_hooks_of, self.parameters))
            or num_processes() > 1
        )

    def _watched(self, leaves: Sequence[Any], arguments: tuple[torch.Tensor, ...]) -> Sequence[Any]:
        """Return the outputs of a call on the tape, whose backward shows which of them have a gradient."""
        outputs = self._run(self.graph_module, leaves)
        self.refusal = _refusal_of(outputs, arguments)
        self.seen.clear()
        return outputs if self.refusal else gated(self._note, outputs)

    def _note(self, place: int, tangent: torch.Tensor) -> torch.Tensor:
        if torch.is_grad_enabled():
            self.refusal = "its gradients are differentiated"
        self.seen.setdefault(current_backward(), {})[place] = View.of(tangent, 0), tangent.device
        return tangent

    def _recorded(self, leaves: Sequence[Any], arguments: tuple[torch.Tensor, ...]) -> Recording | None:
        """Return what was written down of a step like that which was seen; None if none can be, and note why."""
        seen = next(iter(self.seen.values()))
        self.seen.clear()
        states = replayed(stash_random_states(tuple(dict.fromkeys((torch.device("cpu"), *self.devices)))))
        try:
            with states:
                recording, bits = self._written_down(leaves, arguments, seen)
            if self._is_tried and not self.refusal and bits != self._bits_by(recording, arguments, states, seen):
                self.refusal = "a program of it has other bits"
        except Exception as error:  # NOTE [Writing down]
            self.refusal = f"it could not be written down ({type(error).__name__}: {error})"
        return None if self.refusal else recording

    def _written_down(
        self, leaves: Sequence[Any], arguments: tuple[torch.Tensor, ...], seen: _Seen
    ) -> tuple[Recording, list[int | None]]:
        """Return what was written down of a step, and the bits of what it made; note why if it is of no use."""
        recorder = Recorder()
        recording = recorder.recording
        recording.arguments = [recorder.root(argument) for argument in arguments]
        copies = {name: buffer.clone() for name, buffer in self.written.items()}
        for name, copy in copies.items():
            recording.constants[recorder.root(copy)] = self.written[name]
        recording.written = frozenset(recording.views[v].storage for v in recording.constants)
        for constant in self.constants:
            recorder.constant(constant)
        gradients, bits = _Gradients(recorder, is_tried=self._is_tried), list[int | None]()
        with recording_with(recorder):
            made, aliases = self.on_tape(leaves, gradients.stand_in, copies)
        outputs = list(made)
        del made
        if self._is_tried:
            bits = bits_of(outputs)
        recording.outputs = [Ref(recorder.find(o)) if isinstance(o, torch.Tensor) else o for o in outputs]
        recording.differentiable = [isinstance(o, torch.Tensor) and o.requires_grad for o in outputs]
        uses = iter(_num_uses(outputs, aliases))
        aliases.clear()
        recording.num_uses = [next(uses) if argument.requires_grad else 0 for argument in arguments]
        recorder.in_backward = True
        given = _drawn(seen, len(outputs))
        recording.tangents = [None if t is None else recorder.root(t) for t in given]
        with torch.no_grad(), recorder:
            backward_through(outputs, given)
        found = iter(gradients.found)
        recording.gradients = [next(found) if argument.requires_grad else None for argument in arguments]
        self.refusal = recorder.failure or _cannot_run(recording)
        return recording, [*bits, *gradients.bits]

    def _bits_by(
        self, recording: Recording, arguments: tuple[torch.Tensor, ...], states: replayed, seen: _Seen
    ) -> list[int | None]:
        """Return the bits of a step by a program, on the gradients that were drawn for the one written down."""
        program = self._programs[True] = program_of(recording, at_once=True)
        left = Counter(argument for part in program.parts for argument in part)
        bits: dict[int, int | None] = {}
        sums: dict[int, torch.Tensor] = {}
        before = {name: buffer.clone() for name, buffer in self.written.items()}
        with torch.no_grad(), states:
            outputs, saved = program.forward(*arguments)
            bits_of_outputs, given = bits_of(outputs), _drawn(seen, len(outputs))
            del outputs
            found: list[torch.Tensor] = []
            driver = program.backward(saved, arguments, given, found)
            for part in program.parts:
                next(driver, None)
                for argument, gradient in zip(part, found, strict=True):
                    left[argument] -= 1
                    total = sums.pop(argument) + gradient if argument in sums else gradient
                    if left[argument]:
                        sums[argument] = total
                    else:
                        (bits[argument],) = bits_of([total])
                    del total, gradient
                found.clear()
            for name, buffer in self.written.items():
                buffer.copy_(before[name])
        with_grad = [i for i, argument in enumerate(arguments) if argument.requires_grad]
        return [*bits_of_outputs, *[bits.get(i) for i in with_grad]]

    def on_tape(
        self,
        leaves: Sequence[Any],
        stands_for: Callable[[torch.Tensor], torch.Tensor],
        buffers: dict[str, torch.Tensor],
    ) -> tuple[Sequence[Any], list[torch.Tensor]]:
        """Run the graph on the tape; return its outputs and what stands for the arguments that require grad.

        Aliases of what ``stands_for`` makes of the arguments do: hooks on the arguments would run twice.
        """
        aliases = {}
        for name, parameter in zip(self.names, self.parameters, strict=True):
            alias = stands_for(parameter)
            aliases[name] = alias.view_as(alias)
        inner, differentiable = list(leaves), list(aliases.values())
        for i, leaf in enumerate(inner):
            if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
                alias = stands_for(leaf)
                inner[i] = alias.view_as(alias)
                differentiable.append(inner[i])

        def call(*given: Any) -> Any:
            return functional_call(self.graph_module, {**aliases, **buffers}, given)

        return self._run(call, inner), differentiable


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
            self.found[place] = self._recorder.find(gradient)
            if self._is_tried:
                with without_modes():
                    (self.bits[place],) = bits_of([gradient])

        leaf = argument.detach().requires_grad_()
        return GradientTaken.apply(put, leaf)  # type: ignore[no-untyped-call,no-any-return]


def _refusal_of(outputs: Sequence[Any], arguments: Sequence[torch.Tensor]) -> str:
    tensors = [o for o in outputs if isinstance(o, torch.Tensor)]
    if any(type(o) is not torch.Tensor for o in tensors):
        return "it returns tensors of a class of their own"
    keys = list(map(storage_key, tensors))
    if len(set(keys)) < len(keys):
        return "it returns two tensors on one storage"
    if not set(keys).isdisjoint(map(storage_key, arguments)):
        return "it returns what lies on an input"
    return "" if any(o.requires_grad for o in tensors) else "nothing that it returns requires grad"


def _num_uses(outputs: Sequence[Any], aliases: Sequence[torch.Tensor]) -> list[int]:
    """Return how many edges of the graph of ``outputs`` lead to each alias, which is no leaf."""
    tensors = [o for o in outputs if isinstance(o, torch.Tensor)]
    edges: Counter[tuple[Any, int]] = Counter((o.grad_fn, o.output_nr) for o in tensors)
    for node in graph_nodes(tensors):
        edges.update(node.next_functions)
    return [edges[alias.grad_fn, alias.output_nr] for alias in aliases]


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


def _counts(views: Sequence[View], reads: Sequence[int]) -> bool:
    """True if what is read is a whole number, as BatchNorm's counter of batches."""
    return all(not views[v].dtype.is_floating_point and not views[v].size for v in reads)


def _drawn(seen: _Seen, num_outputs: int) -> list[torch.Tensor | None]:
    """Return random gradients of outputs that lie as those ``seen``."""
    drawn: list[torch.Tensor | None] = [None] * num_outputs
    for place, (view, device) in sorted(seen.items()):
        end = view.offset + 1 + sum((n - 1) * k for n, k in zip(view.size, view.stride, strict=True))
        values = torch.randn(end, dtype=view.dtype, device=device)
        drawn[place] = values.as_strided(view.size, view.stride, view.offset)
    return drawn


def bits_of(values: Iterable[Any]) -> list[int | None]:
    """Return a number for each tensor that another bit in it would change, in all likelihood."""
    return [_bits(value.detach()) if isinstance(value, torch.Tensor) else None for value in values]


def _bits(tensor: torch.Tensor) -> int:
    """As :func:`bits_of`, a piece at a time: what sums and copies take beside the tensor stays small."""
    if tensor.numel() > NUM_AT_A_TIME:
        dim = max(range(tensor.dim()), key=tensor.size)
        half = tensor.shape[dim] // 2
        return _bits(tensor.narrow(dim, 0, half)) + _bits(tensor.narrow(dim, half, tensor.shape[dim] - half))
    tensor = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
    whole = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.itemsize]
    return int(tensor.contiguous().view(whole).sum(dtype=torch.int64))


def _attributes(graph_module: fx.GraphModule) -> list[torch.Tensor]:
    """Return the tensors that are plain attributes of the graph's module."""
    found = []
    for node in graph_module.graph.nodes:
        if node.op == "get_attr":
            value: Any = attrgetter(str(node.target))(graph_module)
            if isinstance(value, torch.Tensor):
                found.append(value)
    return found
