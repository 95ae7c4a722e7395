"""Pull: boundary rows are fetched into the halo slots that want them.

Clients name slots (`ask`), the server forwards the request to the rows' owners by `Route` and the
rows back, each row once from its owner however many clients want it. A `PullForm` says what else a
pull carries; each part of it adds fields to the messages and changes nothing of the others:

    fields      several fields of a row come together, such as whole numbers and their scale
    some        owners may be others than who asks; they get a call only if rows are wanted of them
    keep        rows may be missing: their owner is away, may not be asked, or does not have them
    since       a row comes only if it has changed since the version that the requester has

C: clients. A: clients that ask. k: slots that are asked for. W: boundary rows that are wanted.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Generic, Literal, TypeVar

import torch
from torch import Tensor

from silograph.core.errors import ProtocolError
from silograph.core.key import Key
from silograph.core.kinds import Kind
from silograph.core.payload import (
    Field,
    Payload,
    Ragged,
    Shared,
    Stacked,
    offsets,
    owners,
)
from silograph.exchange.pass_state import PassState
from silograph.exchange.passes import divisible, finish, inputs_of, with_product
from silograph.exchange.rows import all_places, by_owner, places_in, ragged_field
from silograph.federation.base import Federation, Op, positions_of
from silograph.federation.decoder import LARGEST, as_bytes, from_small
from silograph.federation.field_specs import BOUNDARY, NODES, SLOTS, FieldSpec, FieldSpecs, places
from silograph.federation.messages import (
    Empty,
    SpecsByConfig,
    from_payload,
    specs_of,
    to_payload,
)
from silograph.federation.ops import CallContext, ClientOp, Clients, Exchange, op
from silograph.graph.block.block import ClientBlock
from silograph.nn.fit import check_places, dtype_of
from silograph.nn.forward import AnyModel, Staged
from silograph.nn.model import before
from silograph.nn.reach import with_own_degrees
from silograph.nn.segment import segment_sum, sparse_product
from silograph.nn.stored_rows import StoredRows, stored_stages, surroundings, to_send

Stored = TypeVar("Stored")
Request = TypeVar("Request")
NO_VERSION = -1  # of a row that a requester does not have
LATER = "later versions of changed rows, got those that were asked for or earlier ones"


@dataclass(frozen=True)
class PullForm:
    """The form of the messages of a pull.

    Attributes:
        fields: what a row has, by name; the number of rows in their specs is filled in.
        missing: `fail`: every row that is asked for must come. `keep`: a row may be missing, and
            the requester hears which ones are.
        since: whether requesters say which version of a row they have.
        some: whether clients that do not ask may answer, and only owners of wanted rows are called.
        requested: the state field (k,) in which requesters keep the slots that they ask for. Silos
            then take rows for exactly these; without it, for as many as they have slots.
    """

    fields: FieldSpecs = field(default_factory=lambda: {"rows": FieldSpec(Ragged)})
    missing: Literal["fail", "keep"] = "fail"
    since: bool = False
    some: bool = False
    requested: str = ""


PLAIN = PullForm()


@dataclass(frozen=True, eq=False)
class _PullCall:
    """The arguments that all three calls of a pull have in common."""

    fed: Federation
    what: Kind
    key: Key
    common_inbox: Mapping[str, Field]
    form: PullForm

    @property
    def has_missing_rows(self) -> bool:
        """Whether the pull goes on without clients that are away."""
        return self.form.missing == "keep"

    def make(
        self, op: Op, inbox: Payload, to: Sequence[str] | None, what: Kind, *, rows: bool = False
    ) -> Payload:
        """Call an op; `rows`: whether its replies have rows."""
        full_inbox, missing = {**self.common_inbox, **inbox}, self.has_missing_rows
        return self.fed.call(
            op, full_inbox, what=what, key=self.key, to=to, rows=rows, allow_missing=missing
        )


@dataclass(frozen=True, eq=False)
class _Request:
    """The slots that clients ask for.

    Attributes:
        target: (k,) int64 boundary row of each slot.
        off: (A + 1,) int64 slots of each client that asks.
        since: (k,) int32 version that it has; None without `since`.
    """

    target: Tensor
    off: Tensor
    since: Tensor | None


@dataclass(frozen=True, eq=False)
class _OwnersReply:
    """The replies of the owners.

    Attributes:
        rows: (W,) int64 boundary rows that are asked for, ascending.
        answered: (W,) bool, whether the owner has the row.
        is_sent: (W,) bool, whether its fields were sent.
        version: (W,) int32 of the rows that were sent; None without `since`.
        fields: by name, one row for each that was sent.
    """

    rows: Tensor
    answered: Tensor
    is_sent: Tensor
    version: Tensor | None
    fields: Mapping[str, Tensor]


def pull(
    fed: Federation,
    ask: Op | None,
    serve: Op,
    store: Op,
    *,
    what: Kind,
    key: Key,
    inbox: Mapping[str, Shared] | None = None,
    to: Sequence[str] | None = None,
    owners: Sequence[str] | None = None,
    form: PullForm = PLAIN,
) -> None:
    """Fetch boundary rows into the halo slots that want them.

    Args:
        fed: the federation.
        ask: replies `slot` (k,) int32, the slots it wants, and with `since` the `version` (k,)
            int32 that it has of each, `NO_VERSION` if none; None: every slot is wanted.
        serve: gets `row` (k,) int32, the boundary rows that are wanted, ascending, each once, or
            nothing if all are; with `since` also `since` (k,) int32, the version that all
            requesters have, `NO_VERSION` where they differ. Replies the fields, (k, D) each. With
            `keep` it replies `answered` (k,) bool, the rows that it has; with `since` for each of
            those `changed` bool, whether it is later than `since`, and `version` of the changed
            ones. Fields hold these rows only.
        store: gets the fields in the order in which it asked; with `keep` `answered` (k,) bool, and
            with `since` for each answered slot `changed`, and `version` of the changed ones. It
            is not called where no owner answers at all.
        what: kind of the rows; places are of kind `halo_keys`.
        key: key of the ops' draws.
        inbox: what all ops get besides.
        to: clients that ask.
        owners: who may answer if `some` may; None is everybody. Else it is those that ask.
        form: what the messages hold.

    Raises:
        ProtocolError: a row that is missing where it must not be, or a reply of another form.
    """
    if form.since and ask is None:
        raise ProtocolError("expected clients that ask in a pull of changed rows, got none")
    call = _PullCall(fed, what, key, dict(inbox or {}), form)
    if call.has_missing_rows:
        to = [name for name in (fed.ids if to is None else to) if name not in fed.away]
        if not to:
            return
    slots = None if ask is None else call.make(ask, {}, to, Kind.HALO_KEYS, rows=True)
    fields = _fetch(call, ask, slots, serve, to, owners)
    if fields is not None:
        call.make(store, fields, to, what)


def fetch_rows(
    fed: Federation,
    slots: Payload,
    serve: Op,
    *,
    what: Kind,
    key: Key,
    inbox: Mapping[str, Shared],
    to: Sequence[str] | None,
    form: PullForm,
    dtype: torch.dtype,
) -> dict[str, Field]:
    """Fetch the rows that clients have named in a reply, and return the fields for each of them.

    It is `pull` without its first and last call: clients name slots, and get rows, in calls that do
    something else as well.

    Args:
        fed: the federation.
        slots: the reply, `slot` (k,) int32 and maybe `version`; empty if nobody answered.
        serve: see `pull`.
        what: kind of the call of `serve`.
        key: key of its draws.
        inbox: what it gets besides.
        to: clients that have replied.
        form: what the messages hold.
        dtype: of floating point values in the run.
    """
    call = _PullCall(fed, what, key, dict(inbox), form)
    fields = _fetch(call, serve, slots, serve, to, None)
    if fields is not None:
        return fields
    # No owner has answered: no slot gets a row.
    no_rows = torch.zeros(len(positions_of(fed.ids, to)) + 1, dtype=torch.int64)
    off = ragged_field(slots, "slot", serve).off if slots else no_rows
    nothing: dict[str, Field] = {
        name: Ragged(
            torch.zeros(0, *(n or 0 for n in spec.shape), dtype=spec.dtype or dtype), no_rows
        )
        for name, spec in _reply_specs(form, "").items()
    }
    return nothing | {"answered": Ragged(torch.zeros(int(off[-1]), dtype=torch.bool), off)}


def _fetch(
    call: _PullCall,
    ask: Op | None,
    slots: Payload | None,
    serve: Op,
    to: Sequence[str] | None,
    owners: Sequence[str] | None,
) -> dict[str, Field] | None:
    """Return the fields of rows for who wants them, None if no owner has answered.

    The arguments are those of `pull`; `slots`: the replies of `ask`.
    """
    fed, form = call.fed, call.form
    # All rows go to all slots: it is known beforehand who wants which, and nobody may be away.
    is_plain = form.missing == "fail" and not form.since and not form.some
    if ask is None and is_plain and to in (None, fed.ids):
        return _fetch_all(call, serve)
    requesters = positions_of(fed.ids, to)
    request = (
        _all_slots(fed, requesters)
        if ask is None or slots is None
        else _read_requests(fed, form, ask, slots, requesters)
    )
    allowed = positions_of(fed.ids, owners) if form.some else requesters
    owner = torch.searchsorted(fed.route.boundary_off, request.target, right=True) - 1
    is_allowed = torch.ones(len(owner), dtype=torch.bool)
    if len(allowed) < len(fed.ids):
        is_allowed = torch.isin(owner, allowed)
    if not call.has_missing_rows and not bool(is_allowed.all()):
        raise ProtocolError("expected slots of clients that take part, got some of others")
    called_owners = torch.unique(owner[is_allowed]) if form.some else requesters
    wanted = torch.unique(request.target[is_allowed])
    if ask is None and not form.some:
        wanted = all_places(fed.route.boundary_off, requesters)
    if not len(called_owners):
        return None
    owners_reply = _call_owners(
        call, serve, request, wanted, called_owners, is_named=ask is not None or form.some
    )
    return None if owners_reply is None else _reply_to_requesters(call, request, owners_reply)


def _fetch_all(call: _PullCall, serve: Op) -> dict[str, Field] | None:
    """Return the fields of all boundary rows for all slots; None if no owner has answered."""
    fed, route = call.fed, call.fed.route
    reply = call.make(serve, {}, None, call.what, rows=True)
    if not reply:
        return None
    members, runs = positions_of(fed.ids, None), route.boundary_off.diff()
    fields = {n: _rows_of_members(fed, reply, n, serve, members, runs).t for n in call.form.fields}
    return {
        name: Ragged(t.index_select(0, route.target.to(t.device)), route.slot_off)
        for name, t in fields.items()
    }


@dataclass(frozen=True)
class Slots:
    """Halo slots (k,) int32 whose rows a client wants, ascending."""

    slot: Annotated[Ragged, places(SLOTS)]


@dataclass(frozen=True)
class BoundaryRows:
    """Boundary rows (k,) int32 that others want, ascending."""

    row: Annotated[Ragged, places(BOUNDARY)]

    def rows(self, block: ClientBlock) -> Tensor:
        """Return their numbers (k,) int64 in a block."""
        place = check_places(self.row, block.halo.boundary_off, "boundary rows")
        return block.halo.boundary[place]


def pull_form(answer: ClientOp[Any, Any], cfg: Any, *, some: bool) -> PullForm:
    """Return what the messages of a pull hold, by the reply of those who answer."""
    rows = specs_of(answer.declaration.reply, cfg)
    marks = {n for n in ("answered", "changed", "version") if rows.pop(n, None) is not None}
    missing: Literal["fail", "keep"] = "keep" if "answered" in marks else "fail"
    return PullForm(rows, missing, since="changed" in marks, some=some)


@dataclass(frozen=True)
class Fetch(Exchange, Generic[Request]):
    """Rows of neighbors in other clients: some ask, the owners answer, and who asked stores.

    All three ops get the request besides the fields that `pull` describes: a reply with `slot` and
    maybe `version`; a request with `row` and maybe `since`, a reply with the rows, and maybe
    `answered`, `changed` and `version`; and what came of these.

    Attributes:
        ask: names the slots; None: all are wanted.
        answer: sends rows.
        store: takes what came.
    """

    ask: ClientOp[Request, Any] | None
    answer: ClientOp[Any, Any]
    store: ClientOp[Any, Any]

    def carry(self, fed: Federation, request: Request, context: CallContext) -> None:
        """Fetch rows for clients; the form of the messages says whether they may be missing."""
        pull(
            fed,
            *(self.ask, self.answer, self.store),
            what=context.kind_of(self.answer),
            key=context.key,
            inbox=to_payload(request),
            to=context.to,
            form=pull_form(self.answer, context.cfg, some=False),
        )


@dataclass(frozen=True, eq=False)
class WantedRows:
    """Boundary rows that clients have asked for, all of them at once.

    Attributes:
        request: the slots that clients ask for.
        rows: (W,) int64 boundary rows, ascending, each once.
        by_owner: (W,) int32 the same as their owners count them.
    """

    request: _Request
    rows: Tensor
    by_owner: Ragged


def wanted_rows(fed: Federation, slots: Payload, ask: Op) -> WantedRows:
    """Return the rows that belong to slots (k,) int32, which all clients have named in `ask`."""
    members = positions_of(fed.ids, None)
    request = _read_requests(fed, PLAIN, ask, slots, members)
    rows = torch.unique(request.target)
    return WantedRows(request, rows, Ragged(*by_owner(rows, fed.route.boundary_off, members)))


def rows_for_slots(fed: Federation, wanted: WantedRows, sent: Payload, send: Op) -> Ragged:
    """Return the rows (k, D) of all slots, from those (W, D) that their owners sent in `send`."""
    runs = wanted.by_owner.off.diff()
    rows = _rows_of_members(fed, sent, "rows", send, positions_of(fed.ids, None), runs).t
    place = torch.searchsorted(wanted.rows, wanted.request.target)
    return Ragged(rows.index_select(0, place.to(rows.device)), wanted.request.off)


def _all_slots(fed: Federation, requesters: Tensor) -> _Request:
    """Return the request for all slots of the clients at `requesters`."""
    route = fed.route
    slots = all_places(route.slot_off, requesters)
    return _Request(route.target[slots], offsets(route.slot_off.diff()[requesters]), None)


def _read_requests(
    fed: Federation, form: PullForm, ask: Op, reply: Payload, requesters: Tensor
) -> _Request:
    """Return which rows the clients want, by their replies to `ask`."""
    if not reply:  # all have gone
        no_slots = torch.zeros(0, dtype=torch.int64)
        return _Request(no_slots, torch.zeros(len(requesters) + 1, dtype=torch.int64), None)
    route = fed.route
    slot_names = ragged_field(reply, "slot", ask)
    slots = places_in(slot_names, route.slot_off, requesters, ask)
    off, since = slot_names.off.cpu(), None
    if form.since:
        runs = off.diff()
        since = _rows_of_members(fed, reply, "version", ask, requesters, runs).t.cpu()
    return _Request(route.target[slots], off, since)


def _call_owners(
    call: _PullCall,
    serve: Op,
    slot_request: _Request,
    wanted: Tensor,
    called_owners: Tensor,
    *,
    is_named: bool,
) -> _OwnersReply | None:
    """Call the owners of the rows `wanted` (W,); return None if none answered."""
    fed, form = call.fed, call.form
    row, off = by_owner(wanted, fed.route.boundary_off, called_owners)
    request: dict[str, Field] = {"row": Ragged(row, off)} if is_named else {}
    common_version = None if slot_request.since is None else _common_versions(slot_request, wanted)
    if common_version is not None:
        request["since"] = Ragged(common_version, off)
    names = [fed.ids[p] for p in called_owners.tolist()]
    reply = call.make(serve, request, names, call.what, rows=True)
    if not reply:
        return None
    member = owners(off)
    answered = torch.ones(len(member), dtype=torch.bool)
    if call.has_missing_rows and fed.away:
        answered = torch.tensor([name not in fed.away for name in names])[member]

    def read(name: str, mask: Tensor) -> Tensor:
        """Return a field that has something for each row in the mask (W,)."""
        runs = torch.bincount(member[mask], minlength=len(called_owners))
        return _rows_of_members(fed, reply, name, serve, called_owners, runs).t

    if form.missing == "keep":
        answered = answered.masked_scatter(answered, read("answered", answered).cpu())
    is_sent, version = answered, None
    if common_version is not None:
        is_sent = answered.masked_scatter(answered, read("changed", answered).cpu())
        version = common_version.masked_scatter(is_sent, read("version", is_sent).cpu().int())
        outdated = member[is_sent & (version <= common_version)]
        if len(outdated):  # in one process; a session leaves out who says so
            raise ProtocolError(f"expected {LATER} from {serve.__name__} of {names[outdated[0]]}")
    return _OwnersReply(
        wanted, answered, is_sent, version, {n: read(n, is_sent) for n in form.fields}
    )


def _common_versions(request: _Request, wanted: Tensor) -> Tensor:
    """Return the version of each row (W,) if all requesters have the same, else `NO_VERSION`.

    Versions differ, for example, if the owner was reset to an older state and some requesters have
    a later version than it; the oldest of theirs would not show that.
    """
    assert request.since is not None
    is_wanted, place = _find_wanted(wanted, request.target)
    of, since = place[is_wanted], request.since[is_wanted]
    no_version = torch.full(wanted.shape, NO_VERSION, dtype=torch.int32)
    least, most = (
        no_version.scatter_reduce(0, of, since, how, include_self=False) for how in ("amin", "amax")
    )
    return torch.where(least == most, least, NO_VERSION)


def _find_wanted(wanted: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Find boundary rows `target` (k,) among the wanted ones (W,), ascending.

    Returns:
        Which of them are wanted, (k,) bool, and their places, (k,) int64. Places of rows that are
        not wanted mean nothing.
    """
    if not len(wanted):
        return torch.zeros(len(target), dtype=torch.bool), torch.zeros_like(target)
    place = torch.searchsorted(wanted, target).clamp(max=len(wanted) - 1)
    return wanted[place] == target, place


