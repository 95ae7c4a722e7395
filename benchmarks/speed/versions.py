"""Rounds of methods beside an earlier version of silograph, each version in its own process."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from cells import MANY_ROUNDS, Row
from race import pair
from timing import Child, Plan

SCRIPT = Path(__file__).with_name("turns.py")


def race_versions(options: dict[str, Any], plan: Plan) -> Row:
    """Time rounds of an earlier version over rounds of this one: whole runs, scores and ledger.

    Args:
        options: of `sg.run`, valid in both.
        plan: how to measure; its `before` is given.
    """
    assert plan.before is not None
    config = options | {"data_dir": plan.data_dir, "rounds": MANY_ROUNDS, "threads": 1}
    pythons = (plan.before.absolute() / ".venv" / "bin" / "python", sys.executable)
    os.environ["OMP_NUM_THREADS"] = "1"
    children = [Child([str(python), str(SCRIPT), json.dumps(config)]) for python in pythons]
    commit = ["git", "-C", str(plan.before), "describe", "--always"]
    try:
        row = pair(children[0], children[1], plan, 1)
        scores = [child.ask("score 0") for child in children]
    finally:
        for child in children:
            child.close()
    # After as many rounds. They differ where the method's draws or sums have changed.
    names = ("before", "now")
    found = {name: score[0] for name, score in zip(names, scores, strict=True) if score}
    before = subprocess.run(commit, capture_output=True, text=True, check=True).stdout.strip()
    return row | {"score": found, "before": before}
