"""FedAvg's round in C++ (`floor.cpp`) as a side of a race: builds it and gives it its input."""

import platform
import shutil
import subprocess
import warnings
from pathlib import Path
from typing import BinaryIO

import numpy as np
import torch
from loop import Client, clients_of, tuned_client
from timing import Child
from torch import Tensor

from silograph.core.resolved_config import ResolvedConfig
from silograph.experiment.resolve.data import Cut
from silograph.nn.conv import Params

SOURCE = Path(__file__).with_name("floor.cpp")
WIDTH, MOST_CLASSES, DROPOUTS = 128, 16, (0.0, 0.5)  # what `floor.cpp` is written for


def build_floor(folder: Path) -> Path | None:
    """Compile the round into a folder; return the program, None if there is no compiler."""
    compiler = shutil.which("g++")
    if compiler is None:
        return None
    program = folder / "floor"
    wide = ["-mprefer-vector-width=512"] if platform.machine() == "x86_64" else []
    flags = ["-std=c++17", "-O3", "-march=native", *wide, "-ffast-math"]
    subprocess.run([compiler, *flags, str(SOURCE), "-o", str(program)], check=True)
    return program


class Floor:
    """FedAvg in C++ on a cut graph.

    Args:
        program: what `build_floor` returned.
        folder: for files that pass to and fro.
        cut: the graph, its cut and its split.
        config: epochs, dropout; the other settings are those of `floor.cpp`.
        weights: the first weights, in silograph's form.
    """

    def __init__(
        self, program: Path, folder: Path, cut: Cut, config: ResolvedConfig, weights: Params
    ) -> None:
        assert config.hidden == WIDTH
        assert cut.graph.num_classes <= MOST_CLASSES
        assert config.dropout in DROPOUTS
        assert config.local_epochs is not None
        self._folder, self._shapes = folder, {name: w.shape for name, w in weights.items()}
        path = folder / "input"
        with path.open("wb") as file:
            write_input(file, clients_of(cut, torch.float32), weights)
        options = [str(config.local_epochs), str(config.dropout)]
        self.child = Child([str(program), str(path), *options])

    @property
    def weights(self) -> Params:
        """The averaged model, in silograph's form."""
        path = self._folder / "weights"
        self.child.ask(f"weights {path}")
        values = torch.from_numpy(np.fromfile(path, "f4"))
        sizes = [shape.numel() for shape in self._shapes.values()]
        parts = zip(self._shapes.items(), values.split(sizes), strict=True)
        return {name: part.view(shape) for (name, shape), part in parts}

    def round(self) -> object:
        """Run one round and score it."""
        return self.child.ask("rounds 1")


def write_input(file: BinaryIO, clients: list[Client], weights: Params) -> None:
    """Write what `read_input` of `floor.cpp` reads: first weights, then every client's data."""

    def write(values: Tensor, kind: str) -> None:
        file.write(np.ascontiguousarray(values.numpy(), kind).tobytes())

    def write_sparse(matrix: Tensor, columns: Tensor) -> None:
        write(matrix.crow_indices(), "i4")
        write(columns, "i4")
        write(matrix.values(), "f4")

    num_features, num_classes = weights["0.weight"].shape[0], weights["1.weight"].shape[1]
    write(torch.tensor([len(clients), num_features, num_classes]), "i4")
    for w in weights.values():
        write(w, "f4")
    for plain in clients:
        client = tuned_client(plain, "sparse csr")
        adjacency = client.edges
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Sparse CSR tensor support is in beta")
            assert torch.equal(adjacency.to_dense(), adjacency.to_dense().T)
        # Columns are numbered anew: a client has few of all features.
        features, columns = client.x.col_indices().unique(return_inverse=True)
        roles = [client.train, client.val, client.test]
        write(torch.tensor([len(client.y), len(features), *map(len, roles)]), "i4")
        write(features, "i4")
        write_sparse(client.x, columns)
        write_sparse(adjacency, adjacency.col_indices())
        for values in (client.y, *roles):
            write(values, "i4")
