"""Who contributes to a silo's rows in a run: always the same silos, or nobody.

The sums of a row over two sets of silos differ by the parts of the silos that one of them lacks.
All masks cancel in both, because contributors hear of the others from the server. So the owner of
the row, which would see both sums, takes no second set for it.

Only passes in which all slots take part are compared. Where silos draw them, sets differ.

B: boundary rows. W: bytes of a set of silos.
"""

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from silograph.core.errors import CheckpointError, mistake
from silograph.core.files import write_atomic
from silograph.federation.secure.sums import SumError


class RowSets:
    """The sets of contributors that a silo has taken for its boundary rows in a run.

    Args:
        path: file that they are written to; None keeps them in memory, until the process ends.

    Raises:
        CheckpointError: the file is damaged.
    """

    def __init__(self, path: Path | None = None) -> None:
        self._path = path
        self._silos: tuple[str, ...] = ()
        self._sets: np.ndarray | None = None
        if path is not None and path.exists():
            try:
                facts = json.loads(path.read_text(encoding="utf-8"))
                self._silos = tuple(map(str, facts["silos"]))
                octets = np.frombuffer(bytes.fromhex(facts["sets"]), np.uint8)
                self._sets = octets.reshape(facts["shape"])
            except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
                raise CheckpointError(
                    f"expected contributors of rows in {path}, got: {error}",
                    **mistake("damaged-file", path),
                ) from None

    def check(self, silos: Sequence[str], sets: np.ndarray) -> None:
        """Take the contributors of a pass, and write down those of rows that had none so far.

        Args:
            silos: names of all.
            sets: (B, W) uint8 contributors of each boundary row, a bit for each silo.

        Raises:
            SumError: a row has had others.
        """
        known = np.zeros_like(sets) if self._sets is None else self._sets
        if self._sets is not None and (tuple(silos) != self._silos or sets.shape != known.shape):
            raise SumError("expected the silos of earlier passes in the same order, got others")
        is_empty = np.asarray(~known.any(axis=1))
        differs = ~is_empty & sets.any(axis=1) & (sets != known).any(axis=1)
        if differs.any():
            raise SumError(
                f"expected the contributors of earlier passes for each row, got others for "
                f"{differs.sum()} of {len(sets)} rows: the difference of two sums would show parts "
                "of single silos"
            )
        if self._sets is not None and not sets[is_empty].any():
            return
        self._silos, self._sets = tuple(silos), np.where(is_empty[:, None], sets, known)
        if self._path is not None:
            facts = {"silos": self._silos, "shape": sets.shape, "sets": self._sets.tobytes().hex()}
            write_atomic(self._path, json.dumps(facts), private=True)
