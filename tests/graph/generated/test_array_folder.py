"""Laws of generated graphs on disk: whole or absent, mapped and not read, and every mistake."""

import json
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import silograph
from forked import completed
from silograph.core.errors import ConfigError, DataError
from silograph.graph.datasets import load, locate
from silograph.graph.generated import generate as module
from silograph.graph.generated.generate import PRESETS, GenerateRequest, generate, parse
from silograph.graph.generated.planted import COLUMN_BITS, Entries, write_blocks
from silograph.graph.graph import fingerprint

TINY = 0.001
FOLDER = "yelp-0.001-0-v1"


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home without any data."""
    folder = tmp_path / "home"
    folder.mkdir()
    monkeypatch.setenv("HOME", str(folder))
    monkeypatch.delenv("SILOGRAPH_DATA", raising=False)
    return folder


@pytest.fixture
def data(tmp_path: Path) -> Path:
    folder = tmp_path / "data"
    folder.mkdir()
    return folder


def names(folder: Path) -> list[str]:
    """What is below `generated/`."""
    return sorted(path.name for path in (folder / "generated").iterdir())


def not_again(*_: Any) -> None:
    raise AssertionError("made again")


# --- on disk ------------------------------------------------------------------------------------


def test_the_second_call_reads_what_the_first_made(
    data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[tuple[str, float]] = []
    first = generate("yelp", scale=TINY, data_dir=data, report=lambda *news: told.append(news))
    assert told[0] == (
        "generating generated:yelp, scale 0.001: 717 nodes, 6,977 edges, to be kept in "
        f"{data / 'generated' / FOLDER}",
        0.0,
    )
    assert told[-1] == (told[0][0], 1.0)
    monkeypatch.setattr(module, "make", not_again)
    second = generate("YELP", scale=TINY, data_dir=str(data), report=not_again)
    assert fingerprint(second) == fingerprint(first)
    assert names(data) == [FOLDER]
    manifest = json.loads((data / "generated" / FOLDER / "manifest.json").read_text())
    assert manifest["fingerprint"] == fingerprint(first)
    assert manifest["edges"] == first.num_edges
    assert manifest["draws"] > first.num_edges


def is_mapped(tensor: torch.Tensor, file: Path) -> bool:
    """Whether the system has a tensor's first byte from a file."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, *_, path = line.split(maxsplit=5)
        begin, end = (int(part, 16) for part in span.split("-"))
        if begin <= tensor.data_ptr() < end:
            return path == str(file)
    return False


def test_arrays_are_mapped_and_their_files_never_written(data: Path) -> None:
    graph = generate("yelp", scale=TINY, data_dir=data)
    folder = (data / "generated" / FOLDER).resolve()
    assert isinstance(graph.x, torch.Tensor)
    assert graph.split is not None
    assert graph.silo is not None
    tensors = {
        "x": graph.x,
        "y": graph.y,
        "indptr": graph.adj.indptr,
        "indices": graph.adj.indices,
        "train": graph.split.train,
        "val": graph.split.val,
        "test": graph.split.test,
        "community": graph.silo,
    }
    for name, tensor in tensors.items():
        assert is_mapped(tensor, folder / f"{name}.npy")
    before = (folder / "x.npy").read_bytes()
    graph.x.zero_()
    assert (folder / "x.npy").read_bytes() == before
    again = generate("yelp", scale=TINY, data_dir=data).x
    assert isinstance(again, torch.Tensor)
    assert float(again.abs().sum()) > 0


