"""Speaking to the supervisor of a running run: as its agents do, with the proof of its session's
token."""

from __future__ import annotations

import socket
import time
from typing import Any

from trainkit.base.errors import Exit, TrainkitError
from trainkit.launch.protocol.frames import (
    BadFrame,
    Decoder,
    Frame,
    encode,
    new_nonce,
    proof,
    proved,
)
from trainkit.runs.folder import RunFolder
from trainkit.runs.supervisor_status import read_supervisor_status

AGAIN_SECONDS = 0.2
NODE = 0  # of no meaning for this role; the proof binds it all the same


def ask(run: RunFolder, frame: Frame, timeout: float = 10.0) -> Frame | None:
    """Send one frame to the run's supervisor and return its answer; None where no supervisor
    lives (any more).

    Args:
        run: the run; launch/supervisor.json says where its supervisor listens,
        launch/attempt-N/token is read as proof. frame: {"type": "cancel", "save": bool}.
        timeout: seconds for all of it. Between two attempts a supervisor has no ear for a
        moment, so it is asked again.

    Raises TrainkitError (exit 13) where a supervisor lives and cannot be reached or falls
    silent, or who listens in its place is somebody else.
    """
    deadline = time.monotonic() + timeout
    while True:
        supervisor = read_supervisor_status(run)
        if supervisor is None or supervisor.alive(time.time()) is False:
            return None
        where = (
            f"the supervisor of run {run.id} ({supervisor.address}:{supervisor.port} on"
            f" {supervisor.host})"
        )
        why = "it does not answer"
        try:
            token = bytes.fromhex(
                run.session(supervisor.attempt).joinpath("token").read_text().strip()
            )
            with socket.create_connection(
                (supervisor.address, supervisor.port), timeout
            ) as connection:
                if (answer := _asked(connection, token, frame)) is not None:
                    return answer
        except BadFrame as error:
            raise TrainkitError(
                f"who listens in the place of {where} is somebody else: {error}",
                exit=Exit.CONTACT_LOST,
            ) from None
        except (OSError, ValueError) as error:
            why = str(error)
        if time.monotonic() > deadline:
            raise TrainkitError(f"{where} cannot be reached: {why}", exit=Exit.CONTACT_LOST)
        time.sleep(AGAIN_SECONDS)


def _asked(connection: socket.socket, token: bytes, frame: Frame) -> Frame | None:
    decoder = Decoder()
    nonce = new_nonce()
    connection.sendall(encode({"type": "knock", "role": "control", "node": NODE, "nonce": nonce}))
    challenge = _received(connection, decoder)
    if challenge is None:
        return None  # it ends just now, or waits for nobody between two attempts
    theirs: Any = challenge.get("nonce")
    if (
        challenge["type"] != "challenge"
        or not isinstance(theirs, str)
        or not proved(challenge.get("proof"), token, "supervisor", theirs, nonce)
    ):
        raise BadFrame("it does not know the token")
    connection.sendall(
        encode({"type": "answer", "proof": proof(token, "agent", nonce, theirs, f"control:{NODE}")})
    )
    connection.sendall(encode(frame))
    return _received(connection, decoder)


def _received(connection: socket.socket, decoder: Decoder) -> Frame | None:
    """The next frame that is no ping; None at the end of the connection."""
    while data := connection.recv(2**16):
        for frame in decoder.feed(data):
            if frame["type"] != "ping":
                return frame
    return None
