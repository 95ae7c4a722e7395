"""Clients that hold whole categories, with every method: it trains, or says in a line why not."""

from typing import Any

import numpy as np
import pytest
import torch

import silograph as sg
from conftest import planted_graph
from rating_graphs import drawn, rating_graph
from silograph.core.errors import ConfigError, PartitionError
from silograph.graph.graph import Graph
from silograph.methods import METHODS

LOCAL = {"local", "fedper", "gcfl", "gcflplus"}  # clients have models of their own
TRAIN = LOCAL | {"fedavg", "fedacs", "fedopt", "fedprox", "scaffold", "fedmf", "fedgnn", "fesog"}
TRAIN |= {"centralized"}
SHARED = {"fedmf", "fedgnn", "fesog"}
OPTIONS: dict[str, Any] = {
    "model": "rating_gcn",
    "partition": "category",
    "clients": 5,
    "split": "0.6/0.2/0.2",
    "rounds": 1,
    "hidden": 4,
    "layers": 1,
    "dropout": 0.0,
    "local_epochs": 1,
}


def go(graph: Graph, method: str, spread: str = "average", **changed: Any) -> sg.Result:
    own: dict[str, Any] = {"partition.spread": spread, "model.embedding": 4}
    own |= {"model.items": 64} if method in SHARED else {}
    own |= {"method.pseudo": 3} if method in {"fedgnn", "fesog"} else {}
    return sg.run(graph, **OPTIONS | {"method": method, "options": own} | changed)


@pytest.mark.law(sample=6)
@pytest.mark.parametrize("method", METHODS)
def test_unequal_spreads_train_or_are_refused_in_one_line(method: str) -> None:
    graph = rating_graph(30, 40, 300, 12)
    for spread in ("skewed", "extreme"):
        if method not in TRAIN:
            with pytest.raises(ConfigError, match=r"^expected .*, got ") as caught:
                go(graph, method, spread)
            assert "\n" not in str(caught.value)
            continue
        scores = go(graph, method, spread).test
        found = scores.personalized if method in LOCAL else scores.server
        assert found is not None
        assert 0 < found.rmse < 3  # type: ignore[operator]


def test_labels_of_nodes_have_no_categories() -> None:
    graph = planted_graph(40)
    for method in METHODS:
        with pytest.raises(PartitionError, match=r"a column 'category' .* got none") as caught:
            sg.run(graph, method=method, partition="category", clients=3, rounds=1)
        assert "\n" not in str(caught.value)


def test_ratings_without_categories_are_refused_or_cut_by_another_column() -> None:
    data = drawn()
    plain = sg.ratings(data["ratings"])
    line = "expected a column 'category' .* in 'ratings', got none: add it, or choose"
    with pytest.raises(PartitionError, match=line):
        go(plain, "fedavg")
    timed = sg.ratings(data["ratings"], times=data["times"])  # numbers are not dealt
    with pytest.raises(PartitionError, match=line):
        go(timed, "fedavg")


def without_judged(graph: Graph, part: str) -> Graph:
    """Return the graph with a split in which the first category has nothing of a part."""
    code = graph.columns["category"]
    draw = torch.from_numpy(np.random.default_rng(0).random(graph.num_nodes))
    masks = {"train": draw < 0.6, "val": (draw >= 0.6) & (draw < 0.8), "test": draw >= 0.8}
    first = code == 0
    masks["train"] = masks["train"] | (masks[part] & first)
    masks[part] = masks[part] & ~first
    return sg.Graph(
        **{f: getattr(graph, f) for f in ("adj", "x", "y", "num_classes", "node_id", "columns")},
        split=sg.Split(*(masks[name] & graph.labeled for name in ("train", "val", "test"))),
    )


@pytest.mark.law(sample=6)
@pytest.mark.parametrize("part", ["val", "test"])
@pytest.mark.parametrize("model", ["rating_gcn", "rating_biases", "consisrec", "rating_profiles"])
def test_a_silo_without_judged_pairs_trains_and_has_no_score(model: str, part: str) -> None:
    graph = without_judged(rating_graph(30, 40, 300, 5), part)
    own = {"model.embedding": 4} if model in {"rating_gcn", "consisrec"} else {}
    result = go(graph, "fedavg", model=model, split="public", options=own)
    found = result.client_scores["rmse"]["server"]
    assert [score is None for score in found].count(True) == (part == "test")
    assert result.test.server is not None
    lowest, *_, highest = sorted(score for score in found if score is not None)
    assert lowest < result.test.server.rmse < highest  # type: ignore[operator]
