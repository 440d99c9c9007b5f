"""GPT-NeoX's YAML files as a job: what `config.neox_config` writes, and what others wrote.

Where a file says nothing, GPT-NeoX's own default counts, from the table of its options; the job
says it where trainkit's default is another.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from trainkit.base.errors import ConfigError
from trainkit.base.lazy_dataclasses import dataclass
from trainkit.engines.given import Given, number_of
from trainkit.engines.gpt_neox.arguments import ZERO_DEFAULTS, attention_kinds
from trainkit.engines.gpt_neox.config import (
    BUCKET_ELEMENTS,
    INIT_METHODS,
    SAID_BY_THE_JOB,
    SAID_IN_TABLES,
)
from trainkit.engines.hydra_config import read_config
from trainkit.engines.imported import ImportedJob
from trainkit.engines.options import load_table, tables_of
from trainkit.families import FAMILIES
from trainkit.families.contract import FEEDFORWARDS
from trainkit.jobs.messages import suggest


@dataclass
class NeoxValues(Given):
    """What the files say together.

    Args:
        said: all names that the files had.
        keep_last: checkpoints that are kept.
        layers: of the model.
    """

    said: frozenset[str] = frozenset()
    keep_last: int = 1
    layers: int = 0

    @classmethod
    def read(cls, paths: Sequence[Path], defaults: Mapping[str, object]) -> NeoxValues:
        """The files together, as NeoXArgs.from_ymls reads them: dashes are underscores.

        Raises ConfigError: a file cannot be read or is not a table, or a key is in two of them.
        """
        given: dict[str, object] = {}
        places: dict[str, Path] = {}
        for path in paths:
            for key, value in read_config(path).items():
                name = key.replace("-", "_")
                if name in given:
                    raise ConfigError(
                        f"{path}: {key} is in {places[name]} too, and gpt-neox refuses that",
                        hint="leave it in one of them",
                    )
                given[name] = value
                places[name] = path
        values = cls(given, defaults, said=frozenset(given))
        layers = values.peek("num_layers")
        if not isinstance(layers, int):
            raise ConfigError(
                f"{', '.join(map(str, paths))}: no num_layers, so no model is described",
                hint="name all files that deepy.py is given, model and data",
            )
        values.layers = layers
        return values


# (norm, activation, pos_emb): the family
SHAPES = {
    ("layernorm", "gelu", "learned"): "gpt",
    ("layernorm", "gelu", "rotary"): "gpt-neox",
    ("rmsnorm", "swiglu", "rotary"): "llama",
}
PRECISIONS = {"fp16": "fp16", "bfloat16": "bf16", "fp32": "fp32"}
# what `config.neox_config` writes for every job, and DeepSpeed's default where a file is silent
ZERO_WRITTEN: Mapping[str, object] = {
    "allgather_partitions": True,
    "allgather_bucket_size": BUCKET_ELEMENTS,
    "overlap_comm": True,
    "reduce_scatter": True,
    "reduce_bucket_size": BUCKET_ELEMENTS,
    "contiguous_gradients": True,
}
FP16_DEFAULTS: Mapping[str, float] = {
    "loss_scale": 0,
    "loss_scale_window": 1000,
    "initial_scale_power": 16,
    "hysteresis": 2,
    "min_loss_scale": 1,
}
# The cluster, the run's folder and its records say these.
ELSEWHERE: Mapping[str, str] = {
    "save": "a run keeps its checkpoints in its own folder",
    "tensorboard_dir": "a run keeps them in its own folder",
    "log_dir": "a run keeps what its ranks print in its own folder",
    "use_wandb": "GPT-NeoX reports to W&B wherever it finds a key; add wandb = { project = .. }",
    "distributed_backend": "the cluster's device decides",
    "data_impl": "trainkit's pairs are of the kind mmap",
    "batch_size": "gpt-neox puts train_micro_batch_size_per_gpu in its place",
    "clip_grad": "gpt-neox puts gradient_clipping in its place",
}
QUIET: Mapping[str, tuple[object, ...]] = {  # nothing is lost with these values
    "distributed_backend": ("nccl", "gloo"),
    "data_impl": ("mmap", "infer"),
    "use_wandb": (True, False),
}
WRITTEN: Mapping[str, object] = {  # as `config.neox_config` has them in any case
    "output_layer_parallelism": "column",
    "checkpoint_scale": "linear",
    "checkpoint_num_layers": 1,
}


def import_neox(paths: Sequence[Path], name: str, version: str = "") -> ImportedJob:
    """The job that GPT-NeoX's configuration files describe together.

    Args:
        paths: files that deepy.py would be given.
        name: of the job to be.
        version: whose options; "": the newest known.

    Raises ConfigError: a file that cannot be read or is none of these, a key in two of them, a
    model that no family is, or a length that is not given in iterations.
    """
    table = load_table("gpt-neox", version or list(tables_of("gpt-neox"))[-1])
    defaults = {option.name: option.default for option in table.options.values()}
    values = NeoxValues.read(paths, defaults)
    values.left += filter(None, [table.notice])
    known = [option.name for option in table.options.values()]
    for key in list(values.given):
        if key not in defaults:
            found = values.given.pop(key)
            hint = suggest(key, known)
            values.leave(
                key, found, f"gpt-neox {table.version} has no such option. {hint}".rstrip()
            )
    model = _model(values)
    return ImportedJob(
        name=name,
        engine="gpt-neox",
        model=model,
        parallelism=_parallelism(values),
        training=_training(values),
        job=_job(values),
        dataset=_dataset(values),
        tokenizer=_tokenizer(values),
        engine_args=_engine_args(values),
        not_taken=tuple(values.left),
    )


def _model(values: NeoxValues) -> dict[str, object]:
    shape = tuple(str(values.take(key)).lower() for key in ("norm", "activation", "pos_emb"))
    family = SHAPES.get((shape[0], shape[1], shape[2]))
    if family is None:
        raise ConfigError(
            f"no family of models has norm = '{shape[0]}', activation = '{shape[1]}' and pos_emb ="
            f" '{shape[2]}'",
            hint="families: gpt, gpt-neox and llama",
        )
    gated = FEEDFORWARDS[FAMILIES[family].activation].gated
    width = _ffn_width(values, gated=gated)
    found: dict[str, object] = {
        "family": family,
        "num_layers": values.take("num_layers"),
        "hidden_size": values.take("hidden_size"),
        "num_attention_heads": values.take("num_attention_heads"),
        "num_query_groups": values.take("num_kv_heads"),
        "ffn_hidden_size": width,
        "seq_length": values.take("seq_length"),
        "max_position_embeddings": values.take("max_position_embeddings"),
        "make_vocab_size_divisible_by": values.take("make_vocab_size_divisible_by"),
        "untie_embeddings_and_output_weights": values.take("no_weight_tying"),
        "rotary_percent": values.number("rotary_pct"),
        "rotary_base": values.number("rotary_emb_base"),
        "gpt_j_residual": values.take("gpt_j_residual"),
        "gpt_j_tied": values.take("gpt_j_tied"),
        "gelu": None if gated else ("tanh" if values.take("bias_gelu_fusion") else "exact"),
        "attention_dropout": values.number("attention_dropout"),
        "hidden_dropout": values.number("hidden_dropout"),
        **_initialization(values),
        "layernorm_epsilon": values.take("rms_norm_epsilon" if gated else "layernorm_epsilon"),
    }
    for key in ("use_bias_in_norms", "use_bias_in_attn_linear", "use_bias_in_mlp"):
        bias = values.take(key)
        if bias != FAMILIES[family].bias:
            values.leave(key, bias, f"family {family} has {not bias}")
    return {key: found[key] for key in found if _is_for(family, key, found, values)}


def _is_for(family: str, key: str, found: Mapping[str, object], values: NeoxValues) -> bool:
    """Whether a family has a key; a value that it has in another way is left."""
    families = [each for each, one in FAMILIES.items() if key in one.settings]
    if not families or family in families:
        return found[key] is not None
    theirs = next(name for name, place in SAID_BY_THE_JOB.items() if place == f"model.{key}")
    if found[key] not in (values.defaults[theirs], None):
        values.leave(theirs, found[key], f"family {family} has no {key}")
    return False


def _ffn_width(values: NeoxValues, *, gated: bool) -> int | None:
    """Of a gated MLP gate and value have two thirds of intermediate_size together
    (megatron/model/transformer.py, ParallelMLP)."""
    width = values.whole("intermediate_size")
    factor = values.number("expansion_factor")
    multiple = values.whole("mlp_multiple_of") or 1
    hidden = values.peek("hidden_size")
    if width is not None and factor is not None:
        values.leave("expansion_factor", factor, "intermediate_size counts")
    elif factor is not None and isinstance(hidden, int):
        width = int(factor * hidden)
    if width is None and (gated or multiple > 1) and isinstance(hidden, int):
        width = 4 * hidden
    if width is None:
        return None
    if gated:
        width = int(width * 2 / 3) // 2
    return -(-width // multiple) * multiple


def _initialization(values: NeoxValues) -> dict[str, object]:
    ours = {theirs: key for key, theirs in INIT_METHODS.items()}
    found: dict[str, object] = {}
    for key in ("init_method", "output_layer_init_method"):
        method = str(values.take(key))
        if method in ours:
            found[key] = ours[method]
        else:
            values.leave(key, method, f"trainkit has {', '.join(INIT_METHODS)}")
    found["init_method_std"] = values.number("init_method_std")
    return found


def _parallelism(values: NeoxValues) -> dict[str, object]:
    pipe = values.whole("pipe_parallel_size") or 0
    zero = values.table("zero_optimization") or dict(ZERO_DEFAULTS)
    stage = zero.pop("stage", 0)
    # two ways to train on one stage; ZeRO-2 and 3 go without the pipeline engine in any case
    if pipe == 0 and stage in (0, 1):
        values.engine_args["pipe_parallel_size"] = 0
    other = {
        key: zero.get(key, ZERO_DEFAULTS.get(key))
        for key in {**ZERO_WRITTEN, **zero}
        if zero.get(key, ZERO_DEFAULTS.get(key)) != ZERO_WRITTEN.get(key)
    }
    if other:
        values.engine_args["zero_optimization"] = other
    return {
        "tensor_model_parallel_size": max(1, values.whole("model_parallel_size") or 1),
        "pipeline_model_parallel_size": max(1, pipe),
        "sequence_parallel": values.take("sequence_parallel"),
        "zero_stage": stage,
    }


def _training(values: NeoxValues) -> dict[str, object]:
    iterations = values.whole("train_iters")
    if iterations is None:
        raise ConfigError(
            "the files give no train_iters, and trainkit's jobs last so many iterations",
            hint="write train_iters into one of them (train_epochs has no counterpart)",
        )
    found: dict[str, object] = {
        **_batch(values),
        "train_iters": iterations,
        **_optimizer(values),
        **_schedule(values, iterations),
        **_precision(values),
        "recompute_granularity": {True: "full", False: "none"}[
            bool(values.take("checkpoint_activations"))
        ],
        "eod_mask_loss": values.take("eod_mask_loss"),
        "seed": values.take("seed"),
        "log_interval": values.take("log_interval"),
        "eval_iters": values.take("eval_iters"),
    }
    interval = values.whole("eval_interval")
    if interval is not None and interval <= iterations:  # above: at the end only
        found["eval_interval"] = interval
    return found


def _batch(values: NeoxValues) -> dict[str, object]:
    whole = values.whole("train_batch_size")
    micro = values.whole("train_micro_batch_size_per_gpu")
    if micro is None:
        micro = 1
        values.left.append(
            "train_micro_batch_size_per_gpu is not given: micro_batch_size = 1 stands for it"
        )
    if whole is not None:
        return {"micro_batch_size": micro, "global_batch_size": whole}
    steps = values.whole("gradient_accumulation_steps")
    return {"micro_batch_size": micro, "gradient_accumulation_steps": steps or 1}


def _optimizer(values: NeoxValues) -> dict[str, object]:
    optimizer = values.table("optimizer") or {"type": "Adam"}
    values.given["optimizer.params"] = optimizer.pop("params", None)
    params = values.table("optimizer.params") or {}
    betas = params.pop("betas", [0.9, 0.999])
    if not isinstance(betas, list) or len(betas) != 2:
        raise ConfigError(f"optimizer.params.betas = {betas!r}: two numbers are needed here")
    found: dict[str, object] = {
        "lr": number_of("optimizer.params.lr", params.pop("lr", 0.001)),
        "adam_beta1": number_of("optimizer.params.betas", betas[0]),
        "adam_beta2": number_of("optimizer.params.betas", betas[1]),
        "adam_eps": number_of("optimizer.params.eps", params.pop("eps", 1e-8)),
        "weight_decay": values.number("weight_decay"),
        "clip_grad": values.number("gradient_clipping"),
    }
    if str(optimizer.get("type", "Adam")).lower() == "adam":
        optimizer.pop("type", None)
    if params:
        optimizer["params"] = params
    if optimizer:
        values.engine_args["optimizer"] = optimizer
    return found


def _schedule(values: NeoxValues, iterations: int) -> dict[str, object]:
    found: dict[str, object] = {
        "min_lr": values.number("min_lr"),
        "lr_warmup_fraction": values.number("warmup"),
    }
    style = str(values.take("lr_decay_style"))
    if style in ("cosine", "linear", "constant"):
        found["lr_decay_style"] = style
    else:
        values.leave("lr_decay_style", style, "trainkit has cosine, linear and constant")
    steps = values.whole("lr_decay_iters")
    part = values.number("lr_decay_fraction")
    if steps is None and part is not None:
        steps = max(1, math.floor(iterations * part))
    found["lr_decay_iters"] = steps or iterations
    save = values.whole("checkpoint_factor")
    if save is not None:
        found["save_interval"] = save
    keep = values.whole("keep_last_n_checkpoints")
    # it keeps all of them where the file is silent
    values.keep_last = keep or -(-iterations // (save or iterations)) + 1
    return found


def _precision(values: NeoxValues) -> dict[str, object]:
    """Of DeepSpeed's two blocks, the one that is not asked for is left."""
    blocks = {"fp16": values.table("fp16") or {}, "bf16": values.table("bf16") or {}}
    asked = {key: bool(block.pop("enabled", False)) for key, block in blocks.items()}
    if asked["fp16"] and blocks["fp16"].get("type") == "bfloat16":
        values.leave(
            "fp16.type", blocks["fp16"].pop("type"), "bf16, as gpt-neox took it until 2023"
        )
        asked = {"fp16": False, "bf16": True}
    said = values.take("precision")
    if said is None:
        said = "fp16" if asked["fp16"] else "bfloat16" if asked["bf16"] else "fp32"
    precision = PRECISIONS.get(str(said))
    if precision is None:
        raise ConfigError(f"precision = '{said}' is none of {', '.join(PRECISIONS)}")
    if precision == "bf16":
        accumulated = values.table("data_types") or {"grad_accum_dtype": "bf16"}
        if accumulated != {"grad_accum_dtype": "fp32"}:
            values.engine_args["data_types"] = accumulated
    found: dict[str, object] = {"precision": precision}
    if precision == "fp16":
        found |= _loss_scale(blocks["fp16"])
    for key, block in blocks.items():
        if block and key == precision:
            values.engine_args[key] = block
        elif block or (asked[key] and key != precision):
            values.leave(key, block or {"enabled": True}, f"the precision is {precision}")
    return found


