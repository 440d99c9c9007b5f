"""Speaking to the supervisor of a running run: as its agents do, with the proof of its session's token."""

from __future__ import annotations

import socket
from typing import Any

from trainkit.base.errors import Exit, TrainkitError
from trainkit.launch.frames import BadFrame, Decoder, Frame, encode, new_nonce, proof, proved
from trainkit.runs.folder import RunFolder
from trainkit.runs.record import read_supervisor

NODE = 0  # of no meaning for this role; the proof binds it all the same


def ask(run: RunFolder, frame: Frame, timeout: float = 10.0) -> Frame | None:
    """Send one frame to the run's supervisor and return its answer; None where no supervisor listens (any more).

    Args:
        run: the run; launch/supervisor.json says where its supervisor listens, launch/attempt-N/token is read as proof.
        frame: {"type": "cancel", "save": bool}.
        timeout: seconds for connecting, and again for each answer.

    Raises TrainkitError (exit 13) where who listens there is not the run's supervisor or falls silent.
    """
    supervisor = read_supervisor(run)
    if supervisor is None or supervisor.ended:
        return None
    try:
        token = bytes.fromhex(run.session(supervisor.attempt).joinpath("token").read_text().strip())
        connection = socket.create_connection((supervisor.address, supervisor.port), timeout)
    except (FileNotFoundError, ConnectionRefusedError):
        return None
    except (OSError, ValueError) as error:
        where = f"{supervisor.address}:{supervisor.port} on {supervisor.host}"
        raise TrainkitError(f"the supervisor of run {run.id} ({where}) cannot be reached: {error}", exit=Exit.CONTACT_LOST) from None
    with connection:
        try:
            return _asked(connection, token, frame)
        except (BadFrame, OSError) as error:
            who = f"who listens on {supervisor.address}:{supervisor.port}"
            raise TrainkitError(f"{who} is not the supervisor of run {run.id}, or does not answer: {error}", exit=Exit.CONTACT_LOST) from None


def _asked(connection: socket.socket, token: bytes, frame: Frame) -> Frame | None:
    decoder, nonce = Decoder(), new_nonce()
    connection.sendall(encode({"type": "knock", "role": "control", "node": NODE, "nonce": nonce}))
    challenge = _received(connection, decoder)
    if challenge is None:
        return None  # it ends just now
    theirs: Any = challenge.get("nonce")
    if challenge["type"] != "challenge" or not isinstance(theirs, str) or not proved(challenge.get("proof"), token, "supervisor", theirs, nonce):
        raise BadFrame("it does not know the token")
    connection.sendall(encode({"type": "answer", "proof": proof(token, "agent", nonce, theirs, f"control:{NODE}")}))
    connection.sendall(encode(frame))
    return _received(connection, decoder)


def _received(connection: socket.socket, decoder: Decoder) -> Frame | None:
    """The next frame that is no ping; None at the end of the connection."""
    while data := connection.recv(2**16):
        for frame in decoder.feed(data):
            if frame["type"] != "ping":
                return frame
    return None
