"""The three families against transformers' models, and what must hold for every language model."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.train.peer_shapes import CASES, ONE_OF_EACH, POSITIONS, VOCAB
from tests.train.peers import beside, documents_of, random_model, random_tokens
from trainkit.jobs.load import load
from trainkit.jobs.schema import Model
from trainkit.ops.causal_attention import CausalAttention
from trainkit.plan.arithmetic import parameters_of
from trainkit.train.model import attention, head_loss as loss
from trainkit.train.model.head_loss import Labels, Losses
from trainkit.train.model.transformer import Block, Transformer, build_on_meta

CHECKOUT = Path(__file__).resolve().parents[3]


@pytest.mark.parametrize("name", CASES)
@torch.no_grad()
def test_logits_equal_transformers(name: str) -> None:
    """Samples as long as there are positions. fp32: transformers' model as it is. fp64: its fp32
    islands widened, so that a wrong epsilon, GELU or frequency shows however little it does."""
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.float64, 1e-10)):
        model, ours, theirs = beside(name, dtype)
        tokens_BS = random_tokens(2, model.positions)
        logits_BSV = ours(tokens_BS)
        assert logits_BSV.shape == (2, model.positions, VOCAB) and logits_BSV.dtype == dtype
        assert 0.3 < logits_BSV.std() < 3  # so that the tolerance means something
        torch.testing.assert_close(
            logits_BSV, theirs(tokens_BS).logits, rtol=tolerance, atol=tolerance
        )


@pytest.mark.parametrize("name", ONE_OF_EACH)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@torch.no_grad()
def test_16_bits_are_as_exact_as_transformers(name: str, dtype: torch.dtype) -> None:
    """Weights cast to 16 bits, as mixed precision computes: no farther from the fp32 logits than
    transformers' model in the same numbers. Tokens take all experts: at which of two equal ones a
    rounding falls is nobody's merit."""
    shape = CASES[name]
    if shape.moe is not None:
        everyone = shape.moe.model_copy(update={"router_topk": shape.moe.num_experts})
        shape = shape.model_copy(update={"moe": everyone})
    model, ours, theirs = beside(shape, torch.float32)
    tokens_BS = random_tokens(4, model.positions)
    exact_BSV = ours(tokens_BS)
    off, theirs_off = (
        (m.to(dtype)(tokens_BS) - exact_BSV).float().std() for m in (ours, Logits(theirs))
    )
    assert 0 < off < 1.1 * theirs_off


class Logits(nn.Module):
    """transformers' model, called as ours is."""

    def __init__(self, theirs: Any) -> None:
        super().__init__()
        self.theirs = theirs

    def forward(self, tokens_BS: Tensor) -> Tensor:
        logits_BSV: Tensor = self.theirs(tokens_BS).logits
        return logits_BSV


@pytest.mark.parametrize(
    ("job", "count"),
    [
        ("qwen3-0-6b", 596_049_920),
        ("qwen3-1-7b", 1_720_574_976),
        ("qwen3-4b", 4_022_468_096),
        ("qwen3-8b", 8_190_735_360),
        ("qwen3-14b", 14_768_307_200),
        ("qwen3-32b", 32_762_123_264),
        ("olmo2-7b", 7_298_617_344),
        ("gemma3-1b", 999_885_952),
        ("gemma3-4b", 3_880_263_168),
        ("qwen3-30b-a3b", 30_532_122_624),
        ("olmoe-1b-7b", 6_919_161_856),
    ],
)
def test_parameters_of_published_jobs(job: str, count: int) -> None:
    """Of jobs/modern.toml: the model's own, and what plan counts."""
    model = load(CHECKOUT).resolve(job, []).job.model
    assert model.vocab_size is not None
    module = build_on_meta(model, model.vocab_size)
    assert sum(t.numel() for t in module.parameters()) == count
    assert parameters_of(model, model.vocab_size) == count


@pytest.mark.parametrize("name", ONE_OF_EACH)
@torch.no_grad()
def test_a_token_does_not_see_the_next(name: str) -> None:
    ours = random_model(CASES[name], torch.float64).eval()
    tokens_BS = random_tokens(1, POSITIONS)
    changed_BS = tokens_BS.clone()
    changed_BS[0, 9] = (changed_BS[0, 9] + 1) % VOCAB
    before, after = ours(tokens_BS), ours(changed_BS)
    torch.testing.assert_close(before[:, :9], after[:, :9], rtol=0, atol=1e-14)
    assert (before - after)[:, 9:].abs().amax(-1).min() > 1e-6  # and every later one does


