"""Laws of workers: a run leaves the same bits as in one process, also where workers are lost."""

import itertools
import logging
import random
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import silograph as sg
from mistakes import raises_code
from rating_graphs import rating_graph
from runs import FAST, MakeGraph, dying, files_of, little_work, run_until, some_of
from silograph.core.config import make_config
from silograph.core.errors import OpError, ProtocolError
from silograph.experiment.resolve.resolve import cores_of_run, num_workers
from silograph.federation.checkpoint import read_checkpoint
from silograph.federation.workers.engine import share_out
from silograph.federation.workers.packing import pack, unpack
from silograph.federation.workers.worker import Worker
from silograph.graph.block.block import ClientBlock
from silograph.graph.graph import Graph
from silograph.methods import METHODS
from silograph.study.cells import Cell
from silograph.study.train_agent import AgentTraining, describe_training
from worker_pools import Room, rooms

__all__ = ["rooms"]
WORKERS: dict[str, Any] = {"workers": 2, "keep_every": 2}
RUN: dict[str, Any] = {**FAST, "clients": 5, "block_size": 2, "kernels": "torch"}
SETTINGS: dict[str, dict[str, Any]] = {
    "strict": {"strict": True},
    "one block": {"block_size": 5},
    "median": {"aggregator": "median"},
    "kept optimizers": {"keep_optimizer": True, "participation": 0.5},
    "round robin": {"selector": "round_robin", "options": {"selector.clients": 2}},
    "oort": {"selector": "oort", "options": {"selector.clients": 2}},
    "power of choice": {"selector": "power_of_choice", "options": {"selector.clients": 2}},
    "sampled neighbors": {"model": "sage", "batch_size": 4, "fanout": "2,2"},
    "collected": {"collect": 0.5},
    "bytes": {"weights_as": "int8", "weight_rows": "used"},
    "standardized": {"normalize": "standard"},
    "drift": {"feature_drift": True},
    "threads": {"threads": 2},
    "compiled": {"kernels": "auto", "dtype": "float32"},
}


def check_equal(graph: Graph | str, folder: Path, **options: Any) -> None:
    """Assert that workers leave the files that a run in one process leaves."""
    sg.run(graph, **RUN | options, out=str(folder / "here"))
    sg.run(graph, **RUN | options | WORKERS, out=str(folder / "workers"))
    assert files_of(folder / "workers") == files_of(folder / "here")


@pytest.mark.law(sample=4)
@pytest.mark.parametrize("method", METHODS)
def test_every_method(
    make_graph: MakeGraph, rooms: list[Room], tmp_path: Path, method: str
) -> None:
    options = {"method": method, **some_of(method, 0.6), **little_work(method)}
    check_equal(make_graph(), tmp_path, **options)
    assert [room.size for room in rooms] == [1 if METHODS[method].setting.uncut else 2]


@pytest.mark.law(sample=2)
@pytest.mark.parametrize(
    ("method", "model"),
    [
        ("fedacs", "rating_gcn"),
        ("fedmf", "rating_mf"),
        ("fedgnn", "rating_gat"),
        ("fesog", "rating_gat"),
        ("fedavg", "consisrec"),
    ],
)
def test_ratings(rooms: list[Room], tmp_path: Path, method: str, model: str) -> None:
    own = {"pseudo": 20, "clip": 0.1} if method in ("fedgnn", "fesog") else {}
    check_equal(rating_graph(), tmp_path, method=method, model=model, options=own)
    assert rooms


@pytest.mark.law(sample=4)
@pytest.mark.parametrize("setting", SETTINGS)
def test_settings(make_graph: MakeGraph, rooms: list[Room], tmp_path: Path, setting: str) -> None:
    check_equal(make_graph(), tmp_path, **SETTINGS[setting])


class Net(nn.Module):
    """A module of a user's own, given as a value."""

    def __init__(self, features: int, outputs: int) -> None:
        super().__init__()
        self.line = nn.Linear(features, outputs)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        out: Tensor = self.line(x)
        return out


def test_a_module_of_a_user(make_graph: MakeGraph, rooms: list[Room]) -> None:
    options = {n: v for n, v in RUN.items() if n not in ("hidden", "block_size")}
    here, there = (sg.run(make_graph(), **options | more, model=Net) for more in ({}, WORKERS))
    assert here.test == there.test
    assert here.ledger.records == there.ledger.records


