"""What programs print: all of it in the log, without secrets, and nothing that takes it slowly
makes a program wait. Where programs stand when they hang."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from tests.launch.fake_supervisor import SECRET, Session, process, wait_until
from tests.programs import put_program
from trainkit.base.files import rotated_log
from trainkit.base.redact import RedactedStream, Redactor
from trainkit.cli.run.summary import last_lines
from trainkit.launch.agent.output import LogWriter


@given(
    st.lists(st.text("abc", min_size=6, max_size=9), min_size=1, max_size=3),
    st.text("abc", max_size=60),
    st.lists(st.integers(0, 60)),
)
def test_however_it_is_cut_it_is_redacted_alike(
    secrets: list[str], text: str, cuts: list[int]
) -> None:
    def streamed(places: list[int]) -> bytes:
        stream = RedactedStream(Redactor(secrets))
        pieces = [
            text[a:b].encode() for a, b in zip([0, *places], [*places, len(text)], strict=True)
        ]
        return b"".join(map(stream.feed, pieces)) + stream.end()

    whole = streamed([])
    assert not any(secret.encode() in whole for secret in secrets)
    assert not any(
        secret.encode() in streamed(sorted(min(cut, len(text)) for cut in cuts))
        for secret in secrets
    )
    if len(secrets) == 1:
        assert (
            whole
            == Redactor(secrets).bytes(text.encode())
            == streamed(sorted(min(cut, len(text)) for cut in cuts))
        )


def test_the_log_has_everything_in_order(session: Session, tmp_path: Path) -> None:
    log = tmp_path / "logs" / "0.log"
    program = (
        f"""
import os, sys, time
log = {str(log)!r}
"""
        + """
def until(end):  # what is written to two pipes has no order unless one waits for the other
    while not os.path.exists(log) or not open(log, "rb").read().endswith(end):
        time.sleep(0.01)
out = open(1, "wb", buffering=0)
key = os.environ["KEY"].encode()
out.write(b"begin " + key[:5]); until(b"begin "); out.write(key[5:] + b" end\\n")
until(b"end\\n")
os.write(2, b"warning\\n"); until(b"warning\\n")
for part in (b"progress 1", b"\\rprogress 2", b"\\xff\\xe6\\x97"): out.write(part); until(part)
out.write(b"\\xa5\\n"); until(b"\\xa5\\n")
os.write(2, b"last words")
"""
    )
    peer = session.begin()
    peer.go(process("0", program, log=str(log)), secret_names=("KEY",))
    peer.hear("ended", "0")
    expected = b"begin *** end\nwarning\nprogress 1\rprogress 2\xff\xe6\x97\xa5\nlast words"
    assert log.read_bytes() == expected
    assert (
        peer.output("0").encode("utf-8", "surrogateescape") == expected
        and peer.output("0", "err") == "warning\nlast words"
    )


def test_a_line_is_not_held_back_for_its_end(session: Session) -> None:
    """A progress bar, a prompt."""
    peer = session.begin()
    peer.go(process("0", "import sys, time; sys.stdout.write('progress 1'); time.sleep(10_000)"))
    peer.until_output("0", "progress 1")


def written_or_missed(log: Path) -> int:
    """Bytes of a program's output that its log has, or says that it misses."""
    text = log.read_bytes()
    notes = list(re.finditer(rb"\[trainkit: ([\d,]+) bytes of output are missing here: .*\n", text))
    missed = sum(int(note[1].replace(b",", b"")) for note in notes)
    return len(text) - sum(len(note[0]) for note in notes) + missed


def test_a_supervisor_that_does_not_read_holds_nobody_up(session: Session, tmp_path: Path) -> None:
    """Megabytes are dropped from its view, counted, and stand in the log; the word of the end
    comes all the same."""
    log, done, size = tmp_path / "0.log", tmp_path / "done", 48 * 2**20
    program = (
        f"import sys; line = 'x' * 1023 + chr(10)\nfor _ in range({size // 1024}):"
        f" sys.stdout.write(line)\nsys.stdout.flush(); open({str(done)!r}, 'w')"
    )
    peer = session.begin()
    peer.go(process("0", program, log=str(log)), process("1", "import time; time.sleep(10_000)"))
    assert wait_until(done.exists)
    peer.hear("ended", "0")
    frames = [f for f in peer.heard if f["type"] == "output"]
    assert (
        sum(len(f["text"]) + f["dropped"] for f in frames) == size
        and max(len(f["text"]) for f in frames) <= 2**16
    )
    # a thread writes the log: it may be behind the word of the end, or have had to leave out some
    assert wait_until(lambda: written_or_missed(log) == size)
    assert peer.hear("heartbeat")


