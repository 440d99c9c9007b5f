"""Where the tree of a foreign engine lies, what version it is, and which Python runs it.

Nothing of a tree is executed here: versions are read from its text.
"""

from __future__ import annotations

import ast
import hashlib
import re
import sys
from collections.abc import Callable
from pathlib import Path

from trainkit.base.errors import ConfigError
from trainkit.base.git import holds_password, without_passwords
from trainkit.jobs.schema import EngineSource, Job
from trainkit.runs.origin import EngineTree

# engines whose trees these rules know
LAUNCHED = ("gpt-neox", "megatron-lm", "nemo", "neuronx-nemo")
# what every tree of an engine holds, whatever its version
ENTRY_FILES: dict[str, tuple[str, ...]] = {
    "gpt-neox": ("train.py", "deepy.py"),
    "megatron-lm": ("pretrain_gpt.py",),
    "nemo": ("examples/nlp/language_modeling/megatron_gpt_pretraining.py", "nemo/package_info.py"),
    "neuronx-nemo": (
        "build.sh",
        "nemo/examples/nlp/language_modeling/megatron_gpt_pretraining.py",
    ),
}
NEMO_RELEASES = ((1, 12), (2, 1))  # of bignlp 22.09 and of 24.12
BEFORE_CORE = "2021"  # Megatron-LM without megatron/core/package_info.py (before May 2023)
_URL = re.compile(r"[a-zA-Z][a-zA-Z0-9+.-]*://.+")
_SCP = re.compile(r"(\w[\w.-]*@)?\w[\w.-]*:(?!:).+")  # USER@HOST:PATH, as git takes it
_SAFE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*")
# GPT-NeoX 1.0 has its own DeeperSpeed of 2021; README, "Versions"
_NEOX_1_DEEPSPEED = re.compile(
    r"git\+git://github\.com/EleutherAI/DeeperSpeed|DeeperSpeed\.git@eb7f5cff3667"
)


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
    return Path(job.cluster.root or ".").absolute() / "engines"


def _below(job: Job, path: str) -> Path:
    """A path of [engines.X]; a relative one is below the cluster's root."""
    return Path(job.cluster.root or ".").absolute() / Path(path).expanduser()


def in_image(job: Job) -> bool:
    """Whether the tree is a folder that only the job's image holds."""
    return (
        job.container is not None
        and not is_url(source_of(job).source)
        and not source_tree(job).exists()
    )


def version_of_tree(job: Job, engine: str, of_revision: Callable[[str], str | None]) -> str | None:
    """Whose options a job's tree has: what [engines.X] says, what its commit, tag or branch is,
    what the tree says. None where the tree is still to be cloned and its revision says nothing.

    Args:
        job: the job.
        engine: its engine.
        of_revision: the version that a revision is known to be.

    Raises ConfigError: the job names no source, or the tree is none of the engine.
    """
    source = source_of(job)
    if source.version is not None:
        return source.version
    if source.revision is not None and is_url(source.source):
        known = of_revision(source.revision)
        if known is not None:
            return known
    tree = source_tree(job)
    if tree.exists() or not is_url(source.source):
        return engine_version(tree, engine)
    return None


def engine_version(tree: Path, engine: str) -> str:
    """What version a tree is, read from its text: "core-0.12.0" or "2021" for Megatron-LM,
    "2.0.0" or "1.0.0" for GPT-NeoX, "2.21" or "2.13.1" for neuronx-nemo-megatron,
    "22.09" or "24.12" for the NeMo of those launchers.

    Raises ConfigError (exit 3) where the folder is missing or holds no such engine.
    """
    if not tree.is_dir():
        raise ConfigError(
            f"the tree of {engine} is not at {tree}",
            hint=(
                "`invoke train` clones it where engines.X.source is a URL; a folder has to be there"
                " (one inside an image cannot be read from here: set engines.X.version)"
            ),
        )
    if missing := [name for name in ENTRY_FILES[engine] if not (tree / name).is_file()]:
        raise ConfigError(
            f"{tree} is no tree of {engine}: it has no {missing[0]}",
            hint=f"set engines.X.source to the top folder of {engine}, or to its git URL",
        )
    if engine == "gpt-neox":
        version = _neox_version(tree)
    elif engine == "nemo":
        version = _nemo_version(tree)
    elif engine == "neuronx-nemo":
        version = _neuronx_version(tree)
    else:
        version = _megatron_version(tree)
    if version is None:
        raise ConfigError(
            f"{tree} does not say which version of {engine} it is",
            hint="set engines.X.version to the table of options that fits it",
        )
    return version


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _megatron_version(tree: Path) -> str | None:
    """core-MAJOR.MINOR.PATCH of megatron/core/package_info.py; "2021" where there is none."""
    core = tree / "megatron" / "core" / "package_info.py"
    if not core.is_file():
        if (tree / "megatron").is_dir():
            return BEFORE_CORE
        return None
    numbers = _constants(_text(core))
    parts = [numbers.get(name) for name in ("MAJOR", "MINOR", "PATCH")]
    if all(isinstance(part, int) for part in parts):
        return "core-" + ".".join(str(part) for part in parts)
    return None


def _constants(text: str) -> dict[str, object]:
    """NAME = literal, as a module's top level has them."""
    found: dict[str, object] = {}
    try:
        module = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return found
    for statement in module.body:
        if isinstance(statement, ast.Assign) and isinstance(statement.value, ast.Constant):
            for target in statement.targets:
                if isinstance(target, ast.Name):
                    found[target.id] = statement.value.value
    return found


def _neox_version(tree: Path) -> str | None:
    """CITATION.cff's version since October 2023; it was 0.0.1 before, whatever the tree: there
    the DeepSpeed that it requires tells 1.0 from 2.0."""
    said = re.search(r'^version:\s*"?([0-9][0-9.]*)"?\s*$', _text(tree / "CITATION.cff"), re.M)
    if said and said[1] != "0.0.1":
        return said[1]
    required = [
        line
        for line in _text(tree / "requirements" / "requirements.txt").splitlines()
        if "deepspeed" in line.lower()
    ]
    if not required:
        return None
    if any(_NEOX_1_DEEPSPEED.search(line) for line in required):
        return "1.0.0"
    return "2.0.0"


def _nemo_version(tree: Path) -> str | None:
    """The launcher's release that a NeMo (nemo/package_info.py) belongs to; one between two of
    them as "22.09-nemo-1.20.0": the older one's, which it is newer than."""
    numbers = _constants(_text(tree / "nemo" / "package_info.py"))
    parts = [numbers.get(name) for name in ("MAJOR", "MINOR", "PATCH")]
    if not all(isinstance(part, int) for part in parts):
        return None
    launcher = "24.12" if parts[0] == 2 else "22.09"
    if tuple(parts[:2]) in NEMO_RELEASES:
        return launcher
    return f"{launcher}-nemo-{'.'.join(str(part) for part in parts)}"


def _neuronx_version(tree: Path) -> str | None:
    """Its scripts tell: train_setup.sh came with the second generation of them."""
    scripts = tree / "nemo" / "examples" / "nlp" / "language_modeling"
    if (scripts / "train_setup.sh").is_file():
        return "2.21"
    if "--distribution-strategy=nemo" in _text(scripts / "test.sh"):
        return "2.13.1"
    return None


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
