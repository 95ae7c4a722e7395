"""Laws of folding: one result, to the bit, for every form of the replies and every grouping.

The reference adds whole slices one client after the other, in torch; the oracle is the plain
weighted mean. C: clients. R: rows of a slice. H: width.
"""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from mistakes import raises_code
from patches import patched
from runs import MakeGraph, go, rows_of, same_bits, weights_of
from silograph.core.errors import ProtocolError
from silograph.core.payload import Patched, Ragged, Stacked
from silograph.federation import fold as fold_module
from silograph.federation.base import Sum, WeightedMean
from silograph.federation.fold import Fold
from silograph.federation.frame import DTYPES

pytest.importorskip("numba")

NAN = float("nan")
Dense = dict[str, Tensor]
Reply = dict[str, Stacked | Patched]


@dataclass(frozen=True, eq=False)
class Case:
    """What C clients send: `n` (C,), `w` (C, R, H), `loss` (C,), `hits` (C, 2), `b` (C, H)."""

    dense: Dense
    bases: Tensor  # (G, R, H); the first is what the mean may be taken around
    which: list[int]
    places: list[list[int]]

    def part(self, clients: Sequence[int], *, dense: bool) -> Reply:
        """The reply of a block."""
        reply: Reply = {k: Stacked(t[list(clients)]) for k, t in self.dense.items()}
        if not dense:
            rows = [{r: self.dense["w"][c, r] for r in self.places[c]} for c in clients]
            reply["w"], _ = patched(self.bases, [self.which[c] for c in clients], rows)
        return reply


@st.composite
def cases(draw: st.DrawFn, *, whole: bool = True, around_only: bool = False) -> Case:
    """Draw replies; weights are whole numbers or fractions, and some are 0 next to NaN."""
    clients, rows, width = draw(st.integers(1, 6)), draw(st.integers(1, 5)), draw(st.integers(1, 4))
    dtype = draw(st.sampled_from([torch.float64, torch.float32]))
    rng = np.random.default_rng(draw(st.integers(0, 999)))
    weights = torch.from_numpy(rng.integers(0, 4, clients))
    if not whole:
        weights = weights * torch.from_numpy(rng.random(clients))
    bases = torch.from_numpy(rng.normal(size=(3, rows, width))).to(dtype)
    which = (rng.integers(0, 3, clients) * (not around_only)).tolist()
    places = [rng.permutation(rows)[: rng.integers(0, rows + 1)].tolist() for _ in which]
    w = torch.stack([bases[g] for g in which])
    for c, mine in enumerate(places):
        w[c, mine] = torch.from_numpy(rng.normal(size=(len(mine), width))).to(dtype)
        if weights[c] == 0:
            w[c, mine] = NAN
    loss, b = torch.from_numpy(rng.normal(size=clients)), rng.normal(size=(clients, width))
    loss[weights == 0] = NAN
    hits = torch.from_numpy(rng.integers(-9, 9, (clients, 2), dtype=np.int32))
    dense = {"n": weights, "w": w, "loss": loss, "hits": hits, "b": torch.from_numpy(b).to(dtype)}
    return Case(dense, bases, which, places)


def folded_by_torch(
    reduce: Sum | WeightedMean, replies: Sequence[Mapping[str, Stacked | Patched]]
) -> Dense:
    """Fold in torch, which NumPy stands in for where there are few values."""
    with patch.object(fold_module, "FEW", -1):
        return folded(reduce, replies, compiled=False)


def folded(
    reduce: Sum | WeightedMean, replies: Sequence[Mapping[str, Stacked | Patched]], compiled: bool
) -> Dense:
    fold = Fold(reduce, compiled=compiled)
    for reply in replies:
        fold.add(reply)
    return {name: field.t for name, field in fold.result().items()}


def groupings(clients: int) -> list[list[list[int]]]:
    """All together, one by one, and in pairs."""
    order = list(range(clients))
    return [[order[i : i + size] for i in range(0, clients, size)] for size in (clients, 1, 2)]


def assert_bits(got: Dense, expected: Dense) -> None:
    assert got.keys() == expected.keys()
    for name, t in expected.items():
        assert got[name].dtype == t.dtype, name
        assert torch.equal(got[name], t), name


def assert_one_result(reduce: Sum | WeightedMean, case: Case) -> None:
    clients = len(case.dense["n"])
    reference = folded_by_torch(reduce, [case.part([c], dense=True) for c in range(clients)])
    ways = itertools.product(groupings(clients), (True, False), (True, False))
    for groups, dense, compiled in ways:
        replies = [case.part(group, dense=dense) for group in groups]
        assert_bits(folded(reduce, replies, compiled), reference)
        if not compiled:
            assert_bits(folded_by_torch(reduce, replies), reference)
    mixed = [case.part([c], dense=c % 2 == 0) for c in range(clients)]  # as engines may differ
    assert_bits(folded(reduce, mixed, True), reference)


