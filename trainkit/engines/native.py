"""engine = "native": trainkit's own trainer, run from the run's code snapshot."""

from __future__ import annotations

import os
import sys

from trainkit.engines.contract import Command
from trainkit.jobs.schema import Job
from trainkit.runs.folder import RunFolder


class Native:
    """One process a rank; the job travels as job.json in the run folder."""

    def command(self, job: Job, run: RunFolder, attempt: int) -> Command:
        threads = max(1, len(os.sched_getaffinity(0)) // job.ranks_per_node) if job.cluster.device == "cpu" else 1
        main = run.code / "trainkit" / "train" / "main.py"
        return Command(
            # -I: neither the working folder nor PYTHON* variables decide which code runs
            argv=(sys.executable, "-I", str(main), str(run.path), "--attempt", str(attempt)),
            env={"OMP_NUM_THREADS": str(threads), **job.cluster.env, **job.env},
            secret_names=job.cluster.secrets,
            cwd=run.path,
            ranks_per_node=job.ranks_per_node,
        )
