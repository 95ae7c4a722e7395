"""`RunConfig`: one frozen dataclass behind Python keywords, TOML keys and command-line flags.

A field `local_epochs` is the keyword `local_epochs`, the TOML key `local_epochs` and the flag
`--local-epochs`. Options of the chosen parts (method, partition, model, neighbor sampler, selector,
aggregator, server optimizer) stand under `[options]` in TOML, in `options={...}` in Python, and in
`--option NAME=VALUE` on the command line, as `NAME` or `PART.NAME`.
"""

import dataclasses
import inspect
import logging
import os
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import MISSING, field, fields
from functools import lru_cache
from typing import Annotated, Any, Literal, TypeVar, cast, get_type_hints

from pydantic import BeforeValidator, ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass as checked_dataclass

from silograph.core.errors import ConfigError, mistake, reword_error, unknown
from silograph.core.setting_values import (
    Range,
    choice,
    lin,
    log,
    parse_bytes,
    parse_class_weight,
    parse_na_values,
    parse_rating_scale,
    parse_widths,
    parse_workers,
)
from silograph.core.setting_values import Scalar as Scalar
from silograph.core.text import short_repr

T = TypeVar("T")
COMMENT = re.compile(", (got|unable to) .*")  # of pydantic on a value, which is shown anyway
STRICT = ConfigDict(extra="forbid", allow_inf_nan=False)
Seed = Annotated[int, Field(ge=0, lt=2**63)]
MOST = 2**63  # of what is counted: torch and numpy have no larger numbers
Count = Annotated[int, Field(ge=1, lt=MOST)]
LOG = logging.getLogger("silograph")
SCORED_ON_RECEIPT = "eval_on_receipt"  # an option of earlier versions, which run files may have
Contributors = Annotated[int, Field(ge=1, le=10**6)]  # nodes or silos that a row sums over
Share = Annotated[float, Field(ge=0, le=1)]
Positive = Annotated[float, Field(gt=0)]
ENGINE = ("engine", "workers", "address", "keep_every")  # fields that change no result


def setting(
    group: str, default: object, help: str, *, off: str = "", tune: Range | None = None
) -> Any:
    """Return a field of a config.

    Args:
        group: panel of the command line's help.
        default: its value, unless it is given.
        help: one line for users.
        off: the flag that says no; by default --no-NAME.
        tune: what tuning tries.
    """
    metadata = {"help": help, "group": group, "off": off, "tune": tune}
    if isinstance(default, dict):
        return field(default_factory=dict, metadata=metadata)
    return field(default=default, metadata=metadata)


def part_option(part: str, group: str) -> Any:
    """Return a field that is an option of the chosen part, which has its text and default."""
    metadata = {"help": "", "group": group, "off": "", "tune": None, "part": part}
    return field(default=None, metadata=metadata)


def with_plain_types(kind: type[T]) -> type[T]:
    """Leave bounds out of the signature of a dataclass, which `help` shows."""
    signature, hints = inspect.signature(kind), get_type_hints(kind)
    parameters = [p.replace(annotation=hints[p.name]) for p in signature.parameters.values()]
    kind.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    return kind


