"""A budget becomes jobs: sizes, tokens, batches, rates, and what cannot be."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Project
from tests.scaling.made_runs import ladder, make_run
from tests.scaling.test_scaling_law import TINY
from trainkit.base.errors import ConfigError, TrainkitError
from trainkit.cli.config.scale import budget_of
from trainkit.jobs.load import load
from trainkit.scaling.ladder import RULES, Budget, Dial, Rates, RuledSize, best_size, rungs_below

LADDER = ("--ladder", "1,2,3")
BUDGET = "6e12"


def scaled(project: Project, *words: str) -> Any:
    return json.loads(project.invoke("scale", *words, "--json").stdout)


@pytest.mark.parametrize(
    ("text", "price", "budget"),
    [
        ("1e20", 0.0, Budget(flops=1e20)),
        ("$500", 2.5, Budget(device_hours=200.0)),
        ("64 gpu-days", 0.0, Budget(device_hours=1536.0)),
        ("100 gpu-hours", 2.0, Budget(device_hours=100.0)),
    ],
)
def test_budgets(text: str, price: float, budget: Budget) -> None:
    assert budget_of(text, price) == budget


@pytest.mark.parametrize(
    "text", ["", "much", "-1e20", "$500", "5 days", "1e30", "1e999", "$5 gpu-days"]
)
def test_what_is_no_budget(text: str) -> None:
    with pytest.raises(TrainkitError) as caught:
        budget_of(text, 0.0)
    assert caught.value.exit == 1


def test_a_price_at_which_the_budget_buys_more_than_is_looked_for() -> None:
    with pytest.raises(TrainkitError, match=r"'\$500' buys more than 1e\+28 hours") as caught:
        budget_of("$500", 1e-320)
    assert caught.value.exit == 1


def test_one_dial_makes_jobs_that_jobs_toml_takes(project: Project) -> None:
    found = scaled(project, BUDGET, "--job", "random", *LADDER, "--write", "big.toml")
    best, rungs = found["best"], found["ladder"]
    assert best["flops"] <= 1.05 * float(BUDGET)
    assert [(rung["depth"], rung["values"]["model.hidden_size"]) for rung in rungs[::3]] == [
        (1, 16),
        (2, 32),
        (3, 48),
    ]
    for first in range(0, 9, 3):
        half, once, twice = (rung["tokens"] for rung in rungs[first : first + 3])
        assert once == pytest.approx(20 * rungs[first]["parameters"], rel=0.05)
        assert (half, twice) == pytest.approx((once / 2, once * 2), rel=0.1)
    project.edit_jobs("[defaults]", 'include = ["big.toml"]\n[defaults]')
    jobs = load(project.path)
    big = jobs.resolve("big").job
    assert (big.model.num_layers, big.model.hidden_size) == (best["depth"], 16 * best["depth"])
    assert big.training.train_iters * big.global_batch_size * 16 == best["tokens"]
    sweep = jobs.resolve("big-ladder").job.sweep
    assert sweep is not None
    assert [dict(point) for point in sweep.points()] == [rung["values"] for rung in rungs]
    said = project.invoke("scale", BUDGET, "--job", "random", "--write", "big.toml", exit=3)
    assert "there is a job of that name" in said.stderr
    said = project.invoke("scale", BUDGET, "--job", "big-ladder", exit=3)
    assert "job big-ladder has sweep: a ladder cannot extend it" in said.stderr


def test_batches_and_rates_follow_the_named_rule(project: Project) -> None:
    jobs = load(project.path)
    for rule, by in RULES.items():
        dial = Dial(jobs, "random", (), rule)
        rung = best_size(dial, Budget(flops=1e11), 20, None)
        training = rung.job.training
        base = Rates(8, 1e-2, 0.01)
        matrices = rung.parameters - 128 * rung.job.model.hidden_size  # without the vocabulary
        tokens = 20 * rung.parameters
        flops = rung.flops / rung.tokens * tokens
        given = RuledSize(matrices, tokens, flops, base, 30 * 8 * 16, 16, 4)
        expected = by(given)
        assert training.lr == pytest.approx(expected.lr, rel=1e-3), rule
        assert rung.job.global_batch_size == expected.batch, rule
        assert training.save_interval == round(training.train_iters / 6)
    with pytest.raises(ConfigError, match="--rule chance: expected one of nanochat, deepseek"):
        Dial(jobs, "random", (), "chance")


def test_published_rules_at_published_sizes() -> None:
    """nanochat: 2^19 tokens at its depth 12. DeepSeek 7B, 2T tokens at 4096: about 1e23.
    Step Law's own formula at 1e9 and 1e11."""
    base = Rates(2**8, 0.02, 0.28)  # of 2048 tokens
    same = RULES["nanochat"](RuledSize(1, 1e9, 1.0, base, 1e9, 2048, 32))
    assert same == base
    more = RULES["nanochat"](RuledSize(1, 8e9, 1.0, base, 1e9, 2048, 32))
    assert more.batch == 2**9  # 8^0.383 is 2.2: rates and decay are those of the batch itself
    assert more.lr / base.lr == pytest.approx(2**0.5)
    assert more.weight_decay / base.weight_decay == pytest.approx(2**0.5 / 8)
    less = RULES["nanochat"](RuledSize(1, 1e6, 1.0, base, 1e9, 2048, 128))
    assert less.batch == 128  # none is less than a micro-batch
    assert less.lr == pytest.approx(base.lr / 2**0.5)
    deepseek = RULES["deepseek"](RuledSize(1, 1.0, 1e23, base, 1.0, 4096, 1))
    assert deepseek.lr == pytest.approx(4.16e-4, rel=0.01)  # DeepSeek 7B took 4.2e-4
    assert deepseek.batch == 2048  # 9.7e6 tokens; it took 2,304 samples
    step = RULES["step-law"](RuledSize(10**9, 1e11, 1.0, base, 1.0, 2048, 32))
    assert step.lr == pytest.approx(1.63e-3, rel=0.01)
    assert step.batch == 512  # 1.11e6 tokens, or 542


