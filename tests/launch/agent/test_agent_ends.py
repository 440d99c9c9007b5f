"""Nothing is left: of programs that ignore, hide or hang, whoever of supervisor, agent, keeper
and transport dies."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.launch.fake_supervisor import (
    Session,
    alive,
    ignoring,
    pid_in,
    process,
    setsid,
    wait_until,
)
from trainkit.base import cgroup, slots


@pytest.fixture
def session(tmp_path: Path) -> Iterator[Session]:
    session = Session(tmp_path, grace=0.5)
    yield session
    session.close()


@pytest.fixture
def brief(tmp_path: Path) -> Iterator[Session]:
    """One whose lease is over while a test waits."""
    session = Session(tmp_path, lease=5, grace=0.5)
    yield session
    session.close()


def nameless(path: Path, *, limited: bool) -> str:
    """A program that leaves a grandchild in a session of its own with an empty environment,
    whose parent is gone; with the limit it inherited, or without."""
    limits = (
        ""
        if limited
        else (
            "import resource; resource.setrlimit(resource.RLIMIT_MSGQUEUE,"
            " (resource.getrlimit(resource.RLIMIT_MSGQUEUE)[1],) * 2); "
        )
    )
    middle = (
        f"{limits}import subprocess, sys; subprocess.Popen([sys.executable, '-I', '-c',"
        f" {setsid(path)!r}], env={{}})"
    )
    return (
        f"import subprocess, sys, time; subprocess.run([sys.executable, '-c', {middle!r}]);"
        " time.sleep(10_000)"
    )


class Hard:
    """A session's agent with programs that are hard to end."""

    def __init__(
        self,
        session: Session,
        folder: Path,
        *,
        stdin: int = subprocess.DEVNULL,
        around: Sequence[str] = (),
        limited: bool = False,
    ) -> None:
        self.peer = session.begin(stdin=stdin, around=around)
        paths = [folder / name for name in ("ignores", "nameless", "stopped")]
        stopped = (
            f"import os, signal; open({str(paths[2])!r}, 'w').write(str(os.getpid()));"
            " os.kill(os.getpid(), signal.SIGSTOP)"
        )
        self.peer.go(
            process("0", ignoring(paths[0])),
            process("1", nameless(paths[1], limited=limited)),
            process("2", stopped),
        )
        ranks = [self.peer.hear("started", key)["pid"] for key in "012"]
        self.peer.until(lambda: all(path.exists() and path.read_text() for path in paths))
        self.pids = [*ranks, *(pid_in(path) for path in paths[:2])]
        assert all(alive(pid) for pid in self.pids)

    def gone(self) -> bool:
        return wait_until(lambda: not any(alive(pid) for pid in self.pids))


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
        assert not slots.holders(session.node_folder) and "stops everything" in session.words()
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
            if b"trainkit" in _cmdline(pid) or _name(pid).startswith("python")
        ]
        assert agent in found and keeper not in found
        for pid in found:
            # the keeper has ended it: the agent is killed first
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    while slots.holders(session.node_folder):
        time.sleep(0.01)
    assert not any(alive(pid) for pid in hard.pids)
    assert (
        hard.gone()
        and wait_until(lambda: not alive(agent) and not alive(keeper))
        and not session.left()
    )
    assert session.agent.wait() == (-9 if who == "keeper" else 128 + 9)


def _cmdline(pid: int) -> bytes:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    return b""


def _name(pid: int) -> str:
    return Path(f"/proc/{pid}/comm").read_text()


