"""Laws of silos' folders: those of a cut graph give the blocks of the cut, bit for bit."""

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from threading import Barrier
from typing import Any

import numpy as np
import pytest
import torch

from commands import everything
from mistakes import raises_code
from silo_folders import NORTH, SOUTH, drawn_split, folder, same
from silograph.core.errors import ConfigError, DataError
from silograph.core.key import Key
from silograph.federation.matching import agree
from silograph.graph.block.block import ClientBlock, Route, SparseRows, make_block
from silograph.graph.csr import CSR
from silograph.graph.graph import Graph, Split, row_normalize
from silograph.graph.partition.partition import Partition, make_partition
from silograph.graph.partition.split import draw_split, public_split
from silograph.graph.read.tables import read_arrays
from silograph.graph.silos.data import (
    Silos,
    join_blocks,
    join_silos,
    silo_block,
    silo_fingerprint,
    silo_split,
)
from silograph.graph.silos.export import write_silos
from silograph.graph.silos.read import is_silo, is_silos, read_silo, read_silos

MakeGraph = Callable[..., Graph]
FORMATS = ["csv", "npz", "parquet"]


@pytest.fixture(params=FORMATS)
def format(request: pytest.FixtureRequest) -> str:
    if request.param == "parquet":
        pytest.importorskip("pyarrow", reason="Parquet is an extra")
    return str(request.param)


def cut_of(graph: Graph, clients: int = 4, **options: Any) -> Partition:
    return make_partition(graph, "random", clients=clients, key=Key.of(3), **options)


def back(
    silos: Silos, how: str = "public", dtype: torch.dtype = torch.float64, **given: Any
) -> tuple[ClientBlock, Route]:
    """What silos agree on, each having made its own block."""
    blocks = [
        silo_block(silo, silo_split(silo, how, Key.of(7)), dtype, **given) for silo in silos.members
    ]
    return join_blocks(blocks), agree(silos)


def isolated(graph: Graph) -> Graph:
    """The graph with its first nodes cut off."""
    kept = (graph.edge_index >= 9).all(dim=0)
    pairs = graph.edge_index[:, kept]
    shape = (graph.num_nodes, graph.num_nodes)
    return replace(graph, adj=CSR.from_pairs(pairs[0], pairs[1], shape))


def with_zeros(graph: Graph) -> Graph:
    """The graph with some features stored as 0."""
    assert isinstance(graph.x, CSR)
    assert graph.x.values is not None
    return replace(graph, x=replace(graph.x, values=graph.x.values.clamp(min=0)))


GRAPHS: dict[str, Callable[[MakeGraph], Graph]] = {
    "dense": lambda make: make(60),
    "sparse": lambda make: make(60, sparse=True),
    "missing labels": lambda make: make(60, missing=0.4),
    "multilabel": lambda make: make(60, multilabel=True, missing=0.2, sparse=True),
    "isolated nodes": lambda make: isolated(make(60)),
    "no edges": lambda make: replace(make(60), adj=CSR.undirected(np.zeros((2, 0), int), 60)),
    "one edge": lambda make: replace(make(60), adj=CSR.undirected(np.array([[0], [1]]), 60)),
    "names": lambda make: replace(
        make(60, missing=0.3), class_names=("b, c", 'a"', "-1"), name='the "graph"'
    ),
    "text keys": lambda make: replace(
        make(60), node_id=np.array([f"é {i * 7 % 60:02d}" for i in range(60)])
    ),
    "entries of 0": lambda make: with_zeros(make(60, sparse=True)),
}


@pytest.mark.law(sample=6)
@pytest.mark.parametrize("kind", GRAPHS)
def test_folders_of_a_cut_give_its_blocks(
    make_graph: MakeGraph, tmp_path: Path, kind: str, format: str
) -> None:
    graph = GRAPHS[kind](make_graph)
    partition, split = cut_of(graph), drawn_split(graph)
    folders = write_silos(tmp_path / "silos", graph, partition, split, format=format)
    assert [path.name for path in folders] == list(partition.ids)
    written = [tmp_path / "silos", *(tmp_path / "silos").rglob("*")]
    modes = {path.stat().st_mode & 0o777 for path in written if path.is_file()}
    assert modes == {0o600}  # features, labels and keys are for their owner only
    assert {path.stat().st_mode & 0o777 for path in written if path.is_dir()} == {0o700}
    silos = read_silos(tmp_path / "silos")
    assert (silos.name, silos.ids) == (graph.name, partition.ids)
    for dtype in (torch.float32, torch.float64):
        block, route = back(silos, dtype=dtype)
        expected = make_block(graph, partition, split, dtype)
        same((block, route), expected)
        for number, silo in enumerate(silos.members):
            one = silo_block(silo, silo_split(silo, "public", Key.of(0)), dtype)
            same(one, block.take(torch.tensor([number])))
    assert all(silo.class_names == graph.class_names for silo in silos.members)


