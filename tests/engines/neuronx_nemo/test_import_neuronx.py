"""Scripts of neuronx-nemo-megatron as jobs: what the engine makes of such a job is again the
scripts' own command."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.engines.neuronx_nemo.neuronx_published import (
    DATA,
    HEAD_ENV,
    HOME,
    OLDER_ENV,
    SIZES,
    Size,
    distributed_args,
    head_words,
    older_words,
)
from tests.engines.neuronx_nemo.test_neuronx_argv import argv_of, ours
from trainkit.base.errors import ConfigError
from trainkit.engines.imported import ImportedJob
from trainkit.engines.neuronx_nemo.import_script import LARGEST, import_neuronx, read_scripts
from trainkit.engines.options import load_table
from trainkit.jobs.load import load
from trainkit.jobs.schema import Job

PLACE = """
[engines.neuronx-nemo]
source = "https://github.com/aws-neuron/neuronx-nemo-megatron"
revision = "{revision}"
version = "{version}"
python = "/opt/venv/bin/python"

[clusters.trn]
launcher = "slurm"
device = "trn1-core"
gpus_per_node = 32
"""
MODES = """
mode="{mode}"
if [[ $mode == "bf16SR" ]];then
    export XLA_USE_BF16=1
    export OPTIM_NAME=adamw
    export wrap_with_zero=false
    export zero_use_master_weight=false
elif [[ $mode == "fp32_ZeroOptMaster" ]]; then
    export XLA_DOWNCAST_BF16=1
    export OPTIM_NAME=adamw
    export wrap_with_zero=true
    export zero_use_master_weight=true
else
    export XLA_USE_BF16=0
    export OPTIM_NAME=other
    export wrap_with_zero=false
    export zero_use_master_weight=false
fi
"""
# variables of the scripts' own, as theirs have them: defaults, arithmetic, a compiling run
SETTINGS = """
set -e
if [ -v SLURM_NNODES ]
then
    for h in $(scontrol show hostname); do echo $h; done
    NTASKS=$SLURM_NTASKS
elif [ -v OMPI_COMM_WORLD_RANK ]
then
    NTASKS=$OMPI_COMM_WORLD_SIZE
else
    NTASKS=1
fi
: ${HS:=4096}
: ${TP:=8}
: ${N_LAYERS:=32}
: ${TRAIN_ITERS:=300000}
: ${GBS_MULTIPLE:=32}
GBS=$((NTASKS*GBS_MULTIPLE))
FFN_HS=$(($HS*4))
CHECKPOINT_CALLBACK=USUAL
if [ "$COMPILE" = "1" ]; then
    MAYBE_COMPILE="neuron_parallel_compile"
    export TRAIN_ITERS=4
    CHECKPOINT_CALLBACK=False
