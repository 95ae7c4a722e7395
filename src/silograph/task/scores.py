"""From counts to scores: pooled over all clients, and as a mean over clients.

C: clients. K: classes or label bits. B: bins.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from silograph.graph.graph import LabelForm
from silograph.task.decision_scores import scores_of_histogram
from silograph.task.metric_table import own_scores


@dataclass(frozen=True, repr=False)
class Scores(Mapping[str, float | None]):
    """How good a model is on a set of nodes; a value is None where it cannot be said.

    >>> scores = Scores({"accuracy": 0.5, "loss": 1.25})
    >>> scores.accuracy, scores["loss"]
    (0.5, 1.25)

    Which scores there are depends on the task. Classes and label sets have

    - accuracy: share of right labels over all judged nodes (multi-label: over label bits).
    - accuracy_client_mean: mean of the clients' own accuracies, clients without nodes left out.
    - f1_macro: mean of the classes' F1, classes neither present nor predicted left out.
    - f1_micro: F1 of all decisions together (equals accuracy for multi-class).
    - auc: area under the ROC curve, one class against the rest, mean over classes that have
      both; from histograms of 255 fixed bins. Of validation nodes only where the run picks its
      round by it.

    - what the run asks for of `silograph.task.decision_scores`, such as average_precision.

    Every task has loss, the mean loss of a node.

    Attributes:
        values_by_name: the scores.
    """

    values_by_name: Mapping[str, float | None]

    def __getitem__(self, name: str) -> float | None:
        """Return a score by its name."""
        return self.values_by_name[name]

    def __iter__(self) -> Iterator[str]:
        """Go through the names."""
        return iter(self.values_by_name)

    def __len__(self) -> int:
        """Return the number of scores."""
        return len(self.values_by_name)

    def __getattr__(self, name: str) -> float | None:
        """Return a score as an attribute.

        Raises:
            AttributeError: there is no such score; the line names those that there are.
        """
        if name.startswith("_") or name == "values_by_name":  # while it is being unpickled
            raise AttributeError(name)
        if name not in self.values_by_name:
            known_names = ", ".join(self.values_by_name)
            raise AttributeError(f"expected a score among {known_names}, got {name!r}")
        return self.values_by_name[name]

    def __repr__(self) -> str:
        """Return names and values."""
        return f"Scores({', '.join(f'{name}={value!r}' for name, value in self.items())})"


@dataclass(frozen=True)
class Views:
    """The three views of evaluation; None where a method has no such model.

    Attributes:
        server: the server's model, each node through its own client's graph.
        uncut: the server's model on the uncut graph (simulation only).
        personalized: each client's own model on its own nodes.
    """

    server: Scores | None
    uncut: Scores | None
    personalized: Scores | None


@dataclass(frozen=True)
class ClassScores:
    """How good a model is at one class or label bit, over all clients; None where nothing says it.

    Attributes:
        nodes: nodes that have the class.
        precision: share of the predictions of the class that are right.
        recall: share of these nodes that are found.
        f1: harmonic mean of both.
    """

    nodes: int
    precision: float | None
    recall: float | None
    f1: float | None


@dataclass(frozen=True)
class ScoreRequest:
    """Which scores of classes a run wants besides those that every run has.

    Attributes:
        metrics: names of metrics that are computed from histograms.
        positive: the class that these are of, where there are two.
    """

    metrics: tuple[str, ...] = ()
    positive: int = 1


ALWAYS = ScoreRequest()
Part = Literal["val", "test"]
PARTS: tuple[Part, ...] = ("val", "test")


def auc_of(histogram: Tensor) -> float | None:
    """Return the macro AUC of (K, 2, B) counts; scores within one bin count as ties."""
    negatives, positives = histogram.cpu().numpy().astype(np.float64).transpose(1, 0, 2)
    negatives_below = negatives.cumsum(axis=1) - negatives
    area = (positives * (negatives_below + negatives / 2)).sum(axis=1)
    pairs = positives.sum(axis=1) * negatives.sum(axis=1)
    has_both = pairs > 0
    return _mean(area[has_both] / pairs[has_both]) if has_both.any() else None


def _f1(hits: int, errors: int) -> float | None:
    """Return F1 of hits and of false positives and negatives together; None where nothing is."""
    return 2 * hits / (2 * hits + errors) if hits + errors else None


def _mean(values: np.ndarray) -> float:
    """Return the mean of values (k,), added in torch's order."""
    return float(torch.from_numpy(values).mean())