@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_documents_are_read_as_if_alone(name: str) -> None:
    """With attention kept within documents and positions that begin anew, logits, loss and
    gradients are those of each document by itself."""
    model = CASES[name]
    ours = random_model(model, torch.float64).eval()
    tokens_BS, labels_BS = random_tokens(2, 12), random_tokens(2, 12, seed=2)
    bounds = [0, 1, 8, 12, 14, 24]
    spans = list(pairwise(bounds))
    positions_BS = torch.cat([torch.arange(b - a) for a, b in spans]).view(2, 12)
    told = {"positions_BS": positions_BS, "documents": documents_of(*bounds)}
    alone = [ours(tokens_BS.view(1, -1)[:, a:b]) for a, b in spans]
    torch.testing.assert_close(
        ours(tokens_BS, **told).view(1, 24, -1), torch.cat(alone, 1), rtol=1e-12, atol=1e-12
    )

    whole = ours(tokens_BS, Labels(labels_BS), **told)
    torch.autograd.backward(whole.objective)
    gradients = {n: p.grad for n, p in ours.named_parameters()}
    ours.zero_grad()
    parts = [
        ours(tokens_BS.view(1, -1)[:, a:b], Labels(labels_BS.view(1, -1)[:, a:b])) for a, b in spans
    ]
    for part in parts:
        torch.autograd.backward(part.objective)
    assert sum(p.cross_entropy.item() for p in parts) == pytest.approx(
        whole.cross_entropy.item(), rel=1e-12
    )
    for n, parameter in ours.named_parameters():
        torch.testing.assert_close(gradients[n], parameter.grad, rtol=1e-11, atol=1e-11, msg=n)


@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_positions_are_counted_from_0(name: str) -> None:
    model = CASES[name]
    ours, tokens_BS = random_model(model, torch.float64).eval(), random_tokens(2, 12)
    plain = ours(tokens_BS)
    assert torch.equal(plain, ours(tokens_BS, positions_BS=torch.arange(12)))
    torch.testing.assert_close(
        plain, ours(tokens_BS, positions_BS=torch.arange(12).expand(2, 12)), rtol=1e-13, atol=1e-13
    )
    moved = ours(tokens_BS, positions_BS=torch.arange(12) + 5)
    # rotary positions know distances only
    assert torch.allclose(plain, moved, rtol=1e-10, atol=1e-10) == (model.family != "gpt")


@pytest.mark.parametrize("name", ONE_OF_EACH)
@pytest.mark.parametrize("multiple", [1, 8])
def test_padding_of_the_vocabulary_never_matters(name: str, multiple: int) -> None:
    """128 is the default of all other tests."""
    model = CASES[name]
    tokens_BS, labels_BS = random_tokens(2, 6), random_tokens(2, 6, seed=2)
    found = []
    for shape in (model, model.model_copy(update={"make_vocab_size_divisible_by": multiple})):
        ours = random_model(shape, torch.float64).eval()
        losses = ours(tokens_BS, Labels(labels_BS))
        assert isinstance(losses, Losses)
        torch.autograd.backward(losses.objective)
        found.append([ours(tokens_BS), losses.cross_entropy, *(p.grad for p in ours.parameters())])
    assert found[0][0].shape == (2, 6, VOCAB)
    for padded, other in zip(*found, strict=True):
        torch.testing.assert_close(padded, other, rtol=1e-12, atol=1e-12)


def test_the_product_is_padded(monkeypatch: pytest.MonkeyPatch) -> None:
    """To the multiple that the model names: without labels the weight, with labels the memory of
    the logits."""
    multiples, widths, logits = [], [], loss._logits

    def padded(weight_VH: Tensor, multiple: int) -> Tensor:
        multiples.append(multiple)
        return weight_VH

    def recorded(x_CH: Tensor, weight_VH: Tensor, columns: int) -> Tensor:
        widths.append((len(weight_VH), columns))
        return logits(x_CH, weight_VH, columns)

    monkeypatch.setattr("trainkit.train.model.head_loss.padded", padded)
    monkeypatch.setattr("trainkit.train.model.head_loss._logits", recorded)
    ours = random_model(CASES["gpt"].model_copy(update={"make_vocab_size_divisible_by": 8}))
    ours(random_tokens(1, 4))
    ours(random_tokens(1, 4), Labels(random_tokens(1, 4)))
    rows = len(ours.embed_tokens.weight)
    assert rows % 8 and multiples == [8]
    assert widths == [(rows, rows + -rows % 8)]


def dropping(family: str, **changes: Any) -> Transformer:
    """A model with dropout and enough numbers to count."""
    shape = {
        "family": family,
        "num_layers": 1,
        "hidden_size": 128,
        "num_attention_heads": 4,
        "seq_length": 64,
        **changes,
    }
    return random_model(Model(**shape))


