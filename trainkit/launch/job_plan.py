"""The plan of a job with what is prepared, free and measured on this machine."""

from __future__ import annotations

import contextlib
import glob
import os
import shutil
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

from trainkit.base.documents import read_document
from trainkit.base.errors import ConfigError
from trainkit.data.fetch.ranges import expand
from trainkit.data.indexed.paths import DataFolder
from trainkit.engines.registry import ENGINES
from trainkit.jobs.resolved import read_job
from trainkit.jobs.schema import Dataset, Job
from trainkit.plan.measured import Measured, layout_key
from trainkit.plan.mixtures import planned_reads
from trainkit.plan.planner import Plan, PreparedData, make_plan
from trainkit.plan.time.of_job import estimate_step, host_estimate
from trainkit.runs.folder import RunFolder
from trainkit.runs.summary import summarize_run


def plan_of(job: Job) -> Plan:
    """The plan of a job by its engine's rules, with what is prepared, free and measured here."""
    return make_plan(
        job, rules=ENGINES[job.engine].rules, prepared=prepared(job), measured=last_measured(job)
    )


def prepared(job: Job) -> PreparedData:
    """What of a job is there already. Raises ConfigError for a prepared dataset of another version.

    The disk counts where ranks run on this machine for sure: GPUs of a local cluster may be
    those of another one that is planned for.
    """
    root = job.cluster.root_folder
    manifest = DataFolder(root, job.dataset).manifest if job.dataset.tokenizer is not None else None
    if manifest is not None and manifest.is_file():
        found = read_document(manifest, "dataset/1")
    else:
        found = {}
    here = job.cluster.launcher_traits.one_machine and job.cluster.device_type == "cpu"
    if here:
        free = _free_bytes(root)
        memory = machine_bytes()
        cores = len(os.sched_getaffinity(0))
    else:
        free = None
        memory = None
        cores = None
    ids = found.get("vocab_size") or _ids_of_files(job)
    if found:
        tokens, text = found.get("tokens"), None
    else:
        tokens, text = _corpus_here(job.dataset)
    return PreparedData(ids, tokens, text, free, memory, cores, _tokens_read(job))


def _tokens_read(job: Job) -> dict[str, int]:
    """Tokens of what training reads, where the plan needs them of every dataset."""
    found: dict[str, int] = {}
    for dataset in job.training_datasets if planned_reads(job, {}) else ():
        for part in [part.dataset for part in dataset.blend.values()] or [dataset]:
            if part.tokenizer is None:
                continue
            manifest = DataFolder(job.cluster.root_folder, part).manifest
            made = read_document(manifest, "dataset/1") if manifest.is_file() else {}
            if tokens := made.get("tokens") or _corpus_here(part)[0]:
                found[part.name] = tokens
    return found


def _corpus_here(dataset: Dataset) -> tuple[int | None, int | None]:
    """(tokens of pairs, bytes of plain text) of a dataset that was not prepared, by the sizes of
    its files; None for what they do not say, and where they are not all here."""
    indexed = dataset.source == "indexed"
    found: list[Path] = []
    for pattern in (text for given in dataset.prefixes or dataset.paths for text in expand(given)):
        matches = glob.glob(f"{pattern}.idx" if indexed else pattern, recursive=True)
        if not matches:
            return None, None
        found += map(Path, matches)
    if not found:
        return None, None
    if not indexed:
        plain = all(path.name.endswith((".jsonl", ".json", ".txt")) for path in found)
        return None, sum(path.stat().st_size for path in found) if plain else None
    from trainkit.data.indexed.format import read_header
    from trainkit.data.indexed.paths import bin_path

    tokens = 0
    for path in found:
        try:
            with path.open("rb", buffering=0) as file:
                width = read_header(path, file).dtype.itemsize
            tokens += bin_path(path.with_suffix("")).stat().st_size // width
        except (ConfigError, OSError):  # said when the data are prepared
            return None, None
    return tokens, None


def _ids_of_files(job: Job) -> int | None:
    """Ids of a tokenizer that is not prepared, where no table says how many and the files that it
    will be made of are here. Raises ConfigError (exit 6) for files that are not tokenizers."""
    settings = job.dataset.tokenizer
    if settings is None or settings.type == "bpe" or settings.vocab_size or job.model.vocab_size:
        return None
    files = (settings.path, settings.vocab_file, settings.merge_file)
    if not all(Path(path).is_file() for path in files if path):
        return None
    from trainkit.data.tokenizer import given_tokenizer

    return given_tokenizer(settings).get_vocab_size()


