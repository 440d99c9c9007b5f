"""training.replay_interval: a rank that computes a wrong bit is found, and none that does not."""

from __future__ import annotations

import platform
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.distributed import run_ranks
from tests.once import once
from tests.train.layout_cases import runs_here
from tests.train.silent_faults import WHERE, Fault
from tests.train.support import same
from trainkit.base.errors import Exit
from trainkit.jobs.schema import Cluster
from trainkit.launch.supervise.failure_rules import load_failure_rules
from trainkit.launch.supervise.outcome import RankExit, judge_outcome
from trainkit.train.update.gradient_replay import CHUNK, ReplayVerdict, Sums, bit_sum, judge

Cases = dict[str, tuple[Fault | None, dict[str, Any]]]
RUNS = "tests.train.silent_faults:runs"
STEPS = 4
EVERY_SECOND: dict[str, Any] = {"replay_interval": 2}
DROPPING = {"hidden_dropout": 0.2, "attention_dropout": 0.1}
MOE = {
    "family": "qwen3-moe",
    "hidden_size": 24,
    "num_query_groups": 1,
    "moe": {
        "num_experts": 4,
        "router_topk": 2,
        "ffn_hidden_size": 20,
        "aux_loss_coeff": 0.5,
        "router_load_balancing_type": "global_aux_loss",
    },
}
TP2: dict[str, Any] = {
    "model": {"hidden_size": 24, "num_attention_heads": 4},
    "parallelism": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
}
# a step has eight micro-batches: of two ranks four each
ON_TWO: dict[str, dict[str, Any]] = {
    **{f"ZeRO {stage}": {"parallelism": {"zero_stage": stage}} for stage in range(4)},
    "bf16, ZeRO 1": {"precision": "bf16"},
    "bf16, ZeRO 3": {"precision": "bf16", "parallelism": {"zero_stage": 3}},
    "one micro-batch": {"micro_batch_size": 4, "parallelism": {"zero_stage": 2}},
    "fp16, dropout": {
        "precision": "fp16",
        "initial_loss_scale": 256.0,
        "model": DROPPING,
        "recompute_granularity": "full",
    },
    "experts": {"model": MOE},
}
ON_FOUR: dict[str, dict[str, Any]] = {
    "ZeRO 1": {},
    "bf16, ZeRO 3": {"precision": "bf16", "parallelism": {"zero_stage": 3}},
    "TP": TP2,
    "TP, bf16, ZeRO 3": {
        **TP2,
        "precision": "bf16",
        "parallelism": {**TP2["parallelism"], "zero_stage": 3},
    },
    "HSDP": {"parallelism": {"data_parallel_replicate_size": 2, "zero_stage": 3}},
    "CP": {"parallelism": {"context_parallel_size": 2}},
}
APART = {"expert_model_parallel_size": 2}
if runs_here(APART, experts=True):
    ON_FOUR["EP"] = {"parallelism": APART, "model": MOE}
# a step later or in between: nothing is compared there
LATER = {"train_iters": 3, **EVERY_SECOND}
SHORT = {"train_iters": 2, **EVERY_SECOND}
FAULTS_ON_TWO: Cases = {
    "in the step": (Fault(1, 2, 1), SHORT),
    "in the neighbour's": (Fault(0, 2, 0), SHORT),
    "of an activation": (Fault(1, 2, 1, weight=False, bit=12), SHORT),
    "bf16": (Fault(0, 2, 1), {"precision": "bf16", "parallelism": {"zero_stage": 3}, **SHORT}),
    "always": (Fault(1), SHORT),
    "not compared": (Fault(1, 3, 0), LATER),
    "later micro-batch": (Fault(1, 2, 2), LATER),
}
FAULTS_ON_FOUR: Cases = {
    "in the step": (Fault(2, 2, 1), SHORT),
    "always": (Fault(3), SHORT),
    "TP, a weight": (Fault(3, 2, 1), {**TP2, **SHORT}),
    "TP, an activation": (Fault(3, 2, 1, weight=False, bit=12), {**TP2, **SHORT}),
    "HSDP": (Fault(1), {"parallelism": {"data_parallel_replicate_size": 2}, **SHORT}),
}
FAULTS_ON_THREE: Cases = {"always": (Fault(1), {"global_batch_size": 6, **SHORT})}


def with_and_without(layouts: dict[str, dict[str, Any]]) -> Cases:
    """Each layout twice."""
    return {
        f"{name}, {words}": (None, {"train_iters": STEPS, **keys, **more})
        for name, keys in layouts.items()
        for words, more in (("off", {}), ("on", EVERY_SECOND))
    }


CASES: dict[int, Cases] = {
    2: with_and_without(ON_TWO) | FAULTS_ON_TWO,
    3: FAULTS_ON_THREE,
    4: with_and_without(ON_FOUR) | FAULTS_ON_FOUR,
}


def found(factory: pytest.TempPathFactory, size: int) -> list[dict[str, Any]]:
    """What all ranks of a world have found, by case."""
    made = once(factory, f"replay-{size}", lambda root: run_ranks(size, RUNS, root, CASES[size]))
    return made


@pytest.mark.parametrize(
    ("size", "name"), [*((2, name) for name in ON_TWO), *((4, name) for name in ON_FOUR)]
)
def test_no_bit_changes_and_nobody_is_accused(
    tmp_path_factory: pytest.TempPathFactory, size: int, name: str
) -> None:
    for rank in found(tmp_path_factory, size):
        off, on = rank[f"{name}, off"], rank[f"{name}, on"]
        assert (on["error"], on["code"], on["step"]) == ("", 0, STEPS)
        assert off["rows"] == on["rows"] and len(on["rows"]) == STEPS
        assert same(off["weights"], on["weights"])


