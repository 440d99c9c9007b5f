"""A request to the supervisor of a running run, with the proof of its session's token."""

from __future__ import annotations

import socket
import time

from trainkit.base.errors import Exit, TrainkitError
from trainkit.launch.protocol.frames import Frame, Ping
from trainkit.launch.protocol.framing import BadFrame, Decoder, encode
from trainkit.launch.protocol.handshake import ClientHandshake
from trainkit.runs.folder import RunFolder
from trainkit.runs.record import SupervisorStatus, read_supervisor_status

RETRY_SECONDS = 0.2
NODE = 0  # of no meaning for this role


def ask_supervisor(run: RunFolder, request: Frame, timeout: float = 10.0) -> bool:
    """Send one frame to the run's supervisor; whether it answered. False where no supervisor
    lives (any more).

    Args:
        run: the run; launch/supervisor.json says where its supervisor listens,
            launch/attempt-N/token is read as proof.
        request: what is asked, such as `CancelRun`.
        timeout: seconds for all of it. Between two attempts a supervisor does not listen for a
            moment, so it is tried again.

    Raises:
        TrainkitError: exit 13, a supervisor lives and cannot be reached or does not answer, or
            another program listens in its place.
    """
    deadline = time.monotonic() + timeout
    while True:
        supervisor = read_supervisor_status(run)
        if supervisor is None or supervisor.alive(time.time()) is False:
            return False
        where = (
            f"the supervisor of run {run.id} ({supervisor.address}:{supervisor.port} on"
            f" {supervisor.host})"
        )
        why = "it does not answer"
        try:
            with _connect(supervisor, timeout) as connection:
                if _is_answered(connection, _token(run, supervisor), request):
                    return True
        except BadFrame as error:
            raise TrainkitError(
                f"another program listens in the place of {where}: {error}",
                exit=Exit.CONTACT_LOST,
            ) from None
        except (OSError, ValueError) as error:
            why = str(error)
        if time.monotonic() > deadline:
            raise TrainkitError(f"{where} cannot be reached: {why}", exit=Exit.CONTACT_LOST)
        time.sleep(RETRY_SECONDS)


def supervisor_answers(run: RunFolder, timeout: float = 2.0) -> bool:
    """Whether the run's supervisor proves at its port that it lives and moves: what neither clocks
    nor files can say.

    Args:
        run: the run.
        timeout: seconds for each step of it.
    """
    supervisor = read_supervisor_status(run)
    try:
        if supervisor is not None:
            with _connect(supervisor, timeout) as connection:
                return _is_proved(connection, Decoder(), _token(run, supervisor))
    except (OSError, ValueError, BadFrame):
        pass
    return False


def _token(run: RunFolder, supervisor: SupervisorStatus) -> bytes:
    return bytes.fromhex(run.session(supervisor.attempt).joinpath("token").read_text().strip())


def _connect(supervisor: SupervisorStatus, timeout: float) -> socket.socket:
    return socket.create_connection((supervisor.address, supervisor.port), timeout)


def _is_answered(connection: socket.socket, token: bytes, request: Frame) -> bool:
    decoder = Decoder()
    if not _is_proved(connection, decoder, token):
        return False
    _send(connection, request)
    return _receive(connection, decoder) is not None


def _is_proved(connection: socket.socket, decoder: Decoder, token: bytes) -> bool:
    """Whether both sides have proved themselves; False where the other one ends just now, or has
    no session open between two attempts. Raises BadFrame where it does not know the token."""
    handshake = ClientHandshake(token, "control", NODE)
    _send(connection, handshake.request)
    challenge = _receive(connection, decoder)
    if challenge is None:
        return False
    _send(connection, handshake.answer(challenge))
    return True


def _send(connection: socket.socket, frame: Frame) -> None:
    connection.sendall(encode(frame.to_json()))


def _receive(connection: socket.socket, decoder: Decoder) -> dict[str, object] | None:
    """The next frame that is not a ping; None at the end of the connection."""
    while data := connection.recv(2**16):
        for frame in decoder.feed(data):
            if frame["type"] != Ping.TYPE:
                return frame
    return None
