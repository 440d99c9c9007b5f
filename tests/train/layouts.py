"""One model trained by one plain PyTorch loop, and by the trainer in any layout; how far apart
their losses and gradients are.

The reference knows nothing of micro-batches, shards or schedules: the same model code on the
whole global batch, torch's own cross-entropy, clipping and AdamW. It shares with the trainer the
initial weights, the samples, and two numbers that the fused optimizer takes in fp32: rate and
divisor. Of a model that drops out it goes sample by sample and is told where chunks begin:
there, and nowhere else, random numbers begin anew.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import pickle
import random
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import islice, pairwise
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import tokenizers
import tokenizers.models
import torch
import torch.distributed as dist
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor
from torch._dynamo.utils import counters

from tests.distributed import run_ranks
from trainkit.data.indexed.dataset import IndexedWriter
from trainkit.data.indexed.paths import DataFolder
from trainkit.jobs.ranks import degrees_of
from trainkit.jobs.schema import Cluster, Dataset, Job, Model, Parallelism, Tokenizer, Training
from trainkit.plan.layout import split_layers
from trainkit.train.batches import Feed
from trainkit.train.metrics.timers import Timers
from trainkit.train.model.attention import Documents
from trainkit.train.model.batch import Batch
from trainkit.train.model.head_loss import NO_LABEL
from trainkit.train.model.transformer import Transformer
from trainkit.train.parallel.data_parallel import World, join
from trainkit.train.parallel.initialize import initial_value
from trainkit.train.parallel.mesh import Mesh
from trainkit.train.parallel.pipeline import chunks_per_stage, tied_at
from trainkit.train.parallel.shards import Shards
from trainkit.train.preflight import begin_weights
from trainkit.train.update import replicas
from trainkit.train.update.build import Parts, build
from trainkit.train.update.schedule import global_batch_size, learning_rate
from trainkit.train.update.step import Step, StepValues, dropout_seed

STEPS = 10
DTYPES = {"fp64": torch.float64, "fp32": torch.float32}
VOCAB = 61  # a prime: it divides by no tensor-parallel size
END = 7  # ends a document
SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "num_attention_heads": 4,
    "seq_length": 16,
    "vocab_size": VOCAB,
    "ffn_hidden_size": 72,
    "init_method_std": 0.1,
}
MODELS = {
    # tied; 5 layers are uneven on any number of stages
    "gpt": Model(family="gpt", num_layers=5, **SIZES),
    "gpt-deep": Model(family="gpt", num_layers=9, **SIZES),
    "gpt-untied": Model(
        family="gpt", num_layers=5, untie_embeddings_and_output_weights=True, **SIZES
    ),
    # untied, attention and MLP side by side
    "neox": Model(family="gpt-neox", num_layers=8, **SIZES),
    "neox-tied": Model(
        family="gpt-neox",
        num_layers=5,
        untie_embeddings_and_output_weights=False,
        gpt_j_tied=True,
        **SIZES,
    ),
    # fewer heads of keys and values than 4 tensor-parallel ranks
    "llama": Model(family="llama", num_layers=8, num_query_groups=2, **SIZES),
    "llama-tied": Model(
        family="llama",
        num_layers=5,
        num_query_groups=2,
        untie_embeddings_and_output_weights=False,
        **SIZES,
    ),
    "llama-1-group": Model(family="llama", num_layers=4, num_query_groups=1, **SIZES),
    "gpt-dropping": Model(
        family="gpt", num_layers=5, hidden_dropout=0.2, attention_dropout=0.2, **SIZES
    ),
}
TRAINING: dict[str, Any] = {
    "micro_batch_size": 1,
    "global_batch_size": 8,
    "train_iters": STEPS,
    "lr": 5e-3,
    "lr_warmup_iters": 3,
    "lr_warmup_init": 1e-3,
    "weight_decay": 0.1,
    "clip_grad": 0.5,  # below every norm of these models
    "z_loss": 1e-3,
    "eval_iters": 0,
}


@dataclass(frozen=True)
class StepFound:
    """One step: mean cross-entropy, gradient norm, and the gradient of every parameter by name
    and global shape before clipping, of all losses' sum over the number of all tokens; where
    labels are masked, loss and norm are those of the mean over the others."""

    loss: float
    norm: float
    gradients: dict[str, NDArray[Any]]


DATASETS = {
    "mock": Dataset(name="mock", source="mock", split="90,10,0"),
    "documents": Dataset(
        name="documents",
        source="files",
        paths=("x",),
        split="1",
        tokenizer=Tokenizer(name="own", type="file", path="x"),
    ),
}
# Where each document is a sequence of its own, and its end has no label.
APART: dict[str, Any] = {
    "reset_attention_mask": True,
    "reset_position_ids": True,
    "eod_mask_loss": True,
}


def write_documents(root: Path) -> None:
    """The files of the dataset `documents`: some random tokens in each, as data preparation
    leaves them."""
    folder, random = DataFolder(root, DATASETS["documents"]), np.random.default_rng(5)
    with IndexedWriter(folder.prefix, np.uint16) as writer:
        for length in random.integers(1, 12, 400):
            writer.add_document(
                np.append(random.integers(END + 1, VOCAB, length), END).astype(np.uint16)
            )
    words = {"<|endoftext|>" if i == END else f"word{i}": i for i in range(VOCAB)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="word0"))
    tokenizer.add_special_tokens(["<|endoftext|>"])
    tokenizer.save(str(folder.tokenizer))
    folder.manifest.write_text(json.dumps({"schema": "dataset/1", "vocab_size": VOCAB}))


def job_of(
    model: str,
    ranks: int,
    root: Path,
    parallelism: dict[str, Any],
    data: str = "mock",
    **training: Any,
) -> Job:
    """A job of one of MODELS on one of DATASETS."""
    return Job(
        name="matrix",
        cluster=Cluster(name="here", ranks_per_node=ranks, root=str(root)),
        model=MODELS[model].model_copy(update={"name": model}),
        dataset=DATASETS[data],
        parallelism=Parallelism(**parallelism),
        training=Training(**{**TRAINING, **training}),
    )


def sizes_of(job: Job) -> list[tuple[int, int]]:
    """(samples before, samples) of every step."""
    consumed, found = 0, []
    for _ in range(job.training.train_iters):
        found.append((consumed, global_batch_size(job, consumed)))
        consumed += found[-1][1]
    return found


def whole_batches(job: Job) -> list[Batch]:
    """Every step's global batch as one."""
    feed = Feed(job, job.dataset, "train", World(0, 1), torch.device("cpu"))
    try:
        return [_joined(list(feed.read(consumed, size))) for consumed, size in sizes_of(job)]
    finally:
        feed.close()


