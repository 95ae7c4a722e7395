"""What happens in a session, as values: who reads them shows, logs or counts.

Engine and hub report events through a callback. No field has a key, a token, a
nonce, a signature or anything of the data; reasons are lines of this library or of a silo that was
asked, printable and short.
"""

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from enum import StrEnum

from silograph.core.text import count_of, printable

LOG = logging.getLogger("silograph")


class What(StrEnum):
    """Kinds of events."""

    LISTENING = "listening"  # the server waits at an address
    METRICS = "metrics"  # its metrics are at an address
    ABSENT = "absent"  # the server still waits for silos before the first round
    ATTACHED = "attached"  # a silo has proved who it is
    REFUSED = "refused"  # a silo may not attach
    STRANGER = "stranger"  # a stream that was no silo's
    ASKED = "asked"  # a silo was sent a call
    ANSWERED = "answered"  # it has answered
    DROPPED = "dropped"  # a round goes on without it
    LEFT_OUT = "left_out"  # it has failed so often that no round has it any more
    DISMISSED = "dismissed"  # a silo hears that it was dropped, and why
    DISCARDED = "discarded"  # an answer that came after that
    WAITING = "waiting"  # a round that needs it waits for it, to be done again
    RETURNED = "returned"  # it takes part again
    UNFIT = "unfit"  # it is back, but cannot take part
    RESUMED = "resumed"  # a run goes on after its server was interrupted
    ROUND = "round"  # a round is over, and committed if a checkpoint was due
    AWAITED = "awaited"  # the result waits for a silo whose stream ended
    WITHOUT = "without"  # a silo has not taken the result of the run
    UNHEARD = "unheard"  # a silo did not hear the server's last message
    ENDED = "ended"  # the run is over, or has failed for a reason
    AGREED = "agreed"  # a silo has agreed to a run
    LOST = "lost"  # a silo has no stream to its server
    STOPPED = "stopped"  # a server was stopped, and its silos wait until it continues the run
    DECLINED = "declined"  # a silo does not do what the server asks
    FAILED = "failed"  # an op failed at a silo
    DISAGREED = "disagreed"  # an edge of a silo that the other one does not list
    RESULT_STORED = "kept"  # a silo has written down what the run has come to
    EXPOSED = "exposed"  # a secret file that other users can read
    UNKNOWN_KEYS = "unknown_keys"  # a server accepts silos whose keys it does not know
    KEYS = "keys"  # a server has read its lists of keys again, or could not
    EXPIRES = "expires"  # a certificate ends soon, or has ended
    UNLISTED = "unlisted"  # streams of strangers without an event each in the log
    NOTE = "note"  # anything else that a person should read


class Cause(StrEnum):
    """Causes for which a silo is dropped."""

    GONE = "gone"  # its stream has ended
    LATE = "late"  # no answer in time
    REFUSED = "refused"  # it says that it cannot
    GARBAGE = "garbage"  # bytes that are no answer to what was asked
    UNLIKE = "unlike"  # fields unlike those of the others
    NOT_FINITE = "not_finite"  # NaN or infinity where the others are finite


@dataclass(frozen=True)
class Event:
    """An event; fields that its kind does not use are None.

    Attributes:
        what: kind of the event.
        silo: its name.
        round: number of the round.
        rounds: of the run.
        op: name of the op.
        cause: why a silo was dropped.
        reason: the same in one line.
        seconds: that it took, or may take.
        bytes: of a frame or message; of all frames so far for a round and an end.
        address: HOST:PORT.
        silos: that are there.
        room: silos of the run.
        note: a line for people.
    """

    what: What
    silo: str | None = None
    round: int | None = None
    rounds: int | None = None
    op: str | None = None
    cause: Cause | None = None
    reason: str | None = None
    seconds: float | None = None
    bytes: int | None = None
    address: str | None = None
    silos: int | None = None
    room: int | None = None
    note: str | None = None

    def __str__(self) -> str:
        """Return the event as a line for people."""
        return printable(_line(self))

    @property
    def level(self) -> int:
        """How urgent it is: a level of `logging`."""
        if self.what is What.FAILED or (self.what is What.ENDED and self.reason):
            return logging.ERROR
        if self.what in (What.ASKED, What.ANSWERED):
            return logging.DEBUG
        return logging.WARNING if self.what in WARNINGS else logging.INFO

    @property
    def fields(self) -> dict[str, str | int | float]:
        """The fields that it has, in their order."""
        return {name: v for name in FIELDS if (v := getattr(self, name)) is not None}


