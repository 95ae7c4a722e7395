"""Laws of FED-PUB: its limits (plain mean, local only), likeness, masks, the shared graph."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import silograph as sg
from runs import FAST, assert_close, go, rows_of, run_until, same_bits
from sessions import session
from silograph.core.errors import ConfigError
from silograph.core.key import Key
from silograph.core.payload import tensors_under
from silograph.experiment.run.run import resume
from silograph.federation.in_process import InProcess
from silograph.federation.program import Program
from silograph.federation.session.message import own_ops
from silograph.graph.block.block import ClientBlock, Route
from silograph.graph.graph import Graph
from silograph.methods import FEDPUB, LOCAL, MethodConfig, NoOptions, Params, ServerState
from silograph.methods.fedpub import (
    FedPubOptions,
    corrections,
    cosines,
    embedding_of,
    functional_embedding,
    mean_of,
    mean_similarity,
    mixing_weights,
    shared_graph,
    stages_before_classifier,
)
from silograph.nn.backends import TORCH
from silograph.nn.conv import convolve
from silograph.nn.fit import Schedule
from silograph.nn.forward import forward_pass, leave, whole_pass
from silograph.nn.masked import Masked, NearStart, SparseMasks, prune_mask
from silograph.nn.model import Model
from silograph.nn.optim import SGD, Adam

Built = tuple[ClientBlock, Route]
MakeGraph = Callable[..., Graph]
CutBlock = Callable[..., Built]
KEY, FIRST = Key.of(5), Key.of(9)
BARE: dict[str, Any] = {"masks": False, "proximal": 0.0, "l1": 0.0, "communities": 1}


def config(graph: Graph, **options: Any) -> MethodConfig[FedPubOptions]:
    own = FedPubOptions(**{"communities": 1, **options})
    return MethodConfig(
        model=Model("gcn", graph.num_features, 8, graph.num_classes, 2, 0.5, graph.task),
        optimizer=Adam(0.05, 5e-4),
        schedule=Schedule(2),
        keep_optimizer=True,
        participation=1.0,
        options=own,
        backend=TORCH,
        corrections=corrections(own) if own.masks or own.proximal else (),
    )


def run(
    cfg: MethodConfig[FedPubOptions], fed: InProcess, rounds: int = 3
) -> tuple[ServerState, list[Params]]:
    """The last state, and the models that clients returned, pruned, in every round."""
    state = FEDPUB.init(fed, cfg, cfg.model.init_weights(FIRST, torch.float64), KEY)
    kept = []
    for t in range(1, rounds + 1):
        fed.start_round(t)
        state, _ = FEDPUB.round(fed, cfg, state, t, KEY)
        kept.append({n: w.clone() for n, w in tensors_under("weights", fed.states()[0]).items()})
    return state, kept


def test_scale_0_is_the_plain_mean(make_graph: MakeGraph, cut_block: CutBlock) -> None:
    """No masks, no proximal term: all clients get the mean of all models, each counting alike."""
    graph = make_graph(60, sparse=True)
    block, route = cut_block(graph, 5)
    state, kept = run(
        config(graph, scale=0.0, **BARE),
        InProcess(config(graph, scale=0.0, **BARE), block, route, 5),
    )
    for name, w in state.memory.items():
        mean = kept[-1][name].mean(0)
        torch.testing.assert_close(w, mean.expand_as(w), rtol=0, atol=1e-10)


def test_a_scale_without_bound_is_local_only(make_graph: MakeGraph, cut_block: CutBlock) -> None:
    graph = make_graph(60, sparse=True)
    block, route = cut_block(graph, 5)
    cfg = config(graph, scale=1e9, **BARE)
    _, kept = run(cfg, InProcess(cfg, block, route, 5))
    alone: MethodConfig[Any] = replace(cfg, options=NoOptions())  # type: ignore[arg-type]
    fed = InProcess(alone, block, route, 5)
    state = LOCAL.init(fed, alone, cfg.model.init_weights(FIRST, torch.float64), KEY)
    for t in range(1, 4):
        state, _ = LOCAL.round(fed, alone, state, t, KEY)
    for name, w in tensors_under("weights", fed.states()[0]).items():
        torch.testing.assert_close(kept[-1][name], w, rtol=0, atol=1e-10)


@pytest.mark.law(sample=6)
@pytest.mark.parametrize("seed", range(10))
def test_clients_of_one_community_take_more_of_each_other(
    make_graph: MakeGraph, cut_block: CutBlock, seed: int
) -> None:
    """Half of the clients call the classes by each other's name."""
    graph = make_graph(180, classes=2, seed=seed)
    block, route = cut_block(graph, 6)
    turned = block.client >= 3
    block = replace(block, y=torch.where(turned, 1 - block.y, block.y))
    cfg = config(graph, scale=5.0)
    cfg = replace(cfg, model=replace(cfg.model, layers=3, head="linear", dropout=0.0))  # type: ignore[type-var]
    fed = InProcess(cfg, block, route, 6)
    state = FEDPUB.init(fed, cfg, cfg.model.init_weights(FIRST, torch.float64), KEY)
    for t in range(1, 6):
        state, report = FEDPUB.round(fed, cfg, state, t, KEY)
    kept = tensors_under("weights", fed.states()[0])
    every = torch.ones(6).bool()
    share = mixing_weights(cosines(embedding_of(cfg, block, kept), every), every, 5.0)
    within = torch.block_diag(torch.ones(3, 3), torch.ones(3, 3)).bool()
    within &= ~torch.eye(6).bool()
    across = torch.block_diag(torch.ones(3, 3), torch.ones(3, 3)) == 0
    assert float(share[within].mean()) > float(share[across].mean())
    assert report.client_facts["own_share"].shape == (6,)


