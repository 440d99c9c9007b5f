"""Models with experts in plan: published counts, what torch counts and builds, who holds which
expert, what is refused, sent, and searched."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch.utils.flop_counter import FlopCounterMode

from tests.plan.example import BIG, job_of, shape
from tests.train.plain_loop import MODELS
from trainkit.engines.registry import ENGINES
from trainkit.jobs.devices import built_in_device
from trainkit.jobs.ranks import degrees_of
from trainkit.jobs.schema import Job, Model, Training
from trainkit.plan.activations import FULLEST, passing_bytes, saved_bytes
from trainkit.plan.arithmetic import (
    active_parameters_of,
    hardware_flops_per_token_of,
    model_flops_per_token_of,
    parameters_of,
)
from trainkit.plan.checks import TP
from trainkit.plan.grid_checks import EP, ETP, REPLICAS
from trainkit.plan.layout import layout_of
from trainkit.plan.objection import Change, with_change
from trainkit.plan.parameter_shapes import (
    Place,
    block_matrices,
    block_units,
    chunk_units,
    numbers,
    outer_unit,
    shard,
)
from trainkit.plan.planner import Plan, make_plan
from trainkit.plan.search import Search, Searcher, describe
from trainkit.plan.time.constants import devices, fitted
from trainkit.plan.time.of_job import estimate_step
from trainkit.train.model.transformer import Transformer, build_on_meta
from trainkit.train.parallel import expert_parallel, tensor_parallel
from trainkit.train.parallel.expert_parallel import ExpertGroup
from trainkit.train.parallel.recompute import wrap_blocks
from trainkit.train.parallel.tensor_group import TensorGroup
from trainkit.train.update.muon import items_of

H100 = built_in_device("h100-sxm-80gb")
NATIVE = ENGINES["native"].rules
MOE = {"num_experts": 8, "router_topk": 2, "ffn_hidden_size": 24}


def published(family: str, layers: int, hidden: int, heads: int, vocab: int, **keys: Any) -> Model:
    width = keys.pop("width")
    experts, chosen = keys.pop("experts")
    moe = {"num_experts": experts, "router_topk": chosen, "ffn_hidden_size": width}
    moe |= keys.pop("more", {})
    return shape(family, layers, hidden, heads, 4096, vocab_size=vocab, moe=moe, **keys)


def gpt_oss(layers: int, experts: int) -> Model:
    return published(
        "gpt-oss",
        layers,
        2880,
        64,
        201088,
        num_query_groups=8,
        kv_channels=64,
        sliding_window=128,
        experts=(experts, 4),
        width=2880,
    )


LATENTS = {
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_head_dim": 128,
    "qk_pos_emb_head_dim": 64,
    "v_head_dim": 128,
}
# Model, all parameters, those that a token meets, the same without the embedding of the input.
# DeepSeek-V3's counts have the biases that only choose, 256 in each of 58 layers.
PUBLISHED: dict[str, tuple[Model, int, int, int]] = {
    "Mixtral 8x7B": (
        published("mixtral", 32, 4096, 32, 32000, num_query_groups=8, experts=(8, 2), width=14336),
        46_702_792_704,
        12_879_925_248,
        12_748_853_248,
    ),
    "Mixtral 8x22B": (
        published("mixtral", 56, 6144, 48, 32768, num_query_groups=8, experts=(8, 2), width=16384),
        140_630_071_296,
        39_161_468_928,
        38_960_142_336,
    ),
    "Qwen3-30B-A3B": (
        published(
            "qwen3-moe",
            48,
            2048,
            32,
            151936,
            num_query_groups=4,
            kv_channels=128,
            experts=(128, 8),
            width=768,
        ),
        30_532_122_624,
        3_353_032_704,
        3_041_867_776,
    ),
    "Qwen3-235B-A22B": (
        published(
            "qwen3-moe",
            94,
            4096,
            64,
            151936,
            num_query_groups=4,
            kv_channels=128,
            experts=(128, 8),
            width=1536,
        ),
        235_093_634_560,
        22_190_763_520,
        21_568_433_664,
    ),
    "OLMoE-1B-7B": (
        published("olmoe", 16, 2048, 16, 50304, experts=(64, 8), width=1024),
        6_919_161_856,
        1_282_017_280,
        1_178_994_688,
    ),
    "DeepSeek-V3": (
        published(
            "deepseek-v3",
            61,
            7168,
            128,
            129280,
            ffn_hidden_size=18432,
            mla=LATENTS,
            experts=(256, 8),
            width=2048,
            more={
                "first_dense_layers": 3,
                "shared_expert_intermediate_size": 2048,
                "router_num_groups": 8,
                "router_group_topk": 4,
            },
        ),
        671_026_419_200,
        37_552_297_472,
        36_625_618_432,
    ),
    "gpt-oss-20b": (gpt_oss(24, 32), 20_914_757_184, 4_187_440_704, 3_608_307_264),
    "gpt-oss-120b": (gpt_oss(36, 128), 116_829_156_672, 5_711_982_912, 5_132_849_472),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_counts(name: str) -> None:
    model, count, active, without_embedding = PUBLISHED[name]
    assert model.vocab_size is not None
    vocab = model.vocab_size
    built = build_on_meta(model, vocab)
    biases = sum(b.numel() for name, b in built.named_buffers() if name.endswith("expert_bias"))
    assert biases == (14_848 if name == "DeepSeek-V3" else 0)
    assert parameters_of(model, vocab) + biases == count
    assert sum(p.numel() for p in built.parameters()) + biases == count
    assert active_parameters_of(model, vocab) + biases == active
    assert active_parameters_of(model, vocab, embedding=False) + biases == without_embedding


def test_a_dense_model_is_active_as_a_whole() -> None:
    model = shape("llama", untie_embeddings_and_output_weights=False)
    count = parameters_of(model, 16)
    assert active_parameters_of(model, 16) == count
    # a tied head is the embedding
    assert active_parameters_of(model, 16, embedding=False) == count


@st.composite
def sparse_shapes(draw: st.DrawFn) -> Model:
    """Any small shape with experts, with every option that changes a count."""
    experts = draw(st.integers(2, 6))
    layers = draw(st.integers(1, 3))
    moe = {
        "num_experts": experts,
        "router_topk": draw(st.integers(min(2, experts), experts)),
        "ffn_hidden_size": draw(st.integers(1, 20)),
        "first_dense_layers": draw(st.integers(0, layers - 1)),
        "shared_expert_intermediate_size": draw(st.none() | st.integers(1, 20)),
    }
    groups, share = draw(st.integers(1, 2)), draw(st.integers(1, 2))
    family = draw(st.sampled_from(["mixtral", "olmoe", "qwen3-moe", "gpt-oss", "deepseek-v3"]))
    attention: dict[str, Any] = {
        "num_query_groups": groups,
        "kv_channels": draw(st.sampled_from([4, 8])),
    }
    if family == "gpt-oss":
        attention["sliding_window"] = 2
    if family == "deepseek-v3":
        still, turning = draw(st.integers(1, 6)), 2 * draw(st.integers(1, 3))
        attention = {
            "mla": {
                "q_lora_rank": draw(st.none() | st.integers(1, 20)),
                "kv_lora_rank": draw(st.integers(1, 20)),
                "qk_head_dim": still,
                "qk_pos_emb_head_dim": turning,
                "v_head_dim": draw(st.integers(1, still + turning)),
            }
        }
    return shape(
        family,
        layers,
        draw(st.integers(1, 5)) * 8 * groups * share,
        groups * share,
        draw(st.integers(2, 9)),
        **attention,
        ffn_hidden_size=draw(st.integers(1, 30)),
        untie_embeddings_and_output_weights=draw(st.booleans()),
        moe=moe,
    )


@settings(deadline=None, max_examples=40)
@given(model=sparse_shapes(), vocab=st.integers(2, 70), ranks=st.integers(1, 9))
def test_parameters_are_those_of_the_model_that_is_built(
    model: Model, vocab: int, ranks: int
) -> None:
    """One by one too, with the names, shapes and shards that the trainer gives them."""
    built = dict(build_on_meta(model, vocab).named_parameters())
    units = chunk_units(model, vocab)
    count = sum(p.numel() for p in built.values())
    assert numbers(units) == parameters_of(model, vocab) == count
    place = Place(rank=0, data=ranks, expert_rank=0, expert_data=ranks)
    assert shard(units, place) == sum(p.chunk(ranks)[0].numel() for p in built.values())
    matrices = block_matrices(model)
    of_blocks = {
        name.split(".", 2)[2]: tuple(p.shape)
        for name, p in built.items()
        if name.startswith("layers.") and p.dim() == 2
    }
    assert {name: (w.rows, w.columns) for name, w in matrices.items()} == of_blocks
    assert all(sum(w.matrix_rows) == w.rows for w in matrices.values())


@pytest.mark.parametrize("family", ["deepseek", "gpt-oss"])
def test_parameters_of_a_rank_are_those_that_the_trainer_cuts(family: str) -> None:
    """Two tensor-parallel ranks, each of which has a half of the experts, or of all of them."""
    model = MODELS[family]
    assert model.moe is not None
    alone = model.moe.model_copy(update={"shared_expert_intermediate_size": None})
    model = model.model_copy(update={"moe": alone})
    for rank in range(2):
        for split in (1, 2):
            built = build_on_meta(model, 61)
            tensor_parallel.apply(built, 61, TensorGroup(2, rank, sequence=True))
            group = ExpertGroup(2 // split, split, rank)
            expert_parallel.apply(built, group, TensorGroup(2, rank, sequence=True))
            place = Place(2, rank, expert=2 // split, expert_tensor=split, expert_rank=rank % split)
            count = sum(p.numel() for p in built.parameters())
            assert numbers(chunk_units(model, 61), place) == count


def test_matrices_of_experts() -> None:
    """By which Muon takes a stack apart; the second of an expert is stored (in, out)."""
    model = shape("mixtral", moe={**MOE, "shared_expert_intermediate_size": 40})
    stacks = {
        "mlp.experts.gate_up.weight": (8 * 48, [(24, 24)] * 8),
        "mlp.experts.down.weight": (8 * 24, [(24,)] * 8),
        "mlp.shared_expert.gate_up.weight": (80, [(40, 40)]),
        "mlp.router.weight": (8, [(8,)]),
    }
    for name, (rows, parts) in stacks.items():
        items = items_of(f"layers.0.{name}", (rows, model.hidden_size), model)
        assert [item.parts for item in items] == parts
        assert sum(item.rows for item in items) == rows
    transposed = {name for name, w in block_matrices(model).items() if w.transposed}
    assert transposed == {"mlp.experts.down.weight"}


PRODUCTS = {"aten.mm", "aten.bmm", "aten.addmm"}


@pytest.mark.parametrize("mode", ["none", "full", "selective"])
@pytest.mark.parametrize("shared", [None, 40])
def test_flops_are_those_that_torch_counts(mode: str, shared: int | None) -> None:
    """Of all products but attention's, which torch does not count on CPUs."""
    moe = {**MOE, "first_dense_layers": 1, "shared_expert_intermediate_size": shared}
    keys = {"ffn_hidden_size": 48, "make_vocab_size_divisible_by": 1}
    model = shape("qwen3-moe", 3, 32, 4, 8, moe=moe, **keys)
    training = Training.model_validate({"train_iters": 1, "lr": 1.0, "recompute_granularity": mode})
    module = Transformer(model, 50)
    wrap_blocks(module, model, training)
    tokens = torch.randint(50, (2, 8))
    with FlopCounterMode(display=False) as counter:
        module(tokens).sum().backward()
    counts = counter.get_flop_counts()["Global"]
    found = sum(flops for name, flops in counts.items() if str(name) in PRODUCTS)
    attention = (4 if mode == "full" else 3) * 3 * 2 * 32 * 8
    expected = hardware_flops_per_token_of(model, 50, training) - attention
    assert found == expected * 16
    # by hand: 4 H^2 of attention, one dense layer, two with router, two experts, the shared one
    mlps = 3 * 32 * 48 + 2 * (8 * 32 + 3 * 32 * (2 * 24 + (shared or 0)))
    products = 3 * 2 * (3 * 4 * 32 * 32 + mlps + 32 * 50)
    assert model_flops_per_token_of(model, 50) == products + 3 * 3 * 2 * 32 * 8


