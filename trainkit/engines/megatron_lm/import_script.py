"""A job of jobs.toml from a script or command line that runs Megatron-LM's pretrain_gpt.py.

What the script leaves to Megatron-LM's defaults is written down, where trainkit's own are others.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from trainkit.base.errors import ConfigError
from trainkit.engines.imported import ImportedJob
from trainkit.engines.megatron_lm.words import SET_BY
from trainkit.engines.options import Option, OptionTable
from trainkit.engines.shell_words import find_command

SCRIPT = "pretrain_gpt.py"
# options that follow from the run, the cluster or another key, and whose loss is none
_IMPLIED = {
    "data-impl", "distributed-backend", "data-cache-path", "tensorboard-dir", "save", "load",
    "use-mcore-models", "group-query-attention", "encoder-num-layers",
    "wandb-exp-name", "wandb-save-dir", "exit-signal-handler", "legacy-tokenizer",
}  # fmt: skip
# what the agents set for each rank, or what only the script itself reads
_AGENTS_OWN = {
    "MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE",
    "NODE_RANK", "NNODES", "GPUS_PER_NODE", "CMD", "LAUNCHER",
}  # fmt: skip
_THIS_MACHINES = {"PATH", "LD_LIBRARY_PATH", "PYTHONPATH", "CUDA_VISIBLE_DEVICES", "CUDA_HOME"}
_SECRET = re.compile(r"KEY|TOKEN|SECRET|PASSWORD|CREDENTIAL", re.IGNORECASE)
_ENDS_EARLY = ("exit-interval", "exit-duration-in-mins")
# what Megatron-LM does by itself, and trainkit otherwise
_DEFAULTS = (
    "adam-beta1", "adam-beta2", "adam-eps", "clip-grad", "weight-decay", "init-method-std",
    "attention-dropout", "hidden-dropout", "layernorm-epsilon", "seed", "lr-decay-style",
    "log-interval", "eval-interval", "eval-iters",
)  # fmt: skip
_FP16 = ("initial-loss-scale", "min-loss-scale", "loss-scale-window", "hysteresis")
_FAMILY = ("normalization", "swiglu", "position-embedding-type", "disable-bias-linear",
           "use-rotary-position-embeddings")  # fmt: skip


@dataclass
class _Options:
    """The options of a command line, and what has been done with them."""

    table: OptionTable
    given: dict[str, list[str]]
    raw: list[str] = field(default_factory=list)
    not_taken: list[str] = field(default_factory=list)

    def take(self, name: str) -> list[str] | None:
        """An option's words; None where it is not there. It is done with."""
        return self.given.pop(name, None)

    def flag(self, name: str) -> bool:
        """Whether a flag is there. It is done with."""
        return self.take(name) is not None


def import_megatron(text: str, name: str, table: OptionTable) -> ImportedJob:
    """The job that a script or command line stands for.

    Args:
        text: of the file.
        name: what the job is to be called.
        table: the options of the version that it is for.

    Raises ConfigError: nothing in it runs pretrain_gpt.py, or it lacks what every job has.
    """
    try:
        command = find_command(text, SCRIPT)
    except ValueError as error:
        raise ConfigError(f"the script cannot be read: {error}") from None
    if command is None:
        raise ConfigError(
            f"nothing in it runs {SCRIPT}",
            hint="give the script that does, or a file with the command line itself",
        )
    options = _parsed(command.words, table)
    for unknown in command.unknown:
        options.not_taken.append(f"{unknown}: its value is not in the file")
    model = _model(options)
    training = _training(options)
    parallelism = _parallelism(options, model)
    job = _nodes(command.before, options)
    if environment := _environment(command.environment, options):
        job["env"] = environment
    if "mock-data" in options.given:
        job["dataset"] = "mock"
    dataset, tokenizer = _data(options)
    _rest(options, training)
    if options.raw:
        job["args"] = options.raw
    return ImportedJob(
        name=name,
        engine="megatron-lm",
        model=model,
        job=job,
        parallelism=parallelism,
        training=training,
        engine_args=_engine_args(options),
        dataset=dataset,
        tokenizer=tokenizer,
        not_taken=tuple(options.not_taken),
    )


def _parsed(words: Sequence[str], table: OptionTable) -> _Options:
    """Options with their values; a later one of the same name counts, as argparse has it."""
    options = _Options(table, {})
    current = ""
    for word in words:
        if word.startswith("--"):
            current, _, value = word.partition("=")
            option = table.find(current)
            name = option.name if option else current.removeprefix("--")
            options.given[name] = [value] if value else []
            current = name
        elif current:
            options.given[current].append(word)
        elif word not in ("$@",):
            options.not_taken.append(f"{word}: a word without an option before it")
    _leave_surplus(options)
    return options


def _leave_surplus(options: _Options) -> None:
    """Say which words follow an option that takes fewer; argparse would refuse them."""
    for name, words in options.given.items():
        option = options.table.find(name)
        if option is None or option.nargs is not None:
            continue
        taken = int(option.action == "store")
        if surplus := words[taken:]:
            options.given[name] = words[:taken]
            options.not_taken.append(f"{' '.join(surplus)}: --{name} takes {taken or 'no'} value")


