"""What a method sees of a federation: `call`, and reductions that the engine folds.

A method is a server program. It calls named client ops: pure module-level functions

    op(cfg, block, state, inbox, key) -> (state, reply)

that act on a block of C >= 1 clients. Between calls a client's state stays where the client is.
Nothing else crosses: no closure, no global, no object.
"""

import functools
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol, TypeVar, cast

import numpy as np
import torch
from torch import Tensor

import silograph
from silograph.core.errors import OpError, ProtocolError, SilographError, mistake
from silograph.core.key import Key
from silograph.core.kinds import Kind
from silograph.core.payload import Field, Payload, State, join, state_of, take_all
from silograph.core.work import work_of
from silograph.federation.decoder import WHOLE, Decoder
from silograph.federation.ledger import Ledger, Record
from silograph.federation.state_files import StateFile
from silograph.graph.block.block import ClientBlock, Route

NOTHING: Mapping[str, Any] = MappingProxyType({})


class AwayError(ProtocolError):
    """Clients that a call needs are away, but may return; then the round can be repeated.

    Attributes:
        names: of the clients that are away.
        needed: how many of them must return.
    """

    def __init__(self, line: str, names: Sequence[str], needed: int, **fields: Any) -> None:
        super().__init__(line, **fields)
        self.names = tuple(names)
        self.needed = needed


Op = Callable[[Any, ClientBlock, State, Payload, Key], tuple[State, Payload]]
OneOp = TypeVar("OneOp", bound=Op)
ALL_NAMES = ("",)  # how the names of all fields begin

# An op may declare some things, which engines find in its `__dict__`: `reads` and `overwrites`, how
# names of fields of the state begin (`ALL_NAMES` and none if it does not say); `reply_kind`; and
# its `declaration`, with the function as it is `written` (`silograph.federation.ops`).


def reads(*names: str) -> Callable[[Op], Op]:
    """Declare which fields of the state an op reads: those whose names begin with one of these.

    The op gets only these, so a call to some clients of a block copies no others. Other fields
    stay unchanged unless the op returns them. Without this decorator it gets the whole state.
    """

    def mark(op: Op) -> Op:
        op.__dict__["reads"] = names
        return op

    return mark


def overwrites(*names: str) -> Callable[[Op], Op]:
    """Declare which fields of the state an op writes to, by the beginnings of their names.

    The op gets them in memory of its own, so it may change them in place, and must return them in
    such memory. All other fields stay as they are. If it fails in a simulation, the old values are
    lost; the run ends then anyway.
    """

    def mark(op: Op) -> Op:
        op.__dict__["overwrites"] = names
        return op

    return mark


def replies_with(kind: Kind) -> Callable[[Op], Op]:
    """Declare the kind of an op's replies, where it is another than that of the calls."""

    def mark(op: Op) -> Op:
        op.__dict__["reply_kind"] = kind
        return op

    return mark


def reply_kind(op: Op, what: Kind) -> Kind:
    """Return the kind of an op's replies to calls of a kind."""
    kind: Kind = op.__dict__.get("reply_kind", what)
    return kind


@dataclass(frozen=True)
class WeightedMean:
    """Mean of every field over clients, weighted by the field `by` (C,), which is summed.

    A client of weight 0 takes no part, whatever it sent. If none has a weight, the result has
    the field `by` only.

    Attributes:
        by: the field with the weights.
        around: tensors that most rows of a field equal: the mean is that of the differences from
            them, so rows that do not differ cost nothing. They change no more than rounding.
        sent: how fields of replies are decoded.
        without: fields of which no mean is taken, since they are gathered.
    """

    by: str
    around: Mapping[str, Tensor] = field(default_factory=dict)
    sent: Decoder = WHOLE
    without: tuple[str, ...] = ()


@dataclass(frozen=True)
class Sum:
    """Sum of every field over clients."""


BY_CLIENT = "by_client/"
ANSWERED = BY_CLIENT + "answered"


