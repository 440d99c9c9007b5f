"""Bad hosts and bad surroundings on real hosts: each is named with its reason, nothing waits for
ever, nothing is left."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cluster.machines import HEAD, Cluster
from tests.cluster.on_head import ClusterProject
from tests.cluster.test_endings import NO_RETRIES, begun, events, nothing_left, of_agent
from tests.conftest import wait_for

LEASE = 3.0  # of the project


def said(done: subprocess.CompletedProcess[str]) -> str:
    return done.stdout + done.stderr


def different_on(project: ClusterProject, host: str, command: str) -> None:
    """Have one host's interpreter do `command` instead."""
    path = project.path / "python"
    first, _, rest = path.read_text().partition("\n")
    path.write_text(f'{first}\nif [ "$(hostname)" = {host} ]; then {command}; fi\n{rest}')


def test_all_hosts_that_cannot_be_reached_stand_in_one_table(
    head: ClusterProject, cluster: Cluster
) -> None:
    """A wrong key, a host that is off, a name that nobody has, one whose agent never begins."""
    head.hosts(
        "node1 slots=2", "node2 slots=2", "node3 slots=2", "node9 slots=2", "nowhere slots=2"
    )
    different_on(head, "node3", "exec sleep 60")
    cluster.on("node2", "mv", "/etc/ssh/authorized_keys", "/etc/ssh/keys-of-nobody")
    try:
        words = ["--nodes", "5", "--share", "--set", "cluster.watch.connect=15"]
        words += ["--set", "training.global_batch_size=20", "--set"]
        both = [
            head.start("train", "random", *words, f"cluster.launcher={launcher}")
            for launcher in ("ssh", "pdsh")
        ]
        for process in both:
            text = "".join(process.communicate())
            assert process.returncode == 8 and "Traceback" not in text, text
            table = (
                text.partition("4 of 5 hosts are not reached:\n")[2]
                .partition("next:")[0]
                .splitlines()
            )
            rows = {line.split()[0]: line for line in table if line.startswith("  ")}
            assert list(rows) == ["node2", "node3", "node9", "nowhere"], text
            assert "Permission denied" in rows["node2"] and "within 15 s" in rows["node3"], text
            assert (
                any(w in rows["node9"] for w in ("timed out", "No route to host"))
                and "resolve" in rows["nowhere"]
            ), text
    finally:
        cluster.on("node2", "mv", "/etc/ssh/keys-of-nobody", "/etc/ssh/authorized_keys")
        # what never became an agent of ours
        cluster.kill(
            *[p for p in cluster.processes() if p.argv[0] == "sleep" and p.argv[1] == "60"]
        )


def test_hosts_that_are_not_by_themselves(head: ClusterProject) -> None:
    """One machine by two names; two machines with one folder for the locks of their slots."""
    head.ranks_do("beat(1); done()")
    head.hosts("node1 slots=2", "10.77.0.11 slots=2")
    # on a busy machine: what is tested comes after it
    patient = ("--set", "cluster.watch.connect=60")
    text = said(head.invoke("train", "random", *patient, exit=7))
    assert "1 of 2 hosts are not by themselves" in text and (
        "10.77.0.11  is the same machine as node1" in text
        or "node1  is the same machine as 10.77.0.11" in text
    )
    head.hosts("node1 slots=2", "node2 slots=2")
    text = said(
        head.invoke(
            "train", "random", "--set", f"cluster.node_folder={head.path}/locks", *patient, exit=7
        )
    )
    assert (
        "has its slots' locks where node" in text
        and f"clusters.pair.node_folder = {head.path}/locks" in text
    )


def test_hosts_that_disagree_stand_in_one_table(
    head: ClusterProject, request: pytest.FixtureRequest
) -> None:
    """node2 has another torch and a clock two minutes ahead. (A hostfile of 1,000 hosts, of
    which two are used.)"""
    head.hosts("node[1-1000] slots=2")
    other = head.path / "other"
    (other / "bin").mkdir(parents=True)
    (other / "bin" / "python").symlink_to(Path(sys.executable).resolve())
    (other / "pyvenv.cfg").write_text(f"home = {Path(sys.executable).resolve().parent}\n")
    torch = other / "lib" / f"python3.{sys.version_info.minor}" / "site-packages" / "torch"
    torch.mkdir(parents=True)
    (torch / "version.py").write_text("__version__ = '1.2.3'\n")
    if shutil.which("faketime") is None:
        assert not request.config.getoption("--require-cluster"), "the package faketime is missing"
        pytest.skip("the package faketime is missing")
    different_on(head, "node2", f'exec faketime -f +120s {other}/bin/python "$@"')
    text = said(head.invoke("train", "random", exit=7))
    rows = [line for line in text.splitlines() if line.split()[:1] in (["node1"], ["node2"])]
    assert any("torch 1.2.3" in row for row in rows) and any(
        "clock is 120 s ahead" in row or "clock is 119 s ahead" in row for row in rows
    ), text
    assert not any(e["event"] == "rank_started" for e in events(head.runs()[-1]))


def test_a_root_that_is_not_shared(head: ClusterProject) -> None:
    text = said(head.invoke("train", "random", "--set", "cluster.root=/srv/runs", exit=7))
    assert "not shared" in text and "node1" in text and "node2" in text


