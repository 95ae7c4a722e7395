"""`silograph silo --new-key`, and warnings of certificates that end."""

from pathlib import Path

import pytest

from commands import Capture, printed

pytest.importorskip("grpc")
pytest.importorskip("cryptography")

from silograph.cli import run_app
from silograph.deploy.silo import _end_of_authority
from silograph.federation.session.identity import SiloKey, make_certificates
from silograph.federation.session.key_versions import read_key_versions

DATA = Path("silos", "client_00")
SILO = ("silo", "--data", str(DATA))


@pytest.fixture
def folder(work: Path) -> Path:
    words = ["--clients", "2", "--partition", "random", "--out", "silos"]
    assert run_app(["export-silos", "g.npz", *words]) == 0
    return work / DATA


def test_lines_of_all_versions_make_a_file_of_keys(folder: Path, capsys: Capture) -> None:
    lines = [printed(capsys, *SILO, "--make-key")]
    lines += [printed(capsys, *SILO, "--new-key") for _ in range(2)]
    assert [line.count("\n") for line in lines] == [1, 1, 1]  # the line alone can be appended
    Path("keys.txt").write_text("".join(lines))
    versions = read_key_versions(Path("keys.txt"))["client_00"]
    assert [each.version for each in versions] == [1, 2, 3]
    assert versions[-1].public == SiloKey.load(folder / "key.pem").public


def test_there_must_be_a_key_to_replace(folder: Path, capsys: Capture) -> None:
    (folder / "key.pem").unlink(missing_ok=True)
    assert run_app([*SILO, "--new-key"]) == 2
    assert "--make-key" in capsys.readouterr().err


@pytest.mark.parametrize(("days", "warns"), [(20, True), (40, False)])
def test_a_silo_warns_before_its_authority_ends(tmp_path: Path, days: int, warns: bool) -> None:
    make_certificates(tmp_path / "certs", ["localhost"], days)
    roots = (tmp_path / "certs" / "ca.pem").read_bytes()
    assert (_end_of_authority(roots) is not None) == warns
    make_certificates(tmp_path / "later", ["localhost"], 400)
    assert _end_of_authority(roots + (tmp_path / "later" / "ca.pem").read_bytes()) is None
    assert _end_of_authority(None) is None
