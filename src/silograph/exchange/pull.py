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

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

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
    State,
    offsets,
    owners,
    under,
)
from silograph.exchange.passes import finish, inputs_of
from silograph.exchange.rows import all_places, by_owner, places_in, ragged_field
from silograph.federation.base import Federation, Op, positions_of
from silograph.federation.decoder import LARGEST, as_bytes, from_small
from silograph.federation.field_specs import BOUNDARY, NODES, SLOTS, FieldSpec, FieldSpecs, places
from silograph.federation.program import Call, Either, Maybe, Steps
from silograph.graph.block.block import ClientBlock, dense_rows
from silograph.nn.fit import check_places, dtype_of
from silograph.nn.forward import Staged
from silograph.nn.model import before
from silograph.nn.segment import segment_sum, sparse_product
from silograph.nn.stored_rows import StoredRows, stored_stages, surroundings, to_send

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
        asked: the state field (k,) in which requesters keep the slots that they ask for. Silos then
            take rows for exactly these; without it, for as many as they have slots.
    """

    fields: FieldSpecs = field(default_factory=lambda: {"rows": FieldSpec(Ragged)})
    missing: Literal["fail", "keep"] = "fail"
    since: bool = False
    some: bool = False
    asked: str = ""


PLAIN = PullForm()


def rows_of_width(width: int, dtype: torch.dtype | None = None) -> PullForm:
    """Return the form of plain rows (k, D) of this width D; no dtype is the run's."""
    return PullForm({"rows": FieldSpec(Ragged, (width,), dtype)})


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

    def fetch(self, op: Op, inbox: Payload, to: Sequence[str] | None, what: Kind) -> Payload:
        """Make a call whose replies have rows."""
        full_inbox = {**self.common_inbox, **inbox}
        return self.fed.call(
            op, full_inbox, what=what, key=self.key, to=to, rows=True, lacking=self.has_missing_rows
        )

    def send(self, op: Op, inbox: Payload, to: Sequence[str] | None) -> None:
        """Make a call whose replies have no fields."""
        full_inbox = {**self.common_inbox, **inbox}
        self.fed.call(
            op, full_inbox, what=self.what, key=self.key, to=to, lacking=self.has_missing_rows
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
    _check_form(ask, form)
    call = _PullCall(fed, what, key, dict(inbox or {}), form)
    if call.has_missing_rows:
        to = [name for name in (fed.ids if to is None else to) if name not in fed.away]
        if not to:
            return
    requesters = positions_of(fed.ids, to)
    request = (
        _all_slots(fed, requesters) if ask is None else _collect_requests(call, ask, to, requesters)
    )
    allowed = positions_of(fed.ids, owners) if form.some else requesters
    owner = torch.searchsorted(fed.route.boundary_off, request.target, right=True) - 1
    is_allowed = torch.isin(owner, allowed)
    if not call.has_missing_rows and not bool(is_allowed.all()):
        raise ProtocolError("expected slots of clients that take part, got some of others")
    called_owners = torch.unique(owner[is_allowed]) if form.some else requesters
    wanted = torch.unique(request.target[is_allowed])
    if ask is None and not form.some:
        wanted = all_places(fed.route.boundary_off, requesters)
    if not len(called_owners):
        return
    owners_reply = _call_owners(
        call, serve, request, wanted, called_owners, named=ask is not None or form.some
    )
    if owners_reply is not None:
        call.send(store, _reply_to_requesters(call, request, owners_reply), to)


def announce(
    fed: Federation, ask: Op, listen: Op, *, key: Key, inbox: Mapping[str, Shared] | None = None
) -> None:
    """Tell owners which of their rows clients will ask for later.

    Args:
        fed: the federation.
        ask: replies `slot` (k,) int32, as in `pull`.
        listen: gets `row` (k,) int32, the boundary rows that somebody wants, ascending, each once.
        key: key of the ops' draws.
        inbox: what both ops get besides.
    """
    call, all_clients = (
        _PullCall(fed, Kind.HALO_KEYS, key, dict(inbox or {}), PLAIN),
        positions_of(fed.ids, None),
    )
    request = _collect_requests(call, ask, None, all_clients)
    row, off = by_owner(torch.unique(request.target), fed.route.boundary_off, all_clients)
    call.send(listen, {"row": Ragged(row, off)}, None)


def announce_steps(ask: Op, listen: Op, *, key: Key, inbox: FieldSpecs | None = None) -> Steps:
    """Return the calls of `announce`; the arguments are those of `announce`."""
    inbox_specs, what = dict(inbox or {}), Kind.HALO_KEYS
    ask_call = Call(ask, what, key, inbox_specs, {"slot": places(SLOTS)})
    return ask_call, Call(listen, what, key, {**inbox_specs, "row": places(BOUNDARY)})


def _check_form(ask: Op | None, form: PullForm) -> None:
    if form.since and ask is None:
        raise ProtocolError("expected clients that ask in a pull of changed rows, got none")


def _all_slots(fed: Federation, requesters: Tensor) -> _Request:
    """Return the request for all slots of the clients at `requesters`."""
    route = fed.route
    slots = all_places(route.slot_off, requesters)
    return _Request(route.target[slots], offsets(route.slot_off.diff()[requesters]), None)


def _collect_requests(
    call: _PullCall, ask: Op, to: Sequence[str] | None, requesters: Tensor
) -> _Request:
    """Call `ask` and return which rows the clients want."""
    reply = call.fetch(ask, {}, to, Kind.HALO_KEYS)
    if not reply:  # all have gone
        no_slots = torch.zeros(0, dtype=torch.int64)
        return _Request(no_slots, torch.zeros(len(requesters) + 1, dtype=torch.int64), None)
    route = call.fed.route
    slots = places_in(reply, "slot", route.slot_off, requesters, ask)
    off, since = ragged_field(reply, "slot", ask).off.cpu(), None
    if call.form.since:
        runs = off.diff()
        since = _rows_of_members(call.fed, reply, "version", ask, requesters, runs).t.cpu()
    return _Request(route.target[slots], off, since)


def _call_owners(
    call: _PullCall,
    serve: Op,
    slot_request: _Request,
    wanted: Tensor,
    called_owners: Tensor,
    *,
    named: bool,
) -> _OwnersReply | None:
    """Call the owners of the rows `wanted` (W,); return None if none answered."""
    fed, form = call.fed, call.form
    row, off = by_owner(wanted, fed.route.boundary_off, called_owners)
    request: dict[str, Field] = {"row": Ragged(row, off)} if named else {}
    common_version = None if slot_request.since is None else _common_versions(slot_request, wanted)
    if common_version is not None:
        request["since"] = Ragged(common_version, off)
    names = [fed.ids[p] for p in called_owners.tolist()]
    reply = call.fetch(serve, request, names, call.what)
    if not reply:
        return None
    is_present = torch.tensor([not call.has_missing_rows or name not in fed.away for name in names])
    member = torch.repeat_interleave(torch.arange(len(called_owners)), off.diff())
    answered = is_present[member]

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
    """Return which boundary rows (k,) are among the wanted ones (W,), and where; 0 if not."""
    is_wanted = torch.isin(target, wanted)
    place = torch.zeros_like(target)
    place[is_wanted] = torch.searchsorted(wanted, target[is_wanted])
    return is_wanted, place


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
    client = torch.repeat_interleave(torch.arange(len(request.off) - 1), request.off.diff())
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
        name: of(t[row.to(t.device)], is_sent) for name, t in owners_reply.fields.items()
    }


