"""Experts, latents and context parallelism in Megatron-LM's words, and back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tomli

from tests.engines.megatron_lm.test_argv import CORE, JOBS, argv_of, refusals, tiny
from trainkit.engines.megatron_lm.argv import RunPlaces, megatron_argv
from trainkit.engines.megatron_lm.data import MegatronData
from trainkit.engines.megatron_lm.import_script import import_megatron
from trainkit.engines.options import load_table
from trainkit.engines.registry import ENGINES
from trainkit.jobs.job_tables import Parallelism
from trainkit.jobs.schema import Job
from trainkit.plan.planner import make_plan

SETS = ("engine=megatron-lm", "training.compile=false", "parallelism.zero_stage=1")
SCALED = ("model.output_layer_init_method=scaled",)
YARN = (
    "model.rope_scaling={type='yarn',factor=40.0,original_max_position_embeddings=4096,"
    "mscale=1.0,mscale_all_dim=1.0}"
)


def big(name: str, *sets: str) -> Job:
    return JOBS.resolve(name, [*SETS, *SCALED, *sets]).job


GPUS = ("cluster.device=h100-sxm-80gb", "cluster.gpus_per_node=4")


def small(*moe: str, family: str = "mixtral", sets: tuple[str, ...] = GPUS) -> Job:
    """Four experts, on GPUs unless `sets` leave them out."""
    sizes = ("num_experts=4", "router_topk=2", "ffn_hidden_size=96")
    table = ",".join((*sizes, *moe))
    return tiny(f"model.family={family}", f"model.moe={{{table}}}", *sets)


@pytest.mark.parametrize("version", CORE)
def test_experts_of_qwen3_on_gpus(version: str) -> None:
    words = argv_of(big("qwen3-30b-a3b", "parallelism.expert_model_parallel_size=8"), version)
    expected: dict[str, tuple[object, ...]] = {
        "--num-experts": (128.0,),
        "--moe-router-topk": (8.0,),
        "--moe-ffn-hidden-size": (768.0,),
        "--moe-router-load-balancing-type": ("aux_loss",),
        "--moe-aux-loss-coeff": (0.001,),
        "--moe-router-dtype": ("fp32",),
        "--moe-token-dispatcher-type": ("alltoall",),
        "--moe-grouped-gemm": (),
        "--expert-model-parallel-size": (8.0,),
        "--qk-layernorm": (),
    }
    assert {name: words[name] for name in expected} == expected
    for other in ("pre-softmax", "enable-expert-bias", "score-function", "topk-scaling-factor"):
        assert f"--moe-router-{other}" not in words
    assert "--moe-layer-freq" not in words and "--moe-z-loss-coeff" not in words


@pytest.mark.parametrize("version", [each for each in CORE if "0.12" not in each])
def test_deepseek_v3(version: str) -> None:
    words = argv_of(big("deepseek-v3", YARN), version)
    expected: dict[str, tuple[object, ...]] = {
        "--multi-latent-attention": (),
        "--q-lora-rank": (1536.0,),
        "--kv-lora-rank": (512.0,),
        "--qk-head-dim": (128.0,),
        "--qk-pos-emb-head-dim": (64.0,),
        "--v-head-dim": (128.0,),
        "--qk-layernorm": (),
        "--rotary-scaling-factor": (40.0,),
        "--mscale": (1.0,),
        "--mscale-all-dim": (1.0,),
        "--moe-layer-freq": ("([0]*3+[1]*58)",),
        "--mtp-num-layers": (1.0,),
        "--mtp-loss-scaling-factor": (0.3,),
        "--ffn-hidden-size": (18432.0,),
        "--moe-ffn-hidden-size": (2048.0,),
        "--moe-shared-expert-intermediate-size": (2048.0,),
        "--moe-router-score-function": ("sigmoid",),
        "--moe-router-enable-expert-bias": (),
        "--moe-router-topk-scaling-factor": (2.5,),
        "--moe-router-num-groups": (8.0,),
        "--moe-router-group-topk": (4.0,),
        "--moe-router-load-balancing-type": ("seq_aux_loss",),
    }
    assert {name: words[name] for name in expected} == expected
    assert "--kv-channels" not in words and "--group-query-attention" not in words


def test_on_cpus_experts_are_one_by_one() -> None:
    words = argv_of(small("z_loss_coeff=0.5", sets=()), "core-0.12.0")
    assert words["--moe-z-loss-coeff"] == (0.5,)
    assert "--moe-grouped-gemm" not in words and "--moe-aux-loss-coeff" not in words


def test_a_word_of_the_job_is_its_own() -> None:
    own = {"moe-token-dispatcher-type": "allgather", "moe-router-dtype": "fp64"}
    words = argv_of(small().model_copy(update={"engine_args": own}))
    assert words["--moe-token-dispatcher-type"] == ("allgather",)
    assert words["--moe-router-dtype"] == ("fp64",)
    job = small().model_copy(update={"engine_args": {"moe-router-topk": 2}})
    (said,) = refusals(job, "core-0.16.1")
    assert "trainkit sets moe-router-topk itself" in said and "model.moe.router_topk" in said


def test_weights_that_do_not_sum_to_1() -> None:
    job = small("router_norm_topk_prob=false")
    assert argv_of(job)["--moe-router-pre-softmax"] == ()
    assert "--moe-router-pre-softmax" not in argv_of(small())


SIGMOID = "router_score_function='sigmoid'"
GROUPS = ("router_num_groups=2", "router_group_topk=1")
NO_BALANCE = "model.moe.aux_loss_coeff=0"
LINEAR = "model.rope_scaling={type='linear',factor=2}"
SPREAD = (*GPUS, "parallelism.expert_model_parallel_size=2")


@pytest.mark.parametrize(
    ("job", "version", "said"),
    [
        (small(), "2021", "Megatron-LM 2021 has no experts"),
        (small(sets=()), "core-0.16.1", "the router of Megatron-LM core-0.16.1 is Transformer"),
        (small(sets=()), "core-0.17.1", ""),
        (small(SIGMOID, "router_norm_topk_prob=false"), "core-0.19.0", "these weights sum to 1"),
        (small(*GROUPS), "core-0.16.1", "judges groups by sums of logits"),
        (small(*GROUPS, "router_pre_softmax=false"), "core-0.16.1", ""),
        (small(SIGMOID, *GROUPS, "aux_loss_coeff=0.1"), "core-0.12.0", "that these choose"),
        (small(SIGMOID, *GROUPS, "aux_loss_coeff=0.1"), "core-0.13.0", ""),
        (small("expert_capacity_factor=1.5"), "core-0.19.0", "each layout drops others"),
        (
            small("aux_loss_coeff=0.1", 'router_load_balancing_type="global_aux_loss"'),
            "core-0.19.0",
            "not the step before",
        ),
        (
            small(sets=(*SPREAD, "training.precision=fp16")),
            "core-0.15.0",
            "in bf16 and fp32 alone",
        ),
        (small(sets=(*SPREAD, "training.precision=fp16")), "core-0.16.1", ""),
        (big("olmoe-1b-7b"), "core-0.19.0", "model.qk_norm = 'projection'"),
        (big("deepseek-v3"), "core-0.12.0", "that these choose"),
        (big("deepseek-v3", "model.layernorm_epsilon=1e-5"), "core-0.16.1", "latents' norms"),
        (
            big("deepseek-v3", YARN.replace("4096", "8192")),
            "core-0.16.1",
            "original_max_position_embeddings 8192",
        ),
        (
            big("deepseek-v3", YARN.replace("mscale=1.0", "mscale=0.5"), NO_BALANCE),
            "core-0.13.0",
            "scales scores by mscale",
        ),
        (big("deepseek-v3", LINEAR), "core-0.16.1", "'yarn'"),
    ],
)  # fmt: skip
def test_what_a_version_cannot_do_is_one_sentence(job: Job, version: str, said: str) -> None:
    found = [each for each in refusals(job, version) if "2021" not in version or "moe" in each]
    if not said:
        assert found == []
        return
    assert len(found) == 1 and said in found[0], found


def test_a_family_with_sinks_is_refused() -> None:
    job = big("qwen3-30b-a3b", "model=gpt-oss-20b")
    found = [each.message for each in ENGINES["megatron-lm"].problems(job)]
    assert any("megatron-lm has no sliding_window = 128" in said for said in found)


def tokens_dealt(*sets: str) -> Job:
    return big("qwen3-30b-a3b", *sets)


def test_context_parallelism_is_said() -> None:
    job = tokens_dealt("parallelism.context_parallel_size=2", "parallelism.cp_comm_type=a2a")
    words = argv_of(job, "core-0.16.1")
    assert words["--context-parallel-size"] == (2.0,)
    assert words["--cp-comm-type"] == ("a2a",)


def objections(job: Job) -> dict[str, str]:
    plan = make_plan(job, rules=ENGINES["megatron-lm"].rules)
    return {each.code: each.message for each in plan.objections}


TENSOR = "parallelism.tensor_model_parallel_size=2"
CONTEXT = "parallelism.context_parallel_size=2"


@pytest.mark.parametrize(
    ("job", "code"),
    [
        (small(sets=(*GPUS, TENSOR)), "experts-without-sequence-parallelism"),
        (small(sets=(*GPUS, TENSOR, "parallelism.sequence_parallel=true")), ""),
        (small(sets=(TENSOR,)), "experts-without-sequence-parallelism"),
        (
            small(sets=(*GPUS, "parallelism.expert_tensor_parallel_size=2",
                        "model.moe.ffn_hidden_size=97")),
            "expert-not-divisible",
        ),
        (small(sets=(*GPUS, "parallelism.expert_model_parallel_size=3")), "experts-not-divisible"),
        (small(sets=(*GPUS, "parallelism.expert_model_parallel_size=2")), ""),
        (tiny(CONTEXT), "no-context-parallelism"),
        (tiny(*GPUS, CONTEXT), ""),
        (tiny(*GPUS, CONTEXT, "parallelism.cp_comm_type=a2a"), ""),
        (
            small(sets=(*GPUS, CONTEXT, "parallelism.cp_comm_type=a2a",
                        "model.num_query_groups=1")),
            "groups-not-dealt",
        ),
    ],
)  # fmt: skip
def test_layouts(job: Job, code: str) -> None:
    assert list(objections(job)) == ([code] if code else [])


def imported(words: str, version: str) -> tuple[dict[str, Any], tuple[str, ...]]:
    found = import_megatron(words, "x", load_table("megatron-lm", version))
    return tomli.loads(found.to_toml()), found.not_taken


ROUTES = {
    "qwen3": big("qwen3-30b-a3b", "parallelism.expert_model_parallel_size=8",
                 "parallelism.expert_tensor_parallel_size=1"),
    "deepseek": big("deepseek-v3", YARN),
    "context": big("qwen3-30b-a3b", CONTEXT, "parallelism.cp_comm_type=a2a"),
    "mixtral": small("router_norm_topk_prob=false", "first_dense_layers=1", "z_loss_coeff=0.5",
                     "shared_expert_intermediate_size=32", "router_topk_scaling_factor=1.5"),
    "sigmoid": small(SIGMOID, "router_enable_expert_bias=true", "router_bias_update_rate=0.5",
                     "router_load_balancing_type='seq_aux_loss'", "aux_loss_coeff=0.1"),
    "groups": small(*GROUPS, "router_pre_softmax=false"),
}  # fmt: skip


@pytest.mark.parametrize("name", ROUTES)
@pytest.mark.parametrize("version", ["core-0.13.0", "core-0.16.1", "core-0.19.0"])
def test_words_are_read_back_as_the_same_keys(version: str, name: str) -> None:
    job = ROUTES[name]
    data = MegatronData({}, None, mock=True)
    places = RunPlaces(Path("/fs/runs/j/r"), "j-r")
    words = megatron_argv(job, load_table("megatron-lm", version), data, places)
    tables, not_taken = imported(f"torchrun pretrain_gpt.py {' '.join(map(repr, words))}", version)
    model = job.model.model_validate({"name": job.model.name, **tables["models"]["x"]})
    for key in ("family", "moe", "mla", "rope_scaling", "query_groups", "head_size", "theta"):
        assert getattr(model, key) == getattr(job.model, key), key
    assert model.routing == job.model.routing
    parallelism = Parallelism.model_validate(tables["jobs"]["x"]["parallelism"])
    assert parallelism == job.parallelism
    assert not any("moe" in line or "expert" in line or "latent" in line for line in not_taken)


SCRIPT = (
    "pretrain_gpt.py --num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 64"
    " --ffn-hidden-size 96 --swiglu --disable-bias-linear --normalization RMSNorm"
    " --position-embedding-type rope --num-experts 8"
)


@pytest.mark.parametrize(
    ("more", "moe", "said"),
    [
        ("", {}, "no --moe-router-dtype"),
        ("--moe-router-dtype fp32 --moe-layer-freq 1", {}, ""),
        ("--moe-router-dtype fp32 --moe-layer-freq [0,1,1,1]", {"first_dense_layers": 1}, ""),
        ("--moe-router-dtype fp32 --moe-layer-freq 2", {}, "--moe-layer-freq 2: here the first"),
        ("--moe-router-dtype fp32 --moe-layer-freq ([0]*2)*2", {}, "--moe-layer-freq"),
        ("--moe-router-dtype fp32 --moe-aux-loss-coeff 0.1", {"aux_loss_coeff": 0.1}, ""),
        (
            "--moe-router-dtype fp32 --moe-router-load-balancing-type none --moe-aux-loss-coeff 1",
            {},
            "",
        ),
        (
            "--moe-router-dtype fp32 --moe-router-load-balancing-type sinkhorn",
            {},
            "--moe-router-load-balancing-type sinkhorn",
        ),
        (
            "--moe-router-dtype fp32 --moe-router-load-balancing-type aux_loss seq_aux_loss"
            " --moe-aux-loss-coeff 0.1 0.2",
            {},
            "there is no loss of balance",
        ),
    ],
)
def test_scripts_of_others(more: str, moe: dict[str, object], said: str) -> None:
    tables, not_taken = imported(f"{SCRIPT} {more}", "core-0.16.1")
    model = tables["models"]["x"]
    assert model["family"] == "mixtral" and model["rotary_base"] == 10000.0
    usual = {"num_experts": 8, "router_topk": 2, "ffn_hidden_size": 96}
    found = {
        key: value for key, value in model["moe"].items() if key != "router_load_balancing_type"
    }
    assert found == {**usual, **moe}
    lines = [line for line in not_taken if "moe" in line]
    assert [said in line for line in lines] == [True] * bool(said), lines
