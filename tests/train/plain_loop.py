"""One model trained by one plain PyTorch loop: the reference of tests/train/layouts.py, and the
jobs that both train.

The reference knows nothing of micro-batches, shards or schedules: the same model code on the
whole global batch, torch's own cross-entropy, clipping and AdamW. It shares with the trainer the
initial weights, the samples, and two numbers that the fused optimizer takes in fp32: rate and
divisor. Of a model that drops out it goes sample by sample and is told where chunks begin:
there, and nowhere else, random numbers begin anew.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
import tokenizers.models
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from tests.train.plain_experts import (
    balance,
    further_entropies,
    last_norm_watched,
    move_biases,
    routers_watched,
)
from trainkit.data.indexed.dataset import IndexedWriter
from trainkit.data.indexed.paths import DataFolder
from trainkit.jobs.experts import Experts
from trainkit.jobs.latent import Latent
from trainkit.jobs.rope_scaling import RopeScaling
from trainkit.jobs.schema import Cluster, Dataset, Job, Model, Parallelism, Tokenizer, Training
from trainkit.ops.cross_entropy import NO_LABEL
from trainkit.plan.layout import split_layers
from trainkit.train.batches import Feed
from trainkit.train.model.attention import DocumentBounds
from trainkit.train.model.batch import Batch
from trainkit.train.model.transformer import Transformer
from trainkit.train.parallel.data_parallel import World
from trainkit.train.parallel.initialize import initial_value
from trainkit.train.update.schedule import global_batch_size, learning_rate
from trainkit.train.update.step import dropout_seed

STEPS = 10


DTYPES = {"fp64": torch.float64, "fp32": torch.float32}


VOCAB = 61  # a prime: it divides by no tensor-parallel size


END = 7  # ends a document


SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "num_attention_heads": 4,
    "seq_length": 16,
    "vocab_size": VOCAB,
    "ffn_hidden_size": 72,
    "init_method_std": 0.1,
}


MODELS = {
    # tied; 5 layers are uneven on any number of stages
    "gpt": Model(family="gpt", num_layers=5, **SIZES),
    "gpt-deep": Model(family="gpt", num_layers=9, **SIZES),
    "gpt-untied": Model(
        family="gpt", num_layers=5, untie_embeddings_and_output_weights=True, **SIZES
    ),
    # untied, attention and MLP side by side
    "neox": Model(family="gpt-neox", num_layers=5, **SIZES),
    "neox-tied": Model(
        family="gpt-neox",
        num_layers=5,
        untie_embeddings_and_output_weights=False,
        gpt_j_tied=True,
        **SIZES,
    ),
    # fewer heads of keys and values than 4 tensor-parallel ranks
    "llama": Model(family="llama", num_layers=4, num_query_groups=2, **SIZES),
    "llama-deep": Model(family="llama", num_layers=8, num_query_groups=2, **SIZES),
    "llama-tied": Model(
        family="llama",
        num_layers=5,
        num_query_groups=2,
        untie_embeddings_and_output_weights=False,
        **SIZES,
    ),
    "llama-1-group": Model(family="llama", num_layers=4, num_query_groups=1, **SIZES),
    # a norm of each head; heads wider than their part of the hidden size
    "qwen3": Model(family="qwen3", num_layers=4, num_query_groups=2, kv_channels=12, **SIZES),
    "qwen2": Model(family="qwen2", num_layers=4, num_query_groups=1, **SIZES),
    # norms of all heads together, which no rank has all of
    "olmo2": Model(family="olmo2", num_layers=4, num_query_groups=2, **SIZES),
    "olmo2-1-group": Model(family="olmo2", num_layers=4, num_query_groups=1, **SIZES),
    # windows in layers of every stage
    "olmo3": Model(
        family="olmo3", num_layers=5, sliding_window=3, sliding_window_pattern=2, **SIZES
    ),
    "gemma3": Model(
        family="gemma3",
        num_layers=5,
        num_query_groups=2,
        sliding_window=3,
        sliding_window_pattern=3,
        **SIZES,
    ),
    "gpt-changed": Model(
        family="gpt",
        num_layers=5,
        qk_norm="head",
        norm_placement="both",
        activation="squared_relu",
        sliding_window=4,
        embedding_scale=3.0,
        query_pre_attn_scalar=5,
        **SIZES,
    ),
    # four times as wide as the model that rates were tuned on; heads twice
    "llama-mup": Model(
        family="llama",
        num_layers=4,
        num_query_groups=2,
        parametrization="mup",
        mup_base_hidden_size=8,
        mup_base_kv_channels=4,
        **SIZES,
    ),
    "gpt-mup": Model(
        family="gpt", num_layers=5, parametrization="mup", mup_base_hidden_size=16, **SIZES
    ),
    # experts: softmax, balance over a micro-batch; sigmoid, groups and a bias, balance within a
    # sample, an expert for all, and layers without experts before the others
    "moe": Model(
        family="qwen3-moe",
        num_layers=4,
        num_query_groups=2,
        moe=Experts(
            num_experts=8, router_topk=2, ffn_hidden_size=24, aux_loss_coeff=0.5, z_loss_coeff=0.1
        ),
        **SIZES,
    ),
    "moe-biased": Model(
        family="qwen3-moe",
        num_layers=5,
        num_query_groups=2,
        moe=Experts(
            num_experts=8,
            router_topk=2,
            ffn_hidden_size=20,
            shared_expert_intermediate_size=36,
            first_dense_layers=1,
            router_score_function="sigmoid",
            router_topk_scaling_factor=2.5,
            router_num_groups=2,
            router_group_topk=1,
            router_enable_expert_bias=True,
            router_bias_update_rate=0.01,  # more would go back and forth, to 0 at every other step
            router_load_balancing_type="seq_aux_loss",
            aux_loss_coeff=0.5,
        ),
        **SIZES,
    ),
    # attention by latents, in layers with experts and without
    "deepseek": Model(
        family="deepseek-v3",
        num_layers=5,
        rope_scaling=RopeScaling(
            type="yarn",
            factor=4.0,
            original_max_position_embeddings=8,
            mscale=0.7,
            mscale_all_dim=1.0,
        ),
        mla=Latent(
            q_lora_rank=20, kv_lora_rank=12, qk_head_dim=10, qk_pos_emb_head_dim=4, v_head_dim=6
        ),
        moe=Experts(
            num_experts=8,
            router_topk=4,
            ffn_hidden_size=20,
            shared_expert_intermediate_size=40,
            first_dense_layers=1,
            router_topk_scaling_factor=2.5,
            router_num_groups=4,
            router_group_topk=2,
            router_bias_update_rate=0.05,
            router_load_balancing_type="seq_aux_loss",
            aux_loss_coeff=0.5,
        ),
        **SIZES,
    ),
    # sinks, windows, biases of all that experts have
    "gpt-oss": Model(
        family="gpt-oss",
        num_layers=5,
        num_query_groups=2,
        kv_channels=12,
        sliding_window=3,
        rope_scaling=RopeScaling(
            type="yarn", factor=4.0, original_max_position_embeddings=8, truncate=False
        ),
        moe=Experts(num_experts=8, router_topk=3, ffn_hidden_size=20, aux_loss_coeff=0.5),
        **SIZES,
    ),
    "gpt-dropping": Model(
        family="gpt", num_layers=5, hidden_dropout=0.2, attention_dropout=0.2, **SIZES
    ),
}

# one token more; with as much weight as would be seen
MODELS["deepseek-mtp"] = MODELS["deepseek"].model_copy(
    update={"num_layers": 4, "mtp_num_layers": 1, "mtp_loss_scaling_factor": 0.7}
)


# as `moe`: balance over a global batch; a capacity below what tokens choose
_FURTHER: dict[str, dict[str, Any]] = {
    "moe-global": {"router_load_balancing_type": "global_aux_loss"},
    "moe-capped": {"expert_capacity_factor": 1.0, "shared_expert_intermediate_size": 36},
}
for _name, _keys in _FURTHER.items():
    _moe = MODELS["moe"].moe
    assert _moe is not None
    MODELS[_name] = MODELS["moe"].model_copy(update={"moe": _moe.model_copy(update=_keys)})


TRAINING: dict[str, Any] = {
    "micro_batch_size": 1,
    "global_batch_size": 8,
    "train_iters": STEPS,
    "lr": 5e-3,
    "lr_warmup_iters": 3,
    "lr_warmup_init": 1e-3,
    "weight_decay": 0.1,
    "clip_grad": 0.5,  # below every norm of these models
    "z_loss": 1e-3,
    "eval_iters": 0,
}


@dataclass(frozen=True)
class StepFound:
    """One step: mean cross-entropy, gradient norm, and the gradient of every parameter by name
    and global shape before clipping, of all losses' sum over the number of all tokens; where
    labels are masked, loss and norm are those of the mean over the others. With experts, how many
    rows each of every layer had; the mean cross-entropy of what predicts one token more."""

    loss: float
    norm: float
    gradients: dict[str, NDArray[Any]]
    loads: NDArray[Any] | None = None
    mtp_loss: float = 0.0


DATASETS = {
    "mock": Dataset(name="mock", source="mock", split="90,10,0"),
    "documents": Dataset(
        name="documents",
        source="files",
        paths=("x",),
        split="1",
        tokenizer=Tokenizer(name="own", type="file", path="x"),
    ),
}


# Of mock data: whether a sample, by its place in a global batch of 4, keeps the label of a token.
# Data-parallel ranks, micro-batches and halves of the sequence then have different numbers of
# labels, and some have none.
MASKS: dict[str, Callable[[int, int], bool]] = {
    "one-label": lambda sample, token: (sample, token) == (2, 5),
    "unequal-labels": lambda sample, token: token < 5 * sample,
}
DATASETS |= {name: Dataset(name=name, source="mock", split="90,10,0") for name in MASKS}


# Where each document is a sequence of its own, and its end has no label.
APART: dict[str, Any] = {
    "reset_attention_mask": True,
    "reset_position_ids": True,
    "eod_mask_loss": True,
}


def write_documents(root: Path) -> None:
    """The files of the dataset `documents`: some random tokens in each, as data preparation
    leaves them."""
    folder, random = DataFolder(root, DATASETS["documents"]), np.random.default_rng(5)
    with IndexedWriter(folder.prefix, np.uint16) as writer:
        for length in random.integers(1, 12, 400):
            writer.add_document(
                np.append(random.integers(END + 1, VOCAB, length), END).astype(np.uint16)
            )
    words = {"<|endoftext|>" if i == END else f"word{i}": i for i in range(VOCAB)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="word0"))
    tokenizer.add_special_tokens(["<|endoftext|>"])
    tokenizer.save(str(folder.tokenizer))
    folder.manifest.write_text(json.dumps({"schema": "dataset/1", "vocab_size": VOCAB}))


def job_of(
    model: str,
    ranks: int,
    root: Path,
    parallelism: dict[str, Any],
    data: str = "mock",
    **training: Any,
) -> Job:
    """A job of one of MODELS on one of DATASETS."""
    return Job(
        name="matrix",
        cluster=Cluster(name="here", ranks_per_node=ranks, root=str(root)),
        model=MODELS[model].model_copy(update={"name": model}),
        dataset=DATASETS[data],
        parallelism=Parallelism(**parallelism),
        training=Training(**{**TRAINING, **training}),
    )


def sizes_of(job: Job) -> list[tuple[int, int]]:
    """(samples before, samples) of every step."""
    consumed, found = 0, []
    for _ in range(job.training.train_iters):
        found.append((consumed, global_batch_size(job, consumed)))
        consumed += found[-1][1]
    return found


def whole_batches(job: Job) -> list[Batch]:
    """Every step's global batch as one."""
    feed = Feed(job, job.dataset, "train", World(0, 1), torch.device("cpu"))
    try:
        return [
            _joined(list(masked(job, feed.read(consumed, size))))
            for consumed, size in sizes_of(job)
        ]
    finally:
        feed.close()


