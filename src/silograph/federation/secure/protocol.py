"""One sum over silos, of which the server learns the total and nothing else.

Bonawitz, Ivanov, Kreuter, Marcedone, McMahan, Patel, Ramage, Segal and Seth, "Practical secure
aggregation for privacy-preserving machine learning", CCS 2017, with the graph of Bell et al. 2020
from 50 silos on (`silograph.federation.secure.partners`). For each sum:

1. *Keys*: each silo makes two pairs of keys, one for masks and one for sealed shares.
2. *Shares*: it splits the secret of its mask keys and that of its own mask, and seals a share of
   each for every partner. Digests of the shares are sent along: they show who sent a wrong one.
3. *Masked values*: y = x + own mask + sum over partners of +- the mask of the pair, modulo 2^64.
   Masks of pairs cancel in the sum of all silos.
4. *Confirmation*: the server lists who has sent y and who has vanished. Each silo authenticates the
   list to each partner. This is round 3 of the protocol against a server that lies (Bonawitz et
   al., figure 4), with a keyed hash for each pair in place of signatures: nobody but the partner
   has to check it.
5. *Unmasking*: a silo goes on if a threshold of itself and its partners has confirmed the same
   list. For each silo that sent y it reveals its share of that one's own mask; for each that
   vanished between 2 and 3, that of its mask keys. Nobody reveals both, so a y that comes late is
   never unmasked.

All secrets are drawn anew for each sum. A round that is done again takes fresh masks, and a silo
takes each step of a sum once. What it allows of a second sum of the same values is in
`silograph.federation.secure.revealed`.

The server is trusted to forward public keys unchanged, unless silos share a secret by which they
prove them (`Prover`). Beyond that it may lie. The threshold is more than two thirds, so it cannot
get two lists confirmed, unless as many silos help it as two thresholds have in common. Against a
server that lies, no silo may give it the secret: that is enough to forge the keys of any other.

A share that a silo cannot read, or that is not what its dealer has committed to, costs that share
only. The silo reports it with its confirmation, and the server names a dealer of too many.
"""

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from hmac import compare_digest

import numpy as np

from silograph.federation.secure.masks import (
    SEAL_BYTES,
    KeyPair,
    add_mask,
    derive_key,
    is_public_key,
    seal,
    unseal,
)
from silograph.federation.secure.partners import (
    holders_are_present,
    is_sparse,
    partners_of,
    topology_of,
)
from silograph.federation.secure.revealed import RevealedSums, digest_of_values
from silograph.federation.secure.shamir import (
    BYTES,
    from_bytes,
    lagrange_coefficients,
    new_secret,
    recover_secret,
    split_secret,
    to_bytes,
)
from silograph.federation.secure.sizes import (
    PROOF_BYTES,
    SEED_BYTES,
    TAG_BYTES,
    digest_of_names,
    names_as_bytes,
)
from silograph.federation.secure.sums import SumError

DIGEST_BYTES = 16
SEALED_BYTES = 2 * BYTES + SEAL_BYTES
DEALT_BYTES = SEALED_BYTES + 2 * DIGEST_BYTES
STATES = ABSENT, PRESENT, VANISHED = 0, 1, 2  # of silos: dealt no shares, sent y, or sent none


@dataclass(frozen=True)
class PublicKeys:
    """The public keys of a silo for one sum.

    Attributes:
        mask: for the masks of pairs, 32 bytes.
        channel: for sealed shares, 32 bytes.
        own_digest: of the secret of its own mask, by which the server notices wrong shares.
        proof: that these are the silo's own; see `Prover`.
    """

    mask: bytes
    channel: bytes
    own_digest: bytes
    proof: bytes = b""

    @property
    def text(self) -> bytes:
        """What is proved."""
        return self.mask + self.channel + self.own_digest


@dataclass(frozen=True)
class Dealt:
    """What a silo deals to one holder of its shares.

    Attributes:
        sealed: both shares, which the recipient alone can read.
        mask_digest: of the share of its mask keys.
        own_digest: of the share of its own mask.
    """

    sealed: bytes
    mask_digest: bytes
    own_digest: bytes


