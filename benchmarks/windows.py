"""Claim: attention over a window costs what its visible pairs cost: a pair at most 1.3 times as
much as in full causal attention where a sample is 8 windows long or more.

    python benchmarks/windows.py [--quick] [--dtype bf16] [--threads N] [--rounds N] [--rows FILE]

Forward and backward of one layer by the kernels of a job (`kernels = "auto"`), over a window and
over all tokens before one, in turns; beside them torch's attention without a mask, S^2 pairs, and
under a dense mask of the window, which is what transformers gives it. Seconds are CPU time of the
process, medians over the rounds; ratios are medians of the rounds' own. Of S tokens a window W
makes W S - W (W - 1) / 2 pairs visible, full causal attention S (S + 1) / 2. "a pair": the window's
time for a visible pair over that of full causal attention; "of W/S": its time over W/S of full
causal attention; "of all": over W/S of all S^2 pairs; "over mask": how often it fits into the dense
mask's.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from trainkit.cli.checkout.machine import describe, machine
from trainkit.ops.causal_attention import visible
from trainkit.ops.kernels import choose
from trainkit.train.model.attention import DocumentBounds, attend

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Case:
    """Tokens of a sample, window, heads of queries and of keys, channels of a head, documents of
    equal length in the sample."""

    tokens: int
    window: int
    heads: int
    groups: int
    channels: int
    documents: int = 1

    def pairs(self, window: int) -> int:
        """Of one head that are visible."""
        length = self.tokens // self.documents
        seen = min(window, length)
        return self.documents * (seen * length - seen * (seen - 1) // 2)

    def contenders(self) -> dict[str, Attention]:
        """By name; the last two know nothing of documents."""
        causal = choose("auto", "cpu").kernels.causal_attention
        bounds = tuple(range(0, self.tokens + 1, self.tokens // self.documents))
        inside = DocumentBounds(
            bounds, torch.tensor(bounds, dtype=torch.int32), self.tokens // self.documents
        )
        documents = inside if self.documents > 1 else None
        seen = visible(0, self.tokens, 0, self.tokens, self.window, torch.device("cpu"))

        def ours(window: int) -> Attention:
            return lambda q, k, v: attend(q, k, v, documents, 0.0, causal, window=window)

        def torchs(mask: Tensor | None) -> Attention:
            return lambda q, k, v: F.scaled_dot_product_attention(
                q, k, v, attn_mask=mask, enable_gqa=self.heads != self.groups
            )

        return {
            "window": ours(self.window),
            "causal": ours(0),
            "all pairs": torchs(None),
            "dense mask": torchs(seen),
        }


@dataclass(frozen=True)
class Row:
    """CPU seconds of each contender by round."""

    case: Case
    seconds: dict[str, list[float]]

    def over(self, other: str) -> float:
        """The window's time over another's."""
        return statistics.median(
            mine / theirs
            for mine, theirs in zip(self.seconds["window"], self.seconds[other], strict=True)
        )

    def show(self) -> None:
        """A line of the table."""
        case = self.case
        share = case.pairs(case.window) / case.pairs(case.tokens)
        part = case.window * case.documents / case.tokens
        medians = [statistics.median(taken) for taken in self.seconds.values()]
        print(
            f"{case.tokens:6} {case.window:6} {case.heads:5} {case.groups:3} {case.channels:4}"
            f" {case.documents:4}  {'  '.join(f'{s:9.3f}' for s in medians)}"
            f" {self.over('causal') / share:7.2f} {self.over('causal') / part:7.2f}"
            f" {self.over('all pairs') / part:7.2f} {1 / self.over('dense mask'):9.1f}",
            flush=True,
        )


HEAD = (
    "     S      W heads  of keys, D, documents   window     causal  all pairs  dense mask"
    "  a pair  of W/S  of all  over mask"
)
CASES = (
    Case(4096, 512, 12, 4, 64),
    Case(4096, 512, 6, 6, 128),
    Case(8192, 512, 12, 4, 64),
    Case(8192, 1024, 12, 12, 64),
    Case(8192, 512, 12, 4, 64, documents=2),
)


def measure(case: Case, dtype: torch.dtype, rounds: int) -> Row:
    """All contenders in turns, in another order every round; the first round does not count."""
    shapes = [(1, heads, case.tokens, case.channels) for heads in (case.heads, case.groups)]
    q, k, v = (
        torch.randn(shapes[of]).transpose(1, 2).contiguous().to(dtype).transpose(1, 2)
        for of in (0, 1, 1)
    )
    leaves = [t.requires_grad_() for t in (q, k, v)]
    dy = torch.randn(shapes[0]).to(dtype)
    contenders = case.contenders()
    taken: dict[str, list[float]] = {name: [] for name in contenders}
    names = list(contenders)
    for turn in range(rounds + 1):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            began = time.process_time()
            torch.autograd.grad(contenders[name](*leaves), leaves, dy)
            if turn:
                taken[name].append(time.process_time() - began)
    return Row(case, taken)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="the first case, one round")
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--rows", type=Path, help="write the table's numbers into this file too")
    words = parser.parse_args()
    torch.set_num_threads(words.threads)
    torch.manual_seed(0)
    print(describe(machine()))
    print(f"{words.dtype}, {words.threads} threads, CPU seconds\n{HEAD}", flush=True)
    dtype = torch.bfloat16 if words.dtype == "bf16" else torch.float32
    rows = []
    for case in CASES[:1] if words.quick else CASES:
        rows.append(measure(case, dtype, 1 if words.quick else words.rounds))
        rows[-1].show()
    if words.rows:
        words.rows.write_text(json.dumps([asdict(row) for row in rows]))


if __name__ == "__main__":
    main()