def share_dropped(before: Tensor, after: Tensor, rate: float) -> float:
    """The part of `before` that is 0 in `after`; the rest must be before / (1 - rate)."""
    kept = after != 0
    torch.testing.assert_close(after[kept], (before / (1 - rate))[kept], rtol=1e-3, atol=1e-4)
    return 1 - kept.float().mean().item()


def seen(module: nn.Module, tokens_BS: Tensor, *names: str) -> dict[str, tuple[Tensor, Tensor]]:
    """(first input, output) of submodules; of a norm of a sum the sum and its norm."""
    found: dict[str, tuple[Tensor, Tensor]] = dict.fromkeys(names, (tokens_BS, tokens_BS))

    def hook(name: str) -> Any:
        def keep(_: nn.Module, inputs: Any, output: Any) -> None:
            if isinstance(output, tuple):
                normed, total = output
                found[name] = (total.detach(), normed.detach())
            else:
                found[name] = (inputs[0].detach(), output.detach())

        return keep

    handles = [module.get_submodule(name).register_forward_hook(hook(name)) for name in names]
    module(tokens_BS)
    for handle in handles:
        handle.remove()
    return found


@pytest.mark.parametrize("family", ["gpt", "gpt-neox", "llama"])
def test_hidden_dropout(family: str) -> None:
    """In training the embeddings, and what attention and MLP add to the residual stream, lose a
    fifth of their numbers."""
    rate, parallel = 0.2, family == "gpt-neox"
    module = dropping(family, hidden_dropout=rate, gpt_j_residual=False if parallel else None)
    tokens_BS = random_tokens(4, 64)
    torch.manual_seed(0)
    names = (
        "layers.0.attention_norm",
        "layers.0.attention",
        "layers.0.mlp_norm",
        "layers.0.mlp",
        "layers.0",
    )
    norm, attended, mlp_norm, mlp, block = seen(module.train(), tokens_BS, *names).values()
    positions = module.embed_positions.weight if module.embed_positions is not None else 0
    shares = [
        share_dropped(module.embed_tokens(tokens_BS) + positions, norm[0], rate),
        share_dropped(attended[1], mlp_norm[0] - norm[0], rate),
        share_dropped(mlp[1], block[1] - mlp_norm[0], rate),
    ]
    assert shares == pytest.approx([rate] * 3, abs=0.01)  # of 32768 numbers each


def test_hidden_dropout_of_a_parallel_block() -> None:
    """Attention and MLP side by side: each has its own."""
    rate = 0.2
    module = dropping("gpt-neox", hidden_dropout=rate)
    block = module.layers["0"]
    assert isinstance(block, Block) and block.parallel
    torch.manual_seed(0)
    for silent in (block.attention.out, block.mlp.down):
        assert isinstance(silent, nn.Linear)
        weight, bias = silent.weight.detach().clone(), silent.bias.detach().clone()
        with torch.no_grad():
            silent.weight.zero_()
            silent.bias.zero_()
        found = seen(
            module.train(), random_tokens(4, 64), "layers.0", "layers.0.attention", "layers.0.mlp"
        )
        (x, y), added = found["layers.0"], found["layers.0.attention"][1] + found["layers.0.mlp"][1]
        assert share_dropped(added, y - x, rate) == pytest.approx(rate, abs=0.01)
        with torch.no_grad():
            silent.weight.copy_(weight)
            silent.bias.copy_(bias)


@pytest.mark.parametrize("family", ["gpt", "gpt-neox", "llama"])
@pytest.mark.parametrize("kind", ["hidden_dropout", "attention_dropout"])
@torch.no_grad()
def test_dropout_is_for_training_only(
    family: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rates = []

    def attend(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        documents: None,
        dropout: float,
        causal: CausalAttention,
        **words: Any,
    ) -> Tensor:
        rates.append(dropout)
        return attention.attend(q, k, v, documents, dropout, causal, **words)

    monkeypatch.setattr("trainkit.train.model.transformer.attend", attend)
    module, without = dropping(family, **{kind: 0.2}), dropping(family)
    tokens_BS = random_tokens(2, 64)
    torch.manual_seed(0)
    first, second = module.train()(tokens_BS), module(tokens_BS)
    assert not torch.allclose(first, second)
    torch.testing.assert_close(module.eval()(tokens_BS), without.train()(tokens_BS))
    rate = 0.2 if kind == "attention_dropout" else 0.0
    assert rates == [rate, rate, 0.0, 0.0]