@pytest.mark.law(sample=3)
@pytest.mark.parametrize("kind", GRAPHS)
def test_folders_without_cross_edges_have_all_else(
    make_graph: MakeGraph, tmp_path: Path, kind: str, format: str
) -> None:
    graph = GRAPHS[kind](make_graph)
    given = graph, cut_of(graph), drawn_split(graph)
    write_silos(tmp_path / "with", *given, format=format)
    write_silos(tmp_path / "without", *given, format=format, cross_edges=False)
    connected, alone = (read_silos(tmp_path / name).members for name in ("with", "without"))
    assert any(len(silo.cross.row) for silo in connected)
    for silo, other in zip(connected, alone, strict=True):
        assert len(other.cross.row) == len(other.cross.silo) == 0
        expected = replace(other, cross=silo.cross)
        assert silo_fingerprint(expected) == silo_fingerprint(silo)


@pytest.mark.parametrize(("format", "sparse"), [("csv", False), ("npz", False), ("npz", True)])
def test_names_of_features_stay(
    make_graph: MakeGraph, tmp_path: Path, format: str, sparse: bool
) -> None:
    graph = make_graph(60, sparse=sparse)
    graph = replace(graph, feature_names=tuple(f"age {n}" for n in range(graph.num_features)))
    write_silos(tmp_path / "s", graph, cut_of(graph), drawn_split(graph), format=format)
    assert {silo.feature_names for silo in read_silos(tmp_path / "s").members} == {
        graph.feature_names
    }


@pytest.mark.parametrize("sparse", [False, True])
def test_splits_and_normalized_features_are_those_of_the_cut(
    make_graph: MakeGraph, tmp_path: Path, sparse: bool
) -> None:
    """Each silo draws from its own keys what the experiment draws from all keys."""
    graph = make_graph(70, sparse=sparse, missing=0.2)
    partition, key = cut_of(graph), Key.of(7)
    split = draw_split(graph, partition, ratios=(0.4, 0.3, 0.3), key=key)
    silos = read_written(tmp_path, graph, partition, drawn_split(graph))
    same(back(silos, "0.4/0.3/0.3"), make_block(graph, partition, split, torch.float64))
    normalized = make_block(row_normalize(graph), partition, split, torch.float64)
    same(back(silos, "0.4/0.3/0.3", normalize="row"), normalized)


def read_written(path: Path, graph: Graph, partition: Partition, split: Split) -> Silos:
    write_silos(path / "silos", graph, partition, split)
    return read_silos(path / "silos")


def test_full_splits_and_silos_without_training_nodes(tmp_path: Path) -> None:
    folder(tmp_path / "n", NORTH)
    nodes = "id,label,split\na,cat,val\nb,cat,\nc,dog,test\n"
    silo = read_silo(folder(tmp_path / "n", {"nodes.csv": nodes}))
    assert silo_split(silo, "full", Key.of(0)).train.tolist() == [False, True, False]
    assert not silo_split(silo, "public", Key.of(0)).train.any()
    assert not silo_split(silo, "0.1/0/0", Key.of(0)).train.any()  # of three nodes


def test_lost_edges_and_nodes_that_nobody_holds(make_graph: MakeGraph, tmp_path: Path) -> None:
    graph = make_graph(60)
    for number, partition in enumerate(
        [
            cut_of(graph, drop_edges=0.3),
            Partition(("a", "b"), (torch.arange(5, 20), torch.arange(25, 60)), 60, "hand"),
        ]
    ):
        split = drawn_split(graph)
        silos = read_written(tmp_path / str(number), graph, partition, split)
        same(back(silos), make_block(graph, partition, split, torch.float64))


