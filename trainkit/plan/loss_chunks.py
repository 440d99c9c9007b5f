"""In how many tokens at a time the head and its loss are computed: the trainer's rule, by which the
plan counts their memory."""

from __future__ import annotations

# of one chunk's logits in fp32. On one H200 a step of GPT-2 124M took 280 ms with 2^28 bytes and
# 255 ms with 2^30, of which products of more tokens and fewer sums of the head's gradient are the
# reason; 2^31 was no faster (docs/benchmarks.md).
ON_CUDA = 2**30
ELSEWHERE = 2**28


def chunk_tokens(tokens: int, columns: int, device_type: str) -> int:
    """Tokens of a chunk, all chunks but the last being equal, so that its logits take about as many
    bytes as above; a multiple of 256 where there are so many.

    Args:
        tokens: of the micro-batch.
        columns: of the product that makes the logits.
        device_type: "cuda", "cpu".
    """
    limit = ON_CUDA if device_type == "cuda" else ELSEWHERE
    most = max(1, limit // (4 * columns))
    size = -(-tokens // -(-tokens // most))
    return size + (-size % 256 if size > 256 else 0)
