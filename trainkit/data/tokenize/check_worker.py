"""The last unit of prep-data for ready-made .bin/.idx pairs: each is checked, and the dataset's
manifest written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import xxhash

from trainkit.base.documents import document
from trainkit.base.errors import ConfigError, Exit
from trainkit.base.files import write_json
from trainkit.base.worker import ProgressCallback, run_unit
from trainkit.data.indexed.dataset import IndexedDataset, bin_path, idx_path
from trainkit.data.sums import file_sum, identity_of
from trainkit.data.tokenizer import end_of_document, load_tokenizer

BLOCK = 2**22  # tokens looked at at once: bounds memory


def work(spec: dict[str, Any], progress: ProgressCallback) -> dict[str, Any]:
    """Check the pairs against themselves and the vocabulary, then write dataset.json.

    Raises ConfigError (exit 6): a pair is damaged, or holds an id that the tokenizer does not have.
    """
    tokenizer = load_tokenizer(Path(spec["tokenizer"]))
    vocab_size = tokenizer.get_vocab_size()
    counts = {"documents": 0, "sequences": 0, "tokens": 0}
    total = sum(IndexedDataset(Path(prefix)).num_tokens for prefix in spec["prefixes"])
    done = 0
    dtypes = set()
    read = list[list[Any]]()
    for prefix in spec["prefixes"]:
        identities = [
            identity_of(path) for path in (bin_path(Path(prefix)), idx_path(Path(prefix)))
        ]
        digest = xxhash.xxh3_128()
        pair = IndexedDataset(Path(prefix))  # one at a time: maps are few
        pair.verify()
        dtypes.add(str(pair.dtype))
        for start in range(0, pair.num_tokens, BLOCK):
            block = pair.tokens[start : start + BLOCK]
            digest.update(block.data)
            highest = int(block.max())
            if highest >= vocab_size or int(block.min()) < 0:
                message = (
                    f"{bin_path(pair.prefix)} holds the id {highest} among tokens {start:,} and"
                    f" after, but {spec['tokenizer']} has {vocab_size:,} ids"
                )
                raise ConfigError(
                    message,
                    exit=Exit.STAGE_FAILED,
                    hint="name the tokenizer that these pairs were written with",
                )
            done += min(BLOCK, pair.num_tokens - start)
            progress(done, total)
        read += [
            [*identities[0], digest.hexdigest()],
            [*identities[1], file_sum(idx_path(pair.prefix))],
        ]
        counts["documents"] += pair.num_documents
        counts["sequences"] += len(pair)
        counts["tokens"] += pair.num_tokens
    manifest = document(
        "dataset/1",
        name=spec["name"],
        vocab_size=vocab_size,
        eod_id=end_of_document(tokenizer, spec["eod_token"], Path(spec["tokenizer"])),
        dtypes=sorted(dtypes),
        pairs=spec["prefixes"],
        **(counts if dtypes else {}),
    )
    write_json(Path(spec["manifest"]), manifest)
    return {**counts, "read": read}


if __name__ == "__main__":
    run_unit(work)
