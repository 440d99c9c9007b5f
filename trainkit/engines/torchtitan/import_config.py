"""A configuration of torchtitan's as a job: a command line or script that runs torchtitan.train
with --module and --config, whose function is asked in torchtitan's own interpreter.

Sources: torchtitan 0.3.0, config/configs.py, components/optimizer/{optimizer,lr_scheduler}.py.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from trainkit.base.errors import ConfigError
from trainkit.base.lazy_dataclasses import dataclass, field
from trainkit.engines.imported import (
    ImportedJob,
    ImportRequest,
    ask_engine,
    refused_by_engine,
)
from trainkit.engines.options import OptionTable
from trainkit.engines.rank.torchtitan import MARK
from trainkit.engines.shell_words import ShellCommand, command_of, torchrun_nodes
from trainkit.engines.torchtitan.values import SET_BY

PROGRAM = "torchtitan.train"
# nothing of the folder that the caller stands in
ASK = (
    "import sys; sys.path.remove('');"
    " from trainkit.engines.torchtitan.inside.describe import main; main()"
)
BOXED = re.compile(r"^│ (.*?) *│$", re.MULTILINE)  # how tyro prints a refusal
ROOT = Path(__file__).resolve().parents[3]
OWN_WORDS = ("source", "python")
ALL_WORDS = ("$@", "${@}", "$*")  # what a script's caller adds
# keys of the same meaning and value
SAME = {
    "training.steps": "training.train_iters",
    "training.max_norm": "training.clip_grad",
    "lr_scheduler.warmup_steps": "training.lr_warmup_iters",
    "lr_scheduler.total_steps": "training.lr_decay_iters",
    "training.seq_len": "model.seq_length",
    "metrics.log_freq": "training.log_interval",
    "debug.seed": "training.seed",
    "debug.deterministic": "training.deterministic",
    "compile.enable": "training.compile",
    "parallelism.tensor_parallel_degree": "parallelism.tensor_model_parallel_size",
    "parallelism.pipeline_parallel_degree": "parallelism.pipeline_model_parallel_size",
    "parallelism.context_parallel_degree": "parallelism.context_parallel_size",
}
MODEL = {
    "family": "family",
    "n_layers": "num_layers",
    "dim": "hidden_size",
    "n_heads": "num_attention_heads",
    "n_kv_heads": "num_query_groups",
    "hidden_dim": "ffn_hidden_size",
    "vocab_size": "vocab_size",
    "theta": "rotary_base",
    "eps": "layernorm_epsilon",
}
# what the job's configuration has whatever is said, and why
FIXED: dict[str, tuple[object, str]] = {
    "checkpoint.enable": (True, "trainkit saves at the end of a run"),
    "checkpoint.last_save_model_only": (False, "the last checkpoint has the optimizer too"),
    "checkpoint.load_step": (-1, "trainkit says with which one a run goes on"),
    "training.disable_cuda_graphs": (True, "the job runs without CUDA graphs"),
    "debug.enable_structured_logging": (False, "trainkit keeps its own record"),
    "parallelism.expert_parallel_degree": (1, "experts are not trained by this version"),
    "loss": ("ChunkedLossWrapper.Config", "the job has that of chunks"),
    "loss.loss_fn": ("CrossEntropyLoss.Config", "the job has cross entropy"),
}
PLACES = ("hf_assets_path", "dump_folder", "checkpoint.folder")
# parts that trainkit has its own for
OWN = {
    "dataloader": "trainkit reads prepared text: [datasets.X]",
    "tokenizer": "trainkit's tokens are made before: [tokenizers.X]",
    "validator.dataloader": "it is the validation part of the job's dataset",
}
SHAPES = {"linear": "linear", "cosine": "cosine", "sqrt": "minus_sqrt"}  # of a decay
RECOMPUTED = {"FullAC.Config": "full", "SelectiveAC.Config": "selective", None: "none"}


@dataclass
class Said:
    """What a configuration says, and what of it has no place.

    Args:
        options: by dotted name, the value, and whether it is the default.
        job: keys of the job's tables, by table and key.
        not_taken: a line each.
    """

    options: dict[str, tuple[Any, bool]]
    job: dict[str, object] = field(default_factory=dict)
    not_taken: list[str] = field(default_factory=list)

    def take(self, name: str) -> Any:
        """An option's value, which is accounted for then; None where there is no such."""
        return self.options.pop(name, (None, True))[0]

    def leave(self, name: str, value: object, why: str) -> None:
        """An option that has no place."""
        self.not_taken.append(f"{name} = {json.dumps(value)}: {why}")

    def table(self, name: str) -> dict[str, object]:
        """The keys of a table of the job."""
        return {
            key.partition(".")[2]: value
            for key, value in self.job.items()
            if key.partition(".")[0] == name and value is not None
        }


