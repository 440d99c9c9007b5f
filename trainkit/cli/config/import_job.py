"""The tasks that write jobs: `init`, a first jobs.toml for your own text; `import`, a job from
another engine's configuration."""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from trainkit.base.documents import document
from trainkit.base.errors import ConfigError
from trainkit.base.extras import MissingExtra
from trainkit.base.files import write_text
from trainkit.base.lazy_dataclasses import asdict, dataclass, replace
from trainkit.base.toml_text import toml_table
from trainkit.cli.wrapper import TaskContext, TaskResult
from trainkit.engines.imported import ImportedJob, ImportRequest, job_name
from trainkit.engines.options import tables_of
from trainkit.engines.registry import PLACES, foreign_engine
from trainkit.jobs.import_pods import PodManifest, read_manifest
from trainkit.jobs.job_tables import EngineSource
from trainkit.jobs.json_schema import json_schema
from trainkit.jobs.layers import JOBS_FILE
from trainkit.jobs.messages import suggest

SCHEMA_FILE = "jobs.schema.json"
TASKS_FILE = "tasks.py"
TASKS = "from trainkit.cli.tasks import namespace  # noqa: F401\n"
MAX_LINE = 2**20  # bytes of the first line that are read for its keys
TEXT = """\
#:schema {schema}
# The experiments of this folder. `{command} jobs` lists them, `{command} plan mine` estimates what
# one needs, `{command} train mine` runs it.

[defaults]
job = "mine"

[clusters.here]
launcher = "local"
device = "cpu"                # or a GPU: a100-sxm-80gb, h100-sxm-80gb, ...
ranks_per_node = 2

[tokenizers.mine]
type = "bpe"                  # trained on your text; or: type = "file", path = "tokenizer.json"
vocab_size = {vocab}

[datasets.mine]
source = "files"
paths = [{paths}]
{key}tokenizer = "mine"
split = "90,10,0"             # training, validation, test

[models.small]
family = "gpt"                # gpt, gpt-neox or llama
num_layers = 4
hidden_size = 256
num_attention_heads = 4
seq_length = 256

[jobs.mine]
description = "a small GPT on my own text"
cluster = "here"
model = "small"
dataset = "mine"
generate = {{ prompt = "The ", max_new_tokens = 64 }}

[jobs.mine.training]
micro_batch_size = 4
global_batch_size = 16
train_iters = 200
lr = 2e-3
min_lr = 2e-4
lr_warmup_iters = 20
eval_interval = 100
eval_iters = 4
save_interval = 50
"""


@dataclass(frozen=True)
class Initialized:
    """What was written: the document init/1."""

    dry_run: bool
    folder: str
    files: list[str]
    texts: int


def init(task: TaskContext, patterns: Sequence[str], vocab_size: int) -> TaskResult:
    """The task `init`. Raises ConfigError if there is a jobs.toml."""
    folder = Path.cwd()
    if (folder / JOBS_FILE).exists():
        raise ConfigError(
            f"{folder / JOBS_FILE} exists already",
            hint=f"`{task.command} jobs` lists its jobs; init only writes the first one",
        )
    patterns = patterns or ["corpus/*.jsonl"]
    files = [path for pattern in patterns for path in _matches(folder, pattern)]
    contents = {
        JOBS_FILE: TEXT.format(
            command=task.command,
            schema=f"./{SCHEMA_FILE}",
            vocab=vocab_size,
            paths=", ".join(map(json.dumps, patterns)),
            key=_key_line(files),
        ),
        SCHEMA_FILE: json.dumps(json_schema(), indent=1) + "\n",
        TASKS_FILE: TASKS,
    }
    missing = [name for name in contents if not (folder / name).exists()]
    for name in missing:
        task.say(f"{'would write' if task.dry_run else 'wrote'} {folder / name}")
        if not task.dry_run:
            write_text(folder / name, contents[name])
    if task.dry_run and not task.json:
        task.say("\n" + contents[JOBS_FILE])
    if not files:
        task.say(
            f"no file matches {' or '.join(patterns)} yet: put text there, or change"
            f" datasets.mine.paths in {JOBS_FILE}"
        )
    task.say(f"next:\n  {task.command} plan mine\n  {task.command} train mine")
    written = Initialized(task.dry_run, str(folder), sorted(missing), len(files))
    return TaskResult(document("init/1", **asdict(written)))


def _matches(folder: Path, pattern: str) -> list[Path]:
    """Files that match a pattern. Raises ConfigError for an invalid pattern."""
    path = Path(pattern)
    try:
        if path.is_absolute():
            base = Path(path.anchor)
            relative = str(path.relative_to(path.anchor))
        else:
            base = folder
            relative = pattern
        return sorted(found for found in base.glob(relative) if found.is_file())
    except (ValueError, NotImplementedError) as error:
        raise ConfigError(
            f"--text {pattern!r}: {error}", hint="for example --text 'corpus/*.jsonl.zst'"
        ) from None