def test_silos_keep_their_order_and_names_that_no_folder_can_have(
    make_graph: MakeGraph, tmp_path: Path
) -> None:
    graph = make_graph(30)
    parts = tuple(torch.arange(start, 30, 3) for start in range(3))
    partition = Partition(("z/../y", "B", "a b"), parts, 30, "hand")
    split = drawn_split(graph)
    folders = write_silos(tmp_path / "silos", graph, partition, split)
    assert [path.name for path in folders] == ["silo_00", "silo_01", "silo_02"]
    silos = read_silos(tmp_path / "silos")
    assert silos.ids == partition.ids
    same(back(silos), make_block(graph, partition, split, torch.float64))
    # Without federation.toml the names decide.
    (tmp_path / "silos" / "federation.toml").unlink()
    silos = read_silos(tmp_path / "silos")
    assert (silos.name, silos.ids) == ("silos", ("B", "a b", "z/../y"))


def test_silos_joined_are_the_graph(make_graph: MakeGraph, tmp_path: Path) -> None:
    graph = replace(make_graph(60, sparse=True, missing=0.2), class_names=("p", "q", "r"))
    partition, split = cut_of(graph), drawn_split(graph)
    silos = read_written(tmp_path, graph, partition, split)
    joined, cut, masks = join_silos(silos, *back(silos))
    for name in ("adj", "x", "y", "num_classes", "node_id", "name", "class_names"):
        same(getattr(joined, name), getattr(graph, name), name)
    assert (cut.ids, cut.hash, joined.silo_names) == (partition.ids, partition.hash, partition.ids)
    known = graph.labeled
    same(masks, Split(split.train & known, split.val & known, split.test & known))


@pytest.mark.parametrize("clash", [False, True])
def test_joined_nodes_without_integer_keys_stand_silo_by_silo(tmp_path: Path, clash: bool) -> None:
    """A silo's own keys need not differ from those of another."""
    folder(tmp_path / "n", NORTH)
    folder(tmp_path / "s", {k: v.replace("k1", "a") if clash else v for k, v in SOUTH.items()})
    cross = NORTH["cross_edges.csv"].replace("k1", "a") if clash else NORTH["cross_edges.csv"]
    folder(tmp_path / "n", {"cross_edges.csv": cross})
    silos = read_silos(tmp_path)
    joined, partition, _ = join_silos(silos, *back(silos))
    names = ["north/a", "north/b", "north/c", "south/a", "south/k2"]
    assert joined.node_id.tolist() == (names if clash else ["a", "b", "c", "k1", "k2"])
    assert [part.tolist() for part in partition.nodes] == [[0, 1, 2], [3, 4]]
    once = joined.edge_index[:, joined.edge_index[0] < joined.edge_index[1]]
    assert sorted(once.T.tolist()) == [[0, 1], [0, 3], [1, 4], [2, 4]]


def test_what_a_folder_says(tmp_path: Path) -> None:
    silo = read_silo(folder(tmp_path / "n", NORTH))
    assert repr(silo) == "Silo('north', nodes=3, edges=1, cross=3, features=2)"
    assert silo.y.tolist() == [0, -1, 1]
    assert silo.feature_names == ("size", "age")
    assert isinstance(silo.x, torch.Tensor)
    assert silo.x.dtype == torch.float64  # which float32 cannot hold: -1e-3
    assert silo.x.tolist() == [[1, 2], [0.5, 0], [3, -1e-3]]
    # Slots are numbered as the list of cross-silo edges first names them.
    assert list(zip(silo.cross.silo, silo.cross.keys, strict=True)) == [
        ("south", "k2"),
        ("south", "k1"),
    ]
    assert silo.cross.row.tolist() == [2, 0, 1]
    assert silo.cross.slot.tolist() == [0, 1, 0]
    assert silo.split is not None
    assert silo.split.train.tolist() == [True, False, False]
    assert is_silo(tmp_path / "n")
    assert is_silos(tmp_path)
    assert not is_silos(tmp_path / "n")


@pytest.mark.parametrize("keys", ["text", "integer"])
def test_slots_draw_apart_from_nodes_of_the_same_key(tmp_path: Path, keys: str) -> None:
    """Keys are a silo's own: 1 here, at south and at east are three nodes."""
    files = {
        "silo.toml": NORTH["silo.toml"] + f'keys = "{keys}"\n',
        "nodes.csv": "id\n1\n2\n",
        "features.csv": "id,size,age\n1,0,0\n2,0,0\n",
        "edges.csv": "source,target\n",
        "cross_edges.csv": "own,silo,remote\n1,south,1\n1,east,1\n2,south,7\n",
    }
    silo = read_silo(folder(tmp_path / "n", files))
    block = silo_block(silo, drawn_split(silo.graph))
    words = [*block.row_key.tolist(), *block.halo.key.tolist()]
    assert len(set(words)) == len(words) == 5


