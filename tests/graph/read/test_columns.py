"""Laws of columns, over all readers: no value, key or missing mark changes on the way in."""

from pathlib import Path

import numpy as np
import pytest
import torch

from every_reader import READERS, Reader, dense, numeric_table

every_reader = pytest.mark.parametrize("read", READERS.values(), ids=READERS)
SECONDS = [1_700_000_000.25 + 0.5 * row for row in range(12)]  # one value in float32
CENTS = [16_777_217 + row for row in range(12)]  # the first whole numbers that float32 lacks
TINY = [1 + 1e-12 * row for row in range(12)]


@every_reader
@pytest.mark.parametrize("column", [SECONDS, CENTS, TINY], ids=["seconds", "cents", "tiny"])
def test_features_keep_every_value(read: Reader, column: list[float], tmp_path: Path) -> None:
    table = numeric_table({"plain": [row / 4 for row in range(12)], "exact": column})
    graph = read(tmp_path, table)
    assert dense(graph.x).dtype == torch.float64
    assert dense(graph.x).tolist() == table.x.tolist()


@every_reader
def test_features_are_float32_where_that_is_exact(read: Reader, tmp_path: Path) -> None:
    narrow = np.random.default_rng(0).normal(size=(2, 12)).astype(np.float32)
    table = numeric_table({"a": narrow[0].tolist(), "b": narrow[1].tolist()})
    graph = read(tmp_path, table)
    assert dense(graph.x).dtype == torch.float32
    assert dense(graph.x).tolist() == narrow.T.tolist()


@every_reader
def test_a_row_has_the_same_values_among_any_others(read: Reader, tmp_path: Path) -> None:
    column = [0.1, *SECONDS[1:6], 1 / 3, 7.0, 0.5]
    (tmp_path / "all").mkdir()
    among_all = dense(read(tmp_path / "all", numeric_table({"a": column})).x)
    for first in (0, 3, 6):
        (tmp_path / str(first)).mkdir()
        some = numeric_table({"a": column[first : first + 3]})
        alone = dense(read(tmp_path / str(first), some).x)
        assert alone.double().tolist() == among_all[first : first + 3].double().tolist()