def masked(job: Job, batches: Iterable[Batch]) -> Iterator[Batch]:
    """Micro-batches as `job`'s dataset has them: without the labels that its mask takes."""
    for batch in batches:
        if keeps := MASKS.get(job.dataset.name):
            labels_BS = batch.labels_BS.clone()
            for row, label_S in enumerate(labels_BS, start=batch.position):
                dropped = [not keeps(row % 4, token) for token in range(len(label_S))]
                label_S[torch.tensor(dropped)] = NO_LABEL
            batch = replace(batch, labels_BS=labels_BS)
        yield batch


def _joined(batches: list[Batch]) -> Batch:
    tokens_BS, labels_BS = (
        torch.cat([b.tokens_BS for b in batches]),
        torch.cat([b.labels_BS for b in batches]),
    )
    positions = [b.positions_BS for b in batches if b.positions_BS is not None]
    starts, documents = [0], None
    for found in (b.documents for b in batches if b.documents is not None):
        starts += [starts[-1] + bound for bound in found.bounds[1:]]
        documents = DocumentBounds(
            tuple(starts),
            torch.tensor(starts, dtype=torch.int32),
            max(b - a for a, b in pairwise(starts)),
        )
    return Batch(
        tokens_BS,
        labels_BS,
        0,
        batches[0].position,
        torch.cat(positions) if positions else None,
        documents,
    )


