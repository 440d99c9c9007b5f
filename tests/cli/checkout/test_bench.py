"""The task bench: which files it runs, with which options, in which environment; and what
benchmarks/train_step.py makes of its contenders' seconds."""

from __future__ import annotations

import importlib.metadata
import json
import math
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterable
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import train_step
from tests.conftest import Project
from trainkit.base import install as installer
from trainkit.base.errors import ConfigError
from trainkit.base.install import InstallError, ensure
from trainkit.cli.checkout import bench, machine, test as tests_of_checkout
from trainkit.cli.wrapper import TaskContext

ROOT = Path(__file__).resolve().parents[3]
FOLDER, PINS = bench.FOLDER, bench.PINS
TALK = TaskContext(json=False, dry_run=False, folder=ROOT)


# -- what is run


def test_every_benchmark_says_what_it_shows(project: Project) -> None:
    listed = project.document("bench", "--list")
    assert listed["schema"] == "benchmarks/1"
    assert [b["name"] for b in listed["benchmarks"]] == sorted(
        p.stem for p in (ROOT / "benchmarks").glob("*.py")
    )
    assert {"demo", "permutation", "train_step"} <= {b["name"] for b in listed["benchmarks"]}
    assert all(len(b["claim"]) > 20 for b in listed["benchmarks"])
    assert all(b["claim"].endswith(".") for b in listed["benchmarks"]), "whole sentences"


