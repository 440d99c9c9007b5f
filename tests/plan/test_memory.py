"""Memory in parts: against published bytes, Korthikanti's formulas, the tensors of the model
that is built and what its forward saves."""

from __future__ import annotations

import weakref
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks.plan import (
    FAMILIES as FAMILIES_OF_THE_BENCHMARK,
    MODES,
    activations,
    layout_activations,
    project,
)
from tests.ops.op_cases import fused
from tests.plan.example import BIG, gpu, job_of, shape
from tests.plan.test_arithmetic import shapes
from trainkit.base.errors import Exit
from trainkit.engines.registry import ENGINES, PLACES
from trainkit.jobs.devices import Device
from trainkit.jobs.schema import Job, Model
from trainkit.ops.kernels import choose
from trainkit.plan.activations import block_bytes, head_gradient_bytes, saved_bytes
from trainkit.plan.arithmetic import parameters_of
from trainkit.plan.layout import layout_of
from trainkit.plan.memory import Memory, fits, memory_of
from trainkit.plan.parameter_shapes import Place, chunk_units, largest, numbers, shard
from trainkit.plan.planner import make_plan
from trainkit.train.model.head_loss import Labels
from trainkit.train.model.transformer import Transformer, build_on_meta
from trainkit.train.parallel.recompute import wrap_blocks

GIB = 2**30
GPT_175B: dict[str, Any] = {
    "layers": 96,
    "hidden": 12288,
    "heads": 96,
    "length": 2048,
    "vocab_size": 51200,
}


def memory(job: Job) -> Memory:
    plan = make_plan(job, rules=ENGINES[job.engine].rules)
    assert plan.memory is not None
    return plan.memory


@settings(deadline=None, max_examples=50)
@given(model=shapes(), vocab=st.integers(2, 70), ranks=st.integers(1, 9))
def test_parameters_one_by_one(model: Model, vocab: int, ranks: int) -> None:
    """The units have the parameters of the model that is built, and their shards are those of
    fully_shard, which splits rows as torch.chunk does."""
    units = chunk_units(model, vocab)
    built = build_on_meta(model, vocab)
    assert (
        numbers(units) == parameters_of(model, vocab) == sum(p.numel() for p in built.parameters())
    )
    assert shard(units, Place(rank=0, data=ranks)) == sum(
        p.chunk(ranks)[0].numel() for p in built.parameters()
    )
    assert largest(units) == max(numbers([unit]) for unit in units)


