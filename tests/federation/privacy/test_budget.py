"""What a silo charges: once for a request, anew for any other, before anything leaves."""

import dataclasses
import json
import math
import stat
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("dp_accounting")

import torch

from mistakes import raises_code
from silograph.core.errors import CheckpointError, PolicyError, ProtocolError
from silograph.core.kinds import Kind
from silograph.core.payload import Shared, Stacked
from silograph.evaluation.evaluate import judge_server
from silograph.federation.frame import Envelope
from silograph.federation.privacy.accounting import epsilon_of
from silograph.federation.privacy.budget import (
    CHARGED,
    LEDGER,
    SECRET,
    BudgetUse,
    PrivacyBudget,
    PrivacyLedger,
    read_or_make_secret,
)
from silograph.federation.privacy.release import check_release, shares_of
from silograph.federation.privacy.updates import CLIP_UNITS, UpdatePrivacy
from silograph.federation.session.private_reply import PrivateReplies
from silograph.methods.clipped_updates import train_clipped
from silograph.methods.local_training import begin

PRIVACY = UpdatePrivacy("silo", 4.0, 1e-5, 2.0, 3.0, 10)
ENVELOPE = Envelope("train_clipped", Kind.WEIGHTS, 1, 0)
REPLY = {"update/w": Stacked(torch.arange(20_000)[None])}
SILOS = ["a", "b", "c"]


def request(value: float) -> dict[str, Shared]:
    return {"weights/w": Shared(torch.full((20,), value))}


def replies(
    folder: Path,
    run: str = "run",
    lines: list[Any] | None = None,
    privacy: UpdatePrivacy = PRIVACY,
) -> PrivateReplies:
    """As a process that has just started: everything it knows is in the folder."""
    told: list[Any] = [] if lines is None else lines

    def record(facts: Mapping[str, Any]) -> None:
        told.append(facts)

    ledger, secret = PrivacyLedger(folder), read_or_make_secret(folder)
    return PrivateReplies(privacy, ledger, secret, run, record)


def charges(folder: Path) -> int:
    return sum(n.total() for n in PrivacyLedger(folder).releases("silo").values())


def test_the_same_request_gets_the_same_reply_and_is_charged_once(tmp_path: Path) -> None:
    lines: list[Any] = []
    one = replies(tmp_path, lines=lines).with_noise(ENVELOPE, request(1), REPLY)
    again = replies(tmp_path, lines=lines).with_noise(ENVELOPE, request(1), REPLY)
    assert torch.equal(one["update/w"].t, again["update/w"].t)
    assert charges(tmp_path) == len(lines) == 1
    assert lines[0]["releases"] == 1


@pytest.mark.parametrize("other", ["request", "clip", "reply", "round", "run", "secret"])
def test_two_unlike_requests_cancel_nothing(other: str, tmp_path: Path) -> None:
    """Their noise is independent, so the difference has twice the variance; both are charged."""
    one = replies(tmp_path).with_noise(ENVELOPE, request(1), REPLY)
    if other == "secret":
        (tmp_path / SECRET).unlink()
    theirs = replies(tmp_path, "run 2" if other == "run" else "run").with_noise(
        Envelope("train_clipped", Kind.WEIGHTS, 2, 0) if other == "round" else ENVELOPE,
        request(2 if other == "request" else 1)
        | ({"clip": Shared(torch.tensor(2.0))} if other == "clip" else {}),
        {"update/w": Stacked(REPLY["update/w"].t + 1)} if other == "reply" else REPLY,
    )
    difference = (one["update/w"].t - theirs["update/w"].t).double() / CLIP_UNITS
    expected = math.sqrt(2) * PRIVACY.noise_multiplier
    assert float(difference.std()) == pytest.approx(expected, rel=0.03)
    assert abs(float(difference.mean())) < 5 * expected / math.sqrt(20_000)
    assert charges(tmp_path) == 2


def test_a_run_costs_no_more_than_was_agreed(tmp_path: Path) -> None:
    own = replies(tmp_path)
    for number in range(PRIVACY.releases):
        own.with_noise(ENVELOPE, request(number), REPLY)
    with raises_code(PolicyError, "refused-by-policy", rule="privacy_budget"):
        own.with_noise(ENVELOPE, request(-1), REPLY)
    own.with_noise(ENVELOPE, request(3), REPLY)  # which it has sent before
    assert charges(tmp_path) == PRIVACY.releases
    assert own.spent()["epsilon"] > 0
    replies(tmp_path, "another run").with_noise(ENVELOPE, request(0), REPLY)


