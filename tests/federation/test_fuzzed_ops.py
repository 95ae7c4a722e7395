"""Whatever a server sends or a state file holds: an op may refuse it, the process lives on.

The calls are made in a process of their own (`fuzzed_ops`), as a kernel that reads or writes where
it must not ends a process or, worse, does not. Numba can check the bounds; then it is a finding.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("numba")

FUZZER = Path(__file__).parents[1] / "fuzzed_ops.py"


def fuzzed(path: Path, *words: object, **environment: str) -> dict[str, Any]:
    """What came of some calls; fails with the last one if they ended the process."""
    at = path / "at"
    done = subprocess.run(
        [sys.executable, str(FUZZER), "--at", str(at), *map(str, words)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    last = at.read_text() if at.exists() else "none"
    assert done.returncode == 0, f"{done.returncode} in call {last}: {done.stderr[:4000]}"
    found: dict[str, Any] = json.loads(done.stdout)
    assert not found["found"], "\n".join(found["found"])
    return found


def assert_much_was_tried(found: dict[str, Any], least: int) -> None:
    """Calls were made, of which a share got through the first check."""
    assert found["calls"] >= least
    assert found["came"]["ok"] > 0.2 * found["calls"]
    assert found["came"]["ProtocolError"] > 0.2 * found["calls"]


def test_some_odd_calls_do_no_harm(tmp_path: Path) -> None:
    assert_much_was_tried(fuzzed(tmp_path, "--short", "--calls", 400), 400)


@pytest.mark.slow
@pytest.mark.timeout(5400)
@pytest.mark.parametrize("seed", range(4))
def test_odd_calls_do_no_harm(tmp_path: Path, seed: int) -> None:
    """Every op is called, and most of them with something that they take."""
    found = fuzzed(tmp_path, "--calls", 25_000, "--seed", seed)
    assert_much_was_tried(found, 25_000)
    assert all(found["ops"].values())
    taken = [name for name, came in found["ops"].items() if came.get("ok", 0) > 0]
    assert len(taken) > 0.9 * len(found["ops"])


@pytest.mark.slow
@pytest.mark.timeout(5400)
def test_kernels_that_check_their_bounds_find_nothing(tmp_path: Path) -> None:
    """Kernels are compiled anew for this, with checks."""
    where = {"NUMBA_BOUNDSCHECK": "1", "NUMBA_CACHE_DIR": str(tmp_path / "numba")}
    assert_much_was_tried(fuzzed(tmp_path, "--calls", 20_000, "--seed", 9, **where), 20_000)