@with_plain_types
@checked_dataclass(frozen=True, config=STRICT, kw_only=True)
class RunConfig:
    """A run as it is asked for; None leaves the choice to silograph (see `ResolvedConfig`).

    The help texts are the documentation of the fields. A field without one is an option of the
    chosen partition, model, neighbor sampler or selector, which has text, default and range.
    """

    dataset: str = setting("Data", "digits", "name of a dataset, or a path to its file")
    data_dir: str | None = setting("Data", None, "folder in which datasets are looked for first")
    columns: str | None = setting(
        "Data",
        None,
        "names of columns in tables, such as id=key,label=kind (of id, label, silo, source, "
        "target, weight, features; of ratings user, item, rating, time, split, category, truster, "
        "trustee); several: label=red+blue, features=age+income",
    )
    na_values: Annotated[str | None, BeforeValidator(parse_na_values)] = setting(
        "Data",
        None,
        "words or numbers that count as missing in a graph's tables or .npz file besides the "
        'usual ones, such as -999,unknown (a word with a comma: ["a, b"])',
    )
    scale: Positive = setting("Data", 1.0, "factor of nodes and edges, of a generated dataset only")
    rating_scale: Annotated[str | None, BeforeValidator(parse_rating_scale)] = setting(
        "Data",
        None,
        "least and largest rating of a folder of tables of ratings, such as 0.5,5 (default: 1,5)",
    )
    largest_component: bool = setting(
        "Data", False, "keep only the largest connected component", off="--all-components"
    )
    features: Literal["given", "degree", "constant", "onehot-degree"] = setting(
        "Data", "given", "features of nodes: those of the data, or made of what each silo knows"
    )
    normalize: Literal["none", "row", "standard", "standard_client"] = setting(
        "Data",
        "none",
        "scaling of features (row: divide a node's by their sum; standard: mean 0 and "
        "deviation 1 over the training nodes of all clients; standard_client: over those of "
        "each client)",
    )
    feature_drift: bool = setting(
        "Data",
        False,
        "before training, clients send counts of each feature in bins, and feature_drift.csv says "
        "how far each client differs from the others",
    )
    edge_weights: Literal["log", "scale", "use", "ignore"] | None = setting(
        "Data",
        None,
        "what becomes of weights of edges (gcn, graphconv, appnp): log2(1 + weight), weights "
        "scaled to mean 1 over all clients, weights used as they are, or every edge counts 1 "
        "(default: log)",
    )
    repeated_edges: Literal["mean", "sum", "count", "last", "first"] | None = setting(
        "Data",
        None,
        "what an edge weighs that a graph's file lists several times, as in both directions: the "
        "mean of its weights, their sum, how often it is listed, or the last or first weight "
        "(default: mean)",
    )
    directed: Literal["none", "along", "against", "both"] = setting(
        "Data",
        "none",
        "which way messages pass an edge: none (both ways, as if edges had no direction), along "
        "it (from source to target), against it, or both, with weights of their own",
    )
    split: str = setting(
        "Data",
        "0.2/0.4/0.4",
        "train/val/test shares in each client (time:COLUMN:SHARES: by a column of times, the "
        "latest test, time:SHARES by that of ratings; by-client:SHARES: "
        "each client splits its own copies); fold=I/K of "
        "cross validation; public; full (public, all others train)",
    )
    partition: str = setting(
        "Clients",
        "metis",
        "how to cut: metis, louvain, random, dirichlet, class_biased, silo, category, with "
        "overlap metis_overlapping or shares, or FILE.csv with columns node and client",
    )
    clients: Count | None = setting(
        "Clients", None, "number of clients (default: 10; silo: as many as silos)"
    )
    alpha: float | None = part_option("partition", "Clients")
    favored_classes: int | None = part_option("partition", "Clients")
    favor: float | None = part_option("partition", "Clients")
    clients_per_part: int | None = part_option("partition", "Clients")
    part_share: float | None = part_option("partition", "Clients")
    share_mean: float | None = part_option("partition", "Clients")
    share_variance: float | None = part_option("partition", "Clients")
    share_classes: int | None = part_option("partition", "Clients")
    drop_edges: Share = setting(
        "Clients", 0.0, "share of a client's internal edges dropped, in any cut"
    )
    participation: float | None = part_option("selector", "Clients")
    selector: str | None = setting(
        "Clients",
        None,
        "which clients train in a round: all, uniform (a share of them, see participation), "
        "round_robin, power_of_choice, oort, harmony or ucb; or FILE.py:NAME (default: ucb for "
        "fedacs, else uniform)",
    )
    model: str | None = setting(
        "Model",
        None,
        "layers: gcn, sage, graphconv, gin, gat, appnp or mlp; for ratings rating_profiles, "
        "rating_gcn, rating_gat, rating_biases, rating_mf, sorec, soreg or consisrec; or a "
        "torch.nn.Module of your own: FILE.py:NAME or package.module:NAME (default: gcn; for "
        "ratings rating_profiles, for fedacs rating_gcn)",
    )
    layers: Count | None = setting(
        "Model", None, "layers with weights (default: 2, or as hidden says)"
    )
    hidden: Annotated[int | str | None, BeforeValidator(parse_widths)] = setting(
        "Model",
        None,
        "width of the hidden layers, or one for each: 256,128 (default: 128; for fedacs on "
        "ratings, 32 with 5 layers)",
        tune=choice(32, 64, 128, 256),
    )
    head: str | None = part_option("model", "Model")
    dropout: Annotated[float, Field(ge=0, lt=1)] = setting(
        "Model", 0.5, "share of hidden activations dropped", tune=lin(0.0, 0.8)
    )
    input_dropout: float | None = part_option("model", "Model")
    attention_dropout: float | None = part_option("model", "Model")
    residual: bool | None = part_option("model", "Model")
    heads: int | None = part_option("model", "Model")
    hops: int | None = part_option("model", "Model")
    teleport: float | None = part_option("model", "Model")
    method: str = setting(
        "Training",
        "fedopt",
        "what trains: fedopt, fedavg, fedacs, fedmf, fedgnn, fesog, fedprox, fedper, gcfl, "
        "gcflplus, fedpub, fedsageplus, fedsage_local, scaffold, llcg, fedais, fedall, "
        "fedrandom, fedlocal, fedpns, fedais1, fedais2, stale, fedgraph, label_guided, bns, "
        "cagnet, local, centralized or graphsaint",
    )
    aggregator: str = setting(
        "Training",
        "mean",
        "what the server makes of the clients' weights: mean, median or trimmed_mean; or "
        "FILE.py:NAME (methods that average weights)",
    )
    server_optimizer: str | None = setting(
        "Training",
        None,
        "the server's step towards the clients' mean: none (it takes the mean), momentum or adam; "
        "or FILE.py:NAME (methods that average weights; default: adam for "
        "fedopt, fedgraph, fedais and its presets, else none)",
    )
    options: Mapping[str, Scalar] = setting(
        "Training",
        {},
        "an option of the method or another chosen part, NAME=VALUE or PART.NAME=VALUE; parts: "
        "method, partition, model, neighbors, selector, aggregator, server_optimizer (repeatable; "
        "see silograph parts)",
    )
    rounds: Annotated[int, Field(ge=1, lt=2**31)] = setting("Training", 100, "number of rounds")
    local_epochs: Count | None = setting(
        "Training",
        None,
        "passes of a client over its nodes in a round (default: by method, 1 for most)",
        tune=lin(1, 5),
    )
    collect: Share = setting(
        "Training",
        0.0,
        "share of neighbors in other silos whose features each client fetches before training "
        "(features leave their silo)",
    )
    min_nodes_per_row: Contributors = setting(
        "Training",
        1,
        "least number of own nodes behind each row that a silo sends; others are left out "
        "(methods that exchange sums)",
    )
    min_silos_per_row: Contributors = setting(
        "Training",
        1,
        "least number of silos that contribute to a sum of rows; smaller sums are left out by the "
        "server, or by the silos with secure_aggregation (methods that exchange sums)",
    )
    batch_size: Count | None = setting(
        "Training", None, "training nodes in a local step (default: all of a client)"
    )
    fanout: str | None = part_option("neighbors", "Training")
    neighbors: str | None = setting(
        "Training",
        None,
        "what draws neighbors in local steps: full, fanout, bernoulli, drop_edge, drop_node, "
        "fastgcn, ladies or fedgrains; or FILE.py:NAME (default: fanout if that is given, else "
        "full)",
    )
    optimizer: Literal["adam", "sgd"] | None = setting(
        "Training", None, "the clients' optimizer (default: sgd for fedopt and scaffold, else adam)"
    )
    lr: Positive | None = setting(
        "Training",
        None,
        "the clients' learning rate (default: by method, else sgd 0.1 and adam 0.01)",
        tune=log(1e-3, 1.0),
    )
    lr_schedule: str = setting(
        "Training",
        "constant",
        "the clients' learning rate over rounds: constant, cosine (to 0 at the end), or "
        "step:ROUNDS:FACTOR (times FACTOR after every ROUNDS rounds)",
    )
    warmup_rounds: Annotated[int, Field(ge=0, lt=MOST)] = setting(
        "Training", 0, "first rounds, in which the rate rises in equal steps"
    )
    weight_decay: Annotated[float, Field(ge=0)] | None = setting(
        "Training",
        None,
        "L2 penalty added to the gradient (default: by method, else 5e-4)",
        tune=log(1e-6, 1e-2),
    )
    decay_layers: Literal["all", "first"] = setting(
        "Training", "all", "layers whose weights and biases have the L2 penalty"
    )
    momentum: Annotated[float, Field(ge=0, lt=1)] = setting(
        "Training", 0.0, "momentum of the clients' sgd"
    )
    keep_optimizer: bool | None = setting(
        "Training", None, "keep optimizer state between rounds (default: by method)"
    )
    class_weight: Annotated[str | None, BeforeValidator(parse_class_weight)] = setting(
        "Training",
        None,
        "weight of each class in the loss of training nodes: balanced (rare classes count more, by "
        "the counts of all clients), none, or a TOML or CSV file of class = weight (default: none)",
    )
    weights_as: Literal["exact", "float16", "int8", "int4"] = setting(
        "Training",
        "exact",
        "how weights travel: exact, or matrices rounded to float16, to bytes (int8) or to half "
        "bytes (int4) with a scale for each row; clients send changes, with what was rounded "
        "off before",
    )
    weight_rows: Literal["all", "used"] = setting(
        "Training",
        "all",
        "rows of the first weights that travel: all, or those of features that occur at the "
        "client, which shows the server which these are",
    )
    secure_aggregation: bool = setting(
        "Training",
        False,
        "the server learns sums over clients only, of weights, gradients and counts, which clients "
        "mask (methods that need no reply of a single client)",
        off="--plain-aggregation",
    )
    dp_epsilon: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = setting(
        "Privacy",
        None,
        "differential privacy: epsilon that the whole run may cost; needs dp_delta (default: no "
        "differential privacy)",
    )
    dp_delta: Annotated[float, Field(gt=0, lt=1)] | None = setting(
        "Privacy", None, "delta at which dp_epsilon holds; well below 1 / number of units"
    )
    dp_unit: Literal["silo", "node"] | None = setting(
        "Privacy",
        None,
        "what differential privacy hides: whether a whole silo takes part (silo), or a single node "
        "of one (node); node works with the models gcn and sage (default: silo)",
    )
    dp_clip: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = setting(
        "Privacy",
        None,
        "largest norm of a silo's update, with dp_unit=node of a training node's gradient; larger "
        "ones are scaled to it (default: 1)",
    )
    dp_clip_quantile: Annotated[float, Field(gt=0, lt=1)] | None = setting(
        "Privacy",
        None,
        "start the clip at dp_clip and move it towards this quantile of the norms of updates, such "
        "as 0.5 for the median; for dp_unit=silo (default: the clip is fixed)",
    )
    dp_degree: Annotated[int, Field(ge=1, le=100)] | None = setting(
        "Privacy",
        None,
        "with dp_unit=node: most edges of a node that are sampled in a round; more edges need more "
        "noise (default: 3)",
    )
    metric: str | None = setting(
        "Results",
        None,
        "the score that picks the best round, stops by patience, is tuned, compared and shown "
        "first, such as auc, average_precision, precision@100 or recall@fpr=.01 (default: "
        "accuracy; f1_micro for label sets, rmse for numbers)",
    )
    positive: str | None = setting(
        "Results",
        None,
        "of two classes the one that average precision, precision and recall, calibration and "
        "decisions are of (default: the second)",
    )
    threshold: str | None = setting(
        "Results",
        None,
        "of two classes: choose on validation nodes from which probability on a node is taken for "
        "the positive one, by f1, recall@fpr=.01 or cost=FP:FN (costs of a false positive and a "
        "false negative); it is saved with the model",
    )
    relevant: Annotated[float, Field(allow_inf_nan=False)] | None = setting(
        "Results",
        None,
        "of ratings: rank each silo's items for its users, and score by recall@10 and ndcg@10 "
        "how many that a user rates so high or higher come first (default: none are ranked; 4 "
        "with one of these as metric)",
    )
    patience: Count | None = setting(
        "Stopping", None, "stop after this many rounds without better validation"
    )
    target: str | None = setting(
        "Stopping", None, "stop at a validation score: METRIC=VALUE, or a value of the run's metric"
    )
    max_bytes: Annotated[Annotated[int, Field(ge=1)] | None, BeforeValidator(parse_bytes)] = (
        setting("Stopping", None, "stop when this much has been exchanged in all, e.g. 10MB")
    )
    max_seconds: Positive | None = setting(
        "Stopping", None, "stop after this many seconds of training"
    )
    speeds: str | None = setting(
        "Virtual time",
        None,
        "speeds of clients on a virtual clock: equal, lognormal, or numbers of 10^9 operations "
        "a second that clients have in turn, such as 1,2,4 (default with links: equal)",
    )
    links: str | None = setting(
        "Virtual time",
        None,
        "links of clients on a virtual clock, in turn: MB/s:SECONDS of latency for each call, "
        "such as 10:0.05,0.5:0.2 (default with speeds: 10:0.05)",
    )
    max_virtual_seconds: Positive | None = setting(
        "Virtual time", None, "stop after this many seconds of the virtual clock"
    )
    eval_every: Count = setting("Evaluation", 1, "rounds between evaluations")
    evaluate_clients: Literal["all", "participants"] | None = setting(
        "Evaluation",
        None,
        "who scores the server's model of a round: all clients, or those that train from it in "
        "the next round; all score the last and the best one (default: all in a simulation, "
        "participants with a server of silos if the method can)",
    )
    evaluation_min_count: Annotated[int, Field(ge=0, le=10**6)] | None = setting(
        "Evaluation",
        None,
        "least number of nodes behind each count that a client sends when it evaluates; "
        "smaller ones are merged or left out (default: 0, and 5 for a server of real silos)",
    )
    local_bias: bool = setting(
        "Results",
        False,
        "train a centralized model from the same weights, too, and tell how far logits are "
        "from its (simulation only)",
    )
    seed: Seed = setting("Seeds", 0, "seed of training and of the others")
    partition_seed: Seed | None = setting("Seeds", None, "seed of the cut (default: seed)")
    split_seed: Seed | None = setting("Seeds", None, "seed of train/val/test (default: seed)")
    init_seed: Seed | None = setting("Seeds", None, "seed of the initial weights (default: seed)")
    dtype: Literal["float32", "float64"] = setting("Machine", "float32", "precision of training")
    device: str = setting("Machine", "cpu", "torch device")
    threads: Count = setting("Machine", 1, "torch threads; part of what makes runs equal")
    kernels: Literal["auto", "compiled", "torch"] = setting(
        "Machine", "auto", "compiled needs a CPU and numba; auto takes it if it can"
    )
    block_size: Count | None = setting(
        "Machine", None, "most clients in one computation (default: by memory)"
    )
    engine: Literal["local", "ray"] = setting(
        "Machine",
        "local",
        "where the clients of a simulation compute: local (this machine), or ray (a Ray cluster); "
        "results are the same",
    )
    workers: Annotated[int | str | None, BeforeValidator(parse_workers)] = setting(
        "Machine",
        None,
        "processes that share the clients of a simulation, or auto: one for each core (default: "
        "this process alone; ray: auto)",
    )
    address: str | None = setting(
        "Machine",
        None,
        "where a Ray cluster runs, HOST:PORT, or auto: on this machine (default: one is started)",
    )
    keep_every: Annotated[int, Field(ge=0, lt=MOST)] | None = setting(
        "Machine",
        None,
        "rounds between copies of the workers' states; a lost worker does again what came after "
        "the last one; 0 is never (default: 10)",
    )
    strict: bool = setting("Machine", False, "encode and decode every message, as a network would")
    checkpoint_every: Annotated[int, Field(ge=0, lt=MOST)] | None = setting(
        "Results",
        None,
        "rounds between checkpoints in the result folder; 0 is never (default: as often as "
        "takes about a tenth of the run's time)",
    )
    tracker: str | None = setting(
        "Results",
        None,
        "who is told of every round: tensorboard, tensorboard=DIR, mlflow or mlflow=URI",
    )
    out: str | None = setting("Results", None, "result folder (default: a new one in runs)")


