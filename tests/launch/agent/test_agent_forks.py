"""Ranks that a real agent has forked: they are what exec would have made of them, end with
everything else, and begin without their parent where it cannot fork them."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import trainkit
from tests.launch.agent.hard_programs import cmdline
from tests.launch.agent.test_agent_processes import HOSTILE
from tests.launch.fake_supervisor import (
    SECRET,
    Frame,
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

PACKAGE = Path(trainkit.__file__).parent
SCRIPT = Path(__file__).parent / "words" / "main.py"  # what a rank runs, forked or not
# the real parent without what it imports
PARENT = f"""
import os, socket, sys
sys.path.insert(0, {str(PACKAGE.parent)!r})
from trainkit.train import parent
parent.__file__ = {str(SCRIPT)!r}
print("imported", file=sys.stderr, flush=True)
with socket.socket(fileno=0) as line:
    line.send(b"ready")
    parent.serve(line, lambda: (exec(sys.argv[1], globals()), sys.stdout.flush(), os._exit(0)))
"""
FORKED = "print('forked' if 'parent' in globals() else 'executed', flush=True)"
SLEEPS = f"{FORKED}; import time; time.sleep(10_000)"


def rank(key: str, program: str, **values: Any) -> Frame:
    """An entry of "go" that may be forked; executed, it runs the same program."""
    argv = [sys.executable, "-I", str(SCRIPT), program]
    return process(key, "", argv=argv, forked=True) | values


def parent_frame(program: str = PARENT, **values: Any) -> Frame:
    """What has an agent start a rank parent."""
    own = {"env": {}, "cwd": "/", "late": ["RANK"], "seconds": 300.0} | values
    return {"type": "parent", "argv": [sys.executable, "-I", "-c", program]} | own


def with_parent(peer: Peer, program: str = PARENT, **values: Any) -> None:
    """Have the agent start a rank parent."""
    peer.say(**parent_frame(program, **values))


def parent_pid(session: Session) -> int:
    """The pid of the session's rank parent."""
    found = find_marked(f"{session.mark}/parent")
    return found[0].pid if found else 0


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def test_a_parent_begins_though_nothing_comes_after_the_handshake(session: Session) -> None:
    """The frame may lie in the agent's buffer, and the socket is silent; and it may come twice."""
    session.start()
    frame = parent_frame("import time; time.sleep(10_000)")
    peer = session.accept(frame, frame)
    assert wait_until(lambda: parent_pid(session))
    peer.hear("hello")
    peer.hear("heartbeat")
    assert len(find_marked(f"{session.mark}/parent")) == 1


HOLDS = """
import fcntl, os, signal, sys, time
signal.signal(signal.SIGIO, lambda *_: None)
try:
    fcntl.fcntl(os.open(sys.argv[1], os.O_RDONLY), fcntl.F_SETLEASE, fcntl.F_WRLCK)
except OSError as error:
    sys.exit(str(error))
print("held", flush=True)
time.sleep(10_000)
"""


def test_a_parent_that_no_root_gives_keeps_no_host_silent(session: Session, tmp_path: Path) -> None:
    """Its program cannot be opened for a while, as on a file system that stalls (a lease, fcntl(2),
    makes whoever opens the file wait): the host says what it is, and that it lives."""
    program = tmp_path / "program"
    shutil.copy("/bin/sleep", program)
    words = [sys.executable, "-c", HOLDS, str(program)]
    with subprocess.Popen(words, stdout=subprocess.PIPE) as holder:
        assert holder.stdout
        try:
            if not holder.stdout.readline():
                pytest.skip("no leases on this file system")
            session.start()
            peer = session.accept({**parent_frame(), "argv": [str(program), "10000"]})
            peer.hear("hello")
            peer.hear("heartbeat")
            assert not parent_pid(session)
        finally:
            holder.kill()


