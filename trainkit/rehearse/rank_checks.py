"""Checks of the distinct ranks of a job, built and taken through a step by processes beside this
one: they can be built, agree with each other, and take the checkpoint to go on from."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from trainkit.base.errors import ConfigError, Exit, Problem, TrainkitError, raise_problems
from trainkit.base.files import write_json
from trainkit.base.process import start_child, stop_children
from trainkit.base.worker import PARENT_VARIABLE, error_from_report
from trainkit.jobs.resolved import write_job
from trainkit.jobs.schema import Job
from trainkit.rehearse.scene import Check, NotLookedAt, RehearsalScene
from trainkit.runs.checkpoints import Checkpoint

if TYPE_CHECKING:
    from trainkit.train.rehearsal.trace import RankTrace

WORKER = "trainkit.train.rehearsal.worker"
TAIL = 8  # lines of a worker's log that an error shows


class RankChecks:
    """Checks of the ranks that a process beside this one traces.

    Args:
        child: the process; None: it was not started.
        folder: of its files.
        why: it was not started.
    """

    def __init__(
        self, child: subprocess.Popen[bytes] | None, folder: Path = Path(), why: str = ""
    ) -> None:
        self.child = child
        self.folder = folder
        self.why = why
        self.traces: list[RankTrace] = []
        self.checks: tuple[tuple[str, Check], ...] = (
            ("ranks", self.check_ranks),
            ("collectives", self.check_collectives),
            ("checkpoint", self.check_checkpoint),
        )

    def check_ranks(self, scene: RehearsalScene) -> str:
        """Every distinct rank can be built, with its optimizer, and a checkpoint of it written."""
        self.traces = self._traced()
        largest = max(trace.elements for trace in self.traces)
        return (
            f"{len(self.traces)} that stand for all {scene.job.world_size}: model, optimizer and"
            f" checkpoint of each built without memory; the largest holds {largest / 1e6:,.1f}"
            f" million parameters"
        )

    def _traced(self) -> list[RankTrace]:
        """What the process found. Raises TrainkitError as it did."""
        from trainkit.train.rehearsal.trace import RankTrace

        if self.child is None:
            raise NotLookedAt(self.why)
        assert self.child.stdout is not None
        lines = [json.loads(line) for line in self.child.stdout.read().splitlines()]
        self.child.wait()
        for line in lines:
            if "result" in line:
                return [RankTrace.from_json(value) for value in line["result"]["traces"]]
            if "error" in line:
                raise error_from_report(line["error"])
        log = (self.folder / "log").read_text(errors="replace").splitlines()
        raise TrainkitError(
            f"the program that builds ranks ended with {self.child.returncode}",
            exit=Exit.BUG,
            hint="\n  ".join(log[-TAIL:]),
        )

    def check_collectives(self, scene: RehearsalScene) -> str:
        """They say the same to each other, in the same order."""
        from trainkit.train.rehearsal.compare import compare_traces, compared_groups

        self._require_traces()
        hint = (
            "they would wait for each other without end: every rank of a group must do the same"
            " there, whatever its number"
        )
        if wrong := compare_traces(self.traces):
            raise ConfigError([Problem(each.message, hint=hint) for each in wrong], exit=Exit.HANG)
        calls = sum(len(trace.calls) for trace in self.traces)
        return f"{calls:,} of one step, in {compared_groups(self.traces)} groups, agree"

    def check_checkpoint(self, scene: RehearsalScene) -> str:
        """The checkpoint to go on from has the tensors that the ranks expect, of their shapes."""
        job = scene.job
        if scene.run is None:
            return "a new run goes on from none"
        if not job.is_native:
            raise NotLookedAt(
                f"engine {job.engine} reads its own: invoke checkpoints {scene.run.id}"
            )
        self._require_traces()
        saved = scene.newest_checkpoint
        if saved is None:
            return f"run {scene.run.id} has none: it begins from its first step"
        raise_problems(
            checkpoint_problems(job, self.traces[0].checkpoint, saved), Exit.NO_CHECKPOINT
        )
        return f"step {saved.manifest.step}: {len(saved.manifest.tensors)} tensors fit"

    def _require_traces(self) -> None:
        if not self.traces:
            raise NotLookedAt(self.why or "the ranks could not be built")


@contextmanager
def checks_of_ranks(scene: RehearsalScene) -> Iterator[RankChecks]:
    """Trace the job's ranks in a process of its own, which ends with the block."""
    try:
        ranks, vocab = traced_ranks(scene)
    except NotLookedAt as why:
        yield RankChecks(None, why=str(why))
        return
    with tempfile.TemporaryDirectory(prefix="rehearse-") as name:
        folder = Path(name)
        write_job(folder / "job.json", scene.resolved)
        spec = {
            "job": str(folder / "job.json"),
            "ranks": ranks,
            "vocab": vocab,
            "at_once": len(os.sched_getaffinity(0)),
        }
        write_json(folder / "spec.json", spec)
        with open(folder / "log", "wb") as log:
            child = start_child(
                [sys.executable, "-I", "-m", WORKER, str(folder / "spec.json")],
                env={**os.environ, PARENT_VARIABLE: str(os.getpid())},
                cwd=folder,
                stdout=subprocess.PIPE,
                stderr=log,
            )
        try:
            yield RankChecks(child, folder)
        finally:
            stop_children([child])


def traced_ranks(scene: RehearsalScene) -> tuple[list[int], int]:
    """(ranks that stand for all, rows of the embedding). Raises NotLookedAt where the ranks cannot
    be built yet."""
    from trainkit.train.batches import vocab_size
    from trainkit.train.rehearsal.trace import distinct_ranks

    job = scene.job
    if not job.is_native:
        raise NotLookedAt(f"engine {job.engine} builds its own ranks; only native's are built here")
    scene.require_layout()
    try:
        vocab = vocab_size(job)
    except ConfigError as error:
        raise NotLookedAt(f"{error.list[0].message}: see tokenizer") from None
    return distinct_ranks(job, vocab), vocab


def checkpoint_problems(
    job: Job, shapes: dict[str, tuple[int, ...]], saved: Checkpoint
) -> list[Problem]:
    """What of a checkpoint the job's ranks would not take.

    Args:
        job: as it goes on.
        shapes: of all that a checkpoint of the job holds.
        saved: what it would go on from.
    """
    tensors = saved.manifest.tensors
    found = []
    for name, shape in shapes.items():
        entry = tensors.get(name)
        if entry is None:
            found.append(f"{name} is not in it")
        elif tuple(entry.shape) != shape:
            found.append(f"{name} is {list(entry.shape)} there and {list(shape)} in the job")
    found += [f"{name} is none of the job's" for name in tensors if name not in shapes]
    if not found:
        return []
    more = f"; {len(found) - 1} more tensors differ" if len(found) > 1 else ""
    return [
        Problem(
            f"{saved.folder}: {found[0]}{more}",
            hint=(
                f"go on with the model that it was saved with, or begin a new run: invoke train"
                f" {job.name}"
            ),
        )
    ]
