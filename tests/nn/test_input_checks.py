"""Weights, state and numbers that are not the model's are refused, by both tiers in the same words.

F: features. H: hidden width. C: clients. K: classes.
"""

import ast
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import silograph
from doors import KEY, C, Case, CutBlock, F, H, K, MakeGraph, case_of, refused
from silograph.core.errors import ConfigError, ProtocolError
from silograph.core.key import Key
from silograph.graph.block.block import SparseRows
from silograph.nn.backends import BACKENDS
from silograph.nn.conv import Params
from silograph.nn.fit import Schedule, Training, TrainingInputs, whole_memory
from silograph.nn.mini_batches import Fanout
from silograph.nn.model import Model
from silograph.nn.optim import SGD, Adam, Optimizer
from silograph.nn.own_module import ModuleModel
from silograph.nn.segment import sparse_product

pytest.importorskip("numba")

TIERS = pytest.mark.parametrize("kernels", ["torch", "compiled"])
NAN, INF = float("nan"), float("inf")


@pytest.fixture(params=[True, False], ids=["sparse", "dense"])
def case(request: pytest.FixtureRequest, make_graph: MakeGraph, cut_block: CutBlock) -> Case:
    return case_of(make_graph, cut_block, sparse=request.param)


def odd_weights(w: Params) -> dict[str, tuple[dict[str, Tensor], str]]:
    """Weights that are not the model's, with what is said of them."""
    first, bias = w["0.weight"], w["1.bias"]
    another = "these are weights of another model"
    return {
        "one row": (
            {**w, "0.weight": first[:1]},
            f"expected 0.weight of shape (12, 6), got (1, 6): {another}",
        ),
        "another width": (
            {**w, "1.bias": bias[:2]},
            f"expected 1.bias of shape (3,), got (2,): {another}",
        ),
        "another dtype": (
            {**w, "0.weight": first.float()},
            f"expected 0.weight of torch.float64, got torch.float32: {another}",
        ),
        "too few clients": (
            {name: t.expand(2, *t.shape) for name, t in w.items()},
            f"expected 0.weight of shape (4, 12, 6), got (2, 12, 6): {another}",
        ),
        "not all of each client": (
            {**w, "0.weight": first.expand(C, F, H)},
            f"expected 0.bias of shape (4, 6), got (6,): {another}",
        ),
        "a scalar": (
            {**w, "0.weight": first.sum()},
            f"expected 0.weight of shape (12, 6), got (): {another}",
        ),
        "one missing": (
            {name: t for name, t in w.items() if name != "0.weight"},
            "expected the weights 0.weight, 0.bias, 1.weight, 1.bias, got 0.bias, 1.weight, "
            f"1.bias: {another}",
        ),
        "one too many": (
            {**w, "2.weight": first, "a\nline": bias, "x": bias},
            "expected the weights 0.weight, 0.bias, 1.weight, 1.bias, got 0.weight, 0.bias, "
            f"1.weight, 1.bias, 2.weight, a\\nline, ...: {another}",
        ),
        "none": (
            {},
            f"expected the weights 0.weight, 0.bias, 1.weight, 1.bias, got none: {another}",
        ),
    }


ODD_WEIGHTS = [
    "one row",
    "another width",
    "another dtype",
    "too few clients",
    "not all of each client",
    "a scalar",
    "one missing",
    "one too many",
    "none",
]


@TIERS
@pytest.mark.parametrize("odd", ODD_WEIGHTS)
def test_weights_of_another_model_are_refused(case: Case, kernels: str, odd: str) -> None:
    weights, text = odd_weights(case.weights)[odd]
    assert list(odd_weights(case.weights)) == ODD_WEIGHTS
    training = Training(case.model, Adam(0.1), Schedule(1))
    with refused(text):
        BACKENDS[kernels].predict(case.model, weights, case.block)
    with refused(text):
        BACKENDS[kernels].fit(training, TrainingInputs(case.block, weights, None, KEY))


@TIERS
def test_a_model_for_other_features_is_refused(case: Case, kernels: str) -> None:
    model = replace(case.model, features=F + 1)
    weights = model.init_weights(Key.of(1), torch.float64)
    with refused("expected a model of 12 features, got one of 13"):
        BACKENDS[kernels].predict(model, weights, case.block)


def test_weights_of_another_module_are_refused(make_graph: MakeGraph, cut_block: CutBlock) -> None:
    class Layer(nn.Module):
        def __init__(self, features: int, outputs: int) -> None:
            super().__init__()
            self.map = nn.Linear(features, outputs)

        def forward(self, x: Tensor, edges: Tensor) -> Tensor:
            found: Tensor = self.map(x)
            return found

    block, _ = cut_block(make_graph(20, features=F), 1)
    model = ModuleModel("own", Layer, F, K, "multiclass")
    weights = model.init_weights(KEY, torch.float64)
    weights["map.bias"] = weights["map.bias"][:1]
    text = "expected map.bias of shape (3,), got (1,): these are weights of another model"
    with refused(text):
        BACKENDS["torch"].predict(model, weights, block)
    with refused(text):
        BACKENDS["torch"].fit(
            Training(model, SGD(0.1), Schedule(1)), TrainingInputs(block, weights, None, KEY)
        )


