"""A project whose text is curated: what the tests of prep-data on curated datasets share."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import zstandard

from tests.conftest import Project
from tests.data.curate.curation_cases import documents, near_duplicates
from trainkit.data.tokenizer import train_bpe

JOBS = """
[tokenizers.words]
type = "file"
path = "words.json"

[datasets.crawl]
source = "files"
paths = ["crawl/*.jsonl"]
tokenizer = "words"
"""
STEPS = """
[datasets.crawl.curate]
steps = [
    { step = "c4", min_sentences = 1 },
    { step = "exact" },
    { step = "exact", unit = "line", min_characters = 20 },
    { step = "minhash" },
    { step = "pii" },
    { step = "sample", rate = 1.5 },
]
"""


def crawled(seed: int = 1) -> list[dict[str, object]]:
    """Documents of many kinds; some are there twice, some nearly, some have lines in common."""
    dice = random.Random(seed)
    texts = [f"{text}." for text in near_duplicates(20, seed)]
    texts += documents(70, seed)
    texts += dice.sample(texts, 12)
    texts += [
        f"{dice.choice(texts)}\nA line that stands in many of these documents." for _ in "12345"
    ]
    texts += [f"Write to {name}@corp.example.net or 8.8.8.8 soon, please do." for name in "abc"]
    dice.shuffle(texts)
    return [{"text": text, "meta": {"n": len(text) % 7}} for text in texts]


def write_rows(path: Path, rows: Iterable[Mapping[str, object]]) -> None:
    """JSON lines."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_shards(project: Project, rows: Sequence[Mapping[str, object]], shards: int) -> None:
    """The corpus of the dataset `crawl`, in place of the former."""
    for path in (project.path / "crawl").glob("*"):
        path.unlink()
    for number in range(shards):
        write_rows(project.path / f"crawl/{number}.jsonl", rows[number::shards])


def write_project(project: Project, steps: str = STEPS, shards: int = 3) -> None:
    """jobs.toml with the dataset `crawl` beside what is there, and its text."""
    project.add_to_jobs(JOBS + steps)
    texts = [str(row["text"]) for row in crawled()]
    train_bpe(iter(texts), 320, "<|endoftext|>").save(str(project.path / "words.json"))
    write_shards(project, crawled(), shards)


def curated(project: Project, name: str = "crawl") -> list[dict[str, Any]]:
    """The documents that are left, in the order in which they were written."""
    folder = project.path / f"data/{name}/curated"
    return [
        json.loads(line)
        for path in sorted(folder.glob("*.jsonl.zst"))
        for line in zstandard.decompress(path.read_bytes(), 2**28).splitlines()
    ]


def funnel(project: Project, name: str = "crawl") -> dict[str, Any]:
    """curation.json."""
    value = json.loads((project.path / f"data/{name}/curated/curation.json").read_text())
    assert isinstance(value, dict)
    return value


def below(project: Project, name: str = "crawl") -> dict[str, bytes]:
    """All files of a dataset."""
    folder = project.path / f"data/{name}"
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }
