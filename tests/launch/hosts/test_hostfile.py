"""DeepSpeed's hostfile format, read strictly: what is understood, what is refused with line and
column, what filters leave."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from ClusterShell.NodeSet import RESOLVER_NOGROUP, NodeSet
from hypothesis import given, strategies as st

from tests.jobs.jobs_toml import GOOD
from trainkit.base.errors import ConfigError
from trainkit.base.files import write_json
from trainkit.jobs.load import load
from trainkit.jobs.schema import Job
from trainkit.launch.hosts.hostfile import (
    Host,
    filter_hosts,
    find_hostfile,
    parse_hostfile,
    read_hostfile,
)
from trainkit.launch.hosts.selection import (
    HostList,
    choose_hosts,
    local_hosts,
)
from trainkit.runs.folder import RunFolder


def names(text: str) -> list[str]:
    return [host.name for host in parse_hostfile(text, "hosts")]


def complaints(error: pytest.ExceptionInfo[ConfigError]) -> list[str]:
    return [str(problem).split("\n")[0] for problem in error.value.list]


def test_what_lambdas_guide_writes(tmp_path: Path) -> None:
    """`printf "localhost slots=4\\n$WORKER_IP slots=4"`: this host first, an address, and no
    newline at the end."""
    path = tmp_path / "hostfile"
    path.write_bytes(b"localhost slots=4\n104.171.200.199 slots=4")
    first, second = read_hostfile(path)
    assert (first, second) == (
        Host("localhost", slots=(0, 1, 2, 3), line=1),
        Host("104.171.200.199", slots=(0, 1, 2, 3), line=2),
    )


def test_comments_users_ports_addresses_and_ranges() -> None:
    text = (
        "# the first rack\r\n\nhead slots=2 # and"
        " more\nann@node[08-10,2]:2200\tslots=2\n[fd00::1]:22"
        " slots=1\nroot@[fe80::2%eth0]\nr[1-2]n[1-2] slots=8\n"
    )
    hosts = parse_hostfile(text, "hosts")
    assert hosts[0] == Host("head", slots=(0, 1), line=3)
    assert [(h.name, h.user, h.port, len(h.slots)) for h in hosts[1:5]] == [
        (name, "ann", 2200, 2) for name in ("node08", "node09", "node10", "node2")
    ]
    assert hosts[5] == Host("fd00::1", port=22, slots=(0,), line=5) and hosts[6] == Host(
        "fe80::2%eth0", user="root", line=6
    )
    assert [h.name for h in hosts[7:]] == ["r1n1", "r1n2", "r2n1", "r2n2"]


WRONG = {
    "slots=8x": (
        "a slots=8\nb slots=8x\n",
        ["hosts:2: 'slots=8x': slots must be a whole number from 1 to 4096 (column 3)"],
    ),
    "no slots at all": (
        "a slots=0",
        ["hosts:1: 'slots=0': slots must be a whole number from 1 to 4096 (column 3)"],
    ),
    "an endless number": (
        "a slots=99999999999999999999",
        [
            "hosts:1: 'slots=99999999999999999999': slots must be a whole number from 1 to 4096"
            " (column 3)"
        ],
    ),
    "no number": (
        "a slots=",
        ["hosts:1: 'slots=': slots must be a whole number from 1 to 4096 (column 3)"],
    ),
    "negative": (
        "a slots=-1",
        ["hosts:1: 'slots=-1': slots must be a whole number from 1 to 4096 (column 3)"],
    ),
    "slots twice": ("a slots=1 slots=2", ["hosts:1: 'slots=2': slots are given twice (column 11)"]),
    "spaces": ("a slots = 8", ["hosts:1: unknown word 'slots' (column 3)"]),
    "another format": ("a max_slots=8", ["hosts:1: unknown word 'max_slots=8' (column 3)"]),
    "junk": ("a slots=8 fast", ["hosts:1: unknown word 'fast' (column 11)"]),
    "two on a line": ("a,b slots=8", ["hosts:1: 'a,b': one host or range a line (column 1)"]),
    "a duplicate": (
        "a slots=1\n  A slots=1",
        ["hosts:2: host 'A' stands in line 1 already (column 3)"],
    ),
    "a duplicate by range": (
        "n[1-4]\nn3\n",
        ["hosts:2: host 'n3' stands in line 1 already (column 1)"],
    ),
    "a duplicate in a range": (
        "n[1-4,2]",
        ["hosts:1: host 'n2' stands in line 1 already (column 1)"],
    ),
    "a tunnel": (
        "127.0.0.1:2222\nann@localhost\n",
        ["hosts:1: '127.0.0.1:2222' is this machine", "hosts:2: 'ann@localhost' is this machine"],
    ),
    "this host twice": (
        "localhost\n127.0.0.1\n",
        ["hosts:2: host '127.0.0.1' stands in line 1 already (column 1)"],
    ),
    "the same host at another port": (
        "a:1\na:2\n",
        ["hosts:2: host 'a' stands in line 1 already (column 1)"],
    ),
    "bare IPv6": ("fd00::1 slots=8", ["hosts:1: 'fd00::1' has more than one colon (column 1)"]),
    "bad IPv6": ("[fd00::1::2] slots=8", ["hosts:1: '[fd00::1::2]' is not an IPv6 address"]),
    "a port too large": ("a:65536", ["hosts:1: '65536' is not a port: 1 to 65535 (column 3)"]),
    "an empty port": ("bob@a:", ["hosts:1: '' is not a port: 1 to 65535 (column 7)"]),
    "an option of ssh": (
        "-oProxyCommand=x",
        ["hosts:1: '-oProxyCommand=x' is not a host name or address (column 1)"],
    ),
    "a command": ("a;reboot", ["hosts:1: 'a;reboot' is not a host name or address (column 1)"]),
    "an odd user": ("a$(x)@b", ["hosts:1: 'a$(x)' is not a valid user name (column 1)"]),
    "an open range": (
        "node[1-3 slots=8",
        ["hosts:1: 'node[1-3' is not a host name or address (column 1)"],
    ),
    "a range backwards": (
        "x@node[3-1]",
        ["hosts:1: '[3-1]' in 'node[3-1]' is not a range (column 3)"],
    ),
    "no range": ("node[a-c]", ["hosts:1: '[a-c]' in 'node[a-c]' is not a range (column 1)"]),
    "an immense range": (
        "node[1-999999999]",
        ["hosts:1: 'node[1-999999999]' names more than 10,000 hosts (column 1)"],
    ),
    "an immense product": (
        "r[1-1000]n[1-1000]",
        ["hosts:1: 'r[1-1000]n[1-1000]' names 1,000,000 hosts; 10,000 are the limit (column 1)"],
    ),
    "nothing": ("# none yet\n\n", ["hosts: names no host"]),
    "empty": ("", ["hosts: names no host"]),
    "several": ("a slots=x\nb c\n", ["hosts:1: 'slots=x'", "hosts:2: unknown word 'c'"]),
}


@pytest.mark.parametrize("case", WRONG)
def test_every_mistake_has_its_line_and_column(case: str) -> None:
    text, expected = WRONG[case]
    with pytest.raises(ConfigError) as error:
        parse_hostfile(text, "hosts")
    found = complaints(error)
    assert len(found) == len(expected) and all(
        f.startswith(e) for f, e in zip(found, expected, strict=True)
    ), found


def test_a_file_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read the hostfile"):
        read_hostfile(tmp_path)
    (tmp_path / "hosts").write_bytes(b"a slots=1\n\xff\xfe\n")
    with pytest.raises(ConfigError, match="hosts:2: no UTF-8 text"):
        read_hostfile(tmp_path / "hosts")


def test_a_thousand_hosts_at_once() -> None:
    hosts = parse_hostfile(
        "".join(f"user@gpu-{i:04d}.example.org:22 slots=8\n" for i in range(1000)), "hosts"
    )
    left = filter_hosts(hosts, exclude="gpu-0500.example.org@gpu-0501.example.org:0-3")
    assert (len(hosts), len(left), left[500].slots) == (1000, 999, (4, 5, 6, 7))


@given(
    st.lists(
        st.tuples(st.integers(0, 30), st.integers(0, 5), st.integers(1, 4)), min_size=1, max_size=4
    ),
    st.sampled_from(["n", "gpu-", "r2n"]),
    st.booleans(),
)
def test_a_range_names_what_clustershell_says_in_the_order_written(
    parts: list[tuple[int, int, int]], prefix: str, padded: bool
) -> None:
    spell = "{:03d}".format if padded else str
    text = ",".join(
        f"{spell(low)}-{spell(low + more)}/{step}" if more else spell(low)
        for low, more, step in parts
    )
    written = [
        f"{prefix}{spell(n)}" for low, more, step in parts for n in range(low, low + more + 1, step)
    ]
    if len(set(written)) < len(written):
        with pytest.raises(ConfigError, match="already"):
            names(f"{prefix}[{text}]")
        return
    assert names(f"{prefix}[{text}]") == written
    assert set(written) == set(NodeSet(f"{prefix}[{text}]", resolver=RESOLVER_NOGROUP))


@given(st.text(alphabet="ab1[]-,:@#= \tslots.%\\é\0", max_size=40))
def test_any_text_is_hosts_or_a_config_error(text: str) -> None:
    try:
        hosts = parse_hostfile(text, "hosts")
    except ConfigError as error:
        assert error.list and all(problem.place for problem in error.list)
    else:
        assert hosts and all(
            host.name and host.slots == tuple(range(len(host.slots))) for host in hosts
        )


@given(
    st.lists(
        st.tuples(st.integers(0, 99), st.integers(1, 16)),
        min_size=1,
        max_size=20,
        unique_by=lambda pair: pair[0],
    ),
    st.booleans(),
)
def test_what_is_written_is_read(pairs: list[tuple[int, int]], newline: bool) -> None:
    text = "\n".join(f"h{n} slots={slots}" for n, slots in pairs) + ("\n" if newline else "")
    assert [(host.name, len(host.slots)) for host in parse_hostfile(text, "hosts")] == [
        (f"h{n}", slots) for n, slots in pairs
    ]


HOSTS = parse_hostfile("n[0-3] slots=4\n[fd00::1] slots=2\n", "hosts")


@pytest.mark.parametrize(
    ("include", "exclude", "left"),
    [
        ("", "", "n0:0123 n1:0123 n2:0123 n3:0123 fd00::1:01"),
        ("n2@n0:0,2-3", "", "n0:023 n2:0123"),  # DeepSpeed drops n0 here, in silence
        ("n[1-2]:0-1@[fd00::1]:1", "", "n1:01 n2:01 fd00::1:1"),
        ("", "n0@n1:3@[fd00::1]", "n1:012 n2:0123 n3:0123"),
        ("n0@N1", "n1:0", "n0:0123 n1:123"),
        ("n0:0-2", "n0:3@n3", "n0:012"),
        ("", "n0:0-3", "n1:0123 n2:0123 n3:0123 fd00::1:01"),
    ],
)
def test_filters(include: str, exclude: str, left: str) -> None:
    assert (
        " ".join(
            f"{h.name}:{''.join(map(str, h.slots))}" for h in filter_hosts(HOSTS, include, exclude)
        )
        == left
    )


@pytest.mark.parametrize(
    ("include", "exclude", "said"),
    [
        ("n1@n9", "", ["--include: the hostfile has no host 'n9' (column 4)"]),
        ("n1:4", "", ["--include: host 'n1' has no slot 4 (column 1)"]),
        ("", "n1:2-9", ["--exclude: host 'n1' has no slot 4 (column 1)"]),
        ("n1:", "", ["--include: '' is not a list of slots (column 4)"]),
        ("n1:a", "", ["--include: 'a' is not a list of slots (column 4)"]),
        ("n0@n1:3-1", "", ["--include: '3-1' is not a list of slots (column 7)"]),
        ("n0@@n1", "", ["--include: expected HOST or HOST:SLOTS, got '' (column 4)"]),
        ("n0@n0", "", ["--include: host 'n0' is named twice (column 4)"]),
        (
            "x@y",
            "z",
            [
                "--include: the hostfile has no host 'x'",
                "--include: the hostfile has no host 'y'",
                "--exclude: the hostfile has no host 'z'",
            ],
        ),
        ("n0@n1", "n1", ["'n1' is both in --include and in --exclude"]),
        ("n0:0,1", "n0:1", ["'n0:1' is both in --include and in --exclude"]),
        ("n0", "n0:0-3", ["no host is left of 5 after --include and --exclude"]),
    ],
)
def test_filters_that_say_nothing_sensible(include: str, exclude: str, said: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        filter_hosts(HOSTS, include, exclude)
    found = complaints(error)
    assert len(found) == len(said) and all(
        f.startswith(s) for f, s in zip(found, said, strict=True)
    ), found


@given(st.sets(st.tuples(st.integers(0, 3), st.integers(0, 3)), max_size=12))
def test_including_and_excluding_the_same_slots_are_opposites(chosen: set[tuple[int, int]]) -> None:
    by_host = {n: sorted(slot for host, slot in chosen if host == n) for n in range(4)}
    text = "@".join(f"n{n}:{','.join(map(str, slots))}" for n, slots in by_host.items() if slots)
    if not text:
        return
    included, rest = (
        {(h.name, slot) for h in filter_hosts(HOSTS, **{word: text}) for slot in h.slots}
        for word in ("include", "exclude")
    )
    assert included == {(f"n{n}", slot) for n, slot in chosen}
    assert (
        included | rest == {(h.name, slot) for h in HOSTS for slot in h.slots}
        and not included & rest
    )


def job_on_hosts(folder: Path, more: str = "", nodes: int = 2) -> Job:
    (folder / "jobs.toml").write_text(
        GOOD.replace("ranks_per_node = 2", f'launcher = "pdsh"\nranks_per_node = 2\n{more}')
    )
    return load(folder, {}).resolve("demo", [f"nodes={nodes}"]).job


def test_where_the_hostfile_is_looked_for(tmp_path: Path) -> None:
    plain, named = (
        job_on_hosts(tmp_path).cluster,
        job_on_hosts(tmp_path, 'hostfile = "mine"').cluster,
    )
    default = tmp_path / "job-hostfile"
    with pytest.raises(
        ConfigError,
        match=r"has no hostfile: neither --hostfile nor clusters\.here\.hostfile is given",
    ):
        find_hostfile(plain, default=default)
    default.write_text("d")
    assert find_hostfile(plain, default=default) == default
    with pytest.raises(
        ConfigError, match=r"clusters\.here\.hostfile = .*mine': there is no such file"
    ):
        find_hostfile(named, default=default)  # never the default, never this host alone
    (tmp_path / "mine").write_text("m")
    assert find_hostfile(named, default=default) == tmp_path / "mine"
    with pytest.raises(ConfigError, match=r"--hostfile .*other: there is no such file"):
        find_hostfile(named, str(tmp_path / "other"), default)
    assert find_hostfile(named, str(default), tmp_path / "nowhere") == default


def test_as_many_hosts_as_nodes_and_spares(tmp_path: Path) -> None:
    path = tmp_path / "hosts"
    path.write_text("n[1-5] slots=4\nn6\n")
    chosen = choose_hosts(job_on_hosts(tmp_path, "spares = 1"), path)
    assert (
        [h.name for h in chosen.running],
        [h.name for h in chosen.spares],
        chosen.ranks_per_node,
    ) == (["n1", "n2"], ["n3"], 4)
    chosen = choose_hosts(
        job_on_hosts(tmp_path), path, include="n[2-5]:0-1", bad={"n3": "it broke"}
    )
    assert ([h.name for h in chosen.running], chosen.spares, chosen.ranks_per_node) == (
        ["n2", "n4"],
        (),
        2,
    )
    with pytest.raises(ConfigError, match=r"wants 7 nodes, and .*hosts has 6 hosts\n"):
        choose_hosts(job_on_hosts(tmp_path, nodes=7), path)
    with pytest.raises(
        ConfigError,
        match=(
            r"wants 2 nodes, .* has 2 hosts that --include and --exclude leave; n1 is left out: it"
            r" broke"
        ),
    ) as error:
        choose_hosts(job_on_hosts(tmp_path), path, include="n1@n2", bad={"n1": "it broke"})
    assert error.value.exit == 8
    with pytest.raises(ConfigError, match=r"hosts:2: host 'n6' has 2 slots, 'n1' has 4"):
        choose_hosts(job_on_hosts(tmp_path, nodes=6), path)


def test_this_host_has_its_own_name(tmp_path: Path) -> None:
    path, own = tmp_path / "hosts", os.uname().nodename
    path.write_text("localhost slots=2\nb slots=2\n")
    assert [
        h.name for h in choose_hosts(job_on_hosts(tmp_path), path, include="localhost@b").hosts
    ] == [own, "b"]
    path.write_text(f"b\n127.0.0.1\n{own}\n")
    with pytest.raises(
        ConfigError, match=f"hosts:3: 'localhost' and '{own}' are this same machine"
    ):
        choose_hosts(job_on_hosts(tmp_path), path)


def test_the_runs_own_list(tmp_path: Path) -> None:
    run, hosts = (
        RunFolder(tmp_path / "runs/j/x"),
        HostList((Host("a", "u", 22, (0, 2), 3), Host("b", slots=(1, 3))), 1, "hosts"),
    )
    write_json(run.hosts, hosts.to_json())
    assert HostList.from_file(run.hosts) == hosts
    assert local_hosts(job_on_hosts(tmp_path)) == HostList(
        (Host(os.uname().nodename, slots=(0, 1)),), 1
    )
