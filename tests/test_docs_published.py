"""The pages of the published set-ups: each published step has its line, and each command in it is
one that trainkit takes, for a job, a cluster and a dataset that there are."""

from __future__ import annotations

import itertools
import re
import shlex
from pathlib import Path

import pytest

from tests.conftest import TASKS, Project
from trainkit.cli.tasks import namespace
from trainkit.jobs.load import load

ROOT = Path(__file__).resolve().parent.parent
JOBS = load(ROOT, environ={})
# page: published words, of each step of its document one, in order
STEPS = {
    "nemo-aws": (
        "docker login", "docker pull", "enroot import", "describe-compute-fleet",
        "START_REQUESTED", "STOP_REQUESTED", "data/bpe", "*.idx", "01-prep-pile-data.sh",
        "curl -C -", "preprocess.py", "chown", "nemo-megatron.sbatch", "nemo-megatron-v2.sbatch",
        "submit-gpt3-175b16", "submit-gpt3-04b8", "main.py", "MAX_STEPS", "NCCL_PROTO",
        "numa_mapping.py", "egrep", "_hydra.yaml", "sinfo", "squeue", "scancel", "joblog.log",
    ),
    "neuron": (
        "create-cluster", "STOP_REQUESTED", "ssh -i", "activate", "build.sh", "requirements.txt",
        "compile_helper", "wget", "s3://neuron-s3", "compile.slurm ./gpt_23b.sh", "gpt_46b.sh",
        "Total failed compilations", "run.slurm ./gpt_23b.sh", "gpt_6.7b.sh", "squeue", "Epoch 0",
        "tensorboard", "neuron-top", "neuron-ls", "SLURM_RESTART_COUNT", "resume_from_checkpoint",
        "ulimit", "ip_local_reserved_ports", "NEURON_CC_FLAGS", "NEURON_COMPILE_CACHE_URL",
        "training_precision", "wrap_with_zero", "GBS_MULTIPLE",
    ),
    "azure": (
        "AMLFS_SKU", "00-setup_environment.sh", "nemo:24.05", "e958b2ca", "PYTORCH_VERSION",
        "setstripe", "rsync", "download_slimpajama.py", "02-extract_and_concat_dataset.sh",
        "03-preprocess_dataset.sh", "wc -l", "results.data_preparation", "-N 2 04-gpt175B.sh",
        "857M", "unset", "-N 16 04-gpt175B.sh", "tail -f", "checkpoint", "GLOBAL_BATCH_SIZE",
        "SAVE_INTERVAL", "NUMBER_OF_ITERATIONS", "CHUNKS", "LOGLEVEL", "USE_SHARP", "DATA_PATH",
        "CHECKPOINT_PATH",
    ),
    "jean-zay": (
        "salloc", "v100-32g", "start-prod", "megatron-lm", "openwebtext-jsonl", "vocabulary",
        "GPUS_PER_NODE", "MASTER_ADDR", "PP_CHUNKS", "rm -rf", "srun --jobid", "30B", "76B",
        "echo", "nvidia-smi", "TFLOP/s",
    ),
    "lambda-neox": (
        "on-demand", "git clone", "fused_kernels", "nfs-kernel-server", "/etc/exports",
        "ssh-keygen", "/job/hostfile", "PDSH_RCMD_TYPE", "ssh localhost",
        "prepare_data.py -d ./data", "deepy.py train.py configs/2-7B.yml", "nvidia-smi",
        "virtualenv", "git checkout lambda", "flashattention", "20B_tokenizer.json",
        "prepare_data.py pile", "pile_00", "NCCL_IB_DISABLE=1", "vendor err 129",
    ),
}  # fmt: skip
POINTS = {"attach", "cancel", "checkpoints", "logs", "report", "resume", "status", "why"}
# ready-made pairs of no text, so that nothing is fetched
PAIRS = ["dataset.source=indexed", "dataset.urls=[]", "dataset.prefixes=['data/a_text_document']"]


def rows(page: str) -> list[tuple[str, str]]:
    """(published, trainkit) of every line of a page's tables."""
    text = (ROOT / f"docs/published-{page}.md").read_text()
    found = re.findall(r"^\| (.*?) \| (.+) \|$", text.replace(r"\|", "¦"), re.MULTILINE)
    return [(left, right) for left, right in found if left != "published"]


