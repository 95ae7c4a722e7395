"""Kernels give the same bits whether a process compiles them or finds them on disk."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import silograph
from commands import save
from silograph.graph.graph import Graph

pytest.importorskip("numba")

from silograph.nn.kernels.compile_notice import LINE

MakeGraph = Callable[..., Graph]
CODE = """
import json, sys
import numpy as np
import silograph
from silograph.nn.kernels import loss, training

if sys.argv[1:] == ["callee"]:  # a function of which `train` holds a copy
    loss.softmax_gradient(np.zeros((1, 3), np.float32), 0, 0, np.float32(1))
run = silograph.run(
    "g.npz", kernels="compiled", partition="random", clients=4, rounds=3, progress="plain"
)
losses = [[row[name] for name in sorted(row) if "loss" in name] for row in run.rounds]
print(json.dumps([sum(training.train.stats.cache_misses.values()), losses]))
"""


def trained(folder: Path, *arguments: str) -> tuple[int, Any, int]:
    """How often `train` was compiled, losses by round, and how often the user was told."""
    source = str(Path(silograph.__file__).parent.parent)
    environment = {
        **os.environ,
        "PYTHONPATH": source,
        "NUMBA_CACHE_DIR": str(folder / "numba"),
    }
    done = subprocess.run(
        [sys.executable, "-c", CODE, *arguments],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    compiled, losses = json.loads(done.stdout)
    return compiled, losses, done.stderr.count(LINE)


@pytest.mark.slow  # compiles every kernel
@pytest.mark.timeout(1800)
def test_bits_do_not_depend_on_what_a_process_compiled_or_loaded(
    tmp_path: Path, make_graph: MakeGraph
) -> None:
    save(tmp_path / "g.npz", make_graph(classes=7))  # wide enough for the loss to be vectorized
    compiled, expected, told = trained(tmp_path)
    assert (compiled, told) == (1, 1)
    assert len(expected) == 3
    assert len(expected[0]) > 1
    assert trained(tmp_path) == (0, expected, 0)
    assert trained(tmp_path, "callee") == (0, expected, 0)
