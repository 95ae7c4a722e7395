"""What a run with differential privacy would cost a silo, and the way its replies are charged."""

from collections import Counter
from pathlib import Path

from silograph.deploy.policy import PrivacyBudget
from silograph.federation.privacy.accounting import epsilon_of
from silograph.federation.privacy.budget import PrivacyLedger, read_or_make_secret
from silograph.federation.privacy.updates import UpdatePrivacy
from silograph.federation.session.audit import RunAudit
from silograph.federation.session.private_reply import PrivateReplies


class PrivacyAccount:
    """The charges of a silo, before it agrees to a run.

    Args:
        privacy: of the run.
        state: folder with the charges of all runs.
        run: public name of the run.

    Raises:
        CheckpointError: the file of charges is damaged.
    """

    def __init__(self, privacy: UpdatePrivacy, state: Path, run: str) -> None:
        self._privacy, self._state, self._run = privacy, state, run
        self._ledger = PrivacyLedger(state)

    def epsilon_with(self, budget: PrivacyBudget | None) -> float:
        """Return epsilon of all runs at the delta of a budget, this one to its end included."""
        if budget is None:
            return 0.0
        total = Counter({self._privacy.noise_multiplier: self._privacy.releases})
        for run, releases in self._ledger.releases(self._privacy.unit).items():
            if run != self._run:  # which is counted to its end
                total += releases
        return epsilon_of(total, budget.delta)

    def open(self, audit: RunAudit) -> PrivateReplies:
        """Return what adds noise to the replies of the run, and charges them."""
        secret = read_or_make_secret(self._state)
        return PrivateReplies(self._privacy, self._ledger, secret, self._run, audit.record_charge)
