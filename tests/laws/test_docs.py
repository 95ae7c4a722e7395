"""Examples of the README and the docs: Python runs as it stands, commands are understood."""

import re
import runpy
import shlex
import tomllib
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import click
import pytest

from silograph.cli import command_line, run_app
from silograph.core.config import RunConfig, make_config
from silograph.experiment.resolve import resolve
from silograph.experiment.resolve.resolve import choose
from silograph.experiment.resolve.run_request import Own, merge_config
from silograph.experiment.resolve.user_code import is_spec
from silograph.graph.datasets import DATASETS
from silograph.nn.backends import TORCH
from silograph.nn.model import MODELS
from silograph.nn.model_options import MODEL_KINDS
from silograph.study.arms import ArmSettings, checked_arms
from silograph.study.tune import chosen_ranges, given_keys, part_options
from silograph.task.metric_table import METRICS

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
# Written by the build from the code, or owned by the notes on decisions.
NO_PAGES = {"_build", "decisions"}
GENERATED = {DOCS / "reference" / f"{name}.md" for name in ("options", "commands", "api")}
PAGES = [
    ROOT / "README.md",
    *sorted(
        page
        for page in DOCS.rglob("*.md")
        if not NO_PAGES & set(page.relative_to(DOCS).parts) and page not in GENERATED
    ),
]


def name_of(page: Path) -> str:
    """A page's path below the checkout, as an id of a test."""
    return page.relative_to(ROOT).as_posix()


def text_of(page: Path) -> str:
    """A page without its directives: the build runs code cells, and lists pages of a toctree."""
    fences = r"^(`{3,})\{.*?^\1"
    return re.sub(fences, "", page.read_text(), flags=re.MULTILINE | re.DOTALL)


def test_directives_are_not_taken_for_examples(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    cell = "```{code-cell} python\nsilograph run cora\n```\n"
    page.write_text(f"{cell}`silograph run digits`\n```\nsilograph compile\n```\n{cell}")
    assert commands_of(text_of(page)) == ["compile", "run digits"]


@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_examples_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    tables: list[tuple[dict[str, Any], str]] = [
        (MODELS, "selfsum"),
        (MODEL_KINDS, "selfsum"),
        (METRICS, "balanced_accuracy"),
    ]
    if page.name == "decide_with_a_threshold.md":
        # Weights of classes in float32 are two kernels that nothing else here needs: 10 s.
        monkeypatch.setattr(resolve, "choose_backend", lambda *_: TORCH)
    for table, name in tables:  # a page adds them
        monkeypatch.setitem(table, name, None)
        monkeypatch.delitem(table, name)
    for example in re.findall(r"^```python\n(.*?)^```", text_of(page), re.MULTILINE | re.DOTALL):
        exec(compile(example, str(page), "exec"), names)


def anchors_of(page: Path) -> set[str]:
    """The anchors that GitHub and the site make of a page's headings."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", h.lower()).strip().replace(" ", "-") for h in headings}


def test_links_lead_somewhere() -> None:
    """Pages of the site, and those that are read in the checkout only."""
    for page in [*PAGES, *sorted(ROOT.glob("*.md")), *sorted(ROOT.glob("benchmarks/*/*.md"))]:
        for target in re.findall(r"\]\((?!http)([^)\s]+)\)", page.read_text()):
            file, _, anchor = target.partition("#")
            path = (page.parent / file).resolve() if file else page
            if path in GENERATED:  # the build checks these
                continue
            assert path.exists(), f"{name_of(page)}: {target}"
            assert not anchor or anchor in anchors_of(path), f"{name_of(page)}: {target}"


def test_the_build_finds_links_that_lead_nowhere(tmp_path: Path) -> None:
    pages = {
        "index.html": '<h1 id="top"></h1><a href="a/b.html#here">',
        "a/b.html": '<p id="here"><a href="../index.html#top"><a href="#here"><img src="c.png">'
        '<a href="../index.html#end"><a href="d.html"><a href="https://host/d.html">',
    }
    for name, text in pages.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    check = runpy.run_path(str(DOCS / "check_links.py"))["broken_links"]
    assert list(check(tmp_path)) == [
        "a/b.html: c.png does not exist",
        "a/b.html: ../index.html#end has no such anchor",
        "a/b.html: d.html does not exist",
    ]


def own_method() -> str:
    """The first example of the interface of methods: a file of a user's own."""
    text = (DOCS / "reference" / "method_interface.md").read_text()
    return str(re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)[0])


