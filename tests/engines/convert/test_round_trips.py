"""Weights into the formats of other engines and back: the same bits, whatever the layout."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engines.convert.support import (
    EXPRESSIBLE,
    MODELS,
    back,
    converted,
    layout,
    same,
    saved,
    tensors,
)
from tests.train.hf_support import EXPERTS, LATENTS, TOKENS_BS, VOCAB, equal, loaded, ours
from trainkit.base.errors import ConfigError, TrainkitError
from trainkit.engines.convert import files, formats, gpt_neox, megatron_lm
from trainkit.engines.convert.formats import RunWeights, open_hugging_face
from trainkit.engines.convert.pickles import read_pickle
from trainkit.jobs.schema import Model

pytestmark = pytest.mark.usefixtures("one_rank")
SMALL_LATENTS = {
    "family": "deepseek-v3",
    "layernorm_epsilon": 1e-6,
    "mla": LATENTS,
    "moe": EXPERTS,
}
CASES = [(target, case) for target, cases in EXPRESSIBLE.items() for case in cases]


@pytest.mark.parametrize(("target", "case"), CASES)
def test_there_and_back(target: str, case: str, tmp_path: Path) -> None:
    model = MODELS[case]
    source = saved(model, tmp_path / "ours")
    written = converted(source, target, tmp_path / "out")
    same(source.weights, back(target, tmp_path / "out", model))
    assert written.parameters == sum(t.numel() for t in ours(model).state_dict().values())
    files = [path for path in (tmp_path / "out").rglob("*") if path.is_file()]
    assert {str(path.relative_to(tmp_path / "out")) for path in files} == set(written.files)
    assert written.bytes == sum(path.stat().st_size for path in files)
    assert {path.name for path in tmp_path.iterdir()} == {"ours", "out"}


LAYOUTS: list[tuple[str, str, dict[str, Any]]] = [
    ("megatron-lm", "llama-3", {"tensor": 2}),
    ("megatron-lm", "llama-3", {"tensor": 2, "pipeline": 4}),
    ("megatron-lm", "llama-3", {"pipeline": 2, "names": "transformer_engine"}),
    ("megatron-lm", "llama-tied", {"pipeline": 2}),
    ("megatron-lm", "qwen2", {"tensor": 2}),
    ("megatron-lm", "qwen2-one-matrix", {"tensor": 2, "pipeline": 2}),
    ("megatron-lm", "qwen3", {"tensor": 2, "names": "transformer_engine"}),
    ("megatron-lm", "qwen3-one-matrix", {"tensor": 2, "pipeline": 2}),
    ("megatron-lm", "mixtral", {"expert": 4}),
    ("megatron-lm", "mixtral", {"tensor": 2, "expert": 2, "names": "transformer_engine"}),
    ("megatron-lm", "qwen3-moe-after-dense", {"tensor": 2, "names": "transformer_engine"}),
    ("megatron-lm", "qwen3-moe-after-dense", {"pipeline": 2}),
    ("megatron-lm", "qwen3-moe-after-dense", {"tensor": 2, "pipeline": 4, "expert": 2}),
    ("megatron-lm", "latents", {"pipeline": 2, "expert": 2, "names": "transformer_engine"}),
    ("megatron-lm", "latents-whole-queries", {"names": "transformer_engine"}),
    ("megatron-lm", "gpt", {"tensor": 3, "pipeline": 2, "names": "transformer_engine"}),
    ("gpt-neox", "gpt-neox", {"pipeline": 0}),
    ("gpt-neox", "gpt-neox", {"tensor": 3, "pipeline": 2}),
    ("gpt-neox", "gpt-j-tied", {"tensor": 3, "pipeline": 0, "names": "dense_h_to_4h"}),
    ("gpt-neox", "gpt-neox-tied", {"tensor": 3, "pipeline": 1}),
    ("gpt-neox", "gpt", {"pipeline": 0, "names": "dense_h_to_4h"}),
]


@pytest.mark.parametrize(("target", "case", "cut"), LAYOUTS)
def test_however_it_is_cut(target: str, case: str, cut: dict[str, Any], tmp_path: Path) -> None:
    source = saved(MODELS[case], tmp_path / "ours")
    converted(source, target, tmp_path / "out", **cut)
    same(source.weights, back(target, tmp_path / "out", MODELS[case]))


def test_virtual_stages(tmp_path: Path) -> None:
    """Two stages of two chunks: the first has layers 0 and 2, the second 1 and 3 (Megatron-LM,
    get_transformer_layer_offset)."""
    model = MODELS["llama-3"]
    source = saved(model, tmp_path / "ours")
    converted(source, "megatron-lm", tmp_path / "four", pipeline=4)
    (tmp_path / "two").mkdir()
    (tmp_path / "two/latest_checkpointed_iteration.txt").write_text("3")
    for stage in range(2):
        parts: list[Any] = [
            torch.load(
                tmp_path / f"four/release/mp_rank_00_{number:03d}/model_optim_rng.pt",
                weights_only=False,
            )
            for number in (stage, stage + 2)
        ]
        parts[0]["args"].pipeline_model_parallel_size = 2
        content = {"args": parts[0]["args"], "model1": parts[1]["model"]}
        content["model0"] = parts[0]["model"]
        path = tmp_path / f"two/iter_0000003/mp_rank_00_{stage:03d}/model_optim_rng.pt"
        files.save_pickle(content, path)
    same(source.weights, back("megatron-lm", tmp_path / "two", model))


def test_zeros_keep_their_sign(tmp_path: Path) -> None:
    """Also in a bias that is the sum of what ranks have."""
    module = ours(MODELS["gpt-neox"])
    with torch.no_grad():
        module.get_parameter("layers.0.mlp.down.bias").fill_(-0.0)
    source = saved(MODELS["gpt-neox"], tmp_path / "ours")
    source = RunWeights(_Changed(source.weights, module), source.model, 7)
    converted(source, "gpt-neox", tmp_path / "out", tensor=3)
    found = back("gpt-neox", tmp_path / "out", source.model).read("layers.0.mlp.down.bias")
    assert found.signbit().all()


@pytest.mark.parametrize(
    ("target", "case"),
    [
        ("megatron-lm", "llama-3"),
        ("megatron-lm", "qwen2"),
        ("megatron-lm", "qwen3-one-matrix"),
        ("gpt-neox", "gpt-neox"),
    ],
)
@torch.no_grad()
def test_by_an_engine_to_transformers(target: str, case: str, tmp_path: Path) -> None:
    """Ours to the engine's, from there to Hugging Face: the logits are ours."""
    model = MODELS[case]
    source = saved(model, tmp_path / "ours")
    converted(source, target, tmp_path / "engine")
    found = back(target, tmp_path / "engine", model)
    converted(RunWeights(found, found.model, 0), "hf", tmp_path / "hf")
    equal(loaded(tmp_path / "hf", model)(TOKENS_BS), ours(model)(TOKENS_BS))
    equal(theirs(tmp_path / "hf")(TOKENS_BS).logits, ours(model)(TOKENS_BS))


