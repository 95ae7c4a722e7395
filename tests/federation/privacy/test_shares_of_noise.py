"""Attacks on shares of noise in secure sums, by a server that leaves silos out of steps."""

import math
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("cryptography")

import torch

from mistakes import raises_code
from silograph.core.errors import ProtocolError
from silograph.core.kinds import Kind
from silograph.core.payload import Payload, Shared, Stacked
from silograph.core.work import Meter
from silograph.federation.frame import Envelope, decode, encode
from silograph.federation.privacy.budget import PrivacyLedger
from silograph.federation.privacy.release import shares_of
from silograph.federation.privacy.updates import CLIP_UNITS, UpdatePrivacy
from silograph.federation.secure.revealed import RevealedSums
from silograph.federation.secure.sizes import digest_of_names
from silograph.federation.secure.sums import SecureSums, layout_of_reply
from silograph.federation.secure.wire import all_keys_payload, read_keys
from silograph.federation.session.message import Type, reply_body
from silograph.federation.session.private_reply import PrivateReplies
from silograph.federation.session.summed_call import SummedCall
from silograph.federation.session.summed_reply import SumContext, SummedReply

PRIVACY = UpdatePrivacy("silo", 4.0, 1e-5, 2.0, 3.0, 10)
ENVELOPE = Envelope("train_clipped", Kind.WEIGHTS, 1, 0)
SILOS = [f"silo {n}" for n in range(10)]
SUMS = SecureSums(len(SILOS), 2, secret=b"s" * 32, needs_proofs=True)
SIZE = 5000
REPLY: Payload = {"update/w": Stacked(torch.zeros(1, SIZE, dtype=torch.int64))}
SILENT = SILOS[0]
STEPS = (Type.SHARE, Type.MASK, Type.CONFIRM, Type.UNMASK)


def summed_reply(name: str, folder: Path) -> SummedReply:
    """As a silo that is called, with all of its memory on the disk."""
    called = digest_of_names(SILOS)
    context = SumContext(name, b"run", called, SUMS, RevealedSums(folder / f"{name}.jsonl"))
    (folder / name).mkdir(exist_ok=True)
    ledger, secret = PrivacyLedger(folder / name), name.encode()
    private = PrivateReplies(PRIVACY, ledger, secret, "run", lambda _: None)
    inbox = {"weights/w": Shared(torch.zeros(2))}
    return SummedReply(context, ENVELOPE, REPLY, "", inbox, private)


def unmasked(folder: Path, vanished: list[str]) -> torch.Tensor:
    """Return a sum that a server unmasks without the silent silo, whose values are in it."""
    silos = {name: summed_reply(name, folder) for name in SILOS}
    layout = layout_of_reply(REPLY, ENVELOPE.kind, "", SUMS.silos)
    call = SummedCall(ENVELOPE, layout, SILOS)
    for name, silo in silos.items():
        call.take_keys(name, reply_body(ENVELOPE.kind, Meter(1), encode(*silo.keys(), 0)))
    for step in STEPS:
        away = {*(vanished if step is not Type.SHARE else []), *([SILENT] * (step in STEPS[2:]))}
        for name in [name for name in call.silos_in(step) if name not in away]:
            answer = silos[name].answer(step, *decode(call.request(step, name)))
            call.take(step, name, encode(*answer, 0))
    return call.result()["update/w"].t.double() / CLIP_UNITS


def charges(folder: Path, name: str) -> int:
    return sum(n.total() for n in PrivacyLedger(folder / name).releases("silo").values())


@pytest.mark.parametrize("vanished", [[], SILOS[-1:]], ids=["all", "one vanished"])
def test_a_silo_that_is_asked_for_no_confirmation_is_charged_for_each_sum(
    vanished: list[str], tmp_path: Path
) -> None:
    """Its values are in three unmasked sums, each with noise of its own.

    Those of the others are, too, where a silo has vanished; else all sums are over the same silos.
    """
    totals = [unmasked(tmp_path, vanished) for _ in range(3)]
    share = PRIVACY.noise_multiplier / math.sqrt(shares_of(len(SILOS), secure=True))
    anew = len(SILOS) - 1 if vanished else 1
    for other in totals[1:]:
        expected = math.sqrt(2 * anew) * share
        assert float((other - totals[0]).std()) == pytest.approx(expected, rel=0.1)
    # Each has more noise than a release must have.
    expected = math.sqrt(len(SILOS) - len(vanished)) * share
    assert all(float(t.std()) == pytest.approx(expected, rel=0.1) for t in totals)
    assert charges(tmp_path, SILENT) == 3
    assert charges(tmp_path, SILOS[1]) == (3 if vanished else 1)


def test_a_sum_over_more_silos_than_the_run_has_is_refused(tmp_path: Path) -> None:
    """Invented ones would make the share of a real one smaller."""
    silo = summed_reply(SILENT, tmp_path)
    keys, seed = read_keys(silo.keys()[1])
    names = [*SILOS, *(f"invented {n}" for n in range(20))]
    payload = all_keys_payload(SILENT, names, {SILENT: keys}, seed)
    with raises_code(ProtocolError, "call-not-agreed"):
        silo.answer(Type.SHARE, replace(ENVELOPE, kind=Kind.KEYS), payload)
