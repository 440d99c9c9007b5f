"""Folders of runs that ended well, made without training: their losses are given."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator

import numpy as np

from trainkit.base.files import write_json
from trainkit.base.process import identity
from trainkit.jobs.load import Jobs
from trainkit.jobs.resolved import write_job
from trainkit.jobs.sweeps import Point, overrides_of
from trainkit.launch.job_plan import plan_of
from trainkit.runs.events import AttemptEnded, AttemptStarted, EventLog, FailureClass
from trainkit.runs.folder import RunFolder
from trainkit.scaling.law import Law
from trainkit.scaling.points import counted_parameters

TRUE = Law(E=1.8172, A=482.01, B=2085.43, alpha=0.3478, beta=0.3658)  # arXiv:2404.10102


def drawn(
    seed: int, noise: float, sizes: int = 5, parts: tuple[float, ...] = (0.5, 1.0, 2.0)
) -> tuple[list[float], list[float], list[float]]:
    """N, D and noisy L of a ladder, by TRUE."""
    source = np.random.default_rng(seed)
    grid = list(itertools.product(np.geomspace(2e7, 6e8, sizes), parts))
    parameters = [float(size) for size, _ in grid]
    tokens = [20.0 * float(size) * part for size, part in grid]
    off = np.exp(source.normal(0, noise, len(grid)))
    losses = [
        TRUE.loss(*each) * float(by)
        for each, by in zip(zip(parameters, tokens, strict=True), off, strict=True)
    ]
    return parameters, tokens, losses


def ladder(
    depths: tuple[int, ...] = (1, 2, 3), steps: tuple[int, ...] = (40, 80, 160)
) -> Iterator[Point]:
    """Values of the runs of a small one."""
    for depth, many in itertools.product(depths, steps):
        yield {
            "model.num_layers": depth,
            "model.hidden_size": 16 * depth,
            "model.num_attention_heads": depth,
            "training.train_iters": many,
        }


def make_run(
    jobs: Jobs,
    name: str,
    values: Point,
    loss: Callable[[float, float], float],
    ending: FailureClass = "success",
) -> RunFolder:
    """A run of a job with these values.

    Args:
        jobs: those of a project.
        name: of the job.
        values: by dotted key.
        loss: its last, of N and D.
        ending: how it ended.
    """
    resolved = jobs.resolve(name, overrides_of(values))
    job = resolved.job
    number = len(list((jobs.root / "runs").glob("*/*")))
    run = RunFolder(jobs.root / "runs" / name / f"20261127-0000{number:02}-aaaa")
    run.path.mkdir(parents=True)
    write_job(run.job, resolved)
    plan = plan_of(job)
    write_json(run.plan, plan.to_json())
    assert plan.vocab_size is not None
    last = job.training.train_iters
    samples = last * job.global_batch_size
    tokens = samples * job.model.seq_length
    end = loss(counted_parameters(job, plan.vocab_size), tokens)
    rows: list[dict[str, object]] = [
        {"step": step, "consumed_samples": at, "lm_loss": value, "elapsed_ms": 1.0}
        for step, at, value in ((1, samples // last, 9.0), (last, samples, end))
    ]
    rows.append({"step": last, "consumed_samples": samples, "eval": "valid", "lm_loss": end})
    run.metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
    events = EventLog(run.attempt(1))
    events.write(AttemptStarted(run.id, 1, identity().to_json(), 1))
    events.write(AttemptEnded(0, None, failure_class=ending))
    return run
