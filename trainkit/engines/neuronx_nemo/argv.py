"""The command of neuronx-nemo-megatron's scripts, from a job: a pure function of it and of the
generation of the scripts.

Sources: test.sh and train_setup.sh of nemo/examples/nlp/language_modeling at f4743ce and on the
branch 2.13.1_release; conf/megatron_gpt_config.yaml; nemo/collections/nlp/models/
language_modeling/megatron_gpt_model.py for keys that the code reads and the configuration lacks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from trainkit.base.errors import ConfigError, Problem, raise_problems
from trainkit.base.lazy_dataclasses import dataclass
from trainkit.engines.hydra_words import hydra_value
from trainkit.engines.job_values import counterpart_problems
from trainkit.engines.megatron_lm.data import SPLITS, MegatronData
from trainkit.engines.neuronx_nemo.generations import (
    ENGINE,
    PRECISION_KEY,
    PRECISIONS,
    USUAL,
    Precision,
    ScriptGeneration,
)
from trainkit.engines.neuronx_nemo.words import NeuronxWords, checkpoint_word, decimal, dotted
from trainkit.engines.options import OptionTable
from trainkit.engines.pair_weights import pair_weights
from trainkit.jobs.schema import Job

if TYPE_CHECKING:  # it imports numpy, which planning does without
    from trainkit.data.order.resolve_pairs import SplitPair


def weighted(pairs: Sequence[SplitPair]) -> list[float | str]:
    """Each prefix after its weight: a single one after 1.0, as the scripts have it, several
    without weights of their own after their bytes."""
    weights = [1.0] if len(pairs) == 1 else pair_weights(pairs)
    return [
        word
        for weight, pair in zip(weights, pairs, strict=True)
        for word in (weight, str(pair.prefix))
    ]


# keys that only have their default with the engine, and why
NO_COUNTERPART: Mapping[str, str] = {
    "training.z_loss": "it has none",
    "training.rampup_batch_size": "its schedule counts steps of one batch size",
    "training.lr_warmup_init": "its warmup begins at lr / warmup steps",
    "training.recompute_every": "it recomputes every block, or none",
    "parallelism.context_parallel_size": "its ranks have whole samples",
    "training.on_nan": "it goes on",
    "training.on_spike": "it does not look for spikes",
    "training.max_skipped_in_a_row": "it counts no skipped steps",
    "training.replay_interval": "engine native does that",
    "training.ema_decay": "engine native does that",
    "training.fp8_recipe": "engine native does that",
    "training.deterministic": "the compiler decides",
    "training.compile": "all of it is compiled: invoke precompile",
    "checkpoint.memory_interval": "engine native does that",
    "checkpoint.keep_best": "it keeps the newest, keep_last",
    "checkpoint.save_first": "it saves every save_interval steps",
    "init_from": "engine_args say what it begins with",
    "kernels": "it has its own",
    "sample_order": "it builds its own index of samples",
    "profile": "neuron-profile does that",
}
CHOICES: Mapping[str, tuple[str, ...]] = {
    "model.init_method": ("normal",),
    "model.output_layer_init_method": ("scaled",),
    "training.lr_decay_style": ("cosine",),
    "training.optimizer": ("adam",),
}
SCRIPT = "megatron_gpt_pretraining.py"
CONFIG = ("--config-path=conf", "--config-name=megatron_gpt_config")
COMPILE_STEPS = 4  # train_setup.sh: TRAIN_ITERS of COMPILE=1
PORT = 41000  # MASTER_PORT
CREATES = "exp_manager.create_checkpoint_callback"
_CALLBACK = "exp_manager.checkpoint_callback_params"


@dataclass(frozen=True)
class NeuronxPlaces:
    """Where one attempt reads and writes.

    Args:
        logs: what exp_manager writes.
        checkpoints: the folder of the run's checkpoints.
        name: of the run, for reports.
        resume: the checkpoint to go on from, without the folders of its ranks; None: none.
    """

    logs: Path
    checkpoints: Path
    name: str
    resume: Path | None = None


def neuronx_argv(
    job: Job,
    generation: ScriptGeneration,
    table: OptionTable,
    data: MegatronData,
    places: NeuronxPlaces,
) -> tuple[str, ...]:
    """torchrun's words and those of the script, after `torchrun`.

    Args:
        job: the job.
        generation: of the scripts.
        table: the keys of the version's configuration.
        data: what it reads.
        places: where the attempt reads and writes.

    Raises ConfigError: everything that the version cannot do, or the job says wrong.
    """
    words = _collected(job, generation, table, data, places)
    raise_problems(words.problems)
    return (*launch_words(job), SCRIPT, *CONFIG, *words.words(), *job.args)


def launch_words(job: Job) -> tuple[str, ...]:
    """DISTRIBUTED_ARGS of the scripts: on one machine they name it localhost."""
    address = "${MASTER_ADDR}"
    if job.cluster.launcher_traits.one_machine:
        address = "localhost"
    return (
        "--nproc_per_node",
        str(job.ranks_per_node),
        "--nnodes",
        str(job.nodes),
        "--node_rank",
        "${NODE_RANK}",
        "--master_addr",
        address,
        "--master_port",
        "${MASTER_PORT}",
    )


def argv_problems(job: Job, generation: ScriptGeneration, table: OptionTable) -> list[Problem]:
    """What of a job a version cannot do, before anything of its data is there."""
    places = NeuronxPlaces(Path(), Path(), "")
    return _collected(job, generation, table, MegatronData({}, None), places).problems


def precision_of(job: Job, generation: ScriptGeneration) -> Precision:
    """The job's mode. Raises ConfigError: the generation has no such mode."""
    given = job.engine_args.get(PRECISION_KEY, USUAL.get(job.training.precision))
    if not isinstance(given, str) or given not in generation.precisions:
        raise ConfigError(
            f"training.precision = '{job.training.precision}' with engine_args.{PRECISION_KEY} ="
            f" {job.engine_args.get(PRECISION_KEY)!r}: the scripts of {generation.version} have"
            f" {', '.join(generation.precisions)}",
            hint=f"bf16 is bf16SR; engine_args.{PRECISION_KEY} names another",
        )
    if (given == "fp32") != (job.training.precision == "fp32"):
        raise ConfigError(
            f"engine_args.{PRECISION_KEY} = '{given}' and training.precision ="
            f" '{job.training.precision}' do not go together",
            hint="fp32 goes with fp32, all other modes compute in bf16",
        )
    return PRECISIONS[given]


