"""silograph: graph neural networks over graphs that live in separate silos.

>>> import silograph as sg
>>> graph = sg.load("digits")
>>> graph.num_nodes, graph.num_classes
(1797, 10)

Names are imported on first use, so that `import silograph` itself costs nothing.
"""

import importlib

TYPE_CHECKING = False  # as in typing, which the program would wait for before it handles Ctrl-C

if TYPE_CHECKING:
    from silograph.core.config import RunConfig
    from silograph.core.errors import (
        CheckpointError,
        ConfigError,
        DataError,
        FrameError,
        PartitionError,
        ProtocolError,
        SilographError,
        TrainingError,
    )
    from silograph.experiment.run.result import Result
    from silograph.experiment.run.run import resume, run
    from silograph.experiment.run.shard import shard
    from silograph.experiment.run.trained_model import TrainedModel, load_model
    from silograph.graph.datasets import load
    from silograph.graph.generated import generate
    from silograph.graph.graph import Graph, Split
    from silograph.graph.partition.partition import Partition, make_partition
    from silograph.graph.read.arrays import from_arrays
    from silograph.graph.read.csv import from_csv
    from silograph.graph.read.in_memory import from_networkx, from_pyg
    from silograph.graph.read.ratings import ratings
    from silograph.graph.silos.categories import count_categories, join_categories
    from silograph.graph.silos.data import Silo, Silos
    from silograph.graph.silos.export import write_silos
    from silograph.graph.silos.guess_schema import guess_schema
    from silograph.graph.silos.prepare import prepare
    from silograph.graph.silos.read import read_silo, read_silos
    from silograph.study.compare import compare
    from silograph.study.comparison import Comparison
    from silograph.study.tune import Tuned, tune

_HOME = {
    "RunConfig": "core.config",
    "SilographError": "core.errors",
    "CheckpointError": "core.errors",
    "FrameError": "core.errors",
    "TrainingError": "core.errors",
    "ConfigError": "core.errors",
    "DataError": "core.errors",
    "PartitionError": "core.errors",
    "ProtocolError": "core.errors",
    "Graph": "graph.graph",
    "Split": "graph.graph",
    "Partition": "graph.partition.partition",
    "make_partition": "graph.partition.partition",
    "load": "graph.datasets",
    "from_arrays": "graph.read.arrays",
    "from_networkx": "graph.read.in_memory",
    "from_pyg": "graph.read.in_memory",
    "from_csv": "graph.read.csv",
    "ratings": "graph.read.ratings",
    "generate": "graph.generated",
    "Silo": "graph.silos.data",
    "Silos": "graph.silos.data",
    "read_silo": "graph.silos.read",
    "read_silos": "graph.silos.read",
    "write_silos": "graph.silos.export",
    "prepare": "graph.silos.prepare",
    "count_categories": "graph.silos.categories",
    "join_categories": "graph.silos.categories",
    "guess_schema": "graph.silos.guess_schema",
    "compare": "study.compare",
    "Comparison": "study.comparison",
    "tune": "study.tune",
    "Tuned": "study.tune",
    "run": "experiment.run.run",
    "resume": "experiment.run.run",
    "shard": "experiment.run.shard",
    "TrainedModel": "experiment.run.trained_model",
    "load_model": "experiment.run.trained_model",
    "Result": "experiment.run.result",
}

__version__ = "0.1.0"
__all__ = [
    "CheckpointError",
    "Comparison",
    "ConfigError",
    "DataError",
    "FrameError",
    "Graph",
    "Partition",
    "PartitionError",
    "ProtocolError",
    "Result",
    "RunConfig",
    "Silo",
    "SilographError",
    "Silos",
    "Split",
    "TrainedModel",
    "TrainingError",
    "Tuned",
    "compare",
    "count_categories",
    "from_arrays",
    "from_csv",
    "from_networkx",
    "from_pyg",
    "generate",
    "guess_schema",
    "join_categories",
    "load",
    "load_model",
    "make_partition",
    "prepare",
    "ratings",
    "read_silo",
    "read_silos",
    "resume",
    "run",
    "shard",
    "tune",
    "write_silos",
]


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module 'silograph' has no attribute {name!r}")
    return getattr(importlib.import_module(f"silograph.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
