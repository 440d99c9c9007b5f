"""The distinct ranks of a job, built and taken through a step by processes beside this one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from trainkit.base.errors import ConfigError, Exit, Problem, TrainkitError
from trainkit.base.files import write_json
from trainkit.base.process import start_child, stop_children
from trainkit.base.worker import PARENT_VARIABLE, error_from_report
from trainkit.jobs.resolved import write_job
from trainkit.rehearse.report import NotLookedAt
from trainkit.rehearse.scene import RehearsalScene

WORKER = "trainkit.train.rehearsal.worker"
TAIL = 8  # lines of a worker's log that an error shows


class TracingProcess:
    """The process that traces ranks while other checks are made.

    Args:
        child: the process.
        folder: of its files.
    """

    def __init__(self, child: subprocess.Popen[bytes], folder: Path) -> None:
        self.child = child
        self.folder = folder

    def result(self) -> dict[str, object]:
        """What it found. Raises TrainkitError as it did."""
        assert self.child.stdout is not None
        lines = [json.loads(line) for line in self.child.stdout.read().splitlines()]
        self.child.wait()
        for line in lines:
            if "result" in line:
                found: dict[str, object] = line["result"]
                return found
            if "error" in line:
                raise error_from_report(line["error"])
        log = (self.folder / "log").read_text(errors="replace").splitlines()
        raise TrainkitError(
            f"the program that builds ranks ended with {self.child.returncode}",
            exit=Exit.BUG,
            hint="\n  ".join(log[-TAIL:]),
        )


@contextmanager
def tracing(scene: RehearsalScene, ranks: list[int], vocab: int) -> Iterator[TracingProcess]:
    """Trace ranks in a process of its own, which ends with the block."""
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
            yield TracingProcess(child, folder)
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


class RankChecks:
    """What is said of the ranks that were traced.

    Args:
        scene: the job.
        process: traces them.
    """

    def __init__(self, scene: RehearsalScene, process: TracingProcess) -> None:
        self.scene = scene
        self.process = process
        self.shapes: dict[str, tuple[int, ...]] = {}

    def check_ranks(self, scene: RehearsalScene) -> str:
        """Every distinct rank can be built, with its optimizer, and a checkpoint of it written."""
        from trainkit.train.rehearsal.trace import RankTrace

        found = self.process.result()["traces"]
        assert isinstance(found, list)
        self.traces = [RankTrace.from_json(value) for value in found]
        self.shapes = self.traces[0].checkpoint
        largest = max(trace.elements for trace in self.traces)
        return (
            f"{len(self.traces)} that stand for all {scene.job.world_size}: model, optimizer and"
            f" checkpoint of each built without memory; the largest holds {largest / 1e6:,.1f}"
            f" million parameters"
        )

    def check_collectives(self, scene: RehearsalScene) -> str:
        """They say the same to each other, in the same order."""
        from trainkit.train.rehearsal.compare import compare_traces, compared_groups

        if not hasattr(self, "traces"):
            raise NotLookedAt("the ranks could not be built")
        if wrong := compare_traces(self.traces):
            raise ConfigError(
                [
                    Problem(
                        each.message,
                        hint=(
                            "they would wait for each other for ever: every rank of a group must"
                            " do the same there, whatever its number"
                        ),
                    )
                    for each in wrong
                ],
                exit=Exit.HANG,
            )
        calls = sum(len(trace.calls) for trace in self.traces)
        return f"{calls:,} of one step, in {compared_groups(self.traces)} groups, agree"

    def check_checkpoint(self, scene: RehearsalScene) -> str:
        """See `data_checks.check_checkpoint`."""
        from trainkit.rehearse.data_checks import check_checkpoint

        return check_checkpoint(scene, self.shapes)