def test_shares_by_hand() -> None:
    """Directions 0, 60 and 180 degrees: cosines 1, .5, -1 and -.5; the last client was away."""
    angle = torch.tensor([0.0, math.pi / 3, math.pi, 1.0], dtype=torch.float64)
    h = torch.stack([angle.cos(), angle.sin()], dim=1) * torch.tensor([[1.0], [5], [2], [1]])
    gives = torch.tensor([True, True, True, False])
    alike = cosines(h, gives)
    found = mixing_weights(alike, gives, 2.0)
    cosine = torch.tensor([[1, 0.5, -1], [0.5, 1, -0.5], [-1, -0.5, 1]]).double()
    expected = (2 * cosine).exp()
    expected = expected / expected.sum(1, keepdim=True)
    torch.testing.assert_close(found[:3, :3], expected, rtol=0, atol=1e-12)
    assert found[:3, 3].tolist() == [0, 0, 0]
    assert mean_similarity(alike, gives).tolist()[:3] == pytest.approx([-0.25, 0.0, -0.75])
    alone = torch.tensor([True, False, False, False])
    assert bool(mean_similarity(cosines(h, alone), alone).isnan().all())
    none = torch.zeros(4).bool()
    nobody = mixing_weights(cosines(h, none), none, 2.0)
    assert nobody.tolist() == [[0.0] * 4] * 4


def test_models_that_are_no_numbers_reach_nobody() -> None:
    models = torch.tensor([[1.0], [torch.nan], [3.0]])
    gives = torch.tensor([True, False, True])
    share = mixing_weights(cosines(torch.ones(3, 2), gives), gives, 1.0)
    assert mean_of(share, gives, models).tolist() == [[2.0]] * 3


def test_masks_multiply_the_matrices(make_graph: MakeGraph, cut_block: CutBlock) -> None:
    """Logits and the gradients of weights and masks, by autograd on the products."""
    graph = make_graph(40)
    block, _ = cut_block(graph, 3)
    inner = Model("sage", graph.num_features, 5, graph.num_classes, 2, 0.0, graph.task)
    model = Masked(inner, 0.1)
    shapes, key = model.weight_shapes, Key.of(2)
    assert set(shapes) - set(inner.weight_shapes) == set(model.masks.values())
    own = {
        name: (key.fold(name).matrix(3, math.prod(shape)) - 0.5).view(3, *shape).requires_grad_()
        for name, shape in shapes.items()
    }
    product = {
        n: own[n] * own[m] if (m := model.masks.get(n)) else own[n] for n in inner.weight_shapes
    }
    inputs = whole_pass(inner, block, torch.float64)
    ours, theirs = (
        forward_pass(model, own, inputs, None),
        forward_pass(inner, product, inputs, None),
    )
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)
    for a, b in zip(
        torch.autograd.grad(ours.square().sum(), list(own.values())),
        torch.autograd.grad(theirs.square().sum(), list(own.values())),
        strict=True,
    ):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-10)
    values = {name: w.detach() for name, w in own.items()}
    with torch.no_grad():
        scored = forward_pass(model, values, inputs, None)
        cut = {m: prune_mask(values[m], model.least) for m in model.masks.values()}
        plain = forward_pass(inner, model.products_(values, cut), inputs, None)
    assert torch.equal(scored, plain)
    assert not torch.allclose(scored, ours.detach())  # small entries count in training only


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_an_entry_on_the_edge_counts(dtype: torch.dtype) -> None:
    """0 where |M| < l1, as in the authors' code."""
    edge = torch.tensor(0.1, dtype=dtype)
    below = edge.nextafter(torch.zeros((), dtype=dtype))
    mask = torch.stack([edge, -edge, below, -below, 2 * edge, 0 * edge])
    assert torch.equal(
        prune_mask(mask, 0.1), torch.stack([edge, -edge, *(0 * mask[:2]), *mask[4:]])
    )


