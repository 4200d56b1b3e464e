"""Watching a model's own training step on fakes: what is alive at its peak, of which kind, and which line made it.

In: the step that :func:`fxmem.profiling.verify.eager_step` runs, without a captured graph. Out: a :class:`WatchedStep` of
plain numbers. Nothing of it changes what is allocated or when: module paths and source lines are read from the frames of
the interpreter, and of those only that of ``nn.Module.__call__`` is asked for its locals.
"""

from __future__ import annotations

import inspect
import os
import sys
from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass
from types import CodeType
from typing import Any

import torch

from fxmem.fake.fake_tensors import ScalarReads
from fxmem.ir import Phase, PlainData, Source, TimelineStep
from fxmem.op_facts.kinds import ReadsScalar, SavesUnseen
from fxmem.op_facts.lookup import by_op
from fxmem.profiling.storage_tracker import Listener, StorageTracker, has_storage, parts_of
from fxmem.torch_private import current_backward_node, sequence_of, tree_leaves

_OURS = (os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep, os.path.dirname(torch.__file__) + os.sep)
"""Folders of fxmem and of torch: code there is not the user's."""
_CALL: CodeType = torch.nn.Module.__call__.__code__
PHASES_OF_MODEL = (Phase.FORWARD, Phase.LOSS)


@dataclass(frozen=True, slots=True)
class CallSite(PlainData):
    """One call of a function of torch by the model or its loss."""

    name: str
    source: Source


NOWHERE = CallSite("", Source())


@dataclass(slots=True)
class _Storage:
    """What was seen of one storage."""

    nbytes: int
    born: int
    """Number of the event; the same numbers count reads and frees."""
    phase: Phase | None
    """None: it was there when the step began."""
    site: CallSite
    call: int
    """Number of the call of torch that made it."""
    kind: str = ""
    """Of what was there at the start, and of gradients."""
    died: int = sys.maxsize
    read: int = -1
    """The last event before which an op read it."""
    shown: bool = False
    """Whether the model was given a tensor on it; else only autograd holds it."""
    returned: bool = False
    """Whether an output of the model lies on it."""


@dataclass(frozen=True, slots=True)
class Alive(PlainData):
    """A storage that is alive at the peak."""

    kind: str
    """A field of :class:`fxmem.Breakdown`, without ``_bytes``."""
    nbytes: int
    site: CallSite
    """Which call of torch made it; empty of what was there when the step began."""


@dataclass(frozen=True, slots=True)
class WatchedStep:
    """A step on fakes, as watched."""

    peak_phase: Phase
    peak_site: CallSite
    alive: tuple[Alive, ...]
    """At the peak; libraries' workspaces are not among them."""
    steps: tuple[TimelineStep, ...]
    """One for each op, with the most bytes while it ran."""
    peak_step: int
    doubtful: bool
    """Whether the model or its loss read a number from a tensor, which fakes do not have (it went on with a 1), or ran what
    saves tensors that show on no fake: whether that can be followed, a capture tells."""


