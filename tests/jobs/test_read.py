"""Each key of jobs.toml is read by something; one that nothing reads would be a promise that
nobody keeps."""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import sys
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.jobs.jobs_toml import GOOD, Checkout, refused
from trainkit.jobs.schema import TABLES, Defaults, Table

CHECKOUT = Path(__file__).resolve().parents[2]
PACKAGE = CHECKOUT / "trainkit"
# Keys of several tables: an attribute of that name could be another table's, so the words that read
# it are named.
READERS = {
    ("Cluster", "python"): ("launch/slurm/batch_script.py", "job.cluster.python"),
    ("Container", "python"): ("engines/native.py", "job.container.python"),
    ("Cluster", "prolog"): ("launch/slurm/batch_script.py", "job.cluster.prolog"),
    ("Container", "prolog"): ("launch/containers", "container.settings.prolog"),
    ("Cluster", "slurm"): ("jobs/schema.py", "self.cluster.slurm"),
    ("StagePlace", "slurm"): ("launch/slurm/array_scripts.py", "asked.slurm"),
    ("Job", "slurm"): ("jobs/schema.py", "self.slurm"),
    ("Cluster", "memory_bytes"): ("plan/host.py", "job.cluster.memory_bytes"),
    ("Device", "memory_bytes"): ("plan/memory.py", "device.memory_bytes"),
    ("Cluster", "env"): ("jobs/schema.py", "self.cluster.env"),
    ("Container", "env"): ("jobs/schema.py", "self.container.env"),
    ("Job", "env"): ("jobs/schema.py", "self.env"),
    ("WatchLimits", "start"): ("launch/supervise/heartbeats.py", "limits.start"),
    ("ProfileSettings", "start"): ("train/metrics/profiler.py", "self.profile.start"),
    ("RopeScaling", "factor"): ("engines/megatron_lm/argv.py", "scaling.factor"),
    ("Halving", "factor"): ("experiment/sweep/opened.py", "halving.factor"),
    ("StagePlace", "nodes"): ("launch/remote_units.py", "asked.nodes"),
    ("Job", "nodes"): ("launch/hosts/selection.py", "job.nodes"),
    ("Filesystem", "path"): ("plan/storage.py", "tier.path"),
    ("Tokenizer", "path"): ("stages/dataset_units.py", "tokenizer.path"),
    ("EngineSource", "source"): ("cli/config/render_plan.py", "engine.source"),
    ("Dataset", "source"): ("stages/prep_data.py", "dataset.source"),
    ("EngineSource", "container"): ("cli/config/render_plan.py", "engine.container"),
    ("Container", "source"): ("images/importers", "plan.container.source"),
    ("Job", "container"): ("engines/native.py", "job.container"),
    ("Container", "args"): ("launch/containers", "settings.args"),
    ("Job", "args"): ("engines/megatron_lm/argv.py", "job.args"),
    ("EngineSource", "engine"): ("jobs/job_tables.py", "self.engine"),
    ("Job", "engine"): ("engines/registry.py", "job.engine"),
    ("EngineSource", "python"): ("engines/sources.py", "source.python"),
    ("Tokenizer", "type"): ("stages/dataset_units.py", "tokenizer.type"),
    ("RopeScaling", "type"): ("train/model/frequencies.py", "scaling.type"),
    ("Tokenizer", "vocab_size"): ("plan/planner.py", "tokenizer.vocab_size"),
    ("Model", "vocab_size"): ("plan/planner.py", "job.model.vocab_size"),
    ("Model", "ffn_hidden_size"): ("jobs/models.py", "self.ffn_hidden_size"),
    ("Experts", "ffn_hidden_size"): ("train/model/experts.py", "model.moe.ffn_hidden_size"),
    ("BlendPart", "dataset"): ("jobs/datasets.py", "part.dataset"),
    ("DataPhase", "dataset"): ("jobs/schema.py", "phase.dataset"),
    ("Job", "dataset"): ("plan/planner.py", "job.dataset"),
}
# tables that one file reads, or more
OF_FILES = {
    **{
        f"Kubernetes{name}": "launch/kubernetes/manifest.py launch/kubernetes/kubectl.py"
        for name in ("Options", "Volume", "Toleration", "Topology")
    },
    "EvaluationSettings": (
        "jobs/evaluations.py train/inference/evaluation_worker.py launch/supervise/evaluations.py"
    ),
    "Curation": "stages/prep_curation.py jobs/curation.py data/curate/funnel.py",
    "UrlStep": "data/curate/steps/url.py",
    "LanguageStep": "data/curate/steps/models.py",
    "ScoreStep": "data/curate/steps/models.py",
    "PiiStep": "data/curate/steps/pii.py",
    "LengthStep": "data/curate/steps/length.py",
    "DecontaminateStep": "data/curate/steps/benchmarks.py",
    "SampleStep": "data/curate/steps/sample.py",
    "FunctionStep": "data/curate/steps/own_function.py",
    "ExactStep": "data/curate/signatures.py stages/prep_curation.py",
    "MinHashStep": "data/curate/signatures.py stages/prep_curation.py",
}
# compiled rules take all their keys, and refuse one that they do not know
COMPILED = {"GopherQualityStep", "GopherRepetitionStep", "C4Step", "FinewebStep"}
# travel to the stage prep-data as JSON, and are read there by their keys
AS_DATA = {"Tokenizer", "Dataset"}


