"""Laws of FedAIS' compiled steps: the results of the torch form, from the same draws."""

import math
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from silograph.core.errors import ProtocolError
from silograph.core.key import Key
from silograph.core.payload import Stacked
from silograph.exchange.passes import divisible
from silograph.federation.in_process import InProcess
from silograph.graph.block.block import ClientBlock, Route
from silograph.graph.graph import Graph
from silograph.methods.base import MethodConfig, ServerState
from silograph.methods.fedais import FEDAIS, FedAISOptions, serve
from silograph.nn.backends import COMPILED, TORCH
from silograph.nn.fit import Schedule, Training, TrainingFields
from silograph.nn.optim import SGD, Adam
from silograph.nn.stored_compiled import check_fields, check_stored
from together import blank_rows, cut_of, model_of

pytest.importorskip("numba")
MakeGraph = Callable[..., Graph]
KEY = Key.of(5)
OPTIONS = FedAISOptions(batches=5, drawn=3, tau=2, interval="fixed")


def config(conv: str = "sage", **changes: Any) -> MethodConfig[FedAISOptions]:
    shape = changes.pop("shape", {})
    cfg = MethodConfig(
        model=model_of(conv, residual=False, **shape),
        optimizer=Adam(0.01, 5e-4),
        schedule=Schedule(1),
        keep_optimizer=False,
        participation=1.0,
        options=OPTIONS,
    )
    return replace(cfg, **changes)


def play(
    cfg: MethodConfig[FedAISOptions], block: ClientBlock, route: Route, rounds: int, size: int
) -> tuple[InProcess, ServerState]:
    fed = InProcess(cfg, block, route, size)
    state = FEDAIS.init(fed, cfg, cfg.model.init_weights(Key.of(2), torch.float64), KEY)
    for t in range(1, rounds + 1):
        fed.start_round(t)
        state, _ = FEDAIS.round(fed, cfg, state, t, KEY)
    return fed, state


def fields_of(fed: InProcess, state: ServerState) -> dict[str, Tensor]:
    assert state.weights is not None
    parts = [{name: field.t for name, field in part.items()} for part in fed.states()]
    found = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
    return found | {f"server/{name}": w for name, w in state.weights.items()}


CASES: list[tuple[str, dict[str, Any]]] = [
    ("sage", {"shape": {"layers": 2, "dropout": 0.0}}),
    ("sage", {"shape": {"layers": 3, "dropout": 0.4}}),
    ("gcn", {"shape": {"layers": 3, "dropout": 0.0}, "sparse": False}),
    ("gcn", {"shape": {"layers": 4, "dropout": 0.4}}),
    ("graphconv", {"shape": {"layers": 2, "dropout": 0.4}}),
    ("sage", {"shape": {"layers": 3, "dropout": 0.4, "head": "linear"}}),
    ("sage", {"optimizer": SGD(0.2, 5e-4, 0.9), "sparse": False}),
    ("sage", {"optimizer": SGD(0.2, 5e-4, 0.9), "keep_optimizer": True}),
    ("gcn", {"keep_optimizer": True}),
    ("sage", {"options": replace(OPTIONS, unbiased=True, halo="held", drawn=0)}),
    ("gcn", {"options": replace(OPTIONS, halo="none")}),
    ("sage", {"participation": 0.5, "options": replace(OPTIONS, owners="stored", halo="all")}),
]


@pytest.mark.law(sample=12)
@pytest.mark.parametrize(("conv", "changes"), CASES)
def test_both_backends_do_the_same(
    make_graph: MakeGraph, conv: str, changes: dict[str, Any]
) -> None:
    """Weights, histories, scores, ledger and counted work, over rounds with exchanges."""
    given = dict(changes)
    graph = make_graph(60, sparse=given.pop("sparse", True))
    block, route, _ = cut_of(graph, 5, "random")
    found, ledgers = [], []
    for backend, size in ((TORCH, 5), (COMPILED, 2)):
        cfg = config(conv, backend=backend, **given)
        fed, state = play(cfg, block, route, rounds=3, size=size)
        assert backend.why_not(cfg.training, torch.device("cpu")) is None
        found.append(fields_of(fed, state))
        ledgers.append((fed.ledger.bytes_by_kind, fed.ledger.flops))
    assert found[0].keys() == found[1].keys()
    for name, ours in found[0].items():
        torch.testing.assert_close(found[1][name], ours, rtol=0, atol=1e-10, msg=name)
    assert ledgers[0] == ledgers[1]


def test_losses_of_a_round_that_is_done_again_are_weighted_anew(make_graph: MakeGraph) -> None:
    """The same nodes may be drawn with other probabilities, in a block that has done the round."""
    cfg = config(options=replace(OPTIONS, unbiased=True, ratio=0.6, halo="none"), backend=COMPILED)

    def third_rounds(factors: Sequence[float]) -> dict[str, Tensor]:
        """Return what the last of several third rounds leaves, each from the state before it."""
        block, route, _ = cut_of(make_graph(60), 5, "random")
        fed, before = play(cfg, block, route, rounds=2, size=5)
        states, records = deepcopy(fed.states()), fed.ledger.records
        assert before.weights is not None
        for factor in factors:
            fed.restore(2, deepcopy(states), records)
            fed.start_round(3)
            weights = {name: factor * w for name, w in before.weights.items()}
            state, _ = FEDAIS.round(fed, cfg, replace(before, weights=weights), 3, KEY)
        return fields_of(fed, state)

    for factor in (1.0001, 1.001, 1.01):
        once = third_rounds([factor])
        for name, t in third_rounds([1.0, factor]).items():
            assert torch.equal(once[name], t), name


