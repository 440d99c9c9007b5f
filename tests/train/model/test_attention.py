"""Attention against a dense product with a mask: whole samples, documents, caches, dropout; and
the words given to the variable-length kernel."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor
from torch.nn.attention import varlen

from tests.distributed import call
from tests.train.peers import documents_of
from trainkit.ops import causal_attention
from trainkit.train.model import attention
from trainkit.train.model.attention import KeyValueCache, attend, whole_samples
from trainkit.train.torch_compat import causal_varlen_attention

CPU = torch.device("cpu")
heads = st.sampled_from([(1, 1), (2, 2), (6, 1), (6, 2), (6, 3)])


def qkv(
    batch: int,
    heads: int,
    groups: int,
    length: int,
    head_size: int = 4,
    seed: int = 0,
    dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, Tensor, Tensor]:
    """(B, A, S, D), (B, G, S, D), (B, G, S, D), all leaves."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [(batch, n, length, head_size) for n in (heads, groups, groups)]
    q_BASD, k_BGSD, v_BGSD = (
        torch.randn(shape, generator=generator, dtype=dtype).requires_grad_() for shape in shapes
    )
    return q_BASD, k_BGSD, v_BGSD


def dense(
    q_BASD: Tensor,
    k_BGSD: Tensor,
    v_BGSD: Tensor,
    bounds: Sequence[int] | None = None,
    window: int = 0,
) -> Tensor:
    """softmax(q k^T / sqrt(D)) v over the tokens up to each one's own, of its document; the last
    `window` of them."""
    batch, length = q_BASD.shape[0], q_BASD.shape[2]
    each = q_BASD.shape[1] // k_BGSD.shape[1]  # heads that share a group, side by side
    k_BASD, v_BASD = k_BGSD.repeat_interleave(each, 1), v_BGSD.repeat_interleave(each, 1)
    documents_BS = torch.zeros(batch * length, dtype=torch.int64)
    for number, (start, end) in enumerate(pairwise(bounds or ())):
        documents_BS[start:end] = number
    documents_BS = documents_BS.view(batch, length)
    seen_BSS = (documents_BS[:, :, None] == documents_BS[:, None, :]).tril()
    if window:
        seen_BSS = seen_BSS.triu(1 - window)
    scores_BASS = q_BASD @ k_BASD.mT / math.sqrt(q_BASD.shape[-1])
    return scores_BASS.masked_fill(~seen_BSS[:, None], -math.inf).softmax(-1) @ v_BASD


def same_values_and_gradients(
    ours: Tensor, expected: Tensor, leaves: tuple[Tensor, ...], tolerance: float = 1e-12
) -> None:
    torch.testing.assert_close(ours, expected, rtol=tolerance, atol=tolerance)
    upstream = torch.randn(ours.shape, generator=torch.Generator().manual_seed(5), dtype=ours.dtype)
    found, wanted = (torch.autograd.grad(y, leaves, upstream) for y in (ours, expected))
    for gradient, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(gradient, other, rtol=tolerance, atol=tolerance)


@settings(max_examples=30, deadline=None)
@given(batch=st.integers(1, 3), heads=heads, length=st.integers(1, 12), seed=st.integers(0, 99))
def test_equals_a_dense_product(batch: int, heads: tuple[int, int], length: int, seed: int) -> None:
    leaves = qkv(batch, *heads, length, seed=seed)
    same_values_and_gradients(attend(*leaves, None, 0.0), dense(*leaves), leaves)


@st.composite
def packed(draw: st.DrawFn, longest: int = 9) -> tuple[int, int, list[int]]:
    """(B, S, bounds): documents begin anywhere, also one token apart and where a sample begins
    anyway."""
    batch, length = draw(st.integers(1, 3)), draw(st.integers(1, longest))
    begun = draw(st.sets(st.integers(0, batch * length)))
    return batch, length, sorted(begun | {b * length for b in range(batch + 1)})


