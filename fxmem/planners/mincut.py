"""The cheapest set of recipes to rerun at a price per byte kept: a minimum cut, for every price at once.

In: simulator tables of a profile or of a part of one. Out: a *menu* of :class:`Choice`, kept bytes falling and seconds
rising: all points of the lower convex hull of (bytes, seconds), found by Eisner and Severance's recursion over prices
(J. ACM 23(4), 1976). :func:`frontier` judges the menu of the whole graph.

NOTE [The network]

1. A vertex for each recipe; it is on the source's side if the recipe reruns, and then its edge to the sink is cut:
   capacity ``seconds``.
2. A storage that backward asks for is kept or its recipe reruns: an edge from the source to the recipe, capacity
   ``price * bytes``. A recipe that makes several of them reruns once for all.
3. A storage that only recipes ask for has a vertex: infinite edges lead to it from the recipes that read it, an edge
   of ``price * bytes`` leads on to the recipe that makes it.
4. What may not be dropped and is not asked for by backward costs its bytes when held for a rerun (an edge to the
   sink); what is held anyway costs nothing and does not appear.

Not modelled: the peak. Memory is priced as if all kept bytes were live together, and the working set of a recomputation
is free; so at high prices the peak may rise above keeping all. Only the simulator's word counts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

import numpy as np
from numpy.typing import NDArray

from fxmem.ir import KEEP, FrontierPoint, GraphProfile
from fxmem.planners.flow import SINK, SOURCE, Flow
from fxmem.planners.pareto import Clock, judge_all
from fxmem.planners.simulate import NO_RECIPE, Tables, tables_of

FLOW_UNITS = 10**9
"""Seconds of all recipes together, in units of flow: an integer below 2^31, fine enough to tell costs apart."""
MAX_CHOICES = 96
"""Prices after which a menu is left as it is."""
SECONDS, INFINITE = -1, -2
"""What an edge carries if not weights: the seconds of the recipe at its tail, or more than any cut."""


@dataclass(frozen=True, slots=True, order=True)
class Choice:
    """One point of a menu."""

    reruns: tuple[bool, ...]
    """For each recipe."""
    kept_weight: float
    """Sum of the weights (bytes, unless other weights were given) of kept storages."""
    seconds: float


def frontier(profile: GraphProfile, *, seconds: float) -> tuple[FrontierPoint, ...]:
    """Return the Pareto set of the whole graph's menu, each choice refilled on the way and late."""
    clock = Clock(seconds)
    tables = tables_of(profile)
    return judge_all(profile, "mincut", _candidates(tables, clock), clock)


def _candidates(tables: Tables, clock: Clock) -> Iterator[tuple[int, ...]]:
    last = len(tables.inputs) - 1
    for choice in menu(tables, clock=clock):
        yield choice_limits(tables, choice, last)
        yield choice_limits(tables, choice, None)


def choice_limits(tables: Tables, choice: Choice, limit: int | None) -> tuple[int, ...]:
    """Return the retain limits of a choice: ``limit`` for what is dropped, or its own position (late) if None."""
    return tuple(
        KEEP if p == NO_RECIPE or not choice.reruns[p] else p if limit is None else limit for p in tables.position
    )


def menu(
    tables: Tables,
    *,
    weights: Sequence[float] | None = None,
    clock: Clock | None = None,
    max_choices: int = MAX_CHOICES,
) -> list[Choice]:
    """Return the menu over all prices, kept bytes falling; ``weights`` replaces the bytes of each storage.

    At most ``max_choices`` prices are tried, widest gaps first.
    """
    network = Network(tables, tables.nbytes if weights is None else weights)
    if not network.num_edges:
        return [network.nothing()]
    choices = [network.nothing(), network.solve(network.highest_price)]
    if choices[1].seconds <= 0.0 and choices[1].kept_weight >= choices[0].kept_weight:
        return choices[:1]
    gaps = [_gap(choices[0], choices[1])]
    num_solved = 1
    while gaps and num_solved < max_choices and not (clock and clock.over):
        *_, left, right = heappop(gaps)
        if right.seconds <= left.seconds or left.kept_weight <= right.kept_weight:
            continue
        price = (right.seconds - left.seconds) / (left.kept_weight - right.kept_weight)
        between = network.solve(price)
        num_solved += 1
        best = left.seconds + price * left.kept_weight
        if between.seconds + price * between.kept_weight < best * (1 - 1e-7):
            choices.append(between)
            heappush(gaps, _gap(left, between))
            heappush(gaps, _gap(between, right))
    return sorted(choices, key=lambda c: (-c.kept_weight, c.seconds))


def _gap(left: Choice, right: Choice) -> tuple[float, float, Choice, Choice]:
    """Ranked by the area in which a choice between the two may lie, widest first."""
    area = (left.kept_weight - right.kept_weight) * (right.seconds - left.seconds)
    return (-area, left.seconds, left, right)


