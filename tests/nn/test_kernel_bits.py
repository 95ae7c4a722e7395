"""Kernels give the same bits whether a process compiles them or finds them on disk."""

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from numba.core.caching import IndexDataCacheFile

import silograph
from commands import save
from silograph.graph.graph import Graph

pytest.importorskip("numba")

from silograph.core.compiling import one_at_a_time, saved_alone
from silograph.nn.kernels.arrays import LINE

MakeGraph = Callable[..., Graph]
CODE = """
import json, sys
import numba
import numpy as np
import silograph
from silograph.nn.kernels import training
from silograph.nn.kernels import training as loss

@numba.njit
def another(logits):
    return loss.softmax_gradient(logits, 0, 0, np.float32(1))

if sys.argv[1:] == ["another"]:  # it holds a copy of what `train` holds a copy of
    another(np.zeros((1, 3), np.float32))
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


TOGETHER = """
import sys
import numpy as np
from silograph.nn.kernels.arrays import StepRule
from silograph.nn.kernels.optim import untouched_rows_after

print("ready", flush=True)
sys.stdin.readline()
rule = StepRule(False, 0.1, 0.5, 0.0, 0, 0.0, 0.0, 0.0, 0.0)
untouched_rows_after(np.ones(1), rule, 1, np.empty((4, 1)))
print(sum(untouched_rows_after.stats.cache_misses.values()))
"""


def test_one_of_two_compiles_and_the_other_finds_it(tmp_path: Path) -> None:
    """Locks of one process exclude each other as those of two do."""
    done: list[str] = []
    both = threading.Barrier(2)

    def compiles(signature: str) -> str:
        if signature in done:
            return "found"
        time.sleep(0.05)  # the other one would begin in this time
        done.append(signature)
        return "compiled"

    def ask(signature: str) -> str:
        both.wait()
        return str(one_at_a_time(compiles, tmp_path, "k")(signature))

    with ThreadPoolExecutor(2) as pool:
        assert sorted(pool.map(ask, ["float32"] * 2)) == ["compiled", "found"]
        assert list(pool.map(ask, ["float64", "int64"])) == ["compiled"] * 2


@pytest.mark.slow  # real processes
def test_of_processes_that_start_together_one_compiles(tmp_path: Path) -> None:
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    where = {
        "PYTHONPATH": str(Path(silograph.__file__).parent.parent),
        "NUMBA_CACHE_DIR": str(tmp_path / "numba"),
    }
    command, environment = [sys.executable, "-c", TOGETHER], {**os.environ, **where}
    together = [subprocess.Popen(command, env=environment, **pipes) for _ in range(2)]  # type: ignore[call-overload]
    for process in together:
        assert process.stdout.readline() == "ready\n"
    for process in together:
        process.stdin.write("go\n")
        process.stdin.flush()
    assert sorted(process.communicate()[0] for process in together) == ["0\n", "1\n"]


def test_a_folder_that_cannot_be_written_makes_nobody_wait(tmp_path: Path) -> None:
    compiles = one_at_a_time(lambda signature: f"compiled for {signature}", tmp_path / "no", "k")
    assert compiles("float32") == "compiled for float32"


def test_code_for_two_types_that_is_saved_at_once_is_all_there(tmp_path: Path) -> None:
    """The index of numba loses one of two that are saved together, or mixes their files up."""
    both = threading.Barrier(2)

    def save(types: str) -> None:
        file: Any = IndexDataCacheFile(str(tmp_path), "k", b"stamp")  # type: ignore[no-untyped-call]
        write = file._save_index

        def later(known: object) -> None:
            time.sleep(0.05)  # the other one would have read the index by then
            write(known)

        file._save_index = later
        both.wait()
        saved_alone(file.save, tmp_path / "k.lock")(types, f"code for {types}")

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(save, ["float32", "float64"]))
    found: Any = IndexDataCacheFile(str(tmp_path), "k", b"stamp")  # type: ignore[no-untyped-call]
    assert [found.load(t) for t in ("float32", "float64")] == [
        "code for float32",
        "code for float64",
    ]


def test_a_compilation_that_fails_leaves_the_lock(tmp_path: Path) -> None:
    def fails_once(signature: object) -> str:
        asked.append(signature)
        if len(asked) == 1:
            raise RuntimeError("out of memory")
        return "compiled"

    asked: list[object] = []
    compiles = one_at_a_time(fails_once, tmp_path, "k")
    with pytest.raises(RuntimeError, match="out of memory"):
        compiles("float32")
    assert compiles("float32") == "compiled"


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
    assert trained(tmp_path, "another") == (0, expected, 0)
