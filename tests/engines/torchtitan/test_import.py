"""What a configuration of torchtitan's becomes, by what its own program says of it; the program
itself is in test_real_import.py."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from trainkit.base.errors import ConfigError
from trainkit.engines.imported import ImportedJob, ImportRequest
from trainkit.engines.torchtitan.engine import Torchtitan

MODEL = {
    "family": "llama",
    "dim": 64,
    "n_layers": 4,
    "n_heads": 4,
    "n_kv_heads": None,
    "head_dim": 16,
    "hidden_dim": 128,
    "vocab_size": 512,
    "theta": 5e5,
    "scaling": {},
    "max_seq_len": 4096,
    "eps": 1e-5,
    "tied": True,
}
ADAMW = {"lr": 1e-3, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1}
OPTIONS: dict[str, Any] = {
    "training.steps": 100,
    "training.seq_len": 256,
    "training.max_norm": 1.0,
    "training.local_batch_size": 8,
    "training.global_batch_size": -1,
    "training.mixed_precision_param": "bfloat16",
    "metrics.log_freq": 10,
    "debug.seed": 7,
    "compile.enable": True,
    "activation_checkpoint": "FullAC.Config",
    "lr_scheduler.warmup_steps": 10,
    "lr_scheduler.total_steps": None,
    "lr_scheduler.decay_ratio": None,
    "lr_scheduler.decay_type": "cosine",
    "lr_scheduler.min_lr_factor": 0.1,
    "optimizer.param_groups.0": "ParamGroupConfig",
    "optimizer.param_groups.0.pattern": ".*",
    "optimizer.param_groups.0.optimizer_name": "AdamW",
    "optimizer.param_groups.0.optimizer_kwargs": ADAMW,
    "parallelism.tensor_parallel_degree": 1,
    "parallelism.pipeline_parallel_degree": 1,
    "parallelism.context_parallel_degree": 1,
    "parallelism.pipeline_parallel_microbatch_size": 2,
    "parallelism.data_parallel_replicate_degree": 1,
    "parallelism.data_parallel_shard_degree": -1,
    "parallelism.fsdp_reshard_after_forward": "default",
    "parallelism.enable_sequence_parallel": True,
    "checkpoint.enable": True,
    "checkpoint.interval": 50,
    "checkpoint.keep_latest_k": 3,
    "checkpoint.async_mode": "async",
    "checkpoint.initial_load_path": None,
    "checkpoint.initial_load_in_hf": False,
    "validator.enable": True,
    "validator.freq": 20,
    "validator.steps": 4,
    "training.gc_freq": 70,
    "a.part.of.its.own": 3,
}
USUAL = ("checkpoint.initial_load_path", "checkpoint.initial_load_in_hf")


def imported(folder: Path, changed: Mapping[str, Any], **said: object) -> ImportedJob:
    """A tree whose interpreter says what is given here."""
    options = {
        name: (value, name in USUAL and name not in changed)
        for name, value in {**OPTIONS, **changed}.items()
    }
    described = {"why": "", "model": MODEL, "differences": {}, "options": options, **said}
    program = folder / "python"
    program.write_text(f"#!/bin/sh\ncat <<'END'\n[trainkit] {json.dumps(described)}\nEND\n")
    program.chmod(0o755)
    (folder / "torchtitan").mkdir(exist_ok=True)
    (folder / "torchtitan" / "train.py").touch()
    assert Torchtitan().is_its_file(folder, "")
    words = (f"python={program}", "module=llama3", "config=my_llama")
    return Torchtitan().import_job(ImportRequest((folder,), words))


def test_every_key(tmp_path: Path) -> None:
    found = imported(tmp_path, {})
    assert found.name == "my-llama"
    assert found.model == {
        "seq_length": 256,
        "family": "llama",
        "num_layers": 4,
        "hidden_size": 64,
        "num_attention_heads": 4,
        "ffn_hidden_size": 128,
        "vocab_size": 512,
        "rotary_base": 5e5,
        "layernorm_epsilon": 1e-5,
        "untie_embeddings_and_output_weights": False,
    }
    training = dict(found.training)
    assert training.pop("min_lr") == pytest.approx(1e-4)
    assert training == {
        "train_iters": 100,
        "clip_grad": 1.0,
        "lr_warmup_iters": 10,
        "log_interval": 10,
        "seed": 7,
        "compile": True,
        "micro_batch_size": 8,
        "precision": "bf16",
        "recompute_granularity": "full",
        "lr": 1e-3,
        "adam_beta1": 0.9,
        "adam_beta2": 0.95,
        "adam_eps": 1e-8,
        "weight_decay": 0.1,
        "lr_decay_style": "cosine",
        "eval_iters": 4,
        "eval_interval": 20,
        "save_interval": 50,
    }
    assert found.parallelism["zero_stage"] == 3
    assert found.job == {"checkpoint": {"keep_last": 3, "save_async": True}}
    assert found.engine_args == {"training.gc_freq": 70}
    assert "a.part.of.its.own = 3: no option of its command line says it" in found.not_taken


def test_stages_shards_and_the_rest_of_the_decay(tmp_path: Path) -> None:
    changed = {
        "parallelism.pipeline_parallel_degree": 4,
        "parallelism.tensor_parallel_degree": 2,
        "parallelism.data_parallel_replicate_degree": 2,
        "parallelism.data_parallel_shard_degree": 4,
        "parallelism.pipeline_parallel_first_stage_less_layers": 1,
        "lr_scheduler.decay_ratio": 0.2,
        "lr_scheduler.decay_type": "sqrt",
    }
    found = imported(tmp_path, changed)
    assert found.parallelism["zero_stage"] == 2 and found.parallelism["sequence_parallel"]
    assert found.parallelism["data_parallel_replicate_size"] == 2
    assert found.training["micro_batch_size"] == 2
    assert found.training["gradient_accumulation_steps"] == 4
    assert found.training["lr_decay_style"] == "WSD"
    assert found.training["lr_wsd_decay_iters"] == 20
    assert found.training["lr_wsd_decay_style"] == "minus_sqrt"
    named = {line.partition(" = ")[0] for line in found.not_taken}
    assert "parallelism.data_parallel_shard_degree" in named
    assert "parallelism.pipeline_parallel_first_stage_less_layers" in named


def test_weights_to_begin_with(tmp_path: Path) -> None:
    published = {"checkpoint.initial_load_path": "/hf", "checkpoint.initial_load_in_hf": True}
    found = imported(tmp_path, published)
    assert found.job["init_from"] == "/hf"
    found = imported(tmp_path, {"checkpoint.initial_load_path": "/dcp"})
    assert found.engine_args["checkpoint.initial_load_path"] == "/dcp"


def test_what_the_model_has_besides_is_named(tmp_path: Path) -> None:
    apart = {"layers.attention.wo": ["Float8Linear.Config", "Linear.Config"]}
    found = imported(tmp_path, {}, differences=apart)
    line = 'model.layers.attention.wo = "Float8Linear.Config": the job\'s model has "Linear.Config"'
    assert line in found.not_taken


def test_without_checkpoints_nothing_is_loaded(tmp_path: Path) -> None:
    published = {"checkpoint.initial_load_path": "/hf", "checkpoint.initial_load_in_hf": True}
    changed = {**published, "checkpoint.enable": False, "lr_scheduler.warmup_steps": 1000}
    found = imported(tmp_path, changed)
    assert "init_from" not in found.job and "save_interval" not in found.training
    assert any(line.startswith("checkpoint.initial_load_path") for line in found.not_taken)
    assert found.training["lr_warmup_iters"] == 100


def test_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="my_llama: experts are not trained"):
        imported(tmp_path, {}, why="experts are not trained by this version of trainkit")
    script = tmp_path / "run.sh"
    script.write_text("torchrun -m torchtitan.train --module llama3 --config x\n")
    with pytest.raises(ConfigError, match="where torchtitan is, is not known"):
        Torchtitan().import_job(ImportRequest((script,)))
    program = tmp_path / "broken"
    program.write_text("#!/bin/sh\necho 'ModuleNotFoundError: no tyro' >&2\nexit 1\n")
    program.chmod(0o755)
    asked = ImportRequest((script,), (f"source={tmp_path}", f"python={program}"))
    with pytest.raises(ConfigError, match="--config x: ModuleNotFoundError: no tyro"):
        Torchtitan().import_job(asked)
    script.write_text('torchrun -m torchtitan.train --config x --training.steps $N "$@"\n')
    with pytest.raises(ConfigError, match="--config x: ModuleNotFoundError: no tyro"):
        Torchtitan().import_job(asked)
    with pytest.raises(ConfigError, match="is no tree of torchtitan"):
        Torchtitan().import_job(ImportRequest((script,), ("source=/nonexistent",)))
    script.write_text("echo nothing\n")
    with pytest.raises(ConfigError, match=r"runs torchtitan\.train"):
        Torchtitan().import_job(asked)
