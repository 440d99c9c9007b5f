"""A recipe of Megatron-Bridge as a job: a command line or script that runs run_recipe.py, whose own
dry run writes down the whole configuration.

The job names the recipe, so that what no key says stays as it is there. The configuration of the
job is then asked for in the same way, and every difference becomes an engine_arg or a line.
"""

from __future__ import annotations

import itertools
import json
import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from trainkit.base.errors import ConfigError
from trainkit.engines.hydra_config import parse_yaml
from trainkit.engines.imported import (
    ImportedJob,
    ImportRequest,
    ask_engine,
    job_name,
    refused_by_engine,
)
from trainkit.engines.megatron_bridge.words import (
    FIELDS,
    MIXED,
    RECIPE,
    SWITCHES,
    Places,
    bridge_words,
    field_of,
    set_by,
)
from trainkit.engines.megatron_lm.data import MegatronData
from trainkit.engines.megatron_lm.import_script import (
    data_of_script,
    model_of,
    parallelism_of,
    training_of,
)
from trainkit.engines.megatron_lm.script_options import Options
from trainkit.engines.megatron_lm.words import SET_BY
from trainkit.engines.options import OptionTable, wrong_value
from trainkit.engines.shell_words import ShellCommand, command_of, torchrun_nodes
from trainkit.jobs.load import load
from trainkit.jobs.schema import Job

SCRIPT = "run_recipe.py"
OWN_WORDS = ("source", "python")
# options of Megatron-LM that no key of [jobs.X] says by their name, and where they matter
MORE = ("add-qkv-bias", "qk-layernorm", "recompute-method", "recompute-num-layers")
REASONS = {
    "checkpoint.most_recent_k": "it keeps all, the job as checkpoint.keep_last says",
    "dataset._target_": "it names no text: dataset = 'mock', until the job names one",
    "optimizer.weight_decay": "what the scheduler says counts",
    "model.cp_comm_type": "null is p2p",
    "env_vars": "trainkit sets what a deterministic run asks for",
    "tokenizer": "the job's tokens are made before: [tokenizers.X]",
}
SECRET = re.compile(r"(key|secret|password|token)$", re.IGNORECASE)
OF_OTHER_MODELS = ("model.moe", "model.mla", "model.mtp")
# what belongs to a run or a machine, or follows from other fields
PLACES = (
    "checkpoint.save",
    "checkpoint.load",
    "checkpoint.ckpt_step",
    "dataset.blend",
    "dataset.blend_per_split",
    "dataset.data_path",
    "dataset.path_to_cache",
    "dataset.mock",
    "logger.save_config_filepath",
    "logger.tensorboard_dir",
    "logger.wandb_exp_name",
    "logger.wandb_save_dir",
    "model.hf_model_id",
    "model.should_pad_vocab",
    "model.pipeline_dtype",
    "model.vocab_size",
    "tokenizer.vocab_size",
    "tokenizer.null_tokenizer_eod_id",
    "train.exit_signal_handler",
)
CHUNKS = "model.virtual_pipeline_model_parallel_size"
TIED = "model.share_embeddings_and_output_weights"
# how Megatron core stretches positions, but for the factor
LLAMA3 = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
GPT = "megatron.bridge.models.gpt_provider.GPTModelProvider"
JOBS = """
[clusters.there]
device = "h100-sxm-80gb"
[engines.megatron-bridge]
source = {source}
"""
Leaves = Mapping[str, object]


def import_recipe(request: ImportRequest, table: OptionTable, megatron: OptionTable) -> ImportedJob:
    """The job that a recipe stands for.

    Args:
        request: a script, or the tree itself; of its words `source` and `python` say where the tree
            and its interpreter are.
        table: fields of the configuration.
        megatron: options of the Megatron-LM below it.

    Raises ConfigError: nothing runs a recipe, it fails, or its model is of another kind.
    """
    command, asked = _asked_for(request)
    leaves = asked.configuration(command.words)
    _refuse_other_models(leaves)
    options = Options(megatron, dict(_options(leaves, table)))
    options.not_taken += [f"{each}: its value is not in the file" for each in command.unknown]
    options.not_taken += command.notes
    found = _job(command, options, leaves, request)
    engine_args = {RECIPE: _recipe(command.words)}
    found = replace(found, engine_args=engine_args)
    ours = asked.configuration(job_words(found, asked.tree, table, megatron))
    more, lines = _differences(leaves, ours, table)
    options.not_taken += lines
    return replace(found, engine_args={**engine_args, **more}, not_taken=tuple(options.not_taken))