@pytest.mark.parametrize("decay", [0.0, 5e-4])
@pytest.mark.parametrize("sparse", [True, False])
def test_moments_are_not_read_before_they_are_written(
    make_graph: MakeGraph, monkeypatch: pytest.MonkeyPatch, sparse: bool, decay: float
) -> None:
    """Fresh moments of the first weights begin in memory that may hold anything."""
    cfg = config(optimizer=Adam(0.01, decay), backend=COMPILED)
    empty_like, fields = torch.empty_like, []

    def filled(t: Tensor, **options: Any) -> Tensor:
        memory = empty_like(t, **options)
        return memory.fill_(math.nan) if memory.is_floating_point() else memory

    for _ in range(2):
        block, route, _ = cut_of(make_graph(60, sparse=sparse), 5, "random")
        fields.append(fields_of(*play(cfg, block, route, rounds=2, size=5)))
        monkeypatch.setattr(torch, "empty_like", filled)
    for name, t in fields[0].items():
        assert torch.equal(fields[1][name], t), name


@pytest.mark.parametrize("moved", [None, 0.1])
def test_owners_that_are_not_asked_do_nothing(
    make_graph: MakeGraph, monkeypatch: pytest.MonkeyPatch, moved: float | None
) -> None:
    """A block that answers whole for some of its clients gives what they alone give."""
    block, route, _ = cut_of(make_graph(60), 8, "random")
    options = replace(OPTIONS, drawn=1, batches=9, tau=1, moved=moved)
    cfg = config(options=options, backend=COMPILED)
    found, ledgers = [], []
    for _ in range(2):
        fed, state = play(cfg, block, route, rounds=2, size=8)
        asked = [len(r.clients) for r in fed.ledger.records if r.op == "serve"]
        assert min(asked) < 8
        found.append(fields_of(fed, state))
        ledgers.append([record.to_line() for record in fed.ledger.records])
        assert "idle_without_rows" in serve.__dict__ or len(found) == 2
        monkeypatch.delitem(serve.__dict__, "idle_without_rows", raising=False)
    assert ledgers[0] == ledgers[1]
    for name, whole in found[0].items():
        assert torch.equal(whole, found[1][name]), name


def held_by(clients: int, used: int, wrong: str = "") -> TrainingFields:
    """What clients in training of a model 7-6-3 hold for Adam, one field of another shape."""
    shapes = {"0.weight": (used, 6), "flat": (clients, 6 + 18 + 3)}
    kinds = ("weights", "memory/first", "memory/second")
    held: TrainingFields = {
        f"{kind}/{name}": Stacked(torch.zeros(shape))
        for kind in kinds
        for name, shape in shapes.items()
    }
    held["moves/0.weight"] = Stacked(torch.zeros(used, dtype=torch.bool))
    held["steps"] = Stacked(torch.zeros(clients, dtype=torch.int64))
    if wrong:
        held[wrong] = Stacked(held[wrong].t[..., :-1])
    return held


def test_kernels_are_given_what_they_read_alone() -> None:
    shape = model_of("gcn", residual=False, layers=2)
    model, training = divisible(shape), Training(shape, Adam(0.01), Schedule(1))
    check_fields(model, training, held_by(2, 9), 2, 9)
    for wrong in held_by(2, 9):
        with pytest.raises(ProtocolError, match=rf"clients in training whose {wrong} has shape"):
            check_fields(model, training, held_by(2, 9, wrong), 2, 9)
    short = held_by(2, 9)
    short.pop("memory/second/flat")
    with pytest.raises(ProtocolError, match=r"memory/second/flat has shape .*, got None"):
        check_fields(model, training, short, 2, 9)
    mixed = held_by(2, 9)
    mixed["weights/flat"] = Stacked(mixed["weights/flat"].t.double())
    with pytest.raises(ProtocolError, match="and the run's dtype"):
        check_fields(model, training, mixed, 2, 9)
    for marks in ("moves/0.weight", "steps"):
        wrong_marks = held_by(2, 9)
        wrong_marks[marks] = Stacked(wrong_marks[marks].t.int())
        with pytest.raises(ProtocolError, match="they are of another model"):
            check_fields(model, training, wrong_marks, 2, 9)


@pytest.mark.parametrize("of", ["own", "halo"])
def test_kernels_read_stored_rows_of_the_right_shape_alone(make_graph: MakeGraph, of: str) -> None:
    block, _, _ = cut_of(make_graph(40), 2, "random")
    model = divisible(model_of("gcn", residual=False, layers=2))
    stored = blank_rows(model, block)
    check_stored(model, stored, block)
    short: dict[str, Any] = {of: {n: t[:, 1:] for n, t in getattr(stored, of).items()}}
    with pytest.raises(ProtocolError, match=r"expected stored rows of shape .* for stage 1, got"):
        check_stored(model, replace(stored, **short), block)
