"""Slots of a host: all or none, refused by name, freed by the kernel, across users."""

from __future__ import annotations

import errno
import os
import shutil
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from trainkit.base.locks import LockBusy
from trainkit.base.slots import reserve_slots, slot_holders, slot_name, slot_path


def test_all_or_none_and_by_name(tmp_path: Path) -> None:
    held = reserve_slots(tmp_path, ["gpu1", "gpu0"], {"run": "first", "attempt": 2})
    assert held.cleared == [] and set(slot_holders(tmp_path)) == {"gpu0", "gpu1"}
    with pytest.raises(LockBusy) as busy:
        reserve_slots(tmp_path, ["cpu", "gpu1", "gpu2"], {"run": "second"})
    holder = busy.value.holder
    assert (slot_name(busy.value.path), holder["run"], holder["attempt"], holder["pid"]) == (
        "gpu1",
        "first",
        2,
        os.getpid(),
    )
    since = holder["since"]
    assert isinstance(since, float)
    assert abs(since - time.time()) < 60 and set(slot_holders(tmp_path)) == {
        "gpu0",
        "gpu1",
    }
    other = reserve_slots(tmp_path, ["cpu", "gpu2"], {"run": "second"})
    assert slot_holders(tmp_path)["gpu2"]["run"] == "second"
    held.release()
    other.release()
    assert slot_holders(tmp_path) == {} and reserve_slots(tmp_path, ["gpu0"], {}).cleared == []


def test_who_shares_takes_what_is_free_and_keeps_the_next_one_out(tmp_path: Path) -> None:
    first = reserve_slots(tmp_path, ["gpu1", "gpu2"], {"run": "first"})
    beside = reserve_slots(
        tmp_path, ["gpu0", "gpu1", "gpu2", "gpu3"], {"run": "beside"}, share=True
    )
    assert {slot: holder["run"] for slot, holder in slot_holders(tmp_path).items()} == {
        "gpu0": "beside",
        "gpu1": "first",
        "gpu2": "first",
        "gpu3": "beside",
    }
    first.release()
    with pytest.raises(LockBusy) as busy:
        reserve_slots(tmp_path, ["gpu0", "gpu1"], {"run": "third"})
    assert busy.value.holder["run"] == "beside"
    beside.release()
    assert slot_holders(tmp_path) == {}


def test_one_that_died_is_cleared_and_told(tmp_path: Path) -> None:
    program = (
        "import os, sys; from pathlib import Path; from trainkit.base.slots import reserve_slots;"
        " reserve_slots(Path(sys.argv[1]), ['cpu'], {'run': 'dead'}); os._exit(1)"
    )
    subprocess.run([sys.executable, "-c", program, str(tmp_path)], check=False)
    assert slot_holders(tmp_path) == {}
    held = reserve_slots(tmp_path, ["cpu"], {"run": "living"})
    assert [holder["run"] for holder in held.cleared] == ["dead"] and slot_holders(tmp_path)["cpu"][
        "run"
    ] == "living"
    held.release()


def test_a_copy_of_the_handles_holds_too(tmp_path: Path) -> None:
    held = reserve_slots(tmp_path, ["cpu"], {"run": "r"})
    copies = [os.dup(handle) for handle in held.handles]
    held.release()
    with pytest.raises(LockBusy):
        reserve_slots(tmp_path, ["cpu"], {})
    for copy in copies:
        os.close(copy)
    reserve_slots(tmp_path, ["cpu"], {}).release()


def test_looking_at_slots_refuses_nobody(tmp_path: Path) -> None:
    """`slot_holders` takes a lock for a moment to see whether it is held."""
    reserve_slots(tmp_path, ["cpu"], {}).release()
    done = threading.Event()

    def look() -> None:
        while not done.is_set():
            slot_holders(tmp_path)

    thread = threading.Thread(target=look)
    thread.start()
    try:
        for _ in range(100):
            reserve_slots(tmp_path, ["cpu"], {}).release()
    finally:
        done.set()
        thread.join()


@pytest.mark.parametrize("name", ["", "../x", "a/b", "a\0"])
def test_what_is_no_slot(tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match="not the name of a slot"):
        slot_path(tmp_path, name)


