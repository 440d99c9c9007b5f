"""Blends of datasets and held-out files in jobs.toml."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.jobs.jobs_toml import GOOD, Checkout, refused
from trainkit.base.errors import ConfigError
from trainkit.jobs.resolved import write_job
from trainkit.jobs.resume_changes import changed_job

FILES = """
[tokenizers.t]
type = "file"
path = "tokenizer.json"
vocab_size = 512

[tokenizers.other]
extends = "t"

[tokenizers.own]
type = "bpe"
vocab_size = 512

[datasets.web]
source = "indexed"
prefixes = ["web_{00..02}"]
tokenizer = "t"

[datasets.code]
source = "indexed"
prefixes = ["code"]
tokenizer = "t"

[datasets.foreign]
extends = "code"
tokenizer = "other"

[datasets.text]
source = "stdlib"
tokenizer = "own"
"""


def toml(blend: str) -> str:
    return (
        GOOD.replace('dataset = "mock"', 'dataset = "mix"')
        + FILES
        + '\n[datasets.two]\nsource = "blend"\nblend = ["web", "code"]\n'
        + f'\n[datasets.mix]\nsource = "blend"\n{blend}\n'
    )


def test_names_become_datasets_with_their_weights(checkout: Checkout) -> None:
    job = (
        checkout(toml("blend = { web = 0.7, code = 3 }\nvalid_blend = ['code']"))
        .resolve("demo")
        .job
    )
    assert [
        (name, part.weight, part.dataset.source) for name, part in job.dataset.blend.items()
    ] == [("web", 0.7, "indexed"), ("code", 3.0, "indexed")]
    assert [(name, part.weight) for name, part in job.dataset.valid_blend.items()] == [
        ("code", None)
    ]
    assert job.dataset.tokenizer == job.dataset.blend["web"].dataset.tokenizer
    assert job.dataset.blend["web"].dataset.prefixes[0].endswith("/web_{00..02}")


def test_a_validation_may_be_called_blend(checkout: Checkout) -> None:
    found = checkout(toml("blend = ['web']") + '[jobs.demo.validation]\nblend = "two"\n')
    assert found.check() == []
    assert [*found.resolve("demo").job.validation["blend"].blend] == ["web", "code"]


def test_a_weight_can_be_set_and_remembers_where_it_was_written(checkout: Checkout) -> None:
    resolved = checkout(toml("blend = { web = 0.7, code = 0.3 }")).resolve(
        "demo", ["dataset.blend.web=0.9"]
    )
    assert resolved.job.dataset.blend["web"].weight == 0.9
    assert str(resolved.origins["dataset.blend.web.weight"].place) == "--set"
    assert "jobs.toml:" in str(resolved.origins["dataset.blend.code.weight"].place)


@pytest.mark.parametrize(
    ("blend", "words"),
    [
        ("", "source = 'blend' needs blend"),
        ("blend = { web = 0.0, code = 0 }", "gives every dataset the weight 0"),
        ("blend = { web = -1.0 }", "must be at least 0"),
        ("blend = { web = nan }", "finite"),
        ("blend = { nobody = 1.0 }", "names no [datasets.X] table"),
        ("blend = { web = 'much' }", "expected a number"),
        ("blend = ['web', 'web']", "names a dataset twice"),
        ("blend = { mix = 1.0 }", "datasets.mix.blend.mix: a blend cannot be a part of a blend"),
        ("blend = { two = 1.0 }", "datasets.mix.blend.two: a blend cannot be a part of a blend"),
        ("blend = { web = 1e308 }", "must be at most 1e+100"),
        ("blend = ['web', 'code']\ntemperature = 1e-3", "must be at least 0.1"),
        ("blend = { web = 1.0, foreign = 1.0 }", "has the tokenizer other, but the blend t"),
        ("blend = { text = 1.0 }", "trained on each dataset separately"),
        ("blend = { mock = 1.0 }", "source = 'mock'"),
        ("blend = { web = 1.0 }\nvalid_files = 1", "valid_files and test_files hold out"),
    ],
)
def test_refuses_what_cannot_be_meant(checkout: Checkout, blend: str, words: str) -> None:
    problems = refused(checkout(toml(blend)))
    assert any(words in problem for problem in problems), problems
    assert len(problems) == 1, problems


def test_blend_is_for_blends(checkout: Checkout) -> None:
    text = toml("blend = { web = 1.0 }").replace(
        'prefixes = ["code"]', 'prefixes = ["code"]\nblend = { web = 1.0 }'
    )
    assert (
        "blend is for source = 'blend', not 'indexed'"
        in refused(checkout(text.replace('"mix"', '"code"')))[0]
    )


def test_megatrons_order_fixes_what_its_shuffles_depend_on(
    checkout: Checkout, tmp_path: Path
) -> None:
    path = tmp_path / "job.json"
    write_job(
        path,
        checkout(GOOD.replace("[jobs.demo]", '[jobs.demo]\nsample_order = "megatron"')).resolve(
            "demo"
        ),
    )
    with pytest.raises(
        ConfigError,
        match=r"training\.train_iters cannot change in a run with sample_order = 'megatron'",
    ):
        changed_job(path, ["training.train_iters=40"])
    assert changed_job(path, ["training.log_interval=5"])[1].training.log_interval == 5


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("on_nan", '"rollback"', "'rollback' needs samples beyond"),
        ("seed", "4294967296", "is 2^32 or more"),
    ],
)
def test_megatrons_order_refuses_what_it_cannot_keep(
    checkout: Checkout, key: str, value: str, words: str
) -> None:
    text = (
        GOOD.replace("[jobs.demo]", '[jobs.demo]\nsample_order = "megatron"') + f"{key} = {value}\n"
    )
    assert words in refused(checkout(text))[0]
    assert checkout(GOOD + f"{key} = {value}\n").resolve("demo")
