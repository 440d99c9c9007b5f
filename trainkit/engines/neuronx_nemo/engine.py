"""engine = "neuronx-nemo": an unmodified tree of aws-neuron/neuronx-nemo-megatron on Trainium.

The agents start `torchrun` once a node, as its scripts do, beside our small program; torchrun
starts the node's ranks.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
from collections.abc import Mapping
from pathlib import Path

from trainkit.base.documents import canonical_json, read_document
from trainkit.base.errors import ConfigError, Problem
from trainkit.base.git import head_commit
from trainkit.engines.compiled import package_folders
from trainkit.engines.contract import Command
from trainkit.engines.foreign import EngineProgram, ForeignEngine, rank_command, run_name
from trainkit.engines.imported import ImportedJob, ImportRequest
from trainkit.engines.megatron_lm.data import MegatronData, data_of
from trainkit.engines.neuronx_nemo.argv import (
    COMPILE_STEPS,
    PORT,
    SCRIPT,
    NeuronxPlaces,
    argv_problems,
    neuronx_argv,
    precision_of,
    saves,
)
from trainkit.engines.neuronx_nemo.generations import (
    RULES,
    ScriptGeneration,
    environment_of,
    generation_of,
)
from trainkit.engines.options import OptionTable
from trainkit.engines.rank import neuronx_nemo as reader
from trainkit.engines.rank.nemo import finished_names
from trainkit.engines.rank.node_setup import NodeSetup
from trainkit.engines.rank.spec import RequiredModule
from trainkit.engines.requirements import required_versions
from trainkit.engines.sources import (
    engine_python,
    engines_root,
    source_of,
    source_tree,
    text_of,
)
from trainkit.jobs.schema import Job
from trainkit.runs.folder import RunFolder

FOLDER = Path("nemo/examples/nlp/language_modeling")  # where the scripts begin
OPEN_FILES = 65535
MAX_DIRTY_MB = 64
# what megatron_gpt_pretraining.py and what it imports need; `nemo` and `apex` are the tree's wheels
MODULES = (
    "torch",
    "torch_xla",
    "torch_neuronx",
    "nemo",
    "apex",
    "pytorch_lightning",
    "hydra",
    "omegaconf",
    "transformers",
)
MEND = (
    "install the tree's wheels and requirements (engines.X.venv), or name the environment of the"
    " Neuron SDK (engines.X.python)"
)
DEVICES = "/dev/neuron[0-9]*"
NO_DEVICE = "this is not a Trainium instance, or aws-neuronx-dkms is not installed (neuron-ls)"


def node_setup(job: Job, generation: ScriptGeneration) -> NodeSetup:
    """What the scripts set on each node, and the devices it must have."""
    several = not job.cluster.launcher_traits.one_machine
    on_device = job.cluster.device_type == "neuron"
    return NodeSetup(
        open_files=OPEN_FILES,
        # the scripts at f4743ce do so under Slurm, those of 2.13.1 always
        reserve_port=several,
        max_dirty_mb=MAX_DIRTY_MB if several and generation.lustre else 0,
        devices=DEVICES if on_device else "",
        mend=NO_DEVICE,
    )


class NeuronxNemo(ForeignEngine):
    """One torchrun a node; the job travels as its command line."""

    name = "neuronx-nemo"
    rules = RULES
    entry_files = ("build.sh", str(FOLDER / SCRIPT))
    keeps = "neuronx-nemo keeps the newest, as many as checkpoint.keep_last says"
    devices = ("cpu", "neuron")
    compiles = True
    wheels = ("nemo", "apex")

    def version_in(self, tree: Path) -> str | None:
        """Its scripts tell: train_setup.sh came with the second generation of them."""
        if (tree / FOLDER / "train_setup.sh").is_file():
            return "2.21"
        if "--distribution-strategy=nemo" in text_of(tree / FOLDER / "test.sh"):
            return "2.13.1"
        return None

    def version_at(self, revision: str) -> str | None:
        named = re.fullmatch(r"(\d+(?:\.\d+)+)_release", revision)
        return super().version_at(revision) or (named[1] if named else None)

    def option_problems(self, job: Job, table: OptionTable) -> list[Problem]:
        return argv_problems(job, generation_of(table.version), table)

    def version_notes(self, job: Job, table: OptionTable) -> list[str]:
        notes = []
        if not job.precompile and not saves(job, generation_of(table.version)):
            notes.append(
                "this run writes no checkpoint, as the scripts have it: it cannot be resumed;"
                ' engine_args."exp_manager.create_checkpoint_callback" = true writes some'
            )
        if job.checkpoint.keep_every is not None:
            notes.append("checkpoint.keep_every has no effect: the engine keeps the newest")
        if job.generate.model_fields_set:
            notes.append("generate has no effect: a run of neuronx-nemo ends without a sample")
        return notes

    def helper_folders(self, tree: Path, python: str) -> list[Path]:
        """In the package that its interpreter imports, where `compile_helper()` of nemo's
        dataset_utils runs make."""
        below = "collections/nlp/data/language_modeling/megatron"
        return [folder / below for folder in package_folders(python, "nemo")]

    def is_its_file(self, path: Path, text: str) -> bool:
        """A script that runs NeMo's, itself or by those that it calls."""
        from trainkit.engines.neuronx_nemo.import_script import read_scripts

        with contextlib.suppress(ConfigError):  # reading it says why
            script = not path.is_dir() and path.suffix not in (".yml", ".yaml")
            return script and SCRIPT in read_scripts(path)
        return False

    def import_job(self, request: ImportRequest) -> ImportedJob:
        from trainkit.engines.neuronx_nemo.import_script import import_neuronx

        path = request.only_file(self.name)
        return import_neuronx(path, request.words, request.job_name, request.version)

    def compiled_nodes(self, job: Job) -> int | None:
        """As it is now: 0 where its tree or its data are not there yet."""
        try:
            table = self.table_of(job)
            generation = generation_of(table.version)
            places = NeuronxPlaces(Path(), Path(), "")
            argv = neuronx_argv(job, generation, table, data_of(job), places)
        except ConfigError:
            return 0
        folder = graphs_folder(job, graphs_key(job, generation, argv))
        return sum(_is_compiled(folder / f"{node}.json") for node in range(job.nodes))

    def command(self, job: Job, run: RunFolder, attempt: int) -> Command:
        table = self.table_of(job)
        generation = generation_of(table.version)
        data = data_of(job)
        places = NeuronxPlaces(
            run.path / "nemo",
            run.checkpoints,
            run_name(run),
            reader.newest_whole(run.checkpoints),
        )
        argv: tuple[str, ...] = neuronx_argv(job, generation, table, data, places)
        program = "torchrun"
        if job.precompile:
            argv = (program, *argv)
            program = "neuron_parallel_compile"
        tree = source_tree(job)
        precision = precision_of(job, generation)
        env = environment_of(generation, precision, compiling=job.precompile)
        key = graphs_key(job, generation, argv)
        whole = EngineProgram(
            engine=self.name,
            python=str(engine_python(job)),
            tree=tree / FOLDER,
            argv=argv,
            env={**env, "NEMO_EXPM_VERSION": run.id},
            modules=tuple(RequiredModule(name, MEND) for name in MODULES),
            reads=_reads(job, data),
            versions=required_versions(source_of(job), self.name, table.version),
            program=program,
            port=PORT,
            node=node_setup(job, generation),
            saves=saves(job, generation),
            compiled=str(graphs_folder(job, key) / "${NODE_RANK}.json") if job.precompile else "",
            compiled_for=key,
        )
        return rank_command(_as_run(job), run, attempt, whole)

    def saved_degrees(self, run: RunFolder) -> tuple[Path, Mapping[str, int]] | None:
        newest = reader.newest_whole(run.checkpoints)
        grid = reader.grid(run.checkpoints)
        if newest is None or not grid:
            return None
        tensor, stages = (*grid, 1)[:2]
        return newest, {
            "tensor_model_parallel_size": tensor,
            "pipeline_model_parallel_size": stages,
        }

    def checkpoint_names(self, run: RunFolder) -> list[str]:
        return finished_names(run.checkpoints)


