"""What a rank of another engine is told."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from trainkit.engines.foreign import EngineProgram, rank_command, spec_name, trait_problems
from trainkit.engines.rank.spec import RankSpec
from trainkit.engines.registry import ENGINES, PLACES, foreign_engine
from trainkit.jobs.load import load
from trainkit.jobs.schema import Model
from trainkit.plan.planner import make_plan
from trainkit.runs.folder import RunFolder

JOBS = load(Path(__file__).resolve().parents[2])


@pytest.mark.parametrize("name", ["azure-gpt3-175b", "jean-zay-7-5b"])
def test_flops_are_those_of_the_plan(name: str) -> None:
    """So that TFLOP/s and MFU of a run can be held against the plan's."""
    job = JOBS.resolve(name).job
    plan = make_plan(job, rules=ENGINES[job.engine].rules)
    program = EngineProgram(job.engine, "python3", Path("/fs/tree"), ("pretrain_gpt.py",))
    command = rank_command(job, RunFolder(Path("/fs/runs/j/r")), 1, program)
    spec = RankSpec.from_json(json.loads(command.files[spec_name(1)]))
    assert spec.model_flops == plan.model_flops_per_token
    assert spec.hardware_flops == plan.hardware_flops_per_token


@pytest.mark.parametrize("name", [n for n in PLACES if n not in ("native", "megatron-lm")])
def test_models_with_experts_are_refused(name: str) -> None:
    engine = foreign_engine(name)
    shape = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 2, "seq_length": 16}
    moe = {"num_experts": 4, "router_topk": 2, "ffn_hidden_size": 8}
    model = Model.model_validate({"name": "tiny", "family": "mixtral", **shape, "moe": moe})
    (problem,) = trait_problems(name, model, engine.traits)
    assert problem.message == f"models.tiny: {name} has no moe = True (family 'mixtral')"
