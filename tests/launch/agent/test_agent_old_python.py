"""Agents and keepers that run with other Pythons than trainkit's own code needs, as in the images
of others: each that tests/interpreters.py finds, one that is too old among them."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest

from tests.interpreters import TOO_OLD, found_or_skip
from tests.launch.fake_supervisor import (
    AGENT,
    SECRET,
    Peer,
    Session,
    alive,
    ignoring,
    pid_in,
    process,
    wait_until,
)
from trainkit.base import slots
from trainkit.base.process_marks import find_marked

HEARTBEAT = """
import json, os, sys, time
print("step 3, and", os.environ["KEY"])
print("to people", file=sys.stderr)
with open(os.environ["TRAINKIT_HEARTBEAT_FILE"] + ".new", "w") as file:
    json.dump({"phase": "step", "step": 3}, file)
os.replace(file.name, os.environ["TRAINKIT_HEARTBEAT_FILE"])
time.sleep(600)
"""


def version_of(python: str) -> str:
    code = "import platform; print(platform.python_version())"
    done = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def two_agents(session: Session, python: str) -> list[Peer]:
    """Nodes 0 and 1 of one session, each with a slot of its own."""
    return [session.begin(python=python, node=node, slots=(f"gpu{node}",)) for node in (0, 1)]


def first_beats(peer: Peer) -> dict[str, object]:
    """The first heartbeats of programs."""
    while True:
        for frame in peer.heard:
            if frame["type"] == "heartbeat" and frame["beats"]:
                return dict(frame["beats"])
        peer.hear("heartbeat")


def test_a_session_of_two_agents(session: Session, image_python: str, tmp_path: Path) -> None:
    peers = two_agents(session, image_python)
    for node, peer in enumerate(peers):
        assert peer.hello["node"] == node and peer.hello["executable"] == image_python
        assert peer.hello["versions"]["python"] == version_of(image_python)
        assert set(peer.hello["errors"]) == set() and len(peer.hello["snapshot"]) == 64
    assert set(slots.slot_holders(session.node_folder)) == {"gpu0", "gpu1"}

    peers[0].say(type="listen", ports=[0])
    port = peers[0].hear("listening")["port"]
    peers[1].say(type="connect", address="127.0.0.1", port=port)
    assert peers[1].hear("connected")["error"] is None
    peers[0].say(type="unlisten")
    peers[0].hear("unlistened")

    log = tmp_path / "logs" / "0.log"
    for peer in peers:
        rank = process("0", HEARTBEAT, heartbeat=True, log=str(log))
        rank["argv"][0] = image_python
        hiding = process("1", ignoring(tmp_path / f"pid{peer.hello['node']}"))
        peer.go(rank, hiding, secret_names=("KEY",))
        peer.hear("started", "0")
        peer.until_output("0", "step 3, and ***")
        assert first_beats(peer) == {"0": {"phase": "step", "step": 3}}
    hidden = [pid_in(tmp_path / f"pid{node}") for node in (0, 1)]
    assert log.read_text().count("to people") == 2 and SECRET not in log.read_text()

    peers[0].say(type="stacks")
    assert peers[0].hear("stacks")["states"]["0"].startswith("S")
    peers[0].say(type="signal", signal="SIGKILL", keys=["0"])
    assert peers[0].hear("ended", "0")["code"] == -9
    for peer in peers:
        peer.say(type="stop", grace=0.5, keys=None)
        stopped = peer.hear("stopped")
        assert stopped["left"] == [] and stopped["proof"]
        peer.say(type="bye")
    assert [agent.wait() for agent in session.agents] == [0, 0]
    assert not any(alive(pid) for pid in hidden) and not session.left()
    assert slots.slot_holders(session.node_folder) == {}
    assert session.words() == ""


def test_the_keeper_ends_what_a_killed_agent_left(
    session: Session, image_python: str, tmp_path: Path
) -> None:
    """Programs in sessions of their own that ignore TERM; the slot is held until they are dead."""
    peers = two_agents(session, image_python)
    for node, peer in enumerate(peers):
        peer.go(process("0", ignoring(tmp_path / f"pid{node}")))
    hidden = [pid_in(tmp_path / f"pid{node}") for node in (0, 1)]
    os.kill(peers[0].hello["pid"], signal.SIGKILL)
    assert session.agents[0].wait() == 128 + signal.SIGKILL
    assert not alive(hidden[0]) and alive(hidden[1])
    assert set(slots.slot_holders(session.node_folder)) == {"gpu1"}
    peers[1].say(type="sweep", run=f"{session.run}/1/1", kill=True)
    swept = peers[1].hear("swept")
    assert swept["left"] == [] and hidden[1] in [each["pid"] for each in swept["killed"]]


def test_an_agent_ends_after_its_keeper(
    session: Session, image_python: str, tmp_path: Path
) -> None:
    peer = session.begin(python=image_python)
    peer.go(process("0", ignoring(tmp_path / "pid")))
    hidden = pid_in(tmp_path / "pid")
    session.agents[0].kill()
    with pytest.raises(EOFError):
        peer.hear("nothing")
    assert wait_until(lambda: not alive(hidden) and not find_marked(session.run))
    assert "the keeper of this agent is gone" in session.words()


@pytest.mark.parametrize("version", TOO_OLD)
def test_a_python_that_is_too_old_says_so(tmp_path: Path, version: str) -> None:
    python = found_or_skip(version)
    argv = [python, "-I", "-S", str(AGENT), str(tmp_path), "0"]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert f"{python} is Python {version}" in done.stderr
    assert "3.8 or newer is needed: clusters.X.python" in done.stderr
    assert "Traceback" not in done.stderr
