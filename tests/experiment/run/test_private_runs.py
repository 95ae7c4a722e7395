"""Laws of runs with differential privacy of silos in one process."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import kstest, norm

pytest.importorskip("dp_accounting")

import silograph as sg
from membership import lower_bound
from mistakes import raises_code
from runs import FAST, MakeGraph, go, of, outcome, rows_of, run_until, same_bits, weights_of
from silograph.core.config import make_config
from silograph.core.errors import ConfigError, PolicyError, ProtocolError
from silograph.core.key import Key
from silograph.core.kinds import Kind
from silograph.core.payload import Payload, Shared, Stacked
from silograph.experiment.report.reading import WITHHELD
from silograph.experiment.run.setup import first_weights, prepare
from silograph.federation.field_specs import Extent, check_against
from silograph.federation.messages import specs_of, to_payload
from silograph.federation.privacy.release import SimulatedNoise
from silograph.federation.privacy.updates import CLIP_UNITS, UpdatePrivacy, share_within
from silograph.federation.secure.partners import topology_of
from silograph.methods import METHODS
from silograph.methods.clipped_updates import ModelToUpdate, train_clipped
from silograph.methods.fedavg import train
from silograph.methods.local_training import GlobalModel

DP: dict[str, Any] = {
    "dp_epsilon": 20.0,
    "dp_delta": 1e-5,
    "dp_unit": "silo",
    "kernels": "torch",
}
SECURE = [False, True]
QUANTILES = [None, 0.5]


@pytest.fixture
def without_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    def keep(self: SimulatedNoise, reply: Payload, *_: object) -> Payload:
        return reply

    monkeypatch.setattr(SimulatedNoise, "add", keep)


@pytest.mark.parametrize("method", [n for n, m in METHODS.items() if m.clips_updates])
@pytest.mark.usefixtures("without_noise")
def test_without_noise_and_clipping_it_is_the_plain_run(method: str, make_graph: MakeGraph) -> None:
    """Of silos with as many training nodes each, so that equal weights change nothing."""
    graph = make_graph(60)
    options = {"method": method, "kernels": "torch", "selector": "all"}
    plain, private = go(graph, **options), go(graph, **(options | DP), dp_clip=100.0)
    for name, w in of(plain).items():
        torch.testing.assert_close(of(private)[name], w, rtol=0, atol=2e-3)


@pytest.mark.usefixtures("without_noise")
def test_no_silo_moves_the_model_by_more_than_the_clip(make_graph: MakeGraph) -> None:
    graph, clip, rounds = make_graph(60), 0.01, 3
    private = go(graph, **DP, dp_clip=clip, rounds=rounds)
    setup = prepare(make_config(FAST | DP), graph)
    moved = [of(private)[name] - w for name, w in first_weights(setup).items()]
    assert 0 < math.hypot(*(float(t.norm()) for t in moved)) <= clip * rounds


@pytest.mark.parametrize("secure", SECURE)
def test_the_noise_in_the_model_is_that_of_the_closed_form(
    secure: bool, make_graph: MakeGraph, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One round with noise minus the same without: a Gaussian of the promised scale."""
    graph = make_graph(60)
    options = DP | {"rounds": 1, "secure_aggregation": secure, "hidden": 256, "dp_clip": 2.0}
    noisy = go(graph, **options)
    assert noisy.privacy is not None
    with monkeypatch.context() as patch:
        patch.setattr(SimulatedNoise, "add", lambda self, reply, *_: reply)
        plain = go(graph, **options)
    noise = torch.cat([(of(noisy)[n] - w).flatten() for n, w in of(plain).items()]).numpy()
    silos = noisy.config.clients
    shares = topology_of(silos).threshold - 1 if secure else 1
    scale = noisy.privacy["noise_multiplier"] * 2.0 * math.sqrt(silos / shares) / silos
    assert noise.std() == pytest.approx(scale, rel=5 / math.sqrt(2 * len(noise)))
    assert kstest(noise / scale, norm.cdf).pvalue > 1e-3


@pytest.mark.parametrize("quantile", QUANTILES)
@pytest.mark.parametrize("secure", SECURE)
def test_bits_do_not_depend_on_blocks(
    secure: bool, quantile: float | None, make_graph: MakeGraph
) -> None:
    graph = make_graph(60)
    options = DP | {"secure_aggregation": secure, "dp_clip_quantile": quantile}
    one = go(graph, **options)
    for machine in ({"block_size": 1}, {"block_size": 3}, {"strict": True}):
        other = go(graph, **options, **machine)
        assert same_bits(weights_of(one), weights_of(other))
        assert rows_of(one) == rows_of(other)
        assert one.ledger.records == other.ledger.records


