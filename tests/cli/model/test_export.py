"""The task export: a run's checkpoint becomes a folder that transformers loads."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.conftest import Project
from trainkit.base.errors import TrainkitError
from trainkit.cli.model.convert import export
from trainkit.cli.options import ExportOptions
from trainkit.cli.wrapper import TaskContext
from trainkit.data.indexed.paths import DataFolder
from trainkit.data.tokenizer import train_bpe
from trainkit.jobs.load import load
from trainkit.jobs.resolved import write_job
from trainkit.runs.checkpoints import checkpoint_folder
from trainkit.runs.folder import RunFolder
from trainkit.train.checkpoint import save_load as checkpoint
from trainkit.train.checkpoint.save_load import CheckpointMetadata
from trainkit.train.model.transformer import Transformer, build_on_meta
from trainkit.train.parallel.initialize import initial_value

pytestmark = pytest.mark.usefixtures("one_rank")

RUN = "20260101-000000-0000"


def make_run(project: Project, job_name: str) -> tuple[RunFolder, dict[int, Transformer]]:
    """A run of a job with two checkpoints, and the models in them; with the tokenizer of its
    dataset."""
    resolved = load(project.path).resolve(job_name)
    job, run = resolved.job, RunFolder(project.path / "runs" / job_name / RUN)
    run.path.mkdir(parents=True)
    rows = job.model.vocab_size
    if job.dataset.tokenizer:
        tokenizer = train_bpe(
            iter(["the quick brown fox jumps over the lazy dog"] * 9), 300, "<|endoftext|>"
        )
        path = DataFolder(project.path, job.dataset).tokenizer
        path.parent.mkdir(parents=True)
        tokenizer.save(str(path))
        rows = tokenizer.get_vocab_size()
    assert rows is not None
    models = {}
    for step in (5, 10):
        models[step] = module = build_on_meta(job.model, rows).to_empty(device="cpu")
        for name, p in module.named_parameters():
            with torch.no_grad():
                p.copy_(initial_value(name, tuple(p.shape), job.model, step))
        tensors = {f"model.{name}": p.detach() for name, p in module.named_parameters()}
        checkpoint.save(
            run.checkpoints,
            tensors,
            CheckpointMetadata(step, consumed_samples=0, job=job.model_dump(mode="json")),
        )
    write_job(run.job, resolved)
    return run, models


def call(project: Project, run_name: str = RUN, **options: Any) -> dict[str, Any]:
    """The task's function, in this process."""
    asked = {"to": str(project.path / "out"), **options}
    task = TaskContext(json=True, dry_run=False, folder=project.path)
    return export(task, run_name, ExportOptions(**asked)).document


def refusal(project: Project, run_name: str = RUN, **options: Any) -> TrainkitError:
    with pytest.raises(TrainkitError) as error:
        call(project, run_name, **options)
    return error.value


def same_logits(folder: Path, model: Transformer) -> None:
    transformers: Any = importlib.import_module("transformers")

    tokens_BS = torch.arange(12).reshape(1, 12)
    there = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    torch.testing.assert_close(there(tokens_BS).logits, model(tokens_BS), rtol=1e-5, atol=1e-5)


def test_the_task(project: Project) -> None:
    """As a person types it: relative folder, tokenizer beside the weights, one document; then
    the same again, refused."""
    transformers: Any = importlib.import_module("transformers")

    _, models = make_run(project, "text")
    document = project.document("export", "last", "--format", "hf", "--to", "out/hf")
    assert document == {
        "schema": "export/1",
        "run": RUN,
        "step": 10,
        "format": "hf",
        "folder": str(project.path / "out/hf"),
        "dtype": "fp32",
        "parameters": sum(p.numel() for p in models[10].parameters()),
        "bytes": 4 * sum(p.numel() for p in models[10].parameters()),
        "files": ["model.safetensors"],
        "tokenizer": True,
    }
    same_logits(project.path / "out/hf", models[10])
    tokenizer = transformers.AutoTokenizer.from_pretrained(project.path / "out/hf")
    assert (
        tokenizer.decode(tokenizer("the lazy fox")["input_ids"]) == "the lazy fox"
        and tokenizer.eos_token == "<|endoftext|>"
    )
    error = project.document("export", "last", "--to", "out/hf", exit=3)
    assert "is there already" in error["problems"][0]["message"]


