"""Every selector with every method that trains locally: resumed, over a session, by its facts."""

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import silograph as sg
from conftest import planted_graph
from crossed import crossed
from mistakes import raises_code
from rating_graphs import rating_graph
from remote_runs import finish, lines, remote, setup_of
from runs import (
    go,
    little_work,
    rows_of,
    run_round,
    run_until,
    same_bits,
    weights_of,
    with_values,
)
from silograph.core.errors import ConfigError, OpError, ProtocolError, TrainingError
from silograph.core.resolved_config import training_key
from silograph.experiment.run.run import _make_selection, first_snapshot
from silograph.experiment.run.snapshot import from_checkpoint, to_checkpoint
from silograph.federation.checkpoint import from_bytes, to_bytes
from silograph.graph.graph import Graph
from silograph.methods import (
    METHODS,
    Gather,
    Kind,
    RoundReport,
    ServerState,
    WeightedMean,
    averaging,
    selected,
    shared,
    tensors_under,
    train,
    untouched_rows_after_round,
)
from silograph.selection.base import RoundFacts, SelectorState
from silograph.selection.registry import SELECTORS
from silograph.task.registry import TASKS

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


@pytest.mark.law(sample=24)
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
    own["options"] = own["options"] | little_work(method).get("options", {})
    if method == "local" and selector not in ("uniform", "all", "round_robin"):
        with raises_code(ConfigError, "conflicting-options", options=["method", "selector"]):
            go(graph, method=method, **own)
        return
    if METHODS[method].evaluate.crosses and SELECTORS[selector].observe is not None:
        with raises_code(ConfigError, "conflicting-options", options=["method", "selector"]):
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


@pytest.mark.law(sample=6)
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


@pytest.mark.law(sample=3)
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
    scoring = replace(scoring, uses_scores=False)
    monkeypatch.setitem(SELECTORS, "scoring", scoring)
    if METHODS[method].evaluate.crosses or method == "local":
        return  # refused, see above
    view = METHODS[method].evaluate.view
    result = go(make_graph(), method=method, selector="scoring", lr=0.05)
    scores = [row[f"val_{view}_accuracy"] for row in result.rounds]
    if view == "personalized":  # they begin with another model than before
        assert all(facts.score is not None for facts in seen)
        return
    assert [facts.score for facts in seen[1:]] == pytest.approx(scores[:-1], abs=1e-12)
    assert all(facts.higher for facts in seen)
    plain = go(make_graph(), method=method, selector="all", lr=0.05)
    assert same_bits(weights_of(plain), weights_of(result))
    assert rows_without_costs(plain) == rows_without_costs(result)
    extra = [
        r for r in result.ledger.records if r.op.startswith("train") and r.what == "evaluation"
    ]
    assert len(extra) == len(seen)  # bytes and work of scoring, apart
    assert all(float(r.flops.min()) > 0 and r.bytes.all() for r in extra)


# What each learning selector reads of a round; of a task that does not report it, it is refused.
READS: dict[str, Callable[[RoundFacts], bool]] = {
    "power_of_choice": lambda facts: bool(facts.train_loss[facts.answered].isfinite().all()),
    "oort": lambda facts: bool(facts.train_loss[facts.answered].isfinite().all()),
    "harmony": lambda facts: bool((facts.received["val.tp"] + facts.received["val.fn"]).any()),
    "ucb": lambda facts: facts.score is not None,
}


def graph_of_task(task: str) -> Graph:
    if task == "rating":
        return rating_graph()
    graph = planted_graph(multilabel=task == "label_set")
    return with_values(graph) if task == "node_value" else graph


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("selector", READS)
def test_a_selector_knows_what_it_reads_or_is_refused(
    monkeypatch: pytest.MonkeyPatch, task: str, selector: str
) -> None:
    seen: list[RoundFacts] = []
    part = SELECTORS[selector]

    def observe(options: Any, state: SelectorState, t: int, facts: RoundFacts) -> SelectorState:
        seen.append(facts)
        assert part.observe is not None
        return part.observe(options, state, t, facts)

    monkeypatch.setitem(SELECTORS, selector, replace(part, observe=observe))
    if part.needs_classes and task in ("node_value", "rating"):
        with pytest.raises(ConfigError) as caught:
            go(graph_of_task(task), **asked(selector))
        without_classes = [name for name, s in SELECTORS.items() if not s.needs_classes]
        assert str(caught.value) == (
            f"expected labels of classes for selector {selector}, which learns from the classes "
            f"that each client has, got {task}: use one of {', '.join(without_classes)}"
        )
        assert not seen
        return
    go(graph_of_task(task), **asked(selector))
    assert [READS[selector](facts) for facts in seen] == [True] * 4


def test_a_selector_that_learns_says_what_it_reads() -> None:
    learning = {name for name, selector in SELECTORS.items() if selector.observe is not None}
    assert learning - {"round_robin"} == READS.keys()


