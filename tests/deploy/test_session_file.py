"""What a server knows of its silos, in a file of its own."""

from pathlib import Path

import pytest

from silograph.core.errors import CheckpointError
from silograph.core.files import write_atomic
from silograph.deploy.session_file import SESSION, Known, read_known, write_known


def test_it_comes_back_and_only_its_owner_reads_it(tmp_path: Path) -> None:
    known = Known(bytes(range(16)), {"b": b"1" * 32, "a": b"2" * 32})
    write_known(tmp_path, known)
    found = read_known(tmp_path)
    assert (found.token, list(found.keys.items())) == (known.token, list(known.keys.items()))
    assert (tmp_path / SESSION).stat().st_mode & 0o777 == 0o600
    write_atomic(tmp_path / "page", "for all")
    (tmp_path / "plain").write_text("for all")
    assert (tmp_path / "page").stat().st_mode == (tmp_path / "plain").stat().st_mode


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"token": "xy", "silos": {}}'])
def test_what_is_no_such_file(tmp_path: Path, text: str) -> None:
    (tmp_path / SESSION).write_text(text)
    with pytest.raises(CheckpointError, match="got none: it is no run of silos"):
        read_known(tmp_path)
