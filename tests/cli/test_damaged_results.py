"""Damaged result folders: every command that reads one says so, or reads what is not damaged."""

import json
import random
import shutil
from collections import Counter
from pathlib import Path

import pytest

from commands import QUICK, Capture, save
from conftest import planted_graph
from silograph.cli import run_app
from silograph.experiment.result_files import SUMS

NESTED = b"[" * 100_000


def damage(data: bytes, others: list[bytes], rng: random.Random) -> bytes:
    """Return other bytes than those of a file."""
    changed = data
    while changed == data:
        place = rng.randrange(len(data) + 1)
        match rng.randrange(8):
            case 0 if data:
                flipped = bytearray(data)
                flipped[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
                changed = bytes(flipped)
            case 1:
                changed = data[:place]
            case 2:
                changed = data[:place] + rng.randbytes(4) + data[place:]
            case 3:
                digits = [i for i, byte in enumerate(data) if chr(byte).isdigit()]
                if digits:
                    place = rng.choice(digits)
                    changed = data[:place] + rng.choice((b"7", b"-", b"1e999")) + data[place + 1 :]
            case 4:
                changed = rng.choice(others)
            case 5:
                changed = b""
            case 6:
                changed = rng.choice((b"null", b"{}", b"[]", b"\x00", b"\xff\xfe", NESTED))
            case _:
                changed = data[:place] + bytes(min(40, len(data) - place)) + data[place + 40 :]
    return changed


def commands(folder: Path) -> dict[str, list[str]]:
    """Return commands that read a result folder, by their names."""
    return {
        "report": ["report", str(folder), "--out", "page.html"],
        "predict": ["predict", str(folder), "--data", "g.npz", "--out", "p.csv"],
        "resume": ["resume", str(folder), "--json", "--quiet"],
    }


def try_folders(original: Path, capsys: Capture, cases: int, seed: int) -> Counter[str]:
    """Damage a file of a copy, again and again, and run every command on it."""
    rng, outcomes, copy = random.Random(seed), Counter[str](), Path("copy")
    files = sorted(path.relative_to(original) for path in original.rglob("*") if path.is_file())
    contents = [(original / file).read_bytes() for file in files]
    sums = json.loads((original / SUMS).read_text()).keys()
    clean: dict[str, bytes | str] = {}
    for number in range(-1, cases):  # the first one is not damaged
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(original, copy)
        file = rng.choice(files)
        if number >= 0:
            where = copy / file
            if rng.random() < 0.05:
                where.unlink()
            else:
                where.write_bytes(damage(where.read_bytes(), contents, rng))
        for name, words in commands(copy).items():
            for made in (Path("p.csv"), Path("page.html")):
                made.unlink(missing_ok=True)
            code = run_app(words)
            shown = capsys.readouterr()
            about = number, name, file
            assert code in (0, 1, 2), about
            assert "Traceback" not in shown.err, about
            outcomes[f"{name} {code}"] += 1
            if name == "report" and number >= 0 and str(file) in sums:
                assert code != 0, about
            if name == "predict" and code == 0:
                assert clean.setdefault(name, Path("p.csv").read_bytes()) == (
                    Path("p.csv").read_bytes()
                ), about
    return outcomes


@pytest.fixture
def original(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a complete run."""
    monkeypatch.chdir(tmp_path)
    save("g.npz", planted_graph(40))
    assert run_app(["run", "g.npz", *QUICK, "--quiet", "--json", "--out", "original"]) == 0
    return tmp_path / "original"


def test_some_damaged_folders(original: Path, capsys: Capture) -> None:
    outcomes = try_folders(original, capsys, 15, seed=0)
    assert outcomes["report 1"] + outcomes["report 2"] >= 5


@pytest.mark.slow
@pytest.mark.timeout(5400)
@pytest.mark.parametrize("seed", range(1, 6))
def test_a_thousand_damaged_folders(original: Path, capsys: Capture, seed: int) -> None:
    outcomes = try_folders(original, capsys, 200, seed)
    assert outcomes["report 1"] + outcomes["report 2"] >= 60