def test_no_file_of_another_kind_is_taken_for_one(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.write_text("words")
    slot_path(tmp_path, "gpu0").symlink_to(precious)
    with pytest.raises(OSError, match="symbolic"):
        reserve_slots(tmp_path, ["cpu", "gpu0"], {})
    slot_path(tmp_path, "gpu1").mkdir()
    with pytest.raises(
        OSError,
        match=(
            r"not a lock of trainkit's that may be written .*: remove it, or set"
            r" clusters\.NAME\.node_folder"
        ),
    ):
        reserve_slots(tmp_path, ["gpu1"], {})
    (tmp_path / f"trainkit-gpu2.holder-{os.geteuid()}").write_text("no json")
    held = reserve_slots(tmp_path, ["gpu2"], {})
    assert (
        held.cleared == []
        and set(slot_holders(tmp_path)) == {"gpu2"}
        and precious.read_text() == "words"
    )
    held.release()


def test_a_pipe_in_the_folder_holds_up_nobody(tmp_path: Path) -> None:
    os.mkfifo(slot_path(tmp_path, "a"))
    held = reserve_slots(tmp_path, ["cpu"], {"run": "r"})
    assert set(slot_holders(tmp_path)) == {"cpu"}
    with pytest.raises(OSError, match="no plain file"):
        reserve_slots(tmp_path, ["a"], {})
    held.release()


AS_NOBODY = """
import fcntl, json, os, sys
from pathlib import Path
from trainkit.base.locks import LockBusy
from trainkit.base.slots import reserve_slots, slot_holders, slot_path
folder = Path(sys.argv[1])
os.umask(0o077); os.setgid(65534); os.setuid(65534)
"""


@pytest.fixture
def common(tmp_path: Path) -> Iterator[Path]:
    """A folder that other users reach, as /dev/shm is."""
    if os.getuid():
        pytest.skip("needs root, to be two users")
    # tmp_path lets no other user through
    folder = Path("/dev/shm") / f"trainkit-test-{os.getpid()}"
    folder.mkdir()
    folder.chmod(0o1777)
    yield folder
    shutil.rmtree(folder)


def as_nobody(folder: Path, program: str) -> subprocess.Popen[str]:
    """Another user, who says one line and ends once its stdin does."""
    return subprocess.Popen(
        [sys.executable, "-c", AS_NOBODY + program, str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


RESERVE = """
try:
    held = reserve_slots(folder, ["cpu"], {"run": "nobody's", "mark": "a/1/0"})
    print("took it", held.cleared)
except LockBusy as busy:
    print("refused by", busy.holder["run"], "of", busy.holder["user"], slot_holders(folder))
"""


def test_between_users(common: Path) -> None:
    """Another user sees who holds a slot, is refused, and takes it afterwards, with a umask that
    lets nobody else in. What a dead run of one user has left is not the other's to clear."""
    common.rmdir()
    held = reserve_slots(common, ["cpu"], {"run": "root's", "mark": "r/1/0"})
    assert (
        stat.S_IMODE(common.stat().st_mode) == 0o1777
        and stat.S_IMODE(slot_path(common, "cpu").stat().st_mode) == 0o666
    )
    refused = as_nobody(common, RESERVE).communicate()[0]
    assert refused.startswith("refused by root's of root {'cpu'") and "mark" not in refused
    held.release()
    assert as_nobody(common, RESERVE).communicate()[0] == "took it []\n"
    reserve_slots(common, ["cpu"], {"run": "root's"}).release()
    slot_path(common, "cpu").unlink()
    # its file now, in a folder with the sticky bit: root's O_CREAT would be refused
    assert "'run': \"nobody's\", 'mark': 'a/1/0'" in as_nobody(common, RESERVE).communicate()[0]
    again = reserve_slots(common, ["cpu"], {"run": "root's"})
    assert again.cleared == []
    again.release()


SQUAT = """
handle = open(slot_path(folder, "cpu"), "w")
fcntl.flock(handle, fcntl.LOCK_EX)
"""
IN_THE_WAY = 'slot_path(folder, "cpu").mkdir()'
FORGE = """
held = reserve_slots(folder, ["cpu"], {"run": "nobody's"})
words = json.dumps({"run": "root's", "mark": "r/1/0", "user": "root", "since": 1e12})
slot_path(folder, "cpu").write_text(words)
(folder / "trainkit-cpu.holder-0").write_text(words)
(folder / "trainkit-cpu.holder-0").chmod(0o666)
"""


@pytest.mark.parametrize(
    ("program", "run", "why"),
    [(SQUAT, None, None), (IN_THE_WAY, None, "Is a directory"), (FORGE, "nobody's", None)],
    ids=["squat", "in the way", "forge"],
)
def test_another_user_is_named_whatever_it_says(
    common: Path, program: str, run: str | None, why: str | None
) -> None:
    """By the kernel's word; and who shares goes on."""
    other = as_nobody(common, program + '\nprint("there", flush=True); sys.stdin.read()')
    assert other.stdout and other.stdout.readline() == "there\n"
    with pytest.raises(LockBusy) as busy:
        reserve_slots(common, ["cpu"], {"run": "root's"})
    holder = busy.value.holder
    assert (holder["user"], holder.get("run"), holder.get("mark")) == ("nobody", run, None)
    if why:
        assert why in str(holder["why"])
    else:
        assert holder["pid"] == other.pid
    beside = reserve_slots(common, ["cpu", "gpu0"], {"run": "root's"}, share=True)
    assert slot_holders(common)["gpu0"]["run"] == "root's" and beside.cleared == []
    other.communicate()
    beside.release()


def test_a_file_system_without_locks_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What Lustre without -o flock, or NFS without its lock service, answers; never taken for a
    slot that is free, or held."""

    def refused(handle: int, how: int) -> None:
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))

    monkeypatch.setattr("fcntl.flock", refused)
    with pytest.raises(
        OSError, match=r"cannot lock files \(Operation not supported\); clusters.NAME.node_folder"
    ) as caught:
        reserve_slots(tmp_path, ["cpu"], {})
    assert caught.value.filename == str(slot_path(tmp_path, "cpu")) and not slot_holders(tmp_path)
