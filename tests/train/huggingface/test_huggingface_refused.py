"""What cannot be taken for weights of a model is refused before one is read, with all its
reasons."""

from __future__ import annotations

import json
import math
import pickle
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.train.hf_support import (
    CASES,
    COMMON,
    EXPERTS,
    LLAMA,
    LLAMA3,
    VOCAB,
    WIDE,
    change_config,
    change_index,
    change_tensors,
    copied,
    folders,
    loaded,
    ours,
    said,
    save,
    theirs,
    write,
)
from trainkit.base.errors import ConfigError
from trainkit.jobs.schema import Model
from trainkit.train.huggingface import check_weights, load_weights
from trainkit.train.huggingface.config import contradictions, to_hf_config
from trainkit.train.parallel.shards import sharded_parameters

# what [models.X.moe] can say and Mixtral's class cannot
SIGMOID = {"router_score_function": "sigmoid"}
NOT_THERE: dict[str, dict[str, Any]] = {
    "shared_expert_intermediate_size": {"shared_expert_intermediate_size": 8},
    "first_dense_layers": {"first_dense_layers": 1},
    "router_score_function": SIGMOID,
    "router_pre_softmax": {"router_pre_softmax": False},
    "router_norm_topk_prob": {"router_norm_topk_prob": False},
    "router_topk_scaling_factor": {"router_topk_scaling_factor": 2.5},
    "router_num_groups": {"router_num_groups": 5, "router_group_topk": 2},
    "router_enable_expert_bias": {"router_enable_expert_bias": True, **SIGMOID},
}
__all__ = ["copied", "folders"]  # fixtures
pytestmark = pytest.mark.usefixtures("one_rank")


