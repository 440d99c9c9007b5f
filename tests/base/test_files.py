"""Files that are whole or absent, locks that say who holds them, processes that are who they
were."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from tests.conftest import alive, wait_for
from trainkit.base.files import (
    TEMPORARY,
    atomic_open,
    read_json,
    remove_leftovers,
    temporary_name,
    write_json,
)
from trainkit.base.locks import LockBusy, locked
from trainkit.base.process import (
    ProcessIdentity,
    identity,
    is_alive,
    is_running,
    start_child,
    stop_children,
)
from trainkit.data.indexed.dataset import IndexedWriter


def test_an_exception_leaves_the_old_content(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("old")
    with pytest.raises(RuntimeError), atomic_open(path) as file:
        file.write(b"new")
        raise RuntimeError
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]


def test_sigkill_while_writing_leaves_the_old_content(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("old")
    code = f"""
import os
from pathlib import Path
from trainkit.base.files import atomic_open
with atomic_open(Path({str(path)!r})) as file:
    file.write(b"new")
    file.flush()
    os.kill(os.getpid(), 9)
"""
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == -signal.SIGKILL
    assert path.read_text() == "old"
    assert [p for p in tmp_path.iterdir() if TEMPORARY in p.name]
    remove_leftovers(path)
    assert list(tmp_path.iterdir()) == [path]


def test_leftovers_of_others_stay(tmp_path: Path) -> None:
    mine, other = tmp_path / "shard[1]", tmp_path / "shard2"
    temporary_name(mine).write_text("")
    keep = temporary_name(other)
    keep.write_text("")
    remove_leftovers(mine)
    assert list(tmp_path.iterdir()) == [keep]


def test_json_keeps_bytes_that_are_no_utf8(tmp_path: Path) -> None:
    value = {"name": os.fsdecode(b"Jos\xe9"), "ü": "漢"}
    write_json(tmp_path / "x.json", value)
    assert read_json(tmp_path / "x.json") == value


def test_a_lock_names_its_holder_and_dies_with_it(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    code = f"""
import time
from pathlib import Path
from trainkit.base.locks import locked
with locked(Path({str(path)!r}), {{"run": "r"}}):
    print(1, flush=True)
    time.sleep(60)
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None and holder.stdout.readline()
        with pytest.raises(LockBusy) as busy, locked(path, {}, wait=False):
            pass
        assert busy.value.holder["run"] == "r" and busy.value.holder["pid"] == holder.pid
        holder.kill()
        holder.wait()
    with locked(path, {}, wait=False):
        pass


@pytest.mark.parametrize("kind", ["json", "tokens"])
def test_a_file_without_room_is_named(tmp_path: Path, kind: str) -> None:
    """The system names no file when a write fails."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8192, hard))
    try:
        with pytest.raises(OSError) as failed:
            if kind == "json":
                write_json(tmp_path / "full", "x" * 10**6)
            else:
                with IndexedWriter(tmp_path / "full", np.dtype("uint16")) as writer:
                    writer.add_document(np.zeros(10**6, "uint16"))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert str(failed.value.filename).startswith(str(tmp_path / "full"))
    assert not list(tmp_path.iterdir())


def test_a_process_is_not_a_later_one_of_its_pid() -> None:
    me = identity()
    assert is_alive(me)
    assert not is_alive(ProcessIdentity(me.host, me.pid, me.start_time + 1, me.boot_id))
    assert not is_alive(ProcessIdentity(me.host, me.pid, me.start_time, "another boot"))
    assert is_alive(ProcessIdentity("elsewhere", me.pid, me.start_time, me.boot_id)) is None


def test_stop_reaches_grandchildren_and_those_who_ignore_term(tmp_path: Path) -> None:
    program = "trap '' TERM; sleep 300 & echo $! > pid; wait"
    child = start_child(
        ["sh", "-c", program],
        env=dict(os.environ),
        cwd=tmp_path,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text().strip():
        time.sleep(0.01)
    assert is_running(child)
    assert stop_children([child], grace=0.3) == []
    grandchild = int((tmp_path / "pid").read_text())
    wait_for(lambda: not alive(grandchild), "its end")
