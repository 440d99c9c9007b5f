"""The scaling table, by the numbers that Lambda's document has."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conftest import Project
from trainkit.base.errors import ConfigError
from trainkit.cli.inspect.runs import scaling_table
from trainkit.reports.scaling import draw_scaling, scaling_of
from trainkit.runs.summary import RunResult

# nodes of eight A100: samples/s, TFLOPs (LambdaLabsML/examples, gpt-neox-training, README)
PUBLISHED = {1: (6.381, 127.2), 2: (9.074, 90.3), 3: (9.02, 59.8)}


def result(nodes: int, samples: float | None, tflops: float, job: str = "neox-9b") -> RunResult:
    return RunResult(
        run=f"{job}-{nodes}",
        job=job,
        state="succeeded",
        nodes=nodes,
        ranks=8 * nodes,
        device="A100",
        tensor=2,
        pipeline=4,
        data=nodes,
        zero_stage=1,
        micro_batch_size=4,
        global_batch_size=128,
        seconds_per_step=None,
        tokens_per_second=None,
        samples_per_second=samples,
        planned_tokens_per_second=None,
        model_tflops=tflops / 2,
        mfu=None,
        peak_bytes=None,
        convention_tflops=tflops,
    )


def test_efficiency_is_over_the_smallest_of_the_same_job(tmp_path: Path) -> None:
    runs = [result(nodes, *numbers) for nodes, numbers in reversed(PUBLISHED.items())]
    runs += [result(3, 4.728, 63.2, "neox-20b"), result(4, None, 0.0, "neox-20b")]
    rows = scaling_of(runs, "gpt-neox-2022")
    assert [(row.job, row.nodes) for row in rows] == [
        *(("neox-9b", nodes) for nodes in PUBLISHED),
        ("neox-20b", 3),
    ]
    assert [row.speedup for row in rows] == pytest.approx([1, 1.422, 1.4136, 1], rel=1e-3)
    assert [row.efficiency for row in rows] == pytest.approx([1, 0.711, 0.4712, 1], rel=1e-3)
    assert [row.tflops for row in rows] == [127.2, 90.3, 59.8, 63.2]
    cells = [cell.plain for cell in scaling_table(rows, "gpt-neox-2022").rows[1]]
    assert cells == ["neox-9b", "2", "16", "128", "9.074", "90.3", "1.42x", "71.1%", "neox-9b-2"]
    picture = tmp_path / "scaling.svg"
    draw_scaling(rows, picture)
    assert "71%" in picture.read_text() and "neox-20b" in picture.read_text()
    with pytest.raises(ConfigError, match="no run has logged a speed"):
        draw_scaling([], picture)


def test_the_task(project: Project) -> None:
    assert project.document("runs", "--table", "--scaling")["runs"] == []
    wrong = project.invoke("runs", "--scaling", exit=3)
    assert "--scaling is a form of --table" in wrong.stderr
