"""Laws of the bound on subgraphs that one node can change."""

from itertools import pairwise

import pytest

from silograph.federation.privacy.node_sensitivity import (
    most_changed_subgraphs,
    most_nodes_within,
)


@pytest.mark.parametrize("hops", range(1, 5))
@pytest.mark.parametrize("degree", range(1, 8))
def test_the_bound_is_that_of_a_tree(degree: int, hops: int) -> None:
    """The root has K children, all others K - 1: no graph of degree K has more within r hops."""
    level, count = 1, 1
    for depth in range(hops):
        level *= degree - (depth > 0)
        count += level
    assert most_nodes_within(degree, hops) == count
    assert most_changed_subgraphs(degree, hops) == 2 * count - 1
    if degree > 1:  # the bound of the paper, for edges with directions
        assert count <= (degree ** (hops + 1) - 1) // (degree - 1)


def test_more_edges_or_hops_change_more() -> None:
    bounds = [[most_changed_subgraphs(degree, hops) for hops in (1, 2, 3)] for degree in (2, 3, 4)]
    for row, next_row in pairwise(bounds):
        assert all(a < b for a, b in zip(row, next_row, strict=True))
        assert row == sorted(set(row))
