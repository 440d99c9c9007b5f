"""What people are told of a run, and that nobody who is told can hold it up or learn a secret."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

import pytest

from trainkit.jobs.notify import NotifySettings
from trainkit.launch.supervise.notifications import LOG, Notifier, notification_of
from trainkit.runs.events import AllRanksStarted, AttemptEnded, Event, HangDetected
from trainkit.runs.folder import RunFolder

SECRET = "hooks-of-a-chat-4711"
FAILED = AttemptEnded(9, {"message": f"wrong {SECRET}"}, 7, (), (), "user")
FINISHED = AttemptEnded(0, None, 30, (), (), "success")


class Hook(BaseHTTPRequestHandler):
    """A chat's webhook: /ok takes, /hang never answers, /away sends elsewhere."""

    got: ClassVar[list[tuple[str, str, dict[str, object]]]] = []
    over: ClassVar[threading.Event] = threading.Event()

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.got.append((self.path, self.headers.get("Authorization", ""), body))
        if "hang" in self.path:
            self.over.wait(600)
        self.send_response(302 if "away" in self.path else 204)
        self.send_header("Location", "/elsewhere")
        self.end_headers()

    do_GET = do_POST

    def log_message(self, format: str, *args: object) -> None:
        """Nothing."""


@pytest.fixture
def server() -> Iterator[str]:
    Hook.got.clear()
    Hook.over.clear()
    with ThreadingHTTPServer(("127.0.0.1", 0), Hook) as found:
        thread = threading.Thread(target=found.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{found.server_port}"
        Hook.over.set()
        found.shutdown()


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    found = RunFolder(tmp_path / "runs" / "job" / "id")
    (found.path / "launch").mkdir(parents=True)
    return found


def tell(run: RunFolder, secrets: dict[str, str], *events: Event, **keys: object) -> list[str]:
    """Tell of events; the errors that were written down."""
    notifier = Notifier(run, NotifySettings.model_validate(keys), secrets)
    for event in events:
        notifier.on_event(2, event)
    notifier.close()
    path = run.path / "launch" / LOG
    text = path.read_text() if path.exists() else ""
    assert SECRET not in text
    return [json.loads(line)["error"] for line in text.splitlines()]


def test_what_events_say(run: RunFolder) -> None:
    said = {
        found.occasion: found.text
        for event in (HangDetected((3, 4)), AllRanksStarted(), FAILED, FINISHED)
        if (found := notification_of(run, 2, event)) is not None
    }
    assert list(said) == ["stall", "recovery", "failure", "end"]
    assert "missing ranks: 3, 4" in said["stall"] and "attempt 2" in said["recovery"]
    assert "failed (user, exit 9) at step 7" in said["failure"] and "step 30" in said["end"]
    assert notification_of(run, 1, AllRanksStarted()) is None, "a beginning is not a recovery"
    again = AttemptEnded(10, None, 3, (), (), "infra", budget="infra")
    assert notification_of(run, 1, again) is None, "it goes on by itself"


def test_a_webhook_gets_the_text_and_its_token(run: RunFolder, server: str) -> None:
    secrets = {"URL": f"{server}/ok/{SECRET}", "TOKEN": SECRET}
    keys = {"webhook_variable": "URL", "token_variable": "TOKEN", "occasions": ["failure"]}
    assert tell(run, secrets, FAILED, FINISHED, **keys) == [""]
    ((path, token, body),) = Hook.got
    assert path == f"/ok/{SECRET}" and token == f"Bearer {SECRET}"
    assert body["occasion"] == "failure" and "wrong ***" in str(body["text"])


def test_what_goes_wrong_is_written_down_and_no_more(run: RunFolder, server: str) -> None:
    """One that hangs, one that sends elsewhere, one that is not there, and no URL at all."""
    secrets = {"URL": f"{server}/hang/{SECRET}"}
    keys: dict[str, object] = {"webhook_variable": "URL", "timeout": 0.2}
    assert tell(run, secrets, FINISHED, **keys)[-1] in (
        "no answer within 0.2 s",
        "TimeoutError: timed out",
    )
    assert "302" in tell(run, {}, FINISHED, webhook=f"{server}/away")[-1]
    assert all(path != "/elsewhere" for path, _, _ in Hook.got)
    assert "refused" in tell(run, {}, FINISHED, webhook="http://127.0.0.1:9/x")[-1]
    assert "Error" in tell(run, {}, FINISHED, webhook="http://[/x")[-1]


def test_a_command_gets_the_text_on_its_input(run: RunFolder, tmp_path: Path) -> None:
    code = (
        "import os, sys; open(sys.argv[1], 'w').write(os.environ['TRAINKIT_OCCASION'] +"
        " os.environ['URL'] + sys.stdin.read())"
    )
    command = [sys.executable, "-I", "-S", "-c", code, str(tmp_path / "said")]
    secrets = {"URL": f"http://127.0.0.1:9/{SECRET}"}
    errors = tell(run, secrets, FINISHED, command=command, webhook_variable="URL")
    assert errors[0] == "" and (tmp_path / "said").read_text().startswith(
        f"end{secrets['URL']}job,"
    )
    hangs = [sys.executable, "-I", "-S", "-c", "import time; time.sleep(600)"]
    assert tell(run, {}, FINISHED, command=hangs, timeout=0.2)[-1] == "ended after 0.2 s"
    assert "No such file" in tell(run, {}, FINISHED, command=["/no/such"])[-1]
    fails = [sys.executable, "-I", "-S", "-c", f"raise SystemExit('no {SECRET}')"]
    assert tell(run, {"X": SECRET}, FINISHED, command=fails)[-1] == "exit code 1: no ***"
