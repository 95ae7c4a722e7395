"""A silo's half of differential privacy in a session: what may leave, noise, and charges.

Noise is keyed by the silo's secret together with the run, its scale, the round, the op and digests
of the request and of the reply without noise. So the same request gets the same reply, at no
further cost, also in a resumed run. Any other request, or any other reply to the same one, has
noise that is independent of all before, and is charged. Two replies with the same noise and
different values, whose difference would show both, cannot leave.

In a secure sum the noise of a silo is a share. It also depends on the silos of the sum. A server
that had the same round summed twice, once without a silo, would get the difference of two sums with
the same noise: that silo's values with its share alone. And a sum can be unmasked without this
silo, once its masked values have left. So noise in masked values is used once, unless this silo
itself has helped to unmask it in a sum over all silos that began it; then it is revealed in no
other sum.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from hashlib import blake2b
from typing import Any

from silograph.core.errors import PolicyError, ProtocolError, mistake
from silograph.core.payload import Payload, Shared
from silograph.core.text import count_of
from silograph.federation.frame import Envelope
from silograph.federation.privacy.accounting import epsilon_of
from silograph.federation.privacy.budget import (
    CHARGED,
    REVEALED,
    USED,
    Charge,
    PrivacyBudget,
    PrivacyLedger,
)
from silograph.federation.privacy.release import shares_of
from silograph.federation.privacy.updates import UpdatePrivacy, add_noise, spent_facts
from silograph.federation.program import digest_of_fields


class PrivateReplies:
    """Adds noise to the replies of one run at a silo, and charges them.

    Args:
        privacy: of the run.
        ledger: of the silo.
        secret: of its noise.
        run: public name of the run.
        record: writes a charge into the audit file.
        budget: of all runs of the silo; None: it has none.
    """

    def __init__(
        self,
        privacy: UpdatePrivacy,
        ledger: PrivacyLedger,
        secret: bytes,
        run: str,
        record: Callable[[Mapping[str, Any]], None],
        budget: PrivacyBudget | None = None,
    ) -> None:
        self._privacy, self._ledger, self._run, self._record = privacy, ledger, run, record
        self._budget = budget
        self._key = blake2b(run.encode(), digest_size=32, key=secret, person=b"silograph noise")

    def with_noise(self, envelope: Envelope, inbox: Payload, reply: Payload) -> Payload:
        """Return a reply with all of the noise, once it is charged.

        Args:
            envelope: of the reply.
            inbox: what the silo was called with.
            reply: clipped integers.
        """
        seed = self._seed(envelope, inbox, reply, 1)
        self._charge(envelope.round, seed)
        return add_noise(reply, [seed], self._privacy.sigma())

    def with_share(
        self, envelope: Envelope, inbox: Payload, reply: Payload, silos: Sequence[str]
    ) -> tuple[Payload, bytes]:
        """Return a reply with the silo's share of the noise, and the seed of it; see `with_noise`.

        Args:
            envelope: of the reply.
            inbox: what the silo was called with.
            reply: clipped integers.
            silos: that begin the sum.
        """
        shares, about = shares_of(len(silos), secure=True), "\n".join(sorted(silos))
        attempt = 0
        # Masked values that have left may be in a sum that others unmask without this silo. A
        # second sum with the same noise would show a difference of values, so it gets new noise.
        while True:
            seed = self._seed(envelope, inbox, reply, shares, about, attempt)
            if self._may_leave(_name_of(seed)):
                break
            attempt += 1
        self._charge(envelope.round, seed)
        return add_noise(reply, [seed], self._privacy.sigma(shares)), seed

    def _may_leave(self, noise: str) -> bool:
        """Whether noise is new, or was revealed in sums over all silos alone."""
        has = self._ledger.has
        return not has(CHARGED, noise) or (has(REVEALED, noise) and not has(USED, noise))

    def check_reveal(self, number: int, seed: bytes, *, everyone: bool) -> None:
        """Write down that a sum with some noise is unmasked.

        Args:
            number: of the round.
            seed: of the noise.
            everyone: whether all silos that began the sum are in it, as far as this one sees.

        Raises:
            ProtocolError: the noise was in another sum.
        """
        # Written first: a process that dies in between has revealed less than it says.
        was_revealed = self._ledger.has(REVEALED, _name_of(seed))
        self._ledger.add(self._line(REVEALED if everyone else USED, number, seed))
        if was_revealed and not everyone:
            raise ProtocolError(
                "expected a secure sum over the silos of the one before with the same noise, got "
                "one over fewer: their difference would show a silo's update",
                **mistake("secure-sum", ""),
            )

    def epsilon_of_all_runs(self, delta: float) -> float:
        """Return what all runs cost at delta, this one counted to its end.

        Charges under this run's name with another noise multiplier add to it.
        """
        multiplier, most = self._privacy.noise_multiplier, self._privacy.releases
        total = self._ledger.total(self._privacy.unit)
        total[multiplier] += max(0, most - self._charged()[multiplier])
        return epsilon_of(total, delta)

    def spent(self) -> dict[str, Any]:
        """Return what the run has cost this silo so far, and all runs of its budget."""
        facts = spent_facts(self._privacy, self._charged())
        if self._budget is not None:
            facts["budget"] = asdict(self._ledger.use_of(self._budget))
        return facts

    def _charged(self) -> Counter[float]:
        """Return the number of charges of this run by noise multiplier."""
        return self._ledger.releases(self._privacy.unit).get(self._run, Counter[float]())

    def _seed(
        self,
        envelope: Envelope,
        inbox: Payload,
        reply: Payload,
        shares: int,
        silos: str = "",
        attempt: int = 0,
    ) -> bytes:
        """Return the seed of noise.

        It depends on the scale: noise of one seed at two scales is nearly proportional, so two
        replies with it would show what they hide. It depends on the reply, as training need not
        give the same bits twice, and the difference of two replies with the same noise is bare.
        """
        # Another request gets other noise even if the reply is the same: equal answers would show
        # that it is. Ops with noise read fields for all clients only.
        request = {name: field for name, field in inbox.items() if isinstance(field, Shared)}
        scale = self._privacy.noise_multiplier, self._privacy.releases, shares
        about = (
            f"{envelope.op} {envelope.round} {envelope.step} {attempt} {scale}\n{silos}".encode()
        )
        seed = self._key.copy()
        # Lengths in front, so that no two triples of parts are the same bytes.
        for part in (about, digest_of_fields(request), digest_of_fields(reply)):
            seed.update(len(part).to_bytes(8, "little") + part)
        return seed.digest()

    def _charge(self, number: int, seed: bytes) -> None:
        """Charge a reply that is about to leave, unless it has left before.

        Raises:
            PolicyError: the run has cost all that the silo agreed to.
        """
        if self._ledger.has(CHARGED, _name_of(seed)):
            return
        most = self._privacy.releases
        if self._charged().total() >= most:
            raise PolicyError(
                f"expected {count_of(most, 'release')} with noise in the run, for which "
                f"this silo agreed to epsilon {self._privacy.epsilon:g}, got a request for one "
                "more: the silo leaves the run",
                **mistake("refused-by-policy", "privacy_budget"),
            )
        self._ledger.add(self._line(CHARGED, number, seed))
        self._record({"round": number, **self.spent()})

    def _line(self, event: str, number: int, seed: bytes) -> Charge:
        privacy = self._privacy
        return Charge(
            event, self._run, privacy.unit, privacy.noise_multiplier, number, _name_of(seed)
        )


def _name_of(seed: bytes) -> str:
    """Return a public name of noise, from which the noise does not follow."""
    return blake2b(seed, digest_size=16, person=b"silograph name").hexdigest()
