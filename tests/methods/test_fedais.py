"""Laws of FedAIS: what stored rows are, what a batch reads and costs, and what crosses."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import silograph as sg
from conftest import planted_graph
from mistakes import raises_code
from remote_runs import setup_of
from runs import go
from silograph.control import BOUND_INTERVAL, FIXED, LOSS_INTERVAL, RunStanding, knobs_of
from silograph.control.base import ROW_BYTES, Controller
from silograph.core.errors import ConfigError, ProtocolError
from silograph.core.key import Key, mix, signed
from silograph.core.kinds import Kind
from silograph.core.payload import Ragged, offsets
from silograph.core.work import metered
from silograph.evaluation.scoring import HaloSums
from silograph.exchange.pull import SentRows
from silograph.federation.decoder import LARGEST, as_bytes
from silograph.federation.field_specs import check_against, extent_of
from silograph.federation.in_process import InProcess
from silograph.federation.messages import specs_of
from silograph.graph.block.block import ClientBlock, Route, make_block
from silograph.graph.csr import CSR
from silograph.graph.graph import Graph
from silograph.graph.partition.partition import make_partition
from silograph.graph.partition.split import draw_split
from silograph.methods import METHODS
from silograph.methods.base import MethodConfig, ServerState
from silograph.methods.fedais import (
    FEDAIS,
    PRESETS,
    FedAISOptions,
    NextBatches,
    RoundStartWithTau,
    RowsThatCame,
    close_round,
    open_round,
    serve,
    train_batches,
)
from silograph.methods.local_training import shared
from silograph.methods.ops import Server
from silograph.nn.backends import COMPILED, TORCH, Backend
from silograph.nn.conv import internal_messages
from silograph.nn.fit import LOSS_FLOPS, Schedule
from silograph.nn.forward import Pass, Staged, forward_pass
from silograph.nn.mini_batches import FULL, Fanout
from silograph.nn.optim import SGD, Adam
from silograph.nn.stored_rows import (
    StoredRows,
    TrainingRows,
    batch_of_edges,
    batch_pass,
    drawn_batch,
    start_training,
    step_,
    stored_stages,
    surroundings,
    whole_batch,
)
from together import SHARED, blank_rows, cut_of, model_of

MakeGraph = Callable[..., Graph]
KEY = Key.of(5)
STILL = SGD(0.0)
EVERYTHING = FedAISOptions(
    nodes="all", interval="fixed", halo="all", tau=1, batches=1, drawn=0, share_features=True
)


def config(conv: str = "sage", **changes: Any) -> MethodConfig[FedAISOptions]:
    shape = changes.pop("shape", {})
    cfg = MethodConfig(
        model=model_of(conv, **{"dropout": 0.0, **shape}),
        optimizer=STILL,
        schedule=Schedule(1),
        keep_optimizer=False,
        participation=1.0,
        options=EVERYTHING,
    )
    return replace(cfg, **changes)


def model_in(cfg: MethodConfig[FedAISOptions]) -> Staged:
    model = cfg.model.staged
    assert model is not None
    return model


def play(
    cfg: MethodConfig[FedAISOptions], block: ClientBlock, route: Route, rounds: int, size: int = 0
) -> tuple[InProcess, ServerState]:
    fed = InProcess(cfg, block, route, size or block.num_clients)
    state = FEDAIS.init(fed, cfg, cfg.model.init_weights(Key.of(2), torch.float64), KEY)
    for t in range(1, rounds + 1):
        fed.start_round(t)
        state, _ = FEDAIS.round(fed, cfg, state, t, KEY)
    return fed, state


def joined(graph: Graph, clients: int) -> Tensor:
    """The node of every row of the clients."""
    return torch.cat(make_partition(graph, "random", clients=clients, key=Key.of(0)).nodes)


def test_rows_of_the_halo_stay_where_they_are_stored(make_graph: MakeGraph) -> None:
    """On large graphs they are most of what a run holds, and a second copy its peak."""
    block, route, _ = cut_of(make_graph(40), 4, "random")
    cfg = config(options=replace(EVERYTHING, share_features=False))
    fed, state = play(cfg, block, route, rounds=0)
    held = fed._host.states[0].all()["halo_rows/1"]
    for t in (1, 2):
        fed.start_round(t)
        state, _ = FEDAIS.round(fed, cfg, state, t, KEY)
        assert fed._host.states[0].all()["halo_rows/1"] is held
    assert bool(held.t.any())


@pytest.mark.law(sample=6)
@pytest.mark.parametrize("conv", SHARED)
def test_stored_rows_are_fresh_ones_and_the_forward_pass_is_centralized(
    make_graph: MakeGraph, conv: str
) -> None:
    graph = make_graph(40)
    block, route, uncut = cut_of(graph, 4, "random")
    cfg = config(conv)
    fed, state = play(cfg, block, route, rounds=len(model_in(cfg).stages))
    assert state.weights is not None
    node, seen = joined(graph, 4), fed.states()[0]
    first = cfg.model.init_weights(Key.of(2), torch.float64)
    logits = cfg.model.forward(first, uncut)
    judged = (block.split.val | block.split.test).nonzero()[:, 0]
    torch.testing.assert_close(seen["own/logits"].t, logits[node][judged], rtol=0, atol=1e-10)
    for number in stored_stages(model_in(cfg)):
        entering = _entering(cfg.model, first, uncut, number)[node]
        torch.testing.assert_close(seen[f"own_rows/{number}"].t, entering, rtol=0, atol=1e-10)
    HaloSums().counts(fed, cfg.model, shared("weights", first), KEY, cfg.count_rules)
    seen = fed.states()[0]
    torch.testing.assert_close(seen["server/logits"].t, logits[node][judged], rtol=0, atol=1e-10)


def _entering(model: Any, weights: dict[str, Tensor], block: ClientBlock, number: int) -> Tensor:
    """What enters a stage in a plain pass, by a model that ends before it."""
    around = surroundings(block, halo=False)
    blank = blank_rows(model, block, halo=False)
    batch = whole_batch(block, around, blank)
    return batch_pass(model, weights, block, block.x, batch, blank, None)[1][number]


@pytest.mark.parametrize("conv", ["sage", "gcn", "gin"])
def test_without_features_of_others_the_first_layer_stays_at_home(
    make_graph: MakeGraph, conv: str
) -> None:
    graph = make_graph(40)
    block, route, uncut = cut_of(graph, 4, "random")
    cfg = config(conv, options=replace(EVERYTHING, share_features=False))
    fed, _ = play(cfg, block, route, rounds=len(model_in(cfg).stages))
    node = joined(graph, 4)
    place = torch.empty_like(node)
    place[node] = torch.arange(len(node))
    pairs = place[uncut.adj.row], place[uncut.adj.indices.long()]
    adj = CSR.from_pairs(*pairs, (len(node), len(node))).to("cpu", torch.float64)
    everywhere = internal_messages(replace(uncut, adj=adj), torch.float64)
    home, count = internal_messages(block, torch.float64), len(model_in(cfg).stages)
    inputs = Pass(block.x, (home, *(everywhere,) * (count - 1)), (block.row_key,) * count)
    first = cfg.model.init_weights(Key.of(2), torch.float64)
    logits = forward_pass(model_in(cfg), first, inputs, None)
    judged = (block.split.val | block.split.test).nonzero()[:, 0]
    HaloSums().counts(fed, cfg.model, shared("weights", first), KEY, cfg.count_rules)
    for view in ("own", "server"):
        found = fed.states()[0][f"{view}/logits"].t
        torch.testing.assert_close(found, logits[judged], rtol=0, atol=1e-10)


def block_with_history(
    graph: Graph, conv: str, **shape: Any
) -> tuple[ClientBlock, Any, dict[str, Tensor], StoredRows]:
    """A block whose stored rows are drawn, and known for two slots of three."""
    block, _, _ = cut_of(graph, 3, "random")
    model = model_of(conv, **{"dropout": 0.0, **shape})
    blank = blank_rows(model, block)
    own = {k: Key.of(k).matrix(*t.shape) for k, t in blank.own.items()}
    halo = {k: Key.of(k + 50).matrix(*t.shape) for k, t in blank.halo.items()}
    known = torch.arange(len(blank.known)) % 3 > 0
    return block, model, model.init_weights(Key.of(2), torch.float64), StoredRows(own, halo, known)


def rows_of_batch(block: ClientBlock, each: int) -> tuple[Tensor, Tensor]:
    rows = torch.cat([torch.arange(int(a), int(a) + each) for a in block.off[:-1]])
    return rows, offsets(torch.full((block.num_clients,), each))


def dense_sage(
    block: ClientBlock,
    weights: dict[str, Tensor],
    rows: Tensor,
    stored: StoredRows,
    stages: int,
) -> Tensor:
    """Logits of a batch by loops over nodes: stored rows are constants."""
    assert isinstance(block.x, Tensor)
    inside = {int(r): i for i, r in enumerate(rows)}
    adj, halo = block.adj, block.halo.adj
    h = block.x[rows]
    for number in range(stages):
        out = []
        for i, row in enumerate(rows.tolist()):
            near = adj.indices[adj.indptr[row] : adj.indptr[row + 1]].tolist()
            heard = [
                h[inside[u]] if u in inside else (stored.own[number] if number else block.x)[u]
                for u in near
            ]
            if number:
                slots = halo.indices[halo.indptr[row] : halo.indptr[row + 1]].tolist()
                heard += [stored.halo[number][s] for s in slots if bool(stored.known[s])]
            mean = torch.stack(heard).mean(0) if heard else torch.zeros_like(h[0])
            p = {k[2:]: w for k, w in weights.items() if k.startswith(f"{number}.")}
            out.append(mean @ p["weight"] + h[i] @ p["root"] + p["bias"])
        h = torch.stack(out)
        h = torch.relu(h) if number < stages - 1 else h
    return h


@pytest.mark.parametrize("layers", [2, 3, 4])
def test_a_batch_and_its_gradient_are_those_of_a_loop_over_nodes(
    make_graph: MakeGraph, layers: int
) -> None:
    """Stored rows are constants: no gradient flows through them, and unknown ones are left out."""
    block, model, weights, stored = block_with_history(make_graph(40), "sage", layers=layers)
    rows, off = rows_of_batch(block, 4)
    batch = batch_of_edges(block, surroundings(block), stored, rows, off)
    leaves = {k: w.clone().requires_grad_() for k, w in weights.items()}
    ours, entered = batch_pass(model, leaves, block, block.x, batch, stored, None)
    theirs = dense_sage(block, leaves, rows, stored, layers)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-10)
    probe = Key.of(9).matrix(*ours.shape)
    grads = [torch.autograd.grad((t * probe).sum(), list(leaves.values())) for t in (ours, theirs)]
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-10)
    assert not any(x.requires_grad for x in entered.values())


def test_nothing_two_hops_away_is_read_until_it_is_stored(make_graph: MakeGraph) -> None:
    block, model, weights, stored = block_with_history(make_graph(40), "sage", layers=3)
    rows, off = torch.tensor([int(block.off[0])]), torch.tensor([0, 1, 1, 1])
    near = block.adj.indices[block.adj.indptr[rows[0]] : block.adj.indptr[rows[0] + 1]].long()
    far = torch.ones(len(block.row_key), dtype=torch.bool)
    far[near] = far[rows] = False

    def logits(moved: Tensor) -> Tensor:
        assert isinstance(block.x, Tensor)
        x = torch.where(moved[:, None], block.x + 1, block.x)
        batch = batch_of_edges(block, surroundings(block), stored, rows, off)
        return batch_pass(model, weights, block, x, batch, stored, None)[0]

    def refreshed(moved: Tensor) -> Tensor:
        """Logits once the stored rows have been worked out anew."""
        assert isinstance(block.x, Tensor)
        x = torch.where(moved[:, None], block.x + 1, block.x)
        around = surroundings(block)
        whole = whole_batch(block, around, stored)
        _, entered = batch_pass(model, weights, block, x, whole, stored, None)
        fresh = replace(stored, own=entered)
        batch = batch_of_edges(block, around, fresh, rows, off)
        return batch_pass(model, weights, block, x, batch, fresh, None)[0]

    nothing = torch.zeros_like(far)
    assert len(near)
    assert torch.equal(logits(far), logits(nothing))
    assert not torch.equal(logits(~far), logits(nothing))
    assert not torch.equal(refreshed(far), refreshed(nothing))


@pytest.mark.parametrize("layers", [2, 3, 4, 5, 6])
@pytest.mark.parametrize("drawn", [0, 3])
def test_work_of_a_batch_is_that_of_one_hop(make_graph: MakeGraph, layers: int, drawn: int) -> None:
    block, model, weights, stored = block_with_history(make_graph(60), "sage", layers=layers)
    rows, off = rows_of_batch(block, 4)
    sampler = Fanout((drawn,)) if drawn else FULL
    batch = drawn_batch(block, surroundings(block), stored, rows, off, sampler, KEY)
    cfg = config(shape={"layers": layers}, optimizer=SGD(0.1))
    held = start_training(model, cfg.training, block, weights, None, compact=True)
    with metered(block.num_clients) as meter:
        step_(model, cfg.training, block, held, TrainingRows(batch, None), stored, KEY)
    total = 0
    for number, stage in enumerate(model.stages):
        heard = batch.later if number else batch.first
        b, others, edges = len(rows), len(heard.rows) + len(heard.slots), heard.adj.nnz
        fresh = 3 if number else 2  # forward, and gradients of weights, and of what entered
        inner, outer = 2 * stage.inputs * stage.outputs, stage.outputs
        total += inner * (fresh * b + 2 * others)  # the map
        total += 2 * outer * 2 * edges + 2 * outer * b  # the sum, its scale
        total += inner * fresh * b + outer * b  # the own row
        total += 2 * outer * b + 2 * outer * b * (number < layers - 1)  # bias, ReLU
    total += LOSS_FLOPS * 3 * len(rows)
    assert float(meter.flops.sum()) == total
    steps = 3 * 2 * sum(w.numel() for w in weights.values())
    assert float(meter.part(Kind.OPTIMIZER).flops.sum()) == steps
    for number in range(1, layers):
        assert len(batch.later.rows) + len(batch.later.slots) <= batch.later.adj.nnz, number


def bound_of(weights: dict[str, Tensor], eps: dict[int, float], layers: int, degree: int) -> float:
    """sum_l eps_l (a_1 a_2 D)^(L-l), where a stage is (|W| + |root|) D steep at most."""
    steep = {
        later: degree
        * sum(
            float(torch.linalg.matrix_norm(weights[f"{later}.{k}"], 2)) for k in ("weight", "root")
        )
        for later in range(layers)
    }
    return sum(
        eps[number] * math.prod(steep[later] for later in range(number, layers)) for number in eps
    )


def ball_of(block: ClientBlock, row: int, hops: int) -> set[int]:
    """Nodes within some hops."""
    ball = {row}
    for _ in range(hops):
        ball |= {v for u in ball for v in neighbors_of(block, u)}
    return ball


def neighbors_of(block: ClientBlock, row: int) -> list[int]:
    found = block.adj.indices[block.adj.indptr[row] : block.adj.indptr[row + 1]]
    return [int(v) for v in found]


@pytest.mark.law(sample=6)
@pytest.mark.parametrize("conv", ["sage", "graphconv"])
@pytest.mark.parametrize("layers", [2, 3, 4])
def test_errors_of_stored_rows_stay_within_the_bound(conv: str, layers: int) -> None:
    """D is the largest degree in the (L-1)-hop ball."""
    tight = 0.0
    for seed in range(8):
        block, _, _ = cut_of(planted_graph(30, seed=seed), 1, "random")
        model = model_of(conv, layers=layers, dropout=0.0)
        weights = model.init_weights(Key.of(seed), torch.float64)
        blank = blank_rows(model, block, halo=False)
        around = surroundings(block, halo=False)
        whole = whole_batch(block, around, blank)
        exact, entered = batch_pass(model, weights, block, block.x, whole, blank, None)
        own, eps = {}, {}
        for number, x in entered.items():
            noise = Key.of(seed).fold(number).matrix(*x.shape) - 0.5
            own[number], eps[number] = x + noise / 10, float((noise / 10).norm(dim=1).max())
        stored = replace(blank, own=own)
        rows = torch.arange(0, 6)
        batch = batch_of_edges(block, around, stored, rows, torch.tensor([0, 6]))
        found, _ = batch_pass(model, weights, block, block.x, batch, stored, None)
        for i, row in enumerate(rows.tolist()):
            near = ball_of(block, row, layers - 1)
            most = max(1, max(int(block.adj.degree[u]) for u in near))
            error = float((found[i] - exact[row]).norm())
            bound = bound_of(weights, eps, layers, most)
            assert error <= bound
            tight = max(tight, error / bound)
    assert tight > 1e-3  # the bound says something


@pytest.mark.parametrize("leaves", [5, 20])
def test_errors_add_up_over_neighbors_so_that_the_bound_needs_their_number(leaves: int) -> None:
    """The error at a star's hub is eps |W| D where all leaves are off by W's steepest vector.

    The bound of a mean degree, which is below 2, does not hold.
    """
    graph, hub = planted_graph(leaves + 1), torch.zeros(leaves, dtype=torch.long)
    ends = torch.arange(1, leaves + 1)
    pairs = torch.cat([hub, ends]), torch.cat([ends, hub])
    graph = replace(graph, adj=CSR.from_pairs(*pairs, (leaves + 1, leaves + 1)))
    block, _, _ = cut_of(graph, 1, "random")
    model = model_of("graphconv", layers=2, dropout=0.0)
    weights = model.init_weights(KEY, torch.float64)
    blank, around = (
        blank_rows(model, block, halo=False),
        surroundings(block, halo=False),
    )
    whole = whole_batch(block, around, blank)
    exact, entered = batch_pass(model, weights, block, block.x, whole, blank, None)
    row = int(block.adj.degree.argmax())
    left, sizes, _ = torch.linalg.svd(weights["1.weight"])
    stored = replace(blank, own={1: entered[1] + left[:, 0] / 10})
    batch = batch_of_edges(block, around, stored, torch.tensor([row]), torch.tensor([0, 1]))
    found, _ = batch_pass(model, weights, block, block.x, batch, stored, None)
    error = float((found[0] - exact[row]).norm())
    assert error == pytest.approx(leaves * float(sizes[0]) / 10, rel=1e-9)
    assert bound_of(weights, {1: 0.1}, 2, 2) < error <= bound_of(weights, {1: 0.1}, 2, leaves)


@pytest.mark.parametrize("layers", [3, 4, 5])
def test_errors_grow_with_the_largest_degree_that_is_reached(layers: int) -> None:
    """Rows of 30 leaves are off by eps; their hub is L - 2 hops from a node.

    From the hub on all rows are worked out alone, one after the other: with W = I the last error is
    30 eps. No bound by degrees that are nearer holds, so none by the node's own (theorem 1).
    """
    hub, nodes, eps = layers - 2, layers + 29, 0.01
    ends = [(i, i + 1) for i in range(hub)] + [(hub, i) for i in range(hub + 1, nodes)]
    rows, cols = torch.tensor([*ends, *((b, a) for a, b in ends)]).T
    graph = replace(planted_graph(nodes), adj=CSR.from_pairs(rows, cols, (nodes, nodes)))
    block, _, _ = cut_of(replace(graph, x=torch.ones(nodes, 7)), 1, "random")
    model = model_of("graphconv", layers=layers, dropout=0.0)
    drawn = model.init_weights(KEY, torch.float64)
    weights = {n: torch.zeros_like(w) for n, w in drawn.items()}
    weights |= {n: torch.eye(*w.shape).double() for n, w in drawn.items() if "weight" in n}
    stored, around = (
        blank_rows(model, block, halo=False),
        surroundings(block, halo=False),
    )
    whole = whole_batch(block, around, stored)
    exact, entered = batch_pass(model, weights, block, block.x, whole, stored, None)
    stored = replace(stored, own={n: x.clone() for n, x in entered.items()})
    stored.own[1][hub + 1 :, 0] += eps
    for row in range(hub, -1, -1):
        batch = batch_of_edges(block, around, stored, torch.tensor([row]), torch.tensor([0, 1]))
        found, entered = batch_pass(model, weights, block, block.x, batch, stored, None)
        for number, x in entered.items():
            stored.own[number][row] = x[0]
    error = float((found[0] - exact[0]).norm())
    assert error == pytest.approx(30 * eps, rel=1e-10)
    near, nearer = (
        max(int(block.adj.degree[u]) for u in ball_of(block, 0, hops)) for hops in (hub, hub - 1)
    )
    assert bound_of(weights, {1: eps}, layers, nearer) < error
    assert error <= bound_of(weights, {1: eps}, layers, near)


def test_without_a_halo_fedais_on_all_nodes_is_fedlocal_bit_for_bit(make_graph: MakeGraph) -> None:
    graph = make_graph(60, sparse=True)
    cut = make_partition(graph, "random", clients=4, key=Key.of(0))
    same = cut.owner[graph.adj.row] == cut.owner[graph.adj.indices.long()]
    pairs = graph.adj.row[same], graph.adj.indices.long()[same]
    graph = replace(graph, adj=CSR.from_pairs(*pairs, (60, 60)))
    split = draw_split(graph, cut, ratios=(0.4, 0.3, 0.3), key=Key.of(1))
    block, route = make_block(graph, cut, split, torch.float64)
    found = []
    for options in (
        FedAISOptions(nodes="all", drawn=3),
        PRESETS_BY_NAME["fedlocal"].options(drawn=3),
    ):
        cfg = config("gcn", options=options, optimizer=Adam(0.01, 5e-4), shape={"dropout": 0.4})
        fed, state = play(cfg, block, route, rounds=3)
        assert "serve" not in {record.op for record in fed.ledger.records}
        found.append((state.weights or {}, fed.states()[0]["own/logits"].t))
    assert all(torch.equal(w, found[1][0][name]) for name, w in found[0][0].items())
    assert torch.equal(found[0][1], found[1][1])


PRESETS_BY_NAME = {method.name: method for method in PRESETS}


def head(name: str, dims: int) -> int:
    from silograph.federation.frame import DIMENSION, FIELD

    return FIELD.size + len(name) + dims * DIMENSION.size


def frames_of_exchange(
    cfg: MethodConfig[FedAISOptions], number: int, count: int
) -> tuple[int, int, int]:
    """Bytes of the frames of one exchange of `count` in a round, at one client and without rows.

    That which names slots, both of the owner, and that which brings rows. Naming and bringing are
    part of other calls.
    """
    from silograph.federation.frame import HEADER

    numbers = stored_stages(model_in(cfg))
    told = sum(
        head(name, 0) + size for name, size in (("round", 4), ("start", 4), ("knobs/tau", 8))
    )
    heads = head("answered", 1) + sum(head(f"rows/{n}", 2) for n in numbers)
    if cfg.options.sent == "int8":
        heads += sum(head(f"scale/{n}", 1) for n in numbers)
    names = "train_batches" if number else "open_round"
    brings = "train_batches" if number + 1 < count else "close_round"
    return (
        HEADER.size + len(names) + head("slot", 1),
        2 * (HEADER.size + len("serve")) + told + head("row", 1) + heads,
        HEADER.size + len(brings) + told + heads,
    )


@pytest.mark.parametrize("sent", ["exact", "int8"])
@pytest.mark.parametrize(("halo", "batches"), [("all", 4), ("drawn", 1)])
def test_bytes_of_exchanges_are_their_closed_form(
    make_graph: MakeGraph,
    halo: Literal["all", "drawn"],
    batches: int,
    sent: Literal["exact", "int8"],
) -> None:
    """Every slot that is read asks once; every owner sends a wanted row once.

    One batch of all training nodes and neighbors reads the slots beside these nodes. The paper
    counts the row of every slot in every batch.
    """
    block, route, _ = cut_of(make_graph(40), 4, "random")
    own: dict[str, Any] = {"batches": batches, "halo": halo, "sent": sent}
    options = replace(EVERYTHING, share_features=False, tau=2, **own)
    cfg = config("sage", options=options, shape={"layers": 3})
    fed, state = play(cfg, block, route, rounds=0)
    fed.start_round(1)
    _, report = FEDAIS.round(fed, cfg, state, 1, KEY)
    heard = block.halo.adj.indices.long()[block.split.train[block.halo.adj.row]]
    every = len(block.halo.key)
    asked = torch.arange(every) if halo == "all" else heard.unique()
    assert (0 < len(asked) < every) is (halo == "drawn")
    slots, rows = len(asked), len(route.target[asked].unique())
    clients, times = 4, -(-batches // 2)
    width = 8 * sum(model_in(cfg).stages[n].inputs for n in stored_stages(model_in(cfg)))
    assert report.facts["paper_row_bytes"] == every * width * batches
    if sent == "int8":
        width = width // 8 + 4 * len(stored_stages(model_in(cfg)))
    by_kind, embeddings, places = fed.ledger.bytes_by_kind, 0, 0
    for number in range(times):
        names, serve, brings = frames_of_exchange(cfg, number, times)
        places += clients * names + 4 * slots
        embeddings += clients * (serve + brings) + (4 + 1 + width) * rows + (1 + width) * slots
    assert by_kind["halo_keys"] == places
    assert by_kind["embeddings"] == embeddings
    assert report.facts[ROW_BYTES] == places + embeddings


def batch_by_hand(block: ClientBlock, client: int, number: int, count: int, key: Key) -> list[int]:
    """Rows of one of `count` batches of a client; the first ones have one more where they must."""
    train = [int(r) for r in block.split.train.nonzero() if int(block.client[r]) == client]
    words = key.fold("nodes").fold("order").words(block.row_key[train], 1)[:, 0].tolist()
    mixed = [row for _, row in sorted(zip(words, train, strict=True))]
    size = [len(mixed) // count + (i < len(mixed) % count) for i in range(count)]
    return mixed[sum(size[:number]) : sum(size[: number + 1])]


def slots_by_hand(block: ClientBlock, rows: list[int], drawn: int, key: Key) -> set[int]:
    """Slots among those neighbors of each row, own or not, whose words are the least."""
    found = set[int]()
    for row in rows:
        slots = block.halo.adj.indices[block.halo.adj.indptr[row] : block.halo.adj.indptr[row + 1]]
        near = [(int(block.row_key[u]), -1) for u in neighbors_of(block, row)]
        near += [(int(block.halo.key[s]), int(s)) for s in slots]
        mine = mix(int(block.row_key[row]) ^ key.value)
        found |= {s for _, s in sorted((signed(mix(mine ^ k)), s) for k, s in near)[:drawn]}
    return found - {-1}


def test_an_exchange_costs_what_the_next_batch_draws(make_graph: MakeGraph) -> None:
    """Three of four clients train for two epochs of three batches; the last one has no rows yet.

    The paper's bytes are those of every slot of the three, in every one of the six batches.
    """
    block, route, _ = cut_of(make_graph(60), 4, "random")
    options = replace(EVERYTHING, share_features=False, halo="drawn", drawn=2, batches=3, tau=2)
    cfg = config("sage", options=options, shape={"layers": 3}, schedule=Schedule(2))
    cfg = replace(cfg, selected=block.ids[:3])
    fed, state = play(cfg, block, route, rounds=0)
    fed.start_round(1)
    _, report = FEDAIS.round(fed, cfg, state, 1, KEY)
    own, width = KEY.fold("train", 1), 8 * (6 + 6)
    places = embeddings = 0
    for start in (0, 2, 4):
        names, serve, brings = frames_of_exchange(cfg, start // 2, 3)
        slots = set[int]()
        for client in range(3):
            batch = batch_by_hand(block, client, start % 3, 3, own)
            slots |= slots_by_hand(block, batch, 2, own.fold("batch", start))
        target = [int(route.target[s]) for s in slots]
        owner = {r: int((route.boundary_off <= r).sum()) - 1 for r in target}
        places += 3 * names + 4 * len(slots)
        embeddings += len(set(owner.values())) * serve + 5 * len(owner) + 3 * brings + len(slots)
        there = [r for r in target if owner[r] < 3]
        assert 0 < len(set(there)) < len(there) < len(slots) < int(block.halo.off[3])
        embeddings += width * (len(set(there)) + len(there))
    assert fed.ledger.bytes_by_kind["halo_keys"] == places
    assert fed.ledger.bytes_by_kind["embeddings"] == embeddings
    assert report.facts["paper_row_bytes"] == 6 * int(block.halo.off[3]) * width


@given(st.integers(0, 2**32), st.sampled_from([1e-300, 1e-30, 1.0, 1e30, 1e300]))
def test_rows_as_bytes_are_within_half_a_scale(seed: int, size: float) -> None:
    x = (Key.of(seed).matrix(4, 5) - 0.5) * size
    x[1] = 0
    levels, scale = as_bytes(x)
    assert levels.dtype is torch.int8
    back = levels.double() * scale.double()[:, None]
    whole = (scale < LARGEST) & (scale > torch.finfo(torch.float32).tiny)
    error = (back - x).abs().amax(1)
    assert bool((error[whole] <= 0.5001 * scale[whole]).all())
    assert bool((back.abs() <= x.abs().amax() * (1 + 1e-6)).all())  # never beyond what it was
    assert not back[1].any()


def test_rows_as_bytes_are_nearly_those_that_are_sent_whole(make_graph: MakeGraph) -> None:
    block, route, _ = cut_of(make_graph(40), 4, "random")
    found, whole = [], replace(EVERYTHING, share_features=False)
    for options in (whole, replace(whole, sent="int8")):
        fed, _ = play(config("gcn", options=options), block, route, rounds=2)
        found.append(fed.states()[0])
    assert torch.equal(found[0]["received_at"].t, found[1]["received_at"].t)
    for number in stored_stages(model_in(config("gcn"))):
        rows, small = (state[f"halo_rows/{number}"].t for state in found)
        off = (rows - small).abs().amax(1) / rows.abs().amax(1).clamp(min=1e-30)
        assert 0 < float(off.max()) < 0.02 * number


@pytest.mark.parametrize(
    ("scale", "message"),
    [
        (2.0**121, "expected values up to 1.32923e\\+36, got"),
        (-1.0, "expected values from 0, got -1"),
        (float("nan"), "expected finite numbers, got NaN"),
    ],
)
def test_no_owner_can_send_bytes_that_are_no_finite_row(
    make_graph: MakeGraph, scale: float, message: str
) -> None:
    """What a silo takes in is checked; the largest row that passes is finite in float32."""
    block, _, _ = cut_of(make_graph(40), 4, "random")
    cfg = config("sage", shape={"layers": 2}, options=FedAISOptions(sent="int8"))
    model, specs = model_in(cfg), specs_of(SentRows, cfg)
    off = torch.tensor([0, 1, 1, 1, 1])
    width = model.stages[1].inputs
    levels = Ragged(torch.full((1, width), 127, dtype=torch.int8), off)
    answered = Ragged(torch.ones(1, dtype=torch.bool), off)
    scales = Ragged(torch.tensor([LARGEST]), off)
    fields = {"answered": answered, "rows/1": levels, "scale/1": scales}
    others = {"inbox": {"row": answered}}
    extent, where = extent_of(block), "inbox of store"
    check_against(fields, specs, extent, where, others=others, finite=True)
    assert bool((levels.t * fields["scale/1"].t[:, None]).isfinite().all())
    fields["scale/1"] = Ragged(torch.tensor([scale]), off)
    with pytest.raises(ProtocolError, match=message):
        check_against(fields, specs, extent, where, others=others, finite=True)


@pytest.mark.law(sample=6)
@pytest.mark.parametrize("size", [1, 2, 5])
def test_owners_that_take_no_part_send_what_they_have_or_nothing(
    make_graph: MakeGraph, size: int
) -> None:
    block, route, _ = cut_of(make_graph(50), 5, "random")
    options = FedAISOptions(interval="fixed", batches=3, drawn=0)
    cfg = config("sage", options=options, participation=0.4, optimizer=SGD(0.1))
    fed, _ = play(cfg, block, route, rounds=2, size=size)
    passes = torch.cat([s["passes"].t for s in fed.states()])
    seen = torch.cat([s["received_at"].t for s in fed.states()])
    owner = torch.searchsorted(route.boundary_off, route.target, right=True) - 1
    mine = torch.repeat_interleave(torch.arange(5), route.slot_off.diff())
    assert 0 < int((passes > 0).sum()) < 5
    assert bool((passes[owner[seen >= 0]] > 0).all())  # nobody has sent a row that it had not
    assert bool((passes[mine[seen >= 0]] > 0).all())
    assert int(seen.max()) >= 3  # rows of the second round


# What sets the interval.


def standing(loss: float | None, **other: Any) -> RunStanding:
    values: dict[str, Any] = {"round": 1, "clients": 3, "bytes": 0, "bytes_left": None, "scored": 1}
    values |= {"weights": {"w": torch.zeros(2, dtype=torch.float64)}}
    return RunStanding(**{**values, "val_loss": loss, "val_score": 0.5, **other})


def test_intervals_are_those_of_eq_11() -> None:
    options = FedAISOptions(tau=4)
    knobs = knobs_of(options)
    state = LOSS_INTERVAL.init(None, knobs, standing(2.0))
    losses = [2.0, 1.9, 1.2, 1.125, 0.5, 0.1, 0.0, 8.0, 1e9]
    found = [
        int(LOSS_INTERVAL.propose(None, knobs, state, standing(f), KEY)["tau"]) for f in losses
    ]
    assert found == [4, 4, 4, 3, 2, 1, 1, 8, 100]


@pytest.mark.parametrize("loss", [2.0, 0.0])
@pytest.mark.parametrize("controller", [LOSS_INTERVAL, BOUND_INTERVAL])
def test_intervals_grow_where_the_bytes_left_do_not_suffice(
    controller: Controller, loss: float
) -> None:
    knobs = knobs_of(FedAISOptions(tau=1))
    state = controller.init(None, knobs, standing(2.0, bytes=100))
    facts = {"row_bytes": 50.0, "exchanges": 10.0, "batches": 10.0, "moved": 1.0, "rate": 0.1}
    assert controller.observe is not None
    state = controller.observe(None, knobs, state, standing(2.0, bytes=170), facts, {})
    found = []
    for left in (10_000, 700, 699, 450, 250, 210, 0):
        now = standing(loss, bytes=170, bytes_left=left, rounds_left=10)
        found.append(int(controller.propose(None, knobs, state, now, KEY)["tau"]))
    # A round costs 20 and 5 for each exchange; its 10 batches have up to 10 of them.
    assert found == [1, 1, 2, 2, 10, 100, 100]


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("backend", [TORCH, COMPILED])
def test_clients_tell_how_far_they_have_moved_where_the_interval_needs_it(
    make_graph: MakeGraph, backend: Backend, *, sparse: bool
) -> None:
    """The server's model of one client has moved as far as that; its unused rows stay."""
    block, route, _ = cut_of(make_graph(40, sparse=sparse), 1, "random")
    options = FedAISOptions(interval="bound", batches=3, tau=2)
    shape = {"residual": False}
    cfg = config("sage", options=options, optimizer=Adam(0.05), backend=backend, shape=shape)
    fed = InProcess(cfg, block, route, 1)
    before = FEDAIS.init(fed, cfg, cfg.model.init_weights(Key.of(2), torch.float64), KEY)
    fed.start_round(1)
    after, report = FEDAIS.round(fed, cfg, before, 1, KEY)
    assert before.weights is not None
    assert after.weights is not None
    pairs = [(after.weights[name], w) for name, w in before.weights.items()]
    total = sum(float((a - b).square().sum()) for a, b in pairs)
    assert report.facts["moved"] == pytest.approx(total, rel=1e-12)
    assert report.facts["rate"] == 0.05
    assert FEDAIS.needs.controller(options) is BOUND_INTERVAL
    assert FEDAIS.needs.controller(replace(options, halo="none")) is FIXED


