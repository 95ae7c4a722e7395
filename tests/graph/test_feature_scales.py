"""Laws of the line on scales of features: who gets it, and who does not."""

from dataclasses import replace

import numpy as np
import pytest
import scipy.sparse as sp
import torch
from torch import Tensor

from runs import MakeGraph, go
from silograph.graph.column_statistics import standardize, sum_by_client
from silograph.graph.csr import CSR
from silograph.graph.graph import (
    Features,
    made_features,
    narrowing_problem,
    normalized_rows,
    row_problem,
    scale_problem,
)
from silograph.graph.read.arrays import features_of

DRAWS = torch.Generator().manual_seed(0)
FLAGS = (torch.rand(300, 6, generator=DRAWS) < 0.3).float()
INCOME = 30_000 + 20_000 * torch.rand(300, 1, generator=DRAWS)
AGE = 20 + 60 * torch.rand(300, 1, generator=DRAWS)
WORDS = torch.poisson(torch.rand(300, 400, generator=DRAWS) ** 8 * 5, generator=DRAWS)
MIXED = torch.cat([FLAGS, INCOME], dim=1)


def sparse(x: Tensor) -> CSR:
    found = features_of(x.to_sparse())
    assert isinstance(found, CSR)
    return found


SUMS = sum_by_client(MIXED, torch.zeros(300, dtype=torch.int64), 1)
FINE: dict[str, Features] = {
    "flags": FLAGS,
    "words": WORDS,
    "sparse words": sparse(WORDS),
    "rows that sum to 1": WORDS / WORDS.sum(1, keepdim=True),
    "standardized": standardize(MIXED, SUMS.own_statistics().of_client(0)).float(),
    "one-hot degrees": made_features("onehot-degree", torch.arange(300)),
    "pixels of 0 to 16": 16 * torch.rand(300, 64, generator=DRAWS),
    "zeros": torch.zeros(300, 3),
    "no features": torch.zeros(300, 0),
    "no nodes": torch.zeros(0, 3),
}


@pytest.mark.parametrize("name", FINE)
def test_usual_features_are_fine(name: str) -> None:
    assert scale_problem(FINE[name]) is None


@pytest.mark.parametrize(
    ("x", "names", "words"),
    [
        (MIXED, [*"abcdef", "income"], ["column 'income': about 4.", "--normalize standard"]),
        (MIXED, [], ["column 6: about 4.", "the median column: 0.5"]),
        (torch.cat([FLAGS, AGE], dim=1), [], ["column 6: about 5"]),
        (INCOME, ["income"], ["column 'income'"]),
        (FLAGS * 1000, [], ["the median column: 5"]),
        (sparse(FLAGS * 1000), [], ["add --normalize row, as they are sparse"]),
        (sparse(MIXED), [], ["learn from them: scale such columns before"]),  # row does not help
        (MIXED * 1e30, [], ["column 6"]),
    ],
)
def test_raw_columns_are_named(x: Features, names: list[str], words: list[str]) -> None:
    line = scale_problem(x, names)
    assert line is not None
    assert "\n" not in line
    assert all(word in line for word in words), line


@pytest.mark.parametrize("name", FINE)
def test_usual_rows_are_fine(name: str) -> None:
    if name != "standardized":  # whose rows sum to about 0
        assert row_problem(FINE[name]) is None


TWO = torch.cat([FLAGS, INCOME, 2 * INCOME], dim=1)


@pytest.mark.parametrize(
    ("x", "names", "words"),
    [
        (MIXED, [*"abcdef", "income"], ["mostly column 'income' (100%)", "--normalize standard"]),
        (normalized_rows(MIXED), [], ["mostly column 6 (100%)", "use --normalize standard"]),
        (TWO, [], ["mostly column 7 (67%)"]),
        (sparse(MIXED), [], ["mostly column 6", "the other columns: scale such columns before"]),
        (INCOME, [], ["mostly column 0 (100%)"]),
        (torch.tensor([[1.0, -0.999], [-1.0, 1.002]]), [], ["are close to 0", "--normalize sta"]),
    ],
)
def test_sums_of_rows_that_hide_other_columns_are_named(
    x: Features, names: list[str], words: list[str]
) -> None:
    line = row_problem(x, names)
    assert line is not None
    assert line.startswith("sums of features by which --normalize row divides are ")
    assert "\n" not in line
    assert all(word in line for word in words), line


def test_a_run_says_so_once_and_only_where_it_helps(
    make_graph: MakeGraph, caplog: pytest.LogCaptureFixture
) -> None:
    graph = make_graph(60)
    raw = replace(graph, x=torch.cat([torch.as_tensor(graph.x), 1e4 * torch.rand(60, 1)], dim=1))
    go(raw, rounds=1)
    assert [m[:49] for m in caplog.messages] == [
        "features are on very different or large scales (c"
    ]
    for options in ({"normalize": "standard"}, {"features": "degree"}):
        go(raw, rounds=1, **options)
    go(graph, rounds=1)
    assert len(caplog.messages) == 1
    go(raw, rounds=1, normalize="row")
    words = torch.rand(60, 9, generator=DRAWS)
    go(replace(graph, x=words), rounds=1, normalize="row")
    assert [m[:43] for m in caplog.messages[1:]] == ["sums of features by which --normalize row d"]


def test_columns_that_lose_distinct_values_are_named() -> None:
    n = torch.arange(300, dtype=torch.float64)
    outlier = torch.where(n == 7, 1e15, n)
    noise = torch.randn(300, generator=DRAWS, dtype=torch.float64)
    x = torch.stack([1.7e9 + n, noise, outlier, n % 3], 1)
    names = ("time", "noise", "sum", "kind")
    line = narrowing_problem(x, x.float(), names, standardized=False)
    assert line is not None
    assert "(column 'time': 300 become 3), and models cannot tell them apart: add --nor" in line
    fitted = sum_by_client(x, torch.zeros(300, dtype=torch.int64), 1).own_statistics()
    scaled = standardize(x, fitted.of_client(0)).float()
    line = narrowing_problem(x, scaled, (), standardized=True)
    assert line is not None
    assert (
        "(column 2: 300 become 2), and models cannot tell them apart: use --dtype float64" in line
    )
    others = [0, 1, 3]  # standardized, Unix times keep all of their values
    assert narrowing_problem(x[:, others], scaled[:, others], standardized=True) is None


def test_what_is_in_float32_or_stays_in_float64_loses_nothing() -> None:
    x = 1.7e9 + torch.arange(300, dtype=torch.float64)[:, None]
    assert narrowing_problem(x, x, standardized=False) is None
    assert narrowing_problem(x.float(), x.float(), standardized=False) is None
    assert narrowing_problem(x[:0], x[:0].float(), standardized=False) is None
    zero = torch.zeros(300, 1)  # constant on training nodes, so standardized to 0
    assert narrowing_problem(x, zero, standardized=True) is None


def test_a_few_equal_values_of_very_many_are_chance() -> None:
    x = torch.randn(200_000, 1, generator=DRAWS, dtype=torch.float64)
    assert len(x.float().unique()) < len(x.unique())
    assert narrowing_problem(x, x.float(), standardized=False) is None


def test_sparse_columns_are_looked_at_too() -> None:
    values = np.arange(900, dtype=np.float64).reshape(300, 3)
    values[:, 1] += 1.7e9
    rows = CSR.from_scipy(sp.csr_matrix(np.where(values % 2 == 0, values, 0)))
    assert rows.values is not None
    narrow = rows.with_values(rows.values.float())
    line = narrowing_problem(rows, narrow, standardized=False)
    assert line is not None
    assert "(column 1: " in line
