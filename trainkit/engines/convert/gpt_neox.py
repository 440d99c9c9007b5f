"""GPT-NeoX's checkpoints, as DeepSpeed writes them.

<folder>/latest names global_stepN/. With a pipeline (pipe_parallel_size 1 and more) that holds one
file a layer and tensor-parallel rank, layer_XX-model_TT-model_states.pt, beside
mp_rank_RR_model_states.pt whose `module` is None; without one (0), all tensors are in `module` of
mp_rank_TT_model_states.pt with names sequential.XX.NAME (GPT-NeoX, megatron/model/gpt2_model.py,
init_specs and to_sequential; DeepSpeed, runtime/pipe/module.py, ckpt_layer_path).

Layer 0 has the embeddings, 1 reorders, 2 to L + 1 are the blocks, L + 2 reorders, L + 3 has the
last norm, L + 4 the head.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from torch import Tensor

from trainkit.base.errors import ConfigError, Exit, TrainkitError
from trainkit.base.files import write_text
from trainkit.engines.convert.files import existing, save_pickle, tracked_name
from trainkit.engines.convert.options import FileLayout, refuse
from trainkit.engines.convert.pickles import read_pickle
from trainkit.engines.convert.tensors import (
    EngineTensor,
    Split,
    block_tensors,
    indivisible_problem,
    padded,
    part,
)
from trainkit.engines.convert.weights import EngineWeights, gather
from trainkit.jobs.schema import Model
from trainkit.plan.layout import padded_vocab_size
from trainkit.train.huggingface.weights import NamedWeights, in_dtype, vocabulary

LATEST = "latest"
STEP = "global_step0"
STEP_FOLDER = re.compile(r"global_step(\d+)")
# The MLP's projections have been called so since 2024-09 (GPT-NeoX #1212), and before.
MLP = {
    "linear1": ("mlp.linear1", "mlp.linear2"),
    "dense_h_to_4h": ("mlp.dense_h_to_4h", "mlp.dense_4h_to_h"),
}
# Since then it rounds the MLP's width up to a multiple of this (ParallelMLP; mlp_multiple_of 1).
WIDTH = 2
MODULES = {
    "attention_norm": "input_layernorm",
    "attention.qkv": "attention.query_key_value",
    "attention.out": "attention.dense",
    "mlp_norm": "post_attention_layernorm",
}
LAYER_FILE = re.compile(r"layer_(\d{2,})-model_(\d{2,})-model_states\.pt")
RANK_FILE = re.compile(r"mp_rank_(\d{2,})_model_states\.pt")
SEQUENTIAL = re.compile(r"sequential\.(\d+)\.(.+)")
# Rotary positions' buffer, which older versions saved.
BUFFER = re.compile(r"sequential\.\d+\.attention\.rotary_emb\.inv_freq")


def plan(model: Model, names: str) -> list[EngineTensor]:
    """All tensors of a model, with the names that a model without a pipeline has.

    Args:
        model: the shape.
        names: which of `MLP`.
    """
    blocks = model.num_layers
    up, down = MLP[names]
    theirs = {**MODULES, "mlp.up": up, "mlp.down": down}
    if model.gpt_j_tied:
        del theirs["mlp_norm"]
    found = [EngineTensor("embed_tokens.weight", "0.word_embeddings.weight", "vocabulary")]
    if model.architecture.learned_positions:
        found.append(EngineTensor("embed_positions.weight", "0.position_embeddings.weight"))
    # Side by side, attention and MLP are summed over ranks with their biases.
    row_bias: Split = "summed" if model.parallel_residual else "replicated"
    block = block_tensors(model, theirs, row_bias)
    for i in range(blocks):
        found += [
            replace(how, ours=f"layers.{i}.{how.ours}", theirs=f"{i + 2}.{how.theirs}")
            for how in block
        ]
    found += [
        EngineTensor(f"final_norm.{kind}", f"{blocks + 3}.norm.{kind}")
        for kind in model.architecture.norm.parameters
    ]
    if model.untied:
        head = f"{blocks + 4}.final_linear.weight"
        found.append(EngineTensor("head.weight", head, "vocabulary"))
    return [replace(how, theirs=f"sequential.{how.theirs}") for how in found]


def model_problems(model: Model) -> Iterator[str]:
    """What GPT-NeoX cannot be, by the key of [models.X]."""
    for key, value in model.traits.items():
        yield f"{key} = {value!r} is not converted (family {model.family!r})"
    if model.mlp.gated:
        yield f"family {model.family!r}: its gated MLP is not converted; gpt-neox and gpt are"
    if model.head_size * model.num_attention_heads != model.hidden_size:
        yield (
            f"kv_channels is {model.head_size}; GPT-NeoX has hidden_size / num_attention_heads only"
        )


def refuse_impossible(model: Model, layout: FileLayout) -> None:
    """Raise ConfigError, with all reasons, where GPT-NeoX has no such model or layout."""
    problems = list(model_problems(model))
    if found := indivisible_problem(model, layout.tensor):
        problems.append(found)
    if layout.names not in ("", *MLP):
        problems.append(f"--names {layout.names!r} is not one of: {', '.join(MLP)}")
    elif layout.names != "dense_h_to_4h" and model.ffn_width % WIDTH:
        problems.append(
            f"ffn_hidden_size is {model.ffn_width}; GPT-NeoX since 2024-09 has even widths only"
            " (--names dense_h_to_4h writes for older versions)"
        )
    if not 0 <= layout.pipeline <= model.num_layers:
        problems.append(
            f"--pipeline-parallel-size {layout.pipeline} is not 0 to {model.num_layers}, its layers"
        )
    refuse(problems, "gpt-neox")


def write(weights: NamedWeights, model: Model, layout: FileLayout, folder: Path) -> None:
    """Write a model's weights into a new folder.

    Args:
        weights: what is written.
        model: its shape, which `refuse_impossible` lets pass.
        layout: how many files, and their names.
        folder: where; it is made.
    """
    rows = padded_vocab_size(vocabulary(weights), layout.divisor, layout.tensor)
    tensors = plan(model, layout.names or "linear1")
    here = folder / STEP
    for rank in range(layout.tensor):
        module: dict[str, Tensor] = {}
        for number, layer in _by_layer(tensors).items():
            made = {name: _made(weights, how, model, layout, rank) for name, how in layer.items()}
            if model.gpt_j_tied:
                made |= _unused_norm(made)
            if layout.pipeline:
                file = f"layer_{number:02d}-model_{rank:02d}-model_states.pt"
                save_pickle(made, here / file)
            else:
                module |= {f"sequential.{number}.{name}": made[name] for name in made}
        state = _state(model, layout, rows)
        if layout.pipeline:
            for stage in range(layout.pipeline):
                name = f"mp_rank_{stage * layout.tensor + rank:02d}_model_states.pt"
                save_pickle({**state, "module": None}, here / name)
        else:
            save_pickle({**state, "module": module}, here / f"mp_rank_{rank:02d}_model_states.pt")
    write_text(folder / LATEST, STEP)


def _by_layer(tensors: list[EngineTensor]) -> dict[int, dict[str, EngineTensor]]:
    """By the layer's number, the tensors by their names within it."""
    found: dict[int, dict[str, EngineTensor]] = {}
    for how in tensors:
        match = SEQUENTIAL.fullmatch(how.theirs)
        assert match, how.theirs
        found.setdefault(int(match[1]), {})[match[2]] = how
    return found