# Bad input.


def test_bad_input_is_refused_in_one_line() -> None:
    for changes, message in (
        ({"conv": "gat"}, "expected a model whose sums can be shared, got GAT"),
        ({"schedule": Schedule(1, batch_size=3)}, "neighbors itself: leave batch_size out;"),
        (
            {"schedule": Schedule(1, neighbors=Fanout((2, 2)))},
            "itself: leave fanout out;",
        ),
        ({"options": replace(EVERYTHING, halo="none")}, "expected a halo for share_features"),
    ):
        with pytest.raises(ConfigError, match=message):
            FEDAIS.check(config(**changes))
    bad: list[dict[str, Any]] = [{"ratio": 0}, {"ratio": 1.2}, {"tau": 0}, {"floor": 2}]
    for wrong in [*bad, {"batches": 0}]:
        with pytest.raises(ValueError, match=next(iter(wrong))):
            FedAISOptions(**wrong)
    with pytest.raises(ConfigError, match="expected validation counts for an interval that follo"):
        LOSS_INTERVAL.init(None, (), standing(None))


@pytest.mark.parametrize(
    ("split", "least"), [("0.5/0.25/0.25", 100_000), ("0.5/0/0.5", 0)], ids=["withheld", "no nodes"]
)
def test_an_interval_that_follows_the_loss_names_what_may_hide_it(
    make_graph: MakeGraph, split: str, least: int
) -> None:
    """Too few nodes for the least count, a silo's policy, or none at all; and how to mend each."""
    with pytest.raises(ConfigError, match=r"^expected validation counts .* got none") as caught:
        go(make_graph(), method="fedais", rounds=1, split=split, evaluation_min_count=least)
    for words in ("by split, such as", "lower evaluation_min_count", "policy.toml", "=fixed"):
        assert words in str(caught.value)


