"""What does not go together in a run: parts and options that exclude each other."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from math import prod
from typing import Any, Literal, TypeVar, cast

import torch

from silograph.aggregation.aggregators import MEAN
from silograph.aggregation.server_optimizers import NONE
from silograph.core.config import RunConfig
from silograph.core.errors import ConfigError, mistake, reword_error, unknown
from silograph.core.resolved_config import ResolvedConfig
from silograph.core.setting_values import (
    HIDDEN,
    LAYERS,
    SentWeights,
    hidden_widths,
    num_layers,
    parse_links,
    parse_rate_schedule,
    parse_speeds,
    shortest,
)
from silograph.experiment.resolve.data import STANDARD, WEIGHED_SAMPLERS
from silograph.experiment.resolve.parts import Parts
from silograph.experiment.resolve.privacy import exclusions_of_privacy, has_privacy
from silograph.experiment.resolve.user_code import import_spec, is_spec
from silograph.graph.graph import LabelForm, Schema
from silograph.methods import METHODS
from silograph.methods.base import Method
from silograph.methods.local_only import LOCAL
from silograph.nn.consisrec import ConsisRec
from silograph.nn.fit import TrainableModel
from silograph.nn.forward import AnyModel
from silograph.nn.mini_batches import Neighbors
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
from silograph.nn.rating_factors import RatingBiases, RatingFactors, Social
from silograph.nn.rating_model import RatingConv, RatingModel
from silograph.nn.rating_profiles import RatingProfiles
from silograph.sampling.neighbors import Depth
from silograph.selection.base import UNIFORM
from silograph.selection.options import LIMITS
from silograph.selection.registry import SELECTORS
from silograph.selection.round_robin import ROUND_ROBIN
from silograph.task.base import Task
from silograph.task.metric_table import METRICS, RANKINGS, metric_among, metric_of
from silograph.task.rating_value import RankingModel
from silograph.task.registry import task_of
from silograph.task.scores import ALWAYS, ScoreRequest
from silograph.task.threshold import parse_threshold

# --- The model of a run: silograph's layers with their options, or a user's own module -----------


M = TypeVar("M", Model, RatingModel, ConsisRec)
MOST_WEIGHTS = 2**58  # whose bytes torch can still count


def has_linear_head(options: object) -> bool:
    """Whether the last layer is linear, in a model of convolutions."""
    return isinstance(options, LayerOptions | GATOptions) and options.head == "linear"


def depth_of(config: RunConfig, options: object) -> Depth:
    """Return over how many hops a model sums, from the model's options."""
    if isinstance(options, APPNPOptions):
        return Depth(options.hops, "hop")
    layers = num_layers(config.hidden, config.layers)
    return Depth(layers - has_linear_head(options), "layer")


def own_module(config: RunConfig) -> Make | None:
    """Import the module that the config names; None where the model is one of silograph's.

    Raises:
        ConfigError: it cannot be imported.
    """
    if config.model is None or not is_spec(config.model):
        return None
    return import_spec(config.model, cast("type[Make]", Callable))


def _rating_model(config: RunConfig, options: Any, schema: Schema) -> TrainableModel:
    if schema.task != "rating":
        raise ConfigError(
            f"expected ratings of users and items for model {config.model}, got data with labels "
            f"of nodes ({schema.task}): see sg.ratings",
            **mistake("conflicting-options", ["dataset", "model"]),
        )
    if config.model == "rating_biases":
        return RatingBiases(**asdict(options))
    if config.model in FACTOR_MODELS:
        return RatingFactors(cast("Social", config.model), **asdict(options))
    if config.model == "consisrec":
        return _countable(ConsisRec(**asdict(options)))
    hidden = shortest(config.hidden)
    assert isinstance(hidden, int)  # see `exclusions_of_parts`
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
        way: Literal["none", "along"] = "none" if config.directed == "none" else "along"
        model = ModuleModel(config.model, make, schema.num_features, outputs, schema.task, way)
        check(model, dtype, device)
        return model
    if config.model in RATING_MODELS:
        return _rating_model(config, options, schema)
    if schema.task == "rating":
        raise ConfigError(
            f"expected a model for ratings of users and items, got {config.model}, which predicts "
            "labels of nodes: use rating_profiles, or FedACS' own, rating_gcn with layers=5 and "
            "hidden=32 (others: "
            f"{', '.join(sorted(set(RATING_MODELS) - {'rating_profiles', 'rating_gcn'}))})",
            **mistake("conflicting-options", ["dataset", "model"]),
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
            directed=config.directed,
            **asdict(options),
        )
    )


