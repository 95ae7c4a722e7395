"""Laws of FedSage+: the generator's loss, answers of others, mended graphs, what crosses."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from neighgen_by_hand import generated_by_hand, loss_by_hand
from runs import FAST, go, rows_of, run_until, same_bits, weights_of
from sessions import session
from silograph.core.errors import ConfigError, ProtocolError
from silograph.core.key import Key
from silograph.core.payload import Payload, Ragged, State, offsets, tensors_under
from silograph.evaluation.views import MENDED
from silograph.exchange.collect import COUNTS, GENERATED, local_graph
from silograph.experiment.run.run import resume
from silograph.federation.in_process import InProcess
from silograph.federation.program import Program
from silograph.federation.session.message import own_ops
from silograph.graph.block.block import ClientBlock, Route, dense_rows
from silograph.graph.graph import Graph
from silograph.methods import FEDSAGEPLUS, MethodConfig
from silograph.methods.fedsage import (
    FedSageOptions,
    NeighGen,
    first_least,
    generated_rows,
    generator_of,
    hide_rows,
    learn,
    nearest_gradients,
    objective,
    train_generator,
)
from silograph.nn.fit import Schedule
from silograph.nn.model import Model
from silograph.nn.optim import Adam

Built = tuple[ClientBlock, Route]
MakeGraph = Callable[..., Graph]
CutBlock = Callable[..., Built]
KEY, FIRST = Key.of(5), Key.of(9)
QUICK: dict[str, Any] = {"generator_epochs": 12, "cross_epochs": 2, "generator_width": 6}


def config(graph: Graph, **options: Any) -> MethodConfig[FedSageOptions]:
    return MethodConfig(
        model=Model("sage", graph.num_features, 8, graph.num_classes, 2, 0.5, graph.task),
        optimizer=Adam(0.05, 5e-4),
        schedule=Schedule(2),
        keep_optimizer=False,
        participation=1.0,
        options=FedSageOptions(**QUICK | options),
    )


def started(cfg: MethodConfig[FedSageOptions], built: Built, size: int) -> InProcess:
    fed = InProcess(cfg, *built, size)
    FEDSAGEPLUS.init(fed, cfg, cfg.model.init_weights(FIRST, torch.float64), KEY)
    return fed


def drawn_weights(gen: NeighGen, clients: int) -> dict[str, Tensor]:
    """Weights of which each client has its own, and which generate something."""
    generator = torch.Generator().manual_seed(1)
    like = {n: w.expand(clients, *w.shape) for n, w in gen.init(Key.of(3)).items()}
    found = {
        n: w + 0.3 * torch.randn(w.shape, generator=generator, dtype=w.dtype)
        for n, w in like.items()
    }
    found["degree.bias"] += 1.0
    return found


@pytest.mark.parametrize("sparse", [True, False])
def test_the_cross_client_phase_is_autograd_on_all_graphs_together(
    make_graph: MakeGraph, cut_block: CutBlock, sparse: bool
) -> None:
    """A step with the others' answers follows the loss that sees all clients' nodes at once.

    The oracle is written node by node: eqs. of smooth L1 and of nearest neighbors, hidden ones at
    home and any at the others, with torch's own gradient.
    """
    graph = make_graph(40, sparse=sparse)
    block, _ = cut_block(graph, 3)
    gen, weight = NeighGen(graph.num_features, 5, 3), 0.7
    hidden = Key.of(2).uniform(block.row_key)[:, 0] < 0.4
    damaged, weights = hide_rows(block, hidden), drawn_weights(gen, 3)
    leaves = {n: w.clone().requires_grad_() for n, w in weights.items()}
    x, off = generated_rows(gen, weights, block, damaged, KEY)
    assert min(off.diff().tolist()) > 1
    ends = off.tolist()
    answers = torch.zeros_like(x)
    for c in range(3):
        mine = slice(ends[c], ends[c + 1])
        each = nearest_gradients(x[mine], block)
        answers[mine] = each.sum(0) - each[c]
    ours = objective(gen, leaves, block, damaged, KEY, weight, answers)
    found = torch.autograd.grad(ours, list(leaves.values()))
    theirs = loss_by_hand(gen, leaves, block, hidden, KEY, weight)
    expected = torch.autograd.grad(theirs, list(leaves.values()))
    for name, a, b in zip(leaves, found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-10, msg=name)
    alone = torch.autograd.grad(
        objective(gen, leaves, block, damaged, KEY, weight), list(leaves.values())
    )
    assert not torch.allclose(alone[-2], found[-2], atol=1e-6)


@pytest.mark.law(sample=6)
@pytest.mark.parametrize("cross", [0, 3])
def test_set_up_is_the_loop_over_steps(
    make_graph: MakeGraph, cut_block: CutBlock, cross: int
) -> None:
    """Steps alone, steps with all clients' nodes, then neighbors of all: by torch's Adam."""
    graph = make_graph(36)
    block, route = cut_block(graph, 3)
    cfg = config(graph, generator_epochs=6, cross_epochs=cross, hidden=0.3, feature_weight=0.7)
    cfg = replace(cfg, options=replace(cfg.options, generator_lr=0.05))
    fed = started(cfg, (block, route), 2)
    gen, alone = generator_of(cfg), KEY.fold("generator")
    hidden = alone.fold("hidden").uniform(block.row_key)[:, 0] < 0.3
    leaves = {
        n: w.repeat(3, *[1] * w.dim()).requires_grad_()
        for n, w in gen.init(alone.fold("first")).items()
    }
    adam = torch.optim.Adam(leaves.values(), lr=0.05)
    steps = [(alone.fold("noise", n), True) for n in range(6)]
    for key, local in [*steps, *((KEY.fold("cross", n), False) for n in range(cross))]:
        for w in leaves.values():
            w.grad = torch.zeros_like(w)  # a step for all, where nothing has been generated, too
        loss_by_hand(gen, leaves, block, hidden, key, 0.7, alone=local).backward()
        adam.step()
    counts, rows = generated_by_hand(gen, leaves, block, KEY.fold("mend").fold("noise"))
    states = fed.states()
    assert torch.cat([state[COUNTS].t for state in states]).tolist() == counts
    assert len(rows) > 5
    found = torch.cat([state[GENERATED].t for state in states])
    torch.testing.assert_close(found, rows.detach(), rtol=0, atol=1e-8)


def test_the_first_of_the_least() -> None:
    value = torch.tensor([[2.0, 1.0], [1.0, 1.0], [1.0, 0.0], [5.0, 5.0]])
    found = first_least(value, torch.tensor([0, 0, 0, 2]), 3)
    assert found.tolist() == [[1, 2], [-1, -1], [3, 3]]


def test_answers_pull_to_the_nearest_row(make_graph: MakeGraph, cut_block: CutBlock) -> None:
    """2 (x - x_u) of each client apart; a client without rows answers 0."""
    block, _ = cut_block(make_graph(30), 3)
    assert isinstance(block.x, Tensor)
    x = torch.randn(6, block.num_features, dtype=torch.float64)
    found = nearest_gradients(x, block)
    for c, rows in enumerate(block.x.split(block.off.diff().tolist())):
        near = torch.cdist(x, rows).argmin(1)
        torch.testing.assert_close(found[c], 2 * (x - rows[near]), rtol=0, atol=1e-12)
    nobody = replace(block, ids=("a", *block.ids), off=torch.cat([block.off[:1], block.off]))
    assert torch.equal(nearest_gradients(x, nobody)[0], torch.zeros_like(x))
    assert torch.equal(nearest_gradients(x, nobody)[1:], found)


@pytest.mark.law(sample=6)
@pytest.mark.parametrize("options", [{"hidden": 0.0}, {"most": 0}, {"generator_epochs": 0}])
def test_nothing_generated_is_fedopt(make_graph: MakeGraph, options: dict[str, Any]) -> None:
    """No hidden node, no neighbor allowed, or a predictor that says 0: weights bit for bit."""
    graph = make_graph(60, sparse=True)
    own = {**QUICK, "cross_epochs": 0, **options}
    ours = go(graph, method="fedsage_local", model="sage", options=own)
    theirs = go(graph, method="fedopt", model="sage")
    assert same_bits(weights_of(ours), weights_of(theirs))
    assert [r["val_server_loss"] for r in rows_of(ours)] == [
        r["val_server_loss"] for r in rows_of(theirs)
    ]


@pytest.mark.parametrize("sparse", [True, False])
def test_mended_graphs_have_each_neighbor_beside_its_row(
    make_graph: MakeGraph, cut_block: CutBlock, sparse: bool
) -> None:
    block, _ = cut_block(make_graph(40, sparse=sparse), 3)
    count = (Key.of(1).uniform(block.row_key)[:, 0] * 3).int()
    rows = torch.randn(int(count.sum()), block.num_features, dtype=torch.float64)
    each = offsets(count.long())[block.off]
    state: State = {COUNTS: Ragged(count, block.off), GENERATED: Ragged(rows, each)}
    graph = local_graph(block, state)
    assert torch.equal(graph.off.diff(), block.off.diff() + each.diff())
    assert len(graph.row_key.unique()) == len(graph.row_key)
    own = torch.cat([
        torch.arange(int(a), int(a) + int(k))
        for a, k in zip(graph.off, block.off.diff(), strict=False)
    ])  # fmt: skip
    made = torch.ones(len(graph.row_key), dtype=torch.bool)
    made[own] = False
    degree = graph.adj.degree
    assert torch.equal(degree[own], block.adj.degree + count)
    assert torch.equal(degree[made], torch.ones(int(made.sum()), dtype=torch.int64))
    hosts = graph.adj.select_rows(made.nonzero()[:, 0]).indices.long()
    assert torch.equal(hosts, torch.repeat_interleave(own, count.long()))
    assert torch.equal(dense_rows(graph, made.nonzero()[:, 0]), rows)
    assert torch.equal(dense_rows(graph, own), dense_rows(block, torch.arange(len(own))))
    assert not bool(graph.split.train[made].any())
    assert local_graph(block, state) is graph


def test_scores_say_that_they_see_generated_neighbors() -> None:
    assert FEDSAGEPLUS.evaluate.seen(0.5) == MENDED


def test_blocks_are_clients_one_by_one(make_graph: MakeGraph, cut_block: CutBlock) -> None:
    graph = make_graph(50, sparse=True)
    built, cfg = cut_block(graph, 4), config(graph, generator_epochs=40)
    one = started(cfg, built, 1)
    many = started(cfg, built, 4)
    rows = [s[GENERATED].t for s in one.states()]
    assert sum(map(len, rows)) > 10
    torch.testing.assert_close(torch.cat(rows), many.states()[0][GENERATED].t, rtol=0, atol=1e-10)
    assert list(one.ledger.records) == list(many.ledger.records)


def test_a_generator_learns_degrees_and_features(
    make_graph: MakeGraph, cut_block: CutBlock
) -> None:
    """The loss on hidden nodes falls well below that of a generator that knows nothing."""
    graph = make_graph(60)
    block, _ = cut_block(graph, 2)
    cfg = config(graph, generator_epochs=80, feature_weight=0.1)
    state, _ = train_generator(cfg, block, {}, {}, KEY)
    gen = NeighGen(graph.num_features, 6, 5)
    damaged = hide_rows(block, state["hidden"].t)
    first = gen.init(KEY.fold("generator").fold("first"))
    first = {n: w.expand(2, *w.shape) for n, w in first.items()}
    before, after = (
        float(objective(gen, w, block, damaged, KEY, 0.0))
        for w in (first, tensors_under("weights", state))
    )
    assert after < 0.5 * before


def test_a_session_has_the_bits_of_a_simulation(make_graph: MakeGraph, cut_block: CutBlock) -> None:
    graph = make_graph(50, sparse=True)
    block, route = cut_block(graph, 3)
    cfg, calls = config(graph), FEDSAGEPLUS.calls
    assert calls is not None
    agreed = Program(calls.setup(cfg, KEY), lambda t: calls.round(cfg, t, KEY), 2, calls.state(cfg))
    remote, _ = session(block, route, cfg, own_ops(), program=agreed)
    found = []
    for fed in (remote, InProcess(cfg, block, route, 1)):
        state = FEDSAGEPLUS.init(fed, cfg, cfg.model.init_weights(FIRST, torch.float64), KEY)
        for t in (1, 2):
            fed.start_round(t)
            state, _ = FEDSAGEPLUS.round(fed, cfg, state, t, KEY)
        found.append((state.weights, list(fed.ledger.records)))
    assert same_bits(found[0][0], found[1][0])
    assert found[0][1] == found[1][1]


def test_a_run_goes_on(make_graph: MakeGraph, tmp_path: Any, monkeypatch: Any) -> None:
    graph = make_graph(60, sparse=True)
    options = {"method": "fedsageplus", "options": QUICK, "participation": 0.6, "collect": 0.5}
    straight = go(graph, **options)
    run_until(monkeypatch, graph, 3, tmp_path / "cut", **FAST | options)
    again = resume(tmp_path / "cut", graph=graph)
    assert rows_of(straight) == rows_of(again)
    assert same_bits(weights_of(straight), weights_of(again))
    assert list(straight.ledger.records) == list(again.ledger.records)


def test_bytes_are_closed_forms(
    make_graph: MakeGraph, cut_block: CutBlock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step with C clients that show k_c rows of F numbers moves 8 F C sum of k_c bytes of rows.

    Up once (generated), down to C - 1, up from C - 1 and down once (features).
    """
    graph = make_graph(40)
    built, cfg = cut_block(graph, 3), config(graph, cross_epochs=2)
    counted: list[int] = []

    def spy(self: InProcess, op: Any, inbox: Payload, **own: Any) -> Payload:
        reply = call(self, op, inbox, **own)
        if op.__name__ == "show":
            counted.append(len(reply["x"].t))
        return reply

    call = InProcess.call
    monkeypatch.setattr(InProcess, "call", spy)
    fed = started(cfg, built, 1)
    assert len(counted) == 2 * 3
    rows = 8 * graph.num_features * sum(counted)
    by_kind = fed.ledger.bytes_by_kind
    empty = started(replace(cfg, options=replace(cfg.options, hidden=0.0)), built, 1)
    frames = empty.ledger.bytes_by_kind
    assert set(by_kind) == set(frames) == {"control", "generated", "features"}
    assert by_kind["control"] == frames["control"]
    assert by_kind["generated"] - frames["generated"] == rows
    assert by_kind["features"] - frames["features"] == rows * (2 + 2 + 1)


