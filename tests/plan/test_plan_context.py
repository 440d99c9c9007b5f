"""What context parallelism asks of a job, and what the plan says of it."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests.distributed import run_ranks
from tests.plan.example import job_of, shape
from trainkit.engines.registry import ENGINES
from trainkit.jobs.schema import Job
from trainkit.plan.activations import head_gradient_bytes, saved_bytes
from trainkit.plan.layout import layout_of
from trainkit.plan.objection import Objection
from trainkit.plan.planner import make_plan
from trainkit.train import torch_compat
from trainkit.train.model.batch import Batch
from trainkit.train.model.head_loss import Labels
from trainkit.train.model.transformer import Transformer
from trainkit.train.parallel import context_parallel, ring_attention
from trainkit.train.parallel.context_group import ContextGroup


def over(size: int, how: str = "p2p", **more: Any) -> dict[str, Any]:
    return {"context_parallel_size": size, "cp_comm_type": how, **more}


def refused(job: Job) -> Objection:
    (objection,) = make_plan(job, rules=ENGINES["native"].rules).objections
    return objection


def test_ranks_of_a_sample_are_no_data_parallel_ones() -> None:
    job = job_of(shape(length=16), 8, parallelism=over(2, tensor_model_parallel_size=2))
    assert job.data_parallel_size == 2
    plan = make_plan(job, rules=ENGINES["native"].rules)
    assert plan.layout.shard == 4 and not plan.objections


@pytest.mark.parametrize(
    ("length", "parallelism", "words"),
    [
        (12, over(4), "seq_length 12 does not divide by 2 x context-parallel 4 = 8"),
        (
            12,
            over(2, tensor_model_parallel_size=2, sequence_parallel=True),
            "seq_length 12 does not divide by 2 x context-parallel 2 x tensor-parallel 2"
            " (sequence_parallel) = 8",
        ),
    ],
)
def test_the_sequence_divides(length: int, parallelism: dict[str, Any], words: str) -> None:
    objection = refused(job_of(shape(length=length), 4, parallelism=parallelism))
    assert objection.code == "context-not-divisible"
    assert objection.message.startswith(f"{words}; nearest: context_parallel_size ")
    assert {"model.seq_length": 16} in objection.changes


def test_ranks_that_route_a_part_each_divide_the_sequence_too() -> None:
    moe = {"num_experts": 4, "router_topk": 2, "ffn_hidden_size": 8}
    model = shape("mixtral", length=12, moe=moe)
    objection = refused(job_of(model, 4, parallelism=over(2, tensor_model_parallel_size=2)))
    assert objection.code == "context-not-divisible"
    assert "x tensor-parallel 2 (whose ranks route a part each) = 8" in objection.message


@pytest.mark.parametrize(
    ("heads", "groups", "words"),
    [
        (6, 6, "num_attention_heads 6 does not divide by tensor-parallel 1 x context-parallel 4"),
        (12, 3, "num_query_groups 3 does not divide by tensor-parallel 1 x context-parallel 4"),
        (12, 2, ""),  # each is there twice
        (12, 4, ""),
    ],
)
def test_whole_heads_are_dealt(heads: int, groups: int, words: str) -> None:
    model = shape("llama", heads=heads, hidden=8 * heads, length=16, num_query_groups=groups)
    job = job_of(model, 4, parallelism=over(4, "a2a"))
    plan = make_plan(job, rules=ENGINES["native"].rules)
    assert [each.message for each in plan.objections] == (
        [f"cp_comm_type = 'a2a': {words}; nearest: p2p"] if words else []
    )
    for each in plan.objections:
        assert each.changes == ({"parallelism.cp_comm_type": "p2p"},)
    assert not make_plan(
        job_of(model, 4, parallelism=over(4)), rules=ENGINES["native"].rules
    ).objections


def test_what_it_does_not_go_with() -> None:
    dropping = shape(length=16, attention_dropout=0.1)
    objection = refused(job_of(dropping, 2, parallelism=over(2)))
    assert objection.code == "dropout-in-context"
    assert {"model.attention_dropout": 0} in objection.changes
    objection = refused(job_of(shape(length=16), 2, parallelism=over(2), compile=True))
    assert objection.code == "compile-in-context"
    assert {"training.compile": False} in objection.changes
    objection = refused(job_of(shape(length=16), 6, parallelism=over(4)))
    assert objection.code == "world-not-divisible"
    assert "tensor-parallel 1 x context-parallel 4 x pipeline-parallel 1 = 4" in objection.message
    assert {"parallelism.context_parallel_size": 2} in objection.changes


FAMILIES: list[dict[str, Any]] = [
    {"family": "gpt"},
    {"family": "llama", "num_query_groups": 2},
    {"family": "llama", "num_query_groups": 1},
    {"family": "llama", "num_query_groups": 2, "qk_norm": "head"},
]
WIDE: dict[str, Any] = {"layers": 2, "hidden": 64, "heads": 4, "length": 128}


def saved_and_sent() -> dict[tuple[int, str], tuple[int, int]]:
    """Of every family and kind: bytes that forward and loss of one rank of two leave for
    backward, each storage once and parameters left out, and numbers that its attention sends in
    forward. Without peers: what arrives is anything."""
    sent = 0
    exchange = torch_compat.begin_exchange

    def counted(x: Tensor, taken: list[int], given: list[int], group: str) -> Tensor:
        nonlocal sent
        sent += sum(given[1:]) * x[0].numel()
        return exchange(x, taken, given, group)

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    group = ContextGroup(2, 0)
    assert dist.group.WORLD is not None
    torch_compat.name_group(group.name, dist.group.WORLD)
    found = {}
    for number, keys in enumerate(FAMILIES):
        for how in ("p2p", "a2a"):
            model = shape(**{**WIDE, **keys})
            module = Transformer(model, 128)
            context_parallel.apply(module, group, how)
            own = {p.untyped_storage().data_ptr() for p in module.parameters()}
            bytes_of: dict[int, int] = {}
            kept: list[Tensor] = []  # a storage that is freed would lend its address to the next

            def pack(
                tensor: Tensor, own: Any = own, to: Any = bytes_of, kept: Any = kept
            ) -> Tensor:
                kept.append(tensor)
                storage = tensor.untyped_storage()
                if storage.data_ptr() not in own:
                    to[storage.data_ptr()] = storage.nbytes()
                return tensor

            whole = torch.zeros(2, model.seq_length, dtype=torch.int64)
            batch = context_parallel.own_tokens(Batch(whole, whole, 0, 0), group)
            sent = 0
            with (
                mock.patch.object(torch_compat, "begin_exchange", counted),
                mock.patch.object(ring_attention, "begin_exchange", counted),
                saved_tensors_hooks(pack, lambda tensor: tensor),
            ):
                module(batch.tokens_BS, Labels(batch.labels_BS), positions_BS=batch.positions_BS)
            found[number, how] = (sum(bytes_of.values()), sent)
    dist.destroy_process_group()
    return found


def test_the_plan_is_what_a_rank_saves_and_sends() -> None:
    """Ring: 2 g d B (S / C) (C - 1); exchange: (2 h + 2 g) d B (S / C) (C - 1) / C numbers."""
    (found,) = run_ranks(1, "tests.plan.test_plan_context:saved_and_sent", timeout=300)
    rules = ENGINES["native"].rules
    for number, keys in enumerate(FAMILIES):
        model = shape(**{**WIDE, **keys})
        for how in ("p2p", "a2a"):
            job = job_of(model, 2, parallelism=over(2, how), micro_batch_size=2)
            job = job.model_copy(update={"kernels": "reference"})
            layout = layout_of(job)
            saved, sent = found[number, how]
            expected = saved_bytes(job, layout, rules, 0)
            expected += head_gradient_bytes(job, layout, 128, 128)
            assert saved == pytest.approx(expected, rel=0.05), (keys, how)
            heads, groups = model.num_attention_heads, model.query_groups
            widths = 2 * groups if how == "p2p" else heads + max(groups, 2)
            assert sent == model.num_layers * widths * model.head_size * 2 * 64, (keys, how)
