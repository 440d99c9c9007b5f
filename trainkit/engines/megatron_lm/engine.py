"""engine = "megatron-lm": an unmodified tree of NVIDIA/Megatron-LM, its pretrain_gpt.py beside our
small program on every rank, with torch's variables from the agents instead of torchrun.

Which documents Megatron-LM gives to which split is asked before it starts: one whose split of a
pair holds no document builds its index of samples without end or message (core 0.4 and later).
"""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from trainkit.base.errors import ConfigError, Problem
from trainkit.base.files import write_text
from trainkit.base.process import cpu_sharing
from trainkit.engines.contract import Command
from trainkit.engines.foreign import (
    EngineProgram,
    listed_checkpoints,
    rank_command,
    take_back_metrics,
)
from trainkit.engines.launchable import launcher_problems
from trainkit.engines.megatron_lm.argv import RunPlaces, argv_problems, megatron_argv
from trainkit.engines.megatron_lm.data import SPLITS, MegatronData, data_of
from trainkit.engines.options import OptionTable, load_table, release, version_at
from trainkit.engines.rank import megatron_lm as reader
from trainkit.engines.rank.spec import RequiredModule
from trainkit.engines.requirements import required_versions
from trainkit.engines.rules import sharding_obstacle
from trainkit.engines.sources import (
    engine_python,
    engine_version,
    source_of,
    source_tree,
    version_of_tree,
)
from trainkit.jobs.schema import Job
from trainkit.runs.checkpoint_list import ListedCheckpoint
from trainkit.runs.folder import RunFolder

if TYPE_CHECKING:  # it imports numpy, which planning does without
    from trainkit.data.order.resolve_pairs import SplitPair


def split_documents(split: str, documents: int) -> list[int]:
    """How many documents train, valid and test get.

    core/datasets/blended_megatron_dataset_builder.py: each ends at round(sum of its weight and
    those before it, over all, x documents).
    """
    weights = [float(part) for part in split.replace("/", ",").split(",")]
    weights += [0.0] * (len(SPLITS) - len(weights))
    ends = [0]
    for number in range(len(SPLITS)):
        ends.append(round(sum(weights[: number + 1]) / sum(weights) * documents))
    return [after - before for before, after in itertools.pairwise(ends)]


def refuse_empty_splits(job: Job, data: MegatronData) -> None:
    """Raise ConfigError (exit 3) where a split with a weight gets no document of a pair."""
    from trainkit.data.indexed.dataset import IndexedDataset

    if data.split is None:
        return
    weights = [float(part) for part in data.split.replace("/", ",").split(",")]
    for pair in data.files.get("train", ()):
        if not Path(f"{pair.prefix}.idx").is_file():
            continue  # it is still to be made
        documents = IndexedDataset(pair.prefix, mmap=pair.mmap).num_documents
        for name, count, weight in zip(
            SPLITS, split_documents(data.split, documents), weights, strict=False
        ):
            if weight and not count:
                raise _empty(job, data.split, name, pair, documents)


def _empty(job: Job, split: str, name: str, pair: SplitPair, documents: int) -> ConfigError:
    return ConfigError(
        f"datasets.{pair.group}.split ({split!r}) leaves the {name} split no document of"
        f" {pair.prefix}, which has {documents}: Megatron-LM would build its index for ever",
        hint=(
            "text without lines of JSON is one document a file; give more documents, a larger"
            f" weight, or 0 for {name}"
        ),
    )


ENGINE = "megatron-lm"
# megatron/training/checkpointing.py get_checkpoint_tracker_filename
TRACKER = "latest_checkpointed_iteration.txt"
# what each version imports without which it cannot start, or hangs in its first save
_MODULES = ("torch", "numpy")
_UNTIL_0_16 = ("regex", "six")  # of its tokenizers
_SINCE_0_16 = ("triton",)  # imported at the top, used or not
_IN_2021 = ("apex",)
_TORCH_DIST = ("psutil",)  # without it 0.16's writers die and the parent waits for ever
# else it trains and saves what it cannot load
_DISTRIBUTED_OPTIMIZER = RequiredModule(
    "transformer_engine or apex",
    "without either, the distributed optimizer cannot load its own checkpoints: install one, or set"
    " parallelism.zero_stage = 0",
)


