"""Laws of the plan: which kernels, how many clients at once, which neighbors; and what is refused.

H = 6 hidden, K = 3 classes, F = 12 features throughout.
"""

import importlib
import importlib.util
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal

import pytest
import torch

from mistakes import raises_code
from runs import MakeGraph, go
from silograph.core.config import RunConfig, make_config
from silograph.core.errors import ConfigError, install_command
from silograph.experiment.resolve.resolve import (
    choose,
    choose_backend,
    choose_block_size,
    client_bytes,
    explain_torch_kernels,
    make_neighbors,
    resolve,
    with_block_size,
)
from silograph.experiment.run.run import run
from silograph.graph.block.block import ClientBlock, Route, SparseRows
from silograph.graph.graph import Schema
from silograph.nn.backends import BACKENDS, TORCH
from silograph.nn.correction import Correction, Proximal
from silograph.nn.fit import Schedule, Training
from silograph.nn.mini_batches import FULL, Fanout
from silograph.nn.model import Model
from silograph.nn.optim import SGD, Adam, Optimizer

pytest.importorskip("numba")

CutBlock = Callable[..., tuple[ClientBlock, Route]]
CPU = torch.device("cpu")
MODEL = Model("gcn", 12, 6, 3, 2, 0.5, "multiclass")
PULL = (Proximal(0.1),)
TIERS = pytest.mark.parametrize("kernels", ["compiled", "torch"])


class Plain:
    """An optimizer that the kernels do not know."""


