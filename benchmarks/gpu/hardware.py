"""Which GPU this is, whether torch can use it, and its power and clocks while a part runs.

Standard library only. torch is asked in a process of its own, for a process that has a CUDA
context holds memory of the GPU that is to be measured.
"""

from __future__ import annotations

import csv
import json
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

ASK_SECONDS = 180.0  # the first use of a driver that is not kept loaded takes long
SMI_SECONDS = 30.0
SAMPLE_MILLISECONDS = 500
OLDEST_DRIVER_HINT = "a CUDA build of torch needs a driver of its CUDA's major version or newer"

# asked with torch's Python; prints one JSON object
_ASK = """
import json, platform, sys
said = {"python": platform.python_version(), "torch": None, "cuda": None, "gpu": None, "why": ""}
try:
    import torch
    said |= {"torch": torch.__version__, "cuda": torch.version.cuda}
    if torch.version.cuda is None:
        said["why"] = f"torch {torch.__version__} was built without CUDA"
    else:
        torch.cuda.init()
        row = torch.cuda.get_device_properties(0)
        said |= {"gpu": row.name, "memory_bytes": row.total_memory,
                 "capability": f"{row.major}.{row.minor}",
                 "multiprocessors": row.multi_processor_count}
        torch.ones(1, device="cuda").add_(1).item()
except BaseException as error:
    said |= {"why": f"{type(error).__name__}: {error}".splitlines()[0], "gpu": None}
try:
    import triton
    said["triton"] = triton.__version__
except Exception:
    pass
json.dump(said, sys.stdout)
"""
SMI_FIELDS = (
    "name",
    "driver_version",
    "memory.total",
    "power.limit",
    "clocks.max.sm",
    "clocks.max.memory",
    "ecc.mode.current",
)
SAMPLED = ("power.draw", "clocks.sm", "clocks.mem", "temperature.gpu", "memory.used")


@dataclass(frozen=True)
class Hardware:
    """A machine as the document has it. None where nobody said.

    Args:
        gpu: torch's name of the GPU; None: torch can use none, `why` says the reason.
        why: the reason.
        memory_bytes: of the GPU.
        capability: CUDA compute capability, "9.0".
        torch, cuda, triton, python: versions.
        driver: of the GPU, as nvidia-smi says.
        cpu: the processor.
        nvidia_smi: its other figures, by its own names.
    """

    gpu: str | None
    why: str
    memory_bytes: int | None
    capability: str | None
    torch: str | None
    cuda: str | None
    triton: str | None
    python: str
    driver: str | None
    cpu: str
    nvidia_smi: dict[str, str]

    def words(self) -> str:
        """In two lines."""
        gpu = self.gpu or f"no GPU: {self.why}"
        if self.memory_bytes:
            gpu += f", {self.memory_bytes / 2**30:.1f} GiB"
        versions = f"driver {self.driver or 'n/a'}, CUDA {self.cuda or 'n/a'}, torch {self.torch}"
        versions += f", triton {self.triton or 'n/a'}, Python {self.python}"
        return f"{gpu}; {self.cpu}\n{versions}"


def hardware(python: str = sys.executable) -> Hardware:
    """This machine, by the torch that `python` has."""
    said = _ask_torch(python)
    smi = nvidia_smi()
    return Hardware(
        gpu=said.get("gpu"),
        why=_reason(str(said.get("why") or ""), smi),
        memory_bytes=said.get("memory_bytes"),
        capability=said.get("capability"),
        torch=said.get("torch"),
        cuda=said.get("cuda"),
        triton=said.get("triton"),
        python=str(said.get("python") or platform.python_version()),
        driver=smi.get("driver_version"),
        cpu=_cpu(),
        nvidia_smi=smi,
    )


def _ask_torch(python: str) -> dict[str, Any]:
    try:
        done = subprocess.run(
            [python, "-c", _ASK],
            capture_output=True,
            text=True,
            timeout=ASK_SECONDS,
            stdin=subprocess.DEVNULL,
            check=False,
        )
        return dict(json.loads(done.stdout))
    except subprocess.TimeoutExpired:
        return {"why": f"torch did not answer within {ASK_SECONDS:g} s"}
    except (OSError, ValueError):
        return {"why": f"{python} ended without an answer about torch"}


def _reason(why: str, smi: dict[str, str]) -> str:
    """What torch says, and what to do where it is the driver."""
    if "driver" in why.lower() and smi.get("driver_version"):
        return f"{why} (driver {smi['driver_version']}; {OLDEST_DRIVER_HINT})"
    return why


def nvidia_smi() -> dict[str, str]:
    """Its figures of the first GPU, by name; {} without it."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return {}
    argv = [program, f"--query-gpu={','.join(SMI_FIELDS)}", "--format=csv,noheader"]
    try:
        done = subprocess.run(
            argv, capture_output=True, text=True, timeout=SMI_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return {}
    rows = [row for row in csv.reader(done.stdout.splitlines()) if len(row) == len(SMI_FIELDS)]
    if done.returncode or not rows:
        return {}
    return {name: cell.strip() for name, cell in zip(SMI_FIELDS, rows[0], strict=True)}


def _cpu() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


@dataclass(frozen=True)
class Sampled:
    """One figure of nvidia-smi over a part: least, median and most of its samples."""

    least: float
    median: float
    most: float


class PowerLog:
    """nvidia-smi beside a part: power, clocks, temperature and memory, twice a second. Where there
    is none, nothing."""

    def __init__(self) -> None:
        self._program = shutil.which("nvidia-smi")
        self._child: subprocess.Popen[bytes] | None = None
        self._file = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the block
        self.sampled: dict[str, dict[str, float]] = {}

    def __enter__(self) -> PowerLog:
        if self._program:
            argv = [
                self._program,
                f"--query-gpu={','.join(SAMPLED)}",
                "--format=csv,noheader,nounits",
                f"--loop-ms={SAMPLE_MILLISECONDS}",
            ]
            self._child = subprocess.Popen(
                argv, stdout=self._file, stderr=subprocess.DEVNULL, stdin=subprocess.DEVNULL
            )
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._child is not None:
            self._child.terminate()
            try:
                self._child.wait(timeout=5)
            except subprocess.TimeoutExpired:
                self._child.kill()
                self._child.wait()
            self._file.seek(0)
            self.sampled = summary(self._file.read().decode(errors="replace"))
        self._file.close()


def summary(text: str) -> dict[str, dict[str, float]]:
    """Least, median and most of every column of nvidia-smi's lines; cells that are not numbers
    ("[N/A]") are left out."""
    columns: dict[str, list[float]] = {name: [] for name in SAMPLED}
    for row in csv.reader(text.splitlines()):
        if len(row) != len(SAMPLED):
            continue  # the last line may be cut
        for name, cell in zip(SAMPLED, row, strict=True):
            try:
                columns[name].append(float(cell))
            except ValueError:
                continue
    return {
        name: asdict(Sampled(min(found), statistics.median(found), max(found)))
        for name, found in columns.items()
        if found
    }


def today() -> str:
    """The date, in UTC."""
    return time.strftime("%Y-%m-%d", time.gmtime())
