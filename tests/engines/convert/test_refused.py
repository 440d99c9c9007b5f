"""Checkpoints of engines that are damaged, of something else, or would execute code: one clear
error, and nothing has run."""

from __future__ import annotations

import argparse
import enum
import os
import pickle
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engines.convert.support import MODELS, back, converted, saved
from tests.train.hf_support import VOCAB
from trainkit.base.errors import ConfigError, TrainkitError
from trainkit.engines.convert import gpt_neox, megatron_lm
from trainkit.engines.convert.pickles import InertValue, read_pickle

pytestmark = pytest.mark.usefixtures("one_rank")
MEGATRON = "release/mp_rank_00/model_optim_rng.pt"
NEOX = "global_step0/mp_rank_00_model_states.pt"


class Runs:
    """A pickle of it makes a file when it is loaded without care."""

    def __init__(self, call: Callable[..., Any], *arguments: Any) -> None:
        self.call = call
        self.arguments = arguments

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return self.call, self.arguments


class TestHostile:
    """Pickles that would act."""

    @pytest.mark.parametrize("protocol", [2, 3, 4])
    @pytest.mark.parametrize("place", ["args", "model", "rng_state", "optimizer"])
    def test_a_command(self, place: str, protocol: int, tmp_path: Path) -> None:
        path = tmp_path / "a.pt"
        content = {"model": {}, place: {"x": [Runs(os.system, f"touch {tmp_path}/ran")]}}
        torch.save(content, path, pickle_protocol=protocol)
        with pytest.raises(ConfigError, match=r"posix\.system|is not a whole file"):
            read_pickle(path)
        assert not (tmp_path / "ran").exists()
        torch.load(path, weights_only=False)  # this is what it would have done
        assert (tmp_path / "ran").exists()

    @pytest.mark.parametrize(
        ("call", "named"),
        [
            (eval, "builtins.eval"),
            (setattr, "builtins.setattr"),
            (shutil.rmtree, "shutil.rmtree"),
            (torch.hub.load, "torch.hub.load"),
        ],
    )
    def test_it_is_named(self, call: Callable[..., Any], named: str, tmp_path: Path) -> None:
        torch.save({"model": Runs(call, str(tmp_path))}, tmp_path / "a.pt")
        with pytest.raises(ConfigError, match=f"it asks for {named}, which could execute code"):
            read_pickle(tmp_path / "a.pt")

    def test_all_are_named_at_once(self, tmp_path: Path) -> None:
        content = {"a": Runs(eval, "1"), "b": Runs(os.getcwd), "c": argparse.Namespace(x=1)}
        torch.save(content, tmp_path / "a.pt")
        with pytest.raises(ConfigError, match=r"asks for builtins\.eval, posix\.getcwd, which"):
            read_pickle(tmp_path / "a.pt")

    def test_a_member_of_an_enum_as_older_pythons_write_it(self, tmp_path: Path) -> None:
        """getattr(class, name): kept, not called."""
        torch.save({"when": Runs(getattr, argparse.Namespace, "no_such")}, tmp_path / "a.pt")
        found = read_pickle(tmp_path / "a.pt")["when"]
        assert isinstance(found, InertValue) and found.made_of == (InertValue, "no_such")

    def test_an_engines_name_is_never_imported(self, tmp_path: Path) -> None:
        """A module of that name that would act when it is imported stays unloaded."""
        (tmp_path / "megatron").mkdir()
        module = tmp_path / "megatron/trap.py"
        module.write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
        text = b"cmegatron.trap\nThing\n(S'x'\ntR."
        _write_zip(
            tmp_path / "a.pt",
            b"\x80\x02}X\x01\x00\x00\x00a"
            + text[:-1].replace(b"S'x'\n", b"X\x01\x00\x00\x00x")
            + b"s.",
        )
        found = read_pickle(tmp_path / "a.pt")["a"]
        assert isinstance(found, InertValue) and found.made_of == ("x",)
        assert not (tmp_path / "ran").exists()

    def test_what_engines_really_keep_is_inert(self, tmp_path: Path) -> None:
        np = pytest.importorskip("numpy")
        content = {
            "args": argparse.Namespace(num_layers=2, dtype=torch.float32),
            "rng_state": np.random.RandomState(1).get_state(),
            "when": Color.red,
        }
        Color.__module__ = "megatron.core.enums"
        try:
            with pytest.MonkeyPatch.context() as patch:
                patch.setitem(__import__("sys").modules, "megatron.core.enums", _Enums)
                torch.save(content, tmp_path / "a.pt")
        finally:
            Color.__module__ = __name__
        # importing megatron.core allows this one
        with torch.serialization.safe_globals([argparse.Namespace]):
            before = set(torch.serialization.get_safe_globals())
            found = read_pickle(tmp_path / "a.pt")
            assert set(torch.serialization.get_safe_globals()) == before
        args = found["args"]
        assert isinstance(args, InertValue)
        assert args.attributes == {"num_layers": 2, "dtype": torch.float32}
        assert isinstance(found["when"], InertValue)
        assert found["when"].made_of in ((1,), (InertValue, "red"))  # of Python before 3.11.4


