"""`RowMinimum`: how much must stand behind a row that silos exchange."""

from dataclasses import dataclass


@dataclass(frozen=True)
class RowMinimum:
    """The least numbers behind each exchanged row; what has fewer is left out.

    Attributes:
        nodes: own nodes that a silo's row sums over, which that silo enforces.
        silos: silos whose rows a sum adds up, which the server enforces; a silo cannot check it.
    """

    nodes: int = 1
    silos: int = 1

    @property
    def limits(self) -> bool:
        """Whether rows can be left out."""
        return self.nodes > 1 or self.silos > 1


NO_MINIMUM = RowMinimum()
