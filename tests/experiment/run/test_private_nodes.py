"""Laws of runs with differential privacy of nodes in one process."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from scipy.stats import kstest, norm

pytest.importorskip("dp_accounting")

import silograph as sg
from mistakes import raises_code
from runs import FAST, MakeGraph, go, of, outcome, rows_of, run_until, same_bits, weights_of
from silograph.core.config import make_config
from silograph.core.errors import ConfigError
from silograph.experiment.run.setup import first_weights, prepare
from silograph.federation.privacy.accounting import epsilon_of
from silograph.federation.privacy.release import SimulatedNoise
from silograph.federation.secure.partners import topology_of
from silograph.graph.csr import CSR
from silograph.methods import METHODS
from silograph.nn.bounded_subgraphs import most_changed_subgraphs

DP: dict[str, Any] = {"dp_epsilon": 20.0, "dp_delta": 1e-5, "dp_unit": "node"}
SECURE = [False, True]


def go_without_noise(monkeypatch: pytest.MonkeyPatch, *given: Any, **options: Any) -> Any:
    with monkeypatch.context() as patch:
        patch.setattr(SimulatedNoise, "add", lambda self, reply, *_: reply)
        return go(*given, **options)


@pytest.mark.parametrize("model", ["gcn", "sage"])
def test_with_all_edges_and_no_clipping_it_is_a_step_along_the_sum(
    model: str, make_graph: MakeGraph, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of one silo: the plain run steps along the mean, so n training nodes are the factor.

    A layer of sage reads the degree of its own node alone, which a subgraph has whole. One of gcn
    reads those of neighbors, too: its graph has no edges.
    """
    graph, degree, train_nodes = make_graph(40), 40, 16
    if model == "gcn":
        none = torch.empty(0, dtype=torch.int64)
        graph = replace(graph, adj=CSR.from_pairs(none, none, (40, 40)))
    options = {"clients": 1, "layers": 1, "model": model, "weight_decay": 0.0, "rounds": 1}
    options |= {"optimizer": "sgd", "dropout": 0.0, "lr": 0.1}
    plain = go(graph, **options)
    private = go_without_noise(monkeypatch, graph, **options, **DP, dp_clip=1e3, dp_degree=degree)
    start = first_weights(prepare(make_config(FAST | options), graph))
    factor = train_nodes / (2 * most_changed_subgraphs(degree, 1))
    for name, w in of(plain).items():
        moved = (w - start[name]) * factor
        torch.testing.assert_close(of(private)[name] - start[name], moved, rtol=0, atol=1e-4)


