"""The task `plan`: one page or one document, exit 4 with every objection at once, the last run
beside it."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from tests.conftest import Project
from trainkit.base.errors import ConfigError, Exit, TrainkitError
from trainkit.cli.config.plan import plan
from trainkit.cli.config.render_plan import print_page
from trainkit.cli.config.render_time import print_terms
from trainkit.cli.options import PlanOptions
from trainkit.cli.wrapper import TaskContext
from trainkit.jobs.load import load
from trainkit.jobs.resolved import ResolvedJob, write_job
from trainkit.launch.job_plan import last_measured, plan_of

CHECKOUT = Path(__file__).resolve().parents[3]
GPUS = """
[clusters.gpus]
launcher = "slurm"
device = "a100-sxm-40gb"
gpus_per_node = 8
max_nodes = 4
slurm = { time = "1:00:00" }
filesystems = { scratch = { capacity_bytes = 1_000_000_000_000, write_gib_per_second = 10.0 } }

[models.large]
num_layers = 32
hidden_size = 4096
num_attention_heads = 32
seq_length = 2048
vocab_size = 50304

[jobs.large]
description = "a [large] one"
cluster = "gpus"
model = "large"
dataset = "mock"
nodes = 2
parallelism = { tensor_model_parallel_size = 4, pipeline_model_parallel_size = 3 }
training.micro_batch_size = 1
training.global_batch_size = 64
training.train_iters = 100_000
training.lr = 1e-4
training.precision = "bf16"
training.save_interval = 1000
"""


def document(
    capsys: pytest.CaptureFixture[str],
    folder: Path,
    name: str,
    *sets: str,
    nodes: int = 0,
    cluster: str = "",
) -> tuple[dict[str, Any], Exit]:
    """What `plan --json` answers."""
    answer = plan(
        TaskContext(json=True, dry_run=False, folder=folder),
        name,
        PlanOptions(nodes=str(nodes or ""), cluster=cluster, set=sets),
    )
    assert capsys.readouterr().out == ""
    return answer.document, answer.exit


def page(folder: Path, name: str, *sets: str, width: int = 200) -> str:
    """What `plan` prints."""
    job = load(folder).resolve(name, sets).job
    screen = io.StringIO()
    print_page(Console(file=screen, width=width, soft_wrap=True), job, plan_of(job), "invoke")
    return screen.getvalue()


def test_a_layout_that_fills_no_ranks_has_no_time() -> None:
    partly = page(CHECKOUT, "azure-gpt3-175b", "nodes=2")
    assert "No step has a time: the layout does not fill 16 ranks" in partly
    assert "MFU" not in partly and "not feasible: 1 objection" in partly
    screen = io.StringIO()
    job = load(CHECKOUT).resolve("azure-gpt3-175b", ["nodes=2"]).job
    print_terms(Console(file=screen), plan_of(job))
    assert screen.getvalue() == "time: none, since the layout does not fill 16 ranks\n"


def test_all_objections_at_once_with_exit_4(project: Project) -> None:
    (project.path / "jobs.toml").open("a").write(GPUS)
    done = project.invoke("plan", "large", exit=4)
    assert (
        "16, which tensor-parallel 4 x pipeline-parallel 3 = 12 does not divide; nearest: nodes 3,"
        " or pipeline_model_parallel_size 2" in done.stdout
    )
    assert "not feasible: " in done.stdout and "a [large] one" in done.stdout
    found = project.document("plan", "large", "--set", "nodes=8", exit=4)
    assert found["schema"] == "plan/1" and not found["feasible"]
    assert [entry["code"] for entry in found["objections"]] == [
        "too-many-nodes",
        "world-not-divisible",
        "batch-not-divisible",
    ]
    assert project.document("plan", "large", "--nodes", "3")["feasible"]


def test_a_search_is_written_and_read_again(
    project: Project, capsys: pytest.CaptureFixture[str]
) -> None:
    (project.path / "jobs.toml").open("a").write(GPUS)
    context = TaskContext(json=True, dry_run=False, folder=project.path)
    asked = PlanOptions(search=True, nodes="1..2", write="found", price_per_gpu_hour=2.0)
    answer = plan(context, "large", asked)
    best = answer.document["layouts"][0]
    for name, interval in (
        ("days", "days_interval"),
        ("device_hours", "device_hours_interval"),
        ("memory_bytes", "memory_band_bytes"),
    ):
        low, high = best[interval]
        assert low < best[name] < high, name
    assert answer.exit is Exit.DONE and best["nodes"] in (1, 2)
    again = plan(context, "found", PlanOptions()).document
    assert again["feasible"] and again["world_size"] % best["nodes"] == 0
    assert again["memory"]["fullest_rank"]["total_bytes"] == best["memory_bytes"]
    with pytest.raises(TrainkitError, match="there is a job of that name"):
        plan(context, "large", asked)
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"nodes": "1..2"}, "a range goes with --search"),
        ({"nodes": "4..2", "search": True}, "the lower number first"),
        ({"nodes": "2..x", "search": True}, "takes a whole number"),
        ({"write": "x"}, "options of --search"),
        ({"explain": "memory"}, "only 'time' and 'optimizer'"),
        ({"search": True, "write": "A B"}, "not a name of a job"),
    ],
)
def test_options_that_do_not_go_together(options: dict[str, Any], said: str) -> None:
    context = TaskContext(json=True, dry_run=False, folder=CHECKOUT)
    with pytest.raises(TrainkitError, match=said):
        plan(context, "demo", PlanOptions(**options))


def test_what_is_no_plan(project: Project) -> None:
    (project.path / "jobs.toml").open("a").write(GPUS)
    assert "no job 'larg'" in project.invoke("plan", "larg", exit=3).stderr
    assert (
        "names no [clusters.X] table"
        in project.invoke("plan", "large", "--cluster", "gpu", exit=3).stderr
    )
    assert (
        "--nodes takes a whole number"
        in project.invoke("plan", "large", "--nodes", "two", exit=1).stderr
    )
    beyond = project.invoke(
        "plan",
        "large",
        "--set",
        "model.max_position_embeddings=2048",
        "--set",
        "model.seq_length=4096",
        exit=3,
    ).stderr
    # trap 19 of the published set-ups
    assert "max_position_embeddings 2048 is below seq_length 4096" in beyond
    unknown = project.invoke("plan", "large", "--set", 'cluster.device="h100"', exit=3).stderr
    assert "names no [devices.X] table" in unknown


def test_a_merges_file_that_is_a_vocabulary(project: Project) -> None:
    """Trap 11: MERGE_FILE of Azure's script is vocab.json."""
    text = (
        '[tokenizers.wrong]\ntype = "gpt2"\nvocab_file = "vocab.json"\nmerge_file = "vocab.json"\n'
    )
    (project.path / "jobs.toml").open("a").write(text + GPUS)
    assert (
        "not a file of merges"
        in project.invoke("plan", "text", "--set", "dataset.tokenizer=wrong", exit=3).stderr
    )


