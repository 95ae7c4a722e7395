"""Streams of which nobody knows yet whose they are: how many may wait, and who makes room.

An honest silo says who it is at once and signs as soon as it is asked. So where streams wait in
excess it is the one that has waited longest that is ended, of the address that has most of them:
who opens many and says nothing keeps nobody out.
"""

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

WAITING = 16  # streams that may be greeted at the same time, besides one of each known key
FROM_ONE = 8  # of them from one address


@dataclass(eq=False)
class Place:
    """The place of a stream that is being greeted.

    Attributes:
        address: of its other end, without the port.
        end: ends the stream.
        key: that it has claimed, if the place is the one in reserve for that key.
    """

    address: str
    end: Callable[[], object]
    key: bytes | None = None


class Greetings:
    """Who is being greeted; used by a thread for each stream.

    Args:
        known: public keys of silos by name; one place is in reserve for each.
    """

    def __init__(self, known: Callable[[], Mapping[str, bytes]]) -> None:
        self._known = known
        self._lock = threading.Lock()
        self._places: list[Place] = []  # who came first is first

    @contextmanager
    def place(self, peer: str, end: Callable[[], object]) -> Iterator[Place]:
        """Hold a place for a stream; another stream may have to go for it.

        Args:
            peer: address and port of its other end, as gRPC names them.
            end: ends the stream.
        """
        place = Place(peer.rpartition(":")[0], end)
        with self._lock:
            last = self._excess(place.address)
            if last is not None:
                self._places.remove(last)
            self._places.append(place)
        if last is not None:
            last.end()
        try:
            yield place
        finally:
            with self._lock:
                if place in self._places:
                    self._places.remove(place)

    def claim(self, place: Place, key: object) -> None:
        """Give a stream the place that is in reserve for the key that it claims, if it is free."""
        with self._lock:
            known = {public.hex(): public for public in self._known().values()}
            taken = {other.key for other in self._places}
            public = known.get(key) if isinstance(key, str) else None
            if public not in taken:
                place.key = public

    def _excess(self, address: str) -> Place | None:
        """Return who makes room for one more stream from an address, None if there is room."""
        waiting = [place for place in self._places if place.key is None]
        by_address = Counter(place.address for place in waiting)
        if by_address[address] < FROM_ONE:
            if len(waiting) < WAITING:
                return None
            address = max(by_address, key=lambda each: by_address[each])
        return next(place for place in waiting if place.address == address)
