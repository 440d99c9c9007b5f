"""Agents as the supervisor sees them: who comes, who hangs, who is a stranger, who disagrees;
with agents in this process."""

from __future__ import annotations

import asyncio
import errno
import os
import selectors
import socket
import struct
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

from tests.launch.stub_agents import Debug, StubAgent, read_command
from tests.launch.supervised import DONE, Program, events, make_run, supervised
from trainkit.base.address import local_addresses
from trainkit.base.redact import Redactor
from trainkit.jobs.clusters import Cluster, WatchLimits
from trainkit.launch.agent.connection import dial
from trainkit.launch.hosts.hostfile import Host
from trainkit.launch.launchers.contract import TransportExit, Transports
from trainkit.launch.protocol.frames import (
    ConnectToPort,
    Goodbye,
    HeartbeatReport,
    HostFacts,
    Ping,
    PortChecked,
    ReserveSlots,
    SlotsBusy,
    SlotsReserved,
    StartParent,
)
from trainkit.launch.protocol.framing import (
    GIVE_UP_MS,
    LONGEST_GAP_MS,
    TCP_RTO_MAX_MS,
    TCP_THIN_LINEAR_TIMEOUTS,
    TCP_USER_TIMEOUT,
    Decoder,
    encode,
    heartbeat_interval,
)
from trainkit.launch.protocol.handshake import make_proof, new_nonce
from trainkit.launch.protocol.server import Connection, Server
from trainkit.launch.session import Session, is_this_machine
from trainkit.launch.supervise import rank_tracker
from trainkit.launch.supervise.agent_pool import (
    HEARD_BEATS,
    AgentLost,
    AgentPool,
    JoinedAgent,
    MissingAgent,
)
from trainkit.launch.supervise.heartbeats import Heartbeats
from trainkit.launch.supervise.rank_tracker import RankTracker
from trainkit.runs.events import EventLog
from trainkit.runs.folder import RunFolder

Act = Callable[[AgentPool, Server], Any]

LIMITS = WatchLimits()
RESERVE = ReserveSlots("run", 1, ())


def with_crew(
    folder: Path,
    hosts: int,
    make: Callable[[Session, int], StubAgent],
    act: Act,
    standbys: int = 0,
    **limits: float,
) -> tuple[Any, list[tuple[str, str]]]:
    """(what `act` returns, strangers) of a pool of agents in this process."""
    strangers: list[tuple[str, str]] = []

    async def main() -> Any:
        server = Server(lambda peer, why: strangers.append((peer, why)))
        await server.listen("127.0.0.1")
        cluster = Cluster(name="c", launcher="ssh", watch=WatchLimits(**limits))
        names = [Host(f"h{i}") for i in range(hosts)]
        session = Session(
            folder / "s", "run", 1, names, cluster, folder / "code", folder / "logs", {}
        )
        session.write(folder, server.address, server.port, {})
        try:
            made = AgentPool(session, Debug(make), server, standbys=standbys)
            async with asyncio.timeout(600), made as pool:
                return await act(pool, server)
        finally:
            await server.close()

    return asyncio.run(main()), strangers


def test_a_hundred_agents_come_and_answer(tmp_path: Path) -> None:
    async def act(pool: AgentPool, server: Server) -> int:
        answers = await pool.gather(600)
        assert [answer for answer in answers if not isinstance(answer, JoinedAgent)] == []
        got, silent = await pool.ask(dict.fromkeys(pool.present, RESERVE), (SlotsReserved,), 600)
        assert not silent
        return len(got)

    assert with_crew(tmp_path, 100, StubAgent, act) == (100, [])


class SlowToLook(StubAgent):
    """It says what its host is when its rank parent begins."""

    came: ClassVar[set[int]]

    async def run(self) -> None:
        self.connection = Connection(
            *await asyncio.open_connection(self.document.address, self.document.port)
        )
        await self._prove()
        self.came.add(self.node)
        while received := await self.connection.receive():
            command = read_command(received)
            if isinstance(command, Goodbye):
                break
            if isinstance(command, StartParent):
                self.connection.send(self.facts())
        self.connection.close()


