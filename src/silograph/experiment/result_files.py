"""Files of result folders that several readers and writers share; nothing here needs torch."""

import csv
import hashlib
import json
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from pydantic import TypeAdapter

from silograph.core.errors import (
    CheckpointError,
    DataError,
    SilographError,
    missing_package,
    mistake,
)
from silograph.core.files import check_regular, from_cell, to_text, write_atomic

if TYPE_CHECKING:
    import pandas as pd


Row = dict[str, int | float | None]
CONFIG, ABOUT, RESULT, REPORT = "config.toml", "run.json", "result.json", "report.html"
ROUNDS, LEDGER, CLIENTS = "rounds.csv", "ledger.jsonl", "clients.csv"
SIMULATION = "simulation.json"
SUMS = "checksums.json"
CHECKPOINTS = "checkpoints"
DIVERGED = "diverged.txt"
CLIENT_STATISTICS = "client_statistics.safetensors"  # by which clients standardize features
FEATURE_DRIFT = "feature_drift.csv"  # how far features of clients differ, if the run asks for it
RECOMMENDER = "recommender.safetensors"  # of a silo of ratings
RECOMMENDERS = "recommenders"  # in a simulation's folder: one file a client, of ratings
MODEL, MODELS = "model.safetensors", "models"  # the latter a folder of clients' own models
FORMAT = 4  # of result folders: goes up where files mean something else than before
FACT = "fact_"  # begins the columns of what a method reports of a round
KNOB = "knob_"  # begins those of options that a controller sets, after `FACT`
VIRTUAL = "virtual_seconds"  # column of runs with a virtual clock
ALL_BIASES = "all biases"  # of `untrained`: by all silos' ratings together, which no silo has
OF_CLIENTS = (MODELS, RECOMMENDERS)  # folders with a file for each client
LONGEST = 100  # characters of a client's name in the name of a file
WHOLE = ("round", "participants", "bytes", "bytes_evaluation")  # columns of integers


def file_of(number: int, client: str) -> str:
    """Return the name of the file of a client's own model; names may have any letters.

    >>> file_of(3, "St. Mary/north")
    '3-St.%20Mary%2Fnorth.safetensors'
    """
    return f"{number}-{quote(client, safe='')[:LONGEST]}.safetensors"


def check_format(about: Mapping[str, Any], path: Path) -> None:
    """Raise `CheckpointError` unless run.json is of a folder that this version reads."""
    version, versions = about.get("format", 1), about.get("versions")
    if version != FORMAT and isinstance(versions, Mapping):  # else it is no run.json at all
        silograph_version = versions.get("silograph")
        raise CheckpointError(
            f"expected a result folder of format {FORMAT} in {path.parent}, got format {version}, "
            f"as silograph {silograph_version} wrote it: read it with that version, or run it "
            "again from its config.toml",
            **mistake("other-version", FORMAT, version),
        )


def read_json(path: Path) -> dict[str, Any]:
    """Return what a file of JSON says.

    Raises:
        DataError: the file is damaged.
        OSError: it cannot be read.
    """
    check_regular(path)
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise damaged_file_error(path, str(error)) from None
    if not isinstance(content, dict):
        raise damaged_file_error(path, type(content).__name__)
    return content


