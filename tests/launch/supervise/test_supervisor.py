"""The supervisor with a real agent, over small programs in place of ranks: what it keeps, hides,
survives and records."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import stat
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.launch.supervised import DONE, Program, make_run, supervised
from trainkit.base.files import read_json, restrict_umask, write_json
from trainkit.launch.hosts.hostfile import Host
from trainkit.launch.supervise.observer import RunObserver, silent_observer
from trainkit.launch.supervise.outcome import Outcome, StopRequest
from trainkit.launch.supervise.stop_requests import StopRequests
from trainkit.launch.supervise.supervisor import Supervisor, supervise
from trainkit.runs.events import AttemptEnded, read_events
from trainkit.runs.folder import RunFolder, new_run_folder
from trainkit.runs.record import read_run_record

SECRET = "first-line-of-a-key\nsecond-line-of-a-key"


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    return make_run(tmp_path, ['cluster.secrets=["KEY?"]'])


def test_a_run_folder_is_nobody_elses_to_write(tmp_path: Path) -> None:
    """Whatever the umask: who can replace `code` runs as us at the next resume. A group may
    share it, where the umask lets it."""
    modes = []
    for number, mask in enumerate((0o000, 0o002, 0o077)):
        before = os.umask(mask)
        try:
            restrict_umask()
            path = new_run_folder(tmp_path / str(number), "j").path
        finally:
            os.umask(before)
        modes.append(
            {
                stat.S_IMODE(folder.stat().st_mode)
                for folder in (path, path.parent, path.parent.parent)
            }
        )
    assert modes == [{0o775}, {0o775}, {0o700}]


def test_this_machine_that_cannot_reach_itself_is_told_no_word_of_ssh(
    run: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainkit.launch.session.sys.executable", "/bin/false")
    outcome, _ = supervised(run, Program(DONE))
    cause = outcome.root_cause or {}
    assert (
        outcome.exit == 8
        and "python = /bin/false" in cause["advice"]
        and "with no ssh" in cause["advice"]
    )


def test_secrets_reach_the_rank_and_no_record(run: RunFolder) -> None:
    program = """
