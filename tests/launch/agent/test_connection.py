"""The agent's side of its connection to the supervisor."""

from __future__ import annotations

import contextlib
import socket
import threading

import pytest

from trainkit.launch.agent.connection import SupervisorLost, dial
from trainkit.launch.protocol import framing
from trainkit.launch.protocol.frames import Goodbye, Ping
from trainkit.launch.protocol.framing import Decoder
from trainkit.launch.protocol.handshake import ConnectRequest, ServerHandshake

TOKEN = b"0" * 16


def say_goodbye_at_once(listening: socket.socket) -> None:
    """A supervisor whose last word comes together with its first."""
    with listening.accept()[0] as sock:
        decoder = Decoder()
        (request,) = decoder.feed(sock.recv(4096))
        handshake = ServerHandshake(TOKEN, ConnectRequest.from_json(request))
        sock.sendall(framing.encode(handshake.challenge.to_json()))
        (answer,) = decoder.feed(sock.recv(4096))
        handshake.check(answer)
        sock.sendall(b"".join(framing.encode(frame.to_json()) for frame in (Ping(), Goodbye())))


def test_what_comes_with_the_end_of_the_handshake_is_received() -> None:
    """Though the supervisor has closed the connection by then."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        supervisor = threading.Thread(target=say_goodbye_at_once, args=[listening])
        supervisor.start()
        address, port = listening.getsockname()
        connection = dial(address, port, TOKEN, 0)
        supervisor.join()
    received = []
    with contextlib.closing(connection.sock), pytest.raises(SupervisorLost, match="closed"):
        while True:
            for frame in connection.receive():
                received.append(frame["type"])
    assert received == [Goodbye.TYPE]
