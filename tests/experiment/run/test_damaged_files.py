"""Whatever happens to a byte of a stopped run's folder: it goes on bit for bit, or says why not."""

import itertools
import json
import logging
import math
import os
import random
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import silograph as sg
from mistakes import raises_code
from runs import FAST, files_of, run_until
from silograph.core.errors import CheckpointError, ConfigError, SilographError
from silograph.core.files import hold_folder, write_atomic
from silograph.experiment.run.result_folder import ResultFolder
from silograph.federation.checkpoint import read_checkpoint, to_bytes
from silograph.graph.graph import Graph

MakeGraph = Callable[..., Graph]
Stopped = tuple[Path, Graph, dict[str, Any]]
HALF = "expected facts and tensors in a checkpoint, got: .*surrogates not allowed"
EARLY = ("checksums.json", "clients.csv", "run.json", "simulation.json")


@pytest.fixture(scope="module")
def original(make_graph: MakeGraph, tmp_path_factory: pytest.TempPathFactory) -> Stopped:
    """A run that died in round 4, its graph, and what it should have left."""
    folder, graph = tmp_path_factory.mktemp("original"), make_graph()
    sg.run(graph, **FAST, out=str(folder / "whole"))
    with pytest.MonkeyPatch.context() as patch:
        run_until(patch, graph, 4, folder / "cut", **FAST)
    return folder / "cut", graph, files_of(folder / "whole")


@pytest.fixture
def stopped(original: Stopped, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Stopped:
    monkeypatch.setattr("silograph.experiment.run.run.add_report", lambda _: None)  # takes long
    folder, graph, expected = original
    shutil.copytree(folder, tmp_path / "cut")
    return tmp_path / "cut", graph, expected


def files_in(folder: Path) -> list[str]:
    return sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file())


def flip(data: bytearray, draw: random.Random) -> None:
    data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)


def digit(data: bytearray, draw: random.Random) -> None:
    """Change a digit to another, which every reader takes; where there is none, any byte."""
    places = [i for i, byte in enumerate(data) if chr(byte).isdigit()]
    place = draw.choice(places or [0])
    data[place] = ord("1") if data[place] == ord("7") else ord("7")


def delete(data: bytearray, draw: random.Random) -> None:
    del data[draw.randrange(len(data))]


def zeros(data: bytearray, draw: random.Random) -> None:
    start = draw.randrange(len(data))
    data[start : start + 40] = bytes(len(data[start : start + 40]))


DAMAGES = (flip, digit, delete, zeros)


def goes_on_or_says_why(
    folder: Path, graph: Graph, expected: dict[str, Any], tries: int, seed: int
) -> None:
    """Damage each file in turn, restore it, and see what a resumed run makes of it.

    Damages take turns: with two tries each file has two of them.
    """
    draw, lines = random.Random(seed), list[str]()
    turns = itertools.cycle(DAMAGES)
    for name in files_in(folder):
        for damage in itertools.islice(turns, min(tries, len(DAMAGES))):
            for number in range(-(-tries // len(DAMAGES))):
                copy = folder.with_name("copy")
                shutil.copytree(folder, copy)
                data = bytearray((copy / name).read_bytes())
                damage(data, draw)
                (copy / name).write_bytes(data)
                try:
                    sg.resume(copy, graph=graph)
                except SilographError as error:
                    lines.append(str(error))
                else:
                    assert files_of(copy) == expected, (name, damage.__name__, number)
                shutil.rmtree(copy)
    assert lines
    assert not [line for line in lines if "\n" in line]


def test_any_damage_is_found(stopped: Stopped) -> None:
    goes_on_or_says_why(*stopped, tries=2, seed=1)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2, 5))
def test_any_damage_is_found_at_many_places(stopped: Stopped, seed: int) -> None:
    goes_on_or_says_why(*stopped, tries=60, seed=seed)


