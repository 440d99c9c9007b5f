"""launch = "srun": one srun starts all ranks, each in its image, with the words of the launcher's
batch script (`srun .. --container-image .. bash -c "cd ..; .."`), inside the run's own allocation.

Sources: bignlp/core/launchers.py and stages.py of NeMo-Framework-Launcher at 0d03943e, and
nemo_launcher/core of tag 24.12; pyxis's options of srun.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence

from trainkit.base.errors import Problem
from trainkit.jobs.schema import Job

# variables that the launcher's script has before the command, where it exports others
ON_THE_LINE = ("CUDA_", "NVTE_")


def srun_words(job: Job) -> tuple[str, ...]:
    """srun's own words. The allocation's batch script asked for agents, one a node: the ranks'
    numbers are said here, and that this step lies beside the agents'. One that dies ends all."""
    words = [
        f"--nodes={job.nodes}",
        f"--ntasks={job.world_size}",
        f"--ntasks-per-node={job.ranks_per_node}",
        "--overlap",
        "--kill-on-bad-exit=1",
    ]
    container = job.container
    if container is not None:
        mounts = dict.fromkeys([f"{job.cluster.root}:{job.cluster.root}", *container.mounts])
        words += ["--container-image", container.image]
        words += ["--container-mounts", ",".join(mounts)]
        words += ["--no-container-mount-home", *container.args]
    return (*words, *job.cluster.srun_args)


def rank_script(
    tree: str, numa: Sequence[str], environment: Mapping[str, str], argv: Sequence[str]
) -> str:
    """What each task's bash runs, a statement a line, as the launcher writes it.

    Args:
        tree: NeMo's, in the image.
        numa: numa_mapping.py with its interpreter and words; (): it is not run.
        environment: variables that stand before the command.
        argv: the command.
    """
    lines = [
        f"cd {shlex.quote(tree)}",
        "git rev-parse HEAD",
        f"export PYTHONPATH={shlex.quote(tree)}:${{PYTHONPATH}}",
    ]
    if numa:
        lines.append(shlex.join(numa))
    before = [f"{name}={shlex.quote(value)}" for name, value in environment.items()]
    lines.append(" ".join([*before, shlex.join(argv)]))
    return ";\n".join(lines)


def srun_problems(job: Job) -> Iterator[Problem]:
    """What stands in the way of one srun."""
    use_ranks = 'launch = "ranks", the default, does it'
    if not job.cluster.launcher_traits.batch:
        yield Problem(
            f"engines launch = 'srun' on cluster '{job.cluster.name}' (launcher ="
            f" '{job.cluster.launcher}'): there is no srun without Slurm",
            hint=use_ranks,
        )
    container = job.container
    if container is not None and container.runtime != "pyxis":
        yield Problem(
            f"engines launch = 'srun' with containers.{container.name}.runtime ="
            f" '{container.runtime}': srun starts tasks in an image by pyxis",
            hint=use_ranks,
        )
    if job.cluster.secrets:
        yield Problem(
            f"engines launch = 'srun' with secrets ({', '.join(job.cluster.secrets)}): Slurm keeps"
            " the environment of a step where its administrators see it",
            hint=use_ranks,
        )
