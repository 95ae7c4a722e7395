"""Attacks on secure sums by a server that lies, alone or with silos, and by hostile silos.

Each attack is carried out as far as the other side lets it go.
"""

from collections.abc import Collection, Mapping
from dataclasses import replace
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest

from mistakes import raises_code
from silograph.core.errors import CheckpointError
from silograph.federation.secure.masks import FIELD, KeyPair
from silograph.federation.secure.partners import (
    holders_are_present,
    partners_of,
    ring_of,
    topology_of,
)
from silograph.federation.secure.protocol import (
    PRESENT,
    VANISHED,
    Prover,
    PublicKeys,
    ServerSum,
    SiloSum,
)
from silograph.federation.secure.revealed import (
    RevealedError,
    RevealedSums,
    allowed_silos,
    digest_of_values,
)
from silograph.federation.secure.sizes import digest_of_names
from silograph.federation.secure.sums import SumError

ABOUT, SIZE = b"1 1 train", 4
RUN = b"run"
LOW_ORDER = (0, 1, FIELD - 1)  # coordinates of points with which everybody shares the secret 0


def names_of(count: int) -> list[str]:
    return [f"silo{i:02}" for i in range(count)]


def values_for(names: Collection[str]) -> dict[str, np.ndarray]:
    return {name: np.full(SIZE, pow(3, 1 + i, 2**63), np.uint64) for i, name in enumerate(names)}


def masked_sum(
    values: Mapping[str, np.ndarray],
    histories: Mapping[str, RevealedSums] | None = None,
    *,
    least: int = 2,
    about: bytes = ABOUT,
    gone: Collection[str] = (),
) -> tuple[ServerSum, dict[str, SiloSum]]:
    """Take a sum up to the masked values; `gone` silos send none."""
    own = histories or {}
    silos = {n: SiloSum(n, about, least, history=own.get(n)) for n in values}
    server = ServerSum(about)
    for name, silo in silos.items():
        server.add_keys(name, silo.advertise(), silo.seed)
    for name, silo in silos.items():
        dealt = silo.share(server.keys_for(name), server.silos, server.seed)
        server.add_shares(name, dealt)
    for name, silo in silos.items():
        if name not in gone:
            server.add_masked(name, silo.mask(values[name], server.shares_for(name)))
    return server, silos


def unmasked(server: ServerSum, silos: Mapping[str, SiloSum]) -> np.ndarray:
    for name in server.present:
        server.add_confirmed(name, silos[name].confirm(server.states))
    for name in server.present:
        server.add_revealed(name, silos[name].reveal(server.tags_for(name)))
    return server.unmask()


# --- A server that tells silos unlike lists ------------------------------------------------------


@pytest.mark.parametrize("count", [3, 4, 5])
def test_no_two_lists_are_confirmed_whatever_the_server_tells_whom(count: int) -> None:
    """Silos release shares for one list at most: of every way to split them between two lists."""
    names = names_of(count)
    threshold = topology_of(count).threshold
    first = dict.fromkeys(names, PRESENT)
    second = first | {names[-1]: VANISHED}
    if sum(state == PRESENT for state in second.values()) < threshold:
        server, silos = masked_sum(values_for(names))
        with raises_code(SumError, "secure-sum", silo=""):
            silos[names[0]].confirm(second)
        return
    for size in range(1, count):
        for told in combinations(names[:-1], size):  # the last one would refuse the second
            server, silos = masked_sum(values_for(names))
            lists = {name: second if name in told else first for name in names}
            for name in names:
                server.add_confirmed(name, silos[name].confirm(lists[name]))
            released: set[str] = set()
            for name in names:
                try:
                    silos[name].reveal(server.tags_for(name))
                except SumError:
                    continue
                released.add("second" if name in told else "first")
            assert len(released) <= 1
            assert released <= {"first"} or size >= threshold


def test_tags_of_another_list_or_silo_or_sum_confirm_nothing() -> None:
    names = names_of(4)
    server, silos = masked_sum(values_for(names))
    other_server, others = masked_sum(values_for(names))
    for name in names:
        server.add_confirmed(name, silos[name].confirm(server.states))
        other_server.add_confirmed(name, others[name].confirm(other_server.states))
    good = server.tags_for(names[0])
    assert len(good) == 3
    for forged in (
        {},
        dict.fromkeys(good, bytes(16)),
        other_server.tags_for(names[0]),
        server.tags_for(names[1]),  # for another receiver
        dict(zip(good, [*list(good.values())[1:], good[names[1]]], strict=True)),  # of others
    ):
        silos[names[0]]._steps[:] = ["keys", "shares", "masked", "confirmed"]
        with raises_code(SumError, "secure-sum", silo=""):
            silos[names[0]].reveal(forged)