# --- The metric of a run and the validation score at which it may stop ---------------------------


RELEVANT = 4.0  # of scales from 1 to 5, as of Ciao and Epinions


@dataclass(frozen=True)
class Target:
    """A validation score at which a run may stop."""

    metric: str
    value: float


def parse_target(
    text: str | None, default: str | None = None, metric_names: Iterable[str] = METRICS
) -> Target | None:
    """Return the target of `METRIC=VALUE`, or of `VALUE` alone.

    >>> parse_target("accuracy=0.8")
    Target(metric='accuracy', value=0.8)
    >>> parse_target("0.8", "rmse")
    Target(metric='rmse', value=0.8)

    Args:
        text: the target of the config, or None.
        default: the metric of a value alone; None while it is not known: any will do.
        metric_names: metrics to choose from.

    Raises:
        ConfigError: another form, an unknown metric, or a value that the metric cannot have.
    """
    if text is None:
        return None
    metric, equals, value = (part.strip() for part in text.rpartition("="))
    number = _number(value)
    if number is None or (equals and not metric):
        raise ConfigError(
            f"target: expected METRIC=VALUE, or a VALUE of the run's metric alone, such as "
            f"accuracy=0.8 or 0.8, got {text!r}",
            **mistake("option-value", "target", text),
        )
    if not equals and default is None:
        return Target("", number)
    try:
        target_metric = metric_among(metric or str(default), metric_names, "metric")
    except ConfigError as error:
        raise reword_error(error, f"target: {error}", ConfigError) from None
    if number < 0 or (target_metric.share and number > 1):
        ends = "from 0 to 1" if target_metric.share else "of 0 or more"
        raise ConfigError(
            f"target: expected a value of {target_metric.name} {ends}, got {text!r}",
            **mistake("option-value", "target", text),
        )
    return Target(target_metric.name, number)


def _number(text: str) -> float | None:
    """Return a finite number, None where the text is none."""
    try:
        number = float(text)
    except ValueError:
        return None
    return number if math.isfinite(number) else None


def check_metric_of(config: RunConfig, task: LabelForm) -> None:
    """Raise `ConfigError` for a metric that does not exist; its choices are those of a task."""
    metric_names = task_of(task).metrics
    if config.metric is not None:
        try:
            METRICS[config.metric]
        except KeyError:
            raise unknown("metric", config.metric, metric_names) from None
    parse_target(config.target, None, metric_names)


def _asked_metrics(config: RunConfig | ResolvedConfig) -> list[str]:
    """Return the names of the metrics of the config: `metric`, and that of `target`."""
    target = parse_target(config.target, config.metric)
    return [name for name in (config.metric, target and target.metric) if name]


def needs_validation_histogram(config: ResolvedConfig, task: Task) -> bool:
    """Whether validation nodes need scores from histograms, which other runs do not compute."""
    metrics = [METRICS[name] for name in _asked_metrics(config)]
    needs_scores = any(not m.validation or m.from_histogram for m in metrics)
    return task.histograms and (needs_scores or config.threshold is not None)


def score_request(config: ResolvedConfig, schema: Schema) -> ScoreRequest:
    """Return which scores the run wants besides those that every run of its task has.

    Raises:
        ConfigError: see `positive_class`.
    """
    if not task_of(schema.task).histograms:
        return ALWAYS
    names = [name for name in _asked_metrics(config) if METRICS[name].from_histogram]
    return ScoreRequest(tuple(dict.fromkeys(names)), positive_class(config.positive, schema))


