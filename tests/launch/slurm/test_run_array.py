"""Several runs as one array: what is submitted, what each run's folder says of it, and that
nothing is left where Slurm refuses."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.launch.recorded_slurm import Slurm, make_slurm, new_start
from tests.programs import put_program
from trainkit.base.errors import TrainkitError
from trainkit.jobs.load import load
from trainkit.launch.scheduler_contract import ArrayRequest
from trainkit.launch.slurm.allocation import current_allocation
from trainkit.launch.slurm.run_array import settle_arrays, submit_array
from trainkit.runs.find import find_run
from trainkit.runs.slurm import read_slurm_jobs


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Slurm:
    """With a scontrol that writes down what it is told."""
    made = make_slurm(tmp_path, monkeypatch)
    put_program(
        tmp_path / "bin",
        "scontrol",
        '#!/bin/bash\ncase "$2" in hostnames) echo node1;;'
        f' *) echo "scontrol $*" >> {tmp_path}/lines;; esac\n',
    )
    return made


def asked(slurm: Slurm, *nodes: int) -> ArrayRequest:
    jobs = load(slurm.folder)
    made = [jobs.resolve("small", [f"nodes={number}"]) for number in nodes]
    starts = [new_start(each, slurm.folder) for each in made]
    folder = slurm.folder / "sweeps" / "small" / "id"
    folder.mkdir(parents=True)
    return ArrayRequest("sweep-small", folder, starts, 2)


def test_one_array_for_all_that_ask_for_the_same(slurm: Slurm) -> None:
    """A run with more nodes is in another; each is held until every folder says which it is."""
    done = submit_array(asked(slurm, 1, 1, 2))
    lines = slurm.lines()
    assert [line.split()[0] for line in lines] == ["sbatch", "scontrol"] * 2
    assert "--hold" in lines[0] and lines[1] == "scontrol release 101"
    assert [each.job for each in done] == ["101_0", "101_1", "102_0"]
    assert [read_slurm_jobs(each.run)[0].id for each in done] == ["101_0", "101_1", "102_0"]
    script = (slurm.folder / "sweeps" / "small" / "id" / "array-1.sh").read_text()
    assert "#SBATCH --array=0-1%2\n" in script and "#SBATCH --nodes=1\n" in script
    assert subprocess.run(["bash", "-n"], input=script, text=True, check=False).returncode == 0
    assert find_run([slurm.folder], "101_1") == done[1].run


def test_an_element_becomes_its_run_s_script(slurm: Slurm) -> None:
    done = submit_array(asked(slurm, 1, 1))
    for each in done:
        (each.run.path / "launch" / "slurm.sh").write_text(f"echo this is {each.run.id}\n")
    script = slurm.folder / "sweeps" / "small" / "id" / "array-1.sh"
    env = {"SLURM_ARRAY_JOB_ID": "101", "SLURM_ARRAY_TASK_ID": "1", "PATH": "/usr/bin:/bin"}
    subprocess.run(["bash", str(script)], env=env, check=True)
    output = done[1].run.path / "launch" / "slurm-101_1.out"
    assert output.read_text() == f"this is {done[1].run.id}\n"
    allocation = {**env, "SLURM_JOB_ID": "103", "SLURM_JOB_NODELIST": "node1"}
    assert current_allocation(allocation).job == "101_1"


def test_where_slurm_refuses_nothing_is_left(slurm: Slurm) -> None:
    (slurm.folder / "bin" / "sbatch").write_text("#!/bin/bash\necho no such luck >&2; exit 1\n")
    with pytest.raises(TrainkitError, match="no such luck"):
        submit_array(asked(slurm, 1, 1))
    assert not list((slurm.folder / "runs" / "small").iterdir())
    assert settle_arrays(slurm.folder / "sweeps") == [], "squeue knows none, and one may still come"
    assert len(list(slurm.folder.rglob("array-*.held.json"))) == 1
