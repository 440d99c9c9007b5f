"""What GPT-NeoX's launcher makes of a configuration: the two encoded words of train.py.

`deepy.py` reads the YAML files, derives further values and gives every rank

    --deepspeed_config <base64 of JSON> --megatron_config <base64 of JSON>

without what equals GPT-NeoX's own default. Source: EleutherAI/gpt-neox at ea7aefd,
megatron/neox_arguments/arguments.py (calculate_derived, get_deepspeed_main_args); nothing of it
is needed here. Ranks derive everything once more from the second word.
"""

from __future__ import annotations

import base64
import copy
import json
from collections.abc import Mapping
from contextlib import suppress

from trainkit.base.errors import ConfigError
from trainkit.engines.options import OptionTable

Values = dict[str, object]

# Fields of NeoXArgsDeepspeedConfig (megatron/neox_arguments/deepspeed_args.py): what the first
# word holds.
DEEPSPEED_FIELDS = frozenset(
    {
        "deepspeed",
        "train_batch_size",
        "train_micro_batch_size_per_gpu",
        "gradient_accumulation_steps",
        "optimizer",
        "scheduler",
        "fp32_allreduce",
        "prescale_gradients",
        "gradient_predivide_factor",
        "sparse_gradients",
        "fp16",
        "bf16",
        "amp",
        "gradient_clipping",
        "zero_optimization",
        "curriculum_learning",
        "curriculum_seqlen",
        "steps_per_print",
        "wall_clock_breakdown",
        "dump_state",
        "flops_profiler",
        "communication_data_type",
        "autotuning",
        "activation_checkpointing",
        "sparse_attention",
        "data_efficiency",
        "tensorboard",
        "wandb",
        "csv_monitor",
        "elasticity",
        "comms_logger",
        "compression_training",
        "checkpoint",
        "data_types",
    }
)
# What DeepSpeed and GPT-NeoX take where a file says nothing (ZERO_DEFAULTS, OPT_PARAMS_DEFAULTS).
ZERO_DEFAULTS = {
    "stage": 0,
    "allgather_partitions": True,
    "reduce_scatter": True,
    "allgather_bucket_size": 500_000_000,
    "overlap_comm": False,
    "reduce_bucket_size": 500_000_000,
    "contiguous_gradients": False,
}
OPTIMIZER_LR = 0.001
# of a rank before it knows its own, as deepy.py has them
LAUNCHER = {"local_rank": 0, "rank": 0, "world_size": 1}
# never in a word: objects, not values
OBJECTS = ("tokenizer", "tensorboard_writer", "adlr_autoresume_object")


def encoded_words(
    config: Mapping[str, object],
    table: OptionTable,
    config_files: Mapping[str, str],
    *,
    plain: bool = False,
) -> tuple[str, ...]:
    """The arguments of train.py, as deepy.py gives them.

    Args:
        config: content of the merged YAML file, with global_num_gpus.
        table: the options of that version, with their defaults.
        config_files: text of each configuration file by name, saved with every checkpoint.
        plain: JSON as it is, as trees from before March 2023 take it.

    Raises ConfigError: values that GPT-NeoX itself refuses.
    """
    both = both_configurations(config, table, config_files)
    if plain:
        deepspeed, megatron = (json.dumps(each) for each in both)
    else:
        deepspeed, megatron = (encode(each) for each in both)
    return "--deepspeed_config", deepspeed, "--megatron_config", megatron


def encode(values: Mapping[str, object]) -> str:
    """As one word: base64, the safe alphabet of URLs, of JSON."""
    return base64.urlsafe_b64encode(json.dumps(values).encode()).decode()


def decode(word: str) -> Values:
    """The inverse of `encode`."""
    found: Values = json.loads(base64.urlsafe_b64decode(word))
    return found