def theirs(folder: Path) -> Any:
    transformers = pytest.importorskip("transformers")
    return transformers.AutoModelForCausalLM.from_pretrained(folder).eval()


@pytest.mark.parametrize("target", [*EXPRESSIBLE, "hf"])
def test_sixteen_bits(target: str, tmp_path: Path) -> None:
    source = saved(MODELS["gpt"], tmp_path / "ours")
    converted(source, target, tmp_path / "out", dtype=torch.bfloat16)
    if target == "hf":
        found = dict(loaded(tmp_path / "out", source.model).named_parameters())
        wide = {name: p.bfloat16() for name, p in found.items()}
    else:
        wide = tensors(back(target, tmp_path / "out", source.model))
    for name, tensor in tensors(source.weights).items():
        assert torch.equal(wide[name], tensor.bfloat16())


def test_sixteen_bits_of_a_bias_that_chooses(tmp_path: Path) -> None:
    """It keeps its 32."""
    source = saved(MODELS["latents"], tmp_path / "ours")
    converted(source, "hf", tmp_path / "out", dtype=torch.bfloat16)
    name = "layers.1.mlp.router.expert_bias"
    with open_hugging_face(tmp_path / "out", source.model, VOCAB) as found:
        assert torch.equal(found.read(name), source.weights.read(name))


