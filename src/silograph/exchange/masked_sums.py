"""Keys for masked partial sums: before a pass silos agree on them, in two calls.

    offer_keys        each silo sends a public key, and where not all rows take part its slots
    agree_on_keys     all get all keys, and who else contributes to the rows of their slots

Ops draw no keys: they know only what is the same in a simulation, which adds fixed-point numbers
without masks. A silo of a session puts its key in the place of zeros, and masks what leaves
(`silograph.federation.secure.row_masks`). So both count the same bytes and get the same sums.

Where rows of single nodes cross, two more calls follow, for keys by which these are encrypted:

    seal_row_keys     each silo seals the key of its rows for each other one
    open_row_keys     all get what others have sealed for them, and where the rows of slots stand

A silo leaves out the rows to which fewer silos contribute than the run's minimum.

C: clients. S: halo slots. s: those that take part. B: boundary rows. W: bytes of a set of clients.
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Any

import torch
from torch import Tensor

from silograph.core.kinds import Kind
from silograph.core.payload import Payload, Ragged, Shared, offsets, owners
from silograph.exchange.pass_state import PassState, reach_of
from silograph.exchange.rows import all_places, by_owner, places_in, ragged_field
from silograph.federation.base import Federation, positions_of
from silograph.federation.field_specs import (
    BOUNDARY,
    ONE,
    SLOTS,
    FieldSpec,
    FieldSpecs,
    Masking,
    places,
)
from silograph.federation.messages import Empty
from silograph.federation.ops import CallContext, ClientOp, Clients, Exchange, op
from silograph.federation.program import Steps
from silograph.federation.secure.row_form import (
    OFFER_BYTES,
    SEALED_KEY_BYTES,
    contributors_of,
    count_silos,
)
from silograph.federation.secure.sizes import names_as_bytes
from silograph.graph.block.block import Route

# --- Messages ------------------------------------------------------------------------------------


def slots_spec(form: Any) -> FieldSpecs:
    """Return the spec of slots that take part, where not all do."""
    return {"slot": places(SLOTS)} if form.is_named else {}


@dataclass(frozen=True)
class OfferedKey:
    """A silo's public key for a pass.

    Attributes:
        key: (C, 64) uint8 with its proof; zeros in a simulation.
        slot: (s,) int32 halo slots for which the silo sends something, where these are not all.
    """

    key: Annotated[Ragged, FieldSpec(Ragged, (OFFER_BYTES,), torch.uint8, rows=ONE, masking="key")]
    slot: Annotated[Ragged | None, slots_spec]


def sets_of_slots(form: Any) -> FieldSpec:
    """Return the spec of sets of clients, one for each slot that takes part."""
    return FieldSpec(Ragged, (None,), torch.uint8, rows=SLOTS, fewer=form.is_named)


@dataclass(frozen=True)
class AgreedKeys:
    """The keys of all silos, and who contributes to what.

    Attributes:
        silos: their names.
        keys: (C, 64) uint8, zeros of silos that are away.
        slot_silos: (s, W) uint8 silos that contribute to the row of each slot that takes part, a
            bit for each.
        row_silos: (B, W) uint8 the same of the own boundary rows.
    """

    silos: Annotated[Tensor, FieldSpec(Shared, (None,), torch.uint8)]
    keys: Annotated[Tensor, FieldSpec(Shared, (None, OFFER_BYTES), torch.uint8, masking="keys")]
    slot_silos: Annotated[Ragged, sets_of_slots]
    row_silos: Annotated[Ragged, FieldSpec(Ragged, (None,), torch.uint8, rows=BOUNDARY)]


@dataclass(frozen=True)
class Recipients:
    """Positions (m,) int32 of the silos that get rows of a client."""

    recipient: Annotated[
        Ragged, FieldSpec(Ragged, (), torch.int32, rows=SLOTS, fewer=True, low=0, ascending=True)
    ]


def sealed_spec(rows: str, masking: Masking) -> FieldSpec:
    """Return the spec of sealed keys (m, 56)."""
    return FieldSpec(Ragged, (SEALED_KEY_BYTES,), torch.uint8, rows=rows, masking=masking)


@dataclass(frozen=True)
class SealedKeys:
    """The key of a silo's rows, sealed for each recipient, (m, 56) uint8; zeros in a simulation."""

    sealed: Annotated[Ragged, sealed_spec("inbox/recipient", "sealed")]


