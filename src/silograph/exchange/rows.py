"""Rows across clients: the only ways in which what belongs to single nodes may leave a client.

`relay_sum` carries sums over neighbors to the nodes' owners, `pull` (in a module of its own)
fetches boundary rows into halo slots, `Broadcast` shows all rows to all, `publish` one client's
rows to the others. The server forwards by `Route` and adds in client order; it never learns a
node's name, only its place among its owner's boundary rows.

C: clients. S: halo slots. B: boundary rows. k: rows of a reply. D: width.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import torch
from torch import Tensor

from silograph.core.errors import DataError, ProtocolError
from silograph.core.key import Key
from silograph.core.kinds import Kind
from silograph.core.payload import Field, Payload, Ragged, Shared, Stacked, offsets, owners
from silograph.federation.base import Federation, Op, Sum, positions_of
from silograph.federation.field_specs import (
    BOUNDARY,
    COUNT,
    SLOTS,
    FieldSpec,
)
from silograph.federation.messages import Empty, to_payload
from silograph.federation.ops import CallContext, ClientOp, Clients, Exchange, op
from silograph.federation.program import Call, Either, Maybe, Repeat, Steps
from silograph.nn.segment import can_sum_row_runs, sum_row_runs

# --- places --------------------------------------------------------------------------------------
# Places of rows: how clients count their slots and boundary rows, and how the federation does.
#
# C: clients. k: places.


def ragged_field(reply: Payload, name: str, op: Op) -> Ragged:
    """Return the field of a reply that has rows; raise `ProtocolError` where there is none."""
    rows = reply.get(name)
    if not isinstance(rows, Ragged):
        raise ProtocolError(
            f"expected a Ragged field {name!r} in the reply of {op.__name__}, got {sorted(reply)}"
        )
    return rows


def all_places(off: Tensor, members: Tensor) -> Tensor:
    """Return the places of all that belongs to the clients `members`, ascending."""
    if len(members) == len(off) - 1:
        return torch.arange(int(off[-1]))
    keep = torch.zeros(len(off) - 1, dtype=torch.bool)
    keep[members] = True
    return keep[owners(off)].nonzero()[:, 0]


def places_in(field: Ragged, off: Tensor, members: Tensor, op: Op) -> Tensor:
    """Return the places (k,) int64, as the federation counts, that clients name as they count."""
    own, client = field.t.long().cpu(), members[owners(field.off.cpu())]
    if len(own) and not bool(((own >= 0) & (own < off.diff()[client])).all()):
        raise ProtocolError(f"expected slots that exist from {op.__name__}, got others")
    return off[client] + own


def by_owner(places: Tensor, off: Tensor, members: Tensor) -> tuple[Tensor, Tensor]:
    """Return the places (k,) int32 as their owners count, and (C + 1,) how many each has."""
    owner = torch.searchsorted(off, places, right=True) - 1
    # A client without places has the offset of the next one, so the last match is the owner.
    runs = torch.bincount(owner, minlength=len(off) - 1)[members]
    return (places - off[owner]).int(), offsets(runs)


MOST_TURNS = 10_000  # clients that publish


@dataclass(frozen=True)
class Relayed:
    """Counts of rows and sums that `relay_sum` carried, and held back for too few contributors.

    Attributes:
        sent: rows that clients sent.
        left_out: rows that clients left out.
        withheld: sums that the server did not send on.
    """

    sent: int = 0
    left_out: int = 0
    withheld: int = 0

    def __add__(self, other: "Relayed") -> "Relayed":
        """Return the counts of both."""
        return Relayed(
            self.sent + other.sent,
            self.left_out + other.left_out,
            self.withheld + other.withheld,
        )


def relay_sum(
    fed: Federation,
    send: Op,
    receive: Op,
    *,
    what: Kind,
    key: Key,
    inbox: Mapping[str, Shared] | None = None,
    to: Sequence[str] | None = None,
    silos: int = 1,
    masked: bool = False,
    allow_missing: bool = False,
) -> Relayed:
    """Add up partial sums of boundary rows over clients, and send them to the rows' owners.

    Args:
        fed: the federation.
        send: replies `rows` (k, D), one for each of its slots in their order, or for those
            slots that it names in `slot` (k,) int32; may count in `left_out` (C,) int64 the
            rows that it does not send.
        receive: gets `sum` (k, D) and `row` (k,) int32, the places among its boundary rows,
            ascending; `row` is left out if contributors named no slots, `silos` is 1 and rows are
            not masked: then all rows have a sum.
        what: kind of the rows.
        key: key of the ops' draws.
        inbox: what both ops get besides.
        to: clients that take part; sums for others are dropped.
        silos: how many clients must have sent a row for a sum to be handed on.
        masked: whether rows are masked, so that a sum needs the rows of all contributors.
        allow_missing: whether to continue without clients that are away.
    """
    full_inbox: dict[str, Field] = dict(inbox or {})
    reply = fed.call(
        send, full_inbox, what=what, key=key, to=to, rows=True, allow_missing=allow_missing
    )
    if not reply:  # all have gone
        return Relayed()
    plan = _plan_of(fed, reply, send, to, silos, masked=masked, allow_missing=allow_missing)
    values = ragged_field(reply, "rows", send).t
    sent = len(values)
    if sent != plan.num_rows:
        raise ProtocolError(
            f"expected a row for each slot from {send.__name__}, got {sent} rows for "
            f"{plan.num_rows} slots"
        )
    if plan.is_added is not None:
        values = values[plan.is_added.to(values.device)]
    # One row after the other, in client order: a sum has the same bits on every engine.
    if can_sum_row_runs(values):
        total = sum_row_runs(values, plan.order, plan.starts)
    else:
        total = values.new_zeros(int(plan.off[-1]), values.shape[1])
        total.index_add_(0, plan.place.to(values.device), values)
    if plan.row is not None:
        full_inbox["row"] = plan.row
    full_inbox["sum"] = Ragged(total, plan.off)
    fed.call(receive, full_inbox, what=what, key=key, to=to, allow_missing=allow_missing)
    left_out = int(reply["left_out"].t.sum()) if "left_out" in reply else 0
    return Relayed(sent, left_out, plan.withheld)


@dataclass(frozen=True, eq=False)
class _SumPlan:
    """Which rows of clients are added up to which of m sums.

    Attributes:
        slots: that the clients have named; None: there is a row for each slot.
        num_rows: k, how many rows there must be.
        is_added: (k,) bool which of them are added; None: all are.
        place: (a,) int64 number of the sum that each added row belongs to.
        order: (a,) int64 places of the added rows, sorted by their sums.
        starts: (m + 1,) int64 where the rows of each sum begin in `order`.
        row: (m,) int32 boundary rows of the sums, as their owners count; None: all have a sum.
        off: (members + 1,) int64 sums of each client that takes part.
        withheld: number of sums that are not sent, as too few clients contribute.
    """

    slots: Ragged | None
    num_rows: int
    is_added: Tensor | None
    place: Tensor
    order: Tensor
    starts: Tensor
    row: Ragged | None
    off: Tensor
    withheld: int


def _plan_of(
    fed: Federation,
    reply: Payload,
    send: Op,
    to: Sequence[str] | None,
    silos: int,
    *,
    masked: bool,
    allow_missing: bool,
) -> _SumPlan:
    """Return how the rows in the clients' replies are added up; arguments are those of `relay_sum`.

    The latest plan is cached on the route, as all relays of a step name the same slots. Plans for
    some of the clients are not cached.
    """
    slots = ragged_field(reply, "slot", send) if "slot" in reply else None
    name, memo = ("sums", slots is None, silos, masked), fed.route.memo
    is_cached = to is None and not allow_missing
    latest = memo.get(name) if is_cached else None
    if isinstance(latest, _SumPlan) and (
        slots is None or (latest.slots is not None and slots.is_equal(latest.slots))
    ):
        return latest
    # 1. The boundary row that each row of the replies belongs to.
    route, members = fed.route, positions_of(fed.ids, to)
    if slots is not None:
        places = places_in(slots, route.slot_off, members, send)
    else:
        present = members
        if allow_missing:
            present = members[[fed.ids[p] not in fed.away for p in members.tolist()]]
        places = all_places(route.slot_off, present)
    target, own_rows = route.target[places], all_places(route.boundary_off, members)
    # 2. The boundary rows that get a sum: those of members, of enough silos, and of all if masked.
    is_added = torch.isin(target, own_rows) if to is not None else None
    used = target if is_added is None else target[is_added]
    summed_rows, withheld = own_rows if slots is None else torch.unique(used), 0
    if silos > 1:
        summed_rows, num_silos = torch.unique(used, return_counts=True)
        withheld, summed_rows = int((num_silos < silos).sum()), summed_rows[num_silos >= silos]
    if masked and allow_missing:
        present, num_rows = torch.unique(used[torch.isin(used, summed_rows)], return_counts=True)
        summed_rows = present[num_rows == torch.bincount(route.target)[present]]
    if silos > 1 or (masked and allow_missing):
        is_added = torch.isin(target, summed_rows)
        used = target[is_added]
    # 3. The sums by owner, and the rows of each sum.
    row, off = None, offsets(route.boundary_off.diff()[members])
    if slots is not None or silos > 1 or masked:
        places, off = by_owner(summed_rows, route.boundary_off, members)
        row = Ragged(places, off)
    place = torch.searchsorted(summed_rows, used)
    order = place.sort(stable=True).indices
    starts = offsets(torch.bincount(place, minlength=len(summed_rows)))
    plan = _SumPlan(slots, len(target), is_added, place, order, starts, row, off, withheld)
    if is_cached:
        memo[name] = plan
    return plan


@dataclass(frozen=True)
class SumRelay(Exchange):
    """Partial sums of boundary rows, for which enough clients must have sent a row.

    The ops get the request besides the fields that `relay_sum` describes. The config of the context
    has `row_minimum`, the least numbers of nodes and silos that must contribute to a row.

    Attributes:
        send: sends partial sums.
        receive: gets the sums of these.
    """

    send: ClientOp[Any, Any]
    receive: ClientOp[Any, Any]

    def carry(self, fed: Federation, request: Any, context: CallContext) -> Relayed:
        """Add up partial sums, and send them to the rows' owners."""
        return relay_sum(
            fed,
            self.send,
            self.receive,
            what=context.kind_of(self.send),
            key=context.key,
            inbox=to_payload(request),
            to=context.to,
            silos=context.cfg.row_minimum.silos,
            masked=context.cfg.row_minimum.rows_are_masked,
            allow_missing=context.allow_missing,
        )


