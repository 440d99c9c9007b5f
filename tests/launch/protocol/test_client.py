"""Speaking to a supervisor: who cannot prove itself is not believed, who is not there is None."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.runs.test_record import make_run
from trainkit.base.errors import TrainkitError
from trainkit.base.files import write_json
from trainkit.base.process import identity
from trainkit.experiment.follow import RunFollower
from trainkit.launch.agent.connection import dial
from trainkit.launch.protocol.client import ask_supervisor
from trainkit.launch.protocol.frames import Accepted, CancelRun, Ping
from trainkit.launch.protocol.framing import Decoder, encode
from trainkit.launch.protocol.handshake import ClientHandshake
from trainkit.launch.protocol.server import ACCEPTS, Connection, Server
from trainkit.runs.events import EventTail
from trainkit.runs.folder import RunFolder
from trainkit.runs.record import read_supervisor_status, write_supervisor_status

TOKEN = b"t" * 32
CANCEL = CancelRun(save=True)
Heard = list[dict[str, object] | None]


def announce(
    run: RunFolder,
    port: int,
    token: bytes = TOKEN,
    ended: bool = False,
    start_time: int | None = None,
) -> None:
    me = identity() if start_time is None else replace(identity(), start_time=start_time)
    value = {
        "identity": me.to_json(),
        "host": me.host,
        "time": time.time(),
        "attempt": 2,
        "address": "127.0.0.1",
        "port": port,
        "ended": ended,
    }
    write_json(run.supervisor, {"schema": "supervisor/1", **value})
    run.session(2).mkdir(parents=True, exist_ok=True)
    (run.session(2) / "token").write_text(token.hex() + "\n")


@contextlib.contextmanager
def listening(heard: Heard, most: int | None = None) -> Iterator[int]:
    """A supervisor's real server in a thread; gives its port."""
    ready, ports = threading.Event(), []
    loop = asyncio.new_event_loop()

    async def serve(stop: asyncio.Event) -> None:
        async def handler(connection: Connection, node: int) -> None:
            connection.send(Ping())
            heard.append(await connection.receive())
            connection.send(Accepted())
            await connection.finish()

        server = Server()
        server.token = TOKEN
        server.handlers |= {"control": handler, "agent": handler}
        await server.listen("127.0.0.1")
        server._most_unproved = most or server._most_unproved
        ports.append(server.port)
        ready.set()
        await stop.wait()
        await server.close()

    stop = asyncio.Event()
    thread = threading.Thread(target=lambda: loop.run_until_complete(serve(stop)))
    thread.start()
    assert ready.wait(300)
    try:
        yield ports[0]
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join()
        loop.close()


def test_asked_and_answered(tmp_path: Path) -> None:
    run, heard = make_run(tmp_path, "j", "a"), Heard()
    assert not ask_supervisor(run, CANCEL)  # no supervisor ever
    with listening(heard) as port:
        announce(run, port)
        assert ask_supervisor(run, CANCEL) and heard == [CANCEL.to_json()]
        announce(run, port, token=b"x" * 32)
        with pytest.raises(
            TrainkitError, match=r"another program listens in the place of the supervisor of run a "
        ) as error:
            ask_supervisor(run, CANCEL)
        assert error.value.exit == 13 and heard == [CANCEL.to_json()]
        announce(run, port, ended=True)
        assert not ask_supervisor(run, CANCEL)
    announce(run, port, start_time=1)
    assert not ask_supervisor(run, CANCEL)  # another process has its pid
    announce(run, port)
    with pytest.raises(TrainkitError, match=r"cannot be reached: .*refused"):
        ask_supervisor(run, CANCEL, timeout=0.3)


def test_who_follows_a_run_asks_a_supervisor_that_cannot_sign(tmp_path: Path) -> None:
    """A shared root that stalls keeps its sign of life back for longer than is believed."""
    run = make_run(tmp_path, "j", "a")
    follower = RunFollower(run, EventTail(run), lambda line: None)
    with listening([]) as port:
        announce(run, port)
        status = read_supervisor_status(run)
        assert status
        write_supervisor_status(run, replace(status, time=time.time() - 1000))
        assert follower.poll() is None
    follower = RunFollower(run, EventTail(run), lambda line: None)
    record = follower.poll()
    assert record and record.state == "unknown"