def test_a_supervisor_may_want_no_output(session: Session, tmp_path: Path) -> None:
    peer = session.begin()
    peer.go(
        process("0", "print('words')", log=str(tmp_path / "0.log"), output=False),
        process("1", "print('words')", log="/dev/full", output=False),
    )
    assert {tuple(peer.hear("ended")["last"]) for _ in range(2)} == {("words",)}
    assert (
        (tmp_path / "0.log").read_text() == "words\n"
        and peer.output("0") == ""
        and "No space left" in peer.output("1")
        and "words" not in peer.output("1")
    )


def test_what_must_be_whole_waits_instead(session: Session, tmp_path: Path) -> None:
    lines, done = 60_000, tmp_path / "done"
    program = (
        f"import json\nfor i in range({lines}): print(json.dumps({{'progress': i, 'x': 'y' *"
        f" 200}}))\nopen({str(done)!r}, 'w')\nprint('half', end='')"
    )
    peer = session.begin()
    peer.go(process("0", program, whole=True))
    time.sleep(3.0)  # we read nothing for less than the lease
    assert not done.exists()
    peer.hear("ended", "0")
    frames = [f for f in peer.heard if f["type"] == "output"]
    assert all(f["dropped"] == 0 and f["text"].endswith("\n") for f in frames[:-1])
    assert len("".join(f["text"] for f in frames).splitlines()) == lines + 1 and done.exists()


def test_a_full_disk_under_a_log_is_said_once(session: Session, tmp_path: Path) -> None:
    log = tmp_path / "full.log"
    log.symlink_to("/dev/full")
    program = "import time\nfor i in range(20): print('line', i); time.sleep(0.05)"
    peer = session.begin()
    peer.go(process("0", program, log=str(log)))
    assert peer.hear("ended", "0")["code"] == 0
    said = peer.output("0")
    assert (
        said.count("No space left") == 1
        and str(log) in said
        and all(f"line {i}\n" in said for i in range(20))
    )


def test_what_a_log_misses_is_said_in_it(tmp_path: Path) -> None:
    writer, log = LogWriter(), tmp_path / "logs" / "0.log"
    log.parent.write_text("in the way")
    writer.write(log, b"lost")
    assert wait_until(lambda: writer.idle(log)) and writer.troubles.popleft() == (
        log,
        "File exists",
    )
    log.parent.unlink()
    writer.write(log, b"kept\n")
    assert wait_until(lambda: writer.idle(log)) and not writer.troubles
    assert (
        log.read_text()
        == "[trainkit: 4 bytes of output are missing here: this log could not be written]\nkept\n"
    )


def test_a_log_on_a_file_system_that_hangs(session: Session, tmp_path: Path) -> None:
    """A pipe that nobody reads: opening it for writing waits for ever. The agent goes on, and
    other logs once it moves again."""
    hanging = tmp_path / "hanging.log"
    os.mkfifo(hanging)
    peer = session.begin()
    peer.go(
        process("0", "print('x' * 2**20)", log=str(hanging)),
        process("1", "print('y')", log=str(tmp_path / "1.log")),
    )
    assert {peer.hear("ended")["code"] for _ in range(2)} == {0}
    assert peer.hear("heartbeat")
    reader = subprocess.Popen(["cat", str(hanging)], stdout=subprocess.DEVNULL)
    try:
        assert wait_until(
            lambda: (tmp_path / "1.log").exists() and (tmp_path / "1.log").read_text() == "y\n"
        )
    finally:
        reader.kill()
        reader.wait()


def test_secrets_are_kept_out_of_all_that_is_said(session: Session, tmp_path: Path) -> None:
    program = (
        "import os, sys; print(os.environ['KEY']); print('e', os.environ['KEY'], file=sys.stderr);"
        " sys.exit('bad key ' + os.environ['KEY'])"
    )
    peer = session.begin()
    peer.go(
        process("0", program, log=str(tmp_path / "0.log")),
        process("1", "", cwd=f"/{SECRET}"),
        secret_names=("KEY",),
    )
    peer.hear("start_failed", "1")
    end = peer.hear("ended", "0")
    assert (
        end["last"]
        and SECRET not in repr(peer.heard) + (tmp_path / "0.log").read_text() + session.words()
        and repr(peer.heard).count("***") >= 4
    )