def test_a_sum_has_as_many_silos_as_each_of_them_demands() -> None:
    """Also with shares for which fewer would do."""
    values = values_for(names_of(10))
    server, silos = masked_sum(values, least=9, gone=["silo04", "silo07"])
    with raises_code(SumError, "secure-sum", silo=""):
        silos["silo00"].confirm(server.states)
    server, silos = masked_sum(values, least=8, gone=["silo04", "silo07"])
    assert int(unmasked(server, silos)[0]) == sum(
        int(v[0]) for n, v in values.items() if n not in ("silo04", "silo07")
    )


# --- Second sums of the same values --------------------------------------------------------------


def histories_of(names: Collection[str], folder: Path | None = None) -> dict[str, RevealedSums]:
    return {n: RevealedSums(None if folder is None else folder / f"{n}.jsonl") for n in names}


def test_a_repeated_round_without_one_silo_is_not_unmasked(tmp_path: Path) -> None:
    """The server would subtract: also where silos were started anew meanwhile."""
    names = names_of(5)
    values = values_for(names)
    first = unmasked(*masked_sum(values, histories_of(names, tmp_path)))
    rest = {name: values[name] for name in names[:-1]}
    # What it is about: without history the difference is the value of the silo that is left out.
    second = unmasked(*masked_sum(rest))
    np.testing.assert_array_equal(first - second, values[names[-1]])
    server, silos = masked_sum(rest, histories_of(names, tmp_path))  # read from the files
    for name in rest:
        with raises_code(RevealedError, "secure-sum", silo="") as caught:
            silos[name].confirm(server.states)
        assert caught.value.revealed == frozenset(names)  # type: ignore[attr-defined]
    # The same silos again tell nothing new.
    again = unmasked(*masked_sum(values, histories_of(names, tmp_path)))
    np.testing.assert_array_equal(again, first)


def test_the_same_values_in_a_later_round_are_the_same_values() -> None:
    names = names_of(5)
    values, histories = values_for(names), histories_of(names)
    unmasked(*masked_sum(values, histories))
    rest = {name: values[name] for name in names[:-1]}
    server, silos = masked_sum(rest, histories, about=b"2 1 train")
    with raises_code(RevealedError, "secure-sum", silo=""):
        silos[names[0]].confirm(server.states)
    others = {name: v + np.uint64(1) for name, v in rest.items()}
    unmasked(*masked_sum(others, histories, about=b"2 1 train"))


def unmasked_values(
    sums: Collection[Collection[str]],
    values: Mapping[str, np.ndarray],
    least: int,
    histories: Mapping[str, RevealedSums],
) -> list[np.ndarray]:
    """Return the sums of these silos that are unmasked, each silo with a history of its own."""
    totals = []
    for silos in sums:
        mine = {name: values[name] for name in silos}
        try:
            totals.append(unmasked(*masked_sum(mine, histories, least=least)))
        except SumError:
            continue
    return totals


@pytest.mark.parametrize("least", [2, 3, 5])
@pytest.mark.parametrize("attack", ["three groups", "all but one in two parts"])
def test_no_combination_of_sums_is_the_value_of_one_silo(least: int, attack: str) -> None:
    """The server repeats a round with silos of its choice; no silo sees all of the sums.

    (AB + AC - BC) / 2 is A, of one silo; so is the sum of all without those of two parts.
    """
    names = names_of(2 * max(least, 3) + 1)
    victim, half = names[0], len(names) // 2
    parts = [names[1 : half + 1], names[half + 1 :]]
    sums, weights, factor = [names, *parts], [1, -1, -1], 1
    if attack == "three groups":
        b, c = names[1:least], names[least : 2 * least - 1]
        sums, weights, factor = [[victim, *b], [victim, *c], [*b, *c]], [1, 1, -1], 2
    values = values_for(names)
    # What it is about: without histories the victim's value is left.
    totals = unmasked_values(sums, values, least, {})
    left = sum(w * t.astype(object) for w, t in zip(weights, totals, strict=True))
    np.testing.assert_array_equal(left, factor * values[victim].astype(object))
    totals = unmasked_values(sums, values, least, histories_of(names))
    assert len(totals) == 1
    np.testing.assert_array_equal(totals[0], sum(values[name] for name in sums[0]))