class Color(enum.Enum):
    """Stands for an enum of Megatron-core."""

    red = 1


class _Enums:
    """Stands for its module."""

    Color = Color


def _write_zip(path: Path, pickled: bytes) -> None:
    """A file of torch.save with this pickle and no tensors."""
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", pickled)
        archive.writestr("archive/version", b"3\n")
        archive.writestr("archive/byteorder", b"little")


class TestDamaged:
    """Files that are not what was written."""

    def test_cut_off_anywhere(self, tmp_path: Path) -> None:
        torch.save({"model": {"a": torch.arange(300.0)}}, tmp_path / "a.pt")
        whole = (tmp_path / "a.pt").read_bytes()
        for size in range(0, len(whole), 171):
            (tmp_path / "b.pt").write_bytes(whole[:size])
            with pytest.raises(ConfigError, match="is not a whole file of"):
                read_pickle(tmp_path / "b.pt")

    def test_a_changed_byte_is_found_or_means_the_same(self, tmp_path: Path) -> None:
        torch.save({"model": {"a": torch.arange(40.0)}}, tmp_path / "a.pt")
        whole = bytearray((tmp_path / "a.pt").read_bytes())
        told = 0
        for place in range(0, len(whole), 3):
            whole[place] ^= 0x40
            (tmp_path / "b.pt").write_bytes(whole)
            whole[place] ^= 0x40
            try:
                found: Any = read_pickle(tmp_path / "b.pt")
            except ConfigError:
                told += 1
            else:
                assert torch.equal(found["model"]["a"], torch.arange(40.0))
        assert told > 100

    def test_other_files(self, tmp_path: Path) -> None:
        for name, content in (("empty", b""), ("text", b"hello"), ("pickle", pickle.dumps({}))):
            (tmp_path / name).write_bytes(content)
            with pytest.raises(ConfigError, match="is not a whole file of"):
                read_pickle(tmp_path / name)
        with pytest.raises(ConfigError, match="is missing"):
            read_pickle(tmp_path / "nowhere")
        with pytest.raises(ConfigError, match="cannot be read: Is a directory"):
            read_pickle(tmp_path)
        torch.save([1], tmp_path / "list")
        with pytest.raises(ConfigError, match="holds a list, not a checkpoint's dictionary"):
            read_pickle(tmp_path / "list")
        torch.save({"a": 1}, tmp_path / "old", _use_new_zipfile_serialization=False)
        with pytest.raises(ConfigError, match="is not a whole file of"):
            read_pickle(tmp_path / "old")


Change = Callable[[dict[str, Any]], object]


def changed(path: Path, change: Change) -> None:
    """Write a file of an engine again with another content."""
    content: dict[str, Any] = torch.load(path, weights_only=False)
    change(content)
    torch.save(content, path)


def megatron_case(name: str, change: Change, tmp_path: Path, **cut: Any) -> None:
    """Read a converted folder of which the first file was changed."""
    converted(saved(MODELS[name], tmp_path / "ours"), "megatron-lm", tmp_path / "out", **cut)
    changed(tmp_path / "out" / MEGATRON, change)
    back("megatron-lm", tmp_path / "out", MODELS[name])


def neox_case(name: str, change: Change, tmp_path: Path, **cut: Any) -> None:
    """As `megatron_case`, of GPT-NeoX without a pipeline."""
    cut = {"pipeline": 0, **cut}
    converted(saved(MODELS[name], tmp_path / "ours"), "gpt-neox", tmp_path / "out", **cut)
    changed(tmp_path / "out" / NEOX, change)
    back("gpt-neox", tmp_path / "out", MODELS[name])


