"""A model's shape as config.json says it: one table a family, written by `to_hf_config` and held
against a job by `contradictions`.

Keys and their defaults: transformers, models/{gpt2,gpt_neox,llama}/configuration_*.py. Rotary
positions stand in keys of their own up to transformers 4 (rope_theta, rope_scaling; rotary_pct,
rotary_emb_base) and in `rope_parameters` since 5, which reads the old ones too: both are
written, either is read. Imports no torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from trainkit.base.errors import ConfigError, Problem
from trainkit.jobs.schema import Model
from trainkit.train.huggingface.names import FAMILIES

TORCH_NAMES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
# Names of one function: transformers, activations.py. gelu_new, gelu_fast and the like are the tanh
# form in other words.
SAME_ACTIVATION = dict.fromkeys(
    ("gelu_fast", "gelu_pytorch_tanh", "gelu_accurate", "gelu_python_tanh"), "gelu_new"
) | {
    "gelu_python": "gelu",
    "swish": "silu",
}
# transformers' and ours, where nothing is said
THETA = 10000.0
NEOX_PERCENT = 0.25


@dataclass(frozen=True)
class Key:
    """One key of config.json.

    Args:
        name: Hugging Face's.
        value: what it is for a model of ours.
        default: what transformers takes where the key is absent or null.
        ours: the key of [models.X] that says it; "" where ours has no choice.
    """

    name: str
    value: Callable[[Model], Any]
    default: Any
    ours: str = ""


def _gelu(model: Model) -> str:
    return {"tanh": "gelu_new", "exact": "gelu"}[
        model.gelu or ("tanh" if model.family == "gpt" else "exact")
    ]


KEYS: dict[str, tuple[Key, ...]] = {
    "gpt": (
        Key("n_layer", lambda m: m.num_layers, 12, "num_layers"),
        Key("n_embd", lambda m: m.hidden_size, 768, "hidden_size"),
        Key("n_head", lambda m: m.num_attention_heads, 12, "num_attention_heads"),
        Key("n_inner", lambda m: m.ffn_width, None, "ffn_hidden_size"),
        Key("n_positions", lambda m: m.positions, 1024, "max_position_embeddings"),
        Key("activation_function", _gelu, "gelu_new", "gelu"),
        Key("layer_norm_epsilon", lambda m: m.layernorm_epsilon, 1e-5, "layernorm_epsilon"),
        Key(
            "tie_word_embeddings",
            lambda m: not m.untied,
            True,
            "untie_embeddings_and_output_weights",
        ),
        Key("scale_attn_weights", lambda _: True, True),
        Key("scale_attn_by_inverse_layer_idx", lambda _: False, False),
        Key("add_cross_attention", lambda _: False, False),
    ),
    "gpt-neox": (
        Key("num_hidden_layers", lambda m: m.num_layers, 44, "num_layers"),
        Key("hidden_size", lambda m: m.hidden_size, 6144, "hidden_size"),
        Key("num_attention_heads", lambda m: m.num_attention_heads, 64, "num_attention_heads"),
        Key("intermediate_size", lambda m: m.ffn_width, 24576, "ffn_hidden_size"),
        Key("hidden_act", _gelu, "gelu", "gelu"),
        Key("layer_norm_eps", lambda m: m.layernorm_epsilon, 1e-5, "layernorm_epsilon"),
        Key("use_parallel_residual", lambda m: m.parallel_residual, True, "gpt_j_residual"),
        Key(
            "tie_word_embeddings",
            lambda m: not m.untied,
            False,
            "untie_embeddings_and_output_weights",
        ),
        Key("attention_bias", lambda _: True, True),
    ),
    "llama": (
        Key("num_hidden_layers", lambda m: m.num_layers, 32, "num_layers"),
        Key("hidden_size", lambda m: m.hidden_size, 4096, "hidden_size"),
        Key("num_attention_heads", lambda m: m.num_attention_heads, 32, "num_attention_heads"),
        Key("num_key_value_heads", lambda m: m.query_groups, None, "num_query_groups"),
        Key("head_dim", lambda m: m.head_size, None, "kv_channels"),
        Key("intermediate_size", lambda m: m.ffn_width, 11008, "ffn_hidden_size"),
        Key("hidden_act", lambda _: "silu", "silu"),
        Key("rms_norm_eps", lambda m: m.layernorm_epsilon, 1e-6, "layernorm_epsilon"),
        Key(
            "tie_word_embeddings",
            lambda m: not m.untied,
            False,
            "untie_embeddings_and_output_weights",
        ),
        Key("attention_bias", lambda _: False, False),
        Key("mlp_bias", lambda _: False, False),
    ),
}
# What says nothing of the weights' arithmetic: of transformers' PretrainedConfig and of older
# versions of it, of its three classes, of generation and training.
_NEUTRAL = """
    _attn_implementation _attn_implementation_autoset _commit_hash _name_or_path
    _output_attentions add_prefix_space architectures attention_probs_dropout_prob auto_map
    bad_words_ids begin_suppress_tokens bos_token_id chunk_size_feed_forward classifier_dropout
    decoder_start_token_id diversity_penalty do_sample dtype early_stopping
    encoder_no_repeat_ngram_size eos_token_id exponential_decay_length_penalty finetuning_task
    forced_bos_token_id forced_eos_token_id gradient_checkpointing hidden_dropout_prob id2label
    initializer_range is_decoder is_encoder_decoder is_llama_config keys_to_ignore_at_inference
    label2id length_penalty license max_length max_position_embeddings max_sequence_length
    min_length model_type n_ctx no_repeat_ngram_size num_beam_groups num_beams
    num_return_sequences output_attentions output_hidden_states output_past output_scores
    pad_token_id prefix pretraining_tp problem_type pruned_heads quantization_config
    remove_invalid_values reorder_and_upcast_attn repetition_penalty return_dict
    return_dict_in_generate rope_parameters rope_scaling rope_theta rotary_emb_base rotary_pct
    partial_rotary_factor sep_token_id suppress_tokens summary_activation summary_first_dropout
    summary_proj_to_labels summary_type summary_use_proj task_specific_params temperature
    tf_legacy_loss tie_encoder_decoder tokenizer_class tokenizer_name top_k top_p torch_dtype
    torchscript transformers_version typical_p unsloth_fixed unsloth_version use_bfloat16
    use_cache vocab_size