@pytest.mark.parametrize("connected", [0, 2])
def test_rank_parents_begin_while_hosts_look_at_themselves(tmp_path: Path, connected: int) -> None:
    """Those of agents that have come already, and those of agents that come later."""
    SlowToLook.came = set()

    async def act(pool: AgentPool, server: Server) -> list[int]:
        while len(SlowToLook.came) < connected:
            await asyncio.sleep(0.01)
        pool.start_parents(StartParent(("true",), {}, "/", (), 60.0))
        await pool.gather(600)
        return pool.present

    assert with_crew(tmp_path, 2, SlowToLook, act) == ([0, 1], [])


def test_agents_are_used_by_their_hosts(tmp_path: Path) -> None:
    async def act(pool: AgentPool, server: Server) -> None:
        await pool.gather(600)
        while 2 not in pool.hellos:  # gather waits for no standby
            await asyncio.sleep(0.02)
        assert pool.use([Host("h2"), Host("h0")]) == [2] and pool.nodes == [2, 0]
        assert pool.at_work == [0, 2]
        # h1's has been sent away, and none was there of h9
        assert pool.use([Host("h1"), Host("h0"), Host("h9")]) == [3, 4] and pool.nodes == [3, 0, 4]
        joined = await pool.gather(600)
        assert [(answer.node, answer.host) for answer in joined] == [
            (3, "h1"),
            (0, "h0"),
            (4, "h9"),
        ]
        assert all(isinstance(answer, JoinedAgent) for answer in joined)
        while not {1, 2} <= (await pool._ended()).keys():
            await asyncio.sleep(0.02)

    with_crew(tmp_path, 3, StubAgent, act, standbys=1)


def test_a_standby_that_cannot_be_launched_is_told(tmp_path: Path) -> None:
    def make(session: Session, node: int) -> StubAgent:
        if node == 1:
            raise OSError("no file is left to open")
        return StubAgent(session, node)

    async def act(pool: AgentPool, server: Server) -> None:
        await pool.gather(600)
        assert pool.lost[1].why == "no file is left to open" and pool.at_work == pool.present == [0]
        assert pool.use([Host("h1")]) == [2]  # needed, it is tried again
        (joined,) = await pool.gather(600)
        assert isinstance(joined, JoinedAgent) and joined.host == "h1"

    with_crew(tmp_path, 2, make, act, standbys=1)


class Odd(StubAgent):
    """Agents with a fault each: 1 ends before it knocks, 2 never says hello, 3 hangs after it."""

    async def run(self) -> None:
        if self.node == 1:
            raise OSError("no way to the supervisor")
        await super().run()

    async def _prove(self) -> None:
        await super()._prove()
        if self.node == 2:
            await asyncio.sleep(10_000)

    async def on_reserve(self, frame: ReserveSlots) -> None:
        if self.node == 3:
            await asyncio.sleep(10_000)
        await super().on_reserve(frame)


async def there(pool: AgentPool, nodes: set[int]) -> None:
    """Wait until these agents have said hello, and every transport that ends has ended."""
    while set(pool.hellos) != nodes or 1 not in await pool._ended():
        await asyncio.sleep(0.02)


def test_who_does_not_come_is_named_with_the_reason(tmp_path: Path) -> None:
    async def act(pool: AgentPool, server: Server) -> list[JoinedAgent | MissingAgent]:
        await there(pool, {0, 3})
        return await pool.gather(0.2)

    answers, _ = with_crew(tmp_path, 4, Odd, act)
    assert [type(answer) for answer in answers] == [
        JoinedAgent,
        MissingAgent,
        MissingAgent,
        JoinedAgent,
    ]
    assert "no way to the supervisor" in answers[1].why and "hung: no hello" in answers[2].why


