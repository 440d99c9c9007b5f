"""Bytes that forward leaves for backward, on one rank of a stage.

The formulas are those of Korthikanti et al. 2022 (arXiv:2205.05198, section 4), taken apart into
what tensor parallelism divides and what only sequence parallelism does, for any family. Per
token and layer of a gpt with F = 4H they give sequence by sequence their sbh(10 + 24/t +
5as/(ht)), with sequence parallelism sbh/t (34 + 5as/h), 2sbh under full recomputation; without
dropout 34 becomes 32 and 5as/h becomes 2as/h.

Symbols as in arithmetic.py; w bytes of an activation (2, in fp32 4), t tensor-parallel size. The
native trainer's blocks were read with torch.autograd.graph.saved_tensors_hooks; torch.compile
may leave less.

Experts: a rank routes T tokens, its part of a micro-batch, to k experts each of width I, and sends
every row to the r ranks that an expert is split over. It gets f T k r rows, f = FULLEST where
experts lie on several ranks, or a capacity's factor that is less.
"""

from __future__ import annotations

from collections.abc import Sequence

from trainkit.base.lazy_dataclasses import dataclass
from trainkit.jobs.schema import Job, Model
from trainkit.plan.layout import Layout
from trainkit.plan.loss_chunks import chunk_tokens
from trainkit.plan.rules import Rules

ID_BYTES = 8
# Rows of the rank whose experts get most, over the mean, where they lie on several ranks: assumed,
# of a balanced router. All tokens may choose the experts of one rank: then it is the number of
# ranks, or as much less as a rank has fewer experts than a token takes.
FULLEST = 1.25
# gpt-oss's experts, in torch's own operations: gate, value, both within limits, a sigmoid, a gate
# times that, the product
CLAMPED_WIDTHS = 7


@dataclass(frozen=True)
class PerToken:
    """Bytes a token: `whole` that every tensor-parallel rank has unless the sequence is split,
    `divided` that tensor parallelism divides, `gathered` that every rank has, split or not."""

    whole: float = 0.0
    divided: float = 0.0
    gathered: float = 0.0

    def on_rank(self, layout: Layout) -> float:
        """On one tensor-parallel rank."""
        return (
            self.whole / (layout.tensor if layout.sequence else 1)
            + self.divided / layout.tensor
            + self.gathered
        )


def width(job: Job) -> int:
    """w: bytes of an activation."""
    return 4 if job.training.precision == "fp32" else 2


def mask_width(job: Job, rules: Rules) -> int:
    """Bytes of a dropout mask's element: a boolean; on the CPU torch keeps the scaled mask."""
    return width(job) if _on_cpu(job, rules) else 1


def _on_cpu(job: Job, rules: Rules) -> bool:
    return rules.states is None and job.cluster.device_type == "cpu"


def _fused(job: Job, rules: Rules) -> bool:
    """Whether trainkit's own kernels compute; kernels = "auto" counts as if they were there."""
    return rules.states is None and job.kernels != "reference"


def _gathers(job: Job, rules: Rules) -> bool:
    """With sequence parallelism the native trainer keeps what a split projection reads, all
    tokens of it, where Megatron-LM keeps this rank's and gathers it again in backward."""
    return (
        rules.states is None
        and job.parallelism.sequence_parallel
        and job.parallelism.tensor_model_parallel_size > 1
    )


def _norm_width(job: Job, rules: Rules) -> int:
    """Bytes a channel that a norm keeps besides its input in w. LayerNorm and fused RMSNorm keep
    statistics alone; on the CPU torch's RMSNorm is put together from products: it keeps the
    normalized input, both of them in fp32."""
    composed = job.model.architecture.norm.composed_on_cpu and _on_cpu(job, rules)
    if not composed or _fused(job, rules):
        return 0
    if job.training.precision == "fp32":
        return 4
    return 8 - width(job)


def _key_heads(job: Job) -> int:
    """Heads of keys and values on all tensor-parallel ranks of a group together: no rank has
    less than one, nor where attention exchanges tokens for heads."""
    ranks = job.parallelism.tensor_model_parallel_size * _exchanging(job)
    return max(job.model.query_groups, ranks)


def _exchanging(job: Job) -> int:
    """Ranks that exchange tokens for heads before attention, and back after it."""
    p = job.parallelism
    return p.context_parallel_size if p.cp_comm_type == "a2a" else 1


