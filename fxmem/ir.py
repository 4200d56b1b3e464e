"""Every noun that crosses a seam, as plain frozen data.

Nothing here imports torch: a :class:`GraphProfile` is integers, floats and strings, so planners can be tested on
hand-written graphs and run anywhere.

NOTE [Storages, recipes and ticks]

1. Bytes belong to *storages*, never to tensors: a view or alias weighs nothing. A *managed* storage is one that a
   node of the captured graph creates (an output, or an internal that only autograd holds, such as a dropout mask).
   Everything else (parameters, buffers, batch, gradients, temporaries, the loss) no plan can change; it is a
   recorded curve.
2. A *recipe* is the shortest run of nodes that makes a storage anew on fresh memory: its creator and the in-place
   ops that follow on it. A storage has at most one recipe, a node belongs to at most one. In most graphs a recipe is
   one node. Its *inputs* are the managed storages it reads, each at its final version; its *products* are the
   storages that running it yields.
3. The step is a sequence of *ticks*. A managed storage appears only at a tick's start (unpacked, hence perhaps
   recomputed), is created only by a forward tick, and goes only at a tick's end (the forward lets go of it, or
   autograd releases it). Between those moments only unmanaged bytes move, and a tick records their largest sum.
4. A plan gives every managed storage one integer, its *retain limit*: ``KEEP``, or the position up to which a
   recomputation must lie for the storage to be held once it passes through. See :class:`Plan`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass
from enum import Enum, StrEnum
from typing import Any

KEEP = -1
"""Retain limit of a storage that is held from its creation until its last use."""


class PlainData:
    """A dataclass that can be written down: as dicts, lists, numbers and texts."""

    __slots__ = ()

    def to_dict(self) -> dict[str, Any]:
        """Return the public fields by name, ready for ``json.dumps``; bytes and seconds as their names say."""
        assert is_dataclass(self)
        return {f.name: as_plain(getattr(self, f.name)) for f in fields(self) if not f.name.startswith("_")}


def as_plain(value: Any) -> Any:
    """Return ``value`` with its dataclasses as dicts, its sequences as lists, its enums as their values."""
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, PlainData):
        return value.to_dict()
    if is_dataclass(value) and not isinstance(value, type):
        return {f.name: as_plain(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, Mapping):
        return {str(key): as_plain(each) for key, each in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        return as_plain(value._asdict())
    if isinstance(value, tuple | list | set | frozenset):
        return [as_plain(each) for each in value]
    return value


class Phase(StrEnum):
    """The parts of a training step, in order."""

    FORWARD = "forward"
    LOSS = "loss"
    BACKWARD = "backward"
    OPTIMIZER = "optimizer"


@dataclass(frozen=True, slots=True)
class Source(PlainData):
    """Where a node came from: module path (``layer1.0.conv1``) and the user's ``file:line``; empty when unknown."""

    module_path: str = ""
    line: str = ""

    def __str__(self) -> str:
        return ", ".join(part for part in (self.module_path, self.line) if part) or "unknown place"


@dataclass(frozen=True, slots=True)
class Storage:
    """A managed storage (NOTE [Storages, recipes and ticks], rule 1)."""

    index: int
    """Its place in ``GraphProfile.storages``."""
    name: str
    """Name of the creating node; internals carry a suffix (``dropout_1.internal0``)."""
    nbytes: int
    creator: int
    """Index of the node that creates it."""
    internal: bool
    """True if only autograd holds it (mask, pool indices, log-sum-exp, cast weight): not an output of any node."""
    recipe: int | None
    """Index of the recipe that makes it anew; None if it may not be dropped."""
    why_kept: str
    """Why it may not be dropped; empty if it may."""
    num_saves: int
    """How many saved tensors of autograd lie on it. Zero: free after its last forward use, unless a plan holds it."""


@dataclass(frozen=True, slots=True)
class NodeProfile:
    """One node of the captured graph, as observed."""

    index: int
    name: str
    op: str
    reads: tuple[int, ...]
    """Managed storages it reads, in argument order."""
    creates: tuple[int, ...]
    """Managed storages it creates: outputs first, then internals."""
    writes: tuple[int, ...]
    """Managed storages it writes in place."""
    saves: tuple[int, ...]
    """Managed storages that autograd saves here, in pack order."""
    seconds: float
    """Time of one run."""
    flops: int
    moved_bytes: int
    """Bytes read and written, for the roofline."""
    random: bool
    """True if it draws random numbers."""
    why_not: str
    """Why it may never run again; empty if it may."""
    source: Source