def tables() -> list[type[Table]]:
    """The tables of jobs.toml and those inside them."""
    found: list[type[Table]] = []

    def visit(table: type[Table]) -> None:
        if table not in found:
            found.append(table)
            for field in table.model_fields.values():
                for inner in parts(field.annotation):
                    visit(inner)

    every: list[type[Table]] = [*TABLES.values(), Defaults]
    for table in every:
        visit(table)
    return found


def parts(annotation: Any) -> Iterator[type[Table]]:
    """The tables in a type."""
    if isinstance(annotation, type) and issubclass(annotation, Table):
        yield annotation
    for inner in typing.get_args(annotation):
        yield from parts(inner)


def read_somewhere() -> tuple[set[str], set[str]]:
    """(attributes that the package reads, strings in it), the schema's own declarations left
    out."""
    attributes, strings = set(), set()
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
                attributes.add(node.attr)
            elif (
                isinstance(node, ast.Constant)
                and isinstance(node.value, str)
                and PACKAGE / "jobs" not in path.parents
            ):
                strings.add(node.value)
    return attributes, strings


def test_each_key_is_read() -> None:
    keys = [
        (table.__name__, key) for table in tables() for key in table.model_fields if key != "name"
    ]
    shared = [key for table, key in keys if table not in {*COMPILED, *OF_FILES}]
    several = {key for key in shared if shared.count(key) > 1}
    attributes, strings = read_somewhere()
    for table, key in keys:
        if (table, key) == ("Defaults", "job"):
            continue  # before there are models: Jobs.default_job
        if table in COMPILED or key == "step":
            continue
        if table in OF_FILES:
            texts = [(PACKAGE / name).read_text() for name in OF_FILES[table].split()]
            assert any(f".{key}" in text or f'"{key}"' in text for text in texts), (table, key)
            continue
        if key in several:
            where, words = READERS[table, key]
            files = [PACKAGE / where] if where.endswith(".py") else (PACKAGE / where).rglob("*.py")
            assert any(words in file.read_text() for file in files), (
                f"nothing in {where} reads {table}.{key}"
            )
        else:
            assert key in attributes or (table in AS_DATA and key in strings), (
                f"nothing reads {table}.{key}: use it, or put it into `planned`"
            )


RENAMED = "key_of_"


@pytest.mark.slow
def test_each_key_is_read_by_its_type(tmp_path: Path) -> None:
    """The same, without doubt: mypy names every reader of a key that is called otherwise.
    (Tables in tables stay; what is in them is looked at.)"""
    shutil.copytree(
        PACKAGE, tmp_path / "trainkit", ignore=shutil.ignore_patterns("__pycache__", "*.so")
    )
    shutil.copy(CHECKOUT / "pyproject.toml", tmp_path)
    scalars = {
        table.__name__: {
            key
            for key, field in table.model_fields.items()
            if key != "name" and not any(parts(field.annotation))
        }
        for table in tables()
        if table is not Defaults
    }
    for path in (tmp_path / "trainkit" / "jobs").glob("*.py"):
        lines = path.read_text().splitlines(keepends=True)
        classes = [
            node for node in ast.walk(ast.parse("".join(lines))) if isinstance(node, ast.ClassDef)
        ]
        for keys, node in (
            (scalars[table.name], node)
            for table in classes
            for node in table.body
            if table.name in scalars
        ):
            if (
                isinstance(node, ast.AnnAssign)
                and isinstance(node.target, ast.Name)
                and node.target.id in keys
            ):
                lines[node.lineno - 1] = lines[node.lineno - 1].replace(
                    node.target.id, RENAMED + node.target.id, 1
                )
        path.write_text("".join(lines))
    argv = [sys.executable, "-m", "mypy", "trainkit", "--cache-dir", str(tmp_path / "cache")]
    said = subprocess.run(argv, cwd=tmp_path, capture_output=True, text=True, check=False).stdout
    read = set(re.findall(r'"(\w+)" has no attribute "(\w+)"', said))
    assert len(read) > 100, said[-2000:]
    # as data they go into the spec of a unit, and are read as its attributes
    attributes, strings = read_somewhere()
    unread = {(table, key) for table, keys in scalars.items() for key in keys} - read
    assert {
        (table, key)
        for table, key in unread
        if not (table in AS_DATA and key in strings | attributes)
    } == set()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            "[devices.d]\nlink_gb_per_second = 3.0\n",
            "devices.d.link_gb_per_second is planned, but not in this version",
        ),
        (
            '[clusters.c.stages.build-container]\npartition = "p"\n',
            "the stage 'build-container' always runs where you type",
        ),
        (
            '[clusters.c.stages.prepdata]\npartition = "p"\n',
            "there is no stage 'prepdata'; stages: prep-data, index, weights, precompile,",
        ),
        (
            '[clusters.c.stages.build]\npartition = "p"\n',
            "the stage 'build' always runs where you type",
        ),
        (
            '[clusters.c.stages.engine-source]\npartition = "p"\n',
            "the stage 'engine-source' always runs where you type",
        ),
        (
            '[engines.megatron]\nsource = "x"\n',
            "there is no engine 'megatron'; engines: gpt-neox, megatron-bridge",
        ),
    ],
)
def test_what_nothing_reads_is_refused_with_words(
    text: str, words: str, checkout: Checkout
) -> None:
    (problem,) = checkout(GOOD + text).check()
    assert words in str(problem), problem


def test_refusals_reach_jobs(checkout: Checkout) -> None:
    text = GOOD + '\n[clusters.far]\nstages = { build = { partition = "p" } }\n'
    (words,) = refused(checkout(text), sets=["cluster=far"])
    assert "the stage 'build' always runs" in words
