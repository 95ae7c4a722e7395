"""The model of a run: silograph's layers with their options, or a user's own module."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, fields
from math import prod
from typing import Any, TypeVar, cast

import torch

from silograph.core.config import RunConfig
from silograph.core.errors import ConfigError
from silograph.core.widths import HIDDEN, LAYERS, hidden_widths, num_layers, shortest
from silograph.experiment.resolve.user_code import imported, is_spec
from silograph.graph.graph import Schema
from silograph.nn.consisrec import ConsisRec
from silograph.nn.model import Model
from silograph.nn.model_options import (
    FACTOR_MODELS,
    MODULE,
    RATING_MODELS,
    APPNPOptions,
    GATOptions,
    LayerOptions,
    MLPOptions,
    ModelKind,
    RatingGATOptions,
)
from silograph.nn.own_module import Make, ModuleModel, check
from silograph.nn.rating_biases import RatingBiases
from silograph.nn.rating_factors import RatingFactors, Social
from silograph.nn.rating_model import RatingConv, RatingModel
from silograph.nn.rating_profiles import RatingProfiles
from silograph.nn.schedule import TrainableModel
from silograph.sampling.neighbors import Depth
from silograph.task.registry import task_of

M = TypeVar("M", Model, RatingModel, ConsisRec)
MOST_WEIGHTS = 2**58  # whose bytes torch can still count
# Keys that a module cannot have; beside a key's default, its value in a resolved config is let by.
OF_LAYERS = {
    "layers": LAYERS,
    "hidden": HIDDEN,
    "dropout": None,
    "fanout": None,
    "neighbors": "full",
}


def check_model(config: RunConfig, kind: ModelKind, options: Any) -> None:
    """Raise `ConfigError` for options that do not go with the model, or with each other."""
    if kind is MODULE:
        refuse_options(config)
        return
    if kind.name in RATING_MODELS:
        _check_rating_model(config, kind, options)
        return
    if isinstance(options, MLPOptions) and config.neighbors not in (None, "full", "fanout"):
        raise ConfigError(
            f"expected no neighbors={config.neighbors} with model {kind.name}, which ignores the "
            "graph: leave it out, or take a model that sums over neighbors, such as gcn"
        )
    layers, hidden = num_layers(config.hidden, config.layers), shortest(config.hidden)
    if options.residual and layers < 3:
        raise ConfigError(
            f"expected 3 layers or more with residual, got {layers}: there is no hidden "
            "layer whose input and output are equally wide"
        )
    if options.residual and isinstance(hidden, str):
        raise ConfigError(
            f"expected hidden layers of one width with residual, got hidden={hidden}: what "
            "enters a layer is added to what leaves it"
        )
    if has_linear_head(options) and layers < 2:
        raise ConfigError(
            f"expected 2 layers or more with head=linear, got {layers}: there is no convolution "
            "below it"
        )
    if isinstance(options, GATOptions) and layers > 1:
        check_heads(hidden_widths(hidden, layers), options.heads)


def _check_rating_model(config: RunConfig, kind: ModelKind, options: Any) -> None:
    """Raise `ConfigError` for options that do not go with a model of ratings."""
    hidden = shortest(config.hidden)
    if not isinstance(hidden, int):
        raise ConfigError(
            f"expected one width for all layers of {kind.name}, got hidden={hidden}: the last "
            "layer is as wide as the others"
        )
    if isinstance(options, RatingGATOptions):
        check_heads([hidden], options.heads)
    wanted = {"fanout": None, "neighbors": "full", "collect": 0, "local_bias": False}
    for name, value in {**wanted, "features": "given"}.items():
        got = getattr(config, name)
        if got not in (None, value):
            raise ConfigError(
                f"expected no {name} with {kind.name}, whose clients know all edges of their "
                f"ratings and nothing of others, got {name}={got}: leave it out"
            )


def check_heads(hidden: Sequence[int], heads: int) -> None:
    """Raise `ConfigError` for hidden widths that attention heads cannot share."""
    odd = [width for width in hidden if width % heads]
    if odd:
        raise ConfigError(
            f"expected a hidden width that is a multiple of {heads} heads, got "
            f"{odd[0]}: they stand side by side in it"
        )


def has_linear_head(options: object) -> bool:
    """Whether the last layer is linear, in a model of convolutions."""
    return isinstance(options, LayerOptions | GATOptions) and options.head == "linear"


def depth_of(config: RunConfig, options: object) -> Depth:
    """Return over how many hops a model sums, from the model's options."""
    if isinstance(options, APPNPOptions):
        return Depth(options.hops, "hop")
    layers = num_layers(config.hidden, config.layers)
    return Depth(layers - has_linear_head(options), "layer")


