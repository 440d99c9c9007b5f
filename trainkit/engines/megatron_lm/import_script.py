"""A job of jobs.toml from a script or command line that runs Megatron-LM's pretrain_gpt.py.

What the script leaves to Megatron-LM's defaults is written down, where trainkit's own are others.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from trainkit.base.errors import ConfigError
from trainkit.engines.imported import ImportedJob, refuse_ramp
from trainkit.engines.megatron_lm.import_experts import family_with_experts, take_experts
from trainkit.engines.megatron_lm.script_options import (
    Options,
    default_of,
    is_number,
    parsed,
    real,
    take_value,
    typed,
    whole,
)
from trainkit.engines.megatron_lm.words import SET_BY
from trainkit.engines.options import OptionTable
from trainkit.engines.shell_words import find_command, torchrun_nodes
from trainkit.families import FAMILIES
from trainkit.plan.batch import ramped_batch_size

SCRIPT = "pretrain_gpt.py"
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
# the blocks of each family; "" is a flag that is there, None one that is not
_FAMILIES: Mapping[str, Mapping[str, str | None]] = {
    "gpt": {
        "normalization": "LayerNorm",
        "swiglu": None,
        "position-embedding-type": "learned_absolute",
        "disable-bias-linear": None,
    },
    "llama": {
        "normalization": "RMSNorm",
        "swiglu": "",
        "position-embedding-type": "rope",
        "disable-bias-linear": "",
    },
}


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
            hint="give the script that does, or a file with the command line itself; what $(...)"
            " prints and the files that it sources are not read",
        )
    options = parsed(command.words, table)
    options.not_taken += [f"{each}: its value is not in the file" for each in command.unknown]
    options.not_taken += [*command.notes, *filter(None, [table.notice])]
    model = model_of(options)
    training = training_of(options)
    parallelism = parallelism_of(options, model)
    job = torchrun_nodes(command, options.not_taken)
    if environment := _environment(command.environment, options):
        job["env"] = environment
    dataset, tokenizer = data_of_script(options)
    if options.flag("mock-data"):
        job["dataset"] = "mock"
        dataset = {}
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


def _taken(options: Options, section: str, into: dict[str, object]) -> None:
    """Every option whose key of jobs.toml is `section`.NAME with the option's own name."""
    for option, key in SET_BY.items():
        table, _, leaf = key.partition(".")
        if table == section and leaf == option.replace("-", "_") and option in options.given:
            words = options.given.pop(option)
            into[leaf] = typed(options.table.find(option), words)
    for option in _DEFAULTS:
        table, _, leaf = SET_BY[option].partition(".")
        default = default_of(options, option)
        if table == section and default is not None:
            into.setdefault(leaf, default)


def model_of(options: Options) -> dict[str, object]:
    """Keys of [models.X]. Raises ConfigError where the options say no model."""
    model: dict[str, object] = {"family": _family(options)}
    _taken(options, "model", model)
    for name in ("num_layers", "hidden_size", "num_attention_heads", "seq_length"):
        if name not in model:
            raise ConfigError(
                f"the command has no --{name.replace('_', '-')}",
                hint="; ".join(["give it there", *options.not_taken]),
            )
    if words := options.take("norm-epsilon"):
        model["layernorm_epsilon"] = real("norm-epsilon", words[0])
    if options.flag("group-query-attention"):
        groups = default_of(options, "num-query-groups")
        model.setdefault("num_query_groups", groups)
    elif "num_query_groups" in model:
        groups = model.pop("num_query_groups")
        options.not_taken.append(
            f"--num-query-groups {groups}: Megatron-LM reads it with --group-query-attention alone"
        )
    if options.given.get("encoder-num-layers") == [str(model["num_layers"])]:
        options.take("encoder-num-layers")  # as Megatron-LM asks for
    model.setdefault("untie_embeddings_and_output_weights", False)
    if model["family"] == "gpt":
        model["gelu"] = "exact" if options.flag("no-bias-gelu-fusion") else "tanh"
    if model["family"] != "gpt":
        model.setdefault("rotary_base", 10000.0)
    if "rotary_base" in model:
        model["rotary_base"] = real("rotary-base", model["rotary_base"])
    for key, implied in (("rotary_base", None), ("rotary_percent", 1.0)):
        if key in model and key not in FAMILIES[str(model["family"])].settings:
            value = model.pop(key)
            if value != implied:
                said = f"--{key.replace('_', '-')} {value}"
                options.not_taken.append(f"{said}: family '{model['family']}' does not read it")
    if FAMILIES[str(model["family"])].routing is not None:
        take_experts(options, model)
    return model


