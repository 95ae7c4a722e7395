"""Ops and the order of their calls: one declaration, from which both ends of a run derive the rest.

An op is a function `(clients, state, request) -> (state, reply)` of frozen dataclasses
(`silograph.federation.messages`). Parts of an order are ops, or groups of calls: calls that some
runs make, that are made again, or that one call of the server's makes, such as rows that some
clients ask for and others send.

Methods are written with `silograph.methods.ops`, whose ops also train. Here is what the rooms below
it need as well.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, is_dataclass
from typing import Any, Generic, TypeVar, cast, get_args, get_type_hints

from silograph.core.errors import ConfigError
from silograph.core.key import Key
from silograph.core.kinds import Kind
from silograph.core.payload import Payload, State
from silograph.federation.base import Federation, Reduce, overwrites, reads
from silograph.federation.messages import (
    declared_fields,
    from_payload,
    is_own_field,
    specs_of,
    to_payload,
)
from silograph.federation.program import Call, Maybe, Repeat, Steps
from silograph.graph.block.block import ClientBlock

Before = TypeVar("Before")
After = TypeVar("After")
Request = TypeVar("Request")
Reply = TypeVar("Reply")
Problem = Callable[[Payload, Payload], str | None]

# --- Ops -----------------------------------------------------------------------------------------


@dataclass
class BlockClients:
    """The clients of a block, as an op sees them.

    Attributes:
        cfg: what all ops of the run read.
        block: their graphs.
        key: of the op's draws.
        state: what they keep besides the op's own state; it stays.
    """

    cfg: Any
    block: ClientBlock
    key: Key
    state: State


@dataclass(frozen=True)
class OpDeclaration:
    """What an op takes and gives.

    Attributes:
        kind: content of its messages.
        before: class of the clients' state before it.
        request: class of the message to clients.
        after: class of their state after it.
        reply: class of the message to the server.
    """

    kind: Kind
    before: type
    request: type
    after: type
    reply: type

    @property
    def own_fields(self) -> tuple[str, ...]:
        """How names of fields of its state begin."""
        classes = (self.before, self.after)
        return tuple(sorted({field.name for cls in classes for field in declared_fields(cls)}))

    def others_in(self, state: State) -> State:
        """Return the fields of a state that are not the op's own."""
        classes = (self.before, self.after)
        return {n: f for n, f in state.items() if not any(is_own_field(cls, n) for cls in classes)}

    def find_problem(self, cfg: Any) -> Problem:
        """Return what finds numbers of a reply that contradict each other or the request."""
        compare = getattr(self.reply, "find_problem", None)

        def find(inbox: Payload, reply: Payload) -> str | None:
            if compare is None:
                return None
            request: Any = from_payload(self.request, inbox)
            return cast(str | None, compare(from_payload(self.reply, reply), request, cfg))

        return find


class ClientOp(Generic[Request, Reply]):
    """An op: the type of what `op` returns.

    It is a plain function at run time, with the parameters that engines, sessions and pickle
    expect, and with a `declaration`.
    """

    __name__: str
    __module__: str
    __qualname__: str
    declaration: OpDeclaration

    def __call__(
        self, cfg: Any, block: ClientBlock, state: State, inbox: Payload, key: Key
    ) -> tuple[State, Payload]:
        """Run the op at the clients of a block."""
        raise NotImplementedError


def op(
    kind: Kind,
) -> Callable[
    [Callable[[BlockClients, Before, Request], tuple[After, Reply]]], ClientOp[Request, Reply]
]:
    """Declare a function (clients, state, request) -> (state, reply) as an op.

    It gets its own state only. Ops of methods get what training needs, too (`methods.ops.op`).

    Args:
        kind: content of its messages.

    Raises:
        ConfigError: its annotations do not say what its state, request and reply are.
    """

    def declare(
        function: Callable[[BlockClients, Before, Request], tuple[After, Reply]],
    ) -> ClientOp[Request, Reply]:
        declaration = OpDeclaration(kind, *message_types(function))

        def run(
            cfg: Any, block: ClientBlock, state: State, inbox: Payload, key: Key
        ) -> tuple[State, Payload]:
            clients = BlockClients(cfg, block, key, declaration.others_in(state))
            before: Any = from_payload(declaration.before, state)
            new, reply = function(clients, before, from_payload(declaration.request, inbox))
            return {**clients.state, **to_payload(new)}, to_payload(reply)

        return as_op(run, function, declaration, declaration.own_fields)

    return declare


