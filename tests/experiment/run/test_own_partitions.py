"""Laws of runs on partitions that users bring: they are runs on those partitions, and go on."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import silograph as sg
from commands import Capture
from mistakes import raises_code
from runs import FAST, go, of, outcome, rows_of, run_until, same_bits
from silograph.cli import run_app
from silograph.core.key import Key
from silograph.graph.graph import Graph
from silograph.graph.partition.partition import Partition, make_partition

MakeGraph = Callable[..., Graph]
OWN: dict[str, Any] = {k: v for k, v in FAST.items() if k not in ("clients", "partition")}
OWN |= {"rounds": 2, "kernels": "torch"}


def cut_of(graph: Graph, method: str = "metis", clients: int = 5) -> Partition:
    return make_partition(graph, method, clients=clients, key=Key.of(0).fold("partition"))


def write(path: str, graph: Graph, owner: torch.Tensor) -> None:
    lines = [f"{key},{client}" for key, client in zip(graph.node_id, owner.tolist(), strict=True)]
    Path(path).write_text("\n".join(["node,client", *lines]) + "\n")


def same(ours: sg.Result, theirs: sg.Result) -> None:
    """The same run, but for what its graph and its partition are called."""
    assert same_bits(of(ours), of(theirs))
    assert rows_of(ours) == rows_of(theirs)
    a, b = outcome(ours), outcome(theirs)
    names = {"dataset": "", "partition": ""}
    assert a | names == b | names


def test_every_form_of_a_partition_is_the_run_on_that_partition(
    work: Path, make_graph: MakeGraph
) -> None:
    graph = make_graph()
    cut = cut_of(graph)
    theirs = sg.run(graph, partition="metis", clients=5, **OWN)
    write("cut.csv", graph, cut.owner)
    forms: list[Any] = [
        cut,
        cut.owner,
        cut.owner.tolist(),
        lambda g: cut_of(g),
        lambda g: cut_of(g).owner.numpy(),
    ]
    for form in forms:
        ours = sg.run(graph, partition=form, **OWN)
        same(ours, theirs)
        assert ours.config.partition == f"given:{cut.hash}"
    for file in ("cut.csv", Path("cut.csv")):
        same(sg.run(graph, partition=file, **OWN), theirs)


def test_overlapping_partitions_are_taken_as_they_are(make_graph: MakeGraph) -> None:
    graph = make_graph()
    theirs = sg.run(graph, partition="metis_overlapping", clients=5, **OWN)
    same(sg.run(graph, partition=cut_of(graph, "metis_overlapping"), **OWN), theirs)


@pytest.mark.law(sample=6)
@pytest.mark.parametrize("form", ["array", "overlapping", "file"])
def test_a_run_on_an_own_partition_goes_on(
    work: Path, monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    graph = sg.load("g.npz")
    cut = cut_of(graph, "metis_overlapping" if form == "overlapping" else "metis")
    given: Any = {"array": cut.owner, "overlapping": cut, "file": "cut.csv"}[form]
    write("cut.csv", graph, cut.owner)
    run_until(monkeypatch, "g.npz", 2, Path("out"), partition=given, **OWN)
    again = None if form == "file" else given
    if again is not None:
        with raises_code(sg.ConfigError, "part-not-saved", part="partition", path="out"):
            sg.resume("out")
        with raises_code(sg.CheckpointError, "foreign-checkpoint", what="partition"):
            sg.resume("out", partition=cut_of(graph, clients=3))
    else:
        monkeypatch.chdir(work.parent)  # the folder says the file's absolute path
    ours = sg.resume(work / "out", partition=again)
    monkeypatch.chdir(work)
    same(ours, sg.run("g.npz", partition=given, **OWN))


def test_a_file_that_has_changed_is_refused_in_one_line(
    work: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    graph = sg.load("g.npz")
    cut = cut_of(graph)
    write("cut.csv", graph, cut.owner)
    run_until(monkeypatch, "g.npz", 2, Path("out"), partition="cut.csv", **OWN)
    write("cut.csv", graph, cut.owner.flip(0))
    with raises_code(sg.CheckpointError, "foreign-checkpoint", what="partition"):
        sg.resume("out")
    with raises_code(sg.ConfigError, "unread-option", option="partition"):
        sg.resume("out", partition=cut)
    Path("cut.csv").unlink()
    with raises_code(sg.DataError, "missing-file"):
        sg.resume("out")


def big(n: int = 60) -> torch.Tensor:
    return torch.arange(n) % 3


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"partition": 5}, "by name, FILE.csv, an array .* or a function of the graph, got int"),
    ({"partition": {}}, "or a function of the graph, got dict"),
    ({"partition": big(59)}, r"for each of the 60 nodes of 'planted' as partition, got shape"),
    (
        {"partition": lambda g: None},
        "or a Partition, from partition function <lambda>, got None: return one",
    ),
    (
        {"partition": lambda g: g.num_nodes // 0},
        r"^in partition function <lambda>: ZeroDivisionError: .* \(.*test_own_partitions\.py, line",
    ),
    ({"partition": lambda g: 3}, r"as partition, got shape \(\): give one number"),
    ({"partition": "nope.csv"}, r"nope\.csv: expected a CSV file, got No such file"),
    ({"partition": big(), "clients": 7}, "clients: expected 3, as the partition has, got 7: leave"),
    ({"partition": "./cut"}, r"name, or a file of clients whose name ends in \.csv, got '\./cut'"),
    ({"partition": "metos"}, "did you mean 'metis'[?]$"),
    (
        {"partition": big(), "alpha": 1.0},
        "alpha: partition of your own has no such option, but partition diri",
    ),
    ({"partition": "given:0123456789abcdef"}, "expected the partition given:0123.* in memory; use"),
]


@pytest.mark.parametrize(("options", "match"), WRONG)
def test_partitions_that_cannot_be_used_are_one_short_line(
    work: Path, make_graph: MakeGraph, options: dict[str, Any], match: str
) -> None:
    with pytest.raises(sg.SilographError, match=match) as caught:
        sg.run(make_graph(), **{**OWN, **options})
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 250


def test_a_partition_with_copies_is_used_as_it_is(make_graph: MakeGraph) -> None:
    graph = make_graph()
    cut = cut_of(graph, "metis_overlapping")
    for options, match in (
        ({"drop_edges": 0.5}, "used as it is, got drop_edges=0.5"),
        ({"largest_component": True}, "used as it is, got largest_component=True"),
        ({"clients": 4}, "clients: expected 5, as the partition has, got 4"),
        ({"features": "degree"}, r"every node at a client with features degree, got \d+ at none"),
        ({"partition_seed": 4}, "partition_seed: expected none with a Partition, which is cut"),
        ({"method": "bns"}, "expected a cut in which each node has one client for bns, which"),
    ):
        with pytest.raises(sg.SilographError, match=match):
            sg.run(graph, partition=cut, **{**OWN, **options})
    with pytest.raises(sg.PartitionError, match="of the 30 nodes of 'planted', got one of 60"):
        sg.run(make_graph(30), partition=cut, **OWN)


@pytest.mark.usefixtures("forked")
def test_several_runs_take_arrays_and_files(work: Path) -> None:
    graph = sg.load("g.npz")
    cut, study = cut_of(graph), {k: v for k, v in OWN.items() if k != "method"}
    write("cut.csv", graph, cut.owner)
    study |= {"methods": ["fedavg"], "seeds": 1}
    ours = sg.compare(graph, partition=cut.owner, processes=1, out="array", **study)
    theirs = sg.compare("g.npz", partition="cut.csv", processes=0, out="file", **study)
    hashes = [line["partition"] for table in (ours, theirs) for line in table.lines if line]
    assert hashes == [cut.hash] * 2
    for out, other in (("array", cut.owner.flip(0)), ("file", "cut.csv")):
        if out == "file":
            write("cut.csv", graph, cut.owner.flip(0))
        data: Any = graph if out == "array" else "g.npz"
        with raises_code(sg.ConfigError, "existing-output"):
            sg.compare(data, partition=other, processes=0, out=out, **study)
    with pytest.raises(sg.ConfigError, match="every node has one client for several runs"):
        sg.compare(graph, partition=cut_of(graph, "metis_overlapping"), **study)
    with pytest.raises(sg.ConfigError, match=r"to vary by name or as FILE\.csv, got Tensor"):
        sg.compare(graph, over={"partition": [cut.owner]}, **study)


def test_a_file_on_the_command_line(work: Path, capsys: Capture) -> None:
    graph = sg.load("g.npz")
    cut = cut_of(graph)
    write("cut.csv", graph, cut.owner)
    assert run_app(["partition", "g.npz", "--partition", "cut.csv"]) == 0
    assert cut.hash in capsys.readouterr().out
    assert run_app(["export-silos", "g.npz", "--partition", "cut.csv", "--out", "silos"]) == 0
    assert sg.read_silos("silos").ids == cut.ids
    Path("run.toml").write_text('dataset = "g.npz"\npartition = "cut.csv"\nrounds = 1\n')
    assert run_app(["run", "--config", "run.toml", "--out", "out", "--quiet"]) == 0
    assert f'partition = "{work}/cut.csv"' in Path("out/config.toml").read_text()


def test_silos_are_cut_already(work: Path, make_graph: MakeGraph) -> None:
    graph = make_graph()
    made = go(graph, rounds=1).cut
    assert made is not None
    sg.write_silos("silos", graph, made.partition, made.split)
    with raises_code(sg.ConfigError, "unread-option", option="partition", part="silos"):
        sg.run("silos", partition=big(), **OWN)
    with raises_code(sg.ConfigError, "unread-option", option="partition", part="silos"):
        sg.run(sg.read_silos("silos"), partition=np.asarray(big()), **OWN)
