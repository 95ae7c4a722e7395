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

    def options(self) -> dict[str, Any]:
        """Return the options of a run: FedAvg with local Adam, a GCN of width 128, seed 0."""
        return {
            "dataset": self.dataset,
            "clients": self.clients,
            "method": "fedavg",
            "optimizer": "adam",
            "lr": LEARNING_RATE,
            "local_epochs": self.epochs,
            "dropout": self.dropout,
            "rounds": MANY_ROUNDS,
        }

    def config(self, **options: Any) -> RunConfig:
        """Return the config of such a run with some options changed."""
        return make_config(self.options() | options)


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
# FedAvg beside OpenFGL and C++, with dropout as in OpenFGL.
PEERS = {
    f"peers-{clients}-e{epochs}": Shape("cora", clients, epochs, dropout=0.5)
    for clients in (10, 100)
    for epochs in (1, 3)
}
REBUILT, KEPT = "silograph, Adam rebuilt", "silograph, Adam kept"
OURS = {REBUILT: False, KEPT: True}  # whether clients keep Adam's state between rounds
CPP = "C++, Adam rebuilt"
# The same, and whether the server's model is scored besides the clients' own models.
OPENFGL = {
    "OpenFGL, Adam kept": (True, False),
    "OpenFGL, Adam kept, both models": (True, True),
    "OpenFGL, Adam rebuilt": (False, False),
    "OpenFGL, Adam rebuilt, both models": (False, True),
}
# The sides that do the same as one of ours, and how many times as long they should take.
EQUAL = {"OpenFGL, Adam kept, both models": KEPT, "OpenFGL, Adam rebuilt, both models": REBUILT}
PEER_AIMS = {
    ("peers-10-e1", REBUILT): 13.0,
    ("peers-100-e1", REBUILT): 45.0,
    ("peers-100-e1", KEPT): 25.0,
}
MOST_OVER_CPP, MOST_KEPT = 2.6, 1.8  # of a round with 100 clients and one epoch
KEPT_MEMORY: dict[str, dict[str, Any]] = {
    "rebuilt": {"keep_optimizer": False},
    "kept": {"keep_optimizer": True},
}
MOST_KEPT_MEMORY = 1.2
ADAM: dict[str, Any] = {"optimizer": "adam", "lr": LEARNING_RATE, "weight_decay": 5e-4}


@dataclass(frozen=True)
class Version:
    """A run of a method in an earlier version and in this one.

    Attributes:
        options: of `sg.run`, in both.
        least: how many times as fast a round of this version should be.
        now: what this version is given besides, so that it does what the earlier one did.
    """

    options: dict[str, Any]
    least: float
    now: dict[str, Any] = field(default_factory=dict)


CORA: dict[str, Any] = {"dataset": "cora", "partition": "metis", "clients": 10}
CIAO: dict[str, Any] = {"dataset": "ciao", "partition": "category", "clients": 10}
SAGE: dict[str, Any] = {"model": "sage", "local_epochs": 1, "optimizer": "adam"}
NO_SERVER_STEP = {"server_optimizer": "none"}  # an option that the earlier version lacks
VERSIONS = {
    "before-fedais": Version(
        CORA | SAGE | {"method": "fedais", "weight_decay": 0.0, "options": {"unbiased": False}},
        2.5,
        NO_SERVER_STEP,
    ),
    "before-fedgraph": Version(
        CORA | ADAM | {"method": "fedgraph", "keep_optimizer": True}, 1.8, NO_SERVER_STEP
    ),
    "before-label-guided": Version(CORA | {"method": "label_guided"}, 1.8),
    "before-label-guided-drawn": Version(
        CORA | {"method": "label_guided", "options": {"sample": 200}}, 1.8
    ),
    "before-fedacs": Version(CIAO | {"method": "fedacs", "model": "rating_gcn"}, 1.8),
}
SILOS = {"silos-3": (3, 3.0)}  # silos, and the most that a round may take over the simulation's
THREADS = {
    f"threads-{name}": RACES[name] for name in ("cora-100", "coauthor_cs-100", "pubmed-1000")
}
PROCESSES = {name.replace("threads", "processes"): shape for name, shape in THREADS.items()}
