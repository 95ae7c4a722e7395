"""What a server that goes on must know of its silos; it stands in the result folder."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from silograph.core.errors import CheckpointError
from silograph.core.files import check_regular, write_atomic
from silograph.federation.field_specs import EDGES, ROWS, TEST, TRAIN, VAL

SESSION = "session.json"


@dataclass(frozen=True)
class Known:
    """What a server that goes on must know of its silos.

    Attributes:
        token: of the run, by which silos find their states.
        keys: public keys by the silos' names, in the order of every sum.
        nodes: how many nodes each silo has reported, by TRAIN, VAL, TEST, ROWS and EDGES.
    """

    token: bytes
    keys: Mapping[str, bytes]
    nodes: Mapping[str, Mapping[str, int]] = field(default_factory=dict)


def write_known(folder: Path, known: Known) -> bytes:
    """Write what a server that goes on must know, and return what the file holds."""
    silos = {name: key.hex() for name, key in known.keys.items()}
    told = {"token": known.token.hex(), "silos": silos, "nodes": known.nodes}
    data = (json.dumps(told, indent=2) + "\n").encode()
    write_atomic(folder / SESSION, data, private=True)  # a token lets others on
    return data


def read_known(folder: Path) -> Known:
    """Return what `write_known` wrote; raise `CheckpointError` where it is missing or damaged."""
    check_regular(folder / SESSION)
    try:
        told = json.loads((folder / SESSION).read_text(encoding="utf-8"))
        keys = {name: bytes.fromhex(key) for name, key in told["silos"].items()}
        nodes = {name: {use: int(n) for use, n in of.items()} for name, of in told["nodes"].items()}
        known = Known(bytes.fromhex(told["token"]), keys, nodes)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        raise CheckpointError(
            f"expected the silos of the run in {folder / SESSION}, got none: it is no run of silos"
        ) from None
    for name, of in known.nodes.items():
        if lacking := [use for use in (TRAIN, VAL, TEST, ROWS, EDGES) if use not in of]:
            raise CheckpointError(
                f"expected numbers of {' and '.join(lacking)} of {name} in {folder / SESSION}, got "
                "none: another version wrote it; resume with that one, or start the run anew"
            )
    return known