def test_a_charge_is_on_the_disk_before_the_reply(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own, order = replies(tmp_path), list[str]()
    monkeypatch.setattr(
        "silograph.federation.privacy.budget.os.fsync", lambda _: order.append("synced")
    )
    monkeypatch.setattr(
        "silograph.federation.session.private_reply.add_noise",
        lambda *_: order.append("reply"),
    )
    own.with_noise(ENVELOPE, request(1), REPLY)
    assert order[0] == "synced"
    assert order[-1] == "reply"


def test_what_cannot_be_charged_does_not_leave(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = replies(tmp_path)

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("silograph.federation.privacy.budget.os.fsync", full)
    with raises_code(PolicyError, "unwritable-path"):
        own.with_noise(ENVELOPE, request(1), REPLY)


def test_a_torn_line_was_never_sent_and_a_damaged_one_is_an_error(tmp_path: Path) -> None:
    replies(tmp_path).with_noise(ENVELOPE, request(1), REPLY)
    file = tmp_path / LEDGER
    whole = file.read_bytes()
    file.write_bytes(whole + whole[:30])
    assert charges(tmp_path) == 1
    assert file.read_bytes() == whole
    values = json.loads(whole)
    for damaged in (b"{}\n", json.dumps(values | {"noise_multiplier": 0.0}).encode() + b"\n"):
        file.write_bytes(damaged)
        with raises_code(CheckpointError, "damaged-file"):
            PrivacyLedger(tmp_path)


def test_secret_and_charges_are_their_owners(tmp_path: Path) -> None:
    secret = read_or_make_secret(tmp_path)
    assert read_or_make_secret(tmp_path) == secret
    replies(tmp_path).with_noise(ENVELOPE, request(1), REPLY)
    for name in (SECRET, LEDGER):
        assert stat.S_IMODE((tmp_path / name).stat().st_mode) == 0o600
    (tmp_path / SECRET).write_bytes(b"short")
    with raises_code(CheckpointError, "damaged-file"):
        read_or_make_secret(tmp_path)


# --- A name of a run that is used again ----------------------------------------------------------


def test_another_scale_of_noise_is_independent_and_charged(tmp_path: Path) -> None:
    """Else the ratio of two scales would tell the reply from the noise."""
    one = replies(tmp_path).with_noise(ENVELOPE, request(1), REPLY)
    for number, privacy in enumerate(
        (replace(PRIVACY, noise_multiplier=6.0), replace(PRIVACY, releases=11)), 2
    ):
        other = replies(tmp_path, privacy=privacy).with_noise(ENVELOPE, request(1), REPLY)
        both = torch.cat([noised["update/w"].t - REPLY["update/w"].t for noised in (one, other)])
        assert abs(float(torch.corrcoef(both.double())[0, 1])) < 5 / math.sqrt(20_000)
        assert charges(tmp_path) == number


def test_charges_of_another_agreement_under_the_same_name_count(tmp_path: Path) -> None:
    for number in range(4):
        replies(tmp_path).with_noise(ENVELOPE, request(number), REPLY)
    longer = replace(PRIVACY, noise_multiplier=30.0, releases=1000)
    total = replies(tmp_path, privacy=longer).epsilon_of_all_runs(1e-5)
    assert total == pytest.approx(epsilon_of({3.0: 4, 30.0: 1000}, 1e-5))
    shorter = replace(PRIVACY, releases=2)
    assert replies(tmp_path, privacy=shorter).epsilon_of_all_runs(1e-5) == pytest.approx(
        epsilon_of({3.0: 4}, 1e-5)
    )
    assert replies(tmp_path).epsilon_of_all_runs(1e-5) == pytest.approx(
        epsilon_of({3.0: PRIVACY.releases}, 1e-5)
    )


# --- Shares of noise in secure sums --------------------------------------------------------------


def test_a_sum_that_is_done_again_has_the_same_noise(tmp_path: Path) -> None:
    one, seed = replies(tmp_path).with_share(ENVELOPE, request(1), REPLY, SILOS)
    replies(tmp_path).check_reveal(1, seed, everyone=True)
    again, second = replies(tmp_path).with_share(ENVELOPE, request(1), REPLY, SILOS[::-1])
    assert torch.equal(one["update/w"].t, again["update/w"].t)
    replies(tmp_path).check_reveal(1, second, everyone=True)
    assert charges(tmp_path) == 1


def test_sums_over_unlike_silos_have_independent_noise(tmp_path: Path) -> None:
    """Their difference would be one silo's update with its share of the noise alone."""
    own = replies(tmp_path)
    one, seed = own.with_share(ENVELOPE, request(1), REPLY, SILOS)
    own.check_reveal(1, seed, everyone=True)
    other, _ = own.with_share(ENVELOPE, request(1), REPLY, SILOS[:2])
    assert float((one["update/w"].t - other["update/w"].t).double().std()) > CLIP_UNITS
    assert charges(tmp_path) == 2
    # The same silos again, of which one now vanishes on the way: not with noise that was revealed.
    _, third = own.with_share(ENVELOPE, request(1), REPLY, SILOS)
    assert third == seed
    with raises_code(ProtocolError, "secure-sum"):
        own.check_reveal(1, third, everyone=False)
    _, fourth = own.with_share(ENVELOPE, request(1), REPLY, SILOS)
    assert fourth != seed
    assert charges(tmp_path) == 3


def test_masked_values_that_have_left_are_never_sent_again_with_their_noise(
    tmp_path: Path,
) -> None:
    """Others can unmask a sum without this silo, which a server asks for nothing after that."""
    own, seeds, values = replies(tmp_path), list[bytes](), list[torch.Tensor]()
    for _ in range(6):
        noised, seed = own.with_share(ENVELOPE, request(1), REPLY, SILOS)
        seeds.append(seed)
        values.append(noised["update/w"].t)
    assert len(set(seeds)) == charges(tmp_path) == 6
    share = PRIVACY.noise_multiplier / math.sqrt(shares_of(len(SILOS), secure=True))
    mean = torch.stack(values).double().mean(0) / CLIP_UNITS
    assert float((mean - values[0].double() / CLIP_UNITS).std()) > 0.8 * share
    # In the next process too; and once it has helped itself, that noise stays.
    _, seed = replies(tmp_path).with_share(ENVELOPE, request(1), REPLY, SILOS)
    replies(tmp_path).check_reveal(1, seed, everyone=True)
    assert replies(tmp_path).with_share(ENVELOPE, request(1), REPLY, SILOS)[1] == seed
    assert seed not in seeds
    assert charges(tmp_path) == 7
    for _ in range(3):
        other = Envelope("train_clipped", Kind.WEIGHTS, 2, 0)
        own = replies(tmp_path)
        own.with_share(other, request(1), REPLY, SILOS)
    with raises_code(PolicyError, "refused-by-policy", rule="privacy_budget"):
        replies(tmp_path).with_share(other, request(1), REPLY, SILOS)


def test_noise_of_a_sum_over_fewer_silos_is_used_once(tmp_path: Path) -> None:
    own = replies(tmp_path)
    _, seed = own.with_share(ENVELOPE, request(1), REPLY, SILOS)
    own.check_reveal(1, seed, everyone=False)
    _, second = replies(tmp_path).with_share(ENVELOPE, request(1), REPLY, SILOS)
    assert second != seed
    assert PrivacyLedger(tmp_path).releases("silo") == {"run": Counter({3.0: 2})}
    assert PrivacyLedger(tmp_path).has(CHARGED, "") is False


# --- What may leave ------------------------------------------------------------------------------


def test_a_silo_sends_nothing_but_noised_sums_and_zeros() -> None:
    """Whatever an op returns: the silo leaves the run before such a reply."""
    zeros, ones = ({"val.nodes": Stacked(torch.full((1,), n))} for n in (0, 1))
    check_release(train_clipped, Kind.WEIGHTS, REPLY)
    check_release(judge_server, Kind.EVALUATION, zeros)
    check_release(begin, Kind.CONTROL, {})
    for op, kind, reply in (
        (judge_server, Kind.EVALUATION, ones),
        (begin, Kind.CONTROL, zeros),
        (begin, Kind.CONTROL, ones),
    ):
        with raises_code(PolicyError, "refused-by-policy", rule="differential privacy"):
            check_release(op, kind, reply)


def test_runs_that_hide_silos_count_for_nodes(tmp_path: Path) -> None:
    """One node more or less replaces an update: twice the clip, so half the multiplier."""
    replies(tmp_path).with_noise(ENVELOPE, request(1), REPLY)
    privacy = dataclasses.replace(PRIVACY, unit="node")
    ledger, secret = PrivacyLedger(tmp_path), read_or_make_secret(tmp_path)
    own = PrivateReplies(privacy, ledger, secret, "run 2", lambda _: None)
    multiplier = PRIVACY.noise_multiplier
    expected = epsilon_of({multiplier: PRIVACY.releases, multiplier / 2: 1}, 1e-5)
    assert own.epsilon_of_all_runs(1e-5) == expected
    assert replies(tmp_path, "run 3").epsilon_of_all_runs(1e-5) < expected


# --- What is left --------------------------------------------------------------------------------


def test_what_is_left_counts_the_charges_of_all_runs(tmp_path: Path) -> None:
    budget = PrivacyBudget(epsilon=8.0, delta=1e-6)
    assert PrivacyLedger(tmp_path).use_of(budget) == BudgetUse(
        unit="silo", delta=1e-6, allowed=8.0, spent=0.0, left=8.0, runs=0
    )
    own, lines = replies(tmp_path, "run 1"), list[Any]()
    for number in range(3):
        own.with_noise(ENVELOPE, request(number), REPLY)
    ledger, secret = PrivacyLedger(tmp_path), read_or_make_secret(tmp_path)
    wider = replace(PRIVACY, noise_multiplier=6.0)
    own = PrivateReplies(wider, ledger, secret, "run 2", lines.append, budget)
    own.with_noise(ENVELOPE, request(1), REPLY)
    use = PrivacyLedger(tmp_path).use_of(budget)
    # At the budget's delta, not at that of the runs, and by what was charged alone.
    assert use.spent == epsilon_of({3.0: 3, 6.0: 1}, 1e-6)
    assert (use.runs, use.allowed) == (2, 8.0)
    assert 8.0 - use.spent < use.left < 8.0
    assert lines[-1]["budget"] == own.spent()["budget"] == dataclasses.asdict(use)
    assert "budget" not in replies(tmp_path, "run 3").spent()
    of_nodes = PrivacyLedger(tmp_path).use_of(replace(budget, unit="node"))
    assert of_nodes.spent == epsilon_of({1.5: 3, 3.0: 1}, 1e-6)
