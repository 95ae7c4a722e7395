"""The model of a run: silograph's layers with their options, or a user's own module."""

from collections.abc import Callable
from dataclasses import fields, replace
from typing import cast

import torch

from silograph.core.config import RunConfig
from silograph.core.errors import ConfigError, lookup
from silograph.core.widths import hidden_widths
from silograph.experiment.resolve.user_code import imported, is_spec
from silograph.graph.graph import Schema
from silograph.nn.model import MODELS, Model
from silograph.nn.own_module import Make, ModuleModel, check
from silograph.nn.schedule import TrainableModel
from silograph.task.registry import task_of

HEADS, HOPS, TELEPORT = 8, 10, 0.1  # as in the papers of GAT and APPNP
LINEAR_ENDS = ("appnp", "mlp")
OPTION_OF = {"heads": "gat", "hops": "appnp", "teleport": "appnp"}
OF_LAYERS = {"layers", "hidden", "head", "dropout", "residual", "fanout", "neighbors", *OPTION_OF}


def with_model_options(config: RunConfig) -> RunConfig:
    """Return the config with the options of its model written out.

    Raises:
        ConfigError: unknown model (names the nearest), or an option that it cannot use.
    """
    if is_spec(config.model):
        refuse_options(config)
        return config
    lookup(MODELS, config.model, "model")
    for name, model in OPTION_OF.items():
        if config.model != model and getattr(config, name) is not None:
            raise ConfigError(
                f"expected {name} with model {model} only, got {name}={getattr(config, name)} with "
                f"model {config.model}: leave it out"
            )
    hidden = hidden_widths(config.hidden, config.layers)
    layers = len(hidden) + 1
    config = replace(config, layers=layers)
    _check_head(config, layers)
    if config.residual and layers < 3:
        raise ConfigError(
            f"expected 3 layers or more with residual, got {layers}: there is no hidden "
            "layer whose input and output are equally wide"
        )
    if config.residual and len(set(hidden)) > 1:
        raise ConfigError(
            f"expected hidden layers of one width with residual, got hidden={config.hidden}: what "
            "enters a layer is added to what leaves it"
        )
    if config.model == "gat":
        config = replace(config, heads=HEADS if config.heads is None else config.heads)
        odd = [width for width in hidden if width % (config.heads or 1)]
        if odd:
            raise ConfigError(
                f"expected a hidden width that is a multiple of {config.heads} heads, got "
                f"{odd[0]}: they stand side by side in it"
            )
    if config.model == "appnp":
        hops = HOPS if config.hops is None else config.hops
        teleport = TELEPORT if config.teleport is None else config.teleport
        config = replace(config, hops=hops, teleport=teleport)
    return config


def _check_head(config: RunConfig, layers: int) -> None:
    if config.head == "linear" and config.model in LINEAR_ENDS:
        raise ConfigError(
            f"expected head=linear with a model that ends with a convolution, got {config.model}, "
            "whose layers with weights are linear: leave it out"
        )
    if config.head == "linear" and layers < 2:
        raise ConfigError(
            f"expected 2 layers or more with head=linear, got {layers}: there is no convolution "
            "below it"
        )


def refuse_options(config: RunConfig) -> None:
    """Raise `ConfigError` for an option of silograph's models where the model is a module."""
    for f in fields(config):
        value = getattr(config, f.name)
        if f.name in OF_LAYERS and value != f.default:
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
    schema: Schema,
    make: Make | None,
    dtype: torch.dtype,
    device: torch.device,
) -> TrainableModel:
    """Return the model of a run; options must be written out.

    Args:
        config: of the run.
        schema: of the graph.
        make: the user's own module, if the model is one.
        dtype: of its weights.
        device: where they are.

    Raises:
        ConfigError: the module cannot be trained by a federation.
    """
    if make is not None:
        sizes = schema.num_features, task_of(schema.task).outputs(schema)
        model = ModuleModel(config.model, make, *sizes, schema.task)
        check(model, dtype, device)
        return model
    hidden = hidden_widths(config.hidden, config.layers)
    return Model(
        conv=config.model,
        features=schema.num_features,
        hidden=config.hidden if isinstance(config.hidden, int) else hidden,
        outputs=task_of(schema.task).outputs(schema),
        layers=len(hidden) + 1,
        dropout=config.dropout,
        task=schema.task,
        residual=config.residual,
        heads=config.heads or 1,
        hops=config.hops or 0,
        teleport=config.teleport or 0.0,
        head=config.head,
    )