def test_the_optimizers_state_is_kept_by_default(make_graph: MakeGraph) -> None:
    assert go(make_graph(), method="fedpub", rounds=1).config.keep_optimizer is True


def test_what_is_added_to_gradients() -> None:
    """By autograd: l1 |M|_1 and the distance of each tensor from the start, by client."""
    generator = torch.Generator().manual_seed(3)
    drawn = (torch.randn(2, 3, 4, generator=generator, dtype=torch.float64) for _ in range(3))
    w, m, v = (t.requires_grad_() for t in drawn)
    loss = 0.3 * m.abs().sum() + 0.7 * (w - v.detach()).flatten(1).norm(dim=1).sum()
    expected = torch.autograd.grad(loss, [w, m])
    names = {"0.weight": w.detach(), "0.mask_weight": m.detach()}
    start = {"0.weight": v.detach(), "0.mask_weight": m.detach() + 1}
    grads = {name: torch.zeros_like(t) for name, t in names.items()}
    for correction in (SparseMasks(0.3), NearStart(0.7)):
        grads = correction(grads, names, start)
    for found, t in zip(grads.values(), expected, strict=True):
        torch.testing.assert_close(found, t, rtol=0, atol=1e-12)
    still = NearStart(0.7)({"0.weight": w.detach() * 0}, {"0.weight": v.detach()}, start)
    assert torch.equal(still["0.weight"], torch.zeros_like(w))


@pytest.mark.parametrize(
    ("conv", "layers", "head"),
    [("gcn", 3, "linear"), ("gcn", 2, "conv"), ("sage", 2, "conv"), ("sage", 3, "conv")],
)
def test_embeddings_are_those_of_each_model_on_the_shared_graph(
    make_graph: MakeGraph, cut_block: CutBlock, conv: str, layers: int, head: Any
) -> None:
    """Against one pass a client; classes of the classifier do not count."""
    graph = make_graph(60)
    block, _ = cut_block(graph, 4)
    cfg = config(graph)
    model = Model(conv, graph.num_features, 6, 3, layers, 0.5, graph.task, head=head)
    cfg = replace(cfg, model=model)
    weights = {
        name: torch.stack([Key.of(c).fold(name).matrix(1, math.prod(s)).view(s) for c in range(4)])
        for name, s in model.weight_shapes.items()
    }
    found = embedding_of(cfg, block, weights)
    common = shared_graph(block, 1)
    assert common.x.shape == (100, graph.num_features)
    assert abs(float(common.x.mean())) < 0.1
    assert abs(float(common.x.std()) - 1) < 0.1
    assert common.adj.nnz / 2 == pytest.approx(0.1 * 100 * 99 / 2, rel=0.2)
    dense = common.adj.tensor.to_dense()
    assert torch.equal(dense, dense.T)
    assert shared_graph(block.called(torch.tensor([2])), 1) is common
    for c in range(4):
        x = common.x
        for number in range(layers - 1):
            w = {k: t[c] for k, t in weights.items()}
            if conv == "gcn":
                hat = dense + torch.eye(100).double()
                scale = hat.sum(1).rsqrt()
                x = scale[:, None] * hat * scale @ x @ w[f"{number}.weight"]
            else:
                mean = dense @ x / dense.sum(1, keepdim=True).clamp(min=1)
                x = mean @ w[f"{number}.weight"] + x @ w[f"{number}.root"]
            x = x + w[f"{number}.bias"]
            x = x if number == layers - 2 else x.relu()
        torch.testing.assert_close(found[c], x.mean(0), rtol=0, atol=1e-9)