def test_other_names_orders_and_both_directions(tmp_path: Path) -> None:
    """Columns have other names, features another order, edges stand in both directions."""
    plain = read_silo(folder(tmp_path / "plain", NORTH))
    other = NORTH | {
        "silo.toml": NORTH["silo.toml"]
        + '[columns]\nid = "key"\nlabel = "kind"\nsplit = "part"\nsource = "from"\nown = "mine"\n',
        "nodes.csv": "part,kind,key\n train , cat,a\n,,b\n\ntest,dog,c\n",
        "features.csv": "size,key,age\n3,c,-1e-3\n1,a,2\n0.5,b,0\n",
        "edges.csv": "from,target\nb,a\na,b\n",
        "cross_edges.csv": NORTH["cross_edges.csv"].replace("own", "mine"),
    }
    same(read_silo(folder(tmp_path / "other", other)), plain)


def test_tables_that_may_lack_a_column(tmp_path: Path) -> None:
    bare = NORTH | {"nodes.csv": "id\na\nb\nc\n", "features.csv": SPARSE}
    bare["silo.toml"] = 'name = "north"\nfeatures = 9\nclasses = 4\nsparse = true\n'
    silo = read_silo(folder(tmp_path / "n", bare))
    assert silo.y.tolist() == [-1, -1, -1]
    assert silo.split is None
    assert isinstance(silo.x, CSR)
    assert silo.x.scipy().toarray().tolist() == [[0] * 8 + [2.5], [0] * 9, [-1] + [0] * 8]
    assert silo.num_classes == 4
    bare["silo.toml"] += 'task = "multilabel"\n'
    assert read_silo(folder(tmp_path / "n", bare)).y.tolist() == [[-1] * 4] * 3
    with pytest.raises(
        DataError, match=r"^split: expected a graph with a public split, got 'north' with"
    ):
        silo_split(silo, "public", Key.of(0))


SPARSE = "id,feature,value\nc,0,-1\na,8,2.5\n"


def test_fingerprints_tell_what_training_reads(tmp_path: Path) -> None:
    """A word changed in any table changes the fingerprint; the order of internal edges does not."""
    first = silo_fingerprint(read_silo(folder(tmp_path / "n", NORTH)))
    changes = {
        "silo.toml": ("north", "west"),
        "nodes.csv": ("c,dog", "c,cat"),
        "features.csv": ("0.5", "0.25"),
        "edges.csv": ("a,b", "a,c"),
        "cross_edges.csv": ("c,south", "b,south"),
    }
    seen = {first}
    for number, (name, change) in enumerate(changes.items()):
        files = NORTH | {name: NORTH[name].replace(*change, 1)}
        if name == "cross_edges.csv":
            files[name] = "own,silo,remote\na,south,k1\nc,south,k2\nb,south,k2\n"
        seen.add(silo_fingerprint(read_silo(folder(tmp_path / str(number), files))))
    assert len(seen) == 6
    turned = NORTH | {"edges.csv": "source,target\nb,a\n"}
    assert silo_fingerprint(read_silo(folder(tmp_path / "t", turned))) == first


