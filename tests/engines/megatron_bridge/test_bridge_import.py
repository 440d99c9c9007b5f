"""Megatron-Bridge's own recipes, imported: of each the configuration of the job is held against the
recipe's, leaf by leaf, as Bridge's own dry run writes both: what differs has been named."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engines.megatron_bridge.hub_cache import write_cache
from tests.engines.real import RealEngine, parameters, real_engines
from trainkit.base.errors import ConfigError
from trainkit.engines.imported import ImportedJob, ImportRequest
from trainkit.engines.megatron_bridge.engine import MegatronBridge
from trainkit.engines.megatron_bridge.import_recipe import PLACES, RecipeRunner, job_words
from trainkit.engines.options import load_table, newest_version

pytestmark = pytest.mark.slow
RECIPES = [
    "vanilla_gpt_pretrain_config",
    "llama2_7b_pretrain_config",
    "llama3_8b_pretrain_config",
    "llama3_70b_pretrain_config",
    "llama32_1b_pretrain_config",
    "llama32_3b_pretrain_config",
    "qwen3_600m_pretrain_config",
    "qwen3_32b_pretrain_config",
    "qwen2_7b_pretrain_config",
    "gpt3_175b_pretrain_32gpu_h100_bf16_config",
]

# a recipe without a model
BARE = ("model.num_layers=2", "model.hidden_size=64", "model.num_attention_heads=4")


@pytest.fixture(autouse=True)
def on_cpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for engine in real_engines("megatron-bridge"):
        for name, value in engine.environment.items():
            monkeypatch.setenv(name, value)
    monkeypatch.setenv("HF_HOME", str(write_cache(tmp_path / "hub")))


def imported(engine: RealEngine, *words: str) -> ImportedJob:
    request = ImportRequest((engine.tree,), (f"python={engine.python}", *words), name="it")
    return MegatronBridge().import_job(request)


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("engine", parameters("megatron-bridge"))
def test_nothing_is_lost(engine: RealEngine, name: str) -> None:
    words = BARE if name.startswith("vanilla") else ()
    found = imported(engine, f"recipe={name}", *words)
    assert found.engine_args["recipe"] == name
    tables = [load_table(each, newest_version(each)) for each in ("megatron-bridge", "megatron-lm")]
    asked = RecipeRunner(engine.tree, engine.python)
    ours = asked.configuration(job_words(found, engine.tree, tables[0], tables[1]))
    theirs = asked.configuration([f"--recipe={name}", *words])
    named = {line.partition(" = ")[0] for line in found.not_taken} | set(PLACES)
    lost = {
        leaf: (theirs.get(leaf), ours.get(leaf))
        for leaf in {*theirs, *ours} - named
        if theirs.get(leaf) != ours.get(leaf)
    }
    print(f"{name}: {len(theirs)} fields, {len(found.not_taken)} named, {len(lost)} lost")
    assert not lost


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (("recipe=olmoe_7b_pretrain_config",), "experts|does not take"),
        (("recipe=no_such_pretrain_config",), "no_such_pretrain_config"),
        (("recipe=vanilla_gpt_pretrain_config", "train.no_such=1"), "no_such"),
        (("recipe=vanilla_gpt_pretrain_config", "model.num_moe_experts=4"), "experts"),
        (("recipe=vanilla_gpt_pretrain_config", "ddp.use_megatron_fsdp=true"), "FSDP"),
    ],
)
@pytest.mark.parametrize("engine", parameters("megatron-bridge"))
def test_what_it_cannot_train_is_said(engine: RealEngine, words: tuple[str, ...], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        imported(engine, *words)


@pytest.mark.parametrize("engine", parameters("megatron-bridge"))
def test_a_slurm_script(engine: RealEngine, tmp_path: Path) -> None:
    """Its own words are over the recipe's, the caller's variables over the script's."""
    (tmp_path / "run.sh").write_text(
        "export WANDB_API_KEY=abc\n"
        'RECIPE=${RECIPE:-"vanilla_gpt_pretrain_config"}\n'
        "srun torchrun --nnodes 4 --nproc_per_node=8 scripts/training/run_recipe.py \\\n"
        " --recipe $RECIPE --mode pretrain -tp 2 --max_steps $STEPS \\\n"
        " train.manual_gc_interval=70 \\\n"
        " 'dataset.data_path=[0.3,/d/one,0.7,/d/two]' logger.wandb_project=p\n"
    )
    own = (f"source={engine.tree}", f"python={engine.python}")
    words = (*own, "STEPS=70", "RECIPE=llama32_1b_pretrain_config")
    found = MegatronBridge().import_job(ImportRequest((tmp_path / "run.sh",), words))
    assert found.name == "llama32_1b_pretrain" and found.job["nodes"] == 4
    assert found.training["train_iters"] == 70
    assert found.parallelism["tensor_model_parallel_size"] == 2
    assert found.engine_args["train.manual_gc_interval"] == 70
    assert found.dataset["prefixes"] == ["/d/one", "/d/two"]
    assert found.job["wandb"] == {"project": "p"}
    assert "abc" not in found.to_toml()
    said = "\n".join(found.not_taken)
    assert "--nproc_per_node 8" in said and "weights 0.3 0.7" in said
    assert "train.train_iters" not in said
