"""Calls every op of silograph with inboxes and states that nobody honest sends.

Honest calls of short runs are recorded, then called again with fields that are missing, in another
form, of another shape or dtype, or full of odd numbers. An op may refuse in any way but one: the
process must live on, and a kernel that checks its bounds must find nothing.

Run as a program, as what a crash ends must not be the test; prints what came of the calls as JSON.
"""

import argparse
import faulthandler
import json
import os
import resource
import sys
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from conftest import planted_graph
from rating_graphs import rating_graph
from runs import go
from silograph.core.key import Key
from silograph.core.payload import Field, Patched, Payload, Ragged, Shared, Stacked, State, take_all
from silograph.federation import in_process
from silograph.federation.base import Op, Sum, WeightedMean
from silograph.federation.check import check_fields, run_op
from silograph.federation.fold import Fold
from silograph.federation.frame import DTYPES, Envelope, decode, encode
from silograph.federation.session.message import own_ops, qualified
from silograph.graph.block.block import ClientBlock
from silograph.nn.backends import COMPILED, TORCH

ROOM = 3 * 2**29  # bytes that fuzzing may take beyond what is there at its start
OUT_OF_BOUNDS = "index is out of bounds"  # how numba says it; torch says more
SHORT: list[dict[str, Any]] = [
    {"method": "fedavg"},
    {"method": "fedavg", "sparse": True, "keep_optimizer": True, "block_size": 1},
    {"method": "scaffold", "sparse": True},
    {"method": "local", "model": "sage", "sparse": True, "batch_size": 4, "collect": 0.5},
    {"method": "bns", "sparse": True, "block_size": 1},
    {"method": "cagnet", "block_size": 1},
    {"method": "label_guided", "options": {"sample": 30}},
    {"method": "graphsaint", "options": {"budget": 8, "sample_coverage": 2}},
    {"method": "fedper", "sparse": True},
    {"method": "fedpub", "options": {"communities": 1}},
    {"method": "fedavg", "neighbors": "fedgrains"},
    {"method": "gcflplus", "sparse": True},
    {"method": "fedgraph", "options": {"kappa": 4, "share": "all"}},
    {"method": "fedsageplus", "options": {"generator_epochs": 9, "cross_epochs": 1}},
    {"method": "fedavg", "sparse": True, "weights_as": "int4"},
]
RUNS: list[dict[str, Any]] = [
    *SHORT,
    # Masks with this sampler are a kernel of their own, which takes 20 s to compile.
    {"method": "fedpub", "options": {"communities": 1}, "neighbors": "fedgrains"},
    {"method": "fedavg", "sparse": True, "weights_as": "int8", "weight_rows": "used"},
    {
        "method": "fedais",
        "sparse": True,
        "weights_as": "float16",
        "options": {"batches": 2, "moved": 0.1, "sent": "int8", "policy": "drawn"},
    },
    {"method": "fedprox", "model": "mlp", "multilabel": True, "keep_optimizer": True},
    {"method": "fedavg", "sparse": True, "collect": 1.0, "block_size": 1, "dtype": "float32"},
    {"method": "local", "sparse": True, "dtype": "float32", "fanout": "2,1", "layers": 2},
    {"method": "local", "model": "gat", "multilabel": True, "optimizer": "sgd", "momentum": 0.9},
    {"method": "bns", "model": "appnp", "dtype": "float32"},
    {"method": "cagnet", "sparse": True, "model": "gin", "dtype": "float32"},
    {"method": "cagnet", "sparse": True, "model": "sage"},
    {
        "method": "label_guided",
        "model": "sage",
        "sparse": True,
        "block_size": 1,
        "options": {"sample": 30, "normalize": "conditional", "weigh_loss": True},
    },
    {"method": "label_guided", "sparse": True, "options": {"sample": 30, "rows": "all"}},
    {
        "method": "graphsaint",
        "sparse": True,
        "options": {"budget": 8, "sample_coverage": 2, "sampler": "edge"},
    },
    {
        "method": "fedgraph",
        "metric": "auc",
        "options": {"kappa": 4, "local_steps": 2, "return_gradients": True},
    },
    {"method": "fedgraph", "options": {"kappa": 4, "local_steps": 2, "share": "none"}},
    {"method": "fedais", "options": {"batches": 2, "share_features": True}},
    {"method": "fedais", "options": {"batches": 3, "tau": 1, "interval": "fixed"}},
    {"method": "fedlocal", "sparse": True, "options": {"batches": 2}},
    {"method": "fedavg", "normalize": "standard", "feature_drift": True},
    {"method": "local", "metric": "auc"},
    {"method": "label_guided", "secure_aggregation": True},
    {"method": "bns", "secure_aggregation": True},
    {"method": "fedavg", "dp_unit": "silo", "dp_epsilon": 8.0, "dp_delta": 1e-3},
    {"method": "fedavg", "dp_clip_quantile": 0.5, "dp_epsilon": 8.0, "dp_delta": 1e-3},
    {"method": "fedmf", "model": "rating_mf", "relevant": 4.0, "options": {"embedding": 3}},
    {"method": "fedgnn", "model": "rating_gcn", "options": {"embedding": 3}},
    {
        "method": "fesog",
        "model": "rating_gat",
        "relevant": 4.0,
        "options": {"embedding": 3, "clip": 0.1},
    },
    {"method": "fedavg", "model": "rating_profiles"},
    {"method": "fedavg", "model": "rating_biases"},
]


