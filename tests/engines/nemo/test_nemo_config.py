"""engine = "nemo": the launchers' configurations value by value, their commands word by word.

Traps of the published set-ups that are tested elsewhere: 7 (44 layers on stages that do not divide
them: here for nemo; for the plan in tests/plan/test_published.py), 25 (two tags of one image) in
tests/stages/test_import_container.py.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import hydra
import pytest
import yaml
from omegaconf import OmegaConf

from tests.engines.nemo.nemo_published import (
    AWS_175B16,
    COMMAND_22,
    COMMAND_24,
    EXPORTS_24,
    NUMA_22,
    PREFIXES,
    Values,
    published_22,
    published_24,
)
from trainkit.engines.contract import Command
from trainkit.engines.nemo.engine import Nemo
from trainkit.jobs.load import load
from trainkit.jobs.schema import Job
from trainkit.jobs.table import EngineValue
from trainkit.runs.folder import RunFolder

CHECKOUT = Path(__file__).resolve().parents[3]
JOBS = load(CHECKOUT, {})
ID = "20261122-120000-abcd"

# What differs from the published configuration, because ...
DIFFERS = {
    "run.name": "it is the job's",
    "run.results_dir": "it is the run's folder",
    "run.dependency": "the run goes on by itself (resume), not in further jobs of one name",
    "exp_manager.explicit_log_dir": "it is results/ of the run's folder",
    "exp_manager.wandb_logger_kwargs.name": "it names the run",
    "model.tokenizer.vocab_file": "tokenizers.X.vocab_file says where it is",
    "model.tokenizer.merge_file": "tokenizers.X.merge_file says where it is",
    "model.data.index_mapping_dir": "each run has its own, as AWS's run.sh: names of indexes do"
    " not say of which files they are",
}
KEPT = "exp_manager.checkpoint_callback_params.save_top_k"
KEEPS_ONE = {KEPT: "five checkpoints of the 175B are 11 TiB, and the cluster's /fsx has 4.7"}


def nemo_job(name: str, *sets: str) -> Job:
    """A job of jobs/nemo-aws.toml with the files of the Pile where AWS has them."""
    job = JOBS.resolve(name, ["cluster.root='/fsx'", *sets]).job
    data = job.dataset.model_copy(update={"urls": (), "prefixes": tuple(PREFIXES)})
    return job.model_copy(update={"dataset": data})


def commanded(job: Job) -> tuple[Command, RunFolder]:
    run = RunFolder(Path("/fsx/runs") / job.name / ID)
    return Nemo().command(job, run, 1), run


def flat(tree: Mapping[str, object], before: str = "") -> Values:
    """A nested configuration by dotted keys."""
    found: Values = {}
    for key, value in tree.items():
        if isinstance(value, dict) and value:
            found |= flat(value, f"{before}{key}.")
        else:
            found[f"{before}{key}"] = value
    return found


def configuration(command: Command) -> Values:
    """The only configuration among a command's files, as YAML reads it."""
    (text,) = [text for name, text in command.files.items() if name.endswith("_hydra.yaml")]
    return flat(yaml.safe_load(text))


def differences(ours: Values, theirs: Values) -> dict[str, tuple[object, object]]:
    """Keys whose values, or kinds of values, are not the same."""
    absent = object()
    return {
        key: (theirs.get(key), ours.get(key))
        for key in {**ours, **theirs}
        if repr(ours.get(key, absent)) != repr(theirs.get(key, absent))
    }


@pytest.mark.parametrize("size", ["126m", "5b", "20b", "40b", "175b"])
def test_configuration_of_22_09(size: str) -> None:
    command, _ = commanded(nemo_job(f"nemo-gpt3-{size}"))
    expected = {*DIFFERS, *(KEEPS_ONE if size == "175b" else {})}
    assert set(differences(configuration(command), published_22(size))) == expected


