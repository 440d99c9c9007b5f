"""A model's shape as config.json says it: written by `to_hf_config`, compared with a job by
`contradictions`.

The keys of each family stand in trainkit/families; those of positions and windows in positions.py.
Imports no torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from operator import attrgetter
from typing import Any

from trainkit.base.errors import ConfigError, Problem
from trainkit.families import FAMILIES
from trainkit.families.contract import ConfigKey
from trainkit.jobs.experts import departures_of
from trainkit.jobs.schema import Model
from trainkit.train.huggingface.positions import (
    FULL,
    position_problems,
    rotary_keys,
    setting_of,
    toml_value,
    window_keys,
    window_problems,
)
from trainkit.train.huggingface.quantized import quantization_problems

TORCH_NAMES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
# Names of one function: transformers, activations.py. gelu_new, gelu_fast and the like are the tanh
# form under other names.
SAME_ACTIVATION = dict.fromkeys(
    ("gelu_fast", "gelu_pytorch_tanh", "gelu_accurate", "gelu_python_tanh"), "gelu_new"
) | {
    "gelu_python": "gelu",
    "swish": "silu",
}
GELU_NAMES = {"tanh": "gelu_new", "exact": "gelu"}
# What says nothing of the weights' arithmetic: of transformers' PretrainedConfig and of older
# versions of it, of its three classes, of generation and training.
_NEUTRAL = """
    _attn_implementation _attn_implementation_autoset _commit_hash _name_or_path _output_attentions
    add_prefix_space architectures attention_probs_dropout_prob auto_map aux_loss_alpha
    bad_words_ids begin_suppress_tokens bos_token_id chunk_size_feed_forward classifier_dropout
    decoder_start_token_id diversity_penalty do_sample dtype early_stopping
    encoder_no_repeat_ngram_size eos_token_id ep_size experts_per_token
    exponential_decay_length_penalty finetuning_task forced_bos_token_id forced_eos_token_id
    gradient_checkpointing hidden_dropout_prob id2label initial_context_length initializer_range
    is_decoder is_encoder_decoder is_llama_config keys_to_ignore_at_inference label2id
    length_penalty license max_length max_position_embeddings max_sequence_length min_length
    model_type n_ctx no_repeat_ngram_size num_beam_groups num_beams num_mtp_layers
    num_nextn_predict_layers num_return_sequences output_attentions output_hidden_states output_past
    output_router_logits output_scores pad_token_id partial_rotary_factor prefix pretraining_tp
    problem_type pruned_heads quantization_config remove_invalid_values reorder_and_upcast_attn
    repetition_penalty return_dict return_dict_in_generate rope_parameters rope_scaling rope_theta
    rotary_emb_base rotary_pct router_aux_loss_coef router_jitter_noise sep_token_id seq_aux
    summary_activation summary_first_dropout summary_proj_to_labels summary_type summary_use_proj
    suppress_tokens task_specific_params temperature tf_legacy_loss tie_encoder_decoder
    tokenizer_class tokenizer_name top_k top_p torch_dtype torchscript transformers_version
    typical_p unsloth_fixed unsloth_version use_bfloat16 use_cache vocab_size
