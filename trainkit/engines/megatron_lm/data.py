"""What Megatron-LM reads: the pairs of a dataset with their weights, and its vocabulary."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from trainkit.base.errors import ConfigError
from trainkit.base.lazy_dataclasses import dataclass
from trainkit.data.indexed.paths import DataFolder
from trainkit.engines.megatron_lm.words import MegatronWords
from trainkit.engines.pair_weights import pair_weights
from trainkit.jobs.schema import Dataset, Job
from trainkit.plan.layout import padded_vocab_size

if TYPE_CHECKING:  # they import numpy, which planning does without
    from trainkit.data.order.native import SplitName
    from trainkit.data.order.resolve_pairs import SplitPair

SPLITS: tuple[SplitName, ...] = ("train", "valid", "test")
_ENDINGS = (".bin", ".idx", ".jsonl", ".json", ".zst", ".npy")


@dataclass(frozen=True)
class MegatronData:
    """What is read.

    Args:
        files: the pairs of each split, the same ones where `split` cuts them.
        split: weights of train, valid and test; None: each split has whole pairs of its own.
        mock: random tokens instead.
    """

    files: dict[SplitName, tuple[SplitPair, ...]]
    split: str | None
    mock: bool = False

    def prefixes(self) -> list[Path]:
        """Every pair once."""
        return list(dict.fromkeys(pair.prefix for each in self.files.values() for pair in each))

    def pair_files(self) -> list[Path]:
        """The two files of every pair, which every node must see."""
        return [Path(f"{prefix}{end}") for prefix in self.prefixes() for end in (".idx", ".bin")]


def data_of(job: Job) -> MegatronData:
    """What a job's dataset is to Megatron-LM.

    Raises ConfigError: a pair is not there (exit 6), or parts of a blend are cut differently,
    where the engine has one --split for all.
    """
    from trainkit.data.order.resolve_pairs import WHOLE_SPLIT, weighed_pairs

    if job.dataset.source == "mock":
        return MegatronData({}, None, mock=True)
    try:
        files = {
            split: tuple(weighed_pairs(job, job.dataset, split, by_documents=True))
            for split in SPLITS
        }
    except ConfigError:
        named = _named_pairs(job.dataset, job.cluster.root_folder)
        if not named:
            raise
        files = dict.fromkeys(SPLITS, named)
    cuts = {pair.split for each in files.values() for pair in each}
    if cuts <= set(WHOLE_SPLIT.values()):
        return MegatronData(files, None)
    if len(cuts) > 1:
        raise ConfigError(
            f"dataset '{job.dataset.name}' is cut by {' and by '.join(sorted(cuts))}, and"
            " Megatron-LM has one --split for all of a blend",
            hint="give its parts the same split, or valid_blend and test_blend",
        )
    return MegatronData(files, cuts.pop())


def _named_pairs(dataset: Dataset, root: Path) -> tuple[SplitPair, ...]:
    """The pairs that jobs.toml names one by one, whether they are there or not: a dry run shows
    where they would be read, and a start looks at them before. None where a pattern or a share of
    the files needs them to be there."""
    from trainkit.data.order.resolve_pairs import SplitPair

    if dataset.source != "indexed" or dataset.valid_files or dataset.test_files:
        return ()
    return tuple(
        SplitPair(dataset.name, prefix, dataset.split, dataset.mmap, dataset.name, None)
        for prefix in _named_prefixes(dataset, root)
    )


def _named_prefixes(dataset: Dataset, root: Path) -> list[Path]:
    from trainkit.data.fetch.ranges import expand
    from trainkit.data.sources.address import local_names

    texts = [text for given in (dataset.prefixes or dataset.urls) for text in expand(given)]
    if any(char in text for text in texts for char in "*?[{"):
        return []
    if dataset.prefixes:
        return [Path(text) for text in texts]
    corpus = DataFolder(root, dataset).corpus
    remote = [text for text in texts if not text.startswith("file://")]
    places = [Path(text.removeprefix("file://")) for text in texts if text not in remote]
    places += [corpus / name for name in local_names(remote)]
    return [place.with_suffix("") for place in places if place.suffix == ".idx"]


def put_data(words: MegatronWords, job: Job, data: MegatronData) -> None:
    """--data-path with --split, or a list for each split, or --mock-data."""
    key = f"dataset '{job.dataset.name}'"
    if words.has("data-impl"):
        words.put("data-impl", "mmap", key)
    if data.mock:
        words.put("mock-data", True, key)
        return
    if data.split is not None:
        words.put_values("data-path", _blend(words, data.files["train"]), key)
        words.put("split", data.split, key)
    else:
        for split in SPLITS:
            name = f"{split}-data-path"
            words.put_values(name, _blend(words, data.files[split]), f"{key}, {split} files")
    if words.has("data-cache-path"):
        words.put("data-cache-path", str(cache_folder(job)), key)


def cache_folder(job: Job) -> Path:
    """Where the engine keeps its indexes of samples, below the cluster's root."""
    return job.cluster.root_folder.absolute() / "data" / "megatron-lm-cache"