def saves(job: Job, generation: ScriptGeneration) -> bool:
    """Whether a training writes checkpoints: 2.13.1's does not by itself."""
    return bool(dotted(job.engine_args).get(CREATES, generation.saves)) and not job.precompile


def _collected(
    job: Job,
    generation: ScriptGeneration,
    table: OptionTable,
    data: MegatronData,
    places: NeuronxPlaces,
) -> NeuronxWords:
    words = NeuronxWords(table, job)
    try:
        precision = precision_of(job, generation)
    except ConfigError as error:
        words.problems += error.list
        return words
    _refuse(words, job, precision)
    _put_trainer(words, job, generation)
    if generation.sets_precision:
        words.put("model.megatron_amp_O2", _shell(precision.amp_o2))
    _put_model(words, job)
    _put_data(words, job, data)
    _put_optimizer(words, job, precision)
    _put_memory(words, job, generation, precision)
    _put_manager(words, job, generation, places)
    words.put("model.use_cpu_initialization", "True")
    _put_beyond(words, job)
    _put_places(words, job, generation, places)
    return words


def _shell(value: bool) -> str:
    """As the scripts' variables have it."""
    return str(value).lower()


def _put_trainer(words: NeuronxWords, job: Job, generation: ScriptGeneration) -> None:
    training = job.training
    steps = training.train_iters
    validation = training.eval_interval
    if job.precompile:
        steps = COMPILE_STEPS
        validation = None
    if validation is None:
        validation = steps + generation.last_validation
    words.put("trainer.devices", str(job.ranks_per_node))
    words.put("trainer.num_nodes", str(job.nodes))
    words.put("trainer.max_epochs", "null")
    # trap 22: published without a space before the line's backslash; it is a word of its own only
    # by the next line's indent
    words.put("trainer.max_steps", str(steps))
    words.put("trainer.val_check_interval", str(validation))
    words.put_said("trainer.log_every_n_steps", "trainer.limit_val_batches")
    words.put("trainer.limit_test_batches", str(training.eval_iters))
    words.put("trainer.accumulate_grad_batches", "1")
    words.put("trainer.precision", "32")


