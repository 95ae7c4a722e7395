"""States of clients in files of their own, which workers write beside the server's checkpoint.

A checkpoint names them with their digests, so states need not pass through the server's process.

    CHECKPOINTS/states-ROUND-BLOCK.checkpoint
"""

import hashlib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from silograph.core.errors import CheckpointError, mistake
from silograph.core.files import check_regular, replacing
from silograph.core.payload import State
from silograph.federation.checkpoint import (
    PARTIAL,
    STATES,
    WHOLE,
    Checkpoint,
    read_checkpoint,
    state_from,
    state_tensors,
    to_bytes,
)

_DIGEST_BYTES = 16


class StateFile(NamedTuple):
    """The state of one block's clients after a round, in a file.

    Attributes:
        path: of the file.
        round: that was over.
        digest: BLAKE2b of its bytes, 32 hex digits.
    """

    path: Path
    round: int
    digest: str


def write_state(folder: Path, number: int, block: int, state: State) -> StateFile:
    """Write the state of a block's clients after a round.

    Raises:
        OSError: there is no such folder, or no room in it.
    """
    path = folder / f"{STATES}-{number:09d}-{block:06d}{WHOLE}"
    hasher = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    with replacing(path, path.with_suffix(PARTIAL), synced=False) as file:
        for part in to_bytes(Checkpoint(number, state_tensors(state), {})):
            hasher.update(part)
            file.write(part)
    return StateFile(path, number, hasher.hexdigest())


def read_state(file: StateFile) -> State:
    """Return the state of a file.

    Raises:
        CheckpointError: it is missing, damaged or another one.
    """
    check_file(file)
    return state_from(read_checkpoint(file.path, file.round).tensors)


def check_file(file: StateFile) -> None:
    """Raise `CheckpointError` for a file that is missing, or that is not as it was written."""
    check_regular(file.path, error_type=CheckpointError)
    try:
        with file.path.open("rb") as stream:
            hasher = hashlib.file_digest(stream, lambda: hashlib.blake2b(digest_size=_DIGEST_BYTES))
    except OSError as error:
        raise CheckpointError(
            f"expected {file.path}, got: {error.strerror}: restore it, or resume from an earlier "
            "checkpoint",
            **mistake("damaged-file", file.path),
        ) from None
    if hasher.hexdigest() != file.digest:
        raise CheckpointError(
            f"{file.path}: expected the states of the checkpoint, got others: restore it, or "
            "resume from an earlier checkpoint",
            **mistake("damaged-file", file.path),
        )


def state_files(folder: Path, number: int, digests: Mapping[str, str]) -> list[StateFile]:
    """Return the files that a checkpoint names, by block.

    Args:
        folder: of the checkpoint.
        number: its round.
        digests: by name of the file, in the order of blocks.

    Raises:
        CheckpointError: other names than those of states of the round.
    """
    form = re.compile(rf"{STATES}-{number:09d}-\d{{6,}}{re.escape(WHOLE)}")
    for name in digests:
        if not form.fullmatch(name):
            raise CheckpointError(
                f"expected files of states of round {number}, got {name!r}",
                **mistake("damaged-file", folder / name),
            )
    return [StateFile(folder / name, number, digest) for name, digest in digests.items()]