class Network:
    """The network of NOTE [The network]; only capacities depend on prices and weights."""

    def __init__(self, tables: Tables, weights: Sequence[float] | NDArray[np.float64]) -> None:
        """Storages of weight 0 are left out for good."""
        self.tables = tables
        self.position = np.asarray(tables.position, dtype=np.int64)
        self.saved = np.asarray(tables.num_saves, dtype=np.int64) > 0
        self.seconds = np.asarray(tables.seconds, dtype=np.float64)
        self.total_seconds = float(self.seconds.sum()) or 1.0
        self.num_vertices = 2 + len(tables.inputs) + len(tables.nbytes)
        reads = [(p, s) for p, inputs in enumerate(tables.inputs) for s in inputs]
        self.readers = np.array([p for p, _ in reads], dtype=np.int64)
        self.read = np.array([s for _, s in reads], dtype=np.int64)
        self._lay_out(self._edges(np.asarray(weights, dtype=np.float64)))
        self.weigh(weights)
        self.num_edges = int((self.edge_weight > 0).sum())

    def _edges(self, weights: NDArray[np.float64]) -> dict[tuple[int, int], list[int]]:
        """Return the storages whose weights each edge carries; ``SECONDS`` and ``INFINITE`` for the other two kinds."""
        tables, num_recipes = self.tables, len(self.tables.inputs)
        edges: dict[tuple[int, int], list[int]] = {(2 + p, SINK): [SECONDS] for p in range(num_recipes)}  # rule 1
        for s, p in enumerate(tables.position):  # rule 2
            if p != NO_RECIPE and tables.num_saves[s]:
                edges.setdefault((SOURCE, 2 + p), []).append(s)
        for p, inputs in enumerate(tables.inputs):  # rules 3 and 4
            for s in inputs:
                if not tables.num_saves[s] and weights[s] > 0:
                    vertex, maker = 2 + num_recipes + s, tables.position[s]
                    edges[2 + p, vertex] = [INFINITE]
                    edges[vertex, SINK if maker == NO_RECIPE else 2 + maker] = [s]
        return edges

    def _lay_out(self, edges: dict[tuple[int, int], list[int]]) -> None:
        """Put the edges in order, once."""
        keys = sorted(edges)
        carried = [(e, s) for e, key in enumerate(keys) for s in edges[key] if s >= 0]
        self.carrying = np.array([e for e, _ in carried], dtype=np.int64)
        self.carried = np.array([s for _, s in carried], dtype=np.int64)
        self.infinite = np.array([edges[key][0] == INFINITE for key in keys], dtype=bool)
        timed = [key[0] - 2 if edges[key][0] == SECONDS else -1 for key in keys]
        self.edge_seconds = np.append(self.seconds, 0.0)[timed]
        self.flow = Flow(self.num_vertices, [tail for tail, _ in keys], [head for _, head in keys])

    def weigh(self, weights: Sequence[float] | NDArray[np.float64]) -> None:
        """Exchange the weights of the storages."""
        self.weights = np.asarray(weights, dtype=np.float64)
        self.edge_weight = np.zeros(len(self.edge_seconds))
        np.add.at(self.edge_weight, self.carrying, self.weights[self.carried])
        self.edge_weight[self.infinite] = np.inf

    @property
    def highest_price(self) -> float:
        return 1e3 * self.total_seconds / max(1e-30, float(self.weights[self.saved].sum()))

    def solve(self, price: float) -> Choice:
        """Return the choice that costs least at ``price`` seconds for each unit of weight."""
        return self._choice(self.cut(price)[1])

    def cut(self, price: float) -> tuple[float, NDArray[np.bool_]]:
        """Return a lower bound on the least cost at ``price``, tight but for rounding, and the recipes to rerun."""
        scale = FLOW_UNITS / self.total_seconds
        with np.errstate(invalid="ignore"):
            real = scale * (price * self.edge_weight + self.edge_seconds)
        capacities = np.minimum(np.rint(real), FLOW_UNITS + 1).astype(np.int64).tolist()
        value, reached = self.flow.least_cut(capacities)
        least = max(0.0, (value - 0.5 * len(capacities)) / scale)
        return least, np.array(reached[2 : 2 + len(self.tables.inputs)])

    def nothing(self) -> Choice:
        return self._choice(np.zeros(len(self.tables.inputs), dtype=bool))

    def _choice(self, reruns: NDArray[np.bool_]) -> Choice:
        kept_weight = float(self.weights[self.held(reruns)].sum())
        return Choice(tuple(reruns.tolist()), kept_weight, float(self.seconds[reruns].sum()))

    def held(self, reruns: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """Return which storages the choice holds, those apart that no choice could let go of."""
        needed = self.saved.copy()
        needed[self.read[reruns[self.readers]]] = True
        remade = np.zeros(len(needed), dtype=bool)
        droppable = self.position != NO_RECIPE
        remade[droppable] = reruns[self.position[droppable]]
        held: NDArray[np.bool_] = needed & ~remade & (droppable | ~self.saved)
        return held
