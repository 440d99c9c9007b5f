"""The stage engine-source: a foreign engine's tree is here, at its revision. As a program: the
unit that clones it.

A tree is cloned under a temporary name, checked, and renamed; what it was cloned from lies in its
.git/trainkit.json. A folder that jobs.toml names is only looked at.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainkit.base.documents import utc_now
from trainkit.base.errors import ConfigError, Exit, TrainkitError
from trainkit.base.files import publish_folder, remove, remove_leftovers, temporary_name, write_json
from trainkit.base.git import (
    GitFailed,
    head_commit,
    run_git,
    tree_diff,
    tree_state,
    without_passwords,
)
from trainkit.base.lazy_dataclasses import dataclass
from trainkit.base.process import die_with_parent_hook
from trainkit.base.records import Record
from trainkit.base.worker import ProgressCallback, run_unit
from trainkit.engines.registry import foreign_engine
from trainkit.engines.sources import (
    in_image,
    is_url,
    refuse_credentials,
    source_of,
    source_tree,
)
from trainkit.jobs.messages import closest_name
from trainkit.jobs.schema import EngineSource, Job
from trainkit.stages.contract import Need, Unit

VERSION = 1
RECORD = "trainkit.json"  # in the clone's .git
REVISION = re.compile(r"[A-Za-z0-9_](?!.*(\.\.|@\{))[^\s~^:?*\[\\\x00-\x20\x7f]*")
ABBREVIATED = re.compile(r"[0-9a-f]{4,40}")  # of a commit
SURE = 7  # characters of a hash that git itself writes where it abbreviates one
OUR_REMOTE = "origin"
DIFF_LIMIT = 2**20  # bytes of a diff that a stamp keeps

# what git says, what that means, what helps
_REASONS: tuple[tuple[str, str, str], ...] = (
    (
        "could not resolve|couldn't resolve|connect to|connection timed out|unreachable"
        "|connection refused|unable to access",
        "its server cannot be reached from here",
        "look at the name, or at the way to the network from this machine (https_proxy); without"
        " one, clone the tree elsewhere, copy it here and name its folder as source",
    ),
    (
        "authentication failed|could not read username|permission denied|access denied"
        "|terminal prompts disabled|403",
        "its server wants to know who asks, or refuses",
        "set up git's credential helper (git help credentials) or an ssh key, and try"
        " `git ls-remote URL`",
    ),
    (
        "not found|does not exist|does not appear to be a git repository|repository.*invalid",
        "there is no such repository",
        "look at the URL's spelling",
    ),
    ("no space left|quota", "the disk is full", "make room: nothing half-made is kept"),
)


@dataclass(frozen=True)
class CloneSpec(Record):
    """The spec of the unit that clones.

    Args:
        name: the [engines.X] table.
        engine: which engine it has to be.
        source: the git URL.
        revision: commit, tag or branch; None: what the server's HEAD is.
        version: what jobs.toml says the tree is; None: the tree has to say it.
        tree: where it goes.
        clone: whether it is cloned; else it is a folder that is only looked at.
    """

    name: str
    engine: str
    source: str
    revision: str | None
    version: str | None
    tree: Path
    clone: bool


@dataclass(frozen=True)
class CloneRecord(Record):
    """What a clone was made from, as it says itself."""

    SCHEMA = "engine-source/1"
    source: str
    revision: str | None
    commit: str
    cloned: str


class EngineSourceStage:
    """The tree of a foreign engine: one need."""

    name = "engine-source"

    def needs(self, job: Job, stamps: Path) -> list[Need]:
        if job.is_native or in_image(job):
            return []
        source = source_of(job)
        tree = source_tree(job)
        clone = is_url(source.source)
        spec = CloneSpec(
            source.name, job.engine, source.source, source.revision, source.version, tree, clone
        )
        _refuse_revision(source)
        if not clone:
            with _stage_error():
                _check_folder(spec)
        unit = Unit(
            "clone" if clone else "check",
            (sys.executable, "-I", "-m", "trainkit.stages.engine_source"),
            spec.to_json(),
            (tree / ".git" / RECORD,) if clone else (),
            network=True,
        )
        table = f"engines.{source.name}"
        return [
            Need(
                self.name,
                tree.name if clone else source.name,
                tree.name,
                VERSION,
                {f"{table}.source": source.source, f"{table}.revision": source.revision},
                (),
                (),
                (unit,),
                evidence=lambda: _judge(spec),
            )
        ]

    def waits_for(self, job: Job) -> tuple[str, ...]:
        return ()


class _stage_error(contextlib.AbstractContextManager["_stage_error"]):
    """Errors of jobs.toml's words about a tree, as those of the stage (exit 6)."""

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, ConfigError):
            raise ConfigError(error.list, exit=Exit.STAGE_FAILED) from None
        if isinstance(error, GitFailed):
            raise TrainkitError(str(error), exit=Exit.STAGE_FAILED) from None


