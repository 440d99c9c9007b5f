"""People are told of a supervisor that was killed, once, and of no other."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

from tests.conftest import HANGS, Project, wait_for
from tests.launch.live_runs import rank_pids, slow_down
from trainkit.jobs.notify import NotifySettings
from trainkit.launch.supervise import notify_survivor
from trainkit.launch.supervise.notifications import LOG, Notifier
from trainkit.runs.events import AttemptEnded, EventLog
from trainkit.runs.folder import RunFolder

SECRET = "hooks-of-a-chat-4711"
WRITES = "import os, sys; open(sys.argv[1], 'a').write(os.environ['TRAINKIT_OCCASION'] + ' ' + \
sys.stdin.read())"


def test_of_a_real_run(project: Project) -> None:
    slow_down(project)
    told = project.path / "told"
    command = json.dumps([sys.executable, "-I", "-S", "-c", WRITES, str(told)])
    keys = f'command = {command}\nwebhook_variable = "HOOK"\ntimeout = 1.0\n'
    path = project.path / "jobs.toml"
    path.write_text(f"[notify]\n{keys}{path.read_text()}")
    hook = f"http://127.0.0.1:9/{SECRET}"
    project.invoke("train", "random", "--detach", HOOK=hook)
    rank_pids(project)
    run = project.runs()[0]
    supervisor = json.loads((run / "launch" / "supervisor.json").read_text())["identity"]["pid"]
    os.kill(supervisor, signal.SIGKILL)
    log = run / "launch" / LOG
    wait_for(lambda: log.exists() and len(log.read_text().splitlines()) == 2, "both", timeout=HANGS)
    (line,) = told.read_text().splitlines()
    assert line.startswith(f"failure random, run {run.name}: its supervisor (pid {supervisor}) was")
    assert f"invoke resume {run.name}" in line
    project.invoke("resume", "last", "--set", "training.train_iters=1", HOOK=hook)
    occasions = [line.split()[0] for line in told.read_text().splitlines()]
    assert occasions == ["failure", "recovery", "end"], "its end was not a killing"
    files = [path for path in run.rglob("*") if path.is_file()]
    assert all(SECRET.encode() not in path.read_bytes() for path in files)


def test_what_a_supervisor_had_written_is_told_once(tmp_path: Path) -> None:
    """It was killed after its last event: before the message went out, or after it."""
    run = RunFolder(tmp_path / "runs" / "job" / "id")
    (run.path / "launch").mkdir(parents=True)
    log = EventLog(run.attempt(1))
    log.write(AttemptEnded(9, {"message": "wrong"}, 7, (), (), "user"))
    log.close()
    told = tmp_path / "told"
    command = [sys.executable, "-I", "-S", "-c", WRITES, str(told)]
    settings = NotifySettings.model_validate({"command": command})
    for _ in range(2):
        notifier = Notifier(run, settings, {})
        notifier.on_supervisor_lost(5)
        notifier.close()
    (line,) = told.read_text().splitlines()
    assert "failed (user, exit 9) at step 7" in line


def test_nobody_is_told_where_it_says_that_it_is_over(tmp_path: Path) -> None:
    words = [sys.executable, "-I", str(notify_survivor.__file__), str(tmp_path)]
    given = {"settings": {"command": ["touch", str(tmp_path / "told")]}, "secrets": {}, "pid": 1}
    whole = json.dumps(given).encode() + b"\n"
    for text in (whole + b"over\n", b"", whole[:20]):
        subprocess.run(words, input=text, check=True)
        assert not (tmp_path / "told").exists()
