"""Raw tables made into folders of silos: the same columns, and both sides of an edge."""

import csv
import gzip
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import silograph as sg
from commands import Capture
from mistakes import raises_code
from silograph.cli import run_app
from silograph.core.errors import ConfigError, DataError
from silograph.graph.silos.data import silo_with_directions
from silograph.graph.silos.inspect import RatingSummary, SiloSummary, inspect_silos
from silograph.graph.silos.prepare import prepare
from silograph.graph.silos.schema import (
    BadCellError,
    Category,
    Flag,
    Number,
    Text,
    Time,
    number_of,
    parse_schema,
    time_of,
)

GRAPH = """
[nodes]
table = "accounts"
key = "id"
label = "fraud"
classes = ["no", "yes"]

[features.age]
type = "number"
indicator = true
[features.kind]
type = "category"
values = ["basic", "gold"]
[features.opened]
type = "time"
since = "2020-01-01"

[edges.payments]
source = "from"
target = "to"
weight = "amount"
repeated = "sum"
listed_by = "source"

[silos]
north = "N*"
south = "S*"
"""
NORTH = "id,opened,kind,age,fraud\nN1,2020-01-01,gold,30,no\nN2,2021-01-01,Basic,,yes\n"
SOUTH = "fraud;age;kind;id;opened\n;40,5;GOLD;S1;01.01.2020\nNA;20,5;basic;S2;01.01.2021\n"
NORTH_PAID = "from,to,amount\nN1,N2,1.5\nN2,N1,2.5\nN1,S1,4\nN1,S1,0.5\nN2,N2,9\nN1,X1,3\n"
SOUTH_PAID = "to;amount;from\nN1;2,25;S1\nS1;7;S2\nN2;1;S2\n"


def write(folder: Path, schema: str = GRAPH) -> Path:
    """Tables of two banks, in two hands, and the file of a schema."""
    for name in ("north", "south"):
        (folder / "raw" / name).mkdir(parents=True)
    (folder / "raw/north/accounts.csv").write_text(NORTH)
    with gzip.open(folder / "raw/north/payments.csv.gz", "wt") as file:
        file.write(NORTH_PAID)
    (folder / "raw/south/accounts.csv").write_text(SOUTH)
    (folder / "raw/south/payments.txt").write_text(SOUTH_PAID)
    path = folder / "schema.toml"
    path.write_text(schema)
    return path


def edges_of(folder: Path) -> set[tuple[str | float, ...]]:
    silo = sg.read_silo(folder)
    row, column = silo.graph.edge_index
    weight = silo.edge_weight
    assert weight is not None
    keys = silo.keys
    inside = zip(row.tolist(), column.tolist(), weight.tolist(), strict=True)
    return {(*sorted((keys[a], keys[b])), w) for a, b, w in inside}


def cross_of(folder: Path) -> set[tuple[str | float, ...]]:
    silo = sg.read_silo(folder)
    cross = silo.cross
    weights = [1.0] * len(cross.row) if cross.weight is None else cross.weight.tolist()
    rows = zip(cross.row.tolist(), cross.slot.tolist(), weights, strict=True)
    return {(*sorted((silo.keys[r], cross.keys[s])), w) for r, s, w in rows}


# --- a schema -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[nodes", "TOML"),
        ("x = 1", "section"),
        ('[ratings]\nuser="u"\nitem="i"\nrating="r"\n[edges.a]\n', "edges"),
        ("[features.a]\ntype = 'number'", "neither"),
        ('[nodes]\ntable="a"\nkey="k"\nclass=["a"]', "classes"),
        (GRAPH.replace('"number"', '"numbers"'), "did you mean 'number'"),
        (GRAPH.replace("indicator", "indicators"), "did you mean 'indicator'"),
        (GRAPH.replace('"sum"', '"total"'), "repeated"),
        (GRAPH.replace('["no", "yes"]', '["no", "No"]'), "differ without case"),
        (GRAPH.replace('["basic", "gold"]', '["gold", "GOLD"]'), "differ without case"),
    ],
)
def test_a_schema_is_checked(text: str, words: str) -> None:
    with pytest.raises(DataError, match=r"^s\.toml: ") as caught:
        parse_schema(text, "s.toml")
    assert words in str(caught.value)


