"""Where the peak of a training step is, and what holds it."""

from __future__ import annotations

from dataclasses import dataclass

from fxmem.ir import GraphProfile, Phase, PlainData


@dataclass(frozen=True, slots=True)
class Place(PlainData):
    """Where in the step something is: phase, node of the graph, module path and the user's source line."""

    phase: Phase
    node: str
    """Name of the node of the captured graph; empty where the place is in none."""
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
    """Workspaces that libraries keep: cuBLAS's."""
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


def breakdown_of(profile: GraphProfile, tick: int, eager_bytes: int) -> Breakdown:
    """Return what is alive in ``profile.ticks[tick]`` if nothing is dropped, in a step that peaks at ``eager_bytes``."""
    at, static = profile.ticks[tick], profile.static
    alive = _alive(profile, tick)
    internals = sum(profile.storages[i].nbytes for i in alive if profile.storages[i].internal)
    activations = sum(profile.storages[i].nbytes for i in alive) - internals
    created = [profile.storages[i] for i in at.creates]
    temporaries = at.peak_bytes - static.total_bytes - at.gradient_bytes - at.loss_bytes
    inside = min(temporaries, sum(s.nbytes for s in created))
    inner = min(inside, sum(s.nbytes for s in created if s.internal))
    graph_bytes = at.peak_bytes + activations + internals
    return Breakdown(
        parameters_bytes=static.parameters_bytes,
        buffers_bytes=static.buffers_bytes,
        inputs_bytes=static.inputs_bytes,
        optimizer_state_bytes=static.optimizer_state_bytes,
        gradients_bytes=static.gradients_bytes + at.gradient_bytes,
        activations_bytes=activations + inside - inner,
        internals_bytes=internals + inner,
        loss_bytes=at.loss_bytes,
        temporaries_bytes=temporaries - inside,
        library_bytes=static.library_bytes,
        held_by_code_bytes=eager_bytes - graph_bytes,
    )


def _alive(profile: GraphProfile, tick: int) -> list[int]:
    """Managed storages alive at the start of a tick if nothing is dropped."""
    begin: dict[int, int] = {}
    end: dict[int, int] = {}
    for t, at in enumerate(profile.ticks):
        begin.update(dict.fromkeys(at.creates, t))
        end.update(dict.fromkeys((*at.last_used, *at.releases), t))
    return [i for i, t in begin.items() if t < tick <= end.get(i, len(profile.ticks))]