@dataclass(frozen=True)
class Confirmation:
    """A silo's confirmation of who is there.

    Attributes:
        tags: that authenticate the list to each partner, by its name.
        unusable: dealers whose shares it could not use.
    """

    tags: Mapping[str, bytes]
    unusable: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Revealed:
    """The shares that a silo reveals: those of own masks, and those of mask keys, by silo."""

    own: Mapping[str, bytes]
    mask: Mapping[str, bytes]


def _digest(data: bytes, about: bytes) -> bytes:
    return blake2b(
        data, digest_size=DIGEST_BYTES, key=blake2b(about, digest_size=32).digest()
    ).digest()


def _channel_context(about: bytes, sender: str, receiver: str) -> bytes:
    return b"\0".join((b"shares", about, sender.encode(), receiver.encode()))


def _agree(keys: KeyPair, other: bytes, name: str) -> bytes:
    """Return the secret shared with silo `name`, whose public key is `other`."""
    try:
        return keys.agree(other)
    except ValueError as error:
        raise SumError(f"expected a public key of {name}, got one that is none", name) from error


def _add_pair_mask(
    total: np.ndarray, keys: KeyPair, other: bytes, about: bytes, own: str, name: str
) -> None:
    """Add what silo `own` adds for its pair with `name`, in place: the mask, or it negated."""
    first, second = sorted((own, name))
    context = b"\0".join((b"pair", about, first.encode(), second.encode()))
    secret = _agree(keys, other, first if own != first else second)
    add_mask(total, derive_key(secret, context), subtract=own != first)


def _own_seed(secret: int) -> bytes:
    return derive_key(to_bytes(secret), b"own mask")


def check_keys(keys: Sequence[bytes], name: str, others: Collection[bytes]) -> None:
    """Raise `SumError` for public keys that are none, or that somebody has sent before.

    Args:
        keys: all public keys of silo `name`.
        name: of whom they are.
        others: public keys of other silos.
    """
    if not all(map(is_public_key, keys)):
        raise SumError(f"expected public keys of {name}, got some that are none", name)
    if len(set(keys)) < len(keys) or set(keys) & set(others):
        raise SumError(f"expected different public keys from every silo, got {name}'s twice", name)


class Prover:
    """Proves to silos that share a secret that public keys are a silo's own.

    A proof is a keyed BLAKE2b of what the keys are for. The server does not know the secret, so it
    can neither put keys of its own in place of a silo's nor invent a silo. Every silo can: one that
    gives the server the secret, or forges proofs for it, breaks this for all.

    Args:
        secret: of the silos; None: there is none, and no proof.
        run: names the run, so that keys of another run prove nothing.
        is_strict: whether keys without a valid proof are refused.
    """

    def __init__(self, secret: bytes | None, run: bytes, *, is_strict: bool) -> None:
        self._key = None if secret is None else blake2b(secret, digest_size=64).digest()
        self.run, self.is_strict = run, is_strict

    def prove(self, about: bytes, name: str, keys: PublicKeys) -> bytes:
        """Return the proof of a silo's keys for a sum, 32 bytes; zeros without a secret."""
        if self._key is None:
            return bytes(PROOF_BYTES)
        parts = (b"silograph secure sum 1", self.run, about, name.encode(), keys.text)
        return blake2b(b"\0".join(parts), digest_size=PROOF_BYTES, key=self._key).digest()

    def accepts(self, about: bytes, name: str, keys: PublicKeys) -> bool:
        """Whether keys are taken as those of a silo."""
        return not self.is_strict or compare_digest(self.prove(about, name, keys), keys.proof)

    def order_seed(self, about: bytes, called: bytes) -> bytes:
        """Return the seed of the order of partners, 32 bytes.

        With a secret nobody else can compute it before the silos that are called are fixed.

        Args:
            about: names the sum.
            called: digest of the names of all silos that are called.
        """
        if self._key is None:
            return default_seed(about)
        text = b"\0".join((b"order 1", self.run, about, called))
        return blake2b(text, digest_size=SEED_BYTES, key=self._key).digest()


