"""Laws of one secure sum: its total, who can unmask what, and who is named for a wrong message.

The oracle is the plain sum modulo 2^64.
"""

import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from scipy.stats import chisquare

from mistakes import raises_code
from silograph.federation.secure.masks import expand_mask
from silograph.federation.secure.partners import partners_of, topology_of
from silograph.federation.secure.protocol import (
    ABSENT,
    PRESENT,
    VANISHED,
    Confirmation,
    Dealt,
    Prover,
    PublicKeys,
    Revealed,
    ServerSum,
    SiloSum,
)
from silograph.federation.secure.shamir import (
    PRIME,
    from_bytes,
    lagrange_coefficients,
    recover_secret,
    split_secret,
    to_bytes,
)
from silograph.federation.secure.sums import SumError

ABOUT = b"run 1, round 1, call 1"
SIZE = 5
PHASES = ("keys", "shares", "masked", "confirming", "unmasking")
LATE = ("confirming", "unmasking")


def names_of(count: int) -> list[str]:
    return [f"silo{i}" for i in range(count)]


def values_of(names: Sequence[str]) -> dict[str, np.ndarray]:
    draw = np.random.default_rng(len(names))
    return {name: draw.integers(0, 2**64, SIZE, np.uint64) for name in names}


@dataclass
class Parties:
    """Both halves of one sum after some of its steps."""

    server: ServerSum
    silos: dict[str, SiloSum]
    masked: dict[str, np.ndarray]


def send_masked(
    values: Mapping[str, np.ndarray], vanish: Mapping[str, Collection[str]] | None = None
) -> Parties:
    """Take the steps up to the masked values; `vanish`: silos that do not answer from a step on."""
    gone: set[str] = set()
    vanish = vanish or {}
    parties = Parties(ServerSum(ABOUT), {name: SiloSum(name, ABOUT) for name in values}, {})
    server, silos = parties.server, parties.silos
    gone |= set(vanish.get("keys", ()))
    for name in silos.keys() - gone:
        silos[name].advertise()
    for name in silos:
        if name not in gone:
            server.add_keys(name, silos[name]._own_keys)  # type: ignore[arg-type]
    gone |= set(vanish.get("shares", ()))
    for name in server.silos:
        if name not in gone:
            server.add_shares(name, silos[name].share(server.keys_for(name), server.silos))
    gone |= set(vanish.get("masked", ()))
    for name in list(server.dealt):
        if name not in gone:
            parties.masked[name] = silos[name].mask(values[name], server.shares_for(name))
            server.add_masked(name, parties.masked[name])
    return parties


def confirm(parties: Parties, gone: Collection[str] = ()) -> None:
    server = parties.server
    for name in server.present:
        if name not in gone:
            server.add_confirmed(name, parties.silos[name].confirm(server.states))


def unmask(
    parties: Parties, gone: Collection[str] = (), unconfirmed: Collection[str] = ()
) -> np.ndarray:
    """Take the last two steps; silos that are `gone` reveal nothing, others may confirm nothing."""
    server = parties.server
    confirm(parties, unconfirmed)
    server.check_holders()
    for name in server.confirmed:
        if name not in gone:
            server.add_revealed(name, parties.silos[name].reveal(server.tags_for(name)))
    return server.unmask()


def total_of(values: Mapping[str, np.ndarray], names: Collection[str]) -> np.ndarray:
    total: np.ndarray = np.add.reduce([values[name] for name in names], axis=0, dtype=np.uint64)
    return total


# --- Shares --------------------------------------------------------------------------------------


def test_any_threshold_of_shares_tells_a_secret_and_fewer_fit_every_secret() -> None:
    secret, points = 12345 * 2**200, range(1, 6)
    shares = split_secret(secret, 3, points)
    for size in range(3, 6):
        for chosen in itertools.combinations(points, size):
            coefficients = lagrange_coefficients(chosen)
            assert recover_secret({p: shares[p] for p in chosen}, coefficients) == secret
    for chosen in itertools.combinations(points, 2):
        # For each secret there is one polynomial through it and the two shares.
        for other in (0, 7, PRIME - 1):
            coefficients = lagrange_coefficients((*chosen, 9))
            partial = sum(coefficients[p] * shares[p] for p in chosen)
            third = (other - partial) * pow(coefficients[9], -1, PRIME) % PRIME
            known = {**{p: shares[p] for p in chosen}, 9: third}
            assert recover_secret(known, coefficients) == other


