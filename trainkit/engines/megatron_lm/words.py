"""The words of a Megatron-LM command line, collected option by option against the table of its
version."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from trainkit.base.errors import Problem
from trainkit.engines.job_values import said, value_and_default
from trainkit.engines.options import Option, OptionTable, Value
from trainkit.jobs.schema import Job

# Options that trainkit sets from a job, and the keys of jobs.toml that say them.
SET_BY: Mapping[str, str] = {
    "num-layers": "model.num_layers",
    "encoder-num-layers": "model.num_layers",
    "hidden-size": "model.hidden_size",
    "ffn-hidden-size": "model.ffn_hidden_size",
    "num-attention-heads": "model.num_attention_heads",
    "kv-channels": "model.kv_channels",
    "group-query-attention": "model.num_query_groups",
    "num-query-groups": "model.num_query_groups",
    "seq-length": "model.seq_length",
    "encoder-seq-length": "model.seq_length",
    "max-position-embeddings": "model.max_position_embeddings",
    "position-embedding-type": "model.family",
    "use-rotary-position-embeddings": "model.family",
    "rotary-base": "model.rotary_base",
    "rotary-percent": "model.rotary_percent",
    "use-rope-scaling": "model.rope_scaling",
    "rope-scaling-factor": "model.rope_scaling",
    "rotary-seq-len-interpolation-factor": "model.rope_scaling",
    "normalization": "model.family",
    "norm-epsilon": "model.layernorm_epsilon",
    "layernorm-epsilon": "model.layernorm_epsilon",
    "swiglu": "model.family",
    "disable-bias-linear": "model.family",
    "untie-embeddings-and-output-weights": "model.untie_embeddings_and_output_weights",
    "no-bias-gelu-fusion": "model.gelu",
    "attention-dropout": "model.attention_dropout",
    "hidden-dropout": "model.hidden_dropout",
    "init-method-std": "model.init_method_std",
    "make-vocab-size-divisible-by": "model.make_vocab_size_divisible_by",
    "vocab-size": "model.vocab_size",
    "padded-vocab-size": "model.vocab_size",
    "num-experts": "model.moe.num_experts",
    "moe-router-topk": "model.moe.router_topk",
    "moe-ffn-hidden-size": "model.moe.ffn_hidden_size",
    "moe-shared-expert-intermediate-size": "model.moe.shared_expert_intermediate_size",
    "moe-layer-freq": "model.moe.first_dense_layers",
    "moe-router-score-function": "model.moe.router_score_function",
    "moe-router-pre-softmax": "model.moe.router_pre_softmax",
    "moe-router-topk-scaling-factor": "model.moe.router_topk_scaling_factor",
    "moe-router-num-groups": "model.moe.router_num_groups",
    "moe-router-group-topk": "model.moe.router_group_topk",
    "moe-router-enable-expert-bias": "model.moe.router_enable_expert_bias",
    "moe-router-bias-update-rate": "model.moe.router_bias_update_rate",
    "moe-router-load-balancing-type": "model.moe.router_load_balancing_type",
    "moe-aux-loss-coeff": "model.moe.aux_loss_coeff",
    "moe-z-loss-coeff": "model.moe.z_loss_coeff",
    "mtp-num-layers": "model.mtp_num_layers",
    "mtp-loss-scaling-factor": "model.mtp_loss_scaling_factor",
    "multi-latent-attention": "model.mla",
    "q-lora-rank": "model.mla.q_lora_rank",
    "kv-lora-rank": "model.mla.kv_lora_rank",
    "qk-head-dim": "model.mla.qk_head_dim",
    "qk-pos-emb-head-dim": "model.mla.qk_pos_emb_head_dim",
    "v-head-dim": "model.mla.v_head_dim",
    "rotary-scaling-factor": "model.rope_scaling",
    "mscale": "model.rope_scaling",
    "mscale-all-dim": "model.rope_scaling",
    "micro-batch-size": "training.micro_batch_size",
    "global-batch-size": "training.global_batch_size",
    "train-iters": "training.train_iters",
    "train-samples": "training.train_iters",
    "optimizer": "training.optimizer",
    "lr": "training.lr",
    "min-lr": "training.min_lr",
    "lr-decay-style": "training.lr_decay_style",
    "lr-decay-iters": "training.lr_decay_iters",
    "lr-decay-samples": "training.lr_decay_iters",
    "lr-warmup-iters": "training.lr_warmup_iters",
    "lr-warmup-samples": "training.lr_warmup_iters",
    "lr-warmup-fraction": "training.lr_warmup_fraction",
    "lr-warmup-init": "training.lr_warmup_init",
    "lr-wsd-decay-style": "training.lr_wsd_decay_style",
    "lr-wsd-decay-iters": "training.lr_wsd_decay_iters",
    "weight-decay": "training.weight_decay",
    "adam-beta1": "training.adam_beta1",
    "adam-beta2": "training.adam_beta2",
    "adam-eps": "training.adam_eps",
    "sgd-momentum": "training.sgd_momentum",
    "clip-grad": "training.clip_grad",
    "fp16": "training.precision",
    "bf16": "training.precision",
    "loss-scale": "training.loss_scale",
    "initial-loss-scale": "training.initial_loss_scale",
    "min-loss-scale": "training.min_loss_scale",
    "loss-scale-window": "training.loss_scale_window",
    "hysteresis": "training.hysteresis",
    "recompute-granularity": "training.recompute_granularity",
    "recompute-activations": "training.recompute_granularity",
    "checkpoint-activations": "training.recompute_granularity",
    "deterministic-mode": "training.deterministic",
    "reset-attention-mask": "training.reset_attention_mask",
    "reset-position-ids": "training.reset_position_ids",
    "eod-mask-loss": "training.eod_mask_loss",
    "seed": "training.seed",
    "log-interval": "training.log_interval",
    "eval-interval": "training.eval_interval",
    "eval-iters": "training.eval_iters",
    "save-interval": "training.save_interval",
    "tensor-model-parallel-size": "parallelism.tensor_model_parallel_size",
    "model-parallel-size": "parallelism.tensor_model_parallel_size",
    "pipeline-model-parallel-size": "parallelism.pipeline_model_parallel_size",
    "num-layers-per-virtual-pipeline-stage": "parallelism.virtual_pipeline_model_parallel_size",
    "num-virtual-stages-per-pipeline-rank": "parallelism.virtual_pipeline_model_parallel_size",
    "context-parallel-size": "parallelism.context_parallel_size",
    "cp-comm-type": "parallelism.cp_comm_type",
    "expert-model-parallel-size": "parallelism.expert_model_parallel_size",
    "expert-tensor-parallel-size": "parallelism.expert_tensor_parallel_size",
    "sequence-parallel": "parallelism.sequence_parallel",
    "use-distributed-optimizer": "parallelism.zero_stage",
    "num-distributed-optimizer-instances": "parallelism.data_parallel_replicate_size",
    "data-path": "dataset",
    "train-data-path": "dataset",
    "valid-data-path": "dataset",
    "test-data-path": "dataset",
    "mock-data": "dataset = 'mock'",
    "split": "datasets.X.split",
    "vocab-file": "tokenizers.X.vocab_file",
    "merge-file": "tokenizers.X.merge_file",
    "distributed-backend": "cluster.device",
    "async-save": "checkpoint.save_async",
    "save": "the run's own folder",
    "load": "the run's own folder, or `invoke resume`",
    "exit-on-missing-checkpoint": "`invoke resume`, which looks at the checkpoint first",
    "override-opt_param-scheduler": "`invoke resume`, which passes it",
    "override-lr-scheduler": "`invoke resume`, which passes it",
    "use-checkpoint-lr-scheduler": "`invoke resume --set training.lr_decay_iters=N`",
    "use-checkpoint-opt_param-scheduler": "`invoke resume --set training.lr_decay_iters=N`",
    "tensorboard-dir": "the run's own folder",
    "wandb-project": "wandb.project",
    "wandb-entity": "wandb.entity",
    "wandb-exp-name": "wandb, which names it by the run",
    "wandb-save-dir": "the run's own folder",
}


class MegatronWords:
    """Options with their values, and problems so far.

    Args:
        table: the options of the version.
        job: an option of its engine_args is its own word, and trainkit's is left out.
        defaults: options with the version's own defaults are left out.
    """

    def __init__(self, table: OptionTable, job: Job, *, defaults: bool = True) -> None:
        self.table = table
        self.job = job
        self.defaults = defaults and not table.notice
        self.options: list[tuple[Option, Value]] = []
        self.problems: list[Problem] = []
        self._given = {
            option.name for name in job.engine_args if (option := table.find(name)) is not None
        }

    @property
    def words(self) -> list[str]:
        """Of the command line."""
        return [word for option, value in self.options for word in option.words(value)]

    @property
    def version(self) -> str:
        """As messages say it."""
        return f"Megatron-LM {self.table.version}"

    def has(self, name: str) -> bool:
        """Whether the version has the option."""
        return name in self.table

    def given(self, name: str) -> bool:
        """Whether the job gives the option by its own name."""
        option = self.table.find(name)
        return option is not None and option.name in self._given

    def put(self, name: str, value: Value, key: str) -> None:
        """An option and its value; a version without it is a problem of `key`."""
        option = self.table.find(name)
        if option is None:
            asked = key if value is True or " = " in key else f"{key} = {said(value)}"
            self.refuse(f"{asked} needs --{name}, which {self.version} does not have")
            return
        if option.name in self._given:
            return
        if option.choices is not None and value not in option.choices:
            self.refuse(
                f"{key} = {said(value)}: --{option.name} of {self.version} takes"
                f" {', '.join(str(choice) for choice in option.choices)}"
            )
            return
        self.options.append((option, value))

    def put_unless_default(self, name: str, value: Value, key: str) -> None:
        """As `put`, but for what the version takes by itself. Where its table is not of exactly
        that version, everything is said."""
        option = self.table.find(name)
        if option is not None and self.defaults and _same(option, value):
            return
        self.put(name, value, key)

    def put_said(self, *names: str) -> None:
        """As `put`, options with the values of the keys that SET_BY has for them; nothing where the
        job leaves a key out."""
        for name in names:
            value, _ = value_and_default(self.job, SET_BY[name])
            if value is not None:
                self.put(name, value, SET_BY[name])

    def put_said_unless_default(self, *names: str) -> None:
        """The same as `put_unless_default`."""
        for name in names:
            value, _ = value_and_default(self.job, SET_BY[name])
            self.put_unless_default(name, value, SET_BY[name])

    def put_where_known(self, name: str, value: Value) -> None:
        """As `put`, and nothing where the version does not have the option."""
        if name in self.table:
            self.put(name, value, name)

    def put_values(self, name: str, values: Sequence[str], key: str) -> None:
        """An option with several values; nothing where there are none."""
        if values:
            self.put(name, list(values), key)

    def refuse(self, message: str, hint: str = "") -> None:
        """One more problem."""
        self.problems.append(Problem(message, hint=hint))


def _same(option: Option, value: Value) -> bool:
    if option.action != "store":
        return value is False
    return option.default is not None and option.default == value
