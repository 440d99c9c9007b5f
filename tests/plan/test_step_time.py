"""The time model: published steps, and that more speed or less work never takes longer."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.plan.example import BIG, gpu, job_of, shape
from trainkit.engines.registry import ENGINES
from trainkit.jobs.devices import built_in_device
from trainkit.jobs.load import load
from trainkit.jobs.schema import Job, Model, Training
from trainkit.plan.parameter_shapes import newton_schulz_flops
from trainkit.plan.planner import Plan, make_plan
from trainkit.plan.rules import float8_problem
from trainkit.plan.time.constants import devices, fitted, machine
from trainkit.plan.time.of_job import estimate_step
from trainkit.plan.time.setup import Hardware, RankSplit, Setup, Shape
from trainkit.plan.time.step import crossing_shares, step_time

ROOT = Path(__file__).resolve().parents[2]


ALONE = {"world": 8, "data": 1, "zero": 0, "shard": 1, "global_batch": 8}  # no copies


def a_machine(name: str = "a100-80", network: float = 100e9) -> Hardware:
    found = machine(name, network=network)
    assert found is not None
    return found


def bloom(**keys: object) -> Setup:
    """BLOOM-176B on 384 A100 as it was trained (bigscience, chronicles of 2022-02-28)."""
    model = Shape(70, 14336, 14336, 14336, 64, 57344, 1, 2048, 250880)
    split = RankSplit(
        384, 4, 12, 1, 8, 1, 1, 1, 8, False, "full", 2, 2048, stage_layers=6, last_layers=5
    )
    given = replace(split, **keys)  # type: ignore[arg-type]
    return Setup(model, given, a_machine(network=50e9), "megatron-2021")


def seconds(setup: Setup) -> float:
    return step_time(setup, fitted()).seconds


def test_bloom() -> None:
    """102.0 s a step with micro-batch 2, 121.6 with TP 8, which is slower."""
    assert seconds(bloom()) == pytest.approx(102.0, rel=0.1)
    wider = bloom(tensor=8, data=4, shard=4)
    assert seconds(bloom()) < seconds(wider) < 121.6 * 1.1


def test_matrices_that_muon_makes_orthogonal() -> None:
    """GPT-2 124M: q, k, v and out of 768 x 768, up and down of 768 x 3,072, five iterations of
    4 m m n + 2 m m m each. On more ranks than there are matrices one has a whole one."""
    keys: dict[str, Any] = {"micro_batch_size": 1, "train_iters": 1, "lr": 1e-3}
    model = Model(
        family="gpt", num_layers=12, hidden_size=768, num_attention_heads=12, seq_length=1
    )
    square = 5 * 6 * 768**3
    wide = 5 * (4 * 768 * 768 * 3072 + 2 * 768**3)
    flops = newton_schulz_flops(model, Training(optimizer="muon", **keys))
    assert sum(flops) == 12 * (4 * square + 2 * wide) and len(flops) == 12 * 4
    assert max(flops) == max(3 * square, wide)
    assert newton_schulz_flops(model, Training(**keys)) == []
    slower = bloom(update_flops=1e15)
    assert seconds(slower) > seconds(bloom()) + 1e15 / slower.machine.peak


SC21 = [  # layers, hidden, heads, TP, PP, GPUs, samples, TFLOP/s a GPU
    (36, 4096, 32, 4, 1, 128, 512, 142),
    (40, 6144, 48, 8, 1, 256, 1024, 135),
    (80, 12288, 96, 8, 8, 1536, 2304, 148),
    (128, 25600, 160, 8, 64, 3072, 3072, 163),
]


@pytest.mark.parametrize("row", SC21, ids=lambda row: str(row[1]))
def test_sc21(row: tuple[int, ...]) -> None:
    """Narayanan et al. 2021, table 1: achieved teraFLOP/s, as eq. 3 counts them; schedules and
    micro-batches are not in the table (1, without interleaving, here)."""
    layers, hidden, heads, tensor, pipeline, gpus, batch, teraflops = row
    model = Shape(layers, hidden, hidden, hidden, heads, 4 * hidden, 1, 2048, 51200)
    data = gpus // tensor // pipeline
    split = RankSplit(gpus, tensor, pipeline, 1, data, 1, 1, 0, 1, False, "full", 1, batch)
    found = seconds(Setup(model, split, a_machine(network=200e9), "megatron-2021"))
    flops = 96.0 * batch * 2048 * layers * hidden**2
    flops *= 1 + 2048 / (6 * hidden) + 51200 / (16 * layers * hidden)
    assert flops / found / gpus / 1e12 == pytest.approx(teraflops, rel=0.3)


def lambda_plan(nodes: int) -> Plan:
    sets = [f"nodes={nodes}", 'engine="gpt-neox"']
    job = load(ROOT, {}).resolve("gpt-neox-9b-lambda", sets).job
    return make_plan(job, rules=ENGINES["gpt-neox"].rules)


def test_the_third_node_of_lambda_gains_nothing() -> None:
    """6.381, 9.074 and 9.02 samples/s on 1, 2 and 3 nodes without InfiniBand."""
    speeds = [lambda_plan(nodes).duration for nodes in (1, 2, 3)]
    one, two, three = (found.speed.tokens_per_second for found in speeds if found)
    assert two / one == pytest.approx(9.074 / 6.381, abs=0.1)
    assert three / two == pytest.approx(9.02 / 9.074, abs=0.1)


def some_setups() -> list[Setup]:
    """Of every kind of trainer, on few and many nodes, with and without experts."""
    dense = Shape(32, 4096, 4096, 1024, 32, 14336, 2, 4096, 128256)
    experts = replace(dense, ffn=1024, experts=64, topk=6)
    found = []
    for software in ("megatron-2021", "megatron", "fsdp", "jax"):
        for tensor, pipeline, zero, context in ((1, 1, 3, 1), (4, 2, 1, 1), (2, 1, 1, 2)):
            data = 32 // (tensor * pipeline * context)
            shard = data * context
            split = RankSplit(
                32, tensor, pipeline, 1, data, context, 1, zero, shard, False, "full", 1, 128
            )
            found.append(Setup(dense, split, a_machine("h100"), software))
            spread = replace(split, expert=8)
            found.append(Setup(experts, spread, a_machine("h100"), software))
    return found


FASTER = ("peak", "memory", "link", "network")


@pytest.mark.parametrize("figure", FASTER)
def test_a_better_machine_is_never_slower(figure: str) -> None:
    for setup in some_setups():
        before = seconds(setup)
        for factor in (1.01, 1.5, 10.0):
            machine_now = replace(
                setup.machine, **{figure: getattr(setup.machine, figure) * factor}
            )
            if figure == "peak":
                machine_now = replace(machine_now, peak16=setup.machine.peak16 * factor)
            assert seconds(replace(setup, machine=machine_now)) <= before * (1 + 1e-9), setup


@pytest.mark.parametrize("figure", ["layers", "hidden", "ffn", "seq", "vocab", "topk"])
def test_more_work_is_never_faster(figure: str) -> None:
    for setup in some_setups():
        model = replace(setup.shape, **{figure: getattr(setup.shape, figure) * 2})
        if figure == "hidden":
            model = replace(model, query=model.query * 2, key=model.key * 2)
        assert seconds(replace(setup, shape=model)) >= seconds(setup), setup


def test_recomputation_and_more_samples_cost_time() -> None:
    for setup in some_setups():
        none = replace(setup, split=replace(setup.split, recompute="none"))
        twice = replace(setup, split=replace(setup.split, global_batch=256))
        assert seconds(none) < seconds(setup) < seconds(twice)


def test_terms_are_whole() -> None:
    for setup in some_setups():
        terms = step_time(setup, fitted()).terms
        assert all(math.isfinite(term) and term >= 0 for term in terms.values()), terms
        assert bool(terms["experts"]) == bool(setup.shape.experts)
        assert bool(terms["context"]) == (setup.split.context > 1)


def test_borders_between_nodes() -> None:
    """Two stages of four ranks fill a node of eight; three of six lie across."""
    assert crossing_shares(4, 4, 8) == (0.0, 0.5, 0.0)
    assert crossing_shares(3, 8, 8) == (1.0, 1.0)
    assert crossing_shares(3, 6, 8) == (0.5, 0.25)


def test_intervals_widen_with_what_is_not_known() -> None:
    rules = ENGINES["megatron-lm"].rules
    known = {"network_gb_per_second": 100.0}
    tables = load(ROOT, {}).resolve("llama-8b", []).job.cluster.device
    assert tables.peak_tflops
    model = shape("llama", 8, 1024, 8, 512)

    def width(**keys: Any) -> float:
        job = job_of(model, 8, nodes=2, engine="megatron-lm", precision="bf16", **keys)
        found = estimate_step(job, rules, 1024)
        assert found is not None
        low, high = found.interval
        assert low < found.time.seconds < high
        return high / low

    sure = width(device=tables, cluster=known)
    assert sure < width(device=tables) < width(device=BIG)
    assert sure < width(device=BIG, cluster=known)


def test_nothing_is_said_of_a_device_without_a_peak() -> None:
    assert estimate_step(job_of(), ENGINES["native"].rules, 128) is None
    unknown = job_of(device=gpu(None, peak_tflops={}))
    assert estimate_step(unknown, ENGINES["native"].rules, 128) is None


def test_every_row_of_hardware_has_its_constants() -> None:
    for name, row in devices().items():
        assert f"efficiency.{row['generation']}" in fitted(), name
        assert machine(name, network=1e9) is not None
        assert machine(name, bits=4, network=1e9) is None or row.get("four")


def test_a_softmax_that_is_not_fused_costs_launches() -> None:
    """Megatron-LM's takes four heads x samples at a time; two of a rank pass one by one."""
    small = bloom(tensor=8, pipeline=1, micro_batch=1, stage_layers=0, **ALONE)
    shape = Shape(12, 1024, 1024, 1024, 16, 4096, 1, 1024, 51200)
    few, enough = (replace(small, shape=replace(shape, heads=heads)) for heads in (16, 32))
    assert (
        step_time(few, fitted()).terms["launches"] > step_time(enough, fitted()).terms["launches"]
    )


