"""Where the peak of a training step is, and what holds it."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, fields

from fxmem.ir import GraphProfile, Phase, PlainData
from fxmem.profiling.peak_watch import WatchedStep


@dataclass(frozen=True, slots=True)
class Place(PlainData):
    """Where in the step something is: phase, node of the graph, module path and the user's source line."""

    phase: Phase
    node: str
    """Name of the node of the captured graph, in an estimate of the function of torch; empty where the place is in none."""
    module_path: str
    """Such as ``layers.0.mlp``; empty when unknown."""
    source_line: str
    """The user's ``file:line``; empty when unknown."""

    def __str__(self) -> str:
        where = ", ".join(part for part in (self.module_path, self.source_line) if part)
        return f"the {self.phase.value}" + (f" of {self.node}, {where or 'unknown place'}" if self.node else "")


@dataclass(frozen=True, slots=True)
class Breakdown(PlainData):
    """What is alive at the peak, in bytes; the fields sum to the peak."""

    parameters_bytes: int
    buffers_bytes: int
    inputs_bytes: int
    """The batch: the tensors among the call's arguments."""
    optimizer_state_bytes: int
    gradients_bytes: int
    """Of parameters and inputs, those of earlier micro-batches included."""
    activations_bytes: int
    """Outputs of the model's ops that the forward or autograd holds."""
    internals_bytes: int
    """What autograd saves beside inputs and outputs: masks, statistics, cast weights."""
    loss_bytes: int
    """What the loss allocates outside the model."""
    temporaries_bytes: int
    """All else: gradients of activations, workspace of a composite op, the optimizer's temporaries."""
    library_bytes: int
    """Workspaces that libraries keep: those of cuBLAS and cuBLASLt."""
    held_by_code_bytes: int
    """What local variables and attributes of the model's own code hold longer than its graph needs."""

    def rows(self) -> tuple[tuple[str, int], ...]:
        """Return (kind, bytes) pairs, the largest first."""
        pairs = [(name.removesuffix("_bytes").replace("_", " "), getattr(self, name)) for name in self.__slots__]
        return tuple(sorted(pairs, key=lambda pair: -pair[1]))


def place_of(profile: GraphProfile, tick: int) -> Place:
    """Return where ``profile.ticks[tick]`` is."""
    at = profile.ticks[tick]
    if at.node is None:
        return Place(at.phase, "", "", "")
    node = profile.nodes[at.node]
    return Place(at.phase, node.name, node.source.module_path, node.source.line)


def place_of_peak(step: WatchedStep) -> Place:
    """Return where a watched step peaks."""
    site = step.peak_site
    return Place(step.peak_phase, site.name, site.source.module_path, site.source.line)


def breakdown_at_peak(step: WatchedStep, libraries_bytes: int) -> Breakdown:
    """Return what is alive at the peak of a watched step."""
    of_kind = Counter({"library": libraries_bytes})
    for storage in step.alive:
        of_kind[storage.kind] += storage.nbytes
    return Breakdown(**{field.name: of_kind[field.name.removesuffix("_bytes")] for field in fields(Breakdown)})