def odd_memory(m: Params) -> dict[str, tuple[dict[str, Tensor], str]]:
    """State of Adam that is not the model's, with what is said of it."""
    another, first = "this is optimizer state of another model", m["first/0.weight"]
    names = "first/0.weight, first/0.bias, first/1.weight, first/1.bias, second/0.weight, "
    names += "second/0.bias, ..."
    return {
        "another width": (
            {**m, "first/0.weight": first[..., :2]},
            f"expected first/0.weight of shape (4, 12, 6), got (4, 12, 2): {another}",
        ),
        "another dtype": (
            {**m, "second/1.bias": m["second/1.bias"].float()},
            f"expected second/1.bias of torch.float64, got torch.float32: {another}",
        ),
        "another optimizer": (
            {"momentum/0.weight": first},
            f"expected the optimizer state {names}, got momentum/0.weight: it is of another "
            "optimizer or model",
        ),
        "steps of few": (
            {**m, "steps": m["steps"][:1]},
            f"expected steps of shape (4,), got (1,): {another}",
        ),
        "steps back": (
            {**m, "steps": m["steps"] - 1},
            "expected steps of 0 or more in the optimizer state, got [-1.0, -1.0, -1.0, -1.0]",
        ),
        "no steps": (
            {**m, "steps": m["steps"] * NAN},
            "expected steps of 0 or more in the optimizer state, got [nan, nan, nan, nan]",
        ),
        "steps without end": (
            {**m, "steps": m["steps"] + INF},
            "expected steps of 0 or more in the optimizer state, got [inf, inf, inf, inf]",
        ),
    }


ODD_MEMORY = [
    "another width",
    "another dtype",
    "another optimizer",
    "steps of few",
    "steps back",
    "no steps",
    "steps without end",
]


@TIERS
@pytest.mark.parametrize("odd", ODD_MEMORY)
def test_optimizer_state_of_another_model_is_refused(case: Case, kernels: str, odd: str) -> None:
    adam = Adam(0.1)
    found = odd_memory(case.memory(adam))
    assert list(found) == ODD_MEMORY
    memory, text = found[odd]
    with refused(text):
        BACKENDS[kernels].fit(
            Training(case.model, adam, Schedule(1)),
            TrainingInputs(case.block, case.weights, memory, KEY),
        )


@TIERS
@pytest.mark.parametrize("optimizer", [Adam(0.1), SGD(0.1), SGD(0.1, momentum=0.9)])
def test_state_and_weights_of_any_strides_are_taken(
    case: Case, kernels: str, optimizer: Optimizer
) -> None:
    training = Training(case.model, optimizer, Schedule(2))
    turned = {
        name: w.transpose(0, -1).contiguous().transpose(0, -1) for name, w in case.weights.items()
    }
    memory = case.memory(optimizer)
    first = BACKENDS[kernels].fit(training, TrainingInputs(case.block, case.weights, memory, KEY))
    again = BACKENDS[kernels].fit(training, TrainingInputs(case.block, turned, memory, KEY))
    odd = {
        name: m.transpose(1, -1).contiguous().transpose(1, -1) if m.dim() > 1 else m
        for name, m in whole_memory(first.memory).items()
    }
    on = [
        BACKENDS[kernels].fit(training, TrainingInputs(case.block, case.weights, m, KEY))
        for m in (first.memory, odd)
    ]
    for one, other in ((first, again), on):
        assert torch.equal(one.logits, other.logits)
        memory = whole_memory(other.memory)
        assert all(torch.equal(m, memory[n]) for n, m in whole_memory(one.memory).items())


@TIERS
def test_labels_that_a_model_has_no_output_for_are_refused(case: Case, kernels: str) -> None:
    small = replace(case.model, outputs=2)
    weights = small.init_weights(Key.of(1), torch.float64)
    training = Training(small, SGD(0.1), Schedule(1))
    text = "expected labels of training rows in 0 to 1, got 0 to 2: the model is for fewer classes"
    with refused(text):
        BACKENDS[kernels].fit(training, TrainingInputs(case.block, weights, None, KEY))