def _asked_for(request: ImportRequest) -> tuple[ShellCommand, RecipeRunner]:
    """The command line, and what understands it."""
    path = request.only_file("Megatron-Bridge")
    given = dict(word.split("=", 1) for word in request.words)
    own = {name: given.pop(name) for name in OWN_WORDS if name in given}
    if path.is_dir():
        own.setdefault("source", str(path))
        name = given.pop(RECIPE, "")
        words = [f"--recipe={name}", *(f"{key}={value}" for key, value in given.items())]
        command = ShellCommand(words=words if name else [])
    else:
        command = command_of(path, SCRIPT, given)
    if not command.words or "source" not in own:
        raise ConfigError(
            "which recipe of which tree is not said",
            hint=f"{path},source=/opt/Megatron-Bridge,python=...,recipe=llama32_1b_pretrain_config",
        )
    mode = _said(command.words, "--mode")
    if mode not in ("", "pretrain"):
        raise ConfigError(
            f"--mode {mode}: fine-tuning and adapters are not trained by this version of trainkit"
        )
    return command, RecipeRunner(Path(own["source"]), own.get("python", "python3"))


def _recipe(words: Sequence[str]) -> str:
    """The recipe's name, as run_recipe.py makes it of --model."""
    return _said(words, "--recipe") or f"{_said(words, '--model')}_pretrain_config"


def _said(words: Sequence[str], option: str) -> str:
    """The value of an option; "" where it is not there."""
    parts = [part for word in words for part in word.split("=", 1)]
    return dict(itertools.pairwise(parts)).get(option, "")


def _is_secret(name: str) -> bool:
    return bool(SECRET.search(name.partition("=")[0]))


class RecipeRunner:
    """Bridge's own Python in its tree."""

    def __init__(self, tree: Path, python: str) -> None:
        self.tree = tree
        self.python = python

    def configuration(self, words: Sequence[str]) -> Leaves:
        """What its dry run says, by dotted names. Raises ConfigError with its last line."""
        tree = self.tree.absolute()
        paths = [str(tree / "src"), str(tree / "3rdparty" / "Megatron-LM")]
        with tempfile.TemporaryDirectory(prefix="recipe-") as folder:
            target = Path(folder) / "config.yaml"
            last = ["--dry-run", f"logger.save_config_filepath={target}"]
            last += [] if _said(words, "--mode") else ["--mode", "pretrain"]
            script = tree / "scripts" / "training" / SCRIPT
            argv = [self.python, str(script), *words, *last]
            done = ask_engine(argv, paths, Path(folder))
            if done.returncode or not target.is_file():
                said = (done.stderr or done.stdout).strip().splitlines()[-1:]
                shown = " ".join(
                    word.partition("=")[0] if _is_secret(word) else word for word in words
                )
                message = f"Megatron-Bridge in {tree} does not take {shown}: {''.join(said)}"
                raise refused_by_engine(message, done.stderr, "Megatron-Bridge")
            return dict(_flat(parse_yaml(target.read_text(encoding="utf-8"), SCRIPT)))


def _flat(value: object, name: str = "") -> Iterator[tuple[str, object]]:
    """Leaves by dotted names; a class, function or dtype by its own name."""
    if isinstance(value, Mapping) and "_target_" in value and "." in name:
        yield name, value.get("_name_") or str(value["_target_"]).rpartition(".")[2]
    elif isinstance(value, Mapping) and name.count(".") < 1 and value:
        for key, inner in value.items():
            yield from _flat(inner, f"{name}.{key}" if name else str(key))
    else:
        yield name, value


