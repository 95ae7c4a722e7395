"""What a method reports of a round and of clients: in tables, report and trackers."""

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import silograph as sg
from runs import go
from silograph.core.errors import TrainingError
from silograph.experiment.result_files import read_csv
from silograph.graph.graph import Graph
from silograph.methods import FEDAVG, Federation, Key, MethodConfig, RoundReport, ServerState

MakeGraph = Callable[..., Graph]


def told(
    fed: Federation, cfg: MethodConfig, state: ServerState, t: int, key: Key
) -> tuple[ServerState, RoundReport]:
    """A round of FedAvg that reports its number, and the clients' positions times it."""
    new, report = FEDAVG.round(fed, cfg, state, t, key)
    client_facts = {"sparsity": torch.arange(len(fed.ids)) * float(t)}
    client_facts["of_some"] = torch.tensor([0.5, math.nan, 0.25, math.inf])
    facts = {"clusters": t / 2, "unknown": math.nan}
    return new, replace(report, facts=facts, client_facts=client_facts)


TELLING = replace(FEDAVG, name="telling", round=told)


class Seen:
    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []

    def begin(self, config: Any, facts: Any) -> None: ...

    def round(self, row: Any) -> None:
        self.rows.append(row)

    def end(self, result: Any) -> None: ...


def test_facts_are_in_tables_report_and_trackers(make_graph: MakeGraph, tmp_path: Path) -> None:
    out, seen = tmp_path / "run", Seen()
    result = go(make_graph(), method=TELLING, out=str(out), trackers=[seen])
    assert [row["fact_clusters"] for row in result.rounds] == [0.5, 1.0, 1.5, 2.0]
    assert [row["fact_clusters"] for row in seen.rows] == [0.5, 1.0, 1.5, 2.0]
    rows = read_csv(out / "rounds.csv")
    assert [row["fact_clusters"] for row in rows] == ["0.5", "1.0", "1.5", "2.0"]
    assert {row["fact_unknown"] for row in rows} == {""}
    clients = read_csv(out / "clients.csv")
    assert [row["fact_sparsity"] for row in clients] == ["0.0", "4.0", "8.0", "12.0"]
    assert [row["fact_of_some"] for row in clients] == ["0.5", "", "0.25", ""]
    assert result.client_facts["sparsity"].tolist() == [0, 4, 8, 12]
    page = (out / "report.html").read_text(encoding="utf-8")
    assert "fact_clusters" in page
    (out / "result.json").unlink()
    again = sg.resume(out, graph=make_graph(), method=TELLING)
    assert again.client_facts["sparsity"].tolist() == [0, 4, 8, 12]


def test_a_run_without_facts_has_no_columns_of_them(make_graph: MakeGraph, tmp_path: Path) -> None:
    go(make_graph(), out=str(tmp_path / "run"))
    for name in ("rounds.csv", "clients.csv"):
        assert "fact_" not in (tmp_path / "run" / name).read_text(encoding="utf-8")


def changing(*arguments: Any) -> tuple[ServerState, RoundReport]:
    new, report = FEDAVG.round(*arguments)
    return new, replace(report, facts={f"round_{arguments[3]}": 1.0})


def short(*arguments: Any) -> tuple[ServerState, RoundReport]:
    new, report = FEDAVG.round(*arguments)
    return new, replace(report, client_facts={"few": torch.zeros(2)})


@pytest.mark.parametrize(
    ("round_", "message"),
    [
        (changing, "expected the same facts in every round of a method, got columns round,"),
        (short, r"a value for each of 4 clients as fact 'few', got shape \(2,\) in round 1"),
    ],
)
def test_facts_that_cannot_be_written(
    make_graph: MakeGraph, tmp_path: Path, round_: Any, message: str
) -> None:
    method = replace(FEDAVG, name="telling", round=round_)
    with pytest.raises(TrainingError, match=message):
        go(make_graph(), method=method, out=str(tmp_path / "run"))
