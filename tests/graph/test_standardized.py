"""Standardized features: by the training nodes of all clients, or of each client."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import scipy.sparse as sp
import torch

import silograph as sg
from mistakes import raises_code
from rating_graphs import rating_graph
from runs import MakeGraph, go
from silograph.core.errors import ConfigError, DataError, PartitionError
from silograph.core.payload import owners
from silograph.exchange.collect import SumSpec, fit_from_sums
from silograph.graph.column_statistics import (
    FEATURES,
    ClientSums,
    ColumnStatistics,
    join_sums,
    standardize,
    sum_by_client,
)
from silograph.graph.csr import CSR
from silograph.graph.graph import Graph
from silograph.graph.silos.data import silo_block
from silograph.graph.silos.export import write_silos

WIDE = torch.float64


def scaled(graph: Graph) -> Graph:
    """Features of another size and place in each column, one of them constant."""
    assert isinstance(graph.x, torch.Tensor)
    x = graph.x * torch.logspace(-3, 3, graph.x.shape[1]) + 7
    x[:, 0] = 0.1
    return replace(graph, x=x)


def draw_columns(rows: int) -> torch.Tensor:
    """Return columns of other sizes: usual, Unix times, constant, tiny."""
    x = torch.randn(rows, 4, generator=torch.Generator().manual_seed(rows), dtype=WIDE) * 30
    return x * torch.tensor([1.0, 0.4, 0.0, 1e-9]) + torch.tensor([1e4, 1.7e9, 0.1, 0.0])


def fit(sums: ClientSums) -> ColumnStatistics:
    return fit_from_sums({FEATURES: sums}, {FEATURES: SumSpec(sums.total.shape[1])})[FEATURES]


def test_federated_sums_have_the_mean_and_deviation_of_all_rows() -> None:
    x = draw_columns(50)
    client = torch.arange(50) % 3 + (torch.arange(50) == 49)  # of 5 clients; the last has no row
    sums = sum_by_client(x, client, 5)
    assert sums.count.tolist() == torch.bincount(client, minlength=5).tolist()
    found = fit(sums)
    assert torch.allclose(found.mean, x.mean(0), rtol=1e-15)
    expected = np.std(x.numpy() - x.numpy().mean(0), axis=0)
    assert found.deviation.numpy() == pytest.approx(expected, rel=1e-9, abs=1e-12)
    assert found.deviation[2] == 0  # exactly: what rounding leaves of a constant is none
    scaled = standardize(x, found)
    assert torch.allclose(scaled.mean(0), torch.zeros(4, dtype=WIDE), atol=1e-6)
    assert torch.allclose(scaled.std(0, correction=0), torch.tensor([1, 1, 0, 1.0], dtype=WIDE))


def test_sums_do_not_depend_on_who_adds_them_together() -> None:
    x, client = draw_columns(60), torch.arange(60) % 4
    whole = sum_by_client(x, client, 4)
    apart = [sum_by_client(x[client == c], torch.zeros(15, dtype=torch.int64), 1) for c in range(4)]
    again = join_sums(apart)
    for name in ("count", "total", "squares"):
        assert torch.equal(getattr(again, name), getattr(whole, name))
    assert again.is_sent == whole.is_sent
    mixed = whole.take(torch.tensor([2, 0]))
    assert torch.equal(mixed.total, whole.total[[2, 0]])


def test_each_client_by_itself_has_mean_0_and_deviation_1() -> None:
    x, group = draw_columns(50), torch.arange(50) % 3
    found = standardize(x, sum_by_client(x, group, 4).own_statistics(), group)
    for g in range(3):
        rows = found[group == g]
        assert torch.allclose(rows.mean(0), torch.zeros(4, dtype=WIDE), atol=1e-6)
        expected = torch.tensor([1, 1, 0, 1], dtype=WIDE)
        assert torch.allclose(rows.std(0, correction=0), expected, atol=1e-6)


def test_values_that_no_sum_of_squares_holds_are_refused() -> None:
    one = torch.zeros(2, dtype=torch.int64)
    for value in (1e200, float("inf"), float("nan")):
        with pytest.raises(DataError, match="to be standardized, got"):
            sum_by_client(torch.tensor([[1.0, 1.0], [1.0, value]], dtype=WIDE), one, 1)


@pytest.mark.parametrize("normalize", ["standard", "standard_client"])
def test_statistics_are_of_training_nodes_only(make_graph: MakeGraph, normalize: str) -> None:
    graph = scaled(make_graph(90))
    result = go(graph, normalize=normalize, rounds=1, partition="random", clients=3)
    cut = result.cut
    assert cut is not None
    assert cut.statistics is not None
    train = cut.split.train & graph.labeled
    assert isinstance(graph.x, torch.Tensor)
    wide = graph.x.double()
    for number, nodes in enumerate(cut.partition.nodes):
        rows = nodes[train[nodes]] if normalize == "standard_client" else train.nonzero()[:, 0]
        mean = cut.statistics.mean if normalize == "standard" else cut.statistics.mean[number]
        assert torch.allclose(mean, wide[rows].mean(0), rtol=1e-12)
    other = replace(graph, x=torch.where(train[:, None], graph.x, graph.x * 3 + 1))
    again = go(other, normalize=normalize, rounds=1, partition="random", clients=3)
    assert again.cut is not None
    assert again.cut.statistics is not None
    assert torch.equal(again.cut.statistics.mean, cut.statistics.mean)
    assert torch.equal(again.cut.statistics.deviation, cut.statistics.deviation)


def test_silos_alone_get_the_bits_of_the_simulation(make_graph: MakeGraph, tmp_path: Path) -> None:
    graph = scaled(make_graph(90))
    result = go(graph, normalize="standard_client", rounds=1, partition="random", clients=3)
    assert result.cut is not None
    cut, used, dtype = result.cut.partition, result.cut.graph.x, torch.float64
    assert isinstance(used, torch.Tensor)
    split = result.cut.split
    folders = write_silos(tmp_path / "silos", graph, cut, split, format="npz")
    blocks = []
    for folder, nodes in zip(folders, cut.nodes, strict=True):
        silo = sg.read_silo(folder)
        assert silo.split is not None
        block = silo_block(silo, silo.split, dtype, normalize="standard_client")
        assert torch.equal(block.x, used[nodes])  # type: ignore[arg-type]
        blocks.append(silo_block(silo, silo.split, dtype, normalize="standard"))
    shared = go(graph, normalize="standard", rounds=1, partition="random", clients=3).cut
    assert shared is not None
    found = fit(join_sums([block.sums[FEATURES] for block in blocks]))
    assert shared.statistics is not None
    assert torch.equal(found.mean, shared.statistics.mean)
    assert torch.equal(found.deviation, shared.statistics.deviation)


def test_size_and_place_of_features_do_not_matter(make_graph: MakeGraph) -> None:
    graph = make_graph(90)
    assert isinstance(graph.x, torch.Tensor)
    moved = replace(graph, x=graph.x.double().mul(4).add(2).float())
    runs = [go(g, normalize="standard", rounds=2, dtype="float64") for g in (graph, moved)]
    losses = [[row["train_loss"] for row in run.rounds] for run in runs]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_centralized_training_uses_the_training_nodes_of_the_whole_graph(
    make_graph: MakeGraph,
) -> None:
    graph = scaled(make_graph(60))
    runs = [
        go(graph, method="centralized", normalize=how, rounds=1)
        for how in ("standard", "standard_client")
    ]
    for result in runs:
        cut = result.cut
        assert cut is not None
        train = (cut.split.train & graph.labeled).nonzero()[:, 0]
        assert isinstance(graph.x, torch.Tensor)
        sums = sum_by_client(graph.x[train], torch.zeros_like(train), 1)
        whole = standardize(graph.x, sums.own_statistics().of_client(0))
        assert torch.equal(cut.graph.x, whole)  # type: ignore[arg-type]
        assert "statistics" not in result.ledger.bytes_by_kind  # one client: nothing travels
        assert result.model is not None
        assert result.model.predict(graph).shape == (60,)


def test_copies_count_at_each_client_that_trains_on_them(make_graph: MakeGraph) -> None:
    graph = scaled(make_graph(60))
    result = go(graph, normalize="standard", partition="shares", rounds=1)
    cut = result.cut
    assert cut is not None
    assert cut.statistics is not None
    copies = cut.partition.copies
    rows = copies[cut.copies_split.train & graph.labeled[copies]]
    assert len(rows) > len(rows.unique())
    assert isinstance(graph.x, torch.Tensor)
    assert torch.allclose(cut.statistics.mean, graph.x[rows].double().mean(0), rtol=1e-12)


def test_a_client_without_training_nodes_adds_zeros(make_graph: MakeGraph) -> None:
    graph = make_graph(60)
    assert isinstance(graph.x, torch.Tensor)
    x = torch.randn(60, 3)
    sums = sum_by_client(x[:20], owners(torch.tensor([0, 20, 20])), 2)
    assert sums.count.tolist() == [20, 0]
    assert not bool(sums.total[1].any())
    assert not bool(sums.squares_around(torch.ones(3, dtype=WIDE))[1].any())
    alone = standardize(x, sums.own_statistics(), (torch.arange(60) >= 20).long())
    assert not bool(alone[20:].any())  # a client without statistics has features of 0


def test_what_cannot_be_standardized_is_refused(make_graph: MakeGraph) -> None:
    graph = make_graph(60)
    assert isinstance(graph.x, torch.Tensor)
    sparse = replace(graph, x=CSR.from_scipy(sp.csr_matrix(graph.x.numpy())))
    for how in ("standard", "standard_client"):
        with pytest.raises(DataError, match="expected dense features for normalize standard"):
            go(sparse, normalize=how)
        with raises_code(ConfigError, "conflicting-options", options=["features", "normalize"]):
            go(graph, normalize=how, features="constant")
        with raises_code(ConfigError, "conflicting-options", options=["dataset", "normalize"]):
            sg.run(rating_graph(), model="rating_mf", method="fedmf", normalize=how)
    with pytest.raises(PartitionError, match="every node at one client with normalize standard_cl"):
        go(graph, normalize="standard_client", partition="shares")
