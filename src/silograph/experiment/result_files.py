"""Files of result folders that several readers and writers share; nothing here needs torch."""

import csv
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from silograph.core.csv_text import from_cell, to_text
from silograph.core.errors import CheckpointError, DataError
from silograph.core.files import check_regular

Row = dict[str, int | float | None]
CONFIG, ABOUT, RESULT, REPORT = "config.toml", "run.json", "result.json", "report.html"
ROUNDS, LEDGER, CLIENTS = "rounds.csv", "ledger.jsonl", "clients.csv"
SIMULATION = "simulation.json"
SUMS = "checksums.json"
CHECKPOINTS = "checkpoints"
DIVERGED = "diverged.txt"
CLIENT_STATISTICS = "client_statistics.safetensors"  # by which clients standardize features
RECOMMENDER = "recommender.safetensors"  # of a silo of ratings
MODEL, MODELS = "model.safetensors", "models"  # the latter a folder of clients' own models
FORMAT = 4  # of result folders: goes up where files mean something else than before
FACT = "fact_"  # begins the columns of what a method reports of a round
VIRTUAL = "virtual_seconds"  # column of runs with a virtual clock
WHOLE = ("round", "participants", "bytes", "bytes_evaluation")  # columns of integers


def check_format(about: Mapping[str, Any], path: Path) -> None:
    """Raise `CheckpointError` unless run.json is of a folder that this version reads."""
    found, versions = about.get("format", 1), about.get("versions")
    if found != FORMAT and isinstance(versions, Mapping):  # else it is no run.json at all
        maker = versions.get("silograph")
        raise CheckpointError(
            f"expected a result folder of format {FORMAT} in {path.parent}, got format {found}, as "
            f"silograph {maker} wrote it: read it with that version, or run it again from its "
            "config.toml"
        )


def read_json(path: Path) -> dict[str, Any]:
    """Return what a file of JSON says.

    Raises:
        DataError: the file is damaged.
        OSError: it cannot be read.
    """
    check_regular(path)
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise damaged(path, str(error)) from None
    if not isinstance(found, dict):
        raise damaged(path, type(found).__name__)
    return found


def damaged(path: Path, got: str) -> DataError:
    """Return the error for a file that can be read and is not as runs write it."""
    return DataError(
        f"expected {path} as a run writes it, got: {got}: restore the file from a copy"
    )


def to_csv(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return rows as CSV; all have the columns of the first."""
    columns = list(rows[0])
    return to_text([columns, *([row[name] for name in columns] for row in rows)])


def read_csv(path: Path) -> list[dict[str, str]]:
    """Return the rows of a CSV file as they stand.

    Raises:
        DataError: the file is damaged, or is no regular file.
        OSError: it cannot be read.
    """
    check_regular(path)
    try:
        with path.open(newline="", encoding="utf-8") as file:
            header, *rows = filter(None, csv.reader(file))
        return [dict(zip(header, map(from_cell, row), strict=True)) for row in rows]
    except (ValueError, csv.Error) as error:
        raise _no_table(path, error) from None


def _no_table(path: Path, error: Exception) -> DataError:
    """Return the error for a damaged table."""
    return DataError(
        f"expected a table in {path} as a run writes it, got: {error}: restore the file from a copy"
    )


def read_rounds(path: Path) -> list[Row]:
    """Return the table of rounds as it was: Python's floats survive their text.

    Raises:
        DataError: the file is damaged.
        OSError: it cannot be read.
    """
    lines = read_csv(path)
    try:
        return [{name: _number(name, text) for name, text in line.items()} for line in lines]
    except ValueError as error:
        raise _no_table(path, error) from None


def _number(column: str, text: str) -> int | float | None:
    return None if not text else int(text) if column in WHOLE else float(text)
