"""CPU ranks: they share the cores and the memory of their node, and talk through gloo.

A processor's speed is not known from its name, so what is computed here is an order of layouts,
in seconds of an assumed core; a run of the job says by how much this machine differs
(plan/measured.py). Read off docs/benchmarks.md (ten layouts of
another model on two cores); a block's start from CPU seconds of three micro-batch sizes.
"""

from __future__ import annotations

import math

from trainkit.jobs.schema import Job
from trainkit.plan.time.constants import fitted
from trainkit.plan.time.setup import Hardware

SOFTWARE = "host"
CORE = 90e9  # FLOP/s of a core's fp32 products, as large ones reach them
MEMORY = 8e9  # bytes a second of a core
LOOPBACK = 0.6e9  # bytes a second that gloo carries from rank to rank of a node
FP32 = 2.0  # the model counts two bytes a number
REACHED = {  # in place of constants that were fitted on GPUs
    "efficiency.cpu": 1.0,
    "memory": 1.0,
    "wave": 0.0,  # results are shared out in small pieces
    "depth": 16.0,
    "odd": 0.0,
    "unaligned": 0.0,
    "attention": 0.42,
    "exponentials": math.inf,  # counted among the products
    "logits": 5.0,
    "link": 1.0,
    "network": 1.0,
    "sockets": 1.0,
    "link_latency": 1e-3,  # waking the peer's thread, twice
    "network_latency": 1e-3,
    "hop": 2e-4,
    "stragglers": 0.0,
    "slower.host": 1.0,
    "passes.host": 2.5,
    "launches.host": 2e-3,  # of a block's forward, in line with its work
    "fixed.host": 0.02,
    "hidden_data.host": 0.0,
    "hidden_tensor.host": 0.0,
    "hidden_pipeline.host": 0.0,
}


def host_constants() -> dict[str, float]:
    """Those of the time model, for CPU ranks."""
    return fitted() | REACHED


def host_machine(job: Job, cores: int | None = None) -> Hardware:
    """What a CPU rank has: as the native trainer starts it, cores / ranks threads, at least one.

    Where a node has fewer cores than ranks (`crowd` ranks to a core), a rank that waits leaves
    its core to another.

    Args:
        job: the job.
        cores: of a node; None: not known, one a rank.
    """
    ranks = job.ranks_per_node
    there = cores or ranks
    share = there / ranks
    wide = FP32 if job.training.precision == "fp32" else 1.0
    given = job.cluster.network_gb_per_second
    network = given * 1e9 / ranks if given else LOOPBACK
    return Hardware(
        generation="cpu",
        peak=CORE * share,
        peak16=CORE * share,
        narrow=16,
        memory=MEMORY * share / wide,
        link=LOOPBACK / wide,
        network=network / wide,
        domain=ranks,
        cores=max(1, int(share)),
        per_node=ranks,
        known=False,
        crowd=max(1.0, ranks / there),
    )