def test_who_hangs_while_asked_is_named_and_not_waited_for(tmp_path: Path) -> None:
    async def act(pool: AgentPool, server: Server) -> Any:
        await there(pool, {0, 3})
        got, silent = await pool.ask(dict.fromkeys((0, 3), RESERVE), (SlotsReserved,), 0.5)
        return sorted(got), silent

    (got, silent), _ = with_crew(tmp_path, 4, Odd, act)
    assert got == [0] and silent == {3: "no answer within 0.5 s"}


class Mute(StubAgent):
    """Says nothing after its hello."""

    async def _beat(self) -> None:
        if self.node == 0:
            await super()._beat()


def test_silence_is_a_lost_contact_and_an_end_is_one_at_once(tmp_path: Path) -> None:
    async def act(pool: AgentPool, server: Server) -> list[tuple[int, AgentLost]]:
        await pool.gather(300)
        lost: list[tuple[int, AgentLost]] = []
        while not lost:
            who, frame = await pool.received.get()
            lost += [(who, frame)] if isinstance(frame, AgentLost) else []
        return lost

    ((node, frame),), _ = with_crew(tmp_path, 2, Mute, act, lease=1.5)
    assert node == 1 and frame.silent is True and "silent for" in frame.why
    assert time.monotonic() - frame.heard >= 1.5


