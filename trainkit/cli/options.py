"""The options of tasks that take many: one dataclass a task, its fields are the flags."""

from __future__ import annotations

from dataclasses import dataclass

from trainkit.cli.help_texts import DATASET, DEVICE, PICTURE, STEP, TENSOR
from trainkit.experiment.options import flag


@dataclass(frozen=True)
class StatsOptions:
    """Those of `data-stats`."""

    job: str = flag("", DATASET["job"])
    count_only: bool = flag(
        False, "only count documents, sequences and tokens; reads the index alone"
    )
    samples: int = flag(3, "number of documents to show the beginning of", minimum=0)
    seed: int = flag(1234, "random seed for the choice of these documents", minimum=0)
    picture: str = flag("", PICTURE.format("lengths and token frequencies"))


@dataclass(frozen=True)
class LogOptions:
    """Those of `logs`."""

    rank: str = flag("", "ranks to show: 3, or 0,8-15, or failed")
    node: str = flag("", "only ranks on this host")
    attempt: int = flag(0, "attempt to show (0: the newest)", minimum=0)
    follow: bool = flag(False, "continue to print until the run ends")
    lines: int = flag(50, "number of last lines to print (0: all)", minimum=0)


@dataclass(frozen=True)
class SetupOptions:
    """Those of `setup-hosts`."""

    cluster: str = flag(
        "", "a cluster of jobs.toml with launcher ssh or pdsh (default: that of [defaults].job)"
    )
    hostfile: str = flag("", "use the hosts of this file; with --host: the file to write")
    host: tuple[str, ...] = flag(
        (), "[user@]host[:port] of a node, if there is no hostfile yet; may be repeated"
    )
    slots: int = flag(0, "with --host: ranks per node (0: as the cluster says)", minimum=0)
    share: str = flag("", "export this folder over NFS and mount it on the hosts at the same path")
    address: str = flag("", "address of this machine as the hosts reach it")
    perform: bool = flag(False, "run the steps instead of printing them")


@dataclass(frozen=True)
class ModelOptions:
    """Which checkpoint is loaded, and onto what."""

    step: int | None = flag(None, STEP, minimum=0)
    device: str = flag("", DEVICE)
    tensor_parallel: int = flag(1, TENSOR, minimum=1)


@dataclass(frozen=True)
class GenerateOptions(ModelOptions):
    """Those of `generate`."""

    prompt: tuple[str, ...] = flag(
        (), "text to continue; may be repeated (default: the model begins a document)"
    )
    prompts_file: str = flag("", 'more prompts, one per line: a JSON string, or {"prompt": "..."}')
    max_new_tokens: int = flag(64, "number of tokens to generate", minimum=1)
    temperature: float = flag(0.8, "sampling temperature; 0: greedy decoding", minimum=0)
    top_k: int = flag(50, "sample only among the K most likely tokens (0: all)", minimum=0)
    top_p: float = flag(
        1.0,
        "sample only among the most likely tokens with total probability P (1: all)",
        minimum=0,
    )
    seed: int = flag(0, "random seed of the sampling; the same for every prompt", minimum=0)


@dataclass(frozen=True)
class EvaluateOptions(ModelOptions):
    """Those of `evaluate`."""

    dataset: str = flag(
        "", "a dataset of jobs.toml with the run's tokenizer (default: the run's own)"
    )
    split: str = flag("valid", "train, valid or test")
    samples: int = flag(
        0, "number of samples of seq_length tokens, from the first (0: all)", minimum=0
    )


@dataclass(frozen=True)
class ExportOptions:
    """Those of `export`."""

    format: str = flag(
        "hf", "hf: weights, config and tokenizer as transformers' from_pretrained loads them"
    )
    to: str = flag("", "folder to write; it must not exist")
    step: int | None = flag(None, STEP, minimum=0)
    dtype: str = flag("fp32", "type of the weights: fp32, bf16 or fp16")
    shard_gb: float = flag(5.0, "maximum size of a weight file, in GB", minimum=1e-6)
