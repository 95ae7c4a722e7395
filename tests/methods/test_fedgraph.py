"""Laws of FedGraph: limits that equal other trainings, dense oracles, draws, what is refused."""

import itertools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

import silograph as sg
from remote_runs import finish, lines, remote
from runs import FAST, go, of, rows_of, run_until, same_bits
from silograph.control.ddpg import PROFILE
from silograph.core.config import make_config
from silograph.core.errors import ConfigError, ProtocolError
from silograph.core.key import Key
from silograph.core.payload import Ragged, Stacked, offsets
from silograph.exchange.passes import RemoteSums
from silograph.experiment.run.run import first_snapshot
from silograph.experiment.run.setup import Setup, prepare
from silograph.federation.in_process import InProcess
from silograph.federation.messages import to_payload
from silograph.graph.block.block import ClientBlock, Route
from silograph.graph.graph import Graph
from silograph.methods.fedgraph import (
    FedGraphOptions,
    LastRows,
    ReceivedRows,
    RequestedRows,
    RoundStart,
    RoundState,
    StageDraw,
    begin_round,
    draw_batch_rows,
    forward,
    name_slots,
    sampled_stage,
    serve,
    submit,
    take_back,
    take_rows,
    take_step,
)
from silograph.methods.ops import Clients
from silograph.nn.conv import Params
from silograph.nn.mini_batches import Reached
from silograph.nn.plain_pass import sum_rows

MakeGraph = Callable[..., Graph]
CutBlock = Callable[..., tuple[ClientBlock, Route]]
ALL: dict[str, Any] = {"kappa": 1024, "keep_1": 1.0, "keep_2": 1.0}
RUN: dict[str, Any] = {"method": "fedgraph", "dropout": 0.0, "weight_decay": 0.0, "rounds": 1}
RUN |= {"server_optimizer": "none"}  # a round is the mean of what oracles compute


def setup_of(graph: Graph, **options: Any) -> Setup:
    return prepare(make_config({**FAST, **options}), graph)


def fedgraph(graph: Graph, options: dict[str, Any], **other: Any) -> sg.Result:
    return go(graph, **RUN | other, options=options)


@pytest.mark.parametrize("share", ["all", "hidden"])
def test_announced_stages_are_drawn_once(
    make_graph: MakeGraph, monkeypatch: pytest.MonkeyPatch, share: str
) -> None:
    """Rows that others want of a stage come after its draw, and its neighbors stay."""
    drawn: list[Key] = []

    def counted(*given: Any) -> Any:
        drawn.append(given[-1])
        return sampled_stage(*given)

    monkeypatch.setattr("silograph.methods.fedgraph.sampled_stage", counted)
    fedgraph(make_graph(60), {"share": share, "local_steps": 2}, layers=3)
    assert len(drawn) == len(set(drawn)) == 2 * 3  # iterations times stages


# --- limits ---------------------------------------------------------------------------------------


@pytest.mark.law(sample=24)
@pytest.mark.parametrize("model", ["gcn", "sage"])
@pytest.mark.parametrize("layers", [1, 2, 3])
def test_with_all_of_everything_a_pass_is_that_of_live_exchange(
    make_graph: MakeGraph, layers: int, model: str
) -> None:
    """The loss at equal weights, of all training nodes: kappa weighs clients by their number."""
    graph, shape = make_graph(60), {"layers": layers, "model": model}
    ours = fedgraph(graph, {**ALL, "share": "all", "rescale": "inverse"}, **shape)
    theirs = go(graph, **{**RUN, **shape, "method": "label_guided"})
    assert ours.rounds[0]["train_loss"] == pytest.approx(theirs.rounds[0]["train_loss"], abs=1e-12)
    # And what is scored is complete sums, too, by rows in place of sums.
    firsts = [
        first_snapshot(setup_of(graph, **{**RUN, **shape, "method": "fedgraph", "options": o}))
        for o in ({"share": "all"}, {"share": "hidden"})
    ]
    scores = [f.scores.val["server"] for f in firsts if f.scores is not None]
    losses = [found.loss for found in scores if found is not None and found.loss is not None]
    exact = go(graph, **{**RUN, **shape, "method": "label_guided", "lr": 1e-12})
    assert losses[0] == pytest.approx(exact.rounds[0]["val_server_loss"], abs=1e-8)
    assert layers == 1 or abs(losses[0] - losses[1]) > 1e-4


