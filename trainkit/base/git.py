"""git as a program: it never asks, runs no hook of a tree, and says no password."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path

from trainkit.base.errors import Exit, TrainkitError
from trainkit.base.lazy_dataclasses import dataclass

SECONDS = 60.0  # that a question to a tree on this machine may take
PASSWORD = re.compile(r"(://)[^/@\s]+@")
# a caller that is itself run by git (a hook) has these of another repository (git(1))
_OF_ANOTHER = (
    "GIT_DIR",
    "GIT_WORK_TREE",
    "GIT_INDEX_FILE",
    "GIT_OBJECT_DIRECTORY",
    "GIT_ALTERNATE_OBJECT_DIRECTORIES",
    "GIT_COMMON_DIR",
    "GIT_NAMESPACE",
    "GIT_PREFIX",
)
_SETTINGS = {
    "core.hooksPath": os.devnull,
    "core.fsmonitor": "false",
    "advice.detachedHead": "false",
    "core.quotePath": "false",
    # a connection that is dead is given up after a minute
    "http.lowSpeedLimit": "1000",
    "http.lowSpeedTime": "60",
}


class GitFailed(Exception):
    """git ended with an error; its text is what git said, without passwords."""


def git_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """`environment` for a git that never asks a person and knows no transport that runs
    programs."""
    kept = {name: value for name, value in environment.items() if name not in _OF_ANOTHER}
    return {
        **kept,
        "LC_ALL": "C",
        "GIT_TERMINAL_PROMPT": "0",
        "GIT_ASKPASS": "",
        "SSH_ASKPASS": "",
        "GIT_OPTIONAL_LOCKS": "0",
        "GIT_ALLOW_PROTOCOL": "file:git:http:https:ssh",
    }


def holds_password(text: str) -> bool:
    """Whether a URL in `text` has a password before its @, or over HTTP anything: that is one."""
    return bool(re.search(r"https?://[^/@\s]+@|://[^/@\s:]*:[^/@\s]*@", text, re.IGNORECASE))


def without_passwords(text: str) -> str:
    """`text` with what stands before @ in its URLs replaced by ***."""
    return PASSWORD.sub(r"\1***@", text)


def run_git(
    folder: Path,
    *words: str,
    timeout: float | None = SECONDS,
    prepare: Callable[[], None] | None = None,
) -> str:
    """What git prints when it runs with `words` in `folder`.

    Args:
        folder: an existing folder.
        words: its command and arguments; what comes from a person must not begin with "-".
        timeout: in seconds; None: as long as it takes.
        prepare: is called in the child before git.

    Raises:
        TrainkitError: exit 6, there is no git. GitFailed: it failed, or took too long.
    """
    settings = [word for name, value in _SETTINGS.items() for word in ("-c", f"{name}={value}")]
    # who named the tree runs its programs: that another user owns it is nothing new
    argv = ["git", *settings, "-c", f"safe.directory={folder}", "-C", str(folder), *words]
    try:
        done = subprocess.run(
            argv,
            env=git_environment(os.environ),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=timeout,
            check=False,
            preexec_fn=prepare,
        )
    except FileNotFoundError:
        raise TrainkitError(
            "git is not on PATH, and it is needed to fetch a tree and to look at one",
            exit=Exit.STAGE_FAILED,
            hint="install git, or fetch the tree elsewhere and name its folder as source",
        ) from None
    except subprocess.TimeoutExpired:
        raise GitFailed(f"git {words[0]} took more than {timeout:.0f} s") from None
    if done.returncode != 0:
        said = done.stderr.decode(errors="replace").strip()
        raise GitFailed(without_passwords(said) or f"git {words[0]} exited with {done.returncode}")
    return done.stdout.decode(errors="surrogateescape")


def git_answer(folder: Path, *words: str, timeout: float | None = SECONDS) -> str | None:
    """As `run_git`; None where there is no git, no repository, or it fails."""
    try:
        return run_git(folder, *words, timeout=timeout)
    except (TrainkitError, GitFailed, OSError):
        return None


@dataclass(frozen=True)
class TreeState:
    """What a working tree holds.

    Args:
        commit: its commit.
        changed: names of changed, deleted and new files, but for compiled ones.
    """

    commit: str
    changed: tuple[str, ...]

    def words(self) -> str:
        """For people."""
        if not self.changed:
            return f"commit {self.commit[:12]}"
        more = f" and {len(self.changed) - 1:,} more" if len(self.changed) > 1 else ""
        return f"commit {self.commit[:12]} with changes in {self.changed[0]}{more}"


def tree_state(tree: Path) -> TreeState | None:
    """The state of a tree that git knows; None for a folder that is in no commit, such as an
    unpacked archive, though it may lie in the working tree of something else.

    Raises TrainkitError (exit 6) where there is no git, GitFailed where it fails.
    """
    try:
        if not run_git(tree, "ls-tree", "--name-only", "HEAD", "--", "./"):
            return None
    except GitFailed as error:
        if "not a git repository" in str(error) or "Not a valid object name" in str(error):
            return None
        raise
    commit = run_git(tree, "rev-parse", "--verify", "HEAD").strip()
    status = run_git(tree, "status", "--porcelain", "-z", "--no-renames", "--", ".")
    entries = [entry for entry in status.split("\0") if entry]
    return TreeState(commit, tuple(entry[3:] for entry in entries if not _is_compiled(entry)))


def _is_compiled(entry: str) -> bool:
    """Whether a line of `git status` is of a file that somebody compiled there."""
    return entry.startswith("??") and (entry.endswith(".so") or "__pycache__" in entry)


def tree_diff(tree: Path) -> str:
    """Changes of tracked files against the commit. Raises GitFailed as `run_git`."""
    words = ("diff", "HEAD", "--no-color", "--no-ext-diff", "--no-textconv", "--relative")
    return run_git(tree, *words, "--", ".")


def head_commit(tree: Path) -> str:
    """The commit that is checked out in a tree, read from its .git alone, so that it is the same
    on a node without git; "" where there is none (gitrepository-layout(5))."""
    folder = tree / ".git"
    try:
        if folder.is_file():  # of a further working tree
            folder = tree / folder.read_text().removeprefix("gitdir:").strip()
        common = folder
        if (folder / "commondir").is_file():
            common = folder / (folder / "commondir").read_text().strip()
        head = (folder / "HEAD").read_text().strip()
        if not head.startswith("ref:"):
            return head
        name = head.removeprefix("ref:").strip()
        for place in (folder / name, common / name):
            if place.is_file():
                return place.read_text().strip()
        for line in (common / "packed-refs").read_text().splitlines():
            commit, _, ref = line.partition(" ")
            if ref == name:
                return commit
    except OSError:
        pass
    return ""
