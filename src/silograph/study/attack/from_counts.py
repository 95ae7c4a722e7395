"""An attack on the counts of evaluation. C: silos. K: classes."""

from torch import Tensor


def single_labels(counts: Tensor) -> Tensor:
    """Return the label of the only node that a silo counts by class (C, K), -1 for several."""
    return counts.argmax(1).where(counts.sum(1) == 1, -1)