def _attention(job: Job, rules: Rules) -> float:
    """Bytes of queries, keys and values, the result and what rotary positions add: 2Q + 2K,
    turned queries and keys beside the projection that values, or norms of queries and keys, keep
    alive. A fused rotation takes values out of the projection too, which is freed, unless heads
    are normed in the same pass. By latents: queries, keys, values and the result, all as wide as
    queries, and the result as wide as values are. With sinks the result once more, by tokens."""
    model = job.model
    q = model.num_attention_heads * model.head_size
    k = _key_heads(job) * model.head_size
    if model.mla is not None:
        apart = model.mla.v_head_dim < model.head_size or _exchanging(job) > 1
        values = model.num_attention_heads * model.mla.v_head_dim
        returned = q if _exchanging(job) > 1 else 0
        return width(job) * (4 * q + returned + values * apart)
    if model.query_key_norm == "head" and _fused(job, rules) and _exchanging(job) == 1:
        return width(job) * (3 * q + 4 * k)
    normed = model.query_key_norm != "none"
    turned = q + k if normed or (model.rotary_channels and not _fused(job, rules)) else 0
    own = (q + k) * _norm_width(job, rules) if normed else 0
    if _exchanging(job) > 1:  # the kernel's own copies, and its result once more as it came back
        read_by_norms = q + 2 * k if normed else 0
        return width(job) * (3 * q + 2 * k + read_by_norms) + own
    again = q if model.architecture.sinks else 0
    return width(job) * (2 * q + 2 * k + turned + again) + own


def _latents(job: Job, rules: Rules, mode: str) -> PerToken:
    """Bytes of the latents that queries, keys and values are made of: before their norms and
    after them, where they are read; with sequence parallelism of all tokens. selective: before
    them."""
    mla, w = job.model.mla, width(job)
    if mla is None:
        return PerToken()
    latents = (mla.q_lora_rank or 0) + mla.kv_lora_rank
    made = w * (latents + mla.qk_pos_emb_head_dim)
    if mode == "selective":
        return PerToken(made)
    made += latents * _norm_width(job, rules)
    gathers = _gathers(job, rules)
    return PerToken(made + (0 if gathers else w * latents), gathered=w * latents * gathers)


def _scores(job: Job, rules: Rules) -> float:
    """Bytes of attention weights: softmax's result, and under dropout a mask and the dropped
    result; fused attention keeps one fp32 number of them."""
    model = job.model
    heads = model.num_attention_heads
    dropped = model.attention_dropout > 0
    row = heads * model.seq_length
    if rules.saves_scores:
        return row * (5 if dropped else 2) * width(job) / 2
    if _unfused(job, rules):
        return row * 3 * width(job)
    return 4 * heads


def _unfused(job: Job, rules: Rules) -> bool:
    """torch's attention kernel for the CPU has no dropout: products and softmax one after
    another."""
    return _on_cpu(job, rules) and job.model.attention_dropout > 0


def _mlp(job: Job, rules: Rules, channels: int) -> int:
    """Channels of an MLP of this width: what goes into GELU and what comes out; SwiGLU keeps gate,
    value and product, and unless it is fused silu(gate)."""
    mlp = job.model.mlp
    if job.model.moe is not None and job.model.routing.clamped:
        return CLAMPED_WIDTHS * channels
    if rules.states is None and not _fused(job, rules):
        return mlp.saved_widths * channels
    return mlp.saved_widths_fused * channels


def _always_width(job: Job, *, sparse: bool) -> int:
    """Width of the MLP that all tokens of a block take; 0: none."""
    moe = job.model.moe
    if moe is not None and sparse:
        return moe.shared_expert_intermediate_size or 0
    return job.model.ffn_width


def fullest(job: Job) -> float:
    """FULLEST, or a capacity's factor where that is less."""
    assert job.model.moe is not None
    return min(FULLEST, job.model.moe.expert_capacity_factor or FULLEST)


def load_factor(job: Job, layout: Layout) -> float:
    """f of the fullest rank."""
    return fullest(job) if layout.expert > 1 else 1.0


def _experts(job: Job, layout: Layout, rules: Rules, mode: str) -> float:
    """Bytes a token that a layer's router and experts keep (train/model/experts.py).

    none: scores in fp32 and the numbers of sorted experts, the weights and the order of rows; rows
    as experts read them, what is in their MLPs, their results. selective: results of products,
    and where rows go to other ranks what comes from there.
    """
    model, moe, w = job.model, job.model.moe, width(job)
    assert moe is not None
    h = model.hidden_size
    ranks = layout.expert_tensor
    got = moe.router_topk * load_factor(job, layout)
    if mode == "selective":
        exchanged = layout.expert * ranks > 1
        there = got * ranks * (1 + exchanged) + moe.router_topk * ranks * exchanged
        up = got * model.mlp.projections * moe.ffn_hidden_size
        return w * (moe.num_experts + up + there * h)
    routing = model.routing
    scores = moe.num_experts * (4 + (4 if moe.z_loss_coeff else 0))
    if routing.wide and w < 4:  # what the router reads, in fp32
        scores += 4 * h
    divided = routing.normalized or not routing.pre_softmax
    choice = 3 * ID_BYTES + (8 if divided else 4)  # numbers, the order there and back, weights
    inside = got * (ranks * h + _mlp(job, rules, moe.ffn_hidden_size))
    return scores + moe.router_topk * (choice + w * h) + w * inside