def sparse_job(ranks: int = 8, *, moe: dict[str, Any] | None = None, **keys: Any) -> Job:
    """Of a model with experts; `keys` of `job_of`."""
    model = keys.pop("model", None)
    if model is None:
        model = shape("mixtral", 2, 64, 4, 64, vocab_size=512, moe={**MOE, **(moe or {})})
    return job_of(model, ranks, **{"device": BIG, "precision": "bf16", **keys})


def degrees(
    tensor: int = 1, expert: int = 1, split: int | None = None, **more: Any
) -> dict[str, Any]:
    return {
        "tensor_model_parallel_size": tensor,
        "expert_model_parallel_size": expert,
        "expert_tensor_parallel_size": split,
        **more,
    }


def objections(job: Job) -> list[tuple[str, tuple[Change, ...]]]:
    return [(found.code, found.changes) for found in make_plan(job).objections]


REFUSED: list[tuple[dict[str, Any], str, tuple[Change, ...]]] = [
    ({"parallelism": degrees(expert=3)}, "experts-not-divisible", ({EP: 2}, {EP: 4})),
    ({"parallelism": degrees(2, 8)}, "expert-ranks-not-divisible", ({EP: 4}, {ETP: 1})),
    ({"ranks": 2, "parallelism": degrees(1, 4)}, "expert-ranks-not-divisible", ({EP: 2},)),
    (
        {"parallelism": degrees(expert=4, data_parallel_replicate_size=4, zero_stage=1)},
        "expert-copies-not-divisible",
        ({REPLICAS: 2}, {EP: 2}),
    ),
    (
        {"moe": {"ffn_hidden_size": 3}, "parallelism": degrees(4, 2)},
        "expert-too-narrow",
        ({ETP: 1},),
    ),
    (
        {"compile": True, "recompute_granularity": "selective"},
        "compiled-selective-experts",
        (
            {"training.recompute_granularity": "full"},
            {"training.recompute_granularity": "none"},
            {"training.compile": False},
        ),
    ),
    (
        {"model": shape("llama", 2, 64, 4, 64), "parallelism": degrees(expert=2)},
        "no-experts",
        ({EP: 1},),
    ),
    (
        {"model": shape("llama", 2, 64, 4, 64), "parallelism": degrees(2, split=2)},
        "no-experts",
        ({ETP: 1},),
    ),
    (
        {
            "model": shape("mixtral", 2, 64, 4, 62, moe=MOE),
            "parallelism": degrees(4),
        },
        "sequence-not-divisible",
        ({TP: 2},),
    ),
]


