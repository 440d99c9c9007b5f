"""step = "pii": addresses of people and machines become examples."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable

from trainkit.data.curate.contract import CrawledDocument, Dropped
from trainkit.jobs.curation import PiiStep

# what datatrove's PIIFormatter looks for and writes
_ATOM = r"[A-Za-z0-9!#$%&'*+/=?^_`{|}~-]+"
_LABEL = r"[A-Za-z0-9](?:[A-Za-z0-9-]*[A-Za-z0-9])?"
_OCTET = r"(?:25[0-5]|2[0-4][0-9]|[01]?[0-9][0-9]?)"
# its regex of e-mail addresses in two: asked at every "@", not at every letter, which would take
# hours for a megabyte of base64
LOCAL = re.compile(rf"{_ATOM}(?:\.{_ATOM})*")
DOMAIN = re.compile(
    rf"@(?:(?:{_LABEL}\.)+{_LABEL}"
    rf"|\[(?:{_OCTET}\.){{3}}(?:{_OCTET}|[A-Za-z0-9-]*[A-Za-z0-9]:)])"
)
BEGINS = re.compile(r"\b[^.]")
IPV4 = re.compile(rf"(?:{_OCTET}\.){{3}}{_OCTET}")
DOTTED = re.compile("[0-9][.][0-9]")  # a quick look: few texts have one
EMAILS = ("email@example.com", "firstname.lastname@example.org")
IPS = (
    *("22.214.171.124", "126.96.36.199", "188.8.131.52", "184.108.40.206", "220.127.116.11"),
    "18.104.22.168",
)


class PiiMask:
    """Replaces in rotation from the document's start: its text alone decides what is written."""

    def __init__(self, table: PiiStep, language: str) -> None:
        self._table = table

    def __call__(self, document: CrawledDocument) -> Dropped | None:
        if self._table.emails and "@" in document.text:
            document.text = _without_emails(document.text)
        if self._table.ips and DOTTED.search(document.text):
            document.text = IPV4.sub(_rotation(IPS, _is_public), document.text)
        return None


def _without_emails(text: str) -> str:
    kept = []
    done = low = count = 0
    for domain in DOMAIN.finditer(text):
        at = domain.start()
        # dots stand between atoms from behind, too
        local = LOCAL.match(text[low:at][::-1])
        low = at + 1
        begins = local and BEGINS.search(text, at - local.end(), at)
        if begins:
            kept += [text[done : begins.start()], EMAILS[count % len(EMAILS)]]
            done = low = domain.end()
            count += 1
    return "".join((*kept, text[done:]))


def _rotation(
    examples: tuple[str, ...], chosen: Callable[[str], bool]
) -> Callable[[re.Match[str]], str]:
    count = 0

    def replace(found: re.Match[str]) -> str:
        nonlocal count
        if not chosen(found[0]):
            return found[0]
        count += 1
        return examples[(count - 1) % len(examples)]

    return replace


def _is_public(text: str) -> bool:
    try:
        return ipaddress.ip_address(text).is_global
    except ValueError:  # "010.1.1.1" is none
        return False
