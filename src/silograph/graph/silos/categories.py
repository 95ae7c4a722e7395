"""Words of categories that no one silo knows: each silo lists its own, and a schema joins them.

```toml
[features.kind]
type = "category"
values = "counted"
other = true        # for words that too few nodes have
min_count = 5       # nodes of a silo that have a word which the silo lists
min_silos = 1       # silos that list a word which the schema takes
```

`count_categories` writes a silo's list, a file that a person can read before it is handed over. It
holds words and no counts. `join_categories` writes the schema with the words of all lists.
"""

import csv
import io
import logging
import os
import re
import tomllib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from silograph.core.errors import ConfigError, DataError, mistake, read_mistake
from silograph.core.files import check_new_file, check_regular, write_atomic
from silograph.core.run_file import toml_value
from silograph.core.text import count_of, short_repr
from silograph.graph.read.columns import MissingValues
from silograph.graph.silos.prepare import cells_of, find_silos, find_table, read_raw
from silograph.graph.silos.schema import COUNTED, Category, Schema, parse_schema, read_schema

LOG = logging.getLogger("silograph")
HEADER = ["feature", "value"]
MOST_WORDS = 1000  # of a feature
LONGEST_WORD = 100  # characters
MOST_BYTES = 4 * 2**20  # of a list
# A spreadsheet runs a cell that begins so, unless it is a number.
FORMULA = re.compile(r"[=+\-@](?!\d+([.,]\d+)?$)")


def count_categories(
    tables: str | os.PathLike[str],
    *,
    schema: str | os.PathLike[str],
    out: str | os.PathLike[str],
) -> dict[str, tuple[str, ...]]:
    """Write the words of a silo's categories that enough of its nodes have.

    Words are written in lower case and in alphabetical order, so that neither their spelling nor
    their order shows anything of single nodes.

    Args:
        tables: folder of the silo's raw tables.
        schema: file of the schema; categories with `values = "counted"` are counted.
        out: the file to write, CSV with columns `feature` and `value`. Only its owner may read it.

    Returns:
        The words of each category.

    Raises:
        ConfigError: something is at `out`, or the tables are those of several silos.
        DataError: the schema has no such category, a table cannot be read, or a category has too
            many words.
    """
    check_new_file(Path(out))
    rules = read_schema(Path(schema))
    categories = _counted_categories(rules, os.fspath(schema))
    assert rules.nodes is not None  # there are features
    folders = find_silos(Path(tables), rules, None)
    if len(folders) > 1:
        raise ConfigError(
            f"expected the tables of one silo, got those of {count_of(len(folders), 'silo')}: each "
            "silo counts its own; give one of the folders"
        )
    path = find_table(next(iter(folders.values())), rules.nodes.table)
    assert path is not None  # by it the folder is known as a silo's
    table = read_raw(path, rules.reading)
    missing, words_by_feature = _missing_in_lower_case(rules), {}
    for name, category in categories.items():
        column = table.name_of(category.column or name, f" for feature {name}")
        known = (cell for cell in cells_of(table, column, rules) if cell is not None)
        counts = Counter(cell.casefold() for cell in known)
        frequent = [word for word, n in counts.items() if n >= category.min_count]
        words = sorted(word for word in frequent if _may_be_listed(word, category, missing))
        if len(words) < len(frequent):
            LOG.warning(
                "%s: left out: %s of %s that no list may hold (longer than %d characters, not "
                "printable, a formula, a missing value, or the name of another column)",
                path,
                count_of(len(frequent) - len(words), "word"),
                name,
                LONGEST_WORD,
            )
        _check_number(words, name, str(path))
        words_by_feature[name] = tuple(words)
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(HEADER)
    writer.writerows((name, word) for name, words in words_by_feature.items() for word in words)
    write_atomic(Path(out), text.getvalue(), private=True)
    return words_by_feature


def join_categories(schema: str | os.PathLike[str], lists: Sequence[str | os.PathLike[str]]) -> str:
    """Return the text of a schema with the words of silos' lists as values.

    Args:
        schema: file of the schema whose categories have `values = "counted"`.
        lists: a file of each silo, written by `count_categories`.

    Raises:
        ConfigError: no list, or the same one twice.
        DataError: a file is no such list, or holds what no silo writes: control characters,
            formulas, more than 1,000 words of a category; or a category has no word.
    """
    rules = read_schema(Path(schema))
    categories = _counted_categories(rules, os.fspath(schema))
    paths = [Path(path) for path in lists]
    if not paths or len({path.resolve() for path in paths}) < len(paths):
        got = "one of them twice" if paths else "none"
        raise ConfigError(f"expected a list of words from each silo, got {got}")
    counts: dict[str, Counter[str]] = {name: Counter() for name in categories}
    for path in paths:
        for name, words in _read_list(path, categories, rules).items():
            counts[name].update(words)
    values = {}
    for name, category in categories.items():
        joined = sorted(word for word, n in counts[name].items() if n >= category.min_silos)
        if not joined:
            raise DataError(
                f"expected a word of {name} in the lists of {count_of(category.min_silos, 'silo')} "
                "or more, got none: lower min_silos or min_count in the schema, or drop the feature"
            )
        _check_number(joined, name, "the lists")
        values[name] = joined
    return _with_values(rules.text, values, os.fspath(schema))


