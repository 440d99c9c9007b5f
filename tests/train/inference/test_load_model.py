"""The model of a checkpoint, for reading."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.train.peers import random_model, random_tokens
from tests.train.plain_loop import job_of
from trainkit.jobs.schema import Model
from trainkit.runs.checkpoints import checkpoint_folder, open_checkpoint
from trainkit.train.checkpoint import save_load as checkpoint
from trainkit.train.checkpoint.save_load import CheckpointMetadata
from trainkit.train.inference.load import load_model
from trainkit.train.model.experts import MixtureOfExperts
from trainkit.train.model.transformer import Transformer

BIASED = {"router_score_function": "sigmoid", "router_enable_expert_bias": True}


def biases(module: Transformer) -> list[torch.Tensor]:
    found = (m.router.expert_bias for m in module.modules() if isinstance(m, MixtureOfExperts))
    return [bias for bias in found if bias is not None]


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.no_grad()
def test_biases_of_experts_are_read_and_stay_fp32(dtype: torch.dtype, tmp_path: Path) -> None:
    """As training has them, whatever the weights are cast to."""
    shape = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 2, "seq_length": 16}
    moe = {"num_experts": 4, "router_topk": 2, "ffn_hidden_size": 8, **BIASED}
    model = Model.model_validate({"family": "qwen3-moe", **shape, "moe": moe})
    module = random_model(model, vocab=31)
    for number, bias_E in enumerate(biases(module)):
        bias_E.copy_(torch.tensor([0.001, -1.0001, 2.0003, 0.3]) + number)
    tensors = {f"model.{name}": t for name, t in module.state_dict().items()}
    checkpoint.save(tmp_path, tensors, CheckpointMetadata(1, consumed_samples=0))
    job = job_of("gpt", 1, tmp_path, {}).model_copy(update={"model": model})
    saved = open_checkpoint(checkpoint_folder(tmp_path, 1))
    loaded = load_model(job, saved, torch.device("cpu"), dtype)
    assert {p.dtype for p in loaded.parameters()} == {dtype}
    pairs = list(zip(biases(loaded), biases(module), strict=True))
    assert len(pairs) == 2 and all(torch.equal(one, other) for one, other in pairs)
    if dtype == torch.float32:
        tokens_BS = random_tokens(2, 16, vocab=31)
        torch.testing.assert_close(loaded(tokens_BS), module.eval()(tokens_BS))
