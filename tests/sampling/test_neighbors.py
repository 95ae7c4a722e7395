"""Laws of all neighbor samplers, by table: a new one is a line here.

Draws are hashes, so enumerating what may be drawn means drawing under many keys until every set has
come, and weighing each set by its probability, which the table knows in closed form.
"""

import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from crossed import crossed
from layers import model_of
from mistakes import raises_code
from runs import FAST, go, of, run_until, same_bits
from silograph.core.config import make_config
from silograph.core.errors import ConfigError, ProtocolError
from silograph.core.key import Key
from silograph.core.kinds import Kind
from silograph.core.payload import Ragged, Stacked, State, take
from silograph.core.setting_values import lin
from silograph.core.work import metered
from silograph.experiment.resolve.resolve import choose, make_neighbors
from silograph.experiment.resolve.run_request import Own
from silograph.experiment.run.run import resume
from silograph.federation.field_specs import FieldSpec, FieldSpecs
from silograph.graph.block.block import ClientBlock, Route, make_block, whole
from silograph.graph.csr import CSR
from silograph.graph.graph import Graph, Split
from silograph.methods import METHODS
from silograph.methods.base import MethodConfig, NoOptions
from silograph.methods.local_training import state_specs
from silograph.nn.backends import BACKENDS, COMPILED
from silograph.nn.conv import Params
from silograph.nn.correction import Correction, Proximal, Shift
from silograph.nn.fit import Fitted, Schedule, Training, TrainingInputs, whole_memory
from silograph.nn.forward import AnyModel
from silograph.nn.mini_batches import FULL, Drawn, Fanout, Neighbors, Reached, Signal, Stateless
from silograph.nn.model import Model
from silograph.nn.optim import SGD, Adam, Optimizer
from silograph.sampling.fedgrains import FedGrains
from silograph.sampling.layer_wise import FastGCN, Ladies
from silograph.sampling.neighbors import (
    NEIGHBORS,
    Bernoulli,
    Depth,
    DropEdge,
    DropNode,
    FullOptions,
    NeighborSampler,
)
from silograph.study.tune import chosen_ranges, part_options

MakeGraph = Callable[..., Graph]
CutBlock = Callable[..., tuple[ClientBlock, Route]]
KEYS = 3000
EDGES = [(0, 1), (0, 2), (0, 3), (0, 4), (0, 5), (1, 2), (4, 6), (5, 7), (6, 7)]


@dataclass(frozen=True)
class Tempered(Stateless):
    """Keeps each neighbor with a probability of the client's own, lower after a step of high loss.

    A sampler with state, as those that learn have.
    """

    keep: float = 0.8

    def fanout(self, hops: int) -> None:
        """It is not compiled."""

    def why_not(self, model: AnyModel) -> str | None:
        """Any model can."""

    def maps(self, model: AnyModel) -> tuple[tuple[int, ...], ...]:
        """None."""
        return ()

    def specs(self, model: AnyModel) -> FieldSpecs:
        """A probability, and the steps taken."""
        return {
            "keep": FieldSpec(Stacked, (), torch.float64, low=0, high=1),
            "steps": FieldSpec(Stacked, (), torch.int64, low=0),
        }

    def init(self, block: ClientBlock, model: AnyModel, key: Key) -> State:
        """All clients alike."""
        keep = torch.full((block.num_clients,), self.keep, dtype=torch.float64)
        return {"keep": Stacked(keep), "steps": Stacked(torch.zeros_like(keep).long())}

    def draw(self, block: ClientBlock, reached: Reached, hop: int, key: Key, state: State) -> Drawn:
        """Keep neighbors by the client's own probability; scale by drawn degrees."""
        every = FULL.draw(block, reached, hop, key, state)
        chance = state["keep"].t[block.client[reached.rows]]
        u = key.fold("tempered").uniform(block.row_key[every.neighbor])[:, 0]
        kept = u <= chance[every.position]
        share = (1 / chance[every.position[kept]]).to(every.share.dtype)
        return Drawn(every.position[kept], every.neighbor[kept], share, trace={"chance": chance})

    def learn(self, block: ClientBlock, state: State, signal: Signal) -> State:
        """Move the probability of the clients that took part."""
        assert all(torch.equal(r.clients, signal.clients) for r, _ in signal.draws)
        assert all(len(d.trace["chance"]) == len(r.rows) for r, d in signal.draws)
        keep, steps = state["keep"].t.clone(), state["steps"].t.clone()
        keep[signal.clients] = (self.keep + 1 / (1 + signal.loss.double())) / 2
        steps[signal.clients] += 1
        return {"keep": Stacked(keep), "steps": Stacked(steps)}


