"""Published folders whose weights are packed, FP8 and MXFP4: bit by bit as the formula says."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.train.hf_support import (
    LATENTS,
    LLAMA,
    VOCAB,
    Weights,
    change_config,
    change_index,
    change_tensors,
    loaded,
    said,
)
from trainkit.base.errors import ConfigError
from trainkit.engines.convert.formats import open_hugging_face
from trainkit.families import FAMILIES
from trainkit.jobs.experts import Experts
from trainkit.jobs.schema import Model
from trainkit.train.huggingface import check_weights
from trainkit.train.huggingface.config import to_hf_config
from trainkit.train.huggingface.folder import open_weights
from trainkit.train.huggingface.names import published, table
from trainkit.train.huggingface.reading import TensorFiles

# no size is a multiple of 128: the blocks at the edges are cut
DEEPSEEK = Model(
    **{
        **LLAMA,
        "family": "deepseek-v3",
        "hidden_size": 160,
        "ffn_hidden_size": 264,
        "mla": LATENTS | {"q_lora_rank": 130},
    },
    moe=Experts(
        num_experts=3,
        router_topk=2,
        ffn_hidden_size=136,
        shared_expert_intermediate_size=136,
        first_dense_layers=1,
    ),
)
GPT_OSS = Model(
    **{**LLAMA, "hidden_size": 64, "ffn_hidden_size": None, "family": "gpt-oss"},
    sliding_window=5,
    moe=Experts(num_experts=3, router_topk=2, ffn_hidden_size=96),
)
MODELS = {"fp8": DEEPSEEK, "mxfp4": GPT_OSS}
SAID: dict[str, dict[str, Any]] = {  # as DeepSeek-V3's and gpt-oss' config.json say it
    "fp8": {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "weight_block_size": [128, 128],
    },
    "mxfp4": {
        "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router"],
        "quant_method": "mxfp4",
    },
}
CODES = [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6]


def fp8(name: str, shape: tuple[int, ...]) -> tuple[Weights, Tensor]:
    """A matrix as it is stored, and its values."""
    codes = torch.randint(0, 256, shape, dtype=torch.uint8)
    codes[codes & 127 == 127] = 0  # those are NaN
    codes_of = codes.view(torch.float8_e4m3fn)
    blocks = [-(-size // 128) for size in shape]
    scales = torch.rand(blocks) * 2.0 ** torch.randint(-140, 110, blocks)
    scales[0, -1] = 0
    wide = scales.repeat_interleave(128, 0).repeat_interleave(128, 1)
    values = codes_of.float() * wide[: shape[0], : shape[1]]
    return {name: codes_of, f"{name}_scale_inv": scales}, values


def mxfp4(name: str, shape: tuple[int, ...]) -> tuple[Weights, Tensor]:
    """All experts' matrices as they are stored, and their values, (experts, in, out)."""
    experts, inputs, outputs = shape
    codes = torch.randint(0, 16, (experts, outputs, inputs))
    codes[0, 0, :32] = torch.arange(32) % 16
    # 252: with the largest code the most that fp32 holds, 1.5 * 2^127
    scales = torch.randint(0, 253, (experts, outputs, inputs // 32))
    scales[0, 0, 0] = 0
    scales[0, 1, 0] = 252
    numbers = torch.tensor(CODES, dtype=torch.float64)[codes]
    values = numbers * 2.0 ** (scales.double() - 127).repeat_interleave(32, 2)
    stored = {
        f"{name}_blocks": (codes[..., 0::2] + 16 * codes[..., 1::2])
        .to(torch.uint8)
        .view(experts, outputs, inputs // 32, 16),
        f"{name}_scales": scales.to(torch.uint8),
    }
    return stored, values.float().transpose(1, 2)


def is_packed(kind: str, name: str) -> bool:
    if kind == "mxfp4":
        return name.endswith("_proj") and "experts" in name
    return name.endswith("_proj.weight") or "kv_a_proj" in name


@pytest.fixture(params=MODELS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def packed(kind: str, tmp_path: Path) -> Path:
    """A folder, and beside it the same weights in fp32."""
    torch.manual_seed(7)
    stored: Weights = {}
    plain: Weights = {}
    for name, there in published(table(MODELS[kind], VOCAB)).items():
        if is_packed(kind, name):
            new, plain[name] = {"fp8": fp8, "mxfp4": mxfp4}[kind](name, there.shape)
            stored |= new
        else:
            plain[name] = torch.randn(there.shape).bfloat16()
            stored[name] = plain[name]
    config = to_hf_config(MODELS[kind], VOCAB, "bf16", None)
    for folder, tensors in ((tmp_path / "packed", stored), (tmp_path / "plain", plain)):
        folder.mkdir()
        tensors = {name: tensor.contiguous() for name, tensor in tensors.items()}
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
        (folder / "config.json").write_text(json.dumps(config))
    return change_config(tmp_path / "packed", quantization_config=SAID[kind])


def same(left: Tensor, right: Tensor) -> bool:
    """Bit by bit, -0 apart from 0."""
    return torch.equal(left.float().view(torch.int32), right.float().view(torch.int32))


def test_values_are_those_of_the_formula(kind: str, packed: Path) -> None:
    """As a job begins with them, and as export compares with them."""
    model = MODELS[kind]
    assert check_weights(packed, model, VOCAB) == []
    found = dict(loaded(packed, model).named_parameters())
    wanted = dict(loaded(packed.with_name("plain"), model).named_parameters())
    assert all(same(found[name], wanted[name]) for name in wanted) and wanted
    with (
        open_hugging_face(packed, model, VOCAB) as left,
        open_hugging_face(packed.with_name("plain"), model, VOCAB) as right,
    ):
        assert all(same(left.read(name), right.read(name)) for name in right.shapes)


def test_any_part_is_read_alone(kind: str, packed: Path) -> None:
    """Parts that begin and end within blocks, as ranks hold them; scales in a file of their own."""
    model = MODELS[kind]
    tensors = load_file(packed / "model.safetensors")
    (packed / "model.safetensors").unlink()
    place = {name: f"{'scale' in name}.safetensors" for name in tensors}
    for file in set(place.values()):
        save_file({name: t for name, t in tensors.items() if place[name] == file}, packed / file)
    change_index(packed, place)
    draw = random.Random(3)
    names = FAMILIES[model.family].hugging_face
    stored = [open_weights(p, names).tensors for p in (packed, packed.with_name("plain"))]
    parts = 0
    with TensorFiles() as files:
        for entry in table(model, VOCAB).values():
            for piece in entry.pieces:
                if is_packed(kind, piece.source):
                    start, stop = sorted(draw.sample(range(piece.rows + 1), 2))
                    first, last = sorted(draw.sample(range(entry.shape[1] + 1), 2))
                    rows = (piece.start + start, piece.start + stop)
                    left, right = (
                        files.read(t[piece.source], piece, *rows, (slice(first, last),))
                        for t in stored
                    )
                    assert left.shape == (stop - start, last - first) and same(left, right)
                    parts += 1
    assert parts > 17


FIRST = {
    "fp8": "model.layers.1.mlp.experts.0.up_proj.weight",
    "mxfp4": "model.layers.1.mlp.experts.gate_up_proj",
}


@pytest.mark.parametrize(
    "damage",
    [lambda scales: None, lambda scales: scales[:, :1], lambda scales: scales.to(torch.int32)],
    ids=["missing", "cut", "another dtype"],
)
def test_scales_must_be_there_and_fit(
    kind: str, packed: Path, damage: Callable[[Tensor], Tensor | None]
) -> None:
    scales = FIRST[kind] + {"fp8": "_scale_inv", "mxfp4": "_scales"}[kind]
    tensor = FIRST[kind] + {"fp8": "", "mxfp4": "_blocks"}[kind]

    def change(tensors: Weights) -> Weights:
        new = damage(tensors.pop(scales))
        return tensors if new is None else tensors | {scales: new}

    change_tensors(packed, change)
    (problem,) = check_weights(packed, MODELS[kind], VOCAB)
    right = {"fp8": "F32 or BF16 or F16 [2, 2]", "mxfp4": "U8 [3, 192, 2]"}[kind]
    for words in (str(packed / "model.safetensors"), f"{tensor} ", f" {scales}: ", right):
        assert words in str(problem)


def test_values_that_are_not_finite_are_an_error(kind: str, packed: Path) -> None:
    """255 stands for NaN among exponents."""
    scales = FIRST[kind] + {"fp8": "_scale_inv", "mxfp4": "_scales"}[kind]

    def change(tensors: Weights) -> Weights:
        tensors[scales].view(-1)[-1] = {"fp8": float("nan"), "mxfp4": 255}[kind]
        return tensors

    change_tensors(packed, change)
    with pytest.raises(ConfigError, match="not finite") as error:
        loaded(packed, MODELS[kind])
    assert scales in str(error.value) and str(packed / "model.safetensors") in str(error.value)


@pytest.mark.parametrize(
    "change",
    [
        {"quant_method": "bitsandbytes"},
        {"weight_block_size": [64, 128]},
        {"weight_block_size": None},
        {"fmt": "e5m2"},
        {"activation_scheme": "static"},
    ],
)
def test_other_ways_are_refused(tmp_path: Path, change: dict[str, Any]) -> None:
    config = to_hf_config(DEEPSEEK, VOCAB, "bf16", None)
    config["quantization_config"] = SAID["fp8"] | change
    (tmp_path / "config.json").write_text(json.dumps(config))
    text = said(check_weights(tmp_path, DEEPSEEK, VOCAB))
    assert "in another way than the two that are read" in text and "'mxfp4'" in text


def test_packed_weights_are_not_taken_for_others(kind: str, packed: Path) -> None:
    """Where config.json does not say so, codes are no values."""
    change_config(packed, quantization_config=None)
    found = said(check_weights(packed, MODELS[kind], VOCAB))
    assert "has, and the job's model has not" in found and "only F32, BF16, F16 are taken" in found
