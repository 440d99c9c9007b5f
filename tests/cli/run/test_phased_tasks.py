"""A job with phases through the tasks: what is prepared, planned, rehearsed, trained, reported and
replayed of them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from tests.conftest import Project
from trainkit.data.indexed.dataset import IndexedWriter

JOBS = """
[tokenizers.t]
type = "file"
path = "tokenizer.json"

[datasets.web]
source = "indexed"
prefixes = ["web"]
tokenizer = "t"
split = "80,20,0"

[datasets.code]
extends = "web"
prefixes = ["code"]

[datasets.good]
extends = "web"
prefixes = ["good"]

[datasets.mix]
source = "blend"
blend = ["web", "code"]
temperature = 2

[datasets.anneal]
source = "blend"
blend = { good = 3, web = 1 }
max_epochs = 4

[jobs.annealed]
extends = "text"
cluster = "here"
dataset = "mix"
training.train_iters = 10
[[jobs.annealed.phases]]
dataset = "anneal"
share = 0.2
"""


@pytest.fixture
def phased(project: Project) -> Project:
    """Pairs of 400, 100 and 50 documents, and their tokenizer."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<|endoftext|>"], initial_alphabet=alphabet
    )
    tokenizer.train_from_iterator([], trainer)
    tokenizer.save(str(project.path / "tokenizer.json"))
    for name, documents in (("web", 400), ("code", 100), ("good", 50)):
        random = np.random.default_rng(documents)
        with IndexedWriter(project.path / name, np.uint16) as writer:
            writer.add_documents(random.integers(0, 250, size=20 * documents), [20] * documents)
    project.add_to_jobs(JOBS)
    return project


def test_phases_from_plan_to_report(phased: Project, tmp_path: Path) -> None:
    plan = phased.document("plan", "annealed")
    assert [
        (read["phase"], read["dataset"], read["first_step"], read["last_step"], read["tokens"])
        for read in plan["reads"]
    ] == [
        (0, "web", 1, 8, 43 * 16),
        (0, "code", 1, 8, 21 * 16),
        (1, "good", 9, 10, 12 * 16),
        (1, "web", 9, 10, 4 * 16),
    ]
    web, code, good, again = plan["reads"]
    # sizes of training parts: 400, 100 and 50 samples of 16 tokens
    assert web["share"] / code["share"] == pytest.approx(2.0)
    assert (good["share"], again["share"], good["epochs"]) == (0.75, 0.25, 12 / 50)
    shown = phased.invoke("plan", "annealed").stdout
    assert "steps 9 to 10: good of anneal, 75.0%, 192 tokens, 0.24 epochs" in shown

    dry = phased.invoke("train", "annealed", "--dry-run").stdout
    assert "steps 9 to 10: good of anneal" in dry
    for name in ("web", "code", "mix", "good", "anneal"):
        assert f"prep-data {name}--t is stale" in dry
    graph = phased.invoke("graph", "annealed").stdout
    assert "prep-data good--t" in graph and "prep-data anneal--t" in graph

    phased.invoke("train", "annealed")
    rehearsed = phased.invoke("rehearse", "annealed").stdout
    assert "from 0 and 64" in rehearsed
    (run,) = phased.runs()
    assert [row["phase"] for row in phased.metrics(run) if "eval" not in row] == [0] * 8 + [1] * 2
    losses = phased.losses(run)

    report = phased.document("report", "last")
    assert [
        (p["phase"], p["reads"], p["first_step"], p["last_step"], p["first_loss"], p["last_loss"])
        for p in report["phases"]
    ] == [
        (0, "web 66.7%, code 33.3%", 1, 8, losses[1], losses[8]),
        (1, "good 75.0%, web 25.0%", 9, 10, losses[9], losses[10]),
    ]
    assert "good 75.0%, web 25.0%  9 to 10" in phased.invoke("report", "last").stdout
    page = tmp_path / "report.html"
    phased.invoke("report", "last", "--html", str(page))
    text = page.read_text()
    assert "What was read when" in text and "phase 1 began: good 75.0%, web 25.0%" in text

    for step, names in ((8, {"web", "code"}), (9, {"good", "web"})):
        batch = phased.document("replay", "last", "--step", str(step))
        assert batch["same"] is True
        assert {sample["dataset"] for sample in batch["samples"]} == names
    refused = phased.invoke("resume", "last", "--set", "training.train_iters=20", exit=3).stderr
    assert "train_iters cannot change in a run with phases" in refused


def test_training_that_max_epochs_do_not_allow_is_refused(phased: Project) -> None:
    """Before anything is prepared, and before any rank starts."""
    sets = ("--set", "phases.0.share=0.9", "--set", "training.train_iters=1000")
    planned = json.loads(phased.invoke("plan", "annealed", *sets, "--json", exit=4).stdout)
    (objection,) = planned["objections"]
    assert objection["code"] == "max-epochs"
    words = "max_epochs = 4 leaves"
    assert words in objection["message"]
    phased.edit_jobs("max_epochs = 4", "max_epochs = 0.1")
    refused = phased.invoke("train", "annealed", exit=4).stderr
    assert "max_epochs = 0.1 leaves 5 samples of good, web, and training reads 16" in refused