def _loss_scale(fp16: dict[str, object]) -> dict[str, object]:
    """Take the loss scale out of DeepSpeed's block."""
    numbers = {
        key: number_of(f"fp16.{key}", fp16.pop(key, usual)) for key, usual in FP16_DEFAULTS.items()
    }
    for key, usual in (("fp16", True), ("type", "fp16")):
        if fp16.get(key) == usual:  # DeepSpeed reads neither
            del fp16[key]
    return {
        "loss_scale": numbers["loss_scale"] or None,
        "loss_scale_window": int(numbers["loss_scale_window"]),
        "initial_loss_scale": 2.0 ** numbers["initial_scale_power"],
        "hysteresis": int(numbers["hysteresis"]),
        "min_loss_scale": numbers["min_loss_scale"],
    }


def _job(values: NeoxValues) -> dict[str, object]:
    checkpoint: dict[str, object] = {"keep_last": values.keep_last}
    extra = values.take("extra_save_iters")
    if extra == [0]:
        checkpoint["save_first"] = True
    elif extra:
        values.engine_args["extra_save_iters"] = extra
    found: dict[str, object] = {"checkpoint": checkpoint}
    names = {"wandb_project": "project", "wandb_team": "entity", "wandb_group": "group"}
    if values.peek("use_wandb"):
        wandb = {ours: values.take(theirs) for theirs, ours in names.items()}
        found["wandb"] = {key: value for key, value in wandb.items() if value is not None}
    if values.take("profile"):
        steps = {key: values.take(f"profile_step_{key}") for key in ("start", "stop")}
        found["profile"] = steps
    return found


