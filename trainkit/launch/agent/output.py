"""What a process prints: read at once, without secrets, into its log and to the supervisor;
nothing of it can make the process wait.

A slow disk is the matter of a thread, a slow supervisor that of a bounded buffer; what does not
fit is dropped and counted.
"""

from __future__ import annotations

import codecs
import os
import threading
import time
from collections import deque
from io import FileIO
from pathlib import Path

from trainkit.base.files import rotated_log
from trainkit.base.lazy_dataclasses import dataclass, field
from trainkit.base.redact import RedactedStream, Redactor
from trainkit.launch.protocol.frames import ProcessOutput

READ = 2**16  # bytes a read
BATCH = 2**16  # bytes of a process's output that wait for the supervisor, the oldest dropped
WHOLE = 2**20  # of a process whose output must be whole: then it waits itself
LONGEST = 2**24  # of a line that must be whole; a longer one is cut
DRAIN = 2**24  # bytes read after a process's end
# bytes of a log, after which a new one begins; the part before it is kept, so that a rank has twice
# as many at most
FULL = 2**26
QUEUE = 2**23  # bytes that wait for one log, the newest dropped
PARTIAL_SECONDS = 0.25  # how long the beginning of a line waits for its end
# what is kept of the end: lines, and bytes of one
LAST_LINES = 30
LAST_BYTES = 2000


class LogWriter:
    """Appends to log files in a thread of its own: a file system that hangs or is full holds
    nobody up.

    Args:
        full: bytes of a file, which is then put aside (`rotated_log`, in place of an earlier
            one) before a new one begins.
    """

    def __init__(self, full: int = FULL) -> None:
        self._full = full
        self._change = threading.Condition()
        self._queue: deque[tuple[Path, bytes | None]] = deque()
        self._waiting: dict[Path, int] = {}
        self._lost: dict[Path, int] = {}
        self._files: dict[Path, FileIO] = {}
        self._reported_troubles: set[Path] = set()
        self.troubles: deque[tuple[Path, str]] = deque()  # (log, what is wrong with it), once a log
        self._thread: threading.Thread | None = None

    def write(self, path: Path, data: bytes) -> None:
        """Append, soon. An empty write makes the file."""
        with self._change:
            if data and self._waiting.get(path, 0) > QUEUE:
                self._lost[path] = self._lost.get(path, 0) + len(data)
                return
            self._put(path, data)

    def close(self, path: Path) -> None:
        """Close the file once all is written."""
        with self._change:
            self._put(path, None)

    def idle(self, path: Path) -> bool:
        """Whether all that was given for the log is written, or lost."""
        with self._change:
            return not self._waiting.get(path)

    def _put(self, path: Path, data: bytes | None) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, daemon=True, name="logs")
            self._thread.start()
        self._waiting[path] = self._waiting.get(path, 0) + len(data or b"") + 1
        self._queue.append((path, data))
        self._change.notify()

    def _run(self) -> None:
        while True:
            with self._change:
                while not self._queue:
                    self._change.wait()
                path, data = self._queue.popleft()
                lost = self._lost.pop(path, 0)
            if lost:
                note = (
                    f"[trainkit: {lost:,} bytes of output are missing here: this log could not be"
                    " written]\n".encode()
                )
            else:
                note = b""
            self._do(path, data, note)
            with self._change:
                self._waiting[path] -= len(data or b"") + 1

    def _do(self, path: Path, data: bytes | None, note: bytes) -> None:
        try:
            if data is None:
                if file := self._files.pop(path, None):
                    file.close()
                return
            if path not in self._files:
                path.parent.mkdir(parents=True, exist_ok=True)
                self._files[path] = FileIO(path, "a")
            if self._files[path].tell() + len(data) > self._full:
                note = self._rotate(path) + note
            rest = memoryview(note + data)
            while rest:
                rest = rest[self._files[path].write(rest) :]
        except OSError as error:
            with self._change:
                self._lost[path] = self._lost.get(path, 0) + len(data or b"")
            if path not in self._reported_troubles:
                self._reported_troubles.add(path)
                self.troubles.append((path, error.strerror or str(error)))

    def _rotate(self, path: Path) -> bytes:
        """Put the file aside; returns what the new one begins with. One that cannot be put aside
        grows further."""
        try:
            os.replace(path, rotated_log(path))
        except OSError:
            return b""
        self._files[path].close()
        self._files[path] = FileIO(path, "a")
        note = (
            f"this log was full ({self._full:,} bytes): what came before is in"
            f" {rotated_log(path).name}, and what was there before that is gone"
        )
        return f"[trainkit: {note}]\n".encode()


@dataclass
class _Stream:
    name: str  # "out" or "err"
    redacted: RedactedStream
    decoder: codecs.IncrementalDecoder
    partial: bytearray = field(default_factory=bytearray)
    since: float = 0.0  # when the partial line began


