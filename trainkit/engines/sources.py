"""Where the tree of a foreign engine lies, what version it is, and which Python runs it.

Nothing of a tree is executed here: versions are read from its text.
"""

from __future__ import annotations

import ast
import hashlib
import re
import sys
from pathlib import Path

from trainkit.base.errors import ConfigError
from trainkit.base.git import holds_password, without_passwords
from trainkit.jobs.schema import EngineSource, Job
from trainkit.runs.origin import EngineTree

_URL = re.compile(r"[a-zA-Z][a-zA-Z0-9+.-]*://.+")
_SCP = re.compile(r"(\w[\w.-]*@)?\w[\w.-]*:(?!:).+")  # USER@HOST:PATH, as git takes it
_SAFE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*")


def source_of(job: Job) -> EngineSource:
    """The [engines.X] table of a job with a foreign engine. Raises ConfigError (exit 3) where
    there is none."""
    if job.engine_source is None:
        hint = f"add [engines.{job.engine}] with source = a git URL and revision, or a folder"
        raise ConfigError(
            f"jobs.{job.name}: no [engines.X] table says where engine = '{job.engine}' comes from",
            hint=hint,
        )
    return job.engine_source


def is_url(source: str) -> bool:
    """Whether a source is cloned by git: SCHEME://..., or USER@HOST:PATH. Else it is a folder."""
    return bool(_URL.fullmatch(source) or _SCP.fullmatch(source))


def folder_part(revision: str) -> str:
    """A revision as a part of a folder's name: characters that are not safe there become '-',
    and a hash keeps two of them apart."""
    if _SAFE.fullmatch(revision) and len(revision) <= 80:
        return revision
    digest = hashlib.sha256(revision.encode("utf-8", "surrogateescape")).hexdigest()[:8]
    safe = re.sub(r"[^A-Za-z0-9._-]+", "-", revision).strip("-.")[:60]
    return f"{safe}-{digest}".lstrip("-")


def source_tree(job: Job) -> Path:
    """The folder that holds the engine's tree, whether it is there already or not: the folder
    that the source names, or <root>/engines/<X>-<revision> for a URL.

    Raises ConfigError (exit 3) where the job names no source, or a URL that holds a password.
    """
    source = source_of(job)
    refuse_credentials(source)
    if is_url(source.source):
        name = f"{source.name}-{folder_part(source.revision or 'HEAD')}"
        return engines_root(job) / name
    return _below(job, source.source)


def engine_tree(job: Job) -> EngineTree | None:
    """The tree that the job's ranks run, for the run's origin.json; None for trainkit's own
    engine."""
    source = job.engine_source
    if job.is_native or source is None:
        return None
    return EngineTree(source.name, source.source, source.revision, source_tree(job))


def refuse_credentials(source: EngineSource) -> None:
    """Raise ConfigError (exit 3) for a URL with a password or token in it: it would be written
    into job.json, stamps and logs."""
    if holds_password(source.source):
        shown = without_passwords(source.source)
        raise ConfigError(
            f"engines.{source.name}.source = '{shown}' holds a user or password, which would be"
            " written into every run's records",
            hint=(
                "write the URL without it: git asks its own credential helper (git help"
                " credentials), or use ssh"
            ),
        )


def engines_root(job: Job) -> Path:
    """<root>/engines: trees that trainkit cloned, and what it compiled for them."""
    return job.cluster.root_folder.absolute() / "engines"


def _below(job: Job, path: str) -> Path:
    """A path of [engines.X]; a relative one is below the cluster's root."""
    return job.cluster.root_folder.absolute() / Path(path).expanduser()


def in_image(job: Job) -> bool:
    """Whether the tree is a folder that only the job's image holds."""
    return (
        job.container is not None
        and not is_url(source_of(job).source)
        and not source_tree(job).exists()
    )


def text_of(path: Path) -> str:
    """A file of a tree; "" where it cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def package_version(path: Path) -> tuple[int, ...] | None:
    """MAJOR, MINOR and PATCH of a package_info.py; None where it does not say all three."""
    found: dict[str, object] = {}
    try:
        module = ast.parse(text_of(path))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    for statement in module.body:
        if isinstance(statement, ast.Assign) and isinstance(statement.value, ast.Constant):
            for target in statement.targets:
                if isinstance(target, ast.Name):
                    found[target.id] = statement.value.value
    parts = [found.get(name) for name in ("MAJOR", "MINOR", "PATCH")]
    numbers = tuple(part for part in parts if isinstance(part, int))
    return numbers if len(numbers) == len(parts) else None


def engine_python(job: Job) -> Path | str:
    """The interpreter that has the engine's requirements: that of engines.X.venv,
    engines.X.python, the image's, the cluster's. A name is looked for on PATH, there where it
    runs.

    Raises ConfigError (exit 3) where the job names no source, or a venv beside an image.
    """
    source = source_of(job)
    if source.venv:
        if job.container is not None:
            raise ConfigError(
                f"engines.{source.name}.venv = '{source.venv}' is a folder of this machine's"
                f" Python, and the ranks of jobs.{job.name} run in the image"
                f" {job.container.image}",
                hint="remove venv, and set python to the image's interpreter if it is another",
            )
        return venv_folder(job) / "bin" / "python"
    if source.python and "/" in source.python and job.container is None:
        return _below(job, source.python)
    if source.python:
        return source.python
    if job.container is not None:
        return job.container.python
    return cluster_python(job)


def cluster_python(job: Job) -> Path:
    """The Python that trainkit itself runs with on the cluster's nodes."""
    if job.cluster.launcher_traits.one_machine or job.cluster.python is None:
        return Path(sys.executable)
    return Path(job.cluster.python)


def venv_folder(job: Job) -> Path:
    """The folder of engines.X.venv, which has to be given."""
    venv = source_of(job).venv
    assert venv, "only where a venv is given"
    return _below(job, venv)