def _rows_of_members(
    fed: Federation, reply: Payload, name: str, op: Op, members: Tensor, runs: Tensor
) -> Ragged:
    """Return a field of the replies of `members` (M,) that must have runs (M,) of rows."""
    rows = ragged_field(reply, name, op)
    got = rows.off.diff().cpu()
    for at in (got != runs).nonzero()[:, 0].tolist():
        raise ProtocolError(
            f"expected {int(runs[at])} rows from {op.__name__} of {fed.ids[int(members[at])]}, got "
            f"{int(got[at])}" + ("" if name == "rows" else f" in {name!r}")
        )
    return rows


def _reply_to_requesters(
    call: _PullCall, request: _Request, owners_reply: _OwnersReply
) -> dict[str, Field]:
    """Return the fields for the requesters, in the order of their slots."""
    client = owners(request.off)
    is_wanted, place = _find_wanted(owners_reply.rows, request.target)
    answered = is_wanted.masked_scatter(is_wanted, owners_reply.answered[place[is_wanted]])
    is_sent = answered.masked_scatter(answered, owners_reply.is_sent[place[answered]])
    if request.since is not None and owners_reply.version is not None:
        other = owners_reply.version[place[is_sent]] != request.since[is_sent]
        is_sent = is_sent.masked_scatter(is_sent, other)

    def of(t: Tensor, mask: Tensor) -> Ragged:
        """Return values of the slots in the mask (k,), by client."""
        return Ragged(t, offsets(torch.bincount(client[mask], minlength=len(request.off) - 1)))

    reply: dict[str, Field] = {}
    if call.form.missing == "keep":
        reply["answered"] = Ragged(answered, request.off)
    if owners_reply.version is not None:
        reply["changed"] = of(is_sent[answered], answered)
        reply["version"] = of(owners_reply.version[place[is_sent]], is_sent)
    # For each slot the number of its row among those that owners have sent.
    row = (owners_reply.is_sent.cumsum(0) - 1)[place[is_sent]]
    return reply | {
        name: of(t.index_select(0, row.to(t.device)), is_sent)
        for name, t in owners_reply.fields.items()
    }


