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
from silograph.exchange.rows import all_places, by_owner, places_in, rows_in
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
    """What the messages of a pull hold.

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
class _How:
    """What all three calls of a pull have in common."""

    fed: Federation
    what: Kind
    key: Key
    given: Mapping[str, Field]
    form: PullForm

    @property
    def lacking(self) -> bool:
        """Whether the pull goes on without clients that are away."""
        return self.form.missing == "keep"

    def fetch(self, op: Op, inbox: Payload, to: Sequence[str] | None, what: Kind) -> Payload:
        """Make a call whose replies have rows."""
        both = {**self.given, **inbox}
        return self.fed.call(
            op, both, what=what, key=self.key, to=to, rows=True, lacking=self.lacking
        )

    def tell(self, op: Op, inbox: Payload, to: Sequence[str] | None) -> None:
        """Make a call that nothing comes back from."""
        both = {**self.given, **inbox}
        self.fed.call(op, both, what=self.what, key=self.key, to=to, lacking=self.lacking)


@dataclass(frozen=True, eq=False)
class _Asked:
    """What is asked for.

    Attributes:
        target: (k,) int64 boundary row of each slot.
        off: (A + 1,) int64 slots of each client that asks.
        since: (k,) int32 version that it has, None where nobody says.
    """

    target: Tensor
    off: Tensor
    since: Tensor | None


@dataclass(frozen=True, eq=False)
class _Served:
    """What came.

    Attributes:
        wanted: (W,) int64 boundary rows, ascending.
        answered: (W,) bool, whether the owner has the row.
        came: (W,) bool, whether its fields came.
        version: (W,) int32 of rows that came, None where nobody says.
        fields: by name, one row for each that came.
    """

    wanted: Tensor
    answered: Tensor
    came: Tensor
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
    how = _How(fed, what, key, dict(inbox or {}), form)
    if how.lacking:
        to = [name for name in (fed.ids if to is None else to) if name not in fed.away]
        if not to:
            return
    asking = positions_of(fed.ids, to)
    asked = _all_slots(fed, asking) if ask is None else _ask(how, ask, to, asking)
    may = positions_of(fed.ids, owners) if form.some else asking
    owner = torch.searchsorted(fed.route.boundary_off, asked.target, right=True) - 1
    here = torch.isin(owner, may)
    if not how.lacking and not bool(here.all()):
        raise ProtocolError("expected slots of clients that take part, got some of others")
    called = torch.unique(owner[here]) if form.some else asking
    wanted = torch.unique(asked.target[here])
    if ask is None and not form.some:
        wanted = all_places(fed.route.boundary_off, asking)
    if not len(called):
        return
    served = _serve(how, serve, asked, wanted, called, named=ask is not None or form.some)
    if served is not None:
        how.tell(store, _answer(how, asked, served), to)


def announce(
    fed: Federation, ask: Op, listen: Op, *, key: Key, inbox: Mapping[str, Shared] | None = None
) -> None:
    """Let owners know which rows will be wanted of them, before any row is there.

    Args:
        fed: the federation.
        ask: replies `slot` (k,) int32, as in `pull`.
        listen: gets `row` (k,) int32, the boundary rows that somebody wants, ascending, each once.
        key: key of the ops' draws.
        inbox: what both ops get besides.
    """
    how, everyone = (
        _How(fed, Kind.HALO_KEYS, key, dict(inbox or {}), PLAIN),
        positions_of(fed.ids, None),
    )
    asked = _ask(how, ask, None, everyone)
    row, off = by_owner(torch.unique(asked.target), fed.route.boundary_off, everyone)
    how.tell(listen, {"row": Ragged(row, off)}, None)


def announce_steps(ask: Op, listen: Op, *, key: Key, inbox: FieldSpecs | None = None) -> Steps:
    """Return the calls of `announce`; the arguments are those of `announce`."""
    given, what = dict(inbox or {}), Kind.HALO_KEYS
    asks = Call(ask, what, key, given, {"slot": places(SLOTS)})
    return asks, Call(listen, what, key, {**given, "row": places(BOUNDARY)})


def _check_form(ask: Op | None, form: PullForm) -> None:
    if form.since and ask is None:
        raise ProtocolError("expected clients that ask in a pull of changed rows, got none")


def _all_slots(fed: Federation, asking: Tensor) -> _Asked:
    """Return what is asked for where nobody has to say so."""
    route = fed.route
    slots = all_places(route.slot_off, asking)
    return _Asked(route.target[slots], offsets(route.slot_off.diff()[asking]), None)


def _ask(how: _How, ask: Op, to: Sequence[str] | None, asking: Tensor) -> _Asked:
    """Let clients say what they want."""
    reply = how.fetch(ask, {}, to, Kind.HALO_KEYS)
    if not reply:  # all have gone
        none = torch.zeros(0, dtype=torch.int64)
        return _Asked(none, torch.zeros(len(asking) + 1, dtype=torch.int64), None)
    route = how.fed.route
    slots = places_in(reply, "slot", route.slot_off, asking, ask)
    off, since = rows_in(reply, "slot", ask).off.cpu(), None
    if how.form.since:
        runs = off.diff()
        since = _runs_of(how.fed, reply, "version", ask, asking, runs).t.cpu()
    return _Asked(route.target[slots], off, since)


def _serve(
    how: _How, serve: Op, asked: _Asked, wanted: Tensor, called: Tensor, *, named: bool
) -> _Served | None:
    """Call the owners of the rows `wanted` (W,); None: none has answered."""
    fed, form = how.fed, how.form
    row, off = by_owner(wanted, fed.route.boundary_off, called)
    request: dict[str, Field] = {"row": Ragged(row, off)} if named else {}
    common = None if asked.since is None else _common(asked, wanted)
    if common is not None:
        request["since"] = Ragged(common, off)
    names = [fed.ids[p] for p in called.tolist()]
    reply = how.fetch(serve, request, names, how.what)
    if not reply:
        return None
    here = torch.tensor([not how.lacking or name not in fed.away for name in names])
    member = torch.repeat_interleave(torch.arange(len(called)), off.diff())
    answered = here[member]

    def read(name: str, mask: Tensor) -> Tensor:
        """Return a field that has something for each row in the mask (W,)."""
        runs = torch.bincount(member[mask], minlength=len(called))
        return _runs_of(fed, reply, name, serve, called, runs).t

    if form.missing == "keep":
        answered = answered.masked_scatter(answered, read("answered", answered).cpu())
    came, version = answered, None
    if common is not None:
        came = answered.masked_scatter(answered, read("changed", answered).cpu())
        version = common.masked_scatter(came, read("version", came).cpu().int())
        early = member[came & (version <= common)]
        if len(early):  # in one process; a session leaves out who says so
            raise ProtocolError(f"expected {LATER} from {serve.__name__} of {names[early[0]]}")
    return _Served(wanted, answered, came, version, {n: read(n, came) for n in form.fields})


def _common(asked: _Asked, wanted: Tensor) -> Tensor:
    """Return the version of each row (W,) that all have who ask for it, else `NO_VERSION`.

    Who has another version than others may have a later one than the owner, if that has gone back
    to an older state; the oldest of them would not tell the owner so.
    """
    assert asked.since is not None
    here, place = _places_among(wanted, asked.target)
    of, since = place[here], asked.since[here]
    none = torch.full(wanted.shape, NO_VERSION, dtype=torch.int32)
    least, most = (
        none.scatter_reduce(0, of, since, how, include_self=False) for how in ("amin", "amax")
    )
    return torch.where(least == most, least, NO_VERSION)


def _places_among(wanted: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Return which boundary rows (k,) are among the wanted ones (W,), and where; 0 if not."""
    here = torch.isin(target, wanted)
    place = torch.zeros_like(target)
    place[here] = torch.searchsorted(wanted, target[here])
    return here, place


