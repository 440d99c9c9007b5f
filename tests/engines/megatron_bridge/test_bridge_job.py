"""A job as Megatron-Bridge is given it, and what it is not given: without a tree that could run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.conftest import Project
from trainkit.base.errors import ConfigError
from trainkit.engines.hydra_words import read_override
from trainkit.engines.imported import ImportRequest
from trainkit.engines.megatron_bridge.engine import MegatronBridge
from trainkit.engines.megatron_bridge.words import ALWAYS, FIELDS, FP32, FUSIONS, OTHERS, SWITCHES
from trainkit.engines.options import load_table, newest_version
from trainkit.runs.folder import RunFolder

JOBS = """
[engines.megatron-bridge]
source = "{tree}"
python = "python-of-bridge"

[clusters.there]
device = "h100-sxm-80gb"
gpus_per_node = 4

[models.tiny]
family = "qwen3"
num_layers = 4
hidden_size = 64
num_attention_heads = 4
num_query_groups = 2
ffn_hidden_size = 128
seq_length = 64
vocab_size = 512

[jobs.tiny]
engine = "megatron-bridge"
cluster = "there"
model = "tiny"
dataset = "mock"
checkpoint.keep_last = 3
parallelism = {{ tensor_model_parallel_size = 2, sequence_parallel = true }}

[jobs.tiny.training]
micro_batch_size = 2
global_batch_size = 8
train_iters = 10
lr = 1e-3
min_lr = 1e-4
weight_decay = 0.1
save_interval = 4
eval_interval = 5
eval_iters = 3
precision = "bf16"

