"""Where a supervisor listens: whoever knocks has to prove that it can read the session's token,
before a word of it is believed."""

from __future__ import annotations

import asyncio
import contextlib
import resource
import time
from collections.abc import Awaitable, Callable

from trainkit.base.process import raise_open_file_limit
from trainkit.launch.protocol.frames import (
    MAX_FRAME_BYTES,
    BadFrame,
    Decoder,
    Frame,
    encode,
    new_nonce,
    proof,
    proved,
    retransmit_soon,
)

# that a stranger has: as long as an agent waits, of which a thousand may knock at once
PROOF_SECONDS = 30.0
# of them are reported; the rest only counted, so that a port scan fills no disk
TOLD_STRANGERS = 20
WAITING_CONNECTIONS = 4096
# connections at a time, of a quarter of the files we may open: the oldest goes where one more comes
MOST_UNPROVED = 1024


class Connection:
    """One connection: whole frames in, whole frames out."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._decoder = Decoder()
        self.heard = time.monotonic()
        peer = writer.get_extra_info("peername")
        retransmit_soon(writer.get_extra_info("socket"))
        if peer:
            self.peer = f"{peer[0]}:{peer[1]}"
        else:
            self.peer = "unknown"

    def trust(self) -> None:
        """The other side has proved itself: it may send long frames."""
        self._decoder.limit = MAX_FRAME_BYTES

    async def receive(self) -> Frame | None:
        """The next frame; None at the end. Raises BadFrame."""
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
        if not self._writer.is_closing():
            self._writer.write(encode(frame))

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

    Args:
        stranger: told of a peer that proved nothing: (its address, why).
    """

    def __init__(self, stranger: Callable[[str, str], None] = lambda peer, why: None) -> None:
        self.handlers: dict[str, Handler] = {}  # by role: "agent", "control"
        self.token: bytes | None = None
        self.strangers = 0
        self._stranger = stranger
        self._server: asyncio.Server | None = None
        self._open: set[asyncio.Task[None]] = set()
        self._unproved: dict[Connection, None] = {}  # oldest first
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
        self._server = await asyncio.start_server(
            self._accept, address, 0, backlog=WAITING_CONNECTIONS
        )
        self.address, self.port = address, self._server.sockets[0].getsockname()[1]

    async def close(self) -> None:
        """Listen no more, and end what is left of connections."""
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
        if len(self._unproved) >= self._most_unproved:
            # who has the token proves it at once; who only connects must not keep others out
            next(iter(self._unproved)).close()
            del self._unproved[next(iter(self._unproved))]
        self._unproved[connection] = None
        try:
            async with asyncio.timeout(PROOF_SECONDS):
                role, node = await self._proved(connection)
            self._unproved.pop(connection, None)
            if handler := self.handlers.get(role):  # else whom it came for has just gone
                await handler(connection, node)
        except (BadFrame, TimeoutError, UnicodeError) as error:
            self.strangers += 1
            if self.strangers <= TOLD_STRANGERS:
                self._stranger(
                    connection.peer, str(error) or f"proved nothing within {PROOF_SECONDS:g} s"
                )
        except asyncio.CancelledError:
            # the door closes; a task of asyncio's server that ends as cancelled is reported as an
            # error
            pass
        finally:
            connection.close()
            self._unproved.pop(connection, None)
            self._open.discard(task)

    async def _proved(self, connection: Connection) -> tuple[str, int]:
        knock = await connection.receive()
        if knock is None or knock["type"] != "knock":
            raise BadFrame("it did not knock")
        role = knock.get("role")
        node = knock.get("node")
        theirs = knock.get("nonce")
        if (
            not isinstance(role, str)
            or role not in self.handlers
            or not isinstance(node, int)
            or not isinstance(theirs, str)
            or self.token is None
        ):
            raise BadFrame(f"nobody waits for a {str(role)[:20]!r} now")
        ours = new_nonce()
        token = self.token
        connection.send(
            {"type": "challenge", "nonce": ours, "proof": proof(token, "supervisor", ours, theirs)}
        )
        answer = await connection.receive()
        if (
            answer is None
            or answer["type"] != "answer"
            or not proved(answer.get("proof"), token, "agent", theirs, ours, f"{role}:{node}")
        ):
            raise BadFrame("a wrong token")
        connection.trust()
        return role, node
