"""Watch the server's files of keys, and warn before its certificate expires."""

import os
import threading
from collections.abc import Callable, Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from silograph.core.errors import ConfigError
from silograph.deploy.server_settings import ServerSettings
from silograph.federation.session.events import Event, EventCallback, What

if TYPE_CHECKING:
    from silograph.federation.session.hub import Hub
    from silograph.federation.session.identity import Register
    from silograph.federation.session.key_versions import KeyVersion

SECONDS = 1.0  # between checks of the files
A_DAY = timedelta(days=1)  # between warnings that the certificate expires


class KeyWatch:
    """Checks the files of keys for changes once a second, in a thread of its own.

    A changed file is used once all of it is valid; until then the previous keys stay in use. A
    valid list of revoked keys counts at once, also while the file of keys has an error. Streams of
    silos whose key was replaced or revoked are ended.

    Args:
        settings: of the server.
        register: of keys.
        hub: whose streams are ended.
        report: gets the events.
        now: returns the time, in UTC.
    """

    def __init__(
        self,
        settings: ServerSettings,
        register: "Register",
        hub: "Hub",
        report: EventCallback,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        self._settings = settings
        self._register = register
        self._hub = hub
        self._report = report
        self._now = now
        self._stamps = self._read_stamps()
        self._versions: Mapping[str, tuple[KeyVersion, ...]] = {}  # of the last valid file
        self._warned: datetime | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="keys", daemon=True)

    def start(self) -> None:
        """Read the list of revoked keys, warn of the certificate, and begin to watch.

        Raises:
            ConfigError: the list or the file of keys has an error.
        """
        error = self._read_again()
        if error is not None:
            raise error
        self._warn_of_certificate()
        settings = self._settings
        if (settings.keys, settings.revoked, settings.certificate) != (None, None, None):
            self._thread.start()

    def close(self) -> None:
        """End the thread."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()

    def look(self) -> None:
        """Read the files again if they have changed, and warn once a day of the certificate."""
        stamps = self._read_stamps()
        if stamps != self._stamps:
            self._stamps = stamps
            try:
                keys_error = self._read_again()
            except ConfigError as error:
                note = f"the former keys stay in use, as a changed file has an error: {error}"
            else:
                note = "the files of keys were read again"
                if keys_error is not None:
                    note = "--keys has an error, so the keys read before stay in use"
                    if self._settings.revoked is not None:
                        note += "; the list of revoked keys was applied"
                    note += f": {keys_error}"
            ended = self._hub.end_replaced()  # also of keys that were revoked before the error
            who = f"; the streams of {', '.join(ended)} were ended" if ended else ""
            self._report(Event(What.KEYS, note=f"{note}{who}"))
        if self._warned is None or self._now() - self._warned >= A_DAY:
            self._warn_of_certificate()

    def _watch(self) -> None:
        while not self._stop.wait(SECONDS):
            self.look()

    def _read_again(self) -> ConfigError | None:
        """Read and use both files; return the error of the file of keys, raise that of the list."""
        from silograph.federation.session.key_versions import read_key_versions, read_revoked

        keys, path = self._settings.keys, self._settings.revoked
        revoked = frozenset[bytes]() if path is None else read_revoked(path)
        keys_error = None
        try:
            if keys is not None:
                self._versions = read_key_versions(keys)
        except ConfigError as error:
            keys_error = error
        self._update_register(revoked)
        return keys_error

    def _update_register(self, revoked: frozenset[bytes]) -> None:
        """Use the newest keys; refuse revoked ones and those that they have signed."""
        from silograph.federation.session.key_versions import successors_of_revoked

        newest = {name: versions[-1].public for name, versions in self._versions.items()}
        successors = successors_of_revoked(self._versions, revoked)
        self._register.update(newest, revoked | {each.public for each in successors})
        for each in successors:
            note = (
                f"version {each.version} of the key of {each.name} is refused, as a revoked key or "
                "its successor has signed it: move key.pem and key.versions away at the silo, run "
                "silograph silo --make-key, and replace the silo's lines by the one that it prints"
            )
            self._report(Event(What.KEYS, each.name, note=note))

    def _read_stamps(self) -> list[tuple[int, int, int] | None]:
        """Return what changes with the files: inode, size and time of writing."""
        keys = self._settings.keys
        paths = [path for path in (keys, self._settings.revoked) if path is not None]
        if keys is not None and keys.is_dir():
            paths += sorted(keys.glob("*.pub"))
        return [_stamp_of(path) for path in paths]

    def _warn_of_certificate(self) -> None:
        from silograph.federation.session.identity import end_warning, ends_of

        self._warned = self._now()
        if self._settings.certificate is None:
            return
        try:
            ends = ends_of(self._settings.certificate[0].read_bytes())
        except OSError:
            return
        warning = end_warning("the server's certificate", min(ends), self._now()) if ends else None
        if warning is not None:
            self._report(Event(What.EXPIRES, note=warning))


def _stamp_of(path: Path) -> tuple[int, int, int] | None:
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_ino, status.st_size, status.st_mtime_ns
