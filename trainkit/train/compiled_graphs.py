"""Graphs that were compiled before the run: what they are compiled for, where they lie, and how a
rank takes them.

<root>/compiled/JOB/graphs.tar is the folder in which torch.compile keeps what it made (its FX graph
cache with the compiler's output), graphs.json what it was made for and its SHA-256. On each node it
is unpacked once, to the path at which it was made: paths are a part of what torch looks up.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import os
import platform
import shutil
import subprocess
import tarfile
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from trainkit.base.documents import canonical_json, document, read_document
from trainkit.base.errors import ConfigError
from trainkit.base.files import sha256_file, write_json
from trainkit.base.locks import locked
from trainkit.jobs.schema import Job

SCHEMA = "graphs/1"
VARIABLE = "TORCHINDUCTOR_CACHE_DIR"
# of the model: they change no block
UNREAD = ("name", "num_layers", "init_method", "init_method_std", "output_layer_init_method")
OF_TRAINING = (
    "micro_batch_size",
    "precision",
    "recompute_granularity",
    "recompute_every",
    "z_loss",
)
GraphFields = Mapping[str, str | int | float | bool | None]


@dataclass(frozen=True)
class GraphFiles:
    """Where the graphs of a job lie."""

    folder: Path

    @classmethod
    def of(cls, job: Job) -> GraphFiles:
        return cls(Path(job.cluster.root or ".").absolute() / "compiled" / job.name)

    @property
    def archive(self) -> Path:
        return self.folder / "graphs.tar"

    @property
    def record(self) -> Path:
        return self.folder / "graphs.json"


def graph_fields(job: Job) -> GraphFields:
    """What graphs depend on: shapes, dtypes, layout, options, torch, Python and the compiler."""
    p = job.parallelism
    shape = {
        f"model.{key}": value
        for key, value in job.model.model_dump(mode="json").items()
        if key not in UNREAD and not isinstance(value, dict | list)
    }
    training = {f"training.{key}": getattr(job.training, key) for key in OF_TRAINING}
    return {
        **shape,
        **training,
        "tensor_model_parallel_size": p.tensor_model_parallel_size,
        "pipeline_model_parallel_size": p.pipeline_model_parallel_size,
        "sequence_parallel": p.sequence_parallel,
        "zero_stage": p.zero_stage,
        "data_parallel_size": job.data_parallel_size,
        "device": job.cluster.device.name,
        "kernels": job.kernels,
        "torch": _version("torch"),
        "triton": _version("triton"),
        "python": platform.python_version(),
        "compiler": _compiler() if job.cluster.device_type == "cpu" else "",
    }


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


@functools.cache
def _compiler() -> str:
    """The first line of what the C++ compiler says it is; torch takes that of CXX, or g++."""
    try:
        argv = [os.environ.get("CXX", "g++"), "--version"]
        done = subprocess.run(argv, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.partition("\n")[0]


def machine_fields(job: Job) -> GraphFields:
    """What graphs are made for besides: of a GPU its compute capability; of a CPU its vectors and
    the threads of a rank; which of trainkit's own operations stand in them."""
    import torch

    from trainkit.ops.kernels import choose

    used = choose(job.kernels, job.cluster.device_type).kernels.name
    if job.cluster.device_type == "cuda":
        major, minor = torch.cuda.get_device_capability()
        return {"capability": f"{major}.{minor}", "kernels in use": used}
    vectors = torch.backends.cpu.get_cpu_capability()
    threads = torch.get_num_threads()
    return {"capability": vectors, "threads": threads, "kernels in use": used}


def node_folder(fields: GraphFields) -> Path:
    """Where a node unpacks the graphs of these fields: the same path on each."""
    digest = hashlib.sha256(canonical_json(dict(fields)).encode()).hexdigest()[:16]
    return Path(tempfile.gettempdir()) / f"trainkit-compiled-{os.getuid()}" / digest


def difference(recorded: GraphFields, asked: GraphFields) -> str:
    """The first field in which graphs differ from those that are wanted, in words; "" for none."""
    for name, value in asked.items():
        if recorded.get(name) != value:
            return f"{name} was {recorded.get(name)!r} and is {value!r}"
    return ""


def pack(folder: Path, files: GraphFiles, fields: GraphFields, **more: object) -> None:
    """Put what was compiled in `folder` into a job's files; what is there is whole or absent."""
    files.folder.mkdir(parents=True, exist_ok=True)
    files.record.unlink(missing_ok=True)
    made = files.archive.with_name(f".{files.archive.name}.{os.getpid()}")
    try:
        with tarfile.open(made, "w") as archive:
            archive.add(folder, arcname=".", filter=_without_locks)
        digest = sha256_file(made)
        os.replace(made, files.archive)
    finally:
        made.unlink(missing_ok=True)
    values = {"fields": dict(fields), "sha256": digest, **more}
    write_json(files.record, document(SCHEMA, **values))


def _without_locks(entry: tarfile.TarInfo) -> tarfile.TarInfo | None:
    if entry.name.endswith(".lock") or "/locks" in entry.name:
        return None
    return entry


def take(job: Job) -> str:
    """Let torch.compile of this process find a job's graphs; called before the first compilation.
    Returns why it will not, "" where it will."""
    files = GraphFiles.of(job)
    fields = graph_fields(job)
    try:
        record = read_document(files.record, SCHEMA)
    except ConfigError as error:
        return f"{error.list[0].message}; invoke precompile {job.name} makes them"
    asked = {**fields, **machine_fields(job)}
    if other := difference(record["fields"], asked):
        return f"they were compiled for another job or machine: {other}"
    folder = node_folder(fields)
    folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    if folder.parent.stat().st_uid != os.getuid():
        return f"{folder.parent} is another user's"
    with locked(folder.with_suffix(".lock"), {"job": job.name}):
        marker = folder / "sha256"
        if not marker.is_file() or marker.read_text() != record["sha256"]:
            try:
                if sha256_file(files.archive) != record["sha256"]:
                    return f"{files.archive} is damaged"
                _unpack(files.archive, folder, record["sha256"])
            except (OSError, tarfile.TarError) as error:
                return f"{files.archive} cannot be unpacked: {error}"
    os.environ[VARIABLE] = str(folder)
    return ""


def _unpack(archive: Path, folder: Path, digest: str) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    fresh = folder.with_suffix(f".{os.getpid()}")
    shutil.rmtree(fresh, ignore_errors=True)
    try:
        with tarfile.open(archive) as content:
            content.extractall(fresh, filter="data")
        (fresh / "sha256").write_text(digest)
        os.replace(fresh, folder)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)


def graph_cache_counts() -> dict[str, int]:
    """Graphs that torch.compile found in its cache, and those that it compiled."""
    from torch._dynamo.utils import counters

    found = counters["inductor"]
    return {"hits": found["fxgraph_cache_hit"], "misses": found["fxgraph_cache_miss"]}


def compilation_words() -> str:
    """What torch.compile found in its cache on this rank, and on all ranks, which call it
    together."""
    import torch
    import torch.distributed as dist

    own = graph_cache_counts()
    counts = torch.tensor(list(own.values()))
    dist.all_reduce(counts)
    hits, misses = counts.tolist()
    return (
        f"compiled: graph hits {own['hits']}, graph misses {own['misses']}; all ranks: hits"
        f" {hits}, misses {misses}"
    )
