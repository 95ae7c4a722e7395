"""A round on a GPU beside the same round on a CPU, and beside loops over models on the GPU.

    python benchmarks/speed/gpu.py --data-dir DIR [--device cuda] [--seconds 10] [--cells NAME ...]

Sides of a cell take turns in changing order in one process; figures are medians of wall-clock
seconds, as a GPU works while the processor waits, and of the ratios of neighboring turns. Every
turn ends when the GPU has done all that it was given. `--cells` chooses; the page's tables are
what the command prints.
"""

import argparse
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from cells import BATCH, FASTEST, RACES, Shape
from loop import Client, PlainLoop, TunedLoop
from race import graph_of
from side import Ours
from timing import Plan, medians, ratios, take_turns

from silograph.core.config import RunConfig, make_config
from silograph.experiment.run.setup import prepare
from silograph.nn.conv import Params

sys.path.append(str(Path(__file__).parent.parent / "fedais"))
RACED = ("cora-10", "cora-100", "pubmed-100", "coauthor_cs-100", "pubmed-1000")
LOOPS: dict[str, Callable[..., PlainLoop | TunedLoop]] = {
    "plain loop": PlainLoop,
    "tuned loop": lambda cut, config, weights: TunedLoop(cut, config, weights, "dense"),
}
Act = Callable[[], object]


def moved(params: Params, device: str) -> Params:
    """Return weights on a device."""
    return {name: w.to(device) for name, w in params.items()}


def on_device(loop: PlainLoop | TunedLoop, device: str) -> Act:
    """Return a loop's round; its models and its clients' data are on the device."""

    def put(client: Client) -> Client:
        return Client(**{name: value.to(device) for name, value in vars(client).items()})

    loop.clients = [put(client) for client in loop.clients]
    if isinstance(loop, PlainLoop):
        loop.models = [model.to(device) for model in loop.models]
        loop.state = moved(loop.state, device)
    else:
        loop.model.to(device)
    return loop.round


def waited(act: Act, device: str) -> Act:
    """Return a round that ends when the device has nothing left to do."""

    def whole() -> None:
        act()
        if device != "cpu":
            torch.cuda.synchronize()

    return whole


def ours(config: RunConfig, plan: Plan, *, judged: bool = True, **options: Any) -> Act:
    """Return a round of silograph."""
    asked = make_config({**vars(config), **options})
    side = Ours(prepare(asked, graph_of(str(config.dataset), plan.data_dir)))
    return waited(side.round if judged else side.train, asked.device)


def race(shape: Shape, plan: Plan, device: str) -> Iterator[list[str]]:
    """Yield rows: milliseconds of a round, and over silograph on the GPU."""
    config = shape.config()
    setup = Ours(prepare(config, graph_of(shape.dataset, plan.data_dir)))
    given = setup.setup.cut, setup.setup.config, setup.weights
    name = "silograph, GPU"
    sides = {
        name: ours(config, plan, device=device),
        "silograph, GPU, one block": ours(config, plan, device=device, block_size=shape.clients),
        "silograph, CPU": ours(config, plan, kernels=FASTEST),
    }
    for loop, make in LOOPS.items():
        sides[f"{loop}, GPU"] = waited(on_device(make(*given), device), device)
    spent = take_turns(sides, plan)
    for side, turns in spent.items():
        over = ratios(spent, side, name)["wall"]
        yield [side, f"{1000 * medians(turns)['wall']:.1f}", told(over)]


def told(ratio: list[float]) -> str:
    """Return a median with its quartiles."""
    low, middle, high = ratio
    return f"{middle:.2f} ({low:.2f} to {high:.2f})"


def over(one: RunConfig, other: RunConfig, plan: Plan, device: str, *, judged: bool) -> list[str]:
    """Return milliseconds of two configs on a device and their ratio."""
    here: dict[str, Any] = {"device": device}
    here |= {"kernels": FASTEST} if device == "cpu" else {"block_size": one.clients}
    sides = {
        name: ours(config, plan, judged=judged, **here)
        for name, config in (("one", one), ("other", other))
    }
    spent = take_turns(sides, plan)
    held = "-" if device == "cpu" else f"{torch.cuda.max_memory_allocated() / 1e9:.2f}"
    spans = [f"{1000 * medians(spent[name])['wall']:.1f}" for name in sides]
    return [*spans, told(ratios(spent, "one", "other")["wall"]), held]


def pairs() -> dict[str, tuple[RunConfig, RunConfig, bool]]:
    """Return what is compared with FedAvg: both configs, and whether rounds are judged."""
    from fedais_cells import Place, cell_of

    found = {}
    for clients in (10, 100):
        for epochs in (1, 3):
            shape, text = Shape("cora", clients, epochs=epochs), f"cora, {clients}, {epochs}"
            found[f"fedpub, {text}"] = shape.config(method="fedpub"), shape.config(), True
            batches = shape.config(batch_size=BATCH)
            chosen = make_config({**vars(batches), "neighbors": "fedgrains"})
            found[f"fedavg + FedGrAINS, {text}"] = chosen, batches, True
    for clients in (100, 1000):
        place = Place("pubmed", clients=clients)
        one, other = (
            make_config({**vars(cell_of(place, name, 1).config), "rounds": 10**6})
            for name in ("fedais", "fedavg")
        )
        found[f"fedais, pubmed, {clients}, 10 batches"] = one, other, False
    return found


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data-dir", required=True)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--seconds", type=float, default=10, help="of a cell, about")
    parser.add_argument("--cells", nargs="*", help="default: all; part of a name is enough")
    given = parser.parse_args()
    torch.set_num_threads(1)
    plan, device = Plan(given.data_dir, 30, given.seconds), given.device

    def wanted(name: str) -> bool:
        return given.cells is None or any(part in name for part in given.cells)

    print("| cell | side | ms | over silograph on the GPU |\n| --- | --- | --- | --- |")
    for name in filter(wanted, RACED):
        for row in race(RACES[name], plan, device):
            print("|", " | ".join([name, *row]), "|", flush=True)
    print("\n| cell | device | ms | FedAvg, ms | ratio | GB of the GPU |")
    print("| --- | --- | --- | --- | --- | --- |")
    for name, (one, other, judged) in pairs().items():
        for where in ("cpu", device) if wanted(name) else ():
            row = over(one, other, plan, where, judged=judged)
            print("|", " | ".join([name, where, *row]), "|", flush=True)


if __name__ == "__main__":
    main()
