"""The table of `runs --table`, with the columns that published results have."""

from __future__ import annotations

from collections.abc import Sequence

from rich.markup import escape

from trainkit.cli.tables import Listing
from trainkit.reports.scaling import ScalingRow
from trainkit.runs.results import RunResult

GIB = 2**30
FIRST = ("run", "job")
NUMBERS = (
    "nodes",
    "ranks",
    "TP x PP x DP",
    "micro",
    "global",
    "s/step",
    "tokens/s",
    "TFLOP/s a device",
    "MFU",
    "memory a rank",
)
PLANNED = "planned tokens/s"
CONVENTION_AT = NUMBERS.index("MFU")


def results_table(results: Sequence[RunResult], convention: str) -> Listing:
    """One row per run; "-" where nothing was logged.

    Args:
        results: the runs.
        convention: adds a column of TFLOP/s by it; "" for none.
    """
    by_convention = [f"TFLOP/s ({convention})"] if convention else []
    numbers = [*NUMBERS[:CONVENTION_AT], *by_convention, *NUMBERS[CONVENTION_AT:]]
    planned = any(result.planned_tokens_per_second for result in results)
    if planned:
        numbers.insert(numbers.index("tokens/s") + 1, PLANNED)
    drop = [PLANNED] if planned else []
    drop += ["micro", "global", "nodes", "TP x PP x DP", "memory a rank", "s/step", *by_convention]
    table = Listing(*FIRST, *numbers, right=numbers, drop=[*drop, "job", "MFU", "ranks"])
    for result in results:
        cells = [
            str(result.nodes),
            str(result.ranks),
            f"{result.tensor} x {result.pipeline} x {result.data}",
            str(result.micro_batch_size),
            _number(result.global_batch_size, ","),
            _number(result.seconds_per_step, ".3g"),
            _number(result.tokens_per_second, ",.0f"),
        ]
        if planned:
            cells.append(_planned(result))
        cells.append(_number(result.model_tflops, ".4g"))
        if convention:
            cells.append(_number(result.convention_tflops, ".4g"))
        cells += [_number(result.mfu, ".1%"), _gib(result.peak_bytes)]
        table.add_row(escape(result.run), escape(result.job), *cells)
    return table


def scaling_table(rows: Sequence[ScalingRow], convention: str) -> Listing:
    """How speed grows with nodes, a row a run.

    Args:
        rows: of `scaling_of`.
        convention: by which their TFLOP/s are counted; "": trainkit's own.
    """
    tflops = f"TFLOP/s a device ({convention})" if convention else "TFLOP/s a device"
    numbers = ("nodes", "devices", "batch", "samples/s", tflops, "speed-up", "efficiency")
    table = Listing("job", *numbers, "run", right=numbers, drop=("run", "devices"))
    for row in rows:
        cells = [
            str(row.nodes),
            str(row.ranks),
            _number(row.global_batch_size, ","),
            _number(row.samples_per_second, ",.4g"),
            _number(row.tflops, ".4g"),
            f"{row.speedup:.2f}x",
            f"{row.efficiency:.1%}",
        ]
        table.add_row(escape(row.job), *cells, escape(row.run))
    return table


def _planned(result: RunResult) -> str:
    """What the plan had said, and by how much it was wrong."""
    said = result.planned_tokens_per_second
    if said is None:
        return "-"
    if not result.tokens_per_second:
        return f"{said:,.0f}"
    return f"{said:,.0f} ({said / result.tokens_per_second - 1:+.1%})"


def _number(value: float | None, form: str) -> str:
    if value is None:
        return "-"
    return format(value, form)


def _gib(size: int | None) -> str:
    if size is None:
        return "-"
    return f"{size / GIB:,.2f} GiB"