@given(
    st.floats(-1e9, 1e9, allow_nan=False).map(lambda x: round(x, 3)),
    st.sampled_from([(".", ""), (",", ""), (",", ".")]),
)
def test_numbers_are_read_by_their_decimal_mark(value: float, marks: tuple[str, str]) -> None:
    decimal, group = marks
    text = f"{value:,.3f}" if group else f"{value:.3f}"
    swapped = text.replace(",", "group").replace(".", decimal).replace("group", group)
    assert number_of(swapped, decimal) == value


@pytest.mark.parametrize("cell", ["", "x", "1.5", "1,2,3", "nan", "inf", "1e999"])
def test_what_is_no_number_with_a_decimal_comma_is_refused(cell: str) -> None:
    with pytest.raises(BadCellError):
        number_of(cell, ",")


@pytest.mark.parametrize(
    ("cell", "format"),
    [
        ("2024-03-05", None),
        ("2024-03-05T00:00:00Z", None),
        ("2024-03-05T02:00:00+02:00", None),
        ("05.03.2024", None),
        ("05.03.2024 00:00", None),
        ("3/5/2024", "%m/%d/%Y"),
        ("1709596800", "unix"),
    ],
)
def test_times_of_all_forms_are_one(cell: str, format: str | None) -> None:
    assert time_of(cell, format).isoformat() == "2024-03-05T00:00:00+00:00"


def test_a_date_that_could_be_two_is_refused() -> None:
    with pytest.raises(BadCellError, match="format"):
        time_of("03/05/2024", None)


# --- features -------------------------------------------------------------------------------------


def columns(feature: Any, cells: list[str | None], fitted: Any = None) -> dict[str, list[float]]:
    values = feature.read(cells, ".")
    made = feature.columns("x", values, feature.fit(values) if fitted is None else fitted)
    return {name: column.tolist() for name, column in made.items()}


def test_a_missing_number_becomes_the_mean_and_is_marked() -> None:
    made = columns(Number(indicator=True), ["1", None, "3"])
    assert made == {"x": [1, 2, 3], "x missing": [0, 1, 0]}
    assert columns(Number(fill_value=-1), [None, "3"]) == {"x": [-1, 3]}
    assert columns(Number(), [None, None]) == {"x": [0, 0]}


@given(st.lists(st.floats(-1e6, 1e6), min_size=2, max_size=30))
def test_scales_against_numpy(values: list[float]) -> None:
    cells: list[str | None] = [repr(v) for v in values]
    x = np.array(values)
    standard = np.array(columns(Number(scale="standard"), cells)["x"])
    if x.std() > 1e-6 * max(1, abs(x).max()):
        np.testing.assert_allclose(standard, (x - x.mean()) / x.std(), rtol=1e-6, atol=1e-9)
    logged = np.array(columns(Number(log=True), cells)["x"])
    np.testing.assert_allclose(logged, np.sign(x) * np.log1p(abs(x)))
    ranks = np.array(columns(Number(scale="rank"), cells)["x"])
    assert ranks.min() >= 0
    assert ranks.max() <= 1
    order = np.argsort(x, kind="stable")
    assert (np.diff(ranks[order]) >= 0).all()


def test_given_mean_and_deviation_are_every_silos() -> None:
    agreed = Number(scale="standard", mean=10, deviation=2)
    assert columns(agreed, ["12", None]) == {"x": [1, 0]}


def test_categories_count_without_case_and_others_by_leave() -> None:
    words = Category(values=("basic", "gold"))
    assert columns(words, ["Gold", "basic", None]) == {"x basic": [0, 1, 0], "x gold": [1, 0, 0]}
    with pytest.raises(BadCellError, match="other = true"):
        words.read(["silver"], ".")
    named = columns(Category(values=("a",), other=True, indicator=True), ["b", None])
    assert named == {"x a": [0, 0], "x other": [1, 0], "x missing": [0, 1]}


def test_flags() -> None:
    assert columns(Flag(), ["Yes", "0", None]) == {"x": [1, 0, 0]}
    assert columns(Flag(true=("ja",), false=("nein",)), ["JA", "nein"]) == {"x": [1, 0]}
    with pytest.raises(BadCellError):
        Flag().read(["maybe"], ".")


def test_cycles_close() -> None:
    made = columns(Time(cyclic=("month", "weekday")), ["2024-01-01", "2025-01-01", None])
    assert made["x month sin"] == [0, 0, 0]
    assert made["x month cos"] == [1, 1, 0]
    assert math.isclose(made["x"][1] - made["x"][0], 366 / 365.25)
    assert made["x weekday sin"][0] == 0  # a Monday


