"""What of a hub is refused: models that do not fit, are not there, are gated or damaged."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.distributed import ROOT, free_port
from tests.train.huggingface.hub_server import (
    MODEL,
    SECRET,
    Hub,
    Silent,
    fetch,
    job,
    need_of,
)
from trainkit.base.errors import ConfigError, TrainkitError
from trainkit.jobs.schema import Job
from trainkit.stages.execute import stamps_folder, update_stage
from trainkit.stages.stamps import check_freshness
from trainkit.stages.unit_process import execute_locally
from trainkit.train.huggingface import weights_folder
from trainkit.train.huggingface.hub import HubModel


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
        update_stage(need_of(asked), tmp_path, execute_locally, Silent())
        assert weights_folder(asked).is_dir()
        assert all(
            SECRET.encode() not in path.read_bytes()
            for path in tmp_path.rglob("*")
            if path.is_file()
        )

    def test_the_callers_own_hub_variable_is_not_asked(self) -> None:
        """It is read when the library is imported, so another process is asked."""
        code = (
            "from types import SimpleNamespace; from trainkit.stages.weights import _Hub;"
            " spec = SimpleNamespace(endpoint=None, name='x', revision='main');"
            " print(_Hub(spec, None).api.endpoint)"
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
        path = HubModel("tiny").record(tmp_path)
        path.parent.mkdir(parents=True)
        for record in (
            {"schema": "weights/1", "commit": "../../etc", "files": {}},
            {"schema": "weights/2"},
            {"schema": "weights/1", "commit": "1" * 40},
        ):
            path.write_text(json.dumps(record))
            with pytest.raises(ConfigError):
                weights_folder(asked)
            assert not check_freshness(need_of(asked), stamps_folder(tmp_path, "weights")).fresh