@pytest.mark.parametrize(
    ("size", "name"),
    [
        *((2, name) for name in list(FAULTS_ON_TWO)[:4]),
        (3, "always"),
        (4, "in the step"),
        (4, "always"),
        (4, "TP, a weight"),
        (4, "TP, an activation"),
        (4, "HSDP"),
    ],
)
def test_the_rank_that_computes_a_wrong_bit_ends(
    tmp_path_factory: pytest.TempPathFactory, size: int, name: str
) -> None:
    fault = CASES[size][name][0]
    assert fault is not None
    ranks = found(tmp_path_factory, size)
    wrong = ranks[fault.rank][name]
    assert wrong["code"] == 10 and wrong["step"] == 1
    tensor = f"{WHERE}.weight" if fault.weight else f"{WHERE}.bias"
    assert wrong["error"].startswith(
        f"step 2: of the same samples and weights rank {fault.rank} on {platform.node()} (first:"
        f" {tensor}) computed other gradients than its peers: a silent fault of host"
        f" {platform.node()}; this step has not touched the weights\n"
    )
    assert "Nothing was compared since this attempt began" in wrong["error"]
    others = [rank[name] for number, rank in enumerate(ranks) if number != fault.rank]
    assert all((other["code"], other["step"]) == (None, 1) for other in others)
    # the step was not taken by anybody: the gradient of step 1 was right, or no bit of it counts
    assert len(wrong["rows"]) == 1


def test_two_that_differ_steadily_are_both_named(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    for rank in found(tmp_path_factory, 2):
        assert rank["always"]["code"] == 10
        assert " or rank 1 on " in rank["always"]["error"]


def test_the_others_end_as_echoes(tmp_path: Path) -> None:
    """The supervisor is told of the host that computes wrong, whoever leaves first."""
    said = run_ranks(2, "tests.train.silent_faults:end", tmp_path, Fault(0, 2, 1), SHORT)
    assert [error["exit"] for error in said] == [10, 9]
    ends = [
        RankExit(rank, f"host-{rank}", error["exit"], 9.0 - rank, False, error=error)
        for rank, error in enumerate(said)
    ]
    outcome = judge_outcome(ends, 2, None, rules=load_failure_rules(Cluster(name="here")))
    assert (outcome.exit, outcome.failure_class) == (Exit.RANK_INFRA, "infra")
    assert outcome.suspects == ("host-0",)
    assert outcome.root_cause is not None and outcome.root_cause["rank"] == 0


def test_what_is_not_compared_passes(tmp_path_factory: pytest.TempPathFactory) -> None:
    for rank in found(tmp_path_factory, 2):
        assert rank["not compared"]["code"] == rank["later micro-batch"]["code"] == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("shape", [(1,), (3, 5), (2, 3, 7), (1 << 12, 9)])
def test_every_bit_counts(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    odd_C = torch.arange(1, 2 * CHUNK, 2)[:1000]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("trainkit.train.update.gradient_replay.CHUNK", len(odd_C))
        x = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype)
        usual = bit_sum(x, odd_C)
        assert bit_sum(x.T.contiguous().T if x.dim() == 2 else x.clone(), odd_C) == usual
        for element in {0, x.numel() // 2, x.numel() - 1}:
            for bit in (0, 7, 8 * x.element_size() - 1):
                assert bit_sum(_flipped(x, element, bit), odd_C) != usual
        if x.numel() > 1:
            assert bit_sum(x.flatten().roll(4), odd_C) != usual


def _flipped(x: Tensor, element: int, bit: int) -> Tensor:
    wrong = x.clone()
    words = wrong.view(-1).view({2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()])
    words[element] ^= torch.tensor(1, dtype=torch.int64).bitwise_left_shift(bit).to(words.dtype)
    return wrong


RIGHT: Sums = (("b", 1), ("a", 2))
LATE: Sums = (("b", 1), ("a", 3))
EARLY: Sums = (("b", 5), ("a", 6))
OTHER: Sums = (("b", 7), ("a", 6))


def opinions(size: int, **wrong: Sums) -> list[list[Sums]]:
    """Of every rank four; r1k2: rank 1's of the micro-batch two replicas before its own."""
    return [[wrong.get(f"r{rank}k{back}", RIGHT) for back in range(4)] for rank in range(size)]


@pytest.mark.parametrize(
    ("size", "together", "wrong", "verdict"),
    [
        (2, 1, {"r1k0": LATE}, ReplayVerdict({1: "a"}, True)),
        (2, 1, {"r0k1": EARLY}, ReplayVerdict({0: "b"}, True)),
        # never twice the same
        (2, 1, {"r0k0": LATE, "r0k2": EARLY}, ReplayVerdict({0: "b"}, True)),
        (2, 1, {"r0k0": LATE, "r0k2": LATE}, ReplayVerdict({0: "a", 1: "a"}, False)),
        (3, 1, {"r2k0": LATE, "r2k3": LATE}, ReplayVerdict({2: "a"}, True)),
        (4, 1, {f"r3k{back}": EARLY for back in range(4)}, ReplayVerdict({3: "b"}, True)),
        # two hosts at once
        (5, 1, {"r1k0": EARLY, "r4k1": LATE}, ReplayVerdict({1: "b", 4: "a"}, True)),
        # what rank 2 computes wrong reaches rank 3 later in backward
        (6, 2, {"r2k0": EARLY, "r3k0": LATE}, ReplayVerdict({2: "b"}, True)),
        (6, 2, {"r2k0": EARLY, "r3k0": OTHER}, ReplayVerdict({2: "b", 3: "b"}, True)),
    ],
)
def test_who_is_wrong(
    size: int, together: int, wrong: dict[str, Sums], verdict: ReplayVerdict
) -> None:
    assert judge(opinions(size, **wrong), together) == verdict
