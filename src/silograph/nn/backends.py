"""What computes training and predictions: compiled kernels, and torch for everything else.

Both do the same work on the same draws: float64 results differ by rounding (1e-10). What they read
is checked here (`nn.doors`), since compiled kernels and fused optimizers check no bounds.
"""

import importlib
import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal, Protocol

import torch
from torch import Tensor

from silograph.core.errors import ProtocolError, install_command
from silograph.core.payload import NO_STATE, State
from silograph.graph.block.block import ClientBlock
from silograph.nn.correction import Proximal, why_no_embeddings
from silograph.nn.fit import (
    Fitted,
    Trainer,
    Training,
    TrainingInputs,
    check_fit,
    check_labels,
    check_weights,
    stays_without_data,
)
from silograph.nn.fit import untouched_rows_after as untouched_by_torch
from silograph.nn.flow import rule_of
from silograph.nn.forward import AnyModel, Staged
from silograph.nn.masked import Masked, NearStart, SparseMasks
from silograph.nn.optim import SGD, Adam
from silograph.nn.rating_model import RatingModel
from silograph.task.registry import task_of


class Backend(Protocol):
    """Computes training and predictions, and says which of them it supports.

    A value: equal ones compute the same.
    """

    @property
    def name(self) -> Literal["compiled", "torch"]:
        """Name in the config (key `kernels`)."""

    @property
    def compiled(self) -> bool:
        """Whether replies are summed and predictions counted by compiled kernels, too."""

    def why_not(self, training: Training, device: torch.device) -> str | None:
        """Return why it cannot train and predict in a run, or None if it can."""

    def copies(self, training: Training) -> int:
        """Return the number of copies of a block's weights in memory at once."""

    def trainer(self, training: Training) -> Trainer:
        """Return what trains every client of a block.

        Raises:
            ProtocolError: something that this cannot train.
        """

    def fit(self, training: Training, inputs: TrainingInputs) -> Fitted:
        """Train every client of a block; see `silograph.nn.fit.fit`.

        Raises:
            ProtocolError: weights, optimizer state or labels that are not the model's; or something
                that this cannot train.
        """

    def untouched_rows_after(self, training: Training, start: Tensor, steps: int) -> Tensor:
        """Return weights (R, D) after some steps of a fresh optimizer with a gradient of 0."""

    def predict(
        self,
        model: AnyModel,
        weights: Mapping[str, Tensor],
        block: ClientBlock,
        tables: State = NO_STATE,
    ) -> Tensor:
        """Return logits (n, K) from internal edges, without dropout.

        Raises:
            ProtocolError: weights that are not the model's.
        """


class _Fits:
    """Trains after a check of the inputs."""

    def fit(self: Backend, training: Training, inputs: TrainingInputs) -> Fitted:
        """Train every client of a block; see `Backend.trainer`."""
        check_fit(training, inputs)
        return self.trainer(training).fit(training, inputs)


@dataclass(frozen=True)
class TorchBackend(_Fits):
    """Trains every model on every device."""

    name: ClassVar[Literal["torch"]] = "torch"
    compiled = False

    def why_not(self, training: Training, device: torch.device) -> str | None:
        """Return why it cannot train a loss that reads embeddings; nothing else is beyond it."""
        del device
        return why_no_embeddings(training.model) if training.losses else None

    def copies(self, training: Training) -> int:
        """Return 4 for weights, gradients and two moments, plus the copies of corrections."""
        return 4 + sum(correction.copies for correction in training.corrections)

    def trainer(self, training: Training) -> Trainer:
        """Return what the model says."""
        if training.losses and (reason := why_no_embeddings(training.model)) is not None:
            raise ProtocolError(f"expected another model: {reason}")
        return Trainer(training.model.fit, check_labels)

    def untouched_rows_after(self, training: Training, start: Tensor, steps: int) -> Tensor:
        """Take the steps on all rows together."""
        if stays_without_data(training, start, steps):
            return start
        return untouched_by_torch(training, start, steps)

    def predict(
        self,
        model: AnyModel,
        weights: Mapping[str, Tensor],
        block: ClientBlock,
        tables: State = NO_STATE,
    ) -> Tensor:
        """Pass once through the model."""
        check_weights(model, weights, block)
        with torch.no_grad():
            return model.forward(weights, block, tables=tables)


