"""The jobs of this checkout on Slurm, for tests of its scripts and lines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from trainkit.jobs.load import load
from trainkit.jobs.schema import Job
from trainkit.launch.containers import node_container
from trainkit.launch.hosts.hostfile import Host
from trainkit.launch.launchers.slurm import srun_argv
from trainkit.launch.session import Session
from trainkit.launch.slurm.batch_script import (
    all_options,
    allocation_variables,
)
from trainkit.runs.folder import RunFolder

ROOT = Path(__file__).resolve().parents[3]


RUN = RunFolder(Path("/shared/runs/job/20261121-100000-abcd"))


def job(name: str, *sets: str) -> Job:
    return load(ROOT).resolve(name, ["cluster.root=/shared", *sets]).job


def session(chosen: Job, hosts: Sequence[Host]) -> Session:
    folder, code = RUN.session(1), Path("/shared/code/SHA")
    return Session(
        folder,
        RUN.id,
        1,
        hosts,
        chosen.cluster,
        code,
        RUN.attempt(1).transports,
        {},
        node_container(chosen, folder, RUN.id, 1),
    )


def srun(name: str, *sets: str, further: Mapping[str, str] | None = None) -> list[str]:
    chosen = job(name, *sets)
    hosts = [Host(f"n{i}", slots=(0,)) for i in range(2)]
    return list(
        srun_argv(
            session(chosen, hosts),
            hosts,
            {**allocation_variables(all_options(chosen, RUN)), **(further or {})},
        )
    )
