"""The matrix of layouts that are compared with the reference. `python -m tests.train.layout_cases [--short]` prints the table of docs/parallelism.md."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.train.layouts import Case, compare

EXACT, SMOKE = 1e-10, 1e-5  # of fp64 and of fp32
FULL: dict[str, Any] = {"recompute_granularity": "full"}
SELECTIVE: dict[str, Any] = {"recompute_granularity": "selective"}


def layout(tensor: int = 1, pipeline: int = 1, schedule: str = "1f1b", *, sp: bool = False, zero: int = 1, copies: int = 1) -> dict[str, Any]:
    """Keys of [jobs.X.parallelism]; schedule "interleaved": two chunks a stage."""
    keys: dict[str, Any] = {"tensor_model_parallel_size": tensor, "pipeline_model_parallel_size": pipeline, "sequence_parallel": sp, "zero_stage": zero}
    keys |= {"virtual_pipeline_model_parallel_size": 2} if schedule == "interleaved" else {"pipeline_schedule": schedule}
    return {**keys, "data_parallel_replicate_size": copies}


def words(case: Case) -> str:
    """A case in a few words: its name in the table."""
    p, t = case.parallelism, case.training
    tensor, pipeline = p["tensor_model_parallel_size"], p["pipeline_model_parallel_size"]
    data = case.ranks // (tensor * pipeline)
    schedule = "interleaved" if "virtual_pipeline_model_parallel_size" in p else {"1f1b": "1F1B", "zbv": "ZBV"}[p["pipeline_schedule"]]
    copies = p["data_parallel_replicate_size"]
    parts = [
        f"TP{tensor}{' + SP' if p['sequence_parallel'] else ''}" if tensor > 1 else "",
        f"PP{pipeline} {schedule}" if pipeline > 1 else "",
        (f"HSDP {copies}x{data // copies}" if copies > 1 else f"DP{data}") + f" ZeRO {p['zero_stage']}" if data > 1 else "",
        ", ".join([f"{key} {value}" for key, value in t.items() if key not in ("train_iters", "global_batch_size")]),
        case.precision if case.precision != "fp64" else "",
        case.sabotage,
    ]
    return f"{case.model}: {', '.join(part for part in parts if part) or 'one rank'}"


def named(cases: list[Case], **training: Any) -> dict[str, Case]:
    """By their words; `training` for all of them, under their own."""
    found = {words(case): Case(case.model, case.parallelism, case.ranks, {**training, **case.training}, case.precision, case.sabotage) for case in cases}
    assert len(found) == len(cases), "two cases have the same name"
    return found


# In CI: every mechanism once, three steps each.
SHORT = named(
    [
        Case("gpt", layout(2), 2),
        Case("llama", layout(2, sp=True), 2),
        Case("gpt", layout(1, 2, "zbv"), 2),
        Case("neox", layout(1, 2, "interleaved"), 2),
        Case("llama-tied", layout(1, 2), 2, {**FULL, "rampup_batch_size": (2, 2, 6)}),
        *(Case("gpt", layout(zero=stage), 2) for stage in (0, 2)),
        Case("neox", layout(2), 2, precision="fp32"),
        Case("gpt", layout(2), 2, sabotage="tensor-parallel replicas are not summed"),
        Case("gpt", layout(1, 2), 2, sabotage="tied copies are not summed"),
        Case("llama", layout(4, sp=True), 4),
        Case("gpt", layout(1, 4), 4),
        Case("gpt-untied", layout(2, sp=True, zero=3), 4, FULL),
        Case("llama", layout(copies=2, zero=3), 4),
        Case("gpt", layout(2, 2, "1f1b", sp=True), 8, SELECTIVE),
    ],
    train_iters=3,
    global_batch_size=4,
)

_SCHEDULES = ("1f1b", "interleaved", "zbv")
_FAMILIES = ("gpt", "neox", "llama")
LONG = named(
    [
        Case("gpt", layout(), 1),
        # two ranks: every model split and piped, all stages of ZeRO, recomputation, larger micro-batches, a batch that grows
        *(
            Case(model, layout(2, sp=sp), 2)
            for model in ("gpt", "gpt-untied", "neox", "neox-tied", "llama", "llama-tied", "llama-1-group")
            for sp in (False, True)
        ),
        *(Case(model, layout(1, 2, schedule), 2) for model in (*_FAMILIES, "gpt-untied", "neox-tied") for schedule in _SCHEDULES),
        *(Case(model, layout(zero=stage), 2) for model in _FAMILIES for stage in range(4)),
        *(Case(model, layout(2, sp=True), 2, mode) for model in _FAMILIES for mode in (FULL, SELECTIVE, {**FULL, "recompute_every": 2})),
        *(Case("gpt", layout(1, 2, schedule), 2, mode) for schedule in _SCHEDULES for mode in (FULL, SELECTIVE) if (schedule, mode) != ("zbv", SELECTIVE)),
        *(Case("llama", each, 2, {"micro_batch_size": 2}) for each in (layout(2, sp=True), layout(1, 2), layout(zero=1))),
        *(Case("gpt", each, 2, {"rampup_batch_size": (2, 2, 12)}) for each in (layout(2), layout(1, 2), layout(1, 2, "zbv"), layout(zero=2))),
        *(Case(model, each, 2, precision="fp32") for model in _FAMILIES for each in (layout(2, sp=True), layout(1, 2), layout(zero=3))),
        # four ranks: fewer key-value heads than ranks, uneven stages, HSDP, two kinds together
        *(Case(model, layout(4, sp=sp), 4) for model in (*_FAMILIES, "llama-1-group") for sp in (False, True)),
        *(Case(model, layout(1, 4), 4) for model in ("gpt", "neox", "llama-tied")),
        *(Case(model, layout(1, 4, schedule), 4) for model in ("gpt-deep", "llama") for schedule in ("interleaved", "zbv")),
        *(Case(model, layout(copies=2, zero=stage), 4) for model in ("gpt", "llama") for stage in (1, 2, 3)),
        *(Case("gpt", layout(2, sp=True, zero=stage), 4) for stage in range(4)),
        *(Case("neox", layout(1, 2, zero=stage), 4) for stage in (0, 1, 3)),
        *(Case(model, layout(2, 2, schedule, sp=True), 4) for model in ("gpt", "llama-1-group") for schedule in _SCHEDULES),
        # eight: three dimensions, and more
        *(Case(model, layout(2, 2, schedule, sp=True), 8) for model in _FAMILIES for schedule in _SCHEDULES),
        *(Case("gpt", layout(2, 2, "1f1b", zero=stage), 8) for stage in (0, 3)),
        Case("llama", layout(2, 2, "interleaved", sp=True, zero=3), 8, FULL),
        Case("llama", layout(2, 2, "zbv", sp=True), 8, FULL),
        *(Case("gpt", each, 8) for each in (layout(2, copies=2, zero=3), layout(1, 2, copies=2, zero=1), layout(4, 2, sp=True), layout(1, 4))),
    ],
    global_batch_size=4,
)


def limit(case: Case) -> float:
    """What losses and gradients may be apart."""
    return SMOKE if case.precision == "fp32" else EXACT


def main() -> None:
    cases = {name: case for name, case in (SHORT if "--short" in sys.argv else LONG).items() if not case.sabotage}
    print("| layout | ranks | loss | norm | gradient |\n|---|---|---|---|---|", flush=True)
    wrong = []
    for ranks in sorted({case.ranks for case in cases.values()}):
        chosen = {name: case for name, case in cases.items() if case.ranks == ranks}
        with tempfile.TemporaryDirectory() as folder:
            found = compare(chosen, Path(folder))
        for name, a in found.items():
            print(f"| {name} | {ranks} | {a.loss:.0e} | {a.norm:.0e} | {a.gradient:.0e} |", flush=True)
        wrong += [name for name, a in found.items() if not max(a.loss, a.norm, a.gradient) <= limit(chosen[name])]
    sys.exit(f"not equal: {', '.join(wrong)}" if wrong else 0)


if __name__ == "__main__":
    main()