def machine_bytes(root: Path = Path("/")) -> int | None:
    """Memory of this machine, or of the cgroup that this process may use less of; None where the
    system does not say.

    Args:
        root: of /proc and /sys.
    """
    try:
        known = [
            int(line.split()[1]) * 1024
            for line in (root / "proc/meminfo").read_text().splitlines()
            if line.startswith("MemTotal:")
        ]
        group = next(
            (
                line.split(":", 2)[2]
                for line in (root / "proc/self/cgroup").read_text().splitlines()
                if line.startswith("0::")
            ),
            "/",
        )
    except (OSError, ValueError, IndexError):
        return None
    for folder in (PurePosixPath(group), *PurePosixPath(group).parents):
        with contextlib.suppress(OSError, ValueError):  # "max", or no such controller
            known.append(
                int((root / "sys/fs/cgroup" / folder.relative_to("/") / "memory.max").read_text())
            )
    return min(known, default=None)


def _free_bytes(root: Path) -> int | None:
    there = next(
        (folder for folder in (root.absolute(), *root.absolute().parents) if folder.is_dir()), None
    )
    return shutil.disk_usage(there).free if there else None


def _runs_of(job: Job) -> Iterator[tuple[RunFolder, Job]]:
    """Runs of this job on this cluster that have metrics, newest first; those of another version of
    trainkit cannot be compared."""
    folder = job.cluster.root_folder / "runs" / job.name
    try:
        ids = sorted(
            (path.name for path in folder.iterdir() if (path / "job.json").is_file()), reverse=True
        )
    except OSError:
        return
    for name in ids:
        run = RunFolder(folder / name)
        try:
            ran = read_job(run.job)
        except ConfigError:
            continue
        if ran.cluster.name == job.cluster.name and run.metrics.is_file():
            yield run, ran


def last_measured(job: Job) -> Measured | None:
    """What the newest run of this job on this cluster took, and what its plan had said; one of
    the same layout before others. None without any."""
    others = []
    for run, ran in _runs_of(job):
        if layout_key(ran) != layout_key(job):
            others.append((run, ran))
        elif found := _measured(run, ran, True):
            return found  # the rest, perhaps hundreds, need not be read
    return next(filter(None, (_measured(*each, False) for each in others)), None)


def _measured(run: RunFolder, ran: Job, same_layout: bool) -> Measured | None:
    """A run in figures; None where it has no speed."""
    summary = summarize_run(run)
    if summary.tokens_per_second is None:
        return None
    planned = _planned(run)
    memory = planned.get("memory") or {}
    speed = (planned.get("duration") or {}).get("speed") or {}
    return Measured(
        run=run.id,
        same_layout=same_layout,
        tokens_per_second=summary.tokens_per_second,
        peak_bytes=summary.peak_bytes,
        checkpoint_bytes=_checkpoint_bytes(run.checkpoints),
        planned_tokens_per_second=speed.get("tokens_per_second"),
        planned_peak_bytes=memory.get("fullest_rank", {}).get("total_bytes"),
        planned_checkpoint_bytes=planned.get("checkpoint_bytes"),
        modelled_tokens_per_second=_modelled(ran, planned.get("padded_vocab_size")),
    )


def measured_speeds(job: Job) -> dict[int, float]:
    """Tokens a second of the fastest run of this job on this cluster, by its nodes."""
    best: dict[int, float] = {}
    for run, ran in _runs_of(job):
        speed = summarize_run(run).tokens_per_second
        if speed is not None:
            best[ran.nodes] = max(best.get(ran.nodes, 0.0), speed)
    return best


def _modelled(ran: Job, vocab: int | None) -> float | None:
    """Tokens a second of a run's layout by today's time model; on CPUs in its own units."""
    if not vocab:
        return None
    rules = ENGINES[ran.engine].rules
    cores = prepared(ran).cores
    estimate = estimate_step(ran, rules, vocab)
    if estimate is None and ran.cluster.device.kind == "cpu":
        estimate = host_estimate(ran, vocab, cores)
    if estimate is None:
        return None
    return ran.global_batch_size * ran.model.seq_length / estimate.time.seconds


def _planned(run: RunFolder) -> dict[str, Any]:
    """What the run's own plan.json says; nothing where it is not there or of another version."""
    try:
        return read_document(run.plan, "plan/1")
    except ConfigError:
        return {}


def _checkpoint_bytes(checkpoints: Path) -> int | None:
    """Tensor bytes of the newest checkpoint, from its manifest; None where there is none that
    can be read."""
    for manifest in sorted(checkpoints.glob("step-*/manifest.json"), reverse=True):
        try:
            tensors = read_document(manifest, "checkpoint/1")["tensors"]
        except ConfigError:
            continue
        return sum(int(chunk["bytes"]) for tensor in tensors.values() for chunk in tensor["chunks"])
    return None