EventCallback = Callable[[Event], None]
# Lines of the log that strangers can cause in a window of time, in all and from one address.
MOST_STRANGERS, MOST_OF_ADDRESS = 20, 5
FIELDS = tuple(f.name for f in fields(Event) if f.name != "what")
WARNINGS = frozenset(
    {What.REFUSED, What.STRANGER, What.DROPPED, What.LEFT_OUT, What.DISMISSED, What.DISCARDED}
    | {What.WAITING, What.RETURNED, What.UNFIT, What.AWAITED, What.WITHOUT, What.UNHEARD}
    | {What.LOST, What.DECLINED, What.DISAGREED, What.EXPOSED, What.UNKNOWN_KEYS, What.UNLISTED}
    | {What.KEYS, What.EXPIRES}
)


def log_event(event: Event) -> None:
    """Log an event under `silograph`: its line, and its fields as the record's own."""
    if LOG.isEnabledFor(event.level):
        fields = {"event": str(event.what), **event.fields}
        LOG.log(event.level, "%s", event, extra=fields, exc_info=event.what is What.FAILED)


def both(first: EventCallback, second: EventCallback) -> EventCallback:
    """Return a callback that reports to two others."""

    def report(event: Event) -> None:
        first(event)
        second(event)

    return report


class StrangerLimit:
    """Report events, but only some of those that strangers cause.

    Whoever reaches the port causes an event with each stream, and each would be a line of the log.
    In each window of time the first few are reported, of each address and in all. The number of the
    others is reported when the window is over.

    Args:
        report: gets the events; called from several threads.
        window: length of a window in seconds. It begins with the first event of a stranger.
    """

    def __init__(self, report: EventCallback, window: float = 60.0) -> None:
        self._report = report
        self._window = window
        self._lock = threading.Lock()
        self._reported: Counter[str] = Counter()  # by address, in this window
        self._unlisted = 0
        self._timer: threading.Timer | None = None

    def __call__(self, event: Event) -> None:
        """Report an event, or count it."""
        if event.what not in (What.REFUSED, What.STRANGER) or self._has_room(event.address or ""):
            self._report(event)

    def _has_room(self, address: str) -> bool:
        host = address.rpartition(":")[0]  # each stream has another port
        with self._lock:
            if self._timer is None:
                self._timer = threading.Timer(self._window, self.close)
                self._timer.daemon = True
                self._timer.start()
            full = self._reported.total() >= MOST_STRANGERS
            if full or self._reported[host] >= MOST_OF_ADDRESS:
                self._unlisted += 1
                return False
            self._reported[host] += 1
            return True

    def close(self) -> None:
        """End the window and report how many events were left out, if any."""
        with self._lock:
            timer, self._timer = self._timer, None
            unlisted, self._unlisted = self._unlisted, 0
            self._reported.clear()
        if timer is not None:
            timer.cancel()
        if unlisted:
            note = f"{count_of(unlisted, 'more stream')} of strangers in {self._window:g} s"
            self._report(Event(What.UNLISTED, note=f"{note}: not listed one by one"))


# Lines of events, whatever their other fields; those that depend on them are in `_line`.
LINES = {
    What.LISTENING: "listening on {e.address}",
    What.METRICS: "metrics at http://{e.address}/metrics",
    What.REFUSED: "refused {e.silo} from {e.address}: {e.reason}",
    What.STRANGER: "a stream from {e.address} was no silo: {e.reason}",
    What.ASKED: "{e.silo} is asked for {e.op} of round {e.round}",
    What.DROPPED: "round {e.round} has lost {e.silo}: {e.reason}",
    What.LEFT_OUT: "{e.silo} is {e.reason}",
    What.DISCARDED: "an answer of {e.silo} came too late and is discarded",
    What.WAITING: "round {e.round} waits up to {e.seconds:g} s for {e.silo}, and is done again",
    What.UNFIT: "{e.silo} is back, but cannot take part: {e.reason}",
    What.AWAITED: "the result of the run waits up to {e.seconds:g} s for {e.silo}",
    What.WITHOUT: "{e.silo} has not taken the result of the run: {e.reason}",
    What.UNHEARD: "{e.silo} did not hear the last message: {e.reason}",
    What.DECLINED: "refused: {e.reason}",
    What.RESULT_STORED: "model, scores and report of the run are in {e.note}",
    What.RESUMED: "the run goes on after round {e.round}",
}