def check_threshold(text: str | None, schema: Schema) -> None:
    """Raise `ConfigError` for a threshold that is none, or of labels that have no use for one."""
    if text is None:
        return
    parse_threshold(text)
    is_binary = (schema.task, schema.num_classes) in (("multiclass", 2), ("multilabel", 1))
    if not is_binary:
        got = f"{schema.num_classes} classes" if schema.task == "multiclass" else schema.task
        raise ConfigError(
            f"threshold: expected two classes, or one label bit, got {got}: leave threshold out",
            **mistake("unread-option", "threshold", got),
        )


def positive_output(config: ResolvedConfig, schema: Schema) -> int:
    """Return the number of the model's output that is of the positive class, or of the only bit."""
    return 0 if schema.task == "multilabel" else positive_class(config.positive, schema)


def positive_class(name: str | None, schema: Schema) -> int:
    """Return the number of the class that decisions are of, where there are two; else 1.

    Raises:
        ConfigError: there are other than two classes, or none of this name.
    """
    if name is None:
        return 1
    if schema.task != "multiclass" or schema.num_classes != 2:
        got = f"{schema.num_classes} classes" if schema.task == "multiclass" else schema.task
        raise ConfigError(
            f"positive: expected two classes, of which one is positive, got {got}: leave "
            "positive out",
            **mistake("unread-option", "positive", got),
        )
    names = list(schema.class_names or ("0", "1"))
    if name not in names:
        raise unknown("class", name, names)
    return names.index(name)


def scores_some(config: ResolvedConfig) -> bool:
    """Whether a round's model is scored by those alone who train from it in the next round."""
    return config.evaluate_clients == "participants"


def relevant_of_run(config: RunConfig, schema: Schema, model: AnyModel) -> float | None:
    """Return the least rating of items that rankings should have first; None: nothing is ranked.

    Raises:
        ConfigError: rankings of data without ratings, or of a model that has none.
    """
    target = parse_target(config.target, config.metric)
    metric_names = [config.metric, target and target.metric]
    min_rating = config.relevant
    is_rating = schema.task == "rating"  # of classes, recall@10 is another score
    if min_rating is None and is_rating and any(name in RANKINGS for name in metric_names):
        min_rating = RELEVANT
    if min_rating is None:
        return None
    if schema.task != "rating" or not isinstance(model, RankingModel):
        raise ConfigError(
            f"relevant: expected a model of ratings of users and items, got {model.noun} of "
            f"{schema.task}: leave relevant out",
            **mistake("unread-option", "relevant", schema.task),
        )
    return min_rating


def metric_of_run(config: RunConfig, schema: Schema) -> str:
    """Return the metric of a run.

    Raises:
        ConfigError: the task has no such metric, or not that of the target (names the nearest).
    """
    task = task_of(schema.task)
    name = task.primary if config.metric is None else config.metric
    metric = metric_among(name, task.metrics, f"metric of {task.name}")
    parse_target(config.target, name, task.metrics)
    return metric.name


# --- What excludes each other: whether a run has both, the reason with a remedy, the options -----
#
# Each table is read from top to bottom; the first entry that applies is the error of the run. Which
# table is asked depends on what is known: the parts, then the kind of labels, then the model.


Exclusion = tuple[object, str, Sequence[str]]
# Keys that a module cannot have; its default and its value in a resolved config are allowed.
OF_LAYERS = {
    "layers": LAYERS,
    "hidden": HIDDEN,
    "dropout": None,
    "fanout": None,
    "neighbors": "full",
}
# Keys of models of ratings, with the value that such a model takes.
OF_RATING_MODELS = {
    "fanout": None,
    "neighbors": "full",
    "collect": 0,
    "local_bias": False,
    "features": "given",
}
WITHOUT_SUMS = {
    "none": "which exchanges no rows",
    "single": "which exchanges more than sums",
}


def check_exclusions(exclusions: Iterable[Exclusion]) -> None:
    """Raise `ConfigError` with the reason of the first exclusion that applies."""
    for applies, reason, options in exclusions:
        if applies:
            raise ConfigError(reason, **mistake("conflicting-options", list(options)))


