"""Laws of cuts that users bring: the client of every node, as an array or as a CSV file."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mistakes import raises_code
from silograph.core.errors import DataError, PartitionError
from silograph.core.key import Key
from silograph.graph.graph import Graph
from silograph.graph.partition.partition import (
    assigned,
    make_partition,
    of_silos,
    owner_of_each,
    read_partition,
)

MakeGraph = Callable[..., Graph]
N = 6
LINES = "11,b\n14,a\n17,b\n20,a\n23,a\n26,b\n"  # the keys of the planted graph


@pytest.mark.parametrize(
    ("clients", "ids"),
    [
        ([1, 0, 1, 0, 0, 1], ("client_00", "client_01")),
        (np.array([7, 3, 7, 3, 3, 7], dtype=np.uint8), ("client_03", "client_07")),
        (torch.tensor([101, 5, 101, 5, 5, 101]), ("client_005", "client_101")),
        (["b", "a", "b", "a", "a", "b"], ("a", "b")),
        (np.array(["b", "a", "b", "a", "a", "b"], dtype=object), ("a", "b")),
    ],
)
def test_every_form_of_an_array_is_the_same_cut(
    make_graph: MakeGraph, clients: Any, ids: tuple[str, ...]
) -> None:
    cut = of_silos(assigned(make_graph(N), clients))
    assert cut.ids == ids
    assert [part.tolist() for part in cut.nodes] == [[1, 3, 4], [0, 2, 5]]


def test_a_file_is_the_array_in_the_order_of_its_keys(
    make_graph: MakeGraph, tmp_path: Path
) -> None:
    file, graph = tmp_path / "cut.csv", make_graph(N)
    lines = LINES.splitlines(keepends=True)
    for text in ("node,client\n" + LINES, "node,client\n" + "".join(reversed(lines))):
        file.write_text(text)
        cut = of_silos(read_partition(graph, file))
        assert cut.ids == ("a", "b")
        assert cut.hash == of_silos(assigned(graph, list("babaab"))).hash
    swapped = "".join(f"{line[3:4]},{line[:2]}\n" for line in lines)
    file.write_text("client,node\n" + swapped)
    assert of_silos(read_partition(graph, file)).hash == cut.hash
    file.write_text("node,client\n" + LINES.replace("a", "10").replace("b", "9"))
    assert of_silos(read_partition(graph, file)).ids == ("client_09", "client_10")
    words = replace(graph, node_id=np.array([f"n{key}" for key in graph.node_id]))
    file.write_text("node,client\n" + "".join(f"n{line}" for line in lines))
    assert of_silos(read_partition(words, file)).hash == cut.hash


def test_only_a_whole_disjoint_partition_has_an_owner_of_each_node(make_graph: MakeGraph) -> None:
    graph = make_graph(60)
    for method, has in (("metis", True), ("metis_overlapping", False), ("shares", False)):
        cut = make_partition(graph, method, clients=5, key=Key.of(0))
        assert (owner_of_each(cut) is not None) is has
    cut = make_partition(graph, "metis", clients=5, key=Key.of(0))
    assert owner_of_each(replace(cut, dropped=torch.zeros(3, dtype=torch.bool))) is None
    part = replace(cut, ids=cut.ids[:4], nodes=cut.nodes[:4])
    assert owner_of_each(part) is None


WRONG: list[tuple[Any, str]] = [
    ([0, 1], r"a client for each of the 6 nodes of 'planted' as partition, got shape \(2,\)"),
    (np.zeros((6, 2), int), r"got shape \(6, 2\): give one number or name a node"),
    ([0, 1, 0, 1, 0, None], r"numbers or names of clients in partition, got dtype object"),
    ([0, 1, 0, 1, 0, 0.5], r"whole numbers or names of clients in partition, got dtype float64"),
    ([0, 1, 0, 1, 0, -1], r"a client for every node in partition, got -1 at node 5: number"),
    (["a", "", "a", "a", "b", "b"], r"a client for every node in partition, got '' at node 1"),
    ([[0], [1, 2]], r"as partition, got list that numpy cannot read as one array"),
]


@pytest.mark.parametrize(("clients", "match"), WRONG)
def test_arrays_that_cannot_be_used_are_one_short_line(
    make_graph: MakeGraph, clients: Any, match: str
) -> None:
    with pytest.raises(PartitionError, match=match) as caught:
        assigned(make_graph(N), clients)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 200


BAD_FILES = [
    ("", r"cut\.csv: expected a header line, got an empty file"),
    ("id,client\n" + LINES, r"cut\.csv, line 1: expected columns node,client, got id,client"),
    ("node,client,x\n11,a,1\n", r"line 1: expected columns node,client, got node,client,x"),
    ("node,client\n" + LINES + "99,a\n", r"line 8, column 'node': .* of 'planted', got '99'"),
    ("node,client\n" + LINES + "11,a\n", r"line 8, column 'node': .* not yet on line 2, got '11'"),
    ("node,client\n11,\n", r"line 2, column 'client': expected a client, got ''"),
    ("node,client\n11,a\n", r"for every node of 'planted', got none for node 14 \(5 such nodes\)"),
]


@pytest.mark.parametrize(("text", "match"), BAD_FILES)
def test_files_that_cannot_be_used_name_line_and_column(
    make_graph: MakeGraph, tmp_path: Path, text: str, match: str
) -> None:
    (tmp_path / "cut.csv").write_text(text)
    with pytest.raises(DataError, match=match) as caught:
        read_partition(make_graph(N), tmp_path / "cut.csv")
    assert "\n" not in str(caught.value)
    with raises_code(DataError, "missing-file"):
        read_partition(make_graph(N), tmp_path / "nope.csv")
