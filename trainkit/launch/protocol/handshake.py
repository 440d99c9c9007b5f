"""How two sides prove to each other that they can read the session's token, without sending it.

The one that connects sends "knock" with a nonce; the supervisor answers with "challenge": its own
nonce and its proof; the other side sends "answer" with its proof, and gets the first "ping" once
that is accepted. A proof is HMAC-SHA256 (RFC 2104) over both sides' nonces and who is speaking, so
that nothing can be played back to either.

Standard library only: the agent imports this on nodes that may have nothing else.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Mapping
from typing import Literal

from trainkit.base.lazy_dataclasses import dataclass
from trainkit.launch.protocol.frames import Frame
from trainkit.launch.protocol.framing import BadFrame

Role = Literal["agent", "control"]  # what may connect to a supervisor


@dataclass(frozen=True)
class ConnectRequest(Frame):
    """The first frame of a connection. `role`: what it is for; `node`: whose."""

    TYPE = "knock"
    role: str
    node: int
    nonce: str


@dataclass(frozen=True)
class Challenge(Frame):
    """The supervisor's nonce, and its proof that it knows the token."""

    TYPE = "challenge"
    nonce: str
    proof: str


@dataclass(frozen=True)
class ChallengeAnswer(Frame):
    """The other side's proof that it knows the token."""

    TYPE = "answer"
    proof: str


def new_nonce() -> str:
    """128 random bits in hex."""
    return secrets.token_hex(16)


def make_proof(
    token: bytes, speaker: str, own_nonce: str, other_nonce: str, claim: str = ""
) -> str:
    """What `speaker` sends to prove that it knows the token.

    Args:
        token: the session's secret.
        speaker: "supervisor" or "agent" (for both roles); "listener" for rank 0's port.
        own_nonce: the speaker's.
        other_nonce: the listener's.
        claim: what else the proof is bound to.
    """
    text = "\0".join((speaker, own_nonce, other_nonce, claim))
    return hmac.new(token, text.encode(), hashlib.sha256).hexdigest()


def proof_is_valid(
    candidate: object,
    token: bytes,
    speaker: str,
    own_nonce: str,
    other_nonce: str,
    claim: str = "",
) -> bool:
    """Whether `candidate` is the proof that `make_proof` makes of the other arguments, compared
    in constant time.

    Args:
        candidate: what was received.
        token: the session's secret.
        speaker: who sent it.
        own_nonce: the speaker's.
        other_nonce: the listener's.
        claim: what else the proof has to be bound to.
    """
    return isinstance(candidate, str) and hmac.compare_digest(
        candidate.encode(), make_proof(token, speaker, own_nonce, other_nonce, claim).encode()
    )


class ClientHandshake:
    """The side that connects: first send `request`, then what `answer` gives.

    Args:
        token: the session's secret.
        role: what the connection is for.
        node: the agent's number; of no meaning for "control", the proof binds it all the same.
    """

    def __init__(self, token: bytes, role: Role, node: int) -> None:
        self._token = token
        self.request = ConnectRequest(role, node, new_nonce())

    def answer(self, received: Mapping[str, object]) -> ChallengeAnswer:
        """Our proof, once the supervisor's was checked.

        Raises:
            BadFrame: the frame is not a challenge, or its sender does not know the token.
        """
        request = self.request
        challenge = Challenge.from_json(received)
        try:
            known = proof_is_valid(
                challenge.proof, self._token, "supervisor", challenge.nonce, request.nonce
            )
        except UnicodeError:
            raise BadFrame("a challenge that is not valid Unicode") from None
        if not known:
            raise BadFrame("it does not know the token")
        return ChallengeAnswer(
            make_proof(
                self._token,
                "agent",
                request.nonce,
                challenge.nonce,
                f"{request.role}:{request.node}",
            )
        )


class ServerHandshake:
    """The supervisor's side: send `challenge`, then `check` what comes.

    Args:
        token: the session's secret.
        request: what the other side began with.
    """

    def __init__(self, token: bytes, request: ConnectRequest) -> None:
        self._token = token
        self._request = request
        nonce = new_nonce()
        self.challenge = Challenge(nonce, make_proof(token, "supervisor", nonce, request.nonce))

    def check(self, received: Mapping[str, object] | None) -> None:
        """Return where the other side has proved itself.

        Args:
            received: its next frame; None where it closed the connection.

        Raises:
            BadFrame: it has not.
        """
        request = self._request
        claim = f"{request.role}:{request.node}"
        if (
            received is None
            or received.get("type") != ChallengeAnswer.TYPE
            or not proof_is_valid(
                received.get("proof"),
                self._token,
                "agent",
                request.nonce,
                self.challenge.nonce,
                claim,
            )
        ):
            raise BadFrame("a wrong token")