@dataclass(frozen=True)
class CompiledBackend(_Fits):
    """Trains common models on a CPU in a fraction of the time."""

    name: ClassVar[Literal["compiled"]] = "compiled"
    compiled = True

    def why_not(self, training: Training, device: torch.device) -> str | None:
        """Return why the compiled kernels cannot be used, or None if they can."""
        reason = why_not_compiled(training)
        if reason is not None:
            return reason
        if device.type != "cpu":
            return f"device {device.type} is not a CPU"
        if importlib.util.find_spec("numba") is None:
            return f"numba is not installed: {install_command('fast')}"
        try:
            importlib.import_module("silograph.nn.compiled")
        except RuntimeError as error:  # numba finds no folder that it may write machine code to
            return f"kernels cannot be kept on disk: {error}; set NUMBA_CACHE_DIR"
        return None

    def copies(self, training: Training) -> int:
        """Return 1 for the weights: gradients and the start are one client's at a time.

        Masks and kept moments of both are copied, as are the products that clients keep: with
        fewer clients at once the copies stay in the cache.
        """
        return 8 if _has_masks(training) else 1

    def trainer(self, training: Training) -> Trainer:
        """Return what trains one client after the other."""
        _check_compiled(training, masks=isinstance(training.model, Masked))
        from silograph.nn import compiled, rating_compiled  # numba takes a while to import

        if isinstance(training.model, RatingModel):
            return Trainer(rating_compiled.fit, check_labels)
        if isinstance(training.model, Masked):
            return Trainer(compiled.fit_masked, check_labels)
        return Trainer(compiled.fit, compiled.prepare)

    def untouched_rows_after(self, training: Training, start: Tensor, steps: int) -> Tensor:
        """Take the steps row by row."""
        if stays_without_data(training, start, steps):
            return start
        from silograph.nn import compiled

        return compiled.untouched_rows_after(training, start, steps)

    def predict(
        self,
        model: AnyModel,
        weights: Mapping[str, Tensor],
        block: ClientBlock,
        tables: State = NO_STATE,
    ) -> Tensor:
        """Pass once through a model that all clients share; torch passes through their own.

        Of ratings, one client is passed through at a time, whose weights they are.
        """
        check_weights(model, weights, block)
        if isinstance(model, RatingModel):
            _check_model(model)
            from silograph.nn import rating_compiled

            return rating_compiled.predict(model, weights, block, tables)
        name = next(iter(model.weight_shapes))
        if weights[name].dim() > len(model.weight_shapes[name]):
            with torch.no_grad():
                return model.forward(weights, block)
        from silograph.nn import compiled

        return compiled.predict(_require_stages(model), weights, block)


TORCH, COMPILED = TorchBackend(), CompiledBackend()
BACKENDS: dict[str, Backend] = {backend.name: backend for backend in (COMPILED, TORCH)}


def why_not_compiled(training: Training) -> str | None:
    """Return why the training has no compiled form on any machine, or None."""
    return _why_not_compiled(training, masks=_has_masks(training))


def _why_not_compiled(training: Training, *, masks: bool) -> str | None:
    """Return why the training has no compiled form, or None; `masks`: weights have masks."""
    model, optimizer = training.model, training.optimizer
    reason = _model_not_compiled(model)
    if reason is not None:
        return reason
    if not task_of(model.task).classes and not isinstance(model, RatingModel):
        return f"task {task_of(model.task).name} is not compiled"
    if not isinstance(optimizer, SGD | Adam):
        return f"optimizer {type(optimizer).__name__} is not compiled"
    if masks and not task_of(model.task).classes:
        return f"task {task_of(model.task).name} under masks is not compiled"
    for term in training.losses:
        return f"loss term {type(term).__name__} is not compiled"
    compiled_corrections = (SparseMasks, NearStart) if masks else (Proximal,)
    for correction in training.corrections:
        if not isinstance(correction, compiled_corrections):
            return f"correction {type(correction).__name__} is not compiled"
    sampler = training.schedule.neighbors
    if sampler.fanout(0) is None and rule_of(sampler) is None:
        return f"{type(sampler).__name__} as neighbor sampler is not compiled"
    return None


def _check_compiled(training: Training, *, masks: bool) -> None:
    """Raise `ProtocolError` for what has no compiled form."""
    reason = _why_not_compiled(training, masks=masks)
    if reason is not None:
        raise ProtocolError(
            f"expected training that is compiled, got: {reason}; run with kernels=torch"
        )


def _has_masks(training: Training) -> bool:
    """Whether weights have masks, or will: corrections of a method that is to wrap its model."""
    will_wrap = any(isinstance(correction, SparseMasks) for correction in training.corrections)
    return will_wrap or isinstance(training.model, Masked)


def _model_not_compiled(model: AnyModel) -> str | None:
    """Return why a model has no compiled form, or None."""
    if isinstance(model, Masked):
        return _model_not_compiled(model.inner)
    if isinstance(model, RatingModel):
        if model.items:
            return f"{model.noun} with rows of items is not compiled"
        return None if model.conv == "rating_gcn" else f"{model.noun} is not compiled"
    if model.staged is None:
        return f"{model.noun} is not compiled"
    stages = model.staged.stages
    if any(stage.conv.kernel is None for stage in stages):
        return f"{model.noun} is not compiled"
    if len({stage.conv for stage in stages if stage.conv.sums}) > 1:
        return f"{model.noun} has several convolutions, which is not compiled"
    if any(stage.skip for stage in stages):
        return "residual connections are not compiled"
    is_before_last = [number < len(stages) - 1 for number in range(len(stages))]
    if [stage.relu for stage in stages] != is_before_last or len({s.drop for s in stages[1:]}) > 1:
        return f"{model.noun} has other steps between its layers, which is not compiled"
    return None


def _require_stages(model: AnyModel) -> Staged:
    """Return the model as stages.

    Raises:
        ProtocolError: it has no compiled form.
    """
    _check_model(model)
    assert model.staged is not None  # only models of ratings are compiled without stages
    return model.staged


def _check_model(model: AnyModel) -> None:
    """Raise `ProtocolError` for a model that has no compiled form."""
    reason = _model_not_compiled(model)
    if reason is not None:
        raise ProtocolError(
            f"expected a model that is compiled, got: {reason}; run with kernels=torch"
        )
