"""How memory and time of a run grow with edges and with clients.

    python benchmarks/speed/growth.py --folder DIR

cuts generated graphs of the shape of Reddit at random and trains GraphSAGE with fan-out 10 for two
rounds, each cell in a process of its own; it rewrites the table in growth.md and growth.svg. The
graphs are kept in DIR (1 GB).
"""

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from side import one_round

import silograph as sg
from silograph.core.config import make_config
from silograph.experiment.run import run as loop
from silograph.experiment.run.setup import prepare

HERE = Path(__file__).parent
PAGE, PLOT = HERE / "growth.md", HERE / "growth.svg"
MARK = "<!-- table -->"
SCALES, CLIENTS = (0.05, 0.1, 0.25, 0.5), (100, 300, 1000)
CELLS = [(scale, 1000) for scale in SCALES] + [(0.1, clients) for clients in CLIENTS[:-1]]
RUN = {"partition": "random", "model": "sage", "fanout": "10", "batch_size": 64, "rounds": 2}
Row = dict[str, Any]


def peak_bytes() -> int:
    """Return the most memory that this process has had, in bytes (Linux)."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM"):
            return int(line.split()[1]) * 1024
    raise OSError("expected VmHWM in /proc/self/status")


def measure(scale: float, clients: int, folder: str) -> Row:
    """Return the figures of one cell."""
    torch.set_num_threads(1)
    name = "generated:reddit"
    graph = sg.load(name, scale=scale, data_dir=folder)
    began = time.perf_counter()
    values = RUN | {"dataset": name, "scale": scale, "clients": clients}
    setup = prepare(make_config(values), graph)
    ready = time.perf_counter()
    snapshot = loop.first_snapshot(setup)
    snapshot, _ = one_round(setup, None, snapshot)
    first = time.perf_counter()
    snapshot, _ = one_round(setup, None, snapshot)
    return {
        "scale": scale,
        "clients": clients,
        "nodes": graph.num_nodes,
        "edges": graph.num_edges,
        "kernels": setup.config.kernels,
        "cut_seconds": ready - began,
        "round_seconds": time.perf_counter() - first,
        "peak_bytes": peak_bytes(),
    }


def table(rows: list[Row]) -> str:
    """Return the rows in Markdown."""
    lines = [
        "| clients | nodes | edges, M | cut, s | round, s | peak memory, GB |",
        "|---|---|---|---|---|---|",
    ]
    for r in sorted(rows, key=lambda r: (r["clients"], r["edges"])):
        lines.append(
            f"| {r['clients']:,} | {r['nodes']:,} | {r['edges'] / 1e6:.1f} | "
            f"{r['cut_seconds']:.0f} | {r['round_seconds']:.1f} | {r['peak_bytes'] / 1e9:.2f} |"
        )
    return "\n".join(lines)


def plot(rows: list[Row]) -> str:
    """Return an SVG of peak memory against edges at 1,000 clients."""
    points = sorted((r["edges"] / 1e6, r["peak_bytes"] / 1e9) for r in rows if r["clients"] == 1000)
    right, top = points[-1][0] * 1.1, 8.5

    def x(edges: float) -> float:
        return 50 + 400 * edges / float(right)

    def y(gigabytes: float) -> float:
        return 240 - 220 * gigabytes / top

    dots = "".join(f'<circle cx="{x(e):.1f}" cy="{y(g):.1f}" r="4"/>' for e, g in points)
    path = " ".join(f"{x(e):.1f},{y(g):.1f}" for e, g in points)
    ticks = "".join(
        f'<text x="44" y="{y(g) + 4:.1f}" text-anchor="end">{g}</text>'
        f'<line x1="50" x2="450" y1="{y(g):.1f}" y2="{y(g):.1f}" stroke="#ccc"/>'
        for g in range(0, 9, 2)
    )
    names = "".join(
        f'<text x="{x(e):.1f}" y="256" text-anchor="middle">{e:.0f}</text>' for e, _ in points
    )
    return (
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 470 290" font-family="sans-serif" '
        'font-size="12"><rect width="470" height="290" fill="white"/>'
        f'{ticks}{names}<polyline points="{path}" fill="none" stroke="#1f6fb4" stroke-width="2"/>'
        f'<g fill="#1f6fb4">{dots}</g>'
        f'<line x1="50" x2="450" y1="{y(8):.1f}" y2="{y(8):.1f}" stroke="#c33" '
        'stroke-dasharray="5"/>'
        '<text x="250" y="280" text-anchor="middle">edges, millions</text>'
        '<text x="54" y="16">peak memory, GB; 1,000 clients; dashed: 8 GB</text></svg>\n'
    )


def main() -> None:
    """Measure every cell in a process of its own and write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", required=True)
    parser.add_argument("--cell", nargs=2, type=float, metavar=("SCALE", "CLIENTS"))
    given = parser.parse_args()
    if given.cell:
        print(json.dumps(measure(given.cell[0], int(given.cell[1]), given.folder)))
        return
    Path(given.folder).mkdir(parents=True, exist_ok=True)
    rows = []
    for scale, clients in CELLS:
        sg.generate("reddit", scale=scale, data_dir=given.folder)
        command = [sys.executable, __file__, "--folder", given.folder, "--cell", str(scale)]
        done = subprocess.run([*command, str(clients)], capture_output=True, check=True, text=True)
        rows.append(json.loads(done.stdout.splitlines()[-1]))
        print(rows[-1], flush=True)
    before, _, rest = PAGE.read_text().partition(MARK)
    after = rest.partition(MARK)[2]
    PAGE.write_text(f"{before}{MARK}\n{table(rows)}\n{MARK}{after}")
    PLOT.write_text(plot(rows))


if __name__ == "__main__":
    main()