@given(model=shapes(), vocab=st.integers(2, 70), pipeline=st.integers(1, 3))
def test_stages_hold_the_model_once_but_for_tied_heads(
    model: Model, vocab: int, pipeline: int
) -> None:
    model = model.model_copy(update={"num_layers": 3})
    ends = [0, *accumulate(3 // pipeline + (s < 3 % pipeline) for s in range(pipeline))]
    held = [
        chunk_units(model, vocab, range(*ends[s : s + 2]), first=s == 0, last=s == pipeline - 1)
        for s in range(pipeline)
    ]
    copies = vocab * model.hidden_size if pipeline > 1 and not model.untied else 0
    assert sum(map(numbers, held)) == parameters_of(model, vocab) + copies


@pytest.mark.parametrize(
    ("engine", "precision", "zero", "ranks", "size"),
    [
        # Megatron-LM, docs of the distributed optimizer: 20; 4 + 16/d; 18; 6 + 12/d
        ("megatron-lm", "fp16", 0, 8, 20),
        ("megatron-lm", "fp16", 1, 8, 4 + 16 / 8),
        ("megatron-lm", "bf16", 0, 8, 18),
        ("megatron-lm", "bf16", 1, 8, 6 + 12 / 8),
        # Rajbhandari et al. 2020, arXiv:1910.02054, figure 1: 16; 4 + 12/d; 2 + 14/d; 16/d
        ("gpt-neox", "fp16", 0, 8, 16),
        ("gpt-neox", "fp16", 1, 8, 4 + 12 / 8),
        ("gpt-neox", "bf16", 2, 8, 2 + 14 / 8),
        ("gpt-neox", "bf16", 3, 8, 16 / 8),
        ("nemo", "bf16", 1, 8, 4 + 12 / 8),
    ],
)
def test_bytes_per_parameter(
    engine: str, precision: str, zero: int, ranks: int, size: float
) -> None:
    job = job_of(
        shape(layers=2, hidden=256, length=64),
        ranks,
        engine=engine,
        precision=precision,
        device=BIG,
        parallelism={"zero_stage": zero},
    )
    plan = make_plan(job, rules=ENGINES[engine].rules)
    assert plan.memory is not None and plan.engine_parameters
    rank = plan.memory.fullest
    assert (
        rank.parameter_bytes + rank.gradient_bytes + rank.optimizer_bytes
    ) / plan.engine_parameters == pytest.approx(size, rel=1e-3)


@pytest.mark.parametrize(
    ("zero", "parts"),
    [
        (0, (4, 2, 4, 8)),
        (1, (4 / 8, 2, 4, 8 / 8)),
        (2, (4 / 8, 2, 4 / 8, 8 / 8)),
        (3, (4 / 8, None, 4 / 8, 8 / 8)),
    ],
)
def test_native_bytes_per_parameter(zero: int, parts: tuple[float | None, ...]) -> None:
    """fp32 masters 4, gathered bf16 copies 2, fp32 gradients 4 (whole until ZeRO 2), Adam 8."""
    job = job_of(
        shape(layers=8, hidden=256, length=64),
        8,
        precision="bf16",
        device=BIG,
        parallelism={"zero_stage": zero},
        gradient_accumulation_steps=2,
    )
    plan = make_plan(job)
    assert plan.memory is not None and plan.parameters
    rank = plan.memory.fullest
    found = (rank.parameter_bytes, rank.gathered_bytes, rank.gradient_bytes, rank.optimizer_bytes)
    for size, expected in zip(found, parts, strict=True):
        assert expected is None or size / plan.parameters == pytest.approx(expected, rel=1e-2)
    if zero == 3:
        assert rank.gathered_bytes < 0.6 * 2 * plan.parameters


def test_gradients_accumulate_whole_only_over_several_micro_batches() -> None:
    one, two = (
        memory(job_of(ranks=4, gradient_accumulation_steps=n)).fullest.gradient_bytes
        for n in (1, 2)
    )
    assert two > 3 * one  # in fp64 on the CPU


@pytest.mark.parametrize(
    ("tensor", "sequence", "mode", "formula"),
    [
        (1, False, "none", lambda s, b, h, a, t: s * b * h * (34 + 5 * a * s / h)),
        (8, False, "none", lambda s, b, h, a, t: s * b * h * (10 + 24 / t + 5 * a * s / (h * t))),
        (8, True, "none", lambda s, b, h, a, t: s * b * h / t * (34 + 5 * a * s / h)),
        (8, False, "selective", lambda s, b, h, a, t: s * b * h * (10 + 24 / t)),
        (8, True, "selective", lambda s, b, h, a, t: 34 * s * b * h / t),
        (8, False, "full", lambda s, b, h, a, t: 2 * s * b * h),
        (8, True, "full", lambda s, b, h, a, t: 2 * s * b * h / t),
    ],
)
def test_activations_as_korthikanti(tensor: int, sequence: bool, mode: str, formula: Any) -> None:
    """Korthikanti et al. 2022 (arXiv:2205.05198), table 2, for their 175B, with dropout; the
    statistics of norms, which they leave out, are 1e-4."""
    model = shape(**GPT_175B, hidden_dropout=0.1, attention_dropout=0.1)
    parallelism = {"tensor_model_parallel_size": tensor, "sequence_parallel": sequence}
    job = job_of(
        model,
        8,
        engine="nemo",
        device=BIG,
        precision="bf16",
        parallelism=parallelism,
        micro_batch_size=2,
    )
    per_token = block_bytes(job, layout_of(job), ENGINES["nemo"].rules, mode).on_rank(
        layout_of(job)
    )
    assert per_token * 2 * 2048 == pytest.approx(formula(2048, 2, 12288, 96, tensor), rel=1e-3)


def test_without_dropout_masks_go() -> None:
    """34 becomes 32, 5as/h becomes 2as/h."""
    job = job_of(shape(**GPT_175B), engine="nemo", device=BIG, precision="bf16")
    expected = 12288 * (32 + 2 * 96 * 2048 / 12288)
    assert block_bytes(job, layout_of(job), ENGINES["nemo"].rules, "none").on_rank(
        layout_of(job)
    ) == pytest.approx(expected, rel=1e-3)


def test_activations_of_llama() -> None:
    """Per token h(12 + 4g/a + 6f/h) with SwiGLU fused and rotary positions turned in place: 34 h
    for Llama 3 8B; turning copies queries and keys."""
    model = shape("llama", 32, 4096, 32, 4096, num_query_groups=8, ffn_hidden_size=14336)
    job = job_of(model, engine="megatron-lm", device=BIG, precision="bf16")
    turned, logsumexp, statistics = 2 * (1 + 8 / 32), 4 * 32 / 4096, 8 / 4096
    found = (
        block_bytes(job, layout_of(job), ENGINES["megatron-lm"].rules, "none").on_rank(
            layout_of(job)
        )
        / 4096
    )
    assert found == pytest.approx(
        12 + 4 * 8 / 32 + 6 * 14336 / 4096 - 1 + turned + 1 + logsumexp + statistics, abs=0.05
    )


def saved_by_forward(job: Job, vocab: int) -> int:
    """Bytes that the native model's forward and loss leave for backward, each storage once,
    parameters left out."""
    module = Transformer(job.model, vocab, choose(job.kernels, "cpu").kernels)
    wrap_blocks(module, job.model, job.training)
    own = {p.untyped_storage().data_ptr() for p in module.parameters()}
    found: dict[int, int] = {}
    kept = []  # a storage that is freed would lend its address to the next

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor)
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            found[storage.data_ptr()] = storage.nbytes()
        return tensor

    tokens = torch.zeros(job.training.micro_batch_size, job.model.seq_length, dtype=torch.int64)
    with saved_tensors_hooks(pack, lambda tensor: tensor):
        module(tokens, Labels(tokens))
    return sum(found.values())


def kept_by_plan(job: Job) -> int:
    """The same of a vocabulary of 128, as plan has it."""
    layout = layout_of(job)
    heads = 1 + (job.model.mtp_num_layers or 0)
    kept = saved_bytes(job, layout, ENGINES["native"].rules, 0)
    return kept + heads * head_gradient_bytes(job, layout, 128, 128)


WIDE = {"layers": 2, "hidden": 64, "heads": 4, "length": 64}
EXPERTS = {"num_experts": 8, "router_topk": 3, "ffn_hidden_size": 32}
SIGMOID = {"router_score_function": "sigmoid", "router_enable_expert_bias": True}
HEADS = {"qk_head_dim": 16, "qk_pos_emb_head_dim": 8, "v_head_dim": 12}
FAMILIES: list[dict[str, Any]] = [
    {"family": "gpt"},
    {"family": "gpt", "hidden_dropout": 0.1},
    {"family": "gpt", "attention_dropout": 0.1},
    {"family": "gpt-neox"},
    {"family": "gpt-neox", "gpt_j_tied": True},
    {"family": "gpt-neox", "gpt_j_residual": False, "rotary_percent": 1.0},
    {"family": "llama"},
    {"family": "llama", "num_query_groups": 2},
    {"family": "llama", "num_query_groups": 2, "qk_norm": "head"},
    {"family": "mixtral", "moe": {**EXPERTS, "aux_loss_coeff": 0.01}},
    {"family": "olmoe", "moe": {**EXPERTS, "aux_loss_coeff": 0.01, "z_loss_coeff": 1e-3}},
    {
        "family": "qwen3-moe",
        "moe": {**EXPERTS, "first_dense_layers": 1, "shared_expert_intermediate_size": 48},
    },
    {"family": "qwen3-moe", "moe": {**EXPERTS, **SIGMOID}},
    {
        "family": "gpt-oss",
        "num_query_groups": 2,
        "kv_channels": 12,
        "sliding_window": 16,
        "moe": EXPERTS,
    },
    {
        "family": "deepseek-v3",
        "mla": {"q_lora_rank": 48, "kv_lora_rank": 32, **HEADS},
        "moe": {
            **EXPERTS,
            "first_dense_layers": 1,
            "shared_expert_intermediate_size": 48,
            "router_load_balancing_type": "seq_aux_loss",
            "aux_loss_coeff": 1e-4,
        },
    },
    {"family": "deepseek-v3", "mla": {"kv_lora_rank": 40, **HEADS}, "moe": EXPERTS},
    {
        "family": "deepseek-v3",
        "mla": {"kv_lora_rank": 40, **HEADS},
        "moe": EXPERTS,
        "mtp_num_layers": 1,
    },
]


FULL: dict[str, Any] = {"recompute_granularity": "full"}


def with_kernels(job: Job, kernels: str) -> Job:
    """The job with these kernels; skips the test where there are none."""
    if kernels == "fused":
        fused()
    return job.model_copy(update={"kernels": kernels})


@pytest.mark.parametrize("kernels", ["reference", "fused"])
@pytest.mark.parametrize(
    "mode", [{}, FULL, {**FULL, "recompute_every": 2}], ids=["none", "full", "every 2nd"]
)
@pytest.mark.parametrize("keys", FAMILIES, ids=lambda keys: " ".join(map(str, keys.values())))
def test_activations_are_what_forward_saves(
    keys: dict[str, Any], mode: dict[str, Any], kernels: str
) -> None:
    job = job_of(shape(**{**WIDE, **keys}), micro_batch_size=2, **mode)
    job = with_kernels(job, kernels)
    expected = kept_by_plan(job)
    assert saved_by_forward(job, 128) == pytest.approx(expected, rel=0.05)


class Living(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Remembers every storage that an operation made, without keeping it."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.storages: list[weakref.ref[torch.UntypedStorage]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        self.storages += [
            weakref.ref(leaf.untyped_storage())
            for leaf in tree_leaves(made)
            if isinstance(leaf, torch.Tensor)
        ]
        return made


@pytest.mark.parametrize("kernels", ["reference", "fused"])
@pytest.mark.parametrize("keys", FAMILIES, ids=lambda keys: " ".join(map(str, keys.values())))
def test_activations_under_selective_recomputation(keys: dict[str, Any], kernels: str) -> None:
    """What it keeps is in a cache that saved_tensors_hooks does not see: here, all that lives
    after forward."""
    job = job_of(shape(**{**WIDE, **keys}), micro_batch_size=2, recompute_granularity="selective")
    job = with_kernels(job, kernels)
    module = Transformer(job.model, 128, choose(job.kernels, "cpu").kernels)
    wrap_blocks(module, job.model, job.training)
    own = {p.untyped_storage().data_ptr() for p in module.parameters()}
    tokens = torch.zeros(2, 64, dtype=torch.int64)
    with Living() as living:
        objective = module(tokens, Labels(tokens))
    alive = {
        storage.data_ptr(): storage.nbytes()
        for ref in living.storages
        if (storage := ref()) is not None
    }
    found = sum(size for address, size in alive.items() if address not in own)
    expected = kept_by_plan(job)
    assert found == pytest.approx(expected, rel=0.04) and objective is not None


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "mode"), [("TP2", "selective"), ("TP2 + SP", "selective"), ("PP2 ZBV", "full")]
)
@pytest.mark.parametrize("name", FAMILIES_OF_THE_BENCHMARK)
def test_activations_in_layouts(tmp_path: Path, name: str, layout: str, mode: str) -> None:
    """Some rows of benchmarks/plan.py: split layers keep the parts of a sum beside the sum;
    stages of a zero bubble what they have sent."""
    project(tmp_path)
    for found in layout_activations(tmp_path, name, layout, mode):
        assert abs(found["error"]) < 0.05, found


