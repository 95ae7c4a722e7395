"""Neighbors whose features are fetched once become rows of the client's own graph."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import silograph as sg
from mistakes import raises_code
from runs import files_of, run_until
from silograph.core.errors import ConfigError
from silograph.core.key import Key
from silograph.core.kinds import Kind
from silograph.core.payload import Payload, Ragged, Shared
from silograph.exchange.collect import collect, local_graph
from silograph.federation.frame import frame_sizes
from silograph.federation.in_process import InProcess
from silograph.graph.block.block import ClientBlock, Route, SparseRows
from silograph.graph.csr import CSR
from silograph.graph.graph import Graph
from together import cut_of

KEY = Key.of(3)
MakeGraph = Callable[..., Graph]
RUN: dict[str, Any] = {
    "clients": 4,
    "partition": "random",
    "rounds": 3,
    "hidden": 8,
    "dtype": "float64",
    "collect": 0.5,
}


def collected(block: ClientBlock, route: Route, size: int, share: float) -> InProcess:
    fed = InProcess(None, block, route, size)
    collect(fed, share, KEY)
    return fed


def dense(x: Tensor | SparseRows) -> Tensor:
    return x if isinstance(x, Tensor) else matrix(x.csr)


def matrix(csr: CSR) -> Tensor:
    return torch.from_numpy(csr.scipy("float64").toarray())


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_the_larger_graph(make_graph: MakeGraph, sparse: bool, share: float) -> None:
    block, route, uncut = cut_of(make_graph(60, sparse=sparse), 4, "random")
    state = collected(block, route, 4, share).states()[0]
    larger, slot = local_graph(block, state), state["collected/slot"]
    assert isinstance(slot, Ragged)
    sizes = block.halo.off.diff()
    assert slot.off.diff().tolist() == [round(share * s) for s in sizes.tolist()]
    assert local_graph(block, state) is larger  # made once
    order = uncut.row_key.argsort()
    node = order[torch.searchsorted(uncut.row_key[order], block.row_key)]
    features, edges = dense(uncut.x), matrix(uncut.adj)
    for client in range(4):
        own = node[block.off[client] : block.off[client + 1]]
        chosen = slot.t[slot.off[client] : slot.off[client + 1]].long() + block.halo.off[client]
        added = node[block.halo.boundary[route.target[chosen]]]
        rows = slice(int(larger.off[client]), int(larger.off[client + 1]))
        nodes = torch.cat([own, added])
        assert torch.equal(dense(larger.x)[rows], features[nodes])
        expected = edges[nodes][:, nodes]
        expected[len(own) :, len(own) :] = 0  # what connects the fetched stays unknown
        assert torch.equal(matrix(larger.adj)[rows, rows], expected)
        keys = torch.cat([uncut.row_key[own], block.halo.key[chosen]])
        assert torch.equal(larger.row_key[rows], keys)
        labels = torch.cat([uncut.y[own], torch.full((len(added),), -1)])
        assert torch.equal(larger.y[rows], labels)
    assert larger.adj.nnz == sum(
        int(matrix(larger.adj)[a:b, a:b].sum())
        for a, b in zip(larger.off[:-1].tolist(), larger.off[1:].tolist(), strict=True)
    )
    for mine, theirs in zip(vars(block.split).values(), vars(larger.split).values(), strict=True):
        assert int(mine.sum()) == int(theirs.sum())
        assert torch.equal(block.row_key[mine], larger.row_key[theirs])
    assert torch.equal(larger.row_key[larger.halo.boundary], block.row_key[block.halo.boundary])
    outer = matrix(larger.halo.adj)
    assert torch.equal(outer[outer.sum(1) > 0], matrix(block.halo.adj)[block.halo.adj.degree > 0])


def test_each_client_fetches_the_same_in_any_block(make_graph: MakeGraph) -> None:
    block, route, _ = cut_of(make_graph(60), 5, "random")
    together = collected(block, route, 5, 0.4).states()[0]
    alone = collected(block, route, 1, 0.4).states()
    for name in ("collected/slot", "collected/x"):
        assert torch.equal(together[name].t, torch.cat([state[name].t for state in alone]))


def test_bytes_are_those_of_fetched_rows(make_graph: MakeGraph) -> None:
    block, route, _ = cut_of(make_graph(60), 4, "random")
    fed = collected(block, route, 4, 0.5)
    slot = fed.states()[0]["collected/slot"]
    assert isinstance(slot, Ragged)
    place = slot.t + torch.repeat_interleave(route.slot_off[:-1], slot.off.diff())
    row = torch.unique(route.target[place])
    off = torch.searchsorted(row, route.boundary_off)
    told: Payload = {"share": Shared(torch.tensor(0.5, dtype=torch.float64))}
    rows = Ragged(torch.zeros(len(row), 7, dtype=torch.float64), off)
    fetched = Ragged(torch.zeros(len(place), 7, dtype=torch.float64), slot.off)
    expected = [
        (Kind.HALO_KEYS, "choose", told),
        (Kind.HALO_KEYS, "choose", {"slot": slot}),
        (Kind.FEATURES, "serve", {**told, "row": Ragged(row.int(), off)}),
        (Kind.FEATURES, "serve", {"rows": rows}),
        (Kind.FEATURES, "keep", {**told, "rows": fetched}),
        (Kind.FEATURES, "keep", {}),
    ]
    found = [(record.what, record.op, record.bytes.tolist()) for record in fed.ledger.records]
    assert found == [(w, op, frame_sizes(op, fields, 4).tolist()) for w, op, fields in expected]


def test_one_layer_of_sums_hears_all_neighbors(make_graph: MakeGraph) -> None:
    """GraphConv does not scale by degrees, so with all neighbors a client sees what is there."""
    own: dict[str, Any] = RUN | {"collect": 1.0, "model": "graphconv", "layers": 1}
    result = sg.run(make_graph(60), **own, method="fedavg")
    assert result.test.server is not None
    assert result.test.uncut is not None
    assert result.test.server.accuracy == result.test.uncut.accuracy
    assert result.test.server.loss == pytest.approx(result.test.uncut.loss, abs=1e-12)
    without = sg.run(make_graph(60), **own | {"collect": 0.0}, method="fedavg")
    assert without.test.server != result.test.server


@pytest.mark.law(sample=24)
@pytest.mark.parametrize("method", ["fedavg", "fedopt", "fedprox", "scaffold", "local"])
@pytest.mark.parametrize("model", ["gcn", "sage"])
def test_both_tiers_and_all_blocks_train_alike(
    make_graph: MakeGraph, method: str, model: str
) -> None:
    graph = make_graph(60, sparse=True)
    tiers = [{"kernels": "torch", "block_size": size} for size in (1, 4)]
    if method != "scaffold":  # its corrections are not compiled
        tiers.append({"kernels": "compiled"})
    runs = [sg.run(graph, **RUN | tier, method=method, model=model) for tier in tiers]
    for other in runs[1:]:
        for part in ("server", "personalized"):
            one, two = (getattr(run.test, part) for run in (runs[0], other))
            assert (one is None) == (two is None)
            if one is not None:
                assert one.loss == pytest.approx(two.loss, abs=1e-10)
    assert runs[0].ledger.bytes_by_kind["features"] > 0


@pytest.mark.law(sample=6)
@pytest.mark.parametrize("kernels", ["torch", "compiled"])
def test_drawn_steps_on_what_was_fetched(make_graph: MakeGraph, kernels: str) -> None:
    graph, steps = make_graph(60), {"batch_size": 4, "fanout": "2,2", "kernels": kernels}
    one, all_four = (sg.run(graph, **RUN | steps, method="fedavg", block_size=b) for b in (1, 4))
    plain = sg.run(graph, **RUN | steps | {"kernels": "torch"}, method="fedavg")
    assert one.test.server is not None
    for other in (all_four, plain):
        assert other.test.server is not None
        assert one.test.server.loss == pytest.approx(other.test.server.loss, abs=1e-10)
    without = sg.run(graph, **RUN | steps | {"collect": 0.0}, method="fedavg")
    assert without.test.server != one.test.server


@pytest.mark.parametrize(("clients", "share"), [(1, 0.5), (4, 1e-9)])
def test_fetching_nothing_changes_nothing(
    make_graph: MakeGraph, clients: int, share: float
) -> None:
    own: dict[str, Any] = RUN | {"method": "fedavg", "clients": clients}
    fetched, bare = (sg.run(make_graph(60), **own | {"collect": s}) for s in (share, 0.0))
    assert fetched.test == bare.test
    assert "features" not in bare.ledger.bytes_by_kind


@pytest.mark.law(sample=6)
@pytest.mark.parametrize("participation", [1.0, 0.5])
def test_a_run_resumes_its_bits(
    make_graph: MakeGraph, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, participation: float
) -> None:
    run = RUN | {"method": "fedavg", "participation": participation}
    sg.run(make_graph(60), **run, out=str(tmp_path / "whole"))
    run_until(monkeypatch, make_graph(60), 2, tmp_path / "cut", **run)
    sg.resume(tmp_path / "cut", graph=make_graph(60))
    assert files_of(tmp_path / "cut") == files_of(tmp_path / "whole")


@pytest.mark.parametrize("method", ["label_guided", "centralized"])
def test_methods_that_have_all_neighbors(make_graph: MakeGraph, method: str) -> None:
    with raises_code(ConfigError, "conflicting-options", options=["method", "collect"]):
        sg.run(make_graph(40), **RUN, method=method)


def test_shares_out_of_range(make_graph: MakeGraph) -> None:
    with raises_code(ConfigError, "option-value", option="collect", got=1.5):
        sg.run(make_graph(40), **RUN | {"collect": 1.5})
