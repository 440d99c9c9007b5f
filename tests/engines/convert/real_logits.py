"""Logits that a real tree of an engine computes from a converted folder."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.distributed import free_port
from tests.engines.real import RealEngine
from trainkit.engines.convert.options import FileLayout
from trainkit.jobs.schema import Model

ROWS = 512  # of NeoX's CharLevelTokenizer, which needs no file
TOKENS_BS = torch.randint(0, ROWS, (2, 16), generator=torch.Generator().manual_seed(4))
HERE = Path(__file__).parent


def megatron_words(model: Model, layout: FileLayout, folder: Path, rows: int) -> list[str]:
    """The options with which Megatron-LM has the model, as a person would write them."""
    family = model.architecture
    scaling = model.rope_scaling
    numbers: dict[str, object] = {
        "num-layers": model.num_layers,
        "hidden-size": model.hidden_size,
        "ffn-hidden-size": model.ffn_width,
        "num-attention-heads": model.num_attention_heads,
        "kv-channels": model.head_size,
        "seq-length": model.seq_length,
        "max-position-embeddings": model.positions,
        "norm-epsilon": model.layernorm_epsilon,
        "make-vocab-size-divisible-by": layout.divisor,
        "tensor-model-parallel-size": layout.tensor,
        "pipeline-model-parallel-size": layout.pipeline,
        "tokenizer-type": "NullTokenizer",
        "vocab-size": rows - 1,  # it adds one
        "micro-batch-size": len(TOKENS_BS),
        "global-batch-size": len(TOKENS_BS) * layout.expert,
        "train-iters": 1,
        "lr": 1e-3,
        "distributed-backend": "gloo",
        "transformer-impl": "local",
        "attention-backend": "unfused",
        "ckpt-format": "torch",
        "pretrained-checkpoint": folder,
    }
    flags = [
        "no-gradient-accumulation-fusion",
        "no-bias-dropout-fusion",
        "no-masked-softmax-fusion",
        "no-persist-layer-norm",
        "no-rope-fusion",
    ]
    if model.gelu_form == "exact":
        flags.append("no-bias-gelu-fusion")
    if model.untied:
        flags.append("untie-embeddings-and-output-weights")
    if not family.learned_positions:
        numbers["position-embedding-type"] = "rope"
        numbers["rotary-percent"] = model.rotary_fraction
        numbers["rotary-base"] = int(model.theta)
    if model.query_groups != model.num_attention_heads:
        flags.append("group-query-attention")
        numbers["num-query-groups"] = model.query_groups
    if family.norm.kind == "rms-norm":
        flags += ["swiglu", "disable-bias-linear", "no-bias-swiglu-fusion"]
        numbers["normalization"] = "RMSNorm"
    if family.qkv_bias:
        flags.append("add-qkv-bias")
    if family.query_key_norm == "head":
        flags.append("qk-layernorm")
    if scaling is not None and scaling.type == "llama3":
        flags.append("use-rope-scaling")
        numbers["rope-scaling-factor"] = scaling.factor
    if model.moe is not None:
        numbers |= experts_of(model)
        numbers["expert-model-parallel-size"] = layout.expert
        if not model.routing.normalized:
            flags.append("moe-router-pre-softmax")
    words = [f"--{flag}" for flag in flags]
    for name, value in numbers.items():
        words += [f"--{name}", str(value)]
    return words


def experts_of(model: Model) -> dict[str, object]:
    """Experts in the same words."""
    moe = model.moe
    assert moe is not None
    found: dict[str, object] = {
        "num-experts": moe.num_experts,
        "moe-router-topk": moe.router_topk,
        "moe-ffn-hidden-size": moe.ffn_hidden_size,
        "moe-router-topk-scaling-factor": moe.router_topk_scaling_factor,
        "moe-router-dtype": "fp32",
        "moe-token-dispatcher-type": "alltoall",
    }
    if shared := moe.shared_expert_intermediate_size:
        found["moe-shared-expert-intermediate-size"] = shared
    if moe.first_dense_layers:
        sparse = [int(model.sparse(i)) for i in range(model.num_layers)]
        found["moe-layer-freq"] = str(sparse).replace(" ", "")
    return found


def neox_config(model: Model, layout: FileLayout, folder: Path) -> dict[str, Any]:
    """The configuration with which GPT-NeoX has the model."""
    learned = model.architecture.learned_positions
    return {
        "pipe_parallel_size": layout.pipeline,
        "model_parallel_size": layout.tensor,
        "num_layers": model.num_layers,
        "hidden_size": model.hidden_size,
        "num_attention_heads": model.num_attention_heads,
        "intermediate_size": model.ffn_width,
        "seq_length": model.seq_length,
        "max_position_embeddings": model.positions,
        "layernorm_epsilon": model.layernorm_epsilon,
        "pos_emb": "learned" if learned else "rotary",
        "rotary_pct": model.rotary_fraction or 1.0,
        "rotary_emb_base": int(model.rotary_base or 10000),
        "no_weight_tying": model.untied,
        "gpt_j_residual": model.parallel_residual,
        "gpt_j_tied": model.gpt_j_tied,
        "bias_gelu_fusion": model.gelu_form == "tanh",
        "output_layer_parallelism": "column",
        "make_vocab_size_divisible_by": layout.divisor,
        "tokenizer_type": "CharLevelTokenizer",
        "vocab_file": str(folder / "latest"),  # it must be a file; nobody reads it
        "attention_config": [[["global"], model.num_layers]],
        "optimizer": {"type": "Adam", "params": {"lr": 0.001}},
        "train_micro_batch_size_per_gpu": len(TOKENS_BS),
        "train_iters": 1,
        "lr_decay_iters": 1,
        "precision": "fp32",
        "distributed_backend": "gloo",
        "hidden_dropout": 0,
        "attention_dropout": 0,
        "load": str(folder),
        "finetune": True,
        "num_gpus": layout.tensor * max(1, layout.pipeline),
        "use_wandb": False,
    }


def real_logits(
    engine: RealEngine,
    model: Model,
    layout: FileLayout,
    folder: Path,
    scratch: Path,
    rows: int = ROWS,
) -> Tensor:
    """What the engine computes of `TOKENS_BS`, the padding of the vocabulary left out.

    Args:
        engine: a tree that runs here.
        model: the shape.
        layout: of the converted files, and of the ranks that load them.
        folder: converted, or of Megatron-LM's own checkpoints.
        scratch: for what is given to the engine and what it says.
        rows: of the vocabulary; GPT-NeoX has `ROWS`.
    """
    tokens = scratch / "tokens.json"
    tokens.write_text(json.dumps(TOKENS_BS.tolist()))
    result = scratch / "logits.pt"
    if engine.engine == "megatron-lm":
        words = [str(HERE / "megatron_logits.py"), str(tokens), str(result)]
        words += megatron_words(model, layout, folder, rows)
    else:
        config = scratch / "config.yml"
        text = json.dumps(neox_config(model, layout, folder))
        # 1e-05 is a text in YAML 1.1, 1.0e-05 a number
        config.write_text(re.sub(r"(?<= )(\d+)e-", r"\1.0e-", text))
        words = [str(HERE / "neox_logits.py"), str(tokens), str(result), str(config)]
    ranks = layout.tensor * max(1, layout.pipeline) * layout.expert
    _run_ranks(engine, words, ranks, scratch)
    found: Tensor = torch.load(result, weights_only=True)
    return found[..., :rows]


def _run_ranks(engine: RealEngine, words: list[str], ranks: int, scratch: Path) -> None:
    """One process a rank; all of them end well, or the first that did not says why."""
    environment = {
        **os.environ,
        **engine.environment,
        "PYTHONPATH": f"{engine.environment['PYTHONPATH']}:{engine.tree}",
        "PATH": f"{Path(engine.python).parent}:{os.environ['PATH']}",
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "GLOO_SOCKET_IFNAME": "lo",
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "LOCAL_SIZE": str(ranks),
    }
    started = []
    for rank in range(ranks):
        with open(scratch / f"{rank}.log", "w") as log:
            here = {**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            started.append(
                subprocess.Popen(
                    [engine.python, *words],
                    cwd=engine.tree,
                    env=here,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                )
            )
    try:
        codes = [process.wait(900) for process in started]
    finally:
        for process in started:
            process.kill()
    for rank, code in enumerate(codes):
        log_text = (scratch / f"{rank}.log").read_text(errors="replace")
        assert code == 0, f"rank {rank}: {code}\n{log_text[-3000:]}"
