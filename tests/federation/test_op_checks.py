"""Ops and folds refuse what would make them read, write or take memory beyond what is theirs."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from doors import KEY, C, Case, CutBlock, F, H, K, MakeGraph, case_of, refused
from silograph.core.errors import ProtocolError
from silograph.core.payload import Patched, Payload, Ragged, Shared, Stacked, State
from silograph.evaluation.evaluate import judge_own
from silograph.exchange.collect import ROWS, SLOT, choose, local_graph, serve
from silograph.exchange.passes import begin, send_partial_sums
from silograph.federation.base import Sum, WeightedMean
from silograph.federation.checkpoint import state_from
from silograph.federation.fold import Fold
from silograph.graph.block.block import ClientBlock
from silograph.methods import bns, cagnet
from silograph.methods.base import MethodConfig
from silograph.methods.label_guided import draw, learn
from silograph.nn.fit import check_places, stacked_copies
from silograph.nn.reach import boundary_reach, partial_reach
from silograph.task.counts import judged_rows, judges_of, tally

pytest.importorskip("numba")

TIERS = pytest.mark.parametrize("kernels", ["torch", "compiled"])
NAN, INF = float("nan"), float("inf")
STAGE = {"stage": Shared(torch.tensor(0))}


@pytest.fixture(params=[True, False], ids=["sparse", "dense"])
def case(request: pytest.FixtureRequest, make_graph: MakeGraph, cut_block: CutBlock) -> Case:
    return case_of(make_graph, cut_block, sparse=request.param)


def test_the_weights_of_a_pass_are_shared(case: Case) -> None:
    cfg, train = case.config(), {"train": Shared(torch.tensor(True))}
    for weights in ({"0.weight": torch.ones(1, H)}, stacked_copies(case.weights, C)):
        inbox = {f"weights/{name}": Shared(w) for name, w in (case.weights | weights).items()}
        with pytest.raises(ProtocolError, match=r"^expected 0.weight of shape \(12, 6\), got \("):
            begin(cfg, case.block, {}, {**inbox, **train}, KEY)


@TIERS
def test_logits_of_another_model_are_not_judged(case: Case, kernels: str) -> None:
    j = len(judges_of(case.block).rows)
    for odd in (torch.zeros(1, 65536), torch.zeros(j, 2), torch.zeros(j, K)):
        state = {"own/logits": Stacked(odd)}
        text = f"^expected own/logits of shape \\({j}, 3\\) in torch.float64, got"
        with pytest.raises(ProtocolError, match=text):
            judge_own(case.config(kernels), case.block, state, {}, KEY)
    rows = judged_rows(case.block, torch.zeros(j, K), case.block.client, C)
    assert int(tally(rows)["test.nodes"].sum()) == int(case.block.split.test.sum())


FIELD = Patched(
    base=torch.zeros(1, 5, 2),
    which=torch.tensor([0, 0]),
    t=torch.ones(3, 2),
    index=torch.tensor([0, 4, 1]),
    off=torch.tensor([0, 2, 3]),
)


@TIERS
@pytest.mark.parametrize("place", [5, -1, -6, 2**40])
def test_no_row_is_added_beside_the_sum(kernels: str, place: int) -> None:
    fold = Fold(Sum(), compiled=kernels == "compiled")
    fold.add({"w": FIELD})
    odd = replace(FIELD, index=torch.tensor([0, place, 1]))
    with pytest.raises(ProtocolError, match=r"^expected places of rows in 0 to 4, got"):
        fold.add({"w": odd})


@TIERS
def test_every_row_has_a_place_and_a_weight(kernels: str) -> None:
    def folded(field: Patched | Stacked, nodes: Tensor | None = None) -> None:
        fold = Fold(WeightedMean("nodes") if nodes is not None else Sum(), compiled=compiled)
        fold.add({"w": field} if nodes is None else {"w": field, "nodes": Stacked(nodes)})

    compiled = kernels == "compiled"
    text = "^expected a place and a weight for each of"
    with pytest.raises(ProtocolError, match=text):
        folded(replace(FIELD, index=FIELD.index.float()))
    with pytest.raises(ProtocolError, match=text):
        folded(replace(FIELD, index=FIELD.index[:, None]))
    with pytest.raises(ProtocolError, match=text):
        folded(Stacked(torch.ones(5, 3)), torch.ones(2))


def test_places_exist_and_ascend() -> None:
    off = torch.tensor([0, 3, 5])

    def places(t: Tensor, ends: list[int]) -> list[int]:
        return check_places(Ragged(t, torch.tensor(ends)), off, "slots").tolist()

    assert places(torch.tensor([0, 2, 1]), [0, 2, 3]) == [0, 2, 4]
    assert places(torch.tensor([], dtype=torch.int32), [0, 0, 0]) == []
    for t in ([3], [-1], [2**40]):
        with refused("expected slots, got others"):
            places(torch.tensor(t), [0, 1, 1])
    for t in ([1, 0], [1, 1]):
        with refused("expected slots in ascending order, got another order"):
            places(torch.tensor(t), [0, 2, 2])
    for odd, ends in [
        (torch.tensor([0.0]), [0, 1, 1]),
        (torch.tensor([True]), [0, 1, 1]),
        (torch.tensor([[0]]), [0, 1, 1]),
        (torch.tensor([0]), [0, 1]),
    ]:
        with pytest.raises(ProtocolError, match=r"^expected slots as whole numbers for each of 2"):
            places(odd, ends)


def test_stages_are_those_with_a_sum(case: Case) -> None:
    model = replace(case.model, conv="appnp", hops=2, teleport=0.1)
    cfg, nobody = replace(case.config(), model=model), torch.zeros(C + 1, dtype=torch.int64)
    rows = Ragged(torch.zeros(0, H), nobody)
    other: Payload = {"rows": rows, "row": Ragged(nobody[:0], nobody), "all": Shared(rows.t)}
    for number in (-1, 0, 4, 2**40):
        inbox: Payload = {**other, "stage": Shared(torch.tensor(number))}
        for op in (send_partial_sums, bns.serve, bns.store, cagnet.send, cagnet.hear_back):
            text = f"expected the number of a stage with a sum, one of [2, 3], got {number}"
            with refused(text):
                op(cfg, case.block, {"cagnet/place": rows}, inbox, KEY)


def test_weights_of_edges_and_slots_are_as_many(case: Case) -> None:
    block, rows = case.block, torch.arange(9)
    nothing = {"own": None, "cross": None, "heard": None}
    with pytest.raises(ProtocolError, match=r"^expected weights of \d+ edges among the rows"):
        partial_reach(block, rows, inner=torch.ones(999), **nothing)
    slots = len(block.halo.key)
    for odd in (torch.ones(slots + 1), torch.ones(slots, 2), torch.ones(0)):
        with pytest.raises(ProtocolError, match=f"^expected weights of {slots} halo slots, got"):
            boundary_reach(block, odd)


def test_rows_of_others_are_as_the_own(case: Case) -> None:
    cfg, state = passing(case)
    named = {
        "pass/slot": Ragged(torch.ones_like(case.block.halo.key).double(), case.block.halo.off)
    }
    state, _ = send_partial_sums(cfg, case.block, {**state, **named}, STAGE, KEY)
    slots = len(case.block.halo.key)
    right = torch.ones(slots, H, dtype=torch.float64)
    for odd in (right[:, 1:], right.float(), right[0], right.new_ones(0, 2**30)):
        inbox: Payload = {**STAGE, "rows": Ragged(odd, case.block.halo.off)}
        with pytest.raises(ProtocolError, match=r"^expected rows of 6 values of torch.float64"):
            bns.store(cfg, case.block, state, inbox, KEY)


def passing(case: Case) -> tuple[MethodConfig, State]:
    """A pass that has begun."""
    inbox = {f"weights/{name}": Shared(w) for name, w in case.weights.items()}
    cfg = case.config()
    return cfg, begin(cfg, case.block, {}, {**inbox, "train": Shared(torch.tensor(True))}, KEY)[0]


@pytest.mark.parametrize("place", [-1, 60, 2**31 + 1, 2**62])
def test_a_halo_stands_within_the_broadcast(case: Case, place: int) -> None:
    cfg, state = passing(case)
    state, reply = cagnet.send(cfg, case.block, state, STAGE, KEY)
    halo = case.block.halo
    for places in (torch.full((len(halo.key),), place), torch.zeros(1).long(), torch.zeros(2)):
        odd = {**state, "cagnet/place": Ragged(places, halo.off)}
        inbox = {**STAGE, "all": Shared(reply["rows"].t)}
        with pytest.raises(ProtocolError, match=r"^expected the places of \d+ halo slots among 60"):
            cagnet.hear(cfg, case.block, odd, inbox, KEY)


def test_what_a_broadcast_made_known_is_for_its_size_only(case: Case) -> None:
    cfg, state = passing(case)
    state, reply = cagnet.send(cfg, case.block, state, STAGE, KEY)
    halo = case.block.halo
    state = {**state, "cagnet/place": Ragged(torch.arange(len(halo.key)) % 60, halo.off)}
    rows = reply["rows"].t
    cagnet.hear(cfg, case.block, state, {**STAGE, "all": Shared(rows)}, KEY)
    with pytest.raises(ProtocolError, match=r"^expected the places of .* among 1 rows"):
        cagnet.hear(cfg, case.block, state, {**STAGE, "all": Shared(rows[:1])}, KEY)


@pytest.mark.parametrize("share", [-0.1, 1.1, NAN, INF])
def test_a_share_is_one(case: Case, share: float) -> None:
    inbox = {"share": Shared(torch.tensor(share, dtype=torch.float64))}
    with pytest.raises(ProtocolError, match=r"^expected a share in \[0, 1\], got \["):
        choose(case.config(), case.block, {}, inbox, KEY)


def test_each_boundary_row_is_served_once(case: Case) -> None:
    row = Ragged(torch.zeros(10, dtype=torch.int32), torch.tensor([0, 10, 10, 10, 10]))
    share = {"share": Shared(torch.tensor(0.5))}
    for op, more in ((serve, share), (bns.serve, STAGE)):
        cfg, state = passing(case)
        with refused("expected boundary rows in ascending order, got another order"):
            op(cfg, case.block, state, {**more, "row": row}, KEY)


def test_what_was_fetched_are_features_of_slots(case: Case) -> None:
    one = torch.tensor([0, 1, 1, 1, 1])
    slot, x = torch.zeros(1, dtype=torch.int32), torch.ones(1, F, dtype=torch.float64)

    def graph(slot: Tensor, x: Tensor) -> ClientBlock:
        return local_graph(case.block, {SLOT: Ragged(slot, one), ROWS: Ragged(x, one)})

    assert len(graph(slot, x).row_key) == 61
    for odd in (x.float(), x[:, :2], x.expand(2, F), x[0]):
        with pytest.raises(ProtocolError, match=r"^expected features torch.float64 \(1, 12\) of"):
            graph(slot, odd)
    with refused("expected halo slots, got others"):
        graph(slot + 2**20, x.clone())  # else it is known from before


@pytest.mark.parametrize("number", [-1, 61, 2**62])
def test_nobody_draws_more_than_there_is(case: Case, number: int) -> None:
    labels = Shared(torch.ones(K + 1, dtype=torch.int64))
    for odd in (torch.full((C,), number), torch.ones(C), torch.ones(1).long()):
        inbox: Payload = {"labels": labels, "draws": Stacked(odd)}
        with pytest.raises(ProtocolError, match=r"^expected draws of at most"):
            learn(case.config(), case.block, {}, inbox, KEY)
        share = Ragged(torch.full((60,), 0.1, dtype=torch.float64), case.block.off)
        state: State = {"sampler/share": share, "sampler/draws": Stacked(odd)}
        with pytest.raises(ProtocolError, match=r"^expected draws of at most"):
            draw(case.config(), case.block, state, {}, KEY)


@pytest.mark.parametrize(
    "off", [[0, 2], [1, 3], [0, 4], [0, 5, 3], [0, -1, 3], [[0, 3]], [], [0.0, 3.0]]
)
def test_offsets_of_a_damaged_state_are_refused(off: Any) -> None:
    from silograph.core.errors import CheckpointError

    given: Mapping[str, Tensor] = {"a/t": torch.ones(3), "a/off": torch.tensor(off)}
    with pytest.raises(CheckpointError, match=r"^expected ascending offsets of all rows of 'a'"):
        state_from(given)
    with pytest.raises(CheckpointError, match=r"^expected ascending offsets of all rows of 'a'"):
        state_from({**given, "a/t": torch.ones(())})
