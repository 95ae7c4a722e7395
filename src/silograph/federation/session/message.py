"""Messages of a session: what stands around a frame between server and silo.

    header   magic "SGM1" · type u8 · token of the run, 16 bytes · sequence u64
    CALL     key u64 · flags u8 · length of the op's name u16 · name, UTF-8 · frame; with the flag
             SUMMED before the frame: length u8 · name of the field with weights, UTF-8 · digest of
             the names of all silos that are called, 32 bytes
    REPLY    meters u8 · for each: kind u8, operations f64 (the first is the call's own) · frame
    JOINED   frame
    RESULT   frame
    SHARE    frame; likewise MASK, CONFIRM, UNMASK and SUMMED
    EXPLAIN  length of the JSON object u32 · one JSON object · tags of edges, 16 bytes each
    others   one JSON object

Numbers are little-endian. The sequence counts the server's messages to one silo from 1, and an
answer has the number of what it answers; so nothing is taken twice, out of order, or from another
run. What is here is not in the ledger, whose bytes are the frames'.
"""

import inspect
import json
import struct
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

from silograph.core.errors import ConfigError, FrameError, ProtocolError, reword_error, unknown
from silograph.core.key import MASK, Key
from silograph.core.kinds import Kind
from silograph.core.work import Meter
from silograph.federation.base import Op
from silograph.federation.frame import KINDS
from silograph.federation.matching import TAG_BYTES
from silograph.federation.program import Program, calls_of

MAGIC = b"SGM1"
HEADER = struct.Struct("<4sB16sQ")
CALL_HEAD = struct.Struct("<QBH")
METER = struct.Struct("<Bd")
LENGTH = struct.Struct("<I")
MAX_NAME = 255
MOST_FLOPS = 1e300  # of a reply; sums of a hundred million of them are finite
MAX_FACTS = 2**20  # bytes of a JSON object
MAX_MESSAGE_BYTES = 2**30
ROWS, SUMMED = 1, 2  # flags of a call
CALLED_BYTES = 32  # of a digest of names
NO_TOKEN = bytes(16)


class Type(IntEnum):
    """Types of messages."""

    HELLO = 1  # silo: who it is and what its data look like
    CHALLENGE = 2  # server: what the silo is to sign
    PROOF = 3  # silo: the signature
    WELCOME = 4  # server: the silo is registered
    JOIN = 5  # server: a nonce, for the silo to show itself by
    JOINED = 6  # silo: features, labels and tags of cross-silo edges, in a frame
    EXPLAIN = 7  # server: edges that the other silo does not list
    START = 8  # server: the run's config
    CALL = 9
    REPLY = 10
    KEEP = 11  # server: a round is over, write its state down
    LOAD = 12  # server: go on from the state of a round
    DONE = 13  # silo: that was done
    REFUSED = 14  # either: why not
    END = 15  # server: the run is over
    DISMISSED = 16  # server: it goes on without the silo, and why
    STOPPING = 17  # server: it was stopped, and the run may be continued
    RESULT = 18  # server: the best round, and its weights if silos get them, in a frame
    HEAD = 19  # server: asks for the signed head of the silo's audit
    HEADS = 20  # server: the signed heads of all silos' audits
    SHARE = 21  # server: public keys of a secure sum, for shares; see `summed_reply`
    MASK = 22  # server: shares of others, for masked values
    UNMASK = 23  # server: confirmations of others, for shares that unmask the sum
    SUMMED = 24  # silo: the answer to one of these, or to CONFIRM
    CONFIRM = 25  # server: who is there, for the silo to confirm to others


@dataclass(frozen=True)
class Message:
    """A message without its header's magic."""

    type: Type
    token: bytes
    sequence: int
    body: bytes | memoryview

    def facts(self) -> dict[str, Any]:
        """Return the JSON object of the body.

        Raises:
            FrameError: the body is something else, or too long.
        """
        return object_of(self.body, self.type)

    def check_type(self, kind: Type) -> None:
        """Raise `FrameError` for a message of another type."""
        if self.type is not kind:
            raise FrameError(f"expected {kind.name}, got {self.type.name}")


def object_of(data: bytes | memoryview, kind: Type = Type.DONE) -> dict[str, Any]:
    """Return the JSON object of a message's body; see `Message.facts`."""
    if len(data) > MAX_FACTS:
        raise FrameError(f"expected at most {MAX_FACTS} bytes of facts, got {len(data)}")
    try:
        facts = json.loads(bytes(data))
    except (ValueError, RecursionError):
        facts = None
    if not isinstance(facts, dict):
        raise FrameError(f"expected a JSON object in a {kind.name} message, got others")
    return facts


def check_size(*body: bytes | memoryview) -> None:
    """Raise `FrameError` where the body of a message, in parts, is too long to be sent."""
    size = HEADER.size + sum(map(len, body))
    if size > MAX_MESSAGE_BYTES:
        raise FrameError(
            f"expected a message of at most {MAX_MESSAGE_BYTES:,} bytes, got {size:,}: take "
            "smaller layers (--hidden), or spread the data over more silos"
        )


