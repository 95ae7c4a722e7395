"""Budgets are kept before the fact, least clients and least selections are met, or refused."""

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mistakes import raises_code
from remote_runs import setup_of
from runs import go
from silograph.core.errors import ConfigError
from silograph.core.key import Key
from silograph.core.resolved_config import training_key
from silograph.experiment.resolve.resolve import DTYPES
from silograph.experiment.run.result import Result
from silograph.federation.base import positions_of
from silograph.federation.program import bytes_of_steps
from silograph.graph.graph import Graph
from silograph.methods import METHODS
from silograph.selection.base import SelectionLimits, resized

MakeGraph = Callable[..., Graph]
DECLARED = [
    name
    for name, method in METHODS.items()
    if method.calls is not None and not method.evaluate.all_silos and not method.setting.uncut
]


@st.composite
def limited(draw: st.DrawFn) -> SelectionLimits:
    clients = draw(st.integers(1, 12))
    return SelectionLimits(
        clients,
        draw(st.integers(1, clients)),
        draw(st.none() | st.integers(0, 80)),
        draw(st.integers(-3, 60)),
        draw(st.integers(1, 12)),
    )


@given(limited(), st.lists(st.integers(1, 12), min_size=12, max_size=12))
def test_limits_hold_whatever_is_wanted(limits: SelectionLimits, wanted: list[int]) -> None:
    """At least L a round, never more than is paid for, and enough in all where that can be."""
    left, total = limits, 0
    for each in wanted[: limits.rounds]:
        number = left.number(min(each, limits.clients))
        if number is None:
            assert left.affordable is not None
            assert left.affordable < max(each, left.least) or left.affordable < left.least
            break
        assert limits.least <= number <= limits.clients
        left, total = left.after(number), total + number
    if limits.affordable is not None:
        assert total <= limits.affordable
    if limits.can_be_met:
        assert total >= limits.selections_left


@given(limited())
def test_what_is_refused_has_no_rounds(limits: SelectionLimits) -> None:
    """By trying all totals that so many rounds of L to N clients can have."""
    most = 10**9 if limits.affordable is None else limits.affordable
    possible = any(
        max(limits.selections_left, rounds * limits.least) <= min(most, rounds * limits.clients)
        for rounds in range(limits.rounds + 1)
    )
    assert limits.can_be_met == possible


@given(st.integers(1, 7), st.sets(st.sampled_from("abcdefg"), min_size=1), st.integers(0, 9))
def test_resized_keeps_who_was_chosen(number: int, chosen: set[str], seed: int) -> None:
    ids = list("abcdefg")
    drawn = resized([n for n in ids if n in chosen], ids, number, Key.of(seed))
    positions_of(ids, drawn)
    assert len(drawn) == number
    assert set(drawn) <= chosen or set(drawn) >= chosen


def spent(result: Result, t: int | None = None) -> int:
    """Bytes without evaluation, of one round or of all."""
    return sum(
        int(r.bytes.sum())
        for r in result.ledger.records
        if r.what != "evaluation" and (t is None or r.round == t)
    )


@pytest.mark.law(sample=24)
@pytest.mark.parametrize("selector", ["uniform", "ucb"])
@pytest.mark.parametrize("method", DECLARED)
def test_what_a_round_costs_is_known_before_it(
    make_graph: MakeGraph, method: str, selector: str
) -> None:
    """Bytes of every round = number of selected clients times the closed form."""
    own: dict[str, Any] = {"selector": selector, "lr": 0.05, "rounds": 4}
    own |= {"participation": 0.5} if selector == "uniform" else {}
    if (METHODS[method].evaluate.crosses or method == "local") and selector == "ucb":
        return  # refused: see test_selectors_in_runs.py
    result = go(make_graph(), method=method, **own)
    setup = setup_of(make_graph(), METHODS[method], **own)
    steps = METHODS[method].calls.round(setup.method_config, 1, training_key(setup.config))  # type: ignore[union-attr]
    each = bytes_of_steps(steps, DTYPES[setup.config.dtype])
    if METHODS[method].evaluate.crosses and method != "fedlocal":
        assert each is None  # clients choose which rows they fetch
        return
    assert each
    numbers = [row["participants"] for row in result.rounds]
    assert [spent(result, t) for t in range(1, 5)] == [each * (n or 0) for n in numbers]


def test_rows_have_no_size_before_the_round(make_graph: MakeGraph) -> None:
    setup = setup_of(make_graph(), METHODS["cagnet"])
    steps = METHODS["cagnet"].calls.round(setup.method_config, 1, training_key(setup.config))  # type: ignore[union-attr]
    assert bytes_of_steps(steps, DTYPES["float64"]) is None


BUDGETED: dict[str, dict[str, Any]] = {
    "all": {},
    "uniform": {"participation": 0.5},
    "round_robin": {"selector.clients": 2},
    "power_of_choice": {"selector.clients": 3},
    "oort": {"selector.clients": 2},
    "harmony": {"selector.clients": 3},
    "ucb": {},
}


def asked(selector: str, **limits: Any) -> dict[str, Any]:
    named = {f"selector.{name}": value for name, value in limits.items()}
    own = BUDGETED[selector]
    options = {n: v for n, v in own.items() if n.startswith("selector.")} | named
    rest = {n: v for n, v in own.items() if not n.startswith("selector.")}
    return {"selector": selector, "rounds": 30, "eval_every": 5, "options": options, **rest}