def test_the_bubble_is_what_the_other_stages_take() -> None:
    """Where the head makes the last of two stages the slowest, one waits for the blocks of the
    other alone."""
    setup = bloom(pipeline=2, stage_layers=35, last_layers=35, **ALONE)
    terms = step_time(setup, fitted()).terms
    assert terms["head"] > 0
    blocks = ("products", "attention", "memory", "recomputation", "launches", "tensor-parallel")
    other = sum(terms[name] for name in (*blocks, "pipeline")) / setup.split.micro_batches
    assert terms["bubble"] == pytest.approx(other)


@pytest.mark.parametrize(
    ("engine", "device", "said"),
    [
        ("megatron-lm", "h100-sxm-80gb", ""),
        ("megatron-lm", "a100-sxm-80gb", "megatron, 16 bits, a100"),
        ("gpt-neox", "h100-sxm-80gb", "megatron-2021, 16 bits, h100"),
        ("native", "h100-sxm-80gb", "the native trainer on GPUs"),
    ],
)
def test_a_kind_that_was_not_fitted_is_named(engine: str, device: str, said: str) -> None:
    job = job_of(engine=engine, device=built_in_device(device), precision="bf16")
    plan = make_plan(job, rules=ENGINES[engine].rules)
    assert plan.duration is not None
    speed = plan.duration.speed
    assert speed.not_fitted.startswith(said) and bool(speed.not_fitted) == bool(said)
    assert ("Not fitted: " in speed.source) == bool(said)


def test_float8_is_planned_where_the_device_has_it_and_refused_elsewhere() -> None:
    def job(device: str, precision: str) -> Job:
        model = shape("llama", layers=4, hidden=4096, heads=32, length=4096)
        words: dict[str, Any] = {"compile": True, "precision": precision}
        return job_of(model, 8, device=built_in_device(device), **words)

    wide, narrow = (make_plan(job("h100-sxm-80gb", p)) for p in ("bf16", "fp8"))
    assert wide.memory is not None and narrow.memory is not None
    assert narrow.memory.fullest.total_bytes > wide.memory.fullest.total_bytes
    assert narrow.duration is not None and wide.duration is not None
    assert narrow.duration.speed.tokens_per_second > wide.duration.speed.tokens_per_second
    for device in ("a100-sxm-80gb", "v100-sxm-32gb"):
        found = [o.message for o in make_plan(job(device, "fp8")).objections]
        assert any("has no arithmetic in fp8" in words for words in found), found
    assert not float8_problem("fp8", (8, 9)) and "8.0" in float8_problem("fp8", (8, 0))