@pytest.mark.parametrize(("keys", "code", "changes"), REFUSED)
def test_layouts_that_cannot_be(
    keys: dict[str, Any], code: str, changes: tuple[Change, ...]
) -> None:
    job = sparse_job(**keys)
    assert objections(job) == [(code, changes)]
    for change in changes:
        assert make_plan(with_change(job, change)).feasible


@pytest.mark.parametrize(
    "parallelism",
    [
        degrees(expert=8),
        degrees(2, 2),
        degrees(2, 8, 1),
        degrees(1, 2, 4),
        degrees(5, 1, split=1, zero_stage=0),
        degrees(expert=2, data_parallel_replicate_size=2, zero_stage=2),
        degrees(expert=2, data_parallel_replicate_size=8, zero_stage=1),
    ],
)
def test_layouts_that_can_be(parallelism: dict[str, Any]) -> None:
    ranks = 5 if parallelism["tensor_model_parallel_size"] == 5 else 8
    model = shape("mixtral", 2, 80, 5, 60, vocab_size=512, moe=MOE) if ranks == 5 else None
    assert objections(sparse_job(ranks, model=model, parallelism=parallelism)) == []


@pytest.mark.parametrize(("zero", "split"), [(0, None), (1, None), (1, 1), (2, None), (3, None)])
def test_each_rank_holds_its_experts_and_a_shard_of_them(zero: int, split: int | None) -> None:
    """Weights at rest are 4 bytes a parameter; experts shard over the ranks of a stage that hold
    the same ones, all else over data-parallel ranks."""
    parallelism = degrees(2, 2, split, zero_stage=zero)
    job = sparse_job(parallelism=parallelism)
    plan = make_plan(job)
    assert plan.memory and plan.parameters
    experts = 2 * 8 * 3 * 64 * 24
    whole = 2 * 8 * 64 + 5 * 64  # routers and norms lie on all tensor-parallel ranks
    dense = (plan.parameters - experts - whole) // 2 + whole
    ranks = 2 * (split or 2)
    copies = 1 if zero == 0 else 8 // ranks
    data = 1 if zero == 0 else 4
    assert degrees_of(job).expert_copies[1] == copies
    rank = plan.memory.fullest
    assert rank.parameter_bytes == 4 * (dense // data + experts // ranks // copies)
    assert rank.optimizer_bytes == 2 * rank.parameter_bytes
    assert rank.gathered_bytes == 2 * (dense + experts // ranks)  # of two layers: all


def test_two_layers_are_gathered_with_their_experts() -> None:
    moe = {**MOE, "first_dense_layers": 3}
    model = shape("mixtral", 6, 64, 4, 64, vocab_size=512, ffn_hidden_size=16, moe=moe)
    job = sparse_job(model=model, parallelism=degrees(expert=4, zero_stage=3))
    plan = make_plan(job)
    assert plan.memory
    layer = 4 * 64 * 64 + 8 * 64 + 2 * 64 + 2 * 3 * 64 * 24
    assert plan.memory.fullest.gathered_bytes == 2 * (2 * layer + 2 * 512 * 64 + 64)


@pytest.mark.parametrize("mode", ["none", "selective"])
def test_rows_of_the_fullest_rank(mode: str) -> None:
    """What experts keep grows by the factor of uneven loads, and with it what comes from other
    ranks; what is not of experts stays."""
    alone, apart = (
        sparse_job(recompute_granularity=mode, parallelism=degrees(expert=n)) for n in (1, 4)
    )
    found = [saved_bytes(job, layout_of(job), NATIVE, 0) for job in (alone, apart)]
    rows = 2 * 64 * 2  # two choices of 64 tokens in two layers
    if mode == "none":  # rows as experts read them, gate, value and product
        more = (FULLEST - 1) * 2 * (64 + 3 * 24)
    else:  # gate and value; besides results what came and what came back
        more = (FULLEST - 1) * 2 * (64 + 2 * 24) + 2 * 64 * (FULLEST + 1)
    assert found[1] - found[0] == pytest.approx(rows * more)
    assert passing_bytes(alone, layout_of(alone)) == 64 * 2 * 64 * 4
    assert passing_bytes(apart, layout_of(apart)) == 64 * 2 * 64 * 2 * (1 + FULLEST)


@pytest.mark.parametrize(("factor", "most"), [(1.0, 1.0), (3.0, FULLEST)])
def test_a_capacity_bounds_rows(factor: float, most: float) -> None:
    moe = {"expert_capacity_factor": factor}
    job = sparse_job(moe=moe, parallelism=degrees(expert=8))
    assert passing_bytes(job, layout_of(job)) == 64 * 2 * 64 * 2 * (1 + most)
    (note,) = (note for note in make_plan(job).notes if note.code == "expert-loads")
    assert f"memory counts {most:g} times" in note.message
    assert f"at worst it is {factor:g} times" in note.message


def test_the_plan_says_what_is_active_and_assumed() -> None:
    plan = make_plan(sparse_job(parallelism=degrees(expert=8)))
    assert plan.to_json()["active_parameters"] == plan.active_parameters
    assert plan.parameters and plan.active_parameters
    assert plan.parameters - plan.active_parameters == 2 * 6 * 3 * 64 * 24
    (note,) = (note for note in plan.notes if note.code == "expert-loads")
    assert "at worst it is 4 times" in note.message  # of two choices a rank has one expert
    dense = make_plan(job_of(device=BIG))
    assert "active_parameters" not in dense.to_json()
    assert "expert-loads" not in [each.code for each in dense.notes]


def terms(**keys: Any) -> dict[str, float]:
    model = PUBLISHED["Qwen3-30B-A3B"][0]
    given = {"nodes": 4, "cluster": {"network_gb_per_second": 400.0}, "global_batch_size": 32}
    job = sparse_job(model=model, **{"device": H100, **given, **keys})
    estimate = estimate_step(job, NATIVE, 151936)
    assert estimate is not None
    return dict(estimate.time.terms)


def test_what_is_sent_to_experts() -> None:
    """T k H b (EP - 1) / EP there and back, forward and backward, and once more where forward is
    computed again: over links in a node, over the network beyond it."""
    nothing, half, node, far = (
        terms(parallelism=degrees(expert=n))["experts"] for n in (1, 2, 8, 32)
    )
    assert nothing == 0.0
    reached, exchanges = fitted(), 48 * 2 * 2
    size, links = 4096 * 8 * 2048 * 2, devices()["h100"]["link"] * 1e9 * reached["link"]
    for found, part in ((half, 1 / 2), (node, 7 / 8)):
        seconds = part * size / links + reached["link_latency"]
        assert found == pytest.approx(exchanges * seconds * reached["exchange"])
    assert far > 2 * node
    again = terms(parallelism=degrees(expert=8), recompute_granularity="full")["experts"]
    assert again == pytest.approx(1.5 * node)
    # a row goes to both halves of an expert, a rank routes half of the tokens
    whole, halves = (terms(parallelism=degrees(2, 4, split))["experts"] for split in (1, 2))
    assert halves > 1.5 * whole


def test_gradients_of_experts_are_summed_over_their_copies() -> None:
    few, many = (
        terms(parallelism=degrees(expert=n, zero_stage=1))["data-parallel"] for n in (8, 1)
    )
    assert few < many
    gathered = [terms(parallelism=degrees(expert=n, zero_stage=3))["sharding"] for n in (1, 8, 32)]
    assert gathered == sorted(gathered, reverse=True) and gathered[0] > gathered[2]


def search(job: Job) -> Search:
    return Searcher(job, NATIVE, 512).search([job.nodes])


def test_layouts_of_experts_are_searched() -> None:
    job = sparse_job(4, device=H100, global_batch_size=16)
    found = search(job)
    assert found.ranked and found.considered == sum(found.refused.values()) + len(found.ranked)
    for each in found.ranked:
        plan: Plan | None = each.plan
        assert plan and plan.feasible and f"EP {each.change[EP]}" in describe(each.change)
        assert each.seconds == pytest.approx(make_plan(each.job, 512).duration.step_seconds)  # type: ignore[union-attr]
    best = found.ranked[0]
    for expert in (1, 2, 4):
        for split in {1, int(best.change[TP])}:
            other = {**best.change, EP: expert, ETP: split}
            other.pop("nodes")
            tried = with_change(best.job, other)
            if not objections(tried):
                estimate = estimate_step(tried, NATIVE, 512)
                assert estimate and estimate.time.seconds >= best.seconds * 0.999


def test_a_search_of_a_dense_model_names_no_experts() -> None:
    job = job_of(shape("llama", 2, 64, 4, 64), 2, device=BIG, precision="bf16", global_batch_size=2)
    for each in search(job).ranked:
        assert EP not in each.change and "EP" not in describe(each.change)


def test_layers_are_planned_by_kind() -> None:
    """However many there are; they come to what listing each comes to."""
    model, vocab = PUBLISHED["DeepSeek-V3"][0], 129280
    units = chunk_units(model.model_copy(update={"num_layers": 10_000}), vocab)
    # a block without experts, one with, its experts, and what is around them
    assert len(units) > 10_000 and len({id(unit) for unit in units}) == 4
    small = model.model_copy(update={"num_layers": 5})
    each = [unit for layer in range(5) for unit in block_units(small, sparse=layer >= 3)]
    around = outer_unit(small, vocab, first=True, last=True)
    assert numbers(chunk_units(small, vocab)) == numbers([*each, around])
