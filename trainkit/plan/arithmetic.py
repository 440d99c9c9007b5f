"""Parameters and FLOPs of a model, exactly, from its shape alone.

Symbols: L layers, H hidden size, Q = heads * head size, K = key and value heads * head size, F
width of the MLP, V vocabulary, P positions, S tokens of a sample.
"""

from __future__ import annotations

from trainkit.jobs.schema import Model, Training


def _widths(model: Model) -> tuple[int, int, int, int]:
    """(H, Q, K, F)."""
    return (
        model.hidden_size,
        model.num_attention_heads * model.head_size,
        model.query_groups * model.head_size,
        model.ffn_width,
    )


def parameters_of(model: Model, vocab_size: int) -> int:
    """Parameters of a model, its vocabulary not padded.

    gpt: N = L(12H^2 + 13H) + VH + PH + 2H with F = 4H (Narayanan et al. 2021, arXiv:2104.04473,
    eq. 2, and the final LayerNorm). gpt-neox: N = L(12H^2 + 13H) + 2VH + 2H; with gpt_j_tied a
    norm, 2H, less a layer. llama: N = L(2H^2 + 2HK + 3HF + 2H) + 2VH + H. Untied or tied heads,
    kv_channels and ffn_hidden_size may change each; the code is the general form.
    """
    h, q, k, f = _widths(model)
    if model.family == "llama":
        layer = h * (q + 2 * k) + q * h + 3 * h * f + 2 * h
        rest = h
    else:
        if model.gpt_j_tied:
            norms = 2 * h
        else:
            norms = 4 * h
        layer = (h + 1) * (q + 2 * k) + (q + 1) * h + (h + 1) * f + (f + 1) * h + norms
        rest = 2 * h + (model.positions * h if model.family == "gpt" else 0)
    return model.num_layers * layer + (2 if model.untied else 1) * vocab_size * h + rest


def _layer_flops(model: Model) -> int:
    """Matmul FLOPs of one block's forward per token: 2(H(Q + 2K) + QH) + 4HF (gated: 6HF) + 2SQ.
    Attention is causal: half of 4SQ."""
    h, q, k, f = _widths(model)
    gated = model.family == "llama"
    return 2 * (h * (q + 2 * k) + q * h) + (6 if gated else 4) * h * f + 2 * model.seq_length * q


def model_flops_per_token_of(model: Model, vocab_size: int) -> int:
    """Matmul FLOPs that training needs per token, three times those of forward: 3 (L (8H^2 + 4HF
    + 2SH) + 2HV) for gpt.

    Backward is twice forward. The head counts with the vocabulary as it is, attention as causal
    over whole samples: documents that do not see each other need less. Elementwise work, the
    padding of the vocabulary and recomputation are not counted.
    """
    return 3 * (model.num_layers * _layer_flops(model) + 2 * model.hidden_size * vocab_size)


def recomputed_layers(model: Model, training: Training) -> int:
    """Blocks whose forward is computed again: every n-th, from the first."""
    if training.recompute_granularity == "full":
        return -(-model.num_layers // training.recompute_every)
    return 0


def hardware_flops_per_token_of(
    model: Model, vocab_size: int, training: Training, *, native: bool = True
) -> int:
    """As `model_flops_per_token_of`, and what recomputation does again.

    full: the forward of the blocks it is for, but for the last product (2HF) whose result
    backward does not need: torch stops before it. (Dropout after it makes it needed, unless the
    block is compiled.) Published figures often count the whole forward, and so do we for engines
    that are not native. selective: no products at all; of engines that are not native
    attention's two, 2SQ (Korthikanti et al. 2022, arXiv:2205.05198, section 5).
    """
    model_flops = model_flops_per_token_of(model, vocab_size)
    if not native:
        again = {
            "none": 0,
            "selective": 2 * model.seq_length * _widths(model)[1],
            "full": _layer_flops(model),
        }
        return model_flops + model.num_layers * again[training.recompute_granularity]
    down = 2 * model.hidden_size * model.ffn_width
    if model.hidden_dropout > 0 and not training.compile:
        kept = 0
    else:
        kept = down
    return model_flops + recomputed_layers(model, training) * (_layer_flops(model) - kept)
