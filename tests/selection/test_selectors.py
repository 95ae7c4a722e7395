"""Laws of every registered selector, and runs in which one decides."""

from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import silograph as sg
from runs import go, rows_of, run_round, same_bits, weights_of
from sessions import session
from silograph.core.config import make_config
from silograph.core.errors import ConfigError, ProtocolError
from silograph.core.key import Key
from silograph.core.resolved_config import training_key
from silograph.experiment.resolve.data import clients_of
from silograph.experiment.run.run import _make_selection, first_snapshot
from silograph.experiment.run.setup import prepare
from silograph.experiment.run.snapshot import from_checkpoint, to_checkpoint
from silograph.federation.base import positions_of
from silograph.federation.checkpoint import Checkpoint, from_bytes, to_bytes
from silograph.federation.session.message import own_ops
from silograph.graph.graph import Graph
from silograph.selection.base import RoundFacts, Selector, SelectorState, select_uniform
from silograph.selection.harmony import select_balancing
from silograph.selection.registry import SELECTORS

IDS = tuple(f"silo {i}" for i in range(7))
OPTIONS: dict[str, dict[str, Any]] = {
    "uniform": {"participation": 0.4},
    "round_robin": {"clients": 3},
    "power_of_choice": {"clients": 3},
    "oort": {"clients": 3},
    "harmony": {"clients": 3},
    "ucb": {"arms": 3, "level": "both"},
}
MakeGraph = Callable[..., Graph]


def options_of(selector: Selector) -> object:
    return selector.options(**OPTIONS.get(selector.name, {}))


def facts_of(chosen: list[str], t: int) -> RoundFacts:
    selected = torch.zeros(len(IDS), dtype=torch.bool)
    selected[positions_of(IDS, chosen)] = True
    nodes = torch.arange(len(IDS)) * selected
    loss = torch.rand(len(IDS), generator=torch.Generator().manual_seed(t)).double()
    hits = (torch.arange(2 * len(IDS)).reshape(-1, 2) % 5) * selected[:, None]
    return RoundFacts(
        selected,
        selected,
        nodes,
        loss,
        lambda: nodes * 100,
        None,
        None,
        received={"val.nodes": nodes, "val.tp": hits, "val.fn": hits},
        scoring=lambda: float(loss[0]) + 0.1,
        costing=lambda: float(selected.sum()) / 100,
        timing=lambda: (1.0 + torch.arange(len(IDS))) * selected,
    )


def play(selector: Selector, state: SelectorState, first: int, last: int) -> list[list[str]]:
    """The choices of some rounds, each from a state that went through a checkpoint."""
    options, key, choices = options_of(selector), Key.of(3), []
    for t in range(first, last):
        state = from_bytes(b"".join(to_bytes(Checkpoint(t, state, {})))).tensors
        choices.append(selector.draw(IDS, options, state, t, key.fold("select", t)))
        if selector.observe is not None:
            state = selector.observe(options, state, t, facts_of(choices[-1], t))
    return choices


@pytest.mark.parametrize("selector", SELECTORS.values(), ids=list(SELECTORS))
def test_laws_of_every_selector(selector: Selector) -> None:
    options, key = options_of(selector), Key.of(1)
    state = selector.init(IDS, options)
    saved = {name: t.clone() for name, t in state.items()}
    chosen = selector.draw(IDS, options, state, 1, key)
    assert chosen == selector.draw(IDS, options, state, 1, key)
    positions_of(IDS, chosen)  # at least one, each once, in order
    if selector.observe is not None:
        facts = facts_of(chosen, 1)
        new = selector.observe(options, state, 1, facts)
        again = selector.observe(options, state, 1, facts)
        assert all(torch.equal(new[name], again[name]) for name in new)
        assert new.keys() == state.keys()
        assert {name: t.dtype for name, t in new.items()} == {n: t.dtype for n, t in state.items()}
    assert all(torch.equal(state[name], saved[name]) for name in saved)
    assert play(selector, state, 1, 9) == play(selector, state, 1, 9)


def test_round_robin_takes_all_in_turn() -> None:
    selector = SELECTORS["round_robin"]
    choices = play(selector, selector.init(IDS, options_of(selector)), 1, 8)
    assert choices[:3] == [list(IDS[:3]), list(IDS[3:6]), [IDS[0], IDS[1], IDS[6]]]
    assert {sum(name in c for c in choices) for name in IDS} == {3}


