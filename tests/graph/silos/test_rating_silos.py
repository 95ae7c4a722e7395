"""Silos with ratings of their own: their folders, the run that they make, and what is refused."""

from pathlib import Path
from typing import Any

import pytest
import torch

import silograph as sg
from rating_graphs import rating_graph
from runs import same_bits, weights_of
from silograph.core.errors import DataError
from silograph.core.key import Key
from silograph.graph.block.block import make_block
from silograph.graph.partition.partition import Partition, make_partition
from silograph.graph.partition.split import choose_split
from silograph.graph.silos.data import join_blocks, silo_block, silo_split
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
    from dataclasses import replace

    cut = replace(graph, split=split)
    ours = sg.run(cut, **GIVEN, split="public", partition=partition)
    assert same_bits(weights_of(ours), weights_of(with_split))


WRONG = [
    (
        {"silo.toml": 'name = "a"\ntask = "rating"\nfeatures = 3\n'},
        "of a silo with ratings, got more",
    ),
    ({"silo.toml": 'name = "a"\ntask = "rating"\n[columns]\nid = "key"\n'}, "got more"),
    ({"ratings.csv": "user,item,rating\nx,y,9\n"}, "ratings from 1 to 5, got 9 in .*line 2"),
    ({"ratings.csv": "user,item,rating\nx,y,3\nx,y,4\n"}, "one rating for each pair, got another"),
    ({"ratings.csv": "user,item,rating,split\nx,y,3,now\n"}, "column 'split': expected train"),
    ({"ratings.csv": None}, "expected one of ratings.csv"),
    ({"trust.csv": "from,to\nx,z\n"}, "expected a column 'truster'"),
    ({"trust.csv": "truster,trustee\nx,\n"}, "the id of a trustee without tabs in .*line 2"),
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