def test_a_forked_rank_is_what_exec_would_have_made(session: Session, tmp_path: Path) -> None:
    """Words, environment, mark, cgroup, limit, folder, parent, open files, end."""
    program = f"""
import json, os, resource, sys
seen = dict(argv=sys.argv[2:], env=dict(os.environ), cwd=os.getcwd(), parent=os.getppid(),
    session=os.getsid(0) == os.getpid(), group=open("/proc/self/cgroup").read(),
    limit=resource.getrlimit(resource.RLIMIT_MSGQUEUE), stdin=os.read(0, 1).hex(),
    files=sorted(os.readlink("/proc/self/fd/%s" % f) for f in os.listdir("/proc/self/fd")[3:-1]))
json.dump(seen, open(os.environ["OUT"], "w"))
print("words"); print("errors", file=sys.stderr)
{FORKED}
import time; time.sleep(10_000)
"""
    peer = session.begin()
    with_parent(peer, env=HOSTILE, late=["RANK", "OUT"])
    ranks = []
    for key, forked in (("0", True), ("12", True), ("2", False)):
        out = tmp_path / f"{key}.json"
        env = HOSTILE | {"OUT": str(out), "RANK": key}
        ranks.append(rank(key, program, env=env, cwd=str(tmp_path), heartbeat=True, forked=forked))
        ranks[-1]["argv"] += HOSTILE.values()
    peer.go(*ranks, secret_names=("KEY",))
    pids = {key: peer.hear("started", key)["pid"] for key in ("0", "12", "2")}
    for key, begun in (("0", "forked"), ("12", "forked"), ("2", "executed")):
        peer.until_output(key, begun)  # by two pipes: which comes first is open
        peer.until_output(key, "errors\n")
        assert "words\n" in peer.output(key, "out") and "errors\n" in peer.output(key, "err")
        assert peer.output(key).count("imported") == (begun == "forked")
    seen = {key: json.loads((tmp_path / f"{key}.json").read_text()) for key in pids}
    for key, pid in pids.items():
        own = seen[key]
        assert own["env"]["TRAINKIT_RUN"] == f"{session.mark}/{key}"
        assert own["env"]["KEY"] == SECRET and own["parent"] == peer.hello["pid"] == parent_of(pid)
        assert [p.pid for p in find_marked(f"{session.mark}/{key}")] == [pid]
        assert str(SCRIPT).encode() in cmdline(pid) and own["session"]
        for name in ("env", "group"):
            own[name] = (
                json.dumps(own[name])
                .replace(f'/{key}"', '/K"')
                .replace(f"{key}.json", "K.json")
                .replace(f'"RANK": "{key}"', "")
                .replace(f"/{key}\\n", "/K")
            )
    assert seen["0"] == seen["12"] == seen["2"]
    assert parent_of(parent_pid(session)) == peer.hello["pid"]
    os.kill(pids["12"], signal.SIGSEGV)
    assert peer.hear("ended", "12")["code"] == -signal.SIGSEGV
    peer.say(type="stop", grace=1, keys=["0"])
    end = peer.hear("ended", "0")
    assert (end["code"], end["stopped"]) == (-signal.SIGTERM, True) and alive(pids["2"])


@pytest.mark.parametrize("how", ["killed", "stopped", "broken", "absent", "late", "other"])
def test_a_rank_begins_without_its_parent(session: Session, tmp_path: Path, how: str) -> None:
    """Where that is killed before or while it forks, does not answer, could not import, could not
    be started, imports for too long, or has another environment; and says so."""
    peer = session.begin()
    if how == "broken":
        with_parent(peer, "raise SystemExit('no module named that')")
    elif how == "absent":
        peer.say(type="parent", argv=["/no/such"], env={}, cwd="/", late=[], seconds=1.0)
    elif how == "late":
        with_parent(peer, "import time; time.sleep(10_000)", seconds=0.5)
    else:
        with_parent(peer)
        peer.go(rank("9", SLEEPS))
        peer.until_output("9", "forked")
        if how in ("killed", "stopped"):
            number = signal.SIGKILL if how == "killed" else signal.SIGSTOP
            os.kill(parent_pid(session), number)
    peer.go(rank("0", SLEEPS, env={"OMP_NUM_THREADS": "7"} if how == "other" else {}, output=False))
    peer.hear("started", "0")
    peer.until_output("0", "rank 0 is started as a program of its own")
    words = {
        "killed": "ended",
        "stopped": "forked nothing within",
        "broken": "no module named that",
        "absent": "/no/such",
        "late": "has not imported everything within 0.5 s",
        "other": "OMP_NUM_THREADS",
    }
    peer.until_output("0", words[how])
    # a parent that ends is nobody's end
    assert not [f for f in peer.heard if f["type"] in ("ended", "refused", "start_failed")]
    if how in ("late", "other"):
        assert alive(parent_pid(session))
    peer.say(type="stop", grace=0.5, keys=None)
    assert peer.hear("stopped")["left"] == [] and not session.left()