@pytest.mark.slow
def test_activations_where_the_v_turns(tmp_path: Path) -> None:
    """The last of four stages of a zero bubble, every layer computed again, one layer to a
    chunk: what a chunk sends is what the next one keeps."""
    project(tmp_path)
    keys = {"pipeline_model_parallel_size": 4, "pipeline_schedule": '"zbv"'}
    sets = [f"parallelism.{key}={value}" for key, value in keys.items()]
    sets += [
        "cluster.ranks_per_node=4",
        "model.num_layers=8",
        "training.micro_batch_size=1",
        *MODES["full"],
    ]
    found = activations(tmp_path, "demo", sets, "PP4 ZBV full", 3)
    assert found["predicted"] == found["measured"], found


@pytest.mark.parametrize(
    ("device", "kernels", "chunk", "each"),
    [
        (gpu(80 * GIB), "fused", 4864, 2),
        (gpu(80 * GIB), "auto", 4864, 2),
        (gpu(80 * GIB), "reference", 4864, 8),
        (None, "fused", 1536, 8),
    ],
    ids=["fused", "auto", "reference", "cpu"],
)
def test_logits_are_those_of_a_chunk(
    device: Device | None, kernels: str, chunk: int, each: int
) -> None:
    """32 x 1,024 tokens: 7 chunks of at most 2^30 bytes in fp32 on CUDA, 25 of 2^28 elsewhere, in
    multiples of 256 tokens. Fused kernels on a GPU have no more than the logits, and beside them
    the product that is added to the head's gradient."""
    columns, hidden = 50304, 64
    model = shape(layers=2, hidden=hidden, heads=4, length=1024, vocab_size=columns)
    job = job_of(model, device=device, micro_batch_size=32, precision="bf16")
    found = memory(job.model_copy(update={"kernels": kernels})).stages[-1].logit_bytes
    product = columns * hidden * 2 if each == 2 else 0
    assert found == columns * hidden * 4 + product + chunk * columns * each


