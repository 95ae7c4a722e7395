"""Training from bases with own weights and rows on top is training from whole slices.

C: clients. G: bases.
"""

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from silograph.core.errors import ProtocolError
from silograph.core.key import Key
from silograph.core.payload import Patched, Stacked, from_bases, offsets
from silograph.graph.block.block import ClientBlock, Route, SparseRows
from silograph.graph.graph import Graph
from silograph.nn.backends import BACKENDS
from silograph.nn.conv import Params
from silograph.nn.correction import Proximal, Shift
from silograph.nn.fit import Fitted, Schedule, Start, Training, TrainingInputs, whole_memory
from silograph.nn.mini_batches import Fanout
from silograph.nn.model import Model
from silograph.nn.optim import SGD, Adam
from silograph.nn.own_module import ModuleModel

pytest.importorskip("numba")

MakeGraph = Callable[..., Graph]
CutBlock = Callable[..., tuple[ClientBlock, Route]]
TIERS: tuple[str, ...] = ("torch", "compiled")
C, F, TOLERANCE = 4, 12, 1e-10
WHICH = torch.tensor([1, 0, 1, 2])
ADAM = Adam(lr=0.05, weight_decay=5e-4)
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "dense": {"sparse": False},
    "no decay": {"optimizer": Adam(0.05)},
    "sage": {"conv": "sage"},
    "one layer": {"layers": 1},
    "batches": {"schedule": Schedule(2, batch_size=3)},
    "drawn": {"schedule": Schedule(2, batch_size=4, neighbors=Fanout((2, 1)))},
    "kept": {"keep": True},
    "kept momentum": {"keep": True, "optimizer": SGD(0.1, 5e-4, 0.9), "sparse": False},
    "pulled": {"corrections": (Proximal(0.3),)},
}


class World:
    """A block, a training, and weights that differ by client."""

    def __init__(self, make_graph: MakeGraph, cut_block: CutBlock, **changes: Any) -> None:
        graph = make_graph(60, features=F, sparse=changes.get("sparse", True), missing=0.1)
        self.block, _ = cut_block(graph, C, dtype=torch.float64)
        conv, layers = changes.get("conv", "gcn"), changes.get("layers", 2)
        self.model = Model(conv, F, 6, graph.num_classes, layers, 0.5, graph.task)
        steps = changes.get("optimizer", ADAM), changes.get("schedule", Schedule(3))
        self.training = Training(self.model, *steps, changes.get("corrections", ()))
        drawn = [self.model.init_weights(Key.of(g), torch.float64) for g in range(3)]
        self.bases = {name: torch.stack([w[name] for w in drawn]) for name in drawn[0]}
        self.whole = {name: t[WHICH] for name, t in self.bases.items()}
        self.keep: bool = changes.get("keep", False)

    @property
    def based(self) -> dict[str, Patched | Stacked]:
        return {name: from_bases(t, WHICH) for name, t in self.bases.items()}

    def run(self, kernels: str, start: Start) -> Fitted:
        memory = self.training.optimizer.init(self.whole) if self.keep else None
        return BACKENDS[kernels].fit(
            self.training, TrainingInputs(self.block, start, memory, Key.of(3))
        )

    def last(self, t: Params) -> Params:
        return {n: w for n, w in t.items() if n.startswith(f"{self.model.layers - 1}.")}


def dense(field: Stacked | Patched) -> Tensor:
    return field.stacked().t if isinstance(field, Patched) else field.t


def assert_same(ours: Fitted, theirs: Fitted) -> None:
    assert list(ours.weights) == list(theirs.weights)
    pairs = [(dense(ours.weights[n]), dense(w)) for n, w in theirs.weights.items()]
    memory, their_memory = whole_memory(ours.memory), whole_memory(theirs.memory)
    pairs += [(memory[n], m) for n, m in their_memory.items()]
    pairs += [(ours.loss, theirs.loss), (ours.logits, theirs.logits)]
    for a, b in pairs:
        torch.testing.assert_close(a, b, rtol=0, atol=TOLERANCE)
    assert torch.equal(ours.steps, theirs.steps)


