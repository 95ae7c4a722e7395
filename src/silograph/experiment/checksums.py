"""checksums.json: digests of the files of a result folder; nothing here needs torch."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from pydantic import TypeAdapter

from silograph.core.errors import CheckpointError, DataError
from silograph.core.files import write_atomic
from silograph.experiment.result_files import ABOUT, CLIENT_STATISTICS, MODEL, MODELS, SUMS


def digest_of_bytes(data: bytes) -> str:
    """Return what names bytes."""
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def read_sums(folder: Path) -> dict[str, list[str]]:
    """Return the digests that files of a result folder may have, by name.

    Raises:
        CheckpointError: there are none that can be read.
    """
    try:
        text = (folder / SUMS).read_text(encoding="utf-8")
        return TypeAdapter(dict[str, list[str]]).validate_python(json.loads(text))
    except (OSError, ValueError, RecursionError):
        raise CheckpointError(
            f"expected digests of the run's files in {folder / SUMS}, got none that can be "
            "read: restore the file from a copy, or begin a new run"
        ) from None


def write_sums(folder: Path, sums: Mapping[str, Sequence[str]]) -> None:
    """Write the digests that files of a result folder may have."""
    write_atomic(folder / SUMS, json.dumps(sums, indent=2) + "\n")


def add_sums(folder: Path, digests: Mapping[str, str]) -> None:
    """Write down what files may be from now on, beside what they may have been before."""
    sums = read_sums(folder)
    for name, digest in digests.items():
        sums[name] = list(dict.fromkeys([*sums.get(name, []), digest]))
    write_sums(folder, sums)


def is_of_model(name: str) -> bool:
    """Return whether a name in checksums.json is written with the models, when the run is over."""
    return name in (MODEL, CLIENT_STATISTICS) or name.startswith(f"{MODELS}/")


def digest_of(file: Path) -> str:
    """Return what names the bytes of a file, `none` where there is none."""
    return digest_of_bytes(file.read_bytes()) if file.is_file() else "none"


def differing(file: Path, found: str, known: Sequence[str]) -> str | None:
    """Return how a file differs from what the run has written, None where it does not."""
    if found in known:
        return None
    return (
        f"expected {file} as the run has written it ({' or '.join(known)}), got one that has "
        f"changed ({found}): restore the file from a copy, or begin a new run"
    )


def check_written(folder: Path, names: Sequence[str]) -> None:
    """Raise `DataError` for files of a result folder that are not as the run has written them.

    Nothing is known of files that are not there, nor of those that an older version wrote.
    """
    # Digests of files before those that are known: a run that goes on writes these down first.
    found = {name: digest_of(folder / name) for name in names if (folder / name).is_file()}
    sums = read_sums(folder) if (folder / SUMS).is_file() else {}
    for name in found.keys() & sums.keys():
        if line := differing(folder / name, found[name], sums[name]):
            raise DataError(line)


def check_model_file(path: Path) -> None:
    """Raise `DataError` for a model's file that is not as its run has written it.

    Nothing is known of a file outside a result folder.
    """
    whole = path.absolute()
    for folder in whole.parents[:2]:  # that of all is in the folder, clients' own are in models
        if (folder / ABOUT).is_file():
            check_written(folder, [whole.relative_to(folder).as_posix()])