def has_selection_limits(options: Any) -> bool:
    """Whether options of a selector limit the clients of rounds; a user's may not have them."""
    values = {f.name: getattr(options, f.name) for f in fields(options)}
    return any(values.get(name) is not None for name in LIMITS)


def selectors_for(task: Task) -> str:
    """Return the names of the library's selectors that can use what a task reports, as a text."""
    return ", ".join(s.name for s in SELECTORS.values() if task.classes or not s.needs_classes)


def methods_that(has_ability: Callable[[Method], object]) -> str:
    """Return the names of the library's methods that have an ability, as a text."""
    return ", ".join(name for name, method in METHODS.items() if has_ability(method))


def exclusions_of_model_kind(
    config: RunConfig, kind: ModelKind, options: Any
) -> Iterator[Exclusion]:
    """Yield what the kind of model excludes.

    Args:
        config: of the run.
        kind: of the model.
        options: of the model, checked.
    """
    if kind is MODULE:
        for f in fields(config):
            value = getattr(config, f.name)
            yield (
                f.name in OF_LAYERS and value not in (f.default, OF_LAYERS[f.name]),
                f"expected {f.name} with silograph's own models only, got {f.name}={value} with "
                f"model {config.model}, which decides by itself: leave it out",
                ("model", f.name),
            )
        return
    hidden = shortest(config.hidden)
    if kind.name in RATING_MODELS:
        yield (
            not isinstance(hidden, int),
            f"expected one width for all layers of {kind.name}, got hidden={hidden}: the last "
            "layer is as wide as the others",
            ("model", "hidden"),
        )
        if isinstance(options, RatingGATOptions) and isinstance(hidden, int):
            yield from _exclusions_of_heads([hidden], options.heads)
        for name, allowed_value in OF_RATING_MODELS.items():
            value = getattr(config, name)
            yield (
                value not in (None, allowed_value),
                f"expected no {name} with {kind.name}, whose clients know all edges of their "
                f"ratings and nothing of others, got {name}={value}: leave it out",
                ("model", name),
            )
        return
    yield (
        isinstance(options, MLPOptions) and config.neighbors not in (None, "full", "fanout"),
        f"expected no neighbors={config.neighbors} with model {kind.name}, which ignores the "
        "graph: leave it out, or take a model that sums over neighbors, such as gcn",
        ("model", "neighbors"),
    )
    layers = num_layers(config.hidden, config.layers)
    yield (
        options.residual and layers < 3,
        f"expected 3 layers or more with residual, got {layers}: there is no hidden "
        "layer whose input and output are equally wide",
        ("model.residual", "layers"),
    )
    yield (
        options.residual and isinstance(hidden, str),
        f"expected hidden layers of one width with residual, got hidden={hidden}: what "
        "enters a layer is added to what leaves it",
        ("model.residual", "hidden"),
    )
    yield (
        has_linear_head(options) and layers < 2,
        f"expected 2 layers or more with head=linear, got {layers}: there is no convolution "
        "below it",
        ("model.head", "layers"),
    )
    if isinstance(options, GATOptions) and layers > 1:
        yield from _exclusions_of_heads(hidden_widths(hidden, layers), options.heads)


def _exclusions_of_heads(widths: Sequence[int], heads: int) -> Iterator[Exclusion]:
    """Yield hidden widths that attention heads cannot share."""
    for width in widths:
        yield (
            width % heads,
            f"expected a hidden width that is a multiple of {heads} heads, got {width}: they "
            "stand side by side in it",
            ("model.heads", "hidden"),
        )


def exclusions_of_optimizer(config: RunConfig, method: Method) -> Iterator[Exclusion]:
    """Yield what the optimizer of the clients excludes."""
    optimizer = config.optimizer or method.needs.optimizer
    yield (
        method.needs.plain_sgd and (optimizer != "sgd" or config.momentum != 0),
        f"expected optimizer=sgd without momentum for method {method.name}, got "
        f"optimizer={optimizer} with momentum={config.momentum}: other steps do not tell the "
        "clients' gradients",
        ("method", "optimizer", "momentum"),
    )
    yield (
        optimizer != "sgd" and config.momentum != 0,
        f"expected no momentum with optimizer=adam, got momentum={config.momentum}: use "
        "optimizer=sgd",
        ("optimizer", "momentum"),
    )


