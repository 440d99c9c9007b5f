"""Frames as bytes: JSON over TCP.

A frame is its length (4 bytes, big-endian), then that many bytes of UTF-8 JSON: an object whose
"type" says what it is. `protocol.frames` has a class for each type.

Standard library only: the agent imports this on nodes that may have nothing else.
"""

from __future__ import annotations

import contextlib
import json
import socket
import struct
from collections.abc import Iterator, Mapping

# bytes of a frame: the largest is "go" with a large environment for many ranks
MAX_FRAME_BYTES = 2**26
# of a frame before the proof: an unknown peer must not make us hold more
MAX_UNPROVED_BYTES = 2**12
HEARTBEAT_SECONDS = 1.0  # between two signs of life
_LENGTH = struct.Struct(">I")


# linux/tcp.h, as far as Python's socket has no names for them
# Linux 2.6.34: what is lost of few packets is sent again every RTO, six times, before the gaps
# double
TCP_THIN_LINEAR_TIMEOUTS = 16
TCP_RTO_MAX_MS = 44  # Linux 6.15: the gaps never grow beyond this
LONGEST_GAP_MS = 1000  # the least that it takes
TCP_USER_TIMEOUT = 18  # Linux 2.6.37: until the kernel gives a silent side up
# long after any lease, which is to decide that: with gaps so short the kernel's own limit, a number
# of tries, is over after 15 s
GIVE_UP_MS = 7 * 24 * 3600 * 1000


def retransmit_soon(sock: socket.socket) -> None:
    """Have lost packets sent again soon after a cut of the network, however long it was: the gaps
    between tries double, so that a side hears nothing for up to twice the cut. As far as this
    kernel can."""
    for option, value in (
        (TCP_THIN_LINEAR_TIMEOUTS, 1),
        (TCP_RTO_MAX_MS, LONGEST_GAP_MS),
        (TCP_USER_TIMEOUT, GIVE_UP_MS),
    ):
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.IPPROTO_TCP, option, value)


def heartbeat_interval(lease: float) -> float:
    """Seconds between two signs of life of each side: a small part of a short lease, so that a
    cut may take most of it."""
    return min(HEARTBEAT_SECONDS, lease / 20)


class BadFrame(Exception):
    """The other side does not speak this protocol, or not well."""


def encode(frame: Mapping[str, object]) -> bytes:
    """The bytes of one frame. Text that is not valid Unicode (lone surrogates, as argv may hold)
    survives.

    Raises:
        BadFrame: it is longer than MAX_FRAME_BYTES.
    """
    body = json.dumps(frame, separators=(",", ":")).encode("ascii")
    if len(body) > MAX_FRAME_BYTES:
        raise BadFrame(
            f"a frame {frame.get('type')!r} of {len(body):,} bytes; the limit is"
            f" {MAX_FRAME_BYTES:,}"
        )
    return _LENGTH.pack(len(body)) + body


class Decoder:
    """Takes bytes as they come and gives whole frames.

    Args:
        limit: bytes of a frame; raise it once the other side has proved who it is.
    """

    def __init__(self, limit: int = MAX_UNPROVED_BYTES) -> None:
        self.limit = limit
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[dict[str, object]]:
        """JSON objects that `data` completes, each with a text "type".

        Raises:
            BadFrame: one is too long, not JSON or not an object with a type. The connection is
                useless then.
        """
        self._buffer += data
        while len(self._buffer) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._buffer)
            if length > self.limit:
                raise BadFrame(f"a frame of {length:,} bytes; the limit is {self.limit:,}")
            if len(self._buffer) < _LENGTH.size + length:
                return
            body = bytes(self._buffer[_LENGTH.size : _LENGTH.size + length])
            del self._buffer[: _LENGTH.size + length]
            yield _parsed(body)


def _parsed(body: bytes) -> dict[str, object]:
    try:
        frame = json.loads(body)
    except (ValueError, RecursionError):
        raise BadFrame("a frame that is not JSON") from None
    if not isinstance(frame, dict) or not isinstance(frame.get("type"), str):
        raise BadFrame("a frame without a type")
    return frame