@TIERS
def test_a_model_for_another_task_is_refused(
    case: Case, kernels: str, make_graph: MakeGraph, cut_block: CutBlock
) -> None:
    several, _ = cut_block(make_graph(60, features=F, multilabel=True), C)
    bits = replace(case.model, task="multilabel")
    few = replace(bits, outputs=2)
    shape = tuple(several.y.shape)
    rows = len(case.block.y)
    for model, block, text in [
        (case.model, several, f"expected 3 classes as labels, got labels of shape {shape}"),
        (bits, case.block, f"expected 3 bits as labels, got labels of shape ({rows},)"),
        (few, several, f"expected 2 bits as labels, got labels of shape {shape}"),
    ]:
        weights = model.init_weights(Key.of(1), torch.float64)
        with refused(f"{text}: the model is for another task"):
            BACKENDS[kernels].fit(
                Training(model, SGD(0.1), Schedule(1)), TrainingInputs(block, weights, None, KEY)
            )


def test_a_fanout_has_a_number_for_each_layer(case: Case) -> None:
    for fanout in ((2,), (2, 2, 2), (2, -1)):
        training = Training(case.model, SGD(0.1), Schedule(1, neighbors=Fanout(fanout)))
        with pytest.raises(ConfigError, match="expected a fanout for each of 2 layers, got"):
            BACKENDS["compiled"].fit(training, TrainingInputs(case.block, case.weights, None, KEY))


@TIERS
def test_what_rests_are_rows_of_weights(kernels: str) -> None:
    training = Training(Model("gcn", F, H, K, 2, 0.5, "multiclass"), SGD(0.1, 0.1), Schedule(1))
    for odd in (torch.ones(3), torch.ones(3, 3, dtype=torch.int64)):
        with pytest.raises(ProtocolError, match=r"^expected rows of weights, got torch"):
            BACKENDS[kernels].untouched_rows_after(training, odd, 2)
    turned = torch.arange(6.0).view(2, 3).T
    assert torch.equal(
        BACKENDS[kernels].untouched_rows_after(training, turned, 2),
        BACKENDS[kernels].untouched_rows_after(training, turned.contiguous(), 2),
    )


def test_compiled_kernels_have_one_door() -> None:
    """Only `tiers`, which checks what they read, imports what hands blocks to them."""
    root = Path(silograph.__file__).parent
    found, stored = set(), set()
    for path in root.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom):
                names = {f"{node.module}.{alias.name}" for alias in node.names} | {node.module}
            elif isinstance(node, ast.Import):
                names = {alias.name for alias in node.names}
            else:
                continue
            if "silograph.nn.compiled" in names:
                found.add(str(path.relative_to(root)))
            if "silograph.nn.stored_compiled" in names:
                stored.add(str(path.relative_to(root)))
    assert found == {"nn/backends.py"}
    # They check what they read themselves.
    assert stored == {"methods/fedais.py"}


@pytest.mark.parametrize("optimizer", [Adam(0.1), SGD(0.1, momentum=0.9)])
def test_steps_read_nothing_beyond_gradients_and_state(optimizer: Optimizer) -> None:
    weights = {"w": torch.ones(2, 500)}
    state, grads = optimizer.init(weights), {"w": torch.ones(2, 500)}
    kind = next(iter(state))
    for odd_grads, odd_state in [
        ({"w": torch.ones(2, 5)}, state),
        ({"w": torch.ones(2, 500, dtype=torch.float64)}, state),
        (grads, {**state, kind: torch.ones(2, 5)}),
        (grads, {**state, kind: torch.ones(500, 2).T}),
    ]:
        with pytest.raises(ProtocolError, match=r"^expected a step of w torch.float32 \(2, 500\)"):
            optimizer.step_(weights, odd_grads, dict(odd_state))
    with pytest.raises(ProtocolError, match=r"\(2, 500\) with strides \(1, 2\)"):
        optimizer.step_({"w": torch.ones(500, 2).T}, grads, state)
    assert torch.equal(weights["w"], torch.ones(2, 500))


def test_steps_of_adam_are_those_of_its_clients() -> None:
    weights = {"w": torch.ones(2, 5)}
    state = Adam(0.1).init(weights)
    for steps in (torch.arange(3.0), torch.zeros(0), torch.zeros(())):
        with pytest.raises(ProtocolError, match=r"^expected a number of steps for each client"):
            Adam(0.1).step_(weights, {"w": torch.ones(2, 5)}, {**state, "steps": steps})


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_products_read_no_row_that_is_not_there(
    make_graph: MakeGraph, cut_block: CutBlock, dtype: torch.dtype
) -> None:
    block, _ = cut_block(make_graph(60, features=F, sparse=True), C, dtype=dtype)
    assert isinstance(block.x, SparseRows)
    for odd in (torch.ones(1, H), torch.ones(F + 1, H), torch.ones(F), torch.ones(F, H, 1)):
        with pytest.raises(ProtocolError, match=r"^expected 12 rows to multiply a sparse matrix"):
            sparse_product(block.x.csr, odd.to(dtype))
    short = replace(block.x.csr, values=torch.ones(3, dtype=dtype))
    with pytest.raises(ProtocolError, match=r"^expected a value for each of \d+ entries"):
        sparse_product(short, torch.ones(F, H, dtype=dtype))