def _key_line(files: list[Path]) -> str:
    """The line text_key = ... if the first document has its text under another key than "text"."""
    first = next((path for path in files if path.suffix in (".jsonl", ".json")), None)
    if first is None:
        return ""
    try:
        with open(first, "rb") as file:
            value = json.loads(file.readline(MAX_LINE))
    except (OSError, ValueError):
        return ""
    texts: dict[str, str] = {}
    if isinstance(value, dict):
        texts = {key: text for key, text in value.items() if isinstance(text, str)}
    if not texts or "text" in texts:
        return ""
    longest = max(texts, key=lambda key: len(texts[key]))
    return f"text_key = {json.dumps(longest, ensure_ascii=False)}\n"


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


# a list or a table, whose commas part nothing
_WITHIN = re.compile(r"=(\[[^\]]*\]|\{[^}]*\})")


def import_job(task: TaskContext, request: ImportOptions) -> TaskResult:
    """The task `import`.

    Raises ConfigError (exit 3): a file cannot be read or is not such a configuration, the version
    is not known, or the file to write is there already; MissingExtra: a configuration of hydra
    without its libraries.
    """
    parts = [
        part.replace("\0", ",")
        for part in _WITHIN.sub(lambda found: found[0].replace(",", "\0"), request.file).split(",")
    ]
    paths = [task.folder / name for name in parts if "=" not in name]
    words = [word for word in parts if "=" in word]
    if not paths:
        raise ConfigError(f"'{request.file}' names no file", hint="FILE, or FILE,KEY=VALUE")
    manifest = read_manifest(paths[0])
    if manifest is not None:
        return _result(task, request, *_import_pods(request, manifest))
    imported = _import_files(request, tuple(paths), tuple(words), request.name)
    text = imported.to_toml(request.cluster)
    return _result(task, request, text, imported.name, imported.engine, imported.not_taken)


def _result(
    task: TaskContext,
    request: ImportOptions,
    text: str,
    name: str,
    engine: str | None,
    not_taken: Sequence[str],
) -> TaskResult:
    if request.out:
        _write(task, task.folder / request.out, text, not_taken)
    else:
        task.say(text.rstrip("\n"))
    result = document(
        "import/1",
        job=name,
        engine=engine,
        not_taken=list(not_taken),
        toml=text,
        file=request.out or None,
    )
    return TaskResult(result)


def _import_files(
    request: ImportOptions, paths: tuple[Path, ...], words: tuple[str, ...], name: str
) -> ImportedJob:
    engine = request.engine or engine_of(paths[0])
    if engine not in IMPORTED:
        raise ConfigError(f"--engine '{engine}' cannot be imported", hint=suggest(engine, IMPORTED))
    version = _version(engine, request.version)
    return foreign_engine(engine).import_job(ImportRequest(paths, words, name, version))


def _import_pods(
    request: ImportOptions, manifest: PodManifest
) -> tuple[str, str, str | None, Sequence[str]]:
    """The tables of a manifest of Kubernetes, and of the job that its command is, where it is an
    engine's: (text, name, engine, what was not taken)."""
    name = request.name or job_name(manifest.name)
    cluster = request.cluster or name
    mounts = "no volume of its own: it needs one that many nodes mount"
    if volumes := manifest.pods.get("volumes"):
        mounts = f"a folder on one of its volumes, which this machine has too: {volumes}"
    not_taken = [f"clusters.{cluster}.root: {mounts}", *manifest.not_taken]
    tables = [
        *toml_table(("clusters", cluster), manifest.cluster),
        "",
        *toml_table(("clusters", cluster, "kubernetes"), manifest.pods),
    ]
    below = "\n".join(tables) + "\n"
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder, f"{name}.sh")
        write_text(script, manifest.script)
        try:
            imported = _import_files(request, (script,), (), name)
        except MissingExtra:
            raise
        except ConfigError as error:
            why = error.message.replace(str(script), "it")
            not_taken.append(f"command: {manifest.script.splitlines()[-1]}: {why}")
            lines = [f"# not taken: {' '.join(each.split())}" for each in not_taken]
            return "\n".join([*lines, "", below]), name, None, not_taken
    job = {"nodes": manifest.nodes, **imported.job}
    not_taken += imported.not_taken
    imported = replace(imported, job=job, not_taken=tuple(not_taken))
    return f"{imported.to_toml(cluster)}\n{below}", name, imported.engine, not_taken


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


def _write(task: TaskContext, path: Path, text: str, not_taken: Sequence[str]) -> None:
    if path.exists():
        raise ConfigError(f"{path} is there already", hint="give --out another name")
    write_text(path, text)
    task.say(f"wrote {path}")
    for each in not_taken:
        task.say(f"  not taken: {each}")
