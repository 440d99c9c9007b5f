"""The whole chain from a server to .bin/.idx: the layouts of the reference corpora in miniature."""

from __future__ import annotations

import json
from collections.abc import Iterator

import numpy as np
import pytest
from tokenizers import Tokenizer

from tests.conftest import Project
from tests.data.fetch_server import Site
from tests.stages.web_project import SETS, lines, published, texts
from trainkit.data.indexed.dataset import IndexedDataset, IndexedWriter
from trainkit.data.order.resolve_pairs import pairs_of
from trainkit.jobs.load import load


@pytest.fixture
def site(project: Project) -> Iterator[Site]:
    with published(project) as site:
        yield site


def documents_of(project: Project, name: str, pairs: list[str]) -> list[str]:
    """Prepared documents, decoded."""
    folder = project.path / "data" / name / "gpt2"
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    found = []
    for pair in pairs:
        tokens = IndexedDataset(folder / pair)
        assert all(
            tokens[i][-1] == tokenizer.token_to_id("<|endoftext|>") for i in range(len(tokens))
        )
        found += [tokenizer.decode(tokens[i][:-1].tolist()) for i in range(len(tokens))]
    return found


def test_enron_from_its_server(project: Project, site: Site) -> None:
    """One file; then nothing is asked again, even after the text was deleted and the server is
    gone; shards are deleted that a task left which was killed when all was made."""
    done = project.document("prep-data", "--dataset", "enron")
    (row,) = done["datasets"]
    assert (
        (row["documents"], row["rejects"]) == (61, 0)
        and row["seconds"] > 0
        and row["mb_per_second"] > 0
    )
    assert documents_of(project, "enron", ["enron_text_document"]) == texts(1, 61)
    manifest = json.loads((project.path / "data/enron/gpt2/dataset.json").read_text())
    assert manifest["shards"][0]["source"]["sha256"] and manifest["shards"][0]["source"][
        "url"
    ].endswith("enron_emails.jsonl.zst")
    asked = len(site.asked)
    for path in (project.path / "data/enron/corpus").rglob("*"):
        if path.is_file():
            path.unlink()
    shards = project.path / "data/enron/gpt2/shards"
    shards.mkdir()
    for name in ("00000.bin", "00000.lock"):
        (shards / name).touch()
    assert (
        "fresh because nothing changed" in project.invoke("prep-data", "--dataset", "enron").stdout
    )
    assert len(site.asked) == asked and not shards.exists()
    assert "is sound: 61 documents" in project.invoke("data-verify", "enron").stdout


def test_a_dry_run_needs_no_network(project: Project, site: Site) -> None:
    """What would be fetched is not known before the server was asked; that is said, at once, and
    is not a failure."""
    config = project.path / "jobs.toml"
    config.write_text(config.read_text().replace(site.url, "http://127.0.0.1:9"))
    done = project.document("prep-data", "--dataset", "enron", "--dry-run")
    (stage,) = (stage for stage in done["stages"] if stage["stage"] == "prep-data")
    assert (
        (stage["name"], stage["fresh"]) == ("enron", False)
        and "were not listed yet" in stage["because"]
        and "127.0.0.1:9" in stage["because"]
    )
    assert not (project.path / "data/enron").exists()


def test_a_dry_run_says_what_it_could_not_look_at(project: Project) -> None:
    """Data of a store that nothing here can ask are not failures of a dry run."""
    config = project.path / "jobs.toml"
    stored = """
[datasets.stored]
source = "web"
urls = ["gs://bucket/a.jsonl"]
tokenizer = "bpe"

[jobs.stored]
extends = "text"
dataset = "stored"
"""
    config.write_text(config.read_text() + stored)
    done = project.document("train", "stored", "--dry-run")
    assert "gs:// cannot be read here" in done["not_looked_at"] and done["plan"]
    done = project.document("prep-data", "--dataset", "stored", "--dry-run")
    assert "were not listed yet" in done["stages"][-1]["because"]


def test_pile_stays_thirty_pairs(project: Project, site: Site) -> None:
    """merge = false: a pair for each file; when one is damaged only that one is made again."""
    done = project.invoke("prep-data", "--dataset", "pile", "--workers", "2")
    heading, row, encoder = done.stdout.splitlines()[-3:]  # the table at the end, and what encoded
    assert (
        heading.split()[:3] == ["dataset", "documents", "tokens"]
        and row.split()[:2] == ["pile", "170"]
        and "encode" in encoder
    )
    folder = project.path / "data/pile/gpt2"
    pairs = [f"shards/{i:05d}_text_document" for i in range(5)]
    assert json.loads((folder / "dataset.json").read_text())["pairs"] == pairs
    assert documents_of(project, "pile", pairs) == [
        text for i in range(5) for text in texts(10 + i, 20 + 7 * i)
    ]
    before = {p.name: p.stat().st_mtime_ns for p in (folder / "shards").glob("*.bin")}
    (folder / "shards/00003_text_document.bin").write_bytes(b"xx")
    assert (
        "00003_text_document.bin changed" in project.invoke("prep-data", "--dataset", "pile").stdout
    )
    after = {p.name: p.stat().st_mtime_ns for p in (folder / "shards").glob("*.bin")}
    assert {name for name in before if before[name] != after[name]} == {"00003_text_document.bin"}
    assert project.document("data-stats", "pile", "--count-only")["documents"] == 170


