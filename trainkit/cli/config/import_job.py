"""The task `import`: another engine's configuration as a job."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from trainkit.base.documents import document
from trainkit.base.errors import ConfigError
from trainkit.base.files import write_text
from trainkit.cli.wrapper import TaskContext, TaskResult
from trainkit.engines.gpt_neox.import_yaml import import_neox
from trainkit.engines.imported import ImportedJob
from trainkit.engines.megatron_lm.import_script import import_megatron, read_script
from trainkit.engines.options import load_table, tables_of
from trainkit.jobs.messages import suggest

YAML = (".yml", ".yaml")
IMPORTED = ("gpt-neox", "megatron-lm")


@dataclass(frozen=True)
class ImportRequest:
    """What is imported.

    Args:
        file: one, or several YAML files with "," between.
        engine: its name in jobs.toml; "": as the file's ending says.
        version: whose options; "": the newest known.
        name: of the job; "": the file's.
        cluster: the job's; "": it is left open.
        out: where it is written; "": on stdout.
    """

    file: str
    engine: str
    version: str
    name: str
    cluster: str
    out: str


def import_job(task: TaskContext, request: ImportRequest) -> TaskResult:
    """The task `import`.

    Raises ConfigError (exit 3): a file cannot be read or is no such configuration, the version is
    not known, or the file to write is there already.
    """
    paths = [task.folder / name for name in request.file.split(",")]
    engine = request.engine
    if not engine:
        engine = "gpt-neox" if paths[0].suffix in YAML else "megatron-lm"
    if engine not in IMPORTED:
        raise ConfigError(f"--engine '{engine}' cannot be imported", hint=suggest(engine, IMPORTED))
    name = request.name or re.sub(r"[^a-z0-9_-]+", "-", paths[0].stem.lower()).strip("-_")
    imported = _imported(engine, paths, name, request.version)
    text = imported.to_toml(request.cluster)
    if request.out:
        _write(task, task.folder / request.out, text, imported)
    else:
        task.say(text.rstrip("\n"))
    result = document(
        "import/1",
        job=name,
        engine=engine,
        not_taken=list(imported.not_taken),
        toml=text,
        file=request.out or None,
    )
    return TaskResult(result)


def _imported(engine: str, paths: list[Path], name: str, version: str) -> ImportedJob:
    if engine == "gpt-neox":
        return import_neox(paths, name)
    if len(paths) > 1:
        raise ConfigError(
            "a script of Megatron-LM is one file", hint="several files are GPT-NeoX's YAML"
        )
    known = list(tables_of(engine))
    if version and version not in known:
        raise ConfigError(f"--version '{version}' is not known", hint=suggest(version, known))
    return import_megatron(read_script(paths[0]), name, load_table(engine, version or known[-1]))


def _write(task: TaskContext, path: Path, text: str, imported: ImportedJob) -> None:
    if path.exists():
        raise ConfigError(f"{path} is there already", hint="give --out another name")
    write_text(path, text)
    task.say(f"wrote {path}")
    for each in imported.not_taken:
        task.say(f"  not taken: {each}")
