"""What a real agent starts, and what it says of it: arguments, ends, memory, signals."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from pathlib import Path

import pytest

from tests.launch.fake_supervisor import SECRET, Session, process, wait_until
from trainkit.launch.agent.process import BEAT_BYTES

HOSTILE = {
    "QUOTES": "'\"`",
    "SHELL": "$HOME $(id) ${X} ; & | > <",
    "LINES": "a\nb\r\nc",
    "PERCENT": "%h %n %% %u",
    "JSON": '{"a": [1, "b"]}',
    "UNICODE": "日本 é 𝄞",
    "EMPTY": "",
    "BYTES": os.fsdecode(b"\xff\xfe"),
}


def test_words_arrive_as_they_were(session: Session, tmp_path: Path) -> None:
    """Arguments and environment byte by byte, with secrets, this node's values and torch's."""
    program = (
        "import json, os, sys; json.dump([sys.argv[1:], dict(os.environ)], open(os.environ['OUT'],"
        " 'w'))"
    )
    env = HOSTILE | {
        "OUT": str(tmp_path / "seen.json"),
        "HERE": "${node:NODE_ONLY}/x",
        "SHARE": "${node:cores/1}",
        "NOT": "${host:X} ${node:}",
    }
    peer = session.begin(environment={**os.environ, "NODE_ONLY": "of this node"})
    argv = [sys.executable, "-c", program, *HOSTILE.values()]
    peer.go(
        {
            "key": "0",
            "argv": argv,
            "env": env,
            "cwd": str(tmp_path),
            "heartbeat": True,
            "log": None,
            "error": None,
        },
        secret_names=("KEY", "ABSENT"),
    )
    assert peer.hear("ended", "0")["code"] == 0
    words, seen = json.loads((tmp_path / "seen.json").read_text())
    assert words == list(HOSTILE.values())
    assert {name: seen[name] for name in env} == env | {
        "HERE": "of this node/x",
        "SHARE": str(len(os.sched_getaffinity(0))),
    }
    assert seen["KEY"] == SECRET and "ABSENT" not in seen and seen["PATH"] == os.environ["PATH"]
    assert (
        seen["TRAINKIT_RUN"] == f"{session.mark}/0"
        and int(seen["TRAINKIT_PARENT_PID"]) == peer.hello["pid"]
    )
    assert Path(seen["TRAINKIT_HEARTBEAT_FILE"]).is_relative_to(session.node_folder)


def test_what_cannot_start_is_said_and_the_rest_starts(session: Session, tmp_path: Path) -> None:
    peer = session.begin()
    bad = [
        process("0", ""),
        process("1", "", cwd="/no/such/folder"),
        process("2", "", env={"A": "${node:NO_SUCH_VARIABLE}"}),
        process("3", "import time; time.sleep(600)"),
    ]
    bad[0]["argv"] = ["/no/such/program"]
    peer.go(*bad)
    errors = [peer.hear("start_failed", key)["error"] for key in "012"]
    assert (
        "/no/such/program" in errors[0]
        and "/no/such/folder" in errors[1]
        and "NO_SUCH_VARIABLE" in errors[2]
    )
    peer.hear("started", "3")
    (session.folder / "secrets.json").unlink()
    peer.go(process("4", ""), process("5", ""), secret_names=("KEY",))
    assert all("secrets.json" in peer.hear("start_failed", key)["error"] for key in "45")
    peer.go(process("3", ""))
    assert "runs already" in peer.hear("start_failed", "3")["error"]


def test_a_root_that_does_not_answer_holds_up_only_what_reads_it(session: Session) -> None:
    """What is stopped meanwhile does not begin afterwards."""
    peer = session.begin()
    secrets = session.folder / "secrets.json"
    text = secrets.read_text()
    secrets.unlink()
    os.mkfifo(secrets)  # opened for reading, it waits for its writer
    peer.go(process("0", ""), process("1", "print('runs')"), secret_names=("KEY",))
    for _ in range(3):
        peer.hear("heartbeat", seconds=60)
    peer.say(type="stop", keys=["0"], grace=1)
    peer.hear("stopped", seconds=60)
    assert not any(frame["type"] in ("started", "start_failed") for frame in peer.heard)
    secrets.write_text(text)
    assert "stopped before it began" in peer.hear("start_failed", "0")["error"]
    assert peer.hear("ended", "1")["code"] == 0


def test_how_processes_end(session: Session, tmp_path: Path) -> None:
    """Exit codes and signals as they were; success as the process said it; its error file; the
    end of its output."""
    error = tmp_path / "errors" / "1.json"
    words = {"schema": "rank-error/1", "message": f"no {SECRET} here", "exit": 9}
    done = (
        "import json, os; open(os.environ['TRAINKIT_HEARTBEAT_FILE'],"
        " 'w').write(json.dumps({'schema': 'heartbeat/1', 'phase': 'done', 'step': 7})); os.abort()"
    )
    failing = (
        f"import json; json.dump({words!r}, open({str(error)!r}, 'w')); print('\\n'.join(map(str,"
        " range(100)))); raise SystemExit(3)"
    )
    room = "import os; print(os.stat(os.environ['TRAINKIT_HEARTBEAT_FILE']).st_size)"
    peer = session.begin()
    peer.go(
        process("0", done, heartbeat=True),
        process("1", failing, error=str(error)),
        process("2", "import os; os.kill(os.getpid(), 11)"),
        process("3", "import os, signal; os.kill(os.getpid(), 9)"),
        process("4", room, heartbeat=True),  # on a disk that may be full when it has words for it
        secret_names=("KEY",),
    )
    ends = {end["key"]: end for end in (peer.hear("ended") for _ in range(5))}
    assert {key: (end["code"], end["done"], end["stopped"]) for key, end in ends.items()} == {
        "0": (-6, True, False),
        "1": (3, False, False),
        "2": (-11, False, False),
        "3": (-9, False, False),
        "4": (0, False, False),
    }
    beats = [f["beats"]["0"] for f in peer.heard if f["type"] == "heartbeat" and "0" in f["beats"]]
    assert beats and beats[-1]["phase"] == "done"  # before the word of its end
    assert (
        ends["1"]["error"] == words | {"message": "no *** here"} and SECRET not in error.read_text()
    )
    assert (
        ends["1"]["last"] == [str(n) for n in range(70, 100)]
        and ends["4"]["last"] == [str(BEAT_BYTES)]
        and ends["4"]["error"] is None
    )
    assert not ends["3"]["oom"] and all(
        abs(end["time"] - time.time()) < 20 for end in ends.values()
    )


def memory_limited(folder_name: str, limit: int) -> Path | None:
    """A memory cgroup, of either version, that this process may make."""
    for base, file in (
        (Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes"),
        (Path("/sys/fs/cgroup"), "memory.max"),
    ):
        folder = base / folder_name
        with contextlib.suppress(OSError):
            folder.mkdir()
            try:
                (folder / file).write_text(str(limit))
                return folder
            except OSError:
                folder.rmdir()
    return None


def test_want_of_memory_is_known(session: Session) -> None:
    """A rank that the kernel kills for it, beside one that somebody kills."""
    cgroup = memory_limited(session.run, 300 * 2**20)
    if cgroup is None:
        pytest.skip("no memory cgroup can be made here")
    try:
        peer = session.begin()
        assert session.agent
        for pid in (session.agent.pid, peer.hello["pid"]):
            (cgroup / "cgroup.procs").write_text(str(pid))
        peer.go(
            process("0", "x = bytearray(2**30)"), process("1", "import os; os.kill(os.getpid(), 9)")
        )
        ends = {
            end["key"]: (end["code"], end["oom"]) for end in (peer.hear("ended") for _ in range(2))
        }
        assert ends == {"0": (-9, True), "1": (-9, False)}
    finally:
        session.close()
        assert wait_until(lambda: not (cgroup / "cgroup.procs").read_text())
        cgroup.rmdir()


def test_beats_come_once_each(session: Session, tmp_path: Path) -> None:
    """The program writes a beat when it is told to: what is slow here changes nothing."""
    program = f"""
