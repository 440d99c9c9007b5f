"""What a job says reaches every rank byte by byte, whoever carries it: environment, secrets,
arguments."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from tests.cluster.machines import HEAD, Cluster
from tests.cluster.on_head import ClusterProject

HOSTILE = {
    "QUOTES": """a 'single', a "double", a \\ and a \\\\""",
    "EXPANDED": "$HOME $(id) `id` ; echo x & | > /dev/null * ? [a] ~ # !",
    "LINES": "first\nsecond\r\n\tthird\n",
    "PERCENT": "%h %n %u %% %",
    "JSON": '{"a": [1, "b\\n"], "c": null}',
    "UNICODE": "Käse 数据 \U0001f600 \u2028 \u0007",
    "SPACES": "  two  at both ends  ",
    "EMPTY": "",
}
CHECKOUT = str(Path(__file__).resolve().parents[2])
SECRET = """s3cret '"$`\\ %h\n""" + "x" * 20
# Replaces the command of an engine by one that writes down what it was given: typed on the head, it
# is `invoke` otherwise.
TYPED = """
import dataclasses, json, sys
from invoke.main import program
from trainkit.engines.registry import ENGINES
from trainkit.launch.launchers import LAUNCHERS
folder, words, debug = sys.argv[1], json.loads(sys.argv[2]), sys.argv[3] == "debug"
native = ENGINES["native"]
class Shows(type(native)):
    def command(self, job, run, attempt):
        command = native.command(job, run, attempt)
        argv = (*command.argv[:2], folder + "/shows.py", *words, folder, command.argv[2])
        return dataclasses.replace(command, argv=argv)
ENGINES["native"] = Shows()
if debug:
    sys.path.insert(0, "CHECKOUT")
    from tests.launch.stub_agents import Debug
    LAUNCHERS["ssh"] = Debug()
sys.argv = ["invoke", *sys.argv[4:]]
program.run()
""".replace("CHECKOUT", CHECKOUT)
SHOWS = """
import json, os, sys
from pathlib import Path
*words, folder, main = sys.argv[1:]
sys.path.insert(0, str(Path(main).resolve().parents[2]))
from trainkit.train.metrics.heartbeat import Heartbeat
argv = [os.fsencode(w).hex() for w in words]
env = {k.hex(): v.hex() for k, v in os.environb.items()}
seen = {"argv": argv, "env": env, "host": os.uname().nodename}
Path(folder, "seen-" + os.environ["RANK"] + ".json").write_text(json.dumps(seen))
Heartbeat(Path(os.environ["TRAINKIT_HEARTBEAT_FILE"]), int(os.environ["RANK"])).beat("done", 1)
"""


def seen_over(head: ClusterProject, launcher: str) -> list[dict[str, Any]]:
    """What every rank saw."""
    words = [
        *HOSTILE.values(),
        "${HOME}",
        "${node:HOME}",
        "--fmt=%h-%u-%n",
        "-x",
        "\udcff\udc80 no UTF-8",
    ]
    nodes = 1 if launcher == "local" else 2
    typed = [
        "train",
        "random",
        "--foreground",
        "--set",
        f"nodes={nodes}",
        "--set",
        f"cluster.launcher={'ssh' if launcher == 'debug' else launcher}",
    ]
    argv = [
        sys.executable,
        str(head.path / "typed.py"),
        str(head.path),
        json.dumps(words),
        launcher,
        *typed,
    ]
    head.cluster.on(HEAD, "env", f"SECRET_OF_MINE={SECRET}", *argv, cwd=head.path)
    found = [json.loads((head.path / f"seen-{rank}.json").read_text()) for rank in range(2 * nodes)]
    for rank in range(2 * nodes):
        (head.path / f"seen-{rank}.json").unlink()
    for one in found:
        assert [bytes.fromhex(word) for word in one["argv"]] == [
            os.fsencode(word) for word in words
        ], launcher
        environment = {bytes.fromhex(k).decode(): bytes.fromhex(v) for k, v in one["env"].items()}
        assert {name: environment[name] for name in HOSTILE} == {
            name: value.encode() for name, value in HOSTILE.items()
        }, launcher
        assert environment["SECRET_OF_MINE"] == SECRET.encode()
        one["names"] = set(environment)
    return found


def test_every_launcher_brings_the_same_bytes_to_every_rank(
    head: ClusterProject, cluster: Cluster
) -> None:
    (head.path / "typed.py").write_text(TYPED)
    (head.path / "shows.py").write_text(SHOWS)
    jobs = head.path / "jobs.toml"
    table = "".join(
        f"{name} = {json.dumps(value, ensure_ascii=False)}\n" for name, value in HOSTILE.items()
    )
    text = jobs.read_text().replace(
        "[clusters.pair]", '[clusters.pair]\nranks_per_node = 2\nsecrets = ["SECRET_OF_MINE"]'
    )
    jobs.write_text(text + f"[jobs.random.env]\n{table}")
    seen = {launcher: seen_over(head, launcher) for launcher in ("local", "debug", "ssh", "pdsh")}
    assert (
        {one["host"] for one in seen["ssh"]}
        == {one["host"] for one in seen["pdsh"]}
        == {"node1", "node2"}
    )
    assert {one["host"] for one in seen["local"]} == {"head"}
    assert [one["names"] for one in seen["ssh"]] == [one["names"] for one in seen["pdsh"]]
    written = [
        path
        for path in head.path.rglob("*")
        if path.is_file() and SECRET.encode()[:12] in path.read_bytes()
    ]
    assert not written, "the value of a secret was written down"
    assert all(
        Path(path).stat().st_mode & 0o077 == 0 for path in head.path.rglob("launch/attempt-*/token")
    )
