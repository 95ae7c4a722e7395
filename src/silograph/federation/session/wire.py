"""What both ends of a gRPC stream share: the method's name, limits, keepalive, addresses.

Bytes travel as they are: no code is generated and nothing is serialized by gRPC. A peer that is
gone without a word, its cable cut or its process stopped, is noticed by keepalive in 10 s.
"""

import importlib.util
import ipaddress

from silograph.core.errors import ConfigError
from silograph.federation.session.chunks import CHUNK

SERVICE = "silograph.Session"
ATTACH = "Attach"
PATH = f"/{SERVICE}/{ATTACH}"
KEEPALIVE = 5000  # ms between pings, and to wait for the answer
OPTIONS = [
    ("grpc.max_send_message_length", CHUNK),
    ("grpc.max_receive_message_length", CHUNK),  # longer ones are refused by their first bytes
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
PACKAGES = ("grpc", "cryptography")


def need_packages() -> None:
    """Raise `ConfigError` unless the packages of a federation are installed."""
    missing = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"expected the package {missing[0]} for a federation of silos, got none: "
            "pip install 'silograph[federation]'"
        )


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
        raise ConfigError(f"{setting}: expected HOST:PORT, got {text!r}")
    if len(port) > 5 or int(port) >= 2**16:
        raise ConfigError(f"{setting}: expected a port from 1 to 65535 in HOST:PORT, got {text!r}")
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
