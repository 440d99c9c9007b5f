"""Hugging Face folders, side by side with transformers: same weights, same logits, in both directions; and what is refused."""

from __future__ import annotations

import importlib
import json
import pickle
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch._C._distributed_c10d import HashStore

from tests.distributed import run_ranks
from trainkit.base.errors import ConfigError, Problem
from trainkit.jobs.schema import Model, RopeScaling
from trainkit.train import checkpoint
from trainkit.train.huggingface import check_weights, load_weights
from trainkit.train.huggingface.config import contradictions, to_hf_config
from trainkit.train.huggingface.folder import open_weights
from trainkit.train.huggingface.names import FAMILIES, published, table
from trainkit.train.huggingface.writing import TokenizerFile, export
from trainkit.train.model import Transformer, build_on_meta

VOCAB = 53  # divides by nothing used here
COMMON: dict[str, Any] = {"name": "tiny", "num_layers": 2, "hidden_size": 24, "num_attention_heads": 3, "seq_length": 16}
LLAMA: dict[str, Any] = {**COMMON, "family": "llama", "num_attention_heads": 4, "hidden_size": 32, "ffn_hidden_size": 40}
NEOX: dict[str, Any] = {**COMMON, "family": "gpt-neox", "hidden_size": 48}
LLAMA3 = RopeScaling(type="llama3", factor=8.0, original_max_position_embeddings=8)
# Our shape, and the same in transformers' words, written by hand.
CASES: dict[str, tuple[Model, dict[str, Any]]] = {
    "gpt": (Model(**COMMON), {"n_positions": 16, "n_embd": 24, "n_layer": 2, "n_head": 3}),
    "gpt-untied": (
        Model(**COMMON, untie_embeddings_and_output_weights=True, gelu="exact", ffn_hidden_size=40, max_position_embeddings=20, layernorm_epsilon=1e-3),
        {
            "n_positions": 20,
            "n_embd": 24,
            "n_layer": 2,
            "n_head": 3,
            "n_inner": 40,
            "activation_function": "gelu",
            "tie_word_embeddings": False,
            "layer_norm_epsilon": 1e-3,
        },
    ),
    "gpt-neox": (Model(**NEOX), {"hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 192, "max_position_embeddings": 16}),
    "gpt-neox-tied": (
        Model(**NEOX, gpt_j_residual=False, untie_embeddings_and_output_weights=False, gelu="tanh", rotary_percent=0.5, rotary_base=500.0),
        {
            "hidden_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 3,
            "intermediate_size": 192,
            "max_position_embeddings": 32,
            "use_parallel_residual": False,
            "tie_word_embeddings": True,
            "hidden_act": "gelu_fast",
            "rope_parameters": {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5},
        },
    ),
    "gpt-j-tied": (
        Model(**NEOX, gpt_j_tied=True, rotary_percent=1.0, layernorm_epsilon=1e-3),
        {
            "hidden_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 3,
            "intermediate_size": 192,
            "max_position_embeddings": 16,
            "layer_norm_eps": 1e-3,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 1.0},
        },
    ),
    "llama": (
        Model(**LLAMA, rotary_base=300.0),
        {
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "intermediate_size": 40,
            "max_position_embeddings": 16,
            "rms_norm_eps": 1e-5,
            "rope_parameters": {"rope_type": "default", "rope_theta": 300.0},
        },
    ),
    "llama-tied-linear": (
        Model(**LLAMA, num_query_groups=1, untie_embeddings_and_output_weights=False, rope_scaling=RopeScaling(type="linear", factor=4.0)),
        {
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 1,
            "intermediate_size": 40,
            "max_position_embeddings": 16,
            "rms_norm_eps": 1e-5,
            "tie_word_embeddings": True,
            "rope_scaling": {"rope_type": "linear", "factor": 4.0},
        },
    ),
    "llama-wide-llama3": (
        Model(**LLAMA, num_query_groups=2, kv_channels=12, rope_scaling=LLAMA3, layernorm_epsilon=1e-3),
        {
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 12,
            "intermediate_size": 40,
            "max_position_embeddings": 64,
            "rms_norm_eps": 1e-3,
            "rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8},
        },
    ),
}
TOKENS_BS = torch.randint(0, VOCAB, (3, 16), generator=torch.Generator().manual_seed(3))
Weights = dict[str, Tensor]


@pytest.fixture(scope="module", autouse=True)
def one_rank() -> Iterator[None]:
    """A world of one, in which checkpoints are saved."""
    dist.init_process_group("gloo", rank=0, world_size=1, store=HashStore())
    yield
    dist.destroy_process_group()


def shake(module: nn.Module) -> None:
    """Random values everywhere, norms and biases too."""
    torch.manual_seed(1)
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.3)


