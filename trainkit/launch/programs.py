"""Where the programs of a run lie in its own code."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

ProgramName = Literal["supervisor", "agent", "finish_stages", "bandwidth_rank", "pod"]
# Below the package: today's place, then those of older versions, whose runs go on with their own
# code.
PROGRAM_PATHS: dict[ProgramName, tuple[str, ...]] = {
    "supervisor": ("launch/main.py", "launch/supervisor.py"),
    "agent": ("launch/agent/main.py", "launch/agent.py"),
    "finish_stages": (
        "launch/slurm/finish_stages.py",
        "cli/run/preflight.py",
        "cli/ready.py",
    ),
    "bandwidth_rank": ("launch/cluster_care/bandwidth_rank.py", "launch/pair_rank.py"),
    "pod": ("launch/kubernetes/pod.py",),
}


def program_path(code: Path, name: ProgramName) -> Path:
    """The file of a program in a run's code. Of code that is not there yet, as in a dry run:
    where it will be."""
    places = [code / "trainkit" / place for place in PROGRAM_PATHS[name]]
    return next((path for path in places if path.is_file()), places[0])
