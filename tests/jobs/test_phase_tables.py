"""[[jobs.X.phases]]: an array of tables in jobs.toml, its references, its origins, what is refused,
and what it fixes once a run has begun."""

from __future__ import annotations

from pathlib import Path

import pytest
import tomli

from tests.jobs.jobs_toml import GOOD, Checkout, refused
from tests.jobs.test_blends import FILES
from trainkit.base.errors import ConfigError
from trainkit.cli.config.jobs import job_as_toml
from trainkit.jobs.resolved import ResolvedJob, read_job, write_job
from trainkit.jobs.resume_changes import changed_job

PHASES = """
[datasets.mix]
source = "blend"
blend = ["web", "code"]
{mix}

[jobs.base]
extends = "demo"
dataset = "web"
[[jobs.base.phases]]
dataset = "code"
share = 0.25

[[jobs.base.phases]]
dataset = "mix"
share = 0.1

[jobs.other]
extends = "base"
[[jobs.other.phases]]
dataset = "mix"
share = 0.5

[jobs.without]
extends = "base"
phases = []
"""


def toml(mix: str = "") -> str:
    return GOOD + FILES + PHASES.replace("{mix}", mix)


def phases(resolved: ResolvedJob) -> list[tuple[str, float]]:
    return [(phase.dataset.name, phase.share) for phase in resolved.job.phases]


def place(resolved: ResolvedJob, key: str) -> str:
    return str(resolved.origins[key].place)


def test_names_become_datasets(checkout: Checkout, tmp_path: Path) -> None:
    resolved = checkout(toml()).resolve("base")
    assert phases(resolved) == [("code", 0.25), ("mix", 0.1)]
    assert resolved.job.steps_by_phase == [13, 5, 2]
    assert resolved.job.phases[1].dataset.blend["web"].dataset.prefixes[0].endswith("/web_{00..02}")
    assert [each.name for each in resolved.job.datasets] == ["web", "code", "mix"]
    lines = toml().splitlines()
    for key, text in (("phases.0.share", "share = 0.25"), ("phases.1.share", "share = 0.1")):
        assert place(resolved, key) == f"jobs.toml:{lines.index(text) + 1}"
    assert place(resolved, "phases.1.dataset.blend.web.dataset.name").startswith("jobs.toml:")
    write_job(tmp_path / "job.json", resolved)
    assert read_job(tmp_path / "job.json") == resolved.job


def test_an_array_replaces_that_of_a_base(checkout: Checkout) -> None:
    jobs = checkout(toml())
    assert phases(jobs.resolve("other")) == [("mix", 0.5)]
    assert phases(jobs.resolve("without")) == []
    assert place(jobs.resolve("without"), "phases").startswith("jobs.toml:")
    local = '[[jobs.base.phases]]\ndataset = "web"\nshare = 0.2\n'
    resolved = checkout(toml(), local=local).resolve("base")
    assert phases(resolved) == [("web", 0.2)]
    assert place(resolved, "phases.0.share") == "jobs.local.toml:3"
    assert jobs.check() == []


def test_values_of_a_phase_can_be_set(checkout: Checkout) -> None:
    jobs = checkout(toml())
    resolved = jobs.resolve("base", ["phases.1.share=0.3", "phases.0.dataset=web"])
    assert phases(resolved) == [("web", 0.25), ("mix", 0.3)]
    assert place(resolved, "phases.1.share") == "--set"
    one = jobs.resolve("base", ['phases=[{ dataset = "mix", share = 0.5 }]'])
    assert phases(one) == [("mix", 0.5)]


def test_show_prints_toml(checkout: Checkout) -> None:
    text = job_as_toml(checkout(toml()).resolve("base"))
    found = tomli.loads(text)["phases"]
    assert [(each["dataset"]["name"], each["share"]) for each in found] == [
        ("code", 0.25),
        ("mix", 0.1),
    ]