@pytest.mark.parametrize("asked", ["not at all", "to confirm"])
def test_a_sum_that_was_unmasked_without_a_silo_counts_for_it(asked: str, tmp_path: Path) -> None:
    """The server lists silos as present and leaves out their last steps; others are enough."""
    names = names_of(10)
    values, silent = values_for(names), names[7:]
    server, silos = masked_sum(values, histories_of(names, tmp_path))
    active = names[:7]
    for name in active if asked == "not at all" else names:
        server.add_confirmed(name, silos[name].confirm(server.states))
    for name in active:
        server.add_revealed(name, silos[name].reveal(server.tags_for(name)))
    np.testing.assert_array_equal(server.unmask(), sum(values.values()))
    # The silent ones were told of no unmasked sum, and are now asked for one of their own.
    rest = {name: values[name] for name in silent}
    server, silos = masked_sum(rest, histories_of(names, tmp_path))  # read from the files
    for name in silent:
        server.add_confirmed(name, silos[name].confirm(server.states))
    for name in silent:
        with raises_code(RevealedError, "secure-sum", silo="") as caught:
            silos[name].reveal(server.tags_for(name))
        assert caught.value.revealed == frozenset(names)  # type: ignore[attr-defined]
    # The same silos again tell nothing new.
    again = unmasked(*masked_sum(values, histories_of(names, tmp_path)))
    np.testing.assert_array_equal(again, sum(values.values()))


@pytest.mark.parametrize("phase", ["masked", "confirmed"])
def test_a_sum_that_nobody_unmasked_is_repeated_with_those_that_are_left(
    phase: str, tmp_path: Path
) -> None:
    """A third of the silos vanish: the others confirm that they have not unmasked it."""
    names = names_of(9)
    values, left = values_for(names), names[:6]
    server, silos = masked_sum(values, histories_of(names, tmp_path))
    if phase == "confirmed":
        for name in names:
            server.add_confirmed(name, silos[name].confirm(server.states))
    rest = {name: values[name] for name in left}
    total = unmasked(*masked_sum(rest, histories_of(names, tmp_path)))
    np.testing.assert_array_equal(total, sum(rest.values()))


@pytest.mark.parametrize("count", [4, 5])
def test_no_two_sums_of_other_silos_are_unmasked_whoever_is_silent(count: int) -> None:
    """All pairs of sums of a few silos, with all silos that the server may leave out at the end.

    Two sums are unmasked only if they have no silo in common that helped to unmask one of them
    and has sent its values for the other one before.
    """
    names = names_of(count)
    values = values_for(names)
    threshold = topology_of(count).threshold
    for active in combinations(names, threshold):
        for second in (s for k in range(2, count) for s in combinations(names, k)):
            histories = histories_of(names)
            server, silos = masked_sum(values, histories)
            for name in active:
                server.add_confirmed(name, silos[name].confirm(server.states))
            for name in active:
                server.add_revealed(name, silos[name].reveal(server.tags_for(name)))
            assert len(server.unmask()) == SIZE
            mine = {name: values[name] for name in second}
            server, silos = masked_sum(mine, histories)
            released = 0
            for name in second:
                try:
                    server.add_confirmed(name, silos[name].confirm(server.states))
                except SumError:
                    continue
            for name in server.confirmed:
                try:
                    silos[name].reveal(server.tags_for(name))
                except SumError:
                    continue
                released += 1
            assert not released


