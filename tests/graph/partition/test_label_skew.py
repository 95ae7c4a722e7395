"""Laws of cuts that favor classes; those of all disjoint cuts are in `test_partition`."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from silograph.core.errors import ConfigError, PartitionError
from silograph.core.key import Key
from silograph.graph.csr import CSR
from silograph.graph.graph import MISSING, Graph
from silograph.graph.heterogeneity import describe
from silograph.graph.partition.partition import make_partition


def labeled(*sizes: int) -> Graph:
    """Return a graph without edges with so many nodes of each class."""
    y = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))
    none = torch.zeros(0, dtype=torch.int64)
    n = len(y)
    adj = CSR.from_pairs(none, none, (n, n))
    return Graph(adj, torch.zeros(n, 1), y, len(sizes), torch.arange(n).numpy())


def counts(graph: Graph, clients: int, seed: int = 0, **options: float) -> Tensor:
    given: dict[str, Any] = options
    cut = make_partition(graph, "class_biased", clients=clients, key=Key.of(seed), **given)
    return describe(graph, cut).labels


def test_two_clients_and_two_classes_by_hand() -> None:
    graph = labeled(1100, 1100)
    seen = set()
    for seed in range(12):
        found = counts(graph, 2, seed, favored_classes=1)
        seen.add(tuple(found.flatten().tolist()))
    # Both favor the same class: halves. Else ten nodes of the favored class to one of the other.
    assert seen == {(550, 550, 550, 550), (1000, 100, 100, 1000), (100, 1000, 1000, 100)}


@pytest.mark.law(sample=6)
@pytest.mark.parametrize("favor", [10.0, 3.0])
def test_odds_ratios_are_those_of_the_weights(favor: float) -> None:
    graph = labeled(200_000, 120_000, 80_000, 100_000)
    found = counts(graph, 5, favored_classes=2, favor=favor)
    log = found.double().log() / math.log(favor)
    within = log[:, :, None] - log[:, None, :]  # of two classes at one client
    odds = within[:, None] - within[None, :]
    level = odds.round()
    assert (odds - level).abs().max() < 0.01
    assert level.unique().tolist() == [-2, -1, 0, 1, 2]  # 2: favored against not, at both


def test_clients_are_equally_large_and_favor_so_many_classes() -> None:
    graph = labeled(*[700] * 6)
    found = counts(graph, 7, favored_classes=2)
    assert (found.sum(dim=1) - 600).abs().max() <= 6
    assert ((found.double() / 600 > 1 / 6 + 0.1).sum(dim=1) <= 2).all()
    assert (found.max(dim=1).values > 150).all()


def test_of_two_classes_one_is_favored_by_default() -> None:
    two, three = labeled(900, 900), labeled(600, 600, 600)
    assert (counts(two, 4) == counts(two, 4, favored_classes=1)).all()
    assert (counts(three, 4) == counts(three, 4, favored_classes=2)).all()
    with pytest.raises(PartitionError, match=r"expected 1 to 1 favored_classes .* got 2"):
        counts(two, 4, favored_classes=2)
    with pytest.raises(PartitionError, match="expected 1 to 0 favored_classes"):
        counts(labeled(9), 2)


def test_without_favor_every_client_gets_its_share_of_every_class() -> None:
    found = counts(labeled(300, 90, 40), 8, favor=1.0)
    expected = torch.tensor([300, 90, 40]).double() / 8
    assert (found - expected).abs().max() <= 1


def test_absent_classes_and_unlabelled_nodes_do_no_harm() -> None:
    graph = replace(labeled(40, 40, 40), num_classes=5)
    assert counts(graph, 4).sum() == 120
    unknown = replace(graph, y=torch.full((120,), MISSING))
    cut = make_partition(unknown, "class_biased", clients=8, key=Key.of(0))
    assert [len(part) for part in cut.nodes] == [15] * 8


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"favored_classes": 3}, r"expected 1 to 2 favored_classes \(fewer than the 3 classes of"),
        ({"favored_classes": 0}, "favored_classes: input should be greater .*, got 0"),
        ({"favor": 0.5}, "favor: input should be greater than or equal to 1, got 0.5"),
        ({"favor": float("nan")}, "got nan"),
        ({"favor": float("inf")}, "got inf"),
    ],
)
def test_refusals(options: dict[str, Any], message: str) -> None:
    with pytest.raises((ConfigError, PartitionError), match=message):
        counts(labeled(9, 9, 9), 2, **options)


def test_label_bits_are_refused() -> None:
    bits = replace(labeled(9, 9), y=torch.ones(18, 2, dtype=torch.int64))
    with pytest.raises(PartitionError, match="for 'class_biased', got a multi-label graph"):
        counts(bits, 2)
