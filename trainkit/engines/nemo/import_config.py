"""A job from NeMo's launcher: its folder conf, one training file of it, or the composed
<name>_hydra.yaml that it writes. Nothing of it is run.

Formats: NeMo-Framework-Launcher at 0d03943e (22.09), conf/, and at tag 24.12,
launcher_scripts/conf/.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from trainkit.base.errors import ConfigError
from trainkit.engines.hydra_config import (
    Composed,
    Resolved,
    Unknown,
    compose,
    put,
    read_config,
    words_of,
)
from trainkit.engines.imported import ImportedJob, job_name, refuse_ramp
from trainkit.engines.nemo.config import FILENAME, SET_BY
from trainkit.engines.nemo.generations import ENGINE, GENERATIONS, NUMA, NemoGeneration
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
from trainkit.engines.options import load_table
from trainkit.jobs.messages import suggest

GROUPS = ("cluster", "training")
_PRECISIONS = {"bf16": "bf16", "16": "fp16", "32": "fp32"}
_DISTRIBUTED = ("distributed_fused_adam", "mcore_distributed_optim")
# what NeMo does where a configuration does not have the key: megatron_gpt_model.py, cfg.get
_SILENT: Mapping[str, object] = {
    "model.attention_dropout": 0.1,
    "model.bias_activation_fusion": True,
    "model.make_vocab_size_divisible_by": 128,
    "model.rotary_percentage": 1.0,
    "model.seed": 1234,
    "trainer.log_every_n_steps": 50,  # pytorch-lightning's
    "model.data.splits_string": "980,10,10",
}
# what `config.nemo_config` says of keys that no key of jobs.toml says
_WRITTEN: Mapping[str, object] = {
    "trainer.accelerator": "gpu",
    "exp_manager.name": "megatron_gpt",
    "exp_manager.resume_if_exists": True,
    "exp_manager.resume_ignore_no_checkpoint": True,
    "exp_manager.create_checkpoint_callback": True,
    "exp_manager.checkpoint_callback_params.monitor": "val_loss",
    "exp_manager.checkpoint_callback_params.mode": "min",
    "exp_manager.checkpoint_callback_params.always_save_nemo": False,
    "exp_manager.checkpoint_callback_params.save_nemo_on_train_end": False,
    "exp_manager.checkpoint_callback_params.filename": FILENAME,
    "exp_manager.wandb_logger_kwargs.project": "nemo_gpt3",
    "exp_manager.log_step_timing": True,
    "exp_manager.step_timing_kwargs.sync_cuda": True,
    "exp_manager.step_timing_kwargs.buffer_size": 5,
    "model.apply_query_key_layer_scaling": True,
    "model.pre_process": True,
    "model.post_process": True,
    "model.persist_layer_norm": True,
    "model.grad_div_ar_fusion": True,
    "model.gradient_as_bucket_view": True,
    "model.gradient_accumulation_fusion": True,
    "model.fp32_residual_connection": False,
    "model.fp16_lm_cross_entropy": False,
    "model.grad_allreduce_chunk_size_mb": 125,
    "model.use_cpu_initialization": False,
    "model.onnx_safe": False,
    "model.apex_transformer_log_level": 30,
    "model.native_amp_init_scale": 2**32,  # without fp16
    "model.native_amp_growth_interval": 1000,
    "model.hysteresis": 2,
    "model.nsys_profile.enabled": False,
    "model.nsys_profile.trace": ["nvtx", "cuda"],
    "model.nsys_profile.start_step": 10,
    "model.nsys_profile.end_step": 10,
    "model.nsys_profile.ranks": [0],
    "model.nsys_profile.gen_shape": False,
    "model.context_parallel_size": 1,
    "model.overlap_p2p_comm": True,  # with several chunks a stage
    "model.batch_p2p_comm": False,
    "model.data.skip_warmup": True,
    "model.data.num_workers": 2,
    "model.data.dataloader_type": "single",
}
_SCALES = {
    "model.native_amp_init_scale": "initial_loss_scale",
    "model.native_amp_growth_interval": "loss_scale_window",
    "model.hysteresis": "hysteresis",
}
_RESUMES = "exp_manager.resume_if_exists"
_SLURM = ("partition", "account", "nodelist", "exclusive", "mem")


def import_nemo(path: Path, words: Sequence[str], name: str, version: str) -> ImportedJob:
    """The job that a configuration stands for.

    Args:
        path: of the launcher's folder, a training file in it, or a file by itself.
        words: GROUP=FILE and KEY=VALUE over it, as for the launcher.
        name: of the job; "": the configuration's own.
        version: 22.09 or 24.12; "": as it looks like.

    Raises ConfigError: it cannot be read, is none of NeMo's GPT, or lacks what every job has.
    """
    composed = read_launcher(path, words)
    resolved = Resolved(composed.root, composed.choices)
    given = resolved.leaves("training")
    if not any(key.startswith("trainer.") for key in given):
        raise ConfigError(
            f"{path} has no trainer, so it is not a configuration of NeMo's training",
            hint="give the launcher's folder conf, a file of conf/training/gpt3, or a _hydra.yaml",
        )
    if "model.hidden_size" not in given:
        raise ConfigError(f"{path} has no model.hidden_size, so it is not a GPT of NeMo's")
    generation = _generation(given, version)
    dialect = _dialect(generation)
    if not given.get("model.virtual_pipeline_model_parallel_size"):
        one_chunk = {"model.overlap_p2p_comm": False, "model.batch_p2p_comm": True}
        dialect = replace(dialect, usual={**dialect.usual, **one_chunk})
    values = NemoValues(given, _SILENT, left=list(composed.left), dialect=dialect)
    if not name:
        said = given.pop("run.name", None)
        name = said if isinstance(said, str) else path.stem.removesuffix("_hydra")
    imported = _job(values, generation, job_name(name))
    return _with_launcher(imported, resolved, values, generation)


def read_launcher(path: Path, words: Sequence[str]) -> Composed:
    """A launcher's configuration with its training below `training`; the same of a file by
    itself. Raises ConfigError: it cannot be read."""
    overrides = words_of(words)
    folder, group = _folder_of(path)
    if folder is not None:
        if group:
            overrides = [*words_of([f"training={group}"]), *overrides]
        return compose(folder, "config", GROUPS, overrides)
    table = read_config(path)
    composed = Composed({**table, "training": table})
    for override in overrides:
        put(composed.root, override)
        if "." not in override.path:  # of the file itself, where others lead into its tables
            put(table, override)
    return composed


def _folder_of(path: Path) -> tuple[Path | None, str]:
    """(the launcher's folder, the file of its group `training`); (None, "") for a file by
    itself."""
    if path.is_dir():
        inner = path / "conf"
        return (path if (path / "config.yaml").exists() or not inner.is_dir() else inner), ""
    if path.name == "config.yaml" and (path.parent / "training").is_dir():
        return path.parent, ""
    for folder in path.absolute().parents:
        training = folder / "training"
        if (folder / "config.yaml").is_file() and path.absolute().is_relative_to(training):
            inside = path.absolute().relative_to(training)
            return folder, inside.with_suffix("").as_posix()
    return None, ""


def _generation(given: Mapping[str, object], version: str) -> NemoGeneration:
    if version and version not in GENERATIONS:
        raise ConfigError(
            f"--version '{version}' is not known", hint=suggest(version, list(GENERATIONS))
        )
    newer = "model.mcore_gpt" in given or "trainer.use_distributed_sampler" in given
    return GENERATIONS[version or ("24.12" if newer else "22.09")]


def _dialect(generation: NemoGeneration) -> Dialect:
    table = load_table(ENGINE, generation.version)
    usual = {
        **_WRITTEN,
        **{f"model.{key}": value for key, value in generation.model.items()},
        **{f"model.optim.{key}": value for key, value in generation.optimizer.items()},
        f"trainer.{generation.sampler}": False,
    }
    recompute = {"full": ("uniform", 1), "selective": (None, None)}
    return Dialect(ENGINE, table, SET_BY, usual, recompute, _DISTRIBUTED)


def _job(values: NemoValues, generation: NemoGeneration, name: str) -> ImportedJob:
    model = taken_model(values)
    parallelism = taken_parallelism(values)
    training = {
        **taken_training(values),
        "global_batch_size": values.count("model.global_batch_size"),
        **_precision(values),
    }
    if "rampup_batch_size" in training:
        batch = training["global_batch_size"]
        refuse_ramp("model.rampup_batch_size", training["rampup_batch_size"], batch)
    saves = bool(values.peek("exp_manager.create_checkpoint_callback"))
    if saves and "eval_interval" in training:
        training.setdefault("save_interval", training["eval_interval"])
    optimizer = values.take("model.optim.name")
    if optimizer != generation.optimizers[int(str(parallelism["zero_stage"]))]:
        values.engine_args["model.optim.name"] = optimizer
    job = taken_job(values)
    limit = values.take("run.time_limit")
    job["slurm"] = {} if limit is None else {"time": limit}
    if dependency := values.take("run.dependency"):
        why = "a run goes on by itself (resume), not in further jobs of one name"
        values.leave("run.dependency", dependency, why)
    if saves and values.given.get(_RESUMES) is False:
        why = "a run goes on from its own checkpoints, and `train` begins a new one each time"
        values.leave(_RESUMES, values.take(_RESUMES), why)
    dataset, tokenizer = taken_data(values)
    if dataset == {"source": "mock"}:
        job["dataset"] = "mock"
        dataset = {}
    for key in [key for key in values.given if key.partition(".")[0] in ("hydra", "defaults")]:
        del values.given[key]
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
    )


def _precision(values: NemoValues) -> dict[str, object]:
    said = values.take("trainer.precision")
    precision = _PRECISIONS.get(str(said).partition("-")[0])
    if precision is None:
        raise ConfigError(
            f"trainer.precision = {said!r}: trainkit has {', '.join(_PRECISIONS)}",
            hint="write one of them into the file",
        )
    half = values.take("model.megatron_amp_O2")
    if half is not None and half != (precision != "fp32"):
        values.engine_args["model.megatron_amp_O2"] = half
    found: dict[str, object] = {"precision": precision}
    for theirs, ours in _SCALES.items() if precision == "fp16" else ():
        number = values.number(theirs)
        if number is not None:
            found[ours] = number if ours == "initial_loss_scale" else int(number)
    return found


def _with_launcher(
    imported: ImportedJob, resolved: Resolved, values: NemoValues, generation: NemoGeneration
) -> ImportedJob:
    """What stands beside the training: Slurm's options, variables, cores, the image."""
    job = dict(imported.job)
    arguments = dict(imported.engine_args)
    slurm = {
        key: value
        for key, value in resolved.leaves("cluster").items()
        if value is not None and value is not False
    }
    taken = {key: slurm.pop(key) for key in _SLURM if key in slurm}
    for key, value in slurm.items():
        values.leave(f"cluster.{key}", value, "[clusters.X] and its container say it")
    job["slurm"] = {**taken, **dict(_table(job["slurm"]))}
    environment = {}
    for key, value in resolved.leaves("env_vars").items():
        if isinstance(value, Unknown):
            values.left.append(f"env_vars.{key}: {value.why}")
        elif value is not None and generation.environment.get(key) != str(value):
            environment[key] = str(value)
    if environment:
        job["env"] = environment
    for key, value in resolved.leaves("numa_mapping").items():
        if value != NUMA.get(key):
            if generation.core:
                values.leave(f"numa_mapping.{key}", value, f"{generation.version} binds no cores")
            else:
                arguments[f"numa_mapping.{key}"] = value
    values.left += _beside(resolved.root)
    return replace(imported, job=job, engine_args=arguments, not_taken=tuple(values.left))


def _table(value: object) -> Mapping[str, object]:
    assert isinstance(value, Mapping)
    return value


def _beside(root: Mapping[str, object]) -> list[str]:
    """Lines for what has another place than a job."""
    found = []
    if image := root.get("container"):
        found.append(f"container = {image!r}: name it in a [containers.X] table")
    mounts = root.get("container_mounts")
    if isinstance(mounts, list) and any(mounts):
        found.append(f"container_mounts = {mounts!r}: mounts of that [containers.X] table")
    if root.get("wandb_api_key_file"):
        found.append("wandb_api_key_file: name the variable in clusters.X.secrets")
    stages = root.get("stages")
    others = [each for each in stages if each != "training"] if isinstance(stages, list) else []
    if others:
        found.append(f"stages {', '.join(map(str, others))}: tasks of their own, not of a job")
    return found
