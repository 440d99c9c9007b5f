"""Frames however they are cut, and proofs that fit one conversation only."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from trainkit.launch.agent.connection import SupervisorLost, dial
from trainkit.launch.protocol import framing
from trainkit.launch.protocol.framing import BadFrame, Decoder, encode
from trainkit.launch.protocol.handshake import make_proof, proof_is_valid

SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-(2**53), 2**53)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text()
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=10,
)
FRAMES = st.builds(
    lambda kind, rest: rest | {"type": kind},
    st.text(),
    st.dictionaries(st.text(), VALUES, max_size=4),
)


@given(st.lists(FRAMES, max_size=4), st.lists(st.integers(0, 400)))
def test_frames_arrive_however_they_are_cut(sent: list[dict[str, Any]], cuts: list[int]) -> None:
    data, decoder = b"".join(map(encode, sent)), Decoder(framing.MAX_FRAME_BYTES)
    places = sorted({min(cut, len(data)) for cut in cuts})
    got = [
        frame
        for a, b in zip([0, *places], [*places, len(data)], strict=True)
        for frame in decoder.feed(data[a:b])
    ]
    assert got == sent


def test_text_that_is_no_unicode_survives() -> None:
    words = os.fsdecode(bytes(range(256)))
    assert next(Decoder().feed(encode({"type": "x", "words": words})))["words"] == words


@given(st.binary(max_size=300))
def test_noise_is_refused_or_waited_for(data: bytes) -> None:
    with contextlib.suppress(BadFrame):
        assert all(isinstance(frame["type"], str) for frame in Decoder().feed(data))


@pytest.mark.parametrize("body", [b"[]", b"{}", b'{"type": 1}', b"\xff", b"[" * 3000, b""])
def test_what_is_no_frame(body: bytes) -> None:
    with pytest.raises(BadFrame):
        list(Decoder().feed(len(body).to_bytes(4, "big") + body))


def test_a_stranger_makes_us_hold_little() -> None:
    decoder = Decoder()
    with pytest.raises(BadFrame, match="limit"):
        list(decoder.feed((framing.MAX_UNPROVED_BYTES + 1).to_bytes(4, "big")))
    decoder = Decoder()
    decoder.limit = framing.MAX_FRAME_BYTES
    assert not list(decoder.feed((framing.MAX_UNPROVED_BYTES + 1).to_bytes(4, "big")))
    with pytest.raises(BadFrame, match="limit"):
        encode({"type": "x", "words": "x" * framing.MAX_FRAME_BYTES})


@given(st.binary(min_size=1), st.text(), st.text(), st.text())
def test_a_proof_fits_one_token_one_speaker_and_one_conversation(
    token: bytes, own: str, other: str, words: str
) -> None:
    said = make_proof(token, "agent", own, other, words)
    assert proof_is_valid(said, token, "agent", own, other, words)
    assert not proof_is_valid(
        said, token + b"x", "agent", own, other, words
    ) and not proof_is_valid(said, token, "supervisor", own, other, words)
    assert own == other or not proof_is_valid(said, token, "agent", other, own, words)
    assert not proof_is_valid(said, token, "agent", own + "x", other, words) and not proof_is_valid(
        said, token, "agent", own, other, words + "x"
    )


@pytest.mark.parametrize("said", [None, 5, "", "é", [], {}])
def test_what_is_no_proof(said: object) -> None:
    assert not proof_is_valid(said, b"token", "agent", "a", "b")


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.binary(max_size=60)
        | FRAMES.map(encode)
        | VALUES.map(lambda v: encode({"type": "challenge", "nonce": v, "proof": v})),
        max_size=3,
    )
)
def test_whoever_answers_the_knock_without_the_token_is_no_supervisor(said: list[bytes]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            connection, _ = server.accept()
            with connection, contextlib.suppress(OSError):
                connection.recv(4096)
                connection.sendall(b"".join(said))
                connection.shutdown(socket.SHUT_WR)
                connection.recv(4096)

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(SupervisorLost):
            dial("127.0.0.1", server.getsockname()[1], b"token", 0, seconds=0.3)
        thread.join()
