"""What jobs.toml says of runs over several hosts: rules of failures, limits of waiting, budgets
of retries."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.jobs.jobs_toml import GOOD, Checkout, refused
from trainkit.jobs.resolved import read_job, write_job
from trainkit.jobs.schema import RetrySettings

PDSH = GOOD.replace(
    "ranks_per_node = 2",
    'ranks_per_node = 2\nlauncher = "pdsh"\nspares = 1\ninterface = "10.0.0.0/8"\nwatch = { lease'
    " = 5 }",
)
RULES = """
[clusters.here.failures.cable]
match = "link (down|flapping)"
failure_class = "infra"
suspect = true

[clusters.here.failures.quota]
match = "quota exceeded"
failure_class = "user"
advice = "ask for more"
"""


def test_hosts_and_what_failures_mean(checkout: Checkout, tmp_path: Path) -> None:
    resolved = checkout(PDSH + RULES).resolve("demo", ["cluster.failures.quota.suspect=true"])
    write_job(tmp_path / "job.json", resolved)
    cluster = read_job(tmp_path / "job.json").cluster
    assert (
        cluster.spares,
        cluster.interface,
        cluster.watch.lease,
        cluster.watch.grace,
        cluster.node_folder,
    ) == (1, "10.0.0.0/8", 5, 10, "/dev/shm")
    assert [
        (name, rule.failure_class, rule.suspect) for name, rule in cluster.failures.items()
    ] == [("cable", "infra", True), ("quota", "user", True)]
    assert str(resolved.origins["cluster.failures.cable.match"].place).startswith("jobs.toml:")


def test_budgets_of_retries(checkout: Checkout) -> None:
    local, hosts = checkout(GOOD).resolve("demo").job, checkout(PDSH).resolve("demo").job
    assert local.retry is None and (local.retries.infra, local.retries.hang) == (0, 0)
    assert (
        hosts.retry is None
        and hosts.retries == RetrySettings()
        and hosts.retries.infra == 3
        and hosts.retries.shrink
    )
    given = (
        checkout(GOOD.replace('model = "tiny"', 'model = "tiny"\nretry = { infra = 1 }'))
        .resolve("demo")
        .job
    )
    assert (given.retries.infra, given.retries.hang) == (1, 2)


@pytest.mark.parametrize(
    ("new", "said"),
    [
        (
            "failures.x = { match = '(', failure_class = 'infra' }",
            "clusters.here.failures.x.match: match = '(' is not a regular expression",
        ),
        (
            "failures.x = { match = 'a', failure_class = 'cosmic' }",
            "failure_class: expected 'user', 'infra', 'hang' or 'preempted'",
        ),
        ("failures.x = { match = 'a' }", "missing key 'failure_class'"),
        ("watch = { leese = 5 }", "did you mean 'lease'?"),
        ("watch = { lease = 0 }", "must be above 0"),
        ("node_folder = 'shm'", "does not match ^/"),
        ("python = 'python3'", "does not match ^/"),
        ("spares = -1", "must be at least 0"),
    ],
)
def test_mistakes(new: str, said: str, checkout: Checkout) -> None:
    (words,) = refused(checkout(GOOD.replace("ranks_per_node = 2", new)))
    assert words.startswith("jobs.toml:2: ") and said in words