def test_a_bug_of_its_own_leaves_nothing(tmp_path: Path) -> None:
    session = Session(tmp_path / "session", lease=60, grace="no number")
    try:
        hard = Hard(session, tmp_path)
        hard.peer.sock.close()
        assert session.agent and session.agent.wait() == 2
        assert (
            not any(alive(pid) for pid in hard.pids)
            and not session.left()
            and "TypeError" in session.words()
        )
        assert not slots.holders(session.node_folder) and not list(
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
    assert slots.holders(session.node_folder) and wait_until(
        lambda: not slots.holders(session.node_folder)
    )


# an agent on a host that has no cgroup v2; where it is not root's, there is none anyway
BARE = (
    ()
    if os.getuid()
    else (
        "unshare",
        "--mount",
        "--propagation",
        "private",
        "sh",
        "-c",
        'umount -a -t cgroup2; exec "$@"',
        "sh",
    )
)


def needs_cgroup() -> None:
    group = cgroup.new_group("test-needs/1/0")
    if group is None:
        pytest.skip("no cgroup v2 here that this user may write to")
    group.remove()


def around_of(host: str) -> tuple[str, ...]:
    """The program by way of which an agent begins on a host with cgroups or a bare one. Skips
    where this machine is not so."""
    if host == "with cgroup":
        needs_cgroup()
        return ()
    if not BARE and (group := cgroup.new_group("test-needs/1/0")) is not None:
        group.remove()
        pytest.skip("only root can take its cgroup away")
    return BARE


def kill_both(session: Session, agent: int) -> None:
    """Agent and keeper at one moment."""
    assert session.agent
    both = (session.agent.pid, agent)
    for number in (signal.SIGSTOP, signal.SIGKILL):
        for pid in both:
            os.kill(pid, number)
    session.agent.wait()


@pytest.mark.parametrize("host", ["with cgroup", "bare"])
def test_orphans_of_a_dead_run_are_ended_by_the_next(
    session: Session, tmp_path: Path, host: str
) -> None:
    """Agent and keeper killed at one moment: the ranks die with the agent. What they left is
    found by its group, also what gave up its environment; on a host without groups by its mark,
    or by the limit that it inherited; and "proved" is said of the former alone."""
    around = around_of(host)
    hard = Hard(session, tmp_path, around=around, limited=host == "bare")
    assert hard.peer.hello["proof"] == ("children" if host == "bare" else "cgroup")
    kill_both(session, int(hard.peer.hello["pid"]))
    ranks, orphans = hard.pids[:3], hard.pids[3:]
    assert wait_until(lambda: not any(alive(pid) for pid in ranks))
    assert all(alive(pid) for pid in orphans)
    assert {pid for group in cgroup.groups(session.run) for pid in group.pids()} == (
        set() if host == "bare" else set(orphans)
    )
    other = Session(tmp_path / "other", node_folder=str(session.node_folder))
    try:
        other.start(around=around)
        peer = other.accept()
        assert peer.hear("hello")["slots"] == {}
        peer.say(type="sweep", run=session.run, kill=False)
        seen = peer.hear("swept")
        assert {p["pid"] for p in seen["left"]} == set(orphans) and seen["proof"] is None
        peer.say(
            type="reserve", run=other.run, attempt=1, slots=["cpu"], share=False, mark=other.mark
        )
        cleared = peer.hear("reserved")["cleared"]
        assert [holder["run"] for holder in cleared] == [session.run] and not alive(orphans[0])
        peer.say(type="sweep", run=session.run, kill=True)
        swept = peer.hear("swept")
        assert swept["left"] == [] and swept["proof"] == (None if host == "bare" else "cgroup")
        assert wait_until(lambda: not alive(orphans[1])) and not cgroup.groups(session.run)
    finally:
        other.close()


def blind(program: str) -> subprocess.CompletedProcess[str]:
    """Run a program in which every look at /proc sees nothing, as it does of what is quick
    enough."""
    head = """
import os, signal, subprocess, sys, time
from pathlib import Path
from trainkit.base import cgroup
from trainkit.base import watchdog as keeper
from trainkit.base import process_marks as marks
marks.descendants = lambda pid: []
marks.marked = lambda mark: []
marks.kill_children = lambda: None
def later(path):
    if os.fork() == 0:
        os.setsid()
        os.closerange(0, 1000)  # who waits for the end of our output, or of the link, must not wait for this
        time.sleep(1)
        open(path, "w").close()
        os._exit(0)
"""
    return subprocess.run(
        [sys.executable, "-c", head + program], capture_output=True, text=True, check=False
    )


def test_a_keeper_that_sees_nothing_waits_for_the_kernels_word(tmp_path: Path) -> None:
    path = str(tmp_path / "ended")
    done = blind(
        f"def work(link):\n    link.guard('r/1/0', lease=60)\n    later({path!r})\n    return"
        " 3\nkeeper.WAIT = 0.001\nsys.exit(keeper.keep(work, 'k'))"
    )
    assert done.returncode == 3 and (tmp_path / "ended").exists(), done.stderr


def test_a_keeper_empties_the_group_whatever_it_sees() -> None:
    needs_cgroup()
    program = """
def work(link):
    group = cgroup.new_group("test-blind-%d/1/0" % os.getpid())
    link.guard("r/1/0", lease=60, group=group)
    entrance = group.entrance()
    subprocess.Popen(["sleep", "10000"], preexec_fn=lambda: os.write(entrance, b"0"))
    print(group.path, flush=True)
    return 3
sys.exit(keeper.keep(work, "k"))
"""
    done = blind(program)
    assert done.returncode == 3 and not Path(done.stdout.strip()).exists(), done.stderr


def test_an_agent_that_sees_nothing_waits_for_the_kernels_word(tmp_path: Path) -> None:
    path = str(tmp_path / "ended")
    program = f"""
from trainkit.launch.agent import loop as agent_loop
agent_loop.KILL_SECONDS = 10_000
agent = agent_loop.Agent(Path("/"), 0, None, {{}})
agent.memory = object()
later({path!r})
for _ in agent.end(None, 0.0):
    time.sleep(0.001)
assert agent.proved()
"""
    done = blind(program)
    assert done.returncode == 0 and (tmp_path / "ended").exists(), done.stderr


def test_a_keeper_that_was_stopped_ends_with_its_agent(session: Session) -> None:
    peer = session.begin()
    peer.go(process("0", "import time; time.sleep(10_000)"))
    peer.hear("started")
    assert session.agent
    os.kill(session.agent.pid, signal.SIGSTOP)
    peer.sock.close()
    assert session.agent.wait() == 13 and not session.left()


@pytest.mark.parametrize("host", ["with cgroup", "bare"])
@pytest.mark.parametrize("end", ["stop", "agent killed"])
def test_a_chain_of_forks_without_a_mark(session: Session, host: str, end: str) -> None:
    """Two looks at /proc that see nothing prove nothing: it is over when the kernel says so."""
    around = around_of(host)
    word = f"chain-{session.run}"
    chain = (
        f"import os, time\n# {word}\nwhile True:\n    if os.fork():\n        os._exit(0)\n   "
        " os.setsid()\n    time.sleep(0.001)"
    )
    peer = session.begin(around=around)
    peer.go(
        process(
            "0",
            "import os, sys, time\nif os.fork() == 0: os.execve(sys.executable, [sys.executable,"
            f" '-I', '-c', {chain!r}], {{}})\ntime.sleep(10_000)",
        )
    )
    peer.hear("started")

    def links() -> list[int]:
        return [
            int(p.name)
            for p in Path("/proc").iterdir()
            if p.name.isdigit() and word.encode() in _cmdline(int(p.name))
        ]

    seen: set[int] = set()

    def goes_on() -> bool:
        seen.update(links())
        return len(seen) > 2

    assert wait_until(goes_on)
    if end == "stop":
        peer.say(type="stop", grace=0, keys=None)
        stopped = peer.hear("stopped")
        assert stopped["left"] == [] and stopped["proof"] == (
            "children" if host == "bare" else "cgroup"
        )
    else:
        assert session.agent
        os.kill(int(peer.hello["pid"]), signal.SIGKILL)
        session.agent.wait()
    assert not [pid for _ in range(20) for pid in links() if alive(pid)]


def test_an_agent_and_its_keeper_that_stand_still_are_ended_by_the_next(
    session: Session, tmp_path: Path
) -> None:
    """They hold their slots and hear nothing: they carry their run's mark, so that whoever
    sweeps it ends them too."""
    peer = session.begin()
    peer.go(process("0", "import time; time.sleep(10_000)"))
    rank = peer.hear("started")["pid"]
    assert session.agent
    for pid in (session.agent.pid, int(peer.hello["pid"])):
        os.kill(pid, signal.SIGSTOP)
    peer.sock.close()
    other = Session(tmp_path / "other", node_folder=str(session.node_folder))
    try:
        second = other.begin(slots=())
        second.say(type="sweep", run=session.run, kill=True)
        assert second.hear("swept")["left"] == []
        assert session.agent.wait() == -9 and not alive(rank)
        second.say(
            type="reserve", run=other.run, attempt=1, slots=["cpu"], share=False, mark=other.mark
        )
        second.hear("reserved")
    finally:
        other.close()


def test_an_agent_that_stands_still_from_its_first_moment_ends() -> None:
    """Before it has said how often it will move."""
    program = (
        "import signal, sys, os; from trainkit.base import watchdog; watchdog.START_LEASE = 0.2\n"
    )
    program += (
        "sys.exit(watchdog.keep(lambda link: os.kill(os.getpid(), signal.SIGSTOP), 'keeper'))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert done.returncode == 128 + 9 and "has not moved for 0.2 s" in done.stderr


def test_a_word_against_a_living_run_is_not_believed(session: Session, tmp_path: Path) -> None:
    """The files of slots are everybody's to write; what holds a slot is nobody's orphan."""
    peer = session.begin()
    peer.go(process("0", "import time; time.sleep(10_000)"))
    pid = peer.hear("started", "0")["pid"]
    other = Session(tmp_path / "other", node_folder=str(session.node_folder))
    try:
        slots.slot_path(session.node_folder, "gpu0").write_text(
            json.dumps({"run": session.run, "mark": f"{session.mark}/0"})
        )
        other.start()
        second = other.accept()
        second.hear("hello")
        second.say(
            type="reserve", run=other.run, attempt=1, slots=["gpu0"], share=False, mark=other.mark
        )
        assert second.hear("reserved")["cleared"] != [] and alive(pid)
        peer.hear("heartbeat")
    finally:
        other.close()


def test_sweep_ends_what_another_session_left(session: Session, tmp_path: Path) -> None:
    peer = session.begin()
    environment = {**os.environ, "TRAINKIT_RUN": f"{session.run}-other/1/0/0"}
    with subprocess.Popen(
        [sys.executable, "-c", ignoring(tmp_path / "pid")], env=environment
    ) as left:
        try:
            child = pid_in(tmp_path / "pid")
            peer.say(type="sweep", run=f"{session.run}-other", kill=False)
            assert {p["pid"] for p in peer.hear("swept")["left"]} == {left.pid, child}
            peer.say(type="sweep", run=f"{session.run}-other", kill=True)
            swept = peer.hear("swept")
            assert (
                swept["left"] == []
                and {p["pid"] for p in swept["killed"]} == {left.pid, child}
                and not alive(child)
            )
        finally:
            left.kill()
