"""Hugging Face folders and models of theirs and ours, side by side: what test_huggingface*.py
share."""

from __future__ import annotations

import importlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from trainkit.base.errors import Problem
from trainkit.jobs.experts import Experts
from trainkit.jobs.schema import Model, RopeScaling
from trainkit.runs.checkpoints import Checkpoint, checkpoint_folder, open_checkpoint
from trainkit.train.checkpoint import save_load as checkpoint
from trainkit.train.checkpoint.save_load import CheckpointMetadata
from trainkit.train.huggingface import load_weights
from trainkit.train.huggingface.weights import CheckpointWeights
from trainkit.train.huggingface.writing import export
from trainkit.train.model.transformer import Transformer, build_on_meta
from trainkit.train.parallel.shards import saved_tensors, sharded_parameters

VOCAB = 53  # divides by nothing used here
COMMON: dict[str, Any] = {
    "name": "tiny",
    "num_layers": 2,
    "hidden_size": 24,
    "num_attention_heads": 3,
    "seq_length": 16,
}
LLAMA: dict[str, Any] = {
    **COMMON,
    "family": "llama",
    "num_attention_heads": 4,
    "hidden_size": 32,
    "ffn_hidden_size": 40,
}
NEOX: dict[str, Any] = {**COMMON, "family": "gpt-neox", "hidden_size": 48}
WIDE: dict[str, Any] = {**LLAMA, "num_query_groups": 2, "kv_channels": 12}
THEIR_WIDE: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "intermediate_size": 40,
    "max_position_embeddings": 16,
    "rms_norm_eps": 1e-5,
    "pad_token_id": None,
}
LLAMA3 = RopeScaling(type="llama3", factor=8.0, original_max_position_embeddings=8)
# Our shape, and the same in transformers' words, written by hand.
CASES: dict[str, tuple[Model, dict[str, Any]]] = {
    "gpt": (Model(**COMMON), {"n_positions": 16, "n_embd": 24, "n_layer": 2, "n_head": 3}),
    "gpt-untied": (
        Model(
            **COMMON,
            untie_embeddings_and_output_weights=True,
            gelu="exact",
            ffn_hidden_size=40,
            max_position_embeddings=20,
            layernorm_epsilon=1e-3,
        ),
        {
            "n_positions": 20,
            "n_embd": 24,
            "n_layer": 2,
            "n_head": 3,
            "n_inner": 40,
            "activation_function": "gelu",
            "tie_word_embeddings": False,
            "layer_norm_epsilon": 1e-3,
        },
    ),
    "gpt-neox": (
        Model(**NEOX),
        {
            "hidden_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 3,
            "intermediate_size": 192,
            "max_position_embeddings": 16,
        },
    ),
    "gpt-neox-tied": (
        Model(
            **NEOX,
            gpt_j_residual=False,
            untie_embeddings_and_output_weights=False,
            gelu="tanh",
            rotary_percent=0.5,
            rotary_base=500.0,
        ),
        {
            "hidden_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 3,
            "intermediate_size": 192,
            "max_position_embeddings": 32,
            "use_parallel_residual": False,
            "tie_word_embeddings": True,
            "hidden_act": "gelu_fast",
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 500.0,
                "partial_rotary_factor": 0.5,
            },
        },
    ),
    "gpt-j-tied": (
        Model(**NEOX, gpt_j_tied=True, rotary_percent=1.0, layernorm_epsilon=1e-3),
        {
            "hidden_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 3,
            "intermediate_size": 192,
            "max_position_embeddings": 16,
            "layer_norm_eps": 1e-3,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10000.0,
                "partial_rotary_factor": 1.0,
            },
        },
    ),
    "llama": (
        Model(**LLAMA, rotary_base=300.0),
        {
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "intermediate_size": 40,
            "max_position_embeddings": 16,
            "rms_norm_eps": 1e-5,
            "rope_parameters": {"rope_type": "default", "rope_theta": 300.0},
        },
    ),
    "llama-tied-linear": (
        Model(
            **LLAMA,
            num_query_groups=1,
            untie_embeddings_and_output_weights=False,
            rope_scaling=RopeScaling(type="linear", factor=4.0),
        ),
        {
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 1,
            "intermediate_size": 40,
            "max_position_embeddings": 16,
            "rms_norm_eps": 1e-5,
            "tie_word_embeddings": True,
            "rope_scaling": {"rope_type": "linear", "factor": 4.0},
        },
    ),
    "llama-wide-llama3": (
        Model(
            **LLAMA, num_query_groups=2, kv_channels=12, rope_scaling=LLAMA3, layernorm_epsilon=1e-3
        ),
        {
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 12,
            "intermediate_size": 40,
            "max_position_embeddings": 64,
            "rms_norm_eps": 1e-3,
            "rope_scaling": {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8,
            },
        },
    ),
    "mistral": (
        Model(**{**WIDE, "family": "mistral"}, sliding_window=5),
        {**THEIR_WIDE, "sliding_window": 5},
    ),
    "qwen2": (
        Model(**{**LLAMA, "family": "qwen2"}, num_query_groups=2, rotary_base=300.0),
        {
            **{key: value for key, value in THEIR_WIDE.items() if key != "head_dim"},
            "rope_parameters": {"rope_type": "default", "rope_theta": 300.0},
        },
    ),
    "qwen3-tied": (
        Model(
            **{**WIDE, "family": "qwen3"},
            untie_embeddings_and_output_weights=False,
            rope_scaling=RopeScaling(
                type="yarn", factor=4.0, original_max_position_embeddings=16, beta_fast=4.0
            ),
        ),
        {
            **THEIR_WIDE,
            "tie_word_embeddings": True,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1e6,
                "factor": 4.0,
                "beta_fast": 4.0,
                "original_max_position_embeddings": 16,
            },
        },
    ),
    "olmo2": (Model(**{**WIDE, "family": "olmo2"}, rotary_base=10000.0), {**THEIR_WIDE}),
    "olmo3": (
        Model(**{**WIDE, "family": "olmo3", "num_layers": 4}, sliding_window=5),
        {**THEIR_WIDE, "num_hidden_layers": 4, "sliding_window": 5},
    ),
    "gemma3": (
        Model(
            **{**WIDE, "family": "gemma3"},
            sliding_window=5,
            sliding_window_pattern=2,
            sliding_rotary_base=50.0,
            query_pre_attn_scalar=24,
            rope_scaling=RopeScaling(type="linear", factor=8.0),
        ),
        {
            **THEIR_WIDE,
            "sliding_window": 5,
            "layer_types": ["sliding_attention", "full_attention"],
            "query_pre_attn_scalar": 24,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
            },
        },
    ),
}
EXPERTS = {"num_experts": 5, "router_topk": 2, "ffn_hidden_size": 20}
DENSE_FIRST = EXPERTS | {"first_dense_layers": 1}
CASES |= {
    "qwen3-moe": (
        Model(
            **{**WIDE, "family": "qwen3-moe", "num_layers": 3, "moe": DENSE_FIRST},
            sliding_window=5,
        ),
        {
            **THEIR_WIDE,
            "num_hidden_layers": 3,
            "mlp_only_layers": [0],
            "moe_intermediate_size": 20,
            "num_experts": 5,
            "num_experts_per_tok": 2,
            "norm_topk_prob": True,
            "use_sliding_window": True,
            "sliding_window": 5,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
        },
    ),
    "mixtral-tied": (
        Model(
            **{**WIDE, "family": "mixtral", "moe": EXPERTS},
            untie_embeddings_and_output_weights=False,
        ),
        {
            **THEIR_WIDE,
            "tie_word_embeddings": True,
            "intermediate_size": 20,
            "num_local_experts": 5,
            "num_experts_per_tok": 2,
        },
    ),
    "olmoe": (
        Model(**{**LLAMA, "family": "olmoe", "moe": EXPERTS}, num_query_groups=2),
        {
            **{key: value for key, value in THEIR_WIDE.items() if key != "head_dim"},
            "intermediate_size": 20,
            "num_experts": 5,
            "num_experts_per_tok": 2,
        },
    ),
}
LATENTS = {"kv_lora_rank": 10, "qk_head_dim": 6, "qk_pos_emb_head_dim": 4, "v_head_dim": 5}
THEIR_LATENTS: dict[str, Any] = {
    **{key: value for key, value in THEIR_WIDE.items() if key != "head_dim"},
    "num_key_value_heads": 4,
    "kv_lora_rank": 10,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 4,
    "v_head_dim": 5,
    "n_routed_experts": 6,
    "moe_intermediate_size": 12,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}
