"""One reply in every form that it can have stands for the same tensors and the same changes."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from silograph.core.payload import Field, Ragged, Shared, Stacked
from silograph.federation.decoder import (
    SCALE,
    WHOLE,
    Decoder,
    as_bytes,
    as_half_bytes,
    as_halves,
    rows_for,
)

BASE = torch.arange(12.0, dtype=torch.float64).view(6, 2)
ROWS = torch.tensor([1, 4, 5])
KNOWN = Ragged(torch.tensor([0, 2, 1, 4, 5]).int(), torch.tensor([0, 2, 5]))  # of two clients
CHANGE = torch.zeros(6, 2, dtype=torch.float64)
CHANGE[ROWS] = torch.tensor([[127.0, -3.0], [0.0, 127.0], [-127.0, 5.0]], dtype=torch.float64)
CHANGE4 = CHANGE.clamp(-7, 7)  # exact in half bytes
KEPT = Decoder(known={"w": KNOWN}, others={"w": BASE})


def sent(small: str, some: bool) -> tuple[Decoder, dict[str, Field]]:
    """What the second client sends, exactly."""
    form = KEPT if some else WHOLE
    off = torch.tensor([0, len(ROWS)])

    def field(t: Tensor) -> Field:
        return Ragged(t[0], off) if some else Stacked(t)

    whole = CHANGE4 if small == "int4" else CHANGE
    change = whole[None, ROWS] if some else whole[None]
    if small == "exact":
        return form, {"w": field(BASE[None, ROWS] + change if some else BASE + change)}
    decoder = replace(form, bases={"w": BASE})
    if small == "float16":
        return decoder, {"w": field(as_halves(change))}
    t, scale = as_half_bytes(change) if small == "int4" else as_bytes(change)
    return decoder, {"w": field(t), f"{SCALE}w": field(scale)}


@pytest.mark.parametrize("some", [False, True])
@pytest.mark.parametrize("small", ["exact", "float16", "int8", "int4"])
def test_all_forms_say_the_same(small: str, some: bool) -> None:
    decoder, reply = sent(small, some)
    decoder.check(2)
    decoder.check_rows(reply, 1)
    found = decoder.whole(reply, torch.tensor([1]))
    assert set(found) == {"w"}  # scales are read
    whole = found["w"]
    t = whole.t if isinstance(whole, Stacked) else whole.slice(0)[None]  # type: ignore[union-attr]
    expected = CHANGE4 if small == "int4" else CHANGE
    assert torch.equal(t[0], BASE + expected)
    mine = Ragged(KNOWN.t[2:], torch.tensor([0, 3]))
    start = rows_for(BASE, mine) if some else Shared(BASE)
    change = decoder.change("w", reply, start, 1)
    assert change is not None
    assert torch.equal(change, expected[ROWS] if some else expected)


def test_rows_that_were_sent_in_another_call_have_changes_too() -> None:
    """Else a silo could move them as far as it likes."""
    decoder, reply = sent("exact", some=True)
    change = decoder.change("w", reply, None, 1)
    assert change is not None
    assert torch.equal(change, CHANGE[ROWS])


def test_nobody_knows_a_change_from_nothing() -> None:
    reply = {"w": Stacked(BASE[None])}
    assert WHOLE.change("w", reply, None, 0) is None
    assert WHOLE.change("w", reply, Shared(BASE[:1]), 0) is None


@pytest.mark.parametrize("share", [0.0, -0.5])
def test_rows_of_no_share_that_change_have_moved_without_bound(share: float) -> None:
    """The server divides their sum by the shares of others, so they count in full."""
    decoder, shares = Decoder(shares={"w": "s"}), torch.full((1, 6), 0.5, dtype=torch.float64)
    honest = {"w": Stacked(CHANGE[None] / 2), "s": Stacked(shares)}
    change = decoder.change("w", honest, None, 0)
    assert change is not None
    assert torch.equal(change, CHANGE)
    shares[0, [0, 4]] = share
    told = decoder.change("w", {**honest, "s": Stacked(shares)}, None, 0)
    assert told is not None
    assert torch.equal(told[0], torch.zeros(2, dtype=torch.float64))  # which does not change
    assert told[4, 1] == torch.inf