@pytest.mark.law(sample=6)
@pytest.mark.parametrize(
    "method",
    ["fedavg", "scaffold", "fedper", "gcfl", "bns", pytest.param("fedais", marks=pytest.mark.slow)],
)
@pytest.mark.parametrize("keep_every", [0, 1, 2])
def test_lost_workers_change_nothing(
    make_graph: MakeGraph,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    method: str,
    keep_every: int,
) -> None:
    """One in ten methods of workers loses its worker, before it is carried out.

    It is started again from a copy at the engine, from a checkpoint's files, or from later ones.
    """
    generator, made = random.Random(f"{method} {keep_every}"), list[Room]()

    def make(size: int) -> Room:
        made.append(Room(size, lambda *_: generator.random() < 0.1))
        return made[-1]

    monkeypatch.setattr("silograph.federation.workers.processes.ProcessPool", make)
    monkeypatch.setattr("silograph.federation.workers.engine.MOST_LOSSES", 100)
    options = {"method": method, **some_of(method, 0.6), "keep_every": keep_every, "rounds": 6}
    options["checkpoint_every"] = 2
    sg.run(make_graph(), **RUN | options, out=str(tmp_path / "here"))
    sg.run(make_graph(), **RUN | WORKERS | options, out=str(tmp_path / "workers"))
    assert made[0].losses > 2
    files = files_of(tmp_path / "workers")
    assert files == files_of(tmp_path / "here")


def test_a_worker_that_is_always_lost_ends_the_run(
    make_graph: MakeGraph, monkeypatch: pytest.MonkeyPatch
) -> None:
    make: Callable[[int], Room] = lambda size: Room(size, lambda _, method: method == "run")  # noqa: E731
    monkeypatch.setattr("silograph.federation.workers.processes.ProcessPool", make)
    with pytest.raises(ProtocolError):
        sg.run(make_graph(), **RUN | WORKERS)


@pytest.mark.parametrize("first", [{}, WORKERS], ids=["here first", "workers first"])
@pytest.mark.parametrize("method", ["scaffold", "fedper"])
def test_a_run_is_resumed_by_another_engine(
    make_graph: MakeGraph,
    rooms: list[Room],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    first: dict[str, Any],
    method: str,
) -> None:
    options = {**RUN, "method": method, **some_of(method, 0.6)}
    sg.run(make_graph(), **options, out=str(tmp_path / "whole"))
    run_until(monkeypatch, make_graph(), 3, tmp_path / "cut", **options | first)
    other: dict[str, Any] = {"workers": 1} if first else {"workers": 2}
    with dying(monkeypatch, 4):
        sg.resume(tmp_path / "cut", graph=make_graph(), engine=other)
    sg.resume(tmp_path / "cut", graph=make_graph())
    files = files_of(tmp_path / "cut")
    assert files == files_of(tmp_path / "whole")
    assert rooms


@pytest.mark.parametrize("harm", ["none", "changed", "missing", "unseen"])
def test_workers_write_their_states_beside_the_checkpoint(
    make_graph: MakeGraph,
    rooms: list[Room],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    harm: str,
) -> None:
    """A checkpoint with a damaged file of states is not used; unseen folders change nothing."""
    if harm == "unseen":
        monkeypatch.setattr(Worker, "write_states", lambda *_: None)
    options = {**RUN, "method": "fedper", "rounds": 5}
    sg.run(make_graph(), **options, out=str(tmp_path / "whole"))
    run_until(monkeypatch, make_graph(), 4, tmp_path / "cut", **options | WORKERS)
    folder = tmp_path / "cut" / "checkpoints"
    latest = read_checkpoint(folder / "round-000000003.checkpoint", 3)
    files = sorted(folder.glob("states-*"))
    rounds = {int(file.name.split("-")[1]) for file in files}
    assert rounds == (set() if harm == "unseen" else {2, 3})
    assert any(name.startswith("client/") for name in latest.tensors) == (harm == "unseen")
    if harm == "changed":
        data = files[-1].read_bytes()
        files[-1].write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    elif harm == "missing":
        files[-1].unlink()
    sg.resume(tmp_path / "cut", graph=make_graph())
    assert files_of(tmp_path / "cut") == files_of(tmp_path / "whole")


NOISY = """
import logging, warnings
from silograph.methods import Clients, Empty, GlobalModel, Kind, LocalModel, NoOptions, op
from silograph.methods import averaging

@op(Kind.WEIGHTS)
def train(
    clients: Clients[NoOptions], state: Empty, request: GlobalModel
) -> tuple[Empty, LocalModel]:
    logging.getLogger("silograph").warning("trains %s", clients.block.ids)
    warnings.warn(f"odd {clients.block.ids}", UserWarning)
    print("prints", clients.block.ids)
    if FAILS and "client_03" in clients.block.ids:
        raise KeyError("what")
    return state, LocalModel.of(clients.fit(request.weights), clients.block)

METHOD = averaging(train)
"""


