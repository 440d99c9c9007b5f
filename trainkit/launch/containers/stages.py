"""The container that units of a stage run in: that of the job's ranks, with what the stage reads.

With `containers.X.stages_in_container` the agents of a stage's session are in it, on hosts and on
this machine, and so are the tasks of its Slurm arrays. Python, packages and libraries are the
image's; trainkit's code is the snapshot's, as for ranks.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

from trainkit.base.errors import Exit
from trainkit.base.lazy_dataclasses import dataclass
from trainkit.base.old_python import NEEDED_PYTHON
from trainkit.engines.sources import source_tree
from trainkit.jobs.schema import Job
from trainkit.launch.containers.contract import NodeContainer, node_container
from trainkit.launch.containers.pyxis import exported, pyxis_options
from trainkit.launch.containers.runtimes import extra_files, start_lines
from trainkit.launch.containers.scripts import inside_script, look_lines
from trainkit.stages.array_task import CLIENT_VARIABLE

# Stages that compute. The others need the network and what is outside: they build or fetch what
# the image is made of, or compile for the Python that asks.
INSIDE = ("prep-data", "index", "weights", "engine-prebuild", "precompile")
# of those, made outside where no nodes are asked for: a download, whose credentials, proxies and
# way out are this machine's
DOWNLOADS = ("weights",)
# folders that an image has of its own: of theirs only the files are mounted that are read
OF_IMAGE = ("/bin", "/etc", "/lib", "/lib64", "/sbin", "/usr")
TOPMOST = ("/", "/home", "/opt", "/root", "/run", "/srv", "/tmp", "/var")  # these alone
TASK = "node.sh"
# What a task of an array must know of Slurm, and of the runtime's client, which may be killed alone
TASK_VARIABLES = (
    "SLURM_ARRAY_TASK_ID",
    "SLURM_JOB_ID",
    "SLURM_PROCID",
    "SLURM_RESTART_COUNT",
    CLIENT_VARIABLE,
)


@dataclass(frozen=True)
class StageBox:
    """What units of a stage are in.

    Args:
        job: on whose behalf; its container is the one.
        stage: the stage's name.
    """

    job: Job
    stage: str

    @property
    def label(self) -> str:
        """How lines for people name it."""
        container = self.job.container
        assert container is not None
        return f"containers.{container.name} ({container.image}, {container.runtime})"

    @property
    def python(self) -> str:
        """The image's interpreter."""
        assert self.job.container is not None
        return self.job.container.python

    @property
    def by_srun(self) -> bool:
        """Whether only a task of srun comes into it."""
        assert self.job.container is not None
        return self.job.container.runtime_traits.by_srun

    @property
    def env(self) -> Mapping[str, str]:
        """The variables of every unit: those of every rank."""
        return self.job.environment

    def around(
        self, folder: Path, name: str, inputs: Sequence[Path], passed: Sequence[str] = ()
    ) -> NodeContainer:
        """The container of a session.

        Args:
            folder: of the scripts.
            name: of the session; containers are named and labelled by it.
            inputs: files that the units read besides what ranks do.
            passed: see NodeContainer.

        Raises:
            ConfigError: a path that no runtime can mount.
        """
        read = list(inputs)
        if self.job.engine_source is not None and self.stage == "engine-prebuild":
            read.append(source_tree(self.job) / "pretrain_gpt.py")
        found = node_container(
            self.job, folder, name, 0, since=0, further=read_places(read), passed=passed
        )
        assert found is not None
        return found


def stage_box(job: Job, stage: str) -> StageBox | None:
    """What the units of a stage of `job` are in; None: they run outside of any container."""
    if job.container is None or not job.container.stages_in_container or stage not in INSIDE:
        return None
    return StageBox(job, stage)


def read_places(inputs: Sequence[Path]) -> list[str]:
    """What has to be mounted for files to be read: their folders, and those that links lead to;
    of folders that an image has of its own, the files alone."""
    places = dict[str, None]()
    for path in inputs:
        for found in (os.path.abspath(path), os.path.realpath(path)):
            parent = os.path.dirname(found)
            alone = parent in TOPMOST or any(
                Path(parent).is_relative_to(folder) for folder in OF_IMAGE
            )
            places[found if alone else parent] = None
    return list(places)


def task_scripts(
    container: NodeContainer, prolog: Sequence[str], words: Sequence[str]
) -> dict[str, str]:
    """What a task of an array runs, by its name in the container's folder: first node.sh, which
    leads into the container.

    Args:
        container: around the task.
        prolog: the cluster's, outside; srun passes little of what the batch script's has set.
        words: arguments of the interpreter in the image.
    """
    inside = inside_script(container, words, _python_line(container))
    files = {container.script.name: inside, **extra_files(container)}
    if container.settings.runtime_traits.by_srun:
        return files
    head = [
        "#!/bin/bash",
        "# What a task of an array runs on its node",
        "set -e",
        *prolog,
        'set -- "$SLURM_JOB_ID-$SLURM_PROCID"',
        f"export {CLIENT_VARIABLE}=$$",
    ]
    return {TASK: "\n".join([*head, *start_lines(container)]) + "\n", **files}


def _python_line(container: NodeContainer) -> str:
    """What refuses a Python that cannot read trainkit's own code; agents, which older ones can
    run, say the same of theirs."""
    settings = container.settings
    new_enough = f"import sys; sys.exit(sys.version_info < {NEEDED_PYTHON})"
    words = (
        f"the Python of {settings.image} is older than {'.'.join(map(str, NEEDED_PYTHON))}, which"
        f" trainkit's own code needs ({container.label}.python)"
    )
    return (
        f"{shlex.quote(settings.python)} -I -c {shlex.quote(new_enough)} || {{ echo"
        f' "$HOSTNAME: "{shlex.quote(words)} >&2; exit {int(Exit.HEALTH)}; }}'
    )


def task_argv(container: NodeContainer, variables: Sequence[str]) -> tuple[str, ...]:
    """The last words of srun's line: what a task is. `variables`: of the batch script's, those
    that its tasks get."""
    if container.settings.runtime_traits.by_srun:
        export = f"--export={exported(','.join(variables), container.env)}"
        return (export, *pyxis_options(container), "/bin/bash", str(container.script))
    return ("/bin/bash", "-l", str(container.folder / TASK))


def before_tasks(container: NodeContainer) -> list[str]:
    """Lines of the batch script, on the one node of its element, before srun."""
    if container.settings.runtime_traits.by_srun:
        exports = [f"export {name}={shlex.quote(value)}" for name, value in container.env.items()]
        return [*look_lines(container), *exports]
    return []
