"""Words of hydra's command line, written without its libraries and read by its own parser."""

from __future__ import annotations

import sys

import pytest
from hypothesis import given, strategies as st
from omegaconf import OmegaConf

from trainkit.base.extras import MissingExtra
from trainkit.engines.hydra_words import (
    Override,
    hydra_value,
    no_interpolation,
    read_override,
)
from trainkit.engines.options import Value

# what hydra-core 1.1.2 and 1.3.2 with OmegaConf 2.1.2 and 2.3.0 read these words as
WRITTEN = {
    "null": None,
    "True": True,
    "75000": 75000,
    "0.0006": 6e-4,
    "9e-06": 9e-6,
    "megatron_gpt": "megatron_gpt",
    "'00:23:30:00'": "00:23:30:00",
    "'99990,8,2'": "99990,8,2",
    "'null'": "null",
    "'True'": "True",
    "'1e-5'": "1e-5",
    "''": "",
    "' a '": " a ",
    "'it\\'s'": "it's",
    "'a\\\\'": "a\\",
    "'\\${data_dir}/x'": "${data_dir}/x",
    "'a=b'": "a=b",
    "[0.0333,/fsx/data/my-gpt3_00_text_document,0.0334,'/fsx/a b']": [
        0.0333,
        "/fsx/data/my-gpt3_00_text_document",
        0.0334,
        "/fsx/a b",
    ],
    "{enabled:False,ranks:[0],trace:['nvtx,cuda']}": {
        "enabled": False,
        "ranks": [0],
        "trace": ["nvtx,cuda"],
    },
}
# what others write, as the published scripts do
READ = {
    "1.0e-5": 1e-5,
    "false": False,
    "1_000": 1000,
    "[nvtx,cuda]": ["nvtx", "cuda"],
    "980\\,10\\,10": "980,10,10",
    "megatron_gpt--step\\=1085-consumed_samples\\=69632.0-last.ckpt": (
        "megatron_gpt--step=1085-consumed_samples=69632.0-last.ckpt"
    ),
    "${multiply:4, ${.hidden_size}}": None,
    "[.0333,/fsx/my-gpt3_00_text_document]": [0.0333, "/fsx/my-gpt3_00_text_document"],
    '"a, b"': "a, b",
    "a b": "a b",
    "": "",
    "00:23:30:00": "00:23:30:00",
}


def read_value(text: str) -> Value:
    return read_override(f"key={text}").value


@pytest.mark.parametrize("word", WRITTEN)
def test_written(word: str) -> None:
    value = WRITTEN[word]
    assert hydra_value(value) == word
    expected = value
    if isinstance(value, str):
        expected = no_interpolation(value)  # OmegaConf takes the backslash away
    assert read_value(word) == expected


@pytest.mark.parametrize("word", READ)
def test_read(word: str) -> None:
    if READ[word] is None:  # `}` of the inner one ends the interpolation for the lexer
        with pytest.raises(ValueError, match="not an override"):
            read_value(word)
        return
    assert read_value(word) == READ[word]


@pytest.mark.parametrize(
    "word",
    [
        "a,b",
        "choice(1,2)",
        "range(0,9)",
        "glob(*)",
        "[1",
        "a=b",
        "[1,,2]",
        "{1}",
        "a;b",
        "[" * 600 + "]" * 600,
    ],
)
def test_no_single_value(word: str) -> None:
    """Sweeps, functions, which are not run, and what the grammar has not."""
    with pytest.raises(ValueError, match="hydra"):
        read_value(word)


def test_overrides() -> None:
    added = Override("model.save_xser", True, "+")
    assert added.word() == "+model.save_xser=True"
    assert read_override("+model.save_xser=True") == added
    assert read_override("trainer.max_epochs=null") == Override("trainer.max_epochs", None)
    assert read_override("~model.ub_tp_comm_overlap_cfg") == Override(
        "model.ub_tp_comm_overlap_cfg", None, "~"
    )
    assert Override("model.x", None, "~").word() == "~model.x"
    for word in ("model.lr", "--config-name=x", "=3", "a b=3", "a/b=3", "a@b=3"):
        with pytest.raises(ValueError, match="not an override"):
            read_override(word)


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text(st.characters(codec="utf-8", exclude_characters="\r"), max_size=10)
    | st.text("01_.eE+-naift", max_size=6)
    | st.text(r"""ab1_/.-+\'"{}[](),:= $%*@?|~#0eE""", max_size=10),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.just("k"), inner, max_size=1),
    max_leaves=4,
)


@given(VALUES)
def test_hydra_reads_what_is_written(value: object) -> None:
    got = read_override(Override("a.b", value).word())
    assert got.path == "a.b" and got.prefix == "" and type(got.value) is type(value)
    config = OmegaConf.create({"x": got.value})
    assert OmegaConf.to_container(config, resolve=True) == {"x": value}


def test_without_the_libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is needed to write a word; to read one, the extra."""
    monkeypatch.setitem(sys.modules, "hydra.core.override_parser.overrides_parser", None)
    word = Override("a.b", {"c": ["${x}", "1e-5"]}).word()
    assert word == "a.b={c:['\\${x}','1e-5']}"
    with pytest.raises(MissingExtra, match="hydra-core and omegaconf") as caught:
        read_override(word)
    assert caught.value.extra == "hydra"