"""
NEUTRAL = frozenset(_NEUTRAL.split())
WINDOW_KEYS = {
    "sliding_window",
    "use_sliding_window",
    "max_window_layers",
    "layer_types",
    "sliding_window_pattern",
    "_sliding_window_pattern",
}


def to_hf_config(model: Model, vocab_size: int, dtype: str, eod: int | None) -> dict[str, object]:
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
    names = model.architecture.hugging_face
    return {
        "architectures": [names.architecture],
        "model_type": names.model_type,
        "vocab_size": vocab_size,
        **{key.name: _value(key, model) for key in names.keys},
        **rotary_keys(model),
        **window_keys(model),
        **{name: getattr(model, ours) for name, ours in names.dropout.items()},
        **({"num_nextn_predict_layers": model.mtp_num_layers} if model.mtp_num_layers else {}),
        "initializer_range": model.init_method_std,
        "bos_token_id": eod,
        "eos_token_id": eod,
        "pad_token_id": None,
        "torch_dtype": TORCH_NAMES[dtype],
        "use_cache": True,
    }


def _value(key: ConfigKey, model: Model) -> object:
    """What a key is for a model of ours."""
    if not key.attribute:
        return key.default
    value: object = attrgetter(key.attribute)(model)
    return GELU_NAMES[str(value)] if key.setting == "gelu" else value


def _not_in_transformers(model: Model) -> Iterator[str]:
    names = model.architecture.hugging_face
    name = names.architecture
    said = {key.setting for key in names.keys}
    if names.windows is not None:
        said.add("sliding_window")
        if not names.windows.by_layer and 0 < model.sliding_layers < model.num_layers:
            yield f"{name} has a window in all layers or in none, not in {model.sliding_layers}"
    routing = model.architecture.routing
    of_experts = {} if model.moe is None or routing is None else departures_of(model.moe, routing)
    for key, value in {**model.departures, **of_experts}.items():
        if key not in said:
            yield f"{name} has no {key} = {toml_value(value)}"
    if any(key.name == "n_shared_experts" for key in names.keys):
        yield from _not_of_deepseek(name, model)
    if model.hidden_size % model.num_attention_heads:
        yield (
            f"{name} takes no hidden_size {model.hidden_size} that does not divide by"
            f" num_attention_heads {model.num_attention_heads}"
        )
        return
    usual = model.hidden_size // model.num_attention_heads
    if model.head_size != usual and not any(key.attribute == "head_size" for key in names.keys):
        yield (
            f"{name} has hidden_size / num_attention_heads = {usual} channels a head; kv_channels"
            f" {model.head_size} cannot be said"
        )


def _not_of_deepseek(name: str, model: Model) -> Iterator[str]:
    moe = model.moe
    assert moe is not None
    width = moe.shared_expert_intermediate_size
    if not width or width % moe.ffn_hidden_size:
        yield (
            f"{name} has an expert for all tokens whose width is a multiple of the others'"
            f" {moe.ffn_hidden_size}, not {width}"
        )
    if moe.groups > 1 and moe.router_topk != 2 * moe.kept_groups:
        yield (
            f"{name} judges a group by its best two experts, not by {moe.router_topk} /"
            f" {moe.kept_groups}"
        )


def contradictions(
    config: Mapping[str, Any], model: Model, vocab_size: int | None
) -> list[Problem]:
    """Everything in which a config.json and a job's model differ, and everything the job could
    not say either.

    Dropout is the job's own; a text may be shorter than the rotary positions were made for, not
    longer.

    Args:
        config: the content of config.json.
        model: the job's.
        vocab_size: rows of the job's embedding; None: not known yet.
    """
    names = model.architecture.hugging_face
    kind = config.get("model_type")
    if kind != names.model_type:
        return [_other_type(kind, model)]
    problems = [Problem(reason) for reason in _not_in_transformers(model)]
    # where all layers have experts, the width of the others says nothing
    unused = model.moe is not None and not model.moe.first_dense_layers
    keys = [key for key in names.keys if key.setting != "ffn_hidden_size" or not unused]
    problems += [problem for key in keys if (problem := _key_problem(config, key, model))]
    problems += _unknown(config, model)
    problems += quantization_problems(config)
    if vocab_size is not None:
        problems += _vocabulary_problems(config.get("vocab_size"), model, vocab_size)
    return [*problems, *window_problems(config, model), *position_problems(config, model)]


def _other_type(kind: object, model: Model) -> Problem:
    types = {family.hugging_face.model_type: name for name, family in FAMILIES.items()}
    if isinstance(kind, str) and kind in types:
        hint = f"set {setting_of(model, 'family')} = '{types[kind]}'"
    else:
        hint = f"trainkit has {', '.join(types)}"
    ours = model.architecture.hugging_face.model_type
    return Problem(
        f"it is a model of the type {kind!r}; family {model.family!r} is {ours!r}", hint=hint
    )


def _vocabulary_problems(there: object, model: Model, vocab_size: int) -> Iterator[Problem]:
    """Rows are neither dropped nor made up: which ids mean what is not to be guessed, and
    published embeddings are often padded."""
    if there == vocab_size:
        return
    way = ""
    if isinstance(there, int) and there > vocab_size:
        way = "; ids beyond the tokenizer's then never occur"
    yield Problem(
        f"vocab_size is {there} there, {vocab_size} for this job",
        hint=f"set {setting_of(model, 'vocab_size')} = {there}{way}",
    )


def _unknown(config: Mapping[str, Any], model: Model) -> Iterator[Problem]:
    """Keys that may change what the weights mean, and that nothing here knows. One that is
    absent, null or false asks for nothing."""
    names = model.architecture.hugging_face
    known = {name for key in names.keys for name in (key.name, key.other_name)}
    known |= set(names.dropout) | NEUTRAL
    if names.windows is not None:
        known |= WINDOW_KEYS
    if names.rotary is not None:
        known.add(names.rotary.sliding_theta)
    hint = (
        "if it changes nothing of what the model computes, copy the folder, take the key out of its"
        " config.json and name the copy"
    )
    for name, value in config.items():
        whole = name == "layer_types" and isinstance(value, list) and set(value) <= {FULL}
        if name not in known and value is not None and value is not False and not whole:
            yield Problem(
                f"{name} is {value!r} there, which family {model.family!r} of trainkit does not"
                " have",
                hint=hint,
            )


def _effective(config: Mapping[str, Any], key: ConfigKey) -> object:
    """What transformers makes of a key, absent ones included."""
    value = config.get(key.name, config.get(key.other_name))
    if isinstance(value, str):
        return SAME_ACTIVATION.get(value, value)
    if value is not None:
        return value
    if key.derived:
        return key.derived(config)
    return key.default


def _key_problem(config: Mapping[str, Any], key: ConfigKey, model: Model) -> Problem | None:
    try:
        there = _effective(config, key)
    except (TypeError, ArithmeticError):
        return Problem(f"its {key.name} makes no sense: {config.get(key.name)!r}")
    here = _value(key, model)
    if there == SAME_ACTIVATION.get(str(here), here):
        return None
    if not key.setting:
        return Problem(f"{key.name} is {there!r} there; family {model.family!r} has {here!r} only")
    if None not in (there, here) and _kind(there) is not _kind(here):
        return Problem(f"its {key.name} makes no sense: {there!r}")
    value = _our_value(key, there, model)
    hint = "trainkit has no such model"
    if there is None:
        hint = f"leave {setting_of(model, key.setting)} out"
    if value is not None:
        hint = f"set {setting_of(model, key.setting)} = {toml_value(value)}"
    return Problem(f"{key.name} is {there!r} there, {here!r} for this job", hint=hint)


def _our_value(key: ConfigKey, there: object, model: Model) -> object:
    """What a key of [models.X] must be for `there` in config.json; None: it cannot be."""
    if key.setting == "untie_embeddings_and_output_weights":
        return not there
    if key.setting == "gelu":
        return next((ours for ours, name in GELU_NAMES.items() if name == there), None)
    if key.setting == "moe.first_dense_layers" and isinstance(there, list):
        return len(there) if there == list(range(len(there))) else None
    if key.name == "n_shared_experts" and isinstance(there, int) and model.moe is not None:
        return there * model.moe.ffn_hidden_size or None
    return there


def _kind(value: object) -> type:
    """Numbers are of one kind, true and false of another."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return float
    return type(value)
