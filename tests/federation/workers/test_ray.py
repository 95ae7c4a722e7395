"""Laws of workers on Ray: the same bits, whatever of the cluster is lost."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from silograph.methods import METHODS

pytest.importorskip("ray")


def outcome_of(case: str, folder: Path, *words: object) -> dict[str, Any]:
    """Return what a case of `ray_runs` prints."""
    command = [sys.executable, "-m", "ray_runs", case, str(folder), *map(str, words)]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=1100, env=env
    )
    assert done.returncode == 0, done.stderr
    outcome: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return outcome


def test_a_run_on_ray_leaves_the_same_and_nothing_else(tmp_path: Path) -> None:
    outcome = outcome_of("local", tmp_path)
    assert all(here == there for here, there in outcome["pairs"])
    assert outcome["left"] == [True] * 5
    assert not outcome["initialized"]


@pytest.mark.slow
@pytest.mark.parametrize("first", range(6))
def test_every_method_on_two_machines(tmp_path: Path, first: int) -> None:
    names = list(METHODS)[first::6]
    outcome = outcome_of("methods", tmp_path, *names)
    assert len(outcome["pairs"]) == len(names)
    assert all(here == there for here, there in outcome["pairs"])


@pytest.mark.slow
def test_actors_read_shards(tmp_path: Path) -> None:
    outcome = outcome_of("shards", tmp_path)
    assert all(here == there for here, there in outcome["pairs"])


@pytest.mark.slow
def test_code_of_scripts_and_files(tmp_path: Path) -> None:
    outcome = outcome_of("code", tmp_path)
    assert all(here == there for here, there in outcome["pairs"])


@pytest.mark.slow
def test_actors_that_are_killed_change_nothing(tmp_path: Path) -> None:
    outcome = outcome_of("actors", tmp_path, 15)
    assert outcome["kills"] >= 15
    assert all(here == there for here, there in outcome["pairs"])


@pytest.mark.slow
def test_machines_that_are_lost_change_nothing(tmp_path: Path) -> None:
    outcome = outcome_of("node", tmp_path)
    assert all(here == there for here, there in outcome["pairs"])


@pytest.mark.slow
def test_a_run_whose_process_is_killed_is_resumed(tmp_path: Path) -> None:
    outcome = outcome_of("driver", tmp_path)
    assert all(here == there for here, there in outcome["pairs"])
    assert outcome["alive"] == 0
