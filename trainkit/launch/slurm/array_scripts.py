"""The scripts of Slurm arrays: what a batch script, its tasks and, with a container around those,
the two scripts of each are."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from trainkit.base.lazy_dataclasses import dataclass
from trainkit.jobs.clusters import Cluster, SlurmOptions, StagePlace
from trainkit.launch.array_units import ArrayLevel, level_file
from trainkit.launch.containers import NodeContainer
from trainkit.launch.containers.stages import (
    TASK_VARIABLES,
    StageBox,
    before_tasks,
    task_argv,
    task_scripts,
)
from trainkit.launch.remote_units import remote_argv
from trainkit.launch.slurm.batch_script import EXPORTED, option_lines
from trainkit.stages.contract import Need

# of the cluster's options
INHERITED = (
    "partition",
    "account",
    "qos",
    "reservation",
    "constraint",
    "exclusive",
    "mem",
    "time",
    "nice",
    "comment",
)


@dataclass(frozen=True)
class ArrayPlace:
    """Where the units of a stage run: clusters.X.stages.STAGE. `notice` is called with what is
    submitted; units are in `box`, None: outside of any container."""

    cluster: Cluster
    asked: StagePlace
    root: Path
    notice: Callable[[str], None] = lambda text: None
    box: StageBox | None = None


def task_words(level: ArrayLevel, folder: Path, code: Path, python: str) -> list[str]:
    """What a task of an array runs: an interpreter, and its arguments."""
    words = ["-I", "-m", "trainkit.stages.array_task", str(level_file(folder, level))]
    return remote_argv([sys.executable, *words], python, code)


def level_container(
    place: ArrayPlace, need: Need, level: ArrayLevel, folder: Path
) -> NodeContainer | None:
    """What each task of an array is in; its scripts are in a folder of their own."""
    if place.box is None:
        return None
    return place.box.around(folder / level.name, level.name, need.inputs, TASK_VARIABLES)


def array_script(
    place: ArrayPlace,
    level: ArrayLevel,
    folder: Path,
    code: Path,
    container: NodeContainer | None = None,
) -> str:
    """The batch script of an array: a person can read it.

    Args:
        place: where it runs.
        level: the units.
        folder: of the scripts.
        code: the code snapshot.
        container: around each task.
    """
    there: Sequence[str]
    if container is None:
        there = task_words(level, folder, code, place.cluster.python or sys.executable)
        before = []
    else:
        there = task_argv(container, EXPORTED)
        before = before_tasks(container)
    shape: SlurmOptions = {
        "job-name": level.name,
        "array": f"0-{level.elements - 1}",
        "nodes": 1,
        "ntasks-per-node": level.tasks,
    }
    output = f"{folder}/{level.name}-%A_%a.out"
    return stage_script(
        place,
        shape,
        output,
        ["srun", "--kill-on-bad-exit=0", "--wait=0", "--mpi=none", *there],
        before,
    )


def stage_script(
    place: ArrayPlace,
    shape: SlurmOptions,
    output: str,
    words: Sequence[str],
    before: Sequence[str] = (),
) -> str:
    """A script that becomes `words` on the partition that a stage is given, with what it
    inherits of the cluster's options.

    Args:
        place: of the stage.
        shape: name, nodes, tasks.
        output: sbatch's, with its % signs.
        words: a command line.
        before: lines before it.
    """
    cluster = place.cluster
    asked = place.asked
    given: SlurmOptions = {name: cluster.slurm[name] for name in INHERITED if name in cluster.slurm}
    own = {
        name: value
        for name, value in (("partition", asked.partition), ("time", asked.time))
        if value
    }
    # of an element whose node fails: nobody may be there to type it again
    again = "no-requeue" if {**cluster.slurm, **asked.slurm}.get("no-requeue") else "requeue"
    ends: SlurmOptions = {
        "output": output,
        "open-mode": "append",
        "export": ",".join(EXPORTED),
        again: True,
    }
    lines = [
        "#!/bin/bash -l",
        *option_lines({**shape, **given, **own, **asked.slurm, **ends}),
        "set -e",
        *cluster.prolog,
        *before,
        f"exec {shlex.join(words)}",
    ]
    return "\n".join(lines) + "\n"


def container_scripts(
    place: ArrayPlace, container: NodeContainer, level: ArrayLevel, folder: Path, code: Path
) -> dict[str, str]:
    """What leads a task of an array into its container, by names in the container's folder.

    Args:
        place: where it runs.
        container: around it.
        level: the units.
        folder: of the array's own scripts.
        code: the code snapshot.
    """
    words = task_words(level, folder, code, container.settings.python)[1:]
    return task_scripts(container, place.cluster.prolog, words)
