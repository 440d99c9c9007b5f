"""Configurations of hydra: what is read equals what OmegaConf makes of them, and what is no
configuration is one clear error."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import hydra
import pytest
from omegaconf import OmegaConf

from trainkit.base.errors import ConfigError
from trainkit.base.extras import MissingExtra
from trainkit.engines import hydra_config
from trainkit.engines.hydra_config import (
    LARGEST,
    Composed,
    Resolved,
    Unknown,
    compose,
    parse_yaml,
    read_config,
    words_of,
)


def leaves(text: str, *path: str) -> dict[str, object]:
    return Resolved(parse_yaml(text, "conf.yaml"), {"training": "gpt3/5b"}).leaves(*path)


def test_interpolations() -> None:
    """Kinds stay what they are; relative ones count from the table that holds them."""
    text = r"""
data_dir: ${root}/data
root: /fs
model:
  hidden: 4096
  ffn: ${multiply:4, ${.hidden}}
  same: ${.hidden}
  inner: {up: "${..hidden}", there: "${model.betas.1}"}
  half: ${divide_floor:${.hidden},3}
  more: ${divide_ceil:7,2}
  betas: [0.9, "${model.rate}"]
  rate: 1e-5
  said: \${root} of ${training}
  last: ${model[betas][0]}
training: ${hydra:runtime.choices.training}
files: [.5, "${data_dir}/a", "${data_dir}/b_${model.hidden}"]
nothing: null
"""
    found = leaves(text)
    assert found == {
        "data_dir": "/fs/data",
        "root": "/fs",
        "model.hidden": 4096,
        "model.ffn": 16384,
        "model.same": 4096,
        "model.inner.up": 4096,
        "model.inner.there": 1e-5,
        "model.half": 1365,
        "model.more": 4,
        "model.betas": [0.9, 1e-5],
        "model.rate": 1e-5,
        "model.said": "${root} of gpt3/5b",
        "model.last": 0.9,
        "training": "gpt3/5b",
        "files": [0.5, "/fs/data/a", "/fs/data/b_4096"],
        "nothing": None,
    }
    assert type(found["model.hidden"]) is type(found["model.same"]) is int


def test_a_table_may_be_merged_into_another() -> None:
    """As OmegaConf's reader has it: what stands in a table itself counts."""
    found = leaves("a: &a {b: 1, c: 2}\nd:\n  <<: *a\n  c: 3\n  day: 2024-01-31\n")
    assert found == {"a.b": 1, "a.c": 2, "d.b": 1, "d.c": 3, "d.day": "2024-01-31"}