@pytest.mark.law(sample=6)
@pytest.mark.parametrize("name", CASES)
def test_bases_are_whole_slices(make_graph: MakeGraph, cut_block: CutBlock, name: str) -> None:
    world = World(make_graph, cut_block, **CASES[name])
    oracle = world.run("torch", world.whole)
    before = {n: t.clone() for n, t in world.bases.items()}
    for kernels in TIERS:
        found = world.run(kernels, world.based)
        assert_same(found, oracle)
        compact = isinstance(world.block.x, SparseRows) and not world.keep
        assert isinstance(found.weights["0.weight"], Patched) == compact
    assert all(torch.equal(t, before[n]) for n, t in world.bases.items())


@pytest.mark.law(sample=6)
@pytest.mark.parametrize("name", ["plain", "dense", "sage", "drawn", "kept", "pulled"])
def test_own_last_stages_are_whole_slices(
    make_graph: MakeGraph, cut_block: CutBlock, name: str
) -> None:
    """One base for all, in either form, and a last stage that differs by client."""
    world = World(make_graph, cut_block, **CASES[name])
    own = {n: Stacked(t) for n, t in world.last(world.whole).items()}
    common = {n: t[0] for n, t in world.bases.items() if n not in own}
    bases = {n: from_bases(t[None], torch.zeros_like(WHICH)) for n, t in common.items()}
    stacked = {n: t.expand(C, *t.shape) for n, t in common.items()}
    oracle = world.run("torch", {**stacked, **{n: f.t for n, f in own.items()}})
    for kernels in TIERS:
        found = world.run(kernels, {**common, **own})
        assert_same(found, oracle)
        again = world.run(kernels, {**bases, **own})
        assert all(torch.equal(dense(w), dense(again.weights[n])) for n, w in found.weights.items())


@pytest.mark.law(sample=6)
@pytest.mark.parametrize("used", [True, False], ids=["used rows", "other rows"])
@pytest.mark.parametrize("name", ["plain", "dense", "sage", "drawn", "kept"])
def test_own_rows_are_whole_slices(
    make_graph: MakeGraph, cut_block: CutBlock, name: str, used: bool
) -> None:
    world = World(make_graph, cut_block, **CASES[name])
    index, off = torch.tensor([0, 3, 5, 3]), torch.tensor([0, 1, 1, 3, 4])
    if used and isinstance(world.block.x, SparseRows):
        index, off = world.block.x.used.feature, world.block.x.used.off
    start = world.based
    for n in [n for n in start if n in ("0.weight", "0.root")]:
        field = start[n]
        assert isinstance(field, Patched)
        rows = Key.of(7).matrix(len(index), field.base.shape[2])
        start[n] = replace(field, t=rows, index=index, off=off)
    oracle = world.run("torch", {n: dense(f) for n, f in start.items()})
    for kernels in TIERS:
        found = world.run(kernels, start)
        assert_same(found, oracle)
        compact = used and isinstance(world.block.x, SparseRows) and not world.keep
        assert isinstance(found.weights["0.weight"], Patched) == compact


def test_training_resumes_where_it_ended(make_graph: MakeGraph, cut_block: CutBlock) -> None:
    world = World(make_graph, cut_block)
    for kernels in TIERS:
        first = world.run(kernels, world.based)
        slices = {n: dense(f) for n, f in first.weights.items()}
        assert_same(world.run(kernels, first.weights), world.run("torch", slices))


def test_corrections_by_client_meet_bases(make_graph: MakeGraph, cut_block: CutBlock) -> None:
    world = World(make_graph, cut_block)
    shift = Shift({n: 0.01 * torch.ones_like(w) for n, w in world.whole.items()})
    world.training = replace(world.training, corrections=(shift,))
    assert_same(world.run("torch", world.based), world.run("torch", world.whole))


