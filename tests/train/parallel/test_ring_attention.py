"""The ring's arithmetic against attention over whole samples: ranks one after another in this
process, whose keys and values are all at hand."""

from __future__ import annotations

from itertools import accumulate

import pytest
import torch
from torch import Tensor

from trainkit.train.model.attention import DocumentBounds
from trainkit.train.parallel import ring_attention
from trainkit.train.parallel.context_group import dealt, joined
from trainkit.train.parallel.ring_attention import Part, first_seen

BATCH, HEADS, HEAD = 2, 4, 8
CHUNK = 6  # tokens
HOST = torch.device("cpu")


def bounds_of(samples: list[list[int]]) -> DocumentBounds:
    """Documents of these lengths, sample after sample."""
    lengths = [length for of_sample in samples for length in of_sample]
    bounds = (0, *accumulate(lengths))
    return DocumentBounds(bounds, torch.tensor(bounds, dtype=torch.int32), max(lengths))


def seen(documents: DocumentBounds | None, tokens: int, window: int) -> Tensor:
    """From definitions: which keys each query sees, (B, 1, S, S)."""
    seen_BSS = torch.zeros(BATCH, tokens, tokens, dtype=torch.bool)
    number = torch.zeros(BATCH * tokens, dtype=torch.int64)
    for start in documents.bounds[1:-1] if documents else ():
        number[start:] += 1
    number = number.view(BATCH, tokens)
    for b in range(BATCH):
        for query in range(tokens):
            for key in range(query + 1):
                near = not window or query - key < window
                seen_BSS[b, query, key] = near and bool(number[b, query] == number[b, key])
    return seen_BSS[:, None]


def plain(words: list[Tensor], seen_BSS: Tensor, scale: float) -> Tensor:
    q, k, v = words
    times = HEADS // k.shape[1]
    k, v = k.repeat_interleave(times, 1), v.repeat_interleave(times, 1)
    scores = (scale * q @ k.transpose(-1, -2)).masked_fill(~seen_BSS, -torch.inf)
    return scores.softmax(-1) @ v


def rings(
    words: tuple[Tensor, Tensor, Tensor, Tensor],
    size: int,
    documents: DocumentBounds | None,
    window: int,
    scale: float,
) -> list[Tensor]:
    """What `size` ranks find together, and all gradients."""
    q, k, v, dy = (dealt(x, size, 2) for x in words)
    tokens = words[0].shape[2]
    first_BS = first_seen(documents, tokens, window, HOST)
    ys, dqs = [], []
    dkvs: list[Tensor] = [torch.zeros(2, *k[0].shape, dtype=k[0].dtype) for _ in range(size)]
    for rank in range(size):
        part = Part(rank, size, scale, first_BS, first_BS)
        y, dq = torch.zeros_like(q[rank]), torch.zeros_like(q[rank])
        logsum = y.new_full(y.shape[:3], -torch.inf)
        origins = [(rank - step) % size for step in range(size)]
        for origin in origins:
            part.add(q[rank], torch.stack([k[origin], v[origin]]), origin, y, logsum)
        for origin in origins:
            held = torch.stack([k[origin], v[origin]])
            dkvs[origin] += part.gradients(dy[rank], q[rank], held, origin, y, logsum, dq)
        ys.append(y)
        dqs.append(dq)
    dks, dvs = ([dkv[i] for dkv in dkvs] for i in range(2))
    return [joined(parts, 2) for parts in (ys, dqs, dks, dvs)]


def compare(size: int, groups: int, documents: DocumentBounds | None, window: int) -> None:
    tokens, scale = 2 * size * CHUNK, 0.3
    torch.manual_seed(size)
    q, dy = (torch.randn(BATCH, HEADS, tokens, HEAD, dtype=torch.float64) for _ in range(2))
    k, v = (torch.randn(BATCH, groups, tokens, HEAD, dtype=torch.float64) for _ in range(2))
    whole = [x.clone().requires_grad_() for x in (q, k, v)]
    expected = plain(whole, seen(documents, tokens, window), scale)
    expected.backward(dy)  # type: ignore[no-untyped-call]
    found = rings((q, k, v, dy), size, documents, window, scale)
    for mine, theirs in zip(found, [expected, *(x.grad for x in whole)], strict=True):
        assert theirs is not None
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-12)


@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_whole_samples(size: int, groups: int) -> None:
    compare(size, groups, None, 0)


@pytest.mark.parametrize("window", [1, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK, 1000])
@pytest.mark.parametrize("tile", [4, 256])
def test_windows(window: int, tile: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Many blocks are then empty, and many queries see nothing of a block."""
    monkeypatch.setattr(ring_attention, "TILE", tile)
    compare(3, 2, None, window)


@pytest.mark.parametrize("window", [0, CHUNK])
@pytest.mark.parametrize(
    "samples",
    [
        [[36], [36]],
        [[1] * 36, [1, 35]],
        [[6] * 6, [12] * 3],
        [[20, 16], [5, 25, 6]],
        [[7, 1, 13, 15], [35, 1]],
    ],
)
@pytest.mark.parametrize("tile", [4, 256])
def test_documents(
    samples: list[list[int]], window: int, tile: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ring_attention, "TILE", tile)
    compare(3, 2, bounds_of(samples), window)


def test_work_is_equal_and_nothing_hidden_is_computed() -> None:
    """Each rank computes the same number of pairs in a ring without a mask, and with a window only
    keys near its queries."""

    def pairs(part: Part, tokens: int) -> list[int]:
        return [
            sum(
                (b.queries.stop - b.queries.start) * (b.keys.stop - b.keys.start)
                for b in part.blocks(origin, tokens)
            )
            for origin in range(part.size)
        ]

    for rank in range(4):
        of_steps = pairs(Part(rank, 4, 1.0), 200)
        assert of_steps.pop(rank) == 200 * 200 and of_steps == [200 * 100] * 3
    near = first_seen(None, 8 * 1024, 32, HOST)
    computed = sum(sum(pairs(Part(rank, 4, 1.0, near, near), 2048)) for rank in range(4))
    assert computed <= 8 * 1024 * (256 + 32)
