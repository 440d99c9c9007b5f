"""The program of one evaluation of one checkpoint: python -I evaluation_worker.py RUN STEP NAME.

It appends a line to the run's evaluations.jsonl, or ends with an error in words on stderr. It is a
process of its own with a lower priority and few threads: training must not notice it.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

if __name__ == "__main__":  # by path: the snapshot this file is part of comes first
    sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

import trainkit
from trainkit.base.errors import Exit, TrainkitError
from trainkit.base.process import die_with_parent, die_with_parent_hook
from trainkit.base.worker import PARENT_VARIABLE
from trainkit.jobs.resolved import read_job
from trainkit.jobs.schema import EvaluationSettings, Job
from trainkit.runs.checkpoints import Checkpoint
from trainkit.runs.evaluations import (
    EvaluationRecord,
    EvaluationScore,
    add_evaluation,
    evaluation_folder,
)
from trainkit.runs.folder import RunFolder

LOWER_PRIORITY = 10  # as nice(1) gives: lower still, it would starve where ranks take all cores
SHARD_BYTES = 5_000_000_000
# nothing is fetched: a node has no way out, and a task must not change from one step to the next
OFFLINE = dict.fromkeys(("HF_DATASETS_OFFLINE", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"), "1")


def measure(
    job: Job, checkpoint: Checkpoint, settings: EvaluationSettings, folder: Path
) -> tuple[list[EvaluationScore], dict[str, str]]:
    """(scores, versions of what computed them).

    Args:
        job: the run's.
        checkpoint: what is measured.
        settings: what is asked.
        folder: for files that live as long as this.

    Raises TrainkitError: the checkpoint or the data cannot be read, or lm_eval failed.
    """
    import torch

    versions = {"trainkit": trainkit.__version__, "torch": torch.__version__}
    if settings.datasets:
        return list(_held_out_scores(job, checkpoint, settings)), versions
    export_weights(job, checkpoint, folder / "weights")
    _run_harness(settings, folder)
    (path,) = (folder / "results").rglob("results_*.json")
    found = json.loads(path.read_text())
    versions |= {"lm_eval": str(found.get("lm_eval_version"))}
    versions |= {"transformers": str(found.get("transformers_version"))}
    versions |= {name: str(version) for name, version in found["versions"].items()}
    return list(harness_scores(found["results"])), versions


def _held_out_scores(
    job: Job, checkpoint: Checkpoint, settings: EvaluationSettings
) -> Iterator[EvaluationScore]:
    from trainkit.train.inference.evaluate import EvaluationFeed, evaluate
    from trainkit.train.inference.load import (
        PRECISIONS,
        choose_device,
        load_model,
        load_own_tokenizer,
        vocabulary,
    )

    tokenizer, end = load_own_tokenizer(job)
    device = choose_device(job, settings.device)
    model = load_model(job, checkpoint, device, PRECISIONS[job.training.precision])
    for dataset in settings.datasets:
        windows = EvaluationFeed(job, dataset, "valid", vocabulary(checkpoint), device)
        found = evaluate(model, windows, tokenizer, end, samples=settings.limit or 0)
        yield EvaluationScore(dataset.name, "loss", found.loss)
        if found.bits_per_byte is not None:
            yield EvaluationScore(dataset.name, "bits_per_byte", found.bits_per_byte)


def export_weights(job: Job, checkpoint: Checkpoint, folder: Path) -> None:
    """Write a checkpoint as transformers loads it, in the precision that the job computes in."""
    from trainkit.train.huggingface.weights import CheckpointWeights
    from trainkit.train.huggingface.writing import export, tokenizer_of

    export(
        CheckpointWeights(checkpoint, job.model),
        job.model,
        folder,
        dtype="bf16" if job.training.precision == "fp8" else job.training.precision,
        shard_bytes=SHARD_BYTES,
        tokenizer=tokenizer_of(job),
        about={"trainkit_step": str(checkpoint.manifest.step)},
    )


def _run_harness(settings: EvaluationSettings, folder: Path) -> None:
    """Have lm-evaluation-harness measure folder/weights and write to folder/results."""
    argv = [settings.python or sys.executable, "-m", "lm_eval", "--model", "hf"]
    argv += ["--model_args", f"pretrained={folder / 'weights'}"]
    argv += ["--tasks", ",".join(settings.tasks), "--device", settings.device]
    argv += ["--batch_size", str(settings.batch_size), "--output_path", str(folder / "results")]
    if settings.include_path:
        argv += ["--include_path", settings.include_path]
    if settings.num_fewshot is not None:
        argv += ["--num_fewshot", str(settings.num_fewshot)]
    if settings.limit is not None:
        argv += ["--limit", str(settings.limit)]
    try:
        done = subprocess.run(
            argv,
            check=False,
            stdin=subprocess.DEVNULL,
            env={**os.environ, **OFFLINE},
            cwd=settings.include_path or folder,
            preexec_fn=die_with_parent_hook(os.getpid()),
        )
    except OSError as error:
        raise TrainkitError(f"{argv[0]}: {error.strerror}", exit=Exit.CONFIG) from None
    if done.returncode:
        raise TrainkitError(
            f"lm_eval ended with exit code {done.returncode}: {folder.name}.log says why",
            exit=Exit.RANK_USER,
        )


def harness_scores(results: Mapping[str, Mapping[str, object]]) -> Iterator[EvaluationScore]:
    """Scores of a results file of lm_eval: {task: {"METRIC,FILTER": value,
    "METRIC_stderr,FILTER": value or "N/A"}}. Numbers that are not finite are left out."""
    for task, values in results.items():
        for key, value in values.items():
            metric, _, chosen = key.partition(",")
            if not chosen or metric.endswith("_stderr"):
                continue
            number = _finite(value)
            if number is not None:
                name = metric if chosen == "none" else f"{metric} ({chosen})"
                error = _finite(values.get(f"{metric}_stderr,{chosen}"))
                yield EvaluationScore(task, name, number, error)


def _finite(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


def _draw(run: RunFolder, record: EvaluationRecord) -> None:
    """Show the scores in TensorBoard."""
    from torch.utils.tensorboard import SummaryWriter  # slow

    with SummaryWriter(str(run.tensorboard / "evaluations")) as writer:
        for score in record.scores:
            tag = f"{record.name}/{score.set}/{score.metric}"
            writer.add_scalar(tag, score.value, record.step)


def main() -> None:
    """The program."""
    if PARENT_VARIABLE in os.environ:
        die_with_parent(int(os.environ[PARENT_VARIABLE]))
    os.nice(LOWER_PRIORITY)
    run = RunFolder(Path(sys.argv[1]))
    step = int(sys.argv[2])
    job = read_job(run.job)
    settings = next(each for each in job.evaluations if each.name == sys.argv[3])
    # before torch is imported, which reads them then
    os.environ |= dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), str(settings.threads))
    if settings.device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    from trainkit.train.inference.load import choose_checkpoint

    began = time.perf_counter()
    folder = evaluation_folder(run, step, settings.name)
    shutil.rmtree(folder, ignore_errors=True)  # of one that was killed
    folder.mkdir(parents=True)
    try:
        checkpoint = choose_checkpoint(run, step)
        seal = checkpoint.manifest.xxh128
        scores, versions = measure(job, checkpoint, settings, folder)
    except (TrainkitError, OSError) as error:
        sys.exit(f"ERROR: {error}")
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    seconds = round(time.perf_counter() - began, 3)
    found = tuple(scores)
    record = EvaluationRecord(step, settings.name, found, seconds, versions, checkpoint=seal)
    add_evaluation(run, record)
    _draw(run, record)


if __name__ == "__main__":
    main()
