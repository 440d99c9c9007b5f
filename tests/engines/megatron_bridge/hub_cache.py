"""A hub's cache with the published shapes that Megatron-Bridge's recipes ask for: config.json
alone, as the model cards have them."""

from __future__ import annotations

import json
from pathlib import Path

LLAMA: dict[str, object] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "rms_norm_eps": 1e-05,
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
LLAMA3 = {**LLAMA, "vocab_size": 128256, "rope_theta": 500000.0, "num_key_value_heads": 8}
STRETCHED = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
QWEN2: dict[str, object] = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "hidden_act": "silu",
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "max_position_embeddings": 32768,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
    "torch_dtype": "bfloat16",
}
QWEN3 = {
    **QWEN2,
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 151936,
    "head_dim": 128,
    "num_key_value_heads": 8,
    "max_position_embeddings": 40960,
    "attention_bias": False,
}


def shape(hidden: int, layers: int, heads: int, wide: int) -> dict[str, object]:
    return {
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "intermediate_size": wide,
    }


MODELS: dict[str, dict[str, object]] = {
    "meta-llama/Llama-2-7b-hf": {
        **LLAMA,
        **shape(4096, 32, 32, 11008),
        "num_key_value_heads": 32,
        "vocab_size": 32000,
        "rope_theta": 10000.0,
        "max_position_embeddings": 4096,
    },
    "meta-llama/Meta-Llama-3-8B": {
        **LLAMA3,
        **shape(4096, 32, 32, 14336),
        "max_position_embeddings": 8192,
    },
    "meta-llama/Meta-Llama-3-70B": {
        **LLAMA3,
        **shape(8192, 80, 64, 28672),
        "max_position_embeddings": 8192,
    },
    "meta-llama/Meta-Llama-3.1-8B": {
        **LLAMA3,
        **shape(4096, 32, 32, 14336),
        "max_position_embeddings": 131072,
        "rope_scaling": STRETCHED,
    },
    "meta-llama/Meta-Llama-3.1-70B": {
        **LLAMA3,
        **shape(8192, 80, 64, 28672),
        "max_position_embeddings": 131072,
        "rope_scaling": STRETCHED,
    },
    "meta-llama/Llama-3.2-1B": {
        **LLAMA3,
        **shape(2048, 16, 32, 8192),
        "head_dim": 64,
        "max_position_embeddings": 131072,
        "rope_scaling": {**STRETCHED, "factor": 32.0},
        "tie_word_embeddings": True,
    },
    "meta-llama/Llama-3.2-3B": {
        **LLAMA3,
        **shape(3072, 28, 24, 8192),
        "head_dim": 128,
        "max_position_embeddings": 131072,
        "rope_scaling": {**STRETCHED, "factor": 32.0},
        "tie_word_embeddings": True,
    },
    "Qwen/Qwen2-7B": {
        **QWEN2,
        **shape(3584, 28, 28, 18944),
        "num_key_value_heads": 4,
        "vocab_size": 152064,
    },
    "Qwen/Qwen2.5-7B": {
        **QWEN2,
        **shape(3584, 28, 28, 18944),
        "num_key_value_heads": 4,
        "vocab_size": 152064,
    },
    "Qwen/Qwen3-0.6B": {
        **QWEN3,
        **shape(1024, 28, 16, 3072),
        "tie_word_embeddings": True,
    },
    "Qwen/Qwen3-1.7B": {
        **QWEN3,
        **shape(2048, 28, 16, 6144),
        "tie_word_embeddings": True,
    },
    "Qwen/Qwen3-4B": {
        **QWEN3,
        **shape(2560, 36, 32, 9728),
        "tie_word_embeddings": True,
    },
    "Qwen/Qwen3-8B": {**QWEN3, **shape(4096, 36, 32, 12288)},
    "Qwen/Qwen3-14B": {**QWEN3, **shape(5120, 40, 40, 17408)},
    "Qwen/Qwen3-32B": {**QWEN3, **shape(5120, 64, 64, 25600)},
}


def write_cache(home: Path) -> Path:
    """HF_HOME with all of them."""
    for name, config in MODELS.items():
        model = home / "hub" / f"models--{name.replace('/', '--')}"
        (model / "refs").mkdir(parents=True)
        (model / "refs" / "main").write_text("0" * 40)
        snapshot = model / "snapshots" / ("0" * 40)
        snapshot.mkdir(parents=True)
        (snapshot / "config.json").write_text(json.dumps(config))
    return home
