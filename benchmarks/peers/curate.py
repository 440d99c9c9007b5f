"""datatrove's FineWeb pipeline on some documents: `PYTHON curate.py DOCUMENTS.jsonl MODEL.ftz
REPETITIONS` prints {"documents", "cpu", "kept", "signed"}, CPU seconds without its start.

PYTHON has datatrove 0.10 with its `processing` extra and spaCy.
"""

from __future__ import annotations

import json
import logging
import sys
import tempfile
import time
from pathlib import Path
from typing import Any


def pipeline(model: str) -> list[Any]:
    """The filters of FineWeb's example, without its lists of sites."""
    from datatrove.pipeline.filters import (
        C4QualityFilter,
        FineWebQualityFilter,
        GopherQualityFilter,
        GopherRepetitionFilter,
        LanguageFilter,
    )
    from fasttext.FastText import _FastText

    language = LanguageFilter("en")
    language.model._model = _FastText(model)  # else it is downloaded
    return [
        language,
        GopherRepetitionFilter(),
        GopherQualityFilter(),
        C4QualityFilter(filter_no_terminal_punct=False),
        FineWebQualityFilter(),
    ]


def main(path: str, model: str) -> dict[str, Any]:
    logging.disable(logging.CRITICAL)
    from datatrove.data import Document
    from datatrove.pipeline.dedup.minhash import MinhashDedupSignature

    with tempfile.TemporaryDirectory() as folder:
        filters = pipeline(model)
        signer = MinhashDedupSignature(folder)
        for step in filters:  # what they load at their first document
            list(step.run([Document("one two three", "0")]))
        signer.get_shingles("one two three four five six")
        began = time.process_time()
        data: Any = (
            Document(text=value["text"], id=str(number))
            for number, value in enumerate(map(json.loads, Path(path).read_text().splitlines()))
        )
        for step in filters:
            data = step.run(data)
        kept = list(data)
        signer.run(iter(kept), 0, 1)
        cpu = time.process_time() - began
    return {"cpu": cpu, "kept": sorted(int(document.id) for document in kept)}


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1], sys.argv[2])))