def test_shares_are_uniform() -> None:
    bins = np.zeros(16, int)
    for _ in range(400):
        for share in split_secret(1, 3, (1, 2, 3)).values():
            bins[share * 16 // PRIME] += 1
    assert chisquare(bins).pvalue > 1e-6


@pytest.mark.parametrize(
    ("threshold", "points"), [(3, (1, 2)), (0, (1, 2)), (2, (1, 1)), (2, (0, 1))]
)
def test_impossible_thresholds_and_points_are_refused(
    threshold: int, points: tuple[int, ...]
) -> None:
    with pytest.raises(ValueError, match="threshold"):
        split_secret(1, threshold, points)


def test_bytes_of_a_field_element() -> None:
    assert from_bytes(to_bytes(PRIME - 1)) == PRIME - 1
    for data in (b"", to_bytes(0)[1:], PRIME.to_bytes(32, "little")):
        with pytest.raises(ValueError, match="field"):
            from_bytes(data)


# --- Totals, whoever vanishes --------------------------------------------------------------------


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize(
    ("count", "share"),
    [(2, 0.0), (3, 0.0), (10, 0.0), (4, 0.25), (10, 0.2), (10, 1 / 3), (50, 0.02), (50, 1 / 3)],
)
def test_the_total_is_that_of_those_who_are_there(count: int, phase: str, share: float) -> None:
    names = names_of(count)
    gone = names[:: max(1, round(1 / share))][: int(count * share)] if share else []
    values = values_of(names)
    parties = send_masked(values, {phase: gone})
    late = {p: gone if phase == p else () for p in LATE}
    total = unmask(parties, late["unmasking"], late["confirming"])
    there = names if phase in LATE else [n for n in names if n not in gone]
    assert parties.server.present == there
    np.testing.assert_array_equal(total, total_of(values, there))


def test_silos_may_vanish_in_several_phases() -> None:
    values = values_of(names_of(10))
    parties = send_masked(values, {"shares": ["silo0"], "masked": ["silo4"]})
    total = unmask(parties, ["silo9"])
    np.testing.assert_array_equal(total, total_of(values, parties.server.present))


@pytest.mark.parametrize("phase", ["masked", *LATE])
@pytest.mark.parametrize("count", [2, 3, 6])
def test_below_the_threshold_nothing_is_unmasked(phase: str, count: int) -> None:
    """All of two and three silos are needed, and five of six."""
    names = names_of(count)
    gone = names[: 1 + count // 6]
    parties = send_masked(values_of(names), {phase: gone})
    late = {p: gone if phase == p else () for p in LATE}
    with raises_code(SumError, "secure-sum", silo=""):
        unmask(parties, late["unmasking"], late["confirming"])


@pytest.mark.parametrize("count", [3, 5, 6])
def test_every_coalition_below_the_threshold_fails_and_every_other_succeeds(count: int) -> None:
    names = names_of(count)
    values = values_of(names)
    threshold = topology_of(count).threshold
    assert threshold > 2 * count / 3
    for size in range(1, count + 1):
        for coalition in itertools.combinations(names, size):
            parties = send_masked(values)
            others = set(names) - set(coalition)
            if size < threshold:
                with raises_code(SumError, "secure-sum", silo=""):
                    unmask(parties, others)
            else:
                np.testing.assert_array_equal(unmask(parties, others), total_of(values, names))


# --- What the server sees ------------------------------------------------------------------------


def test_masked_values_are_uniform_whatever_the_values() -> None:
    zeros = {name: np.zeros(4096, np.uint64) for name in names_of(3)}
    for masked in send_masked(zeros).masked.values():
        bins = np.bincount((masked >> np.uint64(58)).astype(int), minlength=64)
        low = np.bincount((masked & np.uint64(63)).astype(int), minlength=64)
        assert chisquare(bins).pvalue > 1e-6
        assert chisquare(low).pvalue > 1e-6


def test_a_sum_of_fewer_than_all_stays_uniform() -> None:
    zeros = {name: np.zeros(4096, np.uint64) for name in names_of(4)}
    masked = send_masked(zeros).masked
    partial = np.add.reduce([masked[name] for name in list(masked)[:3]], axis=0, dtype=np.uint64)
    assert (
        chisquare(np.bincount((partial >> np.uint64(58)).astype(int), minlength=64)).pvalue > 1e-6
    )


def test_each_sum_has_fresh_masks() -> None:
    values = values_of(names_of(3))
    first, again = send_masked(values).masked, send_masked(values).masked
    for name in values:
        assert not (first[name] == again[name]).any()


def test_a_late_value_stays_masked() -> None:
    """A silo that others took for lost sends its value late: its own mask is not revealed."""
    values = values_of(names_of(4))
    parties = send_masked(values, {"masked": ["silo2"]})
    unmask(parties)
    late = parties.silos["silo2"].mask(values["silo2"], parties.server.shares_for("silo2"))
    holders = [shares.own.keys() for shares in parties.server.revealed.values()]
    assert all("silo2" not in names for names in holders)
    with raises_code(SumError, "secure-sum", silo="silo2"):
        parties.server.add_masked("silo2", late)


# --- Replays and lies ----------------------------------------------------------------------------


def test_steps_are_taken_once_and_in_order() -> None:
    values = values_of(names_of(3))
    parties = send_masked(values)
    server, silo = parties.server, parties.silos["silo0"]
    steps = (
        silo.advertise,
        lambda: silo.share(server.keys_for("silo0"), server.silos),
        lambda: silo.mask(values["silo0"], server.shares_for("silo0")),
        lambda: server.add_masked("silo0", parties.masked["silo0"]),
        lambda: server.add_keys("silo0", server.keys["silo0"]),
        lambda: server.add_shares("silo0", server.dealt["silo0"]),
        lambda: SiloSum("silo0", ABOUT).mask(values["silo0"], server.shares_for("silo0")),
        lambda: SiloSum("silo0", ABOUT).confirm(server.states),
        lambda: silo.reveal({}),
    )
    for step in steps:
        with pytest.raises(SumError):
            step()
    unmask(parties)
    for step in (
        lambda: silo.confirm(server.states),
        lambda: silo.reveal(server.tags_for("silo0")),
        lambda: server.add_confirmed("silo0", server.confirmed["silo0"]),
        lambda: server.add_revealed("silo0", server.revealed["silo0"]),
    ):
        with pytest.raises(SumError):
            step()


def test_a_silo_confirms_only_lists_that_can_be() -> None:
    names = names_of(4)
    silo = send_masked(values_of(names)).silos["silo0"]
    for states in (
        (PRESENT, PRESENT, VANISHED, VANISHED),  # too few
        (VANISHED, PRESENT, PRESENT, PRESENT),  # without itself
        (PRESENT, PRESENT, PRESENT, ABSENT),  # which has dealt shares
        (PRESENT, PRESENT, PRESENT, 3),
        (PRESENT, PRESENT, PRESENT),
        (PRESENT, PRESENT, PRESENT, PRESENT, PRESENT),
    ):
        silo._steps[:] = ["keys", "shares", "masked"]
        given = dict(zip([*names, "silo9"], states, strict=False))
        with raises_code(SumError, "secure-sum", silo=""):
            silo.confirm(given)


@pytest.mark.parametrize(("least", "silos"), [(4, 3), (2, 1)])
def test_a_silo_sums_over_as_many_silos_as_it_says(least: int, silos: int) -> None:
    silo = SiloSum("silo0", ABOUT, least=least)
    keys = {"silo0": silo.advertise()}
    keys |= {name: SiloSum(name, ABOUT).advertise() for name in names_of(silos)[1:]}
    with raises_code(SumError, "secure-sum", silo=""):
        silo.share(keys, names_of(silos))


def test_keys_of_others_are_refused() -> None:
    names = names_of(3)
    changes: list[tuple[Callable[[dict[str, Any]], dict[str, Any]], str]] = [
        (lambda keys: keys | {"silo1": keys["silo2"]}, "silo2"),  # one twice
        (lambda keys: keys | {"silo0": keys["silo1"]}, ""),  # not its own
        (lambda keys: {n: k for n, k in keys.items() if n != "silo1"}, ""),
    ]
    for change, silo in changes:
        silos = {name: SiloSum(name, ABOUT) for name in names}
        keys = {name: silo.advertise() for name, silo in silos.items()}
        with raises_code(SumError, "secure-sum", silo=silo):
            silos["silo0"].share(change(keys), names)


def test_keys_of_a_server_in_the_middle_are_noticed_where_silos_share_a_secret() -> None:
    names = names_of(3)

    def silos_with(secret: bytes | None, run: bytes = b"run") -> dict[str, SiloSum]:
        prover = Prover(secret, run, is_strict=True)
        return {name: SiloSum(name, ABOUT, prover=prover) for name in names}

    silos = silos_with(b"secret")
    keys = {name: silo.advertise() for name, silo in silos.items()}
    assert silos["silo0"].share(keys, names)
    made_by_server = SiloSum("silo2", ABOUT).advertise()
    forgeries = (
        made_by_server,
        replace(made_by_server, proof=keys["silo2"].proof),
        replace(keys["silo2"], proof=keys["silo1"].proof),  # of another silo
        silos_with(b"another secret")["silo2"].advertise(),
        silos_with(b"secret", b"another run")["silo2"].advertise(),
    )
    for forged in forgeries:
        silo = silos_with(b"secret")["silo1"]
        own = {"silo0": keys["silo0"], "silo1": silo.advertise(), "silo2": forged}
        with raises_code(SumError, "secure-sum", silo="silo2"):
            silo.share(own, names)


def test_a_holder_that_reveals_another_share_is_named() -> None:
    parties = send_masked(values_of(names_of(4)))
    server = parties.server
    confirm(parties)
    shares = parties.silos["silo1"].reveal(server.tags_for("silo1"))
    wrong = Revealed({**shares.own, "silo2": to_bytes(3)}, shares.mask)
    with raises_code(SumError, "secure-sum", silo="silo1"):
        server.add_revealed("silo1", wrong)


def deal_wrong(part: Dealt, way: str) -> Dealt:
    """Return what a hostile dealer or server sends in place of a part."""
    if way == "digest":
        return replace(part, own_digest=bytes(16))
    return replace(part, sealed=bytes(len(part.sealed)))


@pytest.mark.parametrize("way", ["digest", "seal"])
@pytest.mark.parametrize("spoiled", [1, 3])
def test_a_silo_with_wrong_shares_stays_and_their_dealer_is_named(way: str, spoiled: int) -> None:
    """One wrong share costs nothing; more than may be missing name who has dealt them."""
    values = values_of(names_of(6))
    parties = send_masked(values, {"masked": values})  # up to the shares
    server, silos = parties.server, parties.silos
    for name in names_of(spoiled):
        dealt = dict(server.dealt["silo5"])
        server.dealt["silo5"] = {**dealt, name: deal_wrong(dealt[name], way)}
    for name, silo in silos.items():
        server.add_masked(name, silo.mask(values[name], server.shares_for(name)))
    if spoiled == 1:
        np.testing.assert_array_equal(unmask(parties), total_of(values, values))
        assert server.confirmed["silo0"].unusable == {"silo5"}
        return
    with raises_code(SumError, "secure-sum", silo="silo5"):
        unmask(parties)
    assert not server.revealed


def test_one_silo_alone_cannot_frame_another() -> None:
    """Of three silos all are needed: then nobody knows which of two lies, and neither is named."""
    parties = send_masked(values_of(names_of(3)))
    confirm(parties, ["silo0"])
    tags = parties.silos["silo0"].confirm(parties.server.states).tags
    parties.server.add_confirmed("silo0", Confirmation(tags, frozenset({"silo2"})))
    with raises_code(SumError, "secure-sum", silo=""):
        parties.server.check_holders()


@pytest.mark.parametrize("vanished", [(), ("silo3",)])
def test_a_dealer_of_shares_of_something_else_is_named(vanished: tuple[str, ...]) -> None:
    """Its shares agree with their digests, but not with each other."""
    names = names_of(6)
    values = values_of(names)
    silos = {name: SiloSum(name, ABOUT) for name in names}
    liar = silos["silo3"]
    keys = {name: silo.advertise() for name, silo in silos.items()}
    liar._own_secret, liar._mask_secret = liar._own_secret + 1, liar._mask_secret + 1
    server = ServerSum(ABOUT, dict(keys))
    for name, silo in silos.items():
        server.add_shares(name, silo.share(keys, names))
    for name, silo in silos.items():
        if name not in vanished:
            server.add_masked(name, silo.mask(values[name], server.shares_for(name)))
    with raises_code(SumError, "secure-sum", silo="silo3"):
        unmask(Parties(server, silos, {}))
    assert server.revealed


# --- The sparse graph ----------------------------------------------------------------------------


@pytest.mark.parametrize("count", [50, 51, 120])
def test_partners_are_mutual_and_as_many_as_said(count: int) -> None:
    names = names_of(count)
    topology, partners = topology_of(count), partners_of(tuple(names), ABOUT)
    assert topology.partners < count - 1
    for name, own in partners.items():
        assert len(set(own)) == topology.partners
        assert name not in own
        assert all(name in partners[other] for other in own)
    assert partners_of(tuple(names), b"another sum") != partners


def test_small_federations_mask_with_everybody() -> None:
    for count in (2, 3, 10, 49):
        assert topology_of(count).partners == count - 1
        threshold = topology_of(count).threshold
        assert threshold == count if count <= 3 else 2 * count / 3 < threshold <= 2 * count / 3 + 1


def test_the_mask_is_the_key_stream_of_rfc_8439() -> None:
    """Section 2.4.2's cipher, with counter 0 and nonce 0: appendix A.1, test vector 1."""
    first = bytes.fromhex("76b8e0ada0f13d90405d6ae55386bd28bdd219b8a08ded1aa836efcc8b770dc7")
    assert expand_mask(bytes(32), 4).astype("<u8").tobytes() == first


def test_types_of_messages_are_plain_values() -> None:
    keys = SiloSum("silo0", ABOUT).advertise()
    assert [len(part) for part in (keys.mask, keys.channel, keys.own_digest)] == [32, 32, 16]
    assert PublicKeys(b"a", b"b", b"c").text == b"abc"
    assert Dealt(b"a", b"b", b"c") == Dealt(b"a", b"b", b"c")
