"""setup-hosts: its pieces of shell, run by bash on files of the test; on real hosts in
tests/cluster/test_care.py. NFS itself is exact text."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.conftest import Project
from trainkit.base.errors import ConfigError
from trainkit.jobs.clusters import Cluster
from trainkit.launch.cluster_care import provision as setup
from trainkit.launch.hosts.hostfile import Host, read_hostfile

PAIR = (Host("104.171.200.199"), Host("fd00::7", user="ubuntu"))
SHARE = Path("/home/ubuntu/gpt-neox/data")
PUBLIC = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIKey me@head"
FAR = """
[clusters.far]
launcher = "pdsh"
gpus_per_node = 4
"""


def bash(text: str, home: Path, *programs: str) -> tuple[int, str, str]:
    """(exit code, its last word, stderr) of a step. `programs` are there and do nothing but note
    how they were called."""
    bin = home / "bin"
    bin.mkdir(parents=True, exist_ok=True)
    for name in programs:
        (bin / name).write_text(
            f'#!/bin/sh\necho {name} "$@" >> {home}/called\n[ {name} != mountpoint ] || [ -e'
            f" {home}/mounted ]\n"
        )
        (bin / name).chmod(0o755)
    # the files are ours, whoever we are
    (bin / "sudo").write_text(
        '#!/bin/sh\nwhile case "$1" in -*) ;; *) false ;; esac; do shift; done\nexec "$@"\n'
    )
    (bin / "sudo").chmod(0o755)
    scratch = home / "scratch"
    scratch.mkdir(exist_ok=True)
    environment = {
        **os.environ,
        "HOME": str(home),
        "PATH": f"{bin}:{os.environ['PATH']}",
        "TMPDIR": str(scratch),
    }
    done = subprocess.run(
        ["bash", "-s"], input=text, env=environment, capture_output=True, text=True, check=False
    )
    assert not list(scratch.iterdir())  # no step leaves a temporary file
    return done.returncode, done.stdout.strip().rpartition("trainkit: ")[2], done.stderr


def called(home: Path) -> list[str]:
    return (home / "called").read_text().splitlines() if (home / "called").exists() else []


def test_exports_are_never_joined_nor_doubled(tmp_path: Path) -> None:
    """Trap 10 of the reference: `printf ... | sudo tee -a /etc/exports` writes no newline, so
    that a second run joins two entries."""
    exports = tmp_path / "exports"
    exports.write_text("/srv 10.0.0.1(ro)")  # no newline at the end
    text = setup.export_step(SHARE, PAIR).text.replace("/etc/exports", str(exports))
    options = "(rw,sync,no_subtree_check,no_root_squash)"
    block = (
        f"# trainkit {SHARE}: begin\n{SHARE} 104.171.200.199{options} fd00::7{options}\n# trainkit"
        f" {SHARE}: end\n"
    )
    text = text.replace(f"mkdir -p {SHARE}", "true")
    assert (
        bash(text, tmp_path, "exportfs")[:2] == (0, "changed")
        and exports.read_text() == "/srv 10.0.0.1(ro)\n" + block
    )
    assert (
        bash(text, tmp_path, "exportfs")[:2] == (0, "already")
        and exports.read_text() == "/srv 10.0.0.1(ro)\n" + block
    )
    assert called(tmp_path) == ["exportfs -ra"]  # only where something was new
    fewer = (
        setup.export_step(SHARE, PAIR[:1])
        .text.replace("/etc/exports", str(exports))
        .replace(f"mkdir -p {SHARE}", "true")
    )
    exports.write_text(exports.read_text() + "/other *(ro)\n")
    assert bash(fewer, tmp_path, "exportfs")[1] == "changed"
    assert (
        exports.read_text()
        == f"/srv 10.0.0.1(ro)\n/other *(ro)\n{block.replace(f' fd00::7{options}', '')}"
    )


def test_a_block_that_somebody_has_broken_is_left_alone(tmp_path: Path) -> None:
    exports = tmp_path / "exports"
    exports.write_text(f"# trainkit {SHARE}: begin\n/precious *(rw)\n")
    text = (
        setup.export_step(SHARE, PAIR)
        .text.replace("/etc/exports", str(exports))
        .replace(f"mkdir -p {SHARE}", "true")
    )
    code, _, error = bash(text, tmp_path, "exportfs")
    assert (
        code == 1
        and "do not pair" in error
        and "/precious *(rw)" in exports.read_text()
        and called(tmp_path) == []
    )


def test_without_nfs_it_says_what_to_install(tmp_path: Path) -> None:
    text = setup.export_step(SHARE, PAIR).text.replace("command -v exportfs", "false")
    assert (code := bash(text, tmp_path))[0] == 1 and "apt-get install nfs-kernel-server" in code[2]


def test_the_line_of_fstab_and_the_mount(tmp_path: Path) -> None:
    fstab, there = tmp_path / "fstab", tmp_path / "data"
    fstab.write_text("/dev/sda1 / ext4 defaults 0 1")
    assert (
        "[fd00::1]:/data /data nfs " in setup.mount_step(Path("/data"), "fd00::1", PAIR[0]).script
    )
    text = setup.mount_step(there, "104.171.200.190", PAIR[0]).text.replace(
        "/etc/fstab", str(fstab)
    )
    assert bash(text, tmp_path, "mount.nfs", "mount", "mountpoint")[:2] == (0, "changed")
    block = (
        f"# trainkit {there}: begin\n104.171.200.190:{there} {there} nfs"
        f" rw,hard,noatime,_netdev,nofail 0 0\n# trainkit {there}: end\n"
    )
    assert fstab.read_text() == "/dev/sda1 / ext4 defaults 0 1\n" + block and there.is_dir()
    (tmp_path / "mounted").touch()
    assert bash(text, tmp_path, "mount.nfs", "mount", "mountpoint")[:2] == (
        0,
        "already",
    ) and fstab.read_text().endswith("0 1\n" + block)
    assert called(tmp_path) == [
        f"mountpoint -q {there}",
        f"mount {there}",
        f"mountpoint -q {there}",
    ]


def test_keys(tmp_path: Path) -> None:
    make = setup.key_step().text
    assert bash(make, tmp_path)[:2] == (0, "changed")
    key = setup.own_public_key(tmp_path)
    assert (
        key is not None
        and key.startswith("ssh-ed25519 ")
        and (tmp_path / ".ssh").stat().st_mode & 0o777 == 0o700
    )
    assert bash(make, tmp_path)[:2] == (0, "already") and setup.own_public_key(tmp_path) == key
    accepted = tmp_path / ".ssh" / "authorized_keys"
    accepted.write_text("ssh-rsa AAAA somebody")  # without a newline again
    accept = setup.accept_step(PAIR[0], PUBLIC).text
    assert bash(accept, tmp_path)[:2] == (0, "changed") and bash(accept, tmp_path)[:2] == (
        0,
        "already",
    )
    assert (
        accepted.read_text() == f"ssh-rsa AAAA somebody\n{PUBLIC}\n"
        and accepted.stat().st_mode & 0o777 == 0o600
    )
    hostile = f"ssh-ed25519 AAAAother it's $(touch {tmp_path}/never) me"
    assert bash(setup.accept_step(PAIR[0], hostile).text, tmp_path)[
        1
    ] == "changed" and accepted.read_text().endswith(f"\n{hostile}\n")
    assert not (tmp_path / "never").exists()


def test_the_hostfile_is_one_that_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "job" / "hostfile"
    text = setup.hostfile_step(
        path, (Host("localhost"), *PAIR, Host("n4", slots=(0, 1), port=2222)), 4
    ).text
    assert bash(text, tmp_path)[:2] == (0, "changed")
    assert (
        path.read_text()
        == "localhost slots=4\n104.171.200.199 slots=4\nubuntu@[fd00::7] slots=4\nn4:2222 slots=2\n"
    )
    assert [(host.name, host.user, host.port, len(host.slots)) for host in read_hostfile(path)][
        2:
    ] == [("fd00::7", "ubuntu", None, 4), ("n4", None, 2222, 2)]
    path.write_text("# ours\n" + path.read_text().rstrip("\n"))
    assert bash(text, tmp_path)[:2] == (0, "already")
    path.write_text("another slots=4\n")
    code, _, error = bash(text, tmp_path)
    assert code == 1 and "names other hosts" in error and path.read_text() == "another slots=4\n"


def test_pdsh_variables(tmp_path: Path) -> None:
    (tmp_path / ".bashrc").write_text("alias x=y")
    text = setup.pdsh_step().text
    assert (bash(text, tmp_path)[1], bash(text, tmp_path)[1]) == ("changed", "already")
    assert (
        (tmp_path / ".bashrc").read_text()
        == "alias x=y\n# trainkit pdsh: begin\nexport DSHPATH=$PATH PDSH_RCMD_TYPE=ssh\n"
        "# trainkit pdsh: end\n"
    )


def test_paths_that_do_not_fit_are_refused() -> None:
    cluster = Cluster(name="c", launcher="ssh")
    for path in (Path("/my data"), Path("data"), Path("/a;b")):
        with pytest.raises(ConfigError, match="an absolute path of letters"):
            setup.SetupPlan(cluster, PAIR, None, 4, path, "head")


def test_it_prints_shell_that_can_be_pasted(project: Project) -> None:
    with open(project.path / "jobs.toml", "a") as file:
        file.write(FAR)
    hosts = (
        "--host",
        "localhost",
        "--host",
        "104.171.200.199",
        "--host",
        "104.171.200.200",
        "--hostfile",
        str(project.path / "hosts"),
    )
    words = (
        "setup-hosts",
        "--cluster",
        "far",
        *hosts,
        "--share",
        "/home/ubuntu/data",
        "--address",
        "104.171.200.190",
    )
    document = project.document(*words)
    assert [step["where"] for step in document["steps"]] == [
        "here",
        "here",
        *["104.171.200.199"] * 2,
        *["104.171.200.200"] * 2,
        "here",
        "here",
    ]
    assert not document["performed"] and not (project.path / "hosts").exists()
    out = project.invoke(*words).stdout
    here, there = out.split("### on 104.171.200.199, 104.171.200.200, in bash:\n")
    assert "104.171.200.190:/home/ubuntu/data /home/ubuntu/data nfs " in there and "slots=4" in here
    for text in (here.partition("in bash:\n")[2], there):
        assert subprocess.run(["bash", "-n"], input=text, text=True, check=False).returncode == 0
    refused = project.invoke("setup-hosts", "--cluster", "here", exit=3)
    assert "hosts are set up for ssh and pdsh" in refused.stderr
    assert "no hostfile" in project.invoke("setup-hosts", "--cluster", "far", exit=3).stderr


@pytest.mark.parametrize("launcher", ["ssh", "pdsh"])
def test_pdsh_is_looked_for_where_it_is_used(launcher: str) -> None:
    cluster = Cluster.model_validate({"name": "far", "launcher": launcher})
    wanted = setup.SetupPlan(cluster, PAIR, None, 8, None, "10.0.0.1")
    assert [step.title for step in wanted.after()] == (
        [setup.pdsh_step().title] if launcher == "pdsh" else []
    )


def test_a_folder_is_shared_with_other_machines_alone() -> None:
    cluster = Cluster.model_validate({"name": "far", "launcher": "ssh"})

    def before(hosts: tuple[Host, ...], share: Path | None) -> list[str]:
        plan = setup.SetupPlan(cluster, hosts, None, 8, share, "10.0.0.1")
        return [step.title for step in plan.before()]

    here = (Host("localhost"),)
    key = setup.key_step().title
    assert before((*here, *PAIR), SHARE) == [key, setup.export_step(SHARE, PAIR).title]
    assert before(here, SHARE) == before(PAIR, None) == [key]