@dataclass(frozen=True, eq=False)
class Call:
    """An op with what an honest server had it called with."""

    op: Op
    cfg: Any
    block: ClientBlock
    state: State
    inbox: Payload
    key: Key
    rows: bool


def recorded(runs: list[dict[str, Any]]) -> list[list[Call]]:
    """Return the calls of each of some runs."""
    worlds, run = [], in_process.BlockHost.run
    for options in runs:
        shape = {k: options[k] for k in ("sparse", "multilabel") if k in options}
        other = {k: v for k, v in options.items() if k not in shape}
        calls: list[Call] = []

        def spy(
            host: in_process.BlockHost,
            call: in_process.OpCall,
            number: int,
            clients: Tensor,
            inbox: Payload,
            *,
            calls: list[Call] = calls,
        ) -> tuple[Payload, in_process.ReplyCost]:
            state, blocks = host.states[number], host.blocks[number]
            for group in state.groups(clients):
                is_whole = len(group) == blocks.all.num_clients
                own_state = state.all() if is_whole else state.take(group)
                own_inbox = take_all(inbox, torch.searchsorted(clients, group))
                about = host._cfg_of_round, blocks.take(group), own_state, own_inbox
                calls.append(Call(call.op, *about, call.key, call.rows))
            return run(host, call, number, clients, inbox)

        in_process.BlockHost.run = spy  # type: ignore[method-assign, assignment]
        of_ratings = str(options.get("model")).startswith("rating_")
        graph = rating_graph() if of_ratings else planted_graph(40, features=9, **shape)
        go(graph, clients=3, **{"rounds": 2, **other})
        in_process.BlockHost.run = run  # type: ignore[method-assign]
        worlds.append(calls)
    return worlds


