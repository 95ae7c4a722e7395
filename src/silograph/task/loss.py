"""Losses of single nodes; their weighting is the caller's.

n: rows. K: classes or label bits.
"""

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from silograph.graph.graph import MISSING, LabelForm


def node_loss(logits: Tensor, y: Tensor, task: LabelForm) -> Tensor:
    """Return the loss of every node, (n,); 0 where no label is known.

    Cross-entropy for `multiclass` (y (n,)); for `multilabel` (y (n, K)) the mean binary
    cross-entropy over the bits that are known.
    """
    if task == "multiclass":
        return F.cross_entropy(logits, y, reduction="none", ignore_index=MISSING)
    known = (y != MISSING).to(logits.dtype)
    bits = F.binary_cross_entropy_with_logits(logits, y.to(logits.dtype), reduction="none")
    total = torch.where(known > 0, bits, torch.zeros_like(bits)).sum(dim=1)
    return total / known.sum(dim=1).clamp(min=1)
