"""Rows that clients have alike are in a checkpoint once, and come back bit for bit."""

import dataclasses
from pathlib import Path

import pytest
import torch
from torch import Tensor

from runs import MakeGraph, go
from silograph.core.errors import CheckpointError
from silograph.federation.checkpoint import (
    MOST_TIMES,
    Checkpoint,
    from_bytes,
    packed,
    to_bytes,
    unpacked,
)

CLIENTS, ROWS, WIDTH = 40, 200, 64


def models(used: float, dtype: torch.dtype = torch.float32) -> Tensor:
    """Weights (C, R, H) of clients that have changed a share of the rows, each its own."""
    draws = torch.Generator().manual_seed(3)
    common = torch.randn(ROWS, WIDTH, generator=draws)
    common[0, :3] = torch.tensor([float("nan"), float("inf"), -0.0])
    own = torch.randn(CLIENTS, ROWS, WIDTH, generator=draws)
    is_own = torch.rand(CLIENTS, ROWS, 1, generator=draws) < used
    return torch.where(is_own, own, common).to(dtype)


def bits(t: Tensor) -> bytes:
    return t.numpy().tobytes()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int64])
@pytest.mark.parametrize("used", [0.0, 0.2, 0.7])
def test_what_is_packed_comes_back_bit_for_bit(used: float, dtype: torch.dtype) -> None:
    t = models(used, dtype)
    parts, names = packed({"w": t, "n": torch.tensor(3)})
    assert names == ["w"]
    stored = sum(part.nbytes for part in parts.values())
    first = 1 + CLIENTS // MOST_TIMES  # these clients stay whole
    rows = ROWS * (1 + first + used * (CLIENTS - first))
    assert stored < 1.05 * rows * t[0, 0].nbytes + CLIENTS * ROWS
    found = unpacked(parts, names)
    assert bits(found["w"]) == bits(t)
    assert found.keys() == {"w", "n"}


def test_zeros_of_both_signs_and_numbers_that_are_none_are_told_apart() -> None:
    t = torch.zeros(CLIENTS, ROWS, WIDTH)
    t[5, 7, WIDTH - 1], t[6, 8, 20] = -0.0, float("nan")
    parts, names = packed({"w": t})
    assert names == ["w"]
    assert bits(unpacked(parts, names)["w"]) == bits(t)


@pytest.mark.parametrize(
    "t",
    [
        models(1.0),  # nothing alike
        models(0.2)[:2, :100],  # small
        models(0.2).flatten(1),  # no rows
        models(0.2)[:, :, :1].repeat(1, 1, 33).bfloat16()[:, :, :33].contiguous(),  # odd width
    ],
    ids=["own", "small", "flat", "odd"],
)
def test_others_stay_as_they_are(t: Tensor) -> None:
    parts, names = packed({"w": t})
    assert names == []
    assert parts["w"] is t


@pytest.mark.parametrize(
    ("part", "value"),
    [
        ("alike", torch.zeros(CLIENTS, ROWS)),
        ("alike", torch.zeros(CLIENTS * ROWS, dtype=torch.bool)),
        ("alike", torch.zeros(CLIENTS, ROWS + 1, dtype=torch.bool)),
        ("alike", torch.ones(CLIENTS, ROWS, dtype=torch.bool)),
        ("common", torch.zeros(ROWS)),
        ("common", torch.zeros(ROWS, WIDTH + 1)),
        ("common", torch.zeros(ROWS, WIDTH).double()),
        ("own", torch.zeros(3, WIDTH)),
    ],
)
def test_parts_that_do_not_fit_are_one_line(part: str, value: Tensor) -> None:
    parts, names = packed({"w": models(0.2)})
    with pytest.raises(ValueError, match="rows of 'w' do not fit"):
        unpacked({**parts, f"w/{part}": value}, names)


@pytest.mark.parametrize("names", ["w", ["w"], 3, [["w"]], {"w/alike": 1}])
def test_names_of_nothing_are_one_line(names: object) -> None:
    said = Checkpoint(1, {"w": torch.zeros(2)}, {"alike": names})
    with pytest.raises(CheckpointError, match="expected facts and tensors in a checkpoint, got: "):
        from_bytes(b"".join(to_bytes(said)))


def test_a_small_file_makes_no_large_tensor() -> None:
    """A file of 8 kB would say that 1,000 clients have the same 1,000 rows."""
    many = {
        "w/alike": torch.ones(1000, 1000, dtype=torch.bool),
        "w/common": torch.zeros(1000, 100_000).half()[:, :1],
        "w/own": torch.zeros(0, 1).half(),
    }
    with pytest.raises(ValueError, match="rows of 'w' do not fit"):
        unpacked(many, ["w"])


def test_a_run_of_many_clients_has_no_full_models_in_its_checkpoint(
    make_graph: MakeGraph, tmp_path: Path
) -> None:
    """Each client has few of 600 features: all others have the other rows of its model, too."""
    graph = make_graph(160, features=600)
    number = torch.arange(160)[:, None]
    words = torch.zeros(160, 600).index_put_((number, number * 3 + torch.arange(9)), torch.ones(()))
    graph = dataclasses.replace(graph, x=words)
    out = tmp_path / "run"
    go(graph, method="local", clients=40, hidden=32, rounds=2, checkpoint_every=1, out=str(out))
    size = (out / "checkpoints" / "round-000000002.checkpoint").stat().st_size
    first_layers = 40 * 600 * 32 * 4  # bytes
    assert size < 0.6 * 3 * first_layers  # weights and both moments
