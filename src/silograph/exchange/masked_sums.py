"""Keys for masked partial sums: before a pass silos agree on them, in two calls.

    offer_keys        each silo sends a public key, and where not all rows take part its slots
    agree_on_keys     all get all keys, and who else contributes to the rows of their slots

Ops draw no keys: they know only what is the same in a simulation, which adds fixed-point numbers
without masks. A silo of a session puts its key in the place of zeros, and masks what leaves
(`silograph.federation.secure.row_masks`). So both count the same bytes and get the same sums.

A silo leaves out the rows to which fewer silos contribute than the run's minimum.

C: clients. S: halo slots. s: those that take part. B: boundary rows. W: bytes of a set of clients.
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Any

import torch
from torch import Tensor

from silograph.core.kinds import Kind
from silograph.core.payload import Payload, Ragged, Shared, offsets
from silograph.exchange.pass_state import PassState, reach_of
from silograph.exchange.rows import all_places, by_owner, places_in, ragged_field
from silograph.federation.base import Federation, positions_of
from silograph.federation.field_specs import BOUNDARY, ONE, SLOTS, FieldSpec, FieldSpecs, places
from silograph.federation.messages import Empty
from silograph.federation.ops import CallContext, ClientOp, Clients, Exchange, op
from silograph.federation.program import Steps
from silograph.federation.secure.row_form import OFFER_BYTES, contributors_of, count_silos
from silograph.federation.secure.sizes import names_as_bytes

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


# --- The server's part ---------------------------------------------------------------------------


@dataclass(frozen=True)
class KeyExchange(Exchange):
    """Keys for one pass.

    Attributes:
        offer: replies `key`, and perhaps `slot`.
        agree: gets what `AgreedKeys` has.
    """

    offer: ClientOp[Empty, OfferedKey]
    agree: ClientOp[AgreedKeys, Empty]

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
        if reply:  # else all have gone
            call(self.agree, self._agreed(fed, reply, context))

    def _agreed(self, fed: Federation, reply: Payload, context: CallContext) -> Payload:
        route, members = fed.route, positions_of(fed.ids, context.to)
        offers = ragged_field(reply, "key", self.offer)
        keys = torch.zeros(len(fed.ids), OFFER_BYTES, dtype=torch.uint8)
        keys[members[offers.off.diff() > 0]] = offers.t
        if "slot" in reply:
            slots = places_in(reply, "slot", route.slot_off, members, self.offer)
            off = ragged_field(reply, "slot", self.offer).off
        else:  # also of silos that are away: nobody may take what others send for a whole sum
            slots = all_places(route.slot_off, members)
            off = offsets(route.slot_off.diff()[members])
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
