"""A first schema from raw tables, with what was seen of each column; to be read and corrected.

It looks at one silo's tables or at those of several, and never at more than their cells.
"""

import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import product, takewhile
from pathlib import Path

from silograph.core.errors import DataError
from silograph.core.run_file import toml_value
from silograph.core.text import count_of, printable
from silograph.graph.silos.prepare import ENDINGS, RawTable, read_raw
from silograph.graph.silos.schema import BadCellError, Flag, Reading, Schema, number_of, time_of

LABELS = ("label", "class", "target", "y", "outcome", "fraud", "churn", "default", "diagnosis")
USERS = ("user", "userid", "user_id", "customer", "customer_id", "reader", "member")
ITEMS = ("item", "itemid", "item_id", "product", "product_id", "movie", "movieid", "book")
RATINGS = ("rating", "ratings", "stars", "score", "grade")
TIMES = ("time", "timestamp", "date", "when", "day")
WEIGHTS = ("weight", "amount", "value", "count", "strength")
MOST_WORDS = 20  # different words of a category
SKEWED = 100  # times the median that the largest number is
SHARE_OF_KEYS = 0.5  # of an edge table's column whose cells are keys of nodes


def guess_schema(tables: str | os.PathLike[str]) -> str:
    """Return the text of a first schema for raw tables.

    Args:
        tables: folder of a silo's tables, or with a folder for each silo; of ratings also a file,
            or a folder with a file for each silo.

    Raises:
        DataError: no tables, or none with keys of nodes and none with ratings.
    """
    by_silo = _read_all(Path(tables))
    every = [table for own_tables in by_silo.values() for table in own_tables.values()]
    rated = [table for table in every if _named(table, RATINGS) and _named(table, USERS)]
    if rated and len(rated) == len(every):
        return _text(_ratings(rated))
    by_name: dict[str, dict[str, RawTable]] = {}
    for silo, own_tables in by_silo.items():
        for name, table in own_tables.items():
            by_name.setdefault(name, {})[silo] = table
    return _text(_graph(by_name))


def _text(lines: Iterable[str]) -> str:
    """Return lines as a text; a name with a line break cannot become two of them."""
    return "".join(f"{printable(line)}\n" for line in lines)


def _read_all(path: Path) -> dict[str, dict[str, RawTable]]:
    """Return the tables of each silo by their names without endings."""
    reading = Reading()
    files = [path] if path.is_file() else sorted(path.glob("*"))
    own = [file for file in files if file.is_file() and file.name.endswith(ENDINGS)]
    folders = {path.name: own} if own else {}
    if not own:
        folders = {f.name: sorted(f.glob("*")) for f in files if f.is_dir()}
    tables = {
        silo: {
            file.name.partition(".")[0]: read_raw(file, reading)
            for file in paths
            if file.is_file() and file.name.endswith(ENDINGS)
        }
        for silo, paths in folders.items()
    }
    if not any(tables.values()):
        raise DataError(
            f"expected tables in {path} or in its folders, as {', '.join(ENDINGS[:3])}, .gz or "
            "Parquet, got none"
        )
    return {silo: own_tables for silo, own_tables in tables.items() if own_tables}


def _named(table: RawTable, words: Sequence[str]) -> str | None:
    """Return the first column that is called one of these words, whatever the case."""
    return next((name for name in table.columns if name.casefold() in words), None)


def _key(name: str, *values: object) -> str:
    """Return a line of TOML; several values are a list without repetitions."""
    texts = [toml_value(value) for value in dict.fromkeys(values)]  # type: ignore[arg-type]
    return f"{name} = {texts[0] if len(texts) == 1 else '[' + ', '.join(texts) + ']'}"


# --- Ratings --------------------------------------------------------------------------------------


def _ratings(tables: Sequence[RawTable]) -> Iterator[str]:
    """Yield the lines of a schema of ratings, with the names that any table has."""
    values = []
    for table in tables:
        for cell in table.columns[_named(table, RATINGS) or ""]:
            number, slash, most = cell.partition("/")
            for text in (number, most) if slash else (number,):
                values.append(number_of(text.strip(), table.decimal))
    yield "# A first schema, guessed from the tables: read and correct it. All silos need the same."
    yield "[ratings]  # without table: each file is a silo of its own"
    for key, words in (("user", USERS), ("item", ITEMS), ("rating", RATINGS), ("time", TIMES)):
        names = [name for table in tables if (name := _named(table, words))]
        if not names and key != "time":
            seen = ", ".join(tables[0].columns)
            raise DataError(f"{tables[0].path}: expected a column of {key}s, got {seen}")
        if names:
            yield _key(key, *names)
    yield f"scale = [{min(values):g}, {max(values):g}]  # least and largest rating that were seen"
    yield 'repeated = "last"  # of a pair that is rated several times; or first, mean'


