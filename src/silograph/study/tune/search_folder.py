"""A search's folder: its plan, and the settings that it tries, in their order."""

import json
import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from silograph.core.config import make_config
from silograph.core.errors import ConfigError, DataError
from silograph.core.files import check_regular, write_atomic
from silograph.experiment.checksums import UNCHECKED, with_digest, without_digest
from silograph.study.tune.proposals import TrialParams
from silograph.study.tune.space import (
    Space,
)

LOG = logging.getLogger("silograph")
PLAN, LINES, WINNER, PAGE, BEST = (
    *("tune.json", "tune.jsonl", "winner.jsonl", "tune.md"),
    "best.toml",
)


def check_folder(out: Path | None) -> None:
    """Raise `ConfigError` where something else than a search is."""
    if out is None or not os.path.lexists(out) or _is_empty(out):
        return
    if not any((out / name).is_file() for name in (PLAN, LINES)):
        raise ConfigError(
            f"expected a folder of a search, or none yet, got {out}: choose another --out, "
            "nothing was overwritten"
        )


def asked_params(space: Space, out: Path | None) -> list[TrialParams]:
    """Return the settings of a search that is there, in the order in which they were proposed.

    Raises:
        ConfigError: it is a search of something else.
    """
    if out is None or not (out / PLAN).is_file():
        return []
    plan, now = read_plan(out), json.loads(json.dumps(space.plan()))
    plan_config, now_config = (make_config(p["config"], source=str(out)) for p in (plan, now))
    differs = [key for key in now if key != "config" and plan.get(key) != now[key]]
    differs += [] if plan_config == now_config else ["config"]
    if differs:
        raise ConfigError(
            f"expected a folder of this search, got {out} with another {differs[0]}: choose "
            "another --out, nothing was overwritten"
        )
    asked: list[TrialParams] = plan["asked"]
    return asked


def _is_empty(folder: Path) -> bool:
    return folder.is_dir() and not any(folder.iterdir())


def write_plan(space: Space, asked: Sequence[TrialParams], trials: int, out: Path | None) -> None:
    """Write what was proposed before it is tried."""
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        plan = space.plan() | {"trials": trials, "asked": list(asked)}
        text = json.dumps(with_digest(plan), indent=2)
        write_atomic(out / PLAN, text + "\n")


def read_plan(folder: Path) -> dict[str, Any]:
    """Return the plan of a search.

    Raises:
        ConfigError: it is unreadable.
    """
    path = folder / PLAN
    check_regular(path)
    try:
        told, has_digest = without_digest(json.loads(path.read_text(encoding="utf-8")), str(path))
        plan: dict[str, Any] = {"values": []} | told
        plan["asked"] = [dict(params) for params in plan["asked"]]
        plan |= {key: plan[key] for key in ("in_memory", "config", "ranges", "seeds", "trials")}
    except DataError:
        raise
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"expected the plan of a search in {path}, got: {error}") from None
    if not has_digest:
        LOG.warning("%s", UNCHECKED.format(path))
    return plan


def is_search(folder: str | os.PathLike[str]) -> bool:
    """Whether a folder is that of a search."""
    return (Path(folder) / PLAN).is_file()