def _version_problem(inbox: Payload, reply: Payload) -> str | None:
    """Return the problem with an owner's versions if one is not later than `since`, else None."""
    since = inbox["since"].t
    if "answered" in reply:
        since = since[reply["answered"].t]
    is_later = reply["version"].t > since[reply["changed"].t]
    return None if bool(is_later.all()) else LATER


def _reply_specs(form: PullForm, rows: str, *, fewer: bool = False) -> FieldSpecs:
    """Return the specs of the fields of requested rows; `rows`: see `FieldSpec.rows`."""
    specs: dict[str, FieldSpec] = {}
    if form.missing == "keep":
        specs["answered"] = FieldSpec(Ragged, (), torch.bool, rows=rows, fewer=fewer)
        rows, fewer = "marked/answered", False
    if form.since:
        specs["changed"] = FieldSpec(Ragged, (), torch.bool, rows=rows, fewer=fewer)
        rows, fewer = "marked/changed", False
        specs["version"] = FieldSpec(Ragged, (), torch.int32, rows=rows, low=0)
    own = {name: replace(spec, rows=rows, fewer=fewer) for name, spec in form.fields.items()}
    return specs | own


# --- Stored rows of the layers between features and outputs, of own nodes and of the halo --------
#
# Clients keep what last entered each stage of their own rows, and what owners have sent of their
# halo slots. A slot keeps its row until a later one comes; how old it is counts in batches. What
# is done with stored rows is in `silograph.nn.stored_rows`.
#
# With `moved`, an owner keeps each boundary row as it last sent it, with a number that grows when
# it sends another (its version). Requesters say which version they have, and get the row as it was
# last sent if theirs is older. So after an exchange every requester holds the row that the owner
# would send, to within the bound, and owners need not know the requesters. Versions are the numbers
# of batches before which rows were sent.
#
# Options of the method say what is stored and sent: `sent` (`exact`, or `int8`: as bytes with a
# scale for each row), `moved` and `share_features`. The annotations below read them.
#
# C: clients. n: own rows. S: halo slots. B: boundary rows. k: rows that are requested. r: rows that
# are sent. D: width of what enters a stage.