@dataclass(frozen=True, init=False)
class Gather:
    """Fields of the replies as they are, by client; all fields may be folded beside that.

    The result has `by_client/NAME` (C, ...) for each field, with a slice for every client of the
    federation in its order, zeros for clients that were not called or did not answer, and
    `by_client/answered` (C,) bool. A call goes on without silos that are away, as a sum does.

    >>> Gather("loss", fold=WeightedMean("nodes")).fields
    ('loss',)

    Attributes:
        fields: names of the fields, `Stacked` or `Patched` ones.
        fold: how all fields of the replies are folded as well; None: not at all.
    """

    fields: tuple[str, ...]
    fold: WeightedMean | Sum | None

    def __init__(self, *fields: str, fold: WeightedMean | Sum | None = None) -> None:
        if not fields or len(set(fields)) < len(fields) or "answered" in fields:
            raise ProtocolError(
                f"expected names of fields to gather, each once and none of them 'answered', got "
                f"{list(fields)}"
            )
        object.__setattr__(self, "fields", fields)
        object.__setattr__(self, "fold", fold)


Reduce = WeightedMean | Sum | Gather


def decoder_of(reduce: Reduce | None) -> Decoder:
    """Return the decoder of replies."""
    fold = fold_of(reduce)
    return fold.sent if isinstance(fold, WeightedMean) else WHOLE


def fold_of(reduce: Reduce | None) -> WeightedMean | Sum | None:
    """Return the sum or mean of replies, None if they are only gathered."""
    return reduce.fold if isinstance(reduce, Gather) else reduce


class Federation(Protocol):
    """An engine: it knows the clients and carries calls to them."""

    @property
    def ids(self) -> tuple[str, ...]:
        """Names of the clients; their order is the order of every sum."""

    @property
    def route(self) -> Route:
        """Who answers for each halo slot."""

    @property
    def away(self) -> tuple[str, ...]:
        """Clients that are away; none in one process."""

    @property
    def ledger(self) -> Ledger:
        """What every call cost."""

    def start_round(self, number: int) -> None:
        """Assign the calls from here on to this round; 0 is before the first."""

    def call(
        self,
        op: Op,
        inbox: Payload,
        *,
        what: Kind,
        key: Key,
        to: Sequence[str] | None = None,
        reduce: Reduce | None = None,
        rows: bool = False,
        allow_missing: bool = False,
    ) -> Payload:
        """Run `op` at the clients `to` (all by default, in client order) and return the replies.

        Args:
            op: module-level function.
            inbox: what the clients get; `Stacked` and `Ragged` fields have a part for each
                client of `to`.
            what: declared content of the call; of the reply, too, unless the op says another.
            key: key of the op's draws.
            to: ids, in the federation's order.
            reduce: how the replies are folded, to `Shared` fields, or which are gathered by
                client (`Gather`).
            rows: whether replies may be `Ragged`. What has a row for each node crosses clients
                through `silograph.exchange` only, which says so here.
            allow_missing: whether the call goes on without clients that are away or fail, however
                many; they are in `away` then, and have no rows in the replies. If nobody
                answers, no field comes back.

        Raises:
            ProtocolError: unknown, repeated or unordered ids, or a reply that breaks the rules.
        """


