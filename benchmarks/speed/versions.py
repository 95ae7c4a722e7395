"""Rounds of methods beside an earlier version of silograph, each version in its own process."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from cells import MANY_ROUNDS, Row, Version
from race import pair
from timing import Child, Plan

SCRIPT = Path(__file__).with_name("turns.py")


def race_versions(version: Version, plan: Plan) -> Row:
    """Time rounds of an earlier version over rounds of this one: whole runs, scores and ledger.

    Args:
        version: what runs.
        plan: how to measure; its `before` is given.
    """
    assert plan.before is not None
    config = version.options | {"data_dir": plan.data_dir, "rounds": MANY_ROUNDS, "threads": 1}
    os.environ["OMP_NUM_THREADS"] = "1"
    earlier = _run(plan.before.absolute() / ".venv" / "bin" / "python", config)
    now = _run(Path(sys.executable), config | version.now)
    commit = ["git", "-C", str(plan.before), "describe", "--always"]
    try:
        row = pair(earlier, now, plan, 1)
        # After as many rounds. They differ where the method's draws or sums have changed.
        scores = [earlier.ask("score 0"), now.ask("score 0")]
    finally:
        earlier.close()
        now.close()
    before = subprocess.run(commit, capture_output=True, text=True, check=True).stdout.strip()
    return row | {"scores": scores, "before": before}


def _run(python: Path, config: dict[str, Any]) -> Child:
    return Child([str(python), str(SCRIPT), json.dumps(config)])