class PeakWatch(ScalarReads):
    """Sees a step: as function mode the calls of torch, as the tracker's listener bytes, as its ``on_op`` the reads."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self._paths = {id(module): path for path, module in model.named_modules()}
        self._on_cuda = any(p.is_cuda for p in model.parameters())
        self._storages: dict[int, _Storage] = {}
        self._steps: list[TimelineStep] = []
        self._doubtful = False
        self._phase: Phase | None = None
        self._site, self._call, self._clock = NOWHERE, 0, 0
        self._live = self._most = self._peak = self._peak_at = self._peak_step = 0
        self._peak_place = (Phase.FORWARD, NOWHERE)
        self._node: int | None = None
        self._since = self._peak_since = 0
        self._numbers: list[int] = []
        self._sites: list[CallSite] = []
        self._tracker: StorageTracker | None = None

    # -- what happens ------------------------------------------------------------------------------------------------------

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        beside = self._phase not in PHASES_OF_MODEL and (
            self._phase is not Phase.BACKWARD or not current_backward_node()
        )
        if beside or name == "__get__":
            return super().__torch_function__(func, types, args, kwargs)
        self._site, self._call = CallSite(_plain(name), self._source()), self._call + 1
        self._since = self._clock
        self._doubtful |= func in _READS or (self._on_cuda and name in _SAVING_UNSEEN)
        try:
            output = super().__torch_function__(func, types, args, kwargs)
        finally:
            site, self._site = self._site, NOWHERE
        if self._phase is not Phase.BACKWARD:
            self._note_call(output, site)
        return output

    def _note_call(self, output: Any, site: CallSite) -> None:
        for leaf in (output,) if isinstance(output, torch.Tensor) else tree_leaves(output):
            if not has_storage(leaf):
                continue
            storage = self._storage(leaf)
            if storage is not None:
                storage.shown = True
            number = None if leaf.grad_fn is None else sequence_of(leaf.grad_fn)
            if number is not None and (not self._numbers or number > self._numbers[-1]):
                self._numbers.append(number)
                self._sites.append(site)

    def note_op(self, func: Any, args: Any, kwargs: Any, output: Any) -> None:
        """Note what an op has read; for the tracker."""
        self._clock += 1
        self._doubtful |= func in _READING_OPS and self._phase in PHASES_OF_MODEL
        for leaf in tree_leaves((args, kwargs)):
            if has_storage(leaf):
                storage = self._storage(leaf)
                if storage is not None:
                    storage.read = self._clock
        if self._phase is not None:
            place = self._place()
            self._end_step(place[0], place[1].name or func.__name__)

    def _end_step(self, phase: Phase, label: str) -> None:
        self._steps.append(TimelineStep(phase, label, self._most))
        self._most = self._live

    def _note_event(self, kind: str, serial: int, nbytes: int) -> None:
        self._clock += 1
        if kind == "free":
            self._live -= nbytes
            if serial in self._storages:
                self._storages[serial].died = self._clock
            return
        phase, site = self._place() if self._phase is not None else (None, NOWHERE)
        self._storages[serial] = _Storage(nbytes, self._clock, phase, site, self._call)
        self._live += nbytes
        self._most = max(self._most, self._live)
        if self._live > self._peak or phase is None:
            self._peak, self._peak_at, self._peak_step = self._live, self._clock, len(self._steps)
            self._peak_place, self._peak_since = (phase or Phase.FORWARD, site), self._since

    def beside(self, listener: Listener) -> Listener:
        """Return a listener that tells both ``listener`` and this one."""

        def both(kind: str, serial: int, nbytes: int) -> None:
            listener(kind, serial, nbytes)
            self._note_event(kind, serial, nbytes)

        return both

    def begin(
        self,
        tracker: StorageTracker,
        parameters: Iterable[torch.Tensor],
        gradients: Iterable[torch.Tensor],
        buffers: Iterable[torch.Tensor],
        inputs: Iterable[torch.Tensor],
    ) -> None:
        """Take what is there now as there at the start: what is none of these is state of the optimizer."""
        self._tracker = tracker
        for held in self._storages.values():
            held.kind = "optimizer_state"
        # What several names share is of the first kind.
        kinds = ("inputs", inputs), ("buffers", buffers), ("gradients", gradients), ("parameters", parameters)
        for kind, tensors in kinds:
            for part in (part for tensor in tensors for part in parts_of(tensor)):
                if (storage := self._storage(part)) is not None:
                    storage.kind = kind
        self._phase = Phase.FORWARD

    def note_phase(self, phase: Phase, gradients: Iterable[torch.Tensor]) -> None:
        """Note that ``phase`` begins; ``gradients``: those there are."""
        if phase is Phase.OPTIMIZER:
            for part in (part for gradient in gradients for part in parts_of(gradient)):
                if (storage := self._storage(part)) is not None and not storage.kind:
                    storage.kind = "gradients"
        self._phase = phase

    def note_output(self, output: Any) -> Any:
        """Note what the model returned, and return it."""
        for leaf in tree_leaves(output):
            if has_storage(leaf) and (storage := self._storage(leaf)) is not None:
                storage.returned = True
        return output

    # -- what is made of it ------------------------------------------------------------------------------------------------

    def watched(self) -> WatchedStep:
        """Return what was seen, once the step is over."""
        if self._phase is Phase.OPTIMIZER:  # what was repeated of its step, without an op
            self._end_step(self._phase, "")
        at = self._peak_at
        alive = [s for s in self._storages.values() if s.born <= at < s.died and s.nbytes]
        return WatchedStep(
            *self._peak_place,
            tuple(Alive(self._kind(s), s.nbytes, s.site) for s in alive),
            tuple(self._steps),
            min(self._peak_step, len(self._steps) - 1),
            self._doubtful,
        )

    def _kind(self, storage: _Storage) -> str:
        if storage.kind:
            return storage.kind
        if storage.phase is Phase.LOSS:
            return "loss"
        if storage.phase is not Phase.FORWARD or (storage.call == self._call_at_peak() and not storage.shown):
            return "temporaries"
        if storage.read < self._peak_since and storage.shown and not storage.returned:
            return "held_by_code"
        return "activations" if storage.shown or storage.returned else "internals"

    def _call_at_peak(self) -> int:
        return next((s.call for s in self._storages.values() if s.born == self._peak_at), -1)

    def _storage(self, tensor: torch.Tensor) -> _Storage | None:
        serial = None if self._tracker is None else self._tracker.known_serial(tensor)
        return None if serial is None else self._storages.get(serial)

    # -- where it happens --------------------------------------------------------------------------------------------------

    def _place(self) -> tuple[Phase, CallSite]:
        assert self._phase is not None
        if self._phase is Phase.BACKWARD and self._site is NOWHERE:
            node: Any = current_backward_node()
            number = None if node is None else sequence_of(node)
            if number != self._node:  # what a node has read is there until it ends
                self._node, self._since = number, self._clock
            if number is not None and (i := bisect_left(self._numbers, number)) < len(self._sites):
                return self._phase, self._sites[i]
            return self._phase, NOWHERE if node is None else CallSite(str(node.name()), Source())
        return self._phase, self._site

    def _source(self) -> Source:
        """Return the module and the user's line that call torch now."""
        frame = inspect.currentframe()
        path = line = ""
        while frame is not None and not (path and line):
            code = frame.f_code
            if code is _CALL:
                path = path or self._paths.get(id(frame.f_locals["self"]), "")
            elif not line and not code.co_filename.startswith(_OURS) and code.co_filename[0] != "<":
                line = f"{os.path.basename(code.co_filename)}:{frame.f_lineno}"
            frame = frame.f_back
        return Source(path, line)


def _plain(name: str) -> str:
    """Return the name of a function without the underscores of a special method."""
    return name.strip("_") if name.startswith("__") else name


_READS = {function for function, fact in by_op(ReadsScalar).items() if fact.what in ("branch", "number")}
_SAVING_UNSEEN = {op.overloadpacket.__name__ for op in by_op(SavesUnseen, "cuda")}
_READING_OPS = {op for op, fact in by_op(ReadsScalar).items() if fact.what == "op"}
