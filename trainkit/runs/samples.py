"""samples.jsonl: what the model of each checkpoint wrote after the job's prompts.

A line is {"step", "prompt", "text": the prompt and what follows, "tokens": how many follow}. The
likeliest token follows each time, so that the same checkpoint says the same again.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from trainkit.base.lazy_dataclasses import asdict, dataclass
from trainkit.runs.folder import RunFolder


@dataclass(frozen=True)
class SampleText:
    """One line."""

    step: int
    prompt: str
    text: str
    tokens: int


def samples_path(run: RunFolder) -> Path:
    """The file of a run."""
    return run.path / "samples.jsonl"


def read_samples(run: RunFolder) -> list[SampleText]:
    """All whole lines, by step; of a step that was made again what was written last."""
    try:
        lines = samples_path(run).read_bytes().split(b"\n")
    except OSError:
        return []
    found: dict[tuple[int, str], SampleText] = {}
    for line in lines:
        try:
            value = json.loads(line)
            texts = (str(value["prompt"]), str(value["text"]))
            step = int(value["step"])
            found[step, texts[0]] = SampleText(step, *texts, int(value["tokens"]))
        except (ValueError, KeyError, TypeError):
            continue
    return sorted(found.values(), key=lambda sample: sample.step)


def add_samples(run: RunFolder, samples: Iterable[SampleText]) -> None:
    """Append lines."""
    with open(samples_path(run), "a", encoding="utf-8") as file:
        file.write("".join(json.dumps(asdict(sample)) + "\n" for sample in samples))
