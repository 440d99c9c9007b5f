"""Processes held together by a cgroup (v2): a process started in one stays in it with all
descendants, whatever they do to their environment, and `cgroup.kill` ends all of them at once
(Documentation/admin-guide/cgroup-v2.rst; Linux 5.14 and newer).

A group is made below the one that this process is in, so that limits and Slurm's own tracking go
on to hold. That takes a cgroup v2 file system (a mixed mount too) and leave to write there: root
has it, others where it was delegated to them. Its name is that of a mark: a later process finds
it by that.
"""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

PREFIX = "trainkit-"
POLL_SECONDS = 0.002  # seconds between two looks at a group that is being killed


class Cgroup:
    """One control group.

    Args:
        path: its folder.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def inside(self, name: str) -> Cgroup:
        """A group below it, made now. Raises OSError."""
        path = self.path / name
        with contextlib.suppress(FileExistsError):
            path.mkdir()
        return Cgroup(path)

    def parts(self) -> list[Cgroup]:
        """The groups in it."""
        with contextlib.suppress(OSError):
            return [Cgroup(path) for path in self.path.iterdir() if path.is_dir()]
        return []

    def entrance(self) -> int:
        """An open file: a process that writes b"0" into it is in the group from then on. Raises
        OSError."""
        return os.open(self.path / "cgroup.procs", os.O_WRONLY | os.O_CLOEXEC)

    def pids(self) -> list[int]:
        """Who is in it or below it, dead ones that nobody has reaped left out."""
        found = []
        for folder, _, _ in os.walk(self.path):
            with contextlib.suppress(OSError):
                found += [int(line) for line in Path(folder, "cgroup.procs").read_text().split()]
        return found

    def empty(self) -> bool:
        """Whether nothing lives in it or below it: the kernel's own word. One that is gone is
        empty; one that cannot be read is not."""
        try:
            return "populated 0" in (self.path / "cgroup.events").read_text()
        except FileNotFoundError:
            return True
        except OSError:
            return not self.path.exists()  # removed between the opening and the reading: ENODEV

    def kill(self, seconds: float = 0.0) -> bool:
        """SIGKILL to all in it and below it, whatever they fork meanwhile; whether it is empty
        at most so many seconds later. Raises OSError where we may not do that."""
        with contextlib.suppress(FileNotFoundError):
            (self.path / "cgroup.kill").write_text("1")
        deadline = time.monotonic() + seconds
        while not (done := self.empty()) and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)
        return done

    def remove(self) -> None:
        """Take it away with those below it; one that is not empty stays."""
        for folder, _, _ in os.walk(self.path, topdown=False):
            with contextlib.suppress(OSError):
                os.rmdir(folder)


def create_cgroup(mark: str) -> Cgroup | None:
    """The group for all below `mark`, made below our own; None where this machine does not give
    us one, tried out with a process."""
    if (own := _own()) is None:
        return None
    group = Cgroup(own / _name(mark))
    try:
        group.path.mkdir(exist_ok=True)
        if (group.path / "cgroup.kill").exists() and _may_enter(group.inside("trial")):
            return group
    except OSError:
        pass
    group.remove()
    return None


def find_cgroups(mark: str) -> list[Cgroup]:
    """The groups of `mark` and below it, in whole parts, wherever on this machine they were
    made."""
    wanted = _name(mark)
    found: dict[Path, Cgroup] = {}
    for point, _ in _mounts():
        for folder, names, _ in os.walk(point):
            for name in names:
                if name == wanted or name.startswith(wanted + "."):
                    path = Path(folder, name)
                    found[path] = Cgroup(path)
    return list(found.values())


def kill_cgroups(mark: str, seconds: float) -> list[int]:
    """End what lives in the groups of `mark`; the pids of those that were there. Empty groups
    are taken away."""
    there = []
    for group in find_cgroups(mark):
        there += group.pids()
        with contextlib.suppress(OSError):  # another user's: who looks finds it still there
            group.kill(seconds)
        group.remove()
    return there


def _name(mark: str) -> str:
    return PREFIX + mark.rstrip("/").replace("/", ".")


def _mounts() -> list[tuple[Path, str]]:
    """Where cgroup v2 is mounted, and which of its folders is seen there: proc(5), mountinfo."""
    found = []
    with contextlib.suppress(OSError, ValueError):
        for line in Path("/proc/self/mountinfo").read_text().splitlines():
            fields = line.split()
            if fields[fields.index("-") + 1] == "cgroup2":
                found.append((Path(fields[4]), fields[3]))
    return found


def _own() -> Path | None:
    """The folder of the group that this process is in; None where no mount shows it."""
    with contextlib.suppress(OSError):
        own = next(
            (
                line[3:]
                for line in Path("/proc/self/cgroup").read_text().splitlines()
                if line.startswith("0::/")
            ),
            "..",
        )
        for point, seen in _mounts():
            inside = os.path.relpath(own, seen)
            if (
                ".." not in (*inside.split("/"), *own.split("/"))
                and (point / inside / "cgroup.procs").exists()
            ):
                return point / inside
    return None


def _may_enter(trial: Cgroup) -> bool:
    """Whether a child of ours can enter the group; the trial's group is gone afterwards."""
    handle = trial.entrance()
    try:
        if not (pid := os.fork()):
            code = 1
            with contextlib.suppress(OSError):
                os.write(handle, b"0")
                code = int(trial.empty())
            os._exit(code)
        return os.waitpid(pid, 0)[1] == 0
    finally:
        os.close(handle)
        trial.remove()
