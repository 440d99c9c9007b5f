"""What may be asked of a run when it is started. Each field is a flag of `train` and `resume`
too, with the same name and this help; imports the standard library alone."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from typing import Any

from trainkit.base.lazy_dataclasses import dataclass, field, fields


def flag(help: str, *, default: object, minimum: float | None = None) -> Any:
    """A field that is a flag of the command line too (`trainkit.cli.parameters`).

    Args:
        help: its line in `--help`.
        default: its value where it is not given; () for one that may be repeated.
        minimum: the lowest value of a number.
    """
    return field(default=default, metadata={"help": help, "minimum": minimum})


@dataclass(frozen=True, kw_only=True)
class HostOptions:
    """Which hosts a run gets; empty, 0 or false where not asked for."""

    cluster: str = flag("run on this cluster of jobs.toml", default="")
    nodes: int = flag("number of nodes (0: as the job says)", default=0, minimum=0)
    hostfile: str = flag("use this hostfile instead of the cluster's", default="")
    include: str = flag(
        "use only these hosts of the hostfile: HOST[:SLOTS]@HOST..., SLOTS as in 0,2-3", default=""
    )
    exclude: str = flag("do not use these hosts, or these slots of them", default="")
    existing: bool = flag(
        "slurm: use the nodes of the allocation that this is typed in (salloc)", default=False
    )

    def overrides(self) -> list[str]:
        """What they change of the job, as KEY=VALUE."""
        given = {
            "cluster": self.cluster,
            "cluster.hostfile": (
                self.hostfile and os.path.abspath(os.path.expanduser(self.hostfile))
            ),
        }
        found = [f"{key}={json.dumps(value)}" for key, value in given.items() if value]
        if self.nodes:
            found.append(f"nodes={self.nodes}")
        return found


@dataclass(frozen=True, kw_only=True)
class LaunchOptions(HostOptions):
    """What `train` and `resume` have in common."""

    set: Sequence[str] = flag(
        "KEY=VALUE, such as training.lr=3e-4: override a value of the job; may be repeated",
        default=(),
    )
    detach: bool = flag("return as soon as the run is started; it needs no terminal", default=False)
    foreground: bool = flag("end the run when this command ends", default=False)
    share: bool = flag("allow slots that another run uses", default=False)

    def overrides(self) -> list[str]:
        return [*super().overrides(), *self.set]


@dataclass(frozen=True, kw_only=True)
class TrainOptions(LaunchOptions):
    """How a new run is started."""

    no_stages: bool = flag("fail (exit 5) instead of preparing what is stale", default=False)
    rehearse: bool = flag("rehearse first; what fails there ends it", default=False)


@dataclass(frozen=True, kw_only=True)
class RehearseOptions(HostOptions):
    """How a job that is rehearsed would be started."""

    set: Sequence[str] = flag(
        "KEY=VALUE, such as training.lr=3e-4: override a value of the job; may be repeated",
        default=(),
    )
    no_stages: bool = flag("what is stale is a failure (exit 5)", default=False)
    resume: str = flag("rehearse going on with this run of the job", default="")

    def overrides(self) -> list[str]:
        return [*super().overrides(), *self.set]

    @classmethod
    def of(cls, options: TrainOptions) -> RehearseOptions:
        """What rehearses a job that is started so."""
        names = {each.name for each in fields(cls)}
        return cls(**{name: value for name, value in vars(options).items() if name in names})


@dataclass(frozen=True, kw_only=True)
class ResumeOptions(LaunchOptions):
    """How a run is started again."""

    set: Sequence[str] = flag(
        "KEY=VALUE: change the number of ranks, intervals or length; may be repeated", default=()
    )
    code: str = flag(
        "run: the code that the run began with; current: that of this checkout", default="run"
    )
