"""docs/curation.md: its table has the steps, keys and reasons that there are, its TOML is prepared
as it stands, and its Python runs on what that writes."""

from __future__ import annotations

import gzip
import json
import random
import re
import subprocess
import sys
from pathlib import Path
from typing import get_args

import pyarrow.parquet
import zstandard

from tests.conftest import Project
from tests.data.curate.curation_cases import COMMON
from tests.test_docs import commands_that_exist
from trainkit.data.curate.steps import STEPS
from trainkit.jobs.curation import RECIPES, GlobalStep, LocalStep
from trainkit.jobs.load import load

ROOT = Path(__file__).resolve().parent.parent
TEXT = (ROOT / "docs/curation.md").read_text()


def words_in(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def rows(heading: str) -> list[list[str]]:
    """The rows below a table's first heading, as cells."""
    table = TEXT.partition(f"| {heading} |")[2].partition("\n\n")[0]
    lines = [line for line in table.splitlines()[2:] if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL)


def test_the_table_has_every_step_with_its_keys() -> None:
    tables = {
        table.model_fields["step"].annotation: table
        for table in (*get_args(LocalStep), *get_args(GlobalStep))
    }
    known = {
        get_args(name)[0]: set(table.model_fields) - {"step"} for name, table in tables.items()
    }
    named = {words_in(step)[0]: set(words_in(keys)) for step, keys, *_ in rows("`step`")}
    assert named == known
    recipes = {words_in(name)[0]: words_in(steps) for name, steps in rows("`recipe`")}
    for name, recipe in RECIPES.items():
        assert [step for step in recipes.pop(name) if step in known] == [s.step for s in recipe()]
    assert not recipes


def test_the_reasons_of_the_table_are_given() -> None:
    """Each is a string of the code; those with a number in them are made of parts."""
    folders = (ROOT / "trainkit/data/curate", ROOT / "csrc/index/curation")
    code = "\n".join(
        path.read_text()
        for folder in folders
        for path in folder.rglob("*")
        if path.suffix in (".py", ".h")
    )
    for step, _, reasons, _ in rows("`step`"):
        for reason in words_in(reasons):
            for part in reason.split("N"):
                assert f'"{part}' in code or f'{part}"' in code, (step, reason)


def test_its_commands_exist() -> None:
    assert commands_that_exist(TEXT) == 4


def test_no_step_that_looks_at_one_document_is_forgotten() -> None:
    names = {get_args(table.model_fields["step"].annotation)[0] for table in get_args(LocalStep)}
    assert set(STEPS) == names


def prose(dice: random.Random) -> str:
    """Ten sentences, long enough for the rules of both tables."""
    sentences = (f"It is the end of {' '.join(dice.choices(COMMON, k=16))}." for _ in range(10))
    return "\n".join(sentences)


def write_crawls(folder: Path) -> None:
    """The files that the page's tables name. In the old crawl: two sources, a question in the last
    document. In the new one: two of the old documents, a short and an unwanted one, one twice."""
    dice = random.Random(3)
    old = [{"text": prose(dice), "source": "wiki" if i % 2 else "forum"} for i in range(20)]
    question = " ".join(dice.sample(COMMON, 15))
    old[19]["text"] += f"\n{question.upper()}."
    for name in ("crawl", "crawl-2026", "benchmarks", "lists"):
        (folder / name).mkdir()
    lines = "".join(json.dumps(document) + "\n" for document in old)
    (folder / "crawl/a.jsonl.zst").write_bytes(zstandard.compress(lines.encode()))
    (folder / "benchmarks/quiz.jsonl").write_text(json.dumps({"question": question}) + "\n")
    (folder / "lists/domains.txt").write_text("bad.example.org\n")
    fresh = prose(dice)
    new = [
        ("https://bad.example.org/", prose(dice)),
        ("https://a.org/", old[0]["text"] + "\nHome"),
        ("https://b.org/", old[1]["text"]),
        ("https://c.org/", f"Home\nAbout\n{fresh}"),
        ("https://d.org/", f"Home\nAbout\n{fresh}"),
        ("https://e.org/", prose(dice)[:330]),
    ]
    with gzip.open(folder / "crawl-2026/a.warc.gz", "wb") as archive:
        for url, text in new:
            archive.write(
                f"WARC/1.0\r\nWARC-Type: conversion\r\nWARC-Target-URI: {url}\r\n"
                f"Content-Length: {len(text)}\r\n\r\n{text}\r\n\r\n".encode()
            )


def test_its_tables_are_prepared_as_they_stand(project: Project) -> None:
    project.add_to_jobs("\n" + "\n".join(blocks("toml")))
    (project.path / "jobs.local.toml").write_text("[tokenizers.crawl-bpe]\nvocab_size = 300\n")
    rule, reading = blocks("python")
    (project.path / "rules.py").write_text(rule)
    write_crawls(project.path)
    job = load(project.path, {}).resolve("text", ["dataset=crawl-2026"])
    assert job.job.dataset.curate is not None
    assert "dataset.curate.steps" in job.origins

    project.invoke("prep-data", "--dataset", "crawl")
    done = subprocess.run(
        [sys.executable, "-c", reading],
        cwd=project.path,
        capture_output=True,
        text=True,
        check=True,
    )
    *steps, sampled = done.stdout.splitlines()[: len(RECIPES["fineweb"]()) + 2]
    assert steps[0] == "language 20 20 {}"
    assert steps[-1] == "decontaminate 20 19 {'contaminated': 1}"
    assert re.fullmatch(r"sample 19 \d\d {'not_sampled': \d+}", sampled)
    assert done.stdout.count(" en\n") == int(sampled.split()[2]) > 27

    project.invoke("prep-data", "--dataset", "crawl-2026")
    folder = project.path / "data/crawl-2026/curated"
    (left,) = pyarrow.parquet.read_table(folder / "00000.parquet").to_pylist()
    assert left["url"] in ("https://c.org/", "https://d.org/") and left["lines_left"] == 10
    assert not left["text"].startswith("Home")
    funnel = project.document("data-stats", "crawl-2026", "--curation")["datasets"][0]
    assert [sum(step["reasons"].values()) for step in funnel["steps"]] == [1, 0, 1, 0, 1, 0, 2]
