"""engine = "megatron-lm": an unmodified tree of NVIDIA/Megatron-LM, its pretrain_gpt.py beside our
small program on every rank, with torch's variables from the agents instead of torchrun.

Which documents Megatron-LM gives to which split is asked before it starts: one whose split of a
pair holds no document builds its index of samples without end or message (core 0.4 and later).
"""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from trainkit.base.errors import ConfigError, Problem
from trainkit.base.process import cpu_sharing
from trainkit.engines.contract import Command
from trainkit.engines.foreign import EngineProgram, ForeignEngine, rank_command, run_name
from trainkit.engines.imported import ImportedJob, ImportRequest
from trainkit.engines.megatron_lm.argv import (
    RunPlaces,
    argv_problems,
    leaves_muon_blockwise,
    megatron_argv,
)
from trainkit.engines.megatron_lm.data import SPLITS, MegatronData, data_of
from trainkit.engines.megatron_lm.rules import RULES, sharding_obstacle
from trainkit.engines.megatron_lm.words import SET_BY
from trainkit.engines.options import OptionTable, load_table, newest_version, release
from trainkit.engines.own_parser import ASK, CHECKED, PARSED, REFUSAL, OwnParser
from trainkit.engines.rank import megatron_lm as reader
from trainkit.engines.rank.spec import RequiredModule
from trainkit.engines.requirements import required_versions
from trainkit.engines.sources import engine_python, package_version, source_of, source_tree
from trainkit.jobs.schema import Job
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
    ends = [
        round(sum(weights[:number]) / sum(weights) * documents) for number in range(len(SPLITS) + 1)
    ]
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
        f" {pair.prefix}, which has {documents}: Megatron-LM would never finish its index",
        hint=(
            "text without lines of JSON is one document a file; give more documents, a larger"
            f" weight, or 0 for {name}"
        ),
    )


# what each version imports without which it cannot start, or hangs in its first save
_MODULES = ("torch", "numpy")
_UNTIL_0_16 = ("regex", "six")  # of its tokenizers
_SINCE_0_16 = ("triton",)  # imported at the top, used or not
_IN_2021 = ("apex",)
_TORCH_DIST = ("psutil",)  # without it 0.16's writers die and the parent never ends
# else it trains and saves what it cannot load
_DISTRIBUTED_OPTIMIZER = RequiredModule(
    "transformer_engine or apex",
    "without either, the distributed optimizer cannot load its own checkpoints: install one, or set"
    " parallelism.zero_stage = 0",
)


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


PARSER = f"""{REFUSAL}
try:
    from megatron.training import arguments
except ImportError:
    from megatron import arguments
try:
    args = arguments.parse_args()
    print({PARSED!r}, flush=True)
    # that of 2021 validates by itself
    if hasattr(arguments, "validate_args"):
        arguments.validate_args(args, {{"tokenizer_type": "GPT2BPETokenizer"}})
    print({CHECKED!r}, flush=True)
except (AssertionError, ValueError) as error:
    refused(error)
"""
# pretrain_gpt.py knows whether options of others are added to its own
OPTIONS = f"""{ASK}
import pretrain_gpt
from megatron.training import arguments
more = getattr(pretrain_gpt, "has_nvidia_modelopt", False)
arguments.parse_args(pretrain_gpt.add_modelopt_args if more else None)
"""


def _parser_words(job: Job, command: Command, folder: Path) -> Sequence[str]:
    """Those behind the script."""
    argv = command.engine_argv
    script = next(number for number, word in enumerate(argv) if word.endswith(".py"))
    return argv[script + 1 :]


