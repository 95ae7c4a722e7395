"""What has to outlive a power failure is on the disk before anything tells of it."""

import os
from pathlib import Path

import pytest
import torch

import silograph as sg
from conftest import MakeGraph
from silograph.core.files import write_atomic
from silograph.federation.checkpoint import Checkpoint, CheckpointFolder
from silograph.study.study import StudyFile


@pytest.fixture
def synced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was synced, in order; "." is the test's folder."""
    seen: list[str] = []

    def note(file: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{file}"))
        assert path.is_dir() or path.stat().st_size > 0  # what is buffered would not be synced
        seen.append(os.path.relpath(path, tmp_path.resolve()))

    monkeypatch.setattr(os, "fsync", note)
    return seen


def test_a_file_then_its_name(tmp_path: Path, synced: list[str]) -> None:
    write_atomic(tmp_path / "a.json", "{}")
    assert synced == ["a.json.partial", "."]


@pytest.mark.parametrize("asked", [False, True])
def test_checkpoints_of_silos(tmp_path: Path, synced: list[str], asked: bool) -> None:
    folder = CheckpointFolder(tmp_path / "kept", synced=asked)
    for number in (1, 2):
        folder.write(Checkpoint(number, {"w": torch.ones(2)}, {}))
    files = [f"kept/round-{number:09d}.partial" for number in (1, 2)]
    assert synced == ([".", files[0], "kept", files[1], "kept"] if asked else [])


def test_every_file_of_a_finished_run_that_is_not_appended_to(
    make_graph: MakeGraph, tmp_path: Path, synced: list[str]
) -> None:
    sg.run(make_graph(), rounds=1, clients=2, out=str(tmp_path / "run"))
    grown = {"rounds.csv", "ledger.jsonl"}  # in simulations, which can be run again
    files = {path.name for path in (tmp_path / "run").iterdir() if path.is_file()} - grown
    assert "result.json" in files
    assert {Path(name).name.removesuffix(".partial") for name in synced} >= files


def test_every_line_of_a_study(
    tmp_path: Path, synced: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("silograph.study.study.digest_of", lambda line: line["digest"])
    with StudyFile(tmp_path / "s.jsonl") as file:
        synced.clear()
        for digest in ("a", "b"):
            file.add({"digest": digest})
            assert synced.pop() == "s.jsonl"