def test_batches_are_trained_on_in_their_order_each_once(make_graph: MakeGraph) -> None:
    """A server can have no batch again, none left out, and no round closed before its end."""
    setup = setup_of(
        make_graph(), METHODS["fedais"], options={"halo": "all", "tau": 4}, local_epochs=1
    )
    cfg, key = setup.method_config, Key.of(1)
    fed, weights = setup.federation, cfg.model.init_weights(Key.of(2), torch.float64)
    FEDAIS.init(fed, cfg, weights, key)
    server = Server(fed, cfg, 1, key)
    start = RoundStartWithTau(weights, {}, torch.tensor(4))
    slots = server.call(open_round, start)

    def rows_for(number: int) -> RowsThatCame:
        batches = NextBatches.of(cfg, 1, number)
        return server.fetch_rows(
            slots, serve, batches, RowsThatCame, of_anyone=True, dtype=torch.float64
        )

    def expect(number: int, got: int) -> Any:
        line = rf"expected batch {number} of the round next, got {got}"
        return pytest.raises(ProtocolError, match=line)

    with expect(0, 4):
        server.call(train_batches, rows_for(4))
    with expect(0, 8):
        server.call(close_round, rows_for(8))
    server.call(train_batches, rows_for(0))
    with expect(4, 0):
        server.call(train_batches, rows_for(0))
    with expect(8, 10):  # batches are left after these
        server.call(close_round, rows_for(4))
    server.call(train_batches, rows_for(4))
    with pytest.raises(ProtocolError, match="expected close_round for the last batches"):
        server.call(train_batches, rows_for(8))
    server.call(close_round, rows_for(8))


@pytest.mark.parametrize("shape", [{"model": "sage", "layers": 1}, {"model": "mlp"}])
def test_a_model_without_rows_to_exchange_is_refused(
    make_graph: MakeGraph, shape: dict[str, Any]
) -> None:
    given: dict[str, Any] = {"clients": 2, "partition": "random", "rounds": 1, **shape}
    with raises_code(ConfigError, "conflicting-options", options=["method", "model"]):
        sg.run(make_graph(), method="fedais", **given)
    sg.run(make_graph(), method="fedlocal", **given)