def test_without_sharing_and_draws_it_is_fedopt(make_graph: MakeGraph) -> None:
    graph, other = make_graph(60), {"rounds": 3, "weight_decay": 5e-4, "server_optimizer": "adam"}
    ours = fedgraph(graph, {**ALL, "share": "none"}, **other)
    steps = {"lr": 0.1, "local_epochs": 1, "kernels": "torch"}  # FedGraph's by default
    theirs = go(graph, **{**RUN, **other, "method": "fedopt"} | steps)
    for name, w in of(theirs).items():
        torch.testing.assert_close(of(ours)[name], w, rtol=0, atol=1e-10)
    assert "embeddings" not in ours.ledger.bytes_by_kind
    assert "halo_keys" not in ours.ledger.bytes_by_kind
    # Predictions for the clients' own view are work of evaluation, which takes no virtual time.
    assert ours.ledger.flops_by_part["training"] <= theirs.ledger.flops_by_part["training"]
    assert ours.ledger.flops_by_part["evaluation"] >= theirs.ledger.flops_by_part["evaluation"]


@pytest.mark.law(sample=6)
@pytest.mark.parametrize("model", ["gcn", "sage"])
def test_with_gradients_sent_back_a_round_is_a_step_of_centralized_training(
    make_graph: MakeGraph, model: str
) -> None:
    graph = make_graph(60)
    steps = {"optimizer": "sgd", "lr": 0.3, "momentum": 0.0, "rounds": 3, "layers": 3}
    shape = {**steps, "model": model}
    ours = fedgraph(graph, {**ALL, "share": "all", "return_gradients": True}, **shape)
    theirs = go(graph, **{**RUN, **shape, "method": "label_guided"})
    for name, w in of(theirs).items():
        torch.testing.assert_close(of(ours)[name], w, rtol=0, atol=1e-10)
    assert "cotangents" in ours.ledger.bytes_by_kind


# --- a dense oracle -------------------------------------------------------------------------------


def normalized(adj: Tensor, degree: Tensor) -> Tensor:
    scale = (degree + 1).rsqrt()
    return scale[:, None] * (adj + torch.eye(len(adj), dtype=adj.dtype)) * scale[None, :]


def dense_round(block: ClientBlock, route: Route, start: Params, steps: int, lr: float) -> Params:
    """Two layers, `hidden`, all neighbors and nodes, plain SGD: every client has its own weights.

    Row u of another client is h(u) W of its owner, without a gradient (eq. 3).
    """
    n, clients = len(block.row_key), block.num_clients
    inner, full = torch.zeros(n, n, dtype=torch.float64), torch.zeros(n, n, dtype=torch.float64)
    inner[block.adj.row, block.adj.indices.long()] = 1
    full += inner
    slot_row = block.halo.boundary[route.target]
    full[block.halo.adj.row, slot_row[block.halo.adj.indices.long()]] = 1
    near, far = normalized(inner, inner.sum(1)), normalized(full, full.sum(1))
    assert isinstance(block.x, Tensor)
    own = [{k: w.clone() for k, w in start.items()} for _ in range(clients)]
    for _ in range(steps):
        sent = torch.zeros(n, start["1.weight"].shape[1], dtype=torch.float64)
        for c, w in enumerate(own):
            mine = block.client == c
            h = torch.relu(near @ block.x @ w["0.weight"] + w["0.bias"])
            sent[mine] = (h @ w["1.weight"])[mine]
        new = []
        for c, w in enumerate(own):
            mine = block.client == c
            leaves = {k: t.clone().requires_grad_() for k, t in w.items()}
            h = torch.relu(near @ block.x @ leaves["0.weight"] + leaves["0.bias"])
            z = torch.where(mine[:, None], h @ leaves["1.weight"], sent)
            train = mine & block.split.train
            loss = cross_entropy((far @ z + leaves["1.bias"])[train], block.y[train])
            grads = torch.autograd.grad(loss, list(leaves.values()))
            new.append({k: w[k] - lr * g for k, g in zip(leaves, grads, strict=True)})
        own = new
    share = block.num_train.double() / block.num_train.sum()
    return {k: sum(s * w[k] for s, w in zip(share, own, strict=True)) for k in start}


