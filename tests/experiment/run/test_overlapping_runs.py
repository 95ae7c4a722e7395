"""Runs whose clients hold copies of the same nodes."""

import csv
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from cuts import OVERLAPPING
from mistakes import raises_code
from silograph.core.errors import ConfigError
from silograph.core.key import Key
from silograph.core.payload import ranges
from silograph.exchange.collect import local_graph
from silograph.experiment.run.round_scores import uncut_counts, uncut_rows
from silograph.experiment.run.run import resume, run
from silograph.experiment.run.setup import Setup, uncut_block
from silograph.federation.in_process import InProcess
from silograph.graph.block.block import make_block
from silograph.graph.datasets import load
from silograph.graph.graph import Graph
from silograph.graph.heterogeneity import describe
from silograph.graph.partition.partition import make_partition
from silograph.nn.backends import BACKENDS

MakeGraph = Callable[..., Graph]


def test_views_count_copies_and_the_uncut_view_counts_nodes(
    make_graph: MakeGraph, setups: list[Setup]
) -> None:
    result = run(
        make_graph(100),
        method="fedavg",
        partition="metis_overlapping",
        clients=10,
        rounds=2,
        hidden=4,
        dtype="float64",
        kernels="torch",
    )
    setup = setups[0]
    split, partition = setup.cut.split, setup.cut.partition
    copies = [int(split.test[part].sum()) for part in partition.nodes]
    block, _ = make_block(setup.cut.graph, partition, split, torch.float64)
    assert block.count(block.split.test).tolist() == copies
    assert block.num_train.tolist() == [int(split.train[part].sum()) for part in partition.nodes]
    assert sum(copies) > int(split.test.sum())
    assert result.model is not None
    weights = result.model.weights
    counts = uncut_counts(setup, uncut_rows(setup, weights))
    owned = torch.bincount(partition.owner[split.test], minlength=10)
    assert counts["test.nodes"].tolist() == owned.tolist()
    # The server's view: right copies over all copies, each through its client's own edges.
    logits = BACKENDS["torch"].predict(setup.method_config.model, weights, block)
    right = logits.argmax(dim=1) == block.y
    assert result.test.server is not None
    expected = float(right[block.split.test].double().mean())
    assert result.test.server.accuracy == pytest.approx(expected)


@pytest.mark.parametrize("method", OVERLAPPING)
def test_block_size_does_not_matter(make_graph: MakeGraph, method: str) -> None:
    config: dict[str, Any] = {
        "method": "fedavg",
        "partition": method,
        "clients": 5,
        "rounds": 2,
        "hidden": 4,
        "dtype": "float64",
        "drop_edges": 0.5,
    }
    one, all_five = (run(make_graph(60), **config, block_size=size) for size in (1, 5))
    assert one.partition_hash == all_five.partition_hash
    for a, b in zip(one.rounds, all_five.rounds, strict=True):
        assert a["train_loss"] == pytest.approx(b["train_loss"], abs=1e-10)
        assert a["test_server_accuracy"] == b["test_server_accuracy"]


@pytest.mark.parametrize("method", ["label_guided", "bns", "cagnet"])
def test_copies_are_not_trained_as_one_graph(make_graph: MakeGraph, method: str) -> None:
    with raises_code(ConfigError, "conflicting-options", options=["method", "partition"]):
        run(make_graph(60), method=method, partition="metis_overlapping", clients=5)


@pytest.mark.parametrize("method", ["centralized", "graphsaint"])
def test_the_uncut_graph_has_no_copies(make_graph: MakeGraph, method: str) -> None:
    cut: dict[str, Any] = {"partition": "metis_overlapping", "clients": 5}
    result = run(make_graph(60), method=method, rounds=1, hidden=4, **cut)
    assert result.test.server is not None


def test_clients_with_copies_fetch_what_others_hold(
    make_graph: MakeGraph, setups: list[Setup]
) -> None:
    """GraphConv does not scale by degrees: with all neighbors one layer sees what is there."""
    config: dict[str, Any] = {"method": "fedavg", "partition": "metis_overlapping", "clients": 5}
    config |= {"rounds": 2, "hidden": 4, "dtype": "float64", "model": "graphconv", "layers": 1}
    result = run(make_graph(60), collect=1.0, block_size=5, **config)
    (setup,) = setups
    assert isinstance(setup.federation, InProcess)
    assert result.model is not None
    block, (state,) = setup.federation._host.blocks[0].all, setup.federation.states()
    larger, model = local_graph(block, state), setup.method_config.model
    assert len(larger.row_key) > len(block.row_key)
    here = BACKENDS["torch"].predict(model, result.model.weights, larger)
    own = ranges(larger.off[:-1], block.off.diff())
    there = BACKENDS["torch"].predict(model, result.model.weights, uncut_block(setup))
    graph, partition = setup.cut.graph, setup.cut.partition
    lost = partition.owner[graph.adj.indices.long()] < 0  # nobody holds the neighbor
    whole = torch.bincount(graph.adj.row[lost], minlength=60)[partition.copies] == 0
    assert whole.any()
    wanted = there[partition.copies]
    torch.testing.assert_close(here[own][whole], wanted[whole], rtol=0, atol=1e-12)


def test_a_folder_holds_the_cut_and_goes_on_with_it(work: Path) -> None:
    options: dict[str, Any] = {
        "partition": "metis_overlapping",
        "clients": 6,
        "clients_per_part": 3,
        "drop_edges": 0.3,
        "rounds": 2,
        "hidden": 4,
    }
    whole = run("g.npz", **options, out="one")
    with open("one/clients.csv", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    key = Key.of(0).fold("partition")
    chosen: dict[str, Any] = {"clients_per_part": 3, "drop_edges": 0.3}
    graph = load("g.npz")
    cut = make_partition(graph, "metis_overlapping", clients=6, key=key, **chosen)
    assert whole.partition_hash == cut.hash
    assert [int(row["nodes"]) for row in rows] == [len(part) for part in cut.nodes]
    internal = describe(graph, cut).internal_edges.tolist()
    assert [int(row["internal_edges"]) for row in rows] == internal
    Path("one/result.json").unlink()
    assert resume("one").test == whole.test
