"""Which runs a sweep has: grids, draws, lists and seeds; and what is refused."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from tests.jobs.jobs_toml import GOOD, Checkout
from trainkit.jobs.sweeps import MOST_MEMBERS, Sweep


def test_a_grid_with_seeds_has_each_value_with_each_other() -> None:
    table = {"grid": {"training": {"lr": [1e-3, 3e-4]}, "nodes": [1, 2]}, "seeds": [7, 8]}
    points = Sweep.model_validate(table).points()
    assert len(points) == 8
    assert points[0] == {"training.lr": 1e-3, "nodes": 1, "training.seed": 7}
    assert points[-1] == {"training.lr": 3e-4, "nodes": 2, "training.seed": 8}


def test_draws_are_the_same_every_time_and_within_their_bounds() -> None:
    draws = {
        "training": {
            "lr": {"log": [1e-5, 1e-2]},
            "weight_decay": {"uniform": [0, 0.1]},
            "lr_warmup_iters": {"integer": [1, 5]},
        },
        "model": {"hidden_size": {"choice": [32, 64]}},
    }
    table = {"random": draws, "samples": 50, "draw_seed": 3}
    points = Sweep.model_validate(table).points()
    assert points == Sweep.model_validate(table).points() and len(points) == 50
    assert points != Sweep.model_validate({**table, "draw_seed": 4}).points()
    rates = sorted(float(str(point["training.lr"])) for point in points)
    assert 1e-5 <= rates[0] < 1e-4 and 1e-3 < rates[-1] <= 1e-2, "as many in each decade"
    assert {point["training.lr_warmup_iters"] for point in points} == {1, 2, 3, 4, 5}
    assert {point["model.hidden_size"] for point in points} == {32, 64}


def test_a_list_and_the_same_values_twice() -> None:
    same = {"training": {"lr": 1e-3}}
    sweep = Sweep.model_validate({"list": [same, {"training": {"lr": 1e-3}}, {"nodes": 2}]})
    assert sweep.points() == [{"training.lr": 1e-3}, {"nodes": 2}]
    sweep = Sweep.model_validate(
        {"list": [{"nodes": 2, "engine": "x"}, {"engine": "x", "nodes": 2}]}
    )
    assert len(sweep.points()) == 1


TPE = {"random": {"nodes": {"integer": [1, 9]}}, "samples": 3, "sampler": "tpe"}


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ({}, "a sweep needs grid"),
        ({"grid": {"nodes": 3}}, "grid.nodes: expected an array"),
        ({"grid": {"nodes": []}}, "grid.nodes: expected an array"),
        ({"random": {"nodes": {"choice": [1]}}}, "give both"),
        ({"random": {"nodes": 3}, "samples": 1}, "random.nodes: expected one of"),
        ({"random": {"a": {"log": [0, 1]}}, "samples": 1}, "both above 0"),
        ({"random": {"a": {"uniform": [2, 1]}}, "samples": 1}, "the lower number first"),
        ({"random": {"a": {"integer": [1, 2.5]}}, "samples": 1}, "two whole numbers"),
        ({"random": {"a": {"uniform": [1]}}, "samples": 1}, "takes [LOW, HIGH]"),
        ({"grid": {"training": {"seed": [1]}}, "seeds": [1]}, "the sweep gives already"),
        (TPE | {"grid": {"nodes": [1]}}, "of random, and of nothing else"),
        (TPE | {"halving": {"first_rung": 2}}, "give one of both"),
        (TPE | {"random": {"training": {"seed": {"integer": [1, 9]}}}}, "nothing to search"),
        ({"grid": {"nodes": list(range(1, MOST_MEMBERS + 2))}}, "a sweep has at most"),
    ],
)
def test_what_is_no_sweep(table: dict[str, object], words: str) -> None:
    with pytest.raises(ValidationError) as refused:
        Sweep.model_validate(table)
    assert words in str(refused.value)


def test_it_is_a_table_of_a_job_with_places(checkout: Checkout) -> None:
    jobs = checkout(GOOD + "\n[jobs.demo.sweep]\ngrid.training.lr = 3\n")
    (problem,) = jobs.check()
    assert "jobs.toml:21" in str(problem) and "expected an array of values" in str(problem)


def test_check_looks_at_the_runs_of_a_sweep(checkout: Checkout) -> None:
    """Each value once, not each run."""
    axes = "grid.training.lrr = [0.1, 0.2]\ngrid.model.hidden_size = [32, 33]\nseeds = [1, 2]\n"
    said, *more = map(str, checkout(GOOD + "\n[jobs.demo.sweep]\n" + axes).check())
    assert "jobs.demo.sweep with training.lrr=0.1, " in said
    assert "unknown key 'training.lrr'\n  did you mean 'training.lr'?" in said
    assert ["hidden_size" in words for words in more] == [True], "its values too, each fault once"
    good = GOOD + "\n[jobs.demo.sweep]\ngrid.training.lr = [1e-3, 3e-4]\n"
    assert checkout(good).check() == []
