"""How a task on a trained model is handed to several ranks: the program, what it is told, and
who starts it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from trainkit.jobs.schema import Job

ARGV = (sys.executable, "-I", "-m", "trainkit.train.inference.worker")
# Starts so many ranks of a program with a spec on devices of a type, and has rank 0's result:
# launch.together, passed in by whoever may import it.
Together = Callable[[Sequence[str], Mapping[str, Any], int, str], dict[str, Any]]


def refuse_together(
    argv: Sequence[str], spec: Mapping[str, Any], ranks: int, device_type: str
) -> dict[str, Any]:
    """For callers that start no ranks."""
    raise ValueError(f"{ranks} ranks, and nothing to start them with")


def spec_of(
    task: str, job: Job, checkpoint: Path, device_type: str, **words: Any
) -> dict[str, Any]:
    """What the ranks are told; the rest is the task's own.

    Args:
        task: "generate" or "evaluate".
        job: the run's.
        checkpoint: the folder of one that was found to be whole.
        device_type: "cpu" or "cuda".
    """
    return {
        "task": task,
        "job": job.model_dump(mode="json"),
        "checkpoint": str(checkpoint),
        "device_type": device_type,
        **words,
    }
