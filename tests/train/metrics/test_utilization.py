"""MFU has a known peak or there is none, and memory is what lies there."""

from __future__ import annotations

import ctypes
import platform
from typing import Any

import pytest
import torch
from torch import nn

from tests.distributed import call
from trainkit.base.process import FlatHeap
from trainkit.jobs.devices import Device, built_in_device
from trainkit.jobs.schema import Cluster, Dataset, Job, Model, Training
from trainkit.plan.arithmetic import hardware_flops_per_token_of, model_flops_per_token_of
from trainkit.train.metrics.utilization import Utilization, device_row
from trainkit.train.parallel.memory import STATUS, MemoryStats, resident_memory
from trainkit.train.parallel.shards import sharded_parameters

CPU = torch.device("cpu")
LLAMA = Model(
    family="llama",
    num_layers=32,
    hidden_size=4096,
    num_attention_heads=32,
    num_query_groups=8,
    ffn_hidden_size=14336,
    seq_length=4096,
)


def job(device: str, ranks: int, **training: Any) -> Job:
    return Job(
        name="j",
        cluster=Cluster(
            name="c",
            device=built_in_device(device),
            ranks_per_node=ranks,
            gpus_per_node=ranks if device != "cpu" else 0,
        ),
        model=LLAMA.model_copy(update={"name": "m", "vocab_size": 128256}),
        dataset=Dataset(name="mock", source="mock"),
        training=Training.model_validate({"train_iters": 10, "lr": 1e-3, **training}),
    )


@pytest.mark.parametrize("ranks", [1, 4])
def test_a_published_run(ranks: int) -> None:
    """Llama-3-8B at 10,471 tokens/s on each H200: 51.1 % of 989.4 TFLOP/s with attention counted
    causally."""
    utilization = Utilization(
        job("h200-sxm-141gb", ranks, precision="bf16", recompute_granularity="full"), 128256, CPU
    )
    found = utilization.throughput(10471.0 * ranks)
    assert found["mfu"] == pytest.approx(0.511, abs=5e-4)
    assert found["model_tflops"] == pytest.approx(
        10471 * model_flops_per_token_of(LLAMA, 128256) / 1e12
    )
    training = Training(train_iters=1, lr=1.0, recompute_granularity="full")
    assert found["hardware_tflops"] == pytest.approx(
        10471 * hardware_flops_per_token_of(LLAMA, 128256, training) / 1e12
    )
    assert (
        isinstance(found["hfu"], float)
        and isinstance(found["mfu"], float)
        and 1.2 < found["hfu"] / found["mfu"] < 4 / 3
    )
    assert found["peak"] == "989.4 TFLOP/s (H200 SXM 141 GB, bf16)"


@pytest.mark.parametrize(
    ("device", "precision"), [("cpu", "fp32"), ("cuda", "bf16"), ("v100-sxm-16gb", "bf16")]
)
def test_without_a_known_peak_there_is_no_mfu(device: str, precision: str) -> None:
    found = Utilization(job(device, 1, precision=precision), 128256, CPU).throughput(100.0)
    assert (found["mfu"], found["hfu"], found["peak"]) == (None, None, None)
    assert (
        found["model_tflops"]
        == found["hardware_tflops"]
        == pytest.approx(100 * model_flops_per_token_of(LLAMA, 128256) / 1e12)
    )


def test_precisions_have_peaks_of_their_own() -> None:
    peaks = [
        Utilization(job("v100-sxm-16gb", 1, precision=precision), 128256, CPU).peak_tflops
        for precision in ("fp16", "fp32")
    ]
    assert peaks == [125.0, 15.7]


@pytest.mark.parametrize(
    ("wanted", "reported", "row"),
    [
        ("cpu", None, None),
        ("cuda", "NVIDIA H100 80GB HBM3", "h100-sxm-80gb"),
        ("cuda", "Somebody's GPU", None),
        ("cuda", "NVIDIA H200", "h200-sxm-141gb"),
        ("cuda", "NVIDIA GH200 480GB", None),
        ("cuda", "NVIDIA GB200", None),
        ("cuda", "NVIDIA H200 NVL", None),
        ("cuda", "NVIDIA A100-SXM4-40GB MIG 1g.5gb", None),
        ("a100-sxm-40gb", "NVIDIA A100-SXM4-40GB", "a100-sxm-40gb"),
        ("a100-sxm-40gb", "A100 of a cloud", "a100-sxm-40gb"),
        ("a100-sxm-40gb", "NVIDIA H100 80GB HBM3", None),
    ],
)
def test_the_row_of_a_device(wanted: str, reported: str | None, row: str | None) -> None:
    assert device_row(built_in_device(wanted), reported) == (built_in_device(row) if row else None)


def test_a_row_of_ones_own_is_believed_where_torch_says_the_same() -> None:
    mine = Device(name="slow-h100", reported_as=("H100 80GB HBM3",), peak_tflops={"bf16": 700.0})
    assert device_row(mine, "NVIDIA H100 80GB HBM3") is mine
    assert device_row(mine, "NVIDIA H200") is None


def test_memory_by_kind() -> None:
    module = nn.Linear(7, 5)
    moments = [torch.zeros(5, 7), torch.zeros(5, 7, dtype=torch.float64), torch.zeros(5)]
    held = sharded_parameters(module, 1)
    found = MemoryStats(held, moments, CPU).now()
    assert (found["parameters"], found["gradients"], found["optimizer"]) == (
        160,
        160,
        140 + 280 + 20,
    )
    assert MemoryStats(held, moments, CPU, accumulates=True).now()["gradients"] == 320  # in fp64
    assert found["max_resident"] >= found["resident"] > 2**20


def test_resident_memory_is_read_from_proc() -> None:
    status = (
        "Name:\tpython\nState:\tR (running)\nVmHWM:\t    2048 kB\nVmRSS:\t    1024"
        " kB\nThreads:\t1\n"
    )
    assert resident_memory(status) == {"resident": 2**20, "max_resident": 2**21}
    assert resident_memory("Name:\tkthreadd\n") == {}


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another malloc")
def test_a_heap_with_holes_goes_back_to_what_it_was() -> None:
    first, torn, then = call("tests.train.metrics.test_utilization:tear_and_look")
    assert torn > 1.5 * first and then < 1.1 * first


def tear_and_look() -> tuple[int, int, int]:
    """Resident memory at first, after many blocks were freed of which some keep the heap's top
    where it is, and after the heap was looked at."""
    libc = ctypes.CDLL(None)
    libc.malloc.restype = ctypes.c_void_p
    libc.mallopt(-4, 0)  # M_MMAP_MAX: all from the heap, as a rank has it
    libc.mallopt(-1, 2**31 - 1)  # M_TRIM_THRESHOLD
    heap = FlatHeap()
    heap.before_step()
    first = resident_memory(STATUS.read_text())["resident"]
    blocks = [libc.malloc(2**20) for _ in range(first // 2**20)]
    for at in blocks:
        ctypes.memset(at, 1, 2**20)
    for at in blocks[:-1]:
        libc.free(ctypes.c_void_p(at))
    torn = resident_memory(STATUS.read_text())["resident"]
    heap.before_step()
    return first, torn, resident_memory(STATUS.read_text())["resident"]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_cuda_the_peak_begins_anew() -> None:
    device = torch.device("cuda", 0)
    memory = MemoryStats({}, [], device)
    big = torch.empty(2**28, dtype=torch.uint8, device=device)
    del big
    first, second = memory.now(), memory.now()
    assert first["max_allocated"] >= 2**28 > second["max_allocated"]
    assert first["max_reserved"] >= first["max_allocated"] and "resident" not in first
