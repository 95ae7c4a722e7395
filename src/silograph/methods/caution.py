"""Where the defaults of a method are known not to learn, as parts that say what they hold for."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

Predicted = Literal["labels of nodes", "ratings"]


@dataclass(frozen=True)
class Caution:
    """A part of a method's caution.

    >>> print(Caution("raise --lr", of="ratings"))
    for ratings, raise --lr

    Attributes:
        text: what is known not to learn, and what does.
        of: what is predicted where it holds; None: whatever is predicted.
    """

    text: str
    of: Predicted | None = None

    def __str__(self) -> str:
        """Return it in words."""
        return self.text if self.of is None else f"for {self.of}, {self.text}"


def in_words(parts: Iterable[Caution]) -> str:
    """Return parts as one text, empty without any."""
    return "; ".join(map(str, parts))
