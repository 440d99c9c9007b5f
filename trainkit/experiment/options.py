"""What may be asked of a run when it is started. Each field is a flag of `train` and `resume`
too, with the same name and this help; imports the standard library alone."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any


def flag(default: object, help: str, *, minimum: float | None = None) -> Any:
    """A field that is a flag of the command line too (`trainkit.cli.parameters`).

    Args:
        default: its value where it is not given; () for one that may be repeated.
        help: its line in `--help`.
        minimum: the lowest value of a number.
    """
    return field(default=default, metadata={"help": help, "minimum": minimum})


@dataclass(frozen=True)
class HostOptions:
    """Which hosts a run gets; empty, 0 or false where not asked for."""

    cluster: str = flag("", "run on this cluster of jobs.toml")
    nodes: int = flag(0, "number of nodes (0: as the job says)", minimum=0)
    hostfile: str = flag("", "use this hostfile instead of the cluster's")
    include: str = flag(
        "", "use only these hosts of the hostfile: HOST[:SLOTS]@HOST..., SLOTS as in 0,2-3"
    )
    exclude: str = flag("", "do not use these hosts, or these slots of them")
    existing: bool = flag(
        False, "slurm: use the nodes of the allocation that this is typed in (salloc)"
    )

    def overrides(self) -> list[str]:
        """Those that are values of the job, as KEY=VALUE."""
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


@dataclass(frozen=True)
class LaunchOptions(HostOptions):
    """What `train` and `resume` have in common."""

    set: Sequence[str] = flag(
        (), "KEY=VALUE, such as training.lr=3e-4: override a value of the job; may be repeated"
    )
    detach: bool = flag(False, "return as soon as the run is started; it needs no terminal")
    foreground: bool = flag(False, "end the run when this command ends")
    share: bool = flag(False, "allow slots that another run uses")


@dataclass(frozen=True)
class TrainOptions(LaunchOptions):
    """How a new run is started."""

    no_stages: bool = flag(False, "fail (exit 5) instead of preparing what is stale")


@dataclass(frozen=True)
class ResumeOptions(LaunchOptions):
    """How a run is started again."""

    set: Sequence[str] = flag(
        (),
        "KEY=VALUE: change the number of ranks, intervals or length; may be repeated",
    )
    code: str = flag("run", "run: the code that the run began with; current: that of this checkout")