def test_configuration_of_aws_16_nodes() -> None:
    """run.sh's overrides over the launcher's 175b.yaml (trap 26: 175b16 is 175b on 16 nodes)."""
    command, run = commanded(nemo_job("nemo-gpt3-175b16"))
    ours = configuration(command)
    published = {**published_22("175b"), **AWS_175B16}
    assert set(differences(ours, published)) == {*DIFFERS, *KEEPS_ONE}
    assert ours["model.data.index_mapping_dir"] == f"{run.path}/index_mapping_dir"
    assert ours["exp_manager.explicit_log_dir"] == f"{run.path}/results"
    spec = json.loads(command.files["launch/engine-rank-1.json"])
    assert spec["saves"] is False


def test_a_name_of_aws_is_a_size_and_nodes() -> None:
    """Trap 26: gpt3-${MODEL_SIZE}${NODES}; there is no 04b.yaml, what stands for it is the 5B."""
    ours = configuration(commanded(nemo_job("nemo-gpt3-04b8"))[0])
    assert (ours["trainer.num_nodes"], ours["model.hidden_size"]) == (8, 4096)
    other = {**published_22("5b"), **AWS_175B16, "trainer.num_nodes": 8}
    other["run.time_limit"] = "00:30:00"
    assert set(differences(ours, other)) == set(DIFFERS)


@pytest.mark.parametrize(
    ("size", "prose"),
    [
        ("20b", {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 4}),
        ("5b", {"tensor_model_parallel_size": 2}),
        ("40b", {"pipeline_model_parallel_size": 4}),
    ],
)
def test_degrees_are_the_files_not_the_readme_s(size: str, prose: dict[str, int]) -> None:
    """Trap 27."""
    job = nemo_job(f"nemo-gpt3-{size}")
    ours = configuration(commanded(job)[0])
    for key, value in prose.items():
        assert ours[f"model.{key}"] == getattr(job.parallelism, key) != value


# --set engine_args.model.optim.x=1 is --set 'engine_args."model.optim.x"=1'
SETS_24 = {
    "126m": ["model.hidden_dropout=0.2", "model.attention_dropout=0.2"],
    "5b": [
        "training.micro_batch_size=4",
        "engine_args.model.optim.bucket_cap_mb=400",
        "engine_args.model.optim.contiguous_param_buffer=true",
    ],
    "175b": [
        "training.micro_batch_size=1",
        "parallelism.tensor_model_parallel_size=4",
        "parallelism.virtual_pipeline_model_parallel_size=6",
        "training.recompute_granularity='none'",
        "engine_args.model.optim.bucket_cap_mb=220",
        'engine_args."model.gc_interval"=100',
        "engine_args.model.optim.contiguous_param_buffer=true",
    ],
}


def newer_job(size: str) -> Job:
    """A size of 24.12: the same model, other degrees."""
    sets = ["engine_source.source='/opt/NeMo'", "cluster.device='h100-sxm-80gb'"]
    return nemo_job(f"nemo-gpt3-{size}", *sets, *SETS_24[size])


@pytest.mark.parametrize("size", SETS_24)
def test_configuration_of_24_12(size: str) -> None:
    job = newer_job(size)
    assert Nemo().problems(job) == []
    ours = configuration(commanded(job)[0])
    expected = {*DIFFERS, *(KEEPS_ONE if size == "175b" else {})}
    assert set(differences(ours, published_24(size))) == expected


def words_of(line: str) -> tuple[dict[str, str], list[str]]:
    """(variables before the command, its words) of a line of shell."""
    words = shlex.split(line)
    at = next(number for number, word in enumerate(words) if "=" not in word)
    return dict(word.split("=", 1) for word in words[:at]), words[at:]


def test_command_of_22_09() -> None:
    """The words of the launcher's batch script, in each rank, but where the configuration lies
    and that agents start the ranks (cluster_type=BCP)."""
    command, run = commanded(nemo_job("nemo-gpt3-175b"))
    variables, words = words_of(COMMAND_22)
    places = [
        f"--config-path={run.path}/launch",
        "--config-name=nemo-gpt3-175b_hydra.yaml",
    ]
    assert list(command.engine_argv) == [*words[:3], *places, "+cluster_type=BCP"]
    assert {name: command.env[name] for name in variables} == variables
    assert command.engine_cwd == "/opt/bignlp/NeMo"
    spec = json.loads(command.files["launch/engine-rank-1.json"])
    assert spec["before"] == shlex.split(NUMA_22)
    assert spec["python_path"] == ["/opt/bignlp/NeMo"]
    assert command.spawn == "per_rank"
    # AWS's document: of its EFA image and of the README beside it
    efa = {"FI_PROVIDER": "efa", "FI_EFA_USE_DEVICE_RDMA": "1", "RDMAV_FORK_SAFE": "1"}
    assert {**efa, "NCCL_PROTO": "simple"}.items() <= dict(command.env).items()


