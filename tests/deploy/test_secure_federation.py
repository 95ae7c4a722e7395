"""Secure aggregation over gRPC gives what a simulation gives, whoever vanishes, and tells no more."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import silograph as sg
from runs import rows_of, same_bits, weights_of
from silograph.deploy.server_settings import ServerSettings
from silograph.graph.graph import Graph
from silos import config_of, federate, folders

PLAIN = ServerSettings("127.0.0.1:0", insecure=True, patience=600)
BASE: dict[str, Any] = {
    "partition": "random",
    "rounds": 2,
    "hidden": 8,
    "split": "0.4/0.3/0.3",
    "secure_aggregation": True,
}
MakeGraph = Callable[..., Graph]


@pytest.mark.parametrize("method", ["fedavg", "scaffold", "label_guided", "fedgraph"])
def test_silos_have_the_bits_of_a_simulation(
    method: str, make_graph: MakeGraph, tmp_path: Path
) -> None:
    graph, options = make_graph(60), BASE | {"method": method}
    config = config_of(3, **options)
    silos = folders(graph, config, tmp_path / "silos")
    theirs = federate(silos, config, PLAIN)
    ours = sg.run(
        graph,
        **{
            k: v
            for k, v in vars(config).items()
            if k in {*options, "clients", "evaluation_min_count", "evaluate_clients"}
        },
    )
    assert same_bits(weights_of(ours), weights_of(theirs))
    skipped = {"flops"}
    for a, b in zip(rows_of(ours), rows_of(theirs), strict=True):
        assert {k: v for k, v in a.items() if k not in skipped} == {
            k: v for k, v in b.items() if k not in skipped
        }
    assert ours.ledger.records == theirs.ledger.records
