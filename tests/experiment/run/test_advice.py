"""What a run says about its number of rounds, on courses written by hand."""

import math
from collections.abc import Sequence
from pathlib import Path

import pytest

from pages import read_page
from runs import MakeGraph, go
from silograph.experiment.result_files import Row
from silograph.experiment.terminal_table import advice_of, better_personalized_text
from silograph.task.metric_table import METRICS


def rows_of(values: Sequence[float | None], every: int = 1) -> list[Row]:
    """Return the evaluated rounds of a course; the loss is the same in all of them."""
    return [
        {
            "round": every * (n + 1),
            "val_server_accuracy": value,
            "val_server_rmse": value,
            "val_server_loss": None if value is None else 1.0,
        }
        for n, value in enumerate(values)
    ]


def advice(values: Sequence[float | None], best: int, **more: int) -> str | None:
    patience = more.get("patience")
    rounds = more.get("rounds", len(values))
    metric = METRICS["accuracy"]
    return advice_of(rows_of(values), "server", metric, best, rounds=rounds, patience=patience)


def test_a_best_round_that_is_the_last_asks_for_more_rounds() -> None:
    assert advice([0.1, 0.3, 0.2, 0.4], 4) == (
        "validation accuracy was still improving at the last round: raise --rounds (now 4)"
    )


def test_lower_is_better_where_the_metric_says_so() -> None:
    falling = rows_of([0.4, 0.3, 0.2])
    found = advice_of(falling, "server", METRICS["rmse"], 3, rounds=3, patience=None)
    assert found is not None
    assert "validation RMSE was still improving" in found


def test_a_run_that_something_else_stopped_is_not_asked_for_more_rounds() -> None:
    assert advice([0.1, 0.3, 0.4], 3, rounds=50) is None


def test_rounds_after_the_best_are_named_with_the_patience_that_saves_them() -> None:
    course = [0.1, 0.5, 0.4, 0.4, 0.4, 0.6] + [0.3] * 34
    # The longest wait before round 6 is 3 rounds, so 10 is enough and stops after round 16.
    assert advice(course, 6) == (
        "the best round was 6 of 40: --patience 10 gives the same model 24 rounds earlier"
    )


def test_the_suggested_patience_outlasts_the_longest_wait_before_the_best_round() -> None:
    course = [0.5] + [0.4] * 12 + [0.6] + [0.3] * 60
    found = advice(course, 14)
    assert found is not None
    assert "--patience 15 " in found


@pytest.mark.parametrize("patience", [5, 30])
def test_a_run_with_patience_is_not_told_of_it(patience: int) -> None:
    assert advice([0.1, 0.6] + [0.3] * 60, 2, patience=patience) is None


def test_little_to_save_is_not_worth_a_line() -> None:
    assert advice([0.1] * 30 + [0.6] + [0.5] * 15, 31) is None


@pytest.mark.parametrize("values", [[], [0.4], [None, None]])
def test_no_course_no_advice(values: list[float | None]) -> None:
    assert advice(values, 1, rounds=2) is None


def test_a_best_round_picked_in_another_way_gets_no_advice() -> None:
    assert advice([0.1, 0.3, 0.4], 2) is None


def test_advice_stands_in_result_and_page(make_graph: MakeGraph, tmp_path: Path) -> None:
    result = go(make_graph(), out=str(tmp_path / "x"), rounds=2, lr=1e-4)
    assert result.best_round == 2
    assert result.advice is not None
    assert "raise --rounds (now 2)" in result.advice
    assert result.to_dict()["advice"] == result.advice
    assert f"note: {result.advice}" in " ".join(repr(result).split())
    assert result.advice in read_page(tmp_path / "x" / "report.html").text


def test_own_models_that_are_better_than_the_servers_get_a_note() -> None:
    accuracy, rmse = METRICS["accuracy"], METRICS["rmse"]
    low, high = ({"accuracy": n, "rmse": n} for n in (0.25, 0.75))
    assert "0.7500, not 0.2500" in str(better_personalized_text(accuracy, "server", low, high))
    assert better_personalized_text(rmse, "server", high, low) is not None
    for view, server, own in (
        ("server", high, low),
        ("server", low, low),
        ("server", None, high),
        ("server", low, None),
        ("personalized", low, high),  # whose aim that is
        ("server", {"accuracy": 0.25}, {"accuracy": 0.25 + 1e-9}),  # of equal texts
        ("server", low, {"accuracy": math.nan}),
        ("server", {"accuracy": math.nan}, high),
    ):
        assert better_personalized_text(accuracy, view, server, own) is None


def test_the_note_on_own_models_stands_in_result_and_page(
    make_graph: MakeGraph, tmp_path: Path
) -> None:
    """Local steps of a model that the server does not take are better than none."""
    options = {"server_optimizer": "momentum", "options": {"server_lr": 1e-6}, "rounds": 3}
    result = go(make_graph(), out=str(tmp_path / "x"), lr=0.3, local_epochs=20, **options)
    test = result.test
    assert test.server is not None
    assert test.personalized is not None
    assert (test.personalized["accuracy"] or 0) > (test.server["accuracy"] or 0)
    note = better_personalized_text(result.metric, "server", test.server, test.personalized)
    assert note is not None
    assert note in " ".join(result.summary().split())
    assert note in read_page(tmp_path / "x" / "report.html").text
