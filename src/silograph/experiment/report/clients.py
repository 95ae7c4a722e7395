"""What a page shows of the clients: how good the best round's models are at each of them."""

from collections.abc import Mapping, Sequence
from typing import Any

from silograph.experiment.report.cut import MOST_SHOWN
from silograph.experiment.report.figures import Scale, path_of, quantile, spread, thinned
from silograph.experiment.report.reading import VIEWS, RunRecord
from silograph.task.metric_table import Metric

TENTH = 20  # clients from which on the worst tenth is told


def client_figure(run: RunRecord) -> dict[str, Any] | None:
    """Return the score of every client; None before the end, or without test nodes."""
    metric = run.client_metric
    values = {view: run.client_scores(view) for view in VIEWS}
    values = {view: found for view, found in values.items() if found}
    if not values:
        return None
    view = run.judge if run.judge in values else next(iter(values))
    known = [v for v in values[view] if v is not None]
    order = sorted(range(len(run.clients)), key=lambda c: metric.goodness(values[view][c]))
    scale = Scale(*spread([v for found in values.values() for v in found if v is not None], 0.05))
    low = known.index(min(known, key=metric.goodness))
    names = [
        row["client"] for row, v in zip(run.clients, values[view], strict=True) if v is not None
    ]
    found = {
        "view": view,
        "views": list(values),
        "metric": metric,
        "median": quantile(known, 0.5),
        # A tenth of fewer clients is one of them, or less.
        "low": quantile(known, 0.1 if metric.higher else 0.9) if len(known) >= TENTH else None,
        "least": known[low],
        "least_name": names[low],
        "judged": len(known),
        "ticks": scale.marks(most=4),
    }
    if len(run.clients) > MOST_SHOWN:
        return found | {"rows": [], "curve": by_rank(values, view, metric)}
    rows = [
        {
            "client": run.clients[c]["client"],
            "test": run.clients[c].get("test", ""),
            "dots": [
                {"view": v, "value": value, "at": round(100 * scale.share(value), 2)}
                for v in values
                if (value := values[v][c]) is not None
            ],
        }
        for c in reversed(order)
    ]
    return found | {"rows": rows, "curve": None}


def by_rank(
    values: Mapping[str, Sequence[float | None]], view: str, metric: Metric
) -> dict[str, Any]:
    """Return the clients' scores, each view sorted from the worst, over the share of clients."""
    ordered = {
        v: sorted((x for x in found if x is not None), key=metric.goodness)
        for v, found in values.items()
    }
    y = Scale(*spread([x for found in ordered.values() for x in found], 0.04))
    lines = []
    for v, found in ordered.items():
        kept = thinned(len(found))
        x = Scale(0, max(len(found) - 1, 1))
        look = f"{v} val{' judge' if v == view else ''}"
        path = path_of(kept, [found[i] for i in kept], x, y)
        lines.append({"name": v, "look": look, "d": path})
    return {"ticks": y.marks(), "lines": lines}
