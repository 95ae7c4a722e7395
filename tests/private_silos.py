"""Silos of runs with differential privacy, in one process, and a server that stops."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from silograph.core.config import RunConfig
from silograph.deploy.policy import SiloPolicy
from silograph.deploy.server import serve
from silograph.experiment.run import run as loop
from silograph.experiment.run.result import Result
from silograph.federation.privacy.budget import SECRET, PrivacyLedger
from silograph.graph.graph import Graph
from silos import folders


def private_folders(graph: Graph, config: RunConfig, path: Path) -> tuple[Path, ...]:
    """Folders of silos without edges between them, whose noise has known secrets."""
    silos = folders(graph, config, path, cross_edges=False)
    for number, silo in enumerate(silos):
        (silo / "state").mkdir(mode=0o700)
        (silo / "state" / SECRET).write_bytes(bytes([number]) * 32)
    return silos


def requiring(silos: Sequence[Path]) -> dict[Path, SiloPolicy]:
    """Policies of silos that add a share of the noise only: keys are proved."""
    return dict.fromkeys(silos, SiloPolicy(secure_aggregation="require"))


def releases(silo: Path, unit: str = "silo") -> int:
    return sum(n.total() for n in PrivacyLedger(silo / "state").releases(unit).values())


def serve_and_die_in(round_number: int, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    """Return `serve` of a server that dies once the silos have answered in a round."""
    checked_facts = loop.checked_facts

    def die(*given: Any) -> Any:
        if given[-1] == round_number:
            raise RuntimeError
        return checked_facts(*given)

    def run(*given: Any, **named: Any) -> Result:
        with monkeypatch.context() as patch:
            patch.setattr("silograph.experiment.run.run.checked_facts", die)
            with pytest.raises(RuntimeError):
                serve(*given, **named)
        return None  # type: ignore[return-value]

    return run
