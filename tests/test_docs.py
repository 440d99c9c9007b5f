"""The guides in docs/: their TOML is what the schema takes, their keys and commands exist."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import get_type_hints

import numpy as np
import tomli
import yaml

from tests.kubernetes.kube_project import RIGHTS_IN_POD
from tests.train.layout_cases import LONG, in_fp32, limit
from trainkit.cli.tasks import namespace
from trainkit.data.indexed.dataset import IndexedWriter
from trainkit.jobs.clusters import WatchLimits
from trainkit.jobs.kubernetes import KubernetesOptions
from trainkit.jobs.load import load
from trainkit.jobs.schema import Job, Model, Parallelism, RetrySettings, Training
from trainkit.launch.hosts.selection import choose_hosts, load_hosts
from trainkit.launch.kubernetes.cluster_checks import QUEUE_RIGHTS, RIGHTS
from trainkit.runs.metrics import MetricsRow

DOCS = Path(__file__).resolve().parent.parent / "docs"
GUIDES = sorted(DOCS.glob("*.md"))


def tables(text: str) -> list[dict[str, dict[str, dict[str, object]]]]:
    """The documents in a guide's ```toml blocks."""
    return [
        tomli.loads(block)
        for block in re.findall(r"^```toml\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    ]


def test_the_keys_of_the_training_guide() -> None:
    found = tables((DOCS / "training.md").read_text())
    assert len(found) >= 4
    for document in found:
        for model in document.get("models", {}).values():
            Model.model_validate(model)
        for job in document.get("jobs", {}).values():
            assert set(job) <= set(Job.model_fields)
            if "training" in job:
                Training.model_validate(job["training"])


def test_the_run_folder_names_every_metric() -> None:
    metrics = (DOCS / "run-folder.md").read_text().partition("## Metrics")[2]
    assert not [key for key in get_type_hints(MetricsRow) if f"`{key}`" not in metrics]


def test_the_guide_to_parallelism() -> None:
    """Its keys exist, all keys are in it, and its table is that of the cases which the slow test
    compares."""
    text = (DOCS / "parallelism.md").read_text()
    for document in tables(text):
        for job in document["jobs"].values():
            Parallelism.model_validate(job["parallelism"])
            Training.model_validate(job["training"])
    assert all(f"`{key}" in text for key in Parallelism.model_fields)
    rows = re.findall(r"^\| (.+?) \| (\d)" + r" \| (\S+)" * 6 + r" \|$", text, re.MULTILINE)
    assert {name: int(ranks) for name, ranks, *_ in rows} == {
        name: case.ranks for name, case in LONG.items()
    }
    for name, _, *differences in rows:
        limits = [limit(LONG[name])] * 3 + [limit(in_fp32(LONG[name]))] * 3
        assert all(
            float(difference) <= most for difference, most in zip(differences, limits, strict=True)
        ), name


def test_the_guide_to_sample_order_is_a_jobs_toml(tmp_path: Path) -> None:
    """Its tables together resolve, and its Python block runs on a pair of that name."""
    text = (DOCS / "sample-order.md").read_text()
    base = (
        "[clusters.here]\n[models.demo]\nnum_layers = 1\nhidden_size = 32\nnum_attention_heads ="
        " 2\nseq_length = 16\nvocab_size = 512\n"
    )
    (tmp_path / "jobs.toml").write_text(
        base + "\n".join(re.findall(r"^```toml\n(.*?)^```", text, re.MULTILINE | re.DOTALL))
    )
    jobs = load(tmp_path, {})
    assert jobs.resolve("as-megatron").job.sample_order == "megatron"
    assert jobs.resolve("from-files").job.dataset.blend["web"].dataset.valid_files == 15
    annealed = jobs.resolve("annealed").job
    assert annealed.steps_by_phase == [45_000, 5_000] and not jobs.check()
    with IndexedWriter(tmp_path / "tokens/code_text_document", np.uint16) as writer:
        writer.add_documents(np.arange(400), np.full(40, 10))
    (code,) = re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (0, "40 400 uint16\n"), done.stderr


def test_the_guide_to_clusters(tmp_path: Path) -> None:
    """Its tables are a jobs.toml, its hostfile is one, and its commands have the words that
    tasks have."""
    text = (DOCS / "clusters.md").read_text()
    base = (
        "[models.small]\nnum_layers = 1\nhidden_size = 32\nnum_attention_heads = 2\nseq_length ="
        " 16\nvocab_size = 512\n"
    )
    (tmp_path / "jobs.toml").write_text(
        base + "\n".join(re.findall(r"^```toml\n(.*?)^```", text, re.MULTILINE | re.DOTALL))
    )
    (hostfile,) = re.findall(r"^```hostfile\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    (tmp_path / "hostfile").write_text(hostfile)
    job = load(tmp_path, {}).resolve("big").job
    hosts = choose_hosts(job, tmp_path / "hostfile")
    assert [host.name for host in hosts.hosts] == [
        os.uname().nodename,
        "node02",
        "node03",
        "node04",
    ] and hosts.ranks_per_node == job.ranks_per_node == 8
    assert len(load_hosts(tmp_path / "hostfile")) == 6
    assert re.search(
        job.cluster.failures["cable"].match,
        "NET/IB : Got completion with error 12, opcode 0, len 0, vendor err 129",
    )
    assert commands_that_exist(text) > 12


def test_the_guide_to_kubernetes(tmp_path: Path) -> None:
    """Its tables are a jobs.toml, its list of keys is whole, and its rights are those that
    `doctor` asks for."""
    text = (DOCS / "kubernetes.md").read_text()
    block, *_ = re.findall(r"^```toml\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    small = "num_layers = 1\nhidden_size = 32\nnum_attention_heads = 2\nseq_length = 16\n"
    (tmp_path / "jobs.toml").write_text(f"[models.gpt3-xl]\n{small}vocab_size = 512\n{block}")
    assert load(tmp_path, {}).resolve("big").job.nodes == 16
    keys = re.findall(
        r"^\| (`[a-z_`, ]+) \|", text.partition("## Keys")[2].partition("## ")[0], re.MULTILINE
    )
    named = re.findall(r"`([a-z_]+)`", " ".join(keys))
    assert sorted(named) == sorted(KubernetesOptions.model_fields)
    role, of_supervisor = re.findall(r"^```yaml\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    rules = yaml.safe_load(role)["rules"]
    wanted = {**RIGHTS, **QUEUE_RIGHTS}
    assert {rule["resources"][0]: tuple(rule["verbs"]) for rule in rules} == wanted
    rules = yaml.safe_load(of_supervisor)["rules"]
    given = {name: rule["verbs"] for rule in rules for name in rule["resources"]}
    assert given == {name: list(rule.verbs) for rule in RIGHTS_IN_POD for name in rule.resources}


def test_the_guide_to_recovery() -> None:
    assert commands_that_exist((DOCS / "recovery.md").read_text()) > 3


def commands_that_exist(text: str) -> int:
    """How many commands a guide has; each has words that its task has, and each key of a watch or
    of retries exists."""
    for path in re.findall(r"`((?:watch|retry)\.[a-z_]+)`", text):
        table, key = path.split(".")
        assert key in (WatchLimits if table == "watch" else RetrySettings).model_fields, path
    commands = [
        line.split("#")[0].split()
        for block in re.findall(r"^```sh\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
        for line in block.splitlines()
    ]
    for _, task, *words in commands:
        known = {
            name for argument in namespace[task].get_arguments() for name in argument.names
        } | {"json", "dry-run"}
        assert {word[2:] for word in words if word.startswith("--")} <= {
            name.replace("_", "-") for name in known
        }, (task, words)
    return len(commands)


def test_the_guide_to_dispatch_names_every_frame() -> None:
    source = (DOCS.parent / "trainkit/launch/protocol/frames.py").read_text()
    frames = set(re.findall(r'^    TYPE = "(\w+)"$', source, re.MULTILINE))
    named = set(re.findall(r"`(\w+)`", (DOCS / "dispatch.md").read_text()))
    assert len(frames) > 20 and frames <= named, frames - named


def test_every_key_in_backquotes_exists() -> None:
    """A renamed key must not live on in the guide."""
    known = {*Model.model_fields, *Training.model_fields, *Job.model_fields}
    text = re.sub(
        r"^```.*?^```", "", (DOCS / "training.md").read_text(), flags=re.MULTILINE | re.DOTALL
    )
    # GPT-NeoX's own
    words = set(re.findall(r"`([a-z]+(?:_[a-z]+)+)\b", text)) - {"initial_scale_power"}
    assert len(words) > 20 and words <= known, words - known


def test_the_claims_name_tests_that_there_are() -> None:
    """The table of CONTRIBUTING.md; a name without a folder is in that of the name before it."""
    rows = [
        line
        for line in (DOCS.parent / "CONTRIBUTING.md").read_text().splitlines()
        if line.startswith("| ") and "`tests/" in line
    ]
    assert len(rows) > 30
    for row in rows:
        folder = ""
        for name in re.findall(r"`([\w/]+\.py)`", row):
            folder = name.rpartition("/")[0] or folder
            assert (DOCS.parent / folder / name.rpartition("/")[2]).is_file(), f"{name} of {row}"
