"""What a silo takes from its server: the next message of its run, ops of the table, and no more."""

import functools
import gc
import inspect
import itertools
import json
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch

from mistakes import raises_code
from sessions import TOKEN, facts, table, worker_of
from silograph.core.errors import CheckpointError, FrameError, ProtocolError
from silograph.core.key import Key
from silograph.core.kinds import Kind
from silograph.core.payload import Payload, Shared, Stacked, State
from silograph.evaluation.evaluate import judge_own
from silograph.federation.frame import Envelope, decode, encode
from silograph.federation.program import BLANK
from silograph.federation.session.message import (
    CallBody,
    Message,
    Type,
    call_body,
    explain_body,
    is_op,
    name_of,
    op_of,
    own_ops,
    pack,
    qualified,
    read_reply,
    unpack,
)
from silograph.federation.session.responder import Responder
from silograph.federation.session.state_store import StateStore
from silograph.graph.block.block import ClientBlock, Route

Built = tuple[ClientBlock, Route]


def count(cfg: Any, block: ClientBlock, state: State, inbox: Payload, key: Key) -> Any:
    so_far = state["n"].t if "n" in state else torch.zeros(1, dtype=torch.int64)
    return {"n": Stacked(so_far + 1)}, {
        "n": Stacked(so_far + 1),
        "key": Stacked(inbox["a"].t[None]),
    }


def fail(cfg: Any, block: ClientBlock, state: State, inbox: Payload, key: Key) -> Any:
    raise ValueError("node 17 of patient Ann")


def much(cfg: Any, block: ClientBlock, state: State, inbox: Payload, key: Key) -> Any:
    return {"n": Stacked(state["n"].t + 1)}, {"x": Stacked(torch.zeros(1, 900, dtype=torch.bool))}


OPS = table(count, fail, much)


@pytest.fixture
def worker(make_graph: Callable[..., Any], cut_block: Callable[..., Built]) -> Responder:
    block, _ = cut_block(make_graph(20), 2)
    return worker_of(block.take(torch.tensor([0])), None, OPS)


def message(kind: Type, sequence: int, body: bytes = b"{}", token: bytes = TOKEN) -> bytes:
    return pack(Message(kind, token, sequence, body))


def call(sequence: int, op: str = qualified(count), frame_op: str = "count", t: int = 1) -> bytes:
    frame = encode(Envelope(frame_op, Kind.CONTROL, t, 1), {"a": Shared(torch.tensor(3))}, 0)
    return message(Type.CALL, sequence, call_body(CallBody(op, Key(1), False, frame)))


def answered(worker: Responder, data: bytes) -> Message:
    return unpack(worker.answer(data))


def reason(worker: Responder, data: bytes) -> str:
    found = answered(worker, data)
    assert found.type is Type.REFUSED
    return str(found.facts()["reason"])


def counted(worker: Responder, data: bytes) -> int:
    _, frame = read_reply(answered(worker, data).body)
    return int(decode(frame)[1]["n"].t)


def test_a_call_is_answered_once(worker: Responder) -> None:
    assert answered(worker, message(Type.START, 1)).type is Type.DONE
    assert counted(worker, call(2)) == 1
    for number in (2, 1, 0, 4):  # a message that comes again, or one after a lost one
        with pytest.raises(FrameError, match=f"expected message 3, got {number}: repeated or lost"):
            worker.answer(call(number))
    assert counted(worker, call(3)) == 2  # nothing of those was done


def test_messages_of_other_runs_are_refused(worker: Responder) -> None:
    with pytest.raises(FrameError, match="expected a message of this run, got one of another"):
        worker.answer(message(Type.START, 1, token=bytes(16)))


def test_a_new_stream_counts_anew(worker: Responder) -> None:
    worker.answer(message(Type.START, 1))
    worker.attach()
    assert answered(worker, message(Type.START, 1)).type is Type.DONE


def test_what_a_silo_refuses(worker: Responder) -> None:
    assert reason(worker, call(1)) == "expected START before the first call, got none"
    assert reason(worker, message(Type.LOAD, 2, facts(round=1))).startswith("expected START before")
    worker.answer(message(Type.START, 3))
    assert reason(worker, call(4, op="os:system")).startswith("unknown op 'os:system'")
    assert (
        reason(worker, call(5, frame_op="other")) == "expected a frame of count, got one of other"
    )
    assert reason(worker, message(Type.HELLO, 6)) == "expected a request, got HELLO"
    assert reason(worker, message(Type.KEEP, 7)) == "expected the number of a round, got None"
    assert reason(worker, message(Type.LOAD, 8, facts(round=4))) == (
        "expected the silo's state of round 4, got none"
    )