def pull_steps(
    ask: Op | None,
    serve: Op,
    store: Op,
    *,
    what: Kind,
    key: Key,
    inbox: FieldSpecs | None = None,
    form: PullForm,
) -> Steps:
    """Return the calls of `pull`; the arguments are those of `pull`."""
    _check_form(ask, form)
    inbox_specs = dict(inbox or {})
    names_rows = ask is not None or form.some
    request = {**inbox_specs, "row": places(BOUNDARY)} if names_rows else inbox_specs
    ask_specs: dict[str, FieldSpec] = {"slot": places(SLOTS)}
    if form.since:
        version = FieldSpec(Ragged, (), torch.int32, low=NO_VERSION)
        request["since"] = replace(version, rows="own/row")
        ask_specs["version"] = replace(version, rows="own/slot")
    serve_specs = _reply_specs(form, "inbox/row" if names_rows else BOUNDARY)
    store_specs = _reply_specs(
        form, f"state/{form.asked}" if form.asked else SLOTS, fewer=not form.asked
    )
    if ask is None:
        store_specs = _reply_specs(form, SLOTS)
    serve_call = Call(
        serve, what, key, request, serve_specs, _version_problem if form.since else None
    )
    store_call = Call(store, what, key, {**inbox_specs, **store_specs})
    first = () if ask is None else Call(ask, Kind.HALO_KEYS, key, inbox_specs, ask_specs)
    if not form.some:
        return first, serve_call, store_call
    return Either((first, Maybe(serve_call), Maybe(store_call)), Maybe(serve_call))


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


