"""Stand-ins of NeMo and neuronx-nemo-megatron on two nodes, which take nothing that the engines
would not: started, a rank killed, put back by Slurm, finished."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.cluster import pyxis_stand_in
from tests.cluster.machines import HEAD, Cluster, Process
from tests.cluster.on_head import ClusterProject
from tests.cluster.slurm_project import SlurmProject
from tests.conftest import HANGS, wait_for
from tests.engines.stand_ins.jobs import empty_packages, tables, write_data
from tests.engines.stand_ins.training import HOLD
from tests.engines.stand_ins.trees import CHECKOUT, SCRIPT, make_nemo, make_neuron, make_programs
from tests.launch.containers.entered_image import entered_image

NEMO_MODULES = ("pytorch_lightning", "hydra", "omegaconf", "apex")
NEWER_MODULES = (
    *("lightning", "hydra", "omegaconf", "megatron", "megatron/core", "transformer_engine"),
)
NEURON_MODULES = (
    *("torch_xla", "torch_neuronx", "nemo", "apex", "pytorch_lightning", "hydra", "omegaconf"),
)
ONE_THREAD = '{ OMP_NUM_THREADS = "1" }'


@dataclass
class StandIn:
    """A project with the job `stand-in`.

    Args:
        project: on the head.
        hold: a folder; see HOLD.
        process: `invoke train`, which follows the run.
    """

    project: ClusterProject
    hold: Path
    process: subprocess.Popen[str] | None = None

    def wait(self, condition: Callable[[], Any], what: str) -> Any:
        """Until it is so; fails where the run has ended before."""

        def look() -> Any:
            value = condition()
            if not value and self.process is not None and self.process.poll() is not None:
                out, err = self.process.communicate()
                pytest.fail(f"it ended with {self.process.returncode} before {what}\n{out}\n{err}")
            return value

        return wait_for(look, what, timeout=HANGS)

    def hold_at(self, *steps: int) -> None:
        """These steps do not begin."""
        for step in steps:
            (self.hold / f"hold-{step}").touch()

    def go_on(self, step: int) -> None:
        (self.hold / f"hold-{step}").unlink()

    def run(self) -> Path:
        """The newest run, once it is there."""
        runs = self.wait(self.project.runs, "a run")
        return Path(runs[-1])

    def wait_at(self, step: int) -> None:
        """Until both ranks have saved what is before this step."""
        places = [self.hold / f"at-{step}-{rank}" for rank in range(2)]
        self.wait(lambda: all(path.exists() for path in places), f"step {step}")

    def wait_checkpoint(self, run: Path, step: int) -> None:
        """Until both stages have what the engine goes on from."""
        self.wait(
            lambda: len(list(run.rglob(f"*step={step}-*-last.ckpt"))) == 2,
            f"the checkpoint of step {step}",
        )

    def engines(self, run: Path) -> list[Process]:
        """The engine's own processes on all nodes."""
        return [
            each
            for each in self.project.cluster.processes_of(run.name)
            if any(word.endswith(SCRIPT) for word in each.argv[:4])
        ]

    def said(self, run: Path, attempt: int) -> str:
        """What ranks of an attempt printed."""
        logs = (run / "attempts" / str(attempt)).rglob("*.log")
        return "".join(path.read_text(errors="replace") for path in logs)


def variables(**values: str) -> str:
    """An inline table."""
    return "{ " + ", ".join(f"{name} = {json.dumps(each)}" for name, each in values.items()) + " }"


