"""Configurations of NeMo's launcher as jobs: what the engine makes of such a job is the published
configuration again, value by value."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
import tomli
import yaml

from tests.engines.nemo.nemo_published import (
    AWS_175B16,
    DATA,
    LAYOUTS_22,
    LAYOUTS_24,
    RESULTS,
    Values,
    published_22,
    published_24,
)
from tests.engines.nemo.test_nemo_config import commanded, configuration, differences
from trainkit.base.errors import ConfigError
from trainkit.engines.hydra_config import LARGEST
from trainkit.engines.imported import ImportedJob
from trainkit.engines.nemo.engine import Nemo
from trainkit.engines.nemo.import_config import import_nemo
from trainkit.jobs.load import load
from trainkit.jobs.schema import Job
from trainkit.launch.job_plan import plan_of

PLACE = """
[engines.nemo]
source = "{tree}"

[clusters.p4de]
launcher = "slurm"
device = "a100-sxm-80gb"
gpus_per_node = 8
root = "/fsx"
"""
TREES = {"22.09": "/opt/bignlp/NeMo", "24.12": "/opt/NeMo"}
# the run's own, in every case
OWN = {
    "run.results_dir",
    "run.dependency",
    "exp_manager.explicit_log_dir",
    "exp_manager.wandb_logger_kwargs.name",
    "model.data.index_mapping_dir",
}
# what a job has elsewhere, and each import says
LEFT = {
    "run.results_dir",
    "run.dependency",
    "trainer.devices",
    "exp_manager.explicit_log_dir",
    "exp_manager.wandb_logger_kwargs.name",
    "cluster.gpus_per_node",
    "cluster.job_name_prefix",
    "container",
    "stages conversion",
}
CASES = [("22.09", size) for size in LAYOUTS_22] + [("24.12", size) for size in LAYOUTS_24]
CONFIG = """
defaults:
  - _self_
  - cluster: bcm
  - training: gpt3/5b
  - conversion: gpt3/convert_gpt3
  - override hydra/job_logging: stdout
stages: [training, conversion]
cluster_type: bcm
bignlp_path: ???
data_dir: ${bignlp_path}/data
base_results_dir: ${bignlp_path}/results
container_mounts: [null]
container: nvcr.io/ea-bignlp/bignlp-training:22.09-py3
env_vars: {NCCL_PROTO: null, NCCL_IB_TIMEOUT: null}
numa_mapping: {enable: true, mode: unique_contiguous, max_cores: 8}
training_config: ${hydra:runtime.choices.training}
"""
INTERPOLATED = {
    "run.results_dir": "${base_results_dir}/${.name}",
    "exp_manager.explicit_log_dir": "${training.run.results_dir}/results",
    "exp_manager.wandb_logger_kwargs.name": "${training.run.name}",
    "exp_manager.checkpoint_callback_params.model_parallel_size": (
        "${multiply:${training.model.tensor_model_parallel_size},"
        " ${training.model.pipeline_model_parallel_size}}"
    ),
    "model.ffn_hidden_size": "${multiply:4, ${.hidden_size}}",
    "model.tokenizer.vocab_file": "${data_dir}/bpe/vocab.json",
    "model.tokenizer.merge_file": "${data_dir}/bpe/merges.txt",
}


def published(version: str, size: str) -> Values:
    return published_22(size) if version == "22.09" else published_24(size)


def nested(values: Values) -> dict[str, object]:
    tree: dict[str, object] = {}
    for key, value in values.items():
        *path, last = key.split(".")
        place = tree
        for name in path:
            inner = place.setdefault(name, {})
            assert isinstance(inner, dict)
            place = inner
        place[last] = value
    return tree


def launcher(folder: Path, version: str, size: str) -> Path:
    """A folder conf of the launcher's form with the published values of one size."""
    values = {**published(version, size), **INTERPOLATED}
    blend = values["model.data.data_prefix"]
    assert isinstance(blend, list)
    values["model.data.data_prefix"] = [
        each.replace(DATA, "${data_dir}") if isinstance(each, str) else each for each in blend
    ]
    (folder / "training/gpt3").mkdir(parents=True)
    (folder / "cluster").mkdir()
    (folder / "config.yaml").write_text(CONFIG.replace("gpt3/5b", f"gpt3/{size}"))
    (folder / "cluster/bcm.yaml").write_text(
        "partition: null\naccount: null\nexclusive: True\ngpus_per_task: null\n"
        'gpus_per_node: 8\nmem: 0\njob_name_prefix: "bignlp-"\n'
    )
    path = folder / f"training/gpt3/{size}.yaml"
    path.write_text(yaml.safe_dump(nested(values), sort_keys=False))
    return path


def job_of(folder: Path, imported: ImportedJob, version: str) -> Job:
    """The job in a jobs.toml of its own."""
    text = PLACE.format(tree=TREES[version]) + imported.to_toml("p4de")
    (folder / "jobs.toml").write_text(text)
    return load(folder, environ={}).resolve(imported.name).job