[jobs.tiny.engine_args]
"train.manual_gc" = true
"""
FILES = {
    "scripts/training/run_recipe.py": "",
    "src/megatron/bridge/package_info.py": "MAJOR = 0\nMINOR = 6\nPATCH = 1\n",
    "3rdparty/Megatron-LM/pretrain_gpt.py": "",
    "3rdparty/Megatron-LM/megatron/core/package_info.py": "MAJOR = 0\nMINOR = 19\nPATCH = 0\n",
}


@pytest.fixture
def project(tmp_path: Path) -> Project:
    for name, text in FILES.items():
        place = tmp_path / "bridge" / name
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(text)
    (tmp_path / "jobs.toml").write_text(JOBS.format(tree=tmp_path / "bridge"))
    (tmp_path / "tasks.py").write_text("from trainkit.cli.tasks import namespace\n")
    return Project(tmp_path)


def words_of(project: Project, *sets: str) -> tuple[list[str], dict[str, object]]:
    """The words before the fields, and the fields."""
    asked = (f"--set={each}" for each in sets)
    shown = json.loads(project.invoke("train", "tiny", "--dry-run", "--json", *asked).stdout)
    words = shown["command"]["engine_argv"]
    first = next(n for n, word in enumerate(words) if "=" in word)
    fields = [read_override(word) for word in words[first:]]
    assert len({each.path for each in fields}) == len(fields)
    return words[3:first], {each.path: each.value for each in fields}


def test_its_words_say_the_job(project: Project) -> None:
    words, found = words_of(project)
    recipe = ["--recipe", "vanilla_gpt_pretrain_config", "--mode", "pretrain"]
    assert words == [*recipe, "--dataset", "mock"]
    expected = {
        "model.tensor_model_parallel_size": 2,
        "model.sequence_parallel": True,
        "model.qk_layernorm": True,
        "model.gated_linear_unit": True,
        "model.activation_func": "silu",
        "model.add_bias_linear": False,
        "model.normalization": "RMSNorm",
        "model.num_query_groups": 2,
        "model.rotary_base": 1000000,
        "mixed_precision": "bf16_mixed",
        "ddp.use_distributed_optimizer": True,
        "optimizer.use_distributed_optimizer": True,
        "optimizer.weight_decay": 0.1,
        "scheduler.end_weight_decay": 0.1,
        "tokenizer.vocab_size": 512,
        "checkpoint.most_recent_k": 3,
        "checkpoint.load": None,
        "train.manual_gc": True,
        "train.global_batch_size": 8,
        "validation.eval_interval": 5,
    }
    assert {key: found[key] for key in expected} == expected


def test_a_recipe_keeps_what_no_key_says(project: Project) -> None:
    named = 'engine_args={recipe="llama32_1b_pretrain_config"}'
    words, found = words_of(project, named)
    assert words[1] == "llama32_1b_pretrain_config"
    assert "mixed_precision" not in found and "model.apply_rope_fusion" not in found
    done = project.invoke("plan", "tiny", f"--set={named}")
    said = " ".join((done.stdout + done.stderr).split())
    assert "mixed_precision is that of llama32_1b_pretrain_config" in said
    _, found = words_of(project, named, 'training.precision="fp32"', "parallelism.zero_stage=0")
    assert found["mixed_precision"] is None
    dtype = {"_target_": "torch.float32", "_call_": False}
    assert found["model.params_dtype"] == found["optimizer.params_dtype"] == dtype
    gathers = {found[f"{part}.overlap_param_gather"] for part in ("ddp", "optimizer")}
    assert gathers == {False} and found["comm_overlap"] is None


@pytest.mark.parametrize(
    ("change", "said", "code"),
    [
        ("parallelism.zero_stage=2", "distributed optimizer is stage 1", 3),
        ('engine_args={"train.manual_gcc"=1}', "has no option 'train.manual_gcc'", 3),
        ('engine_args={"optimizer.lr"=1.0}', "use training.lr for it", 3),
        ('engine_args={"checkpoint.save"="x"}', "trainkit sets checkpoint.save itself", 3),
        ('engine_args={"checkpoint.ckpt_format"="zarr"}', "torch_dist", 3),
        ('engine_args={mixed_precision="fp16_mixed"}', "training.precision = 'bf16'", 3),
        ('engine_args={mixed_precision="bf16_nonsense"}', "is none of its values", 3),
        ('engine_args={"dataset.mock"=true}', "trainkit sets dataset.mock itself", 3),
        ('engine_args={"ddp.use_megatron_fsdp"=true}', "use parallelism.zero_stage for it", 3),
        ('engine_args={"checkpoint.finetune"=true}', "use init_from for it", 3),
        ('args=["train.train_iters=5"]', "which trainkit sets itself", 3),
        ('args=["--dry-run"]', "options of run_recipe.py are trainkit's", 3),
        ("checkpoint.keep_best=2", "in Megatron-Bridge: it keeps the newest only", 3),
        ("checkpoint.keep_every=4", "checkpoint.keep_every = 4 has no counterpart", 3),
        ("training.z_loss=1e-4", "training.z_loss = 0.0001 has no counterpart", 3),
        ('init_from="hf"', "pads a vocabulary of 512 to 768", 3),
        ('model.qk_norm="projection"', "model.qk_norm = 'projection'", 3),
    ],
)
def test_what_it_cannot_is_refused(project: Project, change: str, said: str, code: int) -> None:
    more = ("--set=model.make_vocab_size_divisible_by=384",) if "init_from" in change else ()
    done = project.invoke("train", "tiny", "--set", change, *more, "--dry-run", exit=code)
    assert said in " ".join(f"{done.stdout} {done.stderr}".split())


def test_a_tree_without_its_submodule_is_named(project: Project, tmp_path: Path) -> None:
    (tmp_path / "bridge" / "3rdparty" / "Megatron-LM" / "pretrain_gpt.py").unlink()
    done = project.invoke("train", "tiny", "--dry-run", exit=3)
    assert "it has no 3rdparty/Megatron-LM/pretrain_gpt.py" in " ".join(done.stderr.split())


def test_what_cannot_be_loaded_is_put_aside_and_kept(tmp_path: Path) -> None:
    """most_recent_k would count it, and delete a whole one."""
    run = RunFolder(tmp_path / "run")
    (run.checkpoints / "iter_0000004").mkdir(parents=True)
    (run.checkpoints / "iter_0000004" / "part").write_text("4")
    MegatronBridge().ready_folder(run)
    assert [path.name for path in run.checkpoints.iterdir()] == ["damaged-4-1"]
    assert (run.checkpoints / "damaged-4-1" / "part").read_text() == "4"


@pytest.mark.parametrize("mode", ["--mode lora", "--mode=sft"])
def test_fine_tuning_is_not_imported_as_pretraining(tmp_path: Path, mode: str) -> None:
    script = tmp_path / "run.sh"
    script.write_text(f"torchrun scripts/training/run_recipe.py --model llama3_8b {mode}\n")
    with pytest.raises(ConfigError, match="fine-tuning and adapters are not trained"):
        MegatronBridge().import_job(ImportRequest((script,), (f"source={tmp_path}",)))


def test_an_older_version_is_refused(project: Project, tmp_path: Path) -> None:
    info = tmp_path / "bridge" / "src" / "megatron" / "bridge" / "package_info.py"
    info.write_text("MAJOR = 0\nMINOR = 5\nPATCH = 1\n")
    done = project.invoke("train", "tiny", "--dry-run", exit=3)
    assert "Megatron-Bridge 0.5.1: this version of trainkit" in " ".join(done.stderr.split())


def test_its_fields_are_in_the_table() -> None:
    table = load_table("megatron-bridge", newest_version("megatron-bridge"))
    names = {*ALWAYS, *FUSIONS, *FP32, *OTHERS}
    names |= {name for fields in (*FIELDS.values(), *SWITCHES.values()) for name in fields}
    assert names <= set(table.options), names - set(table.options)
