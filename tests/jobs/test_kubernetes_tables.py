"""[clusters.X.kubernetes]: what it takes, and the one error of each wrong value."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.jobs.jobs_toml import GOOD, Checkout, refused
from trainkit.jobs.kubernetes import quantity
from trainkit.jobs.resolved import read_job, write_job

PODS = """\
ranks_per_node = 2
launcher = "kubernetes"
root = "/shared/me"
kubernetes.image = "r.io/train:1"
kubernetes.volumes = [{ claim = "shared", mount = "/shared" }]
"""
TABLE = GOOD.replace("ranks_per_node = 2\n", PODS)


def test_a_table_of_pods(checkout: Checkout, tmp_path: Path) -> None:
    text = TABLE.replace(
        PODS,
        f"""{PODS}
kubernetes.queue = "team"
kubernetes.resources = {{ "nvidia.com/gpu" = 8, cpu = 1.5, memory = "1.5Ti", "rdma/ib" = 1 }}
kubernetes.tolerations = [{{ key = "nvidia.com/gpu", effect = "NoSchedule" }}]
kubernetes.topology = {{ required = "cloud.com/rack" }}
kubernetes.secrets = {{ HF_TOKEN = "hub.secret/token" }}
""",
    )
    resolved = checkout(text).resolve("demo", ['cluster.secrets=["HF_TOKEN", "OTHER?"]'])
    write_job(tmp_path / "job.json", resolved)
    cluster = read_job(tmp_path / "job.json").cluster
    assert cluster == resolved.job.cluster and cluster.kubernetes is not None
    assert cluster.kubernetes.tolerations[0].key == "nvidia.com/gpu"
    assert cluster.connect_seconds() == 900
    assert (quantity("1.5Gi"), quantity("500m"), quantity("1e3"), quantity(8), quantity("2E")) == (
        1.5 * 2**30,
        0.5,
        1000.0,
        8.0,
        2e18,
    )
    assert quantity("64GB") is quantity("-1") is quantity("") is None


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("namespace = 'A'", "namespace: 'A' is not a name of Kubernetes here"),
        (f"namespace = '{'a' * 64}'", "of at most 63 characters"),
        (f"queue = '{'a' * 64}'", "queue: '"),
        ("queue = '-a'", "queue: '-a' is not a name of Kubernetes"),
        ("image_pull_secrets = ['a b']", "image_pull_secrets: 'a b' is not a name"),
        ("secrets.HF = 'hub'", "secrets.HF: 'hub' is not SECRET/KEY"),
        ("secrets.TRAINKIT_X = 'a/b'", "secrets.TRAINKIT_X: trainkit sets TRAINKIT_* itself"),
        ("resources.memory = '64GB'", "resources.memory: '64GB' is not a quantity"),
        ("resources.memory = 64", "resources.memory = 64 is below 1Mi"),
        ("resources.gpu = 8", "Kubernetes knows no 'gpu'"),
        ("resources = { 'a/b/c' = 1 }", "'a/b/c' is not the key of a label"),
        ("resources = { 'nvidia.com/gpu' = 0.5 }", "of devices there are whole numbers"),
        ("resources.memory = '8Gi'", "shm = '16Gi' counts as memory, and resources.memory = 8Gi"),
        ("shm = '64M b'", "shm: '64M b' is not a quantity"),
        ("topology = { required = 'a', preferred = 'b' }", "required or preferred, one of them"),
        ("topology = { required = 'a' }", "topology needs queue"),
        ("node_selector = { zone = 'a b' }", "'a b' is not the value of a label"),
        ("annotations = { 'a b' = 'c' }", "'a b' is not the key of a label"),
        ("capabilities = ['CAP_IPC_LOCK']", "'CAP_IPC_LOCK' is not a capability"),
        ("tolerations = [{ value = 'a' }]", "value = 'a' needs the key"),
        ("tolerations = [{ key = 'a', seconds = 3 }]", "seconds are of effect = 'NoExecute'"),
        ("tolerations = [{ key = 'a', effect = 'Never' }]", "'NoSchedule'"),
        ("run_as = 'me'", "run_as: 'me' is not UID:GID"),
        ("grace = 0", "grace = 0 must be at least 1"),
        ("supervisor = 'login'", "expected 'first' or 'pod'"),
        ("claim = 'a'", "unknown key 'claim'"),
    ],
)
def test_wrong_values(line: str, said: str, checkout: Checkout) -> None:
    (words,) = refused(checkout(TABLE.replace(PODS, f"{PODS}kubernetes.{line}\n")))
    assert "clusters.here.kubernetes" in words and said in words


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ('"r.io/train:1"', '"docker://a"', "kubernetes.image: 'docker://a' is not an image"),
        ('kubernetes.image = "r.io/train:1"\n', "", "missing key 'image'"),
        ('mount = "/shared" }', 'mount = "/data" }', "holds root = '/shared/me'"),
        ('mount = "/shared" }', 'mount = "/shared", read_only = true }', "holds root ="),
        ('mount = "/shared" }', 'host_path = "/a", mount = "/shared" }', "claim or host_path, one"),
        ('mount = "/shared" }', 'mount = "shared" }', "'shared' is not the absolute path"),
        (
            'mount = "/shared" }',
            'mount = "/shared" }, { host_path = "/a", mount = "/shared/" }',
            "/shared is mounted twice",
        ),
        ('launcher = "kubernetes"', 'launcher = "kubernetes"\nsecrets = ["HF"]', "secrets.HF ="),
        (
            'dataset = "mock"',
            'dataset = "mock"\nnotify = { webhook_variable = "HOOK" }',
            "kubernetes.secrets.HOOK",
        ),
        (
            'dataset = "mock"\n',
            'dataset = "mock"\ncontainer = "c"\n[containers.c]\nimage = "/a.sqsh"\n',
            "pods run in clusters.here.kubernetes.image",
        ),
    ],
)
def test_what_does_not_fit_together(old: str, new: str, said: str, checkout: Checkout) -> None:
    assert old in TABLE
    (words,) = refused(checkout(TABLE.replace(old, new)))
    assert said in words


def test_the_table_is_needed(checkout: Checkout) -> None:
    (words,) = refused(
        checkout(GOOD.replace("ranks_per_node", 'launcher = "kubernetes"\nranks_per_node'))
    )
    assert "needs a table [clusters.here.kubernetes] with image and volumes" in words
