"""Laws of `Result`: the same figures as a dictionary, a table and a text."""

import json
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import silograph as sg
from mistakes import raises_code
from runs import MakeGraph, go
from silograph.cli.printing import print_result
from silograph.core.errors import SilographError
from silograph.experiment.run.result import VIEWS
from silograph.methods import FEDAVG
from silograph.task.metric_table import METRICS

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
    assert tuple(values["test"]) == VIEWS == ("server", "uncut", "personalized")
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
    with raises_code(SilographError, "missing-package", package="pandas", extra="pandas"):
        result.to_dataframe()


def test_the_summary_and_the_report_name_the_sampler(make_graph: MakeGraph, tmp_path: Path) -> None:
    given: dict[str, Any] = {"neighbors": "fedgrains", "batch_size": 4, "rounds": 1}
    result = go(make_graph(), method="fedavg", out=str(tmp_path / "run"), **given)
    title = result.summary().splitlines()[0]
    assert title == "planted, fedavg with fedgrains, 4 clients (random)"
    page = (tmp_path / "run" / "report.html").read_text()
    assert "<h1>fedavg with fedgrains on planted</h1>" in page


@pytest.mark.parametrize("method", ["fedavg", "local"])
def test_the_summary(make_graph: MakeGraph, method: str) -> None:
    result = go(make_graph(), method=method)
    title, header, _, *lines = result.summary().splitlines()
    assert title == f"planted, {method}, 4 clients (random)"
    columns = ["accuracy", "client mean", "F1 macro", "F1 micro", "AUC"]
    assert header.split() == ["test", *" ".join(columns).split()]
    del lines[lines.index("") :]
    assert len({len(line) for line in [header, *lines]}) == 1
    assert result.baseline is not None
    words = f"largest class {' '.join(f'{result.baseline[n]:.4f}' for n in REPORTED)}"
    assert " ".join(lines.pop().split()) == words
    judged = {view: scores for view in VIEWS if (scores := getattr(result.test, view)) is not None}
    assert list(judged) == (["personalized"] if method == "local" else list(VIEWS))
    for (view, scores), line in zip(judged.items(), lines, strict=True):
        assert line.split() == [view, *(f"{getattr(scores, n):.4f}" for n in REPORTED)]


def test_without_test_nodes_the_view_that_picks_the_round_is_a_row_of_dashes(
    make_graph: MakeGraph,
) -> None:
    result = go(make_graph(), split="1/0/0", rounds=1)
    rows = [line.split() for line in result.summary().splitlines()]
    assert ["server", *["-"] * 5] in rows
    assert not any(row[:1] in (["uncut"], ["personalized"]) for row in rows)


def test_print_shows_what_the_command_shows(
    make_graph: MakeGraph, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "70")
    for method in ("local", replace(FEDAVG, name="mine")):
        result = go(make_graph(), method=method)
        print_result(result)
        shown = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
        assert str(result).splitlines() == shown
        assert max(map(len, shown)) <= 70
        wide = result.summary(200)
        assert "\n".join(shown[:1]) == wide.splitlines()[0]
        for line in ("stopped: all 4 rounds", f"best round {result.best_round} of 4 (by valid"):
            assert line in wide


def test_what_a_notebook_shows_is_escaped(make_graph: MakeGraph) -> None:
    name, method = "<b>one & two", replace(FEDAVG, name="<script>")
    graph = replace(make_graph(), name=name)
    small: dict[str, Any] = {"clients": 3, "partition": "random", "hidden": 4, "rounds": 2}
    result = sg.run(graph, method=method, **small)
    table = sg.compare(graph, methods=["local", method], seeds=1, processes=0, **small)
    for value in (graph, result, table):
        page = value._repr_html_()
        assert page.startswith("<table><caption>")
        assert "&lt;b&gt;one &amp; two" in page
        for tag in ("<b>", "<script>"):
            assert tag not in page
        assert len(page) < 4000
    assert "&lt;script&gt;" in result._repr_html_()
    assert "&lt;script&gt;" in table._repr_html_()
    for words in (f"<td>{graph.num_edges:,}</td>", "<th>nodes</th><td>60</td>"):
        assert words in graph._repr_html_()
    assert result.baseline is not None
    cells = [f"<td>{METRICS[n].text(result.baseline[n])}</td>" for n in REPORTED]
    assert f"<tr><th>largest class</th>{''.join(cells)}</tr>" in result._repr_html_()