@dataclass(frozen=True)
class Broadcast(Exchange):
    """All rows of all clients, to all.

    Attributes:
        send: replies `rows` (k, D).
        take: gets `all` (K, D), the rows of all clients in client order.
    """

    send: ClientOp[Any, Any]
    take: ClientOp[Any, Any]

    def carry(self, fed: Federation, request: Any, context: CallContext) -> None:
        """Send all rows to all clients; the ops get the request besides them."""
        what, inbox = context.kind_of(self.send), to_payload(request)
        reply = fed.call(self.send, inbox, what=what, key=context.key, rows=True)
        inbox["all"] = Shared(ragged_field(reply, "rows", self.send).t)
        fed.call(self.take, inbox, what=what, key=context.key)


def publish(
    fed: Federation,
    send: Op,
    answer: Op,
    take: Op,
    *,
    what: Kind,
    key: Key,
    to: Sequence[str] | None = None,
    back: Kind | None = None,
) -> None:
    """Send the reply of each client to all others, and return the sum of their answers to it.

    One client after the other: calls grow with the number of clients, bytes with its square.

    Args:
        fed: the federation.
        send: replies anything, rows included.
        answer: gets that, shared; replies `Stacked` fields.
        take: gets the sums of the answers.
        what: kind of what is sent.
        key: key of the ops' draws.
        to: clients that take part; all by default.
        back: kind of the answers, with what they answer; the same by default.
    """
    members = [fed.ids[p] for p in positions_of(fed.ids, to).tolist()]
    if len(members) == 1:
        return
    for name in members:
        published = fed.call(send, {}, what=what, key=key, to=[name], rows=True)
        inbox = {field: Shared(_whole(part)) for field, part in published.items()}
        others = [other for other in members if other != name]
        kind = back or what
        total = fed.call(answer, inbox, what=kind, key=key, to=others, reduce=Sum())
        own = {field: Stacked(part.t[None]) for field, part in total.items()}
        fed.call(take, own, what=kind, key=key, to=[name])