def test_what_fp16_cannot_hold_is_refused_and_nothing_is_left(tmp_path: Path) -> None:
    module = ours(MODELS["gpt"])
    with torch.no_grad():
        module.get_parameter("layers.1.mlp.down.weight")[3, 3] = 1e5
    source = saved(MODELS["gpt"], tmp_path / "ours")
    source = RunWeights(_Changed(source.weights, module), source.model, 7)
    with pytest.raises(ConfigError, match="up to 100000, beyond fp16's"):
        converted(source, "gpt-neox", tmp_path / "out", dtype=torch.float16)
    assert [path.name for path in tmp_path.iterdir()] == ["ours"]


class _Changed:
    """Weights of a module, by name."""

    def __init__(self, like: Any, module: torch.nn.Module) -> None:
        self.folder = like.folder
        self.shapes = like.shapes
        self.module = module

    def read(self, name: str) -> torch.Tensor:
        return self.module.get_parameter(name).detach()


def test_grouped_order_by_hand(tmp_path: Path) -> None:
    """4 heads of 8 channels in 2 groups: q0 q1 k0 v0 q2 q3 k1 v1 (Megatron-LM, checkpoint version
    3)."""
    model = MODELS["llama-3"]
    source = saved(model, tmp_path / "ours")
    converted(source, "megatron-lm", tmp_path / "out")
    content: Any = read_pickle(tmp_path / "out/release/mp_rank_00/model_optim_rng.pt")
    theirs = content["model"]["decoder.layers.2.self_attention.linear_qkv.weight"].chunk(8)
    whole = source.weights.read("layers.2.attention.qkv.weight").chunk(8)
    for place, head in enumerate((0, 1, 4, 6, 2, 3, 5, 7)):
        assert torch.equal(theirs[place], whole[head])
    assert content["checkpoint_version"] == 3.0
    assert (tmp_path / "out/latest_checkpointed_iteration.txt").read_text() == "release"


def test_names_of_both_implementations(tmp_path: Path) -> None:
    source = saved(MODELS["gpt"], tmp_path / "ours")
    found = {}
    for names in megatron_lm.NAMES:
        converted(source, "megatron-lm", tmp_path / names, names=names)
        path = tmp_path / names / "release/mp_rank_00/model_optim_rng.pt"
        content: Any = read_pickle(path)
        found[names] = {name for name, value in content["model"].items() if value is not None}
    assert "decoder.layers.0.input_layernorm.bias" in found["local"]
    fused = "decoder.layers.1.mlp.linear_fc1.layer_norm_weight"
    assert fused in found["transformer_engine"] and len(found["local"]) == 28
    assert {n.count("layernorm") for n in found["transformer_engine"]} == {0, 1}  # the last one


