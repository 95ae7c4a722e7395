"""What an op may not do, caught on every block size, encoded or not."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from silograph.core.errors import ProtocolError
from silograph.core.key import Key
from silograph.core.kinds import Kind
from silograph.core.payload import Field, Patched, Payload, Ragged, Shared, Stacked, State, join
from silograph.federation.base import Op, Sum, WeightedMean
from silograph.federation.check import check_fields
from silograph.federation.fold import Fold
from silograph.federation.in_process import InProcess
from silograph.graph.block.block import ClientBlock, Route
from silograph.graph.graph import Graph

KEY = Key.of(0)


def replying(make: Callable[[int], Field]) -> Op:
    """An op whose reply to a block of C clients is `make(C)`."""

    def op(
        cfg: Any, block: ClientBlock, state: State, inbox: Payload, key: Key
    ) -> tuple[State, Payload]:
        return state, {"f": make(block.num_clients)}

    return op


WRONG: dict[str, tuple[Callable[[int], Field], str]] = {
    "shared": (lambda _: Shared(torch.zeros(1)), "expected Stacked or Ragged, got Shared for 'f'"),
    "too many": (lambda c: Stacked(torch.zeros(2 * c)), "a slice for each of . clients, got shape"),
    "too few": (lambda c: Stacked(torch.zeros(c - 1)), "a slice for each of . clients, got shape"),
    "scalar": (lambda _: Stacked(torch.tensor(1.0)), "a slice for each of . clients, got shape"),
    "rows": (
        lambda c: Ragged(torch.zeros(c + 1), torch.arange(c + 1)),
        "runs of . rows for . clients, got offsets",
    ),
    "clients": (
        lambda c: Ragged(torch.zeros(c + 1), torch.arange(c + 2)),
        "runs of . rows for . clients, got offsets",
    ),
    "bfloat16": (
        lambda c: Stacked(torch.zeros(c, dtype=torch.bfloat16)),
        "a dtype that frames carry, got torch.bfloat16, for 'f' in reply of op",
    ),
}


def patched(**other: Any) -> Patched:
    """Two clients, two bases of four rows of width 3; one row differs of each."""
    parts = {
        "base": torch.zeros(2, 4, 3),
        "which": torch.tensor([0, 1]),
        "t": torch.zeros(2, 3),
        "index": torch.tensor([3, 0]),
        "off": torch.tensor([0, 1, 2]),
    }
    return Patched(**(parts | other))


WRONG_PATCHES: dict[str, tuple[dict[str, Any], str]] = {
    "which": ({"which": torch.tensor([0])}, "a part for each of 2 clients, got 1"),
    "clients": ({"off": torch.tensor([0, 2])}, "a part for each of 2 clients, got 2"),
    "runs": (
        {"off": torch.tensor([0, 1, 3])},
        r"runs of 2 rows, got offsets \[0, 1, 3\] and 2 places",
    ),
    "places": ({"index": torch.tensor([0])}, "runs of 2 rows, got offsets .* and 1 places"),
    "start": (
        {"off": torch.tensor([1, 1, 2])},
        r"runs of 2 rows, got offsets \[1, 1, 2\] and 2 places",
    ),
    "order": ({"off": torch.tensor([0, 3, 2])}, r"ascending offsets, got \[0, 3, 2\]"),
    "width": ({"t": torch.zeros(2, 2)}, r"rows as those of the base, got shapes \(2, 2\)"),
    "place": ({"index": torch.tensor([0, 4])}, "every place below 4, got 0 to 4"),
    "negative": ({"index": torch.tensor([-1, 0])}, "every place below 4, got -1 to 0"),
    "base": ({"which": torch.tensor([0, 2])}, "every base below 2, got 0 to 2"),
}


@pytest.mark.parametrize("name", WRONG_PATCHES)
def test_wrong_patches_never_reach_a_kernel(name: str) -> None:
    other, message = WRONG_PATCHES[name]
    with pytest.raises(ProtocolError, match=f"expected {message} for 'f' in here"):
        check_fields({"f": patched(**other)}, 2, "here")


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("block_size", [1, 2, 5])
@pytest.mark.parametrize("name", WRONG)
def test_wrong_replies(
    make_graph: Callable[..., Graph],
    cut_block: Callable[..., tuple[ClientBlock, Route]],
    name: str,
    block_size: int,
    strict: bool,
) -> None:
    make, message = WRONG[name]
    fed = InProcess(None, *cut_block(make_graph(40), 5), block_size, strict=strict)
    with pytest.raises(ProtocolError, match=message):
        fed.call(replying(make), {}, what=Kind.CONTROL, rows=True, key=KEY)


def test_offsets_ascend() -> None:
    field = Ragged(torch.zeros(2), torch.tensor([0, 3, 2]))
    with pytest.raises(ProtocolError, match=r"ascending offsets, got \[0, 3, 2\] for 'f'"):
        check_fields({"f": field}, 2, "here", shared=True)


def test_too_many_fields_and_long_names() -> None:
    many = {str(i): Shared(torch.zeros(1)) for i in range(4097)}
    with pytest.raises(ProtocolError, match="at most 4096 fields in here, got 4097"):
        check_fields(many, 1, "here", shared=True)
    with pytest.raises(ProtocolError, match="a name of at most 255 bytes and 8 dimensions"):
        check_fields({"n" * 256: Shared(torch.zeros(1))}, 1, "here", shared=True)


def echo(
    cfg: Any, block: ClientBlock, state: State, inbox: Payload, key: Key
) -> tuple[State, Payload]:
    return {"extra": Stacked(torch.zeros(block.num_clients))}, {}


def test_an_inbox_has_a_part_for_each_client(
    make_graph: Callable[..., Graph], cut_block: Callable[..., tuple[ClientBlock, Route]]
) -> None:
    fed = InProcess(None, *cut_block(make_graph(40), 5), 5)
    with pytest.raises(
        ProtocolError, match=r"a slice for each of 5 clients, got shape .* in inbox"
    ):
        fed.call(echo, {"a": Stacked(torch.zeros(6))}, what=Kind.CONTROL, rows=True, key=KEY)


def test_blocks_agree_on_fields() -> None:
    parts: list[dict[str, Field]] = [{"a": Stacked(torch.zeros(1))}, {"b": Stacked(torch.zeros(1))}]
    with pytest.raises(ProtocolError, match=r"same fields from every block, got \['a'\] and"):
        join([*parts])
    fold = Fold(Sum())
    fold.add(parts[0])
    with pytest.raises(ProtocolError, match=r"the same fields from every block to reduce"):
        fold.add(parts[1])


def test_nothing_cannot_be_reduced() -> None:
    with pytest.raises(ProtocolError, match="the same fields from every block to reduce, got"):
        Fold(Sum()).add({})


def test_weights_are_numbers() -> None:
    reply = {"n": Stacked(torch.tensor([float("nan")])), "w": Stacked(torch.ones(1))}
    with pytest.raises(ProtocolError, match="expected weights >= 0 in field 'n'"):
        Fold(WeightedMean("n")).add(reply)
