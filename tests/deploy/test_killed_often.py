"""Servers and silos that get signals at random instants, over all methods and tasks.

A process of its own forks them (`federation_killing`); what each federation leaves has the bits of
the simulation.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("grpc")
pytest.importorskip("cryptography")

from federation_killing import CASES
from silograph.methods import METHODS

AT_SILOS = [
    name
    for name, method in METHODS.items()
    if method.setting.at_server is None and not method.setting.uncut
]
# Methods for ratings need their task; see CASES.
PLAIN = [name for name in AT_SILOS if name != "fedmf"]
KILLS = 12


def hit(case: str, path: Path, number: int, signals: str) -> None:
    """Let so many signals land, and check what their federations leave."""
    words = [case, str(path), str(number), "1", signals]
    done = subprocess.run(
        [sys.executable, "-m", "federation_killing", *words],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=False,
        timeout=1800,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    _, servers, silos = map(int, done.stdout.split())
    assert servers + silos >= number


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("case", [*PLAIN, *CASES])
def test_who_is_killed_often_leaves_no_trace(case: str, tmp_path: Path) -> None:
    hit(case, tmp_path, KILLS, "KILL")


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("case", ["fedavg", "scaffold", "label_guided", "ratings"])
def test_who_is_told_to_stop_in_any_phase_leaves_no_trace(case: str, tmp_path: Path) -> None:
    hit(case, tmp_path, KILLS, "TERM,INT")
