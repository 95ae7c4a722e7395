"""Laws of aggregators: oracles, order of clients, hostile clients, all methods that have them."""

from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats

import silograph as sg
from remote_runs import finish, lines, remote, setup_of
from runs import MakeGraph, go, rows_of, run_until, same_bits, weights_of
from silograph.aggregation.aggregators import (
    AGGREGATORS,
    MEAN,
    MEDIAN,
    TRIMMED_MEAN,
    NoAggregatorOptions,
    TrimmedMeanOptions,
    combine_weights,
)
from silograph.core.config import make_config
from silograph.core.errors import ConfigError, OpError, ProtocolError
from silograph.deploy.server import check_deployable
from silograph.methods import (
    FEDAVG,
    METHODS,
    SCAFFOLD,
    Clients,
    Empty,
    GlobalModel,
    Kind,
    LocalModel,
    dense,
    op,
    stack,
)
from silograph.methods import averaging as averaging_by

ROBUST = [name for name in AGGREGATORS if name != "mean"]
AGGREGATING = [name for name, method in METHODS.items() if method.aggregates]
NONE = NoAggregatorOptions()
OWN = """
import torch
from silograph.aggregation.aggregators import Aggregator, NoAggregatorOptions


def largest(options, nodes, weights):
    return {name: w[nodes.argmax()] for name, w in weights.items()}


AGGREGATOR = Aggregator("largest", "the largest client's", "nobody", NoAggregatorOptions, largest)
"""


