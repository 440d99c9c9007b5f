"""doctor's judgement of hosts and pairs, without any; the real thing is in
tests/cluster/test_care.py."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Project
from trainkit.cli.hosts.doctor import _cells
from trainkit.jobs.clusters import Cluster
from trainkit.jobs.devices import built_in_device
from trainkit.launch.cluster_care.health_checks import (
    examine_hosts,
    find_gpu_problems,
    find_pair_problems,
)
from trainkit.launch.cluster_care.host_checks import COLUMNS, find_host_problems
from trainkit.launch.cluster_care.pairwise_bandwidth import (
    PairBandwidth,
    find_slow_nodes,
    pairing_rounds,
)
from trainkit.launch.cluster_care.remote_commands import CommandResult
from trainkit.launch.hosts.hostfile import Host
from trainkit.launch.protocol.frames import HostFacts
from trainkit.launch.session import Session
from trainkit.launch.supervise.agent_pool import JoinedAgent, MissingAgent
from trainkit.launch.supervise.host_consistency import Finding

GIB = 2**30
FINE: dict[str, Any] = {
    "versions": {"python": "3.11.2", "torch": "2.13.0", "driver": "550.54.14", "kernel": "6.1.0"},
    "writable": None,
    "address": "10.0.0.1",
    "gpus": ["NVIDIA H100 80GB HBM3"] * 8,
    "disk_free": 500 * GIB,
    "shared_memory": 64 * GIB,
    "open_files": 1048576,
    "locked_memory": -1,
}


def session(tmp_path: Path, count: int, **more: Any) -> Session:
    values = {"name": "c", "root": str(tmp_path), "launcher": "ssh"}
    device = built_in_device("h100-sxm-80gb")
    cluster = Cluster.model_validate({**values, "device": device, **more})
    hosts = [Host(f"n{i}", slots=tuple(range(8))) for i in range(count)]
    return Session(
        tmp_path / "s", "doctor", 0, hosts, cluster, tmp_path / "code" / "abc", tmp_path, {}
    )


def facts_of(values: Mapping[str, object]) -> HostFacts:
    return HostFacts.from_json({"type": "hello", "node": 0, **values})


def found(session: Session, *changes: dict[str, Any] | str) -> list[tuple[str, str, bool, str]]:
    """(host, what, wrong, message) for hosts that differ from FINE in this, or did not come for
    this reason."""
    answers: list[JoinedAgent | MissingAgent] = []
    for node, change in enumerate(changes):
        if isinstance(change, str):
            answers.append(MissingAgent(node, f"n{node}", change))
            continue
        facts = {**FINE, "nonce": session.nonce, "snapshot": session.code.name, **change}
        answers.append(
            JoinedAgent(
                node,
                f"n{node}",
                facts_of({k: v for k, v in facts.items() if k != "ahead"}),
                float(change.get("ahead", 0.0)),
            )
        )
    findings = find_host_problems(answers, session.hosts, session)
    assert all(f.advice and f.what in (*COLUMNS, "reach") for f in findings)
    return [(f.host, f.what, f.wrong, f.message) for f in findings]


def test_hosts_that_are_well_have_no_finding(tmp_path: Path) -> None:
    assert found(session(tmp_path, 3), {}, {}, {}) == []


@pytest.mark.parametrize(("mode", "open_"), [(0o777, True), (0o1777, False), (0o775, False)])
def test_a_root_that_everybody_may_write(tmp_path: Path, mode: int, open_: bool) -> None:
    tmp_path.chmod(mode)
    here = session(tmp_path, 2)
    findings = find_host_problems([], here.hosts, here)
    assert [(f.host, f.what, f.wrong, f.advice) for f in findings] == [
        ("n0", "root", False, f"`chmod o-w {tmp_path}`")
    ] * open_


VERSIONS = FINE["versions"]


@pytest.mark.parametrize(
    ("change", "what", "wrong", "words"),
    [
        (
            {"versions": {**VERSIONS, "torch": "2.12.0"}},
            "torch",
            True,
            "torch 2.12.0; 2.13.0 on 2 of 3 hosts",
        ),
        (
            {"versions": {**VERSIONS, "torch": None}},
            "torch",
            True,
            "torch is missing; 2.13.0 on 2 of 3 hosts",
        ),
        (
            {"versions": {**VERSIONS, "python": "3.12.1"}},
            "python",
            True,
            "python 3.12.1; 3.11.2 on 2 of 3 hosts",
        ),
        (
            {"versions": {**VERSIONS, "driver": "535.1"}},
            "driver",
            False,
            "driver 535.1; 550.54.14 on 2 of 3 hosts",
        ),
        ({"versions": {**VERSIONS, "kernel": "5.15"}}, "kernel", False, "kernel 5.15"),
        ({"ahead": -121.0}, "clock", True, "its clock is 121 s behind; 30 s are allowed"),
        ({"nonce": "another"}, "root", True, "clusters.c.root is not shared"),
        ({"snapshot": "other"}, "root", True, "sees other code"),
        ({"writable": "No space left on device"}, "root", True, "No space left on device"),
        ({"disk_free": GIB // 2}, "disk", True, "0.5 GiB are free"),
        ({"gpus": FINE["gpus"][:7]}, "gpus", True, "7 GPUs; its slots need 8"),
        (
            {"gpus": ["NVIDIA A100"] * 8},
            "gpus",
            False,
            "NVIDIA A100; most hosts have NVIDIA H100 80GB HBM3",
        ),
        ({"errors": {"triton": "there is no Python.h: get it"}}, "gpus", False, "no Python.h; tr"),
        ({"address_error": "no interface ib0"}, "address", True, "no interface ib0"),
        ({"address": "127.0.1.1"}, "address", True, "127.0.1.1, which others cannot reach"),
        ({"open_files": 1024}, "files", False, "may open 1,024 files"),
        ({"locked_memory": 65536}, "files", False, "of memory may be locked"),
        ({"shared_memory": 64 * 2**20}, "shm", True, "/dev/shm has 64 MiB free"),
    ],
)
def test_each_finding_names_host_and_value(
    tmp_path: Path, change: dict[str, Any], what: str, wrong: bool, words: str
) -> None:
    (one,) = found(session(tmp_path, 3), {}, change, {})
    assert one[:3] == ("n1", what, wrong) and words in one[3], one


def test_a_python_or_a_torch_that_is_not_for_trainkit_itself(tmp_path: Path) -> None:
    """Agents run with it, so that doctor can say what does not."""
    old = {"versions": {**VERSIONS, "python": "3.8.10"}}
    for host, what, wrong, message in found(session(tmp_path, 2), old, old):
        assert host in ("n0", "n1") and what == "python" and wrong
        assert "is 3.8.10; trainkit's own code needs 3.11" in message
    assert len(found(session(tmp_path, 2), old, old)) == 2
    new = {"versions": {**VERSIONS, "torch": "2.99.1"}}
    (one,) = found(session(tmp_path, 1), new)
    assert one[:3] == ("n0", "torch", True) and "torch 2.99.1 was not tried" in one[3]


def test_what_does_not_matter_is_not_told(tmp_path: Path) -> None:
    one = session(tmp_path, 1)
    assert found(one, {"address": "127.0.0.1"}) == []  # alone, nobody has to reach it
    cpu = session(tmp_path, 2, device=built_in_device("cpu"))
    assert found(cpu, {"gpus": []}, {"gpus": [], "locked_memory": 65536}) == []


@pytest.mark.parametrize(
    ("why", "words"),
    [
        ("root@n1: Permission denied (publickey).", "setup-hosts --perform"),
        ("Host key verification failed.", "host key"),
        ("ssh: Could not resolve hostname n1: Name or service not known", "DNS"),
        ("ssh: connect to host n1 port 22: Connection refused", "sshd"),
        ("ssh: connect to host n1 port 22: No route to host", "firewall"),
        ("bash: /mnt/x/sessions/doctor-1/node.sh: No such file or directory", "not mounted"),
        (
            "/mnt/x/node.sh: line 4: /opt/py/bin/python3: No such file or directory",
            "clusters.X.python",
        ),
        ("something nobody has seen", "ssh HOST true"),
    ],
)
def test_advice_for_hosts_that_do_not_come(tmp_path: Path, why: str, words: str) -> None:
    here = session(tmp_path, 2)
    (finding,) = find_host_problems([MissingAgent(1, "n1", why)], here.hosts, here)
    assert (finding.what, finding.wrong, finding.message) == (
        "reach",
        True,
        why,
    ) and words in finding.advice, finding.advice


@pytest.mark.parametrize("count", [2, 3, 4, 5, 8, 9])
def test_rounds_are_disjoint_pairs_and_none_comes_twice(count: int) -> None:
    nodes = [10 + i for i in range(count)]
    every = pairing_rounds(nodes, 100)
    pairs = [pair for each in every for pair in each]
    assert len(set(pairs)) == len(pairs) == count * (count - 1) // 2  # all of them
    assert all(len({node for pair in each for node in pair}) == 2 * len(each) for each in every)
    some = [node for each in pairing_rounds(nodes) for pair in each for node in pair]
    assert min(some.count(node) for node in nodes) >= min(2, count - 1), (
        "a host with one partner cannot be told from it"
    )


def pairs_of(speeds: Mapping[tuple[int, int], float | None]) -> list[PairBandwidth]:
    return [
        PairBandwidth(*pair, speed, "" if speed is not None else "connection closed")
        for pair, speed in speeds.items()
    ]


def test_a_slow_host_is_told_from_a_slow_way() -> None:
    host = find_slow_nodes(pairs_of({(0, 1): 10.0, (0, 2): 2.0, (1, 2): 2.2}))
    assert [slow.nodes for slow in host] == [
        (2,)
    ] and "2.2 GB/s at best with any of 2 partners; a usual pair has 10" in host[0].why
    four = {(0, 1): 10.0, (2, 3): 1.0, (0, 2): 9.0, (1, 3): 11.0, (0, 3): 10.0, (1, 2): 9.5}
    assert [slow.nodes for slow in find_slow_nodes(pairs_of(four))] == [(2, 3)]
    assert find_slow_nodes(pairs_of({(0, 1): 10.0, (0, 2): 6.0, (1, 2): 7.0})) == []
    dead = find_slow_nodes(pairs_of({(0, 1): 10.0, (0, 2): None, (1, 2): None}))
    assert [slow.nodes for slow in dead] == [(2,)] and dead[
        0
    ].why == "no all-reduce: connection closed with any of 2 partners"


def test_of_two_hosts_the_declared_network_is_the_measure() -> None:
    assert (
        find_slow_nodes(pairs_of({(0, 1): 3.0})) == []
        and find_slow_nodes(pairs_of({(0, 1): 30.0}), 50.0) == []
    )
    (slow,) = find_slow_nodes(pairs_of({(0, 1): 3.0}), 50.0)
    assert (
        slow.nodes == (0, 1)
        and "3 GB/s" in slow.why
        and "the network is said to have 50" in slow.why
    )
    # all alike: no one host
    assert [
        s.nodes for s in find_slow_nodes(pairs_of({(0, 1): 3.0, (1, 2): 3.0, (0, 2): 3.0}), 50.0)
    ] == [
        (0, 1),
        (1, 2),
        (0, 2),
    ]


def test_findings_of_pairs_have_names(tmp_path: Path) -> None:
    here = session(tmp_path, 3)
    findings = list(find_pair_problems(pairs_of({(0, 1): 10.0, (0, 2): 2.0, (1, 2): 2.0}), here))
    assert [(f.host, f.what, f.wrong) for f in findings] == [("n2", "all-reduce", True)]
    (way,) = find_pair_problems(pairs_of({(0, 1): None}), here)
    assert way.host == "n0 - n1" and "connection closed" in way.message


def test_this_machine_alone(project: Project) -> None:
    document = project.document("doctor", "--cluster", "here")
    assert document["schema"] == "doctor/1" and document["wrong"] == 0 and document["pairs"] == []
    (row,) = document["hosts"]
    assert row["versions"]["python"] and row["open_files"] != 0 and row["shared_memory"] > 0
    refused = project.invoke("doctor", "--cluster", "here", "--hostfile", "x", exit=3)
    assert "--hostfile is for clusters whose launcher is ssh or pdsh" in refused.stderr


@pytest.mark.parametrize(("proof", "notes"), [("cgroup", 0), ("children", 1)])
def test_which_proof_of_ends_a_host_gives(tmp_path: Path, proof: str, notes: int) -> None:
    """The column says it; without a cgroup it is worth knowing what that means, and no more than
    that."""
    seen = found(session(tmp_path, 2), {"proof": "cgroup"}, {"proof": proof})
    assert [row[:3] for row in seen] == [("n1", "proof", False)] * notes and all(
        "only marks are left to look for" in row[3] for row in seen
    )
    assert _cells(JoinedAgent(0, "n0", facts_of({**FINE, "proof": proof}), 0.0))["proof"] == proof


SMI = """<?xml version="1.0" ?>
<!DOCTYPE nvidia_smi_log SYSTEM "nvsmi_device_v12.dtd">
<nvidia_smi_log>
  <gpu id="00000000:1B:00.0">
    <clocks_event_reasons><clocks_event_reason_gpu_idle>Active</clocks_event_reason_gpu_idle>{slowed}</clocks_event_reasons>
    <ecc_mode><current_ecc>Enabled</current_ecc></ecc_mode>
    <ecc_errors><volatile>{errors}</volatile><aggregate><dram_uncorrectable>9</dram_uncorrectable></aggregate></ecc_errors>
    <remapped_rows><remapped_row_unc>0</remapped_row_unc><remapped_row_pending>{pending}</remapped_row_pending>
      <remapped_row_failure>{failed}</remapped_row_failure></remapped_rows>
  </gpu>
