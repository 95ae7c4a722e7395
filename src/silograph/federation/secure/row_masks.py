"""Masks of partial sums of rows: the server adds rows that it cannot read.

A receiver needs the sum of what several silos, the contributors S of a row, send for it. In a call
contributor i sends

    x_i + sum over j in S other than i of +- mask(i, j) + pad(i, r)

modulo 2^64. Masks of pairs cancel in the sum. The receiver r, which knows S, subtracts the pads.
The server sees uniformly distributed values, and the receiver sees the sum of all parts. If both
follow the protocol and compare what they got, they still learn no part of a silo alone, as long as
one other contributor keeps its keys to itself.

Each pass through a model has keys of its own (X25519), drawn from the operating system. So a pass
that is done again has other masks, and no key is written down. Masks and pads of a call are
key streams of ChaCha20, whose keys HKDF makes of the pair's secret and of

- the number of the call in the pass, which the silo counts itself: no mask serves two calls;
- what the server has sent to all silos alike in the pass, such as weights: if it gives one silo
  other weights than the rest, its masks are others, too;
- a digest of the nodes to whose rows it belongs. Silos know these by their edges, so two silos that
  the server tells different things have different masks, and nobody can read what they send.

A silo knows by its edges who owns the rows of its slots, and which silos can contribute to its own
rows. Who else contributes to the row of a slot, it hears from the server. If the server tells them
different things, sums are noise, which receivers notice; nobody learns a part by it. If it tells
all the same, but leaves out a contributor in one pass or adds a silo without an edge to the node,
only the receiver can notice (`silograph.federation.secure.row_sets`). So a server that lies and a
receiver that helps it learn single parts by two passes.

The keys of silos are proved by a secret that all of them have. Against a server that lies, no silo
may work with it: the common secret is enough to forge keys of any other silo.

What receivers notice: masks that are left in a number of a row of k contributors pass the check
with a probability of k/1024, so in a row of 16 numbers with that to the power of 16. A row of one
number is not protected by it: of two contributors one row in 500 would be wrong silently.

Rows that are not summed are encrypted: the owner draws a key for a pass, seals it for the silos
that have edges to its rows, and adds (XOR) a key stream. So one message serves all receivers. They
have the key for all rows of the owner; what they do not ask for, the server does not send them.
Nothing authenticates these rows: the server can change bits of its choice in them.

s: own halo slots that take part. B: own boundary rows. C: clients. D: width of a row.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b

import numpy as np
import torch

from silograph.core.payload import Field, Payload, Ragged, Shared
from silograph.federation.field_specs import FieldSpecs
from silograph.federation.program import digest_of_fields
from silograph.federation.secure.masks import (
    KEY_BYTES,
    KeyPair,
    derive_key,
    expand_mask,
    seal,
    unseal,
)
from silograph.federation.secure.protocol import Prover, PublicKeys, check_keys
from silograph.federation.secure.row_form import (
    MOST_PART,
    OFFER_BYTES,
    SEALED_KEY_BYTES,
    RowNames,
    bytes_of_sets,
)
from silograph.federation.secure.row_sets import RowSets
from silograph.federation.secure.sums import SecureSums, SumError

NOBODY = bytes(OFFER_BYTES)  # in place of the keys of a silo that is away


@dataclass(frozen=True, eq=False)
class RowList:
    """Rows for which two silos have the same key stream, in the order of their nodes.

    Attributes:
        places: (m,) int64 among the silo's own slots or boundary rows.
        digest: of their nodes, the same at both silos.
    """

    places: np.ndarray
    digest: bytes

    @staticmethod
    def of(is_in: np.ndarray, node: np.ndarray) -> "RowList":
        """Return the list of marked rows; `node`: int64 name of the node of each row."""
        places = is_in.nonzero()[0]
        places = places[node[places].argsort(kind="stable")]
        return RowList(places, blake2b(node[places].astype("<i8").tobytes()).digest())


@dataclass(frozen=True, eq=False)
class Partner:
    """What a silo shares with another one in a pass.

    Attributes:
        position: of the other one among all silos.
        secret: of the pair.
        is_first: whether the silo adds the masks of the pair; the other one subtracts them.
        both: own slots to whose rows both contribute.
        sends: own slots whose rows the other one owns.
        receives: own boundary rows to which the other one contributes.
    """

    position: int
    secret: bytes
    is_first: bool
    both: RowList
    sends: RowList
    receives: RowList


@dataclass(frozen=True, eq=False)
class Agreement:
    """What the server sends before a pass.

    Attributes:
        silos: names of all.
        offers: (C, 64) uint8 keys and proofs, zeros of silos that are away.
        slot_sets: (s, W) uint8 contributors of the row of each slot, a bit for each silo.
        row_sets: (B, W) uint8 contributors of each boundary row.
    """

    silos: tuple[str, ...]
    offers: np.ndarray
    slot_sets: np.ndarray
    row_sets: np.ndarray


class RowMasks:
    """A silo's half of the masks of one pass: it offers keys, then masks and unmasks call by call.

    Args:
        name: of the silo.
        about: names run and round, for proofs of keys.
        prover: proves the own key, and checks those of others.
    """

    def __init__(self, name: str, about: bytes, prover: Prover) -> None:
        self._name, self._about, self._prover = name, about, prover
        self._keys = KeyPair.from_secret(os.urandom(KEY_BYTES))
        self._partners: list[Partner] | None = None
        self._slots = 0
        self._is_lost = np.zeros(0, bool)  # slots whose sum cannot be taken
        self._contributors = np.zeros(0, np.int64)  # number of each boundary row's
        self._sent_to_all = b""  # digest of what the server has sent to all silos in the pass
        self._calls = 0
        self._context = b""  # the number of the last call, and the digest at that time
        self._is_summed = True  # whether the sum of the last call has come
        self._row_key = os.urandom(KEY_BYTES)  # of own rows that are not summed
        self._keys_of_owners: dict[int, bytes] = {}  # of others' rows, by position
        self._place = np.zeros(0, np.int64)  # of the rows of slots at their owners
        self._sent_rows = self._received_rows = 0  # calls with such rows

    def note(self, fields: Payload) -> None:
        """Take note of fields that the server has sent to all silos alike, in order."""
        text = self._sent_to_all + digest_of_fields(fields)
        self._sent_to_all = blake2b(text, digest_size=32).digest()

    def offer(self) -> bytes:
        """Return the public key with its proof."""
        keys = PublicKeys(self._keys.public, b"", b"")
        return keys.mask + self._prover.prove(self._about, self._name, keys)

    def agree(self, agreement: Agreement, rows: RowNames) -> None:
        """Take the keys of all silos, and who contributes to which row.

        Args:
            agreement: what the server says.
            rows: slots that take part, and boundary rows.

        Raises:
            SumError: keys were taken before; keys that occur twice or that nobody has proved; or
                contributors that cannot be.
        """
        if self._partners is not None:
            raise SumError("expected the keys of a pass once, got them again")
        silos, offers = agreement.silos, agreement.offers
        position, owner = self._check_offers(silos, offers), rows.position_of_owners(silos)
        by_slot = _members(agreement.slot_sets, len(owner), len(silos))
        by_row = _members(agreement.row_sets, len(rows.row), len(silos))
        if (owner < 0).any() or not by_slot[:, position].all():
            raise SumError("expected this silo among the contributors of its slots, got others")
        if by_slot[np.arange(len(owner)), owner].any() or (by_row & ~rows.neighbors(silos)).any():
            raise SumError("expected contributors with edges to a node, got others")
        present = np.array([row.tobytes() != NOBODY for row in offers])
        self._slots, self._contributors = len(owner), by_row.sum(1)
        self._is_lost = (by_slot & ~present).any(1) | ~present[owner]
        self._partners = [
            self._partner(
                c,
                offers[c, :KEY_BYTES].tobytes(),
                RowList.of(by_slot[:, c], rows.slot),
                RowList.of(owner == c, rows.slot),
                RowList.of(by_row[:, c], rows.row),
            )
            for c in present.nonzero()[0].tolist()
            if c != position and (by_slot[:, c].any() or (owner == c).any() or by_row[:, c].any())
        ]

    def _check_offers(self, silos: Sequence[str], offers: np.ndarray) -> int:
        """Return the position of this silo among all."""
        own, texts = self.offer(), [row.tobytes() for row in offers]
        is_valid = len(silos) == len(texts) == len(set(silos)) and self._name in silos
        if not is_valid or texts[silos.index(self._name)] != own:
            raise SumError("expected this silo with its key among all silos, got others")
        seen: set[bytes] = set()
        for name, text in zip(silos, texts, strict=True):
            if text == NOBODY:  # away: its rows are left out, see `_is_lost`
                continue
            keys = PublicKeys(text[:KEY_BYTES], b"", b"", text[KEY_BYTES:])
            # With one key at two silos, masks that the server knows of one would hide the other.
            check_keys((keys.mask,), name, seen)
            seen.add(keys.mask)
            if text != own and not self._prover.accepts(self._about, name, keys):
                raise SumError(
                    f"expected a key that {name} has proved by the silos' secret, got another", name
                )
        return silos.index(self._name)

    def _partner(
        self, position: int, public: bytes, both: RowList, sends: RowList, receives: RowList
    ) -> Partner:
        secret = self._keys.agree(public)  # a key that `_check_offers` has seen
        return Partner(position, secret, self._keys.public < public, both, sends, receives)

    def mask(self, rows: np.ndarray, slots: np.ndarray | None) -> np.ndarray:
        """Return this silo's parts of the sums of the next call, masked, (k, D) int64.

        Args:
            rows: (k, D) int64 parts.
            slots: (k,) which of the own slots that take part they are for; None: all.

        Raises:
            SumError: no keys were agreed on, or the sum of the call before has not come.
        """
        if self._partners is None or not self._is_summed:
            raise SumError("expected keys and the sum of the call before, before more is masked")
        # The silo counts calls itself: a server that names a call twice gets no mask twice.
        self._calls, self._is_summed = self._calls + 1, False
        self._context = f"{self._calls}".encode() + self._sent_to_all
        place = _places(self._slots, slots, len(rows))
        total, width = rows.astype(np.int64).view(np.uint64), rows.shape[1]
        add = partial(self._add_stream, total, place, width)
        for partner in self._partners:
            subtract = not partner.is_first
            add(partner.both, partner.secret, b"mask", subtract=subtract)
            direction = b"pad, first to second" if partner.is_first else b"pad, second to first"
            add(partner.sends, partner.secret, direction)
        # No sum is taken of rows whose owner or a contributor is away, so their values must not
        # leave: without that silo's keys they have fewer masks. Random numbers stand in for them.
        lost = place[self._is_lost.nonzero()[0]]
        lost = lost[lost >= 0]
        noise = expand_mask(os.urandom(KEY_BYTES), len(lost) * width)
        total[lost] = noise.reshape(len(lost), width)
        return total.view(np.int64)

    def unmask(self, sums: np.ndarray, rows: np.ndarray | None) -> np.ndarray:
        """Return the sums of the last call without pads, (k, D) int64.

        Args:
            sums: (k, D) int64 as the server has added them.
            rows: (k,) own boundary rows that they are for; None: all.

        Raises:
            SumError: it was done already, or masks are left in a sum: silos were told different
                things, or not all parts were added.
        """
        if self._partners is None or self._is_summed:
            raise SumError("expected the sum of each call once, got it again")
        self._is_summed = True
        place = _places(len(self._contributors), rows, len(sums))
        total, width = sums.astype(np.int64).view(np.uint64), sums.shape[1]
        for partner in self._partners:
            direction = b"pad, second to first" if partner.is_first else b"pad, first to second"
            self._add_stream(
                total, place, width, partner.receives, partner.secret, direction, subtract=True
            )
        signed = total.view(np.int64)
        count = np.zeros(len(sums))
        count[place[place >= 0]] = self._contributors[place >= 0]
        # True parts are small; a mask that has not cancelled is uniform and nearly always large.
        most = np.abs(signed.astype(np.float64)).max(axis=1, initial=0)
        if (most > count * MOST_PART).any():
            raise SumError("expected sums of masked rows without masks, got some that have them")
        return signed

    def seal_row_key(self, recipients: np.ndarray) -> np.ndarray:
        """Return the key of the own rows, sealed for silos that have edges to them.

        Args:
            recipients: (m,) positions of these.

        Returns:
            (m, 56) uint8.

        Raises:
            SumError: a silo that does not ask for rows of this one in the pass.
        """
        partners = {p.position: p for p in self._agreed() if len(p.receives.places)}
        if not set(recipients.tolist()) <= partners.keys():
            raise SumError("expected silos with edges to this one's rows, got others")
        text = self._row_key + len(self._contributors).to_bytes(8)
        sealed = np.zeros((len(recipients), SEALED_KEY_BYTES), np.uint8)
        for row, position in enumerate(recipients.tolist()):
            partner = partners[position]
            key = derive_key(partner.secret, _direction(partner, is_own=True))
            sealed[row] = np.frombuffer(seal(key, text, b"row key"), np.uint8)
        return sealed

    def open_row_keys(self, owner: np.ndarray, sealed: np.ndarray, place: np.ndarray) -> None:
        """Take the keys that the owners of own slots have sealed.

        Args:
            owner: (m,) positions of the owners.
            sealed: (m, 56) what they have sealed.
            place: (s,) where the rows of own slots that take part stand among their owners'.

        Raises:
            SumError: an owner that has sealed something else or nothing, or has no such rows.
        """
        sealed_by = dict(zip(owner.tolist(), sealed, strict=True))
        for partner in self._agreed():
            at = partner.sends.places
            if not len(at):
                continue
            key = derive_key(partner.secret, _direction(partner, is_own=False))
            try:
                text = unseal(key, sealed_by[partner.position].tobytes(), b"row key")
            except (KeyError, ValueError):
                raise SumError(
                    "expected keys that owners of rows have sealed, got others"
                ) from None
            if len(place) != self._slots or int(place[at].max()) >= int.from_bytes(
                text[KEY_BYTES:]
            ):
                raise SumError("expected places among their owners' rows, got others")
            self._keys_of_owners[partner.position] = text[:KEY_BYTES]
        self._place = place

    def encrypt_rows(self, words: np.ndarray, rows: np.ndarray | None) -> np.ndarray:
        """Return own rows (k, D) of the next call encrypted; `rows`: places (k,), None for all."""
        self._agreed()
        self._sent_rows += 1
        place = np.arange(len(words)) if rows is None else rows
        encrypted: np.ndarray = words ^ _row_stream(self._row_key, self._sent_rows, place, words)
        return encrypted

    def decrypt_rows(self, words: np.ndarray) -> np.ndarray:
        """Return the rows (s, D) of own slots that take part.

        Raises:
            SumError: rows of other slots, or before keys.
        """
        self._received_rows += 1
        if len(words) != len(self._place) or len(words) != self._slots:
            raise SumError(f"expected rows of {self._slots} slots after their keys, got others")
        decrypted = words.copy()
        for partner in self._agreed():
            at = partner.sends.places
            if len(at):
                key = self._keys_of_owners[partner.position]
                decrypted[at] ^= _row_stream(key, self._received_rows, self._place[at], words)
        return decrypted

    def _agreed(self) -> list[Partner]:
        """Return the other silos; raise `SumError` before keys were agreed on."""
        if self._partners is None:
            raise SumError("expected keys of all silos before rows, got none")
        return self._partners

    def _add_stream(
        self,
        total: np.ndarray,
        place: np.ndarray,
        width: int,
        rows: RowList,
        secret: bytes,
        purpose: bytes,
        *,
        subtract: bool = False,
    ) -> None:
        """Add the key stream of some rows to a message (k, D), in place, or subtract it.

        Args:
            total: the message.
            place: where in it each own slot or boundary row stands, -1 if it does not.
            width: D.
            rows: to which the stream belongs.
            secret: of the pair.
            purpose: for what it is.
            subtract: whether it is subtracted.
        """
        if not len(rows.places):
            return
        about = b"\0".join((b"rows", purpose, self._context, rows.digest))
        stream = expand_mask(derive_key(secret, about), len(rows.places) * width)
        stream = stream.reshape(-1, width)
        at = place[rows.places]
        if subtract:
            total[at[at >= 0]] -= stream[at >= 0]
        else:
            total[at[at >= 0]] += stream[at >= 0]


def _direction(partner: Partner, *, is_own: bool) -> bytes:
    """Return for what a pair uses a key: from which of the two silos something comes."""
    return b"row key of the first" if partner.is_first is is_own else b"row key of the second"


def _row_stream(key: bytes, call: int, place: np.ndarray, words: np.ndarray) -> np.ndarray:
    """Return the key stream of an owner's rows at some places (k,), of the form of words (_, D)."""
    width, rows = words.shape[1], int(place.max(initial=-1)) + 1
    # Made up to the last wanted row, and the rest is discarded: ChaCha20 makes 1 GB in a second.
    seed = derive_key(key, b"rows of call " + str(call).encode())
    octets = expand_mask(seed, -(-rows * width * words.itemsize // 8)).view(np.uint8)
    stream = octets[: rows * width * words.itemsize].view(words.dtype).reshape(rows, width)
    chosen: np.ndarray = stream[place]
    return chosen


def _members(sets: np.ndarray, count: int, silos: int) -> np.ndarray:
    """Return sets (k, W) as (k, C) bool.

    Raises:
        SumError: they are not as many, or of another number of silos.
    """
    bits = np.unpackbits(sets, axis=1, bitorder="little").astype(bool)
    if sets.shape != (count, bytes_of_sets(silos)) or bits[:, silos:].any():
        raise SumError(f"expected {count} sets of {silos} silos, got others")
    return bits[:, :silos]


def _places(size: int, chosen: np.ndarray | None, count: int) -> np.ndarray:
    """Return where each of `size` rows stands in a message of some of them, -1 if nowhere."""
    if chosen is None:
        chosen = np.arange(size)
    if len(chosen) != count:
        raise SumError(f"expected {len(chosen)} rows to mask, got {count}")
    place = np.full(size, -1)
    place[chosen] = np.arange(count)
    return place


class RowMasker:
    """Masks the rows of a silo's messages: it reads and fills in the fields that specs mark.

    Args:
        name: of the silo.
        sums: what was agreed of secure aggregation.
        run: names the run.
        rows: what the silo knows of the rows that it exchanges.
        sets: contributors of its rows in earlier passes; None: there were none.
    """

    def __init__(
        self,
        name: str,
        sums: SecureSums,
        run: bytes,
        rows: RowNames,
        sets: RowSets | None = None,
    ) -> None:
        self._name, self._rows = name, rows
        self._sets = RowSets() if sets is None else sets
        self._prover = Prover(sums.secret, run, is_strict=sums.needs_proofs)
        self._masks: RowMasks | None = None  # of the pass
        self._slots: np.ndarray | None = None  # own slots that take part in it; None: all

    def unmask_inbox(self, specs: FieldSpecs, inbox: Payload) -> Payload:
        """Return what an op gets of an inbox; take the keys that came, or remove pads of sums."""
        unmasked = dict(inbox)
        if self._masks is not None:
            self._masks.note({n: f for n, f in inbox.items() if isinstance(f, Shared)})
        for name, spec in specs.items():
            if spec.masking == "keys":
                agreement = _agreement_in(inbox)
                # The sets of a pass over some slots change with the slots, so they cannot be
                # compared with earlier ones.
                if self._slots is not None:
                    self._pass().agree(agreement, self._rows.with_part(self._slots))
                    continue
                self._pass().agree(agreement, self._rows)
                self._sets.check(agreement.silos, agreement.row_sets)
            elif spec.masking == "sum":
                row = inbox.get("row")
                rows = None if row is None else _numbers(row)
                sums = self._pass().unmask(_numbers(inbox[name]), rows)
                unmasked[name] = _with(inbox[name], sums)
            elif spec.masking == "opened":
                owner, place = _numbers(inbox["owner"]), _numbers(inbox["place"])
                self._pass().open_row_keys(owner, _numbers(inbox[name]), place)
            elif spec.masking == "halo":
                rows = self._pass().decrypt_rows(_numbers(inbox[name]))
                unmasked[name] = _with(inbox[name], rows)
        return unmasked

    def mask_reply(self, specs: FieldSpecs, reply: Payload, inbox: Payload, number: int) -> Payload:
        """Return what leaves of a reply: an offer of new keys, or masked rows.

        Args:
            specs: of the reply.
            reply: as the op has returned it.
            inbox: of the call.
            number: of the round.
        """
        masked = dict(reply)
        for name, spec in specs.items():
            if spec.masking == "key":
                self._masks = RowMasks(self._name, f"rows {number}".encode(), self._prover)
                self._slots = _slots_in(reply)
                offer = np.frombuffer(self._masks.offer(), np.uint8)
                masked[name] = _with(reply[name], offer[None].copy())
            elif spec.masking == "part":
                places = _slots_in(reply)
                if places is not None and self._slots is not None:
                    places = np.searchsorted(self._slots, places)
                masked[name] = _with(reply[name], self._pass().mask(_numbers(reply[name]), places))
            elif spec.masking == "sealed":
                sealed = self._pass().seal_row_key(_numbers(inbox["recipient"]))
                masked[name] = _with(reply[name], sealed)
            elif spec.masking == "own":
                row = inbox.get("row")
                place = None if row is None else _numbers(row)
                own = self._pass().encrypt_rows(_numbers(reply[name]), place)
                masked[name] = _with(reply[name], own)
        return masked

    def _pass(self) -> RowMasks:
        if self._masks is None:
            raise SumError("expected keys for masks of rows before rows, got none")
        return self._masks


def _agreement_in(inbox: Payload) -> Agreement:
    """Return the agreement in a message.

    Raises:
        SumError: names that are no text.
    """
    try:
        silos = _numbers(inbox["silos"]).tobytes().decode().split("\n")
    except UnicodeDecodeError:
        raise SumError("expected names of silos beside their keys, got other bytes") from None
    keys, slot_sets, row_sets = (
        _numbers(inbox[name]) for name in ("keys", "slot_silos", "row_silos")
    )
    return Agreement(tuple(silos), keys, slot_sets, row_sets)


def _slots_in(reply: Payload) -> np.ndarray | None:
    """Return the slots that a reply names, None if it is of all."""
    return None if "slot" not in reply else _numbers(reply["slot"])


def _numbers(field: Field) -> np.ndarray:
    numbers: np.ndarray = field.t.cpu().numpy()
    return numbers


def _with(field: Field, values: np.ndarray) -> Field:
    """Return a field of rows with other values."""
    assert isinstance(field, Ragged)  # by its spec
    return Ragged(torch.from_numpy(values).to(field.t.device), field.off)
