"""The live page of all runs: who may read it, what it shows, and how it ends."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import Project
from tests.reports.drill import three_kills
from trainkit.base.errors import ConfigError
from trainkit.reports.board import Board, serve

TOKEN = "a-token"


def ask(port: int, path: str, host: str = "", method: str = "GET") -> tuple[int, str]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request(method, path, headers={"Host": host or f"localhost:{port}"})
    answer = connection.getresponse()
    text = answer.read().decode()
    connection.close()
    return answer.status, text


@pytest.fixture
def port(tmp_path: Path) -> Iterator[int]:
    """A board of one good run, one that cannot be read, and a root that is not a folder."""
    drill = three_kills(tmp_path)
    steps = [
        {"step": n, "consumed_samples": n, "lm_loss": 5 - n, "tokens_per_second": 30500.0}
        for n in (1, 2)
    ]
    evaluation = {"step": 2, "consumed_samples": 2, "lm_loss": 4, "eval": "valid"}
    drill.run.metrics.write_text(
        "".join(json.dumps(row) + "\n" for row in (*steps, evaluation)) + '{"step": 3, "torn'
    )
    broken = tmp_path / "runs" / "j<b>" / "20270101-000000-bbbb"
    (broken / "launch").mkdir(parents=True)
    (broken / "job.json").write_text("{}")
    (broken / "launch" / "supervisor.json").write_text('{"schema": "<i>"}')
    (tmp_path / "file").write_text("")
    with serve(Board([tmp_path, tmp_path / "file"], TOKEN), 0) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield server.server_port
        server.shutdown()
        thread.join()


def test_runs_and_their_reports(port: int) -> None:
    status, text = ask(port, f"/{TOKEN}/")
    assert status == 200 and 'http-equiv="refresh"' in text and "succeeded" in text
    assert "3.0000" in text and "30.5 k" in text and " ago</td>" in text
    assert "cannot be read" in text and "<i>" not in text and "j<b>" not in text
    links = re.findall(r'href="([^"]+)"', text)
    assert len(links) == 2
    good = next(link for link in links if "aaaa" in link)
    status, report = ask(port, good)
    assert status == 200 and "lost and redone" in report
    assert ask(port, next(link for link in links if "bbbb" in link))[0] == 200


def test_whoever_does_not_know_the_token_learns_nothing(port: int) -> None:
    for path in ("/", "//", "/a-toke", "/x/job/20270115-080000-aaaa", f"/?{TOKEN}", "/%ff"):
        status, text = ask(port, path)
        assert status == 404 and "aaaa" not in text
    for path in ("job/../../etc/passwd", "..%2f..%2fetc/passwd", "job", "job/x/y"):
        assert ask(port, f"/{TOKEN}/{path}")[0] == 404
    assert ask(port, f"/{TOKEN}/", host="evil.example")[0] == 403
    assert ask(port, f"/{TOKEN}/", method="POST")[0] == 501
    assert ask(port, "foo")[0] == 404


def test_a_port_in_use(port: int) -> None:
    with pytest.raises(ConfigError, match=f"port {port} cannot be listened on"):
        serve(Board([], TOKEN), port)


def test_the_task_listens_on_this_machine_alone_until_ctrl_c(project: Project) -> None:
    process = project.start("board", "--port", "0", SSH_CONNECTION="10.0.0.1 5 10.9.8.7 22")
    assert process.stdout is not None
    first = process.stdout.readline()
    match = re.search(r"http://127.0.0.1:(\d+)(/\S+/)", first)
    assert match is not None, first
    found, path = int(match[1]), match[2]
    assert f"-L {found}:127.0.0.1:{found}" in process.stdout.readline()
    assert "No runs yet." in ask(found, path)[1]
    with socket.socket() as other:
        assert other.connect_ex(("127.0.0.2", found)) != 0
    os.kill(process.pid, signal.SIGINT)
    _, err = process.communicate(timeout=600)
    assert "Traceback" not in err and process.returncode in (0, 130)