def ours(model: Model) -> Transformer:
    module = build_on_meta(model, VOCAB)
    module.to_empty(device="cpu")
    shake(module)
    return module


def theirs(case: str) -> Any:
    """A transformers model of the case, with random weights."""
    transformers: Any = importlib.import_module("transformers")

    model, words = CASES[case]
    family = FAMILIES[model.family]
    ids = {"bos_token_id": 0, "eos_token_id": 0}
    config = transformers.AutoConfig.for_model(family.model_type, vocab_size=VOCAB, **ids, **words)
    module = getattr(transformers, family.architecture)(config).eval()
    shake(module)
    if model.gpt_j_tied:
        for layer in module.gpt_neox.layers:
            layer.post_attention_layernorm.load_state_dict(layer.input_layernorm.state_dict())
    return module


def save(module: Transformer, folder: Path, step: int = 7) -> checkpoint.Checkpoint:
    tensors = {f"model.{name}": p.detach() for name, p in module.named_parameters()}
    checkpoint.save(folder, tensors, step=step, consumed_samples=0, layout={}, job={}, state={})
    return checkpoint.open_checkpoint(checkpoint.folder_of(folder, step))


def write(saved: checkpoint.Checkpoint, model: Model, target: Path, **more: Any) -> Any:
    return export(saved, model, target, **{"dtype": "fp32", "shard_bytes": 10**9, "tokenizer": None, "about": {}, **more})


def loaded(folder: Path, model: Model, rows: int = VOCAB) -> Transformer:
    module = build_on_meta(model, rows)
    module.to_empty(device="cpu")
    load_weights(folder, dict(module.named_parameters()), model)
    return module


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder that transformers saves for a case."""
    made: dict[str, Path] = {}

    def folder(case: str) -> Path:
        if case not in made:
            made[case] = tmp_path_factory.mktemp(case)
            theirs(case).save_pretrained(made[case])
        return made[case]

    return folder


@pytest.fixture
def copied(folders: Callable[[str], Path], tmp_path: Path) -> Callable[[str], Path]:
    """A copy of it, to change."""
    return lambda case: Path(shutil.copytree(folders(case), tmp_path / case))


def change_tensors(folder: Path, new: Callable[[Weights], Weights]) -> Path:
    tensors = new(load_file(folder / "model.safetensors"))
    save_file({name: t.contiguous().clone() for name, t in tensors.items()}, folder / "model.safetensors", {"format": "pt"})
    return folder


def change_config(folder: Path, **values: Any) -> Path:
    """Set keys of config.json; None takes one away."""
    path = folder / "config.json"
    config = json.loads(path.read_text()) | values
    path.write_text(json.dumps({key: value for key, value in config.items() if value is not None}))
    return folder


def said(problems: list[Problem]) -> str:
    return "\n".join(map(str, problems))


def equal(left: Tensor, right: Tensor) -> None:
    torch.testing.assert_close(left, right, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("case", CASES)
def test_the_table_is_the_models_parameters(case: str) -> None:
    model = CASES[case][0]
    assert {name: entry.shape for name, entry in table(model, VOCAB).items()} == {n: tuple(p.shape) for n, p in build_on_meta(model, VOCAB).named_parameters()}


@pytest.mark.parametrize("case", CASES)
@torch.no_grad()
def test_what_transformers_saved_gives_the_same_logits_here(case: str, folders: Callable[[str], Path]) -> None:
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
    there, said = transformers.AutoModelForCausalLM.from_pretrained(target, output_loading_info=True)
    assert not any(said[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    equal(there.eval()(TOKENS_BS).logits, module(TOKENS_BS))
    back = loaded(target, model)
    assert all(torch.equal(p, q) for p, q in zip(back.parameters(), module.parameters(), strict=True))
    assert contradictions(there.config.to_dict(), model, VOCAB) == []  # as transformers would write it again


def _on_two_ranks(folder: Path, checkpoints: Path) -> None:
    """Load into a sharded model, and save it."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2,))
    for case in ("gpt-untied", "gpt-neox", "llama-wide-llama3"):
        model = CASES[case][0]
        module = build_on_meta(model, VOCAB)
        fully_shard(module, mesh=mesh)
        module.to_empty(device="cpu")
        load_weights(folder / case, dict(module.named_parameters()), model)
        tensors = {f"model.{name}": p.detach() for name, p in module.named_parameters()}
        checkpoint.save(checkpoints / case, tensors, step=7, consumed_samples=0, layout={}, job={}, state={})


