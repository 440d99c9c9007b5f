"""What may be changed when a run goes on, and what a change leaves alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.jobs.jobs_toml import GOOD, Checkout
from trainkit.base.errors import ConfigError
from trainkit.base.files import write_json
from trainkit.jobs.resolved import read_job, write_job
from trainkit.jobs.resume_changes import changed_job
from trainkit.jobs.schema import Training
from trainkit.train.update.schedule import learning_rate


def written(checkout: Checkout, path: Path, more: str = "") -> Training:
    write_job(path, checkout(GOOD + more).resolve("demo"))
    return read_job(path).training


def test_a_longer_run_has_the_rates_it_had(checkout: Checkout, tmp_path: Path) -> None:
    path = tmp_path / "job.json"
    before = written(checkout, path, "lr_warmup_fraction = 0.25\n")
    for iters in (30, 8):
        document, job = changed_job(path, [f"training.train_iters={iters}"])
        write_json(path, document)
        after = read_job(path).training
        assert after == job.training and (after.train_iters, after.decay_iters) == (iters, 20)
        assert [learning_rate(after, step) for step in range(25)] == [
            learning_rate(before, step) for step in range(25)
        ]


def test_the_decay_moves_where_it_is_asked_to(checkout: Checkout, tmp_path: Path) -> None:
    path = tmp_path / "job.json"
    written(checkout, path)
    _, job = changed_job(path, ["training.lr_decay_iters=30"])
    assert (job.training.train_iters, job.training.decay_iters) == (20, 30)
    for sets in (
        ["training.lr_decay_iters=40", "training.train_iters=50"],
        ["training.train_iters=50", "training.lr_decay_iters=40"],
    ):
        _, job = changed_job(path, sets)
        assert (job.training.train_iters, job.training.decay_iters) == (50, 40)
    written(checkout, path, "lr_decay_iters = 10\n")
    assert changed_job(path, ["training.train_iters=50"])[1].training.decay_iters == 10
    assert (
        changed_job(path, ["training.eval_iters=3"])[0]["job"]["training"]["lr_decay_iters"] == 10
    )


def test_the_layout_may_change_and_the_batch_stays(checkout: Checkout, tmp_path: Path) -> None:
    path = tmp_path / "job.json"
    written(checkout, path)
    before = read_job(path)
    sets = [
        "cluster.ranks_per_node=8",
        "parallelism.tensor_model_parallel_size=2",
        "parallelism.pipeline_model_parallel_size=2",
        "parallelism.zero_stage=3",
    ]
    document, job = changed_job(path, sets)
    p = job.parallelism
    assert (
        p.tensor_model_parallel_size,
        p.pipeline_model_parallel_size,
        p.zero_stage,
        job.data_parallel_size,
    ) == (2, 2, 3, 2)
    assert (
        job.global_batch_size == before.global_batch_size
        and job.training.gradient_accumulation_steps is None
    )
    assert document["origins"]["parallelism.zero_stage"]["place"] == "--set"
    with pytest.raises(ConfigError, match="needs pipeline_model_parallel_size above 1"):
        changed_job(path, ["parallelism.pipeline_schedule='zbv'"])


def test_other_keys_stay(checkout: Checkout, tmp_path: Path) -> None:
    path = tmp_path / "job.json"
    written(checkout, path)
    for key, hint in (
        ("training.lr", "train another run with it"),
        ("training.optimizer", "train another run with it"),  # and not "did you mean compile?"
        ("training.train_iter", "did you mean 'training.train_iters'?"),
    ):
        with pytest.raises(ConfigError, match=f"{key} cannot change") as caught:
            changed_job(path, [f"{key}=1"])
        assert [problem.hint for problem in caught.value.list] == [hint]


def test_where_a_run_goes_on(checkout: Checkout, tmp_path: Path) -> None:
    path = tmp_path / "job.json"
    written(checkout, path)
    sets = [
        "nodes=2",
        "cluster.spares=1",
        "cluster.watch.heartbeat=60.0",
        "retry.infra=1",
        "retry.user=2",
    ]
    document, job = changed_job(path, sets)
    assert (
        job.nodes,
        job.cluster.spares,
        job.cluster.watch.heartbeat,
        job.retries.infra,
        job.retries.user,
    ) == (2, 1, 60, 1, 2)
    # 1 sample on each of 2 ranks, as it was
    assert (job.global_batch_size, job.world_size) == (2, 4)
    assert (
        document["origins"]["nodes"]["overrode"][0]["value"] == 1
        and "retry" not in document["origins"]
    )
    write_json(path, document)
    assert changed_job(path, ["nodes=1"])[1].retries.user == 2
    for wrong in (
        "cluster.root='/'",
        "cluster.launcher='ssh'",
        "model.num_layers=3",
        "retry.infra=-1",
        "nodes=0",
        "cluster.watch.lease='x'",
    ):
        with pytest.raises(ConfigError):
            changed_job(path, [wrong])


def test_a_run_moves_to_another_cluster(checkout: Checkout, tmp_path: Path) -> None:
    path = tmp_path / "job.json"
    written(checkout, path)
    jobs = checkout(
        GOOD + '[clusters.far]\nlauncher = "ssh"\nranks_per_node = 1\n[clusters.apart]\nroot ='
        ' "/elsewhere"\n'
    )
    document, job = changed_job(path, ["nodes=2"], jobs.resolve("demo", ["cluster=far"]))
    assert (job.cluster.name, job.cluster.launcher, job.nodes, job.global_batch_size) == (
        "far",
        "ssh",
        2,
        2,
    )
    assert document["origins"]["cluster.launcher"]["place"].startswith("jobs.toml:")
    with pytest.raises(ConfigError, match=r"cluster 'apart' has the root /elsewhere"):
        changed_job(path, [], jobs.resolve("demo", ["cluster=apart"]))
