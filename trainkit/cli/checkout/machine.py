"""What machine and which versions a benchmark was measured with. As a program: prints it as one
JSON object."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import time
from pathlib import Path

from trainkit.base.lazy_dataclasses import asdict, dataclass

# packages whose versions a table of results is read with
COMPARED = ("torch", "transformers", "litgpt", "lightning", "megatron-core", "numpy")
VECTOR_FLAGS = ("amx_bf16", "avx512_bf16", "avx512f", "avx2")  # the widest first


@dataclass(frozen=True)
class Machine:
    """A machine and the environment of this process.

    Args:
        cpu: the processor's model.
        cores: those that this process may use.
        gpus: their names.
        versions: of Python and of the packages in COMPARED that are installed.
        date: today, in UTC.
    """

    cpu: str
    cores: int
    gpus: list[str]
    versions: dict[str, str]
    date: str


def machine() -> Machine:
    """This machine."""
    from importlib.metadata import PackageNotFoundError, version

    versions = {"python": platform.python_version()}
    for package in COMPARED:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    cores = len(os.sched_getaffinity(0))
    date = time.strftime("%Y-%m-%d", time.gmtime())
    return Machine(_cpu_model(), cores, _gpu_names(), versions, date)


def describe(machine: Machine) -> str:
    """A machine in two lines."""
    versions = ", ".join(f"{name} {version}" for name, version in machine.versions.items())
    gpus = "; ".join(machine.gpus) or "no GPU"
    return f"{machine.cpu}, {machine.cores} cores; {gpus}; {machine.date}\n{versions}"


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    fields: dict[str, str] = {}  # of the first core
    for line in lines:
        key, _, value = line.partition(":")
        fields.setdefault(key.strip(), value.strip())
    model = fields.get("model name") or platform.processor() or platform.machine()
    if not fields.get("cpu family"):
        return model
    numbers = [f"family {fields['cpu family']}", f"model {fields.get('model', '?')}"]
    flags = fields.get("flags", "").split()
    numbers += [flag for flag in VECTOR_FLAGS if flag in flags][:1]
    return f"{model} ({', '.join(numbers)})"


def _gpu_names() -> list[str]:
    try:
        done = subprocess.run(
            ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            timeout=30,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return []
    return done.stdout.splitlines() if done.returncode == 0 else []


if __name__ == "__main__":
    json.dump(asdict(machine()), sys.stdout)