def test_owners_answer_with_their_own_weights_and_rows_are_constants(
    make_graph: MakeGraph,
) -> None:
    graph = make_graph(60)
    options = {**RUN, "optimizer": "sgd", "lr": 0.5, "momentum": 0.0, "keep_optimizer": False}
    given = {**ALL, "local_steps": 3}
    setup = setup_of(graph, **{**options, "options": given, "block_size": 4})
    assert isinstance(setup.federation, InProcess)
    block = setup.federation._host.blocks[0].all
    assert block.num_clients == 4
    start = first_snapshot(setup).state.weights
    assert start is not None
    expected = dense_round(block, setup.federation.route, start, 3, 0.5)
    found = fedgraph(graph, given, **{k: v for k, v in options.items() if k not in RUN})
    for name, w in expected.items():
        torch.testing.assert_close(of(found)[name], w, rtol=0, atol=1e-10)


# --- draws ----------------------------------------------------------------------------------------


@pytest.mark.law(sample=6)
@pytest.mark.parametrize("by_degree", [True, False])
def test_the_expected_sum_by_enumeration(
    make_graph: MakeGraph, cut_block: CutBlock, by_degree: bool
) -> None:
    """Eq. 7: 1 - (1 - p)^d of the full sum; `inverse` the full sum; over neighbors in all silos."""
    block, _ = cut_block(make_graph(40), 3)
    total = block.adj.degree + block.halo.adj.degree
    both = (block.adj.degree > 0) & (block.halo.adj.degree > 0) & (total <= 5)
    row = int(both.nonzero()[0, 0])
    d, p = int(total[row]), 0.4
    rows = torch.tensor([row])
    leaving = Reached(
        rows,
        torch.zeros(1).long(),
        torch.arange(3),
        offsets(torch.bincount(block.client[rows], minlength=3)),
    )
    assert isinstance(block.x, Tensor)
    far = torch.arange(len(block.halo.key)).double()[:, None] + 10.0
    how = StageDraw(True, torch.full((3,), p, dtype=torch.float64), True, by_degree)
    found: dict[tuple[tuple[int, ...], tuple[int, ...]], Tensor] = {}
    for number in range(900):
        stage = sampled_stage(block, leaving, 0, how, rows[:0], Key.of(number))
        first = block.halo.off[:-1].repeat_interleave(stage.slots.off.diff())
        slots = stage.slots.t.long() + first
        near = stage.input_rows.rows[stage.messages.adj.indices.long()]
        sum_near = stage.messages.adj.values @ block.x[near][:, :1]  # type: ignore[operator]
        sum_far = stage.halo_weights.values @ far[slots]  # type: ignore[operator]
        found[tuple(sorted(near.tolist())), tuple(slots.tolist())] = sum_near + sum_far
    inside = block.adj.select_rows(rows).indices.tolist()
    outside = block.halo.adj.select_rows(rows).indices.tolist()
    mean, seen = torch.zeros(1, dtype=torch.float64), 0.0
    for mask in itertools.product([0, 1], repeat=d):
        kept = [b for b, m in zip(inside, mask, strict=False) if m]
        away = [b for b, m in zip(outside, mask[len(inside) :], strict=True) if m]
        chance = p ** sum(mask) * (1 - p) ** (d - sum(mask))
        mean, seen = mean + chance * found[tuple(sorted(kept)), tuple(sorted(away))], seen + chance
    assert seen == pytest.approx(1)
    full = block.x[torch.tensor(inside), 0].sum() + far[torch.tensor(outside), 0].sum()
    factor = 1 - (1 - p) ** d if by_degree else 1.0
    assert mean.item() == pytest.approx(factor * full.item(), abs=1e-9)