def exclusions_of_parts(
    config: RunConfig, parts: Parts, *, overlapping: bool
) -> Iterator[Exclusion]:
    """Yield what parts and settings exclude, whatever the data.

    Args:
        config: of the run.
        parts: of the config.
        overlapping: whether several clients may hold a node.
    """
    method = parts.method.part
    selector = parts.selector.part
    aggregator = parts.aggregator.part
    # What the method cannot do.
    yield (
        config.collect and (method.evaluate.crosses or method.setting.uncut),
        f"expected a method that trains on each client's own graph for collect, got "
        f"{method.name}, which has all neighbors already: leave collect out",
        ("method", "collect"),
    )
    yield (
        overlapping and not method.evaluate.copies and not method.setting.uncut,
        f"expected a cut in which each node has one client for {method.name}, which trains all "
        f"clients as one graph, got {config.partition}: use another partition, such as metis",
        ("method", "partition"),
    )
    yield (
        not method.selects
        and (selector is not UNIFORM or has_selection_limits(parts.selector.options)),
        f"expected a method that trains locally for selector {selector.name}, got "
        f"{method.name}, in which all clients train in every round: leave selector out",
        ("method", "selector"),
    )
    yield (
        aggregator is not MEAN and not method.aggregates,
        f"expected a method that averages weights and nothing else for aggregator "
        f"{aggregator.name}, got {method.name}: use one of "
        f"{methods_that(lambda m: m.aggregates)}, or one of your own with aggregates=True",
        ("method", "aggregator"),
    )
    server_optimizer = parts.server_optimizer.part
    yield (
        server_optimizer is not NONE and not method.server_step,
        f"expected a method that averages weights for server_optimizer {server_optimizer.name}, "
        f"got {method.name}: use one of {methods_that(lambda m: m.server_step)}, or one of your "
        "own with server_step=True",
        ("method", "server_optimizer"),
    )
    yield (
        config.class_weight is not None and not method.weighs_classes,
        f"expected a method whose clients train by the mean loss of their nodes for class_weight, "
        f"got {method.name}, which weighs nodes in its own way: leave class_weight out, use one of "
        f"{methods_that(lambda m: m.weighs_classes)}, or one of your own with "
        "weighs_classes=True",
        ("method", "class_weight"),
    )
    yield (
        config.class_weight is not None and config.local_bias,
        "expected no class_weight with local_bias, whose centralized model has none, got both: "
        "leave one of them out",
        ("class_weight", "local_bias"),
    )
    yield (
        config.feature_drift and method.setting.uncut,
        f"expected a method of several clients for feature_drift, got {method.name}, which trains "
        "one on the whole graph: leave feature_drift out",
        ("method", "feature_drift"),
    )
    yield (
        config.local_bias and method.evaluate.view != "server",
        f"expected a method whose server has a model for local_bias, got {method.name}: leave "
        "local_bias out",
        ("method", "local_bias"),
    )
    limits = [n for n in ("min_nodes_per_row", "min_silos_per_row") if getattr(config, n) > 1]
    if limits and method.rows != "sums":
        yield (
            True,
            f"expected a method that exchanges sums of rows for {limits[0]}, got {method.name}, "
            f"{WITHOUT_SUMS[method.rows]}: leave {' and '.join(limits)} out",
            ("method", *limits),
        )
    # The form in which weights are sent.
    is_plain = SentWeights(config.weights_as, config.weight_rows).plain
    settings_text = f"weights_as={config.weights_as} weight_rows={config.weight_rows}"
    yield (
        not is_plain and not method.small_weights,
        f"expected weights_as=exact and weight_rows=all for method {method.name}, got "
        f"{settings_text}: {methods_that(lambda m: m.small_weights)} can send them otherwise",
        ("method", "weights_as", "weight_rows"),
    )
    yield (
        not is_plain and selector.on_receipt,
        f"expected weights_as=exact and weight_rows=all where clients score what they receive, "
        f"got {settings_text}: those that do not train would score other weights",
        ("selector", "weights_as", "weight_rows"),
    )
    keep_optimizer = (
        method.needs.keep_optimizer if config.keep_optimizer is None else config.keep_optimizer
    )
    yield (
        config.weight_rows != "all"
        and (keep_optimizer or config.batch_size is not None or config.collect),
        "expected neither keep_optimizer, batch_size nor collect with weight_rows=used: then "
        "the server cannot know what becomes of the rows that a client does not use",
        ("weight_rows", "keep_optimizer", "batch_size", "collect"),
    )
    if config.secure_aggregation:
        yield from _exclusions_of_secure_sums(config, parts, is_plain=is_plain)
    if has_privacy(config):
        yield from exclusions_of_privacy(config, parts)
    # Features that are made.
    yield (
        config.features == "degree" and config.normalize == "row",
        "expected normalize none with features degree, got row: a single feature divided by "
        "itself is 1 at every node; leave normalize out",
        ("features", "normalize"),
    )
    yield (
        config.features == "constant" and config.normalize in STANDARD,
        f"expected normalize none with features constant, got {config.normalize}: a constant "
        "feature is then 0 at every node; leave normalize out",
        ("features", "normalize"),
    )
    yield (
        "degree" in config.features and config.drop_edges,
        f"expected no drop_edges with features {config.features}, got {config.drop_edges}: a "
        "silo cannot count edges that it has lost; use constant, or leave drop_edges out",
        ("features", "drop_edges"),
    )


