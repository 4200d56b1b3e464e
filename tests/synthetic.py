"""Hand-made graph profiles: integer bytes and integer seconds, so that expected numbers are small and whole.

:func:`build` turns a list of :class:`Op` into the profile that observing such a step would give: forward ticks, a loss
tick, and backward ticks that unpack and release in the order autograd does.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from fxmem.ir import GraphProfile, NodeProfile, Phase, Recipe, Source, StaticBytes, Storage, Tick


@dataclass(frozen=True)
class Op:
    """One node that makes one storage, perhaps an internal, and saves some of what it sees."""

    reads: tuple[int, ...] = ()
    """Indices of earlier ops."""
    nbytes: int = 1
    seconds: float = 1.0
    saves_inputs: bool = True
    saves_output: bool = False
    internal_bytes: int = 0
    workspace_bytes: int = 0
    recomputable: bool = True


def build(ops: Sequence[Op], *, static_bytes: int = 0, grad_bytes: int = 0, loss_bytes: int = 0) -> GraphProfile:
    """Return the profile of a step that runs ``ops`` in order; the last one's output goes to the loss.

    ``grad_bytes`` is what each op adds to the parameter gradients, which stay until the end.
    """
    output_of, internal_of = _number_storages(ops)
    saves = [_saves(op, i, output_of, internal_of) for i, op in enumerate(ops)]
    recipe_of = _number_recipes(ops)
    storages = _storages(ops, output_of, internal_of, saves, recipe_of)
    nodes = tuple(
        NodeProfile(
            i, f"op{i}", "op", tuple(output_of[r] for r in op.reads), _created(i, output_of, internal_of), (),
            saves[i], op.seconds, 0, 0, False, "" if op.recomputable else "impure", Source(),
        )
        for i, op in enumerate(ops)
    )  # fmt: skip
    recipes = tuple(
        _recipe(op, i, recipe_of[i], output_of, internal_of) for i, op in enumerate(ops) if recipe_of[i] is not None
    )
    ticks = (
        *_forward_ticks(ops, output_of, internal_of, static_bytes),
        Tick(Phase.LOSS, None, (), static_bytes, static_bytes + loss_bytes, (), (output_of[len(ops) - 1],), ()),
        *_backward_ticks(ops, saves, static_bytes, grad_bytes),
    )
    forward_seconds = sum(op.seconds for op in ops)
    return GraphProfile(nodes, storages, recipes, ticks, StaticBytes(static_bytes), 2 * forward_seconds)


def _number_storages(ops: Sequence[Op]) -> tuple[list[int], list[int | None]]:
    output_of, internal_of, count = [], [], 0
    for op in ops:
        output_of.append(count)
        internal_of.append(count + 1 if op.internal_bytes else None)
        count += 2 if op.internal_bytes else 1
    return output_of, internal_of


def _number_recipes(ops: Sequence[Op]) -> list[int | None]:
    """The last op's output is the model's output: it stays."""
    numbers: list[int | None] = []
    count = 0
    for i, op in enumerate(ops):
        droppable = op.recomputable and i < len(ops) - 1
        numbers.append(count if droppable else None)
        count += droppable
    return numbers


def _created(i: int, output_of: list[int], internal_of: list[int | None]) -> tuple[int, ...]:
    internal = internal_of[i]
    return (output_of[i],) if internal is None else (output_of[i], internal)


def _saves(op: Op, i: int, output_of: list[int], internal_of: list[int | None]) -> tuple[int, ...]:
    saved = [output_of[r] for r in op.reads] if op.saves_inputs else []
    if op.saves_output:
        saved.append(output_of[i])
    internal = internal_of[i]
    return tuple(saved if internal is None else [*saved, internal])


def _storages(
    ops: Sequence[Op],
    output_of: list[int],
    internal_of: list[int | None],
    saves: list[tuple[int, ...]],
    recipe_of: list[int | None],
) -> tuple[Storage, ...]:
    num_saves = [0] * sum(1 if internal is None else 2 for internal in internal_of)
    for saved in saves:
        for s in saved:
            num_saves[s] += 1
    storages = []
    for i, op in enumerate(ops):
        why = "" if recipe_of[i] is not None else "output or impure"
        storages.append(
            Storage(output_of[i], f"op{i}", op.nbytes, i, False, recipe_of[i], why, num_saves[output_of[i]])
        )
        internal = internal_of[i]
        if internal is not None:
            storages.append(
                Storage(
                    internal, f"op{i}.internal0", op.internal_bytes, i, True, recipe_of[i], why, num_saves[internal]
                )
            )
    return tuple(storages)


def _recipe(op: Op, i: int, index: int | None, output_of: list[int], internal_of: list[int | None]) -> Recipe:
    assert index is not None
    made_bytes = op.nbytes + op.workspace_bytes
    return Recipe(
        index, (i,), tuple(dict.fromkeys(output_of[r] for r in op.reads)), _created(i, output_of, internal_of),
        op.seconds, made_bytes, made_bytes + op.internal_bytes,
    )  # fmt: skip


def _forward_ticks(
    ops: Sequence[Op], output_of: list[int], internal_of: list[int | None], static_bytes: int
) -> list[Tick]:
    last_reader = list(range(len(ops)))
    for i, op in enumerate(ops):
        for r in op.reads:
            last_reader[r] = i
    ticks = []
    for i, op in enumerate(ops):
        candidates = sorted({*op.reads, i} - {len(ops) - 1})
        last_used = [output_of[r] for r in candidates if last_reader[r] == i]
        internal = internal_of[i]
        last_used += [] if internal is None else [internal]
        peak_bytes = static_bytes + op.nbytes + op.internal_bytes + op.workspace_bytes
        created = _created(i, output_of, internal_of)
        ticks.append(Tick(Phase.FORWARD, i, (), static_bytes, peak_bytes, created, tuple(last_used), ()))
    return ticks


def _backward_ticks(ops: Sequence[Op], saves: list[tuple[int, ...]], static_bytes: int, grad_bytes: int) -> list[Tick]:
    """The gradient of an op's output lives from its last reader's backward to its own."""
    ticks, reached = [], {len(ops) - 1}
    for i in reversed(range(len(ops))):
        reached = {r for r in reached if r <= i}
        in_flight_bytes = static_bytes + (len(ops) - 1 - i) * grad_bytes + sum(ops[r].nbytes for r in reached)
        reached.update(ops[i].reads)
        new_bytes = sum(ops[r].nbytes for r in ops[i].reads) + grad_bytes + ops[i].workspace_bytes
        ticks.append(Tick(Phase.BACKWARD, i, saves[i], in_flight_bytes, in_flight_bytes + new_bytes, (), (), saves[i]))
    return ticks


def chain(num_ops: int, *, nbytes: int = 1, seconds: float = 1.0, **step: int) -> GraphProfile:
    """Return a chain in which every op saves its input."""
    ops = [Op((i - 1,) if i else (), nbytes, seconds) for i in range(num_ops)]
    return build(ops, **step)


def residual_blocks(num_blocks: int, *, width: int = 8, **step: int) -> GraphProfile:
    """Return blocks as of a transformer: norm, expand, pointwise with mask, contract, add; every block is equal."""
    ops = [Op((), width, 1.0)]
    for _ in range(num_blocks):
        skip = len(ops) - 1
        ops.append(Op((skip,), width, 1.0, internal_bytes=1))
        ops.append(Op((skip + 1,), 4 * width, 8.0))
        ops.append(Op((skip + 2,), 4 * width, 1.0, internal_bytes=width))
        ops.append(Op((skip + 3,), width, 8.0))
        ops.append(Op((skip, skip + 4), width, 1.0, saves_inputs=False))
    ops.append(Op((len(ops) - 1,), 1, 1.0))
    return build(ops, **step)


def hourglass(depth: int, *, width: int = 64, **step: int) -> GraphProfile:
    """Return an encoder and a decoder with a skip connection at every level."""
    ops: list[Op] = [Op((), width, 2.0)]
    skips = []
    for level in range(depth):
        size = max(1, width >> level)
        ops.append(Op((len(ops) - 1,), size, 4.0))
        ops.append(Op((len(ops) - 1,), size, 1.0, saves_inputs=False, saves_output=True))
        skips.append(len(ops) - 1)
        ops.append(Op((len(ops) - 1,), max(1, size // 2), 1.0))
    for level in reversed(range(depth)):
        size = max(1, width >> level)
        ops.append(Op((len(ops) - 1, skips[level]), 2 * size, 1.0, saves_inputs=False))
        ops.append(Op((len(ops) - 1,), size, 4.0))
    ops.append(Op((len(ops) - 1,), 1, 1.0))
    return build(ops, **step)


def random_dag(seed: int, num_ops: int, *, reach: int = 4, **step: int) -> GraphProfile:
    """Return a random graph: up to three inputs from the ``reach`` latest ops, random costs, internals and impure ops."""
    rng = random.Random(seed)
    ops = []
    for i in range(num_ops):
        candidates = range(max(0, i - reach), i)
        reads = sorted(rng.sample(candidates, min(len(candidates), rng.randint(1, 3)))) if i else []
        ops.append(
            Op(
                tuple(reads),
                rng.randint(1, 9),
                float(rng.randint(1, 9)),
                saves_inputs=rng.random() < 0.7,
                saves_output=rng.random() < 0.3,
                internal_bytes=rng.randint(1, 4) if rng.random() < 0.25 else 0,
                workspace_bytes=rng.randint(0, 3),
                recomputable=rng.random() < 0.9,
            )
        )
    step = {"static_bytes": 5, "grad_bytes": 1, "loss_bytes": 3} | step
    return build(ops, **step)


def random_limits(profile: GraphProfile, rng: random.Random) -> tuple[int, ...]:
    """Return retain limits of every kind: kept, late, on the way and between."""
    last = len(profile.recipes) - 1
    limits = []
    for storage in profile.storages:
        own = storage.recipe
        kind = rng.random()
        if own is None or kind < 0.3:
            limits.append(-1)
        else:
            limits.append(own if kind < 0.5 else last if kind < 0.75 else rng.randint(own, last))
    return tuple(limits)
