"""Words of categories from several silos: their union by an oracle, and lists hold no counts."""

import csv
import tempfile
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import silograph as sg
from commands import Capture
from mistakes import raises_code
from silograph.cli import run_app
from silograph.core.errors import ConfigError, DataError
from silograph.graph.silos import categories
from silograph.graph.silos.categories import count_categories, join_categories

SCHEMA = """
[nodes]
table = "accounts"
key = "account"
classes = ["no"]

[features.kind]  # what was bought
type = "category"
values = 'counted'  # by all silos
other = true
min_count = 3
min_silos = {silos}
[features."home town"]
type = "category"
column = "town"
values = ["a", "counted"]
other = true
"""


def write(folder: Path, kinds: list[str], silos: int = 1) -> Path:
    """The schema beside a bank whose accounts are of these kinds."""
    (folder / "schema.toml").write_text(SCHEMA.format(silos=silos))
    (folder / "raw").mkdir(exist_ok=True)
    with (folder / "raw/accounts.csv").open("w", newline="") as file:
        rows = [(f"k{number}", kind, "a") for number, kind in enumerate(kinds)]
        csv.writer(file, lineterminator="\n").writerows([("account", "kind", "town"), *rows])
    return folder / "schema.toml"


WORDS = st.sampled_from(["gold", "Gold", "basic", "NA", "", "a,b", "-3", '"x"', "ß", "é"])


@settings(max_examples=25)
@given(
    st.lists(st.lists(WORDS, min_size=1, max_size=30), min_size=1, max_size=3), st.integers(1, 2)
)
def test_the_words_are_those_of_enough_nodes_at_enough_silos(
    banks: list[list[str]], silos: int
) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder, lists, votes = Path(name), list[Path](), Counter[str]()
        for number, kinds in enumerate(banks):
            schema = write(folder, kinds, silos)
            lists.append(folder / f"{number}.csv")
            written = count_categories(folder / "raw", schema=schema, out=lists[-1])
            counts = Counter(kind.casefold() for kind in kinds if kind not in ("", "NA"))
            frequent = sorted(word for word, n in counts.items() if n >= 3)
            assert written == {"kind": tuple(frequent)}
            votes.update(frequent)
            # Neither the order of rows nor the number of nodes beyond the least changes the list.
            again = write(folder, [*kinds, *frequent][::-1], silos)
            count_categories(folder / "raw", schema=again, out=folder / "again.csv")
            assert (folder / "again.csv").read_bytes() == lists[-1].read_bytes()
            (folder / "again.csv").unlink()
        expected = sorted(word for word, n in votes.items() if n >= silos)
        if not expected:
            with pytest.raises(DataError, match="expected a word of kind"):
                join_categories(folder / "schema.toml", lists)
            return
        text = join_categories(folder / "schema.toml", lists)
        assert text == join_categories(folder / "schema.toml", lists[::-1])
        (folder / "shared.toml").write_text(text)
        # Everything else, comments too, is as it was.
        before, after = SCHEMA.format(silos=silos).splitlines(), text.splitlines()
        assert [a for a, b in zip(after, before, strict=True) if a != b] == [after[8]]
        assert after[8].endswith("  # by all silos")
        sg.prepare(folder / "raw", schema=folder / "shared.toml", out=folder / "silo")
        silo = sg.read_silo(folder / "silo")
        assert silo.feature_names[: len(expected) + 1] == (
            *(f"kind {word}" for word in expected),
            "kind other",
        )
        x = np.asarray(silo.x)[:, : len(expected) + 1]
        words = {word: place for place, word in enumerate(expected)}
        for row, kind in zip(x, [*banks[-1], *frequent][::-1], strict=True):
            place = words.get(kind.casefold(), len(expected))
            assert row.tolist() == [kind not in ("", "NA") and i == place for i in range(len(row))]


def test_a_list_is_for_its_owner_and_goes_over_no_file(tmp_path: Path) -> None:
    schema, out = write(tmp_path, ["gold"] * 3), tmp_path / "a.csv"
    count_categories(tmp_path / "raw", schema=schema, out=out)
    assert out.stat().st_mode & 0o077 == 0
    assert out.read_text() == "feature,value\nkind,gold\n"
    with raises_code(ConfigError, "existing-output"):
        count_categories(tmp_path / "raw", schema=schema, out=out)


@pytest.mark.parametrize("word", ["=1+2", "@x", "+a", "-a", "x" * 101, "a\u202eb", "a\u200bb"])
def test_what_no_list_may_hold_stays_and_is_refused(
    tmp_path: Path, word: str, caplog: pytest.LogCaptureFixture
) -> None:
    schema, out = write(tmp_path, [word] * 3 + ["gold"] * 3), tmp_path / "a.csv"
    assert count_categories(tmp_path / "raw", schema=schema, out=out) == {"kind": ("gold",)}
    assert "left out: 1 word of kind" in caplog.text
    out.write_text(f"feature,value\nkind,gold\nkind,{word}\n")
    with pytest.raises(DataError, match=r"a.csv, line 3: expected a feature whose"):
        join_categories(schema, [out])