@dataclass(frozen=True)
class KeysOfOwners:
    """What owners of rows have sealed for a silo.

    Attributes:
        owner: (m,) int32 their positions.
        sealed: (m, 56) uint8.
        place: (s,) int32 where the rows of the slots that take part stand among their owners'.
    """

    owner: Annotated[
        Ragged, FieldSpec(Ragged, (), torch.int32, rows=SLOTS, fewer=True, low=0, ascending=True)
    ]
    sealed: Annotated[Ragged, sealed_spec("own/owner", "opened")]
    place: Annotated[
        Ragged,
        lambda form: FieldSpec(Ragged, (), torch.int32, rows=SLOTS, fewer=form.is_named, low=0),
    ]


# --- The clients' part ---------------------------------------------------------------------------


@op(Kind.KEYS)
def offer_keys(clients: Clients, state: PassState, _: Empty) -> tuple[PassState, OfferedKey]:
    """Make room for a key, and name the slots that take part."""
    off = clients.block.off
    ends = torch.arange(clients.block.num_clients + 1, device=off.device)
    room = torch.zeros(len(ends) - 1, OFFER_BYTES, dtype=torch.uint8, device=off.device)
    reach = reach_of(clients, state)
    slot = None if reach.slots is None else Ragged(reach.slots, reach.slot_off)
    return state, OfferedKey(Ragged(room, ends), slot)


@op(Kind.KEYS)
def agree_on_keys(
    clients: Clients, state: PassState, request: AgreedKeys
) -> tuple[PassState, Empty]:
    """Store how many silos contribute to the row of each slot, where a least number is asked."""
    if clients.cfg.row_minimum.silos == 1:
        return state, Empty()
    silos = request.slot_silos
    return replace(state, contributors=Ragged(count_silos(silos.t), silos.off)), Empty()


@op(Kind.KEYS)
def seal_row_keys(
    _clients: Clients, state: PassState, request: Recipients
) -> tuple[PassState, SealedKeys]:
    """Make room for keys."""
    recipient = request.recipient
    shape = len(recipient.t), SEALED_KEY_BYTES
    room = torch.zeros(shape, dtype=torch.uint8, device=recipient.t.device)
    return state, SealedKeys(Ragged(room, recipient.off))


@op(Kind.KEYS)
def open_row_keys(_clients: Clients, state: PassState, _: KeysOfOwners) -> tuple[PassState, Empty]:
    """Change nothing: keys are no state."""
    return state, Empty()


