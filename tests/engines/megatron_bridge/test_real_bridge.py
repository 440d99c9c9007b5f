"""An unmodified Megatron-Bridge computes what native computes, and weights go to it and back.

TRAINKIT_BRIDGE_SOURCE names its tree with the submodule, TRAINKIT_BRIDGE_PYTHON an interpreter that
has what it asks for. Kills, resumes and hosts: tests/engines/test_real_engines.py and
tests/cluster/test_real_engines_on_hosts.py.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
import torch

from tests.conftest import Project
from tests.distributed import free_port
from tests.engines.convert.real_logits import ROWS, TOKENS_BS
from tests.engines.convert.support import converted, same
from tests.engines.convert.test_real_logits import MODELS, shaken
from tests.engines.megatron_bridge.hub_cache import write_cache
from tests.engines.real import RealEngine, parameters
from tests.engines.test_real_engines import project_of
from tests.train.hf_support import save
from trainkit.engines.convert import megatron_lm
from trainkit.engines.convert.formats import RunWeights
from trainkit.jobs.schema import RopeScaling
from trainkit.train.huggingface.weights import CheckpointWeights

pytestmark = pytest.mark.slow
SHAPES = {
    "llama": ["model.num_query_groups=2", "model.ffn_hidden_size=128"],
    "qwen3": ["model.num_query_groups=2", "model.kv_channels=32", "model.ffn_hidden_size=128"],
}


def sets_of(family: str) -> list[str]:
    words = [f'model.family="{family}"', "model.make_vocab_size_divisible_by=1", *SHAPES[family]]
    return [f"--set={word}" for word in words]


@pytest.mark.parametrize("family", SHAPES)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("engine", parameters("megatron-bridge"))
def test_it_computes_what_native_computes(
    engine: RealEngine, tmp_path: Path, family: str, precision: str
) -> None:
    """From the same weights, on the same samples: `diff-engines`. In bf16 its checkpoint has the
    rounded weights, so that tensors are apart by that."""
    project: Project = project_of(tmp_path, engine)
    sets = [*sets_of(family), f'--set=training.precision="{precision}"']
    tolerance = 1e-3 if precision == "fp32" else 1e-2
    asked = ("diff-engines", "tiny", "--engines=native,megatron-bridge", "--steps=5", *sets)
    ends = 0 if precision == "fp32" else 7
    found = project.document(*asked, f"--tolerance={tolerance}", exit=ends)
    assert found["first"] == {"lm_loss": None, "grad_norm": None}
    losses = max(each["relative"] for each in found["steps"] if each["number"] == "lm_loss")
    norms = max(each["relative"] for each in found["steps"] if each["number"] == "grad_norm")
    moved = max(each["parts"] for each in found["tensors"])
    print(f"{family} {precision}: losses {losses:.1e}, norms {norms:.1e}, tensors {moved:.1e}")
    assert len(found["steps"]) == 10
    assert losses < (2e-6 if precision == "fp32" else 1e-3)


@pytest.mark.parametrize("engine", parameters("megatron-bridge"))
def test_a_recipe_leaves_the_job_what_it_is(engine: RealEngine, tmp_path: Path) -> None:
    """A recipe of a model of billions, with the model, batch and rates of a tiny job over it: the
    losses of that job without a recipe."""
    project = project_of(tmp_path, engine)
    jobs = project.path / "jobs.toml"
    home = write_cache(tmp_path / "hub")
    jobs.write_text(jobs.read_text().replace("env = { ", f'env = {{ HF_HOME = "{home}", '))
    sets = [*sets_of("llama"), "--set=training.eval_iters=0", "--set=training.train_iters=4"]
    # its cross entropy is Transformer Engine's
    recipe = '{recipe="llama32_1b_pretrain_config","model.cross_entropy_fusion_impl"="native"}'
    project.invoke("train", "tiny", *sets)
    project.invoke("train", "tiny", *sets, f"--set=engine_args={recipe}")
    plain, named = (project.losses(run) for run in project.runs())
    assert sorted(plain) == [1, 2, 3, 4] and named == plain


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("name", ["llama", "llama-tied", "stretched", "qwen3", "qwen3-tied"])
@pytest.mark.parametrize("engine", parameters("megatron-bridge"))
@torch.no_grad()
def test_weights_there_and_back(engine: RealEngine, name: str, tmp_path: Path) -> None:
    """Its AutoBridge loads the folder, its logits are ours, and its own checkpoint of them holds
    our tensors, bit by bit."""
    scaling = RopeScaling(type="llama3", factor=8.0)
    models = {**MODELS, "stretched": MODELS["llama"].model_copy(update={"rope_scaling": scaling})}
    model = models[name]
    module = shaken(model)
    source = RunWeights(CheckpointWeights(save(module, tmp_path / "ours"), model), model, 7)
    converted(source, "hf", tmp_path / "hf")
    torch.save(TOKENS_BS, tmp_path / "tokens.pt")
    tree = engine.tree
    paths = (str(tree / "src"), str(tree / "3rdparty" / "Megatron-LM"))
    places = ("hf", "tokens.pt", "logits.pt", "saved")
    environment = {**os.environ, **engine.environment, "MASTER_PORT": str(free_port())}
    environment["PYTHONPATH"] = os.pathsep.join((*paths, engine.environment["PYTHONPATH"]))
    done = subprocess.run(
        [
            engine.python,
            Path(__file__).with_name("bridge_logits.py"),
            *(tmp_path / place for place in places),
        ],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = torch.load(tmp_path / "logits.pt")
    ours = module(TOKENS_BS)
    off = float((found - ours).abs().max() / ours.abs().max())
    print(f"{name}: {off:.1e} of the largest logit")
    assert off < 1e-6
    folder, _ = megatron_lm.choose(tmp_path / "saved", None)
    same(megatron_lm.read(folder, model, ROWS), source.weights)
