"""What may cross: every payload and state is held to the same rules, encoded or not.

Without this, an op that breaks a rule would be noticed on some block sizes and engines only.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from silograph.core.errors import ProtocolError, mistake
from silograph.core.key import Key
from silograph.core.payload import (
    Field,
    Patched,
    Payload,
    Shared,
    Stacked,
    State,
    copied,
    patched_problem,
)
from silograph.federation.base import (
    ALL_NAMES,
    NOTHING,
    Op,
    context,
    failure,
    is_self_explanatory,
)
from silograph.federation.frame import DTYPES, MAX_DIMENSIONS, MAX_FIELDS, MAX_NAME
from silograph.graph.block.block import ClientBlock

# Begins the names of (C,) bool fields beside state fields that only some clients of a block have.
HAS = "has?/"


def check_fields(
    fields: Mapping[str, Field],
    clients: int,
    where: str,
    *,
    shared: bool = False,
    rows: bool = True,
    checked: Mapping[str, Field] = NOTHING,
) -> None:
    """Raise `ProtocolError` unless every field has a part for each client, and frames carry it.

    Args:
        fields: a payload or a state.
        clients: C.
        where: what it is, for the message: `reply of train`.
        shared: whether `Shared` fields are allowed: only the server may send one tensor to all.
        rows: whether `Ragged` fields are allowed: not in replies to a plain call.
        checked: fields that were checked before; the same objects are skipped.
    """
    if len(fields) > MAX_FIELDS:
        raise ProtocolError(f"expected at most {MAX_FIELDS} fields in {where}, got {len(fields)}")
    for name, field in fields.items():
        t = field.t
        if field is checked.get(name):
            continue
        problem = None
        if t.dtype not in DTYPES:
            problem = f"a dtype that frames carry, got {t.dtype},"
        elif len(name.encode()) > MAX_NAME or t.ndim > MAX_DIMENSIONS:
            problem = f"a name of at most {MAX_NAME} bytes and {MAX_DIMENSIONS} dimensions"
        elif isinstance(field, Shared):
            problem = None if shared else "Stacked or Ragged, got Shared"
        elif isinstance(field, Stacked):
            if not t.ndim or t.size(0) != clients:
                problem = f"a slice for each of {clients} clients, got shape {tuple(t.shape)}"
        elif isinstance(field, Patched):
            problem = patched_problem(field, clients)
        elif not rows:
            problem = "Stacked, got Ragged (rows cross by relay_sum, pull or publish only),"
        else:
            ends = field.off.tolist()
            if len(ends) != clients + 1 or ends[0] != 0 or ends[-1] != len(t):
                problem = f"runs of {len(t)} rows for {clients} clients, got offsets {ends[:9]}"
            elif ends != sorted(ends):
                problem = f"ascending offsets, got {ends[:9]}"
        if problem:
            raise ProtocolError(
                f"expected {problem} for {name!r} in {where}",
                **mistake("field-out-of-bounds", name, where),
            )


def of_round(cfg: Any, number: int) -> Any:
    """Return the config that ops get in a round: a pure function of both arguments.

    A config that changes from round to round has a method `in_round(number)`; 0 is before round 1.
    """
    return cfg.in_round(number) if hasattr(cfg, "in_round") else cfg


def run_op(
    op: Op,
    cfg: Any,
    block: ClientBlock,
    state: State,
    inbox: Payload,
    key: Key,
    *,
    rows: bool,
    number: int = 0,
    private: bool = False,
) -> tuple[State, Payload]:
    """Run an op and check its state and reply; it gets copies of the fields that it overwrites.

    Args:
        op: the op.
        cfg: what it reads in the round, see `of_round`.
        block: the clients that were called.
        state: theirs.
        inbox: theirs.
        key: of its draws.
        rows: whether replies may be `Ragged`.
        number: of the round.
        private: whether the message of an error in the op must not leave this process.

    Raises:
        ProtocolError: it broke a rule.
        OpError: it failed. Unless `private`, errors of silograph and of memory stay what they are.
    """
    reads, overwrites = op.__dict__.get("reads", ALL_NAMES), op.__dict__.get("overwrites", ())
    readable_state = {
        name: copied(field) if name.startswith(overwrites) else field
        for name, field in state.items()
        if name.startswith(reads)
    }
    try:
        function, arguments, finish = step_of(op, cfg, block, readable_state, inbox, key)
        new, reply = finish(*function(*arguments))
    except Exception as error:
        if is_self_explanatory(error) and not private:
            error.add_note(context(op, number, block, state, inbox))
            raise
        raise failure(op, number, block, state, inbox, error) from error
    return check_results(op, block.num_clients, state, new, reply, rows=rows), reply


def step_of(
    op: Op, cfg: Any, block: ClientBlock, state: State, inbox: Payload, key: Key
) -> tuple[Callable[..., Any], tuple[Any, ...], Callable[..., tuple[State, Payload]]]:
    """Return the function to call for an op, and its arguments.

    The third makes state and reply of the two values that the function returns.
    """
    # What wraps an op by `functools.wraps` has its attributes, and is called itself.
    written = None if hasattr(op, "__wrapped__") else op.__dict__.get("written")
    if written is None:
        return op, (cfg, block, state, inbox, key), lambda new, reply: (new, reply)
    declared = op.__dict__["declaration"]  # as the op itself does it
    arguments = declared.arguments(cfg, block, state, inbox, key)
    return written, arguments[:3], partial(declared.results, *arguments)


def check_results(
    op: Op, clients: int, state: State, new: State, reply: Payload, *, rows: bool
) -> State:
    """Check the state and the reply of an op, and return the state with what the op did not read.

    Args:
        op: the op.
        clients: C.
        state: what they had before.
        new: what it has returned.
        reply: what it has returned.
        rows: whether replies may be `Ragged`.

    Raises:
        ProtocolError: it broke a rule.
    """
    reads = op.__dict__.get("reads", ALL_NAMES)
    unread = {name: field for name, field in state.items() if not name.startswith(reads)}
    if unread:
        new = {**unread, **new}
    check_fields(reply, clients, f"reply of {op.__name__}", rows=rows)
    check_fields(new, clients, f"state after {op.__name__}", checked=state)
    for name in new:
        if name.startswith(HAS):
            raise ProtocolError(
                f"expected names of state fields that do not begin with {HAS!r} after "
                f"{op.__name__}, got {name!r}"
            )
    return new


def check_alike(name: str, old: Field, new: Field) -> None:
    """Raise `ProtocolError` unless fields of two clients can be one state field."""
    old, new = (Stacked(f.base[:1]) if isinstance(f, Patched) else f for f in (old, new))
    if type(old) is not type(new):
        raise ProtocolError(
            f"expected state {name!r} of type {type(old).__name__}, got {type(new).__name__}: "
            "an op must keep the type of a state field"
        )
    if old.t.dtype != new.t.dtype or old.t.shape[1:] != new.t.shape[1:]:
        raise ProtocolError(
            f"expected state {name!r} of {old.t.dtype} and shape {tuple(old.t.shape[1:])} a client "
            f"or row, got {new.t.dtype} and {tuple(new.t.shape[1:])}: a call to some clients must "
            "keep both"
        )
