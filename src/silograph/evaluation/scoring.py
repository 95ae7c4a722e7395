"""How a method's models are scored: which neighbors a node sees, and which view picks the round.

Scores are counts that clients report (`silograph.evaluation.evaluate`). Of every method the
clients' own models are scored; how the server's model is scored is what the values here differ in.
"""

from dataclasses import dataclass
from typing import Literal, Protocol

from torch import Tensor

from silograph.core.key import Key
from silograph.core.payload import Payload, under
from silograph.core.row_minimum import NO_MINIMUM, RowMinimum
from silograph.evaluation.evaluate import exchanged_counts, server_counts
from silograph.evaluation.evaluation_steps import exchanged_steps, server_steps
from silograph.evaluation.views import FETCHED, OWN, SILOS
from silograph.federation.base import Federation
from silograph.federation.field_specs import FieldSpecs
from silograph.federation.program import Steps
from silograph.nn.any_model import AnyModel
from silograph.task.counts import CountRules


class Evaluation(Protocol):
    """A way to score the server's model."""

    @property
    def view(self) -> Literal["server", "personalized"]:
        """The view whose validation scores pick the round."""

    @property
    def all_silos(self) -> bool:
        """Whether a node sees its neighbors in all silos, and all train in every round."""

    @property
    def copies(self) -> bool:
        """Whether several clients may hold a node."""

    @property
    def crosses(self) -> bool:
        """Whether scores need sums that cross silos."""

    def counts(
        self, fed: Federation, model: AnyModel, inbox: Payload, key: Key, rules: CountRules
    ) -> dict[str, Tensor]:
        """Return all clients' counts of the server's model.

        Args:
            fed: the engine.
            model: the shape.
            inbox: `weights/*` of the server; where nothing crosses, as they travel to be trained.
            key: of the calls.
            rules: what the replies hold.
        """

    def steps(self, model: AnyModel, takes: FieldSpecs, key: Key, rules: CountRules) -> Steps:
        """Return the calls of `counts`.

        Args:
            model: the shape.
            takes: specs of the inbox.
            key: of the calls.
            rules: what the replies hold.
        """

    def seen(self, collect: float) -> str:
        """Return how a node is seen where clients have fetched a share `collect` of their halo."""


@dataclass(frozen=True)
class OwnGraph:
    """Each node is seen through its own client's graph; the server's model picks the round.

    Attributes:
        view: see `Evaluation`.
        through: what is said of that graph, one of `silograph.evaluation.views`.
    """

    view: Literal["server", "personalized"] = "server"
    through: str = OWN
    all_silos = False
    copies = True
    crosses = False

    def counts(
        self, fed: Federation, model: AnyModel, inbox: Payload, key: Key, rules: CountRules
    ) -> dict[str, Tensor]:
        """Score through the clients' graphs."""
        del model
        return server_counts(fed, inbox, key, rules)

    def steps(self, model: AnyModel, takes: FieldSpecs, key: Key, rules: CountRules) -> Steps:
        """Return the calls of `counts`; see `Evaluation`."""
        return server_steps(model, takes, key, rules)

    def seen(self, collect: float) -> str:
        """Return how a node is seen."""
        return FETCHED if collect and self.through == OWN else self.through


def personal() -> OwnGraph:
    """Return `OwnGraph` where the clients' own models pick the round."""
    return OwnGraph("personalized")


@dataclass(frozen=True)
class AllSilos:
    """Each node is seen with its neighbors in all silos; the server's model picks the round.

    Attributes:
        view: whose validation scores pick the round.
        behind: what must stand behind the sums that scores need.
    """

    view: Literal["server", "personalized"] = "server"
    behind: RowMinimum = NO_MINIMUM
    all_silos = True
    copies = False
    crosses = True

    def counts(
        self, fed: Federation, model: AnyModel, inbox: Payload, key: Key, rules: CountRules
    ) -> dict[str, Tensor]:
        """Score with sums over all silos."""
        return exchanged_counts(fed, model, under("weights", inbox), key, rules, self.behind)

    def steps(self, model: AnyModel, takes: FieldSpecs, key: Key, rules: CountRules) -> Steps:
        """Return the calls of `counts`; see `Evaluation`."""
        del takes
        return exchanged_steps(model, key, rules, self.behind)

    def seen(self, collect: float) -> str:
        """Return how a node is seen."""
        del collect
        return SILOS
