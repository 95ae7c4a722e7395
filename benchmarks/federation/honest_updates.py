"""How far updates of honest silos are from the usual one; prints the tables of decision 052.

    python benchmarks/federation/honest_updates.py ../shared/data

For each call whose replies are held to `FAR_UPDATE`: the largest norm of a client's update divided
by the larger one of 1 and the largest median norm of any round so far, as a server works it out.
All methods, with their defaults, on Cora; and FedAvg and FedOpt on silos of very unequal size, on
features of other scales, with large steps.
"""

import math
import sys
import warnings
from collections import defaultdict
from collections.abc import Iterator
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
from silograph.core.payload import Payload, State, take_all
from silograph.experiment.markdown import markdown_table
from silograph.federation.base import Op, positions_of
from silograph.federation.in_process import InProcess
from silograph.federation.session.answers import Answer, update_norm, usual_update
from silograph.core.work import Meter
from silograph.graph.block.block import ClientBlock
from silograph.graph.graph import Graph
from silograph.methods import METHODS

SGD = {"optimizer": "sgd", "lr": 0.5, "local_epochs": 10}
ADAM = {"optimizer": "adam", "lr": 0.01, "local_epochs": 10}


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
    before: dict[str, float] = field(default_factory=lambda: defaultdict(float))

    def add(self, op: str, norms: list[float]) -> None:
        """Take in the norms of one call."""
        answers = [Answer(0, {}, (), 0, Meter(1), norm) for norm in norms]
        self.before[op] = usual_update(answers, self.before[op])
        usual = max(1.0, self.before[op])
        for norm in norms:
            self.finite &= math.isfinite(norm)
            if norm / usual > self.farthest:
                self.farthest, self.norm, self.usual = norm / usual, norm, usual
            self.largest = max(self.largest, norm)


class Watched:
    """An engine of blocks of one client that hands the norms of updates to `seen`."""

    def __init__(self, fed: InProcess, seen: Seen) -> None:
        self._fed, self._seen = fed, seen

    def __getattr__(self, name: str) -> Any:
        return getattr(self._fed, name)

    def call(self, op: Op, inbox: Payload, **how: Any) -> Payload:
        """Call, and look at each reply."""
        positions = positions_of(self._fed.ids, how.get("to")).tolist()
        norms: list[float | None] = []

        @wraps(op)
        def watched(
            cfg: Any, block: ClientBlock, state: State, given: Payload, key: Key
        ) -> tuple[State, Payload]:
            sent = take_all(inbox, torch.tensor([len(norms)]))
            state, reply = op(cfg, block, state, given, key)
            norms.append(update_norm(reply, sent, how.get("reduce"), positions[len(norms)]))
            return state, reply

        found = self._fed.call(watched, inbox, **how)
        if any(norm is not None for norm in norms):
            self._seen.add(op.__name__, [norm for norm in norms if norm is not None])
        return found


@contextmanager
def watching() -> Iterator[Seen]:
    """Look at the updates of all runs within."""
    seen = Seen()
    made = lambda *given, **named: Watched(InProcess(*given, **named), seen)  # noqa: E731
    with patch("silograph.experiment.run.setup.InProcess", made):
        yield seen


def line_of(name: str, graph: Graph, **asked: Any) -> list[str]:
    """Return a line of a table."""
    with watching() as seen, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            sg.run(graph, **{"rounds": 10, "block_size": 1, "split": "0.4/0.3/0.3", **asked})
            end = ""
        except SilographError as error:
            end = str(error).partition(",")[0][:60]
    numbers = (seen.farthest, seen.norm, seen.usual, seen.largest)
    end = end or ("" if seen.finite else "updates are not finite")
    return [name, *(f"{number:.3g}" for number in numbers), end]


def sizes(graph: Graph, small: int, nodes: int, large: int) -> torch.Tensor:
    """Return silos (N,): `small` ones of so many nodes, the others in `large` equal ones."""
    order = torch.randperm(graph.num_nodes, generator=torch.Generator().manual_seed(0))
    silo = torch.empty(graph.num_nodes, dtype=torch.int64)
    silo[order[: small * nodes]] = torch.arange(small).repeat_interleave(nodes)
    rest = order[small * nodes :]
    silo[rest] = small + torch.arange(len(rest)) * large // len(rest)
    return silo


def unequal(graph: Graph) -> Iterator[list[str]]:
    """Measure silos of three nodes, of which one trains, beside such of a thousand."""
    cases = {
        "1 of 1 training node, 1 of 1,000": sizes(graph, 1, 3, 1),
        "9 of 1 training node, 1 of 1,000": sizes(graph, 9, 3, 1),
        "1 of 1 training node, 9 of 120": sizes(graph, 1, 3, 9),
    }
    for what, silo in cases.items():
        for scale in (1.0, 100.0, 1e4):
            assert isinstance(graph.x, torch.Tensor)
            scaled = replace(graph, x=graph.x * scale)
            for method in ("fedavg", "fedopt"):
                for step, given in (("sgd", SGD), ("adam", ADAM)):
                    for batch in (None, 8):
                        name = f"{method}, {what}, features times {scale:g}, {step}, {batch}"
                        how = {**given, "batch_size": batch, "method": method, "rounds": 5}
                        yield line_of(name, scaled, partition=silo, **how)


def every_method(graph: Graph) -> Iterator[list[str]]:
    """Measure all methods with their defaults."""
    for name in METHODS:
        yield line_of(name, graph, method=name, clients=10, partition="metis", rounds=5)


def main(data: str) -> None:
    """Measure and print."""
    graph = sg.load("cora", data_dir=data)
    head = ("case", "largest ratio", "its norm", "usual", "largest norm", "")
    print(markdown_table(head, []))
    for line in chain(every_method(graph), unequal(graph)):
        print("|", " | ".join(line), "|", flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
