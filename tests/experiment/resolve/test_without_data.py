"""What of a config is checked before its data are known, and what has to wait for them."""

from dataclasses import replace
from typing import Any

import pytest

from mistakes import raises_code
from silograph.core.config import make_config
from silograph.core.errors import ConfigError, OpError
from silograph.experiment.resolve.resolve import resolve_without_data
from silograph.methods import METHODS
from silograph.methods.base import MethodConfig


@pytest.mark.parametrize("method", METHODS)
def test_what_goes_with_some_data_is_not_refused(method: str) -> None:
    found = resolve_without_data(make_config({"method": method}))
    assert found is not None
    assert found.config.method == method


@pytest.mark.parametrize(
    ("options", "line"),
    [
        (
            {"method": "fedais", "model": "gat"},
            "^expected a model whose sums can be shared, got GAT: .*; use model=gcn, graphconv",
        ),
        ({"method": "fedais", "layers": 1}, "^expected a model with a layer after the first"),
        ({"method": "fedais", "batch_size": 3}, "^fedais draws batches and neighbors "),
        ({"method": "bns", "batch_size": 3}, "^expected participation=1 and neither batch_size "),
        (
            {"method": "fedper", "model": "gcn", "options": {"private": 2}},
            "^option private: expected less than",
        ),
        ({"method": "fedper", "weights_as": "int4"}, "^expected weights_as=exact and weight_rows="),
        ({"method": "fedais", "model": "rating_gcn"}, "^expected a method that trains on ratings"),
        (  # the labels are those that have the metric
            {"method": "fedais", "model": "gat", "metric": "rmse"},
            "^expected a model whose sums can be shared, got",
        ),
        ({"metric": "accuracy", "target": "rmse=1"}, "^target: unknown metric 'rmse'"),
    ],
)
def test_what_goes_with_no_data_is_refused(options: dict[str, Any], line: str) -> None:
    with pytest.raises(ConfigError, match=line):
        resolve_without_data(make_config(options))


@pytest.mark.parametrize(
    "options",
    [
        {"metric": "rmse"},
        {"metric": "ndcg@10", "model": "rating_gcn"},
        {"target": "f1_micro=0.5"},
        # How many clients there are, the data say.
        {"partition": "silo", "method": "label_guided", "min_silos_per_row": 50},
    ],
)
def test_what_the_data_decide_waits_for_them(options: dict[str, Any]) -> None:
    assert resolve_without_data(make_config(options)) is not None


def test_a_module_of_the_users_is_not_built_without_its_features() -> None:
    module = {"model": "nowhere.py:Net"}
    assert resolve_without_data(make_config(module)) is None
    with raises_code(
        ConfigError, "conflicting-options", options=["method", "weights_as", "weight_rows"]
    ):
        resolve_without_data(make_config(module | {"method": "fedper", "weights_as": "int4"}))


def test_a_check_of_the_users_that_fails_is_one_line() -> None:
    def check(cfg: MethodConfig) -> None:
        raise KeyError(cfg.selector)

    mine = replace(METHODS["fedavg"], name="mine", check=check)
    with pytest.raises(OpError, match=r"^in check of method mine: KeyError: 'uniform'"):
        resolve_without_data(make_config({"method": "mine"}), mine)
