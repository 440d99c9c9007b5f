"""engine = "gpt-neox": EleutherAI's GPT-NeoX, its tree as it is.

launch = "ranks" (the default): trainkit's agents start train.py on every rank with the words that
deepy.py would give it. launch = "deepspeed": deepy.py itself is started once, and its launcher
logs in to the other nodes.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from trainkit.base.errors import ConfigError, Problem
from trainkit.base.process import cpu_sharing, on_this_node
from trainkit.engines.compiled import extensions_folder
from trainkit.engines.contract import Command
from trainkit.engines.extract_options import read_tree
from trainkit.engines.foreign import EngineProgram, ForeignEngine, rank_command
from trainkit.engines.gpt_neox.arguments import encoded_words
from trainkit.engines.gpt_neox.config import (
    SAID_BY_THE_JOB,
    Config,
    NeoxData,
    neox_config,
    neox_data,
    yaml_text,
)
from trainkit.engines.gpt_neox.limits import FUSIONS, RULES, deepspeed_problems, job_problems
from trainkit.engines.imported import ImportedJob, ImportRequest
from trainkit.engines.options import OptionTable, check_engine_args, load_table, newest_version
from trainkit.engines.own_parser import CHECKED, REFUSAL, OwnParser
from trainkit.engines.rank import gpt_neox as reader
from trainkit.engines.rank.spec import RequiredModule
from trainkit.engines.requirements import required_versions
from trainkit.engines.shell_words import command_of
from trainkit.engines.sources import engine_python, source_of, source_tree, text_of
from trainkit.jobs.schema import Job
from trainkit.runs.folder import RunFolder
from trainkit.runs.world import HOSTFILE

LAUNCHER = "deepy.py"
YAML = (".yml", ".yaml")
INSTALL = "`pip install -r requirements/requirements.txt` of its tree, or engines.X.venv"
MODULES = (
    RequiredModule("torch", "install a build of torch for this machine"),
    RequiredModule("deepspeed", INSTALL),
    RequiredModule("transformers", f"{INSTALL} (4.38)"),
    RequiredModule("pybind11", f"{INSTALL}: `make` builds its dataset helper with it"),
)
# of arguments.py at ea7aefd; setuptools no longer has it
PKG_RESOURCES = RequiredModule("pkg_resources", "`pip install 'setuptools<81'`")
APEX = RequiredModule(
    "apex",
    "build it there, or leave engine_args.layernorm_fusion and rmsnorm_fusion out; trees of"
    " January to September 2024 import it all the same",
)
ARGUMENTS = "megatron/neox_arguments/arguments.py"
NORMS = "megatron/model/norms.py"
# keys that its checkpoints hold too: AnnealingLR.load_state_dict ends the run where one differs
SCHEDULE = ("min_lr", "warmup", "lr_decay_iters", "lr_decay_style")
DEEPSPEED_ENV = "launch/deepspeed_env"


# of 1.0, whose DeeperSpeed is its own of 2021; README, "Versions"
_NEOX_1_DEEPSPEED = re.compile(
    r"git\+git://github\.com/EleutherAI/DeeperSpeed|DeeperSpeed\.git@eb7f5cff3667"
)
PARSER = f"""{REFUSAL}
from megatron.neox_arguments import NeoXArgs
# it would write into the run's folder
NeoXArgs.enable_logging = lambda self: None
try:
    NeoXArgs.from_ymls([sys.argv[1]], overwrite_values={{"global_num_gpus": int(sys.argv[2])}})
    print({CHECKED!r}, flush=True)
except (AssertionError, ValueError) as error:
    refused(error)
