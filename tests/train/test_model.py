"""The model against its formula and against transformers' GPT-2."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.train.support import MODEL
from trainkit.base.errors import ConfigError
from trainkit.jobs.schema import Model
from trainkit.train.initialize import initial_value, initialize
from trainkit.train.model import GPT, token_loss


def built(model: Model, rows: int) -> GPT:
    with torch.device("meta"):
        module = GPT(model, rows)
    initialize(module, model, seed=1, device=torch.device("cpu"))
    return module


@pytest.mark.parametrize(
    ("layers", "hidden", "heads", "vocab", "positions", "named"),
    [(4, 256, 4, 4096, 256, None), (12, 768, 12, 50257, 1024, 124_439_808), (96, 12288, 96, 50257, 2048, 174_604_259_328)],
)
def test_parameter_count(layers: int, hidden: int, heads: int, vocab: int, positions: int, named: int | None) -> None:
    """Tied: L(12h^2 + 13h) + 2h + Vh + Ph. GPT-2 small has 124,439,808; the 175B shape is built on meta at once."""
    model = Model(num_layers=layers, hidden_size=hidden, num_attention_heads=heads, seq_length=positions)
    with torch.device("meta"):
        count = sum(p.numel() for p in GPT(model, vocab).parameters())
        untied = sum(p.numel() for p in GPT(model.model_copy(update={"untie_embeddings_and_output_weights": True}), vocab).parameters())
    formula = layers * (12 * hidden**2 + 13 * hidden) + 2 * hidden + vocab * hidden + positions * hidden
    assert count == (named or formula) == formula
    assert untied == formula + vocab * hidden


def test_other_families_are_refused() -> None:
    with pytest.raises(ConfigError, match="llama"):
        GPT(MODEL.model_copy(update={"family": "llama"}), 10)


@pytest.mark.parametrize("tied", [True, False])
def test_logits_equal_transformers_gpt2(tied: bool) -> None:
    """Same weights, same logits; in fp64, so that a wrong epsilon or GELU shows."""
    transformers = pytest.importorskip("transformers")
    model = MODEL.model_copy(update={"untie_embeddings_and_output_weights": not tied})
    ours = built(model, 301).double()
    sizes = {"n_layer": model.num_layers, "n_embd": model.hidden_size, "n_head": model.num_attention_heads, "n_positions": model.seq_length}
    theirs = transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=301, **sizes, tie_word_embeddings=tied)).double().eval()
    torch.manual_seed(0)
    for parameter in ours.parameters():  # biases and norms too
        nn.init.normal_(parameter, std=0.3)
    names = {
        "ln_1": "attention_norm",
        "attn.c_attn": "attention.qkv",
        "attn.c_proj": "attention.out",
        "ln_2": "mlp_norm",
        "mlp.c_fc": "mlp.up",
        "mlp.c_proj": "mlp.down",
    }
    weights = {
        "wte.weight": ours.embed_tokens.weight,
        "wpe.weight": ours.embed_positions.weight,
        "ln_f.weight": ours.final_norm.weight,
        "ln_f.bias": ours.final_norm.bias,
    }
    for i, block in ours.layers.items():
        for name, mine in names.items():
            part = block.get_submodule(mine)
            weights[f"h.{i}.{name}.weight"] = part.weight.T if isinstance(part, nn.Linear) else part.weight  # type: ignore[assignment]
            weights[f"h.{i}.{name}.bias"] = part.bias  # type: ignore[assignment]
    theirs.transformer.load_state_dict(weights)
    if ours.head is not None:
        theirs.lm_head.load_state_dict({"weight": ours.head.weight})
    tokens_BS = torch.randint(0, 301, (3, 16))
    torch.testing.assert_close(ours(tokens_BS), theirs(tokens_BS).logits, rtol=1e-10, atol=1e-10)


def test_a_token_does_not_see_the_next() -> None:
    module = built(MODEL, 301)
    tokens_BS = torch.randint(0, 301, (1, 16))
    changed_BS = tokens_BS.clone()
    changed_BS[0, 9] = (changed_BS[0, 9] + 1) % 301
    before, after = module(tokens_BS), module(changed_BS)
    torch.testing.assert_close(before[:, :9], after[:, :9])
    assert not torch.allclose(before[:, 9:], after[:, 9:])


def test_loss_is_at_least_fp32() -> None:
    logits = torch.zeros(1, 2, 301, dtype=torch.bfloat16)
    assert token_loss(logits, torch.zeros(1, 2, dtype=torch.int64)).item() == pytest.approx(5.70711, abs=1e-5)
    assert token_loss(logits.double(), torch.zeros(1, 2, dtype=torch.int64)).dtype == torch.float64


def test_initial_values_depend_on_seed_and_name() -> None:
    module = built(MODEL, 301)
    values = dict(module.named_parameters())
    for name, value in values.items():
        torch.testing.assert_close(value.detach(), initial_value(name, tuple(value.shape), MODEL, 1), rtol=0, atol=0)
    assert not torch.equal(values["layers.0.mlp.up.weight"], values["layers.1.mlp.up.weight"])
    assert not torch.equal(initial_value("head.weight", (9, 9), MODEL, 1), initial_value("head.weight", (9, 9), MODEL, 2))
    assert values["layers.0.attention.qkv.bias"].abs().max() == 0 and values["final_norm.weight"].min() == 1
    wide = (400, 400)
    assert initial_value("layers.0.mlp.up.weight", wide, MODEL, 1).std().item() == pytest.approx(0.02, rel=0.02)
    assert initial_value("layers.0.mlp.down.weight", wide, MODEL, 1).std().item() == pytest.approx(0.02 / (2 * MODEL.num_layers) ** 0.5, rel=0.02)