def refuse_options(config: RunConfig) -> None:
    """Raise `ConfigError` for an option of silograph's models where the model is a module."""
    for f in fields(config):
        value = getattr(config, f.name)
        if f.name in OF_LAYERS and value not in (f.default, OF_LAYERS[f.name]):
            raise ConfigError(
                f"expected {f.name} with silograph's own models only, got {f.name}={value} with "
                f"model {config.model}, which decides by itself: leave it out"
            )


def own_module(config: RunConfig) -> Make | None:
    """Import the module that the config names; None where the model is one of silograph's.

    Raises:
        ConfigError: it cannot be imported.
    """
    if config.model is None or not is_spec(config.model):
        return None
    return imported(config.model, cast("type[Make]", Callable))


def _rating_model(config: RunConfig, options: Any, schema: Schema) -> TrainableModel:
    if schema.task != "rating":
        raise ConfigError(
            f"expected ratings of users and items for model {config.model}, got data with labels "
            f"of nodes ({schema.task}): see sg.ratings"
        )
    if config.model == "rating_biases":
        return RatingBiases(**asdict(options))
    if config.model in FACTOR_MODELS:
        return RatingFactors(cast("Social", config.model), **asdict(options))
    if config.model == "consisrec":
        return _countable(ConsisRec(**asdict(options)))
    hidden = shortest(config.hidden)
    assert isinstance(hidden, int)  # see `check_model`
    layers = num_layers(config.hidden, config.layers)
    if config.model == "rating_profiles":
        return RatingProfiles(hidden, layers, config.dropout, **asdict(options))
    conv = cast("RatingConv", config.model)
    return _countable(RatingModel(conv, hidden, layers, dropout=config.dropout, **asdict(options)))


def _countable(model: M) -> M:
    """Return a model; raise `ConfigError` where torch could not count its weights."""
    try:
        weights = sum(prod(shape) for shape in model.weight_shapes.values())
    except RuntimeError as error:  # torch works shapes out, and cannot count one tensor of them
        if "overflow" not in str(error):
            raise
        weights = MOST_WEIGHTS
    if weights >= MOST_WEIGHTS:
        raise ConfigError(
            "expected a model of fewer than 2^58 weights, got more: take a smaller hidden width, "
            "or fewer layers"
        )
    return model


def make_model(
    config: RunConfig,
    options: Any,
    schema: Schema,
    make: Make | None,
    dtype: torch.dtype,
    device: torch.device,
) -> TrainableModel:
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
    assert config.model is not None  # see `resolve`
    outputs = task_of(schema.task).outputs(schema)
    if make is not None:
        model = ModuleModel(config.model, make, schema.num_features, outputs, schema.task)
        check(model, dtype, device)
        return model
    if config.model in RATING_MODELS:
        return _rating_model(config, options, schema)
    if schema.task == "rating":
        raise ConfigError(
            f"expected a model for ratings of users and items, got {config.model}, which predicts "
            "labels of nodes: use rating_profiles, or FedACS' own, rating_gcn with layers=5 and "
            "hidden=32 (others: "
            f"{', '.join(sorted(set(RATING_MODELS) - {'rating_profiles', 'rating_gcn'}))})"
        )
    hidden = shortest(config.hidden)
    return _countable(
        Model(
            conv=config.model,
            features=schema.num_features,
            hidden=hidden if isinstance(hidden, int) else hidden_widths(hidden, config.layers),
            outputs=outputs,
            layers=num_layers(config.hidden, config.layers),
            dropout=config.dropout,
            task=schema.task,
            **asdict(options),
        )
    )
