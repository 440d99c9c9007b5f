"""launch/kubernetes.json: the JobSets of a run, oldest first. A run has more than one where it
was resumed, or went on without nodes that were bad."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from trainkit.base.documents import utc_now
from trainkit.base.files import write_json
from trainkit.base.lazy_dataclasses import dataclass, replace
from trainkit.base.records import Record
from trainkit.runs.folder import RunFolder


@dataclass(frozen=True)
class SubmittedJobSet:
    """One submission.

    Args:
        name: of the JobSet, in the cluster's namespace.
        submitted: when, ISO 8601.
        first_attempt: the first attempt that came from a person's word (`train`, `resume`); budgets
            of retries count from there.
        uid: Kubernetes' own name of it; "" until it has said so.
        began: the newest attempt that its supervisor began; None while the JobSet waits.
        ended: how it ended where no supervisor could tell: {"state", "message", "exit"}.
        left_out: nodes that it must not get.
    """

    name: str
    submitted: str
    first_attempt: int
    uid: str = ""
    began: int | None = None
    ended: Mapping[str, Any] | None = None
    left_out: tuple[str, ...] = ()


@dataclass(frozen=True)
class RunJobSets(Record):
    """launch/kubernetes.json."""

    SCHEMA = "kubernetes/1"
    jobsets: tuple[SubmittedJobSet, ...]


def read_jobsets(run: RunFolder) -> Sequence[SubmittedJobSet]:
    """All submissions of a run; none where it is not one of Kubernetes'. Raises ConfigError for a
    file of another form."""
    return RunJobSets.from_file(run.kubernetes).jobsets if run.kubernetes.is_file() else ()


def newest_jobset(run: RunFolder) -> SubmittedJobSet | None:
    """The JobSet that has the run, or had it last."""
    return next(reversed(read_jobsets(run)), None)


def add_jobset(
    run: RunFolder, name: str, *, first_attempt: int, left_out: Sequence[str] = ()
) -> SubmittedJobSet:
    """Note a submission that is about to be made."""
    added = SubmittedJobSet(name, utc_now(), first_attempt, left_out=tuple(left_out))
    _write(run, [*read_jobsets(run), added])
    return added


def change_jobset(run: RunFolder, name: str, **changed: Any) -> None:
    """Change what is noted about a submission."""
    _write(run, [replace(e, **changed) if e.name == name else e for e in read_jobsets(run)])


def drop_jobset(run: RunFolder, name: str) -> None:
    """Forget a submission that was not made."""
    _write(run, [each for each in read_jobsets(run) if each.name != name])


def _write(run: RunFolder, jobsets: Sequence[SubmittedJobSet]) -> None:
    write_json(run.kubernetes, RunJobSets(tuple(jobsets)).to_json())
