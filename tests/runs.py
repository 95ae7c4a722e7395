"""Short runs that many tests share, and what they compare of them."""

import csv
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from silograph.experiment.run import run as loop
from silograph.experiment.run.clock import TrainingClock
from silograph.experiment.run.result import Result
from silograph.experiment.run.run import run
from silograph.experiment.run.setup import Setup
from silograph.experiment.run.snapshot import Snapshot, without_parts
from silograph.federation.checkpoint import read_checkpoint
from silograph.graph.graph import Graph
from silograph.methods import METHODS, RoundReport
from silograph.nn.conv import Params

MakeGraph = Callable[..., Graph]


FAST: dict[str, Any] = {
    "method": "fedavg",
    "clients": 4,
    "partition": "random",
    "rounds": 4,
    "hidden": 8,
    "lr": 0.05,
    "split": "0.4/0.3/0.3",
    "dtype": "float64",
    "checkpoint_every": 1,  # the default goes by the clock
}


def some_of(method: str, share: float) -> dict[str, float]:
    """Return options with which that share of all clients trains in a round, where one may say."""
    found = METHODS[method]
    if found.evaluate.all_silos or found.needs.selector != "uniform":
        return {}
    return {"participation": share}


def little_work(method: str) -> dict[str, Any]:
    """Return options with which a method prepares its rounds in less time: FedSage+ took a second.

    That is ten times as long as the rounds of a short run.
    """
    generates = method in ("fedsageplus", "fedsage_local")
    return {"options": {"generator_epochs": 3}} if generates else {}


def blind(method: str) -> dict[str, str]:
    """Return options with which a method decides nothing by scores."""
    found = METHODS[method]
    return {"interval": "fixed"} if found.needs.controller(found.options()).needs_scores else {}


def with_values(
    graph: Graph, columns: int = 1, *, missing: float = 0.0, scale: float = 1.0
) -> Graph:
    """Return the graph with numbers to predict that its features and neighbors tell."""
    generator = torch.Generator().manual_seed(columns)
    assert isinstance(graph.x, torch.Tensor)
    x = graph.x.double()
    slopes = torch.randn(x.shape[1], columns, generator=generator, dtype=torch.float64)
    y = scale * x @ slopes / x.shape[1] ** 0.5
    y[torch.rand(y.shape, generator=generator) < missing] = torch.nan
    return replace(graph, y=y, num_classes=columns, class_names=())


def go(graph: Graph, **options: Any) -> Result:
    return run(graph, **(FAST | options))


def rows_of(result: Result) -> list[dict[str, Any]]:
    """The rows without their wall-clock time."""
    return [{k: v for k, v in row.items() if k != "seconds"} for row in result.rounds]


def outcome(result: Result) -> dict[str, Any]:
    """The final result without what the machine decides."""
    skipped = ("seconds", "compile_seconds", "peak_memory_bytes", "result_dir", "flops_executed")
    return {k: v for k, v in result.to_dict().items() if k not in skipped}


def weights_of(result: Result) -> Params | None:
    return None if result.model is None else result.model.weights


def of(result: Result) -> Params:
    weights = weights_of(result)
    assert weights is not None
    return weights


def same_bits(a: Params | None, b: Params | None) -> bool:
    if a is None or b is None:
        return a is b
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


# Scores may come with a training call, or by calls of their own, which also count as work.
SCORING_COSTS = ("bytes", "bytes_evaluation", "flops")


def assert_close(ours: Result, theirs: Result, tolerance: float, *skipped: str) -> None:
    """The same weights and rows up to rounding; None only where the other has None."""
    for name, w in (weights_of(theirs) or {}).items():
        torch.testing.assert_close(of(ours)[name], w, rtol=0, atol=tolerance)
    assert len(ours.rounds) == len(theirs.rounds)
    for a, b in zip(rows_of(ours), rows_of(theirs), strict=True):
        assert a.keys() == b.keys()
        for name in a.keys() - set(skipped):
            same = a[name] is b[name] or a[name] == pytest.approx(b[name], rel=0, abs=tolerance)
            assert same, (name, a[name], b[name])


def files_of(folder: Path) -> dict[str, Any]:
    """Everything a run leaves, seconds, memory and the folder's name apart."""
    result = json.loads((folder / "result.json").read_text())
    for name in ("seconds", "compile_seconds", "peak_memory_bytes", "result_dir"):
        del result[name]
    rows = list(csv.DictReader((folder / "rounds.csv").read_text().splitlines()))
    for row in rows:
        del row["seconds"]
    model = folder / "model.safetensors"
    return {
        "result": result,
        "rows": rows,
        "ledger": (folder / "ledger.jsonl").read_text(),
        "clients": (folder / "clients.csv").read_text(),
        "model": model.read_bytes() if model.exists() else None,
        "models": {path.name: path.read_bytes() for path in folder.glob("models/*")},
    }


def kept_in(folder: Path, number: int, part: str) -> Params:
    """A part of what the clients of a run in one block held after a round."""
    found = read_checkpoint(folder / "checkpoints" / f"round-{number:09d}.checkpoint", number)
    prefix = f"client/0/{part}/"
    return {n.removeprefix(prefix): t for n, t in found.tensors.items() if n.startswith(prefix)}


class DiedError(Exception):
    """Stands for whatever ends a process."""


@contextmanager
def dying(monkeypatch: pytest.MonkeyPatch, last: int) -> Iterator[None]:
    """Let a run die in round `last`, after training and before its checkpoint."""

    def die(report: RoundReport, clients: int, t: int) -> Any:
        if t == last:
            raise DiedError
        return checked(report, clients, t)

    checked = loop.checked_facts
    with monkeypatch.context() as patch:
        patch.setattr(loop, "checked_facts", die)
        with pytest.raises(DiedError):
            yield


def run_until(
    monkeypatch: pytest.MonkeyPatch, graph: Graph | str, last: int, out: Path, **options: Any
) -> None:
    """Run, and die in round `last`; there is a checkpoint of the one before."""
    with dying(monkeypatch, last):
        run(graph, **{"checkpoint_every": 1, **options}, out=str(out))


def run_round(setup: Setup, before: Snapshot) -> Snapshot:
    """Run one round as the loop of a run does; return the run after it."""
    selection = loop._make_selection(setup)
    begun = loop.begin_round(setup, selection, before, TrainingClock(0.0))
    own = without_parts(before.state)
    trained = setup.method.round(setup.federation, begun.cfg, own, begun.t, begun.key)
    return loop.finish_round(setup, selection, before, begun, *trained)[0]