def test_every_benchmark_is_imported_by_what_its_environment_has() -> None:
    """That is trainkit and the peers: what only the test extra brings is not there."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    there = {*project["dependencies"], *(ROOT / PINS).read_text().splitlines()}
    asked = [*project["optional-dependencies"]["test"], *project["optional-dependencies"]["report"]]

    def names(requirements: Iterable[str]) -> set[str]:
        return {re.split("[^A-Za-z0-9_.-]", each, maxsplit=1)[0].lower() for each in requirements}

    absent = names(asked) - names(there)
    blocked = [
        module
        for module, owners in importlib.metadata.packages_distributions().items()
        if {owner.lower() for owner in owners} & absent
    ]
    assert {"pytest", "hypothesis"} <= set(blocked)
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            "import importlib, json, sys\nblocked, files = json.loads(sys.argv[1])\n"
            "sys.modules.update(dict.fromkeys(blocked))\n"
            "for name in files: importlib.import_module(f'benchmarks.{name}')",
            json.dumps([blocked, [path.stem for path in (ROOT / "benchmarks").glob("*.py")]]),
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_an_unknown_benchmark_or_option_is_refused_before_anything_is_installed(
    project: Project,
) -> None:
    assert (
        "there are: checkpoint, context, curate, data_prep, demo, evaluations, fetching, goodput,"
        " halving, kernels, launch, layouts, moe, muon, mutations, permutation, plan, plan_search,"
        " plan_time, precompile, readability, recovery, report_page, sample_order, scaling_ladder,"
        " train_step, windows" in project.invoke("bench", "--name", "nope", exit=3).stderr
    )
    assert (
        "benchmarks/demo.py has no --quick"
        in project.invoke("bench", "--name", "demo", "--quick", exit=3).stderr
    )


def test_who_does_not_take_an_option_is_left_out_by_name(tmp_path: Path) -> None:
    (tmp_path / "benchmarks").mkdir()
    (tmp_path / "benchmarks" / "slow.py").write_text('"""Claim: slow."""\n')
    (tmp_path / "benchmarks" / "both.py").write_text(
        '"""Claim: both.\n\nMore."""\nparser.add_argument("--quick")\n'
    )
    found = bench.benchmarks(tmp_path)
    assert [(b.name, b.claim) for b in found] == [
        ("both", "Claim: both."),
        ("slow", "Claim: slow."),
    ]
    run, left_out = bench.select(found, "", ["--quick"])
    assert [b.name for b in run] == ["both"] and left_out == ["slow is left out: it has no --quick"]
    assert len(bench.select(found, "", [])[0]) == 2
    assert [b.name for b in bench.select(found, "slow", [])[0]] == ["slow"]
    with pytest.raises(ConfigError, match=r"slow\.py has no --device"):
        bench.select(found, "slow", ["--device"])


def test_lines_and_rows_of_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    body = (
        'import json, sys\nprint(sys.argv[1:3])\nopen(sys.argv[sys.argv.index("--rows") + 1],'
        ' "w").write(json.dumps([{"ratio": 2}]))\nsys.exit(5)\n'
    )
    path = tmp_path / "one.py"
    path.write_text(f'"""Claim: one."""\n{body}')
    done = bench._run(TALK, Path(sys.executable), bench.read_benchmark(path), ["--device", "cuda"])
    assert done.output == ["['--device', 'cuda']"] == capsys.readouterr().out.splitlines()
    assert (done.exit, done.rows, done.claim) == (5, [{"ratio": 2}], "Claim: one.")
    # takes no --rows and is given none
    path.write_text('"""Claim: one."""\nimport sys\nassert len(sys.argv) == 1\n')
    assert bench._run(TALK, Path(sys.executable), bench.read_benchmark(path), []).exit == 0


def test_the_machine_is_described() -> None:
    this = machine.machine()
    assert machine.Machine(**json.loads(json.dumps(asdict(this)))) == this
    assert (
        this.cores == len(os.sched_getaffinity(0))
        and this.versions["torch"]
        and re.fullmatch(r"\d{4}-\d\d-\d\d", this.date)
    )
    text = machine.describe(replace(this, cpu="A CPU", gpus=["A GPU", "A GPU"]))
    assert (
        text.startswith(f"A CPU, {this.cores} cores; A GPU; A GPU; ")
        and f"torch {this.versions['torch']}" in text
    )


# -- the environment of peers
# ------------------------------------------------------------------------------------------


def test_peers_are_pinned_and_agree_with_the_constraints() -> None:
    """They are installed without what they ask for, next to what trainkit asks for: a second
    version of anything would replace the tested one."""

    def pins(path: Path) -> dict[str, str]:
        lines = [
            line for line in path.read_text().splitlines() if line and not line.startswith("#")
        ]
        assert all(re.fullmatch(r"[\w.-]+==[\w.]+", line) for line in lines)
        return {
            re.sub("[-_.]+", "-", name).lower(): version
            for name, version in (line.split("==") for line in lines)
        }

    peers, constraints = pins(ROOT / PINS), pins(ROOT / "constraints.txt")
    assert {"litgpt", "transformers"} <= peers.keys() and "torch" not in peers
    assert {name: peers[name] for name in peers.keys() & constraints.keys()} == {
        name: constraints[name] for name in peers.keys() & constraints.keys()
    }


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A checkout whose uv and pip are lists of their commands; `fail` is the word of a command that
    fails, `die` that of one its process dies at."""
    root = tmp_path / "clone"
    for name in (*installer.CHECKOUT_FILES, "csrc/a.cpp", PINS):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(f"# {name}\n")
    (root / "trainkit" / "base").mkdir(parents=True)
    shutil.copy(installer.__file__, root / "trainkit" / "base" / "install.py")
    state = SimpleNamespace(root=root, commands=[], fail="", die="")

    def run(command: list[str], folder: Path, lock: int, *_: object, shown: bool = False) -> None:
        if "--only-binary" in command:
            return  # pip gets uv
        state.commands.append(command)
        if state.fail in command:
            raise InstallError("no network")
        if state.die in command:
            raise RuntimeError("killed")
        if "venv" in command:
            python = Path(command[-1]) / "bin" / "python"
            python.parent.mkdir(parents=True, exist_ok=True)
            python.write_text(f"#!/bin/sh\necho {sys.implementation.cache_tag}\n")
            python.chmod(0o755)

    monkeypatch.setattr(installer, "run_step", run)
    monkeypatch.setattr(installer, "pip_settings", lambda environment: {})
    monkeypatch.setattr(installer, "missing_tools", list)
    return state


