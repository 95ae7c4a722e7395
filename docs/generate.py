"""Pages of the reference that follow from the code: options, commands, the Python API."""

import dataclasses
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import typer

import silograph
from silograph.cli import ORDER
from silograph.cli.flags import app
from silograph.core.config import RunConfig
from silograph.experiment.resolve.flat_options import HELP
from silograph.experiment.resolve.parts import TABLES, options_of

# What has a keyword for each option of a run; the signature would fill a page.
SIGNATURES = {
    "run": "run(graph=None, *, method='fedopt', clients=10, out=None, options=None, **keywords)",
    "resume": "resume(path, **keywords)",
    "compare": "compare(graph=None, *, methods=None, arms=None, seeds=5, **keywords)",
    "tune": "tune(graph=None, *, trials=20, seeds=3, ranges=None, **keywords)",
    "make_partition": "make_partition(graph, **keywords)",
    "RunConfig": "RunConfig(**keywords)",
}


def write_reference(folder: Path) -> None:
    """Write the generated pages, each only if it has changed."""
    pages = {"options": options_page(), "commands": commands_page(), "api": api_page()}
    for name, text in pages.items():
        path = folder / f"{name}.md"
        folder.mkdir(exist_ok=True)
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")


def cell_text(text: str) -> str:
    """Return a text as a cell of a Markdown table."""
    escaped = re.sub(r"([\\|<>*_\[\]`$])", r"\\\1", text)
    return " ".join(escaped.split())


def default_text(field: "dataclasses.Field[Any]") -> str:
    """Return a field's default as users write it; nothing where it is worked out."""
    if field.default is dataclasses.MISSING or field.default is None:
        return ""
    return f"`{str(field.default).lower()}`"


def option_rows() -> Iterator[tuple[str, str, str, str]]:
    """Yield name, where it belongs, default and help of every option."""
    for field in dataclasses.fields(RunConfig):
        if field.name != "options":
            yield field.name, field.metadata["group"], default_text(field), HELP[field.name]
    for kind, parts in TABLES.items():
        seen: dict[tuple[str, str, str], list[str]] = {}
        for name, part in parts.items():
            for option, field in options_of(part).items():
                row = option, default_text(field), field.metadata.get("help", "")
                seen.setdefault(row, []).append(name)
        for (option, default, text), owners in seen.items():
            yield f"{kind}.{option}", ", ".join(owners), default, text


def options_page() -> str:
    """Return the page of all options in one table."""
    rows = [
        f"| `{name}` | {cell_text(owner)} | {default} | {cell_text(text)} |"
        for name, owner, default, text in option_rows()
    ]
    return "\n".join(
        [
            "# Options",
            "",
            "Every option of `silograph run` and `silograph.run`, from the configuration of this "
            "version. `local_epochs=2` in Python and in run files is `--local-epochs 2` on the "
            "command line. Options of a part, such as `method.tau`, are given as "
            '`options={"tau": 2}` in Python and as `--option tau=2` on the command line; with '
            "the name of the part in front (`neighbors.k`) where two parts have an option of one "
            "name. Without a default here, the value depends on others, as the text says.",
            "",
            ":::{table}",
            ":class: filtered",
            "",
            "| option | group, or parts that have it | default | what it is |",
            "|---|---|---|---|",
            *rows,
            ":::",
            "",
        ]
    )


def commands_page() -> str:
    """Return the page of all commands with their own flags."""
    group = typer.main.get_command(app)
    assert isinstance(group, click.Group)
    lines = ["# Commands", ""]
    lines += [
        "Commands in the order of use. Those that take the options of a run have them besides "
        "the flags here; they stand in [options](options.md).",
        "",
    ]
    fields = {field.name for field in dataclasses.fields(RunConfig)}
    for name in ORDER:
        command = group.commands[name]
        of_run = any(p.name in fields - {"dataset", "device"} for p in command.params)
        arguments = " ".join((p.name or "").upper() for p in command.params if is_argument(p))
        lines += [f"## silograph {name}", "", cell_text((command.help or "").strip()), ""]
        lines += ["```", f"silograph {name} {arguments}".strip(), "```", ""]
        own = [p for p in command.params if not (of_run and p.name in fields - {"dataset"})]
        rows = []
        for parameter in own:
            text = getattr(parameter, "help", None) or ""
            flags = ", ".join((*parameter.opts, *parameter.secondary_opts))
            shown = (parameter.name or "").upper() if is_argument(parameter) else flags
            rows.append(f"| `{shown}` | {cell_text(text)} |")
        lines += ["| flag | what it is |", "|---|---|", *rows, ""]
        if of_run:
            lines += ["It also takes [options of a run](options.md).", ""]
    return "\n".join(lines)


def is_argument(parameter: click.Parameter) -> bool:
    """Return whether a parameter of a command is positional."""
    return isinstance(parameter, click.Argument)


def api_page() -> str:
    """Return the page of the public names."""
    functions, classes, errors = [], [], []
    for name in silograph.__all__:
        value = getattr(silograph, name)
        if inspect.isclass(value) and issubclass(value, Exception):
            errors.append(name)
        elif inspect.isclass(value):
            classes.append(name)
        else:
            functions.append(name)
    lines = [
        "# Python",
        "",
        "`import silograph as sg` gives the names on this page. Keywords of runs are [options]"
        "(options.md).",
        "",
    ]
    for title, names, directive in (
        ("Functions", functions, "autofunction"),
        ("Classes", classes, "autoclass"),
        ("Errors", errors, "autoexception"),
    ):
        lines += [f"## {title}", ""]
        for name in names:
            lines += ["```{eval-rst}", f".. {directive}:: silograph.{SIGNATURES.get(name, name)}"]
            lines += ["   :members:"] if directive == "autoclass" and name != "RunConfig" else []
            lines += ["```", ""]
    return "\n".join(lines)