def _refuse_other_models(leaves: Leaves) -> None:
    for name, what in (
        ("model.num_moe_experts", "experts"),
        ("model.multi_latent_attention", "attention by latents"),
        ("model.mtp_num_layers", "layers that predict one token more"),
        ("ddp.use_megatron_fsdp", "Megatron-FSDP"),
        ("dist.use_torch_fsdp2", "FSDP"),
        ("peft", "adapters"),
    ):
        if leaves.get(name):
            raise ConfigError(
                f"{name} = {leaves[name]}: {what} of Megatron-Bridge are not trained by this"
                " version of trainkit"
            )
    if leaves.get("model._target_") != GPT:
        raise ConfigError(
            f"model is {leaves['model._target_']}: this version of trainkit trains GPTModelProvider"
        )


def _options(leaves: Leaves, table: OptionTable) -> Iterator[tuple[str, list[str]]]:
    """Options of Megatron-LM that say what the fields say."""
    said = [each for each, key in SET_BY.items() if not key.startswith(OF_OTHER_MODELS)]
    for option in (*said, *MORE):
        names = FIELDS.get(option, field_of(option, table))
        if not names or option in SWITCHES or names[0] in (*PLACES, CHUNKS):
            continue
        value = next((leaves[name] for name in names if leaves.get(name)), leaves.get(names[0]))
        unused = option.endswith("-samples") and not value
        if value is not None and value is not False and not unused:
            yield option, [] if value is True else [str(value)]
    # what counts of both places (core/optimizer_param_scheduler.py, get_wd)
    if (decay := leaves.get("scheduler.end_weight_decay")) is not None:
        yield "weight-decay", [str(decay)]
    activation = leaves.get("model.activation_func")
    fused = bool(leaves.get("model.bias_activation_fusion"))
    flags = {
        "swiglu": bool(leaves.get("model.gated_linear_unit")),
        "squared-relu": activation == "squared_relu",
        "no-bias-gelu-fusion": activation == "gelu" and not fused,
        "disable-bias-linear": not leaves.get("model.add_bias_linear"),
        "untie-embeddings-and-output-weights": not leaves.get(TIED),
        "use-rope-scaling": bool(leaves.get("model.rope_scaling")),
        "group-query-attention": leaves.get("model.num_query_groups") is not None,
        "deterministic-mode": bool(leaves.get("model.deterministic_mode")),
    }
    flags |= {each: _is_mixed(leaves, each) for each in ("bf16", "fp16")}
    yield from ((flag, []) for flag, there in flags.items() if there)


def _is_mixed(leaves: Leaves, precision: str) -> bool:
    named = str(leaves.get(MIXED) or "").replace("-", "_")
    return named.startswith(precision) or leaves.get(f"{MIXED}.{precision}") is True


def _job(
    command: ShellCommand, options: Options, leaves: Leaves, request: ImportRequest
) -> ImportedJob:
    """All that has a key."""
    project = options.take("wandb-project")
    model = _model(options, leaves)
    training = _training(options)
    parallelism = parallelism_of(options, model)
    if isinstance(chunks := leaves.get(CHUNKS), int) and chunks > 1:
        parallelism["virtual_pipeline_model_parallel_size"] = chunks
    job = torchrun_nodes(command, options.not_taken)
    options.given |= _data_words(leaves)
    dataset, _ = data_of_script(options)
    if dataset:
        options.not_taken.append("datasets.X.tokenizer: name that of its tokens")
    else:
        job["dataset"] = "mock"
    if project:
        job["wandb"] = {"project": project[0]}
    keeps = leaves.get("checkpoint.most_recent_k")
    if isinstance(keeps, int) and keeps > 0:
        job["checkpoint"] = {"keep_last": keeps}
    options.not_taken += [
        f"export {name}: set it in env, or in clusters.X.env" for name in command.environment
    ]
    name = request.name or job_name(_recipe(command.words).removesuffix("_config"))
    return ImportedJob(
        name,
        "megatron-bridge",
        model=model,
        job=job,
        parallelism=parallelism,
        training=training,
        dataset=dataset,
    )