def test_where_it_is_kept(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    generate("yelp", scale=TINY)
    assert names(home / ".cache" / "silograph") == [FOLDER]
    variable = tmp_path / "variable"
    variable.mkdir()
    monkeypatch.setenv("SILOGRAPH_DATA", str(variable))
    generate("yelp", scale=TINY, seed=7)
    assert names(variable) == ["yelp-0.001-7-v1"]


def test_it_is_a_dataset_by_name(data: Path) -> None:
    graph = load("Generated:Yelp@7", data_dir=data, scale=TINY)
    assert (graph.name, graph.num_nodes) == ("generated:yelp@7", 717)
    assert fingerprint(graph) == fingerprint(generate("yelp", scale=TINY, seed=7, data_dir=data))
    assert load("generated:yelp", data_dir=data, scale=TINY).name == "generated:yelp"
    assert locate("generated:yelp", data_dir=data) is None
    assert silograph.generate is generate


def test_a_file_does_not_hide_it(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(data)
    for name in ("generated:yelp", "generated:yelp.npz"):
        Path(name).write_text("mine")
    assert load("generated:yelp", data_dir=data, scale=TINY).num_nodes == 717


# --- whole or absent ----------------------------------------------------------------------------


@pytest.mark.parametrize("at", ["_write_edges", "_write_nodes", "fingerprint", "write_manifest"])
@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
def test_what_ends_half_way_leaves_nothing(
    data: Path, monkeypatch: pytest.MonkeyPatch, at: str, error: type[BaseException]
) -> None:
    def ends(*_: Any) -> None:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(module, at, ends)
        with pytest.raises(error):
            generate("yelp", scale=TINY, data_dir=data)
    assert names(data) == []
    assert generate("yelp", scale=TINY, data_dir=data).num_nodes == 717


def test_what_is_killed_half_way_is_cleared_away(data: Path) -> None:
    script = (
        "import os, signal, sys; import silograph; from silograph.graph.generated import generate\n"
        "generate._write_nodes = lambda *_: os.kill(os.getpid(), signal.SIGKILL)\n"
        f"silograph.generate('yelp', scale={TINY}, data_dir=sys.argv[1])"
    )
    done = completed([sys.executable, "-c", script, str(data)])
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert names(data) == [f".partial-{FOLDER}"]
    generate("yelp", scale=TINY, seed=1, data_dir=data)  # any other clears it
    assert names(data) == ["yelp-0.001-1-v1"]


def test_one_makes_and_the_other_waits(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make, begun, go = module.make, threading.Event(), threading.Event()
    made, told, graphs = [], [], []

    def slow(*arguments: Any) -> None:
        made.append(arguments)
        begun.set()
        assert go.wait(600)
        make(*arguments)

    def report(what: str, share: float) -> None:
        told.append(what)
        if what.startswith("waiting"):
            go.set()

    def one() -> None:
        graphs.append(generate("yelp", scale=TINY, data_dir=data, report=report))

    monkeypatch.setattr(module, "make", slow)
    threads = [threading.Thread(target=one) for _ in range(2)]
    threads[0].start()
    assert begun.wait(600)
    threads[1].start()
    for thread in threads:
        thread.join(600)
    assert (len(made), len(graphs)) == (1, 2)
    assert f"waiting for another process in {data / 'generated'}" in told
    assert names(data) == [FOLDER]


# --- mistakes -----------------------------------------------------------------------------------


def damaged(folder: Path, how: str) -> None:
    path = folder / "indices.npy"
    match how:
        case "short":
            path.write_bytes(path.read_bytes()[:-400])
        case "absent":
            path.unlink()
        case "empty":
            path.write_bytes(b"")
        case "other":
            np.save(path, np.zeros(3))
        case "offsets":
            offsets = np.load(folder / "indptr.npy")
            np.save(folder / "indptr.npy", offsets + np.int32(2))
        case "no manifest":
            (folder / "manifest.json").unlink()
        case "renamed":
            folder.rename(folder.with_name("yelp-0.002-0-v1"))
        case text:
            (folder / "manifest.json").write_text(text)


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ("short", "ValueError: mmap length is greater than file size"),
        ("absent", "FileNotFoundError"),
        ("empty", "EOFError|ValueError"),
        ("other", r"ValueError: indices\.npy of float64 \(3,\) instead of "),
        ("offsets", "offsets that do not fit the edges"),
        ("no manifest", "FileNotFoundError"),
        ("{", "JSONDecodeError"),
        ("[]", "TypeError"),
        ('{"version": 1}', "KeyError: 'preset'"),
        ("renamed", "ValueError: scale 0.001 instead of 0.002"),
    ],
)
def test_a_damaged_folder_is_one_line(data: Path, how: str, reason: str) -> None:
    generate("yelp", scale=TINY, data_dir=data)
    damaged(data / "generated" / FOLDER, how)
    scale = 0.002 if how == "renamed" else TINY
    place = data / "generated" / f"yelp-{scale}-0-v1"
    match = rf"expected a whole graph in {re.escape(str(place))}, got ({reason}).*: delete the fol"
    with pytest.raises(DataError, match=match) as caught:
        generate("yelp", scale=scale, data_dir=data)
    assert "\n" not in str(caught.value)
    shutil.rmtree(place)
    assert generate("yelp", scale=scale, data_dir=data).num_features == 300


WRONG: list[tuple[Any, dict[str, Any], str]] = [
    ("redit", {}, "unknown generated graph 'redit': did you mean 'reddit'"),
    ("", {}, "unknown generated graph ''"),
    (3, {}, "expected the name of a generated graph, got int"),
    ("yelp", {"scale": 0}, "expected a scale above 0, got 0"),
    ("yelp", {"scale": -0.5}, r"expected a scale above 0, got -0\.5"),
    ("yelp", {"scale": float("nan")}, "expected a scale above 0, got nan"),
    ("yelp", {"scale": float("inf")}, "expected a scale above 0, got inf"),
    ("yelp", {"scale": "half"}, "expected a number as scale, got 'half'"),
    ("yelp", {"scale": True}, "expected a number as scale, got True"),
    ("yelp", {"seed": -1}, "expected a whole number from 0 as seed, got -1"),
    ("yelp", {"seed": 2**63}, "expected a whole number from 0 as seed, got 9223372036854775808"),
    ("yelp", {"seed": 1.5}, r"expected a whole number from 0 as seed, got 1\.5"),
    (
        "yelp",
        {"scale": 1e-4},
        r"expected a scale of 0\.00014 to 2995 for yelp, got 0\.0001: at a mean degree of 19 and "
        "100 classes, 100 nodes are the fewest and 2,147,483,647 the most",
    ),
    ("reddit", {"scale": 1e-3}, r"expected a scale of 0\.00846 to 9218 for reddit, got 0\.001"),
    ("reddit", {"scale": 1e5}, "expected a scale of .* got 100000: at a mean degree of 492"),
]


@pytest.mark.parametrize(("name", "options", "match"), WRONG)
def test_wrong_arguments(data: Path, name: Any, options: dict[str, Any], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        generate(name, data_dir=data, **options)
    assert list(data.iterdir()) == []


@pytest.mark.parametrize(
    ("name", "scale", "match"),
    [
        ("generated:redit", 1.0, "unknown generated graph 'redit': did you mean 'reddit'"),
        ("generated:reddit@", 1.0, "expected a whole number from 0 as seed after @, got 'gen"),
        ("generated:reddit@x", 1.0, "whole number from 0 as seed after @, got 'generated:reddit@x"),
        ("generated:reddit@-1", 1.0, "whole number from 0 as seed after @"),
        (f"generated:reddit@{2**63}", 1.0, "expected a whole number from 0 as seed, got 92233"),
        ("digits", 0.5, r"scale: expected 1 with digits, got 0\.5: only generated graphs have"),
        ("amazon2m", 1.0, "unknown dataset 'amazon2m': did you mean 'generated:amazon2m'"),
    ],
)
def test_wrong_names(data: Path, name: str, scale: float, match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        load(name, data_dir=data, scale=scale)
    assert list(data.iterdir()) == []


def test_the_folder_must_be_there(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"expected a folder as data_dir, got .*no: no such folder"):
        generate("yelp", scale=TINY, data_dir=tmp_path / "no")


def test_a_small_disk_is_known_before(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "make", not_again)
    with pytest.raises(
        DataError, match=r"expected [\d,]+\.\d GB of free disk for generated:reddit"
    ):
        generate("reddit", scale=9000, data_dir=data)


def test_a_disk_that_fills_up_is_one_line(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module, "write_blocks", full)
    place = data / "generated" / FOLDER
    match = f"expected to keep generated:yelp in {place}, got: No space left on device"
    with pytest.raises(DataError, match=re.escape(match)):
        generate("yelp", scale=TINY, data_dir=data)
    assert names(data) == []


def test_a_folder_that_cannot_be_made_is_one_line(data: Path) -> None:
    (data / "generated").write_text("a file")
    with pytest.raises(DataError, match=r"expected to keep generated:yelp in .*, got: File exists"):
        generate("yelp", scale=TINY, data_dir=data)


def test_parse() -> None:
    assert parse("GENERATED:Reddit@007") == ("Reddit", 7)
    assert {GenerateRequest(name, 1.0, 0).name for name in PRESETS} == {
        f"generated:{n}" for n in PRESETS
    }


# --- the set of entries -------------------------------------------------------------------------


def pack(row: np.ndarray, column: np.ndarray) -> np.ndarray:
    packed: np.ndarray = row << COLUMN_BITS | column
    return packed


@pytest.mark.parametrize(("rows", "bucket"), [(1, 10), (7, 1), (100, 50), (100, 10**6)])
def test_entries_are_a_sorted_set(data: Path, rows: int, bucket: int) -> None:
    """Against NumPy's, over three goes with repeated entries among and between them."""
    rng = np.random.default_rng(0)
    entries, seen = Entries(data, rows, 600, bucket), np.empty(0, np.int64)
    for size in (500, 300, 0):
        new = pack(rng.integers(0, rows, size), rng.integers(0, 20, size))
        entries.add(iter(np.array_split(new, 3)))
        assert [*entries.settle()][-1] == 1
        seen = np.union1d(seen, new)
        assert len(entries) == len(seen)
    degrees, columns = zip(*entries.take_rows(), strict=True)
    degree = np.concatenate(degrees)
    assert np.array_equal(pack(np.repeat(np.arange(rows), degree), np.concatenate(columns)), seen)
    assert list(data.iterdir()) == []


def test_blocks_make_one_array(tmp_path: Path) -> None:
    def blocks() -> Iterator[np.ndarray]:
        yield np.ones((2, 3), np.float64)
        yield np.zeros((0, 3))
        yield np.zeros((1, 3), np.float64)[:, ::-1]

    write_blocks(tmp_path / "a.npy", np.float32, (3, 3), blocks())
    array = np.load(tmp_path / "a.npy")
    assert (array.dtype, array.tolist()) == (np.float32, [[1] * 3, [1] * 3, [0] * 3])


# --- at full size -------------------------------------------------------------------------------

MEASURE = """
import json, resource, sys, time, torch, silograph
start = time.monotonic()
graph = silograph.generate("reddit", scale=0.87, data_dir=sys.argv[1])
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
print(json.dumps([time.monotonic() - start, peak, graph.adj.nnz, graph.num_nodes]))
"""


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_hundred_million_directed_edges(tmp_path: Path) -> None:
    command = [sys.executable, "-c", MEASURE, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    _, peak, entries, nodes = json.loads(done.stdout)
    assert nodes == 202_680
    assert entries == pytest.approx(99_715_826, rel=0.01)
    assert peak < 4e9
    shutil.rmtree(tmp_path / "generated")
