"""Work of the compiled kernels in closed form: what the torch layers report for the same passes.

C: clients. L: layers.
"""

import numpy as np
import torch
from torch import Tensor

from silograph.core.kinds import Kind
from silograph.core.work import report_clients, report_steps, work_for
from silograph.graph.block.block import ClientBlock, SparseRows
from silograph.nn.forward import Staged
from silograph.nn.masked import Masked
from silograph.nn.schedule import Training
from silograph.nn.steps import LOSS_FLOPS


def _whole_counts(model: Staged, block: ClientBlock) -> np.ndarray:
    """Return what `training.count` counts in one pass of all rows, (C, 2 L + 4)."""
    sums = tuple(stage.conv.sums for stage in model.stages)
    name = ("counts", sums)
    if name not in block.memo and block.source is not None:
        whole, positions = block.source
        block.memo[name] = _whole_counts(model, whole)[positions.numpy()]
    if name not in block.memo:
        rows = block.off.diff()
        edges = block.adj.indptr[block.off].diff()
        entries = torch.zeros_like(rows)
        if isinstance(block.x, SparseRows):
            entries = block.x.csr.indptr[block.off].diff()
        edges_of = [edges * hears for hears in sums]
        columns = [rows] * (len(sums) + 1) + edges_of + [entries] * 2
        block.memo[name] = torch.stack([*columns, torch.ones_like(rows)], dim=1).numpy()
    found = block.memo[name]
    assert isinstance(found, np.ndarray)
    return found


def _pass_flops(model: Staged, block: ClientBlock, counts: np.ndarray, passes: int) -> np.ndarray:
    """Return operations of passes through the model, (C,): what the torch layers report.

    Args:
        model: the shape.
        block: the clients.
        counts: (C, 2 L + 4), see `training.count`.
        passes: 1, or 2 with the way back (3 where both factors of a product have a gradient).
    """
    each = block.origin.once(
        ("flops", model, passes),
        np.ndarray,
        lambda: _flops_of_each(model, isinstance(block.x, SparseRows), passes),
    )
    flops: np.ndarray = counts.astype(np.float64) @ each  # exact: integers
    return flops


def _flops_of_each(model: Staged, sparse: bool, passes: int) -> np.ndarray:
    """Return operations for one of each number that is counted, (2 L + 4,); see `_pass_flops`."""
    layers = len(model.stages)
    edges, entries, own_entries = layers + 1, 2 * layers + 1, 2 * layers + 2
    each = [0] * (2 * layers + 4)
    for layer, stage in enumerate(model.stages):
        width, out, rooted = stage.inputs, stage.outputs, stage.conv.rooted
        into, left = layer, layer + 1
        if layer == 0 and sparse:
            each[entries] += 2 * out * passes
            each[own_entries] += 2 * out * passes * rooted
        else:
            products = passes + (passes > 1 and layer > 0)
            each[into] += 2 * width * out * products
            each[left] += 2 * width * out * products * rooted
        if stage.conv.sums and stage.conv.scales is not None:
            scales = stage.conv.scales
            each[edges + layer] += 2 * out * passes
            each[into] += out * passes * (scales.pre is not None)
            each[left] += out * passes * ((scales.post is not None) + 2 * (scales.own is not None))
        each[left] += out * rooted  # the sum with the own row
        each[left] += out * passes  # bias
        if stage.drop > 0 and passes > 1:
            if layer:
                each[into] += 2 * width * passes
            else:  # features have no gradient
                each[entries if sparse else into] += 2 if sparse else 2 * width
        each[left] += out * passes * stage.relu
    return np.array(each, np.float64)


def report_pass(model: Staged, block: ClientBlock) -> None:
    """Report one pass of all rows without the way back."""

    def made() -> Tensor:
        return torch.from_numpy(_pass_flops(model, block, _whole_counts(model, block), 1))

    report_clients(block.once(("pass", model), Tensor, made))


def report_masks(model: Masked, block: ClientBlock, work: np.ndarray) -> None:
    """Report the products of weights and masks, in training and in what models say of rows."""
    flops = 0.0
    for stage in model.inner.stages:
        # Rooted layers take them for the neighbors' map and for the own one.
        flops += len(stage.conv.maps) * stage.inputs * stage.outputs * (1 + stage.conv.rooted)
    report_clients(torch.from_numpy(3 * flops * work[:, -1]))  # 2 on the way back
    with work_for(Kind.EVALUATION):
        report_clients(torch.full((block.num_clients,), flops, dtype=torch.float64))


def report_training(
    model: Staged, training: Training, block: ClientBlock, work: np.ndarray
) -> None:
    """Report training, and apart from it what the clients' models say of their rows."""
    flops = _pass_flops(model, block, work, 2)
    # Every epoch has a loss of every training node, however they are grouped into steps.
    flops += LOSS_FLOPS * model.outputs * training.schedule.epochs * block.num_train.numpy()
    report_clients(torch.from_numpy(flops))
    report_steps(torch.from_numpy(work[:, -1] * training.step_flops))
    with work_for(Kind.EVALUATION):
        report_pass(model, block)
