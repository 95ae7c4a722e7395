"""The state of a block's clients, which calls to some of them change in place.

C: clients of the block. k: clients of a call.
"""

from collections import Counter
from collections.abc import Callable

import torch
from torch import Tensor

from silograph.core.payload import Ragged, Stacked, State, copied, rows_of, state_of, take_all
from silograph.federation.check import HAS, check_alike
from silograph.federation.partial_field import PartialField


class BlockState:
    """Holds the state of C clients.

    A call to some of them copies their part only, and writes back the fields that it changed. It
    writes into memory that nobody else has: a field that came from outside (from an op, which may
    hold the same tensor elsewhere, or from a checkpoint) is copied before it is first written to.

    A call to some clients may create fields and drop them. An op never sees clients of which only
    some have a field: `groups` keeps them apart, as if each were a block of its own.

    Args:
        clients: C.
        fields: as `for_others` returned them; none at first.
    """

    def __init__(self, clients: int, fields: State | None = None) -> None:
        self._clients = clients
        given = fields or {}
        self._partial: dict[str, PartialField] = {}
        for name, mask in given.items():
            if name.startswith(HAS):
                own = name.removeprefix(HAS)
                self._partial[own] = found = PartialField(clients, given[own])
                found.put(given[own], mask.t.nonzero()[:, 0])
        self._fields = {
            name: f
            for name, f in given.items()
            if name not in self._partial and not name.startswith(HAS)
        }
        self._own: set[str] = set()  # fields whose memory nobody else has

    @property
    def all(self) -> State:
        """The state of all clients, for a call to all; what it returns goes to `replace`.

        All of them must have the same fields (see `groups`).
        """
        for name in list(self._partial):
            found = self._partial.pop(name)
            if bool(found.has.any()):
                self._fields[name] = found.whole()
                self._own.add(name)
        return dict(self._fields)

    def all_for(self, written: Callable[[str], bool]) -> State:
        """Return `all`, for a call that writes to the fields whose names are `written`."""
        for name, field in self.all.items():
            if written(name):
                self._make_own(name, field)
        return dict(self._fields)

    def for_others(self) -> State:
        """Return the state of all clients for good: later calls leave it as it is.

        A field that only k clients have has their k slices or runs, and beside it stands a (C,)
        bool field, `HAS` and its name, that says who they are.
        """
        self._own.clear()
        shown: dict[str, Stacked | Ragged] = dict(self._fields)
        for name, found in self._partial.items():
            if bool(found.has.any()):
                shown[name] = found.whole()
                if not bool(found.has.all()):
                    shown[HAS + name] = Stacked(found.has.clone())
        return shown

    def holds(self, t: Tensor) -> bool:
        """Return whether a field of all clients lies in the memory of a tensor."""
        memory = t.untyped_storage().data_ptr()
        return any(f.t.untyped_storage().data_ptr() == memory for f in self._fields.values())

    def groups(self, positions: Tensor) -> list[Tensor]:
        """Return the clients at `positions` (k,) int64 in groups that have the same fields."""
        groups = [positions]
        for found in self._partial.values():
            parts = ((found.has[g], g) for g in groups)
            groups = [g[mask] for has, g in parts for mask in (has, ~has) if bool(mask.any())]
        return groups

    def take(self, positions: Tensor, wanted: Callable[[str], bool] = bool) -> State:
        """Return a copy of the state of the clients at `positions` (k,) int64, one group.

        `wanted`: by the name of a field, whether it is of it; by default each field is.
        """
        fields = {name: field for name, field in self._fields.items() if wanted(name)}
        taken = state_of(take_all(fields, positions))
        for name, found in self._partial.items():
            if wanted(name) and bool(found.has[positions[0]]):
                taken[name] = found.take(positions)
        return taken

    def replace(self, new: State, written: Callable[[str], bool] = lambda _: False) -> None:
        """Keep what a call to all has returned; `written`: the names that it overwrites."""
        if self._own or any(map(written, new)):
            holders = Counter(f.t.untyped_storage().data_ptr() for f in new.values())
            self._own = {
                name
                for name in new
                if (written(name) or (name in self._own and new[name] is self._fields[name]))
                and holders[new[name].t.untyped_storage().data_ptr()] == 1
            }
        self._fields = dict(new)

    def put(
        self,
        old: State,
        new: State,
        positions: Tensor,
        written: Callable[[str], bool] = lambda _: False,
    ) -> None:
        """Keep what a call to the clients at `positions` (k,) int64 has returned.

        Args:
            old: what `take` gave it.
            new: the same fields, but for those that the call has created or dropped.
            positions: of the clients.
            written: by the name of a field, whether the call may have written to what it was given.

        Raises:
            ProtocolError: a field is of another type or dtype, or has slices or rows of another
                shape, than the call was given or other clients have; then nothing is changed.
        """
        changed = [name for name in new if new[name] is not old.get(name) or written(name)]
        for name in changed:
            known = self._partial[name].empty if name in self._partial else self._fields.get(name)
            if known is not None:
                check_alike(name, known, new[name])
        for name in changed:
            self._put(name, new[name], positions)
        for name in old.keys() - new.keys():
            self._as_partial(name, old[name]).drop(positions)

    def _put(self, name: str, part: Stacked | Ragged, positions: Tensor) -> None:
        whole = self._fields.get(name)
        places = positions
        if isinstance(whole, Ragged) and isinstance(part, Ragged):
            alike = bool((whole.off.diff()[positions] == part.off.diff()).all())
            places = rows_of(whole.off, positions)
            whole = whole if alike else None
        if whole is None:
            self._as_partial(name, part).put(part, positions)
            return
        self._make_own(name, whole).t.index_copy_(0, places, part.t)

    def _make_own(self, name: str, field: Stacked | Ragged) -> Stacked | Ragged:
        """Return a field of all clients in memory that nobody else has."""
        if name not in self._own:
            field = self._fields[name] = copied(field)
            self._own.add(name)
        return field

    def _as_partial(self, name: str, like: Stacked | Ragged) -> PartialField:
        """Return a field as one that some clients may lack, or whose runs may change."""
        if name not in self._partial:
            self._partial[name] = PartialField(self._clients, like)
            whole = self._fields.pop(name, None)
            self._own.discard(name)
            if whole is not None:
                everyone = torch.arange(self._clients, device=like.t.device)
                self._partial[name].put(whole, everyone)
        return self._partial[name]
