"""What the job's tables, the plan and the supervisor must know of each launcher, as data: one
entry for each name that clusters.X.launcher takes."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class LauncherTraits:
    """What is special about the hosts that a launcher starts ranks on.

    Args:
        one_machine: ranks run on this machine only.
        hostfile: hosts are named in a hostfile and reached over ssh.
        batch: nodes come from a batch scheduler's allocation. It shares out their slots, limits
            their time (options of sbatch), ends what a job leaves behind, and its TERM means
            "save".
        pyxis: ranks may start in containers of the scheduler's own plugin.
        connect_seconds: by default, until the agents of all hosts must have answered.
    """

    one_machine: bool = False
    hostfile: bool = False
    batch: bool = False
    pyxis: bool = False
    connect_seconds: float = 30.0


LAUNCHER_TRAITS = {
    "local": LauncherTraits(one_machine=True),
    "ssh": LauncherTraits(hostfile=True),
    "pdsh": LauncherTraits(hostfile=True),
    # Slurm runs its own prologs, and starts all nodes of a large job before the first can answer
    "slurm": LauncherTraits(batch=True, pyxis=True, connect_seconds=300.0),
}
