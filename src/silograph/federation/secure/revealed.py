"""The sums that a silo helps to unmask in a run: of the same values those of one set of silos.

A round that is repeated after silos were lost has a second sum. If its silos are others, sums can
be combined so that the values of one silo are left: of AB, AC and BC, or of all and two parts of
the others. Silos see only the sums that they are in. So each one unmasks sums of one set of silos,
and any other set that it is in is refused.

A sum can be unmasked without a silo whose values are in it, because enough other silos reveal
shares. So a silo also records with whom it masked its values, before these leave. Before it helps
with another sum of these values, it counts the recorded silos that have not confirmed that other
sum. If they are enough to have unmasked the first sum, it refuses. A silo that has unmasked one sum
never confirms a sum over other silos. In sparse graphs a silo hears of its partners only, and these
differ from sum to sum, so there this check is not made.

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


class RevealedError(SumError):
    """A sum that is not that of an earlier one's silos; field `revealed`: the earlier ones."""

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
    """Silos of the sums of a run that were unmasked or may be, by call and by this silo's values.

    Args:
        path: file that they are written to, a line of JSON each; None keeps them in memory, until
            the process ends.

    Raises:
        CheckpointError: the file is damaged.
    """

    def __init__(self, path: Path | None = None) -> None:
        self._path = path
        self._sets: dict[str, frozenset[str]] = {}
        self._masked: dict[str, list[tuple[frozenset[str], int]]] = {}  # with the threshold
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
                call, values = str(facts["call"]), str(facts["values"])
                if "threshold" in facts:
                    self._note_masked(call, values, silos, int(facts["threshold"]))
                else:
                    self._note_unmasked(call, values, silos)
                self._written.add(silos)
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise CheckpointError(
                f"expected unmasked sums in {path}, got: {error}", **mistake("damaged-file", path)
            ) from None

    def _note_masked(self, call: str, values: str, silos: frozenset[str], threshold: int) -> None:
        for key in _keys_of(call, values):
            masked = self._masked.setdefault(key, [])
            if (silos, threshold) not in masked:
                masked.append((silos, threshold))

    def _note_unmasked(self, call: str, values: str, silos: frozenset[str]) -> None:
        for key in _keys_of(call, values):
            # The first set stays: `check` lets no other one through.
            self._sets.setdefault(key, silos)
            self._masked.pop(key, None)  # see `check_confirmed`: of these no other one is unmasked

    def check(self, call: str, values: str, silos: frozenset[str]) -> None:
        """Raise `RevealedError` where this silo has helped to unmask a sum of other silos.

        Args:
            call: names the call within the run.
            values: of this silo; see `digest_of_values`.
            silos: whose values the sum has.
        """
        for key in _keys_of(call, values):
            earlier = self._sets.get(key, silos)
            if earlier != silos:
                raise RevealedError(
                    f"expected the {len(earlier)} silos of an earlier sum of the values of {call} "
                    f"again, got {len(silos)} of which {len(silos - earlier)} are others: the "
                    "server could subtract",
                    earlier,
                )

    def check_confirmed(self, call: str, values: str, confirming: frozenset[str]) -> None:
        """Raise `RevealedError` where another sum with this silo's values may be unmasked.

        Args:
            call: names the call within the run.
            values: of this silo.
            confirming: silos that have confirmed the sum that is to be unmasked.
        """
        for key in _keys_of(call, values):
            for silos, threshold in self._masked.get(key, []):
                others = silos - confirming
                if len(others) >= threshold:
                    raise RevealedError(
                        f"expected a sum of the values of {call} that more silos of the earlier "
                        f"one confirm, got {len(others)} that do not: they may have unmasked it",
                        silos,
                    )

    def add_masked(self, call: str, values: str, silos: frozenset[str], threshold: int) -> None:
        """Write down that masked values are about to leave.

        Args:
            call: names the call within the run.
            values: of this silo.
            silos: with whom it has masked them, and itself.
            threshold: how many of these can unmask them.
        """
        self._note_masked(call, values, silos, threshold)
        self._write({"call": call, "values": values, "threshold": threshold}, silos)

    def add(self, call: str, values: str, silos: frozenset[str]) -> None:
        """Write down a sum that is about to be unmasked; arguments as for `check`."""
        self._note_unmasked(call, values, silos)
        self._write({"call": call, "values": values}, silos)

    def _write(self, facts: dict[str, Any], silos: frozenset[str]) -> None:
        if self._path is None:
            return
        names = sorted(silos)
        facts["silos"] = sha256("\n".join(names).encode()).hexdigest()[:32]
        if silos not in self._written:
            facts["names"] = names
        line = json.dumps(facts).encode() + b"\n"
        handle = os.open(self._path, os.O_WRONLY | os.O_CREAT, 0o600)
        try:
            # Before this line is on the disk nothing has left, so a torn one of a former process,
            # or of a full disk, is cut off.
            os.ftruncate(handle, self._end)
            os.pwrite(handle, line, self._end)
            os.fsync(handle)  # a sum must not be forgotten once its shares have left
        finally:
            os.close(handle)
        self._end += len(line)
        self._written.add(silos)


def _keys_of(call: str, values: str) -> Iterator[str]:
    yield f"call {call}"
    if values:
        yield f"values {values}"


def allowed_silos(names: list[str], earlier: list[frozenset[str]]) -> list[str] | None:
    """Return whose values a server may add up so that silos unmask them; None: those of nobody.

    Args:
        names: of the silos that are there.
        earlier: those of each earlier sum of the same values.
    """
    # Silos refuse any set but that of the sum that they unmasked. Of several such sums the largest
    # whose silos are all there is repeated.
    there = frozenset(names)
    if not earlier:
        return names
    whole = max((silos for silos in earlier if silos <= there), key=len, default=None)
    return None if whole is None else [name for name in names if name in whole]
