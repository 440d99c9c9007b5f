"""The distribution tokens are drawn from, against plain Python and against transformers."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import assume, given, settings, strategies as st

from trainkit.base.errors import TrainkitError
from trainkit.train.decoding.sampling import Sampling, choose, probabilities

LOGITS = st.lists(st.integers(-40, 40).map(lambda n: n / 8), min_size=1, max_size=20)  # with ties
TEMPERATURES = st.sampled_from([0.1, 0.5, 1.0, 2.5])


def reference(
    logits: list[float], temperature: float, top_k: int, top_p: float
) -> list[float] | None:
    """The same from the definition, one rule after the other; None where rounding decides
    whether top-p is reached."""
    scores = [x / temperature for x in logits]
    kth = sorted(scores, reverse=True)[min(top_k or len(scores), len(scores)) - 1]
    weights = [math.exp(x - max(scores)) if x >= kth else 0.0 for x in scores]
    p = [w / sum(weights) for w in weights]
    kept: list[int] = []
    for i in sorted(range(len(p)), key=lambda i: -p[i]):  # stable: of equal ones the first
        before = sum(p[j] for j in kept)
        if top_p < 1 and abs(before - top_p) < 1e-9:
            return None
        if top_p < 1 and before >= top_p:
            break
        kept.append(i)
    total = sum(p[i] for i in kept)
    return [p[i] / total if i in kept else 0.0 for i in range(len(p))]


@settings(deadline=None, max_examples=300)
@given(
    logits=LOGITS,
    temperature=TEMPERATURES,
    top_k=st.integers(0, 25),
    top_p=st.sampled_from([1e-9, 0.1, 0.5, 0.9, 0.999, 1.0]),
)
def test_equals_the_definition(
    logits: list[float], temperature: float, top_k: int, top_p: float
) -> None:
    expected = reference(logits, temperature, top_k, top_p)
    assume(expected is not None)
    p_V = probabilities(torch.tensor(logits), Sampling(temperature, top_k, top_p))
    assert p_V.tolist() == pytest.approx(expected, abs=1e-12)
    assert [x == 0 for x in p_V.tolist()] == [x == 0 for x in expected or []]


@settings(deadline=None, max_examples=100)
@given(
    seed=st.integers(0, 10**6),
    temperature=TEMPERATURES,
    top_k=st.integers(1, 40),
    top_p=st.sampled_from([0.2, 0.7, 0.95]),
)
def test_equals_transformers(seed: int, temperature: float, top_k: int, top_p: float) -> None:
    process = pytest.importorskip("transformers.generation.logits_process")
    logits_V = torch.randn(40, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    scores_1V = logits_V[None]
    for warper in (
        process.TemperatureLogitsWarper(temperature),
        process.TopKLogitsWarper(top_k),
        process.TopPLogitsWarper(top_p),
    ):
        scores_1V = warper(None, scores_1V)
    torch.testing.assert_close(
        probabilities(logits_V, Sampling(temperature, top_k, top_p)),
        scores_1V[0].softmax(-1),
        rtol=1e-12,
        atol=1e-12,
    )


def test_draws_follow_the_distribution_and_the_seed() -> None:
    logits_V, sampling = torch.tensor([0.0, 1.0, 2.0, -1.0]), Sampling(temperature=0.7, top_k=3)
    generator = torch.Generator().manual_seed(3)
    drawn = [choose(logits_V, sampling, generator) for _ in range(4000)]
    counts = torch.bincount(torch.tensor(drawn), minlength=4) / len(drawn)
    assert counts[3] == 0
    # 4 standard deviations
    torch.testing.assert_close(
        counts.double(), probabilities(logits_V, sampling), rtol=0, atol=0.03
    )
    generator.manual_seed(3)
    assert [choose(logits_V, sampling, generator) for _ in range(100)] == drawn[:100]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_extreme_temperatures(dtype: torch.dtype) -> None:
    logits_V = torch.tensor([1.0, 3.0, 2.0], dtype=dtype)
    generator = torch.Generator().manual_seed(0)
    assert choose(logits_V, Sampling(temperature=0), generator) == 1
    # the smallest above 0
    assert probabilities(logits_V, Sampling(temperature=5e-324)).tolist() == [0, 1, 0]
    assert probabilities(logits_V, Sampling(temperature=1e300)).tolist() == pytest.approx(
        [1 / 3] * 3
    )


def test_greedy_draws_nothing() -> None:
    generator = torch.Generator().manual_seed(0)
    before = generator.get_state()
    choose(torch.tensor([1.0, 2.0]), Sampling(temperature=0), generator)
    assert torch.equal(generator.get_state(), before)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("broken", [math.nan, math.inf])
def test_broken_logits_are_named(broken: float, temperature: float) -> None:
    with pytest.raises(TrainkitError, match=r"highest logit is (nan|inf)"):
        choose(torch.tensor([0.0, broken, 1.0]), Sampling(temperature), torch.Generator())


@pytest.mark.parametrize(
    "wrong",
    [
        {"temperature": -0.1},
        {"temperature": math.nan},
        {"temperature": math.inf},
        {"top_k": -1},
        {"top_p": 0.0},
        {"top_p": 1.01},
        {"top_p": math.nan},
    ],
)
def test_values_out_of_range(wrong: dict[str, float]) -> None:
    with pytest.raises(TrainkitError, match=next(iter(wrong)).replace("_", "-")) as error:
        Sampling(**wrong)  # type: ignore[arg-type]
    assert error.value.exit == 1
