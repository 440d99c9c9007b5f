"""A job from a script of neuronx-nemo-megatron: gpt_SIZE.sh with the files that it calls, or a
command line with torchrun and megatron_gpt_pretraining.py. Nothing of it is run.

What of the scripts only Slurm says is the number of nodes: it is one, or the fewest that hold the
model, and the batch is written so that it follows the nodes, as theirs does.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from trainkit.base.errors import ConfigError
from trainkit.engines.hydra_words import Override, read_override
from trainkit.engines.imported import ImportedJob
from trainkit.engines.nemo_values import (
    Dialect,
    NemoValues,
    taken_data,
    taken_job,
    taken_model,
    taken_parallelism,
    taken_rest,
    taken_training,
)
from trainkit.engines.neuronx_nemo.argv import SCRIPT
from trainkit.engines.neuronx_nemo.generations import (
    ENGINE,
    PRECISION_KEY,
    PRECISIONS,
    ScriptGeneration,
    environment_of,
    generation_of,
)
from trainkit.engines.neuronx_nemo.words import SET_BY
from trainkit.engines.options import load_table
from trainkit.engines.shell_words import ShellCommand, find_command

CORES = 32
_CONFIGS = ("megatron_gpt_config", "megatron_gpt_config.yaml")
_HOME = "${node:HOME}"
_KINDS = ("tensor", "pipeline")
LARGEST = 2**20  # bytes of a script
_CALLS = re.compile(r"^[ \t]*(?:(?:source|\.|bash|sh)[ \t]+)?(?:\./)?([\w.-]+\.sh)[ \t]*$", re.M)
# variables that the scripts alone read, or that the agents set on each node
_SCRIPTS_OWN = {
    "SEQ_LENGTH", "HS", "TP", "PP", "N_LAYERS", "N_AH", "UBS", "GBS", "GBS_MULTIPLE",
    "LEARNING_RATE", "ACT_CHKPNT_GRANULARITY", "TRAIN_ITERS", "FFN_HS", "DISTRIBUTED_ARGS",
    "PROCESSES_PER_NODE", "MASTER_ADDR", "MASTER_PORT", "EXPLICIT_LOGDIR", "NEMO_EXPM_VERSION",
    "OPTIM_NAME", "megatron_amp_O2", "wrap_with_zero", "zero_use_master_weight",
    "CREATE_TB_LOGGER", "CHECKPOINT_CALLBACK", "COMPILE", "NODEID", "NTASKS", "HOSTS",
    "NEURON_PARALLEL_COMPILE_DUMP_RESULTS", "CCOM_SOCKET_IFNAME",
}  # fmt: skip
# what trainkit's command says of keys that are not keys of jobs.toml
_USUAL: Mapping[str, object] = {
    "trainer.precision": 32,
    "model.data.num_workers": 1,
    "model.optim.capturable": True,
    "model.use_cpu_initialization": True,
    "exp_manager.create_tensorboard_logger": True,
    "exp_manager.resume_ignore_no_checkpoint": False,
    "exp_manager.resume_if_exists": False,
    "exp_manager.checkpoint_callback_params.train_time_interval": 3600,
    "model.resume_from_checkpoint": None,
}
_RECOMPUTE = {"full": ("uniform", 1), "selective": ("uniform", 1)}


def import_neuronx(path: Path, given: Sequence[str], name: str, version: str) -> ImportedJob:
    """The job that a script stands for.

    Args:
        path: of the script.
        given: NAME=VALUE, variables of its caller: SLURM_NNODES=4.
        name: what the job is to be called.
        version: whose scripts they are; "": as they say.

    Raises ConfigError: it cannot be read, runs nothing of NeMo, or lacks what every job has.
    """
    text = read_scripts(path)
    variables = _variables(given)
    nodes = variables.get("SLURM_NNODES", variables.get("SLURM_NTASKS", ""))
    command = _found(text, variables, nodes or "1")
    values = _values(command, version)
    fewest = _fewest(values)
    if not nodes and fewest > 1:
        values = _values(_found(text, variables, str(fewest)), version)
    if not nodes:
        values.left.append(
            f"nodes: the scripts take them from Slurm (sbatch --nodes N): here {fewest}, and the"
            " batch follows them; or import FILE,SLURM_NNODES=N"
        )
    return _job(values, command, name, known=bool(nodes))


def read_scripts(path: Path) -> str:
    """A script with those in its place that it calls by name in its own folder, each once.
    Raises ConfigError: it cannot be read, or is too large."""
    return _script(path, {path.name})


def _script(path: Path, seen: set[str]) -> str:
    try:
        size = path.stat().st_size
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from None
    if size > LARGEST:
        raise ConfigError(f"{path} has more than {LARGEST >> 20} MiB: it is not a script")

    def called(match: re.Match[str]) -> str:
        other = path.parent / match[1]
        if match[1] in seen or not other.is_file():
            return match[0]
        seen.add(match[1])
        return _script(other, seen)

    return _CALLS.sub(called, text)


def _variables(given: Sequence[str]) -> dict[str, str]:
    found = {}
    for word in given:
        name, equals, value = word.partition("=")
        if not equals or not re.fullmatch(r"[A-Za-z_]\w*", name):
            raise ConfigError(f"'{word}' is not NAME=VALUE of a variable")
        found[name] = value
    if found.get("SLURM_NNODES", "1").isdecimal() and found.get("COMPILE", "0") == "0":
        return found
    raise ConfigError(
        "SLURM_NNODES is a number, and COMPILE no part of a job",
        hint="`invoke precompile JOB` compiles the graphs of the imported job",
    )


def _found(text: str, variables: Mapping[str, str], nodes: str) -> ShellCommand:
    caller = {"SLURM_NNODES": nodes, "SLURM_NTASKS": nodes, "HOME": _HOME, **variables}
    try:
        command = find_command(text, SCRIPT, caller)
    except ValueError as error:
        raise ConfigError(f"the script cannot be read: {error}") from None
    if command is None:
        raise ConfigError(
            f"nothing in it runs {SCRIPT}",
            hint="give gpt_SIZE.sh with test.sh beside it, or a file with the command line",
        )
    return command


def _overrides(words: Sequence[str]) -> list[Override]:
    """KEY=VALUE of the command line. Raises ConfigError: a word is none, or names a configuration
    of another model."""
    found = []
    for word in words:
        if word == "--config-path=conf" or word in (f"--config-name={each}" for each in _CONFIGS):
            continue
        if word.startswith("-"):
            raise ConfigError(
                f"{word}: trainkit drives {ENGINE} with {_CONFIGS[0]} alone, whose model is a GPT",
                hint="gpt_SIZE.sh and test.sh have it; other models are other engines' here",
            )
        try:
            found.append(read_override(word))
        except ValueError as error:
            raise ConfigError(str(error)) from None
    return found


def _at_home(value: object) -> object:
    """A value whose paths begin with ~ where they begin with $HOME."""
    if isinstance(value, list):
        return [_at_home(each) for each in value]
    return value.replace(_HOME, "~") if isinstance(value, str) else value


def _values(command: ShellCommand, version: str) -> NemoValues:
    overrides = _overrides(command.words)
    given = {each.path: _at_home(each.value) for each in overrides if each.prefix != "~"}
    newer = "model.wrap_with_zero" in given or "model.megatron_amp_O2" in given
    generation = generation_of(version or ("2.21" if newer else "2.13.1"))
    table = load_table(ENGINE, generation.version)
    silent = {
        name: option.default for name, option in table.options.items() if option.default is not None
    }
    usual = {
        **silent,
        **_USUAL,
        "model.save_xser": generation.save_xser,
        "model.load_xser": generation.load_xser,
        "exp_manager.create_checkpoint_callback": generation.saves,
    }
    dialect = Dialect(ENGINE, table, SET_BY, usual, _RECOMPUTE)
    values = NemoValues(given, silent, left=list(command.notes), dialect=dialect)
    for each in overrides:
        if each.prefix == "~":
            values.left.append(f"~{each.path}: nothing here takes a key away")
    for unknown in command.unknown:
        if unknown != _HOME and unknown in " ".join(command.words):
            values.left.append(f"{unknown}: its value is not in the file")
    return values


def _fewest(values: NemoValues) -> int:
    """Nodes that hold the model once."""
    degrees = [
        replace(values, given=dict(values.given)).count(f"model.{kind}_model_parallel_size")
        for kind in _KINDS
    ]
    return max(1, -(-degrees[0] * degrees[1] // CORES))


def _job(values: NemoValues, command: ShellCommand, name: str, *, known: bool) -> ImportedJob:
    generation = generation_of(values.dialect.table.version)
    model = taken_model(values)
    parallelism = taken_parallelism(values)
    precision = _precision(values, command.environment, generation)
    training = {**taken_training(values), **precision}
    job = taken_job(values)
    batch = values.count("model.global_batch_size")
    if known:
        training["global_batch_size"] = batch
    else:
        nodes = int(str(job["nodes"]))
        training["gradient_accumulation_steps"] = _batch(training, parallelism, batch, nodes)
    if environment := _environment(command.environment, values, generation):
        job["env"] = environment
    dataset, tokenizer = taken_data(values)
    return ImportedJob(
        name=name,
        engine=ENGINE,
        model=model,
        job=job,
        parallelism=parallelism,
        training=training,
        engine_args=taken_rest(values),
        dataset=dataset,
        tokenizer=tokenizer,
        not_taken=tuple(values.left),
    )


def _batch(
    training: Mapping[str, object], parallelism: Mapping[str, object], batch: int, nodes: int
) -> int:
    """Micro-batches of one step on each rank: on any number of nodes, as the scripts' batch is so
    much for each node."""
    degrees = [int(str(parallelism[f"{kind}_model_parallel_size"])) for kind in _KINDS]
    replicas = max(1, CORES * nodes // (degrees[0] * degrees[1]))
    return max(1, batch // (replicas * int(str(training["micro_batch_size"]))))


def _precision(
    values: NemoValues, environment: Mapping[str, str], generation: ScriptGeneration
) -> dict[str, object]:
    """The mode whose optimizer, O2, ZeRO and variables these are."""
    said = {
        "optimizer": values.take("model.optim.name"),
        "amp_o2": values.flag("model.megatron_amp_O2"),
        "zero": values.flag("model.zero_use_master_weight"),
    }
    for mode in generation.precisions:
        each = PRECISIONS[mode]
        same = all(getattr(each, key) == value for key, value in said.items())
        if same and all(environment.get(key, value) == value for key, value in each.env.items()):
            if mode not in ("bf16SR", "fp32"):
                values.engine_args[PRECISION_KEY] = mode
            return {"precision": "fp32" if mode == "fp32" else "bf16"}
    raise ConfigError(
        f"model.optim.name, megatron_amp_O2 and zero_use_master_weight = {list(said.values())}:"
        f" no mode of {generation.version} has them",
        hint=f"the modes of train_setup.sh are {', '.join(generation.precisions)}",
    )


def _environment(
    exported: Mapping[str, str], values: NemoValues, generation: ScriptGeneration
) -> dict[str, str]:
    """Variables that the engine does not set by itself to these values."""
    mode = str(values.engine_args.get(PRECISION_KEY, "bf16SR"))
    usual = environment_of(generation, PRECISIONS[mode], compiling=False)
    taken = {}
    for key, value in exported.items():
        if key in _SCRIPTS_OWN or usual.get(key) == value:
            continue
        if "$" in value.replace(_HOME, ""):
            values.left.append(f"export {key} = {value}: its value is not in the file")
        else:
            taken[key] = value
    return taken