def _begin_anew(seed: int, *_: Any) -> None:
    torch.manual_seed(seed)


def _logits(model: Transformer, batch: Batch, job: Job, chunks: int) -> Tensor:
    """(N, V) of a whole batch, by the plain model; of one that drops out sample by sample,
    random numbers beginning anew at each of `chunks` parts."""
    if not job.model.hidden_dropout:
        logits_BSV: Tensor = model(
            batch.tokens_BS, positions_BS=batch.positions_BS, documents=batch.documents
        )
        return logits_BSV.flatten(0, 1)
    sizes, rows = split_layers(job.model.num_layers, chunks), []
    first = [
        model.embed_tokens,
        *(model.layers[str(sum(sizes[:part]))] for part in range(1, chunks)),
    ]
    for position, row_S in enumerate(batch.tokens_BS, start=batch.position):
        seeds = [dropout_seed(job.training.seed, position, part) for part in range(chunks)]
        hooks = [
            module.register_forward_pre_hook(partial(_begin_anew, seed))
            for module, seed in zip(first, seeds, strict=True)
        ]
        rows.append(model(row_S[None])[0])
        for hook in hooks:
            hook.remove()
    return torch.cat(rows)


def plain_muon(name: str, p: Tensor, momentum: Tensor, job: Job, rate: float) -> None:
    """Muon of one whole parameter, from its definition: each matrix by itself, step by step."""
    t, m = job.training, job.model
    assert p.grad is not None
    momentum.mul_(t.muon_momentum).add_((1 - t.muon_momentum) * p.grad)
    u = momentum
    if t.muon_nesterov:
        u = t.muon_momentum * momentum + (1 - t.muon_momentum) * p.grad
    p.mul_(1 - rate * t.weight_decay)
    q, kv = (heads * m.head_size for heads in (m.num_attention_heads, m.query_groups))
    rows = {"attention.qkv.weight": [q, kv, kv], "mlp.gate_up.weight": [m.ffn_width] * 2}
    if m.moe is not None:
        each, shared = m.moe.ffn_hidden_size, m.moe.shared_expert_intermediate_size or 0
        rows |= {
            "mlp.experts.gate_up.weight": [each] * 2 * m.moe.num_experts,
            "mlp.experts.down.weight": [each] * m.moe.num_experts,
            "mlp.shared_expert.gate_up.weight": [shared] * 2,
        }
    # each projection of attention by latents is one matrix
    start = 0
    for size in next((r for end, r in rows.items() if name.endswith(end)), [len(p)]):
        x = u[start : start + size] / (u[start : start + size].norm() + 1e-7)
        for _ in range(t.muon_num_ns_steps):
            a, b, c = 3.4445, -4.7750, 2.0315
            x = a * x + (b * x @ x.T + c * x @ x.T @ x @ x.T) @ x
        p[start : start + size] -= rate * 0.2 * (max(x.shape) / m.width_factor) ** 0.5 * x
        start += size


