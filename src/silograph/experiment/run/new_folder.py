"""A new result folder: where it may be, and what is written before the first round."""

import json
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from silograph.core.config import RunConfig
from silograph.core.errors import ConfigError
from silograph.core.files import write_atomic
from silograph.core.resolved_config import asked_again
from silograph.core.run_file import write_toml
from silograph.core.text import in_path
from silograph.experiment.checksums import digest_of, write_sums
from silograph.experiment.resolve.parts import find_method, given_values, left_open, option_help
from silograph.experiment.resolve.trusted_code import code_digests
from silograph.experiment.result_files import (
    ABOUT,
    CLIENTS,
    CONFIG,
    FORMAT,
    SIMULATION,
    to_csv,
)
from silograph.experiment.run.round_scores import metrics_of
from silograph.experiment.run.setup import Setup, versions
from silograph.experiment.run.snapshot import identity
from silograph.graph.graph import Graph
from silograph.graph.measure.statistics import CutStatistics, describe
from silograph.graph.source import Source
from silograph.methods.base import seen_by

SOURCE = {"data_dir", "dataset"}  # what run.json says of data that can be read again


def default_folder(config: RunConfig, what: str | None = None) -> str:
    """Return runs/DATASET-METHOD-TIME, with a number behind it if that exists.

    Args:
        config: of the run.
        what: stands in place of the method; None: the method's own name.

    Raises:
        ConfigError: unknown method, or one that cannot be imported.
    """
    name = find_method(config).name if what is None else what
    dataset = Path(os.path.abspath(config.dataset)).stem
    now = time.time()
    stamp = f"{time.strftime('%Y%m%d-%H%M%S', time.localtime(now))}-{int(now * 1000) % 1000:03d}"
    base = f"runs/{dataset}-{in_path(name)}-{stamp}"
    found, number = base, 2
    while os.path.lexists(found):
        found, number = f"{base}-{number}", number + 1
    return found


def check_free(path: str) -> None:
    """Raise `ConfigError` if a result folder could not be made at `path`."""
    if not path or "\0" in path:
        raise ConfigError(f"expected the path of a result folder, got {path!r}")
    if os.path.lexists(path):
        raise ConfigError(
            f"expected a result folder that does not exist yet, got {path}: choose another --out, "
            "nothing was overwritten"
        )


def write_start(folder: Path, setup: Setup, asked: RunConfig, source: Source | None) -> None:
    """Write what is known before the first round."""
    again = asked_again(replace(setup.config, out=None))
    chosen = left_open(asked, setup.parts)
    if again.edge_weights != asked.edge_weights:  # the model has no place for them; another may
        chosen.add("edge_weights")
    write_atomic(folder / CONFIG, write_toml(again, chosen))
    given = given_values(replace(asked, out=None), setup.parts)
    method, cut = setup.method, setup.simulated
    about: dict[str, Any] = {
        "format": FORMAT,
        "versions": versions(),
        "source": None if source is None else source.told(),
        "same": identity(setup),
        "code": code_digests(setup.config),
        "model": setup.method_config.model.described(),
        "metrics": list(metrics_of(setup)),
        "given": given,
        "config": {k: v for k, v in vars(setup.config).items() if k != "out"},
        "help": option_help(setup.parts),
        "method": {
            "name": method.name,
            "title": method.title,
            "reference": method.reference,
            "judge": method.evaluate.view,
            "seen": seen_by(method, setup.config),
            "held": method.setting.held(setup.method_config.options),
        },
        "simulated": cut is not None,
        "partition_hash": setup.partition_hash,
        "dataset": _dataset(setup),
    }
    write_atomic(folder / ABOUT, json.dumps(about, indent=2) + "\n")
    if cut is None:
        rows: Sequence[Mapping[str, Any]] = [{"client": name} for name in setup.federation.ids]
    else:
        figures = describe(cut.graph, cut.partition, copies=cut.copies_split)
        rows, known = figures.client_rows(), _simulated(figures, cut.graph)
        write_atomic(folder / SIMULATION, json.dumps(known) + "\n")
    write_atomic(folder / CLIENTS, to_csv(rows))
    files = [name for name in (CONFIG, ABOUT, SIMULATION, CLIENTS) if (folder / name).exists()]
    sums = {name: [digest_of(folder / name)] for name in files}
    write_sums(folder, sums)


def _dataset(setup: Setup) -> dict[str, Any]:
    """Return what is known of the graph: of one that silos hold, not how large it is."""
    sizes = {"features": setup.schema.num_features, "classes": setup.schema.num_classes}
    if setup.simulated is None:
        return {"name": setup.config.dataset, **sizes}
    graph = setup.cut.graph
    sizes |= {"nodes": graph.num_nodes, "edges": graph.num_edges, **graph.rating_sizes}
    weights = {} if setup.edge_weights is None else {"edge_weights": setup.edge_weights}
    return {"name": graph.name, **sizes, **weights}


def _class_names(graph: Graph) -> Sequence[str]:
    """Return names of the classes that label counts are of; none where labels are numbers."""
    if graph.has_numbers:
        return ()
    return graph.class_names or [str(k) for k in range(graph.num_classes)]


def _simulated(figures: CutStatistics, graph: Graph) -> dict[str, Any]:
    """Return what the experiment knows of the cut because it made it; training reads none of it."""
    return {
        "note": "Known in a simulation only: silos would not tell label counts or edges.",
        **figures.totals(),
        "classes": _class_names(graph),
        "labels": figures.labels.tolist(),
        "between": None if figures.between is None else figures.between.tolist(),
    }
