"""The run folder: where everything about one run lies. Paths only; who writes what is said
beside each."""

from __future__ import annotations

import os
import secrets
import time
from pathlib import Path

from trainkit.base.lazy_dataclasses import dataclass


@dataclass(frozen=True)
class AttemptFolder:
    """attempts/N of a run."""

    path: Path

    @property
    def number(self) -> int:
        return int(self.path.name)

    @property
    def events(self) -> Path:
        """What happened, one object a line (supervisor)."""
        return self.path / "events.jsonl"

    def log(self, rank: int) -> Path:
        """stdout and stderr of a rank (its agent)."""
        return self.path / "logs" / f"{rank}.log"

    @property
    def kernels(self) -> Path:
        """What the ranks computed with (rank 0)."""
        return self.path / "kernels.json"

    @property
    def restored(self) -> Path:
        """What the ranks went on from (rank 0)."""
        return self.path / "restored.json"

    @property
    def transports(self) -> Path:
        """What ssh or pdsh said, HOST.log (supervisor)."""
        return self.path / "launch"

    def error(self, rank: int) -> Path:
        """Why a rank failed (the rank)."""
        return self.path / "errors" / f"{rank}.json"

    def heartbeat(self, rank: int) -> Path:
        """Where a rank is: step, phase, time; phase "done" is its word of success (the rank)."""
        return self.path / "heartbeat" / f"{rank}.json"


@dataclass(frozen=True)
class RunFolder:
    """<root>/runs/<job>/<id>."""

    path: Path

    @property
    def id(self) -> str:
        return self.path.name

    @property
    def job_name(self) -> str:
        return self.path.parent.name

    @property
    def root(self) -> Path:
        """The folder that holds runs/, code/, data/ and stamps/."""
        return self.path.parent.parent.parent

    @property
    def job(self) -> Path:
        return self.path / "job.json"

    @property
    def plan(self) -> Path:
        return self.path / "plan.json"

    @property
    def origin(self) -> Path:
        """Where the run comes from: commit, diff, versions, environment."""
        return self.path / "origin.json"

    @property
    def diff(self) -> Path:
        """Uncommitted changes of the project when the run started."""
        return self.path / "origin.diff"

    @property
    def engine_diff(self) -> Path:
        """Uncommitted changes of the tree of an engine that is not trainkit's own."""
        return self.path / "engine.diff"

    @property
    def hosts(self) -> Path:
        """The run's hosts in rank order, then its spares (who starts it)."""
        return self.path / "launch" / "hosts.json"

    @property
    def inputs(self) -> Path:
        """The files that the samples come from; there once the run's stages are made."""
        return self.path / "launch" / "inputs.json"

    @property
    def world(self) -> Path:
        return self.path / "launch" / "world.json"

    @property
    def supervisor(self) -> Path:
        """Who the supervisor is, where it listens, and when it was last there; rewritten every
        few seconds while it lives."""
        return self.path / "launch" / "supervisor.json"

    @property
    def maker(self) -> Path:
        """Who began the run, or began it again; of use until its supervisor is there."""
        return self.path / "launch" / "maker.json"

    @property
    def slurm(self) -> Path:
        """The run's Slurm jobs (who submits them)."""
        return self.path / "launch" / "slurm.json"

    @property
    def kubernetes(self) -> Path:
        """The run's JobSets on Kubernetes (who submits them)."""
        return self.path / "launch" / "kubernetes.json"

    def session(self, attempt: int) -> Path:
        """By what supervisor and agents of an attempt find and prove themselves to each other."""
        return self.path / "launch" / f"attempt-{attempt}"

    @property
    def code(self) -> Path:
        """Link to the code snapshot the ranks run."""
        return self.path / "code"

    @property
    def metrics(self) -> Path:
        """One object a logged step (rank 0)."""
        return self.path / "metrics.jsonl"

    @property
    def tensorboard(self) -> Path:
        return self.path / "tensorboard"

    @property
    def checkpoints(self) -> Path:
        """step-00000100/manifest.json and its files."""
        return self.path / "checkpoints"

    @property
    def averages(self) -> Path:
        """Means of several checkpoints, in the form of checkpoints."""
        return self.path / "averages"

    def attempt(self, number: int) -> AttemptFolder:
        return AttemptFolder(self.path / "attempts" / str(number))

    def attempts(self) -> list[AttemptFolder]:
        """Attempts in order."""
        folder = self.path / "attempts"
        if folder.is_dir():
            numbers = sorted(int(p.name) for p in folder.iterdir() if p.name.isdigit())
        else:
            numbers = []
        return [self.attempt(n) for n in numbers]


def new_run_folder(root: Path, job: str) -> RunFolder:
    """Make an empty run folder with an id that sorts by time, `20261120-104500-3fa9`.

    Within one second the random part decides, so a second run of the job waits for the next
    second where its own is the lesser.
    """
    above = root / "runs" / job
    above.mkdir(parents=True, exist_ok=True)
    while True:
        second = time.strftime("%Y%m%d-%H%M%S", time.gmtime())
        path = above / f"{second}-{secrets.token_hex(2)}"
        if any(name.startswith(second) and name >= path.name for name in os.listdir(above)):
            time.sleep(0.05)
            continue
        try:
            path.mkdir()
        except FileExistsError:
            continue
        return RunFolder(path)
