"""Attacks on the weights of local training: which features occur, and rows by crafted weights.

They see what the server sees, and nothing else.

C: silos. F: features. H: width of the first hidden layer. K: classes.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from silograph.nn.conv import Params
from silograph.nn.optim import Optimizer


def untouched(weights: Mapping[str, Tensor], optimizer: Optimizer, steps: int) -> Params:
    """Return what weights become in some steps of a silo whose data give no gradient at all."""
    own = {name: w[None].clone() for name, w in weights.items()}
    state = optimizer.init(own)
    for _ in range(steps):
        optimizer.step_(own, {name: torch.zeros_like(w) for name, w in own.items()}, state)
    return {name: w[0] for name, w in own.items()}


def occurring_features(after: Tensor, without_data: Tensor) -> Tensor:
    """Return which features occur where silos trained, (C, F) bool.

    The row of a feature that no node has moves by weight decay alone.

    Args:
        after: (C, F, H) first weights that each silo sent.
        without_data: (F, H) what `untouched` says of them.
    """
    return (after - without_data).abs().amax(2) > 1e-9


def crafted(weights: Mapping[str, Tensor], center: float, spread: float) -> Params:
    """Return weights of two layers under which an SGD step holds single rows.

    Fowl, Geiping, Czaja, Goldblum and Goldstein, "Robbing the fed", ICLR 2022: all hidden units
    measure the sum of a row's features, with thresholds that differ, and reach the classes by one
    and the same vector. So the gradients of two neighboring units differ by those rows only whose
    sum is between their thresholds.

    Args:
        weights: of the run's model; two layers, with biases.
        center: what the server takes for the mean of the sums.
        spread: and for their deviation; thresholds are the quantiles of a normal distribution.
    """
    own = {name: torch.zeros_like(w) for name, w in weights.items()}
    hidden, classes = weights["0.weight"].shape[1], weights["1.weight"].shape[1]
    share = (torch.arange(hidden, dtype=torch.float64) + 0.5) / hidden
    thresholds = center + spread * 2**0.5 * torch.erfinv(2 * share - 1)
    small = 1e-4  # hidden values are small and gradients large: neither saturates nor rounds
    own["0.weight"] += small
    own["0.bias"] -= (small * thresholds).to(own["0.bias"].dtype)
    own["1.weight"] += torch.linspace(-1, 1, classes).to(own["1.weight"].dtype) / small**0.5
    return own


def single_rows(sent: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> Tensor:
    """Return what enters the first layer of single rows, if the guess is right, (C, 2 H - 1, F).

    The gradient of a unit's weights is the sum of the rows that it is open for, each times a
    number; that of its bias is the sum of these numbers. So their ratio is a row where one row
    alone is between two thresholds, or alone above one.

    Args:
        sent: crafted weights, as a silo without data makes them; see `untouched`.
        after: (C, ...) what each silo sent back.
    """
    change = after["0.weight"].double() - sent["0.weight"].double()
    bias = after["0.bias"].double() - sent["0.bias"].double()
    change = torch.cat([change, change.diff(dim=2)], 2)
    bias = torch.cat([bias, bias.diff(dim=1)], 1)
    return (change / torch.where(bias == 0, torch.inf, bias)[:, None]).transpose(1, 2)