def test_peers_come_after_trainkit_into_a_folder_of_their_own(checkout: SimpleNamespace) -> None:
    ensure(checkout.root, [], FOLDER, PINS)
    made, first, second = checkout.commands
    assert made[-1] == str(checkout.root / FOLDER) and not (checkout.root / ".venv").exists()
    assert first[first.index("-e") + 1] == "." and "--no-deps" not in first
    assert second[second.index("-r") + 1] == PINS and "--no-deps" in second
    assert all(command[-2:] == ["-c", "constraints.txt"] for command in (first, second))
    ensure(checkout.root, [], FOLDER, PINS)
    assert len(checkout.commands) == 3
    ensure(checkout.root, [])
    assert not any("-r" in command for command in checkout.commands[3:])


def test_only_the_environment_that_reads_the_pins_depends_on_them(
    checkout: SimpleNamespace,
) -> None:
    ensure(checkout.root, [])
    ensure(checkout.root, [], FOLDER, PINS)
    before = len(checkout.commands)
    (checkout.root / PINS).write_text("litgpt==9\n")
    ensure(checkout.root, [])
    assert len(checkout.commands) == before
    ensure(checkout.root, [], FOLDER, PINS)
    assert [("-e" in c, "-r" in c) for c in checkout.commands[before:]] == [
        (True, False),
        (False, True),
    ]


