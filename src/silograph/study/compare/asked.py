"""What is compared, and a row of what comes of it."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from silograph.core.config import Scalar
from silograph.study.compare.paired_statistics import Test

ComparisonRow = dict[str, Any]


@dataclass(frozen=True)
class Asked:
    """What is compared, and how it is judged.

    Attributes:
        methods: names of methods, in the order of the tables.
        seeds: seeds, each with its own cut, split and initial weights unless those are fixed.
        over: further fields of the config or options of parts, and their values.
        options: options of methods, by method.
        baseline: the method that others are tested against; None for the best one.
        metric: the score; None for the one that picks the rounds of the runs.
        view: view of the paired test; `own` for one that all methods have, of several the one that
            most methods are about.
        test: `t`, `resampled`, `wilcoxon`, or `auto`: resampled where every seed splits one graph
            anew, else t.
    """

    methods: tuple[str, ...]
    seeds: tuple[int, ...]
    over: Mapping[str, tuple[Scalar, ...]]
    options: Mapping[str, Mapping[str, Scalar]]
    baseline: str | None = None
    metric: str | None = None
    view: str = "own"
    test: Test = "auto"

    @property
    def tests(self) -> bool:
        """Whether there is another method to test one against."""
        return len(self.methods) > 1
