"""What both ends of a gRPC stream share: the method's name, limits, keepalive, addresses.

Bytes travel as they are: no code is generated and nothing is serialized by gRPC. A peer that is
gone without a word, its cable cut or its process stopped, is noticed by keepalive in 10 s.
"""

import importlib.util
import ipaddress
import struct
from collections.abc import Callable, Iterable, Iterator

from silograph.core.errors import ConfigError, FrameError, missing_package, mistake

# --- chunks --------------------------------------------------------------------------------------
# Long messages travel as chunks, so that nothing is received that is not announced and allowed.
#
# A message of at most `CHUNK` bytes travels as it is. Of a longer one its length goes before it:
#
#     lead     magic "SGL1" · length of the message u64
#     chunks   `CHUNK` bytes each, the last one what is left
#
# gRPC refuses what is longer than a chunk by its first bytes. So an end that claims a long message
# costs nothing, and one that sends it costs what it has sent, up to what the reader allows.


CHUNK = 2**21  # bytes: in chunks of 64 KiB a message takes three times as long
SHORT = 2**16  # bytes of any message that has no frame: greetings, rounds, what was done
LEAD = struct.Struct("<4sQ")
MAGIC = b"SGL1"


def cut(messages: Iterable[bytes]) -> Iterator[bytes]:
    """Yield messages in chunks."""
    for data in messages:
        if len(data) <= CHUNK:
            yield data
            continue
        yield LEAD.pack(MAGIC, len(data))
        for start in range(0, len(data), CHUNK):
            yield data[start : start + CHUNK]


def whole(chunks: Iterator[bytes], most: Callable[[int], int]) -> Iterator[bytes | bytearray]:
    """Yield the messages joined from chunks.

    Args:
        chunks: as they arrive.
        most: bytes of the longest message that is taken, given those of one that is not short.

    Raises:
        FrameError: a message that is longer, or chunks that are none.
    """
    for data in chunks:
        leads = len(data) == LEAD.size and data[:4] == MAGIC
        size = LEAD.unpack(data)[1] if leads else len(data)
        if size > SHORT and size > (limit := most(size)):
            raise FrameError(f"expected a message of at most {limit:,} bytes, got {size:,}")
        yield _joined(chunks, size) if leads else data


def _joined(chunks: Iterator[bytes], size: int) -> bytearray:
    """Return the message of the next chunks."""
    data = bytearray()
    while len(data) < size:
        part = next(chunks, b"")
        expected = min(CHUNK, size - len(data))
        if len(part) != expected:
            raise FrameError(f"expected a chunk of {expected} bytes, got {len(part)}")
        data += part
    return data


SERVICE = "silograph.Session"
ATTACH = "Attach"
PATH = f"/{SERVICE}/{ATTACH}"
KEEPALIVE = 5000  # ms between pings, and to wait for the answer
OPTIONS = [
    ("grpc.max_send_message_length", CHUNK),
    ("grpc.max_receive_message_length", CHUNK),  # longer ones are refused by their first bytes
    # A message of weights then needs few frames and writes; the defaults are 16 KiB and 64 KiB.
    ("grpc.http2.max_frame_size", 2**20),
    ("grpc.http2.write_buffer_size", 2**20),
    ("grpc.compression_enabled_algorithms_bitset", 1),  # none: a few bytes stay a few
    ("grpc.keepalive_time_ms", KEEPALIVE),
    ("grpc.keepalive_timeout_ms", KEEPALIVE),
    ("grpc.http2.ping_timeout_ms", KEEPALIVE),  # else a minute, whatever keepalive says
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.http2.min_ping_interval_without_data_ms", KEEPALIVE // 2),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", KEEPALIVE // 2),
    ("grpc.so_reuseport", 0),  # two servers on one port would share its silos
    ("grpc.enable_http_proxy", 0),
]
PACKAGES = ("grpc", "cryptography", "prometheus_client")


def need_packages() -> None:
    """Raise `ConfigError` unless the packages of a federation are installed."""
    missing = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise missing_package(missing[0], "a federation of silos", "federation", ConfigError)


def split_address(text: str, setting: str) -> tuple[str, int]:
    """Return host and port of `HOST:PORT`; IPv6 hosts stand in brackets.

    >>> split_address("localhost:8443", "server"), split_address("[::1]:0", "listen")
    (('localhost', 8443), ('::1', 0))

    Args:
        text: the address.
        setting: that it was given as, which an error names.

    Raises:
        ConfigError: it is none.
    """
    host, colon, port = text.rpartition(":")
    host = host[1:-1] if host[:1] == "[" and host[-1:] == "]" else host
    if not (colon and host and port.isascii() and port.isdigit()):
        raise ConfigError(
            f"{setting}: expected HOST:PORT, got {text!r}", **mistake("option-value", setting, text)
        )
    if len(port) > 5 or int(port) >= 2**16:
        raise ConfigError(
            f"{setting}: expected a port from 1 to 65535 in HOST:PORT, got {text!r}",
            **mistake("option-value", setting, text),
        )
    return host, int(port)


def join_address(host: str, port: int) -> str:
    """Return HOST:PORT.

    >>> join_address("::1", 80)
    '[::1]:80'
    """
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def is_loopback(host: str) -> bool:
    """Whether a host is this machine, by its address or as localhost."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def check_plaintext(host: str) -> None:
    """Raise `ConfigError` where messages without TLS would leave this machine."""
    if not is_loopback(host):
        raise ConfigError(
            f"expected TLS to {host}, got --insecure, which is for 127.0.0.1, ::1 and localhost "
            "only: use certificates (silograph certs makes some)"
        )