def _family(options: Options) -> str:
    """The family most of whose blocks these are. What it has otherwise than asked for is said."""
    asked = dict(_FAMILIES["gpt"])  # Megatron-LM's own defaults
    rotary = options.flag("use-rotary-position-embeddings")
    for name in asked:
        if name in options.given:
            asked[name] = " ".join(options.given.pop(name))
    if rotary:
        asked["position-embedding-type"] = "rope"
    same = {
        family: sum(asked[name] == value for name, value in blocks.items())
        for family, blocks in _FAMILIES.items()
    }
    with_experts = family_with_experts(options)
    family = with_experts or max(same, key=lambda each: same[each])
    for name, value in _FAMILIES["llama" if with_experts else family].items():
        if asked[name] != value:
            said = _spelled(name, asked[name])
            if rotary and asked[name] == "rope":
                said = "--use-rotary-position-embeddings"
            options.not_taken.append(
                f"{said}: family '{family}' has {_spelled(name, value)}; the command differs"
            )
    return family


def _spelled(name: str, value: str | None) -> str:
    return f"no --{name}" if value is None else f"--{name} {value}".rstrip()


def training_of(options: Options) -> dict[str, object]:
    """Keys of [jobs.X.training]."""
    training: dict[str, object] = {"precision": "fp32"}
    for precision in ("fp16", "bf16"):
        if precision in options.given:
            if training["precision"] == "fp16":
                raise ConfigError("--fp16 and --bf16: Megatron-LM refuses both together")
            options.take(precision)
            training["precision"] = precision
    _taken(options, "training", training)
    if training["precision"] == "fp16":
        for name in _FP16:
            default = default_of(options, name)
            training.setdefault(name.replace("-", "_"), default)
            if name in ("initial-loss-scale", "min-loss-scale"):
                key = name.replace("-", "_")
                training[key] = real(name, training[key])
    if words := options.take("rampup-batch-size"):
        ramp = [whole("rampup-batch-size", word) for word in words]
        refuse_ramp("--rampup-batch-size", ramp, training.get("global_batch_size"))
        training["rampup_batch_size"] = ramp
    _samples(options, training)
    if options.flag("checkpoint-activations"):
        training["recompute_granularity"] = "full"
    elif options.flag("recompute-activations"):
        training["recompute_granularity"] = "selective"
    else:
        training.setdefault("recompute_granularity", "none")
    return training


def _samples(options: Options, training: dict[str, object]) -> None:
    """What is counted in samples, in iterations of the global batch."""
    pairs = {
        "train-samples": "train_iters",
        "lr-decay-samples": "lr_decay_iters",
        "lr-warmup-samples": "lr_warmup_iters",
    }
    given = [name for name in pairs if name in options.given]
    batch = training.get("global_batch_size")
    for name in given:
        if not isinstance(batch, int) or batch < 1:
            options.leave(name, "it needs --global-batch-size")
            continue
        (word,) = options.take(name) or [""]
        ramp = training.get("rampup_batch_size")
        samples = whole(name, word) if word.strip("0_") else 0
        training[pairs[name]] = _iterations(samples, batch, ramp)
        if samples % batch and name != "train-samples":
            options.not_taken.append(f"--{name} {word}: whole iterations of {batch} samples here")
    if given and "rampup_batch_size" in training:
        options.not_taken.append(
            f"--rampup-batch-size with --{given[0]}: Megatron-LM's learning rate follows the"
            " samples, here it follows the iterations: it differs while the batch grows"
        )


def _iterations(samples: int, batch: int, ramp: object) -> int:
    """As Megatron-LM counts them, a last batch that is not full left out
    (megatron/training/training.py, update_train_iters)."""
    if not isinstance(ramp, list):
        return samples // batch
    consumed = 0
    iterations = 0
    while consumed <= min(ramp[2], samples):
        consumed += ramped_batch_size(batch, ramp, consumed)
        iterations += 1
    return iterations + max(0, samples - consumed) // batch


