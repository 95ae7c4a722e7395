"""Predict how often a Twitch streamer was viewed: a regression in seven silos, one a language.

    python benchmarks/regression/twitch_views.py shared/data/twitch.npz runs/twitch-views

The target is log10((1 + views) / 10,000), from the column `account_days_views_partner` of the file.
The folder gets lines and tables of the comparison over three seeds.
"""

import sys
from typing import Any

import numpy as np
import scipy.sparse as sp

import silograph as sg


def twitch_views(path: str) -> sg.Graph:
    """Return the graph of twitch.npz with log10((1 + views) / 10,000) as the target."""
    with np.load(path, allow_pickle=False) as parts:
        cells = parts["x_data"].astype(np.float32), parts["x_indices"], parts["x_indptr"]
        views = parts["account_days_views_partner"][:, 1]
        return sg.from_arrays(
            edge_index=parts["edge_index"],
            x=sp.csr_matrix(cells, shape=tuple(parts["x_shape"])),
            y=np.log10((1.0 + views) / 10_000),  # about 0 in the middle, as a model starts there
            silo=parts["silo"],
            silo_names=[str(name) for name in parts["silo_names"]],
            name="twitch_views",
        )


def main(path: str, out: str) -> None:
    """Compare methods, and print what the mean of the training targets gets."""
    graph = twitch_views(path)
    options: dict[str, Any] = {"partition": "silo", "model": "sage", "hidden": 32, "dropout": 0.2}
    methods = ["local", "fedavg", "fedopt"]
    table = sg.compare(
        graph, methods=methods, seeds=3, rounds=40, out=out, progress="plain", **options
    )
    print(table.summary())
    for seed in range(3):
        mean = sg.run(graph, method="local", rounds=1, seed=seed, **options).baseline
        print(f"seed {seed}: mean target {mean}")


if __name__ == "__main__":
    main(*sys.argv[1:])