"""


def _parser_words(job: Job, command: Command, folder: Path) -> Sequence[str]:
    """The configuration, and how many ranks there are."""
    config = folder / f"{job.name}.yml"
    config.write_text(command.files[f"launch/{config.name}"])
    return str(config), str(job.world_size)


def _files_of(script: Path, caller: Mapping[str, str]) -> tuple[list[Path], list[str]]:
    """The YAML files that a script gives to deepy.py, below its folder or one above, and what else
    it says. Raises ConfigError where it runs no deepy.py, or a file is not there."""
    command = command_of(script, LAUNCHER, caller)
    folder = Path()
    names = []
    words = iter(command.words)
    for word in words:
        if word in ("-d", "--conf_dir"):
            folder = Path(next(words, ""))
        elif not word.startswith("-") and not word.endswith(".py"):
            name = folder / word
            names.append(name if name.suffix in YAML else name.with_name(f"{name.name}.yml"))
    above = script.absolute().parents
    base = next((each for each in above if all((each / n).is_file() for n in names)), None)
    if base is None or not names:
        raise ConfigError(
            f"{script} gives {LAUNCHER} {', '.join(map(str, names)) or 'no file'}, which"
            f" {'is' if len(names) < 2 else 'are'} not below {script.absolute().parent}",
            hint="name the YAML files themselves: invoke import A.yml,B.yml",
        )
    left = [*command.notes, *(f"{each}: its value is not in the file" for each in command.unknown)]
    left += [f"export {name}: set it in env, or in clusters.X.env" for name in command.environment]
    return [base / name for name in names], left


class GptNeox(ForeignEngine):
    """GPT-NeoX over DeepSpeed."""

    name = "gpt-neox"
    rules = RULES
    entry_files = ("train.py", "deepy.py")
    keeps = "gpt-neox keeps the newest, as many as checkpoint.keep_last says"
    tracker = "latest"  # deepspeed/runtime/engine.py save_checkpoint
    tracks = "global_step{step}"
    load_kernels = "from megatron.fused_kernels import load; load()"
    parser = OwnParser(
        PARSER, _parser_words, "gpt-neox's own parser takes the configuration", SAID_BY_THE_JOB
    )

    def version_in(self, tree: Path) -> str | None:
        """CITATION.cff's version since October 2023; it was 0.0.1 before, whatever the tree: there
        the DeepSpeed that it requires tells 1.0 from 2.0."""
        said = re.search(
            r'^version:\s*"?([0-9][0-9.]*)"?\s*$', text_of(tree / "CITATION.cff"), re.M
        )
        if said and said[1] != "0.0.1":
            return said[1]
        required = [
            line
            for line in text_of(tree / "requirements" / "requirements.txt").splitlines()
            if "deepspeed" in line.lower()
        ]
        if not required:
            return None
        if any(_NEOX_1_DEEPSPEED.search(line) for line in required):
            return "1.0.0"
        return "2.0.0"

    def known_table(self, job: Job) -> OptionTable:
        """With their defaults: as its tree has them where it is here, else from the nearest
        table."""
        source = source_of(job)
        version = source.version
        tree = source_tree(job)
        if version is None and tree.is_dir():
            version = self.version_of_tree(tree)
            with contextlib.suppress(OSError, SyntaxError, ValueError):
                return read_tree(tree, version, "")
        if version is None:  # not cloned yet
            version = self.version_at(source.revision or "") or newest_version(self.name)
        return load_table(self.name, version)

    def option_problems(self, job: Job, table: OptionTable) -> list[Problem]:
        problems = check_engine_args(job, table, SAID_BY_THE_JOB)
        found = list(job_problems(job))
        problems += found
        if source_of(job).launch == "deepspeed":
            problems += deepspeed_problems(job)
        if found:
            return problems  # the configuration cannot be made
        nowhere = RunFolder(job.cluster.root_folder / "runs" / "job" / "run")
        config = neox_config(job, nowhere, NeoxData("data", job.dataset.split, {}))
        problems += [
            Problem(
                f"{SAID_BY_THE_JOB[name]}: gpt-neox {table.version} has no option '{name}', which"
                " would say it",
                hint="use a newer revision of gpt-neox",
            )
            for name in config
            if name not in table and name in SAID_BY_THE_JOB
        ]
        return problems

    def notes(self, job: Job) -> list[str]:
        training = job.training
        if training.eval_interval and training.eval_iters and job.gradient_accumulation_steps > 1:
            # megatron/data/data_utils.py: start_iter_val counts micro-batches of training
            return [
                "after a resume gpt-neox evaluates on other samples of the validation set: compare"
                " its training losses with those of a run that was never stopped, not these"
            ]
        return []

    def needs_kernels(self, job: Job) -> bool:
        given = {name.replace("-", "_"): value for name, value in job.engine_args.items()}
        return any(given.get(name) is True for name in FUSIONS)

    def is_its_file(self, path: Path, text: str) -> bool:
        return path.suffix in YAML or LAUNCHER in text

    def import_job(self, request: ImportRequest) -> ImportedJob:
        from trainkit.engines.gpt_neox.import_yaml import import_neox

        path = request.paths[0]
        if path.suffix in YAML:
            request.refuse_words("GPT-NeoX's files")
            return import_neox(request.paths, request.job_name, request.version)
        caller = dict(word.split("=", 1) for word in request.words)
        paths, not_taken = _files_of(request.only_file("GPT-NeoX's script"), caller)
        found = import_neox(paths, request.job_name, request.version)
        return replace(found, not_taken=(*found.not_taken, *not_taken))

    def command(self, job: Job, run: RunFolder, attempt: int) -> Command:
        table = self.known_table(job)
        data = neox_data(job)
        config = attempt_config(job, run, data)
        over_deepspeed = source_of(job).launch == "deepspeed"
        if over_deepspeed:
            config |= _hosts(job, run)
        name = f"{job.name}.yml"
        text = yaml_text(config)
        program = EngineProgram(
            self.name,
            str(engine_python(job)),
            source_tree(job),
            (),
            env=engine_environment(job),
            files={f"launch/{name}": text},
            modules=_modules(job, config),
            versions=required_versions(source_of(job), self.name, table.version),
            reads=_reads(config),
        )
        if over_deepspeed:
            return _over_deepspeed(job, run, attempt, program)
        words = encoded_words(config, table, {name: text}, plain=takes_json(job, table))
        argv = ("train.py", "--local_rank=${LOCAL_RANK}", *words)
        return rank_command(job, run, attempt, replace(program, argv=argv))

    def resume_problems(self, job: Job, run: RunFolder) -> list[Problem]:
        return _layout_problems(job, run)


def takes_json(job: Job, table: OptionTable) -> bool:
    """Whether its train.py takes both words as plain JSON, as until March 2023 (e897c23e)."""
    text = text_of(source_tree(job) / ARGUMENTS)
    return "b64decode" not in text if text else table.version == "1.0.0"


def attempt_config(job: Job, run: RunFolder, data: NeoxData) -> Config:
    """The content of an attempt's YAML file: that of the job, and what going on needs.

    `load` of engine_args is where a run begins; it goes on from its own checkpoints. Raises
    ConfigError where there is no checkpoint in that folder: GPT-NeoX would begin with random
    weights and say so in one line.
    """
    config = neox_config(job, run, data)
    before = saved_config(run)
    if before is None:
        _refuse_empty(config, run)
        return config
    config["load"] = str(run.checkpoints)
    config["finetune"] = False
    changed = [name for name in SCHEDULE if before.get(name) != config.get(name)]
    if changed and not config.get("use_checkpoint_lr_scheduler"):
        config["override_lr_scheduler"] = True
    return config


def _refuse_empty(config: Config, run: RunFolder) -> None:
    folder = Path(str(config["load"]))
    if folder == run.checkpoints:
        return
    if not (folder / "latest").is_file():
        raise ConfigError(
            f"engine_args.load = '{folder}' holds no checkpoint of gpt-neox (no file `latest`): it"
            " would begin with random weights",
            hint="give the folder that holds `latest` and global_step<N>",
        )


def saved_config(run: RunFolder) -> dict[str, object] | None:
    """The configuration that the run's newest checkpoint was made with; {} where it cannot be
    read, None where there is no checkpoint."""
    step = reader.tracked_step(run.checkpoints)
    if step is None:
        return None
    folder = run.checkpoints / f"global_step{step}" / "configs"
    for path in sorted(folder.glob("*.yml")):
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            continue
        if isinstance(found, dict):
            return found
    return {}


def _layout_problems(job: Job, run: RunFolder) -> list[Problem]:
    """Why the run cannot go on as `job` says: its newest checkpoint is laid out otherwise."""
    before = saved_config(run)
    if not before:
        return []
    p = job.parallelism
    keys = {
        "model_parallel_size": "tensor_model_parallel_size",
        "pipe_parallel_size": "pipeline_model_parallel_size",
    }
    problems = [
        Problem(
            f"parallelism.{key} = {getattr(p, key)}: the run's checkpoint was written with"
            f" {before[name]}, and gpt-neox reads it with the same only",
            hint=f"--set parallelism.{key}={before[name]}, or start a new run",
        )
        for name, key in keys.items()
        if before.get(name) not in (None, 0, getattr(p, key))
    ]
    if not problems and p.zero_stage and _data_ranks(before) != job.data_parallel_size:
        problems.append(
            Problem(
                f"nodes = {job.nodes}: the run's checkpoint was written by {_data_ranks(before)}"
                f" data-parallel ranks, and ZeRO's shards are read by as many only, not by"
                f" {job.data_parallel_size}",
                hint="go on with as many ranks as before, or start a new run",
            )
        )
    return problems


def _data_ranks(config: Mapping[str, object]) -> int:
    ranks, tensor, pipe = (
        int(str(config.get(name, 1)))
        for name in ("global_num_gpus", "model_parallel_size", "pipe_parallel_size")
    )
    return ranks // (max(1, tensor) * max(1, pipe))


def engine_environment(job: Job) -> dict[str, str]:
    """Variables that GPT-NeoX needs beyond the job's own."""
    found = {
        "PYTHONUNBUFFERED": "1",  # as DeepSpeed's launcher has it by -u
        "TORCH_EXTENSIONS_DIR": str(extensions_folder(job)),
    }
    if job.cluster.device_type == "cpu":
        found |= {"DS_ACCELERATOR": "cpu", **cpu_sharing(job.ranks_per_node, os.environ)}
    if job.wandb is not None and job.wandb.mode == "offline":
        found["WANDB_MODE"] = "offline"
    return found


