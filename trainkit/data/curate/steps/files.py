"""Which files a step reads beside the documents: they decide what it does."""

from __future__ import annotations

from pathlib import Path

from trainkit.base.errors import ConfigError, Exit
from trainkit.data.curate.steps.benchmarks import benchmark_files
from trainkit.jobs.curation import (
    DecontaminateStep,
    FunctionStep,
    LanguageStep,
    ScoreStep,
    Step,
    UrlStep,
)


def step_files(step: Step) -> list[str]:
    """Their paths. Raises ConfigError (exit 6) where one is not there."""
    found: list[str] = []
    if isinstance(step, UrlStep):
        found = [*step.domains, *step.urls]
    elif isinstance(step, (LanguageStep, ScoreStep)):
        found = [step.model] if step.model else []
    elif isinstance(step, FunctionStep):
        found = [step.function.rpartition(":")[0]]
    elif isinstance(step, DecontaminateStep):
        found = [str(path) for path in benchmark_files(step.benchmarks)]
    for name in found:
        if not Path(name).is_file():
            raise ConfigError(
                f"the step {step.step!r} reads {name}, which is not there",
                exit=Exit.STAGE_FAILED,
                hint="paths of steps are relative to the folder of jobs.toml",
            )
    return found