# --- The server's part ---------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class PairsOfSilos:
    """Pairs of an owner of rows, and a silo that gets some of them.

    Attributes:
        owner: (m,) int64, ascending.
        recipient: (m,) int64, ascending for each owner.
        clients: C.
        place: (s,) int32 where the rows of slots stand among their owners'.
    """

    owner: Tensor
    recipient: Tensor
    clients: int
    place: Tensor

    @staticmethod
    def of(route: Route, slots: Tensor) -> "PairsOfSilos":
        """Return the pairs for whose slots (s,) rows are sent."""
        clients, target = len(route.slot_off) - 1, route.target[slots]
        owner = torch.searchsorted(route.boundary_off, target, right=True) - 1
        pairs = torch.unique(owner * clients + owners(route.slot_off)[slots])
        place = (target - route.boundary_off[owner]).int()
        return PairsOfSilos(pairs // clients, pairs % clients, clients, place)

    @property
    def recipients(self) -> Ragged:
        """The recipients of each owner."""
        count = torch.bincount(self.owner, minlength=self.clients)
        return Ragged(self.recipient.int(), offsets(count))

    def keys_of_owners(self, sealed: Tensor) -> dict[str, Ragged]:
        """Return the owners of each recipient, and what they have sealed (m, 56) for it."""
        order = torch.argsort(self.recipient, stable=True)
        off = offsets(torch.bincount(self.recipient, minlength=self.clients))
        return {
            "owner": Ragged(self.owner[order].int(), off),
            "sealed": Ragged(sealed[order], off),
        }


@dataclass(frozen=True)
class KeyExchange(Exchange):
    """Keys for one pass.

    Attributes:
        offer: replies `key`, and perhaps `slot`.
        agree: gets what `AgreedKeys` has.
        seal: replies `sealed`; None: no row of a single node crosses.
        open: gets what `KeysOfOwners` has.
    """

    offer: ClientOp[Empty, OfferedKey]
    agree: ClientOp[AgreedKeys, Empty]
    seal: ClientOp[Recipients, SealedKeys] | None = None
    open: ClientOp[KeysOfOwners, Empty] | None = None

    def steps(self, context: CallContext, *, only_answers: bool = False) -> tuple[Steps, ...]:
        """Return the calls, which are of kind `keys` in evaluations, too."""
        return super().steps(replace(context, kind=None), only_answers=only_answers)

    def carry(self, fed: Federation, request: Any, context: CallContext) -> None:
        """Send the keys of all silos to all, and to each who contributes to its rows."""
        del request  # ops get nothing else
        call = partial(
            fed.call,
            what=Kind.KEYS,
            key=context.key,
            to=context.to,
            allow_missing=context.allow_missing,
        )
        reply = call(self.offer, {}, rows=True)
        if not reply:  # all have gone
            return
        call(self.agree, self._agreed(fed, reply, context))
        if self.seal is not None and self.open is not None:
            slots, off = self._slots(fed, reply, context)
            pairs = PairsOfSilos.of(fed.route, slots)
            sealed = call(self.seal, {"recipient": pairs.recipients}, rows=True)
            keys = ragged_field(sealed, "sealed", self.seal)
            call(self.open, pairs.keys_of_owners(keys.t) | {"place": Ragged(pairs.place, off)})

    def _slots(
        self, fed: Federation, reply: Payload, context: CallContext
    ) -> tuple[Tensor, Tensor]:
        """Return the slots that take part (s,) int64, and offsets (C + 1,) of the clients."""
        route, members = fed.route, positions_of(fed.ids, context.to)
        if "slot" in reply:
            slot_names = ragged_field(reply, "slot", self.offer)
            return places_in(slot_names, route.slot_off, members, self.offer), slot_names.off
        # Also of silos that are away: nobody may take what others send for a whole sum.
        return all_places(route.slot_off, members), offsets(route.slot_off.diff()[members])

    def _agreed(self, fed: Federation, reply: Payload, context: CallContext) -> Payload:
        route, members = fed.route, positions_of(fed.ids, context.to)
        offers = ragged_field(reply, "key", self.offer)
        keys = torch.zeros(len(fed.ids), OFFER_BYTES, dtype=torch.uint8)
        keys[members[offers.off.diff() > 0]] = offers.t
        slots, off = self._slots(fed, reply, context)
        sets, target = contributors_of(route, slots), route.target[slots]
        rows = all_places(route.boundary_off, members)
        names = torch.tensor(list(names_as_bytes(fed.ids)), dtype=torch.uint8)
        return {
            "silos": Shared(names),
            "keys": Shared(keys),
            "slot_silos": Ragged(sets[target], off),
            "row_silos": Ragged(sets[rows], by_owner(rows, route.boundary_off, members)[1]),
        }


KEY_EXCHANGE = KeyExchange(offer_keys, agree_on_keys)
ROW_KEY_EXCHANGE = KeyExchange(offer_keys, agree_on_keys, seal_row_keys, open_row_keys)