def _blend(words: MegatronWords, pairs: Sequence[SplitPair]) -> list[str]:
    """Prefixes, each after its weight where there are weights. All by size: the engine weighs
    them itself, by their samples; that of 2021 must be given them, and takes one prefix without."""
    prefixes = [str(pair.prefix) for pair in pairs]
    sized = all(pair.weight is None for pair in pairs)
    if sized and (len(pairs) == 1 or words.table.version != "2021"):
        return prefixes
    weights = pair_weights(pairs)
    return [
        word
        for weight, prefix in zip(weights, prefixes, strict=True)
        for word in (repr(weight), prefix)
    ]


def put_tokenizer(words: MegatronWords, job: Job) -> None:
    """The vocabulary. The engine makes no tokens: it needs their number, and which of them ends a
    document. GPT-2's files are given to GPT2BPETokenizer where the version reads them (from 0.17
    on it asks a hub for "gpt2" first); else NullTokenizer says both numbers."""
    if words.given("tokenizer-type"):
        return
    _refuse_suffixes(words, job.dataset)
    tokenizer = job.dataset.tokenizer
    if tokenizer is not None and tokenizer.type == "gpt2" and _reads_gpt2(words):
        _put_gpt2(words, job)
        return
    vocab = job.model.vocab_size or (tokenizer.vocab_size if tokenizer else None)
    name = tokenizer.name if tokenizer else job.dataset.name
    if vocab is None:
        words.refuse(
            f"tokenizers.{name}: how many ids it has is not known before it is read",
            f"set tokenizers.{name}.vocab_size",
        )
        return
    if not words.has("vocab-size"):
        words.refuse(
            f"dataset '{job.dataset.name}': {words.version} knows GPT-2's tokenizer only",
            "use a tokenizer of type 'gpt2', or a newer version",
        )
        return
    words.put("tokenizer-type", "NullTokenizer", "the tokenizer")
    eod = _end_of_document(job)
    if words.has("null-tokenizer-eod-id"):
        words.put("vocab-size", vocab, "model.vocab_size")
        words.put("null-tokenizer-eod-id", vocab - 1 if eod is None else eod, "the tokenizer")
        return
    # its own end-of-document id comes on top
    words.put("vocab-size", vocab - 1, "model.vocab_size")
    reads_it = [
        key
        for key in ("reset_attention_mask", "reset_position_ids", "eod_mask_loss")
        if getattr(job.training, key)
    ]
    if reads_it and eod is not None and eod != vocab - 1:
        words.refuse(
            f"training.{reads_it[0]}: NullTokenizer of {words.version} takes the last id,"
            f" {vocab - 1}, for the end of a document, which is {eod}",
            "give engine_args tokenizer-type and tokenizer-model",
        )


