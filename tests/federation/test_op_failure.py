"""What is said of an op that fails: one line with op, round, clients, place and shapes."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import silograph as sg
from commands import Capture
from sessions import session, table
from silograph.cli import run_app
from silograph.core.errors import ConfigError, OpError, ProtocolError
from silograph.core.key import Key
from silograph.core.kinds import Kind
from silograph.core.payload import Payload, Shared, Stacked, State
from silograph.federation.in_process import InProcess
from silograph.graph.block.block import ClientBlock, Route
from silograph.graph.graph import Graph

Built = tuple[ClientBlock, Route]
KEY = Key.of(0)


def begin(cfg: Any, block: ClientBlock, state: State, inbox: Payload, key: Key) -> Any:
    return {"seen": Stacked(torch.zeros(block.num_clients, 2))}, {}


def fail(cfg: Any, block: ClientBlock, state: State, inbox: Payload, key: Key) -> Any:
    raise cfg


def failing_inside(cfg: Any, block: ClientBlock, state: State, inbox: Payload, key: Key) -> Any:
    return torch.zeros(2, 3) @ torch.zeros(4, 5)


@pytest.fixture
def built(make_graph: Callable[..., Graph], cut_block: Callable[..., Built]) -> Built:
    return cut_block(make_graph(40), 5)


def caught(built: Built, error: Exception | None, size: int, op: Any = fail) -> Exception:
    fed = InProcess(error, *built, size)
    fed.call(begin, {}, what=Kind.CONTROL, key=KEY)
    fed.start_round(3)
    with pytest.raises((OpError, ConfigError, ProtocolError, MemoryError, RuntimeError)) as found:
        fed.call(op, {"a": Shared(torch.zeros(4, 2))}, what=Kind.CONTROL, key=KEY)
    return found.value


@pytest.mark.parametrize(
    ("size", "who"),
    [
        (1, "a block of one client: client_00"),
        (2, "a block of 2 clients: client_00, client_01"),
        (5, "a block of 5 clients: client_00, client_01, client_02 and 2 more"),
    ],
)
def test_a_failure_names_op_round_clients_place_and_shapes(
    built: Built, size: int, who: str
) -> None:
    error = caught(built, ValueError("no\n  such thing"), size)
    assert type(error) is OpError
    line = fail.__code__.co_firstlineno + 1
    assert str(error) == (
        f"fail failed with ValueError: no such thing ({__file__}, line {line}, in fail); round 3, "
        f"{who}; inbox: a Shared (4, 2) float32; state: seen Stacked ({size}, 2) float32"
    )
    assert isinstance(error.__cause__, ValueError)  # with the traceback of the op


def test_the_place_is_where_the_users_code_called_torch(built: Built) -> None:
    line = failing_inside.__code__.co_firstlineno + 1
    error = caught(built, None, 5, failing_inside)
    assert f"({__file__}, line {line}, in failing_inside); round 3" in str(error)
    assert "failing_inside failed with RuntimeError: mat1 and mat2 shapes" in str(error)


def test_long_stories_are_cut(built: Built) -> None:
    error = caught(built, ValueError("x" * 10_000), 5)
    assert len(str(error)) < 1000
    assert f"{'x' * 300}... (" in str(error)


def test_many_fields_are_counted(built: Built) -> None:
    fed = InProcess(ValueError(), *built, 5)
    inbox = {f"a{n}": Shared(torch.zeros(1)) for n in range(10)}
    with pytest.raises(OpError, match=r"a7 Shared \(1,\) float32, 2 more; state: none$"):
        fed.call(fail, inbox, what=Kind.CONTROL, key=KEY)


@pytest.mark.parametrize(
    "error",
    [
        ConfigError("expected a, got b"),
        ProtocolError("expected a, got b"),
        MemoryError(),
        RuntimeError("not enough memory: you tried to allocate 9 bytes"),
    ],
)
def test_errors_that_say_what_is_wrong_stay_what_they_are(built: Built, error: Exception) -> None:
    found = caught(built, error, 5)
    assert found is error
    assert found.__notes__ == [
        "in fail, round 3, a block of 5 clients: client_00, client_01, client_02 and 2 more; "
        "inbox: a Shared (4, 2) float32; state: seen Stacked (5, 2) float32"
    ]


@pytest.mark.parametrize("error", [ValueError, ConfigError, MemoryError])
def test_a_silo_tells_the_type_only_and_logs_all(
    built: Built, error: type[Exception], caplog: pytest.LogCaptureFixture
) -> None:
    """Errors of silograph may quote what they were made of, too."""
    fed, _ = session(*built, error("node 17 of patient Ann"), table(begin, fail))
    fed.call(begin, {}, what=Kind.CONTROL, key=KEY)
    caplog.clear()
    with pytest.raises(ProtocolError) as found:
        fed.call(fail, {"a": Shared(torch.zeros(4, 2))}, what=Kind.CONTROL, key=KEY)
    assert f"client_00: {error.__name__} at the silo: its log says more" in str(found.value)
    assert "Ann" not in str(found.value)
    lines = [r for r in caplog.records if r.getMessage() == f"fail failed: {error.__name__}"]
    assert len(lines) == 5
    assert "patient Ann" in caplog.text
    assert "a block of one client: client_04; inbox: a Shared (4, 2) float32" in caplog.text


OWN = """
from dataclasses import replace
from silograph.methods import FEDAVG, Kind, ServerState

def divide(cfg, block, state, inbox, key):
    return state, {"x": 1 / 0}

def init(fed, cfg, weights, key):
    fed.call(divide, {}, what=Kind.CONTROL, key=key)

METHOD = replace(FEDAVG, name="mine", init=init)
"""


def test_on_the_command_line_it_is_one_line(work: Path, capsys: Capture) -> None:
    Path("mine.py").write_text(OWN)
    words = ["--clients", "2", "--partition", "random", "--rounds", "1", "--block-size", "2"]
    assert run_app(["run", "g.npz", "--method", "mine.py:METHOD", *words]) == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert said == (
        "error: divide failed with ZeroDivisionError: division by zero "
        f"({work}/mine.py, line 6, in divide); round 0, a block of 2 clients: "
        "client_00, client_01; inbox: none; state: none"
    )


def test_in_python_the_users_own_traceback_is_there(work: Path) -> None:
    Path("mine.py").write_text(OWN)
    with pytest.raises(OpError) as found:
        sg.run("g.npz", method="mine.py:METHOD", clients=2, partition="random", rounds=1)
    cause = found.value.__cause__
    assert isinstance(cause, ZeroDivisionError)
    last = cause.__traceback__
    while last is not None and last.tb_next is not None:
        last = last.tb_next
    assert last is not None
    assert last.tb_frame.f_code.co_filename.endswith("mine.py")