def test_batches_are_subsets_drawn_alike(make_graph: MakeGraph, cut_block: CutBlock) -> None:
    block, _ = cut_block(make_graph(60), 3)
    most = torch.tensor([2, 1000, 0])
    first = (block.split.train & (block.client == 0)).nonzero()[:, 0].tolist()
    assert len(first) >= 4
    seen = dict.fromkeys(itertools.combinations(first, 2), 0)
    for number in range(200 * len(seen)):
        found = draw_batch_rows(block, most, Key.of(number))
        assert found.off.diff().tolist() == [2, int(block.num_train[1]), 0]
        assert bool(block.split.train[found.rows].all())
        seen[tuple(found.rows[:2].tolist())] += 1
    assert all(120 < count < 280 for count in seen.values())


# --- whole runs -----------------------------------------------------------------------------------

DRAWN: dict[str, Any] = {
    "method": "fedgraph",
    "options": {
        "kappa": 5,
        "keep_1": 0.6,
        "keep_2": 0.7,
        "keep_3": 0.4,
        "local_steps": 2,
        "return_gradients": True,
    },
    "layers": 3,
    "dropout": 0.5,
}


@pytest.mark.law(sample=24)
@pytest.mark.parametrize("share", ["all", "hidden", "none"])
def test_blocks_of_any_size_give_the_same(make_graph: MakeGraph, share: str) -> None:
    graph, options = make_graph(60), {**DRAWN, "options": {**DRAWN["options"], "share": share}}
    one, four = (go(graph, **options, block_size=size) for size in (1, 4))
    for name, w in of(one).items():
        torch.testing.assert_close(of(four)[name], w, rtol=0, atol=1e-10)
    assert lines(one.ledger.records) == lines(four.ledger.records)
    assert ("embeddings" in one.ledger.bytes_by_kind) == (share != "none")


@pytest.mark.parametrize("other", [{}, {"head": "linear"}, {"dtype": "float32", "layers": 2}])
@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("share", ["all", "hidden", "none"])
def test_halves_of_passes_give_the_bits_of_autograd(
    make_graph: MakeGraph,
    monkeypatch: pytest.MonkeyPatch,
    share: str,
    sparse: bool,
    other: dict[str, Any],
) -> None:
    """Weights, scores and work are the same, whether values are kept between ops or not."""
    graph, computed, rounds = make_graph(60, sparse=sparse), list[int](), 3
    own = {**DRAWN["options"], "share": share, "return_gradients": False}
    options = {**DRAWN, "options": own, "rounds": rounds} | other

    def counted(model: Any, number: int, *given: Any) -> Any:
        computed.append(number)
        return sum_rows(model, number, *given)

    monkeypatch.setattr("silograph.methods.fedgraph.sum_rows", counted)
    by_halves = go(graph, **options)
    stages = rounds * own["local_steps"] * options["layers"]
    assert len(computed) == stages  # each once in an iteration
    monkeypatch.setattr("silograph.methods.fedgraph.passes_by_halves", lambda _: False)
    by_autograd = go(graph, **options)
    assert len(computed) == stages
    assert same_bits(of(by_halves), of(by_autograd))
    assert rows_of(by_halves) == rows_of(by_autograd)
    assert lines(by_halves.ledger.records) == lines(by_autograd.ledger.records)