def parallelism_of(options: Options, model: dict[str, object]) -> dict[str, object]:
    """Keys of [jobs.X.parallelism]."""
    parallelism: dict[str, object] = {}
    comm = options.given.get("cp-comm-type")
    if comm is not None and comm not in (["p2p"], ["a2a"]):
        options.leave("cp-comm-type", "here it is p2p or a2a, the same for all layers")
    elif comm is not None:
        parallelism["cp_comm_type"] = take_value(options, "cp-comm-type")
    _taken(options, "parallelism", parallelism)
    if words := options.take("model-parallel-size"):
        parallelism["tensor_model_parallel_size"] = whole("model-parallel-size", words[0])
    parallelism["zero_stage"] = int(options.flag("use-distributed-optimizer"))
    if words := options.take("num-layers-per-virtual-pipeline-stage"):
        stages = whole(
            "pipeline-model-parallel-size", parallelism.get("pipeline_model_parallel_size", 1)
        )
        layers = whole("num-layers", model["num_layers"])
        chunks = layers // (stages * whole("num-layers-per-virtual-pipeline-stage", words[0]))
        if chunks > 1:
            parallelism["virtual_pipeline_model_parallel_size"] = chunks
        else:
            options.not_taken.append(
                f"--num-layers-per-virtual-pipeline-stage {words[0]}: a stage of {layers // stages}"
                " layers has one chunk"
            )
    return parallelism


def data_of_script(options: Options) -> tuple[dict[str, object], dict[str, object]]:
    """The dataset and its tokenizer."""
    tokenizer: dict[str, object] = {}
    if {"vocab-file", "merge-file"} <= set(options.given):
        vocab = options.take("vocab-file")
        merges = options.take("merge-file")
        assert vocab and merges
        tokenizer = {
            "type": "gpt2",
            "vocab_size": 50257,
            "vocab_file": vocab[0],
            "merge_file": merges[0],
        }
        if options.given.get("tokenizer-type") == ["GPT2BPETokenizer"]:
            options.take("tokenizer-type")
    dataset: dict[str, object] = {}
    words = options.take("data-path") or options.take("train-data-path")
    if words:
        weights = [word for word in words if is_number(word)]
        dataset = {
            "source": "indexed",
            "prefixes": [word for word in words if not is_number(word)],
        }
        if len(weights) > 1:
            options.not_taken.append(
                f"--data-path: weights {' '.join(weights)}: here prefixes count by their sizes;"
                " give each a [datasets.X] of its own and blend them"
            )
        if split := options.take("split"):
            dataset["split"] = split[0]
    return dataset, tokenizer


def _environment(exported: Mapping[str, str], options: Options) -> dict[str, str]:
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


def _rest(options: Options, training: dict[str, object]) -> None:
    """What is left: implied, trainkit's own, or for engine_args."""
    method = (options.given.get("recompute-method"), options.given.get("recompute-num-layers"))
    if training.get("recompute_granularity") == "full" and method == (["uniform"], ["1"]):
        options.take("recompute-method")
        options.take("recompute-num-layers")
    if "load" in options.given and options.given["load"] != options.given.get("save"):
        options.leave(
            "load",
            "a start from these weights; the job starts from random ones (`invoke convert` takes"
            " them to engine = 'native' and init_from)",
        )
    for name, words in list(options.given.items()):
        if name in _ENDS_EARLY:
            options.leave(
                name,
                "a run lasts train_iters, and one that ends before has failed; `cancel --save` and"
                " a scheduler's time limit save first",
            )
        elif name in SET_BY:
            options.leave(name, f"{SET_BY[name]} stands for it")
        elif options.table.find(name) is None:
            options.raw += [f"--{name}", *words]
            version = f"{options.table.engine} {options.table.version}"
            options.leave(name, f"{version} does not know it; it stands in args")


def _engine_args(options: Options) -> dict[str, object]:
    found = {}
    for name, words in options.given.items():
        option = options.table.find(name)
        value = typed(option, words)
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
