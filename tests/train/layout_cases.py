"""The matrix of layouts that are compared with the reference. `python -m
tests.train.layout_cases [--short]` prints the table of docs/parallelism.md."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from tests.train.layouts import Case, compare
from tests.train.plain_loop import APART, MASKS, MODELS
from trainkit.jobs.schema import Parallelism
from trainkit.plan.rules import experts_apart_problem, zero_bubble_problem

EXACT, SMOKE = 1e-10, 1e-5  # of fp64 and of fp32
FULL: dict[str, Any] = {"recompute_granularity": "full"}
SELECTIVE: dict[str, Any] = {"recompute_granularity": "selective"}
COMPILE: dict[str, Any] = {"compile": True}
MUON: dict[str, Any] = {"optimizer": "muon"}
PAIRS: dict[str, Any] = {"micro_batch_size": 2}
# By the default, 1e-8, AdamW moves a weight by the whole rate whatever its gradient's size: of one
# that is 0 but for rounding, 1e-9 here and -1e-9 there, fp32
# would make two different models after one step, and their gradients would be compared. By this it
# moves less than rounding does.
SMOOTH: dict[str, Any] = {"adam_eps": 1e-2}
UNNAMED = (
    "train_iters",
    "global_batch_size",
    *SMOOTH,
    *APART,
)  # not in a case's words


def layout(
    tensor: int = 1,
    pipeline: int = 1,
    schedule: str = "1f1b",
    *,
    sp: bool = False,
    zero: int = 1,
    copies: int = 1,
    ep: int = 1,
    etp: int = 1,
    **context: Any,
) -> dict[str, Any]:
    """Keys of [jobs.X.parallelism]; schedule "interleaved": two chunks a stage. `context`: cp, and
    comm where it is not "p2p"."""
    keys: dict[str, Any] = {
        "tensor_model_parallel_size": tensor,
        "pipeline_model_parallel_size": pipeline,
        "sequence_parallel": sp,
        "zero_stage": zero,
    }
    keys |= (
        {"virtual_pipeline_model_parallel_size": 2}
        if schedule == "interleaved"
        else {"pipeline_schedule": schedule}
    )
    if ep * etp > 1:
        keys |= {"expert_model_parallel_size": ep, "expert_tensor_parallel_size": etp}
    if context:
        names = {"cp": "context_parallel_size", "comm": "cp_comm_type"}
        keys |= {"cp_comm_type": "p2p"} | {names[key]: value for key, value in context.items()}
    return {**keys, "data_parallel_replicate_size": copies}


def runs_here(parallelism: Mapping[str, Any], *, experts: bool = False) -> bool:
    """Whether this torch takes it: before 2.13 ZBV is refused, and `experts` apart
    (test_layout_rules.py)."""
    p = Parallelism.model_validate(parallelism)
    apart = experts_apart_problem(p, torch.__version__) if experts else ""
    return not (apart or zero_bubble_problem(p, torch.__version__))


# compiled, torch gets float8 in fp32 and attention in double wrong there
BEFORE_213 = torch.torch_version.TorchVersion(torch.__version__) < "2.13"


def words(case: Case) -> str:
    """A case in a few words: its name in the table."""
    p, t = case.parallelism, case.training
    tensor, pipeline = p["tensor_model_parallel_size"], p["pipeline_model_parallel_size"]
    context = p.get("context_parallel_size", 1)
    data = case.ranks // (tensor * context * pipeline)
    schedule = (
        "interleaved"
        if "virtual_pipeline_model_parallel_size" in p
        else {"1f1b": "1F1B", "zbv": "ZBV"}[p["pipeline_schedule"]]
    )
    copies = p["data_parallel_replicate_size"]
    parts = [
        f"TP{tensor}{' + SP' if p['sequence_parallel'] else ''}" if tensor > 1 else "",
        f"CP{context} {p['cp_comm_type']}" if context > 1 else "",
        f"PP{pipeline} {schedule}" if pipeline > 1 else "",
        f"EP{p['expert_model_parallel_size']}" if "expert_model_parallel_size" in p else "",
        f"ETP{etp}" if (etp := p.get("expert_tensor_parallel_size", 1)) > 1 else "",
        (
            (f"HSDP {copies}x{data * context // copies}" if copies > 1 else f"DP{data}")
            + f" ZeRO {p['zero_stage']}"
            if data > 1
            else (f"ZeRO {p['zero_stage']}" if context > 1 and p["zero_stage"] != 1 else "")
        ),
        ", ".join(
            [
                key if value is True else f"{key} {value}"
                for key, value in t.items()
                if key not in UNNAMED
            ]
        ),
        case.data if case.data != "mock" else "",
        case.precision if case.precision != "fp64" else "",
        case.sabotage,
        "fused kernels" if case.kernels == "fused" else "",
    ]
    return f"{case.model}: {', '.join(part for part in parts if part) or 'one rank'}"


def short(case: Case) -> Case:
    """Two steps of two micro-batches; of four with a pipeline or masks, which go by samples."""
    p = case.parallelism
    stages = p["pipeline_model_parallel_size"]
    split = p["tensor_model_parallel_size"] * stages * p.get("context_parallel_size", 1)
    at_once = case.ranks // split * case.training.get("micro_batch_size", 1)
    batch = at_once * (2 if stages == 1 and case.data not in MASKS else 4)
    return replace(case, training={"train_iters": 2, "global_batch_size": batch, **case.training})


def named(cases: list[Case], **training: Any) -> dict[str, Case]:
    """By their words, what runs here; `training` for all of them, under their own."""
    here = [
        case
        for case in cases
        if runs_here(case.parallelism, experts=MODELS[case.model].moe is not None)
    ]
    found = {words(case): replace(case, training={**training, **case.training}) for case in here}
    assert len(found) == len(here), "two cases have the same name"
    return found


def in_fp32(case: Case) -> Case:
    """The smoke of a case."""
    return replace(case, precision="fp32", training={**case.training, **SMOOTH})


def apart(model: str, parallelism: dict[str, Any], ranks: int) -> Case:
    """Documents that do not see each other, and labels that are masked."""
    return Case(model, parallelism, ranks, APART, data="documents")


def unequal(model: str, parallelism: dict[str, Any], ranks: int) -> list[Case]:
    """Labels that are not equally many on all ranks and micro-batches, and not on each."""
    return [Case(model, parallelism, ranks, data=name) for name in MASKS]


_EP, _TP_EP = layout(ep=2), layout(2, sp=True, ep=2)
# of peers, and where each would be seen
_MISTAKES: list[tuple[str, dict[str, Any], int, dict[str, Any], str]] = [
    ("moe", _EP, 2, {}, "gradients of experts are multiplied"),
    ("moe", _EP, 2, {}, "the norm leaves experts out"),
    ("moe", _TP_EP, 2, {}, "the norm has half of experts"),
    ("moe", _EP, 2, {}, "each rank clips by its own norm"),
    ("moe", _EP, 2, {}, "rows lie by rank, not by expert"),
    ("moe", _TP_EP, 2, {}, "balance is of one rank's tokens"),
    ("moe", layout(), 1, {}, "losses of balance are not attached"),
    ("moe", layout(), 1, {}, "routers learn by balance alone"),
    ("moe-biased", layout(), 1, {}, "biases do not move"),
    ("moe-biased", _TP_EP, 2, {}, "loads are of one rank's tokens"),
    ("moe-biased", layout(), 1, FULL, "loads are counted in forward"),
    ("moe-global", _EP, 2, {}, "loads of the step before are not there"),
    ("moe-capped", _TP_EP, 2, {}, "capacities are of one rank's tokens"),
    ("gpt-oss", layout(cp=2), 2, {}, "the ring drops sinks"),
    ("llama", layout(cp=2), 2, {}, "the ring doubles gradients of keys"),
]

# In CI: every mechanism once.
_SHORT = [
    Case("gpt", layout(2), 2),
    Case("llama", layout(2, sp=True), 2, PAIRS),
    Case("gpt", layout(1, 2, "zbv"), 2),
    Case("neox", layout(1, 2, "interleaved"), 2),
    Case("llama-tied", layout(1, 2), 2, {**FULL, "train_iters": 3, "rampup_batch_size": (2, 2, 6)}),
    *(Case("gpt", layout(zero=stage), 2) for stage in (0, 2)),
    in_fp32(Case("neox", layout(2), 2)),
    in_fp32(Case("llama", layout(zero=3), 2)),
    apart("llama", layout(2, sp=True), 2),
    apart("gpt", layout(1, 2, "zbv"), 2),
    *unequal("gpt", layout(zero=1), 2),
    *unequal("llama", layout(2, sp=True), 2),
    *unequal("gpt", layout(1, 2, "zbv"), 2),
    Case("gpt-dropping", layout(1, 2, "interleaved"), 2),
    Case("olmo3", layout(2, sp=True), 2, PAIRS),
    Case("gpt", layout(), 1, MUON),
    Case("llama-1-group", layout(2, sp=True, zero=3), 4, MUON),
    Case("qwen3", layout(1, 2, "zbv"), 2, MUON),
    Case("gpt", layout(copies=2, zero=1), 4, MUON),
    Case("gemma3", layout(1, 2, "interleaved"), 2),
    Case("llama-mup", layout(2, sp=True, zero=3), 4),
    Case("gpt-mup", layout(1, 2, "zbv"), 2, MUON),
    Case("qwen3", layout(2, zero=3), 4),
    Case("olmo2-1-group", layout(4, sp=True), 4, FULL),
    Case("gpt-changed", layout(2, 2, sp=True), 4),
    Case("deepseek", layout(2, sp=True), 2, SELECTIVE),
    Case("deepseek", layout(ep=2), 2),
    Case("deepseek", layout(1, 2, "zbv"), 2),
    Case("gpt-oss", layout(2, sp=True), 2, SELECTIVE),
    Case("gpt-oss", layout(1, 2, "zbv"), 2),
    *(Case(model, layout(2, sp=True), 2, MUON) for model in ("deepseek", "gpt-oss")),
    apart("gpt-oss", layout(ep=2), 2),
    # one token more: on the last stage, with an embedding of its own there
    Case("deepseek-mtp", layout(2, sp=True, ep=2), 2, SELECTIVE),
    apart("deepseek-mtp", layout(2), 2),
    Case("deepseek-mtp", layout(1, 2), 2, data="unequal-labels"),
    Case("deepseek-mtp", layout(1, 2, "zbv", ep=2), 4, FULL),
    Case("deepseek-mtp", layout(2, zero=3, ep=2), 4, MUON),
    Case("deepseek-mtp", layout(1, 2), 2, sabotage="tied copies are not summed"),
    apart("gemma3", layout(2), 2),
    Case("gpt", layout(cp=2), 2, FULL),
    Case("llama", layout(cp=2, comm="a2a"), 2, SELECTIVE),
    apart("llama", layout(cp=2), 2),
    Case("moe-biased", layout(cp=2, ep=2), 2),
    Case("gpt", layout(zero=0, cp=2), 4),
    Case("gemma3", layout(1, 2, "zbv", cp=2), 4),
    *unequal("qwen3", layout(2, sp=True, cp=2), 4),
    Case("llama-1-group", layout(cp=4, comm="a2a"), 4),
    Case("gpt", layout(2), 2, sabotage="tensor-parallel replicas are not summed"),
    Case("gpt", layout(1, 2), 2, sabotage="tied copies are not summed"),
    Case("llama", layout(4, sp=True), 4, PAIRS),
    Case("gpt", layout(1, 4), 4),
    Case("gpt-untied", layout(2, sp=True, zero=3), 4, FULL),
    Case("llama", layout(copies=2, zero=3), 4),
    Case("gpt", layout(2, 2, "1f1b", sp=True), 8, SELECTIVE),
    # experts over data-parallel and over tensor-parallel ranks, each whole or split
    Case("moe", layout(ep=2, zero=3), 2, SELECTIVE),
    Case("moe-biased", layout(ep=2), 2, MUON, data="one-label"),
    Case("moe-biased", layout(2, sp=True, ep=2), 2, data="unequal-labels"),
    apart("moe", layout(2), 2),
    Case("moe-biased", layout(1, 2), 2),
    Case("moe-biased", layout(1, 2, "zbv", ep=2), 4),
    Case("moe-biased", layout(2, sp=True, ep=2, etp=2), 4, FULL),
    Case("moe", layout(copies=2, zero=3, ep=2), 4, MUON),
    # choices above a capacity, which is of whole samples wherever their tokens are
    Case("moe-capped", layout(2, sp=True, ep=2), 2, FULL),
    Case("moe-capped", layout(2, sp=True, ep=2, cp=2), 4, PAIRS),
    # loads of the step before, of all ranks
    Case("moe-global", layout(ep=2), 2, PAIRS),
    Case("moe-global", layout(1, 2, "zbv", ep=2), 4),
    *(
        Case(model, how, ranks, mode, sabotage=mistake)
        for model, how, ranks, mode, mistake in _MISTAKES
    ),
]
SHORT = named([short(case) for case in _SHORT])


def with_fused(cases: dict[str, Case]) -> dict[str, Case]:
    """The same, computed with the fused kernels."""
    fused = [replace(case, kernels="fused") for case in cases.values()]
    return {words(case): case for case in fused}


# In CI: every operation, split and whole, recomputed and kept.
_SHORT_FUSED = [
    Case("llama", layout(2, sp=True), 2, {**PAIRS, **SELECTIVE}),
    Case("neox", layout(1, 2, "zbv"), 2),
    Case("gpt", layout(2, 2, "1f1b", sp=True), 8, FULL),
]
SHORT_FUSED = with_fused(named([short(case) for case in _SHORT_FUSED]))

_SCHEDULES = ("1f1b", "interleaved", "zbv")
_FAMILIES = ("gpt", "neox", "llama")
_MODERN = ("qwen2", "qwen3", "olmo2", "olmo3", "gemma3", "gpt-changed")
LONG = named(
    [
        Case("gpt", layout(), 1),
        # two ranks: every model split and piped, all stages of ZeRO, recomputation, larger
        # micro-batches, a batch that grows
        *(
            Case(model, layout(2, sp=sp), 2)
            for model in (
                "gpt",
                "gpt-untied",
                "neox",
                "neox-tied",
                "llama",
                "llama-tied",
                "llama-1-group",
            )
            for sp in (False, True)
        ),
        *(
            Case(model, layout(1, 2, schedule), 2)
            for model in (*_FAMILIES, "gpt-untied", "neox-tied")
            for schedule in _SCHEDULES
        ),
        *(Case(model, layout(zero=stage), 2) for model in _FAMILIES for stage in range(4)),
        *(
            Case(model, layout(2, sp=True), 2, mode)
            for model in _FAMILIES
            for mode in (FULL, SELECTIVE, {**FULL, "recompute_every": 2})
        ),
        *(
            Case("gpt", layout(1, 2, schedule), 2, mode)
            for schedule in _SCHEDULES
            for mode in (FULL, SELECTIVE)
            if (schedule, mode) != ("zbv", SELECTIVE)
        ),
        *(
            Case("llama", each, 2, {"micro_batch_size": 2})
            for each in (layout(2, sp=True), layout(1, 2), layout(zero=1))
        ),
        *(
            Case("gpt", each, 2, {"rampup_batch_size": (2, 2, 12)})
            for each in (layout(2), layout(1, 2), layout(1, 2, "zbv"), layout(zero=2))
        ),
        # documents apart and masked labels; dropout, where random numbers begin anew at each chunk
        # of a micro-batch, whoever computes it; compiled blocks
        *(apart(model, layout(2, sp=sp), 2) for model in _FAMILIES for sp in (False, True)),
        *(
            apart(model, layout(1, 2, schedule), 2)
            for model in _FAMILIES
            for schedule in _SCHEDULES
        ),
        *(apart("gpt", layout(zero=stage), 2) for stage in range(4)),
        Case("gpt-dropping", layout(), 1),
        *(Case("gpt-dropping", layout(zero=stage), 2) for stage in range(4)),
        *(Case("gpt-dropping", layout(1, 2, schedule), 2) for schedule in _SCHEDULES),
        *(Case("gpt-dropping", layout(1, 2, schedule), 2, FULL) for schedule in _SCHEDULES),
        Case("gpt-dropping", layout(1, 2), 2, SELECTIVE),
        Case("gpt", layout(2), 2, COMPILE),
        *(
            Case(model, layout(2, sp=True), 2, {**COMPILE, **SELECTIVE})
            for model in ("gpt", "llama")
        ),
        *(Case("gpt", layout(1, 2, schedule), 2, COMPILE) for schedule in ("1f1b", "interleaved")),
        Case("neox", layout(1, 2, "interleaved"), 2, {**COMPILE, **FULL}),
        *(Case("gpt", layout(zero=stage), 2, COMPILE) for stage in range(4)),
        # Muon: whole matrices, wherever their parts lie
        *(Case(model, layout(zero=stage), 2, MUON) for model in _FAMILIES for stage in range(4)),
        *(Case(model, layout(2, sp=True), 2, MUON) for model in (*_FAMILIES, *_MODERN)),
        *(Case("qwen3", layout(1, 2, schedule), 2, MUON) for schedule in _SCHEDULES),
        *(Case("gpt", layout(1, 2), 2, {**MUON, **mode}) for mode in (FULL, SELECTIVE, COMPILE)),
        *(Case(model, layout(4, sp=True), 4, MUON) for model in ("llama-1-group", "olmo2")),
        *(Case("llama", layout(2, zero=stage), 4, MUON) for stage in range(4)),
        *(Case("llama", layout(copies=2, zero=stage), 4, MUON) for stage in (1, 2, 3)),
        Case("llama", layout(2, 2, "zbv", sp=True), 8, MUON),
        Case("gpt", layout(2, copies=2, zero=3), 8, MUON),
        # norms of queries and keys, windows, norms after attention and MLP
        *(Case(model, layout(2, sp=sp), 2) for model in _MODERN for sp in (False, True)),
        *(Case(model, layout(1, 2, schedule), 2) for model in _MODERN for schedule in _SCHEDULES),
        *(Case(model, layout(zero=stage), 2) for model in _MODERN for stage in range(4)),
        *(
            Case(model, layout(2, sp=True), 2, mode)
            for model in _MODERN
            for mode in (FULL, SELECTIVE)
        ),
        *(apart(model, layout(2, sp=True), 2) for model in _MODERN),
        *(Case(model, layout(4, sp=True), 4) for model in (*_MODERN, "olmo2-1-group")),
        *(Case(model, layout(2, 2, "zbv", sp=True), 8) for model in _MODERN),
        *(
            Case(model, how, 2, optimizer)
            for model in ("llama-mup", "gpt-mup")
            for how in (layout(2, sp=True), layout(1, 2, "zbv"), layout(zero=3))
            for optimizer in ({}, MUON)
        ),
        # tokens of a sample on several ranks
        *(
            Case(model, layout(cp=2), 2)
            for model in (*_FAMILIES, *_MODERN, "gpt-mup", "moe", "moe-biased")
        ),
        *(Case(model, layout(cp=2, comm="a2a"), 2) for model in ("gpt", "llama", "gemma3", "moe")),
        *(apart(model, layout(cp=2), 2) for model in ("gpt", "llama", "gemma3")),
        apart("llama", layout(cp=2, comm="a2a"), 2),
        *unequal("gpt", layout(cp=2), 2),
        *unequal("llama", layout(cp=2, comm="a2a"), 2),
        *(Case("gpt", layout(zero=stage, cp=2), 2) for stage in (0, 2, 3)),
        *(Case("llama", layout(cp=2), 2, mode) for mode in (FULL, SELECTIVE, PAIRS, MUON)),
        Case("moe-biased", layout(ep=2, cp=2), 2),
        *(Case(model, layout(cp=4), 4) for model in ("gpt", "llama-1-group")),
        Case("llama-1-group", layout(cp=4, comm="a2a"), 4),
        *(Case("qwen3", layout(2, sp=sp, cp=2), 4) for sp in (False, True)),
        Case("qwen3", layout(2, sp=True, cp=2, comm="a2a"), 4),
        *(Case("gpt", layout(1, 2, schedule, cp=2), 4) for schedule in _SCHEDULES),
        Case("gemma3", layout(1, 2, "zbv", cp=2, comm="a2a"), 4),
        apart("llama", layout(1, 2, "zbv", cp=2), 4),
        *(Case("gpt", layout(zero=stage, cp=2), 4) for stage in range(4)),
        *(Case("gpt", layout(copies=2, zero=stage, cp=2), 4) for stage in (1, 3)),
        *(Case("moe", layout(ep=ep, cp=2), 4) for ep in (2, 4)),
        Case("moe", layout(2, sp=True, ep=2, cp=2), 4, PAIRS),
        Case("moe-biased", layout(2, ep=2, etp=2, cp=2), 4, PAIRS),
        # choices above a capacity dropped; balance by the loads of the step before
        *(
            Case(model, layout(ep=2), 2, mode)
            for model in ("moe-capped", "moe-global")
            for mode in (FULL, PAIRS)
        ),
        *(
            Case(model, layout(1, 2, schedule), 2)
            for model in ("moe-capped", "moe-global")
            for schedule in ("1f1b", "zbv")
        ),
        *(Case("moe-capped", layout(2, sp=sp, ep=2), 2, SELECTIVE) for sp in (False, True)),
        Case("moe-global", layout(2, sp=True, ep=2), 2),
        Case("moe-capped", layout(2, sp=True, ep=2, cp=2), 4, PAIRS),
        # four ranks: fewer key-value heads than ranks, uneven stages, HSDP, two kinds together
        *(
            Case(model, layout(4, sp=sp), 4)
            for model in (*_FAMILIES, "llama-1-group")
            for sp in (False, True)
        ),
        *(Case(model, layout(1, 4), 4) for model in ("gpt", "neox", "llama-tied")),
        *(
            Case(model, layout(1, 4, schedule), 4)
            for model in ("gpt-deep", "llama-deep")
            for schedule in ("interleaved", "zbv")
        ),
        *(
            Case(model, layout(copies=2, zero=stage), 4)
            for model in ("gpt", "llama")
            for stage in (1, 2, 3)
        ),
        *(Case("gpt", layout(2, sp=True, zero=stage), 4) for stage in range(4)),
        *(Case("neox", layout(1, 2, zero=stage), 4) for stage in (0, 1, 3)),
        *(
            Case(model, layout(2, 2, schedule, sp=True), 4)
            for model in ("gpt", "llama-1-group")
            for schedule in _SCHEDULES
        ),
        *(apart("llama", layout(2, 2, schedule, sp=True), 4) for schedule in _SCHEDULES),
        *(Case("gpt-dropping", layout(1, 2, schedule), 4) for schedule in _SCHEDULES),
        Case("gpt-dropping", layout(1, 4), 4),
        Case("gpt-dropping", layout(copies=2, zero=3), 4),
        Case("llama", layout(2, 2, sp=True), 4, {**COMPILE, **SELECTIVE}),
        # eight: three dimensions, and more
        *(
            Case(model, layout(2, 2, schedule, sp=True), 8)
            for model in _FAMILIES
            for schedule in _SCHEDULES
        ),
        *(Case("gpt", layout(2, 2, "1f1b", zero=stage), 8) for stage in (0, 3)),
        Case("llama", layout(2, 2, "interleaved", sp=True, zero=3), 8, FULL),
        Case("llama", layout(2, 2, "zbv", sp=True), 8, FULL),
        *(
            Case("gpt", each, 8)
            for each in (
                layout(2, copies=2, zero=3),
                layout(1, 2, copies=2, zero=1),
                layout(4, 2, sp=True),
                layout(1, 4),
            )
        ),
    ],
    global_batch_size=4,
)


def limit(case: Case) -> float:
    """What losses, norms and gradients of any step may be apart."""
    if case.precision != "fp32":
        return EXACT
    # norms of a few channels, and of what a sublayer adds: fp32 rounds them more
    return 2 * SMOKE if case.model in (*_MODERN, "olmo2-1-group") else SMOKE


def main() -> None:
    cases = {
        name: case
        for name, case in (SHORT if "--short" in sys.argv else LONG).items()
        if not case.sabotage and case.precision == "fp64"
    }
    print(
        "| layout | ranks | loss | norm | gradient | fp32: loss | norm | gradient"
        " |\n|---|---|---|---|---|---|---|---|",
        flush=True,
    )
    wrong = []
    for ranks in sorted({case.ranks for case in cases.values()}):
        chosen = {name: case for name, case in cases.items() if case.ranks == ranks}
        both = {**chosen, **{f"{name}, fp32": in_fp32(case) for name, case in chosen.items()}}
        with tempfile.TemporaryDirectory() as folder:
            found = compare(both, Path(folder))
        for name in chosen:
            numbers = [
                f"{number:.0e}"
                for a in (found[name], found[f"{name}, fp32"])
                for number in (a.loss, a.norm, a.gradient)
            ]
            print(f"| {name} | {ranks} | {' | '.join(numbers)} |", flush=True)
        wrong += [
            name
            for name, a in found.items()
            if not max(a.loss, a.norm, a.gradient) <= limit(both[name])
        ]
    sys.exit(f"not equal: {', '.join(wrong)}" if wrong else 0)


if __name__ == "__main__":
    main()
