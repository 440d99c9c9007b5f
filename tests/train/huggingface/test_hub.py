"""hf:NAME is fetched from a hub: here a server of this machine with the hub's paths."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest
import torch
from safetensors.torch import save_file

from tests.conftest import Project
from tests.distributed import ROOT, free_port
from trainkit.base.errors import ConfigError, TrainkitError
from trainkit.jobs.schema import Cluster, Dataset, Job, Model, Training
from trainkit.runs.checkpoints import folder_of, open_checkpoint
from trainkit.stages import weights as stage
from trainkit.stages.contract import Need
from trainkit.stages.execute import make_fresh, stamps_folder
from trainkit.stages.local import execute_here
from trainkit.stages.stamps import judge
from trainkit.stages.weights import Weights
from trainkit.train.checkpoint.save_load import load as load_checkpoint
from trainkit.train.huggingface import check_weights, weights_folder
from trainkit.train.huggingface.config import to_hf_config
from trainkit.train.huggingface.hub import Published, parse
from trainkit.train.huggingface.names import published, table

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


def handler(hub: Hub) -> type[BaseHTTPRequestHandler]:
    """The hub's API and its files: /api/models/NAME/revision/REVISION and
    /NAME/resolve/COMMIT/FILE."""

    class Handler(BaseHTTPRequestHandler):
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
            hub.asked.append(
                (self.command, path, self.headers.get("Range"), self.headers.get("Authorization"))
            )
            name, _, rest = (
                path.removeprefix("/api/models/")
                .removeprefix("/")
                .partition("/revision/" if path.startswith("/api") else "/resolve/")
            )
            if name in hub.gated and self.headers.get("Authorization") != f"Bearer {SECRET}":
                self.answer(401, b"{}", X_Error_Code="GatedRepo")
            elif not any(key.startswith(f"{name}@") for key in hub.revisions):
                self.answer(401, b"{}", X_Error_Code="RepoNotFound")
            elif path.startswith("/api"):
                self.about(name, rest)
            else:
                self.file(name, *rest.split("/", 1))

        def about(self, name: str, revision: str) -> None:
            commit = hub.revisions.get(f"{name}@{revision}")
            if commit is None:
                self.answer(404, b"{}", X_Error_Code="RevisionNotFound")
                return
            siblings: list[dict[str, Any]] = []
            for file, content in hub.files[f"{name}@{commit}"].items():
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
            content = hub.files.get(f"{name}@{commit}", {}).get(file)
            if content is None:
                self.answer(404, b"", X_Error_Code="EntryNotFound")
                return
            start = int(
                (self.headers.get("Range") or "bytes=0-").removeprefix("bytes=").partition("-")[0]
            )
            part = content[start:]
            if self.command == "GET" and file in hub.cut:
                self.send_response(200)
                self.send_header("Content-Length", str(len(part)))
                self.end_headers()
                self.wfile.write(part[: hub.cut.pop(file)])
                self.close_connection = True
                return
            about = {
                "ETag": f'"{hashlib.sha1(content).hexdigest()}"',
                "X_Repo_Commit": commit,
                "Accept_Ranges": "bytes",
            }
            span = (
                {"Content_Range": f"bytes {start}-{len(content) - 1}/{len(content)}"}
                if start
                else {}
            )
            self.answer(206 if start else 200, part, **about, **span)

    return Handler


@pytest.fixture
def hub() -> Iterator[Hub]:
    hub = Hub("")
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler(hub))
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(
        target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True
    )
    thread.start()
    yield hub
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture(scope="module")
def model_files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """A model as the hub has it: two shards and their index, a tokenizer, a pickle, and what
    nobody asked for."""
    folder = tmp_path_factory.mktemp("published")
    tensors = published(table(MODEL, 53))
    weight_map: dict[str, str] = {}
    for i, part in enumerate((list(tensors)[:9], list(tensors)[9:]), start=1):
        file = f"model-0000{i}-of-00002.safetensors"
        save_file(
            {name: torch.full(tensors[name].shape, float(i)) for name in part},
            folder / file,
            {"format": "pt"},
        )
        weight_map |= dict.fromkeys(part, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (folder / "config.json").write_text(json.dumps(to_hf_config(MODEL, 53, "fp32", None)))
    for name in (
        "tokenizer.json",
        "tokenizer_config.json",
        "pytorch_model.bin",
        "README.md",
        "flax_model.msgpack",
    ):
        (folder / name).write_bytes(name.encode())
    return {path.name: path.read_bytes() for path in folder.iterdir()} | {
        "onnx/model.safetensors": b"never"
    }


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
    (need,) = Weights().needs(asked, stamps_folder(Path(str(asked.cluster.root)), "weights"))
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


def test_the_stage_fetches_once_and_keeps_the_commit(
    hub: Hub, model_files: dict[str, bytes], tmp_path: Path
) -> None:
    """A real unit process; then the branch moves on the hub, and nothing changes here until
    --force."""
    hub.put("org/tiny", model_files)
    asked = job(tmp_path, "hf:org/tiny", hub)
    stamps, reporter = stamps_folder(tmp_path, "weights"), Silent()
    with pytest.raises(ConfigError, match="was not fetched") as error:
        weights_folder(asked)
    assert "prep-data --job tiny" in error.value.list[0].hint
    verdict = make_fresh(need_of(asked), tmp_path, execute_here, reporter)
    assert not verdict.fresh and verdict.because == "it was never fetched"
    folder = weights_folder(asked)
    assert folder == tmp_path / "hub/org--tiny" / FIRST
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == {
        name: model_files[name] for name in WANTED
    }
    assert check_weights(folder, MODEL, 53) == [] and reporter.fractions[-1] == 1.0
    hub.put("org/tiny", model_files | {"tokenizer.json": b"newer"}, SECOND)
    asked_before = len(hub.asked)
    verdict = make_fresh(need_of(asked), tmp_path, execute_here, reporter)
    assert (
        verdict.fresh
        and "main was 111111111111" in verdict.because
        and len(hub.asked) == asked_before
    )
    assert weights_folder(asked) == folder
    make_fresh(need_of(asked), tmp_path, execute_here, reporter, force=True)
    assert weights_folder(asked).name == SECOND and folder.is_dir()
    assert judge(need_of(asked), stamps).fresh


def test_what_is_lost_is_fetched_again_and_only_that(
    hub: Hub, model_files: dict[str, bytes], tmp_path: Path
) -> None:
    hub.put("tiny", model_files)
    asked = job(tmp_path, "hf:tiny", hub)
    make_fresh(need_of(asked), tmp_path, execute_here, Silent())
    folder = weights_folder(asked)
    for damage in ("gone", "cut"):
        lost = folder / "model-00002-of-00002.safetensors"
        lost.unlink() if damage == "gone" else lost.write_bytes(b"half")
        hub.asked.clear()
        verdict = make_fresh(need_of(asked), tmp_path, execute_here, Silent())
        assert not verdict.fresh and f"{lost} is missing or cut off" in verdict.because
        assert hub.downloads() == [lost.name] and lost.read_bytes() == model_files[lost.name]
    moved = asked.model_copy(
        update={"cluster": asked.cluster.model_copy(update={"hub_endpoint": hub.url + "/"})}
    )
    verdict = judge(need_of(moved), stamps_folder(tmp_path, "weights"))
    assert not verdict.fresh and "hub_endpoint changed from" in verdict.because
    shutil.rmtree(folder)
    assert "missing" in make_fresh(need_of(asked), tmp_path, execute_here, Silent()).because
    assert {p.name for p in weights_folder(asked).iterdir()} == WANTED


def test_a_cut_connection_is_taken_up_where_it_broke(
    hub: Hub, model_files: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the last whole block of the library's, which are of 10 MB otherwise."""
    monkeypatch.setattr("huggingface_hub.constants.DOWNLOAD_CHUNK_SIZE", 250)
    hub.put("tiny", model_files)
    hub.cut["model-00001-of-00002.safetensors"] = 1000
    asked = job(tmp_path, "hf:tiny", hub)
    fetch(asked)
    ranges = [
        r
        for method, path, r, _ in hub.asked
        if method == "GET" and path.endswith("model-00001-of-00002.safetensors")
    ]
    assert ranges == [None, "bytes=1000-"]
    assert check_weights(weights_folder(asked), MODEL, 53) == []