def version_of(job: Job) -> str | None:
    """Whose options a job's tree has; see `version_of_tree`."""
    return version_of_tree(job, ENGINE, _version_at)


def _version_at(revision: str) -> str | None:
    named = re.fullmatch(r"core_(?:r|v)(\d+\.\d+\.\d+(?:rc\d+)?)", revision)
    return version_at(ENGINE, revision) or (f"core-{named[1]}" if named else None)


def table_of(job: Job) -> OptionTable:
    """The options of the job's version. Raises ConfigError where it is not known."""
    version = version_of(job) or engine_version(source_tree(job), ENGINE)
    return load_table(ENGINE, version)


def engine_notes(job: Job) -> list[str]:
    """What of a job is passed on otherwise than it stands there, in words; nothing where its
    version is not known yet. (That sequence parallelism is off for TP 1 says every plan.)"""
    try:
        version = version_of(job)
    except ConfigError:
        return []
    if version is None:
        return []
    notes = []
    table = load_table(ENGINE, version)
    if table.notice:
        notes.append(table.notice)
    obstacle = sharding_obstacle(job)
    if "use-distributed-optimizer" not in table:
        obstacle = f"Megatron-LM {table.version} has no distributed optimizer"
    if job.parallelism.zero_stage == 1 and job.data_parallel_size == 1 and obstacle:
        notes.append(
            f"parallelism.zero_stage 1 is left out: {obstacle}, and with data-parallel size 1 there"
            " is nothing to share"
        )
    notes += _native_only(job)
    if job.training.log_interval > job.training.train_iters:
        notes.append(
            f"training.log_interval {job.training.log_interval} becomes train_iters"
            f" {job.training.train_iters}: else no line would say what was trained"
        )
    return notes


def _native_only(job: Job) -> list[str]:
    """Keys that ask for what a Megatron-LM run does without, and is the same without."""
    asked = {
        "checkpoint.keep_last": "keep_last" in job.checkpoint.model_fields_set,
        "checkpoint.keep_every": job.checkpoint.keep_every is not None,
    }
    notes = [
        f"{key} has no effect: Megatron-LM deletes no checkpoint, so the disk must hold all"
        for key, there in asked.items()
        if there
    ]
    if "max_skipped_in_a_row" in job.training.model_fields_set:
        notes.append(
            "training.max_skipped_in_a_row has no effect: Megatron-LM counts skipped steps and goes"
            " on"
        )
    if job.generate.model_fields_set:
        notes.append("generate has no effect: a run of Megatron-LM ends without a sample")
    return notes


