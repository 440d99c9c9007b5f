"""The checkpoints of a run with what a person asks about each: is it whole, and why is it kept."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from trainkit.jobs.resolved import read_job
from trainkit.runs.checkpoints import (
    DamagedCheckpoint,
    NewerCheckpoint,
    open_checkpoint,
    published_folders,
    set_aside_in,
    step_of,
    verify,
)
from trainkit.runs.folder import RunFolder
from trainkit.runs.retention import retention_reasons, valid_by_size


@dataclass(frozen=True)
class ListedCheckpoint:
    """One folder: an entry of the document checkpoints/1.

    Args:
        step: of its name.
        folder: where it is.
        bytes: of its data files; None where its manifest cannot be read.
        layout: the manifest's.
        validation: losses by validation set, where they were measured at this step.
        kept: why it is not deleted; none where the next save may delete it.
        problems: what is wrong with it; none where it is whole.
        checked: "full": every byte was read; "size": only the files' sizes.
    """

    step: int
    folder: str
    bytes: int | None = None
    layout: Mapping[str, int | str] = field(default_factory=dict)
    validation: Mapping[str, float] = field(default_factory=dict)
    kept: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    checked: Literal["full", "size"] = "size"


def list_checkpoints(run: RunFolder, *, hashes: bool) -> list[ListedCheckpoint]:
    """Every published checkpoint, oldest first; then those that were set aside as damaged.

    Args:
        run: the run.
        hashes: read every file and compare its checksum.
    """
    return [*_published(run, hashes=hashes), *_set_aside(run)]


def _published(run: RunFolder, *, hashes: bool) -> Iterator[ListedCheckpoint]:
    valid = valid_by_size(run.checkpoints)
    newest = valid[-1].manifest.step if valid else 0
    reasons = retention_reasons(valid, read_job(run.job).checkpoint, newest)
    for folder in published_folders(run.checkpoints):
        yield _listed(folder, reasons.get(step_of(folder), []), hashes=hashes)


def _listed(folder: Path, kept: list[str], *, hashes: bool) -> ListedCheckpoint:
    step = step_of(folder)
    checked: Literal["full", "size"] = "full" if hashes else "size"
    problems: list[str] = []
    try:
        checkpoint = open_checkpoint(folder)
        if hashes:
            problems = verify(folder)
    except (DamagedCheckpoint, NewerCheckpoint) as damaged:
        return ListedCheckpoint(
            step, str(folder), kept=kept, problems=damaged.problem_list, checked=checked
        )
    manifest = checkpoint.manifest
    return ListedCheckpoint(
        step,
        str(folder),
        checkpoint.bytes,
        manifest.layout,
        manifest.validation,
        kept,
        problems,
        checked,
    )


def _set_aside(run: RunFolder) -> Iterator[ListedCheckpoint]:
    for folder in set_aside_in(run.checkpoints):
        problem = f"damaged; set aside as {folder.name}"
        yield ListedCheckpoint(step_of(folder), str(folder), problems=[problem])
