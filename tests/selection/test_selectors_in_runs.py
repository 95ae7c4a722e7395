"""Every selector with every method that trains locally: resumed, over a session, by its facts."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import silograph as sg
from crossed import crossed
from remote_runs import finish, lines, remote, setup_of
from runs import go, rows_of, run_until, same_bits, weights_of
from silograph.core.errors import ConfigError, TrainingError
from silograph.experiment.resolve.run_program import training_key
from silograph.experiment.run.loop import _round, _selection, first_snapshot
from silograph.experiment.run.snapshot import from_checkpoint, to_checkpoint
from silograph.federation.checkpoint import from_bytes, to_bytes
from silograph.graph.graph import Graph
from silograph.methods import METHODS, RoundReport
from silograph.selection.base import RoundFacts, SelectorState
from silograph.selection.registry import SELECTORS

MakeGraph = Callable[..., Graph]
LOCAL = [
    name
    for name, method in METHODS.items()
    if not method.evaluate.all_silos and not method.setting.uncut
]
OPTIONS: dict[str, dict[str, Any]] = {
    "round_robin": {"selector.clients": 2},
    "power_of_choice": {"selector.clients": 2},
    "oort": {"selector.clients": 2},
    "harmony": {"selector.clients": 2},
    "ucb": {"selector.arms": 2},
}


def asked(selector: str, **own: Any) -> dict[str, Any]:
    found: dict[str, Any] = {"selector": selector, "lr": 0.05, "eval_every": 3, "speeds": "1,2,4"}
    found["block_size"] = 1  # as silos have it: torch adds in another order in larger ones
    return found | {"options": OPTIONS.get(selector, {})} | own


@crossed(
    {"method": LOCAL, "selector": list(SELECTORS)},
    quick=[(m, s) for m in LOCAL for s in SELECTORS if m == "fedopt" or s == "ucb"],
)
def test_killed_and_resumed_or_over_a_session_it_is_the_same(
    make_graph: MakeGraph,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    method: str,
    selector: str,
) -> None:
    graph, own = make_graph(), asked(selector)
    if METHODS[method].evaluate.crosses and SELECTORS[selector].observe is not None:
        with pytest.raises(ConfigError, match=r"does not report its clients one by one, got sel"):
            go(graph, method=method, **own)
        return
    whole = go(graph, method=method, **own)
    given = {"clients": 4, "partition": "random", "rounds": 4, "hidden": 8}
    given |= {"split": "0.4/0.3/0.3", "dtype": "float64", "method": method}
    run_until(monkeypatch, graph, 3, tmp_path / "b", **given, **own)
    again = sg.resume(tmp_path / "b", graph=graph)
    assert same_bits(weights_of(whole), weights_of(again))
    assert rows_of(whole) == rows_of(again)
    assert lines(whole.ledger.records) == lines(again.ledger.records)
    if METHODS[method].calls is None:
        return
    far = finish(remote(setup_of(graph, METHODS[method], **own))[0])
    assert lines(whole.ledger.records) == lines(far.ledger.records)
    assert same_bits(weights_of(whole), weights_of(far))


@pytest.mark.parametrize("selector", SELECTORS)
def test_nothing_depends_on_when_rounds_are_scored(make_graph: MakeGraph, selector: str) -> None:
    one, other = (
        go(make_graph(), **asked(selector, eval_every=every, rounds=6)) for every in (1, 6)
    )
    trained = [
        [r.to_line() for r in result.ledger.records if r.op == "train" and r.what == "weights"]
        for result in (one, other)
    ]
    assert trained[0] == trained[1]


@pytest.mark.parametrize("method", [name for name in LOCAL if METHODS[name].calls is not None])
def test_clients_score_what_they_receive(
    make_graph: MakeGraph, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    """With all clients in every round: the score on receipt is that of the round before."""
    seen: list[RoundFacts] = []

    def observe(options: Any, state: SelectorState, t: int, facts: RoundFacts) -> SelectorState:
        seen.append(facts)
        return state

    scoring = replace(SELECTORS["all"], name="scoring", observe=observe, on_receipt=True)
    monkeypatch.setitem(SELECTORS, "scoring", scoring)
    if METHODS[method].evaluate.crosses:
        return  # refused, see above
    view = METHODS[method].evaluate.view
    result = go(make_graph(), method=method, selector="scoring", lr=0.05)
    scores = [row[f"val_{view}_accuracy"] for row in result.rounds]
    if view == "personalized" and method != "local":  # they begin with another model than before
        assert all(facts.score is not None for facts in seen)
        return
    assert [facts.score for facts in seen[1:]] == pytest.approx(scores[:-1], abs=1e-12)
    assert all(facts.higher for facts in seen)
    plain = go(make_graph(), method=method, lr=0.05)
    assert same_bits(weights_of(plain), weights_of(result))
    assert rows_without_costs(plain) == rows_without_costs(result)
    extra = [
        r for r in result.ledger.records if r.op.startswith("train") and r.what == "evaluation"
    ]
    assert len(extra) == len(seen)  # the work of scoring, apart
    assert all(float(r.flops.min()) > 0 and not r.bytes.any() for r in extra)


def rows_without_costs(result: sg.Result) -> list[dict[str, Any]]:
    return [
        {k: v for k, v in row.items() if k not in ("bytes", "flops")} for row in rows_of(result)
    ]


def test_facts_say_what_a_round_took(make_graph: MakeGraph, monkeypatch: Any) -> None:
    """Virtual seconds of who was called, and the share of clients and rounds that it took."""
    seen: list[RoundFacts] = []

    def observe(options: Any, state: SelectorState, t: int, facts: RoundFacts) -> SelectorState:
        seen.append(facts)
        return SELECTORS["round_robin"].observe(options, state, t, facts)  # type: ignore[misc]

    recording = replace(SELECTORS["round_robin"], observe=observe)
    monkeypatch.setitem(SELECTORS, "recording", recording)
    own = asked("recording", options={"selector.clients": 2})
    go(make_graph(), **own)
    for facts in seen:
        assert facts.cost == pytest.approx(2 / 4 / 4)
        assert facts.seconds is not None
        assert (facts.seconds > 0).tolist() == facts.selected.tolist()
        assert facts.score is None
        assert not facts.received


def test_a_silo_that_is_away_gets_no_count(make_graph: MakeGraph) -> None:
    """And the state that a checkpoint holds goes on with the same choices."""
    setup = setup_of(make_graph(), METHODS["fedavg"], **asked("ucb", rounds=8))
    run, links = remote(setup, least=1)
    snapshot, _ = _round(run, first_snapshot(run), 0.0)
    gone = run.federation.ids[2]
    links[gone].change = lambda data: None
    for _ in range(5):
        snapshot, _ = _round(run, snapshot, 0.0)
    counts = snapshot.state.memory["selector/count"]
    assert counts.tolist()[2] == 1  # of round 1
    assert int(counts.max()) > 1
    saved = from_bytes(b"".join(to_bytes(to_checkpoint(run, snapshot, "", {}))))
    again, _ = from_checkpoint(run, saved, None)
    selection = _selection(run)
    assert selection is not None
    key = training_key(run.config)
    chosen = [selection.choose(s.state, t, key).selected for s in (snapshot, again) for t in (7, 8)]
    assert chosen[:2] == chosen[2:]


def test_who_is_not_asked_sends_no_counts(make_graph: MakeGraph) -> None:
    setup = setup_of(make_graph(), METHODS["fedavg"])
    assert setup.method_config.received == ""
    assert setup_of(make_graph(), METHODS["fedavg"], selector="ucb").method_config.received == "val"


def test_a_method_without_scores_on_receipt_is_named(
    make_graph: MakeGraph, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a user's method that has its own round."""

    def silent(*args: Any) -> Any:
        state, report = METHODS["fedavg"].round(*args)
        return state, RoundReport(report.participants, report.train_loss)

    quiet = replace(METHODS["fedavg"], name="quiet", round=silent)
    with pytest.raises(TrainingError, match="score what they receive for selector ucb, got quiet"):
        sg.run(make_graph(), method=quiet, selector="ucb", clients=4, partition="random")
