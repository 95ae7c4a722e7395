"""A silo scores as many models as it trains from, and the last one, whatever is repeated."""

import itertools

import pytest
import torch

from silograph.core.errors import PolicyError
from silograph.core.key import Key
from silograph.core.kinds import Kind
from silograph.core.payload import Field, Ragged, Shared, Stacked
from silograph.federation.field_specs import FieldSpec
from silograph.federation.program import Call, ScoredWeights, ScoringRules

SPEC = {"weights/w": FieldSpec(Shared, (2,))}


def op(*_: object) -> None: ...


TRAIN = Call(op, Kind.WEIGHTS, Key.of(0), SPEC)  # type: ignore[arg-type]
SCORE = Call(op, Kind.EVALUATION, Key.of(0), SPEC)  # type: ignore[arg-type]
COUNTS = {"received/val.nodes": FieldSpec(Stacked)}
BOTH = Call(op, Kind.WEIGHTS, Key.of(0), SPEC, COUNTS)  # type: ignore[arg-type]


def model(value: float) -> dict[str, Field]:
    return {"weights/w": Shared(torch.tensor([value, 1.0])), "train": Shared(torch.tensor(True))}


def make(at: ScoredWeights, call: Call, number: int, value: float, *, closes: bool = False) -> None:
    digest = at.digest(model(value))
    at.check(call, number, digest, closes=closes)
    at.record(call, number, digest, closes=closes)


def test_a_round_trains_from_what_was_scored() -> None:
    at = ScoredWeights(ScoringRules(next_trains=True, bounded=True))
    make(at, SCORE, 0, 1.0)
    make(at, TRAIN, 1, 1.0)
    make(at, SCORE, 1, 2.0)
    message = (
        "^expected round 2 to train from the weights that were scored after round 1, got other "
        "weights: the silo leaves the run$"
    )
    with pytest.raises(PolicyError, match=message):
        make(at, TRAIN, 2, 3.0)


def test_a_silo_that_was_away_trains_from_later_weights() -> None:
    at = ScoredWeights(ScoringRules(next_trains=True, bounded=True))
    make(at, TRAIN, 1, 1.0)
    make(at, SCORE, 1, 2.0)
    at.forget_last()
    make(at, TRAIN, 5, 3.0)
    make(at, SCORE, 5, 4.0)
    make(at, TRAIN, 6, 4.0)


@pytest.mark.parametrize("train", [TRAIN, BOTH])
def test_models_are_scored_as_often_as_it_trains_and_once_more(train: Call) -> None:
    """Whatever the order, and however often a server sends LOAD in between."""
    for order in itertools.product([train, SCORE], repeat=5):
        at = ScoredWeights(ScoringRules(bounded=True))
        trained, scored = 0, set[float]()
        for number, call in enumerate(order):
            at.forget_last()
            mine = {float(number)} if call is not TRAIN else set()
            if call is SCORE and len(scored | mine) > trained + 1:
                with pytest.raises(PolicyError, match="got one more in round"):
                    make(at, call, number, number)
                continue
            make(at, call, number, number)
            trained += call is not SCORE
            scored |= mine


def test_the_same_weights_are_scored_again_in_a_round_that_is_repeated() -> None:
    at = ScoredWeights(ScoringRules(bounded=True))
    for _ in range(8):
        make(at, SCORE, 3, 1.0)


@pytest.mark.parametrize("train", [TRAIN, BOTH])
def test_training_again_from_the_same_weights_has_no_more_models_scored(train: Call) -> None:
    """Rounds that are done again, and later rounds that train from the weights of earlier ones."""
    at = ScoredWeights(ScoringRules(next_trains=True, bounded=True, in_rounds=10))
    for number in (*range(1, 10), *range(1, 10)):
        at.forget_last()
        make(at, train, number, 0.0)
    make(at, SCORE, 10, 1.0)
    if train is TRAIN:
        make(at, SCORE, 10, 2.0)
    message = (
        "^expected at most 2 models to be scored after training from 1 different ones, got one"
    )
    for number in range(1, 10):
        at.forget_last()
        make(at, train, number, 0.0)
        with pytest.raises(PolicyError, match=message):
            make(at, SCORE, number, 3.0)
    make(at, SCORE, 10, 1.0)


@pytest.mark.parametrize("train", [TRAIN, BOTH])
@pytest.mark.parametrize(("closing", "in_setup"), [(1, 0), (1, 1), (2, 0)])
def test_no_more_models_are_scored_than_a_run_has_rounds(
    train: Call, closing: int, in_setup: int
) -> None:
    """Whatever weights the rounds train from that are done again."""
    rules = ScoringRules(bounded=True, closing=closing, in_setup=in_setup, in_rounds=3)
    at, most = ScoredWeights(rules), 3 + closing + in_setup
    for number in range(most):
        make(at, train, 1, number)
        if train is TRAIN:
            make(at, SCORE, 1, -number - 1.0)
    at.forget_last()
    with pytest.raises(PolicyError, match=rf"^expected at most {most} models .* start it again to"):
        make(at, BOTH, 1, 100.0)
    make(at, TRAIN, 1, 101.0)  # which scores nothing
    with pytest.raises(PolicyError, match=f"^expected at most {most} models to be scored after"):
        make(at, SCORE, 1, 102.0)


@pytest.mark.parametrize("closing", [1, 2])
def test_the_run_is_closed_with_the_same_models(closing: int) -> None:
    """Also where rounds are done again from other weights before it is closed once more."""
    at = ScoredWeights(ScoringRules(bounded=True, closing=closing, in_rounds=9))
    for number in range(1, 5):
        make(at, BOTH, number, number)
    for _ in range(3):
        for value in range(closing):
            make(at, SCORE, 4, 10.0 + value, closes=True)
        at.forget_last()
        make(at, BOTH, 4, 4.0)
    make(at, SCORE, 4, 3.0, closes=True)  # the best one, which was scored before
    make(at, BOTH, 4, 5.0)
    named = ["1 model", "2 models"][closing - 1]
    with pytest.raises(PolicyError, match=f"^expected {named} to be scored when the run is over,"):
        make(at, SCORE, 4, 20.0, closes=True)


def test_without_rules_anything_goes() -> None:
    at = ScoredWeights(ScoringRules())
    for number in range(5):
        make(at, SCORE, number, number)
        make(at, TRAIN, number, -number - 1)


def test_every_bit_of_the_weights_counts_and_nothing_else() -> None:
    at = ScoredWeights(ScoringRules())
    base = at.digest(model(1.0))
    assert base == at.digest({"weights/w": Shared(torch.tensor([1.0, 1.0]))})
    off = torch.tensor([0, 2])
    others: list[dict[str, Field]] = [
        model(1.0 + 2**-20),
        {"weights/v": Shared(torch.tensor([1.0, 1.0]))},
        {"weights/w": Shared(torch.tensor([1.0, 1.0], dtype=torch.float64))},
        {"weights/w": Shared(torch.tensor([[1.0], [1.0]]))},
        {"weights/w": Ragged(torch.tensor([1.0, 1.0]), off)},
        model(1.0) | {"scale/weights/w": Shared(torch.tensor([1.0]))},
    ]
    digests = {base, *map(at.digest, others)}
    assert len(digests) == 1 + len(others)
    assert at.digest({"train": Shared(torch.tensor(True))}) is None