@settings(max_examples=60, deadline=None)
@given(micro_batch=packed(), heads=heads, seed=st.integers(0, 99))
def test_documents_equal_a_dense_mask(
    micro_batch: tuple[int, int, list[int]], heads: tuple[int, int], seed: int
) -> None:
    """Document by document, values and gradients."""
    batch, length, bounds = micro_batch
    leaves = qkv(batch, *heads, length, seed=seed)
    same_values_and_gradients(
        attend(*leaves, documents_of(*bounds), 0.0), dense(*leaves, bounds), leaves
    )


@settings(max_examples=60, deadline=None)
@given(
    micro_batch=packed(longest=40),
    heads=heads,
    window=st.integers(1, 20),
    block=st.integers(1, 9),
    seed=st.integers(0, 99),
)
def test_windows_equal_a_dense_mask(
    micro_batch: tuple[int, int, list[int]],
    heads: tuple[int, int],
    window: int,
    block: int,
    seed: int,
) -> None:
    """Windows and samples that fill no block, of whole samples and of documents."""
    batch, length, bounds = micro_batch
    leaves = qkv(batch, *heads, length, seed=seed)
    with patch.object(causal_attention, "SMALLEST_BLOCK", block):
        whole = attend(*leaves, None, 0.0, window=window)
        parts = attend(*leaves, documents_of(*bounds), 0.0, window=window)
    same_values_and_gradients(whole, dense(*leaves, window=window), leaves)
    same_values_and_gradients(parts, dense(*leaves, bounds, window), leaves)


def test_windows_are_compiled_whole() -> None:
    leaves = qkv(2, 4, 2, 200)
    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    same_values_and_gradients(
        compiled(*leaves, None, 0.0, window=70), dense(*leaves, window=70), leaves
    )


def test_a_full_cache_is_an_error() -> None:
    cache = KeyValueCache(1, 1, 4, 4, dtype=torch.float64, device=CPU)
    _, k_BGSD, v_BGSD = (t.detach() for t in qkv(1, 1, 1, 3))
    cache.extend(k_BGSD, v_BGSD)
    with pytest.raises(ValueError, match="6 tokens do not fit a cache of 4"):
        cache.extend(k_BGSD, v_BGSD)
    assert cache.length == 3


@pytest.mark.parametrize(("bounds", "window"), [(None, 0), ((0, 40, 64, 128), 0), (None, 24)])
def test_dropout_of_attention_weights(bounds: tuple[int, ...] | None, window: int) -> None:
    """With the unit matrix as values the output is the weights: a fifth of those a token gives
    are 0, the others grow by 1 / (1 - rate)."""
    length, rate = 64, 0.2
    q_BASD, k_BGSD, _ = qkv(2, 8, 8, length, head_size=length)
    v_BGSD = torch.eye(length, dtype=torch.float64).expand(2, 8, -1, -1)
    torch.manual_seed(0)
    documents = documents_of(*bounds) if bounds else None
    dropped = attend(q_BASD, k_BGSD, v_BGSD, documents, rate, window=window)
    weights = dense(q_BASD, k_BGSD, v_BGSD, bounds, window)
    kept = (dropped != 0) & (weights != 0)
    torch.testing.assert_close(dropped[kept], weights[kept] / (1 - rate), rtol=1e-12, atol=1e-12)
    assert dropped[weights == 0].count_nonzero() == 0
    # of more than 20,000
    assert kept.sum().item() / weights.count_nonzero().item() == pytest.approx(1 - rate, abs=0.01)


class Recorder:
    """In varlen_attn's place: keeps the words it is given, and computes what the kernel would,
    sequence by sequence."""

    def __init__(self) -> None:
        self.words: dict[str, Any] = {}

    def compute(self, q_NAD: Tensor, k_NGD: Tensor, v_NGD: Tensor, bounds: Tensor) -> Tensor:
        assert k_NGD.shape[1] == q_NAD.shape[1] or self.words.get("enable_gqa"), (
            "the kernel would refuse this"
        )
        parts = []
        for start, end in pairwise(bounds.tolist()):
            q, k, v = (t[start:end].transpose(0, 1)[None] for t in (q_NAD, k_NGD, v_NGD))
            parts.append(dense(q, k, v)[0].transpose(0, 1))
        return torch.cat(parts)


