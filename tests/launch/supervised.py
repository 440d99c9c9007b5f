"""Runs under the real supervisor whose ranks are small programs."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import trainkit
from tests.conftest import JOBS
from trainkit.base.errors import Problem
from trainkit.base.files import write_json
from trainkit.engines.contract import Command
from trainkit.jobs.load import load
from trainkit.jobs.resolved import write_job
from trainkit.jobs.schema import Job
from trainkit.launch.hosts.hostfile import Host
from trainkit.launch.hosts.selection import HostList
from trainkit.launch.launchers import Launcher
from trainkit.launch.supervise.code_snapshot import link_code, take_snapshot
from trainkit.launch.supervise.observer import RunObserver, silent_observer
from trainkit.launch.supervise.outcome import Outcome
from trainkit.launch.supervise.supervisor import supervise
from trainkit.plan.rules import Rules
from trainkit.runs.folder import RunFolder, new_run_folder
from trainkit.runs.retention import ListedCheckpoint

DONE = """
import json, os
open(os.environ["TRAINKIT_HEARTBEAT_FILE"], "w").write(json.dumps(dict(phase="done")))
"""


class Program:
    """An engine whose ranks run `python -c PROGRAM`, or any argv."""

    def __init__(
        self,
        program: str = DONE,
        argv: tuple[str, ...] | None = None,
        env: dict[str, str] | None = None,
        *,
        own_code: bool = False,
    ) -> None:
        self.own_code = own_code
        self.argv, self.env = argv or (sys.executable, "-c", program), env or {}
        self.rules = Rules()

    def notes(self, job: Job) -> list[str]:
        return []

    def checkpoint_names(self, run: RunFolder) -> list[str]:
        return []

    def compiled_nodes(self, job: Job) -> int | None:
        return None

    def problems(self, job: Job) -> list[Problem]:
        return []

    def resume_problems(self, job: Job, run: RunFolder) -> list[Problem]:
        return []

    def before_attempt(self, job: Job, run: RunFolder) -> None:
        """Nothing."""

    def checkpoints(self, run: RunFolder, *, hashes: bool) -> list[ListedCheckpoint]:
        return []

    def command(self, job: Job, run: RunFolder, attempt: int) -> Command:
        env = {"ATTEMPT": str(attempt), **job.environment, **self.env}
        return Command(
            self.argv,
            env,
            job.cluster.secrets,
            run.path,
            ranks_per_node=job.ranks_per_node,
            own_code=self.own_code,
        )


def make_run(
    folder: Path,
    sets: Sequence[str] = (),
    hosts: Sequence[Host] | None = None,
    nodes: int = 1,
    container: str = "",
) -> RunFolder:
    """A run of tests/conftest.py's job on random tokens, complete up to its supervisor; its
    slots are its own. `container`: lines of [containers.box]."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "jobs.toml").write_text(
        JOBS.rstrip()
        + (f'\ncontainer = "box"\n[containers.box]\n{container}\n' if container else "\n")
    )
    slots = folder / "node"
    slots.mkdir(exist_ok=True)
    given = [
        f"cluster.node_folder={slots}",
        f"cluster.root={folder}",
        "cluster.watch.grace=1",
        f"nodes={nodes}",
        *([] if nodes == 1 else ["cluster.launcher=ssh"]),
        *sets,
    ]
    resolved = load(folder).resolve("random", given)
    run = new_run_folder(folder, "random")
    link_code(take_snapshot(Path(trainkit.__file__).parent, folder / "code").folder, run.code)
    default = [
        Host(
            "localhost" if nodes == 1 else f"h{i}", slots=tuple(range(resolved.job.ranks_per_node))
        )
        for i in range(nodes)
    ]
    write_json(run.hosts, HostList(tuple(hosts or default), nodes).to_json())
    write_job(run.job, resolved)
    return run


def supervised(
    run: RunFolder,
    engine: Program,
    *,
    watch: RunObserver | None = None,
    launcher: Launcher | None = None,
    secrets: dict[str, str] | None = None,
) -> tuple[Outcome, list[dict[str, Any]]]:
    """(outcome, events of the last attempt)."""
    outcome = supervise(
        run,
        secrets or {},
        watch or silent_observer(),
        share=False,
        launcher=launcher,
        engine=engine,
    )
    return outcome, events(run, run.attempts()[-1].number)


def events(run: RunFolder, attempt: int = 1) -> list[dict[str, Any]]:
    """All events of an attempt."""
    return [json.loads(line) for line in run.attempt(attempt).events.read_text().splitlines()]
