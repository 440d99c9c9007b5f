"""What the transports are told, what they are refused, and that they die with us."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import alive, wait_for
from tests.programs import put_program
from trainkit.base.errors import ConfigError
from trainkit.jobs.clusters import Cluster
from trainkit.launch.hosts.hostfile import Host
from trainkit.launch.launchers import LAUNCHERS, supervisor_address
from trainkit.launch.launchers.local import Local
from trainkit.launch.launchers.pdsh import Pdsh, PdshTransport, labels, ssh_variables
from trainkit.launch.launchers.ssh import Ssh, ssh_host_name, ssh_options
from trainkit.launch.launchers.transports import TransportPerHost, start_transport
from trainkit.launch.session import Session

AWAY = [Host("node1"), Host("node2", user="ann"), Host("node3", port=2222)]
ALONE = ("-oControlMaster=no", "-oControlPath=none", "-oClearAllForwardings=yes")
OPTIONS = (
    "-T",
    "-oBatchMode=yes",
    "-oConnectTimeout=15",
    "-oServerAliveInterval=5",
    "-oServerAliveCountMax=6",  # of 5 s, twice the lease
    *ALONE,
)


def session(folder: Path, hosts: list[Host], **cluster: Any) -> Session:
    made = Cluster(name="c", **{"launcher": "ssh", **cluster})
    return Session(
        folder / "s",
        "run",
        1,
        hosts,
        made,
        folder / "code",
        folder / "logs",
        {"PATH": os.environ["PATH"], "WHO": "us"},
    )


def test_ssh_lines_carry_only_safe_words(tmp_path: Path) -> None:
    given = session(
        tmp_path,
        AWAY,
        ssh_args=("-oStrictHostKeyChecking=accept-new",),
        env={"X": "$(id)"},
        prolog=("module load 'x y'",),
    )
    lines = Ssh().commands(given, range(3))
    end = ("bash", f"{tmp_path}/s/node.sh")
    assert lines[0] == ("ssh", "-oStrictHostKeyChecking=accept-new", *OPTIONS, "node1", *end, "0")
    assert lines[1] == (
        "ssh",
        "-oStrictHostKeyChecking=accept-new",
        *OPTIONS,
        "-l",
        "ann",
        "node2",
        *end,
        "1",
    )
    assert lines[2] == (
        "ssh",
        "-oStrictHostKeyChecking=accept-new",
        *OPTIONS,
        "-p",
        "2222",
        "node3",
        *end,
        "2",
    )


def test_pdsh_line(tmp_path: Path) -> None:
    hosts = [Host("localhost"), *AWAY[:2]]
    given = session(tmp_path, hosts, launcher="pdsh")
    away, here = Pdsh().commands(given, range(3))
    assert away == (
        "pdsh",
        "-R",
        "ssh",
        "-S",
        "-t",
        "15",
        "-f",
        "32",
        "-w",
        "node1,ann@node2",
        "bash",
        f"{tmp_path}/s/pdsh.sh",
        "%n",
    )
    assert here == ("/bin/bash", f"{tmp_path}/s/node.sh", "0")
    assert ssh_variables(given) == {"PDSH_SSH_ARGS_APPEND": " ".join(OPTIONS)}


@pytest.mark.parametrize(
    ("hosts", "said"),
    [
        (AWAY, "pdsh cannot take a port"),
        ([Host("fe80::1%eth0")], "pdsh cannot take host names like 'fe80::1%eth0'"),
    ],
)
def test_what_pdsh_cannot_do_is_refused_with_a_way_out(
    tmp_path: Path, hosts: list[Host], said: str
) -> None:
    with pytest.raises(ConfigError, match=said) as caught:
        Pdsh().commands(session(tmp_path, hosts, launcher="pdsh"), range(len(hosts)))
    assert "launcher = 'ssh'" in str(caught.value)


def test_an_argument_with_a_space_does_not_reach_pdsh(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="pdsh cannot pass '-o ProxyCommand=a b'"):
        ssh_variables(session(tmp_path, AWAY, ssh_args=("-o ProxyCommand=a b",)))


def test_a_root_that_would_need_quoting_is_refused_for_ssh_and_fine_here(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not fit on an ssh line"):
        session(tmp_path / "with space", AWAY).write(tmp_path, "127.0.0.1", 1, {})
    session(tmp_path / "with space", [Host("localhost")], launcher="local").write(
        tmp_path, "127.0.0.1", 1, {}
    )


def test_several_hosts_are_not_local(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nodes = 3 need launcher = 'ssh'"):
        Local().commands(session(tmp_path, AWAY, launcher="local"), range(3))
    assert set(LAUNCHERS) == {"local", "ssh", "pdsh", "slurm", "kubernetes"}


def test_the_head_is_dialled_where_the_hosts_can_reach_it() -> None:
    assert supervisor_address(Cluster(), [Host("localhost")]) == "127.0.0.1"
    assert (
        supervisor_address(Cluster(interface="127.0.0.0/8"), [Host("203.0.113.7")]) == "127.0.0.1"
    )


@pytest.mark.skipif(shutil.which("ssh") is None, reason="needs OpenSSH's client")
def test_an_alias_of_ssh_config_is_resolved(tmp_path: Path) -> None:
    config = tmp_path / "config"
    config.write_text("Host box\n  HostName 192.0.2.7\n")
    assert ssh_host_name(Cluster(ssh_args=("-F", str(config))), Host("box")) == "192.0.2.7"
    assert ssh_host_name(Cluster(ssh_args=("-F", str(config))), Host("other")) == "other"


@pytest.mark.skipif(shutil.which("ssh") is None, reason="needs OpenSSH's client")
def test_a_connection_is_its_own_whatever_ssh_config_says(tmp_path: Path) -> None:
    config = tmp_path / "config"
    config.write_text(
        "Host *\n  ControlMaster auto\n  ControlPath ~/.ssh/%C\n  LocalForward 8888"
        " localhost:8888\n"
    )
    options = ssh_options(session(tmp_path, AWAY))
    said = subprocess.run(
        ["ssh", "-F", str(config), *options, "-G", "node1"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.splitlines()
    assert (
        "controlmaster false" in said
        and "clearallforwardings yes" in said
        and not any(line.startswith(("controlpath", "localforward")) for line in said)
    )
    own = ssh_options(session(tmp_path, AWAY, ssh_args=("-oControlPath=/tmp/%C",)))
    said = subprocess.run(
        ["ssh", "-F", str(config), *own, "-G", "node1"], capture_output=True, text=True, check=True
    ).stdout.splitlines()
    # the cluster's own words come first
    assert any(line.startswith("controlpath /tmp/") for line in said)


def test_the_script_of_a_node_runs_the_prolog_and_stops_where_it_fails(tmp_path: Path) -> None:
    code = tmp_path / "code" / "trainkit" / "launch" / "agent"
    code.mkdir(parents=True)
    (code / "main.py").write_text(
        "import os, sys; print(sys.argv[1:], sys.flags.isolated, sys.flags.no_site,"
        " os.environ.get('MODULE'))"
    )
    given = session(tmp_path, AWAY, prolog=("export MODULE='a b'",))
    given.write(tmp_path, "127.0.0.1", 1, {"KEY": "value-of-key"})
    said = subprocess.run(
        ["bash", str(given.script), "2"], capture_output=True, text=True, check=True
    ).stdout
    assert said == f"{[str(given.folder), '2']} 1 1 a b\n"
    assert (
        given.folder / "secrets.json"
    ).stat().st_mode & 0o777 == 0o600 and given.folder.stat().st_mode & 0o777 == 0o700
    given.forget_secrets()
    assert not any(b"value-of-key" in p.read_bytes() for p in given.folder.iterdir())
    failing = session(tmp_path / "2", AWAY, prolog=("false", "echo not reached"))
    failing.write(tmp_path, "127.0.0.1", 1, {})
    done = subprocess.run(
        ["bash", str(failing.script), "0"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1 and done.stdout == ""


def test_lines_of_pdsh_go_to_their_hosts_logs(tmp_path: Path) -> None:
    output = tmp_path / "pdsh.log"
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(10_000)"])
    logs = {0: tmp_path / "node1.log", 2: tmp_path / "node3.log"}
    transports = PdshTransport(child, output, logs, {"node1": 0, "node3": 2}, TransportPerHost({}))
    try:
        output.write_bytes(
            b"node1: one\nnode3: ssh: connect to host node3 port 22: No route to host\nnode9:"
            b" nobody\npdsh@h: node3: ssh exited with exit code 255\nnode1: tw"
        )
        ended = transports.poll()
        assert (
            ended[2].code == 255
            and ended[2].last == "ssh: connect to host node3 port 22: No route to host"
            and set(ended) == {2}
        )
        with open(output, "ab") as more:
            more.write(b"o: three\n")
        transports.poll()
        assert logs[0].read_text() == "one\ntwo: three\n"
    finally:
        transports.close()
    assert child.returncode == -signal.SIGKILL and set(transports.poll()) == {0, 2}


def test_hosts_with_a_domain_are_known_by_what_pdsh_calls_them(tmp_path: Path) -> None:
    """Recorded from pdsh 2.34: it leaves away a domain that all hosts have."""
    names = {0: "node1.test", 2: "node2.test", 3: "10.0.0.7"}
    known = labels(names)
    assert known == {"node1": 0, "node2": 2, "node1.test": 0, "node2.test": 2, "10.0.0.7": 3}
    assert labels({0: "a.x.org", 1: "a.y.org", 2: "b.x.org"}) == {
        "a.x.org": 0,
        "a.y.org": 1,
        "b.x.org": 2,
        "b": 2,
    }
    output = tmp_path / "pdsh.log"
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(10_000)"])
    logs = {node: tmp_path / f"{name}.log" for node, name in names.items()}
    transports = PdshTransport(child, output, logs, known, TransportPerHost({}))
    try:
        output.write_bytes(
            b"node1: hello\nnode2: ssh: Could not resolve hostname node2.test: Name or service not"
            b" known\n"
        )
        transports.poll()
        with open(output, "ab") as more:
            more.write(b"pdsh@head: node2: ssh exited with exit code 255\n")
        ended = transports.poll()
        assert set(ended) == {2} and ended[2].code == 255 and "Could not resolve" in ended[2].last
        assert logs[0].read_text() == "hello\n"
    finally:
        transports.close()


@pytest.mark.skipif(shutil.which("pdsh") is None, reason="needs pdsh")
@pytest.mark.parametrize(
    "names", [["a.x.org", "b.x.org"], ["a.x.org", "b.y.org", "c"], ["192.0.2.1", "192.0.2.2"]]
)
def test_this_pdsh_calls_hosts_as_we_know_them(names: list[str]) -> None:
    said = subprocess.run(
        ["pdsh", "-R", "exec", "-w", ",".join(names), "echo", "%h"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    known = labels(dict(enumerate(names)))
    assert sorted(
        (known[line.partition(": ")[0]], line.partition(": ")[2]) for line in said.splitlines()
    ) == list(enumerate(names))


@pytest.mark.parametrize("launcher", [Ssh(), Pdsh()])
def test_a_start_that_fails_half_way_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, launcher: Ssh | Pdsh
) -> None:
    tools = tmp_path / "bin"
    tools.mkdir()
    for tool in ("ssh", "pdsh"):
        put_program(tools, tool, "#!/no/such/interpreter\n")
    hosts = [Host("localhost"), Host("node1")]
    given = session(tmp_path, hosts, launcher=launcher.name)
    given.write(tmp_path, "127.0.0.1", 1, {})
    given.script.write_text("exec /bin/sleep 10000\n")
    started: list[subprocess.Popen[bytes]] = []

    def noted(*args: Any, **how: Any) -> subprocess.Popen[bytes]:
        started.append(start_transport(*args, **how))
        return started[-1]

    monkeypatch.setattr("trainkit.launch.launchers.local.start_transport", noted)
    monkeypatch.setenv("PATH", str(tools))
    with pytest.raises(FileNotFoundError):
        launcher.start(given, range(2))
    assert len(started) == 1 and started[0].poll() == -signal.SIGKILL


def test_a_transport_dies_with_its_supervisor(tmp_path: Path) -> None:
    program = f"""
import sys, time
from pathlib import Path
from trainkit.launch.launchers.transports import start_transport
log = Path({str(tmp_path / "log")!r})
print(start_transport(["sleep", "10000"], log, keep_stdin=True).pid, flush=True)
time.sleep(600)
"""
    parent = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    assert alive(pid)
    parent.kill()
    parent.wait()
    wait_for(lambda: not alive(pid), "the transport to die")


def test_closing_is_bounded(tmp_path: Path) -> None:
    program = "trap '' TERM INT HUP; sleep 10000 & echo ready; wait; sleep 10000"
    stubborn = subprocess.Popen(
        ["bash", "-c", program], start_new_session=True, stdout=subprocess.PIPE
    )
    assert stubborn.stdout is not None and stubborn.stdout.readline() == b"ready\n"
    transports = TransportPerHost({0: (stubborn, tmp_path / "log")})
    assert transports.poll() == {}
    transports.close()
    assert transports.poll()[0].code == -signal.SIGKILL
    os.killpg(stubborn.pid, signal.SIGKILL)
