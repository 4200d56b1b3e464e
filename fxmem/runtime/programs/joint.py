"""A step as one autograd Function that runs straight-line code: what the host must do, and no more.

In: the emitted graph of a call. Out: the same outputs, and gradients of the same bits. The first step runs the graph as it
is, on the tape, and shows which outputs have a gradient. Before the next one a step on the same arguments is run for
nothing and written down (:mod:`fxmem.runtime.programs.recording`); from then on steps run what was written
(:mod:`fxmem.runtime.programs.program`).

NOTE [What stays on the tape]

1. Calls that a program is not for: under another autocast than planned, under saved-tensor hooks, in anomaly mode, with
   hooks that wait for a parameter's gradient and may take memory that was planned for another moment, among several
   processes, which wait for each gradient; with inputs that lie otherwise in their storage.
2. Graphs whose calls the recorder cannot follow, that write to parameters or inputs, that return an input, or two outputs
   on one storage; that read a buffer which they write, whose old value rule 3 would need; that draw from a generator of
   their own, or copy to host memory; that work on several devices, whose backwards run in threads of their own.
3. A backward that a program is not for (``create_graph``, gradients of other outputs than were recorded, or laid out
   otherwise, switches of kernels that were changed since) runs the forward again on the tape, from the random states that
   it began with and on copies of the buffers that it writes, and goes backward through that. It takes longer, and no
   budget is kept. From then on calls stay on the tape. Gradients that are differentiated have two graphs in such a step,
   where eager has one: what flows through both is added later, so it equals eager's but for rounding, and a warning says
   so. A loop that differentiates gradients from its first step on never comes to programs.
4. ``retain_graph`` needs no tape: what is saved stays, what is recomputed goes each time.

NOTE [Autocast]

A program has the casts of its region written into it and runs without autocast. The region's cache casts a parameter once,
for all that is called in it, and sums the gradients of that cast in its own dtype; a program casts it for itself. So a step
that casts a parameter twice stays on the tape, and so does one of whose calls two share a region and a backward.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain
from operator import attrgetter
from typing import Any, cast

import torch
from torch import fx, nn

from fxmem.progress import log
from fxmem.runtime.autocast import Autocast, Regions
from fxmem.runtime.host_memory import set_aside
from fxmem.runtime.layout import View
from fxmem.runtime.old_gradients import have_gradients
from fxmem.runtime.programs.instructions import Recording
from fxmem.runtime.programs.program import Program, programs_of
from fxmem.runtime.programs.program_call import OnFakes, ProgramCall, gated
from fxmem.runtime.programs.recording import Inside, nothing_inside
from fxmem.runtime.programs.trial import NO_ROOM, Fuse, Trial
from fxmem.runtime.programs.written_step import Seen, shares_casts, written_down
from fxmem.runtime.recompute import random_states_kept
from fxmem.runtime.step_in_backward import num_processes
from fxmem.torch_private import current_backward, has_saved_tensor_hooks, storage_key

Run = Callable[[Callable[..., Any], Sequence[Any]], Sequence[Any]]
"""Calls a graph with leaves, as calls of it are made; returns the leaves of its output."""
Judge = Callable[[Callable[[Sequence[Any]], Sequence[Any]], Sequence[Any]], int]
"""Says by how many bytes a step exceeds its budget. It is given what runs a call on fakes, and the leaves of a real one."""

_late_hooks_of = attrgetter("_post_accumulate_grad_hooks")


class JointSteps:
    """The steps of one emitted graph, at one size."""

    def __init__(
        self,
        graph_module: fx.GraphModule,
        run: Run,
        written: Sequence[torch.Tensor],
        devices: Sequence[torch.device],
        autocast: Autocast | None = None,
        room_bytes: int | None = None,
        refusal: str = "",
        num_watched: int = 1,
        *,
        has_regions: bool = False,
        inside: Inside = nothing_inside,
        judge: Judge | None = None,
        clears_gradients: bool = False,
        fuse: Fuse | None = None,
    ) -> None:
        """``written``: tensors that the graph writes. ``devices``: those it works on. ``autocast``: the region that its
        calls are in. ``room_bytes``: what a planned step leaves of its budget, None if there is no budget. ``refusal``: why
        it stays on the tape. ``num_watched``: calls before one is written down, which takes the time of some steps.
        ``has_regions``: of autocast, inside. ``inside``: what kernels take. ``judge``: says whether a program keeps the
        budget (NOTE [A program's peak], rule 4). ``clears_gradients``: those that are there as a call begins are cleared
        before its backward. ``fuse``: makes kernels for chains of its calls."""
        self.graph_module, self.devices = graph_module, tuple(devices)
        self.autocast, self._run, self._num_watched = autocast, run, num_watched
        self.inside, self._judge, self._clears_gradients, self._fuse = inside, judge, clears_gradients, fuse
        self.is_cast = autocast is not None or has_regions
        self._regions = None if autocast is None else Regions(torch.device(autocast.device_type))
        self._in_region: tuple[tuple[int, int | None], Callable[[], bool]] | None = None
        """Under autocast: the region of the latest call, and whether its backward is over or cannot be."""
        self._state = self._named()
        self.parameters = tuple(parameter for parameter in graph_module.parameters() if parameter.requires_grad)
        constants = [*self._state.values(), *_attributes(graph_module)]
        self.constants = tuple(t for t in constants if not t.requires_grad)
        ids = {id(tensor) for tensor in written}
        self.written = {name: b for name, b in graph_module.named_buffers() if id(b) in ids}
        self.refusal = refusal or self._refusal(len(ids))
        self.program: Program | None = None
        """The one used last."""
        self._recording: Recording | None = None
        self._quicker: tuple[Recording, ...] = ()
        """The same with chains as one call each."""
        self._programs: dict[bool, Program] = {}
        """By whether gradients are there before."""
        self._told = ""
        self._too_large: dict[bool, str] = {}
        """The same: why it is not used; nothing if it is."""
        self._why_not = ""
        """Of the one for the latest call."""
        self._room_bytes = None if room_bytes is None else room_bytes - sum(t.nbytes for t in self.written.values())
        """For what is alive beside a step that is written down."""
        self._lacks_room = False
        """What was alive beside the latest call was more."""
        self._is_tried = all(device.type == "cpu" for device in self.devices)
        """Whether a program's bits are compared with the tape's: a kernel may ask whether autograd is on."""
        self._places: list[int] = []
        """By output, its place among those that are another tensor each."""
        self.seen: dict[int, Seen] = {}
        """By backward and output, how its gradient lay."""

    def _refusal(self, num_written: int) -> str:
        if len({id(b) for b in self.written.values()}) < num_written:
            return "it writes to what is no buffer"
        if sum(device.type != "cpu" for device in self.devices) > 1:
            return "it works on several devices, whose backwards run in threads of their own"
        return "a buffer requires grad" if any(b.requires_grad for b in self.graph_module.buffers()) else ""

    @property
    def runtime(self) -> str:
        """Say how calls run, and why."""
        if self.refusal:
            return f"tape: {self.refusal}"
        if self._why_not:
            return f"tape: {self._why_not}"
        if self._recording is None and ((self._room_bytes or 0) < 0 or self._lacks_room):
            return "tape: the budget has no room to write a program down"
        return "tape: no step has been written down yet" if self._recording is None else "program"

    @property
    def fused(self) -> str:
        """Say which chains of calls run as one kernel each, or why none do."""
        if self._fuse is None or self._recording is None or self.program is None:
            return f"none: {'not asked for' if self._fuse is None else self.runtime}"
        return NO_ROOM if self._quicker and not self.program.is_fused else self._fuse.told

    def _tell(self) -> None:
        """Log how calls run from now on, once."""
        if self.runtime != self._told:
            self._told = self.runtime
            log.info("runtime: %s", self._told)

    def run(self, leaves: Sequence[Any], held_bytes: int = 0) -> Sequence[Any]:
        """Return the output leaves of a call. ``held_bytes``: of earlier outputs that are alive."""
        if self.refusal:
            self._tell()
            return self._run(self.graph_module, leaves)
        if self._num_watched > 1:  # only the last shows anything that those before do not
            self._num_watched -= 1
            return self._run(self.graph_module, leaves)
        arguments = (*self.parameters, *[leaf for leaf in leaves if isinstance(leaf, torch.Tensor)])
        if self._is_for_tape() or self._shares_region():
            return self._run(self.graph_module, leaves)
        if self._recording is None:
            if not self._may_be_written_down(held_bytes):
                return self._watched(leaves, arguments)
            with set_aside(self._old_gradients()[0]):
                self._recording = self._recorded(leaves, arguments)
        program = self._program(leaves)
        self._tell()
        if program is None or not program.is_for(arguments):
            return self._run(self.graph_module, leaves)
        call = ProgramCall(self, leaves, arguments, program)
        if self._regions is not None:
            self._in_region = self._regions.present(), _over(call)
        return self._all(call.run())

    def _may_be_written_down(self, held_bytes: int) -> bool:
        """True if it is known what is to be written down, and there is room for it. What a CUDA graph captures is run again
        each time: not there."""
        if self._num_watched > 0 or len({tuple(sorted(seen)) for seen in tuple(self.seen.values())}) != 1:
            return False
        if any(device.type == "cuda" for device in self.devices) and torch.cuda.is_current_stream_capturing():
            return False
        held_bytes += sum(gradient.nbytes for gradient in self._old_gradients()[1])
        self._lacks_room = self._room_bytes is not None and held_bytes > self._room_bytes
        return not self._lacks_room

    def _old_gradients(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Return gradients that go before the backward of the call, and so have no place in a step that is written down:
        those that can be set aside meanwhile, and the others."""
        if not self._clears_gradients:
            return [], []
        gradients = [p.grad for p in self.parameters if p.grad is not None]
        are_plain = all(type(g) is torch.Tensor and g.is_cuda and g.layout == torch.strided for g in gradients)
        if are_plain and len(set(map(storage_key, gradients))) == len(gradients):
            return gradients, []
        return [], gradients

    def _program(self, leaves: Sequence[Any]) -> Program | None:
        """Return the program for a call, as things are; None if there is none."""
        if self._recording is None:
            return None
        at_once = self._gradients_are_there()
        if at_once not in self._too_large:
            tried = [self._programs[at_once]] if at_once in self._programs else []
            for program in chain(tried, programs_of(self._recording, at_once=at_once, quicker=self._quicker)):
                self._programs[at_once] = program
                self._too_large[at_once] = self._too_large_by(program, leaves)
                if not self._too_large[at_once]:
                    break
        program, self._why_not = self._programs[at_once], self._too_large[at_once]
        self.program = self.program if self._why_not else program
        return None if self._why_not else program

    def _too_large_by(self, program: Program, leaves: Sequence[Any]) -> str:
        """Say why ``program`` takes more than it may (NOTE [A program's peak]); nothing if it does not."""
        excess_bytes, what = program.excess_bytes, "the plan's"
        if excess_bytes <= 0 and self._judge is not None:
            excess_bytes, what = self._judge(partial(self.on_fakes, program), leaves), "the budget"
        return f"as a program its peak would be {excess_bytes} bytes above {what}" if excess_bytes > 0 else ""

    def _gradients_are_there(self) -> bool:
        """True if gradients are there as a backward begins."""
        return not self._clears_gradients and have_gradients(self.parameters)

    def _is_for_tape(self) -> bool:
        region = set() if self.autocast is None else {self.autocast.device_type}
        return (
            {device.type for device in self.devices if torch.is_autocast_enabled(device.type)} != region
            or has_saved_tensor_hooks()
            or torch.is_anomaly_enabled()
            or any(map(_late_hooks_of, self.parameters))
            or num_processes() > 1
        )

    def _shares_region(self) -> bool:
        """True if a call whose backward is to come is in the same region of autocast (NOTE [Autocast])."""
        if self._regions is None or self._in_region is None:
            return False
        region, is_over = self._in_region
        if is_over() or region != self._regions.present():
            return False
        if self.program is not None:
            warnings.warn(
                "two calls of a model in one autocast region, before the backward of the first: their gradients may equal "
                "eager's but for rounding this time; from the next step on they are bitwise. "
                'runtime="tape" keeps to the tape from the start.',
                stacklevel=2,
            )
        self.refusal = "several of its calls share a region of autocast"
        return True

    def _watched(self, leaves: Sequence[Any], arguments: tuple[torch.Tensor, ...]) -> Sequence[Any]:
        """Return the outputs of a call on the tape, whose backward shows which of them have a gradient."""
        outputs = self._run(self.graph_module, leaves)
        once = self._once(outputs)
        self._num_watched -= 1
        self.refusal = _refusal_of(once, arguments)
        if self.is_cast and shares_casts(once):  # written down, it would cast again, which takes memory
            self.refusal = self.refusal or "it casts a parameter twice"
        self.seen.clear()
        if self._regions is not None:
            self._in_region = self._regions.present(), lambda: bool(self.seen)
        return outputs if self.refusal else self._all(gated(self._note, once))

    def _once(self, outputs: Sequence[Any]) -> list[Any]:
        """Return ``outputs`` without tensors that are there before."""
        known: dict[int, int] = {}
        self._places = [
            known.setdefault(id(o) if isinstance(o, torch.Tensor) else ~i, len(known)) for i, o in enumerate(outputs)
        ]
        return [outputs[self._places.index(place)] for place in range(len(known))]

    def _all(self, once: Sequence[Any]) -> list[Any]:
        """Return all outputs."""
        return [once[place] for place in self._places]

    def _note(self, place: int, tangent: torch.Tensor) -> torch.Tensor:
        if torch.is_grad_enabled():
            self.refusal = "its gradients are differentiated"
        if any(torch.is_autocast_enabled(device.type) for device in self.devices):
            self.refusal = "its backward is under autocast"
        self.seen.setdefault(current_backward(), {})[place] = View.of(tangent, 0), tangent.device
        return tangent

    def _recorded(self, leaves: Sequence[Any], arguments: tuple[torch.Tensor, ...]) -> Recording | None:
        """Return what was written down of a step like that which was seen; None if none can be, and note why."""
        seen = next(iter(self.seen.values()))
        self.seen.clear()
        devices = tuple(dict.fromkeys((torch.device("cpu"), *self.devices)))
        try:
            with random_states_kept(devices):
                recording, bits, self.refusal = written_down(self, leaves, arguments, seen, is_tried=self._is_tried)
            # Sums of gradients are made beside these: where there are any, none may wait.
            at_once = self._gradients_are_there() or max(recording.num_uses, default=0) > 1
            trial = Trial(bits if self._is_tried else None, arguments, seen, self.written, devices, at_once=at_once)
            if self._is_tried and not self.refusal:
                program = self._programs[at_once] = next(programs_of(recording, at_once=at_once))
                self.refusal = "" if trial.passes(program) else "a program of it has other bits"
        except Exception as error:  # NOTE [Writing down] in written_step.py
            self.refusal = f"it could not be written down ({type(error).__name__}: {error})"
        if self.refusal:
            return None
        if self._fuse is not None:
            self._quicker = trial.with_chains_fused(recording, self._fuse)
            if self._quicker:
                self._programs.clear()
        return recording

    def on_fakes(self, program: Program, leaves: Sequence[Any]) -> Sequence[Any]:
        """Return the output leaves of a call of ``program`` with fake ``leaves``, where the graph's state is fake too.
        Errors: ``OtherBackwardError`` in a backward that the program is not for."""
        present = self._named()
        fakes = {id(tensor): present[name] for name, tensor in self._state.items()}
        program = program.on_others(lambda value: fakes.get(id(value), value))
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        arguments = (*[fakes[id(parameter)] for parameter in self.parameters], *tensors)
        return self._all(ProgramCall(OnFakes(self.devices, self.autocast), leaves, arguments, program).run())

    def _named(self) -> dict[str, torch.Tensor]:
        return {**dict(self.graph_module.named_parameters()), **dict(self.graph_module.named_buffers())}

    def on_tape(
        self,
        leaves: Sequence[Any],
        stands_for: Callable[[torch.Tensor], torch.Tensor],
        buffers: dict[str, torch.Tensor],
    ) -> tuple[Sequence[Any], list[torch.Tensor]]:
        """Run the graph on the tape; return its outputs, each once, and what stands for the arguments that require grad, as
        hooks on these would run twice."""
        others = {id(parameter): stands_for(parameter) for parameter in self.parameters}
        inner, differentiable = list(leaves), list(others.values())
        for i, leaf in enumerate(inner):
            if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
                inner[i] = stands_for(leaf)
                differentiable.append(inner[i])
        others |= {id(self.written[name]): buffer for name, buffer in buffers.items()}
        return self._once(self._run(_twin(self.graph_module, others), inner)), differentiable


def _twin(module: nn.Module, others: dict[int, torch.Tensor]) -> nn.Module:
    """Return ``module`` with other tensors in place of those of these ids. It shares all else, and stays as it is: another
    thread may call it meanwhile."""
    modules = {name: child and _twin(child, others) for name, child in module._modules.items()}
    is_same = all(modules[name] is child for name, child in module._modules.items())
    if is_same and others.keys().isdisjoint(map(id, (*module._parameters.values(), *module._buffers.values()))):
        return module
    twin: nn.Module = object.__new__(type(module))
    twin.__dict__.update(module.__dict__)
    twin._modules = modules
    twin._parameters = {name: cast(Any, others.get(id(each), each)) for name, each in module._parameters.items()}
    twin._buffers = {name: others.get(id(each), each) for name, each in module._buffers.items()}
    return twin


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


def _over(call: ProgramCall) -> Callable[[], bool]:
    """Return what tells if the backward of ``call`` is over, or cannot be any more."""
    reference = weakref.ref(call)
    return lambda: (known := reference()) is None or known.leaves is None


def _attributes(graph_module: fx.GraphModule) -> list[torch.Tensor]:
    """Return the tensors that are plain attributes of the graph's module."""
    found = []
    for node in graph_module.graph.nodes:
        if node.op == "get_attr":
            value: Any = attrgetter(str(node.target))(graph_module)
            if isinstance(value, torch.Tensor):
                found.append(value)
    return found
