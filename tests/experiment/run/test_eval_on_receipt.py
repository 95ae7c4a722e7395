"""Scores on receipt are those that a call would give, a round later and for fewer bytes."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import silograph as sg
from remote_runs import finish, lines, remote, setup_of
from runs import files_of, go, rows_of, same_bits, some_of, weights_of
from silograph.core.errors import ConfigError, TrainingError
from silograph.graph.graph import Graph
from silograph.methods import METHODS, RoundReport

MakeGraph = Callable[..., Graph]
METHODS_THAT_CAN = ("fedavg", "fedopt", "fedprox", "scaffold", "llcg")
CASES: dict[str, dict[str, Any]] = {
    "all": {},
    "some": {"participation": 0.5},
    "seldom": {"participation": 0.5, "eval_every": 2, "rounds": 5},
    "bandit": {"selector": "ucb", "rounds": 6},
    "stopped": {"max_bytes": 20_000, "rounds": 9},
    "stopped before any score": {"max_bytes": 1, "eval_every": 3},
    "target": {"target": "0.1"},
    "virtual": {"speeds": "1,2", "participation": 0.5},
}


def scores_of(result: sg.Result) -> list[dict[str, Any]]:
    costs = ("bytes", "bytes_evaluation", "flops", "virtual_seconds")
    return [{k: v for k, v in row.items() if k not in costs} for row in rows_of(result)]


def evaluation(result: sg.Result) -> int:
    return result.ledger.bytes_by_kind["evaluation"]


@pytest.mark.parametrize("kernels", ["torch", "auto"])
@pytest.mark.parametrize("method", METHODS_THAT_CAN)
def test_scores_are_the_same(make_graph: MakeGraph, method: str, kernels: str) -> None:
    own: dict[str, Any] = {"method": method, "lr": 0.05, "kernels": kernels}
    own |= some_of(method, 0.5)
    plain, late = go(make_graph(), **own), go(make_graph(), **own, eval_on_receipt=True)
    assert scores_of(plain) == scores_of(late)
    assert same_bits(weights_of(plain), weights_of(late))
    assert plain.best_round == late.best_round
    assert dict(plain.client_accuracy) == dict(late.client_accuracy)
    assert evaluation(late) < evaluation(plain)


@pytest.mark.parametrize("case", CASES)
def test_killed_and_resumed_or_over_a_session_it_is_the_same(
    make_graph: MakeGraph, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    graph = make_graph()
    own: dict[str, Any] = {"clients": 4, "partition": "random", "rounds": 4, "kernels": "torch"}
    own |= {"hidden": 8, "lr": 0.05, "split": "0.4/0.3/0.3", "dtype": "float64"}
    own |= {"eval_on_receipt": True, "block_size": 1, **CASES[case]}
    whole = sg.run(graph, method="fedavg", **own, out=str(tmp_path / "a"))
    far = finish(remote(setup_of(graph, METHODS["fedavg"], **own))[0])
    assert lines(whole.ledger.records) == lines(far.ledger.records)
    assert rows_of(whole) == rows_of(far)
    assert same_bits(weights_of(whole), weights_of(far))
    for last in (2, 3):
        stop = whole.rounds[-1]["round"]
        if last > int(stop or 0):
            continue
        kill_in(monkeypatch, graph, last, tmp_path / f"b{last}", own)
        sg.resume(tmp_path / f"b{last}", graph=graph)
        assert files_of(tmp_path / "a") == files_of(tmp_path / f"b{last}")


def kill_in(
    monkeypatch: pytest.MonkeyPatch, graph: Graph, last: int, out: Path, own: dict[str, Any]
) -> None:
    """Let a run die after the training of round `last`, before its checkpoint."""
    from silograph.experiment.run import loop

    class DiedError(Exception): ...

    checked = loop.checked_facts

    def die(report: RoundReport, clients: int, t: int) -> Any:
        if t == last:
            raise DiedError
        return checked(report, clients, t)

    with monkeypatch.context() as patch:
        patch.setattr(loop, "checked_facts", die)
        with pytest.raises(DiedError):
            sg.run(graph, method="fedavg", **own, out=str(out))


def test_a_stopped_run_has_the_scores_of_its_last_round(make_graph: MakeGraph) -> None:
    late = go(make_graph(), eval_on_receipt=True, **CASES["stopped"])
    assert late.stopped.startswith("max_bytes")
    last = max(r.round for r in late.ledger.records)
    assert [row["round"] for row in late.rounds] == list(range(1, last + 1))


def test_with_all_clients_evaluation_is_counts_and_the_last_model(make_graph: MakeGraph) -> None:
    """The server's model goes out for evaluation in the last round only."""
    late = go(make_graph(), eval_on_receipt=True)
    asked = [r.round for r in late.ledger.records if r.op == "judge_server"]
    assert asked == [4, 4]  # down and up


def test_a_target_is_reached_a_round_later(make_graph: MakeGraph) -> None:
    plain, late = (
        go(make_graph(), target="0.1", eval_on_receipt=late, rounds=9) for late in (False, True)
    )
    assert late.stopped == plain.stopped
    assert late.rounds[-1]["round"] == int(plain.rounds[-1]["round"] or 0) + 1


@pytest.mark.parametrize("method", ["local", "fedper", "cagnet", "label_guided", "centralized"])
def test_who_does_not_train_from_the_servers_model_is_refused(
    make_graph: MakeGraph, method: str
) -> None:
    with pytest.raises(ConfigError, match=f"for eval_on_receipt, got {method}: leave"):
        go(make_graph(), method=method, eval_on_receipt=True)


def test_a_round_without_scores_on_receipt_is_named(make_graph: MakeGraph) -> None:
    from dataclasses import replace

    def silent(*args: Any) -> Any:
        state, report = METHODS["fedavg"].round(*args)
        return state, RoundReport(report.participants, report.train_loss)

    quiet = replace(METHODS["fedavg"], name="quiet", round=silent)
    with pytest.raises(TrainingError, match="what they receive for eval_on_receipt, got quiet"):
        sg.run(make_graph(), method=quiet, eval_on_receipt=True, clients=4, partition="random")
