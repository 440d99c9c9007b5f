"""Attention by latents: gradients by differences, keys that contradict it, scores of YaRN.
Against transformers: test_expert_families.py."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.train.expert_peers import deepseek
from tests.train.peers import config_of, documents_of
from trainkit.jobs.schema import Model, RopeScaling
from trainkit.ops.kernels import REFERENCE
from trainkit.train.model.attention import Context
from trainkit.train.model.frequencies import frequencies, tables
from trainkit.train.model.latent_attention import LatentAttention

CPU = torch.device("cpu")
MLA = {"kv_lora_rank": 5, "qk_head_dim": 3, "qk_pos_emb_head_dim": 4, "v_head_dim": 2}


@pytest.mark.parametrize("latent_of_queries", [None, 4])
def test_gradients_by_differences(latent_of_queries: int | None) -> None:
    """In documents of one sample, every weight and the input."""
    model = deepseek(
        Random(0), seq_length=6, hidden_size=8, num_attention_heads=2, rope_scaling=None,
        max_position_embeddings=None, mla={**MLA, "q_lora_rank": latent_of_queries},
    )  # fmt: skip
    torch.manual_seed(0)
    attention = LatentAttention(model, 0, REFERENCE).double()
    rotary = tables(model, torch.arange(6), torch.float64)
    context = Context(rotary, documents=documents_of(0, 2, 6))
    x_BSH = torch.randn(1, 6, 8, dtype=torch.float64, requires_grad=True)
    names, weights = zip(*attention.named_parameters(), strict=True)

    def of(x_BSH: Tensor, *values: Tensor) -> Tensor:
        given = dict(zip(names, values, strict=True))
        found: Tensor = torch.func.functional_call(attention, given, (x_BSH, context, None))
        return found

    assert torch.autograd.gradcheck(of, (x_BSH, *weights))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mla": None}, r"attention of family 'deepseek-v3' is by latents: write \[models.X.mla\]"),
        ({"mla": {**MLA, "v_head_dim": 8}}, "v_head_dim 8 is above .* = 7"),
        ({"kv_channels": 8}, "kv_channels is not for attention by latents"),
        ({"qk_norm": "head"}, "qk_norm is not for attention by latents"),
        ({"family": "qwen3-moe"}, "mla is for family deepseek-v3, not 'qwen3-moe'"),
        (
            {"rope_scaling": {"type": "yarn", "factor": 4.0, "mscale": 1.0}},
            "mscale and mscale_all_dim go together",
        ),
    ],
)
def test_keys_that_contradict_it(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        deepseek(Random(0), **changes)


@pytest.mark.parametrize("truncate", [True, False])
@pytest.mark.parametrize(("over", "under"), [(None, None), (0.7, 1.0), (1.0, 1.0)])
def test_yarn_equals_transformers(truncate: bool, over: float | None, under: float | None) -> None:
    """Frequencies and amplitude of ROPE_INIT_FUNCTIONS, in fp32; the ramp's ends are no whole
    numbers."""
    functions = pytest.importorskip("transformers.modeling_rope_utils").ROPE_INIT_FUNCTIONS
    said: dict[str, Any] = {
        "factor": 32.0, "original_max_position_embeddings": 4096, "truncate": truncate,
        "mscale": over, "mscale_all_dim": under,
    }  # fmt: skip
    scaling = RopeScaling(type="yarn", **said)
    shape: dict[str, Any] = {"num_layers": 1, "hidden_size": 128, "num_attention_heads": 2}
    model = Model(
        family="llama", seq_length=64, rotary_base=150000.0, rope_scaling=scaling, **shape
    )
    config = config_of(model)
    config.rope_parameters |= said
    theirs, amplitude = functions["yarn"](config, CPU)
    torch.testing.assert_close(frequencies(model, CPU), theirs.double(), rtol=2e-6, atol=0)
    assert scaling.amplitude == pytest.approx(amplitude, rel=1e-12)


def test_scores_of_the_published_model() -> None:
    """1.8739 / sqrt(192) (0.1 ln 40 + 1 squared), where other families have 1 / sqrt(head)."""
    mla = MLA | {"qk_head_dim": 128, "qk_pos_emb_head_dim": 64}
    scaling = {"type": "yarn", "factor": 40.0, "mscale": 1.0, "mscale_all_dim": 1.0}
    model = deepseek(Random(0), mla=mla, rope_scaling=scaling)
    assert model.score_scale == pytest.approx(1.8739 / 192**0.5, rel=1e-4)
    assert model.rope_scaling is not None and model.rope_scaling.amplitude == 1
    assert deepseek(Random(0), mla=mla, rope_scaling=None).score_scale is None
