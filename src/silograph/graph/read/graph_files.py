"""Graphs from GraphML, GEXF and GML files, which networkx parses.

Nodes and edges become tables, so that a file gives the graph that its tables would give.
"""

import io
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any
from xml.parsers import expat

from silograph.core.errors import DataError, mistake
from silograph.core.text import printable
from silograph.graph.graph import Graph
from silograph.graph.read.columns import NUMBERS, NaValues
from silograph.graph.read.contents import ending_of, read_contents, stem_of
from silograph.graph.read.csv import TableColumns, graph_of_tables, value_columns
from silograph.graph.read.tables import RepeatedEdges, Table, word_of

COLUMNS = ("label", "features", "silo", "weight")  # whose attributes may be named
LABELS = ("label", "y")  # attributes with labels, unless others are named
PER_BYTE = 40  # bytes of memory for each byte of a file, as measured for GraphML
# Names and ids of nodes and edges for people and programs that draw them.
NO_FEATURES = ("id", "label", "pid", "key")
SHOWN = 9  # attributes in an error


def load_graph_file(
    path: Path,
    *,
    columns: Mapping[str, Any],
    time: str | None = None,
    repeated_edges: RepeatedEdges = "mean",
    na_values: NaValues = (),
    with_labels: bool = True,
) -> Graph:
    """Return the graph of a file whose name ends with one of `GRAPH_FILES`.

    Nodes are named by their ids, in GML by their labels where all have one. Integers stay integers,
    as in tables.

    Args:
        path: the file, perhaps packed by gzip.
        columns: the attributes of nodes with labels (one or several), features (by default all that
            are numbers) and the silo, and that of edges with weights (by default `weight`). Labels
            are otherwise in `label` or `y`; a `label` that differs at every node, as programs for
            drawing write it, is a name.
        time: attribute with times, see `from_csv`; so are the other arguments.
        repeated_edges: as in `from_arrays`.
        na_values: as in `from_csv`.
        with_labels: as in `from_csv`.

    Raises:
        DataError: names the file, the line where the parser knows it, or node and attribute.
    """
    graph = _parse(path)
    nodes, edges = _tables(path, graph)
    key = nodes.header[0]
    nodes = nodes.without_row_numbers([key, *_names_in(columns), *([time] if time else [])])
    label = columns.get("label") or _default_label(nodes)
    if label is None and with_labels:
        attributes = ", ".join(map(printable, nodes.header[1 : SHOWN + 1])) or "none"
        raise DataError(
            f"{path}: expected a node attribute with labels, got attributes {attributes}: name "
            "yours, such as --columns label=NAME"
        )
    label = label or LABELS[0]
    features = columns.get("features")
    if features is None:
        others = {*_names_in({"label": label}), *value_columns(nodes.header), time}
        others |= {columns.get("silo", "silo"), "split", *NO_FEATURES}
        numeric = _numeric_attributes(graph)
        features = [name for name in nodes.header[1:] if name in numeric and name not in others]
    return graph_of_tables(
        nodes,
        edges,
        TableColumns(
            id=key,
            label=label,
            silo=columns.get("silo"),
            weight=columns.get("weight"),
            features=features,
            time=time,
        ),
        repeated_edges=repeated_edges,
        na_values=na_values,
        with_labels=with_labels,
        name=stem_of(path),
    )


def _names_in(columns: Mapping[str, str | Sequence[str]]) -> list[str]:
    """Return all names of attributes."""
    names = [[name] if isinstance(name, str) else [*name] for name in columns.values()]
    return [name for some in names for name in some]


