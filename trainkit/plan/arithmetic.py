"""Parameters and FLOPs of a model, exactly, from its shape alone.

Symbols: L layers, H hidden size, Q = heads * head size, K = key and value heads * head size, F
width of the MLP, V vocabulary, P positions, S tokens of a sample; E experts of a layer, of which
a token takes k, I width of one.
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


def attention_matrices(model: Model) -> dict[str, tuple[int, int]]:
    """(rows, columns) of the matrices of a block's attention, by their names in it: what comes out
    and what goes in. By latents: a head of `kv_b` has keys and values, of `out` values alone."""
    h, q, k, _ = _widths(model)
    mla, heads = model.mla, model.num_attention_heads
    if mla is None:
        return {"qkv": (q + 2 * k, h), "out": (h, q)}
    rank, latent = mla.q_lora_rank, mla.kv_lora_rank
    queries = {"q": (q, h)} if rank is None else {"q_a": (rank, h), "q_b": (q, rank)}
    return queries | {
        "kv_a": (latent + mla.qk_pos_emb_head_dim, h),
        "kv_b": (heads * (mla.qk_head_dim + mla.v_head_dim), latent),
        "out": (h, heads * mla.v_head_dim),
    }


def _attention_weights(model: Model) -> int:
    """What a token is multiplied with in a block's attention."""
    return sum(rows * columns for rows, columns in attention_matrices(model).values())


def out_bias(model: Model) -> bool:
    """Whether attention's output has a bias."""
    return model.architecture.bias or model.architecture.out_bias


def sparse_layers(model: Model) -> int:
    """Layers that have experts, with that of what predicts one token more."""
    return model.blocks - model.moe.first_dense_layers if model.moe else 0


def parameters_of(model: Model, vocab_size: int) -> int:
    """Parameters of a model, its vocabulary not padded. A bias that only chooses experts is none:
    it is a buffer, of E numbers in each of their layers, which published counts include.

    This is the general form; what it comes to for a family stands at the top of the family's
    file (trainkit/families). Untied or tied heads, kv_channels and ffn_hidden_size may change it.
    """
    h, q, k, _ = _widths(model)
    family = model.architecture
    norm = len(family.norm.parameters) * h
    biases = model.qkv_bias * (q + 2 * k) + out_bias(model) * h
    attention = _attention_weights(model) + biases + family.sinks * model.num_attention_heads
    layer = attention + len(model.norms) * norm + sum(head_norms(model))
    tables = 1 + model.untied
    positions = model.positions * family.learned_positions
    layers = model.blocks * layer + _mlp_parameters(model)
    further = (model.mtp_num_layers or 0) * (2 * h * h + 3 * norm)
    return layers + further + (tables * vocab_size + positions) * h + norm


def _mlp_parameters(model: Model) -> int:
    """Of all layers: an MLP (H + 1)F + (F + 1)H with biases, gated (2F)H + FH; or EH of a router,
    3HI of each expert and of the shared one, with biases E and 2I + H more."""
    h, _, _, f = _widths(model)
    bias = int(model.architecture.bias)
    mlp = (h + bias) * model.mlp.projections * f + (f + bias) * h
    sparse = sparse_layers(model)
    return (model.blocks - sparse) * mlp + sparse * _expert_parameters(model, active=False)


def _expert_weights(model: Model, *, active: bool) -> int:
    """Of router and experts of one layer, without biases; `active`: what a token is multiplied
    with."""
    moe = model.moe
    if moe is None:
        return 0
    experts = moe.router_topk if active else moe.num_experts
    widths = experts * moe.ffn_hidden_size + (moe.shared_expert_intermediate_size or 0)
    return model.hidden_size * (moe.num_experts + (model.mlp.projections + 1) * widths)


def _expert_parameters(model: Model, *, active: bool) -> int:
    """`_expert_weights` with the biases of the router and of the experts."""
    moe = model.moe
    if moe is None:
        return 0
    experts = moe.router_topk if active else moe.num_experts
    each = model.mlp.projections * moe.ffn_hidden_size + model.hidden_size
    biases = model.routing.bias * (moe.num_experts + experts * each)
    return _expert_weights(model, active=active) + biases


def active_parameters_of(model: Model, vocab_size: int, *, embedding: bool = True) -> int:
    """Parameters that one token meets: those of k experts instead of E.

    The head counts, and so does the whole embedding, as DeepSeek-V3 (37B) and OLMoE (1.3B) count
    them; gpt-oss (3.6B of 20B) leaves the embedding of the input out.

    Args:
        model: the shape.
        vocab_size: ids, without padding.
        embedding: count the embedding of the input, too, where it is not the head's.
    """
    idle = _expert_parameters(model, active=False) - _expert_parameters(model, active=True)
    tables = 0 if embedding or model.tied else vocab_size * model.hidden_size
    return parameters_of(model, vocab_size) - sparse_layers(model) * idle - tables