@pytest.mark.parametrize("quantile", QUANTILES)
def test_a_resumed_run_is_the_same(
    quantile: float | None, make_graph: MakeGraph, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    graph, options = make_graph(60), DP | {"dp_clip_quantile": quantile}
    whole = go(graph, **options, out=str(tmp_path / "whole"))
    run_until(monkeypatch, graph, 3, tmp_path / "cut", **(FAST | options))
    resumed = sg.resume(str(tmp_path / "cut"), graph=graph)
    assert same_bits(weights_of(whole), weights_of(resumed))
    assert outcome(whole) == outcome(resumed)


def test_what_a_result_says(make_graph: MakeGraph, tmp_path: Path) -> None:
    """The last round is the result, since a choice by scores would be outside the guarantee."""
    result = go(make_graph(60), **DP, out=str(tmp_path / "run"))
    assert result.best_round == result.config.rounds
    assert result.privacy is not None
    assert 0 < result.privacy["epsilon"] <= 20
    assert result.privacy["releases"] == result.config.rounds
    assert {row["train_loss"] for row in result.rounds} == {None}
    assert result.advice is None  # more rounds need more noise
    assert "outside this guarantee" in result.summary()
    page = (tmp_path / "run/report.html").read_text()
    assert "epsilon at delta" in page
    assert "chosen by validation" not in page
    assert WITHHELD not in " ".join(result.summary().split())  # a simulation has scores
    assert "it hides nothing" in page
    assert go(make_graph(60)).privacy is None


def test_a_note_says_when_noise_is_longer_than_updates(make_graph: MakeGraph) -> None:
    """In units of the clip the noise of a sum is z sqrt(m d) long, and the updates m at most."""
    result = go(make_graph(60), **DP)
    assert result.privacy is not None
    num_weights = sum(w.numel() for w in of(result).values())
    ratio = result.privacy["noise_multiplier"] * math.sqrt(num_weights / result.config.clients)
    assert ratio > 1
    summary = " ".join(result.summary().split())
    assert f"about {ratio:,.1f} times as long" in summary
    quiet = go(make_graph(60), **DP | {"dp_epsilon": 1e6})
    assert "times as long" not in quiet.summary()


def test_the_server_optimizer_steps_along_the_noised_mean(make_graph: MakeGraph) -> None:
    graph = make_graph(60)
    averaged, stepped = go(graph, **DP), go(graph, **DP, server_optimizer="momentum")
    assert not same_bits(weights_of(averaged), weights_of(stepped))


def test_some_silos_in_a_round_cost_as_much_as_all(make_graph: MakeGraph) -> None:
    """The server draws and knows the participants, so the draw hides nobody."""
    graph = make_graph(60)
    every = go(graph, **DP)
    some = go(graph, **DP, options={"participation": 0.5})
    assert some.privacy == every.privacy


REFUSED: list[tuple[dict[str, Any], list[str]]] = [
    *(
        ({"method": name}, ["method", "dp_epsilon"])
        for name, method in METHODS.items()
        if not method.clips_updates
        and method.evaluate.copies
        and name not in ("fedgnn", "fesog", "fedmf")  # of ratings
    ),
    ({"selector": "oort"}, ["selector", "dp_epsilon"]),
    ({"aggregator": "median"}, ["aggregator", "dp_epsilon"]),
    ({"weights_as": "int4"}, ["weights_as", "weight_rows", "dp_epsilon"]),
    ({"weight_rows": "used"}, ["weights_as", "weight_rows", "dp_epsilon"]),
    ({"normalize": "standard"}, ["normalize", "dp_epsilon"]),
    ({"edge_weights": "scale"}, ["edge_weights", "dp_epsilon"]),
    ({"feature_drift": True}, ["feature_drift", "dp_epsilon"]),
    ({"class_weight": "balanced"}, ["class_weight", "dp_epsilon"]),
    ({"collect": 0.5}, ["collect", "dp_epsilon"]),
    ({"local_bias": True}, ["local_bias", "dp_epsilon"]),
    ({"patience": 2}, ["patience", "dp_epsilon"]),
    ({"target": "accuracy=0.9"}, ["target", "dp_epsilon"]),
    ({"max_seconds": 5.0}, ["max_seconds", "dp_epsilon"]),
    ({"evaluate_clients": "participants"}, ["evaluate_clients", "dp_epsilon"]),
    ({"workers": 2}, ["dp_epsilon", "workers"]),
    ({"dp_clip_quantile": 0.5, "dp_clip": 2.0**65}, ["dp_clip", "dp_clip_quantile"]),
    ({"dp_clip_quantile": 0.5, "dp_clip": 2.0**-65}, ["dp_clip", "dp_clip_quantile"]),
]


@pytest.mark.parametrize(("options", "names"), REFUSED, ids=lambda value: str(value)[:40])
def test_what_is_outside_the_guarantee_is_refused(
    options: dict[str, Any], names: list[str], make_graph: MakeGraph
) -> None:
    with raises_code(ConfigError, "conflicting-options", options=names):
        go(make_graph(60), **(DP | options))


@pytest.mark.parametrize("missing", ["dp_epsilon", "dp_delta"])
def test_a_missing_option_is_named(missing: str, make_graph: MakeGraph) -> None:
    options = {name: value for name, value in DP.items() if name != missing}
    with raises_code(ConfigError, "missing-option", option=missing):
        go(make_graph(60), **options)


def test_the_unit_is_a_silo_unless_another_is_given(make_graph: MakeGraph) -> None:
    options = {name: value for name, value in DP.items() if name != "dp_unit"}
    graph = make_graph(60)
    result = go(graph, **options)
    assert result.config.dp_unit == "silo"
    assert same_bits(weights_of(result), weights_of(go(graph, **DP)))
    for alone in ("dp_unit", "dp_clip", "dp_degree"):
        with raises_code(ConfigError, "missing-option", option="dp_epsilon"):
            go(graph, **{alone: "node" if alone == "dp_unit" else 2})


def test_a_reply_without_noise_is_refused(make_graph: MakeGraph) -> None:
    """Whatever a method declares: a silo would not send it."""
    setup = prepare(make_config(FAST | DP), make_graph(60))
    inbox = to_payload(GlobalModel(first_weights(setup)))
    with raises_code(PolicyError, "refused-by-policy", rule="differential privacy"):
        setup.federation.call(train, inbox, what=Kind.WEIGHTS, key=Key.of(0))


# --- A clip that adapts --------------------------------------------------------------------------


@pytest.mark.usefixtures("without_noise")
def test_the_clip_of_each_round_follows_the_share_of_the_round_before(
    make_graph: MakeGraph,
) -> None:
    """Andrew et al. 2021, algorithm 1, from the clip that was given."""
    options = DP | {"dp_clip": 0.05, "dp_clip_quantile": 0.5, "rounds": 40}
    rows = go(make_graph(60), **options).rounds
    clips, shares = (
        [float(row[f"fact_{name}"] or 0) for row in rows] for name in ("clip", "share_within_clip")
    )
    assert clips[0] == 0.05
    assert shares[0] == 0  # all updates are longer
    for clip, share, following in zip(clips, shares, clips[1:], strict=False):
        assert following == pytest.approx(clip * math.exp(-0.2 * (share - 0.5)))
    assert set(shares) <= {n / 4 for n in range(5)} | {n / 3 for n in range(4)}
    assert shares[-1] > 0  # it has come to the norms


def test_an_adapting_clip_costs_the_same_and_is_reported(
    make_graph: MakeGraph, tmp_path: Path
) -> None:
    graph, quantile = make_graph(60), {"dp_clip_quantile": 0.5}
    fixed, adapting = go(graph, **DP), go(graph, **DP, **quantile, out=str(tmp_path / "run"))
    assert fixed.privacy is not None
    assert adapting.privacy == fixed.privacy | {"clip_quantile": 0.5}
    assert not any(name.startswith("fact_") for name in fixed.rounds[0])
    assert "share within clip" in (tmp_path / "run/report.html").read_text()


def test_the_noise_of_the_share_is_that_of_the_closed_form() -> None:
    """2 z silos for a release, as sigma_b of the paper; see `silograph.federation.privacy`."""
    privacy, silos = UpdatePrivacy("silo", 4.0, 1e-5, 2.0, 3.0, 10, quantile=0.5), 2000
    noise, ids = SimulatedNoise(privacy, secure=False), [str(n) for n in range(silos)]
    reply: Payload = {"within_clip": Stacked(torch.zeros(silos, dtype=torch.int64))}
    words = noise.add(reply, ids, Key.of(1), silos)["within_clip"].t
    shares = np.array([share_within(int(word), 1) - 0.5 for word in words])
    assert shares.std() == pytest.approx(2 * 3.0, rel=5 / math.sqrt(2 * silos))


@pytest.mark.parametrize("clip", [math.nan, math.inf, 0.0, -1.0, 2.0**65, 2.0**-65])
def test_a_silo_refuses_a_clip_that_is_none(clip: float, make_graph: MakeGraph) -> None:
    setup = prepare(make_config(FAST | DP | {"dp_clip_quantile": 0.5}), make_graph(60))
    specs = specs_of(ModelToUpdate, setup.method_config)
    weights, extent = first_weights(setup), Extent(1, torch.float64, {})
    inbox = to_payload(ModelToUpdate(weights, torch.tensor(1.0, dtype=torch.float64)))
    check_against(inbox, specs, extent, "inbox", finite=True)
    inbox["clip"] = Shared(torch.tensor(clip, dtype=torch.float64))
    with raises_code(ProtocolError, "field-out-of-bounds", field="clip"):
        check_against(inbox, specs, extent, "inbox", finite=True)
    # Nor does a silo take one that the server has no business to send.
    setup = prepare(make_config(FAST | DP), make_graph(60))
    with raises_code(ProtocolError, "field-out-of-bounds", field="clip"):
        check_against(inbox, specs_of(ModelToUpdate, setup.method_config), extent, "inbox")


# --- An attack -----------------------------------------------------------------------------------


TRIALS = 1500


def canary_update(graph: Any, privacy: dict[str, Any]) -> tuple[Any, UpdatePrivacy]:
    """Return the clipped update of one silo, and how the run noises it."""
    setup = prepare(make_config(FAST | DP | privacy), graph)
    cfg = setup.method_config
    assert cfg.privacy is not None
    inbox = to_payload(GlobalModel(first_weights(setup)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SimulatedNoise, "add", lambda self, reply, *_: reply)
        reply = setup.federation.call(
            train_clipped, inbox, what=Kind.WEIGHTS, key=Key.of(0), to=setup.federation.ids[:1]
        )
    return reply, cfg.privacy


@pytest.mark.parametrize("secure", SECURE)
def test_an_attack_on_a_planted_silo_stays_below_the_claim(
    secure: bool, make_graph: MakeGraph
) -> None:
    """The server knows the silo's exact update, and asks whether it was in the sum.

    It is the canary: the strongest attack on the mechanism there is. Noise is that of the reply
    alone, or with secure aggregation the sum of the fewest shares that are ever unmasked, without
    that of a silo that works with the server.
    """
    epsilon, delta = 4.0, 1e-5
    options = {"dp_epsilon": epsilon, "rounds": 1, "dp_clip": 0.05}
    reply, privacy = canary_update(make_graph(60), options)
    update = torch.cat([f.t.flatten() for f in reply.values()]).double()
    assert float(update.norm()) == pytest.approx(CLIP_UNITS, rel=1e-3)  # it is clipped
    silos = 10
    fewest = topology_of(silos).threshold - 1 if secure else 1
    zeros = torch.zeros(fewest, len(update), dtype=torch.int64)
    noise, ids = SimulatedNoise(privacy, secure=secure), [str(n) for n in range(fewest)]

    def score(trial: int, *, is_member: bool, noised: bool = True) -> float:
        values = zeros.clone()
        if is_member:
            values[0] += update.long()
        fields: Payload = {"update/w": Stacked(values)}
        if noised:
            fields = noise.add(fields, ids, Key.of(trial), silos)
        return float(fields["update/w"].t.sum(0).double() @ update) / CLIP_UNITS**2

    members = np.array([score(2 * n, is_member=True) for n in range(TRIALS)])
    others = np.array([score(2 * n + 1, is_member=False) for n in range(TRIALS)])
    bound = lower_bound(members, others, delta)
    assert 0.5 < bound < epsilon
    # The same attack without noise finds more than a third of the claim.
    plain = np.array([score(0, is_member=True, noised=False)] * TRIALS)
    nothing = np.array([score(0, is_member=False, noised=False)] * TRIALS)
    assert lower_bound(plain, nothing, delta) > epsilon / 3
