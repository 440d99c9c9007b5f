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
import itertools
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from trainkit.base.errors import ConfigError, Exit, TrainkitError
from trainkit.base.files import write_text
from trainkit.engines.convert.experts import Apart, shapes_apart
from trainkit.engines.convert.files import existing, save_pickle, tracked_name
from trainkit.engines.convert.megatron_args import (
    args_problems,
    gelu_of,
    megatron_args,
    model_problems,
)
from trainkit.engines.convert.megatron_dist import DistributedWeights, args_of, read_metadata
from trainkit.engines.convert.megatron_names import (
    EXPERT,
    EXTRA,
    LAYER,
    global_experts,
    is_sparse,
    linears,
    local_name,
    named,
    of_expert_rank,
    plan,
)
from trainkit.engines.convert.options import FileLayout, refuse
from trainkit.engines.convert.pickles import InertValue, read_pickle
from trainkit.engines.convert.tensors import (
    EngineTensor,
    indivisible_problem,
    padded,
    part,
)
from trainkit.engines.convert.weights import EngineWeights, gather
from trainkit.jobs.schema import Model
from trainkit.plan.layout import padded_vocab_size
from trainkit.train.huggingface.names import Shape
from trainkit.train.huggingface.weights import NamedWeights, in_dtype, vocabulary

TRACKER = "latest_checkpointed_iteration.txt"
RELEASE = "release"
FILE = "model_optim_rng.pt"
VERSION = 3.0  # of the order of rows in linear_qkv
NAMES = ("local", "transformer_engine")  # as --transformer-impl
SPLIT_HINT = (
    "copy it whole; where experts are split over other ranks than all else"
    " (expert_tensor_parallel_size) it is read as it was saved with --ckpt-format torch_dist"
)
PARTS = ("embedding.", "decoder.", "output_layer.")  # the model's names in torch_dist
GELU_NOTE = "it was trained with the {} form of GELU (bias_gelu_fusion)"
RANK_FOLDER = re.compile(r"mp_rank_(\d{2,})(?:_(\d{3,}))?(?:_(\d{3,}))?")
CHUNK = re.compile(r"model(\d*)")


def refuse_impossible(model: Model, layout: FileLayout) -> None:
    """Raise ConfigError, with all reasons, where Megatron-LM has no such model or layout."""
    problems = [*model_problems(model), *_split_problems(model, layout.tensor)]
    if found := indivisible_problem(model, layout.tensor):
        problems.append(found)
    if layout.pipeline < 1:
        problems.append("--pipeline-parallel-size must be at least 1")
    elif model.num_layers % layout.pipeline:
        problems.append(
            f"num_layers {model.num_layers} does not divide by --pipeline-parallel-size"
            f" {layout.pipeline}"
        )
    experts = model.moe.num_experts if model.moe else 1
    if experts % layout.expert:
        problems.append(
            f"num_experts {experts} does not divide by --expert-parallel-size {layout.expert}"
        )
    if layout.names not in ("", *NAMES):
        problems.append(f"--names {layout.names!r} is not one of: {', '.join(NAMES)}")
    refuse(problems, "megatron-lm")


def _split_problems(model: Model, tensor: int) -> Iterator[str]:
    """What files of so many tensor-parallel ranks do not say: projections to latents are split in
    some versions and transformer_impl, and whole on every rank in others."""
    if model.mla is not None and tensor > 1:
        yield f"mla is converted in format torch for one tensor-parallel rank, not {tensor}"


def write(weights: NamedWeights, model: Model, layout: FileLayout, folder: Path) -> None:
    """Write a model's weights into a new folder.

    Args:
        weights: what is written.
        model: its shape, which `refuse_impossible` lets pass.
        layout: how many files, and their names.
        folder: where; it is made.
    """
    rows = padded_vocab_size(vocabulary(weights), layout.divisor, layout.tensor)
    apart = Apart(weights, model)
    ranks = (range(layout.pipeline), range(layout.tensor), range(layout.expert))
    for stage, rank, expert in itertools.product(*ranks):
        name = f"mp_rank_{rank:02d}"
        if layout.pipeline > 1:
            name += f"_{stage:03d}"
        if layout.expert > 1:
            name += f"_{expert:03d}"
        content = {
            "args": argparse.Namespace(**megatron_args(model, layout, rows)),
            "checkpoint_version": VERSION,
            "iteration": 0,
            "model": _stage_tensors(apart, model, layout, (stage, rank, expert)),
        }
        save_pickle(content, folder / RELEASE / name / FILE)
    write_text(folder / TRACKER, RELEASE)