def test_what_is_not_said_is_known_as_such() -> None:
    text = "a: ${b}/x\nb: ${c}\nc: ???\nd: ${nowhere.at_all}\ne: [1, '${oc.env:HOME}']\n"
    found = leaves(text)
    assert found["a"] == found["b"] == found["c"] == Unknown("c is ???, which is to be given", "c")
    missing = found["d"]
    assert isinstance(missing, Unknown) and missing.key == "nowhere.at_all"
    unread = found["e"]
    assert isinstance(unread, Unknown) and "oc.env" in unread.why


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a: ${b}\nb: ${c}\nc: ${a}\n", "in a circle: a -> b -> c -> a"),
        ("a: ${.a}\n", "in a circle"),
        ("a: [1, '${a}']\n", "in a circle"),
        ("a: ${b\nb: 1\n", "an interpolation has no end"),
        ("a: ${multiply:1}\n", "it is for two numbers"),
        ("a: ${multiply:x,2}\n", "it is for two numbers"),
        ("a: ${divide_ceil:1,0}\n", "division by zero"),
        ("a: ${divide_ceil:nan,1}\n", "NaN"),
        ("a: ${multiply:" + "1" * 5000 + ",2}\n", "4300 digits"),
        ("a0: " + "9" * 300 + "\n" + "".join(
            f"a{n}: ${{multiply:${{a{n - 1}}},${{a{n - 1}}}}}\n" for n in range(1, 20)
        ), "too large"),
        ("a: ${b c}\n", "none of OmegaConf's"),
        ("a: " + "${multiply:1," * 5000 + "1" + "}" * 5000, "too deep"),
        ("a: 1\nb: {c: 1, c: 2}\n", "has c twice"),
        ("a: [1\n", "is not YAML"),
        ("- a\n", "is not a table of names"),
        ("a: {1: 2}\n", "the key 1 is not a name"),
        ("null: 2\n", "the key None is not a name"),
        ("a: {0: 2}\n", "the key 0 is not a name"),
        ("a: !!python/object/apply:os.system ['true']\n", "is not YAML"),
        ("a: " + "[" * 60 + "]" * 60, "too deep"),
        ("a: " + "[" * 5000, "is not "),
        ("a0: &a0 [" + "1," * 9 + "1]\n" + "".join(
            f"a{n}: &a{n} [{','.join([f'*a{n - 1}'] * 10)}]\n" for n in range(1, 9)
        ), "more than 20,000 values"),
        ("a: xxxxxxxxxx\n" + "b0: ${a}\n" + "".join(
            f"b{n}: ${{b{n - 1}}}${{b{n - 1}}}${{b{n - 1}}}${{b{n - 1}}}\n" for n in range(1, 30)
        ), "more than 100,000 characters"),
        ("".join(f"a{n}: ${{a{n + 1}}}\n" for n in range(5000)) + "a5000: 1\n", "in a circle"),
    ],
)  # fmt: skip
def test_hostile_files(text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        leaves(text)


def test_without_the_libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "omegaconf.grammar_parser", None)
    assert leaves("a: {b: 1}\n") == {"a.b": 1}
    with pytest.raises(MissingExtra, match="omegaconf") as caught:
        leaves("a: ${b}\nb: 1\n")
    assert caught.value.extra == "hydra"


def conf(folder: Path) -> Path:
    """A folder of configurations: a file, its groups, and a file over another."""
    (folder / "training/gpt3").mkdir(parents=True)
    (folder / "cluster").mkdir()
    (folder / "config.yaml").write_text(
        "defaults:\n  - _self_\n  - cluster: bcm\n  - training: gpt3/5b\n  - evaluation: all\n"
        "  - override hydra/job_logging: stdout\npath: ???\ndata_dir: ${path}/data\n"
        "kind: ${hydra:runtime.choices.evaluation}\n"
    )
    (folder / "cluster/bcm.yaml").write_text("partition: null\n")
    (folder / "training/gpt3/5b.yaml").write_text(
        "run: {name: five}\nmodel: {size: 5, file: '${data_dir}/x', rate: 1e-4}\n"
    )
    (folder / "training/gpt3/other.yaml").write_text(
        "defaults:\n  - gpt3/5b\n  - optional overlap@model.overlap: h100\n  - _self_\n"
        "model: {size: 6}\n"
    )
    return folder


def composed(folder: Path, *words: str) -> Composed:
    return compose(folder, "config", ("cluster", "training"), words_of(words))


def test_a_folder(tmp_path: Path) -> None:
    """The defaults list, words over it, and a file over another."""
    folder = conf(tmp_path)
    found = composed(folder, "path=/fs")
    values = Resolved(found.root, found.choices)
    assert values.leaves("training") == {
        "run.name": "five",
        "model.size": 5,
        "model.file": "/fs/data/x",
        "model.rate": 1e-4,
    }
    assert found.choices == {"cluster": "bcm", "training": "gpt3/5b", "evaluation": "all"}
    assert values.leaves()["kind"] == "all"
    other = composed(folder, "training=gpt3/other", "training.model.rate=2e-4", "path=/fs")
    assert Resolved(other.root, other.choices).leaves("training", "model") == {
        "size": 6,
        "file": "/fs/data/x",
        "rate": 2e-4,
    }
    assert len(other.left) == 1 and "overlap: h100" in other.left[0]


