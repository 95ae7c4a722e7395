"""What a silo checks of the weights that it is sent: only those are scored that it trains from.

Scores say something about the labels of test nodes. A server that had arbitrary weights scored,
as often as it likes, could find these labels out. So a silo compares the weights of the messages,
whatever the server says of them:

- Where the model of a round is sent to be scored, a client that trains in the next round must train
  from the same weights.
- A silo scores at most as many models as it has trained from, and one more: the last model, which
  no round trains from. It is two more with `evaluate_clients=participants`, where all clients score
  the best model in the end, too.

The first rule is left out after a LOAD, since the rounds between may have gone on without the silo,
or are repeated without another one. The second rule holds always. Where a client scores models
that others train from (`evaluate_clients=all` with partial participation) it has nothing to compare
them with, and a silo's policy decides whether it agrees to such a run.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import blake2b

import torch
from torch import Tensor

from silograph.core.errors import PolicyError
from silograph.core.kinds import Kind
from silograph.core.payload import Field, Ragged
from silograph.core.text import counted
from silograph.federation.program import Call, ScoringRules

WEIGHTS = "weights/", "scale/weights/"  # begin the names of weights as they travel


@dataclass(frozen=True)
class _Scored:
    """Weights that were sent to be scored.

    Attributes:
        number: the round.
        digest: of the weights.
    """

    number: int
    digest: bytes


class ScoredWeights:
    """Digests of the weights that a silo has scored, and how often it has trained.

    Args:
        rules: which rules the run's program allows to check.
    """

    def __init__(self, rules: ScoringRules) -> None:
        self._rules = rules
        self._scored: set[bytes] = set()
        self._trained = 0  # calls that brought weights to train from
        self._next: _Scored | None = None  # what the next training has to start from

    def check(self, call: Call, number: int, inbox: Mapping[str, Field]) -> None:
        """Raise `PolicyError` where weights are scored, or trained from, that may not be.

        Args:
            call: of the program.
            number: of the round.
            inbox: fields of the message.
        """
        digest = digest_of_weights(inbox)
        if digest is None:
            return
        last = self._next
        if call.what is not Kind.EVALUATION:
            if last is None or number != last.number + 1 or not self._rules.next_trains:
                return
            if digest != last.digest:
                raise PolicyError(
                    f"expected round {number} to train from the weights that were scored after "
                    f"round {last.number}, got other weights: the silo leaves the run"
                )
            return
        most = self._trained + self._rules.closing
        if self._rules.bounded and len(self._scored | {digest}) > most:
            raise PolicyError(
                f"expected at most {counted(most, 'model')} to be scored after "
                f"{counted(self._trained, 'training')}, got one more in round {number}: the silo "
                "leaves the run"
            )

    def record(self, call: Call, number: int, inbox: Mapping[str, Field]) -> None:
        """Remember a call that was answered; the arguments are those of `check`."""
        digest = digest_of_weights(inbox)
        if digest is None:
            return
        if call.what is Kind.EVALUATION:
            self._scored.add(digest)
            self._next = _Scored(number, digest)
        else:
            self._trained += 1
            self._next = None
            if call.scores_inbox:
                self._scored.add(digest)

    def forget_last(self) -> None:
        """Allow that the next training starts from other weights than those scored last."""
        self._next = None


def digest_of_weights(inbox: Mapping[str, Field]) -> bytes | None:
    """Return a digest (16 bytes) of the weights in a message; None: it has none."""
    names = sorted(name for name in inbox if name.startswith(WEIGHTS))
    if not names:
        return None
    digest = blake2b(digest_size=16)
    for name in names:
        field = inbox[name]
        parts = (field.t, field.off) if isinstance(field, Ragged) else (field.t,)
        for t in parts:
            digest.update(f"{name} {t.dtype} {tuple(t.shape)} ".encode())
            digest.update(_bytes_of(t))
    return digest.digest()


def _bytes_of(t: Tensor) -> bytes:
    return t.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