def test_texts_are_lengths_or_hashes() -> None:
    assert columns(Text(), ["abc", None]) == {"x": [math.log(4), 0]}
    hashed = columns(Text(treat="hash", size=8), ["one two", "two one", None])
    assert len(hashed) == 8
    first, second, none = zip(*hashed.values(), strict=True)
    assert first == second
    assert math.isclose(sum(v * v for v in first), 1)
    assert not any(none)


# --- folders --------------------------------------------------------------------------------------


def test_tables_of_two_kinds_have_the_same_columns(tmp_path: Path) -> None:
    made = prepare(tmp_path / "raw", schema=write(tmp_path), out=tmp_path / "silos")
    assert [silo.name for silo in made] == ["north", "south"]
    north, south = sg.read_silos(tmp_path / "silos").members
    names = ("age", "age missing", "kind basic", "kind gold", "opened")
    assert north.feature_names == south.feature_names == names
    assert north.keys == ["N1", "N2"]
    assert north.y.tolist() == [0, 1]
    assert south.y.tolist() == [-1, -1]
    assert south.class_names == ("no", "yes")
    np.testing.assert_allclose(np.asarray(north.x)[:, :4], [[30, 0, 0, 1], [30, 1, 1, 0]])
    np.testing.assert_allclose(np.asarray(south.x)[:, :4], [[40.5, 0, 0, 1], [20.5, 0, 1, 0]])
    np.testing.assert_allclose(np.asarray(north.x)[:, 4], np.asarray(south.x)[:, 4])


def test_edges_add_up_on_both_sides(tmp_path: Path) -> None:
    made = prepare(tmp_path / "raw", schema=write(tmp_path), out=tmp_path / "silos")
    assert edges_of(tmp_path / "silos/north") == {("N1", "N2", 4.0)}
    assert edges_of(tmp_path / "silos/south") == {("S1", "S2", 7.0)}
    both = {("N1", "S1", 6.75), ("N2", "S2", 1.0)}
    assert cross_of(tmp_path / "silos/north") == cross_of(tmp_path / "silos/south") == both
    notes = " ".join(made[0].notes)
    assert "left out: 1 edge from a node to itself" in notes
    assert "left out: 1 edge to nodes of no table and no silo that the schema names" in notes
    assert len(sg.run(tmp_path / "silos", rounds=1, hidden="2", split="1/0/0").rounds) == 1


def test_silos_alone_hand_over_lists_and_get_the_same(tmp_path: Path) -> None:
    schema = write(tmp_path)
    prepare(tmp_path / "raw", schema=schema, out=tmp_path / "together")
    for name in ("north", "south"):
        alone = prepare(tmp_path / "raw" / name, schema=schema, out=tmp_path / "first" / name)
        assert cross_of(tmp_path / "first" / name) == set()
        assert any("whose list is missing" in note for note in alone[0].notes)
    for name, other in (("north", "south"), ("south", "north")):
        handed = tmp_path / "first" / other / "edges_for" / f"{other}_to_{name}.csv"
        out = tmp_path / "alone" / name
        prepare(tmp_path / "raw" / name, schema=schema, out=out, received=[handed])
        for table in ("nodes", "features", "edges", "cross_edges"):
            files = [tmp_path / way / name / f"{table}.csv" for way in ("together", "alone")]
            one, two = (sorted(file.read_text().splitlines()) for file in files)
            assert one == two


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ("payments,0,S1,S2,1", "an edge between a node of north and one of south"),
        ("payments,0,S1,X9,1", "an edge between a node of north and one of south"),
        ("payments,0,N1,N2,1", "an edge between a node of north and one of south"),
        ("payments,0,S1,N1,-1", "a number from 0"),
        ("payments,0,S1,N1,1e999", "numbers of a row and a weight"),
        ("payments,x,S1,N1,1", "numbers of a row and a weight"),
        ("loans,0,S1,N1,1", "a table of edges"),
    ],
)
def test_a_list_that_lies_is_refused(tmp_path: Path, row: str, words: str) -> None:
    schema, handed = write(tmp_path), tmp_path / "south_to_north.csv"
    handed.write_text(f"table,row,source,target,weight\n{row}\n")
    with raises_code(DataError, "bad-cell", row=2) as caught:
        prepare(tmp_path / "raw/north", schema=schema, out=tmp_path / "a", received=[handed])
    assert words in str(caught.value)
    assert not (tmp_path / "a").exists()


