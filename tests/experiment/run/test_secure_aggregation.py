"""Laws of runs with secure aggregation in one process: plain results to rounding, exact bits.

The oracle of every method is its plain run: sums differ by their fixed point only.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import silograph as sg
from mistakes import raises_code
from rating_graphs import rating_graph
from runs import FAST, MakeGraph, go, of, outcome, rows_of, run_until, same_bits, weights_of
from silograph.core.config import make_config
from silograph.core.errors import ConfigError, ProtocolError
from silograph.core.key import Key
from silograph.core.kinds import Kind
from silograph.experiment.run.setup import prepare
from silograph.federation.base import Gather, Sum
from silograph.federation.field_specs import COUNT
from silograph.federation.ledger import Ledger
from silograph.federation.messages import Empty
from silograph.federation.ops import CallContext
from silograph.federation.secure.sizes import SumSizes
from silograph.graph.graph import Graph
from silograph.methods.label_guided import tell_labels, tell_nodes

SECURE: dict[str, Any] = {"secure_aggregation": True, "kernels": "torch"}
# Methods with what they need, and how far rounding may grow in four rounds.
METHODS: dict[str, dict[str, Any]] = {
    "fedavg": {},
    "fedopt": {},
    "fedprox": {},
    "scaffold": {"optimizer": "sgd"},
    "fedper": {},
    "llcg": {},
    "fedais": {},
    "fedgraph": {},
    "fedsageplus": {},
    "label_guided": {},
    "bns": {},
}
TOLERANCE = 1e-5


@pytest.mark.parametrize("method", METHODS)
def test_a_secure_run_is_the_plain_one_to_rounding(method: str, make_graph: MakeGraph) -> None:
    graph, options = make_graph(60), {"method": method, "kernels": "torch", **METHODS[method]}
    plain, secure = go(graph, **options), go(graph, **(options | SECURE))
    for name, w in (weights_of(plain) or {}).items():
        torch.testing.assert_close(of(secure)[name], w, rtol=0, atol=TOLERANCE)
    for ours, theirs in zip(secure.rounds, plain.rounds, strict=True):
        assert ours["train_loss"] == pytest.approx(theirs["train_loss"], abs=TOLERANCE)
        for name in ours.keys() & theirs.keys():
            if name.startswith(("val_", "test_")) and theirs[name] is not None:
                assert ours[name] == pytest.approx(theirs[name], abs=TOLERANCE), name
    kinds = secure.ledger.bytes_by_kind
    assert {"keys", "shares", "masks"} <= kinds.keys()
    assert not {"keys", "shares", "masks"} & plain.ledger.bytes_by_kind.keys()


@pytest.mark.parametrize("method", ["fedavg", "label_guided"])
@pytest.mark.parametrize(
    "machine",
    [{"block_size": 1}, {"block_size": 3}, {"strict": True}, {"kernels": "auto"}],
    ids=lambda machine: next(iter(machine)),
)
def test_bits_do_not_depend_on_blocks(
    method: str, machine: dict[str, Any], make_graph: MakeGraph
) -> None:
    if machine.get("kernels"):
        pytest.importorskip("numba")
    graph, options = make_graph(60), {"method": method, **SECURE}
    one, other = go(graph, **options), go(graph, **(options | machine))
    if machine.get("kernels"):  # another machine's arithmetic, but one form of the sums
        assert [r["bytes"] for r in rows_of(one)] == [r["bytes"] for r in rows_of(other)]
        return
    assert same_bits(weights_of(one), weights_of(other))
    assert rows_of(one) == rows_of(other)
    assert one.ledger.records == other.ledger.records


@pytest.mark.parametrize("method", ["fedavg", "label_guided", "bns"])
def test_a_resumed_run_is_the_same(
    method: str, make_graph: MakeGraph, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    graph, options = make_graph(60), FAST | SECURE | {"method": method}
    whole = go(graph, **(SECURE | {"method": method}), out=str(tmp_path / "whole"))
    run_until(monkeypatch, graph, 3, tmp_path / "cut", **options)
    resumed = sg.resume(str(tmp_path / "cut"), graph=graph)
    assert same_bits(weights_of(whole), weights_of(resumed))
    assert outcome(whole) == outcome(resumed)


def test_the_server_has_no_score_of_a_client(make_graph: MakeGraph, tmp_path: Path) -> None:
    secure = go(make_graph(60), **SECURE, out=str(tmp_path / "run"))
    for views in secure.client_scores.values():
        assert views.keys() <= {"uncut"}  # of the simulation's own graph
    assert secure.each_best is None
    table = (tmp_path / "run/clients.csv").read_text().splitlines()
    column = table[0].split(",").index("test_server_accuracy")
    assert {row.split(",")[column] for row in table[1:]} == {""}


def test_the_ledger_counts_what_masks_take(make_graph: MakeGraph) -> None:
    """Weights go up as 8 bytes a value; keys, shares and masks are kinds of their own."""
    secure = go(make_graph(60), **SECURE, rounds=1)
    records = [r for r in secure.ledger.records if r.round == 1 and r.step == 1]
    values = sum(w.numel() for w in of(secure).values()) + 2  # with `nodes` and `loss`
    sizes = SumSizes(
        "train", prepare(make_config(FAST | SECURE), make_graph(60)).federation.ids, values
    )
    by = {(r.what, r.direction): r.bytes.tolist() for r in records}
    assert by[Kind.WEIGHTS, "up"] == [sizes.masked] * 4
    assert by[Kind.KEYS, "up"] == [sizes.keys_up] * 4
    assert by[Kind.SHARES, "up"] == [sizes.shares_up] * 4
    assert by[Kind.MASKS, "up"] == [sizes.masks_up] * 4
    assert sizes.masked - 8 * values < 60


RATINGS: dict[str, Any] = {
    "model": "rating_mf",
    "clients": 3,
    "partition": "random",
    "split": "0.6/0.2/0.2",
    "rounds": 3,
    "hidden": 4,
    "lr": 0.02,
    "dropout": 0.0,
    "dtype": "float64",
    "options": {"embedding": 3, "items": 300},
}


@pytest.mark.parametrize(
    "more",
    [
        {"method": "fedmf"},
        {"method": "fedgnn"},
        {"method": "fesog"},
        {"method": "fedacs", "selector": "uniform"},
    ],
    ids=lambda more: more["method"],
)
def test_sums_of_items_over_clients_are_those_of_a_plain_run(more: dict[str, Any]) -> None:
    """Rows of items are weighted by who has rated them: by sums of ratings of each item."""
    graph, options = rating_graph(), RATINGS | more
    plain, secure = sg.run(graph, **options), sg.run(graph, **options, secure_aggregation=True)
    for name, w in (weights_of(plain) or {}).items():
        torch.testing.assert_close(of(secure)[name], w, rtol=0, atol=1e-6)


def test_shared_biases_are_refused() -> None:
    """Their sums are of single items, which silos list to the server."""
    shared = {
        **RATINGS,
        "method": "fedavg",
        "model": "rating_biases",
        "options": {"shared": "items"},
    }
    with raises_code(ConfigError, "conflicting-options"):
        sg.run(rating_graph(), **shared, secure_aggregation=True)


STATISTICS: list[dict[str, Any]] = [
    {"normalize": "standard"},
    {"edge_weights": "scale"},
    {"normalize": "standard", "edge_weights": "scale", "class_weight": "balanced"},
]


def with_wide_columns(graph: Graph, *, features: bool) -> Graph:
    """Return a graph with weights, and columns of Unix times, of tiny shares and of one value."""
    assert isinstance(graph.x, torch.Tensor)
    x = graph.x.double().clone()
    if features:
        x[:, 0] = 1.7e9 + torch.arange(len(x)) % 40
        x[:, 1] = 1e-12 * (1 + torch.arange(len(x)) % 7)
        x[:, 2] = 0.1
    low, high = graph.edge_index.min(dim=0).values, graph.edge_index.max(dim=0).values
    return replace(graph, x=x, edge_weight=((low * 7 + high * 13) % 10).double() * 37 + 0.1)


@pytest.mark.parametrize("options", STATISTICS, ids=str)
def test_statistics_over_all_clients_are_those_of_a_plain_run(
    options: dict[str, Any], make_graph: MakeGraph
) -> None:
    graph = with_wide_columns(make_graph(60), features="normalize" in options)
    plain, secure = (go(graph, **(options | more)) for more in ({"kernels": "torch"}, SECURE))
    for run in (plain, secure):
        assert run.model is not None
    ours, theirs = of_fitted(secure), of_fitted(plain)
    assert ours.keys() == theirs.keys()
    for name, values in ours.items():
        torch.testing.assert_close(values, theirs[name], rtol=1e-12, atol=0)
        assert torch.equal(values == 0, theirs[name] == 0)  # constant columns
    for name, w in (weights_of(plain) or {}).items():
        torch.testing.assert_close(of(secure)[name], w, rtol=0, atol=TOLERANCE)


def of_fitted(result: sg.Result) -> dict[str, torch.Tensor]:
    """Return the fitted means and deviations of a run."""
    assert result.model is not None
    preprocessing, fitted = result.model.preprocessing, {}
    if preprocessing.statistics is not None:
        fitted["mean"] = preprocessing.statistics.mean
        fitted["deviation"] = preprocessing.statistics.deviation
    if preprocessing.mean_edge_weight is not None:
        fitted["edge weight"] = torch.tensor([preprocessing.mean_edge_weight])
    assert fitted
    return fitted


def test_the_ledger_counts_masked_rows_and_their_keys(make_graph: MakeGraph) -> None:
    """A value of a row takes 8 bytes; frames that are encoded have the bytes of the ledger."""
    graph = make_graph(60)
    options = {"method": "label_guided", "rounds": 1, "dtype": "float32"}
    setup = prepare(make_config(FAST | SECURE | options), graph)
    slots, shapes = len(setup.federation.route.target), setup.method_config.model.weight_shapes
    widths = [shape[0] for name, shape in shapes.items() if name.endswith("bias")]

    def sent(ledger: Ledger, kind: Kind) -> int:
        records = [r for r in ledger.records if r.what == kind and r.direction == "up"]
        return sum(int(r.bytes.sum()) for r in records)

    plain = go(graph, **options).ledger
    for strict in (False, True):
        secure = go(graph, **(options | SECURE), strict=strict).ledger
        for kind in (Kind.PARTIAL_SUMS, Kind.COTANGENTS):
            further = sent(secure, kind) - sent(plain, kind)
            assert further == 4 * slots * sum(widths)
        offers = [r for r in secure.records if r.op == "offer_keys" and r.direction == "up"]
        assert {r.what for r in offers} == {Kind.KEYS}
        assert len(offers) == 2  # of training and of its evaluation


REFUSED: list[tuple[dict[str, Any], list[str]]] = [
    ({"method": "fedpub"}, ["method", "secure_aggregation"]),
    ({"method": "gcfl"}, ["method", "secure_aggregation"]),
    ({"method": "cagnet"}, ["method", "secure_aggregation"]),
    ({"method": "centralized"}, ["method", "secure_aggregation"]),
    ({"selector": "oort"}, ["selector", "secure_aggregation"]),
    ({"selector": "power_of_choice"}, ["selector", "secure_aggregation"]),
    ({"aggregator": "median"}, ["aggregator", "secure_aggregation"]),
    ({"aggregator": "trimmed_mean"}, ["aggregator", "secure_aggregation"]),
    ({"weights_as": "int4"}, ["weights_as", "weight_rows", "secure_aggregation"]),
    ({"weight_rows": "used"}, ["weights_as", "weight_rows", "secure_aggregation"]),
    ({"feature_drift": True}, ["feature_drift", "secure_aggregation"]),
    ({"evaluation_min_count": 5}, ["evaluation_min_count", "secure_aggregation"]),
    ({"evaluate_clients": "participants"}, ["evaluate_clients", "secure_aggregation"]),
]


@pytest.mark.parametrize(("options", "names"), REFUSED, ids=lambda value: str(value)[:30])
def test_what_needs_single_replies_is_refused(
    options: dict[str, Any], names: list[str], make_graph: MakeGraph
) -> None:
    with raises_code(ConfigError, "conflicting-options", options=names):
        go(make_graph(60), **(SECURE | options))


def test_a_round_of_one_client_is_refused(make_graph: MakeGraph) -> None:
    with pytest.raises(ProtocolError):
        go(make_graph(60), **SECURE, participation=0.25)


def test_label_counts_are_summed_and_counts_of_single_clients_refused(
    make_graph: MakeGraph,
) -> None:
    config = make_config(FAST | SECURE | {"method": "label_guided"})
    setup = prepare(config, make_graph(60))
    plain = prepare(replace(config, secure_aggregation=False), make_graph(60))
    context = CallContext(None, Key.of(0))
    context = replace(context, cfg=setup.method_config)
    totals = [
        context.call(each.federation, tell_labels, Empty(), Sum())["labels"].t
        for each in (setup, plain)
    ]
    assert torch.equal(*totals)
    assert COUNT.low == 0
    for reduce in (None, Gather("nodes")):
        with pytest.raises(ProtocolError):
            context.call(setup.federation, tell_nodes, Empty(), reduce)
