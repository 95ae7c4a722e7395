"""`silograph audit` and `silograph silo --init-policy`."""

import json
from functools import partial
from pathlib import Path

import pytest

from commands import Capture, printed
from silograph.cli import run_app
from silograph.cli.federation import short_authority
from silograph.core.kinds import Kind
from silograph.deploy.policy import STRICT_POLICY
from silograph.federation.frame import Envelope
from silograph.federation.session.audit import open_audit

ABOUT = {"server": "far.example.org:8443", "authority": "a" * 64, "policy": "b" * 64}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Two runs: one that is over, and one with 30 refusals whose process was killed."""
    path = tmp_path / "audit.jsonl"
    for name in ("1" * 32, "2" * 32):
        with open_audit(path, ABOUT) as (audit, _):
            run = audit.of_run(name)
            run.record_hello(bytes(300))
            run.record_agreement({"method": "fedavg", "rounds": 2, "config": "c" * 64})
            for number in (1, 2):
                run.record_reply(Envelope("train", Kind.WEIGHTS, number, 1), {}, bytes(4000))
            if name[0] == "1":
                audit.to_end(lambda: None)
            else:
                for _ in range(30):
                    run.record_refusal("expected \x1b[2Jtrain, got send")
    return path


def test_what_people_read(file: Path, capsys: Capture) -> None:
    text = printed(capsys, "audit", str(file))
    assert "\x1b" not in text
    lines = text.splitlines()
    assert lines[0] == f"run {'1' * 32}"
    assert lines[5].split() == ["sent", "calls", "bytes", "rounds", "1", "to", "2"]
    assert [line.split() for line in lines[6:9]] == [
        ["hello", "300", "B"],
        ["weights", "2", "8.0", "kB"],
        ["all", "of", "it", "2", "8.3", "kB"],
    ]
    assert lines[9].endswith(", the run is over")
    assert "  refused  16" in lines
    assert "    lines 10 to 25 (16 times): expected ?[2Jtrain, got send" in lines
    assert "  ended    no line of an end: the process was killed, or is at work" in lines
    assert lines[-3] == f"{file}: 25 lines, each as it was written"
    head = lines[-2].removeprefix("head ")
    assert len(head) == 64
    assert all(len(line) <= 80 for line in lines if str(file) not in line)
    noted = printed(capsys, "audit", str(file), "--head", head)
    assert f"line 25 has the noted hash {head}" in noted


def test_why_a_silo_did_not_agree_is_told(tmp_path: Path, capsys: Capture) -> None:
    path = tmp_path / "audit.jsonl"
    for name, reason in (("1", "expected silos that fit together, got others"), ("2", None)):
        with open_audit(path, ABOUT) as (audit, _):
            audit.of_run(name * 32).record_hello(bytes(300))
            assert audit.to_end(partial(str, reason) if reason else lambda: None) == reason
    text = " ".join(printed(capsys, "audit", str(path)).split())
    assert "did not agree to this run: expected silos that fit together, got others" in text
    assert "run 22222222222222222222222222222222 sent calls bytes hello 300 B all of it" in text
    assert text.count("did not agree to this run") == 2
    assert f"{path}: 4 lines, each" in text


def test_one_line_and_one_round_are_no_more(tmp_path: Path, capsys: Capture) -> None:
    path = tmp_path / "audit.jsonl"
    with open_audit(path, ABOUT) as (audit, _):
        audit.of_run("1" * 32).record_agreement(
            {"method": "fedavg", "rounds": 1, "config": "c" * 64}
        )
    text = printed(capsys, "audit", str(path))
    assert "fedavg, 1 round\n" in text
    assert f"{path}: 1 line, each as it was written" in text


@pytest.mark.parametrize("width", [80, 140])
def test_long_lines_are_folded_where_the_terminal_ends(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch, width: int
) -> None:
    """Rounds that were done again and refusals without a line are told, too."""
    monkeypatch.setenv("COLUMNS", str(width))
    path, reason = tmp_path / "a.jsonl", " ".join(["expected train (weights), got send"] * 5)
    with open_audit(path, ABOUT | {"server": "h" * 50 + ":8443"}) as (audit, _):
        run = audit.of_run("1" * 32)
        run.record_agreement({"method": "fedavg", "rounds": 2, "config": "c" * 64})
        for number in (1, 1):
            envelope = Envelope("train", Kind.WEIGHTS, number, 1)
            run.record_reply(envelope, {}, bytes(4000), begins=True)
        for _ in range(20):
            run.record_refusal(reason)
        audit.to_end(lambda: reason)
    *lines, _, _, _ = printed(capsys, "audit", str(path)).splitlines()
    assert max(map(len, lines)) <= width
    assert "  refused  20" in lines
    assert any(line.endswith("rounds 1 to 1, 1 done again") for line in lines)
    at = next(
        n for n, line in enumerate(lines) if line.startswith("    lines 4 to 19 (16 times): ")
    )
    assert " ".join(line.strip() for line in lines[at:]).count(reason) == 2
    assert lines[at + 1].startswith(" " * 11 + ("expected" if width == 140 else ""))


def test_what_programs_read(file: Path, capsys: Capture) -> None:
    told = json.loads(printed(capsys, "audit", str(file), "--json"))
    assert (told["lines"], told["broken"], told["noted"]) == (25, None, None)
    first, second = told["runs"]
    assert first["sent"] == {
        "hello": {"calls": None, "bytes": 300},
        "weights": {"calls": 2, "bytes": 8000},
    }
    assert first["agreed"].items() >= {**ABOUT, "line": 2, "method": "fedavg"}.items()
    assert first["ended"]["reason"] is None
    assert (second["refused"], len(second["refusals"]), second["ended"]) == (16, 16, None)


def test_damage_is_told_with_its_line(file: Path, capsys: Capture) -> None:
    data = file.read_bytes()
    file.write_bytes(data.replace(b"4000", b"3000", 1))
    assert run_app(["audit", str(file)]) == 1
    text = capsys.readouterr().out
    assert (
        f"BROKEN: {file}, line 3: expected the bytes that its hash was made of, got others" in text
    )
    assert "the 2 lines before it are whole; nothing is known of those after it" in text
    assert "ended    not known, the file is broken" in text
    assert "no line of an end" not in text
    assert run_app(["audit", str(file), "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["broken"]["line"] == 3
    file.write_bytes(data[:-5])
    assert run_app(["audit", str(file)]) == 1
    assert "line 25: expected a whole line, got" in capsys.readouterr().out


def test_a_noted_hash_that_is_gone(file: Path, capsys: Capture) -> None:
    head = json.loads(printed(capsys, "audit", str(file), "--json"))["head"]
    lines = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(b"".join(lines[:-1]))
    assert run_app(["audit", str(file)]) == 0  # nothing inside the file tells
    capsys.readouterr()
    assert run_app(["audit", str(file), "--head", head]) == 1
    assert f"MISSING: no line has the noted hash {head}" in capsys.readouterr().out


def test_no_file(tmp_path: Path, capsys: Capture) -> None:
    assert run_app(["audit", str(tmp_path / "none")]) == 2
    assert "expected an audit file at" in capsys.readouterr().err


def test_a_policy_to_start_from(tmp_path: Path, capsys: Capture) -> None:
    text = printed(capsys, "silo", "--init-policy", "--data", str(tmp_path))
    assert text == f"written to {tmp_path / 'policy.toml'}: read it, and change what does not fit\n"
    assert (tmp_path / "policy.toml").read_text(encoding="utf-8") == STRICT_POLICY
    assert run_app(["silo", "--init-policy", "--data", str(tmp_path)]) == 2
    assert "error: expected no policy at" in capsys.readouterr().err


def test_an_authority_is_cut_to_its_beginning_and_words_are_not() -> None:
    assert short_authority({"authority": "ab" * 32}) == "ab" * 8
    assert short_authority({"authority": "none: without TLS"}) == "none: without TLS"