def test_a_law_chooses_the_least_loss(project: Project) -> None:
    jobs = load(project.path)
    runs = [make_run(jobs, "random", values, TINY.loss) for values in ladder()]
    project.invoke("scaling-law", ",".join(run.id for run in runs))
    law = ("--law", "scaling-law.json", "--picture", "law.svg")
    found = scaled(project, "2e9", "--job", "random", "--ladder", "1", *law)
    best = found["best"]
    assert best["flops"] == pytest.approx(2e9, rel=0.1)
    assert found["predicted"]["loss"] == pytest.approx(
        TINY.loss(best["parameters"], best["tokens"]), rel=1e-3
    )
    dial = Dial(jobs, "random", (), "nanochat")
    for depth in (best["depth"] - 1, best["depth"] + 1):
        if depth:
            size = dial.size(depth, timed=False)
            tokens = 2e9 / size.flops_per_token
            assert TINY.loss(size.parameters, tokens) > found["predicted"]["loss"] * 0.999
    assert "predicted, 99% interval" in (project.path / "law.svg").read_text()
    project.edit_jobs("seq_length = 16", "seq_length = 32")
    said = project.invoke("scale", "2e9", "--job", "random", "--law", "scaling-law.json", exit=3)
    assert "is of runs with seq_length 16; job random has 32" in said.stderr


def test_hours_need_a_speed(project: Project) -> None:
    said = project.invoke("scale", "2 gpu-hours", "--job", "random", exit=3).stderr
    assert "no speed is known of device" in said
    project.edit_jobs("ranks_per_node = 2", 'gpus_per_node = 8\ndevice = "h100-sxm-80gb"')
    jobs = load(project.path)
    dial = Dial(jobs, "random", ("training.precision=bf16",), "nanochat")
    rung = best_size(dial, Budget(device_hours=100.0), 20, None)
    assert rung.plan.duration is not None
    # steps alone: starts and saves are not in the budget
    hours = rung.plan.duration.parts.steps / 3600 * rung.job.world_size
    assert 10 < hours <= 105


@pytest.mark.parametrize(
    ("words", "exit", "said"),
    [
        (("1e3", "--job", "random"), 3, "the budget is too small for one layer of job random"),
        ((BUDGET,), 1, "scale needs --job"),
        ((BUDGET, "--job", "random", "--picture", "x.svg"), 1, "and --law for a --picture"),
        ((BUDGET, "--job", "random", "--ladder", "1,x"), 1, "--ladder 1,x: expected depths"),
        ((BUDGET, "--job", "random", "--ladder", "1,99"), 1, "the budget's model itself has"),
        ((BUDGET, "--job", "random", "--write", "x.json"), 3, "does not end in .toml"),
        ((BUDGET, "--job", "random", "--write", "jobs.toml"), 3, "jobs.toml is there already"),
        ((BUDGET, "--job", "random", "--write", "tiny.toml"), 3, "there is a model of that name"),
        (("1e12", "--job", "random"), 3, "there are no 5 smaller ones to measure"),
    ],
)
def test_what_cannot_be(project: Project, words: tuple[str, ...], exit: int, said: str) -> None:
    assert said in project.invoke("scale", *words, exit=exit).stderr


@pytest.mark.parametrize("top", [6, 7, 12, 24, 80])
def test_five_different_sizes_are_measured(top: int) -> None:
    depths = rungs_below(top)
    assert len(set(depths)) == 5 and list(depths) == sorted(depths)
    assert depths[0] >= 1 and depths[-1] < top
    assert depths[-1] == max(5, top // 2)


def test_heads_keep_their_size(tmp_path: Path) -> None:
    (tmp_path / "jobs.toml").write_text(
        """
[clusters.here]
[models.base]
family = "llama"
num_layers = 8
hidden_size = 512
num_attention_heads = 4
num_query_groups = 2
ffn_hidden_size = 1408
seq_length = 64
vocab_size = 512
[jobs.base]
cluster = "here"
model = "base"
dataset = "mock"
training = { train_iters = 10, lr = 1e-3, gradient_accumulation_steps = 4 }
"""
    )
    dial = Dial(load(tmp_path), "base", (), "nanochat")
    shapes = [dial.shape(depth) for depth in (1, 2, 3, 8, 12)]
    assert [shape["model.hidden_size"] for shape in shapes] == [128, 128, 256, 512, 768]
    assert [shape["model.num_attention_heads"] for shape in shapes] == [1, 1, 2, 4, 6]
    assert [shape["model.num_query_groups"] for shape in shapes] == [1, 1, 1, 2, 3]
    assert [shape["model.ffn_hidden_size"] for shape in shapes] == [352, 352, 704, 1408, 2112]
    rung = dial.rung(dial.size(2, timed=False), 1e6)
    assert rung.job.training.gradient_accumulation_steps in (4, 8, 16, 32, 64)
    assert rung.job.training.global_batch_size is None
