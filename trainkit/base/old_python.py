"""What Python 3.8 does not have: for all that runs inside an image that somebody else made, the
agent, its keeper and the program beside an engine's rank.

The same on every Python, so that whatever tests a newer one tests these too. Each names what of
the standard library it stands for.
"""

from __future__ import annotations

import array
import ctypes
import os
import socket
from collections.abc import Iterable
from functools import lru_cache
from typing import Any

# asm-generic/unistd.h; every architecture has the same numbers for system calls since Linux 5.1
_PIDFD_SEND_SIGNAL = 424
_PIDFD_OPEN = 434

NEEDED_PYTHON = (3, 11)  # by trainkit's own code, as pyproject.toml says; agents run on older ones


def without_prefix(text: str, prefix: str) -> str:
    """str.removeprefix (3.9)."""
    return text[len(prefix) :] if text.startswith(prefix) else text


def without_suffix(text: str, suffix: str) -> str:
    """str.removesuffix (3.9)."""
    return text[: -len(suffix)] if suffix and text.endswith(suffix) else text


def exit_code_of(status: int) -> int:
    """The exit code that wait(2) says, negative for a signal: os.waitstatus_to_exitcode (3.9)."""
    if os.WIFSIGNALED(status):
        return -os.WTERMSIG(status)
    return os.WEXITSTATUS(status)


def send_handles(line: socket.socket, data: bytes, handles: Iterable[int]) -> None:
    """Send bytes and open files over a socket of this machine: socket.send_fds (3.9)."""
    files = array.array("i", handles)
    line.sendmsg([data], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, files)])


def receive_handles(line: socket.socket, size: int, most: int) -> tuple[bytes, list[int]]:
    """One message and the open files that came with it: socket.recv_fds (3.9).

    Args:
        line: a socket of this machine.
        size: the most bytes of the message.
        most: open files.
    """
    files = array.array("i")
    data, extras, _, _ = line.recvmsg(size, socket.CMSG_LEN(most * files.itemsize))
    for level, kind, content in extras:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            files.frombytes(content[: len(content) - len(content) % files.itemsize])
    return data, list(files)


def open_process(pid: int) -> int:
    """An open file that means one process, never a later one of its pid: os.pidfd_open (3.9).
    Raises OSError as pidfd_open(2) does."""
    return _system_call(_PIDFD_OPEN, pid, 0)


def signal_process(handle: int, number: int) -> None:
    """Send a signal to the process behind an open file: signal.pidfd_send_signal (3.9). Raises
    OSError as pidfd_send_signal(2) does."""
    _system_call(_PIDFD_SEND_SIGNAL, handle, number, 0, 0)


@lru_cache(maxsize=None)
def _syscall() -> Any:
    """The C library's function, looked up once: what forks all the time is killed in a hurry."""
    call = ctypes.CDLL(None, use_errno=True).syscall
    call.restype = ctypes.c_long
    return call


def _system_call(number: int, *arguments: int) -> int:
    """syscall(2). Raises OSError."""
    result = int(_syscall()(*(ctypes.c_long(each) for each in (number, *arguments))))
    if result < 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))
    return result
