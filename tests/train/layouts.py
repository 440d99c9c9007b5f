"""One model trained by the trainer in any layout, and by the plain loop of
tests/train/plain_loop.py; how far apart their losses and gradients are."""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import pickle
import random
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, Literal
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor
from torch._dynamo.utils import counters

from tests.distributed import run_ranks
from tests.train.plain_loop import (
    APART,
    DTYPES,
    MODELS,
    VOCAB,
    StepFound,
    job_of,
    masked,
    reference,
    sizes_of,
    write_documents,
)
from tests.train.sabotage import SABOTAGE
from trainkit.jobs.ranks import degrees_of
from trainkit.jobs.schema import Job, Parallelism
from trainkit.ops.kernels import choose
from trainkit.train.batches import Feed
from trainkit.train.metrics.timers import Timers
from trainkit.train.parallel.data_parallel import World, join
from trainkit.train.parallel.mesh import Mesh
from trainkit.train.parallel.pipeline import chunks_per_stage, tied_at
from trainkit.train.parallel.shards import Shards
from trainkit.train.preflight import begin_weights
from trainkit.train.update.build import ModelParts, build_model_parts
from trainkit.train.update.step import Step, StepValues

# the other keys are how
WHAT_IS_TRAINED = (
    "global_batch_size",
    "rampup_batch_size",
    "z_loss",
    "train_iters",
    "adam_eps",
    "optimizer",
    *APART,
)


@dataclass(frozen=True)
class Case:
    """A layout to train in.

    Args:
        model: one of MODELS.
        parallelism: keys of the table.
        ranks: of the whole world.
        training: keys of the table, over TRAINING.
        precision: "fp64", or "fp32" for the smoke.
        sabotage: one of SABOTAGE, for proofs that an error would be seen.
        data: one of DATASETS.
        kernels: what it computes with, "reference" or "fused".
    """

    model: str
    parallelism: dict[str, Any]
    ranks: int
    training: dict[str, Any] = field(default_factory=dict)
    precision: str = "fp64"
    sabotage: str = ""
    data: str = "mock"
    kernels: Literal["reference", "fused"] = "reference"

    def job(self, root: Path) -> Job:
        """As ranks train it."""
        return job_of(self.model, self.ranks, root, self.parallelism, self.data, **self.training)

    def alone(self, root: Path) -> Job:
        """What the reference trains: the same steps, whatever computes them."""
        return job_of(
            self.model,
            1,
            root,
            {},
            self.data,
            **{key: value for key, value in self.training.items() if key in self._trained},
        )

    @property
    def _trained(self) -> tuple[str, ...]:
        """Loads of experts are balanced within a micro-batch."""
        experts = MODELS[self.model].moe is not None
        return (*WHAT_IS_TRAINED, *(("micro_batch_size",) if experts else ()))

    @property
    def chunks(self) -> int:
        """Parts of the model that draw random numbers of their own."""
        p = Parallelism(**self.parallelism)
        return p.pipeline_model_parallel_size * chunks_per_stage(p)


def gathered(tensors: dict[str, Shards]) -> dict[str, NDArray[Any]]:
    """All tensors, whole, on rank 0; nothing on the others. What no rank holds is not a number;
    where ranks hold different values it is infinite."""
    mine = {
        name: (
            tuple(shards.shape),
            [(at, view.numpy().copy()) for at, view in shards.parts.items()],
        )
        for name, shards in tensors.items()
    }
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.gather_object(mine, everyone if dist.get_rank() == 0 else None)
    whole: dict[str, NDArray[Any]] = {}
    for held in everyone if dist.get_rank() == 0 else []:
        for name, (shape, parts) in held.items():
            tensor = whole.setdefault(name, np.full(shape, np.nan))
            for at, part in parts:
                box = tensor[
                    tuple(slice(start, start + n) for start, n in zip(at, part.shape, strict=True))
                ]
                box[...] = part if np.isnan(box).all() or np.array_equal(box, part) else np.inf
    return whole


@dataclass(frozen=True)
class Rank:
    """This rank of a world, ready to train."""

    job: Job
    mesh: Mesh
    parts: ModelParts
    step: Step
    feed: Feed


