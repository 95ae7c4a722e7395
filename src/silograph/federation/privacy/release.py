"""Which replies may leave, which of them with noise, and the noise of clients in one process.

In a real federation each silo adds its own noise (`silograph.federation.session.private_reply`).
"""

from collections.abc import Sequence
from hashlib import blake2b
from typing import TypeVar

from silograph.core.errors import PolicyError, mistake
from silograph.core.key import Key
from silograph.core.kinds import Kind
from silograph.core.payload import Payload
from silograph.federation.base import Op
from silograph.federation.privacy.updates import UpdatePrivacy, add_noise
from silograph.federation.secure.partners import topology_of

AnyOp = TypeVar("AnyOp")
MARK = "needs_noise"


def needs_noise(op: AnyOp) -> AnyOp:
    """Declare that replies of an op are clipped integers, which leave with noise only."""
    op.__dict__[MARK] = True
    return op


def is_noised(op: object) -> bool:
    """Whether replies of an op leave with noise."""
    return MARK in op.__dict__


def check_release(op: Op, kind: Kind, reply: Payload, *, counts_leave: bool = False) -> None:
    """Raise `PolicyError` for a reply that neither gets noise nor is the same whatever the data.

    An op decides by its code what it returns, so this is checked of each reply: a method that
    declares too much must not get anything past a silo.

    Args:
        op: that was called.
        kind: of the reply.
        reply: of the op.
        counts_leave: whether counts of evaluation may be other than zeros. A simulation measures
            scores outside the guarantee; a silo scores the model for itself.
    """
    if is_noised(op) or not reply:
        return
    if kind is Kind.EVALUATION and (counts_leave or not any(f.t.any() for f in reply.values())):
        return
    raise PolicyError(
        f"expected replies with noise only in a run with differential privacy, got one of "
        f"{op.__name__} without: a silo leaves the run before it sends that",
        **mistake("refused-by-policy", "differential privacy"),
    )


def shares_of(silos: int, *, secure: bool) -> int:
    """Return how many silos share the noise of a sum over `silos`: the fewest that may be left.

    Without secure aggregation the server sees each silo's reply, so each has all of the noise. With
    it a sum of fewer silos than the threshold is never unmasked. Every silo gets the new model and
    can subtract its own share, so the shares of one silo less are enough.
    """
    return max(1, topology_of(silos).threshold - 1) if secure else 1


class SimulatedNoise:
    """Adds the noise of clients in one process, from keys of the run.

    Whoever knows the run's seed knows the noise: a simulation shows what noise does to a model, and
    hides nothing.

    Args:
        privacy: of the run.
        secure: whether replies are summed securely.
    """

    def __init__(self, privacy: UpdatePrivacy, *, secure: bool) -> None:
        self._privacy, self._secure = privacy, secure

    def release(
        self,
        op: Op,
        kind: Kind,
        reply: Payload,
        ids: Sequence[str],
        key: Key,
        called: int,
    ) -> Payload:
        """Return the reply of a block as it leaves: with noise where the op needs it.

        Args:
            op: that was called.
            kind: of the reply.
            reply: of the block's clients.
            ids: names of these clients.
            key: of the call.
            called: number of clients of the call.

        Raises:
            PolicyError: a reply that a silo would not send; see `check_release`.
        """
        check_release(op, kind, reply, counts_leave=True)
        return self.add(reply, ids, key, called) if is_noised(op) else reply

    def add(self, reply: Payload, ids: Sequence[str], key: Key, called: int) -> Payload:
        """Return the reply of a block with noise.

        Args:
            reply: clipped integers of the block's clients.
            ids: names of these clients.
            key: of the call.
            called: number of clients of the call.
        """
        sigma = self._privacy.sigma(shares_of(called, secure=self._secure))
        # By name, not by position, so that bits do not depend on how clients are put into blocks.
        secret = key.value.to_bytes(8, "little")
        seeds = [
            blake2b(name.encode(), digest_size=32, key=secret, person=b"silograph noise").digest()
            for name in ids
        ]
        return add_noise(reply, seeds, sigma)