QKV = "decoder.layers.1.self_attention.linear_qkv.weight"
MEGATRON_CHANGES: list[tuple[Change, str]] = [
    (lambda c: c["model"].pop(QKV), f"{QKV} is not in it"),
    (lambda c: c["model"].update(other=torch.ones(1)), "other is not in the job's model"),
    (lambda c: c["model"].update({QKV: torch.ones(72, 25)}), r"is \[72, 25\] there, \[72, 24\]"),
    (lambda c: c["model"].update({QKV: torch.ones(72, 24).int()}), "is of torch.int32"),
    (lambda c: c["model"].update({QKV: 3}), "is not a plain tensor, but a int"),
    (lambda c: c["model"].update({QKV: torch.eye(72, 24).to_sparse()}), "not a plain tensor"),
    (lambda c: c.pop("model"), "has no `model`"),
    (lambda c: c.update(model=[]), "its `model` at pipeline stage 0 is a list"),
    (lambda c: c["model"].update({"language_model.x": 1}), "before its core"),
    (lambda c: setattr(c["args"], "num_attention_heads", 6), "num_attention_heads is 6 there, 3"),
    (lambda c: setattr(c["args"], "num_attention_heads", 6), "num_query_groups is 6 there, 3"),
    (lambda c: setattr(c["args"], "swiglu", True), "swiglu is True there, False"),
    (lambda c: setattr(c["args"], "num_experts", 8), "num_experts is 8 there"),
    (lambda c: setattr(c["args"], "apply_layernorm_1p", True), "apply_layernorm_1p is True"),
    (lambda c: setattr(c["args"], "norm_epsilon", 1e-6), "norm_epsilon is 1e-06 there, 1e-05"),
    (lambda c: setattr(c["args"], "tensor_model_parallel_size", 2), "parallel_size is 2 there, 1"),
    (
        lambda c: c["model"].update({"output_layer.weight": torch.ones(56, 24)}),
        "output_layer.weight is not the embedding",
    ),
    (
        lambda c: c["model"].update({"embedding.word_embeddings.weight": torch.ones(52, 24)}),
        f"has 52 rows there, the job's vocabulary {VOCAB}",
    ),
]


@pytest.mark.parametrize(("change", "said"), MEGATRON_CHANGES)
def test_other_checkpoints_of_megatron_lm(change: Change, said: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=said):
        megatron_case("gpt", change, tmp_path)


ROUTER = "decoder.layers.1.mlp.router.weight"
EXPERT = "decoder.layers.1.mlp.experts.local_experts.3.linear_fc2.weight"
EXPERT_CHANGES: list[tuple[Change, str]] = [
    (lambda c: c["model"].pop(ROUTER), f"{ROUTER} is not in it"),
    (lambda c: c["model"].pop(EXPERT), f"{EXPERT} is not in it"),
    (lambda c: c["model"].update({EXPERT: torch.ones(20, 32)}), r"is \[20, 32\] there, \[32, 20\]"),
    (lambda c: setattr(c["args"], "num_experts", 8), "num_experts is 8 there, 4"),
    (lambda c: setattr(c["args"], "moe_router_topk", 3), "moe_router_topk is 3 there, 2"),
    (lambda c: setattr(c["args"], "moe_layer_freq", 2), "moe_layer_freq is 2 there; every layer"),
    (lambda c: setattr(c["args"], "moe_router_pre_softmax", True), "pre_softmax is True there"),
    (lambda c: setattr(c["args"], "expert_tensor_parallel_size", 2), "split over 2 ranks, and all"),
]


@pytest.mark.parametrize(("change", "said"), EXPERT_CHANGES)
def test_other_experts_of_megatron_lm(change: Change, said: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=said):
        megatron_case("mixtral", change, tmp_path)


def test_what_older_versions_do_not_say_is_not_compared(tmp_path: Path) -> None:
    megatron_case("gpt", lambda c: c.pop("args"), tmp_path)


def test_gelu_is_what_was_trained(tmp_path: Path) -> None:
    """bias_gelu_fusion off is the exact form: config.json of an export must say so."""
    source = saved(MODELS["gpt"], tmp_path / "ours")
    converted(source, "megatron-lm", tmp_path / "out")
    changed(tmp_path / "out" / MEGATRON, lambda c: setattr(c["args"], "bias_gelu_fusion", False))
    found = back("megatron-lm", tmp_path / "out", MODELS["gpt"])
    assert found.model.gelu_form == "exact" and "exact form of GELU" in found.notes[0]


NEOX_CHANGES: list[tuple[Change, str]] = [
    (lambda c: c["module"].pop("sequential.5.norm.bias"), "sequential.5.norm.bias is not in it"),
    (lambda c: c["module"].update({"sequential.9.x": torch.ones(1)}), "sequential.9.x is not in"),
    (lambda c: c.update(module=None), "has no tensors"),
    (
        lambda c: c["module"].update({"sequential.6.final_linear.weight": torch.ones(64, 48)}),
        "embedding and head have 56 and 64 rows",
    ),
]


