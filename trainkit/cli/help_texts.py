"""Words that the help of several tasks shares."""

from __future__ import annotations

JOB = {"job": "a job of jobs.toml"}
RUN = {"run": "an id, a unique beginning of one, a job's name (its newest run), or last"}
SET = {"set": "a.b=value: override a value of the resolved job; may be repeated"}
DATASET = {
    "dataset": "a prepared dataset of jobs.toml",
    "job": "below the root of this job's cluster; by default below this folder",
}
FORCE = {"force": "do it even if it is fresh"}
STEP = {"step": "of the checkpoint; by default the newest valid one"}
HOSTS = {
    "cluster": "on this cluster of jobs.toml",
    "nodes": "on so many nodes; 0: as the job says",
    "hostfile": "another hostfile than the cluster's",
    "include": "only these of its hosts: HOST[:SLOTS]@HOST..., SLOTS as in 0,2-3",
    "exclude": "without these of its hosts, or slots",
    "detach": "return as soon as the run is on its way; it needs no terminal",
    "foreground": "tie the run to this command: it ends when this ends",
    "share": "run beside another run on the same slots",
    "existing": "slurm: on the nodes of the allocation that this is typed in (salloc)",
}
DEVICE = {"device": "cpu or cuda; by default what the job's cluster computes on"}
TENSOR = {
    "tensor-parallel": (
        "ranks on this machine that the model is split over, for one that no device here holds"
    )
}
