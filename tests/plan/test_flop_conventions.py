"""FLOPs as others count them, against the figures that they published."""

from __future__ import annotations

import pytest

from tests.plan.example import shape
from trainkit.jobs.schema import Model
from trainkit.plan.arithmetic import model_flops_per_token_of
from trainkit.plan.flop_conventions import CONVENTIONS, megatron_2021, tflops_per_device

BLOOM = shape("gpt", 70, 14336, 112, 2048)
NEOX_20B = shape("gpt-neox", 44, 6144, 64, 2048)
NEOX_9B = shape("gpt-neox", 44, 4096, 64, 2048)


def test_bloom() -> None:
    """BigScience's chronicles of BLOOM: 384 A100, 19.561 samples/s, 149.77 TFLOP/s a GPU by
    Megatron's formula."""
    assert tflops_per_device("megatron-2021", BLOOM, 250880, 19.561, 384) == pytest.approx(
        149.77, rel=1e-3
    )


@pytest.mark.parametrize(
    ("model", "vocab", "samples", "gpus", "published"),
    [
        (NEOX_20B, 50688, 4.728, 24, 63.2),
        (NEOX_9B, 50432, 6.381, 8, 127.2),
        (NEOX_9B, 50432, 9.074, 16, 90.3),
        (NEOX_9B, 50432, 9.02, 24, 59.8),
    ],
    ids=["20B on 3 nodes", "13B on 1", "13B on 2", "13B on 3"],
)
def test_lambda(model: Model, vocab: int, samples: float, gpus: int, published: float) -> None:
    """LambdaLabs' README of gpt-neox-training: samples/s and TFLOPs a GPU, printed by GPT-NeoX
    of 2022. Its "13B" has 9.27 billion parameters."""
    assert tflops_per_device("gpt-neox-2022", model, vocab, samples, gpus) == pytest.approx(
        published, rel=3e-3
    )


def test_palm_6n() -> None:
    """KempnerForge's Llama 3 8B on one H200: 10,471 tokens/s are 57.8 % of 989.4 TFLOP/s."""
    llama = shape("llama", 32, 4096, 32, 4096, num_query_groups=8, ffn_hidden_size=14336)
    assert tflops_per_device("palm-6n", llama, 128256, 10471 / 4096, 1) / 989.4 == pytest.approx(
        0.578, abs=5e-4
    )


def test_megatron_without_recomputation_and_causal_is_the_exact_count() -> None:
    """Taking back half of attention, 72 L H^2 x S / 12H, leaves what arithmetic.py counts."""
    causal = megatron_2021(BLOOM, 250880, recomputed=False) - 72 * 70 * 14336**2 * 2048 / (
        12 * 14336
    )
    assert causal == pytest.approx(model_flops_per_token_of(BLOOM, 250880), rel=1e-12)


def test_names() -> None:
    assert list(CONVENTIONS) == ["megatron-2021", "palm-6n", "gpt-neox-2022"]
    with pytest.raises(KeyError):
        tflops_per_device("mine", BLOOM, 250880, 1.0, 1)
