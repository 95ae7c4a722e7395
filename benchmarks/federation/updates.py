"""How far updates of honest silos are from the usual one, and what one that lies spoils.

    python benchmarks/federation/updates.py ../shared/data honest    # lines of a table
    python benchmarks/federation/updates.py ../shared/data lies

Honest: for each call whose replies are held to `FAR_UPDATE`, the largest norm of a client's update
divided by the larger one of 1 and the largest median norm of any round so far, as a server works it
out. All methods, with their defaults, on Cora; then FedAvg and FedOpt on silos of very unequal
size, on features of other scales, with large steps.

Lies: the last of 10 silos of Cora sends, in place of its update, the opposite of it at the norm
that it may have, in each round.
"""

import math
import sys
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import wraps
from itertools import chain
from typing import Any
from unittest.mock import patch

import torch

import silograph as sg
from silograph.core.errors import SilographError
from silograph.core.key import Key
from silograph.core.payload import Patched, Payload, Stacked, State, take_all
from silograph.experiment.run.result import Result
from silograph.federation.base import Op, positions_of
from silograph.federation.in_process import InProcess
from silograph.federation.session.engine import FAR_UPDATE, WEIGHTS, UsualUpdate, measure_update
from silograph.graph.block.block import ClientBlock
from silograph.graph.graph import Graph
from silograph.methods import METHODS

SGD = {"optimizer": "sgd", "lr": 0.5, "local_epochs": 10}
ADAM = {"optimizer": "adam", "lr": 0.01, "local_epochs": 10}
ROUNDS = 5
Lie = Callable[[float], float]  # from the usual norm, at least 1, to the norm of a lie


@dataclass
class Seen:
    """What updates there were.

    Attributes:
        farthest: the largest ratio to the usual norm.
        norm: of that update.
        usual: what it was compared with, at least 1.
        largest: norm of any update.
        finite: whether all were finite.
        before: usual norm so far, by op.
    """

    farthest: float = 0.0
    norm: float = 0.0
    usual: float = 0.0
    largest: float = 0.0
    finite: bool = True
    before: dict[str, UsualUpdate] = field(default_factory=lambda: defaultdict(UsualUpdate))

    def add(self, op: str, norms: list[float]) -> None:
        """Take in the norms of one call."""
        usual = self.before[op].most(norms) / FAR_UPDATE
        self.before[op] = self.before[op].after(norms)
        for norm in norms:
            self.finite &= math.isfinite(norm)
            if norm / usual > self.farthest:
                self.farthest, self.norm, self.usual = norm / usual, norm, usual
            self.largest = max(self.largest, norm)


class Watched:
    """An engine of blocks of one client that hands the norms of updates to `seen`."""

    def __init__(self, fed: InProcess, seen: Seen, lie: Lie | None) -> None:
        self._fed, self._seen, self._lie = fed, seen, lie

    def __getattr__(self, name: str) -> Any:
        """See `InProcess`."""
        return getattr(self._fed, name)

    def call(self, op: Op, inbox: Payload, **how: Any) -> Payload:
        """Call, and look at each reply; the last client may lie."""
        positions = positions_of(self._fed.ids, how.get("to")).tolist()
        norms: list[float | None] = []

        @wraps(op)
        def watched(
            cfg: Any, block: ClientBlock, state: State, given: Payload, key: Key
        ) -> tuple[State, Payload]:
            sent = take_all(inbox, torch.tensor([len(norms)]))
            state, reply = op(cfg, block, state, given, key)
            norm = measure_update(reply, sent, how.get("reduce"), positions[len(norms)])[0]
            if self._lie and norm and positions[len(norms)] == len(self._fed.ids) - 1:
                others = [n for n in norms if n is not None]
                usual = self._seen.before[op.__name__].most(others) / FAR_UPDATE
                reply = _turned(reply, sent, -self._lie(usual) / norm)
            norms.append(norm)
            return state, reply

        found = self._fed.call(watched, inbox, **how)
        if any(norm is not None for norm in norms):
            self._seen.add(op.__name__, [norm for norm in norms if norm is not None])
        return found


def _turned(reply: Payload, sent: Payload, factor: float) -> Payload:
    """Return the reply with its update times a factor."""
    changed = dict(reply)
    for name in [name for name in reply if name.startswith(WEIGHTS)]:
        new, old = reply[name], sent[name].t
        whole = new.stacked().t if isinstance(new, Patched) else new.t
        changed[name] = Stacked(old + factor * (whole - old))
    return changed