</nvidia_smi_log>
"""
WELL = {
    "slowed": "<clocks_event_reason_hw_slowdown>Not Active</clocks_event_reason_hw_slowdown>",
    "errors": (
        "<sram_uncorrectable_parity>0</sram_uncorrectable_parity><dram_correctable>3</dram_correctable><dram_uncorrectable>0</dram_uncorrectable>"
    ),
    "pending": "No",
    "failed": "No",
}


@pytest.mark.parametrize(
    ("change", "wrong", "words"),
    [
        (
            {
                "errors": (
                    "<sram_uncorrectable>N/A</sram_uncorrectable><dram_uncorrectable>2</dram_uncorrectable>"
                )
            },
            True,
            "2 uncorrectable memory errors",
        ),
        (
            {"errors": "<double_bit><device_memory>1</device_memory><total>1</total></double_bit>"},
            True,
            "1 uncorrectable memory error since",
        ),
        ({"failed": "Yes"}, True, "could not be remapped"),
        ({"pending": "Yes"}, False, "waits to be taken out of use"),
        (
            {
                "slowed": (
                    "<clocks_event_reason_hw_thermal_slowdown>Active</clocks_event_reason_hw_thermal_slowdown>"
                )
            },
            True,
            "too hot: hardware slowdown",
        ),
        (
            {
                "slowed": (
                    "<clocks_throttle_reason_hw_power_brake_slowdown>Active</clocks_throttle_reason_hw_power_brake_slowdown>"
                )
            },
            True,
            "power brake",
        ),
    ],
)
def test_gpus_that_are_ill(change: dict[str, str], wrong: bool, words: str) -> None:
    (one,) = gpu_problems(CommandResult(0, SMI.format(**{**WELL, **change})))
    assert (
        one.wrong is wrong
        and words in one.message
        and one.message.startswith("GPU 0 (00000000:1B:00.0)")
        and one.advice
    )


def gpu_problems(said: CommandResult) -> list[Finding]:
    return list(find_gpu_problems("n0", said))


def test_gpus_that_are_well_or_cannot_be_seen() -> None:
    assert gpu_problems(CommandResult(0, SMI.format(**WELL))) == []
    assert (
        gpu_problems(CommandResult(error="[Errno 2] No such file or directory: 'nvidia-smi'"))
        == gpu_problems(CommandResult(6, "No devices were found\n"))
        == []
    )
    (lost,) = gpu_problems(
        CommandResult(
            15, "", "Unable to determine the device handle for GPU 0000:1B:00.0: GPU is lost.\n"
        )
    )
    assert lost.wrong and "GPU is lost" in lost.message
    assert not gpu_problems(CommandResult(0, "no XML"))[0].wrong


def test_doctor_asks_the_hosts_own_tool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Through an agent, as `nodes --top` does."""
    (tmp_path / "bin").mkdir()
    program = tmp_path / "bin" / "nvidia-smi"
    program.write_text(
        "#!/bin/bash\n[ \"$*\" = '-q -x' ] && cat"
        f" <<'END'\n{SMI.format(**{**WELL, 'failed': 'Yes'})}END\n"
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:/usr/bin:/bin")
    cluster = Cluster.model_validate(
        {"name": "c", "device": built_in_device("h100-sxm-80gb"), "node_folder": str(tmp_path)}
    )
    findings = examine_hosts(cluster, [Host("localhost")], tmp_path).findings
    assert [f.message for f in findings if "remapped" in f.message] == [
        "GPU 0 (00000000:1B:00.0): a broken row of its memory could not be remapped"
    ]
