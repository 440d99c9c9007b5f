"""What no engine can be launched with."""

from __future__ import annotations

from trainkit.base.errors import Problem
from trainkit.jobs.containers import RUNTIME_TRAITS
from trainkit.jobs.schema import Job


def launcher_problems(
    job: Job, devices: tuple[str, ...] = ("cpu", "cuda"), *, compiles: bool = False
) -> list[Problem]:
    """What of a job no launcher of this version starts.

    Args:
        job: the job.
        devices: kinds of device that its engine computes on.
        compiles: whether its engine has graphs that are compiled before training.
    """
    sets = "--set "
    container = job.container
    asked = {
        f"nodes = {job.nodes} with launcher = 'local'": (
            job.nodes > 1 and job.cluster.launcher_traits.one_machine
        ),
        f"engine = '{job.engine}' on cluster.device = '{job.cluster.device.name}'": (
            job.cluster.device_type not in devices
        ),
    }
    hint = (
        f"`invoke plan {job.name}` plans it; to try it here: {sets}cluster=here and smaller degrees"
    )
    found = [
        Problem(f"{what} is planned for, but not launched by this version of trainkit", hint=hint)
        for what, there in asked.items()
        if there
    ]
    if job.precompile and not compiles:
        found.append(
            Problem(
                f"precompile with engine = '{job.engine}': it has no graphs to compile before it"
                " trains",
                hint=f"`invoke train {job.name}` trains; --set engine=native has graphs",
            )
        )
    if job.precompile and job.is_native and not job.training.compile:
        found.append(
            Problem(
                "precompile without training.compile: nothing would be compiled",
                hint="--set training.compile=true compiles every block",
            )
        )
    if (
        container is not None
        and container.runtime_traits.by_srun
        and not job.cluster.launcher_traits.pyxis
    ):
        anywhere = [name for name, traits in RUNTIME_TRAITS.items() if not traits.by_srun]
        found.append(
            Problem(
                f"containers.{container.name}.runtime = '{container.runtime}' is a part of srun,"
                f" and launcher = '{job.cluster.launcher}' of cluster '{job.cluster.name}' runs"
                " none",
                hint=f"{', '.join(anywhere)} run anywhere; {sets}container=none runs without",
            )
        )
    return found
