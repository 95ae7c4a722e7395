"""Label-guided draws: their probabilities, and what their weights estimate."""

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import pytest
import torch
from torch import Tensor

from silograph.core.errors import ConfigError, DataError
from silograph.core.key import Key
from silograph.core.kinds import Kind
from silograph.core.payload import Payload, Ragged, State
from silograph.core.setting_values import NO_MINIMUM, RowMinimum
from silograph.exchange.passes import end, forward, gradients, logits_of, predict
from silograph.exchange.pull import pull
from silograph.federation.in_process import BlockState, InProcess
from silograph.federation.messages import to_payload
from silograph.graph.block.block import ClientBlock, Route
from silograph.graph.graph import Graph
from silograph.methods.label_guided import (
    LabelGuidedOptions,
    Normalize,
    draw_distinct_rows,
    hear_drawn,
    inclusion_probability,
    joint_inclusion_probability,
    sampling_of,
    set_up_sampler,
    shares,
    tell_drawn,
    weighted_rows,
)
from silograph.nn.mini_batches import build_sampler
from silograph.nn.model import Model

KEY = Key.of(3)
Blocks = tuple[ClientBlock, Route]


def Options(  # noqa: N802
    normalize: Normalize = "paper",
    rows: Literal["drawn", "all"] = "drawn",
    weigh_loss: bool = False,
) -> LabelGuidedOptions:
    return LabelGuidedOptions(1, normalize, rows, weigh_loss)


@dataclass(frozen=True)
class Config:
    model: Model
    options: LabelGuidedOptions
    drawn: tuple[tuple[int, ...], ...] = ()
    kernels: str = "torch"
    row_minimum: RowMinimum = NO_MINIMUM


def model_of(conv: str = "gcn", layers: int = 1) -> Model:
    return Model(conv, 7, 4, 3, layers, 0.0, "multiclass")


def take_drawn(
    cfg: Any, block: ClientBlock, state: State, inbox: Payload, key: Key
) -> tuple[State, Payload]:
    """Take the rows that the test has drawn."""
    parts = [torch.tensor(sorted(set(part)), dtype=torch.int64) for part in cfg.drawn]
    off = torch.tensor([0, *itertools.accumulate(len(part) for part in parts)])
    drawn = Ragged(torch.cat(parts), off)
    share, draws = state["sampler/share"].t, state["sampler/draws"].t
    rows = weighted_rows(block, drawn, share, draws, cfg.options)
    return {**state, **to_payload(rows)}, {}


@pytest.fixture
def small(make_graph: Callable[..., Graph], cut_block: Callable[..., Blocks]) -> Blocks:
    for seed in range(100):  # until every class can be trained on
        block, route = cut_block(make_graph(7, seed=seed), 2)
        if len(block.y[block.split.train].unique()) == 3 and len(route.target) > 2:
            return block, route
    raise AssertionError("no small graph with all classes")


def engine(cut: Blocks, cfg: Config, sample: int) -> InProcess:
    fed = InProcess(cfg, *cut, cut[0].num_clients)
    set_up_sampler(fed, sample, cfg.options.normalize, KEY)
    return fed


def outcomes(
    fed: InProcess, block: ClientBlock
) -> Iterator[tuple[tuple[tuple[int, ...], ...], float]]:
    """Yield every sequence of draws of both clients, with its probability."""
    state = fed.states()[0]
    share, draws = state["sampler/share"].t, state["sampler/draws"].t.tolist()
    of_clients = []
    for a, b, s in zip(block.off[:-1].tolist(), block.off[1:].tolist(), draws, strict=True):
        q = share[a:b].tolist()
        of_clients.append(
            [
                (picks, math.prod(q[i] for i in picks))
                for picks in itertools.product(range(b - a), repeat=s)
            ]
        )
    for (left, p), (right, q) in itertools.product(*of_clients):
        yield (left, right), p * q


def run(fed: InProcess, cfg: Config, weights: dict[str, Tensor], *, announce: bool) -> None:
    fed._host._cfg = fed._host._cfg_of_round = cfg  # the test's draws
    fed.call(take_drawn, {}, what=Kind.CONTROL, key=KEY.fold(repr(cfg.drawn)))
    if announce:
        pull(fed, None, tell_drawn, hear_drawn, what=Kind.HALO_KEYS, key=KEY)
    forward(fed, cfg.model, weights, KEY.fold(repr(cfg.drawn)))


