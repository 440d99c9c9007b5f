"""Megatron-LM's checkpoints of the format `torch`, as GPTModel of Megatron-core 0.12 and newer
names its tensors; those of `torch_dist` are read by megatron_dist.py.

<folder>/latest_checkpointed_iteration.txt names `release` or an iteration; release/ or
iter_0000003/ holds mp_rank_TT/model_optim_rng.pt, with pipeline stages mp_rank_TT_PPP/: a
dictionary with `args`, `checkpoint_version`, `iteration`, `model` (`model0`, `model1` with virtual
stages) and what training needs besides (Megatron-LM, training/checkpointing.py,
get_checkpoint_name and generate_state_dict; core/models/gpt). `release` is Megatron-LM's own word
for weights without an optimizer.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from trainkit.base.errors import ConfigError, Exit, TrainkitError
from trainkit.base.files import write_text
from trainkit.engines.convert.files import existing, save_pickle, tracked_name
from trainkit.engines.convert.megatron_args import (
    args_problems,
    gelu_of,
    megatron_args,
    model_problems,
)
from trainkit.engines.convert.megatron_dist import DistributedWeights, args_of, read_metadata
from trainkit.engines.convert.options import FileLayout, refuse
from trainkit.engines.convert.pickles import InertValue, read_pickle
from trainkit.engines.convert.tensors import (
    EngineTensor,
    block_tensors,
    indivisible_problem,
    padded,
    part,
)
from trainkit.engines.convert.weights import EngineWeights, gather
from trainkit.jobs.schema import Model
from trainkit.plan.layout import padded_vocab_size
from trainkit.train.huggingface.names import table
from trainkit.train.huggingface.weights import NamedWeights, in_dtype, vocabulary

TRACKER = "latest_checkpointed_iteration.txt"
RELEASE = "release"
FILE = "model_optim_rng.pt"
VERSION = 3.0  # of the order of rows in linear_qkv
NAMES = ("local", "transformer_engine")  # as --transformer-impl
EXTRA = "_extra_state"
PARTS = ("embedding.", "decoder.", "output_layer.")  # the model's names in torch_dist
GELU_NOTE = "it was trained with the {} form of GELU (bias_gelu_fusion)"
MODULES = {
    "attention_norm": "input_layernorm",
    "attention.qkv": "self_attention.linear_qkv",
    "attention.q_norm": "self_attention.q_layernorm",
    "attention.k_norm": "self_attention.k_layernorm",
    "attention.out": "self_attention.linear_proj",
    "mlp_norm": "pre_mlp_layernorm",
    "mlp.up": "mlp.linear_fc1",
    "mlp.gate_up": "mlp.linear_fc1",
    "mlp.down": "mlp.linear_fc2",
}
# Transformer Engine has the norm inside the projection that follows.
FUSED = {
    "input_layernorm.": "self_attention.linear_qkv.layer_norm_",
    "pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_",
}
LINEARS = ("self_attention.linear_qkv", "self_attention.linear_proj", "mlp.linear_fc1")
LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
RANK_FOLDER = re.compile(r"mp_rank_(\d{2,})(?:_(\d{3,}))?(?:_(\d{3,}))?")
CHUNK = re.compile(r"model(\d*)")


def plan(model: Model) -> list[EngineTensor]:
    """All tensors of a model, with the names of transformer_impl "local"."""
    family = model.architecture
    found = [
        EngineTensor("embed_tokens.weight", "embedding.word_embeddings.weight", "vocabulary"),
    ]
    if family.learned_positions:
        found.append(EngineTensor("embed_positions.weight", "embedding.position_embeddings.weight"))
    block = block_tensors(model, _modules(model), "replicated")
    for i in range(model.num_layers):
        found += [
            replace(how, ours=f"layers.{i}.{how.ours}", theirs=f"decoder.layers.{i}.{how.theirs}")
            for how in block
        ]
    found += [
        EngineTensor(f"final_norm.{kind}", f"decoder.final_layernorm.{kind}")
        for kind in family.norm.parameters
    ]
    if model.untied:
        found.append(EngineTensor("head.weight", "output_layer.weight", "vocabulary"))
    return found


def _modules(model: Model) -> dict[str, str]:
    unused = {"mlp.up", "mlp.gate_up"} - {f"mlp.{model.mlp.module}"}
    if model.query_key_norm == "none":
        unused |= {"attention.q_norm", "attention.k_norm"}
    return {ours: theirs for ours, theirs in MODULES.items() if ours not in unused}


def refuse_impossible(model: Model, layout: FileLayout) -> None:
    """Raise ConfigError, with all reasons, where Megatron-LM has no such model or layout."""
    problems = list(model_problems(model))
    if found := indivisible_problem(model, layout.tensor):
        problems.append(found)
    if layout.pipeline < 1:
        problems.append("--pipeline-parallel-size must be at least 1")
    elif model.num_layers % layout.pipeline:
        problems.append(
            f"num_layers {model.num_layers} does not divide by --pipeline-parallel-size"
            f" {layout.pipeline}"
        )
    if layout.names not in ("", *NAMES):
        problems.append(f"--names {layout.names!r} is not one of: {', '.join(NAMES)}")
    refuse(problems, "megatron-lm")


def write(weights: NamedWeights, model: Model, layout: FileLayout, folder: Path) -> None:
    """Write a model's weights into a new folder.

    Args:
        weights: what is written.
        model: its shape, which `refuse_impossible` lets pass.
        layout: how many files, and their names.
        folder: where; it is made.
    """
    rows = padded_vocab_size(vocabulary(weights), layout.divisor, layout.tensor)
    for stage in range(layout.pipeline):
        for rank in range(layout.tensor):
            name = f"mp_rank_{rank:02d}"
            if layout.pipeline > 1:
                name += f"_{stage:03d}"
            content = {
                "args": argparse.Namespace(**megatron_args(model, layout, rows)),
                "checkpoint_version": VERSION,
                "iteration": 0,
                "model": _stage_tensors(weights, model, layout, stage, rank),
            }
            save_pickle(content, folder / RELEASE / name / FILE)
    write_text(folder / TRACKER, RELEASE)


def _stage_tensors(
    weights: NamedWeights, model: Model, layout: FileLayout, stage: int, rank: int
) -> dict[str, Tensor | None]:
    """What one rank has, by the names it has there."""
    rows = padded_vocab_size(vocabulary(weights), layout.divisor, layout.tensor)
    per_stage = model.num_layers // layout.pipeline
    found: dict[str, Tensor | None] = {}
    for how, theirs in _of_stage(model, layout.pipeline, stage):
        tensor = in_dtype(how.ours, weights.read(how.ours), layout.dtype)
        if how.split == "vocabulary":
            tensor = padded(tensor, rows)
        found[_named(theirs, layout.names)] = part(tensor, how, model, rank, layout.tensor)
    # what modules of the engine ask for besides tensors; they have nothing to say
    for i in range(per_stage):
        found |= {f"decoder.layers.{i}.{name}.{EXTRA}": None for name in _linears(layout.names)}
    if stage == layout.pipeline - 1:
        found[f"output_layer.{EXTRA}"] = None
    return found


def _linears(names: str) -> Iterator[str]:
    yield from (*LINEARS, "mlp.linear_fc2")
    if names == "transformer_engine":
        yield "self_attention.core_attention"


def _of_stage(model: Model, stages: int, stage: int) -> Iterator[tuple[EngineTensor, str]]:
    """The tensors of a pipeline stage, each with its name there: layers count from 0 on every
    stage, and the last has a copy of a tied embedding."""
    per_stage = model.num_layers // stages
    tensors = plan(model)
    if stages > 1 and not model.untied:
        tensors.append(replace(tensors[0], theirs="output_layer.weight"))
    for how in tensors:
        layer = LAYER.fullmatch(how.theirs)
        if layer:
            number = int(layer[1]) - stage * per_stage
            if 0 <= number < per_stage:
                yield how, f"decoder.layers.{number}.{layer[2]}"
        elif stage == (0 if how.theirs.startswith("embedding.") else stages - 1):
            yield how, how.theirs


def _named(name: str, names: str) -> str:
    """A name of transformer_impl "local" as the asked one has it."""
    if names == "transformer_engine":
        for local, fused in FUSED.items():
            if f".{local}" in name:
                return name.replace(local, fused)
    return name


def _local(name: str) -> str:
    """A name of either transformer_impl as "local" has it."""
    for local, fused in FUSED.items():
        if f".{fused}" in name:
            return name.replace(fused, local)
    return name


def read(folder: Path, model: Model, vocab_size: int) -> EngineWeights | DistributedWeights:
    """The weights of a checkpoint.

    Args:
        folder: iter_N or release.
        model: the job's.
        vocab_size: rows of the embedding without padding.

    Raises:
        ConfigError: exit 3, it is of another model, of another format, damaged, or would execute
        something.
    """
    if any(folder.glob("*.distcp")):
        return _read_distributed(folder, model, vocab_size)
    files = _rank_files(folder)
    contents = {place: read_pickle(path) for place, path in files.items()}
    tensor = 1 + max(rank for rank, _ in files)
    stages = 1 + max(stage for _, stage in files)
    args = _attributes(contents[0, 0].get("args"))
    refuse([*args_problems(args, model, tensor, stages)], "named weights", folder)
    gathered = [
        _whole_model([contents[rank, stage] for stage in range(stages)], folder)
        for rank in range(tensor)
    ]
    for names in gathered:
        _drop_tied_head(names, model, folder)
    trained = gelu_of(args, model)
    found = gather(folder, trained, vocab_size, plan(model), gathered)
    if trained.gelu_form != model.gelu_form:
        note = GELU_NOTE.format(trained.gelu_form)
        return replace(found, notes=(*found.notes, note))
    return found


def _read_distributed(folder: Path, model: Model, vocab_size: int) -> DistributedWeights:
    """The weights of a folder of torch_dist; as `read` otherwise."""
    args = args_of(folder)
    degrees = (args.get("tensor_model_parallel_size"), args.get("pipeline_model_parallel_size"))
    refuse([*args_problems(args, model, *degrees)], "named weights", folder)
    trained = gelu_of(args, model)
    sizes, boxes = read_metadata(folder)
    there = {_local(name): name for name in sizes if name.startswith(PARTS)}
    entries = table(trained, vocab_size)
    found: dict[str, tuple[EngineTensor, int | None]] = {}
    problems = []
    for how in plan(trained):
        layer = LAYER.fullmatch(how.theirs)
        name = how.theirs
        number = None
        shape = entries[how.ours].shape
        if layer and name not in there:
            name = f"decoder.layers.{layer[2]}"
            number = int(layer[1])
            shape = (trained.num_layers, *shape)
        theirs = there.get(name)
        if theirs is None:
            problems.append(f"{name} is not in it")
            continue
        size = sizes[theirs]
        rows = how.split == "vocabulary" and size[0] >= vocab_size
        if size != shape and not (rows and size[1:] == shape[1:]):
            problems.append(f"{theirs} is {list(size)} there, {list(shape)} in the job's model")
        found[how.ours] = (replace(how, theirs=theirs), number)
    used = {how.theirs for how, _ in found.values()}
    problems += [f"{name} is not in the job's model" for name in there.values() if name not in used]
    refuse(list(dict.fromkeys(problems)), "named weights", folder)
    notes: tuple[str, ...] = ()
    if trained.gelu_form != model.gelu_form:
        notes = (GELU_NOTE.format(trained.gelu_form),)
    return DistributedWeights(folder, trained, vocab_size, found, sizes, boxes, notes)


def _rank_files(folder: Path) -> dict[tuple[int, int], Path]:
    """The file of each (tensor-parallel rank, pipeline stage). Raises ConfigError."""
    if not folder.is_dir():
        raise ConfigError(f"{folder} is missing")
    files = {}
    for path in sorted(folder.iterdir()):
        match = RANK_FOLDER.fullmatch(path.name)
        if match and match[3] is not None:
            raise ConfigError(f"{path} is of a model with experts, which trainkit does not have")
        if match:
            files[int(match[1]), int(match[2] or 0)] = path / FILE
    if not files:
        raise ConfigError(f"{folder} has no mp_rank_00: it is not a checkpoint of Megatron-LM")
    tensor = 1 + max(rank for rank, _ in files)
    stages = 1 + max(stage for _, stage in files)
    for rank in range(tensor):
        for stage in range(stages):
            if (rank, stage) not in files:
                raise ConfigError(
                    f"{folder} lacks the folder of tensor-parallel rank {rank}, pipeline stage"
                    f" {stage}"
                )
    return files


def _attributes(args: object) -> Mapping[str, object]:
    """`args` of a checkpoint by name."""
    if isinstance(args, InertValue):
        return args.attributes
    return {}


def _whole_model(stages: list[dict[str, object]], folder: Path) -> dict[str, object]:
    """One tensor-parallel rank's tensors over all its pipeline stages, layers counted from the
    model's first.

    With virtual stages, stage p has the chunks `model0`, `model1`, ...: chunk v of all stages
    comes before chunk v + 1 of any (Megatron-LM, get_transformer_layer_offset).
    """
    chunks: list[tuple[int, int, object]] = []
    for stage, content in enumerate(stages):
        numbers = [int(match[1] or 0) for name in content if (match := CHUNK.fullmatch(name))]
        if not numbers:
            raise ConfigError(f"{folder} has no `model` at pipeline stage {stage}")
        for number in numbers:
            name = f"model{number}"
            chunks.append((number, stage, content.get(name, content.get("model"))))
    found: dict[str, object] = {}
    before = 0
    for _, stage, chunk in sorted(chunks, key=lambda c: c[:2]):
        if not isinstance(chunk, dict):
            raise ConfigError(
                f"{folder}: its `model` at pipeline stage {stage} is a {type(chunk).__name__}, no"
                " dictionary"
            )
        before = _add_chunk(found, chunk, before, folder)
    return found


def _add_chunk(
    found: dict[str, object], chunk: Mapping[object, object], before: int, folder: Path
) -> int:
    """Add a part of the network to `found`, and say how many layers there are then.

    Args:
        found: what is there by now.
        chunk: tensors of the part, layers counted from its own first.
        before: layers there are by now.
        folder: to be named.
    """
    layers = before
    for key, value in chunk.items():
        name = _local(str(key))
        if name.endswith(EXTRA):
            continue
        if name.startswith("language_model"):
            raise ConfigError(
                f"{folder} has {key}: a checkpoint of Megatron-LM before its core",
                hint="names of Megatron-core 0.12 and newer are read",
            )
        if match := LAYER.fullmatch(name):
            number = before + int(match[1])
            layers = max(layers, number + 1)
            name = f"decoder.layers.{number}.{match[2]}"
        found[name] = value
    return layers


def _drop_tied_head(names: dict[str, object], model: Model, folder: Path) -> None:
    """Take away the last stage's copy of a tied embedding. Raises ConfigError where it is none."""
    head = names.get("output_layer.weight")
    if model.untied or head is None:
        return
    embedding = names.get("embedding.word_embeddings.weight")
    if not (
        isinstance(head, Tensor) and isinstance(embedding, Tensor) and torch.equal(head, embedding)
    ):
        raise ConfigError(
            f"{folder}: output_layer.weight is not the embedding, and the job's model is tied",
            hint="set untie_embeddings_and_output_weights = true for the job's model",
        )
    del names["output_layer.weight"]


def choose(checkpoints: Path, step: int | None) -> tuple[Path, int]:
    """A checkpoint's folder and step: of that step, or the one that Megatron-LM would load.
    Raises TrainkitError (exit 16) where there is none."""
    if step is not None:
        return existing(checkpoints / f"iter_{step:07d}"), step
    name = tracked_name(checkpoints / TRACKER)
    if name == RELEASE:
        return existing(checkpoints / RELEASE), 0
    if not name.isdecimal():
        raise TrainkitError(
            f"{checkpoints / TRACKER} says {name!r}, no iteration", exit=Exit.NO_CHECKPOINT
        )
    return existing(checkpoints / f"iter_{int(name):07d}"), int(name)