def as_op(
    run: Callable[..., tuple[State, Payload]],
    function: Callable[..., Any],
    declaration: OpDeclaration,
    read: Sequence[str],
    written: Sequence[str] = (),
) -> ClientOp[Any, Any]:
    """Return the op that runs a function, under that function's name.

    Args:
        run: what engines call.
        function: as the op is written.
        declaration: of its messages.
        read: how names of the fields of the state begin that it gets.
        written: how names of those begin that it writes to in place.
    """
    run.__name__ = run.__qualname__ = function.__name__
    run.__module__, run.__doc__ = function.__module__, function.__doc__
    run.__dict__["declaration"] = declaration
    reads(*read)(run)
    if written:
        overwrites(*written)(run)
    return cast(ClientOp[Any, Any], run)


def message_types(function: Callable[..., Any]) -> tuple[type, type, type, type]:
    """Return the classes of an op's state and request, and of its new state and reply."""
    hints = get_type_hints(function)
    returned = get_args(hints.pop("return", None))
    types = (*list(hints.values())[1:], *returned)
    if len(types) != 4 or not all(map(is_dataclass, types)):
        raise ConfigError(
            f"expected op {function.__name__}(clients: Clients[OPTIONS], state: STATE, request: "
            "REQUEST) -> tuple[STATE, REPLY], each a dataclass, got other annotations"
        )
    before, request, after, reply = types
    return before, request, after, reply


# --- The order of calls --------------------------------------------------------------------------


@dataclass(frozen=True)
class CallContext:
    """What a call depends on besides its op, for the server that makes it and in the program.

    Attributes:
        cfg: what the annotations of messages read: the method's config, or what a part of the
            library puts in its place.
        key: of the clients' draws.
        number: of the round.
        kind: of the calls; None: that of each op.
    """

    cfg: Any
    key: Key
    number: int = 0
    kind: Kind | None = None

    def kind_of(self, op: ClientOp[Any, Any]) -> Kind:
        """Return the kind of a call."""
        return op.declaration.kind if self.kind is None else self.kind

    def declare(self, op: ClientOp[Any, Any]) -> Call:
        """Return what both ends check of a call."""
        declared = op.declaration
        takes = specs_of(declared.request, self.cfg, self.number)
        gives = specs_of(declared.reply, self.cfg, self.number)
        return Call(op, self.kind_of(op), self.key, takes, gives, declared.find_problem(self.cfg))

    def call(
        self,
        fed: Federation,
        op: ClientOp[Request, Any],
        request: Request,
        *,
        reduce: Reduce | None = None,
    ) -> Payload:
        """Call an op at all clients, and return what `reduce` makes of the replies."""
        inbox, what = to_payload(request), self.kind_of(op)
        return fed.call(op, inbox, what=what, key=self.key, reduce=reduce)


class CallGroup(ABC):
    """Several calls, as a part of an order of calls."""

    @property
    @abstractmethod
    def parts(self) -> "tuple[Part, ...]":
        """The calls."""

    def steps(self, context: CallContext, *, only_answers: bool = False) -> tuple[Steps, ...]:
        """Return the program of a client; see `steps_of`."""
        return steps_of(self.parts, context, only_answers=only_answers)


class Exchange(CallGroup):
    """Calls that one call of the server's makes, in which rows go from clients to others."""

    @abstractmethod
    def carry(
        self,
        fed: Federation,
        request: Any,
        context: CallContext,
        *,
        to: Sequence[str] | None = None,
        allow_missing: bool = False,
    ) -> Any:
        """Make the calls.

        Args:
            fed: the federation.
            request: what all ops get besides rows.
            context: of the calls.
            to: clients that take part; None: all.
            allow_missing: whether to go on without clients that are away.
        """


