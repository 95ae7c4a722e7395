"""From counts to scores: pooled over all clients, and as a mean over clients.

C: clients. K: classes or label bits. B: bins.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from silograph.graph.graph import Task


@dataclass(frozen=True)
class Scores:
    """How good a model is on a set of nodes; None where it cannot be said.

    Attributes:
        accuracy: share of right labels over all judged nodes (multi-label: over label bits).
        accuracy_client_mean: mean of the clients' own accuracies, clients without nodes left out.
        f1_macro: mean of the classes' F1, classes neither present nor predicted left out.
        f1_micro: F1 of all decisions together (equals accuracy for multi-class).
        auc: area under the ROC curve, one class against the rest, mean over classes that have
            both; from histograms of 256 bins that follow the scores. Test nodes only.
        loss: mean loss of a node.
    """

    accuracy: float | None
    accuracy_client_mean: float | None
    f1_macro: float | None
    f1_micro: float | None
    auc: float | None
    loss: float | None


@dataclass(frozen=True)
class Views:
    """The three views of evaluation; None where a method has no such model.

    Attributes:
        server: the server's model, each node through its own client's graph.
        uncut: the server's model on the uncut graph (simulation only).
        personalised: each client's own model on its own nodes.
    """

    server: Scores | None
    uncut: Scores | None
    personalised: Scores | None


Part = Literal["val", "test"]
PARTS: tuple[Part, ...] = ("val", "test")


def auc_of(histogram: Tensor) -> float | None:
    """Return the macro AUC of (K, 2, B) counts; scores within one bin count as ties."""
    wrong, right = histogram[:, 0].double(), histogram[:, 1].double()
    below = wrong.cumsum(dim=1) - wrong
    area = (right * (below + wrong / 2)).sum(dim=1)
    pairs = right.sum(dim=1) * wrong.sum(dim=1)
    judged = pairs > 0
    return float((area[judged] / pairs[judged]).mean()) if bool(judged.any()) else None


def _right_and_judged(
    counts: Mapping[str, Tensor], part: Part, task: Task
) -> tuple[Tensor, Tensor]:
    """Return right and judged labels of each client, (C,) int64 both."""
    nodes, tp, fp, fn, known = (
        counts[f"{part}.{name}"].long() for name in ("nodes", "tp", "fp", "fn", "known")
    )
    if task == "multiclass":
        return tp.sum(1), nodes
    return (known - fp - fn).sum(1), known.sum(1)


def client_accuracy(
    counts: Mapping[str, Tensor], part: Part, task: Task
) -> tuple[float | None, ...]:
    """Return the accuracy of each client, None where it has no judged label; see `score`."""
    right, judged = _right_and_judged(counts, part, task)
    pairs = zip(right.tolist(), judged.tolist(), strict=True)
    return tuple(hits / number if number else None for hits, number in pairs)


def score(counts: Mapping[str, Tensor], part: Part, task: Task) -> Scores | None:
    """Return the scores of `val` or `test` from all clients' counts; None without any node.

    Args:
        counts: fields of `silograph.task.counts.tally`, each (C, ...), and
            `test.histogram` (K, 2, B) of all clients together.
        part: which nodes.
        task: what the labels mean.
    """
    nodes = counts[f"{part}.nodes"]
    if int(nodes.sum()) == 0:
        return None
    tp, fp, fn = (counts[f"{part}.{name}"].long() for name in ("tp", "fp", "fn"))
    right, judged = _right_and_judged(counts, part, task)
    busy = judged > 0
    hits, errors = tp.sum(0), (fp + fn).sum(0)
    present = hits + errors > 0
    f1 = 2 * hits[present].double() / (2 * hits[present] + errors[present])
    return Scores(
        accuracy=int(right.sum()) / int(judged.sum()),
        accuracy_client_mean=float((right[busy].double() / judged[busy]).mean()),
        f1_macro=float(f1.mean()) if len(f1) else None,
        f1_micro=2 * int(hits.sum()) / int((2 * hits + errors).sum()) if len(f1) else None,
        auc=auc_of(counts["test.histogram"]) if part == "test" else None,
        loss=float(counts[f"{part}.loss"].sum()) / int(nodes.sum()),
    )