def pack(message: Message, *more: bytes | memoryview) -> bytes:
    """Return the bytes of a message; see `check_size`.

    Args:
        message: with the body, or its beginning.
        more: the rest of the body, in parts, so that a long frame is copied only once.
    """
    check_size(message.body, *more)
    head = HEADER.pack(MAGIC, message.type, message.token, message.sequence)
    return b"".join((head, message.body, *more))


def unpack(data: bytes | bytearray) -> Message:
    """Return the message of some bytes; its body is a view of them, no copy.

    Raises:
        FrameError: they are no message.
    """
    if not HEADER.size <= len(data) <= MAX_MESSAGE_BYTES:
        raise FrameError(
            f"expected a message of {HEADER.size} to {MAX_MESSAGE_BYTES} bytes, got {len(data)}"
        )
    magic, kind, token, sequence = HEADER.unpack_from(data)
    if magic != MAGIC:
        raise FrameError(f"expected a message that starts with {MAGIC!r}, got {magic!r}")
    if kind not in Type.__members__.values():
        raise FrameError(f"expected a known type of message, got {kind}")
    return Message(Type(kind), token, sequence, memoryview(data)[HEADER.size :])


def read_message(data: bytes | bytearray, token: bytes, sequence: int) -> Message:
    """Return the message of some bytes, which must be of this run and have this number.

    Raises:
        FrameError: they are no message, or another one.
    """
    message = unpack(data)
    if message.token != token:
        raise FrameError("expected a message of this run, got one of another")
    if message.sequence != sequence:
        raise FrameError(f"expected message {sequence}, got {message.sequence}: repeated or lost")
    return message


def facts_body(facts: Mapping[str, Any]) -> bytes:
    """Return a JSON object as a body."""
    return json.dumps(facts, sort_keys=True).encode()


def explain_body(facts: Mapping[str, Any], tags: Sequence[bytes]) -> bytes:
    """Return facts and tags of edges as a body."""
    encoded_facts = facts_body(facts)
    return LENGTH.pack(len(encoded_facts)) + encoded_facts + b"".join(tags)


def read_explain(body: bytes | memoryview) -> tuple[dict[str, Any], tuple[bytes, ...]]:
    """Return the facts and tags of a body; raise `FrameError` where it has none."""
    length = LENGTH.unpack_from(body)[0] if len(body) >= LENGTH.size else len(body)
    facts, tags = body[LENGTH.size :][:length], body[LENGTH.size + length :]
    if len(facts) < length or not tags or len(tags) % TAG_BYTES:
        raise FrameError(f"expected edges to explain, got {len(body)} bytes: cut short")
    tag_list = tuple(bytes(tags[i : i + TAG_BYTES]) for i in range(0, len(tags), TAG_BYTES))
    return object_of(facts, Type.EXPLAIN), tag_list


@dataclass(frozen=True)
class CallBody:
    """A call: which op, with which key, and the frame of the inbox.

    Attributes:
        op: qualified name.
        key: of the op's draws.
        rows: whether the reply may have rows.
        frame: of the inbox.
        by: of a reply that is summed securely, the field with the weights of a mean, "" of a sum;
            None: the reply is sent as it is.
        called: of such a reply, the digest of the names of all silos that are called.
    """

    op: str
    key: Key
    rows: bool
    frame: bytes | memoryview
    by: str | None = None
    called: bytes = bytes(CALLED_BYTES)


def call_body(call: CallBody) -> bytes:
    """Return the body of a call."""
    name = call.op.encode()
    flags = ROWS * call.rows + SUMMED * (call.by is not None)
    by = b""
    if call.by is not None:
        by = bytes([len(call.by.encode())]) + call.by.encode() + call.called
    head = CALL_HEAD.pack(call.key.value & MASK, flags, len(name))
    return b"".join((head, name, by, call.frame))


def read_call(body: bytes | memoryview) -> CallBody:
    """Return the call of a body; raise `FrameError` where it is none."""
    if len(body) < CALL_HEAD.size:
        raise FrameError(f"expected a call, got {len(body)} bytes: cut short")
    key, flags, length = CALL_HEAD.unpack_from(body)
    start = CALL_HEAD.size + length
    frame = start
    if flags & SUMMED and start < len(body):
        frame += 1 + body[start] + CALLED_BYTES
    if flags > (ROWS | SUMMED) or length > MAX_NAME or max(start, frame) > len(body):
        raise FrameError(f"expected a call, got flags {flags} and a name of {length} bytes")
    try:
        name = bytes(body[CALL_HEAD.size : start]).decode()
        by = bytes(body[start + 1 : frame - CALLED_BYTES]).decode() if flags & SUMMED else None
    except UnicodeDecodeError:
        raise FrameError("expected UTF-8 in the name of an op, got other bytes") from None
    call = CallBody(name, Key(key), bool(flags & ROWS), body[frame:], by)
    return call if by is None else replace(call, called=bytes(body[frame - CALLED_BYTES : frame]))


def reply_body(kind: Kind, meter: Meter, frame: bytes) -> bytes:
    """Return the body of a reply: the frame, and the work of one client (see `Meter`)."""
    own = [(kind, meter), *sorted(meter.apart.items())]
    packed = [METER.pack(KINDS.index(k), float(m.totals().own[0])) for k, m in own]
    return bytes([len(packed)]) + b"".join(packed) + frame


