"""How a task on a trained model is handed to several ranks: the program, what it gets, and who
starts it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from trainkit.base.lazy_dataclasses import dataclass, field
from trainkit.base.records import OMIT_NONE, Record
from trainkit.jobs.schema import Dataset, Job

WORKER_ARGV = (sys.executable, "-I", "-m", "trainkit.train.inference.worker")
# Starts so many ranks of a program with a spec on devices of a type, and has rank 0's result:
# launch.local_ranks.run_local_ranks, passed in by those that may import it.
StartRanks = Callable[[Sequence[str], Mapping[str, object], int, str], Mapping[str, Any]]


def start_no_ranks(
    argv: Sequence[str], spec: Mapping[str, object], ranks: int, device_type: str
) -> Mapping[str, Any]:
    """For callers that start no ranks; arguments as of `run_local_ranks`. Raises ValueError."""
    raise ValueError(f"{ranks} ranks, and nothing to start them with")


@dataclass(frozen=True)
class GenerateRequest:
    """To go on with prompts.

    Args:
        prompts: the texts.
        sampling: the fields of a Sampling.
        max_new_tokens: of each text.
    """

    prompts: tuple[str, ...]
    sampling: Mapping[str, float]
    max_new_tokens: int


@dataclass(frozen=True)
class EvaluateRequest:
    """To measure the loss on a split.

    Args:
        dataset: whose split.
        split: train, valid or test.
        samples: windows at most; 0: all.
    """

    dataset: Dataset
    split: str
    samples: int


@dataclass(frozen=True)
class WorkerSpec(Record):
    """What every rank gets.

    Args:
        job: the run's.
        checkpoint: the folder of one that was found to be whole.
        device_type: "cpu" or "cuda".
        weights: of the checkpoint, as of `load.with_weights`.
        generate: what is to be done: one of the two.
        evaluate: the other.
    """

    job: Job
    checkpoint: Path
    device_type: str
    weights: str
    generate: GenerateRequest | None = field(default=None, metadata=OMIT_NONE)
    evaluate: EvaluateRequest | None = field(default=None, metadata=OMIT_NONE)