@given(case=cases(), whole_slices=st.booleans())
def test_a_mean_has_the_same_bits_however_it_comes(case: Case, whole_slices: bool) -> None:
    around = {} if whole_slices else {"w": case.bases[0]}
    assert_one_result(WeightedMean("n", around), case)


@given(case=cases(around_only=True))
def test_a_mean_around_what_all_rest_at(case: Case) -> None:
    assert_one_result(WeightedMean("n", {"w": case.bases[0], "b": case.bases[1, 0]}), case)


@given(case=cases(whole=False))
def test_weights_may_be_fractions(case: Case) -> None:
    assert_one_result(WeightedMean("n", {"w": case.bases[0]}), case)


@given(case=cases())
def test_a_sum_has_the_same_bits_however_it_comes(case: Case) -> None:
    finite = {name: t.nan_to_num() for name, t in case.dense.items()}
    assert_one_result(Sum(), Case(finite, case.bases, case.which, case.places))


@given(case=cases(), around=st.booleans())
def test_a_mean_is_the_plain_weighted_mean(case: Case, around: bool) -> None:
    weights = case.dense["n"]
    mean = WeightedMean("n", {"w": case.bases[0]} if around else {})
    got = folded(mean, [case.part(range(len(weights)), dense=False)], True)
    assert got["n"] == weights.sum()
    if weights.sum() == 0:
        assert set(got) == {"n"}
        return
    share, active = weights / weights.sum().double(), weights > 0
    for name in ("w", "loss", "hits", "b"):
        t = case.dense[name]
        expected = torch.tensordot(share[active], t[active].double(), 1)
        rough = t.dtype is not torch.float64  # a mean of integers is of torch's default dtype
        tolerance = 1e-5 if rough else 1e-12
        torch.testing.assert_close(
            got[name].double(), expected, rtol=tolerance, atol=tolerance, msg=name
        )


@given(case=cases())
def test_sums_of_integers_are_exact(case: Case) -> None:
    got = folded(Sum(), [case.part([c], dense=True) for c in range(len(case.dense["n"]))], True)
    assert got["hits"].tolist() == case.dense["hits"].sum(0).tolist()
    assert got["n"] == case.dense["n"].sum()


def test_a_mean_around_by_hand() -> None:
    """Row 0 is 5 at both clients, row 1 (1 * 2 + 3 * 6) / 4 = 5, row 2 (5 + 3 * 1) / 4 = 2."""
    base = torch.full((1, 3, 1), 5.0)
    rows = [{1: torch.tensor([2.0])}, {1: torch.tensor([6.0]), 2: torch.tensor([1.0])}]
    field, _ = patched(base, [0, 0], rows)
    reply: Reply = {"w": field, "n": Stacked(torch.tensor([1, 3]))}
    for compiled in (False, True):
        got = folded(WeightedMean("n", {"w": base[0]}), [reply], compiled)
        assert got["w"].tolist() == [[5], [5], [2]]


def test_a_client_without_weight_takes_no_part_whatever_it_sent() -> None:
    """It took other steps, so its base is not what the mean is taken around, and is not finite."""
    bases = torch.stack([torch.ones(2, 1), torch.full((2, 1), NAN)])
    rows = [{0: torch.tensor([3.0])}, {1: torch.tensor([NAN])}]
    field, dense = patched(bases, [0, 1], rows)
    weights, forms = Stacked(torch.tensor([2, 0])), (field, Stacked(dense))
    replies: list[Reply] = [{"n": weights, "w": form} for form in forms]
    for compiled, reply in itertools.product((False, True), replies):
        got = folded(WeightedMean("n", {"w": bases[0]}), [reply], compiled)
        assert got["w"].tolist() == [[3], [1]]


@pytest.mark.parametrize("tail", [(), (2,), (2, 2), (3, 2)])
def test_slices_of_any_shape_fold_around_their_rest(tail: tuple[int, ...]) -> None:
    rng = np.random.default_rng(0)
    base, row = (torch.from_numpy(rng.normal(size=(n, *tail))) for n in (4, 1))
    field, dense = patched(base[None], [0, 0], [{1: row[0]}, {2: row[0]}])
    weights = Stacked(torch.tensor([1, 3]))
    expected = folded(WeightedMean("n", {"w": base}), [{"n": weights, "w": Stacked(dense)}], False)
    for compiled in (False, True):
        got = folded(WeightedMean("n", {"w": base}), [{"n": weights, "w": field}], compiled)
        assert_bits(got, expected)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_that_frames_carry_is_summed(dtype: torch.dtype, compiled: bool) -> None:
    sent = torch.tensor([[1, 0, 1], [0, 0, 1], [1, 0, 1]]).to(dtype)
    got = folded(Sum(), [{"t": Stacked(sent[:1])}, {"t": Stacked(sent[1:])}], compiled)["t"]
    assert got.long().tolist() == [2, 0, 3]  # of flags, a count


