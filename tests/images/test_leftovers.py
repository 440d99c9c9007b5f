"""Which working containers in a store are of builds of ours that are over."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from trainkit.images.builders.buildah import Buildah
from trainkit.images.builders.docker import Docker
from trainkit.images.contract import Argv
from trainkit.images.leftovers import own_mark, remove_leftovers_of

NOTE = "overlay-containers/{name}/userdata/buildah.json"


class StoreOf(Buildah):
    """buildah with a store that is only notes; what it removes is written down there."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def store_argv(self) -> Argv:
        return ("echo", "overlay", str(self.folder))

    def remove_argv(self, container: str) -> Argv:
        return ("touch", str(self.folder / f"removed-{container}"))

    def note(self, name: str, value: object) -> None:
        """What buildah notes of a container."""
        path = self.folder / NOTE.format(name=name)
        path.parent.mkdir(parents=True)
        path.write_text(json.dumps(value))

    def removed(self) -> set[str]:
        """Names of what was removed."""
        return {path.name.removeprefix("removed-") for path in self.folder.glob("removed-*")}


@pytest.fixture
def other() -> Iterator[subprocess.Popen[bytes]]:
    """Another process of this machine."""
    with subprocess.Popen(["sleep", "600"]) as process:
        yield process
        process.kill()


def mark(**changed: object) -> dict[str, object]:
    """What is noted of a build of a process that is gone, with other parts."""
    names = ("host", "pid", "start", "boot", "namespace")
    parts = dict(zip(names, own_mark().split(":"), strict=True))
    parts |= {"start": "1", **{name: str(value) for name, value in changed.items()}}
    return {"Args": {"TRAINKIT_BUILD": ":".join(parts.values())}}


def test_only_those_of_processes_that_are_gone(
    tmp_path: Path, other: subprocess.Popen[bytes]
) -> None:
    builder = StoreOf(tmp_path)
    code = "from trainkit.images.leftovers import own_mark; print(own_mark())"
    argv = [sys.executable, "-c", code]
    ended = subprocess.run(argv, capture_output=True, text=True, check=True).stdout.strip()
    status = Path(f"/proc/{other.pid}/stat").read_text().rpartition(")")[2].split()
    builder.note("ended", {"Args": {"TRAINKIT_BUILD": ended}})
    builder.note("mine", {"Args": {"TRAINKIT_BUILD": own_mark()}})
    builder.note("later", mark(pid=other.pid))
    builder.note("boot", mark(boot="before"))
    gone = {"ended", "mine", "later", "boot"}
    builder.note("alive", mark(pid=other.pid, start=status[19]))
    builder.note("elsewhere", mark(host="elsewhere"))
    builder.note("namespace", mark(namespace=1))
    for number, value in enumerate(({}, {"Args": None}, {"Args": {"A": "b"}}, [], "x")):
        builder.note(f"others-{number}", value)
    builder.note("garbage", {"Args": {"TRAINKIT_BUILD": "a:b:c:d:e"}})
    remove_leftovers_of(builder)
    assert builder.removed() == gone


def test_processes_in_their_files_are_ended(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("chroot needs root")
    inside, beside = tmp_path / "inside", tmp_path / "beside"
    builder = StoreOf(tmp_path)
    builder.note("dead", {**mark(), "mountpoint": str(inside)})
    code = "import os, sys, time; os.chroot(sys.argv[1]); print(flush=True); time.sleep(600)"
    children = []
    for folder in (inside, beside):
        folder.mkdir()
        argv = [sys.executable, "-c", code, str(folder)]
        children.append(subprocess.Popen(argv, stdout=subprocess.PIPE))
    try:
        for child in children:
            assert child.stdout is not None and child.stdout.readline() == b"\n"
        remove_leftovers_of(builder)
        assert children[0].wait(timeout=900) == -9 and children[1].poll() is None
    finally:
        for child in children:
            child.kill()
            child.communicate()


def test_a_store_that_leaves_nothing_or_does_not_answer(tmp_path: Path) -> None:
    remove_leftovers_of(Docker())

    class Silent(StoreOf):
        def store_argv(self) -> Argv:
            return ("false",)

    builder = Silent(tmp_path)
    builder.note("dead", mark())
    remove_leftovers_of(builder)
    assert not builder.removed()
