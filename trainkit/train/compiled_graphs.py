"""Graphs that were compiled before the run: what they are compiled for, where they lie, and how a
rank takes them.

<root>/compiled/JOB/graphs.tar is the folder in which torch.compile keeps what it made (its FX graph
cache with the compiler's output), with ready/ (`ready_graphs`), graphs.json what it was made for
and its SHA-256, and that of each file in it. On each node it is unpacked once, to the path at which
it was made: paths are a part of what torch looks up.
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
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from trainkit.base.documents import canonical_json, document, read_document
from trainkit.base.errors import ConfigError, Exit, TrainkitError
from trainkit.base.files import (
    atomic_open,
    make_private_folder,
    remove_leftovers,
    sha256_file,
    sha256_tree,
    temporary_name,
    write_json,
)
from trainkit.base.lazy_dataclasses import dataclass
from trainkit.base.locks import locked
from trainkit.base.printable import warn
from trainkit.base.toolchain import triton_objection
from trainkit.jobs.schema import Job

if TYPE_CHECKING:
    from trainkit.train.ready_graphs import ReadyGraphs

SCHEMA = "graphs/2"
READY = "ready"  # the folder of those that need no compiler
VARIABLE = "TORCHINDUCTOR_CACHE_DIR"
# of the model: they change no block
UNREAD = (
    *("name", "num_layers", "init_method", "init_method_std", "output_layer_init_method"),
    *("parametrization", "mup_base_hidden_size"),
)
OF_TRAINING = (
    "micro_batch_size",
    "precision",
    "fp8_recipe",
    "recompute_granularity",
    "recompute_every",
    "z_loss",
    "deterministic",
)
# of the package: what graphs are made of
CODE = ("ops", "families", "train/model", "train/parallel", "train/torch_compat.py")
INSTRUCTIONS = ("avx", "amx", "sse", "ssse", "fma", "bmi", "asimd", "sve")  # /proc/cpuinfo's
# variables that the compilers read
ENVIRONMENT = (
    "ATEN_",
    "CXX",
    "OMP_NUM_THREADS",
    "TORCHDYNAMO_",
    "TORCHINDUCTOR_",
    "TORCH_COMPILE",
    "TRITON_",
)
GraphFields = Mapping[str, str | int | float | bool | None]


@dataclass(frozen=True)
class GraphFiles:
    """Where the graphs of a job lie."""

    folder: Path

    @classmethod
    def of(cls, job: Job) -> GraphFiles:
        return cls(job.cluster.root_folder.absolute() / "compiled" / job.name)

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
    cxx = {**os.environ, **job.environment}.get("CXX", "g++")  # as torch takes it
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
        "code": _code(),
        "torch": _version("torch"),
        "triton": _version("triton"),
        "python": platform.python_version(),
        "compiler": _version_line(cxx) if job.cluster.device_type == "cpu" else "",
        **_of_compilers(job.environment),
    }


def _of_compilers(environment: Mapping[str, str]) -> GraphFields:
    """What the compilers read of an environment; where they keep what they make is not part of
    it."""
    return {
        f"env.{name}": environment[name]
        for name in sorted(environment)
        if name.startswith(ENVIRONMENT) and name != VARIABLE
    }


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


@functools.cache
def _code() -> str:
    """Digest of the package's modules that graphs are made of: nothing is traced again where they
    are taken."""
    package = Path(__file__).parents[1]
    found = [path for name in CODE for path in _modules(package / name)]
    return sha256_tree(package, [str(path.relative_to(package)) for path in found])[:12]


def _modules(path: Path) -> list[Path]:
    return [path] if path.is_file() else list(path.rglob("*.py"))


@functools.cache
def _version_line(program: str) -> str:
    """The first line of what a compiler says it is."""
    try:
        argv = [program, "--version"]
        done = subprocess.run(argv, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.partition("\n")[0]


def machine_fields(job: Job) -> GraphFields:
    """What graphs are made for besides: of a GPU its compute capability; of a CPU its instructions,
    how wide its vectors are where programs can ask for that, and the threads of a rank; which of
    trainkit's own operations stand in them; and what the compilers read of the environment."""
    import torch

    from trainkit.ops.kernels import choose_for

    common: GraphFields = {
        "kernels in use": choose_for(job).kernels.name,
        **_of_compilers(os.environ),
    }
    if job.cluster.device_type == "cuda":
        major, minor = torch.cuda.get_device_capability()
        return {"capability": f"{major}.{minor}", **common}
    return {
        "capability": torch.backends.cpu.get_cpu_capability(),
        "processor": _processor(),
        "vector length": torch.cpu.get_capabilities().get("sve_max_length"),
        "threads": torch.get_num_threads(),
        **common,
    }


