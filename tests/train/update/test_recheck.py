"""What a second computation of a step keeps as its first finding."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from trainkit.train.model.batch import Batch
from trainkit.train.update.recheck import (
    ALONE,
    BACKWARD,
    FORWARD,
    SUMMED,
    WEIGHTS,
    NonFinite,
    NonFiniteDetector,
    RecheckResult,
    explain,
)


def batch(position: int) -> Batch:
    tokens_BS = torch.zeros(2, 3, dtype=torch.int64)
    return Batch(tokens_BS, tokens_BS, 0, position)


def watched(model: nn.Module, inputs: list[Tensor]) -> NonFiniteDetector:
    """Forward and backward of some micro-batches."""
    watch = NonFiniteDetector([model], rank=0)
    with watch.hooks():
        for x, _ in zip(inputs, watch.reads([batch(10), batch(12)]), strict=True):
            model(x).sum().backward()
    return watch


def test_a_weights_gradient_alone_may_overflow() -> None:
    """All activations and their gradients are finite; the product that makes the weight's
    gradient is not."""
    first, second = (nn.Linear(1, 1, bias=False) for _ in range(2))
    model = nn.Sequential(first, second)
    large = torch.full((2, 3, 1), 3e38)
    with torch.no_grad():
        first.weight.fill_(1e-30)
        second.weight.fill_(1.0)
    found = watched(model, [torch.ones(2, 3, 1), large]).first
    assert found is not None
    assert found == NonFinite(
        ALONE, 1, BACKWARD, 0, found.number, 0, "the gradient of 0.weight, 1 of 1 values", (12, 13)
    )
    assert not any(
        module._forward_hooks or module._forward_pre_hooks for module in model.modules()
    ), "hooks are left"
    assert watched(model, [torch.ones(2, 3, 1)] * 2).first is None


def test_what_is_nearer_to_the_cause_comes_first() -> None:
    order = [
        (WEIGHTS, 0, FORWARD, 0),
        (ALONE, 0, FORWARD, 0),
        (ALONE, 0, FORWARD, 1),
        (ALONE, 0, BACKWARD, -1),
        (ALONE, 0, BACKWARD, 0),
        (ALONE, 1, FORWARD, 0),
    ]
    findings = [
        NonFinite(*place, number=1, rank=0, what="x") for place in [*order, (SUMMED, 0, FORWARD, 0)]
    ]
    findings.reverse()
    assert sorted(findings) == findings[::-1]


def test_words() -> None:
    watch = NonFiniteDetector([], rank=3)
    watch.look(
        WEIGHTS,
        [
            ("a", torch.ones(2)),
            ("b", torch.tensor([1.0, torch.nan])),
            ("c", torch.tensor([torch.nan])),
        ],
        "the weights",
    )
    words = explain(RecheckResult(watch.first, 1), 4, str)
    assert (
        words
        == "computed again, the first that is not finite: the weights of b, 1 of 2 values of this"
        " rank's part, rank 3"
    )
    of_batch = NonFinite(ALONE, 1, FORWARD, 0, 5, 2, "the output of layers.1", tuple(range(8, 14)))
    assert explain(RecheckResult(of_batch, 1), 4, lambda at: f"at {at}").endswith(
        "layers.1, rank 2, micro-batch 1, sample 8 (at 8), 9 (at 9), 10 (at 10), 11 (at 11), ...; 1"
        " of 4 ranks find something by themselves"
    )
