"""Tables 4 to 8 of FedGrAINS beside ours: what METIS cuts do to five graphs.

    python benchmarks/fedgrains/partitions.py --data-dir ../shared/data

cuts what `partitions.jsonl` does not hold yet, and rewrites the tables of `partitions.md` and the
chart. A cell is one cut; it can be stopped and continued at any time.
"""

import argparse
import json
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pymetis
from fedgrains_chart import chart
from fedgrains_readings import degree_readings, in_base_2, label_readings
from fedgrains_tables import (
    CLIENTS,
    CLUSTERING,
    DATASETS,
    EDGES,
    HELLINGER,
    HETEROGENEITY,
    MISSING,
    NODES,
    Printed,
    missing_by_table_4,
)

import silograph as sg
from silograph.core.key import Key
from silograph.graph.block.block import connect
from silograph.graph.graph import Graph, key_order, largest_component
from silograph.graph.heterogeneity import describe
from silograph.graph.partition.partition import Partition, make_partition

HERE = Path(__file__).parent
CELLS, PAGE, CHART = (HERE / f"partitions.{end}" for end in ("jsonl", "md", "svg"))
SEEDS = range(5)
METHOD = {"disjoint": "metis", "overlapping": "metis_overlapping"}
# Columns of ours, where a table has several: what they are in the cells, and their heads.
HEADS: dict[tuple[str, ...], str] = {
    ("metis", "k-way"): "k-way",
    ("metis", "recursive bisection"): "bisection",
    ("labels", "distance, median over pairs"): "pairs",
    ("labels", "distance, median over the whole matrix"): "matrix",
    ("degrees", "50 bins over each client's own range"): "own bins",
    ("degrees", "one bin a degree"): "by degree",
}
Row = dict[str, Any]


def cell(graph: Graph, dataset: str, scenario: str, clients: int, seed: int) -> Row:
    """Cut a graph once; figures are means over the clients."""
    key = Key.of(seed)
    cut = make_partition(graph, METHOD[scenario], clients=clients, key=key)
    figures = describe(graph, cut, clustering=True)
    assert figures.clustering is not None  # asked for
    row = {
        "dataset": dataset,
        "scenario": scenario,
        "clients": clients,
        "seed": seed,
        "hash": cut.hash,
        "nodes": float(figures.nodes.double().mean()),
        "edges": 2 * float(figures.internal_edges.double().mean()),
        "clustering": float(figures.clustering.mean()),
        "uncut_clustering": figures.uncut_clustering,
        "missing": figures.edges_cut,
        "labels": label_readings(figures),
        "degrees": degree_readings(internal_degrees(graph, cut)),
    }
    if scenario == "disjoint":
        row["metis"] = {
            name: metis_cut(graph, clients, key, recursive=recursive)
            for name, recursive in (("k-way", False), ("recursive bisection", True))
        }
    return row


def internal_degrees(graph: Graph, cut: Partition) -> list[np.ndarray]:
    """Return the internal degree of every node of every client."""
    degree = connect(graph, cut)[0].degree.numpy()
    return np.split(degree, np.cumsum([len(part) for part in cut.nodes])[:-1])


def metis_cut(graph: Graph, clients: int, key: Key, *, recursive: bool) -> int:
    """Return the edges that METIS cuts in one of its two ways, nodes in an order drawn by key."""
    order = key_order(graph.node_id, key).numpy()
    adjacency = graph.adj.scipy(np.int8)[order][:, order]
    matrix = pymetis.CSRAdjacency(adjacency.indptr, adjacency.indices)
    part = np.asarray(pymetis.part_graph(clients, matrix, recursive=recursive).vertex_part)
    row, column = adjacency.nonzero()
    return int((part[row] != part[column]).sum()) // 2


def measure(rows: list[Row], data_dir: str | None) -> None:
    """Append the cells that are missing; a graph that is not there is left out with a line."""
    done = {(row["dataset"], row["scenario"], row["clients"], row["seed"]) for row in rows}
    for dataset in DATASETS:
        wanted = [c for c in cells_of(dataset) if c not in done]
        if not wanted:
            continue
        try:
            graph = largest_component(sg.load(dataset, data_dir=data_dir))
        except sg.SilographError as error:
            print(f"{dataset} left out: {error}")
            continue
        for _, scenario, clients, seed in wanted:
            rows.append(cell(graph, dataset, scenario, clients, seed))
            with CELLS.open("a") as file:
                file.write(json.dumps(rounded(rows[-1])) + "\n")
            print(f"{dataset}, {scenario}, {clients} clients, seed {seed}", flush=True)


def cells_of(dataset: str) -> Iterator[tuple[str, str, int, int]]:
    """Yield dataset, scenario, clients and seed of every cell of a graph."""
    for scenario, counts in CLIENTS.items():
        for clients in counts:
            for seed in SEEDS:
                yield dataset, scenario, clients, seed


def rounded(value: Any) -> Any:
    """Return a row with numbers of five digits."""
    if isinstance(value, dict):
        return {name: rounded(part) for name, part in value.items()}
    return float(f"{value:.5g}") if isinstance(value, float) else value


def values_of(
    rows: list[Row], dataset: str, scenario: str, clients: int, *path: str
) -> list[float]:
    """Return a figure of every seed of a cell."""
    values = []
    for row in rows:
        if (row["dataset"], row["scenario"], row["clients"]) == (dataset, scenario, clients):
            value: Any = row
            for name in path:
                value = value[name]
            values.append(float(value))
    return values


