"""torchtitan's own public configurations, imported; of each the configuration that trainkit makes
of the job is held against the imported one, leaf by leaf: what differs has been named."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path

import pytest

from tests.engines.real import RealEngine, parameters, real_engines
from trainkit.base.errors import ConfigError
from trainkit.engines.imported import ImportedJob, ImportRequest
from trainkit.engines.torchtitan.engine import Torchtitan
from trainkit.engines.torchtitan.import_config import PLACES
from trainkit.engines.torchtitan.values import Values, document, job_problems
from trainkit.jobs.load import load

ROOT = Path(__file__).resolve().parents[3]
pytestmark = pytest.mark.slow
CONFIGS = [
    "llama3_debugmodel",
    "llama3_debugmodel_varlen_attn",
    "llama3_debugmodel_dist_gemm",
    "llama3_debugmodel_ce_loss",
    "llama3_8b",
    "llama3_70b",
    "qwen3_debugmodel",
    "qwen3_debugmodel_non_fused_qkv",
    "qwen3_0_6b",
    "qwen3_1_7b",
    "qwen3_14b",
    "qwen3_32b",
]
REFUSED = {
    "qwen3_30b_a3b": "experts are not trained by this version",
    "qwen3_moe_debug": "experts are not trained by this version",
    "qwen3_moe_deepep": "experts are not trained by this version",
    # asked for on this machine by torchtitan itself
    "qwen3_debugmodel_flex_flash": "only supported on Hopper or Blackwell",
    "llama3_405b": "Float8Linear|torchao",
    "llama3_debugmodel_float8": "Float8Linear|torchao",
    "llama3_8b_mxfp8": "MXFP8|torchao",
    "llama3_13b": "llama3_13b",
}
# parts that trainkit has its own for, whatever they say; the lines say so too
PARTS = (
    "dataloader",
    "tokenizer",
    "validator",
    "optimizer.param_groups",
    "lr_scheduler",
    "metrics",
)
# as many keys as queries; the cache of positions; no number: as many as the ranks take
SAME_IN_OTHER_WORDS = (
    "layers.attention.n_kv_heads",
    "layers.attention.rope.max_seq_len",
    "training.global_batch_size",
)
READ_WITH = {  # more than one of these alone
    "tensor_model_parallel_size": ["enable_sequence_parallel"],
    "pipeline_model_parallel_size": [
        "pipeline_parallel_first_stage_less_layers",
        "pipeline_parallel_last_stage_less_layers",
        "pipeline_parallel_microbatch_size",
    ],
}
PLACE = """
[engines.torchtitan]
source = "{tree}"

[clusters.there]
device = "h100-sxm-80gb"
gpus_per_node = 64

[defaults]
job = "it"
"""


def imported(engine: RealEngine, name: str, *more: str) -> ImportedJob:
    words = (f"python={engine.python}", f"module={name.partition('_')[0]}", f"config={name}")
    return Torchtitan().import_job(ImportRequest((engine.tree,), (*words, *more), name="it"))


@pytest.fixture(autouse=True)
def on_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    for engine in real_engines("torchtitan"):
        monkeypatch.setenv("PYTHONPATH", str(engine.fakecuda))


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("engine", parameters("torchtitan"))
def test_nothing_is_lost(engine: RealEngine, name: str, tmp_path: Path) -> None:
    found = imported(engine, name)
    text = PLACE.format(tree=engine.tree) + found.to_toml("there")
    (tmp_path / "jobs.toml").write_text(text.replace("[jobs.it]", '[jobs.it]\ndataset = "mock"'))
    job = load(tmp_path, environ={}).resolve("it").job
    assert not list(job_problems(job))
    splits: Values = {"train": {}, "valid": {}, "end_of_document": None}
    said = document(job, tmp_path, None, job.model.vocab_size or 0, splits)
    (tmp_path / "document.json").write_text(json.dumps(said))
    program = Path(__file__).with_name("titan_beside.py")
    words = (tmp_path / "document.json", "--module", name.partition("_")[0], "--config", name)
    paths = (str(engine.fakecuda), str(ROOT), str(engine.tree))
    done = subprocess.run(
        [engine.python, program, *words],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    apart = json.loads(done.stdout.rpartition("[beside] ")[2])
    named = {line.partition(" = ")[0] for line in found.not_taken} | set(found.engine_args)
    model = {each.removeprefix("model.") for each in named if each.startswith("model.")}
    named |= {*PLACES, "model_spec.flavor"}
    if "checkpoint.enable" in named:
        named |= {"checkpoint.interval", "checkpoint.keep_latest_k"}
    for degree, options in READ_WITH.items():
        if getattr(job.parallelism, degree) == 1:
            named |= {f"parallelism.{word}" for word in options}
    lost = []
    ranks = job.data_parallel_size  # -1: as many as there are
    for leaf, (theirs, ours) in apart.items():
        within = re.sub(r"^model_spec\.model\.(layers\.)?(\d+\.)?", r"\1", leaf)
        excused = (
            leaf in named
            or leaf.startswith((*PARTS, *(f"{each}." for each in named)))
            or within in SAME_IN_OTHER_WORDS
        )
        if leaf.startswith("model_spec."):
            excused |= any(within.startswith(each) for each in model)
        if not excused and [theirs, ours] not in ([-1, ranks], ["default", "always"]):
            lost.append(f"{leaf}: {theirs} became {ours}")
    assert not lost
    if apart.get("training.global_batch_size"):
        assert apart["training.global_batch_size"][0] == -1
    kwargs = "optimizer.param_groups.1.optimizer_kwargs"
    first = "optimizer.param_groups.0.optimizer_kwargs"
    if f"{first} " not in "".join(found.not_taken):
        assert apart[kwargs][1] == apart[first][0]


@pytest.mark.parametrize(("name", "why"), REFUSED.items())
@pytest.mark.parametrize("engine", parameters("torchtitan"))
def test_what_it_cannot_train_is_said(engine: RealEngine, name: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        imported(engine, name)


@pytest.mark.parametrize("engine", parameters("torchtitan"))
def test_a_slurm_script(engine: RealEngine, tmp_path: Path) -> None:
    """Its own words are over the function's, the caller's variables over the script's."""
    (tmp_path / "run.sh").write_text(
        "export SECRET_TOKEN=abc\\n"
        'CONFIG=${CONFIG:-"llama3_debugmodel"}\n'
        "srun torchrun --nnodes 4 --nproc_per_node=8 --rdzv_backend c10d \\\n"
        " -m torchtitan.train --module llama3 --config ${CONFIG} --checkpoint.enable \\\n"
        " --parallelism.tensor_parallel_degree 4 --training.gc_freq=70 --training.steps $STEPS\n"
    )
    words = (f"source={engine.tree}", f"python={engine.python}", "CONFIG=llama3_8b", "STEPS=70")
    found = Torchtitan().import_job(ImportRequest((tmp_path / "run.sh",), words))
    assert found.name == "llama3-8b" and found.job["nodes"] == 4
    assert found.training["train_iters"] == 70 and found.training["save_interval"] == 500
    assert found.parallelism["tensor_model_parallel_size"] == 4
    assert found.engine_args["training.gc_freq"] == 70
    assert "abc" not in found.to_toml()
    assert any("--nproc_per_node 8" in line for line in found.not_taken)
