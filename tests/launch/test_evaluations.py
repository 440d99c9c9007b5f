"""Evaluations beside training: what they find, what they keep, and that no failure of theirs
reaches the run."""

from __future__ import annotations

import asyncio
import os
import sys
from dataclasses import replace

from tests.conftest import Project
from trainkit.base.locks import locked
from trainkit.jobs.load import load
from trainkit.jobs.resolved import read_job
from trainkit.launch.supervise.evaluations import EvaluationsBeside
from trainkit.launch.supervise.stop_requests import StopRequests
from trainkit.reports.compare import numbers_of
from trainkit.reports.page import report_page
from trainkit.reports.read import read_report
from trainkit.runs.checkpoints import open_checkpoint, published_folders
from trainkit.runs.evaluations import (
    EvaluationRecord,
    EvaluationScore,
    due_evaluations,
    read_evaluations,
)
from trainkit.runs.folder import RunFolder
from trainkit.train.inference.evaluation_worker import LOWER_PRIORITY

# what it is asked, and what it writes, as lm_eval 0.4 does
HARNESS = """#!{python}
import json, os, sys
words = sys.argv[1:]
assert words[:4] == ["-m", "lm_eval", "--model", "hf"], words
asked = dict(zip(words[2::2], words[3::2]))
weights = asked["--model_args"].removeprefix("pretrained=")
assert {{"config.json", "model.safetensors", "tokenizer.json"}} <= set(os.listdir(weights))
assert os.environ["HF_DATASETS_OFFLINE"] == "1" and os.environ["OMP_NUM_THREADS"] == "1"
assert os.nice(0) == {nice}
folder = asked["--output_path"] + "/model"
os.makedirs(folder)
found = {{
    "results": {{
        task: {{"alias": task, "acc,none": 0.5, "acc_stderr,none": 0.25, "x,own": 1,
            "x_stderr,own": "N/A"}}
        for task in asked["--tasks"].split(",")
    }},
    "versions": {{"one": 2.0}},
    "lm_eval_version": "0.4.13",
    "transformers_version": "5",
}}
with open(folder + "/results_2026.json", "w") as file:
    json.dump(found, file)
"""
TABLES = """
[[jobs.text.evaluations]]
name = "held-out"
every = 10
datasets = ["lines"]
limit = 4

[[jobs.text.evaluations]]
name = "tasks"
tasks = ["one", "two"]
python = "{python}"

[[jobs.text.evaluations]]
name = "greedy"
tasks = ["one"]
python = "{python}-greedy"
"""
KILLED = "#!/bin/sh\nkill -9 $PPID\n"  # as the kernel does where memory is short


def scores(record: EvaluationRecord) -> dict[tuple[str, str], float]:
    return {(score.set, score.metric): score.value for score in record.scores}