def reference(job: Job, dtype: torch.dtype, chunks: int = 1) -> list[StepFound]:
    """Train `job` by the plain loop. `chunks`: in how many parts random numbers are drawn, where
    there are any."""
    t, model = job.training, Transformer(job.model, VOCAB).to(dtype)
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(initial_value(name, tuple(p.shape), job.model, t.seed))
    muon = {
        name: torch.zeros_like(p)
        for name, p in model.named_parameters()
        if t.optimizer == "muon" and p.dim() > 1 and name.startswith(("layers.", "mtp."))
    }
    wider = job.model.width_factor
    groups = []
    for name, p in model.named_parameters():
        if name not in muon:
            hidden = p.dim() > 1 and name.startswith(("layers.", "mtp."))
            factor = 1 / wider if hidden else 1.0
            decay = t.weight_decay / factor if p.dim() > 1 else 0.0
            groups.append({"params": [p], "weight_decay": decay, "factor": factor})
    optimizer = torch.optim.AdamW(
        groups, betas=(t.adam_beta1, t.adam_beta2), eps=t.adam_eps / wider, foreach=False
    )
    found = []
    before: Tensor | None = None  # loads of the last step
    for step, batch in enumerate(whole_batches(job)):
        with routers_watched(model) as routers, last_norm_watched(model) as made:
            logits_NV = _logits(model, batch, job, chunks)
            further = further_entropies(model, made[0], batch) if model.mtp else torch.zeros(1)
        labels_N = batch.labels_BS.flatten()
        counted_N = labels_N != NO_LABEL
        entropy = F.cross_entropy(logits_NV, labels_N)  # the mean of those that have a label
        objective = entropy + t.z_loss * logits_NV[counted_N].logsumexp(-1).square().mean()
        objective = objective + (job.model.mtp_loss_scaling_factor or 0) * (
            further.sum() / counted_N.sum()
        )
        share = float(counted_N.double().mean())
        for number, logits_TE in routers.items():
            before_E = None if before is None else before[number]
            objective = objective + balance(logits_TE, job, before_E) / share
        objective.backward()  # type: ignore[no-untyped-call]
        gradients = {
            name: share * p.grad.numpy()
            for name, p in model.named_parameters()
            if p.grad is not None
        }
        norm = torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None]).norm()
        divisor = max(1.0, float(norm + 1e-6) / t.clip_grad)
        for p in model.parameters():
            assert p.grad is not None
            p.grad *= share / float(np.float32(divisor * share))
        rate = float(np.float32(learning_rate(t, step)))
        for group in optimizer.param_groups:
            group["lr"] = rate * group["factor"]
        with torch.no_grad():
            for name, p in model.named_parameters():
                if name in muon:
                    plain_muon(name, p, muon[name], job, rate)
                    p.grad = None
        optimizer.step()
        optimizer.zero_grad()
        loads = None
        if routers:
            loads = move_biases(model, routers, job)
            before = torch.tensor(loads).view(job.model.blocks, -1)[:, :-1]
        mtp_loss = float(further.detach().mean())
        found.append(StepFound(float(entropy.detach()), float(norm), gradients, loads, mtp_loss))
    return found