def _joined(batches: list[Batch]) -> Batch:
    tokens_BS, labels_BS = (
        torch.cat([b.tokens_BS for b in batches]),
        torch.cat([b.labels_BS for b in batches]),
    )
    positions = [b.positions_BS for b in batches if b.positions_BS is not None]
    starts, documents = [0], None
    for found in (b.documents for b in batches if b.documents is not None):
        starts += [starts[-1] + bound for bound in found.bounds[1:]]
        documents = Documents(
            tuple(starts),
            torch.tensor(starts, dtype=torch.int32),
            max(b - a for a, b in pairwise(starts)),
        )
    return Batch(
        tokens_BS,
        labels_BS,
        0,
        batches[0].position,
        torch.cat(positions) if positions else None,
        documents,
    )


def _begin_anew(seed: int, *_: Any) -> None:
    torch.manual_seed(seed)


def _logits(model: Transformer, batch: Batch, job: Job, chunks: int) -> Tensor:
    """(N, V) of a whole batch, by the plain model; of one that drops out sample by sample,
    random numbers beginning anew at each of `chunks` parts."""
    if not job.model.hidden_dropout:
        logits_BSV: Tensor = model(
            batch.tokens_BS, positions_BS=batch.positions_BS, documents=batch.documents
        )
        return logits_BSV.flatten(0, 1)
    sizes, rows = split_layers(job.model.num_layers, chunks), []
    first = [
        model.embed_tokens,
        *(model.layers[str(sum(sizes[:part]))] for part in range(1, chunks)),
    ]
    for position, row_S in enumerate(batch.tokens_BS, start=batch.position):
        seeds = [dropout_seed(job.training.seed, position, part) for part in range(chunks)]
        hooks = [
            module.register_forward_pre_hook(partial(_begin_anew, seed))
            for module, seed in zip(first, seeds, strict=True)
        ]
        rows.append(model(row_S[None])[0])
        for hook in hooks:
            hook.remove()
    return torch.cat(rows)


def reference(job: Job, dtype: torch.dtype, chunks: int = 1) -> list[StepFound]:
    """Train `job` by the plain loop. `chunks`: in how many parts random numbers are drawn, where
    there are any."""
    t, model = job.training, Transformer(job.model, VOCAB).to(dtype)
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(initial_value(name, tuple(p.shape), job.model, t.seed))
    matrices, others = (
        [p for p in model.parameters() if (p.dim() > 1) == many] for many in (True, False)
    )
    groups = [
        {"params": matrices, "weight_decay": t.weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(
        groups, betas=(t.adam_beta1, t.adam_beta2), eps=t.adam_eps, foreach=False
    )
    found = []
    for step, batch in enumerate(whole_batches(job)):
        logits_NV, labels_N = _logits(model, batch, job, chunks), batch.labels_BS.flatten()
        counted_N = labels_N != NO_LABEL
        entropy = F.cross_entropy(logits_NV, labels_N)  # the mean of those that have a label
        objective = entropy + t.z_loss * logits_NV[counted_N].logsumexp(-1).square().mean()
        objective.backward()  # type: ignore[no-untyped-call]
        share = float(counted_N.double().mean())
        gradients = {
            name: share * p.grad.numpy()
            for name, p in model.named_parameters()
            if p.grad is not None
        }
        norm = torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None]).norm()
        divisor = max(1.0, float(norm + 1e-6) / t.clip_grad)
        for p in model.parameters():
            assert p.grad is not None
            p.grad *= share / float(np.float32(divisor * share))
        for group in optimizer.param_groups:
            group["lr"] = float(np.float32(learning_rate(t, step)))
        optimizer.step()
        optimizer.zero_grad()
        found.append(StepFound(float(entropy.detach()), float(norm), gradients))
    return found