def rows_without_costs(result: sg.Result) -> list[dict[str, Any]]:
    return [
        {k: v for k, v in row.items() if not k.startswith(("bytes", "flops"))}
        for row in rows_of(result)
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
    snapshot = run_round(run, first_snapshot(run))
    gone = run.federation.ids[2]
    links[gone].change = lambda data: None
    for _ in range(5):
        snapshot = run_round(run, snapshot)
    counts = snapshot.state.memory["selector/count"]
    assert counts.tolist()[2] == 1  # of round 1
    assert int(counts.max()) > 1
    saved = from_bytes(b"".join(to_bytes(to_checkpoint(run, snapshot, "", {}))))
    again, _ = from_checkpoint(run, saved, None)
    selection = _make_selection(run)
    assert selection is not None
    key = training_key(run.config)
    chosen = [selection.choose(s.state, t, key).selected for s in (snapshot, again) for t in (7, 8)]
    assert chosen[:2] == chosen[2:]


def test_who_is_not_asked_sends_no_counts(make_graph: MakeGraph) -> None:
    setup = setup_of(make_graph(), METHODS["fedper"])
    assert setup.method_config.score_on_receipt == ""
    assert (
        setup_of(make_graph(), METHODS["fedper"], selector="ucb").method_config.score_on_receipt
        == "val"
    )
    assert (
        setup_of(make_graph(), METHODS["fedavg"], selector="ucb").method_config.score_on_receipt
        == "all"
    )


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


def own_round(call_all: bool, tell: bool) -> Any:
    """A round with a call of its own, as users write it: FedAvg by hand."""

    def fit(fed: Any, cfg: Any, state: Any, t: int, key: Any) -> tuple[ServerState, RoundReport]:
        inbox, chosen = shared("weights", state.weights), selected(fed, cfg, t, key)
        mean = WeightedMean("nodes", untouched_rows_after_round(cfg, state.weights))
        reduce = Gather("nodes", "loss", fold=mean)
        to = None if call_all else chosen
        own = key.fold("train", t)
        reply = fed.call(train, inbox, what=Kind.WEIGHTS, key=own, to=to, reduce=reduce)
        report = RoundReport(tuple(fed.ids) if call_all else chosen, float(reply["loss"].t))
        if tell:
            report = replace(report, trained=tensors_under("by_client", reply))
        return ServerState(tensors_under("weights", reply), {}), report

    return fit


@pytest.mark.parametrize(
    "options", [{"options": {"participation": 0.5}}, asked("round_robin")], ids=str
)
def test_a_round_that_calls_others_than_the_selected_is_refused(
    make_graph: MakeGraph, options: dict[str, Any]
) -> None:
    fedavg = METHODS["fedavg"]
    wrong = replace(fedavg, name="own", round=own_round(call_all=True, tell=True))
    with pytest.raises(ProtocolError) as caught:
        go(make_graph(), method=wrong, **options)
    assert re.fullmatch(
        r"expected method own to train at selected clients only, got client_\d+ besides in round "
        r"1: give fed.call to=selected\(fed, cfg, t, key\), and RoundReport the same clients",
        str(caught.value),
    )
    assert go(make_graph(), method=wrong).ledger.bytes > 0  # everyone is selected
    right = replace(fedavg, name="own", round=own_round(call_all=False, tell=True))
    ours, theirs = (go(make_graph(), method=m, **options) for m in (right, fedavg))
    assert rows_without_costs(ours) == rows_without_costs(theirs)


@pytest.mark.parametrize("selector", ["oort", "power_of_choice"])
def test_a_round_that_does_not_tell_who_trained_is_refused(
    make_graph: MakeGraph, selector: str
) -> None:
    """Else the selector would take it that nobody ever answers."""
    fedavg = METHODS["fedavg"]
    silent = replace(fedavg, name="own", round=own_round(call_all=False, tell=False))
    with pytest.raises(
        ProtocolError, match=r"^expected method own to report who trained.* round 1"
    ):
        go(make_graph(), method=silent, **asked(selector))
    limited = asked("uniform", options={"selector.least_selections": 9})
    with pytest.raises(ProtocolError, match=r"without 'answered'"):  # limits count who trained
        go(make_graph(), method=silent, **limited)
    told = replace(fedavg, name="own", round=own_round(call_all=False, tell=True))
    ours, theirs = (go(make_graph(), method=m, **asked(selector)) for m in (told, fedavg))
    assert rows_without_costs(ours) == rows_without_costs(theirs)


@pytest.mark.parametrize("failing", ["init", "round", "start", "draw", "observe"])
def test_own_functions_at_the_server_fail_in_one_line(
    make_graph: MakeGraph, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    def fails(*args: Any) -> Any:
        raise KeyError("no such thing")

    method, selector = METHODS["fedavg"], replace(SELECTORS["oort"], name="mine")
    if failing in ("init", "round"):
        own: dict[str, Any] = {failing: fails}
        method, owner = replace(method, name="own", **own), "method own"
    else:
        own = {"init" if failing == "start" else failing: fails}
        selector, owner = replace(selector, **own), "selector mine"
    monkeypatch.setitem(SELECTORS, "mine", selector)
    with pytest.raises(OpError) as caught:
        go(make_graph(), method=method, **asked("mine", options={"selector.clients": 2}))
    number = 0 if failing in ("init", "start") else 1
    what = f"fails of {owner} failed with KeyError: 'no such thing' ({__file__}, line "
    assert str(caught.value).startswith(what)
    assert str(caught.value).endswith(f", in fails); round {number}, at the server")
    assert isinstance(caught.value.__cause__, KeyError)  # with its traceback


def test_own_functions_may_say_themselves_what_is_wrong(make_graph: MakeGraph) -> None:
    def fails(*args: Any) -> Any:
        raise ConfigError("expected something else")

    with pytest.raises(ConfigError, match=r"^expected something else$"):
        go(make_graph(), method=replace(METHODS["fedavg"], name="own", round=fails))


def test_copies_of_fedavg_with_ops_of_their_own_have_no_caution() -> None:
    assert METHODS["fedavg"].cautions
    assert averaging(train).cautions == ()