def import_torchtitan(request: ImportRequest, table: OptionTable) -> ImportedJob:
    """The job that a configuration stands for.

    Args:
        request: a script, or the tree itself; of its words `source` and `python` say where
            torchtitan and its interpreter are.
        table: options of the command line.

    Raises ConfigError: nothing runs torchtitan, its program fails, or the model is of another kind.
    """
    path = request.only_file("torchtitan")
    given = dict(word.split("=", 1) for word in request.words)
    own = {name: given.pop(name) for name in OWN_WORDS if name in given}
    if path.is_dir():
        if not {"module", "config"} <= given.keys():
            raise ConfigError(
                "which configuration is not said", hint=f"{path},module=llama3,config=llama3_8b"
            )
        command = ShellCommand(words=[_word(name, value) for name, value in given.items()])
        own.setdefault("source", str(path))
    else:
        command = command_of(path, PROGRAM, given)
    if "source" not in own:
        raise ConfigError(
            "where torchtitan is, is not known", hint=f"{path},source=/opt/torchtitan,python=..."
        )
    if not (Path(own["source"]) / "torchtitan" / "train.py").is_file():
        raise ConfigError(f"source={own['source']} is no tree of torchtitan")
    command.words = list(_known(command.words))
    described = _asked(own["source"], own.get("python", "python3"), command.words)
    if described["why"]:
        raise ConfigError(f"{' '.join(command.words)}: {described['why']}")
    said = Said({name: tuple(each) for name, each in described["options"].items()})
    said.not_taken += [f"{each}: its value is not in the file" for each in command.unknown]
    said.not_taken += command.notes
    _fill(said, described["model"])
    for name, (theirs, ours) in described["differences"].items():
        why = f"the job's model has {json.dumps(ours)}"
        said.leave(f"model.{name}", theirs, why)
    engine_args = _rest(said, table)
    job = torchrun_nodes(command, said.not_taken)
    said.not_taken += [
        f"export {name}: set it in env, or in clusters.X.env" for name in command.environment
    ]
    return ImportedJob(
        name=request.name or _named(command.words) or request.job_name,
        engine="torchtitan",
        model=said.table("model"),
        job=job | said.table("job"),
        parallelism=said.table("parallelism"),
        training=said.table("training"),
        engine_args=engine_args,
        not_taken=tuple(said.not_taken),
    )


def _word(name: str, value: str) -> str:
    """An option as tyro reads it: a switch has two names."""
    if value.lower() not in ("true", "false"):
        return f"--{name}={value}"
    section, _, last = name.rpartition(".")
    return f"--{name}" if value.lower() == "true" else f"--{section}.no-{last}"


def _known(words: Sequence[str]) -> Iterator[str]:
    """Words without those whose value only the script's caller knows, and their options."""
    for number, word in enumerate(words):
        after = words[number + 1] if number + 1 < len(words) else ""
        unknown = "$" in word or "`" in word
        valueless = word.startswith("--") and "=" not in word
        asks = valueless and ("$" in after or "`" in after) and after not in ALL_WORDS
        if not (unknown or asks):
            yield word


def _named(words: Sequence[str]) -> str:
    """The configuration's own name, as a job can have it."""
    parts = [part for word in words for part in word.split("=", 1)]
    found = next((b for a, b in itertools.pairwise(parts) if a == "--config"), "")
    return found.replace("_", "-").lower()


def _asked(source: str, python: str, words: Sequence[str]) -> Mapping[str, Any]:
    """What torchtitan itself makes of the words. Raises ConfigError with its last line."""
    done = ask_engine([python, "-c", ASK, *words], [str(ROOT), source])
    _, mark, found = done.stdout.rpartition(MARK)
    if done.returncode or not mark:
        text = done.stderr or done.stdout
        last = [
            line for line in BOXED.findall(text) if "─" not in line
        ] or text.strip().splitlines()[-1:]
        message = f"torchtitan in {source} does not take {' '.join(words)}: {' '.join(last)}"
        raise refused_by_engine(message, text, "torchtitan")
    described: Mapping[str, Any] = json.loads(found.splitlines()[0])
    return described