@contextlib.contextmanager
def rank_of_world(case: Case, root: Path) -> Iterator[Rank]:
    """Meet the others and build what the trainer builds; initial weights are there. All inside is
    done with the case's mistake."""
    with mock.patch.object(*SABOTAGE[case.sabotage]) if case.sabotage else contextlib.nullcontext():
        yield from _rank_of_world(case, root)


def _rank_of_world(case: Case, root: Path) -> Iterator[Rank]:
    job, world = case.job(root), World.from_environment()
    device = join(world, "cpu")
    mesh = Mesh.of(
        degrees_of(job),
        world,
        device,
        sequence=job.parallelism.sequence_parallel,
        tied_at=tied_at(job),
        experts=job.model.moe is not None,
    )
    kernels = choose(case.kernels, "cpu").kernels
    parts = build_model_parts(job, mesh, VOCAB, DTYPES[case.precision], kernels)
    begin_weights(job, parts)
    parts.train()
    feed = Feed(job, job.dataset, "train", mesh.data_world, device)
    try:
        yield Rank(job, mesh, parts, Step(job, parts, mesh, Timers(device)), feed)
    finally:
        feed.close()
        dist.destroy_process_group()


def take_steps(
    rank: Rank, sizes: list[tuple[int, int]], loads: list[list[float]] | None = None
) -> list[StepValues]:
    """So many steps by the real Step; `sizes`: of each the samples before it, and its own. Loads
    of experts are added to `loads`."""
    found = []
    for consumed, size in sizes:
        batches = masked(rank.job, rank.feed.read(consumed, size))
        values = rank.step.run(batches, size, stop=False).tolist()
        found.append(StepValues(*values[: len(StepValues._fields)]))
        if loads is not None:
            loads.append(values[len(StepValues._fields) :])
    return found


def train_case(case: Case, root: Path) -> list[StepFound]:
    """Train it on the ranks of this world; what was found, on rank 0."""
    gradients: list[dict[str, NDArray[Any]]] = []
    with rank_of_world(case, root) as rank:
        update = rank.step._update

        def spy(*words: Any) -> Tensor:
            gradients.append(gathered(rank.step.gradients()))  # as they are before clipping
            return update(*words)

        rank.step._update = spy  # type: ignore[method-assign, assignment]
        loads: list[list[float]] = []
        values = take_steps(rank, sizes_of(rank.job), loads)
    return [
        StepFound(v.loss, v.norm, g, np.array(of_experts) if of_experts else None, v.mtp_loss)
        for v, g, of_experts in zip(values, gradients, loads, strict=True)
    ]


@dataclass(frozen=True)
class Apart:
    """How far a layout is from the reference, at most over all steps: relative for losses and
    norms; of gradients the largest element of the difference of a tensor over the largest of
    that tensor, or over a thousandth of the largest of all where that is more. `loads`: the rows
    of experts, of all steps, that are too many or too few."""

    loss: float
    norm: float
    gradient: float
    worst: str
    seconds: float
    loads: float = 0.0


def apart(found: list[StepFound], expected: list[StepFound], seconds: float) -> Apart:
    """Compare losses, norms and gradients of all steps."""
    pairs = list(zip(found, expected, strict=True))
    loss = float(np.max([abs(f.loss / e.loss - 1) for f, e in pairs]))
    further = [abs(f.mtp_loss / e.mtp_loss - 1) for f, e in pairs if e.mtp_loss]
    loss = float(np.max([loss, *further]))
    norm = float(np.max([abs(f.norm / e.norm - 1) for f, e in pairs]))
    loads = sum(float(np.abs(f.loads - e.loads).sum()) for f, e in pairs if e.loads is not None)
    differences: dict[str, float] = {}
    for f, e in pairs:
        assert f.gradients.keys() == e.gradients.keys(), (
            f"not in both: {f.gradients.keys() ^ e.gradients.keys()}"
        )
        floor = 1e-3 * max(np.abs(g).max() for g in e.gradients.values())
        for name, gradient in e.gradients.items():
            assert f.gradients[name].shape == gradient.shape, name
            difference = float(
                np.abs(f.gradients[name] - gradient).max() / max(floor, np.abs(gradient).max())
            )
            differences[name] = max(
                np.inf if np.isnan(difference) else difference, differences.get(name, 0.0)
            )
    worst = max(differences, key=lambda name: differences[name])
    return Apart(loss, norm, differences[worst], worst, seconds, loads)