def full(cut: Blocks, model: Model, weights: dict[str, Tensor]) -> Tensor:
    """Logits of a pass without sampling."""
    fed = InProcess(Config(model, Options()), *cut, cut[0].num_clients)
    predict(fed, model, weights, KEY)
    return logits_of(model, fed.states()[0])


def test_shares_follow_the_labels_of_all_silos(small: Blocks) -> None:
    block, _ = small
    fed = engine(small, Config(model_of(), Options()), 4)
    share = fed.states()[0]["sampler/share"].t
    label = torch.where(block.split.train, block.y, 3).tolist()
    client = block.client.tolist()
    for row, got in enumerate(share.tolist()):
        mine = [label[i] for i in range(len(label)) if client[i] == client[row]]
        everywhere = {k: label.count(k) for k in set(mine)}
        expected = everywhere[label[row]] / (mine.count(label[row]) * sum(everywhere.values()))
        assert got == pytest.approx(expected, abs=1e-15)
    for c in range(2):
        assert float(share[block.client == c].sum()) == pytest.approx(1, abs=1e-14)


def test_inclusion_is_the_share_of_outcomes_that_hold_a_node(small: Blocks) -> None:
    block, _ = small
    fed = engine(small, Config(model_of(), Options()), 5)
    share, draws = (fed.states()[0][f"sampler/{name}"].t for name in ("share", "draws"))
    rows = len(share)
    single, joint = torch.zeros(rows).double(), torch.zeros(rows, rows).double()
    for drawn, p in outcomes(fed, block):
        hit = torch.zeros(rows, dtype=torch.bool)
        for c, picks in enumerate(drawn):
            hit[int(block.off[c]) + torch.tensor(picks)] = True
        single[hit] += p
        joint += p * (hit[:, None] & hit).double()
    expected = inclusion_probability(share, draws[block.client])
    torch.testing.assert_close(single, expected, rtol=0, atol=1e-12)
    for c in range(2):
        own = (block.client == c).nonzero()[:, 0]
        u, v = torch.cartesian_prod(own, own).T
        other = u != v
        got = joint_inclusion_probability(share[u], share[v], draws[c])
        torch.testing.assert_close(got[other], joint[u, v][other], rtol=0, atol=1e-12)


def test_certain_nodes_and_no_draws() -> None:
    q, none = torch.tensor([1.0, 0.5]).double(), torch.tensor([0, 0])
    assert inclusion_probability(q, torch.tensor([3, 1])).tolist() == [1.0, 0.5]
    assert inclusion_probability(torch.tensor([0.5]).double(), none[:1]).tolist() == [0.0]


@pytest.mark.law(sample=6)
@pytest.mark.parametrize("conv", ["gcn", "graphconv", "sage"])  # linear in the sum
def test_sums_of_drawn_senders_are_unbiased_where_all_rows_are_evaluated(
    small: Blocks, conv: str
) -> None:
    block, _ = small
    model, options = model_of(conv), Options("paper", "all")
    weights = model.init_weights(KEY, torch.float64)
    fed = engine(small, Config(model, options), 4)
    mean = torch.zeros(len(block.row_key), 3, dtype=torch.float64)
    for drawn, p in outcomes(fed, block):
        run(fed, Config(model, options, drawn), weights, announce=False)
        mean += p * logits_of(model, fed.states()[0])
        fed._host.states = [BlockState(len(fed.ids), end(fed.states()[0]))]
    torch.testing.assert_close(mean, full(small, model, weights), rtol=0, atol=1e-10)


@pytest.mark.law(sample=3)
@pytest.mark.parametrize(
    ("normalize", "unbiased"), [("conditional", True), ("paper", False), ("none", False)]
)
def test_drawn_rows_are_unbiased_given_that_they_are_drawn(
    small: Blocks, normalize: Normalize, unbiased: bool
) -> None:
    block, _ = small
    model, options = model_of("gcn"), Options(normalize)
    weights = model.init_weights(KEY, torch.float64)
    fed = engine(small, Config(model, options), 4)
    total = torch.zeros(len(block.row_key), 3, dtype=torch.float64)
    seen = torch.zeros(len(block.row_key), 1, dtype=torch.float64)
    for drawn, p in outcomes(fed, block):
        run(fed, Config(model, options, drawn), weights, announce=True)
        state = fed.states()[0]
        local = state["pass/rows"]
        assert isinstance(local, Ragged)
        rows = local.t + torch.repeat_interleave(block.off[:-1], local.off.diff())
        total[rows] += p * logits_of(model, state)
        seen[rows] += p
        fed._host.states = [BlockState(len(fed.ids), end(state))]
    gap = float((total / seen - full(small, model, weights)).abs().max())
    assert (gap < 1e-10) == unbiased