def test_what_is_not_launched_is_said_with_its_reasons(project: Project) -> None:
    (project.path / "jobs.toml").open("a").write(
        '[engines.megatron-lm]\nsource = "URL://tree"\nversion = "core-0.12.0"\n'
    )
    sets = ("engine=megatron-lm", "parallelism.zero_stage=0", "engine_args.overlap-grad-reducee=1")
    done = project.invoke("plan", "text", *(word for each in sets for word in ("--set", each)))
    assert "has no option 'overlap-grad-reducee'" in " ".join(done.stdout.split())


def test_nodes_cluster_and_sets(capsys: pytest.CaptureFixture[str]) -> None:
    found, exit = document(capsys, CHECKOUT, "gpt-neox-20b-lambda", nodes=6)
    assert (found["world_size"], found["data_parallel_size"], exit) == (48, 2, Exit.DONE)
    found, exit = document(capsys, CHECKOUT, "gpt-neox-20b-lambda", "engine=megatron-lm")
    assert exit is Exit.PLAN and [entry["code"] for entry in found["objections"]] == [
        "layers-not-divisible"
    ]
    found, _ = document(capsys, CHECKOUT, "llama-8b", cluster="here")
    assert found["world_size"] == 2 and found["memory"]["device_bytes"] is None
    found, exit = document(capsys, CHECKOUT, "jean-zay-76b")
    assert exit is Exit.PLAN and found["objections"][0]["code"] == "layers-not-divisible"