# --- Graphs ---------------------------------------------------------------------------------------


def _graph(by_name: Mapping[str, Mapping[str, RawTable]]) -> Iterator[str]:
    """Yield the lines of a schema of a graph; tables are by name and silo."""
    nodes, key, ends = _roles(by_name)
    node_tables = by_name[nodes]
    yield "# A first schema, guessed from the tables: read and correct it. All silos need the same."
    columns = list(dict.fromkeys(name for t in node_tables.values() for name in t.columns))
    label = _label(node_tables, [name for name in columns if name != key])
    yield ""
    yield "[nodes]"
    yield _key("table", nodes)
    yield _key("key", key)
    if label is None:
        yield '# label = "..."  no column looks like labels'
        yield 'classes = ["0", "1"]'
    else:
        words = Counter(_known(node_tables, label))
        yield f"{_key('label', label)}  # " + ", ".join(
            f"{w}: {n}" for w, n in sorted(words.items())
        )
        yield f"classes = [{', '.join(toml_value(word) for word in sorted(words))}]"
    for name in columns:
        if name not in (key, label):
            yield ""
            yield from _feature(name, node_tables)
    for table, (source, target) in ends.items():
        yield ""
        yield from _edges(table, source, target, by_name[table], node_tables, key)
    yield ""
    yield "[silos]  # whose node a key is, by patterns such as N-*"
    own = {silo: set(table.columns[key]) for silo, table in node_tables.items()}
    prefixes = {silo: _common_beginning(min(keys), max(keys)) for silo, keys in own.items()}
    # Patterns are of use if each holds for the keys of its own silo alone.
    distinct = len(own) > 1 and not any(
        key.startswith(prefixes[silo])
        for silo, keys in own.items()
        for key in set().union(*own.values()) - keys
    )
    for silo, prefix in prefixes.items():
        yield f"{'' if distinct else '# '}{silo} = {toml_value(prefix + '*')}"


def _common_beginning(first: str, last: str) -> str:
    """Return the letters with which two texts begin alike; with the least and the largest, all."""
    pairs = takewhile(lambda pair: pair[0] == pair[1], zip(first, last, strict=False))
    return "".join(letter for letter, _ in pairs)


def _roles(
    by_name: Mapping[str, Mapping[str, RawTable]],
) -> tuple[str, str, dict[str, tuple[str, str]]]:
    """Return the table of nodes, its key, and the columns of ends of each table of edges."""
    best: tuple[int, str, str, dict[str, tuple[str, str]]] | None = None
    for name, tables in by_name.items():
        for column in next(iter(tables.values())).columns:
            cells = [table.columns.get(column, [""]) for table in tables.values()]
            if not all(len(set(c)) == len(c) and all(c) for c in cells):
                continue
            keys = {key for c in cells for key in c}
            ends = {}
            for other, others in by_name.items():
                table = next(iter(others.values()))
                hits = [
                    end
                    for end, cells in table.columns.items()
                    if other != name and _share(cells, keys) >= SHARE_OF_KEYS
                ]
                if len(hits) == 2:
                    ends[other] = (hits[0], hits[1])
            # A key that tables of edges name is one; else the first whose name says so.
            rank = 2 * len(ends) + column.casefold().endswith(("id", "key"))
            if best is None or rank > best[0]:
                best = rank, name, column, ends
    if best is None:
        raise DataError(
            "expected a table with a key for each row, or ratings of items by users, got none: "
            "write the schema by hand"
        )
    return best[1:]


def _share(cells: Sequence[str], keys: set[str]) -> float:
    return sum(cell in keys for cell in cells) / len(cells) if cells else 0.0


def _known(tables: Mapping[str, RawTable], column: str) -> list[str]:
    """Return the cells of a column over all silos that are not missing."""
    missing = Schema(text="").missing
    cells = (cell for table in tables.values() for cell in table.columns.get(column, ()))
    return [cell for cell in cells if cell not in missing]


def _label(tables: Mapping[str, RawTable], columns: Sequence[str]) -> str | None:
    """Return the column of labels: one that is called so, else few words, many missing."""
    by_name_of_label = (name for word, name in product(LABELS, columns) if name.casefold() == word)
    total = sum(map(len, tables.values()))
    sparse = (
        name
        for name in columns
        if 2 <= len(set(_known(tables, name))) <= MOST_WORDS
        and len(_known(tables, name)) < 0.7 * total
    )
    return next(by_name_of_label, None) or next(sparse, None)


