"""The words behind `megatron_gpt_pretraining.py`, collected key by key in the scripts' own order
and spelling, with the job's engine_args in their places."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from trainkit.base.errors import Problem
from trainkit.engines.hydra_words import hydra_value
from trainkit.engines.job_values import value_and_default
from trainkit.engines.neuronx_nemo.generations import ENGINE, PRECISION_KEY
from trainkit.engines.options import OptionTable, Value, check_engine_args
from trainkit.jobs.messages import closest_name, suggest
from trainkit.jobs.schema import Job

# keys that trainkit sets from a job, and the keys of jobs.toml that say them
SET_BY: Mapping[str, str] = {
    "trainer.devices": "cluster.gpus_per_node",
    "trainer.num_nodes": "nodes",
    "trainer.max_steps": "training.train_iters",
    "trainer.val_check_interval": "training.eval_interval",
    "trainer.log_every_n_steps": "training.log_interval",
    "trainer.limit_val_batches": "training.eval_iters",
    "trainer.gradient_clip_val": "training.clip_grad",
    "model.megatron_amp_O2": f"engine_args.{PRECISION_KEY}",
    "model.micro_batch_size": "training.micro_batch_size",
    "model.global_batch_size": "training.global_batch_size",
    "model.tensor_model_parallel_size": "parallelism.tensor_model_parallel_size",
    "model.pipeline_model_parallel_size": "parallelism.pipeline_model_parallel_size",
    "model.virtual_pipeline_model_parallel_size": (
        "parallelism.virtual_pipeline_model_parallel_size"
    ),
    "model.max_position_embeddings": "model.max_position_embeddings",
    "model.encoder_seq_length": "model.seq_length",
    "model.hidden_size": "model.hidden_size",
    "model.ffn_hidden_size": "model.ffn_hidden_size",
    "model.num_layers": "model.num_layers",
    "model.num_attention_heads": "model.num_attention_heads",
    "model.kv_channels": "model.kv_channels",
    "model.init_method_std": "model.init_method_std",
    "model.hidden_dropout": "model.hidden_dropout",
    "model.attention_dropout": "model.attention_dropout",
    "model.layernorm_epsilon": "model.layernorm_epsilon",
    "model.bias_activation_fusion": "model.gelu",
    "model.make_vocab_size_divisible_by": "model.make_vocab_size_divisible_by",
    "model.seed": "training.seed",
    "model.tokenizer.vocab_file": "tokenizers.X.vocab_file",
    "model.tokenizer.merge_file": "tokenizers.X.merge_file",
    "model.data.data_prefix": "dataset",
    "model.data.splits_string": "datasets.X.split",
    "model.data.seq_length": "model.seq_length",
    "model.data.reset_attention_mask": "training.reset_attention_mask",
    "model.data.reset_position_ids": "training.reset_position_ids",
    "model.data.eod_mask_loss": "training.eod_mask_loss",
    "model.optim.name": f"engine_args.{PRECISION_KEY}",
    "model.optim.lr": "training.lr",
    "model.optim.betas": "training.adam_beta1 and adam_beta2",
    "model.optim.weight_decay": "training.weight_decay",
    "model.optim.sched.name": "training.lr_decay_style",
    "model.optim.sched.warmup_steps": "training.lr_warmup_iters",
    "model.optim.sched.constant_steps": "training.lr_decay_iters",
    "model.optim.sched.min_lr": "training.min_lr",
    "model.sequence_parallel": "parallelism.sequence_parallel",
    "model.activations_checkpoint_granularity": "training.recompute_granularity",
    "model.wrap_with_zero": "parallelism.zero_stage",
    "model.zero_use_master_weight": f"engine_args.{PRECISION_KEY}",
    "model.resume_from_checkpoint": "`invoke resume`, which names the newest whole checkpoint",
    "exp_manager.resume_if_exists": "`invoke resume`",
    "exp_manager.explicit_log_dir": "the run's own folder",
    "exp_manager.exp_dir": "the run's own folder",
    "exp_manager.checkpoint_callback_params.save_top_k": "checkpoint.keep_last",
    "exp_manager.create_wandb_logger": "wandb",
    "exp_manager.wandb_logger_kwargs.project": "wandb.project",
    "exp_manager.wandb_logger_kwargs.name": "wandb, which names it by the run",
}
# keys that the configuration has not, and that hydra takes with a "+" in front
_ADDED_BY_US = {
    "exp_manager.checkpoint_callback_params.dirpath": "the run's own folder",
    "exp_manager.checkpoint_callback_params.every_n_train_steps": "training.save_interval",
    "model.optim.eps": "training.adam_eps",
    "model.share_embeddings_and_output_weights": "model.untie_embeddings_and_output_weights",
}


def dotted(given: Mapping[str, Value], before: str = "") -> dict[str, Value]:
    """engine_args by their dotted paths: `--set engine_args.model.seed=1` and tables of TOML nest
    them. A key that says "+" is one value, whatever that is."""
    found: dict[str, Value] = {}
    for name, value in given.items():
        path = f"{before}{name}"
        if isinstance(value, Mapping) and value and not path.startswith("+"):
            found |= dotted(value, f"{path}.")
        else:
            found[path] = value
    return found


class NeuronxWords:
    """Keys, values and problems so far.

    Args:
        table: the keys of the version's configuration.
        job: whose engine_args stand in the places of the scripts' own values.
    """

    def __init__(self, table: OptionTable, job: Job) -> None:
        self.table = table
        self.job = job
        self.problems: list[Problem] = []
        self._words: dict[str, str] = {}
        self._given: dict[str, tuple[str, str]] = {}  # by path: (prefix, value)
        self._take(job)

    def _take(self, job: Job) -> None:
        known = {}
        for name, value in dotted(job.engine_args).items():
            path = name.lstrip("+")
            if name == PRECISION_KEY:
                continue
            if path == name:
                known[name] = value
                option = self.table.find(name)
                if option is None or option.name != name:
                    del known[name]
                    self.problems.append(_unknown(name, self.table))
            else:
                self.problems += _wrong_addition(name, path, self.table)
            self._given[path] = (name[: len(name) - len(name.lstrip("+"))], hydra_value(value))
        checked = job.model_copy(update={"engine_args": known})
        self.problems += check_engine_args(checked, self.table, SET_BY)

    def put(self, path: str, word: str, *, added: bool = False) -> None:
        """A key of the command line, in the order of these calls; the job's own value lies over it.

        Args:
            path: the key.
            word: its value as hydra reads it.
            added: the configuration does not have the key.
        """
        prefix = "+" if added else ""
        given = self._given.pop(path, None)
        if given is not None:
            word = given[1]
        self._words[path] = f"{prefix}{path}={word}"

    def put_said(self, *paths: str) -> None:
        """As `put`, keys with the values of the job's keys that SET_BY has for them."""
        for path in paths:
            value, _ = value_and_default(self.job, SET_BY[path])
            self.put(path, decimal(value) if isinstance(value, float) else hydra_value(value))

    def put_said_unless_default(self, *paths: str) -> None:
        """The same as `put_unless_default`."""
        for path in paths:
            self.put_unless_default(path, value_and_default(self.job, SET_BY[path])[0])

    def overrule(self, path: str, word: str) -> None:
        """As `put`, whatever the job says of it."""
        self._given.pop(path, None)
        self.put(path, word)

    def put_unless_default(self, path: str, value: Value) -> None:
        """As `put`, but for what the configuration says by itself."""
        option = self.table.find(path)
        if option is not None and not self.table.notice and option.default == value:
            return
        self.put(path, hydra_value(value), added=option is None)

    def said(self, path: str) -> str | None:
        """What the job or the words so far say of a key."""
        if path in self._given:
            return self._given[path][1]
        word = self._words.get(path)
        return None if word is None else word.partition("=")[2]

    def refuse(self, message: str, hint: str = "") -> None:
        """One more problem."""
        self.problems.append(Problem(message, hint=hint))

    def words(self) -> tuple[str, ...]:
        """All of them, the job's further ones last."""
        more = (f"{prefix}{path}={value}" for path, (prefix, value) in self._given.items())
        return (*self._words.values(), *more)


