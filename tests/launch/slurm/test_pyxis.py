"""The line of srun with pyxis: that of the reference clusters, and the look at mounts before it."""

from __future__ import annotations

import shlex
import subprocess
from pathlib import Path

import pytest

from tests.launch.slurm.slurm_jobs import RUN, job, session, srun
from trainkit.launch.containers.pyxis import step_scripts
from trainkit.launch.hosts.hostfile import Host
from trainkit.launch.launchers.slurm import mount_check_argv, node_text, srun_argv

# What the published scripts give srun. STAGE, FSX are the roots; azure's DATA, WORK, VOCAB, MERGE
# and CKPT are folders and files below STAGE, its TOPO is
# one below /opt/microsoft, and bignlp's launcher mounts <bignlp>,<data>,<results>, of which the
# first is the trainer that trainkit is here.
AZURE = ("04-gpt175B.sh", "azure-gpt3-175b", "/stage", "/stage/pytorch+25.03+py3.sqsh")


NEMO = (
    "bignlp-scripts 22.09",
    "nemo-gpt3-175b16",
    "/fsx",
    "/apps/bignlp-training_22.09-py3-bcp-nsys-2022.5.1-v2-efa.sqsh",
)


PYXIS: list[tuple[tuple[str, str, str, str], set[str], set[str], bool]] = [
    (
        AZURE,
        {
            "/opt/microsoft/ndv5-topo.xml",
            "/stage",
            "/stage/slimpajama/preprocessed",
            "/stage/checkpoints",
            "/var/tmp",
            "/opt/microsoft",
        },
        # and LOGLEVEL, which torchrun reads; there is none here
        {"CUDA_DEVICE_MAX_CONNECTIONS", "NCCL_TOPO_FILE"},
        # the training script leaves home to the cluster's own setting, its data jobs do not; see
        # docs/containers.md
        False,
    ),
    (NEMO, {"/fsx/data", "/fsx/results"}, set(), True),
]


@pytest.mark.parametrize(("published", "mounts", "env", "no_home"), PYXIS)
def test_pyxis_of_the_reference_clusters(
    published: tuple[str, str, str, str], mounts: set[str], env: set[str], no_home: bool
) -> None:
    _, name, root, image = published
    words = srun(
        name,
        f"cluster.root={root}",
        f"container.image={image}",
        further={"SLURM_EXPORT_ENV": "HOME,PATH"},
    )
    given = {
        word.partition("=")[0]: word.partition("=")[2]
        for word in words
        if "container" in word.partition("=")[0]
    }
    ours_alone = {
        "--container-name",
        "--container-workdir",
        "--no-container-mount-home",
        "--no-container-entrypoint",
    }
    assert set(given) == {"--container-image", "--container-mounts", "--container-env", *ours_alone}
    assert given["--container-image"] == image and given["--container-workdir"] == root
    ours = [mount.split(":") for mount in given["--container-mounts"].split(",")]
    assert all(source == target for source, target in ours)
    assert all(any(Path(path).is_relative_to(source) for source, _ in ours) for path in mounts), (
        "all that the script mounts is there, under its own name"
    )
    names = given["--container-env"].split(",")
    assert env <= set(names) == set(job(name).environment), "and every other variable of the job"
    assert (
        next(word for word in words if word.startswith("--export="))
        == f"--export=HOME,PATH,{','.join(names)}"
    ), "so that they reach the image's hooks"
    assert no_home <= ("--no-container-mount-home" in words)
    assert words[-2:] == ["/bin/bash", f"{RUN.session(1)}/srun.sh"]


def test_pyxis_looks_at_the_mounts_first(tmp_path: Path) -> None:
    chosen, hosts = job("azure-gpt3-175b", "cluster.root=/no/such"), [Host("n0"), Host("n1")]
    given = session(chosen, hosts)
    look = mount_check_argv(given, hosts, {})
    assert look[:7] == (
        "srun",
        "--nodes=2",
        "--ntasks=2",
        "--ntasks-per-node=1",
        "--nodelist=n0,n1",
        "--kill-on-bad-exit=0",
        "--time=14",
    )
    assert look[-2:] == ("/bin/bash", f"{RUN.session(1)}/mounts.sh") and not any(
        "container" in word for word in look
    )
    assert given.container is not None
    scripts = step_scripts(given.container, [look, srun_argv(given, hosts, {})], 90)
    step = scripts["step.sh"].splitlines()[2:]
    assert step[0].startswith(f"said=$(timeout --kill-after=5 81 {shlex.join(look)} 2>&1)")
    assert step[-1] == f"exec {shlex.join(srun_argv(given, hosts, {}))}"
    assert "exec /bin/bash " + f'{RUN.session(1)}/inside.sh "$node"' in node_text(
        given, dict(enumerate(hosts))
    )
    (tmp_path / "mounts.sh").write_text(scripts["mounts.sh"])
    said = subprocess.run(
        ["bash", str(tmp_path / "mounts.sh")], capture_output=True, text=True, check=False
    )
    assert (
        said.returncode == 8
        and "does not have what containers.pytorch-25-03 mounts: /no/such" in said.stderr
    )


@pytest.mark.parametrize(
    ("look", "code", "said"),
    [
        ("true", 0, "started"),
        (
            "echo 'srun: error: n1: task 1: Exited with exit code 8' >&2; exit 8",
            8,
            "nothing was started: not every node has what containers.pytorch-25-03 starts"
            " of and mounts",
        ),
        (
            "sleep 86400",
            8,
            (
                "nothing was started: no look within 1 s at what containers.pytorch-25-03 starts of"
                " and mounts; a prolog or a file system that is slow needs a longer"
            ),
        ),
        (
            "echo one; echo 'srun: error: Unable to create step' >&2; exit 1",
            8,
            "mounts ended with 1: srun: error: Unable to create step",
        ),
        ("exit 3", 8, "mounts ended with 3: "),
    ],
)
def test_a_look_that_fails_itself_is_told_from_a_mount_that_is_missing(
    look: str, code: int, said: str
) -> None:
    container = session(job("azure-gpt3-175b"), [Host("n0")]).container
    assert container is not None
    seconds = 1.5 if "sleep" in look else 3600.0
    script = step_scripts(container, [["bash", "-c", look], ["echo", "started"]], seconds)[
        "step.sh"
    ]
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == code and said in done.stdout.splitlines()[-1]
    assert ("started" in done.stdout.splitlines()) == (code == 0)