def knock(address: str, port: int, token: bytes) -> str:
    """Connect as an agent does, run on the head: what the server says after our answer."""
    from trainkit.launch.protocol.framing import Decoder, encode
    from trainkit.launch.protocol.handshake import make_proof, new_nonce

    decoder, nonce = Decoder(), new_nonce()
    with socket.create_connection((address, port), timeout=600) as link:
        link.sendall(encode({"type": "knock", "role": "agent", "node": 0, "nonce": nonce}))
        challenge = next(decoder.feed(link.recv(4096)))
        link.sendall(
            encode(
                {
                    "type": "answer",
                    "proof": make_proof(token, "agent", nonce, str(challenge["nonce"]), "agent:0"),
                }
            )
        )
        return "closed" if link.recv(4096) == b"" else "open"


# by several processes: how many files one may have open differs
TAKE_PORTS = """import os, socket, time
ready, told = os.pipe()
for first in range(20000, 32000, 400):
    if os.fork() == 0:
        held = [socket.create_server(("", port)) for port in range(first, first + 400, 2)]
        os.write(told, b".")
        time.sleep(1000)
taken = 0
while taken < 30:
    taken += len(os.read(ready, 30))
print("taken", flush=True)
time.sleep(1000)"""


def test_taken_ports_a_stranger_and_an_agent_that_hangs(
    head: ClusterProject, cluster: Cluster
) -> None:
    head.ranks_do("steps(100_000, 0.1)")
    head.hosts("node1 slots=1", "node2 slots=1")
    holder = subprocess.Popen(
        cluster.command("node1", sys.executable, "-c", TAKE_PORTS),
        stdout=subprocess.PIPE,
        text=True,
    )
    assert holder.stdout is not None and holder.stdout.readline() == "taken\n"
    process = head.start("train", "random", *NO_RETRIES)
    run = begun(head, process)
    world = json.loads((run / "launch/world.json").read_text())
    assert world["master_addr"] == "10.77.0.11" and world["master_port"] % 2 == 1
    cluster.kill(*[p for p in cluster.processes() if "range(20000" in " ".join(p.argv)])
    holder.wait()

    sign = json.loads((run / "launch/supervisor.json").read_text())
    code = (
        f"import sys; sys.path.insert(0, {str(Path(__file__).parents[2])!r}); from"
        " tests.cluster.test_refusals import knock; "
    )
    assert (
        cluster.on(
            HEAD,
            sys.executable,
            "-c",
            code + f"print(knock({sign['address']!r}, {sign['port']}, bytes(32)))",
        )
        == "closed\n"
    )
    stranger = wait_for(
        lambda: next((e for e in events(run) if e["event"] == "stranger"), None),
        "the stranger to be reported",
    )
    assert (
        "10.77.0.10" in stranger["peer"] and "token" in stranger["why"] and process.poll() is None
    )

    head.hosts("node1 slots=1", "node2 slots=1", "node9 slots=1")
    rows = {
        row["host"]: row
        for row in head.document("nodes", "--cluster", "pair", "--hostfile", "hostfile", exit=7)[
            "hosts"
        ]
    }
    assert (
        rows["node1"]["reachable"] and rows["node2"]["reachable"] and not rows["node9"]["reachable"]
    ), rows
    assert run.name in json.dumps(rows["node1"]) and run.name in json.dumps(rows["node2"]), rows
    assert run.name in said(head.invoke("train", "random", "--exclude", "node9", exit=17))

    (agent,) = [p for p in cluster.processes_of(run.name) if of_agent(p) and p.host == "node2"]
    cluster.kill(agent, number=signal.SIGSTOP)
    out, err = process.communicate()
    assert process.returncode in (10, 13) and "contact with node2 was lost" in out + err, out + err
    nothing_left(cluster, run.name)


def test_a_full_disk(head: ClusterProject, cluster: Cluster) -> None:
    """The root is full: a rank that fails then leaves nothing running, a new run is refused with
    words, and with room again the run goes on."""
    head.ranks_do("steps(100_000, 0.1)")
    head.hosts("node1 slots=1", "node2 slots=1")
    small, jobs = cluster.folder / "small", head.path / "jobs.toml"
    assert not os.listdir(small), "it is a file system of the hosts, not of this machine"
    jobs.write_text(
        jobs.read_text().replace("[clusters.pair]", f'[clusters.pair]\nroot = "{small}"')
    )
    head.invoke("train", "random", "--detach")
    run = cluster.on(HEAD, "ls", f"{small}/runs/random").strip()
    try:
        cluster.on(HEAD, "sh", "-c", f"dd if=/dev/zero of={small}/filling bs=1M 2> /dev/null; true")
        refused = head.start("train", "random", "--share")
        text = "".join(refused.communicate())
        assert (
            refused.returncode in (6, 8, 10) and "No space left" in text and "Traceback" not in text
        ), (refused.returncode, text)
        cluster.kill(*[p for p in cluster.processes_of(run) if p.started and p.host == "node2"])
        nothing_left(cluster, run)
        cluster.on(HEAD, "rm", f"{small}/filling")
        assert head.document("status", run)["state"] == "failed"
        head.invoke("resume", run, "--detach")
        assert {p.host for p in cluster.processes_of(run) if p.started} == {"node1", "node2"}
        head.invoke("cancel", run, exit=15)
    finally:
        cluster.on(HEAD, "sh", "-c", f"rm -rf {small}/*")
