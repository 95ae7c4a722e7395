"""Laws of masked sums of rows: their totals, who learns what, and what is refused.

The oracle is the plain sum modulo 2^64. What coalitions learn is enumerated in a small ring: every
mask and pad takes every value.
"""

import itertools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.stats import chisquare

from mistakes import raises_code
from silograph.core.errors import CheckpointError, ProtocolError
from silograph.core.payload import Payload, Ragged, Shared
from silograph.federation.field_specs import FieldSpec
from silograph.federation.secure import row_form, row_masks
from silograph.federation.secure.fixed_point import FixedPoint
from silograph.federation.secure.protocol import NO_PROVER, Prover
from silograph.federation.secure.row_form import (
    MOST_CONTRIBUTORS,
    RowNames,
    decode_rows,
    encode_rows,
)
from silograph.federation.secure.row_masks import NOBODY, Agreement, RowMasker, RowMasks
from silograph.federation.secure.row_sets import RowSets
from silograph.federation.secure.sums import SecureSums, SumError

ABOUT, WIDTH = b"rows 1", 3
SILOS = ("a", "b", "c", "d")
# Owner and contributors of each node that several silos know.
ROWS: Mapping[str, tuple[str, str]] = {
    "a0": ("a", "bcd"),
    "a1": ("a", "bd"),
    "b0": ("b", "ac"),
    "c0": ("c", "d"),
    "d0": ("d", "abc"),
    "d1": ("d", "bc"),
}


def name_of(node: str) -> int:
    return int.from_bytes(blake2b(node.encode(), digest_size=8).digest(), "little", signed=True)


def slots_of(silo: str) -> list[str]:
    """Return the nodes of a silo's slots, in an order of its own."""
    return sorted((n for n, (_, by) in ROWS.items() if silo in by), key=lambda n: name_of(silo + n))


def rows_of(silo: str) -> list[str]:
    return [node for node, (owner, _) in ROWS.items() if owner == silo]


def names_at(silo: str) -> RowNames:
    slots, rows = slots_of(silo), rows_of(silo)
    links = [(rows.index(n), other) for n in rows for other in ROWS[n][1]]
    return RowNames.of(
        np.array([name_of(n) for n in slots], np.int64),
        tuple(ROWS[n][0] for n in slots),
        np.array([name_of(n) for n in rows], np.int64),
        links,
    )


def sets_of(nodes: Sequence[str], contributors: Mapping[str, str]) -> np.ndarray:
    bits = [sum(1 << SILOS.index(silo) for silo in contributors[node]) for node in nodes]
    return np.array(bits, np.uint8).reshape(-1, 1)


CONTRIBUTORS = {node: by for node, (_, by) in ROWS.items()}


@dataclass
class Pass:
    """The silos of one pass, and what each is told of it."""

    silos: dict[str, RowMasks]
    told: dict[str, Agreement]

    def agree(self, silo: str) -> None:
        self.silos[silo].agree(self.told[silo], names_at(silo))


def offered(
    prover: Callable[[str], Prover] = lambda _: NO_PROVER,
    contributors: Callable[[str], Mapping[str, str]] = lambda _: CONTRIBUTORS,
    away: str = "",
) -> Pass:
    """Return a pass in which keys were offered; `contributors`: as the server tells each silo."""
    silos = {name: RowMasks(name, ABOUT, prover(name)) for name in SILOS}
    offers = [NOBODY if name in away else silos[name].offer() for name in SILOS]
    keys = np.frombuffer(b"".join(offers), np.uint8).reshape(len(SILOS), -1)
    told = {
        name: Agreement(
            SILOS,
            keys,
            sets_of(slots_of(name), contributors(name)),
            sets_of(rows_of(name), contributors(name)),
        )
        for name in SILOS
    }
    return Pass(silos, told)


def agreed(
    contributors: Callable[[str], Mapping[str, str]] = lambda _: CONTRIBUTORS, away: str = ""
) -> Pass:
    started = offered(contributors=contributors, away=away)
    for name in SILOS:
        if name not in away:
            started.agree(name)
    return started


def parts_of(silo: str, seed: int = 0) -> np.ndarray:
    draw = np.random.default_rng([SILOS.index(silo), seed])
    return draw.integers(-(2**50), 2**50, (len(slots_of(silo)), WIDTH))


