"""What NeMo's Megatron models, apex and exp_manager refuse in a composed configuration.

Rules: NeMo 1.12 and 2.1, and neuronx-nemo-megatron's copy of NeMo 1.14:
collections/nlp/models/language_modeling/megatron_base_model.py and megatron_gpt_model.py,
modules/common/megatron/megatron_init.py, utils/exp_manager.py, core/optim/lr_scheduler.py; apex
transformer/microbatches.py and tensor_parallel/utils.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.engines.stand_ins.hydra_command import MISSING, Refused

MANAGER = {
    "explicit_log_dir", "exp_dir", "name", "version", "use_datetime_version", "resume_if_exists",
    "resume_past_end", "resume_ignore_no_checkpoint", "create_tensorboard_logger",
    "summary_writer_kwargs", "create_wandb_logger", "wandb_logger_kwargs",
    "create_checkpoint_callback", "checkpoint_callback_params", "files_to_copy",
    "log_step_timing", "step_timing_kwargs", "log_local_rank_0_only", "log_global_rank_0_only",
    "disable_validation_on_resume",
}  # fmt: skip
CALLBACK = {
    "filepath", "dirpath", "filename", "monitor", "verbose", "save_last", "save_top_k",
    "save_weights_only", "mode", "every_n_epochs", "prefix", "postfix", "save_best_model",
    "always_save_nemo", "save_nemo_on_train_end", "model_parallel_size",
}  # fmt: skip
NEWER_CALLBACK = {"every_n_train_steps", "train_time_interval", "save_on_train_epoch_end"}
# ExpManagerConfig and CallbackParams, by the version of NeMo: structured, so nothing else is taken
MANAGER_KEYS = {
    "1.12": MANAGER,
    "1.14": MANAGER
    | {"explicit_ckpt_path", "create_mlflow_logger", "mlflow_logger_kwargs", "ema"},
    "2.1": MANAGER
    | {
        "resume_from_checkpoint", "log_delta_step_timing", "create_early_stopping_callback",
        "early_stopping_callback_params", "create_preemption_callback", "ema", "max_time_per_run",
        "seconds_to_sleep", "create_straggler_detection_callback", "straggler_detection_params",
        "create_fault_tolerance_callback", "fault_tolerance", "log_tflops_per_sec_per_gpu",
        "create_mlflow_logger", "mlflow_logger_kwargs", "create_dllogger_logger",
        "dllogger_logger_kwargs", "create_clearml_logger", "clearml_logger_kwargs",
        "create_neptune_logger", "neptune_logger_kwargs",
    },
}  # fmt: skip
CALLBACK_KEYS = {
    "1.12": CALLBACK,
    "1.14": CALLBACK | NEWER_CALLBACK,
    "2.1": CALLBACK
    | NEWER_CALLBACK
    | {"auto_insert_metric_name", "async_save", "save_last_n_optim_states"},
}
# what the code reads as an attribute: a key that is not there ends it with ConfigAttributeError
READ = """
encoder_seq_length max_position_embeddings num_layers hidden_size ffn_hidden_size
num_attention_heads micro_batch_size global_batch_size gradient_as_bucket_view
tokenizer.library tokenizer.type tokenizer.model tokenizer.vocab_file tokenizer.merge_file
data.data_prefix data.data_impl data.splits_string data.seq_length data.num_workers
data.dataloader_type optim.name optim.lr
"""


@dataclass(frozen=True)
class Layout:
    """Where a rank stands in Megatron's order: tensor first, pipeline last."""

    tensor: int
    pipeline: int
    tensor_rank: int
    pipeline_rank: int
    data_rank: int

    @property
    def folder(self) -> str:
        """inject_model_parallel_rank."""
        if self.tensor * self.pipeline == 1:
            return ""
        if self.pipeline == 1:
            return f"mp_rank_{self.tensor_rank:02d}"
        return f"tp_rank_{self.tensor_rank:02d}_pp_rank_{self.pipeline_rank:03d}"


def needs(said: bool, message: str) -> None:
    """An assertion of theirs."""
    if not said:
        raise Refused(f"AssertionError: {message}")


def at(table: Any, path: str) -> Any:
    """cfg.a.b. Raises Refused where there is none."""
    for key in path.split("."):
        if not isinstance(table, Mapping) or key not in table:
            raise Refused(f"ConfigAttributeError: Key '{key}' is not in struct: {path}")
        table = table[key]
    if table == MISSING:
        raise Refused(f"MissingMandatoryValue: {path}")
    return table