fi
"""


def scripts(folder: Path, size: Size, *, older: bool = False, mode: str = "bf16SR") -> Path:
    """gpt_SIZE.sh, test.sh and a file that it sources, of the published form."""
    folder.mkdir(exist_ok=True)
    words = older_words(size, compiling=False) if older else head_words(size, compiling=False)
    batch = 32 * size.nodes if older else size.batch
    spelled = {
        f"model.hidden_size={size.hidden}": "model.hidden_size=$HS",
        f"model.ffn_hidden_size={4 * size.hidden}": "model.ffn_hidden_size=$FFN_HS",
        f"model.num_layers={size.layers}": "model.num_layers=${N_LAYERS}",
        f"model.global_batch_size={batch}": "model.global_batch_size=$GBS",
        f"model.tensor_model_parallel_size={size.tensor}": "model.tensor_model_parallel_size=$TP",
        f"trainer.num_nodes={size.nodes}": "trainer.num_nodes=$NTASKS",
        "trainer.max_steps=300000": "trainer.max_steps=$TRAIN_ITERS",  # and no space behind it
        "trainer.val_check_interval=300001": "trainer.val_check_interval=$(($TRAIN_ITERS+1))",
        "trainer.val_check_interval=300000": "trainer.val_check_interval=$TRAIN_ITERS",
        "model.optim.name=adamw": "model.optim.name=$OPTIM_NAME",
        "model.wrap_with_zero=false": "model.wrap_with_zero=$wrap_with_zero",
        "model.zero_use_master_weight=false": (
            "model.zero_use_master_weight=$zero_use_master_weight"
        ),
        "exp_manager.create_checkpoint_callback=True": (
            "exp_manager.create_checkpoint_callback=$CHECKPOINT_CALLBACK"
        ),
    }
    line = "    ".join(
        f"{spelled.get(word, word).replace(HOME, '$HOME')}{'' if 'max_steps' in word else ' '}\\\n"
        for word in words
    )
    environment = OLDER_ENV if older else HEAD_ENV
    exports = "".join(
        f'export {name}="{value.replace("${node:HOME}", "$HOME")}"\n'
        for name, value in environment.items()
        if name != "XLA_USE_BF16"
    )
    usual = "False" if older else "True"
    (folder / "setup.sh").write_text(
        exports + MODES.format(mode=mode) + SETTINGS.replace("USUAL", usual)
    )
    (folder / "test.sh").write_text(
        "#!/usr/bin/env bash\n\nsource ./setup.sh\n"
        f"$MAYBE_COMPILE torchrun $DISTRIBUTED_ARGS {line} 2>&1  | tee -a $LOG_PATH/log\n"
    )
    path = folder / "gpt_size.sh"
    path.write_text(
        f"#!/usr/bin/env bash\n\nexport HS={size.hidden}\nexport TP={size.tensor}\n"
        f"export N_LAYERS={size.layers}\nexport GBS_MULTIPLE={batch // size.nodes}\n\n./test.sh\n"
    )
    return path


def job_of(folder: Path, imported: ImportedJob, version: str, *sets: str) -> Job:
    """The job in a jobs.toml of its own."""
    revision = "f4743ce" if version == "2.21" else "2.13.1_release"
    place = PLACE.format(revision=revision, version=version)
    (folder / "jobs.toml").write_text(place + imported.to_toml("trn"))
    return load(folder, environ={}).resolve("taken", sets).job


@pytest.mark.parametrize("older", [False, True])
@pytest.mark.parametrize("size", SIZES)
def test_round_trip(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: str, older: bool
) -> None:
    """Script to job to command: the script's own, word for word, on the published nodes."""
    monkeypatch.setenv("HOME", HOME)
    published = SIZES[size]
    imported = import_neuronx(scripts(tmp_path, published, older=older), [], "taken", "")
    assert "env" not in imported.job and not imported.engine_args
    version = "2.13.1" if older else "2.21"
    job = job_of(tmp_path, imported, version, f"nodes={published.nodes}")
    words = (older_words if older else head_words)(published, compiling=False)
    launch = ["torchrun", *distributed_args(published)]
    argv = argv_of(job)
    whole = [*launch, *ours(words)]
    if older:
        assert argv == whole
    else:
        assert argv[: len(whole)] == whole and len(argv) == len(whole) + 2


def test_nodes_are_the_callers(tmp_path: Path) -> None:
    """The batch is for those that are given; else it follows the nodes."""
    path = scripts(tmp_path, SIZES["23b"])
    given = import_neuronx(path, ["SLURM_NNODES=4", "SLURM_NTASKS=4"], "taken", "")
    assert given.job["nodes"] == 4 and given.training["global_batch_size"] == 128
    open_ = import_neuronx(path, [], "taken", "")
    assert open_.training["gradient_accumulation_steps"] == 32 and open_.job["nodes"] == 1
    assert any(line.startswith("nodes: ") for line in open_.not_taken)
    changed = import_neuronx(path, ["SLURM_NNODES=4", "HS=1024", "TRAIN_ITERS=100000"], "taken", "")
    assert changed.model["hidden_size"] == 8192  # gpt_23b.sh sets it itself
    assert changed.training["train_iters"] == 100000 and changed.engine_args == {}


def test_the_mode_that_the_script_names(tmp_path: Path) -> None:
    """Of several branches the one that is taken counts; another's variables are not there."""
    path = scripts(tmp_path, SIZES["23b"], mode="fp32_ZeroOptMaster")
    imported = import_neuronx(path, [], "taken", "")
    assert imported.engine_args == {"training_precision": "fp32_ZeroOptMaster"}
    assert imported.parallelism["zero_stage"] == 1 and imported.training["precision"] == "bf16"
    assert "env" not in imported.job
    argv = argv_of(job_of(tmp_path, imported, "2.21", "nodes=4"))
    assert "model.zero_use_master_weight=true" in argv
    with pytest.raises(ConfigError, match=r"no mode of 2\.21"):
        import_neuronx(scripts(tmp_path, SIZES["23b"], mode="none"), [], "taken", "")


