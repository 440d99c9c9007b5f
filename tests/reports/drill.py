"""A drill: a run folder that was written by the clock of a script, so that it is known where every
second of it went."""

from __future__ import annotations

import datetime
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trainkit.runs.folder import RunFolder

START = 1_800_000_000.0  # seconds since 1970


def iso(at: float) -> str:
    moment = datetime.datetime.fromtimestamp(at, datetime.UTC)
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


@dataclass
class Drill:
    """Writes what supervisor and rank 0 write, and adds up by itself what each second was.

    Args:
        run: the folder.
        ahead: seconds that the clock of rank 0's host is ahead of the supervisor's.
    """

    run: RunFolder
    ahead: float = 0.0
    now: float = START
    attempt: int = 0
    waited: float = 0.0
    copied: float = 0.0
    bins: dict[str, float] = field(default_factory=dict)

    def spend(self, seconds: float, bin: str) -> None:
        self.now += seconds
        self.bins[bin] = self.bins.get(bin, 0.0) + seconds

    def event(self, name: str, **more: Any) -> None:
        path = self.run.attempt(self.attempt).events
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "a") as file:
            file.write(json.dumps({"time": iso(self.now), "event": name, **more}) + "\n")

    def phase(self, phase: str, step: int) -> None:
        path = self.run.attempt(self.attempt).path / "phases.jsonl"
        row = {
            "time": self.now + self.ahead,
            "phase": phase,
            "step": step,
            "data_seconds": self.waited,
            "checkpoint_seconds": self.copied,
        }
        with open(path, "a") as file:
            file.write(json.dumps(row) + "\n")

    def begin(self, ranks: int, seconds: float) -> None:
        """An attempt whose ranks begin to train after so long."""
        self.attempt += 1
        self.waited = 0.0
        self.copied = 0.0
        gone = {"host": "gone", "pid": 1, "start_time": 1, "boot_id": "another"}
        self.event("started", run="r", attempt=self.attempt, supervisor=gone, world_size=ranks)
        self.spend(seconds / 2, "start")
        self.event("agent_joined", node=0, host="h", address="h", clock_offset=self.ahead)
        for rank in range(ranks):
            self.event("rank_started", rank=rank, host="h", pid=rank)
        self.event("go")
        self.phase("start", 0)
        self.spend(seconds / 4, "start")
        self.phase("load", 0)
        self.spend(seconds / 4, "start")

    def train(
        self, step: int, seconds: float, *, data: float, copies: float = 0.0, lost: bool = False
    ) -> None:
        """Training from a step on, so long; of it so much waiting for data, and for the copies
        of a checkpoint."""
        self.phase("train", step)
        self.waited += data
        self.copied += copies
        if lost:
            self.spend(seconds, "lost")
        else:
            self.spend(seconds - data - copies, "training")
            self.spend(data, "data")
            self.spend(copies, "checkpoint")

    def other(self, phase: str, step: int, seconds: float, bin: str) -> None:
        self.phase(phase, step)
        self.spend(seconds, bin)

    def end(self, code: int, kind: str, seconds: float, *, said: bool = True) -> None:
        """Rank 0 ends; so long later the attempt. Not `said`: the supervisor died as well."""
        self.event("rank_ended", rank=0, code=code, stopped=False, done=code == 0)
        if said:
            self.spend(seconds, "idle")
            cause = None if kind == "success" else {"message": "it was killed"}
            words = {"exit": abs(code), "root_cause": cause, "step": 1, "class": kind}
            self.event("ended", **words, survivors=[], unanswered=[], budget=None)


def three_kills(root: Path, ahead: float = 0.0) -> Drill:
    """Submitted to Slurm; killed three times, once with its supervisor; resumed on another layout;
    gone back to a checkpoint; evaluated."""
    run = RunFolder(root / "runs" / "job" / "20270115-080000-aaaa")
    run.path.mkdir(parents=True)
    origins = {
        "model.seq_length": {"value": 16, "place": "jobs.toml:3", "overrode": []},
        "training.lr": {"value": 0.01, "place": "--set", "overrode": []},
    }
    run.job.write_text(json.dumps({"schema": "job/1", "job": {}, "origins": origins}))
    run.origin.write_text(json.dumps({"schema": "origin/1", "started": iso(START)}))
    drill = Drill(run, ahead)
    drill.spend(2, "start")  # the code is copied
    job = {"id": "7", "submitted": iso(drill.now), "first_attempt": 1, "began": 4}
    run.slurm.parent.mkdir()
    run.slurm.write_text(json.dumps({"schema": "slurm/1", "jobs": [job]}))
    drill.spend(600, "queue")
    drill.begin(4, 40)
    drill.other("compile", 0, 30, "compile")
    drill.train(1, 50, data=2)
    drill.other("compile_eval", 5, 12, "compile")
    drill.train(5, 50, data=2)
    drill.other("save", 10, 5, "checkpoint")
    drill.train(10, 77, data=3, copies=2, lost=True)
    drill.end(-9, "infra", 8)  # the first kill
    drill.spend(10, "idle")
    drill.begin(4, 36)
    drill.train(10, 100, data=2, copies=3)
    drill.other("eval", 20, 20, "evaluation")
    drill.other("save", 20, 6, "checkpoint")
    drill.train(20, 50, data=1, lost=True)
    drill.other("eval", 25, 11, "lost")
    drill.other("save", 25, 3, "lost")  # the second kill: this checkpoint was never whole
    drill.end(-9, "infra", 5)
    drill.spend(100, "idle")
    drill.begin(2, 44)  # on another layout
    drill.train(20, 130, data=0)
    drill.other("save", 30, 7, "checkpoint")
    drill.train(30, 33, data=1, lost=True)
    drill.end(-9, "infra", 0, said=False)  # the third, and the supervisor
    drill.spend(1000, "idle")
    drill.begin(4, 50)
    drill.train(30, 140, data=5)
    drill.other("save", 40, 8, "checkpoint")
    drill.train(40, 25, data=1, lost=True)
    drill.other("load", 42, 9, "checkpoint")  # the loss was not finite: back to step 40
    drill.train(40, 120, data=5)
    drill.other("eval", 50, 21, "evaluation")
    drill.other("save", 50, 6, "checkpoint")
    drill.phase("done", 50)
    drill.spend(1, "idle")
    drill.end(0, "success", 3)
    return drill
