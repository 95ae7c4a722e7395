"""Early stops and budgets: when, and what the result says."""

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

import silograph as sg
from mistakes import raises_code
from silograph.core.config import RunConfig
from silograph.core.errors import ConfigError
from silograph.experiment.resolve.exclusions import parse_target
from silograph.experiment.run.clock import Limit, Stop, reason_to_stop
from silograph.graph.graph import Graph
from silograph.methods import FEDAVG
from silograph.methods.base import ServerState
from silograph.task.scores import Scores

OPTIONS: dict[str, Any] = {
    "method": "fedavg",
    "clients": 3,
    "partition": "random",
    "rounds": 30,
    "hidden": 8,
}
SCORES = Scores(
    {
        "accuracy": 0.8,
        "accuracy_client_mean": 0.7,
        "f1_macro": 0.6,
        "f1_micro": 0.8,
        "auc": None,
        "loss": 1.0,
    }
)


def reason(config: RunConfig, **changes: Any) -> str | None:
    values: dict[str, Any] = {
        "t": 10,
        "best_round": 7,
        "validation": SCORES,
        "total_bytes": 1000,
        "seconds": 5.0,
    }
    stop = reason_to_stop(config, **values | changes)
    return None if stop is None else str(stop)


@pytest.mark.parametrize(
    ("limits", "expected"),
    [
        ({}, None),
        ({"patience": 4}, None),
        ({"patience": 3}, "patience: no better validation for 3 rounds, best 7"),
        ({"target": "accuracy=0.8"}, "target reached: validation accuracy 0.8000 >= 0.8"),
        ({"target": "accuracy=0.81"}, None),
        ({"target": "f1_macro=0.5"}, "target reached: validation f1_macro 0.6000 >= 0.5"),
        ({"max_bytes": 1001}, None),
        ({"max_bytes": 1000}, "max_bytes: 1000 bytes exchanged, limit 1000"),
        ({"max_seconds": 5.5}, None),
        ({"max_seconds": 4.5}, "max_seconds: 5.0 seconds of training, limit 4.5"),
    ],
)
def test_each_limit(limits: dict[str, Any], expected: str | None) -> None:
    assert reason(RunConfig(**limits)) == expected


def test_a_round_that_was_not_judged_reaches_no_target() -> None:
    assert reason(RunConfig(target="accuracy=0.1"), validation=None) is None


@pytest.mark.parametrize("text", ["accuracy", "accuracy=", "accuracy=high", "accuracy=80", "=0.5"])
def test_wrong_targets(text: str) -> None:
    what = "expected METRIC=VALUE|expected a value of accuracy from 0 to 1|unknown metric"
    with pytest.raises(ConfigError, match=rf"^target: ({what})"):
        parse_target(text)


def test_unknown_metric_names_the_nearest() -> None:
    with raises_code(
        ConfigError, "unknown-name", what="metric", got="acuracy", suggestion="accuracy"
    ):
        parse_target("acuracy=0.5")


def test_a_wrong_target_stops_the_run_before_it_starts(make_graph: Callable[..., Graph]) -> None:
    with raises_code(ConfigError, "option-value", option="target", got="accuracy:0.5"):
        sg.run(make_graph(), **OPTIONS, target="accuracy:0.5")


def test_patience_ends_a_run(make_graph: Callable[..., Graph]) -> None:
    result = sg.run(make_graph(), **OPTIONS | {"rounds": 200}, patience=3)
    # The score of a round is known when the next one has trained.
    assert result.rounds[-1]["round"] == result.best_round + 4
    assert result.stopped.startswith("patience: no better validation for 3 rounds")


def test_a_round_that_was_not_judged_does_not_end_patience() -> None:
    assert reason(RunConfig(patience=3), validation=None) is None
    assert reason(RunConfig(patience=3, max_bytes=1), validation=None) is not None