@pytest.mark.parametrize("fails", [False, True])
def test_what_an_op_says_is_seen_here(
    make_graph: MakeGraph,
    rooms: list[Room],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
    fails: bool,
) -> None:
    file = tmp_path / "noisy.py"
    file.write_text(NOISY.replace("FAILS", str(fails)), encoding="utf-8")
    seen = []
    for more in ({}, WORKERS):
        caplog.clear()
        options = RUN | {"method": f"{file}:METHOD", "rounds": 1} | more
        with warnings.catch_warnings(record=True) as caught, caplog.at_level(logging.WARNING):
            warnings.simplefilter("always")
            error = None
            try:
                sg.run(make_graph(), **options)
            except OpError as raised:
                error = raised
        texts = [str(w.message) for w in caught if "odd" in str(w.message)]
        logged = [r.getMessage() for r in caplog.records if "trains" in r.getMessage()]
        printed = [text for text in capsys.readouterr().out.splitlines() if "prints" in text]
        about = None if error is None else (str(error), error.code, error.fields)
        seen.append((texts, logged, printed, about, error and type(error.__cause__)))
    assert seen[0] == seen[1]
    assert (seen[0][3] is not None) == fails
    assert len(seen[0][0]) > 1


def test_options_that_do_not_go_together(make_graph: MakeGraph, rooms: list[Room]) -> None:
    with raises_code(sg.ConfigError, "conflicting-options", options=["address", "engine"]):
        sg.run(make_graph(), **RUN, address="auto")
    with raises_code(sg.ConfigError, "option-value", option="workers"):
        sg.run(make_graph(), **RUN, workers="some")
    with raises_code(sg.ConfigError, "conflicting-options", options=["device", "workers"]):
        num_workers(make_config({"device": "cuda", "workers": 2}))
    assert not rooms


def test_code_that_no_other_process_can_import_is_refused(
    make_graph: MakeGraph, rooms: list[Room], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Own(Net):
        pass

    monkeypatch.undo()  # processes
    options = {n: v for n, v in RUN.items() if n not in ("hidden", "block_size")}
    with raises_code(sg.ConfigError, "conflicting-options", options=["workers"]):
        sg.run(make_graph(), **options | WORKERS, model=Own)


def test_the_engine_is_no_part_of_what_a_run_is() -> None:
    engines: list[dict[str, Any]] = [
        {},
        {"workers": 2},
        {"engine": "ray", "address": "auto", "keep_every": 3},
    ]
    cells = [Cell({}, make_config({**FAST, **engine})) for engine in engines]
    assert len({cell.digest for cell in cells}) == 1
    assert [cores_of_run(cell.config) for cell in cells[:2]] == [1, 2]
    trainings = [describe_training(AgentTraining(cell.config, 1, 1)) for cell in cells]
    assert len(set(trainings)) == 1


def test_workers_hold_runs_of_blocks_with_about_as_many_rows(
    make_graph: MakeGraph, cut_block: Callable[..., tuple[ClientBlock, Any]]
) -> None:
    block, _ = cut_block(make_graph(60), 12)
    starts = torch.arange(0, 13, 2)
    for workers in range(1, 7):
        ends = share_out(block, starts, workers)
        assert ends[0] == 0
        assert ends[-1] == 6
        assert len(ends) == workers + 1
        assert all(a < b for a, b in itertools.pairwise(ends))


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.bool, torch.float16])
def test_what_is_packed_comes_back_with_all_its_bits(dtype: torch.dtype) -> None:
    values = torch.tensor([[0.0, -0.0, torch.nan], [torch.inf, 1e-42, 3.0]])
    values = values.nan_to_num(0.0, 0.0, 0.0).to(dtype) if not dtype.is_floating_point else values
    tensors = [values.to(dtype), values[:, 1].to(dtype), values[0, 0].to(dtype), values[:0]]
    for before, after in zip(tensors, unpack(pack(tensors)), strict=True):
        assert after.dtype == before.dtype
        assert after.numpy().tobytes() == before.numpy().tobytes()
        after.zero_()  # memory of its own
    assert values[1, 2] != 0
    assert sys.getsizeof(pack(tensors).head) < 4096