def _made(
    weights: NamedWeights, how: EngineTensor, model: Model, layout: FileLayout, rank: int
) -> Tensor:
    """What one tensor-parallel rank has of a tensor."""
    found = in_dtype(how.ours, weights.read(how.ours), layout.dtype)
    if how.split == "vocabulary":
        found = padded(found, padded_vocab_size(len(found), layout.divisor, layout.tensor))
    return part(found, how, model, rank, layout.tensor)


def _unused_norm(block: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """With gpt_j_tied every block has a second norm that computes nothing."""
    theirs = MODULES["attention_norm"]
    other = MODULES["mlp_norm"]
    return {
        name.replace(theirs, other): tensor.clone()
        for name, tensor in block.items()
        if name.startswith(theirs)
    }


def _state(model: Model, layout: FileLayout, rows: int) -> dict[str, object]:
    """What stands beside the tensors: what DeepSpeed asks for, and what GPT-NeoX compares with its
    configuration (megatron/checkpointing.py, check_checkpoint_args)."""
    return {
        "iteration": 0,
        "global_steps": 0,
        "global_samples": 0,
        "skipped_steps": 0,
        "dp_world_size": 1,
        # DeepSpeed counts its files, of all stages
        "mp_world_size": layout.tensor * max(1, layout.pipeline),
        "args": {
            "num_layers": model.num_layers,
            "hidden_size": model.hidden_size,
            "num_attention_heads": model.num_attention_heads,
            "make_vocab_size_divisible_by": layout.divisor,
            "padded_vocab_size": rows,
            "model_parallel_size": layout.tensor,
        },
    }


def read(folder: Path, model: Model, vocab_size: int) -> EngineWeights:
    """The weights of a checkpoint.

    Args:
        folder: global_stepN.
        model: the job's.
        vocab_size: rows of the embedding without padding.

    Raises:
        ConfigError: exit 3, it is of another model, of another format, damaged, or would execute
        something.
    """
    refuse(list(model_problems(model)), "named weights", folder)
    ranks = _rank_tensors(folder)
    names = "linear1"
    for rank in ranks:
        for name in [name for name in rank if _is_unused(name, model)]:
            del rank[name]
        if any(".mlp.dense_h_to_4h." in name for name in rank):
            names = "dense_h_to_4h"
    return gather(folder, model, vocab_size, plan(model, names), ranks)


def _is_unused(name: str, model: Model) -> bool:
    if BUFFER.fullmatch(name):
        return True
    return model.gpt_j_tied and f".{MODULES['mlp_norm']}." in name


def _rank_tensors(folder: Path) -> list[dict[str, object]]:
    """By the names without a pipeline, the tensors of every tensor-parallel rank."""
    if not folder.is_dir():
        raise ConfigError(f"{folder} is missing")
    names = sorted(path.name for path in folder.iterdir())
    if any(name.startswith("zero_pp_rank_") and name.endswith("model_states.pt") for name in names):
        raise ConfigError(
            f"{folder} is of ZeRO stage 3, which cuts tensors into pieces that are not read here",
            hint="DeepSpeed's zero_to_fp32.py in that folder puts them together",
        )
    layers = [(name, match) for name in names if (match := LAYER_FILE.fullmatch(name))]
    if layers:
        size = 1 + max(int(match[2]) for _, match in layers)
        found: list[dict[str, object]] = [{} for _ in range(size)]
        for name, match in layers:
            content = read_pickle(folder / name)
            prefix = f"sequential.{int(match[1])}."
            found[int(match[2])] |= {prefix + key: value for key, value in content.items()}
        return found
    files = [name for name in names if RANK_FILE.fullmatch(name)]
    if not files:
        raise ConfigError(
            f"{folder} has neither layer_00-model_00-model_states.pt nor"
            " mp_rank_00_model_states.pt: it is not a checkpoint of GPT-NeoX"
        )
    if files != [f"mp_rank_{rank:02d}_model_states.pt" for rank in range(len(files))]:
        raise ConfigError(f"{folder} lacks some of its ranks: it has {', '.join(files)}")
    return [_module(folder / name) for name in files]


def _module(path: Path) -> dict[str, object]:
    """The tensors of a rank without a pipeline."""
    module = read_pickle(path).get("module")
    if not isinstance(module, dict):
        raise ConfigError(f"{path} has no tensors (`module`), and no files of layers are beside it")
    return {str(name): value for name, value in module.items()}


def choose(checkpoints: Path, step: int | None) -> tuple[Path, int]:
    """A checkpoint's folder and step: of that step, or the one that GPT-NeoX would load. Raises
    TrainkitError (exit 16) where there is none."""
    if step is not None:
        return existing(checkpoints / f"global_step{step}"), step
    name = tracked_name(checkpoints / LATEST)
    match = STEP_FOLDER.fullmatch(name)
    if match is None:
        raise TrainkitError(
            f"{checkpoints / LATEST} says {name!r}, no global_stepN", exit=Exit.NO_CHECKPOINT
        )
    return existing(checkpoints / name), int(match[1])
