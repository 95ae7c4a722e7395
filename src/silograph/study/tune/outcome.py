"""What a search leaves: every trial, and the winner's scores; as table or data."""

import io
import json
import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from silograph.core.config import RunConfig
from silograph.core.html import html_lines, html_table
from silograph.core.ranges import Range
from silograph.experiment.data_frame import frame_of
from silograph.experiment.markdown import markdown_table
from silograph.experiment.run.result import VIEWS
from silograph.study.cells import Line
from silograph.study.tune.proposals import Trial
from silograph.task.metric_table import METRICS, Metric

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True, eq=False, repr=False)
class Tuned:
    """The outcome of a search.

    Attributes:
        ranges: what was searched.
        seeds: of every trial.
        view: whose validation scores counted.
        trials: all of them, in the order in which they were proposed.
        best: the winner; None where no trial went well.
        config: the run with the winner's values; its seeds are the base's.
        method: name of the method.
        winner: lines of the winner with its test scores, by seed.
        folder: where it was written, or None.
    """

    ranges: Mapping[str, Range]
    seeds: tuple[int, ...]
    view: str
    trials: tuple[Trial, ...]
    best: Trial | None
    config: RunConfig
    method: str
    winner: tuple[Line, ...]
    folder: str | None = None

    def __repr__(self) -> str:
        """Return the table."""
        return self.summary()

    def _repr_html_(self) -> str:
        title = f"search: {self.method} on {self.config.dataset}"
        return html_table(title, *self._texts()) + html_lines(self.notes)

    @property
    def metric(self) -> Metric:
        """The metric that was searched by."""
        return self.trials[0].metric if self.trials else METRICS["accuracy"]

    @property
    def rows(self) -> list[dict[str, Any]]:
        """One dict for each trial: its values and its validation score, never a test score."""
        return [
            {
                "trial": trial.number,
                **trial.params,
                "val_mean": _finite(trial.mean),
                "val_std": _spread(trial.scores),
                "best": self.best is not None and trial.number == self.best.number,
                "diverged": trial.diverged,
                "error": trial.error,
            }
            for trial in self.trials
        ]

    @property
    def test(self) -> dict[str, float | None]:
        """The winner's test score by view, mean over seeds."""
        scored = [line["test"] for line in self.winner if "error" not in line]
        means = {}
        for view in VIEWS:
            found = [test[view].get(self.metric.name) for test in scored if test[view]]
            values = [value for value in found if value is not None]
            means[view] = statistics.mean(values) if values else None
        return means

    @property
    def notes(self) -> list[str]:
        """What a reader of the numbers must know."""
        seeds = ", ".join(map(str, self.seeds))
        what = f"{self.metric.title} on validation nodes"
        notes = [f"val: {what}, {self.view} view, mean over seeds {seeds}"]
        if self.best is None:
            return [*notes, "no trial went well"]
        tests = [f"{v} {self._text(a)}" for v, a in self.test.items() if a is not None]
        tests += self._constant()
        notes.append(f"best: trial {self.best.number}; on test nodes: {', '.join(tests)}")
        notes.append(
            f"its validation score is the best of {len(self.trials)} and so too good; seeds that "
            "were searched with favor it against methods that were not"
        )
        return notes

    def _constant(self) -> list[str]:
        """Return what the best constant prediction has on test nodes, in one text or none."""
        found = [line["constant"] for line in self.winner if line.get("constant")]
        scores = [constant["scores"].get(self.metric.name) for constant in found]
        values = [score for score in scores if score is not None]
        return [f"{found[0]['name']} {self._text(statistics.mean(values))}"] if values else []

    def _text(self, value: float) -> str:
        """Return a score in the unit of all tables and files."""
        return self.metric.text(value)

    def _texts(self) -> tuple[list[str], list[list[str]]]:
        rows = []
        for row in sorted(self.rows, key=lambda r: -self.metric.goodness(r["val_mean"])):
            spread = "" if row["val_std"] is None else f" ± {self._text(row['val_std'])}"
            mean = "-" if row["val_mean"] is None else f"{self._text(row['val_mean'])}{spread}"
            if row["diverged"]:
                mean = f"{row['diverged']} of {len(self.seeds)} diverged"
            params = [_short(row[key]) for key in self.ranges]
            rows.append([f"{row['trial']}{'*' if row['best'] else ''}", mean, *params])
        keys = [key.replace("_", " ") for key in self.ranges]  # so that they wrap
        return ["trial", "val", *keys], rows

    def summary(self, width: int = 140) -> str:
        """Return the trials, best first, and notes as text of at most so many columns."""
        from silograph.experiment.terminal_table import console_to, print_fitted

        file = io.StringIO()
        console = console_to(file, width)
        print_fitted(console, *self._texts())
        console.print()
        for note in self.notes:
            console.print(note)
        return "\n".join(line.rstrip() for line in file.getvalue().splitlines())

    def to_markdown(self) -> str:
        """Return ranges, trials and notes as a page."""
        ranges = [[key, str(values)] for key, values in self.ranges.items()]
        parts = [
            f"# Search: {self.method} on {self.config.dataset}",
            markdown_table(["key", "range"], ranges),
            markdown_table(*self._texts()),
            "\n".join(f"- {note}" for note in self.notes),
        ]
        return "\n\n".join(parts) + "\n"

    def to_json(self) -> str:
        """Return everything as one line of JSON."""
        values = {
            "method": self.method,
            "ranges": {key: str(r) for key, r in self.ranges.items()},
            "seeds": self.seeds,
            "view": self.view,
            "metric": self.metric.name,
            "trials": self.rows,
            "best": None if self.best is None else dict(self.best.params),
            "test": self.test,
            "winner": list(self.winner),
            "notes": self.notes,
            "folder": self.folder,
        }
        return json.dumps(values, allow_nan=False)

    def to_dataframe(self) -> "pd.DataFrame":
        """Return `rows` as a pandas DataFrame.

        Raises:
            SilographError: pandas is not installed.
        """
        return frame_of(self.rows, "tuned.rows")


def _finite(mean: float | None) -> float | None:
    return mean if mean is not None and math.isfinite(mean) else None


def _spread(scores: tuple[float, ...]) -> float | None:
    return statistics.stdev(scores) if len(scores) > 1 and all(map(math.isfinite, scores)) else None


def _short(value: object) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)