def read_reply(body: bytes | memoryview) -> tuple[Meter, bytes | memoryview]:
    """Return the work of a reply as a meter of one client, and the frame.

    Raises:
        FrameError: the body is no reply.
    """
    count = body[0] if body else 0
    start = 1 + count * METER.size
    if not 0 < count <= 1 + len(KINDS) or start > len(body):
        raise FrameError(f"expected a reply, got {len(body)} bytes and {count} meters")
    total = Meter(1)
    for number, (kind, flops) in enumerate(METER.iter_unpack(body[1:start])):
        if kind >= len(KINDS) or not 0 <= flops <= MOST_FLOPS:
            raise FrameError(f"expected the work of a known kind, got {flops} of {kind}")
        (total if number == 0 else total.part(KINDS[kind])).add_each(flops)
    return total, body[start:]


# --- names ---------------------------------------------------------------------------------------
# Which ops a session runs, by qualified name: silograph's own and users'. Tables are closed.
#
# An op is a public module-level function with the five parameters of an op. What a name of a table
# stands for is decided before any message comes: no message loads anything.


PARAMETERS = ("cfg", "block", "state", "inbox", "key")
PACKAGE = "silograph."
STARRED = inspect.CO_VARARGS | inspect.CO_VARKEYWORDS


def module_name(op: Op) -> str:
    """Return the name of an op's module, which is the same on every machine.

    A file that was run is a module whose name is its path and a colon; this is the file's name.
    """
    name = op.__module__
    return Path(name[:-1]).name if name.endswith(".py:") else name


def qualified(op: Op) -> str:
    """Return `module:name` of a module-level function."""
    module = module_name(op)
    return f"{module.removeprefix(PACKAGE) if is_library(op) else module}:{op.__name__}"


def is_library(op: Op) -> bool:
    """Return whether an op is one of silograph's own."""
    return op.__module__.startswith(PACKAGE)


def is_op(value: object) -> bool:
    """Return whether a value is an op that a name can stand for."""
    return (
        inspect.isfunction(value)
        and value.__qualname__ == value.__name__
        and not value.__name__.startswith("_")
        and _parameters(value) == PARAMETERS
    )


def _parameters(function: FunctionType) -> tuple[str, ...]:
    """Return the names of a function's parameters; a signature takes far longer."""
    code = function.__code__
    if vars(function) or code.co_kwonlyargcount or code.co_flags & STARRED:
        return tuple(inspect.signature(function).parameters)
    return code.co_varnames[: code.co_argcount]


def ops_in(modules: Iterable[ModuleType]) -> dict[str, Op]:
    """Return the ops that modules define, by qualified name."""
    ops: dict[str, Op] = {}
    for module in modules:
        for member, value in vars(module).copy().items():
            if not inspect.isfunction(value) or value.__module__ != module.__name__:
                continue
            if value.__name__ == member and is_op(value):
                ops[qualified(value)] = value
    return ops


def own_ops() -> dict[str, Op]:
    """Return the ops of all modules of silograph that are loaded, by qualified name."""
    loaded = sys.modules.copy()  # in one step: other threads may be importing
    return ops_in(loaded[name] for name in sorted(loaded) if name.startswith(PACKAGE))


def with_ops(ops: Mapping[str, Op], more: Iterable[Op]) -> dict[str, Op]:
    """Return a table with more ops.

    Raises:
        ConfigError: one of them cannot be named, or has the name of another.
    """
    all_ops = dict(ops)
    for op in more:
        name = qualified(op)
        if not is_op(op):
            raise ConfigError(
                f"expected ops that are public functions of a module with the parameters "
                f"({', '.join(PARAMETERS)}), got {op.__module__}.{op.__qualname__}"
            )
        if all_ops.setdefault(name, op) is not op:
            owner = "silograph has" if is_library(all_ops[name]) else "other code has"
            raise ConfigError(
                f"expected an op with a name of its own, got {name}, which {owner}, too: rename "
                "its module"
            )
    return all_ops


def ops_of(program: Program) -> tuple[Op, ...]:
    """Return the ops that a program calls, each once."""
    programs = program.setup, program.round(1), program.round(program.rounds)
    return tuple(dict.fromkeys(call.op for steps in programs for call in calls_of(steps)))


def name_of(ops: Mapping[str, Op], op: Op) -> str:
    """Return the name of an op in the table.

    Raises:
        ProtocolError: it is not in the table, so silos could not run it.
    """
    name = qualified(op)
    if ops.get(name) is not op:
        raise ProtocolError(
            f"expected an op of silograph's own modules or of the method's declared calls, got "
            f"{op.__module__}.{op.__qualname__}: no code travels to silos"
        )
    return name


def op_of(ops: Mapping[str, Op], name: str) -> Op:
    """Return the op of a name; raise `ProtocolError` where the table has none."""
    if name not in ops:
        error = unknown("op", name, ops)
        raise reword_error(error, str(error).split("; choices")[0], ProtocolError)
    return ops[name]
