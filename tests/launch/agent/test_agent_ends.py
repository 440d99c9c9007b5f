"""Nothing is left: of programs that ignore, hide or hang, whoever of supervisor, agent, keeper
and transport dies."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import struct
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import trainkit
from tests.launch.agent.hard_programs import Hard, cmdline
from tests.launch.fake_supervisor import (
    Session,
    alive,
    ignoring,
    pid_in,
    process,
    setsid,
    wait_until,
)
from trainkit.base import slots
from trainkit.launch.supervise.code_snapshot import take_snapshot


@pytest.fixture
def brief(tmp_path: Path) -> Iterator[Session]:
    """One whose lease is over while a test waits."""
    session = Session(tmp_path, lease=15, grace=0.5)
    yield session
    session.close()


def test_stop_proves_what_it_says(session: Session, tmp_path: Path) -> None:
    hard = Hard(session, tmp_path)
    hard.peer.say(type="stop", grace=0.5, keys=None)
    assert hard.peer.hear("stopped")["left"] == []
    assert not any(alive(pid) for pid in hard.pids) and not session.left()
    ends = {f["key"]: (f["code"], f["stopped"]) for f in hard.peer.heard if f["type"] == "ended"}
    # told before "stopped"; the stopped one was woken for its TERM
    assert ends == {"0": (-9, True), "1": (-15, True), "2": (-15, True)}
    hard.peer.go(process("3", "print('again')"))
    assert hard.peer.hear("ended", "3")["code"] == 0
    hard.peer.say(type="bye")
    assert (
        session.agent
        and session.agent.wait() == 0
        and not list(session.node_folder.glob("trainkit-test*"))
    )


def test_a_second_stop_shortens_the_first(session: Session, tmp_path: Path) -> None:
    peer = session.begin()
    peer.go(process("0", ignoring(tmp_path / "pid")))
    pid_in(tmp_path / "pid")
    peer.say(type="stop", grace=10_000, keys=None)
    peer.say(type="stop", grace=0, keys=None)
    assert peer.hear("ended", "0")["code"] == -9
    assert [peer.hear("stopped")["left"] for _ in range(2)] == [[], []]


def test_some_are_stopped_and_others_go_on(session: Session, tmp_path: Path) -> None:
    peer = session.begin()
    peer.go(process("0", ignoring(tmp_path / "a")), process("1", ignoring(tmp_path / "b")))
    first, second = pid_in(tmp_path / "a"), pid_in(tmp_path / "b")
    peer.say(type="stop", grace=0.2, keys=["0"])
    assert peer.hear("ended")["key"] == "0" and peer.hear("stopped")["left"] == []
    assert not alive(first) and alive(second)


def test_what_a_program_leaves_behind_ends_with_it(session: Session, tmp_path: Path) -> None:
    peer = session.begin()
    pid = tmp_path / "pid"
    program = (
        "import os, subprocess, sys, time; subprocess.Popen([sys.executable, '-c',"
        f" {setsid(pid)!r}])\nwhile not os.path.exists({str(pid)!r}): time.sleep(0.01)"
    )
    peer.go(process("0", program), process("1", "import time; time.sleep(10_000)"))
    assert peer.hear("ended", "0")["code"] == 0
    assert not alive(pid_in(pid)) and {p.mark for p in session.left()} == {f"{session.mark}/1"}


def test_one_that_forks_and_forks(session: Session) -> None:
    program = """
import os, signal, time
signal.signal(15, signal.SIG_IGN)
end = time.time() + 60
while time.time() < end:  # each child goes on, in a session of its own, when its parent ends
    if os.fork():
        time.sleep(0.005)
        os._exit(0)
    os.setsid()
