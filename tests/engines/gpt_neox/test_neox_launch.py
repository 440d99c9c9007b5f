"""How GPT-NeoX is started: by deepy.py itself, and in the form of older trees."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from trainkit.engines.foreign import spec_name
from trainkit.engines.gpt_neox.engine import GptNeox
from trainkit.engines.registry import ENGINES
from trainkit.jobs.load import load
from trainkit.jobs.schema import Job
from trainkit.runs.folder import RunFolder

RUN = RunFolder(Path("/fs/runs/job/run-1"))
OVER_DEEPSPEED = """
[engines.published]
engine = "gpt-neox"
source = "/trees/gpt-neox"
version = "2.0.0"
python = "/venvs/neox/bin/python"
launch = "deepspeed"

[clusters.two]
launcher = "{launcher}"
device = "a6000-48gb"
gpus_per_node = 4
env = {{ NCCL_IB_DISABLE = "1", SAID = "{said}" }}
{more}

[tokenizers.gpt2]
type = "gpt2"
vocab_size = 50257
vocab_file = "vocab.json"
merge_file = "merges.txt"

[datasets.text]
source = "files"
paths = ["*.txt"]
tokenizer = "gpt2"

[models.small]
family = "gpt-neox"
num_layers = 2
hidden_size = 64
num_attention_heads = 4
seq_length = 64

