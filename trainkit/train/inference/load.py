"""A trained model read back by one process, or split over a few: which checkpoint, on which
device, in which precision, and the tokenizer it was trained with."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from tokenizers import Tokenizer

from trainkit.base.errors import ConfigError, Exit, Problem, TrainkitError
from trainkit.base.printable import warn
from trainkit.data.indexed.paths import DataFolder
from trainkit.data.tokenizer import end_of_document, load_tokenizer
from trainkit.jobs.job_tables import CONVERTED
from trainkit.jobs.optimizers import EMA
from trainkit.jobs.resolved import read_job
from trainkit.jobs.schema import Job
from trainkit.ops.kernels import choose
from trainkit.plan.checks import indivisible
from trainkit.plan.rules import Rules
from trainkit.runs.checkpoints import (
    Checkpoint,
    DamagedCheckpoint,
    checkpoint_folder,
    newest_valid,
    open_checkpoint,
    published_folders,
    verify,
)
from trainkit.runs.folder import RunFolder
from trainkit.train.checkpoint import save_load as checkpoint
from trainkit.train.model.transformer import Transformer, build_on_meta
from trainkit.train.parallel import tensor_parallel
from trainkit.train.parallel.shards import model_tensors, sharded_parameters
from trainkit.train.parallel.tensor_group import TensorGroup

ALONE = TensorGroup()  # one process holds the model
# those of training, their moving average, and the mean of several checkpoints
TRAINED = "trained"
AVERAGE = "average"
WEIGHTS = (TRAINED, EMA, AVERAGE)
# a model that trained in float8 is read in 16 bits: its weights are nowhere rounded further
PRECISIONS = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp8": torch.bfloat16,
}


def choose_checkpoint(
    run: RunFolder, step: int | None = None, weights: str = TRAINED
) -> Checkpoint:
    """The run's checkpoint of `step`, whole and with the right hashes; None: the newest valid
    one, and every newer one passed over is named on stderr.

    Args:
        run: the run.
        step: of the checkpoint.
        weights: one of WEIGHTS; with "average" one that `average` made.

    Raises:
        TrainkitError: exit 16, there is none, or that of `step` is damaged.
        ConfigError: another engine wrote them, or it has no such weights.
    """
    if weights not in WEIGHTS:
        raise ConfigError(f"--weights {weights!r} is not one of: {', '.join(WEIGHTS)}")
    at = run.averages if weights == AVERAGE else run.checkpoints
    return with_weights(_chosen(run, at, step), weights)


def with_weights(saved: Checkpoint, weights: str) -> Checkpoint:
    """The checkpoint as it is; for "ema" with its moving averages as the model's weights. Raises
    ConfigError where it has none."""
    if weights != EMA:
        return saved
    kept = f"optimizer.{EMA}."
    found = {
        f"model.{name.removeprefix(kept)}": entry
        for name, entry in saved.manifest.tensors.items()
        if name.startswith(kept)
    }
    if not found:
        raise ConfigError(
            f"{saved.folder} has no moving average of its weights",
            hint="training.ema_decay keeps one, from the first step on",
        )
    tensors = {**saved.manifest.tensors, **found}
    return Checkpoint(saved.folder, saved.manifest.model_copy(update={"tensors": tensors}))


def _chosen(run: RunFolder, checkpoints: Path, step: int | None) -> Checkpoint:
    """As of `choose_checkpoint`, in a folder of them."""
    steps = [int(folder.name[5:]) for folder in published_folders(checkpoints)]
    if not steps and checkpoints == run.averages:
        raise TrainkitError(
            f"run {run.id} has no average of checkpoints",
            exit=Exit.NO_CHECKPOINT,
            hint=f"`invoke average {run.id}` makes one",
        )
    if not steps:
        if (engine := read_job(run.job).engine) != "native":
            raise ConfigError(
                f"run {run.id} was trained by {engine}, whose checkpoints are not read as they are",
                hint=f"`invoke convert {run.id} --to hf --out FOLDER` writes what transformers"
                " loads, and init_from begins with"
                if engine in CONVERTED
                else "its own tools read them",
            )
        raise TrainkitError(
            f"run {run.id} has no checkpoint yet",
            exit=Exit.NO_CHECKPOINT,
            hint="the first is written after training.save_interval steps",
        )
    if step is not None and step not in steps:
        raise TrainkitError(
            f"run {run.id} has no checkpoint of step {step}",
            exit=Exit.NO_CHECKPOINT,
            hint=(
                f"it has those of steps {', '.join(map(str, steps))}; older ones go as"
                " checkpoint.keep_last says"
            ),
        )
    if step is None:
        newest = newest_valid(
            checkpoints,
            lambda message: warn(f"passed over: {message}"),
        )
        assert newest is not None, "there are checkpoints: the newest valid one or an error"
        return newest
    folder = checkpoint_folder(checkpoints, step)
    if problems := verify(folder):
        raise DamagedCheckpoint(folder, problems)
    return open_checkpoint(folder)


def choose_device(job: Job, device: str = "") -> torch.device:
    """The device of that name, "cpu" or "cuda"; "": the kind that the job's cluster computes on.

    Raises ConfigError for other names, and where this machine has no such device: nothing falls
    back to the CPU.
    """
    kind = device or job.cluster.device_type
    if kind not in ("cpu", "cuda"):
        raise ConfigError(f"device {kind!r} is neither cpu nor cuda")
    if kind == "cuda" and not torch.cuda.is_available():
        if device:
            why = ""
        else:
            why = f", which job {job.name!r} computes on (clusters.{job.cluster.name}.device)"
        raise ConfigError(
            f"this machine has no CUDA device{why}", hint="--device cpu computes on the CPU"
        )
    return torch.device(kind)


def vocabulary(saved: Checkpoint) -> int:
    """Rows of the embedding. Raises TrainkitError (exit 3) where the checkpoint has none."""
    name = "model.embed_tokens.weight"
    if name not in saved.manifest.tensors:
        raise TrainkitError(
            f"{saved.folder} is a checkpoint of another model: {name} is not in it",
            exit=Exit.CONFIG,
        )
    return int(saved.manifest.tensors[name].shape[0])


def refuse_unsplittable(job: Job, ranks: int, device: torch.device) -> None:
    """Raise ConfigError, with all reasons, where so many tensor-parallel ranks cannot share the
    job's model, or this machine."""
    reasons = [
        f"{key} {size} does not divide by --tensor-parallel {ranks}"
        for key, size in indivisible(job.model, Rules(), ranks).values()
    ]
    if device.type == "cuda" and torch.cuda.device_count() < ranks:
        reasons.append(
            f"--tensor-parallel {ranks} needs as many CUDA devices; this machine has"
            f" {torch.cuda.device_count()}"
        )
    if reasons:
        raise ConfigError([Problem(reason) for reason in reasons])