class Fuzzer:
    """Draws mutations.

    Args:
        rng: of the draws.
    """

    def __init__(self, rng: np.random.Generator) -> None:
        self._rng = rng

    def pick(self, choices: list[Any]) -> Any:
        return choices[self._rng.integers(len(choices))]

    def chance(self, share: float) -> bool:
        return bool(self._rng.random() < share)

    def mutated(self, payload: Mapping[str, Any], clients: int, forms: list[type]) -> Any:
        """Return fields of which one to three are not what they were."""
        new = dict(payload)
        for _ in range(self._rng.integers(1, 4)):
            if not new:
                break
            name = self.pick(sorted(new))
            match self._rng.integers(10):
                case 0:
                    del new[name]
                case 1:
                    other = self.pick(sorted(new))
                    new[name], new[other] = new[other], new[name]
                case 2:
                    new[name] = self.form(new[name], clients, forms)
                case 3 if not isinstance(new[name], Patched):
                    new[f"{name.rpartition('/')[0]}/{self.pick(['9.weight', 'x', 'steps'])}"] = new[
                        name
                    ]
                case _:
                    new[name] = self.field(new[name], clients)
        return new

    def field(self, field: Field, clients: int) -> Field:
        """Return the field with other values or another shape."""
        if isinstance(field, Patched):
            part = self.pick([f.name for f in fields(field)])
            return replace(field, **{part: self.tensor(getattr(field, part))})
        t = self.tensor(field.t)
        if not isinstance(field, Ragged):
            return type(field)(t)
        return Ragged(t, self.offsets(len(t) if t.dim() else 0, field.off, clients))

    def offsets(self, rows: int, off: Tensor, clients: int) -> Tensor:
        """Return offsets as frames and checkpoints give them: ascending, to the last row."""
        if int(off[-1]) == rows and not self.chance(0.2):
            return off
        count = clients if self.chance(0.9) else int(self._rng.integers(0, 6))
        inner = np.sort(self._rng.integers(0, rows + 1, max(count - 1, 0)))
        return torch.tensor([0, *inner.tolist(), *([rows] if count else [])])

    def form(self, field: Field, clients: int, forms: list[type]) -> Field:
        """Return the field in another form."""
        kind, t = self.pick(forms), field.t
        if kind is Ragged:
            t = t if t.dim() else t[None]
            return Ragged(t, self.offsets(len(t), torch.tensor([0, -1]), clients))
        if kind is Stacked and self.chance(0.5):
            t = t.expand(clients, *t.shape)
        found: Field = kind(t)
        return found

    def tensor(self, t: Tensor) -> Tensor:
        """Return a tensor with other values, dtype or shape."""
        change: Callable[[Tensor], Tensor] = self.pick([self.values, self.values, self.shape])
        if self.chance(0.15):
            t = self.typed(t)
        return change(t)

    def typed(self, t: Tensor) -> Tensor:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return t.to(self.pick(list(DTYPES)))

    def values(self, t: Tensor) -> Tensor:
        """Return the tensor with some values replaced by odd ones."""
        odd: list[float] = [0, 1, -1, 2, 3, 7, 100, 65536, 2**31 - 1, -(2**31), 2**33, 2**62]
        if t.is_floating_point():
            odd += [float("nan"), float("inf"), -float("inf"), 1e-320, 1e300, -1e30, 0.5]
        number = self.pick(odd)
        new = t.clone()
        if new.dtype is torch.bool:
            return ~new
        if not new.is_floating_point():
            info = torch.iinfo(new.dtype)
            number = min(max(int(number), info.min), info.max)
        elif abs(number) > torch.finfo(new.dtype).max:
            number = float("inf")
        if new.numel() == 0 or self.chance(0.3):
            return torch.full_like(new, number)
        where = torch.from_numpy(self._rng.integers(0, new.numel(), self._rng.integers(1, 4)))
        new.reshape(-1)[where] = torch.tensor(number).to(new.dtype)
        return new

    def shape(self, t: Tensor) -> Tensor:
        """Return the tensor cut, repeated, turned or in a shape of its own."""
        ways: list[Callable[[], Tensor]] = [
            lambda: t[:0] if t.dim() else t[None],
            lambda: t[:1] if t.dim() else t.expand(3),
            lambda: t[:-1] if t.dim() else t[None, None],
            lambda: t[..., :1] if t.dim() else t.expand(5, 5),
            lambda: t[..., :-1] if t.dim() else t.expand(0),
            lambda: torch.cat([t, t, t]) if t.dim() else t.expand(70000),
            lambda: torch.cat([t, t], dim=-1) if t.dim() else t[None],
            lambda: t[None],
            lambda: t[0] if t.dim() and len(t) else t,
            lambda: t.reshape(-1),
            lambda: t.transpose(0, -1) if t.dim() else t,
            lambda: t.flatten()[0].expand(t.shape) if t.numel() else t,
            lambda: t.new_zeros(1, 65536),
            lambda: t.new_zeros(0, 2**30),
            lambda: t.new_zeros(2**30, 0),
            lambda: t.new_zeros(self._rng.integers(0, 9, self._rng.integers(0, 4)).tolist()),
            lambda: t.new_ones(min(len(t), 99) if t.dim() else 3, int(self._rng.integers(0, 70))),
        ]
        way: Callable[[], Tensor] = self.pick(ways)
        return way()