@pytest.mark.slow  # 4 s; test_fedgraph_samplers.py has the same law for one sampler
@pytest.mark.parametrize("share", ["all", "hidden"])
def test_killed_and_resumed_and_over_a_session_it_is_the_same(
    make_graph: MakeGraph, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, share: str
) -> None:
    graph = make_graph(60)
    options = {**DRAWN, "options": {**DRAWN["options"], "share": share}, "block_size": 1}
    straight = go(graph, **options)
    run_until(monkeypatch, graph, 3, tmp_path / "cut", **FAST | options)
    again = sg.resume(tmp_path / "cut", graph=graph)
    over, _ = remote(setup_of(graph, **options))
    for other in (again, finish(over)):
        assert same_bits(of(straight), of(other))
        assert rows_of(straight) == rows_of(other)
        assert lines(straight.ledger.records) == lines(other.ledger.records)


def test_an_agent_goes_on_after_its_profile_in_a_resumed_run(
    make_graph: MakeGraph, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights, policies and virtual time are the same to the bit; the policies are no draws."""
    own = {"policy": "ddpg", "keep_2": 0.5}
    options = {
        "method": "fedgraph",
        "options": own,
        "rounds": PROFILE + 4,
        "speeds": "1,2",
        "links": "10:0.05,1:0.1",
        "block_size": 1,
    }
    graph = make_graph(60)
    straight = go(graph, **options)
    run_until(monkeypatch, graph, PROFILE + 3, tmp_path / "cut", **FAST | options)
    again = sg.resume(tmp_path / "cut", graph=graph)
    assert same_bits(of(straight), of(again))
    assert rows_of(straight) == rows_of(again)
    assert len({row["fact_knob_keep_1"] for row in rows_of(again)}) == PROFILE + 4


@pytest.mark.law(sample=6)
@pytest.mark.parametrize("partition", ["shares", "metis_overlapping"])
def test_clients_may_hold_copies(make_graph: MakeGraph, partition: str) -> None:
    found = go(make_graph(80), **{**DRAWN, "partition": partition, "clients": 5})
    assert found.ledger.bytes_by_kind["embeddings"] > 0


# --- what is refused ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"participation": 0.5}, "expected participation=1, local_epochs=1 and no batch_size"),
        ({"batch_size": 4}, "expected participation=1, local_epochs=1 and no batch_size"),
        ({"model": "gat"}, "expected a model whose sums can be shared, got GAT"),
        ({"collect": 0.5}, "expected a method that trains on each client's own graph for collect"),
        ({"options": {"kappa": 2000}}, "kappa: input should be less than or equal to 1024"),
        ({"options": {"policy": "ddpg"}}, "expected a virtual clock, whose seconds are in the rew"),
        (
            {"options": {"policy": "ddpg", "agent": "nowhere"}, "speeds": "equal"},
            "an agent in nowhere",
        ),
    ],
)
def test_what_cannot_be_run_is_refused(
    make_graph: MakeGraph, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        go(make_graph(), **{"method": "fedgraph", **options})


def begun(graph: Graph, share: str = "hidden") -> tuple[Clients[FedGraphOptions], RoundState]:
    """The clients of a block, and their state in a round that has begun."""
    given = {**ALL, "share": share}
    shape = {"block_size": 4, "layers": 3, "keep_optimizer": False}
    setup = setup_of(graph, **{**RUN, "options": given, **shape})
    assert isinstance(setup.federation, InProcess)
    block = setup.federation._host.blocks[0].all
    start = first_snapshot(setup).state.weights
    assert start is not None
    clients = Clients(setup.method_config, block, Key.of(1), {})
    rate = Stacked(torch.full((4,), 0.5, dtype=torch.float64))
    knobs = {"kappa": Stacked(torch.full((4,), 9)), "keep_1": rate, "keep_2": rate}
    return clients, begin_round(clients, RoundStart(start, knobs))


def run_op(op: Any, clients: Clients[FedGraphOptions], state: RoundState, request: Any) -> Any:
    """Run an op as engines do; return the state and the reply as fields."""
    fields = {**clients.state, **to_payload(state)}
    return op(clients.cfg, clients.block, fields, to_payload(request), clients.key)


def stage(number: int) -> Tensor:
    return torch.tensor(number, dtype=torch.int32)


def boundary_of(block: ClientBlock, count: int) -> Ragged:
    """The first boundary rows of every client."""
    few = block.halo.boundary_off.diff().clamp(max=count)
    return Ragged(torch.cat([torch.arange(int(n)) for n in few]).int(), offsets(few))


def test_rows_of_a_layer_that_is_not_shared_are_refused(make_graph: MakeGraph) -> None:
    """No frame of `hidden` holds what enters layer 1: nobody may ask for that stage."""
    clients, state = begun(make_graph(60))
    with pytest.raises(ProtocolError, match="expected a stage that hears other silos, got stage 0"):
        run_op(serve, clients, state, RequestedRows(stage(0), boundary_of(clients.block, 1)))


def test_rows_come_after_their_requests_and_slots_in_their_order(make_graph: MakeGraph) -> None:
    clients, state = begun(make_graph(60))
    rows = Ragged(torch.zeros(0, 8).double(), offsets(torch.zeros(4).long()))
    with pytest.raises(ProtocolError, match="a stage whose slots were named, got stage 1"):
        run_op(forward, clients, state, ReceivedRows(stage(1), rows))
    state = replace(state, requested_slots={"1": Ragged(torch.zeros(0).int(), rows.off)})
    with pytest.raises(ProtocolError, match="which rows of stage 2 others need, got none"):
        run_op(forward, clients, state, ReceivedRows(stage(1), rows))
    first = RequestedRows(stage(1), boundary_of(clients.block, 1))
    with pytest.raises(ProtocolError, match="a call for the rows of stage 1, got one for slots"):
        run_op(name_slots, clients, state, first)


def test_rows_of_another_shape_are_refused(make_graph: MakeGraph) -> None:
    clients, state = begun(make_graph(60))
    none = offsets(torch.zeros(4).long())
    state = replace(state, requested_slots={"1": Ragged(torch.zeros(0).int(), none)})
    wrong = ReceivedRows(stage(1), Ragged(torch.zeros(0, 3).double(), none))
    with pytest.raises(ProtocolError, match=r"expected rows of shape \(0, 8\)"):
        run_op(take_rows, clients, state, wrong)


def test_gradients_of_rows_that_were_not_sent_are_refused(make_graph: MakeGraph) -> None:
    clients, state = begun(make_graph(60))
    row = boundary_of(clients.block, 1)
    state = replace(state, requested_rows={"2": row})
    total = Ragged(torch.zeros(len(row.t), 5).double(), row.off)
    with pytest.raises(ProtocolError, match="expected a gradient of 3 values for each row that"):
        run_op(take_back, clients, state, RemoteSums(stage(2), total, row))


def test_a_round_ends_after_all_of_its_steps(make_graph: MakeGraph) -> None:
    clients, state = begun(make_graph(60))
    state = replace(state, steps=Stacked(torch.ones(4, dtype=torch.int32)))
    with pytest.raises(ProtocolError, match="expected 0 steps before the last one, got 1"):
        run_op(submit, clients, state, LastRows(None))


def test_a_client_without_training_nodes_takes_no_step(make_graph: MakeGraph) -> None:
    clients, state = begun(make_graph(60), "none")
    state = replace(state, kappa=Stacked(torch.tensor([0, 3, 3, 3])))
    weights, moments = (
        {name: Stacked(f.t.clone()) for name, f in part.items()}
        for part in (state.weights, state.moments)
    )
    after = take_step(clients, replace(state, weights=weights, moments=moments))  # in place
    for name, before in state.weights.items():
        moved = (after.weights[name].t != before.t).flatten(1).any(1)
        assert moved.tolist() == [False, True, True, True]
    new, reply = run_op(submit, clients, state, LastRows(None))
    for name, w in after.weights.items():
        assert torch.equal(reply[f"weights/{name}"].t, w.t)
    assert reply["nodes"].t.tolist() == [0, 3, 3, 3]
    assert set(new) == {"own/logits"}  # as the library keeps them