def _runs_of(
    fed: Federation, reply: Payload, name: str, op: Op, members: Tensor, runs: Tensor
) -> Ragged:
    """Return a field of the replies of `members` (M,) that must have runs (M,) of rows."""
    found = rows_in(reply, name, op)
    got = found.off.diff().cpu()
    for at in (got != runs).nonzero()[:, 0].tolist():
        raise ProtocolError(
            f"expected {int(runs[at])} rows from {op.__name__} of {fed.ids[int(members[at])]}, got "
            f"{int(got[at])}" + ("" if name == "rows" else f" in {name!r}")
        )
    return found


def _answer(how: _How, asked: _Asked, served: _Served) -> dict[str, Field]:
    """Return what those who asked get besides."""
    client = torch.repeat_interleave(torch.arange(len(asked.off) - 1), asked.off.diff())
    here, place = _places_among(served.wanted, asked.target)
    answered = here.masked_scatter(here, served.answered[place[here]])
    sent = answered.masked_scatter(answered, served.came[place[answered]])
    if asked.since is not None and served.version is not None:
        other = served.version[place[sent]] != asked.since[sent]
        sent = sent.masked_scatter(sent, other)

    def of(t: Tensor, mask: Tensor) -> Ragged:
        """Return what belongs to the slots in the mask (k,)."""
        return Ragged(t, offsets(torch.bincount(client[mask], minlength=len(asked.off) - 1)))

    told: dict[str, Field] = {}
    if how.form.missing == "keep":
        told["answered"] = Ragged(answered, asked.off)
    if served.version is not None:
        told["changed"] = of(sent[answered], answered)
        told["version"] = of(served.version[place[sent]], sent)
    row = (served.came.cumsum(0) - 1)[place[sent]]  # of each slot among the rows that came
    return told | {name: of(t[row.to(t.device)], sent) for name, t in served.fields.items()}


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
    given = dict(inbox or {})
    named = ask is not None or form.some
    request = {**given, "row": places(BOUNDARY)} if named else given
    wanted: dict[str, FieldSpec] = {"slot": places(SLOTS)}
    if form.since:
        version = FieldSpec(Ragged, (), torch.int32, low=NO_VERSION)
        request["since"] = replace(version, rows="own/row")
        wanted["version"] = replace(version, rows="own/slot")
    served = _travels(form, "inbox/row" if named else BOUNDARY)
    stored = _travels(form, f"state/{form.asked}" if form.asked else SLOTS, fewer=not form.asked)
    if ask is None:
        stored = _travels(form, SLOTS)
    serves = Call(serve, what, key, request, served, _early if form.since else None)
    stores = Call(store, what, key, {**given, **stored})
    first = () if ask is None else Call(ask, Kind.HALO_KEYS, key, given, wanted)
    if not form.some:
        return first, serves, stores
    return Either((first, Maybe(serves), Maybe(stores)), Maybe(serves))