def _dataset(values: NeoxValues) -> dict[str, object]:
    split = str(values.take("split")).replace(" ", "").replace("/", ",")
    path = values.take("data_path")
    if path is not None:
        return {"source": "indexed", "prefixes": [path], "split": split}
    own = {name: values.peek(f"{name}_data_paths") for name in ("train", "test", "valid")}
    prefixes: list[object] = []
    for paths in own.values():
        if not isinstance(paths, list) or len(paths) != 1:
            # those that there are, are left by _engine_args
            values.left.append("no data_path: the job needs a dataset")
            return {}
        prefixes += paths
    for name in own:
        values.drop(f"{name}_data_paths")
        values.drop(f"{name}_data_weights")
    if len(set(prefixes)) == len(own):
        return {"source": "indexed", "prefixes": prefixes, "test_files": 1, "valid_files": 1}
    values.left.append(
        f"train_data_paths, valid_data_paths, test_data_paths = {prefixes!r}: all read whole; here"
        f" split = '{split}' cuts the first"
    )
    return {"source": "indexed", "prefixes": prefixes[:1], "split": split}


def _tokenizer(values: NeoxValues) -> dict[str, object]:
    kind = str(values.take("tokenizer_type"))
    vocabulary = values.peek("vocab_file")
    if kind.lower() == "gpt2bpetokenizer" and vocabulary and values.peek("merge_file"):
        values.drop("vocab_file")
        return {
            "type": "gpt2",
            "vocab_file": vocabulary,
            "merge_file": values.take("merge_file"),
        }
    if kind.lower() == "hftokenizer" and vocabulary:
        return {"type": "file", "path": values.take("vocab_file")}
    values.leave("tokenizer_type", kind, "trainkit needs a tokenizer.json, or GPT-2's two files")
    return {}


def _engine_args(values: NeoxValues) -> dict[str, object]:
    """What is left and has no key of its own; and the list of what has no place."""
    load = values.take("load")
    if load is not None and load != values.peek("save"):
        values.engine_args["load"] = load
    for key, why in ELSEWHERE.items():
        found = values.take(key)
        if key in values.said and found not in QUIET.get(key, (None,)):
            values.leave(key, found, why)
    pattern = values.take("attention_config")
    layers = values.layers
    if pattern is not None and (kinds := attention_kinds(pattern, layers)) != ["global"] * layers:
        values.engine_args["attention_config"] = kinds
    for key, found in list(values.given.items()):
        values.drop(key)
        if found == values.defaults[key] or found == WRITTEN.get(key, values.defaults[key]):
            continue
        if key in SAID_BY_THE_JOB:
            place = SAID_BY_THE_JOB[key]
            values.leave(key, found, f"what says it here: {place}")
        else:
            values.engine_args[key] = found
    assert not set(SAID_IN_TABLES) & set(values.engine_args)
    return values.engine_args