def _stage_tensors(
    weights: Apart, model: Model, layout: FileLayout, place: tuple[int, int, int]
) -> dict[str, Tensor | None]:
    """What one rank has, by the names it has there. `place`: its pipeline stage, its
    tensor-parallel rank, its part of the experts."""
    stage, rank, expert = place
    rows = padded_vocab_size(vocabulary(weights.weights), layout.divisor, layout.tensor)
    per_stage = model.num_layers // layout.pipeline
    found: dict[str, Tensor | None] = {}
    for how, theirs in _of_stage(model, layout.pipeline, stage):
        local = of_expert_rank(theirs, model, layout.expert, expert)
        if local is None:
            continue
        tensor = in_dtype(how.ours, weights.read(how.ours), layout.dtype)
        if how.split == "vocabulary":
            tensor = padded(tensor, rows)
        latents = model.mla is not None
        name = named(local, layout.names, sparse=is_sparse(how, model), latents=latents)
        found[name] = part(tensor, how, model, rank, layout.tensor)
    # what modules of the engine ask for besides tensors; they have nothing to say
    for i in range(per_stage):
        asked = linears(model, layout, sparse=model.sparse(stage * per_stage + i))
        found |= {f"decoder.layers.{i}.{name}.{EXTRA}": None for name in asked}
    if stage == layout.pipeline - 1:
        found[f"output_layer.{EXTRA}"] = None
    return found


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
    contents, args = _rank_contents(folder)
    tensor, stages, experts = (1 + max(numbers) for numbers in zip(*contents, strict=True))
    problems = [*args_problems(args, model, tensor, stages), *_split_problems(model, tensor)]
    refuse(problems, "named weights", folder)
    gathered = []
    for rank in range(tensor):
        found = dict[str, object]()
        for expert in range(experts):
            whole = _whole_model([contents[rank, stage, expert] for stage in range(stages)], folder)
            found |= global_experts(whole, expert, model, experts)
        gathered.append(found)
    for names in gathered:
        _drop_tied_head(names, model, folder)
    trained = gelu_of(args, model)
    weights = gather(folder, trained, vocab_size, plan(model), gathered)
    if trained.gelu_form != model.gelu_form:
        note = GELU_NOTE.format(trained.gelu_form)
        return replace(weights, notes=(*weights.notes, note))
    return weights


def _read_distributed(folder: Path, model: Model, vocab_size: int) -> DistributedWeights:
    """The weights of a folder of torch_dist; as `read` otherwise."""
    args = args_of(folder)
    degrees = (args.get("tensor_model_parallel_size"), args.get("pipeline_model_parallel_size"))
    refuse([*args_problems(args, model, *degrees)], "named weights", folder)
    trained = gelu_of(args, model)
    sizes, boxes = read_metadata(folder)
    there = {local_name(name): name for name in sizes if name.startswith(PARTS)}
    shapes = shapes_apart(trained, vocab_size)
    found: dict[str, tuple[EngineTensor, Shape]] = {}
    problems = []
    for how in plan(trained):
        name = how.theirs
        place: Shape = ()
        shape = shapes[how.ours]
        expert = EXPERT.fullmatch(name)
        if expert:
            name = f"{expert[1]}experts.{expert[3]}.weight"
            place = (int(expert[2]),)
            shape = (trained.moe.num_experts if trained.moe else 0, *shape)
        layer = LAYER.fullmatch(name)
        if layer and name not in there:
            name = f"decoder.layers.{layer[2]}"
            place = (int(layer[1]), *place)
            shape = (trained.num_layers, *shape)
        theirs = there.get(name)
        if theirs is None:
            problems.append(f"{name} is not in it")
            continue
        size = sizes[theirs]
        rows = how.split == "vocabulary" and size[0] >= vocab_size
        if size != shape and not (rows and size[1:] == shape[1:]):
            problems.append(f"{theirs} is {list(size)} there, {list(shape)} in the job's model")
        found[how.ours] = (replace(how, theirs=theirs), place)
    used = {how.theirs for how, _ in found.values()}
    problems += [f"{name} is not in the job's model" for name in there.values() if name not in used]
    refuse(list(dict.fromkeys(problems)), "named weights", folder)
    notes: tuple[str, ...] = ()
    if trained.gelu_form != model.gelu_form:
        notes = (GELU_NOTE.format(trained.gelu_form),)
    return DistributedWeights(folder, trained, vocab_size, found, sizes, boxes, notes)


def _rank_contents(
    folder: Path,
) -> tuple[dict[tuple[int, int, int], dict[str, object]], Mapping[str, object]]:
    """What each (tensor-parallel rank, pipeline stage, part of the experts) has saved, and the
    arguments. A name has the second number with stages alone, and the third with several parts
    alone: of two, the arguments say which. Raises ConfigError."""
    if not folder.is_dir():
        raise ConfigError(f"{folder} is missing")
    files = {}
    for path in sorted(folder.iterdir()):
        if match := RANK_FOLDER.fullmatch(path.name):
            files[tuple(int(number) for number in match.groups() if number)] = path / FILE
    if not files:
        raise ConfigError(f"{folder} has no mp_rank_00: it is not a checkpoint of Megatron-LM")
    for numbers in itertools.product(*(range(1 + max(n)) for n in zip(*files, strict=False))):
        if numbers not in files:
            name = "_".join(f"{n:0{2 + (place > 0)}d}" for place, n in enumerate(numbers))
            raise ConfigError(f"{folder} lacks mp_rank_{name}", hint=SPLIT_HINT)
    read = {numbers: read_pickle(path) for numbers, path in files.items()}
    said = read[min(read)].get("args")
    args = said.attributes if isinstance(said, InertValue) else {}
    tensor = 1 + max(numbers[0] for numbers in read)
    split = args.get("expert_tensor_parallel_size")
    if args.get("num_experts") and split not in (None, tensor):
        raise ConfigError(
            f"{folder} has experts split over {split!r} ranks, and all else over {tensor}",
            hint=SPLIT_HINT,
        )
    by_experts = args.get("expert_model_parallel_size") not in (None, 1)
    contents = {}
    for numbers, content in read.items():
        rank, *others = numbers
        expert = others.pop() if by_experts and others else 0
        contents[rank, others[0] if others else 0, expert] = content
    return contents, args


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
        name = local_name(str(key))
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
