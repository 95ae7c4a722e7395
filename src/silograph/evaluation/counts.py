"""What a client returns of its predictions: counts and score histograms, never labels or rows.

C: clients (groups of rows). K: classes or label bits. B: bins.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from silograph.core.payload import Stacked
from silograph.graph.block import ClientBlock
from silograph.graph.graph import MISSING, Task
from silograph.nn.loss import node_loss
from silograph.nn.model import Model, forward

HISTOGRAM = "test.histogram"
BINS = 256
RANGE = 16.0  # log-odds beyond +-16 share the outermost bins


def log_odds(logits: Tensor, task: Task) -> Tensor:
    """Return log(p / (1 - p)) of every class's probability, (n, K)."""
    if task == "multilabel":
        return logits
    log_p = torch.log_softmax(logits.double(), dim=1)
    return log_p - torch.log1p(-log_p.exp())


def _hits(logits: Tensor, y: Tensor, task: Task) -> tuple[Tensor, Tensor, Tensor]:
    """Return predicted, true and known as (n, K) bool."""
    if task == "multilabel":
        return logits > 0, y == 1, y != MISSING
    width = logits.shape[1]
    predicted = torch.nn.functional.one_hot(logits.argmax(dim=1), width).bool()
    true = torch.nn.functional.one_hot(y, width).bool()
    return predicted, true, torch.ones_like(true)


def _histogram(scores: Tensor, true: Tensor, known: Tensor, client: Tensor, c: int) -> Tensor:
    """Return counts of scores (n, K) by client, class, truth and bin, (C, K, 2, B) int32."""
    k = scores.shape[1]
    step = 2 * RANGE / BINS
    # A diverged model has NaN for scores: they share the lowest bin.
    bins = ((scores.nan_to_num(nan=-RANGE) + RANGE) / step).floor().clamp(0, BINS - 1).long()
    cell = (client[:, None] * k + torch.arange(k, device=client.device)) * 2 + true.long()
    flat = (cell * BINS + bins)[known]
    return torch.bincount(flat, minlength=c * k * 2 * BINS).view(c, k, 2, BINS).int()


def count(model: Model, weights: Mapping[str, Tensor], block: ClientBlock) -> dict[str, Stacked]:
    """Return what a model gets right on every client's own nodes; see `tally` for the fields.

    Args:
        model: the shape.
        weights: shared by all clients, or with a leading dimension C.
        block: the rows.
    """
    with torch.no_grad():
        logits = forward(model, weights, block)
        return tally(logits, block, block.client, block.num_clients, model.task)


def tally(
    logits: Tensor, block: ClientBlock, group: Tensor, groups: int, task: Task
) -> dict[str, Stacked]:
    """Return counts by group of rows.

    Fields, for `val` and `test`: `*.nodes` (C,) judged nodes, `*.loss` (C,) float64 sum of node
    losses, `*.known` (C, K) judged labels, `*.tp`, `*.fp`, `*.fn` (C, K) hits and misses; and
    `test.histogram` (C, K, 2, B), log-odds of wrong (0) and right (1) labels in B bins.
    Integers are int32.

    Args:
        logits: (n, K).
        block: labels and split of the rows.
        group: (n,) int64 group of every row in 0..groups-1, ascending or not.
        groups: C.
        task: what the labels mean.
    """
    fields: dict[str, Tensor] = {}

    def summed(values: Tensor, where: Tensor) -> Tensor:
        return values.new_zeros(groups, *values.shape[1:]).index_add_(0, where, values)

    for name, mask in (("val", block.split.val), ("test", block.split.test)):
        out, y, where = logits[mask], block.y[mask], group[mask]
        predicted, true, known = _hits(out, y, task)
        tallies = {
            "known": known,
            "tp": predicted & true & known,
            "fp": predicted & ~true & known,
            "fn": ~predicted & true & known,
        }
        fields[f"{name}.nodes"] = torch.bincount(where, minlength=groups).int()
        fields[f"{name}.loss"] = summed(node_loss(out, y, task).double(), where)
        fields |= {
            f"{name}.{part}": summed(values.int(), where) for part, values in tallies.items()
        }
        if name == "test":
            fields[HISTOGRAM] = _histogram(log_odds(out, task), true, known, where, groups)
    return {name: Stacked(t) for name, t in fields.items()}


def no_counts(model: Model, clients: int, device: torch.device) -> dict[str, Stacked]:
    """Return the counts of clients that have judged nothing yet: zeros in every field."""
    k = model.outputs

    def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> Stacked:
        return Stacked(torch.zeros(clients, *shape, dtype=dtype, device=device))

    fields: dict[str, Stacked] = {}
    for name in ("val", "test"):
        fields[f"{name}.nodes"] = zeros()
        fields[f"{name}.loss"] = zeros(dtype=torch.float64)
        fields |= {f"{name}.{part}": zeros(k) for part in ("known", "tp", "fp", "fn")}
    return fields | {HISTOGRAM: zeros(k, 2, BINS)}
