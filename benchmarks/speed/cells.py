"""What is measured: the federations that are raced, and what is aimed at."""

from dataclasses import dataclass, field, replace
from typing import Any

from silograph.core.config import RunConfig, make_config

# Which kernels are raced, and how a config asks for them, the fastest first.
VARIANTS: dict[str, dict[str, Any]] = {
    "compiled": {"kernels": "compiled"},
    "torch": {"kernels": "torch"},
}
FASTEST = next(iter(VARIANTS))
MANY_ROUNDS = 10**6  # a benchmark stops by itself
LEARNING_RATE = 0.01
Row = dict[str, Any]  # one line of `bench.jsonl`


@dataclass(frozen=True)
class Shape:
    """A federation.

    Attributes:
        dataset: name of the graph; METIS cuts it.
        clients: number of clients.
        epochs: local epochs of a round.
        dropout: share of hidden activations dropped.
        aims: how many times as fast as the plain loop each variant should be.
    """

    dataset: str
    clients: int
    epochs: int = 3
    dropout: float = 0.0
    aims: dict[str, float] = field(default_factory=dict)

    def config(self, **options: Any) -> RunConfig:
        """Return the config of a run: FedAvg with local Adam, a GCN of width 128, seed 0."""
        own = {
            "dataset": self.dataset,
            "clients": self.clients,
            "method": "fedavg",
            "optimizer": "adam",
            "lr": LEARNING_RATE,
            "local_epochs": self.epochs,
            "dropout": self.dropout,
            "rounds": MANY_ROUNDS,
        }
        return make_config(own | options)


def _races() -> dict[str, Shape]:
    aims = {
        ("cora", 10): {"compiled": 10, "torch": 4},
        ("cora", 100): {"compiled": 25, "torch": 10},
        ("pubmed", 100): {"compiled": 7, "torch": 4},
        ("coauthor_cs", 100): {"compiled": 15, "torch": 6},
        ("pubmed", 1000): {"compiled": 20, "torch": 6},
    }
    races = {}
    for (dataset, clients), wanted in aims.items():
        shape = Shape(dataset, clients, aims={name: float(aim) for name, aim in wanted.items()})
        races[f"{dataset}-{clients}"] = shape
        races[f"{dataset}-{clients}-dropout"] = replace(shape, dropout=0.5)
    for clients in (10, 100):
        races[f"cora-{clients}-e1"] = Shape("cora", clients, epochs=1)
    return races


RACES = _races()
# A federated round over as many centralized epochs, and the most that it should be.
EPOCHS = {"epoch-cora": (Shape("cora", 100), 2.5), "epoch-pubmed": (Shape("pubmed", 100), 1.5)}
# Methods over FedAvg with the same epochs, the best kernels of both, and the most it should be.
METHODS = {
    "fedpub-10": ("fedpub", Shape("cora", 10), 2.0),
    "fedpub-100": ("fedpub", Shape("cora", 100), 5.0),
}
# FedAvg with FedGrAINS' sampler over FedAvg with the same batches and all neighbors.
BATCH = 32
SAMPLED = {"fedgrains-10": (Shape("cora", 10), 4.0), "fedgrains-100": (Shape("cora", 100), 4.0)}
THREADS = {
    f"threads-{name}": RACES[name] for name in ("cora-100", "coauthor_cs-100", "pubmed-1000")
}
PROCESSES = {name.replace("threads", "processes"): shape for name, shape in THREADS.items()}