TEMPERED = NeighborSampler(
    "tempered", "one with state", "none", FullOptions, lambda options, depth: Tempered()
)
SAMPLERS: dict[str, Neighbors] = {
    "full": FULL,
    "fanout": Fanout((2, 2)),
    "bernoulli": Bernoulli(0.6),
    "bernoulli, by degree": Bernoulli(0.6, by_degree=True),
    "fastgcn": FastGCN(3),
    "ladies": Ladies(3),
    "ladies, normalized": Ladies(3, normalize=True),
    "tempered": Tempered(),
    "drop_edge": DropEdge(0.4),
    "drop_node": DropNode(0.4),
    "fedgrains": FedGrains(4, 2, alpha=10.0, lr=0.01, width=8),
    "fedgrains, sampled degrees": FedGrains(
        4, 2, alpha=10.0, learns_z=False, sampled_degrees=True, width=8
    ),
    "fedgrains, untrained": FedGrains(4, 2, policy="untrained", width=8),
    "fedgrains, uniform": FedGrains(4, 2, policy="uniform"),
}
# These choose among the candidates of a whole batch.
BY_BATCH = ("fedgrains",)
BY_LAYER = {"fastgcn", "ladies"}  # their sums are enumerated in test_layer_wise.py
SAMPLER = pytest.mark.parametrize("name", SAMPLERS)
Probability = Callable[[int, int], float]  # of a set of k among d neighbors
ENUMERATED: dict[str, tuple[Neighbors, Probability, Callable[[int], float]]] = {
    "full": (FULL, lambda d, k: float(k == d), lambda d: 1.0),
    "fanout": (Fanout((3,)), lambda d, k: (k == 3) / math.comb(d, 3), lambda d: 1.0),
    "bernoulli": (Bernoulli(0.4), lambda d, k: 0.4**k * 0.6 ** (d - k), lambda d: 1.0),
    "bernoulli, by degree": (
        Bernoulli(0.4, by_degree=True),
        lambda d, k: 0.4**k * 0.6 ** (d - k),
        lambda d: 1 - 0.6**d,
    ),
    "drop_edge": (DropEdge(0.6), lambda d, k: 0.4**k * 0.6 ** (d - k), lambda d: 0.4),
    "drop_node": (DropNode(0.6), lambda d, k: 0.4**k * 0.6 ** (d - k), lambda d: 1.0),
    "fedgrains": (
        FedGrains(2, 1, policy="uniform"),
        lambda d, k: (k == 2) / math.comb(d, 2),
        lambda d: 2 / d,
    ),
}


def star_like(make_graph: MakeGraph) -> ClientBlock:
    """One client with 8 nodes; node 0 has 5 neighbors."""
    rows, cols = torch.tensor(EDGES + [(b, a) for a, b in EDGES]).T
    graph = replace(make_graph(8), adj=CSR.from_pairs(rows, cols, (8, 8)))
    everyone = torch.ones(8, dtype=torch.bool)
    block, _ = make_block(graph, whole(graph), Split(everyone, ~everyone, ~everyone), torch.float64)
    return block


def reached_by(rows: list[int], clients: int = 1) -> Reached:
    t = torch.tensor(rows)
    off = torch.tensor([0, *[len(t)] * clients])
    return Reached(t, torch.zeros_like(t), torch.arange(clients), off)


def test_every_registered_sampler_is_in_the_tables() -> None:
    assert {name.partition(",")[0] for name in ENUMERATED} | BY_LAYER == set(NEIGHBORS)
    assert set(NEIGHBORS) <= set(SAMPLERS)
    assert all(name == sampler.name for name, sampler in NEIGHBORS.items())


