"""Laws of `silograph export-silos`: the folders are those of the cut that a run would make."""

import json
from pathlib import Path

import pytest
import torch

from commands import Capture, everything, printed
from rating_graphs import write_ratings
from silo_folders import same
from silograph.cli import run_app
from silograph.core.config import RunConfig
from silograph.core.key import Key
from silograph.experiment.resolve.data import cut_graph
from silograph.experiment.resolve.parts import choose_parts
from silograph.federation.matching import agree
from silograph.graph.block.block import make_block
from silograph.graph.datasets import load
from silograph.graph.silos.data import join_blocks, silo_block, silo_split
from silograph.graph.silos.read import read_silos

CUT = ["--clients", "3", "--partition", "random", "--drop-edges", "0.2", "--seed", "4"]


@pytest.mark.parametrize("format", ["csv", "npz"])
def test_exported_silos_are_the_cut_of_a_run(work: Path, capsys: Capture, format: str) -> None:
    options = [*CUT, "--split", "0.5/0.2/0.3", "--out", "silos", "--format", format]
    text = printed(capsys, "export-silos", "g.npz", *options)
    assert text == "3 silos written to silos\n"
    config = RunConfig(clients=3, partition="random", drop_edges=0.2, seed=4, split="0.5/0.2/0.3")
    cut = cut_graph(config, load("g.npz"), choose_parts(config).partition)
    silos = read_silos("silos")
    assert silos.name == "g"
    for how in ("public", config.split):  # what came along is what silos draw
        key = Key.of(4).fold("split")
        blocks = [silo_block(silo, silo_split(silo, how, key)) for silo in silos.members]
        expected = make_block(cut.graph, cut.partition, cut.split, torch.float32)
        same((join_blocks(blocks), agree(silos)), expected)


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ([], "error: Missing option '--out'."),
        (
            ["--out", "g.npz"],
            "error: expected a folder that is empty or does not exist yet, got g.",
        ),
        (
            ["--out", "s", "--format", "xml"],
            "error: expected format csv, npz or parquet, got 'xml'",
        ),
        (["--out", "s", "--partition", "shares"], "error: expected a cut in which no two clients "),
        (
            ["--out", "s", "--split", "public"],
            "error: --split: expected a graph with a public split, got ",
        ),
        (
            ["--out", "s", "--clients", "99"],
            "error: --clients: expected 1 to 60 (one node each at ",
        ),
    ],
)
def test_mistakes_are_one_line_and_write_nothing(
    work: Path, capsys: Capture, options: list[str], line: str
) -> None:
    before = everything(work)
    assert run_app(["export-silos", "g.npz", "--clients", "3", *options]) == 2
    error = capsys.readouterr().err
    assert error.startswith(line)
    assert error.count("\n") == 1
    assert everything(work) == before


def test_ratings_on_another_scale(work: Path, capsys: Capture) -> None:
    """A folder of tables says nothing of its scale; silos that are cut from it do."""
    write_ratings(Path("r"))
    table = Path("r", "ratings.csv")
    head, *rows = table.read_text(encoding="utf-8").splitlines()
    doubled = [f"{row.rpartition(',')[0]},{2 * float(row.rpartition(',')[2]):g}" for row in rows]
    table.write_text("\n".join([head, *doubled, ""]), encoding="utf-8")
    assert run_app(["export-silos", "r", "--clients", "2", "--out", "none"]) == 2
    said = "expected ratings from 1 to 5, got "
    assert "--rating-scale LEAST,LARGEST" in (error := capsys.readouterr().err)
    assert said in error
    printed(capsys, "export-silos", "r", "--rating-scale", "1,10", "--clients", "2", "--out", "s")
    scales = [path.read_text(encoding="utf-8") for path in Path("s").glob("*/silo.toml")]
    assert all("scale = [1.0, 10.0]" in text for text in scales)
    flags = ["--method", "fedavg", "--model", "rating_biases", "--rounds", "1", "--quiet"]
    cut = ["run", "r", "--clients", "2", "--rating-scale", "1,10", *flags, "--out"]
    printed(capsys, *cut, "x")
    again = printed(capsys, "run", "--config", "x/config.toml", "--out", "y", "--json", "--quiet")
    told = json.loads(again)["test"]
    Path("y", "result.json").unlink()
    resumed = printed(capsys, "resume", "y", "--json", "--quiet")
    assert json.loads(resumed)["test"] == told
    assert told == json.loads(Path("x", "result.json").read_text(encoding="utf-8"))["test"]
    printed(capsys, "run", "s", *flags, "--out", "z")  # the folders know their scale
    assert run_app(["predict", "x", "--data", "r", "--out", "p.csv"]) == 2
    assert "`silograph recommend` predicts ratings" in capsys.readouterr().err
    printed(capsys, *cut[:-1], "--method", "local", "--out", "own")
    assert run_app(["predict", "own", "--data", "r", "--out", "p.csv"]) == 2
    assert "`silograph recommend` predicts ratings" in capsys.readouterr().err
    attack = ["attack", "r", "--clients", "2", *flags[:4], "--out", "a"]
    assert run_app(attack) == 2
    assert said in capsys.readouterr().err
    printed(capsys, *attack, "--rating-scale", "1,10")
    for where, end in (("s", "--rating-scale"), ("g.npz", "expected a folder of ratings.csv")):
        assert run_app(["run", where, *flags, "--rating-scale", "1,10"]) == 2
        assert end in capsys.readouterr().err
    for wrong in ("5,1", "5", "a,b", "1,inf", "nan,2", "1,2,3"):
        assert run_app(["run", "r", *flags, "--rating-scale", wrong]) == 2
        assert "expected the least and the largest rating, such as 0.5,5" in capsys.readouterr().err


def test_options_of_a_partition_cut_as_in_a_run_file(work: Path, capsys: Capture) -> None:
    """`louvain` has no flag for `halve`; the option also reaches the folders of silos."""
    cut = ["g.npz", "--clients", "8", "--partition", "louvain"]
    text = 'partition = "louvain"\nclients = 8\n[options]\n"partition.halve" = false\n'
    Path("cut.toml").write_text(text, encoding="utf-8")
    told = printed(capsys, "partition", "g.npz", "--config", "cut.toml")
    assert printed(capsys, "partition", *cut, "--option", "halve=false") == told
    assert printed(capsys, "partition", *cut) != told
    printed(capsys, "export-silos", *cut, "--option", "halve=false", "--out", "silos")
    config = RunConfig(clients=8, partition="louvain", options={"partition.halve": False})
    made = cut_graph(config, load("g.npz"), choose_parts(config).partition).partition
    sizes = [len(part) for part in made.nodes]
    assert [silo.graph.num_nodes for silo in read_silos("silos").members] == sizes
