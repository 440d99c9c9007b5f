"""What the plan calls feasible is what the trainer takes: refused by both or by none, and what
is taken can be built."""

from __future__ import annotations

import math
import re
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import example, given, settings, strategies as st
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.distributed import run_ranks
from tests.plan.example import job_of, shape
from tests.train.layout_cases import layout, runs_here
from tests.train.plain_loop import VOCAB, job_of as matrix_job
from trainkit.base.errors import ConfigError
from trainkit.engines.registry import ENGINES
from trainkit.jobs.ranks import degrees_of
from trainkit.jobs.schema import Job, Parallelism
from trainkit.plan.batch import batch_sizes
from trainkit.plan.planner import make_plan
from trainkit.train import preflight
from trainkit.train.metrics.timers import Timers
from trainkit.train.model.transformer import build_on_meta
from trainkit.train.parallel.data_parallel import World, accumulates_whole
from trainkit.train.parallel.memory import MemoryStats
from trainkit.train.parallel.mesh import Mesh
from trainkit.train.parallel.pipeline import chunks_per_stage, tied_at
from trainkit.train.preflight import begin_weights
from trainkit.train.torch_compat import local_part
from trainkit.train.update.build import build_model_parts
from trainkit.train.update.step import Step


@st.composite
def jobs(draw: st.DrawFn) -> Job:
    """A job of the native engine on one node, of any layout that the schema takes."""
    family = draw(st.sampled_from(["gpt", "gpt-neox", "llama", "qwen3", "olmo2"]))
    heads = draw(st.sampled_from([1, 2, 3, 4, 6, 8]))
    groups = (
        draw(st.sampled_from([None, *(g for g in range(1, heads + 1) if heads % g == 0)]))
        if family not in ("gpt", "gpt-neox")
        else None
    )
    sizes = {
        "ffn_hidden_size": draw(st.sampled_from([None, 3, 30, 64])),
        "vocab_size": draw(st.sampled_from([3, 16, 61])),
    }
    model = shape(
        family,
        draw(st.integers(1, 9)),
        8 * heads,
        heads,
        draw(st.sampled_from([4, 6, 8, 12])),
        num_query_groups=groups,
        **sizes,
    )
    pipeline, zero = draw(st.integers(1, 4)), draw(st.integers(0, 3))
    schedule = draw(st.sampled_from(["1f1b", "interleaved", "zbv"])) if pipeline > 1 else "1f1b"
    keys = layout(
        draw(st.integers(1, 4)),
        pipeline,
        schedule,
        sp=draw(st.booleans()),
        zero=zero,
        copies=draw(st.integers(1, 3)) if zero else 1,
        cp=draw(st.sampled_from([1, 1, 2, 3])),
        comm=draw(st.sampled_from(["p2p", "a2a"])),
    )
    training: dict[str, Any] = {
        "micro_batch_size": draw(st.integers(1, 2)),
        "global_batch_size": draw(st.integers(1, 24)),
    }
    if draw(st.booleans()):
        whole = training["global_batch_size"]
        start = draw(st.integers(1, whole))
        training["rampup_batch_size"] = (
            start,
            draw(
                st.sampled_from(
                    [n for n in range(1, whole - start + 1) if (whole - start) % n == 0] or [1]
                )
            ),
            50,
        )
    ranks = draw(st.integers(1, 16))
    fitting = Parallelism.model_validate(keys).ranks_of_a_sample * draw(st.integers(1, 4))
    return job_of(model, draw(st.sampled_from([ranks, fitting])), parallelism=keys, **training)


@settings(deadline=None, max_examples=200)
@given(jobs())
# fewer micro-batches than stages
@example(job_of(shape(layers=4), 4, parallelism=layout(1, 4), global_batch_size=2))
# repeated key-value heads
@example(
    job_of(
        shape("llama", heads=8, hidden=16, num_query_groups=2),
        4,
        parallelism=layout(4),
        global_batch_size=2,
    )
)
@example(job_of(shape(layers=8), 4, parallelism=layout(1, 4, "interleaved"), global_batch_size=9))
@example(job_of(shape(layers=4), 4, parallelism=layout(1, 2, zero=2), global_batch_size=8))
def test_the_plan_refuses_what_ranks_cannot_share(job: Job) -> None:
    objections = make_plan(job, rules=ENGINES["native"].rules).objections
    assert bool(objections) != shares_work(job), objections