def test_a_list_of_nobody_is_refused(tmp_path: Path) -> None:
    schema, handed = write(tmp_path), tmp_path / "east_to_north.csv"
    handed.write_text("table,row,source,target,weight\n")
    with pytest.raises(DataError, match="SILO_to_north"):
        prepare(tmp_path / "raw/north", schema=schema, out=tmp_path / "a", received=[handed])


@pytest.mark.parametrize(
    ("rule", "weight"), [("sum", 4), ("mean", 2), ("count", 2), ("first", 1.5), ("last", 2.5)]
)
def test_repeated_edges(tmp_path: Path, rule: str, weight: float) -> None:
    schema = write(tmp_path, GRAPH.replace('repeated = "sum"', f'repeated = "{rule}"'))
    prepare(tmp_path / "raw/north", schema=schema, out=tmp_path / "a")
    assert edges_of(tmp_path / "a") == {("N1", "N2", weight)}


def test_new_tables_are_prepared_by_what_was_fitted(tmp_path: Path) -> None:
    schema = write(tmp_path, GRAPH.replace("indicator = true", 'scale = "standard"'))
    prepare(tmp_path / "raw/north", schema=schema, out=tmp_path / "old")
    (tmp_path / "new").mkdir()
    (tmp_path / "new/accounts.csv").write_text(NORTH + "N3,2022-01-01,gold,90,\n")
    (tmp_path / "new/payments.csv").write_text(NORTH_PAID)
    out = tmp_path / "out"
    prepare(tmp_path / "new", like=tmp_path / "old", out=out, name="north")
    old, new = sg.read_silo(tmp_path / "old"), sg.read_silo(out)
    np.testing.assert_array_equal(np.asarray(old.x), np.asarray(new.x)[:2])
    assert json.loads((out / "prepared.json").read_text())["schema"] == schema.read_text()


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("gold,30", "silver,30", "line 2, column 'kind': got 'silver'"),
        ("gold,30", "gold,old", "line 2, column 'age': got 'old'"),
        ("2021-01-01", "soon", "line 3, column 'opened': got 'soon'"),
        ("N2,2021", "N1,2021", "line 3, column 'id': got 'N1', which line 2 has, too"),
        (",yes", ",perhaps", "line 3, column 'fraud': got 'perhaps'"),
        ("kind", "sort", "expected a column 'kind' for feature kind"),
        ("N2,", "N2,,,", "line 3: expected 5 cells"),
    ],
)
def test_a_bad_cell_is_named_and_nothing_is_written(
    tmp_path: Path, old: str, new: str, words: str
) -> None:
    schema, accounts = write(tmp_path), tmp_path / "raw/north/accounts.csv"
    accounts.write_text(NORTH.replace(old, new))
    with pytest.raises(DataError) as caught:
        prepare(tmp_path / "raw/north", schema=schema, out=tmp_path / "a")
    assert words in str(caught.value)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["raw", "schema.toml"]


def test_other_bytes_than_text_are_named(tmp_path: Path) -> None:
    schema = write(tmp_path)
    (tmp_path / "raw/north/accounts.csv").write_bytes(
        NORTH.replace("gold", "gold\xe9").encode("latin-1")
    )
    with pytest.raises(DataError, match="UTF-8"):
        prepare(tmp_path / "raw/north", schema=schema, out=tmp_path / "a")


def test_what_does_not_go_together_is_refused(tmp_path: Path) -> None:
    schema = write(tmp_path)
    with pytest.raises(ConfigError, match="got neither"):
        prepare(tmp_path / "raw", out=tmp_path / "a")
    with pytest.raises(ConfigError, match="got both"):
        prepare(tmp_path / "raw", out=tmp_path / "a", schema=schema, like=tmp_path)
    with pytest.raises(ConfigError, match="one silo"):
        prepare(tmp_path / "raw", schema=schema, out=tmp_path / "a", received=["x"])
    with raises_code(DataError, "missing-file"):
        prepare(tmp_path, schema=schema, out=tmp_path / "a")
    with raises_code(ConfigError, "existing-output"):
        prepare(tmp_path / "raw", schema=schema, out=tmp_path / "raw")


def test_times_of_nodes_split_them(tmp_path: Path) -> None:
    schema = write(tmp_path, GRAPH.replace('key = "id"', 'key = "id"\ntime = "opened"'))
    prepare(tmp_path / "raw", schema=schema, out=tmp_path / "silos")
    times = sg.read_silo(tmp_path / "silos/south").time
    assert times is not None
    assert times.tolist() == [1577836800, 1609459200]  # the first days of 2020 and 2021
    sg.run(tmp_path / "silos", rounds=1, hidden="2", split="time:time:0.5/0/0.5")