@contextmanager
def watching(lie: Lie | None = None) -> Iterator[Seen]:
    """Look at the updates of all runs within."""
    seen = Seen()

    def made(*given: Any, **named: Any) -> Watched:
        return Watched(InProcess(*given, **named), seen, lie)

    with patch("silograph.experiment.run.setup.InProcess", made), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield seen


def trained(graph: Graph, **asked: Any) -> Result:
    """Run in blocks of one client."""
    return sg.run(graph, **{"rounds": 5, "block_size": 1, "split": "0.4/0.3/0.3", **asked})


def best_accuracy(result: Result) -> float:
    """Return the test accuracy of the best round."""
    found = result.to_dict()["test"]
    return float((found.get("server") or found["personalized"])["accuracy"])


def line_of(name: str, graph: Graph, **asked: Any) -> list[str]:
    """Return a line of a table."""
    with watching() as seen:
        try:
            result = trained(graph, **asked)
            end = f"{100 * best_accuracy(result):.1f}" if seen.finite else "not finite"
        except SilographError as error:
            end = str(error).partition(",")[0][:60]
    numbers = (seen.farthest, seen.norm, seen.usual, seen.largest)
    return [name, *(f"{number:.3g}" for number in numbers), end]


def sizes(graph: Graph, small: int, nodes: int, large: int) -> torch.Tensor:
    """Return silos (N,): `small` ones of so many nodes, the others in `large` equal ones."""
    order = torch.randperm(graph.num_nodes, generator=torch.Generator().manual_seed(0))
    silo = torch.empty(graph.num_nodes, dtype=torch.int64)
    silo[order[: small * nodes]] = torch.arange(small).repeat_interleave(nodes)
    rest = order[small * nodes :]
    silo[rest] = small + torch.arange(len(rest)) * large // len(rest)
    return silo


def every_method(graph: Graph) -> Iterator[list[str]]:
    """Measure all methods with their defaults."""
    for name in METHODS:
        yield line_of(name, graph, method=name, clients=10, partition="metis")


def unequal(graph: Graph) -> Iterator[list[str]]:
    """Measure silos of three nodes, of which one trains, beside such of a thousand."""
    x = (
        graph.x
        if isinstance(graph.x, torch.Tensor)
        else torch.from_numpy(graph.x.scipy().toarray())
    )
    cases = {
        "9 of 1 training node, 1 of 1,000": sizes(graph, 9, 3, 1),
        "1 of 1 training node, 1 of 1,000": sizes(graph, 1, 3, 1),
        "1 of 1 training node, 9 of 120": sizes(graph, 1, 3, 9),
    }
    for what, silo in cases.items():
        for scale in (1.0, 100.0, 1e4):
            scaled = replace(graph, x=x * scale)
            for step, given in (("sgd", SGD), ("adam", ADAM)):
                for batch in (None, 8):
                    name = f"{what}, features times {scale:g}, {step}, {batch or 'whole'}"
                    yield line_of(name, scaled, partition=silo, batch_size=batch, **given)


def _liar(told: list[float], most: float | None) -> Lie:
    """Return what lies 900 times the usual, or just below a bound, and notes the norms."""

    def norm(usual: float) -> float:
        told.append(900 * usual if most is None else 0.99 * most)
        return told[-1]

    return norm


def lies(graph: Graph) -> Iterator[list[str]]:
    """Measure accuracies with one silo that lies."""
    for method in ("fedavg", "fedopt"):
        given = {**SGD, "method": method, "clients": 10, "partition": "metis", "rounds": ROUNDS}
        most = 0.0
        for name in ("none", "900 times the usual", "below --max-update-norm"):
            told: list[float] = []
            lie = None if name == "none" else _liar(told, None if "900" in name else most)
            with watching(lie) as seen:
                result = trained(graph, **given)
            most = most or 1.5 * seen.largest
            shown = [
                f"{100 * float(row['test_server_accuracy'] or 0):.1f}" for row in result.rounds
            ]
            norms = f"{told[0]:.3g} to {told[-1]:.3g}" if told else "-"
            yield [method, name, norms, *(shown[t - 1] for t in (1, 2, ROUNDS))]


def main(data: str, what: str) -> None:
    """Measure and print."""
    graph = sg.load("cora", data_dir=data)
    for line in lies(graph) if what == "lies" else chain(unequal(graph), every_method(graph)):
        print("|", " | ".join(line), "|", flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
