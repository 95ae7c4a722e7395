"""`RunConfig`: one frozen dataclass behind Python keywords, TOML keys and command-line flags.

A field `local_epochs` is the keyword `local_epochs`, the TOML key `local_epochs` and the flag
`--local-epochs`. Options that belong to one method stand under `[options]` in TOML, in
`options={...}` in Python, and in `--option NAME=VALUE` on the command line.
"""

import dataclasses
import tomllib
from collections.abc import Mapping
from dataclasses import field
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BeforeValidator, ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from silograph.core.byte_size import parse_bytes
from silograph.core.errors import ConfigError, unknown
from silograph.core.ranges import Range, choice, lin, log
from silograph.core.ranges import Scalar as Scalar
from silograph.core.text import shown

T = TypeVar("T")
STRICT = ConfigDict(extra="forbid", allow_inf_nan=False)
Seed = Annotated[int, Field(ge=0, lt=2**63)]
MOST = 2**63  # of what is counted: torch and numpy have no larger numbers
Count = Annotated[int, Field(ge=1, lt=MOST)]


def option(help: str, group: str, *, off: str = "", tune: Range | None = None) -> dict[str, Any]:
    """Return the metadata of a field: help, panel, the flag that says no, what tuning tries."""
    return {"help": help, "group": group, "off": off, "tune": tune}