def test_a_silo_is_called_by_the_pattern_of_its_keys(tmp_path: Path) -> None:
    schema = write(tmp_path)
    (tmp_path / "raw/north").rename(tmp_path / "tables")
    (made,) = prepare(tmp_path / "tables", schema=schema, out=tmp_path / "a")
    assert made.name == sg.read_silo(tmp_path / "a").name == "north"
    assert (tmp_path / "a/edges_for/north_to_south.csv").exists()
    (tmp_path / "tables").rename(tmp_path / "new")
    (again,) = prepare(tmp_path / "new", like=tmp_path / "a", out=tmp_path / "b")
    assert again.name == "north"
    with pytest.raises(DataError, match="keys such as 'N1'"):
        prepare(tmp_path / "new", schema=schema, out=tmp_path / "c", name="south")


def test_a_list_of_ones_own_is_refused(tmp_path: Path) -> None:
    schema, handed = write(tmp_path), tmp_path / "north_to_south.csv"
    handed.write_text("table,row,source,target,weight\n")
    with pytest.raises(DataError, match="of another silo"):
        prepare(tmp_path / "raw/north", schema=schema, out=tmp_path / "a", received=[handed])


def test_a_listed_word_is_a_value_whatever_it_means_elsewhere(tmp_path: Path) -> None:
    text = GRAPH.replace('["no", "yes"]', '["None", "yes"]')
    schema = write(tmp_path, text.replace('["basic", "gold"]', '["NA", "gold"]'))
    accounts = tmp_path / "raw/north/accounts.csv"
    accounts.write_text(NORTH.replace("Basic", "NA").replace(",no", ",None"))
    prepare(tmp_path / "raw/north", schema=schema, out=tmp_path / "a")
    silo = sg.read_silo(tmp_path / "a")
    assert silo.y.tolist() == [0, 1]
    assert np.asarray(silo.x)[:, 2:4].tolist() == [[0, 1], [1, 0]]


def test_a_list_does_not_count_twice(tmp_path: Path) -> None:
    schema, handed = write(tmp_path), tmp_path / "south_to_north.csv"
    handed.write_text("table,row,source,target,weight\npayments,0,S1,N1,1\n")
    with pytest.raises(ConfigError, match="one list of south"):
        prepare(tmp_path / "raw/north", schema=schema, out=tmp_path / "a", received=[handed] * 2)
    assert not (tmp_path / "a").exists()


def test_further_tables_may_have_no_labels(tmp_path: Path) -> None:
    schema = write(tmp_path)
    prepare(tmp_path / "raw/north", schema=schema, out=tmp_path / "a")
    accounts = tmp_path / "raw/north/accounts.csv"
    rows = list(csv.reader(accounts.read_text().splitlines()))
    label = rows[0].index("fraud")
    text = "".join(",".join([*r[:label], *r[label + 1 :]]) + "\n" for r in rows)
    accounts.write_text(text)
    with raises_code(DataError, "missing-column", column="fraud"):
        prepare(tmp_path / "raw/north", schema=schema, out=tmp_path / "b")
    prepare(tmp_path / "raw/north", like=tmp_path / "a", out=tmp_path / "b")
    with_labels, without = sg.read_silo(tmp_path / "a"), sg.read_silo(tmp_path / "b")
    assert np.asarray(with_labels.x).tolist() == np.asarray(without.x).tolist()
    assert not bool(without.graph.labeled.any())


# --- ratings --------------------------------------------------------------------------------------


RATINGS = """
[ratings]
user = ["user", "customer"]
item = ["item", "product"]
rating = ["rating", "stars"]
time = "time"
scale = [0.5, 5]
"""