def _line(e: Event) -> str:
    if e.what in LINES:
        return LINES[e.what].format(e=e)
    # For how long a silo waits, with the moment when it gives up.
    wait = "" if e.seconds is None else f" for up to {e.seconds:g} s"
    wait += f" ({e.note})" if e.note else ""
    match e.what:
        case What.ATTACHED if e.room is not None:
            return f"{e.silo} is attached ({e.silos} of {e.room})"
        case What.ATTACHED:
            return f"{e.silo} is attached" + (f" to {e.address}" if e.address else "")
        case What.ANSWERED:
            what = "" if e.op is None else f" {e.op} of round {e.round}"
            took = "" if e.seconds is None else f" in {e.seconds:.3f} s"
            return f"{e.silo} has answered{what}{took}"
        case What.DISMISSED:
            return f"the server goes on without {e.silo or 'this silo'}: {e.reason}"
        case What.RETURNED if e.round is not None and e.round < 0:
            return f"{e.silo} is back, before it had any state"
        case What.RETURNED:
            return f"{e.silo} is back, with its state of round {e.round}"
        case What.LOST:
            return f"{e.silo} has no stream to {e.address}, tries again{wait}: {e.reason}"
        case What.STOPPED if e.silo is not None:
            return f"the server at {e.address} was stopped: {e.silo} waits for it{wait}"
        case What.STOPPED:
            silos = "" if e.silos == 0 else ": its silos wait until the run is continued"
            return f"the server was stopped{silos}"
        case What.FAILED:
            return f"{e.op or 'an op'} failed" + (f": {e.reason}" if e.reason else "")
        case What.ROUND:
            took = "" if e.seconds is None else f" after {e.seconds:.2f} s"
            return f"round {e.round} of {e.rounds} is over{took}: {e.note or 'not judged'}"
        case What.ENDED:
            return f"the run failed: {e.reason}" if e.reason else "the run is over"
        case _:
            return e.note or ""


# --- Where each silo of a run stands, worked out from events alone -------------------------------


class SiloState(StrEnum):
    """Activity of a silo."""

    CONNECTED = "connected"  # has nothing to do
    WORKING = "working"  # was asked and has not answered
    WAITING = "waiting"  # not there yet; or there again, until the next round
    LATE = "late"  # did not answer in time: the round goes on without it
    DROPPED = "dropped"  # failed in another way: the round goes on without it


AWAY = (SiloState.LATE, SiloState.DROPPED)


@dataclass(frozen=True)
class Standing:
    """The status of a silo.

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
    """Return the status of a silo after an event about it."""
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
    """The status of all silos; takes events from any thread.

    Args:
        names: of the silos, as far as they are known.
        room: silos of the run.
        report: gets every event, completed from earlier ones.
        clock: returns seconds.
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
        """Update the status of its silo by an event, and report the event."""
        now = self.clock()
        if event.silo is not None and event.what not in (What.REFUSED, What.NOTE):
            with self._lock:
                before = self._standings.get(event.silo, Standing(SiloState.WAITING, now))
                self._standings[event.silo] = after(before, event, now)
                event = self._with_counts(before, event, now)
        self._report(event)

    def standings(self) -> Mapping[str, Standing]:
        """Return the status of each silo: first `names`, then others in order of arrival."""
        with self._lock:
            return dict(self._standings)

    def _with_counts(self, before: Standing, event: Event, now: float) -> Event:
        """Return an event completed from earlier ones: counts, and the op of an answer."""
        if event.what is What.ATTACHED:
            if before.state in AWAY:
                return event
            num_attached = sum(s.state is not SiloState.WAITING for s in self._standings.values())
            return replace(event, silos=num_attached, room=self.room)
        if event.what is What.ANSWERED and before.state is SiloState.WORKING:
            seconds = round(now - before.since, 6)
            return replace(event, op=before.op, round=before.round, seconds=seconds)
        return event


def counts(standings: Mapping[str, Standing], room: int) -> dict[SiloState, int]:
    """Return the number of silos in each state; missing ones are WAITING."""
    by_state = dict.fromkeys(SiloState, 0)
    for standing in standings.values():
        by_state[standing.state] += 1
    by_state[SiloState.WAITING] += max(0, room - len(standings))
    return by_state