def test_the_published_20b() -> None:
    """LambdaLabs' README: 27 GB on each of 24 A100-40GB, at TP 4, PP 6, micro-batch 4, every
    layer computed again, ZeRO buckets of 1.26e9 elements."""
    model = shape("gpt-neox", 44, 6144, 64, 2048, vocab_size=50277)
    parallelism = {"tensor_model_parallel_size": 4, "pipeline_model_parallel_size": 6}
    keys: dict[str, Any] = {
        "precision": "fp16",
        "recompute_granularity": "full",
        "micro_batch_size": 4,
        "global_batch_size": 128,
    }
    job = job_of(
        model,
        8,
        nodes=3,
        engine="gpt-neox",
        device=gpu(40 * GIB),
        parallelism=parallelism,
        engine_args={"zero_optimization": {"reduce_bucket_size": 1260000000}},
        **keys,
    )
    found = memory(job)
    rank = found.fullest
    assert rank.stage == 0 and found.fits
    assert (
        rank.parameter_bytes + rank.gradient_bytes + rank.optimizer_bytes
    ) / GIB == pytest.approx(14.7, abs=0.05)
    assert saved_bytes(job, layout_of(job), ENGINES["gpt-neox"].rules, 0) / GIB == pytest.approx(
        4.5, abs=0.05
    )
    assert found.stages[-1].logit_bytes / GIB == pytest.approx(2.0, abs=0.1)
    assert rank.buffer_bytes / GIB == pytest.approx(2.3, abs=0.05)
    assert 25 * GIB < rank.total_bytes < 27 * GIB


