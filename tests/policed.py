"""Runs over silos with their own data, policies and audit files, without a network."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from remote_runs import finish
from runs import FAST
from sessions import TOKEN, DirectLink
from silograph.core.errors import ConfigError
from silograph.deploy.policy import NO_POLICY, ProposedRun, SiloPolicy, refusal_of
from silograph.deploy.server import start_facts
from silograph.deploy.silo import Attendance, OwnData
from silograph.experiment.resolve.resolve import DTYPES, resolve
from silograph.experiment.resolve.run_program import program_of
from silograph.experiment.run.result import Result
from silograph.experiment.run.setup import Setup
from silograph.federation.program import Course
from silograph.federation.session.audit import Audit
from silograph.federation.session.engine import Session
from silograph.federation.session.events import Event
from silograph.federation.session.hub import agree
from silograph.federation.session.message import Type, own_ops
from silograph.federation.session.peer import Limits, LostError, Peer
from silograph.federation.session.responder import Responder
from silograph.federation.session.state_store import StateStore
from silograph.graph.graph import Graph, Schema
from silograph.graph.silos.data import Silo
from silograph.graph.silos.read import read_silo
from silos import config_of, folders

SECRET = bytes(range(32))
ALL_SILOS = 3


def no_return(former: Peer, lost: LostError) -> Peer:
    """Wait for no silo."""
    raise lost


def why_refused(policy: SiloPolicy, run: ProposedRun) -> str | None:
    """Return the first rule of a policy that a run breaks, as a text."""
    refusal = refusal_of(policy, run)
    return None if refusal is None else str(refusal)


@dataclass(frozen=True, eq=False)
class PolicedSilos:
    """Silos of a cut graph, and what a server makes of them.

    Attributes:
        silos: their data.
        said: what they told their people.
    """

    silos: tuple[Silo, ...]
    said: list[str]

    def run(
        self,
        policy: Callable[[str], SiloPolicy] = lambda _: NO_POLICY,
        *,
        allow: tuple[str, ...] = (),
        audit: Callable[[str], Audit] = lambda _: Audit(),
        token: bytes = TOKEN,
        **options: Any,
    ) -> tuple[Result, Mapping[str, Responder]]:
        """Run a federation; `policy` and `audit` are those of a silo by its name."""
        workers = {}
        for silo in self.silos:
            secrets = dict.fromkeys(silo.cross.silo, SECRET)
            attendance = Attendance("", Path(), allow=allow, policy=policy(silo.name))
            own = OwnData(silo, secrets, attendance, self._report)
            workers[silo.name] = Responder(
                token,
                own_ops(),
                own,
                StateStore(),
                self._report,
                silo.name,
                audit(silo.name),
                own.policy.bounds,
            )
        return finish(self._setup(workers, token, options)), workers

    def _report(self, event: Event) -> None:
        self.said.append(str(event))

    def _setup(
        self, workers: Mapping[str, Responder], token: bytes, options: Mapping[str, Any]
    ) -> Setup:
        peers = {name: Peer(name, DirectLink(w), token) for name, w in workers.items()}
        agreed, route = agree(peers, None, no_return)
        known = agreed.facts
        schema = Schema(known.features, known.num_classes, known.task, known.class_names)
        asked = {
            **FAST,
            "kernels": "torch",
            **options,
            "clients": len(peers),
            "partition": "silo",
            "block_size": 1,
        }
        found = resolve(config_of(**asked), schema, device="cpu")
        config, method_config = found.config, found.method_config
        program = program_of(config, found.schema, found.parts.method.part, method_config)
        for name, peer in peers.items():
            try:
                peer.ask(Type.START, start_facts(config, found.schema), None)
            except LostError as error:
                raise ConfigError(f"{name}: {error}") from None
        session = Session(
            peers,
            route,
            own_ops(),
            Course(program),
            dtype=DTYPES[config.dtype],
            limits=Limits(len(peers)),
            compiled=method_config.backend.compiled,
        )
        return Setup(config, found.parts, found.schema, method_config, session, found.device)


def policed(graph: Graph, path: Path, clients: int = ALL_SILOS) -> PolicedSilos:
    """Silos of a random cut of a graph."""
    config = replace(config_of(clients, partition="random"), split="0.4/0.3/0.3")
    made = folders(graph, config, path / "silos")
    return PolicedSilos(tuple(map(read_silo, made)), [])