@pytest.mark.parametrize(
    ("sets", "words"),
    [
        (["phases.0.share=0"], "phases.0.share = 0 must be above 0"),
        (["phases.0.share=1"], "phases.0.share = 1 must be below 1"),
        (["phases.0.share=0.95"], "shares of phases sum to 1.05, 21 of 20 steps; leave some to"),
        (["phases.0.share=0.9"], "shares of phases sum to 1, 20 of 20 steps"),
        (["phases.0.share=0.02"], "phases.0.share = 0.02 of 20 steps is no step"),
        (["phases.0.dataset=cod"], "'cod' names no [datasets.X] table"),
        (
            ["phases.0.dataset=foreign"],
            "phases.0.dataset: tokenizer other, but dataset 'web' has t",
        ),
        (["phases.0.dataset=mock"], "phases.0.dataset: tokenizer none, but dataset 'web' has t"),
        (["phases.0.shares=0.1"], "unknown key 'phases.0.shares'"),
        (["phases.3.share=0.1"], "phases.3: jobs.base.phases has no such entry"),
        (["phases.last.share=0.1"], "phases.last: jobs.base.phases has no such entry"),
        (
            ["dataset=mix", "dataset.max_epochs=2"],
            "phases.1.dataset is 'mix' as its table says, and the job's is changed by --set",
        ),
        (["phases=0.1"], "phases: expected an array, got the number 0.1"),
        (["phases=[0.1]"], "phases: expected a table in the array, got the number 0.1"),
        (['phases=[{ dataset = "mix" }]'], "missing key 'share' in [phases.0]"),
        (
            ["dataset=text", "phases.0.dataset=text"],
            "phases.1.dataset: tokenizer t, but dataset 't",
        ),
        *[
            ([f"engine={engine}"], f"phases are engine native's: engine = '{engine}' reads one")
            for engine in (
                "gpt-neox",
                "megatron-bridge",
                "megatron-lm",
                "nemo",
                "neuronx-nemo",
                "torchtitan",
            )
        ],
    ],
)
def test_what_is_wrong_is_said(checkout: Checkout, sets: list[str], words: str) -> None:
    said = refused(checkout(toml()), "base", sets)
    assert any(words in each for each in said), said
    assert len(said) == 1


def test_an_error_names_the_line_of_its_phase(checkout: Checkout) -> None:
    text = toml().replace("share = 0.1\n", "share = -1\n", 1)
    line = text.splitlines().index("share = -1") + 1
    (said,) = refused(checkout(text), "base")
    assert said.startswith(f"jobs.toml:{line}: jobs.base.phases.1.share = -1 must be above 0")
    foreign = toml().replace('dataset = "mix"', 'dataset = "foreign"', 1)
    line = foreign.splitlines().index('dataset = "foreign"') + 1
    (said,) = refused(checkout(foreign), "base")
    assert said.startswith(f"jobs.toml:{line}: ")


@pytest.mark.parametrize(
    ("mix", "words"),
    [
        ("temperature = 0", "mix.temperature = 0 must be at least 0.1"),
        ("max_epochs = -1", "mix.max_epochs = -1 must be above 0"),
        ("[datasets.m]\nsource = 'mock'\ntemperature = 2", "temperature is for source = 'blend'"),
        ("[datasets.m]\nsource = 'mock'\nmax_epochs = 2", "max_epochs is for source = 'blend'"),
        (
            "temperature = 2\n[datasets.m]\nextends = 'mix'\nblend = { web = 1, code = 2 }",
            "temperature makes weights of sizes, and blend gives weights",
        ),
    ],
)
def test_wrong_mixtures_are_refused(checkout: Checkout, mix: str, words: str) -> None:
    assert any(words in str(problem) for problem in checkout(toml(mix)).check())


def test_steps_are_fixed_once_a_run_has_begun(checkout: Checkout, tmp_path: Path) -> None:
    """Where a phase begins, and what a cap gives to others, follow from the number of steps."""
    jobs = checkout(toml("max_epochs = 3"))
    path = tmp_path / "job.json"
    for name, sets, words in (
        ("base", [], "a run with phases"),
        ("without", ["dataset=mix"], "a run with datasets.mix.max_epochs"),
    ):
        write_job(path, jobs.resolve(name, sets))
        with pytest.raises(ConfigError, match=f"train_iters cannot change in {words}"):
            changed_job(path, ["training.train_iters=40"])
        assert changed_job(path, ["nodes=1"])[1].training.train_iters == 20
    write_job(path, jobs.resolve("without"))
    assert changed_job(path, ["training.train_iters=40"])[1].training.train_iters == 40