def test_the_page() -> None:
    text = page(CHECKOUT, "gpt-neox-20b-lambda")
    for words in (
        "20.55 billion parameters",
        "layers by stage: 8 x2, 7 x4",
        "13.5% of a step",
        "of 40.0 GiB on the fullest rank: fits",
        "days",
        "a checkpoint",
    ):
        assert words in text
    assert (
        text.count("\n        stage ") == 6 and "W weights" in text and "predicted, between" in text
    )
    assert text.rstrip().endswith("feasible: invoke train gpt-neox-20b-lambda")
    many = page(CHECKOUT, "jean-zay-76b")
    assert "stages 1 to " in many and "does not fit" in many and many.count("\nobjection ") == 2
    assert "Speed unknown for this device" in page(CHECKOUT, "mock")
    assert all(
        len(line) <= 100 for line in page(CHECKOUT, "nemo-gpt3-175b", width=100).splitlines()
    )


@pytest.mark.parametrize("width", [60, 80, 100])
def test_no_figure_is_cut_on_a_narrow_page(width: int) -> None:
    for name in ("gpt-neox-20b-lambda", "azure-gpt3-175b", "jean-zay-76b"):
        text = page(CHECKOUT, name, width=width)
        assert "…" not in text and text.count(" GiB") > 10
        assert all(
            len(line) <= width for line in text.splitlines() if line.startswith("        ")
        ), name


def test_where_an_engine_comes_from(capsys: pytest.CaptureFixture[str]) -> None:
    folder = TaskContext(json=False, dry_run=False, folder=CHECKOUT)
    plan(folder, "azure-gpt3-175b", PlanOptions())
    text = " ".join(capsys.readouterr().out.split())
    assert (
        "engine megatron-lm: https://github.com/NVIDIA/Megatron-LM at e958b2ca, container"
        " pytorch-25-03" in text
    )
    assert "feasible: " in text
    plan(folder, "nemo-gpt3-126m", PlanOptions())
    text = " ".join(capsys.readouterr().out.split())
    assert "engine nemo: /opt/bignlp/NeMo, container bignlp-22-09" in text
    assert "feasible: " in text


@pytest.mark.parametrize("width", [76, 80, 100])
def test_no_figure_is_cut_on_a_narrow_terminal(width: int) -> None:
    text = page(CHECKOUT, "gpt-neox-20b-lambda", width=width)
    assert "…" not in text and max(map(len, text.splitlines()[1:])) <= width
    assert all(
        f" {name} " in text
        for name in (
            "weights",
            "gathered copies",
            "gradients",
            "optimizer",
            "buffers",
            "assumed reserve",
        )
    )


def test_bars_show_the_parts_and_the_device() -> None:
    """A colourless bar has a letter for each part, a line where the device ends, dots for what
    stays free."""
    bars = [
        line.split("GiB ")[1].rstrip()
        for line in page(CHECKOUT, "gpt-neox-20b-lambda").splitlines()
        if line.startswith("        stage ")
    ]
    for bar in bars:
        letters = [letter for i, letter in enumerate(bar) if i == 0 or bar[i - 1] != letter]
        assert bar.endswith("·|") and letters == [
            letter for letter in "WCGOALBr·|" if letter in letters
        ]