def _counts_as_int64(
    counts: Mapping[str, Tensor], part: Part, names: Iterable[str]
) -> list[np.ndarray]:
    """Return counts as int64: a score takes many small steps, which torch makes slowly."""
    return [counts[f"{part}.{name}"].cpu().numpy().astype(np.int64) for name in names]


def _count_right_and_judged(
    counts: Mapping[str, Tensor], part: Part, task: LabelForm
) -> tuple[np.ndarray, np.ndarray]:
    """Return right and judged labels of each client, (C,) int64 both."""
    if task == "multiclass":
        (nodes,) = _counts_as_int64(counts, part, ("nodes",))
        return _sum_classes(counts, part, "tp"), nodes
    fp, fn, num_known = (_sum_classes(counts, part, name) for name in ("fp", "fn", "known"))
    return num_known - fp - fn, num_known


def _sum_classes(counts: Mapping[str, Tensor], part: Part, name: str) -> np.ndarray:
    """Return counts summed over classes, (C,) int64, those of merged ones included."""
    (by_class,) = _counts_as_int64(counts, part, (name,))
    merged = counts.get(f"{part}.merged.{name}")
    total = _sum_by_client(by_class)
    return total if merged is None else total + merged.cpu().numpy()


def _sum_by_client(counts: np.ndarray) -> np.ndarray:
    """Return the sums (C,) of counts (C, K); `sum` takes ten times as long for few columns."""
    totals: np.ndarray = np.einsum("ck->c", counts)
    return totals


def _sum_by_class(counts: np.ndarray) -> np.ndarray:
    """Return the sums (K,) of counts (C, K)."""
    totals: np.ndarray = np.einsum("ck->k", counts)
    return totals


def client_accuracy(
    counts: Mapping[str, Tensor], part: Part, task: LabelForm
) -> tuple[float | None, ...]:
    """Return the accuracy of each client, None where it has no judged label; see `score`."""
    num_right, judged = _count_right_and_judged(counts, part, task)
    pairs = zip(num_right.tolist(), judged.tolist(), strict=True)
    return tuple(hits / number if number else None for hits, number in pairs)


def client_f1_micro(counts: Mapping[str, Tensor], part: Part) -> tuple[float | None, ...]:
    """Return the F1 of all decisions of each client, None where nothing is true or predicted."""
    tp, fp, fn = (_sum_classes(counts, part, name) for name in ("tp", "fp", "fn"))
    pairs = zip((2 * tp).tolist(), (2 * tp + fp + fn).tolist(), strict=True)
    return tuple(hits / number if number else None for hits, number in pairs)


def class_scores(counts: Mapping[str, Tensor], part: Part) -> tuple[ClassScores, ...]:
    """Return the scores of each of K classes or label bits, from the counts of all clients."""
    tp, fp, fn = (counts[f"{part}.{name}"].long().sum(0).tolist() for name in ("tp", "fp", "fn"))

    def share(hits: int, number: int) -> float | None:
        return hits / number if number else None

    return tuple(
        ClassScores(
            num_right + misses,
            share(num_right, num_right + false_hits),
            share(num_right, num_right + misses),
            share(2 * num_right, 2 * num_right + false_hits + misses),
        )
        for num_right, false_hits, misses in zip(tp, fp, fn, strict=True)
    )