@dataclass(frozen=True)
class Publish(Exchange):
    """The reply of each client to all others, and the sum of their answers to it; see `publish`.

    Attributes:
        send: replies anything, rows included.
        answer: gets that, shared; replies `Stacked` fields.
        take: gets the sums of the answers.
    """

    send: ClientOp[Any, Any]
    answer: ClientOp[Any, Any]
    take: ClientOp[Any, Any]

    def steps(self, context: CallContext, *, only_answers: bool = False) -> tuple[Steps, ...]:
        """Return the calls: a silo answers others, and publishes once among them.

        The server makes all of a turn's calls, a silo either its own or an answer. It does not know
        how many others there are, so that is `MOST_TURNS` times at most.
        """
        send, other, take = (context.declare(part) for part in self.ops())
        return (
            () if only_answers else (Repeat(Either(other, (send, Maybe(other), take)), MOST_TURNS),)
        )

    def carry(self, fed: Federation, request: Any, context: CallContext) -> None:
        """Send the reply of each client to all others, one client after the other."""
        del request  # what is shown is all that others get
        what, back = context.kind_of(self.send), context.kind_of(self.answer)
        publish(fed, *self.ops(), what=what, key=context.key, to=context.to, back=back)


def learn_rows(fed: Federation, name_rows: Op, *, key: Key) -> Ragged:
    """Return which rows of a tensor clients use, (k,) numbers with a run for every client.

    It shows the server what occurs at a client: features, for first weights. See
    `silograph.federation.decoder` for what it is good for.

    Args:
        fed: the federation.
        name_rows: replies `used` (k,) int32, ascending, and keeps them in its state.
        key: key of the op's draws.
    """
    reply = fed.call(name_rows, {}, what=Kind.STATISTICS, key=key, rows=True)
    return ragged_field(reply, "used", name_rows)