class Engine(Federation, Protocol):
    """A federation whose run can be interrupted and resumed."""

    @property
    def left_out(self) -> Mapping[str, str]:
        """Why clients are left out of the run for good, by their names; nobody in one process."""

    @property
    def executed(self) -> float | None:
        """Operations executed since the engine began, of all clients; None: silos do not tell.

        Less than the ledger's where work that each client is charged for is done once for several.
        It depends on blocks and backends, so it is no part of the ledger.
        """

    def states(self) -> Sequence[State]:
        """Return what the server's checkpoint holds of the clients; nothing if they keep it."""

    def write_states(self, folder: Path, number: int) -> Sequence[StateFile] | None:
        """Write the clients' states after a round to files, by block.

        Args:
            folder: of the checkpoints; it is there.
            number: of the round.

        Returns:
            None where nobody else can: then `states` has them.
        """

    def keep(self, number: int, committed: Sequence[int]) -> None:
        """Have clients that keep their own state store that of a completed round.

        The server commits the round after that: all clients have what a committed round needs.

        Args:
            number: of the round.
            committed: rounds that the server may go on from, if it is started again.
        """

    def hand_over(self, number: int, weights: Payload) -> int:
        """Send all attached clients the number of the best round and the server's weights of it.

        This is no call and not in the ledger: what a method costs does not depend on who keeps its
        model.

        Args:
            number: of the best round.
            weights: `weights/*` shared; nothing where the server has none.

        Returns:
            Bytes of all frames; in one process those that silos of their own would get.
        """

    @property
    def remembered(self) -> Mapping[str, Any]:
        """What a checkpoint holds of the engine besides states and records, as plain values."""

    def restore(
        self,
        number: int,
        states: Sequence[State | StateFile],
        records: Sequence[Record],
        remembered: Mapping[str, Any] = NOTHING,
    ) -> None:
        """Resume from a round: its states, if the server holds them, and the records up to it.

        Args:
            number: of the round.
            states: of the clients.
            records: of the ledger.
            remembered: what the engine remembered then; what it lacks was not known.

        Raises:
            CheckpointError: nothing that an engine remembers.
            StateError: a client that keeps its own state does not have that of the round.
        """

    def rejoin(self, away: AwayError) -> None:
        """Wait for missing clients, and restore all to the beginning of the round.

        Raises:
            ProtocolError: they do not come back, or not as they were.
        """

    def close(self) -> None:
        """End what the engine has started; it is not used any more."""


def positions_of(ids: Sequence[str], to: Sequence[str] | None) -> Tensor:
    """Return the positions (k,) int64 of the clients `to` among `ids`.

    Raises:
        ProtocolError: ids that are unknown, repeated, or not in the federation's order.
    """
    if to is None:
        return torch.arange(len(ids))
    return _positions(tuple(ids), tuple(to)).clone()


@lru_cache(maxsize=4)  # a round asks several times for those whom it calls
def _positions(ids: tuple[str, ...], to: tuple[str, ...]) -> Tensor:
    """Return the positions (k,) int64 of clients; not to be changed; see `positions_of`."""
    place = _places(ids)
    try:
        positions = np.fromiter(map(place.__getitem__, to), np.int64, len(to))
    except KeyError as error:
        raise ProtocolError(f"expected clients of this federation, got {error.args[0]!r}") from None
    if not len(positions) or not bool((positions[1:] > positions[:-1]).all()):
        raise ProtocolError(
            f"expected at least one client, each once and in the federation's order, got {list(to)}"
        )
    return torch.from_numpy(positions)


@lru_cache(maxsize=4)  # of a federation in every call
def _places(ids: tuple[str, ...]) -> dict[str, int]:
    """Return the position of each client; not to be changed."""
    return {name: position for position, name in enumerate(ids)}


# --- op failure ----------------------------------------------------------------------------------
# The message of an op that failed: which op, round, clients, place in its code, and inputs.
#
# And of functions of users that the server runs: those of a method, a selector or an aggregator.
#
# C: clients of the block.


LIBRARY = str(Path(silograph.__file__).parent)
INSTALLED = ("site-packages", "dist-packages")
MOST_CLIENTS, MOST_FIELDS, MOST_TEXT = 3, 8, 300


def failure(
    op: Op, number: int, block: ClientBlock, state: State, inbox: Payload, error: Exception
) -> OpError:
    """Return the error for an op that raised another: one line, whatever it says itself.

    Args:
        op: the op.
        number: of the round.
        block: the clients that were called.
        state: theirs.
        inbox: theirs.
        error: what the op raised.
    """
    return OpError(f"{op.__name__} failed with {_what(error)}{_place(error)}; "
                   f"{_scene(number, block)}; "
                   f"inbox: {_fields(inbox)}; state: {_fields(state)}",
                   **mistake("op", op.__name__, number))  # fmt: skip


