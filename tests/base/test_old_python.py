"""What stands for parts of the standard library that Python 3.8 does not have, against those."""

from __future__ import annotations

import errno
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from trainkit.base import old_python, process_marks

SLEEP = [sys.executable, "-S", "-c", "import time; time.sleep(600)"]


@pytest.mark.parametrize("text", ["", "a", "ab", "aba", "ababa", "b"])
@pytest.mark.parametrize("part", ["", "a", "ab", "ba", "aba"])
def test_prefixes_and_suffixes(text: str, part: str) -> None:
    assert old_python.without_prefix(text, part) == text.removeprefix(part)
    assert old_python.without_suffix(text, part) == text.removesuffix(part)


@pytest.mark.parametrize("end", ["os._exit(0)", "os._exit(7)", "os.kill(os.getpid(), 9)"])
def test_exit_codes(end: str) -> None:
    child = subprocess.Popen([sys.executable, "-S", "-c", f"import os; {end}"])
    _, status = os.waitpid(child.pid, 0)
    child.returncode = 0  # taken
    assert old_python.exit_code_of(status) == os.waitstatus_to_exitcode(status)


def test_open_files_over_a_socket(tmp_path: Path) -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    paths = [tmp_path / name for name in ("a", "b")]
    files = [os.open(path, os.O_RDWR | os.O_CREAT) for path in paths]
    old_python.send_handles(ours, b"two", files)
    ours.send(b"none")
    data, received = old_python.receive_handles(theirs, 100, 250)
    assert data == b"two" and len(received) == 2 and not set(received) & set(files)
    for path, handle in zip(paths, received, strict=True):
        os.write(handle, path.name.encode())
        assert path.read_text() == path.name
    assert old_python.receive_handles(theirs, 100, 250) == (b"none", [])
    ours.close()
    assert old_python.receive_handles(theirs, 100, 250) == (b"", [])


def test_a_signal_to_that_very_process() -> None:
    child = subprocess.Popen(SLEEP)
    handle = old_python.open_process(child.pid)
    assert not os.get_inheritable(handle)
    old_python.signal_process(handle, signal.SIGTERM)
    assert child.wait() == -signal.SIGTERM
    with pytest.raises(ProcessLookupError):
        old_python.signal_process(handle, signal.SIGTERM)
    os.close(handle)
    with pytest.raises(OSError, match="Bad file descriptor"):
        old_python.signal_process(handle, signal.SIGTERM)


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.EPERM])
def test_a_kernel_or_a_filter_without_such_files(
    monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """Linux before 5.3, and old filters of container runtimes: by pid, after a look whose it is."""

    def refuse(pid: int) -> int:
        raise OSError(number, os.strerror(number))

    child = subprocess.Popen(SLEEP)
    described = process_marks.describe_process(child.pid)
    assert described is not None
    later = process_marks.MarkedProcess(child.pid, described.start_time + 1, "", "")
    monkeypatch.setattr(process_marks, "open_process", refuse)
    assert not process_marks.send_signal(later, signal.SIGKILL), "another of the same pid"
    assert process_marks.send_signal(described, signal.SIGKILL)
    assert child.wait() == -signal.SIGKILL
    assert not process_marks.send_signal(described, signal.SIGKILL)
