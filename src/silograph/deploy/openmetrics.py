"""Figures as OpenMetrics text, and a port where a monitoring system reads them.

"OpenMetrics, a cloud-native, highly scalable metrics protocol", version 1.0 (Hartmann, Kochie,
Brazil and Rabenstein, 2022).
"""

import math
import socket
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler
from socketserver import ThreadingTCPServer
from typing import Literal
from urllib.parse import urlsplit

from silograph.core.errors import ConfigError
from silograph.federation.session.wire import join_address, split_address

CONTENT_TYPE = "application/openmetrics-text; version=1.0.0; charset=utf-8"
PATH = "/metrics"
HOST = "127.0.0.1"
SECONDS = 10.0  # for a request to be said
FamilyType = Literal["counter", "gauge", "info", "stateset", "summary"]
ESCAPES = str.maketrans({"\\": r"\\", '"': r"\"", "\n": r"\n"})


@dataclass(frozen=True)
class Sample:
    """One line: what stands behind the family's name, labels, value."""

    value: float
    labels: Mapping[str, str]
    suffix: str = ""


@dataclass(frozen=True)
class Family:
    """What is told of one name.

    Attributes:
        name: with the unit at its end, if there is one, and without a sample's suffix.
        type: of OpenMetrics.
        help: one line.
        samples: in their order.
        unit: seconds, bytes.
    """

    name: str
    type: FamilyType
    help: str
    samples: tuple[Sample, ...]
    unit: str = ""


def counter(name: str, help: str, values: Mapping[str, float], label: str) -> Family:
    """Return a counter with one label."""
    samples = tuple(Sample(v, {label: key}, "_total") for key, v in values.items())
    return Family(name, "counter", help, samples)


def single(name: str, type: FamilyType, help: str, value: float, unit: str = "") -> Family:
    """Return a family of one value without labels."""
    suffix = "_total" if type == "counter" else ""
    return Family(name, type, help, (Sample(value, {}, suffix),), unit)


def exposition(families: Iterable[Family]) -> str:
    """Return families as OpenMetrics text."""
    return "".join(f"{line}\n" for family in families for line in _lines(family)) + "# EOF\n"


def _lines(family: Family) -> Iterator[str]:
    yield f"# TYPE {family.name} {family.type}"
    if family.unit:
        yield f"# UNIT {family.name} {family.unit}"
    yield f"# HELP {family.name} {family.help.translate(ESCAPES)}"
    for sample in family.samples:
        labels = ",".join(f'{k}="{v.translate(ESCAPES)}"' for k, v in sample.labels.items())
        labels = f"{{{labels}}}" if labels else ""
        yield f"{family.name}{sample.suffix}{labels} {number(sample.value)}"


def number(value: float) -> str:
    """Return a value as OpenMetrics writes it.

    >>> number(3), number(0.5), number(float("inf")), number(float("nan"))
    ('3', '0.5', '+Inf', 'NaN')
    """
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    return repr(value)


def address_of(text: str) -> tuple[str, int]:
    """Return host and port of `PORT`, which is of this machine only, or `HOST:PORT`.

    >>> address_of("9100"), address_of("0.0.0.0:9100")
    (('127.0.0.1', 9100), ('0.0.0.0', 9100))

    Raises:
        ConfigError: it is neither.
    """
    try:
        return split_address(text if ":" in text else f"{HOST}:{text}", "metrics")
    except ConfigError:
        raise ConfigError(f"metrics: expected PORT or HOST:PORT, got {text!r}") from None


@contextmanager
def serving(text: Callable[[], str], address: str) -> Iterator[str]:
    """Answer GET /metrics inside the block; yield where, as HOST:PORT.

    Args:
        text: makes the answer.
        address: PORT or HOST:PORT; port 0 takes a free one.

    Raises:
        ConfigError: the address is none or not free.
    """
    host, port = address_of(address)
    try:
        server = _Server((host, port), text)
    except OSError as error:
        line = f"metrics: expected a free address, got {address}: {error.strerror}"
        raise ConfigError(line) from None
    thread = threading.Thread(target=server.serve_forever, args=(0.1,), daemon=True)
    thread.start()
    try:
        yield join_address(host, server.server_address[1])
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class _Server(ThreadingTCPServer):
    allow_reuse_address = True  # of a server that has ended; one that listens keeps it
    daemon_threads = True
    block_on_close = False

    def __init__(self, address: tuple[str, int], text: Callable[[], str]) -> None:
        self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        self.text = text
        super().__init__(address, _Handler)

    def handle_error(self, request: object, client_address: object) -> None:
        """Say nothing: a reader that hangs up in the middle is no concern of the run."""


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    timeout = SECONDS
    server_version = "silograph"
    sys_version = ""

    def handle_one_request(self) -> None:
        """Answer one request of any method."""
        self.raw_requestline = self.rfile.readline(65537)
        self.close_connection = True
        if self.raw_requestline and self.parse_request():
            found = self.command == "GET" and urlsplit(self.path).path == PATH
            body = self.server.text().encode() if found else b""
            self.send_response(200 if found else 404)
            self.send_header("Content-Type", CONTENT_TYPE if found else "text/plain")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""