@dataclass(frozen=True, slots=True)
class Recipe:
    """The nodes that make storages anew (NOTE [Storages, recipes and ticks], rule 2).

    ``index`` is also its *position*: recipes are sorted by their last node, so every input of a recipe is a product of
    a recipe of smaller index, or may not be dropped at all.
    """

    index: int
    nodes: tuple[int, ...]
    inputs: tuple[int, ...]
    """Managed storages that must be there when it starts."""
    products: tuple[int, ...]
    """Managed storages it makes anew: outputs and internals."""
    seconds: float
    peak_bytes: int
    """Largest sum of bytes above the level at its start while it runs, products included, no internal captured."""
    capture_peak_bytes: int
    """The same when its internals are captured."""


@dataclass(frozen=True, slots=True)
class Tick:
    """A stretch of the step in which managed storages change only at both ends (rule 3)."""

    phase: Phase
    node: int | None
    """Forward: the node that runs. Backward: the node whose saved tensors were unpacked last. None: neither."""
    unpacks: tuple[int, ...]
    """Managed storages autograd asks for at the start, in order, one entry for each saved tensor."""
    start_bytes: int
    """Unmanaged bytes at the start (while a recomputation would run)."""
    peak_bytes: int
    """Largest sum during the tick of unmanaged bytes and of managed storages created in it."""
    creates: tuple[int, ...]
    """Managed storages that exist from this tick on."""
    last_used: tuple[int, ...]
    """Managed storages the forward (or the user) refers to no longer after this tick."""
    releases: tuple[int, ...]
    """Managed storages of which autograd releases one saved tensor at the end, one entry for each."""
    gradient_bytes: int = 0
    """Of the unmanaged bytes at the peak: gradients of parameters and inputs that the backward has made."""
    loss_bytes: int = 0
    """Of the unmanaged bytes at the peak: what the loss allocated outside the graph."""


@dataclass(frozen=True, slots=True)
class StaticBytes(PlainData):
    """Bytes that are there for the whole step, by kind; every tick's unmanaged bytes include them."""

    parameters_bytes: int = 0
    buffers_bytes: int = 0
    inputs_bytes: int = 0
    gradients_bytes: int = 0
    """What earlier micro-batches have left, where the step accumulates gradients."""
    optimizer_state_bytes: int = 0
    library_bytes: int = 0
    """On CUDA, the workspaces of cuBLAS and cuBLASLt."""

    @property
    def total_bytes(self) -> int:
        fixed_bytes = self.parameters_bytes + self.buffers_bytes + self.inputs_bytes
        return fixed_bytes + self.gradients_bytes + self.optimizer_state_bytes + self.library_bytes


@dataclass(frozen=True, slots=True)
class Launches(PlainData):
    """What bounds a step on a device that works behind the host: times of the eager step, in seconds."""

    host_seconds: float
    """What the host needs to launch it."""
    device_seconds: float
    """What the device needs to compute it."""

    @property
    def bound_by_host(self) -> bool:
        """True if the device waits for the host, not the host for the device."""
        return self.host_seconds > self.device_seconds


@dataclass(frozen=True, slots=True)
class GraphProfile:
    """All that planning needs to know of one training step of one graph at one signature."""

    nodes: tuple[NodeProfile, ...]
    storages: tuple[Storage, ...]
    recipes: tuple[Recipe, ...]
    ticks: tuple[Tick, ...]
    static: StaticBytes
    backward_seconds: float = 0.0
    """Time of the eager backward (twice the forward if nothing better is known)."""
    launches: Launches | None = None
    """What bounds the step; None where host and device are one, or the times are not priced by it."""

    @property
    def forward_seconds(self) -> float:
        return sum(node.seconds for node in self.nodes)

    @property
    def step_seconds(self) -> float:
        return self.forward_seconds + self.backward_seconds

    @property
    def droppable(self) -> tuple[int, ...]:
        """Managed storages a plan may drop."""
        return tuple(s.index for s in self.storages if s.recipe is not None)


