"""Altered files of a result folder are named, and files that are none are never waited for."""

import json
import os
import shutil
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import silograph as sg
from conftest import planted_graph
from mistakes import raises_code
from pages import read_page
from runs import FAST, MakeGraph
from silograph.cli import run_app
from silograph.core.errors import DataError, SilographError
from silograph.experiment.report import comparison_runs, write_comparison, write_report
from silograph.experiment.result_files import read_sums, write_sums
from silograph.experiment.run.predictions import predict_to

QUICK: dict[str, Any] = {**FAST, "rounds": 2, "clients": 2, "kernels": "torch", "method": "fedper"}
COMPARED = {k: v for k, v in QUICK.items() if k != "method"}
FILES = (
    *("config.toml", "run.json", "simulation.json", "clients.csv", "rounds.csv", "ledger.jsonl"),
    *("result.json", "models/0-client_00.safetensors", "models/1-client_01.safetensors"),
)

TABLES = ("rounds.csv", "ledger.jsonl")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The result folder of a run that is over."""
    out = tmp_path_factory.mktemp("whole") / "run"
    sg.run(planted_graph(40), **QUICK, out=str(out))
    return out


@pytest.fixture
def folder(whole: Path, tmp_path: Path) -> Path:
    shutil.copytree(whole, tmp_path / "run")
    return tmp_path / "run"


@pytest.fixture(scope="module")
def comparison(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("compared") / "c"
    given: dict[str, Any] = {"methods": ["local", "fedavg"], "seeds": 2, "processes": 0}
    sg.compare(planted_graph(40), **given, **COMPARED, out=out)
    return out


def flip(path: Path, place: int) -> None:
    """Flip a bit of a byte; digits become others, which every reader takes."""
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)


def places_of(path: Path) -> Iterator[int]:
    """Yield the first, a middle and the last byte, and a digit in the second half."""
    data = path.read_bytes()
    yield from (0, len(data) // 2, len(data) - 1)
    yield next((i for i in range(len(data) // 2, len(data)) if chr(data[i]).isdigit()), 0)


def test_every_file_of_a_run_that_is_over_has_a_digest(whole: Path) -> None:
    assert read_sums(whole).keys() == set(FILES)
    others = {str(path.relative_to(whole)) for path in whole.rglob("*") if path.is_file()}
    checkpoints = {name for name in others if name.startswith("checkpoints/")}  # have their own
    assert others - checkpoints - set(FILES) == {"report.html", "checksums.json"}


@pytest.mark.parametrize("name", FILES)
def test_a_flipped_byte_is_named(
    folder: Path, tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    original = (folder / name).read_bytes()
    for number, place in enumerate(places_of(folder / name)):
        caplog.clear()
        flip(folder / name, place)
        page = tmp_path / f"{number}.html"
        try:
            write_report(folder, page)
        except SilographError as error:
            said = str(error)
        else:
            said = read_page(page).text
            assert f"{name} does not fit its digest" in said
            assert f"{name} does not fit its digest" in caplog.text
        assert name in said
        (folder / name).write_bytes(original)
    write_report(folder, tmp_path / "last.html")
    assert "digest" not in read_page(tmp_path / "last.html").text


def test_damaged_checksums_are_named(folder: Path, tmp_path: Path) -> None:
    original = (folder / "checksums.json").read_bytes()
    for number, place in enumerate(places_of(folder / "checksums.json")):
        flip(folder / "checksums.json", place)
        page = tmp_path / f"{number}.html"
        try:
            write_report(folder, page)
            text = read_page(page).text
        except SilographError as error:
            text = str(error)
        last_line = place == len(original) - 1 and "checksums.json" not in text
        assert last_line or "checksums.json" in text or "as the run has written it" in text
        (folder / "checksums.json").write_bytes(original)


def test_missing_digests_are_said(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    sums = read_sums(folder)
    early = ("run.json", "simulation.json", "clients.csv")  # all that older versions had
    write_sums(folder, {name: sums[name] for name in early})
    write_report(folder, tmp_path / "old.html")
    text = read_page(tmp_path / "old.html").text
    assert "has no digest of config.toml, rounds.csv, ledger.jsonl, result.json" in text
    assert text.count("an older version wrote them") == 1
    caplog.clear()
    (folder / "checksums.json").unlink()
    write_report(folder, tmp_path / "none.html")
    assert "no checksums.json" in read_page(tmp_path / "none.html").text
    assert [record.getMessage() for record in caplog.records] == [
        f"{folder} has no checksums.json that can be read: its files could not be checked, and may "
        "have been altered since the run wrote them"
    ]
    caplog.clear()
    sg.load_model(folder / FILES[-1])
    assert "has no digest that it could be checked by" in caplog.text


def test_models_that_are_gone_are_said(folder: Path, tmp_path: Path) -> None:
    (folder / FILES[-1]).unlink()
    write_report(folder, tmp_path / "page.html")
    assert f"{FILES[-1]} is missing" in read_page(tmp_path / "page.html").text


def test_a_run_that_goes_on_says_which_files_have_no_digest_yet(
    folder: Path, tmp_path: Path
) -> None:
    (folder / "result.json").unlink()
    sums = read_sums(folder)
    write_sums(folder, {n: sums[n] for n in sums.keys() - {"result.json", *TABLES, FILES[-1]}})
    write_report(folder, tmp_path / "page.html")
    text = read_page(tmp_path / "page.html").text
    assert "has no digest of rounds.csv, ledger.jsonl (the run is not over)" in text
    assert "does not fit" not in text


@pytest.mark.parametrize("name", TABLES)
def test_a_result_that_is_removed_hides_no_altered_table(
    folder: Path, tmp_path: Path, name: str
) -> None:
    (folder / "result.json").unlink()
    flip(folder / name, len((folder / name).read_bytes()) - 3)
    write_report(folder, tmp_path / "page.html")
    text = read_page(tmp_path / "page.html").text
    assert f"{name} does not fit its digest" in text
    assert "result.json is missing" in text


def test_the_command_says_it(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    flip(folder / "rounds.csv", (folder / "rounds.csv").stat().st_size - 2)
    assert run_app(["report", str(folder)]) == 1
    assert "rounds.csv does not fit its digest" in caplog.text  # which a terminal shows
    assert "rounds.csv does not fit its digest" in read_page(folder / "report.html").text


def test_the_status_of_the_command_says_it(whole: Path, folder: Path, tmp_path: Path) -> None:
    page = str(tmp_path / "page.html")
    assert run_app(["report", str(folder)]) == 0
    assert run_app(["report", str(folder), str(whole), "--out", page]) == 0
    sums = read_sums(folder)
    early = {name: sums[name] for name in ("run.json", "simulation.json", "clients.csv")}
    write_sums(folder, early)  # all that older versions had
    assert run_app(["report", str(folder)]) == 0
    write_sums(folder, sums)
    (folder / FILES[-1]).unlink()
    assert run_app(["report", str(folder)]) == 1
    assert run_app(["report", str(folder), str(whole), "--out", page]) == 1
    shutil.copy(whole / FILES[-1], folder / FILES[-1])
    (folder / "checksums.json").unlink()
    assert run_app(["report", str(folder)]) == 0
    (folder / "checksums.json").mkdir()
    assert run_app(["report", str(folder)]) == 2


def test_resume_and_models_refuse_what_was_altered(folder: Path, make_graph: MakeGraph) -> None:
    flip(folder / "result.json", (folder / "result.json").read_text().index("seed") + 7)
    with pytest.raises(DataError, match=r"result\.json as the run has written it"):
        sg.resume(folder, graph=make_graph(40))
    (folder / "result.json").unlink()
    sg.resume(folder, graph=make_graph(40))
    flip(folder / FILES[-1], -1)
    with pytest.raises(DataError, match=r"client_01\.safetensors as the run has written it"):
        sg.load_model(folder / FILES[-1])


# --- comparisons and searches --------------------------------------------------------------------


def test_altered_files_of_a_comparison_are_named(
    comparison: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    copy = tmp_path / "c"
    shutil.copytree(comparison, copy)
    run = comparison_runs(copy)[0]
    flip(run / "rounds.csv", (run / "rounds.csv").stat().st_size - 2)
    write_comparison(comparison_runs(copy), tmp_path / "page.html", comparison=copy)
    assert "rounds.csv does not fit its digest" in read_page(tmp_path / "page.html").text
    assert "rounds.csv does not fit its digest" in caplog.text
    text = (copy / "paired.json").read_text(encoding="utf-8")
    (copy / "paired.json").write_text(text.replace("reference", "referenze", 1), encoding="utf-8")
    with pytest.raises(DataError, match=r"paired\.json as it was written, got another"):
        write_comparison(comparison_runs(copy), tmp_path / "page.html", comparison=copy)
    given: dict[str, Any] = {"methods": ["local", "fedavg"], "seeds": 2, "processes": 0}
    lines = (copy / "compare.jsonl").read_text(encoding="utf-8").splitlines()
    altered = [json.loads(line) for line in lines]
    altered[1]["test"]["personalized"]["accuracy"] = 0.99
    text = "".join(json.dumps(line) + "\n" for line in altered)
    (copy / "compare.jsonl").write_text(text, encoding="utf-8")
    with pytest.raises(DataError, match=r"line 2 of .*compare\.jsonl as it was written"):
        sg.compare(planted_graph(40), **given, **COMPARED, out=copy)
    caplog.clear()
    for line in altered:
        del line["digest"]
    text = "".join(json.dumps(line) + "\n" for line in altered)  # as an older version wrote it
    (copy / "compare.jsonl").write_text(text, encoding="utf-8")
    sg.compare(planted_graph(40), **given, **COMPARED, out=copy)
    assert "4 of 4 lines of" in caplog.text


def raise_score(copy: Path) -> None:
    path = copy / "compare.jsonl"
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    lines[1]["test"]["personalized"]["accuracy"] = 0.99
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


def write_without_digest(path: Path) -> None:
    values = json.loads(path.read_text(encoding="utf-8"))
    del values["digest"]
    path.write_text(json.dumps(values), encoding="utf-8")


ALTERED: dict[str, tuple[str, Callable[[Path], Any]]] = {
    "a score": ("line 2 of {}/compare.jsonl does not fit its digest", raise_score),
    "no JSON": (
        "line 1 of {}/compare.jsonl does not fit its digest",
        lambda copy: flip(copy / "compare.jsonl", 0),
    ),
    "no lines": ("{}/compare.jsonl is missing", lambda copy: (copy / "compare.jsonl").unlink()),
    "tables": (
        "{}/compare.md does not fit its digest",
        lambda copy: flip(copy / "compare.md", (copy / "compare.md").read_text().index("0.") + 2),
    ),
    "no tables": ("{}/compare.md is missing", lambda copy: (copy / "compare.md").unlink()),
    "other tests": (
        "{}/paired.json does not fit its digest",
        lambda copy: write_without_digest(copy / "paired.json"),
    ),
    "no tests": ("{}/paired.json is missing", lambda copy: (copy / "paired.json").unlink()),
    "digests": (
        "expected digests of the run's files in {}/checksums.json",
        lambda copy: flip(copy / "checksums.json", 0),
    ),
}


@pytest.mark.law(sample=6)
@pytest.mark.parametrize("change", ALTERED)
def test_altered_tables_of_a_comparison_are_named(
    comparison: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, change: str
) -> None:
    copy, (line, alter) = tmp_path / "c", ALTERED[change]
    shutil.copytree(comparison, copy)
    assert run_app(["report", str(copy)]) == 0
    assert not caplog.records
    alter(copy)
    assert run_app(["report", str(copy)]) == 1
    assert line.format(copy) in caplog.text
    assert line.format(copy) in read_page(copy / "report.html").text


def test_tables_of_older_comparisons_and_torn_lines_are_no_damage(
    comparison: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    copy = tmp_path / "c"
    shutil.copytree(comparison, copy)
    (copy / "checksums.json").unlink()
    with (copy / "compare.jsonl").open("a") as file:
        file.write('{"labels": {"meth')
    assert run_app(["report", str(copy)]) == 0
    assert [record.getMessage() for record in caplog.records] == [
        f"{copy}/compare.md has no digest that it could be checked by: an older version wrote it"
    ]


def test_tables_that_were_being_written_are_no_damage(comparison: Path, tmp_path: Path) -> None:
    copy = tmp_path / "c"
    shutil.copytree(comparison, copy)
    sums = read_sums(copy)
    write_sums(copy, {name: ["none", *known] for name, known in sums.items()})
    (copy / "paired.json").unlink()
    assert run_app(["report", str(copy)]) == 0


def test_folders_of_other_results_lead_to_their_pages(tmp_path: Path) -> None:
    search = tmp_path / "search"
    given: dict[str, Any] = {"ranges": {"lr": "0.01,0.02"}, "trials": 1, "processes": 0}
    fixed = {k: v for k, v in COMPARED.items() if k != "lr"}
    sg.tune(planted_graph(40), method="fedavg", **given, **fixed, out=search)
    with pytest.raises(DataError, match=r"this is a search, see .*search/tune\.md"):
        write_report(search)
    (search / "tune.md").unlink()
    with pytest.raises(DataError, match=r"go on with it by silograph resume .*search"):
        write_report(search)
    silo = tmp_path / "silo"
    silo.mkdir()
    (silo / "result.json").write_text('{"format": 1, "silo": "north"}')
    with pytest.raises(DataError, match=r"a silo's result, its page is .*silo/report\.html"):
        write_report(silo)
    (silo / "result.json").write_text('{"format": 1}')
    with pytest.raises(DataError, match=r"got run\.json: No such file"):
        write_report(silo)


# --- files that are none -------------------------------------------------------------------------


def make_socket(path: Path) -> None:
    before = Path.cwd()
    os.chdir(path.parent)  # names of sockets are short
    try:
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(path.name)
    finally:
        os.chdir(before)


def link_to_fifo(path: Path) -> None:
    os.mkfifo(path.with_name("fifo"))
    path.symlink_to("fifo")


SPECIAL: dict[str, Callable[[Path], Any]] = {
    "FIFO": os.mkfifo,
    "socket": make_socket,
    "device": lambda path: path.symlink_to("/dev/zero"),
    "folder": Path.mkdir,
    "FIFO by a link": link_to_fifo,
}
NAMES = (*FILES, "checksums.json")


def replace_by(kind: str, path: Path) -> None:
    path.unlink()
    SPECIAL[kind](path)


@pytest.mark.parametrize("kind", SPECIAL)
def test_commands_refuse_what_is_no_file_at_once(
    whole: Path, tmp_path: Path, make_graph: MakeGraph, kind: str
) -> None:
    graph = make_graph(40)
    for number, name in enumerate(NAMES):
        folder = tmp_path / str(number)
        shutil.copytree(whole, folder)
        replace_by(kind, folder / name)
        with pytest.raises(SilographError, match=name.rpartition("/")[2]):
            write_report(folder, tmp_path / "page.html")
        with pytest.raises(SilographError):
            sg.resume(folder, graph=graph)
        if name.endswith(".safetensors"):
            with pytest.raises(SilographError):
                sg.load_model(folder / name)
            with pytest.raises(SilographError):
                predict_to(folder / name, "digits", tmp_path / "predictions.csv")
    for name in ("report.html",):
        folder = tmp_path / name
        shutil.copytree(whole, folder)
        replace_by(kind, folder / name)
        with raises_code(SilographError, "existing-output"):
            write_report(folder)


@pytest.mark.parametrize("kind", SPECIAL)
@pytest.mark.parametrize("name", ["compare.json", "compare.jsonl", "compare.md", "paired.json"])
def test_comparisons_refuse_what_is_no_file_at_once(
    comparison: Path, tmp_path: Path, kind: str, name: str
) -> None:
    copy = tmp_path / "c"
    shutil.copytree(comparison, copy)
    replace_by(kind, copy / name)
    if name == "compare.jsonl":
        given: dict[str, Any] = {"methods": ["local", "fedavg"], "seeds": 2, "processes": 0}
        with pytest.raises(DataError, match="expected a regular file"):
            sg.compare(planted_graph(40), **given, **COMPARED, out=copy)
    assert run_app(["report", str(copy)]) == 2
    if name == "compare.json":
        assert run_app(["resume", str(copy)]) != 0


@pytest.mark.parametrize("kind", SPECIAL)
@pytest.mark.parametrize("command", ["report", "resume", "predict", "recommend", "audit"])
def test_commands_refuse_a_path_that_is_no_file(tmp_path: Path, kind: str, command: str) -> None:
    SPECIAL[kind](tmp_path / "thing")
    given = [command, str(tmp_path / "thing")]
    given += ["--data", "digits", "--out", str(tmp_path / "p.csv")] * (command == "predict")
    given += ["--user", "a"] * (command == "recommend")
    assert run_app(given) != 0