@pytest.mark.law(sample=24)
@pytest.mark.parametrize("name", ENUMERATED)
def test_the_expected_sum_by_enumeration(make_graph: MakeGraph, name: str) -> None:
    block = star_like(make_graph)
    sampler, probability, factor = ENUMERATED[name]
    assert isinstance(block.x, Tensor)
    found: dict[tuple[int, ...], Tensor] = {}
    sets = [s for k in range(6) for s in itertools.combinations(range(1, 6), k)]
    possible = {s for s in sets if probability(5, len(s)) > 0}
    for number in range(KEYS):
        drawn = sampler.draw(block, reached_by([0]), 0, Key.of(number), {})
        found[tuple(drawn.neighbor.sort().values.tolist())] = drawn.share @ block.x[drawn.neighbor]
        if number >= 30 * len(possible) and set(found) == possible:
            break  # thirty draws for each set have shown no other
    assert set(found) == possible
    mean = sum(probability(5, len(s)) * total for s, total in found.items())
    torch.testing.assert_close(mean, factor(5) * block.x[1:6].sum(0), rtol=0, atol=1e-12)


@SAMPLER
def test_one_key_draws_the_same_again_and_changes_nothing(make_graph: MakeGraph, name: str) -> None:
    block, sampler = star_like(make_graph), SAMPLERS[name]
    state = sampler.init(block, model_of("gcn"), Key.of(0))
    before = {field: f.t.clone() for field, f in state.items()}
    one, two = (sampler.draw(block, reached_by([0, 4]), 0, Key.of(3), state) for _ in range(2))
    for part in ("position", "neighbor", "share"):
        assert torch.equal(getattr(one, part), getattr(two, part))
    assert one.share.dtype is torch.float64
    assert all(torch.equal(before[field], f.t) for field, f in state.items())


@pytest.mark.parametrize("name", [n for n in SAMPLERS if not n.startswith((*BY_BATCH, "ladies"))])
def test_draws_of_rows_depend_on_no_other_rows(make_graph: MakeGraph, name: str) -> None:
    block, sampler = star_like(make_graph), SAMPLERS[name]
    state = sampler.init(block, model_of("gcn"), Key.of(0))
    together = sampler.draw(block, reached_by([0, 4, 6]), 0, Key.of(3), state)
    alone = sampler.draw(block, reached_by([4]), 0, Key.of(3), state)
    mine = together.position == 1
    assert torch.equal(together.neighbor[mine], alone.neighbor)
    assert torch.equal(together.share[mine], alone.share)


def test_an_edge_is_dropped_in_both_directions(make_graph: MakeGraph) -> None:
    """And convolutions scale by what is left of the degrees, at senders too."""
    block, everyone = star_like(make_graph), list(range(8))
    drawn = DropEdge(0.5).draw(block, reached_by(everyone), 0, Key.of(3), {})
    among = torch.zeros(8, 8)
    among[drawn.position, drawn.neighbor] = 1
    assert 0 < among.sum() < 2 * len(EDGES)
    assert torch.equal(among, among.T)
    assert drawn.degree is not None
    assert torch.equal(drawn.degree, among.sum(1).double())
    few = DropEdge(0.5).draw(block, reached_by([4]), 0, Key.of(3), {})
    assert few.degree is not None
    assert torch.equal(few.degree, drawn.degree)


def test_a_dropped_node_is_dropped_for_all(make_graph: MakeGraph) -> None:
    block, everyone = star_like(make_graph), list(range(8))
    drawn = DropNode(0.5).draw(block, reached_by(everyone), 0, Key.of(3), {})
    full = FULL.draw(block, reached_by(everyone), 0, Key.of(3), {})
    senders = set(drawn.neighbor.tolist())
    assert 0 < len(senders) < 8
    kept = [v in senders for v in full.neighbor.tolist()]
    assert torch.equal(full.neighbor[torch.tensor(kept)], drawn.neighbor)


# --- whole trainings ------------------------------------------------------------------------------

OPTIMIZERS: dict[str, Optimizer] = {"adam": Adam(0.05, 5e-4), "sgd": SGD(0.1, momentum=0.9)}