def shares_work(job: Job) -> bool:
    """Whether every rank has a place, every share something in it, and every micro-batch a rank."""
    p = job.parallelism
    tensor = p.tensor_model_parallel_size
    stages = p.pipeline_model_parallel_size
    context = p.context_parallel_size
    model = job.model
    assert model.vocab_size
    groups = max(1, model.query_groups // tensor)
    split = [
        job.world_size % (tensor * context * stages) == 0,
        context == 1
        or model.seq_length % (2 * context * (tensor if p.sequence_parallel else 1)) == 0,
        context == 1
        or p.cp_comm_type == "p2p"
        or (
            model.num_attention_heads % (tensor * context) == 0
            and (groups % context == 0 or context % groups == 0)
        ),
        job.data_parallel_size % p.data_parallel_replicate_size == 0,
        degrees_of(job).world == job.world_size,
        model.num_attention_heads % tensor == 0,
        model.query_groups % tensor == 0 or tensor % model.query_groups == 0,
        min(model.ffn_width, model.vocab_size) >= tensor,
        not p.sequence_parallel or model.seq_length % tensor == 0,
        model.num_layers >= stages * chunks_per_stage(p),
        p.zero_stage != 2 or stages == 1,  # its schedules reduce gradients once
        p.zero_stage != 3 or p.pipeline_schedule != "zbv",  # which needs weights twice
    ]
    each = job.training.micro_batch_size * job.data_parallel_size
    return all(split) and all(
        size % each == 0 and equal_rounds(p, size // each) for size in batch_sizes(job)
    )


def equal_rounds(parallelism: Parallelism, micro_batches: int) -> bool:
    """The demand of torch's ScheduleInterleaved1F1B."""
    rounds = max(1, micro_batches // parallelism.pipeline_model_parallel_size)
    return not parallelism.virtual_pipeline_model_parallel_size or micro_batches % rounds == 0


TAKEN = {
    "tp4, one key-value head": ("llama-1-group", 4, layout(4, sp=True)),
    "pp4, fewer micro-batches than stages": ("gpt", 4, layout(1, 4)),
    "pp4 interleaved, 1 micro-batch": ("llama-deep", 8, layout(1, 4, "interleaved")),
    "pp4 zbv, 3 micro-batches": ("llama-deep", 4, layout(1, 4, "zbv")),
    "3-d": ("gpt", 8, layout(2, 2, "interleaved", sp=True)),
    "hsdp of a stage": ("neox-tied", 8, layout(1, 2, copies=2, zero=3)),
    "tokens of a sample on two ranks": ("llama", 8, layout(2, sp=True, zero=3, cp=2)),
    "context, of two copies": ("gpt", 8, layout(copies=2, cp=2, comm="a2a")),
    "context, a copy on each": ("gpt", 4, layout(1, 2, zero=0, cp=2)),
    "all at once": ("llama-tied", 16, layout(2, 2, "zbv", sp=True, copies=2)),
}


class Held(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The most bytes of memory that all tensors which operations made had together at a time,
    those without memory left out."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.most, self._made = 0, dict[int, weakref.ref[torch.UntypedStorage]]()

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        made = function(*args, **(kwargs or {}))
        for leaf in (
            local_part(leaf) for leaf in tree_leaves(made) if isinstance(leaf, torch.Tensor)
        ):
            if leaf.device.type != "meta":
                self._made[leaf.untyped_storage().data_ptr()] = weakref.ref(leaf.untyped_storage())
        self._made = {address: ref for address, ref in self._made.items() if ref() is not None}
        self.most = max(
            self.most,
            sum(storage.nbytes() for ref in self._made.values() if (storage := ref()) is not None),
        )
        return made


def begin_as_every_rank(root: Path) -> list[tuple[int, int, int, int]]:
    """Of each rank of a model on TP2 x PP2: bytes of its parameters, of the largest whole tensor
    of which it holds a part, and the most there ever was, while it was built and while its
    weights began."""
    found, device = [], torch.device("cpu")
    job = matrix_job("gpt-untied", 4, root, layout(2, 2))
    for number in range(4):
        dist.init_process_group("fake", store=FakeStore(), rank=number, world_size=4)
        mesh = Mesh.of(degrees_of(job), World(number, 4), device)
        with Held() as building:
            parts = build_model_parts(job, mesh, VOCAB)
        with Held() as beginning:
            begin_weights(job, parts)
        mine = sum(4 * local_part(held.parameter).numel() for held in parts.parameters.values())
        found.append(
            (
                mine,
                max(4 * math.prod(held.layout.shape) for held in parts.parameters.values()),
                building.most,
                beginning.most,
            )
        )
        dist.destroy_process_group()
    return found


def test_no_rank_ever_holds_the_model(tmp_path: Path) -> None:
    """It is built where tensors have no memory; memory is its own share's alone, and what
    weights begin from is one tensor at a time."""
    (found,) = run_ranks(
        1, "tests.train.parallel.test_layout_rules:begin_as_every_rank", tmp_path, timeout=900
    )
    whole = 4 * sum(
        p.numel()
        for p in build_on_meta(
            matrix_job("gpt-untied", 4, tmp_path, layout(2, 2)).model, VOCAB
        ).parameters()
    )
    assert len(found) == 4
    for mine, largest, built, begun in found:
        assert built == mine < 0.4 * whole
        assert mine < begun <= mine + largest


def build_as_every_rank(root: Path) -> dict[str, list[tuple[int, ...]]]:
    """Build parts, optimizer and schedules of every rank of every TAKEN layout, without peers.
    Of each stage, the most bytes that one of its ranks holds of parameters, of gradients and of
    the optimizer's state."""
    found: dict[str, list[tuple[int, ...]]] = {}
    for name, (_, ranks, keys) in TAKEN.items():
        if not runs_here(keys):
            continue
        job, device = taken(name, root), torch.device("cpu")
        held: list[tuple[int, ...]] = [(0, 0, 0)] * keys["pipeline_model_parallel_size"]
        for number in range(ranks):
            dist.init_process_group("fake", store=FakeStore(), rank=number, world_size=ranks)
            mesh = Mesh.of(
                degrees_of(job),
                World(number, ranks),
                device,
                sequence=job.parallelism.sequence_parallel,
                tied_at=tied_at(job),
            )
            parts = build_model_parts(job, mesh, VOCAB)
            step = Step(job, parts, mesh, Timers(device))
            for learning in (True, False):
                if step.pipeline is not None:
                    step.pipeline._schedule(job.gradient_accumulation_steps, learning)
            memory = MemoryStats(
                parts.parameters,
                step.optimizer.state_tensors().values(),
                device,
                accumulates=accumulates_whole(job),
            ).now()
            stage, kinds = mesh.place.pipeline, ("parameters", "gradients", "optimizer")
            held[stage] = tuple(
                max(before, memory[kind]) for before, kind in zip(held[stage], kinds, strict=True)
            )
            dist.destroy_process_group()
        found[name] = held
    return found


def taken(name: str, root: Path) -> Job:
    """The job of a TAKEN layout."""
    model, ranks, keys = TAKEN[name]
    return matrix_job(model, ranks, root, keys, global_batch_size=3 if "3 micro" in name else 4)


def test_what_is_taken_can_be_built_and_holds_the_planned_bytes(tmp_path: Path) -> None:
    """Parameters, gradients and optimizer state of every stage, to the byte."""
    (found,) = run_ranks(
        1, "tests.train.parallel.test_layout_rules:build_as_every_rank", tmp_path, timeout=900
    )
    assert found
    for name in found:
        job = taken(name, tmp_path)
        assert shares_work(job)
        plan = make_plan(job, rules=ENGINES["native"].rules)
        assert not plan.objections and plan.memory is not None
        assert found[name] == [
            (stage.parameter_bytes, stage.gradient_bytes, stage.optimizer_bytes)
            for stage in plan.memory.stages
        ], name


def test_every_reason_is_named_at_once() -> None:
    job = job_of(
        shape("llama", 2, 12, 6, 7, num_query_groups=3, ffn_hidden_size=3),
        7,
        parallelism=layout(4, 3, "zbv", sp=True, zero=2, copies=2),
        global_batch_size=5,
        micro_batch_size=2,
    )
    codes = [
        objection.code for objection in make_plan(job, rules=ENGINES["native"].rules).objections
    ]
    assert len(codes) >= 5, codes


def test_an_older_torch_is_not_given_a_backward_in_halves(monkeypatch: pytest.MonkeyPatch) -> None:
    job = job_of(shape("gpt", 4, 12, 6, 7), 2, parallelism=layout(1, 2, "zbv"))
    monkeypatch.setattr(torch, "__version__", "2.12.1+cpu")
    monkeypatch.setattr("trainkit.engines.native.torch_version", lambda: "2.12.1+cpu")
    words = r"'zbv' needs torch 2\.13 or newer .* this is 2\.12\.1\+cpu"
    with pytest.raises(ConfigError, match=words):
        preflight.refuse_what_cannot_run(job, World(0, 2), begins=False)
    (objection,) = make_plan(job, rules=ENGINES["native"].rules).objections
    assert objection.code == "no-zero-bubble"
    assert re.search(words, objection.message)
    assert objection.changes == ({"parallelism.pipeline_schedule": "1f1b"},)


@pytest.mark.parametrize(
    ("parallelism", "key"),
    [(layout(2), "tensor_model"), (layout(ep=2), "expert_model"), (layout(etp=2), "expert_tensor")],
)
def test_an_older_torch_is_not_given_experts_apart(
    parallelism: dict[str, Any], key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "__version__", "2.12.1+cpu")
    monkeypatch.setattr("trainkit.engines.native.torch_version", lambda: "2.12.1+cpu")
    job = matrix_job("moe", 2, Path(), parallelism)
    words = rf"{key}_parallel_size 2 for .* experts needs torch 2\.13 .* this is 2\.12\.1\+cpu"
    with pytest.raises(ConfigError, match=words):
        preflight.refuse_what_cannot_run(job, World(0, 2), begins=False)
    (objection,) = make_plan(job, rules=ENGINES["native"].rules).objections
    assert objection.code == "no-experts-apart" and re.search(words, objection.message)
    for taken in (
        matrix_job("moe", 2, Path(), layout()),
        matrix_job("llama", 2, Path(), layout(2)),
    ):
        preflight.refuse_what_cannot_run(taken, World(0, 2), begins=False)
        assert not make_plan(taken, rules=ENGINES["native"].rules).objections