def added(nodes: Sequence[str], messages: Mapping[str, np.ndarray]) -> np.ndarray:
    """Return the sums that the server adds up for some rows; it drops silos without a message."""
    total = np.zeros((len(nodes), WIDTH), np.int64)
    for silo, message in messages.items():
        for place, node in enumerate(slots_of(silo)):
            if node in nodes:
                total[list(nodes).index(node)] += message[place]
    return total


@pytest.mark.parametrize("calls", [1, 3])
def test_receivers_get_the_sums_of_all_parts(calls: int) -> None:
    started = agreed()
    for seed in range(calls):
        parts = {name: parts_of(name, seed) for name in SILOS}
        masked = {name: started.silos[name].mask(parts[name], None) for name in SILOS}
        assert all((masked[name] != parts[name]).all() for name in SILOS)
        for name in SILOS:
            nodes = rows_of(name)
            total = started.silos[name].unmask(added(nodes, masked), None)
            assert (total == added(nodes, parts)).all()


def test_rows_that_are_left_out_spoil_no_other() -> None:
    """All contributors leave out the rows with fewer than two; the server may leave out more."""
    started, parts, masked = agreed(), {}, {}
    for name in SILOS:
        slots = slots_of(name)
        sent = np.array([i for i, n in enumerate(slots) if len(ROWS[n][1]) >= 2])
        parts[name] = parts_of(name)
        masked[name] = np.zeros_like(parts[name])
        masked[name][sent] = started.silos[name].mask(parts[name][sent], sent)
    for name in "abd":
        nodes = rows_of(name)[-1:]
        place = np.array([rows_of(name).index(nodes[0])])
        total = started.silos[name].unmask(added(nodes, masked), place)
        assert (total == added(nodes, parts)).all()


def test_slots_that_take_no_part_change_nothing() -> None:
    """A method may draw the slots of a pass: then keys and sets are of these only."""
    drawn = {"a0": "bc", "a1": "", "b0": "a", "c0": "d", "d0": "ab", "d1": "c"}
    started = offered()
    parts, masked = {}, {}
    for name in SILOS:
        slots = slots_of(name)
        part = np.array([i for i, n in enumerate(slots) if name in drawn[n]])
        nodes = [slots[i] for i in part]
        told = replace(
            started.told[name],
            slot_sets=sets_of(nodes, drawn),
            row_sets=sets_of(rows_of(name), drawn),
        )
        started.silos[name].agree(told, names_at(name).with_part(part))
        parts[name] = np.zeros_like(parts_of(name))
        parts[name][part] = parts_of(name)[part]
        masked[name] = np.zeros_like(parts[name])
        masked[name][part] = started.silos[name].mask(parts[name][part], None)
    for name in SILOS:
        nodes = [n for n in rows_of(name) if drawn[n]]
        place = np.array([rows_of(name).index(n) for n in nodes])
        total = started.silos[name].unmask(added(nodes, masked), place)
        assert (total == added(nodes, parts)).all()


@pytest.mark.parametrize("form", [row_form.ROWS, row_form.GRADIENTS])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_parts_are_rounded_and_their_sums_exact(form: FixedPoint, dtype: torch.dtype) -> None:
    draw = torch.Generator().manual_seed(1)
    rows = form.bound * (2 * torch.rand(MOST_CONTRIBUTORS, 4, generator=draw, dtype=dtype) - 1)
    rows[:, 0] = form.bound  # so many of the largest parts do not overflow
    encoded = encode_rows(rows, form)
    half = 2.0 ** -(form.bits + 1)
    decoded = decode_rows(encoded, form, rows.double())
    torch.testing.assert_close(decoded, rows.double(), rtol=0, atol=half)
    total = decode_rows(encoded.sum(0, keepdim=True), form, rows.double())
    torch.testing.assert_close(total, decoded.sum(0, keepdim=True), rtol=1e-15, atol=half)
    assert decode_rows(encoded, form, rows).dtype is dtype
    for wrong in (2 * form.bound, -2 * form.bound, float("nan")):
        with raises_code(ProtocolError, "field-out-of-bounds", field="rows"):
            encode_rows(torch.full((1, 1), wrong, dtype=dtype), form)