@pytest.mark.parametrize("layers", [2, 3])
@pytest.mark.parametrize("conv", ["gcn", "sage", "gat", "gin", "mlp", "appnp"])
def test_means_before_the_last_product_are_those_after_it(
    make_graph: MakeGraph, cut_block: CutBlock, conv: str, layers: int
) -> None:
    """For every model: pass whole copies of the shared graph through each client's, then mean."""
    graph = make_graph(40, features=5)
    block, _ = cut_block(graph, 3)
    model = Model(conv, graph.num_features, 4, 3, layers, 0.0, graph.task, residual=conv == "gcn")
    weights = {
        n: torch.stack([w + c for c in range(3)])
        for n, w in model.init_weights(FIRST, torch.float64).items()
    }
    found = functional_embedding(model, block, weights, 1)
    common, stages = shared_graph(block, 1), stages_before_classifier(model)
    for c in range(3):
        x, messages = common.x, common.messages(1)
        for number, stage in enumerate(stages):
            start = f"{number}."
            p = {k.removeprefix(start): w[c] for k, w in weights.items() if k.startswith(start)}
            x = leave(stage, convolve(stage.conv, p, x, messages), x, None, messages)
        torch.testing.assert_close(found[c], x.mean(0), rtol=1e-10, atol=1e-10)


def test_who_is_away_keeps_its_start(make_graph: MakeGraph, cut_block: CutBlock) -> None:
    graph = make_graph(60)
    block, route = cut_block(graph, 5)
    cfg = replace(config(graph), participation=0.6)
    fed = InProcess(cfg, block, route, 5)
    state = FEDPUB.init(fed, cfg, cfg.model.init_weights(FIRST, torch.float64), KEY)
    for t in range(1, 4):
        before = state.memory
        state, report = FEDPUB.round(fed, cfg, state, t, KEY)
        same = [
            all(torch.equal(w[c], before[name][c]) for name, w in state.memory.items())
            for c in range(5)
        ]
        assert same == [name not in report.participants for name in fed.ids]
        for fact in ("own_share", "similarity", "sparsity"):  # of who was away nothing is known
            told = report.client_facts[fact]
            assert told.isnan().tolist() == same
            assert report.facts[fact] == pytest.approx(float(told.nanmean()))


@pytest.mark.parametrize("why", ["untrained", "diverged"])
def test_who_has_no_model_to_give_gives_none(
    make_graph: MakeGraph, cut_block: CutBlock, why: str
) -> None:
    """A client without training nodes, or whose training diverged: the others do without it."""
    graph = make_graph(60)
    block, route = cut_block(graph, 4)
    mine = block.client == 2
    if why == "untrained":
        changed = replace(block, split=replace(block.split, train=block.split.train & ~mine))
    else:
        assert isinstance(block.x, Tensor)
        changed = replace(block, x=torch.where(mine[:, None], torch.nan, block.x))
    cfg, others = config(graph, l1=0.5), torch.tensor([0, 1, 3])
    found = []
    for part, size in ((changed, 4), (block.take(others), 3)):
        fed = InProcess(cfg, part, route, size)
        state = FEDPUB.init(fed, cfg, cfg.model.init_weights(FIRST, torch.float64), KEY)
        state, report = FEDPUB.round(fed, cfg, state, 1, KEY)
        found.append((state.memory, report.client_facts))
    first = cfg.model.init_weights(FIRST, torch.float64)
    for name, w in found[0][0].items():
        torch.testing.assert_close(w[others], found[1][0][name], rtol=0, atol=1e-12)
        assert torch.equal(w[2], first[name])
    for name, told in found[0][1].items():
        torch.testing.assert_close(told[others], found[1][1][name], rtol=0, atol=1e-12)
        assert bool(told[2].isnan())


def test_a_session_has_the_bits_of_a_simulation(make_graph: MakeGraph, cut_block: CutBlock) -> None:
    graph = make_graph(60, sparse=True)
    block, route = cut_block(graph, 3)
    cfg, calls = config(graph), FEDPUB.calls
    assert calls is not None
    agreed = Program(calls.setup(cfg, KEY), lambda t: calls.round(cfg, t, KEY), 2, calls.state(cfg))
    remote, _ = session(block, route, cfg, own_ops(), program=agreed)
    found = []
    for fed in (remote, InProcess(cfg, block, route, 1)):
        state = FEDPUB.init(fed, cfg, cfg.model.init_weights(FIRST, torch.float64), KEY)
        for t in (1, 2):
            fed.start_round(t)
            state, _ = FEDPUB.round(fed, cfg, state, t, KEY)
        found.append((state.memory, list(fed.ledger.records)))
    assert same_bits(found[0][0], found[1][0])
    assert found[0][1] == found[1][1]


RUN: dict[str, Any] = {"method": "fedpub", "rounds": 4, "participation": 0.6, "clients": 5}