@contextmanager
def at_server(function: Callable[..., Any], owner: str, number: int) -> Iterator[None]:
    """Raise `OpError`, of one line, where a function of a user's own fails at the server.

    Args:
        function: the function; errors of silograph's own keep their tracebacks.
        owner: what it belongs to, such as `method median`.
        number: of the round.
    """
    try:
        yield
    except Exception as error:
        if is_self_explanatory(error) or (function.__module__ or "").startswith("silograph."):
            raise
        name = getattr(function, "__name__", type(function).__name__)  # a step may be a value
        line = f"{name} of {owner} failed with {_what(error)}{_place(error)}"
        raise OpError(
            f"{line}; round {number}, at the server", **mistake("op", name, number)
        ) from error


@contextmanager
def in_function(function: Callable[..., Any], description: str) -> Iterator[None]:
    """Raise `OpError`, of one line, where a function of a user's own fails before a run.

    Args:
        function: the function; errors of silograph's own keep their tracebacks.
        description: what it is called in the error.
    """
    try:
        yield
    except Exception as error:
        if is_self_explanatory(error) or getattr(function, "__module__", "").startswith(
            "silograph."
        ):
            raise
        raise OpError(f"in {description}: {_what(error)}{_place(error)}") from error


def context(op: Op, number: int, block: ClientBlock, state: State, inbox: Payload) -> str:
    """Describe the place of a failure, as a note for an error that explains itself."""
    return (
        f"in {op.__name__}, {_scene(number, block)}; inbox: {_fields(inbox)}; state: "
        f"{_fields(state)}"
    )


def is_self_explanatory(error: Exception) -> bool:
    """Whether an error explains itself: silograph's own, or exhausted memory."""
    exhausted = isinstance(error, RuntimeError) and "memory" in str(error)
    return isinstance(error, SilographError | MemoryError) or exhausted


def _scene(number: int, block: ClientBlock) -> str:
    """Return round and clients in words."""
    names, count = block.ids[:MOST_CLIENTS], block.num_clients
    more = f" and {count - len(names)} more" if count > len(names) else ""
    size = "a block of one client" if count == 1 else f"a block of {count} clients"
    return f"round {number}, {size}: {', '.join(names)}{more}"


def _fields(fields: Mapping[str, Field]) -> str:
    """Return names, forms, shapes and dtypes of fields; values may be private."""
    lines = [
        f"{name} {type(f).__name__} {tuple(f.t.shape)} {str(f.t.dtype).removeprefix('torch.')}"
        for name, f in list(fields.items())[:MOST_FIELDS]
    ]
    more = len(fields) - len(lines)
    return ", ".join(lines + [f"{more} more"] * (more > 0)) or "none"


def _place(error: Exception) -> str:
    """Return the last line of code outside silograph and other packages, if there is one."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        is_library_code = frame.filename.startswith(LIBRARY) or frame.filename.startswith("<")
        if not is_library_code and not set(INSTALLED) & set(Path(frame.filename).parts):
            return f" ({frame.filename}, line {frame.lineno}, in {frame.name})"
    return ""


def _what(error: Exception) -> str:
    """Return type and text of an error in one line."""
    text = " ".join(str(error).split())
    return type(error).__name__ + (f": {_short(text)}" if text else "")


def _short(text: str) -> str:
    return text if len(text) <= MOST_TEXT else f"{text[:MOST_TEXT]}..."


# --- `per_client`: an op written for one client, used on any block -------------------------------


def per_client(op: OneOp) -> OneOp:
    """Return the op that splits a block into blocks of one, maps `op`, and joins the results.

    It means the same as a batched op; only speed differs.
    """

    @functools.wraps(op)
    def lifted(
        cfg: Any,
        block: ClientBlock,
        state: State,
        inbox: Payload,
        key: Key,
    ) -> tuple[State, Payload]:
        if block.num_clients == 1:
            return op(cfg, block, state, inbox, key)
        states: list[Payload] = []
        replies: list[Payload] = []
        for position in torch.arange(block.num_clients, device=block.off.device).split(1):
            own = state_of(take_all(state, position))
            with work_of(position):
                new, reply = op(cfg, block.take(position), own, take_all(inbox, position), key)
            states.append(new)
            replies.append(reply)
        return state_of(join(states)), join(replies)

    lifted.__dict__.pop("written", None)  # which is for one client
    return cast(OneOp, lifted)