def test_command_of_24_12() -> None:
    command, _ = commanded(newer_job("175b"))
    variables, words = words_of(COMMAND_24)
    assert list(command.engine_argv[:3]) == words[:3]
    assert {name: command.env[name] for name in variables} == variables
    assert EXPORTS_24.items() <= dict(command.env).items()
    spec = json.loads(command.files["launch/engine-rank-1.json"])
    assert (spec["before"], spec["saves_on_term"]) == ([], True)
    # no chunks: no margin for kernels that run beside them
    plain, _ = commanded(newer_job("5b"))
    assert not [name for name in plain.env if name.startswith("NVTE_")]


def test_one_gpu_a_node_keeps_its_devices() -> None:
    """The launcher orders eight of them only."""
    job = nemo_job("nemo-gpt3-126m", "cluster.gpus_per_node=4", "nodes=16")
    command, _ = commanded(job)
    assert "CUDA_VISIBLE_DEVICES" not in command.env


def test_a_key_that_no_configuration_has_is_a_word() -> None:
    job = nemo_job("nemo-gpt3-126m")
    given: dict[str, EngineValue] = {
        **job.engine_args,
        "+model.my_list": ["a b", 1.5],
        "trainer.max_time": "00:01:00:00",
        "numa_mapping.mode": "single",
    }
    job = job.model_copy(update={"engine_args": given})
    assert Nemo().problems(job) == []
    command, _ = commanded(job)
    assert command.engine_argv[-2:] == ("+model.my_list=['a b',1.5]", "+cluster_type=BCP")
    assert configuration(command)["trainer.max_time"] == "00:01:00:00"
    spec = json.loads(command.files["launch/engine-rank-1.json"])
    assert "mode=single" in spec["before"]
    off = job.model_copy(update={"engine_args": {"numa_mapping.enable": False}})
    off = off.model_copy(update={"engine_args": {**given, "numa_mapping.enable": False}})
    spec = json.loads(commanded(off)[0].files["launch/engine-rank-1.json"])
    assert spec["before"] == []


def test_w_and_b_and_a_text_with_a_dollar() -> None:
    job = nemo_job("nemo-gpt3-126m", "wandb.project='x'")
    assert job.wandb is not None
    wandb = job.wandb.model_copy(update={"project": "${x}"})
    command, _ = commanded(job.model_copy(update={"wandb": wandb}))
    (text,) = [text for name, text in command.files.items() if name.endswith("_hydra.yaml")]
    assert r"\\${x}" in text, "OmegaConf would look x up"
    ours = configuration(command)
    assert ours["exp_manager.create_wandb_logger"] is True
    assert ours["exp_manager.wandb_logger_kwargs.name"] == f"nemo-gpt3-126m-{ID}"


def test_hydra_and_omegaconf_read_it(tmp_path: Path) -> None:
    """Real hydra composes the file with the words, to the values that are meant."""
    job = nemo_job("nemo-gpt3-175b")
    job = job.model_copy(update={"engine_args": {**job.engine_args, "+model.extra": "a=b"}})
    command, _ = commanded(job)
    (text,) = [text for name, text in command.files.items() if name.endswith("_hydra.yaml")]
    (tmp_path / "job_hydra.yaml").write_text(text)
    words = [word for word in command.engine_argv if word.startswith("+")]
    with hydra.initialize_config_dir(str(tmp_path), version_base=None):
        composed = hydra.compose("job_hydra.yaml", overrides=words)
    values = OmegaConf.to_container(composed, resolve=True)
    assert isinstance(values, dict)
    found = flat({str(key): value for key, value in values.items()})
    assert found.pop("cluster_type") == "BCP"
    assert found.pop("model.extra") == "a=b"
    assert found == configuration(replace(command))