def damaged_file_error(path: Path, got: str) -> DataError:
    """Return the error for a file that can be read and is not as runs write it."""
    return DataError(
        f"expected {path} as a run writes it, got: {got}: restore the file from a copy",
        **mistake("damaged-file", path),
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


def names_of_clients(folder: Path) -> list[str]:
    """Return the names of the clients of a simulation's result folder, in their order.

    Raises:
        DataError: the table of clients is damaged, or is no regular file.
        OSError: it cannot be read.
    """
    names = [row.get("client", "") for row in read_csv(folder / CLIENTS)]
    if not names or not all(names):
        raise _no_table(folder / CLIENTS, ValueError("clients without names"))
    return names


def _no_table(path: Path, error: Exception) -> DataError:
    """Return the error for a damaged table."""
    return DataError(
        f"expected a table in {path} as a run writes it, got: {error}: restore the file from a "
        "copy",
        **mistake("damaged-file", path),
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


# --- checksums -----------------------------------------------------------------------------------
# Digests that show altered or damaged files of result folders and studies; no torch is needed.
#
# checksums.json has the digests of the files of a result folder. The JSON files of a study, and
# each line of its cells, have a digest of their own, because a study grows until it is over.


LOG = logging.getLogger("silograph")
UNCHECKED = "{} has no digest that it could be checked by: an older version wrote it"
DIGEST = "digest"  # key of a JSON object that holds the digest of its other keys
AT_END = (RESULT, ROUNDS, LEDGER)  # they have digests once the run is over
# `resume` checks them by other means: by the identity of the run and by its checkpoints.
LATER = (CONFIG, DIVERGED, *AT_END)


def digest_of_bytes(data: bytes) -> str:
    """Return what names bytes."""
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def read_sums(folder: Path) -> dict[str, list[str]]:
    """Return the digests that files of a result folder may have, by name.

    Raises:
        CheckpointError: there are none that can be read.
    """
    check_regular(folder / SUMS)
    try:
        text = (folder / SUMS).read_text(encoding="utf-8")
        return TypeAdapter(dict[str, list[str]]).validate_python(json.loads(text))
    except (OSError, ValueError, RecursionError):
        raise CheckpointError(
            f"expected digests of the run's files in {folder / SUMS}, got none that can be "
            "read: restore the file from a copy, or begin a new run",
            **mistake("damaged-file", folder / SUMS),
        ) from None


def write_sums(folder: Path, sums: Mapping[str, Sequence[str]], *, private: bool = False) -> None:
    """Write the digests that files of a result folder may have; `private` as for `write_atomic`."""
    write_atomic(folder / SUMS, json.dumps(sums, indent=2) + "\n", private=private)


def add_sums(folder: Path, digests: Mapping[str, str]) -> None:
    """Write down what files may be from now on, beside what they may have been before."""
    sums = read_sums(folder)
    for name, digest in digests.items():
        sums[name] = list(dict.fromkeys([*sums.get(name, []), digest]))
    write_sums(folder, sums)


def replace_sums(folder: Path, digests: Mapping[str, str]) -> None:
    """Write down what files are from now on, whatever they may have been before."""
    sums = read_sums(folder)
    write_sums(folder, sums | {name: [digest] for name, digest in digests.items()})


def write_with_sums(folder: Path, texts: Mapping[str, str]) -> None:
    """Write files and their digests alone; a kill in between leaves files that fit digests."""
    sums = {n: digest_of_bytes(t.encode(errors="backslashreplace")) for n, t in texts.items()}
    write_sums(folder, {name: [digest_of(folder / name), sums[name]] for name in texts})
    for name, text in texts.items():
        write_atomic(folder / name, text)
    write_sums(folder, {name: [digest] for name, digest in sums.items()})


def is_of_model(name: str) -> bool:
    """Return whether a name in checksums.json is written with the models, when the run is over."""
    in_folders = tuple(f"{of_clients}/" for of_clients in OF_CLIENTS)
    return name in (MODEL, CLIENT_STATISTICS, FEATURE_DRIFT) or name.startswith(in_folders)


def digest_of(file: Path) -> str:
    """Return what names the bytes of a file, `none` where there is none."""
    check_regular(file)
    return digest_of_bytes(file.read_bytes()) if file.is_file() else "none"


MEND = "restore the file from a copy, or begin a new run"


def describe_difference(
    file: Path, digest: str, expected: Sequence[str], mend: str = MEND
) -> str | None:
    """Return how a file differs from what the run has written, None where it does not."""
    if digest in expected:
        return None
    return (
        f"expected {file} as the run has written it ({' or '.join(expected)}), got one that has "
        f"changed ({digest}): {mend}"
    )


def check_written(folder: Path, names: Sequence[str], mend: str = MEND) -> None:
    """Raise `DataError` for files of a result folder that are not as the run has written them.

    Nothing is known of files that are not there, nor of those that an older version wrote.
    """
    # Digests of files before those that are known: a run that goes on writes these down first.
    digests = {name: digest_of(folder / name) for name in names if (folder / name).exists()}
    sums = read_sums(folder) if (folder / SUMS).is_file() else {}
    for name in digests.keys() & sums.keys():
        if line := describe_difference(folder / name, digests[name], sums[name], mend):
            raise DataError(line, **mistake("damaged-file", folder / name))


def check_model_file(path: Path) -> None:
    """Raise `DataError` for a model's file that is not as its run has written it.

    Nothing is known of a file outside a result folder. A line is logged where an older version
    has written no digest of it.
    """
    absolute = path.absolute()
    for folder in absolute.parents[:2]:  # that of all is in the folder, clients' own are in models
        if any((folder / name).is_file() for name in (SUMS, ABOUT, RESULT)):
            name = absolute.relative_to(folder).as_posix()
            check_written(folder, [name])
            has_sums = (folder / SUMS).is_file()
            if absolute.is_file() and not (has_sums and name in read_sums(folder)):
                LOG.warning("%s", UNCHECKED.format(path))


@dataclass(frozen=True)
class FolderCheck:
    """How the files of a result folder fit their digests in checksums.json.

    Attributes:
        folder: the folder, as the user wrote it.
        is_over: whether the run is over.
        has_sums: whether there is a file checksums.json that can be read.
        altered: names of files that are not as the run has written them.
        missing: names of files that have a digest and are not there.
        unchecked: names of files that have no digest.
    """

    folder: str
    is_over: bool
    has_sums: bool
    altered: tuple[str, ...]
    missing: tuple[str, ...]
    unchecked: tuple[str, ...]

    @property
    def is_damaged(self) -> bool:
        """Whether a file was altered or is missing; folders of old have no checksums.json."""
        has_bad_sums = not self.has_sums and os.path.lexists(Path(self.folder) / SUMS)
        return bool(self.altered or self.missing) or has_bad_sums

    def lines(self) -> Iterator[str]:
        """Yield what a reader of the folder must know, one line each; none where all files fit."""
        if not self.has_sums:
            yield (
                f"{self.folder} has no {SUMS} that can be read: its files could not be checked, "
                "and may have been altered since the run wrote them"
            )
        for name in self.altered:
            yield (
                f"{self.folder}/{name} does not fit its digest in {SUMS}: it has been altered or "
                "damaged since the run wrote it, so do not trust its figures"
            )
        for name in self.missing:
            mend = "; silograph resume writes it anew" if name == RESULT else ""
            yield f"{self.folder}/{name} is missing: {SUMS} has a digest of it{mend}"
        if self.has_sums and self.unchecked:
            why = "an older version wrote them" if self.is_over else "the run is not over"
            yield (
                f"{SUMS} of {self.folder} has no digest of {', '.join(self.unchecked)} ({why}): "
                "they could not be checked"
            )


def check_folder(folder: Path, *, is_over: bool) -> FolderCheck:
    """Compare the files of a result folder with their digests.

    Args:
        folder: of a run.
        is_over: whether the run is over; until then tables grow, and have no digests.

    Raises:
        DataError: one of them is no regular file.
    """
    try:
        sums, has_sums = read_sums(folder), True
    except CheckpointError:
        sums, has_sums = {}, False
    models = [
        f"{of_clients}/{path.name}"
        for of_clients in OF_CLIENTS
        for path in sorted((folder / of_clients).glob("[!.]*"))
    ]
    names = [CONFIG, ABOUT, SIMULATION, CLIENTS, ROUNDS, LEDGER, RESULT, DIVERGED, MODEL]
    names += [CLIENT_STATISTICS, FEATURE_DRIFT]
    names += models
    # A run that is stopped at its very end has digests of its last files, and perhaps lacks some.
    at_end = not is_over and RESULT in sums
    if not is_over and not at_end:
        sums = {n: digests for n, digests in sums.items() if n not in AT_END and not is_of_model(n)}
        names = [name for name in names if not is_of_model(name)]
    altered, missing, unchecked = [], [], []
    for name in dict.fromkeys([*names, *sums]):
        digest = digest_of(folder / name) if _is_inside(name) else "none"
        if digest == "none":
            may_lack = name == DIVERGED or (at_end and is_of_model(name))
            missing += [name] if name in sums and not may_lack else []
        elif name not in sums:
            unchecked.append(name)
        elif digest not in sums[name]:
            altered.append(name)
    parts = tuple(altered), tuple(missing), tuple(unchecked)
    return FolderCheck(str(folder), is_over, has_sums, *parts)


def _is_inside(name: str) -> bool:
    """Return whether a name in checksums.json is that of a file in the folder or of a client."""
    in_folder = {name, *(name.removeprefix(f"{of_clients}/") for of_clients in OF_CLIENTS)}
    return Path(name).name in in_folder and name not in ("", "..")


def with_digest(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a JSON object with a digest of themselves."""
    return {**values, DIGEST: _digest_of_values(values)}


def without_digest(values: Mapping[str, Any], where: str) -> tuple[dict[str, Any], bool]:
    """Return the values of a JSON object that `with_digest` made, and whether they had a digest.

    Args:
        values: as they were read; older versions wrote them without a digest.
        where: they are from, for the error.

    Raises:
        DataError: they have been altered.
    """
    plain = {name: value for name, value in values.items() if name != DIGEST}
    if DIGEST in values and values[DIGEST] != _digest_of_values(plain):
        raise DataError(
            f"expected {where} as it was written, got another: it does not fit its digest, so it "
            "has been altered or damaged: restore it from a copy",
            **mistake("damaged-file", where),
        )
    return plain, DIGEST in values


def _digest_of_values(values: Mapping[str, Any]) -> str:
    return digest_of_bytes(json.dumps(values).encode(errors="surrogatepass"))


# --- Rows as a pandas DataFrame; pandas is not installed with silograph --------------------------


def frame_of(rows: Sequence[Mapping[str, Any]], instead: str) -> "pd.DataFrame":
    """Return rows as a pandas DataFrame.

    Args:
        rows: dicts with the same keys.
        instead: where the rows are without pandas.

    Raises:
        SilographError: pandas is not installed.
    """
    try:
        import pandas as pd
    except ImportError:
        raise missing_package(
            "pandas", "to_dataframe()", "pandas", SilographError, otherwise=instead
        ) from None
    return pd.DataFrame(list(rows))