def default_seed(about: bytes) -> bytes:
    """Return the seed of the order of partners among silos without a common secret."""
    return blake2b(about, digest_size=SEED_BYTES).digest()


NO_PROVER = Prover(None, b"", is_strict=False)


# --- At a silo -----------------------------------------------------------------------------------


class SiloSum:
    """A silo's half of one sum. Each step is taken once, in order.

    Args:
        name: of the silo.
        about: names the sum: run, round and call.
        least: fewest silos of a sum in which it takes part and which it helps to unmask.
        prover: proves its public keys, and checks those of others.
        draw: draws secrets.
        called: digest of the names of all silos that are called; see `digest_of_names`.
        history: of the sums that this silo has helped to unmask; None: there are none.
    """

    def __init__(
        self,
        name: str,
        about: bytes,
        least: int = 2,
        prover: Prover = NO_PROVER,
        draw: Callable[[], int] = new_secret,
        *,
        called: bytes = b"",
        history: RevealedSums | None = None,
    ) -> None:
        self._name, self._about, self._least, self._prover = name, about, max(least, 2), prover
        self._called, self._history = called, RevealedSums() if history is None else history
        self._mask_secret, self._own_secret = draw(), draw()
        self._mask_keys = KeyPair.from_secret(to_bytes(self._mask_secret))
        self._channel = KeyPair.from_secret(to_bytes(draw()))
        self._steps: list[str] = []
        self._keys: Mapping[str, PublicKeys] = {}
        self._shares: dict[str, tuple[bytes, bytes]] = {}  # by whose they are: mask keys, own mask
        self._channel_secrets: dict[str, bytes] = {}  # by partner
        self._silos: tuple[str, ...] = ()
        self._partners: tuple[str, ...] = ()
        self._threshold = 0
        self._masked_with: tuple[str, ...] = ()
        self._own_keys: PublicKeys | None = None
        self._values_digest = ""
        self._states: Mapping[str, int] = {}  # of all silos, as confirmed
        self.seed = prover.order_seed(about, called)

    def _take(self, step: str, before: tuple[str, ...]) -> None:
        if tuple(self._steps) != before:
            raise SumError(
                f"expected each step of a secure sum once and in order, got {step} after "
                f"{', '.join(self._steps) or 'none'}"
            )
        self._steps.append(step)

    def advertise(self) -> PublicKeys:
        """Return the silo's public keys."""
        self._take("keys", ())
        digest = _digest(to_bytes(self._own_secret), self._about)
        keys = PublicKeys(self._mask_keys.public, self._channel.public, digest)
        keys = replace(keys, proof=self._prover.prove(self._about, self._name, keys))
        self._own_keys = keys
        return keys

    def share(
        self, keys: Mapping[str, PublicKeys], silos: Sequence[str], seed: bytes | None = None
    ) -> dict[str, Dealt]:
        """Return the shares of this silo's secrets, for its partners that have sent keys.

        Args:
            keys: of this silo and its partners, by name.
            silos: all silos of the sum.
            seed: of the order of partners; None is this silo's own.

        Raises:
            SumError: too few silos, other partners than the sum's, keys that somebody else has
                made, or keys that occur twice. It names the silo whose keys are wrong.
        """
        self._take("shares", ("keys",))
        self._join(silos, self.seed if seed is None else seed)
        self._check_keys(keys)
        self._keys = dict(keys)
        holders = sorted((self._name, *self._partners))
        points = range(1, len(holders) + 1)
        mask_shares = split_secret(self._mask_secret, self._threshold, points)
        own_shares = split_secret(self._own_secret, self._threshold, points)
        dealt = {}
        for point, recipient in enumerate(holders, 1):
            pair = to_bytes(mask_shares[point]), to_bytes(own_shares[point])
            if recipient == self._name:
                self._shares[self._name] = pair
                digests = tuple(_digest(part, self._about) for part in pair)
                dealt[recipient] = Dealt(b"", *digests)
                continue
            if recipient not in keys:
                continue
            context = _channel_context(self._about, self._name, recipient)
            secret = _agree(self._channel, keys[recipient].channel, recipient)
            self._channel_secrets[recipient] = secret
            key = derive_key(self._channel_secrets[recipient], context)
            digests = tuple(_digest(part, self._about) for part in pair)
            dealt[recipient] = Dealt(seal(key, b"".join(pair), context), *digests)
        return dealt

    def _join(self, silos: Sequence[str], seed: bytes) -> None:
        """Take the silos of the sum, of which this is one, and their order."""
        names = tuple(silos)
        if len(set(names)) != len(names) or self._name not in names or len(names) < self._least:
            raise SumError(
                f"expected at least {self._least} silos in a secure sum, got {len(set(names))}"
            )
        if is_sparse(len(names)):
            if self._called and digest_of_names(names) != self._called:
                raise SumError("expected a secure sum of all silos that were called, got others")
            if self._prover.is_strict and seed != self.seed:
                raise SumError("expected partners in the order of the silos' secret, got another")
        self._silos, self.seed = names, seed
        self._partners = partners_of(names, seed)[self._name]
        self._threshold = topology_of(len(names)).threshold

    def _check_keys(self, keys: Mapping[str, PublicKeys]) -> None:
        others = keys.keys() - {self._name}
        if not others <= set(self._partners) or keys.get(self._name) != self._own_keys:
            raise SumError("expected the public keys of this silo and its partners, got others")
        if len(keys) < self._threshold:
            raise SumError(
                f"expected keys of at least {self._threshold - 1} of the silo's partners, got "
                f"those of {len(others)}"
            )
        seen: set[bytes] = set()
        for name in (self._name, *(n for n in self._partners if n in others)):
            public = keys[name].mask, keys[name].channel
            check_keys(public, name, seen)
            seen |= set(public)
            if name != self._name and not self._prover.accepts(self._about, name, keys[name]):
                raise SumError(
                    f"expected keys that {name} has proved by the silos' secret, got others", name
                )

    def mask(self, values: np.ndarray, dealt: Mapping[str, Dealt]) -> np.ndarray:
        """Return masked values.

        Args:
            values: (n,) uint64.
            dealt: what partners have dealt to this silo; those that vanished have dealt nothing.

        Raises:
            SumError: shares of others than partners, or of too few.
        """
        self._take("masked", ("keys", "shares"))
        if not set(dealt) <= self._channel_secrets.keys() or len(dealt) + 1 < self._threshold:
            raise SumError(
                f"expected shares of at least {self._threshold - 1} of the silo's partners, got "
                f"those of {len(dealt)}"
            )
        for name, part in dealt.items():
            pair = self._open(name, part)
            if pair is not None:
                self._shares[name] = pair
        self._masked_with = tuple(name for name in self._partners if name in dealt)
        self._values_digest = digest_of_values(values)
        if not is_sparse(len(self._silos)):  # others can unmask the sum without this silo
            silos = frozenset((self._name, *self._masked_with))
            call = self._about.decode()
            self._history.add_masked(call, self._values_digest, silos, self._threshold)
        total: np.ndarray = values.astype(np.uint64)  # a copy
        add_mask(total, _own_seed(self._own_secret))
        for name in self._masked_with:
            other = self._keys[name].mask
            _add_pair_mask(total, self._mask_keys, other, self._about, self._name, name)
        return total

    def _open(self, name: str, part: Dealt) -> tuple[bytes, bytes] | None:
        """Return the shares that a partner has dealt; None where they are not as it says."""
        context = _channel_context(self._about, name, self._name)
        try:
            text = unseal(derive_key(self._channel_secrets[name], context), part.sealed, context)
        except ValueError:
            return None
        pair = text[:BYTES], text[BYTES:]
        digests = tuple(_digest(share, self._about) for share in pair)
        return pair if digests == (part.mask_digest, part.own_digest) else None

    def confirm(self, states: Mapping[str, int]) -> Confirmation:
        """Confirm who is there to the silo's partners.

        Args:
            states: of all silos of the sum: PRESENT, VANISHED or ABSENT.

        Raises:
            SumError: other silos, too few of them, or a sum that is too much like an earlier one
                (`RevealedError`).
        """
        self._take("confirmed", ("keys", "shares", "masked"))
        dealers = {name for name in self._partners if states.get(name) != ABSENT}
        has_dealt = dealers == set(self._masked_with)
        are_known = set(states) == set(self._silos) and set(states.values()) <= set(STATES)
        if not are_known or not has_dealt or states[self._name] != PRESENT:
            raise SumError("expected the state of every silo of the sum, got others")
        present = frozenset(name for name, state in states.items() if state == PRESENT)
        if len(present) < self._least or not holders_are_present(self._silos, self.seed, present):
            raise SumError(
                f"expected a sum over at least {max(self._least, self._threshold)} silos, and as "
                f"many near each, got one over {len(present)}"
            )
        self._history.check(self._about.decode(), self._values_digest, present)
        self._states = dict(states)
        there = [name for name in self._masked_with if states[name] == PRESENT]
        tags = {name: self._tag(self._name, name) for name in there}
        return Confirmation(tags, frozenset(self._masked_with) - self._shares.keys())

    def _tag(self, sender: str, receiver: str) -> bytes:
        """Return what authenticates the list from one silo to another; this is one of them."""
        other = receiver if sender == self._name else sender
        key = derive_key(self._channel_secrets[other], b"confirm\0" + self._about)
        states = bytes(self._states[name] for name in self._silos)
        parts = (self._prover.run, self.seed, names_as_bytes(self._silos), states)
        digests = [blake2b(part, digest_size=32).digest() for part in parts]
        text = b"".join((*digests, sender.encode(), b"\0", receiver.encode()))
        return blake2b(text, digest_size=TAG_BYTES, key=key).digest()

    def reveal(self, tags: Mapping[str, bytes]) -> Revealed:
        """Return shares of the own masks of silos that are present, and of mask keys of others.

        Args:
            tags: by which partners have confirmed the list to this silo, by their names.

        Raises:
            SumError: fewer than the threshold have confirmed the same list, this silo included, or
                too few to rule out that an earlier sum was unmasked (`RevealedError`).
        """
        self._take("unmasking", ("keys", "shares", "masked", "confirmed"))
        state_of = self._states
        confirming = frozenset(
            name
            for name in self._masked_with
            if state_of[name] == PRESENT
            and compare_digest(self._tag(name, self._name), tags.get(name, b""))
        ) | {self._name}
        if len(confirming) < self._threshold:
            raise SumError(
                f"expected {self._threshold} silos to confirm the same list of silos, got "
                f"{len(confirming)}"
            )
        call, values = self._about.decode(), self._values_digest
        self._history.check_confirmed(call, values, confirming)
        present = frozenset(name for name, state in state_of.items() if state == PRESENT)
        self._history.add(call, values, present)
        return Revealed(
            own={name: s[1] for name, s in self._shares.items() if state_of[name] == PRESENT},
            mask={name: s[0] for name, s in self._shares.items() if state_of[name] == VANISHED},
        )


