"""Modules of users' files, which are run from their path and not found by a name."""

import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType

FILE_MODULE = ".py:"  # ends the name of such a module: no name of one that could be imported


def run_module_file(path: str | os.PathLike[str]) -> ModuleType:
    """Run a file anew as the module `PATH:`, and return it.

    Dataclasses and pickle look up by that name where a class was made.

    Raises:
        Exception: whatever running it raises; then a module of an earlier run stays.
    """
    path = Path(path).absolute()
    name = f"{path}:"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None  # the path ends in .py
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    previous_module = sys.modules.get(name)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        if previous_module is not None:
            sys.modules[name] = previous_module
        raise
    return module
