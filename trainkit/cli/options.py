"""The options of tasks that take many: one dataclass a task, its fields are the flags. And the
help of arguments that several tasks share."""

from __future__ import annotations

from trainkit.base.lazy_dataclasses import dataclass
from trainkit.experiment.options import flag

JOB = {"job": "a job of jobs.toml"}
RUN = {"run": "a run's id or a unique prefix of it, a job's name (its newest run), or last"}
SET = {"set": "KEY=VALUE, such as training.lr=3e-4: override a value of the job; may be repeated"}
DATASET = {
    "dataset": "a prepared dataset of jobs.toml",
    "job": "look below the root of this job's cluster (default: below this folder)",
}
FORCE = {"force": "build again even if it is up to date"}
STEP = "step of the checkpoint (default: the newest valid one)"
WEIGHTS = "trained, ema (training.ema_decay) or average (made by `average`)"
CLUSTER = {"cluster": "a cluster of jobs.toml (default: that of [defaults].job)"}
HOSTFILE = {"hostfile": "use this hostfile instead of the cluster's"}
DEVICE = "cpu or cuda (default: that of the job's cluster)"
TENSOR = "split the model over so many ranks of this machine, if one device is too small"
FLOPS = "also count TFLOP/s by this convention: megatron-2021, palm-6n or gpt-neox-2022"
PICTURE = "also draw {} as this .svg or .png file (needs the extra `report`)"


@dataclass(frozen=True, kw_only=True)
class StatsOptions:
    """Those of `data-stats`."""

    job: str = flag(DATASET["job"], default="")
    count_only: bool = flag(
        "only count documents, sequences and tokens; reads the index alone", default=False
    )
    samples: int = flag(
        "number of documents to show the beginning of; with --curation: for each reason",
        default=3,
        minimum=0,
    )
    seed: int = flag("random seed for the choice of these documents", default=1234, minimum=0)
    curation: bool = flag(
        "show what each step of curation let through, and why it left out the rest",
        default=False,
    )
    picture: str = flag(
        PICTURE.format("lengths and token frequencies, or what steps of curation let through,"),
        default="",
    )


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """Those of `plan`."""

    nodes: str = flag(
        "number of nodes (default: as the job says); with --search also a range: 2..64", default=""
    )
    cluster: str = flag("plan for this cluster of jobs.toml", default="")
    set: tuple[str, ...] = flag(SET["set"], default=())
    explain: str = flag(
        "time: what a predicted step's time is spent on; optimizer: what updates each parameter",
        default="",
    )
    search: bool = flag("rank all layouts that the job could have", default=False)
    price_per_gpu_hour: float = flag(
        "with --search: say what each layout costs", default=0.0, minimum=0
    )
    picture: str = flag(
        "with --search: "
        + PICTURE.format("memory against speed, scaling over nodes and where a step's time goes"),
        default="",
    )
    write: str = flag(
        "with --search: add the fastest layout to jobs.local.toml as a job of this name", default=""
    )


@dataclass(frozen=True, kw_only=True)
class CoordCheckOptions:
    """Those of `coord-check`."""

    set: tuple[str, ...] = flag(SET["set"], default=())
    widths: str = flag("hidden sizes, such as 64,128,256 (default: up to 1024)", default="")
    html: str = flag("write the curves as one .html file", default="")


@dataclass(frozen=True, kw_only=True)
class ScaleOptions:
    """Those of `scale`."""

    job: str = flag("the job whose shape, data and cluster the sizes have", default="")
    set: tuple[str, ...] = flag(
        "KEY=VALUE: override a value of all sizes; may be repeated", default=()
    )
    tokens_per_parameter: float = flag(
        "how many tokens a size is trained on", default=20.0, minimum=0.01
    )
    law: str = flag(
        "a file of scaling-law: size and tokens by the least loss it says for the budget",
        default="",
    )
    rule: str = flag("of batch and learning rate: nanochat, deepseek, step-law", default="nanochat")
    ladder: str = flag("depths to measure, such as 4,6,8 (default: five, up to half)", default="")
    price_per_gpu_hour: float = flag(
        "what a device costs an hour, in the budget's dollars", default=0.0, minimum=0
    )
    picture: str = flag("with --law: " + PICTURE.format("loss against cost"), default="")
    write: str = flag("write the jobs as a .toml file, which `include` can name", default="")


@dataclass(frozen=True, kw_only=True)
class SweepTaskOptions:
    """Those of `sweep`."""

    set: tuple[str, ...] = flag(
        "KEY=VALUE: override a value of all its runs; may be repeated", default=()
    )
    show: bool = flag("only show what the newest sweep has come to", default=False)
    new: bool = flag("begin again, whatever there is already", default=False)
    failed: bool = flag("go on with runs that ended by their own fault, too", default=False)
    detach: bool = flag("return as soon as the queue has the runs", default=False)
    html: str = flag("write table, picture and curves as one .html file", default="")
    svg: str = flag("draw all runs, a line each over an axis a key, as an .svg file", default="")
    best: str = flag(
        "write the winner by training_loss, validation_loss or tokens_per_second as a job",
        default="",
    )
    write: str = flag(
        "with --best: name of that job in jobs.local.toml (default: JOB-best)", default=""
    )


