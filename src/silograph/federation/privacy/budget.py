"""What a silo's releases have cost, over all runs: a file of charges, and the secret of its noise.

Each line of the file is one charge: a reply with noise that left, or was about to. It is on the
disk before the reply leaves, so a killed process has sent less than the file says, never more. The
file outlives runs; deleting it deletes what the silo knows of its budget.

The secret (32 bytes, readable by its owner only) keys the noise. Whoever has it can subtract the
noise from everything that has left.
"""

import errno
import json
import math
import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass as checked_dataclass

from silograph.core.config import STRICT
from silograph.core.errors import CheckpointError, PolicyError, mistake
from silograph.core.files import opens_private, sync_folder
from silograph.core.text import count_of
from silograph.federation.privacy.accounting import epsilon_left, epsilon_of

LEDGER, SECRET = "privacy.jsonl", "noise.key"
SECRET_BYTES = 32
# What is written of the noise of a sum besides its charge.
CHARGED, REVEALED, USED = "charged", "revealed", "used"


@checked_dataclass(frozen=True, config=STRICT, kw_only=True)
class PrivacyBudget:
    """What all runs of a silo together may cost.

    Attributes:
        epsilon: at `delta`.
        delta: probability that the bound does not hold.
        unit: what the runs must hide: whether the whole `silo` takes part, or a `node` of it.
    """

    epsilon: Annotated[float, Field(gt=0, allow_inf_nan=False)]
    delta: Annotated[float, Field(gt=0, lt=1)]
    unit: Literal["silo", "node"] = "silo"


@checked_dataclass(frozen=True, config=STRICT, kw_only=True)
class BudgetUse:
    """What all runs of a silo have cost of its budget so far.

    Attributes:
        unit: what the budget is for.
        delta: probability that the bound does not hold.
        allowed: epsilon that all runs may cost.
        spent: epsilon that they have cost.
        left: epsilon that one more run may cost. It is more than the difference of the two, as
            epsilons of runs do not add up (`silograph.federation.privacy.accounting.epsilon_left`).
        runs: that were charged.
    """

    unit: str
    delta: float
    allowed: float
    spent: float
    left: float
    runs: int

    def __str__(self) -> str:
        """Return one line for people."""
        if not self.runs:
            return (
                f"nothing is spent yet of epsilon {self.allowed:g} at delta {self.delta:g} for a "
                f"{self.unit}"
            )
        return (
            f"epsilon {self.spent:.4g} of {self.allowed:g} at delta {self.delta:g} for a "
            f"{self.unit} is spent by {count_of(self.runs, 'run')}, and one more run may cost up "
            # Rounded down, as a run of this epsilon must fit.
            f"to {math.floor(self.left * 1000) / 1000:g}"
        )


@dataclass(frozen=True)
class Charge:
    """One line of the file.

    Attributes:
        event: `charged`: a reply with this noise may leave. Of secure sums also `revealed`: a sum
            over all silos was unmasked, and `used`: one over fewer silos was, so that this noise
            must not leave again.
        run: public name of the run.
        unit: what the guarantee is for.
        noise_multiplier: scale of the noise of a released sum, as a multiple of the clip.
        round: number of the round.
        noise: names the noise, in hexadecimal.
    """

    event: str
    run: str
    unit: str
    noise_multiplier: float
    round: int
    noise: str


