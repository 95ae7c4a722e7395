"""Selection in a run: clients are drawn before a round, and the round is observed after it.

The selector's state is part of the server's memory, under `selector/`, and so of checkpoints.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from silograph.core.errors import ProtocolError
from silograph.core.key import Key
from silograph.experiment.run.round_scores import Counts
from silograph.experiment.run.server_parts import SELECTOR, part_of, with_part
from silograph.experiment.run.setup import Setup
from silograph.federation.base import positions_of
from silograph.federation.ledger import Ledger
from silograph.methods.base import MethodConfig, RoundReport, ServerState
from silograph.selection.base import RoundFacts, Selector
from silograph.task.scores import client_accuracy


@dataclass(frozen=True, eq=False)
class Selection:
    """What selects clients in a run.

    Attributes:
        selector: the selector.
        options: its options.
        setup: the run.
    """

    selector: Selector
    options: Any
    setup: Setup

    def begin(self, state: ServerState) -> ServerState:
        """Return the server's first state with that of the selector."""
        return with_part(
            state, SELECTOR, self.selector.init(self.setup.federation.ids, self.options)
        )

    def choose(self, state: ServerState, t: int, key: Key) -> MethodConfig:
        """Return what the method's round reads, with the clients that are selected.

        Raises:
            ProtocolError: the selector chose nobody, unknown clients, or changed their order.
        """
        cfg, ids = self.setup.method_config, self.setup.federation.ids
        chosen = self.selector.draw(
            ids, self.options, part_of(state, SELECTOR), t, key.fold("select", t)
        )
        try:
            positions_of(ids, chosen)
        except ProtocolError as error:
            raise ProtocolError(f"selector {self.selector.name} in round {t}: {error}") from None
        observed = self.selector.observe is not None
        return replace(cfg, selected=tuple(chosen), observed=observed)

    def observe(
        self,
        before: ServerState,
        after: ServerState,
        t: int,
        report: RoundReport,
        counts: Counts | None,
    ) -> ServerState:
        """Return the server's state after a round, with what the selector has learned.

        Args:
            before: the server's state before the round, which has the selector's.
            after: what the method has returned.
            t: number of the round.
            report: of the round.
            counts: of the evaluation, None if there was none.
        """
        known = part_of(before, SELECTOR)
        if self.selector.observe is not None:
            facts = self._facts(report, counts, t)
            known = self.selector.observe(self.options, known, t, facts)
        return with_part(after, SELECTOR, known)

    def _facts(self, report: RoundReport, counts: Counts | None, t: int) -> RoundFacts:
        ids, ledger = self.setup.federation.ids, self.setup.federation.ledger
        clients = len(ids)
        selected = torch.zeros(clients, dtype=torch.bool)
        selected[positions_of(ids, report.participants)] = True
        trained = report.trained
        nodes = trained.get("nodes", torch.zeros(clients, dtype=torch.int64)).cpu().long()
        loss = trained.get("loss", torch.zeros(clients)).cpu().double()
        val_loss = val_accuracy = None
        if counts is not None:
            found = client_accuracy(counts, "val", self.setup.schema.task)
            values = [float("nan") if value is None else value for value in found]
            val_accuracy = torch.tensor(values, dtype=torch.float64)
            val_loss = (counts["val.loss"] / counts["val.nodes"]).cpu().double()
        return RoundFacts(
            selected=selected,
            answered=trained.get("answered", torch.zeros(clients, dtype=torch.bool)),
            nodes=nodes,
            train_loss=torch.where(nodes > 0, loss, torch.nan),
            bytes=_bytes_of(ledger, clients, t),
            val_loss=val_loss,
            val_accuracy=val_accuracy,
        )


def _bytes_of(ledger: Ledger, clients: int, t: int) -> Tensor:
    """Return the bytes of every client in a round, which is the ledger's last."""
    sizes = torch.zeros(clients, dtype=torch.int64)
    number = len(ledger)
    while number and ledger.since(number - 1)[0].round == t:
        number -= 1
        record = ledger.since(number)[0]
        sizes[torch.from_numpy(record.clients.copy())] += torch.from_numpy(record.bytes.copy())
    return sizes