# --- Who learns what -----------------------------------------------------------------------------


def test_what_a_silo_sends_is_uniform_and_never_the_same() -> None:
    draws: list[np.ndarray] = []
    for _ in range(40):
        started = agreed()
        for _ in range(2):
            zeros = {name: np.zeros_like(parts_of(name)) for name in SILOS}
            masked = {name: started.silos[name].mask(zeros[name], None) for name in SILOS}
            draws.extend(masked.values())
            for name in SILOS:
                started.silos[name].unmask(added(rows_of(name), masked), None)
    values = np.concatenate([d.ravel() for d in draws]).view(np.uint64)
    assert len(np.unique(values)) == len(values)  # of 64 bits none occurs twice
    for shift in (0, 28, 56):
        counts = np.bincount(((values >> np.uint64(shift)) & np.uint64(255)).astype(int))
        assert chisquare(np.pad(counts, (0, 256 - len(counts)))).pvalue > 1e-6


def coefficients(node: str, monkeypatch: pytest.MonkeyPatch) -> tuple[np.ndarray, list[str]]:
    """Return by what each mask of a row counts in each contributor's message, (|S|, masks).

    And for each mask the two silos that know it.
    """
    seeds: dict[bytes, set[str]] = {}
    used: list[tuple[str, bytes, int]] = []
    at = ""

    def add_stream(
        self: RowMasks,
        total: np.ndarray,
        place: np.ndarray,
        width: int,
        rows: row_masks.RowList,
        secret: bytes,
        purpose: bytes,
        *,
        subtract: bool = False,
    ) -> None:
        slot = slots_of(at).index(node)
        if slot in rows.places:
            seed = secret + purpose + rows.digest
            seeds.setdefault(seed, set()).add(at)
            used.append((at, seed, -1 if subtract else 1))

    started = agreed()
    owner, contributors = ROWS[node]
    with monkeypatch.context() as patched:
        patched.setattr(RowMasks, "_add_stream", add_stream)
        for at in contributors:
            started.silos[at].mask(np.zeros_like(parts_of(at)), None)
    matrix = np.zeros((len(contributors), len(seeds)), int)
    for silo, seed, sign in used:
        matrix[contributors.index(silo), list(seeds).index(seed)] += sign
    return matrix, ["".join(sorted(k if len(k) == 2 else k | {owner})) for k in seeds.values()]


