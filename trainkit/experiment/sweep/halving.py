"""Which runs of a sweep go on from a rung, and for which sweeps that can be asked."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from trainkit.base.errors import ConfigError
from trainkit.experiment.sweep.record import table_of
from trainkit.jobs.resolved import ResolvedJob
from trainkit.jobs.resume_changes import fixes_steps


def survivors(losses: Sequence[float | None], factor: int) -> list[int]:
    """Places of the settings that go on: of `factor` one, at least one, with the lowest losses; of
    equal ones the first. None, or what is not finite, has failed and goes no further.
    """
    sound = {place: loss for place, loss in enumerate(losses) if loss is not None}
    sound = {place: loss for place, loss in sound.items() if math.isfinite(loss)}
    best = sorted(sound, key=lambda place: (sound[place], place))
    return sorted(best[: max(1, len(losses) // factor)])


def steps_of(rungs: Sequence[int], settings: int, factor: int) -> int:
    """Optimizer steps of all settings together where none fails; without halving it is
    settings * rungs[-1]."""
    total = 0
    before = 0
    for rung in rungs:
        total += settings * (rung - before)
        before = rung
        settings = max(1, settings // factor)
    return total


def rungs_of(name: str, resolved: Mapping[int, ResolvedJob]) -> list[int]:
    """The rungs of a sweep whose members are these; none where it has no halving.

    Raises ConfigError where its runs cannot be stopped and gone on with as if they never were.
    """
    jobs = [each.job for each in resolved.values()]
    halving = table_of(resolved).halving
    if halving is None:
        return []
    lengths = {job.training.train_iters for job in jobs}
    last = lengths.pop()
    why = ""
    if lengths:
        why = "its runs have different training.train_iters, so they share no rungs"
    elif halving.first_rung >= last:
        why = f"first_rung {halving.first_rung} is not before training.train_iters {last}"
    elif not all(job.is_native for job in jobs):
        why = "other engines than native do not stop at a rung and go on from there"
    elif any(job.sample_order == "megatron" or fixes_steps(job) for job in jobs):
        why = (
            "the samples of a run with phases, max_epochs or sample_order = 'megatron' follow from"
            " its length, so it cannot go on from a rung"
        )
    if why:
        raise ConfigError(f"jobs.{name}.sweep.halving: {why}")
    return list(halving.rungs(last))