GPT_OSS_YARN: dict[str, Any] = {
    "factor": 4.0,
    "original_max_position_embeddings": 8,
    "truncate": False,
}
CASES |= {
    "deepseek-v3": (
        Model(
            **{**LLAMA, "family": "deepseek-v3", "mla": LATENTS | {"q_lora_rank": 9}},
            moe=Experts(
                num_experts=6,
                router_topk=4,
                ffn_hidden_size=12,
                shared_expert_intermediate_size=24,
                first_dense_layers=1,
                router_num_groups=3,
                router_group_topk=2,
                router_topk_scaling_factor=2.5,
            ),
            rope_scaling=RopeScaling(
                type="yarn",
                factor=4.0,
                original_max_position_embeddings=8,
                mscale=0.7,
                mscale_all_dim=1.0,
            ),
        ),
        {
            **THEIR_LATENTS,
            "q_lora_rank": 9,
            "num_experts_per_tok": 4,
            "n_shared_experts": 2,
            "first_k_dense_replace": 1,
            "n_group": 3,
            "topk_group": 2,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 8,
                "mscale": 0.7,
                "mscale_all_dim": 1.0,
            },
        },
    ),
    "deepseek-v3-whole-queries": (
        Model(
            **{**LLAMA, "family": "deepseek-v3", "mla": LATENTS},
            moe=Experts(
                num_experts=6,
                router_topk=2,
                ffn_hidden_size=12,
                shared_expert_intermediate_size=12,
            ),
        ),
        {
            **THEIR_LATENTS,
            "q_lora_rank": None,
            "num_experts_per_tok": 2,
            "first_k_dense_replace": 0,
            "n_group": 1,
            "topk_group": 1,
            "routed_scaling_factor": 1.0,
        },
    ),
    "gpt-oss": (
        Model(
            **{**WIDE, "family": "gpt-oss", "num_layers": 3, "moe": EXPERTS},
            sliding_window=5,
            rope_scaling=RopeScaling(type="yarn", **GPT_OSS_YARN),
        ),
        {
            **THEIR_WIDE,
            "num_hidden_layers": 3,
            "intermediate_size": 20,
            "num_local_experts": 5,
            "num_experts_per_tok": 2,
            "sliding_window": 5,
            "rope_parameters": {"rope_type": "yarn", "rope_theta": 150000.0, **GPT_OSS_YARN},
        },
    ),
}
TOKENS_BS = torch.randint(0, VOCAB, (3, 16), generator=torch.Generator().manual_seed(3))
Weights = dict[str, Tensor]


