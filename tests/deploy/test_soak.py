"""A long run of many silo processes under faults: memory stays flat, and nothing is lost.

By default 60 rounds of 5 silos; SILOGRAPH_SOAK=ROUNDS,SILOS,SECONDS asks for more, such as
200,20,900.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("grpc")
pytest.importorskip("cryptography")

SETTLED = 0.25  # of the rounds, after which memory may not grow
GROWTH = 1.05


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_memory_is_flat_and_nothing_is_lost(tmp_path: Path) -> None:
    rounds, silos, seconds = os.environ.get("SILOGRAPH_SOAK", "60,5,600").split(",")
    done = subprocess.run(
        [sys.executable, "-m", "soak", str(tmp_path), rounds, silos, seconds, "1"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    outcome = json.loads(done.stdout)
    assert outcome["complete"], outcome
    assert outcome["lost"] == {"rounds": [], "audits": []}
    settled = [line for line in outcome["memory"] if line[0] >= SETTLED * int(rounds)]
    for place in (1, 2):  # the server, the largest silo
        assert max(line[place] for line in settled) <= GROWTH * settled[0][place], outcome["memory"]
