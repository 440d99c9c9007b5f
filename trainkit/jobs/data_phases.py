"""How the phases of a job share its steps, and which they may be."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

from pydantic import Field
from pydantic_core import PydanticCustomError

from trainkit.jobs.datasets import Dataset
from trainkit.jobs.table import Table, wrong


class DataPhase(Table):
    """The last part of a training, or one of several, on other data."""

    dataset: Dataset = Field(description="name of a [datasets.X] table with the job's tokenizer")
    share: float = Field(
        gt=0,
        lt=1,
        description="of training.train_iters, rounded to the nearest step, a half up",
    )


def steps_by_phase(phases: Sequence[DataPhase], steps: int) -> list[int]:
    """Steps on a job's own dataset, then those of each phase; by the shares as they are written,
    not as floats hold them."""
    found = [int(Fraction(repr(phase.share)) * steps + Fraction(1, 2)) for phase in phases]
    return [steps - sum(found), *found]


def phase_objection(
    own: Dataset, phases: Sequence[DataPhase], steps: int
) -> PydanticCustomError | None:
    """What is wrong with the phases of a job; None: nothing.

    Args:
        own: the job's dataset.
        phases: those that follow.
        steps: of the training.
    """
    left, *others = steps_by_phase(phases, steps)
    for at, (phase, its_steps) in enumerate(zip(phases, others, strict=True)):
        key = f"phases.{at}"
        if not its_steps:
            return wrong(
                f"{key}.share",
                f"{key}.share = {phase.share:g} of {steps} steps is no step; give it more, or leave"
                " the phase out",
            )
        if phase.dataset.name == own.name and phase.dataset != own:
            return wrong(
                f"{key}.dataset.name",
                f"{key}.dataset is '{own.name}' as its table says, and the job's is changed by"
                " --set; give the phase a table of its own",
            )
    total = float(sum(Fraction(repr(phase.share)) for phase in phases))
    if left < 1 or total >= 1:
        return wrong(
            "phases",
            f"the shares of phases sum to {total:g}, {sum(others)} of {steps} steps; leave some to"
            f" dataset '{own.name}'",
        )
    return None