@pytest.mark.law(sample=24)
@pytest.mark.parametrize(
    "options",
    [Options("paper", "all"), Options("conditional", "drawn"), Options("conditional", "all")],
    ids=lambda options: f"{options.normalize}-{options.rows}",
)
def test_many_draws_agree_within_their_spread(
    make_graph: Callable[..., Graph], cut_block: Callable[..., Blocks], options: LabelGuidedOptions
) -> None:
    """Logits of a row, over those draws that evaluate it, are those of all rows on average."""
    cut = cut_block(make_graph(40), 3)
    block, _ = cut
    model, drawn_only = model_of("gcn"), options.rows == "drawn"
    weights = model.init_weights(KEY, torch.float64)
    fed = engine(cut, Config(model, options), 20)
    share, draws = (fed.states()[0][f"sampler/{name}"].t for name in ("share", "draws"))
    seen, sums, squares = (torch.zeros(40, width).double() for width in (1, 3, 3))
    for number in range(300):
        keys = [KEY.fold(number, c) for c in range(3)]
        samplers = sampling_of(block, share, draws).samplers
        drawn_rows = draw_distinct_rows(samplers, draws.tolist(), keys)
        drawn = tuple(
            tuple(part.tolist()) for part in drawn_rows.t.split(drawn_rows.off.diff().tolist())
        )
        run(fed, Config(model, options, drawn), weights, announce=drawn_only)
        state = fed.states()[0]
        local = state["pass/rows"]
        assert isinstance(local, Ragged)
        rows = local.t + torch.repeat_interleave(block.off[:-1], local.off.diff())
        logits = logits_of(model, state)
        seen[rows] += 1
        sums[rows] += logits
        squares[rows] += logits**2
        fed._host.states = [BlockState(len(fed.ids), end(state))]
    assert bool((seen == 300).all()) != drawn_only
    assert float(seen.min()) > 30
    mean = sums / seen
    error = ((squares / seen - mean**2).clamp(min=0) / seen).sqrt()
    gap = (mean - full(cut, model, weights)).abs()
    assert bool((gap <= 5 * error + 1e-9).all())  # 120 values; a lone row has no spread
    assert float((error > 1e-3).double().mean()) > 0.5


