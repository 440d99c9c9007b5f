"""All runs of some roots on one live page, for this machine alone.

It listens on 127.0.0.1 only; who asks must know the token in the address, for other users of a
login node can reach that address too. It only reads, and names runs by what it has found itself: no
path of a request becomes a path of a file.
"""

from __future__ import annotations

import secrets
import time
import urllib.parse
from collections.abc import Iterator, Sequence
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from trainkit.base.errors import ConfigError, TrainkitError
from trainkit.reports.chart import text
from trainkit.reports.documents import as_table, read_table
from trainkit.reports.page import page, report_page
from trainkit.reports.read import read_report, time_of_id
from trainkit.reports.words import duration, short
from trainkit.runs.find import all_runs
from trainkit.runs.folder import RunFolder
from trainkit.runs.metrics import MetricsRow, newest_row
from trainkit.runs.record import read_run_record

ADDRESS = "127.0.0.1"
AGAIN = 5  # seconds after which the list asks for itself again
COLUMNS = ("state", "step", "loss", "tokens per second", "attempt", "asked for")
SILENCE = 30.0  # seconds that a connection may say nothing


class Board:
    """What is answered.

    Args:
        roots: the runs of these are shown.
        token: what an address must begin with.
    """

    def __init__(self, roots: Sequence[Path], token: str) -> None:
        self.roots = roots
        self.token = token

    def answer(self, path: str) -> tuple[HTTPStatus, str]:
        """A page for the path of a GET; who does not know the token learns nothing."""
        _, *parts = [urllib.parse.unquote(part) for part in path.partition("?")[0].split("/")]
        if not parts or not secrets.compare_digest(parts[0].encode(), self.token.encode()):
            return HTTPStatus.NOT_FOUND, page("Not found", ["<p>There is nothing here.</p>"])
        if parts[1:] in ([], [""]):
            return HTTPStatus.OK, self._list()
        return self._report(parts[1:])

    def _list(self) -> str:
        warnings: list[str] = []
        runs = all_runs(self.roots, warnings.append)
        return page("Runs", self._rows(list(reversed(runs)), warnings), again=AGAIN)

    def _rows(self, runs: Sequence[RunFolder], warnings: Sequence[str]) -> Iterator[str]:
        yield "<h1>Runs</h1>"
        yield f'<p class="soft">newest first; asks again every {AGAIN} seconds</p>'
        yield from (f"<p>{text(warning)}</p>" for warning in warnings)
        if not runs:
            yield "<p>No runs yet.</p>"
            return
        yield '<div class="scroll"><table><thead><tr><th>run</th><th>job</th>'
        yield "".join(f'<th class="n">{name}</th>' for name in COLUMNS) + "</tr></thead><tbody>"
        for run in runs:
            place = "/".join(urllib.parse.quote(part, safe="") for part in (run.job_name, run.id))
            cells = "".join(f'<td class="n">{text(cell)}</td>' for cell in _cells(run))
            yield (
                f'<tr><td><a href="/{self.token}/{text(place)}">{text(run.id)}</a></td>'
                f"<td>{text(run.job_name)}</td>{cells}</tr>"
            )
        yield "</tbody></table></div>"

    def _report(self, names: Sequence[str]) -> tuple[HTTPStatus, str]:
        for run in all_runs(self.roots, lambda warning: None):
            if [run.job_name, run.id] == list(names):
                try:
                    return HTTPStatus.OK, report_page(read_report(run))
                except (TrainkitError, OSError, ValueError, TypeError, KeyError) as error:
                    words = f"run {run.id} cannot be read: {error}"
                    return HTTPStatus.OK, page("Run", [f"<p>{text(words)}</p>"])
        return HTTPStatus.NOT_FOUND, page("Not found", ["<p>There is no such run.</p>"])


def _cells(run: RunFolder) -> list[str]:
    """A run's COLUMNS."""
    try:
        record = read_run_record(run)
        row = newest_row(run.metrics) or MetricsRow(step=0, consumed_samples=0, lm_loss=None)
    except (TrainkitError, OSError, ValueError, TypeError, KeyError) as error:
        return [f"cannot be read: {error}", *[""] * (len(COLUMNS) - 1)]
    training = as_table(as_table(read_table(run.job).get("job")).get("training"))
    loss = row["lm_loss"]
    began = time_of_id(run.id)
    return [
        record.state,
        f"{record.step} of {training.get('train_iters', '?')}",
        "n/a" if loss is None else f"{loss:.4f}",
        short(row.get("tokens_per_second")),
        str(record.attempt),
        "n/a" if began is None else f"{duration(max(0.0, time.time() - began))} ago",
    ]


def serve(board: Board, port: int) -> ThreadingHTTPServer:
    """A server that listens; `serve_forever` answers.

    Args:
        board: what it answers.
        port: where; 0: any that is free.

    Raises:
        ConfigError: the port is in use, or may not be used.
    """

    class Handler(BaseHTTPRequestHandler):
        timeout = SILENCE

        def do_GET(self) -> None:
            here = (f"{ADDRESS}:{server.server_port}", f"localhost:{server.server_port}")
            if self.headers.get("Host") not in here:  # a name of somebody else's that leads here
                self.send_error(HTTPStatus.FORBIDDEN)
                return
            status, content = board.answer(self.path)
            body = content.encode("utf-8", errors="replace")
            self.send_response(status)
            self.send_header("Content-Type", "text/html; charset=utf-8")
            self.send_header("Content-Length", str(len(body)))
            self.send_header("Cache-Control", "no-store")
            self.send_header("X-Content-Type-Options", "nosniff")
            self.send_header("X-Frame-Options", "DENY")
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """Nothing: an address holds the token."""

    try:
        server = ThreadingHTTPServer((ADDRESS, port), Handler)
    except (OSError, OverflowError) as error:
        raise ConfigError(
            f"port {port} cannot be listened on: {error}", hint="--port 0 takes one that is free"
        ) from None
    server.daemon_threads = True
    return server
