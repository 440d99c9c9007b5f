"""Which optimizer updates each parameter, what it keeps and what it costs, as a table."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Console
from rich.table import Table

from trainkit.cli.config.render_plan import gib, run_lengths
from trainkit.jobs.optimizers import Role, kept_of, rate_factor, scalar_rate
from trainkit.jobs.schema import Job
from trainkit.plan.parameter_shapes import (
    Weight,
    block_matrices,
    chunk_units,
    further_matrices,
    layers_by_kind,
    matrices_of,
    newton_schulz_flops,
)
from trainkit.plan.planner import Plan

NAMES = {"adam": "AdamW", "sgd": "SGD", "muon": "Muon"}
OTHERS: dict[Role, str] = {"table": "embeddings, head", "vector": "norms, biases"}


def _rows(job: Job, vocab_size: int) -> Iterator[tuple[str, Role, str, int]]:
    """(parameters, their role, matrices that one is made of, elements of all)."""
    kinds = [
        (layers, matrices_of(job.model, sparse=sparse))
        for sparse, layers in layers_by_kind(job.model).items()
    ]
    for name, weight in block_matrices(job.model).items():
        layers = sum(count for count, matrices in kinds if name in matrices)
        shapes = [_size(rows, weight) for rows in weight.matrix_rows]
        yield f"layers.*.{name}", "matrix", run_lengths(shapes), layers * weight.numbers()
    for name, weight in further_matrices(job.model).items():
        yield name, "matrix", _size(weight.rows, weight), weight.numbers()
    weights: list[Weight] = [w for unit in chunk_units(job.model, vocab_size) for w in unit]
    for role, name in OTHERS.items():
        yield name, role, "", sum(w.numbers() for w in weights if w.role == role)


def _size(rows: int, weight: Weight) -> str:
    """Of a matrix, (out, in)."""
    first, second = (weight.columns, rows) if weight.transposed else (rows, weight.columns)
    return f"{first:,} x {second:,}"


def print_optimizer(console: Console, job: Job, plan: Plan) -> None:
    """What `--explain optimizer` prints."""
    if plan.vocab_size is None or plan.hardware_flops_per_token is None:
        console.print("optimizer: not known before the vocabulary is")
        return
    training = job.training
    table = Table(box=None)
    for heading in ("parameters", "optimizer", "rate", "matrices of each", "elements", "state"):
        numbers = heading in ("rate", "elements", "state")
        table.add_column(heading, justify="right" if numbers else "left", overflow="fold")
    for name, role, shapes, elements in _rows(job, plan.vocab_size):
        own = "adam" if training.optimizer == "muon" and role != "matrix" else training.optimizer
        state = 4 * len(kept_of(training, role)) * elements
        factor = rate_factor(training, role, job.model.width_factor)
        if own != training.optimizer:
            factor *= scalar_rate(training)
        rate = f"x {factor:.4g}"
        table.add_row(name, NAMES[own], rate, shapes, f"{elements:,}", gib(state))
    console.print(table)
    if plan.memory:
        rank = plan.memory.fullest
        console.print(
            f"on the fullest rank: state {gib(rank.optimizer_bytes)}, buffers of gradients or of"
            f" an update, whichever are larger, {gib(rank.buffer_bytes)}"
        )
    if flops := sum(newton_schulz_flops(job.model, training)):
        tokens = plan.global_batch_size * job.model.seq_length
        part = flops / (plan.hardware_flops_per_token * tokens)
        console.print(
            f"Newton-Schulz iterations: {flops / 1e12:,.3g} TFLOP a step, {part:.2%} of forward and"
            " backward; of each parameter on one of the ranks that hold parts of it"
        )
