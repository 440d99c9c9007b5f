"""Weights and moments written in one layout and read in another, bit by bit; and weights of
Hugging Face's files into every layout."""

from __future__ import annotations

import functools
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.distributed import run_ranks
from tests.train.hf_support import write
from tests.train.support import tiny_job
from tests.trained import new_run, text_job, write_checkpoint
from trainkit.base.errors import ConfigError
from trainkit.jobs.ranks import degrees_of
from trainkit.jobs.schema import Job, Model, Parallelism
from trainkit.runs.checkpoints import Checkpoint, checkpoint_folder, open_checkpoint
from trainkit.train.checkpoint import save_load as checkpoint
from trainkit.train.checkpoint.save_load import CheckpointMetadata
from trainkit.train.huggingface import load_weights
from trainkit.train.metrics.timers import Timers
from trainkit.train.model.transformer import build_on_meta
from trainkit.train.parallel.data_parallel import World, join
from trainkit.train.parallel.initialize import initial_value
from trainkit.train.parallel.mesh import Mesh
from trainkit.train.parallel.pipeline import tied_at
from trainkit.train.parallel.shards import Shards, slices
from trainkit.train.preflight import refuse_what_cannot_run
from trainkit.train.update.build import build_model_parts
from trainkit.train.update.step import Step

ROWS = 301
SIZES: dict[str, Any] = {
    "hidden_size": 24,
    "num_attention_heads": 4,
    "seq_length": 16,
    "vocab_size": ROWS,
    "ffn_hidden_size": 71,
}
MODELS = {
    "gpt": Model(name="gpt", num_layers=5, **SIZES),  # tied
    "llama": Model(name="llama", family="llama", num_layers=4, num_query_groups=2, **SIZES),
    "muon": Model(name="muon", family="olmo2", num_layers=4, num_query_groups=2, **SIZES),
}
LAYOUTS: dict[str, dict[str, Any]] = {
    "tensor 4": {"tensor_model_parallel_size": 4},
    "tensor 2, pipeline 2": {
        "tensor_model_parallel_size": 2,
        "pipeline_model_parallel_size": 2,
        "sequence_parallel": True,
    },
    "pipeline 2, zbv": {"pipeline_model_parallel_size": 2, "pipeline_schedule": "zbv"},
    "pipeline 4, ZeRO 3": {"pipeline_model_parallel_size": 4, "zero_stage": 3},
    "HSDP 2 x 2": {"data_parallel_replicate_size": 2, "zero_stage": 3},
    "ZeRO 0": {"zero_stage": 0},
}


def job_in(root: Path, model: str, ranks: int, keys: dict[str, Any], **training: Any) -> Job:
    return tiny_job(ranks, root, **training).model_copy(
        update={"model": MODELS[model], "parallelism": Parallelism(**keys)}
    )


@functools.cache
def value(name: str, shape: tuple[int, ...], factor: float = 1.0) -> Tensor:
    """What a tensor of a checkpoint holds here: no two elements alike, by name."""
    return factor * initial_value(f"{name}.weight", (*shape, 1), MODELS["gpt"], 7)[..., 0].abs()


def made_in(root: Path, model: str, keys: dict[str, Any]) -> Step:
    world = World.from_environment()
    optimizer = "muon" if model == "muon" else "adam"
    job, device = job_in(root, model, world.size, keys, optimizer=optimizer), join_once(world)
    mesh = Mesh.of(
        degrees_of(job),
        world,
        device,
        sequence=job.parallelism.sequence_parallel,
        tied_at=tied_at(job),
    )
    return Step(job, build_model_parts(job, mesh, ROWS), mesh, Timers(device))


@functools.cache
def join_once(world: World) -> torch.device:
    return join(world, "cpu")


def fill(tensors: dict[str, Shards], factor: float = 1.0) -> None:
    for name, shards in tensors.items():
        whole = value(name, tuple(shards.shape), factor)
        for at, view in shards.parts.items():
            view.copy_(whole[slices(at, view)])


def differing(tensors: dict[str, Shards]) -> list[str]:
    """Names of those that are not what `fill` would make of them."""
    wrong = []
    for name, shards in tensors.items():
        whole = value(name, tuple(shards.shape))
        if not all(torch.equal(view, whole[slices(at, view)]) for at, view in shards.parts.items()):
            wrong.append(name)
    return wrong


