"""Hugging Face folders, side by side with transformers: same weights, same logits, in both
directions; and what is refused."""

from __future__ import annotations

import importlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor

from tests.distributed import run_ranks
from tests.train.hf_support import (
    CASES,
    COMMON,
    TOKENS_BS,
    VOCAB,
    change_config,
    change_tensors,
    copied,
    equal,
    folders,
    loaded,
    ours,
    said,
    save,
    shake,
    theirs,
    write,
)
from trainkit.base.errors import ConfigError
from trainkit.jobs.schema import Model
from trainkit.runs.checkpoints import open_checkpoint
from trainkit.train.checkpoint import save_load as checkpoint
from trainkit.train.checkpoint.save_load import CheckpointMetadata
from trainkit.train.huggingface import check_weights, load_weights
from trainkit.train.huggingface.config import contradictions, to_hf_config
from trainkit.train.huggingface.names import table
from trainkit.train.huggingface.writing import TokenizerFile
from trainkit.train.model.transformer import build_on_meta
from trainkit.train.parallel.shards import sharded_parameters

__all__ = ["copied", "folders"]  # fixtures
pytestmark = pytest.mark.usefixtures("one_rank")


@pytest.mark.parametrize("case", CASES)
@torch.no_grad()
def test_what_transformers_saved_gives_the_same_logits_here(
    case: str, folders: Callable[[str], Path]
) -> None:
    model = CASES[case][0]
    assert check_weights(folders(case), model, VOCAB) == []
    equal(loaded(folders(case), model)(TOKENS_BS), theirs(case)(TOKENS_BS).logits)


