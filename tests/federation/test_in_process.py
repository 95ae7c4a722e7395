"""The in-process engine: what ops see, where state goes, how replies are folded."""

from collections.abc import Callable

import pytest
import torch

from silograph.core.errors import OpError, ProtocolError
from silograph.core.key import Key
from silograph.core.kinds import Kind
from silograph.core.payload import Payload, Ragged, Shared, Stacked, State
from silograph.federation.base import Sum, WeightedMean, overwrites, per_client, positions_of
from silograph.federation.check import HAS
from silograph.federation.fold import Fold
from silograph.federation.in_process import InProcess
from silograph.graph.block.block import ClientBlock

KEY = Key.of(0)
IDS = tuple(f"client_{i}" for i in range(5))


def start(
    cfg: object, block: ClientBlock, state: State, inbox: Payload, key: Key
) -> tuple[State, Payload]:
    """Count calls, and keep a row for each node."""
    rows = torch.zeros(len(block.row_key), 2, dtype=torch.float64)
    return {"calls": Stacked(torch.zeros(block.num_clients)), "rows": Ragged(rows, block.off)}, {}


def visit(
    cfg: object, block: ClientBlock, state: State, inbox: Payload, key: Key
) -> tuple[State, Payload]:
    """Add the client's part of the inbox to its state; reply with nodes and a row for each."""
    calls = state["calls"].t + inbox["add"].t
    rows = state["rows"].t + key.uniform(block.row_key, 2)
    new: State = {"calls": Stacked(calls), "rows": Ragged(rows, block.off)}
    nodes = block.off.diff().double()
    return new, {"calls": Stacked(calls), "nodes": Stacked(nodes), "rows": Ragged(rows, block.off)}


def lose_state(
    cfg: object, block: ClientBlock, state: State, inbox: Payload, key: Key
) -> tuple[State, Payload]:
    return {}, {}


@pytest.fixture
def engine(make_graph: Callable, cut_block: Callable) -> Callable[[int], InProcess]:  # type: ignore[type-arg]
    block, route = cut_block(make_graph(40), 5)

    def build(block_size: int) -> InProcess:
        fed = InProcess(None, block, route, block_size)
        fed.call(start, {}, what=Kind.CONTROL, key=KEY)
        return fed

    return build


def talk(fed: InProcess) -> dict[str, torch.Tensor]:
    """Two partial calls and one to all; return the last reply."""
    ids = fed.ids
    for to in ([ids[0], ids[3]], [ids[1], ids[3], ids[4]]):
        add = {"add": Stacked(torch.arange(1.0, len(to) + 1))}
        fed.call(visit, add, what=Kind.CONTROL, rows=True, key=KEY.fold(len(to)), to=to)
    reply = fed.call(
        visit, {"add": Shared(torch.tensor(10.0))}, what=Kind.CONTROL, rows=True, key=KEY
    )
    return {name: field.t for name, field in reply.items()}


@pytest.mark.parametrize("block_size", [1, 2, 3, 5, 9])
def test_blocks_of_any_size_give_the_same_bits(
    engine: Callable[[int], InProcess], block_size: int
) -> None:
    expected, got = talk(engine(5)), talk(engine(block_size))
    # First call gives 1 and 2 to clients 0 and 3, the second 1, 2, 3 to clients 1, 3 and 4.
    assert got["calls"].tolist() == [11, 11, 10, 14, 13]
    assert all(torch.equal(got[name], expected[name]) for name in expected)


def test_lifted_op_means_the_same(engine: Callable[[int], InProcess]) -> None:
    add = {"add": Stacked(torch.arange(5.0))}
    plain = engine(5).call(visit, add, what=Kind.CONTROL, rows=True, key=KEY)
    lifted = engine(5).call(per_client(visit), add, what=Kind.CONTROL, rows=True, key=KEY)
    assert all(torch.equal(plain[name].t, lifted[name].t) for name in plain)


def test_per_client_keeps_the_name() -> None:
    assert per_client(visit).__name__ == "visit"


@pytest.mark.parametrize(
    ("to", "message"),
    [
        (["nobody"], "expected clients of this federation, got 'nobody'"),
        ([], "at least one client, each once and in the federation's order, got \\[\\]"),
        (["client_1", "client_0"], "each once and in the federation's order"),
        (["client_1", "client_1"], "each once and in the federation's order"),
    ],
)
def test_wrong_clients_are_refused(to: list[str], message: str) -> None:
    with pytest.raises(ProtocolError, match=message):
        positions_of(IDS, to)


