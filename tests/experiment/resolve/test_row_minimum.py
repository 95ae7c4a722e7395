"""The least numbers of nodes and silos behind a row: which runs may ask for them."""

from typing import Any

import pytest

import silograph as sg
from runs import MakeGraph
from silograph.core.errors import ConfigError

RUN: dict[str, Any] = {"clients": 3, "partition": "random", "rounds": 1, "hidden": 4}


@pytest.mark.parametrize(
    ("method", "why"),
    [("fedavg", "exchanges no rows"), ("cagnet", "exchanges more than sums")],
)
@pytest.mark.parametrize("name", ["min_nodes_per_row", "min_silos_per_row"])
def test_methods_that_cannot_leave_rows_out(
    make_graph: MakeGraph, method: str, why: str, name: str
) -> None:
    line = (
        rf"^expected a method that exchanges sums of rows for {name}, got {method}, which {why}: "
        rf"leave {name} out$"
    )
    with pytest.raises(ConfigError, match=line):
        sg.run(make_graph(30), **{**RUN, "method": method, name: 2})


@pytest.mark.parametrize("name", ["min_nodes_per_row", "min_silos_per_row"])
@pytest.mark.parametrize("value", [0, -1, 10**6 + 1, 2**63])
def test_numbers_that_are_none(name: str, value: int) -> None:
    line = rf"^{name}: input should be (greater|less) than or equal to 10*, got {value}$"
    with pytest.raises(ConfigError, match=line):
        sg.run("digits", **{**RUN, name: value})
