"""Checkpoints of Megatron-LM's format torch_dist: written here by torch's own writer, with the
names and shapes that Megatron-LM gives it."""

from __future__ import annotations

import argparse
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save as write_tensors

from tests.engines.convert.support import MODELS, layout, same, saved
from tests.train.hf_support import VOCAB
from trainkit.base.errors import ConfigError
from trainkit.engines.convert import megatron_lm
from trainkit.engines.convert.experts import Apart
from trainkit.engines.convert.formats import RunWeights
from trainkit.engines.convert.megatron_args import megatron_args
from trainkit.engines.convert.megatron_names import GROUPED, LAYER, is_sparse, named, plan
from trainkit.engines.convert.tensors import padded, part

pytestmark = pytest.mark.usefixtures("one_rank")
Change = Callable[[dict[str, Any]], object]


def written(source: RunWeights, folder: Path, change: Change = lambda tensors: None) -> Path:
    """A folder of torch_dist with these weights: the layers of a name in one tensor, cut by
    layers."""
    model = source.model
    content: dict[str, Any] = {"rng_state/shard_0": torch.zeros(3)}
    layers: dict[str, list[Tensor]] = {}
    experts: dict[str, list[Tensor]] = {}
    weights = Apart(source.weights, model)
    for how in plan(model):
        tensor = weights.read(how.ours)
        if how.split == "vocabulary":
            tensor = padded(tensor, 56)
        tensor = part(tensor, how, model, 0, 1)
        name = named(how.theirs, "transformer_engine", sparse=is_sparse(how, model), latents=False)
        match = LAYER.fullmatch(name)
        of_expert = GROUPED.fullmatch(name)
        if of_expert:
            # all of a layer in one, by their number; where layers differ, each by itself
            experts.setdefault(f"{of_expert[1]}experts.{of_expert[2]}.weight", []).append(tensor)
        elif match and not (model.moe and model.moe.first_dense_layers):
            layers.setdefault(f"decoder.layers.{match[2]}", []).append(tensor)
        else:
            content[name] = tensor
    for name, of_layer in experts.items():
        match = LAYER.fullmatch(name)
        assert match is not None and model.moe is not None
        if model.moe.first_dense_layers:
            content[name] = torch.stack(of_layer)
        else:
            layers.setdefault(f"decoder.layers.{match[2]}", []).append(torch.stack(of_layer))
    for name, tensors in layers.items():
        content[name] = torch.stack(tensors)
    change(content)
    write_tensors(content, storage_writer=FileSystemWriter(folder), no_dist=True)
    args = argparse.Namespace(**megatron_args(model, layout(), 56))
    torch.save({"args": args}, folder / "common.pt")
    return folder


CASES = ["gpt", "gpt-untied", "llama-3", "llama-tied", "qwen2", "qwen3"]
CASES += ["mixtral", "qwen3-moe-after-dense"]


@pytest.mark.parametrize("case", CASES)
def test_read(case: str, tmp_path: Path) -> None:
    source = saved(MODELS[case], tmp_path / "ours")
    folder = written(source, tmp_path / "iter_0000003")
    same(source.weights, megatron_lm.read(folder, source.model, VOCAB))


NORM = "decoder.layers.mlp.linear_fc1.layer_norm_weight"
CHANGES: list[tuple[Change, str]] = [
    (lambda t: t.pop(NORM), "pre_mlp_layernorm.weight is not in it"),
    (lambda t: t.update({"decoder.extra": torch.ones(1)}), "decoder.extra is not in the job's"),
    (lambda t: t.update({NORM: torch.ones(3, 24)}), r"is \[3, 24\] there, \[2, 24\]"),
    (lambda t: t.update({NORM: torch.ones(2, 24).int()}), "is of torch.int32"),
    (
        lambda t: t.update({"embedding.word_embeddings.weight": torch.ones(52, 24)}),
        r"is \[52, 24\] there, \[53, 24\]",
    ),
]


@pytest.mark.parametrize(("change", "said"), CHANGES)
def test_other_models(change: Change, said: str, tmp_path: Path) -> None:
    source = saved(MODELS["gpt"], tmp_path / "ours")
    folder = written(source, tmp_path / "iter_0000003", change)
    with pytest.raises(ConfigError, match=said):
        found = megatron_lm.read(folder, source.model, VOCAB)
        for name in found.shapes:
            found.read(name)


class Runs:
    """A pickle of it makes a file when it is loaded without care."""

    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return os.system, (self.command,)


class TestDamagedAndHostile:
    """One clear error, and nothing has run."""

    def test_metadata_that_acts(self, tmp_path: Path) -> None:
        source = saved(MODELS["gpt"], tmp_path / "ours")
        folder = written(source, tmp_path / "iter_0000003")
        (folder / ".metadata").write_bytes(pickle.dumps(Runs(f"touch {tmp_path}/ran")))
        with pytest.raises(ConfigError, match=r"it asks for posix\.system, which could execute"):
            megatron_lm.read(folder, source.model, VOCAB)
        assert not (tmp_path / "ran").exists()

    def test_a_part_that_acts(self, tmp_path: Path) -> None:
        """Of any length: the metadata say how long it is."""
        source = saved(MODELS["gpt"], tmp_path / "ours")
        folder = written(source, tmp_path / "iter_0000003")
        path = next(folder.glob("*.distcp"))
        found = megatron_lm.read(folder, source.model, VOCAB)
        torch.save(Runs(f"touch {tmp_path}/ran"), path)
        with pytest.raises(ConfigError, match=r"is not a whole file of|posix\.system"):
            for name in found.shapes:
                found.read(name)
        assert not (tmp_path / "ran").exists()

    def test_cut_off_or_gone(self, tmp_path: Path) -> None:
        source = saved(MODELS["gpt"], tmp_path / "ours")
        folder = written(source, tmp_path / "iter_0000003")
        content = (folder / ".metadata").read_bytes()
        for size in range(0, len(content), 997):
            (folder / ".metadata").write_bytes(content[:size])
            with pytest.raises(ConfigError, match="is not what torch writes"):
                megatron_lm.read(folder, source.model, VOCAB)
        (folder / ".metadata").write_bytes(content)
        found = megatron_lm.read(folder, source.model, VOCAB)
        path = next(folder.glob("*.distcp"))
        os.truncate(path, path.stat().st_size // 2)
        with pytest.raises(ConfigError, match="is not a whole file of"):
            for name in found.shapes:
                found.read(name)
        path.unlink()
        with pytest.raises(ConfigError, match="cannot be read: No such file"):
            found.read("embed_tokens.weight")
        (folder / "other.distcp").write_bytes(b"")
        (folder / ".metadata").unlink()
        with pytest.raises(ConfigError, match="is not what torch writes"):
            megatron_lm.read(folder, source.model, VOCAB)