def _typed(option: Option | None, words: Sequence[str]) -> object:
    """Words as TOML's values, by the option's type."""
    if option is None or option.action != "store":
        return True
    values = [_number(word, option.type) for word in words]
    if option.nargs is not None:
        return values
    return values[0] if values else ""


def _number(word: str, type_: str) -> object:
    try:
        if type_ == "int":
            return int(word)
        if type_ == "float":
            return float(word)
    except ValueError:
        return word
    return word


def _whole(name: str, value: object) -> int:
    """The value of an option that others are computed from. Raises ConfigError where it is no
    number from 1, as where the script leaves it to a variable of its caller."""
    if str(value).isdecimal() and int(str(value)) > 0:
        return int(str(value))
    raise _no_number(name, value)


def _real(name: str, value: object) -> float:
    """The same of a number with a fraction."""
    if _is_number(str(value)):
        return float(str(value))
    raise _no_number(name, value)


def _no_number(name: str, value: object) -> ConfigError:
    return ConfigError(
        f"--{name} {value}: a number is needed here",
        hint="write it into the script, or import the command line that `bash -x` prints",
    )


def _default(options: _Options, name: str) -> object:
    option = options.table.find(name)
    return option.default if option is not None else None


def _taken(options: _Options, section: str, into: dict[str, object]) -> None:
    """Every option whose key of jobs.toml is `section`.NAME with the option's own name."""
    for option, key in SET_BY.items():
        table, _, leaf = key.partition(".")
        if table == section and leaf == option.replace("-", "_") and option in options.given:
            words = options.given.pop(option)
            into[leaf] = _typed(options.table.find(option), words)
    for option in _DEFAULTS:
        table, _, leaf = SET_BY[option].partition(".")
        default = _default(options, option)
        if table == section and default is not None:
            into.setdefault(leaf, default)


def _model(options: _Options) -> dict[str, object]:
    model: dict[str, object] = {"family": _family(options)}
    _taken(options, "model", model)
    for name in ("num_layers", "hidden_size", "num_attention_heads", "seq_length"):
        if name not in model:
            raise ConfigError(f"the command has no --{name.replace('_', '-')}")
    if words := options.take("norm-epsilon"):
        model["layernorm_epsilon"] = _real("norm-epsilon", words[0])
    model.setdefault("untie_embeddings_and_output_weights", False)
    if model["family"] == "gpt":
        model["gelu"] = "exact" if options.flag("no-bias-gelu-fusion") else "tanh"
    if model["family"] == "llama":
        model.setdefault("rotary_base", 10000.0)
    if "rotary_base" in model:
        model["rotary_base"] = _real("rotary-base", model["rotary_base"])
    return model


def _family(options: _Options) -> str:
    """The family whose blocks these are. What it has otherwise than asked for is said."""
    found = {name: options.take(name) for name in _FAMILY}
    rotary = found["position-embedding-type"] == ["rope"]
    rotary = rotary or found["use-rotary-position-embeddings"] is not None
    asked = {
        "--normalization RMSNorm": found["normalization"] == ["RMSNorm"],
        "--swiglu": found["swiglu"] is not None,
        "--position-embedding-type rope": rotary,
        "--disable-bias-linear": found["disable-bias-linear"] is not None,
    }
    llama = sum(asked.values()) >= 2
    for words, there in asked.items():
        if there != llama:
            what = "has no" if there else "has"
            family = "llama" if llama else "gpt"
            options.not_taken.append(f"{words}: family '{family}' {what} it; the command differs")
    return "llama" if llama else "gpt"


def _training(options: _Options) -> dict[str, object]:
    training: dict[str, object] = {"precision": "fp32"}
    for precision in ("fp16", "bf16"):
        if options.flag(precision):
            training["precision"] = precision
    _taken(options, "training", training)
    if training["precision"] == "fp16":
        for name in _FP16:
            default = _default(options, name)
            training.setdefault(name.replace("-", "_"), default)
            if name in ("initial-loss-scale", "min-loss-scale"):
                key = name.replace("-", "_")
                training[key] = _real(name, training[key])
    _samples(options, training)
    if options.flag("checkpoint-activations"):
        training["recompute_granularity"] = "full"
    elif options.flag("recompute-activations"):
        training["recompute_granularity"] = "selective"
    else:
        training.setdefault("recompute_granularity", "none")
    if words := options.take("rampup-batch-size"):
        training["rampup_batch_size"] = [_whole("rampup-batch-size", word) for word in words]
    return training


def _samples(options: _Options, training: dict[str, object]) -> None:
    """What is counted in samples, in iterations of the global batch."""
    pairs = (
        ("train-samples", "train_iters"),
        ("lr-decay-samples", "lr_decay_iters"),
        ("lr-warmup-samples", "lr_warmup_iters"),
    )
    batch = training.get("global_batch_size")
    for name, key in pairs:
        words = options.take(name)
        if not words:
            continue
        if isinstance(batch, int) and words[0].isdigit():
            training[key] = int(words[0]) // batch
        else:
            options.not_taken.append(f"--{name} {words[0]}: it needs --global-batch-size")


