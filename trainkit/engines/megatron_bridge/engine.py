"""engine = "megatron-bridge": an unmodified tree of NVIDIA-NeMo/Megatron-Bridge with its submodule
3rdparty/Megatron-LM, its own scripts/training/run_recipe.py on every rank with torch's variables
from the agents instead of torchrun.

Samples, lines of its log and the folders of its checkpoints are Megatron-LM's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from trainkit.base.errors import Problem
from trainkit.base.files import write_text
from trainkit.engines.contract import Command
from trainkit.engines.foreign import EngineProgram, ForeignEngine, rank_command, run_name
from trainkit.engines.imported import ImportedJob, ImportRequest
from trainkit.engines.megatron_bridge.own_parser import OPTIONS, PARSER
from trainkit.engines.megatron_bridge.words import (
    MIXED,
    RECIPE,
    Places,
    bridge_words,
    word_problems,
)
from trainkit.engines.megatron_lm.data import data_of
from trainkit.engines.megatron_lm.engine import (
    engine_environment,
    refuse_empty_splits,
)
from trainkit.engines.megatron_lm.rules import RULES as MEGATRON_RULES
from trainkit.engines.options import OptionTable, load_table, newest_version, release
from trainkit.engines.own_parser import OwnParser
from trainkit.engines.rank import megatron_bridge as reader
from trainkit.engines.rank.megatron_lm import TRACKER
from trainkit.engines.rank.spec import RequiredModule
from trainkit.engines.requirements import required_versions
from trainkit.engines.sources import engine_python, package_version, source_of, source_tree
from trainkit.jobs.schema import Job
from trainkit.runs.folder import RunFolder
from trainkit.train.huggingface.folder import CONFIG
from trainkit.train.huggingface.hub import weights_folder

CORE = "3rdparty/Megatron-LM"
SCRIPT = "scripts/training/run_recipe.py"
INSTALL = "its container nvcr.io/nvidia/nemo has it; else install it for engines.X.python"
MODULES = tuple(
    RequiredModule(name, INSTALL)
    for name in (
        "torch",
        "transformer_engine",
        "nvidia_resiliency_ext",
        "modelopt",
        "transformers",
        "omegaconf",
        "hydra",
        "diffusers",
        "megatron.energon",
    )
)
OLDEST = (0, 6)  # whose run_recipe.py takes these words
RULES = replace(MEGATRON_RULES, engine="megatron-bridge", deletes_old=True, memory_band=None)


def _parser_words(job: Job, command: Command, folder: Path) -> Sequence[str]:
    """Those behind the script, and where its dry run writes."""
    argv = command.engine_argv
    script = next(number for number, word in enumerate(argv) if word.endswith(".py"))
    return (*argv[script + 1 :], f"logger.save_config_filepath={folder / 'config.yaml'}")


class MegatronBridge(ForeignEngine):
    """One process a rank."""

    name = "megatron-bridge"
    rules = RULES
    entry_files = (SCRIPT, "src/megatron/bridge/package_info.py", f"{CORE}/pretrain_gpt.py")
    keeps = "megatron-bridge keeps the newest, as many as checkpoint.keep_last says"
    traits = frozenset({"qk_norm", "add_qkv_bias", "activation"})
    submodules = (CORE,)
    parser = OwnParser(
        PARSER, _parser_words, "megatron-bridge's own dry run takes all {words} words", {}, OPTIONS
    )

    def version_in(self, tree: Path) -> str | None:
        numbers = package_version(tree / "src" / "megatron" / "bridge" / "package_info.py")
        return ".".join(map(str, numbers)) if numbers else None

    def megatron_table(self, job: Job) -> OptionTable:
        """The options of the Megatron-LM that the tree has as a submodule; the newest where it is
        not here."""
        info = Path(CORE) / "megatron" / "core" / "package_info.py"
        numbers = package_version(source_tree(job) / info) if job.engine_source else None
        version = ".".join(map(str, numbers)) if numbers else newest_version("megatron-lm")
        return load_table("megatron-lm", f"core-{version.removeprefix('core-')}")

    def option_problems(self, job: Job, table: OptionTable) -> list[Problem]:
        found = word_problems(job, table, self.megatron_table(job))
        version = self.version_of(job) if job.engine_source else None
        if version is not None and release(version)[:2] < OLDEST:
            found.append(
                Problem(
                    f"Megatron-Bridge {version}: this version of trainkit writes the words of 0.6"
                    " and later",
                    hint=f"give engines.{source_of(job).name}.source a newer tree",
                )
            )
        return found

    def version_notes(self, job: Job, table: OptionTable) -> list[str]:
        found = []
        if job.generate.model_fields_set:
            found.append("generate has no effect: a run of Megatron-Bridge ends without a sample")
        if RECIPE in job.engine_args and MIXED not in job.engine_args:
            found.append(
                f"mixed_precision is that of {job.engine_args[RECIPE]} where training.precision is"
                f" bf16: engine_args.{MIXED} says another"
            )
        return found

    def is_its_file(self, path: Path, text: str) -> bool:
        """A script that runs one of its recipes, or its tree."""
        return "run_recipe.py" in text or (path / SCRIPT).is_file()

    def import_job(self, request: ImportRequest) -> ImportedJob:
        from trainkit.engines.megatron_bridge.import_recipe import import_recipe

        table = load_table(self.name, request.version or newest_version(self.name))
        megatron = load_table("megatron-lm", newest_version("megatron-lm"))
        return import_recipe(request, table, megatron)

    def ready_folder(self, run: RunFolder) -> None:
        """Without a tracker it would begin again (training/utils/checkpoint_utils.py,
        checkpoint_exists), whatever step it is given."""
        self.put_aside(run)
        step = reader.tracked_step(run.checkpoints)
        if step is not None:
            write_text(run.checkpoints / TRACKER, str(step))

    def helper_folders(self, tree: Path, python: str) -> list[Path]:
        return [tree / CORE / "megatron/core/datasets"]

    def command(self, job: Job, run: RunFolder, attempt: int) -> Command:
        table = self.table_of(job)
        data = data_of(job)
        refuse_empty_splits(job, data)
        step = reader.tracked_step(run.checkpoints)
        weights = weights_folder(job) if job.init_from and step is None else None
        places = Places(run.path, run_name(run), step is not None, step, weights)
        megatron = self.megatron_table(job)
        tree = source_tree(job)
        program = EngineProgram(
            self.name,
            str(engine_python(job)),
            tree,
            ("-u", str(tree / SCRIPT), *bridge_words(job, table, megatron, data, places)),
            env=engine_environment(job, megatron),
            saves_on_term=True,
            modules=MODULES,
            versions=required_versions(source_of(job), self.name, table.version),
            reads=(*data.pair_files(), *([weights / CONFIG] if weights else [])),
            python_path=(str(tree / "src"), str(tree / CORE)),
        )
        return rank_command(job, run, attempt, program)
