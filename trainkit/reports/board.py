"""All runs of some roots on one live page, for this machine alone.

It listens on 127.0.0.1 only; whoever asks must know the token in the address, for other users of a
login node can reach that address too. It only reads, and names runs by what it has found itself: no
path of a request becomes a path of a file.
"""

from __future__ import annotations

import secrets
import urllib.parse
from collections.abc import Iterator, Sequence
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from trainkit.base.errors import ConfigError, TrainkitError
from trainkit.reports.chart import text
from trainkit.reports.page import page, report_page
from trainkit.reports.read import read_report
from trainkit.runs.find import all_runs
from trainkit.runs.folder import RunFolder
from trainkit.runs.record import read_run_record

ADDRESS = "127.0.0.1"
AGAIN = 5  # seconds after which the list asks for itself again
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
        """A page for the path of a GET; whoever does not know the token learns nothing."""
        parts = [urllib.parse.unquote(part) for part in path.partition("?")[0].split("/")[1:]]
        if not secrets.compare_digest(parts[0].encode(), self.token.encode()):
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
        yield '<div class="scroll"><table><thead><tr><th>run</th><th>job</th><th>state</th>'
        yield '<th class="n">step</th><th class="n">attempt</th></tr></thead><tbody>'
        for run in runs:
            try:
                record = read_run_record(run)
                cells = (str(record.state), str(record.step), str(record.attempt))
            except (TrainkitError, OSError, ValueError, TypeError, KeyError) as error:
                cells = (f"cannot be read: {error}", "", "")
            place = "/".join(urllib.parse.quote(part, safe="") for part in (run.job_name, run.id))
            yield (
                f'<tr><td><a href="/{self.token}/{text(place)}">{text(run.id)}</a></td>'
                f"<td>{text(run.job_name)}</td><td>{text(cells[0])}</td>"
                f'<td class="n">{cells[1]}</td><td class="n">{cells[2]}</td></tr>'
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