def _reads_gpt2(words: MegatronWords) -> bool:
    """Whether GPT2BPETokenizer reads the two files offline: up to 0.16."""
    return words.has("legacy-tokenizer") or not words.has("tokenizer-hf-no-use-fast")


def _put_gpt2(words: MegatronWords, job: Job) -> None:
    """GPT2BPETokenizer, which is pretrain_gpt.py's own default."""
    tokenizer = job.dataset.tokenizer
    assert tokenizer is not None
    words.put("vocab-file", tokenizer.vocab_file, f"tokenizers.{tokenizer.name}.vocab_file")
    words.put("merge-file", tokenizer.merge_file, f"tokenizers.{tokenizer.name}.merge_file")
    words.put_where_known("legacy-tokenizer", True)
    there = _ids_in(tokenizer.vocab_file)
    if there is not None and tokenizer.vocab_size and there != tokenizer.vocab_size:
        words.refuse(
            f"tokenizers.{tokenizer.name}.vocab_size {tokenizer.vocab_size}: {tokenizer.vocab_file}"
            f" has {there:,} ids",
            "give the file that the tokens were made with, or correct vocab_size",
        )
    size = there or tokenizer.vocab_size
    asked = job.model.vocab_size
    if asked is None or size is None:
        return
    divisor = job.model.make_vocab_size_divisible_by
    tensor = job.parallelism.tensor_model_parallel_size
    padded = padded_vocab_size(size, divisor, tensor)
    if padded != padded_vocab_size(asked, divisor, tensor):
        words.refuse(
            f"model.vocab_size {asked}: Megatron-LM makes it {padded}, of the {size:,} ids of"
            f" tokenizers.{tokenizer.name} and make_vocab_size_divisible_by {divisor} x TP"
            f" {tensor}",
            "leave model.vocab_size out",
        )


def _ids_in(vocab_file: str | None) -> int | None:
    """How many ids a vocab.json has; None where it is not there yet."""
    if vocab_file is None or not os.path.isfile(vocab_file):
        return None
    try:
        with open(vocab_file, encoding="utf-8") as file:
            found = json.load(file)
    except ValueError:
        return None
    return len(found) if isinstance(found, dict) else None


def _end_of_document(job: Job) -> int | None:
    """The id of the token that ends a document; None where the tokenizer is not there yet."""
    tokenizer = job.dataset.tokenizer
    if tokenizer is None:
        return None
    paths = [Path(tokenizer.path)] if tokenizer.path else []
    if job.dataset.source not in ("indexed", "blend"):
        paths.append(DataFolder(job.cluster.root_folder, job.dataset).tokenizer)
    if tokenizer.vocab_file:
        paths.append(Path(tokenizer.vocab_file))
    for path in paths:
        if path.is_file():
            return _id_in(path, tokenizer.eod_token)
    return None


def _id_in(path: Path, token: str) -> int | None:
    """The id of a token in a tokenizer.json or a vocab.json; None where it has none."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    # "model" and "added_tokens" are tokens of a vocab.json too
    model = found.get("model")
    if not isinstance(model, dict):
        return _whole(found.get(token))
    for added in found.get("added_tokens", []):
        if added.get("content") == token:
            return _whole(added.get("id"))
    vocabulary = model.get("vocab")
    return _whole(vocabulary.get(token)) if isinstance(vocabulary, dict) else None


def _whole(value: object) -> int | None:
    return value if isinstance(value, int) else None


def _refuse_suffixes(words: MegatronWords, dataset: Dataset) -> None:
    """A prefix with an ending opens nothing: the engine puts .bin and .idx behind it."""
    parts = [dataset, *(part.dataset for part in dataset.blend.values())]
    for part in parts:
        for prefix in part.prefixes:
            ending = os.path.splitext(prefix)[1]
            if ending in _ENDINGS:
                words.refuse(
                    f"datasets.{part.name}.prefixes: '{prefix}' ends with {ending}",
                    f"give '{prefix.removesuffix(ending)}': the engine puts .bin and .idx behind"
                    " it",
                )
