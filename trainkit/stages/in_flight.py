"""What a run's Slurm jobs are making: a record beside the stamps, for as long as no process is
there to hold the stage's lock.

Whoever holds the lock reads and writes it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from trainkit.base.documents import canonical_json, document, read_document
from trainkit.base.errors import Exit, TrainkitError
from trainkit.base.files import write_json
from trainkit.stages.contract import Need

FORM = "making/1"
SUFFIX = ".making.json"


@dataclass(frozen=True)
class Making:
    """Arrays on their way.

    Args:
        lock: of the need: others with the same lock write into the same folders. name: of the
        need. digest: what exactly is made, see `need_digest`. jobs: Slurm's numbers of the
        arrays, in order. levels: for each array the file that its tasks read. runs: folders of
        the runs that wait for them, the first has submitted them; none where they are not a
        graph's, or are being taken out. owner: the process that has submitted them and waits for
        them itself, for people; "" where a run has.
    """

    lock: str
    name: str
    digest: str
    jobs: tuple[str, ...]
    levels: tuple[str, ...]
    runs: tuple[str, ...]
    owner: str = ""

    def words(self) -> str:
        """Who makes it, for people."""
        if self.runs:
            whose = f" of run {Path(self.runs[0]).name}"
        elif self.owner:
            whose = f" of {self.owner}"
        else:
            whose = ", which are being taken out,"
        return f"Slurm's jobs {', '.join(self.jobs)}{whose}"


# Whether the jobs of a record may still write; raises TrainkitError where that cannot be learnt.
Going = Callable[[Making], bool]


def need_digest(need: Need, inputs: list[Any]) -> str:
    """Equal for two runs that need the very same: settings, version, and identities of the
    inputs."""
    return hashlib.sha256(
        canonical_json([need.stage, need.name, need.version, dict(need.settings), inputs]).encode()
    ).hexdigest()


def read_making(stamps: Path, name: str) -> Making | None:
    """The record of a need below `stamps`; None where no arrays are known to be on their way.
    Raises ConfigError for a file of another form."""
    path = stamps / f"{name}{SUFFIX}"
    if not path.is_file():
        return None
    value = read_document(path, FORM)
    jobs, levels, runs = (tuple(map(str, value[key])) for key in ("jobs", "levels", "runs"))
    return Making(
        str(value["lock"]),
        str(value["name"]),
        str(value["digest"]),
        jobs,
        levels,
        runs,
        str(value["owner"]),
    )


def makings(stamps: Path, lock: str) -> list[Making]:
    """The records of all needs with this lock."""
    found = (
        read_making(stamps, path.name.removesuffix(SUFFIX))
        for path in sorted(stamps.glob(f"*{SUFFIX}"))
    )
    return [making for making in found if making is not None and making.lock == lock]


def write_making(stamps: Path, making: Making) -> None:
    """Write the record, whole or not at all."""
    write_json(stamps / f"{making.name}{SUFFIX}", document(FORM, **asdict(making)))


def drop_making(stamps: Path, name: str) -> None:
    """The arrays are over, by Slurm's word."""
    (stamps / f"{name}{SUFFIX}").unlink(missing_ok=True)


def drop_own_making(stamps: Path, name: str, levels: Sequence[str]) -> None:
    """The arrays of these files are over; a record of others, which have begun since, stays."""
    making = read_making(stamps, name)
    if making is not None and making.levels == tuple(levels):
        drop_making(stamps, name)


def still_made(stamps: Path, lock: str, going: Going) -> Making | None:
    """The first record with this lock whose jobs may still write; those of others are dropped."""
    for making in makings(stamps, lock):
        if going(making):
            return making
        drop_making(stamps, making.name)
    return None


def cannot_tell(making: Making) -> bool:
    """The `Going` of callers that cannot ask Slurm: raises TrainkitError (exit 17)."""
    raise TrainkitError(
        f"{making.name} is being made by {making.words()}",
        exit=Exit.HOSTS_BUSY,
        hint="wait for that run, or cancel it",
    )