def _fill(said: Said, shape: Mapping[str, Any]) -> None:
    """All that has a key."""
    for name, key in SAME.items():
        said.job[key] = said.take(name)
    if said.job["training.seed"] is None:
        said.leave("debug.seed", None, "a job always has one: training.seed")
    _model(said, shape)
    _batch(said)
    _optimizer(said)
    _rates(said)
    _layout(said)
    _evaluations(said)
    if said.job["training.clip_grad"] == 0:
        said.leave("training.max_norm", 0, "torchtitan makes gradients 0, the job does not clip")
    _checkpoints(said)


def _checkpoints(said: Said) -> None:
    """Without checkpoints torchtitan loads nothing either."""
    names = ("interval", "keep_latest_k", "async_mode", "initial_load_path", "initial_load_in_hf")
    given = {name: said.options.get(f"checkpoint.{name}", (None, True)) for name in names}
    values = {name: said.take(f"checkpoint.{name}") for name in names[:3]}
    path = given["initial_load_path"][0]
    if not said.options["checkpoint.enable"][0]:
        for name, (value, usual) in given.items():
            said.take(f"checkpoint.{name}")
            if not usual:
                said.leave(f"checkpoint.{name}", value, "not read where checkpoint.enable is false")
        return
    keep = values["keep_latest_k"]
    said.job["training.save_interval"] = values["interval"]
    said.job["job.checkpoint"] = {
        "keep_last": keep or 2,
        "save_async": values["async_mode"] != "disabled",
    }
    if keep == 0:
        said.leave("checkpoint.keep_latest_k", 0, "it keeps all, the job as keep_last says")
    if values["async_mode"] == "async_with_pinned_mem":
        said.leave("checkpoint.async_mode", values["async_mode"], "the job has async")
    if given["initial_load_in_hf"][0]:
        said.job["job.init_from"] = path or said.options["hf_assets_path"][0]
        for name in ("initial_load_path", "initial_load_in_hf", "initial_load_model_only"):
            said.take(f"checkpoint.{name}")


def _model(said: Said, shape: Mapping[str, Any]) -> None:
    for name, key in MODEL.items():
        said.job[f"model.{key}"] = shape[name]
    if shape["head_dim"] * shape["n_heads"] != shape["dim"]:
        said.job["model.kv_channels"] = shape["head_dim"]
    said.job["model.untie_embeddings_and_output_weights"] = not shape["tied"]
    if scaling := dict(shape["scaling"]):
        del scaling["scaling"]
        factor = scaling.pop("scaling_factor")
        said.job["model.rope_scaling"] = {"type": "llama3", "factor": factor, **scaling}
    said.take("loss.loss_fn.global_vocab_size")