# the other keys are how
WHAT_IS_TRAINED = (
    "global_batch_size",
    "rampup_batch_size",
    "z_loss",
    "train_iters",
    "adam_eps",
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
    """

    model: str
    parallelism: dict[str, Any]
    ranks: int
    training: dict[str, Any] = field(default_factory=dict)
    precision: str = "fp64"
    sabotage: str = ""
    data: str = "mock"

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
            **{key: value for key, value in self.training.items() if key in WHAT_IS_TRAINED},
        )

    @property
    def chunks(self) -> int:
        """Parts of the model that draw random numbers of their own."""
        p = Parallelism(**self.parallelism)
        return p.pipeline_model_parallel_size * chunks_per_stage(p)


def _nothing(*_: Any) -> None:
    """In the place of a sum."""


# What a mistake would be like: (object, attribute, what takes its place).
SABOTAGE: dict[str, tuple[Any, str, Any]] = {
    "tensor-parallel replicas are not summed": (replicas, "_over_tensor_ranks", _nothing),
    "tied copies are not summed": (replicas, "_over_tied", _nothing),
}


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
    parts: Parts
    step: Step
    feed: Feed


@contextlib.contextmanager
def rank_of_world(case: Case, root: Path) -> Iterator[Rank]:
    """Meet the others and build what the trainer builds; initial weights are there."""
    job, world = case.job(root), World.from_environment()
    device = join(world, "cpu")
    mesh = Mesh.of(
        degrees_of(job),
        world,
        device,
        sequence=job.parallelism.sequence_parallel,
        tied_at=tied_at(job),
    )
    parts = build(job, mesh, VOCAB, DTYPES[case.precision])
    begin_weights(job, parts)
    parts.train()
    feed = Feed(job, job.dataset, "train", mesh.data_world, device)
    try:
        yield Rank(job, mesh, parts, Step(job, parts, mesh, Timers(device)), feed)
    finally:
        feed.close()
        dist.destroy_process_group()


def take_steps(rank: Rank, sizes: list[tuple[int, int]]) -> list[StepValues]:
    """So many steps by the real Step; `sizes`: of each the samples before it, and its own."""
    return [
        StepValues(*rank.step.run(rank.feed.read(consumed, size), size, stop=False).tolist())
        for consumed, size in sizes
    ]


def train_case(case: Case, root: Path) -> list[StepFound]:
    """Train it on the ranks of this world; what was found, on rank 0."""
    gradients: list[dict[str, NDArray[Any]]] = []
    with rank_of_world(case, root) as rank:
        update = rank.step._update

        def spy(*words: Any) -> Tensor:
            gradients.append(gathered(rank.step.gradients()))  # as they are before clipping
            return update(*words)

        rank.step._update = spy  # type: ignore[method-assign, assignment]
        values = take_steps(rank, sizes_of(rank.job))
    return [StepFound(v.loss, v.norm, g) for v, g in zip(values, gradients, strict=True)]


@dataclass(frozen=True)
class Apart:
    """How far a layout is from the reference, at most over all steps: relative for losses and
    norms; of gradients the largest element of the difference of a tensor over the largest of
    that tensor, or over a thousandth of the largest of all where that is more."""

    loss: float
    norm: float
    gradient: float
    worst: str
    seconds: float


def apart(found: list[StepFound], expected: list[StepFound], seconds: float) -> Apart:
    """Compare losses, norms and gradients of all steps."""
    pairs = list(zip(found, expected, strict=True))
    loss = float(np.max([abs(f.loss / e.loss - 1) for f, e in pairs]))
    norm = float(np.max([abs(f.norm / e.norm - 1) for f, e in pairs]))
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
    return Apart(loss, norm, differences[worst], worst, seconds)


def compare_case(case: Case, expected: Path, root: Path) -> Apart:
    """Train a case and compare it; `expected`: a file of its reference. The answer means
    something on rank 0."""
    began, compiled = time.perf_counter(), case.training.get("compile", False)
    if compiled:
        # what cases before it have compiled counts towards torch's limit of versions of a function
        torch._dynamo.reset()
        counters.clear()
    with mock.patch.object(*SABOTAGE[case.sabotage]) if case.sabotage else contextlib.nullcontext():
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
        os.environ["MASTER_PORT"] = str(port)
        module, _, function = target.partition(":")
        found[name] = getattr(importlib.import_module(module), function)(*words)
    return found


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
            timeout=300 + 20 * len(of_world),
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
