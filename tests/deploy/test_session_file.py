"""What a server knows of its silos, in a file of its own."""

import json
from pathlib import Path

import pytest

from silograph.core.errors import CheckpointError, ConfigError
from silograph.core.files import write_atomic
from silograph.deploy.server import SESSION, SessionState, read_nodes, read_session, write_session


def test_it_comes_back_and_only_its_owner_reads_it(tmp_path: Path) -> None:
    nodes = {"a": {"train": 5, "val": 3, "test": 2, "rows": 12, "edges": 40}}
    known = SessionState(bytes(range(16)), {"b": b"1" * 32, "a": b"2" * 32}, nodes)
    write_session(tmp_path, known)
    found = read_session(tmp_path)
    assert (found.token, list(found.keys.items())) == (known.token, list(known.keys.items()))
    assert found.nodes == nodes
    assert (tmp_path / SESSION).stat().st_mode & 0o777 == 0o600
    write_atomic(tmp_path / "page", "for all")
    (tmp_path / "plain").write_text("for all")
    assert (tmp_path / "page").stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_a_file_from_before_rows_and_edges_were_reported(tmp_path: Path) -> None:
    nodes = {"a": {"train": 5, "val": 3, "test": 2}}
    write_session(tmp_path, SessionState(bytes(16), {"a": b"2" * 32}, nodes))
    with pytest.raises(CheckpointError) as caught:
        read_session(tmp_path)
    assert str(caught.value) == (
        f"expected numbers of rows and edges of a in {tmp_path / SESSION}, got none: another "
        "version wrote it; resume with that one, or start the run anew"
    )


def test_silos_report_their_nodes_once() -> None:
    nodes = {"train": 5, "val": 3, "test": 2, "rows": 12, "edges": 40}
    told = json.dumps({"nodes": nodes}).encode()
    assert read_nodes(told, None) == read_nodes(told, nodes) == nodes
    with pytest.raises(
        ConfigError, match=r"expected 6 training, 3 validation and 2 test nodes .* as at first"
    ):
        read_nodes(told, {**nodes, "train": 6})
    for wrong in (
        b"{}",
        b"[]",
        b"x",
        b'{"nodes": 3}',
        told.replace(b"5", b"5.5"),
        told[:50] + b"}}",
    ):
        with pytest.raises(ConfigError, match="expected numbers of training, validation and test"):
            read_nodes(wrong, None)
    for number in (b"-1", b"2147483648", b"true", b"1e400"):
        with pytest.raises(ConfigError, match="expected numbers of training, validation and test"):
            read_nodes(told.replace(b"5", number), None)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"token": "xy", "silos": {}}'])
def test_what_is_no_such_file(tmp_path: Path, text: str) -> None:
    (tmp_path / SESSION).write_text(text)
    with pytest.raises(CheckpointError, match="got none: it is no run of silos"):
        read_session(tmp_path)
