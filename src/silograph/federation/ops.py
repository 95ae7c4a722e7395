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
from functools import cached_property
from typing import Any, ClassVar, Generic, TypeVar, cast, get_args, get_origin, get_type_hints

from silograph.core.errors import ConfigError
from silograph.core.key import Key
from silograph.core.kinds import Kind
from silograph.core.payload import Payload, State
from silograph.federation.base import Federation, Reduce, overwrites, reads, replies_with
from silograph.federation.messages import (
    declared_fields,
    from_payload,
    specs_of,
    to_payload,
)
from silograph.federation.program import Call, Maybe, Repeat, Steps
from silograph.graph.block.block import ClientBlock

Before = TypeVar("Before")
After = TypeVar("After")
Request = TypeVar("Request")
Reply = TypeVar("Reply")
OwnClients = TypeVar("OwnClients", bound="Clients")
Step = Callable[[OwnClients, Before, Request], tuple[After, Reply]]
Problem = Callable[[Payload, Payload], str | None]

# --- Ops -----------------------------------------------------------------------------------------


@dataclass
class Clients:
    """The clients of a block, as an op sees them.

    An op gets the class that its first parameter is annotated with: this one in rooms below
    methods, whose `Clients` can train. `decode` and `encode` are called only for messages with
    `encoded` fields, in a run that does not send them as they are.

    Attributes:
        cfg: what all ops of the run read.
        block: their graphs.
        key: of the op's draws.
        state: what they keep besides the op's own state, as far as the op reads it; it stays.
    """

    LIBRARY: ClassVar[tuple[str, ...]] = ()  # how names of fields of `state` begin
    cfg: Any
    block: ClientBlock
    key: Key
    state: State

    @staticmethod
    def encoded(message: type) -> bool:
        """Whether a run may send fields of a message in another form, as `cfg.sent` says."""
        del message
        return False

    def decode(self, inbox: Payload) -> Payload:
        """Return what has come, as the request has it."""
        return inbox

    def encode(self, inbox: Payload, state: State, reply: Payload) -> tuple[State, Payload]:
        """Return the new state and the reply as it is sent."""
        del inbox
        return state, reply

    @staticmethod
    def reply_check(declared: "OpDeclaration", cfg: Any) -> Problem | None:
        """Return what finds a problem with a reply, besides its own class."""
        del declared, cfg
        nothing: Problem | None = None
        return nothing


