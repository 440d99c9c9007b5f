"""What an image says of itself: commit, base, version; and the time that its files get.

Both are of the newest commit that changed what goes into the image, not of the newest commit: as
long as its context stays the same, the image does.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import trainkit
from trainkit.base.git import git_environment
from trainkit.images.builders.options import EPOCH_ARGUMENT

REVISION = "org.opencontainers.image.revision"
# 1980-01-01: zip archives, and so wheels, know nothing older
WITHOUT_GIT = 315532800
DIRTY = "-dirty"
SECONDS = 60.0


@dataclass(frozen=True)
class ContentCommit:
    """The newest commit that changed one of the files.

    Args:
        commit: its hash, "-dirty" after it where a file differs from the newest commit, or is
            not known to git; "" without git.
        time: of the commit, in seconds since 1970.
    """

    commit: str
    time: int


def content_commit(context: Path, files: Sequence[Path]) -> ContentCommit:
    """The newest commit that changed one of `files`, which are below `context` or its
    repository."""
    top = _git(context, "rev-parse", "--show-toplevel")
    if top is None:
        return ContentCommit("", WITHOUT_GIT)
    root = Path(top.rstrip("\n"))
    names = {os.path.relpath(os.path.realpath(path), root) for path in files}
    newest = _newest(root, names)
    if newest is None:
        return ContentCommit("", WITHOUT_GIT)
    if _is_dirty(root, names):
        return ContentCommit(newest.commit + DIRTY, newest.time)
    return newest


def source_date_epoch(content: ContentCommit) -> int:
    """What times in the image are set to: SOURCE_DATE_EPOCH of the caller, or the commit's."""
    given = os.environ.get(EPOCH_ARGUMENT, "")
    if given.isdecimal():
        return int(given)
    return content.time


def labels_of(content: ContentCommit, base: str) -> dict[str, str]:
    """Labels by the names of the OCI image specification, annotations.md. Licence and version are
    the Dockerfile's to say: whose they are is not known here."""
    labels = {}
    if content.commit:
        labels[REVISION] = content.commit
    if base:
        labels["org.opencontainers.image.base.name"] = base
    return labels


def arguments_that_say(content: ContentCommit) -> dict[str, str]:
    """Build arguments for Dockerfiles that declare them, as those of `container/` do: what the
    image says when it starts."""
    return {
        "IMAGE_REVISION": content.commit or "unknown",
        "IMAGE_VERSION": trainkit.__version__,
    }


def _argv(folder: Path, *words: str) -> list[str]:
    return ["git", "-c", "core.quotePath=false", "-C", str(folder), *words]


def _git(folder: Path, *words: str) -> str | None:
    """What git prints; None where there is no git, or no repository."""
    try:
        done = subprocess.run(
            _argv(folder, *words),
            capture_output=True,
            timeout=SECONDS,
            check=False,
            stdin=subprocess.DEVNULL,
            env=git_environment(os.environ),
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    if done.returncode != 0:
        return None
    return done.stdout.decode("utf-8", "surrogateescape")


def _newest(root: Path, names: set[str]) -> ContentCommit | None:
    """The log is read only as far as the commit that is looked for."""
    words = ("log", "--format=%x01%H %ct", "--name-only", "-z", "-m", "--first-parent")
    newest: ContentCommit | None = None
    with subprocess.Popen(
        _argv(root, *words),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=git_environment(os.environ),
    ) as log:
        assert log.stdout is not None
        rest = b""
        while newest is None and (block := log.stdout.read(2**16)):
            *commits, rest = (rest + block).split(b"\x01")
            newest = next(filter(None, (_changes(each, names) for each in commits)), None)
        newest = newest or _changes(rest, names)
        log.kill()
    return newest


def _changes(text: bytes, names: set[str]) -> ContentCommit | None:
    """The commit, where it changes one of the names."""
    head, *changed = text.decode("utf-8", "surrogateescape").replace("\n", "\0").split("\0")
    if not names.intersection(changed):
        return None
    commit, time = head.split()
    return ContentCommit(commit, int(time))


def _is_dirty(root: Path, names: set[str]) -> bool:
    changed = _git(root, "diff", "--name-only", "-z", "HEAD", "--")
    known = _git(root, "ls-files", "-z")
    if changed is None or known is None:
        return True
    return bool(names.intersection(changed.split("\0"))) or not names <= set(known.split("\0"))
