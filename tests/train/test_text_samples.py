"""What a model writes while it trains: the same as its checkpoints write later, and no loss and no
weight of the run hangs on it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.conftest import Project
from trainkit.jobs.load import load
from trainkit.reports.read import read_report
from trainkit.runs.folder import RunFolder
from trainkit.runs.samples import SampleText, add_samples, read_samples
from trainkit.train.text_samples import reason_against

PROMPTS = ["the ", ""]
ON = "generate.while_training=true"


def weights(run: Path) -> dict[str, object]:
    """Hashes of what the last checkpoint holds."""
    manifest = json.loads((run / "checkpoints/step-00000020/manifest.json").read_text())
    return {name: value for name, value in manifest.items() if name in ("files", "tensors")}


@pytest.mark.parametrize(
    "layout",
    [
        ["cluster.ranks_per_node=2", "parallelism.zero_stage=2"],
        ["cluster.ranks_per_node=1", "training.precision=bf16", "model.hidden_dropout=0.1"],
    ],
    ids=["zero2", "bf16"],
)
def test_the_texts_of_checkpoints(project: Project, layout: list[str]) -> None:
    path = project.path / "jobs.toml"
    text = path.read_text().replace(
        'generate = { prompt = "the ", max_new_tokens = 8 }',
        f"generate = {{ prompts = {json.dumps(PROMPTS)}, max_new_tokens = 6 }}\n"
        "checkpoint.keep_last = 2",
    )
    path.write_text(text)
    sets = [word for each in layout for word in ("--set", each)]
    project.invoke("train", "text", *sets)
    project.invoke("train", "text", *sets, "--set", ON)
    without, run = project.runs()
    assert project.losses(without) == project.losses(run), "bit by bit"
    assert weights(without) == weights(run)
    assert not (without / "samples.jsonl").exists()
    found = read_samples(RunFolder(run))
    steps = [5, 10, 15, 20]
    assert {(each.step, each.prompt) for each in found} == {
        (step, prompt) for step in steps for prompt in PROMPTS
    }, "also of checkpoints that are gone"
    project.invoke("report", without.name, "--samples")
    later = read_samples(RunFolder(without))
    assert later == [each for each in found if each.step in (15, 20)], "the same text"
    phases = [json.loads(line) for line in (run / "attempts/1/phases.jsonl").open()]
    assert [row["phase"] for row in phases].count("eval") == 5, "and before the first step"
    assert read_report(RunFolder(run)).ledger.seconds["evaluation"] > 0


def test_what_makes_none_says_so(project: Project) -> None:
    project.invoke("train", "random", "--set", ON, "--set", "training.train_iters=2")
    run = project.runs()[0]
    log = (run / "attempts/1/logs/0.log").read_text()
    assert "no texts while it trains: its dataset has random tokens" in log
    assert f"`invoke report {run.name} --samples`" in log and not read_samples(RunFolder(run))
    jobs = load(project.path)
    for override, word in (
        ("parallelism.tensor_model_parallel_size=2", "split"),
        ("parallelism.zero_stage=3", "ZeRO 3"),
        ("training.compile=true", "compiled"),
    ):
        assert word in reason_against(jobs.resolve("text", [override]).job)
    assert reason_against(jobs.resolve("text").job) == ""


def test_what_was_written_last_counts(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    add_samples(run, [SampleText(5, "a", "a b", 1), SampleText(5, "b", "b c", 1)])
    add_samples(run, [SampleText(5, "a", "a c", 1)])
    assert [each.text for each in read_samples(run)] == ["a c", "b c"]
