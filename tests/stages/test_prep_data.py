"""prep-data through the real task: freshness and its words, restarts, bad input."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import time
from pathlib import Path

import pytest
import zstandard

from tests.conftest import TASKS, Project, wait_for
from trainkit.base.files import temporary_name
from trainkit.data.indexed.dataset import IndexedDataset

DATA = Path("data/lines/bpe")


def output(project: Project) -> dict[str, bytes]:
    """Name and content of everything training reads."""
    folder = project.path / DATA
    return {p.name: p.read_bytes() for p in sorted(folder.iterdir()) if p.is_file()}


def test_makes_tokens_and_then_nothing_twice(project: Project) -> None:
    first = project.invoke("prep-data")
    assert "stale because it was never made here" in first.stdout
    before = {p: p.stat().st_mtime_ns for p in (project.path / DATA).iterdir()}
    assert {p.name for p in before} == {
        "tokenizer.json",
        "dataset.json",
        "lines_text_document.bin",
        "lines_text_document.idx",
    }
    again = project.invoke("prep-data")
    assert "fresh because nothing changed since" in again.stdout
    assert before == {p: p.stat().st_mtime_ns for p in (project.path / DATA).iterdir()}
    manifest = json.loads((project.path / DATA / "dataset.json").read_text())
    tokens = IndexedDataset(project.path / DATA / "lines_text_document")
    assert (
        manifest["schema"] == "dataset/1"
        and manifest["documents"] == 300
        and manifest["tokens"] == tokens.num_tokens
    )
    assert all(tokens[i][-1] == manifest["eod_id"] for i in range(len(tokens)))


def test_says_why_it_is_stale(project: Project) -> None:
    """Each change of one prepared project, seen by a dry run and put back; the last one by all
    who need the data."""
    project.invoke("prep-data")
    config, part, tokens = (
        project.path / "jobs.toml",
        project.path / "corpus/part-0.jsonl",
        project.path / DATA / "lines_text_document.bin",
    )
    changes = [
        (
            config,
            config.read_bytes().replace(b"vocab_size = 300", b"vocab_size = 301"),
            "tokenizers.bpe.vocab_size changed from 300 to 301",
        ),
        (tokens, b"12", "lines_text_document.bin changed"),
        (tokens.with_suffix(".idx"), None, "lines_text_document.idx is missing"),
        (
            project.path / "corpus/part-2.jsonl",
            b'{"text": "a new shard"}\n',
            "corpus/part-2.jsonl is new",
        ),
        (part, part.read_bytes() + b'{"text": "more"}\n', "corpus/part-0.jsonl changed"),
    ]
    for path, content, because in changes:
        before = (path.read_bytes(), path.stat()) if path.exists() else None
        path.unlink() if content is None else path.write_bytes(content)
        dry = project.invoke("prep-data", "--dry-run")
        assert because in dry.stdout and "would run" in dry.stdout
        if path is part:
            break
        if before is None:
            path.unlink()
        else:
            path.write_bytes(before[0])
            os.utime(path, ns=(before[1].st_atime_ns, before[1].st_mtime_ns))
    assert because in project.invoke("train", "text", "--no-stages", exit=5).stderr
    assert because in project.invoke("prep-data").stdout
    assert "fresh" in project.invoke("prep-data", "--dry-run").stdout


def test_dry_run_writes_nothing(project: Project) -> None:
    project.environment()  # makes its tmp folder
    before = sorted(project.path.rglob("*"))
    for words in (
        ["prep-data", "--dry-run"],
        ["--dry", "prep-data"],
        ["train", "text", "--dry-run"],
        ["--dry", "train", "text"],
    ):
        assert "would run" in project.invoke(*words).stdout
    after = [p for p in sorted(project.path.rglob("*")) if "__pycache__" not in p.parts]
    assert before == after


def test_what_a_killed_writer_of_the_stamp_left_goes(project: Project) -> None:
    """Whether what it was about is fresh by now or not."""
    for words in ([], ["--force"], []):
        project.invoke("prep-data", *words)
        assert not list(project.path.rglob("*.tmp-*"))
        temporary_name(project.path / "stamps/prep-data/lines--bpe.json").write_text("{")


def test_ctrl_c_leaves_nothing_half_done_and_no_worker(project: Project) -> None:
    rows = [
        json.dumps({"text": " ".join(f"word{i * j % 9973}" for j in range(300))})
        for i in range(3000)
    ]
    (project.path / "corpus" / "part-9.jsonl").write_text("\n".join(rows))
    process = project.start("prep-data")
    specs = project.path / "stamps/prep-data/lines--bpe.units"
    wait_for(lambda: list(specs.glob("*.spec.json")), "a unit to start")
    time.sleep(0.3)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate()
    assert process.returncode == 130 and "Traceback" not in err and err.count("\n") <= 2
    assert "was interrupted" in project.invoke("prep-data", "--dry-run").stdout
    spec = str(specs)
    assert not [p for p in Path("/proc").glob("[0-9]*") if spec in _command_line(p)]
    project.invoke("prep-data")
    assert "fresh" in project.invoke("prep-data").stdout


def _command_line(process: Path) -> str:
    try:
        return (process / "cmdline").read_bytes().decode(errors="replace")
    except OSError:
        return ""


def test_two_at_once_the_second_waits_and_finds_it_fresh(project: Project) -> None:
    both = [project.start("prep-data") for _ in range(2)]
    texts = [process.communicate() for process in both]
    assert [process.returncode for process in both] == [0, 0], texts
    outs = sorted(out for out, _ in texts)
    assert sum("units done" in out for out in outs) == 1, outs


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('{"text": "cut', "part-1.jsonl:2: is not JSON"),
        ('{"body": "x"}', "part-1.jsonl:2: has no text under the key 'text' (found keys 'body')"),
        ('{"text": null}', "part-1.jsonl:2: has no text under the key 'text'"),
        ('["text"]', "part-1.jsonl:2: has no text under the key 'text' (found list)"),
        ('{"text": "\\ud800"}', "part-1.jsonl:2: holds a lone surrogate"),
    ],
)
def test_a_bad_line_is_named(project: Project, line: str, words: str) -> None:
    (project.path / "corpus/part-1.jsonl").write_text('{"text": "fine"}\n' + line + "\n")
    failed = project.invoke("prep-data", exit=6)
    assert words in failed.stderr
    error = project.document("prep-data", exit=6)
    assert error["schema"] == "error/1" and error["exit"] == 6 and error["problems"][0]["line"] == 2
    assert "unfinished" in json.loads(
        (project.path / "stamps/prep-data/lines--bpe.json").read_text()
    )
    again = project.invoke("prep-data", "--dry-run").stdout
    assert (
        "is stale because its last making failed: " in again
        and words in again
        and "interrupted" not in again
    )


def test_blank_lines_empty_documents_and_no_last_newline_are_legal(project: Project) -> None:
    (project.path / "corpus/part-1.jsonl").write_text(
        '\n{"text": "one"}\n\n   \n{"text": ""}\n{"text": "two"}'
    )
    project.invoke("prep-data")
    manifest = json.loads((project.path / DATA / "dataset.json").read_text())
    assert (manifest["documents"], manifest["empty_documents"], manifest["sequences"]) == (
        153,
        1,
        152,
    )
    tokens = IndexedDataset(project.path / DATA / "lines_text_document")
    assert len(tokens.document_indices) == 154


@pytest.mark.parametrize("lines", [10, 5000])
def test_a_truncated_zst_is_named(project: Project, lines: int) -> None:
    """Cut anywhere, between two lines too: what is left must not pass for the whole. (Of many
    blocks: test_formats.)"""
    dice = random.Random(lines)
    text = b"".join(b'{"text": "%d"}\n' % dice.getrandbits(60) for _ in range(lines))
    whole = zstandard.compress(text)
    (project.path / "corpus/part-1.jsonl.zst").write_bytes(whole[: len(whole) - 5])
    config = project.path / "jobs.toml"
    config.write_text(config.read_text().replace('"corpus/*.jsonl"', '"corpus/*"'))
    assert "part-1.jsonl.zst" in project.invoke("prep-data", exit=6).stderr


def test_no_input_is_an_error(project: Project) -> None:
    for path in (project.path / "corpus").iterdir():
        path.unlink()
    assert "matches no file" in project.invoke("prep-data", exit=6).stderr


# Kills the task and all that it has started as soon as the process of that unit runs.
KILLED_IN = """
import os, signal
from trainkit.stages import unit_process
def feed(self, data, feed=unit_process.UnitProcess.feed):
    if self.units[0].name == "UNIT":
        os.killpg(0, signal.SIGKILL)
    feed(self, data)
