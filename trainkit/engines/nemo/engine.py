"""engine = "nemo": NVIDIA's NeMo as its launchers of 22.09 and 24.12 start it.

The job becomes the composed configuration that the launcher writes, below the run folder, and
megatron_gpt_pretraining.py reads it. launch = "ranks" (the default): trainkit's agents start every
rank, in the image where there is one. launch = "srun": one srun starts all ranks, each in its
image, with the words of the launcher's batch script (`srun .. --container-image .. bash -c "cd ..;
.."`).

Sources: bignlp/core/launchers.py and stages.py of NeMo-Framework-Launcher at 0d03943e, and
nemo_launcher/core of tag 24.12; pyxis's options of srun.
"""

from __future__ import annotations

import re
import shlex
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from trainkit.base.errors import Problem
from trainkit.engines.contract import Command
from trainkit.engines.foreign import EngineProgram, ForeignEngine, rank_command, run_name
from trainkit.engines.hydra_words import Override
from trainkit.engines.imported import ImportedJob, ImportRequest
from trainkit.engines.megatron_lm.data import MegatronData, data_of
from trainkit.engines.nemo.config import (
    Config,
    NemoPlaces,
    added_words,
    config_text,
    nemo_config,
    results_folder,
    with_plain_arguments,
)
from trainkit.engines.nemo.generations import (
    BIGNLP,
    IN_IMAGES,
    NUMA,
    RELEASES,
    NemoGeneration,
    generation_of,
    launcher_folder,
)
from trainkit.engines.nemo.limits import RULES, job_problems
from trainkit.engines.options import OptionTable
from trainkit.engines.rank import nemo as reader
from trainkit.engines.rank.spec import RequiredModule
from trainkit.engines.requirements import required_versions
from trainkit.engines.sources import (
    cluster_python,
    engine_python,
    package_version,
    source_of,
    source_tree,
)
from trainkit.jobs.schema import Job
from trainkit.runs.folder import RunFolder

# variables that the launcher's script has before the command, where it exports others
ON_THE_LINE = ("CUDA_", "NVTE_")


def srun_words(job: Job) -> tuple[str, ...]:
    """srun's own words. The allocation's batch script asked for agents, one a node: the ranks'
    numbers are said here, and that this step lies beside the agents'. One that dies ends all."""
    words = [
        f"--nodes={job.nodes}",
        f"--ntasks={job.world_size}",
        f"--ntasks-per-node={job.ranks_per_node}",
        "--overlap",
        "--kill-on-bad-exit=1",
    ]
    container = job.container
    if container is not None:
        mounts = dict.fromkeys([f"{job.cluster.root}:{job.cluster.root}", *container.mounts])
        words += ["--container-image", container.image]
        words += ["--container-mounts", ",".join(mounts)]
        words += ["--no-container-mount-home", *container.args]
    return (*words, *job.cluster.srun_args)


def rank_script(
    tree: str, numa: Sequence[str], environment: Mapping[str, str], argv: Sequence[str]
) -> str:
    """What each task's bash runs, a statement a line, as the launcher writes it.

    Args:
        tree: NeMo's, in the image.
        numa: numa_mapping.py with its interpreter and words; (): it is not run.
        environment: variables that stand before the command.
        argv: the command.
    """
    lines = [
        f"cd {shlex.quote(tree)}",
        "git rev-parse HEAD",
        f"export PYTHONPATH={shlex.quote(tree)}:${{PYTHONPATH}}",
    ]
    if numa:
        lines.append(shlex.join(numa))
    before = [f"{name}={shlex.quote(value)}" for name, value in environment.items()]
    lines.append(" ".join([*before, shlex.join(argv)]))
    return ";\n".join(lines)


def srun_problems(job: Job) -> Iterator[Problem]:
    """What stands in the way of one srun."""
    use_ranks = 'launch = "ranks", the default, does it'
    if not job.cluster.launcher_traits.pyxis:
        yield Problem(
            f"engines launch = 'srun' on cluster '{job.cluster.name}' (launcher ="
            f" '{job.cluster.launcher}'): there is no srun without Slurm",
            hint=use_ranks,
        )
    container = job.container
    if container is not None and not container.runtime_traits.by_srun:
        yield Problem(
            f"engines launch = 'srun' with containers.{container.name}.runtime ="
            f" '{container.runtime}': srun starts tasks in an image by pyxis",
            hint=use_ranks,
        )
    if job.cluster.secrets:
        yield Problem(
            f"engines launch = 'srun' with secrets ({', '.join(job.cluster.secrets)}): Slurm keeps"
            " the environment of a step where its administrators see it",
            hint=use_ranks,
        )