def make_config(values: Mapping[str, Any], *, source: str = "options") -> RunConfig:
    """Return a checked `RunConfig`.

    Raises:
        ConfigError: an unknown key (names the nearest), or a value out of range.
    """
    if SCORED_ON_RECEIPT in values:
        if values[SCORED_ON_RECEIPT]:
            line = "%s is no option any more: models are scored so by default; leave it out"
            LOG.warning(line, SCORED_ON_RECEIPT)
        values = {name: value for name, value in values.items() if name != SCORED_ON_RECEIPT}
    values = {
        name: os.fspath(value) if isinstance(value, os.PathLike) else value
        for name, value in values.items()
    }
    hint = "; options of a method or another part stand under options"
    return checked(RunConfig, values, source, hint)


def checked(kind: type[T], values: Mapping[str, Any], source: str, hint: str = "") -> T:
    """Return `kind(**values)`, with pydantic's errors in one line.

    The hint ends the error of an unknown key.

    Raises:
        ConfigError: an unknown key (names the nearest), or a value out of range.
    """
    names = [f.name for f in dataclasses.fields(kind)]  # type: ignore[arg-type]
    for name in values:
        if name not in names:
            if not names:
                raise ConfigError(
                    f"expected no options in {source}, got {name!r}",
                    **mistake("unknown-name", f"key in {source}", name, None, []),
                )
            what = "option" if source == "options" else f"key in {source}"
            error = unknown(what, name, names)
            raise (
                error
                if str(error).endswith("?")
                else reword_error(error, f"{error}{hint}", ConfigError)
            )
    try:
        return cast(T, _validator(cast(Any, kind)).validate_python(dict(values)))
    except ValidationError as error:
        first = error.errors()[0]
        loc = [str(part) for part in first["loc"] if isinstance(part, str)]
        reason = first["msg"][0].lower() + COMMENT.sub("", first["msg"][1:])
        if loc[:1] == ["options"] and len(loc) > 1:
            # pydantic complains about the first type of a union only.
            loc, reason = loc[:2], "expected a finite number, a bool or a string"
        where = ".".join(loc) or source
        source_hint = "" if source == "options" else f" ({source})"
        raise ConfigError(
            f"{where}: {reason}, got {short_repr(first['input'])}{source_hint}",
            **mistake("option-value", where, first["input"]),
        ) from None