@pytest.mark.parametrize(
    ("data", "line"),
    [
        (b"", "in UTF-8, got something else"),
        (b"\xff\xfe", "in UTF-8, got something else"),
        (b"word,count\ngold,3\n", "expected a list with columns feature, value"),
        (b"feature,value\nkind\n", "line 2"),
        (b"feature,value\nhome town,b\n", "line 2"),
        (b"feature,value\nkind,\n", "line 2"),
        (b"feature,value\nkind,na\n", "no missing value"),  # of all silos, a category
        (b"feature,value\nkind,Other\n", "not the name of another column"),
        (b'feature,value\nkind,"a\nb"\n', "line 2"),
        (b"feature,value\n" + b"".join(b"kind,%d\n" % i for i in range(1001)), "at most 1,000"),
        (b"feature,value\n" + b"kind,gold\n" * 500_000, "at most 4,194,304 bytes"),
    ],
)
def test_hostile_lists_are_refused(tmp_path: Path, data: bytes, line: str) -> None:
    schema, path = write(tmp_path, ["gold"]), tmp_path / "list.csv"
    path.write_bytes(data)
    with pytest.raises(DataError, match=line):
        join_categories(schema, [path])


def test_lists_that_do_not_fit_together_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    schema, lists = write(tmp_path, ["gold"]), [tmp_path / "a.csv", tmp_path / "b.csv"]
    lists[0].write_text("feature,value\nkind,a\nkind,b\n")
    lists[1].write_text("feature,value\nkind,c\n")
    with pytest.raises(ConfigError, match="twice"):
        join_categories(schema, [lists[0], tmp_path / "raw/../a.csv"])
    with pytest.raises(ConfigError, match="got none"):
        join_categories(schema, [])
    monkeypatch.setattr(categories, "MOST_WORDS", 2)
    with pytest.raises(DataError, match="at most 2 words of kind, got 3 in the lists"):
        join_categories(schema, lists)
    with raises_code(DataError, "missing-file"):
        join_categories(schema, [tmp_path / "c.csv"])


def test_schemas_whose_values_cannot_be_counted(tmp_path: Path) -> None:
    schema = write(tmp_path, ["gold"] * 3)
    with pytest.raises(DataError, match="--count-categories FILE at each"):
        sg.prepare(tmp_path / "raw", schema=schema, out=tmp_path / "silo")
    assert not (tmp_path / "silo").exists()
    (tmp_path / "list.csv").write_text("feature,value\nkind,gold\n")
    text = schema.read_text()
    schema.write_text(text.replace("other = true\nmin", "min"))
    with pytest.raises(DataError, match="expected other = true"):
        join_categories(schema, [tmp_path / "list.csv"])
    schema.write_text("""[nodes]
table = "accounts"
key = "account"
classes = ["no"]
[features]
kind = {type = "category", values = "counted", other = true}
""")
    with pytest.raises(DataError, match="on a line of its own"):
        join_categories(schema, [tmp_path / "list.csv"])
    schema.write_text(text.replace("'counted'", '["gold"]'))
    with pytest.raises(DataError, match="all values are listed already"):
        count_categories(tmp_path / "raw", schema=schema, out=tmp_path / "a.csv")


def test_the_commands(tmp_path: Path, capsys: Capture) -> None:
    schema, out = write(tmp_path, ["gold"] * 3 + ["basic"] * 3), tmp_path / "list.csv"
    words = ["prepare", str(tmp_path / "raw"), "--schema", str(schema)]
    assert run_app([*words, "--count-categories", str(out)]) == 0
    assert "kind: 2 words" in capsys.readouterr().out
    assert run_app(["prepare", "--schema", str(schema), "--categories", str(out)]) == 0
    assert capsys.readouterr().out == join_categories(schema, [out])
    for wrong in (
        [*words, "--categories", str(out)],
        ["prepare", "--categories", str(out)],
        ["prepare", str(tmp_path / "raw"), "--count-categories", str(tmp_path / "b.csv")],
        ["prepare", "--schema", str(schema), "--out", str(tmp_path / "silo")],
    ):
        assert run_app(wrong) == 2
        assert capsys.readouterr().err.startswith("error: expected ")


def test_a_value_is_no_name_of_another_column(tmp_path: Path) -> None:
    schema = write(tmp_path, ["other"] * 4 + ["gold"] * 4)
    words = count_categories(tmp_path / "raw", schema=schema, out=tmp_path / "list.csv")
    assert words == {"kind": ("gold",)}
    schema.write_text(schema.read_text().replace("'counted'", '["gold", "Other"]'))
    with pytest.raises(DataError, match="no names of its other columns, got 'Other'"):
        sg.prepare(tmp_path / "raw", schema=schema, out=tmp_path / "silo")
