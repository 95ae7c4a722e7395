"""The form of masked rows: partial sums in fixed point, and who contributes to a sum.

A silo's part of a sum is round(x * 2^bits) modulo 2^64. Its absolute value is at most `MOST_PART`,
so the sum of `MOST_CONTRIBUTORS` parts is below 2^63. A sum beyond what its contributors can have
sent shows that masks were left in it.

Rows and their gradients differ in size, so they have bounds of their own. 2^-37 is below the
rounding of float32 for rows above 10^-4, 2^-45 for gradients above 10^-7.

C: clients. S: halo slots. B: boundary rows. k: rows. D: width.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b

import numpy as np
import torch
from torch import Tensor

from silograph.core.errors import ProtocolError, mistake
from silograph.core.payload import owners
from silograph.federation.field_specs import WORDS
from silograph.federation.secure.fixed_point import FixedPoint, decode, encode
from silograph.graph.block.block import Route
from silograph.graph.silos.data import Silo

MOST_CONTRIBUTORS = 2**10 - 1
MOST_PART = 2.0**53
ROWS = FixedPoint(bits=37, bound=2.0**16)
GRADIENTS = FixedPoint(bits=45, bound=2.0**8)
OFFER_BYTES = 32 + 32  # of a public key, and its proof
SEALED_KEY_BYTES = 32 + 8 + 16  # of the key of a silo's rows, how many there are, and the seal


def encode_rows(rows: Tensor, form: FixedPoint) -> Tensor:
    """Return rows (k, D) as int64.

    Raises:
        ProtocolError: a value beyond the bound of its form, or NaN.
    """
    values = encode(rows.detach().cpu().numpy(), form, name="rows")
    return torch.from_numpy(values.view(np.int64)).to(rows.device)


def decode_rows(total: Tensor, form: FixedPoint, like: Tensor) -> Tensor:
    """Return sums (k, D) int64 as values of the dtype of `like`."""
    values = decode(total.cpu().numpy().view(np.uint64), form)
    return torch.from_numpy(values).to(like.device, like.dtype)


def as_words(rows: Tensor) -> Tensor:
    """Return floating point rows (k, D) as integers of the same bits."""
    return rows.detach().contiguous().view(WORDS[rows.dtype])


def from_words(words: Tensor, like: Tensor) -> Tensor:
    """Return rows (k, D) from integers of the same bits; `like`: rows of their dtype.

    Raises:
        ProtocolError: values that are not finite, as of rows that were changed on their way.
    """
    rows = words.contiguous().view(like.dtype)
    if not bool(rows.isfinite().all()):
        raise ProtocolError("expected finite numbers in rows of other silos, got NaN or infinity")
    return rows


def bytes_of_sets(clients: int) -> int:
    """Return how many bytes a set of clients takes, one bit each."""
    return -(-clients // 8)


def contributors_of(route: Route, slots: Tensor) -> Tensor:
    """Return who contributes to each boundary row, (B, W) uint8, a bit for each client.

    Args:
        route: of the federation.
        slots: (s,) int64 halo slots whose clients send something for them.

    Raises:
        ProtocolError: more contributors of a row than a sum can have.
    """
    clients, rows = len(route.slot_off) - 1, int(route.boundary_off[-1])
    sets = np.zeros((rows, bytes_of_sets(clients)), np.uint8)
    client, target = owners(route.slot_off)[slots].numpy(), route.target[slots].numpy()
    np.bitwise_or.at(sets, (target, client // 8), (1 << client % 8).astype(np.uint8))
    most = int(np.bincount(target, minlength=1).max(initial=0))
    if most > MOST_CONTRIBUTORS:
        raise ProtocolError(
            f"expected at most {MOST_CONTRIBUTORS:,} silos with neighbors of a node for "
            f"secure_aggregation, got {most:,}: leave secure_aggregation out",
            **mistake("secure-sum", ""),
        )
    return torch.from_numpy(sets)


def count_silos(sets: Tensor) -> Tensor:
    """Return the number of clients in each set (k, W) uint8, (k,) int64."""
    bits = np.unpackbits(sets.cpu().numpy(), axis=1)
    return torch.from_numpy(bits.sum(1, dtype=np.int64)).to(sets.device)


@dataclass(frozen=True, eq=False)
class RowNames:
    """What a silo knows by its own edges of the rows that it exchanges.

    Attributes:
        slot: (S,) int64 names of the nodes of halo slots, the same at all silos that know them.
        owner: (S,) int64 silo that owns each, a place in `silos`.
        row: (B,) int64 names of the nodes of boundary rows.
        link: (E, 2) int64 pairs of a boundary row and a silo with an edge to it.
        silos: names of the other silos.
    """

    slot: np.ndarray
    owner: np.ndarray
    row: np.ndarray
    link: np.ndarray
    silos: tuple[str, ...]

    @staticmethod
    def of(
        slot: np.ndarray, owner: Sequence[str], row: np.ndarray, links: Iterable[tuple[int, str]]
    ) -> "RowNames":
        """Return the same from the names of owners (S,), and of the silos of links (E,)."""
        pairs = sorted(set(links))
        silos = sorted({*owner, *(name for _, name in pairs)})
        place = {name: number for number, name in enumerate(silos)}
        link = np.array([(i, place[name]) for i, name in pairs], np.int64).reshape(-1, 2)
        owners_of_slots = np.array([place[name] for name in owner], np.int64)
        return RowNames(slot, owners_of_slots, row, link, tuple(silos))

    def with_part(self, slots: np.ndarray) -> "RowNames":
        """Return the same with some of the slots (s,) only."""
        return replace(self, slot=self.slot[slots], owner=self.owner[slots])

    def position_of_owners(self, silos: Sequence[str]) -> np.ndarray:
        """Return the positions (S,) of the owners among silos; -1 for another silo."""
        positions: np.ndarray = self._positions(silos)[self.owner]
        return positions

    def neighbors(self, silos: Sequence[str]) -> np.ndarray:
        """Return to which silos each boundary row has edges, (B, C) bool."""
        position = self._positions(silos)[self.link[:, 1]]
        is_linked = np.zeros((len(self.row), len(silos)), bool)
        is_linked[self.link[position >= 0, 0], position[position >= 0]] = True
        return is_linked

    def _positions(self, silos: Sequence[str]) -> np.ndarray:
        """Return the positions of the other silos among silos; -1 for those that are not there."""
        position = {name: number for number, name in enumerate(silos)}
        return np.array([position.get(name, -1) for name in self.silos], np.int64)


def names_of_rows(silo: Silo) -> RowNames:
    """Return what a silo knows of the rows that it exchanges."""
    cross, keys = silo.cross, silo.keys
    boundary, place = np.unique(cross.row.numpy(), return_inverse=True)
    slots = [_node_name(owner, key) for owner, key in zip(cross.silo, cross.keys, strict=True)]
    rows = [_node_name(silo.name, keys[row]) for row in boundary.tolist()]
    silo_of_edge = (cross.silo[slot] for slot in cross.slot.tolist())
    links = zip(place.reshape(-1).tolist(), silo_of_edge, strict=True)
    return RowNames.of(np.array(slots, np.int64), cross.silo, np.array(rows, np.int64), links)


def _node_name(owner: str, key: str) -> int:
    digest = blake2b(f"{owner}\0{key}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)