unit_process.UnitProcess.feed = feed
"""


def test_interrupted_after_a_change_never_passes_old_tokens_off_as_new(project: Project) -> None:
    """Ctrl-C while merge runs, after the tokenizer was made anew: the next call must tokenize
    again what is stale."""
    project.invoke("prep-data")
    old = output(project)
    config = project.path / "jobs.toml"
    config.write_text(config.read_text().replace("vocab_size = 300", "vocab_size = 280"))
    fresh = Project(project.path.parent / "fresh")
    shutil.copytree(
        project.path, fresh.path, ignore=shutil.ignore_patterns("data", "stamps", "tmp")
    )
    fresh.invoke("prep-data")
    for unit in ("tokenizer", "tokens-00000", "merge"):
        (project.path / "tasks.py").write_text(KILLED_IN.replace("UNIT", unit) + TASKS)
        process = project.start("prep-data")
        process.communicate()
        assert process.returncode == -signal.SIGKILL
        (project.path / "tasks.py").write_text(TASKS)
        assert "was interrupted" in project.invoke("prep-data", "--dry-run").stdout
    assert "was interrupted (then it was stale because" in project.invoke("prep-data").stdout
    assert output(project) == output(fresh) != old


def test_a_dataset_needs_no_job(project: Project) -> None:
    path = project.path / "jobs.toml"
    path.write_text(path.read_text().replace('[defaults]\njob = "text"', ""))
    project.invoke("prep-data", "--dataset", "lines")
    assert (project.path / DATA / "dataset.json").is_file()
    assert (
        "has no dataset 'lins'" in project.invoke("prep-data", "--dataset", "lins", exit=3).stderr
    )


def test_what_does_not_matter_makes_nothing_stale(project: Project) -> None:
    project.invoke("prep-data")
    path = project.path / "jobs.toml"
    path.write_text(
        path.read_text()
        .replace('"corpus/*.jsonl"', '"corpus/part-*.jsonl"')
        .replace('split = "80,20,0"', 'split = "70,30,0"\nshard_bytes = 100000')
    )
    assert "is fresh because nothing changed" in project.invoke("prep-data").stdout


def test_a_folder_with_brackets_and_spaces(project: Project) -> None:
    odd = Project(project.path.parent / "my [exp] ünï")
    shutil.copytree(project.path, odd.path)
    odd.invoke("prep-data")
    assert (odd.path / DATA / "dataset.json").is_file()


@pytest.mark.parametrize("line", ["[" * 100000, '{"text": ' + "1" * 5000 + "}"])
def test_hostile_json_is_named(project: Project, line: str) -> None:
    (project.path / "corpus/part-1.jsonl").write_text('{"text": "fine"}\n' + line + "\n")
    assert "part-1.jsonl:2: " in project.invoke("prep-data", exit=6).stderr
