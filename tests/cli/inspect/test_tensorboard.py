"""`runs --table` and the line that brings TensorBoard to one's own machine."""

from __future__ import annotations

import json
import statistics
from pathlib import Path

import pytest

from tests.conftest import Project
from trainkit.cli.inspect.tensorboard import tunnel_command

STEP = {
    "consumed_samples": 8,
    "tokens": 128,
    "lr": 1e-3,
    "grad_norm": 1.0,
    "skipped_iterations": 0,
    "nan_iterations": 0,
}


def write_steps(run: Path) -> None:
    """A slow first step and one without speed: medians are over what there is."""
    with open(run / "metrics.jsonl", "w") as file:
        for step, speed in ((1, 10.0), (2, 1000.0), (3, 1200.0)):
            memory = {"max_allocated": step, "max_reserved": 2**30 * step}
            values = {
                "step": step,
                "tokens_per_second": speed,
                "model_tflops": speed / 10,
                "elapsed_ms": 500.0,
                "lm_loss": 2.0,
                "memory_bytes": memory,
            }
            file.write(json.dumps({**STEP, **values, "mfu": None}) + "\n")


def test_the_table_has_what_the_metrics_say(project: Project) -> None:
    assert "no runs yet" in project.invoke("runs", "--table").stdout
    project.invoke(
        "train", "random", "--set", "training.train_iters=4", "--set", "training.eval_iters=0"
    )
    (run,) = project.runs()
    rows = [row for row in project.metrics(run) if "eval" not in row]
    document = project.document("runs", "--table", "--flops", "palm-6n")
    assert (document["schema"], document["flops_convention"]) == ("results/1", "palm-6n")
    (row,) = document["runs"]
    for key, name in (("tokens_per_second", "tokens_per_second"), ("model_tflops", "model_tflops")):
        assert row[key] == pytest.approx(statistics.median(r[name] for r in rows))
    assert row["seconds_per_step"] == pytest.approx(
        statistics.median(r["elapsed_ms"] for r in rows) / 1000
    )
    assert row["peak_bytes"] == max(r["memory_bytes"]["max_resident"] for r in rows)
    shape = (
        "nodes",
        "ranks",
        "tensor",
        "pipeline",
        "data",
        "micro_batch_size",
        "global_batch_size",
    )
    assert [row[key] for key in shape] == [1, 2, 1, 1, 2, 2, 8] and row["convention_tflops"] > 0
    write_steps(run)
    out = project.invoke("runs", "--table", "--job", "random").stdout
    heading, line = (text.split() for text in out.splitlines() if text.strip())
    assert heading[:4] == ["run", "job", "nodes", "ranks"] and line[0] == run.name
    assert line[2:7] == ["1", "2", "1", "x", "1"] and line[-6:] == [
        "0.5",
        "1,000",
        "100",
        "-",
        "3.00",
        "GiB",
    ], line
    (run / "plan.json").write_text("{}")
    left = project.invoke("runs", "--table")
    assert f"run {run.name} is left out" in left.stdout and "Traceback" not in left.stderr
    assert (
        "no FLOPs convention 'mine'"
        in project.invoke("runs", "--table", "--flops", "mine", exit=3).stderr
    )
    assert (
        "--flops is a column of --table"
        in project.invoke("runs", "--flops", "palm-6n", exit=3).stderr
    )


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        (
            {"SSH_CONNECTION": "198.51.100.7 51234 203.0.113.5 22", "USER": "ubuntu"},
            ["ubuntu@203.0.113.5"],
        ),
        (
            {"SSH_CONNECTION": "198.51.100.7 51234 203.0.113.5 2222", "LOGNAME": "me"},
            ["-p", "2222", "me@203.0.113.5"],
        ),
        ({"SSH_CONNECTION": "fd00::7 51234 fd00::5 22"}, ["fd00::5"]),
    ],
)
def test_the_tunnel(environment: dict[str, str], words: list[str]) -> None:
    assert tunnel_command(environment, 6006) == ["ssh", "-N", "-L", "6006:127.0.0.1:6006", *words]


def test_tensorboard_says_how_to_see_it_from_elsewhere(project: Project) -> None:
    out = project.invoke(
        "tensorboard",
        "--port",
        "7007",
        "--dry-run",
        SSH_CONNECTION="198.51.100.7 51234 203.0.113.5 22",
        USER="ubuntu",
    ).stdout
    assert (
        "from your own machine: ssh -N -L 7007:127.0.0.1:7007 ubuntu@203.0.113.5\n" in out
        and "http://127.0.0.1:7007" in out
    )
