"""What a silo checks of the weights that it is sent to score.

Scores say something about the labels of test nodes. A server that had arbitrary weights scored,
as often as it likes, could find these labels out. So a silo compares the weights of the messages,
whatever the server says of them:

1. Where the model of a round is sent to be scored, a client that trains in the next round must
   train from the same weights.
2. The calls that close the run score one model, which no round trains from. It is two with
   `evaluate_clients=participants`, where all clients score the best model in the end, too.
3. A silo scores at most as many different models as there are different weights that it has trained
   from, and at most as many as the run has rounds. Those that the run is closed with come on top,
   and one more where set-up scores the first model.

The first rule is left out after a LOAD, since the rounds between may have gone on without the silo,
or are repeated without another one. The others hold always, however often rounds are repeated: the
same weights again count once. All of it is remembered while the silo's process runs.

Where a client scores models that others train from (`evaluate_clients=all` with partial
participation) it cannot check the last two rules, nor the first one if models are scored on
receipt. A silo's policy decides whether it agrees to such a run.
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
    """Digests of the weights that a silo has scored and of those that it has trained from.

    Args:
        rules: which rules the run's program allows to check.
    """

    def __init__(self, rules: ScoringRules) -> None:
        self._rules = rules
        self._scored: set[bytes] = set()
        self._trained: set[bytes] = set()
        self._closing: set[bytes] = set()  # that were scored by closing calls only
        self._next: _Scored | None = None  # what the next training has to start from

    def check(
        self, call: Call, number: int, inbox: Mapping[str, Field], *, closes: bool = False
    ) -> None:
        """Raise `PolicyError` where weights are scored, or trained from, that may not be.

        Args:
            call: of the program.
            number: of the round.
            inbox: fields of the message.
            closes: whether no later round may follow the call (`Course.closes`).
        """
        digest = digest_of_weights(inbox)
        if digest is None:
            return
        evaluates = call.what is Kind.EVALUATION
        if not evaluates:
            self._check_start(number, digest)
        if (evaluates or call.scores_inbox) and self._rules.bounded:
            trained = self._trained if evaluates else self._trained | {digest}
            self._check_scored(number, digest, len(trained), closes=evaluates and closes)

    def _check_start(self, number: int, digest: bytes) -> None:
        """Raise `PolicyError` where a round trains from other weights than were scored before."""
        last = self._next
        if last is None or number != last.number + 1 or not self._rules.next_trains:
            return
        if digest != last.digest:
            raise PolicyError(
                f"expected round {number} to train from the weights that were scored after "
                f"round {last.number}, got other weights: the silo leaves the run"
            )

    def _check_scored(self, number: int, digest: bytes, trained: int, *, closes: bool) -> None:
        """Raise `PolicyError` for a further model to score where there may be no more of them."""
        if digest in self._scored:
            return
        rules = self._rules
        if closes and len(self._closing) >= rules.closing:
            raise PolicyError(
                f"expected {counted(rules.closing, 'model')} to be scored when the run is over, "
                f"got one more in round {number}: the silo leaves the run; start it again to go on"
            )
        rounds = trained if rules.in_rounds is None else min(trained, rules.in_rounds)
        most = rounds + rules.closing + rules.in_setup
        if len(self._scored) >= most:
            raise PolicyError(
                f"expected at most {counted(most, 'model')} to be scored after training from "
                f"{trained} different ones, got one more in round {number}: the silo leaves the "
                "run; start it again to go on"
            )

    def record(
        self, call: Call, number: int, inbox: Mapping[str, Field], *, closes: bool = False
    ) -> None:
        """Remember a call that was answered; the arguments are those of `check`."""
        digest = digest_of_weights(inbox)
        if digest is None:
            return
        if call.what is Kind.EVALUATION:
            if closes and digest not in self._scored:
                self._closing.add(digest)
            self._scored.add(digest)
            self._next = _Scored(number, digest)
        else:
            self._trained.add(digest)
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