def overheard(
    fed_of: Callable[[], InProcess], monkeypatch: pytest.MonkeyPatch
) -> tuple[Tensor, Tensor]:
    """What was shown, and the sum of the answers to it, rows (k, F) of both."""
    shows: list[Tensor] = []
    seen: list[tuple[Tensor, Tensor]] = []

    def spy(self: InProcess, op: Any, inbox: Payload, **own: Any) -> Payload:
        reply = call(self, op, inbox, **own)
        if op.__name__ == "show":
            shows.append(reply["x"].t)
        if op.__name__ == "answer":
            seen.append((shows[-1], reply["gradient"].t))
        return reply

    call = InProcess.call
    with monkeypatch.context() as patch:
        patch.setattr(InProcess, "call", spy)
        fed_of()
    x, total = (torch.cat(parts) for parts in zip(*seen, strict=True))
    return x, total


@pytest.mark.law(sample=6)
@pytest.mark.parametrize("clients", [2, 3])
def test_answers_give_a_real_row_where_there_are_two_clients(
    make_graph: MakeGraph, cut_block: CutBlock, monkeypatch: pytest.MonkeyPatch, clients: int
) -> None:
    """X - gradient / 2 is a node's features, to the last bits; docs/explanation/privacy.md says so.

    The server and the client that showed x both know x and the sum of the answers. With three
    clients the same formula gives the sum of two nodes' features less x.
    """
    graph = make_graph(40)
    block, route = cut_block(graph, clients)
    made = lambda: started(config(graph), (block, route), 1)  # noqa: E731
    x, total = overheard(made, monkeypatch)
    assert len(x) > 10
    assert isinstance(block.x, Tensor)
    found = (clients - 1) * x - total / 2
    rows = block.x
    if clients == 3:
        assert float(torch.cdist(x - total / 2, rows).amin()) > 1e-3
        rows = (rows[:, None] + rows[None]).flatten(0, 1)
    assert float(torch.cdist(found, rows).amin(1).max()) < 1e-6


