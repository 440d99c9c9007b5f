"""Help texts of options that several tasks share."""

from __future__ import annotations

JOB = {"job": "a job of jobs.toml"}
RUN = {"run": "a run's id or a unique prefix of it, a job's name (its newest run), or last"}
SET = {"set": "KEY=VALUE, such as training.lr=3e-4: override a value of the job; may be repeated"}
DATASET = {
    "dataset": "a prepared dataset of jobs.toml",
    "job": "look below the root of this job's cluster (default: below this folder)",
}
FORCE = {"force": "build again even if it is up to date"}
STEP = "step of the checkpoint (default: the newest valid one)"
CLUSTER = {"cluster": "a cluster of jobs.toml (default: that of [defaults].job)"}
HOSTFILE = {"hostfile": "use this hostfile instead of the cluster's"}
DEVICE = "cpu or cuda (default: that of the job's cluster)"
TENSOR = "split the model over so many ranks of this machine, if one device is too small"
FLOPS = "also count TFLOP/s by this convention: megatron-2021, palm-6n or gpt-neox-2022"
PICTURE = "also draw {} as this .svg or .png file (needs the extra `report`)"