def _early(inbox: Payload, reply: Payload) -> str | None:
    """Return what one owner's versions must be, where some are none that its rows can have."""
    since = inbox["since"].t
    if "answered" in reply:
        since = since[reply["answered"].t]
    late = reply["version"].t > since[reply["changed"].t]
    return None if bool(late.all()) else LATER


def _travels(form: PullForm, rows: str, *, fewer: bool = False) -> FieldSpecs:
    """Return the specs of what comes for rows that are asked for, as many as `rows` says."""
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
# row as it was last sent if theirs is older. So what anybody holds after an exchange is the row
# that the owner would send, to within the bound, and the owner need not know who has asked.
#
# State of an owner: `moved/NAME` (B, ...) of each field of the form, int32 `moved/version` (B,);
# of a requester: `history/version` (S,). Versions are the numbers of batches before which rows
# were sent.
#
# B: boundary rows. S: halo slots. k: rows that are asked for.


SENT, SENT_VERSION, VERSION = "moved/", "moved/version", "history/version"


def blank_moved(form: PullForm, block: ClientBlock) -> dict[str, Stacked | Ragged]:
    """Return the state of clients that have neither sent nor got a row."""
    found: dict[str, Stacked | Ragged] = {}
    rows, device = len(block.halo.boundary), block.off.device
    for name, spec in form.fields.items():
        shape = (rows, *(n or 0 for n in spec.shape))
        t = torch.zeros(shape, dtype=spec.dtype or dtype_of(block), device=device)
        found[f"{SENT}{name}"] = Ragged(t, block.halo.boundary_off)
    for name, off in (SENT_VERSION, block.halo.boundary_off), (VERSION, block.halo.off):
        t = torch.full((int(off[-1]),), NO_VERSION, dtype=torch.int32, device=device)
        found[name] = Ragged(t, off)
    return found


def moved_specs(form: PullForm) -> FieldSpecs:
    """Return the specs of what a state holds."""
    sent = {f"{SENT}{name}": replace(spec, rows=BOUNDARY) for name, spec in form.fields.items()}
    version = FieldSpec(Ragged, (), torch.int32, low=NO_VERSION)
    return sent | {
        SENT_VERSION: replace(version, rows=BOUNDARY),
        VERSION: replace(version, rows=SLOTS),
    }


