"""The model of a run: silograph's layers with their options, or a user's own module."""

from collections.abc import Callable
from dataclasses import asdict, fields
from typing import Any, cast

import torch

from silograph.core.config import RunConfig
from silograph.core.errors import ConfigError
from silograph.experiment.resolve.user_code import imported, is_spec
from silograph.graph.graph import Schema
from silograph.nn.model import AnyModel, Model
from silograph.nn.model_options import MODULE, APPNPOptions, GATOptions, ModelKind
from silograph.nn.own_module import Make, ModuleModel, check
from silograph.sampling.neighbors import Depth
from silograph.task.registry import task_of

OF_LAYERS = {"layers", "hidden", "dropout", "fanout", "neighbors"}


def check_model(config: RunConfig, kind: ModelKind, options: Any) -> None:
    """Raise `ConfigError` for options that do not go with the model, or with each other."""
    if kind is MODULE:
        refuse_options(config)
        return
    if options.residual and config.layers < 3:
        raise ConfigError(
            f"expected 3 layers or more with residual, got {config.layers}: there is no hidden "
            "layer whose input and output are equally wide"
        )
    if isinstance(options, GATOptions) and config.layers > 1 and config.hidden % options.heads:
        raise ConfigError(
            f"expected a hidden width that is a multiple of {options.heads} heads, got "
            f"{config.hidden}: they stand side by side in it"
        )


def depth_of(config: RunConfig, options: object) -> Depth:
    """Return over how many hops a model sums, from the model's options."""
    if isinstance(options, APPNPOptions):
        return Depth(options.hops, "hop")
    return Depth(config.layers, "layer")


def refuse_options(config: RunConfig) -> None:
    """Raise `ConfigError` for an option of silograph's models where the model is a module."""
    for f in fields(config):
        value = getattr(config, f.name)
        if f.name in OF_LAYERS and value != f.default and value != "full":
            raise ConfigError(
                f"expected {f.name} with silograph's own models only, got {f.name}={value} with "
                f"model {config.model}, which decides by itself: leave it out"
            )


def own_module(config: RunConfig) -> Make | None:
    """Import the module that the config names; None where the model is one of silograph's.

    Raises:
        ConfigError: it cannot be imported.
    """
    if not is_spec(config.model):
        return None
    return imported(config.model, cast("type[Make]", Callable))


def make_model(
    config: RunConfig,
    options: Any,
    schema: Schema,
    make: Make | None,
    dtype: torch.dtype,
    device: torch.device,
) -> AnyModel:
    """Return the model of a run.

    Args:
        config: of the run.
        options: of the model, checked.
        schema: of the graph.
        make: the user's own module, if the model is one.
        dtype: of its weights.
        device: where they are.

    Raises:
        ConfigError: the module cannot be trained by a federation.
    """
    outputs = task_of(schema.task).outputs(schema)
    if make is not None:
        model = ModuleModel(config.model, make, schema.num_features, outputs, schema.task)
        check(model, dtype, device)
        return model
    return Model(
        conv=config.model,
        features=schema.num_features,
        hidden=config.hidden,
        outputs=outputs,
        layers=config.layers,
        dropout=config.dropout,
        task=schema.task,
        **asdict(options),
    )
