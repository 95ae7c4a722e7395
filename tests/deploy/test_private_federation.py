"""Differential privacy over gRPC: what leaves, what it is charged, and when a silo refuses."""

import json
import threading
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("grpc")
pytest.importorskip("cryptography")
pytest.importorskip("dp_accounting")

import silograph as sg
from mistakes import raises_code
from private_silos import private_folders, releases, requiring, serve_and_die_in
from proxy import Proxy
from runs import rows_of, same_bits, weights_of
from silograph.cli import run_app
from silograph.core.errors import CheckpointError, ConfigError, SilographError
from silograph.core.payload import Payload
from silograph.deploy.policy import SiloPolicy
from silograph.deploy.server import resume_server
from silograph.deploy.server_settings import ServerSettings
from silograph.deploy.silo import Attendance, take_part_in_run
from silograph.experiment.report.reading import WITHHELD, read_run
from silograph.experiment.run.result import Result
from silograph.federation.frame import Envelope
from silograph.federation.privacy.accounting import epsilon_of
from silograph.federation.privacy.budget import (
    LEDGER,
    SECRET,
    Charge,
    PrivacyBudget,
    PrivacyLedger,
)
from silograph.federation.privacy.release import SimulatedNoise
from silograph.federation.session.audit import read_audit
from silograph.federation.session.message import Type
from silograph.federation.session.summed_reply import SummedReply
from silograph.graph.graph import Graph
from silograph.graph.silos.read import read_silo, read_silos
from silos import config_of, federate, folders

PLAIN = ServerSettings("127.0.0.1:0", insecure=True, patience=60)
BASE: dict[str, Any] = {
    "partition": "random",
    "method": "fedavg",
    "rounds": 2,
    "hidden": 8,
    "split": "0.4/0.3/0.3",
    "dp_epsilon": 50.0,
    "dp_delta": 1e-5,
    "dp_unit": "silo",
}
MakeGraph = Callable[..., Graph]
SECURE = [pytest.param(False, id="plain"), pytest.param(True, id="secure")]