"""
    peer = session.begin()
    peer.go(
        process(
            "0",
            "import os, time\nif os.fork() == 0:\n"
            + "".join(f"    {line}\n" for line in program.strip().splitlines())
            + "time.sleep(10_000)",
        )
    )
    rank = peer.hear("started")["pid"]
    seen: set[int] = set()
    while len(seen) < 5:
        seen |= {p.pid for p in session.left()} - {rank}
    peer.say(type="stop", grace=0.2, keys=None)
    assert peer.hear("stopped")["left"] == [] and not session.left()


@pytest.mark.parametrize("how", ["closed", "reset", "noise", "silent", "stdin", "term"])
def test_a_lost_lease_ends_everything(
    request: pytest.FixtureRequest, tmp_path: Path, how: str
) -> None:
    session: Session = request.getfixturevalue("brief" if how == "silent" else "session")
    other = Session(tmp_path / "other")
    try:
        bystander = other.begin()
        bystander.go(process("0", "import time; time.sleep(10_000)"))
        bystander.hear("started")
        hard = Hard(
            session, tmp_path, stdin=subprocess.PIPE if how == "stdin" else subprocess.DEVNULL
        )
        assert session.agent
        if how == "closed":
            hard.peer.sock.close()
        elif how == "noise":
            hard.peer.sock.sendall(b"GET / HTTP/1.1\r\n\r\n")
        elif how == "reset":  # while the agent has much to say and nobody listens
            hard.peer.go(process("3", "while True: print('x' * 1000)", whole=True))
            time.sleep(1.5)
            hard.peer.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            hard.peer.sock.close()
        elif how == "stdin":
            assert session.agent.stdin
            session.agent.stdin.close()
        elif how == "term":
            session.agent.terminate()
        assert hard.gone()
        assert session.agent.wait() == (15 if how == "term" else 13) and not session.left()
        assert not slots.slot_holders(session.node_folder) and "stops everything" in session.words()
        assert other.left() and bystander.hear("heartbeat")
    finally:
        other.close()


def test_a_stdin_that_is_closed_from_the_start_means_nothing(session: Session) -> None:
    """As in sbatch, where srun's tasks see end of file at once."""
    read, write = os.pipe()
    os.close(write)
    peer = session.begin(stdin=read)
    os.close(read)
    assert peer.hear("heartbeat") and peer.hear("heartbeat")


def test_a_stdin_that_slurmstepd_closes_later_means_nothing(tmp_path: Path) -> None:
    """With `srun --input=none` a task's stdin is a pipe, which slurmstepd closes some time after
    the task has begun."""
    on_slurm = Session(tmp_path, grace=0.5, stdin="none")
    read, write = os.pipe()
    try:
        peer = on_slurm.begin(stdin=read)
        os.close(read)
        assert peer.hear("heartbeat")
        os.close(write)
        assert peer.hear("heartbeat") and peer.hear("heartbeat")
    finally:
        on_slurm.close()


@pytest.mark.parametrize("who", ["agent", "keeper", "both by pattern"])
def test_sigkill_leaves_nothing(session: Session, tmp_path: Path, who: str) -> None:
    """Slots are free only after that."""
    hard = Hard(session, tmp_path)
    assert session.agent
    keeper, agent = session.agent.pid, int(hard.peer.hello["pid"])
    if who == "agent":
        os.kill(agent, signal.SIGKILL)
    elif who == "keeper":
        os.kill(keeper, signal.SIGKILL)
    else:  # what pkill -9 -f trainkit and killall -9 python do, as far as this session is concerned
        found = [
            pid
            for pid in (keeper, agent, *hard.pids)
            if b"trainkit" in cmdline(pid) or _name(pid).startswith("python")
        ]
        assert agent in found and keeper not in found
        for pid in found:
            # the keeper has ended it: the agent is killed first
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    while slots.slot_holders(session.node_folder):
        time.sleep(0.01)
    assert not any(alive(pid) for pid in hard.pids)
    assert (
        hard.gone()
        and wait_until(lambda: not alive(agent) and not alive(keeper))
        and not session.left()
    )
    assert session.agent.wait() == (-9 if who == "keeper" else 128 + 9)


def _name(pid: int) -> str:
    return Path(f"/proc/{pid}/comm").read_text()


def test_a_bug_of_its_own_leaves_nothing(tmp_path: Path) -> None:
    _, code, _ = take_snapshot(Path(trainkit.__file__).parent, tmp_path / "code")
    agent = code / "trainkit" / "launch" / "agent"
    loop = (agent / "loop.py").read_text()
    losing = "    def lose(self, why: str) -> None:\n"
    assert losing in loop
    (agent / "loop.py").unlink()  # see tests/linked_code.py
    (agent / "loop.py").write_text(loop.replace(losing, losing + "        why += 1\n"))
    session = Session(tmp_path / "session", lease=60)
    try:
        hard = Hard(session, tmp_path, agent=agent / "main.py")
        hard.peer.sock.close()
        assert session.agent and session.agent.wait() == 2
        assert (
            not any(alive(pid) for pid in hard.pids)
            and not session.left()
            and "TypeError" in session.words()
        )
        assert not slots.slot_holders(session.node_folder) and not list(
            session.node_folder.glob("trainkit-test*")
        )
    finally:
        session.close()


def test_an_agent_that_hangs_is_a_dead_one(brief: Session, tmp_path: Path) -> None:
    session, hard = brief, Hard(brief, tmp_path)
    os.kill(int(hard.peer.hello["pid"]), signal.SIGSTOP)
    assert hard.gone() and session.agent and session.agent.wait() == 128 + 9
    assert "has not moved" in session.words()


def test_an_agent_that_hangs_before_the_start_frees_its_slots(brief: Session) -> None:
    session, peer = brief, brief.begin()
    os.kill(int(peer.hello["pid"]), signal.SIGSTOP)
    assert slots.slot_holders(session.node_folder) and wait_until(
        lambda: not slots.slot_holders(session.node_folder)
    )
