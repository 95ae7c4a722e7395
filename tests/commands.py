"""Commands as tests give them, and what they print."""

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import Tensor

from silograph.cli import run_app
from silograph.graph.graph import Graph

Capture = pytest.CaptureFixture[str]


MakeGraph = Callable[..., Graph]


QUICK = [
    *("--method", "fedavg", "--rounds", "2", "--clients", "3", "--partition", "random"),
    *("--hidden", "4"),
]
KERNELS = "compiled" if importlib.util.find_spec("numba") else "torch"
RESULT_KEYS = [
    *("dataset", "method", "clients", "partition", "rounds", "seed", "partition_hash", "test"),
    *(
        "val",
        "each_best",
        "metric",
        "baseline",
        "better_untrained",
        "by_class",
        "decisions",
        "confusion",
        "local_bias",
        "judged_without",
        "best_round",
        "stopped",
        "advice",
        "bytes",
        "flops",
        "flops_by_part",
        "flops_executed",
        "seconds",
        "compile_seconds",
        "peak_memory_bytes",
    ),
    "result_dir",
]
PLAN = f"{KERNELS} kernels, 3 clients at once, 1 thread"  # of QUICK


def save(path: str | Path, graph: Graph, **changes: Any) -> None:
    assert isinstance(graph.x, Tensor)
    edges = graph.edge_index.numpy()
    arrays = {"x": graph.x.numpy(), "edge_index": edges, "y": graph.y.numpy()}
    np.savez(path, **{k: v for k, v in (arrays | changes).items() if v is not None})


def everything(folder: Path) -> dict[str, bytes | None]:
    """Every path below a folder, and what its files hold."""
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None
        for path in sorted(folder.rglob("*"))
    }


def warm_up() -> None:
    """Have the kernels of QUICK compiled and on the disk: the first run of a machine says so."""
    assert run_app(["run", "g.npz", *QUICK, "--quiet", "--json", "--out", "warm-up"]) == 0


def printed(capsys: Capture, *arguments: str) -> str:
    """Standard output of a command that succeeds."""
    capsys.readouterr()
    assert run_app(list(arguments)) == 0
    return capsys.readouterr().out