def make_stand_in(project: ClusterProject, cluster: str, engine: str, tree: str) -> StandIn:
    """Add the job and its data to the project; the cluster's variables too."""
    write_data(project.path)
    hold = project.path / "hold"
    hold.mkdir()
    path = project.path / "jobs.toml"
    own: dict[str, str] = {"OMP_NUM_THREADS": "1", HOLD: str(hold)}
    prolog = []
    if engine == "neuronx-nemo":
        programs = make_programs(project.path / "bin")
        site = empty_packages(project.path / "site", NEURON_MODULES)
        own["PYTHONPATH"] = str(site)
        own["NEURON_COMPILE_CACHE_URL"] = str(project.path / "neuron_cache")
        prolog = [f"export PATH={programs}:$PATH"]
    text = path.read_text().replace(ONE_THREAD, variables(**own))
    text = text.replace("ranks_per_node = 2", "ranks_per_node = 1")
    text = text.replace(f"[clusters.{cluster}]", f"[clusters.{cluster}]\nprolog = {prolog}", 1)
    source = f'[engines.{engine}]\nsource = "{tree}"\npython = "{sys.executable}"\n'
    path.write_text(f"{text}\n{source}\n{tables(project.path, engine, cluster)}")
    return StandIn(project, hold)


def start_kill_requeue_finish(made: StandIn, slurm: SlurmProject) -> Path:
    """The whole life of a run; returns it."""
    made.hold_at(2, 3)
    made.process = slurm.start("train", "stand-in")
    run = made.run()
    made.wait_at(2)

    victims = made.wait(lambda: made.engines(run), "ranks")
    slurm.cluster.kill(victims[-1], number=signal.SIGKILL)
    made.wait((run / "attempts" / "2").is_dir, "the second attempt")
    made.go_on(2)
    made.wait_at(3)
    assert "Restored all states" in made.said(run, 2)

    slurm.cluster.on(HEAD, "scontrol", "requeue", slurm.slurm_jobs(run)[0]["id"])
    made.wait((run / "attempts" / "3").is_dir, "the third attempt")
    made.go_on(3)
    out, err = made.process.communicate(timeout=HANGS)
    code = made.process.returncode
    made.process = None
    assert code == 0, out + err + made.said(run, 3)
    assert "step=2" in made.said(run, 3), "it went on from the second step"
    wait_for(lambda: not slurm.cluster.processes_of(run.name), "nothing to be left")
    return run


def check_result(made: StandIn, run: Path) -> None:
    """Success by the last step, whose checkpoint is whole; each step once, and learnt from."""
    status = made.project.document("status", run.name)
    assert (status["state"], status["attempt"]) == ("succeeded", 3)
    losses = made.project.losses(run)
    assert sorted(losses) == [1, 2, 3]
    assert losses[3] < losses[1]
    made.wait_checkpoint(run, 3)


@pytest.mark.slow  # each attempt imports torch four times
@pytest.mark.timeout(1800)
def test_neuron_on_slurm(slurm: SlurmProject, tmp_path: Path) -> None:
    made = make_stand_in(slurm, "queue", "neuronx-nemo", str(make_neuron(tmp_path / "tree")))
    check_result(made, start_kill_requeue_finish(made, slurm))


@pytest.mark.slow  # two nodes import torch
@pytest.mark.timeout(1800)
def test_neuron_precompiles_on_slurm(slurm: SlurmProject, tmp_path: Path) -> None:
    """On as many nodes as the training, by the same launcher; each leaves its record, once."""
    made = make_stand_in(slurm, "queue", "neuronx-nemo", str(make_neuron(tmp_path / "tree")))
    said = slurm.invoke("precompile", "stand-in").stdout
    (run,) = made.project.runs()
    assert "all graphs of stand-in are compiled" in said
    assert "Total failed compilations: 0" in made.said(run, 1)
    found = sorted((slurm.path / "engines" / "graphs").glob("*/*.json"))
    assert [path.name for path in found] == ["0.json", "1.json"]
    again = slurm.invoke("precompile", "stand-in").stdout
    assert "are compiled on all 2 nodes" in again and len(made.project.runs()) == 1