def test_slimpajama_drops_books_and_knows_what_is_missing(project: Project, site: Site) -> None:
    """Numbers of a range that are not there, `files` of them counted; books left out; nothing of
    the text is kept."""
    project.invoke("prep-data", "--dataset", "slimpajama")
    seeds = [100 * c + i for c in (1, 2) for i in range(4) if (c, i) != (2, 3)]
    wanted = [
        text
        for seed in seeds
        for i, text in enumerate(texts(seed, 12))
        if SETS[i % 3] != "RedPajamaBook"
    ]
    assert documents_of(project, "slimpajama", ["slimpajama_text_document"]) == wanted
    manifest = json.loads((project.path / "data/slimpajama/gpt2/dataset.json").read_text())
    assert sum(manifest["left_out"].values()) == 7 * 4 and manifest["lines"] == 7 * 12
    assert not list((project.path / "data/slimpajama/corpus").glob("**/*.zst"))
    front = "/datasets/cerebras/SlimPajama-627B/resolve/main/train"
    del site.files[f"{front}/chunk1/example_train_2.jsonl.zst"]
    (project.path / "data/slimpajama/corpus/.fetch/listing.json").unlink()
    failed = project.invoke("prep-data", "--dataset", "slimpajama", "--force", exit=6)
    assert (
        "6 files are there, files = 7" in failed.stderr
        and "example_train_2.jsonl.zst" in failed.stderr
    )


def test_a_shard_that_ends_too_early_is_an_error(project: Project, site: Site) -> None:
    """Published counts are checked against what was read; the shards are kept while the key is
    put right."""
    site.files["/data/enron_emails.jsonl.zst"] = lines(1, 60)
    failed = project.invoke("prep-data", "--dataset", "enron", exit=6)
    assert "documents = 61 was published, 60 are there" in failed.stderr
    shard = project.path / "data/enron/gpt2/shards/00000.bin"
    made = shard.stat().st_mtime_ns
    config = project.path / "jobs.toml"
    config.write_text(config.read_text().replace("documents = 61", "documents = 60"))
    dry = project.invoke("prep-data", "--dataset", "enron", "--dry-run").stdout
    assert (
        "merge.spec.json" in dry and "tokens-00000" not in dry and shard.stat().st_mtime_ns == made
    )
    project.invoke("prep-data", "--dataset", "enron")


def test_ready_made_pairs_from_a_server(project: Project, site: Site) -> None:
    """source = "indexed" with urls: fetched, checked against the vocabulary, read where they
    lie; fresh without the server."""
    for i in range(2):
        with IndexedWriter(project.path / f"published/my-gpt2_{i}", "u2") as writer:
            writer.add_documents(np.arange(1, 301 - 100 * i, dtype=np.uint16), [100] * (3 - i))
        site.files |= {
            f"/ready/my-gpt2_{i}.{e}": (project.path / f"published/my-gpt2_{i}.{e}").read_bytes()
            for e in ("bin", "idx")
        }
    config = project.path / "jobs.toml"
    urls = [f"{site.url}/ready/my-gpt2_{{0..1}}.{ending}" for ending in ("idx", "bin")]
    config.write_text(
        config.read_text()
        + f'[datasets.ready]\nsource = "indexed"\nurls = {json.dumps(urls)}\ntokenizer = "gpt2"\n'
    )
    project.invoke("prep-data", "--dataset", "ready")
    pairs = pairs_of(project.path, load(project.path).dataset("ready"), "train")
    assert [(pair.prefix.name, len(IndexedDataset(pair.prefix))) for pair in pairs] == [
        ("my-gpt2_0", 3),
        ("my-gpt2_1", 2),
    ]
    asked = len(site.asked)
    assert (
        "fresh because nothing changed" in project.invoke("prep-data", "--dataset", "ready").stdout
        and len(site.asked) == asked
    )
    # these documents do not end with the end-of-document
    wrong = project.invoke("data-verify", "ready", exit=6).stderr
    assert "document 0 ends with the id 100" in wrong and "(3 such documents)" in wrong
    pairs[1].prefix.with_suffix(".bin").unlink()
    assert "my-gpt2_1.bin is missing" in project.invoke("prep-data", "--dataset", "ready").stdout
    assert project.document("data-stats", "ready", "--count-only")["tokens"] == 500