def shake(module: nn.Module) -> None:
    """Random values everywhere, norms and biases too."""
    torch.manual_seed(1)
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.3)
    for name, buffer in module.named_buffers():
        if name.endswith(("expert_bias", "e_score_correction_bias")):
            nn.init.normal_(buffer, std=0.3)


def ours(model: Model) -> Transformer:
    module = build_on_meta(model, VOCAB)
    module.to_empty(device="cpu")
    shake(module)
    return module


def theirs(case: str) -> Any:
    """A transformers model of the case, with random weights."""
    transformers: Any = importlib.import_module("transformers")

    model, words = CASES[case]
    names = model.architecture.hugging_face
    ids = {"bos_token_id": 0, "eos_token_id": 0}
    config = transformers.AutoConfig.for_model(names.model_type, vocab_size=VOCAB, **ids, **words)
    module = getattr(transformers, names.architecture)(config).eval()
    shake(module)
    if model.gpt_j_tied:
        for layer in module.gpt_neox.layers:
            layer.post_attention_layernorm.load_state_dict(layer.input_layernorm.state_dict())
    return module


def save(module: Transformer, folder: Path, step: int = 7) -> Checkpoint:
    tensors = {f"model.{name}": p.detach() for name, p in saved_tensors(module).items()}
    checkpoint.save(folder, tensors, CheckpointMetadata(step, consumed_samples=0))
    return open_checkpoint(checkpoint_folder(folder, step))


def write(saved: Checkpoint, model: Model, target: Path, **more: Any) -> Any:
    return export(
        CheckpointWeights(saved, model),
        model,
        target,
        **{"dtype": "fp32", "shard_bytes": 10**9, "tokenizer": None, "about": {}, **more},
    )


def loaded(folder: Path, model: Model, rows: int = VOCAB) -> Transformer:
    module = build_on_meta(model, rows)
    module.to_empty(device="cpu")
    load_weights(folder, sharded_parameters(module, 1), model, rows)
    return module


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder that transformers saves for a case."""
    made: dict[str, Path] = {}

    def folder(case: str) -> Path:
        if case not in made:
            made[case] = tmp_path_factory.mktemp(case)
            theirs(case).save_pretrained(made[case])
        return made[case]

    return folder


@pytest.fixture
def copied(folders: Callable[[str], Path], tmp_path: Path) -> Callable[[str], Path]:
    """A copy of it, to change."""
    return lambda case: Path(shutil.copytree(folders(case), tmp_path / case))


def change_tensors(folder: Path, new: Callable[[Weights], Weights]) -> Path:
    tensors = new(load_file(folder / "model.safetensors"))
    save_file(
        {name: t.contiguous().clone() for name, t in tensors.items()},
        folder / "model.safetensors",
        {"format": "pt"},
    )
    return folder


def change_config(folder: Path, **values: Any) -> Path:
    """Set keys of config.json; None takes one away."""
    path = folder / "config.json"
    config = json.loads(path.read_text()) | values
    path.write_text(json.dumps({key: value for key, value in config.items() if value is not None}))
    return folder


def said(problems: list[Problem]) -> str:
    return "\n".join(map(str, problems))


def equal(left: Tensor, right: Tensor) -> None:
    torch.testing.assert_close(left, right, rtol=1e-5, atol=1e-5)


def change_index(folder: Path, weight_map: dict[str, Any]) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
