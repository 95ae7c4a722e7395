"""What checkpoints of FedAIS take: CPU of a run without any, with one a round, and by default.

    python benchmarks/fedais/checkpoints.py --data-dir DIR [--rounds 30] [--clients 100] [--kept]

One process, one run after the other, twice; and the size of a checkpoint beside the stored rows.
"""

import argparse
import sys
import tempfile
import time
from dataclasses import replace
from itertools import product
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

CASES = {"never": 0, "every round": 1, "by default": None}


STORED = "/own_rows/", "/halo_rows/"


def main() -> None:
    """Run all cases and print their CPU seconds."""
    from fedais_cells import KEPT, REBUILT, Place, cell_of

    import silograph as sg
    from silograph.federation.checkpoint import read_checkpoint

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data-dir", required=True)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--clients", type=int, default=100)
    parser.add_argument("--kept", action="store_true", help="clients keep Adam's moments")
    given = parser.parse_args()
    place = Place("pubmed", optimizer=KEPT if given.kept else REBUILT, clients=given.clients)
    asked = cell_of(place, "fedais", 1, f"rounds={given.rounds}").config
    for turn, (name, every) in product(range(2), CASES.items()):
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "run"
            here = {"out": str(out), "data_dir": given.data_dir, "checkpoint_every": every}
            begun = time.process_time()
            sg.run(config=replace(asked, **here), method="fedais")
            print(f"{turn} {name}: {time.process_time() - begun:.1f} CPU s", flush=True)
            if every is None and not turn:
                path = max(out.glob("checkpoints/round-*"))
                found = read_checkpoint(path, given.rounds).tensors
                sizes = {n: t.numel() * t.element_size() for n, t in found.items()}
                rows = sum(sum(s for n, s in sizes.items() if stored in n) for stored in STORED)
                print(f"{path.stat().st_size / 1e6:.0f} MB, stored rows {rows / 1e6:.0f} MB")


if __name__ == "__main__":
    main()