def float8_bytes(job: Job, layout: Layout) -> int:
    """What the widest product in float8 has for a moment besides what it reads: both operands in
    float8; where blocks are not compiled, and where products are emulated, in fp32 twice too."""
    model = job.model
    if job.training.precision != "fp8":
        return 0
    attention = (model.num_attention_heads + 2 * model.query_groups) * model.head_size
    mlp = model.mlp.projections * _always_width(job, sparse=bool(model.moe))
    wide = max(attention, mlp) // layout.tensor
    read = _micro_batch_tokens(job) * max(model.hidden_size, wide) + wide * model.hidden_size
    compiled = job.training.compile and job.cluster.device_type != "cpu"
    return read * (1 if compiled else 9)


def passing_bytes(job: Job, layout: Layout) -> int:
    """What a layer with experts has for a moment besides what it keeps: rows that are sent and
    those that come, before they are in the order of experts; or results times their weights, in
    fp32."""
    moe = job.model.moe
    if moe is None:
        return 0
    exchanged = layout.expert * layout.expert_tensor > 1
    rows = (1 + layout.expert_tensor * load_factor(job, layout)) * exchanged
    per_token = moe.router_topk * job.model.hidden_size * max(width(job) * rows, 4)
    return round(per_token / layout.tensor * _micro_batch_tokens(job))


def block_bytes(
    job: Job, layout: Layout, rules: Rules, mode: str, *, sparse: bool = False
) -> PerToken:
    """One block under a mode of recomputation.

    none: inputs and results of norms, attention, MLP, dropout masks. selective: of the published
    engines attention weights are recomputed; of the native trainer all but the results of
    matrix products, attention and sums over ranks: of split layers both the parts of a sum and
    the sum. full: the block's input alone.

    Args:
        sparse: of a block that has experts.
    """
    model, w, h = job.model, width(job), job.model.hidden_size
    if mode == "full":
        return PerToken(whole=w * h)
    f = _always_width(job, sparse=sparse)
    latents = _latents(job, rules, mode)
    experts = _experts(job, layout, rules, mode) if sparse else 0.0
    sums = 2 if f else 1  # of results over ranks: attention's, the MLP's
    if mode == "selective" and rules.states is None:
        up = model.mlp.projections * f
        if _unfused(job, rules):
            scores = w * model.num_attention_heads * model.seq_length
        else:
            scores = 4 * model.num_attention_heads
        parts = sums * w * h if job.parallelism.tensor_model_parallel_size > 1 else 0
        products = w * (_attention_products(job) + up) + scores
        return PerToken(w * (1 + sums) * h + latents.whole, products + experts, parts)
    norms = len(model.norms)
    # of the residual stream, or what comes out of attention and MLP: what norms read
    inputs = norms if model.placement != "before" else 1 if model.parallel_residual else 2
    gathers, read = _reads(job, rules, experts=sparse, mlp=f > 0)
    masks = 2 * h * mask_width(job, rules) if model.hidden_dropout > 0 else 0
    statistics = 4 * norms * model.architecture.norm.statistics
    streams = w * h * (inputs + read) + h * norms * _norm_width(job, rules) + masks + statistics
    whole = streams + latents.whole
    gathered = w * h * gathers + latents.gathered
    weights = 0.0 if mode == "selective" and rules.saves_scores else _scores(job, rules)
    mlp = w * _mlp(job, rules, f)
    return PerToken(whole, _attention(job, rules) + mlp + weights + experts, gathered)


def _attention_products(job: Job) -> int:
    """Channels of attention's products, without latents, and of its result."""
    model, mla = job.model, job.model.mla
    q = model.num_attention_heads * model.head_size
    if mla is not None:
        return 2 * q + model.num_attention_heads * (mla.qk_head_dim + mla.v_head_dim)
    return 2 * q + 2 * _key_heads(job) * model.head_size


def _reads(job: Job, rules: Rules, *, experts: bool, mlp: bool) -> tuple[int, int]:
    """(gathered, not gathered) inputs of a block's attention, MLP and router, which reads this
    rank's tokens, and so does what makes latents."""
    if not _gathers(job, rules):
        return 0, 1 if job.model.gpt_j_tied else 2
    latent = int(job.model.mla is not None)
    return 1 - latent + mlp, int(experts) + latent


def _micro_batch_tokens(job: Job) -> int:
    """On a context-parallel rank."""
    tokens = job.training.micro_batch_size * job.model.seq_length
    return tokens // job.parallelism.context_parallel_size


