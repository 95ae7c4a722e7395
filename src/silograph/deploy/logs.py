"""Logs of the command line: lines for people on standard error, JSON lines in a file.

Silograph itself logs under `silograph` and configures nothing; whoever uses it as a library adds
handlers of their own, such as a `FileHandler` with `JsonLines`.
"""

import json
import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from io import TextIOWrapper
from logging.handlers import WatchedFileHandler
from pathlib import Path

from silograph.core.errors import ConfigError, unknown
from silograph.core.files import opens_private
from silograph.core.text import printable
from silograph.federation.session.events import FIELDS, What

LOG = logging.getLogger("silograph")
LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING}
TOLD_ELSEWHERE = (What.ROUND, What.ENDED)  # by the progress, and by the last line of a command


class JsonLines(logging.Formatter):
    """One JSON object a record: time (UTC), level, event, message, and the event's fields."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the record as a line."""
        when = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        line = {"time": when.replace("+00:00", "Z"), "level": record.levelname.lower()}
        line["event"] = vars(record).get("event", str(What.NOTE))
        line["message"] = record.getMessage()
        line |= {name: vars(record)[name] for name in FIELDS if name in vars(record)}
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line)


class LogLine(logging.Formatter):
    """Time and message on one line; a traceback below."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - logging calls it
        """Return time and message."""
        return printable(super().formatMessage(record))


class ForPeople(logging.Handler):
    """Lines on standard error as it is at the moment: a live view moves down for them."""

    def __init__(self) -> None:
        super().__init__()
        self.setFormatter(LogLine("%(asctime)s %(message)s", "%Y-%m-%d %H:%M:%S"))
        self.addFilter(lambda record: vars(record).get("event") not in TOLD_ELSEWHERE)

    def emit(self, record: logging.LogRecord) -> None:
        """Write a line at once, so that lines of threads do not mix."""
        lines = self.format(record).split("\n")  # more than one where there is a traceback
        sys.stderr.write("".join(printable(line) + "\n" for line in lines))
        sys.stderr.flush()


class ToFile(WatchedFileHandler):
    """Appends to a file for its owner only, for a silo's log may name its nodes.

    It is opened anew where it has been rotated; a full disk ends it.
    """

    def _open(self) -> TextIOWrapper:
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT
        return os.fdopen(opens_private(self.baseFilename, flags), "a", encoding=self.encoding)

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: ARG002, N802 - logging calls it
        """Say once that no more is written; the run goes on."""
        error = sys.exc_info()[1]
        LOG.removeHandler(self)
        LOG.warning("nothing more is written to %s: %s", self.baseFilename, error)


@contextmanager
def logging_to(file: Path | None, level: str = "info") -> Iterator[None]:
    """Log for people inside the block, and to a file as JSON lines if there is one.

    Args:
        file: that lines are added to.
        level: debug, info or warning: the least that is logged.

    Raises:
        ConfigError: another level, or a file that cannot be written.
    """
    if level not in LEVELS:
        raise ConfigError(f"log_level: {unknown('level', level, LEVELS)}")
    handlers: list[logging.Handler] = [ForPeople()]
    if file is not None:
        try:
            handlers.append(ToFile(file, encoding="utf-8"))
        except OSError as error:
            raise ConfigError(f"expected a log to write at {file}, got: {error.strerror}") from None
        handlers[-1].setFormatter(JsonLines())
    before = LOG.level
    LOG.setLevel(LEVELS[level])
    for handler in handlers:
        LOG.addHandler(handler)
    try:
        yield
    finally:
        LOG.setLevel(before)
        for handler in handlers:
            LOG.removeHandler(handler)
            handler.close()