@dataclass(frozen=True)
class OpDeclaration:
    """What an op takes and gives.

    Attributes:
        kind: content of its messages.
        clients: class of its first argument.
        before: class of the clients' state before it.
        request: class of the message to clients.
        after: class of their state after it.
        reply: class of the message to the server.
    """

    kind: Kind
    clients: type[Clients]
    before: type
    request: type
    after: type
    reply: type

    @cached_property
    def own_fields(self) -> tuple[str, ...]:
        """Names of the fields of its state, or how they begin."""
        classes = (self.before, self.after)
        return tuple(sorted({field.name for cls in classes for field in declared_fields(cls)}))

    @cached_property
    def own_prefixes(self) -> tuple[str, ...]:
        """How the names of the fields of its state begin, and of what these hold."""
        return tuple(f"{name}/" for name in self.own_fields)

    @cached_property
    def encodes_request(self) -> bool:
        """Whether a run may send fields of the request in another form."""
        return self.clients.encoded(self.request)

    @cached_property
    def encodes_reply(self) -> bool:
        """Whether a run may send fields of the reply in another form."""
        return self.clients.encoded(self.reply)

    def arguments(
        self, cfg: Any, block: ClientBlock, state: State, inbox: Payload, key: Key
    ) -> tuple[Any, Any, Any, Payload]:
        """Return the arguments of the op as it is written, and the inbox with whole fields."""
        own = self.own_prefixes
        others = {name: part for name, part in state.items() if not f"{name}/".startswith(own)}
        clients = self.clients(cfg, block, key, others)
        if self.encodes_request and not cfg.sent.plain:
            inbox = clients.decode(inbox)
        return clients, from_payload(self.before, state), from_payload(self.request, inbox), inbox

    def results(
        self, clients: Clients, state: Any, request: Any, inbox: Payload, after: Any, message: Any
    ) -> tuple[State, Payload]:
        """Return the clients' new state and the reply, from what the op has returned."""
        del state, request
        new, reply = {**clients.state, **to_payload(after)}, to_payload(message)
        if self.encodes_reply and not clients.cfg.sent.plain:
            return clients.encode(inbox, new, reply)
        return new, reply

    def find_problem(self, cfg: Any) -> Problem | None:
        """Return what finds numbers of a reply that contradict each other or the request."""
        compare = getattr(self.reply, "find_problem", None)
        check = self.clients.reply_check(self, cfg)
        if compare is None:
            return check

        def find(inbox: Payload, reply: Payload) -> str | None:
            request: Any = from_payload(self.request, inbox)
            problem: str | None = compare(from_payload(self.reply, reply), request, cfg)
            return check(inbox, reply) if problem is None and check is not None else problem

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
    *,
    replies: Kind | None = None,
    reads_library: bool = True,
    reads_only: Sequence[str] = (),
    writes: Sequence[str] = (),
    idle_without_rows: bool = False,
) -> Callable[[Step[OwnClients, Before, Request, After, Reply]], ClientOp[Request, Reply]]:
    """Declare a function (clients, state, request) -> (state, reply) as an op.

    It gets its own state and, in a method, what training needs, so calls to some clients copy no
    more.

    Args:
        kind: content of its messages.
        replies: content of the replies, if it is another.
        reads_library: whether it gets what training needs, besides its own state.
        reads_only: how names of the fields begin that it reads, if it is not even these.
        writes: how names of the fields begin that it writes to in place; all others stay.
        idle_without_rows: whether a client whose request has no rows would change nothing and send
            no rows; engines may then run a whole block for a call to some of its clients.

    Raises:
        ConfigError: its annotations do not say what its state, request and reply are.
    """

    def declare(
        function: Step[OwnClients, Before, Request, After, Reply],
    ) -> ClientOp[Request, Reply]:
        declared = _declaration_of(function, kind)

        def run(
            cfg: Any, block: ClientBlock, state: State, inbox: Payload, key: Key
        ) -> tuple[State, Payload]:
            arguments = declared.arguments(cfg, block, state, inbox, key)
            return declared.results(*arguments, *function(*arguments[:3]))

        run.__name__ = run.__qualname__ = function.__name__
        run.__module__, run.__doc__ = function.__module__, function.__doc__
        run.__dict__ |= {"declaration": declared, "written": function}
        library = declared.clients.LIBRARY if reads_library else ()
        reads(*(reads_only or (*declared.own_fields, *library)))(run)
        if writes:
            overwrites(*writes)(run)
        if replies is not None:
            replies_with(replies)(run)
        if idle_without_rows:
            run.__dict__["idle_without_rows"] = True
        return cast(ClientOp[Request, Reply], run)

    return declare