def compare_case(case: Case, expected: Path, root: Path) -> Apart:
    """Train a case and compare it; `expected`: a file of its reference. The answer means
    something on rank 0."""
    began, compiled = time.perf_counter(), case.training.get("compile", False)
    if compiled:
        # what cases before it have compiled counts towards torch's limit of versions of a function
        torch._dynamo.reset()
        counters.clear()
    steps = train_case(case, root)
    if compiled:  # blocks on every rank, and by inductor: made or found in its cache
        made = {kind: dict(counters[kind]) for kind in ("stats", "inductor")}
        assert made["stats"].get("unique_graphs") and any(
            made["inductor"].get(f"fxgraph_cache_{how}") for how in ("hit", "miss", "bypass")
        ), made
    reference: list[StepFound] = pickle.loads(expected.read_bytes())
    if int(os.environ["RANK"]):
        return Apart(0, 0, 0, "", 0)
    return apart(steps, reference, time.perf_counter() - began)


# What the ranks of a world do one after another: by a name, "module:function" and its arguments.
Tasks = dict[str, tuple[str, tuple[Any, ...]]]


def run_tasks(tasks: Tasks, ports: list[int]) -> dict[str, Any]:
    """What every rank of a world does: each task makes a process group of its own."""
    found = {}
    for (name, (target, words)), port in zip(tasks.items(), ports, strict=True):
        print(name, flush=True)  # the last one of a failed world is what failed
        os.environ["MASTER_PORT"] = str(port)
        if os.environ["RANK"] != "0":
            _wait_for_store(port)
        module, _, function = target.partition(":")
        found[name] = getattr(importlib.import_module(module), function)(*words)
        gc.collect()  # its groups of ranks, each with a thread of gloo that wakes every 10 ms
    return found


def _wait_for_store(port: int) -> None:
    """Until rank 0 listens: torch's own client would be refused once, and then wait for a
    second."""
    while True:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.005)


def quiet_ports() -> Iterator[int]:
    """Ports of the loopback interface that are free, below the range from which connections take
    theirs: each must still be free when its task's turn comes."""
    for port in random.sample(range(12000, 20000), 2000):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("127.0.0.1", port))
            yield port


def run_worlds(tasks: dict[int, Tasks]) -> dict[str, list[Any]]:
    """Each task's results by rank. One world a number of ranks, whose tasks share its processes;
    larger worlds go first."""
    found: dict[str, list[Any]] = {}
    for ranks, of_world in sorted(tasks.items(), reverse=True):
        ports = list(islice(quiet_ports(), len(of_world)))
        results = run_ranks(
            ranks,
            "tests.train.layouts:run_tasks",
            of_world,
            ports,
            timeout=300 + 90 * len(of_world),
        )
        found |= {name: [result[name] for result in results] for name in of_world}
    return found


def references(cases: dict[str, Case], root: Path) -> dict[str, list[StepFound]]:
    """The reference of every case, each trained once."""
    if any(case.data == "documents" for case in cases.values()):
        write_documents(root)
    known: dict[str, list[StepFound]] = {}
    found = {}
    for name, case in cases.items():
        job = case.alone(root)
        chunks = case.chunks if job.model.hidden_dropout else 1
        key = f"{case.precision} {chunks} {job.model_dump_json()}"
        if key not in known:
            known[key] = reference(job, DTYPES[case.precision], chunks)
        found[name] = known[key]
    return found


def comparisons(cases: dict[str, Case], folder: Path) -> dict[int, Tasks]:
    """The tasks that compare cases with their references, by number of ranks."""
    tasks: dict[int, Tasks] = {}
    for number, (name, steps) in enumerate(references(cases, folder).items()):
        expected = folder / f"{number}.reference"
        expected.write_bytes(pickle.dumps(steps))
        tasks.setdefault(cases[name].ranks, {})[name] = (
            "tests.train.layouts:compare_case",
            (cases[name], expected, folder),
        )
    return tasks


def compare(cases: dict[str, Case], folder: Path) -> dict[str, Apart]:
    """How far each case is from its reference."""
    return {name: of_ranks[0] for name, of_ranks in run_worlds(comparisons(cases, folder)).items()}