def _modules(job: Job, config: Config) -> tuple[RequiredModule, ...]:
    found = list(MODULES)
    if "pkg_resources" in text_of(source_tree(job) / ARGUMENTS):
        found.append(PKG_RESOURCES)
    fused = config.get("layernorm_fusion") or config.get("rmsnorm_fusion")
    if fused or "\nfrom .fused_layer_norm import" in text_of(source_tree(job) / NORMS):
        found.append(APEX)
    return tuple(found)


def _reads(config: Config) -> tuple[Path, ...]:
    """The files that every node must see."""
    files = [Path(str(config[key])) for key in ("vocab_file", "merge_file") if config.get(key)]
    prefixes: list[object] = [config["data_path"]] if "data_path" in config else []
    for split in ("train", "valid", "test"):
        paths = config.get(f"{split}_data_paths", [])
        assert isinstance(paths, list)
        prefixes += paths
    return (*files, *(Path(f"{prefix}{end}") for prefix in prefixes for end in (".bin", ".idx")))


def _hosts(job: Job, run: RunFolder) -> Config:
    """Where DeepSpeed's launcher starts ranks: on the hosts of the run's own hostfile, or here,
    without looking at /job/hostfile and without ssh."""
    if job.cluster.launcher_traits.one_machine:
        return {"hostfile": os.devnull, "num_gpus": job.ranks_per_node}
    return {"hostfile": str(run.path / HOSTFILE)}


def _over_deepspeed(job: Job, run: RunFolder, attempt: int, program: EngineProgram) -> Command:
    """deepy.py, once: the hostfile is the world's, the variables that the other nodes need are a
    file that DS_ENV_FILE names, and no key of W&B is looked for in ~/.netrc, since it would stand
    on pdsh's command line."""
    argv = ("deepy.py", "train.py", str(run.path / "launch" / f"{job.name}.yml"))
    exported = {**on_this_node(program.env), **job.environment}
    folder = os.path.dirname(program.python)
    if folder:
        exported["PATH"] = f"{folder}:{exported.get('PATH', '$PATH')}"
    lines = [f"{name}={value}\n" for name, value in exported.items()]
    env = {**program.env, "DS_ENV_FILE": str(run.path / DEEPSPEED_ENV), "NETRC": os.devnull}
    files = {**program.files, DEEPSPEED_ENV: "".join(lines)}
    whole = replace(program, argv=argv, env=env, files=files)
    return replace(rank_command(job, run, attempt, whole), spawn="per_run")
