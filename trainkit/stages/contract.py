"""What a stage is: something that must be done before training, and knows when it need not be
done again."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from trainkit.base.extras import MissingExtra
from trainkit.base.lazy_dataclasses import dataclass, field

if TYPE_CHECKING:  # every reader of files and sites comes with it
    from trainkit.data.sources.announce import DownloadNotice
    from trainkit.jobs.schema import Job


@dataclass(frozen=True)
class Unit:
    """What one worker does: a shard, a build, a graph. The same unit runs here, on a host of a
    run, or as a task of a Slurm array.

    Args:
        name: unique in its stage; file-name safe.
        argv: the program; the path of the spec's JSON file is appended.
        spec: everything the work depends on but what is in files. A unit is fresh while its spec,
            its outputs and the files that its result says were "read" ([path, size, mtime in ns,
            XXH128] each) are those of its last success.
        outputs: files it leaves behind.
        after: names of units that must have succeeded before.
        size: relative cost, for balance and progress.
        network: it mostly waits for another machine: it runs beside those that compute, and counts
            as none of them.
        several: its program takes several specs, one after another: small units share a process,
            whose start would cost more than they do.
        kept: what its outputs held is there elsewhere, in what the stage made before: without them
            it is as fresh as with them.
        here: it reads what belongs to this machine's own Python: where units run in an image, this
            one does not.
        commands: of other programs that it runs, as a person would type them; a dry run prints
            them.
    """

    name: str
    argv: tuple[str, ...]
    spec: Mapping[str, Any]
    outputs: tuple[Path, ...] = ()
    after: tuple[str, ...] = ()
    size: int = 1
    network: bool = False
    several: bool = False
    kept: bool = False
    here: bool = False
    commands: Callable[[], Sequence[tuple[str, ...]]] | None = field(
        default=None, repr=False, compare=False
    )


@dataclass(frozen=True)
class Need:
    """A stage as one job needs it, worked out once.

    Args:
        stage: "build", "prep-data", ...
        name: what it makes; with `stage` it names the stamp.
        lock: held while it is made; the same for all that write into the same folders.
        version: trainkit's own version of the stage: raised when its outputs change for the same
            settings.
        settings: flat, printable; a difference makes the stage stale, and the first one is the
            *because*.
        inputs: files read from outside the stage, judged by size and time; where only the time
            differs, by the sum that a unit's result gives ("read").
        outputs: files it makes.
        units: the work, in an order that respects `after`.
        scratch: outputs of units that nobody needs once the stage has succeeded; deleted then.
        announcement: a large download that its units begin with: somebody has to agree to it.
        lacking: a package that its units need and this machine's Python does not have.
        memory: kept in the stamp, finished or not, for the next time somebody asks what is needed.
        evidence: for outputs that say themselves what they were made from: (fresh, because),
            instead of the stamp.
    """

    stage: str
    name: str
    lock: str
    version: int
    settings: Mapping[str, Any]
    inputs: tuple[Path, ...]
    outputs: tuple[Path, ...]
    units: tuple[Unit, ...] = field(repr=False)
    scratch: tuple[Path, ...] = ()
    announcement: DownloadNotice | None = None
    lacking: MissingExtra | None = None
    memory: Mapping[str, Any] = field(default_factory=dict, repr=False)
    evidence: Callable[[], tuple[bool, str]] | None = None


class Stage(Protocol):
    """One kind of preparation."""

    name: str

    def needs(self, job: Job, stamps: Path) -> list[Need]:
        """What `job` needs of this stage. Reads only; raises ConfigError (exit 6) where that is
        already hopeless.

        `stamps` is the folder of this stage's stamps: a unit may read the result another unit
        left there.
        """

    def waits_for(self, job: Job) -> tuple[str, ...]:
        """Stages whose outputs decide what `job` needs of this one: until they are made nobody
        can say."""
