"""Laws of the optimizers: torch's own, one for each client, whatever the clients' steps."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from silograph.core.payload import Stacked, put, take
from silograph.nn.conv import Params
from silograph.nn.optim import SGD, Adam, Optimizer

CLIENTS = 5
SHAPES = {"0.weight": (4, 7), "0.bias": (7,), "1.weight": (7, 3)}

MakeReference = Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]


def first_decays(weights: list[torch.nn.Parameter], decay: float) -> list[dict[str, Any]]:
    """Return torch's parameter groups: weight and bias of the first layer decay."""
    later = {"params": weights[2:], "weight_decay": 0.0}
    return [{"params": weights[:2], "weight_decay": decay}, later]


CASES: dict[str, tuple[Optimizer, MakeReference]] = {
    "sgd": (SGD(0.1), lambda w: torch.optim.SGD(w, lr=0.1)),
    "sgd with decay": (SGD(0.1, 0.2), lambda w: torch.optim.SGD(w, lr=0.1, weight_decay=0.2)),
    "sgd with momentum": (
        SGD(0.05, 0.1, 0.9),
        lambda w: torch.optim.SGD(w, lr=0.05, weight_decay=0.1, momentum=0.9),
    ),
    "adam": (Adam(0.01), lambda w: torch.optim.Adam(w, lr=0.01)),
    "adam with decay": (Adam(0.01, 0.1), lambda w: torch.optim.Adam(w, lr=0.01, weight_decay=0.1)),
    "sgd with decay of the first layer": (
        SGD(0.05, 0.1, 0.9, decay_layers="first"),
        lambda w: torch.optim.SGD(first_decays(w, 0.1), lr=0.05, momentum=0.9),
    ),
    "adam with decay of the first layer": (
        Adam(0.01, 0.1, decay_layers="first"),
        lambda w: torch.optim.Adam(first_decays(w, 0.1), lr=0.01),
    ),
    "adam with all": (
        Adam(0.02, 0.05, 0.7, 0.9, 1e-3),
        lambda w: torch.optim.Adam(w, lr=0.02, weight_decay=0.05, betas=(0.7, 0.9), eps=1e-3),
    ),
}
EVERY_CASE = pytest.mark.parametrize("case", list(CASES))
# Over 40 steps of size lr the weights move by about 1: float32 keeps 6 digits of that.
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5}


class Clients:
    """Weights and gradients that differ by client, and torch's optimizer for each client."""

    def __init__(self, make: MakeReference, dtype: torch.dtype) -> None:
        self.generator = torch.Generator().manual_seed(0)
        self.dtype = dtype
        self.weights = self.draw(1.0)
        self.own = [
            [torch.nn.Parameter(w[c].clone()) for w in self.weights.values()]
            for c in range(CLIENTS)
        ]
        self.optimizers = [make(own) for own in self.own]

    def draw(self, scale: float) -> Params:
        """Return numbers for every client; odd scales make clients differ by much."""
        spread = scale * 10.0 ** torch.arange(-2, CLIENTS - 2)
        return {
            name: (
                torch.randn(CLIENTS, *shape, generator=self.generator, dtype=torch.float64)
                * spread.double().view(-1, *[1] * len(shape))
            ).to(self.dtype)
            for name, shape in SHAPES.items()
        }

    def step(self, grads: Params, clients: list[int]) -> None:
        for c in clients:
            for parameter, grad in zip(self.own[c], grads.values(), strict=True):
                parameter.grad = grad[c].clone()
            self.optimizers[c].step()

    def check(self, weights: Params) -> None:
        tolerance = TOLERANCE[self.dtype]
        for i, name in enumerate(SHAPES):
            expected = torch.stack([own[i].detach() for own in self.own])
            torch.testing.assert_close(weights[name], expected, rtol=tolerance, atol=tolerance)


def clone(params: Params) -> Params:
    return {name: value.clone() for name, value in params.items()}


@pytest.mark.law(sample=6)
@EVERY_CASE
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_step_for_all_is_torchs_step_for_each(case: str, dtype: torch.dtype) -> None:
    optimizer, make = CASES[case]
    clients = Clients(make, dtype)
    weights = clone(clients.weights)
    state = optimizer.init(weights)
    for _ in range(40):
        grads = clients.draw(1.0)
        before = clone(grads)
        optimizer.step_(weights, grads, state)
        clients.step(grads, list(range(CLIENTS)))
        assert all(torch.equal(grads[name], before[name]) for name in grads)
    clients.check(weights)