def _put_model(words: NeuronxWords, job: Job) -> None:
    model = job.model
    words.put_said("model.micro_batch_size")
    words.put("model.global_batch_size", str(job.global_batch_size))
    words.put_said("model.tensor_model_parallel_size", "model.pipeline_model_parallel_size")
    words.put("model.max_position_embeddings", str(model.positions))
    words.put_said("model.encoder_seq_length", "model.hidden_size")
    words.put("model.ffn_hidden_size", str(model.ffn_width))
    words.put_said("model.num_layers", "model.num_attention_heads", "model.init_method_std")
    words.put_said("model.hidden_dropout", "model.layernorm_epsilon")


def _put_data(words: NeuronxWords, job: Job, data: MegatronData) -> None:
    tokenizer = job.dataset.tokenizer
    for key in ("vocab_file", "merge_file"):
        path = getattr(tokenizer, key, None)
        words.put(f"model.tokenizer.{key}", hydra_value(path))
    words.put("model.data.data_prefix", _prefixes(job, data))
    words.put("model.data.num_workers", "1")
    words.put_said("model.data.seq_length")


def _prefixes(job: Job, data: MegatronData) -> str:
    """A list of weights and prefixes; where each split has files of its own, one for each."""
    if not data.files:
        return "null"
    if data.split is not None:
        return hydra_value(weighted(data.files["train"]))
    names = {"train": "train", "valid": "validation", "test": "test"}
    return hydra_value({names[split]: weighted(data.files[split]) for split in SPLITS})


def _put_optimizer(words: NeuronxWords, job: Job, precision: Precision) -> None:
    training = job.training
    words.put("model.optim.name", precision.optimizer)
    words.put("model.optim.capturable", "True")
    words.put_said("model.optim.lr")
    betas = f"[{decimal(training.adam_beta1)},{decimal(training.adam_beta2)}]"
    words.put("model.optim.betas", betas)
    words.put_said("model.optim.weight_decay")
    words.put("model.optim.sched.name", "CosineAnnealing")
    words.put("model.optim.sched.warmup_steps", str(int(training.warmup_iters)))
    constant = training.train_iters - training.decay_iters
    words.put("model.optim.sched.constant_steps", str(constant))
    words.put("model.optim.sched.min_lr", decimal(training.min_lr, point=True))


def _put_memory(
    words: NeuronxWords, job: Job, generation: ScriptGeneration, precision: Precision
) -> None:
    """Sequence parallelism, recomputation, ZeRO, and how checkpoints are written."""
    recompute = job.training.recompute_granularity
    words.put_said("model.sequence_parallel")
    if recompute == "none":
        words.put("model.activations_checkpoint_granularity", "null")
        words.put("model.activations_checkpoint_method", "null")
    else:
        words.put("model.activations_checkpoint_granularity", recompute)
        words.put("model.activations_checkpoint_method", "uniform")
    words.put("model.activations_checkpoint_num_layers", "1")
    wraps = job.parallelism.zero_stage == 1
    if generation.sets_precision:
        words.put("model.wrap_with_zero", _shell(wraps))
        words.put("model.zero_use_master_weight", _shell(precision.zero))
    elif wraps:
        words.put("model.wrap_with_zero", "True")  # the README's own line
    words.put("model.save_xser", str(generation.save_xser), added=True)
    if generation.load_xser:
        words.put("model.load_xser", str(generation.load_xser), added=True)