@pytest.mark.parametrize("seed", range(8))
def test_no_sequence_of_sums_tells_the_value_of_one_silo(seed: int) -> None:
    """The server draws silos for each sum, and who of them hears of its last steps."""
    draw = np.random.default_rng(seed)
    names = names_of(int(draw.integers(4, 8)))
    values, histories = values_for(names), histories_of(names)
    rows = []
    for _ in range(8):
        drawn = draw.permutation(names)[: draw.integers(2, len(names) + 1)]
        chosen = [str(name) for name in drawn]
        server, silos = masked_sum({name: values[name] for name in chosen}, histories)
        active = chosen[: topology_of(len(chosen)).threshold]
        for step in ("confirm", "reveal"):
            for name in active if step == "confirm" else list(server.confirmed):
                try:
                    if step == "confirm":
                        server.add_confirmed(name, silos[name].confirm(server.states))
                    else:
                        server.add_revealed(name, silos[name].reveal(server.tags_for(name)))
                except SumError:
                    continue
        try:
            server.unmask()
        except SumError:
            continue
        rows.append([name in chosen for name in names])
    matrix = np.array(rows, float)
    rank = np.linalg.matrix_rank(matrix)
    for unit in np.eye(len(names)):  # no combination of sums is one silo's value
        assert np.linalg.matrix_rank(np.vstack([matrix, unit])) > rank


def test_a_history_outlives_its_process_and_names_damage(tmp_path: Path) -> None:
    path = tmp_path / "revealed.jsonl"
    values = digest_of_values(np.arange(3, dtype=np.uint64))
    assert digest_of_values(np.zeros(3, np.uint64)) == ""
    history = RevealedSums(path)
    history.add("1 1 train", values, frozenset("abc"))
    history.add("1 2 train", "", frozenset("abc"))
    assert path.stat().st_mode & 0o077 == 0
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"call": "1 3 tr')  # cut short: nothing was revealed
    again = RevealedSums(path)
    with raises_code(RevealedError, "secure-sum", silo=""):
        again.check("1 2 train", "", frozenset("ab"))
    with raises_code(RevealedError, "secure-sum", silo=""):
        again.check("9 9 train", values, frozenset("ab"))
    again.add("1 3 train", "", frozenset("ab"))
    again.add_masked("1 4 train", "", frozenset("abc"), 3)
    with raises_code(RevealedError, "secure-sum", silo=""):
        RevealedSums(path).check_confirmed("1 4 train", "", frozenset())
    with raises_code(RevealedError, "secure-sum", silo=""):
        RevealedSums(path).check("1 3 train", "", frozenset("abc"))
    for bad in (b"[]\n", b"{}\n", b"\xff\n", whole[:-9] + b"\n"):
        path.write_bytes(bad)
        with raises_code(CheckpointError, "damaged-file", path=str(path)):
            RevealedSums(path)


def test_a_server_asks_only_for_sums_that_silos_unmask() -> None:
    """Over all sets of silos that may be there after an earlier sum."""
    names = list("abcdef")
    subsets = [frozenset(c) for k in range(2, 7) for c in combinations(names, k)]
    for earlier in subsets:
        history = RevealedSums()
        history.add("call", "", earlier)
        for there in subsets:
            chosen = allowed_silos(sorted(there), [earlier])
            assert (chosen is not None) is (earlier <= there)
            if chosen is not None:
                assert set(chosen) <= there
                history.check("call", "", frozenset(chosen))
    assert allowed_silos(names, []) == names


# --- Hostile silos -------------------------------------------------------------------------------


@pytest.mark.parametrize("field", ["mask", "channel"])
@pytest.mark.parametrize(
    "key",
    [
        *(u.to_bytes(32, "little") for u in LOW_ORDER),
        b"",
        bytes(31),
        (FIELD + 9).to_bytes(32, "little"),
    ],
)
def test_keys_that_are_none_name_their_sender(field: str, key: bytes) -> None:
    names = names_of(3)
    silos = {name: SiloSum(name, ABOUT) for name in names}
    server = ServerSum(ABOUT)
    keys = {name: silo.advertise() for name, silo in silos.items()}
    bad = replace(keys["silo02"], **{field: key})
    server.add_keys("silo00", keys["silo00"])
    with raises_code(SumError, "secure-sum", silo="silo02"):
        server.add_keys("silo02", bad)
    with raises_code(SumError, "secure-sum", silo="silo02"):  # a server that lets them pass
        silos["silo00"].share(keys | {"silo02": bad}, names)


def test_keys_of_another_silo_name_their_sender() -> None:
    server = ServerSum(ABOUT)
    first, second = SiloSum("a", ABOUT).advertise(), SiloSum("b", ABOUT).advertise()
    server.add_keys("a", first)
    twice = replace(second, channel=second.mask)
    for copied in (first, replace(second, mask=first.channel), twice):
        with raises_code(SumError, "secure-sum", silo="b"):
            server.add_keys("b", copied)
    server.add_keys("b", second)


