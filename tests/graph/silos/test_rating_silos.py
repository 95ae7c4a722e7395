"""Silos with ratings of their own: their folders, the run that they make, and what is refused."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import silograph as sg
from mistakes import raises_code
from rating_graphs import drawn, rating_graph
from runs import same_bits, weights_of
from silograph.core.errors import DataError
from silograph.core.key import Key
from silograph.graph.block.block import make_block
from silograph.graph.graph import fingerprint
from silograph.graph.partition.partition import Partition, make_partition
from silograph.graph.partition.split import choose_split
from silograph.graph.silos.data import join_blocks, join_rating_silos, silo_block, silo_split
from silograph.graph.silos.export import write_silos
from silograph.graph.silos.read import read_silo, read_silos

KEY = Key.of(4)
GIVEN: dict[str, Any] = {
    "model": "rating_gcn",
    "rounds": 2,
    "hidden": 4,
    "options": {"embedding": 6},
    "dtype": "float64",
    "method": "fedavg",
}


def written(path: Path, format: str = "csv") -> tuple[sg.Graph, Partition, sg.Split]:
    graph = rating_graph()
    partition = make_partition(graph, "category", clients=3, key=KEY)
    split = choose_split(graph, partition, "0.6/0.2/0.2", KEY)
    write_silos(path, graph, partition, split, format=format)
    return graph, partition, split


@pytest.mark.parametrize("format", ["csv", "npz"])
def test_folders_make_the_blocks_of_the_cut(tmp_path: Path, format: str) -> None:
    graph, partition, split = written(tmp_path / "silos", format)
    ours, _ = make_block(graph, partition, split, torch.float64)
    silos = read_silos(tmp_path / "silos")
    blocks = [silo_block(s, silo_split(s, "public", KEY), torch.float64) for s in silos.members]
    theirs = join_blocks(blocks)
    assert ours.ids == theirs.ids
    for name in ("off", "x", "row_key"):
        assert torch.equal(getattr(ours, name), getattr(theirs, name))
    assert torch.equal(ours.y.nan_to_num(), theirs.y.nan_to_num())
    for part in ("train", "val", "test"):
        assert torch.equal(getattr(ours.split, part), getattr(theirs.split, part))
    assert torch.equal(ours.adj.indptr.long(), theirs.adj.indptr.long())
    assert torch.equal(ours.adj.indices.long(), theirs.adj.indices.long())
    assert len(theirs.halo.key) == 0


@pytest.mark.parametrize("format", ["csv", "npz"])
def test_silos_without_trust_and_with_another_scale_are_read_back(
    tmp_path: Path, format: str
) -> None:
    """None of the ratings says how low and high they may be; the graph does."""
    rows = [["a", "x", 0.2], ["a", "y", 0.9], ["b", "x", 0.4], ["b", "y", 0.5]]
    graph = sg.ratings(rows, scale=(0, 1), categories=["p", "q", "p", "q"])
    cut = make_partition(graph, "category", clients=2, key=KEY)
    split = choose_split(graph, cut, "0.5/0.5/0", KEY)
    write_silos(tmp_path / "silos", graph, cut, split, format=format)
    silos = read_silos(tmp_path / "silos").members
    assert [silo.scale for silo in silos] == [silo.graph.scale for silo in silos] == [(0, 1)] * 2
    assert [len(silo.adj.indices) for silo in silos] == [2 * 2 * 2] * 2  # nobody trusts anybody
    values = [sorted(silo.y[~silo.y.isnan()].tolist()) for silo in silos]
    assert sorted(values) == [[0.2, 0.4], [0.5, 0.9]]


def test_a_run_on_folders_is_the_run_on_the_cut(tmp_path: Path) -> None:
    graph, partition, split = written(tmp_path / "silos")
    with_split = sg.run(str(tmp_path / "silos"), **GIVEN, split="public")
    cut = replace(graph, split=split)
    ours = sg.run(cut, **GIVEN, split="public", partition=partition)
    assert same_bits(weights_of(ours), weights_of(with_split))


def test_users_and_items_of_one_key_are_one_where_all_is_joined(tmp_path: Path) -> None:
    """So what the uncut view and centralized runs are on folders is what they are on the cut."""
    graph = sg.ratings(**{**drawn(), "trust": None})  # trust between silos would be lost
    cut = make_partition(graph, "category", clients=3, key=KEY)
    split = choose_split(graph, cut, "0.6/0.2/0.2", KEY)
    write_silos(tmp_path / "silos", graph, cut, split)
    silos = read_silos(tmp_path / "silos")
    blocks = [silo_block(s, silo_split(s, "public", KEY), torch.float64) for s in silos.members]
    joined, held, roles = join_rating_silos(silos, join_blocks(blocks))
    assert fingerprint(joined) == fingerprint(replace(graph, columns={}))
    assert [len(silo.graph.columns["time"]) for silo in silos.members] == [
        len(p) for p in cut.nodes
    ]
    assert (joined.scale, held.ids, held.apart) == (graph.scale, cut.ids, True)
    assert all(torch.equal(a, b) for a, b in zip(held.nodes, cut.nodes, strict=True))
    for part in ("train", "val", "test"):
        assert torch.equal(getattr(roles, part), getattr(split, part))
    given = {**GIVEN, "split": "public", "model": "rating_biases", "options": {}}
    for method in ("fedavg", "centralized"):
        theirs = sg.run(str(tmp_path / "silos"), **given | {"method": method})
        ours = sg.run(replace(graph, split=split), **given | {"method": method}, partition=cut)
        assert ours.test == theirs.test
        assert ours.untrained == theirs.untrained


@pytest.mark.parametrize("format", ["csv", "npz"])
def test_silos_split_by_the_time_that_their_tables_have(tmp_path: Path, format: str) -> None:
    """As the cut does: the earliest of each silo train, the latest test."""
    graph, how = rating_graph(), "time:0.6/0.2/0.2"
    cut = make_partition(graph, "category", clients=3, key=KEY)
    write_silos(tmp_path / "silos", graph, cut, choose_split(graph, cut, how, KEY), format=format)
    for silo in read_silos(tmp_path / "silos").members:
        ours, theirs = silo_split(silo, how, KEY), silo.split
        assert theirs is not None
        for part in ("train", "val", "test"):
            assert torch.equal(getattr(ours, part), getattr(theirs, part))
        time = silo.graph.columns["time"]
        assert float(time[ours.train].max()) <= float(time[ours.test].min())
        with pytest.raises(DataError, match="expected a time for every rating"):
            silo_split(replace(silo, time=None), how, KEY)


def test_a_pair_that_two_silos_have_rated_is_two_ratings(tmp_path: Path) -> None:
    tables = {
        "a": "user,item,rating,split\nx,y,3,train\nz,y,4,test\n",
        "b": "user,item,rating,split\nx,y,5,val\nx,w,1,train\n",
    }
    for name, text in tables.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "silo.toml").write_text(
            f'name = "{name}"\ntask = "rating"\nscale = [0, 5]\n'
        )
        (tmp_path / name / "ratings.csv").write_text(text)
    (tmp_path / "a" / "trust.csv").write_text("truster,trustee\nx,z\n")
    silos = read_silos(tmp_path)
    block = join_blocks([silo_block(s, silo_split(s, "public", KEY)) for s in silos.members])
    graph, held, split = join_rating_silos(silos, block)
    keys = ["u:x", "u:z", "i:w", "i:y", "u:x\ti:w", "a/u:x\ti:y", "b/u:x\ti:y", "u:z\ti:y"]
    assert graph.node_id.tolist() == keys
    assert graph.y[4:].tolist() == [1, 3, 5, 4]
    assert [part.tolist() for part in held.nodes] == [[0, 1, 3, 5, 7], [0, 2, 3, 4, 6]]
    assert [m.nonzero()[:, 0].tolist() for m in vars(split).values()] == [[4, 5], [6], [7]]
    assert graph.num_edges == 2 * 4 + 1
    assert graph.scale == (0, 5)
    assert sg.run(str(tmp_path), **GIVEN, split="public").test


def test_a_silo_may_call_its_columns_otherwise(tmp_path: Path) -> None:
    written(tmp_path)
    folder = next(path for path in sorted(tmp_path.iterdir()) if path.is_dir())
    expected = read_silo(folder)
    called = {"item": "product", "rating": "stars", "time": "when", "split": "role"}
    for name, columns in (("ratings", called), ("trust", {"truster": "who"})):
        table = folder / f"{name}.csv"
        head, rest = table.read_text().split("\n", 1)
        words = [columns.get(word, word) for word in head.strip().split(",")]
        assert set(words) >= set(columns.values())
        table.write_text(",".join(words) + "\n" + rest)
    lines = [f'{name} = "{word}"' for name, word in (called | {"truster": "who"}).items()]
    with (folder / "silo.toml").open("a") as file:
        file.write("\n".join(["[columns]", *lines, ""]))
    found = read_silo(folder)
    assert found.node_id.tolist() == expected.node_id.tolist()
    assert torch.equal(found.adj.indices, expected.adj.indices)
    assert torch.equal(found.y.nan_to_num(), expected.y.nan_to_num())
    assert found.split is not None
    assert expected.split is not None
    assert torch.equal(found.split.train, expected.split.train)
    assert found.time is not None
    assert expected.time is not None
    assert torch.equal(found.time.nan_to_num(), expected.time.nan_to_num())


def test_silos_of_different_scales_do_not_train_together(tmp_path: Path) -> None:
    written(tmp_path)
    line = (
        r"the same scale at every silo, got \[1.0, 5.0\] at client_00 and \[0.5, 5.0\] at client_01"
    )
    toml = tmp_path / "client_01" / "silo.toml"
    toml.write_text(toml.read_text().replace("scale = [1.0, 5.0]", "scale = [0.5, 5]"))
    with pytest.raises(DataError, match=line):
        sg.run(str(tmp_path), **GIVEN, split="public")


def test_a_folder_with_tables_that_nothing_describes_is_refused(tmp_path: Path) -> None:
    written(tmp_path)
    (tmp_path / "federation.toml").unlink(missing_ok=True)
    (tmp_path / "client_01" / "silo.toml").unlink()
    with raises_code(DataError, "missing-file"):
        read_silos(tmp_path)


WRONG = [
    (
        {"silo.toml": 'name = "a"\ntask = "rating"\nfeatures = 3\n'},
        "of a silo with ratings, got more",
    ),
    (
        {"silo.toml": 'name = "a"\ntask = "rating"\n[columns]\nid = "key"\n'},
        "column under .columns. 'id'",
    ),
    (
        {
            "silo.toml": 'name = "a"\ntask = "rating"\n[columns]\ntruster = "w"\n',
            "trust.csv": None,
        },
        "silo.toml: expected a table trust for column truster under .columns., got none: leave",
    ),
    ({"ratings.csv": "user,item,rating\nx,y,9\n"}, "ratings from 1 to 5, got 9 in .*line 2"),
    ({"ratings.csv": "user,item,rating\nx,y,3\nx,y,4\n"}, "one rating for each pair, got another"),
    ({"ratings.csv": "user,item,rating,split\nx,y,3,now\n"}, "column 'split': expected train"),
    ({"ratings.csv": None}, "expected one of ratings.csv"),
    ({"silo.toml": 'name = "a"\ntask = "ratings"\n'}, "silo.toml: unknown task 'ratings': did you"),
    ({"silo.toml": 'name = "a"\ntask = 3\n'}, "silo.toml: unknown task '3'"),
    ({"silo.toml": 'name = "a"\n'}, 'expected task = "rating" beside a table of ratings, got none'),
    (
        {"silo.toml": 'name = "a"\ntask = "rating"\nscale = "0.5,5"\n'},
        r"scale = \[least, largest\], such as \[0.5, 5\], got '0.5,5'",
    ),
    ({"trust.csv": "from,to\nx,z\n"}, "expected a column 'truster'"),
    ({"trust.csv": "truster,trustee\nx,\n"}, "the id of a trustee in .*line 2, got none"),
    (
        {"silo.toml": 'name = "a"\ntask = "rating"\nscale = [5, 1]\n'},
        r"silo.toml: expected scale = \[least, largest\], got \[5, 1\]$",
    ),
    ({"ratings.csv": "user,item,rating\nx,y,9\n"}, r"scale = \[least, largest\] in its silo.toml$"),
]


@pytest.mark.parametrize(("files", "line"), WRONG)
def test_wrong_folders_are_one_line(
    tmp_path: Path, files: dict[str, str | None], line: str
) -> None:
    right: dict[str, str | None] = {
        "silo.toml": 'name = "a"\ntask = "rating"\n',
        "ratings.csv": "user,item,rating\nx,y,3\nz,y,4\n",
        "trust.csv": "truster,trustee\nx,z\nx,nobody\n",
    }
    for name, text in (right | files).items():
        if text is not None:
            (tmp_path / name).write_text(text)
    with pytest.raises(DataError, match=line) as caught:
        read_silo(tmp_path)
    assert "\n" not in str(caught.value)


def test_a_folder_by_hand(tmp_path: Path) -> None:
    (tmp_path / "silo.toml").write_text('name = "a"\ntask = "rating"\nscale = [0, 10]\n')
    (tmp_path / "ratings.csv").write_text("user,item,rating\nx,y,0\nz,y,10\n")
    silo = read_silo(tmp_path)
    assert silo.y[-2:].tolist() == [0.0, 10.0]
    assert silo.split is None
