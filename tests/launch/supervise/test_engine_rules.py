"""What foreign engines say when they fail, and what trainkit says of it. Where a version is named,
the engine printed the text when it was run on CPUs; the others are as the sources of the engines,
of DeepSpeed, torch and NCCL have them."""

from __future__ import annotations

import pytest

from trainkit.jobs.clusters import Cluster
from trainkit.launch.supervise.failure_rules import load_failure_rules

RULES = load_failure_rules(Cluster())


def rule_of(text: str) -> str | None:
    """The name of the rule that explains the last line of a rank."""
    rule = RULES.find("", ["training ...", *text.split("\n")])
    return next((name for name, other in RULES.rules.items() if other is rule), None)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        (
            "engine-schedule",  # core 0.16.1
            "[rank0]: AssertionError: OptimizerParamScheduler: class input value 36 and"
            " checkpointvalue 24 for total number of iterations do not match",
        ),
        (
            "engine-schedule",  # May 2021
            "AssertionError: AnnealingLR: class input value 0.0001 and checkpointvalue 0.0002 for"
            " learning rate do not match",
        ),
        (
            "engine-torch-dist",  # core 0.12.0 with torch 2.13
            "[rank0]: RuntimeError: Worker failure: _write_item() missing 1 required positional"
            " argument: 'serialization_format'",
        ),
        (
            "engine-psutil",  # core 0.12.0: it blames torch
            "[rank0]: megatron.core.dist_checkpointing.core.CheckpointingException: Cannot import a"
            " default strategy for: ('save_sharded', 'torch_dist', 1). Error: No module named"
            " 'psutil'. Hint:  Please use PyTorch version >=2.1",
        ),
        (
            "engine-save-hangs",  # core 0.16.1
            "[2026-11-22 18:33:29.247411] saving checkpoint at iteration       3 to /ck in"
            ' torch_dist format\n  File "training.py", line 1031 in pretrain',
        ),
        # names of the Neuron runtime's nrt_status.h
        ("neuron-broken", "RuntimeError: nrt_execute: NRT_EXEC_HW_ERR_HBM_UE (status 1201)"),
        ("neuron-broken", "ERROR TDRV: NRT_EXEC_UNIT_UNRECOVERABLE"),
        ("neuron-collectives", "NRT_EXEC_HW_ERR_COLLECTIVES"),
        ("neuron-not-there", "nrt_init: NRT_LOAD_NOT_ENOUGH_NC"),
        ("neuron-timeout", "Execution error: NRT_TIMEOUT"),
        ("neuron-memory", "RuntimeError: Failed to allocate 5.2 GB on ND 3:NC 1"),
        (
            "neuron-compiler",
            "CompilationFailed: 1 of 22 graphs could not be compiled: MODULE_7470+3cc9a3cb",
        ),
        (
            "neuron-compiler",
            "ERROR ||NEURON_CC_WRAPPER||: Failed compilation with ['neuronx-cc', 'compile',"
            " '/tmp/model.MODULE_12338015013531573548+00875417.hlo_module.pb']",
        ),
        ("engine-lock", "Using /root/.cache/torch_extensions/py311 as PyTorch extensions root..."),
        ("engine-lock", "> compiling and loading fused kernels ..."),
        ("engine-lock", '  File "/opt/lib/torch/utils/file_baton.py", line 50 in wait'),
        (
            "engine-helper",  # core 0.12.0
            "ERROR:megatron.core.datasets.utils:Failed to compile the C++ dataset helper functions",
        ),
        ("engine-helper", "/usr/bin/python3: No module named pybind11"),
        ("engine-helper", "Making C++ dataset helpers module failed, exiting."),
        (
            "engine-helper",
            "ModuleNotFoundError: No module named 'megatron.core.datasets.helpers_cpp'",
        ),
        (
            "engine-data",  # core 0.12.0 and 0.16.1
            "[rank0]: AssertionError: One or both of the .idx and .bin files cannot be found at the"
            " path prefix /data/shakespeare_text_document.bin\nAttributeError: 'IndexedDataset'"
            " object has no attribute 'bin_reader'",
        ),
        (
            "engine-data",  # GPT-NeoX ea7aefd
            "[rank0]: AttributeError: 'NoneType' object has no attribute 'sizes'",
        ),
        (
            "nemo-resume",  # NeMo 1.12, exp_manager
            "ValueError: Multiple checkpoints [PosixPath('a-last.ckpt'), PosixPath('b-last.ckpt')]"
            " that matches *last.ckpt.",
        ),
        (
            "nemo-resume",  # NeMo 2.1
            "ValueError: Last checkpoint is unfinished and cannot be used to resume the training."
            " Please remove the checkpoint manually to avoid unexpected cosequences",
        ),
        (
            "nemo-key",  # hydra 1.1.2 and 1.3.2
            "hydra.errors.ConfigCompositionException: Could not override 'model.foo'.\nTo append to"
            " your config use +model.foo=3",
        ),
        (
            "nemo-key",
            "omegaconf.errors.ConfigAttributeError: Key 'foo' is not in struct\n    full_key: foo",
        ),
        (
            "nemo-apex",
            "ImportError: Apex was not found. Please see the NeMo README for installation"
            " instructions: https://github.com/NVIDIA/NeMo#megatron-gpt.",
        ),
        (
            "nemo-validation",  # pytorch-lightning 2.4
            "ValueError:  `val_check_interval` (400) must be less than or equal to the number of"
            " the training batches (40).",
        ),
        (
            "nemo-slurm",  # lightning 2.4
            "RuntimeError: You set `--ntasks=2` in your SLURM bash script, but this variable is not"
            " supported. HINT: Use `--ntasks-per-node=2` instead.",
        ),
        ("nemo-samples", "RuntimeError: no samples left to consume: 1024, 1024"),
        ("engine-vocabulary", "[rank0]: IndexError: index out of range in self"),
        (
            "engine-hub",  # core 0.16.1, offline
            "[rank0]: ValueError: Unable to instantiate HuggingFace AutoTokenizer for gpt2."
            " Exception: We couldn't connect to 'https://example.org' to load the files, and"
            " couldn't find them in the cached files.",
        ),
        (
            "engine-nan",
            "RuntimeError: Unexpected result nan (message='found NaN in local forward loss"
            " calculation')",
        ),
        (
            "engine-loss-scale",
            "Exception: Current loss scale already at minimum - cannot decrease scale anymore."
            " Exiting run.",
        ),
        (
            "engine-transformer-engine",  # core 0.12.0
            "[rank0]: RuntimeError: Invalid Transformer Engine version for FP8 distributed"
            " optimizer",
        ),
        (
            "engine-pipeline-evaluation",  # GPT-NeoX ea7aefd, DeepSpeed 0.19.8
            "[rank0]: TypeError: iteration over a 0-d tensor",
        ),
        (
            "engine-no-checkpoint",  # core 0.12.0, exit code 0
            "ERROR: Invalid metadata file /ck/latest_checkpointed_iteration.txt. Exiting",
        ),
        (
            "engine-weights-only",  # May 2021 with torch 2.13, exit code 0
            "could not load the checkpoint\nWeights only load failed. This file can still be",
        ),
        (
            "engine-no-checkpoint",
            "Unable to load optimizer from checkpoint /ck. Specify --no-load-optim or --finetune to"
            " prevent attempting to load the optimizer state, exiting ...",
        ),
        (
            "engine-no-checkpoint",  # core 0.12.0: an empty file, exit code 0
            " loading checkpoint from /ck at iteration 6\ncould not load the checkpoint\nRan out of"
            " input",
        ),
        ("engine-no-checkpoint", ">> '--exit-on-missing-checkpoint' set ... exiting. <<"),
        (
            "nccl-link",  # the reference runs on hosts without InfiniBand
            "NCCL WARN NET/IB : Got completion with error 12, opcode 0, len 0, vendor err 129",
        ),
        (
            "nccl-link",  # newer NCCL
            "NCCL WARN NET/IB: Got completion from peer 10.0.0.1<41811> with status=12 opcode=0",
        ),
        ("nccl", "NCCL WARN NET/IB : Got completion with error 129, opcode 0"),
        ("gpu-memory", "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."),
        ("import", "ModuleNotFoundError: No module named 'triton'"),  # core 0.16.1 asks for it
    ],
)
def test_what_engines_say_is_explained(name: str, text: str) -> None:
    assert rule_of(text) == name