def test_an_interrupted_fetch_goes_on_shard_by_shard(
    hub: Hub, model_files: dict[str, bytes], tmp_path: Path
) -> None:
    lacking = {
        name: content
        for name, content in model_files.items()
        if name != "model-00002-of-00002.safetensors"
    }
    hub.put("tiny", model_files)
    asked = job(tmp_path, "hf:tiny", hub)
    spec = dict(need_of(asked).units[0].spec)
    fetching = stage._Fetch(spec, stage._Hub(spec, None), lambda done, total: None)
    original = fetching.hub.get

    def breaks(file: str, commit: str, folder: Path) -> None:
        if file == "model-00002-of-00002.safetensors":
            raise KeyboardInterrupt
        original(file, commit, folder)

    fetching.hub.get = breaks  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        fetching.run()
    part = tmp_path / "hub/tiny" / f"{FIRST}.part"
    (part / ".cache/huggingface").mkdir(parents=True, exist_ok=True)
    (part / ".cache/huggingface/half.incomplete").write_bytes(b"x" * 100)
    with pytest.raises(ConfigError, match="was not fetched"):
        weights_folder(asked)
    hub.asked.clear()
    fetch(asked)
    assert hub.downloads() == ["model-00002-of-00002.safetensors"] and lacking
    assert {p.name for p in weights_folder(asked).iterdir()} == WANTED and not part.exists()