import json, os, sys
key = os.environ["KEY"]
print("length", len(key)); print(key); print(repr(key))
error = {"schema": "rank-error/1", "message": "bad key: " + key, "exit": 9}
json.dump(error, open(os.environ["TORCHELASTIC_ERROR_FILE"], "w"))
sys.exit(9)
"""
    outcome, _ = supervised(run, Program(program), secrets={"KEY": SECRET})
    assert (
        outcome.exit == 9
        and outcome.root_cause is not None
        and outcome.root_cause["message"] == "bad key: ***"
    )
    log = run.attempt(1).log(0).read_text()
    assert f"length {len(SECRET)}" in log and "***" in log
    for file in run.root.rglob("*"):
        assert not file.is_file() or b"line-of-a-key" not in file.read_bytes(), file


def test_a_full_disk_under_a_log_does_not_stop_the_rank(run: RunFolder) -> None:
    log = run.attempt(1).log(0)
    log.parent.mkdir(parents=True)
    log.symlink_to("/dev/full")
    (run.path / "attempts" / "1").rename(run.path / "attempts" / "early")
    begun = []

    def begin(run: RunFolder) -> None:
        begun.append(run)
        (run.path / "attempts" / "early" / "logs").rename(run.path / "attempts" / "1" / "logs")

    outcome, _ = supervised(
        run,
        Program(DONE + "print('x' * 200000)"),
        watch=RunObserver(begin, lambda: None, lambda text: None),
    )
    assert begun and log.is_symlink() and outcome.failure_class == "success"


def test_a_view_that_fails_is_switched_off_and_the_run_goes_on(run: RunFolder) -> None:
    calls = []

    def tick() -> None:
        calls.append(1)
        raise SystemExit(1)  # what rich raises where the pipe is closed

    outcome, events = supervised(
        run, Program(DONE), watch=RunObserver(lambda run: None, tick, lambda text: None)
    )
    assert outcome.failure_class == "success" and len(calls) == 1
    assert [e["event"] for e in events if e["event"] in ("view_lost", "ended")] == [
        "view_lost",
        "ended",
    ]


def test_a_program_that_is_not_there(run: RunFolder) -> None:
    outcome, events = supervised(run, Program(argv=("/no/such/program",)))
    assert (
        outcome.exit == 8
        and events[-1]["event"] == "ended"
        and events[-1]["exit"] == 8
        and "/no/such/program" in events[-1]["root_cause"]["message"]
    )


def test_a_rank_that_leaves_processes_behind_is_cleaned_up_after(run: RunFolder) -> None:
    program = (
        DONE
        + "import subprocess; print('child', subprocess.Popen(['sleep', '600']).pid, flush=True)"
    )
    outcome, events = supervised(run, Program(program))
    assert (
        outcome.failure_class == "success"
        and events[-1]["survivors"] == []
        and events[-1]["unanswered"] == []
    )
    pid = int(run.attempt(1).log(0).read_text().split()[1])
    assert not Path(f"/proc/{pid}").exists() or ") Z" in Path(f"/proc/{pid}/stat").read_text()


def test_the_folder_of_a_run_that_is_over(run: RunFolder) -> None:
    outcome, events = supervised(run, Program(DONE), secrets={"KEY": SECRET})
    assert outcome.exit == 0 and [e["event"] for e in events] == [
        "started",
        "agent_joined",
        *["rank_started"] * 2,
        "go",
        *["rank_ended"] * 2,
        "ended",
    ]
    sign = read_json(run.supervisor)
    assert sign["ended"] is True and sign["attempt"] == 1 and sign["identity"]["pid"] == os.getpid()
    assert sorted(p.name for p in run.session(1).iterdir()) == ["node.sh", "session.json", "token"]
    assert run.session(1).joinpath("token").stat().st_mode & 0o777 == 0o600
    assert {p.name for p in (run.path / "attempts/1/heartbeat").iterdir()} == {"0.json", "1.json"}
    left = {p.name: p.stat().st_size for p in (run.root / "node").iterdir()}
    assert left == {"trainkit-cpu.lock": 0, f"trainkit-cpu.holder-{os.geteuid()}": 0}


def test_two_runs_on_one_host_share_it_or_the_second_is_refused(tmp_path: Path) -> None:
    first, second, third = (make_run(tmp_path) for _ in range(3))
    over = tmp_path / "over"
    slow = Program(
        f"import os, time\nwhile not os.path.exists({str(over)!r}): time.sleep(0.01)\n{DONE}"
    )
    quick = Program(DONE + f"open({str(over)!r}, 'w').close()\n")

    async def side_by_side() -> list[Outcome]:
        supervisors = [
            Supervisor(run, {}, StopRequests(), silent_observer(), share=True, engine=engine)
            for run, engine in ((first, slow), (second, quick))
        ]
        return list(await asyncio.gather(*(supervisor.supervise() for supervisor in supervisors)))

    assert [outcome.exit for outcome in asyncio.run(side_by_side())] == [0, 0]
    over.unlink()

    async def one_after_the_other() -> list[Outcome]:
        holds = asyncio.ensure_future(
            Supervisor(
                third, {}, StopRequests(), silent_observer(), share=False, engine=slow
            ).supervise()
        )
        while '"go"' not in (
            third.attempt(1).events.read_text() if third.attempt(1).events.exists() else ""
        ):
            await asyncio.sleep(0.05)
        refused = await Supervisor(
            make_run(tmp_path), {}, StopRequests(), silent_observer(), share=False, engine=quick
        ).supervise()
        over.touch()
        return [refused, await holds]

    refused, done = asyncio.run(one_after_the_other())
    assert (refused.exit, done.exit) == (17, 0) and third.id in str(refused.root_cause)


@pytest.mark.skipif(shutil.which("pdsh") is None, reason="needs pdsh")
def test_a_launcher_that_cannot_even_try(tmp_path: Path) -> None:
    hosts = [Host("node1", port=2222, slots=(0, 1)), Host("node2", slots=(0, 1))]
    run = make_run(
        tmp_path, ["cluster.launcher=pdsh", "cluster.interface=127.0.0.0/8"], hosts=hosts, nodes=2
    )
    outcome, told = supervised(run, Program(DONE))
    assert (outcome.exit, outcome.failure_class) == (
        3,
        "user",
    ) and "pdsh cannot take a port" in told[-1]["root_cause"]["message"]
    assert len(run.attempts()) == 1


def test_nohups_wish_is_heeded() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with StopRequests().handling_signals() as stop_requests:
            heard = []
            for number in (signal.SIGHUP, signal.SIGTERM, signal.SIGINT):
                os.kill(os.getpid(), number)
                heard.append((stop_requests.first, stop_requests.immediate))
            assert heard == [(None, False), (StopRequest.SAVE, False), (StopRequest.SAVE, True)]
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)
    assert threading.current_thread() is threading.main_thread()


def test_a_sign_that_the_file_system_holds_up_holds_up_nothing_else(
    run: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the last sign says that we have ended, whatever was under way."""
    begun, answers = threading.Event(), threading.Event()

    def stalled(path: Path, value: object) -> None:
        begun.set()
        answers.wait(20)
        write_json(path, value)

    monkeypatch.setattr("trainkit.launch.supervise.root_watch.SIGN_SECONDS", 0.05)
    monkeypatch.setattr("trainkit.runs.record.write_json", stalled)
    supervisor = Supervisor(run, {}, StopRequests(), silent_observer(), share=False)
    supervisor.root.start()
    assert begun.wait(600) and not run.supervisor.exists()
    threading.Timer(0.2, answers.set).start()
    supervisor.root.close()
    supervisor.ended = True
    supervisor._write_sign_of_life()
    assert read_json(run.supervisor)["ended"] is True


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    """A file system of 64 MB."""
    folder = tmp_path / "small"
    folder.mkdir()
    words = ["mount", "-t", "tmpfs", "-o", "size=64m", "small", str(folder)]
    if subprocess.run(words, check=False, capture_output=True).returncode:
        pytest.skip("nothing can be mounted here")
    yield folder
    subprocess.run(["umount", folder], check=True)


def test_a_full_root_hides_no_cause(small: Path) -> None:
    fill = """
import os
print(("more than the end of a page holds " * 40 + "\\n") * 30)
with open(os.environ["FILLER"], "wb", buffering=0) as file:
    while file.write(bytes(4096)):
        pass
"""
    run = make_run(small, ["cluster.ranks_per_node=1"])
    engine = Program(fill, env={"FILLER": str(small / "filler")})
    outcome = supervise(run, {}, silent_observer(), share=False, engine=engine)
    assert "No space left on device" in str((outcome.root_cause or {})["last"])
    ended = read_events(run.attempt(1))[-1]  # behind a torn line
    assert isinstance(ended, AttemptEnded) and ended.root_cause == outcome.root_cause
    events = run.attempt(1).events
    assert [path.name for path in events.parent.glob("events*")] == ["events.jsonl"]

    # as of a supervisor that was killed before its last word
    started = events.read_bytes().splitlines(keepends=True)[0]
    os.truncate(events, len(started))
    with open(small / "filler", "ab", buffering=0) as filler, contextlib.suppress(OSError):
        while filler.write(bytes(4096)):
            pass
    cause = read_run_record(run).root_cause or {}
    assert cause["message"].endswith(f"the file system of {run.path} is full")