def _kinds(model: Model, layers: Sequence[int]) -> dict[bool, Sequence[int]]:
    """Layers without experts (False) and with (True); kinds that are there."""
    if model.moe is None:
        return {False: layers}
    found: dict[bool, Sequence[int]] = {
        kind: [layer for layer in layers if model.sparse(layer) == kind] for kind in (False, True)
    }
    return {kind: those for kind, those in found.items() if those}


def saved_bytes(job: Job, layout: Layout, rules: Rules, stage: int) -> int:
    """Bytes that a stage holds for backward when most micro-batches are in flight: its blocks,
    ids and mask of the embedding, the final norm's input and the gradient of its result. The
    head's own are in `logit_bytes`."""
    t = job.training
    model = job.model
    w = width(job)
    every = t.recompute_every if t.recompute_granularity == "full" else 1
    per_token = 0.0
    for sparse, layers in _kinds(model, layout.stage_layers(stage)).items():
        again = sum(layer % every == 0 for layer in layers)
        for mode, count in ((t.recompute_granularity, again), ("none", len(layers) - again)):
            if count:
                kept = block_bytes(job, layout, rules, mode, sparse=sparse)
                per_token += count * kept.on_rank(layout)
    if stage == 0:
        mask = mask_width(job, rules) * model.hidden_size if model.hidden_dropout > 0 else 0
        per_token += ID_BYTES + PerToken(whole=mask).on_rank(layout)
    if rules.states is None:  # cosines and sines in fp32, once for all samples of a micro-batch
        per_token += 8 * model.rotary_channels / t.micro_batch_size
    flying = layout.in_flight(stage) * per_token
    if rules.states is None:
        flying += layout.sent_in_flight(stage) * PerToken(whole=w * model.hidden_size).on_rank(
            layout
        )
    if stage == layout.last_stage:  # one micro-batch at a time is at its end
        result = w * model.hidden_size
        gathers = _gathers(job, rules)
        norm = model.hidden_size * (w + _norm_width(job, rules))
        flying += (1 + layout.further) * PerToken(
            whole=norm + (0 if gathers else result), gathered=result if gathers else 0
        ).on_rank(layout)
        flying += layout.further * _further(job, rules).on_rank(layout)
    return round(flying * _micro_batch_tokens(job))


def _further(job: Job, rules: Rules) -> PerToken:
    """What predicts one token more keeps besides its block and its end: ids, and what both norms
    and the product read."""
    h = job.model.hidden_size
    return PerToken(whole=4 * width(job) * h + 2 * h * _norm_width(job, rules), gathered=ID_BYTES)


def live_bytes(job: Job, layout: Layout, rules: Rules) -> int:
    """What recomputation makes again at a time: the rest of one block."""
    mode = job.training.recompute_granularity
    if mode == "none":
        return 0
    most = 0.0
    for sparse in _kinds(job.model, range(job.model.blocks)):
        whole, kept = (
            block_bytes(job, layout, rules, m, sparse=sparse).on_rank(layout)
            for m in ("none", mode)
        )
        most = max(most, whole - kept)
    return round(most * _micro_batch_tokens(job))


def logit_bytes(job: Job, layout: Layout, rules: Rules, vocab_size: int, padded: int) -> int:
    """Logits and their gradients on the last stage; of what predicts one token more they come while
    the head's gradient by the other loss is kept.

    Published engines: all tokens of a micro-batch at once, so many bytes a logit. Native: chunks
    of tokens, and the head's gradient, which is made in forward: summed in fp32, then rounded to w.
    In 16 bits plain torch has a chunk's logits in fp32 too (8 bytes a logit); a fused kernel on a
    GPU leaves the gradient in the logits' place, and what is highest is the product that is added
    to the sum.
    """
    columns = -(-padded // layout.tensor)
    tokens = _micro_batch_tokens(job)
    w = width(job)
    if rules.logit_bytes:
        return tokens * columns * rules.logit_bytes
    chunk = min(chunk_tokens(tokens, columns, job.cluster.device_type), tokens)
    rounded = head_gradient_bytes(job, layout, vocab_size, padded)
    summed = columns * job.model.hidden_size * 4 + layout.further * rounded
    if w == 4:
        return summed + chunk * columns * 4
    if _fused(job, rules) and not _on_cpu(job, rules):
        return summed + rounded + chunk * columns * w
    return summed + max(chunk * columns * 8, rounded)


def head_gradient_bytes(job: Job, layout: Layout, vocab_size: int, padded: int) -> int:
    """The native head's gradient, saved for backward in w; in fp32 it is the sum itself, which
    has the padded rows on a GPU."""
    rows = padded if width(job) == 4 and job.cluster.device_type != "cpu" else vocab_size
    return -(-rows // layout.tensor) * job.model.hidden_size * width(job)