def _refuse_revision(source: EngineSource) -> None:
    """A revision is a commit, tag or branch: no option of git's, and no expression."""
    if source.revision is not None and not REVISION.fullmatch(source.revision):
        raise ConfigError(
            f"engines.{source.name}.revision = {json.dumps(source.revision)} names no commit, tag"
            " or branch",
            exit=Exit.STAGE_FAILED,
            hint="write it as `git ls-remote` lists it, or a commit's hash",
        )


def _version_of(tree: Path, spec: CloneSpec) -> str:
    """What the tree is; raises ConfigError where it is not a tree of the engine, or says no
    version and jobs.toml does not either."""
    engine = foreign_engine(spec.engine)
    if spec.version is not None and tree.is_dir() and not engine.lacks(tree):
        return spec.version
    return engine.version_of_tree(tree)


def _check_folder(spec: CloneSpec) -> str:
    """What a named folder is, for people. Raises ConfigError where it is not what jobs.toml
    says."""
    version = _version_of(spec.tree, spec)
    if shutil.which("git") is None:
        return f"{spec.tree} is {version}; which commit is not known: there is no git"
    try:
        state = tree_state(spec.tree)
    except GitFailed as error:
        return f"{spec.tree} is {version}; git says: {str(error).splitlines()[-1]}"
    if state is None and spec.revision is None:
        return f"{spec.tree} is {version}, in no git repository"
    if state is None:
        raise ConfigError(
            f"engines.{spec.name}.revision = '{spec.revision}' cannot be checked: {spec.tree} is in"
            " no git repository",
            hint="remove revision: the folder is used as it is",
        )
    if spec.revision is not None:
        _refuse_other_commit(spec, state.commit)
    return f"{spec.tree} is {version}, {state.words()}"


def _refuse_other_commit(spec: CloneSpec, commit: str) -> None:
    try:
        words = ("rev-parse", "--verify", "--quiet", f"{spec.revision}^{{commit}}")
        asked = run_git(spec.tree, *words).strip()
    except GitFailed:
        asked = "a commit that is not there"
    if asked != commit:
        raise ConfigError(
            f"{spec.tree} is at commit {commit[:12]}, and engines.{spec.name}.revision ="
            f" '{spec.revision}' is {asked[:26]}",
            hint=f"git -C {spec.tree} checkout {spec.revision}, or remove revision",
        )


def read_record(tree: Path) -> CloneRecord:
    """What a clone was made from. Raises OSError where trainkit has not cloned it, ConfigError
    where that cannot be read."""
    return CloneRecord.from_file(tree / ".git" / RECORD)


def _judge(spec: CloneSpec) -> tuple[bool, str]:
    """Whether the tree is there, and why or why not. What a branch is on the server by now is not
    asked: `--force` does."""
    if not spec.clone:
        with _stage_error():
            return True, _check_folder(spec)
    if not spec.tree.is_dir():
        return False, "it was never cloned"
    try:
        record = read_record(spec.tree)
    except (OSError, ConfigError, KeyError):
        return False, f"{spec.tree} was not cloned by trainkit"
    for key in ("source", "revision"):
        if (before := getattr(record, key)) != (now := getattr(spec, key)):
            return False, f"{key} changed from {json.dumps(before)} to {json.dumps(now)}"
    if (head := head_commit(spec.tree)) != record.commit:
        return False, f"somebody checked out {head or 'nothing'} in {spec.tree}"
    if missing := foreign_engine(spec.engine).lacks(spec.tree):
        return False, f"{spec.tree / missing[0]} is missing"
    now = f"{spec.revision or 'HEAD'} was {record.commit[:12]} when it was cloned, {record.cloned}"
    changed = _changed(spec.tree)
    if changed:
        now += f"; changed since: {', '.join(changed[:3])}"
    return True, now


