"""The options of tasks that take many: one dataclass a task, its fields are the flags."""

from __future__ import annotations

from dataclasses import dataclass

from trainkit.cli.help_texts import DATASET, DEVICE, PICTURE, STEP, TENSOR
from trainkit.cli.parameters import option


@dataclass(frozen=True)
class StatsOptions:
    """Those of `data-stats`."""

    job: str = option("", DATASET["job"])
    count_only: bool = option(
        False, "only count documents, sequences and tokens; reads the index alone"
    )
    samples: int = option(3, "number of documents to show the beginning of", minimum=0)
    seed: int = option(1234, "random seed for the choice of these documents", minimum=0)
    picture: str = option("", PICTURE.format("lengths and token frequencies"))


@dataclass(frozen=True)
class LogOptions:
    """Those of `logs`."""

    rank: str = option("", "ranks to show: 3, or 0,8-15, or failed")
    node: str = option("", "only ranks on this host")
    attempt: int = option(0, "attempt to show (0: the newest)", minimum=0)
    follow: bool = option(False, "continue to print until the run ends")
    lines: int = option(50, "number of last lines to print (0: all)", minimum=0)


@dataclass(frozen=True)
class SetupOptions:
    """Those of `setup-hosts`."""

    cluster: str = option(
        "", "a cluster of jobs.toml with launcher ssh or pdsh (default: that of [defaults].job)"
    )
    hostfile: str = option("", "use the hosts of this file; with --host: the file to write")
    host: tuple[str, ...] = option(
        (), "[user@]host[:port] of a node, if there is no hostfile yet; may be repeated"
    )
    slots: int = option(0, "with --host: ranks per node (0: as the cluster says)", minimum=0)
    share: str = option(
        "", "export this folder over NFS and mount it on the hosts at the same path"
    )
    address: str = option("", "address of this machine as the hosts reach it")
    perform: bool = option(False, "run the steps instead of printing them")


@dataclass(frozen=True)
class ModelOptions:
    """Which checkpoint is loaded, and onto what."""

    step: int | None = option(None, STEP, minimum=0)
    device: str = option("", DEVICE)
    tensor_parallel: int = option(1, TENSOR, minimum=1)


@dataclass(frozen=True)
class GenerateOptions(ModelOptions):
    """Those of `generate`."""

    prompt: tuple[str, ...] = option(
        (), "text to continue; may be repeated (default: the model begins a document)"
    )
    prompts_file: str = option(
        "", 'more prompts, one per line: a JSON string, or {"prompt": "..."}'
    )
    max_new_tokens: int = option(64, "number of tokens to generate", minimum=1)
    temperature: float = option(0.8, "sampling temperature; 0: greedy decoding", minimum=0)
    top_k: int = option(50, "sample only among the K most likely tokens (0: all)", minimum=0)
    top_p: float = option(
        1.0,
        "sample only among the most likely tokens with total probability P (1: all)",
        minimum=0,
    )
    seed: int = option(0, "random seed of the sampling; the same for every prompt", minimum=0)


@dataclass(frozen=True)
class EvaluateOptions(ModelOptions):
    """Those of `evaluate`."""

    dataset: str = option(
        "", "a dataset of jobs.toml with the run's tokenizer (default: the run's own)"
    )
    split: str = option("valid", "train, valid or test")
    samples: int = option(
        0, "number of samples of seq_length tokens, from the first (0: all)", minimum=0
    )


@dataclass(frozen=True)
class ExportOptions:
    """Those of `export`."""

    format: str = option(
        "hf", "hf: weights, config and tokenizer as transformers' from_pretrained loads them"
    )
    to: str = option("", "folder to write; it must not exist")
    step: int | None = option(None, STEP, minimum=0)
    dtype: str = option("fp32", "type of the weights: fp32, bf16 or fp16")
    shard_gb: float = option(5.0, "maximum size of a weight file, in GB", minimum=1e-6)
