"""Install the lowest and the newest allowed versions, and try each command with them.

`make test-bounds` runs it. Each environment is made by uv in a temporary folder and deleted. On a
Python of which the index has no CPU build of torch, pip would load gigabytes of CUDA packages: such
an environment is left out unless `--cuda` is given.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).parents[1]
EXTRAS = "fast,federation,dp,parquet,pandas,tune"
RESOLUTIONS = ("lowest-direct", "highest")
SHOWN = ("torch", "torch-geometric", "numpy", "scipy", "typer", "click", "pymetis", "rich", "numba")


def commands() -> Iterator[tuple[str, int, str]]:
    """Yield commands as words, the exit codes that they end with, and texts that they print.

    They run in one folder, one after the other.
    """
    yield "run digits --rounds 2 --partition metis --clients 3 --out run --quiet", 0, "test"
    yield "run --clientz 3", 2, "No such option: --clientz (Possible options: --clients, "
    yield "compile", 0, ""
    yield "rum", 2, "Did you mean 'run', 'resume'?\n"
    yield "run --rounds x", 2, "'x' is not a valid integer"
    yield "predict run", 2, "Missing option '--data'. Give --data VALUE: "
    yield "predict", 2, "Missing argument 'RUN'. Give RUN: result folder"
    yield "resume run", 0, "was complete"
    yield "report run", 0, "written to"
    yield "predict run --data digits --out predicted.csv", 0, "predictions of 1,797 nodes"
    yield "compare digits --methods local,fedavg --rounds 2 --seeds 1 --out compared", 0, "local"
    yield "tune digits --trials 1 --rounds 2 --seeds 1 --keys lr --out tuned", 0, "lr"
    yield "partition digits --partition louvain --clients 3", 0, "louvain"
    yield "attack digits --rounds 2 --clients 3 --partition random --out attacked", 0, ""
    yield "export-silos digits --clients 3 --partition metis --format parquet --out silos", 0, "3"
    yield "silo --make-key --data silos/client_00", 0, "client_00 "
    yield "silo --init-policy --data silos/client_00", 0, "policy.toml"
    yield "certs --out certs", 0, "ca.pem for the silos"
    yield "server --listen localhost:0 --clients 3 --certs certs", 2, "expected the public keys"
    yield "demo-federation digits --rounds 2 --quiet", 0, "the same, bit for bit"
    for name in ("datasets", "methods", "parts", "--version"):
        yield name, 0, ""


def smoke_test(program: Path, folder: Path) -> list[str]:
    """Try the help and a use of each command; return one line for each that fails.

    Args:
        program: the command `silograph` of an environment.
        folder: an empty folder to run in.
    """
    help_text = run([program, "--help"], folder).stdout
    names = re.findall(r"^│ ([a-z][a-z-]+) ", help_text, re.MULTILINE)
    if "run" not in names or "silo" not in names:
        return [f"--help lists no commands: {help_text[:200]!r}"]
    tried = [(f"{name} --help", 0, "Usage: silograph") for name in names] + [*commands()]
    failed = []
    for words, code, text in tried:
        done = run([program, *words.split()], folder)
        said = done.stdout + done.stderr
        one_line = code == 0 or done.stderr.count("\n") == 1
        if done.returncode != code or text not in said or "Traceback" in said or not one_line:
            last = (said.strip().splitlines() or ["nothing"])[-1]
            failed.append(f"silograph {words}: exit code {done.returncode}, {last}")
    return failed


def run(command: list[str | Path], folder: Path) -> "subprocess.CompletedProcess[str]":
    """Run a command and capture what it prints."""
    environment = {**os.environ, "COLUMNS": "100", "PYTHONDONTWRITEBYTECODE": ""}
    environment["UV_PYTHON_DOWNLOADS"] = "never"  # a Python that is not here is left out
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, check=False
    )


def install(uv: str, python: str, resolution: str, torch: str, *, cuda: bool) -> str:
    """Make an environment, try it, and return a line with the versions and the verdict."""
    with tempfile.TemporaryDirectory(prefix="silograph-bounds-") as name:
        folder = Path(name)
        how: list[str | Path] = [
            "--python",
            folder / "env" / "bin" / "python",
            "--constraints",
            folder / "torch.txt",
        ]
        made = run([uv, "venv", "--quiet", "--python", python, folder / "env"], folder)
        if made.returncode:
            return f"left out: {made.stderr.strip()}"
        package = f"{ROOT}[{EXTRAS}]"
        binary = ["--only-binary", ":all:", "--no-binary", "silograph"]
        words: list[str | Path] = [
            uv,
            "pip",
            "install",
            "--resolution",
            resolution,
            *binary,
            *how,
            package,
        ]
        # The lowest resolution prefers the build with CUDA unless the CPU build is named.
        (folder / "torch.txt").write_text(f"{torch}+cpu")
        planned = run([*words, "--dry-run"], folder)
        if planned.returncode:
            (folder / "torch.txt").write_text(torch)
            planned = run([*words, "--dry-run"], folder)
        if planned.returncode:
            return f"FAILED to resolve: {planned.stderr.strip()}"
        if not cuda and re.search(r"^ \+ nvidia-", planned.stderr, re.MULTILINE):
            return "left out: torch would bring CUDA packages (--cuda installs them)"
        installed = run(words, folder)
        if installed.returncode:
            return f"FAILED to install: {installed.stderr.strip()}"
        versions = versions_in(run([uv, "pip", "freeze", *how[:2]], folder).stdout)
        shown = ", ".join(f"{each} {versions.get(each, 'none')}" for each in SHOWN)
        (folder / "work").mkdir()
        failed = smoke_test(folder / "env" / "bin" / "silograph", folder / "work")
        return f"{shown}: " + ("\n  ".join(["FAILED", *failed]) if failed else "passed")


def versions_in(freeze: str) -> Mapping[str, str]:
    """Return the versions that `pip freeze` lists, by name."""
    pairs = (line.partition("==") for line in freeze.splitlines())
    return {name: version for name, _, version in pairs}


def main() -> int:
    """Try each Python with each resolution; return 1 if one of them fails."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--uv", default="uv", help="the program uv")
    parser.add_argument("--python", nargs="+", default=["3.11"], help="versions or programs")
    parser.add_argument("--torch", default="torch==2.13.0", help="version of torch for all")
    parser.add_argument("--cuda", action="store_true", help="install CUDA packages, too")
    given = parser.parse_args()
    uv = shutil.which(given.uv)
    if uv is None:
        parser.error(f"expected uv at {given.uv}, got none: pip install uv")
    uv = os.path.abspath(uv)  # commands run in other folders
    failed = False
    for python in given.python:
        for resolution in RESOLUTIONS:
            line = install(uv, python, resolution, given.torch, cuda=given.cuda)
            sys.stdout.write(f"Python {python}, {resolution}: {line}\n")
            sys.stdout.flush()
            failed |= "FAILED" in line
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