def _batch(said: Said) -> None:
    local = said.take("training.local_batch_size")
    micro = said.take("parallelism.pipeline_parallel_microbatch_size")
    stages = said.job["parallelism.pipeline_model_parallel_size"]
    staged = isinstance(stages, int) and stages > 1
    said.job["training.micro_batch_size"] = micro if staged else local
    if staged and local != micro:
        said.leave(
            "training.local_batch_size", local, "all of a step's micro-batches go through at once"
        )
    whole = said.take("training.global_batch_size")
    if whole > 0:
        said.job["training.global_batch_size"] = whole
    elif staged:
        said.job["training.gradient_accumulation_steps"] = max(1, local // micro)
    precision = said.take("training.mixed_precision_param")
    said.job["training.precision"] = {"bfloat16": "bf16", "float32": "fp32"}.get(precision)
    kind = said.take("activation_checkpoint")
    said.job["training.recompute_granularity"] = RECOMPUTED.get(kind, "full")
    if kind not in RECOMPUTED:
        said.leave("activation_checkpoint", kind, "the job recomputes whole blocks")
    if precision not in ("bfloat16", "float32"):
        said.leave("training.mixed_precision_param", precision, "bf16 and fp32 are trained")


def _optimizer(said: Said) -> None:
    """One group for all is the job's; any other is named."""
    groups = sorted(
        {name.split(".")[2] for name in said.options if name.startswith("optimizer.param_groups.")},
        key=int,
    )
    for number in groups:
        prefix = f"optimizer.param_groups.{number}"
        said.take(prefix)
        pattern = said.take(f"{prefix}.pattern")
        name = said.take(f"{prefix}.optimizer_name")
        values = said.take(f"{prefix}.optimizer_kwargs")
        if number != groups[-1] or pattern != ".*" or name != "AdamW":
            said.leave(f"{prefix} ({pattern}, {name})", values, "the job has one group, of AdamW")
            continue
        betas = values.pop("betas", (0.9, 0.999))
        said.job |= {
            "training.lr": values.pop("lr", 1e-3),
            "training.adam_beta1": betas[0],
            "training.adam_beta2": betas[1],
            "training.adam_eps": values.pop("eps", 1e-8),
            "training.weight_decay": values.pop("weight_decay", 0.01),
        }
        said.not_taken.append("weight decay of norms: the job has none there, as engine native")
        if values:
            said.leave(f"{prefix}.optimizer_kwargs", values, "no key says it")


def _rates(said: Said) -> None:
    """Rises from 0, stays and falls over the last part; native's rates differ by a step's."""
    total: Any = said.job["training.lr_decay_iters"] or said.job["training.train_iters"]
    given: Any = said.job["training.lr_warmup_iters"]
    warmup = min(given, total)
    said.job["training.lr_warmup_iters"] = warmup
    part = said.take("lr_scheduler.decay_ratio")
    shape = said.take("lr_scheduler.decay_type")
    least = said.take("lr_scheduler.min_lr_factor")
    rate = said.job.get("training.lr")
    if isinstance(rate, float):
        said.job["training.min_lr"] = least * rate
    falls = total - warmup if part is None else min(round(total * part), total - warmup)
    if falls <= 0:
        said.job["training.lr_decay_style"] = "constant"
    elif falls == total - warmup and shape != "sqrt":
        said.job["training.lr_decay_style"] = shape
    else:
        said.job |= {
            "training.lr_decay_style": "WSD",
            "training.lr_wsd_decay_iters": falls,
            "training.lr_wsd_decay_style": SHAPES[shape],
        }
    said.not_taken.append("lr_scheduler: the rate of a step is engine native's: a step's part off")


def _layout(said: Said) -> None:
    copies = said.take("parallelism.data_parallel_replicate_degree")
    shards = said.take("parallelism.data_parallel_shard_degree")
    policy = said.take("parallelism.fsdp_reshard_after_forward")
    sequence = said.take("parallelism.enable_sequence_parallel")
    tensor = said.job["parallelism.tensor_model_parallel_size"]
    if isinstance(tensor, int) and tensor > 1:
        said.job["parallelism.sequence_parallel"] = sequence
    staged = said.job["parallelism.pipeline_model_parallel_size"] != 1
    for end in ("first", "last"):
        name = f"parallelism.pipeline_parallel_{end}_stage_less_layers"
        if (less := said.take(name)) and staged:
            said.leave(name, less, "all stages have as many layers")
    freed = policy == "always" or (policy == "default" and not staged)
    said.job["parallelism.zero_stage"] = 3 if freed else 2
    if shards == 1 and said.job["parallelism.context_parallel_size"] == 1:
        said.job["parallelism.zero_stage"] = 0
    elif copies > 1:
        said.job["parallelism.data_parallel_replicate_size"] = copies
    if shards not in (-1, 1):
        said.leave("parallelism.data_parallel_shard_degree", shards, "the job's ranks say it")


def _evaluations(said: Said) -> None:
    enabled = said.take("validator.enable")
    every = said.take("validator.freq")
    steps = said.take("validator.steps")
    said.job["training.eval_iters"] = max(1, steps) if enabled else 0
    if enabled:
        why = "its steps are local batches (-1: all there are) and it begins at step 1; eval_iters"
        said.leave("validator.steps", steps, f"{why} counts global ones")
    said.job["training.eval_interval"] = every if enabled else None


def _rest(said: Said, table: OptionTable) -> dict[str, object]:
    """What is left: options of the command line, or named."""
    found: dict[str, object] = {}
    for name, (value, usual) in said.options.items():
        own = next((part for part in OWN if name == part or name.startswith(f"{part}.")), None)
        fixed = FIXED.get(name)
        if name in PLACES or (own and name != own):
            if not usual:
                said.leave(name, value, OWN[own] if own else "trainkit has places of its own")
        elif own:
            said.leave(name, value, OWN[own])
        elif fixed:
            if value != fixed[0]:
                said.leave(name, value, fixed[1])
        elif not usual and name in table and name not in SET_BY and value is not None:
            found[name] = value
        elif not usual:
            said.leave(name, value, "no option of its command line says it")
    return found
