"""Scores on receipt are those that a call would give, a round later and for fewer bytes."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import silograph as sg
from mistakes import raises_code
from rating_graphs import rating_graph
from remote_runs import finish, lines, remote, setup_of
from runs import files_of, go, little_work, rows_of, run_until, same_bits, some_of, weights_of
from silograph.core.errors import ConfigError, TrainingError
from silograph.graph.graph import Graph
from silograph.methods import METHODS, RoundReport

MakeGraph = Callable[..., Graph]
METHODS_THAT_CAN = [
    *("fedavg", "fedopt", "fedprox", "scaffold", "llcg", "fedsageplus", "fedsage_local"),
]
PARTICIPANTS = "participants"
CASES: dict[str, dict[str, Any]] = {
    "all": {},
    "some": {"participation": 0.5},
    "seldom": {"participation": 0.5, "eval_every": 2, "rounds": 5},
    "participants": {"participation": 0.5, "evaluate_clients": "participants"},
    "participants seldom": {
        "participation": 0.5,
        "evaluate_clients": "participants",
        "eval_every": 2,
        "rounds": 5,
        "patience": 1,
    },
    "participants stopped": {
        "participation": 0.5,
        "evaluate_clients": "participants",
        "max_bytes": 20_000,
        "rounds": 9,
    },
    "bandit": {"selector": "ucb", "rounds": 6},
    "stopped": {"max_bytes": 20_000, "rounds": 9},
    "stopped before any score": {"max_bytes": 1, "eval_every": 3},
    "target": {"target": "0.1"},
    "virtual": {"speeds": "1,2", "participation": 0.5},
}


def scores_of(result: sg.Result) -> list[dict[str, Any]]:
    costs = ("bytes", "bytes_evaluation", "flops", "virtual_seconds")
    return [{k: v for k, v in row.items() if k not in costs} for row in rows_of(result)]


def scored_at_once(name: str) -> sg.methods.Method:
    """Return a method whose models are sent to be scored after each round."""
    return replace(METHODS[name], name=f"{name}_at_once", scores_on_receipt=False)


def sent_to_be_scored(result: sg.Result) -> int:
    """Bytes of models that travel for no other purpose."""
    records = result.ledger.records
    return sum(
        int(r.bytes.sum()) for r in records if r.what == "evaluation" and r.direction == "down"
    )


@pytest.mark.law(sample=6)
@pytest.mark.parametrize("kernels", ["torch", "auto"])
@pytest.mark.parametrize("method", METHODS_THAT_CAN)
def test_scores_are_the_same(make_graph: MakeGraph, method: str, kernels: str) -> None:
    own: dict[str, Any] = {"method": method, "lr": 0.05, "kernels": kernels}
    own |= some_of(method, 0.5) | little_work(method)
    if kernels == "torch":  # on some processors, products of a block round by its number of rows
        own["block_size"] = 1
    at_once = scored_at_once(method)
    plain, late = go(make_graph(), **{**own, "method": at_once}), go(make_graph(), **own)
    assert scores_of(plain) == scores_of(late)
    assert same_bits(weights_of(plain), weights_of(late))
    assert plain.best_round == late.best_round
    assert dict(plain.client_accuracy) == dict(late.client_accuracy)
    assert sent_to_be_scored(late) < sent_to_be_scored(plain)


SENT = [
    {"weights_as": "int8"},
    {"weights_as": "int4", "participation": 0.5},
    {"weights_as": "float16", "weight_rows": "used", "participation": 0.5},
    {"weight_rows": "used"},
]


@pytest.mark.law(sample=6)
@pytest.mark.parametrize("sent", SENT, ids=str)
def test_scores_are_those_of_the_weights_that_clients_receive(
    make_graph: MakeGraph, sent: dict[str, Any]
) -> None:
    """Whenever a model is scored, also by the closing call: it travels in the same form."""
    graph, own = make_graph(50, features=60, sparse=True), {"kernels": "torch", **sent}
    plain, late = go(graph, **own, method=scored_at_once("fedavg")), go(graph, **own)
    assert scores_of(plain) == scores_of(late)
    assert same_bits(weights_of(plain), weights_of(late))
    assert sent_to_be_scored(late) < sent_to_be_scored(plain)


@pytest.mark.law(sample=6)
@pytest.mark.parametrize("share", [1, 0.5])
def test_rankings_come_with_the_counts(share: float) -> None:
    own: dict[str, Any] = {"clients": 4, "partition": "category", "rounds": 4, "hidden": 4}
    own |= {"model": "rating_mf", "relevant": 3.0, "participation": share, "lr": 0.02}
    plain, late = (
        sg.run(rating_graph(), **own, method=method)
        for method in (scored_at_once("fedavg"), METHODS["fedavg"])
    )
    assert scores_of(plain) == scores_of(late)
    assert plain.test == late.test
    ranked = [r.round for r in late.ledger.records if r.op == "rank_server"]
    assert set(ranked) == ({4} if share == 1 else {2, 3, 4})


@pytest.mark.law(sample=6)
@pytest.mark.parametrize("case", CASES)
def test_killed_and_resumed_or_over_a_session_it_is_the_same(
    make_graph: MakeGraph, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    graph = make_graph()
    own: dict[str, Any] = {"clients": 4, "partition": "random", "rounds": 4, "kernels": "torch"}
    own |= {"hidden": 8, "lr": 0.05, "split": "0.4/0.3/0.3", "dtype": "float64"}
    own |= {"block_size": 1, **CASES[case]}
    whole = sg.run(graph, method="fedavg", **own, out=str(tmp_path / "a"))
    far = finish(remote(setup_of(graph, METHODS["fedavg"], **own))[0])
    assert lines(whole.ledger.records) == lines(far.ledger.records)
    assert rows_of(whole) == rows_of(far)
    assert same_bits(weights_of(whole), weights_of(far))
    for last in (2, 3):
        stop = whole.rounds[-1]["round"]
        if last > int(stop or 0):
            continue
        run_until(monkeypatch, graph, last, tmp_path / f"b{last}", method="fedavg", **own)
        sg.resume(tmp_path / f"b{last}", graph=graph)
        assert files_of(tmp_path / "a") == files_of(tmp_path / f"b{last}")


def test_a_stopped_run_has_the_scores_of_its_last_round(make_graph: MakeGraph) -> None:
    late = go(make_graph(), **CASES["stopped"])
    assert late.stopped.startswith("max_bytes")
    last = max(r.round for r in late.ledger.records)
    assert [row["round"] for row in late.rounds] == list(range(1, last + 1))


def test_with_all_clients_evaluation_is_counts_and_the_last_model(make_graph: MakeGraph) -> None:
    """The server's model goes out for evaluation in the last round only."""
    late = go(make_graph())
    asked = [r.round for r in late.ledger.records if r.op == "judge_server"]
    assert asked == [4, 4]  # down and up