def test_every_rank_reads_its_part_and_parts_are_exported_whole(folders: Callable[[str], Path], tmp_path: Path) -> None:
    cases = ("gpt-untied", "gpt-neox", "llama-wide-llama3")
    for case in cases:
        shutil.copytree(folders(case), tmp_path / "hf" / case)
    run_ranks(2, "tests.train.test_huggingface:_on_two_ranks", tmp_path / "hf", tmp_path / "checkpoints")
    for case in cases:
        saved = checkpoint.open_checkpoint(tmp_path / "checkpoints" / case / "step-00000007")
        assert len(saved.manifest.tensors["model.embed_tokens.weight"].chunks) == 2
        write(saved, CASES[case][0], tmp_path / "out" / case)
        one, other = (load_file(folder / case / "model.safetensors") for folder in (tmp_path / "out", tmp_path / "hf"))
        assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


class TestFiles:
    """Layouts of files, dtypes, the export folder."""

    @pytest.mark.parametrize("case", ["gpt", "llama"])
    def test_shards(self, case: str, tmp_path: Path) -> None:
        transformers: Any = importlib.import_module("transformers")

        model, module = CASES[case][0], ours(CASES[case][0])
        written = write(save(module, tmp_path / "checkpoints"), model, tmp_path / "exported", shard_bytes=9000)
        index = json.loads((tmp_path / "exported/model.safetensors.index.json").read_text())
        assert len(written.files) > 3 and set(index["weight_map"].values()) == set(written.files)
        assert index["metadata"]["total_size"] == written.bytes == 4 * written.parameters == 4 * sum(p.numel() for p in module.parameters())
        for name in written.files:
            tensors = load_file(tmp_path / "exported" / name)
            assert len(tensors) == 1 or sum(t.numel() * 4 for t in tensors.values()) <= 9000
        there = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "exported").eval()
        equal(there(TOKENS_BS).logits, module(TOKENS_BS))
        theirs(case).save_pretrained(tmp_path / "theirs", max_shard_size="9KB")
        assert (tmp_path / "theirs/model.safetensors.index.json").is_file()
        equal(loaded(tmp_path / "theirs", model)(TOKENS_BS), theirs(case)(TOKENS_BS).logits)

    @pytest.mark.parametrize(("dtype", "torch_dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
    def test_16_bit_out_and_in(self, dtype: str, torch_dtype: torch.dtype, tmp_path: Path) -> None:
        transformers: Any = importlib.import_module("transformers")

        model, module = CASES["gpt-neox"][0], ours(CASES["gpt-neox"][0])
        write(save(module, tmp_path / "checkpoints"), model, tmp_path / "exported", dtype=dtype)
        there = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "exported", dtype="auto")
        assert there.dtype == torch_dtype
        back = loaded(tmp_path / "exported", model)
        for p, q in zip(back.parameters(), module.parameters(), strict=True):
            assert p.dtype == torch.float32 and torch.equal(p, q.to(torch_dtype).float())

    def test_fp16_that_would_overflow_is_refused_and_leaves_nothing(self, tmp_path: Path) -> None:
        model, module = CASES["llama"][0], ours(CASES["llama"][0])
        with torch.no_grad():
            module.get_parameter("layers.1.mlp.down.weight")[3, 3] = 1e5
        saved = save(module, tmp_path / "checkpoints")
        with pytest.raises(ConfigError, match=r"layers\.1\.mlp\.down_proj\.weight has weights up to 100000, beyond fp16's") as error:
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

    def test_a_checkpoint_of_another_model_is_refused_with_all_reasons(self, tmp_path: Path) -> None:
        saved = save(ours(CASES["gpt"][0]), tmp_path / "checkpoints")
        other = Model(**{**COMMON, "num_layers": 1, "ffn_hidden_size": 50, "untie_embeddings_and_output_weights": True})
        with pytest.raises(ConfigError) as error:
            write(saved, other, tmp_path / "exported")
        text = str(error.value)
        assert "head.weight is not in it" in text and "layers.1.mlp_norm.weight is not in the job's model" in text
        assert "layers.0.mlp.up.weight is [96, 24] there, [50, 24] in the job's model" in text
        assert not (tmp_path / "exported").exists()

    def test_only_one_tensor_of_each_kind_is_in_memory(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        from trainkit.train.huggingface import writing

        read: list[str] = []
        original = writing._read

        def remembers(folder: Path, name: str, entry: Any) -> Tensor:
            read.append(name)
            return original(folder, name, entry)

        monkeypatch.setattr(writing, "_read", remembers)
        model = CASES["llama"][0]
        write(save(ours(model), tmp_path / "checkpoints"), model, tmp_path / "exported")
        assert len(read) == len(set(read)) == len(table(model, VOCAB))  # each once, though three are made of one


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
    write(save(module, tmp_path / "checkpoints"), model, tmp_path / "exported", tokenizer=TokenizerFile(tmp_path / "tokenizer.json", "<eod>"))
    there = transformers.AutoTokenizer.from_pretrained(tmp_path / "exported")
    for text in [*texts, " two  spaces\n\n\ttab", "fi\u0301 <|x|>"]:
        assert there(text)["input_ids"] == trained.encode(text).ids
        assert there.decode(trained.encode(text).ids) == trained.decode(trained.encode(text).ids) == text
        assert there(text).keys() == {"input_ids", "attention_mask"}
    eod = trained.token_to_id("<eod>")
    assert there.eos_token_id == there.bos_token_id == eod and there.model_max_length == 16
    config, generation = (json.loads((tmp_path / "exported" / name).read_text()) for name in ("config.json", "generation_config.json"))
    assert config["eos_token_id"] == generation["eos_token_id"] == eod
    said = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "exported")
    out = said.generate(torch.tensor([[5, 6]]), max_new_tokens=2, do_sample=False)
    assert out.shape == (1, 4) or int(out[0, -1]) == eod


class TestVariants:
    """The same weights as other versions and other classes saved them."""

    @pytest.mark.parametrize("case", ["gpt", "gpt-untied", "gpt-neox", "llama"])
    def test_without_prefix_and_with_buffers(self, case: str, folders: Callable[[str], Path], copied: Callable[[str], Path]) -> None:
        model = CASES[case][0]
        prefix = FAMILIES[model.family].prefix
        buffers = {
            "gpt": ["h.0.attn.bias", "h.1.attn.masked_bias"],
            "gpt-neox": ["layers.0.attention.bias", "layers.1.attention.masked_bias", "gpt_neox.layers.0.attention.rotary_emb.inv_freq"],
            "llama": ["layers.1.self_attn.rotary_emb.inv_freq", "rotary_emb.inv_freq"],
        }[model.family]
        more = {name: torch.zeros(2, dtype=torch.bool) for name in buffers}
        again = {"embed_out.weight": "lm_head.weight"}  # as transformers 5 calls it in memory
        folder = change_tensors(copied(case), lambda t: {again.get(n, n.removeprefix(prefix)): v for n, v in t.items()} | more)
        assert check_weights(folder, model, VOCAB) == []
        assert all(torch.equal(p, q) for p, q in zip(loaded(folder, model).parameters(), loaded(folders(case), model).parameters(), strict=True))

    @pytest.mark.parametrize("case", ["gpt", "gpt-neox-tied", "llama-tied-linear"])
    def test_a_tied_head_may_be_there_if_it_is_the_embedding(self, case: str, copied: Callable[[str], Path]) -> None:
        model = CASES[case][0]
        outside = FAMILIES[model.family].outside
        head, embedding = f"{outside['head']}.weight", f"{outside['embed_tokens']}.weight"
        folder = change_tensors(copied(case), lambda t: t | {head: t[embedding]})
        assert check_weights(folder, model, VOCAB) == []
        change_tensors(folder, lambda t: t | {head: t[embedding] + 1e-3})
        (problem,) = check_weights(folder, model, VOCAB)
        assert head in problem.message and "head of its own" in problem.message and "untie_embeddings" in problem.hint

    def test_norms_that_are_not_one(self, copied: Callable[[str], Path]) -> None:
        name = "gpt_neox.layers.1.post_attention_layernorm.bias"
        folder = change_tensors(copied("gpt-j-tied"), lambda t: t | {name: t[name] + 1})
        (problem,) = check_weights(folder, CASES["gpt-j-tied"][0], VOCAB)
        assert name in problem.message and "gpt_j_tied = false" in problem.hint

    def test_configs_of_transformers_4(self, copied: Callable[[str], Path]) -> None:
        neox = change_config(copied("gpt-neox-tied"), rope_parameters=None, rotary_pct=0.5, rotary_emb_base=500)
        assert check_weights(neox, CASES["gpt-neox-tied"][0], VOCAB) == []
        linear = change_config(
            copied("llama-tied-linear"), rope_parameters=None, rope_theta=10000.0, rope_scaling={"type": "linear", "factor": 4.0}, head_dim=None
        )
        assert check_weights(linear, CASES["llama-tied-linear"][0], VOCAB) == []
        llama3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8}
        wide = change_config(copied("llama-wide-llama3"), rope_parameters=None, rope_theta=10000.0, rope_scaling=llama3)
        assert check_weights(wide, CASES["llama-wide-llama3"][0], VOCAB) == []
        change_config(wide, rope_scaling=llama3 | {"factor": 4.0})
        assert "factor" in said(check_weights(wide, CASES["llama-wide-llama3"][0], VOCAB))

    @pytest.mark.parametrize("case", [case for case in CASES if not case.startswith("gpt-untied")])
    def test_what_is_written_is_whole_for_either_version(self, case: str) -> None:
        model = CASES[case][0]
        config = to_hf_config(model, VOCAB, "fp32", 0)
        old, new = ("rope_theta", "rope_scaling", "rotary_pct", "rotary_emb_base"), ("rope_parameters",)
        for absent in (old, new):
            assert contradictions({key: value for key, value in config.items() if key not in absent}, model, VOCAB) == []

    def test_keys_left_out_have_transformers_defaults(self) -> None:
        gpt2_small = Model(num_layers=12, hidden_size=768, num_attention_heads=12, seq_length=1024)
        assert contradictions({"model_type": "gpt2", "vocab_size": 50257}, gpt2_small, 50257) == []
        neox_20b = Model(family="gpt-neox", num_layers=44, hidden_size=6144, num_attention_heads=64, seq_length=2048)
        assert contradictions({"model_type": "gpt_neox", "vocab_size": 50432}, neox_20b, 50432) == []
        llama_7b = Model(
            family="llama", num_layers=32, hidden_size=4096, num_attention_heads=32, seq_length=2048, ffn_hidden_size=11008, layernorm_epsilon=1e-6
        )
        assert contradictions({"model_type": "llama", "vocab_size": 32000}, llama_7b, 32000) == []


