"""The least cut is that of scipy, and the smallest of its kind."""

import numpy as np
import pytest
from scipy.sparse import csr_matrix
from scipy.sparse.csgraph import breadth_first_order, maximum_flow

from fxmem.planners.flow import SINK, SOURCE, Flow


def _least_cut_by_scipy(num_vertices: int, edges: list[tuple[int, int]], capacities: list[int]) -> tuple[int, set[int]]:
    tails, heads = zip(*edges, strict=True)
    graph = csr_matrix((np.array(capacities, dtype=np.int32), (tails, heads)), shape=(num_vertices, num_vertices))
    flow = maximum_flow(graph, SOURCE, SINK)
    residual = graph - flow.flow
    residual.eliminate_zeros()
    return flow.flow_value, set(breadth_first_order(residual, SOURCE, return_predecessors=False).tolist())


@pytest.mark.parametrize("seed", range(40))
def test_least_cuts_of_random_networks_are_those_of_scipy(seed: int) -> None:
    random = np.random.default_rng(seed)
    num_vertices = int(random.integers(3, 14))
    pairs = random.integers(0, num_vertices, size=(4 * num_vertices, 2)).tolist()
    edges = sorted({(a, b) for a, b in pairs if a != b and b != SOURCE and a != SINK} | {(SOURCE, 2), (2, SINK)})
    flow = Flow(num_vertices, [a for a, _ in edges], [b for _, b in edges])
    for _ in range(4):
        capacities = random.integers(0, 9, size=len(edges)).tolist()
        value, reached = flow.least_cut(capacities)
        assert (value, {v for v in range(num_vertices) if reached[v]}) == _least_cut_by_scipy(
            num_vertices, edges, capacities
        )
