"""What becomes of a step whose loss or gradients are not finite, or whose loss is a spike."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, assert_never

from trainkit.base.errors import Exit, TrainkitError
from trainkit.base.lazy_dataclasses import dataclass
from trainkit.jobs.schema import Training
from trainkit.runs.checkpoints import published_folders
from trainkit.runs.folder import RunFolder
from trainkit.train.update.step import StepValues


@dataclass(frozen=True)
class StepInfo:
    """What the host knows of a step before its numbers arrive."""

    step: int
    consumed_samples: int
    samples: int


class RollbackRequest(Exception):
    """A step asks to go back to the last checkpoint.

    Args:
        message: why.
        nan: whether the step was not finite; else its loss was a spike.
        find_cause: computes the step once more and says where it begins not to be finite.
    """

    def __init__(self, message: str, *, nan: bool, find_cause: Callable[[], str]) -> None:
        super().__init__(message)
        self.nan = nan
        self._find_cause = find_cause

    def cause(self) -> str:
        """Where it went wrong, as the end of a message; nothing for a spike. All ranks ask
        together."""
        return f"; {self._find_cause()}" if self.nan else ""


def apply_loss_policy(
    training: Training,
    run: RunFolder,
    info: StepInfo,
    values: StepValues,
    find_cause: Callable[[], str],
) -> str:
    """Do what on_nan and on_spike say about a step whose update was withheld. A step that
    overflows at a fixed loss scale is skipped, as Megatron-LM does, which goes on without an end.

    Args:
        training: the policies and their limits.
        run: the run.
        info: the step.
        values: its numbers; `nan`, `spike` or `overflow` is set.
        find_cause: computes the step once more and says where it begins not to be finite.

    Returns the warning of a step that is skipped.

    Raises:
        RollbackRequest: the policy is "rollback".
        TrainkitError: exit 9, training stops here.
    """
    policy: Literal["ignore", "stop", "skip", "rollback"]
    advice = "lower training.lr or lengthen lr_warmup_iters"
    if values.nan:
        policy = training.on_nan
        what = _numbers_of(info, values)
    elif values.overflow:
        policy = "skip"
        what = f"{_numbers_of(info, values)}, an overflow at loss_scale {values.scale:g}"
        advice = "start again with a lower training.loss_scale, or without: then it finds its own"
    else:
        policy = training.on_spike
        what = f"{_numbers_of(info, values)}, a spike above {training.spike_factor} x its mean"
    match policy:
        case "rollback":
            raise RollbackRequest(what, nan=bool(values.nan), find_cause=find_cause)
        case "skip":
            if values.skipped_in_a_row <= training.max_skipped_in_a_row:
                return f"{what}; skipped"
            why = (
                f"{what}; {values.skipped_in_a_row:.0f} steps in a row were skipped"
                f" (max_skipped_in_a_row {training.max_skipped_in_a_row})"
            )
        case "stop" | "ignore":  # no spike is withheld where they are ignored
            why = f"{what}; training stops, this step has not touched the weights"
        case unknown:
            assert_never(unknown)
    further = "no checkpoint was written yet"
    if published_folders(run.checkpoints):
        further = "`resume` goes on from the last checkpoint"
    hint = f"{advice}; {further}"
    if values.nan:
        why = f"{why}; {find_cause()}"
        hint = f"{hint}; `replay {run.id} --step {info.step}` shows the samples of the step"
    raise TrainkitError(why, exit=Exit.RANK_USER, hint=hint)


def _numbers_of(info: StepInfo, values: StepValues) -> str:
    return f"step {info.step}: lm loss {values.loss}, gradient norm {values.norm}"
