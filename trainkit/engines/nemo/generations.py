"""What differs between the two launchers whose jobs are known: that of bignlp 22.09, with NeMo
1.12 and pytorch-lightning 1.7, and that of 24.12, with NeMo 2.1 and lightning 2.4.

Sources: NeMo-Framework-Launcher at 0d03943e (bignlp/core/stages.py, conf/config.yaml,
conf/training/gpt3) and at tag 24.12 (launcher_scripts/nemo_launcher/core/stages.py); the scripts
that both write were looked at.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from trainkit.base.lazy_dataclasses import dataclass, field
from trainkit.engines.options import release

ENGINE = "nemo"
RELEASES = ((1, 12), (2, 1))  # of NeMo, in bignlp 22.09 and in 24.12


@dataclass(frozen=True)
class NemoGeneration:
    """One of them.

    Args:
        version: its release, which names its table of options.
        tree: where NeMo lies in its image.
        devices: CUDA_VISIBLE_DEVICES of eight ranks on a node.
        sampler: the trainer's name of what NeMo switches off.
        optimizers: by parallelism.zero_stage.
        model: keys of `model` with the values that all of the launcher's files have, and NeMo's
            own files have not.
        optimizer: the same of `model.optim`, with the distributed optimizer.
        environment: variables that its scripts export.
        saves_on_term: exp_manager saves and ends when rank 0 gets TERM.
    """

    version: str
    tree: str
    devices: str
    sampler: str
    optimizers: tuple[str, str]
    model: Mapping[str, object] = field(default_factory=dict)
    optimizer: Mapping[str, object] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    saves_on_term: bool = False

    @property
    def core(self) -> bool:
        """It trains with megatron.core, and writes distributed checkpoints."""
        return bool(self.model.get("mcore_gpt"))


BIGNLP = NemoGeneration(
    version="22.09",
    tree="/opt/bignlp/NeMo",
    # the order in which a DGX A100's GPUs share their links to the host
    devices="0,4,2,6,1,5,3,7",
    sampler="replace_sampler_ddp",
    optimizers=("fused_adam", "distributed_fused_adam"),
)
LAUNCHER_24 = NemoGeneration(
    version="24.12",
    tree="/opt/NeMo",
    devices="0,1,2,3,4,5,6,7",
    sampler="use_distributed_sampler",
    optimizers=("fused_adam", "mcore_distributed_optim"),
    model={
        "bias_activation_fusion": True,
        "bias_dropout_add_fusion": True,
        "masked_softmax_fusion": True,
        "fsdp": False,
        "fsdp_sharding_strategy": "full",
        "fsdp_grad_reduce_dtype": 32,
        "fsdp_sharded_checkpoint": False,
        "num_micro_batches_with_partial_activation_checkpoints": None,
        "activations_checkpoint_layers_per_pipeline": None,
        "sharp": False,
        "mcore_gpt": True,
        "transformer_engine": True,
        "fp8": False,
        "fp8_e4m3": False,
        "fp8_hybrid": True,
        "fp8_margin": 0,
        "fp8_interval": 1,
        "fp8_amax_history_len": 1024,
        "fp8_amax_compute_algo": "max",
        "fp8_wgrad": True,
        "ub_tp_comm_overlap": False,
        "sync_batch_comm": False,
    },
    optimizer={
        "bucket_cap_mb": 200,
        "overlap_grad_sync": True,
        "overlap_param_sync": True,
        "contiguous_grad_buffer": True,
    },
    environment={
        "TRANSFORMERS_OFFLINE": "0",
        "TORCH_NCCL_AVOID_RECORD_STREAMS": "1",
        "NCCL_NVLS_ENABLE": "0",
    },
    saves_on_term=True,
)
GENERATIONS = {each.version: each for each in (BIGNLP, LAUNCHER_24)}
# numa_mapping of both launchers' conf/config.yaml
NUMA: Mapping[str, bool | int | str] = {
    "enable": True,
    "mode": "unique_contiguous",
    "scope": "node",
    "cores": "all_logical",
    "balanced": True,
    "min_cores": 1,
    "max_cores": 8,
}
# where the images have it (_nemo_code_path of both launchers)
IN_IMAGES = {each.tree: each.version for each in GENERATIONS.values()}


def generation_of(version: str) -> NemoGeneration:
    """The newest known one that is not newer than `version`, or the oldest."""
    found = BIGNLP
    for each in GENERATIONS.values():
        if release(each.version) <= release(version):
            found = each
    return found


def launcher_folder(generation: NemoGeneration) -> Path:
    """Where the image has the launcher's own scripts."""
    if generation is BIGNLP:
        return Path("/opt/bignlp/bignlp-scripts")
    return Path("/opt/NeMo-Framework-Launcher/launcher_scripts")
