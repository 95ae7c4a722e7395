"""The last words of a server: the run is over, or the server stops and may continue it."""

from collections.abc import Mapping

from silograph.federation.session.events import Cause, Event, EventCallback, What, log_event
from silograph.federation.session.message import Type, facts_body
from silograph.federation.session.peer import LostError, Peer

GOODBYE_SECONDS = 10.0


def say_goodbye(peers: Mapping[str, Peer], reason: str, report: EventCallback = log_event) -> None:
    """Tell silos that the run is over and why it failed, if it did; end their streams."""
    _say_last(peers, Type.END, {"reason": reason}, report)


def say_stopping(peers: Mapping[str, Peer], report: EventCallback = log_event) -> None:
    """Tell silos that the server stops and the run may be continued; end their streams."""
    _say_last(peers, Type.STOPPING, {}, report)


def _say_last(
    peers: Mapping[str, Peer], kind: Type, facts: Mapping[str, str], report: EventCallback
) -> None:
    for peer in peers.values():
        peer.send(kind, facts_body(facts))
    for peer in peers.values():
        try:
            _last_answer(peer)
        except LostError as error:
            report(Event(What.UNHEARD, peer.name, reason=str(error)))
        peer.close()


def _last_answer(peer: Peer) -> None:
    """Take the last answer, and before it the one that a silo in the midst of a call owes."""
    try:
        peer.answer(Type.DONE, GOODBYE_SECONDS)
    except LostError as error:
        if error.cause is not Cause.GARBAGE:
            raise
        peer.answer(Type.DONE, GOODBYE_SECONDS)