def test_a_loss_that_is_looked_at_late_was_no_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a loop that had waited for a disk: what peers say of it afterwards comes after it."""
    late = SimpleNamespace(
        time=lambda: time.time() + 1000, monotonic=lambda: time.monotonic() + 1000
    )

    async def act(pool: AgentPool, server: Server) -> None:
        await pool.gather(300)
        server.loop.call_soon_threadsafe(pool._connections[0].close)
        while 0 not in pool.lost:
            await asyncio.sleep(0.02)
        folder = RunFolder(tmp_path).attempt(1)
        ranks = RankTracker(folder, EventLog(folder), Redactor([]), Heartbeats(folder, LIMITS))
        ranks.expect({0: 0})
        monkeypatch.setattr(rank_tracker, "time", late)
        ranks.handle(pool, 0, pool.lost[0])
        (loss,) = ranks.losses
        assert loss.time < time.time() + 500
        assert ranks.lost_at is not None and ranks.lost_at <= time.monotonic() - LIMITS.lease

    with_crew(tmp_path, 1, StubAgent, act)


class Beaten(StubAgent):
    """Notes when it was pinged."""

    pings: ClassVar[dict[int, list[float]]] = {}

    async def on_ping(self, frame: Ping) -> None:
        self.pings.setdefault(self.node, []).append(time.monotonic())


class Sick:
    """Transports whose files cannot be read, or whose file system does not answer."""

    def __init__(self, started: Transports, trouble: Callable[[], Any]) -> None:
        self.started, self.trouble = started, trouble
        self.looking = self.most = 0

    def poll(self) -> Mapping[int, TransportExit]:
        self.looking += 1
        self.most = max(self.most, self.looking)
        try:
            self.trouble()
        finally:
            self.looking -= 1
        return self.started.poll()

    def close(self) -> None:
        self.started.close()


def test_a_shared_root_that_fails_or_stalls_stops_no_ping(tmp_path: Path) -> None:
    answers = threading.Event()

    def fail() -> None:
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    async def act(pool: AgentPool, server: Server) -> None:
        await pool.gather(300)
        (transports,) = pool._transports
        try:
            for trouble in (fail, answers.wait):
                sick = Sick(transports, trouble)
                pool._transports = [sick]
                Beaten.pings[0] = []
                async with asyncio.timeout(600):
                    while len(Beaten.pings[0]) < 2 or not sick.most:
                        await asyncio.sleep(0.05)
                assert sick.most == 1, "looks at the transports side by side"
        finally:
            answers.set()

    with_crew(tmp_path, 1, Beaten, act)


class Absent(StubAgent):
    """Does not come."""

    async def run(self) -> None:
        await asyncio.sleep(10_000)


def test_a_loop_that_waits_for_a_disk_stops_no_ping(tmp_path: Path) -> None:
    async def act(pool: AgentPool, server: Server) -> int:
        pings: list[dict[str, object]] = []

        def agent() -> None:
            connection = dial(server.address, server.port, pool.session.token, 0)
            with selectors.DefaultSelector() as selector:
                selector.register(connection.sock, selectors.EVENT_READ)
                while len(pings) < 3 and selector.select(600):
                    pings.extend(connection.receive())
                    connection.send(HeartbeatReport({}, time.time()))

        thread = threading.Thread(target=agent, daemon=True)
        thread.start()
        thread.join(600)  # all that this loop does meanwhile, as in a write that does not return
        return len(pings)

    pings, _ = with_crew(tmp_path, 1, Absent, act, lease=2)
    assert pings >= 3


class Fading(Beaten):
    """Hears all that is said to it, and is heard no more once it has said hello."""

    async def _beat(self) -> None:
        return


def test_who_is_not_heard_is_soon_not_pinged(tmp_path: Path) -> None:
    """Its lease must not outlast ours by more than what follows a lost contact allows for."""

    async def act(pool: AgentPool, server: Server) -> int:
        await pool.gather(300)
        Beaten.pings[0] = []
        while not pool.lost:
            await asyncio.sleep(0.05)
        assert pool.lost[0].silent
        return len(Beaten.pings[0])

    lease = 5.0
    pings, _ = with_crew(tmp_path, 1, Fading, act, lease=lease)
    # one a gap at the most, however slow the machine
    assert pings <= HEARD_BEATS + 1 < lease / heartbeat_interval(lease)


def strange(address: str, port: int, *frames: bytes) -> bytes:
    """What the server answers to bytes of somebody unknown, until it hangs up."""
    with socket.create_connection((address, port), timeout=600) as sock:
        said = b""
        for data in frames:
            sock.sendall(data)
        while data := sock.recv(65536):
            said += data
        return said


def test_strangers_are_told_nothing_and_reported(tmp_path: Path) -> None:
    knock = {"type": "knock", "role": "agent", "node": 0, "nonce": new_nonce()}

    def wrong_token(address: str, port: int) -> bytes:
        with socket.create_connection((address, port), timeout=600) as sock:
            sock.sendall(encode({**knock, "node": 1}))
            challenge = next(Decoder().feed(sock.recv(65536)))
            sock.sendall(
                encode(
                    {
                        "type": "answer",
                        "proof": make_proof(
                            b"guess",
                            "agent",
                            str(knock["nonce"]),
                            str(challenge["nonce"]),
                            "agent:1",
                        ),
                    }
                )
            )
            return sock.recv(65536)

    async def act(pool: AgentPool, server: Server) -> Any:
        await pool.gather(300)
        place = server.address, server.port
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda loop, context: unhandled.append(context))
        said = [
            await loop.run_in_executor(None, strange, *place, b"GET / HTTP/1.1\r\n\r\n"),
            await loop.run_in_executor(None, strange, *place, struct.pack(">I", 2**31) + b"x"),
            await loop.run_in_executor(None, strange, *place, encode({"type": "hello"})),
            await loop.run_in_executor(None, strange, *place, encode({**knock, "role": "root"})),
            await loop.run_in_executor(None, strange, *place, encode({**knock, "role": []})),
            await loop.run_in_executor(
                None,
                strange,
                *place,
                b"\0\0\0\x44"
                + b'{"type":"knock","role":"agent","node":0,"nonce":"\\ud800"}'.ljust(0x44),
            ),
            await loop.run_in_executor(None, wrong_token, *place),
        ]
        got, _ = await pool.ask({0: RESERVE}, (SlotsReserved,), 5)
        return said, len(got)

    unhandled: list[dict[str, Any]] = []
    (said, answered), strangers = with_crew(tmp_path, 1, StubAgent, act)
    assert said == [b""] * 7 and answered == 1, (
        "a stranger was answered, or disturbed those who are ours"
    )
    assert len(strangers) == 7 and not unhandled and strangers[-1][1] == "a wrong token"


class Differs(StubAgent):
    """Node 1 of the facts below is not as the others are."""

    other: ClassVar[dict[str, Any]] = {}

    def facts(self) -> HostFacts:
        return replace(super().facts(), **(self.other if self.node == 1 else {}))


def test_a_hello_that_was_long_on_its_way_misleads_no_clock(tmp_path: Path) -> None:
    class Late(StubAgent):
        def facts(self) -> HostFacts:
            return replace(super().facts(), clock=time.time() - 20)

    async def act(pool: AgentPool, server: Server) -> float:
        (hello,) = await pool.gather(300)
        assert isinstance(hello, JoinedAgent) and (hello.facts.clock or 0) < time.time() - 19
        async with asyncio.timeout(600):
            while pool.hellos[0].clock_offset < -19:
                await asyncio.sleep(0.05)
        return pool.hellos[0].clock_offset

    offset, _ = with_crew(tmp_path, 1, Late, act)
    assert offset < 0.01


@pytest.mark.parametrize(
    ("words", "not_shared"),
    [
        ("bash: {}/node.sh: No such file or directory", True),
        ("bash: {}/pdsh.sh: No such file or directory", True),
        ("{}/node.sh: line 4: /opt/env.sh: No such file or directory", False),
        ("{}/node.sh: line 5: /opt/venv/bin/python: No such file or directory", False),
    ],
)
def test_a_missing_interpreter_is_no_missing_root(
    tmp_path: Path, words: str, not_shared: bool
) -> None:
    class Unstarted(StubAgent):
        async def run(self) -> None:
            raise OSError(words.format(self.session.folder))

    async def act(pool: AgentPool, server: Server) -> list[JoinedAgent | MissingAgent]:
        return await pool.gather(300)

    (answer,), _ = with_crew(tmp_path, 1, Unstarted, act)
    assert (
        isinstance(answer, MissingAgent)
        and answer.not_shared is not_shared
        and words.format(tmp_path / "s") in answer.why
    )


DIFFERENCES = [
    ({"versions": {"python": "3", "torch": "2.1"}}, "torch 2.1; none on 2 of 3 hosts"),
    ({"nonce": "x"}, "is not shared"),
    ({"snapshot": "y"}, "other code"),
    ({"writable": "No space left on device"}, "No space left on device"),
    ({"clock": time.time() + 10_000}, "s ahead; 30 s are allowed"),
    ({"address_error": "no interface eth7; there is lo"}, "no interface eth7"),
]


@pytest.mark.parametrize(("facts", "said"), DIFFERENCES)
def test_hosts_that_do_not_fit_together_are_refused_before_a_rank_starts(
    tmp_path: Path, facts: dict[str, Any], said: str
) -> None:
    class Other(Differs):
        other = facts

    run = make_run(tmp_path, ["training.global_batch_size=12"], nodes=3)
    outcome, told = supervised(run, Program(DONE), launcher=Debug(Other))
    assert (outcome.exit, outcome.failure_class) == (7, "infra") and outcome.root_cause is not None
    assert [row["host"] for row in outcome.root_cause["hosts"]] == [
        "h1"
    ] and said in outcome.root_cause["message"]
    assert not [e for e in told if e["event"] == "rank_started"] and told[-1]["exit"] == 7
    assert len(run.attempts()) == 1, "a person's mistake was tried again"


def test_unreachable_hosts_are_told_in_one_table(tmp_path: Path) -> None:
    class Two(StubAgent):
        async def run(self) -> None:
            if self.node != 1:
                raise OSError(f"no route to h{self.node}")
            await super().run()

    run = make_run(tmp_path, ["training.global_batch_size=12"], nodes=3)
    outcome, _ = supervised(run, Program(DONE), launcher=Debug(Two))
    assert outcome.exit == 8 and outcome.root_cause is not None
    assert (
        "2 of 3 hosts are not reached" in outcome.root_cause["message"]
        and "no route to h0" in outcome.root_cause["message"]
    )
    assert [row["host"] for row in outcome.root_cause["hosts"]] == ["h0", "h2"]


@pytest.mark.parametrize(
    ("holder", "words"),
    [
        ({"run": "other", "pid": 7, "folder": "/f", "user": "ann"}, "run other of ann (pid 7, /f)"),
        ({"pid": 7, "user": "ann"}, "ann (pid 7), who names no run"),
        (
            {"user": "ann", "why": "no plain file"},
            "ann, who has put something else in its place (no plain file)",
        ),
    ],
)
def test_a_busy_host_is_named_with_its_run_or_user(
    tmp_path: Path, holder: dict[str, object], words: str
) -> None:
    class Taken(StubAgent):
        async def on_reserve(self, frame: ReserveSlots) -> None:
            self.connection.send(SlotsBusy("cpu", holder))

    outcome, _ = supervised(make_run(tmp_path), Program(DONE), launcher=Debug(Taken))
    assert (
        outcome.exit == 17 and f"cpu is taken by {words}" in (outcome.root_cause or {})["message"]
    )


def test_rank_0_out_of_reach(tmp_path: Path) -> None:
    class Walled(StubAgent):
        async def on_connect(self, frame: ConnectToPort) -> None:
            self.connection.send(PortChecked("No route to host" if self.node else None))

    outcome, _ = supervised(make_run(tmp_path, nodes=2), Program(DONE), launcher=Debug(Walled))
    message = (outcome.root_cause or {})["message"]
    assert (
        outcome.exit == 8
        and "unable to reach rank 0's host h0" in message
        and "h1  No route to host" in message
    )


def test_what_this_machine_is_called() -> None:
    mine = [socket.gethostname(), "localhost", *(address for _, address in local_addresses())]
    assert all(is_this_machine(Host(name)) for name in mine)
    assert not is_this_machine(Host("node1")) and not is_this_machine(Host("203.0.113.7"))


def test_events_of_a_run_over_hosts(tmp_path: Path) -> None:
    run = make_run(tmp_path, nodes=2)
    outcome, _ = supervised(run, Program(DONE), launcher=Debug())
    told = events(run)
    assert outcome.exit == 0 and [e["host"] for e in told if e["event"] == "agent_joined"] == [
        "h0",
        "h1",
    ]
    assert sorted((e["rank"], e["host"]) for e in told if e["event"] == "rank_started") == [
        (0, "h0"),
        (1, "h0"),
        (2, "h1"),
        (3, "h1"),
    ]


def test_after_a_cut_both_sides_are_soon_heard_again() -> None:
    """The gaps between TCP's tries double: a side was silent for up to twice as long as the
    cable was out. And the kernel gave up after 15 s, whatever the lease."""
    token, seen = b"t" * 32, []

    def gaps(sock: Any) -> tuple[int, int, int]:
        thin = sock.getsockopt(socket.IPPROTO_TCP, TCP_THIN_LINEAR_TIMEOUTS)
        until = sock.getsockopt(socket.IPPROTO_TCP, TCP_USER_TIMEOUT)
        try:
            return thin, until, sock.getsockopt(socket.IPPROTO_TCP, TCP_RTO_MAX_MS)
        except OSError:  # Linux before 6.15
            return thin, until, LONGEST_GAP_MS

    async def both() -> None:
        async def handler(connection: Connection, node: int) -> None:
            seen.append(gaps(connection._writer.get_extra_info("socket")))

        server = Server()
        server.token, server.handlers["agent"] = token, handler
        await server.listen("127.0.0.1")
        connection = await asyncio.to_thread(dial, server.address, server.port, token, 0)
        seen.append(gaps(connection.sock))
        while len(seen) < 2:
            await asyncio.sleep(0)
        connection.sock.close()
        await server.close()

    asyncio.run(both())
    assert seen == [(1, GIVE_UP_MS, LONGEST_GAP_MS)] * 2
    assert (heartbeat_interval(30), heartbeat_interval(5)) == (
        1,
        0.25,
    ), "a short lease is not half spent on waiting for the next sign of life"