def _feature(name: str, tables: Mapping[str, RawTable]) -> Iterator[str]:
    """Yield the section of a feature, with what was seen of its column."""
    known = _known(tables, name)
    total = sum(map(len, tables.values()))
    several = total > len(known)
    missing = f"{count_of(total - len(known), 'missing value')}" if several else "none missing"
    section = f"[features.{toml_value(name)}]" if not name.isidentifier() else f"[features.{name}]"
    words = Counter(cell.casefold() for cell in known)
    flags = {*Flag().true, *Flag().false}
    numbers = _numbers(name, tables)
    if known and len(words) == 2 and all(word in flags for word in words):
        yield from (f"{section}  # {missing}", 'type = "flag"')
    elif numbers:
        low, middle, high = numbers[0], numbers[len(numbers) // 2], numbers[-1]
        yield f"{section}  # {low:g} to {high:g}, median {middle:g}, {missing}"
        yield 'type = "number"'
        if low >= 0 and high > SKEWED * max(middle, 1e-12):
            yield "log = true  # a few numbers are much larger than the others"
        if several:
            yield "indicator = true  # missing ones become the mean, and a column says where"
    elif known and all(_is_time(cell) for cell in words):
        yield from (f"{section}  # times such as {known[0]}, {missing}", 'type = "time"')
        yield '# cyclic = ["month"]  or hour, weekday: sine and cosine'
    elif known and len(words) <= MOST_WORDS and len(words) < max(3, total / 5):
        listed = ", ".join(toml_value(word) for word in sorted(words))
        yield f"{section}  # {missing}; upper and lower case count alike"
        yield from ('type = "category"', f"values = [{listed}]")
        yield "other = true  # a column for words that are not listed; without it they are errors"
        yield '# values = "counted" for words of all silos (docs/reference/schema.md)'
    elif sum(cell.count(" ") for cell in known) > len(known):
        yield from (f"{section}  # free text, {missing}", 'type = "text"', 'treat = "hash"')
    else:
        yield f"# {section}  {len(words)} different words: left out; a name or a number of a row?"


def _numbers(name: str, tables: Mapping[str, RawTable]) -> list[float]:
    """Return the numbers of a column, ascending; nothing if a cell is none."""
    missing, values = Schema(text="").missing, []
    for table in tables.values():
        for cell in table.columns.get(name, ()):
            if cell not in missing:
                try:
                    values.append(number_of(cell, table.decimal))
                except BadCellError:
                    return []
    return sorted(values)


def _is_time(cell: str) -> bool:
    try:
        time_of(cell.upper(), None)
    except BadCellError:
        return False
    return True


def _edges(
    name: str,
    source: str,
    target: str,
    tables: Mapping[str, RawTable],
    nodes: Mapping[str, RawTable],
    key: str,
) -> Iterator[str]:
    """Yield the section of a table of edges."""
    yield f"[edges.{toml_value(name) if not name.isidentifier() else name}]"
    yield from (_key("source", source), _key("target", target))
    first = next(iter(tables.values()))
    unused = [column for column in first.columns if column not in (source, target)]
    weight = next((c for c in unused if c.casefold() in WEIGHTS and _numbers(c, tables)), None)
    if weight is not None:
        yield f"{_key('weight', weight)}  # leave it out if every edge counts alike"
        yield 'repeated = "sum"  # of an edge that is listed several times; or mean, count, last'
    for column in unused:
        if column != weight:
            yield f"# {column} is not used"
    crossing = {
        silo: _crossing(t, source, target, set(nodes[silo].columns[key]))
        for silo, t in tables.items()
        if silo in nodes
    }
    lists = [pair for pairs in crossing.values() for pair in pairs]
    distinct = len(set(lists))
    if lists:
        shared = len(lists) - distinct
        is_both = shared > distinct / 2
        yield _key("listed_by", "both" if is_both else "source") + (
            f"  # {count_of(distinct, 'edge')} to other silos' nodes, {shared} in both tables"
        )


def _crossing(table: RawTable, source: str, target: str, own: set[str]) -> set[tuple[str, str]]:
    """Return the edges of a table that have one end in another silo, as sorted pairs."""
    ends = zip(table.columns[source], table.columns[target], strict=True)
    return {(min(e), max(e)) for e in ends if (e[0] in own) != (e[1] in own)}