def commands(page: str) -> list[list[str]]:
    """The words of each `invoke ...` of a page."""
    spans = [span for _, right in rows(page) for span in re.findall(r"`([^`]+)`", right)]
    return [shlex.split(span)[1:] for span in spans if span.startswith("invoke ")]


def settings(page: str) -> list[str]:
    """What stands after --set in it, of commands and by itself."""
    text = (ROOT / f"docs/published-{page}.md").read_text()
    return [shlex.split(word)[0] for word in re.findall(r"--set ([^\s`]+)", text)]


@pytest.mark.parametrize("page", STEPS)
def test_no_step_is_without_a_line(page: str) -> None:
    """Published words on the left, and on the right what stands for them, or why nothing does."""
    for step in STEPS[page]:
        ours = [right for left, right in rows(page) if step in left]
        assert ours and all(map(str.strip, ours)), f"published-{page}.md has no line for {step}"


@pytest.mark.parametrize("page", STEPS)
def test_every_command_is_one_that_is_taken(page: str) -> None:
    """Tasks, flags, and the jobs, clusters and datasets that they name; and each --set."""
    found = commands(page)
    assert len(found) >= 15
    for task, *words in found:
        flags = {name for each in namespace[task].get_arguments() for name in each.names}
        flags = {name.replace("_", "-") for name in flags} | {"json", "dry-run"}
        assert {word[2:] for word in words if word.startswith("--")} <= flags, (task, words)
        given = dict(itertools.pairwise(words))
        if not words:  # a word in a sentence
            continue
        job = given.get("--job", words[0])
        if task in ("train", "plan", "precompile", "build-container") or "--job" in given:
            sets = [words[at + 1] for at, word in enumerate(words) if word == "--set"]
            JOBS.resolve(job, sets)
        elif task in POINTS and words[0] != "JOB_ID":
            assert words[0] == "last", words
        if "--cluster" in given:
            JOBS.cluster(given["--cluster"])
        if "--dataset" in given:
            JOBS.dataset(given["--dataset"])


def test_every_setting_is_one_of_some_job() -> None:
    jobs = {
        "azure": "azure-gpt3-175b",
        "jean-zay": "jean-zay-7-5b",
        "lambda-neox": "gpt-neox-20b",
        "nemo-aws": "nemo-gpt3-126m",
        "neuron": "neuron-gpt3-23b",
    }
    for page, job in jobs.items():
        for word in settings(page):
            JOBS.resolve(job, [word])


@pytest.fixture
def published(tmp_path: Path) -> Project:
    """The published jobs in a folder of their own."""
    for folder in ("jobs", "container"):
        (tmp_path / folder).symlink_to(ROOT / folder)
    (tmp_path / "jobs.toml").write_text('include = ["jobs/*.toml"]\n')
    (tmp_path / "tasks.py").write_text(TASKS)
    return Project(tmp_path)


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        ("build-container azure-gpt3-175b --dry-run", "docker://nvcr.io#nvidia/pytorch:25.03-py3"),
        ("fleet status --cluster aws-p4de --dry-run", "pcluster describe-compute-fleet"),
        ("fleet start --cluster aws-trn1 --dry-run", "--cluster-name My-PCluster-Trn1"),
        ("plan jean-zay-76b-pp30", "feasible"),
        ("show nemo-gpt3-175b16", "train_iters = 40"),
    ],
)
def test_what_can_be_run_is(published: Project, line: str, shown: str) -> None:
    assert shown in published.invoke(*line.split()).stdout


@pytest.mark.parametrize(
    ("job", "shown"),
    [
        ("azure-gpt3-175b --nodes 32", "pretrain_gpt.py --num-layers 96"),
        ("jean-zay-7-5b", "pretrain_gpt.py --num-layers 36"),
        ("neuron-gpt3-23b", "torchrun --nproc_per_node 32 --nnodes 4"),
    ],
)
def test_a_dry_run_shows_the_command(published: Project, job: str, shown: str) -> None:
    """With data that are not there, which it says at the end."""
    sets = [word for each in PAIRS for word in ("--set", each)]
    done = published.invoke("train", *job.split(), "--dry-run", *sets, exit=6)
    assert "would submit: sbatch" in done.stdout and shown in done.stdout