INTEGERS = [d for d in DTYPES if d is not torch.bool and not d.is_floating_point]


@pytest.mark.parametrize("is_grouped", [False, True])
@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
def test_a_sum_of_integers_that_would_wrap_is_refused(dtype: torch.dtype, is_grouped: bool) -> None:
    most = torch.iinfo(dtype).max
    large, rest = (torch.tensor([[0, n]], dtype=dtype) for n in (most - most // 4, most // 4))
    one = torch.tensor([[0, 2]], dtype=dtype)

    def sum_of(*parts: Tensor) -> Tensor:
        blocks = [torch.cat(parts)] if is_grouped else list(parts)
        return folded(Sum(), [{"t": Stacked(t)} for t in blocks], False)["t"]

    if dtype is not torch.int64 or not is_grouped:  # its sums by place are bounded in float64
        assert sum_of(large, rest).tolist() == [0, most]
    assert sum_of(rest, rest, one).tolist() == [0, 2 * (most // 4) + 2]
    with raises_code(ProtocolError, "field-out-of-bounds", field="reply"):
        sum_of(large, rest, one)


@pytest.mark.parametrize("weight", [2**9, 2**20])
def test_a_mean_of_integers_that_would_wrap_is_refused(weight: int) -> None:
    weights = torch.full((2,), weight, dtype=torch.int32)
    reply = {"n": Stacked(weights), "t": Stacked(torch.full((2, 3), 2**20, dtype=torch.int32))}
    if weight == 2**9:
        assert folded(WeightedMean("n"), [reply], False)["t"].tolist() == [2**20] * 3
    else:
        with raises_code(ProtocolError, "field-out-of-bounds", field="reply"):
            folded(WeightedMean("n"), [reply], False)


def test_slices_of_integers_have_one_shape() -> None:
    parts = [{"t": Stacked(torch.ones(1, n, dtype=torch.int32))} for n in (3, 1)]
    with raises_code(ProtocolError, "field-out-of-bounds", field="t"):
        folded(Sum(), parts, False)


@pytest.mark.parametrize("compiled", [False, True])
def test_strided_replies_fold_as_their_copies(compiled: bool) -> None:
    t = torch.from_numpy(np.random.default_rng(0).normal(size=(3, 2, 4))).transpose(1, 2)
    reduce, weights = WeightedMean("n"), Stacked(torch.tensor([1, 2, 3]))
    expected = folded(reduce, [{"n": weights, "t": Stacked(t.contiguous())}], compiled)
    assert_bits(folded(reduce, [{"n": weights, "t": Stacked(t)}], compiled), expected)


@pytest.mark.parametrize("large", [1, 5, 2**20])
def test_slices_added_at_once_change_no_bit(large: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    reply = {"n": Stacked(torch.arange(5)), "t": Stacked(torch.from_numpy(rng.normal(size=(5, 4))))}
    expected = folded(WeightedMean("n"), [reply], False)
    monkeypatch.setattr(fold_module, "LARGE", large)
    for compiled in (False, True):
        assert_bits(folded(WeightedMean("n"), [reply], compiled), expected)


@pytest.mark.parametrize("compiled", [False, True])
def test_folding_leaves_replies_and_reference_as_they_are(compiled: bool) -> None:
    base = torch.ones(1, 3, 2)
    field, _ = patched(base, [0, 0], [{0: torch.zeros(2)}, {}])
    weights = Stacked(torch.tensor([1, 2]))
    given = (base, field.t, weights.t)
    before = [t.clone() for t in given]
    for _ in range(2):
        folded(WeightedMean("n", {"w": base[0]}), [{"n": weights, "w": field}] * 2, compiled)
    assert all(torch.equal(a, b) for a, b in zip(given, before, strict=True))


@pytest.mark.parametrize("weights", [None, Stacked(torch.tensor([1.0, -1.0])), "patched"])
def test_a_mean_of_patches_needs_weights(weights: Stacked | str | None) -> None:
    field, _ = patched(torch.ones(1, 2, 1), [0, 0], [{}, {}])
    reply: Reply = {"w": field}
    if weights is not None:
        reply["n"] = field if isinstance(weights, str) else weights
    with pytest.raises(ProtocolError, match=r"^expected weights >= 0 in field 'n' of the reply"):
        Fold(WeightedMean("n")).add(reply)


@pytest.mark.parametrize("compiled", [False, True])
def test_a_fold_can_be_read_again(compiled: bool) -> None:
    """What was read keeps its numbers, as does what the mean is taken around."""
    base = torch.full((3, 2), 5.0)
    field, _ = patched(base[None], [0, 0], [{1: torch.zeros(2)}, {}])
    fold = Fold(WeightedMean("n", {"w": base}), compiled=compiled)
    fold.add({"w": field, "n": Stacked(torch.tensor([1, 3]))})
    first = fold.result()["w"].t
    assert first.tolist() == [[5, 5], [3.75, 3.75], [5, 5]]
    fold.add({"w": field, "n": Stacked(torch.tensor([1, 3]))})
    assert fold.result()["w"].t.tolist() == [[5, 5], [3.75, 3.75], [5, 5]]
    assert first.tolist() == [[5, 5], [3.75, 3.75], [5, 5]]
    assert base.tolist() == [[5, 5]] * 3


def test_runs_of_rows_are_not_folded() -> None:
    field = Ragged(torch.zeros(2), torch.tensor([0, 1, 2]))
    with pytest.raises(ProtocolError, match=r"^expected Stacked fields .* got Ragged for 'w'$"):
        Fold(Sum()).add({"w": field})


@pytest.mark.law(sample=6)
@pytest.mark.parametrize("batch_size", [None, 3])
@pytest.mark.parametrize("kernels", ["compiled", "torch"])
def test_patched_replies_lose_nothing_on_the_wire(
    make_graph: MakeGraph, kernels: str, batch_size: int | None
) -> None:
    """With batches, clients take different numbers of steps, and rest at different places."""
    graph = make_graph(60, features=20, sparse=True)
    for block_size in (1, 3, 5):
        options = {"clients": 5, "kernels": kernels, "block_size": block_size, "rounds": 3}
        options["method"] = "fedavg"
        plain, strict = (
            go(graph, **options, batch_size=batch_size, strict=strict) for strict in (False, True)
        )
        assert same_bits(weights_of(plain), weights_of(strict))
        assert rows_of(plain) == rows_of(strict)
        assert list(plain.ledger.records) == list(strict.ledger.records)


@pytest.mark.parametrize("compiled", [False, True])
def test_a_sum_of_rows_in_zeros_adds_those_rows_only(compiled: bool) -> None:
    """Gradients of sparse features: the same bits as whole slices."""
    generator = torch.Generator().manual_seed(0)
    rows = [{0: torch.randn(3, generator=generator), 4: torch.randn(3, generator=generator)}, {}]
    rows.append({4: torch.randn(3, generator=generator)})
    field, dense = patched(torch.zeros(1, 5, 3), [0, 0, 0], rows)
    sparse, whole = Fold(Sum(), compiled=compiled), Fold(Sum(), compiled=compiled)
    sparse.add({"w": field})
    whole.add({"w": Stacked(dense)})
    assert torch.equal(sparse.result()["w"].t, whole.result()["w"].t)
    other = Fold(Sum(), compiled=compiled)  # a base that is not 0 counts for every client
    field, dense = patched(torch.ones(1, 5, 3), [0, 0, 0], rows)
    other.add({"w": field})
    torch.testing.assert_close(other.result()["w"].t, dense.sum(0))


WRONG_PLACES = {
    "negative place": {"index": torch.tensor([-1, 2])},
    "place beyond the base": {"index": torch.tensor([0, 3])},
    "base that is not there": {"which": torch.tensor([0, 7])},
    "offsets beyond the rows": {"off": torch.tensor([0, 1, 9])},
}


@pytest.mark.parametrize("wrong", WRONG_PLACES)
def test_places_that_are_none_never_reach_the_kernel_of_slices(wrong: str) -> None:
    """Bases other than what the mean is taken around: their kernel looks at no bounds."""
    base = torch.ones(1, 3, 1)
    field, dense = patched(base, [0, 0], [{0: torch.tensor([2.0])}, {2: torch.tensor([6.0])}])
    weights = Stacked(torch.tensor([1, 3]))
    whole = folded(WeightedMean("n"), [{"w": Stacked(dense), "n": weights}], True)
    assert torch.equal(
        folded(WeightedMean("n"), [{"w": field, "n": weights}], True)["w"], whole["w"]
    )
    broken = replace(field, **WRONG_PLACES[wrong])
    with pytest.raises(ProtocolError, match="in a reply that is reduced"):
        folded(WeightedMean("n"), [{"w": broken, "n": weights}], True)


def test_rows_out_of_order_are_added_to_their_places() -> None:
    base = torch.ones(1, 3, 1)
    field, dense = patched(base, [0], [{0: torch.tensor([2.0]), 2: torch.tensor([6.0])}])
    turned = replace(field, t=field.t.flip(0), index=field.index.flip(0))
    weights = Stacked(torch.tensor([2]))
    for compiled in (False, True):
        mean = folded(WeightedMean("n"), [{"w": turned, "n": weights}], compiled)["w"]
        assert torch.equal(mean, dense[0])
