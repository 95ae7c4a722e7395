"""The folders in which graphs are looked for, and kept."""

import os
from pathlib import Path

from silograph.core.errors import DataError

VARIABLE = "SILOGRAPH_DATA"


def cache_folder(data_dir: str | os.PathLike[str] | None) -> Path:
    """Return where graphs are kept that were downloaded or generated.

    Raises:
        DataError: a folder that was given is absent.
    """
    given = data_dir is not None or os.environ.get(VARIABLE)
    return data_folders(data_dir)[0] if given else Path.home() / ".cache" / "silograph"


def data_folders(data_dir: str | os.PathLike[str] | None) -> list[Path]:
    """Return the folders to search, first to last.

    Raises:
        DataError: a folder that was given is absent.
    """
    given = {"data_dir": data_dir, f"${VARIABLE}": os.environ.get(VARIABLE) or None}
    folders = []
    for what, folder in given.items():
        if folder is not None:
            folders.append(Path(folder).expanduser())
            if not folders[-1].is_dir():
                raise DataError(f"expected a folder as {what}, got {folder}: no such folder")
    return [*folders, Path("../shared/data")]