SCRIPT = Path("examples/nlp/language_modeling/megatron_gpt_pretraining.py")
INSTALL = "use NVIDIA's image, which has it: containers.X"
MODULES = ("torch", "pytorch_lightning", "hydra", "omegaconf", "apex")
MODULES_24 = ("torch", "lightning", "hydra", "omegaconf", "megatron.core", "transformer_engine")
# NeMo's own word for ranks that others start: it takes torch's variables
# (TorchElasticEnvironment). Without it pytorch-lightning 1.7 takes Slurm's where there are as many
# tasks as ranks and starts processes of its own elsewhere; 2.4 takes Slurm's wherever SLURM_NTASKS
# is set, which under agents counts these.
BY_AGENTS = "+cluster_type=BCP"
# after which pytorch-lightning saves and ends by itself, with 0
TIME_LIMITS = ("trainer.max_time", "+exp_manager.max_time_per_run")
# exp_manager: NeMo leaves what it does not find, and takes any of several that it does
SET_ASIDE = "set-aside"


def saves(job: Job) -> bool:
    """Whether its runs write checkpoints."""
    return job.engine_args.get("exp_manager.create_checkpoint_callback") is not False


class Nemo(ForeignEngine):
    """One process a rank, or one srun; the job travels as the launcher's configuration."""

    name = "nemo"
    rules = RULES
    entry_files = (str(SCRIPT), "nemo/package_info.py")
    keeps = "nemo keeps the best, as many as checkpoint.keep_last says, and the last"
    other_degrees = "; NeMo's own scripts change them"

    def version_in(self, tree: Path) -> str | None:
        """The launcher's release that a NeMo (nemo/package_info.py) belongs to; one between two of
        them as "22.09-nemo-1.20.0": the older one's, which it is newer than."""
        numbers = package_version(tree / "nemo" / "package_info.py")
        if numbers is None:
            return None
        launcher = "24.12" if numbers[0] == 2 else "22.09"
        if numbers[:2] in RELEASES:
            return launcher
        return f"{launcher}-nemo-{'.'.join(map(str, numbers))}"

    def version_of(self, job: Job) -> str | None:
        """Also what the tree's place in the image says."""
        source = source_of(job)
        tree = source_tree(job)
        if source.version is None and not tree.is_dir() and str(tree) in IN_IMAGES:
            return IN_IMAGES[str(tree)]
        return super().version_of(job)

    def problems(self, job: Job) -> list[Problem]:
        found = super().problems(job)
        if job.starts_by_srun:
            found += srun_problems(job)
        return found

    def option_problems(self, job: Job, table: OptionTable) -> list[Problem]:
        plain = with_plain_arguments(job, table)
        return list(job_problems(plain, generation_of(table.version), table))

    def version_notes(self, job: Job, table: OptionTable) -> list[str]:
        generation = generation_of(table.version)
        notes = []
        job = with_plain_arguments(job, table)
        if not saves(job):
            notes.append(
                "engine_args 'exp_manager.create_checkpoint_callback' = false: nothing is saved,"
                " and a run that is stopped begins again"
            )
        elif generation.core and job.engine_args.get("trainer.max_time"):
            notes.append(
                "engine_args 'trainer.max_time' counts all attempts of a run together in NeMo of"
                " 24.12 (lightning 2.4 saves its timer): '+exp_manager.max_time_per_run' counts"
                " each"
            )
        elif not generation.saves_on_term and not job.engine_args.get("trainer.max_time"):
            notes.append(
                "NeMo of 22.09 saves nothing when it is asked to stop: engine_args"
                " 'trainer.max_time' = \"DD:HH:MM:SS\" ends it in time, with a checkpoint"
            )
        if job.generate.model_fields_set:
            notes.append("generate has no effect: a run of NeMo ends without a sample")
        return notes

    def is_its_file(self, path: Path, text: str) -> bool:
        """A launcher's folder, or a YAML file with its trainer or its cluster."""
        if path.is_dir():
            return True
        named = re.search(r"^(trainer|cluster_type):", text, re.M)
        return path.suffix in (".yml", ".yaml") and named is not None

    def import_job(self, request: ImportRequest) -> ImportedJob:
        from trainkit.engines.nemo.import_config import import_nemo

        path = request.only_file(self.name)
        return import_nemo(path, request.words, request.name, request.version)

    def command(self, job: Job, run: RunFolder, attempt: int) -> Command:
        table = self.table_of(job)
        job = with_plain_arguments(job, table)
        generation = generation_of(table.version)
        data = data_of(job)
        config = nemo_config(job, generation, data, _places(job, run))
        name = f"{job.name}_hydra.yaml"
        tree = source_tree(job)
        words = config_words(job, run, name)
        program = EngineProgram(
            self.name,
            str(engine_python(job)),
            tree,
            ("-u", str(tree / SCRIPT), *words, BY_AGENTS),
            env=engine_environment(job, generation),
            files={f"launch/{name}": config_text(config)},
            saves_on_term=generation.saves_on_term and saves(job),
            modules=tuple(
                RequiredModule(name, INSTALL)
                for name in (MODULES_24 if generation.core else MODULES)
            ),
            versions=required_versions(source_of(job), self.name, table.version),
            reads=(tree / SCRIPT, *_reads(config, data)),
            checkpoints=checkpoint_folder(run),
            saves=saves(job),
            ends_in_time=any(job.engine_args.get(key) for key in TIME_LIMITS),
            python_path=(str(tree),),
            before=numa_words(job, generation) if job.cluster.device_type == "cuda" else (),
        )
        if job.starts_by_srun:
            return _over_srun(job, run, attempt, program)
        return rank_command(job, run, attempt, program)

    def saved_degrees(self, run: RunFolder) -> tuple[Path, Mapping[str, int]] | None:
        """A distributed one is read by any."""
        whole = _whole(checkpoint_folder(run))
        last = [each for each in whole if each.is_last] or whole
        if not last or last[-1].folder is not None:
            return None
        ranks = list(last[-1].ranks)
        return last[-1].place, {
            "tensor_model_parallel_size": max((rank[0] for rank in ranks if rank), default=0) + 1,
            "pipeline_model_parallel_size": (
                max((rank[1] for rank in ranks if len(rank) > 1), default=0) + 1
            ),
        }

    def ready_folder(self, run: RunFolder) -> None:
        """Leave one checkpoint for NeMo to go on from, the newest whole "-last": of several it
        takes any, of an unfinished one its error."""
        folder = checkpoint_folder(run)
        folder.mkdir(parents=True, exist_ok=True)
        _link(run)
        _link_log(run)
        _leave_one(folder)

    def checkpoint_names(self, run: RunFolder) -> list[str]:
        return reader.finished_names(run.checkpoints)


