"""What a server's messages of facts say, read and checked."""

from collections.abc import Mapping
from typing import Any

from silograph.core.errors import FrameError
from silograph.federation.joining.matching import NONCE_BYTES
from silograph.federation.program import BLANK
from silograph.federation.session.message import Message


def nonce_of(facts: Mapping[str, Any]) -> bytes:
    """Return the nonce that a message gives; raise `FrameError` where it has none."""
    try:
        nonce = bytes.fromhex(str(facts.get("nonce")))
    except ValueError:
        nonce = b""
    if len(nonce) != NONCE_BYTES:
        raise FrameError(f"expected a nonce of {NONCE_BYTES} bytes, got {len(nonce)}")
    return nonce


def difference(known: Mapping[str, Any], facts: Mapping[str, Any]) -> str:
    """Return the first key in which two configs differ."""
    for part in sorted(known.keys() | facts.keys()):
        one, other = known.get(part), facts.get(part)
        if isinstance(one, dict) and isinstance(other, dict) and one != other:
            return min(str(k) for k in one.keys() | other.keys() if one.get(k) != other.get(k))
        if one != other:
            return part
    return "config"


def number_of(message: Message) -> int:
    """Return the number of a round that a message gives; raise `FrameError` where it has none."""
    number = message.facts().get("round")
    if type(number) is not int or number < BLANK:  # true is an int, too
        raise FrameError(f"expected the number of a round, got {number!r}")
    return number


def committed_of(message: Message) -> list[int]:
    """Return the rounds that the server holds; raise `FrameError` where a message has none."""
    found = message.facts().get("committed")
    if not isinstance(found, list) or not all(type(n) is int and n >= 0 for n in found):
        raise FrameError(f"expected the rounds that the server holds, got {found!r}")
    return found
