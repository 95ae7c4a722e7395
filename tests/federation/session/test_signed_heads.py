"""Signed heads of audits: what a signature covers, and what a changed file no longer has."""

import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("cryptography")

from silograph.cli import run_app
from silograph.core.errors import FrameError, ProtocolError
from silograph.core.kinds import Kind
from silograph.federation.frame import Envelope
from silograph.federation.session.audit import MOST_HEADS, NO_LINE, line_of, open_audit, read_audit
from silograph.federation.session.identity import SiloKey, key_line
from silograph.federation.session.signed_heads import HeadSigner, SignedHead, read_heads

RUN = "1" * 32
HEAD = "a" * 64


def write_run(path: Path, signer: HeadSigner, name: str = RUN) -> None:
    """Write the audit of a run that is over."""
    with open_audit(path, {"server": "far:1"}) as (audit, _):
        audit.signer = signer
        run = audit.of_run(name)
        run.record_agreement({"method": "fedavg", "rounds": 1, "config": "c" * 64})
        run.record_reply(Envelope("train", Kind.WEIGHTS, 1, 1), {}, bytes(400))
        audit.to_end(lambda: None)


@pytest.mark.parametrize("change", ["name", "head", "public", "signature"])
def test_a_signature_is_of_one_silo_key_and_head(change: str) -> None:
    signed = HeadSigner("north", SiloKey.new(), 3).sign(HEAD)
    assert signed.is_valid
    assert SignedHead.of(signed.to_facts()) == signed
    others: dict[str, Any] = {"name": "south", "head": "b" * 64, "public": SiloKey.new().public}
    others["signature"] = bytes(64)
    assert not replace(signed, **{change: others[change]}).is_valid


def test_agreement_and_end_are_signed(tmp_path: Path) -> None:
    signer = HeadSigner("north", SiloKey.new(), 2)
    write_run(tmp_path / "audit.jsonl", signer)
    with (tmp_path / "audit.jsonl").open("rb") as file:
        reading = read_audit(file)
    assert reading.broken is None
    assert sorted(reading.signed) == [2, 5]
    assert max(reading.signed) == reading.lines
    assert {(each.public, each.version) for each in reading.signed.values()} == {
        (signer.key.public, 2)
    }


@pytest.mark.parametrize(
    ("signers", "known", "code", "earlier"),
    [
        (["first", "second"], "second", 0, [2, 5]),
        (["first", "second"], "first", 1, []),  # the end of the file is signed by a key unknown
        (["first"], "second", 1, []),
        (["first", "first"], "first", 0, []),
        (["other", "second"], "second", 1, []),  # another silo's lines are none of its own
    ],
)
def test_a_known_key_vouches_for_lines_of_the_silos_earlier_keys(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    signers: list[str],
    known: str,
    code: int,
    earlier: list[int],
) -> None:
    by_name = {name: HeadSigner("north", SiloKey.new()) for name in ("first", "second")}
    by_name["other"] = HeadSigner("south", SiloKey.new())
    path, keys = tmp_path / "audit.jsonl", tmp_path / "keys.txt"
    for i, signer in enumerate(signers):
        write_run(path, by_name[signer], str(i) * 32)
    keys.write_text(key_line("north", by_name[known].key.public))
    assert run_app(["audit", str(path), "--keys", str(keys)]) == code
    capsys.readouterr()
    assert run_app(["audit", str(path), "--keys", str(keys), "--json"]) == code
    facts = json.loads(capsys.readouterr().out)
    assert facts["signed_by_earlier_keys"] == earlier
    assert (facts["unsigned"] is None) == (code == 0)


def test_a_file_that_is_written_anew_by_another_key_has_no_valid_signature(tmp_path: Path) -> None:
    """Hashes alone can be made again by anybody."""
    write_run(tmp_path / "audit.jsonl", HeadSigner("north", SiloKey.new()))
    with (tmp_path / "audit.jsonl").open("rb") as file:
        entries = list(file)
    former, lines = NO_LINE, []
    for entry in entries:
        facts = {k: v for k, v in json.loads(entry).items() if k not in ("former", "hash")}
        facts |= {"bytes": 1} if facts["event"] == "answered" else {}
        line, former = line_of(facts, former)
        lines.append(line)
    broken = read_audit(io.BytesIO(b"".join(lines))).broken
    assert broken is not None
    assert broken.line == 5


def test_heads_that_a_server_hands_on() -> None:
    north, south = (HeadSigner(name, SiloKey.new()).sign(HEAD) for name in ("north", "south"))
    forged = replace(south, head="b" * 64)
    heads = read_heads({"heads": [north.to_facts(), forged.to_facts()]})
    assert heads == {"north": north.to_facts()}


@pytest.mark.parametrize(
    "facts",
    [
        {},
        {"heads": {}},
        {"heads": [None]},
        {"heads": [{"name": "../x", "head": HEAD}]},
        {"heads": [{"name": "a", "head": HEAD, "key": "0", "version": 1, "signature": ""}]},
        {"heads": [{**HeadSigner("a", SiloKey.new()).sign(HEAD).to_facts(), "version": True}]},
    ],
)
def test_what_is_no_head(facts: dict[str, Any]) -> None:
    with pytest.raises(FrameError):
        read_heads(facts)


def test_a_server_does_not_fill_the_file_with_heads(tmp_path: Path) -> None:
    with open_audit(tmp_path / "audit.jsonl", {}) as (audit, _):
        audit.signer = HeadSigner("north", SiloKey.new())
        run = audit.of_run(RUN)
        for _ in range(MOST_HEADS):
            run.sign_head()
        with pytest.raises(ProtocolError):
            run.sign_head()
        with pytest.raises(ProtocolError):
            run.record_heads({})


def test_a_silo_without_a_key_signs_nothing(tmp_path: Path) -> None:
    with open_audit(tmp_path / "audit.jsonl", {}) as (audit, _), pytest.raises(ProtocolError):
        audit.of_run(RUN).sign_head()