@pytest.mark.parametrize("name", ["rounds.csv", "ledger.jsonl"])
@pytest.mark.parametrize("byte", [b"7", b"\0"])
def test_damage_of_unchanged_length_is_named(stopped: Stopped, name: str, byte: bytes) -> None:
    """A digit is changed where every checkpoint knows it: no other numbers, and no traceback."""
    folder, graph, _ = stopped
    data = (folder / name).read_bytes()
    place = next(i for i in range(len(data) // 3, len(data)) if data[i : i + 1] in b"0123456")
    (folder / name).write_bytes(data[:place] + byte + data[place + 1 :])
    with pytest.raises(
        CheckpointError, match=rf"{name} is damaged within the \d+ bytes .*restore what is missing"
    ):
        sg.resume(folder, graph=graph)
    assert (folder / name).stat().st_size == len(data)  # nothing was cut


@pytest.mark.parametrize("name", ["ledger.jsonl", "report.html.partial", "models/x"])
def test_links_are_not_written_through(stopped: Stopped, tmp_path: Path, name: str) -> None:
    """A folder of somebody else could name any file of its reader."""
    folder, graph, _ = stopped
    (mine := tmp_path / "mine").write_text("precious")
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).unlink(missing_ok=True)
    (folder / name).symlink_to(mine)
    with pytest.raises(ConfigError, match=rf"without links, got one at .*{name}"):
        sg.resume(folder, graph=graph)
    write_atomic(folder / "report.html", "page")
    assert mine.read_text() == "precious"


@pytest.mark.parametrize(
    ("facts", "says"),
    [
        ({"prefixes": 3}, "its facts are not those that this version writes"),
        ({"prefixes": {"none.csv": [1, ""]}}, "its facts are not those that this version writes"),
        ({"best_apart": True, "best_round": "x"}, "its facts are not those that this version"),
        ({"groups": 3}, "got facts or tensors of another form"),
        ({"groups": "x"}, "got facts or tensors of another form"),
        ({"groups": ["server/memory", "server/weights"]}, "got facts or tensors of another form"),
        ({"groups": ["best/personalized", "best/server"]}, "got facts or tensors of another form"),
        ({"seconds": []}, "got facts or tensors of another form"),
        ({"executed": "many"}, "got facts or tensors of another form"),
        ({"executed": math.inf}, "got facts or tensors of another form"),
        ({"seconds": math.inf}, "got facts or tensors of another form"),
        ({"seconds": math.nan}, "got facts or tensors of another form"),
        ({"stopped": math.inf}, "got facts or tensors of another form"),
        ({"best_round": math.inf}, "its facts are not those that this version"),
        ({"best_round": "\ud800"}, HALF),
        ({"best_round": ["\ud800"]}, HALF),
        ({"best_round": 99}, "expected best-000000099.checkpoint, got: No such file"),
        ({"best_round": True}, "got facts or tensors of another form"),
        ({"best_away": ["\ud800"]}, HALF),
        ({"best_apart": True, "best_round": math.inf}, "its facts are not those that this version"),
        ({"run": "\ud800"}, HALF),
        ({"stopped": "\ud800"}, HALF),
        ({"run": "x"}, "it belongs to another run"),
        ({"best_away": ["nobody"]}, "got facts or tensors of another form"),
        ({"best_round": ["x"]}, "its facts are not those that this version"),
        ({"groups": ["\ud800"]}, HALF),
        ({"prefixes": {"rounds.csv": [1, "\ud800"]}}, HALF),
        ({"prefixes": {"\ud800": [1, ""]}}, HALF),
    ],
    ids=ascii,
)
def test_facts_of_another_form_are_one_line(
    stopped: Stopped, facts: dict[str, Any], says: str
) -> None:
    """Whoever made the file made its checksum as well."""
    folder, graph, _ = stopped
    for path in (folder / "checkpoints").glob("round-*"):
        found = read_checkpoint(path, int(path.stem.rpartition("-")[2]))
        changed = replace(found, facts={**found.facts, **facts})
        path.write_bytes(b"".join(to_bytes(changed)))
    with pytest.raises(CheckpointError, match=says) as caught:
        sg.resume(folder, graph=graph)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("server/weights/0.weight", None),
        ("server/weights/0.weight", lambda t: t[:1]),
        ("best/personalized/test.fn", lambda t: -t - 1),
        ("best/server/test.nodes", lambda t: t[:1]),
        ("best/server/test.tp", lambda t: t[:, :1]),
        ("best/server/test.fp", lambda t: t[:, :1]),
        ("best/server/test.fn", lambda t: t.flatten()[0]),
        ("best/server/test.nodes", lambda t: t[:0]),
        ("best/server/test.nodes", lambda t: t[0]),
        ("best/server/test.nodes", lambda t: t.double()),
        ("best/server/val.loss", lambda t: t * torch.nan),
        ("best/personalized/val.loss", lambda t: t + torch.inf),
        ("best/personalized/test.fn", lambda t: t[None]),
        ("best/personalized/test.histogram", lambda t: t[:, :1]),
        ("each/val.nodes", None),
        ("each/test.tp", lambda t: t[:, :1]),
    ],
)
def test_tensors_of_another_form_are_one_line(
    stopped: Stopped, name: str, change: Callable[[torch.Tensor], torch.Tensor] | None
) -> None:
    folder, graph, _ = stopped
    for path in (folder / "checkpoints").glob("round-*"):
        found = read_checkpoint(path, int(path.stem.rpartition("-")[2]))
        tensors = {n: t for n, t in found.tensors.items() if change is not None or n != name}
        if change is not None:
            tensors[name] = change(tensors[name]).contiguous()
        path.write_bytes(b"".join(to_bytes(replace(found, tensors=tensors))))
    with pytest.raises(
        CheckpointError, match=r"got facts or tensors of another form|got none"
    ) as caught:
        sg.resume(folder, graph=graph)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("method", "kept_in"), [("fedper", "server/memory"), ("scaffold", "server/weights")]
)
def test_weights_that_are_gone_are_one_line(
    make_graph: MakeGraph,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    method: str,
    kept_in: str,
) -> None:
    """Also where no model of the server's is scored, as with models in parts."""
    folder, graph, options = tmp_path / "cut", make_graph(30), {**FAST, "method": method}
    options |= {"optimizer": "sgd", "clients": 2}
    run_until(monkeypatch, graph, 2, folder, **options)
    for path in (folder / "checkpoints").glob("round-*"):
        found = read_checkpoint(path, int(path.stem.rpartition("-")[2]))
        kept = {n: t for n, t in found.tensors.items() if not n.startswith(kept_in)}
        assert len(kept) < len(found.tensors)
        groups = [name for name in found.facts["groups"] if name != kept_in]
        facts = {**found.facts, "groups": groups}
        path.write_bytes(b"".join(to_bytes(replace(found, tensors=kept, facts=facts))))
    with pytest.raises(CheckpointError, match="got facts or tensors of another form") as caught:
        sg.resume(folder, graph=graph)
    assert "\n" not in str(caught.value)