def test_a_parent_serves_attempt_after_attempt(session: Session, tmp_path: Path) -> None:
    """Everything but the parent is ended; keys are used again, and what an earlier rank said of
    itself is forgotten."""
    done = (
        "import os; open(os.environ['TRAINKIT_HEARTBEAT_FILE'], 'w').write('{\"phase\": \"done\"}')"
    )
    peer = session.begin()
    for attempt in (1, 2):
        with_parent(peer)
        log = tmp_path / f"{attempt}.log"
        first = rank("0", f"{FORKED}; {done}", heartbeat=True, log=str(log))
        if attempt == 2:
            first = rank("0", SLEEPS, heartbeat=True, log=str(log))
        peer.go(first, rank("1", ignoring(tmp_path / str(attempt))))
        if attempt == 1:
            assert peer.hear("ended", "0")["done"]
            parent = parent_pid(session)
        hidden = pid_in(tmp_path / str(attempt))
        peer.say(type="stop", grace=0.2, keys=None, keep_parent=True)
        stopped = peer.hear("stopped")
        assert stopped["left"] == [] and stopped["proof"] and not alive(hidden)
        assert [p.pid for p in session.left()] == [parent]
        assert "forked\n" in log.read_text()  # what the parent printed goes another way
    end = [f for f in peer.heard if f["type"] == "ended" and f["key"] == "0"][-1]
    assert (end["done"], end["code"]) == (False, -signal.SIGTERM)
    with_parent(peer, PARENT + "\n")  # another one
    peer.until(lambda: parent_pid(session) not in (parent, 0))
    peer.say(type="bye")
    assert session.agent and session.agent.wait() == 0 and not session.left()
    assert session.words() == ""


@pytest.mark.parametrize("who", ["agent", "keeper", "both", "supervisor"])
def test_nothing_is_left_of_forked_ranks(session: Session, tmp_path: Path, who: str) -> None:
    """Whoever is killed: the parent, its ranks, and what these started."""
    peer = session.begin()
    with_parent(peer)
    peer.go(rank("0", ignoring(tmp_path / "pid")), rank("1", SLEEPS))
    peer.until_output("1", "forked")
    hidden = pid_in(tmp_path / "pid")
    pids = {p.pid for p in session.left()}
    assert len(pids) == 4 and hidden in pids and parent_pid(session) in pids
    assert session.agent
    keeper, agent = session.agent.pid, int(peer.hello["pid"])
    if who == "supervisor":
        peer.sock.close()
    for pid in {"agent": [agent], "keeper": [keeper], "both": [keeper, agent]}.get(who, []):
        os.kill(pid, signal.SIGSTOP if who == "both" else signal.SIGKILL)
    if who == "both":
        for pid in (keeper, agent):
            os.kill(pid, signal.SIGKILL)
        # what a rank had started is for the next session to sweep
        assert wait_until(lambda: not any(alive(pid) for pid in pids - {hidden}))
        return
    assert wait_until(lambda: not any(alive(pid) for pid in pids)) and not session.left()
    assert wait_until(lambda: not slots.slot_holders(session.node_folder))
