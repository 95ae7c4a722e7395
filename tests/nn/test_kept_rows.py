"""Laws of kept optimizer state that clients with one history hold together."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import scipy.sparse as sp
import torch

from silograph.core.errors import CheckpointError, ProtocolError
from silograph.core.key import Key
from silograph.core.payload import Patched, Stacked, StateField, put, state_of, take_all
from silograph.core.work import Meter, metered
from silograph.federation.checkpoint import state_from, state_tensors
from silograph.federation.in_process import BlockState
from silograph.graph.block.block import ClientBlock, Route
from silograph.graph.csr import CSR
from silograph.graph.graph import Graph
from silograph.nn.backends import COMPILED, TORCH
from silograph.nn.correction import Correction, Proximal
from silograph.nn.fit import (
    Fitted,
    Memory,
    Schedule,
    Training,
    TrainingInputs,
    check_fit,
    first_memory,
    whole_memory,
)
from silograph.nn.model import Model
from silograph.nn.optim import SGD, Adam, Optimizer

pytest.importorskip("numba")

MakeGraph = Callable[..., Graph]
CutBlock = Callable[..., tuple[ClientBlock, Route]]
CLIENTS, FEATURES, WIDTH = 6, 40, 5
ADAM = Adam(lr=0.05, weight_decay=5e-3)
CASES: dict[str, tuple[str, Optimizer, Schedule, tuple[Correction, ...]]] = {
    "Adam": ("gcn", ADAM, Schedule(2), ()),
    "two matrices": ("sage", ADAM, Schedule(2), ()),
    "batches": ("gcn", ADAM, Schedule(2, batch_size=3), ()),
    "decay of the first layer": ("gcn", replace(ADAM, decay_layers="first"), Schedule(1), ()),
    "no decay": ("gcn", replace(ADAM, weight_decay=0.0), Schedule(1), ()),
    "proximal term": ("sage", ADAM, Schedule(3), (Proximal(0.1),)),
    "momentum": ("gcn", SGD(0.05, weight_decay=5e-3, momentum=0.9), Schedule(2), ()),
    "no moments": ("gcn", SGD(0.05, weight_decay=5e-3), Schedule(2), ()),
}
# Who takes part in each round; histories part, and some clients never come again.
ROUNDS = [range(6), [0, 1, 2, 4], range(6), [1, 2], [0, 1, 2, 3]]


@pytest.fixture
def block(make_graph: MakeGraph, cut_block: CutBlock) -> ClientBlock:
    """Clients whose nodes have few of many features."""
    rng = np.random.default_rng(3)
    values = (rng.random((60, FEATURES)) < 0.05) * rng.normal(size=(60, FEATURES))
    graph = make_graph(60, features=FEATURES, missing=0.2)
    graph = replace(graph, x=CSR.from_scipy(sp.csr_matrix(values.astype(np.float32))))
    return cut_block(graph, CLIENTS, dtype=torch.float32)[0]


def training_of(name: str) -> Training:
    conv, optimizer, schedule, corrections = CASES[name]
    model = Model(conv, FEATURES, WIDTH, 3, 2, 0.3, "multiclass")
    return Training(model, optimizer, schedule, corrections)


def fields_of(memory: Memory) -> dict[str, StateField]:
    return {n: m if isinstance(m, Patched) else Stacked(m) for n, m in memory.items()}


def memory_of(fields: dict[str, StateField]) -> Memory:
    return {n: f if isinstance(f, Patched) else f.t for n, f in fields.items()}


def run_rounds(
    training: Training, block: ClientBlock, *, apart: bool
) -> tuple[list[Fitted], dict[str, StateField], list[Meter]]:
    """Train in ROUNDS from other weights each time, on kept state; some clients are away."""
    memory = fields_of(first_memory(training, block, apart=apart))
    results, meters = list[Fitted](), list[Meter]()
    for number, clients in enumerate(ROUNDS):
        called = torch.tensor(list(clients))
        start = training.model.init_weights(Key.of(number), torch.float32)
        own = memory_of(state_of(take_all(memory, called)))
        inputs = TrainingInputs(block.take(called), start, own, Key.of(9 + number))
        with metered(len(called)) as meter:
            results.append(COMPILED.fit(training, inputs))
        meters.append(meter)
        new = fields_of(results[-1].memory)
        memory = {name: put(memory[name], f, called) for name, f in new.items()}
    return results, memory, meters


@pytest.mark.parametrize("name", CASES)
def test_histories_have_the_bits_of_whole_state(block: ClientBlock, name: str) -> None:
    training = training_of(name)
    (ours, held, _), (theirs, whole, _) = (
        run_rounds(training, block, apart=apart) for apart in (True, False)
    )
    for one, other in zip(ours, theirs, strict=True):
        weights, memory = other.tensors, whole_memory(other.memory)
        for own, expected in ((one.tensors, weights), (whole_memory(one.memory), memory)):
            assert list(own) == list(expected)
            assert all(torch.equal(own[n], t) for n, t in expected.items())
        assert torch.equal(one.logits, other.logits)
        assert torch.equal(one.loss, other.loss)
        assert torch.equal(one.steps, other.steps)
    parts = {n: f for n, f in held.items() if isinstance(f, Patched)}
    assert len(parts) == 2 * len(training.model.first_maps) * isinstance(
        training.optimizer, Adam
    ) + len(training.model.first_maps) * (name == "momentum")
    # 0, 3; 1, 2 and 4, 5 part as ROUNDS says, so that only 1 and 2 still have one history.
    histories = 1 if name == "batches" else 5
    assert all(histories <= len(f.base) <= CLIENTS for f in parts.values())
    assert not any(isinstance(f, Patched) for f in whole.values())


def test_one_history_is_one_base(block: ClientBlock) -> None:
    training = training_of("Adam")
    memory = first_memory(training, block, apart=True)
    start = training.model.init_weights(Key.of(1), torch.float32)
    for number in range(3):
        fitted = COMPILED.fit(training, TrainingInputs(block, start, memory, Key.of(number)))
        memory = fitted.memory
        trained = int((block.num_train > 0).sum())
        bases = 1 if trained == CLIENTS else 2
        for field in (memory["first/0.weight"], memory["second/0.weight"]):
            assert isinstance(field, Patched)
            assert len(field.base) == bases


def test_steps_that_are_taken_once_are_counted_once(block: ClientBlock) -> None:
    training = training_of("Adam")
    ours, theirs = (run_rounds(training, block, apart=apart)[2] for apart in (True, False))
    for one, other in zip(ours, theirs, strict=True):
        assert torch.equal(one.flops, other.flops)  # what clients are charged for
        assert one.totals()[2] <= other.totals()[2]  # what is executed
    assert ours[0].totals()[2] < theirs[0].totals()[2]


def test_torch_goes_on_from_the_same_state(block: ClientBlock) -> None:
    training = training_of("two matrices")
    memory = run_rounds(training, block, apart=True)[1]
    start = training.model.init_weights(Key.of(7), torch.float32)
    inputs = TrainingInputs(block, start, memory_of(memory), Key.of(8))
    ours, theirs = COMPILED.fit(training, inputs), TORCH.fit(training, inputs)
    expected = whole_memory(theirs.memory)
    for name, m in whole_memory(ours.memory).items():
        torch.testing.assert_close(m, expected[name], rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", ["Adam", "two matrices"])
def test_a_block_keeps_histories_of_calls_to_some(block: ClientBlock, name: str) -> None:
    """What `BlockState` writes in place is what `put` makes anew, and is exported whole."""
    training = training_of(name)
    held = BlockState(CLIENTS)
    expected: dict[str, StateField] = fields_of(first_memory(training, block, apart=True))
    held.replace(dict(expected))
    for number, clients in enumerate(ROUNDS):
        called = torch.tensor(list(clients))
        start = training.model.init_weights(Key.of(number), torch.float32)
        old = held.take(called)
        inputs = TrainingInputs(block.take(called), start, memory_of(dict(old)), Key.of(number))
        new = fields_of(COMPILED.fit(training, inputs).memory)
        held.put(old, new, called)
        expected = {n: put(expected[n], f, called) for n, f in new.items()}
        exported = held.export()
        again = state_from(state_tensors(exported))
        for own, field in expected.items():
            for state in (exported, again):
                assert type(state[own]) is type(field)
                assert torch.equal(_whole(state[own]), _whole(field))
        bases = {len(f.base) for f in exported.values() if isinstance(f, Patched)}
        assert max(bases) <= CLIENTS + len(called)


def test_a_whole_slice_makes_the_others_whole(block: ClientBlock) -> None:
    memory = fields_of(first_memory(training_of("Adam"), block, apart=True))
    held = BlockState(CLIENTS)
    held.replace(memory)
    called = torch.tensor([1, 4])
    old = held.take(called)
    ones = {n: Stacked(torch.ones_like(_whole(f))) for n, f in old.items()}
    held.put(old, ones, called)
    for name, field in held.export().items():
        assert isinstance(field, Stacked)
        expected = _whole(memory[name]).clone()
        expected[called] = 1
        assert torch.equal(field.t, expected)


def test_state_that_does_not_fit_is_refused(block: ClientBlock) -> None:
    training = training_of("Adam")
    memory = dict(first_memory(training, block, apart=True))
    start = training.model.init_weights(Key.of(1), torch.float32)
    name = "first/0.weight"
    field = memory[name]
    assert isinstance(field, Patched)
    other = torch.zeros(1, FEATURES + 1, WIDTH)
    wrong: dict[str, Memory] = {
        "shape": {**memory, name: replace(field, base=other)},
        "dtype": {**memory, name: replace(field, t=field.t.double())},
        "place": {**memory, name: replace(field, index=field.index + FEATURES)},
        "base": {**memory, name: replace(field, which=field.which + 1)},
    }
    for changed in wrong.values():
        with pytest.raises(ProtocolError):
            check_fit(training, TrainingInputs(block, start, changed, Key.of(1)))
    tensors = state_tensors({name: field})
    for part in ("which", "index", "off"):
        with pytest.raises(CheckpointError):
            state_from({n: t + 99 if n.endswith(part) else t for n, t in tensors.items()})
        if part != "off":
            with pytest.raises(CheckpointError):
                state_from({n: t for n, t in tensors.items() if not n.endswith(part)})


def _whole(field: StateField) -> torch.Tensor:
    return field.stacked().t if isinstance(field, Patched) else field.t