@pytest.mark.parametrize(("version", "size"), CASES)
def test_round_trip(tmp_path: Path, version: str, size: str) -> None:
    """A launcher's folder, a file in it, and the composed file: the same job, and its
    configuration is the published one."""
    path = launcher(tmp_path / "conf", version, size)
    composed = tmp_path / f"gpt3_{size}_hydra.yaml"
    composed.write_text(yaml.safe_dump(nested(published(version, size)), sort_keys=False))
    imported = import_nemo(path, [f"data_dir={DATA}"], "", "")
    words = [f"bignlp_path={RESULTS}", f"data_dir={DATA}"]
    whole = import_nemo(tmp_path / "conf", words, "", "")
    assert tomli.loads(whole.to_toml()) == tomli.loads(imported.to_toml())
    alone = import_nemo(composed, [], "", "")
    assert alone.engine_args == imported.engine_args and alone.dataset == imported.dataset
    assert (alone.model, alone.training) == (imported.model, imported.training)
    job = job_of(tmp_path, imported, version)
    found = configuration(commanded(job)[0])
    assert set(differences(found, published(version, size))) == OWN
    names = {re.split(" = |: ", line)[0] for line in imported.not_taken}
    assert names == LEFT and len(imported.not_taken) == len(LEFT)
    assert imported.job["slurm"] == {
        "exclusive": True,
        "mem": 0,
        "time": published(version, size)["run.time_limit"],
    }


def test_what_aws_puts_over_it(tmp_path: Path) -> None:
    """run.sh's words, given after the file."""
    path = launcher(tmp_path / "conf", "22.09", "175b")
    words = [f"training.{key}={value}" for key, value in AWS_175B16.items()]
    imported = import_nemo(path, [*words, f"data_dir={DATA}"], "aws", "")
    found = configuration(commanded(job_of(tmp_path, imported, "22.09"))[0])
    expected = {**published_22("175b"), **AWS_175B16}
    assert (
        set(differences(found, expected)) == {*OWN, "run.name"} - {"model.data.index_mapping_dir"}
        or found["model.data.index_mapping_dir"] == "/fsx/index_mapping_dir/job-7"
    )
    assert imported.engine_args["model.optim.sched.constant_steps"] == 12500


LLAMA = {
    "model.normalization": "rmsnorm",
    "model.activation": "fast-swiglu",
    "model.bias": False,
    "model.position_embedding_type": "rope",
    "model.rotary_base": 500000.0,
    "model.share_embeddings_and_output_weights": False,
    "model.num_query_groups": 8,
    "model.ffn_hidden_size": 14336,
    "model.bias_activation_fusion": False,
}


def test_the_blocks_of_a_llama(tmp_path: Path) -> None:
    """As of conf/training/llama and mistral: family llama, of which the plan counts the right
    matrices, and the same configuration again. 22.09 has none."""
    path = launcher(tmp_path / "conf", "24.12", "5b")
    words = [f"training.{key}={value}" for key, value in LLAMA.items()]
    words += [f"data_dir={DATA}", "training.exp_manager.resume_if_exists=False"]
    imported = import_nemo(path, words, "", "")
    assert any("resume_if_exists = False: a run goes on" in each for each in imported.not_taken)
    job = job_of(tmp_path, imported, "24.12")
    assert (job.model.family, job.model.num_query_groups, job.model.ffn_width) == (
        "llama",
        8,
        14336,
    )
    found = configuration(commanded(job)[0])
    expected = {**published_24("5b"), **LLAMA, "model.rotary_percentage": 1.0}
    assert set(differences(found, expected)) == OWN
    assert not any(each.code == "no-such-family" for each in plan_of(job).objections)
    assert not list(Nemo().problems(job))
    older = Nemo().problems(job_of(tmp_path, imported, "22.09"))
    assert any(each.message.startswith("model.family = 'llama'") for each in older)


def test_grouped_queries_of_another_model_are_named(tmp_path: Path) -> None:
    """As of conf/training/starcoder2: `check` refuses them for family gpt."""
    path = launcher(tmp_path / "conf", "24.12", "5b")
    words = ["training.model.num_query_groups=4", f"data_dir={DATA}"]
    imported = import_nemo(path, words, "", "")
    assert job_of(tmp_path, imported, "24.12").model.num_query_groups is None
    assert any(line.startswith("model.num_query_groups = 4: ") for line in imported.not_taken)


