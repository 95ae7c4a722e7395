"""Laws of each client's own best round: its validation nodes choose, and only for itself."""

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from runs import MakeGraph, go
from silograph.experiment.run.round_scores import scores_of_best_by_client, update_best_by_client
from silograph.experiment.run.setup import Setup

NODES = (5, 4, 0)  # validation nodes of three clients


def setup_of(metric: str = "accuracy") -> Setup:
    schema = SimpleNamespace(task="multiclass")
    config = SimpleNamespace(metric=metric, secure_aggregation=False)
    return cast(Setup, SimpleNamespace(schema=schema, config=config))


def counts(right: list[int], loss: list[float], test: list[int]) -> dict[str, Tensor]:
    """Counts of one class: hits on validation nodes, their losses, hits on 10 test nodes each."""
    found = {}
    for part, hits, nodes in (("val", right, NODES), ("test", test, (10, 10, 10))):
        missed = [n - h for n, h in zip(nodes, hits, strict=True)]
        found[f"{part}.nodes"] = torch.tensor(nodes, dtype=torch.int32)
        found[f"{part}.tp"] = torch.tensor(hits, dtype=torch.int32)[:, None]
        found[f"{part}.fn"] = torch.tensor(missed, dtype=torch.int32)[:, None]
        found[f"{part}.fp"] = torch.zeros(3, 1, dtype=torch.int32)
        found[f"{part}.known"] = torch.tensor(nodes, dtype=torch.int32)[:, None]
        found[f"{part}.loss"] = torch.tensor(loss if part == "val" else [0.0] * 3).double()
    return found | {"test.histogram": torch.ones(1, 2, 4)}


def best_of(rounds: list[dict[str, Tensor]], metric: str = "accuracy") -> list[int]:
    """Return the test hits of each client's best round."""
    known: Any = {}
    for own in rounds:
        known = update_best_by_client(setup_of(metric), known, own)
    return cast(list[int], known["test.tp"][:, 0].tolist())


def test_each_client_keeps_its_own_best_round() -> None:
    """Client 0 is best in the second round, client 1 in the first, client 2 cannot say."""
    first = counts([3, 4, 0], [1.0, 1.0, 0.0], [1, 2, 3])
    second = counts([4, 3, 0], [1.0, 1.0, 0.0], [4, 5, 6])
    third = counts([2, 2, 0], [1.0, 1.0, 0.0], [7, 8, 9])
    assert best_of([first, second, third]) == [4, 2, 9]


def test_ties_go_to_the_lower_loss_and_then_to_the_earlier_round() -> None:
    first = counts([3, 4, 0], [2.0, 1.0, 0.0], [1, 2, 3])
    second = counts([3, 4, 0], [1.0, 1.0, 0.0], [4, 5, 6])
    assert best_of([first, second]) == [4, 2, 6]


def test_a_metric_of_all_clients_gives_way_to_one_of_each() -> None:
    first = counts([3, 4, 0], [1.0, 1.0, 0.0], [1, 2, 3])
    second = counts([4, 3, 0], [1.0, 1.0, 0.0], [4, 5, 6])
    assert best_of([first, second], "f1_macro") == best_of([first, second])


def test_what_is_unknown_stays_unknown() -> None:
    """A run that was begun before there was such a choice does not know its first rounds."""
    assert update_best_by_client(setup_of(), None, counts([1, 1, 0], [1.0] * 3, [1, 1, 1])) is None
    assert scores_of_best_by_client(setup_of(), None) is None


def test_test_counts_choose_nothing() -> None:
    rounds = [counts([3, 4, 0], [1.0] * 3, [1, 2, 3]), counts([4, 3, 0], [1.0] * 3, [4, 5, 6])]
    other = [counts([3, 4, 0], [1.0] * 3, [9, 8, 7]), counts([4, 3, 0], [1.0] * 3, [6, 5, 4])]
    assert best_of(rounds) == [4, 2, 6]
    assert best_of(other) == [6, 8, 4]


@pytest.mark.parametrize("options", [{}, {"eval_every": 2}, {"method": "fedavg"}])
def test_no_client_validates_worse_than_in_the_round_of_all(
    make_graph: MakeGraph, options: dict[str, Any]
) -> None:
    result = go(make_graph(80), **{"method": "local", "rounds": 7, "lr": 0.1} | options)
    assert result.each_best is not None
    ours, theirs = result.each_best["val"], result.val.personalized
    assert ours is not None
    assert theirs is not None
    assert (ours["accuracy_client_mean"] or 0) >= (theirs["accuracy_client_mean"] or 0)
    assert ours["auc"] is None
    assert result.to_dict()["each_best"]["test"]["accuracy"] is not None


def test_a_run_of_one_round_has_one_choice(make_graph: MakeGraph) -> None:
    result = go(make_graph(80), method="local", rounds=1)
    assert result.each_best is not None
    ours, theirs = result.each_best["test"], result.test.personalized
    assert ours is not None
    assert theirs is not None
    assert {**ours, "auc": None} == {**theirs, "auc": None}
