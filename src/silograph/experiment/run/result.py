"""What a run leaves: scores by view, the table of rounds, the model, and how it came about."""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from silograph.core.errors import ConfigError
from silograph.core.resolved_config import ResolvedConfig
from silograph.experiment.data_frame import frame_of
from silograph.experiment.report import write_report
from silograph.experiment.resolve.cutting import Cut
from silograph.experiment.result_files import Row
from silograph.experiment.run.trained_model import TrainedModel
from silograph.federation.ledger import Ledger
from silograph.task.base import ClientValues
from silograph.task.metric_table import METRICS, Metric
from silograph.task.metric_table import reported as without_loss
from silograph.task.scores import ClassScores, Scores, Views

if TYPE_CHECKING:
    import pandas as pd

VIEWS = tuple(f.name for f in fields(Views))


@dataclass(frozen=True, eq=False, repr=False)
class Result:
    """The outcome of a run.

    Attributes:
        config: the run's config, every default and seed written out.
        test: scores on test nodes at the best round, by view.
        val: scores on validation nodes at the best round, by view.
        baseline: test scores of the best constant prediction by all training labels; None without
            test nodes, and where silos hold the labels.
        constant: what that prediction is called.
        metrics: names of the scores that the task has.
        client_scores: test scores of each client at the best round, by metric and by the views
            that exist; None for a client without test nodes.
        class_scores: test scores of each class at the best round, by its name, in the view that
            picks the round; none where the task has no classes.
        client_facts: what the method reports of each client in the last round, (C,) tensors.
        judged_without: clients that were away when the best round was judged, whose nodes are in
            no score; silos of a real federation only.
        best_round: the round (from 1) that validation picked; the last one without validation
            nodes.
        rounds: one row for each judged round; bytes and flops are totals so far.
        stopped: why the run ended.
        advice: what the course of the scores says about the number of rounds; None is nothing.
        model: the server's model at the best round; None where the server has none.
        client_models: the clients' own models at the best round, by client; empty where they
            predict with the server's, and where silos keep theirs.
        local_bias: mean distance of logits to those of a centralized model from the same initial
            weights after as many epochs; None unless the config asked for it.
        ledger: what every call cost.
        handed_over_bytes: of the model that silos get when the run is over, which are not in the
            ledger; in a simulation those that silos of their own would get.
        partition_hash: hash of the cut.
        cut: the graph as it was used, with the client and the part of every node; None where
            silos held it.
        seconds: wall-clock seconds of the rounds, evaluation included.
        peak_memory_bytes: the process's peak resident memory in bytes.
        result_dir: the result folder, or None.
    """

    config: ResolvedConfig
    test: Views
    val: Views
    baseline: Scores | None
    constant: str
    metrics: tuple[str, ...]
    client_scores: Mapping[str, Mapping[str, ClientValues]]
    class_scores: Mapping[str, ClassScores]
    client_facts: Mapping[str, Tensor]
    judged_without: tuple[str, ...]
    best_round: int
    rounds: tuple[Row, ...]
    stopped: str
    advice: str | None
    model: TrainedModel | None
    client_models: Mapping[str, TrainedModel]
    local_bias: float | None
    ledger: Ledger
    handed_over_bytes: int
    partition_hash: str
    cut: Cut | None
    seconds: float
    peak_memory_bytes: int
    result_dir: str | None

    def __repr__(self) -> str:
        """Return method, dataset and scores; the fields hold thousands of numbers."""
        about = f"{self.config.method} on {self.config.dataset}, best round {self.best_round}"
        note = "" if self.advice is None else f"\nnote: {self.advice}"
        return f"Result({about})\n{self.summary()}{note}"

    @property
    def bytes(self) -> int:
        """Bytes of all messages, both directions, evaluation included."""
        return self.ledger.bytes

    @property
    def flops(self) -> float:
        """Floating-point operations of all clients."""
        return self.ledger.flops

    @property
    def metric(self) -> Metric:
        """The metric that picked the best round."""
        return METRICS[self.config.metric]

    @property
    def client_accuracy(self) -> Mapping[str, ClientValues]:
        """Test accuracy of each client, by view; empty where the task has no accuracy."""
        return self.client_scores.get("accuracy", {})

    @property
    def reported(self) -> list[str]:
        """Names of the scores that tables show, the run's metric first."""
        # Stable: the others stay in their order.
        return sorted(without_loss(self.metrics), key=lambda name: name != self.metric.name)

    def to_dict(self) -> dict[str, Any]:
        """Return the final result as plain values, as `--json` prints it."""
        config = self.config
        return {
            "dataset": config.dataset,
            "method": config.method,
            "clients": config.clients,
            "partition": config.partition,
            "rounds": config.rounds,
            "seed": config.seed,
            "partition_hash": self.partition_hash,
            "test": {view: reported(getattr(self.test, view)) for view in VIEWS},
            "val": {view: scores and dict(scores) for view, scores in vars(self.val).items()},
            "metric": self.metric.name,
            "baseline": self.baseline
            and {"name": self.constant, "scores": reported(self.baseline)},
            "by_class": [{"class": name, **vars(s)} for name, s in self.class_scores.items()],
            "local_bias": self.local_bias,
            "judged_without": list(self.judged_without),
            "best_round": self.best_round,
            "stopped": self.stopped,
            "advice": self.advice,
            "bytes": {
                "total": self.bytes,
                "by_kind": self.ledger.bytes_by_kind,
                "handed_over": self.handed_over_bytes,
            },
            "flops": self.flops,
            "seconds": round(self.seconds, 3),
            "peak_memory_bytes": self.peak_memory_bytes,
            "result_dir": self.result_dir,
        }

    def to_json(self) -> str:
        """Return `to_dict` as one line of JSON."""
        return json.dumps(self.to_dict())

    def to_dataframe(self) -> "pd.DataFrame":
        """Return the table of rounds as a pandas DataFrame.

        Raises:
            SilographError: pandas is not installed.
        """
        return frame_of(self.rounds, "result.rounds")

    def report(self, path: str | os.PathLike[str] | None = None) -> Path:
        """Write the page of this run and return its path.

        Args:
            path: the page's file; None is report.html in the result folder, which is there anyway.

        Raises:
            ConfigError: the run has no result folder (`out`), or `path` holds something else.
        """
        if self.result_dir is None:
            raise ConfigError(
                "expected a run with a result folder for report(), got one without: give out=DIR "
                "to sg.run"
            )
        return write_report(self.result_dir, path)

    def summary(self) -> str:
        """Return the scores as a small text table."""
        names = self.reported
        header = f"{'test':<14}" + "".join(f"{name.replace('_', ' '):>22}" for name in names)
        lines = [header]
        for view in VIEWS:
            scores = getattr(self.test, view)
            texts = [METRICS[name].text(scores[name] if scores else None) for name in names]
            lines.append(f"{view:<14}" + "".join(f"{text:>22}" for text in texts))
        if self.baseline is not None:
            texts = [METRICS[name].text(self.baseline[name]) for name in names]
            lines.append(f"{self.constant:<14}" + "".join(f"{text:>22}" for text in texts))
        if self.local_bias is not None:
            lines.append(f"{'local bias':<14}{self.local_bias:>22.4g}")
        return "\n".join(lines)


def reported(scores: Scores | None) -> Mapping[str, float | None] | None:
    """Return the scores that results print, None where a view does not exist."""
    if scores is None:
        return None
    return {name: scores[name] for name in without_loss(scores)}