def test_unproved_connections_leave_room_for_agents(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("resource.getrlimit", lambda kind: (1024, 1024))
    # the real one would lower this process's own limit, for the tests after it too
    monkeypatch.setattr("resource.setrlimit", lambda kind, pair: None)

    async def most() -> int:
        server = Server()
        await server.listen("127.0.0.1")
        await server.close()
        return server._most_unproved

    assert asyncio.run(most()) == 256


def open_sockets() -> int:
    """Of this process."""
    return len([path for path in Path("/proc/self/fd").iterdir() if path.is_socket()])


def test_who_only_connects_keeps_nobody_out(tmp_path: Path) -> None:
    """More idle connections than a quarter of the files that a supervisor may open: as many as
    are too many go, who has the token is heard."""
    run, heard = make_run(tmp_path, "j", "a"), Heard()
    program = """
import socket, sys
held = [socket.create_connection(("127.0.0.1", int(sys.argv[1]))) for _ in range(500)]
print("held", flush=True)
sys.stdin.read()
"""
    before = open_sockets()  # what former tests left is not counted
    with listening(heard, most=64) as port:
        announce(run, port)
        with subprocess.Popen(
            [sys.executable, "-c", program, str(port)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        ) as idle:
            assert idle.stdout and idle.stdout.readline() == b"held\n"
            assert ask_supervisor(run, CANCEL)
            assert open_sockets() - before < 64 + 50, "idle connections are held"
            assert idle.stdin
            idle.stdin.close()


def crowd(port: int, address: str = "127.0.0.1") -> list[socket.socket]:
    """Strangers who only connect, from one address."""
    here = ("127.0.0.1", port)
    return [socket.create_connection(here, source_address=(address, 0)) for _ in range(300)]


def test_an_agent_that_had_to_go_proves_itself_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """More strangers of its own address than the server holds come between its connection and its
    first word."""
    connect = socket.create_connection
    strangers: list[socket.socket] = []

    def crowded(target: tuple[str, int], timeout: float) -> socket.socket:
        own = connect(target, timeout)
        if not strangers:
            strangers.extend(connect(target) for _ in range(300))
        return own

    monkeypatch.setattr("trainkit.launch.agent.connection.socket.create_connection", crowded)
    heard = Heard()
    with listening(heard, most=64) as port:
        agent = dial("127.0.0.1", port, TOKEN, 3, seconds=300)
        agent.send(CANCEL)
        agent.sock.setblocking(True)
        while Accepted.TYPE not in [frame["type"] for frame in agent.receive()]:
            pass
        # of a proof that came just as its connection went nothing is heard but the end
        assert [word for word in heard if word] == [CANCEL.to_json()]
        for each in (*strangers, agent.sock):
            each.close()


def test_a_crowd_of_one_address_keeps_no_other_out() -> None:
    heard = Heard()
    with listening(heard, most=64) as port, socket.create_connection(("127.0.0.1", port)) as own:
        strangers = crowd(port, "127.0.0.2")
        with contextlib.suppress(ConnectionError):  # until the last of the crowd was accepted
            strangers[-1].sendall(b"GET / HTTP/1.1\r\n\r\n")
            strangers[-1].recv(1)
        handshake = ClientHandshake(TOKEN, "control", 0)
        own.sendall(encode(handshake.request.to_json()))
        (challenge,) = Decoder().feed(own.recv(4096))
        own.sendall(encode(handshake.answer(challenge).to_json()) + encode(CANCEL.to_json()))
        assert own.recv(4096)
        for each in strangers:
            each.close()
    assert heard == [CANCEL.to_json()]


def test_who_hangs_in_its_proof_has_no_place_in_the_next_session() -> None:
    async def said() -> bytes:
        async def handler(connection: Connection, node: int) -> None:
            await connection.finish()

        server = Server()
        server.token = TOKEN
        server.handlers["agent"] = handler
        await server.listen("127.0.0.1")
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        handshake = ClientHandshake(TOKEN, "agent", 0)
        writer.write(encode(handshake.request.to_json()))
        (challenge,) = Decoder().feed(await reader.read(4096))
        server.token = b"n" * 32
        writer.write(encode(handshake.answer(challenge).to_json()))
        rest = await reader.read()
        writer.close()
        await server.close()
        return rest

    assert asyncio.run(said()) == b""


def test_a_crowd_is_accepted_a_few_at_a_time() -> None:
    """What the supervisor has to do besides, pings too, waits for a few of them, not for all."""

    async def accepted() -> list[int]:
        async def counted() -> list[int]:
            counts = [0]
            while counts[-1] < len(strangers):
                await asyncio.sleep(0)
                counts.append(len(server._open))
            return counts

        server = Server()
        await server.listen("127.0.0.1")
        there = threading.Event()  # until then the network's thread accepts nobody
        server.loop.call_soon_threadsafe(there.wait)
        strangers = crowd(server.port)
        counting = asyncio.run_coroutine_threadsafe(counted(), server.loop)
        there.set()
        counts = await asyncio.wrap_future(counting)
        for each in strangers:
            each.close()
        await server.close()
        return counts

    counts = asyncio.run(accepted())
    assert max(b - a for a, b in itertools.pairwise(counts)) <= 2 * ACCEPTS


def test_one_that_accepts_and_says_nothing(tmp_path: Path) -> None:
    run = make_run(tmp_path, "j", "a")
    with socket.create_server(("127.0.0.1", 0)) as mute:
        announce(run, mute.getsockname()[1])
        with pytest.raises(TrainkitError, match="cannot be reached: timed out"):
            ask_supervisor(run, CANCEL, timeout=0.3)


def test_asked_again_until_the_attempt_has_its_token(tmp_path: Path) -> None:
    run, heard = make_run(tmp_path, "j", "a"), Heard()
    with listening(heard) as port:
        announce(run, port)
        token = run.session(2) / "token"
        token.rename(token.with_name("later"))
        timer = threading.Timer(0.5, lambda: token.with_name("later").rename(token))
        timer.start()
        assert ask_supervisor(run, CANCEL)
        timer.join()
