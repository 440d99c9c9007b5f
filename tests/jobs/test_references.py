"""The reference experiments of this checkout (jobs/*.toml) against the published values, written
out here once more.

The tables repeat docs/references.md's sources: bigscience 8b25137, NeMo-Framework-Launcher
0d03943e, neuronx-nemo-megatron f4743ce, ai-infrastructure-on-azure 2ada947,
LambdaLabsML/gpt-neox 66fe501, EleutherAI/gpt-neox ea7aefd, torchtitan's llama3_8b.toml.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest
import tomli

from trainkit.jobs.load import Jobs, load
from trainkit.jobs.schema import Job
from trainkit.plan.arithmetic import parameters_of

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Published:
    """One line of a reference's table. `parameters`: with the vocabulary padded to 128 * TP, as
    the engines hold it, rounded as printed."""

    engine: str
    cluster: str
    layers: int
    hidden: int
    heads: int
    seq: int
    tp: int
    pp: int
    nodes: int
    micro: int
    batch: int
    lr: float
    min_lr: float
    iters: int
    precision: str
    parameters: str


NEMO, MEGATRON, NEURON = "nemo", "megatron-lm", "neuronx-nemo"
TABLE: Mapping[str, Published] = {
    # engine, cluster, layers, hidden, heads, seq, TP, PP, nodes, micro-batch, global batch, lr,
    # min_lr, train_iters, precision, parameters
    "gpt-neox-20b": Published(
        "native",
        "neox-a100",
        44,
        6144,
        64,
        2048,
        2,
        4,
        12,
        4,
        1536,
        0.97e-4,
        0.97e-5,
        150000,
        "fp16",
        "20.55B",
    ),
    "gpt-neox-20b-lambda": Published(
        "native",
        "lambda",
        44,
        6144,
        64,
        2048,
        4,
        6,
        3,
        4,
        128,
        0.97e-4,
        0.97e-5,
        150000,
        "fp16",
        "20.56B",
    ),
    "gpt-neox-9b-lambda": Published(
        "native",
        "lambda",
        44,
        4096,
        64,
        2048,
        2,
        4,
        1,
        4,
        128,
        0.97e-4,
        0.97e-5,
        150000,
        "fp16",
        "9.27B",
    ),
    "gpt-neox-2-7b": Published(
        "native",
        "lambda-a6000",
        32,
        2560,
        32,
        2048,
        1,
        1,
        2,
        4,
        32,
        1.6e-4,
        1.6e-5,
        320000,
        "fp16",
        "2.78B",
    ),
    "nemo-gpt3-126m": Published(
        NEMO, "aws-p4de", 12, 768, 12, 2048, 1, 1, 8, 4, 256, 6e-4, 6e-5, 600000, "bf16", "125.3M"
    ),
    "nemo-gpt3-5b": Published(
        NEMO,
        "aws-p4de",
        24,
        4096,
        32,
        2048,
        1,
        1,
        16,
        2,
        2048,
        1.6e-4,
        1.6e-5,
        75000,
        "bf16",
        "5.05B",
    ),
    "nemo-gpt3-20b": Published(
        NEMO,
        "aws-p4de",
        44,
        6144,
        48,
        2048,
        4,
        1,
        64,
        4,
        2048,
        1.4e-4,
        1.4e-5,
        75000,
        "bf16",
        "20.26B",
    ),
    "nemo-gpt3-40b": Published(
        NEMO,
        "aws-p4de",
        48,
        8192,
        64,
        2048,
        4,
        2,
        128,
        2,
        2048,
        1.1e-4,
        1.1e-5,
        75000,
        "bf16",
        "39.1B",
    ),
    "nemo-gpt3-175b": Published(
        NEMO,
        "aws-p4de",
        96,
        12288,
        96,
        2048,
        8,
        8,
        128,
        2,
        2048,
        0.9e-4,
        0.9e-5,
        75000,
        "bf16",
        "174.6B",
    ),
    "nemo-gpt3-175b16": Published(
        NEMO,
        "aws-p4de",
        96,
        12288,
        96,
        2048,
        8,
        8,
        16,
        2,
        2048,
        0.9e-4,
        0.9e-5,
        40,
        "bf16",
        "174.6B",
    ),
    "nemo-gpt3-04b8": Published(
        NEMO, "aws-p4de", 24, 4096, 32, 2048, 1, 1, 8, 2, 2048, 1.6e-4, 1.6e-5, 40, "bf16", "5.05B"
    ),
    "neuron-gpt3-6-7b": Published(
        NEURON,
        "aws-trn1",
        32,
        4096,
        32,
        2048,
        8,
        1,
        1,
        1,
        32,
        1.5e-4,
        1e-5,
        300000,
        "bf16",
        "6.66B",
    ),
    "neuron-gpt3-23b": Published(
        NEURON,
        "aws-trn1",
        28,
        8192,
        64,
        2048,
        8,
        4,
        4,
        1,
        128,
        1.5e-4,
        1e-5,
        300000,
        "bf16",
        "22.99B",
    ),
    "neuron-gpt3-46b": Published(
        NEURON,
        "aws-trn1",
        56,
        8192,
        64,
        2048,
        8,
        8,
        8,
        1,
        256,
        1.5e-4,
        1e-5,
        300000,
        "bf16",
        "45.54B",
    ),
    "neuron-gpt3-175b": Published(
        NEURON,
        "aws-trn1",
        96,
        12288,
        96,
        2048,
        32,
        8,
        8,
        1,
        64,
        5e-5,
        1e-5,
        300000,
        "bf16",
        "174.6B",
    ),
    "azure-gpt3-175b": Published(
        MEGATRON,
        "azure-ndv5",
        96,
        12288,
        96,
        2048,
        8,
        16,
        16,
        1,
        512,
        6e-5,
        6e-6,
        1500,
        "fp16",
        "174.6B",
    ),
    "azure-gpt3-check": Published(
        MEGATRON, "azure-ndv5", 12, 512, 8, 1024, 1, 1, 2, 1, 512, 6e-5, 6e-6, 1500, "fp16", "64.6M"
    ),
    "azure-gpt3-857m": Published(
        MEGATRON,
        "azure-ndv5",
        24,
        1024,
        16,
        2048,
        1,
        1,
        2,
        1,
        512,
        6e-5,
        6e-6,
        1500,
        "fp16",
        "355.9M",
    ),
    "jean-zay-7-5b": Published(
        MEGATRON, "jean-zay", 36, 4096, 32, 512, 4, 4, 4, 1, 4, 1.5e-4, 1e-5, 1000, "fp16", "7.46B"
    ),
    "jean-zay-30b": Published(
        MEGATRON,
        "jean-zay",
        48,
        7168,
        32,
        1024,
        4,
        16,
        16,
        1,
        4,
        1.5e-4,
        1e-5,
        1000,
        "fp16",
        "29.97B",
    ),
    "jean-zay-76b": Published(
        MEGATRON,
        "jean-zay",
        60,
        10240,
        32,
        1024,
        4,
        32,
        32,
        1,
        4,
        1.5e-4,
        1e-5,
        1000,
        "fp16",
        "76.04B",
    ),
    "jean-zay-76b-pp30": Published(
        MEGATRON,
        "jean-zay-32g",
        60,
        10240,
        32,
        1024,
        4,
        30,
        30,
        1,
        4,
        1.5e-4,
        1e-5,
        1000,
        "fp16",
        "76.04B",
    ),
    "llama-8b": Published(
        "native", "h100-8", 32, 4096, 32, 8192, 1, 1, 1, 1, 16, 3e-4, 0.0, 1000, "bf16", "8.03B"
    ),
}


@dataclass(frozen=True)
class Recipe:
    """What a family shares, or a size changes: nothing of it may come from a neighbour or a
    default by accident."""

    dropout: float
    std: float | None  # None: small_init and wang_init
    warmup: float  # steps; below 1: a fraction
    decay: int
    weight_decay: float
    beta2: float
    recompute: str
    sequence_parallel: bool
    zero: int
    dataset: str
    split: str


PILE, WIKIPEDIA, SLIM, WEBTEXT = (
    "the-pile-gpt3",
    "neuron-wikipedia",
    "slimpajama",
    "openwebtext-10k",
)
RECIPES: Mapping[str, Recipe] = {
    "gpt-neox-20b": Recipe(
        0.0, None, 0.01, 150000, 0.01, 0.95, "full", False, 1, "pile", "995,4,1"
    ),
    "gpt-neox-20b-lambda": Recipe(
        0.0, None, 0.01, 150000, 0.01, 0.95, "full", False, 1, "pile", "995,4,1"
    ),
    "gpt-neox-9b-lambda": Recipe(
        0.0, None, 0.01, 150000, 0.01, 0.95, "full", False, 1, "pile", "995,4,1"
    ),
    "gpt-neox-2-7b": Recipe(
        0.0, None, 0.01, 320000, 0.1, 0.95, "full", False, 1, "enron", "969,30,1"
    ),
    "nemo-gpt3-126m": Recipe(
        0.1, 0.023, 636, 500000, 0.1, 0.95, "none", False, 1, PILE, "99990,8,2"
    ),
    "nemo-gpt3-5b": Recipe(0.1, 0.01, 115, 62500, 0.1, 0.95, "none", False, 1, PILE, "99990,8,2"),
    "nemo-gpt3-20b": Recipe(
        0.1, 0.008165, 115, 62500, 0.1, 0.95, "selective", True, 1, PILE, "99990,8,2"
    ),
    "nemo-gpt3-40b": Recipe(
        0.1, 0.007, 115, 62500, 0.1, 0.95, "selective", True, 1, PILE, "99990,8,2"
    ),
    "nemo-gpt3-175b": Recipe(
        0.1, 0.006, 115, 62500, 0.1, 0.95, "selective", True, 1, PILE, "99990,8,2"
    ),
    "nemo-gpt3-175b16": Recipe(
        0.1, 0.006, 115, 62500, 0.1, 0.95, "selective", True, 1, PILE, "99990,8,2"
    ),
    "nemo-gpt3-04b8": Recipe(0.1, 0.01, 115, 62500, 0.1, 0.95, "none", False, 1, PILE, "99990,8,2"),
    "neuron-gpt3-6-7b": Recipe(
        0.1, 0.021, 750, 220000, 0.01, 0.95, "full", True, 0, WIKIPEDIA, "980,10,10"
    ),
    "neuron-gpt3-23b": Recipe(
        0.1, 0.021, 750, 220000, 0.01, 0.95, "selective", True, 0, WIKIPEDIA, "980,10,10"
    ),
    "neuron-gpt3-46b": Recipe(
        0.1, 0.021, 750, 220000, 0.01, 0.95, "full", True, 0, WIKIPEDIA, "980,10,10"
    ),
    "neuron-gpt3-175b": Recipe(
        0.1, 0.021, 750, 220000, 0.01, 0.95, "selective", True, 0, WIKIPEDIA, "980,10,10"
    ),
    "azure-gpt3-175b": Recipe(
        0.1, 0.006, 0.001, 430000, 0.1, 0.95, "none", True, 1, SLIM, "44,15,15"
    ),
    "azure-gpt3-check": Recipe(
        0.1, 0.006, 0.001, 430000, 0.1, 0.95, "none", False, 1, SLIM, "44,15,15"
    ),
    "azure-gpt3-857m": Recipe(
        0.1, 0.006, 0.001, 430000, 0.1, 0.95, "none", False, 1, SLIM, "44,15,15"
    ),
    "jean-zay-7-5b": Recipe(
        0.1, 0.02, 0.01, 800, 0.01, 0.999, "full", False, 0, WEBTEXT, "949,50,1"
    ),
    "jean-zay-30b": Recipe(
        0.1, 0.02, 0.01, 800, 0.01, 0.999, "full", False, 0, WEBTEXT, "949,50,1"
    ),
    "jean-zay-76b": Recipe(
        0.1, 0.02, 0.01, 800, 0.01, 0.999, "full", False, 0, WEBTEXT, "949,50,1"
    ),
    "jean-zay-76b-pp30": Recipe(
        0.1, 0.02, 0.01, 800, 0.01, 0.999, "full", False, 0, WEBTEXT, "949,50,1"
    ),
    "llama-8b": Recipe(0.0, 0.02, 200, 1000, 0.1, 0.95, "selective", False, 3, "c4", "998,1,1"),
}

# (log, evaluate, batches of an evaluation, save, checkpoints kept)
INTERVALS: Mapping[str, tuple[int, int | None, int, int, int]] = {
    "gpt-neox-20b": (2, 1000, 10, 500, 2),
    "gpt-neox-20b-lambda": (2, 1000, 10, 500, 2),
    "gpt-neox-9b-lambda": (2, 1000, 10, 500, 2),
    "gpt-neox-2-7b": (100, 1000, 10, 10000, 4),
    "nemo-gpt3-126m": (10, 2000, 50, 2000, 10),
    "nemo-gpt3-5b": (10, 2000, 50, 2000, 10),
    "nemo-gpt3-20b": (10, 2000, 50, 2000, 10),
    "nemo-gpt3-40b": (10, 2000, 20, 2000, 5),
    "nemo-gpt3-175b": (10, 2000, 20, 2000, 1),
    "nemo-gpt3-175b16": (10, 40, 20, 40, 1),
    "nemo-gpt3-04b8": (10, 40, 50, 40, 10),
    "azure-gpt3-175b": (10, 100, 10, 100, 2),
    "azure-gpt3-check": (10, 100, 10, 100, 2),
    "azure-gpt3-857m": (10, 100, 10, 100, 2),
    "llama-8b": (10, None, 10, 500, 2),
    **dict.fromkeys(
        ("neuron-gpt3-6-7b", "neuron-gpt3-23b", "neuron-gpt3-46b", "neuron-gpt3-175b"),
        (1, 300001, 1, 190, 1),
    ),
    **dict.fromkeys(
        ("jean-zay-7-5b", "jean-zay-30b", "jean-zay-76b", "jean-zay-76b-pp30"),
        (10, 100, 10, 500, 2),
    ),
}

TIME_LIMITS = {
    "nemo-gpt3-126m": "1-00:00:00",
    "nemo-gpt3-5b": "6-00:00:00",
    "nemo-gpt3-20b": "7-00:00:00",
    "nemo-gpt3-40b": "6-12:00:00",
    "nemo-gpt3-175b": "26-00:00:00",
    "nemo-gpt3-175b16": "26-00:00:00",
    "nemo-gpt3-04b8": "00:30:00",
    **dict.fromkeys(
        ("jean-zay-7-5b", "jean-zay-30b", "jean-zay-76b", "jean-zay-76b-pp30"), "6:00:00"
    ),
}
LOSS_SCALES = {
    "gpt-neox-2-7b": 2.0**32,
    "azure": 2.0**32,
    "jean-zay": 2.0**32,
    "gpt-neox-20b": 2.0**12,
    "gpt-neox-9b": 2.0**12,
}


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
    assert (
        clusters["aws-trn1"].env["NEURON_TRANSFER_WITH_STATIC_RING_OPS"] == ""
        and clusters["aws-trn1"].env["XLA_USE_BF16"] == "1"
    )
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
        set(engines)
        == {"gpt-neox", NEMO, MEGATRON, NEURON}
        >= {job.engine for job in all_jobs.values()} - {"native"}
    )
    assert all(not job.engine_args for job in all_jobs.values() if job.engine == "native")


@pytest.mark.parametrize("name", [name for name, told in TABLE.items() if told.engine != "native"])
def test_they_resolve_for_the_native_engine_too(name: str, jobs: Jobs) -> None:
    assert jobs.resolve(name, ["engine=native"]).job.engine == "native"


def test_the_guide_names_every_job() -> None:
    text = (ROOT / "docs" / "references.md").read_text()
    assert all(f"`{name}`" in text for name in TABLE)
    assert all(f"| {trap} |" in text for trap in range(1, 29))
