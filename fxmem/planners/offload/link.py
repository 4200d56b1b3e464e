"""How long a step waits for the link between device and host memory.

In: a profile, a plan, a :class:`Link`. Out: the plan with the seconds that each of its offloads lets the step wait; and
when a fetch must start so that nobody waits for it. A fake timeline with three lanes, which work at the same time:
compute, copies to host, copies to device. Copies of one way follow each other. An op's backward takes its share of the
eager backward, in proportion to its forward. Not modelled: that copies take memory bandwidth from compute.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import groupby

from fxmem.ir import KEEP, GraphProfile, Phase, PlainData, Plan
from fxmem.planners.offload.recipes import fetched_ahead, sent, slots_of, with_offloads
from fxmem.planners.simulate import run_of


@dataclass(frozen=True, slots=True)
class Link(PlainData):
    """What copies between device and host memory go over."""

    name: str
    bytes_per_second: float
    """Sustained, each way."""
    copy_seconds: float = 10e-6
    """The fixed cost of one copy."""
    overlaps: bool = True
    """Whether the device computes meanwhile; where it does not, every copy is waited for."""

    def seconds(self, nbytes: int) -> float:
        """Return the time of one copy."""
        return nbytes / self.bytes_per_second + self.copy_seconds if nbytes else 0.0


LINKS = {
    link.name: link
    for link in (
        Link("pcie4", 25e9),
        Link("pcie5", 50e9),
        Link("nvlink-c2c", 360e9),
        Link("cpu", 5e9, 3e-6, overlaps=False),
    )
}
"""About 80 % of what 16 lanes of PCI Express 4 and 5, and NVLink-C2C, have at most each way (31.5, 63, 450 GB/s). "cpu":
plain copies within host memory, as on a CPU."""

_OF_HARDWARE = {"cpu": "cpu", "h100": "pcie5", "h200": "pcie5", "gh200": "nvlink-c2c"}


def link_of(hardware: str) -> Link:
    """Return the link of the hardware preset of that name; PCI Express 4 where nothing else is known."""
    return LINKS[_OF_HARDWARE.get(hardware, "pcie4")]


def sent_bytes(profile: GraphProfile, plan: Plan) -> dict[int, int]:
    """Return the bytes that a plan copies to host memory of what each recipe makes that it offloads."""
    slots = slots_of(profile, plan)
    return {r: sum(profile.storages[s].nbytes for s in sent(profile, plan, slots, r)) for r in sorted(plan.fetched)}


def tick_seconds(profile: GraphProfile) -> list[float]:
    """Return the compute time of each tick without recomputations."""
    ticks, nodes = profile.ticks, profile.nodes
    num_ticks: dict[int, int] = {}
    for tick in ticks:
        if tick.phase is Phase.BACKWARD and tick.node is not None:
            num_ticks[tick.node] = num_ticks.get(tick.node, 0) + 1
    timed = sum(nodes[k].seconds for k in num_ticks) or 1.0
    return [
        0.0
        if tick.node is None
        else nodes[tick.node].seconds
        if tick.phase is Phase.FORWARD
        else profile.backward_seconds * nodes[tick.node].seconds / timed / num_ticks[tick.node]
        if tick.phase is Phase.BACKWARD
        else 0.0
        for tick in ticks
    ]


def priced(profile: GraphProfile, plan: Plan, link: Link) -> Plan:
    """Return ``plan`` with the seconds that the step waits for each of its offloads."""
    lanes = _run(profile, plan, link)
    return replace(
        plan,
        offloads=tuple(
            replace(o, stall_seconds=lanes.stalls[o.recipe], num_fetches=max(1, lanes.num_fetches[o.recipe]))
            for o in plan.offloads
        ),
    )


def stalls_of(profile: GraphProfile, plan: Plan, link: Link) -> dict[int, float]:
    """Return, for each recipe that ``plan`` offloads, how long the step waits for its copies."""
    return _run(profile, plan, link).stalls


def _run(profile: GraphProfile, plan: Plan, link: Link) -> _Lanes:
    """Return the lanes at the end of the step."""
    lane = _Lanes(profile, plan, link)
    derived = with_offloads(profile, plan)
    seconds, steps = tick_seconds(profile), run_of(derived, plan.limits, record=True).steps
    for number, group in groupby(steps or (), key=lambda step: step[0]):
        tick = profile.ticks[number]
        asked = {profile.storages[s].recipe for s in tick.unpacks}
        for _, recipe, _ in group:
            if recipe is None:
                lane.need(asked)
                lane.compute(seconds[number])
            elif recipe in plan.fetched:
                lane.fetch(recipe)
            else:
                lane.need(profile.storages[s].recipe for s in derived.recipes[recipe].inputs)
                lane.compute(derived.recipes[recipe].seconds)
        if tick.node is not None and tick.phase is Phase.FORWARD:
            lane.send(tick.node, derived.ticks[number].last_used)
    return lane


class _Lanes:
    """The time up to which each lane is busy, and who made compute wait."""

    def __init__(self, profile: GraphProfile, plan: Plan, link: Link) -> None:
        self._link, self._profile = link, profile
        self._bytes = sent_bytes(profile, plan)
        self._made_by = {profile.recipes[r].nodes[-1]: r for r in plan.fetched}
        self.now = self._to_host = self._to_device = 0.0
        self._sent: dict[int, float] = {}
        self._arriving: dict[int, float] = {}
        self.stalls = dict.fromkeys(self._bytes, 0.0)
        self.num_fetches = dict.fromkeys(self._bytes, 0)

    def compute(self, seconds: float) -> None:
        self.now += seconds

    def send(self, node: int, last_used: Iterable[int]) -> dict[int, float]:
        """The forward has run ``node``: copy what is final, wait for copies of what it lets go of. Return when copies are
        made, by recipe."""
        recipe = self._made_by.get(node)
        if recipe is not None:
            self._sent[recipe] = self._to_host = max(self._to_host, self.now) + self._seconds(recipe)
            if not self._link.overlaps:
                self._wait(recipe, self._to_host)
        for s in last_used:
            of = self._profile.storages[s].recipe
            if of is not None and of in self._sent:
                self._wait(of, self._sent[of])
        return self._sent

    def fetch(self, recipe: int) -> None:
        """A copy to the device starts; it is waited for when it is needed."""
        self.num_fetches[recipe] += 1
        self._arriving[recipe] = self._to_device = max(self._to_device, self.now) + self._seconds(recipe)
        if not self._link.overlaps:
            self._wait(recipe, self._to_device)

    def need(self, recipes: Iterable[int | None]) -> None:
        for recipe in recipes:
            if recipe is not None and recipe in self._arriving:
                self._wait(recipe, self._arriving.pop(recipe))

    def _seconds(self, recipe: int) -> float:
        return self._link.seconds(self._bytes[recipe])

    def _wait(self, recipe: int, until: float) -> None:
        self.stalls[recipe] += max(0.0, until - self.now)
        self.now = max(self.now, until)


def left_in_time(profile: GraphProfile, plan: Plan, link: Link) -> Plan:
    """Return ``plan`` with the originals held until their copies are made, at most to the end of the forward."""
    lane = _Lanes(profile, plan, link)
    seconds, last = tick_seconds(profile), 0
    left: dict[int, int] = {}
    let_go: set[int] = set()
    for number, tick in enumerate(profile.ticks):
        if tick.phase is not Phase.FORWARD or tick.node is None:
            continue
        lane.compute(seconds[number])
        over_at = lane.send(tick.node, ())
        let_go.update(r for s in tick.last_used if (r := profile.storages[s].recipe) in plan.fetched and r is not None)
        for recipe in sorted(let_go - left.keys()):
            if recipe in over_at and over_at[recipe] <= lane.now:
                left[recipe] = tick.node
        last = tick.node
    return replace(plan, offloads=tuple(replace(o, left=left.get(o.recipe, last)) for o in plan.offloads))


def fetched_in_time(profile: GraphProfile, plan: Plan, link: Link) -> Plan:
    """Return ``plan`` with each fetch started as late as still hides it: the copies of one way follow each other, so the
    last one is placed first, each other before the next. ``plan``: one that fetches when asked."""
    steps = run_of(with_offloads(profile, plan), plan.limits, record=True).steps or ()
    seconds, recipes = tick_seconds(profile), profile.recipes
    starts, asked_at, now = [0.0] * len(profile.ticks), dict[int, tuple[float, int]](), 0.0
    for number, recipe, _ in steps:
        if recipe is None:
            starts[number] = now
            now += seconds[number]
        elif recipe in plan.fetched:
            asked_at.setdefault(recipe, (now, number))
        else:
            now += recipes[recipe].seconds
    triggers, nbytes = _triggers(profile, plan), sent_bytes(profile, plan)
    after: dict[int, int | None] = {}
    free = now
    for recipe, (needed, number) in sorted(asked_at.items(), key=lambda item: item[1], reverse=True):
        free = min(free, needed) - link.seconds(nbytes[recipe])
        earlier = [t for t in triggers if t < number]
        if earlier and fetched_ahead(profile, plan, recipe):
            after[recipe] = triggers[max((t for t in earlier if starts[t] <= free), default=earlier[0])]
    return replace(plan, offloads=tuple(replace(o, after=after.get(o.recipe)) for o in plan.offloads))


def _triggers(profile: GraphProfile, plan: Plan) -> dict[int, int]:
    """Return the ticks of the backward, in order, that unpack a dropped storage for the first time, each with the last."""
    seen: set[int] = set()
    found: dict[int, int] = {}
    for number, tick in enumerate(profile.ticks):
        for s in tick.unpacks:
            if plan.limits[s] != KEEP and s not in seen:
                seen.add(s)
                found[number] = s
    return found