@pytest.mark.parametrize(
    ("coalition", "learns"),
    [
        ("", "nothing"),  # the server alone, as in all that follow
        ("d", "nothing"),  # with a contributor: its own part, which it knows
        ("a", "sum"),  # with the receiver
        ("ad", "sum"),  # and one of three contributors
        ("acd", "all"),  # of all but one the last one's part is left over
    ],
)
def test_coalitions_learn_sums_of_the_others_only(
    coalition: str, learns: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the ring of 3 numbers the view's distribution depends on nothing but what is learned."""
    ring = 3
    matrix, known_by = coefficients("a0", monkeypatch)
    honest = [i for i, silo in enumerate(ROWS["a0"][1]) if silo not in coalition]
    secret = [k for k, pair in enumerate(known_by) if not set(pair) & set(coalition)]
    draws = list(itertools.product(range(ring), repeat=len(secret)))
    masks = np.array(draws, int).reshape(len(draws), len(secret))
    views: dict[tuple[int, ...], set[frozenset[tuple[bytes, int]]]] = {}
    for parts in itertools.product(range(ring), repeat=len(honest)):
        messages = (np.array(parts) + masks @ matrix[np.ix_(honest, secret)].T) % ring
        view = frozenset(Counter(row.tobytes() for row in messages).items())
        known = {"nothing": (), "sum": (sum(parts) % ring,), "all": parts}[learns]
        views.setdefault(known, set()).add(view)
    assert all(len(same) == 1 for same in views.values())
    assert len(set().union(*views.values())) == len(views)  # and that much is learned


# --- Rows that are not summed --------------------------------------------------------------------


def sent_keys(started: Pass) -> dict[str, np.ndarray]:
    """Let all silos seal and open keys of rows; return where the rows of slots stand."""
    sealed: dict[tuple[str, str], np.ndarray] = {}
    for name in SILOS:
        others = sorted({other for n in rows_of(name) for other in ROWS[n][1]})
        positions = np.array([SILOS.index(other) for other in others])
        rows = started.silos[name].seal_row_key(positions)
        sealed |= {(name, other): row for other, row in zip(others, rows, strict=True)}
    place = {}
    for name in SILOS:
        owners = sorted({ROWS[n][0] for n in slots_of(name)})
        place[name] = np.array([rows_of(ROWS[n][0]).index(n) for n in slots_of(name)])
        keys = np.stack([sealed[owner, name] for owner in owners])
        positions = np.array([SILOS.index(owner) for owner in owners])
        started.silos[name].open_row_keys(positions, keys, place[name])
    return place


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_rows_that_are_not_summed_reach_their_receivers(dtype: type[np.signedinteger]) -> None:
    started = agreed()
    sent_keys(started)
    seen = []
    for call in range(3):
        rows = {node: np.full(WIDTH, 100 * call + place, dtype) for place, node in enumerate(ROWS)}
        sent: dict[str, np.ndarray] = {}
        for name in SILOS:
            own = np.stack([rows[node] for node in rows_of(name)])
            encrypted = started.silos[name].encrypt_rows(own, np.arange(len(own)))
            sent |= dict(zip(rows_of(name), encrypted, strict=True))
            seen.append(encrypted)
        for name in SILOS:
            words = np.stack([sent[node] for node in slots_of(name)])
            decrypted = started.silos[name].decrypt_rows(words)
            assert (decrypted == np.stack([rows[node] for node in slots_of(name)])).all()
    values = np.concatenate([part.ravel() for part in seen])
    assert len(np.unique(values)) >= len(values) - 1  # 54 values: two of 32 bits may be the same


def test_keys_of_rows_are_for_silos_with_edges_to_them() -> None:
    started = agreed()
    with raises_code(SumError, "secure-sum", silo=""):
        started.silos["c"].seal_row_key(np.array([SILOS.index("a")]))  # c0 is d's alone
    place = sent_keys(started)
    foreign = started.silos["a"].seal_row_key(np.array([1, 2, 3]))
    owners = np.array([SILOS.index(name) for name in ("a", "c", "d")])
    with raises_code(SumError, "secure-sum", silo=""):
        started.silos["b"].open_row_keys(owners, foreign, place["b"])
    with raises_code(SumError, "secure-sum", silo=""):  # d seals for c, which has no rows of b
        started.silos["b"].open_row_keys(owners[:1], foreign[:1] ^ np.uint8(1), place["b"])
    with raises_code(SumError, "secure-sum", silo=""):
        started.silos["b"].decrypt_rows(np.zeros((1, WIDTH), np.int32))


# --- What is refused or noticed ------------------------------------------------------------------


def test_each_step_is_taken_once_and_in_order() -> None:
    started = offered()
    silo, zeros = started.silos["b"], np.zeros_like(parts_of("b"))
    total = np.zeros((1, WIDTH), np.int64)
    with raises_code(SumError, "secure-sum", silo=""):
        silo.mask(zeros, None)
    with raises_code(SumError, "secure-sum", silo=""):
        silo.unmask(total, None)
    started.agree("b")
    with raises_code(SumError, "secure-sum", silo=""):
        started.agree("b")  # a mask of these keys would serve twice
    silo.mask(zeros, None)
    with raises_code(SumError, "secure-sum", silo=""):
        silo.mask(zeros, None)
    with raises_code(SumError, "secure-sum", silo=""):
        silo.mask(zeros[:1], None)


def test_a_sum_is_unmasked_once() -> None:
    started = agreed()
    masked = {name: started.silos[name].mask(parts_of(name), None) for name in SILOS}
    started.silos["a"].unmask(added(rows_of("a"), masked), None)
    with raises_code(SumError, "secure-sum", silo=""):
        started.silos["a"].unmask(added(rows_of("a"), masked), None)


@pytest.mark.parametrize("silo", ["a", "d"])
def test_a_sum_without_a_part_is_noticed(silo: str) -> None:
    started = agreed()
    masked = {name: started.silos[name].mask(parts_of(name), None) for name in SILOS if name != "b"}
    started.silos["b"].mask(parts_of("b"), None)
    with raises_code(SumError, "secure-sum", silo=""):
        started.silos[silo].unmask(added(rows_of(silo), masked), None)


def test_silos_that_are_told_other_contributors_send_noise() -> None:
    """The server tells c that d1 has its part alone, and b that it has both."""
    started = agreed(lambda name: CONTRIBUTORS | ({"d1": "c"} if name == "c" else {}))
    masked = {name: started.silos[name].mask(parts_of(name), None) for name in SILOS}
    with raises_code(SumError, "secure-sum", silo=""):
        started.silos["d"].unmask(added(rows_of("d"), masked), None)


def test_masks_of_a_row_without_one_of_its_silos_are_noise() -> None:
    """The server lacks d: of the rows with it nobody has a sum, of the others all do."""
    started = agreed(away="d")
    zeros = {name: np.zeros_like(parts_of(name)) for name in "abc"}
    first = {name: started.silos[name].mask(zeros[name], None) for name in "abc"}
    total = started.silos["b"].unmask(added(["b0"], first), np.array([0]))
    assert (total == 0).all()
    with raises_code(SumError, "secure-sum", silo=""):
        started.silos["a"].unmask(added(rows_of("a"), first), None)


@pytest.mark.parametrize(
    "contributors",
    [
        {"a0": "cd"},  # b, who is told so, has a slot for it
        {"d0": "abcd"},  # its owner among them
        {"b0": "acd"},  # d has no edge to it
    ],
)
def test_contributors_that_cannot_be_are_refused(contributors: dict[str, str]) -> None:
    started = offered(contributors=lambda _: CONTRIBUTORS | contributors)
    with raises_code(SumError, "secure-sum", silo=""):
        started.agree("b")


def maskings(folder: Path, checks: bool) -> dict[str, RowMasker]:
    """Return what masks the rows of each silo in a run; `checks`: whether sets are compared."""
    sums = SecureSums(len(SILOS), 2, secret=b"s" * 32, needs_proofs=True)
    return {
        name: RowMasker(
            name,
            sums,
            b"run",
            names_at(name),
            RowSets(folder / f"{name}.json") if checks else RowSets(),
        )
        for name in SILOS
    }


def ragged(values: np.ndarray) -> Ragged:
    return Ragged(torch.from_numpy(values.copy()), torch.tensor([0, len(values)]))


def sums_of_pass(
    silos: Mapping[str, RowMasker],
    agreement_of: Callable[[str], Mapping[str, str]],
    without: str = "",
) -> np.ndarray:
    """Return the sums that a receives in a pass; the server drops what silo `without` sends."""
    key = {"key": FieldSpec(Ragged, masking="key")}
    keys = {"keys": FieldSpec(Shared, masking="keys")}
    part = {"rows": FieldSpec(Ragged, masking="part")}
    total = {"sum": FieldSpec(Ragged, masking="sum")}
    room = {"key": ragged(np.zeros((1, 64), np.uint8))}
    offers = {n: silos[n].mask_reply(key, room, {}, 1)["key"].t[0] for n in SILOS}
    names = torch.tensor(list("\n".join(SILOS).encode()), dtype=torch.uint8)
    for name in SILOS:
        inbox: Payload = {
            "silos": Shared(names),
            "keys": Shared(torch.stack([offers[n] for n in SILOS])),
            "slot_silos": ragged(sets_of(slots_of(name), agreement_of(name))),
            "row_silos": ragged(sets_of(rows_of(name), agreement_of(name))),
        }
        silos[name].unmask_inbox(keys, inbox)
    masked = {
        name: silos[name]
        .mask_reply(part, {"rows": ragged(parts_of(name))}, {}, 1)["rows"]
        .t.numpy()
        for name in SILOS
        if name != without
    }
    sent = {"sum": ragged(added(rows_of("a"), masked))}
    return silos["a"].unmask_inbox(total, sent)["sum"].t.numpy()


def test_a_second_pass_without_one_contributor_is_refused(tmp_path: Path) -> None:
    """Server and owner would subtract; two silos contribute to the row in each pass."""
    row = rows_of("a").index("a0")
    without_c = {"a0": "bd"}

    def lying(name: str) -> Mapping[str, str]:
        return CONTRIBUTORS if name == "c" else CONTRIBUTORS | without_c

    # What it is about: where nobody compares, the owner gets two sums.
    silos = maskings(tmp_path, checks=False)
    first = sums_of_pass(silos, lambda _: CONTRIBUTORS)
    silos = maskings(tmp_path, checks=False)
    second = sums_of_pass(silos, lying, without="c")
    left = parts_of("c")[slots_of("c").index("a0")]
    np.testing.assert_array_equal(first[row] - second[row], left)
    # The owner refuses, also in a later process.
    sums_of_pass(maskings(tmp_path, checks=True), lambda _: CONTRIBUTORS)
    for silos in (maskings(tmp_path, checks=True), maskings(tmp_path, checks=True)):
        with raises_code(SumError, "secure-sum", silo=""):
            sums_of_pass(silos, lying, without="c")
    again = sums_of_pass(maskings(tmp_path, checks=True), lambda _: CONTRIBUTORS)
    np.testing.assert_array_equal(again, first)


def test_rows_have_the_same_contributors_or_none(tmp_path: Path) -> None:
    path = tmp_path / "row_sets.json"
    nodes = ["a0", "a1"]
    some = {"a0": "bcd", "a1": ""}
    RowSets(path).check(SILOS, sets_of(nodes, some))
    assert path.stat().st_mode & 0o077 == 0
    sets = RowSets(path)
    sets.check(SILOS, sets_of(nodes, {"a0": "", "a1": ""}))
    sets.check(SILOS, sets_of(nodes, {"a0": "", "a1": "bd"}))
    sets = RowSets(path)
    sets.check(SILOS, sets_of(nodes, {"a0": "bcd", "a1": "bd"}))
    for other in ({"a0": "bd", "a1": "bd"}, {"a0": "", "a1": "b"}):
        with raises_code(SumError, "secure-sum", silo=""):
            sets.check(SILOS, sets_of(nodes, other))
    for silos in (("b", "a", "c", "d"), (*SILOS, "e")):  # other names for the same bits
        with raises_code(SumError, "secure-sum", silo=""):
            sets.check(silos, sets_of(nodes, some))
    for text in ("[]", "{}", "", '{"silos": ["a"], "shape": [2, 1], "sets": "00"}'):
        path.write_text(text)
        with raises_code(CheckpointError, "damaged-file", path=str(path)):
            RowSets(path)


def test_keys_of_another_silo_are_refused() -> None:
    started = offered()
    told = started.told["b"]
    twice, foreign = told.offers.copy(), told.offers.copy()
    twice[2] = twice[0]
    foreign[1] = foreign[2]
    with raises_code(SumError, "secure-sum", silo="c"):
        RowMasks.agree(started.silos["b"], replace(told, offers=twice), names_at("b"))
    none = told.offers.copy()
    none[0, :32] = 255  # no point of the curve in its only form
    with raises_code(SumError, "secure-sum", silo="a"):
        RowMasks.agree(started.silos["b"], replace(told, offers=none), names_at("b"))
    others = (
        replace(told, offers=foreign),
        replace(told, silos=("a", "x", "c", "d")),
        replace(told, silos=("a", "b", "c", "c")),
        replace(told, silos=SILOS[:3]),
        replace(told, slot_sets=told.slot_sets[:1]),
        replace(told, row_sets=told.row_sets | np.uint8(128)),
    )
    for other in others:
        with raises_code(SumError, "secure-sum", silo=""):
            RowMasks.agree(started.silos["b"], other, names_at("b"))


def test_keys_are_proved_by_the_silos_secret() -> None:
    def prover(name: str) -> Prover:
        return Prover(b"another" if name == "c" else b"secret", b"run", is_strict=name == "b")

    started = offered(prover)
    with raises_code(SumError, "secure-sum", silo="c"):
        started.agree("b")
    started.agree("a")  # who asks for no proof
    replayed = offered(lambda _: Prover(b"secret", b"run", is_strict=True))
    moved = replayed.told["b"].offers.copy()
    moved[[0, 2]] = moved[[2, 0]]  # a proof names the silo
    with raises_code(SumError, "secure-sum", silo="a"):
        replayed.silos["b"].agree(replace(replayed.told["b"], offers=moved), names_at("b"))
