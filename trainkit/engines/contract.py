"""What an engine gives the launcher, a command as data; and what none can be launched with."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Literal, Protocol

from trainkit.base.errors import Problem
from trainkit.base.lazy_dataclasses import dataclass, field
from trainkit.jobs.containers import RUNTIME_TRAITS
from trainkit.jobs.schema import Job
from trainkit.plan.rules import Rules
from trainkit.runs.folder import RunFolder
from trainkit.runs.retention import ListedCheckpoint


@dataclass(frozen=True)
class Command:
    """What is to be executed. It travels in launch/world.json, never through a shell.

    Args:
        argv: the program and its arguments, the same on every rank.
        env: environment variables the engine adds.
        secret_names: variables whose values come from the caller's environment and are written
            nowhere.
        cwd: the working folder.
        files: small files to write below the run folder before the start, by relative name.
        ranks_per_node: processes a node.
        spawn: who starts the ranks: the agent ("per_rank"), a program that starts its node's
            ("per_node"), or one on the first node that starts all of them ("per_run").
        engine_argv: what that program runs in turn, and engine_cwd: where; empty where it is the
            whole of it.
        own_code: it is trainkit's own, and asks of each node the Python that trainkit needs.
        port: of rank 0, where it is free; 0: any.
        parent: the program from which each agent has its ranks forked; None: there is none.
    """

    argv: tuple[str, ...]
    env: Mapping[str, str]
    secret_names: tuple[str, ...]
    cwd: Path
    files: Mapping[str, str] = field(default_factory=dict)
    ranks_per_node: int = 1
    spawn: Literal["per_rank", "per_node", "per_run"] = "per_rank"
    engine_argv: tuple[str, ...] = ()
    engine_cwd: str = ""
    own_code: bool = False
    port: int = 0
    parent: tuple[str, ...] | None = None

    def to_json(self) -> dict[str, object]:
        """As kept in world.json."""
        engine: dict[str, object] = {}
        if self.engine_argv:
            engine = {"engine_argv": list(self.engine_argv), "engine_cwd": self.engine_cwd}
        return {
            "argv": list(self.argv),
            "env": dict(self.env),
            "secret_names": list(self.secret_names),
            "cwd": str(self.cwd),
            "ranks_per_node": self.ranks_per_node,
            "spawn": self.spawn,
            **engine,
        }


def engine_lines(command: Command) -> list[str]:
    """The lines of a dry run that say what a rank's program runs in turn, and what it reads of the
    run folder; none where it is the whole of it."""
    if not command.engine_argv:
        return []
    files = [
        f"  with {name} in the run folder, {len(text.splitlines())} lines (--json shows them)"
        for name, text in command.files.items()
    ]
    return [f"  which runs in {command.engine_cwd}: {shlex.join(command.engine_argv)}", *files]


class Engine(Protocol):
    """One value of `jobs.X.engine`."""

    @property
    def rules(self) -> Rules:
        """Which layouts it takes, and how many bytes it holds and writes."""

    def notes(self, job: Job) -> list[str]:
        """What of a job is passed on otherwise than it stands in jobs.toml, in words."""

    def problems(self, job: Job) -> list[Problem]:
        """Why this version cannot launch `job`, though it can be planned; an empty list if it
        can."""

    def command(self, job: Job, run: RunFolder, attempt: int) -> Command:
        """The command of one attempt.

        Args:
            job: the job.
            run: its folder, with the code snapshot.
            attempt: counted from 1.
        """

    def resume_problems(self, job: Job, run: RunFolder) -> list[Problem]:
        """Why the engine cannot go on with the run's newest checkpoint as `job` says; an empty
        list if it can. A run is not continued on fewer nodes where this objects."""

    def before_attempt(self, job: Job, run: RunFolder) -> None:
        """Bring the run folder into the state in which an attempt may begin; called by the run's
        supervisor when nothing of an earlier attempt runs any more. Raises TrainkitError where it
        may not begin."""

    def checkpoints(self, run: RunFolder, *, hashes: bool) -> list[ListedCheckpoint]:
        """The run's checkpoints, oldest first, then those that are damaged.

        Args:
            run: the run.
            hashes: read every byte, where the engine has checksums.
        """

    def checkpoint_names(self, run: RunFolder) -> list[str]:
        """The folders of a run's checkpoints up to the one that it would go on from."""

    def compiled_nodes(self, job: Job) -> int | None:
        """On how many of the job's nodes a run of its own has compiled the graphs that it trains
        with; None where the engine has no such runs."""


def launcher_problems(
    job: Job, devices: tuple[str, ...] = ("cpu", "cuda"), *, compiles: bool = False
) -> Iterator[Problem]:
    """What of a job no launcher of this version starts.

    Args:
        job: the job.
        devices: kinds of device that its engine computes on.
        compiles: whether its engine has graphs that are compiled before training.
    """
    cluster = job.cluster
    planned = []
    if job.nodes > 1 and cluster.launcher_traits.one_machine:
        planned.append(f"nodes = {job.nodes} with launcher = 'local'")
    if cluster.device_type not in devices:
        planned.append(f"engine = '{job.engine}' on cluster.device = '{cluster.device.name}'")
    for what in planned:
        yield Problem(
            f"{what} is planned for, but not launched by this version of trainkit",
            hint=(
                f"`invoke plan {job.name}` plans it; to try it here: --set cluster=here and smaller"
                " degrees"
            ),
        )
    if job.precompile and not compiles:
        yield Problem(
            f"precompile with engine = '{job.engine}': it has no graphs to compile before it"
            " trains",
            hint=f"`invoke train {job.name}` trains; --set engine=native has graphs",
        )
    if job.precompile and job.is_native and not job.training.compile:
        yield Problem(
            "precompile without training.compile: nothing would be compiled",
            hint="--set training.compile=true compiles every block",
        )
    container = job.container
    by_srun = container is not None and container.runtime_traits.by_srun
    if container is not None and by_srun and not cluster.launcher_traits.pyxis:
        anywhere = [name for name, traits in RUNTIME_TRAITS.items() if not traits.by_srun]
        yield Problem(
            f"containers.{container.name}.runtime = '{container.runtime}' is a part of srun, and"
            f" launcher = '{cluster.launcher}' of cluster '{cluster.name}' runs none",
            hint=f"{', '.join(anywhere)} run anywhere; --set container=none runs without",
        )
