"""Where a supervisor listens: what connects has to prove that it can read the session's token,
before anything it says is believed. All of it, pings too, is done by a thread that touches no
file: neither a disk nor a file system that does not answer keeps agents from hearing us."""

from __future__ import annotations

import asyncio
import contextlib
import random
import resource
import threading
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from trainkit.base.process import raise_open_file_limit
from trainkit.launch.protocol.frames import Frame, Ping
from trainkit.launch.protocol.framing import (
    MAX_FRAME_BYTES,
    BadFrame,
    Decoder,
    encode,
    retransmit_soon,
)
from trainkit.launch.protocol.handshake import ConnectRequest, ServerHandshake

# for the proof: as long as an agent waits, of which a thousand may connect at once
PROOF_SECONDS = 30.0
# rejected connections that are reported; the rest is only counted, so that a port scan fills no
# disk
MOST_REPORTED = 20
WAITING_CONNECTIONS = 4096
# connections that are accepted before everything else has its turn again
ACCEPTS = 16
# connections at a time, of a quarter of the files we may open
MOST_UNPROVED = 1024
T = TypeVar("T")


class Connection:
    """One connection: whole frames in, whole frames out."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._decoder = Decoder()
        self.heard = time.monotonic()
        peer = writer.get_extra_info("peername") or ("unknown", 0)
        retransmit_soon(writer.get_extra_info("socket"))
        self.peer_address = str(peer[0])
        self.peer = f"{peer[0]}:{peer[1]}"

    def trust(self) -> None:
        """The other side has proved itself: it may send long frames."""
        self._decoder.limit = MAX_FRAME_BYTES

    async def receive(self) -> dict[str, object] | None:
        """The next frame as it came; None at the end. Raises BadFrame."""
        data = b""
        # one at a time: the limit may rise in between
        while (frame := next(self._decoder.feed(data), None)) is None:
            try:
                data = await self._reader.read(2**16)
            except OSError:
                return None
            if not data:
                return None
            self.heard = time.monotonic()
        return frame

    def send(self, frame: Frame) -> None:
        """Send without waiting; what a dead peer does not read is small and goes with the
        connection."""
        self.write(encode(frame.to_json()))

    def write(self, data: bytes) -> None:
        """As `send`, of a frame's bytes."""
        if not self._writer.is_closing():
            self._writer.write(data)

    def close(self) -> None:
        """End the connection at once."""
        with contextlib.suppress(Exception):
            self._writer.transport.abort()

    async def finish(self) -> None:
        """End the connection once what was sent has left; bounded."""
        with contextlib.suppress(OSError, TimeoutError):
            async with asyncio.timeout(1):
                await self._writer.drain()
        self._writer.close()


# takes a proved connection and the node it speaks for
Handler = Callable[[Connection, int], Awaitable[None]]


class Server:
    """One listening socket for all sessions of a supervisor, one after another.

    `handlers`: by role ("agent", "control"), what a proved connection is given to, in `loop`.
    `loop`: of the network's thread, to which connections belong; nothing there may wait for a
    file. `token`: the session's; None between two sessions. `rejected`: how many connections
    proved nothing.

    Args:
        on_rejected: called with (the peer's address, why) for one that proved nothing; in the
            loop that called `listen`.
    """

    def __init__(self, on_rejected: Callable[[str, str], None] = lambda peer, why: None) -> None:
        self.handlers: dict[str, Handler] = {}
        self.token: bytes | None = None
        self.rejected = 0
        self._on_rejected = on_rejected
        self._server: asyncio.Server | None = None
        self._open: set[asyncio.Task[None]] = set()
        self._unproved: defaultdict[str, list[Connection]] = defaultdict(list)  # by address
        self._most_unproved = MOST_UNPROVED
        self.address = ""
        self.port = 0

    async def listen(self, address: str) -> None:
        """Listen on a free port of one address. Raises OSError where this machine has no such
        address."""
        raise_open_file_limit()  # a connection an agent, and with ssh a pipe each
        files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        if files != resource.RLIM_INFINITY:
            self._most_unproved = min(MOST_UNPROVED, max(1, files // 4))
        self._home = asyncio.get_running_loop()
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, name="network", daemon=True)
        self._thread.start()
        try:
            # asyncio accepts as many at once as may wait: so few of them, then the queue's true
            # length
            self._server = await self.run(
                asyncio.start_server(self._accept, address, 0, backlog=ACCEPTS)
            )
        except OSError:
            await self.close()
            raise
        with self._server.sockets[0].dup() as listener:
            listener.listen(WAITING_CONNECTIONS)
        self.address, self.port = address, self._server.sockets[0].getsockname()[1]

    async def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Have the network's thread do it, and wait for that."""
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self.loop))

    async def close(self) -> None:
        """Stop listening, and end what is left of connections."""
        await self.run(self._close())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()

    async def _close(self) -> None:
        if self._server is not None:
            self._server.close()
        for task in self._open:
            task.cancel()
        await asyncio.gather(*self._open, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._open.add(task)
        connection = Connection(reader, writer)
        self._make_room()
        self._unproved[connection.peer_address].append(connection)
        try:
            async with asyncio.timeout(PROOF_SECONDS):
                request = await self._proved(connection)
            self._forget_unproved(connection)
            connection.send(Ping())  # from now on it is not ended for others
            # else what it came for has just gone
            if handler := self.handlers.get(request.role):
                await handler(connection, request.node)
        except (BadFrame, TimeoutError, UnicodeError) as error:
            self.rejected += 1
            if self.rejected <= MOST_REPORTED:
                why = str(error) or f"proved nothing within {PROOF_SECONDS:g} s"
                self._home.call_soon_threadsafe(self._on_rejected, connection.peer, why)
        except asyncio.CancelledError:
            # the server closes; a task of asyncio's server that ends as cancelled is reported as
            # an error
            pass
        finally:
            connection.close()
            self._forget_unproved(connection)
            self._open.discard(task)

    def _make_room(self) -> None:
        """Where as many as may be have proved nothing yet, end one of those of the address that has
        most of them. Which one is chance: an agent beside it, which needs a moment for its proof,
        is rarely the one, and tries again."""
        if sum(map(len, self._unproved.values())) >= self._most_unproved:
            most = max(self._unproved.values(), key=len)
            unlucky = random.choice(most)
            most.remove(unlucky)
            unlucky.close()

    def _forget_unproved(self, connection: Connection) -> None:
        of_address = self._unproved[connection.peer_address]
        if connection in of_address:
            of_address.remove(connection)
        if not of_address:
            del self._unproved[connection.peer_address]

    async def _proved(self, connection: Connection) -> ConnectRequest:
        """What the other side wants, once it has proved itself. Raises BadFrame."""
        received = await connection.receive()
        request = ConnectRequest.from_json(received or {})
        if request.role not in self.handlers or self.token is None:
            raise BadFrame(f"nothing waits for a {request.role[:20]!r} now")
        token = self.token
        handshake = ServerHandshake(token, request)
        connection.send(handshake.challenge)
        handshake.check(await connection.receive())
        if token != self.token:  # an agent that hung meanwhile has no place in the next session
            raise BadFrame("its session has ended")
        connection.trust()
        return request