def nemo_in_images(slurm: SlurmProject, folder: Path, launch: str = "ranks") -> StandIn:
    """The job `stand-in` in an image, which pyxis's stand-in enters and which alone has the
    tree."""
    image = entered_image(
        folder / "image",
        lambda root: empty_packages(make_nemo(root / "opt/bignlp/NeMo", "1.12"), NEMO_MODULES),
    )
    programs = pyxis_stand_in.install(folder / "bin", folder / "pyxis")
    made = make_stand_in(slurm, "queue", "nemo", "/opt/bignlp/NeMo")
    path = slurm.path / "jobs.toml"
    text = path.read_text().replace("prolog = []", f'prolog = ["export PATH={programs}:$PATH"]')
    text = text.replace("[jobs.stand-in]", '[jobs.stand-in]\ncontainer = "box"', 1)
    text = text.replace("[engines.nemo]", f'[engines.nemo]\nlaunch = "{launch}"')
    box = image.table(runtime="pyxis", stages_in_container=False)
    # the stand-ins' code, and torch, which may lie outside of this interpreter's own folder
    for place in {CHECKOUT, Path(torch.__file__).parents[1]}:
        box = box.replace('mounts = ["', f'mounts = ["{place}:{place}:ro", "')
    path.write_text(f"{text}\n[containers.box]\n{box}")
    return made


def images_entered(folder: Path) -> set[str]:
    """What srun was asked to have tasks begin in."""
    lines = (folder / "pyxis" / "options").read_text().splitlines()
    return {json.loads(line)["container-image"] for line in lines}


@pytest.mark.timeout(1800)
def test_nemo_in_images_on_slurm(slurm: SlurmProject, tmp_path: Path) -> None:
    made = nemo_in_images(slurm, tmp_path)
    check_result(made, start_kill_requeue_finish(made, slurm))
    assert images_entered(tmp_path) == {str(tmp_path / "image" / "box.sqsh")}


@pytest.mark.slow  # as the one before, but for who starts the ranks
@pytest.mark.timeout(1800)
def test_nemo_by_one_srun(slurm: SlurmProject, tmp_path: Path) -> None:
    made = nemo_in_images(slurm, tmp_path, "srun")
    check_result(made, start_kill_requeue_finish(made, slurm))
    assert images_entered(tmp_path) == {str(tmp_path / "image" / "box.sqsh")}


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_nemo_over_ssh_with_distributed_checkpoints(
    head: ClusterProject, cluster: Cluster, tmp_path: Path
) -> None:
    """NeMo 2.1 on two hosts, without an image: stopped after a step, and resumed."""
    tree = empty_packages(make_nemo(tmp_path / "NeMo", "2.1"), NEWER_MODULES)
    made = make_stand_in(head, "pair", "nemo", str(tree))
    head.edit_jobs("[engines.nemo]", '[engines.nemo]\nversion = "24.12"')
    head.hosts("node1 slots=1", "node2 slots=1")
    made.hold_at(2)
    made.process = head.start("train", "stand-in", "--foreground", "--set", "retry.infra=0")
    run = made.run()
    made.wait_at(2)
    victims = made.wait(lambda: made.engines(run), "ranks")
    cluster.kill(victims[-1], number=signal.SIGKILL)
    made.process.communicate(timeout=HANGS)
    assert made.process.returncode == 10
    made.process = None
    made.go_on(2)
    head.invoke("resume", run.name, "--foreground")
    assert sorted(head.losses(run)) == [1, 2, 3]
    assert "Restored all states" in made.said(run, 2)
    assert list(run.rglob("*step=3-*-last/.metadata"))
    assert not list(run.rglob("*-unfinished"))


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_neuron_compiles_before_it_trains_over_ssh(
    head: ClusterProject, cluster: Cluster, tmp_path: Path
) -> None:
    made = make_stand_in(head, "pair", "neuronx-nemo", str(make_neuron(tmp_path / "tree")))
    head.hosts("node1 slots=1", "node2 slots=1")
    said = head.invoke("precompile", "stand-in", "--foreground").stdout
    assert not list(head.path.rglob("*.ckpt")), said
    head.invoke("train", "stand-in", "--foreground")
    run = head.runs()[-1]
    assert sorted(head.losses(run)) == [1, 2, 3]
    made.wait_checkpoint(run, 3)
