"""What supervisor and agents say to each other: frames of JSON over TCP, after each has proved
to the other that it can read the session's token.

A frame is its length (4 bytes, big-endian), then that many bytes of UTF-8 JSON: an object whose
"type" says what it is. docs/dispatch.md lists them. The proof is HMAC-SHA256 (RFC 2104) over
both sides' nonces and who is speaking, so that neither side's words can be played back to it.

Standard library only: the agent imports this on nodes that may have nothing else.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import secrets
import socket
import struct
from collections.abc import Iterator
from typing import Any

Frame = dict[str, Any]

MAX_FRAME_BYTES = (
    2**26
)  # bytes of a frame: the largest is "go" with a large environment for many ranks
MAX_UNPROVED_BYTES = 2**12  # of those before the proof: nobody we do not know makes us hold more
HEARTBEAT_SECONDS = 1.0  # seconds between two signs of life
_LENGTH = struct.Struct(">I")


# linux/tcp.h, as far as Python's socket has no names for them
# Linux 2.6.34: what is lost of few packets is sent again every RTO, six times, before the gaps
# double
TCP_THIN_LINEAR_TIMEOUTS = 16
TCP_RTO_MAX_MS = 44  # Linux 6.15: the gaps never grow beyond this
LONGEST_GAP_MS = 1000  # the least that it takes


def retransmit_soon(sock: socket.socket) -> None:
    """Have lost packets sent again soon after a cut of the network: the gaps between tries
    double, so that a side hears nothing for up to twice the cut. As far as this kernel can."""
    for option, value in ((TCP_THIN_LINEAR_TIMEOUTS, 1), (TCP_RTO_MAX_MS, LONGEST_GAP_MS)):
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.IPPROTO_TCP, option, value)


def heartbeat_interval(lease: float) -> float:
    """How often each side says that it lives: a small part of a short lease, so that a cut may
    take most of it."""
    return min(HEARTBEAT_SECONDS, lease / 10)


class BadFrame(Exception):
    """The other side does not speak this protocol, or not well."""


def encode(frame: Frame) -> bytes:
    """The bytes of one frame. Raises BadFrame where it is longer than MAX_FRAME_BYTES. Text
    that is no Unicode (lone surrogates, as argv may hold) survives."""
    body = json.dumps(frame, separators=(",", ":")).encode("ascii")
    if len(body) > MAX_FRAME_BYTES:
        raise BadFrame(
            f"a frame {frame.get('type')!r} of {len(body):,} bytes; {MAX_FRAME_BYTES:,} are the"
            " limit"
        )
    return _LENGTH.pack(len(body)) + body


class Decoder:
    """Takes bytes as they come and gives whole frames.

    Args:
        limit: bytes of a frame; raise it once the other side has proved who it is.
    """

    def __init__(self, limit: int = MAX_UNPROVED_BYTES) -> None:
        self.limit = limit
        self._held = bytearray()

    def feed(self, data: bytes) -> Iterator[Frame]:
        """Frames that `data` completes. Raises BadFrame for one that is too long, no JSON or no
        object with a type; the connection is useless then."""
        self._held += data
        while len(self._held) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._held)
            if length > self.limit:
                raise BadFrame(f"a frame of {length:,} bytes; {self.limit:,} are the limit")
            if len(self._held) < _LENGTH.size + length:
                return
            body = bytes(self._held[_LENGTH.size : _LENGTH.size + length])
            del self._held[: _LENGTH.size + length]
            yield _parsed(body)


def _parsed(body: bytes) -> Frame:
    try:
        frame = json.loads(body)
    except (ValueError, RecursionError):
        raise BadFrame("a frame that is no JSON") from None
    if not isinstance(frame, dict) or not isinstance(frame.get("type"), str):
        raise BadFrame("a frame without a type")
    return frame


def new_nonce() -> str:
    """128 random bits in hex."""
    return secrets.token_hex(16)


def proof(token: bytes, speaker: str, own_nonce: str, other_nonce: str, words: str = "") -> str:
    """What `speaker` ("supervisor" or "agent") says to prove that it knows the token; `words`
    are bound to it."""
    text = "\0".join((speaker, own_nonce, other_nonce, words))
    return hmac.new(token, text.encode(), hashlib.sha256).hexdigest()


def proved(
    said: object, token: bytes, speaker: str, own_nonce: str, other_nonce: str, words: str = ""
) -> bool:
    """Whether `said` is that proof, compared in constant time. Nonces are the speaker's own and
    the listener's."""
    return isinstance(said, str) and hmac.compare_digest(
        said.encode(), proof(token, speaker, own_nonce, other_nonce, words).encode()
    )
