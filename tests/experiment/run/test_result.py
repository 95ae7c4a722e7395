"""Laws of `Result`: the same figures as a dictionary, a table and a text."""

import json
import sys
from types import ModuleType
from typing import Any

import pytest
import torch

from runs import MakeGraph, go
from silograph.core.errors import SilographError
from silograph.experiment.run.result import VIEWS

REPORTED = ("accuracy", "accuracy_client_mean", "f1_macro", "f1_micro", "auc")


def test_the_dictionary_of_a_result(make_graph: MakeGraph) -> None:
    result = go(make_graph(), seed=2)
    values = json.loads(result.to_json())
    assert values == result.to_dict()
    assert "\n" not in result.to_json()
    fixed = {k: values[k] for k in ("dataset", "method", "clients", "partition", "rounds", "seed")}
    assert fixed == {
        "dataset": "planted",
        "method": "fedavg",
        "clients": 4,
        "partition": "random",
        "rounds": 4,
        "seed": 2,
    }
    assert tuple(values["test"]) == VIEWS == ("server", "uncut", "personalised")
    for view in VIEWS:
        assert tuple(values["test"][view]) == REPORTED
        assert values["val"][view] == dict(getattr(result.val, view))
    assert values["partition_hash"] == result.partition_hash
    assert values["seconds"] >= 0
    assert 10**7 < values["peak_memory_bytes"] < 10**12


def test_every_node_has_its_client_and_its_part(make_graph: MakeGraph) -> None:
    graph = make_graph()
    cut = go(graph).cut
    assert cut is not None
    assert cut.graph.node_id.tolist() == graph.node_id.tolist()
    held = [len(nodes) for nodes in cut.partition.nodes]
    assert cut.partition.owner.bincount().tolist() == held
    assert len(cut.partition.ids) == 4
    parts = torch.stack([cut.split.train, cut.split.val, cut.split.test])
    assert parts.shape == (3, graph.num_nodes)
    assert (parts.sum(dim=0) <= 1).all()


def test_seconds_grow_along_the_table(make_graph: MakeGraph) -> None:
    result = go(make_graph())
    seconds = [row["seconds"] for row in result.rounds]
    assert all(isinstance(s, float) and s >= 0 for s in seconds)
    assert seconds == sorted(seconds, key=float)  # type: ignore[arg-type]
    assert result.seconds + 0.001 >= float(seconds[-1] or 0)


def test_a_table_of_rounds_for_pandas(
    make_graph: MakeGraph, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = go(make_graph())
    pandas = ModuleType("pandas")
    monkeypatch.setattr(pandas, "DataFrame", lambda rows: ("frame", rows), raising=False)
    monkeypatch.setitem(sys.modules, "pandas", pandas)
    frame: Any = result.to_dataframe()
    assert frame == ("frame", list(result.rounds))


def test_a_table_of_rounds_without_pandas(
    make_graph: MakeGraph, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = go(make_graph(), rounds=1)
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(SilographError, match=r"expected pandas for to_dataframe\(\), got no such"):
        result.to_dataframe()


@pytest.mark.parametrize("method", ["fedavg", "local"])
def test_the_summary(make_graph: MakeGraph, method: str) -> None:
    result = go(make_graph(), method=method)
    header, *lines = result.summary().splitlines()
    assert header.split() == [
        "test",
        "accuracy",
        "accuracy",
        "client",
        "mean",
        "f1",
        "macro",
        "f1",
        "micro",
        "auc",
    ]
    assert len({len(line) for line in [header, *lines]}) == 1
    assert result.baseline is not None
    words = f"largest class {' '.join(f'{result.baseline[n]:.4f}' for n in REPORTED)}"
    assert " ".join(lines.pop().split()) == words
    for view, line in zip(VIEWS, lines, strict=True):
        name, *cells = line.split()
        scores = getattr(result.test, view)
        values = ["-" if scores is None else f"{getattr(scores, n):.4f}" for n in REPORTED]
        assert [name, *cells] == [view, *values]
