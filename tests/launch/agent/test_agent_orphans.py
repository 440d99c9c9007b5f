"""Nothing is left where agent and keeper are gone, see nothing, or stand still: the next session
ends it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.launch.agent.hard_programs import Hard, cmdline
from tests.launch.fake_supervisor import (
    Session,
    alive,
    ignoring,
    pid_in,
    process,
    wait_until,
)
from trainkit.base import cgroup, slots

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
    group = cgroup.create_cgroup("test-needs/1/0")
    if group is None:
        pytest.skip("no cgroup v2 here that this user may write to")
    group.remove()


def around_of(host: str) -> tuple[str, ...]:
    """The program by way of which an agent begins on a host with cgroups or a bare one. Skips
    where this machine is not so."""
    if host == "with cgroup":
        needs_cgroup()
        return ()
    if not BARE and (group := cgroup.create_cgroup("test-needs/1/0")) is not None:
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
    # a rank that has died is in its group until somebody has waited for it
    assert wait_until(
        lambda: (
            {pid for group in cgroup.find_cgroups(session.run) for pid in group.pids()}
            == (set() if host == "bare" else set(orphans))
        )
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
        assert wait_until(lambda: not alive(orphans[1])) and not cgroup.find_cgroups(session.run)
    finally:
        other.close()


def blind(program: str) -> subprocess.CompletedProcess[str]:
    """Run a program in which every look at /proc sees nothing, as it does of what is quick
    enough."""
    head = """
import os, signal, subprocess, sys, time
from pathlib import Path
from trainkit.base import cgroup
from trainkit.base import watchdog
from trainkit.base import process_marks
process_marks.find_descendants = lambda pid: []
process_marks.find_marked = lambda mark: []
process_marks.kill_children = lambda *_: None
def later(path):
    if os.fork() == 0:
        os.setsid()
        os.closerange(0, 1000)  # nobody waits for the end of this one's output
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
        " 3\nwatchdog.WAIT = 0.001\nsys.exit(watchdog.run_under_watchdog(work, 'k'))"
    )
    assert done.returncode == 3 and (tmp_path / "ended").exists(), done.stderr


def test_a_keeper_empties_the_group_whatever_it_sees() -> None:
    needs_cgroup()
    program = """
def work(link):
    group = cgroup.create_cgroup("test-blind-%d/1/0" % os.getpid())
    link.guard("r/1/0", lease=60, group=group)
    entrance = group.entrance()
    subprocess.Popen(["sleep", "10000"], preexec_fn=lambda: os.write(entrance, b"0"))
    print(group.path, flush=True)
    return 3
sys.exit(watchdog.run_under_watchdog(work, "k"))
"""
    done = blind(program)
    assert done.returncode == 3 and not Path(done.stdout.strip()).exists(), done.stderr


def test_an_agent_that_sees_nothing_waits_for_the_kernels_word(tmp_path: Path) -> None:
    path = str(tmp_path / "ended")
    program = f"""
from trainkit.launch.agent import termination
termination.KILL_SECONDS = 10_000
processes = termination.HostProcesses("r/1/0", None)
processes.any_started = True
later({path!r})
for _ in processes.terminate(None, 0.0):
    time.sleep(0.001)
assert processes.proved_empty()
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
            if p.name.isdigit() and word.encode() in cmdline(int(p.name))
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
    program += "stop = lambda link: os.kill(os.getpid(), signal.SIGSTOP)\n"
    program += "sys.exit(watchdog.run_under_watchdog(stop, 'keeper'))"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert done.returncode == 128 + 9 and "has not moved for 0.2 s" in done.stderr


@pytest.mark.parametrize(
    ("where", "part"),
    [("lock", "0"), ("lock", "agents"), ("everybody's", "0"), ("own", "agents"), ("own", "0/0")],
)
def test_a_word_against_a_living_run_is_not_believed(
    session: Session, tmp_path: Path, where: str, part: str
) -> None:
    """What others may write ends nothing; nor does our own word, of anything but a node's part."""
    peer = session.begin()
    peer.go(process("0", "import time; time.sleep(10_000)"))
    pid = peer.hear("started", "0")["pid"]
    other = Session(tmp_path / "other", node_folder=str(session.node_folder))
    lock = slots.slot_path(session.node_folder, "gpu0")
    mark = f"{session.run}/1/{part}"
    path = lock if where == "lock" else lock.with_name(f"trainkit-gpu0.holder-{os.geteuid()}")
    path.write_text(json.dumps({"run": session.run, "mark": mark}))
    path.chmod(0o644 if where == "own" else 0o666)
    try:
        other.start()
        second = other.accept()
        second.hear("hello")
        second.say(
            type="reserve", run=other.run, attempt=1, slots=["gpu0"], share=False, mark=other.mark
        )
        assert second.hear("reserved") and alive(pid) and session.agent
        assert session.agent.poll() is None
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
