"""The job's evaluations made by hand: one that is killed, and lm-evaluation-harness itself, whose
Python TRAINKIT_LM_EVAL_PYTHON names."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer

from tests.cli.model.test_export import make_run
from tests.conftest import Project
from trainkit.jobs.resolved import read_job
from trainkit.launch.supervise.evaluations import evaluate_checkpoints
from trainkit.ops.build import CHECKOUT
from trainkit.runs.evaluations import due_evaluations, evaluations_path, read_evaluations
from trainkit.runs.folder import RunFolder
from trainkit.train.huggingface.writing import tokenizer_of
from trainkit.train.model.transformer import Transformer

pytestmark = pytest.mark.usefixtures("one_rank")

PYTHON = os.environ.get("TRAINKIT_LM_EVAL_PYTHON", "")
# a python of the harness that never ends
STUCK = """#!/bin/sh
echo $$ > {folder}/pid
exec sleep 1000
"""
TABLE = """
[[jobs.text.evaluations]]
name = "own"
every = 10
tasks = ["own_choice", "own_text"]
python = "{python}"
include_path = "own-tasks"
batch_size = 2
"""
CHOICE = """
task: own_choice
output_type: multiple_choice
dataset_path: json
dataset_kwargs: {data_files: {validation: choice.jsonl}}
validation_split: validation
doc_to_text: question
doc_to_choice: "{{choices}}"
doc_to_target: answer
metric_list: [{metric: acc}, {metric: acc_norm}]
"""
TEXT = """
task: own_text
output_type: loglikelihood
dataset_path: json
dataset_kwargs: {data_files: {validation: text.jsonl}}
validation_split: validation
doc_to_text: question
doc_to_target: " {{ending}}"
metric_list: [{metric: perplexity}, {metric: acc}]
"""


def prepared_run(project: Project, python: object) -> tuple[RunFolder, dict[int, Transformer]]:
    """A run with checkpoints, one of which is due, that runs the code of this checkout."""
    project.add_to_jobs(TABLE.format(python=python))
    run, models = make_run(project, "text")
    run.code.symlink_to(CHECKOUT)
    return run, models


def write_tasks(folder: Path) -> None:
    """Two tasks of one's own and their data."""
    folder.mkdir()
    words = ["the", "quick", "brown", "fox", "jumps", "over", "the", "lazy", "dog"]
    asked = [(words[i : i + 3], words[i + 3]) for i in range(6)]
    choices = [
        {"question": " ".join(before), "choices": words[:4], "answer": i % 4}
        for i, (before, _) in enumerate(asked)
    ]
    texts = [{"question": " ".join(before), "ending": ending} for before, ending in asked]
    for name, tables in (("choice", choices), ("text", texts)):
        lines = "".join(json.dumps(table) + "\n" for table in tables)
        (folder / f"{name}.jsonl").write_text(lines)
    (folder / "own_choice.yaml").write_text(CHOICE)
    (folder / "own_text.yaml").write_text(TEXT)


def test_one_that_is_killed_is_made_again(project: Project) -> None:
    """No process and no line of it is left; its checkpoint is still kept for it."""
    python = project.path / "python"
    python.write_text(STUCK.format(folder=project.path))
    python.chmod(0o755)
    run, _ = prepared_run(project, python)
    (project.path / "own-tasks").mkdir()
    job = read_job(run.job)
    pid_file = project.path / "pid"

    async def stopped() -> None:
        making = asyncio.create_task(evaluate_checkpoints(run, job, lambda: False, print))
        while not (pid_file.exists() and pid_file.read_text().strip()):
            assert not making.done(), making
            await asyncio.sleep(0.05)
        making.cancel()
        await asyncio.gather(making, return_exceptions=True)

    asyncio.run(stopped())
    state = Path(f"/proc/{pid_file.read_text().strip()}/stat")
    assert not state.exists() or ") Z " in state.read_text()
    assert not evaluations_path(run).exists()
    assert [(step, each.name) for step, each, _ in due_evaluations(run, job)] == [(10, "own")]
    kept = project.document("checkpoints", "last")["checkpoints"]
    assert "to be evaluated" in kept[1]["kept"] and "to be evaluated" not in kept[0]["kept"]
    evaluations_path(run).write_text('{"step": 10, "name": "own", "sco')  # torn
    python.write_text("#!/bin/sh\necho nothing; exit 3\n")
    said = project.invoke("evaluate", "last", "--pending").stdout
    assert "own of step 10 failed: ERROR: lm_eval ended with exit code 3" in said
    (record,) = read_evaluations(run)
    assert record.error and record.step == 10
    kept = project.document("checkpoints", "last")["checkpoints"]
    assert "to be evaluated" not in kept[1]["kept"]


def by_hand(project: Project, tasks: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """(results, samples) of lm_eval as a person runs it on what `export` writes."""
    project.document("export", "last", "--step", "10", "--to", "weights")
    argv = [PYTHON, "-m", "lm_eval", "--model", "hf", "--tasks", "own_choice,own_text"]
    argv += ["--model_args", f"pretrained={project.path / 'weights'}", "--device", "cpu"]
    argv += ["--include_path", str(tasks), "--output_path", str(project.path / "found")]
    offline = dict.fromkeys(("HF_DATASETS_OFFLINE", "HF_HUB_OFFLINE"), "1")
    environment = project.environment(**offline)
    subprocess.run([*argv, "--log_samples"], cwd=tasks, env=environment, check=True)
    (path,) = (project.path / "found").rglob("results_*.json")
    samples = [
        json.loads(line)
        for file in path.parent.glob("samples_*.jsonl")
        for line in file.read_text().splitlines()
    ]
    return json.loads(path.read_text())["results"], samples


@torch.no_grad()
def likelihood(model: Transformer, tokenizer: Tokenizer, before: str, after: str) -> float:
    """Summed log-probability of `after`, by trainkit's own forward."""
    start = len(tokenizer.encode(before, add_special_tokens=False).ids)
    ids = tokenizer.encode(before + after, add_special_tokens=False).ids
    logits_SV = model(torch.tensor([ids[:-1]]))[0].double().log_softmax(-1)
    return sum(float(logits_SV[at - 1, ids[at]]) for at in range(start, len(ids)))


@pytest.mark.skipif(not PYTHON, reason="TRAINKIT_LM_EVAL_PYTHON names no Python with lm_eval")
def test_the_harness_finds_what_the_model_says(project: Project) -> None:
    tasks = project.path / "own-tasks"
    run, models = prepared_run(project, PYTHON)
    write_tasks(tasks)
    project.invoke("evaluate", "last", "--pending", HF_HOME=str(project.path / "hub"))
    (record,) = read_evaluations(run)
    assert not record.error
    results, samples = by_hand(project, tasks)
    ours = {(score.set, score.metric): (score.value, score.stderr) for score in record.scores}
    assert len(ours) == 4
    for (task, metric), (value, stderr) in ours.items():
        assert value == results[task][f"{metric},none"]
        there = results[task][f"{metric}_stderr,none"]
        assert stderr == (None if there == "N/A" else there)
    path = tokenizer_of(read_job(run.job))
    assert path is not None
    tokenizer = Tokenizer.from_file(str(path.path))
    apart = [
        abs(float(found[0]) - likelihood(models[10], tokenizer, asked["arg_0"], asked["arg_1"]))
        for sample in samples
        for found, asked in zip(sample["filtered_resps"], sample["arguments"].values(), strict=True)
    ]
    assert len(apart) == 6 * 4 + 6 and max(apart) < 1e-4, apart
    print(f"{len(apart)} log-likelihoods, at most {max(apart):.1e} from trainkit's own")
