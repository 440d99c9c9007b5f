"""A real browser without a screen: what a page asks for, what it complains of, how it looks.

One process shows all pages, told over a pipe (Chrome DevTools Protocol, --remote-debugging-pipe:
JSON with a NUL behind it, commands on descriptor 3, answers on 4).
"""

from __future__ import annotations

import base64
import json
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

CHROMIUM = shutil.which("chromium")
needs_chromium = pytest.mark.skipif(
    CHROMIUM is None, reason="chromium is not installed (Debian's package chromium)"
)
HEIGHT = 2000
# where the browser keeps what it writes beside its profile: crash reports, caches, sockets
HOMES = ("TMPDIR", "XDG_CONFIG_HOME", "XDG_CACHE_HOME", "XDG_DATA_HOME")
# every text that is drawn: its words, its size in pixels, its box, whether it is part of a drawing
TEXTS = """[...document.querySelectorAll('svg text, p, td, th, h1, h2, h3, summary, a, b')]
  .filter(e => e.textContent.trim() && e.getClientRects().length)
  .map(e => { const b = e.getBoundingClientRect();
    return {words: e.textContent.trim(), size: parseFloat(getComputedStyle(e).fontSize),
            left: b.left, right: b.right, top: b.top, bottom: b.bottom,
            drawn: !!e.closest('svg'), picture: [...document.querySelectorAll('svg')].indexOf(
              e.closest('svg'))}; })"""


@dataclass(frozen=True)
class DrawnText:
    """A text as the browser shows it, in pixels. `picture`: which drawing it is part of; -1: of
    none."""

    words: str
    size: float
    left: float
    right: float
    top: float
    bottom: float
    drawn: bool
    picture: int

    def overlaps(self, other: DrawnText) -> bool:
        """Whether one covers more than a hair's breadth of the other."""
        wide = min(self.right, other.right) - max(self.left, other.left)
        high = min(self.bottom, other.bottom) - max(self.top, other.top)
        return wide > 1 and high > 3


@dataclass(frozen=True)
class Visit:
    """What a browser did.

    Args:
        dom: the page as it stood after its scripts.
        console: what it complained of, and what the page printed.
        asked: URLs that were asked for besides the page's own.
        width: of all of it, in pixels: more than the window's where it has to be moved sideways.
        texts: all that can be read.
    """

    dom: str
    console: list[str]
    asked: list[str]
    width: int
    texts: list[DrawnText]


class Browser:
    """A browser; `close` ends it."""

    def __init__(self) -> None:
        self.folder = tempfile.mkdtemp(prefix="browser-")
        here, to_there = os.pipe()
        from_there, there = os.pipe()
        argv = [
            str(CHROMIUM),
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-background-networking",
            "--disable-component-update",
            "--disable-sync",
            "--no-first-run",
            "--hide-scrollbars",
            "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1, EXCLUDE localhost",
            f"--user-data-dir={self.folder}",
            "--remote-debugging-pipe",
        ]
        # the shell gives the two descriptors the numbers that the browser wants
        line = f'exec "$@" 3<&{here} 4>&{there}'
        self.process = subprocess.Popen(
            ["bash", "-c", line, "bash", *argv],
            pass_fds=(here, there),
            env={**os.environ, **dict.fromkeys(HOMES, self.folder)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        os.close(here)
        os.close(there)
        self._commands = os.fdopen(to_there, "wb", buffering=0)
        self._answers = os.fdopen(from_there, "rb", buffering=0)
        self._rest = b""
        self._number = 0
        self._events: list[dict[str, Any]] = []

    def close(self) -> None:
        """End it and all that it started."""
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self._commands.close()
        self._answers.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    def visit(
        self, url: str, width: int = 1280, picture: Path | None = None, height: int = HEIGHT
    ) -> Visit:
        """Open an address in a window of its own.

        Args:
            url: the address.
            width: of the window.
            picture: the .png file to write what is seen into.
            height: of the window.
        """
        target = self._call("Target.createTarget", {"url": "about:blank"})["targetId"]
        attached = self._call("Target.attachToTarget", {"targetId": target, "flatten": True})
        session = attached["sessionId"]
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self._call("Emulation.setDeviceMetricsOverride", size, session)
        for domain in ("Page", "Network", "Runtime", "Log"):
            self._call(f"{domain}.enable", {}, session)
        self._events.clear()
        self._call("Page.navigate", {"url": url}, session)
        self._until(lambda event: event["method"] == "Page.loadEventFired")
        dom = str(self._value("document.documentElement.outerHTML", session))
        found = self._value(
            f"JSON.stringify([document.documentElement.scrollWidth, {TEXTS}])", session
        )
        whole, texts = json.loads(str(found))
        if picture is not None:
            shot = self._call("Page.captureScreenshot", {"format": "png"}, session)
            picture.write_bytes(base64.b64decode(shot["data"]))
        events = list(self._events)
        self._call("Target.closeTarget", {"targetId": target})
        return Visit(
            dom, _console(events), _asked(events, url), whole, [DrawnText(**each) for each in texts]
        )

    def _value(self, expression: str, session: str) -> object:
        answer = self._call(
            "Runtime.evaluate", {"expression": expression, "returnByValue": True}, session
        )
        return answer["result"]["value"]

    def _call(self, method: str, params: Mapping[str, object], session: str = "") -> dict[str, Any]:
        self._number += 1
        number = self._number
        words: dict[str, object] = {"id": number, "method": method, "params": params}
        if session:
            words["sessionId"] = session
        self._commands.write(json.dumps(words).encode() + b"\0")
        answer = self._until(lambda message: message.get("id") == number)
        assert "error" not in answer, answer
        result: dict[str, Any] = answer["result"]
        return result

    def _until(self, wanted: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """The first message that is wanted, from now or of those that came since the last
        `clear`; events are kept."""
        while True:
            while b"\0" not in self._rest:
                data = self._answers.read(65536)
                assert data, "the browser has ended"
                self._rest += data
            line, _, self._rest = self._rest.partition(b"\0")
            message = json.loads(line)
            if "method" in message:
                self._events.append(message)
            if ("method" in message or "id" in message) and _safe(wanted, message):
                found: dict[str, Any] = message
                return found


def _safe(wanted: Callable[[dict[str, Any]], bool], message: dict[str, Any]) -> bool:
    return wanted({"method": "", **message})


def _console(events: list[dict[str, Any]]) -> list[str]:
    found = []
    for event in events:
        params = event["params"]
        if event["method"] == "Runtime.consoleAPICalled":
            found.append(" ".join(str(each.get("value")) for each in params["args"]))
        elif event["method"] == "Runtime.exceptionThrown":
            found.append(str(params["exceptionDetails"]["text"]))
        elif event["method"] == "Log.entryAdded":
            found.append(str(params["entry"]["text"]))
    return found


def _asked(events: list[dict[str, Any]], url: str) -> list[str]:
    urls = {
        str(event["params"]["request"]["url"])
        for event in events
        if event["method"] == "Network.requestWillBeSent"
    }
    return sorted(urls - {url})