def test_modules_start_from_bases(make_graph: MakeGraph, cut_block: CutBlock) -> None:
    class Layer(nn.Module):
        def __init__(self, features: int, outputs: int) -> None:
            super().__init__()
            self.map = nn.Linear(features, outputs)
            self.scale = nn.Parameter(torch.ones(()))

        def forward(self, x: Tensor, edges: Tensor) -> Tensor:
            found: Tensor = self.map(x) * self.scale
            return found

    world = World(make_graph, cut_block)
    model = ModuleModel("own", Layer, F, world.model.outputs, "multiclass")
    training = Training(model, ADAM, Schedule(2))
    weights = model.init_weights(Key.of(1), torch.float64)
    block = world.block.take(torch.tensor([2]))
    based = {n: from_bases(torch.stack([w, w + 1]), torch.tensor([1])) for n, w in weights.items()}
    whole = {n: w[None] + 1 for n, w in weights.items()}
    a, b = (
        BACKENDS["torch"].fit(training, TrainingInputs(block, s, None, Key.of(3)))
        for s in (based, whole)
    )
    assert_same(a, b)


def odd(world: World) -> dict[str, tuple[dict[str, Any], str]]:
    """Starts that no block has, with what is said of them."""
    field, bias = world.based["0.weight"], world.based["1.bias"]
    assert isinstance(field, Patched)
    assert isinstance(bias, Patched)
    another = "these are weights of another model"
    rows = {
        "t": field.base[0, :1],
        "index": torch.tensor([0]),
        "off": offsets(torch.ones(C).long()),
    }
    return {
        "another shape": (
            {"0.weight": replace(field, base=field.base[:, :5])},
            f"expected 0.weight of shape (3, 12, 6), got (3, 5, 6): {another}",
        ),
        "another dtype": (
            {"1.bias": replace(bias, base=bias.base.float())},
            f"expected 1.bias of torch.float64, got torch.float32: {another}",
        ),
        "no base": (
            {"0.weight": replace(field, base=field.base[:0])},
            f"expected 0.weight of shape (1, 12, 6), got (0, 12, 6): {another}",
        ),
        "a base too far": (
            {"0.weight": replace(field, which=WHICH + 1)},
            "expected every base below 3, got 1 to 3 for 0.weight where training starts",
        ),
        "no number of a base": (
            {"0.weight": replace(field, which=WHICH.double())},
            "expected which of int64, got torch.float64 for 0.weight where training starts",
        ),
        "rows of another dtype": (
            {"0.weight": replace(field, t=field.t.float())},
            "expected rows of torch.float64, got torch.float32 for 0.weight where training starts",
        ),
        "too few rows": (
            {"0.weight": replace(field, **rows)},
            "expected runs of 1 rows, got offsets [0, 1, 2, 3, 4] and 1 places for 0.weight where "
            "training starts",
        ),
        "own weights of too few clients": (
            {"1.bias": Stacked(bias.base)},
            f"expected 1.bias of shape (4, 3), got (3, 3): {another}",
        ),
        "shared beside stacked tensors": (
            {"0.weight": world.bases["0.weight"][0], "1.bias": world.whole["1.bias"]},
            f"expected 1.bias of shape (3,), got (4, 3): {another}",
        ),
        "own": ({"2.bias": Stacked(bias.base)}, "expected the weights 0.weight, 0.bias, 1.weight"),
    }


@pytest.mark.parametrize("kernels", TIERS)
def test_starts_that_do_not_fit_are_refused(
    make_graph: MakeGraph, cut_block: CutBlock, kernels: str
) -> None:
    world = World(make_graph, cut_block)
    for change, text in odd(world).values():
        with pytest.raises(ProtocolError, match=re.escape(text)):
            world.run(kernels, {**world.based, **change})
