"""Scores before training: of the first weights, kept where something decides by them."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import silograph as sg
from runs import FAST, MakeGraph, files_of, go, of, outcome, rows_of, run_until, same_bits
from silograph.experiment.run import run as loop
from silograph.experiment.run.round_scores import JudgedRound
from silograph.methods import FEDAVG, LABEL_GUIDED, LOCAL, Method, RoundReport

SCORED = replace(FEDAVG, name="scored", needs=replace(FEDAVG.needs, score_first=True))
TOGETHER = replace(
    LABEL_GUIDED, name="together", needs=replace(LABEL_GUIDED.needs, score_first=True)
)
ALONE = replace(LOCAL, name="alone", needs=replace(LOCAL.needs, score_first=True))


def rest(fed: Any, cfg: Any, state: Any, t: int, key: Any) -> Any:
    """A round in which nothing happens."""
    return state, RoundReport((), None)


@pytest.fixture
def before(monkeypatch: pytest.MonkeyPatch) -> list[JudgedRound | None]:
    """The scores that were there before each round."""
    found: list[JudgedRound | None] = []
    real = loop.begin_round

    def spy(setup: Any, selection: Any, snapshot: Any, clock: Any) -> Any:
        found.append(snapshot.scores)
        return real(setup, selection, snapshot, clock)

    monkeypatch.setattr(loop, "begin_round", spy)
    return found


def same_scores(a: JudgedRound | None, b: JudgedRound | None) -> bool:
    assert a is not None
    assert b is not None
    counts = [(a.server, b.server), (a.personalized, b.personalized)]
    return (a.val, a.test, a.away) == (b.val, b.test, b.away) and all(
        one is other
        or (
            one is not None
            and other is not None
            and all(torch.equal(one[k], other[k]) for k in one)
        )
        for one, other in counts
    )


@pytest.mark.parametrize("method", [SCORED, TOGETHER, ALONE], ids=lambda m: m.name)
def test_they_are_those_of_the_first_weights(
    make_graph: MakeGraph, before: list[JudgedRound | None], method: Method
) -> None:
    """Where training changes nothing they are those of every round."""
    result = go(make_graph(), method=replace(method, round=rest), rounds=3)
    assert [None if scores is None else scores.round for scores in before] == [0, 1, 2]
    assert same_scores(before[0], before[1])
    assert same_scores(before[0], before[2])
    view = method.evaluate.view
    val = result.val.server if view == "server" else result.val.personalized
    assert before[0] is not None
    assert before[0].val[view] == val
    assert before[0].weights is None


def test_training_is_that_without_them(make_graph: MakeGraph) -> None:
    """Round 0 costs what the evaluation of every round costs, and decides nothing."""
    at_once = replace(FEDAVG, name="at_once", scores_on_receipt=False)
    plain, scored = (go(make_graph(), method=m) for m in (at_once, SCORED))
    assert same_bits(of(plain), of(scored))
    assert outcome(plain)["test"] == outcome(scored)["test"]
    assert plain.best_round == scored.best_round
    records = [[_cost(r) for r in run.ledger.records] for run in (plain, scored)]
    first = [cost for cost in records[1] if cost[0] == 0 and cost[1] == "evaluation"]
    assert [cost for cost in records[1] if cost not in first] == records[0]
    later = [c[1:] for c in records[0] if c[:2] == (1, "evaluation") and c[2] != "train"]
    assert [cost[1:] for cost in first] == later
    drop = ("bytes", "bytes_evaluation", "flops")
    rows = [
        [{k: v for k, v in row.items() if k not in drop} for row in rows_of(run)]
        for run in (plain, scored)
    ]
    assert rows[0] == rows[1]


def _cost(record: Any) -> tuple[Any, ...]:
    return record.round, str(record.what), record.op, record.direction, tuple(record.bytes)


def test_they_hold_until_the_next_evaluation(
    make_graph: MakeGraph, before: list[JudgedRound | None]
) -> None:
    go(make_graph(), method=SCORED, rounds=5, eval_every=2)
    assert [None if scores is None else scores.round for scores in before] == [0, 0, 2, 2, 4]


def test_nothing_is_scored_that_nobody_asks_for(
    make_graph: MakeGraph, before: list[JudgedRound | None]
) -> None:
    result = go(make_graph())
    assert before == [None] * 4
    assert not any(r.round == 0 and r.what == "evaluation" for r in result.ledger.records)


@pytest.mark.law(sample=3)
@pytest.mark.parametrize("method", [SCORED, ALONE], ids=lambda m: m.name)
@pytest.mark.parametrize(("every", "last"), [(1, 3), (2, 4), (4, 4)])
def test_they_are_in_the_checkpoint(
    make_graph: MakeGraph,
    before: list[JudgedRound | None],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    method: Method,
    every: int,
    last: int,
) -> None:
    graph, options = make_graph(), FAST | {"method": method, "eval_every": every}
    sg.run(graph, out=str(tmp_path / "whole"), **options)
    whole = before.copy()
    run_until(monkeypatch, graph, last, tmp_path / "cut", **options)
    before.clear()
    sg.resume(tmp_path / "cut", graph=graph, method=method)
    assert before
    for ours, theirs in zip(before, whole[-len(before) :], strict=True):
        assert same_scores(ours, theirs)
        assert ours is not None
        assert theirs is not None
        assert ours.round == theirs.round
    assert files_of(tmp_path / "cut") == files_of(tmp_path / "whole")
