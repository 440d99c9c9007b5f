"""What a scheduler's jobs are making: a record beside the stamps, for as long as no process is
there to hold the stage's lock.

Only the holder of the lock reads and writes it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from trainkit.base.documents import canonical_json
from trainkit.base.errors import Exit, TrainkitError
from trainkit.base.files import write_json
from trainkit.base.lazy_dataclasses import dataclass, field
from trainkit.base.records import OMIT_NONE, Record
from trainkit.stages.contract import Need

SUFFIX = ".making.json"
SLURM = "slurm"  # the scheduler of records that name none


@dataclass(frozen=True)
class ArraysInFlight(Record):
    """Arrays on their way.

    Args:
        lock: of the need: others with the same lock write into the same folders.
        name: of the need.
        digest: what exactly is made, see `need_digest`.
        jobs: Slurm's numbers of the arrays, in order; of Kubernetes the name of the Job.
        levels: for each array the file that its tasks read.
        runs: folders of the runs that wait for them, the first has submitted them; none where they
            are not a graph's, or are being taken out.
        owner: the process that has submitted them and waits for them itself, for people; "" where a
            run has.
        scheduler: the launcher's name, whose scheduler knows the jobs.
        namespace: of Kubernetes, where the Job is.
        context: of kubectl's configuration, which leads there; "": the current one.
    """

    SCHEMA = "making/1"
    lock: str
    name: str
    digest: str
    jobs: tuple[str, ...]
    levels: tuple[str, ...]
    runs: tuple[str, ...]
    owner: str = ""
    scheduler: str = SLURM
    namespace: str | None = field(default=None, metadata=OMIT_NONE)
    context: str | None = field(default=None, metadata=OMIT_NONE)

    def words(self) -> str:
        """Who makes it, for people."""
        if self.runs:
            whose = f" of run {Path(self.runs[0]).name}"
        elif self.owner:
            whose = f" of {self.owner}"
        else:
            whose = ", which are being taken out,"
        scheduler = "Slurm's" if self.scheduler == SLURM else f"{self.scheduler.capitalize()}'"
        return f"{scheduler} jobs {', '.join(self.jobs)}{whose}"


# Whether the jobs of a record may still write; raises TrainkitError where that cannot be learnt.
StillRunning = Callable[[ArraysInFlight], bool]


def need_digest(need: Need, inputs: list[Any]) -> str:
    """Equal for two runs that need the very same: settings, version, and identities of the
    inputs."""
    return hashlib.sha256(
        canonical_json([need.stage, need.name, need.version, dict(need.settings), inputs]).encode()
    ).hexdigest()


def read_in_flight(stamps: Path, name: str) -> ArraysInFlight | None:
    """The record of a need below `stamps`; None where no arrays are known to be on their way.
    Raises ConfigError for a file of another form."""
    path = stamps / f"{name}{SUFFIX}"
    return ArraysInFlight.from_file(path) if path.is_file() else None


def all_in_flight(stamps: Path, lock: str) -> list[ArraysInFlight]:
    """The records of all needs with this lock."""
    found = (
        read_in_flight(stamps, path.name.removesuffix(SUFFIX))
        for path in sorted(stamps.glob(f"*{SUFFIX}"))
    )
    return [making for making in found if making is not None and making.lock == lock]


def write_in_flight(stamps: Path, making: ArraysInFlight) -> None:
    """Write the record, whole or not at all."""
    values = making.to_json()
    if making.scheduler == SLURM:
        del values["scheduler"]
    write_json(stamps / f"{making.name}{SUFFIX}", values)


def clear_in_flight(stamps: Path, name: str) -> None:
    """The arrays are over, by Slurm's word."""
    (stamps / f"{name}{SUFFIX}").unlink(missing_ok=True)


def clear_own_in_flight(stamps: Path, name: str, levels: Sequence[str]) -> None:
    """The arrays of these files are over; a record of others, which have begun since, stays."""
    making = read_in_flight(stamps, name)
    if making is not None and making.levels == tuple(levels):
        clear_in_flight(stamps, name)


def still_in_flight(stamps: Path, lock: str, going: StillRunning) -> ArraysInFlight | None:
    """The first record with this lock whose jobs may still write; those of others are dropped."""
    for making in all_in_flight(stamps, lock):
        if going(making):
            return making
        clear_in_flight(stamps, making.name)
    return None


def refuse_in_flight(making: ArraysInFlight) -> bool:
    """The `StillRunning` of callers that cannot ask a scheduler: raises TrainkitError (exit 17)."""
    raise TrainkitError(
        f"{making.name} is being made by {making.words()}",
        exit=Exit.HOSTS_BUSY,
        hint="wait for that run, or cancel it",
    )