def test_ratings_of_shops_that_write_them_differently(tmp_path: Path) -> None:
    (tmp_path / "raw").mkdir()
    (tmp_path / "raw/a.csv").write_text("user;item;rating;time\nu;i;3,5;20\nu;i;2,0;10\nv;i;1;5\n")
    (tmp_path / "raw/b.csv").write_text("customer\tproduct\tstars\nu\ti\t4/5\nw\tj\t2.5/5\n")
    (tmp_path / "s.toml").write_text(RATINGS)
    made = prepare(tmp_path / "raw", schema=tmp_path / "s.toml", out=tmp_path / "silos")
    assert made[0].counts == "2 ratings of 2 users and 1 item"
    assert made[0].notes == ("1 repeated rating: last",)
    a = (tmp_path / "silos/a/ratings.csv").read_text().splitlines()
    assert a == ["user,item,rating,time", "u,i,3.5,20", "v,i,1,5"]
    members = sg.read_silos(tmp_path / "silos").members
    assert inspect_silos(members).silos == (
        RatingSummary("a", 2, 1, 2, 2.25, 1, 1),
        RatingSummary("b", 2, 2, 2, 3.25, 1, 1),
    )
    (tmp_path / "raw/b.csv").write_text("customer\tproduct\tstars\nu\ti\t4/10\n")
    with raises_code(DataError, "bad-cell", row=2, column="stars", got="4/10"):
        prepare(tmp_path / "raw", schema=tmp_path / "s.toml", out=tmp_path / "again")


# --- a first schema, and a look at folders --------------------------------------------------------


def bank(folder: Path, name: str, n: int, rng: np.random.Generator) -> None:
    """A bank of n accounts whose transfers lead to its own accounts, and to others'."""
    (folder / name).mkdir(parents=True)
    letter = name[0].upper()
    kinds, leaks = rng.choice(["a", "b"], n), rng.integers(0, 2, n)
    rows = [
        f"{letter}-{i},{rng.integers(18, 80)},{k},2020-01-{1 + i % 28:02d},{leak},{leak}"
        for i, (k, leak) in enumerate(zip(kinds, leaks, strict=True))
    ]
    head = "account,age,kind,opened,hint,fraud"
    (folder / name / "accounts.csv").write_text("\n".join([head, *rows]) + "\n")
    ends = [f"{letter}-{rng.integers(n)},{letter}-{rng.integers(n)},1.5" for _ in range(3 * n)]
    ends += [
        f"{letter}-{rng.integers(n)},{'S' if letter == 'N' else 'N'}-{i},2.5" for i in range(9)
    ]
    (folder / name / "transfers.csv").write_text("\n".join(["payer,payee,amount", *ends]) + "\n")


def test_the_guessed_schema_prepares_the_tables_it_was_guessed_from(
    tmp_path: Path, capsys: Capture
) -> None:
    rng = np.random.default_rng(0)
    for name in ("north", "south"):
        bank(tmp_path / "raw", name, 60, rng)
    assert run_app(["prepare", str(tmp_path / "raw"), "--guess"]) == 0
    text = capsys.readouterr().out
    (tmp_path / "s.toml").write_text(text)
    schema = parse_schema(text, "guessed")
    assert schema.nodes is not None
    assert (schema.nodes.key, schema.nodes.label) == ("account", "fraud")
    kinds = {name: feature.type for name, feature in schema.features.items()}
    assert kinds == {"age": "number", "kind": "category", "opened": "time", "hint": "flag"}
    assert schema.edges["transfers"].listed_by == "source"
    assert schema.silos == {"north": "N-*", "south": "S-*"}
    flags = ["--schema", str(tmp_path / "s.toml"), "--out", str(tmp_path / "silos")]
    assert run_app(["prepare", str(tmp_path / "raw"), *flags]) == 0
    assert "north: 60 nodes, 60 labeled" in capsys.readouterr().out
    assert run_app(["check", str(tmp_path / "silos")]) == 0
    shown = capsys.readouterr().out
    assert "hint alone tells who is 'no'" in shown or "hint alone tells who is '0'" in shown
    assert max(map(len, shown.splitlines())) < 100


