"""Checkpoint files: exact, checked, two of them, and never half there."""

import struct
import zlib
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mistakes import raises_code
from silograph.core.errors import CheckpointError
from silograph.federation.checkpoint import Checkpoint, CheckpointFolder, from_bytes, to_bytes

TENSORS = {
    "w": torch.tensor([[1.0, float("nan")], [float("inf"), -0.0]]),
    "n": torch.tensor(7, dtype=torch.int32),
    "flag": torch.tensor([True, False]),
    "empty": torch.zeros(0, 3, dtype=torch.float64),
}


def example(number: int = 3) -> Checkpoint:
    return Checkpoint(number, TENSORS, {"version": "1", "nested": {"list": [1, 2.5, None]}})


def assert_same(a: Checkpoint, b: Checkpoint) -> None:
    assert (a.round, a.facts) == (b.round, b.facts)
    assert a.tensors.keys() == b.tensors.keys()
    for name, t in a.tensors.items():
        other = b.tensors[name]
        assert (t.dtype, t.shape) == (other.dtype, other.shape)
        assert t.numpy().tobytes() == other.numpy().tobytes()


def test_round_trip_keeps_every_bit() -> None:
    assert_same(from_bytes(b"".join(to_bytes(example()))), example())


def test_names_keep_their_order() -> None:
    """A method may walk through its state, and add numbers up in that order."""
    dtypes = torch.float32, torch.float64, torch.int32
    names = [f"{(7 * n) % 40}/w" for n in range(40)]
    tensors = {name: torch.zeros(n % 3, dtype=dtypes[n % 3]) for n, name in enumerate(names)}
    again = from_bytes(b"".join(to_bytes(Checkpoint(1, tensors, {}))))
    assert list(again.tensors) == names


def test_names_of_other_tensors_are_refused() -> None:
    head, facts, saved = to_bytes(example())
    facts = facts.replace(b'"flag"', b'"flab"')
    length = struct.pack("<I", len(facts))
    crc = struct.pack("<I", zlib.crc32(saved, zlib.crc32(facts, zlib.crc32(length))))
    with pytest.raises(CheckpointError, match="got: names of other tensors"):
        from_bytes(head[:4] + crc + length + facts + saved)


@given(st.data())
def test_every_flipped_bit_is_noticed(data: st.DataObject) -> None:
    whole = bytearray(b"".join(to_bytes(example())))
    whole[data.draw(st.integers(0, len(whole) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    with pytest.raises(CheckpointError):
        from_bytes(bytes(whole))


@given(st.integers(0, 400))
def test_every_cut_is_noticed(size: int) -> None:
    whole = b"".join(to_bytes(example()))
    with pytest.raises(CheckpointError):
        from_bytes(whole[: min(size, len(whole) - 1)])


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"SGC1", "expected a checkpoint, got 4 bytes"),
        (b"PK" * 20, "expected a checkpoint that starts with b'SGC1', got b'PKPK'"),
        (b"SGC1" + bytes(30), "agrees with its checksum, got a damaged one"),
    ],
)
def test_what_is_no_checkpoint(data: bytes, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        from_bytes(data)


def test_right_checksum_over_nonsense() -> None:
    import struct
    import zlib

    body = struct.pack("<I", 2) + b"[]" + b"xx"
    data = b"SGC1" + struct.pack("<I", zlib.crc32(body)) + body
    with pytest.raises(CheckpointError, match="expected facts and tensors in a checkpoint, got"):
        from_bytes(data)


def test_two_are_kept(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path / "checkpoints")
    assert folder.latest() == (None, [])
    for number in (1, 2, 3, 12):
        folder.write(example(number))
    names = sorted(f.name for f in folder.path.iterdir())
    assert names == ["round-000000003.checkpoint", "round-000000012.checkpoint"]
    latest, damaged = folder.latest()
    assert latest is not None
    assert (latest.round, damaged) == (12, [])


def test_a_damaged_one_falls_back_and_says_so(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path)
    for number in (4, 5):
        folder.write(example(number))
    newest = tmp_path / "round-000000005.checkpoint"
    newest.write_bytes(newest.read_bytes()[:-1])
    latest, damaged = folder.latest()
    assert latest is not None
    assert_same(latest, example(4))
    assert len(damaged) == 1
    assert damaged[0].startswith("round-000000005.checkpoint cannot be used: expected a checkpoint")
    (tmp_path / "round-000000004.checkpoint").write_bytes(b"")
    with raises_code(CheckpointError, "missing-checkpoint"):
        folder.latest()


def test_other_files_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "round-000000001.partial").write_bytes(b"half")
    (tmp_path / "notes.txt").write_text("mine")
    folder = CheckpointFolder(tmp_path)
    assert folder.latest() == (None, [])
    for number in (1, 2, 3):
        folder.write(example(number))
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_half_a_checkpoint_is_not_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither by Ctrl-C nor, once the run is resumed, by a process that was killed."""
    folder = CheckpointFolder(tmp_path)

    def interrupted(_: Checkpoint) -> list[bytes]:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("silograph.federation.checkpoint.to_bytes", interrupted)
        with pytest.raises(KeyboardInterrupt):
            folder.write(example(1))
    assert list(tmp_path.iterdir()) == []
    folder.write(example(1))
    kept = {"round-000000001.checkpoint", "notes.partial"}
    for name in ("round-000000002.partial", "best-000000001.partial", "notes.partial"):
        (tmp_path / name).touch()
    folder.drop_partial()
    assert {path.name for path in tmp_path.iterdir()} == kept
