"""Where gigatoken is proved to give the ids of tokenizers: for which tokenizers, and but for
which code points.

Both cut a text into words by classes of code points (letter, number, space, other), bring it
into a normal form, and merge bytes; the merges alike, whatever the model (fuzzed in tests/data).
What they do not share are the tables of Unicode: `proved_table` lists every code point of which
they differ, compared one by one by tests/data/encoder_proof.py. So a document without such a
code point has the same ids, if its tokenizer is one of the kinds compared here.
"""

from __future__ import annotations

import importlib.metadata
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from trainkit.data.tokenize.proved_table import CLASSES, NFC, VERSIONS

# gpt2: GPT-2, GPT-NeoX, and every BPE that prep-data trains; llama3: also cl100k_base; qwen2: one
# digit a word
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
PATTERNS = {"llama3": LLAMA3, "qwen2": LLAMA3.replace("{1,3}", "")}
MODEL = {
    "dropout": None,
    "unk_token": None,
    "continuing_subword_prefix": "",
    "end_of_word_suffix": "",
    "byte_fallback": False,
}
NEVER = {0xC0, 0xC1, *range(0xF5, 0x100)}  # bytes that no text in UTF-8 has
FLAGS = ("single_word", "lstrip", "rstrip")


def byte_characters() -> list[str]:
    """The character that a byte-level vocabulary has for each byte. Source: GPT-2's encoder.py,
    bytes_to_unicode."""
    plain = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte if byte in plain else next(others)) for byte in range(256)]


def installed() -> dict[str, str | None]:
    """The versions that are installed of what was compared; None: it is not."""
    found: dict[str, str | None] = {}
    for name in VERSIONS:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    return found


def unproved_reason(
    value: Mapping[str, Any], special_tokens: str, versions: Mapping[str, str | None] | None = None
) -> str | None:
    """Why gigatoken is not known to give the ids of tokenizers, or None: it is.

    Args:
        value: a tokenizer.json.
        special_tokens: "text" or "parse", of the tokenizer's table.
        versions: of both libraries; by default those installed.
    """
    for name, version in (installed() if versions is None else versions).items():
        if version is None:
            return f"{name} is not installed"
        if version not in VERSIONS[name]:
            return f"{name} {version} was not compared, only {', '.join(VERSIONS[name])}"
    return (
        _model(value["model"])
        or _normalizer(value.get("normalizer"))
        or _words(value.get("pre_tokenizer"))
        or _added(value, special_tokens)
    )


def differing_code_points(value: Mapping[str, Any]) -> Sequence[tuple[int, int]]:
    """The code points, as inclusive ranges, whose documents tokenizers has to encode, for a
    tokenizer.json that is proved."""
    return CLASSES if value.get("normalizer") is None else (*CLASSES, *NFC)


def _model(model: Mapping[str, Any]) -> str | None:
    if model.get("type", "BPE") != "BPE":
        return f"its model is {model['type']}, not BPE"
    for key, plain in MODEL.items():
        if (model.get(key) or plain) != plain:
            return f"its model has {key} = {model[key]!r}"
    if missing := [
        byte
        for byte, character in enumerate(byte_characters())
        if character not in model["vocab"] and byte not in NEVER
    ]:
        return f"its vocabulary lacks the byte 0x{missing[0]:02X}"
    return None


def _normalizer(value: Mapping[str, Any] | None) -> str | None:
    if value is None or value == {"type": "NFC"}:
        return None
    return f"its normalizer is {value.get('type')}, neither NFC nor none"


def _words(value: Mapping[str, Any] | None) -> str | None:
    if value is None:
        return "it has no pre_tokenizer"
    if value.get("type") == "Sequence":
        parts = value["pretokenizers"]
        if (
            len(parts) != 2
            or not _is_split(parts[0])
            or not _is_byte_level(parts[1], use_regex=False)
        ):
            kinds = ", ".join(str(part.get("type")) for part in parts)
            return f"its pre_tokenizer is a sequence ({kinds}) that was not compared"
        return None
    if _is_byte_level(value, use_regex=True):
        return None
    return f"its pre_tokenizer ({value.get('type')}) was not compared"


def _is_byte_level(value: Mapping[str, Any], *, use_regex: bool) -> bool:
    return (
        value.get("type") == "ByteLevel"
        and value.get("add_prefix_space") is False
        and value.get("use_regex", True) is use_regex
    )


def _is_split(value: Mapping[str, Any]) -> bool:
    plain = (
        value.get("type") == "Split"
        and value.get("behavior") == "Isolated"
        and value.get("invert") is False
    )
    return plain and value.get("pattern") in [{"Regex": pattern} for pattern in PATTERNS.values()]


def _added(value: Mapping[str, Any], special_tokens: str) -> str | None:
    """Added tokens: how they are found was compared for those without flags, whose id is no
    other one's."""
    vocabulary = value["model"]["vocab"]
    for token in value.get("added_tokens") or []:
        if token.get("special") and special_tokens == "text":
            continue  # ordinary text to both
        content = token["content"]
        if flags := [flag for flag in FLAGS if token.get(flag)]:
            return f"its added token {content!r} has {flags[0]} = true"
        if vocabulary.get(content, token["id"]) != token["id"]:
            return f"its added token {content!r} has another id in the vocabulary"
        if value.get("normalizer") is not None and not content.isascii():
            return f"its added token {content!r} is not ASCII, and it has a normalizer"
    return _overlapping(value.get("added_tokens") or [])


def _overlapping(tokens: Sequence[Mapping[str, Any]]) -> str | None:
    """tokenizers looks for added tokens in passes by `special` and `normalized`, gigatoken for
    all at once: where two of different passes overlap, each may take what the other would have
    taken."""
    for first, second in itertools.combinations(tokens, 2):
        flags = [
            (bool(token.get("special")), bool(token.get("normalized"))) for token in (first, second)
        ]
        if flags[0] != flags[1] and _overlap(str(first["content"]), str(second["content"])):
            return (
                f"its added tokens {first['content']!r} and {second['content']!r} overlap and"
                " differ in special or normalized"
            )
    return None


def _overlap(first: str, second: str) -> bool:
    """Whether an end of one is a beginning of the other, or one holds the other."""
    ends = range(1, min(len(first), len(second)))
    return (
        first in second
        or second in first
        or any(first.endswith(second[:n]) or second.endswith(first[:n]) for n in ends)
    )
