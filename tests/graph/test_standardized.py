"""Standardized features: every client by its own nodes, in simulation as at a silo."""

from dataclasses import replace
from pathlib import Path

import pytest
import scipy.sparse as sp
import torch

import silograph as sg
from runs import MakeGraph, go
from silograph.core.errors import ConfigError, DataError, PartitionError
from silograph.core.key import Key
from silograph.graph.csr import CSR
from silograph.graph.graph import Graph, standardized
from silograph.graph.partition.split import draw_split
from silograph.graph.silos.data import silo_block
from silograph.graph.silos.export import write_silos


def scaled(graph: Graph) -> Graph:
    """Features of another size and place in each column, one of them constant."""
    assert isinstance(graph.x, torch.Tensor)
    x = graph.x * torch.logspace(-3, 3, graph.x.shape[1]) + 7
    x[:, 0] = 0.1
    return replace(graph, x=x)


def test_every_group_has_mean_0_and_deviation_1() -> None:
    x = torch.randn(50, 4, dtype=torch.float64) * 30 + 1e4
    x[:, 2] = 0.1
    group = torch.arange(50) % 3
    found = standardized(x, group, 4)
    for g in range(3):
        rows = found[group == g]
        assert torch.allclose(rows.mean(0), torch.zeros(4, dtype=torch.float64), atol=1e-12)
        expected = torch.tensor([1, 1, 0, 1], dtype=torch.float64)
        assert torch.allclose(rows.std(0, correction=0), expected, atol=1e-12)


def test_silos_alone_get_the_bits_of_the_simulation(make_graph: MakeGraph, tmp_path: Path) -> None:
    graph = scaled(make_graph(90))
    result = go(graph, normalize="standard", rounds=1, partition="random", clients=3)
    assert result.cut is not None
    cut, used = result.cut.partition, result.cut.graph.x
    assert isinstance(used, torch.Tensor)
    split = draw_split(graph, cut, ratios=(0.2, 0.4, 0.4), key=Key.of(0))
    folders = write_silos(tmp_path / "silos", graph, cut, split, format="npz")
    for folder, nodes in zip(folders, cut.nodes, strict=True):
        silo = sg.read_silo(folder)
        assert silo.split is not None
        block = silo_block(silo, silo.split, normalize="standard")
        assert torch.equal(block.x, used[nodes])  # type: ignore[arg-type]


def test_size_and_place_of_features_do_not_matter(make_graph: MakeGraph) -> None:
    graph = make_graph(90)
    assert isinstance(graph.x, torch.Tensor)
    moved = replace(graph, x=graph.x.double().mul(4).add(2).float())
    runs = [go(g, normalize="standard", rounds=2, dtype="float64") for g in (graph, moved)]
    losses = [[row["train_loss"] for row in run.rounds] for run in runs]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_centralized_training_uses_the_statistics_of_the_whole_graph(make_graph: MakeGraph) -> None:
    graph = scaled(make_graph(60))
    result = go(graph, method="centralized", normalize="standard", rounds=1)
    assert result.cut is not None
    assert isinstance(graph.x, torch.Tensor)
    whole = standardized(graph.x, torch.zeros(60, dtype=torch.int64), 1)
    assert torch.equal(result.cut.graph.x, whole)  # type: ignore[arg-type]
    assert result.model is not None
    assert result.model.predict(graph).shape == (60,)


def test_what_cannot_be_standardized_is_refused(make_graph: MakeGraph) -> None:
    graph = make_graph(60)
    assert isinstance(graph.x, torch.Tensor)
    sparse = replace(graph, x=CSR.from_scipy(sp.csr_matrix(graph.x.numpy())))
    with pytest.raises(DataError, match="expected dense features for normalize standard"):
        go(sparse, normalize="standard")
    with pytest.raises(PartitionError, match="expected every node at one client with normalize"):
        go(graph, normalize="standard", partition="shares")
    with pytest.raises(ConfigError, match="got standard: a constant feature is then 0"):
        go(graph, normalize="standard", features="constant")