@pytest.mark.parametrize("secure", SECURE)
def test_the_noise_in_the_model_is_that_of_the_closed_form(
    secure: bool, make_graph: MakeGraph, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One step with noise minus the same without: a Gaussian of the promised scale."""
    graph = make_graph(60)
    options = DP | {"rounds": 1, "secure_aggregation": secure, "hidden": 256, "dp_clip": 2.0}
    noisy = go(graph, **options)
    plain = go_without_noise(monkeypatch, graph, **options)
    assert noisy.privacy is not None
    noise = torch.cat([(of(noisy)[n] - w).flatten() for n, w in of(plain).items()]).numpy()
    silos = noisy.config.clients
    # The noise is whole without the share of one silo of the smallest sum.
    shares = max(1, topology_of(silos).threshold - 1) if secure else 1
    scale = noisy.privacy["noise_multiplier"] * 2.0 * math.sqrt(silos / shares) / silos
    scale *= noisy.config.lr
    assert noise.std() == pytest.approx(scale, rel=5 / math.sqrt(2 * len(noise)))
    assert kstest(noise / scale, norm.cdf).pvalue > 1e-3


def test_the_noise_of_a_sum_is_for_all_subgraphs_that_a_node_changes(make_graph: MakeGraph) -> None:
    for degree, layers in ((1, 1), (3, 2), (5, 3)):
        config = make_config(FAST | DP | {"dp_degree": degree, "layers": layers})
        privacy = prepare(config, make_graph(60)).method_config.privacy
        assert privacy is not None
        assert privacy.sensitivity == 2 * most_changed_subgraphs(degree, layers)
        assert privacy.sigma() >= privacy.noise_multiplier * privacy.sensitivity * 2**22
        spent = epsilon_of({privacy.noise_multiplier: config.rounds}, 1e-5)
        assert 19.5 < spent <= 20


@pytest.mark.parametrize("secure", SECURE)
def test_bits_do_not_depend_on_blocks(secure: bool, make_graph: MakeGraph) -> None:
    graph, options = make_graph(60), DP | {"secure_aggregation": secure}
    one = go(graph, **options)
    for machine in ({"block_size": 1}, {"block_size": 3}, {"strict": True}):
        other = go(graph, **options, **machine)
        assert same_bits(weights_of(one), weights_of(other))
        assert rows_of(one) == rows_of(other)
        assert one.ledger.records == other.ledger.records


def test_a_resumed_run_is_the_same(
    make_graph: MakeGraph, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    graph = make_graph(60)
    whole = go(graph, **DP, out=str(tmp_path / "whole"))
    run_until(monkeypatch, graph, 3, tmp_path / "cut", **(FAST | DP))
    resumed = sg.resume(str(tmp_path / "cut"), graph=graph)
    assert same_bits(weights_of(whole), weights_of(resumed))
    assert outcome(whole) == outcome(resumed)


def test_the_result_says_what_nodes_have_cost(make_graph: MakeGraph) -> None:
    result = go(make_graph(60), **DP)
    assert result.privacy is not None
    assert result.privacy["unit"] == "node"
    assert 0 < result.privacy["epsilon"] <= 20
    assert result.best_round == result.config.rounds
    assert {row["train_loss"] for row in result.rounds} == {None}
    # Silos send sums of gradients, so no scores are those of models of their own.
    assert (result.test.personalized, result.val.personalized) == (None, None)
    assert result.test.server is not None


@pytest.mark.parametrize("model", ["gcn", "sage"])
def test_it_learns_at_a_large_epsilon(model: str, make_graph: MakeGraph) -> None:
    """Far better than the largest class, which is right for every third node."""
    graph = make_graph(300, seed=1)
    options = {"method": "fedopt", "model": model, "rounds": 60, "lr": 1.0, "hidden": 16}
    options |= {"server_optimizer": "adam", "clients": 2}
    private = go(graph, **options, **DP | {"dp_epsilon": 2000.0})
    assert private.test.server is not None
    accuracy = private.test.server.accuracy
    assert accuracy is not None
    assert accuracy > 0.6


REFUSED: list[tuple[dict[str, Any], list[str]]] = [
    *(
        ({"method": name}, ["method", "dp_epsilon"])
        for name, method in METHODS.items()
        if not method.clips_updates
        and method.evaluate.copies
        and name not in ("fedgnn", "fesog", "fedmf")  # of ratings
    ),
    ({"method": "fedprox"}, ["method", "dp_unit"]),
    ({"model": "gat"}, ["model", "dp_unit"]),
    ({"model": "mlp"}, ["model", "dp_unit"]),
    ({"optimizer": "adam"}, ["optimizer", "dp_unit"]),
    ({"local_epochs": 2}, ["local_epochs", "dp_unit"]),
    ({"batch_size": 8}, ["batch_size", "dp_unit"]),
    ({"neighbors": "fanout"}, ["neighbors", "dp_unit"]),
    ({"keep_optimizer": True}, ["keep_optimizer", "dp_unit"]),
    ({"momentum": 0.5, "optimizer": "sgd"}, ["momentum", "dp_unit"]),
    ({"directed": "along"}, ["directed", "dp_unit"]),
    ({"aggregator": "median"}, ["aggregator", "dp_epsilon"]),
    ({"normalize": "standard"}, ["normalize", "dp_epsilon"]),
    ({"collect": 0.5}, ["collect", "dp_epsilon"]),
    ({"class_weight": "balanced"}, ["class_weight", "dp_epsilon"]),
    ({"patience": 2}, ["patience", "dp_epsilon"]),
    ({"workers": 2}, ["dp_epsilon", "workers"]),
    ({"dp_clip_quantile": 0.5}, ["dp_clip_quantile", "dp_unit"]),
    ({"normalize": "standard_client"}, ["normalize", "dp_unit"]),
    ({"features": "degree"}, ["features", "dp_unit"]),
    ({"split": "fold=1/5"}, ["split", "dp_unit"]),
    ({"features": "onehot-degree"}, ["features", "dp_unit"]),
    ({"dp_unit": "silo", "dp_degree": 3}, ["dp_degree", "dp_unit"]),
]


@pytest.mark.parametrize(("options", "names"), REFUSED, ids=lambda value: str(value)[:40])
def test_what_is_outside_the_guarantee_is_refused(
    options: dict[str, Any], names: list[str], make_graph: MakeGraph
) -> None:
    with raises_code(ConfigError, "conflicting-options", options=names):
        go(make_graph(60), **(DP | options))


def test_noise_beyond_the_sampler_is_refused(make_graph: MakeGraph) -> None:
    options = DP | {"dp_degree": 100, "layers": 3, "dp_epsilon": 1.0}
    with raises_code(ConfigError, "option-value", option="dp_degree"):
        go(make_graph(60), **options)