def test_what_the_engine_has_no_key_for(tmp_path: Path) -> None:
    """Further words are engine_args, further variables env; the rest is listed."""
    path = scripts(tmp_path, SIZES["23b"])
    test = tmp_path / "test.sh"
    text = test.read_text().replace(
        "model.use_cpu_initialization=True",
        "model.use_cpu_initialization=True +model.new_key=[1,a] model.data.num_workers=3"
        " model.log_gradient_norm=True model.resume_from_checkpoint='/efs/a\\=1.ckpt'"
        " exp_manager.name=$UNKNOWN",
    )
    test.write_text("export OWN=1\nexport NEURON_RT_EXEC_TIMEOUT=7\n" + text)
    imported = import_neuronx(path, [], "taken", "")
    assert imported.engine_args == {
        "+model.new_key": [1, "a"],
        "model.data.num_workers": 3,
        "model.log_gradient_norm": True,
        "exp_manager.name": "$UNKNOWN",
    }
    assert imported.job["env"] == {"OWN": "1"}  # setup.sh sets the other after it
    left = "\n".join(imported.not_taken)
    assert "model.resume_from_checkpoint" in left and "$UNKNOWN: its value is not in" in left


def test_what_is_no_script(tmp_path: Path) -> None:
    path = scripts(tmp_path, SIZES["23b"])
    with pytest.raises(ConfigError, match="a number"):
        import_neuronx(path, ["SLURM_NNODES=x"], "taken", "")
    with pytest.raises(ConfigError, match="no part of a job"):
        import_neuronx(path, ["COMPILE=1"], "taken", "")
    with pytest.raises(ConfigError, match="not NAME=VALUE"):
        import_neuronx(path, ["1x=2"], "taken", "")
    (tmp_path / "test.sh").write_text("./gpt_size.sh\nsource ./test.sh\n")  # they name each other
    assert read_scripts(path).count("export HS") == 1
    with pytest.raises(ConfigError, match="nothing in it runs"):
        import_neuronx(path, [], "taken", "")
    (tmp_path / "test.sh").write_text("torchrun megatron_gpt_pretraining.py model.hidden_size=big")
    with pytest.raises(ConfigError, match="a whole number is needed"):
        import_neuronx(path, [], "taken", "")
    (tmp_path / "test.sh").write_text("torchrun megatron_gpt_pretraining.py a={b:1,")
    with pytest.raises(ConfigError, match="not an override"):
        import_neuronx(path, [], "taken", "")
    (tmp_path / "test.sh").write_text("torchrun 'megatron_gpt_pretraining.py a=1")
    with pytest.raises(ConfigError, match="has no end"):
        import_neuronx(path, [], "taken", "")
    with (tmp_path / "test.sh").open("wb") as file:
        file.truncate(LARGEST + 1)
    with pytest.raises(ConfigError, match="not a script"):
        import_neuronx(path, [], "taken", "")
    with pytest.raises(ConfigError, match="cannot be read"):
        import_neuronx(tmp_path / "none.sh", [], "taken", "")


@pytest.mark.parametrize("size", SIZES)
def test_the_published_scripts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: str) -> None:
    """The same with a tree of the real project, where there is one."""
    source = os.environ.get("TRAINKIT_NEURONX_SOURCE")
    if not source:
        pytest.skip("needs TRAINKIT_NEURONX_SOURCE, a tree of neuronx-nemo-megatron")
    monkeypatch.setenv("HOME", HOME)
    folder = Path(source) / "nemo/examples/nlp/language_modeling"
    older = not (folder / "train_setup.sh").exists()
    name = size.replace("-7", ".7")
    imported = import_neuronx(folder / f"gpt_{name}.sh", [], "taken", "")
    published = SIZES[size]
    version = "2.13.1" if older else "2.21"
    job = job_of(tmp_path, imported, version, f"nodes={published.nodes}")
    words = (older_words if older else head_words)(published, compiling=False)
    whole = ["torchrun", *distributed_args(published), *ours(words)]
    assert argv_of(job)[: len(whole)] == whole
    assert imported.dataset["prefixes"] == [DATA.replace(HOME, "~") + "/my-gpt2_text_document"]
    assert load_table("neuronx-nemo", version).notice == ""
