"""Laws of the node losses: torch's, where labels are known; nothing where they are not."""

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from silograph.graph.graph import MISSING
from silograph.task.counts import node_loss

N, K = 40, 4


def draw(multilabel: bool) -> tuple[Tensor, Tensor]:
    """Return logits and labels; about a third is missing, rows 0 and 1 wholly."""
    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(N, K, dtype=torch.float64, generator=generator)
    shape, labels = ((N, K), 2) if multilabel else ((N,), K)
    y = torch.randint(0, labels, shape, generator=generator)
    y[torch.rand(shape, generator=generator) < 1 / 3] = MISSING
    y[:2] = MISSING
    return logits, y


def close(left: Tensor, right: Tensor) -> None:
    torch.testing.assert_close(left, right, rtol=1e-10, atol=1e-10)


def test_multiclass_is_cross_entropy_of_the_known_nodes() -> None:
    logits, y = draw(multilabel=False)
    loss, known = node_loss(logits, y, "multiclass"), y != MISSING
    close(loss[known], F.cross_entropy(logits[known], y[known], reduction="none"))
    # By definition: minus the log of the true class's share.
    close(loss[known], -(logits.exp() / logits.exp().sum(1, keepdim=True)).log()[known, y[known]])
    assert not loss[~known].any()


def test_multilabel_is_the_mean_over_the_known_bits() -> None:
    logits, y = draw(multilabel=True)
    loss = node_loss(logits, y, "multilabel")
    for i in range(N):
        known = y[i] != MISSING
        if known.any():
            target = y[i, known].double()
            close(loss[i], F.binary_cross_entropy_with_logits(logits[i, known], target))
        else:
            assert loss[i] == 0
    assert int((y != MISSING).any(dim=1).sum()) < N


@pytest.mark.parametrize("task", ["multiclass", "multilabel"])
def test_missing_labels_have_no_gradient(task: str) -> None:
    logits, y = draw(task == "multilabel")
    logits[0] = 1e4  # where BCE with the label -1 would be large
    logits[1] = -1e4
    leaf = logits.clone().requires_grad_()
    loss = node_loss(leaf, y, "multiclass" if task == "multiclass" else "multilabel")
    (grad,) = torch.autograd.grad(loss.sum(), leaf)
    assert torch.isfinite(loss).all()
    assert torch.isfinite(grad).all()
    missing = (y == MISSING).view(N, -1).expand(N, K)
    assert not grad[missing].any()
    # Every known label pulls.
    assert bool((grad[~missing & (logits.abs() < 100)] != 0).all())


@pytest.mark.parametrize("task", ["multiclass", "multilabel"])
def test_all_missing_gives_zeros(task: str) -> None:
    logits, y = draw(task == "multilabel")
    leaf = logits.clone().requires_grad_()
    y = torch.full_like(y, MISSING)
    loss = node_loss(leaf, y, "multiclass" if task == "multiclass" else "multilabel")
    (grad,) = torch.autograd.grad(loss.sum(), leaf)
    assert torch.equal(loss, torch.zeros(N, dtype=torch.float64))
    assert torch.equal(grad, torch.zeros(N, K, dtype=torch.float64))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_loss_has_the_dtype_of_the_logits(dtype: torch.dtype) -> None:
    for multilabel in (False, True):
        logits, y = draw(multilabel)
        loss = node_loss(logits.to(dtype), y, "multilabel" if multilabel else "multiclass")
        assert loss.dtype == dtype


def test_no_nodes_have_no_loss() -> None:
    none = torch.zeros(0, K, dtype=torch.float64)
    assert node_loss(none, torch.zeros(0, dtype=torch.int64), "multiclass").shape == (0,)
    assert node_loss(none, torch.zeros(0, K, dtype=torch.int64), "multilabel").shape == (0,)