@torch.no_grad()
def test_step_dtype_and_shards(project: Project) -> None:
    _, models = make_run(project, "random")
    assert call(project, step=5)["step"] == 5
    same_logits(project.path / "out", models[5])
    document = call(project, to=str(project.path / "small"), dtype="bf16", shard_gb=2e-5)
    assert (
        document["bytes"] == 2 * document["parameters"]
        and len(document["files"]) > 2
        and not document["tokenizer"]
    )
    assert not (project.path / "small/tokenizer.json").exists()
    same_logits(project.path / "small", models[10].bfloat16().float())


def test_bad_words_are_told_at_once(project: Project) -> None:
    make_run(project, "random")
    error = refusal(project, format="onnx", dtype="int8", to="")
    assert error.exit == 3
    for words in (
        "--format 'onnx' is not one of: hf",
        "--dtype 'int8' is not one of: fp32, bf16, fp16",
        "--to DIR is missing",
    ):
        assert words in str(error)
    assert refusal(project, "nobody").exit == 3


def test_no_valid_checkpoint(project: Project) -> None:
    run, _ = make_run(project, "random")
    error = refusal(project, step=7)
    assert error.exit == 16 and "no checkpoint of step 7" in error.message and "5, 10" in error.hint
    (checkpoint_folder(run.checkpoints, 10) / "rank-00000.bin").write_bytes(b"")
    assert refusal(project, step=10).exit == 16
    assert call(project)["step"] == 5  # the newest that is valid
    (checkpoint_folder(run.checkpoints, 5) / "rank-00000.bin").write_bytes(b"")
    assert refusal(project, to=str(project.path / "other")).exit == 16
    assert not (project.path / "other").exists()


def test_a_tokenizer_that_is_gone_or_another(
    project: Project, capfd: pytest.CaptureFixture[str]
) -> None:
    run, _ = make_run(project, "text")
    path = DataFolder(project.path, load(project.path).resolve("text").job.dataset).tokenizer
    (run.path / "launch").mkdir()
    (run.path / "launch/inputs.json").write_text(
        json.dumps({"schema": "inputs/1", "files": [[str(path), 1, 1]]})
    )
    call(project)
    assert "has changed since run" in capfd.readouterr().err
    path.unlink()
    error = refusal(project, to=str(project.path / "other"))
    assert error.exit == 3 and "is missing" in str(error) and not (project.path / "other").exists()


def test_beginning_weights_are_checked_with_the_data(project: Project) -> None:
    """What a run exported is what another begins with; a model it does not fit is refused before
    anything starts."""
    make_run(project, "random")
    call(project)
    path = project.path / "jobs.toml"
    path.write_text(path.read_text() + '\n[jobs.on]\nextends = "random"\ninit_from = "out"\n')
    assert project.document("prep-data", "--job", "on")["schema"] == "stages/1"
    error = project.document("train", "on", "--set", "model.num_layers=3", "--dry-run", exit=3)
    assert "n_layer is 2 there, 3 for this job" in error["problems"][0]["message"]
    assert error["problems"][0]["file"] == str(project.path / "out/config.json")


@pytest.mark.parametrize("words", [("check",), ("plan", "on"), ("plan", "on", "--search")])
def test_weights_that_are_not_here_are_refused_before_training(
    project: Project, words: tuple[str, ...]
) -> None:
    """In the words of `train`; weights of another cluster's machines are not looked for here."""
    path = project.path / "jobs.toml"
    path.write_text(path.read_text() + '\n[jobs.on]\nextends = "random"\ninit_from = "./nope"\n')
    by_train = project.document("train", "on", "--dry-run", exit=3)["problems"]
    assert by_train[0]["message"] == "there is no such folder"
    assert project.document(*words, exit=3)["problems"] == by_train
    path.write_text(path.read_text() + '\n[clusters.far]\nlauncher = "slurm"\ndevice = "cpu"\n')
    path.write_text(path.read_text().replace('init_from = "./', 'cluster = "far"\ninit_from = "./'))
    assert project.document("check")["problems"] == []
