"""The task `init`: the first jobs.toml of a folder, for text of one's own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from trainkit.base.documents import document
from trainkit.base.errors import ConfigError
from trainkit.base.files import write_text
from trainkit.cli.wrapper import TaskContext, TaskResult
from trainkit.jobs.json_schema import json_schema
from trainkit.jobs.layers import JOBS_FILE

SCHEMA_FILE = "jobs.schema.json"
TASKS_FILE = "tasks.py"
TASKS = "from trainkit.cli.tasks import namespace  # noqa: F401\n"
PEEK = 2**20  # bytes of a line that are looked at for its keys
TEXT = """\
#:schema {schema}
# The experiments of this folder. `{command} jobs` lists them, `{command} plan mine` says what one
# needs, `{command} train mine` runs it.

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
description = "a small GPT on text of our own"
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


def init(task: TaskContext, patterns: list[str], vocab: int) -> TaskResult:
    """The task `init`. Raises ConfigError where there is a jobs.toml already."""
    folder = Path.cwd()
    if (folder / JOBS_FILE).exists():
        raise ConfigError(
            f"{folder / JOBS_FILE} is there already",
            hint=f"`{task.command} jobs` lists its jobs; init writes the first one only",
        )
    wanted = patterns or ["corpus/*.jsonl"]
    files = [path for pattern in wanted for path in _matches(folder, pattern)]
    values = {
        "command": task.command,
        "schema": f"./{SCHEMA_FILE}",
        "vocab": vocab,
        "paths": ", ".join(map(json.dumps, wanted)),
        "key": _key_line(files),
    }
    texts = {
        JOBS_FILE: TEXT.format(**values),
        SCHEMA_FILE: json.dumps(json_schema(), indent=1) + "\n",
        TASKS_FILE: TASKS,
    }
    texts = {name: text for name, text in texts.items() if not (folder / name).exists()}
    for name, text in texts.items():
        task.say(f"{'would write' if task.dry_run else 'wrote'} {folder / name}")
        if not task.dry_run:
            write_text(folder / name, text)
    if task.dry_run and not task.json:
        task.say("\n" + texts[JOBS_FILE])
    if not files:
        task.say(
            f"no file matches {' or '.join(wanted)} yet: put text there, or change"
            f" datasets.mine.paths in {JOBS_FILE}"
        )
    task.say(f"next:\n  {task.command} plan mine\n  {task.command} train mine")
    told: dict[str, Any] = {"folder": str(folder), "files": sorted(texts), "texts": len(files)}
    return TaskResult(document("init/1", dry_run=task.dry_run, **told))


def _matches(folder: Path, pattern: str) -> list[Path]:
    """Files that a pattern means. Raises ConfigError for one that cannot be a pattern."""
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
    """The line text_key = ... where the first document has its text under another key than
    "text"."""
    first = next((path for path in files if path.suffix in (".jsonl", ".json")), None)
    if first is None:
        return ""
    try:
        with open(first, "rb") as file:
            value = json.loads(file.readline(PEEK))
    except (OSError, ValueError):
        return ""
    if isinstance(value, dict):
        texts = {key: text for key, text in value.items() if isinstance(text, str)}
    else:
        texts = {}
    if not texts or "text" in texts:
        return ""
    return (
        "text_key ="
        f" {json.dumps(max(texts, key=lambda key: len(texts[key])), ensure_ascii=False)}\n"
    )
