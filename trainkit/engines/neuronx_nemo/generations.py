"""What the two generations of neuronx-nemo-megatron's scripts set: environment and precision;
and the engine's rules for `trainkit.plan`.

Sources: nemo/examples/nlp/language_modeling/train_setup.sh and compile.slurm at f4743ce (2024-12,
the merge of 2.21_release), test.sh and compile.slurm of the branch 2.13.1_release (2023-08).
Variables that the scripts export and only they themselves read (TP, OPTIM_NAME, ...) are left out.
"""

from __future__ import annotations

from collections.abc import Mapping

from trainkit.base.lazy_dataclasses import dataclass, replace
from trainkit.engines.options import release
from trainkit.engines.rules import FP32, PUBLISHED, WRITTEN
from trainkit.plan.rules import StateBytes

ENGINE = "neuronx-nemo"
# engine_args: the scripts' own variable of this name
PRECISION_KEY = "training_precision"

RULES = replace(
    PUBLISHED,
    engine="neuronx-nemo",
    families=("gpt",),  # conf/megatron_gpt_config.yaml, which its GPT scripts read
    uneven_stages=False,
    whole_rounds=True,
    zero_stages=(0, 1),  # wrap_with_zero
    zero_in_pipeline=(0, 1),
    pads_weights=True,
    # XLA_USE_BF16: all tensors are bf16 on the device
    states={"fp16": StateBytes(2, 2, 0, 2), "bf16": StateBytes(2, 2, 0, 2), "fp32": FP32},
    saves_scores=True,
    logit_bytes=10,
    # as NeMo, which it is made from; no size of its own is published
    checkpoint_weights=WRITTEN,
    saves_key="exp_manager.create_checkpoint_callback",
    save_seconds=3600,  # its scripts' train_time_interval
)


@dataclass(frozen=True)
class Precision:
    """One value of `training_precision`.

    Args:
        name: as train_setup.sh has it.
        env: variables of it alone.
        optimizer: model.optim.name.
        amp_o2: model.megatron_amp_O2.
        zero: model.wrap_with_zero and zero_use_master_weight.
        compiler: the end of NEURON_CC_FLAGS.
    """

    name: str
    env: Mapping[str, str]
    optimizer: str = "adamw"
    amp_o2: bool = False
    zero: bool = False
    compiler: str = "--enable-mixed-precision-accumulation"


_DOWNCAST = {"XLA_DOWNCAST_BF16": "1"}
PRECISIONS = {
    each.name: each
    for each in (
        Precision("bf16SR", {"XLA_USE_BF16": "1"}),
        Precision("fp32_ZeroOptMaster", _DOWNCAST, zero=True),
        Precision(
            "fp32_ZeroOptMasterGradAcc",
            {
                **_DOWNCAST,
                # the scripts export it, and nothing at f4743ce reads it: kept as they have it
                "zero_use_fp32_grad_accum": "true",
                "NEURON_RT_STOCHASTIC_ROUNDING_EN": "0",
            },
            zero=True,
        ),
        Precision("megatron_amp_O2", _DOWNCAST, amp_o2=True),
        Precision("fp32_OptStates", _DOWNCAST, optimizer="adamw_fp32OptState"),
        Precision("fp32", {"XLA_USE_BF16": "0"}, compiler="--auto-cast none"),
    )
}
# training.precision by itself: the mode it stands for
USUAL = {"bf16": "bf16SR", "fp32": "fp32"}

_BOTH = {
    "FI_EFA_USE_DEVICE_RDMA": "1",
    "FI_PROVIDER": "efa",
    "FI_EFA_FORK_SAFE": "1",
    "HYDRA_FULL_ERROR": "1",
    "NEURON_TRANSFER_WITH_STATIC_RING_OPS": "",  # set, and empty
    "MALLOC_ARENA_MAX": "128",  # the first release set ALLOC_ARENA_MAX by mistake
    "NEURON_RT_STOCHASTIC_ROUNDING_EN": "1",
    # on the home that all nodes share, so that each graph is compiled once
    "NEURON_COMPILE_CACHE_URL": "${node:HOME}/neuron_cache",
}


@dataclass(frozen=True)
class ScriptGeneration:
    """One generation of the scripts.

    Args:
        version: of the table of its options.
        env: variables of every run.
        compiler: the beginning of NEURON_CC_FLAGS.
        precisions: the modes it has.
        compile_env: variables that compile.slurm adds.
        last_validation: steps beyond the last at which the first validation would be.
        sets_precision: its command line says model.megatron_amp_O2 and the ZeRO modes.
        saves: it writes checkpoints unless it is asked not to.
        save_xser: model.save_xser.
        load_xser: model.load_xser is said in every run.
        lustre: it caps what each connection to Lustre holds back.
    """

    version: str
    env: Mapping[str, str]
    compiler: str
    precisions: tuple[str, ...]
    compile_env: Mapping[str, str]
    last_validation: int
    sets_precision: bool
    saves: bool
    save_xser: bool
    load_xser: bool
    lustre: bool


GENERATIONS = (
    ScriptGeneration(
        version="2.13.1",
        env={
            **_BOTH,
            "NEURON_RT_EXEC_TIMEOUT": "10",
            "NEURON_RT_ASYNC_EXEC_MAX_INFLIGHT_REQUESTS": "3",
            "TF_NUM_INTEROP_THREADS": "8192",
        },
        compiler="--model-type transformer --distribution-strategy=nemo",
        precisions=("bf16SR",),
        compile_env={},
        last_validation=0,
        sets_precision=False,
        saves=False,
        save_xser=False,
        load_xser=False,
        lustre=False,
    ),
    ScriptGeneration(
        version="2.21",
        env={
            **_BOTH,
            "NEURON_RT_EXEC_TIMEOUT": "100",
            "NEURON_RT_ASYNC_EXEC_MAX_INFLIGHT_REQUESTS": "5",
            "NEURON_FUSE_SOFTMAX": "1",
            "BUCKET_CAP_MB": "1024",
            "TF_NUM_INTEROP_THREADS": "1024",
            "XLA_THREAD_POOL_SIZE": "4",
            "XLA_IO_THREAD_POOL_SIZE": "4",
        },
        compiler="--model-type transformer --distribution-strategy=llm-training",
        precisions=tuple(PRECISIONS),
        compile_env={"NEURON_PARALLEL_COMPILE_DUMP_RESULTS": "1"},
        last_validation=1,
        sets_precision=True,
        saves=True,
        save_xser=True,
        load_xser=True,
        lustre=True,
    ),
)


def generation_of(version: str) -> ScriptGeneration:
    """The scripts of a version: those of the nearest older one, or of the oldest."""
    near = GENERATIONS[0]
    for each in GENERATIONS:
        if release(each.version) <= release(version):
            near = each
    return near


def environment_of(
    generation: ScriptGeneration, precision: Precision, *, compiling: bool
) -> dict[str, str]:
    """The variables of a run.

    Args:
        generation: of the scripts.
        precision: the mode.
        compiling: graphs are compiled instead of training.
    """
    flags = generation.compiler
    if generation.sets_precision:
        flags = f"{flags} {precision.compiler}"
    found = {**generation.env, "NEURON_CC_FLAGS": flags, **precision.env}
    if compiling:
        found |= generation.compile_env
    return found