def _parallelism(options: _Options, model: dict[str, object]) -> dict[str, object]:
    parallelism: dict[str, object] = {}
    _taken(options, "parallelism", parallelism)
    if words := options.take("model-parallel-size"):
        parallelism["tensor_model_parallel_size"] = _whole("model-parallel-size", words[0])
    parallelism["zero_stage"] = int(options.flag("use-distributed-optimizer"))
    if words := options.take("num-layers-per-virtual-pipeline-stage"):
        stages = _whole(
            "pipeline-model-parallel-size", parallelism.get("pipeline_model_parallel_size", 1)
        )
        layers = _whole("num-layers", model["num_layers"])
        chunks = layers // (stages * _whole("num-layers-per-virtual-pipeline-stage", words[0]))
        if chunks > 1:
            parallelism["virtual_pipeline_model_parallel_size"] = chunks
    return parallelism


def _data(options: _Options) -> tuple[dict[str, object], dict[str, object]]:
    """The dataset and its tokenizer."""
    tokenizer: dict[str, object] = {}
    vocab = options.take("vocab-file")
    merges = options.take("merge-file")
    if vocab and merges:
        tokenizer = {
            "type": "gpt2",
            "vocab_size": 50257,
            "vocab_file": vocab[0],
            "merge_file": merges[0],
        }
        options.take("tokenizer-type")
    dataset: dict[str, object] = {}
    words = options.take("data-path") or options.take("train-data-path")
    if options.flag("mock-data"):
        return {}, tokenizer
    if words:
        weights = [word for word in words if _is_number(word)]
        dataset = {
            "source": "indexed",
            "prefixes": [word for word in words if not _is_number(word)],
        }
        if len(set(weights)) > 1:
            options.not_taken.append(
                f"--data-path: weights {' '.join(weights)}: give each prefix a [datasets.X] of its"
                " own and blend them"
            )
    if split := options.take("split"):
        dataset["split"] = split[0]
    return dataset, tokenizer


def _is_number(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True


def _nodes(before: Sequence[str], options: _Options) -> dict[str, object]:
    """`nodes` of torchrun; ranks of a node belong to the cluster."""
    job: dict[str, object] = {}
    words = list(before)
    for at, word in enumerate(words[:-1]):
        name = word.lstrip("-").replace("_", "-")
        if name == "nnodes" and words[at + 1].isdigit():
            job["nodes"] = int(words[at + 1])
        elif name == "nproc-per-node":
            options.not_taken.append(
                f"{word} {words[at + 1]}: ranks of a node stand in [clusters.X]"
            )
    return job


def _environment(exported: Mapping[str, str], options: _Options) -> dict[str, str]:
    """`env` of the job: variables whose whole value is in the script. Others are named, and none
    of a secret's value is."""
    taken = {}
    for name, value in exported.items():
        if name in _AGENTS_OWN:
            continue
        if _SECRET.search(name):
            why = "looks like a secret: name it in clusters.X.secrets"
        elif "$" in value or "`" in value:
            why = f"= {value}: its value is not in the file; set it in env"
        elif name in _THIS_MACHINES:
            why = f"= {value}: belongs to the machine: [clusters.X] env or prolog"
        else:
            taken[name] = value
            continue
        options.not_taken.append(f"export {name}: {why}")
    return taken


def _rest(options: _Options, training: dict[str, object]) -> None:
    """What is left: implied, trainkit's own, or for engine_args."""
    method = (options.given.get("recompute-method"), options.given.get("recompute-num-layers"))
    if training.get("recompute_granularity") == "full" and method == (["uniform"], ["1"]):
        options.take("recompute-method")
        options.take("recompute-num-layers")
    for name in list(options.given):
        if name in _IMPLIED:
            options.take(name)
        elif name in _ENDS_EARLY:
            words = " ".join(options.given.pop(name))
            options.not_taken.append(
                f"--{name} {words}: a run lasts train_iters, and one that ends before has failed;"
                " `cancel --save` and a scheduler's time limit save first"
            )
        elif name in SET_BY:
            words = " ".join(options.given.pop(name))
            options.not_taken.append(f"--{name} {words}".rstrip() + f": {SET_BY[name]} says it")
        elif options.table.find(name) is None:
            words_of = options.given.pop(name)
            options.raw += [f"--{name}", *words_of]
            options.not_taken.append(
                f"--{name}: {options.table.engine} {options.table.version} does not know it; it"
                " stands in args"
            )


def _engine_args(options: _Options) -> dict[str, object]:
    found = {}
    for name, words in options.given.items():
        option = options.table.find(name)
        value = _typed(option, words)
        if option is not None and option.action == "switch" and name.startswith("no-"):
            value = False
        found[name] = value
    return found


def read_script(path: Path) -> str:
    """The text of a script. Raises ConfigError where it cannot be read."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from None
