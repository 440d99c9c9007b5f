"""Jobs for the tests of plan, made without a jobs.toml."""

from __future__ import annotations

from typing import Any

from trainkit.jobs.devices import Device
from trainkit.jobs.schema import Cluster, Dataset, Job, Model, Parallelism, Training

BIG = Device(
    name="big",
    kind="cuda",
    label="a big one",
    memory_bytes=10**15,
    peak_tflops={"fp32": 100.0, "bf16": 100.0, "fp16": 100.0},
)


def gpu(memory_bytes: int | None, **keys: Any) -> Device:
    """A device with so much memory."""
    return BIG.model_copy(update={"memory_bytes": memory_bytes, **keys})


def shape(
    family: str = "gpt",
    layers: int = 1,
    hidden: int = 8,
    heads: int = 2,
    length: int = 4,
    **keys: Any,
) -> Model:
    sizes = {
        "num_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "seq_length": length,
    }
    return Model.model_validate({"name": "m", "family": family, "vocab_size": 16, **sizes, **keys})


def job_of(
    model: Model | None = None,
    ranks: int = 1,
    *,
    nodes: int = 1,
    engine: str = "native",
    device: Device | None = None,
    parallelism: dict[str, Any] | None = None,
    cluster: dict[str, Any] | None = None,
    engine_args: dict[str, Any] | None = None,
    **training: Any,
) -> Job:
    """A job on mock data; on the CPU unless a device is given. `training` are keys of that table,
    and `checkpoint`, which is a table of its own."""
    checkpoint = training.pop("checkpoint", {})
    given: dict[str, Any] = (
        {"device": device, "gpus_per_node": ranks} if device else {"ranks_per_node": ranks}
    )
    given |= {"launcher": "slurm"} if nodes > 1 else {}
    return Job.model_validate(
        {
            "name": "j",
            "engine": engine,
            "cluster": Cluster.model_validate({"name": "c", **given, **(cluster or {})}),
            "model": model or shape(),
            "dataset": Dataset(name="mock", source="mock"),
            "nodes": nodes,
            "parallelism": Parallelism.model_validate(parallelism or {}),
            "training": Training.model_validate({"train_iters": 10, "lr": 1e-3, **training}),
            "checkpoint": checkpoint,
            "engine_args": engine_args or {},
        }
    )