def row_values(fields: Mapping[str, Tensor]) -> list[Tensor]:
    """Return the rows (k, D) of each stage, float64, from fields `rows/I` and maybe `scale/I`."""
    found = []
    for name, t in fields.items():
        kind, _, number = name.partition("/")
        if kind == "rows":
            scale = fields.get(f"scale/{number}")
            found.append(from_small(t, scale, torch.float64))
    return found


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
    has = answered.t
    off = next(f.off for n, f in reply.items() if n != "answered" and isinstance(f, Ragged))
    place = check_places(row, block.halo.boundary_off, "boundary rows")[has]
    fresh = {name: field.t for name, field in reply.items() if name != "answered"}
    sent = {name: state[f"{SENT}{name}"].t for name in fresh}
    before = row_values({name: t[place] for name, t in sent.items()})
    distance, size = torch.zeros(2, len(place), dtype=torch.float64, device=place.device)
    for old, new in zip(before, row_values(fresh), strict=True):
        distance, size = distance + (new - old).square().sum(1), size + old.square().sum(1)
    version = state[SENT_VERSION].t
    within = (version[place] != NO_VERSION) & (distance <= bound**2 * size)
    forgot = since[has] > version[place]
    goes = ~within | forgot  # so does a row that is not finite, whose distance says nothing
    version = version.index_fill(0, place[goes], now)
    new_state = {**state, SENT_VERSION: Ragged(version, block.halo.boundary_off)}
    for name, t in fresh.items():
        sent[name] = sent[name].index_copy(0, place[goes], t[goes])
        new_state[f"{SENT}{name}"] = Ragged(sent[name], block.halo.boundary_off)
    changed = version[place] > since[has]
    later = place[changed]
    ends = offsets(segment_sum(changed.long(), off))
    out: dict[str, Stacked | Ragged] = {
        "answered": Ragged(has, row.off),
        "changed": Ragged(changed, off),
        "version": Ragged(version[later], ends),
    }
    return new_state, out | {name: Ragged(t[later], ends) for name, t in sent.items()}


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
    """Return the history of clients that know no row yet."""
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
    none = torch.zeros(block.num_clients, dtype=torch.int32, device=device)
    return fields | {PASSES: Stacked(none)}


def history_specs(model: Staged, *, features: bool) -> FieldSpecs:
    """Return what a state holds of a history; `features`: of those of the halo, too."""
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
    seen = state[SEEN].t
    if not halo:
        return StoredRows(own, {}, torch.zeros_like(seen, dtype=torch.bool))
    slots = {int(k.removeprefix(HALO)): f.t for k, f in state.items() if k.startswith(HALO)}
    return StoredRows(own, slots, seen != NEVER)


def with_own(
    state: State, block: ClientBlock, entered: Mapping[int, Tensor]
) -> dict[str, Stacked | Ragged]:
    """Return a state whose own rows are what has entered each stage, (n, D)."""
    return {**state, **{f"{OWN}{number}": Ragged(x, block.off) for number, x in entered.items()}}


def put_own_(state: State, rows: Tensor, entered: Mapping[int, Tensor]) -> None:
    """Write what has entered each stage, (k, D), to own rows (k,) of a state, in place."""
    for number, x in entered.items():
        state[f"{OWN}{number}"].t.index_copy_(0, rows, x)


def rows_form(model: Staged, *, small: bool = False, since: bool = False) -> PullForm:
    """Return what the pull of stored rows carries: those of every stage, of slots asked for.

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
    """Return the rows (k,) int64 of a block that boundary rows (k,) are."""
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
    asked = state[ASKED]
    assert isinstance(asked, Ragged)  # as the client left it
    place = check_places(asked, block.halo.off, "halo slots")[inbox["answered"].t]
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
    """Let every client fetch the features of its whole halo, once."""
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
    """Finish the first stage of a pass with what the client has itself. In, out: nothing.

    These are its own features, with degrees of its own graph; where it keeps those of its halo, all
    neighbors' features with their full degrees.
    """
    del inbox
    at, params = inputs_of(cfg, block, state, key, 0)
    z = before(params, at)
    arrived = torch.zeros_like(z)
    field = state.get(f"{HALO}0")
    if field is None:
        degree = block.adj.degree.to(z.dtype)[:, None]
        at = replace(at, reach=replace(at.reach, degree=degree, operators={}))
    else:
        first = under("pass/weights", state).items()
        whole = {name.removeprefix("0."): w[0] for name, w in first if name.startswith("0.")}
        sent = at.stage.conv.map(whole, field.t, block.halo.off)
        arrived = sparse_product(block.halo.adj, sent)
    new = {**state, "pass/z/0": Ragged(z, at.reach.off)}
    return finish(cfg, block, new, key, at, params, arrived), {}