def _changed(tree: Path) -> tuple[str, ...]:
    """Files that somebody changed; none where git cannot be asked, as on a node without it."""
    with contextlib.suppress(GitFailed, TrainkitError):
        state = tree_state(tree)
        return state.changed if state else ()
    return ()


class _Clone:
    """Makes one clone."""

    def __init__(self, spec: CloneSpec) -> None:
        self.spec = spec
        self.folder = temporary_name(spec.tree)

    def _git(self, *words: str, network: bool = False, folder: Path | None = None) -> str:
        timeout = None if network else 600.0
        prepare = die_with_parent_hook(os.getpid())
        return run_git(folder or self.folder, *words, timeout=timeout, prepare=prepare)

    def run(self) -> str:
        """The commit that is there now, under its own name."""
        spec = self.spec
        spec.tree.parent.mkdir(parents=True, exist_ok=True)
        remove_leftovers(spec.tree)
        self._refuse_to_replace()
        self.folder.mkdir()
        try:
            with _stage_error():
                commit = self._fetched()
                self._refuse_another_engine()
            record = CloneRecord(spec.source, spec.revision, commit, utc_now())
            write_json(self.folder / ".git" / RECORD, record.to_json())
            if spec.tree.exists():
                os.rename(spec.tree, temporary_name(spec.tree))
            publish_folder(self.folder, spec.tree)
        finally:
            if self.folder.exists():
                remove(self.folder)
        remove_leftovers(spec.tree)
        return commit

    def _refuse_another_engine(self) -> None:
        try:
            _version_of(self.folder, self.spec)
        except ConfigError as error:
            cloned = f"{self.spec.source} at {self.spec.revision or 'HEAD'}"
            problem = error.list[0]
            message = problem.message.replace(str(self.folder), cloned)
            raise ConfigError(message, hint=problem.hint) from None

    def _refuse_to_replace(self) -> None:
        """A tree that holds somebody's work, or another repository's that runs may use, is never
        replaced."""
        tree = self.spec.tree
        if not os.path.lexists(tree):
            return
        hint = (
            f'move it away, or use it as it is: source = "{tree}" in engines.{self.spec.name},'
            " without revision"
        )
        try:
            record = read_record(tree)
            state = tree_state(tree)
        except (OSError, ConfigError, KeyError, GitFailed):
            raise TrainkitError(
                f"{tree} is in the way: trainkit has not cloned it",
                exit=Exit.STAGE_FAILED,
                hint=hint,
            ) from None
        if record.source != self.spec.source:
            raise TrainkitError(
                f"{tree} was cloned from {record.source}, and engines.{self.spec.name}.source is"
                f" {self.spec.source}",
                exit=Exit.STAGE_FAILED,
                hint=(
                    "remove the folder, if no run uses it; or give the table a name of its own"
                    f' ([engines.NAME] with engine = "{self.spec.engine}")'
                ),
            )
        if state is None or state.commit != record.commit or state.changed:
            what = state.words() if state else "no commit"
            raise TrainkitError(
                f"{tree} would be replaced, and holds what somebody made: {what}",
                exit=Exit.STAGE_FAILED,
                hint=hint,
            )

    def _fetched(self) -> str:
        """Fetch the revision and check it out; returns its commit."""
        self._git("init", "--quiet", "--template=")
        self._git("remote", "add", OUR_REMOTE, self.spec.source)
        commit = self._fetch()
        self._git("checkout", "--quiet", "--detach", commit, network=True)
        if parts := foreign_engine(self.spec.engine).submodules:
            words = ("submodule", "update", "--quiet", "--init", "--depth=1", "--", *parts)
            self._git(*words, network=True)
        found = self._git("rev-parse", "--verify", "HEAD").strip()
        if found != commit:
            raise TrainkitError(
                f"{self.spec.source}: git checked out {found} instead of {commit}",
                exit=Exit.STAGE_FAILED,
                hint="run it again",
            )
        return commit

    def _fetch(self) -> str:
        """Fetch the revision's one commit; returns it."""
        revision = self.spec.revision or "HEAD"
        try:  # a server finds a short hash among none of its names
            return self._fetch_one(revision)
        except GitFailed as error:
            if not ABBREVIATED.fullmatch(revision):
                raise self._failure(error) from None
        try:
            commit = self._whole_hash(revision)
            with contextlib.suppress(GitFailed):  # a server may give only what has a name
                return self._fetch_one(commit)
            self._fetch_all(self.folder, "blob:none")
        except GitFailed as error:
            raise self._failure(error) from None
        return commit

    def _fetch_one(self, name: str) -> str:
        words = ("fetch", "--quiet", "--no-tags", "--depth=1", OUR_REMOTE, name)
        self._git(*words, network=True)
        return self._git("rev-parse", "--verify", "FETCH_HEAD^{commit}").strip()

    def _fetch_all(self, folder: Path, left_out: str) -> None:
        """All branches and tags, without objects that are fetched when they are needed."""
        every = "+refs/heads/*:refs/remotes/origin/*"
        words = ("fetch", "--quiet", "--tags", f"--filter={left_out}", OUR_REMOTE, every)
        self._git(*words, network=True, folder=folder)

    def _whole_hash(self, beginning: str) -> str:
        """The commit whose hash begins so: the end of a branch or tag, or any before that, for
        which all commits are fetched, without their files."""
        if len(beginning) == 40:
            return beginning
        listed = self._git("ls-remote", "--heads", "--tags", OUR_REMOTE, network=True)
        ends = re.findall(rf"^({beginning}[0-9a-f]*)\trefs/heads/", listed, re.MULTILINE)
        if len(set(ends)) == 1 and len(beginning) >= SURE:
            return str(ends[0])
        probe = self.folder / ".git" / "probe"
        probe.mkdir()
        self._git("init", "--quiet", "--bare", "--template=", folder=probe)
        self._git("remote", "add", OUR_REMOTE, self.spec.source, folder=probe)
        self._fetch_all(probe, "tree:0")
        try:
            words = ("rev-parse", "--verify", f"{beginning}^{{commit}}")
            return self._git(*words, folder=probe).strip()
        except GitFailed as error:
            if "ambiguous" not in str(error):
                raise self._no_such_revision() from None
            raise TrainkitError(
                f"{self.spec.source}: several commits begin with {beginning}",
                exit=Exit.STAGE_FAILED,
                hint="write more of its characters",
            ) from None
        finally:
            remove(probe)

    def _failure(self, error: GitFailed) -> TrainkitError:
        """What to raise where git cannot fetch."""
        said = str(error)
        if "couldn't find remote ref" in said.lower():
            return self._no_such_revision()
        known = (each for each in _REASONS if re.search(each[0], said, re.IGNORECASE))
        _, meaning, hint = next(known, ("", "git failed", "try `git ls-remote URL` by hand"))
        last = " / ".join(line for line in said.splitlines()[-3:] if line)
        return TrainkitError(
            f"{without_passwords(self.spec.source)} cannot be cloned: {meaning}: {last}",
            exit=Exit.STAGE_FAILED,
            hint=hint,
        )

    def _no_such_revision(self) -> TrainkitError:
        names: list[str] = []
        with contextlib.suppress(GitFailed):
            listed = self._git("ls-remote", "--heads", "--tags", OUR_REMOTE, network=True)
            names = re.findall(r"\trefs/(?:heads|tags)/(.+?)(?:\^\{\})?\n", listed)
        near = closest_name(str(self.spec.revision), names)
        hint = f"did you mean '{near}'?" if near else "it is a commit, a tag or a branch"
        if not self.spec.revision:
            hint = "it is empty: it has no HEAD"
        return TrainkitError(
            f"{without_passwords(self.spec.source)} has no revision"
            f" '{self.spec.revision or 'HEAD'}'",
            exit=Exit.STAGE_FAILED,
            hint=hint,
        )


def work(value: Mapping[str, Any], progress: ProgressCallback) -> dict[str, object]:
    """Clone a tree, or look at a folder. Returns {"commit", "changed", "diff"}: what git knows of
    it, None and nothing where it does not."""
    spec = CloneSpec.from_json(value)
    refuse_credentials(EngineSource(name=spec.engine, source=spec.source))
    if spec.clone:
        return {"commit": _Clone(spec).run(), "changed": [], "diff": ""}
    with _stage_error():
        _check_folder(spec)
        state = tree_state(spec.tree)
        if state is None:
            return {"commit": None, "changed": [], "diff": ""}
        diff = tree_diff(spec.tree) if state.changed else ""
    return {"commit": state.commit, "changed": list(state.changed), "diff": diff[:DIFF_LIMIT]}


if __name__ == "__main__":
    run_unit(work)