@dataclass(frozen=True, config=STRICT, kw_only=True)
class RunConfig:
    """Everything that decides a run; the help texts are the documentation of the fields."""

    dataset: str = field(
        default="digits", metadata=option("name of a dataset, or a path to its file", "Data")
    )
    data_dir: str | None = field(
        default=None, metadata=option("folder in which datasets are looked for first", "Data")
    )
    columns: str | None = field(
        default=None,
        metadata=option(
            "columns of CSV tables by their names there: id=key,label=kind,silo=bank,source=from,"
            "target=to; several labels: label=red+blue",
            "Data",
        ),
    )
    scale: Annotated[float, Field(gt=0)] = field(
        default=1.0,
        metadata=option("factor of nodes and edges, of a generated dataset only", "Data"),
    )
    largest_component: bool = field(
        default=False,
        metadata=option(
            "keep only the largest connected component", "Data", off="--all-components"
        ),
    )
    features: Literal["given", "degree", "constant", "onehot-degree"] = field(
        default="given",
        metadata=option(
            "features of nodes: those of the data, or made of what each silo knows", "Data"
        ),
    )
    normalize: Literal["none", "row"] = field(
        default="none",
        metadata=option("what is done to features (row: divide by their sum)", "Data"),
    )
    split: str = field(
        default="0.2/0.4/0.4",
        metadata=option(
            "train/val/test shares in each client; public; full (public, all others train)", "Data"
        ),
    )
    partition: str = field(
        default="metis",
        metadata=option(
            "how to cut: metis, louvain, random, dirichlet, class_biased, silo, with overlap "
            "metis_overlapping or shares, or FILE.csv with columns node and client",
            "Clients",
        ),
    )
    clients: Count | None = field(
        default=None,
        metadata=option("number of clients (default: 10; silo: as many as silos)", "Clients"),
    )
    alpha: Annotated[float, Field(gt=0)] = field(
        default=0.5, metadata=option("Dirichlet concentration, smaller is more skewed", "Clients")
    )
    favored_classes: Count | None = field(
        default=None,
        metadata=option(
            "class_biased: classes favored at each client (default: 2; 1 of two classes)", "Clients"
        ),
    )
    favor: Annotated[float, Field(ge=1)] = field(
        default=10.0, metadata=option("class_biased: how many times as likely they are", "Clients")
    )
    clients_per_part: Count = field(
        default=5, metadata=option("metis_overlapping: clients drawn from each part", "Clients")
    )
    part_share: Annotated[float, Field(gt=0, le=1)] = field(
        default=0.5,
        metadata=option("metis_overlapping: share of a part's nodes that each gets", "Clients"),
    )
    share_mean: Annotated[float, Field(gt=0, le=1)] = field(
        default=0.8, metadata=option("shares: mean share of all nodes at a client", "Clients")
    )
    share_variance: Annotated[float, Field(ge=0)] = field(
        default=0.1, metadata=option("shares: variance of that share", "Clients")
    )
    drop_edges: Annotated[float, Field(ge=0, le=1)] = field(
        default=0.0,
        metadata=option("share of a client's internal edges dropped, in any cut", "Clients"),
    )
    participation: Annotated[float, Field(gt=0, le=1)] = field(
        default=1.0,
        metadata=option("uniform: share of clients that train in a round", "Clients"),
    )
    selector: str = field(
        default="uniform",
        metadata=option(
            "which clients train in a round: all, uniform (a share of them, see participation) or "
            "round_robin (in turn; --option selector.clients=N); its own options are "
            "selector.NAME",
            "Clients",
        ),
    )
    model: str = field(
        default="gcn",
        metadata=option(
            "layers: gcn, sage, graphconv, gin, gat, appnp or mlp; or a torch.nn.Module of your "
            "own: FILE.py:NAME or package.module:NAME",
            "Model",
        ),
    )
    layers: Count = field(default=2, metadata=option("number of layers with weights", "Model"))
    hidden: Count = field(
        default=128,
        metadata=option("width of the hidden layers", "Model", tune=choice(32, 64, 128, 256)),
    )
    dropout: Annotated[float, Field(ge=0, lt=1)] = field(
        default=0.5,
        metadata=option("share of hidden activations dropped", "Model", tune=lin(0.0, 0.8)),
    )
    residual: bool = field(
        default=False,
        metadata=option("add a hidden layer's input to its output (from 3 layers on)", "Model"),
    )
    heads: Count | None = field(
        default=None, metadata=option("attention heads of gat (default: 8)", "Model")
    )
    hops: Count | None = field(
        default=None, metadata=option("propagation steps of appnp (default: 10)", "Model")
    )
    teleport: Annotated[float, Field(ge=0, le=1)] | None = field(
        default=None,
        metadata=option("share of the prediction kept in a step of appnp (default: 0.1)", "Model"),
    )
    method: str = field(
        default="fedopt",
        metadata=option(
            "what trains: fedopt, fedavg, fedprox, fedper, scaffold, llcg, label_guided, bns, "
            "cagnet, local, centralized or graphsaint",
            "Training",
        ),
    )
    options: Mapping[str, Scalar] = field(
        default_factory=dict,
        metadata=option(
            "an option of the method, NAME=VALUE, of the neighbor sampler, "
            "neighbors.NAME=VALUE, or of the selector, selector.NAME=VALUE (repeatable)",
            "Training",
        ),
    )
    rounds: Annotated[int, Field(ge=1, lt=2**31)] = field(
        default=100, metadata=option("number of rounds", "Training")
    )
    local_epochs: Count = field(
        default=1,
        metadata=option("passes of a client over its nodes in a round", "Training", tune=lin(1, 5)),
    )
    collect: Annotated[float, Field(ge=0, le=1)] = field(
        default=0.0,
        metadata=option(
            "share of neighbors in other silos whose features each client fetches before training "
            "(features leave their silo)",
            "Training",
        ),
    )
    batch_size: Count | None = field(
        default=None,
        metadata=option("training nodes in a local step (default: all of a client)", "Training"),
    )
    fanout: str | None = field(
        default=None,
        metadata=option("neighbors drawn of a node, hop by hop: 10,5 (default: all)", "Training"),
    )
    neighbors: str | None = field(
        default=None,
        metadata=option(
            "what draws the neighbors that a local step sums over: full, fanout or bernoulli "
            "(default: fanout if that is given, else full); torch draws what is not compiled",
            "Training",
        ),
    )
    optimizer: Literal["adam", "sgd"] | None = field(
        default=None,
        metadata=option(
            "the clients' optimizer (default: sgd for fedopt and scaffold, else adam)", "Training"
        ),
    )
    lr: Annotated[float, Field(gt=0)] | None = field(
        default=None,
        metadata=option(
            "the clients' learning rate (default: sgd 0.1, adam 0.01)",
            "Training",
            tune=log(1e-3, 1.0),
        ),
    )
    weight_decay: Annotated[float, Field(ge=0)] = field(
        default=5e-4,
        metadata=option("L2 penalty added to the gradient", "Training", tune=log(1e-6, 1e-2)),
    )
    momentum: Annotated[float, Field(ge=0, lt=1)] = field(
        default=0.0, metadata=option("momentum of the clients' sgd", "Training")
    )
    keep_optimizer: bool | None = field(
        default=None,
        metadata=option("keep optimizer state between rounds (default: by method)", "Training"),
    )
    metric: str | None = field(
        default=None,
        metadata=option(
            "the score that picks the best round, stops by patience, is tuned, compared and shown "
            "first (default: accuracy; f1_micro for label sets, rmse for numbers)",
            "Results",
        ),
    )
    patience: Count | None = field(
        default=None,
        metadata=option("stop after this many rounds without better validation", "Stopping"),
    )
    target: str | None = field(
        default=None,
        metadata=option(
            "stop at a validation score: METRIC=VALUE, or a value of the run's metric", "Stopping"
        ),
    )
    max_bytes: Annotated[Annotated[int, Field(ge=1)] | None, BeforeValidator(parse_bytes)] = field(
        default=None,
        metadata=option("stop when this much has been exchanged in all, e.g. 10MB", "Stopping"),
    )
    max_seconds: Annotated[float, Field(gt=0)] | None = field(
        default=None, metadata=option("stop after this many seconds of training", "Stopping")
    )
    eval_every: Count = field(default=1, metadata=option("rounds between evaluations", "Training"))
    local_bias: bool = field(
        default=False,
        metadata=option(
            "train a centralized model from the same weights, too, and tell how far logits are "
            "from its (simulation only)",
            "Results",
        ),
    )
    seed: Seed = field(default=0, metadata=option("seed of training and of the others", "Seeds"))
    partition_seed: Seed | None = field(
        default=None, metadata=option("seed of the cut (default: seed)", "Seeds")
    )
    split_seed: Seed | None = field(
        default=None, metadata=option("seed of train/val/test (default: seed)", "Seeds")
    )
    init_seed: Seed | None = field(
        default=None, metadata=option("seed of the initial weights (default: seed)", "Seeds")
    )
    dtype: Literal["float32", "float64"] = field(
        default="float32", metadata=option("precision of training", "Machine")
    )
    device: str = field(default="cpu", metadata=option("torch device", "Machine"))
    threads: Count = field(
        default=1, metadata=option("torch threads; part of what makes runs equal", "Machine")
    )
    kernels: Literal["auto", "compiled", "torch"] = field(
        default="auto",
        metadata=option("compiled needs a CPU and numba; auto takes it if it can", "Machine"),
    )
    block_size: Count | None = field(
        default=None,
        metadata=option("most clients in one computation (default: by memory)", "Machine"),
    )
    strict: bool = field(
        default=False,
        metadata=option("encode and decode every message, as a network would", "Machine"),
    )
    checkpoint_every: Annotated[int, Field(ge=0, lt=MOST)] = field(
        default=1,
        metadata=option("rounds between checkpoints in the result folder; 0 is never", "Results"),
    )
    tracker: str | None = field(
        default=None,
        metadata=option(
            "who is told of every round: tensorboard, tensorboard=DIR, mlflow or mlflow=URI",
            "Results",
        ),
    )
    out: str | None = field(
        default=None,
        metadata=option("result folder (default: runs/DATASET-METHOD-TIME)", "Results"),
    )


