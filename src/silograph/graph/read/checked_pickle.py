"""Files of loaders that are pickles: read first with nothing but arrays, sparse matrices and dicts.

To unpickle a file is to call what it names. The raw files of Planetoid are pickles, and what
torch_geometric keeps of any graph is one, too. Their digests are published nowhere, so a file
counts as good where it names only what such a file needs.
"""

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import scipy.sparse as sp
import torch

from silograph.core.errors import DataError, mistake

_BUILT_IN = ("object", "list", "bytes")
# What numpy and scipy of all versions, and Python 2, name in a pickle of arrays.
_ALLOWED = {
    ("collections", "defaultdict"),
    *((module, "_reconstructor") for module in ("copyreg", "copy_reg")),
    *((module, name) for module in ("builtins", "__builtin__") for name in _BUILT_IN),
    *(("numpy", name) for name in ("ndarray", "dtype")),
    *((f"numpy.{core}.multiarray", "_reconstruct") for core in ("core", "_core")),
    *((f"scipy.sparse.{module}", "csr_matrix") for module in ("csr", "_csr")),
}
_PLAIN = (np.ndarray, tuple, int, float, str, bool, type(None))  # types of a matrix's attributes
_PARTS = ("data", "indices", "indptr")


class _Arrays(pickle.Unpickler):
    """Unpickles arrays, sparse matrices and dicts; refuses to name anything else."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("_codecs", "encode"):
            return _latin1
        if (module, name) not in _ALLOWED:
            raise pickle.UnpicklingError(f"{module}.{name}, which is no part of an array")
        return super().find_class(module, name)


def _latin1(text: str, encoding: str) -> bytes:
    """Return the bytes that Python 3 writes as text for old protocols."""
    if encoding != "latin1":
        raise pickle.UnpicklingError(f"text in {encoding}")
    return text.encode("latin1")


def check_arrays(path: Path) -> None:
    """Raise `DataError` unless a pickle holds an array, a sparse matrix or a dict, and is sound."""
    try:
        with path.open("rb") as file:
            _check(_Arrays(file, encoding="latin1").load())
    except Exception as error:  # whatever a damaged or hostile pickle may raise
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        raise DataError(
            f"{path.name}: expected a pickle of numbers alone, got {reason}: download it again; "
            "nothing that it names was run",
            **mistake("wrong-format", path),
        ) from None


def _check(loaded: object) -> None:
    if isinstance(loaded, dict):
        return
    if type(loaded) is np.ndarray and loaded.dtype.kind in "biuf":
        return
    if type(loaded) is not sp.csr_matrix:
        raise TypeError(f"a {type(loaded).__name__}")
    # Compiled code reads the parts without checking; methods may hide behind attributes.
    if any(type(value) not in _PLAIN for value in vars(loaded).values()):
        raise TypeError("a sparse matrix with foreign attributes")
    data, indices, indptr = (vars(loaded)[name] for name in _PARTS)
    if data.dtype.kind not in "biuf":
        raise TypeError(f"a sparse matrix of {data.dtype}")
    sp.csr_matrix((data, indices, indptr), shape=loaded.shape).check_format(full_check=True)


def check_kept(path: Path) -> None:
    """Raise `DataError` unless torch reads a file without importing what it names."""
    try:
        torch.load(path, weights_only=True, mmap=True)
    except Exception as error:  # whatever a damaged or hostile pickle may raise
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        raise DataError(
            f"{path}: expected tensors alone, got {reason}: delete the folder {path.parent.name}, "
            "which is made again from raw; nothing that the file names was run",
            **mistake("wrong-format", path),
        ) from None
