"""The sums that a silo has helped to unmask in a run: of two of the same values it allows few.

A round that is repeated after silos were lost has a second sum. Where the silos of both sums differ
by one, the difference of the sums is the value of that silo. So a silo writes down whose values
each sum has, before it reveals a share, and refuses a sum of the same values whose silos differ
from an earlier one by 1 to `least` - 1. A third set of silos is refused as well: three sums can
have a combination with the value of one silo although every two of them differ by more.

Sums are of the same values if they belong to the same call of a round, or if this silo's values are
the same numbers, not all 0: a server may ask for the same in several rounds.
"""

import json
import os
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np

from silograph.core.errors import CheckpointError, mistake
from silograph.federation.secure.sums import SumError

POINT = bytes(range(32))  # of the polynomial; any one will do
MOST_SETS = 2  # of silos, in sums of the same values


class RevealedError(SumError):
    """A sum that is too much like an earlier one; field `revealed`: the silos of that one."""

    def __init__(self, line: str, revealed: frozenset[str]) -> None:
        super().__init__(line)
        self.revealed = revealed


def digest_of_values(values: np.ndarray) -> str:
    """Return what names the values (n,) uint64 of a silo; "" where all are 0.

    Equal numbers never have two digests, and nobody gains by two numbers of one digest. So a
    polynomial hash is enough, which takes an eighth of the time of SHA-256.
    """
    from cryptography.hazmat.primitives.poly1305 import Poly1305  # silos that mask have it

    return Poly1305.generate_tag(POINT, values.view(np.uint8).data).hex() if values.any() else ""


class RevealedSums:
    """Silos of the unmasked sums of a run, by call and by this silo's values.

    Args:
        path: file that they are written to, a line of JSON each; None keeps them in memory, until
            the process ends.

    Raises:
        CheckpointError: the file is damaged.
    """

    def __init__(self, path: Path | None = None) -> None:
        self._path = path
        self._sets: dict[str, list[frozenset[str]]] = {}
        self._written: set[frozenset[str]] = set()
        self._end = 0  # of the file's whole lines
        if path is not None and path.exists():
            self._read(path)

    def _read(self, path: Path) -> None:
        by_digest: dict[str, frozenset[str]] = {}
        text = path.read_bytes()
        self._end = text.rfind(b"\n") + 1  # a line that was cut short has revealed nothing
        try:
            for line in text[: self._end].splitlines():
                facts = json.loads(line)
                if "names" in facts:
                    by_digest[facts["silos"]] = frozenset(map(str, facts["names"]))
                silos = by_digest[facts["silos"]]
                self._note(str(facts["call"]), str(facts["values"]), silos)
                self._written.add(silos)
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise CheckpointError(
                f"expected unmasked sums in {path}, got: {error}", **mistake("damaged-file", path)
            ) from None

    def _note(self, call: str, values: str, silos: frozenset[str]) -> None:
        for key in _keys_of(call, values):
            sets = self._sets.setdefault(key, [])
            if silos not in sets:
                sets.append(silos)

    def check(self, call: str, values: str, silos: frozenset[str], least: int) -> None:
        """Raise `RevealedError` where a sum and earlier ones tell of fewer than `least` silos.

        Args:
            call: names the call within the run.
            values: of this silo; see `digest_of_values`.
            silos: whose values the sum has.
            least: fewest silos of a sum.
        """
        for key in _keys_of(call, values):
            sets = self._sets.get(key, [])
            if silos in sets:
                continue
            near = next((other for other in sets if len(silos ^ other) < least), None)
            if near is None and len(sets) < MOST_SETS:
                continue
            other = near or sets[-1]
            raise RevealedError(
                f"expected the silos of an earlier sum of {call} again, or others that differ by "
                f"at least {least} of them, got {len(silos ^ other)}: the server could subtract",
                other,
            )

    def add(self, call: str, values: str, silos: frozenset[str]) -> None:
        """Write down a sum that is about to be unmasked; arguments as for `check`."""
        self._note(call, values, silos)
        if self._path is None:
            return
        names = sorted(silos)
        facts: dict[str, Any] = {"call": call, "values": values}
        facts["silos"] = sha256("\n".join(names).encode()).hexdigest()[:32]
        if silos not in self._written:
            facts["names"] = names
        line = json.dumps(facts).encode() + b"\n"
        handle = os.open(self._path, os.O_WRONLY | os.O_CREAT, 0o600)
        try:
            os.ftruncate(handle, self._end)
            os.pwrite(handle, line, self._end)
            os.fsync(handle)
        finally:
            os.close(handle)
        self._end += len(line)
        self._written.add(silos)


def _keys_of(call: str, values: str) -> Iterator[str]:
    yield f"call {call}"
    if values:
        yield f"values {values}"


def allowed_silos(names: list[str], earlier: list[frozenset[str]], least: int) -> list[str] | None:
    """Return whose values a server may add up so that silos unmask them; None: those of nobody.

    It leaves out as few as it can.

    Args:
        names: of the silos that are there.
        earlier: those of each earlier sum of the same values, each set once.
        least: fewest silos of a sum, and of the difference of two.
    """
    there = frozenset(names)
    is_near = any(len(there ^ other) < least for other in earlier if other != there)
    if there in earlier or (not is_near and len(earlier) < MOST_SETS):
        return names
    whole = max((other for other in earlier if other <= there), key=len, default=None)
    if whole is not None:
        return [name for name in names if name in whole]
    if len(earlier) == 1:
        common = [name for name in names if name in earlier[0]]
        few = set(common[-(least - len(earlier[0] ^ there)) :])
        return [name for name in names if name not in few]
    return None
