"""The stage precompile: graphs of the native engine's compiled blocks, made once, on one machine,
before ranks wait for them."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from trainkit.engines.native import rank_variables
from trainkit.jobs.schema import Job
from trainkit.stages.build_container import image_of
from trainkit.stages.contract import Need, Unit
from trainkit.train.compiled_graphs import GraphFiles, graph_fields

VERSION = 3
WORKER = "trainkit.train.rehearsal.compile_worker"
MOST_BYTES = 20 * 2**30  # of all jobs' graphs below one root


class PrecompileStage:
    """One need and one unit a job that asks for it (precompile = true): the processes that compile
    beside each other are the unit's own, for one of them finds what another has made."""

    name = "precompile"

    def needs(self, job: Job, stamps: Path) -> list[Need]:
        if not job.is_native or not job.precompile:
            return []
        files = GraphFiles.of(job)
        fields = dict(graph_fields(job))
        if image := image_of(job):
            fields["image"] = image
        values = {
            "job": job.model_dump(mode="json"),
            "environment": rank_variables(job),
            "fields": fields,  # a unit of other values is another one, which is not done yet
        }
        argv = (sys.executable, "-I", "-m", WORKER)
        outputs = (files.archive, files.record)
        unit = Unit("graphs", argv, values, outputs)
        return [Need(self.name, job.name, job.name, VERSION, fields, (), outputs, (unit,))]

    def waits_for(self, job: Job) -> tuple[str, ...]:
        if not self.needs(job, Path()):
            return ()
        if job.model.vocab_size is None:
            return ("build-container", "prep-data")  # which says how many rows the head has
        return ("build-container",)


def prune(root: Path, keep: Sequence[str] = (), most: int = MOST_BYTES) -> list[tuple[Path, int]]:
    """Delete graphs below `root`, those that were made longest ago first, until all take at most
    `most` bytes; what was deleted, with its size.

    Args:
        root: the folder that holds compiled/.
        keep: jobs whose graphs stay.
        most: bytes that may stay.
    """
    folders = [path.parent for path in (root / "compiled").glob("*/graphs.tar")]
    folders.sort(key=lambda folder: (folder / "graphs.tar").stat().st_mtime, reverse=True)
    total = 0
    deleted = []
    for folder in folders:
        size = (folder / "graphs.tar").stat().st_size
        total += size
        if total > most and folder.name not in keep:
            (folder / "graphs.json").unlink(missing_ok=True)  # first: the rest is then nobody's
            shutil.rmtree(folder)
            total -= size
            deleted.append((folder, size))
    return deleted