NEVER = -1
HALO = "halo_rows/"  # how names of rows of slots begin in a state


def stored_widths(model: AnyModel) -> dict[str, int]:
    """Return the width D of each stage whose inputs are stored, by its number."""
    staged = divisible(model)
    return {str(number): staged.stages[number].inputs for number in stored_stages(staged)}


def _own_rows(cfg: Any) -> FieldSpecs:
    widths = stored_widths(cfg.model).items()
    return {f"own_rows/{n}": FieldSpec(Ragged, (width,), rows=NODES) for n, width in widths}


def _halo_rows(cfg: Any) -> FieldSpecs:
    widths = stored_widths(cfg.model)
    if cfg.options.share_features:
        widths["0"] = cfg.model.features
    return {f"{HALO}{n}": FieldSpec(Ragged, (width,), rows=SLOTS) for n, width in widths.items()}


def _encoded(name: str, rows: str = "") -> SpecsByConfig:
    """Return specs of rows in the form in which they are sent; "": as many as are marked."""

    def specs(cfg: Any) -> FieldSpecs:
        marked = "marked/answered" if cfg.options.moved is None else "marked/changed"
        dtype = torch.int8 if cfg.options.sent == "int8" else None
        spec = FieldSpec(Ragged, (), dtype, rows=rows or marked)
        return {
            f"{name}/{n}": replace(spec, shape=(w,)) for n, w in stored_widths(cfg.model).items()
        }

    return specs


