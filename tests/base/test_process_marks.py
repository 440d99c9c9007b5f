"""Processes found by the mark they inherit, and by descent where they have lost it."""

from __future__ import annotations

import os
import resource
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from trainkit.base.process_marks import (
    MARK_VARIABLE,
    MarkedProcess,
    find_by_limit,
    find_descendants,
    find_marked,
    kill_processes,
    limit_mark,
    send_signal,
)


@pytest.fixture
def run() -> Iterator[str]:
    name = "test-" + secrets.token_hex(6)
    yield name
    kill_processes(find_marked(name))


def started(
    mark: str, program: str = "import time; print('up', flush=True); time.sleep(10_000)"
) -> subprocess.Popen[bytes]:
    process = subprocess.Popen(
        [sys.executable, "-c", program],
        env={**os.environ, MARK_VARIABLE: mark},
        stdout=subprocess.PIPE,
    )
    assert process.stdout and process.stdout.readline()
    return process


def test_whole_parts_of_a_mark_count(run: str) -> None:
    """Node 1 is not node 10."""
    first, tenth = started(f"{run}/1/1/0"), started(f"{run}/1/10/0")
    with first, tenth:
        try:
            assert {(p.pid, p.mark, p.argv0) for p in find_marked(f"{run}/1/1")} == {
                (first.pid, f"{run}/1/1/0", sys.executable)
            }
            assert (
                {p.pid for p in find_marked(run)}
                == {p.pid for p in find_marked(f"{run}/")}
                == {first.pid, tenth.pid}
            )
            assert not find_marked(run[:-1]) and not find_marked("")
            kill_processes(find_marked(f"{run}/1/1"))
            assert first.wait() == -9
            assert {p.pid for p in find_marked(run)} == {tenth.pid}
            kill_processes(find_marked(run))
            assert tenth.wait() == -9 and not find_marked(run)
        finally:
            first.kill()
            tenth.kill()


def test_zombies_are_not_living(run: str) -> None:
    with started(f"{run}/1/0/0") as process:
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert not find_marked(run)


def test_children_inherit_it_and_descent_finds_the_rest(run: str) -> None:
    child = "import os, time; os.setsid(); time.sleep(10_000)"
    program = (
        f"import subprocess, sys, time; print(subprocess.Popen([sys.executable, '-c', {child!r}],"
        " env={}).pid, flush=True); time.sleep(10_000)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program],
        env={**os.environ, MARK_VARIABLE: run},
        stdout=subprocess.PIPE,
    ) as parent:
        assert parent.stdout
        pid = int(parent.stdout.readline())
        try:
            assert [p.pid for p in find_marked(run)] == [parent.pid]
            below = find_descendants(os.getpid())
            assert {parent.pid, pid} <= {p.pid for p in below} and os.getpid() not in {
                p.pid for p in below
            }
            assert [p.pid for p in find_descendants(parent.pid)] == [pid]
        finally:
            os.kill(pid, signal.SIGKILL)
            parent.kill()


def test_a_later_process_of_the_same_pid_is_spared(run: str) -> None:
    with started(run) as process:
        try:
            (found,) = find_marked(run)
            assert not send_signal(
                MarkedProcess(found.pid, found.start_time - 1, found.mark, found.argv0),
                signal.SIGKILL,
            )
            time.sleep(0.1)
            assert process.poll() is None
        finally:
            process.kill()
    assert not send_signal(found, 0)


def kept(tmp_path: Path, work: str) -> subprocess.CompletedProcess[str]:
    program = f"""
import os, signal, subprocess, sys, time
from pathlib import Path
from trainkit.base.watchdog import run_under_watchdog
def work(link):
{work}
sys.exit(run_under_watchdog(work, "the keeper"))
"""
    return subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )


def test_a_keepers_code_is_its_workers(tmp_path: Path) -> None:
    assert kept(tmp_path, "    return 7").returncode == 7
    assert kept(tmp_path, "    os.kill(os.getpid(), signal.SIGKILL)").returncode == 137
    broken = kept(tmp_path, "    raise RuntimeError('words')")
    assert broken.returncode == 2 and "RuntimeError: words" in broken.stderr
    listening = (
        "next(int(line.split()[1], 16) >> 14 & 1 for line in open(f'/proc/{os.getppid()}/status')"
        " if line.startswith('SigCgt'))"
    )
    terminated = kept(
        tmp_path,
        f"    while not {listening}: time.sleep(0.01)\n    os.kill(os.getppid(), signal.SIGTERM);"
        " time.sleep(10_000)",
    )
    assert terminated.returncode == 128 + 15


def test_a_keeper_ends_what_its_worker_left_and_frees_files_after_that(tmp_path: Path) -> None:
    work = """
    import fcntl
    lock = os.open("lock", os.O_RDWR | os.O_CREAT)
    fcntl.flock(lock, fcntl.LOCK_EX)
    Path("folder").mkdir()
    link.guard("no-such-mark", lease=20, folders=[Path("folder").absolute()])
    link.hold([lock], lease=20)
    code = "import os, time; os.setsid(); time.sleep(10_000)"
    child = subprocess.Popen([sys.executable, "-c", code], env={})
    Path("pid").write_text(str(child.pid))
    os.write(lock, b"held")
    os.kill(os.getpid(), signal.SIGKILL)
"""
    assert kept(tmp_path, work).returncode == 137
    assert (
        not Path(f"/proc/{(tmp_path / 'pid').read_text()}").exists()
        and not (tmp_path / "folder").exists()
        and (tmp_path / "lock").read_bytes() == b""
    )


def test_a_worker_that_does_not_beat_is_ended(tmp_path: Path) -> None:
    still = kept(tmp_path, "    link.guard('no-such-mark', lease=0.5)\n    time.sleep(10_000)")
    assert still.returncode == 137 and "has not moved for 0.5 s" in still.stderr
    assert (
        kept(
            tmp_path,
            "    link.guard('no-such-mark', lease=3)\n    for _ in range(40): link.beat();"
            " time.sleep(0.1)\n    return 3",
        ).returncode
        == 3
    )


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be two users")
def test_a_limit_that_another_user_has_taken_is_no_mark(run: str) -> None:
    limit = limit_mark(run)
    assert limit
    with subprocess.Popen(
        ["sleep", "1000"],
        user=65534,
        # one system call
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_MSGQUEUE, limit),  # noqa: PLW1509
    ) as foreign:
        assert [process.pid for process in find_by_limit(run)] == [foreign.pid]
        if (looker := os.fork()) == 0:
            os.setuid(65533)
            os._exit(len(find_by_limit(run)))
        _, found = os.waitpid(looker, 0)
        foreign.kill()
    assert found == 0