def test_patience_counts_in_judged_rounds_only(make_graph: Callable[..., Graph]) -> None:
    """Fewer rounds of patience than between evaluations: the second one must be waited for."""
    result = sg.run(make_graph(), **OPTIONS | {"rounds": 200}, eval_every=5, patience=3)
    judged = [row["round"] for row in result.rounds]
    assert judged == list(range(5, 5 * len(judged) + 1, 5))
    assert len(judged) >= 2
    assert judged[-1] == result.best_round + 5
    assert result.stopped == f"patience: no better validation for 5 rounds, best {judged[-2]}"


def test_what_clients_do_before_the_first_round_takes_of_the_seconds(
    make_graph: Callable[..., Graph],
) -> None:
    def slow(*args: Any) -> ServerState:
        time.sleep(0.2)
        return FEDAVG.init(*args)

    late = replace(FEDAVG, name="late", init=slow)
    result = sg.run(make_graph(), **OPTIONS | {"method": late, "rounds": 10**6}, max_seconds=0.1)
    assert len(result.rounds) == 1
    assert result.seconds >= 0.2
    assert result.stopped.startswith("max_seconds: ")


def test_a_byte_budget_ends_a_run(make_graph: Callable[..., Graph]) -> None:
    graph = make_graph()
    free = sg.run(graph, **OPTIONS)
    limit = int(free.rounds[4]["bytes"] or 0) - 1  # one byte short of what five rounds take
    result = sg.run(graph, **OPTIONS, max_bytes=limit)
    assert len(result.rounds) == 5
    assert result.stopped.startswith("max_bytes")
    assert free.stopped == "all 30 rounds"


def test_a_limit_below_one_round_is_named(make_graph: Callable[..., Graph]) -> None:
    result = sg.run(make_graph(), **OPTIONS, max_bytes=1)
    assert "limit 1 (less than one round takes); the evaluation after it took" in result.stopped
    enough = reason(RunConfig(max_bytes=1000), t=1, first=True)  # exactly what it took
    assert enough == "max_bytes: 1000 bytes exchanged, limit 1000"
    later = reason(RunConfig(max_bytes=1))
    assert later == "max_bytes: 1000 bytes exchanged, limit 1"


def test_bytes_of_an_evaluation_after_the_limit_are_told(make_graph: Callable[..., Graph]) -> None:
    graph = make_graph()
    late = sg.run(graph, **OPTIONS, eval_every=10, max_bytes=1)
    before = int(late.stopped.split()[1])
    more = f"; the evaluation after it took {late.ledger.bytes - before} more"
    assert late.stopped.endswith(more)
    assert late.ledger.bytes > before
    judged = sg.run(graph, **OPTIONS | {"method": "local"}, max_bytes=1)  # scored at once
    assert judged.stopped.split()[1] == str(judged.ledger.bytes)
    assert "evaluation" not in judged.stopped


def test_only_bytes_are_followed_by_those_of_an_evaluation() -> None:
    for limit in Limit:
        stop = Stop(limit, "max_bytes: 9")
        later = f"{stop}; the evaluation after it took 3 more" if limit is Limit.BYTES else stop
        assert str(stop.after_evaluation(3)) == str(later)
        assert stop.after_evaluation(0) == stop


def test_a_limit_between_evaluations_judges_the_last_round(
    make_graph: Callable[..., Graph],
) -> None:
    result = sg.run(make_graph(), **OPTIONS, eval_every=10, max_bytes=1)
    assert [row["round"] for row in result.rounds] == [1]
    assert result.best_round == 1


def test_target_ends_a_run(make_graph: Callable[..., Graph]) -> None:
    result = sg.run(make_graph(), **OPTIONS | {"rounds": 200}, target="accuracy=0.5")
    accuracies = [row["val_server_accuracy"] for row in result.rounds]
    # The score of a round is known when the next one has trained.
    assert accuracies[-2] is not None
    assert accuracies[-2] >= 0.5
    assert all(a is not None and a < 0.5 for a in accuracies[:-2])