@st.composite
def laid_out(draw: st.DrawFn) -> Job:
    """A job of any engine on a layout that need not be possible."""
    family = draw(st.sampled_from(["gpt", "gpt-neox", "llama"]))
    engine = draw(st.sampled_from(sorted(PLACES)))
    model = shape(
        family,
        draw(st.integers(1, 12)),
        32 * draw(st.integers(1, 3)),
        draw(st.sampled_from([1, 2, 4])),
        16,
    )
    pipeline, virtual = draw(st.integers(1, 6)), draw(st.sampled_from([None, 2]))
    parallelism = {
        "tensor_model_parallel_size": draw(st.integers(1, 4)),
        "pipeline_model_parallel_size": pipeline,
        "virtual_pipeline_model_parallel_size": virtual if pipeline > 1 else None,
        "sequence_parallel": draw(st.booleans()),
        "zero_stage": draw(st.integers(0, 3)),
    }
    training: dict[str, Any] = {
        "precision": draw(st.sampled_from(["fp32", "bf16", "fp16"])),
        "recompute_granularity": draw(st.sampled_from(["none", "selective", "full"])),
        "micro_batch_size": draw(st.integers(1, 4)),
        "global_batch_size": draw(st.integers(1, 64)),
        "optimizer": draw(st.sampled_from(["adam", "sgd"])),
    }
    device = gpu(draw(st.sampled_from([10**8, 2 * 2**30, 10**12])))
    ranks, nodes = draw(st.integers(1, 8)), draw(st.integers(1, 6))
    return job_of(
        model, ranks, nodes=nodes, engine=engine, device=device, parallelism=parallelism, **training
    )


