"""torchtitan's checkpoints, written here by torch's own writer from a folder of Hugging Face's
form, renamed and turned as torchtitan's own adapter does it (0.3.0, models/llama3)."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save as write_tensors

from tests.engines.convert.support import MODELS, converted, same, saved
from tests.train.hf_support import VOCAB
from trainkit.base.errors import ConfigError, TrainkitError
from trainkit.engines.convert import torchtitan
from trainkit.engines.convert.formats import RunWeights

pytestmark = pytest.mark.usefixtures("one_rank")
# its adapter's table, without what stands before the layer
THEIRS = {
    "model.embed_tokens": "tok_embeddings",
    "model.norm": "norm",
    "model.layers": "layers",
    "self_attn.q_norm": "attention.q_norm",
    "self_attn.k_norm": "attention.k_norm",
    "self_attn.o_proj": "attention.wo",
    "self_attn": "attention.qkv_linear",
    "q_proj": "wq",
    "k_proj": "wk",
    "v_proj": "wv",
    "mlp": "feed_forward",
    "gate_proj": "w1",
    "up_proj": "w3",
    "down_proj": "w2",
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "ffn_norm",
}
Change = Callable[[dict[str, Tensor]], object]


def written(source: RunWeights, folder: Path, change: Change = lambda tensors: None) -> Path:
    """step-3 with these weights, and something of an optimizer's."""
    converted(source, "hf", folder / "hf")
    content = {"optimizer.state.layers.0.attention.wo.weight.exp_avg": torch.zeros(3)}
    for name, tensor in load_file(folder / "hf" / "model.safetensors").items():
        theirs = name
        for hf, titan in THEIRS.items():
            theirs = re.sub(rf"(^|\.){re.escape(hf)}(?=\.)", rf"\1{titan}", theirs)
        if source.model.family == "llama" and re.search(r"\.w[qk]\.", theirs):
            halves = tensor.view(-1, 2, source.model.head_size // 2, tensor.shape[1])
            tensor = halves.transpose(1, 2).reshape(tensor.shape)
        content[theirs] = tensor
    change(content)
    step = folder / "step-3"
    write_tensors(dict(content), storage_writer=FileSystemWriter(step), no_dist=True)
    return step


@pytest.mark.parametrize("case", ["llama", "llama-tied", "qwen3", "qwen3-one-matrix"])
def test_read(case: str, tmp_path: Path) -> None:
    source = saved(MODELS[case], tmp_path / "ours")
    there = written(source, tmp_path)
    assert torchtitan.choose(tmp_path, None) == (there, 3)
    same(source.weights, torchtitan.read(there, source.model, VOCAB))


def test_another_model_is_named(tmp_path: Path) -> None:
    source = saved(MODELS["llama"], tmp_path / "ours")

    def change(tensors: dict[str, Tensor]) -> None:
        tensors["layers.9.attention_norm.weight"] = tensors.pop("norm.weight")
        tensors["layers.0.attention.wo.weight"] = torch.zeros(2, 2)

    there = written(source, tmp_path, change)
    with pytest.raises(ConfigError) as error:
        torchtitan.read(there, source.model, VOCAB)
    words = str(error.value)
    assert "norm.weight is not in it" in words
    assert "layers.9.attention_norm.weight is not in the job's model" in words
    assert "layers.0.attention.wo.weight is [2, 2] there" in words
    with pytest.raises(ConfigError, match="family 'gpt' is not converted"):
        torchtitan.read(there, MODELS["gpt"], VOCAB)


def test_cut_short(tmp_path: Path) -> None:
    source = saved(MODELS["llama"], tmp_path / "ours")
    there = written(source, tmp_path)
    (part,) = there.glob("*.distcp")
    part.write_bytes(part.read_bytes()[:2000])
    with pytest.raises(TrainkitError, match=r"no whole step-N"):
        torchtitan.choose(tmp_path, None)
    with pytest.raises(ConfigError, match=re.escape(str(part))):
        same(source.weights, torchtitan.read(there, source.model, VOCAB))
    (there / ".metadata").unlink()
    with pytest.raises(ConfigError, match=r"it has no \.metadata"):
        torchtitan.read(there, source.model, VOCAB)
