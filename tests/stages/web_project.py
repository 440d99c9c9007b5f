"""A project whose corpora lie on a web server of this machine: what test_prep_data_web.py and
test_prep_data_killed.py share."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import zstandard
from tokenizers import Tokenizer, models

from tests.conftest import Project
from tests.data.fetch_server import Site, serve
from trainkit.data.tokenizer import train_bpe

JOBS = """
[tokenizers.gpt2]
type = "gpt2"
vocab_file = "data/tokenizers/gpt2/vocab.json"
merge_file = "data/tokenizers/gpt2/merges.txt"
vocab_url = "URL/gpt2/resolve/main/vocab.json"
merge_url = "URL/gpt2/resolve/main/merges.txt"

[datasets.enron]
source = "web"
urls = ["URL/data/enron_emails.jsonl.zst"]
documents = 61
tokenizer = "gpt2"

[datasets.pile]
source = "web"
urls = ["URL/public/AI/pile/train/{00..04}.jsonl.zst"]
files = 5
merge = false
tokenizer = "gpt2"

[datasets.slimpajama]
source = "web"
urls = [
    "URL/datasets/cerebras/SlimPajama-627B/resolve/main/train/chunk{1..2}/example_train_{0..3}.jsonl.zst"
]
files = 7
missing_files = "allow"
drop = { "meta.redpajama_set_name" = ["RedPajamaBook"] }
keep_download = false
tokenizer = "gpt2"

[datasets.many]
source = "web"
urls = ["URL/many/{000..LAST}.jsonl.zst"]
tokenizer = "gpt2"
"""
SETS = ("RedPajamaBook", "RedPajamaC4", "RedPajamaGithub")


def texts(seed: int, count: int) -> list[str]:
    dice = random.Random(seed)
    words = [
        "the",
        "quick",
        "brown",
        "fox",
        "jumps",
        "over",
        "lazy",
        "dogs",
        "and",
        "naïve",
        "café",
        "x = 1",
        "\n\n",
        "12345",
    ]
    return [" ".join(dice.choices(words, k=dice.randrange(1, 60))) for _ in range(count)]


def packed(rows: list[dict[str, object]]) -> bytes:
    return zstandard.compress("".join(json.dumps(row) + "\n" for row in rows).encode())


def lines(seed: int, count: int) -> bytes:
    return packed(
        [
            {"text": text, "meta": {"redpajama_set_name": SETS[i % 3]}}
            for i, text in enumerate(texts(seed, count))
        ]
    )


def gpt2_files(folder: Path) -> tuple[Tokenizer, dict[str, bytes]]:
    """A small BPE as GPT-2's is published."""
    tokenizer = train_bpe(iter(texts(0, 300)), 320, "<|endoftext|>")
    folder.mkdir()
    assert isinstance(tokenizer.model, models.BPE)
    tokenizer.model.save(str(folder))
    return tokenizer, {
        f"/gpt2/resolve/main/{name}": (folder / name).read_bytes()
        for name in ("vocab.json", "merges.txt")
    }


@contextmanager
def published(project: Project) -> Iterator[Site]:
    """The corpora's files at the paths where they are published, and jobs.toml that names them."""
    _, files = gpt2_files(project.path / "published")
    files["/data/enron_emails.jsonl.zst"] = lines(1, 61)
    files |= {
        f"/public/AI/pile/train/{i:02d}.jsonl.zst": lines(10 + i, 20 + 7 * i) for i in range(5)
    }
    front = "/datasets/cerebras/SlimPajama-627B/resolve/main/train"
    files |= {
        f"{front}/chunk{c}/example_train_{i}.jsonl.zst": lines(100 * c + i, 12)
        for c in (1, 2)
        for i in range(4)
        if (c, i) != (2, 3)
    }
    with serve(files) as site:
        write_jobs(project, site, 1)
        yield site


def write_jobs(project: Project, site: Site, shards: int) -> None:
    (project.path / "jobs.toml").write_text(
        JOBS.replace("URL", site.url).replace("LAST", f"{shards - 1:03d}")
    )
