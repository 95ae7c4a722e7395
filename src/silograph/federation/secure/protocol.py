"""One sum over silos, of which the server learns the total and nothing else.

Bonawitz, Ivanov, Kreuter, Marcedone, McMahan, Patel, Ramage, Segal and Seth, "Practical secure
aggregation for privacy-preserving machine learning", CCS 2017, with the graph of Bell et al. 2020
from 50 silos on (`silograph.federation.secure.partners`). For each sum:

1. *Keys*: each silo makes two pairs of keys, one for masks and one for sealed shares.
2. *Shares*: it splits the secret of its mask keys and that of its own mask, and seals a share of
   each for every partner. Digests of the shares are sent along: they show who sent a wrong one.
3. *Masked values*: y = x + own mask + sum over partners of +- the mask of the pair, modulo 2^64.
   Masks of pairs cancel in the sum of all silos.
4. *Unmasking*: for each silo that sent y the others reveal shares of its own mask; for each that
   vanished between 2 and 3, shares of its mask keys. Nobody reveals both, so a y that comes late
   is never unmasked.

All secrets are drawn anew for each sum. A round that is done again takes fresh masks, and a silo
takes each step of a sum once.

The server is trusted to forward public keys unchanged, unless silos share a secret by which they
prove them (`Prover`). Beyond that it may lie. If it tells silos different things about who has
vanished, the threshold of two thirds keeps it from getting enough shares for both.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from hmac import compare_digest

import numpy as np

from silograph.federation.secure.masks import (
    KEY_BYTES,
    SEAL_BYTES,
    KeyPair,
    add_mask,
    derive_key,
    seal,
    unseal,
)
from silograph.federation.secure.partners import partners_of, topology_of
from silograph.federation.secure.shamir import (
    BYTES,
    from_bytes,
    lagrange_coefficients,
    new_secret,
    recover_secret,
    split_secret,
    to_bytes,
)
from silograph.federation.secure.sizes import PROOF_BYTES
from silograph.federation.secure.sums import SumError

DIGEST_BYTES = 16
SEALED_BYTES = 2 * BYTES + SEAL_BYTES
DEALT_BYTES = SEALED_BYTES + 2 * DIGEST_BYTES


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


class Prover:
    """Proves to silos that share a secret that public keys are a silo's own.

    A proof is a keyed BLAKE2b of what the keys are for. The server does not know the secret, so it
    can neither put keys of its own in place of a silo's nor invent a silo.

    Args:
        secret: of the silos; None: there is none, and no proof.
        run: names the run, so that keys of another run prove nothing.
        is_strict: whether keys without a valid proof are refused.
    """

    def __init__(self, secret: bytes | None, run: bytes, *, is_strict: bool) -> None:
        self._key = None if secret is None else blake2b(secret, digest_size=64).digest()
        self._run, self._is_strict = run, is_strict

    def prove(self, about: bytes, name: str, keys: PublicKeys) -> bytes:
        """Return the proof of a silo's keys for a sum, 32 bytes; zeros without a secret."""
        if self._key is None:
            return bytes(PROOF_BYTES)
        parts = (b"silograph secure sum 1", self._run, about, name.encode(), keys.text)
        return blake2b(b"\0".join(parts), digest_size=PROOF_BYTES, key=self._key).digest()

    def accepts(self, about: bytes, name: str, keys: PublicKeys) -> bool:
        """Whether keys are taken as those of a silo."""
        return not self._is_strict or compare_digest(self.prove(about, name, keys), keys.proof)


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
    """

    def __init__(
        self,
        name: str,
        about: bytes,
        least: int = 2,
        prover: Prover = NO_PROVER,
        draw: Callable[[], int] = new_secret,
    ) -> None:
        self._name, self._about, self._least, self._prover = name, about, max(least, 2), prover
        self._mask_secret, self._own_secret = draw(), draw()
        self._mask_keys = KeyPair.from_secret(to_bytes(self._mask_secret))
        self._channel = KeyPair.from_secret(to_bytes(draw()))
        self._steps: list[str] = []
        self._keys: Mapping[str, PublicKeys] = {}
        self._shares: dict[str, tuple[bytes, bytes]] = {}  # by whose they are: mask keys, own mask
        self._channel_secrets: dict[str, bytes] = {}  # by partner
        self._partners: tuple[str, ...] = ()
        self._threshold = 0
        self._masked_with: tuple[str, ...] = ()
        self._own_keys: PublicKeys | None = None

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

    def share(self, keys: Mapping[str, PublicKeys], silos: Sequence[str]) -> dict[str, Dealt]:
        """Return the shares of this silo's secrets, for its partners.

        Args:
            keys: of this silo and its partners, by name.
            silos: all silos of the sum.

        Raises:
            SumError: too few silos, other partners than the sum's, keys that somebody else has
                made, or keys that occur twice.
        """
        self._take("shares", ("keys",))
        if len(set(silos)) != len(silos) or self._name not in silos or len(silos) < self._least:
            raise SumError(
                f"expected at least {self._least} silos in a secure sum, got {len(set(silos))}"
            )
        self._partners = partners_of(tuple(silos), self._about)[self._name]
        if set(keys) != {self._name, *self._partners} or keys[self._name] != self._own_keys:
            raise SumError("expected the public keys of this silo and its partners, got others")
        public = [key for each in keys.values() for key in (each.mask, each.channel)]
        if len(set(public)) < len(public) or any(len(key) != KEY_BYTES for key in public):
            raise SumError("expected different public keys from every silo, got one twice")
        for name, each in keys.items():
            if name != self._name and not self._prover.accepts(self._about, name, each):
                raise SumError(
                    f"expected keys that {name} has proved by the silos' secret, got others", name
                )
        self._keys = dict(keys)
        holders = sorted((self._name, *self._partners))
        self._threshold = topology_of(len(silos)).threshold
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
            context = _channel_context(self._about, self._name, recipient)
            secret = _agree(self._channel, keys[recipient].channel, recipient)
            self._channel_secrets[recipient] = secret
            key = derive_key(self._channel_secrets[recipient], context)
            digests = tuple(_digest(part, self._about) for part in pair)
            dealt[recipient] = Dealt(seal(key, b"".join(pair), context), *digests)
        return dealt

    def mask(self, values: np.ndarray, dealt: Mapping[str, Dealt]) -> np.ndarray:
        """Return masked values.

        Args:
            values: (n,) uint64.
            dealt: what partners have dealt to this silo; those that vanished have dealt nothing.

        Raises:
            SumError: shares of others than partners, of too few, or that are not what their
                digests say; it names the silo that dealt them.
        """
        self._take("masked", ("keys", "shares"))
        if not set(dealt) <= set(self._partners) or len(dealt) + 1 < self._threshold:
            raise SumError(
                f"expected shares of at least {self._threshold - 1} of the silo's partners, got "
                f"those of {len(dealt)}"
            )
        for name, part in dealt.items():
            context = _channel_context(self._about, name, self._name)
            try:
                key = derive_key(self._channel_secrets[name], context)
                text = unseal(key, part.sealed, context)
            except ValueError:
                raise SumError(
                    f"expected shares that {name} has sealed, got others", name
                ) from None
            pair = text[:BYTES], text[BYTES:]
            if tuple(_digest(p, self._about) for p in pair) != (part.mask_digest, part.own_digest):
                raise SumError(
                    f"expected the shares that {name} has committed to, got others", name
                )
            self._shares[name] = pair
        self._masked_with = tuple(name for name in self._partners if name in dealt)
        total: np.ndarray = values.astype(np.uint64)  # a copy
        add_mask(total, _own_seed(self._own_secret))
        for name in self._masked_with:
            other = self._keys[name].mask
            _add_pair_mask(total, self._mask_keys, other, self._about, self._name, name)
        return total

    def reveal(self, present: Collection[str], vanished: Collection[str]) -> Revealed:
        """Return shares of the own masks of silos that are present, and of mask keys of others.

        Args:
            present: this silo and those of its partners that sent masked values.
            vanished: those that dealt shares and sent none.

        Raises:
            SumError: too few silos, or a silo that would be in both.
        """
        self._take("unmasking", ("keys", "shares", "masked"))
        expected = {self._name, *self._masked_with}
        is_split = not set(present) & set(vanished) and {*present, *vanished} == expected
        if not is_split or self._name not in present:
            raise SumError("expected each silo to be present or to have vanished, got others")
        least = max(min(self._least, 1 + len(self._partners)), self._threshold)
        if len(set(present)) < least:
            raise SumError(
                f"expected a sum over at least {least} silos, got one over {len(set(present))}"
            )
        return Revealed(
            own={name: self._shares[name][1] for name in present},
            mask={name: self._shares[name][0] for name in vanished},
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
        revealed: shares by silo that revealed them.
    """

    about: bytes
    keys: dict[str, PublicKeys] = field(default_factory=dict)
    dealt: dict[str, Mapping[str, Dealt]] = field(default_factory=dict)
    total: np.ndarray | None = None
    present: list[str] = field(default_factory=list)
    revealed: dict[str, Revealed] = field(default_factory=dict)

    @property
    def threshold(self) -> int:
        """How many silos must be there to the end."""
        return topology_of(len(self.keys)).threshold

    @property
    def silos(self) -> tuple[str, ...]:
        """All silos whose keys are there; from then on they are those of the sum."""
        return tuple(self.keys)

    @property
    def partners(self) -> Mapping[str, tuple[str, ...]]:
        """The partners of each silo."""
        return partners_of(self.silos, self.about)

    def add_keys(self, name: str, keys: PublicKeys) -> None:
        """Take a silo's public keys; raise `SumError` where it has sent some before."""
        if name in self.keys or self.dealt:
            raise SumError(f"expected public keys of {name} once, got them again", name)
        self.keys[name] = keys

    def keys_for(self, name: str) -> dict[str, PublicKeys]:
        """Return the keys that a silo needs."""
        return {n: self.keys[n] for n in self.silos if n == name or n in self.partners[name]}

    def add_shares(self, name: str, dealt: Mapping[str, Dealt]) -> None:
        """Take a silo's shares; raise `SumError` where they are not for its partners."""
        if name in self.dealt or self.present or set(dealt) != {name, *self.partners[name]}:
            raise SumError(f"expected shares of {name} for its partners once, got others", name)
        self.dealt[name] = dict(dealt)

    def shares_for(self, name: str) -> dict[str, Dealt]:
        """Return what a silo's partners have dealt to it."""
        return {n: self.dealt[n][name] for n in self.partners[name] if n in self.dealt}

    def add_masked(self, name: str, values: np.ndarray) -> None:
        """Add a silo's masked values (n,) uint64; raise `SumError` where they are not expected."""
        if name not in self.dealt or name in self.present or self.revealed:
            raise SumError(f"expected masked values of {name} once and in time, got others", name)
        if values.dtype != np.uint64 or (
            self.total is not None and self.total.shape != values.shape
        ):
            raise SumError(f"expected as many masked values from {name} as from the others", name)
        self.total = values.copy() if self.total is None else self.total + values
        self.present.append(name)

    def request_for(self, name: str) -> tuple[list[str], list[str]]:
        """Return of which silos a silo is to reveal shares of own masks, and of mask keys."""
        known = [n for n in self.silos if n in (name, *self.partners[name]) and n in self.dealt]
        is_present = set(self.present)
        return [n for n in known if n in is_present], [n for n in known if n not in is_present]

    def add_revealed(self, name: str, revealed: Revealed) -> None:
        """Take the shares that a silo reveals.

        Raises:
            SumError: shares of other silos than it was asked for, or others than were dealt to it.
        """
        present, vanished = self.request_for(name)
        if name not in self.present or name in self.revealed:
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
        total, threshold = self.total.copy(), topology_of(len(self.silos)).threshold
        partners = self.partners
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
