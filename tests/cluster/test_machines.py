"""The cluster that the other tests stand on: that it is what it says, and leaves nothing."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

from tests.cluster.machines import HEAD, Cluster
from tests.conftest import wait_for


def test_hosts_have_names_addresses_and_disks_of_their_own(cluster: Cluster) -> None:
    names = cluster.on(
        HEAD,
        "pdsh",
        "-R",
        "ssh",
        "-S",
        "-w",
        "node[1-3]",
        "hostname; touch /srv/$(hostname) /dev/shm/$(hostname); ls /srv /dev/shm /tmp",
    )
    for host in cluster.nodes:
        lines = [
            line.split(": ", 1)[1] for line in names.splitlines() if line.startswith(f"{host}: ")
        ]
        assert lines.count(host) == 3 and not {*cluster.nodes, HEAD} - {host} & set(lines), (
            "its name, one file in either folder"
        )
    assert not list(Path("/srv").glob("node*")) and not list(Path("/dev/shm").glob("node*"))
    assert cluster.on("node1", "ssh", "node3", "hostname") == "node3\n"


def test_cut_heal_crash_boot(cluster: Cluster) -> None:
    def reached(host: str) -> bool:
        return (
            subprocess.run(
                cluster.command(HEAD, "ssh", "-oConnectTimeout=1", host, "true"),
                capture_output=True,
                check=False,
            ).returncode
            == 0
        )

    cluster.cut("node1")
    assert not reached("node1") and reached("node2")
    cluster.heal("node1")
    wait_for(lambda: reached("node1"), "node1 to be reached again", timeout=600)
    sleeper = subprocess.Popen(
        cluster.command("node2", "env", "TRAINKIT_RUN=a-run/1/0", "setsid", "sleep", "1000")
    )
    wait_for(
        lambda: [p.host for p in cluster.processes_of("a-run")] == ["node2"],
        "the process on node2",
        timeout=600,
    )
    cluster.crash("node2")
    sleeper.wait()
    assert not cluster.processes_of("a-run") and not reached("node2")
    cluster.boot("node2")
    assert reached("node2")


def test_a_cluster_whose_owner_is_killed_takes_itself_down(
    cluster: Cluster, tmp_path: Path
) -> None:
    """And leaves no process, no mount, no interface and no file behind; the first cluster, with
    the same addresses, does not notice."""

    def surroundings() -> list[str]:
        """But for the mounts and links of containers that run beside."""
        links, mounts, files = (
            subprocess.run(argv, capture_output=True, text=True, check=True).stdout.splitlines()
            for argv in (["ip", "-o", "link"], ["mount"], ["ls", "/etc", "/srv", "/run"])
        )
        names = [line.split(": ")[1] for line in links]
        return [
            *(name for name in names if not name.startswith(("veth", "cni-", "podman", "docker"))),
            *(line for line in mounts if str(folder) in line),
            *files,
        ]

    folder = tmp_path / "other"
    before = surroundings()
    code = f"""import time; from pathlib import Path; from tests.cluster.machines import Cluster
Cluster(Path({str(folder)!r}), 1); print("up", flush=True); time.sleep(99)"""
    owner = subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[2],
    )
    assert owner.stdout is not None and owner.stdout.readline() == "up\n"
    owner.send_signal(signal.SIGKILL)
    owner.communicate()

    def left() -> list[Path]:
        named = str(folder).encode()
        return [p for p in Path("/proc").glob("[0-9]*") if named in _bytes(p / "cmdline")]

    # its shell removes the folder, and ends after that
    wait_for(
        lambda: not folder.exists() and not left(), "the cluster to go with its owner", timeout=600
    )
    assert surroundings() == before
    assert cluster.on("node1", "hostname") == "node1\n"


def _bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""