def test_a_file_that_is_not_what_the_hub_says(
    hub: Hub, model_files: dict[str, bytes], tmp_path: Path
) -> None:
    hub.put("tiny", model_files)
    asked = job(tmp_path, "hf:tiny", hub)
    spec = dict(need_of(asked).units[0].spec)
    api = stage._Hub(spec, None)
    original = api.get

    def spoils(file: str, commit: str, folder: Path) -> None:
        original(file, commit, folder)
        if file == "model-00001-of-00002.safetensors":
            content = bytearray((folder / file).read_bytes())
            content[-1] ^= 1
            (folder / file).write_bytes(content)

    api.get = spoils  # type: ignore[method-assign]
    with pytest.raises(
        TrainkitError, match=r"model-00001-of-00002.safetensors of hf:tiny is not what the hub says"
    ) as error:
        stage._Fetch(spec, api, lambda done, total: None).run()
    assert error.value.exit == 6 and not (tmp_path / "hub/tiny" / FIRST).exists()
    fetch(asked)  # the spoiled one is gone, so it comes again
    assert check_weights(weights_folder(asked), MODEL, 53) == []


def test_a_revision_with_a_slash_and_a_commit(
    hub: Hub, model_files: dict[str, bytes], tmp_path: Path
) -> None:
    hub.put("org/tiny", model_files, SECOND, "refs/pr/1")
    for revision in ("refs/pr/1", SECOND):
        asked = job(tmp_path, f"hf:org/tiny@{revision}", hub)
        assert fetch(asked) == {"commit": SECOND} and weights_folder(asked).name == SECOND
    assert len(hub.downloads()) == len(WANTED)  # the second time all is there


def refusal(asked: Job) -> TrainkitError:
    with pytest.raises(TrainkitError) as error:
        fetch(asked)
    return error.value


