"""Where a run comes from: commit, uncommitted changes, versions, environment. Secrets by name
only."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from trainkit.base.documents import document, utc_now
from trainkit.base.errors import TrainkitError
from trainkit.base.files import write_json, write_text
from trainkit.base.git import GitFailed, git_answer, tree_diff, tree_state
from trainkit.base.lazy_dataclasses import dataclass
from trainkit.base.redact import Redactor
from trainkit.runs.folder import RunFolder

DIFF_LIMIT = 2**24  # bytes of uncommitted changes kept; more is not a change but data
FIELD = re.compile(r"^(Name|Version):[ \t]*(.*?)[ \t]*$", re.MULTILINE)
HIDDEN = ("KEY", "TOKEN", "SECRET", "PASSWORD", "PASSWD", "CREDENTIAL", "AUTH", "COOKIE")


def _printable(text: str) -> str:
    """Without bytes that are not UTF-8, which git's answer holds as surrogates."""
    return text.encode(errors="surrogateescape").decode(errors="replace")


def package_versions() -> dict[str, str]:
    """Every installed distribution and its version: of two, the one that is imported.

    Only the head of each file is read (packaging.python.org, core metadata: `Name: ...` and
    `Version: ...`, a line each): Distribution.metadata parses the description below it too, which
    takes ten times as long, at every start.
    """
    found: dict[str, str] = {}
    for distribution in importlib.metadata.distributions():
        text = distribution.read_text("METADATA") or distribution.read_text("PKG-INFO") or ""
        fields = dict(FIELD.findall(text.partition("\n\n")[0]))
        if "Name" in fields:
            found.setdefault(fields["Name"], fields.get("Version", ""))
    return dict(sorted(found.items()))


def printable_environment(
    environment: Mapping[str, str], secret_names: Iterable[str]
) -> dict[str, str | None]:
    """The environment with values of secrets, named ones and what looks like one, left out
    (None)."""
    names = set(secret_names)
    return {
        k: None if k in names or any(word in k.upper() for word in HIDDEN) else v
        for k, v in sorted(environment.items())
    }


@dataclass(frozen=True)
class EngineTree:
    """The tree of an engine that is not trainkit's own.

    Args:
        name: the [engines.X] table.
        source: its git URL or folder, as jobs.toml has it.
        revision: the same of its revision.
        tree: the folder that the ranks run.
    """

    name: str
    source: str
    revision: str | None
    tree: Path


def _engine(run: RunFolder, engine: EngineTree, redactor: Redactor) -> dict[str, object]:
    """What is known of the engine's tree; its changes go to engine.diff. A tree that is not here,
    or that git knows nothing of, has no commit."""
    words: dict[str, object] = {**vars(engine), "tree": str(engine.tree)}
    nothing = {"commit": None, "changed": None, "diff": None, "diff_bytes": None}
    try:
        state = tree_state(engine.tree) if engine.tree.is_dir() else None
        diff = tree_diff(engine.tree) if state is not None and state.changed else ""
    except (GitFailed, TrainkitError) as error:
        return {**words, **nothing, "error": redactor.text(str(error))}
    if state is None:
        return {**words, **nothing}
    return {
        **words,
        "commit": state.commit,
        "changed": list(state.changed[:1000]),
        "diff": _keep(diff, run.engine_diff, redactor),
        "diff_bytes": len(diff),
    }


def _keep(diff: str, path: Path, redactor: Redactor) -> str | None:
    """Write uncommitted changes without secrets: the file's name; None where there are none, or
    too many."""
    if not 0 < len(diff) <= DIFF_LIMIT:
        return None
    write_text(path, redactor.text(_printable(diff)))
    return path.name


def write_origin(
    run: RunFolder,
    project: Path,
    code_sha256: str,
    secrets: Mapping[str, str],
    left_out: Sequence[Mapping[str, Any]] = (),
    engine: EngineTree | None = None,
    image: Mapping[str, object] | None = None,
    *,
    started: str = "",
) -> None:
    """Write origin.json and, where the project or the engine's tree is a git checkout with
    uncommitted changes, origin.diff and engine.diff.

    Args:
        run: the run.
        project: the folder of jobs.toml.
        code_sha256: of the code snapshot.
        secrets: names and values; the values are written nowhere, not even where a diff holds
            them.
        left_out: files of the project that the snapshot lacks.
        engine: the tree that the ranks run, where that is not trainkit.
        image: the record image/1 of the image they run in, where trainkit has made it.
        started: when the run was asked for, ISO 8601; "": now.
    """
    redactor = Redactor(secrets.values())
    diff = git_answer(project, "diff", "HEAD", "--no-color", "--no-ext-diff")
    commit = git_answer(project, "rev-parse", "HEAD")
    untracked = git_answer(project, "ls-files", "--others", "--exclude-standard")
    value = document(
        "origin/1",
        started=started or utc_now(),
        project=str(project),
        git_commit=commit.strip() if commit else None,
        git_diff=_keep(diff or "", run.diff, redactor),
        git_diff_bytes=len(diff) if diff is not None else None,
        git_untracked=_printable(untracked).splitlines()[:1000] if untracked is not None else None,
        code_sha256=code_sha256,
        code_left_out=list(left_out),
        engine=_engine(run, engine, redactor) if engine is not None else None,
        image=image,
        host=platform.node(),
        platform=platform.platform(),
        python=sys.version.split()[0],
        executable=sys.executable,
        packages=package_versions(),
        environment={
            k: v and redactor.text(v) for k, v in printable_environment(os.environ, secrets).items()
        },
    )
    write_json(run.origin, value, permissions=0o600)
