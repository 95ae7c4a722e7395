"""The tasks on labels of nodes: one class of several, and sets of labels.

n: nodes. K: classes or label bits. C: clients.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from silograph.graph.graph import MISSING, LabelForm, Schema
from silograph.task.base import ClientValues, CountSpec
from silograph.task.counts import BINS, HISTOGRAM, HITS, VAL_HISTOGRAM, JudgedRows, tally
from silograph.task.loss import node_loss
from silograph.task.metric_table import LOSS, metrics_of_labels
from silograph.task.scores import (
    PARTS,
    ClassScores,
    Part,
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

    def loss(self, logits: Tensor, y: Tensor) -> Tensor:
        """Return the cross-entropy of every node, (n,); see `node_loss`."""
        return node_loss(logits, y, self.labels)

    def tally(self, rows: JudgedRows, *, val_histogram: bool = False) -> dict[str, Tensor]:
        """Return counts and sums by client; see `silograph.task.counts.tally`."""
        return tally(rows, val_histogram=val_histogram)

    def counts(self, outputs: int, *, val_histogram: bool = False) -> Mapping[str, CountSpec]:
        """Return what `tally` gives of one client."""
        hits = CountSpec((outputs,), torch.int32, low=0)
        bins = CountSpec((outputs, 2, BINS), torch.int32, low=0)
        specs = {HISTOGRAM: bins} | ({VAL_HISTOGRAM: bins} if val_histogram else {})
        for part in PARTS:
            specs[f"{part}.nodes"] = CountSpec((), torch.int32, low=0)
            specs[f"{part}.loss"] = CountSpec((), torch.float64)
            specs |= {f"{part}.{name}": hits for name in HITS}
        return specs

    def scores(self, counts: Mapping[str, Tensor], part: Part) -> Scores | None:
        """Return the scores of `val` or `test`; see `silograph.task.scores.score`."""
        return score(counts, part, self.labels)

    def client_scores(self, counts: Mapping[str, Tensor], part: Part) -> dict[str, ClientValues]:
        """Return the scores of each client by itself."""
        found = {"accuracy": client_accuracy(counts, part, self.labels)}
        if "f1_micro" in self.by_client:
            found["f1_micro"] = client_f1_micro(counts, part)
        return found

    def class_scores(self, counts: Mapping[str, Tensor], part: Part) -> tuple[ClassScores, ...]:
        """Return the scores of each class or label bit."""
        return class_scores(counts, part)

    def decide(self, logits: Tensor) -> Tensor:
        """Return (n,) int64 classes, or (n, K) int64 bits."""
        return (logits > 0).long() if self.wide else logits.argmax(dim=1)

    def probabilities(self, logits: Tensor) -> Tensor | None:
        """Return how likely each class is, rows that add up to 1, or each bit by itself."""
        wide = logits.double()
        return wide.sigmoid() if self.wide else wide.softmax(dim=1)

    def constant_logits(self, y: Tensor, outputs: int) -> Tensor:
        """Return logits (K,) that predict the commonest class, or the bits that most nodes have."""
        if self.wide:
            known = (y != MISSING).double().sum(dim=0)
            rate = ((y == 1).double().sum(dim=0) + 1) / (known + 2)  # Laplace's, so never 0 or 1
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
