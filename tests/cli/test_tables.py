"""Tables in pipes and on narrow terminals: one record a line, every word whole."""

from __future__ import annotations

import fcntl
import io
import os
import pty
import struct
import subprocess
import sys
import termios
from pathlib import Path

import pytest
from rich.console import Console

from tests import forkserver
from tests.conftest import Project
from trainkit.cli.run.summary import facts_table
from trainkit.cli.tables import Listing
from trainkit.runs.folder import RunFolder

ROOT = Path(__file__).resolve().parents[2]


def printed(listing: Listing, *, terminal: bool, width: int = 80) -> list[str]:
    screen = io.StringIO()
    Console(
        file=screen, width=width, force_terminal=terminal, color_system=None, soft_wrap=True
    ).print(listing)
    return screen.getvalue().splitlines()


@pytest.fixture
def listing() -> Listing:
    listing = Listing("run", "state", "step", "what", right=["step"], drop=["state", "step"])
    listing.add_row(
        "20260101-000000-aaaa",
        "[green]running[/]",
        "7",
        "a text of several words, the last of which is quitealongone",
    )
    listing.add_row("b", "failed", "1,000", "")
    return listing


def test_no_terminal_no_wrapping(listing: Listing) -> None:
    assert printed(listing, terminal=False, width=20) == [
        "run                   state     step  what",
        (
            "20260101-000000-aaaa  running      7  a text of several words, the last of which is"
            " quitealongone"
        ),
        "b                     failed   1,000",
    ]


def test_a_narrow_terminal_has_fewer_columns_and_whole_words(listing: Listing) -> None:
    lines = printed(listing, terminal=True, width=60)
    assert lines == [
        "run                    step  what",
        "20260101-000000-aaaa      7  a text of several words, the",
        "                             last of which is quitealongone",
        "b                     1,000",
        "(a wider terminal, a pipe or --json also shows: state)",
    ]
    assert printed(listing, terminal=True, width=54)[0] == "run                   what"
    everything = " ".join(printed(listing, terminal=True, width=10))
    assert "20260101-000000-aaaa" in everything and "quitealongone" in everything
    assert printed(listing, terminal=True, width=100)[1:] == printed(listing, terminal=False)[1:]


def test_columns_that_are_none_are_refused() -> None:
    with pytest.raises(ValueError, match="no columns"):
        Listing("a", drop=["b"])
    with pytest.raises(ValueError, match="2 cells for 1 columns"):
        Listing("a").add_row("1", "2")


def test_the_jobs_of_this_checkout_in_a_pipe(project: Project) -> None:
    """What made 216 lines of one-word columns at 80 columns: a line a job."""
    env = project.environment(COLUMNS="80")
    argv = [sys.executable, "-P", "-m", "trainkit", "--search-root", str(ROOT), "jobs"]
    lines = forkserver.run(
        argv, cwd=ROOT, env=env, capture_output=True, text=True, check=True
    ).stdout.splitlines()
    names = forkserver.run(
        [*argv, "--json"], cwd=ROOT, env=env, capture_output=True, text=True, check=True
    ).stdout.count('"engine":')
    assert len(lines) == names + 1 and all(not line.startswith(" ") for line in lines)
    planned = forkserver.run(
        [*argv[:-1], "plan", "gpt-neox-20b-lambda"],
        cwd=ROOT,
        env=env,
        capture_output=True,
        text=True,
        check=False,
    ).stdout
    assert "…" not in planned


def test_the_jobs_of_this_checkout_on_a_terminal_of_80_columns(project: Project) -> None:
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 80, 0, 0))
    env = {
        k: v for k, v in project.environment(TERM="xterm").items() if k not in ("COLUMNS", "LINES")
    }
    argv = [sys.executable, "-P", "-m", "trainkit", "--search-root", str(ROOT), "jobs"]
    with forkserver.Popen(
        argv, cwd=ROOT, env=env, stdin=theirs, stdout=theirs, stderr=subprocess.PIPE
    ) as child:
        os.close(theirs)
        parts = []
        while True:
            try:
                part = os.read(ours, 65536)
            except OSError:  # the other side is closed
                break
            if not part:
                break
            parts.append(part)
    os.close(ours)
    text = b"".join(parts).decode()
    assert child.returncode == 0
    plain = [
        line
        for line in (
            text.replace("\x1b[1m", "").replace("\x1b[2m", "").replace("\x1b[0m", "").splitlines()
        )
        if line
    ]
    assert (
        max(map(len, plain)) <= 80
        and "gpt-neox-20b-lambda" in text
        and "also shows: engine" in plain[-1]
    )
    described = " ".join(" ".join(plain).split())
    assert "random tokens" in described


def test_a_loss_that_was_measured_once_has_no_after(tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "runs" / "demo" / "20260101-000000-aaaa")
    run.path.mkdir(parents=True)
    row = '{"step": %d, "consumed_samples": 0, "lm_loss": %s, "eval": "valid"}\n'
    run.metrics.write_text(row % (0, "8.4827"))
    assert printed(facts_table(run), terminal=False)[0] == "validation loss  8.4827 at step 0"
    run.metrics.write_text(row % (0, "8.4827") + row % (85, "5.4720"))
    assert (
        printed(facts_table(run), terminal=False)[0]
        == "validation loss  8.4827 before, 5.4720 after"
    )
