"""A silo's own folder: for its owner, and for one process."""

import signal
import subprocess
import sys
from pathlib import Path

import torch

from mistakes import raises_code
from silograph.core.errors import ConfigError
from silograph.core.payload import Stacked
from silograph.federation.session.state_store import StateStore, lock_state_folder, make_private

HOLDER = """
import sys, time
from pathlib import Path
from silograph.federation.session.state_store import lock_state_folder
with lock_state_folder(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(600)
"""


def mode_of(path: Path) -> int:
    return path.stat().st_mode & 0o777


def test_one_process_holds_a_folder_until_it_dies(tmp_path: Path) -> None:
    folder = tmp_path / "data" / "state"
    command = [sys.executable, "-c", HOLDER, str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"held\n"
        with (
            raises_code(ConfigError, "folder-in-use", path=str(folder)),
            lock_state_folder(folder),
        ):
            pass
        other.send_signal(signal.SIGKILL)
    for _ in range(2):  # and whoever is done lets go
        with lock_state_folder(folder):
            pass


def test_a_folder_that_cannot_be_held(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file", tmp_path / "file/x"):
        with (
            raises_code(ConfigError, "unwritable-path", path=str(folder)),
            lock_state_folder(folder),
        ):
            pass


def test_states_are_for_their_owner(tmp_path: Path) -> None:
    store = StateStore(tmp_path / "state" / "run")
    store.keep(1, {"w": Stacked(torch.ones(1, 2))})
    assert mode_of(tmp_path / "state") == mode_of(tmp_path / "state" / "run") == 0o700
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o755)
    make_private(shared)  # somebody's own choice
    assert mode_of(shared) == 0o755