# --- Rows of which only those are sent that have moved since they were last sent -----------------
#
# An owner keeps each boundary row as it last sent it, with a number that grows when it sends
# another (its version). Requesters say which version they have (`PullForm.since`), and get the
# row as it was last sent if theirs is older. So after an exchange every requester holds the row
# that the owner would send, to within the bound, and owners need not know the requesters.
#
# State of an owner: `moved/NAME` (B, ...) of each field of the form, int32 `moved/version` (B,);
# of a requester: `history/version` (S,). Versions are the numbers of batches before which rows
# were sent.
#
# B: boundary rows. S: halo slots. k: rows that are asked for.


SENT, SENT_VERSION, VERSION = "moved/", "moved/version", "history/version"


def blank_moved(form: PullForm, block: ClientBlock) -> dict[str, Stacked | Ragged]:
    """Return the initial state: no row was sent or received."""
    state: dict[str, Stacked | Ragged] = {}
    rows, device = len(block.halo.boundary), block.off.device
    for name, spec in form.fields.items():
        shape = (rows, *(n or 0 for n in spec.shape))
        t = torch.zeros(shape, dtype=spec.dtype or dtype_of(block), device=device)
        state[f"{SENT}{name}"] = Ragged(t, block.halo.boundary_off)
    for name, off in (SENT_VERSION, block.halo.boundary_off), (VERSION, block.halo.off):
        t = torch.full((int(off[-1]),), NO_VERSION, dtype=torch.int32, device=device)
        state[name] = Ragged(t, off)
    return state


def moved_specs(form: PullForm) -> FieldSpecs:
    """Return the specs of the state."""
    sent = {f"{SENT}{name}": replace(spec, rows=BOUNDARY) for name, spec in form.fields.items()}
    version = FieldSpec(Ragged, (), torch.int32, low=NO_VERSION)
    return sent | {
        SENT_VERSION: replace(version, rows=BOUNDARY),
        VERSION: replace(version, rows=SLOTS),
    }


def row_values(fields: Mapping[str, Tensor]) -> list[Tensor]:
    """Return the rows (k, D) of each stage, float64, from fields `rows/I` and maybe `scale/I`."""
    rows = []
    for name, t in fields.items():
        kind, _, number = name.partition("/")
        if kind == "rows":
            scale = fields.get(f"scale/{number}")
            rows.append(from_small(t, scale, torch.float64))
    return rows


