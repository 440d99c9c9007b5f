"""The task `replay`: the batch of a training step, rebuilt from the data."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainkit.base.documents import document
from trainkit.base.errors import Exit
from trainkit.base.lazy_dataclasses import asdict, dataclass
from trainkit.cli.config.jobs import load_jobs
from trainkit.cli.model.evaluate import warn_of_changed_tokenizer
from trainkit.cli.tables import Page
from trainkit.cli.wrapper import TaskContext, TaskResult
from trainkit.jobs.resolved import read_job
from trainkit.runs.find import find_run

if TYPE_CHECKING:
    from trainkit.train.inference.replay import ReplayedBatch

COMPARISON = {
    None: "the metrics have no row of this step to compare with",
    True: "the step was computed from these samples",
    False: "the step was NOT computed from these samples: the data has changed since",
}


@dataclass(frozen=True)
class BatchHeader:
    """Which samples of the order a step took: the first keys of the document replay/1. `same`:
    whether they are the step's own, as far as that is known."""

    run: str
    step: int
    first: int
    count: int
    batch_checksum: int
    same: bool | None


def replay(task: TaskContext, run_name: str, step: int, samples: int) -> TaskResult:
    """The task `replay`. Exit 6 if the data has changed since.

    Args:
        task: how it was called.
        run_name: which run.
        step: the training step, from 1.
        samples: how many to show; 0: all.
    """
    from trainkit.train.inference.replay import replay as rebuild

    run = find_run(load_jobs(task).roots(), run_name)
    warn_of_changed_tokenizer(run)
    batch = rebuild(run, read_job(run.job), step)
    window = batch.window
    header = BatchHeader(run.id, step, window.first, window.samples, batch.checksum, batch.same)
    shown = batch.samples[: samples or None]
    return TaskResult(
        document("replay/1", **asdict(header), samples=[asdict(each) for each in shown]),
        Exit.STAGE_FAILED if batch.same is False else Exit.DONE,
        _page(header, batch, len(shown)),
    )


def _page(header: BatchHeader, batch: ReplayedBatch, shown: int) -> Page:
    last = header.first + header.count - 1
    yield f"step {header.step} of run {header.run}: samples {header.first} to {last} of the order;"
    yield f"checksum {header.batch_checksum}: {COMPARISON[header.same]}"
    for sample in batch.samples[:shown]:
        yield (
            f"--- position {sample.position}: sample {sample.number} of {sample.dataset},"
            f" micro-batch {sample.micro_batch} of data-parallel rank {sample.data_rank}"
        )
        yield " ".join(map(str, sample.tokens)) if sample.text is None else sample.text
    if shown < len(batch.samples):
        yield f"--- {len(batch.samples) - shown} more: --samples 0 shows all"