def test_neox_files_and_padding(tmp_path: Path) -> None:
    """Layers as the 20B has them: embedding, blocks from 2, norm, head; `latest` without a line
    end; 53 ids padded to 3 * 8 rows' multiple."""
    model = MODELS["gpt-neox"]
    converted(saved(model, tmp_path / "ours"), "gpt-neox", tmp_path / "out", tensor=3, pipeline=2)
    assert (tmp_path / "out/latest").read_text() == "global_step0"
    there = sorted(path.name for path in (tmp_path / "out/global_step0").iterdir())
    layers = [
        f"layer_{i:02d}-model_{r:02d}-model_states.pt" for i in (0, 2, 3, 5, 6) for r in range(3)
    ]
    assert there == layers + [f"mp_rank_{rank:02d}_model_states.pt" for rank in range(6)]
    parts = [
        read_pickle(tmp_path / f"out/global_step0/layer_00-model_{rank:02d}-model_states.pt")
        for rank in range(3)
    ]
    rows: Any = torch.cat([part["word_embeddings.weight"] for part in parts])  # type: ignore[misc]
    assert len(rows) == 72 and not rows[VOCAB:].any() and rows[:VOCAB].any()


def test_names_of_latents_and_of_the_bias_that_chooses(tmp_path: Path) -> None:
    """Those of MLASelfAttention and of the router in Megatron-core 0.16.1; the bias keeps fp32."""
    source = saved(MODELS["latents"], tmp_path / "ours")
    attention = "decoder.layers.1.self_attention."
    projections = {"linear_q_down_proj", "linear_kv_down_proj", "linear_proj"}
    both = {f"{attention}{name}.weight" for name in projections}
    both |= {f"{attention}linear_{name}_up_proj.weight" for name in ("q", "kv")}
    norms = {
        "local": ("q_layernorm.weight", "kv_layernorm.weight"),
        "transformer_engine": (
            "linear_q_up_proj.layer_norm_weight",
            "linear_kv_up_proj.layer_norm_weight",
        ),
    }
    for names in megatron_lm.NAMES:
        converted(source, "megatron-lm", tmp_path / names, names=names, dtype=torch.bfloat16)
        content: Any = read_pickle(tmp_path / names / "release/mp_rank_00/model_optim_rng.pt")
        there = {name: value for name, value in content["model"].items() if value is not None}
        found = {name for name in there if name.startswith(attention)}
        assert found == both | {f"{attention}{name}" for name in norms[names]}
        assert "decoder.layers.1.input_layernorm.weight" in there
        bias = there["decoder.layers.1.mlp.router.expert_bias"]
        assert bias.dtype == torch.float32 and bias.any()
        assert torch.equal(bias, source.weights.read("layers.1.mlp.router.expert_bias"))


def test_latents_are_not_cut_into_tensor_parallel_files(tmp_path: Path) -> None:
    source = saved(MODELS["latents"], tmp_path / "ours")
    with pytest.raises(ConfigError, match="format torch for one tensor-parallel rank, not 2"):
        converted(source, "megatron-lm", tmp_path / "out", tensor=2)


