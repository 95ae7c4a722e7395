"""The scripts that measure federations, at a tiny size."""

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("grpc")
pytest.importorskip("cryptography")

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "federation" / "whole_runs.py"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("part", "says"),
    [
        ("training", "| fedavg | 2 | 2 |"),
        ("wire", "| fedavg | digits | 2 | 2 |"),
        ("kills", "silo killed: noticed after"),
    ],
)
def test_every_part_of_whole_runs(part: str, says: str) -> None:
    options = ["--dataset", "digits", "--silos", "2", "--rounds", "2", "--methods", "fedavg"]
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--part", part, *options],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert says in done.stdout
