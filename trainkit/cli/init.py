"""The task `init`: a first jobs.toml for your own text."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from trainkit.base.documents import document
from trainkit.base.errors import ConfigError
from trainkit.base.files import write_text
from trainkit.cli.wrapper import TaskContext, TaskResult
from trainkit.jobs.json_schema import json_schema
from trainkit.jobs.layers import JOBS_FILE

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
