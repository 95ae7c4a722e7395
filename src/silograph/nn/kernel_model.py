"""A model, its schedule and its optimizer as the compiled kernels read them.

Kernels hold the weights after the first matrices side by side: `flattened` and `unflattened`.

C: clients. L: layers. P: numbers of a client after the first matrices.
"""

from collections.abc import Iterator, Mapping

import numpy as np
import torch
from torch import Tensor

from silograph.core.errors import ConfigError
from silograph.core.key import DROPOUT_LEVELS, keep_probability
from silograph.nn.conv import Params
from silograph.nn.correction import Proximal
from silograph.nn.forward import Staged
from silograph.nn.kernels import arrays
from silograph.nn.optim import SGD, Adam
from silograph.nn.schedule import Schedule, Training

NO_DRAW = np.empty(0, np.int64)
UNKNOWN_DEGREE = 2**31  # no row has as many neighbors


def model_shape(model: Staged, schedule: Schedule, most: int = UNKNOWN_DEGREE) -> arrays.ModelShape:
    """Return model and schedule as kernels read them; no row has more than `most` neighbors.

    Raises:
        ConfigError: see `_by_layer`.
    """
    stages = model.stages
    widths = [stage.outputs for stage in stages]
    keep = keep_probability(stages[-1].drop if len(stages) > 1 else 0.0)
    x_keep = keep_probability(stages[0].drop)
    return arrays.ModelShape(
        layers=len(stages),
        form=np.array([arrays.FORMS[str(stage.conv.kernel)] for stage in stages], np.int64),
        width=np.array([model.features, *widths], np.int64),
        place=_places(model),
        act=np.array([0, *widths[:-1]], np.int64).cumsum(),
        widest=max(widths),
        rooted=any(stage.conv.rooted for stage in stages),
        outputs=model.outputs,
        multilabel=model.task == "multilabel",
        threshold=round((1 - keep) * DROPOUT_LEVELS),
        scale=1 / keep,
        x_threshold=round((1 - x_keep) * DROPOUT_LEVELS),
        x_scale=1 / x_keep,
        epochs=schedule.epochs,
        batch=schedule.batch_size or 0,
        fanout=NO_DRAW if schedule.whole else _by_layer(model, schedule, most),
    )


def _by_layer(model: Staged, schedule: Schedule, most: int) -> np.ndarray:
    """Return neighbors drawn by layer; nobody has more than `most`, and memory is for that.

    Raises:
        ConfigError: not a number for each layer that sums over neighbors.
    """
    sums = [stage.conv.sums for stage in model.stages]
    hops = sum(sums) or len(sums)
    fanout = schedule.neighbors.fanout(hops)
    if fanout is None or len(fanout) != hops or min(fanout) < 0:
        raise ConfigError(f"expected a fanout for each of {hops} layers, got {fanout}")
    counts = iter(fanout)
    drawn = [next(counts) if hears else 0 for hears in reversed(sums)]
    return np.array([min(count, max(most, 1)) for count in reversed(drawn)], np.int64)


def step_rule(training: Training) -> arrays.StepRule:
    """Return the optimizer and the proximal terms as kernels read them."""
    mu = sum(c.mu for c in training.corrections if isinstance(c, Proximal))
    later = training.model.weight_shapes["0.bias"][0]
    match training.optimizer:
        case Adam(lr, decay, beta1, beta2, eps, layers):
            decays = decay, decay if layers == "all" else 0.0
            return arrays.StepRule(True, lr, *decays, later, beta1, beta2, eps, float(mu))
        case SGD(lr, decay, momentum, layers):
            decays = decay, decay if layers == "all" else 0.0
            return arrays.StepRule(False, lr, *decays, later, momentum, 0.0, 0.0, float(mu))
    raise AssertionError(f"{training.optimizer} is not compiled: see why_not_compiled")


def later_names(model: Staged) -> Iterator[str]:
    """Yield names of the weights after the first matrices, in the kernels' order."""
    yield "0.bias"
    for layer, stage in enumerate(model.stages[1:], start=1):
        yield from (f"{layer}.{name}" for name in stage.conv.maps)
        yield f"{layer}.bias"


def _places(model: Staged) -> np.ndarray:
    """Return where each layer's matrix, second matrix and bias are in `flattened`, (L, 3)."""
    names = list(later_names(model))
    sizes = [torch.Size(model.weight_shapes[name]).numel() for name in names]
    start = dict(zip(names, np.cumsum([0, *sizes]).tolist(), strict=False))
    maps = [[f"{layer}.{name}" for name in s.conv.maps] for layer, s in enumerate(model.stages)]
    return np.array(
        [
            [start.get(of[0], 0), start.get(of[-1], 0), start[f"{layer}.bias"]]
            for layer, of in enumerate(maps)
        ],
        np.int64,
    )


def flattened(model: Staged, tensors: Mapping[str, Tensor]) -> np.ndarray:
    """Return tensors (C, ...) of the weights after the first matrices side by side, (C, P)."""
    flat: np.ndarray = torch.cat(
        [tensors[name].flatten(1) for name in later_names(model)], dim=1
    ).numpy()
    return flat


def unflattened(model: Staged, flat: np.ndarray) -> Params:
    """Return what `flattened` put side by side."""
    shapes = model.weight_shapes
    names = list(later_names(model))
    parts = torch.from_numpy(flat).split([torch.Size(shapes[n]).numel() for n in names], dim=1)
    return {n: part.reshape(len(flat), *shapes[n]) for n, part in zip(names, parts, strict=True)}
