"""Differential privacy of nodes over gRPC: what leaves, what it is charged, and budgets."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("grpc")
pytest.importorskip("cryptography")
pytest.importorskip("dp_accounting")

from private_silos import private_folders, releases, requiring, serve_and_die_in
from runs import rows_of, same_bits, weights_of
from silograph.core.errors import ConfigError
from silograph.deploy.policy import SiloPolicy
from silograph.deploy.server import resume_server
from silograph.deploy.server_settings import ServerSettings
from silograph.experiment.run.result import Result
from silograph.federation.privacy.accounting import epsilon_of
from silograph.federation.privacy.budget import LEDGER, PrivacyBudget
from silograph.federation.session.audit import read_audit
from silograph.graph.graph import Graph
from silos import config_of, federate

PLAIN = ServerSettings("127.0.0.1:0", insecure=True, patience=60)
BASE: dict[str, Any] = {
    "partition": "random",
    "method": "fedavg",
    "rounds": 2,
    "hidden": 8,
    "split": "0.4/0.3/0.3",
    "dp_epsilon": 50.0,
    "dp_delta": 1e-5,
    "dp_unit": "node",
}
MakeGraph = Callable[..., Graph]
SECURE = [pytest.param(False, id="plain"), pytest.param(True, id="secure")]


@pytest.mark.parametrize("secure", SECURE)
def test_only_noised_sums_leave(secure: bool, make_graph: MakeGraph, tmp_path: Path) -> None:
    config = config_of(3, **BASE, secure_aggregation=secure, out=str(tmp_path / "out"))
    silos = private_folders(make_graph(60), config, tmp_path / "silos")
    audits = {silo: {"audit": silo / "audit.jsonl"} for silo in silos}
    # Silos that add a share of the noise only need proofs of keys.
    policies = requiring(silos) if secure else {}
    result = federate(silos, config, PLAIN, keep=True, own=audits, policies=policies)
    assert result.ledger.flops == 0
    assert {row["train_loss"] for row in result.rounds} == {None}
    assert all(v is None for row in result.rounds for n, v in row.items() if n.startswith("val_"))
    assert not any(json.loads((tmp_path / "out/session.json").read_text())["nodes"].values())
    spent = result.privacy
    assert spent is not None
    # The server counts the spare release for a round that is repeated, which none was.
    assert (spent["unit"], spent["releases"]) == ("node", config.rounds + secure)
    assert 0 < spent["epsilon"] <= 50
    cost = epsilon_of({spent["noise_multiplier"]: config.rounds}, spent["delta"])
    assert cost < spent["epsilon"] if secure else cost == spent["epsilon"]
    spent |= {"releases": config.rounds, "epsilon": cost}
    for silo in silos:
        (own,) = (silo / "results").glob("*/result.json")
        assert json.loads(own.read_text())["privacy"] == spent
        assert (releases(silo, "node"), releases(silo, "silo")) == (config.rounds, 0)
        with (silo / "audit.jsonl").open("rb") as file:
            (run,) = read_audit(file).runs
        assert run.spent is not None
        assert run.spent["epsilon"] == spent["epsilon"]


@pytest.mark.parametrize("secure", SECURE)
def test_a_resumed_run_has_the_same_bits_and_costs_no_more(
    secure: bool, make_graph: MakeGraph, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server dies in round 2, once the silos have answered, and does the round again."""
    options = BASE | {"rounds": 3, "secure_aggregation": secure, "method": "fedopt"}
    config, graph = config_of(3, **options), make_graph(60)
    monkeypatch.setattr("silograph.deploy.server.secrets.token_bytes", lambda n: bytes(n))
    whole = private_folders(graph, config, tmp_path / "whole")
    cut = private_folders(graph, config, tmp_path / "cut")
    policies = requiring([*whole, *cut]) if secure else {}
    expected = federate(whole, replace(config, out=str(tmp_path / "a")), PLAIN, policies=policies)
    out = tmp_path / "b"

    def resume(*_: object, **named: Any) -> Result:
        return resume_server(out, PLAIN, **named)

    stopping = serve_and_die_in(2, monkeypatch)
    federate(cut, replace(config, out=str(out)), PLAIN, run=stopping, policies=policies)
    assert {releases(silo, "node") for silo in cut} == {2}
    result = federate(cut, config, PLAIN, run=resume, policies=policies)
    assert same_bits(weights_of(result), weights_of(expected))
    assert rows_of(result) == rows_of(expected)
    assert result.privacy == expected.privacy
    for one, other in zip(whole, cut, strict=True):
        charges = [(silo / "state" / LEDGER).read_bytes() for silo in (one, other)]
        assert charges[0] == charges[1]  # the same noise of the same rounds
    assert {releases(silo, "node") for silo in cut} == {3}


def test_noise_is_the_silos_own(make_graph: MakeGraph, tmp_path: Path) -> None:
    config = config_of(3, **BASE)
    silos = private_folders(make_graph(60), config, tmp_path / "silos")
    one, other = (federate(silos, config, PLAIN) for _ in range(2))
    assert not same_bits(weights_of(one), weights_of(other))
    assert {releases(silo, "node") for silo in silos} == {2 * config.rounds}


def test_a_budget_is_for_its_unit(make_graph: MakeGraph, tmp_path: Path) -> None:
    """A budget of silos refuses a run that hides nodes alone, and the other way round."""
    config = config_of(3, **BASE)
    silos = private_folders(make_graph(60), config, tmp_path / "silos")

    def bounded(unit: Any, epsilon: float) -> dict[Path, SiloPolicy]:
        budget = PrivacyBudget(epsilon=epsilon, delta=1e-5, unit=unit)
        return {silos[1]: SiloPolicy(privacy_budget=budget)}

    with pytest.raises(ConfigError, match="privacy_budget"):
        federate(silos, config, PLAIN, policies=bounded("silo", 1000.0))
    assert releases(silos[1], "node") == 0
    federate(silos, config, PLAIN, policies=bounded("node", 60.0))
    with pytest.raises(ConfigError, match="privacy_budget"):
        federate(silos, config, PLAIN, policies=bounded("node", 60.0))
    of_silos = config_of(3, **BASE | {"dp_unit": "silo"})
    with pytest.raises(ConfigError, match="privacy_budget"):
        federate(silos, of_silos, PLAIN, policies=bounded("node", 1000.0))