def limit_memory(room: int) -> None:
    """Let allocations fail that go far beyond what is in use."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    size = pages * resource.getpagesize() + room
    resource.setrlimit(resource.RLIMIT_AS, (size, size))


class Session:
    """Calls ops, and counts what comes of it.

    Args:
        worlds: honest calls of each run.
        seed: of all draws.
        at: file that gets the number and the name of every call before it is made.
    """

    def __init__(self, worlds: list[list[Call]], seed: int, at: str) -> None:
        self._fuzzer = Fuzzer(np.random.default_rng(seed))
        self._rng = np.random.default_rng(seed + 1)
        self._at = os.open(at, os.O_RDWR | os.O_CREAT)
        self._states = [[call.state for call in calls] for calls in worlds]
        self._calls = [
            [[call for call in calls if call.op is op] for op in {call.op: 0 for call in calls}]
            for calls in worlds
        ]
        self._tiers = [
            [TORCH]
            if COMPILED.why_not(calls[0].cfg.training, torch.device("cpu"))
            else [TORCH, COMPILED]
            for calls in worlds
        ]
        self.came: Counter[str] = Counter()
        self.ops: dict[str, Counter[str]] = {name: Counter() for name in own_ops()}
        self.found: list[str] = []

    def one(self, number: int) -> None:
        """Make one call."""
        fuzz, world = self._fuzzer, int(self._rng.integers(len(self._calls)))
        call = fuzz.pick(fuzz.pick(self._calls[world]))
        block, clients = call.block, call.block.num_clients
        if fuzz.chance(0.7):  # else what earlier calls have worked out is there
            block = replace(block)
        key = call.key if fuzz.chance(0.7) else Key.of(number)
        cfg = replace(call.cfg, backend=fuzz.pick(self._tiers[world]))
        state, inbox = call.state, call.inbox
        if fuzz.chance(0.3):
            state = fuzz.pick(self._states[world])
        try:
            if not inbox or fuzz.chance(0.5):
                state = fuzz.mutated(state, clients, [Stacked, Ragged])
            if fuzz.chance(0.6):
                inbox = fuzz.mutated(inbox, clients, [Shared, Stacked, Ragged])
        except (RuntimeError, MemoryError):  # two mutations that make too much of each other
            self.came["too large"] += 1
            return
        name = qualified(call.op)
        os.pwrite(self._at, f"{number} {name} {cfg.backend.name}".ljust(80).encode(), 0)
        try:
            new, reply = run_op(call.op, cfg, block, state, inbox, key, rows=call.rows)
            envelope = Envelope(call.op.__name__, "control", 0, 0)  # type: ignore[arg-type]
            for position in range(clients):
                with suppress(ValueError):
                    decode(encode(envelope, reply, position))
            came = "ok"
            if fuzz.chance(0.05):
                self._states[world][self._rng.integers(len(self._states[world]))] = new
            if not call.rows and reply:
                self.fold(
                    fuzz.mutated(reply, clients, [Stacked]), reply, clients, cfg.backend.compiled
                )
        except Exception as error:
            came = type(error).__name__
            self._look_at(error, number, name)
        self.came[came] += 1
        self.ops[name][came] += 1

    def fold(self, odd: Payload, reply: Payload, clients: int, compiled: bool) -> None:
        """Fold an honest reply and one that is not."""
        reduce = WeightedMean("nodes") if "nodes" in reply and self._fuzzer.chance(0.5) else Sum()
        fold = Fold(reduce, compiled=compiled)
        if self._fuzzer.chance(0.5):
            fold.add(reply)
        if self._fuzzer.chance(0.5):
            check_fields(odd, clients, "reply")
        fold.add(odd)
        fold.result()

    def _look_at(self, error: Exception, number: int, name: str) -> None:
        if isinstance(error, IndexError) and str(error) == OUT_OF_BOUNDS:
            lines = traceback.format_exception(error)
            self.found.append(f"call {number} of {name}: {''.join(lines[-3:])}")
            sys.stderr.write(self.found[-1])  # now, as a later call may end the process


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--calls", type=int, required=True)
    parser.add_argument("--seconds", type=float, default=float("inf"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--at", required=True)
    parser.add_argument("--short", action="store_true")
    given = parser.parse_args()
    faulthandler.enable()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    worlds = recorded(SHORT if given.short else RUNS)
    session = Session(worlds, given.seed, given.at)
    limit_memory(ROOM)
    end, number = time.monotonic() + given.seconds, 0
    while number < given.calls and time.monotonic() < end:
        session.one(number)
        number += 1
    ops = {name: dict(came) for name, came in session.ops.items()}
    found = {"calls": number, "came": session.came, "ops": ops, "found": session.found[:5]}
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