def test_beside_training(project: Project) -> None:
    """Every checkpoint that is due is measured, though only the newest are kept; an evaluation
    that fails costs the run nothing, and is made again by hand."""
    python = project.path / "harness"
    greedy = project.path / "harness-greedy"
    greedy.write_text(KILLED)
    greedy.chmod(0o755)
    project.add_to_jobs(TABLES.format(python=python))
    said = project.invoke("train", "text", "--set", "checkpoint.keep_last=1")
    (path,) = project.runs()
    run = RunFolder(path)
    records = read_evaluations(run)
    assert [folder.name for folder in published_folders(run.checkpoints)] == ["step-00000020"]
    assert [(r.step, r.name, bool(r.error)) for r in records] == [
        (10, "held-out", False),
        (20, "held-out", False),
        (20, "tasks", True),
        (20, "greedy", True),
    ]
    words = f"ERROR: {python}: No such file or directory"
    assert records[2].error == words and words in said.stdout + said.stderr
    assert "want of memory" in records[3].error
    found = project.document("evaluate", "last", "--step", "20", "--samples", "4")
    at_the_end = {
        ("lines", "loss"): found["loss"],
        ("lines", "bits_per_byte"): found["bits_per_byte"],
    }
    assert scores(records[1]) == at_the_end, "what the task finds, in another process"
    assert records[0].scores != records[1].scores
    # nice(1) counts from where this process stands
    harness = HARNESS.format(python=sys.executable, nice=min(19, os.nice(0) + LOWER_PRIORITY))
    python.write_text(harness)
    python.chmod(0o755)
    greedy.write_text(harness)
    made = project.document("evaluate", "last", "--pending")["evaluations"]
    assert [(each["step"], each["name"], each["error"]) for each in made][1:] == [
        (20, "held-out", ""),
        (20, "tasks", ""),
        (20, "greedy", ""),
    ]
    tasks = read_evaluations(run)[2]
    assert tasks.scores == tuple(
        score
        for task in ("one", "two")
        for score in (
            EvaluationScore(task, "acc", 0.5, 0.25),
            EvaluationScore(task, "x (own)", 1.0),
        )
    )
    assert tasks.versions["lm_eval"] == "0.4.13" and tasks.versions["one"] == "2.0"
    assert sorted(p.suffix for p in (path / "evaluations").glob("step-*")) == [".log"] * 4
    shown = project.invoke("status", "last").stdout
    assert "one acc" in shown and "0.5000 ± 0.2500 at step 20" in shown and "4 made" in shown
    report = read_report(run)
    assert len(report.evaluations) == 4 and "lines</td><td>bits_per_byte" in report_page(report)
    numbers = dict(numbers_of([report, replace(report, evaluations=records[:1])]))
    bits = [scores(record)["lines", "bits_per_byte"] for record in (records[1], records[0])]
    assert numbers["lines bits_per_byte"] == [
        f"{bits[0]:.4f} (step 20)",
        f"{bits[1]:.4f} (step 10)",
    ]
    assert numbers["one acc"] == ["0.5000 ± 0.2500 (step 20)", "n/a"]
    job = read_job(run.job)

    def of_the_last() -> list[EvaluationRecord | None]:
        return [record for step, _, record in due_evaluations(run, job) if step == 20]

    assert of_the_last() == read_evaluations(run)[1:]
    folder = published_folders(run.checkpoints)[-1]
    # as a run that went back behind it writes it
    open_checkpoint(folder).manifest.model_copy(update={"consumed_samples": 1}).write(folder)
    assert of_the_last() == [None] * 3


DAMAGES = """#!{python}
import pathlib, shlex, subprocess, sys
words = shlex.split(sys.argv[1])
if words[-2] == "20":
    for path in pathlib.Path(words[-3], "checkpoints/step-00000020").glob("*.bin"):
        path.write_bytes(bytes([path.read_bytes()[0] ^ 1]) + path.read_bytes()[1:])
sys.exit(subprocess.run(words).returncode)
"""


def test_the_last_whole_checkpoint_stays(project: Project) -> None:
    """The newest is damaged when it is evaluated: those before it may be all there is."""
    script = project.path / "damages"
    script.write_text(DAMAGES.format(python=sys.executable))
    script.chmod(0o755)
    project.add_to_jobs(
        f"""
[[jobs.text.evaluations]]
name = "held-out"
every = 10
datasets = ["lines"]
limit = 4
through = ["{script}"]
"""
    )
    project.invoke("train", "text", "--set", "checkpoint.keep_last=1")
    run = RunFolder(project.runs()[0])
    assert [(r.step, bool(r.error)) for r in read_evaluations(run)] == [(10, False), (20, True)]
    assert "step-00000010" in [folder.name for folder in published_folders(run.checkpoints)]


def test_another_process_makes_them_for_a_while(project: Project) -> None:
    """A run whose evaluations are being made by hand when it goes on makes what comes later."""
    project.add_to_jobs(TABLES.format(python="none"))
    run = RunFolder(project.path / "runs/text/one")
    job = load(project.path).resolve("text").job
    said: list[str] = []

    async def train() -> None:
        with locked(run.path / "evaluations/lock", {"task": "evaluate"}):
            beside = EvaluationsBeside(run, job, said.append)
            await asyncio.sleep(0.1)
        await beside.finish(asyncio.sleep, StopRequests())
        await beside.close()

    asyncio.run(train())
    assert said == ["training is over; its evaluations go on (Ctrl-C leaves them for later)"]
