"""The words for real trees of Megatron-LM are taken by their own parsers and checks.

Skipped where none is named: tests/engines/real.py says how.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.engines.megatron_lm.test_argv import JOBS, tiny
from tests.engines.megatron_lm.test_megatron_experts import NO_BALANCE, YARN, big
from tests.engines.real import RealEngine, parameters
from trainkit.engines.extract_options import read_tree
from trainkit.engines.megatron_lm.argv import RunPlaces, megatron_argv
from trainkit.engines.megatron_lm.data import MegatronData
from trainkit.engines.options import dump_table, load_table, parse_table
from trainkit.engines.registry import foreign_engine
from trainkit.jobs.schema import Job

PARSER = Path(__file__).parent / "megatron_parse.py"
TREES = parameters("megatron-lm")
# loaded by the tree's own interpreter, which takes seconds
pytestmark = pytest.mark.slow
Parsed = dict[str, Any]


def parsed_by(real: RealEngine, jobs: list[Job]) -> list[Parsed]:
    """What the tree's own parser makes of the words for each job, as on a resume."""
    table = load_table("megatron-lm", foreign_engine("megatron-lm").version_of_tree(real.tree))
    cases = []
    for job in jobs:
        data = MegatronData({"train": (), "valid": (), "test": ()}, "9,1,0")
        if job.dataset.source == "mock":
            data = MegatronData({}, None, mock=True)
        places = RunPlaces(Path("/fs/runs/j/r"), "j-r", load=True)
        words = megatron_argv(job, table, data, places)
        cases.append({"world": job.world_size, "words": words})
    done = subprocess.run(
        [real.python, str(PARSER), str(real.tree)],
        input=json.dumps(cases),
        env={**os.environ, **real.environment, "CUDA_DEVICE_MAX_CONNECTIONS": "1", "RANK": "0"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    lines = [line for line in done.stdout.splitlines() if line.startswith("PARSED ")]
    assert len(lines) == len(jobs)
    return [json.loads(line.removeprefix("PARSED ")) for line in lines]


def check_reference(job: Job, found: Parsed) -> None:
    model = job.model
    assert found["num_layers"] == model.num_layers
    assert found["ffn_hidden_size"] == 4 * model.hidden_size
    assert found["kv_channels"] == model.head_size
    assert found["attention_dropout"] == found["hidden_dropout"] == 0.1
    assert found["data_parallel_size"] == 1
    assert found["fp16"] is True
    assert found["lr"] == job.training.lr and found["min_lr"] == job.training.min_lr
    assert found["adam_beta2"] == job.training.adam_beta2
    assert found["seed"] == 1234
    assert found["initial_loss_scale"] == 2**32
    assert found["make_vocab_size_divisible_by"] == 128
    assert found["save"] == found["load"] == "/fs/runs/j/r/checkpoints"


@pytest.mark.parametrize("real", TREES)
def test_its_own_parser_takes_the_words(real: RealEngine) -> None:
    """On 2021: one of Jean Zay's. Since core: Azure's, a Llama, and a small one on CPUs."""
    if foreign_engine("megatron-lm").version_of_tree(real.tree) == "2021":
        job = JOBS.resolve("jean-zay-7-5b").job
        (found,) = parsed_by(real, [job])
        check_reference(job, found)
        assert found["checkpoint_activations"] is True
        return
    azure = JOBS.resolve("azure-gpt3-175b").job
    azure = azure.model_copy(update={"engine_args": {"ckpt-format": "torch_dist"}})
    llama = JOBS.resolve(
        "llama-8b", ["engine=megatron-lm", "training.compile=false", "parallelism.zero_stage=1"]
    ).job
    small = tiny("model.gelu=exact", "training.recompute_granularity=full")
    big, found, cpu = parsed_by(real, [azure, llama, small])
    check_reference(azure, big)
    assert big["sequence_parallel"] is True
    assert big["use_distributed_optimizer"] is True
    assert big["ckpt_format"] == "torch_dist"
    assert big["exit_signal_handler"] is True
    assert big["override_opt_param_scheduler"] is True
    assert found["ffn_hidden_size"] == 14336
    assert found["num_query_groups"] == 8
    assert found["position_embedding_type"] == "rope"
    assert found["rotary_base"] == 500000
    assert found["normalization"] == "RMSNorm"
    for flag in ("swiglu", "untie_embeddings_and_output_weights", "bf16"):
        assert found[flag] is True
    assert found["add_bias_linear"] is False
    assert cpu["bias_gelu_fusion"] is False
    assert cpu["recompute_granularity"] == "full"
    assert cpu["recompute_method"] == "uniform"
    assert cpu["distributed_backend"] == "gloo"
    assert cpu["mock_data"] is True
    assert cpu["ckpt_format"] == "torch"
    assert cpu["transformer_impl"] == "local"
    assert (cpu["eval_interval"], cpu["save_interval"]) == (21, 10)


@pytest.mark.parametrize("real", TREES)
def test_its_own_parser_takes_experts(real: RealEngine) -> None:
    if foreign_engine("megatron-lm").version_of_tree(real.tree) == "2021":
        pytest.skip("2021 has no experts")
    grid = [
        f"parallelism.{key}={value}"
        for key, value in {
            "tensor_model_parallel_size": 4,
            "sequence_parallel": "true",
            "context_parallel_size": 2,
            "cp_comm_type": "a2a",
            "expert_model_parallel_size": 8,
            "expert_tensor_parallel_size": 1,
        }.items()
    ]
    qwen3, deepseek = parsed_by(
        real, [big("qwen3-30b-a3b", *grid), big("deepseek-v3", YARN, NO_BALANCE)]
    )
    assert (qwen3["num_experts"], qwen3["moe_router_topk"]) == (128, 8)
    assert (qwen3["expert_model_parallel_size"], qwen3["expert_tensor_parallel_size"]) == (8, 1)
    assert (qwen3["context_parallel_size"], qwen3["cp_comm_type"]) == (2, ["a2a"])
    assert qwen3["data_parallel_size"] == 4
    assert deepseek["moe_layer_freq"] == [0] * 3 + [1] * 58
    assert deepseek["multi_latent_attention"] is True and deepseek["qk_layernorm"] is True
    assert deepseek["rotary_scaling_factor"] == 40 and deepseek["kv_channels"] == 56


@pytest.mark.parametrize("real", TREES)
def test_a_tree_read_again_has_the_options_of_its_table(real: RealEngine) -> None:
    table = load_table("megatron-lm", foreign_engine("megatron-lm").version_of_tree(real.tree))
    read = read_tree(real.tree, table.version, table.commit)
    if table.notice:
        pytest.skip(table.notice)
    assert parse_table(dump_table(read)).options == table.options