def own_files(text: str) -> dict[str, str]:
    """Examples that begin with the name of a file, by that name."""
    code = re.findall(r"^```python\n(# (\w+\.py)\n.*?)^```", text, re.MULTILINE | re.DOTALL)
    return {name: example for example, name in code}


def commands_of(text: str) -> list[str]:
    """Every `silograph` command of code blocks, inline code and recipes, on one line each."""
    text = re.sub(r"^```\{.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)  # run by the build
    code = re.findall(r"^```\w*\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    rest = re.sub(r"^```\w*\n.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    code += [inline.replace("\n", " ") for inline in re.findall(r"`(silograph [^`]*)`", rest)]
    joined = "\n".join(code).replace("\\\n", " ")
    return re.findall(r"^\s*(?:\$\(BIN\)/)?silograph (.*?)\s*(?:#.*)?$", joined, re.MULTILINE)


def recipes(makefile: str) -> str:
    """The lines of a Makefile that are commands, as a code block."""
    lines = makefile.replace("\\\n\t\t", "").splitlines()
    return "```\n" + "\n".join(line[1:] for line in lines if line.startswith("\t")) + "\n```\n"


COMPARE = (DOCS / "how_to" / "compare_methods.md").read_text()
COMMANDS = sorted(
    {
        command
        for page in PAGES
        for command in commands_of(text_of(page))
        if command.startswith(("run ", "partition ", "compare ", "tune ", "export-silos "))
    }
    | set(commands_of(recipes((ROOT / "Makefile").read_text())))
)


def test_commands_are_found() -> None:
    assert any(command.startswith("run digits ") for command in COMMANDS)  # of the demo
    assert any(command.startswith("run cora ") for command in COMMANDS)
    assert any("--config runs/cora-" in command for command in COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_are_understood(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Flags exist and can be used with the method, up to the first look at the data."""
    words = shlex.split(command)
    if "--config" in words:  # stands for a file that somebody has
        place = words.index("--config") + 1
        words[place] = str(tmp_path / "run.toml")
        Path(words[place]).write_text(toml_examples()[0], encoding="utf-8")
    if "--method" in words and is_spec(file := words[words.index("--method") + 1]):
        (tmp_path / file.partition(":")[0]).write_text(own_method(), encoding="utf-8")
    for page in PAGES:
        for name, example in own_files(text_of(page)).items():
            (tmp_path / name).write_text(example, encoding="utf-8")
    example_of_arms = re.search(r"^```\n(\[arms\..*?)^```", COMPARE, re.MULTILINE | re.DOTALL)
    assert example_of_arms is not None
    (tmp_path / "arms.toml").write_text(example_of_arms[1], encoding="utf-8")
    seen: list[RunConfig] = []

    def merged(file: RunConfig, flags: dict[str, Any]) -> RunConfig:
        known = {f.name for f in fields(RunConfig)}
        return merge_config(None, file, {k: v for k, v in flags.items() if k in known})[0]

    def look(config: RunConfig, **flags: Any) -> None:
        config = merged(config, flags)
        choose(config)
        seen.append(config)

    monkeypatch.chdir(tmp_path)

    def look_at_ranges(config: RunConfig, keys: list[str] | None, ranges: Any, **f: Any) -> None:
        base = merged(config, f)
        method, own = choose(base).method.part, Own()
        chosen_ranges(method, keys, ranges, given_keys(f, base, own), part_options(base, own))
        look(config, **f)

    def look_at_all(
        datasets: list[str] | None, config: RunConfig, methods: list[str], arms: Any, **flags: Any
    ) -> None:
        assert set(datasets or ()) <= DATASETS.keys()
        flags.pop("options")
        config = merged(config, flags)
        for method in methods:
            own = config.options if method == config.method else {}
            choose(replace(config, method=method, options=own))
        for name, settings in checked_arms(arms).items():
            arm = ArmSettings.of(("arm", name), settings)
            choose(replace(config, **arm.fields, options=arm.options))
        seen.append(config)

    monkeypatch.setattr("silograph.experiment.run.run.run", lambda **given: look(**given))
    monkeypatch.setattr("silograph.study.compare.compare", look_at_all)
    monkeypatch.setattr("silograph.cli.studies.print_comparison", lambda *_: 0)
    monkeypatch.setattr("silograph.study.tune.tune", look_at_ranges)
    monkeypatch.setattr("silograph.cli.studies.print_search", lambda *_: 0)

    def look_at_export(config: RunConfig, *_: Any, **__: Any) -> list[Path]:
        look(config)
        return []

    monkeypatch.setattr("silograph.deploy.demo.export_silos", look_at_export)
    monkeypatch.setattr("silograph.cli.printing.print_cut", look)
    monkeypatch.setattr("silograph.cli.printing.print_result", lambda _: None)
    assert run_app(words) == 0
    assert len(seen) == 1
    dataset = seen[0].dataset
    assert dataset in ("DATASET", "silos/", "shards/") or dataset.partition("@")[0] in DATASETS


FEATURES = commands_of((DOCS / "reference" / "features.md").read_text())


def test_every_command_is_among_the_features() -> None:
    group = command_line()
    assert isinstance(group, click.Group)
    assert {command.split()[0] for command in FEATURES} == group.commands.keys()
    assert len(FEATURES) <= 80


@pytest.mark.parametrize("command", [c for c in FEATURES if c not in COMMANDS])
def test_commands_of_features_are_parsed(command: str) -> None:
    """Flags and arguments exist, and values have their types."""
    name, *words = shlex.split(command)
    group = command_line()
    assert isinstance(group, click.Group)
    parent = click.Context(group, **group.context_settings)  # click keeps the first names of help
    group.commands[name].make_context(name, words, parent)


OWN_PARTS = [
    (page, command)
    for page in PAGES
    for command in commands_of(text_of(page))
    if re.search(r"\.py:(AGGREGATOR|SERVER_OPTIMIZER|SELECTOR|SAMPLER)\b|drift\.py", command)
]


@pytest.mark.parametrize(("page", "command"), OWN_PARTS, ids=lambda value: str(value)[-60:])
def test_own_parts_of_the_pages_run(
    page: Path, command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a user would: the file as it stands, the command, and resumed."""
    monkeypatch.chdir(tmp_path)
    for name, example in own_files(text_of(page)).items():
        (tmp_path / name).write_text(example, encoding="utf-8")
    words = [*shlex.split(command), "--clients", "4", "--out", "o", "--hidden", "8"]
    assert run_app(words) == 0
    assert run_app(["resume", "o", "--trust"]) == 0


def test_every_own_part_of_the_pages_runs() -> None:
    pages = [page.read_text() for page in sorted((DOCS / "how_to").glob("write_*.md"))]
    examples = {name for page in pages for name in own_files(page)}
    files = {
        Path(name).name for _, command in OWN_PARTS for name in re.findall(r"\w+\.py", command)
    }
    assert examples <= files
    assert len(examples) == 5


def toml_examples() -> list[str]:
    return [
        example
        for page in PAGES
        for example in re.findall(r"^```toml\n(.*?)^```", text_of(page), re.MULTILINE | re.DOTALL)
    ]


@pytest.mark.parametrize("example", toml_examples())
def test_run_files_are_understood(example: str) -> None:
    config = make_config(tomllib.loads(example))
    choose(config)
    assert config.dataset in DATASETS
