"""Fixtures of tests that fetch weights."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import ThreadingHTTPServer

import pytest
import torch
from safetensors.torch import save_file

from tests.train.huggingface.hub_server import (
    MODEL,
    Hub,
    handler,
)
from trainkit.train.huggingface.config import to_hf_config
from trainkit.train.huggingface.names import published, table


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