def test_a_run_goes_on_and_leaves_the_scored_models(
    make_graph: MakeGraph, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    graph = make_graph(60)
    own = {"l1": 0.05, "communities": 1, "neighbors.k": 2, "neighbors.width": 6}
    options = {**RUN, "options": own, "neighbors": "fedgrains", "batch_size": 4}
    options["kernels"] = "torch"  # to compile the one for masks and chosen neighbors takes long
    straight = go(graph, **options)
    run_until(monkeypatch, graph, 3, tmp_path / "cut", **FAST | options)
    again = resume(tmp_path / "cut", graph=graph)
    assert rows_of(straight) == rows_of(again)
    assert list(straight.ledger.records) == list(again.ledger.records)
    assert len(straight.models) == 5
    for name, model in straight.models.items():
        assert same_bits(model.weights, again.models[name].weights)
    assert {"fact_own_share", "fact_similarity", "fact_sparsity"} <= rows_of(straight)[0].keys()


SGD_STEPS = {"optimizer": "sgd", "lr": 0.3, "momentum": 0.9}
OF_TIERS: list[Any] = [
    {"model": "gcn", "layers": 3, "head": "linear", "local_epochs": 3},
    pytest.param(  # masks and batches are a kernel of their own, which takes 20 s to compile
        {"model": "sage", "batch_size": 3, "fanout": "2,2", "keep_optimizer": False},
        marks=pytest.mark.slow,
    ),
    {"model": "sage", "decay_layers": "first", "participation": 0.6, **SGD_STEPS},
    {"model": "mlp", "dtype": "float64", "keep_optimizer": False, **SGD_STEPS},
]


@pytest.mark.law(sample=6)
@pytest.mark.parametrize("sparse", [True, False])
@pytest.mark.parametrize("shape", OF_TIERS)
def test_masks_are_compiled_to_the_same_model_and_costs(
    make_graph: MakeGraph, shape: dict[str, Any], sparse: bool
) -> None:
    """Entries are pruned, weights are pulled, and masks of unused features move, too."""
    pytest.importorskip("numba")
    graph = make_graph(60, features=12, sparse=sparse)
    options = {"method": "fedpub", "clients": 5, "rounds": 3, "dropout": 0.3, **shape}
    options["options"] = {"l1": 0.8, "proximal": 0.5, "communities": 1}
    ours, theirs = (go(graph, kernels=kernels, **options) for kernels in ("compiled", "torch"))
    assert_close(ours, theirs, 1e-10)
    assert list(ours.ledger.records) == list(theirs.ledger.records)
    assert any(row["fact_sparsity"] > 0 for row in rows_of(ours))
    for name, model in ours.models.items():
        for weight, w in theirs.models[name].weights.items():
            torch.testing.assert_close(model.weights[weight], w, rtol=0, atol=1e-10)


def test_a_pull_without_masks_is_trained_by_torch(make_graph: MakeGraph) -> None:
    """The pull alone has no compiled form: the run says so, and `auto` takes torch."""
    bare = {"masks": False, "communities": 1}
    assert go(make_graph(60), method="fedpub", rounds=1, options=bare).config.kernels == "compiled"
    own = bare | {"proximal": 0.001}
    found = go(make_graph(60), method="fedpub", rounds=1, options=own)
    assert found.config.kernels == "torch"
    with pytest.raises(ConfigError, match="correction NearStart is not compiled"):
        go(make_graph(60), method="fedpub", rounds=1, options=own, kernels="compiled")


def test_masks_need_layers(make_graph: MakeGraph) -> None:
    class Net(torch.nn.Module):
        def __init__(self, features: int, outputs: int) -> None:
            super().__init__()
            self.map = torch.nn.Linear(features, outputs)

        def forward(self, x: Tensor, edges: Tensor) -> Tensor:
            out: Tensor = self.map(x)
            return out

    options = {k: v for k, v in FAST.items() if k != "hidden"}
    with pytest.raises(ConfigError) as caught:
        sg.run(make_graph(), **options | {"method": "fedpub", "model": Net})
    assert str(caught.value) == (
        "expected a model of layers for fedpub, whose masks and embeddings are theirs, got a "
        "torch.nn.Module of your own: use one of silograph's models"
    )


def test_plain_sgd_trains_masks_too(make_graph: MakeGraph, cut_block: CutBlock) -> None:
    """Masks leave 1, at each client in its own way; biases have none."""
    graph = make_graph(60)
    block, route = cut_block(graph, 3)
    cfg = replace(config(graph), optimizer=SGD(0.5), keep_optimizer=False)
    fed = InProcess(cfg, block, route, 3)
    run(cfg, fed)
    masks = tensors_under("masks", fed.states()[0])
    assert set(masks) == {"0.mask_weight", "1.mask_weight"}
    assert not torch.equal(masks["0.mask_weight"][0], masks["0.mask_weight"][1])