def _exclusions_of_secure_sums(
    config: RunConfig, parts: Parts, *, is_plain: bool
) -> Iterator[Exclusion]:
    """Yield what needs replies of single clients, or sums in an order."""
    method, selector, what = parts.method.part, parts.selector.part, "secure_aggregation"
    yield (
        not method.only_sums or method.setting.uncut,
        f"expected a method whose server needs sums over clients only for {what}, got "
        f"{method.name}: use one of "
        f"{methods_that(lambda m: m.only_sums and not m.setting.uncut)}, or one of your own with "
        "only_sums=True",
        ("method", what),
    )
    yield (
        selector.on_receipt or (selector.observe is not None and selector is not ROUND_ROBIN),
        f"expected a selector that learns nothing of single clients for {what}, got "
        f"{selector.name}: use uniform, round_robin or all",
        ("selector", what),
    )
    yield (
        parts.aggregator.part is not MEAN,
        f"expected aggregator=mean for {what}, got {parts.aggregator.part.name}, which needs the "
        "weights of single clients: leave one of them out",
        ("aggregator", what),
    )
    yield (
        not is_plain,
        f"expected weights_as=exact and weight_rows=all for {what}, whose sums are of one form, "
        f"got weights_as={config.weights_as} weight_rows={config.weight_rows}: leave them out",
        ("weights_as", "weight_rows", what),
    )
    yield (
        config.feature_drift,
        f"expected no feature_drift for {what}: it compares the histograms of each client with "
        "those of the others, and their sum does not tell them apart; leave feature_drift out",
        ("feature_drift", what),
    )
    yield (
        (config.evaluation_min_count or 0) > 1,
        f"expected evaluation_min_count=0 for {what}, which shows no count of a single client, got "
        f"{config.evaluation_min_count}: set it to 0",
        ("evaluation_min_count", what),
    )
    yield (
        config.evaluate_clients == "participants",
        f"expected evaluate_clients=all for {what}, got participants: leave it out",
        ("evaluate_clients", what),
    )