class TestRefused:
    """What a format cannot say, and places that are taken."""

    @pytest.mark.parametrize(
        ("target", "case", "said"),
        [
            ("megatron-lm", "gpt-neox", "gpt_j_residual: Megatron-LM has no attention and MLP"),
            (
                "megatron-lm",
                "llama-wide-llama3",
                "rope_scaling.original_max_position_embeddings is",
            ),
            ("megatron-lm", "llama-tied-linear", "rope_scaling.type is 'linear'"),
            ("megatron-lm", "olmo2", "qk_norm = 'projection' is not converted"),
            ("gpt-neox", "qwen3", "qk_norm = 'head' is not converted"),
            ("gpt-neox", "llama", "family 'llama'"),
        ],
    )
    def test_models(self, target: str, case: str, said: str, tmp_path: Path) -> None:
        source = saved(MODELS[case], tmp_path / "ours")
        with pytest.raises(ConfigError, match=said):
            converted(source, target, tmp_path / "out")
        assert not (tmp_path / "out").exists()

    @pytest.mark.parametrize(
        ("target", "change", "said"),
        [
            ("gpt-neox", {"kv_channels": 10}, "kv_channels is 10"),
            ("gpt-neox", {"ffn_hidden_size": 39}, "even widths only"),
            ("megatron-lm", {"num_layers": 3}, "num_layers 3 does not divide"),
            ("megatron-lm", {"family": "llama", "rotary_base": 500.5}, "rotary_base is 500.5"),
            ("megatron-lm", {"family": "llama", "qk_norm": "head"}, "qk_norm = 'head' is not"),
            ("gpt-neox", {"family": "mixtral", "moe": EXPERTS}, "moe = True is not converted"),
            ("megatron-lm", {"family": "olmoe", "moe": EXPERTS}, "qk_norm = 'projection' is not"),
            (
                "megatron-lm",
                {
                    "family": "mixtral",
                    "moe": {
                        **EXPERTS,
                        "router_score_function": "sigmoid",
                        "router_norm_topk_prob": False,
                    },
                },
                "Megatron-LM makes these weights sum to 1",
            ),
            ("megatron-lm", {**SMALL_LATENTS, "mtp_num_layers": 1}, "mtp_num_layers 1 is not conv"),
            ("megatron-lm", {**SMALL_LATENTS, "layernorm_epsilon": 1e-5}, "in the latents' norms"),
            (
                "megatron-lm",
                {**SMALL_LATENTS, "rope_scaling": {"type": "yarn", "factor": 2.0, "beta_fast": 16}},
                "rope_scaling.beta_fast is 16.0 with mla; it is 32.0 there",
            ),
        ],
    )
    def test_shapes(self, target: str, change: dict[str, Any], said: str) -> None:
        model = Model(
            **{
                "num_layers": 2,
                "hidden_size": 24,
                "num_attention_heads": 3,
                "seq_length": 16,
                **change,
            }
        )
        with pytest.raises(ConfigError, match=said):
            formats.ENGINE_FORMATS[target].refuse_impossible(model, layout(pipeline=2))

    @pytest.mark.parametrize(
        ("target", "cut", "said"),
        [
            ("megatron-lm", {"tensor": 2}, "num_attention_heads 3 does not divide"),
            ("megatron-lm", {"pipeline": 0}, "must be at least 1"),
            ("megatron-lm", {"names": "linear1"}, "local, transformer_engine"),
            ("gpt-neox", {"names": "local"}, "linear1, dense_h_to_4h"),
            ("gpt-neox", {"tensor": 2}, "num_attention_heads 3 does not divide"),
        ],
    )
    def test_layouts(self, target: str, cut: dict[str, Any], said: str) -> None:
        with pytest.raises(ConfigError, match=said):
            formats.ENGINE_FORMATS[target].refuse_impossible(MODELS["gpt"], layout(**cut))

    def test_only_an_empty_folder_is_taken(self, tmp_path: Path) -> None:
        source = saved(MODELS["gpt"], tmp_path / "ours")
        (tmp_path / "empty").mkdir()
        converted(source, "gpt-neox", tmp_path / "empty")
        same(source.weights, back("gpt-neox", tmp_path / "empty", source.model))
        (tmp_path / "file").write_text("")
        (tmp_path / "link").symlink_to(tmp_path / "nowhere")
        for name, said in (
            ("empty", "not empty"),
            ("file", "not a folder"),
            ("link", "not a folder"),
        ):
            with pytest.raises(ConfigError, match=said):
                converted(source, "hf", tmp_path / name)
        assert len(list(tmp_path.iterdir())) == 4

    def test_a_disk_that_gives_back_something_else(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """What is read back is compared; a difference leaves nothing."""
        source = saved(MODELS["gpt-neox"], tmp_path / "ours")
        write: Callable[..., None] = files.save_pickle

        def flips(content: Any, path: Path) -> None:
            if path.name.startswith("layer_03"):
                content["mlp.linear2.weight"][1, 2] += 1
            write(content, path)

        monkeypatch.setattr(gpt_neox, "save_pickle", flips)
        with pytest.raises(TrainkitError, match=r"layers\.1\.mlp\.down\.weight reads otherwise"):
            converted(source, "gpt-neox", tmp_path / "out")
        assert os.listdir(tmp_path) == ["ours"]
