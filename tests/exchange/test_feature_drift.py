"""Laws of federated histograms of features: distances by an oracle, and no small count leaves."""

from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import scipy.sparse as sp
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import ks_2samp

import silograph as sg
from mistakes import raises_code
from pages import read_page
from rating_graphs import rating_graph
from runs import MakeGraph, run_until
from silograph.core.errors import ConfigError, DataError
from silograph.core.payload import Stacked
from silograph.exchange.feature_drift import (
    BINS,
    ENDS,
    UNKNOWN,
    DriftForm,
    Histograms,
    drift_distances,
    merge_small,
)
from silograph.experiment.report import write_report
from silograph.federation.messages import Empty
from silograph.graph.graph import Graph

RUN: dict[str, Any] = {
    "clients": 3,
    "partition": "random",
    "split": "0.6/0.2/0.2",
    "rounds": 2,
    "hidden": 4,
    "feature_drift": True,
}
COUNTS = st.lists(st.integers(0, 9), min_size=BINS, max_size=BINS)


@settings(max_examples=60)
@given(COUNTS, st.integers(0, 12))
def test_no_small_count_is_left_and_cumulative_ones_hardly_change(
    values: list[int], least: int
) -> None:
    counts = torch.tensor([values])
    merged = merge_small(counts, least)
    assert not bool(((merged > 0) & (merged < least)).any())
    if int(counts.sum()) < least:
        assert not bool(merged.any())
        return
    assert int(merged.sum()) == int(counts.sum())
    assert int((merged.cumsum(1) - counts.cumsum(1)).abs().max()) < max(least, 1)
    if least <= 1:
        assert torch.equal(merged, counts)
    assert torch.equal(merge_small(merged, least), merged)


def test_distances_are_those_of_binned_samples() -> None:
    counts = torch.randint(0, 5, (4, 3, BINS), generator=torch.Generator().manual_seed(0))
    counts[2, 1] = 0  # a client without counts
    distances = drift_distances(counts)
    places = np.arange(BINS)
    for client in range(4):
        for feature in range(3):
            own = np.repeat(places, counts[client, feature])
            total = counts[:, feature].sum(0) - counts[client, feature]
            if not len(own):
                assert distances[client, feature] == UNKNOWN
                continue
            expected = ks_2samp(own, np.repeat(places, total)).statistic
            assert float(distances[client, feature]) == pytest.approx(expected, abs=1e-12)
    assert bool((drift_distances(counts[:1]) == UNKNOWN).all())  # one client has no others


def drifting(graph: Graph, client: np.ndarray) -> Graph:
    """A graph whose second feature is larger at client 1, and whose third is constant."""
    assert isinstance(graph.x, torch.Tensor)
    x = (graph.x.double() * 64).round()
    x[:, 1] += 4096 * torch.from_numpy(client == 1)
    x[:, 2] = 7
    return replace(graph, x=x)


@pytest.mark.parametrize("normalize", ["none", "standard"])
def test_distances_of_a_run_are_those_of_its_training_nodes(
    make_graph: MakeGraph, normalize: Literal["none", "standard"]
) -> None:
    plain = sg.run(make_graph(90), **RUN)
    assert plain.cut is not None
    graph = drifting(make_graph(90), plain.cut.partition.owner.numpy())
    result = sg.run(graph, **RUN, normalize=normalize, dtype="float64")
    assert result.cut is not None
    train, owner = result.cut.split.train.numpy(), result.cut.partition.owner.numpy()
    assert isinstance(graph.x, torch.Tensor)
    x = graph.x.numpy()[train]
    z = (x - x.mean(0)) / np.where(x.std(0) == 0, 1, x.std(0))
    bins = np.digitize(z, ENDS.numpy(), right=True)
    for feature in range(x.shape[1]):
        for client in range(3):
            own = owner[train] == client
            expected = ks_2samp(bins[own, feature], bins[~own, feature]).statistic
            distance = float(result.feature_drift[str(feature)][client])
            assert distance == pytest.approx(expected, abs=1e-12)
    assert next(iter(result.feature_drift)) == "1"
    assert result.feature_drift["1"][1] == 1
    assert not bool(result.feature_drift["2"].any())


def test_scale_and_place_of_a_feature_do_not_matter(make_graph: MakeGraph) -> None:
    graph = drifting(make_graph(60), np.zeros(60))
    assert isinstance(graph.x, torch.Tensor)
    moved = replace(graph, x=graph.x * 2**-5 + 8)  # without rounding
    ours, theirs = (sg.run(g, **RUN, dtype="float64").feature_drift for g in (graph, moved))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_what_is_not_asked_for_changes_nothing(make_graph: MakeGraph) -> None:
    plain, drift = (sg.run(make_graph(60), **RUN | {"feature_drift": on}) for on in (False, True))
    assert plain.feature_drift == {}
    assert plain.model is not None
    assert drift.model is not None
    assert all(torch.equal(w, drift.model.weights[n]) for n, w in plain.model.weights.items())
    assert "statistics" not in plain.ledger.bytes_by_kind
    sent = drift.ledger.bytes_by_kind["statistics"]
    assert sent > 3 * 4 * BINS  # counts of three clients, for each feature


def test_a_run_that_was_stopped_writes_the_same_table_and_page(
    make_graph: MakeGraph, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    graph, options = make_graph(60), RUN | {"evaluation_min_count": 3}
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    result = sg.run(graph, **options, out=str(whole))
    run_until(monkeypatch, graph, 2, stopped, **options)
    assert not (stopped / "feature_drift.csv").exists()
    resumed = sg.resume(stopped, graph=graph)
    text = (whole / "feature_drift.csv").read_text()
    assert (stopped / "feature_drift.csv").read_text() == text
    assert all(torch.equal(d, resumed.feature_drift[n]) for n, d in result.feature_drift.items())
    lines = text.splitlines()
    assert lines[0] == "feature,client,distance"
    assert len(lines) == 1 + 3 * len(result.feature_drift)
    page = read_page(Path(write_report(whole).path))
    assert "Drift of features" in page.text
    (whole / "feature_drift.csv").write_text(text.replace("client_00", "client_01"))
    assert write_report(whole).is_of_damaged


@pytest.mark.parametrize(
    ("counts", "problem"),
    [
        ([[5, 0, 7], [0, 12, 0]], None),
        (
            [[5, 0, 7], [0, 11, 0]],
            "the same number of values for each feature, got different numbers",
        ),
        ([[4, 1, 7], [0, 12, 0]], "every count to be 0 or at least 5, got a smaller one"),
    ],
)
def test_impossible_histograms_are_named(counts: list[list[int]], problem: str | None) -> None:
    reply = Histograms(Stacked(torch.tensor([counts], dtype=torch.int32)))
    assert reply.find_problem(Empty(), DriftForm(2, 5)) == problem


def test_data_and_methods_without_a_drift_are_refused(make_graph: MakeGraph) -> None:
    graph = make_graph(60)
    with raises_code(ConfigError, "conflicting-options", options=["method", "feature_drift"]):
        sg.run(graph, **RUN, method="centralized")
    with raises_code(ConfigError, "conflicting-options", options=["dataset", "feature_drift"]):
        sg.run(rating_graph(), **RUN, model="rating_biases")
    sparse = sg.from_arrays(
        edge_index=graph.edge_index, x=sp.csr_matrix(np.asarray(graph.x)), y=graph.y
    )
    with pytest.raises(DataError, match="expected dense features for feature_drift"):
        sg.run(sparse, **RUN)