class MegatronLm(ForeignEngine):
    """One process a rank; the job travels as its command line."""

    name = "megatron-lm"
    rules = RULES
    entry_files = ("pretrain_gpt.py",)
    traits = frozenset({"qk_norm", "add_qkv_bias", "activation", "mla", "moe"})
    keeps = "megatron-lm deletes none"
    # megatron/training/checkpointing.py get_checkpoint_tracker_filename
    tracker = "latest_checkpointed_iteration.txt"
    other_degrees = "; ckpt-format 'torch_dist' allows others"
    load_kernels = (
        "from types import SimpleNamespace as N; from megatron.fused_kernels import load;"
        " load(N(rank=0, masked_softmax_fusion=True, gradient_accumulation_fusion=False))"
    )
    parser = OwnParser(
        PARSER,
        _parser_words,
        "megatron-lm's own parser and checks take all {words} words",
        SET_BY,
        OPTIONS,
    )

    def version_in(self, tree: Path) -> str | None:
        """core-MAJOR.MINOR.PATCH of megatron/core/package_info.py; "2021" where there is none
        (before May 2023)."""
        core = tree / "megatron" / "core" / "package_info.py"
        if not core.is_file():
            return "2021" if (tree / "megatron").is_dir() else None
        numbers = package_version(core)
        return "core-" + ".".join(map(str, numbers)) if numbers else None

    def version_at(self, revision: str) -> str | None:
        named = re.fullmatch(r"core_(?:r|v)(\d+\.\d+\.\d+(?:rc\d+)?)", revision)
        return super().version_at(revision) or (f"core-{named[1]}" if named else None)

    def option_problems(self, job: Job, table: OptionTable) -> list[Problem]:
        return argv_problems(job, table)

    def version_notes(self, job: Job, table: OptionTable) -> list[str]:
        """That sequence parallelism is off for TP 1 says every plan."""
        notes = []
        obstacle = sharding_obstacle(job)
        if "use-distributed-optimizer" not in table:
            obstacle = f"Megatron-LM {table.version} has no distributed optimizer"
        if job.parallelism.zero_stage == 1 and job.data_parallel_size == 1 and obstacle:
            notes.append(
                f"parallelism.zero_stage 1 is left out: {obstacle}, and with data-parallel size 1"
                " there is nothing to share"
            )
        if leaves_muon_blockwise(job, table):
            notes.append(
                "--muon-tp-mode duplicated is passed: by default (blockwise) Megatron-LM"
                f" {table.version} updates each tensor-parallel shard alone, and losses follow the"
                " layout. engine_args.muon-tp-mode says another"
            )
        notes += _native_only(job)
        if job.training.log_interval > job.training.train_iters:
            notes.append(
                f"training.log_interval {job.training.log_interval} becomes train_iters"
                f" {job.training.train_iters}: else no line would say what was trained"
            )
        return notes

    def is_its_file(self, path: Path, text: str) -> bool:
        """Any that is no other engine's."""
        return True

    def import_job(self, request: ImportRequest) -> ImportedJob:
        from trainkit.engines.megatron_lm.import_script import import_megatron, read_script

        path = request.only_file(self.name)
        request.refuse_words("a script of Megatron-LM")
        table = load_table(self.name, request.version or newest_version(self.name))
        return import_megatron(read_script(path), request.job_name, table)

    def command(self, job: Job, run: RunFolder, attempt: int) -> Command:
        table = self.table_of(job)
        data = data_of(job)
        if table.version != "2021":
            refuse_empty_splits(job, data)
        can_load = reader.tracked_step(run.checkpoints) in _whole_steps(run)
        places = RunPlaces(run.path, run_name(run), load=can_load)
        words = megatron_argv(job, table, data, places)
        tree = source_tree(job)
        program = EngineProgram(
            engine=self.name,
            python=str(engine_python(job)),
            tree=tree,
            argv=("-u", str(tree / "pretrain_gpt.py"), *words),
            env=engine_environment(job, table),
            saves_on_term="--exit-signal-handler" in words,
            modules=_modules(table, words),
            versions=required_versions(source_of(job), self.name, table.version),
            reads=_reads(data, words),
        )
        return rank_command(job, run, attempt, program)

    def saved_degrees(self, run: RunFolder) -> tuple[Path, Mapping[str, int]] | None:
        """Of ckpt-format torch."""
        tracked = reader.tracked_step(run.checkpoints)
        folder = _whole_steps(run).get(-1 if tracked is None else tracked)
        degrees = None if folder is None else reader.saved_degrees(folder)
        return None if folder is None or degrees is None else (folder, degrees)


def _whole_steps(run: RunFolder) -> dict[int, Path]:
    """The folders of whole checkpoints by their steps."""
    return {
        found.step: found.folder
        for found in reader.found_checkpoints(run.checkpoints)
        if not found.problems
    }


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
    given = (option for option in ("--vocab-file", "--merge-file") if option in words)
    return (*data.pair_files(), *(Path(words[words.index(option) + 1]) for option in given))
