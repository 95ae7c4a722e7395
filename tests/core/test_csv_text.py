"""Laws of tables as CSV: no name runs in a spreadsheet, and every name comes back."""

import csv
import io

import pytest
from hypothesis import given
from hypothesis import strategies as st

from silograph.core.files import from_cell, to_cell, to_text


@given(st.text(alphabet="'=+-@\t\r0a. ", max_size=6))
def test_names_come_back_and_begin_no_formula(name: str) -> None:
    cell = str(to_cell(name))
    assert from_cell(cell) == name
    if cell[:1] in tuple("=+-@\t\r"):
        float(cell)  # a number is none


@pytest.mark.parametrize("value", [-1, -1.5, None, "-1.5", "+3", "client_0", "'quoted'", "a=b", ""])
def test_other_values_stay(value: object) -> None:
    assert to_cell(value) == value


@pytest.mark.parametrize("name", ["=1+1", "+cmd", "-cmd", "@sum", "\t=1", "\r=1", "'=1", "-1-1"])
def test_a_table_has_them_as_text(name: str) -> None:
    (row,) = csv.reader(io.StringIO(to_text([[name, -1]]), newline=""))
    assert row == [f"'{name}", "-1"]
