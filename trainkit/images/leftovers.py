"""What builds that failed or were killed left in the store of buildah and podman: working
containers, each with the files of a step, and the processes of that step.

Builders take them away when a build ends well, and most of them when it fails. So each build of
ours has one more build argument, which no Dockerfile reads and no layer depends on: the
process that asked for it. Both builders note the arguments in the file buildah.json of each
working container (buildah's buildah.go, Builder.Args), in a folder of the store (store.go of
containers/storage, ContainerDirectory). What has another's argument, or none, is left alone.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

from trainkit.base.errors import TrainkitError
from trainkit.base.lazy_dataclasses import dataclass
from trainkit.base.process import ProcessIdentity, identity, is_alive
from trainkit.images.builders.options import MARK_ARGUMENT
from trainkit.images.contract import Builder
from trainkit.images.programs import ask, print_line, run_program


@dataclass(frozen=True)
class WorkingContainer:
    """A working container of a build of ours.

    Args:
        name: its id.
        asked: the process that asked for the build.
        mounted: where its files are, while a step runs.
    """

    name: str
    asked: ProcessIdentity
    mounted: Path | None


def own_mark() -> str:
    """The value of the build argument by which this process's builds are known again."""
    own = identity()
    return f"{own.host}:{own.pid}:{own.start_time}:{own.boot_id}:{_pid_namespace()}"


def _pid_namespace() -> int:
    """In which of them pids are meant (namespaces(7)): containers with the host's name and its
    store may have their own."""
    return os.stat("/proc/self/ns/pid").st_ino


def remove_leftovers_of(builder: Builder) -> None:
    """End what is left of builds whose process is dead, and of this process's own, which is over;
    take it out of the builder's store. What cannot be removed stays, and the log says why."""
    for each in _working_containers(builder):
        if each.asked != identity() and is_alive(each.asked) is not False:
            continue
        print_line(f"left by a build that did not end well: working container {each.name[:12]}")
        if each.mounted is not None:
            _end_processes_in(each.mounted)
        with contextlib.suppress(TrainkitError):
            run_program(builder.remove_argv(each.name))


def _working_containers(builder: Builder) -> Iterator[WorkingContainer]:
    if not builder.store_argv():
        return
    driver, _, root = (ask(builder.store_argv()) or "").partition(" ")
    if not root:
        return
    for path in sorted(Path(root, f"{driver}-containers").glob("*/userdata/buildah.json")):
        try:
            value = json.loads(path.read_bytes())
            host, pid, start, boot, namespace = value["Args"][MARK_ARGUMENT].split(":")
            asked = ProcessIdentity(host, int(pid), int(start), boot)
            if int(namespace) != _pid_namespace():
                continue
        except (OSError, ValueError, KeyError, TypeError):
            continue  # another's, or it is being removed just now
        mounted = value.get("mountpoint")
        yield WorkingContainer(path.parent.parent.name, asked, mounted and Path(mounted))


def _end_processes_in(folder: Path) -> None:
    """End processes whose root is this folder: a step goes on when its builder is killed."""
    try:
        files = os.stat(folder)
    except OSError:
        return
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            # none of them: gone meanwhile, or another user's
            with contextlib.suppress(OSError):
                root = os.stat(entry / "root")
                if (root.st_dev, root.st_ino) == (files.st_dev, files.st_ino):
                    os.kill(int(entry.name), signal.SIGKILL)