@pytest.mark.parametrize(
    ("defaults", "size"),
    [
        ("[_self_, gpt3/5b@_here_]", 5),
        ("[gpt3/5b@_here_, _self_]", 6),
        ("[gpt3/5b@_here_]", 6),
        ("[gpt3/9b@_here_, _self_, gpt3/5b@_here_]", 5),
    ],
)
def test_what_comes_last_of_a_defaults_list_counts(
    tmp_path: Path, defaults: str, size: int
) -> None:
    """Hydra's own composition says the same."""
    folder = conf(tmp_path)
    (folder / "training/gpt3/9b.yaml").write_text("model: {size: 9}\n")
    (folder / "training/gpt3/own.yaml").write_text(f"defaults: {defaults}\nmodel: {{size: 6}}\n")
    main = (folder / "config.yaml").read_text().replace("gpt3/5b", "gpt3/own")
    main = main.replace("  - evaluation: all\n", "").replace("  - override", "  # ")
    (folder / "config.yaml").write_text(main)
    with hydra.initialize_config_dir(str(folder), version_base="1.3"):
        assert hydra.compose("config").training.model.size == size
    found = composed(folder, "path=/fs")
    assert Resolved(found.root, found.choices).leaves("training")["model.size"] == size


def test_folders_that_are_none(tmp_path: Path) -> None:
    folder = conf(tmp_path / "conf")
    training = folder / "training/gpt3"
    with pytest.raises(ConfigError, match="cannot be read"):
        composed(folder, "training=gpt3/40b")
    with pytest.raises(ConfigError, match="outside of"):
        composed(folder, "training=../../x")
    with pytest.raises(ConfigError, match="not an override"):
        composed(folder, "training")
    with pytest.raises(ConfigError, match="no table"):
        composed(folder, "training.model.size.more=1")
    (training / "5b.yaml").write_text("defaults: [gpt3/other]\n")
    with pytest.raises(ConfigError, match="defaults lists go in a circle"):
        composed(folder)
    (training / "5b.yaml").write_text("defaults: {a: 1}\n")
    with pytest.raises(ConfigError, match="no list"):
        composed(folder)
    (training / "5b.yaml").write_text("defaults: [[a]]\n")
    with pytest.raises(ConfigError, match="not an entry of a defaults list"):
        composed(folder)
    (folder / "config.yaml").write_text("defaults: [{cluster: bcm}]\n")
    with pytest.raises(ConfigError, match="have no training") as error:
        composed(folder)
    assert "training=FILE" in str(error.value)


def test_files_that_are_none(tmp_path: Path) -> None:
    path = tmp_path / "conf.yaml"
    path.write_bytes(b"a: \xff\n")
    with pytest.raises(ConfigError, match="cannot be read"):
        read_config(path)
    with path.open("wb") as file:
        file.truncate(LARGEST + 1)
    with pytest.raises(ConfigError, match="more than 4 MiB"):
        read_config(path)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_config(tmp_path)


@pytest.mark.parametrize("size", ["126m", "5b", "20b", "40b", "175b"])
def test_the_published_folder(size: str) -> None:
    """Against OmegaConf's own reading, where the launcher's tree is there."""
    source = os.environ.get("TRAINKIT_NEMO_CONF")
    if not source:
        pytest.skip("needs TRAINKIT_NEMO_CONF, the launcher's folder conf")
    for name, function in hydra_config._RESOLVERS.items():
        OmegaConf.register_new_resolver(name, function, replace=True)
    OmegaConf.register_new_resolver("hydra", lambda key: None, replace=True)
    words = [f"training=gpt3/{size}", "bignlp_path=/x", "+launcher_scripts_path=/x"]
    found = compose(Path(source), "config", ("cluster", "training"), words_of(words))
    whole = OmegaConf.create(found.root)
    ours = Resolved(found.root, found.choices).leaves("training")
    assert len(ours) > 100
    for path, value in ours.items():
        said = OmegaConf.select(whole, f"training.{path}")
        if OmegaConf.is_config(said):
            said = OmegaConf.to_container(said, resolve=True)
        assert said == value and type(said) is type(value), path