@dataclass(frozen=True, slots=True)
class Offload(PlainData):
    """A recipe that is not run again: what of its products the plan drops is copied to host memory in the forward, and
    fetched wherever it would be recomputed."""

    recipe: int
    after: int | None = None
    """The dropped storage after whose unpacking the fetch is started, ahead of its use; None: when it is asked for."""
    left: int | None = None
    """The node of the forward after which the step waits for the copies to be made, and lets go of the originals; None:
    those after which it refers to them no longer."""
    stall_seconds: float = 0.0
    """How long the step waits for the link because of it, by :mod:`fxmem.planners.offload.link`."""
    num_fetches: int = 1
    """How many times it is fetched, over which that wait is spread."""


@dataclass(frozen=True, slots=True)
class Plan(PlainData):
    """What to keep and what to recompute: one retain limit for each managed storage.

    ``KEEP``: held from creation to its last use by autograd or by a recomputation. Otherwise the storage is dropped
    at its last forward use, and when a recomputation asked for by a storage of recipe position ``p`` passes through
    it, it is held from then on if ``p <= limit`` (until its last use), else only as long as that recomputation reads
    it. ``limit = last position``: refilled *on the way*; ``limit = own position``: *late*, only when asked for; values
    between express nested segments. A storage that is itself asked for is always held. All of this holds for what is
    fetched from host memory, too: an offload only says how a recipe's products are made anew.
    """

    planner: str
    limits: tuple[int, ...]
    offloads: tuple[Offload, ...] = ()
    """Recipes whose products are fetched, by position."""

    @property
    def dropped(self) -> tuple[int, ...]:
        return tuple(i for i, limit in enumerate(self.limits) if limit != KEEP)

    @property
    def fetched(self) -> frozenset[int]:
        """Recipes whose products are fetched."""
        return frozenset(offload.recipe for offload in self.offloads)

    def __setstate__(self, state: list[Any]) -> None:
        """Pickles of earlier versions have no offloads."""
        for name, value in zip(self.__slots__, [*state, ()][: len(self.__slots__)], strict=True):
            object.__setattr__(self, name, value)


@dataclass(frozen=True, slots=True)
class TimelineStep(PlainData):
    """One point of a simulated or measured step: the largest sum of live bytes while it lasted."""

    phase: Phase
    label: str
    live_bytes: int
    recompute: bool = False
    gradient_bytes: int = 0
    """Simulated: of the live bytes, gradients of parameters and inputs that are there all the while."""


@dataclass(frozen=True, slots=True)
class Timeline(PlainData):
    """What :func:`fxmem.planners.simulate.simulate` says of a plan."""

    peak_bytes: int
    peak_step: int
    """Index of the peak's tick in ``GraphProfile.ticks``."""
    recompute_seconds: float
    """What recomputing takes, and waiting for what is fetched."""
    num_recomputed: int
    """Recipe executions in backward."""
    steps: tuple[TimelineStep, ...] = ()
    """Filled only when asked for."""


@dataclass(frozen=True, slots=True)
class FrontierPoint(PlainData):
    """A plan with what the simulator says of it; a frontier is a tuple of these, peaks falling, times rising."""

    plan: Plan
    peak_bytes: int
    recompute_seconds: float
    bound_seconds: float = 0.0
    """No plan whose peak is at most this one's recomputes for less; 0 where nothing better is known."""

    @property
    def gap_seconds(self) -> float:
        """At most so much more than the best plan of this peak."""
        return self.recompute_seconds - self.bound_seconds


@dataclass(frozen=True, slots=True)
class Verification(PlainData):
    """The planned peak beside that of the emitted module run on fakes; they are equal unless fxmem has a bug."""

    planned_bytes: int
    verified_bytes: int

    @property
    def exact(self) -> bool:
        return self.planned_bytes == self.verified_bytes


@dataclass(frozen=True, slots=True)
class InplaceDecision(PlainData):
    """Whether one op is done in place; ``why_not`` is empty if it is."""

    node: str
    nbytes: int
    """Bytes it does not allocate, or would not."""
    why_not: str


@dataclass(frozen=True, slots=True)
class ChoiceMade(PlainData):
    """What one choice that ``allow=`` named did to the step."""

    choice: str
    what: str
    """What was done, where, and what that changes in the numbers."""
    nbytes: int
    """Bytes that it took off the peak."""

    def __str__(self) -> str:
        return f"{self.choice}: {self.nbytes / 1e6:.3f} MB off the peak; {self.what}"