def test_uniform_is_the_draw_of_participation() -> None:
    selector, key = SELECTORS["uniform"], Key.of(5)
    drawn = selector.draw(IDS, options_of(selector), {}, 1, key)
    assert drawn == select_uniform(IDS, 0.4, key)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("first", [True, False])
def test_harmony_takes_who_brings_the_labels_nearest(seed: int, first: bool) -> None:
    """By the definition, with exact fractions: shares of labels, their distance, ties in order."""
    draws = torch.Generator().manual_seed(seed)
    counts = torch.randint(0, 4, (9, 3), generator=draws)
    joined = [0, 0, 0] if first else [1, 0, 2]
    aim = [Fraction(1, 2), Fraction(1, 3), Fraction(1, 6)]
    expected: list[int] = []
    for place in range(6):
        far: dict[int, Fraction] = {}
        for i in [i for i in range(9) if i not in expected]:
            both = [a + b for a, b in zip(joined, counts[i].tolist(), strict=True)]
            shares = [Fraction(n, max(sum(both), 1)) for n in both]
            far[i] = sum(((s - a) ** 2 for s, a in zip(shares, aim, strict=True)), Fraction(0))
        best = 0 if first and not place else min(far, key=lambda i: (far[i], i))
        expected.append(best)
        joined = [a + b for a, b in zip(joined, counts[best].tolist(), strict=True)]
    start = np.array([0.0, 0, 0] if first else [1.0, 0, 2])
    found = select_balancing(
        counts.double().numpy(), start, np.array(aim, dtype=float), 6, first=first
    )
    assert found.tolist() == expected


def test_all_is_a_run_without_a_selector(make_graph: MakeGraph) -> None:
    graph = make_graph()
    one, other = go(graph), go(graph, selector="all")
    assert same_bits(weights_of(one), weights_of(other))
    assert rows_of(one) == rows_of(other)