# --- At the server -------------------------------------------------------------------------------


@dataclass
class ServerSum:
    """The server's half of one sum: it hands on keys and shares, adds up, and unmasks.

    Attributes:
        about: names the sum.
        keys: of the silos that take part, by name.
        dealt: what each silo has dealt to each recipient.
        total: of the masked values so far.
        present: silos that sent masked values.
        confirmed: that these are there, by silo.
        revealed: shares by silo that revealed them.
        called: all silos that were called.
        seeds: of the order of partners, by silo.
    """

    about: bytes
    keys: dict[str, PublicKeys] = field(default_factory=dict)
    dealt: dict[str, Mapping[str, Dealt]] = field(default_factory=dict)
    total: np.ndarray | None = None
    present: list[str] = field(default_factory=list)
    confirmed: dict[str, Confirmation] = field(default_factory=dict)
    revealed: dict[str, Revealed] = field(default_factory=dict)
    called: tuple[str, ...] = ()
    seeds: dict[str, bytes] = field(default_factory=dict)

    @property
    def threshold(self) -> int:
        """How many silos near each must be there to the end; of a complete graph, of all."""
        return topology_of(len(self.silos)).threshold

    @property
    def tolerance(self) -> int:
        """How many silos are not believed about another one: as many as may be missing."""
        topology = topology_of(len(self.silos))
        return max(1, topology.partners + 1 - topology.threshold)

    @property
    def silos(self) -> tuple[str, ...]:
        """The silos of the sum: those with keys, or in a sparse graph all that were called.

        There a server that left silos out once it knows the order could choose who masks with whom.
        """
        return self.called if is_sparse(len(self.called)) else tuple(self.keys)

    @property
    def seed(self) -> bytes:
        """The seed of the order of partners that most silos have sent."""
        counts = Counter(self.seeds.values())
        return max(counts, key=lambda s: counts[s], default=default_seed(self.about))

    @property
    def partners(self) -> Mapping[str, tuple[str, ...]]:
        """The partners of each silo."""
        return partners_of(self.silos, self.seed)

    def add_keys(self, name: str, keys: PublicKeys, seed: bytes | None = None) -> None:
        """Take a silo's public keys and its seed of the order of partners.

        Raises:
            SumError: it has sent keys before, or they are none, or another silo's; it names it.
        """
        if name in self.keys or self.dealt:
            raise SumError(f"expected public keys of {name} once, got them again", name)
        seen = [key for each in self.keys.values() for key in (each.mask, each.channel)]
        check_keys((keys.mask, keys.channel), name, seen)
        self.keys[name] = keys
        if seed is not None:
            self.seeds[name] = seed

    def keys_for(self, name: str) -> dict[str, PublicKeys]:
        """Return the keys that a silo needs."""
        own = {name, *self.partners[name]}
        return {n: keys for n, keys in self.keys.items() if n in own}

    def add_shares(self, name: str, dealt: Mapping[str, Dealt]) -> None:
        """Take a silo's shares; raise `SumError` where they are not for its partners."""
        if name in self.dealt or self.present or set(dealt) != set(self.keys_for(name)):
            raise SumError(f"expected shares of {name} for its partners once, got others", name)
        self.dealt[name] = dict(dealt)

    def shares_for(self, name: str) -> dict[str, Dealt]:
        """Return what a silo's partners have dealt to it."""
        return {n: self.dealt[n][name] for n in self.partners[name] if n in self.dealt}

    def add_masked(self, name: str, values: np.ndarray) -> None:
        """Add a silo's masked values (n,) uint64; raise `SumError` where they are not expected."""
        if name not in self.dealt or name in self.present or self.confirmed:
            raise SumError(f"expected masked values of {name} once and in time, got others", name)
        if values.dtype != np.uint64 or (
            self.total is not None and self.total.shape != values.shape
        ):
            raise SumError(f"expected as many masked values from {name} as from the others", name)
        self.total = values.copy() if self.total is None else self.total + values
        self.present.append(name)

    @property
    def states(self) -> dict[str, int]:
        """The state of each silo, for silos to confirm."""
        is_present = set(self.present)
        return {
            name: PRESENT if name in is_present else VANISHED if name in self.dealt else ABSENT
            for name in self.silos
        }

    def add_confirmed(self, name: str, confirmed: Confirmation) -> None:
        """Take a silo's confirmation; raise `SumError` where it is not expected."""
        if name not in self.present or name in self.confirmed or self.revealed:
            raise SumError(f"expected a confirmation of {name} once and in time, got others", name)
        self.confirmed[name] = confirmed

    def check_holders(self) -> None:
        """Raise `SumError` for a silo of whose shares too few holders have usable ones."""
        for owner in self.dealt:
            holders = {owner, *self.partners[owner]} & self.confirmed.keys()
            unusable = {n for n in holders if owner in self.confirmed[n].unusable}
            if len(holders) >= self.threshold > len(holders - unusable):
                # As many as may be missing may also lie about the dealer.
                is_certain = len(unusable) > self.tolerance
                who = owner if is_certain else f"{owner} or {' and '.join(sorted(unusable))}"
                raise SumError(
                    f"expected shares of {owner} that their holders can use, got others for "
                    f"{len(unusable)} of them: {who} has sent something wrong",
                    owner if is_certain else "",
                )

    def tags_for(self, name: str) -> dict[str, bytes]:
        """Return by what partners have confirmed to a silo who is there."""
        return {
            other: self.confirmed[other].tags[name]
            for other in self.partners[name]
            if other in self.confirmed and name in self.confirmed[other].tags
        }

    def request_for(self, name: str) -> tuple[list[str], list[str]]:
        """Return of which silos a silo is to reveal shares of own masks, and of mask keys."""
        own = self.confirmed.get(name, Confirmation({}))
        near = {name, *self.partners[name]} - own.unusable
        known = [n for n in self.silos if n in near and n in self.dealt]
        there = set(self.present)
        return [n for n in known if n in there], [n for n in known if n not in there]

    def add_revealed(self, name: str, revealed: Revealed) -> None:
        """Take the shares that a silo reveals.

        Raises:
            SumError: shares of other silos than it was asked for, or others than were dealt to it.
        """
        present, vanished = self.request_for(name)
        if name not in self.confirmed or name in self.revealed:
            raise SumError(f"expected shares from {name} once, got them again", name)
        if set(revealed.own) != set(present) or set(revealed.mask) != set(vanished):
            raise SumError(f"expected the shares that {name} was asked for, got others", name)
        for shares, kind in ((revealed.own, "own_digest"), (revealed.mask, "mask_digest")):
            for owner, share in shares.items():
                if _digest(share, self.about) != getattr(self.dealt[owner][name], kind):
                    raise SumError(f"expected the shares dealt to {name}, got others", name)
        self.revealed[name] = revealed

    def unmask(self) -> np.ndarray:
        """Return the sum (n,) uint64 over the silos that are present.

        Raises:
            SumError: too few silos have revealed their shares, or a silo has dealt shares of
                something else than its secret; it names the silo.
        """
        if self.total is None:
            raise SumError("expected masked values to add up, got none")
        total, threshold, partners = self.total.copy(), self.threshold, self.partners
        coefficients: dict[tuple[int, ...], dict[int, int]] = {}
        for owner in self.dealt:
            is_present = owner in self.present
            holders = sorted((owner, *partners[owner]))
            shares: dict[int, int] = {}
            for point, recipient in enumerate(holders, 1):
                reply = self.revealed.get(recipient)
                if reply is None or len(shares) == threshold:
                    continue
                share = (reply.own if is_present else reply.mask).get(owner)
                if share is not None:
                    shares[point] = _read_share(share, owner)
            if not is_present and not set(partners[owner]) & set(self.present):
                continue  # nobody who is present has masked with it
            if len(shares) < threshold:
                raise SumError(
                    f"expected {threshold} shares to unmask {owner}, got {len(shares)}: too many "
                    "silos have vanished"
                )
            points = tuple(shares)
            if points not in coefficients:
                coefficients[points] = lagrange_coefficients(points)
            secret = recover_secret(shares, coefficients[points])
            if is_present:
                if _digest(to_bytes(secret), self.about) != self.keys[owner].own_digest:
                    raise SumError(f"expected shares of its secret from {owner}, got others", owner)
                add_mask(total, _own_seed(secret), subtract=True)
                continue
            pair = KeyPair.from_secret(to_bytes(secret))
            if pair.public != self.keys[owner].mask:
                raise SumError(f"expected shares of its secret from {owner}, got others", owner)
            for name in partners[owner]:
                if name in self.present:  # its mask with the silo that vanished is left over
                    _add_pair_mask(total, pair, self.keys[name].mask, self.about, owner, name)
        return total


def _read_share(share: bytes, owner: str) -> int:
    try:
        return from_bytes(share)
    except ValueError:
        raise SumError(f"expected shares of its secret from {owner}, got others", owner) from None
