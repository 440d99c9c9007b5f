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

    This is the general form; what it comes to for a family stands at the top of the family's
    file (trainkit/families). Untied or tied heads, kv_channels and ffn_hidden_size may change it.
    """
    h, q, k, f = _widths(model)
    family = model.architecture
    bias = int(family.bias)  # a product's bias is one more row of its matrix
    norm = len(family.norm.parameters) * h
    up = model.mlp.projections * f
    attention = (h + model.qkv_bias) * (q + 2 * k) + (q + bias) * h
    mlp = (h + bias) * up + (f + bias) * h
    layer = attention + mlp + len(model.norms) * norm + sum(head_norms(model))
    tables = 1 + model.untied
    positions = model.positions * family.learned_positions
    return model.num_layers * layer + (tables * vocab_size + positions) * h + norm


def head_norms(model: Model) -> tuple[int, ...]:
    """Parameters of the norms of queries and of keys; none where there are none."""
    _, q, k, _ = _widths(model)
    return {"none": (), "head": (model.head_size,) * 2, "projection": (q, k)}[model.query_key_norm]


def _attention_flops(model: Model, layer: int) -> int:
    """Of one block's attention per token: 4Q for each token it sees. A token sees half a sample,
    S / 2; with a window of W, W - W^2 / 2S."""
    tokens = model.seq_length
    window = model.window(layer) or tokens
    return 2 * _widths(model)[1] * (2 * window * tokens - window * window) // tokens


def attended_part(model: Model) -> float:
    """What attention costs beside the same model without windows."""
    layers = range(model.num_layers)
    whole = 2 * _widths(model)[1] * model.seq_length * model.num_layers
    return sum(_attention_flops(model, layer) for layer in layers) / whole


def _layer_flops(model: Model, layer: int) -> int:
    """Matmul FLOPs of one block's forward per token: 2(H(Q + 2K) + QH) + 4HF (gated: 6HF), and
    attention's: 2SQ without a window."""
    h, q, k, f = _widths(model)
    mlp = (model.mlp.projections + 1) * h * f
    return 2 * (h * (q + 2 * k) + q * h + mlp) + _attention_flops(model, layer)


def _total_flops(model: Model, layers: range) -> int:
    """Forward's of several blocks. Those with a window are all alike, and so are the others."""
    if not layers:
        return 0
    if model.sliding_window is None:
        return len(layers) * _layer_flops(model, 0)
    return sum(_layer_flops(model, layer) for layer in layers)


def model_flops_per_token_of(model: Model, vocab_size: int) -> int:
    """Matmul FLOPs that training needs per token, three times those of forward: 3 (L (8H^2 + 4HF
    + 2SH) + 2HV) for gpt.

    Backward is twice forward. The head counts with the vocabulary as it is, attention as causal
    over whole samples: documents that do not see each other need less. Elementwise work, the
    padding of the vocabulary and recomputation are not counted.
    """
    blocks = _total_flops(model, range(model.num_layers))
    return 3 * (blocks + 2 * model.hidden_size * vocab_size)


def recomputed_layers(model: Model, training: Training) -> range:
    """Blocks whose forward is computed again: every n-th, from the first."""
    if training.recompute_granularity == "full":
        return range(0, model.num_layers, training.recompute_every)
    return range(0)


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
        layers = range(model.num_layers)
        again = {
            "none": 0,
            "selective": sum(_attention_flops(model, layer) for layer in layers),
            "full": _total_flops(model, layers),
        }
        return model_flops + again[training.recompute_granularity]
    down = 2 * model.hidden_size * model.ffn_width
    kept = 0 if model.hidden_dropout > 0 and not training.compile else down
    layers = recomputed_layers(model, training)
    return model_flops + _total_flops(model, layers) - len(layers) * kept
