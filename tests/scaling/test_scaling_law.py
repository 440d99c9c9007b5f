"""Runs as points, what the law refuses, and the task."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from tests.conftest import Project
from tests.scaling.made_runs import TRUE, drawn, ladder, make_run
from trainkit.base.errors import ConfigError
from trainkit.experiment.sweep.record import Member, new_record
from trainkit.jobs.load import load
from trainkit.runs.folder import RunFolder
from trainkit.scaling.law import Law
from trainkit.scaling.points import MeasuredRuns, ScalingPoint, read_points
from trainkit.scaling.report import ScalingLaw, scaling_law

TINY = Law(E=1.0, A=20.0, B=40.0, alpha=0.3, beta=0.4)


def measured(points: Sequence[ScalingPoint]) -> MeasuredRuns:
    return MeasuredRuns(points, "validation_loss", {"dataset": "lines"})


def isoflop(edge: float = 1.0) -> list[ScalingPoint]:
    """Three budgets, six sizes each about the best; `edge`: times larger ones."""
    points: list[ScalingPoint] = []
    for budget in (1e18, 1e19, 1e20):
        best, _ = TRUE.best(budget)
        for part in (0.3, 0.5, 0.8, 1.2, 2.0, 3.0):
            size = round(edge * part * best)
            tokens = round(budget / 6 / size)
            loss = TRUE.loss(size, tokens) * (1 + 0.0005 * (-1) ** len(points))
            points.append(ScalingPoint(f"r{len(points)}", size, tokens, budget, loss))
    return points


def of_ladder(noise: float = 0.003) -> list[ScalingPoint]:
    return [
        ScalingPoint(f"r{number}", round(size), round(tokens), 6 * size * tokens, loss)
        for number, (size, tokens, loss) in enumerate(zip(*drawn(3, noise), strict=True))
    ]


def test_parabolas_find_the_best_sizes() -> None:
    law = scaling_law(measured(isoflop()))
    assert law.isoflops is not None
    exact = TRUE.beta / (TRUE.alpha + TRUE.beta)
    assert law.isoflops.a == pytest.approx(exact, abs=0.02)
    assert law.isoflops.a + law.isoflops.b == pytest.approx(1, abs=1e-6)
    low, high = law.intervals["a"]
    assert low <= exact <= high
    for each in law.isoflops.parabolas:
        assert each.parameters == pytest.approx(TRUE.best(each.flops)[0], rel=0.1)
        assert 6 * each.parameters * each.tokens == pytest.approx(each.flops, rel=1e-6)
    assert scaling_law(measured(of_ladder())).isoflops is None


def test_a_parabola_whose_least_is_at_its_edge_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"at 1e\+18 FLOPs the loss has no least between"):
        scaling_law(measured(isoflop(edge=8.0)))


@pytest.mark.parametrize(
    ("points", "said"),
    [
        (of_ladder()[:2], "2 runs fix no law of 5 numbers: it needs 7"),
        (of_ladder()[1::3] * 2, "all runs have about 20 tokens to a parameter"),
        (of_ladder()[:6] + of_ladder()[:3], "fewer than three numbers of parameters"),
    ],
)
def test_points_that_fix_no_law(points: list[ScalingPoint], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        scaling_law(measured(points))


@pytest.mark.parametrize(
    "loss",
    [
        lambda _: 3.0,
        lambda point: 1.5 + 40 / point.tokens**0.3,
        lambda point: 1.5 + 40 / point.parameters**0.3,
    ],
)
def test_losses_that_tell_nothing(loss: Callable[[ScalingPoint], float]) -> None:
    """Exponents at their bound, where intervals would be narrow."""
    noisy = [
        replace(each, loss=loss(each) * each.loss / TRUE.loss(each.parameters, each.tokens))
        for each in of_ladder()
    ]
    with pytest.raises(ConfigError, match=r"do not tell what more (parameters|tokens) do"):
        scaling_law(measured(noisy))


def test_a_loss_is_said_as_far_as_the_interval_can_say() -> None:
    law = scaling_law(measured(of_ladder()))
    near = law.predict(1.2e9, 2.4e10)
    assert near.low <= TRUE.loss(1.2e9, 2.4e10) <= near.high
    assert near.high - near.low < 0.1 * near.loss
    with pytest.raises(ConfigError, match=r"wider than 10% .*\n.*largest measured has 600,000,000"):
        scaling_law(measured(of_ladder(noise=0.03))).predict(7e13, 1e15)


def runs_in(project: Project) -> list[RunFolder]:
    jobs = load(project.path)
    return [make_run(jobs, "random", values, TINY.loss) for values in ladder()]


def test_a_sweep_becomes_a_law(project: Project) -> None:
    jobs = load(project.path)
    folders = runs_in(project)
    members = [
        Member(number, values, run.id)
        for number, (values, run) in enumerate(zip(ladder(), folders, strict=True), 1)
    ]
    new_record(jobs.root, "random", [], "x", members, [])
    picture = ("--picture", "law.svg", "--predict", "40000,100000")
    printed = project.invoke("scaling-law", "random", *picture, "--json")
    value = json.loads(printed.stdout)
    law = ScalingLaw.from_file(project.path / "scaling-law.json")
    assert value["schema"] == "scaling-law/1" and len(law.points) == 9
    assert vars(law.law) == pytest.approx(vars(TINY), rel=1e-3)
    assert {point.run for point in law.points} == {run.id for run in folders}
    assert value["predictions"][0]["loss"] == pytest.approx(TINY.loss(40000, 100000), rel=1e-4)
    assert value["points"][0]["tokens"] == 40 * 8 * 16
    assert "least loss of a budget" in (project.path / "law.svg").read_text()
    page = project.invoke("scaling-law", ",".join(run.id for run in folders)).stdout
    assert "alpha" in page and "approach 2 needs two budgets" in page
    said = project.invoke("scaling-law", "random", "--write", "jobs.toml", exit=3).stderr
    assert "'jobs.toml' does not end in .json" in said
    new_record(jobs.root, "text", [], "y", [Member(1, {"training.lr": 0.1})], [])
    said = project.invoke("scaling-law", "text", exit=3).stderr
    assert "text: lr=0.1 has no run yet" in said
    assert (
        "--predict 7: expected"
        in project.invoke("scaling-law", "random", "--predict", "7", exit=1).stderr
    )


def test_runs_that_are_no_points_are_named(project: Project) -> None:
    jobs = load(project.path)
    good = make_run(jobs, "random", {}, TINY.loss)
    failed = make_run(jobs, "random", {}, TINY.loss, "user")
    risen = make_run(jobs, "random", {}, lambda *_: 9.5)
    with pytest.raises(ConfigError) as caught:
        read_points([good, failed, risen])
    assert [problem.message for problem in caught.value.list] == [
        f"run {failed.id} has not ended well: failed at step 30",
        f"run {risen.id} has diverged: loss 9.5 after 9",
    ]
    with risen.metrics.open("a") as file:
        file.write('{"step": 30, "consumed_samples": 240, "eval": "valid", "lm_loss": null}\n')
    with pytest.raises(ConfigError, match=f"run {risen.id} has no loss at its end"):
        read_points([risen])


def test_runs_of_other_data_are_named(project: Project) -> None:
    jobs = load(project.path)
    good = make_run(jobs, "random", {}, TINY.loss)
    longer = make_run(jobs, "random", {"model.seq_length": 32}, TINY.loss)
    with pytest.raises(ConfigError) as caught:
        read_points([good, longer])
    assert f"run {longer.id} has seq_length 32, run {good.id} 16" in str(caught.value)


def test_validation_counts_where_every_run_has_it(project: Project) -> None:
    good, other = runs_in(project)[:2]
    assert read_points([good, other]).loss == "validation_loss"
    kept = [line for line in other.metrics.read_text().splitlines() if "eval" not in line]
    other.metrics.write_text("\n".join(kept) + "\n")
    assert read_points([good, other]).loss == "training_loss"


def test_a_law_file_of_another_kind_is_refused(tmp_path: Path) -> None:
    (tmp_path / "law.json").write_text('{"schema": "plan/1"}')
    with pytest.raises(ConfigError, match="holds 'plan/1', not 'scaling-law/1'"):
        ScalingLaw.from_file(tmp_path / "law.json")
