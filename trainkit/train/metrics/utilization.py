"""How much of the device is used: model and hardware FLOP/s, MFU and HFU."""

from __future__ import annotations

import torch

from trainkit.jobs.devices import Device, is_reported_as, reported_device
from trainkit.jobs.schema import Job
from trainkit.plan.arithmetic import hardware_flops_per_token_of, model_flops_per_token_of
from trainkit.runs.metrics import Throughput


def device_row(wanted: Device, reported: str | None) -> Device | None:
    """The row of the device table that peaks are taken from; None where it is not known for sure.

    Args:
        wanted: cluster.device; one without peaks (cpu, cuda) is not believed.
        reported: what torch calls the GPU; None without one.

    A row that the job names holds for a GPU whose name the table does not know. Where torch's
    name belongs to another row, neither is believed.
    """
    found = reported_device(reported) if reported else None
    if not wanted.peak_tflops or found is None:
        if wanted.peak_tflops:
            return wanted
        return found
    own = bool(reported and wanted.reported_as) and is_reported_as(wanted, reported or "")
    return wanted if own or wanted.name == found.name else None


class Utilization:
    """FLOP/s per device from tokens/s of the whole world.

    Args:
        job: the job.
        vocab_size: rows of the embedding.
        device: this rank's device.

    `peak` names what MFU and HFU are measured against, "989.4 TFLOP/s (H200 SXM 141 GB, bf16)";
    None where the device or its peak at the job's precision is unknown. Then there is no MFU: a
    peak is never guessed.
    """

    def __init__(self, job: Job, vocab_size: int, device: torch.device) -> None:
        self.world_size = job.world_size
        self.model_flops = model_flops_per_token_of(job.model, vocab_size)
        self.hardware_flops = hardware_flops_per_token_of(job.model, vocab_size, job.training)
        precision = job.training.precision
        row = device_row(
            job.cluster.device,
            torch.cuda.get_device_name(device) if device.type == "cuda" else None,
        )
        if row:
            self.peak_tflops = row.peak_tflops.get(precision)
        else:
            self.peak_tflops = None
        self.peak = (
            f"{self.peak_tflops:g} TFLOP/s ({row.label}, {precision})"
            if row and self.peak_tflops
            else None
        )

    def throughput(self, tokens_per_second: float) -> Throughput:
        """What so many tokens a second of all devices mean for one."""
        model = tokens_per_second * self.model_flops / self.world_size / 1e12
        hardware = tokens_per_second * self.hardware_flops / self.world_size / 1e12
        return Throughput(
            model_tflops=model,
            hardware_tflops=hardware,
            mfu=model / self.peak_tflops if self.peak_tflops else None,
            hfu=hardware / self.peak_tflops if self.peak_tflops else None,
            peak=self.peak,
        )
