"""Tables of hydra configurations: read from YAML alone, every leaf by its dotted path."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainkit.engines.extract_hydra import hydra_options, main
from trainkit.engines.options import load_table, parse_table

CONF = """
name: megatron_gpt
trainer:
  max_epochs: -1 # a comment
  gradient_clip_val: 1.0
  logger: False
model:
  layernorm_epsilon: 1e-5
  encoder_seq_length: 512
  max_position_embeddings: ${.encoder_seq_length}
  kv_channels: null
  data:
    data_prefix: ???
    splits_string: 980,10,10
    concat_sampling_probabilities:
      - 1.0
    empty: {}
  nsys_profile:
    ranks: [0]
"""


def test_every_leaf_has_a_path_a_type_and_a_default() -> None:
    found = {name: (each.type, each.default) for name, each in hydra_options(CONF).items()}
    assert found == {
        "name": ("str", "megatron_gpt"),
        "trainer.max_epochs": ("int", -1),
        "trainer.gradient_clip_val": ("float", 1.0),
        "trainer.logger": ("bool", False),
        "model.layernorm_epsilon": ("float", 1e-5),  # text for YAML 1.1, a number for OmegaConf
        "model.encoder_seq_length": ("int", 512),
        "model.max_position_embeddings": ("any", None),
        "model.kv_channels": ("any", None),
        "model.data.data_prefix": ("any", None),
        "model.data.splits_string": ("str", "980,10,10"),
        "model.data.concat_sampling_probabilities": ("list", [1.0]),
        "model.data.empty": ("dict", {}),
        "model.nsys_profile.ranks": ("list", [0]),
    }


def test_the_table_it_prints_can_be_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "conf.yaml"
    path.write_text(CONF)
    words = ["--engine", "neuronx-nemo", "--version", "9.9", "--commit", "0123456789"]
    assert main([str(path), *words]) == 0
    table = parse_table(capsys.readouterr().out)
    assert (table.engine, table.version, table.commit) == ("neuronx-nemo", "9.9", "0123456789")
    assert table.options == hydra_options(CONF)


@pytest.mark.parametrize(
    ("version", "keys", "has", "has_not"),
    [
        ("2.13.1", 136, "model.wrap_with_zero", "model.zero_use_master_weight"),
        ("2.21", 222, "model.flexible_pipeline_parallel_stages", "model.save_xser"),
    ],
)
def test_the_tables_of_neuronx_nemo(version: str, keys: int, has: str, has_not: str) -> None:
    """conf/megatron_gpt_config.yaml of both generations."""
    table = load_table("neuronx-nemo", version)
    assert len(table.options) == keys
    assert has in table and has_not not in table
    assert table.options["model.layernorm_epsilon"].default == 1e-5
    assert table.options["exp_manager.checkpoint_callback_params.save_last"].default is (
        version == "2.13.1"
    )