def _counted_categories(rules: Schema, source: str) -> dict[str, Category]:
    """Return the categories whose values are counted; raise `DataError` where there is none."""
    categories = {
        name: feature
        for name, feature in rules.features.items()
        if isinstance(feature, Category) and feature.values == COUNTED
    }
    if not categories:
        raise DataError(
            f'{source}: expected a category with values = "{COUNTED}", got none: all values are '
            "listed already"
        )
    for name in categories:
        if not _is_plain(name):  # it would be in the list that a person looks at
            raise DataError(
                f"{source}: expected a printable name of a feature of at most {LONGEST_WORD} "
                f"characters that is no formula, got {short_repr(name)}: rename it"
            )
    return categories


def _is_plain(word: str) -> bool:
    """Return whether a word may be in a list: short, printable, and no formula."""
    return (
        0 < len(word) <= LONGEST_WORD
        and word.isprintable()
        and word == word.strip()
        and FORMULA.match(word) is None
    )


def _may_be_listed(word: str, category: Category, missing: MissingValues) -> bool:
    """Return whether a word may be a value: plain, no missing cell, and no other column's name.

    A word that counts as missing would make a category of all silos' missing cells.

    Args:
        word: in lower case.
        category: whose value it is to be.
        missing: with words in lower case.
    """
    return _is_plain(word) and word not in missing and word not in category.extra_names


def _missing_in_lower_case(rules: Schema) -> MissingValues:
    return replace(rules.missing, words=frozenset(map(str.casefold, rules.missing.words)))


def _check_number(words: Sequence[str], name: str, source: str) -> None:
    if len(words) > MOST_WORDS:
        raise DataError(
            f"expected at most {MOST_WORDS:,} words of {name}, got {len(words):,} in {source}: "
            "raise min_count, or make it a text, which is hashed"
        )


def _read_list(
    path: Path, categories: Mapping[str, Category], rules: Schema
) -> dict[str, set[str]]:
    """Return the words of a silo's list, by feature.

    Raises:
        DataError: it is missing, too long, or no such list; names the line.
    """
    check_regular(path)
    try:
        with path.open("rb") as file:
            data = file.read(MOST_BYTES + 1)
    except OSError as error:
        raise DataError(
            f"{path}: expected a list of words, got: {error.strerror}", **read_mistake(error, path)
        ) from None
    if len(data) > MOST_BYTES:
        raise DataError(
            f"{path}: expected a list of at most {MOST_BYTES:,} bytes, got more: it is none that "
            "silograph prepare --count-categories has written",
            **mistake("wrong-format", path),
        )
    try:
        header, *rows = csv.reader(io.StringIO(data.decode("utf-8-sig"), newline=""))
    except (ValueError, csv.Error):  # other text than UTF-8, or nothing
        raise DataError(
            f"{path}: expected a list of words in UTF-8, got something else",
            **mistake("wrong-format", path),
        ) from None
    if header != HEADER:
        raise DataError(
            f"{path}: expected a list with columns {', '.join(HEADER)}, as silograph prepare "
            f"--count-categories writes it, got {short_repr(header)}",
            **mistake("wrong-format", path),
        )
    missing = _missing_in_lower_case(rules)
    words: dict[str, set[str]] = {name: set() for name in categories}
    for line, row in enumerate(rows, start=2):
        is_known = len(row) == len(HEADER) and row[0] in words
        word = row[-1].casefold() if row else ""
        if not is_known or not _may_be_listed(word, categories[row[0]], missing):
            raise DataError(
                f"{path}, line {line}: expected a feature whose values are counted, and a "
                f"printable word of at most {LONGEST_WORD} characters that is no formula, no "
                f"missing value and not the name of another column, got {short_repr(row)}"
            )
        words[row[0]].add(word)
    for name, of_feature in words.items():
        _check_number(sorted(of_feature), name, str(path))
    return words


def _with_values(text: str, values: Mapping[str, Sequence[str]], source: str) -> str:
    """Return the text of a schema with lists in place of `values = "counted"`; all else stays."""
    lines, feature = [], ""
    for line in text.split("\n"):
        if line.lstrip().startswith("["):
            feature = _feature_of(line)
        match = re.match(rf"""(\s*values\s*=\s*)(["']){COUNTED}\2(.*)""", line)
        if match and feature in values:
            listed = ", ".join(toml_value(word) for word in values[feature])
            line = f"{match[1]}[{listed}]{match[3]}"
        lines.append(line)
    joined = "\n".join(lines)
    expected: dict[str, Any] = tomllib.loads(text)
    for name, words in values.items():
        expected["features"][name]["values"] = [*words]
    try:
        is_right = tomllib.loads(joined) == expected
    except tomllib.TOMLDecodeError:
        is_right = False
    if not is_right:
        raise DataError(
            f'{source}: expected values = "{COUNTED}" on a line of its own under a line '
            "[features.NAME], got it elsewhere: write it so"
        )
    parse_schema(joined, source)
    return joined


def _feature_of(line: str) -> str:
    """Return the name of the feature whose section a line `[features.NAME]` begins, or ""."""
    try:
        features = tomllib.loads(line).get("features")
    except tomllib.TOMLDecodeError:
        return ""
    return next(iter(features), "") if isinstance(features, dict) else ""
