"""What a silo holds a server's config to before it agrees to a run."""

import json
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

from torch import Tensor

from silograph.core.config import RunConfig
from silograph.core.errors import ConfigError
from silograph.core.resolved_config import ResolvedConfig, resolved_values
from silograph.core.text import shown
from silograph.core.widths import hidden_widths
from silograph.experiment.resolve.parts import Parts
from silograph.graph.silos.data import Silo

# What a server may ask a silo for, so that no config can hold it up or fill its memory.
MOST = {"threads": 256, "layers": 1000, "local_epochs": 10_000, "rounds": 1_000_000}
MOST_OF_PARTS = {
    "model.hops": 1000,
    "model.heads": 1000,
    "model.embedding": 4096,
    "neighbors.width": 4096,
    "method.communities": 1000,
    "method.most": 20,  # rows that FedSage+ generates for a node, in states and checkpoints
    "method.generator_width": 1024,
}
MOST_WEIGHTS = 2**28
MOST_IN_TABLES = 2**30  # numbers of embeddings of a silo's own users and items
MOST_STEPS = 100_000  # of a silo in a round
PRIVATE = (
    "out",
    "tracker",
    "data_dir",
    "dataset",
    "columns",
    "na_values",
    "rating_scale",
)  # of the server's config; silos need none

OWN = (*PRIVATE, "options", "device", "block_size")  # that a silo sets, or reads apart


def check_whole(told: Mapping[str, Any], config: ResolvedConfig) -> None:
    """Raise `ConfigError` for a server's config that leaves a default or a reading to the silo.

    Both ends, and whoever reads what a silo agreed to, must mean the same by it.
    """
    mine = resolved_values(config)
    missing = [name for name in _left_out(told, mine) if name not in (*PRIVATE, "block_size")]
    missing += _left_out(told.get("options", {}), mine["options"])
    if missing:
        raise ConfigError(
            f"expected a server's config with every default written out, got none of {missing[0]}"
        )
    _check_read_alike({k: v for k, v in told.items() if k not in OWN}, mine)
    _check_read_alike(told.get("options", {}), mine["options"])


def _check_read_alike(told: Mapping[str, Any], mine: Mapping[str, Any]) -> None:
    """Raise `ConfigError` for a value that the silo reads as another one, as 2.0 for rounds."""
    for name, value in told.items():
        got, used = (json.dumps(each) for each in (value, mine.get(name)))
        if got != used:  # as texts: 2.0 and true are no 2 and 1 there
            raise ConfigError(f"expected {name} as it is used, {used}, got {shown(value)} (server)")


def _left_out(told: Mapping[str, Any], mine: Mapping[str, Any]) -> list[str]:
    """Return what is not told, or told as null where a silo has a value for that."""
    absent = [name for name in mine if name not in told]
    return absent + [n for n, v in mine.items() if n in told and told[n] is None and v is not None]


def batches_of(config: RunConfig, options: Mapping[str, Any], silo: Silo) -> int:
    """Return how many batches a local epoch has at most, by the number of batches or their size."""
    found = options.get("method.batches")
    batches = found if isinstance(found, int) else 1
    if config.batch_size is not None:
        batches = max(batches, -(-len(silo.graph.y) // config.batch_size))
    return batches


def check_size(config: RunConfig, parts: Parts, silo: Silo) -> None:
    """Raise `ConfigError` for a run that is larger than a silo does for a server."""
    options, fields = parts.options, vars(config)
    for name, most in (MOST | MOST_OF_PARTS).items():
        found = options.get(name, fields.get(name))
        if isinstance(found, int) and found > most:
            shown = name.rpartition(".")[2]
            raise ConfigError(f"expected {shown} of at most {most} at a silo, got {found}")
    steps = (config.local_epochs or 1) * batches_of(config, options, silo)
    if steps > MOST_STEPS:
        raise ConfigError(
            f"expected at most {MOST_STEPS:,} steps of a round at a silo, got {steps:,}: take "
            "fewer local epochs, or fewer or larger batches"
        )
    hidden = hidden_widths(config.hidden, config.layers)
    widths = silo.graph.num_features, *hidden, silo.num_classes
    size = sum(inputs * outputs for inputs, outputs in pairwise(widths))
    if size * int(options.get("model.heads") or 1) > MOST_WEIGHTS:
        raise ConfigError(
            f"expected a model of at most {MOST_WEIGHTS:,} weights at a silo, got about {size:,}: "
            "take a smaller hidden width, or fewer layers"
        )
    _check_embeddings(int(options.get("model.embedding") or 0), options, silo)


def _check_embeddings(width: int, options: Mapping[str, Any], silo: Silo) -> None:
    """Raise `ConfigError` for rows of items, or embeddings of ratings, that fill the memory."""
    shared = int(options.get("model.items") or 0) * (width + 1)
    if shared > MOST_WEIGHTS:
        raise ConfigError(
            f"expected a table of items of at most {MOST_WEIGHTS:,} weights at a silo, got "
            f"{shared:,}: take fewer items (rows), or a smaller embedding"
        )
    if width and isinstance(silo.graph.x, Tensor):
        kept = width * int((silo.graph.x > 0).sum())  # a row for each user and item
        if kept > MOST_IN_TABLES:
            raise ConfigError(
                f"expected embeddings of at most {MOST_IN_TABLES:,} numbers at a silo, got more: "
                "take a smaller embedding"
            )