def test_nothing_half_written_and_nothing_overwritten(
    make_graph: MakeGraph, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    graph = make_graph(30)
    partition, split, target = cut_of(graph), drawn_split(graph), tmp_path / "silos"
    seen: list[str] = []

    def fail(folder: Path, *rest: Any) -> None:
        seen.append(folder.name)
        if len(seen) == 3:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("silograph.graph.silos.export.write_tables", fail)
        with pytest.raises(KeyboardInterrupt):
            write_silos(target, graph, partition, split)
    assert everything(tmp_path) == {}
    target.mkdir()  # an empty folder will do
    write_silos(target, graph, partition, split)
    before = everything(tmp_path)
    for taken in (target, target / "federation.toml"):
        with raises_code(ConfigError, "existing-output"):
            write_silos(taken, graph, partition, split)
    with raises_code(ConfigError, "unwritable-path"):
        write_silos(target / "federation.toml" / "x", graph, partition, split)
    with raises_code(ConfigError, "option-value", option="format", got="xlsx"):
        write_silos(tmp_path / "new", graph, partition, split, format="xlsx")
    assert everything(tmp_path) == before


def test_cuts_with_copies_are_refused(make_graph: MakeGraph, tmp_path: Path) -> None:
    graph = make_graph(30)
    partition = make_partition(graph, "shares", clients=3, key=Key.of(0))
    with pytest.raises(DataError, match=r"^expected a cut in which no two clients hold the same"):
        write_silos(tmp_path / "silos", graph, partition, drawn_split(graph))
    assert everything(tmp_path) == {}


@pytest.mark.parametrize("where", ["key", "class", "silo"])
def test_what_csv_cannot_hold_is_for_npz(make_graph: MakeGraph, tmp_path: Path, where: str) -> None:
    graph = make_graph(30)
    keys = [f"n{i}" for i in range(30)]
    if where == "key":
        keys[4] += " "
    graph = replace(graph, node_id=np.array(keys))
    if where == "class":
        graph = replace(graph, class_names=(" a", "b", "c"))
    partition, split = cut_of(graph, 2), drawn_split(graph)
    if where == "silo":
        partition = replace(partition, ids=("x", "y "))
    with pytest.raises(DataError, match=r"^expected keys and names without spaces at their ends"):
        write_silos(tmp_path / "csv", graph, partition, split)
    write_silos(tmp_path / "npz", graph, partition, split, format="npz")
    silos = read_silos(tmp_path / "npz")
    same(back(silos), make_block(graph, partition, split, torch.float64))
    assert silos.members[0].class_names == graph.class_names


def test_a_public_split_goes_through(make_graph: MakeGraph, tmp_path: Path) -> None:
    graph = make_graph(40)
    graph = replace(graph, split=drawn_split(graph))
    partition, split = cut_of(graph), public_split(graph)
    silos = read_written(tmp_path, graph, partition, split)
    same(back(silos), make_block(graph, partition, split, torch.float64))


def test_a_block_of_silos_is_used_like_any(make_graph: MakeGraph, tmp_path: Path) -> None:
    graph = make_graph(60, sparse=True)
    partition, split = cut_of(graph), drawn_split(graph)
    block, _ = back(read_written(tmp_path, graph, partition, split))
    expected, _ = make_block(graph, partition, split, torch.float64)
    assert isinstance(block.x, SparseRows)
    assert isinstance(expected.x, SparseRows)
    same(block.x.used, expected.x.used)


class Slow:
    """An archive of numpy whose arrays take a while, and are read by one thread at a time."""

    files = ("a", "b")

    def __init__(self) -> None:
        self.reading = 0

    def __getitem__(self, key: str) -> np.ndarray:
        self.reading += 1
        time.sleep(0.01)
        assert self.reading == 1
        self.reading -= 1
        return np.arange(3)


def test_threads_read_arrays_one_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else Python 3.11.7 and older fail now and then, and a good file is called damaged."""
    np.savez(path := tmp_path / "a.npz", a=np.arange(3), b=np.arange(3))
    slow, together = Slow(), Barrier(3)
    monkeypatch.setattr("numpy.load", lambda *_, **__: slow)

    def read(_: int) -> set[str]:
        together.wait(600)
        return set(read_arrays(path, "arrays", lambda keys: keys))

    with ThreadPoolExecutor(3) as threads:
        assert list(threads.map(read, range(3))) == [{"a", "b"}] * 3


def test_features_are_written_with_all_digits_so_that_they_come_back_in_float32(
    make_graph: MakeGraph, tmp_path: Path
) -> None:
    graph = make_graph(60)
    assert isinstance(graph.x, torch.Tensor)
    row = torch.tensor([0.1, 1.0, -0.0, 1e-5, 3.4e38, 2 / 3])[: graph.num_features]
    graph = replace(graph, x=row.repeat(60, 1))
    write_silos(tmp_path / "silos", graph, cut_of(graph, 1), drawn_split(graph))
    (file,) = (tmp_path / "silos").glob("*/features.csv")
    _, cells, *_ = file.read_text().splitlines()
    written = cells.split(",")[1:]
    assert written[:3] == ["0.10000000149011612", "1", "-0"]
    assert [float(cell) for cell in written] == row.tolist()
    (silo,) = read_silos(tmp_path / "silos").members
    again = silo.graph.x
    assert isinstance(again, torch.Tensor)
    same(again, graph.x)