@pytest.mark.parametrize("case", CASES)
@torch.no_grad()
def test_what_is_exported_gives_the_same_logits_in_transformers(case: str, tmp_path: Path) -> None:
    transformers: Any = importlib.import_module("transformers")

    model, module = CASES[case][0], ours(CASES[case][0])
    target = tmp_path / "exported"
    write(save(module, tmp_path / "checkpoints"), model, target)
    there, said = transformers.AutoModelForCausalLM.from_pretrained(
        target, output_loading_info=True
    )
    assert not any(said[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    equal(there.eval()(TOKENS_BS).logits, module(TOKENS_BS))
    back = loaded(target, model)
    assert all(
        torch.equal(p, q) for p, q in zip(back.parameters(), module.parameters(), strict=True)
    )
    # as transformers would write it again
    assert contradictions(there.config.to_dict(), model, VOCAB) == []


ON_TWO_RANKS = ("gpt-untied", "gpt-neox", "llama-wide-llama3", "qwen3-moe")


def _on_two_ranks(folder: Path, checkpoints: Path) -> None:
    """Load into a sharded model, and save it."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2,))
    for case in ON_TWO_RANKS:
        model = CASES[case][0]
        module = build_on_meta(model, VOCAB)
        fully_shard(module, mesh=mesh)
        module.to_empty(device="cpu")
        load_weights(folder / case, sharded_parameters(module, 1), model, VOCAB)
        tensors = {f"model.{name}": p.detach() for name, p in module.named_parameters()}
        checkpoint.save(checkpoints / case, tensors, CheckpointMetadata(7, consumed_samples=0))


def test_every_rank_reads_its_part_and_parts_are_exported_whole(
    folders: Callable[[str], Path], tmp_path: Path
) -> None:
    cases = ON_TWO_RANKS
    for case in cases:
        shutil.copytree(folders(case), tmp_path / "hf" / case)
    run_ranks(
        2,
        "tests.train.huggingface.test_huggingface:_on_two_ranks",
        tmp_path / "hf",
        tmp_path / "checkpoints",
    )
    for case in cases:
        saved = open_checkpoint(tmp_path / "checkpoints" / case / "step-00000007")
        assert len(saved.manifest.tensors["model.embed_tokens.weight"].chunks) == 2
        write(saved, CASES[case][0], tmp_path / "out" / case)
        one, other = (
            load_file(folder / case / "model.safetensors")
            for folder in (tmp_path / "out", tmp_path / "hf")
        )
        assert one.keys() == other.keys() and all(
            torch.equal(one[name], other[name]) for name in one
        )


class TestFiles:
    """Layouts of files, dtypes, the export folder."""

    @pytest.mark.parametrize("case", ["gpt", "llama"])
    def test_shards(self, case: str, tmp_path: Path) -> None:
        transformers: Any = importlib.import_module("transformers")

        model, module = CASES[case][0], ours(CASES[case][0])
        written = write(
            save(module, tmp_path / "checkpoints"), model, tmp_path / "exported", shard_bytes=9000
        )
        index = json.loads((tmp_path / "exported/model.safetensors.index.json").read_text())
        assert len(written.files) > 3 and set(index["weight_map"].values()) == set(written.files)
        assert (
            index["metadata"]["total_size"]
            == written.bytes
            == 4 * written.parameters
            == 4 * sum(p.numel() for p in module.parameters())
        )
        for name in written.files:
            tensors = load_file(tmp_path / "exported" / name)
            assert len(tensors) == 1 or sum(t.numel() * 4 for t in tensors.values()) <= 9000
        there = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "exported").eval()
        equal(there(TOKENS_BS).logits, module(TOKENS_BS))
        theirs(case).save_pretrained(tmp_path / "theirs", max_shard_size="9KB")
        assert (tmp_path / "theirs/model.safetensors.index.json").is_file()
        equal(loaded(tmp_path / "theirs", model)(TOKENS_BS), theirs(case)(TOKENS_BS).logits)

    def test_two_shards_have_an_index_and_one_has_none(self, tmp_path: Path) -> None:
        model, module = CASES["gpt"][0], ours(CASES["gpt"][0])
        checkpoints = save(module, tmp_path / "checkpoints")
        whole = write(checkpoints, model, tmp_path / "whole")
        assert len(whole.files) == 1
        assert not (tmp_path / "whole/model.safetensors.index.json").exists()
        halves = write(checkpoints, model, tmp_path / "halves", shard_bytes=whole.bytes - 1)
        assert len(halves.files) == 2
        index = json.loads((tmp_path / "halves/model.safetensors.index.json").read_text())
        assert set(index["weight_map"].values()) == set(halves.files)

    @pytest.mark.parametrize(
        ("dtype", "torch_dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16)]
    )
    def test_16_bit_out_and_in(self, dtype: str, torch_dtype: torch.dtype, tmp_path: Path) -> None:
        transformers: Any = importlib.import_module("transformers")

        model, module = CASES["gpt-neox"][0], ours(CASES["gpt-neox"][0])
        write(save(module, tmp_path / "checkpoints"), model, tmp_path / "exported", dtype=dtype)
        there = transformers.AutoModelForCausalLM.from_pretrained(
            tmp_path / "exported", dtype="auto"
        )
        assert there.dtype == torch_dtype
        back = loaded(tmp_path / "exported", model)
        for p, q in zip(back.parameters(), module.parameters(), strict=True):
            assert p.dtype == torch.float32 and torch.equal(p, q.to(torch_dtype).float())

    def test_fp16_that_would_overflow_is_refused_and_leaves_nothing(self, tmp_path: Path) -> None:
        model, module = CASES["llama"][0], ours(CASES["llama"][0])
        with torch.no_grad():
            module.get_parameter("layers.1.mlp.down.weight")[3, 3] = 1e5
        saved = save(module, tmp_path / "checkpoints")
        with pytest.raises(
            ConfigError,
            match=r"layers\.1\.mlp\.down_proj\.weight has weights up to 100000, beyond fp16's",
        ) as error:
            write(saved, model, tmp_path / "exported", dtype="fp16")
        assert "bf16" in error.value.list[0].hint
        assert [p.name for p in tmp_path.iterdir()] == ["checkpoints"]

    def test_an_existing_folder_is_refused_and_left_alone(self, tmp_path: Path) -> None:
        saved = save(ours(CASES["gpt"][0]), tmp_path / "checkpoints")
        (tmp_path / "exported").mkdir()
        (tmp_path / "link").symlink_to(tmp_path / "nowhere")
        for target in (tmp_path / "exported", tmp_path / "link"):
            with pytest.raises(ConfigError, match="is there already"):
                write(saved, CASES["gpt"][0], target)
        assert not list((tmp_path / "exported").iterdir()) and len(list(tmp_path.iterdir())) == 3

    def test_a_checkpoint_of_another_model_is_refused_with_all_reasons(
        self, tmp_path: Path
    ) -> None:
        saved = save(ours(CASES["gpt"][0]), tmp_path / "checkpoints")
        other = Model(
            **{
                **COMMON,
                "num_layers": 1,
                "ffn_hidden_size": 50,
                "untie_embeddings_and_output_weights": True,
            }
        )
        with pytest.raises(ConfigError) as error:
            write(saved, other, tmp_path / "exported")
        text = str(error.value)
        assert (
            "head.weight is not in it" in text
            and "layers.1.mlp_norm.weight is not in the job's model" in text
        )
        assert "layers.0.mlp.up.weight is [96, 24] there, [50, 24] in the job's model" in text
        assert not (tmp_path / "exported").exists()

    def test_only_one_tensor_of_each_kind_is_in_memory(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from trainkit.train.huggingface import weights

        read: list[str] = []
        original = weights.read_tensor

        def remembers(folder: Path, name: str, entry: Any) -> Tensor:
            read.append(name)
            return original(folder, name, entry)

        monkeypatch.setattr(weights, "read_tensor", remembers)
        model = CASES["llama"][0]
        write(save(ours(model), tmp_path / "checkpoints"), model, tmp_path / "exported")
        # each once, though three are made of one
        assert len(read) == len(set(read)) == len(table(model, VOCAB))


@pytest.mark.parametrize("kind", ["gpt", "gpt-neox", "llama"])
def test_tokenizers_round_trip(kind: str, tmp_path: Path) -> None:
    transformers: Any = importlib.import_module("transformers")

    from trainkit.data.tokenizer import train_bpe

    texts = ["the quick brown fox jumps", "def f(x):\n    return x ** 2  # ümläut 你好"]
    trained = train_bpe(iter(texts * 20), 300, "<eod>")
    trained.save(str(tmp_path / "tokenizer.json"))
    model = CASES[kind][0]
    module = build_on_meta(model, trained.get_vocab_size())
    module.to_empty(device="cpu")
    shake(module)
    write(
        save(module, tmp_path / "checkpoints"),
        model,
        tmp_path / "exported",
        tokenizer=TokenizerFile(tmp_path / "tokenizer.json", "<eod>"),
    )
    there = transformers.AutoTokenizer.from_pretrained(tmp_path / "exported")
    for text in [*texts, " two  spaces\n\n\ttab", "fi\u0301 <|x|>"]:
        assert there(text)["input_ids"] == trained.encode(text).ids
        assert (
            there.decode(trained.encode(text).ids)
            == trained.decode(trained.encode(text).ids)
            == text
        )
        assert there(text).keys() == {"input_ids", "attention_mask"}
    eod = trained.token_to_id("<eod>")
    assert there.eos_token_id == there.bos_token_id == eod and there.model_max_length == 16
    config, generation = (
        json.loads((tmp_path / "exported" / name).read_text())
        for name in ("config.json", "generation_config.json")
    )
    assert config["eos_token_id"] == generation["eos_token_id"] == eod
    said = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "exported")
    out = said.generate(torch.tensor([[5, 6]]), max_new_tokens=2, do_sample=False)
    assert out.shape == (1, 4) or int(out[0, -1]) == eod


class TestVariants:
    """The same weights as other versions and other classes saved them."""

    @pytest.mark.parametrize("case", ["gpt", "gpt-untied", "gpt-neox", "llama"])
    def test_without_prefix_and_with_buffers(
        self, case: str, folders: Callable[[str], Path], copied: Callable[[str], Path]
    ) -> None:
        model = CASES[case][0]
        prefix = model.architecture.hugging_face.prefix
        buffers = {
            "gpt": ["h.0.attn.bias", "h.1.attn.masked_bias"],
            "gpt-neox": [
                "layers.0.attention.bias",
                "layers.1.attention.masked_bias",
                "gpt_neox.layers.0.attention.rotary_emb.inv_freq",
            ],
            "llama": ["layers.1.self_attn.rotary_emb.inv_freq", "rotary_emb.inv_freq"],
        }[model.family]
        more = {name: torch.zeros(2, dtype=torch.bool) for name in buffers}
        again = {"embed_out.weight": "lm_head.weight"}  # as transformers 5 calls it in memory
        folder = change_tensors(
            copied(case),
            lambda t: {again.get(n, n.removeprefix(prefix)): v for n, v in t.items()} | more,
        )
        assert check_weights(folder, model, VOCAB) == []
        assert all(
            torch.equal(p, q)
            for p, q in zip(
                loaded(folder, model).parameters(),
                loaded(folders(case), model).parameters(),
                strict=True,
            )
        )

    @pytest.mark.parametrize("case", ["gpt", "gpt-neox-tied", "llama-tied-linear"])
    def test_a_tied_head_may_be_there_if_it_is_the_embedding(
        self, case: str, copied: Callable[[str], Path]
    ) -> None:
        model = CASES[case][0]
        outside = model.architecture.hugging_face.outside
        head, embedding = f"{outside['head']}.weight", f"{outside['embed_tokens']}.weight"
        folder = change_tensors(copied(case), lambda t: t | {head: t[embedding]})
        assert check_weights(folder, model, VOCAB) == []
        change_tensors(folder, lambda t: t | {head: t[embedding] + 1e-3})
        (problem,) = check_weights(folder, model, VOCAB)
        assert (
            head in problem.message
            and "head of its own" in problem.message
            and "untie_embeddings" in problem.hint
        )

    def test_norms_that_are_not_one(self, copied: Callable[[str], Path]) -> None:
        name = "gpt_neox.layers.1.post_attention_layernorm.bias"
        folder = change_tensors(copied("gpt-j-tied"), lambda t: t | {name: t[name] + 1})
        (problem,) = check_weights(folder, CASES["gpt-j-tied"][0], VOCAB)
        assert name in problem.message and "gpt_j_tied = false" in problem.hint

    def test_configs_of_transformers_4(self, copied: Callable[[str], Path]) -> None:
        neox = change_config(
            copied("gpt-neox-tied"), rope_parameters=None, rotary_pct=0.5, rotary_emb_base=500
        )
        assert check_weights(neox, CASES["gpt-neox-tied"][0], VOCAB) == []
        linear = change_config(
            copied("llama-tied-linear"),
            rope_parameters=None,
            rope_theta=10000.0,
            rope_scaling={"type": "linear", "factor": 4.0},
            head_dim=None,
        )
        assert check_weights(linear, CASES["llama-tied-linear"][0], VOCAB) == []
        llama3 = {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8,
        }
        wide = change_config(
            copied("llama-wide-llama3"),
            rope_parameters=None,
            rope_theta=10000.0,
            rope_scaling=llama3,
        )
        assert check_weights(wide, CASES["llama-wide-llama3"][0], VOCAB) == []
        change_config(wide, rope_scaling=llama3 | {"factor": 4.0})
        assert "factor" in said(check_weights(wide, CASES["llama-wide-llama3"][0], VOCAB))

    @pytest.mark.parametrize("case", [case for case in CASES if not case.startswith("gpt-untied")])
    def test_what_is_written_is_whole_for_either_version(self, case: str) -> None:
        model = CASES[case][0]
        config = to_hf_config(model, VOCAB, "fp32", 0)
        old, new = (
            ("rope_theta", "rope_scaling", "rotary_pct", "rotary_emb_base"),
            ("rope_parameters",),
        )
        for absent in (old, new):
            assert (
                contradictions(
                    {key: value for key, value in config.items() if key not in absent}, model, VOCAB
                )
                == []
            )

    def test_keys_left_out_have_transformers_defaults(self) -> None:
        gpt2_small = Model(num_layers=12, hidden_size=768, num_attention_heads=12, seq_length=1024)
        assert contradictions({"model_type": "gpt2", "vocab_size": 50257}, gpt2_small, 50257) == []
        neox_20b = Model(
            family="gpt-neox",
            num_layers=44,
            hidden_size=6144,
            num_attention_heads=64,
            seq_length=2048,
        )
        assert (
            contradictions({"model_type": "gpt_neox", "vocab_size": 50432}, neox_20b, 50432) == []
        )
        llama_7b = Model(
            family="llama",
            num_layers=32,
            hidden_size=4096,
            num_attention_heads=32,
            seq_length=2048,
            ffn_hidden_size=11008,
            layernorm_epsilon=1e-6,
        )
        assert contradictions({"model_type": "llama", "vocab_size": 32000}, llama_7b, 32000) == []
