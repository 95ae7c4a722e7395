"""Rows with too few nodes or silos behind them are left out, and everybody who counts knows."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import silograph as sg
from remote_runs import finish, lines, remote, setup_of
from runs import MakeGraph, weights_of
from silograph.core.kinds import Kind
from silograph.core.payload import Payload, Ragged
from silograph.core.setting_values import RowMinimum
from silograph.exchange.passes import gradients
from silograph.federation.in_process import InProcess
from silograph.graph.block.block import ClientBlock
from silograph.graph.graph import Graph
from silograph.methods.base import MethodConfig
from silograph.methods.label_guided import LABEL_GUIDED, LabelGuidedOptions
from silograph.nn.fit import Schedule
from silograph.nn.model import Model
from silograph.nn.optim import Adam
from silograph.task.counts import node_loss
from together import KEY, cut_of

MODEL = Model("gcn", 7, 6, 3, 2, 0.0, "multiclass")
PLAIN = MethodConfig(MODEL, Adam(0.01), Schedule(1), True, 1.0, LabelGuidedOptions())


def pruned(adj: Tensor, z: Tensor, owner: Tensor, least: RowMinimum) -> Tensor:
    """Leave cross-client edges (receiver, sender) out of adj by what is behind their sums of z."""
    says = (z != 0).any(1)
    silos = torch.nn.functional.one_hot(owner).to(adj.dtype)  # (n, C)
    behind = (adj * says) @ silos  # of a receiver's sum in each silo
    touched = adj @ silos > 0
    sent = touched if least.nodes == 1 else behind >= least.nodes
    sent &= silos == 0
    handed = sent.sum(1, keepdim=True) >= least.silos
    kept = (sent & handed).to(adj.dtype)[:, owner]
    inside = owner[:, None] == owner
    return torch.where(inside, adj, adj * kept)


class Exchanged(torch.autograd.Function):
    """Sums over neighbors of which some are left out, on the way back by other nodes behind."""

    @staticmethod
    def forward(ctx: Any, z: Tensor, adj: Tensor, owner: Tensor, least: RowMinimum) -> Tensor:
        ctx.at = adj, owner, least
        return pruned(adj, z, owner, least) @ z

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return pruned(ctx.at[0], grad, *ctx.at[1:]) @ grad, None, None, None


@pytest.mark.parametrize(
    "least",
    [
        *(RowMinimum(*least) for least in ((1, 1), (2, 1), (3, 1), (1, 2), (2, 2))),
        *(RowMinimum(*least, rows_are_masked=True) for least in ((1, 1), (2, 1), (1, 2), (1, 3))),
    ],
)
def test_gradients_are_those_of_sums_without_what_is_left_out(
    make_graph: Callable[..., Graph], least: RowMinimum
) -> None:
    block, route, uncut = cut_of(make_graph(60), 4, "random")
    weights = MODEL.init_weights(KEY, torch.float64)
    fed = InProcess(replace(PLAIN, row_minimum=least), block, route, 2)
    grads, loss = gradients(fed, MODEL, weights, KEY, row_minimum=least)

    adj = torch.zeros(60, 60, dtype=torch.float64)
    adj[uncut.adj.row, uncut.adj.indices.long()] = 1
    place = torch.searchsorted(uncut.row_key.sort().values, block.row_key)
    row = uncut.row_key.argsort()[place]
    owner = torch.empty(60, dtype=torch.int64).scatter_(0, row, block.client)
    scale = (adj.sum(1, keepdim=True) + 1).rsqrt()
    leaves = {name: w.clone().requires_grad_() for name, w in weights.items()}
    assert isinstance(uncut.x, Tensor)
    x = uncut.x
    for layer in range(2):
        z = scale * (x @ leaves[f"{layer}.weight"])
        sums: Tensor = Exchanged.apply(z, adj, owner, least)  # type: ignore[no-untyped-call]
        x = scale * (sums + z) + leaves[f"{layer}.bias"]
        x = x.relu() if layer == 0 else x
    rows = uncut.split.train
    wanted = node_loss(x[rows], uncut.y[rows], "multiclass").mean()
    rounding = 1e-10 if least.rows_are_masked else 1e-12  # of fixed point: 2^-37 of rows
    assert loss == pytest.approx(float(wanted.detach()), abs=rounding)
    for name, g in zip(leaves, torch.autograd.grad(wanted, list(leaves.values())), strict=True):
        torch.testing.assert_close(grads[name], g, rtol=0, atol=rounding)


def overheard(
    monkeypatch: pytest.MonkeyPatch, make_graph: MakeGraph, **options: Any
) -> tuple[list[tuple[str, Payload, Payload]], ClientBlock, InProcess]:
    """Return the calls of a step by name, with inbox and reply."""
    block, route, _ = cut_of(make_graph(60), 4, "random")
    least = options.pop("nodes", 1), options.pop("silos", 1)
    row_minimum = RowMinimum(*least, rows_are_masked=options.pop("masked", False))
    own = LabelGuidedOptions(**options)
    cfg = replace(PLAIN, row_minimum=row_minimum, options=own)
    fed, seen, call = InProcess(cfg, block, route, 4), [], InProcess.call

    def overhear(self: InProcess, op: Any, inbox: Payload, **more: Any) -> Payload:
        reply = call(self, op, inbox, **more)
        seen.append((op.__name__, inbox, reply))
        return reply

    monkeypatch.setattr(InProcess, "call", overhear)
    state = LABEL_GUIDED.init(fed, cfg, MODEL.init_weights(KEY, torch.float64), KEY)
    LABEL_GUIDED.round(fed, cfg, state, 1, KEY)
    return seen, block, fed


@pytest.mark.parametrize("options", [{}, {"sample": 40}])
def test_no_row_rests_on_fewer_nodes(
    make_graph: MakeGraph, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    """Even the last cotangents, where only training nodes are behind a row: these hide labels."""
    seen, block, fed = overheard(monkeypatch, make_graph, nodes=2, **options)
    training, sent = block.split.train.double(), {"send_partial_sums": 0, "send_cotangents": 0}
    halo = block.halo.adj
    touching = torch.bincount(halo.indices.long(), minlength=halo.num_cols)
    trained = torch.zeros(halo.num_cols, dtype=torch.float64)
    trained.index_add_(0, halo.indices.long(), training[halo.row])
    for name, inbox, reply in seen:
        if name not in sent:
            continue
        slot = reply["slot"]
        assert isinstance(slot, Ragged)
        places = fed.route.slot_off[:-1].repeat_interleave(slot.off.diff()) + slot.t.long()
        assert int(reply["left_out"].t.sum()) > 0
        assert int(touching[places].min()) >= 2
        if name == "send_cotangents" and int(inbox["stage"].t) == 1:
            assert int(trained[places].min()) >= 2
        sent[name] += len(places)
    assert min(sent.values()) > 0


@pytest.mark.parametrize("masked", [False, True])
def test_no_sum_rests_on_fewer_silos(
    make_graph: MakeGraph, monkeypatch: pytest.MonkeyPatch, masked: bool
) -> None:
    """Of masked rows silos leave them out themselves."""
    seen, _, fed = overheard(monkeypatch, make_graph, silos=2, masked=masked)
    silos = torch.bincount(fed.route.target)
    sent = [reply for name, _, reply in seen if name in {"send_partial_sums", "send_cotangents"}]
    for reply in sent if masked else []:
        slot = reply["slot"]
        assert isinstance(slot, Ragged)
        places = fed.route.slot_off[:-1].repeat_interleave(slot.off.diff()) + slot.t.long()
        assert int(silos[fed.route.target[places]].min()) == 2
        assert len(places) == int((silos[fed.route.target] >= 2).sum())
    handed = [
        inbox for name, inbox, _ in seen if name in {"add_remote_sums", "add_remote_cotangents"}
    ]
    assert len(handed) == 4
    for inbox in handed:
        row = inbox["row"]
        assert isinstance(row, Ragged)
        places = fed.route.boundary_off[:-1].repeat_interleave(row.off.diff()) + row.t.long()
        assert int(silos[places].min()) == 2
        assert len(places) == int((silos >= 2).sum())


@pytest.mark.law(sample=6)
@pytest.mark.parametrize("sample", [None, 40])
def test_sessions_do_the_same_and_facts_count_what_is_left_out(
    make_graph: MakeGraph, sample: int | None
) -> None:
    own: dict[str, Any] = {"min_nodes_per_row": 2, "min_silos_per_row": 2}
    own |= {"options": {} if sample is None else {"sample": sample}}
    setup = setup_of(make_graph(60), LABEL_GUIDED, **own)
    here = finish(setup)
    far, _ = remote(setup_of(make_graph(60), LABEL_GUIDED, **own))
    there = finish(far)
    assert lines(here.ledger.records) == lines(there.ledger.records)
    a, b = weights_of(here), weights_of(there)
    assert a is not None
    assert b is not None
    assert all(torch.equal(a[name], b[name]) for name in a)
    names = ("fact_rows_sent", "fact_rows_left_out", "fact_rows_withheld")
    assert all(here.rounds[-1][name] for name in names)
    assert all(here.rounds[-1][name] == there.rounds[-1][name] for name in names)


def test_rows_left_out_cost_no_bytes(make_graph: MakeGraph) -> None:
    """Frames that are encoded have the bytes of the ledger, and fewer of rows."""
    run: dict[str, Any] = {"method": "label_guided", "clients": 4, "partition": "random"}
    run |= {"rounds": 1, "hidden": 8}
    graph = make_graph(60)
    whole = sg.run(graph, **run).ledger.bytes_by_kind
    some = sg.run(graph, **run, min_nodes_per_row=3).ledger.bytes_by_kind
    assert some == sg.run(graph, **run, min_nodes_per_row=3, strict=True).ledger.bytes_by_kind
    for kind in map(str, (Kind.PARTIAL_SUMS, Kind.COTANGENTS)):
        assert some[kind] < whole[kind]


def test_more_silos_than_there_are(make_graph: MakeGraph) -> None:
    line = r"^expected at most 2 for min_silos_per_row, as .* other silos, got 3: lower it$"
    with pytest.raises(sg.SilographError, match=line):
        sg.run(make_graph(30), method="label_guided", clients=3, min_silos_per_row=3)