@pytest.mark.law(sample=6)
@pytest.mark.parametrize("selector", BUDGETED)
def test_a_run_keeps_its_budget(make_graph: MakeGraph, selector: str) -> None:
    free = go(make_graph(), **asked(selector) | {"rounds": 1})
    each = spent(free, 1) // int(free.rounds[0]["participants"] or 0)
    budget = spent(free, 0) + each * 23 + each // 2
    result = go(make_graph(), **asked(selector, budget=budget, least_clients=2))
    assert spent(result) <= budget
    assert result.stopped.startswith("selector.budget: a round of ")
    called = [len(r.clients) for r in result.ledger.records if r.op.startswith("train")]
    assert min(called) >= 2
    enough = go(
        make_graph(), **asked(selector, budget=budget, least_clients=2, least_selections=23)
    )
    assert spent(enough) == spent(free, 0) + 23 * each


def test_an_ample_budget_changes_nothing(make_graph: MakeGraph) -> None:
    plain = go(make_graph(), participation=0.5)
    ample = go(make_graph(), participation=0.5, options={"selector.budget": "1GB"})
    assert plain.ledger.records == ample.ledger.records
    assert plain.to_dict()["test"] == ample.to_dict()["test"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"budget": 100},
            r"which pay for a round, of 1 client, got 100 B: .* spent before round 1 and a ",
        ),
        (
            {"least_clients": 5},
            "option selector.least_clients: expected at most 4 clients, got 5: lower it",
        ),
        (
            {"least_selections": 17},
            "option selector.least_selections: expected at most 16, which 4 rounds of 1 to 4 "
            "clients can have, got 17: lower it",
        ),
        (
            {"budget": 15000, "least_selections": 15},
            r"got 15 with a budget of 15.0 kB: .* selections in all",
        ),
        ({"budget": 5000}, "which pay for the first round of all, of 4 clients, got 5.0 kB"),
        ({"budget": "10 miles"}, "expected a number of bytes"),
        ({"budget": 0}, "greater than or equal to 1"),
        ({"least_clients": 0}, "greater than or equal to 1"),
    ],
)
def test_what_cannot_be_met_is_refused_with_figures(
    make_graph: MakeGraph, options: dict[str, Any], message: str
) -> None:
    named = {f"selector.{name}": value for name, value in options.items()}
    with pytest.raises(ConfigError, match=message):
        go(make_graph(), selector="all", options=named)


def test_the_least_budget_and_the_most_selections_are_enough(make_graph: MakeGraph) -> None:
    def least(budget: int) -> int:
        with pytest.raises(ConfigError, match="raise it") as raised:
            go(make_graph(), selector="all", options={"selector.budget": budget})
        return int(str(raised.value).split("at least ")[1].split(" bytes")[0].replace(",", ""))

    enough = least(5000)
    assert least(enough - 1) == enough
    assert len(go(make_graph(), selector="all", options={"selector.budget": enough}).rounds) == 1
    options = {"selector.budget": 15000, "selector.least_selections": 99}
    with raises_code(
        ConfigError, "option-value", option="selector.least_selections", got=99
    ) as raised:
        go(make_graph(), options=options)
    most = int(str(raised.value).split("at most ")[1].split(",")[0])
    go(make_graph(), options={**options, "selector.least_selections": most})
    with pytest.raises(ConfigError, match=f"at most {most}, "):
        go(make_graph(), options={**options, "selector.least_selections": most + 1})


@pytest.mark.parametrize(
    ("own", "message"),
    [
        ({"method": "llcg"}, "messages are of a known size for selector.budget, got llcg"),
        ({"method": "cagnet"}, "trains locally for selector uniform, got cagnet"),
        ({"method": "centralized"}, "trains locally for selector uniform, got centralized"),
    ],
)
def test_a_budget_needs_a_method_whose_messages_are_known(
    make_graph: MakeGraph, own: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        go(make_graph(), **own, options={"selector.budget": "1GB"})


@pytest.mark.parametrize(
    ("selector", "options", "message"),
    [
        *(
            (
                name,
                {"clients": 5},
                "selector.clients: expected at most 4, the number of clients, got 5: l",
            )
            for name in ("round_robin", "power_of_choice", "oort", "harmony")
        ),
        (
            "power_of_choice",
            {"candidates": 5},
            "selector.candidates: expected at most 4, the number of clients, got 5: lower it",
        ),
        (
            "power_of_choice",
            {"clients": 3, "candidates": 2},
            "selector.candidates: expected at least 3, the clients of a round, got 2: raise it",
        ),
        (
            "ucb",
            {"arms": 5},
            "selector.arms: expected at most 4, the number of sizes that a round can have, got 5:",
        ),
        (
            "ucb",
            {"arms": 4, "least_clients": 2},
            "selector.arms: expected at most 3, the number of siz",
        ),
    ],
)
def test_more_than_there_are_is_refused(
    make_graph: MakeGraph, selector: str, options: dict[str, Any], message: str
) -> None:
    named = {f"selector.{name}": value for name, value in options.items()}
    with pytest.raises(ConfigError, match=message):
        go(make_graph(), selector=selector, options=named)


@pytest.mark.parametrize(
    ("selector", "options"),
    [
        ("round_robin", {"clients": 4}),
        ("power_of_choice", {"clients": 4, "candidates": 4}),
        ("oort", {}),
        ("harmony", {"clients": 4}),
        ("ucb", {"arms": 4}),
    ],
)
def test_as_many_as_there_are_and_defaults_are_taken(
    make_graph: MakeGraph, selector: str, options: dict[str, Any]
) -> None:
    named = {f"selector.{name}": value for name, value in options.items()}
    result = go(make_graph(), selector=selector, options=named, rounds=1)
    assert result.rounds[0]["participants"] == 4
