"""The files of examples/cluster are well-formed, and call silograph with flags that it has."""

import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
import typer

from silograph.cli.flags import app

ROOT = Path(__file__).parents[1] / "examples" / "cluster"


def check_flags(words: list[str]) -> None:
    """Assert that `silograph run` has the flags of a command."""
    command: Any = typer.main.get_command(app)
    run = command.commands["run"]
    names = {name for p in run.params for name in p.opts}
    assert words[:2] == ["silograph", "run"]
    assert {word for word in words if word.startswith("--")} <= names


def test_the_manifest() -> None:
    yaml = pytest.importorskip("yaml")
    job = yaml.safe_load((ROOT / "kuberay.yaml").read_text())
    assert (job["apiVersion"], job["kind"]) == ("ray.io/v1", "RayJob")
    check_flags(shlex.split(job["spec"]["entrypoint"]))
    cluster = job["spec"]["rayClusterSpec"]
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        assert all(isinstance(value, str) for value in group["rayStartParams"].values())
        (container,) = group["template"]["spec"]["containers"]
        assert container["resources"]["requests"] == container["resources"]["limits"]


def test_the_script() -> None:
    path = ROOT / "slurm.sh"
    subprocess.run(["bash", "-n", str(path)], check=True)
    (line,) = re.findall(r"^silograph run .*$", path.read_text(), re.MULTILINE)
    check_flags(shlex.split(line))