@lru_cache(maxsize=256)
def _validator(kind: type) -> TypeAdapter[Any]:
    """Return what makes values of a class. To make it takes longer than to use it."""
    return TypeAdapter(kind)


# --- Changes of a config, as a flag over a run file makes them -----------------------------------


def changed_values(config: RunConfig, changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a config, updated by changes.

    Options of a part that is replaced are removed, and so is an option that the changes give under
    another form of its name (NAME or PART.NAME).
    """
    replaced = {kind for kind in changes if changes[kind] != getattr(config, kind, None)}
    unchanged = {
        f.name: getattr(config, f.name)
        for f in dataclasses.fields(config)
        if f.metadata.get("part") not in replaced and getattr(config, f.name) is not None
    }
    options = {n: v for n, v in config.options.items() if n.partition(".")[0] not in replaced}
    return unchanged | {"options": not_said_again(options, in_full(changes))} | dict(changes)


def in_full(keys: Collection[str]) -> list[str]:
    """Return as PART.NAME those keys of a config that are options of a part."""
    own = (f for f in dataclasses.fields(RunConfig) if f.name in keys and "part" in f.metadata)
    return [f"{f.metadata['part']}.{f.name}" for f in own]


def not_said_again(options: Mapping[str, Scalar], names: Collection[str]) -> dict[str, Scalar]:
    """Return the options that are not among names, each NAME or PART.NAME."""
    return {
        own: value
        for own, value in options.items()
        if not any(_is_same_option(own, name) for name in names)
    }


def _is_same_option(one: str, other: str) -> bool:
    """Whether two names, each with a part or without, can be of one option."""
    (kind, _, name), (kind2, _, name2) = one.rpartition("."), other.rpartition(".")
    return name == name2 and (kind == kind2 or not kind or not kind2)


# --- Options that nothing reads because of what another option of the same part says -------------
#
# The metadata of a field declares it: `"read_if": {"nodes": ("random", "importance")}` is an
# option that is read where `nodes` has one of these values, and for several others where all do.


def unread(options: type, explicit: Mapping[str, Any]) -> set[str]:
    """Return the names of options that nothing reads.

    Args:
        options: dataclass of a part's options.
        explicit: values of some of them; the others have their defaults.
    """
    values = {f.name: explicit.get(f.name, f.default) for f in dataclasses.fields(options)}
    return {
        f.name for f in dataclasses.fields(options) if _find_blocking_option(f, values) is not None
    }


def check_read(options: Any, kind: str, what: str) -> None:
    """Raise `ConfigError` for a value that nothing reads, unless it is the default.

    Args:
        options: of a part, checked.
        kind: of the part, such as method.
        what: its name.
    """
    values = {f.name: getattr(options, f.name) for f in dataclasses.fields(options)}
    for f in dataclasses.fields(options):
        other = _find_blocking_option(f, values)
        if other is not None and values[f.name] != f.default:
            *more, last = map(_text, f.metadata["read_if"][other])
            values_that_read = f"{', '.join(more)} or {last}" if more else last
            raise ConfigError(
                f"option {kind}.{f.name}: {what} does not read it with "
                f"{other}={_text(values[other])}, got {values[f.name]}: leave it out, "
                f"or give {other}={values_that_read}",
                **mistake("unread-option", f"{kind}.{f.name}", what),
            )


def _find_blocking_option(field: "dataclasses.Field[Any]", values: Mapping[str, Any]) -> str | None:
    """Return the other option because of which a field has no effect; None if it is read.

    Values may be texts, as users write them.
    """
    conditions: Mapping[str, tuple[object, ...]] = field.metadata.get("read_if", {})
    texts_by_option = {
        other: {_text(value) for value in options} for other, options in conditions.items()
    }
    return next(
        (other for other, texts in texts_by_option.items() if _text(values[other]) not in texts),
        None,
    )


def _text(value: object) -> str:
    """Return a value in the form in which users write it."""
    return str(value).lower()


# --- Signatures that say each keyword, for `help` and for completion in notebooks -----------------


F = TypeVar("F", bound=Callable[..., Any])
FIELDS = {f.name: f for f in fields(RunConfig)}


def with_keywords(options: type) -> Callable[[F], F]:
    """Return a decorator that spells `**options: Unpack[options]` out in a function's signature.

    Type checkers read the annotation; `inspect.signature` would tell people its name alone.

    Args:
        options: a TypedDict whose keys are fields of `RunConfig`, with its defaults.
    """
    spelled = [_keyword(name, kind) for name, kind in get_type_hints(options).items()]

    def spell_out(function: F) -> F:
        signature = inspect.signature(function)
        own = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
        new_signature = signature.replace(parameters=[*own, *spelled])
        function.__signature__ = new_signature  # type: ignore[attr-defined]
        return function

    return spell_out


def _keyword(name: str, kind: Any) -> inspect.Parameter:
    default = FIELDS[name].default
    return inspect.Parameter(
        name,
        inspect.Parameter.KEYWORD_ONLY,
        default={} if default is MISSING else default,
        annotation=kind,
    )
