"""The two forms of training and judging: compiled kernels, and torch for everything else.

They do the same work on the same draws: float64 results differ by rounding (1e-10).

This is the only way to the compiled ones, and what they read is checked here (`nn.doors`).
"""

import importlib
import importlib.util
from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor

from silograph.core.errors import ProtocolError
from silograph.core.key import Key
from silograph.core.payload import State
from silograph.graph.block.block import ClientBlock
from silograph.nn.correction import Proximal
from silograph.nn.doors import check_fit, check_weights
from silograph.nn.fit import NO_STATE, Fitted, Training
from silograph.nn.fit import fit as fit_torch
from silograph.nn.fit import rest as rest_torch
from silograph.nn.fit_module import fit as fit_module
from silograph.nn.model import AnyModel, forward
from silograph.nn.optim import SGD, Adam
from silograph.nn.own_module import ModuleModel
from silograph.nn.start import Start
from silograph.task.registry import task_of

Kernels = Literal["compiled", "torch"]
COMPILED_MODELS = ("gcn", "sage", "mlp")


def why_not_compiled(training: Training, device: torch.device) -> str | None:
    """Return why the compiled kernels cannot be used, or None if they can."""
    model, optimizer = training.model, training.optimizer
    if isinstance(model, ModuleModel):
        return "a torch.nn.Module of your own is not compiled"
    if model.conv not in COMPILED_MODELS:
        return f"model {model.conv} is not compiled"
    if not task_of(model.task).classes:
        return f"task {task_of(model.task).name} is not compiled"
    if model.residual:
        return "residual connections are not compiled"
    if not isinstance(optimizer, SGD | Adam):
        return f"optimizer {type(optimizer).__name__} is not compiled"
    for correction in training.corrections:
        if not isinstance(correction, Proximal):
            return f"correction {type(correction).__name__} is not compiled"
    if training.schedule.neighbors.fanout(0) is None:
        return f"{type(training.schedule.neighbors).__name__} as neighbor sampler is not compiled"
    if device.type != "cpu":
        return f"device {device.type} is not a CPU"
    if importlib.util.find_spec("numba") is None:
        return "numba is not installed (extra `fast`)"
    try:
        importlib.import_module("silograph.nn.compiled")
    except RuntimeError as error:  # numba finds no folder that it may write machine code to
        return f"kernels cannot be kept on disk: {error}; set NUMBA_CACHE_DIR"
    return None


def fit(
    kernels: Kernels,
    training: Training,
    block: ClientBlock,
    start: Start,
    memory: Mapping[str, Tensor] | None,
    key: Key,
    sampler: State = NO_STATE,
) -> Fitted:
    """Train every client of a block; see `silograph.nn.fit.fit`.

    Raises:
        ProtocolError: weights, optimizer state or labels that are not the model's; a correction
            or a neighbor sampler that the compiled kernels do not know.
    """
    check_fit(training, block, start, memory)
    if isinstance(training.model, ModuleModel):
        return fit_module(training, block, start, memory, key)
    if kernels == "torch":
        return fit_torch(training, block, start, memory, key, sampler)
    for correction in training.corrections:
        if not isinstance(correction, Proximal):
            raise ProtocolError(
                f"expected corrections that are compiled, got {type(correction).__name__}: run "
                "with kernels=torch"
            )
    if training.schedule.neighbors.fanout(0) is None:
        raise ProtocolError(
            "expected a neighbor sampler that is compiled, got "
            f"{type(training.schedule.neighbors).__name__}: run with kernels=torch"
        )
    from silograph.nn import compiled  # numba takes a while to import

    return compiled.fit(training, block, start, memory, key)


def rest(kernels: Kernels, training: Training, start: Tensor, steps: int) -> Tensor:
    """Return where weights (R, D) are after some steps of a fresh optimizer without data."""
    if steps == 0 or (training.optimizer.weight_decay == 0 and not training.corrections):
        return start
    if start.dim() != 2 or not start.is_floating_point():
        raise ProtocolError(f"expected rows of weights, got {start.dtype} {tuple(start.shape)}")
    if kernels == "torch":
        return rest_torch(training, start, steps)
    from silograph.nn import compiled

    return compiled.rest(training, start, steps)


def predict(
    kernels: Kernels, model: AnyModel, weights: Mapping[str, Tensor], block: ClientBlock
) -> Tensor:
    """Return logits (n, K) from internal edges, without dropout.

    Raises:
        ProtocolError: weights that are not the model's.
    """
    check_weights(model, weights, block)
    torch_only = kernels == "torch" or isinstance(model, ModuleModel)
    if torch_only or weights["0.weight"].dim() != 2:
        with torch.no_grad():
            return forward(model, weights, block)
    from silograph.nn import compiled

    assert not isinstance(model, ModuleModel)  # see above
    return compiled.predict(model, weights, block)