Part = ClientOp[Any, Any] | CallGroup
Contexts = Callable[[CallContext], Iterable[CallContext]]
Function = TypeVar("Function", bound=Callable[..., Any])


@dataclass(frozen=True)
class Group(CallGroup):
    """Calls that are made again, or by some runs only.

    Attributes:
        calls: the calls.
        contexts: the contexts in which they are made, one after the other.
        at_most: how often they are made in each, by the config; None: once.
    """

    calls: tuple[Part, ...]
    contexts: Contexts = lambda context: (context,)
    at_most: Callable[[Any], int] | None = None

    @property
    def parts(self) -> tuple[Part, ...]:
        """The calls."""
        return self.calls

    def steps(self, context: CallContext, *, only_answers: bool = False) -> tuple[Steps, ...]:
        """Return the program of a client; see `steps_of`."""
        steps: list[Steps] = []
        for each in self.contexts(context):
            inner = steps_of(self.calls, each, only_answers=only_answers)
            if inner and self.at_most is not None:
                inner = (Repeat(inner, self.at_most(each.cfg)),)
            steps.extend(inner)
        return tuple(steps)


@dataclass(frozen=True)
class Anyone(CallGroup):
    """An op that clients run whether or not they take part in the round, if they are asked."""

    op: ClientOp[Any, Any]

    @property
    def parts(self) -> tuple[Part, ...]:
        """The op."""
        return (self.op,)

    def steps(self, context: CallContext, *, only_answers: bool = False) -> tuple[Steps, ...]:
        """Return the program of a client; see `steps_of`."""
        del only_answers
        return (Maybe(context.declare(self.op)),)


def anyone(part: ClientOp[Any, Any]) -> Anyone:
    """Return a call that clients answer whether or not they take part in the round."""
    return Anyone(part)


def repeat(*parts: Part, at_most: Callable[[Any], int]) -> Group:
    """Return calls that are made again, in an order of calls; `at_most`: by the method's config."""
    return Group(parts, at_most=at_most)


def when(condition: Callable[[Any], bool], *parts: Part) -> Group:
    """Return calls that only some runs make, by the method's config, in an order of calls."""
    return Group(parts, lambda context: (context,) if condition(context.cfg) else ())


def for_each(contexts: Contexts, *parts: Part) -> Group:
    """Return calls that are made once in each of several contexts, in an order of calls."""
    return Group(parts, contexts)


def calls(*parts: Part) -> Callable[[Function], Function]:
    """Declare which ops a round or a set-up calls, in order; silos refuse any other call.

    Raises:
        ConfigError: a part is no op.
    """
    for part in parts:
        if not isinstance(part, CallGroup) and not hasattr(part, "declaration"):
            raise ConfigError(
                f"expected ops that @op(KIND) has made, got {getattr(part, '__name__', part)}: see "
                "docs/methods.md"
            )

    def mark(function: Function) -> Function:
        function.__dict__["order"] = parts
        return function

    return mark


def order_of(function: Callable[..., Any]) -> tuple[Part, ...]:
    """Return the declared calls of a round or a set-up."""
    return cast("tuple[Part, ...]", function.__dict__.get("order", ()))


def steps_of(
    parts: Sequence[Part], context: CallContext, *, only_answers: bool = False
) -> tuple[Steps, ...]:
    """Return the program of a client.

    Args:
        parts: the declared calls.
        context: of these.
        only_answers: whether it takes no part, but answers those who ask for its rows.
    """
    steps: list[Steps] = []
    for part in parts:
        if isinstance(part, CallGroup):
            steps.extend(part.steps(context, only_answers=only_answers))
        elif not only_answers:
            steps.append(context.declare(part))
    return tuple(steps)


def ops_in(parts: Sequence[Part]) -> Iterator[ClientOp[Any, Any]]:
    """Yield the ops of an order of calls."""
    for part in parts:
        if isinstance(part, CallGroup):
            yield from ops_in(part.parts)
        else:
            yield part