@functools.cache
def _processor() -> str:
    """The first processor's name, with a digest of its instruction sets: C++ is compiled for just
    these."""
    try:
        lines = Path("/proc/cpuinfo").read_text().partition("\n\n")[0].splitlines()
    except OSError:
        return platform.processor()
    pairs = (line.partition(":") for line in lines)
    values = {name.strip(): value.strip() for name, _, value in pairs}
    flags = values.get("flags", values.get("Features", "")).split()
    sets = sorted(flag for flag in flags if flag.startswith(INSTRUCTIONS))
    digest = hashlib.sha256(" ".join(sets).encode()).hexdigest()[:8]
    return f"{values.get('model name', platform.machine())} ({digest})"


def node_folder(fields: GraphFields) -> Path:
    """Where a node unpacks the graphs of these fields: the same path on each."""
    digest = hashlib.sha256(canonical_json(dict(fields)).encode()).hexdigest()[:16]
    return _of_this_user() / digest


def _of_this_user() -> Path:
    return Path(tempfile.gettempdir()) / f"trainkit-compiled-{os.getuid()}"


def difference(recorded: GraphFields, asked: GraphFields) -> str:
    """The first field in which graphs differ from those that are wanted, in words; "" for none."""
    for name in {**asked, **recorded}:
        if recorded.get(name) != asked.get(name):
            return f"{name} was {recorded.get(name)!r} and is {asked.get(name)!r}"
    return ""


def pack(folder: Path, files: GraphFiles, fields: GraphFields, **more: object) -> None:
    """Put what was compiled in `folder` into a job's files; what is there is whole or absent."""
    files.folder.mkdir(parents=True, exist_ok=True)
    files.record.unlink(missing_ok=True)  # first: without it the archive is nobody's
    remove_leftovers(files.archive)
    with (
        atomic_open(files.archive) as file,
        tarfile.open(fileobj=file, mode="w") as archive,
    ):
        archive.add(folder, arcname=".", filter=lambda each: each if _is_kept(each.name) else None)
    digest = sha256_file(files.archive)
    names = [str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()]
    sums = {name: sha256_file(folder / name) for name in names if _is_kept(name)}
    values = {"fields": dict(fields), "sha256": digest, "files": sums, **more}
    write_json(files.record, document(SCHEMA, **values))


def _is_kept(name: str) -> bool:
    return not (name.endswith(".lock") or "locks" in Path(name).parts)


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
        return f"they were compiled for another job or machine: {other}{_in_image(job)}"
    folder = node_folder(fields)
    try:
        make_private_folder(folder.parent)
        with locked(folder.with_suffix(".lock"), {"job": job.name}):
            if not _is_whole(folder, record["files"]):
                if sha256_file(files.archive) != record["sha256"]:
                    return f"{files.archive} is damaged"
                _unpack(files.archive, folder)
    except (OSError, tarfile.TarError) as error:
        return f"{files.archive} cannot be unpacked to {folder}: {error}"
    os.environ[VARIABLE] = str(folder)
    return ""


def _in_image(job: Job) -> str:
    """The way to graphs of the image's torch, Python and compiler."""
    box = job.container
    if box is None or box.stages_in_container:
        return ""
    return f"; containers.{box.name}.stages_in_container = true has them made in the image"