class Output:
    """The two streams of one process.

    Args:
        log: where all of it goes, None for nowhere.
        whole: the supervisor gets every line, in whole lines; else at most BATCH bytes at a time.
        reported: the supervisor gets it at all; else only what we have to say about it.
    """

    def __init__(
        self,
        key: str,
        log: Path | None,
        redactor: Redactor,
        writer: LogWriter,
        *,
        whole: bool,
        reported: bool = True,
    ) -> None:
        self.key = key
        self.log = log
        self.whole = whole
        self._reported = reported
        self._writer = writer
        decoder = codecs.getincrementaldecoder("utf-8")
        self._streams = {
            name: _Stream(name, RedactedStream(redactor), decoder("surrogateescape"))
            for name in ("out", "err")
        }
        self._batch: deque[tuple[str, bytearray]] = deque()
        self._waiting_bytes = 0
        self.dropped = 0
        self._last: deque[bytes] = deque(maxlen=LAST_LINES)
        self.captured: bytearray | None = None  # while set, a copy of what comes on stderr
        if log is not None:
            writer.write(log, b"")

    @property
    def full(self) -> bool:
        """Whether the process has to wait: only where its output must be whole."""
        return self.whole and self._waiting_bytes > WHOLE

    def take(self, name: str, data: bytes) -> None:
        """Bytes of a stream as they were read; b"" at its end."""
        stream = self._streams[name]
        now = time.monotonic()
        stream.partial += stream.redacted.feed(data) if data else stream.redacted.end()
        cut = not data or len(stream.partial) > (LONGEST if self.whole else READ)
        end = len(stream.partial) if cut else stream.partial.rfind(b"\n") + 1
        if end:
            self._give(stream, bytes(stream.partial[:end]))
            del stream.partial[:end]
            stream.since = now
        elif len(stream.partial) <= len(data):
            stream.since = now

    def tick(self, now: float) -> None:
        """Let go of lines whose end does not come: a progress bar, a prompt."""
        for stream in self._streams.values():
            if stream.partial and not self.whole and now - stream.since > PARTIAL_SECONDS:
                self._give(stream, bytes(stream.partial))
                stream.partial.clear()

    @property
    def waiting(self) -> bool:
        """Whether `tick` or `frames` have something to do."""
        return bool(self._batch) or any(stream.partial for stream in self._streams.values())

    def frames(self) -> list[ProcessOutput]:
        """What came since the last call, in order."""
        made = []
        while self._batch:
            name, data = self._batch.popleft()
            text = self._streams[name].decoder.decode(bytes(data))
            made.append(ProcessOutput(self.key, name, text, self.dropped))
            self.dropped = 0
        self._waiting_bytes = 0
        return made

    def note(self, text: str) -> None:
        """A line of our own among the process's, to the supervisor only."""
        self._append("err", f"trainkit: {text}\n".encode("utf-8", "surrogateescape"))

    def last(self) -> list[str]:
        """The last lines of both streams, in the order they came."""
        return [line.decode("utf-8", "replace") for line in self._last]

    def _give(self, stream: _Stream, data: bytes) -> None:
        if self.log is not None:
            self._writer.write(self.log, data)
        for line in data[-LAST_LINES * LAST_BYTES :].splitlines()[-LAST_LINES:]:
            if line.strip():
                self._last.append(line[:LAST_BYTES])
        if self.captured is not None and stream.name == "err":
            self.captured += data
        if self._reported:
            self._append(stream.name, data)

    def _append(self, name: str, data: bytes) -> None:
        if self._batch and self._batch[-1][0] == name:
            self._batch[-1][1].extend(data)
        else:
            self._batch.append((name, bytearray(data)))
        self._waiting_bytes += len(data)
        while not self.whole and self._waiting_bytes > BATCH:
            head = self._batch[0]
            over = min(self._waiting_bytes - BATCH, len(head[1]))
            del head[1][:over]
            self._waiting_bytes = self._waiting_bytes - over
            self.dropped = self.dropped + over
            if not head[1]:
                self._batch.popleft()


class Pipes:
    """A process's stdout and stderr, read without waiting.

    Args:
        output: takes what is read.
        out, err: the reading ends, ours from now on.
    """

    def __init__(self, output: Output, out: int, err: int) -> None:
        self.output = output
        self.open = {out: "out", err: "err"}
        for handle in self.open:
            os.set_blocking(handle, False)

    def read(self, handle: int) -> bool:
        """Read once; returns whether there was something. At the end of the stream it is closed."""
        try:
            data = os.read(handle, READ)
        except BlockingIOError:
            return False
        except OSError:
            data = b""
        self.output.take(self.open[handle], data)
        if not data:
            os.close(handle)
            del self.open[handle]
        return bool(data)

    def close(self) -> None:
        """Read what is there now, then close both: the process has ended. What still writes,
        even endlessly, is not read."""
        for handle, name in list(self.open.items()):
            for _ in range(DRAIN // READ):
                if not self.read(handle):
                    break
            if handle in self.open:
                self.output.take(name, b"")
                os.close(handle)
                del self.open[handle]