"""
NEUTRAL = frozenset(_NEUTRAL.split())
# written, never held against a job: it is a matter of training, not of the weights
DROPOUT: dict[str, dict[str, Callable[[Model], float]]] = {
    "gpt": {
        "resid_pdrop": lambda m: m.hidden_dropout,
        "embd_pdrop": lambda m: m.hidden_dropout,
        "attn_pdrop": lambda m: m.attention_dropout,
    },
    "gpt-neox": {
        "hidden_dropout": lambda m: m.hidden_dropout,
        "attention_dropout": lambda m: m.attention_dropout,
    },
    "llama": {"attention_dropout": lambda m: m.attention_dropout},
}


def to_hf_config(model: Model, vocab_size: int, dtype: str, eod: int | None) -> dict[str, Any]:
    """The config.json of a model.

    Args:
        model: the shape.
        vocab_size: rows of the embedding.
        dtype: of the weights: "fp32", "bf16" or "fp16".
        eod: the id that ends a document; it begins and ends a text there.

    Raises:
        ConfigError: Hugging Face's class of this family has no such model; every reason.
    """
    if reasons := list(_not_in_transformers(model)):
        raise ConfigError([Problem(reason) for reason in reasons])
    family = FAMILIES[model.family]
    return {
        "architectures": [family.architecture],
        "model_type": family.model_type,
        "vocab_size": vocab_size,
        **{key.name: key.value(model) for key in KEYS[model.family]},
        **({} if model.family == "gpt" else {"max_position_embeddings": model.positions}),
        **_rotary_keys(model),
        **{name: value(model) for name, value in DROPOUT[model.family].items()},
        "initializer_range": model.init_method_std,
        "bos_token_id": eod,
        "eos_token_id": eod,
        "pad_token_id": None,
        "torch_dtype": TORCH_NAMES[dtype],
        "use_cache": True,
    }


def _not_in_transformers(model: Model) -> Iterator[str]:
    name = FAMILIES[model.family].architecture
    even = model.hidden_size % model.num_attention_heads == 0
    if not even:
        yield (
            f"{name} takes no hidden_size {model.hidden_size} that does not divide by"
            f" num_attention_heads {model.num_attention_heads}"
        )
    elif (
        model.family != "llama" and model.head_size * model.num_attention_heads != model.hidden_size
    ):
        usual = model.hidden_size // model.num_attention_heads
        yield (
            f"{name} has hidden_size / num_attention_heads = {usual} channels a head; kv_channels"
            f" {model.head_size} cannot be said"
        )


def _rotary_keys(model: Model) -> dict[str, Any]:
    """Rotary positions in the words of transformers 4 and of 5."""
    if model.family == "gpt":
        return {}
    theta = model.rotary_base or THETA
    if model.family == "gpt-neox":
        part = model.rotary_percent or NEOX_PERCENT
        new = {"rope_type": "default", "rope_theta": theta, "partial_rotary_factor": part}
        return {"rotary_pct": part, "rotary_emb_base": theta, "rope_parameters": new}
    scaling = model.rope_scaling
    if scaling is None:
        return {
            "rope_theta": theta,
            "rope_scaling": None,
            "rope_parameters": {"rope_type": "default", "rope_theta": theta},
        }
    own = {
        "rope_type": scaling.type,
        **scaling.model_dump(include=set(_scaling_keys(scaling.type))),
    }
    return {
        "rope_theta": theta,
        "rope_scaling": own,
        "rope_parameters": {**own, "rope_theta": theta},
    }


def _scaling_keys(kind: str) -> tuple[str, ...]:
    llama3 = ("low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    if kind == "llama3":
        return ("factor", *llama3)
    return ("factor",)


def contradictions(
    config: Mapping[str, Any], model: Model, vocab_size: int | None
) -> list[Problem]:
    """Everything in which a config.json and a job's model differ, and everything the job could
    not say either.

    `vocab_size` None: not known yet. Dropout is the job's own; a text may be shorter than the
    rotary positions were made for, not longer.
    """
    family = FAMILIES[model.family]
    kind = config.get("model_type")
    if kind != family.model_type:
        named = next((name for name, other in FAMILIES.items() if other.model_type == kind), None)
        if named:
            hint = f"set {_place(model)}.family = '{named}'"
        else:
            hint = f"trainkit has {', '.join(f.model_type for f in FAMILIES.values())}"
        return [
            Problem(
                f"it is a model of the type {kind!r}; family {model.family!r} is"
                f" {family.model_type!r}",
                hint=hint,
            )
        ]
    problems = [
        problem for key in KEYS[model.family] if (problem := _key_problem(config, key, model))
    ]
    problems += _unknown(config, model)
    if config.get("quantization_config"):
        problems.append(
            Problem(
                "its weights are quantized (quantization_config)",
                hint="take the weights it was quantized from",
            )
        )
    if vocab_size is not None and (there := config.get("vocab_size")) != vocab_size:
        # Rows are neither dropped nor made up: which ids mean what is not to be guessed, and
        # published embeddings are often padded.
        if isinstance(there, int) and there > vocab_size:
            way = "; ids beyond the tokenizer's then never occur"
        else:
            way = ""
        problems.append(
            Problem(
                f"vocab_size is {there} there, {vocab_size} for this job",
                hint=f"set {_place(model)}.vocab_size = {there}{way}",
            )
        )
    if model.family != "gpt":
        return [*problems, *_position_problems(config, model)]
    return problems


def _unknown(config: Mapping[str, Any], model: Model) -> Iterator[Problem]:
    """Keys that may change what the weights mean, and that nothing here knows. One that is
    absent, null or false asks for nothing."""
    known = {key.name for key in KEYS[model.family]} | set(DROPOUT[model.family]) | NEUTRAL
    hint = (
        "if it changes nothing of what the model computes, copy the folder, take the key out of its"
        " config.json and name the copy"
    )
    for name, value in config.items():
        whole = (
            name == "layer_types" and isinstance(value, list) and set(value) <= {"full_attention"}
        )
        if name not in known and value is not None and value is not False and not whole:
            yield Problem(
                f"{name} is {value!r} there, which family {model.family!r} of trainkit does not"
                " have",
                hint=hint,
            )


def _place(model: Model) -> str:
    if model.name:
        return f"models.{model.name}"
    return "model"


def _effective(config: Mapping[str, Any], key: Key) -> Any:
    """What transformers makes of a key, absent ones included."""
    value = config.get(key.name)
    if value is not None:
        if isinstance(value, str):
            return SAME_ACTIVATION.get(value, value)
        return value
    if key.name == "n_inner":
        return 4 * config.get("n_embd", 768)
    if key.name == "num_key_value_heads":
        return config.get("num_attention_heads", 32)
    if key.name == "head_dim":
        return config.get("hidden_size", 4096) // config.get("num_attention_heads", 32)
    return key.default


def _key_problem(config: Mapping[str, Any], key: Key, model: Model) -> Problem | None:
    try:
        there = _effective(config, key)
    except (TypeError, ArithmeticError):
        return Problem(f"its {key.name} makes no sense: {config.get(key.name)!r}")
    here = key.value(model)
    if there == here:
        return None
    if _kind(there) is not _kind(here):
        return Problem(f"its {key.name} makes no sense: {there!r}")
    if not key.ours:
        return Problem(f"{key.name} is {there!r} there; family {model.family!r} has {here!r} only")
    words = {
        "untie_embeddings_and_output_weights": not there,
        "gelu": (
            {"gelu_new": "tanh", "gelu": "exact"}.get(there) if isinstance(there, str) else None
        ),
    }
    value = words.get(key.ours, there)
    if value is None:
        hint = "trainkit has no such model"
    else:
        hint = f"set {_place(model)}.{key.ours} = {_toml(value)}"
    return Problem(f"{key.name} is {there!r} there, {here!r} for this job", hint=hint)


def _kind(value: Any) -> type:
    """Numbers are of one kind, true and false of another."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return float
    return type(value)


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return repr(value)