def _parse(path: Path) -> Any:
    """Return the networkx graph of a file."""
    import networkx as nx

    kind = ending_of(path).removesuffix(".gz").removeprefix(".")
    called = {"graphml": "a GraphML file", "gexf": "a GEXF file", "gml": "a GML file"}[kind]
    raw = read_contents(path, called, PER_BYTE)
    if kind != "gml":
        _check_no_entities(path, raw, called)
    readers: dict[str, Callable[[Any], Any]] = {"graphml": nx.read_graphml, "gexf": nx.read_gexf}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of what is in a file and has no use here
            if kind != "gml":
                graph = readers[kind](io.BytesIO(raw))
            else:
                try:
                    graph = nx.read_gml(io.BytesIO(raw), label="label")
                except nx.NetworkXError as error:
                    if "no 'label' attribute" not in str(error):
                        raise
                    graph = nx.read_gml(io.BytesIO(raw), label="id")
    # Damaged and hostile files surface as errors of networkx, ElementTree, int, dict and more.
    except Exception as error:
        reason = printable(" ".join(str(error).split()))[:200] or type(error).__name__
        raise DataError(
            f"{path}: expected {called}, got one that is no such file: {reason}",
            **mistake("wrong-format", path),
        ) from None
    if kind == "gexf":  # the name that is drawn; networkx gives it to all nodes
        for attributes in graph.nodes.values():
            attributes.pop("label", None)
    return graph


def _check_no_entities(path: Path, raw: bytes, called: str) -> None:
    """Raise `DataError` for XML with a document type, or that is damaged before its first element.

    A document type may declare entities, of which a few bytes expand to gigabytes, or that name
    other files.
    """

    def refuse(*_: object) -> None:
        raise DataError(
            f"{path}, line {parser.CurrentLineNumber}: expected {called} without a document type, "
            "got <!DOCTYPE, whose entities may expand without end: delete it",
            **mistake("wrong-format", path),
        )

    def stop(*_: object) -> None:
        raise StopIteration

    parser = expat.ParserCreate()
    parser.StartDoctypeDeclHandler = refuse
    parser.StartElementHandler = stop
    try:
        parser.Parse(raw, True)
    except StopIteration:
        return
    except expat.ExpatError as error:
        reason = expat.errors.messages[error.code]
        raise DataError(
            f"{path}, line {error.lineno}: expected {called}, got {reason}",
            **mistake("wrong-format", path),
        ) from None


def _tables(path: Path, graph: Any) -> tuple[Table, Table]:
    """Return a table of nodes, the first column their names, and one of edges."""
    nodes = dict(graph.nodes(data=True))
    if not nodes:
        raise DataError(f"{path}: expected at least one node, got none")
    attributes = _plain_attributes(nodes.values())
    key = "id" if "id" not in attributes else "name of the node"
    rows = [
        [str(node), *(_cell(values.get(name)) for name in attributes)]
        for node, values in nodes.items()
    ]
    names = [printable(str(node)) for node in nodes]
    node_table = Table(path, [key, *attributes], rows, names, "node")
    edges = list(graph.edges(data=True))
    ends = ("source", "target")
    further = [
        name
        for name in _plain_attributes(values for _, _, values in edges)
        if name not in (*ends, *NO_FEATURES)
    ]
    cells = [
        [str(a), str(b), *(_cell(values.get(name)) for name in further)] for a, b, values in edges
    ]
    undirected = not graph.is_directed()
    edge_table = Table(
        path, [*ends, *further], cells, range(len(cells)), "edge", undirected=undirected
    )
    return node_table, edge_table


def _plain_attributes(items: Any) -> list[str]:
    """Return the names of attributes whose values are words and numbers, in their first order."""
    is_plain: dict[str, bool] = {}
    for attributes in items:
        for name, value in attributes.items():
            plain = value is None or isinstance(value, (str, *NUMBERS))
            is_plain[str(name)] = is_plain.get(str(name), True) and plain
    return [name for name, plain in is_plain.items() if plain]


def _cell(value: Any) -> str:
    """Return a value as a table has it; truth as 0 and 1."""
    return str(int(value)) if isinstance(value, bool) else word_of(value).strip()


def _numeric_attributes(graph: Any) -> set[str]:
    """Return the attributes of nodes that are numbers; words of digits may be codes."""
    is_number: dict[str, bool] = {}
    for attributes in graph.nodes.values():
        for name, value in attributes.items():
            if value is not None:
                is_number[str(name)] = is_number.get(str(name), True) and isinstance(value, NUMBERS)
    return {name for name, numeric in is_number.items() if numeric}


def _default_label(nodes: Table) -> str | None:
    """Return the attribute with labels, or the first of `LABELS` for columns of numbers."""
    if value_columns(nodes.header):
        return LABELS[0]
    for name in LABELS:
        if name in nodes.header[1:]:
            values = nodes.column(name)
            if len(values) <= 2 or len({*values}) < len(values):
                return name
    return None
