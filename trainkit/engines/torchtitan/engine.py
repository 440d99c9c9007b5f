"""engine = "torchtitan": an unmodified tree of pytorch/torchtitan, its torchtitan.train on every
rank with torch's variables from the agents instead of torchrun.

The job travels as a document (values.py), of which a configuration is made in torchtitan's own
interpreter (inside/config.py). Its samples are those of engine native, in the same order.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from trainkit.base.errors import Problem
from trainkit.base.process import cpu_sharing
from trainkit.engines.contract import Command
from trainkit.engines.foreign import EngineProgram, ForeignEngine, rank_command
from trainkit.engines.imported import ImportedJob, ImportRequest
from trainkit.engines.options import (
    OptionTable,
    check_engine_args,
    load_table,
    newest_version,
)
from trainkit.engines.rank import torchtitan as reader
from trainkit.engines.rank.spec import RequiredModule
from trainkit.engines.requirements import required_versions
from trainkit.engines.rules import PUBLISHED
from trainkit.engines.sources import engine_python, source_of, source_tree, text_of
from trainkit.engines.torchtitan.data import read_by, splits_of, vocabulary
from trainkit.engines.torchtitan.import_config import import_torchtitan
from trainkit.engines.torchtitan.values import FAMILIES, SET_BY, document, job_problems
from trainkit.jobs.schema import Job
from trainkit.plan.objection import Objection
from trainkit.plan.rules import ALL_STAGES
from trainkit.runs.folder import RunFolder
from trainkit.train.huggingface.folder import CONFIG
from trainkit.train.huggingface.hub import weights_folder

INSTALL = "`pip install torchtitan` brings it, or engines.X.venv"
MODULES = tuple(
    RequiredModule(name, INSTALL)
    for name in ("torch", "tyro", "datasets", "spmd_types", "torch_checkpointing", "triton")
)
TRIED = "0.3."
BLOCK = 128  # tokens of a block of FlexAttention, which context parallelism deals


def _objections(job: Job) -> Iterator[Objection]:
    """Gathered weights are freed after forward and backward (ZeRO 3), or kept from forward to
    backward with gradients sharded (ZeRO 2); sharded optimizer state alone it has not."""
    key = "parallelism.zero_stage"
    p = job.parallelism
    sharded = job.data_parallel_size // p.data_parallel_replicate_size > 1
    if p.zero_stage == 1 and sharded:
        message = f"{key} 1: torchtitan's FSDP shards gradients too (2), or all (3)"
        yield Objection("no-such-zero", key, message, ({key: 2}, {key: 3}))
    key = "parallelism.context_parallel_size"
    dealt = 2 * BLOCK * p.context_parallel_size
    if p.context_parallel_size > 1 and job.model.seq_length % dealt:
        message = (
            f"{key} {p.context_parallel_size}: torchtitan deals whole blocks of attention, so"
            f" seq_length {job.model.seq_length} must be a multiple of {dealt}"
        )
        yield Objection("blocks-not-dealt", key, message, ({key: 1},))
    if p.pipeline_model_parallel_size > 1 and job.model.tied:
        key = "parallelism.pipeline_model_parallel_size"
        message = f"{key}: torchtitan has no pipeline for tied embeddings"
        yield Objection("tied-in-pipeline", key, message, ({key: 1},))


# states: as the native trainer, whose fully_shard is the same
RULES = replace(
    PUBLISHED,
    engine="torchtitan",
    families=FAMILIES,
    replicates=True,
    zero_in_pipeline=ALL_STAGES,
    virtual_stages=False,
    objections=_objections,
)


class Torchtitan(ForeignEngine):
    """One process a rank."""

    name = "torchtitan"
    rules = RULES
    entry_files = ("torchtitan/train.py", "torchtitan/trainer.py")
    keeps = "torchtitan keeps the newest, as many as checkpoint.keep_last says, and the last step's"
    traits = frozenset({"qk_norm"})

    def version_in(self, tree: Path) -> str | None:
        """assets/version.txt of a clone; of an unpacked wheel the name of its .dist-info."""
        said = text_of(tree / "assets" / "version.txt").strip()
        names = [path.name for path in sorted(tree.glob("torchtitan-*.dist-info"))]
        found = re.match(r"[0-9]+\.[0-9]+\.[0-9]+", said or "".join(names)[len("torchtitan-") :])
        return found[0] if found else None

    def option_problems(self, job: Job, table: OptionTable) -> list[Problem]:
        return [
            *_version_problems(self.version_of(job)),
            *check_engine_args(job, table, SET_BY),
            *job_problems(job),
        ]

    def version_notes(self, job: Job, table: OptionTable) -> list[str]:
        return [
            "torchtitan begins with initial values of its own rule, says the loss of the step that"
            " it logs, not a mean over log_interval, and looks for NaN at those steps alone"
        ]

    def is_its_file(self, path: Path, text: str) -> bool:
        """A script that runs it, or its tree."""
        return "torchtitan.train" in text or (path / "torchtitan" / "train.py").is_file()

    def import_job(self, request: ImportRequest) -> ImportedJob:
        table = load_table(self.name, request.version or newest_version(self.name))
        return import_torchtitan(request, table)

    def ready_folder(self, run: RunFolder) -> None:
        self.put_aside(run)

    def command(self, job: Job, run: RunFolder, attempt: int) -> Command:
        table = self.table_of(job)
        vocab = vocabulary(job)
        splits = splits_of(job, vocab)
        newest = reader.tracked_step(run.checkpoints)
        weights = weights_folder(job) if job.init_from and newest is None else None
        said = document(job, run.path, newest, vocab, splits, weights)
        tree = source_tree(job)
        name = f"launch/torchtitan-{attempt}.json"
        words = [word for key, value in job.engine_args.items() for word in _word(key, value)]
        program = EngineProgram(
            self.name,
            str(engine_python(job)),
            tree,
            (
                "-u",
                "-m",
                "trainkit.engines.torchtitan.inside.main",
                str(run.path / name),
                *words,
            ),
            env=_environment(job),
            files={name: json.dumps(said, indent=1) + "\n"},
            modules=MODULES,
            versions=required_versions(source_of(job), self.name, table.version),
            reads=(*read_by(splits), *([weights / CONFIG] if weights else [])),
            python_path=(str(run.code), str(tree)),
        )
        return rank_command(job, run, attempt, program)


def _version_problems(version: str | None) -> Iterator[Problem]:
    """Its classes are another place's in every version."""
    if version is not None and not version.startswith(TRIED):
        yield Problem(
            f"torchtitan {version}: this version of trainkit makes configurations of {TRIED}x",
            hint=f"give engines.X.source a tree of {TRIED}0",
        )


def _word(key: str, value: object) -> tuple[str, ...]:
    """An option as tyro reads it: a switch has two names, and a list is one word."""
    if value is False:
        section, _, name = key.rpartition(".")
        return (f"--{section}.no-{name}",)
    if value is True:
        return (f"--{key}",)
    text = ",".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
    return (f"--{key}", text)


def _environment(job: Job) -> dict[str, str]:
    """Variables that torchtitan needs beyond the job's own."""
    found = {"PYTHONUNBUFFERED": "1"}
    if job.cluster.device_type == "cpu":
        return found | cpu_sharing(job.ranks_per_node, os.environ)
    # as its run_train.sh has it
    return found | {"OMP_NUM_THREADS": "1", "PYTORCH_ALLOC_CONF": "expandable_segments:True"}
