"""Nothing is imported for the first time while the clock of a run's rounds is running."""

import subprocess
import sys

import pytest

SCRIPT = """
import sys
import numpy as np
import silograph as sg
from silograph.experiment.run import run as loop

begin, finish, before, new = loop.begin_round, loop.finish_round, set(), set()

def begin_watched(*given):
    before.update(sys.modules)
    return begin(*given)

def finish_watched(*given):
    finished = finish(*given)
    new.update(name for name in set(sys.modules) - before if not name.startswith("silograph"))
    return finished

loop.begin_round, loop.finish_round = begin_watched, finish_watched
numbers = np.arange(60)
ring = np.stack([numbers, (numbers + 1) % 60])
graph = sg.from_arrays(edge_index=ring, x=np.eye(60)[:, :7], y=numbers % 3)
options = {"clients": 3, "partition": "random", "rounds": 2, "kernels": "torch"}
sg.run(graph, method=sys.argv[1], progress="none", **options)
print(len(new), sorted(new)[:9])
"""


@pytest.mark.law(sample=24)
@pytest.mark.parametrize("method", ["local", "label_guided"])
def test_rounds_import_no_packages(method: str) -> None:
    """So the seconds of a run do not depend on which run of the process came first."""
    given = [sys.executable, "-c", SCRIPT, method]
    done = subprocess.run(given, capture_output=True, text=True, check=True)
    assert done.stdout == "0 []\n"
