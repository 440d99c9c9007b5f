"""Whether rank 0's port can be reached, and its own agent answers there."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import time
from collections.abc import Iterator

from trainkit.launch.protocol.handshake import make_proof

CONNECT_SECONDS = 5.0


def greeting(token: bytes, port: int) -> bytes:
    """What an agent sends to anything that connects to its port: only its own session can."""
    return make_proof(token, "listener", str(port), "").encode()


def reach(address: str, port: int, expected: bytes) -> Iterator[None]:
    """Connect and compare the greeting. To be resumed now and then.

    Args:
        address: a numeric one.
        port: of the listener.
        expected: its greeting.

    Raises:
        OSError: why it cannot be reached.
    """
    family, _, _, _, target = socket.getaddrinfo(
        address, port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST
    )[0]
    with socket.socket(family, socket.SOCK_STREAM) as sock:
        sock.setblocking(False)
        yield from _read_greeting(sock, sock.connect_ex(target), expected)


def _read_greeting(sock: socket.socket, code: int, expected: bytes) -> Iterator[None]:
    deadline = time.monotonic() + CONNECT_SECONDS
    received = b""
    while len(received) < len(expected):
        if code not in (0, errno.EINPROGRESS, errno.EALREADY, errno.EISCONN):
            raise OSError(code, os.strerror(code))
        code = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if code == 0:
            with contextlib.suppress(BlockingIOError):
                data = _received(sock, len(expected) - len(received))
                if data == b"":
                    raise _something_else()
                received += data or b""
        if time.monotonic() > deadline:
            if _is_connected(sock):
                why = "connected, but nothing of this run answers there"
            else:
                why = os.strerror(errno.ETIMEDOUT)
            raise OSError(errno.ETIMEDOUT, why)
        if len(received) < len(expected):
            yield
    if received != expected:
        raise _something_else()


def _something_else() -> OSError:
    return OSError(errno.EPROTO, "something else than this run answers there")


def _received(sock: socket.socket, size: int) -> bytes | None:
    """What has come; None while there is no connection yet."""
    try:
        return sock.recv(size)
    except OSError as error:
        if error.errno in (errno.ENOTCONN, errno.EAGAIN):
            return None
        raise


def _is_connected(sock: socket.socket) -> bool:
    with contextlib.suppress(OSError):
        sock.getpeername()
        return True
    return False