@dataclass(frozen=True, kw_only=True)
class LogOptions:
    """Those of `logs`."""

    rank: str = flag("ranks to show: 3, or 0,8-15, or failed", default="")
    node: str = flag("only ranks on this host", default="")
    attempt: int = flag("attempt to show (0: the newest)", default=0, minimum=0)
    follow: bool = flag("continue to print until the run ends", default=False)
    lines: int = flag("number of last lines to print (0: all)", default=50, minimum=0)


@dataclass(frozen=True, kw_only=True)
class SetupOptions:
    """Those of `setup-hosts`."""

    cluster: str = flag(
        "a cluster of jobs.toml with launcher ssh or pdsh (default: that of [defaults].job)",
        default="",
    )
    hostfile: str = flag("use the hosts of this file; with --host: the file to write", default="")
    host: tuple[str, ...] = flag(
        "[user@]host[:port] of a node, if there is no hostfile yet; may be repeated", default=()
    )
    slots: int = flag("with --host: ranks per node (0: as the cluster says)", default=0, minimum=0)
    share: str = flag(
        "export this folder over NFS and mount it on the hosts at the same path", default=""
    )
    address: str = flag("address of this machine as the hosts reach it", default="")
    perform: bool = flag("run the steps instead of printing them", default=False)


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """Which checkpoint is loaded, and onto what."""

    step: int | None = flag(STEP, default=None, minimum=0)
    weights: str = flag(WEIGHTS, default="trained")
    device: str = flag(DEVICE, default="")
    tensor_parallel: int = flag(TENSOR, default=1, minimum=1)


@dataclass(frozen=True, kw_only=True)
class GenerateOptions(ModelOptions):
    """Those of `generate`."""

    prompt: tuple[str, ...] = flag(
        "text to continue; may be repeated (default: the model begins a document)", default=()
    )
    prompts_file: str = flag(
        'more prompts, one per line: a JSON string, or {"prompt": "..."}', default=""
    )
    max_new_tokens: int = flag("number of tokens to generate", default=64, minimum=1)
    temperature: float = flag("sampling temperature; 0: greedy decoding", default=0.8, minimum=0)
    top_k: int = flag("sample only among the K most likely tokens (0: all)", default=50, minimum=0)
    top_p: float = flag(
        "sample only among the most likely tokens with total probability P (1: all)",
        default=1.0,
        minimum=0,
    )
    seed: int = flag("random seed of the sampling; the same for every prompt", default=0, minimum=0)


@dataclass(frozen=True, kw_only=True)
class EvaluateOptions(ModelOptions):
    """Those of `evaluate`."""

    dataset: str = flag(
        "a dataset of jobs.toml with the run's tokenizer (default: the run's own)", default=""
    )
    split: str = flag("train, valid or test", default="valid")
    samples: int = flag(
        "number of samples of seq_length tokens, from the first (0: all)", default=0, minimum=0
    )
    pending: bool = flag(
        "instead make the evaluations of the job that are due and have no scores yet",
        default=False,
    )


@dataclass(frozen=True, kw_only=True)
class ExportOptions:
    """Those of `export`."""

    format: str = flag(
        "hf: weights, config and tokenizer as transformers' from_pretrained loads them",
        default="hf",
    )
    to: str = flag("folder to write; it must not exist", default="")
    step: int | None = flag(STEP, default=None, minimum=0)
    weights: str = flag(WEIGHTS, default="trained")
    dtype: str = flag("type of the weights: fp32, bf16 or fp16", default="fp32")
    shard_gb: float = flag("maximum size of a weight file, in GB", default=5.0, minimum=1e-6)


@dataclass(frozen=True, kw_only=True)
class ConvertOptions:
    """Those of `convert`."""

    to: str = flag("format to write: hf, megatron-lm or gpt-neox", default="")
    out: str = flag("folder to write; it must be new or empty", default="")
    step: int | None = flag(STEP, default=None, minimum=0)
    dtype: str = flag("type of the weights: fp32, bf16 or fp16", default="fp32")
    tensor_parallel_size: int = flag(
        "megatron-lm, gpt-neox: number of tensor-parallel ranks that will load it",
        default=1,
        minimum=1,
    )
    pipeline_parallel_size: int = flag(
        "megatron-lm, gpt-neox: number of pipeline stages that will load it (0: gpt-neox without a"
        " pipeline)",
        default=1,
        minimum=0,
    )
    expert_parallel_size: int = flag(
        "megatron-lm: number of ranks that the experts of a layer will lie on",
        default=1,
        minimum=1,
    )
    names: str = flag(
        "names of tensors; megatron-lm: local (default) or transformer_engine; gpt-neox: linear1"
        " (default) or dense_h_to_4h (before 2024-09)",
        default="",
    )
    shard_gb: float = flag("hf: maximum size of a weight file, in GB", default=5.0, minimum=1e-6)
