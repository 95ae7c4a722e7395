"""From raw tables to predictions without own code (docs/how_to/prepare_tables.md)."""

import re
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("grpc")
pytest.importorskip("cryptography")

from commands import Capture
from silograph.cli import run_app
from silograph.core.config import make_config
from silograph.deploy.server_settings import ServerSettings
from silograph.federation.session.identity import SiloKey
from silograph.federation.session.key_versions import read_keys
from silos import federate

PLAIN = ServerSettings("127.0.0.1:0", insecure=True, patience=600)
BANKS = ("north", "south")
SCHEMA = """
[nodes]
table = "accounts"
key = "account"
label = "fraud"
classes = ["no", "yes"]
[features.age]
type = "number"
scale = "standard"
indicator = true
[edges.transfers]
source = "payer"
target = "payee"
listed_by = "source"
[silos]
north = "N*"
south = "S*"
"""


def write_tables(folder: Path, name: str, n: int = 40) -> None:
    """Accounts and transfers of a bank, some of them to the other one."""
    rng, (own, far) = (
        np.random.default_rng(len(name)),
        (name[0].upper(), "SN"["NS".index(name[0].upper())]),
    )
    folder.mkdir(parents=True)
    rows = [
        f"{own}{i},{rng.integers(18, 80) if i % 7 else ''},{'yes' if i % 3 else 'no'}"
        for i in range(n)
    ]
    (folder / "accounts.csv").write_text("\n".join(["account,age,fraud", *rows]) + "\n")
    pairs = {(f"{own}{i}", f"{own}{(i * 5 + 1) % n}") for i in range(n)}
    pairs |= {(f"{own}{i}", f"{far}{i * 3 % n}") for i in range(0, n, 2)}
    edges = [f"{a},{b}" for a, b in sorted(pairs)]
    (folder / "transfers.csv").write_text("\n".join(["payer,payee", *edges]) + "\n")


def test_banks_with_lists_for_each_other(
    tmp_path: Path, capsys: Capture, caplog: pytest.LogCaptureFixture
) -> None:
    schema = tmp_path / "schema.toml"
    schema.write_text(SCHEMA)
    for name in BANKS:
        write_tables(tmp_path / name / "tables", name)
        words = ["prepare", str(tmp_path / name / "tables"), "--schema", str(schema)]
        secret = ["--make-secret"] if name == "north" else []
        assert run_app([*words, "--out", str(tmp_path / name / "lists"), *secret]) == 0
    secret_file = tmp_path / "north/lists/secret"
    assert len(secret_file.read_bytes()) == 32
    assert secret_file.stat().st_mode & 0o077 == 0
    secret_file.rename(tmp_path / "secret")
    for name, other in (BANKS, BANKS[::-1]):
        words = ["prepare", str(tmp_path / name / "tables"), "--schema", str(schema)]
        words += ["--received", str(tmp_path / other / f"lists/edges_for/{other}_to_{name}.csv")]
        capsys.readouterr()
        assert run_app([*words, "--make-key", "--out", str(tmp_path / name / "silo")]) == 0
        with (tmp_path / "keys.txt").open("a") as keys:
            keys.write(capsys.readouterr().out.splitlines()[-1] + "\n")
    folders = [tmp_path / name / "silo" for name in BANKS]
    public = {
        name: SiloKey.load(f / "key.pem").public for name, f in zip(BANKS, folders, strict=True)
    }
    assert read_keys(tmp_path / "keys.txt") == public
    assert all((folder / "cross_edges.csv").read_text().count("\n") > 10 for folder in folders)
    values = {"rounds": 2, "hidden": 4, "split": "0.4/0.3/0.3", "clients": 2}
    config = make_config(values | {"normalize": "standard"})
    federate(folders, config, PLAIN, keep=True, secret=tmp_path / "secret")
    for name, folder in zip(BANKS, folders, strict=True):
        (run,) = (folder / "results").iterdir()
        out = [tmp_path / f"{name}_{kind}.csv" for kind in ("tables", "folder")]
        words = ["predict", str(run), "--tables", str(tmp_path / name / "tables")]
        assert run_app([*words, "--out", str(out[0])]) == 0
        assert run_app(["predict", str(run), "--data", str(folder), "--out", str(out[1])]) == 0
        assert out[0].read_bytes() == out[1].read_bytes()
        # New nodes need no labels, and edges that are left out are named.
        new = tmp_path / name / "new"
        write_tables(new, name)
        accounts = (new / "accounts.csv").read_text().splitlines()
        (new / "accounts.csv").write_text("\n".join(r.rpartition(",")[0] for r in accounts) + "\n")
        caplog.clear()
        words[3] = str(new)
        assert run_app([*words, "--out", str(tmp_path / f"{name}_new.csv")]) == 0
        assert f"{name}: left out: 20 edges to" in caplog.text
        assert "column of labels" not in caplog.text
        assert "edges_for" not in caplog.text
        # What was saved with the run is checked, and its absence says what to do.
        prepared = run / "prepared.json"
        prepared.write_text(prepared.read_text().replace("N*", "M*"))
        words += ["--out", str(tmp_path / "more.csv")]
        assert run_app(words) == 2
        assert "prepared.json" in capsys.readouterr().err
        prepared.unlink()
        assert run_app(words) == 2
        assert "give the folder that silograph prepare made by --like" in capsys.readouterr().err
        assert not (tmp_path / "more.csv").exists()
        assert run_app([*words, "--like", str(folder)]) == 0
        (tmp_path / "more.csv").unlink()


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ([], "expected --data or --tables, got neither"),
        (["--data", "a", "--tables", "b"], "expected --data or --tables, got both"),
        (["--data", "a", "--like", "b"], "expected --like with --tables only"),
        (["--tables", "a", "--columns", "b"], "expected no --data-dir, --columns or --na-values"),
    ],
)
def test_predict_takes_one_source(
    tmp_path: Path, capsys: Capture, words: list[str], line: str
) -> None:
    assert run_app(["predict", str(tmp_path), "--out", str(tmp_path / "p.csv"), *words]) == 2
    assert line in capsys.readouterr().err


def test_keys_and_one_secret_of_several_folders(tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "schema.toml").write_text(SCHEMA)
    for name in BANKS:
        write_tables(tmp_path / "raw" / name, name)
    words = ["prepare", str(tmp_path / "raw"), "--schema", str(tmp_path / "schema.toml")]
    words += ["--out", str(tmp_path / "silos"), "--make-key", "--make-secret"]
    assert run_app(words) == 0
    lines = capsys.readouterr().out.splitlines()
    keys = [line for line in lines if re.fullmatch(r"\w+ [0-9a-f]{64}", line)]
    (tmp_path / "keys.txt").write_text("\n".join(keys))
    assert sorted(read_keys(tmp_path / "keys.txt")) == sorted(BANKS)
    secrets = {(tmp_path / "silos" / name / "secret").read_bytes() for name in BANKS}
    assert len(secrets) == 1