def make_config(values: Mapping[str, Any], *, source: str = "options") -> RunConfig:
    """Return a checked `RunConfig`.

    Raises:
        ConfigError: an unknown key (names the nearest), or a value out of range.
    """
    hint = "; options of a method stand under options"
    return checked(RunConfig, values, source, hint)


def checked(kind: type[T], values: Mapping[str, Any], source: str, hint: str = "") -> T:
    """Return `kind(**values)`, with pydantic's complaints turned into one line.

    The hint ends the error of an unknown key.

    Raises:
        ConfigError: an unknown key (names the nearest), or a value out of range.
    """
    names = [f.name for f in dataclasses.fields(kind)]  # type: ignore[arg-type]
    for name in values:
        if name not in names:
            if not names:
                raise ConfigError(f"expected no options in {source}, got {name!r}")
            raise ConfigError(f"{unknown(f'key in {source}', name, names)}{hint}")
    try:
        return TypeAdapter(kind).validate_python(dict(values))
    except ValidationError as error:
        first = error.errors()[0]
        loc = [str(part) for part in first["loc"] if isinstance(part, str)]
        reason = first["msg"][0].lower() + first["msg"][1:]
        if loc[:1] == ["options"] and len(loc) > 1:
            # pydantic complains about the first type of a union only.
            loc, reason = loc[:2], "expected a finite number, a bool or a string"
        where = ".".join(loc) or source
        raise ConfigError(f"{where}: {reason}, got {shown(first['input'])} ({source})") from None


def resolve_seeds(config: RunConfig) -> RunConfig:
    """Return the config with every seed written out."""
    seed = config.seed
    return dataclasses.replace(
        config,
        partition_seed=seed if config.partition_seed is None else config.partition_seed,
        split_seed=seed if config.split_seed is None else config.split_seed,
        init_seed=seed if config.init_seed is None else config.init_seed,
    )


def read_toml(path: str | Path) -> dict[str, Any]:
    """Return the keys of a run file.

    Raises:
        ConfigError: the file is missing or is not TOML.
    """
    try:
        return tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"expected a run file at {path}, got: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"expected TOML in {path}, got: {error}") from None


def write_toml(config: RunConfig) -> str:
    """Return the run file that reads back as this config; keys left to their default stand too."""
    lines = []
    for f in dataclasses.fields(config):
        value = getattr(config, f.name)
        if f.name != "options" and value is not None:
            lines.append(f"{f.name} = {toml_value(value)}")
    lines += [
        "",
        "[options]",
        *(f"{toml_value(k)} = {toml_value(v)}" for k, v in config.options.items()),
    ]
    return "\n".join(lines) + "\n"


def toml_value(value: Scalar) -> str:
    """Return a value as TOML writes it."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        return repr(value)
    escaped = value.replace("\\", "\\\\").replace('"', '\\"')
    return '"' + "".join(c if c.isprintable() else f"\\U{ord(c):08x}" for c in escaped) + '"'


def parse_option(text: str) -> tuple[str, Scalar]:
    """Return name and value of `NAME=VALUE`; the value is read as TOML, else as a string.

    >>> parse_option("server_lr=0.5"), parse_option("server_optimizer=adam")
    (('server_lr', 0.5), ('server_optimizer', 'adam'))

    Raises:
        ConfigError: there is no `=`.
    """
    name, equals, value = text.partition("=")
    if not equals or not name.strip():
        raise ConfigError(f"expected --option NAME=VALUE, got {text!r}")
    try:
        parsed = tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        parsed = value
    return name.strip().replace("-", "_"), parsed if isinstance(parsed, Scalar) else value