def both_configurations(
    config: Mapping[str, object], table: OptionTable, config_files: Mapping[str, str]
) -> tuple[Values, Values]:
    """(DeepSpeed's configuration, GPT-NeoX's), each without what equals the default. Arguments
    and errors: as `encoded_words`."""
    defaults = {option.name.replace("-", "_"): option.default for option in table.options.values()}
    values = resolve(config, defaults)
    values |= {**LAUNCHER, "user_script": "train.py", "config_files": dict(config_files)}
    # the defaults of the nearest version may not be those of this one
    in_any_case = frozenset(config) if table.notice else frozenset()
    given = {
        name: value
        for name, value in values.items()
        if name in defaults
        and name not in OBJECTS
        and (value != defaults[name] or name in in_any_case)
    }
    deepspeed = {name: value for name, value in given.items() if name in DEEPSPEED_FIELDS}
    deepspeed |= _table(values, "deepspeed_extra_args")
    return deepspeed, given


def resolve(config: Mapping[str, object], defaults: Mapping[str, object]) -> Values:
    """All values after GPT-NeoX's own derivation (NeoXArgs.calculate_derived).

    Raises ConfigError: what it refuses.
    """
    values: Values = {**copy.deepcopy(dict(defaults)), **copy.deepcopy(dict(config))}
    _derive_batch(values)
    _derive_precision(values)
    _derive_zero(values)
    _derive_optimizer(values)
    layers = _needed(values, "num_layers")
    pattern = values.get("attention_config") or [[["global"], "all"]]
    values["attention_config"] = attention_kinds(pattern, layers)
    _derive_weights(values)
    values["dynamic_loss_scale"] = values.get("loss_scale") is None
    values["is_pipe_parallel"] = (_whole(values, "pipe_parallel_size") or 0) >= 1
    if values.get("sparsity_config") is None:
        values["sparsity_config"] = {}
    if values.get("text_gen_type") is None:
        if values.get("sample_input_file"):
            values["text_gen_type"] = "input-file"
        else:
            values["text_gen_type"] = "unconditional"
    return values


def _table(values: Mapping[str, object], name: str) -> Values:
    """A block of values; {} where none is given."""
    found = values.get(name) or {}
    if not isinstance(found, dict):
        raise ConfigError(f"gpt-neox: {name} is a table, not {found!r}")
    return found


def _whole(values: Mapping[str, object], name: str) -> int | None:
    """A whole number; None where none is given."""
    found = values.get(name)
    if found is None or isinstance(found, int):
        return found
    raise ConfigError(f"gpt-neox: {name} is a whole number, not {found!r}")


def _needed(values: Mapping[str, object], name: str) -> int:
    """A whole number that has to be given."""
    found = _whole(values, name)
    if found is None:
        raise ConfigError(f"gpt-neox needs {name}")
    return found


def _derive_batch(values: Values) -> None:
    """Batch sizes from each other (calculate_batch_parameters, check_batch_parameters)."""
    pipe = max(1, _whole(values, "pipe_parallel_size") or 0)
    tensor = max(1, _whole(values, "model_parallel_size") or 0)
    ranks = _needed(values, "global_num_gpus")
    if ranks % (pipe * tensor):
        raise ConfigError(
            f"gpt-neox: {ranks} ranks do not divide by pipe_parallel_size {pipe} *"
            f" model_parallel_size {tensor}"
        )
    data = ranks // (pipe * tensor)
    whole, micro, steps = batch_parameters(
        data,
        _whole(values, "train_batch_size"),
        _whole(values, "train_micro_batch_size_per_gpu"),
        _whole(values, "gradient_accumulation_steps"),
    )
    if min(whole, micro, steps) < 1 or whole != micro * steps * data:
        raise ConfigError(
            f"gpt-neox: train_batch_size {whole} is not train_micro_batch_size_per_gpu {micro} *"
            f" gradient_accumulation_steps {steps} * {data} data-parallel ranks"
        )
    values |= {
        "model_parallel_size": tensor,
        "train_batch_size": whole,
        "train_micro_batch_size_per_gpu": micro,
        "gradient_accumulation_steps": steps,
        "batch_size": micro,
        "clip_grad": values.get("gradient_clipping"),
    }


