"""What a client keeps to itself survives weights from a server that spoil a round."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

import silograph as sg
from remote_runs import setup_of
from silograph.core.key import Key
from silograph.core.payload import Ragged, Stacked, State
from silograph.methods import METHODS
from silograph.methods.base import ServerState, keep_previous_if_not_finite

MakeGraph = Callable[..., sg.Graph]
KEY = Key.of(4)
KEPT = {"optimizer": "adam", "keep_optimizer": True}
SAMPLED = {"neighbors": "fedgrains", "batch_size": 4}
CASES: dict[str, tuple[str, dict[str, Any], tuple[str, ...]]] = {
    "moments": ("fedavg", KEPT, ("optimizer/",)),
    "moments between exchanges": (
        "fedais",
        {**KEPT, "model": "sage", "local_epochs": 1},
        ("optimizer/",),
    ),
    "variates": ("scaffold", {"optimizer": "sgd", "layers": 3}, ("variates/",)),
    "private layers": ("fedper", {"layers": 3, "server_optimizer": "none"}, ("private/",)),
    "masks": ("fedpub", {"options": {"communities": 1}}, ("masks/",)),
    "flow network": ("fedavg", SAMPLED, ("neighbors/",)),
    "flow network in torch": ("fedavg", {**SAMPLED, "kernels": "torch"}, ("neighbors/",)),
}


def spoiled(state: ServerState) -> ServerState:
    """The state of a server whose weights make all sums infinite."""
    if state.weights is None:
        return replace(
            state, memory={n: torch.full_like(w, 1e300) for n, w in state.memory.items()}
        )
    return replace(state, weights={n: torch.full_like(w, 1e300) for n, w in state.weights.items()})


@pytest.mark.parametrize("case", CASES)
def test_a_round_that_is_spoiled_leaves_it_as_it_was(make_graph: MakeGraph, case: str) -> None:
    name, given, prefixes = CASES[case]
    method = METHODS[name]
    setup = setup_of(make_graph(), method, **{"dtype": "float64", "block_size": 4, **given})
    cfg, fed = setup.method_config, setup.federation
    state = method.init(fed, cfg, cfg.model.init_weights(Key.of(2), torch.float64), KEY)

    def private() -> dict[str, torch.Tensor]:
        fields = [field for block in fed.states() for field in block.items()]
        return {n: f.t.clone() for n, f in fields if n.startswith(prefixes)}

    fed.start_round(1)
    good, _ = method.round(fed, cfg, state, 1, KEY)
    before = private()
    assert before
    fed.start_round(2)
    method.round(fed, cfg, spoiled(good), 2, KEY)
    after = private()
    assert after.keys() == before.keys()
    assert all(torch.equal(after[n], t) for n, t in before.items())
    fed.start_round(3)
    method.round(fed, cfg, good, 3, KEY)
    last = private()
    assert all(bool(t.isfinite().all()) for t in last.values())
    assert any(not torch.equal(last[n], t) for n, t in before.items())


def test_only_clients_with_what_is_no_number_keep_the_old() -> None:
    off = torch.tensor([0, 2, 2, 3])

    def fields(x: float) -> State:
        rows = torch.full((3, 2), x)
        return {"a": Stacked(torch.full((3, 2), x)), "b": Ragged(rows, off)}

    old, new = fields(1.0), fields(2.0)
    assert keep_previous_if_not_finite(new, old) is new
    new["a"].t[0, 1] = torch.nan
    new["b"].t[2, 0] = torch.inf
    found = keep_previous_if_not_finite(new, old)
    assert found["a"].t.tolist() == [[1.0, 1.0], [2.0, 2.0], [1.0, 1.0]]
    assert found["b"].t.tolist() == [[1.0, 1.0], [1.0, 1.0], [1.0, 1.0]]


@pytest.mark.parametrize("name", ["fedpub", "gcfl", "gcflplus"])
def test_a_run_goes_on_without_a_client_whose_training_diverged(
    make_graph: MakeGraph, name: str
) -> None:
    """Its loss is no number, and is in no mean either."""
    method = METHODS[name]
    setup = setup_of(make_graph(), method, block_size=4)
    cfg, fed = setup.method_config, setup.federation
    state = method.init(fed, cfg, cfg.model.init_weights(Key.of(2), torch.float64), KEY)

    trains: list[Any] = []

    def bad(*args: Any) -> Any:
        found, reply = trains[-1](*args)
        first = {n: f.t.clone() for n, f in reply.items() if n == "loss" or n.startswith("weights")}
        for t in first.values():
            t[0] = torch.nan
        return found, {**reply, **{n: Stacked(t) for n, t in first.items()}}

    call = fed.call

    def spoil(op: Any, *args: Any, **named: Any) -> Any:
        trains.append(op)
        return call(bad if "reduce" in named else op, *args, **named)

    fed.call = spoil  # type: ignore[method-assign]
    fed.start_round(1)
    _, report = method.round(fed, cfg, state, 1, KEY)
    assert report.train_loss is not None
    assert 0 < report.train_loss < 100
