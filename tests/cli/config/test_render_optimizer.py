"""Which optimizer updates what: the plan says what the trainer does, each parameter once."""

from __future__ import annotations

import io
import re
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from tests.train.plain_loop import MODELS, VOCAB, job_of
from trainkit.cli.config.render_optimizer import print_optimizer
from trainkit.jobs.optimizers import kept_of, role_of
from trainkit.plan.planner import make_plan
from trainkit.train.model.transformer import build_on_meta


def page(model: str, **training: Any) -> list[list[str]]:
    """Cells of the table's rows, and the lines below it."""
    job = job_of(model, 1, Path(), {}, **training)
    console = Console(file=io.StringIO(), width=200)
    print_optimizer(console, job, make_plan(job, VOCAB))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    return [re.split(r" {2,}", line.strip()) for line in text.splitlines()]


@pytest.mark.parametrize("model", MODELS)
def test_each_parameter_once_and_as_the_trainer_has_it(model: str) -> None:
    _, *rows, memory, flops = page(model, optimizer="muon")
    found = dict(build_on_meta(MODELS[model], VOCAB).named_parameters())
    by_muon = {
        re.sub(r"\.\d+\.", ".*.", n) for n, p in found.items() if role_of(n, p.dim()) == "matrix"
    }
    assert {row[0] for row in rows if row[1] == "Muon"} == by_muon
    assert [row[:2] for row in rows[-2:]] == [
        ["embeddings, head", "AdamW"],
        ["norms, biases", "AdamW"],
    ]
    training = job_of(model, 1, Path(), {}, optimizer="muon").training
    elements = [int(row[-2].replace(",", "")) for row in rows]
    assert sum(elements) == sum(p.numel() for p in found.values())
    kept = sum(p.numel() * len(kept_of(training, role_of(n, p.dim()))) for n, p in found.items())
    matrices = sum(elements[:-2])
    assert kept == matrices + 2 * sum(elements[-2:])
    assert memory[0].startswith("on the fullest rank: state ")
    assert flops[0].startswith("Newton-Schulz iterations: ")


def test_fused_projections_are_taken_apart() -> None:
    shapes = {row[0].split("*.")[-1]: row[3] for row in page("llama", optimizer="muon")[1:5]}
    assert shapes == {
        "attention.qkv.weight": "32 x 32, 16 x 32 x2",
        "mlp.gate_up.weight": "72 x 32 x2",
        "attention.out.weight": "32 x 32",
        "mlp.down.weight": "32 x 72",
    }


def test_one_optimizer_for_all() -> None:
    _, *rows, memory = page("gpt")
    assert {row[1] for row in rows} == {"AdamW"} and memory[0].startswith("on the fullest rank")
    assert {row[2] for row in rows} == {"x 1"}
    _, *rows, _ = page("llama-mup")
    assert [row[2] for row in rows] == ["x 0.25"] * 4 + ["x 1"] * 2