@pytest.fixture
def no_numba(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if numba were not installed."""
    real = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *a: None if name == "numba" else real(name, *a)
    )


def training(
    model: Model = MODEL,
    optimizer: Optimizer = Adam(0.1),  # noqa: B008 (frozen)
    corrections: tuple[Correction, ...] = (),
) -> Training:
    return Training(model, optimizer, Schedule(1), corrections)


def config(**changes: Any) -> RunConfig:
    return make_config(changes)


@pytest.mark.parametrize("optimizer", [Adam(0.1), SGD(0.1, 0.1, 0.9)])
@pytest.mark.parametrize("conv", ["gcn", "sage", "mlp"])
def test_kernels_are_compiled_where_they_can_be(conv: str, optimizer: Optimizer) -> None:
    given = training(replace(MODEL, conv=conv), optimizer, PULL)
    for asked, expected in {"auto": "compiled", "compiled": "compiled", "torch": "torch"}.items():
        assert choose_backend(config(kernels=asked), given, CPU).name == expected


@pytest.mark.parametrize(
    ("conv", "optimizer", "device", "reason"),
    [
        ("gat", Adam(0.1), "cpu", "model gat is not compiled"),
        ("gcn", Plain(), "cpu", "optimizer Plain is not compiled"),
        ("gcn", Adam(0.1), "cuda", "device cuda is not a CPU"),
    ],
)
def test_what_is_not_compiled_is_left_to_torch_unless_asked_for(
    conv: str, optimizer: Any, device: str, reason: str
) -> None:
    given = training(replace(MODEL, conv=conv), optimizer), torch.device(device)
    for asked in ("auto", "torch"):
        assert choose_backend(config(kernels=asked), *given) is TORCH
    message = f"^expected a run for compiled kernels, got: {reason}; use kernels=torch$"
    with pytest.raises(ConfigError, match=message):
        choose_backend(config(kernels="compiled"), *given)


WHY = "torch kernels, which are slower than compiled ones: "


def lines_on_kernels(capsys: pytest.CaptureFixture[str]) -> list[str]:
    said = capsys.readouterr()
    assert WHY not in said.out
    return [line.removeprefix(WHY) for line in said.err.splitlines() if line.startswith(WHY)]


@pytest.mark.usefixtures("no_numba")
def test_a_run_says_once_that_numba_is_missing(
    make_graph: MakeGraph, capsys: pytest.CaptureFixture[str]
) -> None:
    go(make_graph(), rounds=1, progress="plain")
    assert lines_on_kernels(capsys) == [f"numba is not installed: {install_command('fast')}"]
    go(make_graph(), rounds=1, progress="plain", kernels="torch")
    assert not lines_on_kernels(capsys)


def test_the_line_says_that_no_folder_for_kernels_is_writable(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(name: str) -> None:
        raise RuntimeError(f"cannot cache function in {name}:\nno locator available")

    monkeypatch.setattr(importlib, "import_module", fail)
    why = explain_torch_kernels(RunConfig(), training(), CPU)
    assert why is not None
    assert why.startswith(f"{WHY}kernels cannot be kept on disk: cannot cache function in ")
    assert why.endswith("no locator available; set NUMBA_CACHE_DIR")


def test_a_run_says_what_of_it_is_not_compiled(
    make_graph: MakeGraph, capsys: pytest.CaptureFixture[str]
) -> None:
    go(make_graph(), rounds=1, progress="plain", model="gin")
    (line,) = lines_on_kernels(capsys)
    page = "docs/explanation/performance.md"
    assert line.startswith(f"model gin is not compiled; {page} lists what is compiled")
    go(make_graph(), rounds=1, progress="plain")
    assert not lines_on_kernels(capsys)


def test_on_other_devices_nothing_is_slower() -> None:
    assert explain_torch_kernels(RunConfig(), training(), torch.device("cuda")) is None
    assert explain_torch_kernels(RunConfig(), training(), CPU) is None


@pytest.mark.usefixtures("no_numba")
def test_without_numba_runs_are_left_to_torch(make_graph: MakeGraph) -> None:
    result = go(make_graph(), rounds=1)
    assert result.config.kernels == "torch"
    message = (
        r"^expected a run for compiled kernels, got: numba is not installed: "
        rf"{re.escape(install_command('fast'))}; use kernels=torch$"
    )
    with pytest.raises(ConfigError, match=message):
        go(make_graph(), rounds=1, kernels="compiled")


@TIERS
def test_the_plan_is_written_into_the_config(make_graph: MakeGraph, kernels: str) -> None:
    graph = make_graph()
    asked = "auto" if kernels == "compiled" else "torch"
    result = go(graph, rounds=1, kernels=asked)
    assert (result.config.kernels, result.config.block_size) == (kernels, 4)
    assert go(graph, rounds=1, kernels=asked, block_size=3).config.block_size == 3
    # A run of that config makes the same choice.
    assert run(graph, config=result.config).config == result.config


@TIERS
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("sparse", [True, False])
def test_bytes_of_a_client_are_the_closed_form(
    make_graph: MakeGraph,
    cut_block: CutBlock,
    sparse: bool,
    dtype: torch.dtype,
    kernels: str,
) -> None:
    """F H + H + H K + K weights; compact, the F rows are those a client uses, on the mean.

    GraphSAGE has every matrix twice.
    """
    block, _ = cut_block(make_graph(60, features=12, sparse=sparse), 4, dtype=dtype)
    item = 4 if dtype is torch.float32 else 8
    used = len(block.x.used.feature) if isinstance(block.x, SparseRows) else 4 * 12
    for conv, copies in (("gcn", 1), ("mlp", 1), ("sage", 2)):
        model, rest = replace(MODEL, conv=conv), 6 + copies * 6 * 3 + 3
        whole = copies * 12 * 6 + rest
        compact = copies * (used * 6 // 4) + rest
        for corrections in ((), PULL):  # torch holds every client's start as well
            copies_of = {"compiled": 1, "torch": 4 + len(corrections)}
            held, backend = copies_of[kernels] * item, BACKENDS[kernels]
            given = training(model, corrections=corrections)
            assert client_bytes(given, block, backend, item, compact=False) == whole * held
            assert client_bytes(given, block, backend, item, compact=True) == compact * held


@TIERS
@pytest.mark.parametrize("keep", [True, False])
def test_blocks_fill_their_memory(
    make_graph: MakeGraph,
    cut_block: CutBlock,
    monkeypatch: pytest.MonkeyPatch,
    keep: bool,
    kernels: Literal["compiled", "torch"],
) -> None:
    block, _ = cut_block(make_graph(60, features=12, sparse=True), 10)
    one = client_bytes(training(), block, BACKENDS[kernels], 8, compact=not keep)
    for room, most in ((one - 1, 1), (one, 1), (3 * one + 1, 3), (6 * one, 6), (99 * one, 10)):
        monkeypatch.setattr("silograph.experiment.resolve.resolve.BLOCK_BYTES", room)
        size = choose_block_size(training(), block, BACKENDS[kernels], CPU, keep_optimizer=keep)
        assert size <= most
        assert -(-10 // size) == -(-10 // most)  # no more blocks than needed
        given = config(kernels=kernels, keep_optimizer=keep)
        asked = resolve(given, Schema(12, 3, "multiclass")).config
        assert with_block_size(asked, training(), block) == replace(asked, block_size=size)
        assert asked.kernels == kernels
        fixed = replace(asked, block_size=7)
        assert with_block_size(fixed, training(), block) == fixed


def test_a_gpu_is_given_larger_blocks(
    make_graph: MakeGraph, cut_block: CutBlock, monkeypatch: pytest.MonkeyPatch
) -> None:
    block, _ = cut_block(make_graph(60), 10)
    one = client_bytes(training(), block, TORCH, 8, compact=False)
    monkeypatch.setattr("silograph.experiment.resolve.resolve.BLOCK_BYTES", 2 * one)
    monkeypatch.setattr("silograph.experiment.resolve.resolve.DEVICE_BLOCK_BYTES", 5 * one)
    for device, size in ((CPU, 2), (torch.device("cuda"), 5)):
        assert choose_block_size(training(), block, TORCH, device, keep_optimizer=False) == size


QUIET = """
import sys
import numpy as np
import torch
import silograph as sg
rng = np.random.default_rng(0)
x, edges = rng.random((30, 5), np.float32), rng.integers(0, 30, (2, 60))
graph = sg.from_arrays(edge_index=edges, x=x, y=np.arange(30) % 3)
for kernels in ("torch", "compiled"):
    sg.run(graph, clients=2, partition="random", rounds=1, hidden=4, kernels=kernels)
    print(kernels, "numba" in sys.modules)


class Own(torch.nn.Linear):
    def forward(self, x, edge_index):
        return super().forward(x)


sg.run(graph, clients=2, partition="random", rounds=1, model=Own)
print("torch._dynamo" in sys.modules)
"""


def test_runs_import_what_they_need() -> None:
    """No numba without compiled kernels, and never torch's compiler, which takes longest."""
    done = subprocess.run([sys.executable, "-c", QUIET], check=True, capture_output=True, text=True)
    assert done.stdout.split() == ["torch", "False", "compiled", "True", "False"]


# --- mini-batches ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fanout", "layers", "expected"),
    [
        (None, 2, None),
        ("10,5", 2, (10, 5)),
        ("7", 3, (7, 7, 7)),
        ("0", 2, (0, 0)),
        (" 3 , 0 ", 2, (3, 0)),
        ("4", 1, (4,)),
    ],
)
def test_fanout_is_one_number_for_each_hop(
    fanout: str | None, layers: int, expected: tuple[int, ...] | None
) -> None:
    given = config(fanout=fanout, layers=layers)
    made = make_neighbors(given, choose(given))
    assert made == (FULL if expected is None else Fanout(expected))