def test_a_call_to_some_drops_their_fields_only(engine: Callable[[int], InProcess]) -> None:
    fed = engine(5)
    fed.call(lose_state, {}, what=Kind.CONTROL, key=KEY, to=fed.ids[:1])
    (state,) = fed.states()
    assert state[HAS + "calls"].t.tolist() == [False, True, True, True, True]
    assert len(state["calls"].t) == 4
    with pytest.raises(OpError, match="KeyError"):
        fed.call(visit, {"add": Shared(torch.ones(()))}, what=Kind.CONTROL, key=KEY, rows=True)


def test_weighted_mean_by_hand() -> None:
    fold = Fold(WeightedMean("n"))
    # (1 * 2 + 3 * 4) / 4 = 3.5; the client of weight 0 sent NaN and takes no part.
    fold.add({"n": Stacked(torch.tensor([1, 0])), "w": Stacked(torch.tensor([2.0, float("nan")]))})
    fold.add({"n": Stacked(torch.tensor([3])), "w": Stacked(torch.tensor([4.0]))})
    result = fold.result()
    assert result["w"].t.item() == 3.5
    assert result["n"].t.item() == 4


def test_mean_without_weight_has_the_weight_only() -> None:
    fold = Fold(WeightedMean("n"))
    fold.add({"n": Stacked(torch.zeros(2)), "w": Stacked(torch.full((2,), float("nan")))})
    result = fold.result()
    assert set(result) == {"n"}
    assert result["n"].t.item() == 0


def test_sum_by_hand() -> None:
    fold = Fold(Sum())
    fold.add({"a": Stacked(torch.tensor([[1, 2], [3, 4]]))})
    fold.add({"a": Stacked(torch.tensor([[10, 20]]))})
    assert fold.result()["a"].t.tolist() == [14, 26]


def test_fold_leaves_the_reply_untouched() -> None:
    sent = torch.tensor([1.0, 2.0])
    fold = Fold(Sum())
    fold.add({"a": Stacked(sent)})
    fold.add({"a": Stacked(sent)})
    assert fold.result()["a"].t.item() == 6
    assert sent.tolist() == [1, 2]


def test_only_stacked_replies_are_folded() -> None:
    with pytest.raises(ProtocolError, match=r"expected Stacked fields .* got Shared for 'w'"):
        Fold(Sum()).add({"w": Shared(torch.zeros(1))})


@pytest.mark.parametrize("reply", [{"w": [1.0]}, {"n": [-1.0], "w": [1.0]}])
def test_mean_needs_weights(reply: dict[str, list[float]]) -> None:
    fields = {name: Stacked(torch.tensor(value)) for name, value in reply.items()}
    with pytest.raises(ProtocolError, match="expected weights >= 0 in field 'n'"):
        Fold(WeightedMean("n")).add(fields)


@overwrites("sent")
def add_and_send(
    cfg: object, block: ClientBlock, state: State, inbox: Payload, key: Key
) -> tuple[State, Payload]:
    """Add one to what the client keeps, in place, and send it, and beside it what is new."""
    kept = state["sent"] if "sent" in state else Stacked(torch.zeros(block.num_clients))
    kept.t.add_(1)
    return {**state, "sent": kept}, {"kept": Stacked(kept.t[:, None]), "new": Stacked(kept.t + 1)}


@pytest.mark.parametrize("block_size", [2, 5])
def test_no_call_writes_to_a_reply_of_an_earlier_one(
    engine: Callable[[int], InProcess], block_size: int
) -> None:
    fed = engine(block_size)
    first, second = (fed.call(add_and_send, {}, what=Kind.CONTROL, key=KEY) for _ in range(2))
    assert first["kept"].t.flatten().tolist() == [1.0] * 5
    assert second["kept"].t.flatten().tolist() == [2.0] * 5


def test_the_rows_of_one_block_are_not_copied(engine: Callable[[int], InProcess]) -> None:
    made: list[torch.Tensor] = []

    def send(
        cfg: object, block: ClientBlock, state: State, inbox: Payload, key: Key
    ) -> tuple[State, Payload]:
        made.append(torch.ones(len(block.row_key), 2))
        return state, {"rows": Ragged(made[-1], block.off)}

    reply = engine(5).call(send, {}, what=Kind.CONTROL, key=KEY, rows=True)
    assert reply["rows"].t.data_ptr() == made[0].data_ptr()
