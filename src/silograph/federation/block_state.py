"""The state of a block's clients, which calls to some of them change in place.

C: clients of the block. k: clients of a call.
"""

from collections import Counter

from torch import Tensor

from silograph.core.errors import ProtocolError
from silograph.core.payload import Ragged, Stacked, State, put, rows_of, state_of, take_all


class BlockState:
    """Holds the state of C clients.

    A call to some of them copies their part only, and writes back the fields that it changed. It
    writes into memory that nobody else has: a field that came from outside (from an op, which may
    hold the same tensor elsewhere, or from a checkpoint) is copied before it is first written to.
    """

    def __init__(self, fields: State | None = None) -> None:
        self._fields: dict[str, Stacked | Ragged] = dict(fields or {})
        self._own: set[str] = set()  # fields whose memory nobody else has

    @property
    def all(self) -> State:
        """The state of all clients, for a call to all; what it returns goes to `replace`."""
        return dict(self._fields)

    def for_others(self) -> State:
        """Return the state of all clients for good: later calls leave it as it is."""
        self._own.clear()
        return self.all

    def take(self, positions: Tensor) -> State:
        """Return a copy of the state of the clients at `positions` (k,) int64."""
        return state_of(take_all(self._fields, positions))

    def replace(self, new: State) -> None:
        """Keep what a call to all has returned."""
        if self._own:
            holders = Counter(f.t.untyped_storage().data_ptr() for f in new.values())
            self._own = {
                name
                for name in self._own
                if new.get(name) is self._fields[name]
                and holders[new[name].t.untyped_storage().data_ptr()] == 1
            }
        self._fields = dict(new)

    def put(self, old: State, new: State, positions: Tensor) -> None:
        """Keep what a call to the clients at `positions` (k,) int64 has returned.

        Args:
            old: what `take` gave it.
            new: the same fields.
            positions: of the clients.

        Raises:
            ProtocolError: a field is of another type or dtype, or has slices or rows of another
                shape; then nothing is changed.
        """
        changed = [name for name in self._fields if new[name] is not old[name]]
        for name in changed:
            _check_alike(name, old[name], new[name])
        for name in changed:
            self._put(name, new[name], positions)

    def _put(self, name: str, part: Stacked | Ragged, positions: Tensor) -> None:
        whole = self._fields[name]
        places = positions
        if isinstance(whole, Ragged) and isinstance(part, Ragged):
            if not bool((whole.off.diff()[positions] == part.off.diff()).all()):
                self._fields[name] = put(whole, part, positions)
                self._own.add(name)
                return
            places = rows_of(whole.off, positions)
        if name not in self._own:
            t = whole.t.clone()
            whole = Ragged(t, whole.off) if isinstance(whole, Ragged) else Stacked(t)
            self._fields[name] = whole
            self._own.add(name)
        whole.t.index_copy_(0, places, part.t)


def _check_alike(name: str, old: Stacked | Ragged, new: Stacked | Ragged) -> None:
    """Raise `ProtocolError` unless one field can take the place of the other."""
    if type(old) is not type(new):
        raise ProtocolError(
            f"expected state of type {type(old).__name__}, got {type(new).__name__}: "
            "an op must keep the type of a state field"
        )
    if old.t.dtype != new.t.dtype or old.t.shape[1:] != new.t.shape[1:]:
        raise ProtocolError(
            f"expected state {name!r} of {old.t.dtype} and shape {tuple(old.t.shape[1:])} a client "
            f"or row, got {new.t.dtype} and {tuple(new.t.shape[1:])}: a call to some clients must "
            "keep both"
        )