def test_every_key_is_one_that_can_be_agreed_with() -> None:
    for number in range(20):
        pair = KeyPair.from_secret(bytes([number]) * 32)
        keys = PublicKeys(pair.public, SiloSum("a", ABOUT).advertise().channel, bytes(16))
        ServerSum(ABOUT).add_keys("a", keys)


# --- The sparse graph ----------------------------------------------------------------------------


def sparse_silos(names: list[str], secret: bytes = b"secret") -> dict[str, SiloSum]:
    called = digest_of_names(names)
    prover = Prover(secret, RUN + called, is_strict=True)
    return {name: SiloSum(name, ABOUT, prover=prover, called=called) for name in names}


def test_all_silos_that_are_called_are_in_a_sparse_sum_whoever_answers() -> None:
    names = names_of(52)
    silos, server = sparse_silos(names), ServerSum(ABOUT, called=tuple(names))
    late = names[3:9]
    for name, silo in silos.items():
        if name not in late:
            server.add_keys(name, silo.advertise(), silo.seed)
    assert server.silos == tuple(names)
    assert server.seed == silos["silo00"].seed
    values = values_for(names)
    for name in server.keys:
        dealt = silos[name].share(server.keys_for(name), server.silos, server.seed)
        server.add_shares(name, dealt)
    for name in list(server.dealt):
        server.add_masked(name, silos[name].mask(values[name], server.shares_for(name)))
    there = [name for name in names if name not in late]
    total = np.add.reduce([values[n] for n in there], axis=0, dtype=np.uint64)
    np.testing.assert_array_equal(unmasked(server, silos), total)


def test_a_server_can_neither_invent_silos_nor_choose_who_masks_with_whom() -> None:
    names = names_of(52)
    silos = sparse_silos(names)
    keys = {name: silo.advertise() for name, silo in silos.items()}
    silo, seed = silos["silo00"], silos["silo00"].seed

    def own_keys(listed: list[str], seed: bytes) -> dict[str, PublicKeys]:
        near = {"silo00", *partners_of(tuple(listed), seed)["silo00"]}
        return {name: key for name, key in keys.items() if name in near}

    invented = [*names[:-1], "nobody"]
    for listed, other in (
        (names[:-1], seed),  # without one: others move together
        (invented, seed),
        ([*names, "nobody"], seed),
        (names, bytes(32)),  # another order
        (names, sparse_silos(names, b"another")["silo00"].seed),
        (names, sparse_silos(names[:-1])["silo00"].seed),
    ):
        silo._steps[:] = ["keys"]
        with raises_code(SumError, "secure-sum", silo=""):
            silo.share(own_keys(listed, other), listed, other)
    silo._steps[:] = ["keys"]
    assert silo.share(own_keys(names, seed), names, seed)
    # Keys of a silo that was called with others are not proved here.
    stranger = sparse_silos(names[:-1])[partners_of(tuple(names), seed)["silo00"][0]]
    name = stranger._name
    silo._steps[:] = ["keys"]
    with raises_code(SumError, "secure-sum", silo=name):
        silo.share(own_keys(names, seed) | {name: stranger.advertise()}, names, seed)


def test_no_part_of_the_ring_is_unmasked_alone() -> None:
    """Silos called lost on both sides of an arc would cut it off from the others."""
    names = tuple(names_of(120))
    topology, ring = topology_of(120), ring_of(names, ABOUT)
    half = topology.partners // 2
    for inner in range(1, 120 - 2 * half):
        cut = {*ring[:half], *ring[half + inner : 2 * half + inner]}
        assert not holders_are_present(names, ABOUT, set(names) - cut)
    assert holders_are_present(names, ABOUT, names)
    assert holders_are_present(names, ABOUT, set(names) - set(names[::12]))


def test_holders_are_counted_as_partners_are() -> None:
    names = tuple(names_of(60))
    draw = np.random.default_rng(0)
    threshold, partners = topology_of(60).threshold, partners_of(names, ABOUT)
    for share in (0.5, 0.55, 0.6, 0.7):
        for _ in range(20):
            present = {name for name in names if draw.random() < share}
            expected = all(len({n, *partners[n]} & present) >= threshold for n in present)
            assert holders_are_present(names, ABOUT, present) is expected
