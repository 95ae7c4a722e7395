"""`ResolvedConfig`: a run with every default written out, in contrast to `RunConfig`."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from silograph.core.config import RunConfig, make_config
from silograph.core.key import Key
from silograph.core.setting_values import Scalar


@dataclass(frozen=True, kw_only=True)
class ResolvedConfig:
    """The complete settings of a run; fields have the meaning that they have in `RunConfig`.

    A field that is None is off: no limit, all nodes in a step, nothing written.

    Attributes:
        options: of all chosen parts as `PART.NAME`, defaults written out; for None see the
            option's help.
        block_size: None until the clients' blocks are known.
    """

    dataset: str
    data_dir: str | None
    columns: str | None
    na_values: str | None
    scale: float
    rating_scale: str | None
    largest_component: bool
    features: Literal["given", "degree", "constant", "onehot-degree"]
    normalize: Literal["none", "row", "standard", "standard_client"]
    feature_drift: bool
    edge_weights: Literal["log", "scale", "use", "ignore"]
    repeated_edges: Literal["mean", "sum", "count", "last", "first"] | None
    directed: Literal["none", "along", "against", "both"]
    split: str
    partition: str
    clients: int
    drop_edges: float
    selector: str
    model: str
    layers: int
    hidden: int | str
    dropout: float
    method: str
    aggregator: str
    server_optimizer: str
    options: Mapping[str, Scalar | None]
    rounds: int
    local_epochs: int
    collect: float
    min_nodes_per_row: int
    min_silos_per_row: int
    batch_size: int | None
    neighbors: str
    optimizer: Literal["adam", "sgd"]
    lr: float
    lr_schedule: str
    warmup_rounds: int
    weight_decay: float
    decay_layers: Literal["all", "first"]
    momentum: float
    keep_optimizer: bool
    class_weight: str | None
    weights_as: Literal["exact", "float16", "int8", "int4"]
    weight_rows: Literal["all", "used"]
    secure_aggregation: bool
    dp_epsilon: float | None
    dp_delta: float | None
    dp_unit: Literal["silo", "node"] | None
    dp_clip: float | None
    dp_clip_quantile: float | None
    dp_degree: int | None
    metric: str
    positive: str | None
    threshold: str | None
    relevant: float | None
    patience: int | None
    target: str | None
    max_bytes: int | None
    max_seconds: float | None
    speeds: str | None
    links: str | None
    max_virtual_seconds: float | None
    eval_every: int
    evaluate_clients: Literal["all", "participants"]
    evaluation_min_count: int
    local_bias: bool
    seed: int
    partition_seed: int
    split_seed: int
    init_seed: int
    dtype: Literal["float32", "float64"]
    device: str
    threads: int
    kernels: Literal["compiled", "torch"]
    block_size: int | None
    engine: Literal["local", "ray"]
    workers: int | str | None
    address: str | None
    keep_every: int | None
    strict: bool
    checkpoint_every: int | None
    tracker: str | None
    out: str | None


def training_key(config: ResolvedConfig) -> Key:
    """Return the key of everything random in training."""
    return Key.of(config.seed).fold("training")


def resolved_values(config: ResolvedConfig) -> dict[str, Any]:
    """Return the keys and values of the run file of a resolved config, without None."""
    options = {name: value for name, value in config.options.items() if value is not None}
    values = {f.name: getattr(config, f.name) for f in dataclasses.fields(config)}
    return {k: v for k, v in values.items() if v is not None} | {"options": options}


def to_run_config(config: ResolvedConfig) -> RunConfig:
    """Return a `RunConfig` with all resolved values; it resolves to the same config again."""
    return make_config(resolved_values(config), source="a resolved config")