def check_manager(config: Mapping[str, Any], version: str) -> None:
    """exp_manager's own look at its settings."""
    manager = at(config, "exp_manager")
    for key in manager:
        if key not in MANAGER_KEYS[version]:
            raise Refused(f"ConfigKeyError: Key '{key}' not in 'ExpManagerConfig'")
    params = manager.get("checkpoint_callback_params") or {}
    for key in params:
        if key not in CALLBACK_KEYS[version]:
            raise Refused(f"ConfigKeyError: Key '{key}' not in 'CallbackParams'")
    if manager.get("log_local_rank_0_only") and manager.get("log_global_rank_0_only"):
        raise Refused("Cannot set both log_local_rank_0_only and log_global_rank_0_only to True.")


def check_model(config: Mapping[str, Any], world: int, rank: int) -> Layout:
    """The model's, apex's and the data's look; where the rank stands."""
    model = at(config, "model")
    for path in READ.split():
        at(model, path)
    tensor = int(model.get("tensor_model_parallel_size", 1))
    pipeline = int(model.get("pipeline_model_parallel_size", 1))
    needs(world % (tensor * pipeline) == 0, f"{world} is not divisible by {tensor * pipeline}")
    data = world // (tensor * pipeline)
    for name, by in (
        ("num_attention_heads", tensor),
        ("hidden_size", model["num_attention_heads"]),
        ("ffn_hidden_size", tensor),
        ("num_layers", pipeline),
        ("global_batch_size", model["micro_batch_size"] * data),
    ):
        needs(model[name] % by == 0, f"model.{name}={model[name]} is not divisible by {by}")
    needs(
        model["encoder_seq_length"] <= model["max_position_embeddings"],
        "encoder_seq_length is beyond max_position_embeddings",
    )
    needs(model["data"]["seq_length"] == model["encoder_seq_length"], "two sequence lengths")
    params = at(config, "exp_manager").get("checkpoint_callback_params") or {}
    size = params.get("model_parallel_size")
    needs(size in (None, tensor * pipeline), f"model_parallel_size={size}")
    _check_precision(config)
    _check_schedule(model["optim"])
    _check_data(model)
    return Layout(
        tensor,
        pipeline,
        tensor_rank=rank % tensor,
        pipeline_rank=rank // (world // pipeline),
        data_rank=rank % (world // pipeline) // tensor,
    )


def _check_precision(config: Mapping[str, Any]) -> None:
    precision = at(config, "trainer.precision")
    if precision not in (32, 16, "bf16", "32", "16", "bf16-mixed", "16-mixed"):
        raise Refused(f'precision must be in [32, 16, "bf16"], not {precision!r}')
    if config["model"].get("megatron_amp_O2") and str(precision).startswith("32"):
        raise Refused("megatron_amp_O2 with 32-bit precision")


def _check_schedule(optim: Mapping[str, Any]) -> None:
    sched = optim.get("sched") or {}
    for name in ("lr", "weight_decay"):
        if isinstance(optim.get(name, 0.0), str):
            raise Refused(f"TypeError: optim.{name} is {optim[name]!r}, a str")
    if sched.get("min_lr", 0.0) > optim["lr"]:
        raise Refused("received an initial learning rate that was lower than the minimum")
    for name in ("warmup_steps", "constant_steps"):
        value = sched.get(name, 0)
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise Refused(f"model.optim.sched.{name}={value!r} is not a number of steps")


def _check_data(model: Mapping[str, Any]) -> None:
    data = model["data"]
    if data["dataloader_type"] not in ("single", "cyclic"):
        raise Refused('cfg.data.dataloader_type must be "single" or "cyclic"')
    shares = [float(part) for part in str(data["splits_string"]).split(",")]
    needs(sum(shares) > 0, f"splits_string {data['splits_string']!r}")
    for name in ("vocab_file", "merge_file"):
        path = model["tokenizer"][name]
        if not path or not Path(path).is_file():
            raise Refused(f"FileNotFoundError: model.tokenizer.{name}={path!r}")
    if data["data_impl"] == "mock":
        return
    prefixes = data["data_prefix"]
    if isinstance(prefixes, str):
        prefixes = [1.0, prefixes]
    if isinstance(prefixes, list) and len(prefixes) == 1:
        prefixes = [1.0, *prefixes]
    needs(isinstance(prefixes, list) and len(prefixes) % 2 == 0, "data_prefix: weight and path")
    for weight, prefix in zip(prefixes[::2], prefixes[1::2], strict=True):
        needs(float(weight) > 0, f"weight {weight!r} of {prefix}")
        for suffix in (".bin", ".idx"):
            if not Path(f"{prefix}{suffix}").is_file():
                raise Refused(f"FileNotFoundError: {prefix}{suffix}")
