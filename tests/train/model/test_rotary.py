"""Rotary positions: against transformers' frequencies, by the property they exist for, and far
out."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

from tests.train.peers import config_of
from trainkit.jobs.schema import Model, RopeScaling
from trainkit.ops.rotary import rotate
from trainkit.train.model.frequencies import frequencies, tables

CPU = torch.device("cpu")


def llama(**changes: object) -> Model:
    """Llama-3-8B's heads."""
    shape = {
        "family": "llama",
        "num_layers": 1,
        "hidden_size": 4096,
        "num_attention_heads": 32,
        "seq_length": 8192,
        "rotary_base": 500000.0,
    }
    return Model.model_validate({**shape, **changes})


LLAMA_31 = RopeScaling(
    type="llama3",
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=8192,
)
LLAMA_32 = RopeScaling(
    type="llama3",
    factor=32.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=8192,
)
OTHER = RopeScaling(
    type="llama3",
    factor=2.5,
    low_freq_factor=0.5,
    high_freq_factor=9.0,
    original_max_position_embeddings=700,
)
LINEAR = RopeScaling(type="linear", factor=4.0)


@pytest.mark.parametrize("theta", [10000.0, 500000.0])
@pytest.mark.parametrize(
    "scaling", [LLAMA_31, LLAMA_32, OTHER, LINEAR], ids=["3.1", "3.2", "other", "linear"]
)
def test_stretched_frequencies_equal_transformers(scaling: RopeScaling, theta: float) -> None:
    """ROPE_INIT_FUNCTIONS, which compute in fp32."""
    functions = pytest.importorskip("transformers.modeling_rope_utils").ROPE_INIT_FUNCTIONS
    model = llama(rope_scaling=scaling, rotary_base=theta, max_position_embeddings=131072)
    theirs, attention_scaling = functions[scaling.type](config_of(model), CPU)
    assert attention_scaling == 1
    ours, plain = frequencies(model, CPU), frequencies(llama(rotary_base=theta), CPU)
    torch.testing.assert_close(ours, theirs.double(), rtol=2e-6, atol=0)
    if scaling.type == "llama3":  # all three bands are there
        kept, divided = ours == plain, (ours / plain * scaling.factor - 1).abs() < 1e-12
        assert kept.any() and divided.any() and (~kept & ~divided).any()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_tables_far_out(dtype: torch.dtype) -> None:
    """At position 1,000,000 the tables are right to their own rounding: angles are fp64 whatever
    the model computes in. fp32 angles would be off by a hundredth."""
    model, at = llama(), 1_000_000
    cos_SR, sin_SR = tables(model, torch.tensor([at]), dtype)
    assert cos_SR.shape == sin_SR.shape == (1, 128)
    assert (
        cos_SR.dtype == sin_SR.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    )
    angles = [at * 500000.0 ** (-2 * (i % 64) / 128) for i in range(128)]
    rounding = 1e-9 if dtype == torch.float64 else 1e-7
    assert (
        cos_SR[0].double() - torch.tensor([math.cos(a) for a in angles], dtype=torch.float64)
    ).abs().max() < rounding
    assert (
        sin_SR[0].double() - torch.tensor([math.sin(a) for a in angles], dtype=torch.float64)
    ).abs().max() < rounding
    narrow = (at * frequencies(model, CPU).float()).cos().double()
    assert (narrow - cos_SR[0, :64].double()).abs().max() > 1e-2


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@settings(max_examples=40, deadline=None)
@given(
    model=st.sampled_from(
        [llama(), llama(rope_scaling=LLAMA_31), llama(rope_scaling=LINEAR, kv_channels=6)]
    ),
    query=st.integers(0, 100_000),
    key=st.integers(0, 100_000),
    shift=st.integers(0, 100_000),
    seed=st.integers(0, 99),
)
def test_products_depend_on_distances_only(
    model: Model, query: int, key: int, shift: int, seed: int
) -> None:
    """q at m, k at n: the product is that of q at m + d, k at n + d. And lengths stay."""
    x = random(2, 1, 1, 1, model.head_size, seed=seed)

    def turned(vector: Tensor, position: int) -> Tensor:
        return rotate(vector, *tables(model, torch.tensor([position]), torch.float64))

    here = (turned(x[0], query) * turned(x[1], key)).sum()
    there = (turned(x[0], query + shift) * turned(x[1], key + shift)).sum()
    assert here.item() == pytest.approx(there.item(), abs=1e-8)
    assert turned(x[0], query).norm().item() == pytest.approx(x[0].norm().item(), rel=1e-12)


def test_channels_turn_in_pairs_half_a_head_apart() -> None:
    """Channel i with channel i + R / 2, by complex multiplication; the channels after R pass
    untouched."""
    # 8 of 32 channels
    model = Model(
        family="gpt-neox", num_layers=1, hidden_size=64, num_attention_heads=2, seq_length=8
    )
    x_BSAD = random(2, 8, 2, 32)
    turned = rotate(x_BSAD, *tables(model, torch.arange(8), torch.float64))
    turns = torch.polar(
        torch.ones(8, 1, 4, dtype=torch.float64),
        torch.arange(8)[:, None, None] * frequencies(model, CPU),
    )
    pairs = torch.complex(x_BSAD[..., :4], x_BSAD[..., 4:8]) * turns
    torch.testing.assert_close(
        turned[..., :8], torch.cat([pairs.real, pairs.imag], -1), rtol=1e-13, atol=1e-13
    )
    assert torch.equal(turned[..., 8:], x_BSAD[..., 8:])


@settings(max_examples=30, deadline=None)
@given(batch=st.integers(1, 3), length=st.integers(1, 6), data=st.data())
def test_positions_of_each_sample(batch: int, length: int, data: st.DataObject) -> None:
    """(B, S) positions: every sample as if it were alone with its own."""
    numbers = data.draw(
        st.lists(st.integers(0, 10_000), min_size=batch * length, max_size=batch * length)
    )
    positions_BS = torch.tensor(numbers).view(batch, length)
    model, x_BSAD = llama(kv_channels=8), random(batch, length, 3, 8)
    together = rotate(x_BSAD, *tables(model, positions_BS, torch.float64))
    alone = [
        rotate(x_BSAD[b : b + 1], *tables(model, positions_BS[b], torch.float64))
        for b in range(batch)
    ]
    assert torch.equal(together, torch.cat(alone))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bits_are_rounded_once(dtype: torch.dtype) -> None:
    """Turned in fp32, then rounded: the nearest 16-bit numbers to the exact ones but where fp32
    itself decides otherwise."""
    model = llama(kv_channels=16)
    x_BSAD, positions = random(2, 50, 4, 16).to(dtype), torch.arange(3000, 3050)
    turned = rotate(x_BSAD, *tables(model, positions, dtype))
    exact = rotate(x_BSAD.double(), *tables(model, positions, torch.float64))
    assert turned.dtype == dtype
    assert (turned == exact.to(dtype)).double().mean() > 0.999