class TestRefused:
    """Folders that are not the job's model, all reasons at once."""

    def test_all_reasons_at_once(self, copied: Callable[[str], Path]) -> None:
        folder = change_tensors(copied("llama"), lambda t: {n: v for n, v in t.items() if "o_proj" not in n} | {"model.layers.0.extra": torch.zeros(3)})
        change_tensors(folder, lambda t: t | {"model.norm.weight": t["model.norm.weight"].double()})
        change_config(folder, attention_bias=True, quantization_config={"bits": 4}, max_position_embeddings=8)
        model = Model(**{**LLAMA, "ffn_hidden_size": 44, "num_query_groups": 2, "layernorm_epsilon": 1e-4, "rope_scaling": LLAMA3})
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

    def test_nothing_is_written_where_anything_is_wrong(self, copied: Callable[[str], Path]) -> None:
        model = CASES["gpt"][0]
        folder = change_tensors(copied("gpt"), lambda t: {n: v for n, v in t.items() if n != "transformer.ln_f.bias"})
        module = ours(model)
        before = {name: p.detach().clone() for name, p in module.named_parameters()}
        with pytest.raises(ConfigError, match=r"lacks transformer\.ln_f\.bias") as error:
            load_weights(folder, dict(module.named_parameters()), model)
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
        assert "pickles only (model.pt, pytorch_model.bin)" in problem.message and "save_pretrained" in problem.hint
        with pytest.raises(ConfigError, match="not read"):
            loaded(folder, CASES["gpt"][0])
        assert not (tmp_path / "executed").exists()

    def test_another_type(self, folders: Callable[[str], Path], copied: Callable[[str], Path]) -> None:
        (problem,) = check_weights(folders("gpt-neox"), CASES["llama"][0], VOCAB)
        assert "'gpt_neox'; family 'llama' is 'llama'" in problem.message and "family = 'gpt-neox'" in problem.hint
        (problem,) = check_weights(change_config(copied("llama"), model_type="mistral"), CASES["llama"][0], VOCAB)
        assert "'mistral'" in problem.message and "gpt2, gpt_neox, llama" in problem.hint

    @pytest.mark.parametrize(
        ("case", "values", "words"),
        [
            ("gpt", {"activation_function": "relu"}, "activation_function is 'relu' there"),
            ("gpt", {"activation_function": "gelu"}, "gelu = 'exact'"),
            ("gpt", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx is True"),
            ("gpt", {"n_positions": 32}, "max_position_embeddings = 32"),
            ("gpt", {"tie_word_embeddings": False}, "untie_embeddings_and_output_weights = true"),
            ("gpt", {"n_embd": "wide"}, "n_embd is 'wide' there"),
            ("gpt-neox", {"use_parallel_residual": False}, "gpt_j_residual = false"),
            ("gpt-neox", {"attention_bias": False}, "attention_bias is False there"),
            ("gpt-neox", {"hidden_act": "gelu_pytorch_tanh"}, "gelu = 'tanh'"),
            ("gpt-neox", {"rope_parameters": {"rope_theta": 10000.0, "partial_rotary_factor": 0.5}}, "rotary_percent = 0.5"),
            ("gpt-neox", {"rope_parameters": {"rope_theta": 9.0, "partial_rotary_factor": 0.25}}, "rotary_base = 9.0"),
            ("gpt-neox", {"rope_scaling": {"type": "linear", "factor": 2.0}}, "stretched by 'linear', which family 'gpt-neox' does not have"),
            ("llama", {"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "rope_theta": 300.0}}, "stretched by 'yarn'"),
            ("llama", {"rope_scaling": {"rope_type": "linear", "factor": 2.0, "rope_theta": 300.0}}, "rope_scaling = { type = 'linear', factor = 2.0 }"),
            ("llama", {"rope_parameters": {"full_attention": {"rope_theta": 1.0}}}, "cannot be said"),
            ("llama", {"rope_parameters": 3}, "cannot be said"),
            ("llama", {"head_dim": 4}, "kv_channels = 4"),
            ("llama", {"mlp_bias": True}, "mlp_bias is True"),
            ("llama", {"hidden_act": "gelu"}, "hidden_act is 'gelu' there; family 'llama' has 'silu' only"),
            ("llama", {"num_attention_heads": 0, "head_dim": None}, "makes no sense"),
        ],
    )
    def test_every_contradiction_is_named(self, case: str, values: dict[str, Any], words: str, folders: Callable[[str], Path]) -> None:
        config = json.loads((folders(case) / "config.json").read_text()) | values
        found = contradictions(config, CASES[case][0], VOCAB)
        assert len(found) <= 2 and words in said(found)

    def test_broken_folders(self, copied: Callable[[str], Path], tmp_path: Path) -> None:
        model, sharded = CASES["llama"][0], tmp_path / "sharded"
        assert "no such folder" in said(check_weights(tmp_path / "nowhere", model, VOCAB))
        assert "has no weights" in said(check_weights(tmp_path, model, VOCAB)) and "config.json: cannot be read" in said(check_weights(tmp_path, model, VOCAB))
        torn = copied("llama")
        data = (torn / "model.safetensors").read_bytes()
        for content in (data[:-9], data[:50], b"", b"\xff" * 64):
            (torn / "model.safetensors").write_bytes(content)
            assert "cannot be read as safetensors" in said(check_weights(torn, model, VOCAB))
        for text in ("{", "[]"):
            (torn / "config.json").write_text(text)
            assert "is no JSON" in said(check_weights(torn, model, VOCAB))
        theirs("llama").save_pretrained(sharded, max_shard_size="20KB")
        index = json.loads((sharded / "model.safetensors.index.json").read_text())
        first = sorted(sharded.glob("model-*.safetensors"))[0]
        shutil.copy(first, sharded / "again.safetensors")
        change_index(sharded, index["weight_map"] | {"x": "again.safetensors"})
        assert "once more" in said(check_weights(sharded, model, VOCAB))
        change_index(sharded, index["weight_map"])
        first.unlink()
        text = said(check_weights(sharded, model, VOCAB))
        assert f"{first}: is missing" in text and "lacks" in text
        for hostile in ({}, {"x": "../elsewhere.safetensors"}, {"x": "/etc/hostname"}, {"x": 3}, {"x": "pytorch_model.bin"}):
            change_index(sharded, hostile)
            assert "does not map tensors" in said(check_weights(sharded, model, VOCAB))

    def test_a_vocabulary_of_another_size_without_a_word_in_the_config(self, copied: Callable[[str], Path]) -> None:
        folder = change_tensors(copied("gpt"), lambda t: t | {"transformer.wte.weight": t["transformer.wte.weight"][:-1]})
        assert "transformer.wte.weight is [52, 24] there, [53, 24]" in said(check_weights(folder, CASES["gpt"][0], None))

    @pytest.mark.parametrize(
        ("model", "words"),
        [
            (Model(**COMMON, kv_channels=10), "kv_channels 10 cannot be said"),
            (Model(**{**COMMON, "hidden_size": 25}, kv_channels=8), "no hidden_size 25 that does not divide by num_attention_heads 3"),
            (Model(**{**LLAMA, "hidden_size": 30}, kv_channels=8), "no hidden_size 30"),
        ],
    )
    def test_a_model_that_transformers_has_not(self, model: Model, words: str, tmp_path: Path) -> None:
        saved = save(ours(model), tmp_path / "checkpoints")
        with pytest.raises(ConfigError, match=words):
            write(saved, model, tmp_path / "exported")
        assert not (tmp_path / "exported").exists()


def change_index(folder: Path, weight_map: dict[str, Any]) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


@st.composite
def models(draw: st.DrawFn) -> Model:
    """Shapes of every family."""
    family = draw(st.sampled_from(sorted(FAMILIES)))
    groups, per_group, size = draw(st.integers(1, 3)), draw(st.integers(1, 3)), 2 * draw(st.integers(1, 4))
    heads = groups * per_group
    words: dict[str, Any] = {"num_query_groups": groups} if family == "llama" else {"gpt_j_tied": draw(st.booleans())} if family == "gpt-neox" else {}
    if family == "gpt-neox":
        words["rotary_percent"] = 1.0
    untied = draw(st.booleans())
    words |= {"num_layers": draw(st.integers(1, 3)), "hidden_size": heads * size, "num_attention_heads": heads, "ffn_hidden_size": draw(st.integers(1, 9))}
    return Model.model_validate({"family": family, "seq_length": draw(st.integers(1, 9)), "untie_embeddings_and_output_weights": untied, **words})


@given(models(), st.integers(2, 9))
def test_every_element_has_one_place(model: Model, vocab_size: int) -> None:
    """Rows of ours are covered once, rows of theirs are covered once, and nothing but copies of one norm is there twice."""
    entries = table(model, vocab_size)
    tensors = published(entries)
    for entry in entries.values():
        rows = [row for piece in entry.pieces for row in range(piece.start, piece.start + piece.rows)]
        assert sorted(rows) == list(range(entry.shape[0]))
    for tensor in tensors.values():
        rows = [row for piece in tensor.pieces for row in range(piece.source_start, piece.source_start + piece.rows)]
        assert sorted(rows) == list(range(tensor.shape[-1] if tensor.pieces[0].transposed else tensor.shape[0]))
    copies = {name for entry in entries.values() for name in entry.again}
    count = sum(torch.Size(t.shape).numel() for name, t in tensors.items() if name not in copies)
    assert count == sum(p.numel() for p in build_on_meta(model, vocab_size).parameters())
    assert bool(copies) == model.gpt_j_tied


def test_headers_alone_are_read(folders: Callable[[str], Path]) -> None:
    """What is looked at before weights are read is small: names, shapes, dtypes."""
    weights = open_weights(folders("gpt"), FAMILIES["gpt"])
    with safe_open(folders("gpt") / "model.safetensors", "pt") as file:
        assert {s.name: s.shape for s in weights.tensors.values()} == {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    assert to_hf_config(CASES["gpt"][0], VOCAB, "bf16", None)["torch_dtype"] == "bfloat16"