def _declaration_of(function: Callable[..., Any], kind: Kind) -> OpDeclaration:
    """Return what the annotations of an op say."""
    hints = get_type_hints(function)
    after, reply = get_args(hints.pop("return", None))[:2] or (None, None)
    clients, *messages = (*hints.values(), after, reply)
    clients = get_origin(clients) or clients
    are_messages = len(messages) == 4 and all(map(is_dataclass, messages))
    if not are_messages or not (isinstance(clients, type) and issubclass(clients, Clients)):
        raise ConfigError(
            f"expected op {function.__name__}(clients: Clients[OPTIONS], state: STATE, request: "
            "REQUEST) -> tuple[STATE, REPLY], each a dataclass, got other annotations"
        )
    return OpDeclaration(kind, clients, *messages)


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
        to: ids of the clients that are called; None: all.
        allow_missing: whether calls go on without clients that are away or fail.
    """

    cfg: Any
    key: Key
    number: int = 0
    kind: Kind | None = None
    to: Sequence[str] | None = None
    allow_missing: bool = False

    def kind_of(self, op: ClientOp[Any, Any]) -> Kind:
        """Return the kind of a call."""
        return op.declaration.kind if self.kind is None else self.kind

    def declare(self, op: ClientOp[Any, Any]) -> Call:
        """Return what both ends check of a call."""
        declared = op.declaration
        inbox_specs = specs_of(declared.request, self.cfg, self.number)
        reply_specs = specs_of(declared.reply, self.cfg, self.number)
        return Call(
            op,
            self.kind_of(op),
            self.key,
            inbox_specs,
            reply_specs,
            declared.find_problem(self.cfg),
        )

    def call(
        self,
        fed: Federation,
        op: ClientOp[Request, Any],
        request: Request,
        reduce: Reduce | None = None,
    ) -> Payload:
        """Call an op, and return what `reduce` makes of the replies."""
        inbox, what, allow_missing = to_payload(request), self.kind_of(op), self.allow_missing
        return fed.call(
            op,
            inbox,
            what=what,
            key=self.key,
            to=self.to,
            reduce=reduce,
            allow_missing=allow_missing,
        )


class CallGroup(ABC):
    """Several calls, as a part of an order of calls."""

    @abstractmethod
    def ops(self) -> Iterator[ClientOp[Any, Any]]:
        """Yield the ops, in order."""

    def steps(self, context: CallContext, *, only_answers: bool = False) -> tuple[Steps, ...]:
        """Return the program of a client; see `steps_of`."""
        return steps_of(tuple(self.ops()), context, only_answers=only_answers)


class Exchange(CallGroup):
    """Calls that one call of the server's makes, in which rows go from clients to others.

    It is a dataclass of the ops, in their order.
    """

    def ops(self) -> Iterator[ClientOp[Any, Any]]:
        """Yield the ops, in order."""
        return (op for op in vars(self).values() if op is not None)

    @abstractmethod
    def carry(self, fed: Federation, request: Any, context: CallContext) -> Any:
        """Make the calls; `request` is what all ops get besides rows."""


Part = ClientOp[Any, Any] | CallGroup
Contexts = Callable[[CallContext], Iterable[CallContext]]
Function = TypeVar("Function", bound=Callable[..., Any])


@dataclass(frozen=True)
class Group(CallGroup):
    """Calls that are made again, or by some runs only.

    Attributes:
        parts: the calls.
        contexts: the contexts in which they are made, one after the other.
        at_most: how often they are made in each, by the config; None: once.
    """

    parts: tuple[Part, ...]
    contexts: Contexts = lambda context: (context,)
    at_most: Callable[[Any], int] | None = None

    def ops(self) -> Iterator[ClientOp[Any, Any]]:
        """Yield the ops, in order."""
        return ops_in(self.parts)

    def steps(self, context: CallContext, *, only_answers: bool = False) -> tuple[Steps, ...]:
        """Return the program of a client; see `steps_of`."""
        steps: list[Steps] = []
        for each in self.contexts(context):
            inner = steps_of(self.parts, each, only_answers=only_answers)
            if inner and self.at_most is not None:
                inner = (Repeat(inner, self.at_most(each.cfg)),)
            steps.extend(inner)
        return tuple(steps)


@dataclass(frozen=True)
class Anyone(CallGroup):
    """An op that clients run whether or not they take part in the round, if they are asked."""

    op: ClientOp[Any, Any]

    def ops(self) -> Iterator[ClientOp[Any, Any]]:
        """Yield the op."""
        yield self.op

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
                "docs/reference/method_interface.md"
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
            yield from part.ops()
        else:
            yield part
