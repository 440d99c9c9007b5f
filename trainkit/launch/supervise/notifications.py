"""Tells people what becomes of a run, by a command or a webhook. Nothing here can hold up or fail
the run: each message has a thread of its own and a time limit, and how it went stands in
launch/notifications.jsonl. Secrets reach neither that file nor a command line. That the supervisor
itself was killed is reported by a small process that outlives it (notify_survivor.py).
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Mapping
from http.client import HTTPMessage
from pathlib import Path
from typing import IO

from trainkit.base.documents import utc_now
from trainkit.base.lazy_dataclasses import asdict, dataclass
from trainkit.base.redact import Redactor
from trainkit.jobs.notify import NotifySettings, Occasion
from trainkit.runs.events import (
    AllRanksStarted,
    AttemptEnded,
    Event,
    HangDetected,
    newest_end,
)
from trainkit.runs.folder import RunFolder
from trainkit.runs.record import last_step

LOG = "notifications.jsonl"
MOST_CHARACTERS = 1500  # of a text: chats refuse long ones
ROOM_SECONDS = 2.0  # beyond the time limit, for the end of a message that is given up


@dataclass(frozen=True)
class Notification:
    """What people are sent.

    Args:
        occasion: why.
        run: the run's id.
        job: its job.
        attempt: in which attempt.
        text: in words.
    """

    occasion: Occasion
    run: str
    job: str
    attempt: int
    text: str


def notification_of(run: RunFolder, attempt: int, event: Event) -> Notification | None:
    """What an event says to people; None for most. All texts are here.

    Args:
        run: the run.
        attempt: in which it happened.
        event: what happened.
    """
    found = _words(attempt, event)
    return None if found is None else _notification(run, attempt, *found)


def _notification(run: RunFolder, attempt: int, occasion: Occasion, words: str) -> Notification:
    where = os.uname().nodename
    text = f"{run.job_name}, run {run.id}: {words} (supervisor on {where}, folder {run.path})"
    return Notification(occasion, run.id, run.job_name, attempt, text[:MOST_CHARACTERS])


def _words(attempt: int, event: Event) -> tuple[Occasion, str] | None:
    match event:
        case HangDetected():
            missing = ", ".join(map(str, event.missing)) or "none"
            return "stall", f"no rank moves any more in attempt {attempt}; missing ranks: {missing}"
        case AllRanksStarted() if attempt > 1:
            return "recovery", f"all ranks run again, as attempt {attempt}"
        case AttemptEnded(budget=None, failure_class="success"):
            return "end", f"finished at step {event.step}"
        case AttemptEnded(budget=None, failure_class=("cancelled" | "preempted") as how):
            return "end", f"{how} at step {event.step}: {_cause(event)}"
        case AttemptEnded(budget=None):
            return "failure", (
                f"failed ({event.failure_class}, exit {event.exit}) at step {event.step}, attempt"
                f" {attempt}: {_cause(event)}"
            )
    return None


def _cause(event: AttemptEnded) -> str:
    message = str((event.root_cause or {}).get("message") or "no cause is known")
    return message.partition("\n")[0]


class Notifier:
    """Sends messages about one run.

    Args:
        run: the run.
        settings: to whom.
        secrets: values by the names in `settings`.
    """

    def __init__(
        self, run: RunFolder, settings: NotifySettings, secrets: Mapping[str, str]
    ) -> None:
        self.run = run
        self.settings = settings
        self.secrets = {name: secrets.get(name, "") for name in settings.secret_names}
        self.redactor = Redactor(secrets.values())
        self._threads: list[threading.Thread] = []
        self._pen = threading.Lock()
        self._survivor: subprocess.Popen[bytes] | None = None

    def open(self) -> None:
        """Have somebody tell that this process was killed, should it be: `close` says that it was
        not."""
        if self._survivor is not None or not self._wanted("failure"):
            return
        settings = self.settings.model_dump(mode="json")
        given = {"settings": settings, "secrets": self.secrets, "pid": os.getpid()}
        program = Path(__file__).with_name("notify_survivor.py")
        with contextlib.suppress(OSError):  # no process is to be had: the run goes on without
            self._survivor = subprocess.Popen(
                [sys.executable, "-I", str(program), str(self.run.path)],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                cwd="/",
                start_new_session=True,
            )
            assert self._survivor.stdin is not None
            self._survivor.stdin.write(json.dumps(given).encode() + b"\n")
            self._survivor.stdin.flush()

    def on_supervisor_lost(self, pid: int) -> None:
        """Begin to tell that the supervisor was killed; where it had written how the run ended,
        that, unless it was sent."""
        attempts = self.run.attempts()
        number = attempts[-1].number if attempts else 0
        ended = newest_end(self.run)
        if ended is None or ended.budget is not None:
            words = (
                f"its supervisor (pid {pid}) was killed at step {last_step(self.run)}, attempt"
                f" {number}; no rank goes on without it: invoke resume {self.run.id}"
            )
            self._begin(_notification(self.run, number, "failure", words))
            return
        found = notification_of(self.run, number, ended)
        if found is not None and not self._was_told(found):
            self._begin(found)

    def _was_told(self, what: Notification) -> bool:
        path = self.run.path / "launch" / LOG
        with contextlib.suppress(OSError, ValueError):  # a torn line: sent twice is better
            for line in path.read_text(encoding="utf-8").splitlines():
                value = json.loads(line)
                if (value["occasion"], value["attempt"]) == (what.occasion, what.attempt):
                    return True
        return False

    def _wanted(self, occasion: Occasion) -> bool:
        return self.settings.active and occasion in self.settings.occasions

    def on_event(self, attempt: int, event: Event) -> None:
        """Begin to tell what an event says, where somebody wants to know. Returns at once."""
        if not self.settings.active:
            return
        with contextlib.suppress(Exception):  # no thread is to be had: the run goes on without
            found = notification_of(self.run, attempt, event)
            if found is not None:
                self._begin(found)

    def _begin(self, what: Notification) -> None:
        if self._wanted(what.occasion):
            thread = threading.Thread(target=self._send, args=(what,), daemon=True)
            thread.start()
            self._threads.append(thread)

    def close(self) -> None:
        """Give messages that are under way the rest of their time, and no more."""
        until = time.monotonic() + self.settings.timeout + ROOM_SECONDS
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))
        if self._survivor is not None:
            with contextlib.suppress(OSError, subprocess.TimeoutExpired):
                self._survivor.communicate(b"over\n", self.settings.timeout)
            self._survivor = None

    def _send(self, what: Notification) -> None:
        clean = Notification(**{**asdict(what), "text": self.redactor.text(what.text)})
        if self.settings.command:
            self._note(clean, "command", self._run_command(clean))
        url = self.settings.webhook or self.secrets.get(self.settings.webhook_variable or "")
        if url:
            # one that gives a byte now and then outlasts any time limit of a socket
            answer: list[str] = []
            asking = threading.Thread(
                target=lambda: answer.append(self._post(clean, url)), daemon=True
            )
            asking.start()
            asking.join(self.settings.timeout)
            said = f"no answer within {self.settings.timeout:g} s"
            self._note(clean, "webhook", answer[0] if answer else said)

    def _run_command(self, what: Notification) -> str:
        """What went wrong; "" for nothing."""
        about = {f"TRAINKIT_{key.upper()}": str(value) for key, value in asdict(what).items()}
        try:
            process = subprocess.Popen(
                self.settings.command,
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                env={**os.environ, **self.secrets, **about},
                cwd="/",
                start_new_session=True,
            )
        except OSError as error:
            return f"{self.settings.command[0]}: {error.strerror}"
        try:
            _, err = process.communicate(f"{what.text}\n".encode(), self.settings.timeout)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            return f"ended after {self.settings.timeout:g} s"
        if process.returncode == 0:
            return ""
        last = err.decode(errors="replace").strip().splitlines()[-1:]
        return f"exit code {process.returncode}" + (f": {last[0]}" if last else "")

    def _post(self, what: Notification, url: str) -> str:
        """What went wrong; "" for nothing. An answer is not followed elsewhere: a token is meant
        for one host."""
        headers = {"Content-Type": "application/json"}
        if self.settings.token_variable:
            headers["Authorization"] = f"Bearer {self.secrets[self.settings.token_variable]}"
        try:
            request = urllib.request.Request(
                url, json.dumps(asdict(what)).encode(), headers, method="POST"
            )
            opener = urllib.request.build_opener(_NoRedirect)
            with opener.open(request, timeout=self.settings.timeout):
                return ""
        except Exception as error:  # whatever a URL or a server is: it is only a message
            return f"{type(error).__name__}: {error}"

    def _note(self, what: Notification, by: str, error: str) -> None:
        """Write down how it went."""
        line = {"time": utc_now(), **asdict(what), "by": by, "error": error}
        text = self.redactor.text(json.dumps(line)) + "\n"
        with contextlib.suppress(OSError), self._pen:
            path = self.run.path / "launch" / LOG
            with open(path, "a", encoding="utf-8") as file:
                file.write(text)


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    def redirect_request(
        self,
        req: urllib.request.Request,
        fp: IO[bytes],
        code: int,
        msg: str,
        headers: HTTPMessage,
        newurl: str,
    ) -> None:
        return None
