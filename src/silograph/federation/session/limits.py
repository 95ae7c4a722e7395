"""How long a session waits, and for how many silos."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Limits:
    """How many silos a session needs, and how long it waits for them.

    Attributes:
        least: silos without which a call fails.
        seconds: how long a silo may take over its answers of a round, those of others not counted;
            None is as long as the stream is there.
        patience: seconds for which a round that cannot go on waits for silos to attach again.
    """

    least: int
    seconds: float | None = None
    patience: float = 0.0
