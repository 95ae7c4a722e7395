"""The tasks on labels of nodes: one class of several, and sets of labels.

n: nodes. K: classes or label bits. C: clients.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from silograph.core.errors import ProtocolError
from silograph.graph.graph import MISSING, LabelForm, Schema
from silograph.task.base import ClientValues, CountSpec
from silograph.task.counts import BINS, HISTOGRAM, HITS, VAL_HISTOGRAM, JudgedRows, node_loss, tally
from silograph.task.metric_table import LOSS, metrics_of_labels, own_scores
from silograph.task.scores import (
    ALWAYS,
    PARTS,
    ClassScores,
    Part,
    ScoreRequest,
    Scores,
    class_scores,
    client_accuracy,
    client_f1_micro,
    score,
)


@dataclass(frozen=True)
class LabelTask:
    """A task whose labels are classes or bits; see `Task`.

    Attributes:
        name: what users call it.
        labels: the form of labels that it predicts.
        primary: the metric that picks the best round unless the run names another one.
        columns: metrics that rounds.csv always has.
        by_client: metrics that are worked out for each client by itself.
        constant: what the best constant prediction is called.
        classes: labels are whole numbers.
        histograms: counts have histograms, for the AUC.
    """

    name: str
    labels: LabelForm
    primary: str
    columns: tuple[str, ...]
    by_client: tuple[str, ...]
    constant: str
    classes: bool = True
    histograms: bool = True

    @property
    def metrics(self) -> tuple[str, ...]:
        """Names of the scores."""
        return metrics_of_labels(self.labels)

    @property
    def wide(self) -> bool:
        """Whether a node has a bit for each output, and not one class."""
        return self.labels == "multilabel"

    def outputs(self, schema: Schema) -> int:
        """Return the number of classes or label bits."""
        return schema.num_classes

    def loss(self, logits: Tensor, y: Tensor, class_weight: Tensor | None = None) -> Tensor:
        """Return the cross-entropy of every node, (n,); see `node_loss`."""
        return node_loss(logits, y, self.labels, class_weight)

    def tally(self, rows: JudgedRows, *, val_histogram: bool = False) -> dict[str, Tensor]:
        """Return counts and sums by client; see `silograph.task.counts.tally`."""
        return tally(rows, val_histogram=val_histogram)

    def counts(self, outputs: int, *, val_histogram: bool = False) -> Mapping[str, CountSpec]:
        """Return the specs of `tally` for one client."""
        hits = CountSpec((outputs,), torch.int32, low=0)
        bins = CountSpec((outputs, 2, BINS), torch.int32, low=0)
        specs = {HISTOGRAM: bins} | ({VAL_HISTOGRAM: bins} if val_histogram else {})
        for part in PARTS:
            specs[f"{part}.nodes"] = CountSpec((), torch.int32, low=0)
            specs[f"{part}.loss"] = CountSpec((), torch.float64)
            specs |= {f"{part}.{name}": hits for name in HITS}
        return specs

    def scores(
        self, counts: Mapping[str, Tensor], part: Part, request: ScoreRequest = ALWAYS
    ) -> Scores | None:
        """Return the scores of `val` or `test`; see `silograph.task.scores.score`."""
        return score(counts, part, self.labels, request)

    def client_scores(self, counts: Mapping[str, Tensor], part: Part) -> dict[str, ClientValues]:
        """Return the scores of each client by itself."""
        scores = {"accuracy": client_accuracy(counts, part, self.labels)}
        if "f1_micro" in self.by_client:
            scores["f1_micro"] = client_f1_micro(counts, part)
        return scores

    def class_scores(self, counts: Mapping[str, Tensor], part: Part) -> tuple[ClassScores, ...]:
        """Return the scores of each class or label bit."""
        return class_scores(counts, part)

    def decide(self, logits: Tensor) -> Tensor:
        """Return (n,) int64 classes, or (n, K) int64 bits."""
        return (logits > 0).long() if self.wide else logits.argmax(dim=1)

    def probabilities(self, logits: Tensor) -> Tensor | None:
        """Return the probability of each class, rows that add up to 1, or of each bit."""
        wide = logits.double()
        return wide.sigmoid() if self.wide else wide.softmax(dim=1)

    def constant_logits(self, y: Tensor, outputs: int) -> Tensor:
        """Return logits (K,) that predict the commonest class, or the bits that most nodes have."""
        if self.wide:
            num_known = (y != MISSING).double().sum(dim=0)
            rate = ((y == 1).double().sum(dim=0) + 1) / (
                num_known + 2
            )  # Laplace's, so never 0 or 1
            return torch.logit(rate)
        return torch.bincount(y[y != MISSING], minlength=outputs).double().clamp(min=1e-9).log()


NODE_CLASS = LabelTask(
    name="node_class",
    labels="multiclass",
    primary="accuracy",
    columns=("accuracy", "accuracy_client_mean", "f1_macro", "auc", LOSS),
    by_client=("accuracy",),
    constant="largest class",
)
LABEL_SET = LabelTask(
    name="label_set",
    labels="multilabel",
    primary="f1_micro",
    columns=("accuracy", "accuracy_client_mean", "f1_macro", "f1_micro", "auc", LOSS),
    by_client=("accuracy", "f1_micro"),
    constant="commonest bits",
)


# --- The task on numbers at nodes: regression with squared error ---------------------------------
#
# n: nodes. K: targets of a node. C: clients. j: judged rows.


SUMS = ("square", "absolute")


@dataclass(frozen=True)
class ValueTask:
    """Regression on one or several numbers a node; NaN marks those that are missing; see `Task`."""

    name: str = "node_value"
    labels: LabelForm = "node_value"
    primary: str = "rmse"
    columns: tuple[str, ...] = ("rmse", "mae", "rmse_client_mean", LOSS)
    by_client: tuple[str, ...] = ("rmse", "mae")
    wide: bool = True
    classes: bool = False
    histograms: bool = False
    constant: str = "mean target"

    @property
    def metrics(self) -> tuple[str, ...]:
        """Names of the scores."""
        return metrics_of_labels(self.labels)

    def outputs(self, schema: Schema) -> int:
        """Return the number of targets."""
        return schema.num_classes

    def loss(self, logits: Tensor, y: Tensor, class_weight: Tensor | None = None) -> Tensor:
        """Return the mean squared error of every node over its known targets, (n,); else 0."""
        del class_weight
        is_known = ~torch.isnan(y)
        error = torch.where(is_known, logits - y.to(logits.dtype).nan_to_num(nan=0.0), 0.0)
        return error.square().sum(dim=1) / is_known.sum(dim=1).clamp(min=1)

    def tally(self, rows: JudgedRows, *, val_histogram: bool = False) -> dict[str, Tensor]:
        """Return counts and sums by client.

        For `val` and `test`: `*.nodes` (C,) int32 judged nodes, `*.loss` (C,) sum of node losses,
        `*.known` (C, K) int32 judged targets, `*.square` and `*.absolute` (C, K) sums of their
        errors; sums are float64.

        Raises:
            ProtocolError: logits or targets that are not those of the rows.
        """
        del val_histogram  # numbers have no histograms
        _check_rows(rows)
        logits = rows.logits.double()
        is_known, loss = ~torch.isnan(rows.y), self.loss(logits, rows.y)
        error = torch.where(is_known, logits - rows.y.double().nan_to_num(nan=0.0), 0.0)
        tallies = {"known": is_known.int(), "square": error.square(), "absolute": error.abs()}
        fields: dict[str, Tensor] = {}
        for part, in_part in zip(PARTS, (rows.val, ~rows.val), strict=True):
            nodes = torch.bincount(rows.group[in_part], minlength=rows.groups)
            fields[f"{part}.nodes"] = nodes.int()
            fields[f"{part}.loss"] = rows.sum_by_client(loss[in_part], in_part)
            for name, values in tallies.items():
                fields[f"{part}.{name}"] = rows.sum_by_client(values[in_part], in_part)
        return fields

    def counts(self, outputs: int, *, val_histogram: bool = False) -> Mapping[str, CountSpec]:
        """Return the specs of `tally` for one client."""
        del val_histogram
        specs: dict[str, CountSpec] = {}
        for part in PARTS:
            specs[f"{part}.nodes"] = CountSpec((), torch.int32, low=0)
            specs[f"{part}.loss"] = CountSpec((), torch.float64)
            specs[f"{part}.known"] = CountSpec((outputs,), torch.int32, low=0)
            specs |= {f"{part}.{name}": CountSpec((outputs,), torch.float64) for name in SUMS}
        return specs

    def scores(
        self, counts: Mapping[str, Tensor], part: Part, request: ScoreRequest = ALWAYS
    ) -> Scores | None:
        """Return the scores of `val` or `test` over all targets; None without any node."""
        del request
        nodes = int(counts[f"{part}.nodes"].sum())
        if nodes == 0:
            return None
        square, absolute, num_known = (
            float(counts[f"{part}.{name}"].sum()) + float(_merged_counts(counts, part, name).sum())
            for name in (*SUMS, "known")
        )
        client_rmse = [
            value for value in self.client_scores(counts, part)["rmse"] if value is not None
        ]
        return Scores(
            {
                "rmse": math.sqrt(square / num_known),
                "mae": absolute / num_known,
                "rmse_client_mean": sum(client_rmse) / len(client_rmse),
                **own_scores(self.labels, counts, part),
            }
        )

    def client_scores(self, counts: Mapping[str, Tensor], part: Part) -> dict[str, ClientValues]:
        """Return the scores of each client by itself."""
        square, absolute, num_known = (
            (counts[f"{part}.{name}"].sum(1) + _merged_counts(counts, part, name)).tolist()
            for name in (*SUMS, "known")
        )
        return {
            "rmse": tuple(
                math.sqrt(s / n) if n else None for s, n in zip(square, num_known, strict=True)
            ),
            "mae": tuple(a / n if n else None for a, n in zip(absolute, num_known, strict=True)),
        }

    def class_scores(self, counts: Mapping[str, Tensor], part: Part) -> tuple[ClassScores, ...]:
        """There are no classes."""
        del counts, part
        return ()

    def decide(self, logits: Tensor) -> Tensor:
        """Return the predicted numbers, (n,) where a node has one target, else (n, K)."""
        return logits[:, 0] if logits.shape[1] == 1 else logits

    def probabilities(self, logits: Tensor) -> None:
        """Return None: a number has no classes."""
        del logits

    def constant_logits(self, y: Tensor, outputs: int) -> Tensor:
        """Return the mean (K,) float64 of each target, 0 where none is known."""
        del outputs
        return y.double().nanmean(dim=0).nan_to_num(nan=0.0)


def _merged_counts(counts: Mapping[str, Tensor], part: Part, name: str) -> Tensor:
    """Return the counts or sums of targets that clients have merged, (C,); zeros if none may be."""
    merged = counts.get(f"{part}.merged.{name}")
    return torch.zeros_like(counts[f"{part}.nodes"]) if merged is None else merged


def _check_rows(rows: JudgedRows) -> None:
    """Raise `ProtocolError` unless every row has outputs, and a target for each of them."""
    logits, y, count = rows.logits, rows.y, len(rows.group)
    if logits.dim() != 2 or len(logits) != count or not logits.is_floating_point():
        raise ProtocolError(
            f"expected predictions of {count} judged rows, got {logits.dtype} of shape "
            f"{tuple(logits.shape)}"
        )
    if y.shape != logits.shape or not y.is_floating_point() or len(rows.val) != count:
        raise ProtocolError(
            f"expected numbers of shape {tuple(logits.shape)} and {count} masks to judge "
            f"predictions by, got {y.dtype} of shape {tuple(y.shape)} and {len(rows.val)} masks"
        )


NODE_VALUE = ValueTask()
