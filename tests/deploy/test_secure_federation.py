"""Secure aggregation over gRPC gives what a simulation gives, whoever vanishes."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("grpc")
pytest.importorskip("cryptography")

import silograph as sg
from mistakes import raises_code
from runs import DiedError, rows_of, same_bits, weights_of
from silograph.core.errors import ConfigError
from silograph.deploy.policy import SiloPolicy
from silograph.deploy.server import resume_server, serve
from silograph.deploy.server_settings import ServerSettings
from silograph.experiment.run.result import Result
from silograph.experiment.run.run import checked_facts
from silograph.graph.graph import Graph
from silograph.methods import RoundReport
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


def without_flops(row: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in row.items() if name != "flops"}


@pytest.mark.parametrize(
    "options",
    [
        *({"method": name} for name in ("fedavg", "scaffold", "fedais", "fedgraph", "bns")),
        {"method": "label_guided"},
        {"method": "fedavg", "normalize": "standard", "class_weight": "balanced"},
        {"method": "label_guided", "min_silos_per_row": 2, "min_nodes_per_row": 2},
    ],
    ids=lambda options: "-".join(map(str, options.values())),
)
def test_silos_have_the_bits_of_a_simulation(
    options: dict[str, Any], make_graph: MakeGraph, tmp_path: Path
) -> None:
    graph, options = make_graph(60), BASE | options
    config = config_of(3, **options)
    silos = folders(graph, config, tmp_path / "silos")
    theirs = federate(silos, config, PLAIN)
    alike = ("clients", "evaluation_min_count", "evaluate_clients", "checkpoint_every")
    ours = sg.run(graph, **options, **{name: getattr(config, name) for name in alike})
    assert same_bits(weights_of(ours), weights_of(theirs))
    assert [without_flops(row) for row in rows_of(ours)] == [
        without_flops(row) for row in rows_of(theirs)
    ]
    assert ours.ledger.records == theirs.ledger.records


def dying_in(round_: int, patch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Return a server that dies in a round, once silos have unmasked its sums."""

    def dying(report: RoundReport, clients: int, t: int) -> Any:
        if t == round_:
            raise DiedError
        return checked_facts(report, clients, t)

    def die(*given: Any, **named: Any) -> None:
        with patch.context() as own:
            own.setattr("silograph.experiment.run.run.checked_facts", dying)
            with pytest.raises(DiedError):
                serve(*given, **named)

    return die


def test_a_run_goes_on_after_all_have_died(
    make_graph: MakeGraph, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Silos know from their files which sums they have unmasked, and the same silos may again."""
    graph, out = make_graph(60), tmp_path / "out"
    config = config_of(3, **BASE | {"method": "scaffold"}, out=str(out))
    silos = folders(graph, config, tmp_path / "silos")
    kinds = ("control", "evaluation", "weights")  # the messages of a secure sum need no others
    policies = dict.fromkeys(silos, SiloPolicy(secure_aggregation="require", kinds=kinds))
    die = dying_in(2, monkeypatch)
    federate(silos, config, PLAIN, run=die, policies=policies)
    assert all(list(folder.glob("state/*/revealed.jsonl")) for folder in silos)

    def go_on(*_: Any, **named: Any) -> Result:
        return resume_server(out, PLAIN, **named)

    result = federate(silos, config, PLAIN, run=go_on, policies=policies)
    whole = sg.run(graph, config=replace(config, out=None), block_size=1)
    assert same_bits(weights_of(result), weights_of(whole))
    assert result.ledger.records == whole.ledger.records


def test_a_silo_that_requires_masks_refuses_plain_runs(
    make_graph: MakeGraph, tmp_path: Path
) -> None:
    config = config_of(3, **BASE)
    silos = folders(make_graph(60), config, tmp_path / "silos")
    policies = {silos[0]: SiloPolicy(secure_aggregation="require", least_silos=3)}
    assert federate(silos, config, PLAIN, policies=policies).ledger.bytes_by_kind["masks"]
    plain = replace(config, secure_aggregation=False)
    others = folders(make_graph(60), plain, tmp_path / "plain")
    with pytest.raises(ConfigError):
        federate(others, plain, PLAIN, policies={others[0]: policies[silos[0]]})


def test_a_bound_on_updates_is_refused(make_graph: MakeGraph, tmp_path: Path) -> None:
    config = config_of(3, **BASE)
    silos = folders(make_graph(60), config, tmp_path / "silos")
    bound = replace(PLAIN, update_norm=1.0)
    options = ["max_update_norm", "secure_aggregation"]
    with raises_code(ConfigError, "conflicting-options", options=options):
        federate(silos, config, bound)


def test_a_server_of_real_silos_needs_no_other_option(
    make_graph: MakeGraph, tmp_path: Path
) -> None:
    """Its defaults, a least count and scores by participants, give way."""
    config = replace(config_of(3, **BASE), evaluation_min_count=None, evaluate_clients=None)
    silos = folders(make_graph(60), config, tmp_path / "silos")
    result = federate(silos, config, PLAIN)
    assert (result.config.evaluation_min_count, result.config.evaluate_clients) == (0, "all")