def test_scores_that_are_gone_are_one_line(stopped: Stopped) -> None:
    folder, graph, _ = stopped
    for path in (folder / "checkpoints").glob("round-*"):
        found = read_checkpoint(path, int(path.stem.rpartition("-")[2]))
        kept = {n: t for n, t in found.tensors.items() if not n.startswith("best/server")}
        groups = [name for name in found.facts["groups"] if name != "best/server"]
        facts = {**found.facts, "groups": groups}
        path.write_bytes(b"".join(to_bytes(replace(found, tensors=kept, facts=facts))))
    with pytest.raises(CheckpointError, match="got facts or tensors of another form"):
        sg.resume(folder, graph=graph)


@pytest.fixture(scope="module")
def used_rows(make_graph: MakeGraph, tmp_path_factory: pytest.TempPathFactory) -> Stopped:
    """A run with used rows that died in round 3."""
    folder, graph = tmp_path_factory.mktemp("used") / "cut", make_graph(sparse=True)
    with pytest.MonkeyPatch.context() as patch:
        run_until(patch, graph, 3, folder, **{**FAST, "weight_rows": "used"})
    return folder, graph, {}


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("used", lambda t: t + 10**6),
        ("used", lambda t: t - 10**6),
        ("used", lambda t: t[:-1]),
        ("used", lambda t: t.flip(0)),
        ("used", lambda t: t.double()),
        ("used", lambda t: t[:, None]),
        ("used", None),
        ("off", lambda t: t.flip(0)),
        ("off", lambda t: t[[0, -1]]),
        ("off", lambda t: torch.cat([t[:1], t[-1:], t[2:]])),
        ("off", lambda t: t.int()),
        ("off", lambda t: t + 1),
        ("off", None),
    ],
)
def test_used_rows_of_another_form_are_one_line(
    used_rows: Stopped,
    tmp_path: Path,
    name: str,
    change: Callable[[torch.Tensor], torch.Tensor] | None,
) -> None:
    folder, graph, _ = used_rows
    shutil.copytree(folder, tmp_path / "cut")
    for path in (tmp_path / "cut" / "checkpoints").glob("round-*"):
        found = read_checkpoint(path, int(path.stem.rpartition("-")[2]))
        tensors = dict(found.tensors)
        was = tensors.pop(f"server/memory/sent/{name}")
        if change is not None:
            tensors[f"server/memory/sent/{name}"] = change(was).contiguous()
        path.write_bytes(b"".join(to_bytes(replace(found, tensors=tensors))))
    with pytest.raises(CheckpointError, match="got facts or tensors of another form") as caught:
        sg.resume(tmp_path / "cut", graph=graph)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("source", [{}, {"dataset": "cora"}, {"data_dir": "."}])
def test_a_source_without_its_parts_is_one_line(stopped: Stopped, source: dict[str, str]) -> None:
    folder, *_ = stopped
    about = json.loads((folder / "run.json").read_text())
    (folder / "run.json").write_text(json.dumps(about | {"source": source}))
    with pytest.raises(CheckpointError, match="a source without data_dir and dataset: restore"):
        sg.resume(folder)