def _scales(name: str, rows: str = "") -> SpecsByConfig:
    """Return specs of the scales of rows that are sent as bytes; as `_encoded`."""

    def specs(cfg: Any) -> FieldSpecs:
        encoded = _encoded(name, rows)(cfg) if cfg.options.sent == "int8" else {}
        scale = FieldSpec(Ragged, (), torch.float32, low=0, high=LARGEST)
        return {n: replace(scale, rows=spec.rows) for n, spec in encoded.items()}

    return specs


def _if_moved(
    specs: SpecsByConfig,
) -> SpecsByConfig:
    """Return specs of fields of runs that send only rows that moved."""
    return lambda cfg: {} if cfg.options.moved is None else specs(cfg)


def _versions(name: str, rows: str, low: int = NO_VERSION) -> SpecsByConfig:
    """Return the spec of versions, of runs that send only rows that moved."""
    return _if_moved(lambda _: {name: FieldSpec(Ragged, (), torch.int32, rows=rows, low=low)})


# State.


@dataclass(frozen=True)
class HaloRows:
    """What a client holds of its halo slots.

    Attributes:
        halo_rows: (S, D) last received rows of each stage, scaled by their owners; with shared
            features also these, as stage 0.
        received_at: (S,) int64 number of the batch before which a slot's rows came, or `NEVER`.
        versions: (S,) int32 of the rows.
    """

    halo_rows: Annotated[Mapping[str, Ragged], _halo_rows]
    received_at: Annotated[Ragged, FieldSpec(Ragged, (), torch.int64, rows=SLOTS, low=NEVER)]
    versions: Annotated[Ragged | None, _versions("versions", SLOTS)]


