"""Runs in real containers on this machine: the losses of a run without one, and nothing left of
it whoever ends it."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import oci
from tests.conftest import Project, wait_for
from tests.oci import IMAGE, Oci
from trainkit.base import process_marks
from trainkit.launch.containers.docker import leftovers_line

pytestmark = pytest.mark.timeout(1200)
SHORT = (
    "--set",
    "training.train_iters=8",
    "--set",
    "training.eval_iters=0",
    "--set",
    "cluster.ranks_per_node=1",
)


@pytest.fixture(scope="module")
def podman(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Oci]:
    with oci.podman(
        tmp_path_factory.mktemp("oci") / "podman",
        required=request.config.getoption("--require-cluster"),
    ) as found:
        yield found


@pytest.fixture(scope="module")
def docker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Oci]:
    with oci.docker(tmp_path_factory.mktemp("oci") / "docker") as found:
        yield found


@pytest.fixture(scope="module", params=["podman", "docker"])
def runtime(request: pytest.FixtureRequest) -> Oci:
    found = request.getfixturevalue(request.param)
    assert isinstance(found, Oci)
    return found


@pytest.fixture
def boxed(project: Project, runtime: Oci) -> Project:
    """The project's job on random tokens, and the same in a container as `boxed`."""
    return with_box(project, runtime)


def with_box(project: Project, runtime: Oci) -> Project:
    path = project.path / "jobs.toml"
    text = path.read_text().replace(
        "ranks_per_node = 2",
        f'ranks_per_node = 2\nprolog = {runtime.prolog}\nenv = {{ OMP_NUM_THREADS = "1" }}\nwatch ='
        " { grace = 2 }",
    )
    path.write_text(
        f'{text}\n[jobs.boxed]\nextends = "random"\ncontainer ='
        f' "box"\n\n[containers.box]\n{runtime.table()}'
    )
    return project


def gone(run: Path, runtime: Oci) -> bool:
    return not process_marks.find_marked(run.name) and not runtime.containers(run.name)


def started(project: Project, runtime: Oci, step: int = 3) -> Path:
    """The newest run once it is at a step; it is in a container then."""

    def there() -> bool:
        runs = project.runs()
        return (
            bool(runs)
            and (runs[-1] / "metrics.jsonl").exists()
            and len((runs[-1] / "metrics.jsonl").read_text().splitlines()) >= step
        )

    wait_for(there, f"step {step}", timeout=600)
    run = project.runs()[-1]
    assert len(runtime.containers(run.name)) == 1 and process_marks.find_marked(run.name), (
        "its processes are seen from outside"
    )
    return run


def same_losses(boxed: Project, runtime: Oci) -> None:
    boxed.invoke("train", "random", *SHORT)
    boxed.invoke("train", "boxed", *SHORT)
    plain, inside = boxed.runs()
    assert boxed.losses(inside) == boxed.losses(plain) and len(boxed.losses(inside)) == 8
    assert gone(inside, runtime)


@pytest.mark.slow
def test_losses_in_podman_are_those_without_a_container(project: Project, podman: Oci) -> None:
    """The one real container of the quick tests."""
    same_losses(with_box(project, podman), podman)


@pytest.mark.slow
def test_losses_in_docker_are_those_without_a_container(project: Project, docker: Oci) -> None:
    same_losses(with_box(project, docker), docker)


@pytest.mark.slow
def test_a_dry_run_shows_the_container(boxed: Project, runtime: Oci) -> None:
    shown = boxed.invoke("train", "boxed", "--dry-run").stdout
    assert f"exec {runtime.runtime} run --rm " in shown and "inside.sh" in shown


@pytest.mark.slow
def test_a_container_that_was_never_started_is_taken_away(runtime: Oci, tmp_path: Path) -> None:
    """What a client leaves that is killed between `create` and `start`; nothing else goes, and
    nothing that is younger."""
    names = ("trainkit-R-1-0", "others-1")
    for name in names:
        runtime.call(
            "create", "--pull=never", "--network=host", f"--name={name}", IMAGE, "/usr/bin/true"
        )

    def there(line: str) -> list[str]:
        subprocess.run(["bash", "-ec", line], env={**os.environ, **runtime.variables}, check=True)
        return [
            name
            for name in names
            if name in runtime.call("ps", "--all", "--format", "{{.Names}}").split()
        ]

    try:
        assert there(leftovers_line(runtime.runtime)) == list(names)
        assert there(leftovers_line(runtime.runtime, "second")) == ["others-1"]
        assert there(leftovers_line("false")) == ["others-1"], (
            "a runtime that does not answer keeps nothing up"
        )
    finally:
        runtime.call("rm", "others-1")