def _model(options: Options, leaves: Leaves) -> dict[str, object]:
    flags = ("use-rope-scaling", "qk-layernorm", "add-qkv-bias", "squared-relu")
    there = {flag: options.flag(flag) for flag in flags}
    factor = options.take("rope-scaling-factor")
    model = model_of(options)
    model |= {"qk_norm": "head"} if there["qk-layernorm"] else {}
    model |= {"add_qkv_bias": True} if there["add-qkv-bias"] else {}
    model |= {"activation": "squared-relu"} if there["squared-relu"] else {}
    if there["use-rope-scaling"] and factor:
        model["rope_scaling"] = {"type": "llama3", "factor": float(factor[0]), **LLAMA3}
    rows = leaves.get("model.vocab_size")
    if rows is None or leaves.get("tokenizer.use_tokenizer_vocab_size"):
        rows = leaves.get("tokenizer.vocab_size") or rows
    return model | ({"vocab_size": rows} if isinstance(rows, int) else {})


def _training(options: Options) -> dict[str, object]:
    deterministic = options.flag("deterministic-mode")
    training = training_of(options)
    if training.get("lr_decay_style") == "WSD":  # config.py, _calculate_scheduler_steps
        whole = training.get("lr_decay_iters") or training["train_iters"]
        training.setdefault("lr_wsd_decay_iters", whole)
    return training | ({"deterministic": True} if deterministic else {})


def _data_words(leaves: Leaves) -> dict[str, list[str]]:
    """--data-path and --split of Megatron-LM."""
    paths = leaves.get("dataset.data_path")
    blend = leaves.get("dataset.blend")
    if isinstance(blend, list) and blend:
        prefixes, weights = blend[0], blend[1] if len(blend) > 1 else None
        paths = (
            [word for pair in zip(weights, prefixes, strict=True) for word in pair]
            if weights
            else prefixes
        )
    if isinstance(paths, str):
        paths = paths.split()
    if not isinstance(paths, list):
        return {}
    return {
        "data-path": [str(word) for word in paths],
        "split": [str(leaves.get("dataset.split"))],
    }


def job_words(
    found: ImportedJob, tree: Path, table: OptionTable, megatron: OptionTable
) -> tuple[str, ...]:
    """Those that the job would be started with."""
    from trainkit.data.order.resolve_pairs import SplitPair

    # its text is not here, and has no tokenizer yet
    plain = replace(found, dataset={}, job={**found.job, "dataset": "mock"})
    with tempfile.TemporaryDirectory(prefix="recipe-") as folder:
        text = JOBS.format(source=json.dumps(str(tree.absolute()))) + plain.to_toml("there")
        (Path(folder) / "jobs.toml").write_text(text, encoding="utf-8")
        try:
            job: Job = load(Path(folder), environ={}).resolve(found.name, ()).job
        except ConfigError as error:  # of a file that nobody has
            raise ConfigError([replace(each, place=None) for each in error.list]) from None
    data = MegatronData({}, None, mock=True)
    if found.dataset:
        pair = SplitPair(found.name, Path("/text"), "1,0,0", True, found.name, None)
        data = MegatronData({"train": (pair,)}, str(found.dataset["split"]))
    return bridge_words(job, table, megatron, data, Places(Path("/run"), "run"))


def _differences(
    theirs: Leaves, ours: Leaves, table: OptionTable
) -> tuple[dict[str, object], list[str]]:
    """Fields that the job has otherwise: as engine_args, or a line each where a key says them or
    TOML cannot."""
    engine_args: dict[str, object] = {}
    lines = []
    own = set_by(table)
    for name in sorted({*theirs, *ours} - set(PLACES)):
        value, mine = theirs.get(name), ours.get(name)
        if value == mine:
            continue
        option = table.options.get(name)
        sayable = value is not None and not name.startswith("tokenizer.")
        if _is_secret(name):
            lines.append(f"{name}: a secret is not copied; name it in clusters.X.secrets")
        elif option and name not in own and sayable and not wrong_value(option, value):
            engine_args[name] = value
        else:
            why = REASONS.get(name.partition(".")[0]) or REASONS.get(name)
            why = why or f"the job has {json.dumps(mine)}"
            lines.append(f"{name} = {json.dumps(value)}: {why}")
    return engine_args, lines
