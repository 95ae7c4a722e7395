"""What a page shows of the cut: sizes, mix of labels, edges between clients.

All of it is known in a simulation only: silos would tell neither label counts nor edges.
"""

from typing import Any

from silograph.experiment.report.figures import bars, heat
from silograph.experiment.report.reading import RunRecord

MOST_SHOWN = 60  # clients shown one by one
MOST_CELLS = 1500  # of a table of label counts
CountTable = list[list[int]]
PARTS = ("train", "val", "test")


def cut_figures(run: RunRecord) -> dict[str, Any] | None:
    """Return the figures of the cut; for many clients, sorted bars in place of one row a client.

    None where silos held the graph.
    """
    cut = run.cut
    if cut is None:
        return None
    found: dict[str, Any] = {
        "clients": len(run.clients),
        "totals": {
            k: cut[k] for k in ("edges", "edges_cut", "cut_share", "label_distance", "homophily")
        },
        "sizes": None,
        "labels": None,
        "between": None,
        "many": None,
    }
    if len(run.clients) > MOST_SHOWN:
        return found | {"many": sorted_bars(run, cut["labels"])}
    labels = label_mix(run, cut["labels"], cut["classes"]) if cut["classes"] else None
    return found | {"sizes": sizes(run), "labels": labels, "between": between(run, cut["between"])}


def sizes(run: RunRecord) -> dict[str, Any]:
    """Return each client's nodes by what they are for."""
    nodes = [int(row["nodes"]) for row in run.clients]
    counts = [{part: int(row[part]) for part in PARTS} for row in run.clients]
    for held, count in zip(nodes, counts, strict=True):
        count["other"] = held - sum(count.values())
    return {
        "rows": [
            {"client": row["client"], "nodes": held, "parts": count}
            for row, held, count in zip(run.clients, nodes, counts, strict=True)
        ],
        "most": max(nodes),
        "parts": [part for part in (*PARTS, "other") if any(count[part] for count in counts)],
    }


def shares(counts: list[int], nodes: int, *, multilabel: bool) -> list[float]:
    """Return the share of each class among a client's labels, or among its nodes for label bits."""
    total = nodes if multilabel else sum(counts)
    return [count / total if total else 0.0 for count in counts]


def label_mix(run: RunRecord, labels: CountTable, names: list[Any]) -> dict[str, Any]:
    """Return the heat map of clients by classes."""
    multilabel = run.about["model"]["task"] == "multilabel"
    nodes = [int(row["nodes"]) for row in run.clients]
    table = [
        shares(counts, n, multilabel=multilabel) for counts, n in zip(labels, nodes, strict=True)
    ]
    classes = [str(name) for name in names]
    return {
        "multilabel": multilabel,
        "columns": classes,
        "rows": [row["client"] for row in run.clients],
        "paths": heat(table),
        "counts": labels if len(classes) * len(labels) <= MOST_CELLS else None,
    }


def between(run: RunRecord, counts: CountTable | None) -> dict[str, Any] | None:
    """Return the heat map of cross-client edges; None for one client or without such edges."""
    most = max((n for row in counts or () for n in row), default=0)
    if counts is None or not most:
        return None
    names = [row["client"] for row in run.clients]
    return {
        "columns": names,
        "rows": names,
        "most": most,
        "paths": heat([[n / most for n in row] for row in counts]),
        "counts": counts,
    }


def sorted_bars(run: RunRecord, labels: CountTable) -> list[dict[str, Any]]:
    """Return sizes, the share of the largest class, and cross-client edges, largest first."""
    multilabel = run.about["model"]["task"] == "multilabel"
    nodes = [int(row["nodes"]) for row in run.clients]
    mix = [
        max(shares(counts, n, multilabel=multilabel), default=0.0)
        for counts, n in zip(labels, nodes, strict=True)
    ]
    ends = [
        int(row["cross_edges"]) / max(int(row["cross_edges"]) + int(row["internal_edges"]), 1)
        for row in run.clients
    ]
    what = (
        "nodes that have its commonest bit"
        if multilabel
        else "labels that are of its largest class"
    )
    bars_of_labels = {
        "title": "Commonest label" if multilabel else "Largest class",
        "says": f"Share of a client's {what}; 1 is a client of one kind.",
        **bars(mix),
    }
    return [
        {"title": "Nodes", "says": "Nodes of each client.", **bars(nodes)},
        *([bars_of_labels] if any(labels) else []),
        {
            "title": "Cut edges",
            "says": "Share of a client's edges that lead to another client.",
            **bars(ends),
        },
    ]
