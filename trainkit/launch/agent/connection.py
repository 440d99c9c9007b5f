"""The agent's connection to its supervisor: dialled, proved on both sides, never waiting for a
slow reader."""

from __future__ import annotations

import selectors
import socket
import time
from collections.abc import Iterator
from typing import Any

from trainkit.launch.protocol import frames
from trainkit.launch.protocol.frames import BadFrame, Decoder, Frame

# bytes under way to the supervisor up to which more output is taken from the ranks' buffers
ROOM = 2**18
MOST = 2 * frames.MAX_FRAME_BYTES  # bytes under way that mean nobody reads any more
PROOF_SECONDS = 30.0  # a thousand agents may knock at once


class SupervisorLost(Exception):
    """There is no supervisor at the other end any more, or never was."""


class SupervisorConnection:
    """Frames to and from the supervisor over a socket that does not block.

    Args:
        sock: connected, both sides proved.
        decoder: with what has been read already.
    """

    def __init__(self, sock: socket.socket, decoder: Decoder) -> None:
        self.sock = sock
        self._decoder = decoder
        self._out = bytearray()
        sock.setblocking(False)

    @property
    def room(self) -> bool:
        """Whether the supervisor keeps up: what may be left out or put off is sent only then."""
        return len(self._out) < ROOM

    @property
    def waiting(self) -> bool:
        """Whether bytes wait until the socket takes them."""
        return bool(self._out)

    def send(self, frame: Frame) -> None:
        """Send it, or keep it until `flush` can. Raises SupervisorLost."""
        self._out += frames.encode(frame)
        if len(self._out) > MOST:
            raise SupervisorLost(
                f"the supervisor reads nothing: {len(self._out):,} bytes wait for it"
            )
        self.flush()

    def flush(self) -> None:
        """Send what the socket takes now. Raises SupervisorLost."""
        try:
            while self._out:
                del self._out[: self.sock.send(memoryview(self._out)[: 2**20])]
        except BlockingIOError:
            pass
        except OSError as error:
            raise SupervisorLost(f"the connection broke: {error.strerror or error}") from None

    def receive(self) -> Iterator[Frame]:
        """Frames that are there now. Raises SupervisorLost at the end of the connection, BadFrame
        for what is none."""
        try:
            data = self.sock.recv(2**18)
        except BlockingIOError:
            return
        except OSError as error:
            raise SupervisorLost(f"the connection broke: {error.strerror or error}") from None
        if not data:
            raise SupervisorLost("the supervisor closed the connection")
        yield from self._decoder.feed(data)

    def drain(self, seconds: float) -> None:
        """Wait until all is sent, at most so long."""
        deadline = time.monotonic() + seconds
        with selectors.DefaultSelector() as selector:
            selector.register(self.sock, selectors.EVENT_WRITE)
            while self._out and (left := deadline - time.monotonic()) > 0:
                selector.select(left)
                self.flush()


def dial(
    address: str, port: int, token: bytes, node: int, seconds: float = PROOF_SECONDS
) -> SupervisorConnection:
    """Connect to the supervisor, have it prove that it knows the token, and prove it ourselves.

    Raises SupervisorLost where nobody is there or it cannot prove itself within `seconds`;
    nothing has been done for it then.
    """
    deadline = time.monotonic() + seconds
    sock = _connect(address, port, deadline)
    try:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        frames.retransmit_soon(sock)
        decoder = Decoder()
        own = frames.new_nonce()
        _say(sock, {"type": "knock", "role": "agent", "node": node, "nonce": own}, deadline)
        challenge = _hear(sock, decoder, deadline)
        theirs = challenge.get("nonce")
        if (
            challenge["type"] != "challenge"
            or not isinstance(theirs, str)
            or not frames.proved(challenge.get("proof"), token, "supervisor", theirs, own)
        ):
            raise SupervisorLost(
                f"{address} port {port} cannot prove that it is the supervisor of this session"
            )
        _say(
            sock,
            {"type": "answer", "proof": frames.proof(token, "agent", own, theirs, f"agent:{node}")},
            deadline,
        )
        decoder.limit = frames.MAX_FRAME_BYTES
        return SupervisorConnection(sock, decoder)
    except (OSError, BadFrame) as error:
        sock.close()
        raise SupervisorLost(
            f"{address} port {port} did not prove that it is the supervisor: {error}"
        ) from None
    except BaseException:
        sock.close()
        raise


def _connect(address: str, port: int, deadline: float) -> socket.socket:
    while True:
        try:
            return socket.create_connection(
                (address, port), timeout=max(0.1, deadline - time.monotonic())
            )
        except OSError as error:
            if time.monotonic() + 0.5 > deadline:
                raise SupervisorLost(
                    f"cannot connect to the supervisor at {address} port {port}:"
                    f" {error.strerror or error}"
                ) from None
        time.sleep(0.2)


def _say(sock: socket.socket, frame: Frame, deadline: float) -> None:
    sock.settimeout(max(0.1, deadline - time.monotonic()))
    sock.sendall(frames.encode(frame))


def _hear(sock: socket.socket, decoder: Decoder, deadline: float) -> dict[str, Any]:
    """The next frame. Nothing may follow the challenge before our answer: what does is no
    supervisor."""
    while True:
        sock.settimeout(max(0.1, deadline - time.monotonic()))
        data = sock.recv(4096)
        if not data:
            raise BadFrame("it closed the connection")
        if time.monotonic() > deadline:
            raise BadFrame("it took too long")
        if heard := list(decoder.feed(data)):
            if len(heard) > 1:
                raise BadFrame("it spoke out of turn")
            return heard[0]