def exclusions_of_labels(config: RunConfig, parts: Parts, labels: LabelForm) -> Iterator[Exclusion]:
    """Yield what the kind of labels excludes."""
    method, selector, task = parts.method.part, parts.selector.part, task_of(labels)
    yield (
        selector.needs_classes and not task.classes,
        f"expected labels of classes for selector {selector.name}, which learns from the classes "
        f"that each client has, got {task.name}: use one of {selectors_for(task)}",
        ("dataset", "selector"),
    )
    yield (
        labels == "rating" and not method.trains_ratings,
        f"expected a method that trains on ratings of users and items, got {method.name}: use "
        f"one of {methods_that(lambda m: m.trains_ratings)}",
        ("dataset", "method"),
    )
    yield (
        config.class_weight is not None and not task.classes,
        f"expected labels of classes for class_weight, got {task.name}: leave class_weight out",
        ("dataset", "class_weight"),
    )
    yield (
        labels == "rating" and config.normalize in STANDARD,
        f"expected normalize none with ratings, got {config.normalize}: users, items and "
        "ratings have no features to standardize; leave normalize out",
        ("dataset", "normalize"),
    )
    yield (
        labels == "rating" and config.feature_drift,
        "expected features of nodes for feature_drift, got ratings, whose users and items have "
        "none: leave feature_drift out",
        ("dataset", "feature_drift"),
    )


def exclusions_of_silos(config: RunConfig, num_silos: int) -> Iterator[Exclusion]:
    """Yield options that cut a graph, where silos hold their parts already."""
    for name in ("largest_component", "drop_edges"):
        yield (
            getattr(config, name),
            f"expected silos' data as they are, got {name}={getattr(config, name)}: nobody "
            "holds the whole graph; leave it out, or give it to export-silos",
            ("dataset", name),
        )
    yield (
        config.clients not in (None, num_silos),
        f"clients: expected {num_silos}, one for each silo, got {config.clients}: leave "
        "clients out",
        ("dataset", "clients"),
    )


def exclusions_of_shards(config: RunConfig, parts: Parts) -> Iterator[Exclusion]:
    """Yield what needs the whole graph in one process, which shards are there to avoid."""
    method, remedy = parts.method.part, "or run on the graph itself, without shards"
    yield (
        method.setting.uncut or method.setting.held(parts.method.options) is not None,
        f"expected a method whose clients hold the graph, got {method.name}, which reads it uncut: "
        f"choose another, {remedy}",
        ("method",),
    )
    for name in ("local_bias", "class_weight", "feature_drift"):
        yield (
            getattr(config, name),
            f"expected shards without {name}, got {name}={getattr(config, name)}, which reads all "
            f"labels or features at once: leave it out, {remedy}",
            (name,),
        )
    yield (
        config.normalize == "standard_client",
        "expected normalize none, row or standard for shards, got standard_client: choose another, "
        f"{remedy}",
        ("normalize",),
    )
    yield (
        torch.device(config.device).type != "cpu",
        f"expected device=cpu with shards, got {config.device}: leave it out, {remedy}",
        ("device",),
    )


def exclusions_of_model(
    config: RunConfig,
    parts: Parts,
    model: AnyModel,
    neighbors: Neighbors,
    relevant: float | None,
    scale: tuple[float, float] | None,
) -> Iterator[Exclusion]:
    """Yield what the model excludes, once it is built for the data.

    Args:
        config: of the run.
        parts: of the config.
        model: what trains.
        neighbors: what draws its neighbors.
        relevant: the least rating of items that rankings should have first, None without rankings.
        scale: least and largest rating of the data; None where none is known.
    """
    yield (
        config.decay_layers != "all" and model.staged is None,
        f"expected decay_layers=all with {model.noun}, whose layers are not known, got "
        f"decay_layers={config.decay_layers}: leave it out",
        ("model", "decay_layers"),
    )
    if config.directed != "none":
        yield from _exclusions_of_directions(config, parts, model)
    selector = parts.selector.part
    if relevant is not None:
        yield (
            config.metric in RANKINGS and selector.on_receipt,
            f"expected another metric than {config.metric} for selector {selector.name}, whose "
            "clients score what they receive but rank nothing by it: use rmse and relevant="
            f"{relevant:g}, which ranks as well",
            ("selector", "metric"),
        )
    if relevant is not None and scale is not None:
        yield (
            relevant > scale[1],
            f"relevant: expected at most {scale[1]:g}, the largest rating that there may be, got "
            f"{relevant:g}: no item would be relevant; lower it",
            ("dataset", "relevant"),
        )
    shares = isinstance(model, RatingBiases | RatingProfiles) and model.shared != "none"
    yield (
        config.dp_epsilon is not None and shares,
        "expected model.shared=none for dp_epsilon, which does not cover sums of single users and "
        "items: leave one of them out",
        ("model.shared", "dp_epsilon"),
    )
    yield (
        config.secure_aggregation and shares,
        "expected model.shared=none for secure_aggregation, which does not cover sums of single "
        "users and items: leave one of them out",
        ("model.shared", "secure_aggregation"),
    )
    reason = neighbors.why_not(model)
    yield (
        reason is not None,
        f"expected a model that takes the draws of neighbors="
        f"{config.neighbors or parts.neighbors.part.name}, got {config.model}: {reason}; use "
        "neighbors=full or fanout",
        ("model", "neighbors"),
    )


