"""A hub of Hugging Face's paths on this machine, and jobs that begin with what it has."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from trainkit.jobs.schema import Cluster, Dataset, Job, Model, Training
from trainkit.stages import weights as stage
from trainkit.stages.contract import Need
from trainkit.stages.execute import stamps_folder
from trainkit.stages.weights import WeightsStage

MODEL = Model(
    name="tiny", num_layers=2, hidden_size=24, num_attention_heads=3, seq_length=16, vocab_size=53
)


SECRET = "hf_0123456789abcdef"


FIRST, SECOND = "1" * 40, "2" * 40


@dataclass
class Hub:
    """Models by name and revision, and what was asked of it."""

    url: str
    files: dict[str, dict[str, bytes]] = field(default_factory=dict)  # by "NAME@COMMIT"
    revisions: dict[str, str] = field(default_factory=dict)  # "NAME@REVISION": commit
    gated: set[str] = field(default_factory=set)
    # bytes of a file after which the connection breaks, once
    cut: dict[str, int] = field(default_factory=dict)
    # method, path, range, authorization
    asked: list[tuple[str, str, str | None, str | None]] = field(default_factory=list)

    def put(
        self, name: str, files: dict[str, bytes], commit: str = FIRST, revision: str = "main"
    ) -> None:
        self.files[f"{name}@{commit}"] = files
        self.revisions |= {f"{name}@{revision}": commit, f"{name}@{commit}": commit}

    def downloads(self) -> list[str]:
        """Files that were sent, in order."""
        return [
            path.rpartition("/")[2]
            for method, path, *_ in self.asked
            if method == "GET" and "/resolve/" in path
        ]


class HubHandler(BaseHTTPRequestHandler):
    """The hub's API and its files: /api/models/NAME/revision/REVISION and
    /NAME/resolve/COMMIT/FILE."""

    hub: Hub  # set by `handler`

    protocol_version = "HTTP/1.1"

    def log_message(self, *args: Any) -> None: ...

    def answer(self, code: int, body: bytes, **headers: str) -> None:
        self.send_response(code)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self.hub.asked.append(
            (self.command, path, self.headers.get("Range"), self.headers.get("Authorization"))
        )
        name, _, rest = (
            path.removeprefix("/api/models/")
            .removeprefix("/")
            .partition("/revision/" if path.startswith("/api") else "/resolve/")
        )
        if name in self.hub.gated and self.headers.get("Authorization") != f"Bearer {SECRET}":
            self.answer(401, b"{}", X_Error_Code="GatedRepo")
        elif not any(key.startswith(f"{name}@") for key in self.hub.revisions):
            self.answer(401, b"{}", X_Error_Code="RepoNotFound")
        elif path.startswith("/api"):
            self.about(name, rest)
        else:
            self.file(name, *rest.split("/", 1))

    def about(self, name: str, revision: str) -> None:
        commit = self.hub.revisions.get(f"{name}@{revision}")
        if commit is None:
            self.answer(404, b"{}", X_Error_Code="RevisionNotFound")
            return
        siblings: list[dict[str, Any]] = []
        for file, content in self.hub.files[f"{name}@{commit}"].items():
            large = (
                {
                    "lfs": {
                        "sha256": hashlib.sha256(content).hexdigest(),
                        "size": len(content),
                        "pointerSize": 1,
                    }
                }
                if "safetensors" in file
                else {}
            )
            siblings.append({"rfilename": file, "size": len(content), "blobId": "b", **large})
        self.answer(
            200,
            json.dumps({"id": name, "sha": commit, "siblings": siblings}).encode(),
            Content_Type="application/json",
        )

    def file(self, name: str, commit: str, file: str) -> None:
        content = self.hub.files.get(f"{name}@{commit}", {}).get(file)
        if content is None:
            self.answer(404, b"", X_Error_Code="EntryNotFound")
            return
        start = int(
            (self.headers.get("Range") or "bytes=0-").removeprefix("bytes=").partition("-")[0]
        )
        part = content[start:]
        if self.command == "GET" and file in self.hub.cut:
            self.send_response(200)
            self.send_header("Content-Length", str(len(part)))
            self.end_headers()
            self.wfile.write(part[: self.hub.cut.pop(file)])
            self.close_connection = True
            return
        about = {
            "ETag": f'"{hashlib.sha1(content).hexdigest()}"',
            "X_Repo_Commit": commit,
            "Accept_Ranges": "bytes",
        }
        span = (
            {"Content_Range": f"bytes {start}-{len(content) - 1}/{len(content)}"} if start else {}
        )
        self.answer(206 if start else 200, part, **about, **span)


def handler(hub: Hub) -> type[HubHandler]:
    """A handler that answers for this hub."""
    return type("Handler", (HubHandler,), {"hub": hub})


def job(
    root: Path,
    init_from: str,
    hub: Hub | None = None,
    secrets: tuple[str, ...] = (),
    model: Model = MODEL,
) -> Job:
    return Job(
        name="tiny",
        cluster=Cluster(
            name="here", root=str(root), hub_endpoint=hub.url if hub else None, secrets=secrets
        ),
        model=model,
        dataset=Dataset(name="mock", source="mock", split="90,10,0"),
        training=Training(train_iters=1, lr=1e-3),
        init_from=init_from,
    )


def need_of(asked: Job) -> Need:
    (need,) = WeightsStage().needs(asked, stamps_folder(Path(str(asked.cluster.root)), "weights"))
    return need


def fetch(asked: Job) -> dict[str, Any]:
    """The unit's work, in this process."""
    return stage.work(dict(need_of(asked).units[0].spec), lambda done, total: None)


class Silent:
    """A reporter that only remembers."""

    def __init__(self) -> None:
        self.fractions: list[float] = []

    def verdict(self, verdict: Any) -> None: ...
    def waiting(self, need: Need, holder: str) -> None: ...
    def started(self, need: Need, units: Any) -> None: ...
    def counted(self, unit: Any, counts: Any) -> None: ...
    def progress(self, unit: Any, fraction: float) -> None:
        self.fractions.append(fraction)

    def finished(self, need: Need) -> None: ...


WANTED = {
    "config.json",
    "model.safetensors.index.json",
    "model-00001-of-00002.safetensors",
    "model-00002-of-00002.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
}
