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
from typing import Literal

import torch
from torch import Tensor

from silograph.core.errors import ProtocolError
from silograph.core.key import Key
from silograph.core.kinds import Kind
from silograph.core.payload import Field, Payload, Ragged, Shared, offsets
from silograph.exchange.places import all_places, by_owner, places_in, rows_in
from silograph.federation.base import Federation, Op, positions_of
from silograph.federation.field_specs import BOUNDARY, SLOTS, FieldSpec, FieldSpecs, places
from silograph.federation.program import Call, Either, Maybe, Steps

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