def test_edges_that_one_silo_lists_are_counted(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    for name in ("north", "south"):
        bank(tmp_path / "raw", name, 60, rng)
    text = sg.guess_schema(tmp_path / "raw")
    crossing = {}
    for name in ("north", "south"):
        lines = (tmp_path / "raw" / name / "transfers.csv").read_text().splitlines()[1:]
        pairs = {tuple(line.split(",")[:2]) for line in lines}
        crossing[name] = {frozenset(pair) for pair in pairs if pair[0][0] != pair[1][0]}
    alone = {
        "north": len(crossing["north"] - crossing["south"]),
        "south": len(crossing["south"] - crossing["north"]),
    }
    assert min(alone.values()) > 0
    for by in ("source", "both"):
        (tmp_path / "s.toml").write_text(
            text.replace('listed_by = "source"', f'listed_by = "{by}"')
        )
        made = prepare(tmp_path / "raw", schema=tmp_path / "s.toml", out=tmp_path / by)
        warnings = inspect_silos(sg.read_silos(tmp_path / by).members).warnings
        for silo, other in zip(made, ("south", "north"), strict=True):
            count = f"{alone[silo.name]} edges to {other} that"
            assert any(count in note for note in silo.notes) is (by == "both")
            assert any(f"{silo.name} lists {count}" in line for line in warnings) is (by == "both")


def test_a_name_with_a_line_break_makes_no_line_of_a_schema(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text('key,"x\n[silos]\nz = ""*""",label\nk,1,0\nl,2,1\nm,,1\n')
    text = sg.guess_schema(tmp_path)
    assert "\n[silos]\nz" not in text
    parse_schema(text, "guessed")


def test_what_looks_wrong_is_named(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    for name, scale in (("north", 1), ("south", 100)):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "silo.toml").write_text(f'name = "{name}"\nfeatures = 4\nclasses = ["a", "b"]\n')
        rows = [
            f"k{i},{rng.random() * scale},{i},{i * 7 % 40 + (scale > 1) * 40},5" for i in range(40)
        ]
        (folder / "features.csv").write_text("\n".join(["id,x,row,key,same", *rows]) + "\n")
        labels = [f"k{i},{'a' if scale > 1 else ('a', 'b')[i % 2]}" for i in range(40)]
        (folder / "nodes.csv").write_text("\n".join(["id,label", *labels]) + "\n")
        (folder / "edges.csv").write_text("source,target\nk0,k1\n")
        (folder / "cross_edges.csv").write_text("own,silo,remote\n")
    made = inspect_silos(sg.read_silos(tmp_path).members)
    assert made.silos[0] == SiloSummary(
        "north", 40, 40, {"a": 0.5, "b": 0.5}, 1, 0, 0.05, 38, (38, 2), {}
    )
    text = "\n".join(made.warnings)
    for words in (
        "x differs between north and south",
        "row numbers the rows of a silo",
        "key has another whole number at each node",
        "same has one value everywhere (5)",
        "south has no 'b'",
        "north: 38 nodes of 40 without an edge",
    ):
        assert words in text
    assert made.columns[0].drift == max(column.drift for column in made.columns)
    for column in made.columns:
        assert [sum(counts) for counts in column.histogram] == [40, 40]


def test_figures_of_an_inspection_are_those_of_the_tables(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    for name in ("north", "south"):
        bank(tmp_path / "raw", name, 60, rng)
    (tmp_path / "s.toml").write_text(sg.guess_schema(tmp_path / "raw"))
    accounts = tmp_path / "raw/south/accounts.csv"
    head, first, *others = accounts.read_text().splitlines()
    key, _, *cells = first.split(",")  # without an age
    accounts.write_text("\n".join([head, ",".join([key, "", *cells]), *others]) + "\n")
    prepare(tmp_path / "raw", schema=tmp_path / "s.toml", out=tmp_path / "silos")
    silos = sg.read_silos(tmp_path / "silos")
    made = inspect_silos(silos.members)
    for silo, member in zip(made.silos, silos.members, strict=True):
        assert isinstance(silo, SiloSummary)
        degree = np.asarray(member.adj.degree) + np.bincount(member.cross.row, minlength=60)
        groups = [(degree == 0).sum(), (degree == 1).sum()]
        groups += [((degree >= 2**k) & (degree < 2 ** (k + 1))).sum() for k in range(1, 9)]
        assert list(silo.degrees) == groups[: len(silo.degrees)]
        assert sum(silo.degrees) == 60
        gaps = {"age": int(silo.silo == "south"), "kind": 0, "opened": 0, "hint": 0}
        assert silo.missing == gaps
    # A column for other words is there at all silos by design, whether any has such a word.
    assert not any("kind other" in line for line in made.warnings)


def ways_of(folder: Path) -> dict[tuple[str, str], float]:
    """The weight of every edge of a silo from a source to a target."""
    silo = silo_with_directions(sg.read_silo(folder))
    cross, keys, weight = silo.cross, silo.keys, silo.edge_weight
    assert weight is not None
    assert cross.weight is not None
    row, column = silo.graph.edge_index.tolist()
    ways = {
        (keys[a], keys[b]): w for a, b, w in zip(row, column, weight[:, 0].tolist(), strict=True)
    }
    for a, b, (out, back) in zip(
        cross.row.tolist(), cross.slot.tolist(), cross.weight.tolist(), strict=True
    ):
        ways |= {(keys[a], cross.keys[b]): out, (cross.keys[b], keys[a]): back}
    return {edge: w for edge, w in ways.items() if not math.isnan(w)}


def test_payments_know_who_paid(tmp_path: Path) -> None:
    """Each direction is combined by itself, alike at both banks, together and one by one."""
    schema = write(
        tmp_path, GRAPH.replace('listed_by = "source"', 'listed_by = "source"\ndirected = true')
    )
    prepare(tmp_path / "raw", schema=schema, out=tmp_path / "silos")
    north = {("N1", "N2"): 1.5, ("N2", "N1"): 2.5, ("N1", "S1"): 4.5, ("S1", "N1"): 2.25}
    assert ways_of(tmp_path / "silos/north") == north | {("S2", "N2"): 1.0}
    south = {("S2", "S1"): 7.0, ("N1", "S1"): 4.5, ("S1", "N1"): 2.25, ("S2", "N2"): 1.0}
    assert ways_of(tmp_path / "silos/south") == south
    for name in ("north", "south"):
        prepare(tmp_path / "raw" / name, schema=schema, out=tmp_path / "first" / name)
    for name, other in (("north", "south"), ("south", "north")):
        received = [tmp_path / f"first/{other}/edges_for/{other}_to_{name}.csv"]
        prepare(tmp_path / "raw" / name, schema=schema, out=tmp_path / name, received=received)
        assert ways_of(tmp_path / name) == ways_of(tmp_path / "silos" / name)
    result = sg.run(tmp_path / "silos", directed="both", rounds=1, split="0.5/0/0.5", hidden=4)
    assert result.config.directed == "both"


def test_edges_of_a_table_without_directions_go_both_ways_beside_others(tmp_path: Path) -> None:
    more = '[edges.friends]\nsource = "a"\ntarget = "b"\n\n[silos]'
    text = GRAPH.replace("[silos]", more).replace(
        'repeated = "sum"', 'repeated = "sum"\ndirected = true'
    )
    schema = write(tmp_path, text)
    (tmp_path / "raw/north/friends.csv").write_text("a,b\nN1,N2\nN2,S2\n")
    (tmp_path / "raw/south/friends.csv").write_text("a,b\nS2,N2\nS1,S2\n")
    prepare(tmp_path / "raw", schema=schema, out=tmp_path / "silos")
    ways = ways_of(tmp_path / "silos/north")
    assert (ways["N1", "N2"], ways["N2", "N1"]) == (2.5, 3.5)
    assert (ways["N2", "S2"], ways["S2", "N2"]) == (1.0, 2.0)
    south = ways_of(tmp_path / "silos/south")
    assert (south["S2", "S1"], south["S1", "S2"]) == (8.0, 1.0)
    assert (south["N2", "S2"], south["S2", "N2"]) == (1.0, 2.0)


def silo_with_edge_to(tmp_path: Path, name: str, other: str, direction: str) -> None:
    """A folder with two nodes, whose first has an edge with the first of another silo."""
    folder = tmp_path / name
    folder.mkdir()
    (folder / "silo.toml").write_text(
        f'name = "{name}"\nfeatures = 0\nclasses = ["x"]\ndirected = true\n'
    )
    (folder / "nodes.csv").write_text(f"id,label\n{name}1,x\n{name}2,x\n")
    (folder / "edges.csv").write_text(f"source,target\n{name}1,{name}2\n")
    (folder / "cross_edges.csv").write_text(
        f"own,silo,remote,direction\n{name}1,{other},{other}1,{direction}\n"
    )


@pytest.mark.parametrize(("direction", "counts"), [("in", 0), ("out", 2)])
def test_directions_are_part_of_what_both_silos_list(
    tmp_path: Path, direction: str, counts: int
) -> None:
    """An edge that leaves both silos is none that the other lists; training refuses it."""
    silo_with_edge_to(tmp_path, "a", "b", "out")
    silo_with_edge_to(tmp_path, "b", "a", direction)
    members = [sg.read_silo(tmp_path / name) for name in ("a", "b")]
    lines = [line for line in inspect_silos(members).warnings if "does not list" in line]
    assert len(lines) == counts
    if counts:
        assert lines[0].startswith("a lists 1 edge to b that b does not list")
        with pytest.raises(DataError, match="which does not list them with the same weights"):
            sg.run(tmp_path, rounds=1, features="degree", directed="along")