class TestRefused:
    """Folders that are not the job's model, all reasons at once."""

    def test_all_reasons_at_once(self, copied: Callable[[str], Path]) -> None:
        folder = change_tensors(
            copied("llama"),
            lambda t: (
                {n: v for n, v in t.items() if "o_proj" not in n}
                | {"model.layers.0.extra": torch.zeros(3)}
            ),
        )
        change_tensors(folder, lambda t: t | {"model.norm.weight": t["model.norm.weight"].double()})
        change_config(
            folder, attention_bias=True, quantization_config={"bits": 4}, max_position_embeddings=8
        )
        model = Model(
            **{
                **LLAMA,
                "ffn_hidden_size": 44,
                "num_query_groups": 2,
                "layernorm_epsilon": 1e-4,
                "rope_scaling": LLAMA3,
            }
        )
        text = said(check_weights(folder, model, VOCAB + 1))
        for words in (
            "num_key_value_heads is 4 there, 2 for this job",
            "set models.tiny.num_query_groups = 4",
            "intermediate_size is 40 there, 44 for this job",
            "rms_norm_eps is 1e-05 there, 0.0001 for this job",
            "attention_bias is True there; family 'llama' has False only",
            "quantized",
            "vocab_size is 53 there, 54 for this job",
            "set models.tiny.vocab_size = 53",
            "it reads 8 tokens (max_position_embeddings), the job's samples have 16",
            "theta of its rotary positions is 300.0, 10000.0 for this job",
            "stretched",
            "lacks model.layers.0.self_attn.o_proj.weight, model.layers.1.self_attn.o_proj.weight",
            "has, and the job's model has not, model.layers.0.extra",
            "model.layers.1.self_attn.k_proj.weight is [32, 32] there, [16, 32] in the job's model",
            "model.layers.0.mlp.down_proj.weight is [32, 40] there, [32, 44] in the job's model",
            "model.embed_tokens.weight is [53, 32] there, [54, 32] in the job's model",
            "only F32, BF16, F16 are taken, not model.norm.weight (F64)",
            f"{folder / 'config.json'}: ",
        ):
            assert words in text, f"{words}\n{text}"

    def test_nothing_is_written_where_anything_is_wrong(
        self, copied: Callable[[str], Path]
    ) -> None:
        model = CASES["gpt"][0]
        folder = change_tensors(
            copied("gpt"), lambda t: {n: v for n, v in t.items() if n != "transformer.ln_f.bias"}
        )
        module = ours(model)
        before = {name: p.detach().clone() for name, p in module.named_parameters()}
        with pytest.raises(ConfigError, match=r"lacks transformer\.ln_f\.bias") as error:
            load_weights(folder, sharded_parameters(module, 1), model, VOCAB)
        assert error.value.exit == 3
        assert all(torch.equal(p, before[name]) for name, p in module.named_parameters())

    def test_pickles_are_never_read(self, copied: Callable[[str], Path], tmp_path: Path) -> None:
        class Hostile:
            def __reduce__(self) -> tuple[Any, ...]:
                return Path.touch, (tmp_path / "executed",)

        folder = copied("gpt")
        (folder / "model.safetensors").unlink()
        for name in ("pytorch_model.bin", "model.pt"):
            (folder / name).write_bytes(pickle.dumps(Hostile()))
        (problem,) = check_weights(folder, CASES["gpt"][0], VOCAB)
        assert (
            "pickles only (model.pt, pytorch_model.bin)" in problem.message
            and "save_pretrained" in problem.hint
        )
        with pytest.raises(ConfigError, match="not read"):
            loaded(folder, CASES["gpt"][0])
        assert not (tmp_path / "executed").exists()

    def test_another_type(
        self, folders: Callable[[str], Path], copied: Callable[[str], Path]
    ) -> None:
        (problem,) = check_weights(folders("gpt-neox"), CASES["llama"][0], VOCAB)
        assert (
            "'gpt_neox'; family 'llama' is 'llama'" in problem.message
            and "family = 'gpt-neox'" in problem.hint
        )
        (problem,) = check_weights(
            change_config(copied("llama"), model_type="qwen3_next"), CASES["llama"][0], VOCAB
        )
        assert "'qwen3_next'" in problem.message and "gpt2, gpt_neox, llama" in problem.hint

    @pytest.mark.parametrize(
        ("case", "values", "words"),
        [
            ("gpt", {"activation_function": "relu"}, "activation_function is 'relu' there"),
            ("gpt", {"activation_function": "gelu"}, "gelu = 'exact'"),
            (
                "gpt",
                {"scale_attn_by_inverse_layer_idx": True},
                "scale_attn_by_inverse_layer_idx is True",
            ),
            ("gpt", {"n_positions": 32}, "max_position_embeddings = 32"),
            ("gpt", {"tie_word_embeddings": False}, "untie_embeddings_and_output_weights = true"),
            ("gpt", {"n_embd": "wide"}, "n_embd makes no sense: 'wide'"),
            (
                "gpt",
                {"parallel_attn": True},
                "parallel_attn is True there, which family 'gpt' of trainkit does not have",
            ),
            ("llama", {"num_key_value_heads": "2"}, "num_key_value_heads makes no sense: '2'"),
            ("llama", {"num_key_value_heads": True}, "num_key_value_heads makes no sense: True"),
            ("llama", {"sliding_window": 4096}, "sliding_window is 4096 there"),
            (
                "llama",
                {"layer_types": ["full_attention", "sliding_attention"]},
                "layer_types is ['full_attention', 'sliding_attention'] there",
            ),
            ("llama", {"logits_scaling": 8.0}, "take the key out of its config.json"),
            ("gpt-neox", {"use_parallel_residual": False}, "gpt_j_residual = false"),
            ("gpt-neox", {"attention_bias": False}, "attention_bias is False there"),
            ("gpt-neox", {"hidden_act": "gelu_pytorch_tanh"}, "gelu = 'tanh'"),
            (
                "gpt-neox",
                {"rope_parameters": {"rope_theta": 10000.0, "partial_rotary_factor": 0.5}},
                "rotary_percent = 0.5",
            ),
            (
                "gpt-neox",
                {"rope_parameters": {"rope_theta": 9.0, "partial_rotary_factor": 0.25}},
                "rotary_base = 9.0",
            ),
            (
                "gpt-neox",
                {"rope_scaling": {"type": "linear", "factor": 2.0}},
                "stretched by 'linear', which family 'gpt-neox' does not have",
            ),
            (
                "llama",
                {"rope_scaling": {"rope_type": "longrope", "factor": 2.0, "rope_theta": 300.0}},
                "stretched by 'longrope'",
            ),
            (
                "qwen3-tied",
                {"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "rope_theta": 1e6}},
                "beta_slow = 1.0, original_max_position_embeddings = 16, truncate = true }",
            ),
            (
                "qwen3-tied",
                {
                    "rope_scaling": {
                        "rope_type": "yarn",
                        "factor": 4.0,
                        "beta_fast": 4.0,
                        "rope_theta": 1e6,
                        "truncate": False,
                    }
                },
                "truncate = false }",
            ),
            (
                "qwen3-tied",
                {
                    "use_sliding_window": True,
                    "sliding_window": 8,
                    "layer_types": None,
                    "max_window_layers": 1,
                },
                "layers are 1 x all, 1 x 8 there, 2 x all for this job",
            ),
            ("mistral", {"sliding_window": None}, "leave models.tiny.sliding_window out"),
            (
                "olmo3",
                {"layer_types": ["sliding_attention", "full_attention"] * 2},
                "sliding_window = 5 and sliding_window_pattern = 2",
            ),
            ("olmo3", {"layer_types": ["chunked_attention"] * 4}, "sliding windows make no sense"),
            ("gemma3", {"query_pre_attn_scalar": 12}, "models.tiny.query_pre_attn_scalar = 12"),
            ("gemma3", {"final_logit_softcapping": 30.0}, "final_logit_softcapping is 30.0 there"),
            ("gemma3", {"use_bidirectional_attention": True}, "use_bidirectional_attention is"),
            (
                "qwen2",
                {"rope_parameters": {"rope_theta": 1e6}},
                "models.tiny.rotary_base = 1000000",
            ),
            (
                "llama",
                {"rope_scaling": {"rope_type": "linear", "factor": 2.0, "rope_theta": 300.0}},
                "rope_scaling = { type = 'linear', factor = 2.0 }",
            ),
            (
                "llama",
                {"rope_parameters": {"full_attention": {"rope_theta": 1.0}}},
                "cannot be said",
            ),
            ("llama", {"rope_parameters": 3}, "cannot be said"),
            ("qwen3-moe", {"decoder_sparse_step": 2}, "is 2 there; family 'qwen3-moe' has 1 only"),
            ("qwen3-moe", {"mlp_only_layers": [1]}, "mlp_only_layers is [1] there, [0] for this"),
            ("qwen3-moe", {"mlp_only_layers": [0, 1]}, "moe.first_dense_layers = 2"),
            ("qwen3-moe", {"mlp_only_layers": None}, "models.tiny.moe.first_dense_layers = 0"),
            ("qwen3-moe", {"mlp_only_layers": 0}, "mlp_only_layers makes no sense: 0"),
            ("qwen3-moe", {"intermediate_size": 44}, "models.tiny.ffn_hidden_size = 44"),
            ("qwen3-moe", {"moe_intermediate_size": 24}, "models.tiny.moe.ffn_hidden_size = 24"),
            ("qwen3-moe", {"num_local_experts": 8}, "num_experts is 8 there, 5 for this job"),
            ("qwen3-moe", {"norm_topk_prob": False}, "tiny.moe.router_norm_topk_prob = false"),
            ("qwen3-moe", {"use_sliding_window": False}, "leave models.tiny.sliding_window out"),
            (
                "qwen3-moe",
                {"shared_expert_intermediate_size": 8},
                "shared_expert_intermediate_size is 8 there, which family 'qwen3-moe' of trainkit",
            ),
            ("mixtral-tied", {"intermediate_size": 24}, "models.tiny.moe.ffn_hidden_size = 24"),
            ("mixtral-tied", {"num_local_experts": 6}, "models.tiny.moe.num_experts = 6"),
            ("mixtral-tied", {"sliding_window": 5}, "models.tiny.sliding_window = 5"),
            ("olmoe", {"num_experts_per_tok": 3}, "models.tiny.moe.router_topk = 3"),
            ("olmoe", {"clip_qkv": 8.0}, "clip_qkv is 8.0 there; family 'olmoe' has None only"),
            ("llama", {"head_dim": 4}, "kv_channels = 4"),
            ("llama", {"mlp_bias": True}, "mlp_bias is True"),
            (
                "llama",
                {"hidden_act": "gelu"},
                "hidden_act is 'gelu' there; family 'llama' has 'silu' only",
            ),
            ("llama", {"num_attention_heads": 0, "head_dim": None}, "makes no sense"),
            (
                "llama",
                {"max_position_embeddings": "16"},
                "max_position_embeddings makes no sense: '16'",
            ),
            (
                "llama",
                {"max_position_embeddings": 8.0},
                "max_position_embeddings makes no sense: 8.0",
            ),
            (
                "llama",
                {"rope_parameters": {"rope_theta": 300.0, "partial_rotary_factor": math.nan}},
                "nan of a head's channels turn there",
            ),
            (
                "gpt-neox",
                {"rope_parameters": {"partial_rotary_factor": math.inf}},
                "inf of a head's channels turn there",
            ),
            (
                "gpt-neox",
                {"rope_parameters": {"partial_rotary_factor": 10**400}},
                "of a head's channels turn there",
            ),
        ],
    )
    def test_every_contradiction_is_named(
        self, case: str, values: dict[str, Any], words: str, folders: Callable[[str], Path]
    ) -> None:
        config = json.loads((folders(case) / "config.json").read_text()) | values
        found = contradictions(config, CASES[case][0], VOCAB)
        assert len(found) <= 2 and words in said(found)

    def test_keys_that_ask_for_nothing_are_taken(self, folders: Callable[[str], Path]) -> None:
        config = json.loads((folders("llama") / "config.json").read_text())
        config |= {
            "sliding_window": None,
            "use_sliding_window": False,
            "layer_types": ["full_attention"] * 2,
            "_name_or_path": "x",
            "pretraining_tp": 1,
        }
        assert contradictions(config, CASES["llama"][0], VOCAB) == []

    def test_how_experts_are_trained_says_nothing_of_weights(self) -> None:
        """Nor does the width of layers that are not there."""
        config = theirs("mixtral-tied").config.to_dict()
        config |= {"router_aux_loss_coef": 0.5, "output_router_logits": True}
        config |= {"router_jitter_noise": 0.1}
        assert contradictions(config, CASES["mixtral-tied"][0], VOCAB) == []
        model = Model(**{**WIDE, "family": "qwen3-moe", "moe": EXPERTS})
        config = to_hf_config(model, VOCAB, "fp32", 0)
        assert contradictions(config | {"intermediate_size": 6144}, model, VOCAB) == []

    def test_a_number_beyond_floats(self, folders: Callable[[str], Path]) -> None:
        config = json.loads((folders("llama") / "config.json").read_text()) | {
            "num_attention_heads": 0.5,
            "hidden_size": 10**400,
            "head_dim": None,
        }
        assert "its head_dim makes no sense" in said(
            contradictions(config, CASES["llama"][0], VOCAB)
        )

    def test_broken_folders(self, copied: Callable[[str], Path], tmp_path: Path) -> None:
        model, sharded = CASES["llama"][0], tmp_path / "sharded"
        assert "no such folder" in said(check_weights(tmp_path / "nowhere", model, VOCAB))
        assert "has no weights" in said(
            check_weights(tmp_path, model, VOCAB)
        ) and "config.json: cannot be read" in said(check_weights(tmp_path, model, VOCAB))
        torn = copied("llama")
        data = (torn / "model.safetensors").read_bytes()
        for content in (data[:-9], data[:50], b"", b"\xff" * 64):
            (torn / "model.safetensors").write_bytes(content)
            assert "cannot be read as safetensors" in said(check_weights(torn, model, VOCAB))
        for text in ("{", "[]", "[" * 100_000):
            (torn / "config.json").write_text(text)
            assert re.search("is not (a )?JSON", said(check_weights(torn, model, VOCAB)))
        theirs("llama").save_pretrained(sharded, max_shard_size="20KB")
        index = json.loads((sharded / "model.safetensors.index.json").read_text())
        first = sorted(sharded.glob("model-*.safetensors"))[0]
        shutil.copy(first, sharded / "again.safetensors")
        change_index(sharded, index["weight_map"] | {"x": "again.safetensors"})
        assert "once more" in said(check_weights(sharded, model, VOCAB))
        change_index(sharded, index["weight_map"])
        for name, words in (("a\0b", "is missing"), ("\ud800", "cannot be read")):
            change_index(sharded, index["weight_map"] | {"x": f"{name}.safetensors"})
            assert words in said(check_weights(sharded, model, VOCAB))
        change_index(sharded, index["weight_map"])
        first.unlink()
        text = said(check_weights(sharded, model, VOCAB))
        assert f"{first}: is missing" in text and "lacks" in text
        for hostile in (
            {},
            {"x": "../elsewhere.safetensors"},
            {"x": "/etc/hostname"},
            {"x": 3},
            {"x": "pytorch_model.bin"},
        ):
            change_index(sharded, hostile)
            assert "does not map tensors" in said(check_weights(sharded, model, VOCAB))
        (sharded / "model.safetensors.index.json").write_text('{"weight_map":' * 100_000)
        assert "recursion" in said(check_weights(sharded, model, VOCAB))
        (sharded / "model.safetensors.index.json").unlink()
        (sharded / "model.safetensors.index.json").mkdir()
        assert "index.json: cannot be read: Is a directory" in said(
            check_weights(sharded, model, VOCAB)
        )

    def test_copies_of_a_wrong_shape(self, copied: Callable[[str], Path]) -> None:
        """They are named, not compared: a scalar has no rows."""
        names, scalar = ("model.embed_tokens.weight", "lm_head.weight"), torch.zeros(())
        folder = change_tensors(
            copied("llama-tied-linear"), lambda t: t | dict.fromkeys(names, scalar)
        )
        assert "model.embed_tokens.weight is [] there, [53, 32]" in said(
            check_weights(folder, CASES["llama-tied-linear"][0], VOCAB)
        )
        folder = change_tensors(
            folder, lambda t: t | {names[0]: torch.zeros(VOCAB, 32), names[1]: scalar}
        )
        assert "has a head of its own" in said(
            check_weights(folder, CASES["llama-tied-linear"][0], VOCAB)
        )
        norms = [
            f"gpt_neox.layers.0.{name}.weight"
            for name in ("input_layernorm", "post_attention_layernorm")
        ]
        folder = change_tensors(copied("gpt-j-tied"), lambda t: t | dict.fromkeys(norms, scalar))
        assert f"{norms[1]} is [] there, [48]" in said(
            check_weights(folder, CASES["gpt-j-tied"][0], VOCAB)
        )

    def test_a_vocabulary_of_another_size_without_a_word_in_the_config(
        self, copied: Callable[[str], Path]
    ) -> None:
        folder = change_tensors(
            copied("gpt"),
            lambda t: t | {"transformer.wte.weight": t["transformer.wte.weight"][:-1]},
        )
        assert "transformer.wte.weight is [52, 24] there, [53, 24]" in said(
            check_weights(folder, CASES["gpt"][0], None)
        )

    @pytest.mark.parametrize(
        ("model", "words"),
        [
            (Model(**COMMON, kv_channels=10), "kv_channels 10 cannot be said"),
            (
                Model(**{**COMMON, "hidden_size": 25}, kv_channels=8),
                "no hidden_size 25 that does not divide by num_attention_heads 3",
            ),
            (Model(**{**LLAMA, "hidden_size": 30}, kv_channels=8), "no hidden_size 30"),
            (
                Model(**{**WIDE, "family": "mistral"}, sliding_window=5, sliding_window_pattern=2),
                "a window in all layers or in none, not in 1",
            ),
            (
                Model(**{**WIDE, "family": "olmoe", "moe": EXPERTS}),
                "OlmoeForCausalLM has hidden_size / num_attention_heads = 8 channels a head",
            ),
            *(
                (
                    Model(**{**WIDE, "family": "mixtral", "moe": EXPERTS | keys}),
                    f"MixtralForCausalLM has no moe.{key} = ",
                )
                for key, keys in NOT_THERE.items()
            ),
        ],
    )
    def test_a_model_that_transformers_has_not(
        self, model: Model, words: str, tmp_path: Path
    ) -> None:
        saved = save(ours(model), tmp_path / "checkpoints")
        with pytest.raises(ConfigError, match=words):
            write(saved, model, tmp_path / "exported")
        assert not (tmp_path / "exported").exists()
