"""A user's constraints on plans: what must be saved, what must be recomputed.

In: rules and a :class:`GraphProfile`. Out: a profile in which what must be saved may not be dropped, and the storages
that may not be kept. A rule is ``(where, "save")`` or ``(where, "recompute")``; ``where`` is a pattern of a module path
(``layers.*.mlp``; what lies inside counts), the name of an op (``relu``, ``aten.relu.default``), or a callable of a
:class:`NodeProfile`. The first rule that matches a node decides; :data:`ROUTING` comes last.

Routing decisions (which expert a token goes to) are saved unless a rule says otherwise: they are small, and a decision
made twice must be the same both times. Not modelled: what a policy costs; the frontier shows that.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from fnmatch import fnmatchcase

from fxmem.errors import InputError
from fxmem.ir import KEEP, FrontierPoint, GraphProfile, NodeProfile, Plan
from fxmem.op_facts import names_of
from fxmem.op_facts.kinds import RoutingDecision
from fxmem.planners.simulate import simulate

Rule = tuple[str | Callable[[NodeProfile], bool], str]
ACTIONS = ("save", "recompute")
ROUTING = frozenset(name.removeprefix("aten.") for name in names_of(RoutingDecision))
"""Ops whose last output is integers that decide where values go."""


def check_policy(policy: Sequence[Rule]) -> tuple[Rule, ...]:
    """Return the rules as a tuple. Errors: ``InputError`` for anything that is not a rule."""
    if isinstance(policy, str) or not isinstance(policy, Sequence):
        raise InputError(f"policy must be a sequence of (where, action) pairs, not {policy!r}")
    for rule in policy:
        if not isinstance(rule, tuple) or len(rule) != 2:
            raise InputError(f'a rule of policy is a pair such as ("layers.*", "save"), not {rule!r}')
        where, action = rule
        if not isinstance(where, str) and not callable(where):
            raise InputError(f"a rule of policy starts with a pattern, an op's name or a callable, not {where!r}")
        if action not in ACTIONS:
            raise InputError(f"unknown action {action!r} in policy; known: {', '.join(ACTIONS)}")
    return tuple(policy)


def constrain(profile: GraphProfile, policy: tuple[Rule, ...]) -> tuple[GraphProfile, frozenset[int]]:
    """Return the profile with what must be saved, and the storages that must be recomputed.

    A rule to recompute does not concern what may not be dropped anyway.
    """
    saved: dict[int, str] = {}
    recomputed: set[int] = set()
    for node in profile.nodes:
        rule = next((rule for rule in policy if matches(rule[0], node)), None)
        droppable = [s for s in node.creates if profile.storages[s].recipe is not None]
        if rule is None:
            saved.update(dict.fromkeys(_decisions(profile, node), "a routing decision"))
        elif rule[1] == "save":
            saved.update(dict.fromkeys(droppable, "the policy says so"))
        else:
            recomputed.update(droppable)
    storages = tuple(
        dataclasses.replace(s, recipe=None, why_kept=saved[s.index]) if s.index in saved and s.recipe is not None else s
        for s in profile.storages
    )
    constrained = dataclasses.replace(profile, storages=storages) if saved else profile
    return constrained, frozenset(recomputed)


def matches(where: str | Callable[[NodeProfile], bool], node: NodeProfile) -> bool:
    """Tell whether a rule is about ``node``."""
    if not isinstance(where, str):
        return bool(where(node))
    if where in (node.op, op_name(node)):
        return True
    parts = node.source.module_path.split(".") if node.source.module_path else []
    return any(fnmatchcase(".".join(parts[:k]), where) for k in range(1, len(parts) + 1))


def op_name(node: NodeProfile) -> str:
    """Return ``relu`` for ``aten.relu.default``."""
    parts = node.op.split(".")
    return parts[1] if len(parts) == 3 else parts[0]


def _decisions(profile: GraphProfile, node: NodeProfile) -> list[int]:
    outputs = [s for s in node.creates if not profile.storages[s].internal]
    return outputs[-1:] if op_name(node) in ROUTING else []


def enforce(
    profile: GraphProfile, points: Iterable[FrontierPoint], recomputed: frozenset[int]
) -> tuple[FrontierPoint, ...]:
    """Return the points with everything in ``recomputed`` dropped, each refilled on the way and late, judged anew."""
    points = tuple(points)
    if not recomputed:
        return points
    last, forced = len(profile.recipes) - 1, []
    for point in points:
        for late in (False, True):
            limits = tuple(
                _forced(profile, s, limit, last, late) if s in recomputed else limit
                for s, limit in enumerate(point.plan.limits)
            )
            plan = Plan(point.plan.planner, limits)
            timeline = simulate(profile, plan)
            forced.append(FrontierPoint(plan, timeline.peak_bytes, timeline.recompute_seconds))
    return tuple(forced)


def _forced(profile: GraphProfile, storage: int, limit: int, last: int, late: bool) -> int:
    position = profile.storages[storage].recipe
    if limit != KEEP or position is None:
        return limit
    return position if late else last