@pytest.mark.parametrize("secure", SECURE)
def test_only_noised_sums_leave(
    secure: bool, make_graph: MakeGraph, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = config_of(3, **BASE, secure_aggregation=secure, out=str(tmp_path / "out"))
    silos = private_folders(make_graph(60), config, tmp_path / "silos")
    audits = {silo: {"audit": silo / "audit.jsonl"} for silo in silos}
    policies = requiring(silos) if secure else {}
    result = federate(silos, config, PLAIN, keep=True, own=audits, policies=policies)
    # The server: neither loss, scores, work nor numbers of nodes.
    assert result.ledger.flops == 0
    assert {row["train_loss"] for row in result.rounds} == {None}
    assert all(v is None for row in result.rounds for n, v in row.items() if n.startswith("val_"))
    session = json.loads((tmp_path / "out/session.json").read_text())
    assert not any(session["nodes"].values())
    assert result.best_round == config.rounds
    spent = result.privacy
    assert spent is not None
    assert 0 < spent["epsilon"] <= 50
    # The server counts the spare release for a round that is repeated, which none was.
    assert spent["releases"] == config.rounds + secure
    cost = epsilon_of({spent["noise_multiplier"]: config.rounds}, 1e-5)
    assert cost < spent["epsilon"] if secure else cost == spent["epsilon"]
    spent |= {"releases": config.rounds, "epsilon": cost}
    for silo in silos:
        (own,) = (silo / "results").glob("*/result.json")
        about = json.loads(own.read_text())
        assert about["privacy"] == spent
        assert about["test"]["server"]["accuracy"] is not None  # its own scores of the model
        assert releases(silo) == config.rounds
        with (silo / "audit.jsonl").open("rb") as file:
            (run,) = read_audit(file).runs
        assert run.spent is not None
        assert run.spent["epsilon"] == spent["epsilon"]
        assert run_app(["audit", str(silo / "audit.jsonl")]) == 0
        shown = " ".join(capsys.readouterr().out.split())
        assert f"epsilon {spent['epsilon']:.4g} at delta 1e-05 of a silo" in shown
    page = (tmp_path / "out/report.html").read_text()
    assert "epsilon at delta" in page
    for text in (page, result.summary(), result._repr_html_()):
        assert WITHHELD in " ".join(text.split())
        assert "GFLOP" not in text  # no column or figure that cannot be known
    assert "flops" not in read_run(str(tmp_path / "out")).client_table[0]
    assert ">flops<" not in page


@pytest.mark.parametrize(
    ("secure", "quantile"),
    [
        pytest.param(False, None, id="plain"),
        pytest.param(True, None, id="secure"),
        pytest.param(True, 0.5, id="secure-adapting"),
    ],
)
def test_a_resumed_run_has_the_same_bits_and_costs_no_more(
    secure: bool,
    quantile: float | None,
    make_graph: MakeGraph,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The server dies in round 2, once the silos have answered, and does the round again."""
    options = BASE | {"rounds": 3, "secure_aggregation": secure, "dp_clip_quantile": quantile}
    config, graph = config_of(3, **options), make_graph(60)
    monkeypatch.setattr("silograph.deploy.server.secrets.token_bytes", lambda n: bytes(n))
    whole = private_folders(graph, config, tmp_path / "whole")
    cut = private_folders(graph, config, tmp_path / "cut")
    policies = requiring([*whole, *cut]) if secure else {}
    expected = federate(whole, replace(config, out=str(tmp_path / "a")), PLAIN, policies=policies)
    out = tmp_path / "b"

    def go_on(*_: Any, **named: Any) -> Result:
        return resume_server(out, PLAIN, **named)

    federate(
        cut,
        replace(config, out=str(out)),
        PLAIN,
        run=serve_and_die_in(2, monkeypatch),
        policies=policies,
    )
    assert {releases(silo) for silo in cut} == {2}
    result = federate(cut, config, PLAIN, run=go_on, policies=policies)
    assert same_bits(weights_of(result), weights_of(expected))
    assert rows_of(result) == rows_of(expected)
    assert {releases(silo) for silo in (*whole, *cut)} == {3}


def test_noise_is_the_silos_own(make_graph: MakeGraph, tmp_path: Path) -> None:
    """Another run of the same config has other noise, and so has a simulation."""
    config, graph = config_of(3, **BASE), make_graph(60)
    silos = private_folders(graph, config, tmp_path / "silos")
    one, other = (federate(silos, config, PLAIN) for _ in range(2))
    assert not same_bits(weights_of(one), weights_of(other))
    assert {releases(silo) for silo in silos} == {2 * config.rounds}


@pytest.mark.parametrize("secure", SECURE)
def test_without_noise_real_silos_and_a_simulation_are_equal(
    secure: bool, make_graph: MakeGraph, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also the clips of all rounds, which follow from what silos say of their norms."""
    options = BASE | {"dp_clip": 0.2, "dp_clip_quantile": 0.5, "rounds": 3, "kernels": "torch"}
    options |= {"secure_aggregation": secure}
    config, graph = config_of(3, **options), make_graph(60)
    silos = private_folders(graph, config, tmp_path / "silos")
    monkeypatch.setattr(SimulatedNoise, "add", lambda self, reply, *_: reply)
    monkeypatch.setattr(
        "silograph.federation.session.private_reply.add_noise", lambda reply, *_: reply
    )
    policies = requiring(silos) if secure else {}
    real = federate(silos, config, PLAIN, policies=policies)
    del options["partition"]  # the folders are cut
    simulated = sg.run(read_silos(tmp_path / "silos"), **options)
    assert same_bits(weights_of(real), weights_of(simulated))
    clips = [row["fact_clip"] for row in real.rounds]
    assert clips == [row["fact_clip"] for row in simulated.rounds]
    assert len(set(clips)) > 1
    assert real.privacy == simulated.privacy


def test_a_budget_holds_over_all_runs(
    make_graph: MakeGraph, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The second run would exceed it, and is refused before it begins."""
    config = config_of(3, **BASE)
    silos = private_folders(make_graph(60), config, tmp_path / "silos")
    budget = PrivacyBudget(epsilon=60.0, delta=1e-5)
    policies = {silos[1]: SiloPolicy(privacy_budget=budget)}
    own = {silos[1]: {"audit": silos[1] / "audit.jsonl"}}
    federate(silos, config, PLAIN, policies=policies, own=own, keep=True)
    use = PrivacyLedger(silos[1] / "state").use_of(budget)
    assert 0 < use.spent <= 50 < 60 < use.spent + use.left
    ledger = PrivacyLedger(silos[1] / "state").releases("silo")
    (run,) = ledger.values()
    twice = {multiplier: 2 * count for multiplier, count in run.items()}
    assert epsilon_of(run, 1e-5) <= 50 < 60 < epsilon_of(twice, 1e-5)
    before = (silos[1] / "state" / LEDGER).read_bytes()
    with pytest.raises(ConfigError, match="privacy_budget"):
        federate(silos, config, PLAIN, policies=policies)
    assert (silos[1] / "state" / LEDGER).read_bytes() == before
    # What is left is said when the silo starts, in the audit, in the result and on its page.
    cheaper, lines = replace(config, dp_epsilon=5.0), list[str]()
    federate(silos, cheaper, PLAIN, policies=policies, own=own, silo_lines=lines)
    assert f"privacy budget: {use}" in lines
    (result,) = (silos[1] / "results").glob("*/result.json")
    assert json.loads(result.read_text())["privacy"]["budget"] == asdict(use)
    assert f"Privacy budget of all runs: {use}." in (result.parent / "report.html").read_text()
    use = PrivacyLedger(silos[1] / "state").use_of(budget)
    with (silos[1] / "audit.jsonl").open("rb") as file:
        reading = read_audit(file)
    assert (reading.budget, use.runs) == (use, 2)
    assert run_app(["audit", str(silos[1] / "audit.jsonl"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["privacy_budget"] == asdict(use)
    assert run_app(["audit", str(silos[1] / "audit.jsonl")]) == 0
    assert f"privacy budget: {use}" in " ".join(capsys.readouterr().out.split())


def test_a_silo_with_a_budget_refuses_runs_without_noise(
    make_graph: MakeGraph, tmp_path: Path
) -> None:
    config = config_of(
        3, **{name: value for name, value in BASE.items() if not name.startswith("dp_")}
    )
    silos = private_folders(make_graph(60), config, tmp_path / "silos")
    policies = {silos[0]: SiloPolicy(privacy_budget=PrivacyBudget(epsilon=60.0, delta=1e-5))}
    with pytest.raises(ConfigError, match="privacy_budget"):
        federate(silos, config, PLAIN, policies=policies)


def test_a_silo_with_edges_to_others_or_without_a_state_folder_refuses(
    make_graph: MakeGraph, tmp_path: Path
) -> None:
    config = config_of(3, **BASE)
    silos = folders(make_graph(60), config, tmp_path / "crossed")
    with pytest.raises(ConfigError, match="edges to other silos"):
        federate(silos, config, PLAIN)
    own = private_folders(make_graph(60), config, tmp_path / "own")
    with pytest.raises(ConfigError, match="--state"):
        federate(own, config, PLAIN, own={own[0]: {"state": None}})


def test_a_bound_on_updates_is_refused(make_graph: MakeGraph, tmp_path: Path) -> None:
    config = config_of(3, **BASE)
    silos = private_folders(make_graph(60), config, tmp_path / "silos")
    with raises_code(ConfigError, "conflicting-options", options=["max_update_norm", "method"]):
        federate(silos, config, replace(PLAIN, update_norm=1.0))


def test_a_share_of_the_noise_is_not_enough_without_proofs_of_keys(
    make_graph: MakeGraph, tmp_path: Path
) -> None:
    """The server could invent the silos that add the rest, and take off all masks."""
    config = config_of(3, **BASE, secure_aggregation=True)
    silos = private_folders(make_graph(60), config, tmp_path / "silos")
    with pytest.raises(ConfigError, match="proofs of keys"):
        federate(silos, config, PLAIN, policies=requiring(silos[1:]))
    assert not any(releases(silo) for silo in silos)


def test_a_round_that_lost_a_silo_is_repeated_by_a_spare_release(
    make_graph: MakeGraph, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A silo vanishes once its masked values have left: their noise is not used again."""
    config = config_of(3, **BASE, secure_aggregation=True)
    silos = private_folders(make_graph(60), config, tmp_path / "silos")
    real, lost = SummedReply.answer, list[str]()
    with Proxy() as proxy:

        def answer(own: SummedReply, kind: Type, envelope: Envelope, payload: Payload) -> Any:
            if kind is Type.CONFIRM and own._name == silos[1].name and not lost:
                lost.append(own._name)
                proxy.cut(reset=True)
                threading.Timer(0.2, proxy.heal).start()
            return real(own, kind, envelope, payload)

        monkeypatch.setattr(SummedReply, "answer", answer)
        result = federate(
            silos,
            config,
            PLAIN,
            keep=True,
            on_address=proxy.forward_to,
            reached=lambda folder, at: proxy.address if folder == silos[1] else at,
            policies=requiring(silos),
        )
    assert lost
    assert result.best_round == config.rounds
    assert result.privacy is not None
    assert result.privacy["releases"] == config.rounds + 1
    assert result.privacy["epsilon"] <= 50
    for silo in silos:
        assert releases(silo) == config.rounds + 1
        (own,) = (silo / "results").glob("*/result.json")
        assert json.loads(own.read_text())["privacy"] == result.privacy


def test_the_name_of_a_run_that_is_over_is_refused(
    make_graph: MakeGraph, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under one name the releases of several agreements would count as those of one."""
    monkeypatch.setattr("silograph.deploy.server.secrets.token_bytes", lambda n: bytes(n))
    config = config_of(3, **BASE)
    silos = private_folders(make_graph(60), config, tmp_path / "silos")
    federate(silos, config, PLAIN)
    with pytest.raises(ConfigError, match="begin a new run"):
        federate(silos, replace(config, rounds=20), PLAIN)
    assert {releases(silo) for silo in silos} == {config.rounds}


def test_lost_charges_are_noticed_by_the_audit(make_graph: MakeGraph, tmp_path: Path) -> None:
    """Without its folder of states a silo would have its whole budget again."""
    config = config_of(3, **BASE)
    silos = private_folders(make_graph(60), config, tmp_path / "silos")
    audits = {silo: {"audit": silo / "audit.jsonl"} for silo in silos}
    federate(silos, config, PLAIN, own=audits)
    ledger = silos[1] / "state" / LEDGER
    whole = ledger.read_bytes()
    ledger.write_bytes(whole[: whole.index(b"\n") + 1])
    for missing in (None, ledger, silos[1] / "state" / SECRET):
        if missing is not None:
            missing.unlink()
        with pytest.raises(ConfigError, match="audit file"):
            federate(silos, config, PLAIN, own=audits)
    # With a budget a silo does not even connect, since it would say that too little is spent.
    attendance = Attendance(
        "nowhere.invalid:1",
        silos[1] / "key.pem",
        policy=SiloPolicy(privacy_budget=PrivacyBudget(epsilon=60.0, delta=1e-5)),
        insecure=True,
        secret=silos[1].parent / "secret",
        state=silos[1] / "state",
        audit=silos[1] / "audit.jsonl",
    )
    with raises_code(CheckpointError, "damaged-file", path=str(ledger)):
        take_part_in_run(read_silo(silos[1]), attendance)
    ledger.write_bytes(whole)
    federate(silos, config, PLAIN, own=audits)


def test_a_silo_with_a_budget_and_edges_to_others_does_not_even_connect(
    make_graph: MakeGraph, tmp_path: Path
) -> None:
    """The hashes of its edges would leave in the hello, before it knows of the run."""
    silos = folders(make_graph(60), config_of(3, **BASE), tmp_path / "silos")
    policy = SiloPolicy(privacy_budget=PrivacyBudget(epsilon=60.0, delta=1e-5))
    attendance = Attendance("nowhere.invalid:1", silos[0] / "key.pem", policy=policy, insecure=True)
    attendance = replace(attendance, secret=silos[0].parent / "secret")
    with raises_code(ConfigError, "refused-by-policy", rule="cross_edges"):
        take_part_in_run(read_silo(silos[0]), attendance)


def test_a_refusal_does_not_quote_the_data(make_graph: MakeGraph, tmp_path: Path) -> None:
    """A silo says how many steps a round has, which is its number of nodes, in its log alone."""
    config = config_of(3, **BASE | {"batch_size": 1, "local_epochs": 10_000})
    silos = private_folders(make_graph(60), config, tmp_path / "silos")
    lines = list[str]()
    with pytest.raises(SilographError) as error:
        federate(silos, config, replace(PLAIN, rejoin=0.5), silo_lines=lines)
    assert "0,000" not in str(error.value)
    assert any("0,000" in line for line in lines)
    assert not any(releases(silo) for silo in silos)


def test_a_budget_of_a_silo_has_no_bound_for_runs_that_hid_nodes_only(
    make_graph: MakeGraph, tmp_path: Path
) -> None:
    config = config_of(3, **BASE)
    silos = private_folders(make_graph(60), config, tmp_path / "silos")
    charge = Charge("charged", "00000000", "node", 1.0, 1, "00")
    PrivacyLedger(silos[1] / "state").add(charge)
    federate(silos, config, PLAIN)  # without a budget nothing is bounded
    policies = {silos[1]: SiloPolicy(privacy_budget=PrivacyBudget(epsilon=1e6, delta=1e-5))}
    with pytest.raises(ConfigError, match="privacy_budget"):
        federate(silos, config, PLAIN, policies=policies)


def test_a_silo_leaves_at_the_first_call_that_fails(
    make_graph: MakeGraph, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether training fails can depend on the data, and nothing is charged for it."""
    config = config_of(3, **BASE)
    silos = private_folders(make_graph(60), config, tmp_path / "silos")
    tries = list[object]()

    def fail(*_: object) -> None:
        tries.append(None)
        raise ValueError("42 nodes")

    monkeypatch.setattr("silograph.methods.clipped_updates.clipped_updates", fail)
    lines = list[str]()
    with pytest.raises(SilographError) as error:
        federate(silos, config, replace(PLAIN, rejoin=0.5), silo_lines=lines)
    assert "42" not in str(error.value)
    assert "ValueError" not in str(error.value)
    assert len(tries) == len(silos)
    assert sum("at no charge" in line for line in lines) >= len(silos)