def _exclusions_of_directions(
    config: RunConfig, parts: Parts, model: AnyModel
) -> Iterator[Exclusion]:
    """Yield what reads every edge both ways."""
    is_module = isinstance(model, ModuleModel)
    yield (
        is_module and config.directed != "along",
        f"expected directed=along for model {config.model}, which gets edge_index from sources to "
        f"targets and may turn it, got {config.directed}",
        ("model", "directed"),
    )
    sums = model.staged is not None and any(stage.conv.sums for stage in model.staged.stages)
    yield (
        not sums and not is_module,
        f"expected a model whose layers sum over neighbors for directed={config.directed}, got "
        f"model {config.model}: leave directed out, or use gcn, sage, graphconv, gin, gat or appnp",
        ("model", "directed"),
    )
    method, sampler = parts.method.part, parts.neighbors.part.name
    yield (
        not method.weighs_edges,
        f"expected a method whose clients train on edges of their own for "
        f"directed={config.directed}, got {method.name}, which exchanges rows, or makes or draws "
        "edges of its own: leave directed out, or use a method such as fedavg or fedopt",
        ("method", "directed"),
    )
    yield (
        sampler not in WEIGHED_SAMPLERS,
        f"expected neighbors=full or fanout for directed={config.directed}, got {sampler}, whose "
        "draws know no directions: leave one of them out",
        ("neighbors", "directed"),
    )


def exclusions_of_clients(config: RunConfig, num_clients: int) -> Iterator[Exclusion]:
    """Yield what the number of clients excludes."""
    max_silos = max(num_clients - 1, 1)
    yield (
        config.min_silos_per_row > max_silos,
        f"expected at most {max_silos} for min_silos_per_row, as a node has neighbors in at "
        f"most that many other silos, got {config.min_silos_per_row}: lower it",
        ("clients", "min_silos_per_row"),
    )


def check_selected(parts: Parts) -> None:
    """Raise `ConfigError` for a selector that learns, where clients train without a server.

    Only new runs are checked; an older run with such a selector can be resumed.
    """
    method, selector = parts.method.part, parts.selector
    learns = selector.part.observe is not None and selector.part is not ROUND_ROBIN
    if method.round is LOCAL.round and (learns or has_selection_limits(selector.options)):
        selector_text = f"selector {selector.part.name}{'' if learns else ' with limits'}"
        raise ConfigError(
            f"expected a method whose clients train with a server for {selector_text}, got "
            f"{method.name}, whose clients train alone: leave selector out, or use uniform, "
            "round_robin or all without limits",
            **mistake("conflicting-options", ["method", "selector"]),
        )


def check_parts(config: RunConfig, parts: Parts, *, overlapping: bool) -> None:
    """Raise `ConfigError` for settings that exclude each other, or that mean nothing.

    Arguments as for `exclusions_of_parts`.
    """
    check_exclusions(exclusions_of_parts(config, parts, overlapping=overlapping))
    if config.speeds is not None:
        parse_speeds(config.speeds)
    if config.links is not None:
        parse_links(config.links)
    parse_rate_schedule(config.lr_schedule, config.rounds, config.warmup_rounds)
    if config.metric is not None:
        metric_of(config.metric)
    if config.threshold is not None:
        parse_threshold(config.threshold)
    parse_target(config.target, config.metric)