def _as_run(job: Job) -> Job:
    """The job with the steps that it makes."""
    if not job.precompile:
        return job
    training = job.training.model_copy(update={"train_iters": COMPILE_STEPS})
    return job.model_copy(update={"training": training})


def graphs_key(job: Job, generation: ScriptGeneration, argv: tuple[str, ...]) -> str:
    """Names the graphs of a job: equal for the same tree, interpreter, model, batch, layout,
    precision and flags of the compiler, wherever the run writes and whatever it is called."""
    of_places = ("exp_manager.", "trainer.max_steps=", "trainer.val_check_interval=")
    words = [
        word
        for word in argv
        if not word.lstrip("+").startswith((*of_places, "model.resume_from_checkpoint="))
        and word not in ("torchrun", "neuron_parallel_compile")
    ]
    env = environment_of(generation, precision_of(job, generation), compiling=False)
    tree = source_tree(job)
    parts = [words, {**env, **job.environment}, str(engine_python(job)), head_commit(tree)]
    return hashlib.sha256(canonical_json(parts).encode()).hexdigest()[:16]


def graphs_folder(job: Job, key: str) -> Path:
    """<root>/engines/graphs/KEY: a file of each node whose graphs were compiled."""
    return engines_root(job) / "graphs" / key


def _is_compiled(record: Path) -> bool:
    """Whether a node has said that its graphs are compiled, and its cache, as far as it is seen
    from here, still has any: a node's own disk is not."""
    try:
        cache = str(read_document(record, "compiled-graphs/1").get("cache", ""))
    except ConfigError:
        return False
    if not cache.startswith("/") or not Path(cache).parent.is_dir():
        return True
    return any(Path(cache).rglob("MODULE_*"))


def _reads(job: Job, data: MegatronData) -> tuple[Path, ...]:
    """Files that every node must see."""
    tokenizer = job.dataset.tokenizer
    files = (tokenizer.vocab_file, tokenizer.merge_file) if tokenizer is not None else ()
    return (*data.pair_files(), *(Path(each) for each in files if each))