def test_a_reply_that_is_too_long_is_refused_and_leaves_the_state(
    worker: Responder, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker.answer(message(Type.START, 1))
    assert counted(worker, call(2)) == 1
    with monkeypatch.context() as patch:
        patch.setattr("silograph.federation.session.message.MAX_MESSAGE_BYTES", 500)
        said = reason(worker, call(3, op=qualified(much), frame_op="much"))
        assert said.startswith("expected a message of at most 500 bytes, got 9")
    assert counted(worker, call(4)) == 2


def test_what_cannot_be_explained(worker: Responder) -> None:
    assert reason(worker, message(Type.EXPLAIN, 1)) == (
        "expected edges to explain, got 2 bytes: cut short"
    )
    said = explain_body({"silo": "a"}, [bytes(16)])
    assert reason(worker, message(Type.EXPLAIN, 2, said)) == (
        "expected edges to explain, got something else"
    )
    said = explain_body({"silo": "a", "other": "b", "absent": False}, [bytes(16)])
    assert reason(worker, message(Type.EXPLAIN, 3, said)) == ("expected a nonce of 16 bytes, got 0")
    told = {"silo": "a", "other": "b", "absent": False, "nonce": bytes(16).hex()}
    assert reason(worker, message(Type.EXPLAIN, 4, explain_body(told, [bytes(16)]))) == (
        "expected EXPLAIN between JOIN and START, with the nonce of JOIN"
    )


def test_only_a_silos_own_log_says_what_broke(
    worker: Responder, caplog: pytest.LogCaptureFixture
) -> None:
    worker.answer(message(Type.START, 1))
    said = reason(worker, call(2, op=qualified(fail), frame_op="fail"))
    assert said == "ValueError at the silo: its log says more"
    assert "patient Ann" in caplog.text
    assert caplog.records[-1].getMessage() == "fail failed: ValueError"


def test_a_disk_that_is_full_is_told_of_as_what_it_was(
    worker: Responder, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(self: StateStore, *given: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(StateStore, "keep", full)
    committed: list[int] = []
    worker.answer(message(Type.START, 1))
    caplog.clear()
    assert reason(worker, message(Type.KEEP, 2, facts(round=0, committed=committed))) == (
        "OSError at the silo: its log says more"
    )
    (record,) = caplog.records
    assert (record.getMessage(), vars(record)["op"]) == ("keep failed: OSError", "keep")
    assert "No space left" in caplog.text


def test_an_op_that_fails_leaves_the_state(worker: Responder) -> None:
    worker.answer(message(Type.START, 1))
    assert counted(worker, call(2)) == 1
    reason(worker, call(3, op=qualified(fail), frame_op="fail"))
    assert counted(worker, call(4)) == 2


def test_a_silo_goes_back_to_a_round(worker: Responder) -> None:
    worker.answer(message(Type.START, 1))
    assert [counted(worker, call(n, t=n - 1)) for n in (2, 3, 4)] == [1, 2, 3]
    assert answered(worker, message(Type.LOAD, 5, facts(round=2))).type is Type.DONE
    assert counted(worker, call(6, t=3)) == 3
    assert answered(worker, message(Type.LOAD, 7, facts(round=3))).type is Type.DONE  # as it is
    assert counted(worker, call(8, t=4)) == 4
    assert answered(worker, message(Type.LOAD, 9, facts(round=BLANK))).type is Type.DONE
    assert counted(worker, call(10, t=1)) == 1


def test_states_are_on_the_disk_once_kept(
    make_graph: Callable[..., Any], cut_block: Callable[..., Built], tmp_path: Any
) -> None:
    block, _ = cut_block(make_graph(20), 2)
    one = block.take(torch.tensor([0]))
    first = worker_of(one, None, OPS, StateStore(tmp_path / "run"))
    first.answer(message(Type.START, 1))
    for t in (1, 2, 3):
        first.answer(call(2 * t, t=t))
        first.answer(message(Type.KEEP, 2 * t + 1, facts(round=t, committed=[])))
    files = sorted(path.name for path in (tmp_path / "run").iterdir())
    assert files == ["agreed.json", "round-000000002.checkpoint", "round-000000003.checkpoint"]
    again = worker_of(one, None, OPS, StateStore(tmp_path / "run"))
    again.answer(message(Type.START, 1))
    assert answered(again, message(Type.LOAD, 2, facts(round=2))).type is Type.DONE
    assert counted(again, call(3, t=3)) == 3


def test_a_file_of_another_round_is_no_state(tmp_path: Any) -> None:
    store = StateStore(tmp_path / "run")
    store.keep(0, {"a": Stacked(torch.zeros(1))})
    kept = tmp_path / "run" / "round-000000000.checkpoint"
    kept.rename(kept.with_name("round-000000001.checkpoint"))
    with pytest.raises(
        CheckpointError, match=r"round-000000001\.checkpoint: expected round 1, got 0"
    ):
        StateStore(tmp_path / "run").load(1)


def test_rounds_that_the_server_may_go_on_from_stay(tmp_path: Any) -> None:
    store = StateStore(tmp_path / "run")
    for t in range(9):
        state: dict[str, Any] = {"a": Stacked(torch.tensor([float(t)]))}
        store.keep(t, state, [0] if t < 6 else [0, 5])
    for kept in (store, StateStore(tmp_path / "run")):
        for t in (0, 5, 7, 8):
            assert kept.load(t)["a"].t.tolist() == [t]
        with raises_code(CheckpointError, "missing-checkpoint"):
            kept.load(6)


@pytest.mark.parametrize("told", [None, 3, ["a"]])
def test_committed_rounds_that_are_none(worker: Responder, told: object) -> None:
    worker.answer(message(Type.START, 1))
    said = reason(worker, message(Type.KEEP, 2, facts(round=0, committed=told)))
    assert said == f"expected the rounds that the server holds, got {told!r}"


def test_forgotten_states(tmp_path: Any) -> None:
    store = StateStore(tmp_path / "run")
    store.keep(1, {"a": Stacked(torch.zeros(1))})
    store.drop()
    assert not (tmp_path / "run").exists()
    with raises_code(CheckpointError, "missing-checkpoint"):
        store.load(1)


def test_the_end_of_a_run(worker: Responder) -> None:
    worker.answer(message(Type.END, 1, json.dumps({"reason": "a\nb"}).encode()))
    assert worker.ended == "a b"


def test_the_table_of_ops_is_silographs_own() -> None:
    ops = own_ops()
    assert ops["evaluation.evaluate:judge_own"] is judge_own
    assert all(op.__module__.startswith("silograph.") for op in ops.values())
    assert name_of(ops, judge_own) == "evaluation.evaluate:judge_own"
    assert op_of(ops, "evaluation.evaluate:judge_own") is judge_own
    with pytest.raises(ProtocolError, match=r"silograph's own modules or .*, got .*count: no code"):
        name_of(ops, count)
    with raises_code(
        ProtocolError,
        "unknown-name",
        what="op",
        got="evaluation.evaluate:judge_owl",
        suggestion="evaluation.evaluate:judge_own",
    ):
        op_of(ops, "evaluation.evaluate:judge_owl")


SHAPES: list[Callable[..., None]] = [
    lambda cfg, block, state, inbox, key: None,
    lambda cfg, block, state, inbox, key=None: None,
    lambda cfg, block, state, inbox, *, key: None,
    lambda cfg, block, state, inbox, *key: None,
    lambda cfg, block, state, inbox, key, *more: None,
    lambda cfg, block, state, inbox, key, **more: None,
    lambda cfg, block, state, inbox, key, more: None,
    lambda cfg, block, state, key, inbox: None,
    lambda cfg, block, state, inbox: None,
    functools.wraps(count)(lambda *given: None),
]


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: str(inspect.signature(shape)))
def test_an_op_is_what_its_signature_says(shape: Callable[..., None]) -> None:
    names = "cfg", "block", "state", "inbox", "key"
    assert is_op(shape) == (tuple(inspect.signature(shape).parameters) == names)


def test_the_table_of_ops_while_others_import(monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = itertools.count()

    def load(phase: str, info: dict[str, int]) -> None:
        """Load a module whenever memory is collected: in the midst of whatever allocates."""
        monkeypatch.setitem(sys.modules, f"silograph.new_{next(numbers)}", ModuleType("new"))

    expected, before = own_ops(), gc.get_threshold()
    pairs = [(n, str(n)) for n in range(5000)]  # no free ones are left: the next is allocated
    gc.callbacks.append(load)
    try:
        gc.set_threshold(1)
        assert own_ops() == expected
    finally:
        gc.set_threshold(*before)
        gc.callbacks.remove(load)
    assert next(numbers) > 0
    del pairs