@pytest.mark.law(sample=6)
@pytest.mark.parametrize("method", ["fedavg", "fedopt", "fedprox", "scaffold", "local"])
def test_killed_and_resumed_it_chooses_the_same(
    make_graph: MakeGraph, tmp_path: Path, method: str
) -> None:
    options = {"selector.clients": 3}
    own: dict[str, Any] = {
        "lr": 0.05,
        "optimizer": "sgd",
        "selector": "round_robin",
        "options": options,
    }
    graph = make_graph()
    whole = go(graph, method=method, **own, out=str(tmp_path / "a"))

    class StopError(Exception):
        pass

    class Stopper:
        def update(self, done: int, metric: str) -> None:
            if done == 2:
                raise StopError

        def close(self) -> None: ...

    with pytest.raises(StopError):
        sg.run(
            graph,
            method=method,
            clients=4,
            partition="random",
            rounds=4,
            hidden=8,
            split="0.4/0.3/0.3",
            dtype="float64",
            progress=Stopper(),
            out=str(tmp_path / "b"),
            **own,
        )
    again = sg.resume(tmp_path / "b", graph=graph)
    assert same_bits(weights_of(whole), weights_of(again))
    assert rows_of(whole) == rows_of(again)
    assert [r.to_line() for r in whole.ledger.records] == [
        r.to_line() for r in again.ledger.records
    ]
    called = [
        r.clients.tolist()
        for r in whole.ledger.records
        if r.op.startswith("train") and r.direction == "down"
    ]
    assert called == [[0, 1, 2], [0, 1, 3], [0, 2, 3], [1, 2, 3]]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"selector": "uniformed"}, "selector"),
        (
            {"selector": "round_robin", "participation": 0.5},
            "selector uniform has it",
        ),
        (
            {"selector": "round_robin", "options": {"selector.x": 1}},
            "option selector.x: selector round_robin has no such option",
        ),
        ({"selector": "round_robin", "options": {"selector.clients": 0}}, "clients"),
        (
            {"options": {"selector.share": 0.5}},
            "option selector.share: selector uniform has no such option",
        ),
        (
            {"selector": "ucb", "method": "local"},
            "for selector ucb, got local, whose clients train",
        ),
        (
            {"method": "local", "options": {"selector.budget": "1MB"}},
            "with a server for selector uniform with limits, got local",
        ),
        ({"selector": "all", "method": "cagnet"}, "all clients train in every round"),
        ({"selector": "round_robin", "method": "centralized"}, "all clients train in every"),
        ({"selector": "round_robin", "method": "graphsaint"}, "all clients train in every"),
    ],
)
def test_what_cannot_be_selected_is_refused(
    make_graph: MakeGraph, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        go(make_graph(), **options)


def test_facts_of_a_round(make_graph: MakeGraph, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nodes and losses are those of who trained, bytes those of the ledger."""
    seen: list[RoundFacts] = []

    def observe(options: Any, state: SelectorState, t: int, facts: RoundFacts) -> SelectorState:
        seen.append(facts)
        return state

    recording = replace(SELECTORS["round_robin"], observe=observe, uses_scores=True)
    monkeypatch.setitem(SELECTORS, "round_robin", recording)
    result = go(make_graph(), selector="round_robin", options={"selector.clients": 2})
    for t, facts in enumerate(seen, 1):
        records = [r for r in result.ledger.records if r.round == t]
        assert facts.bytes.tolist() == [
            sum(int(r.bytes[list(r.clients).index(c)]) for r in records if c in r.clients)
            for c in range(4)
        ]
        assert facts.answered.tolist() == facts.selected.tolist()
        assert facts.selected.tolist() == [True, True, False, False]  # nothing was learned
        assert (facts.nodes > 0).tolist() == facts.selected.tolist()
        mean = (facts.train_loss * facts.nodes)[:2].sum() / facts.nodes.sum()
        assert float(mean) == pytest.approx(result.rounds[t - 1]["train_loss"])
        assert facts.val_loss is not None
        assert facts.val_accuracy is not None
    assert len(seen) == 4


def test_a_choice_that_breaks_the_rules_is_named(
    make_graph: MakeGraph, monkeypatch: pytest.MonkeyPatch
) -> None:
    nobody = replace(SELECTORS["round_robin"], draw=lambda *_: [])
    monkeypatch.setitem(SELECTORS, "round_robin", nobody)
    with pytest.raises(ProtocolError, match="selector round_robin in round 1: expected at least"):
        go(make_graph(), selector="round_robin")


def test_nothing_is_kept_of_a_run_without_a_selector(make_graph: MakeGraph) -> None:
    config = make_config({"method": "fedavg", "clients": 4, "partition": "random", "hidden": 4})
    setup = prepare(config, make_graph())
    after = run_round(setup, first_snapshot(setup))
    assert not after.state.memory


def test_over_a_session_it_goes_on_without_a_silo(make_graph: MakeGraph) -> None:
    """The state is a function of what was seen, and comes back from a checkpoint."""
    options = {"selector.clients": 2}
    given: dict[str, Any] = {
        "method": "fedavg",
        "clients": 4,
        "partition": "random",
        "hidden": 4,
        "selector": "round_robin",
        "options": options,
        "block_size": 1,
    }
    setup = prepare(make_config(given), make_graph())
    _, whole, route = clients_of(setup.config, setup.parts, setup.cut.graph, torch.float32)
    fed, links = session(whole, route, setup.method_config, own_ops(), least=1)
    run = replace(setup, federation=fed)
    snapshot = run_round(run, first_snapshot(run))
    links[fed.ids[2]].change = lambda data: None
    snapshot = run_round(run, snapshot)
    assert snapshot.pending is not None  # its server's model is scored in the next round
    assert snapshot.pending.row["participants"] == 1  # of the third and the fourth client
    saved = from_bytes(b"".join(to_bytes(to_checkpoint(run, snapshot, "", {}))))
    again, _ = from_checkpoint(run, saved, None)
    selection = _make_selection(run)
    assert selection is not None
    key = training_key(run.config)
    chosen = [selection.choose(s.state, 3, key).selected for s in (snapshot, again)]
    assert chosen == [fed.ids[:2], fed.ids[:2]]


def test_the_selector_of_the_docs(make_graph: MakeGraph, monkeypatch: pytest.MonkeyPatch) -> None:
    """All take part once; then those whose loss was the largest."""
    page = Path(__file__).parents[2] / "docs" / "how_to" / "write_a_selector.md"
    code = page.read_text(encoding="utf-8").partition("# largest_loss.py")[2].partition("```")[0]
    scope: dict[str, Any] = {"__name__": __name__}
    exec(code, scope)
    monkeypatch.setitem(SELECTORS, "largest_loss", scope["SELECTOR"])
    own: dict[str, Any] = {"selector": "largest_loss", "options": {"selector.clients": 2}}
    own |= {"clients": 4, "partition": "random", "method": "fedavg", "kernels": "torch"}
    result = sg.run(make_graph(), rounds=3, **own)
    called = [
        r.clients.tolist()
        for r in result.ledger.records
        if r.op == "train" and r.direction == "down"
    ]
    assert sorted(called[0] + called[1]) == [0, 1, 2, 3]
    assert len(called[2]) == 2