@torch.no_grad()
def written_and_read(root: Path, hub: Path | None) -> dict[str, Any]:
    """Every layout writes, every layout reads all of it; what is wrong then."""
    found: dict[str, Any] = {}
    asked: list[int] = []  # room for so many bytes
    checkpoint._refuse_without_room = lambda checkpoints, make_room, needed: asked.append(needed)
    for model, shape in MODELS.items():
        made = {name: made_in(root, model, keys) for name, keys in LAYOUTS.items()}
        for n, step in enumerate(made.values()):
            tensors = step.tensors()
            fill(tensors)
            step.after_loading()
            asked.clear()
            saved = checkpoint.save(
                root / model, tensors, CheckpointMetadata(n, consumed_samples=0)
            )
            # parts are aligned
            if asked != (
                [saved.bytes] if dist.get_rank() == 0 else []
            ) or saved.bytes > 1.1 * whole_bytes(step):
                found[f"{model}: {n} asks for"] = [f"room for {asked} bytes, it has {saved.bytes}"]
        for name, step in made.items():
            tensors = step.tensors()
            for n, writer in enumerate(LAYOUTS):
                fill(tensors, 0.5)
                checkpoint.load(
                    open_checkpoint(checkpoint_folder(root / model, n)), tensors, step.expected()
                )
                step.after_loading()
                found[f"{model}: {writer} -> {name}"] = differing(tensors) + second_copies(step)
            if hub is not None:
                load_weights(hub / model, step.model_parts.parameters, shape, ROWS)
                weights = {key: t for key, t in tensors.items() if key.startswith("model.")}
                found[f"{model}: hub -> {name}"] = differing(weights) + [
                    key for key in second_copies(step) if "optimizer" not in key
                ]
    return found


def whole_bytes(step: Step) -> int:
    """Of all tensors of a checkpoint, once."""
    return sum(math.prod(shape) * 4 for shape in step.expected().values())


def second_copies(step: Step) -> list[str]:
    """Tied weights on one rank twice, where the copies differ."""
    return [
        key
        for key, held in step.model_parts.parameters.items()
        if key != held.name and not torch.equal(*(p.to_local() for p in two(step, key)))
    ]


def two(step: Step, key: str) -> tuple[Any, Any]:
    return step.parameters[key].detach(), step.parameters[
        step.model_parts.parameters[key].name
    ].detach()


def test_every_layout_reads_what_every_other_wrote(tmp_path: Path) -> None:
    """One process reads them too, and writes the Hugging Face files that all layouts read."""
    for model in MODELS.values():
        module = build_on_meta(model, ROWS)
        module.to_empty(device="cpu")
        with torch.no_grad():
            for name, p in module.named_parameters():
                p.copy_(value(f"model.{name}", tuple(p.shape)))
        saved = one_process_saves(tmp_path / "alone" / model.name, module)
        write(saved, model, tmp_path / "hub" / model.name)
    found = run_ranks(
        4,
        "tests.train.checkpoint.test_layout_checkpoint:written_and_read",
        tmp_path / "four",
        tmp_path / "hub",
        timeout=900,
    )
    for rank, of_rank in enumerate(found):
        wrong = {what: names for what, names in of_rank.items() if names}
        assert not wrong, f"rank {rank}: {wrong}"
        assert len(of_rank) == len(MODELS) * len(LAYOUTS) * (len(LAYOUTS) + 1)
    for model in MODELS.values():
        module = build_on_meta(model, ROWS)
        module.to_empty(device="cpu")
        for n in range(len(LAYOUTS)):
            checkpoint.load(
                open_checkpoint(checkpoint_folder(tmp_path / "four" / model.name, n)), plain(module)
            )
            assert all(
                torch.equal(p, value(f"model.{name}", tuple(p.shape)))
                for name, p in module.named_parameters()
            )


def plain(module: torch.nn.Module) -> dict[str, Tensor]:
    return {f"model.{name}": p.detach() for name, p in module.named_parameters()}


def one_process_saves(folder: Path, module: torch.nn.Module) -> Checkpoint:
    """What a checkpoint of these weights by one process is."""
    run = new_run(text_job(folder))
    return open_checkpoint(write_checkpoint(run, module, 1))


@pytest.mark.parametrize(
    ("keys", "training", "words"),
    [
        (
            {"tensor_model_parallel_size": 3},
            {},
            ["num_attention_heads 4 does not divide by tensor-parallel size 3"],
        ),
        (
            {"tensor_model_parallel_size": 12, "sequence_parallel": True},
            {},
            ["num_attention_heads", "seq_length 16 does not divide"],
        ),
        ({"pipeline_model_parallel_size": 6}, {}, ["4 layers for 6 pipeline stages"]),
        (
            {"pipeline_model_parallel_size": 2, "zero_stage": 2},
            {},
            ["engine native has no ZeRO stage 2 under a pipeline"],
        ),
        (
            {"pipeline_model_parallel_size": 2, "pipeline_schedule": "zbv", "zero_stage": 3},
            {},
            ["engine native has no ZeRO stage 3 under a zero-bubble pipeline"],
        ),
        (
            {"data_parallel_replicate_size": 5},
            {},
            ["data_parallel_replicate_size 5 does not divide data-parallel size 12"],
        ),
        (
            {},
            {"global_batch_size": 20},
            ["global_batch_size 20 does not divide by micro_batch_size 2 x data-parallel size 12"],
        ),
    ],
)
def test_layouts_that_cannot_be_are_refused(
    tmp_path: Path, keys: dict[str, Any], training: dict[str, Any], words: list[str]
) -> None:
    job = job_in(tmp_path, "llama", 12, keys, **{"global_batch_size": 48, **training})
    with pytest.raises(ConfigError) as refused:
        refuse_what_cannot_run(job, World(0, 11), begins=False)
    text = str(refused.value)
    assert "is for 12 ranks and was started with 11" in text
    assert all(word in text for word in words), text
