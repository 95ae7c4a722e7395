"""FedAvg of OpenFGL as a side of a race, from a checkout of its repository.

Li et al., "OpenFGL: A comprehensive benchmark for federated graph learning", PVLDB 2025;
github.com/xkLi-Allen/OpenFGL. Its trainer, clients, server, task, model and metrics run as they
are, in the order of `FGLTrainer.train`. What is replaced, so that all sides do the same work:

- clients' graphs, cut, split and first weights are silograph's, and no files are read or written;
- a client counts by its training nodes in the mean, where OpenFGL counts all nodes;
- its lines go to a string instead of a terminal.

Two things can be chosen. `keep_optimizer=False` makes a new Adam for a client in every round;
OpenFGL keeps it. `both_models=True` also scores the server's model at the clients; OpenFGL scores
each client's own model after training.
"""

import contextlib
import io
import random
import sys
import types
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from loop import Client, clients_of
from torch import Tensor
from torch_geometric.data import Data

from silograph.core.resolved_config import ResolvedConfig
from silograph.experiment.resolve.data import Cut
from silograph.nn.conv import Params

# Our names of weights, and those of OpenFGL's GCN, which holds the transpose.
NAMES = {
    "0.weight": "layers.0.lin.weight",
    "0.bias": "layers.0.bias",
    "1.weight": "layers.1.lin.weight",
    "1.bias": "layers.1.bias",
}
OWN_MODELS, SERVER_MODEL = "local_model_on_local_data", "global_model_on_local_data"


def transposed(name: str, w: Tensor) -> Tensor:
    """Return weights in the other side's form."""
    return w.T if name.endswith("weight") else w


class OpenFGL:
    """OpenFGL's FedAvg on a cut graph.

    Args:
        folder: the checkout.
        cut: the graph, its cut and its split; every client needs a training node.
        config: width, dropout, epochs, learning rate, weight decay.
        weights: the first weights, in silograph's form.
        keep_optimizer: whether clients keep Adam's state between rounds.
        both_models: whether the server's model is scored, too.
    """

    def __init__(
        self,
        folder: Path,
        cut: Cut,
        config: ResolvedConfig,
        weights: Params,
        *,
        keep_optimizer: bool = True,
        both_models: bool = False,
    ) -> None:
        self._keep_optimizer, self._both_models = keep_optimizer, both_models
        self._output, self._rounds = io.StringIO(), 0
        trainer, settings = imported(folder)
        self._args = openfgl_settings(settings, config, len(cut.partition.ids))
        clients = clients_of(cut, torch.float32)
        assert all(client.train.any() for client in clients)
        local = [pyg_data(client, cut) for client in clients]
        # The server's task reads only the numbers of features and classes, and splits of clients.
        everything = types.SimpleNamespace(local_data=local, global_data=local[0], processed_dir="")
        trainer.FGLDataset = lambda _args: everything
        with contextlib.redirect_stdout(self._output):
            self.trainer = trainer.FGLTrainer(self._args)
        with torch.no_grad():
            target = self.trainer.server.task.model.state_dict()
            for name, w in weights.items():
                target[NAMES[name]].copy_(transposed(name, w))

    @property
    def weights(self) -> Params:
        """The averaged model, in silograph's form."""
        state = self.trainer.server.task.model.state_dict()
        return {name: transposed(name, state[theirs]).clone() for name, theirs in NAMES.items()}

    def round(self) -> object:
        """Run one round and score it: the body of the loop in `FGLTrainer.train`."""
        trainer, args = self.trainer, self._args
        self._output.seek(0)
        self._output.truncate()
        with contextlib.redirect_stdout(self._output):
            number = int(args.num_clients * args.client_frac)
            sampled = sorted(random.sample(list(range(args.num_clients)), number))
            print(f"round # {self._rounds}\t\tsampled_clients: {sampled}")
            trainer.message_pool["round"] = self._rounds
            trainer.message_pool["sampled_clients"] = sampled
            trainer.server.send_message()
            for client in sampled:
                if not self._keep_optimizer:
                    task = trainer.clients[client].task
                    task.optim = torch.optim.Adam(
                        task.model.parameters(), lr=args.lr, weight_decay=args.weight_decay
                    )
                trainer.clients[client].execute()
                trainer.clients[client].send_message()
            trainer.server.execute()
            for mode in (OWN_MODELS, SERVER_MODEL)[: 1 + self._both_models]:
                args.evaluation_mode = mode
                trainer.evaluate()
        self._rounds += 1
        return trainer.evaluation_result


def pyg_data(client: Client, cut: Cut) -> Data:
    """Return a client's graph as OpenFGL's tasks take it, with its split."""
    masks = {f"{role}_mask": getattr(client, role) for role in ("train", "val", "test")}
    data = Data(x=client.x, edge_index=client.edges, y=client.y, **masks)
    data.num_global_classes = cut.graph.num_classes
    return data


def load_split(task: Any) -> None:
    """Take a task's split from its data, instead of from files."""
    task.splitted_data = {"data": task.data}
    for name in ("train_mask", "val_mask", "test_mask"):
        setattr(task, name, task.data[name])
        task.splitted_data[name] = task.data[name]
    task.processed_data = task.splitted_data
    task.num_training_nodes = int(task.train_mask.sum())


def imported(folder: Path) -> tuple[Any, Any]:
    """Return OpenFGL's module of the trainer and its settings, with tasks that take our splits."""
    sys.path.insert(0, str(folder))
    # Imported for metrics of clusterings, which are not used here.
    sys.modules.setdefault("munkres", types.ModuleType("munkres")).Munkres = None  # type: ignore[attr-defined]
    given, sys.argv = sys.argv, sys.argv[:1]  # its settings read the command line
    try:
        names = ("config", "flcore.trainer", "task.node_cls")
        config, trainer, task = (import_module(f"openfgl.{name}") for name in names)
    finally:
        sys.argv = given
        sys.path.remove(str(folder))
    task.NodeClsTask.load_train_val_test_split = load_split
    task.NodeClsTask.num_samples = property(lambda own: own.num_training_nodes)
    return trainer, config.args


def openfgl_settings(settings: Any, config: ResolvedConfig, num_clients: int) -> Any:
    """Return OpenFGL's settings for our config."""
    return types.SimpleNamespace(
        **vars(settings)
        | {
            "dataset": ["Cora"],  # names its own split, which is not used
            "simulation_mode": "subgraph_fl_metis",
            "num_clients": num_clients,
            "fl_algorithm": "fedavg",
            "model": ["gcn"],
            "num_layers": config.layers,
            "hid_dim": config.hidden,
            "dropout": config.dropout,
            "lr": config.lr,
            "weight_decay": config.weight_decay,
            "num_epochs": config.local_epochs,
            "metrics": ["accuracy"],
            "use_cuda": False,
        }
    )