def test_half_a_surrogate_pair_is_written_as_its_number(tmp_path: Path) -> None:
    """JSON of others may hold one; UTF-8 cannot."""
    write_atomic(tmp_path / "page", json.loads('"caf\u00e9 \\ud800"'))
    assert (tmp_path / "page").read_text(encoding="utf-8") == "caf\u00e9 \\ud800"


@pytest.mark.parametrize("name", [*EARLY, "config.toml", "rounds.csv", "ledger.jsonl"])
def test_text_that_is_no_utf_8_is_one_line(stopped: Stopped, name: str) -> None:
    folder, graph, _ = stopped
    data = (folder / name).read_bytes()
    (folder / name).write_bytes(data[:20] + b"\xff\xfe" + data[20:])
    with pytest.raises(SilographError) as caught:
        sg.resume(folder, graph=graph)
    assert "\n" not in str(caught.value)


def test_damage_of_the_last_round_goes_back_one(
    stopped: Stopped, caplog: pytest.LogCaptureFixture
) -> None:
    folder, graph, expected = stopped
    data = bytearray((folder / "ledger.jsonl").read_bytes())
    data[-5] ^= 1
    (folder / "ledger.jsonl").write_bytes(data)
    with caplog.at_level(logging.WARNING, logger="silograph"):
        sg.resume(folder, graph=graph)
    assert "ledger.jsonl is damaged within the" in caplog.text
    assert "going on from round 2" in caplog.text
    assert files_of(folder) == expected


def test_half_a_checkpoint_is_removed_by_the_run_that_goes_on(stopped: Stopped) -> None:
    folder, graph, expected = stopped
    (folder / "checkpoints" / "round-000000016.partial").touch()
    sg.resume(folder, graph=graph)
    assert not list(folder.rglob("*.partial"))
    assert files_of(folder) == expected


def test_a_folder_without_run_json_is_told_without_a_number_of_the_system(stopped: Stopped) -> None:
    folder, graph, _ = stopped
    (folder / "run.json").unlink()
    with pytest.raises(CheckpointError, match=r"run\.json, got: No such file or directory: "):
        sg.resume(folder, graph=graph)


@pytest.mark.parametrize("name", EARLY)
def test_files_that_no_round_writes_are_named(stopped: Stopped, name: str) -> None:
    folder, graph, _ = stopped
    (folder / name).unlink()
    with pytest.raises(CheckpointError, match=rf"{name}.*: restore the file from a copy, or begin"):
        sg.resume(folder, graph=graph)


def test_a_kill_while_the_result_is_written(
    stopped: Stopped, monkeypatch: pytest.MonkeyPatch
) -> None:
    """clients.csv is there in its last form then, and nothing after it."""
    folder, graph, expected = stopped

    def killed(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("silograph.experiment.run.trained_model.TrainedModel.save", killed)
        with pytest.raises(KeyboardInterrupt):
            sg.resume(folder, graph=graph)
    assert not (folder / "result.json").exists()
    assert "flops" in (folder / "clients.csv").read_text()
    sg.resume(folder, graph=graph)
    assert files_of(folder) == expected


@pytest.mark.parametrize(
    ("name", "value"),
    [("same", 5), ("same", {"a": 1}), ("source", []), ("source", "x"), ("code", 3), ("code", [1])],
)
def test_fields_of_other_types_in_run_json(stopped: Stopped, name: str, value: object) -> None:
    folder, graph, _ = stopped
    about = json.loads((folder / "run.json").read_text())
    (folder / "run.json").write_text(json.dumps(about | {name: value}))
    with pytest.raises(CheckpointError, match=r"expected what the run was in .*run.json, got") as e:
        sg.resume(folder, graph=graph)
    assert "\n" not in str(e.value)


# --- locks ----------------------------------------------------------------------------------------


def test_a_replaced_config_frees_no_folder(stopped: Stopped) -> None:
    folder, graph, _ = stopped
    holder = ResultFolder(folder)
    text = (folder / "config.toml").read_text()
    (folder / "new").write_text(text)
    (folder / "new").replace(folder / "config.toml")  # as an editor saves
    with raises_code(ConfigError, "folder-in-use"):
        sg.resume(folder, graph=graph)
    holder.close()


def test_a_folder_is_held_until_it_is_closed(tmp_path: Path) -> None:
    lock = hold_folder(tmp_path)
    assert lock is not None
    assert hold_folder(tmp_path) is None
    os.close(lock)
    again = hold_folder(tmp_path)
    assert again is not None
    os.close(again)
    with pytest.raises(NotADirectoryError):
        hold_folder(Path(__file__))