class OldKernel(Recorder):
    """torch 2.11's signature: no grouped queries."""

    def __call__(  # noqa: PLR0913  # the signature is torch's
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        cu_seq_q: Tensor,
        cu_seq_k: Tensor,
        max_q: int,
        max_k: int,
        *,
        scale: float | None = None,
        window_size: tuple[int, int] = (-1, -1),
    ) -> Tensor:
        assert cu_seq_q is cu_seq_k
        self.words = {
            "window_size": window_size,
            "scale": scale,
            "longest": (max_q, max_k),
            "groups": key.shape[1],
        }
        return self.compute(query, key, value, cu_seq_q)


class NewKernel(Recorder):
    """The newer one: enable_gqa too."""

    def __call__(  # noqa: PLR0913  # the signature is torch's
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        cu_seq_q: Tensor,
        cu_seq_k: Tensor | None,
        max_q: int,
        max_k: int,
        *,
        scale: float | None = None,
        window_size: tuple[int, int] = (-1, -1),
        enable_gqa: bool = False,
    ) -> Tensor:
        assert cu_seq_q is cu_seq_k
        self.words = {
            "window_size": window_size,
            "enable_gqa": enable_gqa,
            "scale": scale,
            "longest": (max_q, max_k),
            "groups": key.shape[1],
        }
        return self.compute(query, key, value, cu_seq_q)


@pytest.mark.parametrize("groups", [6, 2, 1])
@pytest.mark.parametrize("kind", [OldKernel, NewKernel])
def test_the_variable_length_kernel(
    kind: type[Recorder], groups: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All documents of a micro-batch as one sequence, causal by its window, grouped queries where
    the kernel knows them; the result is the loop's."""
    kernel = kind()
    monkeypatch.setattr(varlen, "varlen_attn", kernel)
    leaves = qkv(2, 6, groups, 8)
    documents = documents_of(0, 3, 8, 9, 16)
    ours = attention._varlen(*leaves, documents)
    same_values_and_gradients(ours, attend(*leaves, documents, 0.0), leaves)
    shared = {"scale": None, "longest": (7, 7)}
    if kind is OldKernel:
        assert kernel.words == {"window_size": (-1, 0), "groups": 6, **shared}
    else:
        assert kernel.words == {
            "window_size": (-1, 0),
            "enable_gqa": groups != 6,
            "groups": groups,
            **shared,
        }


def test_the_installed_kernel_knows_the_words(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's own function takes them: what it hands to its operation is causal attention over
    these bounds."""
    handed: list[Any] = []

    def operation(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
        handed.extend(args)
        return args[0], args[0], args[0]

    monkeypatch.setattr(torch.ops.torch_attn, "_varlen_attn", operation)
    q_NAD, k_NGD, v_NGD = (t.detach()[0].transpose(0, 1) for t in qkv(1, 6, 2, 8))
    documents = documents_of(0, 5, 8)
    causal_varlen_attention(q_NAD, k_NGD, v_NGD, documents.bounds_D, documents.longest)
    assert (
        handed[3] is documents.bounds_D
        and handed[4] is documents.bounds_D
        and handed[5:7] == [5, 5]
    )
    assert handed[7] is True  # is_causal


def test_which_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel has neither a CPU form nor fp32 nor dropout: the loop is for all of those."""
    monkeypatch.setattr(
        attention, "_varlen", lambda *_: pytest.fail("the kernel was called on the CPU")
    )
    leaves = qkv(1, 2, 2, 4, dtype=torch.bfloat16)
    attend(*leaves, documents_of(0, 2, 4), 0.0)


def compiled_bounds() -> list[int]:
    """Where samples begin and end, made within compiled code as the first of their kind."""
    compiled = torch.compile(whole_samples, fullgraph=True, backend="eager")
    found: list[int] = compiled(2, 3, CPU).bounds_D.tolist()
    return found


def test_bounds_of_whole_samples_within_compiled_code() -> None:
    """As attention with a window makes them on GPUs."""
    assert call("tests.train.model.test_attention:compiled_bounds") == [0, 3, 6]
