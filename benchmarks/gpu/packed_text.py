"""The text that the proof trains on, tokenized: the guides of this checkout, as prep-data would
leave them. A copy of the packed folder where there is one, else made here."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from benchmarks.gpu.parts import PACKED_DATA
from trainkit.base.documents import document
from trainkit.base.files import write_json, write_text
from trainkit.jobs.schema import Dataset

ROOT = Path(__file__).resolve().parents[2]


END = "<|endoftext|>"


def guides() -> list[str]:
    """A document for each section of the guides: of many lengths."""
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
    sections = [part for page in pages for part in page.read_text().split("\n## ")]
    return [section for section in sections if section.strip()]


def write_text_data(root: Path, dataset: Dataset) -> None:
    """What prep-data leaves of the guides below `root`, the folder of a job's cluster."""
    from trainkit.data.indexed.paths import DataFolder

    folder = DataFolder(root, dataset)
    target = folder.manifest.parent
    packed = os.environ.get(PACKED_DATA)
    if packed:
        shutil.copytree(Path(packed), target, dirs_exist_ok=True)
    else:
        _prepare(folder.prefix, folder.tokenizer, folder.manifest, dataset)


def _prepare(prefix: Path, tokenizer: Path, manifest: Path, dataset: Dataset) -> None:
    import numpy as np

    from trainkit.data.indexed.dataset import IndexedWriter, best_dtype
    from trainkit.data.tokenizer import load_tokenizer, train_bpe

    assert dataset.tokenizer is not None
    texts = guides()
    made = train_bpe(iter(texts), dataset.tokenizer.vocab_size or 2048, END)
    write_text(tokenizer, made.to_str(pretty=True))
    read = load_tokenizer(tokenizer)
    with IndexedWriter(prefix, best_dtype(read.get_vocab_size())) as writer:
        for text in texts:
            ids = read.encode(text, add_special_tokens=False).ids
            writer.add_document(np.array([*ids, read.token_to_id(END)]))
    write_json(manifest, document("dataset/1", vocab_size=read.get_vocab_size()))
