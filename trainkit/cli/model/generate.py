"""The task `generate`, with prompts from its command line or a file."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from trainkit.base.documents import document
from trainkit.base.errors import ConfigError
from trainkit.cli.config.jobs import load_jobs
from trainkit.cli.model.tokenizer_warning import warn_of_changed_tokenizer
from trainkit.cli.options import GenerateOptions
from trainkit.cli.tables import Page
from trainkit.cli.wrapper import TaskContext, TaskResult
from trainkit.launch.local_ranks import run_local_ranks
from trainkit.runs.find import find_run


def read_prompts(path: Path) -> list[str]:
    """Prompts of a file: a line is a JSON string, or a JSON object whose key "prompt" holds one.
    Empty lines are ignored.

    Raises ConfigError for the first line that is neither, and for a file without prompts.
    OSError as reading does.
    """
    prompts = []
    try:
        lines = path.read_bytes().decode().split("\n")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8: {error}") from None
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            prompt = json.loads(line)
        except ValueError:
            prompt = None
        if isinstance(prompt, dict):
            prompt = prompt.get("prompt")
        if not isinstance(prompt, str):
            raise ConfigError(
                f'{path}:{number}: neither a JSON string nor {{"prompt": "..."}}: {line[:60]}',
                hint="plain text to JSON lines: jq -R .",
            )
        prompts.append(prompt)
    if not prompts:
        raise ConfigError(f"{path} holds no prompt")
    return prompts


def generate(task: TaskContext, run_name: str, options: GenerateOptions) -> TaskResult:
    """The task `generate`: one text per prompt."""
    from trainkit.train.decoding.sampling import Sampling
    from trainkit.train.inference.generate import generate as continue_prompts

    sampling = Sampling(options.temperature, options.top_k, options.top_p, options.seed)
    prompts = list(options.prompt)
    if options.prompts_file:
        prompts += read_prompts(Path(options.prompts_file))
    run = find_run(load_jobs(task).roots(), run_name)
    warn_of_changed_tokenizer(run)
    step, generations = continue_prompts(
        run,
        prompts or [""],
        sampling,
        max_new_tokens=options.max_new_tokens,
        step=options.step,
        device=options.device,
        ranks=options.tensor_parallel,
        together=run_local_ranks,
    )
    first = generations[0]
    return TaskResult(
        document(
            "generate/1",
            run=run.id,
            step=step,
            prompt=first.prompt,
            text=first.text,
            generations=[asdict(generation) for generation in generations],
        ),
        page=_page([generation.text for generation in generations]),
    )


def _page(texts: Sequence[str]) -> Page:
    for number, text in enumerate(texts, start=1):
        if len(texts) > 1:
            yield f"--- {number} of {len(texts)}"
        yield text
