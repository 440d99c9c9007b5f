"""The reference experiments of this checkout (jobs/*.toml) against the published values, written
out here once more.

The tables repeat docs/references.md's sources: bigscience 8b25137, NeMo-Framework-Launcher
0d03943e, neuronx-nemo-megatron f4743ce, ai-infrastructure-on-azure 2ada947,
LambdaLabsML/gpt-neox 66fe501, EleutherAI/gpt-neox ea7aefd, torchtitan's llama3_8b.toml.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
import tomli

from tests.jobs.published_jobs import MEGATRON, NEMO, NEURON, TABLE, Published
from tests.jobs.published_recipes import INTERVALS, LOSS_SCALES, RECIPES, TIME_LIMITS, Recipe
from trainkit.jobs.load import Jobs, load
from trainkit.jobs.schema import Job
from trainkit.plan.arithmetic import parameters_of

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def jobs() -> Jobs:
    return load(ROOT, environ={})  # no job may need a variable


@pytest.fixture(scope="module")
def all_jobs(jobs: Jobs) -> Mapping[str, Job]:
    return {name: jobs.resolve(name).job for name in TABLE}


def test_the_whole_file_is_valid_offline(jobs: Jobs) -> None:
    assert jobs.check() == []
    assert set(jobs.names()) >= {*TABLE, "demo", "demo-neox", "demo-llama", "mock"}
    assert set(TABLE) == set(RECIPES) == set(INTERVALS)


def test_each_job_says_in_one_line_what_it_is(all_jobs: Mapping[str, Job]) -> None:
    descriptions = [job.description for job in all_jobs.values()]
    assert all(20 < len(text) <= 110 and "\n" not in text for text in descriptions)
    assert len(set(descriptions)) == len(descriptions)  # none is its base's


@pytest.mark.parametrize("name", TABLE)
def test_the_published_table(name: str, all_jobs: Mapping[str, Job]) -> None:
    job, told = all_jobs[name], TABLE[name]
    m, p, t = job.model, job.parallelism, job.training
    padded = (
        -(-_vocabulary(job) // (128 * p.tensor_model_parallel_size))
        * 128
        * p.tensor_model_parallel_size
    )
    digits, unit = told.parameters[:-1], told.parameters[-1]
    scale, places = {"M": 1e6, "B": 1e9}[unit], len(digits.partition(".")[2])
    assert told == Published(
        engine=job.engine,
        cluster=job.cluster.name,
        layers=m.num_layers,
        hidden=m.hidden_size,
        heads=m.num_attention_heads,
        seq=m.seq_length,
        tp=p.tensor_model_parallel_size,
        pp=p.pipeline_model_parallel_size,
        nodes=job.nodes,
        micro=t.micro_batch_size,
        batch=job.global_batch_size,
        lr=t.lr,
        min_lr=t.min_lr,
        iters=t.train_iters,
        precision=t.precision,
        parameters=f"{parameters_of(m, padded) / scale:.{places}f}{unit}",
    )


def _vocabulary(job: Job) -> int:
    assert job.model.vocab_size is None, "the tokenizer knows it"
    assert job.dataset.tokenizer and job.dataset.tokenizer.vocab_size
    return job.dataset.tokenizer.vocab_size


@pytest.mark.parametrize("name", RECIPES)
def test_nothing_is_inherited_by_accident(name: str, all_jobs: Mapping[str, Job]) -> None:
    job, told = all_jobs[name], RECIPES[name]
    m, t = job.model, job.training
    normal = {"init_method": "normal", "output_layer_init_method": "scaled"}
    small = {"init_method": "small_init", "output_layer_init_method": "wang_init"}
    assert m.model_dump(include=set(normal)) == (small if told.std is None else normal)
    assert told == Recipe(
        dropout=m.hidden_dropout,
        std=told.std and m.init_method_std,
        warmup=t.lr_warmup_iters or t.lr_warmup_fraction or 0.0,
        decay=t.decay_iters,
        weight_decay=t.weight_decay,
        beta2=t.adam_beta2,
        recompute=t.recompute_granularity,
        sequence_parallel=job.parallelism.sequence_parallel,
        zero=job.parallelism.zero_stage,
        dataset=job.dataset.name,
        split=job.dataset.split,
    )
    assert m.attention_dropout == m.hidden_dropout and m.layernorm_epsilon == 1e-5
    assert (t.adam_beta1, t.adam_eps, t.clip_grad, t.optimizer) == (0.9, 1e-8, 1.0, "adam")
    assert t.lr_decay_style == ("linear" if name == "llama-8b" else "cosine")
    assert m.untied == (m.family != "gpt")
    assert m.positions == (2048 if name == "azure-gpt3-check" else m.seq_length)  # trap 19
    keep = job.checkpoint.keep_last
    assert INTERVALS[name] == (t.log_interval, t.eval_interval, t.eval_iters, t.save_interval, keep)
    assert job.sbatch_options.get("time") == TIME_LIMITS.get(name)
    scale = next((value for prefix, value in LOSS_SCALES.items() if name.startswith(prefix)), None)
    if t.precision == "fp16":
        assert (
            t.loss_scale,
            t.initial_loss_scale,
            t.loss_scale_window,
            t.hysteresis,
            t.min_loss_scale,
        ) == (None, scale, 1000, 2, 1.0)


def test_neox_models(all_jobs: Mapping[str, Job]) -> None:
    big, lambda_, smaller, old = (
        all_jobs[f"gpt-neox-{name}"].model for name in ("20b", "20b-lambda", "9b-lambda", "2-7b")
    )
    assert big == lambda_  # trap 5: the file's gpt_j_tied is not taken over
    assert all(
        (m.rotary_percent, m.gpt_j_residual, m.gpt_j_tied, m.gelu) == (0.25, True, False, "tanh")
        for m in (big, smaller)
    )
    assert (old.rotary_percent, old.gpt_j_residual, old.gpt_j_tied, old.gelu) == (
        1.0,
        False,
        False,
        "exact",
    )


@pytest.mark.parametrize(("nodes", "batch"), [(1, 128), (2, 256), (3, 384)])
def test_the_batch_follows_the_nodes_as_published(jobs: Jobs, nodes: int, batch: int) -> None:
    assert jobs.resolve("gpt-neox-9b-lambda", [f"nodes={nodes}"]).job.global_batch_size == batch
    assert jobs.resolve("neuron-gpt3-6-7b", [f"nodes={nodes}"]).job.global_batch_size == 32 * nodes


def test_clusters(all_jobs: Mapping[str, Job]) -> None:
    clusters = {job.cluster.name: job.cluster for job in all_jobs.values()}
    assert {
        name: (c.launcher, c.device.name, c.gpus_per_node, c.max_nodes)
        for name, c in clusters.items()
    } == {
        "neox-a100": ("pdsh", "a100-sxm-40gb", 8, None),
        "lambda": ("pdsh", "a100-sxm-40gb", 8, None),
        "lambda-a6000": ("pdsh", "a6000-48gb", 4, 2),
        "aws-p4de": ("slurm", "a100-sxm-80gb", 8, None),
        "aws-trn1": ("slurm", "trn1-core", 32, 16),
        "azure-ndv5": ("slurm", "h100-sxm-80gb", 8, None),
        "jean-zay": ("slurm", "v100-sxm-16gb", 4, None),
        "jean-zay-32g": ("slurm", "v100-sxm-32gb", 4, None),
        "h100-8": ("local", "h100-sxm-80gb", 8, 1),
    }
    assert (
        clusters["lambda"].env == {"NCCL_IB_DISABLE": "1", "NCCL_DEBUG": "INFO"}
        and clusters["neox-a100"].env == {}
    )
    assert clusters["lambda"].hostfile == clusters["lambda-a6000"].hostfile == "/job/hostfile"
    assert clusters["aws-trn1"].env == {}  # its engine sets what the scripts set
    assert clusters["jean-zay-32g"].slurm == {
        **clusters["jean-zay"].slurm,
        "constraint": "v100-32g",
    }
    prepare = clusters["azure-ndv5"].stages["prep-data"]
    assert (prepare.partition, prepare.nodes, prepare.tasks_per_node, prepare.time) == (
        "hpc",
        32,
        32,
        "24:00:00",
    )
    tiers = {
        name: fs.write_gib_per_second for name, fs in clusters["azure-ndv5"].filesystems.items()
    }
    assert tiers == {
        "amlfs-40": 19.2,
        "amlfs-125": 64.0,
        "amlfs-250": 128.0,
        "amlfs-500": 256.0,
        "anf": None,
    }
    for job in all_jobs.values():
        assert job.nodes <= (job.cluster.max_nodes or job.nodes)
        assert (job.checkpoint.filesystem or "") in ("", *job.cluster.filesystems)


def test_datasets_and_tokenizers(jobs: Jobs) -> None:
    names = (
        "enron",
        "enwik8",
        "pile",
        "pile-subset",
        "slimpajama",
        "openwebtext2",
        "the-pile-gpt3",
        "neuron-wikipedia",
    )
    datasets = {name: jobs.dataset(name) for name in names}
    assert {name: d.documents for name, d in datasets.items() if d.documents} == {
        "enron": 517401,
        "openwebtext2": 17103000,
    }
    for dataset in datasets.values():
        assert dataset.tokenizer and (dataset.homepage or dataset.name == "neuron-wikipedia")
        assert all(
            url.startswith(("https://", "http://", "s3://", "hf://")) for url in dataset.urls
        )
    assert datasets["pile"].urls == ("https://the-eye.eu/public/AI/pile/train/{00..29}.jsonl.zst",)
    ready = datasets["the-pile-gpt3"]
    # .bin bytes, two a token
    assert ready.tokens and abs(ready.tokens - 1462271680 * 512 / 2) < 1e6
    tokenizers = {d.tokenizer.name: d.tokenizer for d in datasets.values() if d.tokenizer}
    assert {name: t.vocab_size for name, t in tokenizers.items()} == {
        "gpt2": 50257,
        "neox-20b": 50277,
    }
    files = [
        path for t in tokenizers.values() for path in (t.path, t.vocab_file, t.merge_file) if path
    ]
    assert all("data/tokenizers/" in path for path in files)
    # trap 11
    assert tokenizers["gpt2"].merge_file and tokenizers["gpt2"].merge_file.endswith("merges.txt")


def test_every_engine_has_a_source(all_jobs: Mapping[str, Job]) -> None:
    engines: dict[str, object] = {}
    for path in (ROOT / "jobs").glob("*.toml"):
        engines |= tomli.loads(path.read_text()).get("engines", {})
    assert (
        set(engines) - {"megatron-lm-2021", "neuronx-2-13"}
        == {"gpt-neox", NEMO, MEGATRON, NEURON}
        >= {job.engine for job in all_jobs.values()} - {"native"}
    )
    revisions = {
        name: job.engine_source.revision
        for name, job in all_jobs.items()
        if job.engine_source is not None and job.engine == MEGATRON
    }
    assert {name: revisions[name] for name in ("azure-gpt3-175b", "jean-zay-30b")} == {
        "azure-gpt3-175b": "e958b2ca",
        "jean-zay-30b": "825375cf38",
    }
    # what a published engine alone has stands beside native jobs too, which do not read it
    with_arguments = {name for name, job in all_jobs.items() if job.engine == "native"} & {
        name for name, job in all_jobs.items() if job.engine_args
    }
    assert all(name.startswith("gpt-neox-") for name in with_arguments)


@pytest.mark.parametrize("name", [name for name, told in TABLE.items() if told.engine != "native"])
def test_they_resolve_for_the_native_engine_too(name: str, jobs: Jobs) -> None:
    assert jobs.resolve(name, ["engine=native"]).job.engine == "native"


def test_the_guide_names_every_job() -> None:
    text = (ROOT / "docs" / "references.md").read_text()
    assert all(f"`{name}`" in text for name in TABLE)
    assert all(f"| {trap} |" in text for trap in range(1, 29))