class PrivacyLedger:
    """The charges of a silo.

    Args:
        folder: the silo's folder of states, which one process has at a time.

    Raises:
        CheckpointError: the file is damaged.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / LEDGER
        self._charges = self._read()
        self._events = {(charge.event, charge.noise) for charge in self._charges}

    def _read(self) -> list[Charge]:
        """Return the charges so far; cut off a line that a killed process did not finish."""
        try:
            data = self._path.read_bytes()
        except FileNotFoundError:
            return []
        whole = data.rfind(b"\n") + 1
        if whole < len(data):  # what it tells of has not left
            os.truncate(self._path, whole)
        try:
            return [_charge_of(json.loads(line)) for line in data[:whole].splitlines()]
        except (ValueError, TypeError, RecursionError):
            raise CheckpointError(
                f"expected charges of a privacy budget in {self._path}, got something else: "
                "restore the file; without it the silo does not know what it has spent",
                **mistake("damaged-file", self._path),
            ) from None

    def has(self, event: str, noise: str) -> bool:
        """Whether an event of this noise is written down."""
        return (event, noise) in self._events

    def add(self, charge: Charge) -> None:
        """Write a line, which is on the disk when this returns; one that is there stays alone.

        Raises:
            PolicyError: it cannot be written, so the reply must not leave.
        """
        if self.has(charge.event, charge.noise):
            return
        is_new = not self._path.exists()
        try:
            with open(self._path, "ab", buffering=0, opener=opens_private) as file:
                line = json.dumps(asdict(charge)).encode() + b"\n"
                size = os.fstat(file.fileno()).st_size
                if file.write(line) != len(line):
                    file.truncate(size)
                    raise OSError(errno.EIO, "only a part was written")
                os.fsync(file.fileno())
            if is_new:
                sync_folder(self._path.parent)
        except OSError as error:
            raise PolicyError(
                f"expected to write the charge of a reply to {self._path}, got: {error.strerror}. "
                "The silo leaves the run: free space or permit writing, then start it again",
                **mistake("unwritable-path", self._path),
            ) from None
        self._charges.append(charge)
        self._events.add((charge.event, charge.noise))

    def check_complete(self, recorded: Mapping[str, Mapping[str, Any]]) -> None:
        """Raise `CheckpointError` if charges are missing that another file has.

        Args:
            recorded: unit and number of releases by run.
        """
        for run, spent in recorded.items():
            count = self.releases(spent["unit"]).get(run, Counter[float]()).total()
            if count < spent["releases"]:
                raise CheckpointError(
                    f"expected {spent['releases']} charges of run {run} in {self._path}, as the "
                    f"audit file has, got {count}: give the --state of earlier runs, or restore "
                    "the file; without it the silo does not know what it has spent",
                    **mistake("damaged-file", self._path),
                )

    def has_run(self, run: str) -> bool:
        """Whether anything was charged in a run, of either unit."""
        return any(charge.run == run for charge in self._charges)

    def releases(self, unit: str) -> dict[str, Counter[float]]:
        """Return the number of charges of a unit by run and noise multiplier."""
        by_run: dict[str, Counter[float]] = {}
        for charge in self._charges:
            if charge.event == CHARGED and charge.unit == unit:
                by_run.setdefault(charge.run, Counter())[charge.noise_multiplier] += 1
        return by_run

    def total(self, unit: str) -> Counter[float]:
        """Return the number of charges by noise multiplier that all runs have cost a unit.

        For a node also runs that hide whole silos count: with another node an update is another
        one, which moves the sum by twice the clip. So their noise is worth half of it.
        """
        total = sum(self.releases(unit).values(), Counter[float]())
        if unit == "node":
            for multiplier, count in self.total("silo").items():
                total[multiplier / 2] += count
        return total

    def use_of(self, budget: PrivacyBudget) -> BudgetUse:
        """Return what all runs have cost of a budget."""
        total, units = self.total(budget.unit), {budget.unit, "silo"}
        runs = {c.run for c in self._charges if c.event == CHARGED and c.unit in units}
        return BudgetUse(
            unit=budget.unit,
            delta=budget.delta,
            allowed=budget.epsilon,
            spent=epsilon_of(total, budget.delta),
            left=epsilon_left(total, budget.epsilon, budget.delta),
            runs=len(runs),
        )


def _charge_of(values: Any) -> Charge:
    """Return the charge of a line; raise `ValueError` or `TypeError` if it is none."""
    charge = Charge(**values)
    kinds = {name: type(value) for name, value in asdict(charge).items()}
    if kinds != Charge.__annotations__ or not charge.noise_multiplier > 0:
        raise ValueError(values)
    return charge


def read_or_make_secret(folder: Path) -> bytes:
    """Return the secret of a silo's noise, which is made once.

    Raises:
        CheckpointError: the file is damaged.
    """
    path = folder / SECRET
    try:
        with open(path, "xb", opener=opens_private) as file:
            file.write(os.urandom(SECRET_BYTES))
            file.flush()
            os.fsync(file.fileno())
        sync_folder(folder)
    except FileExistsError:
        pass
    secret = path.read_bytes()
    if len(secret) != SECRET_BYTES:
        raise CheckpointError(
            f"expected {SECRET_BYTES} bytes in {path}, got {len(secret)}: delete the file; replies "
            "to earlier requests then have new noise, which is charged",
            **mistake("damaged-file", path),
        )
    return secret
