"""Laws of what a comparison writes for a paper: tables, figures, the command that repeats it."""

import builtins
import csv
import io
import json
import logging
import re
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import silograph as sg
from commands import save
from conftest import planted_graph
from runs import FAST, MakeGraph
from silograph.cli import run_app
from silograph.core.errors import install_command
from silograph.experiment.report import comparison_runs, write_comparison
from silograph.study import comparison_files, latex
from silograph.study.comparison import Comparison
from silograph.study.comparison_files import figures_of
from silograph.study.plots import COLORS, Curves, pdf_of, svg_of

SHORT = {k: v for k, v in FAST.items() if k != "method"} | {"rounds": 3}
ARMS: dict[str, Any] = {
    "A_1 & 50 %": {"method": "fedavg"},
    "{B}": {"method": "fedprox", "mu": 0.5},
    "C": {"method": "local"},
}


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Comparison:
    folder = tmp_path_factory.mktemp("written") / "c"
    given: dict[str, Any] = {"seeds": [0, 4], "processes": 0, "out": folder, "baseline": "C"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(comparison_files, "svg_of", svg_of)
        patch.setattr(comparison_files, "pdf_of", pdf_of)
        return sg.compare(planted_graph(), arms=ARMS, speeds="1,2", **given, **SHORT)


def folder_of(table: Comparison) -> Path:
    assert table.folder is not None
    return Path(table.folder)


# --- tables ---------------------------------------------------------------------------------------


def tabulars(text: str) -> list[list[list[str]]]:
    """The cells of each tabular, checked: environments end, and every line has all columns."""
    stack: list[str] = []
    for what, name in re.findall(r"^[^%\n]*?\\(begin|end)\{(\w+)\}", text, re.MULTILINE):
        if what == "begin":
            stack.append(name)
        else:
            assert stack.pop() == name
    assert not stack
    matches = []
    for columns, body in re.findall(
        r"\\begin\{tabular\}\{(\w+)\}(.*?)\\end\{tabular\}", text, re.S
    ):
        lines = [line.strip() for line in body.strip().splitlines()]
        assert [lines[0], lines[2], lines[-1]] == ["\\toprule", "\\midrule", "\\bottomrule"]
        rows = [line for line in lines if not line.endswith("rule")]
        assert all(row.endswith(r" \\") for row in rows)
        cells = [re.split(r"(?<!\\)&", row.removesuffix(r" \\")) for row in rows]
        assert {len(row) for row in cells} == {len(columns)}
        matches.append([[cell.strip() for cell in row] for row in cells])
    for line in text.splitlines():
        if not line.startswith("%"):
            bare = re.sub(r"\\[&%$#_{}]", "", line)
            assert bare.count("{") == bare.count("}")
            assert bare.count("$") % 2 == 0
            assert "_" not in bare
            assert "#" not in bare
            assert "%" not in bare
    return matches


def test_the_best_is_bold_and_the_second_underlined(written: Comparison) -> None:
    scores, tests = tabulars(written.to_latex())
    assert scores[0] == ["arm", "server", "uncut", "personalized"]
    assert [row[0] for row in scores[1:]] == [r"A\_1 \& 50 \%", r"\{B\}", "C", "largest class"]
    for column, view in enumerate(("server", "uncut", "personalized"), start=1):
        means = {row["arm"]: row[f"{view}_mean"] for row in written.rows}
        ranked = sorted({mean for mean in means.values() if mean is not None}, reverse=True)
        for row, cells in zip(written.rows, scores[1:], strict=False):
            mean, spread = row[f"{view}_mean"], row[f"{view}_std"]
            text = "-" if mean is None else rf"{mean:.4f} $\pm$ {spread:.4f}"
            if mean == ranked[0]:
                text = rf"\textbf{{{text}}}"
            elif mean is not None and mean == ranked[1]:
                text = rf"\underline{{{text}}}"
            assert cells[column] == text
    assert tests[0] == ["arm", "difference", r"95 \% interval", "p", "p, Holm", "pairs"]
    assert tests[3][1] == "reference"
    assert tests[1][1] == f"${written.rows[0]['difference']:+.4f}$"


def test_where_lower_is_better_the_lowest_is_bold(make_graph: MakeGraph) -> None:
    table = sg.compare(make_graph(), arms=ARMS, seeds=2, processes=0, metric="loss", **SHORT)
    rows = {row["arm"]: row["personalized_mean"] for row in table.rows}
    (cells,) = (row for row in tabulars(table.to_latex())[0] if r"\textbf" in row[3])
    assert cells[3].startswith(rf"\textbf{{{min(rows.values()):.4f}")


def test_several_tables_begin_with_one_of_all(make_graph: MakeGraph) -> None:
    given = {k: v for k, v in SHORT.items() if k != "clients"}
    table = sg.compare(
        make_graph(), arms=ARMS, over={"clients": [2, 3]}, seeds=2, processes=0, **given
    )
    first, *others = tabulars(table.to_latex())
    assert first[0] == ["arm", "clients 2", "clients 3"]
    assert len(others) == 4
    assert [cells[-1] for cells in others[0][1:4]] == [cells[1] for cells in first[1:]]


def test_all_that_latex_reads_is_escaped() -> None:
    text = latex.escape(r"a\b ~ ^ & % $ # _ { } < > ± ²")
    assert text == (
        r"a\textbackslash{}b \textasciitilde{} \textasciicircum{} \& \% \$ \# \_ \{ \} "
        r"$<$ $>$ $\pm$ $^2$"
    )


def test_csv_holds_the_rows(written: Comparison) -> None:
    rows = list(csv.DictReader(io.StringIO(written.to_csv())))
    assert [row["arm"] for row in rows] == list(ARMS)
    for row, text in zip(written.rows, rows, strict=True):
        assert float(text["personalized_mean"]) == row["personalized_mean"]
        assert text["best"].split() == row["best"]
        assert text["server_mean"] == (
            "" if row["server_mean"] is None else str(row["server_mean"])
        )


def test_the_folder_holds_all_of_it(written: Comparison) -> None:
    folder = folder_of(written)
    assert (folder / "compare.tex").read_text() == written.to_latex()
    assert (folder / "compare.csv").read_text() == written.to_csv()
    assert (folder / "compare.md").read_text() == written.to_markdown()
    command = json.loads((folder / "command.json").read_text())
    assert command["versions"][0]["silograph"] == sg.__version__
    assert command["command"].startswith("sg.compare(graph, arms={'A_1 & 50 %': {'method': 'fed")
    names = {path.name for path in (folder / "figures").iterdir()}
    axes = ("rounds", "bytes", "work", "virtual-time")
    assert names == {f"{axis}.{ending}" for axis in axes for ending in ("svg", "pdf")}


def test_the_page_calls_runs_by_their_arms(written: Comparison, tmp_path: Path) -> None:
    folder = folder_of(written)
    page = write_comparison(comparison_runs(folder), tmp_path / "p.html", comparison=folder).path
    html = page.read_text()
    places = [html.index(f"{name}, seed {seed}") for name in ("{B}", "C") for seed in (0, 4)]
    assert places == sorted(places)


# --- figures --------------------------------------------------------------------------------------


def test_a_line_is_the_mean_over_seeds_and_its_band_their_deviation(written: Comparison) -> None:
    figures = figures_of(written)
    curves = figures["rounds"]
    assert (curves.x, curves.y) == ("rounds", "test accuracy")
    assert list(curves.lines) == [
        "A_1 & 50 % (server)",
        "{B} (server)",
        "C (personalized)",
    ]
    for arm, name in zip(written.arms, curves.lines, strict=True):
        tests = [line["curve"]["test"] for line in written.lines_of(arm=arm)]
        assert curves.lines[name][0] == [1, 2, 3]
        assert curves.lines[name][1] == pytest.approx(np.mean(tests, 0))
        assert curves.bands[name] == pytest.approx(np.std(tests, 0, ddof=1))
    ends = [line["curve"]["bytes"][-1] / 1e6 for line in written.lines_of(arm="C")]
    assert figures["bytes"].lines["C (personalized)"][0][-1] == pytest.approx(min(ends))
    work = [line["flops"] / 1e9 for line in written.lines_of(arm="C")]
    assert figures["work"].lines["C (personalized)"][0][-1] == pytest.approx(min(work), rel=1e-4)


def test_a_line_ends_where_a_seed_stopped_and_one_seed_has_no_band(written: Comparison) -> None:
    lines = []
    for line in written.lines:
        assert line is not None
        is_short = line["config"]["seed"] == 4
        curve = {n: v[:2] if is_short else v for n, v in line["curve"].items()}
        lines.append(line | {"curve": curve})
    short = figures_of(replace(written, lines=tuple(lines)))["rounds"]
    assert all(x == [1, 2] for x, _ in short.lines.values())
    one = replace(
        written,
        lines=tuple(
            line if line and line["config"]["seed"] == 0 else None for line in written.lines
        ),
    )
    assert figures_of(one)["rounds"].bands == {}
    old = tuple(
        line and line | {"curve": {n: v for n, v in line["curve"].items() if n != "flops"}}
        for line in written.lines
    )
    assert "work" not in figures_of(replace(written, lines=old))  # of an older version


def test_files_of_figures_have_no_date_and_are_the_same_again(written: Comparison) -> None:
    for name, curves in figures_of(written).items():
        svg, pdf = svg_of(curves), pdf_of(curves)
        assert (folder_of(written) / "figures" / f"{name}.svg").read_text() == svg
        assert (folder_of(written) / "figures" / f"{name}.pdf").read_bytes() == pdf
        assert pdf.startswith(b"%PDF")
        for word in (b"Date", b"Creator", b"Producer", b"/Type3"):
            assert word not in pdf
        assert "<dc:date>" not in svg
        assert all(color in svg for color in COLORS[:3])
        assert "stroke-dasharray" in svg  # lines differ in dashes, too


def test_names_in_any_letters_are_drawn_without_a_warning() -> None:
    curves = Curves("", "x", "y", {"方法": ([1, 2], [3, 4])}, print=True)
    assert "方法" in svg_of(curves)
    assert pdf_of(curves).startswith(b"%PDF")


def test_without_matplotlib_there_are_tables_and_a_line(
    tmp_path: Path,
    make_graph: MakeGraph,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    real = builtins.__import__

    def without(name: str, *args: Any) -> Any:
        if name.startswith("matplotlib"):
            raise ImportError
        return real(name, *args)

    monkeypatch.setattr(builtins, "__import__", without)
    with caplog.at_level(logging.WARNING):
        sg.compare(
            make_graph(), methods=["local"], seeds=1, processes=0, out=tmp_path / "c", **SHORT
        )
    assert f"{install_command('plots')}; then silograph resume" in caplog.text
    assert (tmp_path / "c" / "compare.tex").exists()
    assert not (tmp_path / "c" / "figures").exists()


def test_figures_of_fewer_tables_go(tmp_path: Path, make_graph: MakeGraph) -> None:
    given: dict[str, Any] = {k: v for k, v in SHORT.items() if k != "clients"}
    given |= {"methods": ["local"], "seeds": 1, "processes": 0, "out": tmp_path / "c"}
    sg.compare(make_graph(), over={"clients": [2]}, **given)
    figures = tmp_path / "c" / "figures"
    (figures / "mine.svg").write_text("mine")
    assert (figures / "rounds.pdf").exists()
    sg.compare(make_graph(), over={"clients": [2, 3]}, **given)
    assert not (figures / "rounds.pdf").exists()
    assert (figures / "clients-3-rounds.pdf").exists()
    assert (figures / "mine.svg").exists()


# --- the command ----------------------------------------------------------------------------------


def test_the_command_gives_the_same_cells_and_tables(
    work: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It needs neither the run file nor the file of arms."""
    Path("run.toml").write_text(
        'method = "fedprox"\nneighbors = "fedgrains"\nbatch_size = 8\nrounds = 1\nclients = 3\n'
        '[options]\nmu = 0.25\n"neighbors.k" = 2\n'
    )
    Path("arms.toml").write_text(
        '[arms."a, b"]\nhidden = [8, 4]\n[arms.full]\nneighbors = "full"\nmethod = "fedavg"\n'
        "[arms.three]\nk = 3\n"
    )
    line = "compare g.npz --config run.toml --arms arms.toml --methods local --lr 0.05"
    line += " --over dropout=0,0.5 --seeds 1,3 --baseline dropout=0 --view personalized --test t"
    line += " --no-keep-optimizer --kernels torch --processes 0 --quiet --out"
    assert run_app([*shlex.split(line), "a"]) == 0
    command = json.loads(Path("a", "command.json").read_text())["command"]
    Path("run.toml").unlink()
    Path("arms.toml").unlink()
    words = shlex.split(command)
    assert words.pop(0) == "silograph"
    assert run_app([*words, "--processes", "0", "--quiet", "--out", "b"]) == 0
    for name in ("compare.tex", "command.json", "figures/rounds.pdf"):
        assert Path("a", name).read_bytes() == Path("b", name).read_bytes(), name
    capsys.readouterr()


@pytest.mark.usefixtures("forked")
def test_what_no_command_can_say_is_a_call(tmp_path: Path) -> None:
    save(tmp_path / "g.npz", planted_graph(30))
    small: dict[str, Any] = {"clients": 2, "rounds": 1, "hidden": 4, "seeds": 1, "processes": 0}
    sg.compare(
        str(tmp_path / "g.npz"), arms={"a: b": {"method": "local"}}, out=tmp_path / "c", **small
    )
    command = json.loads((tmp_path / "c" / "command.json").read_text())["command"]
    again = eval(command, {"sg": sg})
    assert list(again.arms) == ["a: b"]


def test_a_report_as_pdf_is_refused(work: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sg.run(planted_graph(30), clients=2, rounds=1, hidden=4, out="a")
    assert run_app(["report", "a", "--out", "x.pdf"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: expected --out as FILE.html, got x.pdf: ")
    assert error.count("\n") == 1
    assert not Path("x.pdf").exists()