def _position_problems(config: Mapping[str, Any], model: Model) -> Iterator[Problem]:
    """What is wrong about rotary positions: length, theta, part and stretching."""
    longest = config.get("max_position_embeddings")
    # as for every key that is absent or null
    if longest is None:
        longest = 2048
    if type(longest) is not int:
        yield Problem(f"its max_position_embeddings makes no sense: {longest!r}")
    elif model.seq_length > longest:
        hint = (
            "shorten seq_length; to go beyond, copy the folder, raise max_position_embeddings in"
            " its config.json and name the copy"
        )
        yield Problem(
            f"it reads {longest} tokens (max_position_embeddings), the job's samples have"
            f" {model.seq_length}",
            hint=hint,
        )
    if model.family == "gpt-neox":
        old_theta = "rotary_emb_base"
        old_part = "rotary_pct"
    else:
        old_theta = "rope_theta"
        old_part = "partial_rotary_factor"
    rope = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if not isinstance(rope, dict) or any(isinstance(value, dict) for value in rope.values()):
        yield Problem(f"its rotary positions cannot be said in a job: {rope!r}")
        return
    theta = rope.get("rope_theta", config.get(old_theta, THETA))
    here = model.rotary_base or THETA
    if theta != here:
        yield Problem(
            f"theta of its rotary positions is {theta}, {here} for this job",
            hint=f"set {_place(model)}.rotary_base = {theta}",
        )
    if model.family == "gpt-neox":
        whole = NEOX_PERCENT
    else:
        whole = 1.0
    part = rope.get("partial_rotary_factor", config.get(old_part, whole))
    number = isinstance(part, int) or (isinstance(part, float) and math.isfinite(part))
    if not number or int(model.head_size * part) != model.rotary_channels:
        if model.family == "gpt-neox":
            hint = f"set {_place(model)}.rotary_percent = {part}"
        else:
            hint = "trainkit has no such model"
        yield Problem(
            f"{part} of a head's channels turn there ({old_part}), {model.rotary_channels} of"
            f" {model.head_size} for this job",
            hint=hint,
        )
    yield from _stretch_problems(rope, config, model)


def _stretch_problems(
    rope: Mapping[str, Any], config: Mapping[str, Any], model: Model
) -> Iterator[Problem]:
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in ("default", "linear", "llama3") or (
        kind != "default" and model.family != "llama"
    ):
        yield Problem(
            f"its rotary positions are stretched by {kind!r}, which family {model.family!r} does"
            " not have"
        )
        return
    scaling = model.rope_scaling
    if scaling is None:
        here = {"type": "default"}
    else:
        here = {
            "type": scaling.type,
            **scaling.model_dump(include=set(_scaling_keys(scaling.type))),
        }
    there = {
        "type": kind,
        **{key: rope.get(key) for key in _scaling_keys(kind) if kind != "default"},
    }
    if kind == "llama3" and there["original_max_position_embeddings"] is None:
        there["original_max_position_embeddings"] = config.get("max_position_embeddings")
    if there != here:
        inline = ", ".join(f"{key} = {_toml(value)}" for key, value in there.items())
        if kind != "default":
            hint = f"set {_place(model)}.rope_scaling = {{ {inline} }}"
        else:
            hint = f"leave {_place(model)}.rope_scaling out"
        yield Problem(
            f"its rotary positions are stretched as {there}, {here} for this job", hint=hint
        )