@dataclass(frozen=True)
class History(HaloRows):
    """The stored rows of a client.

    Attributes:
        own_rows: (n, D) what entered each stage last, of own rows.
        passes: (C,) int32 how often all own rows were computed.
    """

    own_rows: Annotated[Mapping[str, Ragged], _own_rows]
    passes: Annotated[Stacked, FieldSpec(Stacked, (), torch.int32, low=0)]

    def readable(self, *, halo: bool = True) -> StoredRows:
        """Return what a pass may read; without the halo, own rows only."""
        own = {int(number): rows.t for number, rows in self.own_rows.items()}
        slots = {int(number): rows.t for number, rows in self.halo_rows.items() if halo}
        return StoredRows(own, slots, (self.received_at.t != NEVER) & halo)

    def write_(self, rows: Tensor, entered: Mapping[int, Tensor]) -> None:
        """Write what enters each stage, (k, D), to own rows (k,), in place."""
        for number, x in entered.items():
            self.own_rows[str(number)].t.index_copy_(0, rows, x)


@dataclass(frozen=True)
class LastSent:
    """What an owner of boundary rows has sent last; nothing unless only moved rows are sent.

    Attributes:
        sent_rows: (B, D) of each stage, in the form in which they are sent.
        sent_scales: (B,) scales of bytes.
        sent_versions: (B,) int32.
    """

    sent_rows: Annotated[Mapping[str, Ragged], _if_moved(_encoded("sent_rows", BOUNDARY))]
    sent_scales: Annotated[Mapping[str, Ragged], _if_moved(_scales("sent_scales", BOUNDARY))]
    sent_versions: Annotated[Ragged | None, _versions("sent_versions", BOUNDARY)]