def test_a_target_is_reached_a_round_later(make_graph: MakeGraph) -> None:
    plain, late = (
        go(make_graph(), target="0.1", method=method, rounds=9)
        for method in (scored_at_once("fedavg"), METHODS["fedavg"])
    )
    assert late.stopped == plain.stopped
    assert late.rounds[-1]["round"] == int(plain.rounds[-1]["round"] or 0) + 1


def test_a_round_without_scores_on_receipt_is_named(make_graph: MakeGraph) -> None:
    def silent(*args: Any) -> Any:
        state, report = METHODS["fedavg"].round(*args)
        return state, RoundReport(report.participants, report.train_loss)

    quiet = replace(METHODS["fedavg"], name="quiet", round=silent, scores_on_receipt=True)
    with pytest.raises(TrainingError, match="clients of quiet to score the model that they"):
        sg.run(make_graph(), method=quiet, clients=4, partition="random")


def test_participants_alone_score_until_all_score_the_best_and_the_last(
    make_graph: MakeGraph,
) -> None:
    """Training is the same; weights are sent to be scored in the last round only."""
    own: dict[str, Any] = {"participation": 0.5, "rounds": 6}
    everyone, some = (
        go(make_graph(), **own, evaluate_clients=who) for who in ("all", PARTICIPANTS)
    )
    assert [row["train_loss"] for row in everyone.rounds] == [r["train_loss"] for r in some.rounds]
    sent = [r for r in some.ledger.records if r.op == "judge_server" and r.direction == "down"]
    assert {r.round for r in sent} == {6}
    assert all(len(r.clients) == 4 for r in sent)
    assert len(sent) == 2  # the best round before, and the last one
    numbers = [row["fact_scored_clients"] for row in some.rounds]
    assert numbers == [2.0] * 5 + [4.0]
    at = everyone.rounds[some.best_round - 1]
    assert some.test.server is not None
    assert some.test.server["accuracy"] == at["test_server_accuracy"]  # of all clients' nodes


def test_with_all_clients_in_every_round_participants_are_all(make_graph: MakeGraph) -> None:
    everyone, some = (go(make_graph(), evaluate_clients=who) for who in ("all", PARTICIPANTS))
    assert rows_of(everyone) == rows_of(some)
    assert lines(everyone.ledger.records) == lines(some.ledger.records)


def test_scores_that_are_needed_before_the_next_round_are_of_all(make_graph: MakeGraph) -> None:
    own: dict[str, Any] = {"method": "fedais", "evaluate_clients": PARTICIPANTS}
    with raises_code(ConfigError, "conflicting-options", options=["evaluate_clients", "method"]):
        go(make_graph(), **own, participation=0.5)
    assert go(make_graph(), **own, rounds=1).rounds
    assert go(make_graph(), **own | {"method": "local"}, participation=0.5, rounds=1).rounds
