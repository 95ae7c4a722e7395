"""What the presets of FedAIS do, and which rows their batches may read."""

from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import pytest
import torch

from mistakes import raises_code
from remote_runs import setup_of
from silograph.core.key import Key
from silograph.federation.in_process import InProcess
from silograph.graph.graph import Graph
from silograph.methods import METHODS
from silograph.methods.base import MethodConfig, RoundReport
from silograph.methods.fedais import (
    FEDAIS,
    FedAISOptions,
    batch_loss_weights,
    batch_rows,
    draw_nodes,
)
from silograph.nn.fit import Schedule
from silograph.nn.optim import SGD
from silograph.nn.segment import segment_sum
from together import cut_of, model_of

MakeGraph = Callable[..., Graph]
KEY = Key.of(3)
# What differs from `fedais`: see the list at the head of `silograph.methods.fedais`.
PRESETS: dict[str, dict[str, Any]] = {
    "fedall": {"nodes": "all", "interval": "fixed", "tau": 1},
    "fedrandom": {"nodes": "random", "interval": "fixed", "tau": 1},
    "fedlocal": {"nodes": "all", "halo": "none"},
    "fedpns": {"nodes": "all", "interval": "fixed", "halo": "held"},
    "fedais1": {"interval": "fixed", "tau": 1},
    "fedais2": {"nodes": "all"},
    "stale": {"nodes": "all", "interval": "fixed", "halo": "all"},
}


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_is_fedais_with_other_options(make_graph: MakeGraph, name: str) -> None:
    given = METHODS[name].options()
    usual = FedAISOptions()
    differ = {
        f.name: getattr(given, f.name)
        for f in fields(given)
        if getattr(given, f.name) != getattr(usual, f.name)
    }
    assert differ == PRESETS[name]
    reports = [
        report_of(setup_of(make_graph(60), METHODS[method], model="sage", options=own))
        for method, own in ((name, {}), ("fedais", PRESETS[name]))
    ]
    assert reports[0] == reports[1]
    exchanges = {"fedlocal": 0, "fedall": 10, "fedrandom": 10, "fedais1": 10}.get(name, 5)
    assert reports[0].facts["exchanges"] == exchanges
    everyone = report_of(setup_of(make_graph(60), METHODS["fedall"], model="sage"))
    trained = reports[0].facts["rows_trained"] / everyone.facts["rows_trained"]
    assert (trained == 1) == (PRESETS[name].get("nodes") == "all")
    assert trained > 0.5


def report_of(setup: Any) -> RoundReport:
    """The report of a first round."""
    cfg, fed = setup.method_config, setup.federation
    state = FEDAIS.init(fed, cfg, cfg.model.init_weights(Key.of(2), torch.float64), KEY)
    fed.start_round(1)
    return FEDAIS.round(fed, cfg, state, 1, KEY)[1]


def config(**changes: Any) -> MethodConfig[FedAISOptions]:
    options = FedAISOptions(nodes="all", interval="fixed", batches=4, drawn=0)
    return MethodConfig(
        model=model_of("sage", layers=2, dropout=0.0),
        optimizer=SGD(0.0),
        schedule=Schedule(1),
        keep_optimizer=False,
        participation=1.0,
        options=replace(options, **changes),
    )


@pytest.mark.law(sample=6)
@pytest.mark.parametrize("tau", [2, 3, 4])
def test_every_batch_reads_all_that_it_has_drawn(make_graph: MakeGraph, tau: int) -> None:
    """With weights that stay, rows that are held for tau batches are those of an exchange each."""
    block, route, _ = cut_of(make_graph(80), 4, "random")
    found = []
    for changes in ({"tau": 1}, {"halo": "held", "tau": tau}, {"halo": "drawn", "tau": tau}):
        cfg = config(**changes)
        fed = InProcess(cfg, block, route, block.num_clients)
        state = FEDAIS.init(fed, cfg, cfg.model.init_weights(Key.of(2), torch.float64), KEY)
        fed.start_round(1)
        found.append(FEDAIS.round(fed, cfg, state, 1, KEY)[1].train_loss)
    fresh, held, drawn = found
    assert held == pytest.approx(fresh, abs=1e-12)
    assert drawn != pytest.approx(fresh, abs=1e-6)  # batches without an exchange lack rows


def test_who_trains_on_all_nodes_has_no_weights(make_graph: MakeGraph) -> None:
    """Nothing is drawn, so unbiased steps are the plain mean, to the bit."""
    block, _, _ = cut_of(make_graph(60), 3, "random")
    change, passes = torch.ones(len(block.row_key)), torch.ones(3, dtype=torch.int32)
    for unbiased in (True, False):
        nodes = draw_nodes(config(unbiased=unbiased), block, change, passes, KEY, 0.7)
        assert nodes.loss_weights is None
        assert nodes.sample.off.diff().tolist() == block.num_train.tolist()


def test_weights_of_losses_make_every_step_unbiased(make_graph: MakeGraph) -> None:
    """In the mean over draws a batch's sum of weighed numbers is their mean over the client."""
    block, _, _ = cut_of(make_graph(120), 3, "random")
    cfg, train = config(nodes="importance", ratio=0.6, unbiased=True), block.split.train
    change, f = (0.5 + t for t in Key.of(7).uniform(block.row_key, 2).T)
    later, draws, batches = torch.ones(3, dtype=torch.int32), 1000, cfg.options.batches
    sums = torch.zeros(draws, batches, 3, dtype=torch.float64)
    for number in range(draws):
        nodes = draw_nodes(cfg, block, change, later, Key.of(number), cfg.options.ratio)
        for batch in range(batches):
            rows, off, places = batch_rows(cfg, block, nodes, batch)
            share = batch_loss_weights(nodes, off, places)
            assert share is not None
            sums[number, batch] = segment_sum(share * f[rows], off)
    sizes = nodes.sample.off.diff()
    assert int(sizes.min()) >= batches
    assert bool((sizes % batches > 0).all())  # so batches of a client differ in size
    mean = segment_sum(torch.where(train, f, 0), block.off) / block.num_train
    error = 5 * sums.std(0) * draws**-0.5
    assert float(error.max()) < 0.15
    assert bool(((sums.mean(0) - mean).abs() < error).all())


@pytest.mark.parametrize(
    ("method", "option"),
    [
        ("fedais", "drawn"),
        ("fedais", "warmup"),
        ("gcflplus", "sequence"),
        ("fedavg", "neighbors.k"),
    ],
)
def test_huge_numbers_are_refused(make_graph: MakeGraph, method: str, option: str) -> None:
    import silograph as sg
    from silograph.core.errors import ConfigError

    given: dict[str, Any] = {"clients": 2, "partition": "random", "rounds": 1, "model": "gcn"}
    given |= {"neighbors": "fedgrains", "batch_size": 4} if "." in option else {}
    with raises_code(ConfigError, "option-value", option=option.rpartition(".")[2]):
        sg.run(make_graph(), method=method, **given, options={option: 10**30})
