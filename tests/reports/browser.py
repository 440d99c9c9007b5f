"""A real browser without a screen: what a page asks for, what it complains of, how it looks."""

from __future__ import annotations

import functools
import json
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

CHROMIUM = shutil.which("chromium")
NOBODY = "not an origin"
needs_chromium = pytest.mark.skipif(
    CHROMIUM is None, reason="chromium is not installed (Debian's package chromium)"
)


@dataclass(frozen=True)
class Visit:
    """What a browser did.

    Args:
        dom: the page as it stood after its scripts.
        console: lines of its console.
        asked: URLs that the page asked for. (A browser asks its maker for things as well; it is
            let to nobody but this machine.)
    """

    dom: str
    console: list[str]
    asked: list[str]


@functools.cache
def visit(page: Path, folder: Path, width: int = 1280) -> Visit:
    """Open a file in a profile of its own. The net log says every URL that was asked for."""
    log = folder / f"net-{width}.json"
    argv = [
        str(CHROMIUM),
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-background-networking",
        "--disable-component-update",
        "--disable-sync",
        "--no-first-run",
        "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
        f"--user-data-dir={folder / 'profile'}",
        f"--window-size={width},2000",
        f"--log-net-log={log}",
        "--enable-logging=stderr",
        "--v=0",
        "--dump-dom",
        page.as_uri(),
    ]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=600, check=True)
    console = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    events = [each.get("params", {}) for each in json.loads(log.read_text())["events"]]
    # requests of the browser's own have no page as their initiator
    asked = {each["url"] for each in events if each.get("initiator", NOBODY) != NOBODY}
    return Visit(done.stdout, console, sorted(asked))
