"""What methods may send, by the docs, and whether what they did send holds clients' own data."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from silograph.core.payload import Payload
from silograph.experiment.run.setup import Setup
from silograph.federation.frame import Envelope
from silograph.federation.in_process import InProcess
from silograph.graph.block.block import ClientBlock

ROOT = Path(__file__).parents[1]
TABLE = re.compile(r"^\| `(\w+)` \| ([\w, ]+) \|$", re.MULTILINE)
OPTIONS: dict[str, dict[str, Any]] = {
    "fedgraph": {"kappa": 5, "share": "all"},
    "label_guided": {"sample": 30},
    "fedsageplus": {"generator_epochs": 12, "cross_epochs": 2},
    "graphsaint": {"budget": 10, "sample_coverage": 3},
}
Sent = list[tuple[Envelope, Payload]]


def documented() -> dict[str, set[str]]:
    text = (ROOT / "docs" / "reference" / "what_leaves_a_silo.md").read_text(encoding="utf-8")
    table = text.partition("## In training")[2].partition("## ")[0]
    return {name: set(kinds.split(", ")) for name, kinds in TABLE.findall(table)}


def blocks_of(setup: Setup) -> Sequence[ClientBlock]:
    """The blocks of a simulation, of one client each."""
    assert isinstance(setup.federation, InProcess)
    return [block.all for block in setup.federation._host.blocks]


def found_in(sent: Sent, blocks: Sequence[ClientBlock]) -> set[tuple[str, str]]:
    """Return what of the clients' own data stands in payloads as it is, and in which kind."""
    secrets: dict[tuple[str, bytes], np.ndarray] = {}
    for block in blocks:
        assert isinstance(block.x, Tensor)
        for what, secret in (
            ("labels", block.y.numpy()),
            ("edges", block.adj.indices.numpy()),
            ("cross-client edges", block.halo.adj.indices.numpy()),
            ("degrees", (block.adj.degree + block.halo.adj.degree).numpy()),
            *(("features", row.numpy()) for row in block.x),
        ):
            hidden = secret.astype(np.float64).ravel()
            if len(hidden) >= 5:
                secrets[what, hidden.tobytes()] = hidden
    found = set()
    for envelope, payload in sent:
        for part in payload.values():
            values = part.t.double().numpy().ravel()
            for (what, _), hidden in secrets.items():
                if stands_in(values, hidden):
                    found.add((what, envelope.kind.value))
    return found


def stands_in(values: np.ndarray, hidden: np.ndarray) -> bool:
    """Whether some numbers follow one another among others, wherever they begin."""
    begins = np.arange(len(values) - len(hidden) + 1)
    for place, number in enumerate(hidden):
        begins = begins[values[begins + place] == number]
        if not len(begins):
            return False
    return True
