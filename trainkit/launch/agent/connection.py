"""The agent's connection to its supervisor: dialled, proved on both sides, never waiting for a
slow reader."""

from __future__ import annotations

import selectors
import socket
import time
from collections.abc import Iterator

from trainkit.launch.protocol import framing
from trainkit.launch.protocol.frames import Frame
from trainkit.launch.protocol.framing import BadFrame, Decoder
from trainkit.launch.protocol.handshake import ClientHandshake

# bytes under way to the supervisor up to which more output is taken from the ranks' buffers
ROOM = 2**18
MOST = 2 * framing.MAX_FRAME_BYTES  # bytes under way that mean nobody reads any more
PROOF_SECONDS = 30.0  # a thousand agents may connect at once
AGAIN_SECONDS = 0.2


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
        self._out += framing.encode(frame.to_json())
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

    def receive(self) -> Iterator[dict[str, object]]:
        """Frames that are there now. Raises SupervisorLost at the end of the connection, BadFrame
        for what is none."""
        yield from self._decoder.feed(b"")  # what came with the last frame of the handshake
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

    Args:
        address: where the supervisor listens.
        port: likewise.
        token: the session's secret.
        node: this host's number in the session.
        seconds: for all of it.

    Raises:
        SupervisorLost: nobody is there, or it cannot prove itself in time; nothing has been done
            for it then.
    """
    deadline = time.monotonic() + seconds
    lost: Exception
    while True:
        try:
            return _proved(address, port, ClientHandshake(token, "agent", node), deadline)
        except BadFrame as error:
            raise _no_supervisor(address, port, error) from None
        except OSError as error:
            lost = error  # not there yet; or it had to end one of many, and that was us
        if time.monotonic() + AGAIN_SECONDS > deadline:
            raise _no_supervisor(address, port, lost) from None
        time.sleep(AGAIN_SECONDS)


def _proved(
    address: str, port: int, handshake: ClientHandshake, deadline: float
) -> SupervisorConnection:
    """One try. Raises OSError; BadFrame where something else answers."""
    try:
        sock = socket.create_connection((address, port), max(0.1, deadline - time.monotonic()))
    except OSError as error:
        raise OSError(f"cannot connect: {error.strerror or error}") from None
    try:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        framing.retransmit_soon(sock)
        decoder = Decoder()
        _send(sock, handshake.request, deadline)
        _send(sock, handshake.answer(_receive(sock, decoder, deadline)), deadline)
        decoder.limit = framing.MAX_FRAME_BYTES
        _receive(sock, decoder, deadline)  # a ping: it has seen our answer, and keeps us
        return SupervisorConnection(sock, decoder)
    except BaseException:
        sock.close()
        raise


def _no_supervisor(address: str, port: int, why: Exception) -> SupervisorLost:
    return SupervisorLost(
        f"{address} port {port} did not prove that it is the supervisor of this session: {why}"
    )


def _send(sock: socket.socket, frame: Frame, deadline: float) -> None:
    sock.settimeout(max(0.1, deadline - time.monotonic()))
    sock.sendall(framing.encode(frame.to_json()))


def _receive(sock: socket.socket, decoder: Decoder, deadline: float) -> dict[str, object]:
    """The next frame; the decoder keeps what comes with it."""
    received = None
    while received is None:
        sock.settimeout(max(0.1, deadline - time.monotonic()))
        data = sock.recv(4096)
        if not data:
            raise ConnectionResetError("it closed the connection")
        if time.monotonic() > deadline:
            raise BadFrame("it took too long")
        received = next(decoder.feed(data), None)
    return received
