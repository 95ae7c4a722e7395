"""Damaged result folders: every command that reads one says so, or reads what is not damaged."""

import json
import random
import shutil
from collections import Counter
from pathlib import Path

import pytest

from commands import QUICK, Capture, save
from conftest import planted_graph
from rating_graphs import write_ratings
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


REPORT = ["report", "copy", "--out", "page.html"]
RESUME = ["resume", "copy", "--json", "--quiet"]
# What reads the folder of a run, of a run on ratings, and of a comparison.
OF_RUN = [REPORT, ["predict", "copy", "--data", "g.npz", "--out", "p.csv"], RESUME]
OF_RATINGS = [REPORT, ["recommend", "copy", "--all", "--out", "p.csv"], RESUME]
OF_COMPARISON = [REPORT, ["report", "original", "copy", "--out", "page.html"], RESUME]


def try_folders(
    original: Path, commands: list[list[str]], capsys: Capture, cases: int, seed: int
) -> Counter[str]:
    """Damage a file of a copy, again and again, and run every command on it."""
    rng, outcomes, copy = random.Random(seed), Counter[str](), Path("copy")
    files = sorted(path.relative_to(original) for path in original.rglob("*") if path.is_file())
    contents = [(original / file).read_bytes() for file in files]
    # The report of a run checks all of its files; that of a comparison those that it reads.
    is_run = (original / "config.toml").exists()
    sums = json.loads((original / SUMS).read_text()).keys() if is_run else ()
    clean: dict[str, bytes] = {}
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
        for words in commands:
            name = words[0]
            for old in (Path("p.csv"), Path("page.html")):
                old.unlink(missing_ok=True)
            code = run_app(words)
            shown = capsys.readouterr()
            about = number, name, file
            assert code in (0, 1, 2), about
            assert "Traceback" not in shown.err, about
            outcomes[f"{' '.join(words[:2])} {code}"] += 1
            if name == "report" and number >= 0 and str(file) in sums:
                assert code != 0, about
            if code == 0 and name != "resume":  # what was damaged is not among what was read
                made = Path(words[-1]).read_bytes()
                same = clean.setdefault(str(words), made) == made
                # Without a digest the page is made, and says that it could not be checked.
                is_noted = b"could not be checked" in made or b"could be checked by" in made
                assert same or (file.suffix == ".json" and is_noted), about
    return outcomes


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with a graph and a folder of ratings."""
    monkeypatch.chdir(tmp_path)
    save("g.npz", planted_graph(40))
    write_ratings(Path("ratings"))
    return tmp_path


def original(kind: str) -> list[list[str]]:
    """Make the folder `original`, and return the commands that read it."""
    flags = ["--quiet", "--json", "--out", "original"]
    match kind:
        case "run":
            words, commands = ["run", "g.npz", *QUICK], OF_RUN
        case "ratings":
            learned = ["--method", "fedgnn", "--rounds", "2", "--clients", "3"]
            words, commands = ["run", "ratings", *learned], OF_RATINGS
        case _:
            words = ["compare", "g.npz", *QUICK[2:], "--methods", "local,fedavg", "--seeds", "1"]
            commands = OF_COMPARISON
    assert run_app([*words, *flags]) == 0
    return commands


KINDS = ["run", "ratings", "comparison"]


@pytest.mark.usefixtures("start")
@pytest.mark.parametrize("kind", KINDS)
def test_some_damaged_folders(kind: str, capsys: Capture) -> None:
    outcomes = try_folders(Path("original"), original(kind), capsys, 8, seed=0)
    assert outcomes["report copy 1"] + outcomes["report copy 2"] >= 3


@pytest.mark.slow
@pytest.mark.timeout(5400)
@pytest.mark.usefixtures("start")
@pytest.mark.parametrize("seed", range(1, 4))
@pytest.mark.parametrize("kind", KINDS)
def test_a_thousand_damaged_folders(kind: str, capsys: Capture, seed: int) -> None:
    outcomes = try_folders(Path("original"), original(kind), capsys, 112, seed)
    assert outcomes["report copy 1"] + outcomes["report copy 2"] >= 34
