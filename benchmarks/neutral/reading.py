"""How much of the library runs in a round: functions, files, frames to a gradient.

    python benchmarks/neutral/reading.py method=fedavg
    python benchmarks/neutral/reading.py method=fedais model=sage kernels=torch --list

It is a measure of how much a reader has to open to follow a method, not of quality as such.
Options are those of `silograph.run`; by default 4 clients, 2 rounds, hidden=8 and the digits graph.
The last line says how many of the library's own frames are between `silograph.run` and the first
gradient, in a run with torch kernels. Only `Method.round` and `silograph.run` are used, so the
script runs at older commits, too: 871e96ad has 180 functions in 53 files for fedavg, and 304 in 67
for fedais with SAGE.
"""

import sys
import traceback
from pathlib import Path
from types import FrameType
from typing import Any

import torch

import silograph as sg
from silograph.methods import METHODS

ROOT = Path(sg.__file__).parent
DEFAULTS: dict[str, Any] = {
    "clients": 4,
    "partition": "random",
    "rounds": 2,
    "hidden": 8,
    "method": "fedavg",
}


def parse(text: str) -> Any:
    """Return a number, or the text."""
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def functions_of_round(graph: str, options: dict[str, Any]) -> set[tuple[str, str]]:
    """Return file and name of each function that runs in a round, when all is compiled."""
    method, seen = METHODS[options["method"]], set[tuple[str, str]]()
    original = method.round

    def record(frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        name = code.co_qualname.rpartition(".")[2]
        if event == "call" and code.co_filename.startswith(str(ROOT)) and not name.startswith("<"):
            seen.add((code.co_filename, f"{code.co_qualname}:{code.co_firstlineno}"))

    def watched(*args: Any, **keywords: Any) -> Any:
        sys.setprofile(record)
        try:
            return original(*args, **keywords)
        finally:
            sys.setprofile(None)

    object.__setattr__(method, "round", watched)
    try:
        sg.run(graph, **options)  # imports and compilation
        seen.clear()
        sg.run(graph, **options)
    finally:
        object.__setattr__(method, "round", original)
    return seen


def frames_to_gradient(graph: str, options: dict[str, Any]) -> list[str]:
    """Return the library's frames from `silograph.run` to the first gradient, outermost first."""
    stacks: list[list[str]] = []
    original = torch.autograd.grad

    def record(*args: Any, **keywords: Any) -> Any:
        own = [f for f in traceback.extract_stack() if f.filename.startswith(str(ROOT))]
        stacks.append([f"{Path(f.filename).relative_to(ROOT)} {f.name}" for f in own])
        return original(*args, **keywords)

    torch.autograd.grad = record
    try:
        sg.run(graph, **options | {"kernels": "torch"})
    finally:
        torch.autograd.grad = original
    return stacks[0] if stacks else []


def main() -> None:
    """Print the counts; with `--list`, every function and frame."""
    given = dict(a.split("=", 1) for a in sys.argv[1:] if "=" in a)
    options = DEFAULTS | {name: parse(text) for name, text in given.items()}
    graph = options.pop("graph", "digits")
    functions = functions_of_round(graph, dict(options))
    frames = frames_to_gradient(graph, dict(options))
    if "--list" in sys.argv:
        for file, name in sorted(functions):
            print(f"  {Path(file).relative_to(ROOT)} {name}")
        print(*(f"  {frame}" for frame in frames), sep="\n")
    print(options)
    print(f"{len(functions)} functions in {len({file for file, _ in functions})} files")
    print(f"{len(frames)} own frames from silograph.run to the first gradient")


if __name__ == "__main__":
    main()