def batch_parameters(
    data: int, whole: int | None, micro: int | None, steps: int | None
) -> tuple[int, int, int]:
    """(batch, micro-batch, micro-batches of a step), those that are not given derived.

    Args:
        data: data-parallel ranks.
        whole: samples of a step.
        micro: samples of a micro-batch.
        steps: micro-batches of a step on one rank.

    Raises ConfigError: neither of the first two is given.
    """
    if whole is None and micro is None:
        raise ConfigError("gpt-neox needs train_batch_size or train_micro_batch_size_per_gpu")
    if whole is None:
        assert micro is not None
        steps = steps or 1
        return micro * steps * data, micro, steps
    if micro is None:
        steps = steps or 1
        return whole, whole // data // steps, steps
    if steps is None:
        return whole, micro, whole // micro // data
    return whole, micro, steps


def _derive_precision(values: Values) -> None:
    for block, precision in (("fp16", "fp16"), ("bf16", "bfloat16")):
        if not _table(values, block).get("enabled", False):
            continue
        if values.get("precision") is None:
            values["precision"] = precision
        elif values["precision"] != precision:
            raise ConfigError(
                f"gpt-neox: {block} is enabled, but precision = '{values['precision']}'"
            )
    if values.get("precision") == "fp16":
        if values.get("fp16"):
            values["fp16"] = {**_table(values, "fp16"), "enabled": True}
        else:
            values["fp16"] = {"type": "fp16", "enabled": True}
    elif values.get("precision") == "bfloat16":
        if not values.get("bf16"):
            extra = _table(values, "deepspeed_extra_args")
            values["deepspeed_extra_args"] = {**extra, "bf16": {"enabled": True}}
    else:
        values["precision"] = "fp32"


def _derive_zero(values: Values) -> None:
    if values.get("zero_optimization") is None:
        values["zero_optimization"] = dict(ZERO_DEFAULTS)
    zero = _table(values, "zero_optimization")
    if "stage" not in zero:
        raise ConfigError("gpt-neox: zero_optimization needs a stage")
    if zero["stage"] not in (0, 1, 2, 3):
        if values.get("autotuning") is None:
            raise ConfigError(f"gpt-neox: there is no ZeRO stage {zero['stage']!r}")
        return
    for name in (
        "stage",
        "reduce_scatter",
        "contiguous_gradients",
        "reduce_bucket_size",
        "allgather_bucket_size",
    ):
        values[f"zero_{name}"] = zero.get(name, ZERO_DEFAULTS[name])


def _derive_optimizer(values: Values) -> None:
    optimizer = _table(values, "optimizer")
    kind = str(optimizer.get("type", "Adam"))
    values["optimizer_type"] = kind
    values["lr"] = _table(optimizer, "params").get("lr", OPTIMIZER_LR)
    if kind.lower() != "onebitadam":
        return
    iterations = _needed(values, "train_iters")
    warmup = values.get("warmup")
    assert isinstance(warmup, int | float)
    values["scheduler"] = {  # DeepSpeed's own: it makes this optimizer itself
        "type": "WarmupDecayLR",
        "params": {
            "warmup_min_lr": 0,
            "warmup_max_lr": values["lr"],
            "warmup_num_steps": int(iterations * warmup),
            "total_num_steps": values.get("lr_decay_iters") or iterations,
        },
    }


def attention_kinds(pattern: object, layers: int) -> list[str]:
    """The kind of each layer's attention, from a list of them or a pattern such as
    [[["global", "local"], 2]] (expand_attention_types). Raises ConfigError for another form, or
    another number of layers."""
    kinds: list[str] = []
    with suppress(TypeError, ValueError, ZeroDivisionError):
        for part in pattern if isinstance(pattern, list) else []:
            names, times = ([part], 1) if isinstance(part, str) else part
            if times == "all":
                kinds = names * (layers // len(names))
                break
            kinds += names * min(times, layers + 1)
    if len(kinds) != layers:
        raise ConfigError(
            f"gpt-neox: attention_config = {pattern!r} is for {len(kinds)} layers, and the model"
            f" has {layers}"
        )
    return kinds


def _derive_weights(values: Values) -> None:
    for split in ("train", "valid", "test"):
        paths = values.get(f"{split}_data_paths") or values.get(f"pos_{split}_data_paths")
        if isinstance(paths, list) and paths and values.get(f"{split}_data_weights") is None:
            values[f"{split}_data_weights"] = [1.0] * len(paths)