def test_what_stands_beside_the_training(tmp_path: Path) -> None:
    """Variables, cores, partition; and values without a key of jobs.toml."""
    path = launcher(tmp_path / "conf", "22.09", "126m")
    words = [
        f"data_dir={DATA}",
        "env_vars.NCCL_PROTO=simple",
        "numa_mapping.mode=all",
        "cluster.partition=gpu",
        "training.model.tokenizer.model=x",
        "training.model.persist_layer_norm=False",
        "training.model.new=7",
        "training.trainer.limit_test_batches=3",
        "training.exp_manager.create_wandb_logger=True",
        "training.optional=${nowhere}",
    ]
    imported = import_nemo(path, words, "mine", "")
    assert imported.job["env"] == {"NCCL_PROTO": "simple"}
    assert imported.job["wandb"] == {"project": "nemo_gpt3"}
    arguments = dict(imported.engine_args)
    assert len(arguments.pop("model.data.data_prefix")) == 60  # type: ignore[arg-type]
    assert arguments == {
        "trainer.max_time": "00:23:30:00",
        "numa_mapping.mode": "all",
        "model.tokenizer.model": "x",
        "model.persist_layer_norm": False,
        "+model.new": 7,
    }
    assert dict(imported.job["slurm"])["partition"] == "gpu"  # type: ignore[call-overload]
    left = "\n".join(imported.not_taken)
    assert "trainer.limit_test_batches = 3" in left and "nowhere, which is not there" in left
    assert job_of(tmp_path, imported, "22.09").engine_args["+model.new"] == 7


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    path = launcher(tmp_path / "conf", "22.09", "126m")
    with pytest.raises(ConfigError, match=r"bignlp_path is \?\?\?") as error:
        import_nemo(path, [], "", "")
    assert "FILE,bignlp_path=VALUE" in str(error.value)
    lone = tmp_path / "lone.yaml"
    lone.write_text(path.read_text())
    with pytest.raises(ConfigError, match="data_dir, which is not there"):
        import_nemo(lone, [], "", "")
    words = [f"+data_dir={DATA}", "+restore_from_path=/w"]
    imported = import_nemo(lone, words, "", "")
    assert imported.model["num_layers"] == 12
    assert imported.engine_args["restore_from_path"] == "/w"
    with pytest.raises(ConfigError, match="no trainer"):
        import_nemo(lone, ["trainer=null"], "", "")
    with pytest.raises(ConfigError, match=r"'24' is not known"):
        import_nemo(lone, ["data_dir=/x"], "", "24")


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("model.num_layers", "twelve", "a whole number is needed"),
        ("model.num_layers", 0, "it is 1 at least"),
        ("model.hidden_size", [1], "a whole number is needed"),
        ("model.hidden_size", {}, "a whole number is needed"),
        ("model.hidden_size", None, "a whole number is needed"),
        ("trainer.max_steps", 10**40, "a whole number is needed"),
        ("trainer.max_steps", -1, "it is 1 at least"),
        ("model.optim.lr", "fast", "a number is needed"),
        ("model.optim.betas", [0.9], "two numbers are needed"),
        ("model.rampup_batch_size", [4, 5], "start, increment and samples are needed"),
        ("model.rampup_batch_size", [7, 2, 99], "model.rampup_batch_size .*7 does not grow to"),
        ("model.sequence_parallel", "yes", "true or false is needed"),
        ("trainer.precision", "fp8", "trainkit has bf16, 16, 32"),
        ("model.activations_checkpoint_granularity", "some", "it is 'full', 'selective' or null"),
        ("model.data.data_prefix", [0.5, "a", 0.5], "no weight and file by turns"),
        ("model.hidden_size", "${model.hidden_size}", "in a circle"),
        ("run", 3, "no trainer"),
        ("trainer.max_steps", 5, "not a GPT of NeMo's"),
    ],
)  # fmt: skip
def test_wrong_values(tmp_path: Path, key: str, value: object, said: str) -> None:
    values = published_22("126m")
    if key == "run":
        tree: dict[str, object] = {"run": 3}
    elif "not a GPT" in said:
        tree = {"trainer": {"max_steps": value}, "model": {"encoder": {"hidden_size": 8}}}
    else:
        tree = nested({**values, key: value})
    path = tmp_path / "a.yaml"
    path.write_text(yaml.safe_dump(tree))
    with pytest.raises(ConfigError, match=said):
        import_nemo(path, [], "", "")


def test_a_file_that_is_too_large(tmp_path: Path) -> None:
    path = tmp_path / "a_hydra.yaml"
    with path.open("wb") as file:
        file.truncate(LARGEST + 1)
    with pytest.raises(ConfigError, match="not a configuration"):
        import_nemo(path, [], "", "")
    with pytest.raises(ConfigError, match="cannot be read"):
        import_nemo(tmp_path / "none.yaml", [], "", "")
    with pytest.raises(ConfigError, match="cannot be read"):
        import_nemo(tmp_path, [], "", "")


@pytest.mark.parametrize("size", ["126m", "5b", "20b", "40b", "175b"])
def test_the_published_folder(tmp_path: Path, size: str) -> None:
    """The same with the launcher's own folder, where there is one."""
    source = os.environ.get("TRAINKIT_NEMO_CONF")
    if not source:
        pytest.skip("needs TRAINKIT_NEMO_CONF, the launcher's folder conf")
    path = Path(source) / f"training/gpt3/{size}.yaml"
    imported = import_nemo(path, [f"data_dir={DATA}"], "", "")
    version = "24.12" if "mcore_gpt" in path.read_text() else "22.09"
    found = configuration(commanded(job_of(tmp_path, imported, version))[0])
    if version == "22.09" or size in LAYOUTS_24:
        assert set(differences(found, published(version, size))) == OWN
    assert found["trainer.num_nodes"] == imported.job["nodes"]
