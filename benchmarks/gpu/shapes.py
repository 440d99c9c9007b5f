"""The two shapes whose speed is the goal, and what a GPU must have for them."""

from __future__ import annotations

from typing import Any

from trainkit.jobs.schema import Job, Model
from trainkit.plan.memory import RankMemory
from trainkit.plan.planner import make_plan

GPT2_124M: dict[str, Any] = {
    "family": "gpt",
    "num_layers": 12,
    "hidden_size": 768,
    "num_attention_heads": 12,
    "vocab_size": 50257,
}
LLAMA_3_8B: dict[str, Any] = {
    "family": "llama",
    "num_layers": 32,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_query_groups": 8,
    "ffn_hidden_size": 14336,
    "vocab_size": 128256,
    "rotary_base": 500000.0,
}


def gpt2_124m(length: int = 1024) -> Model:
    """GPT-2's smallest (Radford 2019)."""
    return Model(name="gpt2-124m", seq_length=length, **GPT2_124M)


def llama_3_8b(layers: int = 32, length: int = 8192) -> Model:
    """Llama 3's 8B (Dubey 2024, arXiv:2407.21783), or a shorter stack of its layers."""
    return Model(name="llama-3-8b", seq_length=length, **{**LLAMA_3_8B, "num_layers": layers})


def planned(job: Job) -> RankMemory:
    """What plan says of the memory of its one rank."""
    memory = make_plan(job).memory
    assert memory is not None
    return memory.fullest


def too_large(job: Job, memory_bytes: int | None) -> str:
    """Why a job does not fit the GPU by the plan; "" where it does, or nobody knows."""
    needs = planned(job).total_bytes
    if memory_bytes is None or needs <= memory_bytes:
        return ""
    return f"the plan says {needs / 2**30:.0f} GiB; this GPU has {memory_bytes / 2**30:.0f} GiB"
