"""What a run will send from a silo, for its people to read before the first call."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from silograph.core.text import counted
from silograph.experiment.report.figures import size_text
from silograph.federation.expected_bytes import (
    ZERO,
    SizeBound,
    received_sizes,
    sent_sizes,
)
from silograph.federation.field_specs import Extent
from silograph.federation.program import Program, calls_of

MOST_CALLS = 10_000  # that are added up; a server's config must not hold a silo up
RECEIVED = "received"


@dataclass(frozen=True)
class PlanRow:
    """One kind of what leaves, or all that is received.

    Attributes:
        name: of the kind, or `received`.
        first: round in which it first may leave; 0 is set-up.
        last: the last such round.
        each: bytes of the round that may send most.
        whole: bytes of the run.
    """

    name: str
    first: int
    last: int
    each: SizeBound
    whole: SizeBound


@dataclass(frozen=True, eq=False)
class RunPlan:
    """What a run sends from one silo and what it is sent, at most.

    Attributes:
        sent: by kind.
        received: all kinds together.
        first: what set-up and the first round send.
        rounds: that were added up; the run may have more.
    """

    sent: Sequence[PlanRow]
    received: PlanRow
    first: SizeBound
    rounds: int

    @property
    def whole(self) -> SizeBound:
        """What leaves in the rounds that were added up."""
        return total(row.whole for row in self.sent)


def total(bounds: Iterator[SizeBound]) -> SizeBound:
    """Return the bound of all together."""
    return sum(bounds, ZERO)


def plan_of(program: Program, extent: Extent) -> RunPlan:
    """Return what a run sends, of the specs of its fields and the silo's numbers of rows.

    Args:
        program: of the run.
        extent: of the silo, as one client.
    """
    steps = [program.steps(0)]
    calls = 0
    while calls < MOST_CALLS and len(steps) <= program.rounds:
        steps.append(program.steps(len(steps)))
        calls += sum(1 for _ in calls_of(steps[-1]))
    up = [sent_sizes(each, extent, program.state) for each in steps]
    down = [received_sizes(each, extent, program.state) for each in steps]
    kinds = sorted({kind for sizes in up for kind in sizes})
    rows = [_row(str(kind), [sizes.get(kind, ZERO) for sizes in up]) for kind in kinds]
    received = _row(RECEIVED, [total(iter(sizes.values())) for sizes in down])
    first = total(size for sizes in up[:2] for size in sizes.values())
    return RunPlan(rows, received, first, len(steps) - 1)


def _row(name: str, sizes: Sequence[SizeBound]) -> PlanRow:
    at = [number for number, size in enumerate(sizes) if size != ZERO]
    each = max(sizes, key=lambda size: float("inf") if size.most is None else size.most)
    return PlanRow(name, at[0] if at else 0, at[-1] if at else 0, each, total(iter(sizes)))


def lines_of(
    plan: RunPlan, rounds: int, hello: int, to: str, silos: int, rows: Sequence[str]
) -> Iterator[str]:
    """Yield the plan as lines of at most 60 characters.

    Args:
        plan: what leaves.
        rounds: of the run.
        hello: bytes of the silo's hello, by which silos find out which edges they share: they
            have left already.
        to: whom it goes to.
        silos: of the run, as the server says.
        rows: what sends rows of single nodes, by the names that `--allow` takes.
    """
    yield f"this run sends to {to}"
    single = f"rows of single nodes: {', '.join(rows)}" if rows else "no rows of single nodes"
    yield f"({single}; {counted(silos, 'silo')}, as the server says)"
    yield _cells("kind", "rounds", "in a round", "in all")
    shown = SizeBound(hello, hello)
    yield _cells("hello", "sent already", "", _size(shown))
    for row in plan.sent:
        yield _cells(row.name, _rounds(row), _size(row.each), _size(row.whole))
    yield _cells("all of it", "", "", _size(plan.whole + shown))
    yield "(without its name, key and versions, and figures of work)"
    got = plan.received
    yield _cells(RECEIVED, _rounds(got), _size(got.each), _size(got.whole))
    if plan.rounds < rounds:
        yield f"(in all: the first {plan.rounds:,} of {counted(rounds, 'round')})"


def _cells(name: str, rounds: str, each: str, whole: str) -> str:
    return f"{name:<13} {rounds:<13} {each:>16} {whole:>15}".rstrip()  # a blank between any two


def _rounds(row: PlanRow) -> str:
    names = ["set-up" if number == 0 else f"{number:,}" for number in (row.first, row.last)]
    return names[0] if row.first == row.last else " to ".join(names)


def _size(size: SizeBound) -> str:
    if size.most is None:
        return "not known yet"
    return size_text(size.most) if size.least == size.most else f"up to {size_text(size.most)}"


def facts_of(plan: RunPlan) -> Mapping[str, int | None]:
    """Return the plan's figures for the audit file: most bytes by kind; None is not known."""
    return {row.name: row.whole.most for row in plan.sent}
