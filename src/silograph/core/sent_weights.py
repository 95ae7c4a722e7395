"""How weights travel between the server and clients."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class SentWeights:
    """How weights travel.

    Attributes:
        numbers: `exact`: in the run's floating point numbers. `float16`, `int8`, `int4`: matrices
            in these; int8 and int4 (two in a byte) have a scale for each row. Clients send by how
            much they have changed, with what was rounded off before (error feedback).
        rows: of the first weights: `all`, or `used`: only those of features that occur at a client.
    """

    numbers: Literal["exact", "float16", "int8", "int4"] = "exact"
    rows: Literal["all", "used"] = "all"

    @property
    def plain(self) -> bool:
        """Whether weights travel whole and exactly."""
        return self == PLAIN_WEIGHTS


PLAIN_WEIGHTS = SentWeights()
