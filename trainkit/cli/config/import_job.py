"""The task `import`: another engine's configuration as a job."""

from __future__ import annotations

import re
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from trainkit.base.documents import document
from trainkit.base.errors import ConfigError
from trainkit.base.files import write_text
from trainkit.cli.wrapper import TaskContext, TaskResult
from trainkit.engines.imported import ImportedJob, ImportRequest
from trainkit.engines.options import tables_of
from trainkit.engines.registry import PLACES, foreign_engine
from trainkit.jobs.job_tables import EngineSource
from trainkit.jobs.messages import suggest

IMPORTED = EngineSource.NAMES
LOOKED_AT = 2**16  # bytes of a file in which a word says whose it is


@dataclass(frozen=True)
class ImportOptions:
    """What is imported.

    Args:
        file: one, a folder, or several YAML files with "," between; KEY=VALUE after it are the
            words of the launcher's command line, or variables of a script's caller.
        engine: its name in jobs.toml; "": as the file's ending says.
        version: whose options; "": the newest known, of NeMo as the file looks.
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


def import_job(task: TaskContext, request: ImportOptions) -> TaskResult:
    """The task `import`.

    Raises ConfigError (exit 3): a file cannot be read or is no such configuration, the version is
    not known, or the file to write is there already.
    """
    paths = [task.folder / name for name in request.file.split(",") if "=" not in name]
    words = [word for word in request.file.split(",") if "=" in word]
    if not paths:
        raise ConfigError(f"'{request.file}' names no file", hint="FILE, or FILE,KEY=VALUE")
    engine = request.engine or engine_of(paths[0])
    if engine not in IMPORTED:
        raise ConfigError(f"--engine '{engine}' cannot be imported", hint=suggest(engine, IMPORTED))
    version = _version(engine, request.version)
    asked = ImportRequest(tuple(paths), tuple(words), request.name, version)
    imported = foreign_engine(engine).import_job(asked)
    name = imported.name
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


def engine_of(path: Path) -> str:
    """Which engine's a file is, by what it has in it."""
    text = ""  # of what cannot be read: reading it says why
    if not path.is_dir():
        with suppress(OSError), path.open(encoding="utf-8", errors="replace") as file:
            text = file.read(LOOKED_AT)
    others = (name for name in PLACES if name in IMPORTED)
    return next(name for name in others if foreign_engine(name).is_its_file(path, text))


def _version(engine: str, asked: str) -> str:
    """The version asked for. Raises ConfigError: no table fits it."""
    known = list(tables_of(engine))
    # one more version of an engine that numbers them so has the nearest older table
    numbered = re.compile(r"(core-)?\d+\.\d+\.\d+(rc\d+)?")
    near = numbered.fullmatch(known[-1]) and numbered.fullmatch(asked)
    if asked and asked not in known and not near:
        raise ConfigError(f"--version '{asked}' is not known", hint=suggest(asked, known))
    return asked


def _write(task: TaskContext, path: Path, text: str, imported: ImportedJob) -> None:
    if path.exists():
        raise ConfigError(f"{path} is there already", hint="give --out another name")
    write_text(path, text)
    task.say(f"wrote {path}")
    for each in imported.not_taken:
        task.say(f"  not taken: {each}")
