"""Recomputation and compilation change memory and time, never a number."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from tests.train.layout_cases import BEFORE_213
from trainkit.jobs.schema import Model, Training
from trainkit.train.model.head_loss import Labels
from trainkit.train.model.transformer import Block, Transformer, build_on_meta
from trainkit.train.parallel.recompute import wrap_blocks

SIZES = {"num_layers": 3, "hidden_size": 32, "num_attention_heads": 4, "seq_length": 16}
VOCAB = 61


class Count(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts operations by name."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        self.counts[function.overloadpacket.__name__] += 1
        return function(*args, **(kwargs or {}))


def built(family: str, dtype: torch.dtype, training: dict[str, Any], **keys: Any) -> Transformer:
    model = Model.model_validate({**SIZES, "family": family, **keys})
    module = build_on_meta(model, VOCAB).to_empty(device="cpu").to(dtype)
    torch.manual_seed(0)
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.2)
    wrap_blocks(module, model, Training.model_validate({"train_iters": 1, "lr": 1.0, **training}))
    return module


def gradients(module: Transformer) -> list[torch.Tensor]:
    tokens_BS = torch.randint(0, VOCAB, (2, 16), generator=torch.Generator().manual_seed(1))
    torch.manual_seed(7)  # dropout
    losses = module(tokens_BS, Labels(tokens_BS.roll(-1, 1), scale=1 / 32))
    losses.objective.backward()
    return [losses.cross_entropy, *(p.grad for p in module.parameters() if p.grad is not None)]


MODES: list[dict[str, Any]] = [
    {"recompute_granularity": "full"},
    {"recompute_granularity": "full", "recompute_every": 2},
    {"recompute_granularity": "selective"},
]


@pytest.mark.parametrize("family", ["gpt", "gpt-neox", "llama"])
@pytest.mark.parametrize("mode", MODES, ids=["full", "every-2nd", "selective"])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_losses_and_gradients_are_the_same(
    family: str, mode: dict[str, Any], dropout: float
) -> None:
    drops = {"hidden_dropout": dropout, "attention_dropout": dropout}
    plain = gradients(built(family, torch.float64, {}, **drops))
    again = gradients(built(family, torch.float64, mode, **drops))
    assert len(plain) == len(again) > 10
    for ours, theirs in zip(again, plain, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)


def test_what_is_computed_twice() -> None:
    """Full: every product of a recomputed block once more; selective: none of them, but the
    rest."""

    def counts(mode: dict[str, Any]) -> Counter[str]:
        module = built("gpt", torch.float32, mode)
        with Count() as count:
            gradients(module)
        counted: Counter[str] = count.counts
        return counted

    none, full, second, selective = (counts(mode) for mode in ({}, *MODES))
    products, attention = "addmm", "_scaled_dot_product_flash_attention_for_cpu"
    assert none[products] == 12 and none[attention] == 3  # 4 projections a block
    # the last product of a block is needed by nobody in backward, so torch stops before it
    assert full[products] - none[products] == 9 and full[attention] == 6
    assert second[products] - none[products] == 6 and second[attention] == 5  # blocks 0 and 2
    assert selective[products] == none[products] and selective[attention] == none[attention]
    assert selective["gelu"] == full["gelu"] == 2 * none["gelu"]


def test_compiled_blocks_give_the_same() -> None:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    plain = gradients(built("llama", torch.float32, {}, num_query_groups=2))
    # Loops without vector instructions: to find out which ones there are, torch compiles a program
    # for each, and then its own headers for every kernel. Patched by torch's own means: pytest's
    # takes the option away from torch 2.11 for good.
    with torch._inductor.config.patch({"cpp.vec_isa_ok": False}):
        compiled = gradients(
            built("llama", torch.float32, {"compile": True, **MODES[0]}, num_query_groups=2)
        )
    for ours, theirs in zip(compiled, plain, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    # one serves all blocks, one is the loss
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2


@pytest.mark.skipif(BEFORE_213, reason="compiled, torch 2.11 has no attention in double")
@pytest.mark.parametrize("mode", [{}, MODES[0]], ids=["none", "full"])
def test_experts_between_compiled_parts_give_the_same(mode: dict[str, Any]) -> None:
    """Losses of balance are in the gradients, and each choice is counted once."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    moe = {"num_experts": 6, "router_topk": 2, "ffn_hidden_size": 12, "aux_loss_coeff": 0.1}
    keys = {"moe": {**moe, "shared_expert_intermediate_size": 20}, "num_query_groups": 2}
    plain, compiled = (
        built("qwen3-moe", torch.float64, training, **keys)
        for training in ({}, {"compile": True, **mode})
    )
    expected = gradients(plain)
    with torch._inductor.config.patch({"cpp.vec_isa_ok": False}):
        found = gradients(compiled)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-12)
    for one, other in zip(compiled.layers.values(), plain.layers.values(), strict=True):
        counts = [each.mlp.counts for each in (one, other) if isinstance(each, Block)]
        assert isinstance(counts[0], Tensor) and isinstance(counts[1], Tensor)
        assert torch.equal(counts[0], counts[1])
    # attention, the way to experts, the way back, the loss: one of each serves all blocks
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 4
