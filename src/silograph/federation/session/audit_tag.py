"""Tags of frames in an audit file: with the silo's key the frame of a line can be recognized.

The key is in `audit.key` beside the file, so nobody but the silo can make another frame that fits
the line. Long frames have a GMAC, which costs a twelfth of a SHA-256; but its code is called once a
call, between trainings that have driven it out of the caches, and takes 40 µs even for an empty
frame. Short ones have a keyed BLAKE2b, whose code the line's own hash needs anyway.
"""

from hashlib import blake2b

KEY_BYTES, NONCE_BYTES = 32, 12  # of AES-256 in Galois counter mode
PERSON = b"silograph frame"  # the same key as that of AES, for another purpose
SHORT_FRAME = 2**14  # bytes up to which BLAKE2b is the faster one


class FrameTags:
    """Makes the tags of frames.

    Args:
        key: of the silo's audit file, `KEY_BYTES` long.
    """

    def __init__(self, key: bytes) -> None:
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM

        self._key = key
        self._mac = AESGCM(key)

    def tag(self, former: str, frame: bytes) -> str:
        """Return the tag of a frame in hexadecimal: of 32 bytes if it is short, else of 16.

        A keyed BLAKE2b (RFC 7693) of the former hash and the frame, or a GMAC (NIST SP 800-38D).

        Args:
            former: hash of the line before the frame's; no two lines have the same, as a GMAC
                needs.
            frame: that left.
        """
        if len(frame) <= SHORT_FRAME:
            made = blake2b(former.encode(), digest_size=32, key=self._key, person=PERSON)
            made.update(frame)
            return made.hexdigest()
        return self._mac.encrypt(bytes.fromhex(former[: 2 * NONCE_BYTES]), b"", frame).hex()