def head_norms(model: Model) -> tuple[int, ...]:
    """Parameters of the norms of queries and of keys, or of their latents; none where there are
    none."""
    if model.mla is not None:
        widths = (model.mla.q_lora_rank, model.mla.kv_lora_rank)
        return tuple(width for width in widths if width is not None)
    _, q, k, _ = _widths(model)
    return {"none": (), "head": (model.head_size,) * 2, "projection": (q, k)}[model.query_key_norm]


def _seen_flops(model: Model) -> int:
    """Of one block's attention, half of those for each token that is seen: 2Q, of scores and of
    values alike. By latents values may be narrower than queries; zeros that a kernel wants beside
    them do not count."""
    values = model.mla.v_head_dim if model.mla else model.head_size
    return model.num_attention_heads * (model.head_size + values)


def _attention_flops(model: Model, layer: int) -> int:
    """Of one block's attention per token: 4Q for each token it sees. A token sees half a sample,
    S / 2; with a window of W, W - W^2 / 2S."""
    tokens = model.seq_length
    window = model.window(layer) or tokens
    return _seen_flops(model) * (2 * window * tokens - window * window) // tokens


def attended_part(model: Model) -> float:
    """What attention costs beside the same model without windows."""
    if model.sliding_window is None:
        return 1.0
    layers = range(model.num_layers)
    whole = _seen_flops(model) * model.seq_length * model.num_layers
    return sum(_attention_flops(model, layer) for layer in layers) / whole


def _layer_flops(model: Model, layer: int) -> int:
    """Matmul FLOPs of one block's forward per token: 2(H(Q + 2K) + QH) + 4HF (gated: 6HF; with
    experts 2EH + 6kHI), and attention's: 2SQ without a window. By latents, 2 of each number of
    the matrices of attention."""
    h, _, _, f = _widths(model)
    if model.sparse(layer):
        mlp = _expert_weights(model, active=True)
    else:
        mlp = (model.mlp.projections + 1) * h * f
    return 2 * (_attention_weights(model) + mlp) + _attention_flops(model, layer)


def _total_flops(model: Model, layers: range) -> int:
    """Forward's of several blocks. Those of a kind are all alike."""
    if not layers:
        return 0
    if model.sliding_window is None and model.moe is None:
        return len(layers) * _layer_flops(model, 0)
    return sum(_layer_flops(model, layer) for layer in layers)


def model_flops_per_token_of(model: Model, vocab_size: int) -> int:
    """Matmul FLOPs that training needs per token, three times those of forward: 3 (L (8H^2 + 4HF
    + 2SH) + 2HV) for gpt. Of experts those count that a token takes, and the router.

    Backward is twice forward. The head counts with the vocabulary as it is, attention as causal
    over whole samples: documents that do not see each other need less. Elementwise work, the
    padding of the vocabulary and recomputation are not counted. What predicts one token more is a
    block, 4H^2 and a head more.
    """
    h = model.hidden_size
    blocks = _total_flops(model, range(model.blocks))
    further = model.mtp_num_layers or 0
    return 3 * (blocks + 2 * h * vocab_size * (1 + further) + 4 * h * h * further)


def recomputed_layers(model: Model, training: Training) -> range:
    """Blocks whose forward is computed again: every n-th, from the first."""
    if training.recompute_granularity == "full":
        return range(0, model.blocks, training.recompute_every)
    return range(0)


def hardware_flops_per_token_of(
    model: Model, vocab_size: int, training: Training, *, native: bool = True
) -> int:
    """As `model_flops_per_token_of`, and what recomputation does again.

    full: the forward of the blocks it is for, but for the last product (2HF, of a layer with
    experts that of the shared one) whose result backward does not need: torch stops before it.
    (Dropout after it makes it needed, unless the block is compiled.) Published figures often
    count the whole forward, and so do we for engines that are not native. selective: no products
    at all; of engines that are not native attention's two, 2SQ (Korthikanti et al. 2022,
    arXiv:2205.05198, section 5).
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
    layers = recomputed_layers(model, training)
    needed = model.hidden_dropout > 0 and not training.compile
    kept = 0 if needed else sum(_last_width(model, layer) for layer in layers)
    return model_flops + _total_flops(model, layers) - 2 * model.hidden_size * kept


def _last_width(model: Model, layer: int) -> int:
    """Inner width of a block's last product whose result backward does not need; experts' are
    needed for the gradient of their weights."""
    if model.moe and model.sparse(layer):
        return model.moe.shared_expert_intermediate_size or 0
    return model.ffn_width