def load_model(
    job: Job,
    saved: Checkpoint,
    device: torch.device,
    dtype: torch.dtype,
    group: TensorGroup = ALONE,
) -> Transformer:
    """The model of a checkpoint, whatever layout wrote it: for reading only, without dropout,
    weights cast to `dtype` as training casts them. Where the fused kernels could not be taken,
    a line on stderr says why.

    Args:
        job: the run's.
        saved: the checkpoint.
        device: where the model computes.
        dtype: of its weights.
        group: the ranks that it is split over, each of which calls this; by default this one holds
            all of it.

    Raises:
        TrainkitError: exit 3, the checkpoint is of another model.
        Unavailable: the job wants fused kernels, and they are not there.
    """
    chosen = choose(job.kernels, device.type)
    if chosen.because and group.rank == 0:
        print(chosen, file=sys.stderr)
    model = build_on_meta(job.model, vocabulary(saved), chosen.kernels)
    tensor_parallel.apply(model, vocabulary(saved), group)
    model.to_empty(device="cpu")
    checkpoint.load(saved, model_tensors(sharded_parameters(model, group.size)))
    for parameter in model.parameters():  # buffers are not cast: experts' biases are fp32 always
        parameter.data = parameter.data.to(dtype)
    return model.to(device).eval().requires_grad_(False)


def load_own_tokenizer(job: Job) -> tuple[Tokenizer, int]:
    """The tokenizer of the job's dataset, and the id that ends a document. Raises ConfigError:
    the job has random tokens, or the file is gone."""
    if job.dataset.tokenizer is None:
        raise ConfigError(
            f"dataset {job.dataset.name or 'mock'!r} is random tokens without a tokenizer: there is"
            " no text"
        )
    path = DataFolder(job.cluster.root_folder, job.dataset).tokenizer
    if not path.is_file():
        raise ConfigError(
            f"the tokenizer of dataset {job.dataset.name!r} is gone: {path}",
            hint="run prep-data again",
        )
    tokenizer = load_tokenizer(path)
    return tokenizer, end_of_document(tokenizer, job.dataset.tokenizer.eod_token, path)