@pytest.mark.parametrize(
    "text",
    [
        # fp16 finds its loss scale: DeepSpeed, Megatron-LM
        "[deepspeed] OVERFLOW! Rank 0 Skipping step. Attempted loss scale: 65536, reducing to"
        " 32768",
        "[deepspeed] OVERFLOW! Rank 0 Skipping step. Attempted loss scale: 4294967296, but"
        " hysteresis is 2. Reducing hysteresis to 1",
        " iteration        1/       6 | loss scale: 4294967296.0 | number of skipped iterations: "
        "  1 | number of nan iterations:   0 |",
        # a first run has no checkpoint to load
        "WARNING: could not find the metadata file /ck/latest_checkpointed_iteration.txt\n   "
        " will not load any checkpoints and will start from random",
        # a save and a build that ended
        "saving checkpoint at iteration       3 to /ck in torch_dist format\n  successfully saved"
        " checkpoint from iteration       3 to /ck [ t 1/1, p 1/1 ]",
        "Using /root/.cache/torch_extensions as PyTorch extensions root...\nLoading extension"
        " module utils...",
        "> compiling and loading fused kernels ...\n>>> done with compiling and loading fused"
        " kernels. Compilation time: 3.0 seconds",
        "make: Nothing to be done for 'default'.",
        "[exiting program at iteration 2] datetime: 2026-11-22 18:17:06 ",
    ],
)
def test_what_is_normal_is_no_failure(text: str) -> None:
    assert rule_of(text) is None


@pytest.mark.parametrize(
    "text",
    [
        "RuntimeError: DataLoader worker (pid 25832) is killed by signal: Killed. ",
        "RuntimeError: DataLoader worker (pid 7) is killed by signal: Bus error. It is possible"
        " that dataloader's workers are out of shared memory.",
        "RuntimeError: DataLoader worker (pid(s) 25832, 25833) exited unexpectedly",
    ],
)
def test_a_reader_of_data_that_was_killed_is_no_fault_of_the_job(text: str) -> None:
    rule = RULES.find(text, [])
    assert rule is not None and rule.failure_class == "infra"


def test_the_ranks_own_word_comes_before_a_stuck_save() -> None:
    saving = "saving checkpoint at iteration 3 to /ck in torch_dist format"
    rule = RULES.find("OSError: [Errno 28] No space left on device", [saving])
    assert rule is RULES.rules["disk-full"]
