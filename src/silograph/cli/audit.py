"""`silograph audit`: what has left a silo, read from its audit file and checked."""

import json as jsonlib
import shutil
from collections.abc import Iterator, Mapping
from itertools import groupby
from pathlib import Path
from textwrap import wrap
from typing import TYPE_CHECKING, Annotated, Any

import typer

from silograph.cli.flags import app
from silograph.core.errors import ConfigError
from silograph.core.files import check_regular
from silograph.core.text import counted, printable

if TYPE_CHECKING:
    from silograph.federation.session.audit_chain import AuditedRun, AuditEntry, AuditReading

FAILED = 1  # exit code where the file is not as it was written
INDENT = 11  # columns before what a line says
MOST_SHOWN = 20  # refusals of a run that are shown


@app.command("audit")
def audit_command(
    file: Annotated[Path, typer.Argument(help="audit.jsonl of a silo's folder")],
    head: Annotated[
        str | None,
        typer.Option("--head", help="hash of a line that was noted elsewhere: it must be there"),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="print one JSON object")] = False,
) -> int:
    """Check the audit file of a silo, and show what has left it by run and kind."""
    from silograph.federation.session.audit_chain import read_audit

    if not file.is_dir():
        check_regular(file)
    try:
        with file.open("rb") as reader:
            found = read_audit(reader, head)
    except IsADirectoryError:
        raise ConfigError(
            f"expected an audit file, got the folder {file}: name its audit.jsonl"
        ) from None
    except OSError as error:
        raise ConfigError(f"expected an audit file at {file}, got: {error.strerror}") from None
    missing = head is not None and found.noted is None
    if json:
        typer.echo(jsonlib.dumps(_facts(file, found, head)))
    else:
        width = shutil.get_terminal_size().columns
        for line in _lines(file, found, head):
            typer.echo(_folded(printable(line), width))
    return FAILED if missing or found.broken is not None else 0


def _folded(line: str, width: int) -> str:
    """Return a line of a run as lines of a terminal, those after the first indented."""
    if len(line) <= width or not line.startswith("  "):  # the others have the file's path
        return line
    lines = wrap(line, max(width, 40), subsequent_indent=" " * INDENT, break_long_words=False)
    return "\n".join(lines)


def _facts(file: Path, found: "AuditReading", head: str | None) -> dict[str, Any]:
    broken = found.broken
    return {
        "file": str(file),
        "lines": found.lines,
        "head": found.head,
        "broken": None if broken is None else {"line": broken.line, "reason": str(broken)},
        "noted": None if head is None else {"head": head, "line": found.noted},
        "runs": [_facts_of_run(run) for run in found.runs],
    }


def _facts_of_run(run: "AuditedRun") -> dict[str, Any]:
    return {
        "run": run.run,
        "agreed": None if run.agreed is None else _plain(run.agreed),
        "agreements": run.agreements,
        "rounds": run.rounds,
        "repeats": run.repeats,
        "sent": {k: {"calls": run.calls.get(k), "bytes": n} for k, n in run.bytes.items()},
        "bytes": run.sent,
        "refused": run.refused,
        "refusals": [_plain(entry) for entry in run.refusals],
        "ended": None if run.ended is None else _plain(run.ended),
    }


def _plain(entry: "AuditEntry") -> dict[str, Any]:
    own = {k: v for k, v in entry.facts.items() if k not in ("former", "event", "run")}
    return {"line": entry.line, **own}


def _lines(file: Path, found: "AuditReading", head: str | None) -> Iterator[str]:
    """Yield what people read."""
    for run in found.runs:
        yield from _lines_of_run(run, is_broken=found.broken is not None)
        yield ""
    if found.broken is not None:
        yield f"BROKEN: {file}, {found.broken}"
        before = "the line" if found.lines == 1 else f"the {found.lines:,} lines"
        are = "is" if found.lines == 1 else "are"
        yield f"{before} before it {are} whole; nothing is known of those after it"
    else:
        yield f"{file}: {counted(found.lines, 'line')}, each as it was written"
    if head is not None:
        at = f"line {found.noted} has" if found.noted else "MISSING: no line has"
        yield f"{at} the noted hash {head}"
    yield f"head {found.head}"
    if not found.broken:
        yield "note the head elsewhere: whoever holds the file can write all of it anew"


def short_authority(facts: Mapping[str, Any]) -> str:
    """Return the beginning of a digest, and other words as they are."""
    told = str(facts.get("authority"))
    return told if " " in told else told[:16]


def _lines_of_run(run: "AuditedRun", *, is_broken: bool) -> Iterator[str]:
    from silograph.experiment.report.figures import size_text

    yield f"run {run.run}"
    if run.agreed is not None:
        facts = run.agreed.facts
        yield f"  agreed   {facts.get('time')}, {facts.get('method')}, {_rounds(facts)}"
        yield f"  server   {facts.get('server')}, authority {short_authority(facts)}"
        yield f"  config   {facts.get('config')}"
        yield f"  policy   {facts.get('policy')}"
    if run.agreements > 1:
        yield f"  started  {counted(run.agreements, 'time')}"
    if run.bytes:
        rounds = "" if run.rounds is None else f"rounds {run.rounds[0]} to {run.rounds[1]}"
        rounds += f", {run.repeats} done again" if run.repeats else ""
        yield f"  {'sent':<16}{'calls':>10}{'bytes':>16}   {rounds}".rstrip()
        for kind, size in run.bytes.items():
            yield f"  {kind:<16}{run.calls.get(kind, ''):>10}{size_text(size):>16}"
        calls = sum(run.calls.values())
        yield f"  {'all of it':<16}{calls:>10,}{size_text(run.sent):>16}"
    yield from _refusals(run)
    yield f"  ended    {_end(run, is_broken=is_broken)}"


def _refusals(run: "AuditedRun") -> Iterator[str]:
    """Yield what was refused; lines alike that follow each other are shown as one."""
    if run.refused:
        yield f"  refused  {run.refused:,}"
    alike = groupby(run.refusals, key=lambda entry: str(entry.facts.get("reason")))
    groups = [(reason, list(entries)) for reason, entries in alike]
    for reason, entries in groups[:MOST_SHOWN]:
        first, last = entries[0].line, entries[-1].line
        where = f"line {first}" if first == last else f"lines {first} to {last}"
        number = sum(entry.facts["times"] for entry in entries)
        yield f"    {where}{f' ({number:,} times)' if number > 1 else ''}: {reason}"
    if len(groups) > MOST_SHOWN:
        yield f"    and {counted(len(groups) - MOST_SHOWN, 'other')} (all of them: --json)"


def _rounds(facts: Mapping[str, Any]) -> str:
    """Return the rounds that were agreed to; the file may say anything."""
    rounds = facts.get("rounds")
    return counted(rounds, "round") if isinstance(rounds, int) else f"{rounds} rounds"


def _end(run: "AuditedRun", *, is_broken: bool) -> str:
    """Return how a run ended; a line behind the broken one of a file may tell it."""
    if run.ended is None and is_broken:
        return "not known, the file is broken"
    if run.agreed is None:
        reason = None if run.ended is None else run.ended.facts.get("reason")
        return f"the silo did not agree to this run{f': {reason}' if reason else ''}"
    if run.ended is None:
        return "no line of an end: the process was killed, or is at work"
    facts = run.ended.facts
    return f"{facts.get('time')}, {facts.get('reason') or 'the run is over'}"
