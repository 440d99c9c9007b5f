"""Jobs in containers for tests, and the container that a job runs in."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from trainkit.jobs.load import load
from trainkit.jobs.schema import Job
from trainkit.launch.containers import NodeContainer, node_container
from trainkit.launch.hosts.hostfile import Host
from trainkit.launch.session import Session

JOBS = """
[clusters.c]
launcher = "{launcher}"
device = "{device}"
root = "/shared"
gpus_per_node = {gpus}
env = {{ A = "1", PATH = "/opt/bin:/bin", HERE = "${{node:USER}}" }}
prolog = ["module load {runtime}"]
[containers.box]
image = "{image}"
runtime = "{runtime}"
mounts = ["/data:/data:ro", "/opt/topo:/topo"]
env = {{ A = "2", B = "two words" }}
{more}
[models.m]
num_layers = 1
hidden_size = 8
num_attention_heads = 1
seq_length = 8
vocab_size = 16
[tokenizers.t]
type = "file"
path = "t.json"
[datasets.outside]
source = "indexed"
prefixes = {prefixes}
tokenizer = "t"
[jobs.j]
cluster = "c"
model = "m"
dataset = "{dataset}"
container = "box"
training = {{ train_iters = 1, lr = 1.0 }}
env = {{ C = "3" }}
"""


IMAGES = {
    "docker": "reg/app:1",
    "podman": "reg/app:1",
    "apptainer": "/images/app.sif",
    "enroot": "/images/app.sqsh",
    "pyxis": "/images/app.sqsh",
}


FOLDER = Path("/shared/runs/j/R/launch/attempt-2")


INSIDE = ("/bin/bash", f"{FOLDER}/inside.sh", '"$1"')


def job(tmp_path: Path, runtime: str, **values: Any) -> Job:
    given = {
        "launcher": "ssh",
        "device": "cpu",
        "gpus": 0,
        "more": "",
        "prefixes": "[]",
        "dataset": "mock",
        "image": IMAGES[runtime],
        **values,
    }
    if given["prefixes"] == "[]":
        given["prefixes"] = '["/shared/x/*"]'
    (tmp_path / "jobs.toml").write_text(JOBS.format(runtime=runtime, **given))
    return load(tmp_path).resolve("j", []).job


def box(tmp_path: Path, runtime: str, **values: Any) -> NodeContainer:
    found = node_container(job(tmp_path, runtime, **values), FOLDER, "R", 2)
    assert found is not None
    return found


def session(tmp_path: Path, runtime: str, **values: Any) -> Session:
    chosen = job(tmp_path, runtime, **values)
    folder = tmp_path / "s"
    return Session(
        folder,
        "R",
        2,
        [Host("h")],
        chosen.cluster,
        tmp_path / "code",
        tmp_path / "logs",
        {},
        node_container(chosen, folder, "R", 2),
    )