@settings(deadline=None, max_examples=100)
@given(laid_out())
def test_parts_sum_to_the_total_and_the_fullest_rank_decides(job: Job) -> None:
    layout, rules = layout_of(job), ENGINES[job.engine].rules
    found = memory_of(job, layout, rules, 16, 128)
    assert len(found.stages) == layout.pipeline
    for rank in found.stages:
        assert sum(rank.parts.values()) == rank.total_bytes and min(rank.parts.values()) >= 0
        assert rank.parameter_bytes <= rank.highest_bytes <= rank.total_bytes - rank.reserve_bytes
        assert rank.to_json() == {
            "stage": rank.stage,
            "total_bytes": rank.total_bytes,
            **rank.parts,
        }
    assert found.fullest.total_bytes == max(rank.total_bytes for rank in found.stages)
    assert (
        found.fits
        == (found.fullest.total_bytes <= (job.cluster.device.memory_bytes or 0))
        == fits(job, layout, rules, 16, 128)
    )


def test_an_unknown_device_is_not_judged() -> None:
    plan = make_plan(job_of(device=gpu(None)))
    assert plan.memory is not None and plan.memory.fits is None and plan.feasible is None
    assert [entry.code for entry in plan.not_known] == ["device-memory-unknown"]
    assert plan.exit is Exit.NOT_KNOWN and not plan.to_json()["feasible"]


def test_in_a_pipeline_zero_3_gathers_and_accumulates_whole() -> None:
    """torch's stages reduce once a step, and free gathered weights no earlier."""

    def parts(zero: int, stages: int, micro_batches: int = 4) -> tuple[int, int, int]:
        layout = {"zero_stage": zero, "pipeline_model_parallel_size": stages}
        found = memory(
            job_of(
                shape(layers=8, hidden=64),
                2 * stages,
                parallelism=layout,
                gradient_accumulation_steps=micro_batches,
            )
        ).fullest
        return found.parameter_bytes, found.gathered_bytes, found.gradient_bytes

    assert parts(3, 2) == parts(1, 2)
    assert parts(3, 1)[1] < parts(1, 1)[1] and parts(3, 1)[2] < parts(1, 1)[2]
