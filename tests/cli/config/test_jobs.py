"""`jobs` and `show`: what is printed is true, and the TOML can be read again."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
import tomli
from hypothesis import HealthCheck, given, settings, strategies as st
from rich.console import Console

from trainkit.base.errors import ConfigError
from trainkit.cli.config.jobs import (
    explain_value,
    find_value,
    job_as_toml,
    jobs as list_jobs,
    jobs_table,
    show,
)
from trainkit.cli.wrapper import TaskContext
from trainkit.jobs.load import Jobs, load
from trainkit.jobs.resolved import ResolvedJob

TEXT = """\
[defaults]
job = "demo"
[clusters.here]
env = { "A" = "1" }
[models.tiny]
num_layers = 2
hidden_size = 64
num_attention_heads = 4
seq_length = 64
vocab_size = 512
[jobs.demo]
description = "a [small] one"
cluster = "here"
model = "tiny"
dataset = "mock"
training = { train_iters = 20, lr = 1e-3 }
"""


@pytest.fixture
def jobs(tmp_path: Path) -> Jobs:
    (tmp_path / "jobs.toml").write_text(TEXT)
    return load(tmp_path, {})


def test_the_listing(jobs: Jobs) -> None:
    row = {
        "name": "demo",
        "engine": "native",
        "cluster": "here",
        "model": "tiny",
        "dataset": "mock",
        "nodes": 1,
        "description": "a [small] one",
    }
    assert list_jobs(task(jobs)).document == {
        "schema": "jobs/1",
        "root": str(jobs.root),
        "default": "demo",
        "jobs": [row],
    }
    screen = io.StringIO()
    Console(file=screen, width=120).print(jobs_table(jobs.describe(), jobs.default_job))
    assert "demo *" in screen.getvalue() and "a [small] one" in screen.getvalue()


def task(jobs: Jobs) -> TaskContext:
    return TaskContext(json=True, dry_run=False, folder=jobs.root)


def without_none(value: object) -> object:
    return (
        {key: without_none(item) for key, item in value.items() if item is not None}
        if isinstance(value, dict)
        else value
    )


def test_toml_carries_origins(jobs: Jobs) -> None:
    lines = job_as_toml(jobs.resolve("demo", ["training.seed=7"])).splitlines()
    found = {line.split("  ")[0]: line.rpartition("# ")[2] for line in lines}
    assert found["lr = 0.001"] == "jobs.toml:16"
    assert found["seed = 7"] == "--set"
    assert found["num_layers = 2"] == "jobs.toml:6"
    assert found["clip_grad = 1.0"] == "built-in default"
    assert found["# lr_decay_iters is not set"] == "built-in default"


@settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=50
)
@given(lr=st.floats(0, 1e300), prompt=st.text())
def test_toml_can_be_read_again(lr: float, prompt: str, jobs: Jobs) -> None:
    resolved = jobs.resolve("demo", [f"training.lr={lr!r}"])
    job = resolved.job.model_copy(
        update={"generate": resolved.job.generate.model_copy(update={"prompt": prompt})}
    )
    assert tomli.loads(job_as_toml(ResolvedJob(job, resolved.origins))) == without_none(
        job.model_dump(mode="json")
    )


def test_json_is_the_job_document(jobs: Jobs) -> None:
    document = json.loads(json.dumps(show(task(jobs), "demo", "", "toml", []).document))
    assert (document["schema"], document["job"]["training"]["lr"]) == ("job/1", 0.001)


def explained(resolved: ResolvedJob, key: str) -> str:
    return explain_value(key, find_value(resolved, key))


def test_explain(jobs: Jobs) -> None:
    sets = ["training.seed=7", "cluster=here"]
    resolved = jobs.resolve("demo", sets)
    assert show(task(jobs), "demo", "training.seed", "toml", sets).document == {
        "schema": "explain/1",
        "job": "demo",
        "key": "training.seed",
        "value": 7,
        "place": "--set",
        "overrode": [{"value": 1234, "place": "built-in default"}],
    }
    assert (
        explained(resolved, "training.seed")
        == "training.seed = 7     --set\ntraining.seed = 1234  built-in default  overridden"
    )
    assert (
        explained(resolved, "cluster")
        == 'cluster = "here"  --set\ncluster = "here"  jobs.toml:13  overridden'
    )
    assert (
        explained(resolved, "model.ffn_hidden_size")
        == "model.ffn_hidden_size is not set  built-in default"
    )
    assert explained(resolved, "cluster.env.A") == 'cluster.env.A = "1"  jobs.toml:4'


@pytest.mark.parametrize(
    ("key", "hint"),
    [
        ("training.lrr", "did you mean 'training.lr'?"),
        ("lr", "did you mean 'training.lr'?"),
        ("checkpoint", "its keys: checkpoint.keep_last"),
        ("zzz", "keys begin with: args, checkpoint, cluster, container, dataset, "),
    ],
)
def test_explain_of_no_key(key: str, hint: str, jobs: Jobs) -> None:
    with pytest.raises(ConfigError) as caught:
        find_value(jobs.resolve("demo"), key)
    assert caught.value.list[0].hint.startswith(hint)


def test_every_published_job_is_shown() -> None:
    """Tables among engine_args too, written as tables or given as one value."""
    published = load(Path(__file__).parents[3], environ={})
    for row in published.describe():
        resolved = published.resolve(row.name)
        text = job_as_toml(resolved)
        assert tomli.loads(text) == without_none(resolved.job.model_dump(mode="json"))
    sets = ["engine=gpt-neox", "engine_args.fp16={auto_cast = true}", "engine_args.'a.b'=1"]
    text = job_as_toml(published.resolve("gpt-neox-20b", sets))
    assert "allgather_bucket_size = 1260000000" in text and '"a.b" = 1' in text
    assert "auto_cast = true" in text