def moved_only(
    block: ClientBlock, state: State, inbox: Payload, reply: Payload, bound: float, now: int
) -> tuple[dict[str, Stacked | Ragged], dict[str, Stacked | Ragged]]:
    """Return an owner's state and its reply to a pull of changed rows.

    A row is sent anew if it is further from what was last sent than `bound` times the length of
    that, over all stages together, or if a requester has a later version than the owner: then the
    owner has gone back to an older state and does not know what was sent since.

    Args:
        block: the owners.
        state: theirs.
        inbox: `row` (k,) boundary rows that are wanted, `since` (k,) versions.
        reply: `answered` (k,) bool, and the fields of those that are.
        bound: at least 0.
        now: number of the batch, which becomes the version of rows that have moved.
    """
    row, since, answered = inbox["row"], inbox["since"].t, reply["answered"]
    assert isinstance(row, Ragged)  # from `pull`
    has_row = answered.t
    off = next(f.off for n, f in reply.items() if n != "answered" and isinstance(f, Ragged))
    place = check_places(row, block.halo.boundary_off, "boundary rows")[has_row]
    fresh = {name: field.t for name, field in reply.items() if name != "answered"}
    sent = {name: state[f"{SENT}{name}"].t for name in fresh}
    before = row_values({name: t[place] for name, t in sent.items()})
    distance, size = torch.zeros(2, len(place), dtype=torch.float64, device=place.device)
    for old, new in zip(before, row_values(fresh), strict=True):
        distance, size = distance + (new - old).square().sum(1), size + old.square().sum(1)
    version = state[SENT_VERSION].t
    within = (version[place] != NO_VERSION) & (distance <= bound**2 * size)
    is_reset = since[has_row] > version[place]
    is_sent = ~within | is_reset  # so does a row that is not finite, whose distance says nothing
    version = version.index_fill(0, place[is_sent], now)
    new_state = {**state, SENT_VERSION: Ragged(version, block.halo.boundary_off)}
    for name, t in fresh.items():
        sent[name] = sent[name].index_copy(0, place[is_sent], t[is_sent])
        new_state[f"{SENT}{name}"] = Ragged(sent[name], block.halo.boundary_off)
    changed = version[place] > since[has_row]
    later = place[changed]
    ends = offsets(segment_sum(changed.long(), off))
    new_reply: dict[str, Stacked | Ragged] = {
        "answered": Ragged(has_row, row.off),
        "changed": Ragged(changed, off),
        "version": Ragged(version[later], ends),
    }
    return new_state, new_reply | {name: Ragged(t[later], ends) for name, t in sent.items()}


def with_versions(
    block: ClientBlock, state: State, inbox: Payload, place: Tensor
) -> tuple[dict[str, Stacked | Ragged], Tensor]:
    """Return a requester's state with the versions that came, and the slots (r,) they are of.

    Args:
        block: the requesters.
        state: theirs.
        inbox: `changed` of the answered slots, `version` (r,) of those.
        place: the answered slots.
    """
    later = place[inbox["changed"].t]
    version = state[VERSION].t.index_copy(0, later, inbox["version"].t)
    return {**state, VERSION: Ragged(version, block.halo.off)}, later


# --- Stored rows of the layers between features and outputs, of own nodes and of the halo --------
#
# Clients keep what last entered each stage of their own rows, and what owners have sent of their
# halo slots. A slot keeps its row until a later one comes; how old it is counts in batches. What
# is done with stored rows is in `silograph.nn.stored_rows`.
#
# State: `history/own/I` (n, D) of own rows, I the number of the stage that they enter;
# `history/halo/I` (S, D) of slots, scaled by their owners; `history/seen` (S,) int64 number of the
# batch before which a slot's rows came, -1 if never; `history/passes` (C,) int32 how often all own
# rows were worked out. With shared features `history/halo/0` (S, F) has those of the halo.
#
# C: clients. n: rows. S: halo slots. k: wanted rows. D: width.


OWN, HALO, SEEN, PASSES = "history/own/", "history/halo/", "history/seen", "history/passes"
NEVER = -1
ASKED = "round/asked"  # slots that a client has asked for, (k,) int32