@pytest.mark.slow
def test_cancel_leaves_nothing(boxed: Project, runtime: Oci) -> None:
    boxed.invoke("train", "boxed", "--detach", "--set", "training.train_iters=100000")
    run = started(boxed, runtime)
    boxed.invoke("cancel", run.name, exit=15)
    assert gone(run, runtime)
    assert boxed.document("status", run.name)["state"] == "cancelled"


@pytest.mark.slow
def test_a_killed_supervisor_leaves_nothing(boxed: Project, runtime: Oci) -> None:
    process = boxed.start("train", "boxed", "--set", "training.train_iters=100000")
    run = started(boxed, runtime)
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    wait_for(lambda: gone(run, runtime), "the container to end")


@pytest.mark.slow
def test_a_killed_client_leaves_nothing(boxed: Project, runtime: Oci) -> None:
    """What docker started outlives its client: the supervisor loses its transport and stops the
    agent over their own connection."""
    process = boxed.start("train", "boxed", "--set", "training.train_iters=100000")
    run = started(boxed, runtime)
    (client,) = [
        pid
        for pid in map(int, filter(str.isdigit, os.listdir("/proc")))
        if cmdline(pid).startswith(f"{runtime.runtime} run ") and run.name in cmdline(pid)
    ]
    os.kill(client, signal.SIGKILL)
    out, err = process.communicate(timeout=600)
    assert process.returncode == 10, out + err
    wait_for(lambda: gone(run, runtime), "the container to end")


@pytest.mark.slow
def test_a_killed_agent_and_keeper_leave_nothing(boxed: Project, runtime: Oci) -> None:
    """The keeper is the container's first process: with it the runtime ends all that is in it."""
    process = boxed.start("train", "boxed", "--set", "training.train_iters=100000")
    run = started(boxed, runtime)
    ranks = process_marks.find_marked(run.name)
    (agent,) = {
        int(Path(f"/proc/{rank.pid}/stat").read_text().rpartition(")")[2].split()[1])
        for rank in ranks
        if "main.py" in cmdline(rank.pid)
    }
    keeper = int(Path(f"/proc/{agent}/stat").read_text().rpartition(")")[2].split()[1])
    for pid in (keeper, agent):
        os.kill(pid, signal.SIGKILL)
    out, err = process.communicate(timeout=600)
    assert process.returncode == 10, out + err
    assert gone(run, runtime)


def cmdline(pid: int) -> str:
    try:
        return (
            Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        )
    except OSError:
        return ""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            ('image = "localhost/this-machine:1"', 'image = "localhost/nobody:1"'),
            "could not start the container",
        ),
        (("/usr:/usr:ro", "/usr:/elsewhere:ro"), "ended with 127 (a program is not in the image)"),
        (
            ("/usr:/usr:ro", "/no/such:/usr:ro"),
            "does not have what containers.box mounts: /no/such",
        ),
    ],
)
def test_what_cannot_start_says_why(
    boxed: Project, runtime: Oci, change: tuple[str, str], said: str
) -> None:
    boxed.edit_jobs(*change)
    done = boxed.invoke("train", "boxed", exit=8)
    assert said in done.stdout + done.stderr and "See 'docker" not in done.stdout + done.stderr
    assert gone(boxed.runs()[-1], runtime)


@pytest.mark.slow
@pytest.mark.skipif(not Path("/usr/bin/python3").exists(), reason="needs a Python without torch")
def test_an_image_without_torch(boxed: Project, runtime: Oci) -> None:
    """The agent needs the standard library only; each rank says what it misses."""
    path = boxed.path / "jobs.toml"
    lines = [
        'python = "/usr/bin/python3"' if line.startswith("python = ") else line
        for line in path.read_text().splitlines()
    ]
    path.write_text("\n".join(lines) + "\n")
    done = boxed.invoke("train", "boxed", exit=9)
    assert (
        "No module named" in done.stdout + done.stderr
        and "containers.X.python" in done.stdout + done.stderr
    )