def drawn(clients: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(clients)
    shapes = {"0.weight": (3, 4), "0.bias": (4,), "scale": ()}
    return {
        name: torch.randn(clients, *shape, generator=generator, dtype=torch.float64)
        for name, shape in shapes.items()
    }


def left_out(trim: float, clients: int) -> int:
    """How many values at each end: at least one from three clients on, and never all."""
    share = Fraction(str(trim)) * clients
    return min(-(-share.numerator // share.denominator), (clients - 1) // 2)


def test_a_trim_above_0_leaves_extremes_out_from_three_clients_on() -> None:
    weights = {"w": torch.tensor([1.0, 2.0, 1e6])}
    assert combine_weights(TRIMMED_MEAN, TrimmedMeanOptions(0.1), torch.ones(3), weights)["w"] == 2
    weights = {"w": torch.tensor([*range(30), 1e6])[1:]}
    assert (
        combine_weights(TRIMMED_MEAN, TrimmedMeanOptions(0.1), torch.ones(30), weights)["w"] == 15.5
    )


@pytest.mark.parametrize("clients", [1, 2, 3, 4, 9, 20])
def test_they_are_what_numpy_and_scipy_say(clients: int) -> None:
    weights, nodes = drawn(clients), torch.arange(1, clients + 1)
    found = combine_weights(MEDIAN, NONE, nodes, weights)
    for name, w in weights.items():
        np.testing.assert_allclose(found[name], np.median(w, axis=0), rtol=0, atol=1e-15)
    for trim in (0.0, 0.1, 0.25, 0.49):
        cut = combine_weights(TRIMMED_MEAN, TrimmedMeanOptions(trim), nodes, weights)
        for name, w in weights.items():
            share = (left_out(trim, clients) + 0.5) / clients  # scipy rounds down
            np.testing.assert_allclose(cut[name], stats.trim_mean(w, share, axis=0), atol=1e-14)


@pytest.mark.parametrize("name", ROBUST)
def test_neither_order_nor_the_input_changes(name: str) -> None:
    weights, nodes = drawn(7), torch.arange(7)
    options = AGGREGATORS[name].options()
    before = {each: w.clone() for each, w in weights.items()}
    one = combine_weights(AGGREGATORS[name], options, nodes, weights)
    turned = {each: w.flip(0) for each, w in weights.items()}
    assert same_bits(one, combine_weights(AGGREGATORS[name], options, nodes.flip(0), turned))
    assert same_bits(before, weights)


@pytest.mark.parametrize("bad", [1e6, -1e6, torch.inf, -torch.inf, torch.nan])
def test_a_few_hostile_clients_move_the_mean_alone(bad: float) -> None:
    """With f of k clients hostile, each result lies between values of the honest ones."""
    weights, nodes = drawn(9), torch.ones(9, dtype=torch.int64)
    for each in weights.values():
        each[:2] = bad
    trimmed = TrimmedMeanOptions(0.25)
    for aggregator, options in ((MEDIAN, NONE), (TRIMMED_MEAN, trimmed)):
        found = combine_weights(aggregator, options, nodes, weights)
        for name, w in found.items():
            low, high = weights[name][2:].aminmax(dim=0)
            assert bool(((low <= w) & (w <= high)).all())
    assert not all(bool((w.mean(0).abs() < 1e3).all()) for w in weights.values())


@pytest.mark.law(sample=6)
@pytest.mark.parametrize("factor", [1e6, -1e6])
def test_a_hostile_silo_in_a_run(make_graph: MakeGraph, factor: float) -> None:
    hostile = replace(averaging_by(scaled), name="hostile")
    options = {"method": hostile, "clients": 5, "rounds": 2, "lr": 0.01, "eval_every": 2}
    SCALE["factor"] = factor
    sizes = {}
    for name in AGGREGATORS:
        own = {"aggregator.trim": 0.2} if name == "trimmed_mean" else {}
        found = weights_of(go(make_graph(), aggregator=name, options=own, **options))
        assert found is not None
        sizes[name] = max(float(w.abs().max()) for w in found.values())
    assert sizes["mean"] > 1e4
    assert sizes["median"] < 10
    assert sizes["trimmed_mean"] < 10


SCALE = {"factor": 1.0}


@op(Kind.WEIGHTS)
def scaled(clients: Clients[Any], state: Empty, request: GlobalModel) -> tuple[Empty, LocalModel]:
    """`train` of clients of which the first one multiplies its weights."""
    reply = LocalModel.of(clients.fit(request.weights), clients.block)
    weights = {name: dense(w).clone() for name, w in reply.weights.items()}
    for w in weights.values():
        w[[name == "client_00" for name in clients.block.ids]] *= SCALE["factor"]
    return state, replace(reply, weights=stack(weights))


def asked(name: str, **own: Any) -> dict[str, Any]:
    options = {"aggregator.trim": 0.3} if name == "trimmed_mean" else {}
    return {"aggregator": name, "options": options, "block_size": 1, "lr": 0.05, **own}


def test_the_mean_is_what_it_was(make_graph: MakeGraph) -> None:
    """Nothing cut is the mean of clients; the default is the mean by nodes, to the bit."""
    graph = make_graph()
    plain, mean = go(graph), go(graph, aggregator="mean")
    assert same_bits(weights_of(plain), weights_of(mean))
    assert rows_of(plain) == rows_of(mean)
    assert plain.config.aggregator == "mean"


@pytest.mark.law(sample=12)
@pytest.mark.parametrize("method", AGGREGATING)
def test_killed_and_resumed_or_over_a_session_it_is_the_same(
    make_graph: MakeGraph, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    """With half of the clients selected."""
    graph, name = make_graph(), "trimmed_mean" if method == "fedprox" else "median"
    own = asked(name, participation=0.5, clients=6, rounds=3)
    if METHODS[method].needs.selector != "uniform":
        own["selector"] = "uniform"
    whole = go(graph, method=method, **own)
    mean = go(graph, method=method, **own | asked("mean"))
    assert rows_of(whole) != rows_of(mean)
    given = {"partition": "random", "hidden": 8, "split": "0.4/0.3/0.3", "dtype": "float64"}
    run_until(monkeypatch, graph, 2, tmp_path / "b", **given, **own, method=method)
    again = sg.resume(tmp_path / "b", graph=graph)
    assert same_bits(weights_of(whole), weights_of(again))
    assert rows_of(whole) == rows_of(again)
    far = finish(remote(setup_of(graph, METHODS[method], **own))[0])
    assert lines(whole.ledger.records) == lines(far.ledger.records)
    assert same_bits(weights_of(whole), weights_of(far))


def test_a_round_is_the_median_of_the_selected(make_graph: MakeGraph) -> None:
    """By hand: each selected client alone from the same weights, then numpy's median."""
    seen: list[dict[str, torch.Tensor]] = []

    def recorded(options: Any, nodes: torch.Tensor, weights: Any) -> Any:
        seen.append({name: w.clone() for name, w in weights.items()})
        assert nodes.dtype is torch.int64
        return AGGREGATORS["median"].combine(options, nodes, weights)  # type: ignore[misc]

    AGGREGATORS["recorded"] = replace(MEDIAN, name="recorded", combine=recorded)
    try:
        own = asked("recorded", participation=0.5, clients=6, rounds=1)
        result = go(make_graph(), **own)
    finally:
        del AGGREGATORS["recorded"]
    assert {len(w) for w in seen[0].values()} == {3}
    found = weights_of(result)
    assert found is not None
    for name, w in found.items():
        np.testing.assert_array_equal(w, np.median(seen[0][name], axis=0))


@pytest.mark.parametrize(
    "name", ["scaffold", "gcfl", "fedpub", "fedgraph", "local", "bns", "fedais"]
)
def test_other_methods_refuse(make_graph: MakeGraph, name: str) -> None:
    with pytest.raises(ConfigError) as caught:
        go(make_graph(), method=name, aggregator="median")
    assert str(caught.value) == (
        "expected a method that averages weights and nothing else for aggregator median, got "
        f"{name}: use one of {', '.join(AGGREGATING)}, or one of your own with aggregates=True"
    )
    assert not SCAFFOLD.aggregates


def test_a_round_without_the_aggregator_is_refused(make_graph: MakeGraph) -> None:
    def own(fed: Any, cfg: Any, *rest: Any) -> Any:
        return FEDAVG.round(fed, replace(cfg, aggregator=MEAN), *rest)

    method = replace(FEDAVG, name="own", round=own)
    with pytest.raises(
        ProtocolError, match=r"^expected method own to use aggregator median, got a"
    ):
        go(make_graph(), method=method, aggregator="median")


@pytest.mark.parametrize(
    ("own", "message"),
    [
        (
            {"aggregator": "krum"},
            "^unknown aggregator 'krum'; choices: FILE.py:NAME, mean, median, trimmed_",
        ),
        ({"aggregator": "median", "options": {"trim": 0.1}}, "aggregator trimmed_mean has it"),
        ({"aggregator": "trimmed_mean", "options": {"trim": 0.5}}, "less than 0.5"),
        ({"aggregator": "trimmed_mean", "options": {"trim": -0.1}}, "greater than or equal to 0"),
    ],
)
def test_mistakes_are_one_line(make_graph: MakeGraph, own: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        go(make_graph(), **own)
    assert "\n" not in str(caught.value)


def test_one_of_a_file(make_graph: MakeGraph, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(OWN)
    spec = f"{tmp_path / 'mine.py'}:AGGREGATOR"
    result = go(make_graph(), aggregator=spec)
    assert result.config.aggregator == spec
    (tmp_path / "mine.py").write_text(OWN.replace("w[nodes.argmax()]", "w"))
    with pytest.raises(
        ProtocolError, match=r"^expected weights of the same names and shapes, with"
    ):
        go(make_graph(), aggregator=spec)
    (tmp_path / "mine.py").write_text(OWN.replace("nodes.argmax()", "nodes.nothing()"))
    with pytest.raises(OpError, match=r"^largest of aggregator largest failed with AttributeError"):
        go(make_graph(), aggregator=spec)


def test_silos_of_a_real_federation_take_silographs_own_alone() -> None:
    with pytest.raises(ConfigError, match=r"^expected one of silograph's own aggregator parts at"):
        check_deployable(make_config({"aggregator": "mine.py:AGGREGATOR"}), FEDAVG)
    check_deployable(make_config({"aggregator": "median"}), FEDAVG)


def test_weights_may_travel_small(make_graph: MakeGraph) -> None:
    """Used rows alone are exact; small numbers are what the server sees, and bound what differs."""
    plain, used, small = (
        weights_of(go(make_graph(), **asked("median"), **sent))
        for sent in ({}, {"weight_rows": "used"}, {"weights_as": "float16"})
    )
    assert plain is not None
    assert used is not None
    assert small is not None
    assert plain.keys() == used.keys() == small.keys()
    for name, w in plain.items():
        torch.testing.assert_close(used[name], w, rtol=0, atol=1e-12)
        torch.testing.assert_close(small[name], w, rtol=0, atol=0.02)
    assert not same_bits(plain, small)