def engine_environment(job: Job, table: OptionTable) -> dict[str, str]:
    """Variables of the engine itself; those of jobs.toml lie over them."""
    if job.cluster.device_type == "cpu":
        found = cpu_sharing(job.ranks_per_node, os.environ)
    else:
        found = {"OMP_NUM_THREADS": "1"}  # as torchrun has it
    if table.version != "2021":
        # asserted for tensor parallelism: communication is queued before what hides it
        found["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
    if job.training.deterministic and job.cluster.device_type == "cuda":
        # asserted by --deterministic-mode, and asked for by cuBLAS and Transformer Engine
        found["NCCL_ALGO"] = "Ring"
        found["NVTE_ALLOW_NONDETERMINISTIC_ALGO"] = "0"
        found["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    if job.wandb is not None and job.wandb.mode == "offline":
        found["WANDB_MODE"] = "offline"
    return found


class MegatronLm:
    """One process a rank; the job travels as its command line."""

    def problems(self, job: Job) -> list[Problem]:
        """What this version of the engine cannot do. Nothing of its options while the tree is
        still to be cloned: `command` says it then."""
        found = launcher_problems(job)
        try:
            version = version_of(job)
            if version is not None:
                found += argv_problems(job, load_table(ENGINE, version))
        except ConfigError as error:
            found += error.list
        return found

    def command(self, job: Job, run: RunFolder, attempt: int) -> Command:
        table = table_of(job)
        data = data_of(job)
        if table.version != "2021":
            refuse_empty_splits(job, data)
        places = RunPlaces(run.path, f"{run.job_name}-{run.id}", load=_can_load(run))
        words = megatron_argv(job, table, data, places)
        tree = source_tree(job)
        program = EngineProgram(
            engine=ENGINE,
            python=str(engine_python(job)),
            tree=tree,
            argv=("-u", str(tree / "pretrain_gpt.py"), *words),
            env=engine_environment(job, table),
            saves_on_term="--exit-signal-handler" in words,
            modules=_modules(table, words),
            versions=required_versions(source_of(job), ENGINE, table.version),
            reads=_reads(data, words),
        )
        return rank_command(job, run, attempt, program)

    def resume_problems(self, job: Job, run: RunFolder) -> list[Problem]:
        return list(_layout_problems(job, run))

    def before_attempt(self, job: Job, run: RunFolder) -> None:
        """Let the tracker name the newest whole checkpoint: the engine loads what it names, and a
        save that was cut short may be newer. Rows of metrics after it are taken back."""
        _name_whole(run)
        if problems := self.resume_problems(job, run):
            raise ConfigError(problems)
        take_back_metrics(job, run)

    def checkpoints(self, run: RunFolder, *, hashes: bool) -> list[ListedCheckpoint]:
        return listed_checkpoints(ENGINE, run)


def _whole_steps(run: RunFolder) -> dict[int, Path]:
    """The folders of whole checkpoints by their steps."""
    return {
        found.step: found.folder
        for found in reader.found_checkpoints(run.checkpoints)
        if not found.problems
    }


def _can_load(run: RunFolder) -> bool:
    return reader.tracked_step(run.checkpoints) in _whole_steps(run)


def _name_whole(run: RunFolder) -> None:
    tracked = reader.tracked_step(run.checkpoints)
    whole = _whole_steps(run)
    if tracked in whole:
        return
    tracker = run.checkpoints / TRACKER
    if whole:
        write_text(tracker, str(max(whole)))
    else:
        tracker.unlink(missing_ok=True)


def _layout_problems(job: Job, run: RunFolder) -> Iterator[Problem]:
    """That the checkpoint has a file of each tensor- and pipeline-parallel rank (ckpt-format
    torch: mp_rank_TT, mp_rank_TT_PPP) and the job has other degrees."""
    tracked = reader.tracked_step(run.checkpoints)
    folder = _whole_steps(run).get(-1 if tracked is None else tracked)
    if folder is None:
        return
    ranks = [re.fullmatch(r"mp_rank_(\d+)(?:_(\d+))?", each.name) for each in folder.iterdir()]
    degrees = [(int(found[1]), int(found[2] or 0)) for found in ranks if found]
    if not degrees:
        return
    there = (max(tensor for tensor, _ in degrees) + 1, max(stage for _, stage in degrees) + 1)
    p = job.parallelism
    asked = (p.tensor_model_parallel_size, p.pipeline_model_parallel_size)
    if there != asked:
        yield Problem(
            f"{folder} was saved with tensor_model_parallel_size {there[0]} and"
            f" pipeline_model_parallel_size {there[1]}, and the job has {asked[0]} and {asked[1]}",
            hint="resume with the same degrees; ckpt-format 'torch_dist' allows others",
        )


def _modules(table: OptionTable, words: tuple[str, ...]) -> tuple[RequiredModule, ...]:
    names = list(_MODULES)
    if table.version == "2021":
        names += _IN_2021
    elif release(table.version) < (0, 17):
        names += _UNTIL_0_16
    if release(table.version) >= (0, 16):
        names += _SINCE_0_16
    if "torch_dist" in words:
        names += _TORCH_DIST
    if "HuggingFaceTokenizer" in words:
        names.append("transformers")
    found = [
        RequiredModule(
            name, "install it there, or name an interpreter that has it (engines.X.python)"
        )
        for name in names
    ]
    if "--use-distributed-optimizer" in words:
        found.append(_DISTRIBUTED_OPTIMIZER)
    return tuple(found)


def _reads(data: MegatronData, words: tuple[str, ...]) -> tuple[Path, ...]:
    """Files that every node must see."""
    found = [Path(f"{prefix}{end}") for prefix in data.prefixes() for end in (".idx", ".bin")]
    for option in ("--vocab-file", "--merge-file"):
        if option in words:
            found.append(Path(words[words.index(option) + 1]))
    return tuple(found)