def blank_history(model: Staged, block: ClientBlock) -> dict[str, Stacked | Ragged]:
    """Return an empty history."""
    rows, slots, device = len(block.row_key), len(block.halo.key), block.off.device
    dtype = dtype_of(block)
    fields: dict[str, Stacked | Ragged] = {}
    for number in stored_stages(model):
        width = model.stages[number].inputs
        own = torch.zeros(rows, width, dtype=dtype, device=device)
        fields[f"{OWN}{number}"] = Ragged(own, block.off)
        halo = torch.zeros(slots, width, dtype=dtype, device=device)
        fields[f"{HALO}{number}"] = Ragged(halo, block.halo.off)
    never = torch.full((slots,), NEVER, device=device)
    fields[SEEN] = Ragged(never, block.halo.off)
    no_passes = torch.zeros(block.num_clients, dtype=torch.int32, device=device)
    return fields | {PASSES: Stacked(no_passes)}


def history_specs(model: Staged, *, features: bool) -> FieldSpecs:
    """Return the specs of a history; `features`: including those of the halo's features."""
    specs: dict[str, FieldSpec] = {}
    for number in stored_stages(model):
        width = model.stages[number].inputs
        specs[f"{OWN}{number}"] = FieldSpec(Ragged, (width,), rows=NODES)
        specs[f"{HALO}{number}"] = FieldSpec(Ragged, (width,), rows=SLOTS)
    if features:
        specs[f"{HALO}0"] = FieldSpec(Ragged, (model.features,), rows=SLOTS)
    specs[SEEN] = FieldSpec(Ragged, (), torch.int64, rows=SLOTS, low=NEVER)
    return specs | {PASSES: FieldSpec(Stacked, (), torch.int32, low=0)}


def stored_in(state: State, *, halo: bool = True) -> StoredRows:
    """Return the stored rows of a state; without the halo, those of own rows only."""
    own = {int(k.removeprefix(OWN)): f.t for k, f in state.items() if k.startswith(OWN)}
    seen_at = state[SEEN].t
    if not halo:
        return StoredRows(own, {}, torch.zeros_like(seen_at, dtype=torch.bool))
    slots = {int(k.removeprefix(HALO)): f.t for k, f in state.items() if k.startswith(HALO)}
    return StoredRows(own, slots, seen_at != NEVER)


def with_own(
    state: State, block: ClientBlock, inputs: Mapping[int, Tensor]
) -> dict[str, Stacked | Ragged]:
    """Return a state whose stored own rows are the inputs (n, D) of each stage."""
    return {**state, **{f"{OWN}{number}": Ragged(x, block.off) for number, x in inputs.items()}}


def put_own_(state: State, rows: Tensor, inputs: Mapping[int, Tensor]) -> None:
    """Write the inputs (k, D) of each stage to own rows (k,) of a state, in place."""
    for number, x in inputs.items():
        state[f"{OWN}{number}"].t.index_copy_(0, rows, x)


def rows_form(model: Staged, *, small: bool = False, since: bool = False) -> PullForm:
    """Return the form of the pull of stored rows: those of every stage, for the slots in `ASKED`.

    Args:
        model: whose stages rows enter.
        small: as whole numbers of a byte, with a scale for each row.
        since: only rows that have changed (see `silograph.exchange.pull`).
    """
    fields: dict[str, FieldSpec] = {}
    for number in stored_stages(model):
        shape = (model.stages[number].inputs,)
        if small:
            fields[f"scale/{number}"] = FieldSpec(Ragged, (), torch.float32, low=0, high=LARGEST)
        fields[f"rows/{number}"] = FieldSpec(Ragged, shape, torch.int8 if small else None)
    return PullForm(fields, missing="keep", since=since, some=True, asked=ASKED)


def wanted_rows(block: ClientBlock, row: Ragged) -> Tensor:
    """Return the numbers (k,) int64 in a block of boundary rows (k,)."""
    return block.halo.boundary[check_places(row, block.halo.boundary_off, "boundary rows")]