def _put_manager(
    words: NeuronxWords, job: Job, generation: ScriptGeneration, places: NeuronxPlaces
) -> None:
    words.put("exp_manager.create_tensorboard_logger", str(not job.precompile))
    words.put("exp_manager.resume_if_exists", "False")
    words.put("exp_manager.resume_ignore_no_checkpoint", "False")
    if job.precompile:
        words.overrule(CREATES, "False")
    else:
        words.put(CREATES, str(generation.saves))
    words.put("exp_manager.explicit_log_dir", hydra_value(str(places.logs)))
    if job.training.save_interval is None:
        words.put(f"{_CALLBACK}.train_time_interval", "3600", added=True)
    else:
        every = str(job.training.save_interval)
        words.put(f"{_CALLBACK}.every_n_train_steps", every, added=True)


def _put_beyond(words: NeuronxWords, job: Job) -> None:
    """What the scripts leave to the configuration, where the job says otherwise."""
    model = job.model
    training = job.training
    words.put_said_unless_default("model.attention_dropout")
    words.put_unless_default("model.bias_activation_fusion", model.gelu_form == "tanh")
    words.put_said_unless_default("model.make_vocab_size_divisible_by")
    if model.head_size * model.num_attention_heads != model.hidden_size:
        words.put("model.kv_channels", str(model.head_size))
    if model.untied:
        words.put("model.share_embeddings_and_output_weights", "False", added=True)
    words.put_said_unless_default("model.seed", "trainer.gradient_clip_val")
    if training.adam_eps != 1e-8:  # torch.optim.AdamW
        words.put("model.optim.eps", decimal(training.adam_eps), added=True)
    words.put_said_unless_default(
        "model.data.reset_attention_mask",
        "model.data.reset_position_ids",
        "model.data.eod_mask_loss",
    )
    words.put_unless_default("model.data.splits_string", job.dataset.split)
    chunks = job.parallelism.virtual_pipeline_model_parallel_size
    if chunks:
        words.put("model.virtual_pipeline_model_parallel_size", str(chunks))
    if job.wandb is not None:
        words.put("exp_manager.create_wandb_logger", "True")
        words.put("exp_manager.wandb_logger_kwargs.project", hydra_value(job.wandb.project))


def _put_places(
    words: NeuronxWords, job: Job, generation: ScriptGeneration, places: NeuronxPlaces
) -> None:
    """trainkit's own: where checkpoints lie, that the last step leaves one, and the one to go on
    from."""
    if not saves(job, generation):
        return
    words.put(f"{_CALLBACK}.dirpath", hydra_value(str(places.checkpoints)), added=True)
    words.put_said_unless_default(f"{_CALLBACK}.save_top_k")
    words.put_unless_default(f"{_CALLBACK}.save_last", True)
    if job.wandb is not None:
        words.put("exp_manager.wandb_logger_kwargs.name", hydra_value(places.name))
    if places.resume is None:
        return
    if not generation.load_xser and words.said("model.save_xser") == "True":
        words.put("model.load_xser", "True", added=True)
    words.put("model.resume_from_checkpoint", checkpoint_word(str(places.resume)))


def _refuse(words: NeuronxWords, job: Job, precision: Precision) -> None:
    """What the engine has no way to do."""
    words.problems += counterpart_problems(job, ENGINE, NO_COUNTERPART, CHOICES)
    if job.dataset.source == "mock":
        words.refuse("dataset = 'mock': the engine has no random data")
    if precision.zero and job.parallelism.zero_stage != 1:
        words.refuse(
            f"engine_args.{PRECISION_KEY} = '{precision.name}' shares its optimizer out",
            "set parallelism.zero_stage = 1",
        )
    if job.parallelism.zero_stage not in (0, 1):
        words.refuse(f"parallelism.zero_stage {job.parallelism.zero_stage}: the engine has 0 and 1")
    _refuse_tokenizer(words, job)


def _refuse_tokenizer(words: NeuronxWords, job: Job) -> None:
    tokenizer = job.dataset.tokenizer
    if words.said("model.tokenizer.type") is not None:
        return
    if tokenizer is None or tokenizer.type != "gpt2" or not tokenizer.vocab_file:
        words.refuse(
            f"dataset '{job.dataset.name}': the engine reads the vocab_file and merge_file of a"
            " tokenizer of type 'gpt2'",
            'give them, or engine_args "model.tokenizer.type" and "model.tokenizer.model"',
        )
