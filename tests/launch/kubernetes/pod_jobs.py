"""Jobs of clusters of pods, for the tests of trainkit.launch.kubernetes."""

from __future__ import annotations

from pathlib import Path

from tests.jobs.jobs_toml import GOOD
from trainkit.jobs.load import load
from trainkit.jobs.schema import Job
from trainkit.runs.folder import RunFolder

SMALL = """\
image = "r.io/train:1"
volumes = [{ claim = "shared", mount = "/shared" }]
"""
GPUS = """\
namespace = "team"
queue = "gpus"
priority_class = "high"
image = "r.io/lab/train:1.2@sha256:0123456789012345678901234567890123456789012345678901234567890123"
image_pull_secrets = ["registry"]
service_account = "trainkit"
resources = { cpu = 96, memory = "1.5Ti", "rdma/ib" = 1 }
tolerations = [{ key = "nvidia.com/gpu", effect = "NoSchedule" }, { key = "a", value = "b" }, {}]
node_selector = { "cloud.com/pool" = "h100" }
volumes = [
  { claim = "shared", mount = "/shared" },
  { host_path = "/raid", mount = "/r", read_only = true },
]
secrets = { HF_TOKEN = "hub/token", WANDB_API_KEY = "wandb.team/key" }
topology = { required = "cloud.com/rack" }
grace = 120
annotations = { "networking.gke.io/interfaces" = "[]" }
host_network = true
capabilities = ["IPC_LOCK"]
run_as = "1000:1000"
supervisor = "pod"
"""
# clusters.here, clusters.here.kubernetes, jobs.demo
TABLES = {
    "small": ("", SMALL, ""),
    "gpus": (
        'device = "cuda"\ngpus_per_node = 8\npython = "/opt/py/bin/python"\n'
        'secrets = ["HF_TOKEN", "WANDB_API_KEY?"]',
        GPUS,
        "nodes = 4",
    ),
    "few-gpus": (
        'device = "cuda"\ngpus_per_node = 8\nranks_per_node = 2',
        f'{SMALL}supervisor = "pod"\nservice_account = "t"\n'
        'topology.preferred = "rack"\nqueue = "q"\n',
        "nodes = 2\nretry = { infra = 0 }",
    ),
    "own-gpus": (
        'device = "cuda"\ngpus_per_node = 8',
        f'{SMALL}resources = {{ "nvidia.com/gpu" = 4, cpu = 2.5 }}\nrun_as = "0:0"\n',
        "nodes = 1000",
    ),
    "taints": (
        "",
        f"{SMALL}tolerations = [{{ key = 'x/y', effect = 'NoExecute', seconds = 60 }}]\n",
        "nodes = 2",
    ),
}


def pod_job(folder: Path, which: str = "small", *, name: str = "demo") -> Job:
    """One of the jobs of `TABLES`."""
    return job_of(folder, TABLES[which], name)


def job_of(folder: Path, tables: tuple[str, str, str], name: str = "demo") -> Job:
    """A job of these lines of its tables."""
    cluster, pods, job = tables
    here = f'[clusters.here]\nlauncher = "kubernetes"\nroot = "/shared/me"\n{cluster}\n'
    text = GOOD.replace(
        "[clusters.here]\nranks_per_node = 2\n", f"{here}\n[clusters.here.kubernetes]\n{pods}"
    )
    text = text.replace('dataset = "mock"\n', f'dataset = "mock"\n{job}\n')
    folder.mkdir(exist_ok=True)
    (folder / "jobs.toml").write_text(text.replace("jobs.demo", f"jobs.{name}"))
    return load(folder, {}).resolve(name).job


def run_of(job: Job) -> RunFolder:
    """A run of it that is not made yet."""
    return RunFolder(Path("/shared/me/runs") / job.name / "20261120-104500-3fa9")
