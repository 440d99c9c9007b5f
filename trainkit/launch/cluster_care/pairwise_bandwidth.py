"""All-reduces between pairs of hosts: which pair is slow, which host is.

In a round every host has one partner, so that no two pairs share a host; a few rounds give every
host several partners. A host that is slow with all of them is the reason itself; one slow pair
of two hosts that are fast with others is the way between them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from trainkit.base.lazy_dataclasses import dataclass
from trainkit.launch.cluster_care.remote_commands import CommandResult, RemoteCommand, run_on_agents
from trainkit.launch.programs import program_path
from trainkit.launch.protocol.frames import Listen, Listening, ListeningStopped, StopListening
from trainkit.launch.supervise.agent_pool import AgentPool
from trainkit.launch.supervise.rank_environment import port_candidates

ROUNDS = 3  # partners of a host, where there are so many
BYTES = {"gloo": 16 * 2**20, "nccl": 256 * 2**20}  # enough to be bandwidth and not latency
REPEAT = 5
JOIN_SECONDS = 30.0  # for both sides to come together, and for one all-reduce
ROUND_SECONDS = 120.0  # for a whole round, torch's import included
SLOW = 0.5  # of what a usual pair does, or of what the network is said to do
# which pair is a usual one, from the slowest on: one slow host of three spoils two of three pairs
USUAL = 0.75


@dataclass(frozen=True)
class PairBandwidth:
    """What was measured between two nodes (numbers in the pool): bus bandwidth in GB/s (1e9
    bytes), None where it failed, with the reason."""

    first: int
    second: int
    gb_per_second: float | None
    error: str = ""


@dataclass(frozen=True)
class SlowNodes:
    """A host or a pair that is slow or does not work, as node numbers, and in words why."""

    nodes: tuple[int, ...]
    why: str


def pairing_rounds(nodes: Sequence[int], most: int = ROUNDS) -> list[list[tuple[int, int]]]:
    """Disjoint pairs of nodes, round by round: no pair twice, all of them after len(nodes) - 1
    rounds (the circle method of round-robin tournaments)."""
    circle: list[int | None] = [*nodes, *([None] if len(nodes) % 2 else [])]
    half = len(circle) // 2
    found = []
    for _ in range(min(most, len(circle) - 1)):
        facing = zip(circle[:half], reversed(circle[half:]), strict=True)
        found.append([(min(a, b), max(a, b)) for a, b in facing if a is not None and b is not None])
        circle = [circle[0], circle[-1], *circle[1:-1]]
    return found


def find_slow_nodes(
    pairs: Sequence[PairBandwidth], expected: float | None = None
) -> list[SlowNodes]:
    """What is slow: below half of what a usual pair does, and of `expected` GB/s where that is
    known. A host before its pairs."""
    speeds = sorted(pair.gb_per_second for pair in pairs if pair.gb_per_second is not None)
    usual = speeds[int(USUAL * len(speeds))] if speeds else 0.0
    limit = SLOW * max(usual, expected or 0.0)
    bad = [pair for pair in pairs if pair.gb_per_second is None or pair.gb_per_second < limit]
    by_node: dict[int, list[PairBandwidth]] = {}
    for pair in pairs:
        by_node.setdefault(pair.first, []).append(pair)
        by_node.setdefault(pair.second, []).append(pair)
    # with one partner nobody can say which of the two it is
    slow_nodes = {
        node
        for node, each in by_node.items()
        if len(each) > 1 and all(pair in bad for pair in each)
    }
    everybody = slow_nodes == set(by_node)
    if everybody:
        found = []
    else:
        found = [
            SlowNodes((node,), _words(by_node[node], usual, expected))
            for node in sorted(slow_nodes)
        ]
    named = set() if everybody else slow_nodes
    return found + [
        SlowNodes((pair.first, pair.second), _words([pair], usual, expected))
        for pair in bad
        if not {pair.first, pair.second} & named
    ]


def _words(pairs: Sequence[PairBandwidth], usual: float, expected: float | None) -> str:
    speeds = [pair.gb_per_second for pair in pairs if pair.gb_per_second is not None]
    errors = [pair.error for pair in pairs if pair.gb_per_second is None]
    said = f"all-reduce at {max(speeds):.3g} GB/s" if speeds else f"no all-reduce: {errors[0]}"
    if len(pairs) > 1 and speeds:
        times = f" at best with any of {len(pairs)} partners"
    elif len(pairs) > 1:
        times = f" with any of {len(pairs)} partners"
    else:
        times = ""
    beside = [
        *([f"a usual pair has {usual:.3g}"] if usual else []),
        *([f"the network is said to have {expected:.3g}"] if expected else []),
    ]
    return f"{said}{times}" + (f"; {', '.join(beside)}" if speeds and beside else "")


async def measure_pair_bandwidths(pool: AgentPool, *, most: int = ROUNDS) -> list[PairBandwidth]:
    """Run the rounds over all agents that are there; CUDA clusters by NCCL with all slots of a
    host, others by gloo with one rank a host."""
    found = []
    for number, pairs in enumerate(pairing_rounds(pool.present, most)):
        ports = await _ports(pool, [first for first, _ in pairs], number)
        programs: dict[int, list[RemoteCommand]] = {}
        for pair in pairs:
            if pair[0] in ports:
                programs |= _programs(pool, pair, ports[pair[0]])
        said = await run_on_agents(pool, programs, ROUND_SECONDS, key_prefix=f"round{number}-")
        found += [_pair(pair, said) for pair in pairs]
    return found


async def _ports(pool: AgentPool, nodes: Sequence[int], number: int) -> dict[int, int]:
    """A free port on each of these nodes."""
    frames = {
        node: Listen(tuple(port_candidates(f"{pool.session.run}/{number}/{node}")))
        for node in nodes
    }
    got, _ = await pool.ask(frames, (Listening,), pool.session.connect)
    ports = {
        node: frame.port
        for node, frame in got.items()
        if isinstance(frame, Listening) and frame.port
    }
    await pool.ask(
        {node: StopListening() for node in ports}, (ListeningStopped,), pool.session.connect
    )
    return ports


def _programs(pool: AgentPool, pair: tuple[int, int], port: int) -> dict[int, list[RemoteCommand]]:
    """The ranks of one pair, by node."""
    cluster = pool.session.cluster
    cuda = cluster.device_type == "cuda"
    slots = {
        node: (
            pool.session.hosts[node].slots or tuple(range(cluster.gpus_per_node or 1))
            if cuda
            else (0,)
        )
        for node in pair
    }
    world = sum(map(len, slots.values()))
    rank = 0
    found = dict[int, list[RemoteCommand]]()
    backend = "nccl" if cuda else "gloo"
    common = {
        "backend": backend,
        "address": str(pool.hellos[pair[0]].facts.address),
        "port": port,
        "world": world,
    }
    for node in pair:
        interface = pool.hellos[node].facts.interface
        network = {"GLOO_SOCKET_IFNAME": str(interface)} if interface else {}
        if interface and cluster.interface:
            network["NCCL_SOCKET_IFNAME"] = f"={interface}"
        found[node] = []
        for slot in slots[node]:
            asked = {
                **common,
                "rank": rank,
                "device": slot if cuda else None,
                "bytes": BYTES[backend],
                "repeat": REPEAT,
                "seconds": JOIN_SECONDS,
            }
            script = str(program_path(pool.session.code, "bandwidth_rank"))
            argv = [pool.session.python, "-I", script, json.dumps(asked)]
            found[node].append(RemoteCommand(argv, {**network, **cluster.env}, key=str(slot)))
            rank += 1
    return found


def _pair(pair: tuple[int, int], said: Mapping[tuple[int, str], CommandResult]) -> PairBandwidth:
    """What the ranks of a pair said, as one."""
    of_pair = {who: each for who, each in said.items() if who[0] in pair}
    if not of_pair:
        return PairBandwidth(*pair, None, "no free port")
    if failed := [each for each in of_pair.values() if each.error or each.code != 0]:
        return PairBandwidth(*pair, None, failed[0].last)
    results: list[dict[str, Any]] = [
        json.loads(each.out.splitlines()[-1]) for each in of_pair.values()
    ]
    if not all(result["right"] for result in results):
        return PairBandwidth(
            *pair, None, "the sum came out wrong: memory, a GPU or the network changes data"
        )
    return PairBandwidth(*pair, min(float(result["gb_per_second"]) for result in results))