def blank(state: type[Stored], cfg: Any, block: ClientBlock) -> Stored:
    """Return the state of clients that have stored nothing: least values, or zeros."""
    runs = {NODES: block.off, SLOTS: block.halo.off, BOUNDARY: block.halo.boundary_off}
    fields: dict[str, Field] = {}
    for name, spec in specs_of(state, cfg).items():
        off = runs.get(spec.rows)
        shape = (block.num_clients if off is None else int(off[-1]), *(n or 0 for n in spec.shape))
        dtype, device = spec.dtype or dtype_of(block), block.off.device
        t = torch.zeros(shape, dtype=dtype, device=device)  # takes no memory until it is written
        t = t.fill_(spec.low) if spec.low else t
        fields[name] = Stacked(t) if off is None else Ragged(t, off)
    return from_payload(state, fields)


# Messages.


@dataclass(frozen=True)
class RequestedSlots(Slots):
    """Halo slots whose rows a client wants, with the version (k,) int32 that it has of each."""

    version: Annotated[Ragged | None, _versions("version", "own/slot")]


@dataclass(frozen=True)
class RequestedRows(BoundaryRows):
    """Boundary rows that others want.

    Attributes:
        since: (k,) int32 version that all requesters have, `NO_VERSION` where they differ.
    """

    since: Annotated[Ragged | None, _versions("since", "own/row")]


@dataclass(frozen=True)
class SentRows:
    """Rows of those that were requested.

    Attributes:
        answered: (k,) bool, rows that their owner has.
        changed: of each of these, whether it is later than the requester's.
        version: (r,) int32 of the rows that follow.
        scale: (r,) of rows that are bytes.
        rows: (r, D) of each stage.
    """

    answered: Annotated[Ragged, FieldSpec(Ragged, (), torch.bool, rows="inbox/row")]
    changed: Annotated[
        Ragged | None,
        _if_moved(lambda _: {"changed": FieldSpec(Ragged, (), torch.bool, rows="marked/answered")}),
    ]
    version: Annotated[Ragged | None, _versions("version", "marked/changed", low=0)]
    scale: Annotated[Mapping[str, Ragged], _scales("scale")]
    rows: Annotated[Mapping[str, Ragged], _encoded("rows")]

    def find_problem(self, request: RequestedRows, cfg: object) -> str | None:
        """Return the problem if a version is not later than the requester's, else None."""
        del cfg
        is_versioned = self.changed is not None
        return _version_problem(to_payload(request), to_payload(self)) if is_versioned else None


@dataclass(frozen=True)
class ReceivedRows(SentRows):
    """The same for the slots that the client has requested, `requested_slots` of its state."""

    answered: Annotated[Ragged, FieldSpec(Ragged, (), torch.bool, rows="state/requested_slots")]

    def write_(self, block: ClientBlock, state: HaloRows, slots: Ragged, now: int) -> Ragged | None:
        """Write the rows to slots (k,), in place, as received before batch `now`.

        Returns:
            The versions of all slots.
        """
        place = check_places(slots, block.halo.off, "halo slots")[self.answered.t]
        state.received_at.t.index_fill_(0, place, now)
        versions = state.versions
        if versions is not None:  # what did not come is as its owner would send it
            assert self.changed is not None  # both or neither
            assert self.version is not None
            place = place[self.changed.t]
            versions = replace(versions, t=versions.t.index_copy(0, place, self.version.t))
        for number, rows in self.rows.items():
            stored, scale = state.halo_rows[number].t, self.scale.get(number)
            t = from_small(rows.t, None if scale is None else scale.t, stored.dtype)
            stored.index_copy_(0, place, t)
        return versions


def _features(rows: str) -> Callable[[Any], FieldSpec]:
    return lambda cfg: FieldSpec(Ragged, (cfg.model.features,), rows=rows)


@dataclass(frozen=True)
class SentFeatures:
    """Features (B, F) of all boundary rows, scaled as the first stage wants."""

    rows: Annotated[Ragged, _features(BOUNDARY)]


@dataclass(frozen=True)
class ReceivedFeatures:
    """The same for all slots, (S, F)."""

    rows: Annotated[Ragged, _features(SLOTS)]


def answer(
    model: Staged, block: ClientBlock, state: History, row: Ragged, rows: Tensor, *, small: bool
) -> SentRows:
    """Return the requested rows as they are stored, of clients that have any.

    Args:
        model: whose stages rows enter.
        block: the owners.
        state: theirs.
        row: (k,) int32 boundary rows that others want, as the owners count them.
        rows: (k,) int64 the same rows in the block.
        small: whether rows are sent as bytes.
    """
    row_off, has = row.off, state.passes.t > 0
    answered = has[owners(row_off)]
    off = offsets(torch.where(has, row_off.diff(), 0))
    rows, around = rows[answered], surroundings(block)
    scales: dict[str, Ragged] = {}
    sent: dict[str, Ragged] = {}
    for number, stored in state.own_rows.items():
        x = stored.t.index_select(0, rows)
        t = to_send(model, int(number), around, rows, x, off)
        if small:
            t, scale = as_bytes(t)
            scales[number] = Ragged(scale, off)
        sent[number] = Ragged(t, off)
    return SentRows(Ragged(answered, row_off), None, None, scales, sent)