def config_words(job: Job, run: RunFolder, name: str) -> tuple[str, ...]:
    """The words behind the script."""
    words = [f"--config-path={run.path / 'launch'}", f"--config-name={name}"]
    words += [Override(key, value, "+").word() for key, value in added_words(job).items()]
    return tuple(words)


def _over_srun(job: Job, run: RunFolder, attempt: int, program: EngineProgram) -> Command:
    """srun, once: beside it our small program, on the first node and outside of the image, reads
    what all ranks print. Their environment is Slurm's, as in the launcher's script."""
    argv = [word for word in (program.python, *program.argv) if word != BY_AGENTS]
    numa = (program.python, *program.before) if program.before else ()
    environment = {**program.env, **job.environment}
    line = {name: environment[name] for name in program.env if name.startswith(ON_THE_LINE)}
    script = rank_script(str(program.tree), numa, line, argv)
    host = replace(
        program,
        python=str(cluster_python(job)),
        program="srun",
        tree=run.path,
        argv=(*srun_words(job), "bash", "-c", script),
        # the batch script exports some variables; the tasks need all that this step is given
        env={
            **{name: value for name, value in program.env.items() if name not in line},
            "SLURM_EXPORT_ENV": "ALL",
        },
        saves_on_term=False,  # srun ends its step without grace
        modules=(),
        versions=(),
        reads=program.reads[1:],  # the script is in the image
        python_path=(),
        before=(),
    )
    return replace(rank_command(job, run, attempt, host), spawn="per_run")


def checkpoint_folder(run: RunFolder) -> Path:
    """Where exp_manager saves: explicit_log_dir/checkpoints, and 22.09 looks nowhere else."""
    return results_folder(run.path) / "checkpoints"


def _link(run: RunFolder) -> None:
    """<run>/checkpoints leads there too: who looks for a run's checkpoints finds them."""
    if run.checkpoints.is_dir() and not run.checkpoints.is_symlink():
        if any(run.checkpoints.iterdir()):
            return
        run.checkpoints.rmdir()
    if not run.checkpoints.is_symlink():
        run.checkpoints.symlink_to(checkpoint_folder(run).relative_to(run.path))


