"""Laws of the line on scales of features: who gets it, and who does not."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from runs import MakeGraph, go
from silograph.graph.column_statistics import standardize, sum_by_client
from silograph.graph.csr import CSR
from silograph.graph.features import made_features, row_problem, scale_problem
from silograph.graph.graph import Features, normalized_rows
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