class TestRefused:
    """What cannot be had, and what would not fit: exit 6 and 3, said clearly, before the first
    weight is fetched."""

    def test_no_such_model_revision_or_hub(
        self, hub: Hub, model_files: dict[str, bytes], tmp_path: Path
    ) -> None:
        hub.put("tiny", model_files)
        error = refusal(job(tmp_path, "hf:tny", hub))
        assert (
            error.exit == 6
            and f"hf:tny@main at {hub.url}: the hub knows no such model" in error.message
            and "spelling" in error.hint
        )
        error = refusal(job(tmp_path, "hf:tiny@v9", hub))
        assert (
            error.exit == 6
            and "hf:tiny@v9" in error.message
            and "no such revision" in error.message
        )
        closed = Hub(f"http://127.0.0.1:{free_port()}")
        error = refusal(job(tmp_path, "hf:tiny", closed))
        assert (
            error.exit == 6
            and "cannot be fetched" in error.message
            and closed.url in error.message
            and "init_from = PATH" in error.hint
        )
        assert not (tmp_path / "hub").exists() or not any((tmp_path / "hub").rglob("*.json"))

    def test_gated(
        self,
        hub: Hub,
        model_files: dict[str, bytes],
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        """The token travels in the environment alone, and only if the cluster names it."""
        hub.put("org/tiny", model_files)
        hub.gated.add("org/tiny")
        monkeypatch.setenv("HF_TOKEN", SECRET)
        error = refusal(job(tmp_path, "hf:org/tiny", hub))
        assert (
            error.exit == 6
            and "is gated" in error.message
            and "HF_TOKEN" in error.hint
            and "clusters.X.secrets" in error.hint
        )
        assert {authorization for *_, authorization in hub.asked} == {None}
        asked = job(tmp_path, "hf:org/tiny", hub, secrets=("HF_TOKEN?",))
        make_fresh(need_of(asked), tmp_path, execute_here, Silent())
        assert weights_folder(asked).is_dir()
        assert all(
            SECRET.encode() not in path.read_bytes()
            for path in tmp_path.rglob("*")
            if path.is_file()
        )

    def test_the_callers_own_hub_variable_is_not_asked(self) -> None:
        """It is read when the library is imported, so another process is asked."""
        code = (
            "from trainkit.stages.weights import _Hub; print(_Hub({'endpoint': None, 'name': 'x',"
            " 'revision': 'main'}, None).api.endpoint)"
        )
        environment = {**os.environ, "HF_ENDPOINT": "http://127.0.0.1:9"}
        done = subprocess.run(
            [sys.executable, "-c", code],
            env=environment,
            capture_output=True,
            text=True,
            check=True,
            cwd=ROOT,
        )
        assert done.stdout.startswith("https://") and "127.0.0.1" not in done.stdout

    def test_pickles_only(self, hub: Hub, model_files: dict[str, bytes], tmp_path: Path) -> None:
        hub.put(
            "tiny",
            {name: content for name, content in model_files.items() if "safetensors" not in name},
        )
        error = refusal(job(tmp_path, "hf:tiny", hub))
        assert (
            error.exit == 6
            and "pickles only (pytorch_model.bin)" in error.message
            and "save_pretrained" in error.hint
        )
        assert "pytorch_model.bin" not in hub.downloads()

    def test_another_model_is_refused_before_its_weights_come(
        self, hub: Hub, model_files: dict[str, bytes], tmp_path: Path
    ) -> None:
        hub.put("tiny", model_files)
        other = MODEL.model_copy(update={"num_layers": 3, "vocab_size": 50})
        error = refusal(job(tmp_path, "hf:tiny", hub, model=other))
        assert (
            error.exit == 3
            and "n_layer is 2 there, 3 for this job" in str(error)
            and "vocab_size is 53 there, 50 for this job" in str(error)
        )
        assert hub.downloads() == ["config.json"]
        fetch(job(tmp_path, "hf:tiny", hub))
        # it is here now: refused without asking the hub
        with pytest.raises(ConfigError, match="n_layer is 2 there"):
            need_of(job(tmp_path, "hf:tiny", hub, model=other))

    def test_an_index_that_names_what_is_not_there(
        self, hub: Hub, model_files: dict[str, bytes], tmp_path: Path
    ) -> None:
        for file, words in (
            ("gone.safetensors", "names files that are not there: gone.safetensors"),
            ("../../x.safetensors", "does not map"),
        ):
            index = json.dumps({"weight_map": {"x": file}}).encode()
            hub.put(
                "tiny",
                model_files | {"model.safetensors.index.json": index},
                commit=hashlib.sha1(index).hexdigest(),
            )
            error = refusal(job(tmp_path, "hf:tiny", hub))
            assert error.exit == 6 and words in error.message

    @pytest.mark.parametrize(
        "name",
        [
            "hf:",
            "hf:a/b/c",
            "hf:../x",
            "hf:a/..",
            "hf:a--b",
            "hf:a b",
            "hf:-a",
            "hf:a@",
            "hf:a@../x",
            "hf:/etc",
            "hf:a@-x",
        ],
    )
    def test_names_that_no_hub_has(self, name: str, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match="names no model of a hub"):
            need_of(job(tmp_path, name))

    def test_a_record_that_lies(self, tmp_path: Path) -> None:
        asked = job(tmp_path, "hf:tiny")
        path = Published("tiny").record(tmp_path)
        path.parent.mkdir(parents=True)
        for record in (
            {"schema": "weights/1", "commit": "../../etc", "files": {}},
            {"schema": "weights/2"},
            {"schema": "weights/1", "commit": "1" * 40},
        ):
            path.write_text(json.dumps(record))
            with pytest.raises(ConfigError):
                weights_folder(asked)
            assert not judge(need_of(asked), stamps_folder(tmp_path, "weights")).fresh


def test_a_folder_is_looked_at_and_needs_nothing(
    hub: Hub, model_files: dict[str, bytes], tmp_path: Path
) -> None:
    hub.put("tiny", model_files)
    fetch(job(tmp_path, "hf:tiny", hub))
    folder = weights_folder(job(tmp_path, "hf:tiny", hub))
    asked = job(tmp_path / "elsewhere", str(folder))
    assert Weights().needs(asked, tmp_path) == [] and weights_folder(asked) == folder
    with pytest.raises(ConfigError, match="n_layer is 2 there, 4 for this job") as error:
        Weights().needs(
            job(tmp_path, str(folder), model=MODEL.model_copy(update={"num_layers": 4})), tmp_path
        )
    assert error.value.exit == 3
    with pytest.raises(ConfigError, match="no such folder"):
        Weights().needs(job(tmp_path, str(tmp_path / "nowhere")), tmp_path)
    assert (
        Weights().needs(job(tmp_path, "x").model_copy(update={"init_from": None}), tmp_path) == []
    )


def test_training_begins_with_what_the_hub_has(
    hub: Hub, model_files: dict[str, bytes], project: Project
) -> None:
    """The task itself: fetched before any rank starts, read by two ranks; one step at rate 0
    later the checkpoint holds the hub's weights."""
    hub.put("org/tiny", model_files)
    path = project.path / "jobs.toml"
    path.write_text(
        path.read_text().replace("[clusters.here]", f'[clusters.here]\nhub_endpoint = "{hub.url}"')
        + """
[models.published]
num_layers = 2
hidden_size = 24
num_attention_heads = 3
seq_length = 16
vocab_size = 53
[jobs.on]
extends = "random"
model = "published"
init_from = "hf:org/tiny"
training = { train_iters = 1, lr = 0.0, eval_iters = 0 }
"""
    )
    refused = project.document("train", "on", "--no-stages", exit=5)
    assert (
        "weights org--tiny--main: stale because it was never fetched"
        in refused["problems"][0]["message"]
    )
    assert project.document("train", "on")["state"] == "succeeded"
    (run,) = project.runs()
    saved = open_checkpoint(folder_of(run / "checkpoints", 1))
    tensors = {
        name: torch.zeros(entry.shape)
        for name, entry in saved.manifest.tensors.items()
        if name.startswith("model.")
    }
    load_checkpoint(saved, tensors)
    second = json.loads(model_files["model.safetensors.index.json"])["weight_map"]
    for name, entry in table(MODEL, 53).items():
        value = 2.0 if second[entry.pieces[0].source].startswith("model-00002") else 1.0
        assert torch.equal(tensors[f"model.{name}"], torch.full(entry.shape, value))


def test_names() -> None:
    assert parse("hf:gpt2") == Published("gpt2", "main")
    assert parse("hf:org/gpt-neox.20b@v1.0") == Published("org/gpt-neox.20b", "v1.0")
    assert parse("/some/folder") == Path("/some/folder")
    assert Published("org/x", "refs/pr/1").record(Path("/r")) == Path(
        "/r/hub/org--x/refs%2Fpr%2F1.json"
    )


def test_relative_folders_are_the_projects(tmp_path: Path) -> None:
    from trainkit.jobs.load import load

    text = """
[models.m]
num_layers = 1
hidden_size = 8
num_attention_heads = 1
seq_length = 8
vocab_size = 9
[clusters.here]
hub_endpoint = "https://hub.example"
[jobs.a]
cluster = "here"
model = "m"
dataset = "mock"
init_from = "published/m"
training = { train_iters = 1, lr = 1.0 }
[jobs.b]
extends = "a"
init_from = "hf:org/m@main"
"""
    (tmp_path / "jobs.toml").write_text(text)
    jobs = load(tmp_path)
    assert jobs.resolve("a").job.init_from == str(tmp_path / "published/m")
    assert (
        jobs.resolve("b").job.init_from == "hf:org/m@main"
        and jobs.resolve("b").job.cluster.hub_endpoint == "https://hub.example"
    )
    (tmp_path / "jobs.toml").write_text(
        text.replace("https://hub.example", "https://user:password@hub.example")
    )
    # a password would be written into records
    with pytest.raises(ConfigError, match="hub_endpoint"):
        load(tmp_path).resolve("b")
