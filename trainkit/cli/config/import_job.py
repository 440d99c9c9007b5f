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
from trainkit.engines.gpt_neox.import_yaml import import_neox
from trainkit.engines.imported import ImportedJob
from trainkit.engines.megatron_lm.import_script import import_megatron, read_script
from trainkit.engines.nemo.import_config import import_nemo
from trainkit.engines.neuronx_nemo.argv import SCRIPT
from trainkit.engines.neuronx_nemo.import_script import import_neuronx, read_scripts
from trainkit.engines.options import load_table, tables_of
from trainkit.jobs.messages import suggest

YAML = (".yml", ".yaml")
IMPORTED = ("gpt-neox", "megatron-lm", "nemo", "neuronx-nemo")
NUMBERED = ("gpt-neox", "megatron-lm")  # one more version of these has the nearest older table
LOOKED_AT = 2**16  # bytes of a file in which a word says whose it is


@dataclass(frozen=True)
class ImportRequest:
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


def import_job(task: TaskContext, request: ImportRequest) -> TaskResult:
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
    imported = _imported(engine, paths, words, request)
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
    if path.is_dir():
        return "nemo"
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            text = file.read(LOOKED_AT)
    except OSError:
        text = ""  # reading it says why
    if path.suffix in YAML:
        return "nemo" if re.search(r"^(trainer|cluster_type):", text, re.M) else "gpt-neox"
    with suppress(ConfigError):  # reading it says why
        if SCRIPT in read_scripts(path):
            return "neuronx-nemo"
    return "megatron-lm"


def _imported(
    engine: str, paths: list[Path], words: list[str], request: ImportRequest
) -> ImportedJob:
    known = list(tables_of(engine))
    version = request.version
    numbered = engine in NUMBERED and re.fullmatch(r"(core-)?\d+\.\d+\.\d+(rc\d+)?", version)
    if version and version not in known and not numbered:
        raise ConfigError(f"--version '{version}' is not known", hint=suggest(version, known))
    name = request.name or re.sub(r"[^a-z0-9_-]+", "-", paths[0].stem.lower()).strip("-_")
    if engine == "gpt-neox":
        _refuse_words(words, "GPT-NeoX's files")
        return import_neox(paths, name, version)
    if len(paths) > 1:
        raise ConfigError(f"{engine} has one file", hint="several files are GPT-NeoX's YAML")
    if engine == "nemo":
        return import_nemo(paths[0], words, request.name, version)
    if engine == "neuronx-nemo":
        return import_neuronx(paths[0], words, name, version)
    _refuse_words(words, "a script of Megatron-LM")
    return import_megatron(read_script(paths[0]), name, load_table(engine, version or known[-1]))


def _refuse_words(words: list[str], what: str) -> None:
    if words:
        raise ConfigError(f"'{words[0]}': {what} takes no KEY=VALUE", hint="change the file")


def _write(task: TaskContext, path: Path, text: str, imported: ImportedJob) -> None:
    if path.exists():
        raise ConfigError(f"{path} is there already", hint="give --out another name")
    write_text(path, text)
    task.say(f"wrote {path}")
    for each in imported.not_taken:
        task.say(f"  not taken: {each}")