def test_another_torch_has_an_environment_of_its_own(
    checkout: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pins but for torch, and setuptools, of which each torch asks for other versions."""
    monkeypatch.setattr(installer, "extension_is_current", lambda root: True)
    pins = "numpy==2.4.6\nsetuptools==84.2.1\ntorch==2.13.0\ntorchless==1\n"
    (checkout.root / "constraints.txt").write_text(pins)
    python = tests_of_checkout.torch_python(checkout.root, "2.15")
    assert python == checkout.root / ".venv-torch-2.15" / "bin" / "python"
    *_, target, option, name = checkout.commands[-1]
    assert (target, option) == (".[test]", "-c")
    found = (checkout.root / name).read_text()
    assert found == "numpy==2.4.6\ntorchless==1\ntorch==2.15.*\n"


@pytest.mark.parametrize("at", ["-e", "-r"])
def test_an_interrupted_installation_is_never_taken_for_whole(
    at: str, checkout: SimpleNamespace, capfd: pytest.CaptureFixture[str]
) -> None:
    """Not even when the other environment of the checkout was installed in between."""
    checkout.die = at
    with pytest.raises(RuntimeError):
        ensure(checkout.root, [], FOLDER, PINS)
    checkout.die = ""
    ensure(checkout.root, [])
    before = len(checkout.commands)
    ensure(checkout.root, [], FOLDER, PINS)
    assert (
        "venv" in checkout.commands[before] and f"{FOLDER} is unfinished" in capfd.readouterr().err
    )
    ensure(checkout.root, [])
    assert len(checkout.commands) == before + 3


def test_peers_that_cannot_be_had_leave_nothing_fresh(checkout: SimpleNamespace) -> None:
    checkout.fail = "-r"
    with pytest.raises(InstallError, match="no network"):
        ensure(checkout.root, [], FOLDER, PINS)
    checkout.fail = ""
    before = len(checkout.commands)
    ensure(checkout.root, [], FOLDER, PINS)
    # pip has undone its own: no new venv
    assert [("-e" in c, "-r" in c) for c in checkout.commands[before:]] == [
        (True, False),
        (False, True),
    ]


# -- train_step

TINY = train_step.Case(
    {
        "family": "gpt",
        "num_layers": 1,
        "hidden_size": 16,
        "num_attention_heads": 2,
        "seq_length": 8,
        "vocab_size": 50,
    },
    2,
    2,
    3,
)


def _worker(name: str, seconds: list[float], flops: int = 100, peak: int = 2**30) -> Any:
    about = {"flops_per_token": flops, "parameters": 7, "first_loss": 3.9}
    cpu = [2 * s for s in seconds]
    return SimpleNamespace(name=name, seconds=seconds, cpu_seconds=cpu, peak=peak, about=about)


def test_ratios_are_paired_by_round(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A machine that was three times slower in one round: ratios of medians would see it, the
    median of ratios does not."""
    monkeypatch.setitem(train_step.CASES["cpu"], "tiny", TINY)
    workers = [
        _worker("trainkit", [1.0, 3.0, 1.0]),
        _worker("transformers", [1.5, 4.5, 1.5]),
        _worker("litgpt", [0.9, 2.7, 2.0]),
        _worker("litgpt, bf16 weights", [0.5, 1.5, 0.5]),
        _worker("products", [0.25, 0.75, 0.25], flops=50),
    ]
    rows = {row["contender"]: row for row in train_step.rows_of(workers, "tiny", "bf16", "cpu")}
    assert [row["ratio"] for row in rows.values()] == pytest.approx([1.0, 1.5, 0.9, 0.5])
    assert rows["trainkit"]["tokens_per_second"] == 32
    assert rows["trainkit"]["share"] == pytest.approx(0.5) and rows["trainkit"][
        "limit_tokens_per_second"
    ] == pytest.approx(64)
    train_step.show(list(rows.values()), "cpu")
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 5 and "50%" in lines[1] and "1.50" in lines[2] and "1.00 GiB" in lines[1]
    assert (
        train_step.verdict(list(rows.values()))
        == "lowest ratio 0.90 (litgpt at tiny in bf16): the claim does NOT hold here"
    )
    assert "holds here" in train_step.verdict(
        [rows["trainkit"], rows["transformers"], rows["litgpt, bf16 weights"]]
    )


CONTENDER = """
import json, sys
print(json.dumps({"first_loss": 1, "parameters": 1, "flops_per_token": 1}), flush=True)
left = 1 if sys.argv[1] == "b" else 9
for line in sys.stdin:
    left -= 1
    assert left >= 0, "out of memory"
    print(json.dumps({"seconds": 2.0 * int(line), "cpu_seconds": 3.0, "peak_bytes": 5}), flush=True)
"""


def test_a_contender_that_fails_leaves_the_others(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    program = tmp_path / "contender.py"
    program.write_text(CONTENDER)
    monkeypatch.setattr(train_step, "CONTENDERS", program)
    for run in (train_step.alternate, train_step.one_by_one):
        field = run(["a", "b", "c"], (TINY, "fp32", "cpu", 1), 3)
        assert [w.name for w in field.workers] == ["a", "c"]
        assert [w.seconds for w in field.workers] == [[2.0] * 3] * 2
        assert (
            len(field.failures) == 1
            and "b failed" in field.failures[0]
            and "out of memory" in field.failures[0]
        )


def test_names_of_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As nvidia-smi says them; none where it fails or is not there."""
    monkeypatch.setenv("PATH", str(tmp_path))
    assert machine._gpu_names() == []
    for code, names in ((0, ["NVIDIA H100", "NVIDIA H200"]), (9, [])):
        (tmp_path / "nvidia-smi").write_text(
            f"#!/bin/sh\necho NVIDIA H100; echo NVIDIA H200; exit {code}\n"
        )
        (tmp_path / "nvidia-smi").chmod(0o755)
        assert machine._gpu_names() == names


# they try peers, and import transformers for it: what trainkit claims hangs on the first case
SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    "name",
    ["trainkit", pytest.param("transformers", marks=SLOW), pytest.param("products", marks=SLOW)],
)
def test_contenders_step_when_told(name: str) -> None:
    """The real program on a tiny shape: the loss of random weights is log of the vocabulary, a
    step takes time, and nothing else is on stdout."""
    argv = [sys.executable, "-P", str(train_step.CONTENDERS), name, TINY.words, "bf16", "cpu", "1"]
    done = subprocess.run(
        argv,
        input="1\n2\n",
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    about, one, two = (json.loads(line) for line in done.stdout.splitlines())
    assert (
        about["flops_per_token"] > 0
        and one["seconds"] > 0
        and two["seconds"] > 0
        and two["peak_bytes"] > 0
    )
    if name != "products":
        assert (
            about["first_loss"] == pytest.approx(math.log(50), rel=0.1)
            and about["parameters"] == 12 * 16**2 + 13 * 16 + (50 + 8 + 2) * 16
        )
