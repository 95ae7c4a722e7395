"""Where each silo of a run stands, worked out from events alone."""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from silograph.federation.session.events import Cause, Event, EventCallback, What


class SiloState(StrEnum):
    """What a silo does."""

    CONNECTED = "connected"  # has nothing to do
    WORKING = "working"  # was asked and has not answered
    WAITING = "waiting"  # not there yet; or there again, until the next round
    LATE = "late"  # did not answer in time: the round goes on without it
    DROPPED = "dropped"  # failed in another way: the round goes on without it


AWAY = (SiloState.LATE, SiloState.DROPPED)


@dataclass(frozen=True)
class Standing:
    """Where a silo stands.

    Attributes:
        state: what it does.
        since: when that began, seconds of the board's clock.
        round: in which round; None before the first.
        op: what it was asked last.
        reason: why it is away.
    """

    state: SiloState
    since: float
    round: int | None = None
    op: str | None = None
    reason: str | None = None


def after(before: Standing, event: Event, now: float) -> Standing:
    """Return where a silo stands after an event that is about it."""
    match event.what:
        case What.ATTACHED if before.state in AWAY:
            return replace(before, state=SiloState.WAITING, since=now)
        case What.ATTACHED if before.state is SiloState.WAITING:
            return Standing(SiloState.CONNECTED, now)
        case What.RETURNED:
            return Standing(SiloState.CONNECTED, now, event.round)
        case What.ASKED:
            return Standing(SiloState.WORKING, now, event.round, event.op)
        case What.ANSWERED if before.state is SiloState.WORKING:
            return replace(before, state=SiloState.CONNECTED, since=now)
        case What.DROPPED:
            state = SiloState.LATE if event.cause is Cause.LATE else SiloState.DROPPED
            op = event.op or before.op
            return Standing(state, now, event.round, op, event.reason)
        case What.UNFIT | What.LEFT_OUT:
            return replace(before, state=SiloState.DROPPED, since=now, reason=event.reason)
        case _:
            return before


class Board:
    """Where all silos stand; takes events from any thread.

    Args:
        names: of the silos, as far as they are known.
        room: silos of the run.
        report: told of every event, with what the board knows besides.
        clock: tells seconds.
    """

    def __init__(
        self,
        names: Sequence[str],
        room: int,
        report: EventCallback,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.room = room
        self.clock = clock
        self._report = report
        self._lock = threading.Lock()
        self._standings = {name: Standing(SiloState.WAITING, clock()) for name in names}

    def take(self, event: Event) -> None:
        """Take in an event, and report it."""
        now = self.clock()
        if event.silo is not None and event.what not in (What.REFUSED, What.NOTE):
            with self._lock:
                before = self._standings.get(event.silo, Standing(SiloState.WAITING, now))
                self._standings[event.silo] = after(before, event, now)
                event = self._known(before, event, now)
        self._report(event)

    def standings(self) -> Mapping[str, Standing]:
        """Return where each silo stands, in the order of names given, then of their coming."""
        with self._lock:
            return dict(self._standings)

    def _known(self, before: Standing, event: Event, now: float) -> Event:
        """Return an event with what is known from before: counts, and of what an answer is one."""
        if event.what is What.ATTACHED:
            if before.state in AWAY:
                return event
            there = sum(s.state is not SiloState.WAITING for s in self._standings.values())
            return replace(event, silos=there, room=self.room)
        if event.what is What.ANSWERED and before.state is SiloState.WORKING:
            seconds = round(now - before.since, 6)
            return replace(event, op=before.op, round=before.round, seconds=seconds)
        return event


def counts(standings: Mapping[str, Standing], room: int) -> dict[SiloState, int]:
    """Return how many silos do what; those without a name yet are waited for."""
    found = dict.fromkeys(SiloState, 0)
    for standing in standings.values():
        found[standing.state] += 1
    found[SiloState.WAITING] += max(0, room - len(standings))
    return found
