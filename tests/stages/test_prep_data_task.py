"""Units through the real task `prep-data`: what makes a unit stale, workers, where the data of no
job go."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys

import pytest

from tests import forkserver
from tests.conftest import Project
from trainkit.base.errors import ConfigError
from trainkit.data.indexed.dataset import IndexedDataset
from trainkit.data.order.resolve_pairs import pairs_of
from trainkit.data.tokenizer import train_bpe
from trainkit.jobs.load import load

# ---- through the real task


def test_keys_that_only_describe_make_nothing_stale(project: Project) -> None:
    project.invoke("prep-data")
    config = project.path / "jobs.toml"
    more = (
        'split = "80,20,0"\nlicence = "CC0"\nhomepage = "https://example.org"\ndocuments ='
        " 300\ntokens = 5\naccept_download = true\nmmap = false\n"
    )
    config.write_text(config.read_text().replace('split = "80,20,0"\n', more))
    assert "is fresh because nothing changed" in project.invoke("prep-data").stdout


def test_shards_that_stay_pairs(project: Project) -> None:
    """merge = false: no merged pair; samples come from the shards, the last ones held out; a
    shard without text is none of them."""
    config = project.path / "jobs.toml"
    dataset = (
        load(project.path).dataset("lines").model_copy(update={"merge": False, "valid_files": 1})
    )
    with pytest.raises(ConfigError, match="the dataset is not prepared"):
        pairs_of(project.path, dataset, "train")
    shutil.copy(project.path / "corpus/part-0.jsonl", project.path / "corpus/part-2.jsonl")
    (project.path / "corpus/part-1.jsonl").write_text("\n")
    config.write_text(
        config.read_text().replace('split = "80,20,0"\n', "merge = false\nvalid_files = 1\n")
    )
    project.invoke("prep-data")
    folder = project.path / "data/lines/bpe"
    assert json.loads((folder / "dataset.json").read_text())["pairs"] == [
        "shards/00000_text_document",
        "shards/00002_text_document",
    ]
    assert not list(folder.glob("*.bin"))
    found = {
        split: [pair.prefix for pair in pairs_of(project.path, dataset, split)]
        for split in ("train", "valid")
    }
    assert found == {
        "train": [folder / "shards/00000_text_document"],
        "valid": [folder / "shards/00002_text_document"],
    }
    for prefix in (folder / "shards").glob("*.idx"):
        IndexedDataset(prefix.with_suffix(""))


def test_workers_do_not_change_the_bytes(project: Project) -> None:
    found = []
    for workers in ("1", "3"):
        project.invoke("prep-data", "--force", "--workers", workers)
        found.append({p.name: p.read_bytes() for p in (project.path / "data/lines/bpe").iterdir()})
    assert found[0] == found[1]
    assert "it must be at least 0" in project.invoke("prep-data", "--workers", "-1", exit=1).stderr


def test_a_unit_runs_anywhere(project: Project) -> None:
    """`python -m trainkit.data.tokenize.shard_worker SPEC.json` alone makes the shard that the
    task made, and says what it holds."""
    project.invoke("prep-data")
    units = project.path / "stamps/prep-data/lines--bpe.units"
    spec = json.loads((units / "tokens-00001.spec.json").read_text())
    spec["prefix"] = str(project.path / "elsewhere" / "00001")
    (project.path / "spec.json").write_text(json.dumps(spec))
    argv = [sys.executable, "-I", "-m", "trainkit.data.tokenize.shard_worker", "spec.json"]
    done = forkserver.run(
        argv, cwd=project.path, capture_output=True, text=True, check=True, env=dict(os.environ)
    )
    result = json.loads(done.stdout.splitlines()[-1])["result"]
    stamped = json.loads((units / "tokens-00001.json").read_text())["result"]
    assert result == stamped and (project.path / "elsewhere/00001.bin").stat().st_size > 100


def test_two_workers_of_one_shard_wait_for_each_other(project: Project) -> None:
    project.invoke("prep-data")
    spec = json.loads(
        (project.path / "stamps/prep-data/lines--bpe.units/tokens-00000.spec.json").read_text()
    )
    spec["prefix"] = str(project.path / "elsewhere" / "00000")
    (project.path / "spec.json").write_text(json.dumps(spec))
    argv = [sys.executable, "-I", "-m", "trainkit.data.tokenize.shard_worker", "spec.json"]
    both = [
        forkserver.Popen(argv, cwd=project.path, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    results = [json.loads(process.communicate()[0].splitlines()[-1]) for process in both]
    assert results[0] == results[1] and "result" in results[0]
    assert {p.name for p in (project.path / "elsewhere").iterdir()} <= {
        "00000.bin",
        "00000.idx",
        "00000.lock",
    }
    IndexedDataset(project.path / "elsewhere/00000")


def test_a_bad_shard_keeps_those_that_are_done(project: Project) -> None:
    """The larger one went first; when the bad line is put right, only its shard and the merge
    are made."""
    part = project.path / "corpus/part-1.jsonl"
    part.write_text('{"text": "fine"}\n{"text": "cut\n')
    path = project.path / "jobs.toml"
    taken = '[tokenizers.bpe]\ntype = "file"\npath = "taken.json"\n'
    path.write_text(
        path.read_text().replace('[tokenizers.bpe]\ntype = "bpe"\nvocab_size = 300\n', taken)
    )
    train_bpe(iter(["the quick brown fox"]), 300, "<|endoftext|>").save(
        str(project.path / "taken.json")
    )
    assert (
        "part-1.jsonl:2: is not JSON"
        in project.invoke("prep-data", "--workers", "1", exit=6).stderr
    )
    part.write_text('{"text": "fine"}\n{"text": "whole"}\n')
    dry = project.invoke("prep-data", "--dry-run").stdout
    assert "build index" in dry and "build kernels" not in dry  # data need none of these
    would = [line.split()[-1] for line in dry.splitlines() if "would run" in line]
    assert would == ["tokens-00001.spec.json", "merge.spec.json"]
    project.invoke("prep-data")
    assert project.document("data-stats", "lines", "--count-only")["documents"] == 152


ROOTS = """
[clusters.large]
root = "other"

[datasets.web]
source = "web"
urls = ["http://127.0.0.1:9/{00..29}.jsonl.zst"]
download_bytes = 895_000_000_000
tokenizer = "bpe"
"""


def test_a_dataset_for_no_job_goes_where_it_is_said(project: Project) -> None:
    """--cluster names the root; without it a small one goes below this folder, which is said,
    and a large one nowhere."""
    config = project.path / "jobs.toml"
    config.write_text(config.read_text() + ROOTS)
    refused = project.invoke("prep-data", "--dataset", "web", exit=3).stderr
    assert (
        "about 895 GB" in refused
        and "--cluster NAME" in refused
        and str(project.path / "other") in refused
    )
    done = project.invoke("prep-data", "--dataset", "lines", "--dry-run").stdout
    assert f"clusters of jobs.toml have other roots: {project.path / 'other'}" in done
    project.invoke("prep-data", "--dataset", "lines", "--cluster", "large")
    assert (project.path / "other/data/lines/bpe/dataset.json").is_file() and not (
        project.path / "data"
    ).exists()
    assert (
        "has no cluster 'larg'"
        in project.invoke("prep-data", "--dataset", "lines", "--cluster", "larg", exit=3).stderr
    )
    assert (
        "a job has a cluster of its own"
        in project.invoke("prep-data", "--job", "text", "--cluster", "large", exit=3).stderr
    )
