"""Work of the compiled kernels in closed form: what the torch layers report for the same passes.

C: clients. L: layers.
"""

import numpy as np
import torch
from torch import Tensor

from silograph.core.kinds import Kind
from silograph.core.work import report_clients, work_for
from silograph.graph.block.block import ClientBlock, SparseRows
from silograph.nn.model import Model, stages
from silograph.nn.schedule import Training
from silograph.nn.steps import LOSS_FLOPS


def _whole_counts(model: Model, block: ClientBlock) -> np.ndarray:
    """Return what `training.count` counts in one pass of all rows, (C, 2 L + 4)."""
    name = ("counts", model.layers, model.conv)
    if name not in block.memo and block.source is not None:
        whole, positions = block.source
        block.memo[name] = _whole_counts(model, whole)[positions.numpy()]
    if name not in block.memo:
        rows = block.off.diff()
        edges = block.adj.indptr[block.off].diff() * stages(model)[0].conv.sums
        entries = torch.zeros_like(rows)
        if isinstance(block.x, SparseRows):
            entries = block.x.csr.indptr[block.off].diff()
        columns = [rows] * (model.layers + 1) + [edges] * model.layers + [entries] * 2
        block.memo[name] = torch.stack([*columns, torch.ones_like(rows)], dim=1).numpy()
    found = block.memo[name]
    assert isinstance(found, np.ndarray)
    return found


def _pass_flops(model: Model, counts: np.ndarray, *, sparse: bool, passes: int) -> np.ndarray:
    """Return operations of passes through the model, (C,): what the torch layers report.

    Args:
        model: the shape.
        counts: (C, 2 L + 4), see `training.count`.
        sparse: whether features are.
        passes: 1, or 2 with the way back (3 where both factors of a product have a gradient).
    """
    layers, sage = model.layers, model.conv == "sage"
    work = counts.astype(np.float64).T
    rows, edges = work[: layers + 1], work[layers + 1 : 2 * layers + 1]
    entries, own_entries = work[2 * layers + 1], work[2 * layers + 2]
    total = np.zeros(len(counts))
    for layer, (width, out) in enumerate(zip(model.widths[:-1], model.widths[1:], strict=True)):
        into, left = rows[layer], rows[layer + 1]
        products = passes + (passes > 1 and layer > 0)
        if layer == 0 and sparse:
            total += 2 * out * passes * (entries + own_entries * sage)
        else:
            total += 2 * width * out * products * (into + left * sage)
        if model.conv == "gcn":
            total += out * passes * (2 * edges[layer] + into + 3 * left)
        elif sage:
            total += out * passes * (2 * edges[layer] + left) + out * left
        total += out * passes * left  # bias
        if layer and passes > 1 and model.dropout > 0:
            total += 2 * width * passes * into
        if layer < layers - 1:
            total += out * passes * left  # ReLU
    return total


def report_pass(model: Model, block: ClientBlock) -> None:
    """Report one pass of all rows without the way back."""
    name = ("pass", model)
    if name not in block.memo:
        sparse = isinstance(block.x, SparseRows)
        flops = _pass_flops(model, _whole_counts(model, block), sparse=sparse, passes=1)
        block.memo[name] = torch.from_numpy(flops)
    found = block.memo[name]
    assert isinstance(found, Tensor)
    report_clients(found)


def report_training(training: Training, block: ClientBlock, work: np.ndarray) -> None:
    """Report training, and apart from it what the clients' models say of their rows."""
    model = training.layered
    sparse = isinstance(block.x, SparseRows)
    flops = _pass_flops(model, work, sparse=sparse, passes=2)
    flops += work[:, -1] * training.step_flops
    # Every epoch has a loss of every training node, however they are grouped into steps.
    flops += LOSS_FLOPS * model.outputs * training.schedule.epochs * block.num_train.numpy()
    report_clients(torch.from_numpy(flops))
    with work_for(Kind.EVALUATION):
        report_pass(model, block)
