"""All ranks agree on what they are about to do before they do it: a rank of another job, layout
or version would train something else in silence."""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import torch
import torch.distributed as dist

import trainkit
from trainkit.base.errors import Problem, raise_problems
from trainkit.jobs.ranks import degrees_of
from trainkit.jobs.schema import Job
from trainkit.ops.kernels import Choice
from trainkit.train.parallel.data_parallel import World

MANY = 5  # differences named of one rank
ROOM = 1024  # bytes that a rank has to say how it differs


def fingerprint(job: Job, chosen: Choice) -> dict[str, str]:
    """What must be the same on all ranks, by the name it has in messages: every value of the job,
    the layout that follows from it, the kernels that it found, and versions."""
    versions = {
        "torch": torch.__version__,
        "trainkit": trainkit.__version__,
        "python": platform.python_version(),
    }
    return {
        **versions,
        "kernels": chosen.kernels.name,
        "layout": ", ".join(f"{axis} {size}" for axis, size in asdict(degrees_of(job)).items()),
        **dict(_leaves("job", job.model_dump(mode="json"))),
    }


def _leaves(path: str, value: Any) -> list[tuple[str, str]]:
    if isinstance(value, Mapping) and value:
        return [leaf for key, part in value.items() for leaf in _leaves(f"{path}.{key}", part)]
    return [(path, json.dumps(value, sort_keys=True))]


def differences(first: Mapping[str, str], other: Mapping[str, str]) -> list[str]:
    """How `other` differs from the first rank's."""
    return [
        f"{key} is {other.get(key, 'missing')}, on rank 0 {first.get(key, 'missing')}"
        for key in {**first, **other}
        if first.get(key) != other.get(key)
    ]


def refuse_disagreement(job: Job, world: World, chosen: Choice) -> None:
    """Called by all ranks together right after they met. Raises ConfigError on all of them,
    which names each rank that differs from rank 0, its host, and in what.

    Args:
        chosen: the kernels that this rank would compute with.
    """
    mine = fingerprint(job, chosen)
    size = torch.tensor([len(text := json.dumps(mine).encode())])
    dist.broadcast(size, 0)
    received = torch.zeros(int(size), dtype=torch.uint8)
    if world.rank == 0:
        received = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    dist.broadcast(received, 0)
    found = differences(json.loads(bytes(received.tolist())), mine)
    if found and chosen.because:
        found.append(f"its kernels are not fused because {chosen.because}")
    message = "; ".join(found[:MANY]) + (
        f"; and {len(found) - MANY} more" if len(found) > MANY else ""
    )
    own = torch.zeros(ROOM, dtype=torch.uint8)
    if found:
        sent = f"{platform.node()} was started with something else: {message}".encode()[:ROOM]
        own[: len(sent)] = torch.frombuffer(bytearray(sent), dtype=torch.uint8)
    everyone = [torch.zeros_like(own) for _ in range(world.size)]
    dist.all_gather(everyone, own)
    texts = [bytes(sent.tolist()).rstrip(b"\0").decode(errors="replace") for sent in everyone]
    raise_problems([Problem(f"rank {rank} on {text}") for rank, text in enumerate(texts) if text])
