"""The usual norm of updates: what silos' updates are held to, a thousand times."""

import math
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from silograph.core.errors import CheckpointError

FAR_UPDATE = 1e3  # times the usual norm of updates, and 1
UPDATES = "usual_updates"
FIRST_CALLS = 3  # of an op, with updates of several silos: what is usual is settled then


@dataclass(frozen=True)
class UsualUpdate:
    """The largest median norm of the first calls of an op.

    Updates shrink while training goes on, and those of a silo that has learned its nodes by heart
    are all but 0; so what was usual once stays so. It is settled by the first calls: a later
    majority that lies cannot lift it, nor updates that grow because a lie has spoiled the model.

    Who has the majority in the first calls has it: more than half of the silos can lift the norm in
    one of them, and half can hold it down in all of them, but no bound is below `FAR_UPDATE`.

    Attributes:
        norm: so far.
        calls: that it is from; what a silo alone says is usual for no later call.
    """

    norm: float = 0.0
    calls: int = 0

    def most(self, norms: Iterable[float | None]) -> float:
        """Return the largest norm that an update of a call may have, from those of all of it."""
        usual = self.norm
        if self.calls < FIRST_CALLS:
            usual = max(usual, _median(_finite(norms)))
        return FAR_UPDATE * max(1.0, usual)

    def after(self, norms: Iterable[float | None]) -> "UsualUpdate":
        """Return what is usual after a call with updates of such norms."""
        found = _finite(norms)
        if self.calls >= FIRST_CALLS or len(found) < 2:
            return self
        return UsualUpdate(max(self.norm, _median(found)), self.calls + 1)


NONE_USUAL = UsualUpdate()


def _finite(norms: Iterable[float | None]) -> list[float]:
    return [norm for norm in norms if norm is not None and math.isfinite(norm)]


def _median(norms: list[float]) -> float:
    return statistics.median_low(norms) if norms else 0.0


class UsualUpdates:
    """The usual updates of a run by op, of which a round that is done again leaves no trace.

    Args:
        told: in a checkpoint, see `told`.

    Raises:
        CheckpointError: anything else; what it lacks was not known.
    """

    def __init__(self, told: Mapping[str, Any] = MappingProxyType({})) -> None:
        self._by_op = _read(told)
        self._before = dict(self._by_op)

    @property
    def told(self) -> dict[str, Any]:
        """Norm and calls by op as plain values, for a checkpoint."""
        return {UPDATES: {op: [each.norm, each.calls] for op, each in self._by_op.items()}}

    def begin_round(self) -> None:
        """Take what is known now for what was known before the round."""
        self._before = dict(self._by_op)

    def begin_again(self) -> None:
        """Go back to before the round."""
        self._by_op = dict(self._before)

    def of(self, op: str) -> UsualUpdate:
        """Return what is usual of an op."""
        return self._by_op.get(op, NONE_USUAL)

    def add(self, op: str, norms: Iterable[float | None]) -> None:
        """Take in the norms of the usable updates of a call."""
        after = self.of(op).after(norms)
        if after.calls:
            self._by_op[op] = after


def _read(told: Mapping[str, Any]) -> dict[str, UsualUpdate]:
    try:
        found = {op: UsualUpdate(norm, calls) for op, (norm, calls) in told[UPDATES].items()}
    except KeyError:
        return {}
    except (AttributeError, TypeError, ValueError):
        found = {"": NONE_USUAL}
    if not all(map(_is_usual, found.values())):
        raise CheckpointError(
            "expected the usual norm of updates by op in the checkpoint, got something else: it is "
            "damaged; begin a new run"
        )
    return found


def _is_usual(told: UsualUpdate) -> bool:
    norm, calls = told.norm, told.calls
    counted = type(calls) is int and 0 < calls <= FIRST_CALLS
    return counted and type(norm) is float and math.isfinite(norm) and norm >= 0