def _link_log(run: RunFolder) -> None:
    """joblog.log of the run's folder is what rank 0 prints, under the name that the launcher's
    users look for. Not in results/: exp_manager moves the files that it finds there."""
    number = 1 + max((attempt.number for attempt in run.attempts()), default=0)
    link = run.path / "joblog.log"
    link.unlink(missing_ok=True)
    link.symlink_to(run.attempt(number).log(0).relative_to(run.path))


def engine_environment(job: Job, generation: NemoGeneration) -> dict[str, str]:
    """Variables of the launcher's command line; those of jobs.toml lie over them."""
    found = {"HYDRA_FULL_ERROR": "1", **generation.environment}
    p = job.parallelism
    if p.tensor_model_parallel_size > 1:
        found["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
    if job.cluster.device_type == "cuda":
        if job.ranks_per_node == 8:
            found["CUDA_VISIBLE_DEVICES"] = generation.devices
        elif generation.core and job.cluster.launcher_traits.batch:
            found["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, range(job.ranks_per_node)))
    if generation.core and p.virtual_pipeline_model_parallel_size is not None:
        # conditional_cfgs.py get_ln_sm_margin: 8 from compute capability 9 on
        margin = "8" if job.cluster.device.name.startswith(("h100", "h200", "b200")) else "0"
        found["NVTE_FWD_LAYERNORM_SM_MARGIN"] = margin
        found["NVTE_BWD_LAYERNORM_SM_MARGIN"] = margin
    if job.wandb is not None and job.wandb.mode == "offline":
        found["WANDB_MODE"] = "offline"
    return found


def numa_words(job: Job, generation: NemoGeneration) -> tuple[str, ...]:
    """numa_mapping.py and its words, which 22.09's script runs before each rank; () without."""
    given = {
        key.partition(".")[2]: value
        for key, value in job.engine_args.items()
        if key.startswith("numa_mapping.")
    }
    values = {**NUMA, **given}
    if generation is not BIGNLP or not values["enable"]:
        return ()
    script = launcher_folder(generation) / "bignlp/collections/numa_mapping.py"
    return ("-u", str(script), *(f"{key}={value}" for key, value in values.items()))


def _places(job: Job, run: RunFolder) -> NemoPlaces:
    given = job.engine_args.get("model.data.index_mapping_dir")
    index = None if given else run.path / "index_mapping_dir"
    return NemoPlaces(run.path, run_name(run), _resume_from(run), index)


def _resume_from(run: RunFolder) -> str | None:
    """The checkpoint to go on from where NeMo would find none: the newest whole one that has no
    "-last" in its name, when the last one was damaged or never written."""
    folder = checkpoint_folder(run)
    whole = _whole(folder)
    if not whole or any(each.is_last for each in whole):
        return None
    return str(whole[-1].place)


def _whole(folder: Path) -> list[reader.SavedName]:
    grid = reader.rank_grid(folder)
    return [each for each in reader.saved_names(folder) if not reader.saved_problems(each, grid)]


def _leave_one(folder: Path) -> None:
    whole = {each.name for each in _whole(folder)}
    last = [each for each in reader.saved_names(folder) if each.is_last]
    kept = next((each for each in reversed(last) if each.name in whole), None)
    for each in last:
        if each is kept:
            continue
        superseded = kept is not None and each.step < kept.step and each.name in whole
        for path in _files_of(each, folder):
            if superseded:
                _remove(path)  # as NeMo does when the newer one is saved
            else:
                _set_aside(path, folder)
    # by a marker NeMo knows what it has to remove: only those of nothing go
    there = {each.name for each in reader.saved_names(folder)}
    for marker in folder.glob("*-unfinished"):
        name = marker.name.removesuffix("-unfinished")
        if name not in there and not (folder / name).exists():
            marker.unlink(missing_ok=True)


def _files_of(saved: reader.SavedName, folder: Path) -> list[Path]:
    marker = folder / f"{saved.name}-unfinished"
    found = [*saved.ranks.values()]
    found += [path.with_name(f"{path.name}.tensors") for path in saved.ranks.values()]
    if saved.folder is not None:
        found.append(saved.folder)
    return [path for path in (*found, marker) if path.exists()]


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _set_aside(path: Path, folder: Path) -> None:
    """Out of the folder in which NeMo looks, under the same names."""
    place = folder.parent / SET_ASIDE / path.relative_to(folder)
    place.parent.mkdir(parents=True, exist_ok=True)
    if place.exists():
        _remove(place)
    path.rename(place)


def _reads(config: Config, data: MegatronData) -> tuple[Path, ...]:
    """Files that every node must see."""
    keys = ("model.tokenizer.vocab_file", "model.tokenizer.merge_file")
    return (*data.pair_files(), *(Path(str(config[key])) for key in keys if config[key]))
