"""What FedAvg's weights reveal of silos of few nodes; writes `weights.md`.

    python benchmarks/attacks/weights.py ../shared/data

Up to 100 silos of equal size, of nodes of Cora that are drawn at random, with the edges among them.
Crafted weights: one local step of SGD, what enters the first layer (a GCN's sum over neighbors at
the silo itself) at training nodes, found to 1e-3. Words: the features that the first weights show.
"""

import sys
from pathlib import Path
from typing import Any

import torch

import silograph as sg
from silograph.core.config import make_config
from silograph.experiment.run.setup import prepare
from silograph.experiment.terminal_table import markdown_table
from silograph.graph.graph import Graph, subgraph
from silograph.study.attack import (
    ALL,
    attack_first_weights,
    attack_with_crafted_weights,
    record_server_view,
)

HERE = Path(__file__).parent
HEAD = (
    "silos",
    "nodes of a silo",
    "its training nodes",
    "dropout",
    "local epochs",
    "rows from crafted weights",
    "words that occur",
    "silos whose one row is complete",
)


CASES = (
    *((nodes, 0.2, dropout, 1) for nodes in (5, 50, 500) for dropout in (0.5, 0.0)),
    *((nodes, 0.98, 0.5, epochs) for nodes in (1, 2, 10) for epochs in (1, 3)),
)

TEXT = """\
# What FedAvg's weights reveal of silos of few nodes

{summary}

FedAvg was run on silos of equal size, and the server tried to read features from the weights that
it got back: after it had sent crafted weights, or by which first weights had moved. Where silos
have one or two training nodes, crafted weights reveal 91 to 96 % of the rows, and the words of a
single training node are complete. Put many training nodes into a silo: with 100 of them and
dropout .5, crafted weights reveal 1 %.

## How it was measured

Up to 100 silos have nodes of Cora that are drawn at random, with the edges among them. *Rows from
crafted weights* is the share of training nodes whose input of the first layer the server finds to
1e-3, after one local step of SGD. That input is a GCN's sum over the neighbors at the silo. *Words
that occur* is the share of the words that occur at silos which the first weights show.
[Attacks](../../docs/explanation/privacy.md) explains both attacks.

## All figures

{table}

Run again: `python benchmarks/attacks/weights.py DATA`.

## Limits

The code of crafted weights assumes one local step of plain SGD (`-` elsewhere). A server can craft
weights for other optimizers, too. Figures are of one seed and one graph.
"""


def measured(whole: Graph, nodes: int, train: float, dropout: float, epochs: int) -> list[str]:
    """Return the texts of a line."""
    count = min(100, whole.num_nodes // nodes)
    order = torch.randperm(whole.num_nodes, generator=torch.Generator().manual_seed(0))
    graph = subgraph(whole, order[: count * nodes].sort().values)
    split = f"{train}/{(1 - train) / 2:.2f}/{(1 - train) / 2:.2f}"
    asked: dict[str, Any] = {"method": "fedavg", "optimizer": "sgd", "lr": 0.1, "split": split}
    asked |= {"dropout": dropout, "local_epochs": epochs, "block_size": ALL, "clients": count}
    setup = prepare(make_config({**asked, "partition": "random"}), graph)
    seen = record_server_view(setup, 1)
    block = seen.blocks[0]
    rows, words = (
        attack_with_crafted_weights(setup, block),
        attack_first_weights(seen, setup, block),
    )
    shares = [f"{100 * one.share:.1f} %" for one in (*rows, *words)]
    shares = shares if rows else ["-", *shares]
    trained = f"{float(block.num_train.double().mean()):.1f}"
    return [str(count), str(nodes), trained, str(dropout), str(epochs), *shares]


def main(data: str) -> None:
    """Measure all cases and write the page."""
    graph = sg.load("cora", data_dir=data)
    rows = [measured(graph, *case) for case in CASES]
    few = [row for row in rows if row[3:5] == ["0.5", "1"]]
    text = TEXT.format(summary=markdown_table(HEAD, few), table=markdown_table(HEAD, rows))
    (HERE / "weights.md").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1])