def _unknown(name: str, table: OptionTable) -> Problem:
    message = f"engine_args: {ENGINE} {table.version} has no key '{name}'"
    if name in SET_BY or name in _ADDED_BY_US:
        return Problem(message, hint=f"use {SET_BY.get(name) or _ADDED_BY_US[name]} for it")
    if table.notice:
        message += f" ({table.notice})"
    near = table.find(name)
    if near is not None:
        return Problem(message, hint=f"write '{near.name}': hydra's keys are case-sensitive")
    hint = f"'+{name}' adds a key that its configuration does not have"
    if closest_name(name, table.options):
        hint = f"{suggest(name, table.options)} {hint}"
    return Problem(message, hint=hint)


def _wrong_addition(name: str, path: str, table: OptionTable) -> Iterator[Problem]:
    """Of `+KEY`: hydra adds no key that is there."""
    key = f'engine_args."{name}"'
    option = table.find(path)
    setter = SET_BY.get(path) or _ADDED_BY_US.get(path)
    if setter is not None:
        yield Problem(f"{key}: trainkit sets {path} itself", hint=f"use {setter} for it")
    elif option is not None and not name.startswith("++"):
        yield Problem(
            f"{key}: {ENGINE} {table.version} has {path}, and hydra adds no key that is there",
            hint=f'write "{path}"',
        )


def decimal(value: float, *, point: bool = False) -> str:
    """A number as the scripts write theirs: 0.00015, 5e-5, and with `point` 1.0e-5."""
    text = repr(float(value))
    mantissa, letter, exponent = text.partition("e")
    if not letter:
        return text
    if point and "." not in mantissa:
        mantissa = f"{mantissa}.0"
    return f"{mantissa}e{int(exponent)}"


def checkpoint_word(path: str) -> str:
    """The path of a checkpoint as the scripts write it, `megatron_gpt--step\\=1085-..-last.ckpt`:
    hydra's grammar wants the equals signs escaped outside of quotation marks."""
    plain = path.replace("=", "")
    if hydra_value(plain) == plain:
        return path.replace("=", "\\=")
    return hydra_value(path)
