"""Features that are made of what every silo knows of its own nodes, for graphs without features.

n: nodes. F: features.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Literal

import numpy as np
import scipy.sparse as sp
import torch
from torch import Tensor

from silograph.core.errors import DataError
from silograph.graph.csr import CSR
from silograph.graph.graph import Features, Graph, Schema, normalized_rows

FeatureSource = Literal["given", "degree", "constant", "onehot-degree"]
# Columns of features that are made. Those of onehot-degree are fixed, for no silo knows the largest
# degree of others: one for each degree from 0 to 62, and one for 63 and more.
WIDTHS = {"degree": 1, "constant": 1, "onehot-degree": 64}


def made_features(source: FeatureSource, degree: Tensor) -> Features:
    """Return the features that are made of the degrees (n,) int64 of nodes.

    >>> made_features("degree", torch.tensor([2, 0]))
    tensor([[2.],
            [0.]])

    Args:
        source: degree: (n, 1), the degree; constant: (n, 1), ones; onehot-degree: (n, 64) sparse,
            one 1 a row.
        degree: number of neighbors, in the own silo and in others.
    """
    if source == "degree":
        return degree.float()[:, None]
    if source == "constant":
        return torch.ones(len(degree), 1)
    width, n = WIDTHS["onehot-degree"], len(degree)
    column = degree.clamp(max=width - 1).numpy()
    ones = np.ones(n, dtype=np.float32)
    return CSR.from_scipy(sp.csr_matrix((ones, column, np.arange(n + 1)), shape=(n, width)))


SAMPLE = 10_000  # rows that scales are estimated from
ALONE, ALL = 10.0, 100.0  # see `scale_problem`; measured in docs/decisions/053-weighted-edges.md
MOST = 0.5  # of the sums by which rows are divided; measured there, too
SCALE = "scale such columns before"


def scale_problem(x: Features, names: Sequence[str] = ()) -> str | None:
    """Return what is wrong with the scale of features, or None.

    The root mean square of a column is at least `ALONE`, and `ALONE` times the median one, so that
    it drowns the others; or at least `ALL`. Words, one-hot and standardized columns stay below.

    Args:
        x: (n, F), as clients train on them.
        names: (F,) of the columns, or none.
    """
    count, part = _sample(x)
    scale = (_column_sums(part, lambda values: values.square()) / count).sqrt()
    if not bool((scale > 0).any()):
        return None
    largest, median = int(scale.argmax()), float(scale[scale > 0].median())
    most = float(scale[largest])
    if most < ALL and (most < ALONE or most < ALONE * median):
        return None
    column = _column(largest, names)
    how = "add --normalize standard"
    if isinstance(x, CSR):  # standardized, they would be dense
        how = "add --normalize row, as they are sparse" if row_problem(x) is None else SCALE
    return (
        f"features are on very different or large scales (column {column}: about {most:.3g}; the "
        f"median column: {median:.3g}), and models may not learn from them: {how}"
    )


def row_problem(x: Features, names: Sequence[str] = ()) -> str | None:
    """Return what is wrong with features whose rows are divided by their sums, or None.

    Columns whose values other than 0 are on average `ALONE` times those of the median column make
    up most of the sums. So they are nearly the same at every node, and what the others say is
    divided away. Or sums are close to 0.

    Args:
        x: (n, F), before or after the division.
        names: (F,) of the columns, or none.
    """
    count, part = _sample(x)
    part = normalized_rows(part)
    share = _column_sums(part, torch.abs) / count
    if not bool((share > 0).any()):
        return None
    largest, total = int(share.argmax()), float(share.sum())
    # Of values other than 0: a common word is no large number.
    value = share * count / _column_sums(part, lambda values: (values != 0).double()).clamp(min=1)
    large = value >= ALONE * value[value > 0].median()
    drowning = float(share[large].sum()) / total
    if drowning >= MOST or len(share) == 1:
        what = f"are mostly column {_column(largest, names)} ({share[largest] / total:.0%})"
    elif total >= ALL:
        what = f"are close to 0 (a row's values are then about {total:.3g} in all)"
    else:
        return None
    how = SCALE if isinstance(x, CSR) else "use --normalize standard"
    return (
        f"sums of features by which --normalize row divides {what}, and models may not learn from "
        f"the other columns: {how}"
    )


MOST_SORTED = 2 * 10**7  # numbers that are sorted to find equal ones
LOST = (
    0.01  # of the distinct values of a column: of very many, a few are equal in float32 by chance
)
NAMED = 5  # columns in a message


def narrowing_problem(
    before: Features, after: Features, names: Sequence[str] = (), *, standardized: bool
) -> str | None:
    """Return which columns have fewer distinct values in the dtype of a run, or None.

    Columns are named that lose more than `LOST` of their distinct values. If there are more than
    `MOST_SORTED` numbers, evenly spaced rows are looked at.

    Args:
        before: (n, F) in float64; other dtypes lose nothing.
        after: the same rows and columns as clients train on them.
        names: (F,) of the columns, or none.
        standardized: whether the run standardizes already.
    """
    values = before.values if isinstance(before, CSR) else before
    if values is None or values.dtype != torch.float64 or not values.numel():
        return None
    lost: list[str] = []
    for column, (wide, narrow) in enumerate(_pairs_of_columns(before, after)):
        if not bool(narrow.any()):  # constant on training nodes, so that it was made 0
            continue
        order = wide.argsort()
        is_new, differs = wide[order].diff() != 0, narrow[order].diff() != 0
        had, has = int(is_new.sum()) + 1, int((is_new & differs).sum()) + 1
        if had - has > LOST * had:
            lost.append(f"column {_column(column, names)}: {had:,} become {has:,}")
    if not lost:
        return None
    more = f"; and {len(lost) - NAMED} more" if len(lost) > NAMED else ""
    how = "use --dtype float64" if standardized else "add --normalize standard or --dtype float64"
    return (
        f"distinct values of features become equal in the dtype of the run "
        f"({'; '.join(lost[:NAMED])}{more}), and models cannot tell them apart: {how}"
    )


def _pairs_of_columns(before: Features, after: Features) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the values of each column before and after; of sparse features the stored ones."""
    if isinstance(before, CSR):
        assert isinstance(after, CSR)  # of the same places
        assert before.values is not None  # features always carry values
        assert after.values is not None
        column = before.indices.long()
        order, sizes = column.argsort(), column.bincount(minlength=before.num_cols).tolist()
        parts = before.values[order].split(sizes), after.values[order].split(sizes)
        yield from zip(*parts, strict=True)
        return
    assert not isinstance(after, CSR)
    step = -(-before.numel() // MOST_SORTED)
    for number in range(before.shape[1]):
        yield before[::step, number], after[::step, number]


def _sample(x: Features) -> tuple[int, Features]:
    """Return the number (at least 1) of evenly spaced rows, and them: `SAMPLE` at most."""
    rows = x.num_rows if isinstance(x, CSR) else len(x)
    step = -(-max(rows, 1) // SAMPLE)
    part = x.select_rows(torch.arange(0, rows, step)) if isinstance(x, CSR) else x[::step]
    return max(-(-rows // step), 1), part


def _column_sums(x: Features, of: Callable[[Tensor], Tensor]) -> Tensor:
    """Return the sum of a function of the values of each column, (F,) float64; it keeps 0."""
    if not isinstance(x, CSR):
        return of(x.double()).sum(dim=0)
    assert x.values is not None  # features always carry values
    zero = torch.zeros(x.num_cols, dtype=torch.float64)
    return zero.index_add_(0, x.indices.long(), of(x.values.double()))


def _column(number: int, names: Sequence[str]) -> str:
    return repr(names[number]) if names else str(number)


def with_features(graph: Graph, source: FeatureSource) -> Graph:
    """Return the graph with the features that are asked for; degrees are those of the graph."""
    if source == "given":
        return graph
    return replace(graph, x=made_features(source, graph.adj.degree), feature_names=())


def with_width(schema: Schema, source: FeatureSource, name: str) -> Schema:
    """Return the schema of the graph that `with_features` makes; raises as `check_given` does."""
    check_given(source, schema.num_features, name)
    return replace(schema, num_features=WIDTHS.get(source, schema.num_features))


def check_given(source: FeatureSource, num_features: int, name: str) -> None:
    """Raise `DataError` where the given features are asked for, and there are none."""
    if source == "given" and not num_features:
        raise DataError(
            f"expected a graph with features, got {name!r} without: choose features degree, "
            "constant or onehot-degree, such as --features degree"
        )