def spread(values: list[float], digits: int) -> str:
    """Return mean ± standard deviation, or what is missing."""
    if len(values) < 2:
        return "not measured"
    return f"{statistics.mean(values):,.{digits}f} ± {statistics.stdev(values):,.{digits}f}"


def table(
    rows: list[Row], scenario: str, printed: Printed, digits: int, *paths: tuple[str, ...]
) -> list[str]:
    """Return lines of a table: for each graph and number of clients the paper's cell and ours."""
    counts = CLIENTS[scenario]
    ours = [HEADS.get(path, "ours") for path in paths]
    heads = [f"{clients}: {what}" for clients in counts for what in ("paper", *ours)]
    lines = [f"| | {' | '.join(heads)} |", "|---" * (len(heads) + 1) + "|"]
    for dataset, name in DATASETS.items():
        texts = []
        for number, clients in enumerate(counts):
            texts.append(f"{printed[scenario][dataset][number]:,.{digits}f}")
            for path in paths:
                texts.append(spread(values_of(rows, dataset, scenario, clients, *path), digits))
        lines.append(f"| {name} | {' | '.join(texts)} |")
    return lines


def differences(rows: list[Row], printed: Printed, *path: str) -> dict[str, list[float]]:
    """Return by scenario how far the means over seeds are from the paper's cells."""
    return {
        scenario: [
            statistics.mean(values) - printed[scenario][dataset][number]
            for dataset in DATASETS
            for number, clients in enumerate(counts)
            if (values := values_of(rows, dataset, scenario, clients, *path))
        ]
        for scenario, counts in CLIENTS.items()
    }


def readings(rows: list[Row], printed: Printed, field: str) -> list[str]:
    """Return lines of a table: how far from the paper each reading of a figure is."""
    lines = ["| reading | disjoint | overlapping | largest |", "|---|---|---|---|"]
    for name in rows[0][field] if rows else ():
        apart = differences(rows, printed, field, name)
        means = [statistics.mean(map(abs, values)) for values in apart.values()]
        largest = max(abs(value) for values in apart.values() for value in values)
        lines.append(f"| {name} | {means[0]:.3f} | {means[1]:.3f} | {largest:.3f} |")
    return lines


def consistency() -> list[str]:
    """Return lines of a table: missing links of table 5 beside those that table 4 implies."""
    counts = CLIENTS["disjoint"]
    heads = [h for k in counts for h in (f"{k}: table 5", f"{k}: by table 4")]
    lines = [f"| | {' | '.join(heads)} |", "|---" * (len(heads) + 1) + "|"]
    for dataset, name in DATASETS.items():
        texts = []
        for number, clients in enumerate(counts):
            printed = MISSING["disjoint"][dataset][number]
            implied = missing_by_table_4(dataset, number)
            # Table 4 rounds edges a client to whole numbers: half an edge each.
            off = abs(printed - implied) > clients / 4 + 0.5
            texts += [f"**{printed:,}**" if off else f"{printed:,}", f"{implied:,.0f}"]
        lines.append(f"| {name} | {' | '.join(texts)} |")
    return lines


def sections(rows: list[Row]) -> dict[str, list[str]]:
    """Return the page's tables by the name of their place."""
    both = [{**row, "labels": row["labels"] | in_base_2(row["labels"])} for row in rows]
    made = {"readings labels": readings(both, HETEROGENEITY, "labels")}
    made["readings degrees"] = readings(rows, HELLINGER, "degrees")
    made["consistency"] = consistency()
    made["metis"] = table(rows, "disjoint", MISSING, 0, *columns("metis"))
    for scenario in CLIENTS:
        for name, printed, digits, paths in (
            ("nodes", NODES, 0, [("nodes",)]),
            ("edges", EDGES, 0, [("edges",)]),
            ("clustering", CLUSTERING, 3, [("clustering",)]),
            ("heterogeneity", HETEROGENEITY, 3, columns("labels")),
            ("missing", MISSING, 0, [("missing",)]),
            ("hellinger", HELLINGER, 3, columns("degrees")),
        ):
            made[f"{name} {scenario}"] = table(rows, scenario, printed, digits, *paths)
    return made


def columns(field: str) -> list[tuple[str, ...]]:
    """Return the readings of a field that tables show."""
    return [path for path in HEADS if path[0] == field]


def write_page(rows: list[Row]) -> None:
    """Put the tables into their places, `<!-- NAME -->` to `<!-- end -->`."""
    text = PAGE.read_text()
    for name, lines in sections(rows).items():
        before, _, rest = text.partition(f"<!-- {name} -->\n")
        _, _, after = rest.partition("<!-- end -->")
        text = f"{before}<!-- {name} -->\n" + "\n".join(lines) + f"\n<!-- end -->{after}"
    PAGE.write_text(text)


def main() -> None:
    """Measure what is missing, and write page and chart."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data-dir", help="folder with cora.npz and so on")
    data_dir = parser.parse_args().data_dir
    rows = [json.loads(line) for line in CELLS.read_text().splitlines()] if CELLS.exists() else []
    measure(rows, data_dir)
    write_page(rows)
    CHART.write_text(chart(rows))


if __name__ == "__main__":
    main()
