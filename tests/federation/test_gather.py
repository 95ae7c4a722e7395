"""What is gathered is the replies side by side, on every engine and without who is away."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from silograph.core.errors import ProtocolError
from silograph.core.key import Key
from silograph.core.kinds import Kind
from silograph.core.payload import Payload, Ragged, Shared, Stacked, State
from silograph.federation.base import Gather, Sum, WeightedMean, fold_of, overwrites
from silograph.federation.fold import Reduction
from silograph.federation.in_process import InProcess
from silograph.graph.block.block import ClientBlock

KEY = Key.of(0)


def tell(
    cfg: object, block: ClientBlock, state: State, inbox: Payload, key: Key
) -> tuple[State, Payload]:
    """Reply with nodes, a draw and a row of draws."""
    first = block.row_key[block.off[:-1]]
    nodes = block.off.diff()
    return state, {
        "nodes": Stacked(nodes),
        "loss": Stacked(key.uniform(first)[:, 0] + inbox["add"].t),
        "weights/w": Stacked(key.uniform(first, 3)),
    }


REDUCES = [
    Gather("loss"),
    Gather("loss", "weights/w"),
    Gather("loss", "nodes", fold=WeightedMean("nodes")),
    Gather("weights/w", fold=Sum()),
]


@pytest.mark.law(sample=6)
@pytest.mark.parametrize("reduce", REDUCES, ids=str)
@pytest.mark.parametrize("block_size", [1, 2, 5])
@pytest.mark.parametrize("to", [None, [0, 3], [4]])
@pytest.mark.parametrize("strict", [False, True])
def test_gathering_is_putting_replies_side_by_side(
    make_graph: Any, cut_block: Any, reduce: Gather, block_size: int, to: Any, strict: bool
) -> None:
    block, route = cut_block(make_graph(40), 5)
    fed = InProcess(None, block, route, block_size, strict=strict)
    names = None if to is None else [fed.ids[p] for p in to]
    inbox = {"add": Shared(torch.tensor(1.0).double())}
    call: dict[str, Any] = {"what": Kind.CONTROL, "key": KEY, "to": names}
    plain = fed.call(tell, inbox, **call)
    found = fed.call(tell, inbox, **call, reduce=reduce)
    positions = list(range(5)) if to is None else to
    for name in reduce.fields:
        whole = found[f"by_client/{name}"].t
        assert torch.equal(whole[positions], plain[name].t)
        others = [c for c in range(5) if c not in positions]
        assert not whole[others].any()
    assert found["by_client/answered"].t.nonzero()[:, 0].tolist() == positions
    folded = {} if reduce.fold is None else fed.call(tell, inbox, **call, reduce=reduce.fold)
    assert {n for n in found if not n.startswith("by_client/")} == set(folded)
    assert all(torch.equal(found[name].t, folded[name].t) for name in folded)
    records = [(r.bytes.tolist(), r.direction) for r in fed.ledger.records]
    assert records[:2] == records[2:4]


def test_those_that_do_not_answer_are_zeros() -> None:
    reduction = Reduction(Gather("a"), 4)
    reduction.add({"a": Stacked(torch.tensor([5.0]))}, torch.tensor([1]))
    reduction.add({"a": Stacked(torch.tensor([7.0]))}, torch.tensor([3]))
    found = reduction.result()
    assert found["by_client/a"].t.tolist() == [0, 5, 0, 7]
    assert found["by_client/answered"].t.tolist() == [False, True, False, True]


def keep(
    cfg: object, block: ClientBlock, state: State, inbox: Payload, key: Key
) -> tuple[State, Payload]:
    """Keep what came first; send what is kept."""
    came = state.get("came", inbox["came"])
    assert isinstance(came, Stacked)
    return {**state, "came": came}, {"came": came, "twice": Stacked(2 * came.t)}


@overwrites("came")
def spoil(
    cfg: object, block: ClientBlock, state: State, inbox: Payload, key: Key
) -> tuple[State, Payload]:
    """Write to what was kept."""
    state["came"].t.add_(1)
    return state, {}


@pytest.mark.parametrize("block_size", [1, 2, 5])
def test_clients_write_to_nothing_that_was_sent_or_gathered(
    make_graph: Any, cut_block: Any, block_size: int
) -> None:
    """One block's messages are not copied."""
    block, route = cut_block(make_graph(40), 5)
    fed = InProcess(None, block, route, block_size)
    mine = torch.arange(1.0, 6.0)
    call: dict[str, Any] = {"what": Kind.CONTROL, "key": KEY}
    inbox, reduce = {"came": Stacked(mine)}, Gather("came", "twice")
    first = fed.call(keep, inbox, **call, reduce=reduce)
    fed.call(spoil, {}, **call)
    then = fed.call(keep, inbox, **call, reduce=reduce)  # of memory that clients write to
    fed.call(spoil, {}, **call)
    assert mine.tolist() == first["by_client/came"].t.tolist() == [1, 2, 3, 4, 5]
    assert then["by_client/came"].t.tolist() == [2, 3, 4, 5, 6]
    assert then["by_client/twice"].t.tolist() == [4, 6, 8, 10, 12]


def test_a_reply_of_all_is_kept_as_it_is_unless_somebody_holds_it() -> None:
    reply = {"a": Stacked(torch.tensor([5.0, 7.0]))}
    for held in False, True:
        reduction = Reduction(Gather("a"), 2)
        reduction.add(reply, torch.arange(2), lambda _, held=held: held)  # type: ignore[misc]
        assert (reduction.result()["by_client/a"].t is reply["a"].t) is not held


@pytest.mark.parametrize("fields", [(), ("a", "a"), ("answered",)])
def test_names_to_gather(fields: tuple[str, ...]) -> None:
    with pytest.raises(ProtocolError, match="expected names of fields to gather"):
        Gather(*fields)


@pytest.mark.parametrize(
    ("field", "what"), [(None, "none"), (Ragged(torch.zeros(1), torch.tensor([0, 1])), "Ragged")]
)
def test_only_stacked_fields_are_gathered(field: Any, what: str) -> None:
    reduction = Reduction(Gather("a"), 1)
    with pytest.raises(
        ProtocolError, match=f"Stacked field 'a' in a reply to gather it, got {what}"
    ):
        reduction.add({} if field is None else {"a": field}, torch.tensor([0]))


def test_what_is_folded() -> None:
    mean: Callable[[], WeightedMean] = lambda: WeightedMean("nodes")  # noqa: E731
    assert fold_of(None) is None
    assert fold_of(Gather("a")) is None
    assert isinstance(fold_of(Gather("a", fold=mean())), WeightedMean)
    assert isinstance(fold_of(Sum()), Sum)


def test_what_is_gathered_need_not_be_folded() -> None:
    """A mean without some fields is the mean of the others, to the bit; these are gathered."""
    reply: dict[str, Any] = {
        "n": Stacked(torch.tensor([1.0, 3.0])),
        "loss": Stacked(torch.tensor([0.3, 0.7])),
        "w": Stacked(torch.tensor([[1.0, 2.0], [5.0, 4.0]])),
    }
    found = []
    for without in (), ("w",):
        reduction = Reduction(Gather("w", fold=WeightedMean("n", without=without)), 2)
        reduction.add(reply, torch.arange(2))
        found.append(reduction.result())
    both, one = found
    assert set(both) - set(one) == {"w"}
    assert all(torch.equal(field.t, both[name].t) for name, field in one.items())
    assert torch.equal(one["by_client/w"].t, reply["w"].t)
