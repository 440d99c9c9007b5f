"""What a foreign engine says: its iterations, its evaluations, the checkpoints it leaves; and what
reads them, one module an engine."""

from __future__ import annotations

from pathlib import Path
from typing import Callable, List, Protocol, Union

from trainkit.base.lazy_dataclasses import dataclass


@dataclass(frozen=True)
class Iteration:
    """One line of training, as printed: what the line does not say, or says in a way that is no
    number, is None. Losses and norms may be nan or inf.

    Args:
        step: the iteration, counted from 1.
        train_iters: the iterations that the engine means to do.
        elapsed_ms: milliseconds an iteration, mean since the line before.
        learning_rate: of that iteration.
        lm_loss: mean of the iterations since the line before that were not skipped.
        grad_norm: before clipping.
        loss_scale: fp16's; 1.0 in other precisions that print it.
        global_batch_size: samples an iteration.
        consumed_samples: since the beginning of training.
        samples_per_second: of all ranks together.
        skipped_iterations: since the line before.
        nan_iterations: since the line before.
    """

    step: int
    train_iters: int | None = None
    elapsed_ms: float | None = None
    learning_rate: float | None = None
    lm_loss: float | None = None
    grad_norm: float | None = None
    loss_scale: float | None = None
    global_batch_size: int | None = None
    consumed_samples: int | None = None
    samples_per_second: float | None = None
    skipped_iterations: int | None = None
    nan_iterations: int | None = None


@dataclass(frozen=True)
class EvaluationLine:
    """One line of an evaluation.

    Args:
        step: the iteration after which it was made; None where the line does not say.
        name: of the data: "valid" or "test"; "valid-1" for the second of several validation sets.
        lm_loss: mean over the evaluation; may be nan or inf.
    """

    step: int | None
    name: str
    lm_loss: float | None


@dataclass(frozen=True)
class FoundCheckpoint:
    """A folder that an engine wrote as a checkpoint.

    Args:
        step: the iteration; 0 for Megatron-LM's `release`.
        folder: where it is.
        bytes: of all its files.
        problems: why the engine could not load it; empty if it is whole.
    """

    step: int
    folder: Path
    bytes: int
    problems: tuple[str, ...]


Reading = Union[Iteration, EvaluationLine]
# reads one line after the other
LineReader = Callable[[str], List[Reading]]


class EngineReader(Protocol):
    """How an engine says how far it is, and where its checkpoints lie."""

    def read_line(self, text: str) -> Iteration | EvaluationLine | None:
        """What one line of the engine's output says."""

    def tracked_step(self, folder: Path) -> int | None:
        """The iteration that the engine would go on from; None where there is no checkpoint."""

    def found_checkpoints(self, folder: Path) -> list[FoundCheckpoint]:
        """All checkpoints in the folder, judged by the engine's own rules, oldest first."""
