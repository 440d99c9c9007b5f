"""How Megatron-LM names the tensors of a model: GPTModel of Megatron-core 0.12 and newer
(core/models/gpt/gpt_layer_specs.py, core/transformer/moe/experts.py), with transformer_impl "local"
or "transformer_engine". Of experts the latter has --moe-grouped-gemm here."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace

from trainkit.engines.convert.options import FileLayout
from trainkit.engines.convert.tensors import EngineTensor, block_tensors
from trainkit.jobs.schema import Model

EXTRA = "_extra_state"
MODULES = {
    "attention_norm": "input_layernorm",
    "attention.qkv": "self_attention.linear_qkv",
    "attention.q_norm": "self_attention.q_layernorm",
    "attention.k_norm": "self_attention.k_layernorm",
    "attention.q": "self_attention.linear_q_proj",
    "attention.q_a": "self_attention.linear_q_down_proj",
    "attention.q_a_norm": "self_attention.q_layernorm",
    "attention.q_b": "self_attention.linear_q_up_proj",
    "attention.kv_a": "self_attention.linear_kv_down_proj",
    "attention.kv_a_norm": "self_attention.kv_layernorm",
    "attention.kv_b": "self_attention.linear_kv_up_proj",
    "attention.out": "self_attention.linear_proj",
    "mlp_norm": "pre_mlp_layernorm",
    "mlp.up": "mlp.linear_fc1",
    "mlp.gate_up": "mlp.linear_fc1",
    "mlp.down": "mlp.linear_fc2",
    "mlp.router": "mlp.router",
    "mlp.shared_expert.gate_up": "mlp.shared_experts.linear_fc1",
    "mlp.shared_expert.down": "mlp.shared_experts.linear_fc2",
}
# Experts by themselves (SequentialMLP), and Transformer Engine's grouped product of all
# (TEGroupedMLP), each with its own number among those of its rank.
EXPERT = re.compile(r"(.*mlp\.experts\.)local_experts\.(\d+)\.(linear_fc[12])\.weight")
GROUPED = re.compile(r"(.*mlp\.experts\.)(linear_fc[12])\.weight(\d+)")
# Transformer Engine has the norm inside the projection that follows.
FUSED = {
    "input_layernorm.": "self_attention.linear_qkv.layer_norm_",
    "pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_",
}
# The same of latents, before whose projections the block's norm stays by itself.
FUSED_LATENTS = {
    "self_attention.q_layernorm.": "self_attention.linear_q_up_proj.layer_norm_",
    "self_attention.kv_layernorm.": "self_attention.linear_kv_up_proj.layer_norm_",
}
LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")


def plan(model: Model) -> list[EngineTensor]:
    """All tensors of a model, with the names of transformer_impl "local"."""
    family = model.architecture
    found = [
        EngineTensor("embed_tokens.weight", "embedding.word_embeddings.weight", "vocabulary"),
    ]
    if family.learned_positions:
        found.append(EngineTensor("embed_positions.weight", "embedding.position_embeddings.weight"))
    blocks = {sparse: _block(model, sparse=sparse) for sparse in (False, True)}
    for i in range(model.num_layers):
        found += [
            replace(how, ours=f"layers.{i}.{how.ours}", theirs=f"decoder.layers.{i}.{how.theirs}")
            for how in blocks[model.sparse(i)]
        ]
    found += [
        EngineTensor(f"final_norm.{kind}", f"decoder.final_layernorm.{kind}")
        for kind in family.norm.parameters
    ]
    if model.untied:
        found.append(EngineTensor("head.weight", "output_layer.weight", "vocabulary"))
    return found


def _block(model: Model, *, sparse: bool) -> list[EngineTensor]:
    """The tensors of one block, with names from within it. `sparse`: it has experts."""
    moe = model.moe
    if sparse and moe is not None:
        unused = {"mlp.up", "mlp.gate_up", "mlp.down"}
        shared = moe.shared_expert_intermediate_size
    else:
        unused = {"mlp.up", "mlp.gate_up", "mlp.router"} - {f"mlp.{model.mlp.module}"}
        shared = None
    if not shared:
        unused |= {"mlp.shared_expert.gate_up", "mlp.shared_expert.down"}
    if model.query_key_norm == "none":
        unused |= {"attention.q_norm", "attention.k_norm"}
    unused |= _not_of_attention(model)
    modules = {ours: theirs for ours, theirs in MODULES.items() if ours not in unused}
    found = block_tensors(model, modules, "replicated")
    if sparse and moe is not None:
        if model.routing.expert_bias:
            found.append(EngineTensor("mlp.router.expert_bias", "mlp.router.expert_bias"))
        for e in range(moe.num_experts):
            theirs = f"mlp.experts.local_experts.{e}"
            found += [
                EngineTensor(
                    f"mlp.experts.gate_up.weight.{e}", f"{theirs}.linear_fc1.weight", "gated"
                ),
                EngineTensor(
                    f"mlp.experts.down.weight.{e}", f"{theirs}.linear_fc2.weight", "columns"
                ),
            ]
    return found


def _not_of_attention(model: Model) -> set[str]:
    """What makes queries, keys and values in other models."""
    if model.mla is None:
        return {f"attention.{name}" for name in ("q", "q_a", "q_a_norm", "q_b")} | {
            f"attention.{name}" for name in ("kv_a", "kv_a_norm", "kv_b")
        }
    if model.mla.q_lora_rank is None:
        return {"attention.qkv", "attention.q_a", "attention.q_a_norm", "attention.q_b"}
    return {"attention.qkv", "attention.q"}


def is_sparse(how: EngineTensor, model: Model) -> bool:
    layer = LAYER.fullmatch(how.theirs)
    return layer is not None and model.sparse(int(layer[1]))


def of_expert_rank(theirs: str, model: Model, ranks: int, rank: int) -> str | None:
    """A name as one rank of experts has it, which counts its own from 0; None: another has it."""
    match = EXPERT.fullmatch(theirs)
    if match is None or model.moe is None:
        return theirs
    own, number = divmod(int(match[2]), model.moe.num_experts // ranks)
    return f"{match[1]}local_experts.{number}.{match[3]}.weight" if own == rank else None


def linears(model: Model, layout: FileLayout, *, sparse: bool) -> Iterator[str]:
    unused = _not_of_attention(model)
    for ours, theirs in MODULES.items():
        if ".linear_" in theirs and ours.startswith("attention.") and ours not in unused:
            yield theirs
    engine = layout.names == "transformer_engine"
    if engine:
        yield "self_attention.core_attention"
    parents = ["mlp"]
    if sparse and model.moe is not None:
        local = range(model.moe.num_experts // layout.expert)
        one_by_one = [f"mlp.experts.local_experts.{e}" for e in local]
        parents = ["mlp.experts"] if engine else one_by_one
        if model.moe.shared_expert_intermediate_size:
            parents.append("mlp.shared_experts")
    for parent in parents:
        yield from (f"{parent}.linear_fc1", f"{parent}.linear_fc2")


def named(name: str, names: str, *, sparse: bool, latents: bool) -> str:
    """A name of transformer_impl "local" as the asked one has it. Before experts the norm stays by
    itself, since the router reads what it makes."""
    if names == "transformer_engine":
        by_itself = {"pre_mlp_layernorm."} if sparse else set()
        if latents:
            by_itself.add("input_layernorm.")
        for local, fused in {**FUSED, **(FUSED_LATENTS if latents else {})}.items():
            if f".{local}" in name and local not in by_itself:
                return name.replace(local, fused)
        return EXPERT.sub(r"\1\3.weight\2", name)
    return name


def local_name(name: str) -> str:
    """A name of either transformer_impl as "local" has it."""
    for local, fused in {**FUSED, **FUSED_LATENTS}.items():
        if f".{fused}" in name:
            return name.replace(fused, local)
    return GROUPED.sub(r"\1local_experts.\3.\2.weight", name)


def global_experts(
    names: Mapping[str, object], rank: int, model: Model, ranks: int
) -> dict[str, object]:
    """What a rank of experts has, its experts numbered among those of all ranks."""
    if model.moe is None:
        return dict(names)
    before = rank * (model.moe.num_experts // ranks)
    found = {}
    for name, value in names.items():
        match = EXPERT.fullmatch(name)
        if match:
            name = f"{match[1]}local_experts.{before + int(match[2])}.{match[3]}.weight"
        found[name] = value
    return found