def moved_only(
    block: ClientBlock,
    last: LastSent,
    request: RequestedRows,
    reply: SentRows,
    bound: float,
    now: int,
) -> tuple[LastSent, SentRows]:
    """Return what owners have sent after a reply, and the reply of only those rows that moved.

    A row is sent anew if it is further from what was last sent than `bound` times the length of
    that, over all stages together, or if a requester has a later version than the owner: then the
    owner has gone back to an older state and does not know what was sent since.

    Args:
        block: the owners.
        last: what they have sent.
        request: rows that are wanted, and versions.
        reply: all rows that the owners have.
        bound: at least 0.
        now: number of the batch, which becomes the version of rows that have moved.
    """
    assert request.since is not None  # of runs that send only what moved
    assert last.sent_versions is not None
    has_row, off = reply.answered.t, next(iter(reply.rows.values())).off
    place = check_places(request.row, block.halo.boundary_off, "boundary rows")[has_row]
    since, version = request.since.t[has_row], last.sent_versions.t
    before = row_values(last.sent_rows, last.sent_scales, place)
    distance, size = torch.zeros(2, len(place), dtype=torch.float64, device=place.device)
    for old, new in zip(before, row_values(reply.rows, reply.scale), strict=True):
        distance, size = distance + (new - old).square().sum(1), size + old.square().sum(1)
    within = (version[place] != NO_VERSION) & (distance <= bound**2 * size)
    # So does a row that is not finite, whose distance says nothing.
    is_sent = ~within | (since > version[place])
    version = version.index_fill(0, place[is_sent], now)

    def update(old: Mapping[str, Ragged], new: Mapping[str, Ragged]) -> dict[str, Ragged]:
        """Return what was last sent, with the new rows."""
        at = place[is_sent]
        return {n: replace(f, t=f.t.index_copy(0, at, new[n].t[is_sent])) for n, f in old.items()}

    rows, scales = update(last.sent_rows, reply.rows), update(last.sent_scales, reply.scale)
    changed = version[place] > since
    later, ends = place[changed], offsets(segment_sum(changed.long(), off))
    sent = SentRows(
        answered=reply.answered,
        changed=Ragged(changed, off),
        version=Ragged(version[later], ends),
        scale={number: Ragged(f.t[later], ends) for number, f in scales.items()},
        rows={number: Ragged(f.t[later], ends) for number, f in rows.items()},
    )
    return LastSent(rows, scales, replace(last.sent_versions, t=version)), sent


def row_values(
    rows: Mapping[str, Ragged], scales: Mapping[str, Ragged], at: Tensor | slice = slice(None)
) -> list[Tensor]:
    """Return the rows (k, D) of each stage as float64, all or those `at` (k,)."""
    scale = {number: f.t[at] for number, f in scales.items()}
    return [from_small(f.t[at], scale.get(n), torch.float64) for n, f in rows.items()]


@dataclass(frozen=True)
class HaloFeatures:
    """Features of the halo, as stage 0, where a client keeps these."""

    halo_rows: Mapping[str, Ragged]


@dataclass(frozen=True)
class PassAlone(PassState, HaloFeatures):
    """What a client reads and writes that finishes a stage alone."""


@op(Kind.EVALUATION)
def finish_alone(clients: Clients, state: PassAlone, _: Empty) -> tuple[PassAlone, Empty]:
    """Finish the first stage of a pass without other clients.

    These are its own features, with degrees of its own graph; where it keeps those of its halo, all
    neighbors' features with their full degrees.
    """
    block, features = clients.block, state.halo_rows.get("0")
    at, params = inputs_of(clients, state, 0)
    z = before(params, at)
    remote_sums = None
    if features is None:
        at = replace(at, reach=with_own_degrees(block, at.reach))
    else:
        first = {n: w.t[0] for n, w in state.weights.items() if n.startswith("0.")}
        whole = {name.removeprefix("0."): w for name, w in first.items()}
        sent = at.stage.conv.map(whole, features.t, block.halo.off)
        remote_sums = sparse_product(block.halo.adj, sent)
    return finish(clients, with_product(state, at, z), at, params, remote_sums), Empty()