@pytest.mark.parametrize("fanout", ["10,x", "", "10,", ",", "-1", "1.5", "10;5", "²"])
def test_a_fanout_that_is_no_list_of_numbers_is_refused(fanout: str) -> None:
    with pytest.raises(ConfigError) as caught:
        choose(config(fanout=fanout))
    assert str(caught.value) == f"fanout: expected numbers of neighbors like 10,5, got {fanout!r}"


@pytest.mark.parametrize("fanout", ["1,2,3", "1,2"])
def test_a_fanout_of_another_depth_is_refused(fanout: str) -> None:
    with pytest.raises(ConfigError) as caught:
        choose(config(fanout=fanout, layers=4))
    assert str(caught.value) == (
        f"fanout: expected one number or 4 (one for each layer), got {fanout!r}"
    )


@pytest.mark.parametrize("size", [0, -1])
def test_a_batch_has_a_node(size: int) -> None:
    with raises_code(ConfigError, "option-value", option="batch_size"):
        config(batch_size=size)


@TIERS
@pytest.mark.parametrize("options", [{"batch_size": 2**62}, {"fanout": str(2**40)}], ids=str)
def test_sizes_beyond_every_client_are_all_of_it(
    make_graph: MakeGraph, kernels: str, options: dict[str, Any]
) -> None:
    graph = make_graph()
    ours, theirs = (go(graph, rounds=1, kernels=kernels, **o) for o in (options, {}))
    for name, w in theirs.model.weights.items() if theirs.model else ():
        assert ours.model is not None
        torch.testing.assert_close(ours.model.weights[name], w, rtol=0, atol=1e-10)
