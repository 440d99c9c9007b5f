"""The batch of a step once more: its samples read again by the order of samples, and as text."""

from __future__ import annotations

import numpy as np
import xxhash
from tokenizers import Tokenizer

from trainkit.base.errors import ConfigError
from trainkit.base.lazy_dataclasses import dataclass
from trainkit.data.order.open import open_training
from trainkit.data.order.samples import NO_TOKEN
from trainkit.data.tokenizer import load_tokenizer
from trainkit.jobs.schema import Job
from trainkit.runs.folder import RunFolder
from trainkit.runs.metrics import read_rows
from trainkit.runs.sample_windows import SampleWindow, find_sample_window
from trainkit.train.batches import data_folder, vocab_size


@dataclass(frozen=True)
class ReplayedSample:
    """One sample of a batch.

    Args:
        position: in the order of samples.
        data_rank, micro_batch: who read it, and when in the step.
        dataset, number: where it lies.
        tokens: seq_length + 1 ids; -1 where Megatron's order has none.
        text: decoded; None for tokens that stand for no text.
    """

    position: int
    data_rank: int
    micro_batch: int
    dataset: str
    number: int
    tokens: list[int]
    text: str | None


@dataclass(frozen=True)
class ReplayedBatch:
    """All samples of a step, and whether they are those it was made with: True, False, None
    where the metrics do not say (`batch_checksum`)."""

    window: SampleWindow
    samples: list[ReplayedSample]
    checksum: int
    same: bool | None


def replay(run: RunFolder, job: Job, step: int) -> ReplayedBatch:
    """Rebuild the batch of a step.

    Args:
        run: the run.
        job: its job.
        step: which step.

    Raises:
        ConfigError: its samples were not recorded; and as reading the data does.
    """
    window = find_sample_window(run, step)
    if window is None:
        raise _not_recorded(run, step)
    mixture = open_training(job, vocab_size(job))
    datasets, numbers = mixture.order.window(window.first, window.samples)
    rows = np.empty((window.samples, job.model.seq_length + 1), dtype=np.int64)
    for index in np.unique(datasets):
        at = np.flatnonzero(datasets == index)
        mixture.samples[index].read(numbers[at], at, rows)
    checksum = sum(int(xxhash.xxh32_intdigest(row.data)) for row in rows)
    tokenizer = None
    if job.dataset.tokenizer:
        tokenizer = load_tokenizer(data_folder(job).tokenizer)
    micro = job.training.micro_batch_size
    ranks = job.data_parallel_size
    samples = [
        ReplayedSample(
            position=window.first + i,
            data_rank=i // micro % ranks,
            micro_batch=i // (micro * ranks),
            dataset=mixture.names[int(datasets[i])],
            number=int(numbers[i]),
            tokens=row.tolist(),
            text=_decode(tokenizer, row.tolist()),
        )
        for i, row in enumerate(rows)
    ]
    logged = _logged_checksum(run, step)
    same = logged == checksum if logged is not None else None
    return ReplayedBatch(window, samples, checksum, same)


def _not_recorded(run: RunFolder, step: int) -> ConfigError:
    hint = "no step was logged yet"
    known = [row["step"] for row in read_rows(run.metrics) if "eval" not in row]
    if known:
        hint = f"logged steps: {known[0]} to {known[-1]}"
    return ConfigError(f"the samples of step {step} of run {run.id} were not recorded", hint=hint)


def _logged_checksum(run: RunFolder, step: int) -> int | None:
    """What the metrics say of the step's samples, the last attempt's word."""
    logged = [
        int(row["batch_checksum"])
        for row in read_rows(run.metrics)
        if row["step"] == step and "batch_checksum" in row
    ]
    return logged[-1] if logged else None


def _decode(tokenizer: Tokenizer | None, tokens: list[int]) -> str | None:
    if tokenizer is None:
        return None
    text: str = tokenizer.decode(
        [token for token in tokens if token != NO_TOKEN], skip_special_tokens=False
    )
    return text