import json, os, time
for step in range(3):
    while not os.path.exists({str(tmp_path)!r} + f"/write{{step}}"):
        time.sleep(0.01)
    path = os.environ["TRAINKIT_HEARTBEAT_FILE"]
    beat = {{"schema": "heartbeat/1", "phase": "train", "step": step}}
    open(path + ".new", "w").write(json.dumps(beat))
    os.replace(path + ".new", path)
time.sleep(600)
"""
    peer = session.begin()
    peer.go(
        process("0", program, heartbeat=True),
        process("1", "import time; time.sleep(600)", heartbeat=True),
    )
    for step in range(3):
        assert peer.hear("heartbeat")["beats"] == {}
        before = time.time()
        (tmp_path / f"write{step}").touch()
        frame = peer.hear("heartbeat")
        while not frame["beats"]:
            frame = peer.hear("heartbeat")
        assert before <= frame["clock"] <= time.time()
        assert list(frame["beats"]) == ["0"] and frame["beats"]["0"]["step"] == step
        assert peer.hear("heartbeat")["beats"] == {}


def test_signals_reach_the_program_alone(session: Session, tmp_path: Path) -> None:
    child = (
        "import signal, time; signal.signal(10, lambda *_: print('child', flush=True));"
        " time.sleep(600)"
    )
    program = f"""
import signal, subprocess, sys, time
signal.signal(10, lambda *_: print('heard'))
subprocess.Popen([sys.executable, '-c', {child!r}])
time.sleep(0.5)
print('up')
time.sleep(600)
"""
    peer = session.begin()
    peer.go(process("0", program), process("1", program.replace("heard", "too")))
    peer.until_output("0", "up")
    peer.until_output("1", "up")
    peer.say(type="signal", signal="USR1", keys=["0"])
    peer.until_output("0", "heard")
    time.sleep(0.5)
    peer.hear("heartbeat")
    assert "child" not in peer.output("0") and "too" not in peer.output("1")