def test_stacks(session: Session) -> None:
    """Of one that answers, one that cannot (it does not catch the signal, and lives), one that
    is stopped; py-spy where it is."""
    answers = (
        "import faulthandler, signal, time; faulthandler.register(signal.SIGUSR2)\ndef"
        " where_it_hangs():\n    print('up'); time.sleep(10_000)\nwhere_it_hangs()"
    )
    stopped = answers.replace(
        "time.sleep(10_000)", "import os; os.kill(os.getpid(), signal.SIGSTOP)"
    )
    peer = session.begin()
    peer.go(
        process("0", answers),
        process("1", "import time; print('up'); time.sleep(10_000)"),
        process("2", stopped),
    )
    for key in "012":
        peer.until_output(key, "up")
    assert wait_until(
        lambda: any(") T" in Path(f"/proc/{p.pid}/stat").read_text() for p in session.left())
    )
    peer.say(type="stacks", py_spy=False)
    told = peer.hear("stacks")
    assert set(told["silent"]) == {"1", "2"} and "where_it_hangs" in told["stacks"]["0"]
    assert told["states"] == {"0": "S", "1": "S", "2": "T"}
    peer.say(type="stacks", py_spy=True)
    assert "where_it_hangs" in peer.hear("stacks")["stacks"]["0"]
    assert not [f for f in peer.heard if f["type"] == "ended"]
    peer.say(type="signal", signal="CONT", keys=None)


@pytest.mark.slow
def test_py_spy_has_a_limit(tmp_path: Path) -> None:
    """One that answers, one that hangs, both by a program of that name in PATH."""
    tools = tmp_path / "bin"
    put_program(
        tools,
        "py-spy",
        f"#!{sys.executable}\nimport sys, time\nprint('asked for', *sys.argv[1:],"
        " flush=True)\ntime.sleep(10_000)\n",
    )
    session = Session(tmp_path / "s", lease=60)
    try:
        peer = session.begin(environment={**os.environ, "PATH": f"{tools}:{os.environ['PATH']}"})
        peer.go(process("0", "import time; time.sleep(10_000)"))
        pid = peer.hear("started")["pid"]
        peer.say(type="stacks", py_spy=True)
        told = peer.hear("stacks")
        assert f"--pid {pid}" in told["stacks"]["0"] and told["silent"] == []
        assert not [p for p in session.left() if "py-spy" in p.argv0]
    finally:
        session.close()


def test_the_native_trainers_rank_answers() -> None:
    """Before torch is imported, and while its threads wait for signals."""
    code = (
        "import sys, time, threading; from trainkit.train.main import listen;"
        " listen(threading.Event()); print('up', flush=True); time.sleep(10_000)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as rank:
        assert rank.stdout and rank.stderr and rank.stdout.readline() == b"up\n"
        rank.send_signal(signal.SIGUSR2)
        assert b"most recent call first" in rank.stderr.readline()
        assert rank.poll() is None
        rank.kill()


def test_a_log_that_is_full_begins_anew(tmp_path: Path) -> None:
    """Twice the size is kept, the newest part always; the log says so, and who reads it reads on
    from the part before."""
    log, lines = tmp_path / "logs" / "0.log", [b"line %03d\n" % number for number in range(100)]
    writer = LogWriter(full=300)
    for line in lines:
        writer.write(log, line)
    writer.close(log)
    wait_until(lambda: writer.idle(log))
    parts = [part.read_bytes() for part in (rotated_log(log), log)]
    told = [
        line
        for part in parts
        for line in part.splitlines(keepends=True)
        if line.startswith(b"line")
    ]
    assert (
        told == lines[-len(told) :]
        and len(told) > 20
        and all(part.startswith(b"[trainkit: this log was full (300 bytes)") for part in parts)
    )
    assert len(list(log.parent.iterdir())) == 2
    assert last_lines(log, 25)[-1] == "line 099" and "line 080" in last_lines(log, 25), (
        "across both parts"
    )


def test_a_log_that_cannot_be_put_aside_goes_on(tmp_path: Path) -> None:
    log = tmp_path / "0.log"
    rotated_log(log).mkdir()
    writer = LogWriter(full=20)
    for number in range(9):
        writer.write(log, b"line %03d\n" % number)
    writer.close(log)
    wait_until(lambda: writer.idle(log))
    assert (
        log.read_bytes() == b"".join(b"line %03d\n" % number for number in range(9))
        and not writer.troubles
    )