def make_run(
    folder: Path, name: str, *sets: str, id: str, tokens_per_second: float, peak: int
) -> None:
    """A run folder as a finished run leaves it."""
    resolved: ResolvedJob = load(folder).resolve(name, sets)
    run = folder / "runs" / name / id
    (run / "checkpoints" / "step-00000020").mkdir(parents=True)
    write_job(run / "job.json", resolved)
    (run / "plan.json").write_text(json.dumps(plan_of(resolved.job).to_json()))
    row = {
        "step": 20,
        "elapsed_ms": 1.0,
        "lm_loss": 1.0,
        "tokens_per_second": tokens_per_second,
        "memory_bytes": {"max_resident": peak},
    }
    (run / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    chunks = [{"bytes": 700}, {"bytes": 68}]
    manifest = {"schema": "checkpoint/1", "tensors": {"model.a": {"chunks": chunks}}}
    (run / "checkpoints" / "step-00000020" / "manifest.json").write_text(json.dumps(manifest))


def test_the_last_run_is_shown_with_the_errors_of_its_plan(
    project: Project, capsys: pytest.CaptureFixture[str]
) -> None:
    job = load(project.path).resolve("random").job
    assert last_measured(job) is None
    predicted = plan_of(job)
    assert predicted.memory is not None and predicted.checkpoint_bytes and predicted.days is None
    make_run(
        project.path,
        "random",
        id="1",
        tokens_per_second=400.0,
        peak=2 * predicted.memory.fullest.total_bytes,
    )
    found, _ = document(capsys, project.path, "random")
    errors = found["measured"]["errors"]
    assert errors["peak_bytes"] == pytest.approx(-0.5) and errors[
        "checkpoint_bytes"
    ] == pytest.approx(predicted.checkpoint_bytes / 768 - 1)
    assert found["duration"]["speed"]["source"] == "measured: run 1" and found["duration"]["parts"][
        "steps"
    ] == pytest.approx(predicted.tokens / 400)
    text = page(project.path, "random")
    assert "run 1: 400 tokens/s" in text and "(plan -50.0%)" in text and "measured: run 1" in text
    # A newer run of another layout does not hide it; for that other layout it is the one that
    # counts.
    make_run(
        project.path,
        "random",
        "training.micro_batch_size=1",
        id="2",
        tokens_per_second=300.0,
        peak=10**9,
    )
    measured = last_measured(job)
    assert measured is not None and (measured.run, measured.same_layout) == ("1", True)
    other = last_measured(load(project.path).resolve("random", ["training.micro_batch_size=4"]).job)
    assert other is not None and (other.run, other.same_layout) == ("2", False)
    assert "another layout" in page(project.path, "random", "training.micro_batch_size=4")
    # where one of the same layout counts, the other's files are not asked for
    newer = project.path / "runs" / "random" / "2"
    (newer / "checkpoints" / "step-00000020" / "manifest.json").write_text(
        '{"schema": "checkpoint/1"}'
    )
    assert last_measured(job) == measured


def test_runs_that_cannot_be_compared_are_passed_over(project: Project) -> None:
    job = load(project.path).resolve("random").job
    make_run(project.path, "random", id="1", tokens_per_second=400.0, peak=10**9)
    broken = project.path / "runs" / "random" / "2"
    broken.mkdir()
    (broken / "job.json").write_text("{}")
    (project.path / "runs" / "random" / "1" / "plan.json").unlink()
    measured = last_measured(job)
    assert (
        measured is not None and measured.run == "1" and measured.errors["checkpoint_bytes"] is None
    )
    elsewhere = job.model_copy(update={"cluster": job.cluster.model_copy(update={"name": "other"})})
    assert last_measured(elsewhere) is None


def test_prepared_data_counts(project: Project, capsys: pytest.CaptureFixture[str]) -> None:
    folder = project.path / "data" / "lines" / "bpe"
    folder.mkdir(parents=True)
    (folder / "dataset.json").write_text(
        json.dumps({"schema": "dataset/1", "vocab_size": 290, "tokens": 5120})
    )
    found, _ = document(capsys, project.path, "text")
    assert (
        found["vocab_size"] == 290
        and found["epochs"]["dataset_tokens"] == 5120
        and not found["epochs"]["estimated"]
    )
    (folder / "dataset.json").write_text(json.dumps({"schema": "dataset/0"}))
    with pytest.raises(ConfigError, match="dataset/0"):
        document(capsys, project.path, "text")


def test_planning_imports_neither_torch_nor_numpy(project: Project) -> None:
    argv = [sys.executable, "-X", "importtime", "-m", "invoke", "plan", "text"]
    done = subprocess.run(
        argv,
        cwd=project.path,
        env=project.environment(),
        capture_output=True,
        text=True,
        check=True,
    )
    imported = {
        line.rpartition("|")[2].strip().split(".")[0]
        for line in done.stderr.splitlines()
        if line.startswith("import time:")
    }
    assert "trainkit" in imported and not imported & {"torch", "numpy", "tokenizers"}


UNPREPARED = """
[tokenizers.given]
type = "gpt2"
vocab_file = "vocab.json"
merge_file = "merges.txt"

[tokenizers.away]
extends = "given"
vocab_file = "away.json"

[datasets.text]
source = "files"
paths = ["text.jsonl"]
tokenizer = "away"
split = "98,1,1"

[datasets.counted]
extends = "text"
tokenizer = "given"

[models.seven-b]
num_layers = 32
hidden_size = 4096
num_attention_heads = 32
seq_length = 2048

[clusters.v100]
launcher = "slurm"
device = "v100-sxm-32gb"
gpus_per_node = 4

[jobs.unprepared]
extends = "large"
cluster = "v100"
model = "seven-b"
dataset = "text"
nodes = 1
parallelism = { tensor_model_parallel_size = 1, pipeline_model_parallel_size = 1 }
training.precision = "fp16"
training.eval_iters = 0
"""
FITTING = (
    "cluster=gpus",
    "training.precision=bf16",
    "parallelism.zero_stage=3",
    "training.recompute_granularity=full",
    'slurm.time="20:00:00"',
    "training.train_iters=200",
)


@pytest.fixture
def unprepared(project: Project) -> Path:
    (project.path / "jobs.toml").open("a").write(GPUS + UNPREPARED)
    (project.path / "text.jsonl").write_text('{"text": "a word or two"}\n' * 10_000)
    (project.path / "vocab.json").write_text(json.dumps({"a": 0, "b": 1, "<|endoftext|>": 2}))
    (project.path / "merges.txt").write_text("#version: 0.2\n")
    return project.path


@pytest.mark.parametrize(
    ("sets", "code"),
    [
        ((), "memory"),
        (("cluster=here", "training.precision=fp32"), "host-memory"),
        ((*FITTING, "cluster.filesystems.scratch.capacity_bytes=1000"), "disk-too-small"),
        ((*FITTING, 'slurm.time="0:01:00"'), "time-limit-too-short"),
    ],
)
def test_what_no_vocabulary_would_mend_is_said_before_one_is_known(
    sets: tuple[str, ...], code: str, unprepared: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found, ended = document(capsys, unprepared, "unprepared", *sets)
    assert (ended, found["feasible"]) == (Exit.PLAN, False)
    assert code in [each["code"] for each in found["objections"]], found["objections"]
    few, many = found["between"]
    assert few["parameters"] < many["parameters"] and found["parameters"] is None


def test_what_is_not_known_is_not_called_feasible(
    unprepared: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found, ended = document(capsys, unprepared, "unprepared", *FITTING)
    assert (ended, found["feasible"], found["objections"]) == (Exit.NOT_KNOWN, None, [])
    assert [each["code"] for each in found["not_known"]] == ["vocabulary-unknown"]
    text = page(unprepared, "unprepared", *FITTING)
    assert "not known yet: model.vocab_size" in text and " to " in text
    assert "not known yet whether it is feasible: invoke train unprepared" in text
    # a tokenizer whose files lie there is counted
    found, ended = document(capsys, unprepared, "unprepared", *FITTING, "dataset=counted")
    assert (ended, found["feasible"], found["vocab_size"]) == (Exit.DONE, True, 3)
    duration = found["duration"]
    low, high = duration["days_interval"]
    assert low < found["days"] < high and len(found["memory"]["band_bytes"]) == 2
    low, high = duration["device_hours_interval"]
    assert low < duration["device_hours"] < high
    assert "four times of five" in page(unprepared, "unprepared", *FITTING, "dataset=counted")


def test_data_that_are_not_prepared_are_looked_at(
    unprepared: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    long = (*FITTING, "dataset=counted", "training.train_iters=10000")
    found, _ = document(capsys, unprepared, "unprepared", *long)
    assert "many-epochs" in [note["code"] for note in found["notes"]]
    (unprepared / "text.jsonl").write_text('{"text": "a word or two"}\n')
    wanted = (*FITTING, "dataset.split=100,0,0", "training.eval_iters=1")
    found, ended = document(capsys, unprepared, "unprepared", *wanted)
    assert ended is Exit.PLAN
    assert [each["code"] for each in found["objections"]] == [
        "too-few-tokens",
        "no-validation-data",
    ]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("model.num_layers=1000000000000000", "num_layers"),
        ('env={ MASTER_PORT = "29500" }', "MASTER_PORT has no effect here"),
    ],
)
def test_what_no_rank_could_have_is_refused(line: str, said: str, unprepared: Path) -> None:
    with pytest.raises(ConfigError, match=said):
        load(unprepared).resolve("unprepared", [line])


def test_a_search_that_finds_nothing_draws_no_table(unprepared: Path) -> None:
    nothing = ["nodes=5", "training.global_batch_size=64", "model.vocab_size=50304"]
    done = Project(unprepared).invoke(
        *("plan", "large", "--search"),
        *(word for text in nothing for word in ("--set", text)),
        exit=4,
    )
    assert "tokens/s" not in done.stdout and "nearest: nodes 4" in done.stdout