[jobs.small]
engine = "gpt-neox"
engine_source = "published"
cluster = "two"
model = "small"
dataset = "text"
nodes = {nodes}
training = {{ train_iters = 10, lr = 1e-3 }}
"""


def problems_of(job: Job) -> list[str]:
    return [str(problem) for problem in ENGINES["gpt-neox"].problems(job)]


def over_deepspeed(folder: Path, **changes: str) -> Job:
    """A job that deepy.py starts."""
    values = {"launcher": "pdsh", "said": "a b", "more": "", "nodes": "2", **changes}
    (folder / "jobs.toml").write_text(OVER_DEEPSPEED.format(**values))
    return load(folder, environ={}).resolve("small").job


def test_deepspeeds_own_launcher_is_started_once(tmp_path: Path) -> None:
    job = over_deepspeed(tmp_path)
    assert problems_of(job) == []
    command = GptNeox().command(job, RUN, 1)
    spec = json.loads(command.files[spec_name(1)])
    config = str(RUN.path / "launch" / "small.yml")
    assert spec["argv"] == ["/venvs/neox/bin/python", "deepy.py", "train.py", config]
    assert spec["cwd"] == "/trees/gpt-neox"
    assert command.spawn == "per_run"
    words = json.loads(command.files["launch/small.yml"])
    assert words["hostfile"] == str(RUN.path / "launch" / "hostfile")
    assert words["global_num_gpus"] == 8
    # no blank line and no comment: DeepSpeed's launcher fails at one. $PATH is the node's
    lines = command.files["launch/deepspeed_env"].splitlines()
    assert command.files["launch/deepspeed_env"].endswith("\n") and all("=" in x for x in lines)
    assert {"NCCL_IB_DISABLE=1", "SAID=a b", "PATH=/venvs/neox/bin:$PATH"} <= set(lines)
    assert command.env["DS_ENV_FILE"] == str(RUN.path / "launch" / "deepspeed_env")
    assert command.env["NETRC"] == "/dev/null"  # else W&B's key stands on pdsh's command line


def test_another_version_is_told_by_its_own_defaults_and_in_its_own_form(tmp_path: Path) -> None:
    """Until March 2023 (Lambda's branch too) both words were plain JSON; what is left out is what
    equals that tree's default, whatever today's is."""
    tree = tmp_path / "tree"
    (tree / "megatron" / "neox_arguments").mkdir(parents=True)
    for name in ("train.py", "deepy.py"):
        (tree / name).write_text("")
    (tree / "CITATION.cff").write_text('version: "0.0.1"\n')
    (tree / "requirements").mkdir()
    (tree / "requirements" / "requirements.txt").write_text("deepspeed\n")
    (tree / "megatron" / "neox_arguments" / "arguments.py").write_text(
        "from .neox_args import A\nBASE_CLASSES = [A]\n"
    )
    (tree / "megatron" / "neox_arguments" / "neox_args.py").write_text(
        "@dataclass\nclass A(NeoXArgsTemplate):\n    weight_decay: float = 0.01\n"
        "    num_layers: int = None\n    min_lr: float = 0.0\n"
    )
    job = over_deepspeed(tmp_path, launcher="local", nodes="1")
    source = job.engine_source
    assert source is not None
    changes: dict[str, object] = {"source": str(tree), "version": None, "launch": "ranks"}
    training = job.training.model_copy(update={"weight_decay": 0.1, "min_lr": 0.0})
    other = job.model_copy(
        update={"engine_source": source.model_copy(update=changes), "training": training}
    )
    argv = json.loads(GptNeox().command(other, RUN, 1).files[spec_name(1)])["argv"]
    assert json.loads(argv[6]) == {"weight_decay": 0.1, "num_layers": 2}


@pytest.mark.parametrize(
    ("engine_args", "norms", "asked"),
    [
        ({}, "def get_norm(args):\n    from .fused_layer_norm import A\n", False),
        ({"layernorm_fusion": True}, "", True),
        ({"rmsnorm_fusion": True}, "", True),
        # January to September 2024
        ({}, "import torch\nfrom .fused_layer_norm import MixedFusedLayerNorm\n", True),
    ],
)
def test_a_norm_of_apex_is_asked_for_before_the_start(
    tmp_path: Path, engine_args: dict[str, object], norms: str, asked: bool
) -> None:
    job = over_deepspeed(tmp_path)
    (tmp_path / "megatron" / "model").mkdir(parents=True)
    (tmp_path / "megatron" / "model" / "norms.py").write_text(norms)
    source = job.engine_source
    assert source is not None
    here = source.model_copy(update={"source": str(tmp_path)})
    job = job.model_copy(update={"engine_source": here, "engine_args": engine_args})
    spec = json.loads(GptNeox().command(job, RUN, 1).files[spec_name(1)])
    assert ("apex" in [each["name"] for each in spec["modules"]]) == asked


def test_other_validation_samples_after_a_resume_are_noted(tmp_path: Path) -> None:
    """Its samplers count the micro-batches of training there: with one a step all is well."""
    job = over_deepspeed(tmp_path)
    assert ENGINES["gpt-neox"].notes(job) == []
    keys = {"gradient_accumulation_steps": 2, "eval_interval": 5, "eval_iters": 1}
    more = job.model_copy(update={"training": job.training.model_copy(update=keys)})
    (note,) = ENGINES["gpt-neox"].notes(more)
    assert "evaluates on other samples" in note


def test_on_one_machine_it_needs_no_ssh(tmp_path: Path) -> None:
    job = over_deepspeed(tmp_path, launcher="local", nodes="1")
    words = json.loads(GptNeox().command(job, RUN, 1).files["launch/small.yml"])
    assert (words["hostfile"], words["num_gpus"]) == ("/dev/null", 4)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"launcher": "slurm"}, "DeepSpeed's launcher needs ssh to the other nodes"),
        ({"said": "$(id)"}, "env.SAID: DeepSpeed's launcher writes it between double quotes"),
        ({"said": '\\"; id; \\"'}, "env.SAID: DeepSpeed's launcher writes it"),
        ({"more": 'secrets = ["WANDB_API_KEY"]'}, "variables on pdsh's command line"),
    ],
)
def test_what_deepspeeds_launcher_would_lose_is_refused(
    tmp_path: Path, changes: dict[str, str], said: str
) -> None:
    found = problems_of(over_deepspeed(tmp_path, **changes))
    assert len(found) == 1 and said in found[0], found
