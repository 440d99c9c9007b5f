"""step = "url": documents by the address they were read from."""

from __future__ import annotations

import re
from urllib.parse import urlsplit

from trainkit.data.curate.contract import CrawledDocument, Dropped, read_lists
from trainkit.data.text.documents import get_field
from trainkit.jobs.curation import UrlStep

_WORDS = re.compile(r"[^a-z0-9]+")


class UrlFilter:
    """Looks at domains first, then at addresses, then at the words in them. A domain of a list
    stands for its subdomains too, so that no list of public suffixes is needed."""

    def __init__(self, table: UrlStep, language: str) -> None:
        self._field = table.field
        self._domains = read_lists(table.domains)
        self._urls = read_lists(table.urls)
        self._hard = frozenset(word.lower() for word in table.words)
        self._soft = frozenset(word.lower() for word in table.soft_words)
        self._most_soft = table.max_soft_words
        self._subwords = tuple(_WORDS.sub("", word.lower()) for word in table.subwords)

    def __call__(self, document: CrawledDocument) -> Dropped | None:
        url = get_field(document.fields, self._field)
        if not isinstance(url, str) or not url:
            return Dropped("no_url", detail=f"no text under {self._field!r}")
        lower = url.lower()
        if (domain := self._listed(lower)) is not None:
            return Dropped("domain", 1, 0, domain)
        if lower in self._urls:
            return Dropped("url", 1, 0, url)
        words = _WORDS.split(lower)
        if hard := self._hard.intersection(words):
            return Dropped("hard_blacklisted", len(hard), 0, min(hard))
        soft = sum(word in self._soft for word in words)
        if soft > self._most_soft:
            return Dropped("soft_blacklisted", soft, self._most_soft)
        joined = _WORDS.sub("", lower)
        for part in self._subwords:
            if part in joined:
                return Dropped("blacklisted_subword", 1, 0, part)
        return None

    def _listed(self, url: str) -> str | None:
        """The domain of the list that the address belongs to."""
        try:
            host = urlsplit(url if "//" in url else f"//{url}").hostname or ""
        except ValueError:  # brackets that are no IPv6 address
            return None
        labels = host.rstrip(".").split(".")
        for first in range(len(labels)):
            if (domain := ".".join(labels[first:])) in self._domains:
                return domain
        return None