def score(
    counts: Mapping[str, Tensor], part: Part, task: LabelForm, request: ScoreRequest = ALWAYS
) -> Scores | None:
    """Return the scores of classes or label sets; None without any node.

    Macro F1, AUC and the scores of a request are None where they would be those of less than half
    of the labels, because clients have merged classes of few nodes or have sent no histogram.

    Args:
        counts: fields of `silograph.task.counts.tally`, each (C, ...), and
            `test.histogram` (K, 2, B) of all clients together; perhaps `val.histogram`.
        part: which nodes.
        task: what the labels mean.
        request: which scores besides those that every run has.
    """
    nodes, tp, fp, fn = _counts_as_int64(counts, part, ("nodes", "tp", "fp", "fn"))
    if nodes.sum() == 0:
        return None
    is_multiclass = task == "multiclass"
    right, judged = _count_right_and_judged(counts, part, task)
    is_scored = judged > 0
    num_right, num_wrong = (
        right,
        judged - right,
    )  # decisions: of one class of several each node has one
    if not is_multiclass:
        num_right, misses, false = (_sum_classes(counts, part, name) for name in ("tp", "fn", "fp"))
        num_wrong = misses + false
    labels = int(judged.sum()) * (
        tp.shape[1] if is_multiclass else 1
    )  # of one class of several, K a node
    merged = counts.get(f"{part}.merged.known")
    most_by_class = merged is None or 2 * int(merged.sum()) <= labels
    hits, errors = _sum_by_class(tp), _sum_by_class(fp + fn)
    present = hits + errors > 0
    f1 = 2 * hits[present] / (2 * hits[present] + errors[present])
    bins = counts.get(f"{part}.histogram")
    # Spread bins add up to whole numbers but for rounding.
    if bins is not None and 2 * float(bins.sum()) < labels - 0.5:
        bins = None
    table = None if bins is None or not request.metrics else bins.cpu().numpy()
    return Scores(
        {
            "accuracy": int(right.sum()) / int(judged.sum()),
            "accuracy_client_mean": _mean(right[is_scored] / judged[is_scored]),
            "f1_macro": _mean(f1) if len(f1) and most_by_class else None,
            "f1_micro": _f1(
                int(num_right.sum()), int(num_wrong.sum()) * (2 if is_multiclass else 1)
            ),
            "auc": None if bins is None else auc_of(bins),
            **scores_of_histogram(table, task, request.metrics, request.positive),
            **own_scores(task, counts, part),
        }
    )


def constant_scores(counts: Mapping[str, Tensor], task: LabelForm) -> Scores | None:
    """Return the test scores of the best constant prediction, from the counts of any model.

    Counts hold how many judged nodes have each class: the right ones and the missed. So a server
    that sees no label can say what the commonest class of the validation nodes is worth. Loss and
    AUC are None, as nothing is said of probabilities. None without validation or test nodes, and
    where a client has merged classes of few nodes, as then their labels are not known.

    Args:
        counts: as for `score`.
        task: `multiclass` or `multilabel`.
    """
    merged = (counts.get(f"{part}.merged.known") for part in PARTS)
    if any(t is not None and bool(t.any()) for t in merged):
        return None
    class_counts = {
        part: counts[f"{part}.tp"].long() + counts[f"{part}.fn"].long() for part in PARTS
    }
    if not class_counts["val"].sum() or not counts["test.nodes"].sum():
        return None
    val_counts = class_counts["val"].sum(0)
    if task == "multiclass":
        is_predicted = (
            torch.arange(len(val_counts), device=val_counts.device) == val_counts.argmax()
        )
    else:
        is_predicted = 2 * val_counts > counts["val.known"].long().sum(0)
    num_known, num_true = counts["test.known"].long(), class_counts["test"]
    hits = {
        "tp": num_true * is_predicted,
        "fp": (num_known - num_true) * is_predicted,
        "fn": num_true * ~is_predicted,
    }
    scores = score({**counts, **{f"test.{name}": t for name, t in hits.items()}}, "test", task)
    return None if scores is None else Scores({**scores, "auc": None, "loss": None})
