"""data-stats and data-verify through the real tasks, and the guide to data."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import tomli

from tests.conftest import Project
from trainkit.cli.tasks import namespace
from trainkit.jobs.schema import Dataset, Tokenizer

GUIDE = Path(__file__).resolve().parents[3] / "docs" / "data.md"
FOLDER = "data/lines/bpe"


def test_stats_of_prepared_lines(project: Project) -> None:
    """300 documents about a fox: the numbers, the same as prose, the picture."""
    assert "the dataset is not prepared" in project.invoke("data-stats", "lines", exit=6).stderr
    project.invoke("prep-data")
    manifest = json.loads((project.path / FOLDER / "dataset.json").read_text())
    counts = project.document("data-stats", "lines", "--count-only")
    assert counts == {
        "schema": "data-stats/1",
        "dataset": "lines",
        "documents": 300,
        "sequences": 300,
        "tokens": manifest["tokens"],
    }
    found = project.document("data-stats", "lines", "--samples", "2", "--seed", "5")
    assert {key: found[key] for key in counts} == counts
    assert sum(b["documents"] for b in found["lengths"]) == 300 and found["empty_documents"] == 0
    assert found["longest"] >= found["percentiles"]["99"] >= found["percentiles"]["50"] > 1
    eod = next(entry for entry in found["frequent"] if entry["id"] == manifest["eod_id"])
    assert eod == {"id": manifest["eod_id"], "text": "<|endoftext|>", "count": 300}
    assert len(found["samples"]) == 2 and all(
        s["text"].startswith("the quick brown fox number") for s in found["samples"]
    )
    assert [
        s["document"]
        for s in project.document("data-stats", "lines", "--samples", "2", "--seed", "5")["samples"]
    ] == [s["document"] for s in found["samples"]]
    told = project.invoke("data-stats", "lines", "--samples", "1", "--picture", "lines.svg").stdout
    assert (
        "300 documents, 300 sequences" in told
        and "<|endoftext|>" in told
        and "--- document " in told
        and "#" * 40 in told
    )
    assert "lines: 300 documents" in (project.path / "lines.svg").read_text()
    assert (
        "does not end in"
        in project.invoke("data-stats", "lines", "--picture", "lines.gif", exit=3).stderr
    )


def test_verify_says_what_is_wrong(project: Project) -> None:
    project.invoke("prep-data")
    sound = project.document("data-verify", "lines")
    (row,) = sound["datasets"]
    assert row["documents"] == 300 and row["checked_bytes"] == sum(
        (project.path / FOLDER / f"lines_text_document.{e}").stat().st_size for e in ("bin", "idx")
    )
    assert "lines is sound: 300 documents" in project.invoke("data-verify", "lines").stdout
    path = project.path / FOLDER / "lines_text_document.bin"
    data = bytearray(path.read_bytes())
    # the last document's end, and an id that is none
    data[-2:], data[6:8] = b"\x05\x00", b"\xff\xff"
    path.write_bytes(data)
    failed = project.invoke("data-verify", "lines", exit=6).stderr
    for words in (
        "token 3 is the id 65535",
        "document 299 ends with the id 5, not with the end-of-document 0 (1 such",
        "XXH128 is",
    ):
        assert words in failed
    problems = project.document("data-verify", "lines", exit=6)["problems"]
    # a sum for each shard's part
    assert len(problems) == 4 and all(
        problem["file"].endswith("lines_text_document.bin") for problem in problems
    )


def test_what_has_no_files(project: Project) -> None:
    path = project.path / "jobs.toml"
    path.write_text(path.read_text() + '\n[datasets.random]\nsource = "mock"\n')
    for task in ("data-stats", "data-verify"):
        assert "random tokens" in project.invoke(task, "random", exit=3).stderr
        assert "has no dataset 'lins'" in project.invoke(task, "lins", exit=3).stderr


def test_ready_made_pairs_and_blends(project: Project) -> None:
    """Pairs of others have no checksums, but ids and ends; of a blend the parts are looked at."""
    project.invoke("prep-data")
    more = f"""
[tokenizers.taken]
type = "file"
path = "{FOLDER}/tokenizer.json"
[datasets.ready]
source = "indexed"
prefixes = ["{FOLDER}/lines_text_document"]
tokenizer = "taken"
[datasets.both]
source = "blend"
blend = {{ ready = 1.0 }}
tokenizer = "taken"
"""
    path = project.path / "jobs.toml"
    path.write_text(path.read_text() + more)
    project.invoke("prep-data", "--dataset", "both")
    assert "ready is sound: 300 documents" in project.invoke("data-verify", "both").stdout
    assert project.document("data-stats", "both", "--count-only")["documents"] == 300


# ---- docs/data.md


def test_the_keys_of_the_guide() -> None:
    """Its TOML is what the schema takes; a renamed key must not live on in the text."""
    text = GUIDE.read_text()
    blocks = [
        tomli.loads(block)
        for block in re.findall(r"^```toml\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    ]
    assert blocks
    for block in blocks:
        tokenizers = {
            name: Tokenizer.model_validate({"name": name, **table})
            for name, table in block.get("tokenizers", {}).items()
        }
        for name, table in block.get("datasets", {}).items():
            Dataset.model_validate(
                {"name": name, **table, "tokenizer": tokenizers[table["tokenizer"]]}
            )
    known = {*Dataset.model_fields, *Tokenizer.model_fields}
    words = set(
        re.findall(
            r"`([a-z]+(?:_[a-z]+)+)\b(?![.(])",
            re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL),
        )
    )
    assert len(words) > 15 and words <= known, words - known


def test_the_commands_of_the_guide() -> None:
    blocks = re.findall(r"^```sh\n(.*?)^```", GUIDE.read_text(), re.MULTILINE | re.DOTALL)
    lines = [line.split("#")[0].split() for block in blocks for line in block.splitlines()]
    tasks = [words[1:] for words in lines if words[0] == "invoke"]
    assert len(tasks) >= 3
    for name, *words in tasks:
        flags = {f"--{argument.name}" for argument in namespace[name].get_arguments()}
        assert {word for word in words if word.startswith("--")} <= {
            flag.replace("_", "-") for flag in flags
        }, name


@pytest.mark.parametrize("task", ["data-stats", "data-verify"])
def test_words_that_are_refused(project: Project, task: str) -> None:
    assert "needs a DATASET" in project.invoke(task, "--help", exit=1).stderr
