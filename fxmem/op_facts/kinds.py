"""The kinds of facts: the class of a row's value is its kind. No torch: ops and functions are named by strings."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

Device = Literal["any", "cpu", "cuda"]


@dataclass(frozen=True, slots=True)
class OpFact:
    """One row of the table."""

    ops: tuple[str, ...]
    value: Any
    """The fact; its class is the kind."""
    why: str
    """Why a run on fakes does not show it."""
    test: str
    """The name of the test that shows it."""
    device: Device = "any"
    """Where the fact holds."""


# -- what ops do ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class WritesUnsaid:
    """It writes arguments though neither its schema nor a version counter says so."""

    places: tuple[int, ...]
    """Of the arguments it writes."""
    flag: int | None = None
    """Place of the argument that has to be true for it to write; None: it always does."""


@dataclass(frozen=True, slots=True)
class UpdatesOnly:
    """It writes arguments that its result does not depend on, so it may run again without them."""

    places: tuple[int, ...]
    flag: int
    """Place of the argument that has to be true; else it reads them."""


@dataclass(frozen=True, slots=True)
class InPlaceInBackward:
    """A backward that no mode watches writes its result over its first argument, zeros that it has just made."""

    nodes: tuple[str, ...]
    """The autograd nodes that do."""


@dataclass(frozen=True, slots=True)
class GradientsByMask:
    """It is a backward whose last argument says which gradients it returns. Each comes from a kernel of its own; that of
    the first does not look at the values of one argument."""

    unread: int
    """Place of that argument."""


@dataclass(frozen=True, slots=True)
class InPlaceInLinear:
    """``aten.linear`` adds its bias over the product it has just made, where no mode watches and no tensor is a fake."""

    products: tuple[str, ...]
    """What ran before it there."""


@dataclass(frozen=True, slots=True)
class NeverRecompute:
    """It may not run again."""

    effect: str
    """What it does; reads on from the name of its node."""


@dataclass(frozen=True, slots=True)
class TagsRandom:
    """Of this namespace, what draws random numbers has torch's tag; what others draw inside is not known."""


@dataclass(frozen=True, slots=True)
class RoutingDecision:
    """Its last output is integers that decide where values go: saved unless a policy says otherwise."""


@dataclass(frozen=True, slots=True)
class ByIndices:
    """A mask among its indices chooses as many elements as are true."""

    writes: bool
    """Whether it writes what is chosen; else it returns it, and the result's size follows from values."""


@dataclass(frozen=True, slots=True)
class ReadsScalar:
    """It hands a tensor's value to Python, which a graph cannot know beforehand."""

    what: Literal["branch", "number", "op"]
    """The function that decides a branch, one that returns a number, or the op below them."""
    stand_in: bool = False
    """Whether a read on fakes is answered by a made-up number: optimizers and BatchNorm read their step counters."""


@dataclass(frozen=True, slots=True)
class TakesStorageOffset:
    """A captured call of it has, as a constant, where on its storage the result begins."""

    place: int


@dataclass(frozen=True, slots=True)
class MakesConstant:
    """It returns values that follow from its arguments alone, without any tensor among them."""


@dataclass(frozen=True, slots=True)
class AddedByExport:
    """torch.export writes it into the graph where the model itself does not call it."""


@dataclass(frozen=True, slots=True)
class MadeFirst:
    """Of its results, it allocates these before the others."""

    places: tuple[int, ...]
    where: Literal["always", "depthwise", "channels last"] = "always"
    """In which kernels of PyTorch's own: of depthwise convolutions, of norms with channels last."""


@dataclass(frozen=True, slots=True)
class QueryOnly:
    """It asks a tensor about itself, and neither computes nor allocates."""


# -- what ops save -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SavesUnseen:
    """Its backward keeps memory, or a random state, that a fake does not show: models with it are refused."""


@dataclass(frozen=True, slots=True)
class UnreadInput:
    """Its backward takes its first argument and only looks at its shape, strides and dtype."""

    if_others_frozen: bool = False
    """Only where no other argument requires grad."""
    saves_indices: bool = False
    """What it saves last are indices."""


@dataclass(frozen=True, slots=True)
class CompressedForm:
    """A function of fxmem computes the same bits and saves less."""

    form: str
    """The function's name."""
    backward: str = ""
    """The op that computes the gradient, where the form has to be told."""
    preceded_by: tuple[tuple[str, int], ...] = ()
    """The ops before it that the form stands for too, from the last to the first, each with the place of the argument,
    of the op after it, that it makes."""


@dataclass(frozen=True, slots=True)
class LeanBackward:
    """A function of fxmem computes the same bits, and its backward holds less at once."""

    form: str
    """The function's name."""
    of: str = ""
    """The op that returns what the form has to know beside the result, where that is another one."""


@dataclass(frozen=True, slots=True)
class PartOf:
    """A trace has it, and what prepares its operands, where the model calls another op."""

    whole: str
    through: tuple[str, ...]
    """Ops that may stand between it and ``start``."""
    start: str


@dataclass(frozen=True, slots=True)
class InPlaceForm:
    """A function of fxmem writes the result over the first argument, and its backward computes the same bits."""

    form: str
    """The function's name."""
    saves_result: bool = False
    """Whether it saves its result where the op saves its input."""


# -- what fakes get wrong ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class FakeResult:
    """Its fake kernel returns other bytes, dtypes or strides than the real one."""

    correction: str
    """The function's name: it takes what the fake kernel returned, and the arguments."""


@dataclass(frozen=True, slots=True)
class OwnKernelOnCuda:
    """CUDA has a kernel for it where builds of torch without CUDA put it together from other ops."""


@dataclass(frozen=True, slots=True)
class MissingFake:
    """torch has no fake kernel for it."""

    kernel: str
    """The function's name: it makes the result."""
    bounds: bool = False
    """Whether the result's size follows from values: what the fake makes is an upper bound."""


@dataclass(frozen=True, slots=True)
class OnlyWrites:
    """It writes into its arguments, returns nothing and allocates nothing; fakes have no kernel for it."""


@dataclass(frozen=True, slots=True)
class FakeOfSparse:
    """Its fake kernel forgets the entries of a sparse tensor."""

    replacement: str
    """The function's name: it is called instead."""
    place: int = 0
    """Of the argument that is sparse."""


# -- what ops cost -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Flops:
    """torch has no formula for its FLOPs."""

    formula: str
    """The function's name."""


@dataclass(frozen=True, slots=True)
class TimeDependsOnValues:
    """How long it takes depends on the values of an argument, so made-up ones have to be right."""

    values: Literal["group ends"]


@dataclass(frozen=True, slots=True)
class Elementwise:
    """It has one kernel, which does not look at whether autograd is on, though ATen does not tag it as pointwise."""


# -- what ops are in patterns ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Role:
    """What an op is to somebody who looks for it."""

    name: str


class RowRole(Role):
    """In chains that treat each row by itself (:mod:`fxmem.passes.chunk`)."""


class SampleRole(Role):
    """To samples of a batch (:mod:`fxmem.capture.sample_coupling`)."""


class CompiledRole(Role):
    """In the joint graph of a compiled step (:mod:`fxmem.compiled.joint`)."""


class FusedRole(Role):
    """In chains that run as one kernel (:mod:`fxmem.runtime.programs.fused_calls`)."""


class RecordedRole(Role):
    """In a step that is written down (:mod:`fxmem.runtime.programs.recording`)."""
