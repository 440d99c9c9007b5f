"""engine = "native": trainkit's own trainer, run from the run's code snapshot."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping

from trainkit.base.errors import Problem
from trainkit.base.extras import install_command
from trainkit.base.process import cpu_sharing
from trainkit.engines.contract import Command, launcher_problems
from trainkit.engines.rank.versions import allows
from trainkit.jobs.schema import Job
from trainkit.ops.build import torch_version
from trainkit.plan.checks import SCHEDULE, TP
from trainkit.plan.grid_checks import EP, ETP
from trainkit.plan.objection import Objection
from trainkit.plan.rules import Rules, experts_apart_problem, zero_bubble_problem
from trainkit.runs.folder import RunFolder
from trainkit.runs.retention import ListedCheckpoint, list_checkpoints

# The releases that the trainer was tried with (./inv test --torch), as in pyproject.toml: it leans
# on private names, which any release may change.
TORCH = "torch>=2.11,<2.16"


def torch_problem(version: str) -> str:
    """Why ranks do not run with a version of torch; "" where they do, or it is not known."""
    if allows(TORCH, version):
        return ""
    return f"torch {version} was not tried with this version of trainkit, which takes {TORCH}"


def native_objections(job: Job) -> Iterator[Objection]:
    """What the torch of the job's ranks cannot do."""
    if why := zero_bubble_problem(job.parallelism, _torch_of_ranks(job)):
        yield Objection("no-zero-bubble", SCHEDULE, why, ({SCHEDULE: "1f1b"},))
    if job.model.moe and (why := experts_apart_problem(job.parallelism, _torch_of_ranks(job))):
        yield Objection("no-experts-apart", EP, why, ({TP: 1, EP: 1, ETP: 1},))


def rank_variables(job: Job) -> dict[str, str]:
    """What ranks have beyond their node's environment, for `on_this_node`."""
    if job.cluster.device_type == "cpu":
        sharing = cpu_sharing(job.ranks_per_node, os.environ)
        sharing |= kept_heap({**os.environ, **job.environment})
    else:
        sharing = {"OMP_NUM_THREADS": "1"}
        if job.training.deterministic:
            # what torch's deterministic mode demands (cuBLAS, "Results reproducibility")
            sharing["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    # so many of the last collectives are known of each rank, to say in which it hangs
    return {**sharing, "TORCH_FR_BUFFER_SIZE": "256", **job.environment}


def _python(job: Job) -> str:
    """The interpreter of the job's ranks."""
    if job.container:
        return job.container.python
    if job.cluster.launcher_traits.one_machine:
        return sys.executable
    return job.cluster.python or sys.executable


def kept_heap(environment: Mapping[str, str]) -> dict[str, str]:
    """glibc's malloc for CPU ranks (its manual, "Memory Allocation Tunables"); nothing where
    `environment` has settings of malloc.

    A step asks for the same tensors again and again, so what it frees is kept: tensors of more than
    32 MiB would be mapped again each time, and the system clears every page of them (a tenth of the
    step of GPT-2 124M in bf16). torch asks for aligned memory, of which malloc cuts some bytes off
    at both ends. Put aside for small objects (tcache, fastbins) these keep a freed tensor's
    memory from ever being one piece again: the heap grew by 10 MiB a step. So nothing is put aside.
    """
    if any(name.startswith(("MALLOC_", "GLIBC_TUNABLES")) for name in environment):
        return {}
    settings = {"mmap_max": 0, "trim_threshold": 2**60, "tcache_count": 0, "mxfast": 0}
    return {
        "GLIBC_TUNABLES": ":".join(f"glibc.malloc.{key}={value}" for key, value in settings.items())
    }


def _torch_of_ranks(job: Job) -> str:
    """Its version; "" where they do not run with this Python."""
    return torch_version() if _python(job) == sys.executable else ""


class Native:
    """One process a rank; the job travels as job.json in the run folder."""

    rules = Rules(objections=native_objections)

    def problems(self, job: Job) -> list[Problem]:
        found = [*launcher_problems(job, compiles=True)]
        if why := torch_problem(_torch_of_ranks(job)):
            found.append(Problem(why, hint=install_command()))
        return found

    def command(self, job: Job, run: RunFolder, attempt: int) -> Command:
        main = run.code / "trainkit" / "train" / "main.py"
        parent = main.with_name("parent.py")
        warm = job.recovery == "warm" and parent.exists()  # older runs' code has none
        return Command(
            # -I: neither the working folder nor PYTHON* variables decide which code runs
            argv=(_python(job), "-I", str(main), str(run.path), "--attempt", str(attempt)),
            env=rank_variables(job),
            secret_names=job.cluster.secrets,
            cwd=run.path,
            ranks_per_node=job.ranks_per_node,
            own_code=True,
            parent=(_python(job), "-I", str(parent), str(run.path)) if warm else None,
        )

    def resume_problems(self, job: Job, run: RunFolder) -> list[Problem]:
        """None: its checkpoints are read by any layout."""
        return []

    def before_attempt(self, job: Job, run: RunFolder) -> None:
        """The trainer takes back its own metrics when it has chosen its checkpoint."""

    def checkpoints(self, run: RunFolder, *, hashes: bool) -> list[ListedCheckpoint]:
        return list_checkpoints(run, hashes=hashes)

    def checkpoint_names(self, run: RunFolder) -> list[str]:
        return sorted(
            path.name for path in run.checkpoints.glob("step-*") if path.name[5:].isdigit()
        )

    def compiled_nodes(self, job: Job) -> int | None:
        """None: the stage `precompile` compiles them."""
        return None

    def notes(self, job: Job) -> list[str]:
        return []
