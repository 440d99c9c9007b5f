"""launch = "srun": the launcher's batch script, statement by statement."""

from __future__ import annotations

import json
import shlex

import pytest

from tests.engines.nemo.nemo_published import COMMAND_24, EXPORTS_24, SCRIPT_22
from tests.engines.nemo.test_nemo_config import commanded, nemo_job, newer_job
from trainkit.base.errors import ConfigError
from trainkit.engines.nemo.engine import Nemo
from trainkit.jobs.schema import EngineSource, Job


def over_srun(job: Job) -> Job:
    assert job.engine_source is not None
    source = job.engine_source.model_copy(update={"launch": "srun"})
    return job.model_copy(update={"engine_source": source})


def test_statements_of_22_09() -> None:
    job = over_srun(nemo_job("nemo-gpt3-175b"))
    assert Nemo().problems(job) == []
    command, run = commanded(job)
    assert command.spawn == "per_run"
    *srun, bash, option, script = command.engine_argv
    assert (bash, option) == ("bash", "-c")
    published = SCRIPT_22[-1].replace("/fsx/results/gpt3_175b", f"{run.path}/launch")
    published = published.replace("gpt3_175b_hydra", "nemo-gpt3-175b_hydra")
    assert script.split(";\n") == [*SCRIPT_22[:-1], published]
    assert srun == [
        "srun",
        "--nodes=128",
        "--ntasks=1024",
        "--ntasks-per-node=8",
        "--overlap",
        "--kill-on-bad-exit=1",
        "--container-image",
        "/apps/bignlp-training_22.09-py3-bcp-nsys-2022.5.1-v2-efa.sqsh",
        "--container-mounts",
        "/fsx:/fsx",
        "--no-container-mount-home",
    ]
    # our program is outside of the image, and hands on none of one rank's variables
    spec = json.loads(command.files["launch/engine-rank-1.json"])
    assert (spec["cwd"], spec["modules"], spec["starts_ranks"]) == (str(run.path), [], True)
    assert spec["saves_on_term"] is False
    assert not [path for path in spec["reads"] if path.startswith("/opt")]
    assert command.argv[0] != "python3"


def test_exports_of_24_12_come_before_srun() -> None:
    command, _ = commanded(over_srun(newer_job("175b")))
    script = command.engine_argv[-1]
    variables = COMMAND_24.split(" python3 ")[0]
    assert set(script.split(";\n")[-1].split(" python3 ")[0].split()) == set(variables.split())
    assert EXPORTS_24.items() <= dict(command.env).items()
    assert "cluster_type" not in script
    assert "numa" not in script


def test_a_job_s_variable_stands_before_the_command() -> None:
    job = over_srun(nemo_job("nemo-gpt3-175b", "env.CUDA_VISIBLE_DEVICES='0 1'"))
    line = commanded(job)[0].engine_argv[-1].split(";\n")[-1]
    assert "CUDA_VISIBLE_DEVICES=0 1" in shlex.split(line)


def test_without_slurm_or_pyxis_it_is_refused() -> None:
    job = over_srun(nemo_job("nemo-gpt3-5b"))
    assert job.container is not None
    docker = job.container.model_copy(update={"runtime": "docker"})
    said = [each.message for each in Nemo().problems(job.model_copy(update={"container": docker}))]
    assert any("by pyxis" in each for each in said)
    cluster = job.cluster.model_copy(update={"launcher": "ssh", "secrets": ("TOKEN",)})
    said = [each.message for each in Nemo().problems(job.model_copy(update={"cluster": cluster}))]
    assert any("there is no srun without Slurm" in each for each in said)
    assert any("with secrets (TOKEN)" in each for each in said)


def test_it_is_nemo_s() -> None:
    with pytest.raises((ConfigError, ValueError), match="launch = 'srun' is nemo's"):
        EngineSource(name="megatron-lm", source="/opt/m", launch="srun")
