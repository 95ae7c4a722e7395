"""Ways to read "heterogeneity" and "Hellinger distance": the paper's words allow several."""

from collections.abc import Callable

import numpy as np
from scipy.spatial.distance import pdist, squareform

from silograph.graph.heterogeneity import CutStatistics, label_distances

BINS = (10, 20, 40, 50, 60, 100)
PAIRS: dict[str, Callable[[np.ndarray], float]] = {
    "mean over pairs": lambda pairs: float(pairs.mean()),
    "median over pairs": lambda pairs: float(np.median(pairs)),
    # A client and itself count too, at 0, and every pair twice.
    "median over the whole matrix": lambda pairs: float(np.median(squareform(pairs))),
}


def label_readings(figures: CutStatistics) -> dict[str, float]:
    """Return label heterogeneity as distance and divergence, pairs summed up in each way."""
    distance = label_distances(figures.labels)
    return {
        f"{what}, {how}": summary(pairs)
        for what, pairs in (("distance", distance), ("divergence", distance**2))
        for how, summary in PAIRS.items()
    }


def in_base_2(readings: dict[str, float]) -> dict[str, float]:
    """Return label readings with the natural logarithm replaced by that to the base 2."""
    factor = {"distance": 1 / np.sqrt(np.log(2)), "divergence": 1 / np.log(2)}
    return {
        f"{name}, base 2": float(value * factor[name.partition(",")[0]])
        for name, value in readings.items()
    }


def degree_readings(degrees: list[np.ndarray]) -> dict[str, float]:
    """Return the mean Hellinger distance over pairs, for each way of sorting degrees into bins.

    Args:
        degrees: (n_c,) int64 internal degrees of each client's nodes.
    """
    top = max(int(degree.max()) for degree in degrees)
    tables = {"one bin a degree": [np.bincount(d, minlength=top + 1) for d in degrees]}
    tables["50 bins, one range for all clients"] = [
        np.histogram(d, bins=50, range=(0, top))[0] for d in degrees
    ]
    for bins in BINS:
        # Bin i of one client is compared with bin i of another, whatever degrees they stand for.
        name = f"{bins} bins over each client's own range"
        tables[name] = [np.histogram(d, bins=bins)[0] for d in degrees]
    return {name: hellinger(np.stack(counts)) for name, counts in tables.items()}


def hellinger(counts: np.ndarray) -> float:
    """Return the mean Hellinger distance over pairs of rows of counts (C, B), as shares."""
    roots = np.sqrt(counts / counts.sum(axis=1, keepdims=True))
    return float(pdist(roots).mean() / np.sqrt(2))