@pytest.mark.parametrize(("change", "said"), NEOX_CHANGES)
def test_other_checkpoints_of_gpt_neox(change: Change, said: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=said):
        neox_case("gpt-neox", change, tmp_path)


def test_old_buffers_of_gpt_neox_are_left_out(tmp_path: Path) -> None:
    name = "sequential.2.attention.rotary_emb.inv_freq"
    neox_case("gpt-neox", lambda c: c["module"].update({name: torch.ones(2)}), tmp_path)


def test_copies_that_have_drifted_apart_are_averaged_and_told(tmp_path: Path) -> None:
    source = saved(MODELS["gpt-neox"], tmp_path / "ours")
    converted(source, "gpt-neox", tmp_path / "out", tensor=3, pipeline=0)
    name = "sequential.5.norm.bias"
    changed(tmp_path / "out" / NEOX, lambda c: c["module"][name].add_(0.75))
    found = back("gpt-neox", tmp_path / "out", MODELS["gpt-neox"])
    shift = found.read("final_norm.bias") - source.weights.read("final_norm.bias")
    torch.testing.assert_close(shift, torch.full_like(shift, 0.25))
    assert "1 tensors differ" in found.notes[0] and "by up to 0.75" in found.notes[0]


class TestFolders:
    """Which folder is a checkpoint, and which is not."""

    def test_none(self, tmp_path: Path) -> None:
        for choose in (megatron_lm.choose, gpt_neox.choose):
            with pytest.raises(TrainkitError, match="finished no checkpoint") as error:
                choose(tmp_path, None)
            assert error.value.exit == 16
            with pytest.raises(TrainkitError, match="there is no checkpoint") as error:
                choose(tmp_path, 4)
            assert error.value.exit == 16 and "there are: none" in error.value.hint

    @pytest.mark.parametrize("text", ["", "../..", "x", "iter_3", "global_step"])
    def test_trackers_that_say_nothing(self, text: str, tmp_path: Path) -> None:
        (tmp_path / "latest_checkpointed_iteration.txt").write_text(text)
        (tmp_path / "latest").write_text(text)
        for choose in (megatron_lm.choose, gpt_neox.choose):
            with pytest.raises(TrainkitError, match="says") as error:
                choose(tmp_path, None)
            assert error.value.exit == 16

    def test_by_step_or_by_the_tracker(self, tmp_path: Path) -> None:
        (tmp_path / "latest_checkpointed_iteration.txt").write_text("3\n")
        (tmp_path / "latest").write_text("global_step3")
        for name in ("iter_0000003", "iter_0000002", "global_step3", "global_step2"):
            (tmp_path / name).mkdir()
        assert megatron_lm.choose(tmp_path, None) == (tmp_path / "iter_0000003", 3)
        assert megatron_lm.choose(tmp_path, 2) == (tmp_path / "iter_0000002", 2)
        assert gpt_neox.choose(tmp_path, None) == (tmp_path / "global_step3", 3)
        assert gpt_neox.choose(tmp_path, 2) == (tmp_path / "global_step2", 2)

    @pytest.mark.parametrize(
        ("files", "said"),
        [
            ([], "it is not a checkpoint of Megatron-LM"),
            (["__0_0.distcp", ".metadata"], "is not what torch writes"),
            (["mp_rank_00_000_001/model_optim_rng.pt"], "lacks mp_rank_00_000_000"),
            (["mp_rank_01/model_optim_rng.pt"], "lacks mp_rank_00"),
            (["mp_rank_00_001/model_optim_rng.pt"], "lacks mp_rank_00_000"),
        ],
    )
    def test_megatron_lm(self, files: list[str], said: str, tmp_path: Path) -> None:
        for name in files:
            (tmp_path / name).parent.mkdir(exist_ok=True)
            (tmp_path / name).write_bytes(b"")
        with pytest.raises(ConfigError, match=said):
            megatron_lm.read(tmp_path, MODELS["gpt"], VOCAB)

    @pytest.mark.parametrize(
        ("files", "said"),
        [
            ([], "it is not a checkpoint of GPT-NeoX"),
            (["zero_pp_rank_0_mp_rank_00_model_states.pt"], "ZeRO stage 3"),
            (["mp_rank_01_model_states.pt"], "lacks some of its ranks"),
            (["layer_00-model_00-model_states.pt"], "is not a whole file"),
        ],
    )
    def test_gpt_neox(self, files: list[str], said: str, tmp_path: Path) -> None:
        for name in files:
            (tmp_path / name).write_bytes(b"")
        with pytest.raises(ConfigError, match=said):
            gpt_neox.read(tmp_path, MODELS["gpt"], VOCAB)