def answer(
    model: Staged, block: ClientBlock, state: State, row: Ragged, *, small: bool
) -> dict[str, Stacked | Ragged]:
    """Return stored rows of boundary rows (k,), of clients that have any.

    Out: `answered` (k,) bool, `rows/I` (r, D) of those that are; `small`: and `scale/I` (r,).
    """
    member = owners(row.off)
    has = (state[PASSES].t > 0)[member]
    counts = torch.where(state[PASSES].t > 0, row.off.diff(), 0)
    off = offsets(counts)
    rows, around = wanted_rows(block, row)[has], surroundings(block)
    reply: dict[str, Stacked | Ragged] = {"answered": Ragged(has, row.off)}
    for number in stored_stages(model):
        x = state[f"{OWN}{number}"].t[rows]
        sent = to_send(model, number, around, rows, x, off)
        if small:
            sent, scale = as_bytes(sent)
            reply[f"scale/{number}"] = Ragged(scale, off)
        reply[f"rows/{number}"] = Ragged(sent, off)
    return reply


def with_arrived(
    model: Staged, block: ClientBlock, state: State, inbox: Payload, now: int, *, small: bool
) -> dict[str, Stacked | Ragged]:
    """Return a state with the rows that came for the slots in `ASKED`, seen `now`.

    Rows of slots, and when they were seen, are written in place.
    """
    requested_slots = state[ASKED]
    assert isinstance(requested_slots, Ragged)  # as the client left it
    place = check_places(requested_slots, block.halo.off, "halo slots")[inbox["answered"].t]
    state[SEEN].t.index_fill_(0, place, now)
    new = dict(state)
    if "changed" in inbox:  # what did not come is as its owner would send it
        new, place = with_versions(block, state, inbox, place)
    for number in stored_stages(model):
        name = f"{HALO}{number}"
        rows = inbox[f"rows/{number}"].t
        if small:
            rows = from_small(rows, inbox[f"scale/{number}"].t, state[name].t.dtype)
        state[name].t.index_copy_(0, place, rows)
    return new


def share_features(fed: Federation, key: Key) -> None:
    """Have every client fetch the features of its whole halo, once."""
    pull(fed, None, send_features, keep_features, what=Kind.FEATURES, key=key)


def share_features_steps(features: int, key: Key) -> Steps:
    """Return the calls of `share_features`."""
    what, form = Kind.FEATURES, rows_of_width(features)
    return pull_steps(None, send_features, keep_features, what=what, key=key, form=form)


def send_features(
    cfg: Any, block: ClientBlock, state: State, inbox: Payload, key: Key
) -> tuple[State, Payload]:
    """Send features of all boundary rows, scaled as the first stage wants. Out: `rows` (k, F)."""
    del inbox, key
    rows = block.halo.boundary
    off = block.halo.boundary_off
    x = dense_rows(block, rows)
    return state, {
        "rows": Ragged(to_send(cfg.model.staged, 0, surroundings(block), rows, x, off), off)
    }


def keep_features(
    cfg: Any, block: ClientBlock, state: State, inbox: Payload, key: Key
) -> tuple[State, Payload]:
    """Keep the features of all slots. In: `rows` (S, F). Out: nothing."""
    del cfg, key
    return {**state, f"{HALO}0": Ragged(inbox["rows"].t, block.halo.off)}, {}


def finish_alone(
    cfg: Any, block: ClientBlock, state: State, inbox: Payload, key: Key
) -> tuple[State, Payload]:
    """Finish the first stage of a pass without other clients. In, out: nothing.

    These are its own features, with degrees of its own graph; where it keeps those of its halo, all
    neighbors' features with their full degrees.
    """
    del inbox
    at, params = inputs_of(cfg, block, state, key, 0)
    z = before(params, at)
    remote_sums = torch.zeros_like(z)
    field = state.get(f"{HALO}0")
    if field is None:
        degree = block.adj.degree.to(z.dtype)[:, None]
        at = replace(at, reach=replace(at.reach, degree=degree, operators={}))
    else:
        first = under("pass/weights", state).items()
        whole = {name.removeprefix("0."): w[0] for name, w in first if name.startswith("0.")}
        sent = at.stage.conv.map(whole, field.t, block.halo.off)
        remote_sums = sparse_product(block.halo.adj, sent)
    new = {**state, "pass/z/0": Ragged(z, at.reach.off)}
    return finish(cfg, block, new, key, at, params, remote_sums), {}