@pytest.mark.law(sample=6)
@EVERY_CASE
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_clients_may_have_taken_different_numbers_of_steps(case: str, dtype: torch.dtype) -> None:
    optimizer, make = CASES[case]
    clients = Clients(make, dtype)
    weights = {name: Stacked(w) for name, w in clone(clients.weights).items()}
    state = {name: Stacked(t) for name, t in optimizer.init(clients.weights).items()}
    taken = [0] * CLIENTS
    for _ in range(40):
        count = int(torch.randint(1, CLIENTS + 1, (), generator=clients.generator))
        chosen = torch.randperm(CLIENTS, generator=clients.generator)[:count]
        grads = clients.draw(1.0)
        part = {name: take(w, chosen).t.clone() for name, w in weights.items()}
        part_state = {name: take(t, chosen).t.clone() for name, t in state.items()}
        optimizer.step_(part, {name: g[chosen] for name, g in grads.items()}, part_state)
        weights = {name: stacked(weights[name], part[name], chosen) for name in weights}
        state = {name: stacked(state[name], part_state[name], chosen) for name in state}
        clients.step(grads, chosen.tolist())
        for c in chosen.tolist():
            taken[c] += 1
    assert len(set(taken)) > 1
    clients.check({name: w.t for name, w in weights.items()})
    if isinstance(optimizer, Adam):
        assert state["steps"].t.tolist() == taken


def stacked(into: Stacked, part: Tensor, positions: Tensor) -> Stacked:
    result = put(into, Stacked(part), positions)
    assert isinstance(result, Stacked)
    return result


@EVERY_CASE
@pytest.mark.parametrize("uneven", [False, True])
def test_gradients_with_strides_are_read_right(case: str, uneven: bool) -> None:
    optimizer, _ = CASES[case]
    generator = torch.Generator().manual_seed(0)
    weights = {"w": torch.randn(CLIENTS, 4, 6, dtype=torch.float64, generator=generator)}
    other = clone(weights)
    state, other_state = optimizer.init(weights), optimizer.init(other)
    if uneven and "steps" in state:
        state["steps"] += torch.arange(CLIENTS)
        other_state["steps"] += torch.arange(CLIENTS)
    for _ in range(3):
        grad = torch.randn(CLIENTS, 6, 4, dtype=torch.float64, generator=generator).mT
        assert not grad.is_contiguous()
        optimizer.step_(weights, {"w": grad}, state)
        optimizer.step_(other, {"w": grad.contiguous()}, other_state)
    assert torch.equal(weights["w"], other["w"])
    # A gradient that is one number everywhere comes with stride 0.
    optimizer.step_(weights, {"w": torch.ones((), dtype=torch.float64).expand(5, 4, 6)}, state)
    optimizer.step_(other, {"w": torch.ones(5, 4, 6, dtype=torch.float64)}, other_state)
    assert torch.equal(weights["w"], other["w"])


@EVERY_CASE
def test_a_step_changes_weights_and_state_in_place(case: str) -> None:
    optimizer, make = CASES[case]
    clients = Clients(make, torch.float64)
    weights = clone(clients.weights)
    state = optimizer.init(weights)
    places = {name: t.data_ptr() for name, t in [*weights.items(), *state.items()]}
    before = clone(weights)
    optimizer.step_(weights, clients.draw(1.0), state)
    assert {n: t.data_ptr() for n, t in [*weights.items(), *state.items()]} == places
    assert not any(torch.equal(weights[name], before[name]) for name in weights)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_state_has_a_slice_for_each_client(dtype: torch.dtype) -> None:
    weights = {n: torch.ones(CLIENTS, *shape, dtype=dtype) for n, shape in SHAPES.items()}
    like = {name: (tuple(w.shape), dtype) for name, w in weights.items()}

    def form(state: Params) -> dict[str, Any]:
        assert not any(t.any() for t in state.values())
        return {name: (tuple(t.shape), t.dtype) for name, t in state.items()}

    assert form(SGD(0.1).init(weights)) == {}
    assert form(SGD(0.1, momentum=0.5).init(weights)) == {
        f"momentum/{name}": value for name, value in like.items()
    }
    assert form(Adam(0.1).init(weights)) == {
        **{f"first/{name}": value for name, value in like.items()},
        **{f"second/{name}": value for name, value in like.items()},
        "steps": ((CLIENTS,), torch.float32),
    }


@EVERY_CASE
def test_clients_do_not_touch_each_other(case: str) -> None:
    optimizer, make = CASES[case]
    clients = Clients(make, torch.float64)
    results = []
    for scale in (1.0, 1e6):
        weights = clone(clients.weights)
        state = optimizer.init(weights)
        generator = torch.Generator().manual_seed(1)
        for _ in range(3):
            grads = {
                name: torch.randn(w.shape, dtype=torch.float64, generator=generator)
                for name, w in weights.items()
            }
            for grad in grads.values():
                grad[2] *= scale
            optimizer.step_(weights, grads, state)
        results.append(weights)
    others = torch.tensor([0, 1, 3, 4])
    for name in SHAPES:
        assert torch.equal(results[0][name][others], results[1][name][others])
