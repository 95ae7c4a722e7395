"""Whole runs in both tiers: compiled kernels give what torch gives, and the same bits always.

In the compiled tier nothing of a client depends on the block it is in, so block size, number of
threads and interruptions change no bit of a run.
"""

from pathlib import Path
from typing import Any

import pytest
import torch

import silograph as sg
from runs import (
    FAST,
    MakeGraph,
    assert_close,
    files_of,
    go,
    little_work,
    outcome,
    rows_of,
    run_until,
    same_bits,
    weights_of,
)
from silograph.core.errors import ConfigError
from silograph.experiment.run.result import Result
from silograph.methods import METHODS

pytest.importorskip("numba")

SCHEDULES: dict[str, dict[str, Any]] = {
    "full": {"local_epochs": 2},
    "drawn": {"local_epochs": 2, "batch_size": 3, "fanout": "2,1"},
}
IN_TORCH = ("scaffold",)  # global training and corrected steps are torch's alone
COMPILED = [n for n, m in METHODS.items() if not m.evaluate.crosses and n not in IN_TORCH]
METHOD = pytest.mark.parametrize("method", COMPILED)
SCHEDULE = pytest.mark.parametrize("schedule", SCHEDULES)


def assert_same(ours: Result, theirs: Result) -> None:
    """The same bits and the same costs."""
    assert same_bits(weights_of(ours), weights_of(theirs))
    assert rows_of(ours) == rows_of(theirs)
    assert outcome(ours) == outcome(theirs)
    assert list(ours.ledger.records) == list(theirs.ledger.records)


@pytest.mark.law(sample=48)
@SCHEDULE
@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize("sparse", [True, False])
@METHOD
def test_tiers_give_the_same_model_and_the_same_ledger(
    make_graph: MakeGraph, method: str, sparse: bool, keep: bool, schedule: str
) -> None:
    graph = make_graph(60, features=12, sparse=sparse)
    options = {"method": method, "keep_optimizer": keep, "rounds": 3, **SCHEDULES[schedule]}
    options |= little_work(method)
    ours, theirs = (go(graph, kernels=kernels, **options) for kernels in ("compiled", "torch"))
    assert_close(ours, theirs, 1e-10)
    records = zip(ours.ledger.records, theirs.ledger.records, strict=True)
    assert all(a == b for a, b in records)
    assert ours.best_round == theirs.best_round


@pytest.mark.law(sample=24)
@pytest.mark.parametrize("model", ["sage", "mlp"])
@SCHEDULE
def test_tiers_agree_for_every_layer(make_graph: MakeGraph, model: str, schedule: str) -> None:
    graph = make_graph(60, features=12, sparse=True, multilabel=model == "mlp")
    options = {"model": model, "participation": 0.5, "momentum": 0.9, "optimizer": "sgd"}
    ours, theirs = (
        go(graph, kernels=kernels, **options, **SCHEDULES[schedule])
        for kernels in ("compiled", "torch")
    )
    assert_close(ours, theirs, 1e-10)
    assert list(ours.ledger.records) == list(theirs.ledger.records)


@pytest.mark.law(sample=6)
@SCHEDULE
@pytest.mark.parametrize("participation", [1.0, 0.5])
@pytest.mark.parametrize("method", ["fedavg", "fedopt", "local"])
def test_block_size_changes_no_bit_of_a_compiled_run(
    make_graph: MakeGraph, method: str, participation: float, schedule: str
) -> None:
    graph = make_graph(60, features=12, sparse=True, missing=0.1)
    options = {"method": method, "participation": participation, "dtype": "float32"}
    runs = [
        go(graph, **options, **SCHEDULES[schedule], kernels="compiled", block_size=size)
        for size in (4, 1, 2)
    ]
    for other in runs[1:]:
        assert_same(other, runs[0])


@pytest.mark.law(sample=24)
@SCHEDULE
@METHOD
def test_threads_change_no_bit_of_a_compiled_run(
    make_graph: MakeGraph, method: str, schedule: str
) -> None:
    graph = make_graph(60, features=12, sparse=method == "fedavg")
    one, two = (
        go(graph, method=method, threads=threads, kernels="compiled", **SCHEDULES[schedule])
        for threads in (1, 2)
    )
    assert_same(two, one)
    assert torch.get_num_threads() == 1


@pytest.mark.law(sample=12)
@pytest.mark.parametrize("kernels", ["compiled", "torch"])
@pytest.mark.parametrize("method", ["fedopt", "local"])
def test_an_interrupted_run_goes_on_to_the_same_bits(
    make_graph: MakeGraph,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    method: str,
    kernels: str,
) -> None:
    graph = make_graph(60, features=12, sparse=True)
    options = FAST | SCHEDULES["drawn"] | {"method": method, "kernels": kernels, "block_size": 3}
    sg.run(graph, **options, out=str(tmp_path / "whole"))
    run_until(monkeypatch, graph, 3, tmp_path / "cut", **options)
    sg.resume(tmp_path / "cut", graph=graph)
    assert files_of(tmp_path / "cut") == files_of(tmp_path / "whole")


def test_a_run_does_not_go_on_in_the_other_tier(
    make_graph: MakeGraph, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file says that kernels were compiled; without numba there are none."""
    graph = make_graph(60)
    run_until(monkeypatch, graph, 2, tmp_path / "cut", **FAST)
    monkeypatch.setattr("silograph.nn.backends.importlib.util.find_spec", lambda _: None)
    with pytest.raises(
        ConfigError, match=r"a run for compiled kernels, got: numba is not installed"
    ):
        sg.resume(tmp_path / "cut", graph=graph)
