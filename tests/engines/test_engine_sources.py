"""Where engines' trees lie, what version they are, and which Python runs them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.engines.real import RealEngine, parameters
from trainkit.base.errors import ConfigError
from trainkit.engines.registry import foreign_engine
from trainkit.engines.sources import (
    cluster_python,
    engine_python,
    folder_part,
    in_image,
    is_url,
    source_tree,
)
from trainkit.jobs.containers import Container
from trainkit.jobs.schema import Cluster, Dataset, EngineSource, Job, Model, Training

URL = "https://example.org/team/tree"


def job_of(root: Path, source: dict[str, Any] | None, **job: Any) -> Job:
    """A job of megatron-lm below `root`."""
    model = Model(
        name="m", num_layers=2, hidden_size=8, num_attention_heads=2, seq_length=8, vocab_size=9
    )
    engine = EngineSource(name="megatron-lm", **source) if source else None
    values: dict[str, Any] = {"cluster": Cluster(name="c", root=str(root)), **job}
    return Job(
        name="j",
        engine="megatron-lm",
        engine_source=engine,
        model=model,
        dataset=Dataset(name="mock", source="mock"),
        training=Training(train_iters=1, lr=1.0),
        **values,
    )


@pytest.mark.parametrize(
    "source",
    [URL, "ssh://git@example.org:22/tree", "git@example.org:team/tree", "file:///a", "host:tree"],
)
def test_what_git_clones_is_a_url(source: str) -> None:
    assert is_url(source)


@pytest.mark.parametrize(
    "source", ["/a/tree", "/a:b/tree", "./a:b", "ext::sh -c id", "--upload-pack=x:y", "-x:y"]
)
def test_what_is_no_url_is_a_folder_and_never_a_transport(source: str) -> None:
    assert not is_url(source)


def test_a_folder_is_the_tree_and_a_url_has_one_below_the_root(tmp_path: Path) -> None:
    assert source_tree(job_of(tmp_path, {"source": "/a/b"})) == Path("/a/b")
    asked = job_of(tmp_path, {"source": URL, "revision": "core_v0.12.0"})
    assert source_tree(asked) == tmp_path / "engines" / "megatron-lm-core_v0.12.0"
    asked = job_of(tmp_path, {"source": URL})
    assert source_tree(asked) == tmp_path / "engines" / "megatron-lm-HEAD"


def test_hostile_revisions_are_safe_names_that_stay_apart() -> None:
    hostile = ["../../etc", "a/b", "a b", "a-b", "--upload-pack=x", "'; id", "..", ".", "é", "\n"]
    names = [folder_part(revision) for revision in hostile]
    assert len(set(names)) == len(names)
    for name in names:
        assert name.isascii() and "/" not in name and name[0] not in "-." and name.isprintable()
    assert len(folder_part("x" * 4000)) < 100


def test_a_job_without_a_source_is_told_which_table_to_add(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no \[engines.X\] table") as raised:
        source_tree(job_of(tmp_path, None))
    assert "[engines.megatron-lm]" in str(raised.value)


@pytest.mark.parametrize(
    "url", ["https://me:hunter22@example.org/t", "https://tok3n@example.org/t", "ssh://a:b@c/t"]
)
def test_a_password_in_a_url_is_refused_and_never_said(tmp_path: Path, url: str) -> None:
    with pytest.raises(ConfigError, match=r"://\*\*\*@") as raised:
        source_tree(job_of(tmp_path, {"source": url}))
    for secret in ("hunter22", "tok3n", "a:b"):
        assert secret not in str(raised.value)


def tree_of(folder: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


def test_megatrons_version_is_read_without_executing_anything(tmp_path: Path) -> None:
    told = "import os\nos.abort()\nMAJOR = 0\nMINOR = 16\nPATCH = 1\nPRE_RELEASE = 'rc3'\n"
    core = tree_of(
        tmp_path / "core", {"pretrain_gpt.py": "", "megatron/core/package_info.py": told}
    )
    assert foreign_engine("megatron-lm").version_of_tree(core) == "core-0.16.1"
    old = tree_of(tmp_path / "old", {"pretrain_gpt.py": "", "megatron/__init__.py": ""})
    assert foreign_engine("megatron-lm").version_of_tree(old) == "2021"


@pytest.mark.parametrize("text", ["MAJOR = 0\n", "MAJOR = (", "MAJOR=MINOR=PATCH=f()\n", "\0"])
def test_a_version_that_cannot_be_read_is_an_error_with_a_way_out(
    tmp_path: Path, text: str
) -> None:
    tree_of(tmp_path, {"pretrain_gpt.py": "", "megatron/core/package_info.py": text})
    with pytest.raises(ConfigError, match=r"set engines\.X\.version"):
        foreign_engine("megatron-lm").version_of_tree(tmp_path)


def test_neox_says_its_version_in_its_citation_or_by_the_deepspeed_it_requires(
    tmp_path: Path,
) -> None:
    base = {"train.py": "", "deepy.py": "", "CITATION.cff": 'version: "0.0.1"\n'}
    old = "git+https://github.com/EleutherAI/DeeperSpeed.git@eb7f5cff36678625d23d#egg=deepspeed\n"
    requirements = "requirements/requirements.txt"
    first = tree_of(tmp_path / "1", {**base, requirements: old})
    second = tree_of(tmp_path / "2", {**base, requirements: "deepspeed\n"})
    named = tree_of(tmp_path / "3", {**base, "CITATION.cff": 'a: b\nversion: "2.0.0"\n'})
    assert foreign_engine("gpt-neox").version_of_tree(first) == "1.0.0"
    assert foreign_engine("gpt-neox").version_of_tree(second) == "2.0.0"
    assert foreign_engine("gpt-neox").version_of_tree(named) == "2.0.0"
    with pytest.raises(ConfigError, match="which version of gpt-neox"):
        foreign_engine("gpt-neox").version_of_tree(tree_of(tmp_path / "4", base))


def test_another_tree_or_none_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is not at"):
        foreign_engine("gpt-neox").version_of_tree(tmp_path / "none")
    with pytest.raises(ConfigError, match=r"not a tree of gpt-neox: it has no train\.py"):
        foreign_engine("gpt-neox").version_of_tree(tmp_path)


def test_which_python_runs_the_engine(tmp_path: Path) -> None:
    image = Container(name="i", image="name", runtime="docker", python="/opt/py")
    folder = {"source": "/a"}
    assert engine_python(job_of(tmp_path, folder)) == Path(sys.executable)
    nodes = Cluster(name="c", launcher="ssh", python="/nodes/python", root=str(tmp_path))
    assert engine_python(job_of(tmp_path, folder, cluster=nodes)) == Path("/nodes/python")
    assert cluster_python(job_of(tmp_path, folder, cluster=nodes)) == Path("/nodes/python")
    assert engine_python(job_of(tmp_path, folder, container=image)) == "/opt/py"
    assert engine_python(job_of(tmp_path, {**folder, "python": "python3.9"})) == "python3.9"
    given = job_of(tmp_path, {**folder, "python": "/in/image"}, container=image)
    assert engine_python(given) == "/in/image"
    venv = job_of(tmp_path, {**folder, "venv": "v e"})
    assert engine_python(venv) == tmp_path / "v e" / "bin" / "python"
    with pytest.raises(ConfigError, match="remove venv"):
        engine_python(job_of(tmp_path, {**folder, "venv": "v"}, container=image))


def test_a_folder_that_only_the_image_holds_is_known_as_such(tmp_path: Path) -> None:
    image = Container(name="i", image="name", runtime="docker")
    assert in_image(job_of(tmp_path, {"source": "/opt/nowhere/here"}, container=image))
    assert not in_image(job_of(tmp_path, {"source": str(tmp_path)}, container=image))
    assert not in_image(job_of(tmp_path, {"source": URL}, container=image))
    assert not in_image(job_of(tmp_path, {"source": "/opt/nowhere/here"}))


@pytest.mark.parametrize("real", [*parameters("megatron-lm"), *parameters("gpt-neox")])
def test_real_trees_say_their_version(real: RealEngine) -> None:
    tree = real.tree
    engine = real.engine
    found = foreign_engine(engine).version_of_tree(tree)
    if engine == "megatron-lm" and found != "2021":
        code = (
            "import runpy, sys; print(runpy.run_path(sys.argv[1])['__shortversion__'])"  # the tree
        )
        path = tree / "megatron" / "core" / "package_info.py"
        told = subprocess.run(
            [sys.executable, "-c", code, str(path)], capture_output=True, text=True, check=True
        )
        assert found == f"core-{told.stdout.strip()}"
    else:
        assert found in ("2021", "1.0.0", "2.0.0")