def take_graphs(job: Job) -> ReadyGraphs | None:
    """`take`, with a warning where it does not; the graphs that need no compiler."""
    from trainkit.train.ready_graphs import ReadyGraphs

    if why := take(job):
        warn(f"graphs compiled before are not used: {why}")
        return None
    return ReadyGraphs(node_folder(graph_fields(job)) / READY)


def keep_cache_private() -> None:
    """Have torch.compile of this process keep what it makes where only this user may write. torch's
    own place is a name in /tmp that everybody can guess: another user could have put code there
    that this process would run. What the environment names is left as it is."""
    if VARIABLE in os.environ:
        return
    folder = _of_this_user()
    try:
        make_private_folder(folder)
    except OSError as error:
        folder = Path(tempfile.mkdtemp(prefix="trainkit-compiled-"))
        warn(f"compiled code is kept in {folder}: {error}")
    os.environ[VARIABLE] = str(folder / "torch")


def prepare_to_compile(job: Job) -> ReadyGraphs | None:
    """What a rank does before its first compilation; the graphs that need no compiler. Raises
    TrainkitError (exit 7) where a GPU's have none."""
    compiles = job.training.compile
    if compiles and job.cluster.device_type == "cuda" and (why := triton_objection()):
        raise TrainkitError(f"training.compile: {why}", exit=Exit.HEALTH)
    graphs = take_graphs(job) if job.precompile else None
    if compiles:
        keep_cache_private()
    return graphs


def _is_whole(folder: Path, sums: Mapping[str, str]) -> bool:
    """Whether what was unpacked is what was packed; torch may have put more beside it."""
    try:
        return bool(sums) and all(sha256_file(folder / name) == sums[name] for name in sums)
    except OSError:
        return False


def _unpack(archive: Path, folder: Path) -> None:
    remove_leftovers(folder)
    shutil.rmtree(folder, ignore_errors=True)
    fresh = temporary_name(folder)
    try:
        with tarfile.open(archive) as content:
            _refuse_foreign(content)
            # what Python 3.14 does unasked; before 3.11.4 there is none
            content.extraction_filter = getattr(tarfile, "data_filter", None)
            content.extractall(fresh)
        os.replace(fresh, folder)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)


def _refuse_foreign(archive: tarfile.TarFile) -> None:
    """Raise tarfile.TarError unless it holds files and folders alone, below its own."""
    for entry in archive:
        path = PurePosixPath(entry.name)
        if not (entry.isreg() or entry.isdir()) or path.is_absolute() or ".." in path.parts:
            raise tarfile.TarError(f"{entry.name!r} has no place in it")


def graph_cache_counts(graphs: ReadyGraphs) -> dict[str, int]:
    """Graphs that were found, and those that were compiled."""
    from torch._dynamo.utils import counters

    found = counters["inductor"]
    return {
        "hits": graphs.hits + found["fxgraph_cache_hit"],
        "misses": graphs.misses + found["fxgraph_cache_miss"],
    }


def agree_on_graphs(graphs: ReadyGraphs) -> None:
    """Called by all ranks together once they have loaded theirs. Where one lacks a graph that it
    should have, none takes any: at its first use a graph is computed twice, and what is computed
    may talk to other ranks."""
    import torch
    import torch.distributed as dist

    all_there = torch.tensor(int(graphs.folder is not None and not graphs.misses))
    dist.all_reduce(all_there, dist.ReduceOp.MIN)
    if not all_there:
        graphs.forget()


def report_compilation(graphs: ReadyGraphs, *, prints: bool) -> None:
    """Print what was found on this rank, and on all ranks, which call it together after a step:
    once."""
    if graphs.reported:
        return
    graphs.reported = True
    import torch
    import torch.distributed as dist

    own = graph_cache_counts(graphs)
    counts = torch.tensor(list(own.values()))
    dist.all_reduce(counts)
    hits, misses = counts.tolist()
    if prints:
        print(
            f"compiled: graph hits {own['hits']}, graph misses {own['misses']}; all ranks: hits"
            f" {hits}, misses {misses}",
            flush=True,
        )
