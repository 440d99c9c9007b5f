"""A configuration of NeMo's megatron_gpt_pretraining.py as a job: what the launcher writes, and
what neuronx-nemo-megatron's scripts say on its command line.

Keys: NeMo 1.12 and 2.1, examples/nlp/language_modeling/conf/megatron_gpt_config.yaml.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from pathlib import PurePosixPath

from trainkit.base.errors import ConfigError
from trainkit.base.lazy_dataclasses import dataclass, field
from trainkit.engines.given import Given
from trainkit.engines.hydra_config import Unknown
from trainkit.engines.options import OptionTable

PREFIX = "model.data.data_prefix"
CONSTANT = "model.optim.sched.constant_steps"
_RECOMPUTE = "model.activations_checkpoint"
_TOP_K = "exp_manager.checkpoint_callback_params.save_top_k"
_MOCK_SPLIT = "99990,8,2"  # the launcher's own, and trainkit's
# the blocks of family llama, by NeMo's keys
LLAMA_BLOCKS: Mapping[str, object] = {
    "model.normalization": "rmsnorm",
    "model.activation": "fast-swiglu",
    "model.bias": False,
    "model.position_embedding_type": "rope",
    "model.rotary_percentage": 1.0,
}
# values that the command of every job has
_IMPLIED: Mapping[str, tuple[object, ...]] = {
    "name": ("megatron_gpt",),
    "trainer.accumulate_grad_batches": (1,),
    "trainer.max_epochs": (None, -1),
    "trainer.logger": (False,),
    "trainer.enable_checkpointing": (False,),
    "model.data.data_impl": ("mmap",),
    "model.tokenizer.library": ("megatron",),
}


@dataclass(frozen=True)
class Dialect:
    """How one engine has NeMo's configuration.

    Args:
        engine: its name in jobs.toml.
        table: the keys of its version.
        set_by: keys that trainkit sets from a job, and the keys of jobs.toml that say them.
        usual: what trainkit's command says by itself of keys that no key of jobs.toml says.
        recompute: activations_checkpoint_method and _num_layers that go with each granularity.
        zero: names of optimizers that share their state out.
    """

    engine: str
    table: OptionTable
    set_by: Mapping[str, str]
    usual: Mapping[str, object]
    recompute: Mapping[str, tuple[object, object]]
    zero: tuple[str, ...] = ()


@dataclass
class NemoValues(Given):
    """What a configuration says, by dotted keys.

    Args:
        dialect: of the engine.
    """

    dialect: Dialect = field(kw_only=True)

    def peek(self, key: str) -> object:
        """A value, without taking it. Raises ConfigError: the files do not say it."""
        found = super().peek(key)
        if isinstance(found, Unknown):
            raise ConfigError(
                f"{key} is not known: {found.why}",
                hint=f"give it after the file: FILE,{found.key}=VALUE",
            )
        return found


def taken_model(values: NemoValues) -> dict[str, object]:
    """[models.X]. Raises ConfigError: a value is missing or of another kind."""
    hidden = values.count("model.hidden_size")
    length = values.count("model.encoder_seq_length")
    values.drop_implied("model.data.seq_length", length)
    llama = _is_llama(values)
    found: dict[str, object] = {
        "family": "llama" if llama else "gpt",
        "num_layers": values.count("model.num_layers"),
        "hidden_size": hidden,
        "num_attention_heads": values.count("model.num_attention_heads"),
        "seq_length": length,
        "max_position_embeddings": values.whole("model.max_position_embeddings") or length,
    }
    width = values.whole("model.ffn_hidden_size") or 4 * hidden
    if llama or width != 4 * hidden:
        found["ffn_hidden_size"] = width
    if (channels := values.whole("model.kv_channels")) is not None:
        found["kv_channels"] = channels
    groups = values.whole("model.num_query_groups") or found["num_attention_heads"]
    if llama:
        found["num_query_groups"] = groups
        found["rotary_base"] = values.number("model.rotary_base") or 10000.0
    else:
        found["gelu"] = "tanh" if values.flag("model.bias_activation_fusion") else "exact"
        if groups != found["num_attention_heads"]:
            values.leave("model.num_query_groups", groups, "family gpt has none")
    untied = values.take("model.share_embeddings_and_output_weights") is False
    scaled = values.take("model.use_scaled_init_method") is not False
    found |= {
        "make_vocab_size_divisible_by": values.count("model.make_vocab_size_divisible_by"),
        "untie_embeddings_and_output_weights": untied,
        "attention_dropout": values.number("model.attention_dropout"),
        "hidden_dropout": values.number("model.hidden_dropout"),
        "init_method": "normal",
        "output_layer_init_method": "scaled" if scaled else "normal",
        "init_method_std": values.number("model.init_method_std"),
        "layernorm_epsilon": values.number("model.layernorm_epsilon"),
    }
    return found


def _is_llama(values: NemoValues) -> bool:
    """Whether every block is family llama's, whose keys are taken then. Those of others are a
    GPT's with keys of NeMo's own."""
    same = all(_same(values.peek(key), value) for key, value in LLAMA_BLOCKS.items())
    for key in LLAMA_BLOCKS if same else ():
        values.take(key)
    return same


def taken_parallelism(values: NemoValues) -> dict[str, object]:
    """[jobs.X.parallelism]."""
    tensor = values.count("model.tensor_model_parallel_size")
    stages = values.count("model.pipeline_model_parallel_size")
    found: dict[str, object] = {
        "tensor_model_parallel_size": tensor,
        "pipeline_model_parallel_size": stages,
        "sequence_parallel": values.flag("model.sequence_parallel"),
    }
    values.drop_implied(
        "exp_manager.checkpoint_callback_params.model_parallel_size", tensor * stages
    )
    chunks = values.whole("model.virtual_pipeline_model_parallel_size")
    if chunks is not None and chunks > 1:
        found["virtual_pipeline_model_parallel_size"] = chunks
    elif chunks is not None:
        values.leave("model.virtual_pipeline_model_parallel_size", chunks, "a stage has one chunk")
    if values.dialect.zero:
        optimizer = str(values.peek("model.optim.name"))
        found["zero_stage"] = int(optimizer in values.dialect.zero)
    else:
        found["zero_stage"] = int(values.flag("model.wrap_with_zero"))
    return found


def taken_training(values: NemoValues) -> dict[str, object]:
    """[jobs.X.training], without its batch and its precision."""
    steps = values.count("trainer.max_steps")
    betas = values.take("model.optim.betas")
    if not isinstance(betas, list) or len(betas) != 2:
        raise ConfigError(f"model.optim.betas = {betas!r}: two numbers are needed here")
    values.given |= {f"model.optim.betas.{at}": each for at, each in enumerate(betas)}
    clip = values.number("trainer.gradient_clip_val")
    found: dict[str, object] = {
        "micro_batch_size": values.count("model.micro_batch_size"),
        "train_iters": steps,
        "lr": values.number("model.optim.lr"),
        "min_lr": values.number("model.optim.sched.min_lr") or 0.0,
        "lr_warmup_iters": values.whole("model.optim.sched.warmup_steps") or 0,
        **_decay(values, steps),
        "weight_decay": values.number("model.optim.weight_decay") or 0.0,
        "adam_beta1": values.number("model.optim.betas.0"),
        "adam_beta2": values.number("model.optim.betas.1"),
        "adam_eps": values.number("model.optim.eps") or 1e-8,
        "clip_grad": clip or 0.0,
        "recompute_granularity": _recompute(values),
        "seed": values.whole("model.seed"),
        "log_interval": values.count("trainer.log_every_n_steps"),
        **_intervals(values, steps),
    }
    for key in ("reset_attention_mask", "reset_position_ids", "eod_mask_loss"):
        if values.flag(f"model.data.{key}"):
            found[key] = True
    rampup = values.take("model.rampup_batch_size")
    if rampup is not None:
        found["rampup_batch_size"] = rampup
    return found


def _decay(values: NemoValues, steps: int) -> dict[str, object]:
    """NeMo holds the rate at min_lr for the last constant_steps of max_steps."""
    schedule = values.take("model.optim.sched.name")
    if schedule != "CosineAnnealing":
        values.leave("model.optim.sched.name", schedule, "trainkit has NeMo's CosineAnnealing")
    constant = values.whole(CONSTANT) or 0
    found: dict[str, object] = {"lr_decay_style": "cosine"}
    if constant < steps:
        found["lr_decay_iters"] = steps - constant
    else:
        values.engine_args[CONSTANT] = constant
    return found


def _intervals(values: NemoValues, steps: int) -> dict[str, object]:
    every = values.take("trainer.val_check_interval")
    batches = values.take("trainer.limit_val_batches")
    tests = values.take("trainer.limit_test_batches")
    found: dict[str, object] = {}
    if isinstance(every, int) and not isinstance(every, bool):
        if 0 < every <= steps:  # above: at the end only
            found["eval_interval"] = every
    elif every is not None:
        values.leave("trainer.val_check_interval", every, "a number of steps is needed here")
    if isinstance(batches, int) or batches == 0.0:
        found["eval_iters"] = int(batches)
    elif batches is not None:
        values.leave("trainer.limit_val_batches", batches, "a number of batches is needed here")
    if tests not in (None, batches):
        values.leave("trainer.limit_test_batches", tests, "training.eval_iters says both")
    saves = values.whole("exp_manager.checkpoint_callback_params.every_n_train_steps")
    if saves is not None:
        found["save_interval"] = saves
    return found


def _recompute(values: NemoValues) -> str:
    granularity = values.take(f"{_RECOMPUTE}_granularity")
    if granularity == "full" and values.peek(f"{_RECOMPUTE}_num_layers") == 0:
        values.drop_implied(f"{_RECOMPUTE}_num_layers", 0)
        values.drop_implied(f"{_RECOMPUTE}_method", "block")
        return "none"
    if granularity in (None, "none"):
        return "none"
    if granularity not in ("full", "selective"):
        raise ConfigError(
            f"{_RECOMPUTE}_granularity = {granularity!r}: it is 'full', 'selective' or null"
        )
    method, number = values.dialect.recompute[str(granularity)]
    values.drop_implied(f"{_RECOMPUTE}_method", method)
    values.drop_implied(f"{_RECOMPUTE}_num_layers", number)
    return str(granularity)


def taken_job(values: NemoValues) -> dict[str, object]:
    """`nodes`, checkpoints and W&B of [jobs.X]."""
    found: dict[str, object] = {"nodes": values.count("trainer.num_nodes")}
    keep = values.whole(_TOP_K)
    if keep is not None and keep > 0:
        found["checkpoint"] = {"keep_last": keep}
    elif keep is not None:
        values.leave(_TOP_K, keep, "checkpoint.keep_last is 1 at least; here its default")
    if values.flag("exp_manager.create_wandb_logger"):
        found["wandb"] = {"project": values.take("exp_manager.wandb_logger_kwargs.project")}
    return found


def taken_data(values: NemoValues) -> tuple[dict[str, object], dict[str, object]]:
    """([datasets.X], [tokenizers.X])."""
    tokenizer: dict[str, object] = {}
    kind = values.take("model.tokenizer.type")
    files = [values.peek(f"model.tokenizer.{each}_file") for each in ("vocab", "merge")]
    if kind == "GPT2BPETokenizer" and all(files):
        tokenizer = {
            "type": "gpt2",
            "vocab_size": 50257,
            "vocab_file": values.take("model.tokenizer.vocab_file"),
            "merge_file": values.take("model.tokenizer.merge_file"),
        }
    else:
        why = "trainkit gives NeMo GPT-2's two files: [tokenizers.X] type = 'gpt2'; others need"
        values.leave("model.tokenizer.type", kind, f"{why} engine = 'native' or 'megatron-lm'")
    prefixes = values.take(PREFIX)
    split = values.take("model.data.splits_string")
    if values.given.get("model.data.data_impl") == "mock":
        del values.given["model.data.data_impl"]
        if prefixes or split != _MOCK_SPLIT:
            values.leave(PREFIX, prefixes, f"mock data have no files, and are split {_MOCK_SPLIT}")
        return {"source": "mock"}, tokenizer
    dataset = _pairs(values, prefixes)
    if dataset and split is not None:
        dataset["split"] = str(split).replace(" ", "")
    return dataset, tokenizer


def _pairs(values: NemoValues, said: object) -> dict[str, object]:
    """Files with their weights by turns, or without any."""
    words = said if isinstance(said, list) else [said]
    weights = words[::2]
    prefixes = words[1::2]
    if all(isinstance(each, str) for each in words):
        weights = []
        prefixes = words
    if said is None or not all(isinstance(each, str) for each in prefixes) or not words:
        values.left.append(f"{PREFIX} = {said!r}: the job needs a dataset")
        return {}
    if len(words) > 1 and weights:
        if len(weights) != len(prefixes) or not all(type(each) in (int, float) for each in weights):
            raise ConfigError(f"{PREFIX} has no weight and file by turns")
        if len(prefixes) > 1:
            _weigh(values, weights, [str(each) for each in prefixes])
    return {"source": "indexed", "prefixes": prefixes}


def _weigh(values: NemoValues, weights: Sequence[object], prefixes: Sequence[str]) -> None:
    if PREFIX in values.dialect.set_by:
        why = "here files count by their sizes; give each a [datasets.X] of its own and blend them"
        values.leave(PREFIX, ", ".join(map(str, weights)), why)
        return
    names = [PurePosixPath(each).name for each in prefixes]
    if len(set(names)) < len(names):
        names = list(prefixes)
    values.engine_args[PREFIX] = [*itertools.chain(*zip(weights, names, strict=True))]


def _same(first: object, second: object) -> bool:
    return first == second and isinstance(first, bool) == isinstance(second, bool)


def taken_rest(values: NemoValues) -> dict[str, object]:
    """What is left: implied, trainkit's own, or engine_args; the rest is listed."""
    dialect = values.dialect
    for key, value in values.given.items():
        if value in _IMPLIED.get(key, ()) or _same(dialect.usual.get(key), value):
            continue
        if isinstance(value, Unknown):
            values.left.append(f"{key}: {value.why}")
        elif key in dialect.set_by:
            values.leave(key, value, f"{dialect.set_by[key]} stands for it")
        elif value is None:
            if dialect.usual.get(key) is not None:
                values.leave(key, None, "TOML has no null")
        elif key in dialect.table.options:
            values.engine_args[key] = value
        else:
            values.engine_args[f"+{key}"] = value
    values.given.clear()
    return values.engine_args