def case(
    make_graph: MakeGraph, cut_block: CutBlock, *, sparse: bool = True, clients: int = 5
) -> tuple[Model, ClientBlock]:
    """Clients of which one has no training node, and others differ in their number of batches."""
    graph = make_graph(80, sparse=sparse)
    block, _ = cut_block(graph, clients)
    train = block.split.train.clone()
    train[block.client == 1] = False
    train[(block.client == 2).nonzero()[:14, 0]] = False
    train[block.client == 4] = True
    block = replace(block, split=replace(block.split, train=train))
    assert len((-(-block.num_train // 3)).unique()) > 2
    return model_of("gcn", graph.num_features, graph.num_classes, dropout=0.5), block


def trained(
    training: Training,
    block: ClientBlock,
    *,
    keep: bool = False,
    state: State | None = None,
) -> tuple[Fitted, Tensor]:
    """What training leaves, and the counted operations of each client with its steps."""
    start = training.model.init_weights(Key.of(1), torch.float64)
    memory: Params | None = None
    if keep:
        copies = {k: w.expand(block.num_clients, *w.shape).clone() for k, w in start.items()}
        memory = training.optimizer.init(copies)
    if state is None:
        neighbors = training.schedule.neighbors
        state = neighbors.init(block, training.model, Key.of(0))
    with metered(block.num_clients) as meter:
        found = BACKENDS["torch"].fit(
            training, TrainingInputs(block, start, memory, Key.of(3), state)
        )
    steps = meter.apart.get(Kind.OPTIMIZER)  # none where nobody trains
    return found, meter.flops if steps is None else meter.flops + steps.flops


def weights_in(found: Fitted) -> Params:
    return {
        name: w.t if isinstance(w, Stacked) else w.stacked().t for name, w in found.weights.items()
    }


def shift_of(model: Model, clients: int) -> Shift:
    weights = model.init_weights(Key.of(9), torch.float64)
    scale = torch.arange(clients, dtype=torch.float64)
    return Shift({k: scale.view(-1, *[1] * w.dim()) * w for k, w in weights.items()})


@pytest.mark.law(sample=24)
@crossed(
    {
        "corrected": ("plain", "proximal", "shift"),
        "keep": (True, False),
        "sparse": (True, False),
    },
    quick=[  # each pair of settings at least once
        ("plain", True, True),
        ("plain", False, False),
        ("proximal", True, False),
        ("proximal", False, True),
        ("shift", True, True),
        ("shift", False, False),
    ],
)
@SAMPLER
def test_a_block_is_its_clients_one_by_one(
    make_graph: MakeGraph, cut_block: CutBlock, name: str, sparse: bool, keep: bool, corrected: str
) -> None:
    """Weights, optimizer and sampler state, losses and steps to 1e-10; the work exactly."""
    model, block = case(make_graph, cut_block, sparse=sparse)
    corrections: Mapping[str, tuple[Correction, ...]] = {
        "plain": (),
        "proximal": (Proximal(0.3),),
        "shift": (shift_of(model, block.num_clients),),
    }
    optimizer = OPTIMIZERS["adam" if corrected == "plain" else "sgd"]
    training = Training(model, optimizer, Schedule(2, 3, SAMPLERS[name]), corrections[corrected])
    together, work = trained(training, block, keep=keep)
    assert together.steps.tolist() == (2 * -(-block.num_train // 3)).tolist()
    for c in range(block.num_clients):
        own = torch.tensor([c])
        alone, own_work = trained(training.of(own), block.take(own), keep=keep)
        memories = whole_memory(together.memory), whole_memory(alone.memory)
        pairs = [(weights_in(together), weights_in(alone)), memories]
        for ours, theirs in pairs:
            for field, t in theirs.items():
                torch.testing.assert_close(ours[field][own], t, rtol=0, atol=1e-10)
        torch.testing.assert_close(together.loss[own], alone.loss, rtol=0, atol=1e-10)
        rows = slice(int(block.off[c]), int(block.off[c + 1]))
        torch.testing.assert_close(together.logits[rows], alone.logits, rtol=0, atol=1e-10)
        for field, f in alone.neighbors.items():
            mine = take(together.neighbors[field], own)
            assert isinstance(mine, Stacked | Ragged)
            torch.testing.assert_close(mine.t, f.t, rtol=0, atol=1e-10)
        assert float(work[c]) == float(own_work[0])


def test_a_client_without_training_nodes_takes_no_step(
    make_graph: MakeGraph, cut_block: CutBlock
) -> None:
    model, block = case(make_graph, cut_block)
    found, _ = trained(Training(model, Adam(0.1), Schedule(2, 3, Tempered())), block)
    start = model.init_weights(Key.of(1), torch.float64)
    assert all(torch.equal(w[1], start[name]) for name, w in weights_in(found).items())
    assert found.neighbors["steps"].t.tolist() == found.steps.tolist()
    assert found.neighbors["keep"].t[1] == 0.8


@pytest.mark.law(sample=6)
@pytest.mark.parametrize(
    "sampler",
    [
        Bernoulli(1.0),
        DropEdge(0.0),
        DropNode(0.0),
        Fanout((99, 99)),
        Fanout((0, 0)),
        FedGrains(99, 2, policy="uniform"),
    ],
    ids=str,
)
def test_whoever_keeps_all_is_full(
    make_graph: MakeGraph, cut_block: CutBlock, sampler: Neighbors
) -> None:
    model, block = case(make_graph, cut_block)
    ours, theirs = (
        trained(Training(model, Adam(0.1), Schedule(2, 3, each)), block) for each in (sampler, FULL)
    )
    assert same_bits(weights_in(ours[0]), weights_in(theirs[0]))
    assert torch.equal(ours[1], theirs[1])


def test_the_work_of_a_step_is_the_closed_form(make_graph: MakeGraph) -> None:
    """One GCN layer, dense: products, one sum over e drawn edges, scales, bias, loss, optimizer."""
    block, sampler = star_like(make_graph), Bernoulli(0.6)
    model = Model("gcn", block.num_features, 6, 3, 1, 0.0, "multiclass")
    training = Training(model, SGD(0.1), Schedule(1, 8, sampler))
    _, work = trained(training, block)
    key = Key.of(3).fold("epoch", 0).fold("batch", 0).fold("neighbors", 0)
    edges = len(sampler.draw(block, reached_by(list(range(8))), 0, key, {}).position)
    n, features, outputs = 8, block.num_features, 3
    product = 2 * n * features * outputs * 2  # forward, and the weight's gradient
    sums = outputs * 2 * (2 * edges + n + 3 * n)  # edges; sender's scale; receiver's and own
    rest = outputs * 2 * n + 7 * outputs * n + 2 * (features * outputs + outputs)
    assert float(work[0]) == product + sums + rest


def test_what_a_sampler_keeps_is_declared() -> None:
    cfg = MethodConfig(
        model_of("gcn"), SGD(0.1), Schedule(1, 3, Tempered()), False, 1.0, NoOptions()
    )
    assert {"neighbors/keep", "neighbors/steps"} <= set(state_specs(cfg))


# --- whole runs -----------------------------------------------------------------------------------

RUN: dict[str, Any] = {"rounds": 4, "batch_size": 3, "local_epochs": 2, "participation": 0.6}


@pytest.mark.law(sample=24)
@pytest.mark.parametrize("name", ["bernoulli", "fastgcn", "fedgrains", "ladies", "tempered"])
def test_a_run_goes_on_from_where_it_was(
    make_graph: MakeGraph, tmp_path: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(NEIGHBORS, "tempered", TEMPERED)
    graph, options = make_graph(60), {**RUN, "neighbors": name, "method": "fedavg"}
    straight = go(graph, **options)
    run_until(monkeypatch, graph, 3, tmp_path / "cut", **FAST | options)
    again = resume(tmp_path / "cut", graph=graph)
    assert same_bits(of(straight), of(again))
    assert list(straight.ledger.records) == list(again.ledger.records)


def test_the_plan_says_what_torch_draws(
    make_graph: MakeGraph, capsys: pytest.CaptureFixture[str]
) -> None:
    go(make_graph(), neighbors="bernoulli", progress="plain", **RUN)
    assert "torch kernels, neighbors=bernoulli drawn in torch, " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"neighbors": "bernouli"},
            "unknown neighbor sampler 'bernouli': did you mean 'bernoulli'?",
        ),
        (
            {"neighbors": "bernoulli", "fanout": "3"},
            "fanout: neighbors bernoulli has no such option, but neighbors fanout has it: leave it "
            "out, or set neighbors=fanout",
        ),
        (
            {"fanout": "3", "options": {"neighbors.fanout": "4"}},
            "expected fanout once, got fanout and neighbors.fanout: leave one of them out",
        ),
        (
            {"options": {"neighbors.keep": 0.5}},
            "option neighbors.keep: neighbors full has no such option, but neighbors bernoulli has "
            "it: leave it out, or set neighbors=bernoulli",
        ),
        (
            {"neighbors": "bernoulli", "options": {"neighbors.keep": 0}},
            "keep: input should be greater than 0, got 0 (options of bernoulli)",
        ),
        (
            {"neighbors": "bernoulli", "model": "gat"},
            "expected a model that takes the draws of neighbors=bernoulli, got gat: attention is "
            "normalized over the neighbors that were drawn; use neighbors=full or fanout",
        ),
        (
            {"neighbors": "ladies", "model": "gat"},
            "expected a model that takes the draws of neighbors=ladies, got gat: attention is "
            "normalized over the neighbors that were drawn; use neighbors=full or fanout",
        ),
        (
            {"neighbors": "bernoulli", "kernels": "compiled"},
            "expected a run for compiled kernels, got: Bernoulli as neighbor sampler is not "
            "compiled; use kernels=torch",
        ),
        (
            {"neighbors": "bernoulli", "method": "cagnet"},
            "expected participation=1 and neither batch_size nor fanout with global training, "
            "whose steps all silos take together: leave out neighbors",
        ),
    ],
)
def test_what_cannot_be_drawn_is_refused(
    make_graph: MakeGraph, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        go(make_graph(), **options)
    assert str(caught.value) == message


def test_compiled_kernels_refuse_what_they_do_not_draw(
    make_graph: MakeGraph, cut_block: CutBlock
) -> None:
    model, block = case(make_graph, cut_block)
    training = Training(model, SGD(0.1), Schedule(1, 3, Bernoulli(0.5)))
    assert COMPILED.why_not(training, torch.device("cpu")) == (
        "Bernoulli as neighbor sampler is not compiled"
    )
    start = model.init_weights(Key.of(1), torch.float64)
    with pytest.raises(ProtocolError, match="got: Bernoulli as neighbor sampler is not comp"):
        BACKENDS["compiled"].fit(training, TrainingInputs(block, start, None, Key.of(3)))


def test_options_of_a_sampler_can_be_tuned() -> None:
    fields = part_options(make_config({"neighbors": "bernoulli"}), Own())
    assert {"neighbors.keep", "neighbors.rescale"} < set(fields)
    found = chosen_ranges(METHODS["fedavg"], ["neighbors.keep"], {}, (), fields)
    assert found == {"neighbors.keep": lin(0.1, 1.0)}
    with raises_code(ConfigError, "unknown-name", what="key to tune", got="neighbors.keep"):
        chosen_ranges(METHODS["fedavg"], ["neighbors.keep"], {})


def test_options_make_samplers() -> None:
    cases: list[tuple[dict[str, Any], Neighbors]] = [
        ({}, FULL),
        ({"neighbors": "full"}, FULL),
        ({"neighbors": "fanout"}, Fanout((10, 10))),
        ({"neighbors": "fanout", "fanout": "4,3"}, Fanout((4, 3))),
        ({"neighbors": "fanout", "options": {"neighbors.fanout": 7}}, Fanout((7, 7))),
        ({"neighbors": "bernoulli"}, Bernoulli(0.5)),
        (
            {"neighbors": "bernoulli", "options": {"neighbors.rescale": "degree"}},
            Bernoulli(0.5, by_degree=True),
        ),
        ({"neighbors": "fastgcn"}, FastGCN(256)),
        (
            {"neighbors": "ladies", "options": {"neighbors.size": 64, "normalize": False}},
            Ladies(64),
        ),
    ]
    for given, expected in cases:
        config = make_config(given)
        assert make_neighbors(config, choose(config)) == expected
    assert NEIGHBORS["bernoulli"].make(NEIGHBORS["bernoulli"].options(), Depth(2, "layer"))