def learn_rows_steps(name_rows: Op, *, key: Key, size: int) -> Steps:
    """Return the calls of `learn_rows`; `size` is the number of rows that the tensor has."""
    return Call(name_rows, Kind.STATISTICS, key, {}, {"used": row_numbers(size)})


def row_numbers(size: int) -> FieldSpec:
    """Return the spec of row numbers (k,) int32 of a tensor with this number of rows."""
    return FieldSpec(Ragged, (), torch.int32, low=0, high=size - 1, ascending=True)


def _whole(field: Field) -> Tensor:
    """Return what one client sent: its slice, or all its rows."""
    return field.t if isinstance(field, Ragged) else field.t[0]


# --- Before training: both owners of every cross-client edge must know of it ---------------------


@dataclass(frozen=True)
class EdgesToSlots:
    """Number of own edges to each halo slot, (S, 1)."""

    rows: Annotated[Ragged, FieldSpec(Ragged, (1,), torch.int64, rows=SLOTS)]


@dataclass(frozen=True)
class EdgesOfOthers:
    """Number of edges to each boundary row that other clients know, (B, 1)."""

    sum: Annotated[Ragged, FieldSpec(Ragged, (1,), torch.int64, rows=BOUNDARY)]


@dataclass(frozen=True)
class Disagreement:
    """Number of boundary rows whose owner knows of another number of edges, (C,)."""

    wrong: Annotated[Stacked, COUNT]


@op(Kind.HALO_KEYS)
def tell_edges(clients: Clients, state: Empty, _: Empty) -> tuple[Empty, EdgesToSlots]:
    """Count the own edges to every halo slot."""
    halo = clients.block.halo
    counts = torch.bincount(halo.adj.indices.long(), minlength=halo.adj.num_cols)
    return state, EdgesToSlots(Ragged(counts[:, None], halo.off))


@op(Kind.HALO_KEYS)
def compare_edges(
    clients: Clients, _state: Empty, request: EdgesOfOthers
) -> tuple[Disagreement, Empty]:
    """Compare with the own edges."""
    block = clients.block
    reported_degree = torch.zeros(len(block.row_key), dtype=torch.int64, device=block.off.device)
    reported_degree[block.halo.boundary] = request.sum.t[:, 0]
    wrong = block.count(reported_degree != block.halo.adj.degree)
    return Disagreement(Stacked(wrong)), Empty()


@op(Kind.CONTROL)
def tell_disagreement(
    _clients: Clients, state: Disagreement, _: Empty
) -> tuple[Empty, Disagreement]:
    """Tell how many rows differ."""
    return Empty(), state


AGREEMENT = tell_edges, compare_edges, tell_disagreement


def agree_on_edges(fed: Federation, key: Key, *, summed: bool = False) -> None:
    """Check that as many cross-client edges end at each boundary row as its owner knows.

    Args:
        fed: the federation.
        key: of the calls; nothing is drawn.
        summed: whether the server learns sums over clients only.

    Raises:
        DataError: a client whose neighbors do not agree.
    """
    relay_sum(fed, tell_edges, compare_edges, what=Kind.HALO_KEYS, key=key)
    reduce = Sum() if summed else None
    reply = CallContext(None, key).call(fed, tell_disagreement, Empty(), reduce)
    counts = {"all clients": int(reply["wrong"].t)} if summed else {}
    counts = counts or dict(zip(fed.ids, reply["wrong"].t.tolist(), strict=True))
    for name, count in counts.items():
        if count:
            raise DataError(
                f"expected both owners of a cross-client edge to know of it, got {count} nodes of "
                f"{name} with other numbers of edges than their neighbors say: list each edge at "
                "both owners; clients that hold copies of a node cannot be trained as one"
            )
