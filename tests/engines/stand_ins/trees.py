"""Folders that look like the trees of NeMo and neuronx-nemo-megatron, whose training scripts are
the stand-ins of this folder, and the programs beside an interpreter that neuron's scripts call."""

from __future__ import annotations

import sys
from pathlib import Path

import yaml

CHECKOUT = Path(__file__).resolve().parents[3]
SCRIPT = "megatron_gpt_pretraining.py"
PLACE = Path("examples/nlp/language_modeling")
# NeMo's own folders in the tree of neuronx-nemo-megatron
NEURON_PLACE = "nemo" / PLACE
PROGRAM = """import sys
sys.path.insert(0, {checkout!r})
from tests.engines.stand_ins.{module} import main
main(__file__, {version!r})
"""
# pip's own script of the package torch
TORCHRUN = """#!{python}
import sys
from torch.distributed.run import main
if __name__ == "__main__":
    sys.exit(main())
"""
# The real one runs the program with NEURON_EXTRACT_GRAPHS_ONLY=1, compiles what it has noted, and
# ends with 0 whatever became of it.
COMPILE = """#!/bin/bash
export NEURON_EXTRACT_GRAPHS_ONLY=1
"$@" || exit $?
failed=${STAND_IN_FAILED_GRAPHS:-0}
mkdir -p "$NEURON_COMPILE_CACHE_URL/neuronxcc-2.16.372.0+4a9b2326/MODULE_7+3cc9a3cb"
time="$(date +%Y-%m-%d\\ %H:%M:%S).000738: INFO ||NEURON_PARALLEL_COMPILE||:"
echo "$time Total graphs: 3"
echo "$time Total successful compilations: $((3 - failed))"
echo "$time Total failed compilations: $failed"
"""


def make_nemo(folder: Path, version: str) -> Path:
    """A tree of NeMo 1.12 (bignlp 22.09) or 2.1 (24.12); `version` is "1.12" or "2.1"."""
    place = folder / PLACE
    (place / "conf").mkdir(parents=True)
    (place / SCRIPT).write_text(_program("nemo_program", version))
    (place / "conf" / "megatron_gpt_config.yaml").write_text("name: megatron_gpt\n")
    major, minor = version.split(".")
    (folder / "nemo").mkdir()
    (folder / "nemo" / "package_info.py").write_text(
        f"MAJOR = {major}\nMINOR = {minor}\nPATCH = 0\nPRE_RELEASE = ''\n"
        "VERSION = (MAJOR, MINOR, PATCH, PRE_RELEASE)\n"
    )
    return folder


# what its configuration of 2023 (branch 2.13.1_release) lacks, and has otherwise
LATER = (
    *("trainer.check_val_every_n_epoch", "trainer.num_sanity_val_steps"),
    *("exp_manager.log_local_rank_0_only", "model.flexible_pipeline_parallel_stages"),
    *("model.disable_layer_norm_checkpointing", "model.zero_use_master_weight"),
    *("model.convert_to_hf", "model.output_dir", "model.config_path", "model.data.fine_tuning"),
    *("model.data.chat", "enable_recovery_time_instrumentation", "async_checkpointing"),
    "enable_checkpoint_removal_protection",
)
EARLIER = {"save_top_k": -1, "save_last": True}


def make_neuron(folder: Path, generation: str = "head") -> Path:
    """A tree of neuronx-nemo-megatron as it is since 2024, or of "2.13.1"."""
    place = folder / NEURON_PLACE
    (place / "conf").mkdir(parents=True)
    (place / SCRIPT).write_text(_program("neuron_program", generation))
    conf = yaml.safe_load((Path(__file__).parent / "conf" / "neuronx_nemo.yaml").read_text())
    if generation == "head":
        (place / "train_setup.sh").write_text("# MASTER_PORT=41000\n")
    else:
        (place / "test.sh").write_text("export NEURON_CC_FLAGS='--distribution-strategy=nemo'\n")
        for path in LATER:
            *parents, last = path.split(".")
            table = conf
            for key in parents:
                table = table[key]
            del table[last]
        conf["exp_manager"]["checkpoint_callback_params"].update(EARLIER)
    (place / "conf" / "megatron_gpt_config.yaml").write_text(yaml.safe_dump(conf))
    for name in ("build.sh", "requirements.txt"):
        (folder / name).write_text("")
    return folder


def _program(module: str, version: str) -> str:
    return PROGRAM.format(checkout=str(CHECKOUT), module=module, version=version)


def make_programs(folder: Path) -> Path:
    """torchrun, which is torch's, and neuron_parallel_compile; for PATH."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in (
        ("torchrun", TORCHRUN.format(python=sys.executable)),
        ("neuron_parallel_compile", COMPILE),
    ):
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    return folder