def test_draws_do_not_depend_on_the_order_of_nodes() -> None:
    share = torch.rand(30, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    share, key = share / share.sum(), torch.arange(30) * 7919
    order = torch.randperm(30, generator=torch.Generator().manual_seed(1))
    samplers = build_sampler(share, key), build_sampler(share[order], key[order])
    plain, moved = (draw_distinct_rows([own], [12], [KEY]).t for own in samplers)
    assert plain.tolist() == sorted(order[moved].tolist())
    assert draw_distinct_rows(samplers, [0, 0], [KEY, KEY]).off.tolist() == [0, 0, 0]


def test_largest_remainders_get_what_is_left() -> None:
    assert shares(7, [10, 10, 10]) == [3, 2, 2]
    assert shares(1, [1, 2, 4]) == [0, 0, 1]
    assert sum(shares(1234, [7, 900, 13, 4000])) == 1234
    assert shares(5, [2, 3]) == [2, 3]


def test_what_cannot_be_drawn(
    small: Blocks, make_graph: Callable[..., Graph], cut_block: Callable[..., Blocks]
) -> None:
    cfg = Config(model_of(), Options())
    with pytest.raises(
        ConfigError, match="expected sample of at most 7, the nodes of all silos, got 8"
    ):
        set_up_sampler(InProcess(cfg, *small, 2), 8, "paper", KEY)
    with pytest.raises(
        ConfigError, match="at least 2 draws from every silo with normalize=conditional"
    ):
        set_up_sampler(InProcess(cfg, *small, 2), 2, "conditional", KEY)
    four = Config(Model("gcn", 7, 4, 4, 1, 0.0, "multiclass"), Options())
    with pytest.raises(
        DataError, match="training nodes of every class, got none of class 3 in any"
    ):
        set_up_sampler(InProcess(four, *small, 2), 4, "paper", KEY)
    several = cut_block(make_graph(20, multilabel=True), 2)
    with pytest.raises(DataError, match="one label a node for label-guided sampling, got several"):
        set_up_sampler(InProcess(cfg, *several, 2), 4, "paper", KEY)


def test_silos_that_never_draw_are_named(small: Blocks, caplog: pytest.LogCaptureFixture) -> None:
    fed = InProcess(Config(model_of(), Options()), *small, 2)
    set_up_sampler(fed, 2, "paper", KEY)
    assert caplog.messages == []
    set_up_sampler(fed, 1, "paper", KEY)
    (idle,) = (i for i, s in enumerate(fed.states()[0]["sampler/draws"].t.tolist()) if not s)
    assert caplog.messages == [
        f"1 of 2 silos draw no node in any step ({fed.ids[idle]} first): raise sample, 1 now"
    ]


def dense_loss(
    cut: Blocks, cfg: Config, state: State, weights: dict[str, Tensor], rows: Tensor
) -> Tensor:
    """Loss of drawn rows on the joined graph, message by message: the oracle of the way back."""
    (block, route), model = cut, cfg.model
    n = len(block.row_key)
    inside = torch.from_numpy(block.adj.scipy().toarray()).double()
    halo = torch.from_numpy(block.halo.adj.scipy().toarray()).double()
    across = torch.zeros(n, n, dtype=torch.float64)
    for row, slot in halo.nonzero().tolist():
        across[row, block.halo.boundary[route.target[slot]]] = 1
    degree = (inside + across).sum(1) + 1
    share, draws = state["sampler/share"].t, state["sampler/draws"].t
    p = inclusion_probability(share, draws[block.client])
    taken = torch.zeros(n).double()
    taken[rows] = 1
    v, u = torch.meshgrid(torch.arange(n), torch.arange(n), indexing="ij")
    both = joint_inclusion_probability(share[u], share[v], draws[block.client][v])
    if cfg.options.normalize == "conditional":
        weight = inside * p[v] / both + across / p[u] + torch.eye(n)
    else:
        weight = (inside + across + torch.eye(n)) / (
            p[u] if cfg.options.normalize == "paper" else 1
        )
    weight = weight * taken[:, None] * taken / (degree[:, None] * degree).sqrt()
    assert isinstance(block.x, Tensor)
    h = block.x
    for layer in range(model.layers):
        h = weight @ (h @ weights[f"{layer}.weight"]) + weights[f"{layer}.bias"]
        h = torch.relu(h) if layer < model.layers - 1 else h
    train = block.split.train & (taken > 0)
    losses = torch.nn.functional.cross_entropy(h[train], block.y[train], reduction="none")
    return (losses / p[train]).sum() / block.split.train.sum()


@pytest.mark.law(sample=6)
@pytest.mark.parametrize("normalize", ["paper", "conditional", "none"])
@pytest.mark.parametrize("block_size", [1, 3])
def test_the_way_back_is_autograd_of_the_drawn_loss(
    make_graph: Callable[..., Graph],
    cut_block: Callable[..., Blocks],
    block_size: int,
    normalize: Normalize,
) -> None:
    cut = cut_block(make_graph(40), 3)
    block, _ = cut
    model, options = model_of("gcn", 3), Options(normalize, weigh_loss=True)
    weights = model.init_weights(KEY, torch.float64)
    whole = engine(cut, Config(model, options), 30)
    state = whole.states()[0]

    fed = InProcess(Config(model, options), *cut, block_size)
    set_up_sampler(fed, 30, normalize, KEY)
    fed.call(every_second, {}, what=Kind.CONTROL, key=KEY)
    pull(fed, None, tell_drawn, hear_drawn, what=Kind.HALO_KEYS, key=KEY)
    grads, loss = gradients(fed, model, weights, KEY, weighed=True)

    rows = torch.cat([torch.arange(int(a), int(b), 2) for a, b in itertools.pairwise(block.off)])
    leaves = {name: w.clone().requires_grad_() for name, w in weights.items()}
    expected = dense_loss(cut, Config(model, options), state, leaves, rows)
    assert loss == pytest.approx(float(expected.detach()), abs=1e-10)
    for name, g in zip(leaves, torch.autograd.grad(expected, list(leaves.values())), strict=True):
        torch.testing.assert_close(grads[name], g, rtol=0, atol=1e-10)


def every_second(
    cfg: Any, block: ClientBlock, state: State, inbox: Payload, key: Key
) -> tuple[State, Payload]:
    """Take every second row of each client."""
    parts = [torch.arange(0, int(n), 2) for n in block.off.diff()]
    off = torch.tensor([0, *itertools.accumulate(len(part) for part in parts)])
    drawn = Ragged(torch.cat(parts), off)
    share, draws = state["sampler/share"].t, state["sampler/draws"].t
    rows = weighted_rows(block, drawn, share, draws, cfg.options)
    return {**state, **to_payload(rows)}, {}