def test_wrong_answers_are_refused(make_graph: MakeGraph, cut_block: CutBlock) -> None:
    graph = make_graph(40)
    block, _ = cut_block(graph, 1)
    cfg = config(graph)
    state, _ = train_generator(cfg, block, {}, {}, KEY)
    false = Ragged(torch.zeros(1000, 7, dtype=torch.float64), torch.tensor([0, 1000]))
    with pytest.raises(ProtocolError, match=r"^expected answers to \d+ generated rows, got"):
        learn(cfg, block, {**state, "answers": false}, {}, KEY)


@pytest.mark.parametrize("where", ["count", "rows", "width"])
def test_states_of_other_rows_are_refused(
    make_graph: MakeGraph, cut_block: CutBlock, where: str
) -> None:
    block, _ = cut_block(make_graph(40), 2)
    count = torch.ones(len(block.row_key), dtype=torch.int32)
    rows = torch.zeros(len(count), block.num_features, dtype=torch.float64)
    if where == "count":
        count[0] = 2
    state: State = {COUNTS: Ragged(count, block.off)}
    if where == "rows":
        state = {**state, GENERATED: Ragged(rows, torch.tensor([0, 1, len(rows)]))}
    else:
        rows = rows[:, :-1] if where == "width" else rows
        state = {**state, GENERATED: Ragged(rows, block.off)}
    with pytest.raises(ProtocolError, match=r"^expected (as many )?generated (rows|features)"):
        local_graph(block, state)


def test_ratings_have_nothing_to_generate(make_graph: MakeGraph) -> None:
    cfg = config(make_graph(20))
    rated = replace(cfg, model=Model("sage", 7, 8, 1, 2, 0.5, "rating"))
    with pytest.raises(ConfigError) as caught:
        FEDSAGEPLUS.check(rated)
    assert str(caught.value) == (
        "expected nodes with features for fedsageplus and fedsage_local, which generate them, got "
        "ratings: use method=fedavg"
    )
